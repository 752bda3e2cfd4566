//! The written form of a scheme: which codec a cache uses for its keys and values.
//!
//! ```text
//! scheme  = key [ "/" value ]                  value defaults to dense
//! key     = "dense" | base [ "+" side ]
//! base    = NAME "-" BITS [ "(" options ")" ]
//! side    = FAMILY "(" options ")"
//! value   = "dense" | POLICY "-" BITS [ "(" options ")" ]
//! ```
//!
//! Parsing and printing round-trip: `Scheme::from_str(&scheme.to_string())` gives the same scheme, and a scheme written with all
//! of its non-default options in canonical order prints as it was written. `g` and `r` are always printed.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::Error;

/// Codec of the keys and of the values, the same for every layer and KV head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scheme {
    /// Keys; `None` is dense.
    pub key: Option<KeyScheme>,
    /// Values; `None` is dense.
    pub value: Option<ValueScheme>,
}

/// Base quantizer of the keys and, on top of it, the side code of a low-rank logit correction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KeyScheme {
    /// Base quantizer B_b.
    pub base: BaseScheme,
    /// Side code Q_s(Wᵀe) and the basis it lives in.
    pub side: Option<SideScheme>,
}

/// A base quantizer with everything that decides its codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BaseScheme {
    /// Which quantizer.
    pub quantizer: Quantizer,
    /// Bits per code: 1–8, or the mean over a head's coefficients under `klt`.
    pub bits: Bits,
    /// When tokens are coded.
    pub flush: Flush,
    /// Channels that share one scale (not `kivi`, not `klt`); `None` is the head width.
    pub channels: Option<usize>,
    /// Factor ρ on the half-width of each min/max range, in (0, 1]; values outside are clipped. Under `klt` it multiplies the
    /// quantizer's own factors ([`crate::transform::range_factor`]), in (0, [`MOST_KLT_RANGE`]].
    pub range: f32,
    /// Where ranges come from.
    pub ranges: RangeSource,
    /// What `klt` takes errors in keys to cost.
    pub metric: Metric,
    /// What shares the bits of `klt`.
    pub pool: Pool,
    /// How numbers become codes.
    pub rounding: Rounding,
    /// Whether the calibrated mean of each head's keys is subtracted from every key and never added back, which attention cannot see.
    pub center: bool,
    /// How scales and zeros are stored.
    pub meta: Meta,
}

/// Bits per code: whole for all quantizers but `klt`, where they are a mean and have up to three decimals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bits {
    thousandths: u32,
}

/// Where the ranges of a quantizer come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RangeSource {
    /// From the numbers that share a range; scales and zeros are stored. (`grid` has neither and none of this.)
    #[default]
    Group,
    /// From calibration: nothing is stored but codes.
    Static,
    /// Lloyd–Max levels fitted to calibrated coefficients where they have up to [`MOST_LLOYD_BITS`] bits, for which nothing is stored but
    /// codes; as `Group` where they have more.
    Lloyd,
}

/// What an error in a key or a value costs: the quadratic form M of εᵀMε, with which `klt` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Metric {
    /// C_q = `E[q qᵀ]`: the squared error of scores. Of keys alone.
    #[default]
    Queries,
    /// Mostly F = `E[g gᵀ]` of the gradients of the log-likelihood by what is read from codes: nats lost by the model
    /// ([`crate::transform::metric`]).
    Fisher,
    /// The mean of W_o,h W_o,hᵀ over the query heads h that read a head, with W_o,h the rows of the output projection that belong to h: the
    /// squared error of what a token's values add to the residual stream, for equal attention. Of values alone.
    Output,
}

/// What shares the bits of `klt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pool {
    /// Each head has B·d bits of its own, not counting scales and zeros.
    #[default]
    Head,
    /// All heads of all layers: B is their mean, scales and zeros counted.
    Model,
    /// Each head has the code bits per element, scales and zeros counted, that a scheme file gives it; B is their mean.
    Plan(&'static HeadBudgets),
}

/// Code bits per element of every head of a model. There is one of each content ([`HeadBudgets::interned`]), for as long as the program
/// runs, so that schemes can be copied.
#[derive(Debug, PartialEq, Eq)]
pub struct HeadBudgets {
    bits: Vec<Bits>,
    hash: u64,
}

impl HeadBudgets {
    /// The one with this content.
    ///
    /// # Shapes
    /// `bits`: `[layers, kv_heads]`, row-major
    pub fn interned(bits: Vec<Bits>) -> &'static Self {
        let bytes = bits.iter().flat_map(|b| b.thousandths.to_le_bytes());
        // FNV-1a.
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        let mut known = known_budgets();
        known.entry(hash).or_insert_with(|| Box::leak(Box::new(Self { bits, hash })))
    }

    /// `[layers, kv_heads]`, row-major.
    pub fn bits(&self) -> &[Bits] {
        &self.bits
    }

    /// The mean, rounded to thousandths.
    pub fn mean(&self) -> Bits {
        let (sum, n) = (self.bits.iter().map(|b| u64::from(b.thousandths)).sum::<u64>(), self.bits.len().max(1) as u64);
        Bits { thousandths: ((sum + n / 2) / n) as u32 }
    }
}

fn known_budgets() -> std::sync::MutexGuard<'static, BTreeMap<u64, &'static HeadBudgets>> {
    static KNOWN: Mutex<BTreeMap<u64, &'static HeadBudgets>> = Mutex::new(BTreeMap::new());
    // What a panicking thread left is whole: entries are only added.
    KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pool::Head => f.write_str("head"),
            Pool::Model => f.write_str("model"),
            Pool::Plan(budgets) => write!(f, "{:016x}", budgets.hash),
        }
    }
}

impl FromStr for Pool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "head" => Ok(Pool::Head),
            "model" => Ok(Pool::Model),
            other => {
                let hash = u64::from_str_radix(other, 16).ok().filter(|_| other.len() == 16);
                let hash = hash.ok_or_else(|| format!("'{other}' is not known; known are head, model"))?;
                known_budgets().get(&hash).map(|budgets| Pool::Plan(budgets)).ok_or_else(|| {
                    format!("the bits of {other} stand in a scheme file, which has not been read; give that file as the scheme")
                })
            }
        }
    }
}

/// How numbers become codes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Rounding {
    /// Each to the nearest level.
    #[default]
    Nearest,
    /// Channel by channel, each after the errors of those before it have been added in the measure of scores ([`crate::feedback`]).
    ScoreAware {
        /// λ of H = C_q + λ·mean(diag C_q)·I.
        lambda: f32,
    },
}

