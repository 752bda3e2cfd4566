//! What schemes lose against the bits that they take, with the front.

use super::axis::Axis;
use super::frame::Frame;
use super::{Plot, Width, finite};
use crate::format;
use crate::theme::Ink;

/// A scheme.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Series of its marker.
    pub series: usize,
    /// Cache bits per element.
    pub bits: f64,
    /// What it loses.
    pub cost: f64,
    /// Whether no other dominates it.
    pub on_front: bool,
}

/// What is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost {
    /// Perplexity over the dense model's, minus 1.
    Excess,
    /// Divergence of next-token distributions.
    Divergence,
}

/// A marker for each scheme, small ones for those that others dominate, and the front as a line of steps: what can be had for so many
/// bits.
#[derive(Debug)]
pub struct Front {
    /// Schemes.
    pub points: Vec<Point>,
    /// What is lost.
    pub cost: Cost,
}

impl Plot for Front {
    fn draw(&self, width: Width, label: &str) -> String {
        let points: Vec<&Point> = self.points.iter().filter(|p| finite(&(p.bits, p.cost))).collect();
        let costs = || points.iter().map(|p| p.cost);
        let (y, title) = match self.cost {
            Cost::Excess => {
                let percent = |share: f64| format!("{} %", format::tick(100.0 * share));
                (Axis::log(costs()).labelled(percent), "excess perplexity")
            }
            Cost::Divergence => (Axis::log(costs()), "KL to dense, nats"),
        };
        let frame = Frame {
            width,
            height: if width == Width::Wide { 430 } else { 330 },
            x: (Axis::linear(points.iter().map(|p| p.bits)), "cache bits per element"),
            y: (y, title),
            grid: true,
        };
        frame.draw(label, |pen| {
            pen.line(&steps(&points), Ink::Muted);
            let place = |p: &Point| pen.at(p.bits, p.cost);
            points.iter().filter(|p| !p.on_front).for_each(|p| pen.speck(place(p), p.series));
            points.iter().filter(|p| p.on_front).for_each(|p| pen.marker(place(p), p.series));
        })
    }
}

/// The front from its fewest bits on.
fn steps(points: &[&Point]) -> Vec<(f64, f64)> {
    let mut front: Vec<(f64, f64)> = points.iter().filter(|p| p.on_front).map(|p| (p.bits, p.cost)).collect();
    front.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut steps: Vec<(f64, f64)> = Vec::new();
    for (bits, cost) in front {
        // The level of the one before holds until here.
        steps.extend(steps.last().map(|(_, before)| (bits, *before)));
        steps.push((bits, cost));
    }
    steps
}
