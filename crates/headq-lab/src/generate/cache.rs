//! The cache that tokens are decoded with.

use burn::tensor::{Device, Tensor};
use headq::{Attention, AttentionSite, DecodeAttention, DenseType, PackedCache};
use headq_models::ModelConfig;

use crate::LabError;
use crate::evaluate::{PlannedScheme, head_shape};

/// A whole model's packed cache under one scheme. Prompts go into it through tensors, and the tokens after them through tensors or
/// slices.
#[derive(Debug)]
pub struct Cache {
    inner: PackedCache,
}

impl Cache {
    /// An empty cache whose dense tokens are held as `dense`.
    ///
    /// # Errors
    /// If the scheme does not fit the model's heads.
    pub fn new(
        planned: &PlannedScheme,
        config: &ModelConfig,
        dense: DenseType,
        device: &Device,
    ) -> Result<Self, LabError> {
        let layers = planned.modules(config.num_layers, device);
        Ok(Self { inner: PackedCache::new(layers, head_shape(config), dense)? })
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// Bytes that its pages hold.
    pub fn bytes(&self) -> u64 {
        self.inner.bytes() as u64
    }

    /// Bytes that f16 keys and values of as many tokens take.
    pub fn f16_bytes(&self) -> u64 {
        let shape = self.inner.shape();
        (2 * shape.layers * shape.kv_heads * shape.head_dim * 2 * self.len()) as u64
    }
}

impl Attention for Cache {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        self.inner.attend(site, q, k, v)
    }
}

impl DecodeAttention for Cache {
    fn attend_one(&mut self, site: &AttentionSite, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
        self.inner.attend_one(site, q, k, v, out);
    }
}
