//! The HTML report: complete, self-contained, and safe with anything that a run may hold.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::*;
use headq_lab::compare::data::Comparison;
use headq_lab::diagnose::data::{LINKS, Role};
use headq_lab::finetune::Measurement;
use headq_report::{Run, html, markdown};

const COMMAND: &str = "headq report runs/usual --out usual.html";

fn usual() -> Run {
    diagnosed("usual", SMALL)
}

/// One, several, and every extreme run, by name.
fn documents() -> Vec<(String, Vec<Run>)> {
    let alone = extremes().into_iter().map(|(name, run)| (name.to_string(), vec![run]));
    let together = vec![
        ("usual".to_string(), vec![usual()]),
        ("evaluated".to_string(), vec![evaluated()]),
        ("compared".to_string(), vec![compared()]),
        ("trained".to_string(), vec![finetuned()]),
        ("both".to_string(), vec![Run { evaluation: Some(evaluation(SMALL)), ..usual() }]),
        ("mixed".to_string(), vec![usual(), evaluated(), compared(), diagnosed("usual", LARGE)]),
        ("no runs".to_string(), vec![]),
        ("all".to_string(), extremes().into_iter().map(|(_, run)| run).collect()),
    ];
    alone.chain(together).collect()
}

/// Everything between one piece of text and the next occurrence of another.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Vec<&'a str> {
    text.split(from).skip(1).map(|rest| rest.split(to).next().unwrap()).collect()
}

/// Names of the tags in order, closing ones with their slash; checks that attributes are quoted.
fn tags(page: &str) -> Vec<String> {
    let without_style = page.split("<style>").next().unwrap().to_string() + page.split("</style>").nth(1).unwrap();
    without_style
        .split('<')
        .skip(1)
        .map(|tag| {
            let tag = tag.split('>').next().unwrap();
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag.split([' ', '\n']).next().unwrap().to_string();
            if tag.ends_with('/') { format!("{name}/") } else { name }
        })
        .collect()
}

#[test]
fn elements_are_balanced() {
    const VOID: [&str; 3] = ["!DOCTYPE", "meta", "wbr"];
    for (name, runs) in documents() {
        let mut open: Vec<String> = Vec::new();
        for tag in tags(&html(&runs, COMMAND)) {
            if let Some(closed) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(closed), "{name}");
            } else if !tag.ends_with('/') && !VOID.contains(&tag.as_str()) {
                open.push(tag);
            }
        }
        assert!(open.is_empty(), "{name}: {open:?}");
    }
}

#[test]
fn nothing_is_fetched_and_nothing_runs() {
    for (name, runs) in documents() {
        let page = html(&runs, COMMAND);
        for sign in ["http:", "https:", "//", "url(", "@import", "<link", "<img", "<iframe", "<object", "src="] {
            assert!(!page.contains(sign), "{name}: {sign}");
        }
        // Text from outside is escaped: `<script>` in a name is no element.
        assert!(!tags(&page).iter().any(|tag| tag == "script"), "{name}");
        let mut attributes = page.split("=\"").filter_map(|before| before.rsplit([' ', '\n']).next());
        assert!(!attributes.any(|attribute| attribute.starts_with("on")), "{name}: an attribute that runs");
    }
}

#[test]
fn every_figure_says_where_it_comes_from() {
    let page = html(&[usual()], COMMAND);
    let captions = between(&page, "<figcaption>", "</figcaption>");
    assert_eq!(captions.len(), page.matches("<figure>").count());
    assert_eq!(captions.len(), 8);
    let diagnosis = usual().diagnosis.unwrap();
    for caption in captions {
        let plain = caption.replace("<wbr>", "");
        for stated in [
            diagnosis.model.as_str(),
            "texts/wiki.test.raw",
            "8,176 tokens",
            "windows of 512",
            "seed 1",
            diagnosis.command.as_str(),
            COMMAND,
        ] {
            assert!(plain.contains(stated), "'{stated}' in {plain}");
        }
    }
    let evaluated = html(&[evaluated()], COMMAND).replace("<wbr>", "");
    let caption = between(&evaluated, "<figcaption>", "</figcaption>")[0].to_string();
    assert!(["checkpoints/evaluated", "8,176 tokens", "seed 1", COMMAND].iter().all(|stated| caption.contains(stated)));
}

