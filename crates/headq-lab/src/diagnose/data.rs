//! What a diagnosis finds: the data of `diagnosis.json`, from which reports are drawn.
//!
//! Undefined numbers are `null`, never NaN. Heads are KV heads: a cache stores one key and one value for each, and the errors of the
//! query heads that read it are averaged.

use headq_models::Fingerprint;
use serde::{Deserialize, Serialize};

use super::thresholds::Thresholds;
use crate::evaluate::SchemeResult;
use crate::overlap::Overlaps;
use crate::text::TextInfo;

/// A whole diagnosis: what was asked, of what, and what each link of the chain says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diagnosis {
    /// `headq` and its version.
    pub program: String,
    /// Name of the run.
    pub name: String,
    /// The command that makes it again.
    pub command: String,
    /// Model as given.
    pub model: String,
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Device as given.
    pub device: String,
    /// Seed of random bases, random selection, bootstrap and shuffles.
    pub seed: u64,
    /// Whether windows began with the beginning-of-sequence token.
    pub add_bos: bool,
    /// Tokens in a window.
    pub context: usize,
    /// Windows of each text.
    pub windows: usize,
    /// Tokens scored: windows · (T − 1), over all texts.
    pub tokens: usize,
    /// Texts on which everything is measured.
    pub texts: Vec<TextInfo>,
    /// Whether any of them was calibrated on; absent where an older version diagnosed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<Overlaps>,
    /// Where bases, key means and grid scales come from.
    pub calibration: Calibration,
    /// Base quantizer of links 4 to 7, in its written form.
    pub base: String,
    /// Rank of the side codes.
    pub rank: usize,
    /// Bits of a side code.
    pub bits: u32,
    /// What decides verdicts.
    pub thresholds: Thresholds,
    /// Link 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<Metric>,
    /// Link 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counterexamples: Option<Counterexamples>,
    /// Link 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub null_space: Option<NullSpace>,
    /// Link 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bases: Option<Bases>,
    /// Link 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direction: Option<Direction>,
    /// Link 6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub route_flips: Option<RouteFlips>,
    /// Link 7.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<Perplexity>,
}

/// Windows that statistics were taken from; none of them is evaluated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Texts.
    pub texts: Vec<TextInfo>,
    /// Index of the first window used; above 0 where the evaluated windows come from the same text.
    pub first_window: usize,
    /// Windows of each text.
    pub windows: usize,
    /// Tokens in a window.
    pub context: usize,
    /// Tokens seen.
    pub tokens: usize,
}

/// What a link says of its claim on this model and text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The numbers meet the thresholds.
    #[serde(rename = "supported")]
    Supported,
    /// The numbers contradict the claim.
    #[serde(rename = "not supported")]
    NotSupported,
    /// The numbers do not decide.
    #[serde(rename = "inconclusive")]
    Inconclusive,
}

impl Verdict {
    /// As it is written in reports.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Supported => "supported",
            Verdict::NotSupported => "not supported",
            Verdict::Inconclusive => "inconclusive",
        }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A verdict with its grounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// The numbers that decide it, in a sentence.
    pub because: String,
    /// What would change it, in a sentence.
    pub would_change: String,
}

/// An estimate with its bootstrap percentile interval, at the confidence level of the thresholds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interval {
    /// On the data as they are.
    pub estimate: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// A quantizer setting of the metric link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// Scheme in its written form.
    pub scheme: String,
    /// Quantizer or value policy.
    pub quantizer: String,
    /// Bits per code.
    pub bits: u32,
    /// Bits per coded element, all in.
    pub code_bits: f64,
}

/// One KV head under one key setting.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyPoint {
    /// Layer, from 0.
    pub layer: usize,
    /// KV head, from 0.
    pub head: usize,
    /// Index into the key settings.
    pub setting: usize,
    /// E4.
    pub mse: f64,
    /// E2, nats.
    pub fisher: f64,
    /// E3, nats.
    pub kl: f64,
    /// E7.
    pub output_error: f64,
}

/// One KV head under one value setting.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValuePoint {
    /// Layer, from 0.
    pub layer: usize,
    /// KV head, from 0.
    pub head: usize,
    /// Index into the value settings.
    pub setting: usize,
    /// E4 of values.
    pub mse: f64,
    /// E6.
    pub a2: f64,
    /// E5.
    pub readout: f64,
}

/// How well two predictors rank a target, by Spearman's ρ over the same points.
///
/// Link 1 on keys: storage MSE (E4) and Fisher error (E2) against attention KL (E3). On values: E4 and the A² surrogate (E6)
/// against the readout error (E5).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Correlation {
    /// `pooled`, or the quantizer or policy within which it is taken.
    pub group: String,
    /// Points.
    pub points: usize,
    /// ρ of storage MSE with the target.
    pub storage: Option<Interval>,
    /// ρ of the operator's metric (E2, E6) with the target.
    pub operator: Option<Interval>,
    /// Operator's ρ minus storage's.
    pub difference: Option<Interval>,
}

