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
    with_header_text(|mut header| {
        edit(&mut header);
        header.to_string()
    })
}

fn with_header_text(edit: impl FnOnce(Value) -> String) -> Copy {
    Copy::of("llama-tied").bytes(|bytes| {
        let size = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let text = edit(serde_json::from_slice(&bytes[8..size]).unwrap());
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
fn safetensors_ranges_that_lie() {
    let name = "model.norm.weight";
    let start_of = |h: &Value| h[name]["data_offsets"][0].as_u64().unwrap();
    // 128 numbers of 4 bytes.
    let range =
        |from: u64, to: u64| with_header(|h| h[name]["data_offsets"] = json!([start_of(h) + from, start_of(h) + to]));
    fails(range(0, 508).path(), &["model.safetensors", name, "type F32 and shape [128] takes 512 bytes, found 508"]);
    for (from, to) in [(4, 512), (512, 0), (1 << 40, (1 << 40) + 512)] {
        fails(range(from, to).path(), &["model.safetensors", "invalid offset for tensor", "damaged or incomplete"]);
    }
    fails(with_header(|h| h[name]["shape"] = json!([127])).path(), &[name, "shape [127] takes 508 bytes, found 512"]);
    fails(with_header(|h| h[name]["data_offsets"] = json!([-4, 508])).path(), &["invalid JSON in header"]);
    let longer = Copy::of("llama-tied").bytes(|bytes| bytes.extend([0; 4]));
    fails(longer.path(), &["file not fully covered"]);
}

#[test]
fn safetensors_header_that_is_not_json() {
    for text in ["", "{", "[]", "{\"model.norm.weight\": 3}", "\u{feff}{}"] {
        fails(with_header_text(|_| text.into()).path(), &["bad safetensors header", "invalid JSON in header"]);
    }
    let copy = Copy::of("llama-tied").bytes(|bytes| bytes[8..12].fill(0xff));
    fails(copy.path(), &["bad safetensors header", "invalid UTF-8"]);
}

/// JSON has no opinion on repeated keys, and its parsers keep the last one.
#[test]
fn a_tensor_twice_in_one_header() {
    let name = "model.norm.weight";
    let copy = with_header_text(|h| format!("{{\"{name}\":{},{}", h[name], &h.to_string()[1..]));
    fails(copy.path(), &["model.safetensors", "tensor `model.norm.weight` is there twice"]);
}

#[test]
fn safetensors_header_that_really_is_too_long() {
    let copy = Copy::of("llama-tied").bytes(|bytes| bytes[..8].copy_from_slice(&120_000_000u64.to_le_bytes()));
    let file = std::fs::File::options().write(true).open(copy.file("model.safetensors")).unwrap();
    file.set_len(120_000_100).unwrap();
    fails(copy.path(), &["header too large: 120000000 bytes, and the format allows 100000000"]);
}

#[test]
fn things_that_are_not_files() {
    let copy = Copy::of("llama-tied");
    std::fs::remove_file(copy.file("model.safetensors")).unwrap();
    std::fs::create_dir(copy.file("model.safetensors")).unwrap();
    fails(copy.path(), &["model.safetensors: expected a file, found a folder"]);
    let copy = Copy::of("llama-tied").sharded(2);
    std::fs::remove_file(copy.file("model-00001-of-00002.safetensors")).unwrap();
    std::fs::create_dir(copy.file("model-00001-of-00002.safetensors")).unwrap();
    fails(copy.path(), &["model-00001-of-00002.safetensors", "missing from the folder"]);
}

#[test]
#[cfg(unix)]
fn links_that_lead_nowhere() {
    use std::os::unix::fs::symlink;
    let linked = |file: &str, target: &str| {
        let copy = Copy::of("llama-tied");
        std::fs::remove_file(copy.file(file)).unwrap();
        symlink(target, copy.file(file)).unwrap();
        copy
    };
    fails(
        linked("model.safetensors", "model.safetensors").path(),
        &["model.safetensors: Too many levels of symbolic links"],
    );
    fails(linked("model.safetensors", "nowhere").path(), &["model.safetensors: No such file"]);
    fails(
        linked("model.safetensors", "/dev/null").path(),
        &["model.safetensors: expected a file, found a device or a pipe"],
    );
    fails(linked("config.json", "config.json").path(), &["config.json: Too many levels of symbolic links"]);
    let dir = tempfile::tempdir().unwrap();
    for name in ["circle", "circle.gguf"] {
        symlink(name, dir.path().join(name)).unwrap();
        fails(&dir.path().join(name), &[name, "Too many levels of symbolic links"]);
    }
    symlink("nowhere", dir.path().join("link")).unwrap();
    fails(&dir.path().join("link"), &["link: a link that leads nowhere"]);
}

#[test]
fn index_that_is_not_one() {
    let copy = Copy::of("llama-tied").sharded(2);
    for content in ["", "[]", "{\"weight_map\": {\"x\": 3}}", "{\"weight_map\": []}"] {
        std::fs::write(copy.file("model.safetensors.index.json"), content).unwrap();
        fails(copy.path(), &["model.safetensors.index.json", "not a safetensors index"]);
    }
}

/// More layers than the file has are an error before they are an allocation.
#[test]
fn absurd_numbers_of_layers_and_heads() {
    for layers in [1u64 << 24, 1_000_000_000, u64::MAX] {
        config_fails("llama-tied", json!({"num_hidden_layers": layers}), &["`num_hidden_layers`", "1 to 16384"]);
        config_fails("gpt2", json!({"n_layer": layers}), &["`n_layer`", "1 to 16384"]);
        config_fails("pythia", json!({"num_hidden_layers": layers}), &["`num_hidden_layers`", "1 to 16384"]);
    }
    config_fails("llama-tied", json!({"num_hidden_layers": 16384}), &["model.layers.", "missing"]);
    for heads in [json!(0), json!(1u64 << 40)] {
        config_fails("llama-tied", json!({"num_attention_heads": heads}), &["`num_attention_heads`", "from 1 to"]);
        config_fails("llama-tied", json!({"num_key_value_heads": heads}), &["`num_key_value_heads`", "from 1 to"]);
        config_fails("llama-tied", json!({"head_dim": heads}), &["`head_dim`", "from 1 to"]);
        config_fails("gpt2", json!({"n_head": heads}), &["`n_head`", "from 1 to"]);
    }
    let wide = json!({"hidden_size": 1 << 24, "vocab_size": 1 << 24, "intermediate_size": 1 << 24, "head_dim": 16});
    config_fails("llama-tied", wide, &["model.embed_tokens.weight", "[16777216, 16777216]", "[512, 128]"]);
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
