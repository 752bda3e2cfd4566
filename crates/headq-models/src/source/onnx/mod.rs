//! ONNX exports of decoders: weights by what the graph does with them, under Hugging Face names.
//!
//! The protobuf types are those of `onnx-ir`, on which `burn-onnx` stands. That crate's own graph drops the names and
//! resolves external data into memory; here the file stays mapped and only what a weight needs is read.
//! Format: <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>.

mod decoder;
mod file;
mod graph;
mod parts;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use rayon::prelude::*;

use self::decoder::{Decoder, Layer};
use self::file::{OnnxFile, unsupported};
use self::graph::{Graph, View};
use self::parts::{Linear, Norm};
use super::{StoredType, TensorInfo, TensorSource, plain_floats, unreadable};
use crate::config::{Activation, ModelConfig, NormKind};
use crate::error::ModelError;
use crate::weights::{Fused, Plan};

/// Rows of a transposed matrix made together: a cache line of the stored row at a time.
const TILE: usize = 16;

/// An ONNX file whose graph is understood, before it is known what its weights are to be called.
pub(crate) struct OnnxModel {
    file: OnnxFile,
    decoder: Decoder,
}

/// What a graph says of its model's configuration. `None` where it is not a constant of the graph.
#[derive(Debug)]
pub(crate) struct Facts {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    /// Channels of all queries.
    pub query_width: usize,
    /// Channels of all keys.
    pub kv_width: usize,
    /// Whether query, key and value are one projection.
    pub fused: bool,
    /// Whether that has its outputs head by head, rather than all queries, all keys, all values.
    pub by_head: bool,
    pub head_dim: Option<usize>,
    pub norm: NormKind,
    pub norm_eps: Option<f64>,
    pub activation: Option<Activation>,
    pub gated: bool,
    pub parallel_residual: bool,
    /// Rows of the learned positions.
    pub positions: Option<usize>,
    /// Radians per position of each rotated pair of channels.
    pub frequencies: Option<Vec<f64>>,
    /// Bias on the query, key and value projections; on attention's output; in the MLP.
    pub biases: [bool; 3],
    /// Sliding window of each layer.
    pub windows: Vec<Option<usize>>,
    /// Factor on the scores of each layer.
    pub scales: Vec<Option<f64>>,
    /// Whether the head is the embedding, bit for bit.
    pub tied: bool,
}

impl OnnxModel {
    /// Reads the graph and finds the place of every weight.
    ///
    /// # Errors
    /// A file that is not ONNX or is damaged, missing external data, or a graph that is not a decoder of a known kind.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = OnnxFile::open(path)?;
        let decoder = Decoder::find(&Graph::new(&file)?)?;
        Ok(Self { file, decoder })
    }

    pub fn file(&self) -> &str {
        &self.file.file
    }

    pub fn facts(&self) -> Facts {
        let d = &self.decoder;
        let first = &d.layers[0];
        let fused = first.qkv.len() == 1;
        let width = |linears: &[Linear], i: usize| linears.get(i).map_or(0, |l| l.shape[1]);
        let by_head = fused && d.layers.iter().all(|l| l.by_head);
        let biased = |linears: &[&Linear]| linears.iter().any(|l| l.bias.is_some());
        let [query_width, kv_width] =
            if fused { [width(&first.qkv, 0) / 3; 2] } else { [width(&first.qkv, 0), width(&first.qkv, 1)] };
        Facts {
            vocab_size: d.tokens.shape[0],
            hidden_size: d.tokens.shape[1],
            intermediate_size: first.mlp_out.shape[0],
            layers: d.layers.len(),
            query_width,
            kv_width,
            fused,
            by_head,
            head_dim: common(&d.layers, |l| l.head_width).map(|w| if by_head { w / 3 } else { w }),
            norm: d.norm.kind,
            norm_eps: common(&d.layers, |l| l.attention_norm.eps),
            activation: common(&d.layers, |l| Some(l.activation)),
            gated: first.mlp_in.len() == 2,
            parallel_residual: d.parallel_residual,
            positions: d.positions.map(|t| t.shape[0]),
            frequencies: d.frequencies.clone(),
            biases: [
                biased(&first.qkv.iter().collect::<Vec<_>>()),
                biased(&[&first.out]),
                biased(&first.mlp_in.iter().chain([&first.mlp_out]).collect::<Vec<_>>()),
            ],
            windows: d.layers.iter().map(|l| l.window).collect(),
            scales: d.layers.iter().map(|l| l.scale).collect(),
            tied: self.tied(),
        }
    }

    fn tied(&self) -> bool {
        let (head, tokens) = (&self.decoder.head, &self.decoder.tokens);
        let as_rows = View { transposed: !head.weight.transposed, ..head.weight };
        head.shape == [tokens.shape[1], tokens.shape[0]]
            && (as_rows == tokens.view || self.place(as_rows).bytes() == self.place(tokens.view).bytes())
    }

    fn place(&self, view: View) -> Placed {
        let constant = &self.file.constants[view.constant];
        Placed {
            stored: constant.stored.clone(),
            shape: constant.shape.clone(),
            transposed: view.transposed,
            data: constant.data.clone(),
        }
    }

    /// The weights under the names that `config`'s architecture has for them.
    ///
    /// # Errors
    /// A graph whose layers have other parts than the architecture.
    pub fn into_source(self, config: &ModelConfig) -> Result<OnnxSource, ModelError> {
        let plan = Plan { config };
        let names = &config.architecture.names;
        let d = &self.decoder;
        let mut found = BTreeMap::new();
        found.insert(plan.full(names.embedding), self.place(d.tokens.view));
        match (names.positions, &d.positions) {
            (Some(name), Some(table)) => drop(found.insert(plan.full(name), self.place(table.view))),
            (None, Some(_)) => return Err(self.other_parts(config, "learned positions")),
            _ => {}
        }
        for (number, layer) in d.layers.iter().enumerate() {
            let [attention_norm, mlp_norm] = plan.norms(number);
            self.norm(&attention_norm, &layer.attention_norm, &mut found);
            self.norm(&mlp_norm, &layer.mlp_norm, &mut found);
            for (fused, linears) in [
                (plan.qkv(number), &layer.qkv[..]),
                (plan.out(number), std::slice::from_ref(&layer.out)),
                (plan.mlp_in(number), &layer.mlp_in[..]),
                (plan.mlp_out(number), std::slice::from_ref(&layer.mlp_out)),
            ] {
                self.linear(config, &fused, linears, &mut found)?;
            }
        }
        self.norm(&plan.full(names.final_norm), &d.norm, &mut found);
        // A copy of the embedding says nothing new; a head that differs from an embedding it should be is worth a warning.
        if !(config.tie_word_embeddings && self.tied()) {
            let rows = View { transposed: !d.head.weight.transposed, ..d.head.weight };
            found.insert(names.head.into(), self.place(rows));
        }
        let (infos, places) = found
            .into_iter()
            .map(|(name, place)| (TensorInfo { name, stored: place.stored.clone(), shape: place.seen() }, place))
            .unzip();
        Ok(OnnxSource { origin: self.file.file, external: self.file.external, tensors: infos, places })
    }

    fn norm(&self, name: &str, norm: &Norm, found: &mut BTreeMap<String, Placed>) {
        found.insert(format!("{name}.weight"), self.place(norm.weight));
        if let Some(bias) = norm.bias {
            found.insert(format!("{name}.bias"), self.place(bias));
        }
    }

    fn linear(
        &self,
        config: &ModelConfig,
        fused: &Fused,
        linears: &[Linear],
        found: &mut BTreeMap<String, Placed>,
    ) -> Result<(), ModelError> {
        if fused.parts.len() != linears.len() {
            let (name, expected, have) = (&fused.parts[0].name, fused.parts.len(), linears.len());
            return Err(self.other_parts(config, &format!("{have} matrices in place of {expected} for `{name}`")));
        }
        for (part, linear) in fused.parts.iter().zip(linears) {
            let swap = !fused.input_major;
            let view = View { transposed: linear.weight.transposed != swap, ..linear.weight };
            found.insert(format!("{}.weight", part.name), self.place(view));
            if let Some(bias) = linear.bias {
                found.insert(format!("{}.bias", part.name), self.place(bias));
            }
        }
        Ok(())
    }

    fn other_parts(&self, config: &ModelConfig, parts: &str) -> ModelError {
        let name = config.architecture.name;
        let hint = "the configuration belongs to another model, or the export changed the graph";
        unsupported(&self.file.file, format!("a graph of {name} with {parts}"), hint)
    }
}

