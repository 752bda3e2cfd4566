//! From measured numbers to links with verdicts: pure functions, without a model.
//!
//! A verdict rests on an interval or a stated threshold, and says which number would have to cross which threshold to
//! change it. Where a number is undefined the link is inconclusive; measurements that are not finite are neither stored
//! nor judged.
//!
//! Intervals resample what is nearest to independent: whole heads for errors of heads (the settings measured on one
//! head share its keys and queries), windows of text for losses.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use headq::Scheme;
use headq::metrics::excess_removed;
use headq::scheme::{Family, KeyScheme, Sign};

use super::data::{
    Bases, Correlation, Counterexample, Counterexamples, Direction, EntropyBin, FamilyResult, FlipResult, HeadMap,
    Interval, Judgement, KeyPoint, Metric, NullCurve, NullSpace, Perplexity, PerplexityRow, RankCurve, Role,
    RouteFlips, Selection, SelectionRival, Setting, Spectrum, ValuePoint, Verdict,
};
use super::statistics::{Bootstrap, Units, shuffled, weighted_mean};
use super::thresholds::Thresholds;
use crate::evaluate::SchemeResult;

/// Families that draw on query statistics as the claim means it.
const FROM_QUERIES: [Family; 2] = [Family::QueryPca, Family::ScoreOptimal];
/// Families of the same size that the claim says are worse.
const RIVALS: [Family; 3] = [Family::Random, Family::ResidualPca, Family::QueryPcaCentered];
/// The value policy that E6 leads to, and those beside it; `token` is uniform.
const A2: &str = "a2";
const RIVAL_POLICIES: [&str; 4] = ["token", "mse", "random", "recency"];
/// How many counterexamples are listed.
const LISTED: usize = 10;
/// Decimal fractions such as 3.001 − 3 miss their difference by less than this, in bits.
const ROUNDING: f64 = 1e-9;

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

// Sentences.

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

// Link 1.

/// One point of a correlation: two predictors and what they should rank.
#[derive(Debug, Clone, Copy)]
struct Ranked {
    head: (usize, usize),
    setting: usize,
    storage: f64,
    operator: f64,
    target: f64,
}

/// Link 1, from heads × settings.
///
/// Correlations resample whole heads (layer, KV head), or points where there is one head only.
///
/// # Panics
/// If a point's setting is not among the settings.
pub fn metric(
    settings: Vec<Setting>,
    points: Vec<KeyPoint>,
    value_settings: Vec<Setting>,
    value_points: Vec<ValuePoint>,
    thresholds: &Thresholds,
    seed: u64,
) -> Metric {
    let bootstrap = Bootstrap::new(thresholds, seed);
    let (points, lost) = finite(points, |p| [p.mse, p.fisher, p.kl, p.output_error]);
    let (value_points, values_lost) = finite(value_points, |p| [p.mse, p.a2, p.readout]);
    let ranked: Vec<Ranked> = points.iter().map(of_key).collect();
    let ranked_values: Vec<Ranked> = value_points.iter().map(of_value).collect();
    let keys = correlations(&settings, &ranked, &bootstrap);
    let units = head_units(&ranked);
    let resampled = resampled_in_words(&units);
    let judgement = match lost + values_lost {
        0 => judge_metric(&keys[0], &resampled, thresholds),
        lost => broken(lost, "the errors of heads"),
    };
    Metric {
        judgement,
        resampled,
        replicates: thresholds.replicates,
        shuffled: shuffled_control(&ranked, &bootstrap),
        keys,
        values: correlations(&value_settings, &ranked_values, &bootstrap),
        selection: selection(&value_settings, &value_points, &bootstrap),
        settings,
        points,
        value_settings,
        value_points,
    }
}

fn of_key(p: &KeyPoint) -> Ranked {
    Ranked { head: (p.layer, p.head), setting: p.setting, storage: p.mse, operator: p.fisher, target: p.kl }
}

fn of_value(p: &ValuePoint) -> Ranked {
    Ranked { head: (p.layer, p.head), setting: p.setting, storage: p.mse, operator: p.a2, target: p.readout }
}

fn head_units(points: &[Ranked]) -> Units {
    Units::new(&points.iter().map(|p| p.head).collect::<Vec<_>>())
}

fn resampled_in_words(units: &Units) -> String {
    match units.clustered() {
        true => format!("{} with all of their points", counted(units.count(), "KV head")),
        false => format!("{} (of no more than one KV head)", counted(units.count(), "point")),
    }
}

