//! What a scheme stores, in bits and bytes, all in.
//!
//! *Code bits* are bits per coded element: codes, scales, zeros, side codes and maps. *Cache bits* are the mean bits per element of
//! everything a cache holds at a context, dense window, half-filled group and sinks included at 16 bits each. *Bytes per token*
//! are cache bits times the elements that one token has in the whole model. A sliding window bounds what is read, not what is held:
//! caches here keep all tokens, and are accounted so.

use serde::{Deserialize, Serialize};

use crate::quant::{Axis, BaseQuantizer, value_stored_bits};
use crate::scheme::{BaseScheme, Flush, KeyScheme, Pool, Quantizer, RangeSource, Scheme, Scope, ValueScheme};
use crate::stats::KeyStatistics;
use crate::transform;

/// Bits of a dense element: caches of full precision hold half floats.
pub const DENSE_BITS: f64 = 16.0;

/// The shape of a model's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadShape {
    /// Layers.
    pub layers: usize,
    /// Query heads per layer.
    pub heads: usize,
    /// KV heads per layer.
    pub kv_heads: usize,
    /// Head width.
    pub head_dim: usize,
}

impl HeadShape {
    /// Key and value elements of one token in the whole model.
    fn elements(&self) -> f64 {
        (2 * self.layers * self.kv_heads * self.head_dim) as f64
    }
}

/// Stored size of a scheme at a context.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Code bits per coded key element; 16 for dense keys.
    pub key_bits: f64,
    /// Code bits per coded value element; 16 for dense values.
    pub value_bits: f64,
    /// Mean bits per key and value element of all that the cache holds, averaged over the evaluated query positions.
    pub cache_bits: f64,
    /// Bytes per cached token, all layers, keys and values, averaged in the same way.
    pub bytes_per_token: f64,
}

/// Whether what a scheme stores depends on calibration: `klt` keeps scales of some coefficients alone, and may leave bits that no
/// coefficient can be given.
pub fn depends_on_calibration(scheme: &Scheme) -> bool {
    let depends = |base: &BaseScheme| {
        base.quantizer == Quantizer::Klt && (base.ranges != RangeSource::Static || base.pool != Pool::Head)
    };
    let value = scheme.value.and_then(|v| v.as_keys(scheme.key.as_ref()));
    scheme.key.is_some_and(|k| depends(&k.base)) || value.is_some_and(|base| depends(&base))
}

/// Code bits per coded value element, likewise.
fn value_code_bits(scheme: &Scheme, value: &ValueScheme, keys: Option<&KeyStatistics>, shape: &HeadShape) -> f64 {
    match value.as_keys(scheme.key.as_ref()) {
        None => value_stored_bits(value, shape.head_dim),
        Some(base) => base_code_bits(&base, keys.and_then(|keys| keys.values.as_deref()), shape),
    }
}

/// Code bits per coded element of a base quantizer, of keys or of values.
fn base_code_bits(base: &BaseScheme, rows: Option<&KeyStatistics>, shape: &HeadShape) -> f64 {
    match rows {
        Some(rows) if base.quantizer == Quantizer::Klt => transform::code_bits(base, rows),
        _ => BaseQuantizer::stored_bits(base, shape.head_dim),
    }
}

/// Code bits per coded key element; where they depend on calibration and `keys` is `None`, the most that they can be.
pub fn key_code_bits(key: &KeyScheme, keys: Option<&KeyStatistics>, shape: &HeadShape) -> f64 {
    let base = base_code_bits(&key.base, keys, shape);
    let side = key.side.map_or(0.0, |side| {
        let copies = match side.scope {
            Scope::KvHead => 1.0,
            Scope::QueryHead => (shape.heads / shape.kv_heads) as f64,
        };
        let code =
            f64::from(side.bits) + Axis::of_side(&side, key.base.flush.group).meta_bits(side.rank, key.base.meta);
        copies * side.rank as f64 * code / shape.head_dim as f64
    });
    base + side
}

/// Mean bits per element over the contexts `1..=context` of tokens of which some are coded.
fn mean_bits(code_bits: f64, flush: Option<Flush>, context: usize) -> f64 {
    let Some(flush) = flush else { return DENSE_BITS };
    let at = |t: usize| {
        let coded = flush.flushed(t) as f64 / (t + 1) as f64;
        coded * code_bits + (1.0 - coded) * DENSE_BITS
    };
    (0..context).map(at).sum::<f64>() / context as f64
}

impl Budget {
    /// The budget of `scheme` in windows of `context` tokens, of which all but the last are evaluated query positions; an upper bound
    /// where it [depends on calibration](depends_on_calibration).
    pub fn of(scheme: &Scheme, shape: &HeadShape, context: usize) -> Self {
        Self::calibrated(scheme, None, shape, context)
    }

    /// The same with the statistics that the scheme is used with.
    pub fn calibrated(scheme: &Scheme, keys: Option<&KeyStatistics>, shape: &HeadShape, context: usize) -> Self {
        let key_bits = scheme.key.as_ref().map_or(DENSE_BITS, |k| key_code_bits(k, keys, shape));
        let value_bits = scheme.value.as_ref().map_or(DENSE_BITS, |v| value_code_bits(scheme, v, keys, shape));
        let positions = context.saturating_sub(1).max(1);
        let keys = mean_bits(key_bits, scheme.key.map(|k| k.base.flush), positions);
        let values = mean_bits(value_bits, scheme.value.map(|v| v.flush(scheme.key.as_ref())), positions);
        let cache_bits = (keys + values) / 2.0;
        Self { key_bits, value_bits, cache_bits, bytes_per_token: cache_bits * shape.elements() / 8.0 }
    }
}

