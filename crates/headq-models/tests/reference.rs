//! Every architecture against transformers: logits, hidden states, keys and values of ten random-weight checkpoints.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use burn::tensor::{Device, Tensor};
use common::{ALL, Capture, Copy, Expected, assert_close, fixture, floats, host, logits, open, read_tensors};
use half::{bf16, f16};
use headq::{DenseAttention, DeviceName};
use headq_models::{LoadOptions, LoadedModel, load};
use safetensors::tensor::Dtype;

fn conforms(name: &str, config_file: &str) {
    let options = LoadOptions { config_file: config_file.into(), ..Default::default() };
    for (device_name, device) in DeviceName::present() {
        conforms_on(
            &format!("{device_name}, {name}/{config_file}"),
            name,
            &load(fixture(name), &device, &options).unwrap(),
        );
    }
}

fn conforms_on(what: &str, name: &str, loaded: &LoadedModel) {
    let (model, config, expected) = (&loaded.model, loaded.config(), Expected::of(name));
    let ids = model.ids(&expected.ids(), 2, 0).unwrap();
    let mut capture = Capture::default();
    let states = model.hidden_states(ids.clone(), 0, &mut capture);
    let what = |part: &str, i: usize| format!("{what}: {part}.{i}");
    assert_eq!(states.len(), config.num_layers + 1);
    for (i, state) in states.iter().enumerate() {
        assert_close(&what("hidden", i), &host(state.clone()), &expected.get(&format!("hidden.{i}")), 2e-4);
    }
    for i in 0..config.num_layers {
        let site = capture.sites[i];
        assert_eq!((site.layer, site.start, site.window), (i, 0, config.windows[i]));
        assert_close(&what("k", i), &host(capture.keys[i].clone()), &expected.get(&format!("k.{i}")), 5e-5);
        assert_close(&what("v", i), &host(capture.values[i].clone()), &expected.get(&format!("v.{i}")), 5e-5);
    }
    let found = host(model.logits(states.last().unwrap().clone()));
    assert_close(&what("logits", 0), &found, &expected.get("logits"), 2e-4);
    assert_eq!(found, host(model.forward(ids, 0, &mut DenseAttention::new())));
}

#[test]
fn all_checkpoints_match_transformers() {
    for name in ALL {
        conforms(name, "config.json");
    }
}

#[test]
fn configs_of_transformers_4_give_the_same_model() {
    for name in ALL {
        conforms(name, "config_v4.json");
        let v4 = LoadOptions { config_file: "config_v4.json".into(), ..Default::default() };
        let (new, old) = (open(&fixture(name)).unwrap(), load(fixture(name), &Device::flex(), &v4).unwrap());
        assert_eq!(new.config(), old.config(), "{name}");
        assert_eq!(new.fingerprint, old.fingerprint, "{name}");
    }
}

/// Reading a 16-bit copy is exact: it gives the same logits as an f32 copy of the rounded weights. Against the unrounded
/// weights, each of the ~20 matrices in sequence adds a relative error of about the unit roundoff u of its entries; as they are
/// independent, 8u bounds the root mean square over all logits.
fn half_precision(dtype: Dtype, unit: f32, round: fn(f32) -> (Vec<u8>, f32)) {
    for name in ALL {
        let convert = |to_half: bool| {
            Copy::of(name).weights(|tensors| {
                for stored in tensors.values_mut() {
                    let rounded: Vec<_> = floats(stored).into_iter().map(round).collect();
                    if to_half {
                        stored.0 = dtype;
                        stored.2 = rounded.into_iter().flat_map(|(bytes, _)| bytes).collect();
                    } else {
                        stored.2 = rounded.iter().flat_map(|(_, value)| value.to_le_bytes()).collect();
                    }
                }
            })
        };
        let expected = Expected::of(name);
        let (half, full) = (convert(true), convert(false));
        let (half, full) = (open(half.path()).unwrap(), open(full.path()).unwrap());
        let found = logits(&half, &expected.ids());
        assert_eq!(found, logits(&full, &expected.ids()), "{name}");
        assert_ne!(half.fingerprint.weights_sha256, full.fingerprint.weights_sha256);
        assert_eq!(half.fingerprint.config_sha256, full.fingerprint.config_sha256);
        let exact = expected.get("logits");
        let square = |it: &mut dyn Iterator<Item = f32>| it.map(|x| f64::from(x) * f64::from(x)).sum::<f64>();
        let error = square(&mut found.iter().zip(&exact).map(|(a, b)| a - b)) / square(&mut exact.iter().copied());
        assert!(error.sqrt() <= f64::from(8.0 * unit), "{name}: {dtype:?} is off by {:e}", error.sqrt());
    }
}

#[test]
fn f16_weights_are_read_exactly() {
    half_precision(Dtype::F16, 2f32.powi(-11), |x| (f16::from_f32(x).to_le_bytes().into(), f16::from_f32(x).to_f32()));
}

#[test]
fn bf16_weights_are_read_exactly() {
    half_precision(Dtype::BF16, 2f32.powi(-8), |x| {
        (bf16::from_f32(x).to_le_bytes().into(), bf16::from_f32(x).to_f32())
    });
}