/// Pooled, then within each quantizer in the order of the settings.
fn correlations(settings: &[Setting], points: &[Ranked], bootstrap: &Bootstrap) -> Vec<Correlation> {
    let mut seen = BTreeSet::new();
    let quantizers = settings.iter().map(|s| s.quantizer.as_str()).filter(|q| seen.insert(*q));
    let mut all = vec![correlation("pooled", points, bootstrap)];
    for quantizer in quantizers {
        let own: Vec<Ranked> = points.iter().filter(|p| settings[p.setting].quantizer == quantizer).copied().collect();
        all.push(correlation(quantizer, &own, bootstrap));
    }
    all
}

fn correlation(group: &str, points: &[Ranked], bootstrap: &Bootstrap) -> Correlation {
    let series = |of: fn(&Ranked) -> f64| points.iter().map(of).collect::<Vec<f64>>();
    let [storage, operator, difference] = bootstrap.compare_predictors(
        &series(|p| p.storage),
        &series(|p| p.operator),
        &series(|p| p.target),
        &head_units(points),
    );
    Correlation { group: group.into(), points: points.len(), storage, operator, difference }
}

/// The pooled correlation with the targets in an order drawn by the seed: what chance gives.
fn shuffled_control(points: &[Ranked], bootstrap: &Bootstrap) -> Correlation {
    let targets = shuffled(&points.iter().map(|p| p.target).collect::<Vec<_>>(), bootstrap.seed);
    let points: Vec<Ranked> = points.iter().zip(targets).map(|(p, target)| Ranked { target, ..*p }).collect();
    correlation("shuffled", &points, bootstrap)
}

fn judge_metric(pooled: &Correlation, resampled: &str, thresholds: &Thresholds) -> Judgement {
    let (least, min_rho) = (thresholds.min_points, show(thresholds.min_rho));
    if pooled.points < least {
        return inconclusive(
            format!("There are {}, too few for a correlation.", counted(pooled.points, "point")),
            format!("At least {least} points (min-points): more quantizer settings."),
        );
    }
    let Some(operator) = &pooled.operator else {
        return inconclusive(
            "The correlation of Fisher error with attention KL is undefined: one of them is the same everywhere.",
            "Settings that lose something, so that errors differ: fewer bits, or a context long enough for coded keys.",
        );
    };
    let exceeds = |test: fn(&Interval) -> bool| pooled.difference.as_ref().is_some_and(test);
    let supported = operator.low >= thresholds.min_rho && exceeds(|d| d.low > 0.0);
    let verdict = decide(supported, operator.high < thresholds.min_rho || exceeds(|d| d.high <= 0.0));
    Judgement {
        verdict,
        because: format!(
            "Over {} Spearman's ρ with attention KL is {} for Fisher error and {} for storage MSE, a difference of {} \
             ({} intervals, resampling {resampled}).",
            counted(pooled.points, "point"),
            show_interval(operator),
            show_optional(pooled.storage.as_ref()),
            show_optional(pooled.difference.as_ref()),
            percent(thresholds.confidence),
        ),
        would_change: match verdict {
            Verdict::Supported => {
                format!("A lower bound of Fisher's ρ below {min_rho} (min-rho), or of the difference at or below 0.")
            }
            Verdict::NotSupported => format!(
                "An upper bound of Fisher's ρ of at least {min_rho} (min-rho) together with one of the difference \
                 above 0."
            ),
            Verdict::Inconclusive => format!(
                "A lower bound of Fisher's ρ of at least {min_rho} (min-rho) and of the difference above 0 supports \
                 it; an upper bound below {min_rho}, or at or below 0, contradicts it: more windows and settings \
                 narrow the intervals."
            ),
        },
    }
}

/// Each `a2` setting beside the policies of the same mean bits: of each policy the setting nearest in code bits, on the
/// heads that both were measured on.
fn selection(settings: &[Setting], points: &[ValuePoint], bootstrap: &Bootstrap) -> Vec<Selection> {
    let by_head = |setting: usize| -> BTreeMap<(usize, usize), f64> {
        points.iter().filter(|p| p.setting == setting).map(|p| ((p.layer, p.head), p.readout)).collect()
    };
    let selected = |(index, setting): (usize, &Setting)| {
        let own = by_head(index);
        let a2 = mean(own.values().copied())?;
        let others = RIVAL_POLICIES.iter().filter_map(|policy| {
            let rival = nearest(settings, policy, setting)?;
            selection_rival(&settings[rival], &own, &by_head(rival), bootstrap)
        });
        Some(Selection { bits: setting.bits, a2, others: others.collect() })
    };
    settings.iter().enumerate().filter(|(_, s)| s.quantizer == A2).filter_map(selected).collect()
}