impl Budget {
    /// The budget of a cache that holds exactly `tokens` tokens; an upper bound where [`Budget::of`] is one.
    pub fn at(scheme: &Scheme, shape: &HeadShape, tokens: usize) -> Self {
        Self::calibrated_at(scheme, None, shape, tokens)
    }

    /// The same with the statistics that the scheme is used with.
    pub fn calibrated_at(scheme: &Scheme, keys: Option<&KeyStatistics>, shape: &HeadShape, tokens: usize) -> Self {
        let mean = Self::calibrated(scheme, keys, shape, 2);
        let share =
            |flush: Option<Flush>| flush.map_or(0.0, |f| f.flushed(tokens.max(1) - 1) as f64 / tokens.max(1) as f64);
        let held = |code_bits: f64, share: f64| share * code_bits + (1.0 - share) * DENSE_BITS;
        let keys = held(mean.key_bits, share(scheme.key.map(|k| k.base.flush)));
        let values = held(mean.value_bits, share(scheme.value.map(|v| v.flush(scheme.key.as_ref()))));
        Self {
            cache_bits: (keys + values) / 2.0,
            bytes_per_token: (keys + values) / 2.0 * shape.elements() / 8.0,
            ..mean
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMOLLM2: HeadShape = HeadShape { layers: 30, heads: 9, kv_heads: 3, head_dim: 64 };

    fn budget(scheme: &str, context: usize) -> Budget {
        Budget::of(&scheme.parse().unwrap(), &SMOLLM2, context)
    }

    #[test]
    fn code_bits_count_scales_zeros_and_side_codes() {
        for (scheme, bits) in [
            ("kivi-2(g=32)", 3.0),
            ("kivi-2(g=128)", 2.25),
            ("kivi-2(g=32,meta=f32)", 4.0),
            ("token-8(c=32)", 9.0),
            ("token-4", 4.5),
            ("kivi-2(g=32)+query-pca(rank=4,bits=4)", 3.3125),
            ("kivi-2(g=32)+query-pca(rank=4,bits=4,scales=token)", 3.0 + (16.0 + 32.0) / 64.0),
            ("kivi-2(g=32)+query-pca(rank=4,bits=4,scope=query-head)", 3.0 + 3.0 * 0.3125),
        ] {
            assert!((budget(scheme, 512).key_bits - bits).abs() < 1e-12, "{scheme}");
        }
        assert_eq!(budget("dense/token-2(c=32)", 512).value_bits, 3.0);
        assert_eq!(budget("dense/channel-2(g=128)", 512).value_bits, 2.25);
        assert_eq!(budget("dense/klt-2(ranges=static,metric=output)", 512).value_bits, 2.0);
        // Static scales and means are part of the model; a rotated token has one scale for c channels, and no zero.
        for (scheme, bits) in [("grid-3(c=1,center)", 3.0), ("rotated-2", 2.25), ("rotated-2(c=16)", 3.0)] {
            assert_eq!(budget(scheme, 512).key_bits, bits, "{scheme}");
        }
        // One bit in the map for the 64 elements of each token and head.
        for policy in ["a2", "mse", "random", "recency"] {
            assert_eq!(budget(&format!("dense/{policy}-2(c=32)"), 512).value_bits, 3.0 + 1.0 / 64.0, "{policy}");
        }
        assert_eq!(budget("dense", 512).cache_bits, 16.0);
        assert_eq!(budget("dense", 512).bytes_per_token, 23040.0);
    }

    #[test]
    fn cache_bits_count_everything_that_is_held() {
        // Position by position, from the definition: 2 sinks and 1 to 4 newest tokens dense, groups of 3 in codes of 2 + 32/3 bits.
        let code = 2.0 + 32.0 / 3.0;
        let coded = [0, 0, 0, 0, 0, 3, 3, 3, 6];
        let keys: f64 = coded
            .iter()
            .enumerate()
            .map(|(t, &n)| (n as f64 * code + (t + 1 - n) as f64 * 16.0) / (t + 1) as f64)
            .sum();
        let found = budget("kivi-2(g=3,r=1,sinks=2)", 10).cache_bits;
        assert!((found - (keys / 9.0 + 16.0) / 2.0).abs() < 1e-12);
        // At one context: 6 of 9 tokens are coded.
        let held = Budget::at(&"kivi-2(g=3,r=1,sinks=2)".parse().unwrap(), &SMOLLM2, 9);
        assert!((held.cache_bits - ((6.0 * code + 3.0 * 16.0) / 9.0 + 16.0) / 2.0).abs() < 1e-12);
        assert!((held.bytes_per_token - held.cache_bits * 11520.0 / 8.0).abs() < 1e-9);
        // Values follow the key's window unless they say otherwise.
        let both = budget("kivi-2(g=3,r=1,sinks=2)/token-2(c=3)", 10).cache_bits;
        assert!((both - keys / 9.0).abs() < 1e-9);
    }
}
