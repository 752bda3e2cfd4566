//! Decode steps on the host against the Burn module and transformers.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::hint::black_box;
use std::time::Instant;

use burn::tensor::Device;
use common::{ALL, Copy, Expected, Plain, assert_close, fixture, floats, host, open};
use half::{bf16, f16};
use headq::device::Precision;
use headq::{AttentionSite, DecodeAttention};
use headq_models::{Decoder, LanguageModel, LoadOptions, ModelConfig, ModelError, load};
use safetensors::tensor::Dtype;
use serde_json::json;

/// Logits after each token from `start` on.
fn decode(decoder: &mut Decoder, tokens: &[u32], start: usize, cache: &mut Plain) -> Vec<f32> {
    let step = |(t, token): (usize, &u32)| decoder.step(*token, start + t, cache).unwrap().to_vec();
    tokens.iter().enumerate().flat_map(step).collect()
}

/// 1e-5 of the largest logit, so that nothing hides behind the scale of a model.
fn bound(logits: &[f32]) -> f32 {
    1e-5 * logits.iter().fold(0.0f32, |a, b| a.max(b.abs()))
}

#[test]
fn token_by_token_equals_the_whole_pass() {
    for name in ALL {
        let (loaded, expected) = (open(&fixture(name)).unwrap(), Expected::of(name));
        let mut decoder = Decoder::new(&loaded.model).unwrap();
        let (ids, head_dim) = (expected.ids(), loaded.config().head_dim);
        let mut all = Vec::new();
        for ids in ids.chunks(48) {
            let found = decode(&mut decoder, ids, 0, &mut Plain::new(head_dim));
            let tensor = loaded.model.ids(ids, 1, 0).unwrap();
            let hidden = loaded.model.hidden(tensor, 0, &mut Plain::new(head_dim));
            assert_close(name, decoder.hidden(), &host(hidden.clone())[47 * decoder.hidden().len()..], 1e-4);
            let module = host(loaded.model.logits(hidden));
            assert_close(name, &found, &module, bound(&module));
            all.extend(found);
        }
        assert_close(name, &all, &expected.get("logits"), 2e-4);
    }
}

#[test]
fn decoding_goes_on_after_a_prompt() {
    for name in ALL {
        let (loaded, ids) = (open(&fixture(name)).unwrap(), Expected::of(name).ids());
        let model = &loaded.model;
        let whole =
            host(model.forward(model.ids(&ids[..48], 1, 0).unwrap(), 0, &mut Plain::new(loaded.config().head_dim)));
        // Less and more than the window of mistral-sw16.
        for prompt in [1, 10, 30] {
            let mut cache = Plain::new(loaded.config().head_dim);
            model.forward(model.ids(&ids[..prompt], 1, 0).unwrap(), 0, &mut cache);
            let found = decode(&mut Decoder::new(model).unwrap(), &ids[prompt..48], prompt, &mut cache);
            assert_close(name, &found, &whole[prompt * loaded.config().vocab_size..], bound(&whole));
        }
    }
}

#[test]
fn half_precision_weights_are_widened_exactly() {
    for name in ALL {
        let round = |precision: Precision, x: f32| match precision {
            Precision::F16 => f16::from_f32(x).to_f32(),
            _ => bf16::from_f32(x).to_f32(),
        };
        for precision in [Precision::F16, Precision::Bf16] {
            // What --dtype leaves in f32, the norms, is not rounded.
            let rounded = Copy::of(name).weights(|tensors| {
                for stored in tensors.iter_mut().filter(|(name, _)| !name.contains("norm") && !name.contains("ln_")) {
                    let values = floats(stored.1).into_iter().map(|x| round(precision, x));
                    *stored.1 = (Dtype::F32, stored.1.1.clone(), values.flat_map(f32::to_le_bytes).collect());
                }
            });
            let options = LoadOptions { precision, ..Default::default() };
            let half = load(fixture(name), &Device::flex(), &options).unwrap();
            let full = open(rounded.path()).unwrap();
            let ids = &Expected::of(name).ids()[..20];
            let run = |model: &LanguageModel| {
                let mut decoder = Decoder::new(model).unwrap();
                (decode(&mut decoder, ids, 0, &mut Plain::new(model.config().head_dim)), decoder.bytes_per_step())
            };
            let ((found, bytes), (expected, full_bytes)) = (run(&half.model), run(&full.model));
            assert_close(name, &found, &expected, bound(&expected));
            assert_eq!(2 * bytes, full_bytes);
        }
    }
}

/// Large enough for several tasks in every product, in odd sizes.
fn wide(tied: bool) -> LanguageModel {
    let config = json!({"model_type": "llama", "vocab_size": 9_001, "hidden_size": 328, "intermediate_size": 1_111,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 42,
        "tie_word_embeddings": tied});
    let device = Device::flex();
    device.seed(7);
    LanguageModel::init(&ModelConfig::from_json(&config).unwrap(), &device)
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for tied in [true, false] {
        let model = wide(tied);
        let tokens = [5u32, 8_999, 17, 0];
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| decode(&mut Decoder::new(&model).unwrap(), &tokens, 0, &mut Plain::new(42)))
        };
        let one = run(1);
        assert_eq!(run(2), one);
        assert_eq!(run(5), one);
        let module = host(model.forward(model.ids(&tokens, 1, 0).unwrap(), 0, &mut Plain::new(42)));
        assert_close("wide", &one, &module, bound(&module));
    }
}

