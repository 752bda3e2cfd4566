//! The packed cache: what a scheme stores, really stored.
//!
//! Codes lie in bits, scales and zeros in halves, the newest tokens and the sinks dense, all in pages, so that appending never moves
//! what is there. One token's attention reads the codes as they are ([`DecodeAttention`]), also on devices of CubeCL (`wgpu`, `cuda`) as
//! far as `cube` covers the scheme; calls with more new tokens, and everything else, go through tensors made from the same pages
//! ([`Attention`]). All read exactly what the teacher-forced evaluation reads.
//!
//! | module | what |
//! |---|---|
//! | `lanes`, `rows` | codes in bits: for vector loops over sixteen lanes; code by code |
//! | `paged`, `reals` | records in pages; real numbers in them |
//! | `stream` | dense sinks, codes, dense window: which token is where (E10) |
//! | `keys`, `values` | coded keys and side codes in blocks of 16 tokens; coded values token by token |
//! | `simd`, `kernels` | sixteen lanes on any instruction set; vector loops |
//! | `layer` | one layer's cache and attention |
//! | `cube` | one token's attention on a device, over codes that are packed there too |
//! | `file` | saved caches |

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod file;
mod kernels;
mod keys;
mod lanes;
mod layer;
mod paged;
mod prefetch;
mod reals;
mod rows;
mod simd;
mod stream;
mod values;
#[cfg(target_arch = "x86_64")]
mod words;

use burn::tensor::{Tensor, TensorData};

use self::layer::{PackedLayer, Scratch};
use crate::Error;
use crate::attention::LayerState;
use crate::budget::HeadShape;
use crate::codec::HeadqAttention;
use crate::seam::{Attention, AttentionSite, DecodeAttention};

pub use self::reals::DenseType;
pub use self::rows::{pack, unpack};

/// A whole model's packed cache under one scheme, for one sequence.
#[derive(Debug)]
pub struct PackedCache {
    layers: Vec<PackedLayer>,
    shape: HeadShape,
    dense: DenseType,
    scratch: Scratch,
}

impl PackedCache {
    /// An empty cache: one codec for each layer, as [`crate::QuantizedCache::of`] takes them.
    ///
    /// # Errors
    /// [`Error::Fit`] where the scheme does not fit the heads, or the number of layers differs.
    pub fn new(layers: Vec<HeadqAttention>, shape: HeadShape, dense: DenseType) -> Result<Self, Error> {
        Self::with_rewind(layers, shape, dense, 0)
    }

    /// The same, with dense copies of coded tokens kept for as long as they can be among the dense ones of a cache `rewind` tokens
    /// shorter: [`PackedCache::truncate`] by up to that many tokens is then always possible.
    ///
    /// # Errors
    /// As [`PackedCache::new`].
    pub fn with_rewind(
        layers: Vec<HeadqAttention>,
        shape: HeadShape,
        dense: DenseType,
        rewind: usize,
    ) -> Result<Self, Error> {
        if let Some(first) = layers.first() {
            first.scheme().check(shape.head_dim)?;
            if layers.len() != shape.layers {
                let reason = format!("{} codecs for a model of {} layers", layers.len(), shape.layers);
                return Err(Error::Fit { scheme: first.scheme().to_string(), reason });
            }
        }
        let layers = layers.into_iter().map(|module| PackedLayer::new(module, shape, dense, rewind)).collect();
        Ok(Self { layers, shape, dense, scratch: Scratch::default() })
    }

    /// Tokens that every layer has.
    pub fn len(&self) -> usize {
        self.layers.iter().map(PackedLayer::len).min().unwrap_or(0)
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that the pages of all layers hold, what is not filled yet included.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(PackedLayer::bytes).sum()
    }

    /// Bytes that copies of codes and of dense tokens hold on a device, room that is not filled yet included: 0 where attention reads
    /// the host's pages or goes through tensors.
    pub fn device_bytes(&self) -> usize {
        self.layers.iter().map(PackedLayer::device_bytes).sum()
    }

    /// The shape of the model's attention.
    pub fn shape(&self) -> HeadShape {
        self.shape
    }

    /// How dense tokens are held.
    pub fn dense_type(&self) -> DenseType {
        self.dense
    }

    /// The shortest length that [`PackedCache::truncate`] can go back to: tokens that a shorter cache would hold dense must still be.
    pub fn shortest(&self) -> usize {
        self.layers.iter().map(PackedLayer::shortest).max().unwrap_or(0)
    }

    /// Goes back to the first `len` tokens, as if the others had never come.
    ///
    /// # Errors
    /// [`Error::Truncate`] below [`PackedCache::shortest`], but for 0, which always works.
    pub fn truncate(&mut self, len: usize) -> Result<(), Error> {
        if len == 0 {
            self.clear();
            return Ok(());
        }
        let shortest = self.shortest();
        if len < shortest && len < self.len() {
            return Err(Error::Truncate { len, shortest });
        }
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        Ok(())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        for layer in &mut self.layers {
            *layer = PackedLayer::new(layer.module().clone(), self.shape, self.dense, layer.rewind);
        }
    }

    /// Appends keys and values of one layer without attending any query: synthetic contexts, prompts computed elsewhere.
    ///
    /// # Shapes
    /// `keys` (post-RoPE), `values`: `[1, kv_heads, tokens, head_dim]`
    ///
    /// Under the value policy `a2` these tokens count as read by no query.
    pub fn extend(&mut self, layer: usize, keys: Tensor<4>, values: Tensor<4>) {
        self.layers[layer].extend(keys, values, None);
    }
}

impl Attention for PackedCache {
    /// # Panics
    /// If the batch is not 1, or `site.start` is not the number of tokens in the layer.
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let layer = &mut self.layers[site.layer];
        assert_eq!(q.dims()[0], 1, "a packed cache holds one sequence");
        assert_eq!(site.start, layer.len(), "new tokens follow those in the cache");
        if k.dims()[2] == 1 && crate::kernels::on_host(&k) && crate::kernels::on_host(&q) {
            let shape = q.shape();
            let host = |x: Tensor<4>| x.into_data_as::<f32>().try_to_vec::<f32>().expect("converted to f32");
            let (device, q) = (q.device(), host(q));
            let mut out = vec![0.0; q.len()];
            layer.attend_one(site, &q, &host(k), &host(v), &mut out, &mut self.scratch);
            return Tensor::from_data(TensorData::new(out, shape), &device);
        }
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        if k.dims()[2] == 1
            && let Some(out) = layer.attend_on_device(site, &q, &k, &v)
        {
            return out;
        }
        let mut state = match layer.len() {
            0 => LayerState::rounding(self.dense),
            _ => layer.to_state(&q.device()),
        };
        let out = layer.module().forward(&mut state, site, q, k.clone(), v.clone());
        layer.extend(k, v, state.all_masses());
        out
    }
}

impl DecodeAttention for PackedCache {
    fn attend_one(&mut self, site: &AttentionSite, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
        let layer = &mut self.layers[site.layer];
        assert_eq!(site.start, layer.len(), "a new token follows those in the cache");
        layer.attend_one(site, q, k, v, out, &mut self.scratch);
    }
}
