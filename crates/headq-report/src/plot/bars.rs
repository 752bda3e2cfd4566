//! Shares by bin, a bar for each series side by side.

use super::axis::Axis;
use super::frame::{Frame, Hold, Pen, px, text_height, text_width};
use super::{Plot, Width};
use crate::format;
use crate::theme::Ink;

/// Most series that bars are drawn for.
pub const SERIES: usize = 4;

/// Most rows of counts.
const ROWS: i32 = 2;

/// Share of a bin's width that bars take.
const FILLED: f64 = 0.8;

/// A bin.
#[derive(Debug, Clone, PartialEq)]
pub struct Bin {
    /// Lower edge.
    pub low: f64,
    /// Upper edge; none is open.
    pub high: Option<f64>,
    /// What was counted in it.
    pub count: u64,
    /// Share by series; none where it is not defined.
    pub shares: Vec<Option<f64>>,
}

/// Bins of equal width in the drawing, whatever their edges are, with the counts above them.
#[derive(Debug)]
pub struct Bars {
    /// Bins, in ascending order.
    pub bins: Vec<Bin>,
}

impl Bars {
    /// The bins' edges as ticks.
    fn edges(&self) -> Vec<(f64, String)> {
        let last = self.bins.last().map(|bin| bin.high.map_or("∞".into(), format::tick));
        let labels = self.bins.iter().map(|bin| format::tick(bin.low)).chain(last);
        labels.enumerate().map(|(i, label)| (i as f64, label)).collect()
    }

    /// Counts in one row, or in two by turns where bins are narrow; none where they are too narrow for that.
    fn counts(&self, pen: &Pen) {
        let [_, top, ..] = pen.bounds();
        let texts: Vec<String> = self.bins.iter().map(|bin| format::short_count(bin.count)).collect();
        let widest = texts.iter().map(|text| text_width(text) + px(4.0)).max().unwrap_or(0);
        let width = pen.at(1.0, 0.0).0 - pen.at(0.0, 0.0).0;
        let Some(rows) = (1..=ROWS).find(|rows| widest <= width * rows) else { return };
        for ((i, text), row) in texts.iter().enumerate().zip((0..rows).cycle()) {
            let y = top + px(1.0) + row * text_height();
            pen.text(text, (pen.at(i as f64 + 0.5, 0.0).0, y), Hold::Top, Ink::Muted);
        }
    }
}

impl Plot for Bars {
    fn draw(&self, width: Width, label: &str) -> String {
        let height = if width == Width::Wide { 320 } else { 280 };
        let shares = self.bins.iter().flat_map(|bin| bin.shares.iter().flatten()).copied().filter(|s| s.is_finite());
        let most = Some(shares.fold(0.0, f64::max)).filter(|most| *most > 0.0).unwrap_or(1.0);
        // Room for the counts above the highest bar.
        let room = f64::from((ROWS + 1) * text_height()) / f64::from(px(f64::from(height)));
        let percent = |share: f64| format!("{} %", format::tick(100.0 * share));
        let frame = Frame {
            width,
            height,
            x: (
                Axis::exact(0.0, self.bins.len().max(1) as f64).with_ticks(self.edges()),
                "entropy of the dense attention, nats",
            ),
            y: (Axis::exact(0.0, most / (1.0 - room)).labelled(percent), "queries flipped"),
            grid: true,
        };
        frame.draw(label, |pen| {
            for (i, bin) in self.bins.iter().enumerate() {
                let step = FILLED / bin.shares.len().max(1) as f64;
                for (series, share) in bin.shares.iter().enumerate() {
                    let left = i as f64 + (1.0 - FILLED) / 2.0 + series as f64 * step;
                    let share = share.filter(|share| share.is_finite()).unwrap_or(0.0);
                    if share > 0.0 {
                        pen.block(pen.at(left, share), pen.at(left + 0.94 * step, 0.0), Ink::Series(series));
                    }
                }
            }
            self.counts(pen);
        })
    }
}
