//! The known architectures, as data: how each writes its config and names its tensors.
//!
//! One decoder ([`crate::LanguageModel`]) runs them all. Adding an architecture that fits it takes one file here and one
//! line in [`ARCHITECTURES`].

mod gpt2;
mod gpt_neox;
mod llama;
mod mistral;
mod qwen2;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::config::{Fields, ModelConfig};
use crate::error::ModelError;

/// All architectures, by the `model_type` of their configs.
pub static ARCHITECTURES: &[&Architecture] =
    &[&gpt2::GPT2, &gpt_neox::GPT_NEOX, &llama::LLAMA, &mistral::MISTRAL, &qwen2::QWEN2];

/// A family of models: its config keys and its tensor names.
pub struct Architecture {
    /// `model_type` in the config.
    pub name: &'static str,
    /// The class in transformers.
    pub class: &'static str,
    pub(crate) parse: fn(&Fields) -> Result<ModelConfig, ModelError>,
    pub(crate) write: fn(&ModelConfig, &mut Map<String, Value>) -> Result<(), ModelError>,
    pub(crate) names: TensorNames,
}

impl Architecture {
    /// The architecture of that `model_type`, if known.
    pub fn by_name(name: &str) -> Option<&'static Self> {
        ARCHITECTURES.iter().copied().find(|a| a.name == name)
    }

    /// The known names, for messages.
    pub fn known() -> String {
        ARCHITECTURES.iter().map(|a| a.name).collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn from_config(f: &Fields) -> Result<&'static Self, ModelError> {
        let found = f.text("model_type")?;
        found.and_then(Self::by_name).ok_or_else(|| ModelError::UnknownArchitecture {
            file: f.source("model_type").into(),
            key: "model_type".into(),
            found: found.map_or("(no such key)".into(), |name| format!("{name:?}")),
            known: Self::known(),
        })
    }
}

impl std::fmt::Debug for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Serialize for Architecture {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

/// Tensor names as transformers writes them.
pub(crate) struct TensorNames {
    /// Before all names but the head's; absent in checkpoints of the base model.
    pub prefix: &'static str,
    pub embedding: &'static str,
    /// Learned positions.
    pub positions: Option<&'static str>,
    /// Before a layer's index.
    pub layers: &'static str,
    pub attention_norm: &'static str,
    pub qkv: QkvNames,
    pub attention_out: &'static str,
    pub mlp_norm: &'static str,
    /// One name, or gate and up.
    pub mlp_in: &'static [&'static str],
    pub mlp_out: &'static str,
    pub final_norm: &'static str,
    pub head: &'static str,
    /// Weights are stored [in, out] (GPT-2's Conv1D) rather than [out, in].
    pub input_major: bool,
}

/// How query, key and value projections are stored.
pub(crate) enum QkvNames {
    /// Three tensors.
    Separate([&'static str; 3]),
    /// One tensor: all queries, all keys, all values.
    Fused(&'static str),
    /// One tensor, head by head: its query, its key, its value.
    PerHead(&'static str),
}

/// Endings of tensors that are buffers, not weights.
pub(crate) const BUFFERS: &[&str] = &[
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
    "rope_freqs.weight",
];

/// Llama's names, which Qwen2 and Mistral share.
pub(crate) const LLAMA_NAMES: TensorNames = TensorNames {
    prefix: "model.",
    embedding: "embed_tokens.weight",
    positions: None,
    layers: "layers.",
    attention_norm: "input_layernorm",
    qkv: QkvNames::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    attention_out: "self_attn.o_proj",
    mlp_norm: "post_attention_layernorm",
    mlp_in: &["mlp.gate_proj", "mlp.up_proj"],
    mlp_out: "mlp.down_proj",
    final_norm: "norm",
    head: "lm_head.weight",
    input_major: false,
};
