//! Perplexity against bits.

use super::axis::Axis;
use super::frame::{Frame, Hold, Pen, px, text_height, text_width};
use super::{Plot, Width, finite, labels};
use crate::theme::Ink;

/// A scheme.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Its number in the table.
    pub number: usize,
    /// Series of its marker.
    pub series: usize,
    /// Cache bits per element.
    pub bits: f64,
    /// Perplexity.
    pub perplexity: f64,
    /// Whether the axes must reach it. The others are drawn at the nearer end where they lie beyond.
    pub framed: bool,
}

/// Perplexity against cache bits per element: a marker for each scheme, with its number beside it where there is room.
#[derive(Debug)]
pub struct Bits {
    /// Schemes.
    pub points: Vec<Point>,
}

impl Bits {
    fn axes(&self) -> (Axis, Axis) {
        let framed = self.points.iter().filter(|p| p.framed || self.points.iter().all(|p| !p.framed));
        let framed: Vec<(f64, f64)> = framed.map(|p| (p.bits, p.perplexity)).filter(finite).collect();
        (Axis::linear(framed.iter().map(|p| p.0)), Axis::auto(framed.iter().map(|p| p.1)))
    }
}

impl Plot for Bits {
    fn draw(&self, width: Width, label: &str) -> String {
        let (x, y) = self.axes();
        let frame = Frame {
            width,
            height: if width == Width::Wide { 430 } else { 340 },
            x: (x, "cache bits per element"),
            y: (y, "perplexity"),
            grid: true,
        };
        frame.draw(label, |pen| {
            let shown: Vec<&Point> = self.points.iter().filter(|p| finite(&(p.bits, p.perplexity))).collect();
            let places: Vec<_> = shown.iter().map(|p| pen.at(p.bits, p.perplexity)).collect();
            shown.iter().zip(&places).for_each(|(point, place)| pen.marker(*place, point.series));
            numbers(pen, &shown, &places);
        })
    }
}

/// How far the middle of a number may be from the marker that it stands beside, in CSS pixels.
const BESIDE: f64 = 22.0;

fn numbers(pen: &Pen, points: &[&Point], places: &[(i32, i32)]) {
    let texts: Vec<String> = points.iter().map(|p| p.number.to_string()).collect();
    let sizes: Vec<_> = texts.iter().map(|t| (text_width(t) / 2 + px(1.0), text_height() / 2)).collect();
    let labels = labels::place(places, &sizes, pen.radius() + px(1.0), pen.bounds());
    for ((text, point), label) in texts.iter().zip(places).zip(labels) {
        let Some(label) = label else { continue };
        // A line leads from a marker to a number that does not stand beside it.
        if (label.0 - point.0).abs().max((label.1 - point.1).abs()) > px(BESIDE) {
            pen.lead(*point, label);
        }
        pen.text(text, label, Hold::Middle, Ink::Text);
    }
}
