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

use std::fmt;
use std::str::FromStr;

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
    /// Bits per code, 1–8.
    pub bits: u32,
    /// When tokens are coded.
    pub flush: Flush,
    /// Channels that share one scale (not `kivi`); `None` is the head width.
    pub channels: Option<usize>,
    /// Factor ρ on the half-width of each min/max range, in (0, 1]; values outside are clipped.
    pub range: f32,
    /// Whether the calibrated mean of each head's keys is subtracted from every key and never added back, which attention cannot see.
    pub center: bool,
    /// How scales and zeros are stored.
    pub meta: Meta,
}

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
/// All but `token` give the half of each group of G tokens that comes first by some measure one bit more than the mean, and the other
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
}

/// Values quantized per token, asymmetric min/max over groups of c channels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValueScheme {
    /// Which tokens get how many bits.
    pub policy: Policy,
    /// Mean bits per code: 1–8, or 2–7 where tokens differ.
    pub bits: u32,
    /// Channels that share one scale; `None` is the head width.
    pub channels: Option<usize>,
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
    /// Whether it needs calibrated means or scales of the keys ([`crate::KeyStatistics`]).
    pub fn is_static(&self) -> bool {
        self.center || self.quantizer == Quantizer::Grid
    }

    /// Whether it has min/max ranges from the data, which can be clipped.
    pub fn has_ranges(&self) -> bool {
        matches!(self.quantizer, Quantizer::Kivi | Quantizer::Token)
    }
}

