//! Bad input of every kind: one clear line, never a panic.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::path::Path;

use common::{Copy, fixture, open};
use headq::DenseAttention;
use headq_models::{LoadOptions, describe};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

/// Loading fails with one line that has all of `needles`.
#[track_caller]
fn fails(path: &Path, needles: &[&str]) {
    let message = open(path).unwrap_err().to_string();
    check(&message, needles);
    let described = describe(path, &LoadOptions::default()).unwrap_err().to_string();
    assert_eq!(described, message, "describe sees it too");
}

#[track_caller]
fn check(message: &str, needles: &[&str]) {
    assert!(!message.contains('\n'), "more than one line: {message}");
    for needle in needles {
        assert!(message.contains(needle), "{needle:?} is not in: {message}");
    }
}

#[track_caller]
fn config_fails(name: &str, edit: Value, needles: &[&str]) {
    let copy = Copy::of(name).config(|config| {
        for (key, value) in edit.as_object().unwrap() {
            config.insert(key.clone(), value.clone());
        }
    });
    fails(copy.path(), needles);
}

#[test]
fn missing_folder() {
    fails(Path::new("no/such/model"), &["no/such/model", "no such file or folder", "config.json", ".gguf"]);
}

#[test]
fn folder_without_a_model() {
    let dir = tempfile::tempdir().unwrap();
    fails(dir.path(), &["no config.json", "no .gguf or .onnx file"]);
}

#[test]
fn file_that_is_not_a_model() {
    fails(&fixture("gpt2").join("config.json"), &["not a .gguf or .onnx file", "folder"]);
}

#[test]
fn config_that_is_not_json() {
    let copy = Copy::of("gpt2");
    std::fs::write(copy.file("config.json"), "{\"model_type\": ").unwrap();
    fails(copy.path(), &["config.json", "not JSON"]);
    std::fs::write(copy.file("config.json"), "[1]").unwrap();
    fails(copy.path(), &["expected a JSON object", "an array"]);
}

#[test]
fn config_without_model_type() {
    let copy = Copy::of("llama-tied").config(|config| drop(config.remove("model_type")));
    fails(copy.path(), &["`model_type`", "no such key", "gpt2, gpt_neox, llama, mistral, qwen2"]);
}

#[test]
fn config_of_an_unknown_architecture() {
    config_fails("llama-tied", json!({"model_type": "mamba"}), &["\"mamba\"", "gpt2, gpt_neox, llama, mistral, qwen2"]);
}

#[test]
fn config_without_a_size() {
    let copy = Copy::of("llama-tied").config(|config| drop(config.remove("hidden_size")));
    fails(copy.path(), &["`hidden_size`", "expected a whole number", "nothing"]);
}

#[test]
fn heads_that_do_not_divide() {
    config_fails(
        "qwen2-tied",
        json!({"num_attention_heads": 7}),
        &["`num_attention_heads`", "divisor of the hidden size 128", "7"],
    );
    config_fails("gpt2", json!({"n_head": 7}), &["`n_head`", "divisor", "64"]);
    config_fails(
        "llama-tied",
        json!({"num_key_value_heads": 3}),
        &["`num_key_value_heads`", "divisor of the 4 query heads", "3"],
    );
}

#[test]
fn sizes_that_make_no_sense() {
    for (name, key) in [
        ("llama-tied", "hidden_size"),
        ("llama-tied", "num_hidden_layers"),
        ("gpt2", "n_embd"),
        ("gpt2", "n_layer"),
        ("pythia", "vocab_size"),
    ] {
        for value in [json!(0), json!(-4), json!(1.5), json!("many"), json!(1u64 << 40), json!([1])] {
            config_fails(name, json!({key: value}), &[key, "whole number from 1"]);
        }
    }
    config_fails("llama-tied", json!({"head_dim": 1 << 24}), &["head_dim", "at most"]);
    config_fails("llama-tied", json!({"rms_norm_eps": "NaN"}), &["rms_norm_eps", "expected a number"]);
    config_fails("llama-tied", json!({"rms_norm_eps": 0.0}), &["epsilon", "positive"]);
    config_fails(
        "pythia",
        json!({"rope_parameters": {"partial_rotary_factor": 0.04, "rope_theta": 1e4}}),
        &["even number"],
    );
    config_fails("pythia", json!({"rope_parameters": {"partial_rotary_factor": 1.5, "rope_theta": 1e4}}), &["share"]);
    config_fails("llama-tied", json!({"rope_parameters": {"rope_theta": -1.0}}), &["rope_theta", "positive"]);
}

