//! The file: protobuf, and the constants in it or in files beside it.

use std::collections::{BTreeMap, HashSet};
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use onnx_ir::{AttributeProto, GraphProto, Message, ModelProto, TensorProto};

use crate::error::ModelError;
use crate::source::{StoredType, map};

/// ONNX's numbers for the element types that have a size in whole bytes: name, bytes, number.
const TYPES: &[(&str, usize, i32)] = &[
    ("FLOAT", 4, 1),
    ("UINT8", 1, 2),
    ("INT8", 1, 3),
    ("UINT16", 2, 4),
    ("INT16", 2, 5),
    ("INT32", 4, 6),
    ("INT64", 8, 7),
    ("BOOL", 1, 9),
    ("FLOAT16", 2, 10),
    ("DOUBLE", 8, 11),
    ("UINT32", 4, 12),
    ("UINT64", 8, 13),
    ("BFLOAT16", 2, 16),
];
const FLOAT: i32 = 1;
const INT32: i32 = 6;
const INT64: i32 = 7;
const DOUBLE: i32 = 11;

/// A constant of the graph: an initializer, or the value of a `Constant` node.
pub(super) struct Constant {
    /// The value's name in the graph.
    pub name: String,
    pub stored: StoredType,
    pub shape: Vec<usize>,
    /// ONNX's number of the element type.
    kind: i32,
    /// Little-endian elements, row-major: a part of the mapped file wherever the file has them so.
    pub data: Bytes,
}

impl Constant {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_float(&self) -> bool {
        !matches!(self.stored, StoredType::Other(_))
    }

    /// The elements of an integer tensor.
    pub fn integers(&self) -> Option<Vec<i64>> {
        match self.kind {
            INT64 => Some(self.data.as_chunks::<8>().0.iter().map(|w| i64::from_le_bytes(*w)).collect()),
            INT32 => Some(self.data.as_chunks::<4>().0.iter().map(|w| i64::from(i32::from_le_bytes(*w))).collect()),
            _ => None,
        }
    }

    fn of_numbers(name: &str, kind: i32, shape: Vec<usize>, data: Vec<u8>) -> Self {
        Self { name: name.into(), stored: stored_type(kind), shape, kind, data: data.into() }
    }
}

/// A parsed ONNX file with all its constants found and their sizes checked.
pub(super) struct OnnxFile {
    pub file: String,
    pub graph: GraphProto,
    pub constants: Vec<Constant>,
    /// Files of external data.
    pub external: usize,
}

impl OnnxFile {
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = path.display().to_string();
        if std::fs::metadata(path).map_err(ModelError::io(path))?.len() == 0 {
            return Err(ModelError::corrupt(file, "an empty file"));
        }
        // Strings of bytes in the parsed message are parts of the mapping, not copies.
        let bytes = Bytes::from_owner(map(path)?);
        let size = bytes.len();
        let model = ModelProto::parse_from_tokio_bytes(&bytes)
            .map_err(|e| ModelError::corrupt(&file, format!("not a whole ONNX file ({e}) in {size} bytes")))?;
        if let Some(function) = model.functions.first() {
            let hint = "inline them with onnx.inliner.inline_local_functions";
            return Err(unsupported(&file, format!("a graph with functions of its own (`{}`)", function.name), hint));
        }
        let graph = model.graph.into_option();
        let graph = graph.filter(|g| !g.node.is_empty());
        let graph = graph.ok_or_else(|| ModelError::corrupt(&file, "not an ONNX file (no graph in it)"))?;
        if let Some(sparse) = graph.sparse_initializer.first() {
            let what = format!("sparse tensor `{}`", sparse.values.name);
            return Err(unsupported(&file, what, "export the model with dense weights"));
        }
        let mut reader = Reader { file: &file, folder: path.parent().unwrap_or(Path::new("")), files: BTreeMap::new() };
        let constants = reader.constants(&graph)?;
        let external = reader.files.len();
        Ok(Self { file, graph, constants, external })
    }
}

pub(super) fn unsupported(file: &str, what: impl Into<String>, hint: impl Into<String>) -> ModelError {
    ModelError::Unsupported { file: file.into(), what: what.into(), hint: hint.into() }
}

struct Reader<'a> {
    file: &'a str,
    folder: &'a Path,
    /// External files, mapped once each.
    files: BTreeMap<PathBuf, Bytes>,
}