fn selection_rival(
    setting: &Setting,
    a2: &BTreeMap<(usize, usize), f64>,
    rival: &BTreeMap<(usize, usize), f64>,
    bootstrap: &Bootstrap,
) -> Option<SelectionRival> {
    let pairs: Vec<(f64, f64)> = a2.iter().filter_map(|(head, &a2)| Some((a2, *rival.get(head)?))).collect();
    // A head on which one of them loses nothing has no ratio.
    let ratios: Vec<f64> = pairs.iter().map(|(a2, rival)| (rival / a2).ln()).filter(|r| r.is_finite()).collect();
    let won = pairs.iter().filter(|(a2, rival)| a2 < rival).count();
    Some(SelectionRival {
        policy: setting.quantizer.clone(),
        code_bits: setting.code_bits,
        readout: mean(rival.values().copied())?,
        log_ratio: bootstrap.mean(&ratios),
        heads_won: (!pairs.is_empty()).then(|| won as f64 / pairs.len() as f64),
    })
}

/// Of a policy's settings with as many bits, the one nearest in code bits.
fn nearest(settings: &[Setting], policy: &str, to: &Setting) -> Option<usize> {
    let distance = |i: &usize| (settings[*i].code_bits - to.code_bits).abs();
    (0..settings.len())
        .filter(|&i| settings[i].quantizer == policy && settings[i].bits == to.bits)
        .min_by(|a, b| distance(a).total_cmp(&distance(b)))
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    weighted_mean(&values, &vec![1; values.len()])
}

// Link 2.

/// Link 2: all pairs of settings on one head whose code bits differ by no more than the tolerance.
///
/// Those with the lower storage MSE but the higher KL and output error, all strictly, are counterexamples. The interval
/// of their share resamples whole heads; on a single head there is none.
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
            format!("{found}, all on one head, which gives no interval."),
            "A model with at least two KV heads over all layers.",
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

// Link 3.

/// How the Fisher error of one curve moves with α.
#[derive(Debug, Clone, PartialEq)]
struct Movement {
    scheme: String,
    /// α and Fisher error where it is least (the first such α).
    least: (f64, f64),
    /// The same where it is greatest.
    most: (f64, f64),
}

impl Movement {
    /// `None` for fewer than two α or a Fisher error of zero everywhere.
    fn of(curve: &NullCurve) -> Option<Self> {
        let at = |p: &super::data::NullPoint| (p.alpha, p.fisher);
        let least = curve.points.iter().min_by(|a, b| a.fisher.total_cmp(&b.fisher)).map(at)?;
        // Of equal maxima the first, as of equal minima.
        let most = curve.points.iter().rev().max_by(|a, b| a.fisher.total_cmp(&b.fisher)).map(at)?;
        (curve.points.len() > 1 && most.1 > 0.0).then(|| Self { scheme: curve.scheme.clone(), least, most })
    }

    /// Whether the greatest error is at least `ratio` times the least.
    fn reaches(&self, ratio: f64) -> bool {
        self.most.1 >= ratio * self.least.1
    }

    /// (greatest − least) / greatest, in [0, 1].
    fn change(&self) -> f64 {
        (self.most.1 - self.least.1) / self.most.1
    }

    fn rises(&self) -> bool {
        self.least.0 < self.most.0
    }

    fn in_words(&self) -> String {
        format!(
            "from {} nats at α = {} to {} at α = {} for {}",
            show(self.least.1),
            show(self.least.0),
            show(self.most.1),
            show(self.most.0),
            self.scheme
        )
    }
}

/// Link 3, from the Fisher error of static and shift-equivariant quantizers over α.
///
/// `dense_change` is the largest change of a dense attention probability; what is not a number is stored as 1, the most
/// that a probability can change, and as a tolerance of 0.
pub fn null_space(
    dense_change: f64,
    dense_tolerance: f64,
    curves: Vec<NullCurve>,
    thresholds: &Thresholds,
) -> NullSpace {
    // A change that is no number counts with the measurements that are not finite.
    let mut lost = usize::from(!dense_change.is_finite()) + usize::from(!dense_tolerance.is_finite());
    let dense_change = if dense_change.is_finite() { dense_change } else { 1.0 };
    let dense_tolerance = if dense_tolerance.is_finite() { dense_tolerance } else { 0.0 };
    let clean = |curve: NullCurve| {
        let (points, own) = finite(curve.points, |p| [p.alpha, p.fisher, p.kl, p.mse]);
        lost += own;
        NullCurve { points, ..curve }
    };
    let curves: Vec<NullCurve> = curves.into_iter().map(clean).collect();
    let judgement = if lost > 0 {
        broken(lost, "dense attention and the curves")
    } else if dense_change > dense_tolerance {
        inconclusive(
            format!(
                "Dense attention moved by {}, more than {}, so that the shift was not what it claims to be.",
                show(dense_change),
                show(dense_tolerance)
            ),
            "Keys and scores in a precision in which the shift cancels.",
        )
    } else {
        judge_null_space(&curves, thresholds)
    };
    NullSpace { judgement, dense_change, dense_tolerance, curves }
}

