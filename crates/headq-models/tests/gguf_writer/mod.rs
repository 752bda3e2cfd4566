//! Fixtures as GGUF files, written as llama.cpp's converter does.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value as Meta};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use serde_json::Value;

use crate::common::{fixture, floats, read_tensors};

/// Metadata and tensors of a GGUF file to be.
pub struct GgufCopy {
    pub metadata: Vec<(String, Meta)>,
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    /// Type of the matrices.
    pub dtype: GgmlDType,
}

pub fn list(items: impl IntoIterator<Item = Meta>) -> Meta {
    Meta::Array(items.into_iter().collect())
}

pub fn texts(items: &[&str]) -> Meta {
    list(items.iter().map(|s| Meta::String((*s).into())))
}

impl GgufCopy {
    /// A Llama fixture, rows of queries and keys permuted for interleaved rotation.
    pub fn llama(name: &str) -> Self {
        Self::new(name, "llama", true)
    }

    /// A Qwen2 fixture, in which rows keep their order.
    pub fn qwen2(name: &str) -> Self {
        Self::new(name, "qwen2", false)
    }

    fn new(name: &str, architecture: &str, permute: bool) -> Self {
        let config: Value = serde_json::from_slice(&std::fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
        let number = |key: &str| config[key].as_u64().unwrap() as u32;
        let (heads, kv) = (number("num_attention_heads"), number("num_key_value_heads"));
        let key = |rest: &str| format!("{architecture}.{rest}");
        let mut metadata = vec![
            ("general.architecture".to_owned(), Meta::String(architecture.into())),
            (key("block_count"), Meta::U32(number("num_hidden_layers"))),
            (key("context_length"), Meta::U32(number("max_position_embeddings"))),
            (key("embedding_length"), Meta::U32(number("hidden_size"))),
            (key("feed_forward_length"), Meta::U32(number("intermediate_size"))),
            (key("attention.head_count"), Meta::U32(heads)),
            (key("attention.head_count_kv"), Meta::U32(kv)),
            (key("attention.layer_norm_rms_epsilon"), Meta::F32(config["rms_norm_eps"].as_f64().unwrap() as f32)),
            (key("rope.freq_base"), Meta::F32(config["rope_parameters"]["rope_theta"].as_f64().unwrap() as f32)),
            ("tokenizer.ggml.eos_token_id".to_owned(), Meta::U32(number("eos_token_id"))),
        ];
        if let Some(width) = config["head_dim"].as_u64() {
            metadata.push((key("attention.key_length"), Meta::U32(width as u32)));
            metadata.push((key("attention.value_length"), Meta::U32(width as u32)));
        }
        let mut tensors = BTreeMap::new();
        for (tensor, stored) in read_tensors(&fixture(name).join("model.safetensors")) {
            let mut values = floats(&stored);
            let heads = if tensor.contains("q_proj") { Some(heads) } else { tensor.contains("k_proj").then_some(kv) };
            if let Some(heads) = heads.filter(|_| permute) {
                values = permuted(&values, stored.1[0], heads as usize);
            }
            tensors.insert(gguf_name(&tensor), (stored.1, values));
        }
        Self { metadata, tensors, dtype: GgmlDType::F32 }
    }

    pub fn set(&mut self, key: &str, value: Meta) {
        self.metadata.retain(|(k, _)| k != key);
        self.metadata.push((key.into(), value));
    }

    pub fn write(&self, folder: &Path) -> PathBuf {
        let path = folder.join("model.gguf");
        let quantized: Vec<(&str, QTensor)> =
            self.tensors.iter().map(|(name, t)| (name.as_str(), self.stored(t))).collect();
        let metadata: Vec<(&str, &Meta)> = self.metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let tensors: Vec<(&str, &QTensor)> = quantized.iter().map(|(k, t)| (*k, t)).collect();
        gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &metadata, &tensors).unwrap();
        path
    }

    /// Vectors stay f32, as llama.cpp keeps them.
    fn stored(&self, (shape, values): &(Vec<usize>, Vec<f32>)) -> QTensor {
        let dtype = if shape.len() == 1 { GgmlDType::F32 } else { self.dtype };
        QTensor::quantize(&Tensor::from_slice(values, shape.as_slice(), &Device::Cpu).unwrap(), dtype).unwrap()
    }

    /// Rounds the matrices as the quantization does.
    pub fn dequantized(&self, name: &str) -> Vec<f32> {
        self.stored(&self.tensors[name]).dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }
}

/// `weights.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2)` of llama.cpp's `convert_hf_to_gguf.py`.
pub fn permuted(values: &[f32], rows: usize, heads: usize) -> Vec<f32> {
    let (width, half) = (values.len() / rows, rows / heads / 2);
    let mut out = Vec::with_capacity(values.len());
    for head in 0..heads {
        for pair in 0..half {
            for part in 0..2 {
                let row = (head * 2 + part) * half + pair;
                out.extend_from_slice(&values[row * width..(row + 1) * width]);
            }
        }
    }
    out
}

pub fn gguf_name(name: &str) -> String {
    name.replace("model.embed_tokens", "token_embd")
        .replace("model.norm", "output_norm")
        .replace("lm_head", "output")
        .replace("model.layers.", "blk.")
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("self_attn.o_proj", "attn_output")
        .replace("self_attn.q_proj", "attn_q")
        .replace("self_attn.k_proj", "attn_k")
        .replace("self_attn.v_proj", "attn_v")
        .replace("mlp.gate_proj", "ffn_gate")
        .replace("mlp.up_proj", "ffn_up")
        .replace("mlp.down_proj", "ffn_down")
}
