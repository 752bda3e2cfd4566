//! Link 5: the correction with its sign flipped.

use headq_lab::diagnose::data::{Diagnosis, Direction, Interval};

use super::columns::{interval, results};
use crate::document::{Align, Block, Column, Source, Table};
use crate::format::{self, nats};

pub fn blocks(diagnosis: &Diagnosis, _: &Source) -> Option<Vec<Block>> {
    let link = diagnosis.direction.as_ref()?;
    Some(vec![Block::Table(losses(link)), Block::Table(schemes(link))])
}

/// A difference of losses.
type Difference = (&'static str, Option<Interval>);

fn losses(link: &Direction) -> Table {
    const COLUMNS: &[Column<Difference>] =
        &[("difference", Align::Left, |d| d.0.into()), ("nats per token", Align::Right, |d| interval(d.1, nats))];
    let differences = [
        ("quantizing adds (base minus dense)", link.base_loss),
        ("the correction takes away (base minus corrected)", link.corrected_gain),
        ("the flipped correction adds (flipped minus base)", link.flipped_loss),
    ];
    let ratio = match (link.flipped_loss, link.base_loss) {
        (Some(flipped), Some(base)) if base.estimate != 0.0 => format::number(flipped.estimate / base.estimate),
        _ => format::NONE.into(),
    };
    let caption = format!(
        "Mean differences of the loss, by window. What the flipped correction adds is {ratio} times what quantizing adds."
    );
    Table::of(caption, COLUMNS, &differences)
}

fn schemes(link: &Direction) -> Table {
    const COLUMNS: &[Column<&str>] = &[("keys", Align::Left, |name| (*name).into())];
    let names = ["dense", "no correction", "correction", "sign flipped"];
    let schemes = vec![&link.dense, &link.base, &link.corrected, &link.flipped];
    Table::of("The four schemes.", COLUMNS, &names).beside(results("", vec![(None, schemes)])).without_idle_columns()
}
