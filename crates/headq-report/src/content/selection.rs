//! Link 1, on values: which tokens get more bits.

use headq_lab::diagnose::data::{Selection, SelectionRival};

use super::columns::{bits, interval, number};
use crate::document::{Align, Block, Column, Table, Text};
use crate::format::{self, maybe, percent, plural};

/// A sentence for each number of bits, and a table of all comparisons.
pub fn blocks(selections: &[Selection]) -> Vec<Block> {
    let compared = selections.iter().filter(|selection| !selection.others.is_empty());
    let readings = compared.map(|selection| Block::Paragraph(reading(selection)));
    readings.chain([Block::Table(duels(selections))]).collect()
}

/// What a comparison with `a2` says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Better,
    Worse,
    Open,
}

/// `a2` is better or worse where the whole interval says so.
fn outcome(rival: &SelectionRival) -> Outcome {
    match rival.log_ratio {
        Some(ratio) if ratio.low > 0.0 => Outcome::Better,
        Some(ratio) if ratio.high < 0.0 => Outcome::Worse,
        _ => Outcome::Open,
    }
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Outcome::Better => "a2 is better",
            Outcome::Worse => "a2 is worse",
            Outcome::Open => "not decided",
        }
    }
}

/// Whether `a2` wins at one number of bits, in a sentence.
fn reading(selection: &Selection) -> Text {
    let clause = |text: &str, wanted: Outcome| {
        let rivals = selection.others.iter().filter(|rival| outcome(rival) == wanted);
        let names: Vec<&str> = rivals.map(|rival| rival.policy.as_str()).collect();
        (!names.is_empty()).then(|| format!("{text} {}", names.join(", ")))
    };
    let clauses = [
        clause("better than", Outcome::Better),
        clause("worse than", Outcome::Worse),
        clause("not clearly different from", Outcome::Open),
    ];
    let wins = selection.others.iter().all(|rival| outcome(rival) == Outcome::Better);
    let verdict = if wins { "beats every other selection" } else { "does not beat every other selection" };
    Text::from(format!("At {} on average, ", plural(selection.bits as usize, "bit"))).then_code("a2").then(format!(
        " {verdict} on readout error: {}.",
        clauses.into_iter().flatten().collect::<Vec<String>>().join("; ")
    ))
}

/// A rival at its number of bits.
struct Duel<'a>(&'a Selection, &'a SelectionRival);

fn duels(selections: &[Selection]) -> Table {
    let columns: &[Column<Duel>] = &[
        ("against", Align::Left, |d| Text::code(&d.1.policy).into()),
        ("code bits", Align::Right, |d| bits(d.1.code_bits)),
        ("its readout error", Align::Right, |d| number(Some(d.1.readout))),
        ("of a2", Align::Right, |d| number(Some(d.0.a2))),
        ("ln ratio", Align::Right, |d| interval(d.1.log_ratio, |v| format::signed(v, 3))),
        ("heads won", Align::Right, |d| maybe(d.1.heads_won, percent).into()),
        ("outcome", Align::Left, |d| outcome(d.1).name().into()),
    ];
    let duels: Vec<Vec<Duel>> = selections.iter().map(|s| s.others.iter().map(|r| Duel(s, r)).collect()).collect();
    let title = |s: &Selection| Some(format!("{} on average", plural(s.bits as usize, "bit")));
    let groups = selections.iter().zip(&duels).map(|(s, duels)| (title(s), duels.iter().collect())).collect();
    let caption = "Which values get more bits, at equal mean bits: readout error (E5), mean over heads. Ln ratio: mean over heads of \
                   ln(E5 of the other / E5 of a2), above 0 where a2 is better.";
    Table::grouped(caption, columns, groups)
}