impl Reader<'_> {
    fn constants(&mut self, graph: &GraphProto) -> Result<Vec<Constant>, ModelError> {
        let mut names = HashSet::new();
        let mut constants = Vec::new();
        for tensor in &graph.initializer {
            if !names.insert(tensor.name.as_str()) {
                return Err(self.corrupt(&tensor.name, "is there twice"));
            }
            constants.push(self.tensor(&tensor.name, tensor, graph)?);
        }
        for node in graph.node.iter().filter(|n| n.op_type == "Constant") {
            let Some(name) = node.output.first() else { continue };
            for attribute in &node.attribute {
                constants.extend(self.attribute(name, attribute, graph)?);
            }
        }
        Ok(constants)
    }

    /// The value of a `Constant` node; `None` for strings, which nothing here reads.
    fn attribute(
        &mut self,
        name: &str,
        attribute: &AttributeProto,
        graph: &GraphProto,
    ) -> Result<Option<Constant>, ModelError> {
        let floats = |values: &[f32], shape| {
            Constant::of_numbers(name, FLOAT, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
        };
        let integers = |values: &[i64], shape| {
            Constant::of_numbers(name, INT64, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
        };
        Ok(match attribute.name.as_str() {
            "value" => Some(self.tensor(name, &attribute.t, graph)?),
            "value_float" => Some(floats(&[attribute.f], vec![])),
            "value_floats" => Some(floats(&attribute.floats, vec![attribute.floats.len()])),
            "value_int" => Some(integers(&[attribute.i], vec![])),
            "value_ints" => Some(integers(&attribute.ints, vec![attribute.ints.len()])),
            _ => None,
        })
    }

    fn tensor(&mut self, name: &str, tensor: &TensorProto, graph: &GraphProto) -> Result<Constant, ModelError> {
        let shape: Option<Vec<usize>> = tensor.dims.iter().map(|&d| usize::try_from(d).ok()).collect();
        let shape = shape.ok_or_else(|| self.corrupt(name, format!("has the shape {:?}", tensor.dims)))?;
        let kind = tensor.data_type;
        let expected = match TYPES.iter().find(|t| t.2 == kind) {
            Some((_, size, _)) => {
                let bytes = shape.iter().try_fold(*size, |product, &d| product.checked_mul(d));
                Some(bytes.ok_or_else(|| self.corrupt(name, format!("has the impossible shape {shape:?}")))?)
            }
            None => None,
        };
        // 1 is EXTERNAL; the enum's own type is not public.
        let data = if tensor.data_location.value() == 1 {
            self.external(name, tensor, expected, graph)?
        } else if tensor.raw_data.is_empty() {
            typed(kind, tensor).into()
        } else {
            tensor.raw_data.clone()
        };
        if let Some(expected) = expected.filter(|bytes| *bytes != data.len()) {
            let stored = stored_type(kind);
            let found = data.len();
            return Err(self.corrupt(
                name,
                format!("of {stored} and shape {shape:?} needs {expected} bytes, but {found} are stored"),
            ));
        }
        Ok(Constant { name: name.into(), stored: stored_type(kind), shape, kind, data })
    }

    /// The part of an external file that a tensor names.
    ///
    /// The location must stay within the model's folder by its words; links that the owner of the folder made are followed.
    fn external(
        &mut self,
        name: &str,
        tensor: &TensorProto,
        expected: Option<usize>,
        graph: &GraphProto,
    ) -> Result<Bytes, ModelError> {
        let location = entry(tensor, "location").unwrap_or("");
        if location.is_empty() {
            return Err(self.corrupt(name, "has external data without the file that it is in (an empty location)"));
        }
        let inside = |c: Component| matches!(c, Component::Normal(_) | Component::CurDir);
        if !Path::new(location).components().all(inside) {
            let what = format!("external data outside the model's folder (tensor `{name}` in {location:?})");
            return Err(unsupported(self.file, what, "export the model with its data beside it"));
        }
        let number = |key: &str| match entry(tensor, key) {
            None => Ok(None),
            Some(text) => text.parse::<usize>().map(Some).map_err(|_| {
                self.corrupt(name, format!("has external data with the {key} {text:?}, which is not a number of bytes"))
            }),
        };
        let (offset, length) = (number("offset")?.unwrap_or(0), number("length")?);
        let path = self.folder.join(location);
        if !self.files.contains_key(&path) {
            if !path.is_file() {
                let here = |t: &&TensorProto| entry(t, "location") == Some(location);
                let tensors = graph.initializer.iter().filter(here).count().max(1);
                return Err(ModelError::MissingData { file: self.file.into(), data: location.into(), tensors });
            }
            let empty = std::fs::metadata(&path).map_err(ModelError::io(&path))?.len() == 0;
            // An empty file cannot be mapped.
            let bytes = if empty { Bytes::new() } else { Bytes::from_owner(map(&path)?) };
            self.files.insert(path.clone(), bytes);
        }
        let bytes = &self.files[&path];
        let size = bytes.len();
        let end = match length.or(expected) {
            None => Some(size),
            Some(length) => offset.checked_add(length),
        };
        match end {
            Some(end) if (offset..=size).contains(&end) => Ok(bytes.slice(offset..end)),
            _ => {
                let length = length.or(expected).unwrap_or(0);
                Err(self.corrupt(name, format!("is {length} bytes from {offset} on in {location}, which has {size}")))
            }
        }
    }

    fn corrupt(&self, tensor: &str, reason: impl std::fmt::Display) -> ModelError {
        ModelError::corrupt(self.file, format!("tensor `{tensor}` {reason}"))
    }
}

fn entry<'a>(tensor: &'a TensorProto, key: &str) -> Option<&'a str> {
    tensor.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str())
}

/// The elements of a tensor that has numbers of its type instead of bytes; narrow types are in `int32_data`.
fn typed(kind: i32, tensor: &TensorProto) -> Vec<u8> {
    let size = TYPES.iter().find(|t| t.2 == kind).map_or(0, |t| t.1);
    match kind {
        FLOAT => tensor.float_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DOUBLE => tensor.double_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        INT64 => tensor.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        12 | 13 => tensor.uint64_data.iter().flat_map(|v| v.to_le_bytes().into_iter().take(size)).collect(),
        _ => tensor.int32_data.iter().flat_map(|v| v.to_le_bytes().into_iter().take(size)).collect(),
    }
}

fn stored_type(kind: i32) -> StoredType {
    match TYPES.iter().find(|t| t.2 == kind) {
        Some(("FLOAT", ..)) => StoredType::F32,
        Some(("DOUBLE", ..)) => StoredType::F64,
        Some(("FLOAT16", ..)) => StoredType::F16,
        Some(("BFLOAT16", ..)) => StoredType::Bf16,
        Some((name, ..)) => StoredType::Other((*name).into()),
        None => StoredType::Other(format!("ONNX element type {kind}")),
    }
}
