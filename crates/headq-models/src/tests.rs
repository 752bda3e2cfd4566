//! Tests that need the parameters: gradients, training, rotary frequencies.
#![allow(clippy::unwrap_used)]

use burn::module::{Module, Param};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::log_softmax};
use headq::DenseAttention;
use serde_json::json;

use crate::config::{ModelConfig, Rope, RopeScaling};
use crate::model::LanguageModel;

fn tiny(model_type: &str) -> ModelConfig {
    let json = json!({
        "model_type": model_type, "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rotary_pct": 0.5, "max_position_embeddings": 16,
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16,
    });
    ModelConfig::from_json(&json).unwrap()
}

fn ids(device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let tokens: Vec<i32> = (0..26).map(|i| (i * i + 3 * i) % 40).collect();
    let shifted: Vec<i32> = tokens.iter().map(|t| (t + 1) % 40).collect();
    let tensor = |v: Vec<i32>| Tensor::from_data(TensorData::new(v, [2, 13]), device);
    (tensor(tokens), tensor(shifted))
}

/// Mean cross-entropy, in nats.
fn loss(model: &LanguageModel, device: &Device) -> Tensor<1> {
    let (inputs, targets) = ids(device);
    let logits = model.forward(inputs, 0, &mut DenseAttention::new());
    log_softmax(logits, 2).gather(2, targets.unsqueeze_dim(2)).mean().neg()
}

/// Numbers without structure between −1 and 1, the same on every run.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The derivative along the gradient is its norm; central differences of the loss, of fourth order, must agree.
fn check<const D: usize>(
    what: &str,
    model: &LanguageModel,
    parameter: fn(&mut LanguageModel) -> &mut Param<Tensor<D>>,
) {
    const STEP: f32 = 1e-2;
    let device = model.device();
    let mut changed = model.clone();
    let gradients = loss(model, &device).backward();
    let gradient = parameter(&mut changed).val().grad(&gradients).unwrap();
    let norm = gradient.clone().square().sum().sqrt().into_scalar::<f32>();
    let direction = gradient.div_scalar(norm);
    let at = |step: f32| {
        let mut moved = model.valid();
        let parameter = parameter(&mut moved);
        *parameter = Param::from_tensor(parameter.val() + direction.clone().mul_scalar(step));
        loss(&moved, &moved.device()).into_scalar::<f32>()
    };
    let slope = (8.0 * (at(STEP) - at(-STEP)) - (at(2.0 * STEP) - at(-2.0 * STEP))) / (12.0 * STEP);
    assert!((slope - norm).abs() <= 0.01 * norm + 1e-4, "{what}: slope {slope}, gradient norm {norm}");
}

#[test]
fn gradients_agree_with_central_differences() {
    for name in ["llama", "qwen2", "mistral", "gpt2", "gpt_neox"] {
        let device = Device::flex().autodiff();
        let mut model = LanguageModel::init(&tiny(name), &device);
        // Larger than the training initialisation, so that every layer matters to the loss, and not from the generator that
        // tests on other threads draw from.
        let mut seed = 0;
        let mut grow = |weight: &mut Param<Tensor<2>>| {
            let [rows, columns] = weight.dims();
            seed += 1;
            let data = TensorData::new(noise(rows * columns, seed), [rows, columns]);
            *weight = Param::from_tensor((Tensor::<2>::from_data(data, &device) * 0.3).require_grad());
        };
        grow(&mut model.embedding.weight);
        for block in &mut model.blocks {
            for linear in [&mut block.qkv, &mut block.out, &mut block.mlp_in, &mut block.mlp_out] {
                grow(&mut linear.weight);
            }
        }
        check(&format!("{name} embedding"), &model, |m| &mut m.embedding.weight);
        check(&format!("{name} qkv"), &model, |m| &mut m.blocks[0].qkv.weight);
        check(&format!("{name} out"), &model, |m| &mut m.blocks[0].out.weight);
        check(&format!("{name} mlp_in"), &model, |m| &mut m.blocks[1].mlp_in.weight);
        check(&format!("{name} mlp_out"), &model, |m| &mut m.blocks[1].mlp_out.weight);
    }
}

#[test]
fn a_model_trains_with_a_burn_optimizer() {
    let device = Device::flex().autodiff();
    let mut model = LanguageModel::init(&tiny("llama"), &device);
    let mut optimizer = AdamConfig::new().init();
    let first = loss(&model, &device).into_scalar::<f32>();
    for _ in 0..40 {
        let gradients = GradientsParams::from_grads(loss(&model, &device).backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
    }
    let last = loss(&model, &device).into_scalar::<f32>();
    assert!((first - 40f32.ln()).abs() < 0.1, "near uniform at first, {first} nats");
    assert!(last < 0.5 * first, "from {first} to {last}");
}

#[test]
fn parameter_count_is_the_modules() {
    for name in ["llama", "qwen2", "gpt2", "gpt_neox"] {
        let config = tiny(name);
        let model = LanguageModel::init(&config, &Device::flex());
        assert_eq!(crate::weights::parameter_count(&config), model.num_params() as u64, "{name}");
    }
}

#[test]
fn rope_scalings_stretch_frequencies() {
    let rope = |scaling| Rope { theta: 10_000.0, rotary_dim: 8, scaling }.inverse_frequencies();
    let plain = rope(RopeScaling::None);
    for (found, exact) in plain.iter().zip([1.0, 0.1, 0.01, 0.001]) {
        assert!((found - exact).abs() < 1e-15);
    }
    assert_eq!(rope(RopeScaling::Linear { factor: 4.0 })[1], plain[1] / 4.0);
    assert_eq!(rope(RopeScaling::Factors(vec![1.0, 2.0, 3.0, 4.0]))[2], plain[2] / 3.0);
    // Context 1000: 159, 15.9, 1.59 and 0.159 turns; kept from 4 on, divided up to 1, a ramp between.
    let scaling =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 1000 };
    let scaled = rope(scaling);
    assert_eq!((scaled[0], scaled[1], scaled[3]), (plain[0], plain[1], plain[3] / 8.0));
    let kept = (1000.0 * plain[2] / std::f64::consts::TAU - 1.0) / 3.0;
    assert!((scaled[2] - plain[2] * ((1.0 - kept) / 8.0 + kept)).abs() < 1e-15);
}
