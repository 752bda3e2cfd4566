//! Link 4: which bases correct most.

use std::sync::Arc;

use headq_lab::diagnose::data::{Bases, Diagnosis, FamilyResult, HeadMap, RankCurve, Spectrum};

use super::columns::{interval, number, results};
use crate::document::{Align, Block, Cell, Column, Figure, Panel, Source, Table, Text};
use crate::format::{self, maybe, nats, percent, plural};
use crate::plot::Key;
use crate::plot::curves::{Curve, Curves, Kind};
use crate::plot::heat::{ColourBar, HeatMap, Scale};
use crate::plot::spectrum::Eigenvalues;

pub fn blocks(diagnosis: &Diagnosis, source: &Source) -> Option<Vec<Block>> {
    let link = diagnosis.bases.as_ref()?;
    Some(vec![
        Block::Table(families(diagnosis, link)),
        Block::Figure(ranks(link, source)),
        Block::Figure(maps(link, source)),
        Block::Figure(spectrum(&link.spectrum, source)),
    ])
}

/// A row of the table of families: dense and base have no family.
struct Row<'a> {
    family: &'a str,
    found: Option<&'a FamilyResult>,
}

fn families(diagnosis: &Diagnosis, link: &Bases) -> Table {
    let columns: &[Column<Row>] = &[
        ("family", Align::Left, |r| r.family.into()),
        ("captured", Align::Right, |r| interval(r.found.and_then(|f| f.captured), percent)),
        ("gain", Align::Right, |r| interval(r.found.and_then(|f| f.gain), nats)),
    ];
    let found = link.families.iter().map(|f| Row { family: &f.family, found: Some(f) });
    let rows: Vec<Row> =
        ["dense", "no correction"].map(|family| Row { family, found: None }).into_iter().chain(found).collect();
    let caption = format!(
        "Corrections of rank {} in {} on {}.",
        diagnosis.rank,
        plural(diagnosis.bits as usize, "bit"),
        diagnosis.base
    );
    let schemes = [&link.dense, &link.base].into_iter().chain(link.families.iter().map(|f| &f.result)).collect();
    Table::of(caption, columns, &rows).beside(results("", vec![(None, schemes)])).without_idle_columns()
}

fn ranks(link: &Bases, source: &Source) -> Figure {
    let curve = |(series, curve): (usize, &RankCurve)| {
        let points = link.ranks.iter().zip(&curve.shares).filter_map(|(rank, share)| Some((*rank as f64, (*share)?)));
        Curve { series, points: points.collect() }
    };
    let columns = link.ranks.iter().map(|rank| (format!("rank {rank}"), Align::Right));
    let share = |curve: &RankCurve, i: usize| maybe(curve.shares.get(i).copied().flatten(), percent).into();
    let row = |curve: &RankCurve| -> Vec<Cell> {
        std::iter::once(Text::code(&curve.family).into())
            .chain((0..link.ranks.len()).map(|i| share(curve, i)))
            .collect()
    };
    Figure {
        title: "Captured score error by rank, for each family of bases.".into(),
        notes: vec!["Mean over heads, on text that the bases have not seen, before side quantization.".into()],
        panels: vec![Panel {
            title: None,
            label: format!("Captured share against rank, {}", plural(link.curves.len(), "curve")),
            plot: Box::new(Curves {
                curves: link.curves.iter().enumerate().map(curve).collect(),
                kind: Kind::ShareByRank,
            }),
        }],
        legend: link.curves.iter().enumerate().map(|(i, c)| (Key::Line(i), Text::code(&c.family))).collect(),
        source: source.clone(),
        data: vec![Table::from_rows(
            "Captured share.",
            std::iter::once(("family".to_string(), Align::Left)).chain(columns).collect(),
            link.curves.iter().map(row).collect(),
        )],
    }
}

