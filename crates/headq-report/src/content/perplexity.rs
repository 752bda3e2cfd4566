//! Link 7, and evaluations: perplexity and bits.

use headq_lab::diagnose::data::{Diagnosis, Perplexity, PerplexityRow, Role};
use headq_lab::evaluate::{Evaluation, SchemeResult};
use headq_lab::text::TextInfo;

use super::columns::{interval, results, scheme};
use super::headline::role;
use super::provenance;
use crate::document::{Align, Block, Cell, Column, Figure, Panel, Source, Table, Text};
use crate::format::{self, nats, plural};
use crate::plot::Key;
use crate::plot::bits::{Bits, Point};

/// Roles in the order of the table, each a series of the plot.
const ROLES: [(Role, &str); 8] = [
    (Role::Dense, "Full precision"),
    (Role::Base, "Keys quantized"),
    (Role::Corrected, "Keys quantized and corrected"),
    (Role::Control, "Controls"),
    (Role::Published, "Published baselines"),
    (Role::Values, "Values quantized"),
    (Role::Full, "Keys and values quantized"),
    (Role::FullCorrected, "Keys quantized and corrected, values quantized"),
];

/// A line of the table, which is a point of the plot.
struct Line<'a> {
    number: usize,
    role: Role,
    result: &'a SchemeResult,
    row: Option<&'a PerplexityRow>,
}

/// Numbers lines in the order of the table.
fn lines<'a>(rows: impl Iterator<Item = (Role, &'a SchemeResult, Option<&'a PerplexityRow>)>) -> Vec<Line<'a>> {
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by_key(|(role, ..)| series(*role));
    let line = |(i, (role, result, row))| Line { number: i + 1, role, result, row };
    rows.into_iter().enumerate().map(line).collect()
}

fn series(role: Role) -> usize {
    ROLES.iter().position(|(r, _)| *r == role).unwrap_or(0)
}

pub fn blocks(diagnosis: &Diagnosis, source: &Source) -> Option<Vec<Block>> {
    let link: &Perplexity = diagnosis.perplexity.as_ref()?;
    let lines = lines(link.rows.iter().map(|row| (row.role, &row.result, Some(row))));
    Some(content(&lines, &diagnosis.texts, source))
}

/// An evaluation: the same without references and intervals.
pub fn evaluation(evaluation: &Evaluation, source: &Source) -> Vec<Block> {
    let lines = lines(evaluation.schemes.iter().map(|result| (role(result), result, None)));
    let mut blocks: Vec<Block> = provenance::not_held_out(evaluation.overlap.as_ref()).into_iter().collect();
    blocks.extend(content(&lines, &evaluation.texts, source));
    blocks
}

fn content(lines: &[Line], texts: &[TextInfo], source: &Source) -> Vec<Block> {
    if lines.is_empty() {
        return vec![Block::Paragraph("No scheme was evaluated.".into())];
    }
    let mut blocks = vec![Block::Figure(figure(lines, source)), Block::Table(table(lines))];
    if texts.len() > 1 {
        blocks.push(Block::Table(by_text(lines, texts)));
    }
    blocks
}

/// The roles that occur, each with its lines.
fn by_role<'a, T>(lines: &'a [Line], of: impl Fn(&'a Line) -> &'a T) -> Vec<(Option<String>, Vec<&'a T>)> {
    let own = |role: Role| lines.iter().filter(|line| line.role == role).map(&of).collect();
    ROLES.iter().map(|(role, title)| (Some(title.to_string()), own(*role))).collect()
}

fn table(lines: &[Line]) -> Table {
    let number: &[Column<Line>] = &[("no.", Align::Right, |l| l.number.to_string().into())];
    let gains: &[Column<Line>] = &[
        ("gain", Align::Right, |l| interval(l.row.and_then(|r| r.gain), nats)),
        ("gain over", Align::Left, |l| match l.row.and_then(|r| r.reference.as_deref()) {
            Some(reference) => scheme(reference),
            None => format::NONE.into(),
        }),
    ];
    Table::grouped("Every scheme.", number, by_role(lines, |line| line))
        .beside(results("", by_role(lines, |line| line.result)))
        .beside(Table::grouped("", gains, by_role(lines, |line| line)))
        .without_idle_columns()
}

fn figure(lines: &[Line], source: &Source) -> Figure {
    // Some controls must be much worse than the rest: an axis that reached them would show little else.
    let worst = lines.iter().filter(|line| line.role != Role::Control).map(|line| line.result.ppl).fold(0.0, f64::max);
    let framed = |line: &Line| line.role != Role::Control || line.result.ppl <= worst;
    let beyond: Vec<String> = lines
        .iter()
        .filter(|line| !framed(line))
        .map(|line| format!("no. {} ({})", line.number, format::perplexity(line.result.ppl)))
        .collect();
    let mut notes = vec![
        "Numbers are those of the table below; where points lie too close for one, the table has it. Lower and further to the left is \
         better."
            .to_string(),
    ];
    if !beyond.is_empty() {
        notes.push(format!("Beyond the upper end, and drawn at it: {}.", beyond.join(", ")));
    }
    let point = |line: &Line| Point {
        number: line.number,
        series: series(line.role),
        bits: line.result.cache_bits,
        perplexity: line.result.ppl,
        framed: framed(line),
    };
    let occurs = |role: Role| lines.iter().any(|line| line.role == role);
    let legend = ROLES.iter().enumerate().filter(|(_, (role, _))| occurs(*role));
    Figure {
        title: "Perplexity against cache bits per element, all in.".into(),
        notes,
        panels: vec![Panel {
            title: None,
            label: format!("Perplexity against cache bits of {}", plural(lines.len(), "scheme")),
            plot: Box::new(Bits { points: lines.iter().map(point).collect() }),
        }],
        legend: legend.map(|(i, (_, title))| (Key::Marker(i), Text::from(*title))).collect(),
        source: source.clone(),
        data: Vec::new(),
    }
}

fn by_text(lines: &[Line], texts: &[TextInfo]) -> Table {
    let titles = texts.iter().map(|text| (text.path.display().to_string(), Align::Right));
    let row = |line: &Line| -> Vec<Cell> {
        let ppl =
            |i: usize| format::maybe(line.result.nll_by_text.get(i).map(|nll| nll.exp()), format::perplexity).into();
        std::iter::once(scheme(&line.result.scheme)).chain((0..texts.len()).map(ppl)).collect()
    };
    Table::from_rows(
        "Perplexity by text.",
        std::iter::once(("scheme".to_string(), Align::Left)).chain(titles).collect(),
        lines.iter().map(row).collect(),
    )
}
