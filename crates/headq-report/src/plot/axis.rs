//! Axes: linear or logarithmic, with ticks at round numbers or at given places.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

use crate::format;

/// From this ratio of the largest to the smallest positive value on, an axis that may be logarithmic is.
const LOG_FROM: f64 = 20.0;

/// Values beyond this are left out of ranges, so that spans stay finite.
const LARGEST: f64 = 1e300;

/// Share of the span that is left free at each end.
const MARGIN: f64 = 0.04;

/// An axis. Values outside its range, and those that a logarithm does not take, are drawn at its nearer end.
#[derive(Debug, Clone)]
pub struct Axis {
    /// Ends, in powers of ten where logarithmic.
    low: f64,
    high: f64,
    log: bool,
    ticks: Ticks,
    label: fn(f64) -> String,
}

#[derive(Debug, Clone)]
enum Ticks {
    /// At round numbers.
    Round,
    /// At round whole numbers.
    Whole,
    /// Here, with these labels.
    At(Vec<(f64, String)>),
}

impl Axis {
    fn new(low: f64, high: f64, log: bool) -> Self {
        Self { low, high, log, ticks: Ticks::Round, label: format::tick }
    }

    /// Linear from one end to the other, without margins; backwards where `low` is the greater.
    pub fn exact(low: f64, high: f64) -> Self {
        Self::new(low, high, false)
    }

    /// Linear, with margins; from 0 to 1 where all is zero.
    pub fn linear(values: impl IntoIterator<Item = f64>) -> Self {
        let (low, high) = span(values.into_iter()).unwrap_or((0.0, 1.0));
        if (low, high) == (0.0, 0.0) {
            return Self::new(0.0, 1.0, false);
        }
        let margin = if high == low { 0.1 * low.abs() } else { MARGIN * (high - low) };
        Self::new(low - margin, high + margin, false)
    }

    /// Logarithmic over the positive values; linear where there are none.
    pub fn log(values: impl IntoIterator<Item = f64> + Clone) -> Self {
        let positive = values.clone().into_iter().filter(|v| *v > 0.0 && v.is_finite()).map(f64::log10);
        match span(positive) {
            None => Self::linear(values),
            Some((low, high)) => {
                let margin = if high == low { 0.3 } else { MARGIN * (high - low) };
                Self::new(low - margin, high + margin, true)
            }
        }
    }

    /// Logarithmic where the positive values span more than a decade or so.
    pub fn auto(values: impl IntoIterator<Item = f64> + Clone) -> Self {
        let positive = values.clone().into_iter().filter(|v| *v > 0.0 && v.is_finite());
        match span(positive) {
            Some((low, high)) if high / low >= LOG_FROM => Self::log(values),
            _ => Self::linear(values),
        }
    }

    /// Stretched to zero where it is linear.
    pub fn with_zero(mut self) -> Self {
        if !self.log {
            self.low = self.low.min(0.0);
            self.high = self.high.max(0.0);
        }
        self
    }

    /// With ticks at whole numbers only.
    pub fn whole(mut self) -> Self {
        self.ticks = Ticks::Whole;
        self
    }

    /// With these ticks; where they are too many, every second, third, …
    pub fn with_ticks(mut self, ticks: Vec<(f64, String)>) -> Self {
        self.ticks = Ticks::At(ticks);
        self
    }

    /// With labels written in this way.
    pub fn labelled(mut self, label: fn(f64) -> String) -> Self {
        self.label = label;
        self
    }

    /// Whether it is logarithmic.
    pub fn is_log(&self) -> bool {
        self.log
    }

    /// Place of a value between the ends, from 0 to 1.
    pub fn place(&self, value: f64) -> f64 {
        let value = if self.log { value.log10() } else { value };
        let place = (value - self.low) / (self.high - self.low);
        // NaN, as the logarithm of a negative number gives, goes where zero goes.
        if place.is_nan() { 0.0 } else { place.clamp(0.0, 1.0) }
    }

    /// The ends, as values.
    pub fn ends(&self) -> (f64, f64) {
        if self.log { (10f64.powf(self.low), 10f64.powf(self.high)) } else { (self.low, self.high) }
    }

    /// At most `most` ticks.
    pub fn ticks(&self, most: usize) -> Vec<f64> {
        let most = most.max(2);
        let (low, high) = (self.low.min(self.high), self.low.max(self.high));
        match &self.ticks {
            Ticks::At(ticks) => {
                let values: Vec<f64> = ticks.iter().map(|(value, _)| *value).collect();
                let step = values.len().div_ceil(most).max(1);
                values.into_iter().step_by(step).collect()
            }
            Ticks::Whole => round_ticks(low, high, most, 1.0),
            Ticks::Round if self.log => log_ticks(low, high, most),
            Ticks::Round => round_ticks(low, high, most, 0.0),
        }
    }

