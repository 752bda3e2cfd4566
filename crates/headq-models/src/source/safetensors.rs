//! Safetensors: one file, or shards with an index.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, SafeTensors, TensorInfo as View};
use serde::Deserializer;
use serde::de::{IgnoredAny, MapAccess, Visitor};

use super::{StoredType, TensorInfo, TensorSource, map, plain_floats, unreadable};
use crate::error::ModelError;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Bytes of the header's length, before the header.
const LENGTH: usize = 8;

/// The longest header that the format allows.
const MOST_HEADER: u64 = 100_000_000;

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
        // A link that leads nowhere is a damaged model, not one without weights.
        if single.exists() || single.is_symlink() {
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
            let bytes = map(path)?;
            if bytes.len() < LENGTH {
                return Err(ModelError::corrupt(file, "shorter than the 8 bytes of a safetensors header length"));
            }
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
    let bad = |reason: String| {
        ModelError::corrupt(file, format!("bad safetensors header ({reason}) in a file of {} bytes", bytes.len()))
    };
    if let Some(name) = header(bytes).and_then(repeated_name) {
        return Err(bad(format!("tensor `{name}` is there twice")));
    }
    SafeTensors::deserialize(bytes).map_err(|error| bad(explain(&error, bytes)))
}

fn header_length(bytes: &[u8]) -> Option<u64> {
    bytes.first_chunk::<LENGTH>().map(|length| u64::from_le_bytes(*length))
}

/// The JSON, where the file has as much of it as its first bytes say.
fn header(bytes: &[u8]) -> Option<&[u8]> {
    let length = header_length(bytes).filter(|length| *length <= MOST_HEADER)?;
    bytes.get(LENGTH..)?.get(..usize::try_from(length).ok()?)
}

/// The first name that the header has twice; the crate would keep the last one of that name and say nothing.
fn repeated_name(header: &[u8]) -> Option<String> {
    struct FirstRepeated;
    impl<'de> Visitor<'de> for FirstRepeated {
        type Value = Option<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let (mut names, mut repeated) = (HashSet::new(), None);
            while let Some((name, IgnoredAny)) = map.next_entry::<String, _>()? {
                if let Some(name) = names.replace(name) {
                    repeated.get_or_insert(name);
                }
            }
            Ok(repeated)
        }
    }
    serde_json::Deserializer::from_slice(header).deserialize_map(FirstRepeated).ok().flatten()
}

/// The crate's words, with the numbers and the tensor that they are about.
fn explain(error: &SafeTensorError, bytes: &[u8]) -> String {
    let length = header_length(bytes).unwrap_or(0);
    match error {
        SafeTensorError::HeaderTooLarge => format!("{error}: {length} bytes, and the format allows {MOST_HEADER}"),
        SafeTensorError::InvalidHeaderLength => format!("{error}: {length} bytes"),
        SafeTensorError::TensorInvalidInfo => match header(bytes).and_then(misfit) {
            Some(misfit) => format!("{error}: {misfit}"),
            None => error.to_string(),
        },
        _ => error.to_string(),
    }
}

/// The first tensor whose bytes are not those of its shape.
fn misfit(header: &[u8]) -> Option<String> {
    let tensors: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    let entries =
        tensors.into_iter().filter_map(|(name, entry)| Some((name, serde_json::from_value::<View>(entry).ok()?)));
    let wrong = |(name, view): (String, View)| {
        let (start, end) = view.data_offsets;
        let bits = view.shape.iter().try_fold(view.dtype.bitsize(), |bits, &d| bits.checked_mul(d))?;
        let found = end.checked_sub(start)?;
        (bits / 8 != found).then(|| {
            format!(
                "tensor `{name}` of type {} and shape {:?} takes {} bytes, found {found}",
                view.dtype,
                view.shape,
                bits / 8
            )
        })
    };
    entries.filter_map(wrong).next()
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
