//! The cache that tokens are decoded with.

use std::fmt;
use std::str::FromStr;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use half::f16;
use headq::budget::{Budget, HeadShape};
use headq::{Attention, AttentionSite, DecodeAttention, QuantizedCache, Scheme};
use headq_models::ModelConfig;

use crate::LabError;
use crate::evaluate::{PlannedScheme, head_shape};

/// Type of the keys and values that a cache holds dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheType {
    /// Half precision, as caches are accounted.
    #[default]
    F16,
    /// Single precision.
    F32,
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
        })
    }
}

impl FromStr for CacheType {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        match text {
            "f16" => Ok(Self::F16),
            "f32" => Ok(Self::F32),
            other => Err(LabError::Usage(format!("cache type '{other}': expected f16 or f32"))),
        }
    }
}

/// A whole model's cache under one scheme. Prompts go into it through tensors, and the tokens after them through tensors or slices.
#[derive(Debug)]
pub struct Cache {
    inner: QuantizedCache,
    scheme: Scheme,
    shape: HeadShape,
    dtype: CacheType,
    device: Device,
    len: usize,
}

impl Cache {
    /// An empty cache.
    pub fn new(planned: &PlannedScheme, config: &ModelConfig, dtype: CacheType, device: &Device) -> Self {
        let inner = QuantizedCache::streaming_of(planned.modules(config.num_layers, device));
        Self { inner, scheme: planned.scheme, shape: head_shape(config), dtype, device: device.clone(), len: 0 }
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        (Budget::at(&self.scheme, &self.shape, self.len).bytes_per_token * self.len as f64).round() as u64
    }

    /// Bytes that f16 keys and values of as many tokens take.
    pub fn f16_bytes(&self) -> u64 {
        (2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * 2 * self.len) as u64
    }

    fn stored(&self, x: Tensor<4>) -> Tensor<4> {
        match self.dtype {
            CacheType::F16 => x.cast(FloatDType::F16).cast(FloatDType::F32),
            CacheType::F32 => x,
        }
    }
}

impl Attention for Cache {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        self.len = site.start + k.dims()[2];
        let (k, v) = (self.stored(k), self.stored(v));
        self.inner.attend(site, q, k, v)
    }
}

impl DecodeAttention for Cache {
    fn attend_one(&mut self, site: &AttentionSite, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
        self.len = site.start + 1;
        let d = self.shape.head_dim;
        let tensor = |x: Vec<f32>| {
            let shape = [1, x.len() / d, 1, d];
            Tensor::<4>::from_data(TensorData::new(x, shape), &self.device)
        };
        let stored = |x: &[f32]| match self.dtype {
            CacheType::F16 => x.iter().map(|x| f16::from_f32(*x).to_f32()).collect(),
            CacheType::F32 => x.to_vec(),
        };
        let (q, k, v) = (tensor(q.to_vec()), tensor(stored(k)), tensor(stored(v)));
        let attended = self.inner.attend(site, q, k, v).into_data();
        out.copy_from_slice(attended.as_slice::<f32>().expect("attention is in f32"));
    }
}
