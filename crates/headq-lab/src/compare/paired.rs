//! Paired comparisons: the same windows, or the same heads, under two rows.

use headq::{Diagnostics, HeadDiagnostics};

use super::data::{Against, Estimate, HeadTable, HeadTables, Ratio};
use crate::diagnose::statistics::{Bootstrap, weighted_mean};

/// An error of every head, with what it weighs in the mean over all heads.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeadErrors {
    /// By layer and head in one order; `None` where undefined.
    pub errors: Vec<Option<f64>>,
    /// As `errors`.
    pub weights: Vec<f64>,
}

/// What a row is compared by.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measured {
    /// Mean nll of each window, nats per token.
    pub window_nll: Vec<f64>,
    /// Captured share of each head; empty for the base.
    pub captured: Vec<Option<f64>>,
    /// E2.
    pub fisher: HeadErrors,
    /// E3.
    pub kl: HeadErrors,
    /// E7.
    pub output_error: HeadErrors,
    /// E4 of base and side code together.
    pub key_mse: HeadErrors,
}

impl Measured {
    /// From a row's losses by window, errors by head and captured shares.
    pub fn new(window_nll: Vec<f64>, errors: &HeadDiagnostics, captured: Vec<Option<f64>>) -> Self {
        let taken = |error: fn(&Diagnostics) -> Option<f64>, weight: fn(&Diagnostics) -> f64| HeadErrors {
            errors: errors.heads.iter().map(error).collect(),
            weights: errors.heads.iter().map(weight).collect(),
        };
        // Every head has as many queries and coded keys as any other; outputs differ in size.
        Self {
            window_nll,
            captured,
            fisher: taken(Diagnostics::fisher, |_| 1.0),
            kl: taken(Diagnostics::kl, |_| 1.0),
            output_error: taken(Diagnostics::output_error, Diagnostics::output_norm),
            key_mse: taken(Diagnostics::key_mse_corrected, |_| 1.0),
        }
    }

    /// As tables of `kv_heads` columns.
    pub fn tables(&self, kv_heads: usize) -> HeadTables {
        let table = |values: &[Option<f64>]| -> HeadTable { values.chunks(kv_heads).map(<[_]>::to_vec).collect() };
        HeadTables {
            fisher: table(&self.fisher.errors),
            kl: table(&self.kl.errors),
            output_error: table(&self.output_error.errors),
            key_mse: table(&self.key_mse.errors),
            captured: table(&self.captured),
        }
    }

    /// This row against another of the same windows and heads.
    pub fn against(&self, other: &Measured, bootstrap: &Bootstrap) -> Against {
        Against {
            nll: mean(&differences(&self.window_nll, &other.window_nll), bootstrap),
            captured: mean(&defined_differences(&self.captured, &other.captured), bootstrap),
            fisher: ratio(&self.fisher, &other.fisher, bootstrap),
            kl: ratio(&self.kl, &other.kl, bootstrap),
            output_error: ratio(&self.output_error, &other.output_error, bootstrap),
            key_mse: ratio(&self.key_mse, &other.key_mse, bootstrap),
        }
    }

    /// Mean captured share over heads.
    pub fn mean_captured(&self, bootstrap: &Bootstrap) -> Estimate {
        mean(&self.captured.iter().flatten().copied().collect::<Vec<_>>(), bootstrap)
    }
}

