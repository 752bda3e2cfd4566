//! ONNX exports of the tiny checkpoints, put together from graphs without weights and the checkpoints' weights
//! (see `fixtures/onnx/make_onnx.py`), and changed.
#![allow(dead_code, clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};

use onnx_ir::{Message, ModelProto, NodeProto, TensorProto};

mod assemble;

use crate::common::fixture;

/// ONNX's numbers of element types.
pub const F32: i32 = 1;
pub const F16: i32 = 10;
pub const F64: i32 = 11;
pub const BF16: i32 = 16;

/// The checkpoint and variant of every export there is.
pub fn all() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for folder in std::fs::read_dir(graphs()).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()) {
        for file in std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()) {
            let word = |s: Option<&std::ffi::OsStr>| s.unwrap().to_str().unwrap().to_owned();
            all.push((word(folder.file_name()), word(file.file_stem())));
        }
    }
    all.sort();
    assert!(all.len() >= 40, "fixtures are missing: {all:?}");
    all
}

pub fn graphs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/onnx")
}

/// A model in a folder of its own.
pub struct Export {
    pub model: ModelProto,
    pub dir: tempfile::TempDir,
}

impl Export {
    /// A graph with its weights, and the checkpoint's config; not written yet.
    pub fn of(name: &str, variant: &str) -> Self {
        let graph = graphs().join(name).join(format!("{variant}.onnx"));
        let model = assemble::model(&graph, &fixture(name).join("model.safetensors"));
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(fixture(name).join("config.json"), dir.path().join("config.json")).unwrap();
        Self { model, dir }
    }

    pub fn new(model: ModelProto) -> Self {
        Self { model, dir: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn without_config(self) -> Self {
        std::fs::remove_file(self.path().join("config.json")).unwrap();
        self
    }

    pub fn edit(mut self, edit: impl FnOnce(&mut ModelProto)) -> Self {
        edit(&mut self.model);
        self
    }

    /// Changes every weight, that is every initializer of more than one float.
    pub fn weights(self, mut change: impl FnMut(&mut TensorProto)) -> Self {
        self.edit(|model| {
            for tensor in model.graph.as_mut().unwrap().initializer.iter_mut().filter(|t| is_weight(t)) {
                change(tensor);
            }
        })
    }

    /// Moves the weights to `model.onnx.data`, as torch does.
    pub fn external(self) -> Self {
        let mut data = Vec::new();
        let export = self.weights(|tensor| {
            data.resize(usize::next_multiple_of(data.len(), 64), 0);
            let bytes = std::mem::take(&mut tensor.raw_data);
            for (key, value) in [("offset", data.len()), ("length", bytes.len())] {
                set(tensor, key, &value.to_string());
            }
            set(tensor, "location", "model.onnx.data");
            data.extend_from_slice(&bytes);
        });
        std::fs::write(export.path().join("model.onnx.data"), data).unwrap();
        export
    }

    /// Writes `file` in the folder.
    pub fn write(&self, file: &str) -> PathBuf {
        let path = self.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, self.model.write_to_bytes().unwrap()).unwrap();
        path
    }

    /// Writes `model.onnx`, and returns its path.
    pub fn saved(&self) -> PathBuf {
        self.write("model.onnx")
    }
}

pub fn is_weight(tensor: &TensorProto) -> bool {
    [F32, F16, F64, BF16].contains(&tensor.data_type) && tensor.dims.iter().product::<i64>() > 1
}

/// Sets an entry of a tensor's external data.
pub fn set(tensor: &mut TensorProto, key: &str, value: &str) {
    tensor.external_data.retain(|e| e.key != key);
    // The entry's type has no public name.
    tensor.external_data.push(Default::default());
    let entry = tensor.external_data.last_mut().unwrap();
    (entry.key, entry.value) = (key.into(), value.into());
    // Nor has the location's: field 14, a number, 1 for external.
    tensor.data_location = TensorProto::parse_from_bytes(&[14 << 3, 1]).unwrap().data_location;
}

/// A node of the standard operators.
pub fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    let mut node = NodeProto::new();
    node.op_type = op.into();
    node.name = format!("the {op}");
    node.input = inputs.iter().map(|s| s.to_string()).collect();
    node.output = vec![output.into()];
    node
}

/// An f32 tensor.
pub fn tensor(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    let mut tensor = TensorProto::new();
    tensor.name = name.into();
    tensor.dims = dims.to_vec();
    tensor.data_type = F32;
    tensor.float_data = values.to_vec();
    tensor
}