fn judge_null_space(curves: &[NullCurve], thresholds: &Thresholds) -> Judgement {
    let kind = |equivariant: bool| curves.iter().filter(move |c| c.equivariant == equivariant).map(Movement::of);
    let moving: Option<Vec<Movement>> = kind(false).collect();
    let flat: Option<Vec<Movement>> = kind(true).collect();
    let (Some(moving), Some(flat)) = (moving, flat) else {
        return inconclusive(
            "A curve has a single α, or no Fisher error anywhere.",
            "Several values of α, fewer bits, or a context long enough for coded keys.",
        );
    };
    if moving.is_empty() || flat.is_empty() {
        return inconclusive(
            "The claim compares a static quantizer with a shift-equivariant one, and one of them was not measured.",
            "A curve of each.",
        );
    }
    let still = moving.iter().any(|m| !m.reaches(thresholds.min_null_rise));
    let uneven = flat.iter().any(|m| m.change() > thresholds.max_null_change);
    let verdict = decide(moving.iter().all(Movement::rises), still || uneven);
    let static_words: Vec<String> = moving.iter().map(Movement::in_words).collect();
    let flat_words: Vec<String> = flat.iter().map(|m| format!("by {} for {}", percent(m.change()), m.scheme)).collect();
    let (rise, change) = (show(thresholds.min_null_rise), percent(thresholds.max_null_change));
    Judgement {
        verdict,
        because: format!(
            "Dense attention stays, while the Fisher error goes {}; it varies {}.",
            static_words.join(", "),
            flat_words.join(", ")
        ),
        would_change: match verdict {
            Verdict::Supported => format!(
                "A static curve whose largest Fisher error is less than {rise} times its smallest (min-null-rise), or \
                 a shift-equivariant one that changes by more than {change} (max-null-change)."
            ),
            Verdict::NotSupported => format!(
                "Every static curve's largest Fisher error at least {rise} times its smallest (min-null-rise) and \
                 every shift-equivariant curve within {change} (max-null-change)."
            ),
            Verdict::Inconclusive => {
                "Fisher errors that are lowest at the smaller α: they change, but fall, which grid \
                                      scales fitted to centered keys would not make them do."
                    .into()
            }
        },
    }
}

// Links 4, 5 and 7: what the base quantizer costs decides whether there is something to correct.

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
        let Some(damage) = damage else {
            return Some(inconclusive(
                format!(
                    "{} no interval.",
                    match self.dense.window_nll.len() {
                        0 | 1 => "Fewer than two windows give",
                        _ => "Losses that are not finite or not of the same windows give",
                    }
                ),
                "Finite losses of at least two windows.",
            ));
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
                    "There is nothing to correct on this model: the base quantizer costs {} nats per token.",
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

/// Link 4, from every family at the same budget.
///
/// The claim is decided by the loss of the best family learned from queries (`query-pca`, `score-optimal`) against the
/// best of the rivals (`random`, `residual-pca`, `query-pca-centered`); both are chosen anew in each resample of the
/// windows, so that the choice does not flatter. Other families are shown, and take no part.
pub fn bases(
    reference: Reference,
    families: Vec<MeasuredFamily>,
    detail: BasisDetail,
    thresholds: &Thresholds,
    seed: u64,
) -> Bases {
    let bootstrap = Bootstrap::new(thresholds, seed);
    let damage = reference.damage(&bootstrap);
    let judgement = reference
        .obstacle(damage.as_ref(), thresholds)
        .unwrap_or_else(|| judge_bases(&reference, &families, &bootstrap, thresholds));
    let base = &reference.base.window_nll;
    let result = |f: MeasuredFamily| FamilyResult {
        family: f.family.name().into(),
        captured: bootstrap.mean(&defined(&f.captured)),
        gain: bootstrap.mean_difference(base, &f.run.window_nll),
        result: f.run.result,
    };
    let families = families.into_iter().map(result).collect();
    let BasisDetail { ranks, curves, spectrum, maps } = detail;
    let (dense, base) = (reference.dense.result, reference.base.result);
    Bases { judgement, dense, base, families, ranks, curves, spectrum, maps }
}

fn defined(values: &[Option<f64>]) -> Vec<f64> {
    values.iter().flatten().copied().filter(|v| v.is_finite()).collect()
}

impl MeasuredFamily {
    fn mean_captured(&self) -> Option<f64> {
        mean(defined(&self.captured).into_iter())
    }

    fn kl(&self) -> Option<f64> {
        self.run.result.kl.filter(|kl| kl.is_finite())
    }
}

/// The family with the lowest loss.
fn best<'a>(families: &[&'a MeasuredFamily]) -> Option<&'a MeasuredFamily> {
    families.iter().min_by(|a, b| a.run.result.nll.total_cmp(&b.run.result.nll)).copied()
}