#[test]
fn shards_are_the_same_model() {
    for name in ALL {
        let (single, copy) = (open(&fixture(name)).unwrap(), Copy::of(name).sharded(3));
        let sharded = open(copy.path()).unwrap();
        assert_eq!(sharded.description.format, "safetensors, 3 shards");
        assert_eq!(sharded.fingerprint, single.fingerprint, "{name}");
        let ids = Expected::of(name).ids();
        assert_eq!(logits(&sharded, &ids), logits(&single, &ids), "{name}");
    }
}

#[test]
fn a_stored_head_of_a_tied_model_is_ignored() {
    for (name, embedding) in [("llama-tied", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")] {
        let copy = Copy::of(name).weights(|tensors| {
            let head = tensors[embedding].clone();
            tensors.insert("lm_head.weight".into(), head);
        });
        let ids = Expected::of(name).ids();
        let loaded = open(copy.path()).unwrap();
        assert_eq!(logits(&loaded, &ids), logits(&open(&fixture(name)).unwrap(), &ids));
    }
}

#[test]
fn base_checkpoints_without_prefix_and_with_buffers_load() {
    for (name, prefix) in [("gpt2", "transformer."), ("pythia", "gpt_neox."), ("qwen2-untied", "model.")] {
        let copy = Copy::of(name).weights(|tensors| {
            let mut bare: std::collections::BTreeMap<_, _> = std::mem::take(tensors)
                .into_iter()
                .map(|(tensor, stored)| (tensor.strip_prefix(prefix).unwrap_or(&tensor).to_owned(), stored))
                .collect();
            bare.insert("h.0.attn.bias".into(), (Dtype::BOOL, vec![4], vec![1; 4]));
            *tensors = bare;
        });
        let ids = Expected::of(name).ids();
        assert_eq!(logits(&open(copy.path()).unwrap(), &ids), logits(&open(&fixture(name)).unwrap(), &ids), "{name}");
    }
}

#[test]
fn token_by_token_equals_the_whole_pass() {
    for name in ALL {
        let (loaded, expected) = (open(&fixture(name)).unwrap(), Expected::of(name));
        let (model, ids) = (&loaded.model, expected.ids());
        let mut past = DenseAttention::with_past();
        let mut steps: Vec<Tensor<3>> = Vec::new();
        for t in 0..48 {
            let step = model.ids(&[ids[t], ids[48 + t]], 2, t).unwrap();
            steps.push(model.forward(step, t, &mut past));
        }
        assert_close(name, &host(Tensor::cat(steps, 1)), &expected.get("logits"), 2e-4);
    }
}

#[test]
fn export_gives_back_the_stored_tensors() {
    for name in ALL {
        let loaded = open(&fixture(name)).unwrap();
        let mut stored = read_tensors(&fixture(name).join("model.safetensors"));
        for (tensor, data) in loaded.model.to_hf_tensors() {
            let original = stored.remove(&tensor).unwrap_or_else(|| panic!("{name}: {tensor} is not stored"));
            assert_eq!(data.shape().to_vec(), original.1, "{name}: {tensor}");
            assert_eq!(data.as_slice::<f32>().unwrap(), floats(&original), "{name}: {tensor}");
        }
        assert!(stored.is_empty(), "{name}: not exported: {:?}", stored.keys());
    }
}

#[test]
fn saved_folders_load_as_the_same_model() {
    for name in ALL {
        let (loaded, dir) = (open(&fixture(name)).unwrap(), tempfile::tempdir().unwrap());
        let folder = dir.path().join("new");
        loaded.model.save_hf(&folder).unwrap();
        let again = open(&folder).unwrap();
        assert_eq!(again.config(), loaded.config(), "{name}");
        assert_eq!(again.fingerprint, loaded.fingerprint, "{name}");
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 2, "no temporary file stays");
    }
}

#[test]
fn describe_reads_no_weights_but_knows_them() {
    let described = headq_models::describe(fixture("qwen2-untied"), &LoadOptions::default()).unwrap();
    let stored = read_tensors(&fixture("qwen2-untied").join("model.safetensors"));
    assert_eq!(described.tensors, stored.len());
    assert_eq!(described.bytes, stored.values().map(|s| s.2.len() as u64).sum::<u64>());
    assert_eq!(described.parameters, described.bytes / 4);
    assert_eq!(described.stored_types, [("F32".to_owned(), stored.len())]);
    assert_eq!(described.format, "safetensors");
}

#[test]
fn token_nll_equals_brute_force_in_f64() {
    for name in ["llama-untied", "gpt2"] {
        let (loaded, expected) = (open(&fixture(name)).unwrap(), Expected::of(name));
        // More rows than are projected at a time, and not a multiple.
        let ids: Vec<u32> = expected.ids().repeat(2);
        let hidden = loaded.model.hidden(loaded.model.ids(&ids, 4, 0).unwrap(), 0, &mut DenseAttention::new());
        let targets: Vec<u32> = ids.iter().map(|t| (t * 7 + 3) % 512).collect();
        let found = loaded.model.token_nll(hidden, &targets).unwrap();
        let logits = expected.get("logits").repeat(2);
        for ((row, &target), nll) in logits.chunks(512).zip(&targets).zip(found) {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            let exact = sum.ln() - f64::from(row[target as usize]);
            assert!((nll - exact).abs() < 2e-4, "{name}: {nll} against {exact}");
        }
    }
}
