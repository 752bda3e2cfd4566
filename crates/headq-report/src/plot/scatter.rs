//! Scatter panels.

use super::axis::Axis;
use super::frame::Frame;
use super::{Plot, Width, finite};
use crate::theme::Ink;
use headq::basis::split_mix;

/// The most points that are drawn: more would say no more, and weigh.
pub const MOST: usize = 1500;

/// A point of one series.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Horizontal.
    pub x: f64,
    /// Vertical.
    pub y: f64,
    /// Series of its marker.
    pub series: usize,
}

/// One quantity against another, logarithmic where there are positive values.
#[derive(Debug)]
pub struct Scatter {
    /// Points, at most [`MOST`].
    pub points: Vec<Point>,
    /// Title of the horizontal axis.
    pub x_title: &'static str,
    /// Title of the vertical axis.
    pub y_title: &'static str,
    /// Whether both are the same quantity, so that the line on which they are equal means something.
    pub diagonal: bool,
}

impl Plot for Scatter {
    fn draw(&self, width: Width, label: &str) -> String {
        let points = || self.points.iter().filter(|p| finite(&(p.x, p.y)));
        let (x, y) = (Axis::log(points().map(|p| p.x)), Axis::log(points().map(|p| p.y)));
        let (low, high) = (x.ends().0.max(y.ends().0), x.ends().1.min(y.ends().1));
        let frame = Frame { width, height: 330, x: (x, self.x_title), y: (y, self.y_title), grid: true };
        frame.draw(label, |pen| {
            if self.diagonal && low < high {
                pen.line(&[(low, low), (high, high)], Ink::Muted);
            }
            points().for_each(|p| pen.speck(pen.at(p.x, p.y), p.series));
        })
    }
}

/// At most [`MOST`] of these, in their order: always the same ones, and none preferred by its place.
pub fn sample<T: Copy>(items: &[T]) -> Vec<T> {
    if items.len() <= MOST {
        return items.to_vec();
    }
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|i| split_mix(*i as u64));
    order.truncate(MOST);
    order.sort_unstable();
    order.into_iter().map(|i| items[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_in_order_and_prefers_nothing() {
        let items: Vec<usize> = (0..6000).collect();
        let sampled = sample(&items);
        assert_eq!(sampled.len(), MOST);
        assert!(sampled.is_sorted());
        assert_eq!(sampled, sample(&items));
        // Settings follow one another with a period; each keeps its share.
        for period in [2, 3, 4, 15, 20] {
            let of = |rest: usize| sampled.iter().filter(|i| **i % period == rest).count() * period;
            assert!((0..period).all(|rest| (MOST / 2..MOST * 2).contains(&of(rest))));
        }
        assert_eq!(sample(&items[..MOST]).len(), MOST);
    }
}