#[test]
fn rope_types_that_are_not_implemented() {
    for kind in ["dynamic", "yarn", "longrope"] {
        config_fails(
            "llama-tied",
            json!({"rope_parameters": {"rope_type": kind, "factor": 2.0}}),
            &[kind, "not supported", "linear"],
        );
        config_fails(
            "llama-tied",
            json!({"rope_parameters": null, "rope_scaling": {"type": kind}}),
            &[kind, "not supported"],
        );
    }
    config_fails(
        "llama-tied",
        json!({"rope_parameters": {"rope_type": "linear"}}),
        &["`factor`", "positive number", "nothing"],
    );
    let nested = json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}});
    config_fails("llama-tied", nested, &["per layer type", "not supported"]);
}

#[test]
fn features_that_are_not_implemented() {
    config_fails("llama-tied", json!({"quantization_config": {"bits": 4}}), &["quantization_config", "unquantized"]);
    config_fails("llama-tied", json!({"hidden_act": "quick_gelu"}), &["hidden_act", "quick_gelu"]);
    config_fails("gpt2", json!({"add_cross_attention": true}), &["add_cross_attention"]);
}

#[test]
fn missing_tensor() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let copy = Copy::of("llama-tied").weights(|tensors| drop(tensors.remove(name)));
    fails(copy.path(), &[name, "[256, 128]", "missing"]);
}

#[test]
fn missing_head_of_an_untied_model() {
    let copy = Copy::of("llama-tied").config(|config| drop(config.insert("tie_word_embeddings".into(), false.into())));
    fails(copy.path(), &["lm_head.weight", "missing", "\"tie_word_embeddings\": true"]);
}

#[test]
fn wrong_shape() {
    config_fails(
        "llama-tied",
        json!({"intermediate_size": 320}),
        &["mlp.gate_proj.weight", "[320, 128]", "[256, 128]"],
    );
    let copy =
        Copy::of("gpt2").weights(|tensors| tensors.get_mut("transformer.h.0.attn.c_attn.weight").unwrap().1.reverse());
    fails(copy.path(), &["c_attn.weight", "[64, 192]", "[192, 64]"]);
}

#[test]
fn unsupported_dtype() {
    let name = "model.norm.weight";
    let copy = Copy::of("llama-tied").weights(|tensors| tensors.get_mut(name).unwrap().0 = Dtype::I32);
    fails(copy.path(), &[name, "I32", "BF16"]);
}

#[test]
fn missing_shard() {
    let copy = Copy::of("llama-tied").sharded(3);
    std::fs::remove_file(copy.file("model-00002-of-00003.safetensors")).unwrap();
    fails(copy.path(), &["model.safetensors.index.json", "model-00002-of-00003.safetensors", "missing"]);
}

#[test]
fn index_that_lies() {
    let edit = |change: &dyn Fn(&mut Value)| {
        let copy = Copy::of("llama-tied").sharded(3);
        let path = copy.file("model.safetensors.index.json");
        let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut index);
        std::fs::write(path, index.to_string()).unwrap();
        copy
    };
    let other = edit(&|index| index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors".into());
    fails(other.path(), &["model.norm.weight", "is not in shard"]);
    let outside = edit(&|index| index["weight_map"]["model.norm.weight"] = "../../secret.safetensors".into());
    fails(outside.path(), &["secret", "not a file name"]);
    let none = edit(&|index| *index = json!({"metadata": {}}));
    fails(none.path(), &["not a safetensors index", "weight_map"]);
}

