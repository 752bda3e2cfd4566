//! GGUF files: the same models as their safetensors, and damaged ones.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
mod gguf_writer;

use std::path::Path;

use burn::tensor::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Meta;
use common::{Copy, Expected, assert_close, f32_bytes, fixture, logits, open};
use gguf_writer::{GgufCopy, gguf_name, list, permuted};
use headq_models::{LanguageModel, LoadOptions, ModelConfig, Rope, RopeScaling, describe};

fn matches_fixture(gguf: &GgufCopy, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = gguf.write(dir.path());
    let (loaded, original) = (open(&path).unwrap(), open(&fixture(name)).unwrap());
    let expected = Expected::of(name);
    assert_close(name, &logits(&loaded, &expected.ids()), &expected.get("logits"), 2e-4);
    assert_eq!(loaded.description.parameters, original.description.parameters);
    assert_eq!(loaded.config().norm_eps, original.config().norm_eps, "the decimal number, not its nearest f32");
    // A folder with nothing but the file is the same model.
    assert_eq!(open(dir.path()).unwrap().fingerprint, loaded.fingerprint);
}

#[test]
fn llama_rows_are_put_back_in_order() {
    for name in ["llama-tied", "llama-untied"] {
        matches_fixture(&GgufCopy::llama(name), name);
    }
}

#[test]
fn qwen2_rows_are_in_order() {
    for name in ["qwen2-tied", "qwen2-untied"] {
        matches_fixture(&GgufCopy::qwen2(name), name);
    }
}

#[test]
fn rope_factors_of_llama_3_are_used() {
    let name = "llama3-ropescaled";
    let config = open(&fixture(name)).unwrap().config().clone();
    let rope = config.rope.unwrap();
    let plain = Rope { scaling: RopeScaling::None, ..rope.clone() }.inverse_frequencies();
    let factors: Vec<f32> = plain.iter().zip(rope.inverse_frequencies()).map(|(a, b)| (a / b) as f32).collect();
    let mut gguf = GgufCopy::llama(name);
    gguf.tensors.insert("rope_freqs.weight".into(), (vec![factors.len()], factors));
    matches_fixture(&gguf, name);
    gguf.tensors.insert("rope_freqs.weight".into(), (vec![2], vec![1.0, 1.0]));
    fails(&gguf, &["rope_freqs.weight", "8 positive factors", "2 values"]);
}

#[test]
fn linear_scaling_is_read() {
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.set("llama.rope.scaling.type", Meta::String("linear".into()));
    gguf.set("llama.rope.scaling.factor", Meta::F32(4.0));
    let dir = tempfile::tempdir().unwrap();
    let described = describe(gguf.write(dir.path()), &LoadOptions::default()).unwrap();
    assert_eq!(described.config.rope.unwrap().scaling, RopeScaling::Linear { factor: 4.0 });
}

#[test]
fn kv_heads_may_be_a_list() {
    let mut gguf = GgufCopy::llama("llama-untied");
    gguf.set("llama.attention.head_count_kv", list([2, 2, 2].map(Meta::I32)));
    matches_fixture(&gguf, "llama-untied");
    gguf.set("llama.attention.head_count_kv", list([2, 2, 1].map(Meta::I32)));
    fails(&gguf, &["head_count_kv", "differs between layers"]);
}

/// A quantized file equals a safetensors folder of the dequantized weights.
fn dequantizes(name: &str, dtypes: &[GgmlDType], head_dim: usize, ids: &[u32]) {
    for &dtype in dtypes {
        let gguf = GgufCopy { dtype, ..GgufCopy::llama(name) };
        let dir = tempfile::tempdir().unwrap();
        let loaded = open(&gguf.write(dir.path())).unwrap();
        let reference = Copy::of(name).weights(|tensors| {
            for (tensor, stored) in tensors {
                let mut values = gguf.dequantized(&gguf_name(tensor));
                // Undoing the permutation of a head of width d is permuting it with halves and pairs exchanged.
                if tensor.contains("q_proj") || tensor.contains("k_proj") {
                    values = unpermuted(&values, stored.1[0], head_dim);
                }
                stored.2 = f32_bytes(&values);
            }
        });
        assert_eq!(logits(&loaded, ids), logits(&open(reference.path()).unwrap(), ids), "{dtype:?}");
        if dtype == GgmlDType::Q8_0 {
            assert_close("Q8_0", &logits(&loaded, ids), &Expected::of(name).get("logits"), 0.5);
        }
    }
}