/// λ where the written form does not give it.
pub const DEFAULT_LAMBDA: f32 = 0.01;
/// Bits of the best coefficient of `klt` where each head has bits of its own, and so the largest mean.
pub const MOST_KLT_BITS: u32 = 6;
/// The same where heads share them.
pub const MOST_POOLED_BITS: u32 = 8;
/// Most bits of a coefficient with Lloyd–Max levels.
pub const MOST_LLOYD_BITS: u32 = 3;
/// Smallest mean bits of `klt`.
const LEAST_KLT_BITS: Bits = Bits { thousandths: 250 };
/// Largest ρ of `klt`: where its own factor is 0.8, whole ranges.
pub const MOST_KLT_RANGE: f32 = 1.25;
/// Sinks where the written form of `klt` does not give them.
const KLT_SINKS: usize = 4;

/// When tokens move from the dense window to codes (E10): after appending token t (0-based),
/// ⌊max(0, t+1−R−N)/G⌋·G tokens after the N sinks are read from codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flush {
    /// G: tokens coded together.
    pub group: usize,
    /// R: newest tokens that are always dense.
    pub residual: usize,
    /// N: first tokens of a sequence, always dense and outside every range.
    pub sinks: usize,
}

/// Base quantizers for keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quantizer {
    /// Per channel over the G tokens of a group, asymmetric min/max (KIVI, arXiv:2402.02750, keys).
    Kivi,
    /// Per token over groups of c channels, asymmetric min/max.
    Token,
    /// Static uniform grid ±½Δ, ±3⁄2Δ, …: Δ is the best step for a Gaussian of the standard deviation that c channels were calibrated
    /// to have, so that no scales are stored. Not equivariant to shifts.
    Grid,
    /// Randomized Hadamard rotation, then per token a Lloyd–Max grid for a Gaussian, with one scale for c rotated channels (QuaRot,
    /// arXiv:2404.00456; TurboQuant, arXiv:2504.19874).
    Rotated,
    /// Transform coding in the coordinates in which squared error is expected squared score error, with more bits for coefficients that
    /// matter more and none for some ([`crate::transform`]).
    Klt,
}

/// Width of stored scales and zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Meta {
    /// IEEE half precision, rounded *before* coding.
    #[default]
    F16,
    /// Single precision.
    F32,
}

/// Side quantizer and basis of the logit correction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SideScheme {
    /// Basis family.
    pub family: Family,
    /// Rank r of the basis.
    pub rank: usize,
    /// Bits per side code, 2–8.
    pub bits: u32,
    /// What shares a scale and a zero.
    pub scales: SideScales,
    /// Sign of the correction; −1 is the control that must be worse than none.
    pub sign: Sign,
    /// One basis for each KV head, or for each query head.
    pub scope: Scope,
}

/// Basis families (DESIGN §3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Top eigenvectors of E[q qᵀ], uncentered.
    QueryPca,
    /// Top eigenvectors of the covariance of q.
    QueryPcaCentered,
    /// Top eigenvectors of E[e eᵀ] of the base quantizer's residual.
    ResidualPca,
    /// Haar-random orthonormal; a control.
    Random,
    /// The best rank-r correction of the score error: W = C_q^{½}V, U = C_q^{−½}V.
    ScoreOptimal,
    /// Trained; comes only from a basis artifact.
    Learned,
}

/// What shares a scale and a zero among side codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SideScales {
    /// Each coefficient over the G tokens of a group.
    #[default]
    Group,
    /// Each token over its r coefficients.
    Token,
}

/// Sign of the correction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sign {
    /// Added, as E9 says.
    #[default]
    Plus,
    /// Subtracted.
    Minus,
}

/// What has a basis of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// One basis per KV head, from statistics pooled over its query heads.
    #[default]
    KvHead,
    /// One basis, and one side code, per query head.
    QueryHead,
}

/// How many bits each token's value gets.
///
/// All but `token`, `channel` and `klt` give the half of each group of G tokens that comes first by some measure one bit more than the mean, and the other
/// half one bit less; a map of one bit per token and head says which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// All the same.
    Token,
    /// Tokens with the largest attention mass w_j = Σ_t p̂_tj², summed over the query heads that share the KV head and over the
    /// queries before the flush.
    A2,
    /// Tokens with the largest squared error at the mean bits; a control.
    Mse,
    /// A pseudo-random half, fixed by layer, head and position; a control.
    Random,
    /// The newer half; a control.
    Recency,
    /// No policy of tokens: per channel over the G tokens of a group, as [`Quantizer::Kivi`] codes keys; a control, since outliers of values
    /// are tokens and not channels.
    Channel,
    /// No policy of tokens: transform coding as [`Quantizer::Klt`] codes keys, in the metric of [`Metric::Fisher`] or [`Metric::Output`].
    Klt,
}

/// Values quantized per token, asymmetric min/max over groups of c channels, or transformed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValueScheme {
    /// Which tokens get how many bits.
    pub policy: Policy,
    /// Mean bits per code: 1–8, 2–7 where tokens differ, or as for keys under `klt`.
    pub bits: Bits,
    /// Channels that share one scale (not `channel`, not `klt`); `None` is the head width.
    pub channels: Option<usize>,
    /// Where ranges come from; only `klt` has a choice.
    pub ranges: RangeSource,
    /// What `klt` takes errors in values to cost: [`Metric::Fisher`], which all other policies have, or [`Metric::Output`].
    pub metric: Metric,
    /// What shares the bits of `klt`.
    pub pool: Pool,
    /// G, R, N where they differ from the key's; all `None` follow the key's (or the defaults where keys are dense).
    pub group: Option<usize>,
    /// See `group`.
    pub residual: Option<usize>,
    /// See `group`.
    pub sinks: Option<usize>,
    /// Factor ρ on the half-width of each range.
    pub range: f32,
    /// How scales and zeros are stored.
    pub meta: Meta,
}

impl Default for Flush {
    fn default() -> Self {
        Self { group: 32, residual: 32, sinks: 0 }
    }
}

impl Flush {
    /// n_flushed of E10 for token t (0-based): coded tokens after the sinks once t has been appended.
    pub fn flushed(&self, t: usize) -> usize {
        (t + 1).saturating_sub(self.residual + self.sinks) / self.group * self.group
    }

    /// The first query position that reads token `j` (after the sinks) from codes.
    pub fn time(&self, j: usize) -> usize {
        let groups = (j - self.sinks) / self.group + 1;
        groups * self.group + self.residual + self.sinks - 1
    }
}

impl BaseScheme {
    /// Whether residuals of this quantizer are those of `other`. The residual window plays no part: it decides when tokens are
    /// coded, not how.
    pub fn same_residuals(&self, other: &BaseScheme) -> bool {
        let windowless = |b: &BaseScheme| BaseScheme { flush: Flush { residual: 0, ..b.flush }, ..*b };
        windowless(self) == windowless(other)
    }
}

impl BaseScheme {
    /// Whether it needs calibrated statistics of the keys and queries ([`crate::KeyStatistics`]).
    pub fn is_static(&self) -> bool {
        self.center || matches!(self.quantizer, Quantizer::Grid | Quantizer::Klt) || self.lambda().is_some()
    }

