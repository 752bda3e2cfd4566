//! Llama, TinyLlama, SmolLM: RMSNorm, SwiGLU, grouped-query attention, rotary positions.

use serde_json::{Map, Value};

use super::{Architecture, LLAMA_NAMES};
use crate::config::{Biases, Defaults, Fields, ModelConfig, gated_decoder, write_gated_decoder};
use crate::error::ModelError;

pub(super) static LLAMA: Architecture =
    Architecture { name: "llama", class: "LlamaForCausalLM", parse, write, names: LLAMA_NAMES };

fn parse(f: &Fields) -> Result<ModelConfig, ModelError> {
    let defaults = Defaults { kv_heads: None, max_positions: 2048, bos: Some(1), eos: Some(2) };
    let attention = f.flag("attention_bias")?.unwrap_or(false);
    let mlp = f.flag("mlp_bias")?.unwrap_or(false);
    let biases = Biases { qkv: attention, out: attention, mlp };
    Ok(ModelConfig { biases, ..gated_decoder(f, &LLAMA, &defaults)? })
}

fn write(c: &ModelConfig, out: &mut Map<String, Value>) -> Result<(), ModelError> {
    write_gated_decoder(c, out)?;
    out.insert("attention_bias".into(), c.biases.qkv.into());
    out.insert("mlp_bias".into(), c.biases.mlp.into());
    Ok(())
}
