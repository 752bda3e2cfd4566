//! One layer's codec: base and side codes of whole groups, and what the cache reads them as.

use burn::module::Module;
use burn::tensor::{Bool, Device, Tensor, TensorData};

use crate::basis::Basis;
use crate::correction::Correction;
use crate::policy::{self, Place, StoredValues};
use crate::quant::{BaseParts, BaseQuantizer, Stored};
use crate::scheme::{Flush, Policy, Scheme};
use crate::stats::KeyStatistics;

/// Keys as read from codes: the base reconstruction and the side code, never summed (E9).
#[derive(Debug, Clone)]
pub struct CodedKeys {
    /// k̂: `[batch, kv_heads, tokens, head_dim]`
    pub base: Tensor<4>,
    /// ẑ, times the sign of the correction: `[batch, side_heads, tokens, rank]`
    pub side: Option<Tensor<4>>,
}

/// The HeadQ codec and attention of one layer, as a Burn module: its parameters are those of the correction, and what is learned of the
/// base quantizer.
#[derive(Module, Debug)]
pub struct HeadqAttention {
    /// `None` where the scheme has no side code.
    pub(crate) correction: Option<Correction>,
    /// B_b; `None` where keys are dense.
    pub(crate) base: Option<BaseQuantizer>,
    /// What values are coded by where they are coded as keys are; `None` where they are not.
    pub(crate) values: Option<BaseQuantizer>,
    #[module(skip)]
    pub(crate) scheme: Scheme,
    #[module(skip)]
    pub(crate) layer: usize,
}

impl HeadqAttention {
    /// The module of `layer`, with its basis where the scheme has a side code.
    ///
    /// # Panics
    /// If the scheme has a side code and `basis` is `None` or of another rank: [`crate::Basis::check`] reports that as an error. If
    /// the base quantizer is static: use [`HeadqAttention::calibrated`].
    pub fn new(scheme: Scheme, basis: Option<&Basis>, layer: usize, device: &Device) -> Self {
        Self::calibrated(scheme, basis, None, layer, device)
    }

    /// The same with statistics, which some schemes need ([`Scheme::needs_statistics`]).
    ///
    /// # Panics
    /// As [`HeadqAttention::new`], and if the scheme needs statistics and `keys` is `None` or does not hold what it needs
    /// ([`KeyStatistics::check`]).
    pub fn calibrated(
        scheme: Scheme,
        basis: Option<&Basis>,
        keys: Option<&KeyStatistics>,
        layer: usize,
        device: &Device,
    ) -> Self {
        let base = scheme.key.map(|key| match keys {
            Some(keys) => BaseQuantizer::calibrated(key.base, keys, layer, device),
            None => BaseQuantizer::new(key.base),
        });
        let base = match basis {
            Some(basis) => base.map(|base| basis.clipping(base, layer, device)),
            None => base,
        };
        let correction = scheme.key.filter(|key| key.side.is_some()).map(|key| {
            let basis = basis.expect("a scheme with a side code comes with a basis");
            Correction::new(&key, basis, layer, device)
        });
        let as_keys = scheme.value.and_then(|value| value.as_keys(scheme.key.as_ref()));
        let values = as_keys.map(|base| match base.is_static() {
            false => BaseQuantizer::new(base),
            true => {
                let values =
                    keys.and_then(|keys| keys.values.as_ref()).expect("transformed values come with statistics");
                BaseQuantizer::calibrated(base, values, layer, device)
            }
        });
        Self { correction, base, values, scheme, layer }
    }

    /// The trainable part; `None` without a side code.
    pub fn correction(&self) -> Option<&Correction> {
        self.correction.as_ref()
    }

    /// The same codec with another correction.
    ///
    /// # Panics
    /// If the scheme has no side code.
    pub fn with_correction(self, correction: Correction) -> Self {
        assert!(self.correction.is_some(), "{} has no side code", self.scheme);
        Self { correction: Some(correction), ..self }
    }

