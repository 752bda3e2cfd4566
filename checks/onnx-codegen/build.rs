//! Puts each export together, and has `burn-onnx` write code for it.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use onnx_ir::Message;

#[path = "../../crates/headq-models/tests/onnx_files/assemble.rs"]
mod assemble;

fn main() {
    let fixtures =
        PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").unwrap()).join("../../crates/headq-models/tests/fixtures");
    let out = PathBuf::from(std::env::var("OUT_DIR").unwrap());
    let mut models = burn_onnx::ModelGen::new();
    for name in ["gpt2", "llama-untied", "pythia"] {
        let graph = fixtures.join("onnx").join(name).join("fixed.onnx");
        println!("cargo:rerun-if-changed={}", graph.display());
        let model = assemble::model(&graph, &fixtures.join("tiny").join(name).join("model.safetensors"));
        let file = out.join(format!("{name}.onnx"));
        std::fs::write(&file, model.write_to_bytes().unwrap()).unwrap();
        models.input(file.to_str().unwrap());
    }
    models.out_dir("model/").run_from_script();
}
