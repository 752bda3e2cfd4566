//! Code that `burn-onnx` generates from ONNX exports of the tiny checkpoints; see the tests.

/// GPT-2.
#[allow(missing_docs, clippy::all)]
pub mod gpt2 {
    include!(concat!(env!("OUT_DIR"), "/model/gpt2.rs"));
}

/// Llama with grouped-query attention.
#[allow(missing_docs, clippy::all)]
pub mod llama {
    include!(concat!(env!("OUT_DIR"), "/model/llama-untied.rs"));
}

/// GPT-NeoX with partial rotary positions and a parallel residual.
#[allow(missing_docs, clippy::all)]
pub mod pythia {
    include!(concat!(env!("OUT_DIR"), "/model/pythia.rs"));
}

/// The folder with the exports that the code was generated from.
pub const EXPORTS: &str = env!("OUT_DIR");