impl Policy {
    /// Whether tokens differ in bits.
    pub fn mixed(self) -> bool {
        self != Policy::Token
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
            sinks: self.sinks.unwrap_or(of_key.sinks),
        }
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
});
names!(Policy {
    Policy::Token => "token",
    Policy::A2 => "a2",
    Policy::Mse => "mse",
    Policy::Random => "random",
    Policy::Recency => "recency",
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
    /// [`Error::Fit`] where the rank exceeds the head width or the channel groups do not divide it.
    pub fn check(&self, head_dim: usize) -> Result<(), Error> {
        let fit = |reason: String| Err(Error::Fit { scheme: self.to_string(), reason });
        if let Some(side) = self.side()
            && side.rank > head_dim
        {
            return fit(format!("rank={} exceeds the head width {head_dim}; give rank=1 to {head_dim}", side.rank));
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
        options.push_unless("sinks", self.flush.sinks, 0);
        options.push_some("c", self.channels);
        options.push_unless("range", self.range, 1.0);
        options.flag("center", self.center);
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
        options.push_unless("meta", self.meta, Meta::F16);
        write!(f, "{}-{}{options}", self.policy, self.bits)
    }
}

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

    /// Splits `NAME-BITS` and checks the bits.
    fn name_bits(&self, range: std::ops::RangeInclusive<u32>) -> Result<(&'a str, u32), String> {
        let (name, bits) = self
            .head
            .rsplit_once('-')
            .filter(|(name, bits)| !name.is_empty() && bits.parse::<f64>().is_ok())
            .ok_or_else(|| format!("'{}' is not written NAME-BITS, e.g. kivi-2", self.head))?;
        Ok((name, whole(bits, &format!("bits of '{}'", self.head), range)?))
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

    fn take_range(&mut self) -> Result<f32, String> {
        let Some(text) = self.take("range") else { return Ok(1.0) };
        match text.parse::<f32>() {
            Ok(v) if v > 0.0 && v <= 1.0 => Ok(v),
            _ => Err(format!("range={text}: expected a number above 0 and at most 1")),
        }
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

fn parse_base(text: &str) -> Result<BaseScheme, String> {
    let mut term = Term::parse(text)?;
    let (name, bits) = term.name_bits(1..=8)?;
    let quantizer: Quantizer = name.parse().map_err(|e| format!("key quantizer {e}"))?;
    let default = Flush::default();
    let base = BaseScheme {
        quantizer,
        bits,
        flush: Flush {
            group: term.take_usize("g", 1..=MOST_TOKENS)?.unwrap_or(default.group),
            residual: term.take_usize("r", 0..=MOST_TOKENS)?.unwrap_or(default.residual),
            sinks: term.take_usize("sinks", 0..=MOST_TOKENS)?.unwrap_or(default.sinks),
        },
        channels: match quantizer {
            Quantizer::Kivi => None,
            _ => term.take_usize("c", 1..=MOST_TOKENS)?,
        },
        range: match quantizer {
            Quantizer::Rotated => 1.0,
            _ => term.take_range()?,
        },
        center: term.take("center").is_some(),
        meta: match quantizer {
            Quantizer::Grid => Meta::F16,
            _ => term.take_named("meta")?,
        },
    };
    term.finish(match quantizer {
        Quantizer::Kivi => "g, r, sinks, range, center, meta",
        Quantizer::Token => "g, r, sinks, c, range, center, meta",
        Quantizer::Grid => "g, r, sinks, c, range, center",
        Quantizer::Rotated => "g, r, sinks, c, center, meta",
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
    let (name, bits) = term.name_bits(1..=8)?;
    let policy: Policy =
        name.parse().map_err(|e: String| format!("value policy {}", e.replace("are ", "are dense, ")))?;
    if policy.mixed() && !(2..=7).contains(&bits) {
        return Err(format!(
            "bits of '{}': tokens get one bit more and one less than the mean, which must be from 2 to 7",
            term.head
        ));
    }
    let value = ValueScheme {
        policy,
        bits,
        channels: term.take_usize("c", 1..=MOST_TOKENS)?,
        group: term.take_usize("g", 1..=MOST_TOKENS)?,
        residual: term.take_usize("r", 0..=MOST_TOKENS)?,
        sinks: term.take_usize("sinks", 0..=MOST_TOKENS)?,
        range: term.take_range()?,
        meta: term.take_named("meta")?,
    };
    term.finish("c, g, r, sinks, range, meta")?;
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

    fn any_scheme() -> impl Strategy<Value = Scheme> {
        let range = prop_oneof![Just(1.0f32), Just(0.85), 0.01f32..1.0];
        let meta = prop_oneof![Just(Meta::F16), Just(Meta::F32)];
        let base = (
            prop::sample::select(Quantizer::ALL),
            1u32..=8,
            flush(),
            prop::option::of(1usize..200),
            range,
            meta,
            any::<bool>(),
        )
            .prop_map(|(quantizer, bits, flush, c, range, meta, center)| BaseScheme {
                quantizer,
                bits,
                flush,
                channels: c.filter(|_| quantizer != Quantizer::Kivi),
                range: if quantizer == Quantizer::Rotated { 1.0 } else { range },
                center,
                meta: if quantizer == Quantizer::Grid { Meta::F16 } else { meta },
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
        let policy = prop_oneof![(Just(Policy::Token), 1u32..=8), (prop::sample::select(&Policy::ALL[1..]), 2u32..=7),];
        let value = (policy, prop::option::of(1usize..200), prop::option::of(1usize..100), token.clone(), token)
            .prop_map(|((policy, bits), channels, group, residual, sinks)| ValueScheme {
                policy,
                bits,
                channels,
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
        ] {
            assert_eq!(text.parse::<Scheme>().unwrap().to_string(), text);
        }
        assert_eq!("kivi-2".parse::<Scheme>().unwrap().to_string(), "kivi-2(g=32,r=32)");
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
            ("kivi-2(c=4)", "option 'c' of 'kivi-2' is not known; known are g, r, sinks, range, center, meta"),
            ("grid-2(meta=f32)", "option 'meta' of 'grid-2' is not known; known are g, r, sinks, c, range, center"),
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
            ("kiwi-2", "known are kivi, token, grid, rotated"),
            ("kivi-2+pca(rank=4,bits=4)", "known are query-pca, query-pca-centered"),
            ("kivi-2+query-pca(bits=4)", "does not give rank="),
            ("kivi-2+query-pca(rank=4)", "does not give bits="),
            ("kivi-2+query-pca(rank=0,bits=4)", "rank: expected"),
            ("kivi-2+query-pca(rank=4,bits=1)", "bits: expected a whole number from 2 to 8"),
            ("kivi-2+query-pca(rank=4,bits=4,sign=2)", "known are 1, -1"),
            ("kivi-2/kivi-2", "value policy 'kivi' is not known; known are dense, token, a2, mse, random, recency"),
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
    }
}