/// Link 1: the Fisher error ranks quantizers as attention KL does, and better than storage MSE.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    /// Verdict.
    pub judgement: Judgement,
    /// What the bootstrap resamples, in words.
    pub resampled: String,
    /// Bootstrap replicates.
    pub replicates: usize,
    /// Key settings.
    pub settings: Vec<Setting>,
    /// Heads × settings.
    pub points: Vec<KeyPoint>,
    /// Pooled first, then within each quantizer.
    pub keys: Vec<Correlation>,
    /// The same numbers over many shuffles of KL among the points, mean and quantiles: what chance gives.
    pub shuffled: Correlation,
    /// Value settings; values follow in the same way.
    pub value_settings: Vec<Setting>,
    /// Heads × value settings.
    pub value_points: Vec<ValuePoint>,
    /// Pooled first, then within each policy.
    pub values: Vec<Correlation>,
    /// Selection of the tokens that get more bits, at equal mean bits.
    pub selection: Vec<Selection>,
}

/// Value policies at one number of mean bits, on E5.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selection {
    /// Mean bits per code.
    pub bits: u32,
    /// Mean E5 over heads of `a2`.
    pub a2: f64,
    /// Each other policy.
    pub others: Vec<SelectionRival>,
}

/// A value policy beside `a2`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectionRival {
    /// `token` (uniform), `mse`, `random` or `recency`.
    pub policy: String,
    /// Bits per coded element, all in.
    pub code_bits: f64,
    /// Mean E5 over heads.
    pub readout: f64,
    /// Mean over heads of ln(E5 of the rival / E5 of `a2`): above 0 where `a2` is better.
    pub log_ratio: Option<Interval>,
    /// Share of heads on which `a2` is better.
    pub heads_won: Option<f64>,
}

/// Two settings of the same budget on one head, of which the one with the lower storage MSE has the higher KL and output error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counterexample {
    /// Layer.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Scheme with the lower storage MSE.
    pub stored_better: String,
    /// Scheme with the lower KL and output error.
    pub read_better: String,
    /// Bits per coded element, all in, of both.
    pub code_bits: [f64; 2],
    /// E4 of both, in the order above.
    pub mse: [f64; 2],
    /// E3 of both.
    pub kl: [f64; 2],
    /// E7 of both.
    pub output_error: [f64; 2],
    /// The smaller of the ratios of KL and of output error, above 1.
    pub strength: f64,
}

/// Link 2: lower storage MSE does not mean lower damage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counterexamples {
    /// Verdict.
    pub judgement: Judgement,
    /// Pairs of settings of equal budget, over all heads.
    pub pairs: usize,
    /// How many of them are counterexamples.
    pub count: usize,
    /// count / pairs.
    pub share: Option<Interval>,
    /// The strongest ten.
    pub strongest: Vec<Counterexample>,
}

/// Errors with α·μ added to centered keys before they are coded.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NullPoint {
    /// α.
    pub alpha: f64,
    /// E2, nats.
    pub fisher: f64,
    /// E3, nats.
    pub kl: f64,
    /// E4.
    pub mse: f64,
}

/// One quantizer's errors over α.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NullCurve {
    /// Scheme in its written form.
    pub scheme: String,
    /// Whether the quantizer is shift-equivariant, so that its curve must be flat.
    pub equivariant: bool,
    /// By α, ascending.
    pub points: Vec<NullPoint>,
}

/// Link 3: a shift of all keys, which attention cannot see, raises what a static quantizer loses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NullSpace {
    /// Verdict.
    pub judgement: Judgement,
    /// Largest change of a dense attention probability over all α.
    pub dense_change: f64,
    /// The most that is allowed: 1e-5, or what f32 scores of this size can resolve where that is more.
    pub dense_tolerance: f64,
    /// Quantizers.
    pub curves: Vec<NullCurve>,
}

/// A basis family at the budget of the others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FamilyResult {
    /// Family.
    pub family: String,
    /// The evaluated scheme.
    pub result: SchemeResult,
    /// Share of the held-out score error that rank r captures before side quantization, mean over heads.
    pub captured: Option<Interval>,
    /// Mean nll of the base minus this scheme's, nats per token, by window: above 0 where the correction helps.
    pub gain: Option<Interval>,
}

/// Captured share of one family by rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankCurve {
    /// Family.
    pub family: String,
    /// By the ranks of [`Bases::ranks`]: mean over heads, `null` where a share is undefined.
    pub shares: Vec<Option<f64>>,
}

/// The spectrum of E[q qᵀ] per KV head, each divided by its trace, in descending order: quartiles over heads by index.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spectrum {
    /// 25 % quantile.
    pub low: Vec<f64>,
    /// Median.
    pub median: Vec<f64>,
    /// 75 % quantile.
    pub high: Vec<f64>,
}

/// Mean Fisher error (E2, nats) by layer and KV head: `[layers][kv_heads]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadMap {
    /// Scheme.
    pub scheme: String,
    /// `[layers][kv_heads]`.
    pub fisher: Vec<Vec<Option<f64>>>,
}

