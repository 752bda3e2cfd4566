//! Value policies: which tokens of a group get more bits.
//!
//! Each policy is a weight per token; the half of every group with the larger weights gets one bit more than the mean, the other half
//! one bit less. Of equal weights, the earlier token comes first. To add a policy, give it a name in [`crate::scheme::Policy`] and a
//! weight in `weights`.

use burn::tensor::{Bool, Device, Tensor, TensorData};

use crate::quant::{Stored, store_values_at, value_read_back_at};
use crate::scheme::{Flush, Policy, ValueScheme};

/// Where a block of tokens lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// Layer.
    pub layer: usize,
    /// Position of the block's first token.
    pub start: usize,
}

/// The weight of each token of a block: `[batch, kv_heads, tokens, 1]`; `None` where all tokens get the same bits.
///
/// `masses` are the attention masses that `a2` goes by, of the same shape.
fn weights(value: &ValueScheme, values: &Tensor<4>, masses: Option<Tensor<4>>, place: Place) -> Option<Tensor<4>> {
    let [_, kv_heads, tokens, _] = values.dims();
    let device = values.device();
    match value.policy {
        // Of `channel` and `klt` values are coded as keys are, and never come here.
        Policy::Token | Policy::Channel | Policy::Klt => None,
        Policy::A2 => Some(masses.expect("a cache under a2 keeps attention masses")),
        Policy::Mse => {
            let values = values.clone().detach();
            let error = value_read_back_at(value, value.bits.ceil(), values.clone()) - values;
            Some(error.square().sum_dim(3))
        }
        Policy::Random => {
            Some(per_token(kv_heads, tokens, &device, |head, j| position_hash(place.layer, head, place.start + j)))
        }
        Policy::Recency => Some(per_token(kv_heads, tokens, &device, |_, j| j as f32)),
    }
}

/// `[1, kv_heads, tokens, 1]` from a function of head and token.
fn per_token(kv_heads: usize, tokens: usize, device: &Device, of: impl Fn(usize, usize) -> f32) -> Tensor<4> {
    let data: Vec<f32> = (0..kv_heads * tokens).map(|i| of(i / tokens, i % tokens)).collect();
    Tensor::from_data(TensorData::new(data, [1, kv_heads, tokens, 1]), device)
}

/// A number from 0 to 2²⁴ − 1, exact in f32, that looks random (SplitMix64) and depends on nothing but its arguments.
fn position_hash(layer: usize, head: usize, position: usize) -> f32 {
    (crate::basis::head_seed(position as u64, layer, head) >> 40) as f32
}

/// `true` for the half of each group of `group` tokens with the larger weights.
///
/// # Shapes
/// `[batch, heads, groups · G, 1]`, in and out
pub fn heavy_half(weights: Tensor<4>, group: usize) -> Tensor<4, Bool> {
    let [b, h, n, _] = weights.dims();
    let rows = b * h * n / group;
    let w = weights.detach().reshape([rows, group]);
    let (own, other) = (w.clone().unsqueeze_dim::<3>(2), w.unsqueeze_dim::<3>(1));
    let (own, other) = (own.expand([rows, group, group]), other.expand([rows, group, group]));
    let device = own.device();
    let earlier: Vec<bool> = (0..group * group).map(|at| at % group < at / group).collect();
    let earlier = Tensor::<3, Bool>::from_data(TensorData::new(earlier, [1, group, group]), &device);
    let before =
        other.clone().greater(own.clone()).bool_or(other.equal(own).bool_and(earlier.expand([rows, group, group])));
    let rank = before.float().sum_dim(2);
    rank.lower_elem((group / 2) as f32).reshape([b, h, n, 1])
}

/// Value reconstruction v̂ of whole groups under any policy.
///
/// # Shapes
/// - `values`: `[batch, kv_heads, groups · G, head_dim]`, in and out
/// - `masses`: `[batch, kv_heads, groups · G, 1]`, for `a2`
pub(crate) fn read_back(
    value: &ValueScheme,
    group: usize,
    values: Tensor<4>,
    masses: Option<Tensor<4>>,
    place: Place,
) -> Tensor<4> {
    let Some(weights) = weights(value, &values, masses, place) else {
        return value_read_back_at(value, value.bits.ceil(), values);
    };
    let shape @ [b, h, n, _] = values.dims();
    let heavy = heavy_half(weights.expand([b, h, n, 1]), group).expand(shape);
    let more = value_read_back_at(value, value.bits.ceil() + 1, values.clone());
    value_read_back_at(value, value.bits.ceil() - 1, values).mask_where(heavy, more)
}

