//! Mistral: Llama with a sliding window in every layer.

use serde_json::{Map, Value};

use super::{Architecture, LLAMA_NAMES};
use crate::config::{Defaults, Fields, ModelConfig, gated_decoder, write_gated_decoder};
use crate::error::ModelError;

pub(super) static MISTRAL: Architecture =
    Architecture { name: "mistral", class: "MistralForCausalLM", parse, write, names: LLAMA_NAMES };

fn parse(f: &Fields) -> Result<ModelConfig, ModelError> {
    let defaults = Defaults { kv_heads: Some(8), max_positions: 4096 * 32, bos: Some(1), eos: Some(2) };
    let config = gated_decoder(f, &MISTRAL, &defaults)?;
    // An absent key means transformers' default; an explicit null means no window.
    let window = match f.optional_size("sliding_window")? {
        None if !f.object.contains_key("sliding_window") => Some(4096),
        window => window,
    };
    Ok(ModelConfig { windows: vec![window; config.num_layers], ..config })
}

fn write(c: &ModelConfig, out: &mut Map<String, Value>) -> Result<(), ModelError> {
    write_gated_decoder(c, out)?;
    out.insert("sliding_window".into(), c.windows.first().copied().flatten().into());
    Ok(())
}