    /// Clip factors of each KV head `head_dim` wide that can be learned: one on the half-width of all min/max ranges of `kivi` and `token`,
    /// one on the ranges, the step or the levels of each coefficient of `klt`. `None` where there are none.
    pub fn clip_factors(&self, head_dim: usize) -> Option<usize> {
        match self.quantizer {
            Quantizer::Kivi | Quantizer::Token if self.rounding == Rounding::Nearest => Some(1),
            Quantizer::Klt => Some(head_dim),
            _ => None,
        }
    }

    /// The least and the largest that a learned clip factor may be. Ranges from the data hold all of it; those of coefficients may have
    /// to grow, where calibration took them for smaller than they are.
    pub fn clip_bounds(&self) -> [f64; 2] {
        match self.quantizer {
            Quantizer::Klt => crate::transform::CLIP_BOUNDS,
            _ => [crate::correction::LEAST_CLIP, 1.0],
        }
    }

    /// λ of score-aware rounding; `None` where each number goes to its nearest level.
    pub fn lambda(&self) -> Option<f64> {
        match self.rounding {
            Rounding::Nearest => None,
            Rounding::ScoreAware { lambda } => Some(lambda.into()),
        }
    }
}

impl Quantizer {
    /// Sinks where the written form does not give them.
    fn sinks(self) -> usize {
        if self == Quantizer::Klt { KLT_SINKS } else { 0 }
    }

    /// Whether each channel is rounded by itself, so that one's error can be passed on to the next.
    fn is_per_channel(self) -> bool {
        matches!(self, Quantizer::Kivi | Quantizer::Grid)
    }

    /// The largest ρ.
    fn most_range(self) -> f32 {
        if self == Quantizer::Klt { MOST_KLT_RANGE } else { 1.0 }
    }
}

impl Bits {
    /// A whole number of bits.
    pub const fn whole(bits: u32) -> Self {
        Self { thousandths: 1000 * bits }
    }

    /// From thousandths of a bit.
    pub const fn thousandths(thousandths: u32) -> Self {
        Self { thousandths }
    }

    /// The number nearest to `bits`; none below 0.
    pub fn nearest(bits: f64) -> Self {
        Self { thousandths: (bits.max(0.0) * 1000.0).round() as u32 }
    }

    /// Mean bits.
    pub fn mean(self) -> f64 {
        f64::from(self.thousandths) / 1000.0
    }

    /// The mean rounded up: the number itself of all quantizers but `klt`.
    pub const fn ceil(self) -> u32 {
        self.thousandths.div_ceil(1000)
    }

    /// One bit more.
    pub const fn one_more(self) -> Self {
        Self { thousandths: self.thousandths + 1000 }
    }

    /// From a decimal with up to three places.
    fn parse(text: &str, what: &str, range: std::ops::RangeInclusive<Bits>) -> Result<Self, String> {
        let (whole, places) = text.split_once('.').unwrap_or((text, "0"));
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        let all = format!("{whole}{places:0<3}");
        let number = (digits(whole) && digits(places) && places.len() <= 3).then(|| all.parse().ok()).flatten();
        number.map(|thousandths| Bits { thousandths }).filter(|bits| range.contains(bits)).ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            format!("{what}: expected a number from {low} to {high} with at most three decimals, found '{text}'")
        })
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.mean())
    }
}

impl Policy {
    /// Whether tokens differ in bits.
    pub fn mixed(self) -> bool {
        !matches!(self, Policy::Token | Policy::Channel | Policy::Klt)
    }

    /// Sinks where the written form gives none and keys are dense.
    fn sinks(self) -> usize {
        if self == Policy::Klt { KLT_SINKS } else { 0 }
    }
}

impl Sign {
    /// ±1.
    pub fn factor(self) -> f64 {
        match self {
            Sign::Plus => 1.0,
            Sign::Minus => -1.0,
        }
    }
}

impl Meta {
    /// Bits of one scale or zero.
    pub fn bits(self) -> f64 {
        match self {
            Meta::F16 => 16.0,
            Meta::F32 => 32.0,
        }
    }
}

impl ValueScheme {
    /// When values are coded, given the key's scheme.
    pub fn flush(&self, key: Option<&KeyScheme>) -> Flush {
        let of_key = key.map(|k| k.base.flush).unwrap_or_default();
        Flush {
            group: self.group.unwrap_or(of_key.group),
            residual: self.residual.unwrap_or(of_key.residual),
            sinks: self.sinks.unwrap_or(match key {
                None => self.policy.sinks(),
                Some(_) => of_key.sinks,
            }),
        }
    }

    /// The quantizer of `channel` and `klt`, which code values as keys are coded; `None` for the policies of tokens.
    pub fn as_keys(&self, key: Option<&KeyScheme>) -> Option<BaseScheme> {
        let (quantizer, metric) = match self.policy {
            Policy::Channel => (Quantizer::Kivi, Metric::default()),
            Policy::Klt => (Quantizer::Klt, self.metric),
            Policy::Token | Policy::A2 | Policy::Mse | Policy::Random | Policy::Recency => return None,
        };
        Some(BaseScheme {
            quantizer,
            bits: self.bits,
            flush: self.flush(key),
            channels: None,
            range: self.range,
            ranges: self.ranges,
            metric,
            pool: self.pool,
            rounding: Rounding::Nearest,
            center: quantizer == Quantizer::Klt,
            meta: self.meta,
        })
    }
}

/// Names with their values, for parsing, printing and the lists in error messages.
macro_rules! names {
    ($type:ty { $($value:path => $name:literal),+ $(,)? }) => {
        impl $type {
            /// All values, in the order in which messages list them.
            pub const ALL: &'static [$type] = &[$($value),+];

            /// The name in the written form.
            pub fn name(self) -> &'static str {
                match self { $($value => $name),+ }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::ALL.iter().copied().find(|v| v.name() == text).ok_or_else(|| {
                    let known: Vec<_> = Self::ALL.iter().map(|v| v.name()).collect();
                    format!("'{text}' is not known; known are {}", known.join(", "))
                })
            }
        }
    };
}

names!(Quantizer {
    Quantizer::Kivi => "kivi",
    Quantizer::Token => "token",
    Quantizer::Grid => "grid",
    Quantizer::Rotated => "rotated",
    Quantizer::Klt => "klt",
});
names!(RangeSource { RangeSource::Group => "group", RangeSource::Static => "static", RangeSource::Lloyd => "lloyd" });
names!(Metric { Metric::Queries => "queries", Metric::Fisher => "fisher", Metric::Output => "output" });
names!(Policy {
    Policy::Token => "token",
    Policy::A2 => "a2",
    Policy::Mse => "mse",
    Policy::Random => "random",
    Policy::Recency => "recency",
    Policy::Channel => "channel",
    Policy::Klt => "klt",
});
names!(Family {
    Family::QueryPca => "query-pca",
    Family::QueryPcaCentered => "query-pca-centered",
    Family::ResidualPca => "residual-pca",
    Family::Random => "random",
    Family::ScoreOptimal => "score-optimal",
    Family::Learned => "learned",
});
names!(Meta { Meta::F16 => "f16", Meta::F32 => "f32" });
names!(SideScales { SideScales::Group => "group", SideScales::Token => "token" });
names!(Sign { Sign::Plus => "1", Sign::Minus => "-1" });
names!(Scope { Scope::KvHead => "kv-head", Scope::QueryHead => "query-head" });

