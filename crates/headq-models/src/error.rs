//! What can go wrong with a model on disk. Every message is one line: where, what was expected, what was found, what to do.

use std::path::{Path, PathBuf};

use headq::device::Precision;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The path given as a model does not exist.
    #[error("{}: no such file or folder; a model is a folder with config.json and *.safetensors or model.onnx, a .gguf or .onnx file, or hf:ORG/NAME on the hub", .0.display())]
    NotFound(PathBuf),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A path that is neither a model folder nor a model file, or not an unambiguous one.
    #[error("{}: {reason}", path.display())]
    NotAModel {
        /// The path.
        path: PathBuf,
        /// What is missing or ambiguous, and what to do.
        reason: String,
    },
    /// A key of a config (or of GGUF metadata) is missing or has an impossible value.
    #[error("{file}: `{key}`: expected {expected}, found {found}")]
    Config {
        /// The file the key was read from.
        file: String,
        /// The key.
        key: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The architecture is not one of the known ones.
    #[error("{file}: `{key}`: unknown architecture {found}; known: {known}")]
    UnknownArchitecture {
        /// The file.
        file: String,
        /// The key that names the architecture.
        key: String,
        /// The name found.
        found: String,
        /// The known names.
        known: String,
    },
    /// Something well-formed that this crate does not implement.
    #[error("{file}: {what} is not supported; {hint}")]
    Unsupported {
        /// The file.
        file: String,
        /// The feature.
        what: String,
        /// What is supported, or what to do.
        hint: String,
    },
    /// A file whose bytes contradict its own header or format.
    #[error("{file}: {reason}; the file is damaged or incomplete, fetch it again")]
    Corrupt {
        /// The file.
        file: String,
        /// The contradiction.
        reason: String,
    },
    /// A folder without usable weights.
    #[error("{}: no model.safetensors, no model.safetensors.index.json and no model.onnx{found}; convert the model with transformers' save_pretrained(..., safe_serialization=True)", path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
        /// Weight files of other formats that are there, as a clause.
        found: String,
    },
    /// A shard named by the index is not there.
    #[error("{index}: shard {shard} (of {tensors} tensors) is missing from the folder; fetch it, or the model again")]
    MissingShard {
        /// The index file.
        index: String,
        /// The shard's file name.
        shard: String,
        /// How many tensors the index expects in it.
        tensors: usize,
    },
    /// A file that an ONNX file keeps its weights in is not there.
    #[error(
        "{file}: {data}, with {tensors} of its tensors, is missing from the folder; fetch it, or export the model again"
    )]
    MissingData {
        /// The ONNX file.
        file: String,
        /// The location of the data, as the file names it.
        data: String,
        /// How many tensors are in it.
        tensors: usize,
    },
    /// Neither an ONNX graph nor anything else says what a model needs.
    #[error(
        "{file}: there is no config.json beside it, and its graph does not say {missing}; put the model's config.json there, or give it with --model-config FILE, or each with --model-set KEY=VALUE"
    )]
    Incomplete {
        /// The ONNX file.
        file: String,
        /// The keys, as `config.json` names them.
        missing: String,
    },
    /// A tensor the architecture needs is not stored.
    #[error("{file}: tensor `{tensor}` (shape {shape:?}) is missing; {hint}")]
    MissingTensor {
        /// The source.
        file: String,
        /// The tensor's full name.
        tensor: String,
        /// The shape the config asks for.
        shape: Vec<usize>,
        /// What to check.
        hint: String,
    },
    /// A tensor has another shape than the config implies.
    #[error(
        "{file}: tensor `{tensor}`: the config asks for shape {expected:?}, stored is {found:?}; config and weights belong to different models"
    )]
    Shape {
        /// The source.
        file: String,
        /// The tensor.
        tensor: String,
        /// From the config.
        expected: Vec<usize>,
        /// From the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a type that cannot be read as numbers.
    #[error("{file}: tensor `{tensor}` is stored as {found}, which cannot be read; supported: {supported}")]
    Dtype {
        /// The source.
        file: String,
        /// The tensor.
        tensor: String,
        /// The type on disk.
        found: String,
        /// The types that can be read.
        supported: &'static str,
    },
    /// The tokenizer is missing, broken or does not fit the model.
    #[error("{file}: {reason}")]
    Tokenizer {
        /// The file.
        file: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A token id outside the vocabulary.
    #[error(
        "token {token} at position {position} is outside the vocabulary of {vocab}; text and model do not use the same tokenizer"
    )]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Its place in the sequence.
        position: usize,
        /// The vocabulary size.
        vocab: usize,
    },
    /// More positions than a model with learned positions has.
    #[error("{needed} positions are needed but the model has {limit} learned ones; use a context of at most {limit}")]
    ContextTooLong {
        /// Positions asked for.
        needed: usize,
        /// Positions there are.
        limit: usize,
    },
    /// A type of weights that the device cannot compute with.
    #[error("the device has no {asked}; --dtype may be {}", known.iter().map(|p| p.to_string()).collect::<Vec<_>>().join(", "))]
    Precision {
        /// What was asked for.
        asked: Precision,
        /// What the device has.
        known: Vec<Precision>,
    },
    /// Decode steps on the host for a model that is elsewhere, or in a type that they do not know.
    #[error(
        "decode steps on the host need a model on the device flex with weights in f32, f16 or bf16; this one is on or in {found}"
    )]
    NotOnHost {
        /// The device or the type.
        found: String,
    },
    /// A list of tokens or targets whose length does not match.
    #[error("{what}: expected {expected}, found {found}")]
    Length {
        /// What was counted.
        what: &'static str,
        /// How many there should be.
        expected: String,
        /// How many there are.
        found: usize,
    },
}

impl ModelError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn corrupt(file: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Corrupt { file: file.into(), reason: one_line(&reason.into()) }
    }

    pub(crate) fn tokenizer(file: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        Self::Tokenizer { file: file.into(), reason: one_line(&reason.to_string()) }
    }
}

/// Messages of other crates may span lines; ours do not.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
