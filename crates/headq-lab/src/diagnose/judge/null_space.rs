//! Link 3: shifts that attention cannot see.

use super::{broken, decide, finite, inconclusive, percent, show};
use crate::diagnose::data::{Judgement, NullCurve, NullPoint, NullSpace, Verdict};
use crate::diagnose::thresholds::Thresholds;

/// How the Fisher error of one curve moves with α.
#[derive(Debug, Clone, PartialEq)]
struct Movement {
    scheme: String,
    /// α and Fisher error of the first point, where keys are centered.
    centered: (f64, f64),
    /// The same where it is least (the first such α).
    least: (f64, f64),
    /// The same where it is greatest.
    most: (f64, f64),
}

impl Movement {
    /// `None` for fewer than two α or a Fisher error of zero everywhere.
    fn of(curve: &NullCurve) -> Option<Self> {
        let at = |p: &NullPoint| (p.alpha, p.fisher);
        let least = curve.points.iter().min_by(|a, b| a.fisher.total_cmp(&b.fisher)).map(at)?;
        // Of equal maxima the first, as of equal minima.
        let most = curve.points.iter().rev().max_by(|a, b| a.fisher.total_cmp(&b.fisher)).map(at)?;
        let centered = curve.points.first().map(at)?;
        (curve.points.len() > 1 && most.1 > 0.0).then(|| Self { scheme: curve.scheme.clone(), centered, least, most })
    }

    /// Whether the shift raises the error to at least `ratio` times that of centered keys.
    fn rises(&self, ratio: f64) -> bool {
        self.most.0 > self.centered.0 && self.most.1 >= ratio * self.centered.1
    }

    /// Whether the greatest error is at least `ratio` times the least, wherever they are.
    fn changes(&self, ratio: f64) -> bool {
        self.most.1 >= ratio * self.least.1
    }

    /// (greatest − least) / greatest, in [0, 1].
    fn change(&self) -> f64 {
        (self.most.1 - self.least.1) / self.most.1
    }

    fn in_words(&self) -> String {
        let at = |(alpha, fisher): (f64, f64)| format!("{} at α = {}", show(fisher), show(alpha));
        let (centered, least, most) = (at(self.centered), at(self.least), at(self.most));
        format!("{centered}, least {least}, greatest {most} for {}", self.scheme)
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
    let still = !moving.iter().any(|m| m.changes(thresholds.min_null_rise));
    let uneven = flat.iter().any(|m| m.change() > thresholds.max_null_change);
    let verdict = decide(moving.iter().any(|m| m.rises(thresholds.min_null_rise)), still || uneven);
    let static_words: Vec<String> = moving.iter().map(Movement::in_words).collect();
    let flat_words: Vec<String> = flat.iter().map(|m| format!("by {} for {}", percent(m.change()), m.scheme)).collect();
    let (rise, change) = (show(thresholds.min_null_rise), percent(thresholds.max_null_change));
    Judgement {
        verdict,
        because: format!(
            "Dense attention stays, while the Fisher error is {} (nats); it varies {}.",
            static_words.join("; "),
            flat_words.join(", ")
        ),
        would_change: match verdict {
            Verdict::Supported => format!(
                "No static curve that rises to {rise} times its Fisher error on centered keys, α = 0 (min-null-rise), or \
                 a shift-equivariant one that changes by more than {change} (max-null-change)."
            ),
            Verdict::NotSupported => format!(
                "A static curve that rises to {rise} times its Fisher error on centered keys, α = 0 (min-null-rise), with \
                 every shift-equivariant curve within {change} (max-null-change)."
            ),
            Verdict::Inconclusive => format!(
                "A static curve that rises to {rise} times its Fisher error on centered keys, α = 0 (min-null-rise): they \
                 change with the shift, but are as bad on centered keys."
            ),
        },
    }
}
