//! Curves with a marker at each point.

use super::axis::Axis;
use super::frame::Frame;
use super::{Plot, Width, finite};
use crate::format;
use crate::theme::Ink;

/// A curve.
#[derive(Debug)]
pub struct Curve {
    /// Series of its line and marker.
    pub series: usize,
    /// Points, by ascending x.
    pub points: Vec<(f64, f64)>,
}

/// What the axes show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A share against a rank.
    ShareByRank,
    /// Fisher error against α.
    FisherByShift,
    /// A loss against the optimizer's steps.
    LossByStep,
    /// Milliseconds against cached tokens.
    MillisecondsByContext,
}

/// Curves over a common axis.
#[derive(Debug)]
pub struct Curves {
    /// Curves.
    pub curves: Vec<Curve>,
    /// What the axes show.
    pub kind: Kind,
}

impl Curves {
    fn axes(&self) -> ((Axis, &'static str), (Axis, &'static str)) {
        let points = || self.curves.iter().flat_map(|c| c.points.iter().copied()).filter(finite);
        let (x, y) = (points().map(|p| p.0), points().map(|p| p.1));
        match self.kind {
            Kind::ShareByRank => {
                let mut ranks: Vec<f64> = x.clone().collect();
                ranks.sort_by(f64::total_cmp);
                ranks.dedup();
                let ticks = ranks.into_iter().map(|rank| (rank, format::tick(rank))).collect();
                let percent = |share: f64| format!("{} %", format::tick(100.0 * share));
                ((Axis::log(x).with_ticks(ticks), "rank"), (Axis::linear(y).with_zero().labelled(percent), "captured"))
            }
            Kind::FisherByShift => ((Axis::linear(x), "α"), (Axis::auto(y).with_zero(), "Fisher error, nats")),
            Kind::MillisecondsByContext => {
                let mut contexts: Vec<f64> = x.clone().collect();
                contexts.sort_by(f64::total_cmp);
                contexts.dedup();
                let ticks = contexts.into_iter().map(|tokens| (tokens, format::tick(tokens))).collect();
                ((Axis::log(x).with_ticks(ticks), "cached tokens"), (Axis::log(y), "milliseconds"))
            }
            Kind::LossByStep => ((Axis::linear(x).whole(), "step"), (Axis::auto(y), "loss")),
        }
    }
}

impl Plot for Curves {
    fn draw(&self, width: Width, label: &str) -> String {
        let (x, y) = self.axes();
        let frame = Frame { width, height: if width == Width::Wide { 360 } else { 300 }, x, y, grid: true };
        frame.draw(label, |pen| {
            for curve in &self.curves {
                let points: Vec<_> = curve.points.iter().copied().filter(finite).collect();
                pen.line(&points, Ink::Series(curve.series));
                points.iter().for_each(|(x, y)| pen.marker(pen.at(*x, *y), curve.series));
            }
        })
    }
}
