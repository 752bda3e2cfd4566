//! ONNX exports of the tiny checkpoints against transformers and against the checkpoints themselves.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
mod onnx_files;

use burn::tensor::Device;
use common::{Capture, Copy, Expected, assert_close, fixture, floats, host, open};
use half::{bf16, f16};
use headq_models::{LoadOptions, LoadedModel, RopeScaling, describe, fingerprint, load};
use onnx_files::{BF16, Export, F16, F32, F64, all};
use onnx_ir::TensorProto;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

/// The exports that keep the checkpoint's precision.
fn exact() -> Vec<(String, String)> {
    all().into_iter().filter(|(name, variant)| variant != "half" && name != "bert").collect()
}

/// Logits, keys and values are those that transformers computed.
fn conforms(what: &str, name: &str, loaded: &LoadedModel) {
    let expected = Expected::of(name);
    let mut capture = Capture::default();
    let logits = loaded.model.forward(loaded.model.ids(&expected.ids(), 2, 0).unwrap(), 0, &mut capture);
    let mut worst = assert_close(&format!("{what}: logits"), &host(logits), &expected.get("logits"), 2e-4);
    for i in 0..loaded.config().num_layers {
        for (kind, found) in [("k", &capture.keys[i]), ("v", &capture.values[i])] {
            let name = format!("{kind}.{i}");
            worst =
                assert_close(&format!("{what}: {name}"), &host(found.clone()), &expected.get(&name), 2e-4).max(worst);
        }
    }
    println!("{what}: logits, keys and values differ by {worst:.1e} at most");
}

/// Every weight is in its place, bit for bit: the fingerprint is the checkpoint's.
fn is_the_checkpoint(what: &str, name: &str, loaded: &LoadedModel) {
    assert_eq!(loaded.fingerprint, open(&fixture(name)).unwrap().fingerprint, "{what}");
}

#[test]
fn every_export_is_the_model_that_was_exported() {
    for (name, variant) in exact() {
        let what = format!("{name}/{variant}");
        let loaded = open(&Export::of(&name, &variant).saved()).unwrap_or_else(|e| panic!("{what}: {e}"));
        conforms(&what, &name, &loaded);
        is_the_checkpoint(&what, &name, &loaded);
        assert_eq!(loaded.description.format, "ONNX");
    }
}

#[test]
fn weights_beside_the_file() {
    for (name, variant) in exact() {
        let what = format!("{name}/{variant}");
        let export = Export::of(&name, &variant).external();
        let loaded = open(&export.saved()).unwrap_or_else(|e| panic!("{what}: {e}"));
        conforms(&what, &name, &loaded);
        is_the_checkpoint(&what, &name, &loaded);
        assert_eq!(loaded.description.format, "ONNX, 1 file of external data");
    }
}

/// `offset` and `length` may be left out: from the start, and as much as the shape needs.
#[test]
fn weights_in_files_of_their_own() {
    let mut files = Vec::new();
    let export = Export::of("llama-untied", "model").weights(|tensor| {
        files.push((tensor.name.clone(), std::mem::take(&mut tensor.raw_data)));
        onnx_files::set(tensor, "location", &format!("weights/{}", tensor.name));
    });
    std::fs::create_dir(export.path().join("weights")).unwrap();
    for (name, data) in &files {
        std::fs::write(export.path().join("weights").join(name), data).unwrap();
    }
    let loaded = open(&export.saved()).unwrap();
    is_the_checkpoint("files", "llama-untied", &loaded);
    assert_eq!(loaded.description.format, format!("ONNX, {} files of external data", files.len()));
}

/// A checkpoint with every tensor in another type.
fn converted(name: &str, dtype: Dtype, convert: impl Fn(f32) -> Vec<u8>) -> LoadedModel {
    let copy = Copy::of(name).weights(|tensors| {
        for stored in tensors.values_mut() {
            stored.2 = floats(stored).into_iter().flat_map(&convert).collect();
            stored.0 = dtype;
        }
    });
    open(copy.path()).unwrap()
}

#[test]
fn exports_in_half_precision() {
    for name in ["gpt2", "llama-untied"] {
        let loaded = open(&Export::of(name, "half").saved()).unwrap();
        let expected = converted(name, Dtype::F16, |x| f16::from_f32(x).to_le_bytes().to_vec());
        assert_eq!(loaded.fingerprint, expected.fingerprint, "{name}");
    }
}