/// What is stored of whole groups of values under a policy: what [`read_back`] reads back.
pub(crate) struct StoredValues {
    /// Which tokens have one bit more than the mean, the others having one less: `[batch, kv_heads, tokens, 1]`; `None` where all
    /// have the same, which `light` then is.
    pub heavy: Option<(Tensor<4, Bool>, Stored)>,
    /// Codes of tokens that are not heavy; codes of heavy tokens here mean nothing.
    pub light: Stored,
}

/// As [`read_back`].
pub(crate) fn store(
    value: &ValueScheme,
    group: usize,
    values: Tensor<4>,
    masses: Option<Tensor<4>>,
    place: Place,
) -> StoredValues {
    let Some(weights) = weights(value, &values, masses, place) else {
        return StoredValues { heavy: None, light: store_values_at(value, value.bits.ceil(), values) };
    };
    let [b, h, n, _] = values.dims();
    let heavy = heavy_half(weights.expand([b, h, n, 1]), group);
    let more = store_values_at(value, value.bits.ceil() + 1, values.clone());
    StoredValues { heavy: Some((heavy, more)), light: store_values_at(value, value.bits.ceil() - 1, values) }
}

/// Σ p̂_tj² over the query heads of each KV head, and over the queries that see token j before it is flushed.
///
/// # Shapes
/// - `p`: `[batch, kv_heads, groups · queries, columns]`, probabilities of the queries at `queries` over tokens `first..first + columns`
/// - returns `[batch, kv_heads, tokens.len(), 1]`, for tokens at `tokens`, which end where the columns end
pub(crate) fn attention_mass(
    p: &Tensor<4>,
    flush: &Flush,
    queries: &std::ops::Range<usize>,
    first: usize,
    tokens: &std::ops::Range<usize>,
) -> Tensor<4> {
    let [b, kv, rows, _] = p.dims();
    let m = queries.len();
    let hidden = first.saturating_sub(tokens.start).min(tokens.len());
    let seen = tokens.start + hidden..tokens.end;
    let device = p.device();
    let mut mass = Vec::new();
    if hidden > 0 {
        mass.push(Tensor::zeros([b, kv, hidden, 1], &device));
    }
    if !seen.is_empty() {
        let counts: Vec<f32> =
            queries.clone().flat_map(|t| seen.clone().map(move |j| f32::from(u8::from(t < flush.time(j))))).collect();
        let counts = Tensor::<5>::from_data(TensorData::new(counts, [1, 1, 1, m, seen.len()]), &device);
        let p = p.clone().detach().narrow(3, seen.start - first, seen.len());
        let square = p.square().reshape([b, kv, rows / m, m, seen.len()]) * counts;
        mass.push(square.sum_dim(3).sum_dim(2).reshape([b, kv, seen.len(), 1]));
    }
    Tensor::cat(mass, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heavier_half_of_each_group_is_chosen_and_ties_go_to_the_earlier() {
        let device = Device::flex();
        let w = vec![1.0f32, 4.0, 2.0, 3.0, 5.0, 5.0, 5.0, 5.0, 0.0, 1.0, 0.0, 0.0];
        let heavy = heavy_half(Tensor::from_data(TensorData::new(w, [1, 1, 12, 1]), &device), 4);
        let found: Vec<bool> = heavy.into_data().iter::<bool>().collect();
        assert_eq!(
            found,
            [false, true, false, true, true, true, false, false, true, true, false, false],
            "two of each four"
        );
    }

    #[test]
    fn random_halves_depend_on_layer_head_and_position_only() {
        let chosen = |layer, start| {
            let w = per_token(2, 64, &Device::flex(), |head, j| position_hash(layer, head, start + j));
            heavy_half(w, 32).into_data().iter::<bool>().collect::<Vec<_>>()
        };
        assert_eq!(chosen(0, 32)[..32], chosen(0, 0)[32..64]);
        assert_ne!(chosen(0, 0), chosen(1, 0));
        assert_ne!(chosen(0, 0)[..64], chosen(0, 0)[64..]);
        assert_eq!(chosen(3, 0).iter().filter(|heavy| **heavy).count(), 64);
    }
}
