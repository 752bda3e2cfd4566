//! GGUF files, versions 2 and 3: header, metadata, and tensors under Hugging Face names.
//!
//! Only dequantization is left to candle. Its header reader stops at the first unknown tensor type without saying which
//! tensor, drops duplicate names and divides by an alignment of zero, so the header is read here.
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use memmap2::Mmap;

use super::{StoredType, TensorInfo, TensorSource, map, plain_floats, unreadable};
use crate::error::ModelError;

/// Items of a list in memory take many times their bytes on disk; the longest lists are vocabularies and their merges.
const MOST_ITEMS: usize = 1 << 24;

/// A metadata value. Widths of numbers are dropped.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum MetadataValue {
    Whole(i128),
    Real(f64),
    Bool(bool),
    Text(String),
    List(Vec<MetadataValue>),
}

impl MetadataValue {
    /// One word for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Whole(_) => "a whole number",
            Self::Real(_) => "a real number",
            Self::Bool(_) => "a boolean",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
        }
    }
}

/// The header of a GGUF file: metadata, and where each tensor lies.
pub(crate) struct GgufFile {
    pub file: String,
    pub metadata: HashMap<String, MetadataValue>,
    tensors: Vec<(TensorInfo, Range<usize>)>,
}

impl GgufFile {
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.metadata.get(key)
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.typed(key, "a string", |v| match v {
            MetadataValue::Text(s) => Some(s.as_str()),
            _ => None,
        })
    }

    pub fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number", |v| match v {
            MetadataValue::Whole(n) => usize::try_from(*n).ok(),
            _ => None,
        })
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number", |v| match v {
            MetadataValue::Real(x) => Some(*x).filter(|x| x.is_finite()),
            MetadataValue::Whole(n) => Some(*n as f64),
            _ => None,
        })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", |v| match v {
            MetadataValue::Bool(b) => Some(*b),
            _ => None,
        })
    }

    pub fn list(&self, key: &str) -> Result<Option<&[MetadataValue]>, ModelError> {
        self.typed(key, "a list", |v| match v {
            MetadataValue::List(items) => Some(items.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a MetadataValue) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        self.get(key).map(|v| read(v).ok_or_else(|| self.wrong(key, expected, v.kind()))).transpose()
    }

    pub fn wrong(&self, key: &str, expected: &str, found: impl std::fmt::Display) -> ModelError {
        ModelError::Config {
            file: self.file.clone(),
            key: key.into(),
            expected: expected.into(),
            found: found.to_string(),
        }
    }

    pub fn unsupported(&self, what: impl Into<String>, hint: impl Into<String>) -> ModelError {
        ModelError::Unsupported { file: self.file.clone(), what: what.into(), hint: hint.into() }
    }

    /// Shape of a tensor by its GGUF name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.iter().find(|(t, _)| t.name == name).map(|(t, _)| t.shape.as_slice())
    }

    fn parse(file: String, bytes: &[u8]) -> Result<Self, ModelError> {
        let mut r = Reader { file: &file, bytes, at: 0 };
        if r.take(4)? != b"GGUF" {
            return Err(ModelError::corrupt(file, "does not begin with the letters GGUF"));
        }
        let version = r.u32()?;
        if !(2..=3).contains(&version) {
            let what = if version.swap_bytes() <= 3 {
                "a big-endian GGUF file".into()
            } else {
                format!("GGUF version {version}")
            };
            return Err(ModelError::Unsupported { file, what, hint: "little-endian versions 2 and 3 are".into() });
        }
        let (tensor_count, entry_count) = (r.count(24)?, r.count(13)?);
        let mut metadata = HashMap::new();
        for _ in 0..entry_count {
            let (key, kind) = (r.string()?, r.u32()?);
            let value = r.value(kind, 0)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(ModelError::corrupt(file, format!("the metadata has `{key}` twice")));
            }
        }
        let mut headers = Vec::new();
        for _ in 0..tensor_count {
            headers.push((r.string()?, r.shape()?, r.u32()?, r.u64()?));
        }
        let header_end = r.at;
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(MetadataValue::Whole(n)) if *n >= 8 && *n <= 1 << 20 && *n % 8 == 0 => *n as usize,
            Some(other) => {
                return Err(ModelError::corrupt(file, format!("general.alignment is {other:?}, not a multiple of 8")));
            }
        };
        let data = header_end.next_multiple_of(alignment);
        let tensors = place_tensors(&file, headers, data, alignment, bytes.len())?;
        Ok(Self { file, metadata, tensors })
    }
}

