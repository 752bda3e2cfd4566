//! What a sweep finds: the data of `sweep.json` and of `headq sweep --json`.

use headq_models::Fingerprint;
use serde::{Deserialize, Serialize};

use crate::overlap::Overlaps;
use crate::text::TextInfo;

/// Every scheme of a sweep, with the fronts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sweep {
    /// `headq` and its version.
    pub program: String,
    /// The command that makes it again.
    pub command: String,
    /// Model as given.
    pub model: String,
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Device as given.
    pub device: String,
    /// Seed of random bases.
    pub seed: u64,
    /// Whether windows began with the beginning-of-sequence token.
    pub add_bos: bool,
    /// Tokens in a window.
    pub context: usize,
    /// Windows of each text.
    pub windows: usize,
    /// Tokens scored: windows · (T − 1), over all texts.
    pub tokens: usize,
    /// Texts.
    pub texts: Vec<TextInfo>,
    /// Whether any of them was calibrated on.
    pub overlap: Option<Overlaps>,
    /// Statistics and bases that were given.
    pub artifacts: Vec<Given>,
    /// Texts that the sweep calibrated on where no given statistics served.
    pub calibration: Vec<TextInfo>,
    /// First tokens that the default schemes keep dense.
    pub sinks: usize,
    /// Newest tokens that the default schemes keep dense.
    pub residual: usize,
    /// The model without quantization.
    pub dense: Dense,
    /// Every scheme, keys only first, each by ascending cache bits.
    pub rows: Vec<Row>,
    /// Default schemes that could not be evaluated.
    pub left_out: Vec<LeftOut>,
    /// What `budgets` bound.
    pub bits: BitsOf,
    /// The best scheme of each family within each budget that was asked for.
    pub budgets: Vec<Best>,
}

/// An artifact that was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Given {
    /// File as given.
    pub path: String,
    /// SHA-256 of the file.
    pub sha256: String,
}

/// The dense model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dense {
    /// exp of the mean negative log-likelihood.
    pub ppl: f64,
    /// Mean negative log-likelihood, nats per token.
    pub nll: f64,
    /// The same by window.
    pub window_nll: Vec<f64>,
}

/// What a scheme codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Coded {
    /// Keys only; values are dense.
    K,
    /// Values, and mostly keys, too.
    Kv,
}

impl Coded {
    /// In words.
    pub fn title(self) -> &'static str {
        match self {
            Coded::K => "Keys only",
            Coded::Kv => "Keys and values",
        }
    }
}

/// A scheme and what it comes to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// As asked.
    pub scheme: String,
    /// In canonical form, every default spelled out.
    pub canonical: String,
    /// What it codes.
    pub kv: Coded,
    /// Quantizer, correction and value policy, without bits and sizes.
    pub family: String,
    /// Code bits per coded key element, all in; 16 where keys are dense.
    pub key_bits: f64,
    /// Code bits per coded value element, all in; 16 where values are dense.
    pub value_bits: f64,
    /// Mean bits per element of all that the cache holds, over the evaluated query positions.
    pub cache_bits: f64,
    /// Bytes per cached token, whole model.
    pub bytes_per_token: f64,
    /// exp of the mean negative log-likelihood.
    pub ppl: f64,
    /// Mean negative log-likelihood, nats per token.
    pub nll: f64,
    /// The same by window.
    pub window_nll: Vec<f64>,
    /// Perplexity over that of the dense model, minus 1.
    pub excess: f64,
    /// Standard error of the excess, paired by window; `null` where there is but one.
    pub excess_se: Option<f64>,
    /// Kullback–Leibler divergence of next-token distributions from those of the dense model, mean over tokens, nats.
    pub kl: f64,
    /// The same by window.
    pub window_kl: Vec<f64>,
    /// Whether no other scheme that codes the same has both no more cache bits and no higher perplexity, one of them less.
    pub front_ppl: bool,
    /// The same of the divergence.
    pub front_kl: bool,
}

/// A default scheme that was not evaluated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeftOut {
    /// The scheme.
    pub scheme: String,
    /// Why.
    pub reason: String,
}

/// Which bits a budget bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BitsOf {
    /// Code bits per coded element: of keys, or the mean of keys and values.
    #[default]
    Code,
    /// Cache bits at the context.
    Cache,
}

impl BitsOf {
    /// Of a row.
    pub fn of(self, row: &Row) -> f64 {
        match (self, row.kv) {
            (BitsOf::Cache, _) => row.cache_bits,
            (BitsOf::Code, Coded::K) => row.key_bits,
            (BitsOf::Code, Coded::Kv) => (row.key_bits + row.value_bits) / 2.0,
        }
    }
}

impl std::str::FromStr for BitsOf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "code" => Ok(BitsOf::Code),
            "cache" => Ok(BitsOf::Cache),
            _ => Err(format!("'{text}' is not known; known are code, cache")),
        }
    }
}

impl std::fmt::Display for BitsOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            BitsOf::Code => "code",
            BitsOf::Cache => "cache",
        })
    }
}

/// The best scheme of a family within a budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Most bits.
    pub budget: f64,
    /// What is coded.
    pub kv: Coded,
    /// The family.
    pub family: String,
    /// Its scheme of the lowest perplexity within the budget.
    pub scheme: String,
    /// Bits that it has of those that are bounded.
    pub bits: f64,
    /// Its cache bits, all-in: schemes of other groups keep other shares of a window dense.
    pub cache_bits: f64,
    /// Its perplexity.
    pub ppl: f64,
    /// Its excess.
    pub excess: f64,
    /// Its divergence, nats.
    pub kl: f64,
    /// Mean nll minus that of the best scheme of all families within the budget, nats per token.
    pub behind: f64,
    /// Standard error of that, paired by window; `null` where there is but one.
    pub behind_se: Option<f64>,
    /// Whether its perplexity is within 0.3 % of the best, or its loss within one standard error.
    pub close: bool,
}
