//! A sweep: the fronts, every scheme, and the best within budgets.

use headq_lab::sweep::data::{Best, Coded, LeftOut, Row, Sweep};
use headq_lab::sweep::table;

use super::columns::{bits, number, scheme};
use super::provenance;
use crate::document::{Align, Block, Column, Figure, Panel, Source, Table, Text};
use crate::format::{self, plural};
use crate::plot::Key;
use crate::plot::front::{Cost, Front, Point};

/// A name, and which families it is of.
type Series = (&'static str, fn(&str) -> bool);

/// Kinds of schemes by how their families are called, each a series of the plots; the first that fits.
const SERIES: [Series; 8] = [
    ("kivi", |f| f == "kivi"),
    ("token", |f| f == "token"),
    ("klt", |f| f == "klt" || f == "klt static"),
    ("klt in nats", |f| f.starts_with("klt in nats") && !f.contains('+')),
    ("rotated", |f| f == "rotated"),
    ("corrected", |f| f.contains('+')),
    ("others", |_| true),
    ("score-aware rounding", |f| f.ends_with("score-aware")),
];

/// The series of a family, whatever its values.
fn series(family: &str) -> usize {
    let keys = family.split('/').next().unwrap_or(family);
    let last = SERIES.len() - 1;
    if SERIES[last].1(keys) { last } else { SERIES.iter().position(|(_, of)| of(keys)).unwrap_or(last) }
}

pub fn blocks(sweep: &Sweep, source: &Source) -> Vec<Block> {
    let mut blocks: Vec<Block> = provenance::not_held_out(sweep.overlap.as_ref()).into_iter().collect();
    blocks.push(Block::Figure(figure(sweep, source)));
    if !sweep.budgets.is_empty() {
        blocks.push(Block::Table(budgets(sweep)));
    }
    blocks.push(Block::Table(schemes(sweep)));
    if !sweep.left_out.is_empty() {
        blocks.push(Block::Table(left_out(sweep)));
    }
    blocks
}

/// Series that occur, for the legend.
pub fn legend(sweep: &Sweep) -> Vec<(Key, &'static str)> {
    let occurs = |i: usize| sweep.rows.iter().any(|row| series(&row.family) == i);
    let series = SERIES.iter().enumerate().filter(|(i, _)| occurs(*i)).map(|(i, (name, _))| (Key::Marker(i), *name));
    series.chain([(Key::Reference, "the front")]).collect()
}

/// Excess and divergence, of keys only and of keys and values.
pub fn panels(sweep: &Sweep) -> Vec<Panel> {
    let drawn = [Coded::K, Coded::Kv].into_iter().flat_map(|kv| [(kv, Cost::Excess), (kv, Cost::Divergence)]);
    let panel = |(kv, cost): (Coded, Cost)| {
        let rows: Vec<&Row> = sweep.rows.iter().filter(|row| row.kv == kv).collect();
        let point = |row: &Row| Point {
            series: series(&row.family),
            bits: row.cache_bits,
            cost: if cost == Cost::Excess { row.excess } else { row.kl },
            on_front: if cost == Cost::Excess { row.front_ppl } else { row.front_kl },
        };
        let what = if cost == Cost::Excess { "excess perplexity" } else { "KL to dense" };
        (!rows.is_empty()).then(|| Panel {
            title: Some(kv.title().into()),
            label: format!("{}: {what} against cache bits of {}", kv.title(), plural(rows.len(), "scheme")),
            plot: Box::new(Front { points: rows.into_iter().map(point).collect(), cost }),
        })
    };
    drawn.filter_map(panel).collect()
}

fn figure(sweep: &Sweep, source: &Source) -> Figure {
    let gained: Vec<&str> = sweep.rows.iter().filter(|r| r.excess <= 0.0).map(|r| r.scheme.as_str()).collect();
    let mut notes = vec!["Large markers, and the line, are the front: no other scheme that codes the same has both no more cache bits and no \
                          higher loss. The table below has the numbers."
        .to_string()];
    if !gained.is_empty() {
        notes.push(format!("At the lower end, as there is no excess: {}.", gained.join(", ")));
    }
    Figure {
        title: "What schemes lose against cache bits per element, all in.".into(),
        notes,
        panels: panels(sweep),
        legend: legend(sweep).into_iter().map(|(key, name)| (key, Text::from(name))).collect(),
        source: source.clone(),
        data: Vec::new(),
    }
}

/// Every scheme, by what it codes and by bits.
fn schemes(sweep: &Sweep) -> Table {
    const COLUMNS: &[Column<Row>] = &[
        ("scheme", Align::Left, |r| scheme(&r.scheme)),
        ("key bits", Align::Right, |r| bits(r.key_bits)),
        ("value bits", Align::Right, |r| bits(r.value_bits)),
        ("cache bits", Align::Right, |r| format::fixed(r.cache_bits, 3).into()),
        ("ppl", Align::Right, |r| format::perplexity(r.ppl).into()),
        ("excess", Align::Right, |r| table::excess(r.excess, r.excess_se).replace('-', "\u{2212}").into()),
        ("KL to dense", Align::Right, |r| number(Some(r.kl))),
        ("front", Align::Left, |r| table::on_front(r).into()),
    ];
    let group = |kv: Coded| (Some(kv.title().to_string()), sweep.rows.iter().filter(|r| r.kv == kv).collect());
    let caption = format!(
        "Every scheme, beside a dense perplexity of {}. Excess: over that, with its standard error, paired by window. KL to dense: \
         divergence of next-token distributions from the dense model's, nats per token.",
        format::perplexity(sweep.dense.ppl)
    );
    Table::grouped(caption, COLUMNS, vec![group(Coded::K), group(Coded::Kv)])
}

fn budgets(sweep: &Sweep) -> Table {
    const COLUMNS: &[Column<Best>] = &[
        ("family", Align::Left, |b| b.family.as_str().into()),
        ("scheme", Align::Left, |b| scheme(&b.scheme)),
        ("bits", Align::Right, |b| bits(b.bits)),
        ("cache bits", Align::Right, |b| format::fixed(b.cache_bits, 3).into()),
        ("ppl", Align::Right, |b| format::perplexity(b.ppl).into()),
        ("excess", Align::Right, |b| format::percent(b.excess).into()),
        ("KL to dense", Align::Right, |b| number(Some(b.kl))),
        ("Δnll to best", Align::Right, |b| table::behind(b).into()),
        ("close", Align::Center, |b| if b.close { "✓" } else { "" }.into()),
    ];
    let mut groups: Vec<(Option<String>, Vec<&Best>)> = Vec::new();
    for best in &sweep.budgets {
        let title = Some(format!("{}, at most {} {} bits", best.kv.title(), best.budget, sweep.bits));
        match groups.last_mut() {
            Some((last, own)) if *last == title => own.push(best),
            _ => groups.push((title, vec![best])),
        }
    }
    let caption = "The best scheme of each family within a budget, best first. ✓: perplexity within 0.3 % of the best, or a loss within one \
                   standard error, paired by window. Where budgets bound code bits, schemes of larger groups keep more of a window dense: cache bits \
                   count that.";
    Table::grouped(caption, COLUMNS, groups)
}

fn left_out(sweep: &Sweep) -> Table {
    const COLUMNS: &[Column<LeftOut>] =
        &[("scheme", Align::Left, |l| scheme(&l.scheme)), ("why", Align::Left, |l| l.reason.as_str().into())];
    Table::of("Default schemes that were left out.", COLUMNS, &sweep.left_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_a_series() {
        let name = |family: &str| SERIES[series(family)].0;
        assert_eq!(name("kivi/a2"), "kivi");
        assert_eq!(name("klt static"), "klt");
        assert_eq!(name("klt in nats, searched/klt"), "klt in nats");
        assert_eq!(name("kivi score-aware/token"), "score-aware rounding");
        assert_eq!(name("token+query-pca"), "corrected");
        assert_eq!([name("grid"), name("dense/token")], ["others", "others"]);
    }
}
