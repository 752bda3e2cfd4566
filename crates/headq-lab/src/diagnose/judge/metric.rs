//! Link 1: does the Fisher error rank quantizers as attention KL does?

use std::collections::{BTreeMap, BTreeSet};

use super::{broken, counted, decide, finite, inconclusive, mean, percent, show, show_interval, show_optional};
use crate::diagnose::data::{
    Correlation, Interval, Judgement, KeyPoint, Metric, Selection, SelectionRival, Setting, ValuePoint, Verdict,
};
use crate::diagnose::statistics::{Bootstrap, Units};
use crate::diagnose::thresholds::Thresholds;

/// The value policy that E6 leads to, and those beside it; `token` is uniform.
const A2: &str = "a2";
const RIVAL_POLICIES: [&str; 4] = ["token", "mse", "random", "recency"];

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
/// Correlations resample whole heads (layer, KV head), or points where there are too few heads (min-units).
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
    let units = head_units(&ranked, bootstrap.min_units);
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

fn head_units(points: &[Ranked], least: usize) -> Units {
    Units::new(&points.iter().map(|p| p.head).collect::<Vec<_>>(), least)
}

fn resampled_in_words(units: &Units) -> String {
    match units.clustered() {
        true => format!("{} with all of their points", counted(units.count(), "KV head")),
        false => format!("{} (of too few KV heads to resample)", counted(units.count(), "point")),
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
        &head_units(points, bootstrap.min_units),
    );
    Correlation { group: group.into(), points: points.len(), storage, operator, difference }
}

/// The pooled correlation with the targets in an order drawn by the seed: what chance gives.
/// The permutation distribution: mean and quantiles of ρ over shuffles of the target among the points.
fn shuffled_control(points: &[Ranked], bootstrap: &Bootstrap) -> Correlation {
    let column = |value: fn(&Ranked) -> f64| points.iter().map(value).collect::<Vec<f64>>();
    let (storage, operator, target) = (column(|p| p.storage), column(|p| p.operator), column(|p| p.target));
    let [storage, operator, difference] = bootstrap.shuffled_predictors(&storage, &operator, &target);
    Correlation { group: "shuffled".into(), points: points.len(), storage, operator, difference }
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
