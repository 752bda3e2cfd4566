//! Link 5: the correction with its sign flipped.

use super::{Measured, Reference, decide, inconclusive, percent, show, show_interval};
use crate::diagnose::data::{Direction, Interval, Judgement, Verdict};
use crate::diagnose::statistics::Bootstrap;
use crate::diagnose::thresholds::Thresholds;

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
