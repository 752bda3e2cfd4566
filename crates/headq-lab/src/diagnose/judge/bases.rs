//! Link 4: bases from queries against others of the same size.

use headq::scheme::Family;

use super::{
    BasisDetail, FROM_QUERIES, MeasuredFamily, RIVALS, Reference, counted, decide, inconclusive, mean, percent, show,
    show_interval,
};
use crate::diagnose::data::{Bases, FamilyResult, Interval, Judgement, Verdict};
use crate::diagnose::statistics::{Bootstrap, weighted_mean};
use crate::diagnose::thresholds::Thresholds;

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
            "{} is better by {} nats per token than {}, the best of {} ({} interval over {} windows), with an attention \
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