/// Serialized by name, like every registry.
impl Serialize for Family {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Family {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Family {
    /// Whether the basis depends on the base quantizer's residual, and so on the base quantizer.
    pub fn uses_residual(self) -> bool {
        matches!(self, Family::ResidualPca | Family::ScoreOptimal | Family::Learned)
    }

    /// Whether one orthonormal matrix serves as encoder and decoder.
    pub fn tied(self) -> bool {
        !matches!(self, Family::ScoreOptimal | Family::Learned)
    }
}

impl Scheme {
    /// Keys and values in full precision.
    pub const DENSE: Scheme = Scheme { key: None, value: None };

    /// Whether it needs calibrated statistics ([`crate::KeyStatistics`]).
    pub fn needs_statistics(&self) -> bool {
        self.key.is_some_and(|key| key.base.is_static()) || self.value.is_some_and(|v| v.policy == Policy::Klt)
    }

    /// Whether it needs gradients among the statistics.
    pub fn needs_gradients(&self) -> bool {
        let key = self.key.is_some_and(|key| key.base.metric == Metric::Fisher);
        key || self.transforms_values_by(Metric::Fisher)
    }

    /// Whether it needs the output projection among the statistics.
    pub fn needs_output(&self) -> bool {
        self.transforms_values_by(Metric::Output)
    }

    fn transforms_values_by(&self, metric: Metric) -> bool {
        self.value.is_some_and(|v| v.policy == Policy::Klt && v.metric == metric)
    }

    /// What shares the bits of keys and of values.
    pub(crate) fn pools(&self) -> [Pool; 2] {
        [self.key.map_or(Pool::Head, |key| key.base.pool), self.value.map_or(Pool::Head, |value| value.pool)]
    }

    /// Whether nothing is quantized.
    pub fn is_dense(&self) -> bool {
        self.key.is_none() && self.value.is_none()
    }

    /// The side scheme, if keys carry one.
    pub fn side(&self) -> Option<&SideScheme> {
        self.key.as_ref().and_then(|k| k.side.as_ref())
    }

    /// Checks the scheme against the shape of a model's heads.
    ///
    /// # Errors
    /// [`Error::Fit`] where the rank exceeds the head width, the channel groups do not divide it, or a head has not one bit.
    pub fn check(&self, head_dim: usize) -> Result<(), Error> {
        let fit = |reason: String| Err(Error::Fit { scheme: self.to_string(), reason });
        if let Some(side) = self.side()
            && side.rank > head_dim
        {
            return fit(format!("rank={} exceeds the head width {head_dim}; give rank=1 to {head_dim}", side.rank));
        }
        let values = self.value.and_then(|v| v.as_keys(self.key.as_ref()));
        for base in self.key.map(|k| k.base).into_iter().chain(values) {
            if base.pool == Pool::Head && base.bits.mean() * (head_dim as f64) < 1.0 {
                return fit(format!("{base} leaves less than one bit for a head {head_dim} wide; give more bits"));
            }
        }
        let key_c = self.key.and_then(|k| k.base.channels);
        let value_c = self.value.and_then(|v| v.channels);
        for c in [key_c, value_c].into_iter().flatten() {
            if c > head_dim || !head_dim.is_multiple_of(c) {
                return fit(format!("c={c} does not divide the head width {head_dim}"));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.key {
            None => f.write_str("dense")?,
            Some(key) => {
                write!(f, "{}", key.base)?;
                if let Some(side) = &key.side {
                    write!(f, "+{side}")?;
                }
            }
        }
        match &self.value {
            None => Ok(()),
            Some(value) => write!(f, "/{value}"),
        }
    }
}

/// Collects `name=value` pairs and flags, and prints them in parentheses.
struct Options(Vec<String>);

impl Options {
    fn push(&mut self, name: &str, value: impl fmt::Display) {
        self.0.push(format!("{name}={value}"));
    }

    fn push_unless<T: PartialEq + fmt::Display>(&mut self, name: &str, value: T, default: T) {
        if value != default {
            self.push(name, value);
        }
    }

    fn flag(&mut self, name: &str, set: bool) {
        if set {
            self.0.push(name.to_string());
        }
    }

    fn push_some<T: fmt::Display>(&mut self, name: &str, value: Option<T>) {
        if let Some(value) = value {
            self.push(name, value);
        }
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "({})", self.0.join(",")) }
    }
}

impl fmt::Display for BaseScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut options = Options(Vec::new());
        options.push("g", self.flush.group);
        options.push("r", self.flush.residual);
        options.push_unless("sinks", self.flush.sinks, self.quantizer.sinks());
        options.push_some("c", self.channels);
        options.push_unless("range", self.range, 1.0);
        options.push_unless("ranges", self.ranges, RangeSource::Group);
        options.push_unless("metric", self.metric, Metric::Queries);
        options.push_unless("pool", self.pool, Pool::Head);
        if let Rounding::ScoreAware { lambda } = self.rounding {
            options.push("rounding", SCORE_AWARE);
            options.push_unless("lambda", lambda, DEFAULT_LAMBDA);
        }
        options.flag("center", self.center && self.quantizer != Quantizer::Klt);
        options.push_unless("meta", self.meta, Meta::F16);
        write!(f, "{}-{}{options}", self.quantizer, self.bits)
    }
}

impl fmt::Display for SideScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut options = Options(Vec::new());
        options.push("rank", self.rank);
        options.push("bits", self.bits);
        options.push_unless("scales", self.scales, SideScales::Group);
        options.push_unless("sign", self.sign, Sign::Plus);
        options.push_unless("scope", self.scope, Scope::KvHead);
        write!(f, "{}{options}", self.family)
    }
}

impl fmt::Display for ValueScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut options = Options(Vec::new());
        options.push_some("c", self.channels);
        options.push_some("g", self.group);
        options.push_some("r", self.residual);
        options.push_some("sinks", self.sinks);
        options.push_unless("range", self.range, 1.0);
        options.push_unless("ranges", self.ranges, RangeSource::Group);
        options.push_unless("metric", self.metric, Metric::Fisher);
        options.push_unless("pool", self.pool, Pool::Head);
        options.push_unless("meta", self.meta, Meta::F16);
        write!(f, "{}-{}{options}", self.policy, self.bits)
    }
}

