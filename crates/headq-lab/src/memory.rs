//! What a run will need, said before it starts.

use headq::device::Precision;
use headq_models::ModelConfig;

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
        let tile = t.min(128);
        let logits = 2 * tile * config.vocab_size as u64;
        // Scores of a tile exist as scores, biased scores, probabilities and their copies on the host.
        let scores = 6 * config.num_heads as u64 * tile * t;
        let widths =
            4 * config.hidden_size + 3 * config.intermediate_size + 6 * (config.query_width() + 2 * config.kv_width());
        let floats = logits + scores + t * widths as u64;
        Self { weights: precision.bytes() * parameters, activations: 4 * workers as u64 * floats }
    }

    /// The same for passes back as well (`headq calibrate --gradients`): what every layer was given, and one layer at a time with all that
    /// its gradients need.
    pub fn with_gradients(self, config: &ModelConfig, context: usize, workers: usize) -> Self {
        let (t, tile) = (context as u64, (context as u64).min(128));
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

/// Memory of this machine that is free for use, in bytes; `None` where the system does not say.
pub fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}