type Header = (String, Vec<usize>, u32, u64);

/// Checks sizes and offsets of all tensors against the file's length and each other.
fn place_tensors(
    file: &str,
    headers: Vec<Header>,
    data: usize,
    alignment: usize,
    len: usize,
) -> Result<Vec<(TensorInfo, Range<usize>)>, ModelError> {
    let mut tensors = Vec::with_capacity(headers.len());
    let mut names = std::collections::HashSet::new();
    for (name, shape, code, offset) in headers {
        let bad = |reason: String| ModelError::corrupt(file, format!("tensor `{name}` {reason}"));
        let (stored, block, block_bytes) = stored_type(code);
        let elements =
            shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(|| bad("is too large".into()))?;
        if !shape.last().copied().unwrap_or(1).is_multiple_of(block) {
            return Err(bad(format!("of shape {shape:?} does not divide into blocks of {block} elements")));
        }
        let size = (elements / block).checked_mul(block_bytes);
        let start = usize::try_from(offset).ok().and_then(|o| o.checked_add(data));
        let (Some(size), Some(start)) = (size, start) else {
            return Err(bad("is too large".into()));
        };
        if !offset.is_multiple_of(alignment as u64) {
            return Err(bad(format!("has offset {offset}, not a multiple of the alignment {alignment}")));
        }
        let end = start.checked_add(size).filter(|&end| end <= len);
        let end = end.ok_or_else(|| bad(format!("needs {size} bytes from {start}, but the file ends at {len}")))?;
        if !names.insert(name.clone()) {
            return Err(bad("is stored twice".into()));
        }
        tensors.push((TensorInfo { name, stored, shape }, start..end));
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (tensors[i].1.start, tensors[i].1.end));
    for pair in order.windows(2) {
        let ((a, first), (b, second)) = (&tensors[pair[0]], &tensors[pair[1]]);
        if first.end > second.start {
            return Err(ModelError::corrupt(file, format!("tensors `{}` and `{}` overlap", a.name, b.name)));
        }
    }
    Ok(tensors)
}

/// The type of a GGML code, the elements in a block and the bytes of one.
fn stored_type(code: u32) -> (StoredType, usize, usize) {
    use GgmlDType as G;
    let quantized = |d: G| (StoredType::Quantized(d), d.block_size(), d.type_size());
    match code {
        0 => (StoredType::F32, 1, 4),
        1 => (StoredType::F16, 1, 2),
        28 => (StoredType::F64, 1, 8),
        30 => (StoredType::Bf16, 1, 2),
        2 => quantized(G::Q4_0),
        3 => quantized(G::Q4_1),
        6 => quantized(G::Q5_0),
        7 => quantized(G::Q5_1),
        8 => quantized(G::Q8_0),
        10 => quantized(G::Q2K),
        11 => quantized(G::Q3K),
        12 => quantized(G::Q4K),
        13 => quantized(G::Q5K),
        14 => quantized(G::Q6K),
        // Formats whose layout is not needed: they are never read.
        other => (StoredType::Other(format!("{} (GGML type {other})", other_name(other))), 1, 0),
    }
}

fn other_name(code: u32) -> &'static str {
    match code {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => "an unknown type",
    }
}