fn maps(link: &Bases, source: &Source) -> Figure {
    let values = link.maps.iter().flat_map(|map| map.fisher.iter().flatten().flatten().copied());
    let scale = Arc::new(Scale::of(values));
    let panel = |(i, map): (usize, &HeadMap)| Panel {
        title: Some(Text::from(if i == 0 { "Before: " } else { "After: " }).then_code(&map.scheme)),
        label: format!(
            "Heat map of the Fisher error by layer and KV head with {}; {}",
            map.scheme,
            extent(map).map_or("no values".into(), |(low, high)| format!(
                "from {} to {} nats",
                format::number(low),
                format::number(high)
            ))
        ),
        plot: Box::new(HeatMap { values: map.fisher.clone(), scale: scale.clone() }),
    };
    let bar = Panel {
        title: None,
        label: "Scale of the colours".into(),
        plot: Box::new(ColourBar { scale: scale.clone(), title: "Fisher error, nats" }),
    };
    let kind = if scale.is_log() { "logarithmic" } else { "linear" };
    Figure {
        title: "Score error by layer and KV head, before and after correction.".into(),
        notes: vec![format!(
            "Fisher error (E2), nats, mean over queries. One {kind} scale of colours for all maps; a dot marks a head without a value."
        )],
        panels: link.maps.iter().enumerate().map(panel).chain([bar]).collect(),
        legend: Vec::new(),
        source: source.clone(),
        data: vec![layers(&link.maps)],
    }
}

fn extent(map: &HeadMap) -> Option<(f64, f64)> {
    let values = || map.fisher.iter().flatten().flatten().copied().filter(|v| v.is_finite());
    Some((values().reduce(f64::min)?, values().reduce(f64::max)?))
}

/// Mean and extremes over the heads of each layer.
fn layers(maps: &[HeadMap]) -> Table {
    let layers = maps.iter().map(|map| map.fisher.len()).max().unwrap_or(0);
    let cell = |map: &HeadMap, layer: usize| -> Cell {
        let values: Vec<f64> = map.fisher.get(layer).into_iter().flatten().flatten().copied().collect();
        let mean = (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(*v), high.max(*v)));
        match mean {
            Some(mean) if values.len() > 1 => {
                format!("{} ({} – {})", format::number(mean), format::number(low), format::number(high)).into()
            }
            mean => number(mean),
        }
    };
    let row = |layer: usize| -> Vec<Cell> {
        std::iter::once(layer.to_string().into()).chain(maps.iter().map(|map| cell(map, layer))).collect()
    };
    let titles = std::iter::once("layer".to_string()).chain(maps.iter().map(|map| map.scheme.clone()));
    Table::from_rows(
        "Fisher error (E2), nats: mean over the KV heads of a layer, with the least and the greatest.",
        titles.map(|title| (title, Align::Right)).collect(),
        (0..layers).map(row).collect(),
    )
}

fn spectrum(spectrum: &Spectrum, source: &Source) -> Figure {
    let row = |i: usize| -> Vec<Cell> {
        let of = |values: &[f64]| number(values.get(i).copied());
        vec![(i + 1).to_string().into(), of(&spectrum.low), of(&spectrum.median), of(&spectrum.high)]
    };
    let titles = ["index", "25 % quantile", "median", "75 % quantile"];
    Figure {
        title: "Spectrum of E[q qᵀ]: eigenvalues of each KV head as shares of their sum.".into(),
        notes: vec!["Median over heads, with the quartiles as a band; queries of the calibration text.".into()],
        panels: vec![Panel {
            title: None,
            label: format!("Eigenvalues by index, {}", plural(spectrum.median.len(), "index")),
            plot: Box::new(Eigenvalues {
                low: spectrum.low.clone(),
                median: spectrum.median.clone(),
                high: spectrum.high.clone(),
            }),
        }],
        legend: vec![(Key::Stroke(0), "median".into()), (Key::Band(0), "quartiles".into())],
        source: source.clone(),
        data: vec![Table::from_rows(
            "Quartiles over heads.",
            titles.map(|title| (title.to_string(), Align::Right)).to_vec(),
            (0..spectrum.median.len()).map(row).collect(),
        )],
    }
}