/// Names of [`Rounding`].
const NEAREST: &str = "nearest";
const SCORE_AWARE: &str = "score-aware";

/// Options that are written without a value.
const FLAGS: &[&str] = &["center"];

/// One `NAME-BITS(options)` or `NAME(options)` term, taken apart.
struct Term<'a> {
    head: &'a str,
    options: Vec<(&'a str, &'a str)>,
}

impl<'a> Term<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let text = text.trim();
        let Some(open) = text.find('(') else {
            if text.contains(')') {
                return Err(format!("'{text}' closes a parenthesis that it does not open"));
            }
            return Ok(Self { head: text, options: Vec::new() });
        };
        let Some(inner) = text[open + 1..].strip_suffix(')') else {
            return Err(format!("'{text}' opens a parenthesis and does not end with ')'"));
        };
        let mut options: Vec<(&str, &str)> = Vec::new();
        for item in inner.split(',').map(str::trim).filter(|_| !inner.trim().is_empty()) {
            let (name, value) = match item.split_once('=') {
                Some((name, _)) if FLAGS.contains(&name.trim()) => {
                    return Err(format!("option '{}' takes no value", name.trim()));
                }
                Some((name, value)) => (name.trim(), value.trim()),
                None if FLAGS.contains(&item) => (item, ""),
                None => return Err(format!("option '{item}' is not written name=value")),
            };
            if options.iter().any(|(n, _)| *n == name) {
                return Err(format!("option '{name}' is given twice"));
            }
            options.push((name, value));
        }
        Ok(Self { head: text[..open].trim(), options })
    }

    /// Splits `NAME-BITS`.
    fn name_and_bits(&self) -> Result<(&'a str, &'a str), String> {
        self.head
            .rsplit_once('-')
            .filter(|(name, bits)| !name.is_empty() && bits.parse::<f64>().is_ok())
            .ok_or_else(|| format!("'{}' is not written NAME-BITS, e.g. kivi-2", self.head))
    }

    /// The mean bits of `klt`, and what shares them.
    fn klt_bits(&mut self, bits: &str, what: &str) -> Result<(Bits, Pool), String> {
        let pool: Pool = self.take_named("pool")?;
        let most = if pool == Pool::Head { MOST_KLT_BITS } else { MOST_POOLED_BITS };
        // What a search gave to keys and to values may be as little as nothing.
        let least = if matches!(pool, Pool::Plan(_)) { Bits::whole(0) } else { LEAST_KLT_BITS };
        let bits = Bits::parse(bits, what, least..=Bits::whole(most))?;
        match pool {
            Pool::Plan(budgets) if budgets.mean() != bits => {
                Err(format!("{what}: the heads of {pool} have {} on average, found {bits}", budgets.mean()))
            }
            pool => Ok((bits, pool)),
        }
    }

    fn take(&mut self, name: &str) -> Option<&'a str> {
        let at = self.options.iter().position(|(n, _)| *n == name)?;
        Some(self.options.remove(at).1)
    }

    fn take_whole<T: TryFrom<u64> + fmt::Display + Copy + Into<u64>>(
        &mut self,
        name: &str,
        range: std::ops::RangeInclusive<T>,
    ) -> Result<Option<T>, String> {
        self.take(name).map(|v| whole(v, name, range)).transpose()
    }

    fn take_usize(&mut self, name: &str, range: std::ops::RangeInclusive<usize>) -> Result<Option<usize>, String> {
        let range = *range.start() as u64..=*range.end() as u64;
        Ok(self.take_whole::<u64>(name, range)?.map(|v| v as usize))
    }

    fn take_named<T: FromStr<Err = String> + Default>(&mut self, name: &str) -> Result<T, String> {
        self.take(name).map_or(Ok(T::default()), |v| v.parse().map_err(|e| format!("option {name}: {e}")))
    }

    fn take_real(&mut self, name: &str, most: f32) -> Result<Option<f32>, String> {
        let Some(text) = self.take(name) else { return Ok(None) };
        match text.parse::<f32>() {
            Ok(v) if v > 0.0 && v <= most => Ok(Some(v)),
            _ => Err(format!("{name}={text}: expected a number above 0 and at most {most}")),
        }
    }

    fn take_range(&mut self, most: f32) -> Result<f32, String> {
        Ok(self.take_real("range", most)?.unwrap_or(1.0))
    }

    fn take_rounding(&mut self, quantizer: Quantizer) -> Result<Rounding, String> {
        let rounding = self.take("rounding");
        let lambda = self.take_real("lambda", MOST_LAMBDA)?;
        match (rounding, lambda) {
            (None | Some(NEAREST), None) => Ok(Rounding::Nearest),
            (None | Some(NEAREST), Some(lambda)) => {
                Err(format!("lambda={lambda}: only score-aware rounding has one; add rounding={SCORE_AWARE}"))
            }
            (Some(SCORE_AWARE), _) if !quantizer.is_per_channel() => {
                Err(format!("rounding={SCORE_AWARE}: {quantizer} does not round channel by channel; kivi and grid do"))
            }
            (Some(SCORE_AWARE), lambda) => Ok(Rounding::ScoreAware { lambda: lambda.unwrap_or(DEFAULT_LAMBDA) }),
            (Some(other), _) => {
                Err(format!("option rounding: '{other}' is not known; known are {NEAREST}, {SCORE_AWARE}"))
            }
        }
    }

    /// Where ranges come from, and how they are stored if they are.
    fn take_ranges(&mut self, quantizer: Quantizer) -> Result<(RangeSource, Meta), String> {
        let klt = quantizer == Quantizer::Klt;
        let ranges = if klt { self.take_named("ranges")? } else { RangeSource::Group };
        let meta = if quantizer == Quantizer::Grid { Meta::F16 } else { self.take_named("meta")? };
        match (ranges, meta) {
            (RangeSource::Static, Meta::F32) => Err("meta=f32: ranges=static stores no scales; leave it out".into()),
            all => Ok(all),
        }
    }

    /// One of the metrics that keys or values can have, the first where none is given.
    fn take_metric(&mut self, known: [Metric; 2]) -> Result<Metric, String> {
        let Some(text) = self.take("metric") else { return Ok(known[0]) };
        let found = known.into_iter().find(|metric| metric.name() == text);
        found.ok_or_else(|| format!("option metric: '{text}' is not known here; known are {}, {}", known[0], known[1]))
    }

    fn finish(self, known: &str) -> Result<(), String> {
        match self.options.first() {
            None => Ok(()),
            Some((name, _)) => Err(format!("option '{name}' of '{}' is not known; known are {known}", self.head)),
        }
    }
}

