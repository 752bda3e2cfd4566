//! GPT-2: learned positions, LayerNorm, one fused projection, weights stored [in, out].

use serde_json::{Map, Value};

use super::{Architecture, QkvNames, TensorNames};
use crate::config::{Activation, Biases, Fields, ModelConfig, NormKind};
use crate::error::ModelError;

pub(super) static GPT2: Architecture = Architecture {
    name: "gpt2",
    class: "GPT2LMHeadModel",
    parse,
    write,
    names: TensorNames {
        prefix: "transformer.",
        embedding: "wte.weight",
        positions: Some("wpe.weight"),
        layers: "h.",
        attention_norm: "ln_1",
        qkv: QkvNames::Fused("attn.c_attn"),
        attention_out: "attn.c_proj",
        mlp_norm: "ln_2",
        mlp_in: &["mlp.c_fc"],
        mlp_out: "mlp.c_proj",
        final_norm: "ln_f",
        head: "lm_head.weight",
        input_major: true,
    },
};

fn parse(f: &Fields) -> Result<ModelConfig, ModelError> {
    if f.flag("add_cross_attention")?.unwrap_or(false) {
        return Err(f.unsupported("`add_cross_attention`", "decoder-only models are"));
    }
    let hidden_size = f.size("n_embd")?;
    let num_layers = f.layers("n_layer")?;
    let num_heads = f.size("n_head")?;
    let head_dim = f.head_dim("n_head", hidden_size, num_heads)?;
    let scaled = f.flag("scale_attn_weights")?.unwrap_or(true);
    let by_layer = f.flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false);
    let scale = |layer: usize| {
        let base = if scaled { 1.0 / (head_dim as f64).sqrt() } else { 1.0 };
        if by_layer { base / (layer + 1) as f64 } else { base }
    };
    Ok(ModelConfig {
        architecture: &GPT2,
        vocab_size: f.size("vocab_size")?,
        hidden_size,
        intermediate_size: f.optional_size("n_inner")?.unwrap_or(4 * hidden_size),
        num_layers,
        num_heads,
        num_kv_heads: num_heads,
        head_dim,
        max_position_embeddings: f.optional_size("n_positions")?.unwrap_or(1024),
        norm: NormKind::Layer,
        norm_eps: f.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        activation: f.activation("activation_function", Activation::GeluTanh)?,
        gated_mlp: false,
        rope: None,
        windows: vec![None; num_layers],
        scales: (0..num_layers).map(scale).collect(),
        tie_word_embeddings: f.flag("tie_word_embeddings")?.unwrap_or(true),
        biases: Biases { qkv: true, out: true, mlp: true },
        parallel_residual: false,
        bos_token_id: f.token_id("bos_token_id", Some(50256))?,
        eos_token_ids: f.token_ids("eos_token_id", Some(50256))?,
    })
}

fn write(c: &ModelConfig, out: &mut Map<String, Value>) -> Result<(), ModelError> {
    let unit = 1.0 / (c.head_dim as f64).sqrt();
    out.insert("vocab_size".into(), c.vocab_size.into());
    out.insert("n_embd".into(), c.hidden_size.into());
    out.insert("n_inner".into(), c.intermediate_size.into());
    out.insert("n_layer".into(), c.num_layers.into());
    out.insert("n_head".into(), c.num_heads.into());
    out.insert("n_positions".into(), c.max_position_embeddings.into());
    out.insert("layer_norm_epsilon".into(), c.norm_eps.into());
    out.insert("activation_function".into(), c.activation.name().into());
    out.insert("scale_attn_weights".into(), (c.head_dim == 1 || c.scales[0] == unit).into());
    let by_layer = c.scales.len() > 1 && c.scales[1] != c.scales[0];
    out.insert("scale_attn_by_inverse_layer_idx".into(), by_layer.into());
    Ok(())
}
