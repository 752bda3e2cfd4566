//! Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections, and a sliding window in some layers.

use serde_json::{Map, Value};

use super::{Architecture, LLAMA_NAMES};
use crate::config::{Biases, Defaults, Fields, ModelConfig, gated_decoder, write_gated_decoder};
use crate::error::ModelError;

pub(super) static QWEN2: Architecture =
    Architecture { name: "qwen2", class: "Qwen2ForCausalLM", parse, write, names: LLAMA_NAMES };

fn parse(f: &Fields) -> Result<ModelConfig, ModelError> {
    let defaults = Defaults { kv_heads: Some(32), max_positions: 32768, bos: None, eos: None };
    let config = gated_decoder(f, &QWEN2, &defaults)?;
    let windows = windows(f, config.num_layers)?;
    Ok(ModelConfig { windows, biases: Biases { qkv: true, out: false, mlp: false }, ..config })
}

/// A window counts only with `use_sliding_window`; then in the layers that `layer_types` names, else from
/// `max_window_layers` on.
fn windows(f: &Fields, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let window = match f.optional_size("sliding_window")? {
        None if !f.object.contains_key("sliding_window") => Some(4096),
        window => window,
    };
    let used = f.flag("use_sliding_window")?.unwrap_or(false);
    let Some(window) = window.filter(|_| used) else {
        return Ok(vec![None; layers]);
    };
    let expected = format!("a list of {layers} times \"full_attention\" or \"sliding_attention\"");
    match f.get("layer_types") {
        None => {
            // Zero is meaningful here, so this is not a size.
            let first = f.number("max_window_layers")?.unwrap_or(28.0);
            Ok((0..layers).map(|i| (i as f64 >= first).then_some(window)).collect())
        }
        Some(Value::Array(types)) if types.len() == layers => types
            .iter()
            .map(|kind| match kind.as_str() {
                Some("full_attention") => Ok(None),
                Some("sliding_attention") => Ok(Some(window)),
                _ => Err(f.wrong("layer_types", &expected, kind)),
            })
            .collect(),
        Some(other) => Err(f.wrong("layer_types", &expected, other)),
    }
}

fn write(c: &ModelConfig, out: &mut Map<String, Value>) -> Result<(), ModelError> {
    write_gated_decoder(c, out)?;
    let window = c.windows.iter().copied().flatten().next();
    let kind = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
    out.insert("use_sliding_window".into(), window.is_some().into());
    out.insert("sliding_window".into(), window.into());
    out.insert("max_window_layers".into(), c.windows.iter().take_while(|w| w.is_none()).count().into());
    out.insert("layer_types".into(), c.windows.iter().map(kind).collect::<Vec<_>>().into());
    Ok(())
}