/// Lowest loss of the rivals minus lowest loss of the others, nats per token, by window.
fn advantage(own: &[&MeasuredFamily], rivals: &[&MeasuredFamily], bootstrap: &Bootstrap) -> Option<Interval> {
    let windows = own.first()?.run.window_nll.len();
    let lowest = |families: &[&MeasuredFamily], multiplicities: &[u32]| -> Option<f64> {
        let losses: Option<Vec<f64>> =
            families.iter().map(|f| weighted_mean(&f.run.window_nll, multiplicities)).collect();
        losses?.into_iter().min_by(f64::total_cmp)
    };
    let same = own.iter().chain(rivals).all(|f| f.run.window_nll.len() == windows);
    same.then(|| bootstrap.interval(windows, |m| Some(lowest(rivals, m)? - lowest(own, m)?))).flatten()
}

/// How the best family learned from queries compares with all rivals on one number; `None` if one is undefined.
fn all_beaten(
    own: &MeasuredFamily,
    rivals: &[&MeasuredFamily],
    number: impl Fn(&MeasuredFamily) -> Option<f64>,
    better: impl Fn(f64, f64) -> bool,
) -> Option<bool> {
    let own = number(own)?;
    let rivals: Option<Vec<f64>> = rivals.iter().map(|r| number(r)).collect();
    Some(rivals?.into_iter().all(|rival| better(own, rival)))
}

fn judge_bases(
    reference: &Reference,
    families: &[MeasuredFamily],
    bootstrap: &Bootstrap,
    thresholds: &Thresholds,
) -> Judgement {
    let side = |names: &[Family]| families.iter().filter(|f| names.contains(&f.family)).collect::<Vec<_>>();
    let (own, rivals) = (side(&FROM_QUERIES), side(&RIVALS));
    let (Some(first), Some(second)) = (best(&own), best(&rivals)) else {
        return inconclusive(
            "The claim compares a basis learned from queries with others of the same size, and one side was not \
             measured.",
            "query-pca or score-optimal, and random, residual-pca or query-pca-centered.",
        );
    };
    let Some(advantage) = advantage(&own, &rivals, bootstrap) else {
        return inconclusive(
            "A family's losses are not finite or not of the same windows.",
            "Finite losses of the same windows.",
        );
    };
    let lower_kl = all_beaten(first, &rivals, MeasuredFamily::kl, |own, rival| own < rival);
    let more_captured = all_beaten(first, &rivals, MeasuredFamily::mean_captured, |own, rival| own > rival);
    let lowest = |side: &[&MeasuredFamily]| side.iter().filter_map(|f| f.kl()).min_by(f64::total_cmp);
    let kl_contradicts = lowest(&own).zip(lowest(&rivals)).is_some_and(|(own, rival)| own > rival);
    let supported = advantage.low > 0.0 && lower_kl == Some(true) && more_captured == Some(true);
    let verdict = decide(supported, advantage.high <= 0.0 || kl_contradicts);
    Judgement {
        verdict,
        because: format!(
            "{} loses {} nats per token less than {}, the best of {} ({} interval over {} windows), with an attention \
             KL of {} against {} nats and a captured share of {} against {}.",
            first.family,
            show_interval(&advantage),
            second.family,
            counted(rivals.len(), "rival"),
            percent(thresholds.confidence),
            reference.windows(),
            first.kl().map_or("undefined".into(), show),
            lowest(&rivals).map_or("undefined".into(), show),
            first.mean_captured().map_or("undefined".into(), percent),
            rivals.iter().filter_map(|r| r.mean_captured()).max_by(f64::total_cmp).map_or("undefined".into(), percent),
        ),
        would_change: match verdict {
            Verdict::Supported => {
                "A lower bound of the advantage at or below 0, or a rival with lower KL or a higher captured share."
            }
            Verdict::NotSupported => {
                "An upper bound of the advantage above 0, and an attention KL no higher than the lowest of the rivals."
            }
            Verdict::Inconclusive => {
                "A lower bound of the advantage above 0 with lower KL and a higher captured share than every rival \
                 supports it; an upper bound at or below 0, or a rival with the lowest KL, contradicts it: more \
                 windows narrow the interval."
            }
        }
        .into(),
    }
}

