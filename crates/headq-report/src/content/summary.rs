//! What a tired reader gets in ten seconds.

use std::path::Path;

use headq_lab::diagnose::data::{Interval, LINKS};
use headq_lab::evaluate::SchemeResult;
use headq_lab::finetune::LayerSummary;
use headq_lab::sweep::data::{Coded, Row as SweepRow, Sweep};

use super::headline::Headline;
use super::provenance::{self, architecture};
use crate::document::{Align, Block, Cell, Column, KeyNumber, Pane, Section, Table, Text};
use crate::format::{self, count, maybe, percent, rho};
use crate::{Finetuning, Run};

/// Model and text in a line, where there is one run.
pub fn subtitle(runs: &[Run]) -> Text {
    let [run] = runs else { return Text::from("KV-cache quantization, measured where the model sees it.") };
    let (model, fingerprint) = model(run);
    Text::code(model).then(format!(" · {}", fingerprint.map(architecture).unwrap_or_default()))
}

/// The model as given, and its identity.
fn model(run: &Run) -> (&str, Option<&headq_models::Fingerprint>) {
    if let Some(sweep) = &run.sweep {
        return (&sweep.model, Some(&sweep.fingerprint));
    }
    match (&run.diagnosis, &run.evaluation, &run.comparison, run.finetunings.first()) {
        (Some(d), ..) => (&d.model, Some(&d.fingerprint)),
        (None, Some(e), ..) => (&e.model, Some(&e.fingerprint)),
        (None, None, Some(c), _) => (&c.model, Some(&c.fingerprint)),
        (None, None, None, Some(f)) => (&f.summary.model, Some(&f.summary.fingerprint)),
        (None, None, None, None) => ("", None),
    }
}

/// One run: its verdicts and the numbers that sum them up. Several: a row for each.
pub fn section(runs: &[Run], names: &[String]) -> Section {
    let blocks = match runs {
        [run] => one(run),
        _ => vec![Block::Table(joint(runs, names))],
    };
    Section { id: "summary", title: "Summary".into(), claim: None, panes: vec![Pane { run: None, blocks }] }
}

fn one(run: &Run) -> Vec<Block> {
    let headline = Headline::of(run);
    let mut blocks = Vec::new();
    if let Some(diagnosis) = &run.diagnosis {
        blocks.extend(provenance::not_held_out(diagnosis.overlap.as_ref()));
        blocks.push(Block::Chain(headline.verdicts.to_vec()));
    }
    let numbers = [perplexity, correlation, counterexamples, flips];
    let numbers = numbers.iter().filter_map(|number| number(&headline));
    let numbers = numbers.chain(run.finetunings.iter().map(trained)).chain(run.sweep.iter().flat_map(swept));
    blocks.push(Block::KeyNumbers(numbers.collect()));
    blocks
}

fn perplexity(headline: &Headline) -> Option<KeyNumber> {
    let short = |ppl: f64| if ppl < 1e5 { format::fixed(ppl, 2) } else { format::number(ppl) };
    let dense = short(headline.dense?.ppl);
    let base = headline.base?;
    Some(match headline.corrected() {
        Some(corrected) => KeyNumber {
            name: "Perplexity: dense → quantized → corrected",
            value: format!("{dense} → {} → {}", short(base.ppl), short(corrected.ppl)),
            detail: Text::from(format!("{} of the excess removed by ", maybe(corrected.excess_removed, percent)))
                .then_code(&corrected.scheme),
        },
        None => KeyNumber {
            name: "Perplexity: dense → quantized",
            value: format!("{dense} → {}", short(base.ppl)),
            detail: Text::code(&base.scheme),
        },
    })
}

fn correlation(headline: &Headline) -> Option<KeyNumber> {
    let pooled = headline.pooled?;
    let estimate = |i: Option<Interval>| maybe(i.map(|i| i.estimate), rho);
    Some(KeyNumber {
        name: "ρ with attention KL: Fisher error, storage MSE",
        value: format!("{} vs {}", estimate(pooled.operator), estimate(pooled.storage)),
        detail: format!(
            "difference {}, over {}",
            format::interval(pooled.difference, rho),
            format::plural(pooled.points, "point")
        )
        .into(),
    })
}

fn counterexamples(headline: &Headline) -> Option<KeyNumber> {
    let (found, pairs) = headline.counterexamples?;
    Some(KeyNumber {
        name: "Counterexamples to storage MSE",
        value: count(found as u64),
        detail: format!(
            "of {} of equal budget, {}",
            format::plural(pairs, "pair"),
            format::interval(headline.counterexample_share, percent)
        )
        .into(),
    })
}

fn flips(headline: &Headline) -> Option<KeyNumber> {
    let [base, corrected] = headline.flips;
    base.or(corrected)?;
    Some(KeyNumber {
        name: "Most attended token changed: quantized → corrected",
        value: format!("{} → {}", maybe(base, percent), maybe(corrected, percent)),
        detail: "of the queries that read a coded key".into(),
    })
}