/// Reads little-endian values within bounds.
struct Reader<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], ModelError> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len()).ok_or_else(|| {
            ModelError::corrupt(
                self.file,
                format!("the header wants {n} bytes at {}, but the file ends at {}", self.at, self.bytes.len()),
            )
        })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ModelError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A number of things of at least `each` bytes, which the rest of the file must be able to hold.
    fn count(&mut self, each: usize) -> Result<usize, ModelError> {
        let n = self.u64()?;
        let left = self.bytes.len() - self.at;
        usize::try_from(n).ok().filter(|n| n.checked_mul(each).is_some_and(|b| b <= left)).ok_or_else(|| {
            ModelError::corrupt(self.file, format!("the header announces {n} entries, more than the file can hold"))
        })
    }

    fn string(&mut self) -> Result<String, ModelError> {
        let len = self.count(1)?;
        // Token pieces of byte-level vocabularies are valid UTF-8; anything else is replaced, not refused.
        Ok(String::from_utf8_lossy(self.take(len)?).into_owned())
    }

    fn shape(&mut self) -> Result<Vec<usize>, ModelError> {
        let rank = self.u32()?;
        if rank > 4 {
            return Err(ModelError::corrupt(self.file, format!("a tensor has {rank} dimensions, more than 4")));
        }
        let mut shape = (0..rank).map(|_| self.u64()).collect::<Result<Vec<u64>, ModelError>>()?;
        shape.reverse();
        let too_large = |_| ModelError::corrupt(self.file, "a tensor's dimension is too large");
        shape.into_iter().map(|d| usize::try_from(d).map_err(too_large)).collect()
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<MetadataValue, ModelError> {
        use MetadataValue::{Bool, List, Real, Text, Whole};
        Ok(match kind {
            0 => Whole(u8::from_le_bytes(self.array()?).into()),
            1 => Whole(i8::from_le_bytes(self.array()?).into()),
            2 => Whole(u16::from_le_bytes(self.array()?).into()),
            3 => Whole(i16::from_le_bytes(self.array()?).into()),
            4 => Whole(self.u32()?.into()),
            5 => Whole(i32::from_le_bytes(self.array()?).into()),
            6 => Real(shortest(f32::from_le_bytes(self.array()?))),
            7 => Bool(self.take(1)?[0] != 0),
            8 => Text(self.string()?),
            9 if depth < 4 => {
                let kind = self.u32()?;
                let least = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    8 | 10 | 11 | 12 => 8,
                    9 => 12,
                    _ => 4,
                };
                let len = self.count(least)?;
                if len > MOST_ITEMS {
                    let reason = format!("the metadata has a list of {len} items, more than any vocabulary");
                    return Err(ModelError::corrupt(self.file, reason));
                }
                List((0..len).map(|_| self.value(kind, depth + 1)).collect::<Result<_, _>>()?)
            }
            10 => Whole(self.u64()?.into()),
            11 => Whole(i64::from_le_bytes(self.array()?).into()),
            12 => Real(f64::from_le_bytes(self.array()?)),
            other => {
                return Err(ModelError::corrupt(
                    self.file,
                    format!("unknown metadata type {other}, or lists nested too deep"),
                ));
            }
        })
    }
}

/// The decimal number that an f32 was written from: 1e-5 rather than 9.999999747378752e-6.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}

/// A GGUF file of the Llama or Qwen2 architecture, memory-mapped; tensors have Hugging Face's names, shapes and row order.
pub struct GgufSource {
    header: GgufFile,
    bytes: Mmap,
    tensors: Vec<TensorInfo>,
    places: Vec<Range<usize>>,
    /// Heads by which llama.cpp's converter permuted the rows of (queries, keys): `None` if it did not.
    permuted: Option<(usize, usize)>,
}

impl GgufSource {
    /// Opens and checks a file.
    ///
    /// # Errors
    /// If it is damaged, of an unsupported version or architecture, or one part of a split model.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let bytes = map(path)?;
        let header = GgufFile::parse(path.display().to_string(), &bytes)?;
        let architecture = header.text("general.architecture")?.unwrap_or("").to_owned();
        if !matches!(architecture.as_str(), "llama" | "qwen2") {
            return Err(ModelError::UnknownArchitecture {
                file: header.file,
                key: "general.architecture".into(),
                found: format!("{architecture:?}"),
                known: "llama (also Mistral), qwen2; others as safetensors".into(),
            });
        }
        if header.size("split.count")?.unwrap_or(1) > 1 {
            return Err(header
                .unsupported("a GGUF model split over several files", "merge it with llama.cpp's gguf-split --merge"));
        }
        // llama.cpp permutes Llama's rows for its interleaved rotation; its Qwen2 graph rotates halves as transformers does.
        let permuted = match architecture.as_str() {
            "llama" => {
                let heads = header.size("llama.attention.head_count")?.unwrap_or(0);
                Some((heads, kv_heads(&header, "llama.attention.head_count_kv")?.unwrap_or(heads)))
            }
            _ => None,
        };
        let mut entries = BTreeMap::new();
        for (tensor, place) in &header.tensors {
            let name = hub_name(&tensor.name);
            let entry = (TensorInfo { name: name.clone(), ..tensor.clone() }, place.clone());
            if entries.insert(name.clone(), entry).is_some() {
                let reason = format!("tensor `{name}` is stored twice, as `{}` too", tensor.name);
                return Err(ModelError::corrupt(header.file, reason));
            }
        }
        let (tensors, places) = entries.into_values().unzip();
        Ok(Self { header, bytes, tensors, places, permuted })
    }

    pub(crate) fn header(&self) -> &GgufFile {
        &self.header
    }

    pub(crate) fn into_header(self) -> GgufFile {
        self.header
    }

    /// The divisors of Llama 3's frequencies, if stored.
    pub(crate) fn rope_factors(&self) -> Result<Option<Vec<f64>>, ModelError> {
        let Some(index) = self.find("rope_freqs.weight") else { return Ok(None) };
        Ok(Some(self.read(index)?.into_iter().map(shortest).collect()))
    }
}