/// Link 5, from the correction and the same with its sign flipped.
pub fn direction(
    reference: Reference,
    corrected: Measured,
    flipped: Measured,
    thresholds: &Thresholds,
    seed: u64,
) -> Direction {
    let bootstrap = Bootstrap::new(thresholds, seed);
    let base = &reference.base.window_nll;
    let base_loss = reference.damage(&bootstrap);
    let corrected_gain = bootstrap.mean_difference(base, &corrected.window_nll);
    let flipped_loss = bootstrap.mean_difference(&flipped.window_nll, base);
    let judgement = reference.obstacle(base_loss.as_ref(), thresholds).unwrap_or_else(|| {
        judge_direction(
            base_loss.as_ref(),
            corrected_gain.as_ref(),
            flipped_loss.as_ref(),
            reference.windows(),
            thresholds,
        )
    });
    Direction {
        judgement,
        dense: reference.dense.result,
        base: reference.base.result,
        corrected: corrected.result,
        flipped: flipped.result,
        corrected_gain,
        flipped_loss,
        base_loss,
    }
}

fn judge_direction(
    base: Option<&Interval>,
    gain: Option<&Interval>,
    loss: Option<&Interval>,
    windows: usize,
    thresholds: &Thresholds,
) -> Judgement {
    let (Some(base), Some(gain), Some(loss)) = (base, gain, loss) else {
        return inconclusive(
            "A scheme's losses are not finite or not of the same windows.",
            "Finite losses of the same windows.",
        );
    };
    let least = thresholds.min_flip_ratio;
    // By multiplication, so that nothing divides by a loss near zero.
    let large = loss.estimate >= least * base.estimate;
    let supported = loss.low > 0.0 && gain.low > 0.0 && large;
    let verdict = decide(supported, loss.high <= 0.0 || gain.high <= 0.0);
    let least = format!("{} times the base quantizer's (min-flip-ratio)", show(least));
    Judgement {
        verdict,
        because: format!(
            "The base quantizer costs {} nats per token; the flipped correction adds {}, {} times as much, and the \
             right one takes off {} ({} intervals over {windows} windows).",
            show_interval(base),
            show_interval(loss),
            show(loss.estimate / base.estimate),
            show_interval(gain),
            percent(thresholds.confidence),
        ),
        would_change: match verdict {
            Verdict::Supported => {
                format!(
                    "An added loss below {least}, or a lower bound of it or of what the right sign takes off at or \
                     below 0."
                )
            }
            Verdict::NotSupported => {
                "Upper bounds above 0 both of what the flipped correction adds and of what the right one takes off."
                    .into()
            }
            Verdict::Inconclusive => format!(
                "An added loss of at least {least} and lower bounds above 0 support it, an upper bound at or below 0 \
                 contradicts it: more windows narrow the intervals."
            ),
        },
    }
}

// Link 6.

/// Flip shares of queries with low and with high attention entropy, cut at the bin edge nearest to the median.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Halves {
    edge: f64,
    /// Queries and flips.
    low: (u64, u64),
    high: (u64, u64),
}

impl Halves {
    /// `None` where no edge has queries on both sides.
    fn of(bins: &[EntropyBin]) -> Option<Self> {
        let sum = |bins: &[EntropyBin]| bins.iter().fold((0, 0), |(q, f), b| (q + b.queries, f + b.flips));
        let cut = |i: usize| Self { edge: bins[i].low, low: sum(&bins[..i]), high: sum(&bins[i..]) };
        let imbalance = |h: &Halves| h.low.0.abs_diff(h.high.0);
        (1..bins.len()).map(cut).filter(|h| h.low.0 > 0 && h.high.0 > 0).min_by_key(imbalance)
    }

    fn shares(&self) -> (f64, f64) {
        let share = |(queries, flips): (u64, u64)| flips as f64 / queries as f64;
        (share(self.low), share(self.high))
    }
}

/// Link 6, decided on the first scheme, the base.
///
/// The median entropy is taken at the edge of the bins that comes nearest to halving the queries.
pub fn route_flips(schemes: Vec<FlipResult>, thresholds: &Thresholds) -> RouteFlips {
    let judgement = match schemes.first() {
        Some(base) => judge_route_flips(base, thresholds),
        None => inconclusive("No scheme was measured.", "The base quantizer's flips."),
    };
    RouteFlips { judgement, schemes }
}

fn judge_route_flips(base: &FlipResult, thresholds: &Thresholds) -> Judgement {
    let (halves, rho) = match enough_flips(base, thresholds) {
        Ok(enough) => enough,
        Err(judgement) => return judgement,
    };
    let (low, high) = halves.shares();
    // By multiplication: the share below the median may be 0.
    let supported = high >= thresholds.min_flip_rise * low && rho.low >= thresholds.min_rho;
    let verdict = decide(supported, high < low || rho.high < thresholds.min_rho);
    let (rise, min_rho) = (show(thresholds.min_flip_rise), show(thresholds.min_rho));
    Judgement {
        verdict,
        because: format!(
            "The most attended token changes for {} of queries above the median entropy ({} nats) and for {} below; \
             where it does not change, Spearman's ρ of Fisher error and KL is {} ({} interval over {} sampled \
             queries).",
            percent(high),
            show(halves.edge),
            percent(low),
            show_interval(&rho),
            percent(thresholds.confidence),
            base.unflipped.sampled,
        ),
        would_change: match verdict {
            Verdict::Supported => format!(
                "A flip share above the median entropy of less than {rise} times that below (min-flip-rise), or a \
                 lower bound of ρ below {min_rho} (min-rho)."
            ),
            Verdict::NotSupported => format!(
                "A flip share above the median entropy no lower than that below, and an upper bound of ρ of at least \
                 {min_rho} (min-rho)."
            ),
            Verdict::Inconclusive => format!(
                "A flip share above the median entropy of at least {rise} times that below (min-flip-rise) and a lower \
                 bound of ρ of at least {min_rho} (min-rho) support it; a lower share above than below, or an upper \
                 bound of ρ below {min_rho}, contradicts it."
            ),
        },
    }
}

