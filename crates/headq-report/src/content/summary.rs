//! What a tired reader gets in ten seconds.

use headq_lab::diagnose::data::LINKS;

use super::columns::interval;
use super::headline::Headline;
use super::provenance::architecture;
use crate::Run;
use crate::document::{Align, Block, Cell, Column, KeyNumber, Pane, Section, Table, Text};
use crate::format::{self, count, maybe, percent, rho};

/// Model and text in a line, where there is one run.
pub fn subtitle(runs: &[Run]) -> Text {
    let [run] = runs else { return Text::from("KV-cache quantization, measured where the model sees it.") };
    let (model, fingerprint) = model(run);
    Text::code(model).then(format!(" · {}", fingerprint.map(architecture).unwrap_or_default()))
}

/// The model as given, and its identity.
fn model(run: &Run) -> (&str, Option<&headq_models::Fingerprint>) {
    match (&run.diagnosis, &run.evaluation) {
        (Some(d), _) => (&d.model, Some(&d.fingerprint)),
        (None, Some(e)) => (&e.model, Some(&e.fingerprint)),
        (None, None) => ("", None),
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
    if run.diagnosis.is_some() {
        blocks.push(Block::Chain(headline.verdicts.to_vec()));
    }
    let numbers = [perplexity, correlation, counterexamples, flips];
    blocks.push(Block::KeyNumbers(numbers.iter().filter_map(|number| number(&headline)).collect()));
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
    let estimate = |i: Option<headq_lab::diagnose::data::Interval>| maybe(i.map(|i| i.estimate), rho);
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

/// A run in the joint table.
struct Row<'a> {
    name: &'a str,
    run: &'a Run,
    headline: Headline<'a>,
}

type Result<'a> = Option<&'a headq_lab::evaluate::SchemeResult>;

fn ppl(result: Result) -> Cell {
    maybe(result.map(|r| r.ppl), format::perplexity).into()
}

fn removed(result: Result) -> Cell {
    maybe(result.and_then(|r| r.excess_removed), percent).into()
}

fn joint(runs: &[Run], names: &[String]) -> Table {
    let rows: Vec<Row> =
        runs.iter().zip(names).map(|(run, name)| Row { name, run, headline: Headline::of(run) }).collect();
    let columns: &[Column<Row>] = &[
        ("run", Align::Left, |r| Text::strong(r.name).into()),
        ("model", Align::Left, |r| {
            let (model, fingerprint) = model(r.run);
            Text::code(model).then(fingerprint.map(|f| format!(" ({})", f.architecture)).unwrap_or_default()).into()
        }),
        ("dense ppl", Align::Right, |r| ppl(r.headline.dense)),
        ("quantized ppl", Align::Right, |r| ppl(r.headline.base)),
        ("query-pca ppl", Align::Right, |r| ppl(r.headline.query_pca)),
        ("excess removed", Align::Right, |r| removed(r.headline.query_pca)),
        ("score-optimal ppl", Align::Right, |r| ppl(r.headline.score_optimal)),
        ("excess removed", Align::Right, |r| removed(r.headline.score_optimal)),
        ("ρ Fisher, KL", Align::Right, |r| interval(r.headline.pooled.and_then(|p| p.operator), rho)),
        ("ρ MSE, KL", Align::Right, |r| interval(r.headline.pooled.and_then(|p| p.storage), rho)),
        ("counterexamples", Align::Right, |r| interval(r.headline.counterexample_share, percent)),
        ("flips, quantized", Align::Right, |r| maybe(r.headline.flips[0], percent).into()),
        ("flips, corrected", Align::Right, |r| maybe(r.headline.flips[1], percent).into()),
    ];
    let verdicts = |row: &Row| row.headline.verdicts.map(Cell::Verdict).to_vec();
    let links = LINKS.iter().enumerate().map(|(i, (_, title, _))| (format!("{} {title}", i + 1), Align::Center));
    let chain = Table::from_rows("", links.collect(), rows.iter().map(verdicts).collect());
    let caption = "Every run in a row: perplexity in full precision, with quantized keys, and corrected in two bases; Spearman's ρ \
                   with attention KL; share of pairs that are counterexamples; share of queries whose most attended token changes; \
                   and the verdicts of the seven links.";
    Table::of(caption, columns, &rows).beside(chain)
}