    /// The same codec with other learned parts of the base quantizer; those that are `None` stay as they are.
    ///
    /// # Panics
    /// As [`BaseQuantizer::with_parts`].
    pub fn with_base_parts(self, parts: BaseParts) -> Self {
        Self { base: self.base.map(|base| base.with_parts(parts)), ..self }
    }

    /// What is learned of the base quantizer, in the current graph.
    pub fn base_parts(&self) -> BaseParts {
        self.base.as_ref().map(BaseQuantizer::parts).unwrap_or_default()
    }

    /// Numbers that decide what key codes mean, beside the scheme: those of the base quantizer, then ±U.
    pub(crate) fn key_constants(&self) -> Vec<f32> {
        let base = self.base.as_ref().map(BaseQuantizer::constants).unwrap_or_default();
        let decoder = self
            .decoder()
            .map(|u| crate::quant::plain(u).into_data_as::<f32>().try_to_vec::<f32>().expect("converted to f32"));
        base.into_iter().chain(decoder.into_iter().flatten()).collect()
    }

    /// The same of values: those of their transform and their mean.
    pub(crate) fn value_constants(&self) -> Vec<f32> {
        self.values.as_ref().map(BaseQuantizer::constants).unwrap_or_default()
    }

    /// The scheme that this module follows.
    pub fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// U as a tensor of the current graph: `[side_heads, head_dim, rank]`; `None` without a side code.
    pub fn decoder(&self) -> Option<Tensor<3>> {
        self.correction.as_ref().map(Correction::decoder)
    }

    /// When keys are coded; `None` if they are dense.
    pub fn key_flush(&self) -> Option<Flush> {
        self.scheme.key.map(|k| k.base.flush)
    }

    /// When values are coded; `None` if they are dense.
    pub fn value_flush(&self) -> Option<Flush> {
        self.scheme.value.map(|v| v.flush(self.scheme.key.as_ref()))
    }

    /// Keys as the cache holds them: less their calibrated mean under `center`, which no softmax can see.
    ///
    /// # Shapes
    /// `[batch, kv_heads, tokens, head_dim]`, in and out
    pub fn shift_keys(&self, keys: Tensor<4>) -> Tensor<4> {
        match &self.base {
            None => keys,
            Some(base) => base.shift(keys),
        }
    }

    /// Codes whole groups of shifted keys and reads them back.
    ///
    /// # Shapes
    /// - `keys`: `[batch, kv_heads, groups · G, head_dim]`, as [`HeadqAttention::shift_keys`] returns them
    pub fn code_keys(&self, keys: Tensor<4>) -> CodedKeys {
        // Under autodiff the base code passes gradients straight through, so that inside its range e has none.
        let base = self.base.as_ref().expect("coded keys have a base quantizer").read_back(keys.clone());
        let side = self.correction.as_ref().map(|c| c.code(keys - base.clone()));
        CodedKeys { base, side }
    }

    /// What is stored of whole groups of shifted keys, base and side: what [`HeadqAttention::code_keys`] reads back.
    pub(crate) fn store_keys(&self, keys: Tensor<4>) -> (Stored, Option<Stored>) {
        let base = self.base.as_ref().expect("coded keys have a base quantizer");
        let stored = base.store(keys.clone());
        let side = self.correction.as_ref().map(|c| c.store(keys.clone() - base.read_back(keys)));
        (stored, side)
    }

    /// What is stored of whole groups of values that are coded as keys are: what [`HeadqAttention::code_values`] reads back; `None` where
    /// they are not.
    pub(crate) fn store_coefficients(&self, values: Tensor<4>) -> Option<Stored> {
        self.values.as_ref().map(|transform| transform.store(transform.shift(values)))
    }

    /// What is stored of whole groups of values that are coded by tokens: what [`HeadqAttention::code_values`] reads back; `None` where
    /// they are dense.
    pub(crate) fn store_values(
        &self,
        values: Tensor<4>,
        start: usize,
        masses: Option<Tensor<4>>,
    ) -> Option<StoredValues> {
        let (value, flush) = self.scheme.value.as_ref().zip(self.value_flush())?;
        Some(policy::store(value, flush.group, values, masses, Place { layer: self.layer, start }))
    }