#[test]
fn every_link_shows_its_verdict_and_what_would_change_it() {
    let page = html(&[usual()], COMMAND);
    let diagnosis = usual().diagnosis.unwrap();
    for ((id, title, claim), judgement) in LINKS.iter().zip(diagnosis.judgements()) {
        let section = between(&page, &format!("<section id=\"{id}\">"), "</section>")[0];
        let judgement = judgement.unwrap();
        assert!(section.contains(title) && section.contains(claim), "{id}");
        assert!(section.contains(judgement.verdict.name()), "{id}");
        assert!(section.contains("What would change it"), "{id}");
        assert!(page.contains(&format!("href=\"#{id}\"")), "{id} is linked from the summary");
    }
    let summary = between(&page, "<section id=\"summary\">", "</section>")[0];
    for name in ["✓</span> supported", "✗</span> not supported", "?</span> inconclusive"] {
        assert!(summary.contains(name), "{name}");
    }
    for number in ["31.70 → 36.20 → 32.50", "0.991 vs 0.871", ">134<", "14.7"] {
        assert!(summary.contains(number), "{number}");
    }
}

#[test]
fn links_that_were_not_taken_say_so() {
    let (_, nothing) = extremes().into_iter().find(|(name, _)| *name == "nothing").unwrap();
    let page = html(&[nothing], COMMAND);
    assert_eq!(page.matches("This link was not taken in this run.").count(), LINKS.len());
    assert_eq!(page.matches("<figure>").count(), 0);
}

#[test]
fn drawings_are_in_the_colours_of_the_page() {
    for (name, runs) in documents() {
        let page = html(&runs, COMMAND);
        for drawing in between(&page, "<svg", "</svg>") {
            assert!(!drawing.contains("=\"#"), "{name}: a fixed colour");
            assert!(!drawing.contains("rgb("), "{name}: a fixed colour");
        }
        let dark = page.find("prefers-color-scheme:dark").expect("dark colours");
        for variable in between(&page, "\"var(", ")") {
            let definition = format!("{variable}:#");
            assert!(page[..dark].contains(&definition) && page[dark..].contains(&definition), "{name}: {variable}");
        }
    }
}

#[test]
fn drawings_are_named_and_tables_have_captions() {
    let page = html(&[usual(), evaluated()], COMMAND);
    let drawings = between(&page, "<svg", ">");
    assert!(drawings.len() > 20);
    for drawing in drawings {
        let named = drawing.contains("role=\"img\" aria-label=\"");
        assert!(named || drawing.contains("aria-hidden=\"true\""), "{drawing}");
    }
    for table in between(&page, "<table", "</table>") {
        assert!(table.contains("<caption>") && table.contains("scope=\"col\"") && table.contains("scope=\"row\""));
    }
}

#[test]
fn names_are_text_whatever_they_hold() {
    let (_, run) = extremes().into_iter().find(|(name, _)| *name == "long-names").unwrap();
    let page = html(&[run], COMMAND);
    assert!(page.contains("&lt;script&gt;alert('1' &amp; &quot;2&quot;)"));
}

/// Words of a text.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric())
}

#[test]
fn what_is_not_finite_is_never_written() {
    for (name, runs) in documents() {
        for text in [html(&runs, COMMAND), markdown(&runs, COMMAND)] {
            let odd = words(&text).find(|word| ["NaN", "inf", "Inf", "infinity"].contains(word));
            assert_eq!(odd, None, "{name}");
        }
    }
}

#[test]
fn equal_runs_give_equal_bytes() {
    for (name, runs) in documents() {
        assert_eq!(html(&runs, COMMAND), html(&runs.clone(), COMMAND), "{name}");
        assert_eq!(markdown(&runs, COMMAND), markdown(&runs.clone(), COMMAND), "{name}");
    }
}

#[test]
fn many_points_are_sampled_and_the_caption_says_so() {
    let page = html(&[diagnosed("large", LARGE)], COMMAND);
    assert!(page.contains("Drawn are 1,500 of 20,480 points"));
    assert!(page.len() < 4_000_000, "{} bytes", page.len());
    assert!(!html(&[usual()], COMMAND).contains("Drawn are"));
}

#[test]
fn a2_is_said_to_win_only_where_it_does() {
    let page = html(&[usual()], COMMAND);
    assert!(page.contains("does not beat every other selection"), "at 2 bits recency is better and mse is open");
    assert!(page.contains(" beats every other selection"), "at 3 bits it wins");
}

#[test]
fn several_runs_have_a_row_and_a_pane_each() {
    let runs = [diagnosed("one", SMALL), diagnosed("two", SMALL), evaluated(), diagnosed("two", LARGE)];
    let page = html(&runs, COMMAND);
    let summary = between(&page, "<section id=\"summary\">", "</section>")[0];
    for name in ["one", "two (1)", "two (2)", "evaluated"] {
        assert_eq!(summary.matches(&format!("<strong>{name}</strong>")).count(), 1, "{name}");
        let panes = page.matches(&format!("<h3>{name}</h3>")).count();
        assert_eq!(panes, if name == "evaluated" { 2 } else { 8 }, "{name}");
    }
    for role in ["✓", "✗", "?", "–"] {
        assert!(summary.contains(role));
    }
    assert!(summary.contains("32.500 (81.2\u{a0}%)"));
}