/// Link 4: bases learned from queries correct more than others of the same size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bases {
    /// Verdict.
    pub judgement: Judgement,
    /// Dense.
    pub dense: SchemeResult,
    /// The base quantizer without a correction.
    pub base: SchemeResult,
    /// Families.
    pub families: Vec<FamilyResult>,
    /// Ranks of the curves.
    pub ranks: Vec<usize>,
    /// Captured share by rank, on text that the bases have not seen.
    pub curves: Vec<RankCurve>,
    /// Spectrum of the calibration queries.
    pub spectrum: Spectrum,
    /// Score error before, and after each correction.
    pub maps: Vec<HeadMap>,
}

/// Link 5: the correction with its sign flipped is much worse than none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Direction {
    /// Verdict.
    pub judgement: Judgement,
    /// Dense.
    pub dense: SchemeResult,
    /// No correction.
    pub base: SchemeResult,
    /// The correction.
    pub corrected: SchemeResult,
    /// Its sign flipped.
    pub flipped: SchemeResult,
    /// Mean nll of the base minus the corrected, nats per token.
    pub corrected_gain: Option<Interval>,
    /// Mean nll of the flipped minus the base, nats per token.
    pub flipped_loss: Option<Interval>,
    /// Mean nll of the base minus dense, nats per token.
    pub base_loss: Option<Interval>,
}

/// Queries whose attention entropy lies in a bin.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntropyBin {
    /// Lower edge, nats.
    pub low: f64,
    /// Upper edge, nats; `null` for the last bin.
    pub high: Option<f64>,
    /// Queries.
    pub queries: u64,
    /// Of these, those whose most attended token changed.
    pub flips: u64,
}

/// Spearman's ρ of Fisher error and KL over queries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryCorrelation {
    /// Queries of this kind that were seen.
    pub queries: u64,
    /// Queries in the sample.
    pub sampled: usize,
    /// ρ.
    pub rho: Option<Interval>,
}

/// Route flips of one scheme.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlipResult {
    /// Scheme.
    pub scheme: String,
    /// Queries that read at least one coded key, over layers and query heads.
    pub queries: u64,
    /// Those whose most attended token changed.
    pub flips: u64,
    /// flips / queries.
    pub share: Option<f64>,
    /// By entropy of the dense attention.
    pub bins: Vec<EntropyBin>,
    /// Flipped queries.
    pub flipped: QueryCorrelation,
    /// The others.
    pub unflipped: QueryCorrelation,
}

/// Link 6: flips of the most attended token lie where attention is undecided, and the local metric holds where nothing flips.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteFlips {
    /// Verdict.
    pub judgement: Judgement,
    /// Base, then corrected.
    pub schemes: Vec<FlipResult>,
}

/// What a row of the perplexity link is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Full precision.
    Dense,
    /// The base quantizer of the keys.
    Base,
    /// The base with a correction.
    Corrected,
    /// A control: random basis, flipped sign, or more bits for everything.
    Control,
    /// A published baseline.
    Published,
    /// Values only.
    Values,
    /// Keys and values.
    Full,
    /// Keys with a correction, and values.
    FullCorrected,
}

/// One row of the perplexity link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerplexityRow {
    /// What it is there for.
    pub role: Role,
    /// The evaluated scheme. `excess_removed` is against the row's own reference.
    pub result: SchemeResult,
    /// Scheme without the correction that this row is compared with, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Mean nll of the reference minus this scheme's, nats per token, by window.
    pub gain: Option<Interval>,
}

/// Link 7: the correction gives back perplexity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Perplexity {
    /// Verdict.
    pub judgement: Judgement,
    /// Rows, dense first.
    pub rows: Vec<PerplexityRow>,
}

/// The claims, in the order of the chain: name on the command line, title, claim.
pub const LINKS: [(&str, &str, &str); 7] = [
    ("metric", "Metric", "The Fisher error ranks quantizers by attention KL, and better than storage MSE does."),
    (
        "counterexamples",
        "Counterexamples",
        "At the same budget on the same head, lower storage MSE can mean higher attention KL and output error.",
    ),
    (
        "null-space",
        "Null space",
        "A shift of all keys, which attention cannot see, raises what a static quantizer loses; a shift-equivariant one stays flat.",
    ),
    ("bases", "Bases", "A basis learned from queries corrects more than others of the same size."),
    ("direction", "Direction", "The correction with its sign flipped is much worse than no correction."),
    (
        "route-flips",
        "Route flips",
        "Changes of the most attended token lie where attention is undecided, and the Fisher error tracks KL where nothing flips.",
    ),
    ("perplexity", "Perplexity", "The correction gives back perplexity that quantized keys cost."),
];

impl Diagnosis {
    /// Judgements of the links that were taken, by their place in [`LINKS`].
    pub fn judgements(&self) -> [Option<&Judgement>; 7] {
        [
            self.metric.as_ref().map(|l| &l.judgement),
            self.counterexamples.as_ref().map(|l| &l.judgement),
            self.null_space.as_ref().map(|l| &l.judgement),
            self.bases.as_ref().map(|l| &l.judgement),
            self.direction.as_ref().map(|l| &l.judgement),
            self.route_flips.as_ref().map(|l| &l.judgement),
            self.perplexity.as_ref().map(|l| &l.judgement),
        ]
    }
}