    /// Codes whole groups of values and reads them back.
    ///
    /// # Shapes
    /// - `values`: `[batch, kv_heads, groups · G, head_dim]`, in and out; the first token stands at position `start`
    /// - `masses`: `[batch, kv_heads, groups · G, 1]`, the attention mass of each token before its flush, for the policy `a2`
    ///
    /// # Panics
    /// If the policy is `a2` and `masses` is `None`.
    pub fn code_values(&self, values: Tensor<4>, start: usize, masses: Option<Tensor<4>>) -> Tensor<4> {
        if let Some(transform) = &self.values {
            return transform.unshift(transform.read_back(transform.shift(values)));
        }
        match self.scheme.value.as_ref().zip(self.value_flush()) {
            None => values,
            Some((value, flush)) => {
                policy::read_back(value, flush.group, values, masses, Place { layer: self.layer, start })
            }
        }
    }

    /// Whether values are coded by how much they were attended to, so that queries must be read before values are coded.
    pub(crate) fn weighs_values(&self) -> bool {
        self.scheme.value.is_some_and(|v| v.policy == Policy::A2)
    }

    /// U ẑ of coded keys, `[batch, kv_heads, tokens, head_dim]`: for E4 of what base and side code stand for, never for scores.
    /// `None` without a side code or where each query head has one of its own.
    pub(crate) fn decode_side(&self, keys: &CodedKeys) -> Option<Tensor<4>> {
        let (correction, side) = (self.correction.as_ref()?, keys.side.clone()?);
        (keys.base.dims()[1] == side.dims()[1]).then(|| correction.decode(side))
    }

    /// q U, grouped like the side codes that it meets: [`Correction::project_queries`].
    pub(crate) fn project_queries(&self, q: &Tensor<4>) -> Option<Tensor<4>> {
        self.correction.as_ref().map(|c| c.project_queries(q))
    }
}

/// Scores of queries against coded keys: q·k̂ᵀ + (qU)·ẑᵀ (E9); the corrected key is never formed.
///
/// # Shapes
/// - `q`: `[batch, kv_heads, rows, head_dim]`, already scaled; `q_side` as [`HeadqAttention::project_queries`] returns it
/// - returns `[batch, kv_heads, rows, tokens]`
pub(crate) fn coded_scores(q: &Tensor<4>, q_side: Option<&Tensor<4>>, keys: &CodedKeys) -> Tensor<4> {
    let base = q.clone().matmul(keys.base.clone().swap_dims(2, 3));
    match (q_side, &keys.side) {
        (Some(q_side), Some(side)) => {
            let shape = base.dims();
            base + q_side.clone().matmul(side.clone().swap_dims(2, 3)).reshape(shape)
        }
        _ => base,
    }
}

impl CodedKeys {
    pub(crate) fn narrow(&self, start: usize, length: usize) -> Self {
        Self {
            base: self.base.clone().narrow(2, start, length),
            side: self.side.as_ref().map(|s| s.clone().narrow(2, start, length)),
        }
    }

    pub(crate) fn cat(self, newer: Self) -> Self {
        Self {
            base: Tensor::cat(vec![self.base, newer.base], 2),
            side: match (self.side, newer.side) {
                (Some(old), Some(new)) => Some(Tensor::cat(vec![old, new], 2)),
                _ => None,
            },
        }
    }
}

/// `true` where token `first_token + i` is read from codes by the query at position `first_query + t`: `[1, 1, 1, queries, tokens]`.
pub(crate) fn coded_mask(
    flush: &Flush,
    queries: std::ops::Range<usize>,
    tokens: std::ops::Range<usize>,
    device: &Device,
) -> Tensor<5, Bool> {
    let shape = [1, 1, 1, queries.len(), tokens.len()];
    let mut coded = Vec::with_capacity(queries.len() * tokens.len());
    for t in queries {
        let end = flush.sinks + flush.flushed(t);
        coded.extend(tokens.clone().map(|j| j >= flush.sinks && j < end));
    }
    Tensor::from_data(TensorData::new(coded, shape), device)
}
