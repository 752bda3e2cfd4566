//! The generated code and the imported model compute the same logits from the same file.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};
use headq::DenseAttention;
use headq_models::{LoadOptions, load};

/// One batch and length, with which the exports were made.
const SHAPE: [usize; 2] = [2, 48];

fn ids() -> Vec<u32> {
    (0..96).map(|i| (i * i * 7 + 13 * i + 5) % 512).collect()
}

fn compare(name: &str, generated: impl Fn(Tensor<2, Int>) -> Tensor<3>) {
    let fixture =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/headq-models/tests/fixtures/tiny").join(name);
    let options = LoadOptions { config: Some(fixture.join("config.json")), ..LoadOptions::default() };
    let file = Path::new(onnx_codegen_check::EXPORTS).join(format!("{name}.onnx"));
    let imported = load(file, &Device::flex(), &options).unwrap().model;
    let ours = imported.forward(imported.ids(&ids(), 2, 0).unwrap(), 0, &mut DenseAttention::new());
    let numbers: Vec<i64> = ids().into_iter().map(i64::from).collect();
    let theirs = generated(Tensor::from_data(TensorData::new(numbers, SHAPE), &Device::flex()));
    let worst = (ours - theirs).abs().max().into_scalar::<f32>();
    println!("{name}: differs by {worst:e}");
    assert!(worst < 1e-4, "{name}: differs by {worst:e}");
}

#[test]
fn generated_code_computes_the_same_logits() {
    compare("gpt2", |ids| onnx_codegen_check::gpt2::Model::default().forward(ids));
    compare("llama-untied", |ids| onnx_codegen_check::llama::Model::default().forward(ids));
    compare("pythia", |ids| onnx_codegen_check::pythia::Model::default().forward(ids));
}
