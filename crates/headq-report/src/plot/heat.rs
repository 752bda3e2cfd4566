//! Heat maps by layer and head, and the scale of their colours.

use std::sync::Arc;

use super::axis::Axis;
use super::frame::{Frame, Pen, px};
use super::{Plot, Width};
use crate::theme::{Ink, LEVELS};

/// A scale that several maps share.
#[derive(Debug)]
pub struct Scale(Axis);

impl Scale {
    /// From the least to the most of these values; logarithmic where they span decades.
    pub fn of(values: impl IntoIterator<Item = f64> + Clone) -> Self {
        Self(Axis::auto(values))
    }

    /// The step of a value. A greater value is never on a lower step.
    pub fn level(&self, value: f64) -> usize {
        ((self.0.place(value) * LEVELS as f64) as usize).min(LEVELS - 1)
    }

    /// Whether it is logarithmic.
    pub fn is_log(&self) -> bool {
        self.0.is_log()
    }
}

/// Values by layer (across) and head (down).
#[derive(Debug)]
pub struct HeatMap {
    /// `[layers][heads]`; none where a value is not defined.
    pub values: Vec<Vec<Option<f64>>>,
    /// Scale of the colours.
    pub scale: Arc<Scale>,
}

impl HeatMap {
    fn heads(&self) -> usize {
        self.values.iter().map(Vec::len).max().unwrap_or(0).max(1)
    }

    fn cell(&self, pen: &Pen, layer: usize, head: usize, value: Option<f64>) {
        let corner = |layer: usize, head: usize| pen.at(layer as f64 - 0.5, head as f64 - 0.5);
        let (from, to) = (corner(layer, head), corner(layer + 1, head + 1));
        // A gap shows cells that are large enough for one.
        let gap = if to.0 - from.0 >= px(8.0) { px(0.75) } else { 0 };
        let to = (to.0 - gap, to.1 - gap);
        match value.filter(|value| value.is_finite()) {
            Some(value) => pen.block(from, to, Ink::Heat(self.scale.level(value))),
            None => {
                pen.block(from, to, Ink::Missing);
                let middle = ((from.0 + to.0) / 2, (from.1 + to.1) / 2);
                let half = px(1.0);
                pen.block((middle.0 - half, middle.1 - half), (middle.0 + half, middle.1 + half), Ink::Muted);
            }
        }
    }
}

impl Plot for HeatMap {
    fn draw(&self, width: Width, label: &str) -> String {
        let (layers, heads) = (self.values.len().max(1), self.heads());
        let cell = (320 / heads).clamp(9, 24);
        let frame = Frame {
            width,
            height: (heads * cell) as u32 + 56,
            x: (Axis::exact(-0.5, layers as f64 - 0.5).whole(), "layer"),
            // Downwards, as rows are read.
            y: (Axis::exact(heads as f64 - 0.5, -0.5).whole(), "KV head"),
            grid: false,
        };
        frame.draw(label, |pen| {
            for (layer, values) in self.values.iter().enumerate() {
                for head in 0..heads {
                    self.cell(pen, layer, head, values.get(head).copied().flatten());
                }
            }
        })
    }
}

/// The colours of a scale, with its numbers.
#[derive(Debug)]
pub struct ColourBar {
    /// The scale.
    pub scale: Arc<Scale>,
    /// What it measures.
    pub title: &'static str,
}

impl Plot for ColourBar {
    fn draw(&self, width: Width, label: &str) -> String {
        let frame = Frame {
            width,
            height: 66,
            x: (self.scale.0.clone(), self.title),
            y: (Axis::exact(0.0, 1.0).with_ticks(vec![]), ""),
            grid: false,
        };
        frame.draw(label, |pen| {
            let [left, top, right, bottom] = pen.bounds();
            let edge = |level: usize| left + (right - left) * level as i32 / LEVELS as i32;
            for level in 0..LEVELS {
                pen.block((edge(level), top), (edge(level + 1), bottom), Ink::Heat(level));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greater_values_are_on_higher_steps() {
        for values in [vec![0.0, 1e-6, 1e-3, 0.5, 2.0], vec![1.0, 1.1, 1.2, 1.9], vec![-1.0, 0.0, 3.0]] {
            let scale = Scale::of(values.clone());
            let levels: Vec<usize> = values.iter().map(|v| scale.level(*v)).collect();
            assert!(levels.is_sorted(), "{values:?}: {levels:?}");
            assert!(levels[0] < 2 && levels[values.len() - 1] > LEVELS - 3, "{levels:?}");
            let fine: Vec<usize> = (0..1000).map(|i| scale.level(values[0] + f64::from(i) / 300.0)).collect();
            assert!(fine.is_sorted());
        }
        for level in [Scale::of([0.0, 0.0]).level(0.0), Scale::of([]).level(f64::NAN), Scale::of([7.0]).level(7.0)] {
            assert!(level < LEVELS);
        }
    }
}
