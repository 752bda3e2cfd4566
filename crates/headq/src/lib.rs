//! HeadQ: KV-cache quantization measured, and corrected, where the model sees it.
//!
//! A key is only ever read through a score. This crate quantizes keys and values, keeps a low-rank side code of each key's residual
//! e = k − k̂ in a basis learned from queries, and adds it back to the *scores*:
//!
//! ```text
//! ŝ_tj = q_t·k̂_j/√d + (q_t U)·ẑ_j/√d,   ẑ_j = Q_s(Wᵀ e_j)          (E9; see codec::coded_scores)
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`scheme`] | the written form of a scheme; everything that decides its codes |
//! | [`quant`] | base, side and value quantizers |
//! | [`gaussian`], [`rotation`] | what static and rotated grids are made of |
//! | [`transform`], [`feedback`] | quantizers matched to the scores: transform coding, rounding that passes errors on |
//! | [`policy`] | which tokens' values get more bits |
//! | [`stats`], [`basis`] | second moments of queries and residuals; bases derived from them |
//! | [`codec`], [`attention`] | one layer's codec and attention as a Burn module; a whole model's cache |
//! | [`packed`] | the packed cache: codes in bits, and one token's attention over them |
//! | [`metrics`] | score, attention, storage and readout errors E1–E8 |
//! | [`correction`], [`learn`] | the trainable correction as a Burn module; losses that train it |
//! | [`device`] | devices by name |
//! | [`budget`] | code bits, cache bits and bytes, all in |
//! | [`kernels`] | vector loops on the host |
//!
//! The equation numbers are those of the project's design notes: E2 Fisher error, E3 attention KL, E4 storage MSE, E5 readout error,
//! E6 its diagonal surrogate, E7 output error, E8 excess perplexity removed, E9 corrected scores, E10 streaming semantics.

#![deny(unsafe_code)]

pub mod attention;
pub mod basis;
pub mod budget;
pub mod codec;
pub mod correction;
pub mod device;
mod error;
pub mod feedback;
pub mod gaussian;
pub mod kernels;
pub mod learn;
pub mod metrics;
pub mod packed;
pub mod policy;
pub mod probe;
pub mod quant;
pub mod rotation;
pub mod scheme;
mod seam;
pub mod stats;
pub mod transform;

pub use attention::{LayerState, QuantizedCache};
pub use basis::Basis;
pub use codec::HeadqAttention;
pub use correction::Correction;
pub use device::DeviceName;
pub use error::Error;
pub use metrics::{Diagnostics, HeadDiagnostics, LayerProbe, QueryReading, QuerySink, ShiftChange};
pub use packed::{DenseType, PackedCache};
pub use scheme::Scheme;
pub use seam::{Attention, AttentionSite, DecodeAttention, DenseAttention, dense_attention, repeat_kv};
pub use stats::{HeadMoments, KeyStatistics, LayerStats, Moments};

/// Standard normal numbers for unit tests.
#[cfg(test)]
pub(crate) fn normal<const D: usize>(
    shape: [usize; D],
    seed: u64,
    device: &burn::tensor::Device,
) -> burn::tensor::Tensor<D> {
    use rand::{RngExt, SeedableRng};
    // Not the device's generator, which all test threads share.
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| rng.sample(rand_distr::StandardNormal)).collect();
    burn::tensor::Tensor::from_data(burn::tensor::TensorData::new(data, shape), device)
}
