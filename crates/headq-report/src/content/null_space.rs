//! Link 3: a shift of all keys.

use headq_lab::diagnose::data::{Diagnosis, NullCurve, NullPoint, NullSpace};

use super::columns::{number, scheme};
use crate::document::{Align, Block, Column, Figure, Panel, Source, Table, Text};
use crate::format::{self, maybe};
use crate::plot::Key;
use crate::plot::curves::{Curve, Curves, Kind};

pub fn blocks(diagnosis: &Diagnosis, source: &Source) -> Option<Vec<Block>> {
    let link = diagnosis.null_space.as_ref()?;
    let dense = format!(
        "Over all α, no dense attention probability changed by more than {} (allowed: {}).",
        format::number(link.dense_change),
        format::number(link.dense_tolerance)
    );
    Some(vec![
        Block::Paragraph(dense.into()),
        Block::Table(Table::of("Fisher error (E2, nats) over α.", CURVE, &link.curves)),
        Block::Figure(figure(link, source)),
    ])
}

/// Least and greatest Fisher error of a curve.
fn extremes(curve: &NullCurve) -> Option<(f64, f64)> {
    let values = || curve.points.iter().map(|p| p.fisher).filter(|v| v.is_finite());
    Some((values().reduce(f64::min)?, values().reduce(f64::max)?))
}

/// Fisher error of centered keys.
fn centered(curve: &NullCurve) -> Option<f64> {
    curve.points.first().map(|p| p.fisher).filter(|fisher| fisher.is_finite())
}

/// Greatest Fisher error over that of centered keys.
fn ratio(curve: &NullCurve) -> Option<f64> {
    let (at_zero, (_, greatest)) = (centered(curve).filter(|fisher| *fisher > 0.0)?, extremes(curve)?);
    Some(greatest / at_zero)
}

const CURVE: &[Column<NullCurve>] = &[
    ("scheme", Align::Left, |c| scheme(&c.scheme)),
    ("shift-equivariant", Align::Left, |c| if c.equivariant { "yes, must stay flat" } else { "no" }.into()),
    ("at α = 0", Align::Right, |c| number(centered(c))),
    ("least", Align::Right, |c| number(extremes(c).map(|e| e.0))),
    ("greatest", Align::Right, |c| number(extremes(c).map(|e| e.1))),
    ("greatest / at α = 0", Align::Right, |c| maybe(ratio(c), |ratio| format::fixed(ratio, 3)).into()),
];

fn figure(link: &NullSpace, source: &Source) -> Figure {
    let curve = |(series, curve): (usize, &NullCurve)| Curve {
        series,
        points: curve.points.iter().map(|p| (p.alpha, p.fisher)).collect(),
    };
    let legend = link.curves.iter().enumerate().map(|(i, curve)| (Key::Line(i), Text::code(&curve.scheme)));
    Figure {
        title: "Null space: Fisher error with α·μ added to centered keys before they are coded.".into(),
        notes: vec!["Attention in full precision is the same for every α.".into()],
        panels: vec![Panel {
            title: None,
            label: format!("Fisher error against α, {}", format::plural(link.curves.len(), "curve")),
            plot: Box::new(Curves {
                curves: link.curves.iter().enumerate().map(curve).collect(),
                kind: Kind::FisherByShift,
            }),
        }],
        legend: legend.collect(),
        source: source.clone(),
        data: vec![points(link)],
    }
}

/// A point of a curve.
struct Point<'a>(&'a NullCurve, &'a NullPoint);

fn points(link: &NullSpace) -> Table {
    let columns: &[Column<Point>] = &[
        ("scheme", Align::Left, |p| scheme(&p.0.scheme)),
        ("α", Align::Right, |p| format::tick(p.1.alpha).into()),
        ("Fisher, nats (E2)", Align::Right, |p| number(Some(p.1.fisher))),
        ("KL, nats (E3)", Align::Right, |p| number(Some(p.1.kl))),
        ("MSE (E4)", Align::Right, |p| number(Some(p.1.mse))),
    ];
    let points: Vec<Point> =
        link.curves.iter().flat_map(|curve| curve.points.iter().map(move |p| Point(curve, p))).collect();
    Table::of("Means over heads.", columns, &points)
}
