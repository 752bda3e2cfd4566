//! Spectra: a median with its quartiles.

use super::axis::Axis;
use super::frame::Frame;
use super::{Plot, Width, finite};
use crate::theme::Ink;

/// Eigenvalues by index, from 1, as shares of the trace: quartiles over heads.
#[derive(Debug)]
pub struct Eigenvalues {
    /// 25 % quantile.
    pub low: Vec<f64>,
    /// Median.
    pub median: Vec<f64>,
    /// 75 % quantile.
    pub high: Vec<f64>,
}

/// Points by index; one that a logarithm would not take is left out.
fn indexed(values: &[f64]) -> Vec<(f64, f64)> {
    let points = values.iter().enumerate().map(|(i, value)| (i as f64 + 1.0, *value));
    points.filter(finite).filter(|(_, value)| *value > 0.0).collect()
}

impl Plot for Eigenvalues {
    fn draw(&self, width: Width, label: &str) -> String {
        let [low, median, high] = [&self.low, &self.median, &self.high].map(|values| indexed(values));
        let all = || low.iter().chain(&median).chain(&high);
        let last = all().map(|p| p.0).fold(1.0, f64::max);
        let frame = Frame {
            width,
            height: if width == Width::Wide { 340 } else { 290 },
            x: (Axis::exact(1.0, last.max(2.0)).whole(), "index of the eigenvalue"),
            y: (Axis::log(all().map(|p| p.1)), "share of the trace"),
            grid: true,
        };
        frame.draw(label, |pen| {
            pen.band(&low, &high, Ink::Series(0));
            pen.line(&median, Ink::Series(0));
        })
    }
}
