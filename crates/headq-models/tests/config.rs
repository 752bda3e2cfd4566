//! What configs mean where they are silent, and the window rules.
#![allow(clippy::unwrap_used, missing_docs)]

use headq_models::{Activation, ModelConfig, RopeScaling};
use serde_json::{Value, json};

/// A small config of that type with more keys.
fn parse(model_type: &str, extra: Value) -> Result<ModelConfig, headq_models::ModelError> {
    let mut json = json!({
        "model_type": model_type, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 32, "n_embd": 64, "n_layer": 3, "n_head": 8,
    });
    json.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    ModelConfig::from_json(&json)
}

#[test]
fn absent_keys_get_the_defaults_of_transformers() {
    let llama = parse("llama", json!({})).unwrap();
    assert_eq!((llama.num_kv_heads, llama.head_dim, llama.norm_eps), (32, 2, 1e-6));
    assert_eq!((llama.max_position_embeddings, llama.bos_token_id, llama.eos_token_ids), (2048, Some(1), vec![2]));
    let rope = llama.rope.unwrap();
    assert_eq!((rope.theta, rope.scaling), (10_000.0, RopeScaling::None));
    assert!(!llama.tie_word_embeddings && !llama.biases.qkv && !llama.biases.mlp);

    let gpt2 = parse("gpt2", json!({"n_inner": null})).unwrap();
    assert_eq!((gpt2.intermediate_size, gpt2.max_position_embeddings, gpt2.norm_eps), (256, 1024, 1e-5));
    assert_eq!((gpt2.activation, gpt2.bos_token_id), (Activation::GeluTanh, Some(50256)));
    assert!(gpt2.tie_word_embeddings && gpt2.rope.is_none());

    let neox = parse("gpt_neox", json!({"num_attention_heads": 4})).unwrap();
    assert_eq!((neox.rope.unwrap().rotary_dim, neox.activation), (4, Activation::Gelu));
    assert!(neox.parallel_residual && neox.biases.qkv);

    let mistral = parse("mistral", json!({})).unwrap();
    assert_eq!((mistral.num_kv_heads, mistral.windows), (8, vec![Some(4096); 3]));
    assert_eq!(parse("mistral", json!({"sliding_window": null})).unwrap().windows, [None; 3]);
    assert_eq!(parse("mistral", json!({"num_key_value_heads": null})).unwrap().num_kv_heads, 32);

    let qwen2 = parse("qwen2", json!({})).unwrap();
    assert_eq!((qwen2.windows, qwen2.bos_token_id, qwen2.eos_token_ids), (vec![None; 3], None, vec![]));
    assert!(qwen2.biases.qkv && !qwen2.biases.out);
}

#[test]
fn an_explicit_null_is_no_token() {
    let config = parse("llama", json!({"bos_token_id": null, "eos_token_id": [7, 8]})).unwrap();
    assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![7, 8]));
}

#[test]
fn windows_follow_the_rules_of_qwen2() {
    let windows = |extra| parse("qwen2", extra).unwrap().windows;
    let w = Some(8);
    assert_eq!(windows(json!({"use_sliding_window": false, "sliding_window": 8, "max_window_layers": 0})), [None; 3]);
    assert_eq!(windows(json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1})), [None, w, w]);
    assert_eq!(windows(json!({"use_sliding_window": true, "sliding_window": 8})), [None; 3], "28 by default");
    let types = json!(["sliding_attention", "full_attention", "full_attention"]);
    assert_eq!(
        windows(json!({"use_sliding_window": true, "sliding_window": 8, "layer_types": types})),
        [w, None, None]
    );
    let chunked = json!({"use_sliding_window": true, "sliding_window": 8, "layer_types": ["chunked"]});
    let message = parse("qwen2", chunked).unwrap_err().to_string();
    assert!(message.contains("layer_types") && message.contains("a list of 3"), "{message}");
}

#[test]
fn gpt2_scales_follow_its_flags() {
    let scales = |extra| parse("gpt2", extra).unwrap().scales;
    let unit = 1.0 / 8f64.sqrt();
    assert_eq!(scales(json!({})), [unit; 3]);
    assert_eq!(scales(json!({"scale_attn_weights": false})), [1.0; 3]);
    assert_eq!(scales(json!({"scale_attn_by_inverse_layer_idx": true})), [unit, unit / 2.0, unit / 3.0]);
}

#[test]
fn written_configs_read_back_the_same() {
    for (model_type, extra) in [
        ("llama", json!({"attention_bias": true, "mlp_bias": true, "head_dim": 4, "num_key_value_heads": 4})),
        ("llama", json!({"rope_scaling": {"type": "linear", "factor": 2.5}, "eos_token_id": [3, 4]})),
        ("mistral", json!({"sliding_window": 9, "rope_theta": 5e5})),
        ("qwen2", json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1})),
        ("gpt2", json!({"scale_attn_by_inverse_layer_idx": true, "scale_attn_weights": false, "n_inner": 77})),
        (
            "gpt_neox",
            json!({"num_attention_heads": 4, "rotary_pct": 0.5, "use_parallel_residual": false, "hidden_act": "relu"}),
        ),
    ] {
        let config = parse(model_type, extra).unwrap();
        assert_eq!(ModelConfig::from_json(&config.to_json().unwrap()).unwrap(), config);
    }
}