#[test]
fn quantized_weights_are_dequantized() {
    use GgmlDType::{BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    let name = "llama-untied";
    dequantizes(name, &[F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1], 16, &Expected::of(name).ids());
}

/// K-quants have blocks of 256 elements: a wider model, with random weights.
#[test]
fn k_quantized_weights_are_dequantized() {
    use GgmlDType::{Q4K, Q5K, Q6K};
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": false,
        "bos_token_id": 1, "eos_token_id": 2,
    });
    let device = Device::flex();
    device.seed(1);
    let model = LanguageModel::init(&ModelConfig::from_json(&config).unwrap(), &device);
    let dir = tempfile::tempdir().unwrap();
    model.save_hf(dir.path()).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let name = dir.path().to_str().unwrap();
    let ids: Vec<u32> = (0..96).map(|i| i * 37 % 300).collect();
    dequantizes(name, &[Q4K, Q5K, Q6K], 32, &ids);
    // Six bits keep the model close to what it was.
    let gguf = GgufCopy { dtype: Q6K, ..GgufCopy::llama(name) };
    let file = tempfile::tempdir().unwrap();
    let (found, exact) =
        (logits(&open(&gguf.write(file.path())).unwrap(), &ids), logits(&open(dir.path()).unwrap(), &ids));
    let square = |it: &mut dyn Iterator<Item = f32>| it.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let error = square(&mut found.iter().zip(&exact).map(|(a, b)| a - b)) / square(&mut exact.iter().copied());
    assert!(error.sqrt() < 0.05, "{}", error.sqrt());
}

/// Row by row, by where [`permuted`] sends it.
fn unpermuted(values: &[f32], rows: usize, head_dim: usize) -> Vec<f32> {
    let width = values.len() / rows;
    let numbers: Vec<f32> = (0..rows).map(|row| row as f32).collect();
    let mut out = vec![0.0; values.len()];
    for (from, to) in permuted(&numbers, rows, rows / head_dim).into_iter().enumerate() {
        let to = to as usize;
        out[to * width..(to + 1) * width].copy_from_slice(&values[from * width..(from + 1) * width]);
    }
    out
}

#[track_caller]
fn fails(gguf: &GgufCopy, needles: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    fails_at(&gguf.write(dir.path()), needles);
}

#[track_caller]
fn fails_at(path: &Path, needles: &[&str]) {
    let message = open(path).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    for needle in needles {
        assert!(message.contains(needle), "{needle:?} is not in: {message}");
    }
}

/// A valid file with some of its bytes changed.
fn edited(edit: impl FnOnce(&mut Vec<u8>)) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = GgufCopy::llama("llama-tied").write(dir.path());
    let mut bytes = std::fs::read(&path).unwrap();
    edit(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

/// The place after the first occurrence of `needle`.
fn after(bytes: &[u8], needle: &str) -> usize {
    bytes.windows(needle.len()).position(|w| w == needle.as_bytes()).unwrap() + needle.len()
}

#[test]
fn unsupported_architecture() {
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.set("general.architecture", Meta::String("gemma".into()));
    fails(&gguf, &["model.gguf", "general.architecture", "gemma", "llama", "qwen2"]);
}

#[test]
fn unsupported_version() {
    for version in [0u32, 1, 4, 99] {
        let (_dir, path) = edited(|bytes| bytes[4..8].copy_from_slice(&version.to_le_bytes()));
        fails_at(&path, &["GGUF", "not supported", "versions 2 and 3"]);
    }
    let (_dir, path) = edited(|bytes| bytes[4..8].copy_from_slice(&3u32.to_be_bytes()));
    fails_at(&path, &["big-endian"]);
    let (_dir, path) = edited(|bytes| bytes[..4].copy_from_slice(b"GGML"));
    fails_at(&path, &["does not begin with the letters GGUF"]);
}

#[test]
fn unsupported_quantization() {
    // After the name: number of dimensions (4 bytes), two dimensions (16), then the type.
    let (_dir, path) = edited(|bytes| {
        let at = after(bytes, "blk.1.ffn_up.weight") + 20;
        bytes[at..at + 4].copy_from_slice(&23u32.to_le_bytes());
    });
    fails_at(&path, &["model.layers.1.mlp.up_proj.weight", "IQ4_XS", "Q4_K"]);
}

#[test]
fn split_files_and_experts() {
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.set("split.count", Meta::U16(2));
    fails(&gguf, &["split over several files", "gguf-split --merge"]);
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.set("llama.expert_count", Meta::U32(8));
    fails(&gguf, &["mixture of experts"]);
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.set("llama.rope.scaling.type", Meta::String("yarn".into()));
    fails(&gguf, &["rope scaling \"yarn\"", "not supported"]);
}

#[test]
fn metadata_that_makes_no_sense() {
    for (key, value, needles) in [
        ("llama.block_count", Meta::String("three".into()), ["llama.block_count", "a whole number"]),
        ("llama.block_count", Meta::U32(0), ["num_hidden_layers", "from 1"]),
        ("llama.attention.head_count", Meta::U32(0), ["num_attention_heads", "from 1"]),
        ("llama.attention.head_count_kv", Meta::U32(3), ["num_key_value_heads", "divisor"]),
        ("llama.embedding_length", Meta::U32(96), ["token_embd", "embed"]),
        ("llama.attention.value_length", Meta::U32(5), ["values of another width", "one head width"]),
        ("general.alignment", Meta::U32(0), ["alignment", "multiple of 8"]),
    ] {
        let mut gguf = GgufCopy::llama("llama-tied");
        gguf.set(key, value);
        let needles = if key == "llama.embedding_length" { ["embed_tokens", "[512, 96]"] } else { needles };
        fails(&gguf, &needles);
    }
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.metadata.retain(|(key, _)| key != "llama.feed_forward_length");
    fails(&gguf, &["llama.feed_forward_length", "nothing"]);
}

#[test]
fn missing_tensor() {
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.tensors.remove("blk.2.attn_v.weight");
    fails(&gguf, &["model.layers.2.self_attn.v_proj.weight", "missing"]);
    gguf.tensors.remove("token_embd.weight");
    fails(&gguf, &["token_embd.weight"]);
}

#[test]
fn overlapping_tensors() {
    let (_dir, path) = edited(|bytes| {
        let at = after(bytes, "blk.1.ffn_up.weight") + 24;
        bytes[at..at + 8].copy_from_slice(&64u64.to_le_bytes());
    });
    fails_at(&path, &["overlap", "damaged"]);
    let (_dir, path) = edited(|bytes| {
        let at = after(bytes, "blk.1.ffn_up.weight") + 24;
        bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    });
    fails_at(&path, &["blk.1.ffn_up.weight"]);
}

#[test]
fn absurd_counts() {
    for at in [8, 16, 24] {
        let (_dir, path) = edited(|bytes| bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes()));
        fails_at(&path, &["more than the file can hold"]);
    }
}