#[test]
fn the_model_may_be_dropped_and_decoders_cloned() {
    let model = wide(true);
    let expected = decode(&mut Decoder::new(&model).unwrap(), &[3, 4], 0, &mut Plain::new(42));
    let mut decoder = Decoder::new(&model).unwrap();
    drop(model);
    assert_eq!(decode(&mut decoder.clone(), &[3, 4], 0, &mut Plain::new(42)), expected);
    assert_eq!(decode(&mut decoder, &[3, 4], 0, &mut Plain::new(42)), expected);
}

#[test]
fn impossible_steps_are_errors_and_change_nothing() {
    let loaded = open(&fixture("gpt2")).unwrap();
    let (vocab, limit) = (loaded.config().vocab_size, loaded.config().max_position_embeddings);
    let mut decoder = Decoder::new(&loaded.model).unwrap();
    let mut cache = Plain::new(loaded.config().head_dim);
    decoder.step(1, 0, &mut cache).unwrap();
    for (token, position) in [(vocab as u32, 1), (u32::MAX, 1)] {
        let error = decoder.step(token, position, &mut cache).unwrap_err();
        assert!(matches!(error, ModelError::TokenOutOfRange { token: t, position: 1, .. } if t == token), "{error}");
    }
    let error = decoder.step(1, limit, &mut cache).unwrap_err();
    assert!(matches!(error, ModelError::ContextTooLong { needed, limit: l } if needed == limit + 1 && l == limit));
    assert!(cache.layers.iter().all(|(keys, _)| keys.len() == loaded.config().kv_width()));
    decoder.step(1, 1, &mut cache).unwrap();
    // Rotary positions have no such limit.
    let loaded = open(&fixture("llama-tied")).unwrap();
    struct Nothing;
    impl DecodeAttention for Nothing {
        fn attend_one(&mut self, _: &AttentionSite, _: &[f32], _: &[f32], _: &[f32], out: &mut [f32]) {
            out.fill(0.0);
        }
    }
    Decoder::new(&loaded.model).unwrap().step(1, 1_000_000, &mut Nothing).unwrap();
}

#[test]
fn models_elsewhere_are_refused() {
    let config = json!({"model_type": "gpt2", "vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 4});
    let model = LanguageModel::init(&ModelConfig::from_json(&config).unwrap(), &Device::flex().autodiff());
    let error = Decoder::new(&model).unwrap_err().to_string();
    assert!(error.contains("flex") && error.contains("another device"), "{error}");
}

/// Resident memory of this process, bytes.
#[cfg(target_os = "linux")]
fn resident() -> f64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<f64>().unwrap() * 4096.0
}

/// Prints how fast a step streams SmolLM2-135M's shapes beside a plain read of as many bytes. `cargo test --release --workspace
/// --test decode -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
#[cfg(target_os = "linux")]
fn steps_run_at_memory_speed() {
    struct Nothing;
    impl DecodeAttention for Nothing {
        fn attend_one(&mut self, _: &AttentionSite, _: &[f32], _: &[f32], _: &[f32], out: &mut [f32]) {
            out.fill(0.0);
        }
    }
    let config = json!({"model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": true});
    let model = LanguageModel::init(&ModelConfig::from_json(&config).unwrap(), &Device::flex());
    // Parameters are made on first use.
    model.forward(model.ids(&[1], 1, 0).unwrap(), 0, &mut Plain::new(64));
    let before = resident();
    let mut decoder = Decoder::new(&model).unwrap();
    let bytes = decoder.bytes_per_step();
    println!("weights {:.1} MB, a decoder adds {:.2} MB", bytes as f64 / 1e6, (resident() - before) / 1e6);
    let plain = vec![1.0f32; bytes / 4];
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (mut reads, mut steps) = (Vec::new(), Vec::new());
        for position in 0..40 {
            let start = Instant::now();
            black_box(read_all(&pool, &plain));
            reads.push(start.elapsed().as_secs_f64());
            let start = Instant::now();
            pool.install(|| black_box(decoder.step(7, position, &mut Nothing).unwrap()[0]));
            steps.push(start.elapsed().as_secs_f64());
        }
        let (read, step) = (median(reads), median(steps));
        let speed = |t: f64| bytes as f64 / t / 1e9;
        println!(
            "{threads} threads: plain read {:.1} GB/s, step {:.1} GB/s ({:.2} ms, {:.0} %)",
            speed(read),
            speed(step),
            step * 1e3,
            100.0 * read / step
        );
    }
}

/// The sum of many numbers, as fast as they can be read.
#[cfg(target_os = "linux")]
fn read_all(pool: &rayon::ThreadPool, data: &[f32]) -> f32 {
    use rayon::prelude::*;
    let sum = |chunk: &[f32]| {
        let mut lanes = [0.0f32; 128];
        for x in chunk.as_chunks::<128>().0 {
            for i in 0..128 {
                lanes[i] += x[i];
            }
        }
        lanes.iter().sum::<f32>()
    };
    pool.install(|| data.par_chunks(1 << 18).map(sum).sum())
}
