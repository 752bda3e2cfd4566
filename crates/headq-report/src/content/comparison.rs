//! Bases side by side in one scheme.

use headq_lab::compare::data::{Angles, ComparedBasis, Comparison, Estimate, PairAngles, Ratio};
use headq_lab::evaluate::SchemeResult;

use super::columns::{interval, results};
use super::provenance;
use crate::document::{Align, Block, Cell, Column, Table, Text};
use crate::format::{self, maybe, nats, percent};

/// Everything that a comparison says.
pub fn blocks(comparison: &Comparison, command: &str) -> Vec<Block> {
    let mut blocks = vec![Block::Paragraph(provenance::of_comparison(comparison, command))];
    blocks.extend(
        provenance::not_held_out(comparison.overlap.as_ref()).or_else(|| seen(comparison).map(Block::Paragraph)),
    );
    blocks.push(Block::Table(measured(comparison)));
    blocks.push(Block::Table(against(
        "Against the first basis, paired by window and by head. Ratios below 1: smaller errors than the first.",
        &comparison.bases,
        |basis| &basis.to_first,
    )));
    blocks.push(Block::Table(against(
        "Against the scheme without a correction, in the same way.",
        &comparison.bases,
        |basis| &basis.to_base,
    )));
    if !comparison.angles.is_empty() {
        blocks.push(Block::Table(angles(comparison)));
    }
    blocks
}

/// The same of a comparison that an older version made.
fn seen(comparison: &Comparison) -> Option<Text> {
    let by: Vec<String> = comparison.seen_by.iter().map(|s| format!("{} by {}", s.text, s.artifact)).collect();
    comparison.seen.then(|| Text::strong("Not held out:").then(format!(" texts were seen before ({}).", by.join("; "))))
}

/// A basis by its name, and how it was made.
fn label(basis: &ComparedBasis) -> Text {
    let family = if basis.name == basis.family { String::new() } else { format!(" ({})", basis.family) };
    let loss = basis.loss.as_ref().map_or(String::new(), |loss| format!(", trained on {loss}"));
    Text::code(&basis.name).then(format!("{family}{loss}"))
}

/// Dense, base and every basis: name, rank and what it captures, then perplexity, bits and errors.
fn measured(comparison: &Comparison) -> Table {
    type Row<'a> = (Text, Option<&'a ComparedBasis>);
    let columns: &[Column<Row>] = &[
        ("basis", Align::Left, |(name, _)| name.clone().into()),
        ("rank", Align::Right, |(_, basis)| basis.map_or(format::NONE.into(), |b| format::count(b.rank as u64)).into()),
        ("captured", Align::Right, |(_, basis)| basis.map_or(format::NONE.into(), |b| estimate(&b.captured, percent))),
    ];
    let mut rows: Vec<Row> = vec![("dense".into(), None), ("no correction".into(), None)];
    rows.extend(comparison.bases.iter().map(|basis| (label(basis), Some(basis))));
    let mut schemes: Vec<&SchemeResult> = vec![&comparison.dense, &comparison.base];
    schemes.extend(comparison.bases.iter().map(|basis| &basis.result));
    let caption = Text::from("Bases in place of the side code of ").then_code(&comparison.scheme).then(".");
    Table::of(caption, columns, &rows).beside(results("", vec![(None, schemes)])).without_idle_columns()
}

/// A row of differences, with its basis.
type Difference<'a> = (&'a ComparedBasis, &'a headq_lab::compare::data::Against);

fn against(
    caption: &str,
    bases: &[ComparedBasis],
    of: fn(&ComparedBasis) -> &headq_lab::compare::data::Against,
) -> Table {
    let columns: &[Column<Difference>] = &[
        ("basis", Align::Left, |(basis, _)| label(basis).into()),
        ("Δnll", Align::Right, |(_, a)| estimate(&a.nll, nats)),
        ("captured", Align::Right, |(_, a)| estimate(&a.captured, |v| format::signed(100.0 * v, 1) + " %")),
        ("KL ratio", Align::Right, |(_, a)| of_means(&a.kl)),
        ("KL ratio by head", Align::Right, |(_, a)| estimate(&a.kl.by_head, ratio)),
        ("heads better", Align::Right, |(_, a)| maybe(a.kl.heads_better, percent).into()),
        ("Fisher ratio", Align::Right, |(_, a)| of_means(&a.fisher)),
        ("output error ratio", Align::Right, |(_, a)| of_means(&a.output_error)),
        ("key MSE ratio", Align::Right, |(_, a)| of_means(&a.key_mse)),
    ];
    let rows: Vec<Difference> = bases.iter().map(|basis| (basis, of(basis))).collect();
    Table::of(caption.to_string(), columns, &rows).without_idle_columns()
}

fn of_means(value: &Ratio) -> Cell {
    estimate(&value.of_means, ratio)
}

fn ratio(value: f64) -> String {
    format::fixed(value, 3)
}

/// An estimate with its interval, or alone where windows or heads were too few for one.
fn estimate(value: &Estimate, show: fn(f64) -> String) -> Cell {
    match value.interval() {
        Some(bounded) => interval(Some(bounded), show),
        None => maybe(value.estimate, show).into(),
    }
}

/// Principal angles of every pair of bases.
fn angles(comparison: &Comparison) -> Table {
    let name = |i: usize| comparison.bases.get(i).map_or(Text::default(), label);
    let row = |pair: &PairAngles, span: &str, angles: &Angles| -> Vec<Cell> {
        let median: Vec<String> = angles.median.iter().map(|a| degrees(*a)).collect();
        vec![
            name(pair.first).into(),
            name(pair.second).into(),
            span.into(),
            pair.scope.as_str().into(),
            median.join(" · ").into(),
            maybe(angles.largest, degrees).into(),
        ]
    };
    let rows = comparison.angles.iter().flat_map(|pair| {
        let encoders = pair.encoder.as_ref().map(|angles| row(pair, "encoders", angles));
        [Some(row(pair, "decoders", &pair.decoder)), encoders].into_iter().flatten()
    });
    let columns = [
        ("basis", Align::Left),
        ("other", Align::Left),
        ("span of", Align::Left),
        ("heads", Align::Left),
        ("median angles, degrees", Align::Right),
        ("largest", Align::Right),
    ];
    Table::from_rows(
        "Principal angles between the subspaces, closest direction first: median over heads, and the largest of any head. Every head's \
         are in comparison.json.",
        columns.map(|(title, align)| (title.to_string(), align)).to_vec(),
        rows.collect(),
    )
}

fn degrees(angle: f64) -> String {
    format::fixed(angle, 1)
}
