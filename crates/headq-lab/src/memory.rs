//! What a run will need, said before it starts.

use headq::budget::Budget;
use headq::device::Precision;
use headq::{DenseType, Scheme};
use headq_models::ModelConfig;

use crate::evaluate::head_shape;
use crate::pass::CHUNK;

/// Bytes of memory that a pass over windows will need at most, roughly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// Weights; norms are few and taken as the others.
    pub weights: u64,
    /// Activations, scores and logits of the windows in flight.
    pub activations: u64,
}

impl Estimate {
    /// For `workers` windows of `context` tokens in flight.
    pub fn of(config: &ModelConfig, parameters: u64, precision: Precision, context: usize, workers: usize) -> Self {
        let t = context as u64;
        let tile = t.min(TILE);
        let logits = 2 * tile * config.vocab_size as u64;
        // Scores of a tile exist as scores, biased scores, probabilities and their copies on the host.
        let scores = 6 * config.num_heads as u64 * tile * t;
        let floats = logits + scores + t * widths(config);
        Self { weights: precision.bytes() * parameters, activations: 4 * workers as u64 * floats }
    }

    /// The same for packed passes as well, which go after those of tensors: of each window the cache of one scheme, and activations of as
    /// many tokens as a layer takes at a time.
    pub fn with_caches(
        self,
        config: &ModelConfig,
        schemes: &[Scheme],
        dense: DenseType,
        context: usize,
        workers: usize,
    ) -> Self {
        let t = context as u64;
        let elements = 2 * config.num_layers as u64 * config.kv_width() as u64 * t;
        // What is dense takes half of it in the accounting.
        let wide = if dense == DenseType::F32 { 2.0 } else { 1.0 };
        let bits = |scheme: &Scheme| wide * Budget::at(scheme, &head_shape(config), context).cache_bits;
        let cache = schemes.iter().map(bits).fold(0.0, f64::max) * elements as f64 / 8.0;
        let floats = t.min(CHUNK as u64) * widths(config) + t.min(TILE) * config.vocab_size as u64;
        let packed = workers as u64 * (cache as u64 + 4 * floats);
        Self { activations: self.activations.max(packed), ..self }
    }

    /// The same for passes back as well (`headq calibrate --gradients`): what every layer was given, and one layer at a time with all that
    /// its gradients need.
    pub fn with_gradients(self, config: &ModelConfig, context: usize, workers: usize) -> Self {
        let (t, tile) = (context as u64, (context as u64).min(TILE));
        let inputs = t * (config.num_layers * config.hidden_size) as u64;
        // Scores, probabilities and their gradient.
        let scores = 3 * config.num_heads as u64 * t * t;
        let logits = 3 * tile * config.vocab_size as u64;
        Self { activations: self.activations + 4 * workers as u64 * (inputs + scores + logits), ..self }
    }

    /// Weights and activations together.
    pub fn total(&self) -> u64 {
        self.weights + self.activations
    }
}

/// Tokens whose scores and logits exist at a time, at most.
const TILE: u64 = 128;

/// Activations of a token in a layer.
fn widths(config: &ModelConfig) -> u64 {
    let heads = config.query_width() + 2 * config.kv_width();
    (4 * config.hidden_size + 3 * config.intermediate_size + 6 * heads) as u64
}

/// Memory of this machine that is free for use, in bytes; `None` where the system does not say.
pub fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}