/// The number of KV heads, also if it is written as a list with an entry per layer.
pub(crate) fn kv_heads(header: &GgufFile, key: &str) -> Result<Option<usize>, ModelError> {
    match header.get(key) {
        Some(MetadataValue::List(items)) => {
            match items.as_slice() {
                [MetadataValue::Whole(first), rest @ ..] if rest.iter().all(|n| *n == MetadataValue::Whole(*first)) => {
                    Ok(usize::try_from(*first).ok())
                }
                _ => Err(header
                    .unsupported(format!("`{key}` that differs between layers"), "the same number in every layer is")),
            }
        }
        _ => header.size(key),
    }
}

impl TensorSource for GgufSource {
    fn origin(&self) -> &str {
        &self.header.file
    }

    fn format(&self) -> String {
        "GGUF".into()
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes[self.places[index].clone()])
    }

    fn read(&self, index: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = &self.tensors[index];
        let bytes = &self.bytes[self.places[index].clone()];
        let values = match &tensor.stored {
            StoredType::Quantized(dtype) => dequantize(*dtype, bytes, &tensor.shape)
                .map_err(|e| ModelError::corrupt(&self.header.file, format!("tensor `{}`: {e}", tensor.name)))?,
            plain => plain_floats(plain, bytes).ok_or_else(|| unreadable(&self.header.file, tensor))?,
        };
        let heads = self.permuted.and_then(|(q, k)| match () {
            _ if tensor.name.contains(".self_attn.q_proj.") => Some(q),
            _ if tensor.name.contains(".self_attn.k_proj.") => Some(k),
            _ => None,
        });
        Ok(match heads {
            Some(heads) => unpermute(values, tensor.shape.first().copied().unwrap_or(0), heads),
            None => values,
        })
    }
}

fn dequantize(dtype: GgmlDType, bytes: &[u8], shape: &[usize]) -> candle_core::Result<Vec<f32>> {
    qtensor_from_ggml(dtype, bytes, shape.to_vec(), &Device::Cpu)?.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()
}

/// Undoes llama.cpp's permutation: within a head, its rows 2i and 2i + 1 are rows i and i + d/2 here.
///
/// `LlamaModel.permute` of `convert_hf_to_gguf.py`: reshape(heads, 2, d/2, …).swapaxes(1, 2).
fn unpermute(values: Vec<f32>, rows: usize, heads: usize) -> Vec<f32> {
    if heads == 0 || rows == 0 || !rows.is_multiple_of(2 * heads) {
        return values; // not a shape the model can have; the check against the config reports it
    }
    let (head_dim, width) = (rows / heads, values.len() / rows);
    let mut out = Vec::with_capacity(values.len());
    for row in 0..rows {
        let (head, i) = (row / head_dim, row % head_dim);
        let (half, pair) = (i / (head_dim / 2), i % (head_dim / 2));
        let from = head * head_dim + 2 * pair + half;
        out.extend_from_slice(&values[from * width..(from + 1) * width]);
    }
    out
}

/// GGUF's name of a Llama-like tensor in Hugging Face's words; unknown names stay as they are.
fn hub_name(name: &str) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".into(),
        "output_norm.weight" => return "model.norm.weight".into(),
        "output.weight" => return "lm_head.weight".into(),
        _ => {}
    }
    let parts: Vec<&str> = name.split('.').collect();
    let ["blk", layer, part, kind] = parts.as_slice() else { return name.into() };
    let part = match *part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return name.into(),
    };
    format!("model.layers.{layer}.{part}.{kind}")
}