#[test]
fn every_scheme_is_in_the_table_under_its_role() {
    let diagnosis = usual().diagnosis.unwrap();
    let rows = &diagnosis.perplexity.as_ref().unwrap().rows;
    let page = html(&[usual()], COMMAND).replace("<wbr>", "");
    let section = between(&page, "<section id=\"perplexity\">", "</section>")[0];
    for row in rows {
        assert!(section.contains(&format!("<code>{}</code>", row.result.scheme)), "{}", row.result.scheme);
    }
    let controls = between(section, "Controls</span></th>", "</tbody>")[0];
    let count = rows.iter().filter(|row| row.role == Role::Control).count();
    assert_eq!(controls.matches("scope=\"row\"").count(), count);
}

#[test]
fn bases_stand_side_by_side_with_their_angles_and_what_they_had_seen() {
    let page = html(&[compared()], COMMAND);
    let section = between(&page, "id=\"comparison\"", "</section>")[0];
    for part in [
        "learned.safetensors",
        "trained on kl",
        "Not held out",
        "texts/test.txt by learned.safetensors",
        "57.0\u{a0}% [56.0\u{a0}%, 58.0\u{a0}%]",
        "0.500 [0.490, 0.510]",
        "7.5 · 41.2",
        "89.5",
        "encoders",
        "headq run compared.toml",
    ] {
        assert!(section.contains(part), "{part} is not in {section}");
    }
    let held_out = Run { comparison: Some(Comparison { seen: false, ..comparison(SMALL) }), ..compared() };
    assert!(!html(&[held_out], COMMAND).contains("Not held out"));
}

#[test]
fn training_is_drawn_and_summed_up_by_layer() {
    let page = html(&[finetuned()], COMMAND).replace("<wbr>", "");
    let section = between(&page, "<section id=\"finetuning\">", "</section>")[0];
    for part in [
        "<code>kivi-2(g=32,r=32)+learned(rank=4,bits=3)</code>",
        "clip factors of the side quantizer",
        "one window of 512 tokens to train on",
        "all steps taken",
        "nothing better for a while",
        "−50.0\u{a0}%",
        "1 window of 512 to train on, 4 held out; seed 1.",
        "headq run trained.toml",
        "Training and held-out loss against the step, 31 measurements",
    ] {
        assert!(section.contains(part), "{part} is not in {section}");
    }
    let rows = between(section, "<tbody>", "</tbody>")[0].matches("scope=\"row\"").count();
    assert_eq!(rows, 4, "all layers, and each of them");
    let legend = ["training", "held out", "held out, best so far"];
    assert!(legend.iter().all(|name| section.contains(name)));
    let summary = between(&page, "<section id=\"summary\">", "</section>")[0];
    assert!(summary.contains("0.400 → 0.140 → 0.0700"), "{summary}");
    assert!(!html(&[evaluated()], COMMAND).contains("id=\"finetuning\""));
}

#[test]
fn layers_that_stopped_early_count_with_what_they_had() {
    let run = finetuned();
    let at = |layer: usize, step: usize| {
        let mut own = run.finetunings[0].measurements.iter().filter(|m| m.layer == layer && m.step <= step);
        own.next_back().unwrap().held_out
    };
    let text = markdown(std::slice::from_ref(&run), COMMAND);
    let text = text.split("Losses by step.").nth(1).unwrap();
    for step in [0, 60, 200, 600] {
        let mean = (0..3).map(|layer| at(layer, step)).sum::<f64>() / 3.0;
        let row = text.lines().find(|line| line.starts_with(&format!("| {step} | "))).unwrap();
        let shown: f64 = row.split(" | ").nth(2).unwrap().parse().unwrap();
        assert!((shown - mean).abs() < 6e-3 * mean, "step {step}: {row} and {mean}");
    }
}

#[test]
fn many_measurements_are_thinned_and_the_last_is_kept() {
    let mut run = finetuned();
    let first = run.finetunings[0].measurements[0].clone();
    run.finetunings[0].measurements = (0..=1000).map(|step| Measurement { step, ..first.clone() }).collect();
    let text = markdown(&[run], COMMAND);
    assert!(text.contains("One of 11 measurements is shown."));
    assert!(text.contains("\n| 0 | ") && text.contains("\n| 11 | ") && text.contains("\n| 1,000 | "));
    assert!(!text.contains("\n| 12 | "));
}

#[test]
fn the_paper_is_named_and_not_quoted() {
    let page = html(&[usual()], COMMAND);
    assert!(page.contains("arXiv:2605.03562") && page.contains("withdrew"));
    assert!(page.contains("Verdicts are about this model and this text only"));
}
