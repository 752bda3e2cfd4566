//! Link 7: what the correction gives back.

use std::cmp::Ordering;

use headq::Scheme;
use headq::metrics::excess_removed;
use headq::scheme::{Family, KeyScheme, Sign};

use super::{FROM_QUERIES, MeasuredRow, Reference, counted, decide, inconclusive, percent, show, show_interval};
use crate::diagnose::data::{Judgement, Perplexity, PerplexityRow, Role, Verdict};
use crate::diagnose::statistics::Bootstrap;
use crate::diagnose::thresholds::Thresholds;
use crate::evaluate::SchemeResult;

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
            && key.is_some_and(|k| k.base.quantizer == coded.quantizer && k.base.bits == coded.bits.one_more())
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
