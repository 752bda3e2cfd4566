//! Link 2: pairs for which storage MSE says the opposite.

use headq_lab::diagnose::data::{Counterexample, Diagnosis};

use super::columns::{number, scheme};
use crate::document::{Align, Block, Cell, Column, Source, Table, Text};
use crate::format::{self, count, percent, plural};

pub fn blocks(diagnosis: &Diagnosis, _: &Source) -> Option<Vec<Block>> {
    let link = diagnosis.counterexamples.as_ref()?;
    let found = Text::strong(count(link.count as u64)).then(format!(
        " of {} of settings with equal budgets, on the same head, are counterexamples: {}.",
        plural(link.pairs, "pair"),
        format::interval(link.share, percent)
    ));
    let caption = "The strongest counterexamples. Each line pairs the scheme that stores better with the one that reads better; \
                       numbers are those of the first, then of the second. Strength: the smaller of the ratios of KL and of output \
                       error.";
    Some(vec![Block::Paragraph(found), Block::Table(Table::of(caption, COLUMNS, &link.strongest))])
}

const COLUMNS: &[Column<Counterexample>] = &[
    ("layer", Align::Right, |c| c.layer.to_string().into()),
    ("KV head", Align::Right, |c| c.head.to_string().into()),
    ("lower MSE", Align::Left, |c| scheme(&c.stored_better)),
    ("lower KL and output error", Align::Left, |c| scheme(&c.read_better)),
    ("code bits", Align::Right, |c| pair(c.code_bits, |v| format::fixed(v, 4))),
    ("MSE (E4)", Align::Right, |c| pair(c.mse, format::number)),
    ("KL, nats (E3)", Align::Right, |c| pair(c.kl, format::number)),
    ("output error (E7)", Align::Right, |c| pair(c.output_error, format::number)),
    ("strength", Align::Right, |c| number(Some(c.strength))),
];

/// Both numbers of a pair.
fn pair([first, second]: [f64; 2], show: fn(f64) -> String) -> Cell {
    format!("{} / {}", show(first), show(second)).into()
}