/// What is the same in all layers.
fn common<T: PartialEq>(layers: &[Layer], of: impl Fn(&Layer) -> Option<T>) -> Option<T> {
    let first = of(layers.first()?);
    first.filter(|first| layers.iter().all(|l| of(l).as_ref() == Some(first)))
}

/// A constant, and whether it is read transposed.
struct Placed {
    stored: StoredType,
    /// As stored.
    shape: Vec<usize>,
    transposed: bool,
    data: Bytes,
}

impl Placed {
    fn seen(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    fn bytes(&self) -> Cow<'_, [u8]> {
        match (&self.shape[..], self.transposed) {
            ([rows, columns], true) => Cow::Owned(transposed(&self.data, *rows, *columns)),
            _ => Cow::Borrowed(&self.data),
        }
    }
}

/// A matrix of elements of 2, 4 or 8 bytes, transposed.
fn transposed(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    fn elements<const N: usize>(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
        let (stored, _) = bytes.as_chunks::<N>();
        let mut out = vec![[0; N]; stored.len()];
        out.par_chunks_mut((TILE * rows).max(1)).enumerate().for_each(|(tile, chunk)| {
            let first = tile * TILE;
            for row in 0..rows {
                let from = &stored[row * columns + first..][..chunk.len() / rows];
                for (i, element) in from.iter().enumerate() {
                    chunk[i * rows + row] = *element;
                }
            }
        });
        out.into_flattened()
    }
    match bytes.len().checked_div(rows * columns) {
        Some(2) => elements::<2>(bytes, rows, columns),
        Some(4) => elements::<4>(bytes, rows, columns),
        Some(8) => elements::<8>(bytes, rows, columns),
        // Sizes were checked on opening, and views are of floats: this is an empty matrix.
        _ => Vec::new(),
    }
}

/// The weights of an ONNX export, memory-mapped, under Hugging Face names and in their layout.
///
/// Matrices that the exporter transposed are transposed back, so that hashes are those of the checkpoint that was exported,
/// where the export keeps the type of the elements.
pub struct OnnxSource {
    origin: String,
    external: usize,
    tensors: Vec<TensorInfo>,
    places: Vec<Placed>,
}

impl TensorSource for OnnxSource {
    fn origin(&self) -> &str {
        &self.origin
    }

    fn format(&self) -> String {
        match self.external {
            0 => "ONNX".into(),
            1 => "ONNX, 1 file of external data".into(),
            n => format!("ONNX, {n} files of external data"),
        }
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn bytes(&self, index: usize) -> Cow<'_, [u8]> {
        self.places[index].bytes()
    }

    fn total_bytes(&self) -> u64 {
        self.places.iter().map(|p| p.data.len() as u64).sum()
    }

    fn read(&self, index: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = &self.tensors[index];
        plain_floats(&tensor.stored, &self.bytes(index)).ok_or_else(|| unreadable(&self.origin, tensor))
    }
}
