//! The one seam between a language model and this crate: what a layer's attention is given and returns.

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Device, Tensor, TensorData};

/// Where in a model, and at which positions, an attention call stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSite {
    /// Layer index, from 0.
    pub layer: usize,
    /// Position of the first of the new tokens; that many tokens came before them.
    pub start: usize,
    /// Score scale, 1/√head_dim unless the architecture says otherwise.
    pub scale: f64,
    /// Sliding window: a query at position t sees keys j with t − window < j ≤ t. `None` sees all j ≤ t.
    pub window: Option<usize>,
}

/// A replaceable attention. Models call it once per layer with post-RoPE queries and keys.
///
/// Dense attention, capture for calibration, quantized caches and training all implement it.
pub trait Attention {
    /// Attends the new tokens to all tokens up to themselves.
    ///
    /// # Shapes
    /// - `q`: `[batch, heads, new, head_dim]`
    /// - `k`, `v`: `[batch, kv_heads, new, head_dim]`, `heads` a multiple of `kv_heads`; query head h reads KV head h / (heads / kv_heads)
    /// - returns `[batch, heads, new, head_dim]`
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4>;
}

/// Attention of one new token on the host, for decode steps that run on slices instead of tensors.
///
/// The same semantics as [`Attention::attend`] with one new token and a batch of one; implementors that are both keep one cache, so that
/// a prompt can go through tensors and the tokens after it through slices.
pub trait DecodeAttention {
    /// Appends one token's key and value, and attends its query to all tokens up to itself.
    ///
    /// # Shapes
    /// - `q`, `out`: `[heads, head_dim]`
    /// - `k`, `v`: `[kv_heads, head_dim]`, `heads` a multiple of `kv_heads`; query head h reads KV head h / (heads / kv_heads)
    fn attend_one(&mut self, site: &AttentionSite, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]);
}

/// Plain softmax attention over f32 keys and values.
///
/// Stateless by default: every call is a whole sequence (`site.start == 0`). With [`DenseAttention::with_past`] it keeps the
/// keys and values of each layer, so that a model can be run token by token.
#[derive(Debug, Default)]
pub struct DenseAttention {
    past: Option<Vec<Option<(Tensor<4>, Tensor<4>)>>>,
}

impl DenseAttention {
    /// Whole sequences, nothing kept between calls.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps the past, for incremental decoding.
    pub fn with_past() -> Self {
        Self { past: Some(Vec::new()) }
    }
}

impl Attention for DenseAttention {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let (k, v) = match &mut self.past {
            None => (k, v),
            Some(past) => {
                if past.len() <= site.layer {
                    past.resize(site.layer + 1, None);
                }
                let (k, v) = match past[site.layer].take() {
                    None => (k, v),
                    Some((pk, pv)) => (Tensor::cat(vec![pk, k], 2), Tensor::cat(vec![pv, v], 2)),
                };
                past[site.layer] = Some((k.clone(), v.clone()));
                (k, v)
            }
        };
        dense_attention(site, q, k, v)
    }
}

/// softmax(q·kᵀ·scale) v with a causal mask and, where the site has one, a sliding window.
///
/// # Shapes
/// - `q`: `[batch, heads, new, head_dim]`; `k`, `v`: `[batch, kv_heads, past + new, head_dim]`
pub fn dense_attention(site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    let [_, heads, new, _] = q.dims();
    let [_, kv_heads, total, _] = k.dims();
    let first = total - new;
    // Flex shares KV heads among a group of query heads; Burn's fallback, on other backends and under autodiff, does not.
    let shared = q.device() == Device::flex() && !q.is_autodiff() && !k.is_autodiff();
    let (k, v) = match shared {
        true => (k, v),
        false => (repeat_kv(k, heads / kv_heads), repeat_kv(v, heads / kv_heads)),
    };
    let windowed = site.window.is_some_and(|w| w < total);
    let square = first == 0;
    let options = AttentionModuleOptions { scale: Some(site.scale), softcap: None, is_causal: square && !windowed };
    let mask =
        (!options.is_causal && (windowed || new > 1)).then(|| hidden_mask(first, new, total, site.window, &q.device()));
    burn::tensor::module::attention(q, k, v, mask, None, options)
}

/// `true` where key j is hidden from the query at position `first + i`: `[1, 1, new, total]`.
pub(crate) fn hidden_mask(
    first: usize,
    new: usize,
    total: usize,
    window: Option<usize>,
    device: &Device,
) -> Tensor<4, Bool> {
    let hidden: Vec<bool> = (first..first + new)
        .flat_map(|t| (0..total).map(move |j| j > t || window.is_some_and(|w| j + w <= t)))
        .collect();
    Tensor::from_data(TensorData::new(hidden, [1, 1, new, total]), device)
}

/// Repeats each KV head for the query heads of its group: `[b, kv, t, d]` → `[b, kv·groups, t, d]`.
pub fn repeat_kv(x: Tensor<4>, groups: usize) -> Tensor<4> {
    if groups == 1 {
        return x;
    }
    let [b, h, t, d] = x.dims();
    x.unsqueeze_dim::<5>(2).expand([b, h, groups, t, d]).reshape([b, h * groups, t, d])
}
