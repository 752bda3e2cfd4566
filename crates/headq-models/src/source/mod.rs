//! Where weights come from: named tensors on disk, read one at a time.

mod gguf;
mod onnx;
mod safetensors;

use std::borrow::Cow;
use std::fmt;

use candle_core::quantized::GgmlDType;
use half::{bf16, f16};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

pub(crate) use self::gguf::{GgufFile, MetadataValue, kv_heads};
pub(crate) use self::onnx::{Facts, OnnxModel};
pub use self::{gguf::GgufSource, onnx::OnnxSource, safetensors::SafetensorsSource};
use crate::error::ModelError;

/// How a tensor's elements are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// A GGML block format, dequantized on reading.
    Quantized(GgmlDType),
    /// Anything else: it can be listed and hashed, not read.
    Other(String),
}

impl StoredType {
    pub(crate) const READABLE: &str =
        "F64, F32, F16, BF16, and in GGUF files Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K";
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F64 => f.write_str("F64"),
            Self::F32 => f.write_str("F32"),
            Self::F16 => f.write_str("F16"),
            Self::Bf16 => f.write_str("BF16"),
            Self::Quantized(GgmlDType::Q2K) => f.write_str("Q2_K"),
            Self::Quantized(GgmlDType::Q3K) => f.write_str("Q3_K"),
            Self::Quantized(GgmlDType::Q4K) => f.write_str("Q4_K"),
            Self::Quantized(GgmlDType::Q5K) => f.write_str("Q5_K"),
            Self::Quantized(GgmlDType::Q6K) => f.write_str("Q6_K"),
            Self::Quantized(other) => write!(f, "{other:?}"),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// A stored tensor: what the header says of it.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// Name, in Hugging Face's convention for every format.
    pub name: String,
    /// Element type on disk.
    pub stored: StoredType,
    /// Shape, slowest dimension first.
    pub shape: Vec<usize>,
}

/// Named tensors on disk.
///
/// Implementations check all offsets and sizes when they are opened, so that reading never runs out of a file's bounds.
pub trait TensorSource: Send + Sync {
    /// The file or folder, for messages.
    fn origin(&self) -> &str;

    /// Format and number of files, e.g. `safetensors, 3 shards`.
    fn format(&self) -> String;

    /// All tensors, sorted by name.
    fn tensors(&self) -> &[TensorInfo];

    /// The elements of the tensor at `index` in [`tensors`](Self::tensors), in the type it is stored in. They are borrowed
    /// where the file has them in the order of the tensor's shape.
    fn bytes(&self, index: usize) -> Cow<'_, [u8]>;

    /// The elements of the tensor at `index`, row-major, converted to f32.
    ///
    /// # Errors
    /// [`ModelError::Dtype`] for a type that is not a float format known here.
    fn read(&self, index: usize) -> Result<Vec<f32>, ModelError>;

    /// Where the tensor of that name is in [`tensors`](Self::tensors).
    fn find(&self, name: &str) -> Option<usize> {
        self.tensors().binary_search_by(|t| t.name.as_str().cmp(name)).ok()
    }

    /// Bytes of all tensors on disk.
    fn total_bytes(&self) -> u64 {
        (0..self.tensors().len()).map(|i| self.bytes(i).len() as u64).sum()
    }

    /// SHA-256 over the sorted list of name, type, shape and SHA-256 of the stored bytes of every tensor.
    ///
    /// It does not depend on how tensors are distributed over files.
    fn sha256(&self) -> String {
        let digests: Vec<_> =
            (0..self.tensors().len()).into_par_iter().map(|i| hex(&Sha256::digest(self.bytes(i)))).collect();
        let mut all = Sha256::new();
        for (tensor, digest) in self.tensors().iter().zip(digests) {
            all.update(format!("{}\t{}\t{:?}\t{digest}\n", tensor.name, tensor.stored, tensor.shape));
        }
        hex(&all.finalize())
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Little-endian floats of a plain type as f32; `None` for the other types.
fn plain_floats(stored: &StoredType, bytes: &[u8]) -> Option<Vec<f32>> {
    fn convert<const N: usize>(bytes: &[u8], one: impl Fn([u8; N]) -> f32 + Sync) -> Vec<f32> {
        let (words, _) = bytes.as_chunks::<N>();
        words.par_iter().with_min_len(1 << 16).map(|word| one(*word)).collect()
    }
    match stored {
        StoredType::F64 => Some(convert(bytes, |w| f64::from_le_bytes(w) as f32)),
        StoredType::F32 => Some(convert(bytes, f32::from_le_bytes)),
        StoredType::F16 => Some(convert(bytes, |w| f16::from_le_bytes(w).to_f32())),
        StoredType::Bf16 => Some(convert(bytes, |w| bf16::from_le_bytes(w).to_f32())),
        StoredType::Quantized(_) | StoredType::Other(_) => None,
    }
}

/// The error for a tensor whose type is [`StoredType::Other`].
pub(crate) fn unreadable(origin: &str, tensor: &TensorInfo) -> ModelError {
    ModelError::Dtype {
        file: origin.into(),
        tensor: tensor.name.clone(),
        found: tensor.stored.to_string(),
        supported: StoredType::READABLE,
    }
}

/// Maps a file into memory.
fn map(path: &std::path::Path) -> Result<memmap2::Mmap, ModelError> {
    // Before it is opened: a pipe of that name would wait for a writer.
    let metadata = std::fs::metadata(path).map_err(ModelError::io(path))?;
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "a folder" } else { "a device or a pipe" };
        return Err(ModelError::NotAModel { path: path.to_owned(), reason: format!("expected a file, found {what}") });
    }
    let file = std::fs::File::open(path).map_err(ModelError::io(path))?;
    // SAFETY: the mapping is only read. Truncating the file while it is mapped would fault, as with every memory-mapped
    // model reader; writers in this workspace replace files by renaming, which leaves an existing mapping intact.
    unsafe { memmap2::Mmap::map(&file) }.map_err(ModelError::io(path))
}
