//! Link 6: changes of the most attended token.

use super::{decide, inconclusive, percent, show, show_interval};
use crate::diagnose::data::{EntropyBin, FlipResult, Interval, Judgement, RouteFlips, Verdict};
use crate::diagnose::thresholds::Thresholds;

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