/// What the verdict rests on, or why it cannot be given.
fn enough_flips(base: &FlipResult, thresholds: &Thresholds) -> Result<(Halves, Interval), Judgement> {
    let least = thresholds.min_points;
    if base.flips == 0 {
        return Err(inconclusive(
            format!("The most attended token changes for none of {} queries.", base.queries),
            "A base quantizer with fewer bits, or a context long enough for coded keys.",
        ));
    }
    if base.flips < least as u64 || base.unflipped.sampled < least {
        return Err(inconclusive(
            format!(
                "There are {} flips and {} unflipped queries, too few to compare.",
                base.flips, base.unflipped.sampled
            ),
            format!("At least {least} of each (min-points): more windows."),
        ));
    }
    let halves = Halves::of(&base.bins).filter(|h| h.low.0.min(h.high.0) >= least as u64).ok_or_else(|| {
        inconclusive(
            "The attention entropy of nearly all queries lies in one bin, which leaves nothing to compare.",
            format!("At least {least} queries (min-points) on both sides of a bin edge."),
        )
    })?;
    let rho = base.unflipped.rho.ok_or_else(|| {
        inconclusive(
            "Spearman's ρ over unflipped queries is undefined: Fisher error or KL is the same for all of them.",
            "Unflipped queries whose errors differ.",
        )
    })?;
    Ok((halves, rho))
}

// Link 7.

/// Link 7, from all rows, the dense one first.
///
/// Each row is compared with its own reference: the gain by window, and the excess perplexity removed (E8), which is
/// `None` in rows without one. The verdict is on keys only: the best row of a basis learned from queries against the
/// base quantizer and against the random basis.
pub fn perplexity(rows: Vec<MeasuredRow>, vocabulary: usize, thresholds: &Thresholds, seed: u64) -> Perplexity {
    let bootstrap = Bootstrap::new(thresholds, seed);
    let dense = rows.iter().find(|r| r.role == Role::Dense);
    let compared: Vec<PerplexityRow> = rows.iter().map(|row| compare(row, &rows, dense, &bootstrap)).collect();
    let base = rows.iter().find(|r| r.role == Role::Base);
    let judgement = match dense.zip(base) {
        None => inconclusive("The dense model or the base quantizer was not measured.", "A row of each."),
        Some((dense, base)) => {
            let reference = Reference { dense: dense.run.clone(), base: base.run.clone(), vocabulary };
            let damage = reference.damage(&bootstrap);
            reference
                .obstacle(damage.as_ref(), thresholds)
                .unwrap_or_else(|| judge_perplexity(&reference, &compared, thresholds))
        }
    };
    Perplexity { judgement, rows: compared }
}

fn compare(
    row: &MeasuredRow,
    rows: &[MeasuredRow],
    dense: Option<&MeasuredRow>,
    bootstrap: &Bootstrap,
) -> PerplexityRow {
    let reference = row.reference.as_ref().and_then(|name| {
        rows.iter().find(|r| r.run.result.scheme == *name || r.run.result.canonical == *name).map(|r| &r.run)
    });
    let excess = reference.zip(dense).and_then(|(reference, dense)| {
        excess_removed(reference.result.ppl, row.run.result.ppl, dense.run.result.ppl).map(|share| share + 0.0)
    });
    PerplexityRow {
        role: row.role,
        result: SchemeResult { excess_removed: excess, ..row.run.result.clone() },
        reference: row.reference.clone(),
        gain: reference.and_then(|r| bootstrap.mean_difference(&r.window_nll, &row.run.window_nll)),
    }
}

impl PerplexityRow {
    fn key(&self) -> Option<KeyScheme> {
        self.result.canonical.parse::<Scheme>().ok()?.key
    }

    /// Whether this row corrects with one of these families, the right way round.
    fn corrects_with(&self, families: &[Family]) -> bool {
        let side = self.key().and_then(|k| k.side);
        side.is_some_and(|s| families.contains(&s.family) && s.sign == Sign::Plus)
    }

