//! Link 6: queries whose most attended token changes.

use headq_lab::diagnose::data::{Diagnosis, EntropyBin, FlipResult, QueryCorrelation, RouteFlips};

use super::columns::{interval, scheme};
use crate::document::{Align, Block, Cell, Column, Figure, Panel, Source, Table, Text};
use crate::format::{self, count, maybe, percent, plural, rho};
use crate::plot::Key;
use crate::plot::bars::{Bars, Bin, SERIES};

pub fn blocks(diagnosis: &Diagnosis, source: &Source) -> Option<Vec<Block>> {
    let link = diagnosis.route_flips.as_ref()?;
    let caption = "Queries whose most attended token changed, over layers and query heads, and Spearman's ρ of Fisher error (E2) with \
                   KL (E3) over samples of queries: those that flipped, and the others.";
    Some(vec![Block::Table(Table::of(caption, FLIPS, &link.schemes)), Block::Figure(figure(link, source))])
}

const FLIPS: &[Column<FlipResult>] = &[
    ("scheme", Align::Left, |f| scheme(&f.scheme)),
    ("queries", Align::Right, |f| count(f.queries).into()),
    ("flipped", Align::Right, |f| count(f.flips).into()),
    ("share", Align::Right, |f| maybe(f.share, percent).into()),
    ("ρ, flipped", Align::Right, |f| interval(f.flipped.rho, rho)),
    ("sampled of", Align::Right, |f| sampled(&f.flipped)),
    ("ρ, not flipped", Align::Right, |f| interval(f.unflipped.rho, rho)),
    ("sampled of", Align::Right, |f| sampled(&f.unflipped)),
];

fn sampled(correlation: &QueryCorrelation) -> Cell {
    format!("{} of {}", count(correlation.sampled as u64), count(correlation.queries)).into()
}

/// Share of a bin's queries that flipped; none where there is no query.
fn share(bin: &EntropyBin) -> Option<f64> {
    (bin.queries > 0).then(|| bin.flips as f64 / bin.queries as f64)
}

/// The schemes that are drawn, and the bins that they share.
fn figure(link: &RouteFlips, source: &Source) -> Figure {
    let drawn = &link.schemes[..link.schemes.len().min(SERIES)];
    let bins = drawn.iter().map(|scheme| scheme.bins.as_slice()).max_by_key(|bins| bins.len()).unwrap_or_default();
    let bin = |(i, bin): (usize, &EntropyBin)| Bin {
        low: bin.low,
        high: bin.high,
        count: bin.queries,
        shares: drawn.iter().map(|scheme| scheme.bins.get(i).and_then(share)).collect(),
    };
    Figure {
        title: "Route flips by the entropy of the dense attention.".into(),
        notes: vec![
            "Share of each bin's queries whose most attended token changed; above the bars, the queries in the bin, where there is room."
                .into(),
        ],
        panels: vec![Panel {
            title: None,
            label: format!("Share of queries flipped by entropy, {}", plural(bins.len(), "bin")),
            plot: Box::new(Bars { bins: bins.iter().enumerate().map(bin).collect() }),
        }],
        legend: drawn.iter().enumerate().map(|(i, s)| (Key::Bar(i), Text::code(&s.scheme))).collect(),
        source: source.clone(),
        data: vec![table(&link.schemes, bins)],
    }
}

fn table(schemes: &[FlipResult], bins: &[EntropyBin]) -> Table {
    let range = |bin: &EntropyBin| format!("{} – {}", format::tick(bin.low), bin.high.map_or("∞".into(), format::tick));
    let row = |(i, bin): (usize, &EntropyBin)| -> Vec<Cell> {
        let share = |scheme: &FlipResult| maybe(scheme.bins.get(i).and_then(share), percent).into();
        [range(bin), count(bin.queries)].map(Cell::from).into_iter().chain(schemes.iter().map(share)).collect()
    };
    let titles =
        ["entropy, nats".to_string(), "queries".into()].into_iter().chain(schemes.iter().map(|s| s.scheme.clone()));
    Table::from_rows(
        "Share of queries flipped.",
        titles.map(|title| (title, Align::Right)).collect(),
        bins.iter().enumerate().map(row).collect(),
    )
}