#[test]
fn empty_file() {
    let (_dir, path) = edited(Vec::clear);
    fails_at(&path, &["model.gguf", "the file ends at 0", "damaged or incomplete"]);
}

#[test]
fn strings_and_lists_of_absurd_length() {
    // After the first key: the type of its value (4 bytes), then the length of the string.
    let (_dir, path) = edited(|bytes| {
        let at = after(bytes, "general.architecture") + 4;
        bytes[at..at + 8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    });
    fails_at(&path, &["announces 1152921504606846976 entries, more than the file can hold"]);
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.set("llama.list", list([Meta::U8(7)]));
    let dir = tempfile::tempdir().unwrap();
    let path = gguf.write(dir.path());
    let mut bytes = std::fs::read(&path).unwrap();
    // After the key: the type of its value, the type of the items, then their number.
    let at = after(&bytes, "llama.list") + 8;
    for (items, needle) in [(1u64 << 60, "more than the file can hold"), (30_000_000, "more than any vocabulary")] {
        bytes[at..at + 8].copy_from_slice(&items.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(40_000_000).unwrap();
        fails_at(&path, &["model.gguf", needle]);
    }
}

#[test]
fn keys_and_tensors_that_are_there_twice() {
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.metadata.push(("llama.block_count".into(), Meta::U32(3)));
    fails(&gguf, &["model.gguf", "the metadata has `llama.block_count` twice"]);
    let (_dir, path) = edited(|bytes| {
        let at = after(bytes, "blk.1.ffn_up.weight");
        bytes[at - "1.ffn_up.weight".len()] = b'0';
    });
    fails_at(&path, &["tensor `blk.0.ffn_up.weight` is stored twice"]);
    let mut gguf = GgufCopy::llama("llama-tied");
    let norm = gguf.tensors["output_norm.weight"].clone();
    gguf.tensors.insert("model.norm.weight".into(), norm);
    fails(&gguf, &["tensor `model.norm.weight` is stored twice"]);
}

#[test]
fn numbers_that_are_none() {
    for key in ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"] {
        for wrong in [f32::NAN, f32::INFINITY] {
            let mut gguf = GgufCopy::llama("llama-tied");
            gguf.metadata.retain(|(name, _)| name != key);
            gguf.metadata.push((key.into(), Meta::F32(wrong)));
            fails(&gguf, &["model.gguf", key, "expected a number"]);
        }
    }
}

/// Wherever a file ends, and whichever header byte is wrong, the answer is an error or a model, not a panic.
#[test]
fn truncated_and_corrupted_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = GgufCopy::llama("llama-tied").write(dir.path());
    let whole = std::fs::read(&path).unwrap();
    let header = after(&whole, "output_norm.weight") + 64;
    let try_bytes = |bytes: &[u8]| {
        let file = dir.path().join("changed.gguf");
        std::fs::write(&file, bytes).unwrap();
        describe(&file, &LoadOptions::default())
    };
    for end in (0..header).step_by(7).chain([header + 5000, whole.len() - 1]) {
        let message = try_bytes(&whole[..end]).unwrap_err().to_string();
        assert!(message.contains("changed.gguf") && !message.contains('\n'), "{message}");
    }
    for at in (0..header).step_by(3) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x81;
        if let Err(error) = try_bytes(&bytes) {
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
}