fn differences(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

fn defined_differences(a: &[Option<f64>], b: &[Option<f64>]) -> Vec<f64> {
    a.iter().zip(b).filter_map(|(a, b)| Some((*a)? - (*b)?)).collect()
}

/// A statistic of `units` units with its interval; the estimate stands also where there are too few units for one.
fn estimate(bootstrap: &Bootstrap, units: usize, statistic: impl Fn(&[u32]) -> Option<f64> + Sync) -> Estimate {
    let interval = bootstrap.interval(units, &statistic);
    Estimate {
        estimate: statistic(&vec![1; units]).filter(|value| value.is_finite()),
        low: interval.map(|i| i.low),
        high: interval.map(|i| i.high),
    }
}

fn mean(values: &[f64], bootstrap: &Bootstrap) -> Estimate {
    estimate(bootstrap, values.len(), |times| weighted_mean(values, times))
}

/// One head's errors in two rows.
struct Head {
    own: f64,
    other: f64,
    weight: f64,
}

/// The errors of one row relative to another's, resampled by heads; heads in which either is undefined take no part.
pub fn ratio(own: &HeadErrors, other: &HeadErrors, bootstrap: &Bootstrap) -> Ratio {
    let pairs = own.errors.iter().zip(&other.errors).zip(&own.weights);
    let heads: Vec<Head> =
        pairs.filter_map(|((own, other), &weight)| Some(Head { own: (*own)?, other: (*other)?, weight })).collect();
    let logs: Vec<f64> =
        heads.iter().filter(|h| h.own > 0.0 && h.other > 0.0).map(|h| (h.own / h.other).ln()).collect();
    let of_means = estimate(bootstrap, heads.len(), |times| {
        let sum = |error: fn(&Head) -> f64| -> f64 {
            heads.iter().zip(times).map(|(h, &times)| f64::from(times) * h.weight * error(h)).sum()
        };
        Some(sum(|h| h.own) / sum(|h| h.other)).filter(|ratio| ratio.is_finite())
    });
    let by_head = estimate(bootstrap, logs.len(), |times| weighted_mean(&logs, times).map(f64::exp));
    Ratio { of_means, by_head, heads_better: heads_better(&heads) }
}

fn heads_better(heads: &[Head]) -> Option<f64> {
    let won = |h: &Head| match h.own.partial_cmp(&h.other) {
        Some(std::cmp::Ordering::Less) => 1.0,
        Some(std::cmp::Ordering::Equal) => 0.5,
        _ => 0.0,
    };
    let differs = heads.iter().any(|h| h.own != h.other);
    differs.then(|| heads.iter().map(won).sum::<f64>() / heads.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOTSTRAP: Bootstrap = Bootstrap { confidence: 0.9, replicates: 200, min_units: 4, seed: 3 };

    fn errors(values: &[f64], weights: &[f64]) -> HeadErrors {
        HeadErrors { errors: values.iter().copied().map(Some).collect(), weights: weights.to_vec() }
    }

    #[test]
    fn ratios_and_their_intervals_are_those_of_written_out_resamples() {
        let weights = [1.0, 2.0, 0.5, 1.0, 3.0];
        let (own, other) = ([1.0, 0.2, 3.0, 0.4, 0.9], [2.0, 0.1, 4.0, 0.8, 1.0]);
        let found = ratio(&errors(&own, &weights), &errors(&other, &weights), &BOOTSTRAP);
        let statistic = |times: &[u32]| -> [f64; 2] {
            let (mut above, mut below, mut log, mut count) = (0.0, 0.0, 0.0, 0.0);
            for i in 0..5 {
                for _ in 0..times[i] {
                    above += weights[i] * own[i];
                    below += weights[i] * other[i];
                    log += (own[i] / other[i]).ln();
                    count += 1.0;
                }
            }
            [above / below, f64::exp(log / count)]
        };
        for (n, estimate) in [found.of_means, found.by_head].into_iter().enumerate() {
            assert!((estimate.estimate.unwrap() - statistic(&[1; 5])[n]).abs() < 1e-12);
            let mut all: Vec<f64> = (0..200).map(|i| statistic(&BOOTSTRAP.draw(i, 5))[n]).collect();
            all.sort_by(f64::total_cmp);
            // 5 % of 199 steps is 9.95.
            let (low, high) = (all[9] + 0.95 * (all[10] - all[9]), all[189] + 0.05 * (all[190] - all[189]));
            assert!((estimate.low.unwrap() - low).abs() < 1e-12 && (estimate.high.unwrap() - high).abs() < 1e-12);
        }
        assert_eq!(found.heads_better, Some(0.8));
    }

    #[test]
    fn a_row_against_itself_is_no_difference() {
        let heads = errors(&[0.3, 0.0, 1e-9, 7.0, 2.0], &[1.0; 5]);
        let row = Measured {
            window_nll: vec![3.0, 4.0, 2.5, 3.3],
            captured: vec![Some(0.1), Some(0.7), None, Some(0.2), Some(-0.4)],
            fisher: heads.clone(),
            kl: heads.clone(),
            output_error: heads.clone(),
            key_mse: HeadErrors { errors: vec![None; 5], weights: vec![1.0; 5] },
        };
        let same = row.against(&row, &BOOTSTRAP);
        let exactly = |value| Estimate { estimate: Some(value), low: Some(value), high: Some(value) };
        assert_eq!((same.nll, same.captured), (exactly(0.0), exactly(0.0)));
        for ratio in [same.fisher, same.kl, same.output_error] {
            assert_eq!((ratio.of_means, ratio.by_head, ratio.heads_better), (exactly(1.0), exactly(1.0), None));
        }
        assert_eq!((same.key_mse.of_means, same.key_mse.heads_better), (Estimate::default(), None));
    }

    #[test]
    fn few_units_give_an_estimate_without_an_interval() {
        let found = ratio(&errors(&[1.0, 2.0], &[1.0; 2]), &errors(&[2.0, 2.0], &[1.0; 2]), &BOOTSTRAP);
        assert_eq!(found.of_means, Estimate { estimate: Some(0.75), low: None, high: None });
        assert!(found.of_means.interval().is_none());
        // Nothing to divide by.
        let found = ratio(&errors(&[1.0; 6], &[1.0; 6]), &errors(&[0.0; 6], &[1.0; 6]), &BOOTSTRAP);
        assert_eq!((found.of_means, found.by_head), (Estimate::default(), Estimate::default()));
    }
}
