//! Safetensors: one file, or shards with an index.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Dtype, SafeTensors};

use super::{StoredType, TensorInfo, TensorSource, map, plain_floats, unreadable};
use crate::error::ModelError;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The weights of a model folder, memory-mapped.
pub struct SafetensorsSource {
    origin: String,
    files: Vec<Mmap>,
    tensors: Vec<TensorInfo>,
    /// File and byte range of each tensor.
    places: Vec<(usize, Range<usize>)>,
}

impl SafetensorsSource {
    /// Opens `model.safetensors`, or the shards of `model.safetensors.index.json`, in `folder`.
    ///
    /// # Errors
    /// If there is neither, a shard is missing, or a header is damaged or disagrees with its file or the index.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let single = folder.join(SINGLE);
        if single.exists() {
            return Self::from_files(single.display().to_string(), &[single]);
        }
        let index = folder.join(INDEX);
        if !index.exists() {
            return Err(ModelError::NoWeights { path: folder.to_owned(), found: other_weights(folder) });
        }
        let origin = index.display().to_string();
        let (shards, map) = read_index(folder, &index)?;
        let source = Self::from_files(origin.clone(), &shards)?;
        for (name, shard) in &map {
            let at = source.find(name).map(|i| source.places[i].0);
            if at.map(|i| &shards[i]) != Some(&folder.join(shard)) {
                return Err(ModelError::corrupt(
                    &origin,
                    format!("tensor `{name}` is not in shard {shard} as the index says"),
                ));
            }
        }
        Ok(source)
    }

    /// Whether a folder has safetensors that [`open`](Self::open) would read.
    pub(crate) fn is_in(folder: &Path) -> bool {
        folder.join(SINGLE).exists() || folder.join(INDEX).exists()
    }

    fn from_files(origin: String, paths: &[PathBuf]) -> Result<Self, ModelError> {
        let mut files = Vec::with_capacity(paths.len());
        let mut entries = BTreeMap::new();
        for (number, path) in paths.iter().enumerate() {
            let file = path.display().to_string();
            if std::fs::metadata(path).map_err(ModelError::io(path))?.len() < 8 {
                return Err(ModelError::corrupt(file, "shorter than the 8 bytes of a safetensors header length"));
            }
            let bytes = map(path)?;
            let mut stored_here = parse(&file, &bytes)?.tensors();
            stored_here.sort_by(|a, b| a.0.cmp(&b.0));
            for (name, tensor) in stored_here {
                let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
                let place = (number, start..start + tensor.data().len());
                if entries.insert(name.clone(), (stored(tensor.dtype()), tensor.shape().to_vec(), place)).is_some() {
                    return Err(ModelError::corrupt(file, format!("tensor `{name}` is also in another shard")));
                }
            }
            files.push(bytes);
        }
        let (tensors, places) = entries
            .into_iter()
            .map(|(name, (stored, shape, place))| (TensorInfo { name, stored, shape }, place))
            .unzip();
        Ok(Self { origin, files, tensors, places })
    }
}

impl TensorSource for SafetensorsSource {
    fn origin(&self) -> &str {
        &self.origin
    }

    fn format(&self) -> String {
        match self.files.len() {
            1 => "safetensors".into(),
            n => format!("safetensors, {n} shards"),
        }
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Cow<'_, [u8]> {
        let (file, range) = &self.places[index];
        Cow::Borrowed(&self.files[*file][range.clone()])
    }

    fn read(&self, index: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = &self.tensors[index];
        plain_floats(&tensor.stored, &self.bytes(index)).ok_or_else(|| unreadable(&self.origin, tensor))
    }
}

/// Parses a header; the crate checks that offsets are ordered, do not overlap and cover the file.
fn parse<'a>(file: &str, bytes: &'a [u8]) -> Result<SafeTensors<'a>, ModelError> {
    SafeTensors::deserialize(bytes).map_err(|e| {
        let size = bytes.len();
        ModelError::corrupt(file, format!("bad safetensors header ({e}) in a file of {size} bytes"))
    })
}

fn stored(dtype: Dtype) -> StoredType {
    match dtype {
        Dtype::F64 => StoredType::F64,
        Dtype::F32 => StoredType::F32,
        Dtype::F16 => StoredType::F16,
        Dtype::BF16 => StoredType::Bf16,
        other => StoredType::Other(format!("{other:?}")),
    }
}

/// The shards' paths and the index's tensor → shard map.
#[allow(clippy::type_complexity)]
fn read_index(folder: &Path, index: &Path) -> Result<(Vec<PathBuf>, BTreeMap<String, String>), ModelError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let file = index.display().to_string();
    let text = std::fs::read_to_string(index).map_err(ModelError::io(index))?;
    let Index { weight_map } = serde_json::from_str(&text)
        .map_err(|e| ModelError::corrupt(&file, format!("not a safetensors index ({e})")))?;
    let mut counts = BTreeMap::new();
    for shard in weight_map.values() {
        *counts.entry(shard.clone()).or_insert(0) += 1;
    }
    let mut shards = Vec::with_capacity(counts.len());
    for (shard, tensors) in counts {
        if Path::new(&shard).file_name() != Some(shard.as_ref()) {
            return Err(ModelError::corrupt(file, format!("shard {shard:?} is not a file name within the folder")));
        }
        let path = folder.join(&shard);
        if !path.is_file() {
            return Err(ModelError::MissingShard { index: file, shard, tensors });
        }
        shards.push(path);
    }
    Ok((shards, weight_map))
}

/// Weight files of formats that are not read, as a clause for the message.
fn other_weights(folder: &Path) -> String {
    let unread = |name: &str| name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth");
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| unread(name))
        .collect();
    found.sort();
    match found.as_slice() {
        [] => String::new(),
        names => format!(", only {}", names.join(", ")),
    }
}
