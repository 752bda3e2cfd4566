//! Fixtures, expected values and model surgery shared by the tests.
#![allow(dead_code, clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use headq::{Attention, AttentionSite, DecodeAttention, DenseAttention};
use headq_models::{LoadOptions, LoadedModel, ModelError, load};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

pub const ALL: [&str; 10] = [
    "gpt2",
    "llama-tied",
    "llama-untied",
    "llama3-ropescaled",
    "mistral-nosw",
    "mistral-sw16",
    "neox-seqres",
    "pythia",
    "qwen2-tied",
    "qwen2-untied",
];

/// A stored tensor: type, shape, little-endian bytes.
pub type Stored = (Dtype, Vec<usize>, Vec<u8>);

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny").join(name)
}

pub fn open(path: &Path) -> Result<LoadedModel, ModelError> {
    load(path, &Device::flex(), &LoadOptions::default())
}

pub fn read_tensors(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let own = |t: TensorView| (t.dtype(), t.shape().to_vec(), t.data().to_vec());
    file.tensors().into_iter().map(|(name, t)| (name, own(t))).collect()
}

pub fn write_tensors<'a>(path: &Path, tensors: impl IntoIterator<Item = (&'a String, &'a Stored)>) {
    let views =
        tensors.into_iter().map(|(name, (d, shape, data))| (name, TensorView::new(*d, shape.clone(), data).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

pub fn floats(stored: &Stored) -> Vec<f32> {
    assert_eq!(stored.0, Dtype::F32);
    stored.2.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().as_slice::<f32>().unwrap().to_vec()
}

/// Returns the greatest difference.
#[track_caller]
pub fn assert_close(what: &str, found: &[f32], expected: &[f32], bound: f32) -> f32 {
    assert_eq!(found.len(), expected.len(), "{what}");
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= bound, "{what}: differs by {worst:e}, allowed {bound:e}");
    worst
}

/// `expected.safetensors` of a fixture: what transformers computed.
pub struct Expected(BTreeMap<String, Stored>);

impl Expected {
    pub fn of(name: &str) -> Self {
        Self(read_tensors(&fixture(name).join("expected.safetensors")))
    }

    /// Two sequences of 48 tokens, one after the other.
    pub fn ids(&self) -> Vec<u32> {
        self.0["input_ids"].2.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect()
    }

    pub fn get(&self, name: &str) -> Vec<f32> {
        floats(&self.0[name])
    }
}

/// Dense attention that remembers the keys and values it saw.
#[derive(Default)]
pub struct Capture {
    inner: DenseAttention,
    pub sites: Vec<AttentionSite>,
    pub keys: Vec<Tensor<4>>,
    pub values: Vec<Tensor<4>>,
}

impl Attention for Capture {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        self.sites.push(*site);
        self.keys.push(k.clone());
        self.values.push(v.clone());
        self.inner.attend(site, q, k, v)
    }
}

/// Softmax attention by its definition, in f64, over keys and values that it keeps; a prompt goes through it token by token, too.
pub struct Plain {
    head_dim: usize,
    /// Of each layer: `[tokens, kv_heads · head_dim]`.
    pub layers: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Plain {
    pub fn new(head_dim: usize) -> Self {
        Self { head_dim, layers: Vec::new() }
    }
}

impl DecodeAttention for Plain {
    fn attend_one(&mut self, site: &AttentionSite, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
        if self.layers.len() <= site.layer {
            self.layers.resize(site.layer + 1, Default::default());
        }
        let (keys, values) = &mut self.layers[site.layer];
        let (d, width) = (self.head_dim, k.len());
        assert_eq!(keys.len(), site.start * width, "tokens follow each other");
        keys.extend_from_slice(k);
        values.extend_from_slice(v);
        let group = q.len() / width;
        let seen = site.window.map_or(0, |w| (site.start + 1).saturating_sub(w))..=site.start;
        for (h, (q, out)) in q.chunks(d).zip(out.chunks_mut(d)).enumerate() {
            let at = |j: usize| j * width + h / group * d;
            let dot = |j: usize| q.iter().zip(&keys[at(j)..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let weights: Vec<f64> = seen.clone().map(|j| (dot(j) * site.scale).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (c, out) in out.iter_mut().enumerate() {
                let read = seen.clone().zip(&weights).map(|(j, w)| w * f64::from(values[at(j) + c]));
                *out = (read.sum::<f64>() / sum) as f32;
            }
        }
    }
}

impl Attention for Plain {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let [_, heads, new, d] = q.dims();
        let width = k.dims()[1] * d;
        // One token after the other.
        let [q, k, v] = [q, k, v].map(|x| host(x.swap_dims(1, 2)));
        let mut out = vec![0.0; q.len()];
        for (t, out) in out.chunks_mut(heads * d).enumerate() {
            let site = AttentionSite { start: site.start + t, ..*site };
            let own = t * width..(t + 1) * width;
            self.attend_one(&site, &q[t * heads * d..][..heads * d], &k[own.clone()], &v[own], out);
        }
        Tensor::<4>::from_data(TensorData::new(out, [1, new, heads, d]), &Device::flex()).swap_dims(1, 2)
    }
}

/// Logits of the fixture's input, dense.
pub fn logits(loaded: &LoadedModel, ids: &[u32]) -> Vec<f32> {
    let ids = loaded.model.ids(ids, 2, 0).unwrap();
    host(loaded.model.forward(ids, 0, &mut DenseAttention::new()))
}

/// A folder with a fixture's config (changed by `edit`) and weights (changed by `surgery`).
pub struct Copy {
    pub dir: tempfile::TempDir,
}

impl Copy {
    pub fn of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(fixture(name).join(file), dir.path().join(file)).unwrap();
        }
        Self { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn config(self, edit: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Self {
        let mut json: Value = serde_json::from_slice(&std::fs::read(self.file("config.json")).unwrap()).unwrap();
        edit(json.as_object_mut().unwrap());
        std::fs::write(self.file("config.json"), json.to_string()).unwrap();
        self
    }

    pub fn weights(self, surgery: impl FnOnce(&mut BTreeMap<String, Stored>)) -> Self {
        let path = self.file("model.safetensors");
        let mut tensors = read_tensors(&path);
        surgery(&mut tensors);
        write_tensors(&path, &tensors);
        self
    }

    /// The raw bytes of the weights file.
    pub fn bytes(self, surgery: impl FnOnce(&mut Vec<u8>)) -> Self {
        let path = self.file("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        surgery(&mut bytes);
        std::fs::write(path, bytes).unwrap();
        self
    }

    /// Distributes the weights over `count` shards with an index.
    pub fn sharded(self, count: usize) -> Self {
        let single = self.file("model.safetensors");
        let tensors = read_tensors(&single);
        std::fs::remove_file(single).unwrap();
        let shard = |i: usize| format!("model-{:05}-of-{count:05}.safetensors", i % count + 1);
        let map: BTreeMap<&String, String> = tensors.keys().enumerate().map(|(i, name)| (name, shard(i))).collect();
        for i in 0..count {
            write_tensors(&self.file(&shard(i)), tensors.iter().filter(|(name, _)| map[name] == shard(i)));
        }
        let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map});
        std::fs::write(self.file("model.safetensors.index.json"), index.to_string()).unwrap();
        self
    }
}
