//! GPT-NeoX and Pythia: LayerNorm, partial rotary positions, parallel or sequential residual, a projection fused head by head.

use serde_json::{Map, Value};

use super::{Architecture, QkvNames, TensorNames};
use crate::config::{Activation, Biases, Fields, ModelConfig, NormKind, write_scaling};
use crate::error::ModelError;

pub(super) static GPT_NEOX: Architecture = Architecture {
    name: "gpt_neox",
    class: "GPTNeoXForCausalLM",
    parse,
    write,
    names: TensorNames {
        prefix: "gpt_neox.",
        embedding: "embed_in.weight",
        positions: None,
        layers: "layers.",
        attention_norm: "input_layernorm",
        qkv: QkvNames::PerHead("attention.query_key_value"),
        attention_out: "attention.dense",
        mlp_norm: "post_attention_layernorm",
        mlp_in: &["mlp.dense_h_to_4h"],
        mlp_out: "mlp.dense_4h_to_h",
        final_norm: "final_layer_norm",
        head: "embed_out.weight",
        input_major: false,
    },
};

fn parse(f: &Fields) -> Result<ModelConfig, ModelError> {
    let hidden_size = f.size("hidden_size")?;
    let num_layers = f.layers("num_hidden_layers")?;
    let num_heads = f.size("num_attention_heads")?;
    let head_dim = f.head_dim("num_attention_heads", hidden_size, num_heads)?;
    let bias = f.flag("attention_bias")?.unwrap_or(true);
    Ok(ModelConfig {
        architecture: &GPT_NEOX,
        vocab_size: f.size("vocab_size")?,
        hidden_size,
        intermediate_size: f.size("intermediate_size")?,
        num_layers,
        num_heads,
        num_kv_heads: num_heads,
        head_dim,
        max_position_embeddings: f.optional_size("max_position_embeddings")?.unwrap_or(2048),
        norm: NormKind::Layer,
        norm_eps: f.number("layer_norm_eps")?.unwrap_or(1e-5),
        activation: f.activation("hidden_act", Activation::Gelu)?,
        gated_mlp: false,
        rope: Some(f.rope(head_dim, 0.25)?),
        windows: vec![None; num_layers],
        scales: vec![1.0 / (head_dim as f64).sqrt(); num_layers],
        tie_word_embeddings: f.flag("tie_word_embeddings")?.unwrap_or(false),
        biases: Biases { qkv: bias, out: bias, mlp: true },
        parallel_residual: f.flag("use_parallel_residual")?.unwrap_or(true),
        bos_token_id: f.token_id("bos_token_id", Some(0))?,
        eos_token_ids: f.token_ids("eos_token_id", Some(2))?,
    })
}

fn write(c: &ModelConfig, out: &mut Map<String, Value>) -> Result<(), ModelError> {
    out.insert("vocab_size".into(), c.vocab_size.into());
    out.insert("hidden_size".into(), c.hidden_size.into());
    out.insert("intermediate_size".into(), c.intermediate_size.into());
    out.insert("num_hidden_layers".into(), c.num_layers.into());
    out.insert("num_attention_heads".into(), c.num_heads.into());
    out.insert("max_position_embeddings".into(), c.max_position_embeddings.into());
    out.insert("layer_norm_eps".into(), c.norm_eps.into());
    out.insert("hidden_act".into(), c.activation.name().into());
    out.insert("use_parallel_residual".into(), c.parallel_residual.into());
    out.insert("attention_bias".into(), c.biases.qkv.into());
    if let Some(rope) = &c.rope {
        out.insert("rotary_emb_base".into(), rope.theta.into());
        out.insert("rotary_pct".into(), (rope.rotary_dim as f64 / c.head_dim as f64).into());
        out.insert("rope_scaling".into(), write_scaling(rope)?);
    }
    Ok(())
}