fn whole<T: TryFrom<u64> + fmt::Display + Copy + Into<u64>>(
    text: &str,
    what: &str,
    range: std::ops::RangeInclusive<T>,
) -> Result<T, String> {
    let (low, high) = (*range.start(), *range.end());
    text.parse::<u64>()
        .ok()
        .filter(|v| (low.into()..=high.into()).contains(v))
        .and_then(|v| T::try_from(v).ok())
        .ok_or_else(|| format!("{what}: expected a whole number from {low} to {high}, found '{text}'"))
}

/// Tokens in a group, window or sink region; beyond this nothing sensible is meant.
const MOST_TOKENS: usize = 1 << 24;

/// Largest λ; beyond it nothing but the nearest level is left.
const MOST_LAMBDA: f32 = 1000.0;

fn parse_base(text: &str) -> Result<BaseScheme, String> {
    let mut term = Term::parse(text)?;
    let (name, bits) = term.name_and_bits()?;
    let quantizer: Quantizer = name.parse().map_err(|e| format!("key quantizer {e}"))?;
    let what = format!("bits of '{}'", term.head);
    let ((bits, pool), metric) = match quantizer {
        Quantizer::Klt => (term.klt_bits(bits, &what)?, term.take_metric([Metric::Queries, Metric::Fisher])?),
        _ => ((Bits::whole(whole(bits, &what, 1..=8)?), Pool::Head), Metric::Queries),
    };
    let (default, rounding) = (Flush::default(), term.take_rounding(quantizer)?);
    let (ranges, meta) = term.take_ranges(quantizer)?;
    let base = BaseScheme {
        quantizer,
        bits,
        flush: Flush {
            group: term.take_usize("g", 1..=MOST_TOKENS)?.unwrap_or(default.group),
            residual: term.take_usize("r", 0..=MOST_TOKENS)?.unwrap_or(default.residual),
            sinks: term.take_usize("sinks", 0..=MOST_TOKENS)?.unwrap_or(quantizer.sinks()),
        },
        channels: match quantizer {
            Quantizer::Kivi | Quantizer::Klt => None,
            _ => term.take_usize("c", 1..=MOST_TOKENS)?,
        },
        range: match quantizer {
            Quantizer::Rotated => 1.0,
            _ => term.take_range(quantizer.most_range())?,
        },
        ranges,
        metric,
        pool,
        rounding,
        // The mean is no part of a coefficient, asked or not.
        center: term.take("center").is_some() || quantizer == Quantizer::Klt,
        meta,
    };
    term.finish(match quantizer {
        Quantizer::Kivi => "g, r, sinks, range, rounding, lambda, center, meta",
        Quantizer::Token => "g, r, sinks, c, range, center, meta",
        Quantizer::Grid => "g, r, sinks, c, range, rounding, lambda, center",
        Quantizer::Rotated => "g, r, sinks, c, center, meta",
        Quantizer::Klt => "g, r, sinks, range, ranges, metric, pool, center, meta",
    })?;
    Ok(base)
}

fn parse_side(text: &str) -> Result<SideScheme, String> {
    let mut term = Term::parse(text)?;
    let family: Family = term.head.parse().map_err(|e| format!("basis family {e}"))?;
    let missing = |name: &str| format!("'{text}' does not give {name}=; write e.g. {family}(rank=4,bits=4)");
    let side = SideScheme {
        family,
        rank: term.take_usize("rank", 1..=MOST_TOKENS)?.ok_or_else(|| missing("rank"))?,
        bits: term.take_whole("bits", 2..=8u32)?.ok_or_else(|| missing("bits"))?,
        scales: term.take_named("scales")?,
        sign: match term.take("sign") {
            Some("+1") | None => Sign::Plus,
            Some(text) => text.parse().map_err(|e| format!("option sign: {e}"))?,
        },
        scope: term.take_named("scope")?,
    };
    term.finish("rank, bits, scales, sign, scope")?;
    Ok(side)
}

fn parse_value(text: &str) -> Result<Option<ValueScheme>, String> {
    if text.trim() == "dense" {
        return Ok(None);
    }
    let mut term = Term::parse(text)?;
    let (name, bits) = term.name_and_bits()?;
    let policy: Policy =
        name.parse().map_err(|e: String| format!("value policy {}", e.replace("are ", "are dense, ")))?;
    let what = format!("bits of '{}'", term.head);
    let klt = policy == Policy::Klt;
    let (bits, pool) = match klt {
        true => term.klt_bits(bits, &what)?,
        false => (Bits::whole(whole(bits, &what, 1..=8)?), Pool::Head),
    };
    if policy.mixed() && !(Bits::whole(2)..=Bits::whole(7)).contains(&bits) {
        return Err(format!(
            "bits of '{}': tokens get one bit more and one less than the mean, which must be from 2 to 7",
            term.head
        ));
    }
    let (ranges, meta) = term.take_ranges(if klt { Quantizer::Klt } else { Quantizer::Token })?;
    let whole_heads = klt || policy == Policy::Channel;
    let value = ValueScheme {
        policy,
        bits,
        channels: if whole_heads { None } else { term.take_usize("c", 1..=MOST_TOKENS)? },
        ranges,
        metric: if klt { term.take_metric([Metric::Fisher, Metric::Output])? } else { Metric::Fisher },
        pool,
        group: term.take_usize("g", 1..=MOST_TOKENS)?,
        residual: term.take_usize("r", 0..=MOST_TOKENS)?,
        sinks: term.take_usize("sinks", 0..=MOST_TOKENS)?,
        range: term.take_range(if klt { MOST_KLT_RANGE } else { 1.0 })?,
        meta,
    };
    term.finish(match policy {
        Policy::Klt => "g, r, sinks, range, ranges, metric, pool, meta",
        Policy::Channel => "g, r, sinks, range, meta",
        _ => "c, g, r, sinks, range, meta",
    })?;
    Ok(Some(value))
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || -> Result<Scheme, String> {
            if text.trim().is_empty() {
                return Err("empty; write e.g. kivi-2(g=32,r=32)".into());
            }
            let (key, value) = match text.split_once('/') {
                None => (text, None),
                Some((key, value)) => (key, Some(value)),
            };
            let key = match key.trim() {
                "dense" => None,
                key => {
                    let (base, side) = match key.split_once('+') {
                        None => (key, None),
                        // A sign may be written sign=+1, inside parentheses.
                        Some((base, _)) if base.matches('(').count() > base.matches(')').count() => (key, None),
                        Some((base, side)) => (base, Some(side)),
                    };
                    if base.trim() == "dense" || base.trim().starts_with("dense(") {
                        return Err("dense keys take no options and no side code; write dense".into());
                    }
                    let base = parse_base(base)?;
                    Some(KeyScheme { base, side: side.map(parse_side).transpose()? })
                }
            };
            let value = value.map(parse_value).transpose()?.flatten();
            if let Some(value) = value.filter(|v| v.policy.mixed()) {
                let group = value.flush(key.as_ref()).group;
                if !group.is_multiple_of(2) {
                    return Err(format!(
                        "{value}: half of each group gets more bits, so g must be even, found {group}"
                    ));
                }
            }
            Ok(Scheme { key, value })
        };
        parse().map_err(|reason| Error::Scheme { scheme: text.to_string(), reason })
    }
}

