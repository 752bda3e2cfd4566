//! What identifies a model: artifacts carry it, and refuse to be used with another.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::source::{TensorSource, hex};

/// Identity of a model: architecture, sizes, and hashes of its configuration and its weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// `model_type`.
    pub architecture: String,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// SHA-256 of the parsed configuration: the same for every way of writing it.
    pub config_sha256: String,
    /// SHA-256 of the stored weights: the same for one file and for shards, another for another precision.
    pub weights_sha256: String,
}

impl Fingerprint {
    /// Reads and hashes all weights, on all cores.
    pub fn new(config: &ModelConfig, source: &dyn TensorSource) -> Self {
        Self {
            architecture: config.architecture.name.into(),
            layers: config.num_layers,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            hidden: config.hidden_size,
            vocab: config.vocab_size,
            config_sha256: config_sha256(config),
            weights_sha256: source.sha256(),
        }
    }
}

/// Hash of the canonical JSON of a parsed configuration.
fn config_sha256(config: &ModelConfig) -> String {
    let json = serde_json::to_vec(config).expect("a config has only strings, finite numbers and lists");
    hex(&Sha256::digest(&json))
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |hash: &str| hash.get(..12).unwrap_or(hash).to_owned();
        write!(
            f,
            "{}, {} layers, {}/{} heads of {}, hidden {}, vocabulary {}, config {}, weights {}",
            self.architecture,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.hidden,
            self.vocab,
            short(&self.config_sha256),
            short(&self.weights_sha256)
        )
    }
}
