//! GGUF metadata as a model configuration.

use serde_json::{Map, Value, json};

use crate::config::{ModelConfig, RopeScaling};
use crate::error::ModelError;
use crate::source::{GgufFile, GgufSource, TensorSource, kv_heads};

/// Translates the metadata into the words of `config.json`, so that one parser checks both.
pub(crate) fn config(source: &GgufSource) -> Result<ModelConfig, ModelError> {
    let header = source.header();
    let name = header.text("general.architecture")?.unwrap_or("");
    let json = Value::Object(translate(header, source, name)?);
    let mut config = ModelConfig::from_json_named(&json, &header.file)?;
    // Llama's `attention_bias` speaks of all four projections; the file says which are there.
    config.biases.out = source.find("model.layers.0.self_attn.o_proj.bias").is_some();
    if let (Some(factors), Some(rope)) = (source.rope_factors()?, config.rope.as_mut()) {
        let pairs = rope.rotary_dim / 2;
        if factors.len() != pairs || !factors.iter().all(|f| f.is_finite() && *f > 0.0) {
            let expected = format!("{pairs} positive factors, one for each pair of rotated channels");
            return Err(header.wrong("rope_freqs.weight", &expected, format!("{} values", factors.len())));
        }
        rope.scaling = RopeScaling::Factors(factors);
    }
    Ok(config)
}

fn translate(header: &GgufFile, source: &GgufSource, name: &str) -> Result<Map<String, Value>, ModelError> {
    let key = |rest: &str| format!("{name}.{rest}");
    let size = |rest: &str| -> Result<usize, ModelError> {
        header.size(&key(rest))?.ok_or_else(|| header.wrong(&key(rest), "a whole number", "nothing"))
    };
    if header.size(&key("expert_count"))?.unwrap_or(0) > 0 {
        return Err(header.unsupported("a mixture of experts", "dense models are"));
    }
    let (hidden, heads) = (size("embedding_length")?, size("attention.head_count")?);
    let head_dim = header.size(&key("attention.key_length"))?;
    if header.size(&key("attention.value_length"))?.is_some_and(|v| head_dim.is_some_and(|k| k != v)) {
        return Err(header.unsupported("values of another width than keys", "one head width is"));
    }
    let embedding = header.shape("token_embd.weight").and_then(|s| s.first().copied());
    let embedding =
        embedding.ok_or_else(|| header.wrong("token_embd.weight", "a matrix with a row per token", "nothing"))?;
    let mut out = Map::new();
    out.insert("model_type".into(), name.into());
    out.insert("vocab_size".into(), embedding.into());
    out.insert("hidden_size".into(), hidden.into());
    out.insert("intermediate_size".into(), size("feed_forward_length")?.into());
    out.insert("num_hidden_layers".into(), size("block_count")?.into());
    out.insert("num_attention_heads".into(), heads.into());
    out.insert(
        "num_key_value_heads".into(),
        kv_heads(header, &key("attention.head_count_kv"))?.unwrap_or(heads).into(),
    );
    out.insert("head_dim".into(), head_dim.into());
    out.insert("max_position_embeddings".into(), size("context_length")?.into());
    out.insert("rms_norm_eps".into(), header.number(&key("attention.layer_norm_rms_epsilon"))?.into());
    out.insert("rope_theta".into(), header.number(&key("rope.freq_base"))?.into());
    out.insert("rope_scaling".into(), scaling(header, &key)?);
    if let Some(rotated) = header.size(&key("rope.dimension_count"))? {
        let width = head_dim.unwrap_or(hidden.checked_div(heads).unwrap_or(0));
        if rotated != width {
            out.insert("partial_rotary_factor".into(), (rotated as f64 / width as f64).into());
        }
    }
    out.insert("attention_bias".into(), source.find("model.layers.0.self_attn.q_proj.bias").is_some().into());
    out.insert("mlp_bias".into(), source.find("model.layers.0.mlp.down_proj.bias").is_some().into());
    out.insert("tie_word_embeddings".into(), source.find("lm_head.weight").is_none().into());
    out.insert("bos_token_id".into(), header.size("tokenizer.ggml.bos_token_id")?.into());
    out.insert("eos_token_id".into(), header.size("tokenizer.ggml.eos_token_id")?.into());
    Ok(out)
}

/// `rope.scaling.*`; llama.cpp takes a factor without a type as linear.
fn scaling(header: &GgufFile, key: &dyn Fn(&str) -> String) -> Result<Value, ModelError> {
    let factor = match header.number(&key("rope.scaling.factor"))? {
        None => header.number(&key("rope.scale_linear"))?,
        factor => factor,
    };
    match (header.text(&key("rope.scaling.type"))?, factor) {
        (Some("none"), _) | (None, None) => Ok(Value::Null),
        (None, Some(factor)) if factor == 0.0 || factor == 1.0 => Ok(Value::Null),
        (Some("linear") | None, factor) => Ok(json!({"rope_type": "linear", "factor": factor})),
        (Some(other), _) => {
            Err(header.unsupported(format!("rope scaling {other:?}"), "none, linear and the factors of Llama 3 are"))
        }
    }
}
