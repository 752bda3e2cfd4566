//! From measured numbers to links with verdicts: pure functions, without a model.
//!
//! A verdict rests on an interval or a stated threshold, and says which number would have to cross which threshold to
//! change it. Where a number is undefined the link is inconclusive; measurements that are not finite are neither stored
//! nor judged.
//!
//! Intervals resample what is nearest to independent: whole heads for errors of heads (the settings measured on one
//! head share its keys and queries), windows of text for losses.

mod bases;
mod counterexamples;
mod direction;
mod metric;
mod null_space;
mod perplexity;
mod route_flips;

use headq::scheme::Family;

use crate::diagnose::data::{HeadMap, Interval, Judgement, RankCurve, Role, Spectrum, Verdict};
use crate::diagnose::statistics::{Bootstrap, weighted_mean};
use crate::diagnose::thresholds::Thresholds;
use crate::evaluate::SchemeResult;

pub use bases::bases;
pub use counterexamples::counterexamples;
pub use direction::direction;
pub use metric::metric;
pub use null_space::null_space;
pub use perplexity::perplexity;
pub use route_flips::route_flips;

/// Families that draw on query statistics as the claim means it.
const FROM_QUERIES: [Family; 2] = [Family::QueryPca, Family::ScoreOptimal];
/// Families of the same size that the claim says are worse.
const RIVALS: [Family; 3] = [Family::Random, Family::ResidualPca, Family::QueryPcaCentered];

/// A scheme's evaluation with the losses that intervals are drawn from.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The evaluation; stored as given.
    pub result: SchemeResult,
    /// Mean nll of each window, nats per token, the windows of all schemes in one order.
    pub window_nll: Vec<f64>,
}

/// What corrections are compared with.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// Full precision.
    pub dense: Measured,
    /// The base quantizer without a correction.
    pub base: Measured,
    /// Size of the vocabulary.
    pub vocabulary: usize,
}

/// A basis family's evaluation at the budget of the others.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredFamily {
    /// Family.
    pub family: Family,
    /// Its scheme.
    pub run: Measured,
    /// Share of the held-out score error that rank r captures, by layer and KV head in one order; `None` where it is
    /// undefined.
    pub captured: Vec<Option<f64>>,
}

/// What the bases link shows beside its verdict; stored as given.
#[derive(Debug, Clone, PartialEq)]
pub struct BasisDetail {
    /// Ranks of the curves.
    pub ranks: Vec<usize>,
    /// Captured share by rank.
    pub curves: Vec<RankCurve>,
    /// Spectrum of the calibration queries.
    pub spectrum: Spectrum,
    /// Score error by layer and head.
    pub maps: Vec<HeadMap>,
}

/// A row of the perplexity link before it is compared.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredRow {
    /// What it is there for.
    pub role: Role,
    /// Its scheme.
    pub run: Measured,
    /// Scheme, as asked or in canonical form, that it is compared with.
    pub reference: Option<String>,
}

/// A number to four significant digits, or `undefined` where it is not finite.
fn show(x: f64) -> String {
    let size = x.abs();
    match size {
        _ if !x.is_finite() => "undefined".into(),
        0.0 => "0".into(),
        _ if !(1e-3..1e6).contains(&size) => format!("{x:.3e}"),
        _ => {
            let decimals = (3 - size.log10().floor() as i32).max(0) as usize;
            let digits = format!("{x:.decimals$}");
            match digits.contains('.') {
                true => digits.trim_end_matches('0').trim_end_matches('.').into(),
                false => digits,
            }
        }
    }
}

/// A share as a percentage.
fn percent(x: f64) -> String {
    match x.is_finite() {
        true => format!("{} %", show((x * 1e4).round() / 100.0)),
        false => "undefined".into(),
    }
}

/// Estimate [low, high].
fn show_interval(i: &Interval) -> String {
    format!("{} [{}, {}]", show(i.estimate), show(i.low), show(i.high))
}

