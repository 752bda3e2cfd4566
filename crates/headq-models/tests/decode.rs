//! Decode steps on the host against the Burn module and transformers.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

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

/// Logits after each token, the last hidden state and what the cache holds, of passes over `chunk` tokens each.
fn passes(model: &LanguageModel, ids: &[u32], chunk: usize) -> (Vec<f32>, Vec<f32>, Plain) {
    let (mut decoder, mut cache) = (Decoder::new(model).unwrap(), Plain::new(model.config().head_dim));
    let mut all = Vec::new();
    for (i, tokens) in ids.chunks(chunk).enumerate() {
        let mut places = Vec::new();
        decoder
            .pass(tokens, i * chunk, &mut cache, |t, logits| {
                places.push(t);
                all.extend_from_slice(logits);
            })
            .unwrap();
        assert_eq!(places, (0..tokens.len()).collect::<Vec<_>>());
    }
    (all, decoder.hidden().to_vec(), cache)
}

#[test]
fn passes_have_the_bits_of_steps() {
    let check = |name: &str, model: &LanguageModel, ids: &[u32]| {
        let (mut decoder, mut cache) = (Decoder::new(model).unwrap(), Plain::new(model.config().head_dim));
        let logits = decode(&mut decoder, ids, 0, &mut cache);
        for chunk in [1, 7, ids.len()] {
            let (found, hidden, filled) = passes(model, ids, chunk);
            assert_eq!(found, logits, "{name}, {chunk} at a time");
            assert_eq!(hidden, decoder.hidden(), "{name}, {chunk} at a time");
            assert_eq!(filled.layers, cache.layers, "{name}, {chunk} at a time");
        }
    };
    for name in ALL {
        let ids = &Expected::of(name).ids()[..48];
        for precision in [Precision::F32, Precision::F16, Precision::Bf16] {
            let options = LoadOptions { precision, ..Default::default() };
            let loaded = load(fixture(name), &Device::flex(), &options).unwrap();
            check(name, &loaded.model, ids);
        }
    }
    let ids: Vec<u32> = (0..40).map(|i| i * 223 % 9_001).collect();
    for tied in [true, false] {
        check("wide", &wide(tied), &ids);
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
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(|| passes(&model, &tokens, 4).0), one);
        }
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
    // A pass that fails later on does nothing, either.
    let none = |_: usize, _: &[f32]| panic!("no logits of a pass that fails");
    let error = decoder.pass(&[2, 3, vocab as u32], 1, &mut cache, none).unwrap_err();
    assert!(matches!(error, ModelError::TokenOutOfRange { position: 3, .. }), "{error}");
    let error = decoder.pass(&[2, 3], limit - 1, &mut cache, none).unwrap_err();
    assert!(matches!(error, ModelError::ContextTooLong { .. }), "{error}");
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