    fn is_compared_with(&self, base: &SchemeResult) -> bool {
        self.reference.as_ref().is_some_and(|r| *r == base.scheme || *r == base.canonical)
    }
}

fn judge_perplexity(reference: &Reference, rows: &[PerplexityRow], thresholds: &Thresholds) -> Judgement {
    let base = &reference.base.result;
    let most = |role: Role, families: &[Family]| {
        let own = rows.iter().filter(|r| r.role == role && r.corrects_with(families) && r.is_compared_with(base));
        let measured = own.filter_map(|r| Some((r, r.gain?, r.result.excess_removed?)));
        measured.max_by(|a, b| a.1.estimate.total_cmp(&b.1.estimate))
    };
    let Some((row, gain, excess)) = most(Role::Corrected, &FROM_QUERIES) else {
        return inconclusive(
            "No correction learned from queries was compared with the base quantizer.",
            "A row of query-pca or score-optimal with finite losses.",
        );
    };
    let Some((_, _, random)) = most(Role::Control, &[Family::Random]) else {
        return inconclusive(
            format!(
                "{} removes {} of the excess, but no random basis was measured beside it.",
                row.result.scheme,
                percent(excess)
            ),
            "A row of the random basis at the same budget.",
        );
    };
    let least = thresholds.min_excess_removed;
    let supported = gain.low > 0.0 && excess >= least && excess > random;
    let verdict = decide(supported, gain.high <= 0.0 || excess < random);
    let bound = format!("{} (min-excess-removed)", percent(least));
    let because = format!(
        "{} gains {} nats per token over {} ({} interval over {} windows) and removes {} of the excess perplexity, a \
         random basis {}.",
        row.result.scheme,
        show_interval(&gain),
        base.scheme,
        percent(thresholds.confidence),
        reference.windows(),
        percent(excess),
        percent(random),
    );
    let others = [one_more_bit(reference, row, excess, rows), full_cache(rows)].into_iter().flatten();
    Judgement {
        verdict,
        because: std::iter::once(because).chain(others).collect::<Vec<_>>().join(" "),
        would_change: match verdict {
            Verdict::Supported => format!(
                "A lower bound of the gain at or below 0, less than {bound} of the excess removed, or no more than by \
                 a random basis."
            ),
            Verdict::NotSupported => {
                "An upper bound of the gain above 0, and at least as much of the excess removed as by a random basis."
                    .into()
            }
            Verdict::Inconclusive => format!(
                "A lower bound of the gain above 0 with at least {bound} of the excess removed, and more than by a \
                 random basis, supports it; an upper bound at or below 0, or less than by a random basis, contradicts \
                 it: more windows narrow the interval."
            ),
        },
    }
}

/// What the same base quantizer with one more bit for every key removes, where it was measured.
fn one_more_bit(
    reference: &Reference,
    corrected: &PerplexityRow,
    excess: f64,
    rows: &[PerplexityRow],
) -> Option<String> {
    let (dense, base) = (&reference.dense.result, &reference.base.result);
    let coded = base.canonical.parse::<Scheme>().ok()?.key?.base;
    let wider = |r: &&PerplexityRow| {
        let key = r.key().filter(|k| k.side.is_none());
        r.role == Role::Control
            && key.is_some_and(|k| k.base.quantizer == coded.quantizer && k.base.bits == coded.bits + 1)
    };
    let wider = &rows.iter().find(wider)?.result;
    let removed = excess_removed(base.ppl, wider.ppl, dense.ppl)?;
    Some(format!(
        "One more bit for every key ({}, {} code bits per element against {}) removes {}, {} the correction.",
        wider.scheme,
        show(wider.key_bits),
        show(corrected.result.key_bits),
        percent(removed),
        match removed.total_cmp(&excess) {
            Ordering::Greater => "more than",
            Ordering::Equal => "as much as",
            Ordering::Less => "less than",
        },
    ))
}

/// What corrections do where values are coded too.
fn full_cache(rows: &[PerplexityRow]) -> Option<String> {
    let own = rows.iter().filter(|r| r.role == Role::FullCorrected);
    let (gains, shares): (Vec<f64>, Vec<f64>) =
        own.filter_map(|r| Some((r.gain?.estimate, r.result.excess_removed?))).unzip();
    let least = shares.iter().copied().min_by(f64::total_cmp)?;
    let most = shares.iter().copied().max_by(f64::total_cmp)?;
    Some(format!(
        "With values coded too, the correction gains in {} of {} and removes {} of the excess.",
        gains.iter().filter(|g| **g > 0.0).count(),
        counted(gains.len(), "comparison"),
        match least == most {
            true => percent(most),
            false => format!("{} to {}", percent(least), percent(most)),
        },
    ))
}
