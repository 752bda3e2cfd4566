//! The numbers by which runs are compared.

use headq::Scheme;
use headq::scheme::{Family, Sign};
use headq_lab::diagnose::data::{Correlation, Interval, Role, Verdict};
use headq_lab::evaluate::SchemeResult;

use crate::Run;

/// What one run comes to.
pub struct Headline<'a> {
    /// Full precision.
    pub dense: Option<&'a SchemeResult>,
    /// Quantized keys without a correction.
    pub base: Option<&'a SchemeResult>,
    /// Corrected in the `query-pca` basis.
    pub query_pca: Option<&'a SchemeResult>,
    /// Corrected in the `score-optimal` basis.
    pub score_optimal: Option<&'a SchemeResult>,
    /// Corrected in a trained basis.
    pub learned: Option<&'a SchemeResult>,
    /// Link 1, pooled over all settings.
    pub pooled: Option<&'a Correlation>,
    /// Link 2: count and pairs.
    pub counterexamples: Option<(usize, usize)>,
    /// Share of counterexamples.
    pub counterexample_share: Option<Interval>,
    /// Link 6: share of queries flipped by the base, and with the correction.
    pub flips: [Option<f64>; 2],
    /// Verdicts by link; none where it was not taken, or nothing was diagnosed.
    pub verdicts: [Option<Verdict>; 7],
}

impl<'a> Headline<'a> {
    /// Takes the numbers of a run from the links that have them, and from its evaluation where no link does.
    pub fn of(run: &'a Run) -> Self {
        let results: Vec<(Role, &SchemeResult)> = results(run);
        let first = |role: Role| results.iter().find(|(r, _)| *r == role).map(|(_, result)| *result);
        let family = |family: Family| {
            let in_family =
                |result: &SchemeResult| parsed(result).and_then(|s| s.side().map(|side| side.family)) == Some(family);
            results
                .iter()
                .find(|(role, result)| *role == Role::Corrected && in_family(result))
                .map(|(_, result)| *result)
        };
        let diagnosis = run.diagnosis.as_ref();
        let counterexamples = diagnosis.and_then(|d| d.counterexamples.as_ref());
        let flips = diagnosis.and_then(|d| d.route_flips.as_ref());
        let flipped = |i: usize| flips.and_then(|f| f.schemes.get(i)).and_then(|scheme| scheme.share);
        Self {
            dense: first(Role::Dense),
            base: first(Role::Base),
            query_pca: family(Family::QueryPca),
            score_optimal: family(Family::ScoreOptimal),
            learned: family(Family::Learned),
            pooled: diagnosis.and_then(|d| d.metric.as_ref()).and_then(|metric| metric.keys.first()),
            counterexamples: counterexamples.map(|c| (c.count, c.pairs)),
            counterexample_share: counterexamples.and_then(|c| c.share),
            flips: [flipped(0), flipped(1)],
            verdicts: diagnosis.map_or([None; 7], |d| d.judgements().map(|j| j.map(|j| j.verdict))),
        }
    }

    /// The correction that stands for the method: `query-pca` where it was taken.
    pub fn corrected(&self) -> Option<&'a SchemeResult> {
        self.query_pca.or(self.score_optimal).or(self.learned)
    }
}

/// Every evaluated scheme of a run with its role, from the link that says most to the one that says least.
fn results(run: &Run) -> Vec<(Role, &SchemeResult)> {
    let mut results = Vec::new();
    if let Some(diagnosis) = &run.diagnosis {
        if let Some(link) = &diagnosis.perplexity {
            results.extend(link.rows.iter().map(|row| (row.role, &row.result)));
        }
        if let Some(link) = &diagnosis.bases {
            results.extend([(Role::Dense, &link.dense), (Role::Base, &link.base)]);
            results.extend(link.families.iter().map(|family| (role(&family.result), &family.result)));
        }
        if let Some(link) = &diagnosis.direction {
            results.extend([(Role::Dense, &link.dense), (Role::Base, &link.base), (Role::Corrected, &link.corrected)]);
        }
    }
    if let Some(evaluation) = &run.evaluation {
        results.extend(evaluation.schemes.iter().map(|result| (role(result), result)));
    }
    if let Some(comparison) = &run.comparison {
        results.extend([(Role::Dense, &comparison.dense), (Role::Base, &comparison.base)]);
        results.extend(comparison.bases.iter().map(|basis| (role(&basis.result), &basis.result)));
    }
    results
}

fn parsed(result: &SchemeResult) -> Option<Scheme> {
    result.canonical.parse().ok()
}

/// What a scheme is there for, as far as its written form says. One that cannot be read, as from another version, is taken for a
/// base.
pub fn role(result: &SchemeResult) -> Role {
    let Some(scheme) = parsed(result) else { return Role::Base };
    match (scheme.key.is_some(), scheme.side(), scheme.value.is_some()) {
        (false, _, false) => Role::Dense,
        (false, _, true) => Role::Values,
        (true, None, false) => Role::Base,
        (true, None, true) => Role::Full,
        (true, Some(side), _) if side.family == Family::Random || side.sign == Sign::Minus => Role::Control,
        (true, Some(_), false) => Role::Corrected,
        (true, Some(_), true) => Role::FullCorrected,
    }
}