impl FromStr for BaseScheme {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        parse_base(text).map_err(|reason| Error::Scheme { scheme: text.to_string(), reason })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flush() -> impl Strategy<Value = Flush> {
        (1usize..300, 0usize..300, 0usize..9).prop_map(|(group, residual, sinks)| Flush { group, residual, sinks })
    }

    fn pool() -> impl Strategy<Value = Pool> {
        let plan = prop::collection::vec(250u32..=6000, 1..9)
            .prop_map(|all| Pool::Plan(HeadBudgets::interned(all.into_iter().map(Bits::thousandths).collect())));
        prop_oneof![Just(Pool::Head), Just(Pool::Model), plan]
    }

    /// The bits that a scheme with such a pool can have.
    fn pooled(pool: Pool, thousandths: u32) -> Bits {
        match pool {
            Pool::Plan(budgets) => budgets.mean(),
            _ => Bits::thousandths(thousandths),
        }
    }

    fn any_scheme() -> impl Strategy<Value = Scheme> {
        let range = prop_oneof![Just(1.0f32), Just(0.85), 0.01f32..1.0];
        let meta = prop_oneof![Just(Meta::F16), Just(Meta::F32)];
        let rounding = prop_oneof![
            Just(Rounding::Nearest),
            Just(Rounding::ScoreAware { lambda: DEFAULT_LAMBDA }),
            (1e-6f32..1000.0).prop_map(|lambda| Rounding::ScoreAware { lambda }),
        ];
        let base = (
            prop::sample::select(Quantizer::ALL),
            (1u32..=8, 250u32..=6000),
            flush(),
            prop::option::of(1usize..200),
            range,
            (prop::sample::select(RangeSource::ALL), rounding),
            meta,
            (any::<bool>(), prop_oneof![Just(Metric::Queries), Just(Metric::Fisher)], pool()),
        )
            .prop_map(|(quantizer, (bits, thousandths), flush, c, range, (ranges, rounding), meta, more)| {
                let (center, metric, pool) = more;
                let klt = quantizer == Quantizer::Klt;
                let ranges = if klt { ranges } else { RangeSource::Group };
                let no_scales = quantizer == Quantizer::Grid || ranges == RangeSource::Static;
                BaseScheme {
                    quantizer,
                    bits: if klt { pooled(pool, thousandths) } else { Bits::whole(bits) },
                    flush,
                    channels: c.filter(|_| quantizer != Quantizer::Kivi && !klt),
                    range: if quantizer == Quantizer::Rotated { 1.0 } else { range },
                    ranges,
                    metric: if klt { metric } else { Metric::Queries },
                    pool: if klt { pool } else { Pool::Head },
                    rounding: if quantizer.is_per_channel() { rounding } else { Rounding::Nearest },
                    center: center || klt,
                    meta: if no_scales { Meta::F16 } else { meta },
                }
            });
        let side = (
            prop::sample::select(Family::ALL),
            1usize..200,
            2u32..=8,
            prop::sample::select(SideScales::ALL),
            prop::sample::select(Sign::ALL),
            prop::sample::select(Scope::ALL),
        )
            .prop_map(|(family, rank, bits, scales, sign, scope)| SideScheme {
                family,
                rank,
                bits,
                scales,
                sign,
                scope,
            });
        let token = prop::option::of(0usize..200);
        const MIXED: &[Policy] = &[Policy::A2, Policy::Mse, Policy::Random, Policy::Recency];
        let plain = |(policy, bits)| (policy, Bits::whole(bits), Pool::Head, (RangeSource::Group, Metric::Fisher));
        let metric = prop_oneof![Just(Metric::Fisher), Just(Metric::Output)];
        let policy = prop_oneof![
            (prop_oneof![Just(Policy::Token), Just(Policy::Channel)], 1u32..=8).prop_map(plain),
            (prop::sample::select(MIXED), 2u32..=7).prop_map(plain),
            (Just(Policy::Klt), 250u32..=6000, pool(), (prop::sample::select(RangeSource::ALL), metric))
                .prop_map(|(policy, bits, pool, how)| (policy, pooled(pool, bits), pool, how)),
        ];
        let value = (policy, prop::option::of(1usize..200), prop::option::of(1usize..100), token.clone(), token)
            .prop_map(|((policy, bits, pool, (ranges, metric)), channels, group, residual, sinks)| ValueScheme {
                policy,
                bits,
                ranges,
                metric,
                pool,
                channels: channels.filter(|_| !matches!(policy, Policy::Channel | Policy::Klt)),
                // A mixed policy's own group is even, and never the key's, which may be odd.
                group: if policy.mixed() { Some(2 * group.unwrap_or(16)) } else { group },
                residual,
                sinks,
                range: 1.0,
                meta: Meta::F16,
            });
        (prop::option::of((base, prop::option::of(side))), prop::option::of(value))
            .prop_map(|(key, value)| Scheme { key: key.map(|(base, side)| KeyScheme { base, side }), value })
    }

    proptest! {
        #[test]
        fn printing_then_parsing_is_the_identity(scheme in any_scheme()) {
            prop_assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme);
        }

