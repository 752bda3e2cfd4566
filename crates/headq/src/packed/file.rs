//! Saved caches: one safetensors file.
//!
//! Tensors are named `layers.L.GROUP.PART`: dense `keys.sinks`, `keys.window`, `values.sinks`, `values.window` (`[kv_heads, tokens,
//! head_dim]`, f16 or f32), packed `keys.codes`, `side.codes`, `values.codes` (bytes, as [`super`] lays them out), their scales and
//! zeros in `keys.ranges`, `side.ranges`, `values.ranges`, and under `a2` `values.masses`. The header, under `headq` in the metadata,
//! says which scheme, heads and model they belong to, and the SHA-256 of everything, so that a damaged file is refused.

use std::borrow::Cow;
use std::io::Write;
use std::path::Path;

use safetensors::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::PackedCache;
use super::paged::Paged;
use super::reals::{DenseType, Reals};
use crate::Error;
use crate::budget::HeadShape;
use crate::codec::HeadqAttention;

/// Version of the layout.
const SCHEMA: u32 = 3;
/// Key of the header in the metadata.
const HEADER: &str = "headq";

/// How far a layer is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Counts {
    pub len: usize,
    /// Tokens after the sinks that are coded, and the first that is held dense.
    pub keys: [usize; 2],
    pub values: [usize; 2],
}

