//! What a terminal shows of a comparison.

use comfy_table::{CellAlignment, Table, presets};

use super::data::{Angles, ComparedBasis, Comparison, Estimate, PairAngles};
use crate::evaluate::SchemeResult;
use crate::overlap::Overlaps;
use crate::report::number;

/// A row of the table of results: dense and base have no basis.
struct Row<'a> {
    name: String,
    result: &'a SchemeResult,
    basis: Option<&'a ComparedBasis>,
}

/// A column: its title and what it shows.
type Column = (&'static str, fn(&Row) -> String);

const COLUMNS: &[Column] = &[
    ("basis", |r| r.name.clone()),
    ("rank", |r| r.basis.map_or(NONE.into(), |b| b.rank.to_string())),
    ("key bits", |r| format!("{:.4}", r.result.key_bits)),
    ("cache bits", |r| format!("{:.3}", r.result.cache_bits)),
    ("ppl", |r| format!("{:.3}", r.result.ppl)),
    ("Δnll to first", |r| basis(r, |b| difference(&b.to_first.nll))),
    ("KL", |r| number(r.result.kl)),
    ("KL ratio", |r| basis(r, |b| ratio(&b.to_first.kl.of_means))),
    ("captured", |r| basis(r, |b| b.captured.estimate.map_or(NONE.into(), percent))),
    ("output error", |r| number(r.result.output_error)),
];

const NONE: &str = "–";

fn basis(row: &Row, show: impl Fn(&ComparedBasis) -> String) -> String {
    row.basis.map_or(NONE.into(), show)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// An estimate and, where there is one, its interval.
fn bounded(e: &Estimate, show: impl Fn(f64) -> String) -> String {
    match (e.estimate, e.low, e.high) {
        (None, ..) => NONE.into(),
        (Some(value), Some(low), Some(high)) => format!("{} [{}, {}]", show(value), show(low), show(high)),
        (Some(value), ..) => show(value),
    }
}

fn difference(e: &Estimate) -> String {
    // No difference has no sign.
    bounded(e, |v| if v == 0.0 { "0".into() } else { format!("{v:+.4}") })
}

fn ratio(e: &Estimate) -> String {
    bounded(e, |v| format!("{v:.3}"))
}

/// How a basis is called in tables: its family, and its file where one was given.
pub fn label(basis: &ComparedBasis) -> String {
    let file = (basis.name != basis.family).then_some(basis.name.as_str());
    let notes: Vec<&str> = file.into_iter().chain(basis.seen.then_some("seen")).collect();
    match notes.is_empty() {
        true => basis.family.clone(),
        false => format!("{} ({})", basis.family, notes.join(", ")),
    }
}

/// Results, one row for dense, base and each basis.
pub fn results(comparison: &Comparison) -> String {
    let c = comparison;
    let bases = c.bases.iter().map(|b| Row { name: label(b), result: &b.result, basis: Some(b) });
    let own = |name: &str, result| Row { name: name.into(), result, basis: None };
    let rows: Vec<Row> = [own("dense", &c.dense), own("no correction", &c.base)].into_iter().chain(bases).collect();
    let header: Vec<&str> = COLUMNS.iter().map(|(title, _)| *title).collect();
    grid(&header, rows.iter().map(|row| COLUMNS.iter().map(|(_, show)| show(row)).collect()), 1)
}

/// Principal angles, one row for every two bases and matrix; `None` where there is but one basis.
pub fn angles(comparison: &Comparison) -> Option<String> {
    let name = |i: usize| label(&comparison.bases[i]);
    let row = |pair: &PairAngles, span: &str, angles: &Angles| {
        let median: Vec<String> = angles.median.iter().map(|a| degrees(*a)).collect();
        let largest = angles.largest.map_or(NONE.into(), degrees);
        vec![name(pair.first), name(pair.second), span.into(), pair.scope.clone(), median.join(" "), largest]
    };
    let rows = comparison.angles.iter().flat_map(|pair| {
        let encoder = pair.encoder.as_ref().map(|angles| row(pair, "encoders", angles));
        [Some(row(pair, "decoders", &pair.decoder)), encoder].into_iter().flatten()
    });
    let header = ["basis", "other", "span of", "heads", "median angles (°)", "largest (°)"];
    (!comparison.angles.is_empty()).then(|| grid(&header, rows, 4))
}

fn degrees(angle: f64) -> String {
    format!("{angle:.2}")
}

/// A table in Markdown, whose columns after the first `words` are numbers.
fn grid(header: &[&str], rows: impl Iterator<Item = Vec<String>>, words: usize) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// What was compared, in a few lines.
pub fn provenance(comparison: &Comparison) -> Vec<String> {
    let c = comparison;
    let bos = if c.add_bos { ", each begun with BOS" } else { "" };
    let mut lines = vec![
        format!("model: {} ({})", c.model, c.fingerprint),
        format!("device: {}; seed {}; {}", c.device, c.seed, c.program),
        format!("scheme: {}", c.scheme),
        format!("{} tokens scored in windows of {}{bos}", c.tokens, c.context),
    ];
    for t in &c.texts {
        let (path, sha256) = (t.path.display(), &t.sha256[..12]);
        lines.push(format!("text: {path} ({} characters, {} tokens, sha256 {sha256})", t.chars, t.tokens));
    }
    lines.extend(c.overlap.iter().flat_map(Overlaps::lines).map(|line| format!("OVERLAP: {line}")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_with_their_intervals() {
        let e = Estimate { estimate: Some(0.5), low: Some(0.25), high: Some(0.75) };
        assert_eq!(ratio(&e), "0.500 [0.250, 0.750]");
        assert_eq!(difference(&e), "+0.5000 [+0.2500, +0.7500]");
        assert_eq!(bounded(&e, percent), "50.0 % [25.0 %, 75.0 %]");
        let alone = Estimate { low: None, ..e };
        assert_eq!((ratio(&alone), ratio(&Estimate::default())), ("0.500".into(), "–".into()));
        assert_eq!(difference(&Estimate { estimate: Some(0.0), low: None, high: None }), "0");
        assert_eq!([degrees(3e-14), degrees(45.0)], ["0.00", "45.00"]);
    }
}