    /// The label of a tick.
    pub fn tick_label(&self, value: f64) -> String {
        match &self.ticks {
            Ticks::At(ticks) => ticks.iter().find(|(v, _)| *v == value).map(|(_, label)| label.clone()),
            _ => None,
        }
        .unwrap_or_else(|| (self.label)(value))
    }
}

/// Least and greatest of the values that are finite and not absurd.
fn span(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|v| v.abs() < LARGEST).fold(None, |span, v| match span {
        None => Some((v, v)),
        Some((low, high)) => Some((f64::min(low, v), f64::max(high, v))),
    })
}

/// Multiples of the least round step that gives at most so many.
fn round_ticks(low: f64, high: f64, most: usize, least_step: f64) -> Vec<f64> {
    let size = (high - low).max(f64::MIN_POSITIVE);
    let decade = 10f64.powf((size / most as f64).log10().floor());
    let within = |step: f64| (high / step).floor() - (low / step).ceil() + 1.0;
    let step = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0].map(|m| m * decade).into_iter();
    let Some(step) =
        step.filter(|s| *s >= least_step).chain([least_step]).find(|s| *s > 0.0 && within(*s) <= most as f64)
    else {
        return Vec::new();
    };
    let first = (low / step).ceil();
    (0..most).map(|i| (first + i as f64) * step).filter(|tick| *tick <= high).collect()
}

/// 1, 2 and 5 of each decade, or decades, or every second, third, … of them: the most that fit.
fn log_ticks(low: f64, high: f64, most: usize) -> Vec<f64> {
    let decades = || low.floor() as i32..=high.ceil() as i32;
    let inside = |tick: &f64| (low..=high).contains(&tick.log10());
    let at = |steps: &[i32], every: i32| -> Vec<f64> {
        let decades = decades().filter(|decade| decade.rem_euclid(every) == 0);
        // Written and read, so that 10⁻³ is the number nearest to it.
        let value = |step: &i32, decade: i32| format!("{step}e{decade}").parse().unwrap_or(f64::NAN);
        decades.flat_map(|decade| steps.iter().map(move |step| value(step, decade))).filter(inside).collect()
    };
    let candidates = [(&[1, 2, 5][..], 1), (&[1, 3], 1)].into_iter().chain((1..700).map(|every| (&[1][..], every)));
    let ticks = candidates.map(|(steps, every)| at(steps, every)).find(|ticks| ticks.len() <= most).unwrap_or_default();
    // Less than an octave or so: a logarithm looks straight there.
    if ticks.len() < 2 { round_ticks(10f64.powf(low), 10f64.powf(high), most, 0.0) } else { ticks }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        limit.0 + (self.place(*value) * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        // Ticks are bold; there are no lines between them.
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks(hint.bold_points()) }
    }

    fn range(&self) -> Range<f64> {
        self.ends().0..self.ends().1
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        self.tick_label(*value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, most: usize) -> Vec<String> {
        axis.ticks(most).into_iter().map(|tick| axis.tick_label(tick)).collect()
    }

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(labels(&Axis::exact(0.0, 1.0), 6), ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        assert_eq!(labels(&Axis::exact(-0.5, 29.5).whole(), 8), ["0", "5", "10", "15", "20", "25"]);
        assert_eq!(labels(&Axis::exact(-0.5, 0.5).whole(), 8), ["0"]);
        assert_eq!(labels(&Axis::log([1e-4, 1e2]), 8), ["10⁻⁴", "0.001", "0.01", "0.1", "1", "10", "100"]);
        assert_eq!(labels(&Axis::log([1.0, 30.0]), 6), ["1", "2", "5", "10", "20"]);
        assert_eq!(labels(&Axis::log([30.0, 33.0]), 6), ["30", "31", "32", "33"]);
    }

    #[test]
    fn extreme_values_have_finite_places() {
        let extremes =
            [0.0, -1.0, 5e-324, 1e-300, 1.0, 1e299, f64::MAX, f64::MIN, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        let subsets = (0..1usize << extremes.len()).map(|mask| {
            extremes.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, v)| *v).collect::<Vec<_>>()
        });
        for values in subsets {
            for axis in
                [Axis::linear(values.clone()), Axis::log(values.clone()), Axis::auto(values.clone()).with_zero()]
            {
                for value in extremes {
                    assert!((0.0..=1.0).contains(&axis.place(value)), "{values:?} {value}");
                }
                let ticks = axis.ticks(7);
                assert!(ticks.len() <= 7 && ticks.iter().all(|t| t.is_finite()), "{values:?} {ticks:?}");
            }
        }
    }

    #[test]
    fn only_what_spans_decades_is_logarithmic() {
        assert!(Axis::auto([0.01, 1.0]).is_log() && Axis::auto([0.0, 0.01, 1.0]).is_log());
        assert!(!Axis::auto([0.5, 1.0]).is_log() && !Axis::auto([0.0, 0.0]).is_log() && !Axis::auto([]).is_log());
    }
}
