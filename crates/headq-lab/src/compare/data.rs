//! What a comparison finds: the data of `comparison.json` and of `headq compare --json`.
//!
//! Undefined numbers are `null`, never NaN. Heads are KV heads, but for principal angles between bases of which one has a matrix for
//! each query head.

use headq_models::Fingerprint;
use serde::{Deserialize, Serialize};

use crate::diagnose::data::Interval;
use crate::evaluate::SchemeResult;
use crate::overlap::Overlaps;
use crate::text::TextInfo;

/// Several bases in one scheme, measured on one text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Comparison {
    /// `headq` and its version.
    pub program: String,
    /// The command that makes it again, where a run did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Model as given.
    pub model: String,
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Device as given.
    pub device: String,
    /// Seed of random bases and of the bootstrap.
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
    /// Whether any of them was calibrated on; absent where an older version compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<Overlaps>,
    /// The scheme that bases are put into, in its written form.
    pub scheme: String,
    /// Whether any basis, or the statistics that one was derived from, had seen any of the texts.
    pub seen: bool,
    /// Which artifact had seen which text.
    pub seen_by: Vec<Seen>,
    /// Bootstrap of every interval.
    pub bootstrap: BootstrapInfo,
    /// The model without quantization.
    pub dense: SchemeResult,
    /// The scheme without its side code.
    pub base: SchemeResult,
    /// Mean nll of each window of the dense model, nats per token.
    pub dense_window_nll: Vec<f64>,
    /// Mean nll of each window of the base, nats per token.
    pub base_window_nll: Vec<f64>,
    /// Errors of the base by head; nothing is captured without a side code.
    pub base_heads: HeadTables,
    /// By basis, in the order given: files first, then families. The first is what the others are compared with.
    pub bases: Vec<ComparedBasis>,
    /// Every pair of bases, in that order.
    pub angles: Vec<PairAngles>,
}

/// A text that was measured and had been calibrated on, or trained on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seen {
    /// Artifact whose header names the text.
    pub artifact: String,
    /// The text as given here.
    pub text: String,
}

/// How intervals were made.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootstrapInfo {
    /// Confidence level.
    pub confidence: f64,
    /// Replicates.
    pub replicates: usize,
    /// Least number of windows or heads for an interval; with fewer it is `null`.
    pub min_units: usize,
}

/// A basis in the scheme, and how it compares.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComparedBasis {
    /// Its file as given, or its family where it was derived from statistics. No two are the same.
    pub name: String,
    /// The artifact that it came from: its own file, or the statistics.
    pub artifact: String,
    /// Whether it was derived from statistics here.
    pub derived: bool,
    /// Family.
    pub family: String,
    /// Rank r.
    pub rank: usize,
    /// `kv-head` or `query-head`.
    pub scope: String,
    /// Whether one orthonormal matrix is encoder and decoder.
    pub tied: bool,
    /// Loss that it was trained with; `null` for closed forms.
    pub loss: Option<String>,
    /// Base quantizer whose residuals it was made from.
    pub base: String,
    /// Texts that it was made from.
    pub calibration: Vec<TextInfo>,
    /// Whether it had seen any of the measured texts.
    pub seen: bool,
    /// Its scheme: perplexity, bits and errors, as `headq eval` finds them; `excess_removed` is against the base.
    pub result: SchemeResult,
    /// Mean nll of each window, nats per token.
    pub window_nll: Vec<f64>,
    /// Share of the squared score error on the measured text that it removes before side quantization, mean over heads:
    /// 1 − tr C_q (I − UWᵀ) C_e (I − UWᵀ)ᵀ / tr C_q C_e, with the moments of the measured queries and of the base quantizer's
    /// residuals there.
    pub captured: Estimate,
    /// Against the first basis.
    pub to_first: Against,
    /// Against the scheme without a side code.
    pub to_base: Against,
    /// By layer and head.
    pub heads: HeadTables,
}

/// One row against another on the same windows and heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Against {
    /// Mean nll minus that of the other, nats per token, over windows.
    pub nll: Estimate,
    /// Captured share minus that of the other, mean over heads; undefined against the base.
    pub captured: Estimate,
    /// E2.
    pub fisher: Ratio,
    /// E3.
    pub kl: Ratio,
    /// E7.
    pub output_error: Ratio,
    /// E4 of what base and side code together stand for; undefined where each query head has a side code of its own.
    pub key_mse: Ratio,
}

/// Errors of one row relative to those of another: below 1 where they are smaller.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ratio {
    /// Ratio of the two means over all heads, which heads with large errors dominate.
    pub of_means: Estimate,
    /// Geometric mean over heads of each head's ratio, in which all heads count the same. Heads without error in either row are left
    /// out.
    pub by_head: Estimate,
    /// Share of heads in which the error is smaller; of equals, half. `null` where all are equal, as in the first row against itself.
    pub heads_better: Option<f64>,
}

/// A number with its bootstrap percentile interval.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// On the data as they are.
    pub estimate: Option<f64>,
    /// Lower bound; `null` where there are too few windows or heads.
    pub low: Option<f64>,
    /// Upper bound.
    pub high: Option<f64>,
}

impl Estimate {
    /// Estimate and bounds, where all are defined.
    pub fn interval(&self) -> Option<Interval> {
        Some(Interval { estimate: self.estimate?, low: self.low?, high: self.high? })
    }
}

/// A number for every layer and KV head: `[layer][head]`.
pub type HeadTable = Vec<Vec<Option<f64>>>;

/// Errors by layer and KV head; the query heads of a KV head are taken together.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadTables {
    /// E2, nats.
    pub fisher: HeadTable,
    /// E3, nats.
    pub kl: HeadTable,
    /// E7.
    pub output_error: HeadTable,
    /// E4 of what base and side code together stand for.
    pub key_mse: HeadTable,
    /// Captured share of the squared score error; empty for the base.
    pub captured: HeadTable,
}

/// Principal angles between two bases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairAngles {
    /// Place of the first basis in `bases`.
    pub first: usize,
    /// Place of the second.
    pub second: usize,
    /// What heads are: `kv-head`, or `query-head` where a basis has a matrix for each.
    pub scope: String,
    /// Between the spans of the decoders U.
    pub decoder: Angles,
    /// Between the spans of the encoders W; `null` where both bases are tied, whose encoders are their decoders.
    pub encoder: Option<Angles>,
}

/// Principal angles in degrees, each list ascending from the closest direction: as many as the smaller of the two spans has
/// dimensions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Angles {
    /// Median over all heads of each angle.
    pub median: Vec<f64>,
    /// The largest in any head.
    pub largest: Option<f64>,
    /// By layer, then head.
    pub heads: Vec<Vec<Vec<f64>>>,
}