fn trained(finetuning: &Finetuning) -> KeyNumber {
    let layers = &finetuning.summary.layers;
    let mean =
        |loss: fn(&LayerSummary) -> f64| format::number(layers.iter().map(loss).sum::<f64>() / layers.len() as f64);
    KeyNumber {
        name: "Held-out loss: no correction → initial basis → trained",
        value: format!("{} → {} → {}", mean(|l| l.uncorrected), mean(|l| l.initial), mean(|l| l.best)),
        detail: Text::code(&finetuning.summary.scheme),
    }
}

/// How many schemes are on the front of each kind, and where it begins and ends.
fn swept(sweep: &Sweep) -> Vec<KeyNumber> {
    let number = |(kv, name): (Coded, &'static str)| {
        let rows: Vec<&SweepRow> = sweep.rows.iter().filter(|row| row.kv == kv).collect();
        let front: Vec<&&SweepRow> = rows.iter().filter(|row| row.front_ppl).collect();
        let ends =
            |row: &SweepRow| format!("{} bits: {} ", format::fixed(row.cache_bits, 2), format::percent(row.excess));
        Some(KeyNumber {
            name,
            value: format!("{} of {}", count(front.len() as u64), count(rows.len() as u64)),
            detail: Text::from(ends(front.first()?))
                .then_code(&front.first()?.scheme)
                .then(format!(" to {}", ends(front.last()?)))
                .then_code(&front.last()?.scheme),
        })
    };
    let kinds = [(Coded::K, "Schemes on the front, keys only"), (Coded::Kv, "Schemes on the front, keys and values")];
    kinds.into_iter().filter_map(number).collect()
}

/// A run in the joint table.
struct Row<'a> {
    name: &'a str,
    run: &'a Run,
    headline: Headline<'a>,
}

/// The last part of the model's path, and its architecture.
fn short_model(run: &Run) -> [String; 2] {
    let (model, fingerprint) = model(run);
    let name = Path::new(model).file_name().map_or(model.into(), |name| name.to_string_lossy().into_owned());
    [name, fingerprint.map_or(String::new(), |f| f.architecture.clone())]
}

fn ppl(result: Option<&SchemeResult>) -> Cell {
    maybe(result.map(|r| r.ppl), format::perplexity).into()
}

/// Perplexity with the share of the excess that is removed.
fn corrected(result: Option<&SchemeResult>) -> Cell {
    match result.map(|r| (r.ppl, r.excess_removed)) {
        Some((ppl, Some(removed))) => format!("{} ({})", format::perplexity(ppl), percent(removed)).into(),
        _ => ppl(result),
    }
}

fn estimate(interval: Option<Interval>, show: fn(f64) -> String) -> Cell {
    maybe(interval.map(|i| i.estimate), show).into()
}

/// The numbers and verdicts of all runs.
fn joint(runs: &[Run], names: &[String]) -> Table {
    let rows: Vec<Row> =
        runs.iter().zip(names).map(|(run, name)| Row { name, run, headline: Headline::of(run) }).collect();
    let columns: &[Column<Row>] = &[
        ("run", Align::Left, |r| Text::strong(r.name).into()),
        ("model", Align::Left, |r| Text::code(&short_model(r.run)[0]).into()),
        ("architecture", Align::Left, |r| short_model(r.run)[1].as_str().into()),
        ("dense ppl", Align::Right, |r| ppl(r.headline.dense)),
        ("quantized ppl", Align::Right, |r| ppl(r.headline.base)),
        ("query-pca ppl (excess removed)", Align::Right, |r| corrected(r.headline.query_pca)),
        ("score-optimal ppl (excess removed)", Align::Right, |r| corrected(r.headline.score_optimal)),
        ("ρ Fisher", Align::Right, |r| estimate(r.headline.pooled.and_then(|p| p.operator), rho)),
        ("ρ MSE", Align::Right, |r| estimate(r.headline.pooled.and_then(|p| p.storage), rho)),
        ("counter-examples", Align::Right, |r| estimate(r.headline.counterexample_share, percent)),
        ("route flips", Align::Right, |r| r.headline.flips.map(|share| maybe(share, percent)).join(" → ").into()),
    ];
    let links = (1..=LINKS.len()).map(|number| (number.to_string(), Align::Center));
    let verdicts = rows.iter().map(|row| row.headline.verdicts.map(Cell::Verdict).to_vec());
    let chain = Table::from_rows("", links.collect(), verdicts.collect());
    let titles: Vec<String> = LINKS.iter().enumerate().map(|(i, (_, title, _))| format!("{} {title}", i + 1)).collect();
    let caption = format!(
        "A row for each run. Perplexity in full precision, with quantized keys, and corrected in two bases; Spearman's ρ of Fisher \
         error and of storage MSE with attention KL; share of pairs that are counterexamples; share of queries whose most attended \
         token changes, quantized → corrected; verdicts of the links {} (✓ supported, ✗ not supported, ? inconclusive, – not taken).",
        titles.join(", ")
    );
    Table::of(caption, columns, &rows).beside(chain)
}