fn show_optional(i: Option<&Interval>) -> String {
    i.map_or_else(|| "undefined".into(), show_interval)
}

/// Count and noun, the noun in the plural where the count asks for it.
fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn inconclusive(because: impl Into<String>, would_change: impl Into<String>) -> Judgement {
    Judgement { verdict: Verdict::Inconclusive, because: because.into(), would_change: would_change.into() }
}

/// The judgement on measurements of which some are not finite.
fn broken(lost: usize, what: &str) -> Judgement {
    inconclusive(
        format!("{} of {what} had numbers that are not finite, and took no part.", counted(lost, "measurement")),
        "Finite measurements everywhere: check the weights and the precision of the model.",
    )
}

/// The verdict where both signs of evidence were looked for.
fn decide(supported: bool, contradicted: bool) -> Verdict {
    match (supported, contradicted) {
        (_, true) => Verdict::NotSupported,
        (true, false) => Verdict::Supported,
        (false, false) => Verdict::Inconclusive,
    }
}

/// Separates items whose measurements are all finite, and counts the others.
fn finite<T, const N: usize>(items: Vec<T>, numbers: impl Fn(&T) -> [f64; N]) -> (Vec<T>, usize) {
    let all = items.len();
    let kept: Vec<T> = items.into_iter().filter(|i| numbers(i).iter().all(|v| v.is_finite())).collect();
    let lost = all - kept.len();
    (kept, lost)
}

impl Reference {
    /// Base minus dense, nats per token, by window.
    fn damage(&self, bootstrap: &Bootstrap) -> Option<Interval> {
        bootstrap.mean_difference(&self.base.window_nll, &self.dense.window_nll)
    }

    /// Why nothing can be said of a correction on this model, if that is so.
    fn obstacle(&self, damage: Option<&Interval>, thresholds: &Thresholds) -> Option<Judgement> {
        let chance = (self.vocabulary.max(1) as f64).ln();
        let (loss, limit) = (self.dense.result.nll, thresholds.max_dense_loss * chance);
        let predicts = loss < limit;
        if !predicts {
            return Some(inconclusive(
                format!(
                    "The dense model loses {} nats per token where guessing loses {}: it does not predict this text.",
                    show(loss),
                    show(chance)
                ),
                format!("A dense loss below {} nats per token (max-dense-loss).", show(limit)),
            ));
        }
        let (windows, least) = (self.windows(), thresholds.min_units);
        let Some(damage) = damage else {
            return Some(match windows < least {
                true => inconclusive(
                    format!("Losses of {} give no interval.", counted(windows, "window")),
                    format!("At least {least} windows (min-units)."),
                ),
                false => inconclusive(
                    "Losses that are not finite or not of the same windows give no interval.",
                    "Finite losses of the same windows.",
                ),
            });
        };
        if self.windows_alike() {
            return Some(inconclusive(
                "All windows lose exactly the same, so that resampling them says nothing.",
                "A text whose windows differ.",
            ));
        }
        (damage.low <= 0.0 || damage.estimate < thresholds.min_damage).then(|| {
            inconclusive(
                format!(
                    "{}: the base quantizer costs {} nats per token.",
                    if damage.high > thresholds.min_damage {
                        "Whether there is anything to correct on this model is not decided"
                    } else {
                        "There is nothing to correct on this model"
                    },
                    show_interval(damage)
                ),
                format!(
                    "A base quantizer that costs at least {} nats per token (min-damage) with a lower bound above 0: \
                     fewer bits, a longer context, or more windows.",
                    show(thresholds.min_damage)
                ),
            )
        })
    }

    fn windows_alike(&self) -> bool {
        let alike = |nll: &[f64]| nll.iter().all(|loss| *loss == nll[0]);
        alike(&self.dense.window_nll) && alike(&self.base.window_nll)
    }

    fn windows(&self) -> usize {
        self.dense.window_nll.len()
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    weighted_mean(&values, &vec![1; values.len()])
}
