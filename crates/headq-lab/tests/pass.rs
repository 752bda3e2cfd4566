//! The packed pass against decode steps, to the bit, for schemes of every kind on models of every shape.

use std::path::Path;

use burn::tensor::Device;
use headq::scheme::BaseScheme;
use headq::{DenseType, PackedCache};
use headq_lab::evaluate::{Sources, head_shape};
use headq_lab::pass::{Pass, PassName};
use headq_lab::text::{TextInfo, Windows};
use headq_lab::{LabError, Silent, calibrate};
use headq_models::{Decoder, LanguageModel, LoadOptions, LoadedModel, load};

/// Learned positions, both branches on one stream, rotary positions, a sliding window, biases.
const MODELS: [&str; 5] = ["gpt2", "pythia", "llama-untied", "mistral-sw16", "qwen2-tied"];
const SCHEMES: [&str; 10] = [
    "dense",
    "kivi-2(g=8,r=4)",
    "kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)",
    "kivi-2(g=8,r=4,sinks=2)+score-optimal(rank=2,bits=3,scope=query-head)/token-2",
    "kivi-3(g=8,r=4,rounding=score-aware)/a2-2",
    "rotated-3(g=4,r=2)/mse-3",
    "grid-4(g=8,r=0,center)/token-4",
    "klt-2(g=8,r=4)",
    "klt-1.5(g=8,r=4,ranges=lloyd,metric=fisher,pool=model)/klt-2(ranges=lloyd,pool=model)",
    "token-4(g=2,r=0)/recency-2",
];

fn open(name: &str) -> LoadedModel {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../headq-models/tests/fixtures/tiny").join(name);
    load(path, &Device::flex(), &LoadOptions::default()).expect("the fixture is whole")
}

fn window(tokens: u32, seed: u32, vocab: usize) -> Vec<u32> {
    (0..tokens).map(|i| (i * i * 31 + 97 * seed + i) % vocab as u32).collect()
}

/// Statistics with gradients, of residuals of the base quantizers in [`SCHEMES`] that need their own.
fn sources(loaded: &LoadedModel) -> Sources {
    let text =
        TextInfo { path: "made up".into(), sha256: "0".into(), chars: 0, tokens: 192, tokens_sha256: "0".into() };
    let windows = (0..4).map(|w| window(48, w, loaded.config().vocab_size)).collect();
    let texts = [Windows { text, windows }];
    let mut all = Sources::default();
    for base in ["klt-2(g=8,r=4)", "kivi-2(g=8,r=4,sinks=2)"] {
        let base: BaseScheme = base.parse().expect("a base quantizer");
        let stats = calibrate(&loaded.model, &loaded.fingerprint, &texts, false, base, Some(1), 1, &Silent);
        all.stats.push((format!("{base}").into(), stats.expect("a calibration")));
    }
    all
}

#[test]
fn packed_passes_have_the_bits_of_decode_steps() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in MODELS {
        let loaded = open(name);
        let (sources, config) = (sources(&loaded), loaded.config());
        let ids = window(45, 9, config.vocab_size);
        for scheme in SCHEMES {
            let planned = sources.plan(scheme, config, 0).unwrap_or_else(|e| panic!("{name}, {scheme}: {e}"));
            for dense in [DenseType::F32, DenseType::F16] {
                let cache = || {
                    let modules = planned.modules(config.num_layers, &Device::flex());
                    PackedCache::new(modules, head_shape(config), dense).expect("the scheme fits")
                };
                let saved = |mut cache: PackedCache| {
                    let path = folder.path().join("cache");
                    cache.save(&path, name).expect("the folder can be written");
                    std::fs::read(path).expect("it was written")
                };
                let (mut decoder, mut expected, mut steps) = (decoder(&loaded), Vec::new(), cache());
                for (t, token) in ids.iter().enumerate() {
                    expected.extend_from_slice(decoder.step(*token, t, &mut steps).expect("a step"));
                }
                let bytes = (steps.bytes(), saved(steps));
                for chunk in [1, 7, ids.len()] {
                    let (mut decoder, mut found, mut passes) = (self::decoder(&loaded), Vec::new(), cache());
                    for (i, tokens) in ids.chunks(chunk).enumerate() {
                        let take = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
                        decoder.pass(tokens, i * chunk, &mut passes, take).expect("a pass");
                    }
                    assert_eq!(passes.len(), ids.len());
                    assert_eq!(found, expected, "{name}, {scheme}, {dense}, {chunk} at a time");
                    assert_eq!((passes.bytes(), saved(passes)), bytes, "{name}, {scheme}, {dense}, {chunk} at a time");
                }
            }
        }
    }
}

/// A model under autodiff is not plain memory, as one on another device is not.
#[test]
fn models_elsewhere_go_through_tensors() {
    let (here, config) = (open("gpt2"), open("gpt2").config().clone());
    let elsewhere = LanguageModel::init(&config, &Device::flex().autodiff());
    let choose = |asked, dense, model: &LanguageModel| Pass::choose(asked, dense, model, "cuda:1");
    assert_eq!(choose(None, None, &here.model).expect("a pass"), Pass::Packed(DenseType::F32));
    assert_eq!(choose(Some(PassName::Tensors), None, &here.model).expect("a pass"), Pass::Tensors);
    assert_eq!(choose(None, None, &elsewhere).expect("a pass"), Pass::Tensors);
    for (asked, dense) in [(Some(PassName::Packed), None), (None, Some(DenseType::F16))] {
        let error = choose(asked, dense, &elsewhere).expect_err("there is no packed pass");
        assert!(matches!(&error, LabError::Usage(e) if e.contains("cuda:1") && e.contains("flex")), "{error}");
    }
}

fn decoder(loaded: &LoadedModel) -> Decoder {
    Decoder::new(&loaded.model).expect("a model on the host")
}
