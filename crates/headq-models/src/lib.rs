//! Decoder-only language models on [Burn], with a replaceable attention.
//!
//! One decoder runs GPT-2, GPT-NeoX (Pythia), Llama, Mistral and Qwen2; what they differ in is data
//! ([`ModelConfig`], [`ARCHITECTURES`]). Attention is a [`headq::Attention`] given with each pass, so that the same model runs
//! densely, captures queries and keys for calibration, reads a quantized cache, or trains.
//!
//! ```no_run
//! use burn::tensor::Device;
//! use headq::DenseAttention;
//! use headq_models::{LoadOptions, load};
//!
//! # fn main() -> Result<(), headq_models::ModelError> {
//! let loaded = load("path/to/model", &Device::flex(), &LoadOptions::default())?;
//! let tokens = loaded.tokenizer()?.encode("The quick brown fox")?;
//! let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[1..]);
//! let hidden = loaded.model.hidden(loaded.model.ids(inputs, 1, 0)?, 0, &mut DenseAttention::new());
//! let nll = loaded.model.token_nll(hidden, targets)?;
//! println!("{:.3} nats per token", nll.iter().sum::<f64>() / nll.len() as f64);
//! # Ok(())
//! # }
//! ```
//!
//! [`Decoder`] runs a model on the host one token at a time, on the same weights, with a [`headq::DecodeAttention`].
//!
//! Models come from Hugging Face folders (safetensors, one file or shards, f32, f16, bf16 or f64), ONNX exports (the weights
//! are found by what the graph does with them) and GGUF files of the Llama and Qwen2 architectures; weights become f32. A
//! [`Fingerprint`] identifies a model by its sizes and by hashes of its configuration and of its weights as imported. Bad input is a one-line [`ModelError`], never a panic.
//!
//! [Burn]: https://burn.dev

mod arch;
mod config;
mod decode;
mod error;
mod fingerprint;
mod gguf_config;
mod load;
mod model;
mod onnx_config;
mod rope;
mod save;
mod source;
#[cfg(test)]
mod tests;
mod tokenizer;
mod weights;

pub use arch::{ARCHITECTURES, Architecture};
pub use config::{Activation, Biases, ModelConfig, NormKind, Rope, RopeScaling};
pub use decode::Decoder;
pub use error::ModelError;
pub use fingerprint::Fingerprint;
pub use load::{Description, LoadOptions, LoadedModel, describe, fingerprint, load, tokenizer};
pub use model::LanguageModel;
pub use source::{GgufSource, OnnxSource, SafetensorsSource, StoredType, TensorInfo, TensorSource};
pub use tokenizer::Tokenizer;