fn values(tensor: &mut TensorProto) -> Vec<f32> {
    let bytes = std::mem::take(&mut tensor.raw_data);
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn numbers_in_typed_fields() {
    type Write = fn(&mut TensorProto, Vec<f32>);
    type Convert = fn(f32) -> Vec<u8>;
    let kinds: [(i32, Dtype, Write, Convert); 4] = [
        (F32, Dtype::F32, |t, v| t.float_data = v, |x| x.to_le_bytes().to_vec()),
        (
            F64,
            Dtype::F64,
            |t, v| t.double_data = v.into_iter().map(f64::from).collect(),
            |x| f64::from(x).to_le_bytes().to_vec(),
        ),
        (
            F16,
            Dtype::F16,
            |t, v| t.int32_data = v.into_iter().map(|x| i32::from(f16::from_f32(x).to_bits())).collect(),
            |x| f16::from_f32(x).to_le_bytes().to_vec(),
        ),
        (
            BF16,
            Dtype::BF16,
            |t, v| t.int32_data = v.into_iter().map(|x| i32::from(bf16::from_f32(x).to_bits())).collect(),
            |x| bf16::from_f32(x).to_le_bytes().to_vec(),
        ),
    ];
    for (kind, dtype, write, convert) in kinds {
        let export = Export::of("pythia", "model").weights(|tensor| {
            // The frequencies stay in f32, as exporters leave them.
            if !tensor.name.ends_with("inv_freq") {
                let values = values(tensor);
                write(tensor, values);
                tensor.data_type = kind;
            }
        });
        let loaded = open(&export.saved()).unwrap();
        assert_eq!(loaded.fingerprint, converted("pythia", dtype, convert).fingerprint, "{dtype:?}");
    }
}

#[test]
fn weights_in_constant_nodes() {
    let export = Export::of("qwen2-tied", "optimum").edit(|model| {
        let graph = model.graph.as_mut().unwrap();
        let constants = std::mem::take(&mut graph.initializer).into_iter().map(|tensor| {
            let mut node = onnx_files::node("Constant", &[], &tensor.name);
            node.attribute.push(Default::default());
            node.attribute[0].name = "value".into();
            node.attribute[0].t = Some(tensor).into();
            node
        });
        graph.node = constants.collect::<Vec<_>>().into_iter().chain(std::mem::take(&mut graph.node)).collect();
    });
    is_the_checkpoint("Constant nodes", "qwen2-tied", &open(&export.saved()).unwrap());
}

/// Without a config the graph says everything that matters to the numbers.
#[test]
fn configs_from_the_graph() {
    // Of one length, only learned positions are whole.
    let whole = |(name, variant): &(String, String)| variant != "fixed" || name == "gpt2";
    for (name, variant) in exact().into_iter().filter(whole) {
        let what = format!("{name}/{variant} without a config");
        let export = Export::of(&name, &variant).without_config();
        let loaded = open(&export.saved()).unwrap_or_else(|e| panic!("{what}: {e}"));
        conforms(&what, &name, &loaded);
        let (found, full) = (loaded.config(), open(&fixture(&name)).unwrap());
        let full = full.config();
        let mut expected = full.clone();
        // A graph knows neither of these, and Mistral without a window is a Llama.
        expected.max_position_embeddings = found.max_position_embeddings;
        expected.bos_token_id = None;
        expected.eos_token_ids = Vec::new();
        if name == "mistral-nosw" {
            expected.architecture = found.architecture;
        }
        if let (Some(found), Some(rope)) = (&found.rope, &mut expected.rope) {
            let frequencies = found.inverse_frequencies().into_iter().zip(rope.inverse_frequencies());
            assert!(frequencies.into_iter().all(|(a, b)| (a - b).abs() < 1e-6 * b), "{what}: frequencies");
            assert_eq!(matches!(found.scaling, RopeScaling::Factors(_)), name == "llama3-ropescaled", "{what}");
            *rope = found.clone();
        }
        assert_eq!(*found, expected, "{what}");
    }
}

fn with_settings(settings: Value) -> LoadOptions {
    LoadOptions { settings: settings.as_object().unwrap().clone(), ..LoadOptions::default() }
}

#[test]
fn what_the_graph_does_not_say_is_asked_for() {
    // An export of one length has cosines where others have frequencies.
    let export = Export::of("llama-untied", "fixed").without_config();
    let path = export.saved();
    let message = open(&path).unwrap_err().to_string();
    for needle in ["model.onnx", "no config.json", "`rope_theta`", "--model-config FILE", "--model-set KEY=VALUE"] {
        assert!(message.contains(needle), "{needle:?} is not in: {message}");
    }
    let options = with_settings(json!({"rope_theta": 10_000}));
    conforms("settings", "llama-untied", &load(&path, &Device::flex(), &options).unwrap());

    let options = LoadOptions { config: Some(fixture("llama-untied").join("config.json")), ..LoadOptions::default() };
    let loaded = load(&path, &Device::flex(), &options).unwrap();
    is_the_checkpoint("a config from elsewhere", "llama-untied", &loaded);
    assert_eq!(fingerprint(&path, &options).unwrap(), loaded.fingerprint);
}

#[test]
fn folders_with_an_export() {
    let one = Export::of("gpt2", "optimum");
    one.saved();
    is_the_checkpoint("folder", "gpt2", &open(one.path()).unwrap());

    let below = Export::of("gpt2", "optimum");
    let file = below.write("onnx/model.onnx");
    below.write("onnx/decoder_model.onnx");
    is_the_checkpoint("folder of a folder", "gpt2", &open(below.path()).unwrap());
    is_the_checkpoint("file in a folder of a folder", "gpt2", &open(&file).unwrap());

    let named = Export::of("gpt2", "optimum");
    named.write("gpt2.onnx");
    is_the_checkpoint("any name", "gpt2", &open(named.path()).unwrap());

    // Beside safetensors, which are what the model was exported from, it is not read.
    std::fs::copy(fixture("gpt2").join("model.safetensors"), one.path().join("model.safetensors")).unwrap();
    assert_eq!(describe(one.path(), &LoadOptions::default()).unwrap().format, "safetensors");
}

#[test]
fn a_config_that_disagrees_with_the_graph() {
    let disagrees = |name: &str, edit: Value, needles: &[&str]| {
        let export = Export::of(name, "model");
        let path = export.saved();
        let refused = |options: &LoadOptions, source: &str| {
            let message = load(&path, &Device::flex(), options).unwrap_err().to_string();
            for needle in needles.iter().chain(&["model.onnx", source]) {
                assert!(message.contains(needle), "{needle:?} is not in: {message}");
            }
        };
        refused(&with_settings(edit.clone()), "--model-set");
        // The same in the file.
        let file = export.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        config.as_object_mut().unwrap().extend(edit.as_object().unwrap().clone());
        std::fs::write(&file, config.to_string()).unwrap();
        refused(&LoadOptions::default(), &format!("{}: ", file.display()));
    };
    disagrees("llama-untied", json!({"rms_norm_eps": 1e-6}), &["norm epsilon", "0.00001", "0.000001"]);
    disagrees("llama-untied", json!({"hidden_act": "gelu"}), &["`hidden_act`", "silu", "gelu"]);
    disagrees("llama-untied", json!({"rope_parameters": {"rope_theta": 5e5}}), &["rope parameters", "frequencies"]);
    disagrees("llama-untied", json!({"head_dim": 8, "num_attention_heads": 16}), &["`head_dim`", "16", "found 8"]);
    disagrees("mistral-sw16", json!({"sliding_window": 8}), &["`sliding_window`", "16", "found 8"]);
    disagrees("llama-untied", json!({"num_hidden_layers": 2}), &["`num_hidden_layers`", "3", "found 2"]);
    disagrees("pythia", json!({"use_parallel_residual": false}), &["`use_parallel_residual`", "true", "found false"]);
    disagrees("qwen2-tied", json!({"model_type": "llama"}), &["bias of the qkv projection", "true", "found false"]);
    disagrees("gpt2", json!({"scale_attn_weights": false}), &["scale of the attention scores", "0.25", "found 1"]);
    disagrees(
        "llama-untied",
        json!({"model_type": "gpt_neox", "rotary_pct": 1.0}),
        &["`model_type`", "RMS", "gpt_neox"],
    );
}

/// Neither the order of the nodes nor their names matter.
#[test]
fn names_say_nothing() {
    let rename = |name: &mut String| {
        if !name.is_empty() {
            *name = format!("v{:x}", name.bytes().fold(7u64, |h, b| h.wrapping_mul(0x100_0000_01b3) ^ u64::from(b)));
        }
    };
    let export = Export::of("mistral-sw16", "unoptimized").edit(|model| {
        let graph = model.graph.as_mut().unwrap();
        graph.initializer.iter_mut().for_each(|t| rename(&mut t.name));
        graph.input.iter_mut().for_each(|v| rename(&mut v.name));
        graph.output.iter_mut().for_each(|v| rename(&mut v.name));
        for node in &mut graph.node {
            node.input.iter_mut().chain(&mut node.output).chain([&mut node.name]).for_each(rename);
        }
    });
    is_the_checkpoint("renamed", "mistral-sw16", &open(&export.saved()).unwrap());
}