        #[test]
        fn parsing_never_panics(text in "[a-z0-9=(),/+. -]{0,40}") {
            let _ = text.parse::<Scheme>();
        }
    }

    #[test]
    fn examples_of_the_contract_print_as_written() {
        for text in [
            "dense",
            "kivi-2(g=32,r=32)",
            "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)",
            "kivi-2(g=128,r=32,sinks=4)+score-optimal(rank=4,bits=3,scales=token,sign=-1,scope=query-head)",
            "dense/token-2(c=32,g=64,r=32)",
            "grid-3(g=32,r=32,c=1,center)",
            "rotated-2(g=32,r=32,c=16)",
            "kivi-2(g=32,r=32,range=0.85,center,meta=f32)/a2-2(c=32)",
            "dense/recency-3",
            "dense/channel-2(g=128,r=32,sinks=4)",
            "dense/klt-2(r=32,ranges=static,metric=output)",
            "klt-2(g=32,r=32)",
            "klt-1.5(g=128,r=128)",
            "klt-2.25(g=32,r=0,sinks=0,range=1.25,meta=f32)",
            "klt-0.25(g=8,r=5,ranges=static)+score-optimal(rank=4,bits=2)",
            "kivi-2(g=128,r=128,sinks=4,range=0.85,rounding=score-aware,lambda=0.03)",
            "grid-3(g=32,r=32,c=1,rounding=score-aware,center)",
        ] {
            assert_eq!(text.parse::<Scheme>().unwrap().to_string(), text);
        }
        assert_eq!("kivi-2".parse::<Scheme>().unwrap().to_string(), "kivi-2(g=32,r=32)");
        for (text, printed) in [
            ("klt-2", "klt-2(g=32,r=32)"),
            ("klt-1.50(sinks=4,center,ranges=group)", "klt-1.5(g=32,r=32)"),
            ("klt-2.050", "klt-2.05(g=32,r=32)"),
            ("kivi-2(rounding=score-aware,lambda=0.01)", "kivi-2(g=32,r=32,rounding=score-aware)"),
            ("token-2(rounding=nearest)", "token-2(g=32,r=32)"),
        ] {
            assert_eq!(text.parse::<Scheme>().unwrap().to_string(), printed);
        }
        assert_eq!(" token-8( c = 32 ) / dense ".parse::<Scheme>().unwrap().to_string(), "token-8(g=32,r=32,c=32)");
    }

    #[test]
    fn bad_schemes_say_what_is_wrong() {
        for (text, part) in [
            ("kivi-9", "from 1 to 8, found '9'"),
            ("kivi-0", "from 1 to 8"),
            ("kivi-2.5", "whole number"),
            ("kivi-2(g=0)", "g: expected a whole number from 1"),
            ("kivi-2(g=-1)", "g: expected a whole number"),
            (
                "kivi-2(c=4)",
                "option 'c' of 'kivi-2' is not known; known are g, r, sinks, range, rounding, lambda, center, meta",
            ),
            (
                "grid-2(meta=f32)",
                "option 'meta' of 'grid-2' is not known; known are g, r, sinks, c, range, rounding, lambda, center",
            ),
            ("rotated-2(range=0.9)", "known are g, r, sinks, c, center, meta"),
            ("kivi-2(center=1)", "'center' takes no value"),
            ("kivi-2(center,center)", "twice"),
            ("kivi-2+query-pca(rank=4,bits=4,center)", "option 'center' of 'query-pca' is not known"),
            ("dense/a2-1", "from 2 to 7"),
            ("dense/mse-8", "from 2 to 7"),
            ("kivi-2(g=33)/a2-2", "g must be even, found 33"),
            ("dense/random-2(g=5)", "g must be even, found 5"),
            ("kivi-2(g=32,g=32)", "twice"),
            ("kivi-2(g=32", "does not end with ')'"),
            ("kivi-2(g)", "name=value"),
            ("kivi-2(g=32,,r=1)", "option '' is not written name=value"),
            ("kivi-2(g=32,)", "option '' is not written name=value"),
            ("kivi", "NAME-BITS"),
            ("kiwi-2", "known are kivi, token, grid, rotated, klt"),
            ("klt-0.2", "bits of 'klt-0.2': expected a number from 0.25 to 6 with at most three decimals, found '0.2'"),
            ("klt-6.001", "from 0.25 to 6"),
            ("klt-1.0625", "at most three decimals"),
            ("klt-1e0", "at most three decimals"),
            (
                "klt-2(c=4)",
                "option 'c' of 'klt-2' is not known; known are g, r, sinks, range, ranges, metric, pool, center, meta",
            ),
            ("klt-2(range=1.3)", "above 0 and at most 1.25"),
            ("klt-2(ranges=fixed)", "option ranges: 'fixed' is not known; known are group, static"),
            ("klt-2(ranges=static,meta=f32)", "ranges=static stores no scales"),
            ("kivi-2(ranges=static)", "option 'ranges' of 'kivi-2' is not known"),
            ("klt-2(rounding=score-aware)", "klt does not round channel by channel; kivi and grid do"),
            ("token-2(rounding=score-aware)", "token does not round channel by channel"),
            ("kivi-2(lambda=0.1)", "lambda=0.1: only score-aware rounding has one; add rounding=score-aware"),
            ("kivi-2(rounding=score-aware,lambda=0)", "lambda=0: expected a number above 0 and at most 1000"),
            ("kivi-2(rounding=up)", "option rounding: 'up' is not known; known are nearest, score-aware"),
            ("kivi-2+pca(rank=4,bits=4)", "known are query-pca, query-pca-centered"),
            ("kivi-2+query-pca(bits=4)", "does not give rank="),
            ("kivi-2+query-pca(rank=4)", "does not give bits="),
            ("kivi-2+query-pca(rank=0,bits=4)", "rank: expected"),
            ("kivi-2+query-pca(rank=4,bits=1)", "bits: expected a whole number from 2 to 8"),
            ("kivi-2+query-pca(rank=4,bits=4,sign=2)", "known are 1, -1"),
            (
                "kivi-2/kivi-2",
                "value policy 'kivi' is not known; known are dense, token, a2, mse, random, recency, channel, klt",
            ),
            ("kivi-2/channel-2(c=4)", "option 'c' of 'channel-2' is not known; known are g, r, sinks, range, meta"),
            ("kivi-2/channel-2(metric=output)", "option 'metric' of 'channel-2' is not known"),
            ("klt-2(metric=output)", "option metric: 'output' is not known here; known are queries, fisher"),
            ("klt-2/klt-2(metric=queries)", "option metric: 'queries' is not known here; known are fisher, output"),
            ("kivi-2(range=0)", "above 0 and at most 1"),
            ("kivi-2(range=nan)", "above 0 and at most 1"),
            ("kivi-2(meta=f8)", "known are f16, f32"),
            ("", "empty"),
            ("/", "NAME-BITS"),
        ] {
            let error = text.parse::<Scheme>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(error.contains(&format!("'{text}'")) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn flushing_follows_e10() {
        let flush = Flush { group: 4, residual: 3, sinks: 2 };
        // The first 3 + 2 tokens never leave the window; then one whole group at a time.
        let counts: Vec<_> = (0..15).map(|t| flush.flushed(t)).collect();
        assert_eq!(counts, [0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8]);
        // A token's flush time is the first count that includes it.
        for j in 2..10 {
            assert_eq!(counts.iter().position(|n| 2 + n > j), Some(flush.time(j)), "{j}");
        }
    }

    #[test]
    fn schemes_are_checked_against_the_head_width() {
        let check = |text: &str, d| text.parse::<Scheme>().unwrap().check(d).map_err(|e| e.to_string());
        assert!(check("kivi-2+query-pca(rank=64,bits=4)", 64).is_ok());
        assert!(
            check("kivi-2+query-pca(rank=65,bits=4)", 64).unwrap_err().contains("rank=65 exceeds the head width 64")
        );
        assert!(check("token-2(c=48)", 64).unwrap_err().contains("c=48 does not divide"));
        assert!(check("dense/token-2(c=128)", 64).unwrap_err().contains("c=128"));
        assert!(check("klt-0.25", 4).is_ok());
        assert!(check("klt-0.25", 3).unwrap_err().contains("less than one bit for a head 3 wide"));
    }
}
