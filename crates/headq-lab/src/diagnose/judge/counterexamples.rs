//! Link 2: lower storage MSE with higher damage, at one budget.

use std::collections::BTreeMap;

use super::{broken, counted, decide, finite, inconclusive, percent, show};
use crate::diagnose::data::{Counterexample, Counterexamples, Interval, Judgement, KeyPoint, Setting, Verdict};
use crate::diagnose::statistics::Bootstrap;
use crate::diagnose::thresholds::Thresholds;

/// How many counterexamples are listed.
const LISTED: usize = 10;
/// Decimal fractions such as 3.001 − 3 miss their difference by less than this, in bits.
const ROUNDING: f64 = 1e-9;

/// Link 2: all pairs of settings on one head whose code bits differ by no more than the tolerance.
///
/// Those with the lower storage MSE but the higher KL and output error, all strictly, are counterexamples. The interval
/// of their share resamples whole heads; on fewer than min-units there is none.
///
/// # Panics
/// If a point's setting is not among the settings.
pub fn counterexamples(
    settings: &[Setting],
    points: &[KeyPoint],
    thresholds: &Thresholds,
    seed: u64,
) -> Counterexamples {
    let (points, lost) = finite(points.to_vec(), |p| [p.mse, p.fisher, p.kl, p.output_error]);
    let mut heads: BTreeMap<(usize, usize), Vec<KeyPoint>> = BTreeMap::new();
    points.iter().for_each(|p| heads.entry((p.layer, p.head)).or_default().push(*p));
    let (mut found, mut counts) = (Vec::new(), Vec::new());
    for own in heads.values() {
        let pairs = equal_budget_pairs(settings, own, thresholds.budget_tolerance);
        let contrary: Vec<_> = pairs.iter().filter_map(|(a, b)| contrary(a, b)).collect();
        counts.push((contrary.len() as u64, pairs.len() as u64));
        found.extend(contrary);
    }
    // Heads without a pair say nothing about the share.
    counts.retain(|(_, pairs)| *pairs > 0);
    let share = Bootstrap::new(thresholds, seed).share(&counts);
    let pairs = counts.iter().map(|(_, pairs)| *pairs as usize).sum();
    let judgement = match lost {
        0 => judge_counterexamples(pairs, found.len(), share.as_ref(), counts.len(), thresholds),
        _ => broken(lost, "the errors of heads"),
    };
    Counterexamples { judgement, pairs, count: found.len(), share, strongest: strongest(settings, found) }
}

fn equal_budget_pairs(settings: &[Setting], head: &[KeyPoint], tolerance: f64) -> Vec<(KeyPoint, KeyPoint)> {
    let bits = |p: &KeyPoint| settings[p.setting].code_bits;
    let equal = |a: &KeyPoint, b: &KeyPoint| (bits(a) - bits(b)).abs() <= tolerance + ROUNDING;
    let pairs = head.iter().enumerate().flat_map(|(i, a)| head[i + 1..].iter().map(move |b| (*a, *b)));
    pairs.filter(|(a, b)| equal(a, b)).collect()
}

/// The pair with the lower storage MSE first, if it is a counterexample.
fn contrary(a: &KeyPoint, b: &KeyPoint) -> Option<(KeyPoint, KeyPoint)> {
    let (stored, read) = if a.mse < b.mse { (*a, *b) } else { (*b, *a) };
    let contrary = stored.mse < read.mse && stored.kl > read.kl && stored.output_error > read.output_error;
    contrary.then_some((stored, read))
}

/// The strongest, ties by layer, head and settings. A pair whose both ratios have a zero denominator has no strength
/// and is not listed.
fn strongest(settings: &[Setting], found: Vec<(KeyPoint, KeyPoint)>) -> Vec<Counterexample> {
    let strength = |(s, r): &(KeyPoint, KeyPoint)| (s.kl / r.kl).min(s.output_error / r.output_error);
    let place = |(s, r): &(KeyPoint, KeyPoint)| (s.layer, s.head, s.setting, r.setting);
    let mut ranked: Vec<_> =
        found.into_iter().map(|pair| (strength(&pair), pair)).filter(|(strength, _)| strength.is_finite()).collect();
    ranked.sort_by(|(a, first), (b, second)| b.total_cmp(a).then(place(first).cmp(&place(second))));
    ranked.truncate(LISTED);
    let listed = |(strength, (s, r)): (f64, (KeyPoint, KeyPoint))| Counterexample {
        layer: s.layer,
        head: s.head,
        stored_better: settings[s.setting].scheme.clone(),
        read_better: settings[r.setting].scheme.clone(),
        code_bits: [settings[s.setting].code_bits, settings[r.setting].code_bits],
        mse: [s.mse, r.mse],
        kl: [s.kl, r.kl],
        output_error: [s.output_error, r.output_error],
        strength,
    };
    ranked.into_iter().map(listed).collect()
}

fn judge_counterexamples(
    pairs: usize,
    count: usize,
    share: Option<&Interval>,
    heads: usize,
    thresholds: &Thresholds,
) -> Judgement {
    let least = thresholds.min_counterexamples;
    if pairs == 0 {
        return inconclusive(
            "No two settings on one head have the same budget.",
            format!(
                "Settings whose code bits differ by at most {} (budget-tolerance).",
                show(thresholds.budget_tolerance)
            ),
        );
    }
    let found = format!("Of {} of equal budget {count} are counterexamples", counted(pairs, "pair"));
    let Some(share) = share else {
        return inconclusive(
            format!("{found}, on {}, too few for an interval.", counted(heads, "head")),
            format!("At least {} KV heads over all layers (min-units).", thresholds.min_units),
        );
    };
    let verdict = decide(share.low >= least, share.high < least);
    let bound = format!("{} (min-counterexamples)", percent(least));
    Judgement {
        verdict,
        because: format!(
            "{found}, a share of {} [{}, {}] ({} interval over {heads} heads).",
            percent(share.estimate),
            percent(share.low),
            percent(share.high),
            percent(thresholds.confidence),
        ),
        would_change: match verdict {
            Verdict::Supported => format!("A lower bound of the share below {bound}."),
            Verdict::NotSupported => format!("An upper bound of the share of at least {bound}."),
            Verdict::Inconclusive => format!(
                "A lower bound of the share of at least {bound} supports it, an upper bound below that contradicts it: \
                 more pairs of settings narrow the interval."
            ),
        },
    }
}