/// Pages that are saved.
pub(super) enum Part<'a> {
    Bytes { pages: &'a mut Paged<u8>, len: usize },
    Reals { pages: &'a mut Reals, start: usize, len: usize },
    Masses { values: &'a mut Vec<f32>, len: usize },
}

impl Part<'_> {
    /// Type and bytes of what is there.
    fn save(&self) -> (Dtype, Vec<u8>) {
        match self {
            Part::Bytes { pages, .. } => (Dtype::U8, pages.snapshot(0)),
            Part::Reals { pages, start, .. } => {
                let (kind, bytes) = pages.snapshot(*start);
                (dtype(kind), bytes)
            }
            Part::Masses { values, .. } => (Dtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        }
    }

    /// Type and number of bytes that the part has when it is saved.
    fn expected(&self) -> (Dtype, usize) {
        match self {
            Part::Bytes { pages, len } => (Dtype::U8, pages.snapshot_len(0, *len)),
            Part::Reals { pages, start, len } => {
                let (kind, bytes) = pages.snapshot_len(*start, *len);
                (dtype(kind), bytes)
            }
            Part::Masses { len, .. } => (Dtype::F32, 4 * len),
        }
    }

    fn restore(self, bytes: &[u8]) {
        match self {
            Part::Bytes { pages, len } => pages.restore(0, len, bytes),
            Part::Reals { pages, start, len } => pages.restore(start, len, bytes),
            Part::Masses { values, .. } => {
                *values = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            }
        }
    }
}

fn dtype(kind: DenseType) -> Dtype {
    match kind {
        DenseType::F16 => Dtype::F16,
        DenseType::F32 => Dtype::F32,
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    schema: u32,
    kind: String,
    /// What the caller calls the model.
    model: String,
    scheme: String,
    dense: String,
    shape: HeadShape,
    layers: Vec<Counts>,
    /// SHA-256 of the calibrated numbers that say what key codes stand for.
    #[serde(default)]
    calibration: String,
    /// Of the names and bytes of all tensors, in the order of names.
    sha256: String,
}

/// A tensor to be written.
struct Saved {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for &Saved {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// SHA-256 over names and bytes, in the order of names.
fn digest<'a>(tensors: impl Iterator<Item = (&'a str, &'a [u8])>) -> String {
    let mut all: Vec<_> = tensors.collect();
    all.sort_unstable();
    let mut hash = Sha256::new();
    for (name, bytes) in all {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// SHA-256 of what codecs know of keys from calibration or training.
fn calibration<'a>(layers: impl Iterator<Item = &'a HeadqAttention>) -> String {
    let mut hash = Sha256::new();
    for layer in layers {
        let constants: Vec<f32> = layer.key_constants().into_iter().chain(layer.value_constants()).collect();
        hash.update((constants.len() as u64).to_le_bytes());
        constants.iter().for_each(|x| hash.update(x.to_le_bytes()));
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

impl PackedCache {
    /// Writes the cache to a file, whole or not at all; an existing file is replaced. `model` is what [`PackedCache::load`] is to be
    /// given again: a model's fingerprint, say.
    ///
    /// # Errors
    /// [`Error::CacheFile`] where the file cannot be written.
    pub fn save(&mut self, path: &Path, model: &str) -> Result<(), Error> {
        let scheme = self.layers.first().map_or_else(|| "dense".into(), |l| l.module().scheme().to_string());
        let layers: Vec<Counts> = self.layers.iter().map(|layer| layer.counts()).collect();
        let mut tensors: Vec<(String, Saved)> = Vec::new();
        for (index, (layer, counts)) in self.layers.iter_mut().zip(&layers).enumerate() {
            for (name, part) in layer.parts(counts) {
                let (dtype, bytes) = part.save();
                let shape = vec![bytes.len() / (dtype.bitsize() / 8)];
                tensors.push((format!("layers.{index}.{name}"), Saved { dtype, shape, bytes }));
            }
        }
        let header = Header {
            schema: SCHEMA,
            kind: "packed cache".into(),
            model: model.into(),
            scheme,
            dense: self.dense.to_string(),
            shape: self.shape,
            layers,
            calibration: calibration(self.layers.iter().map(|layer| layer.module())),
            sha256: digest(tensors.iter().map(|(name, saved)| (name.as_str(), saved.bytes.as_slice()))),
        };
        let fail = |reason: String| Error::CacheFile { file: path.display().to_string(), reason };
        let header = serde_json::to_string(&header).map_err(|e| fail(e.to_string()))?;
        let metadata = [(HEADER.to_string(), header)].into_iter().collect();
        let views = tensors.iter().map(|(name, saved)| (name.as_str(), saved));
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|e| fail(e.to_string()))?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let write = || -> std::io::Result<()> {
            let mut file = tempfile::Builder::new().prefix(".headq-").suffix(".tmp").tempfile_in(folder)?;
            file.write_all(&bytes)?;
            file.as_file().sync_all()?;
            file.persist(path)?;
            Ok(())
        };
        write().map_err(|e| fail(format!("cannot be written: {}", e.kind())))
    }

    /// Reads a cache that [`PackedCache::save`] wrote, bit for bit as it was, for the codecs that it was made with.
    ///
    /// # Errors
    /// [`Error::CacheFile`] where the file cannot be read, is damaged, or belongs to another model, scheme, shape, calibration or basis:
    /// what was expected and what was found.
    pub fn load(path: &Path, model: &str, layers: Vec<HeadqAttention>, shape: HeadShape) -> Result<Self, Error> {
        let fail = |reason: String| Error::CacheFile { file: path.display().to_string(), reason };
        let bytes = std::fs::read(path).map_err(|e| fail(format!("cannot be read: {}", e.kind())))?;
        let damaged = |what: &str| fail(format!("is damaged ({what}); save the cache again"));
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| damaged(&e.to_string()))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| damaged(&e.to_string()))?;
        let header = metadata.metadata().as_ref().and_then(|m| m.get(HEADER));
        let header = header.ok_or_else(|| fail("is not a saved cache: it has no headq header".into()))?;
        let header: Header =
            serde_json::from_str(header).map_err(|e| fail(format!("is not a saved cache of this program: {e}")))?;
        let scheme = layers.first().map_or_else(|| "dense".into(), |l| l.scheme().to_string());
        let dense: DenseType = header.dense.parse().map_err(|e: String| damaged(&e))?;
        for (what, found, expected) in [
            ("kind", header.kind.clone(), "packed cache".into()),
            ("schema", header.schema.to_string(), SCHEMA.to_string()),
            ("model", header.model.clone(), model.to_string()),
            ("scheme", header.scheme.clone(), scheme),
            ("shape", format!("{:?}", header.shape), format!("{shape:?}")),
            ("calibration", header.calibration.clone(), calibration(layers.iter())),
        ] {
            if found != expected {
                return Err(fail(format!(
                    "{what} is {found}, expected {expected}; the cache belongs to something else"
                )));
            }
        }
        let found = tensors.tensors();
        if digest(found.iter().map(|(name, view)| (name.as_str(), view.data()))) != header.sha256 {
            return Err(damaged("its contents are not what its SHA-256 says"));
        }
        let mut cache = Self::new(layers, shape, dense)?;
        if header.layers.len() != cache.layers.len() {
            return Err(damaged("the number of layers"));
        }
        let mut used = 0;
        for (index, (layer, counts)) in cache.layers.iter_mut().zip(&header.layers).enumerate() {
            if !layer.possible(counts) {
                return Err(damaged(&format!("counts of layer {index}")));
            }
            for (name, part) in layer.parts(counts) {
                let name = format!("layers.{index}.{name}");
                let view = tensors.tensor(&name).map_err(|_| damaged(&format!("{name} is missing")))?;
                let (dtype, length) = part.expected();
                if (view.dtype(), view.data().len()) != (dtype, length) {
                    let found = format!("{name}: expected {length} bytes of {dtype:?}, found {}", view.data().len());
                    return Err(damaged(&found));
                }
                part.restore(view.data());
                used += 1;
            }
            layer.resume(counts);
        }
        if used != found.len() {
            return Err(damaged("tensors that do not belong to it"));
        }
        Ok(cache)
    }
}