#[test]
fn tensor_in_two_shards() {
    let copy = Copy::of("llama-tied").sharded(3);
    std::fs::copy(copy.file("model-00001-of-00003.safetensors"), copy.file("model-00002-of-00003.safetensors"))
        .unwrap();
    fails(copy.path(), &["also in another shard"]);
}

#[test]
fn truncated_safetensors() {
    for keep in [0, 7, 8, 100, 20_000, 2_000_000] {
        let copy = Copy::of("llama-tied").bytes(|bytes| bytes.truncate(keep));
        fails(copy.path(), &["model.safetensors", "damaged or incomplete"]);
    }
}

/// Replaces the header, keeping the data.
fn with_header(edit: impl FnOnce(&mut Value)) -> Copy {
    Copy::of("llama-tied").bytes(|bytes| {
        let size = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..size]).unwrap();
        edit(&mut header);
        let text = header.to_string();
        let data = bytes.split_off(size);
        *bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &data].concat();
    })
}

#[test]
fn safetensors_header_that_lies() {
    let needles = ["model.safetensors", "bad safetensors header", "damaged or incomplete"];
    fails(with_header(|h| h["model.norm.weight"]["data_offsets"] = json!([0, 512])).path(), &needles);
    fails(with_header(|h| h["model.norm.weight"]["data_offsets"] = json!([512, 0])).path(), &needles);
    fails(with_header(|h| h["model.norm.weight"]["shape"] = json!([1u64 << 62, 1u64 << 62])).path(), &needles);
    fails(with_header(|h| h["model.norm.weight"]["dtype"] = json!("F99")).path(), &needles);
    fails(with_header(|h| drop(h.as_object_mut().unwrap().shift_remove("model.norm.weight"))).path(), &needles);
}

#[test]
fn safetensors_header_of_absurd_length() {
    for length in [u64::MAX, 1 << 40, 200 << 20] {
        let copy = Copy::of("llama-tied").bytes(|bytes| bytes[..8].copy_from_slice(&length.to_le_bytes()));
        fails(copy.path(), &["bad safetensors header", "damaged or incomplete"]);
    }
}

#[test]
fn only_pickled_weights() {
    let copy = Copy::of("llama-tied");
    std::fs::rename(copy.file("model.safetensors"), copy.file("pytorch_model.bin")).unwrap();
    fails(copy.path(), &["no model.safetensors", "only pytorch_model.bin", "safe_serialization"]);
}

#[test]
fn tokens_out_of_range() {
    let model = open(&fixture("llama-tied")).unwrap().model;
    check(&model.ids(&[1, 2, 512], 1, 0).unwrap_err().to_string(), &["token 512", "position 2", "vocabulary of 512"]);
    check(&model.ids(&[1, 2, 3], 2, 0).unwrap_err().to_string(), &["batch size 2", "3"]);
    check(&model.ids(&[], 1, 0).unwrap_err().to_string(), &["not zero"]);
    let hidden = model.hidden(model.ids(&[1, 2, 3], 1, 0).unwrap(), 0, &mut DenseAttention::new());
    check(&model.token_nll(hidden.clone(), &[1, 2]).unwrap_err().to_string(), &["targets", "expected 3", "found 2"]);
    check(&model.token_nll(hidden, &[1, 2, 600]).unwrap_err().to_string(), &["token 600"]);
}

#[test]
fn more_positions_than_learned() {
    let model = open(&fixture("gpt2")).unwrap().model;
    assert!(model.ids(&[1; 256], 1, 0).is_ok());
    check(&model.ids(&[1; 257], 1, 0).unwrap_err().to_string(), &["257", "256"]);
    check(&model.ids(&[1], 1, 256).unwrap_err().to_string(), &["257", "256"]);
    assert!(open(&fixture("llama-tied")).unwrap().model.ids(&[1; 300], 1, 0).is_ok(), "rotary positions have no end");
}

#[test]
fn folder_that_cannot_be_written() {
    let model = open(&fixture("llama-tied")).unwrap().model;
    let message = model.save_hf(fixture("gpt2").join("config.json").join("below")).unwrap_err().to_string();
    check(&message, &["config.json"]);
}
