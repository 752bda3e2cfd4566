//! Between stored tensors and the model's fused parameters, both ways.
//!
//! A linear layer here is `[in, out]`, with the columns of all its stored parts side by side. Each stored part is `[out, in]`
//! (or `[in, out]` in GPT-2) and may have its rows in another order (GPT-NeoX). [`Fused`] describes that once; loading and
//! exporting both follow it.

use std::cell::RefCell;
use std::collections::BTreeSet;

use burn::module::Param;
use burn::nn::{Embedding, Linear};
use burn::tensor::{Device, Tensor, TensorData};
use headq::device::Precision;
use rayon::prelude::*;

use crate::arch::{BUFFERS, QkvNames};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::model::{Block, LanguageModel, Norm};
use crate::source::{StoredType, TensorSource, unreadable};

/// Input rows transposed together: a few cache lines of the stored row at a time.
const TILE: usize = 32;

/// A linear layer and the stored tensors it is made of.
pub(crate) struct Fused {
    input: usize,
    pub parts: Vec<Part>,
    bias: bool,
    /// Stored as `[in, out]`.
    pub input_major: bool,
}

/// A stored linear layer.
pub(crate) struct Part {
    /// Name without `.weight` or `.bias`.
    pub name: String,
    output: usize,
    /// Number of heads and head width, where rows are stored head by head: query, key, value.
    per_head: Option<(usize, usize)>,
}

impl Part {
    fn new(name: String, output: usize) -> Self {
        Self { name, output, per_head: None }
    }

    /// The column, within the part, of a stored row.
    fn column(&self, row: usize) -> usize {
        match self.per_head {
            None => row,
            Some((heads, width)) => {
                let (head, kind, channel) = (row / (3 * width), row / width % 3, row % width);
                kind * heads * width + head * width + channel
            }
        }
    }
}

impl Fused {
    fn output(&self) -> usize {
        self.parts.iter().map(|p| p.output).sum()
    }

    /// The stored shape of a part's weight.
    fn shape(&self, part: &Part) -> Vec<usize> {
        if self.input_major { vec![self.input, part.output] } else { vec![part.output, self.input] }
    }
}

/// The stored tensors of a model, by their full names.
pub(crate) struct Plan<'a> {
    pub config: &'a ModelConfig,
}

impl Plan<'_> {
    pub fn full(&self, name: &str) -> String {
        format!("{}{name}", self.config.architecture.names.prefix)
    }

    fn in_layer(&self, layer: usize, name: &str) -> String {
        let names = &self.config.architecture.names;
        format!("{}{}{layer}.{name}", names.prefix, names.layers)
    }

    fn fused(&self, input: usize, parts: Vec<Part>, bias: bool) -> Fused {
        Fused { input, parts, bias, input_major: self.config.architecture.names.input_major }
    }

    pub fn qkv(&self, layer: usize) -> Fused {
        let c = self.config;
        let (q, kv) = (c.query_width(), c.kv_width());
        let part = |name: &str, output: usize| Part::new(self.in_layer(layer, name), output);
        let parts = match &c.architecture.names.qkv {
            QkvNames::Separate([nq, nk, nv]) => vec![part(nq, q), part(nk, kv), part(nv, kv)],
            QkvNames::Fused(name) => vec![part(name, q + 2 * kv)],
            QkvNames::PerHead(name) => {
                vec![Part { per_head: Some((c.num_heads, c.head_dim)), ..part(name, q + 2 * kv) }]
            }
        };
        self.fused(c.hidden_size, parts, c.biases.qkv)
    }

    pub fn out(&self, layer: usize) -> Fused {
        let c = self.config;
        let name = self.in_layer(layer, c.architecture.names.attention_out);
        self.fused(c.query_width(), vec![Part::new(name, c.hidden_size)], c.biases.out)
    }

    pub fn mlp_in(&self, layer: usize) -> Fused {
        let c = self.config;
        let names = c.architecture.names.mlp_in.iter();
        let parts = names.map(|n| Part::new(self.in_layer(layer, n), c.intermediate_size)).collect();
        self.fused(c.hidden_size, parts, c.biases.mlp)
    }

    pub fn mlp_out(&self, layer: usize) -> Fused {
        let c = self.config;
        let name = self.in_layer(layer, c.architecture.names.mlp_out);
        self.fused(c.intermediate_size, vec![Part::new(name, c.hidden_size)], c.biases.mlp)
    }

    /// The norms before attention and MLP.
    pub fn norms(&self, layer: usize) -> [String; 2] {
        let names = &self.config.architecture.names;
        [self.in_layer(layer, names.attention_norm), self.in_layer(layer, names.mlp_norm)]
    }

    /// The untied head. Its name has no prefix, and it is `[vocab, hidden]` in every architecture.
    fn head(&self) -> Option<Fused> {
        let c = self.config;
        let name = c.architecture.names.head.trim_end_matches(".weight").to_owned();
        let parts = vec![Part::new(name, c.vocab_size)];
        (!c.tie_word_embeddings).then_some(Fused { input: c.hidden_size, parts, bias: false, input_major: false })
    }

    /// Name and shape of every stored tensor of the model.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let c = self.config;
        let names = &c.architecture.names;
        let mut all = vec![(self.full(names.embedding), vec![c.vocab_size, c.hidden_size])];
        if let Some(positions) = names.positions {
            all.push((self.full(positions), vec![c.max_position_embeddings, c.hidden_size]));
        }
        let has_beta = c.norm == crate::config::NormKind::Layer;
        let norm = |name: String, all: &mut Vec<_>| {
            all.push((format!("{name}.weight"), vec![c.hidden_size]));
            if has_beta {
                all.push((format!("{name}.bias"), vec![c.hidden_size]));
            }
        };
        let linear = |fused: Fused, all: &mut Vec<_>| {
            for part in &fused.parts {
                all.push((format!("{}.weight", part.name), fused.shape(part)));
                if fused.bias {
                    all.push((format!("{}.bias", part.name), vec![part.output]));
                }
            }
        };
        for layer in 0..c.num_layers {
            self.norms(layer).into_iter().for_each(|name| norm(name, &mut all));
            for fused in [self.qkv(layer), self.out(layer), self.mlp_in(layer), self.mlp_out(layer)] {
                linear(fused, &mut all);
            }
        }
        norm(self.full(names.final_norm), &mut all);
        if let Some(head) = self.head() {
            linear(head, &mut all);
        }
        all
    }
}

/// Number of parameters; a tied head is counted once.
pub(crate) fn parameter_count(config: &ModelConfig) -> u64 {
    Plan { config }.tensors().iter().map(|(_, shape)| shape.iter().map(|&d| d as u64).product::<u64>()).sum()
}

/// Checks that every tensor of the model is stored with the right shape in a type that can be read, and warns of stored ones the model does not use.
pub(crate) fn check(config: &ModelConfig, source: &dyn TensorSource) -> Result<(), ModelError> {
    let reader = Reader::new(config, source);
    for (name, shape) in (Plan { config }).tensors() {
        reader.locate(&name, &shape)?;
    }
    reader.warn_unused();
    Ok(())
}

/// Reads all weights, one stored tensor at a time.
pub(crate) fn load(
    config: &ModelConfig,
    source: &dyn TensorSource,
    device: &Device,
    precision: Precision,
) -> Result<LanguageModel, ModelError> {
    check(config, source)?;
    let plan = Plan { config };
    let reader = Reader { precision, ..Reader::new(config, source) };
    let names = &config.architecture.names;
    let table = |name: &str, rows: usize| -> Result<Embedding, ModelError> {
        let shape = [rows, config.hidden_size];
        let values = reader.read(&plan.full(name), &shape)?;
        Ok(Embedding { weight: reader.matrix(values, shape, device) })
    };
    let block = |layer: usize| -> Result<Block, ModelError> {
        let [attention_norm, mlp_norm] = plan.norms(layer);
        Ok(Block {
            attention_norm: reader.norm(&attention_norm, device)?,
            qkv: reader.linear(&plan.qkv(layer), device)?,
            out: reader.linear(&plan.out(layer), device)?,
            mlp_norm: reader.norm(&mlp_norm, device)?,
            mlp_in: reader.linear(&plan.mlp_in(layer), device)?,
            mlp_out: reader.linear(&plan.mlp_out(layer), device)?,
        })
    };
    Ok(LanguageModel {
        embedding: table(names.embedding, config.vocab_size)?,
        positions: names.positions.map(|name| table(name, config.max_position_embeddings)).transpose()?,
        blocks: (0..config.num_layers).map(block).collect::<Result<_, _>>()?,
        norm: reader.norm(&plan.full(names.final_norm), device)?,
        head: plan.head().map(|head| reader.linear(&head, device)).transpose()?,
        inverse_frequencies: config.rope.as_ref().map(|r| r.inverse_frequencies()).unwrap_or_default(),
        config: config.clone(),
    })
}

/// Finds tensors with or without the architecture's prefix, and remembers which were used.
struct Reader<'a> {
    config: &'a ModelConfig,
    source: &'a dyn TensorSource,
    used: RefCell<BTreeSet<usize>>,
    precision: Precision,
}

impl<'a> Reader<'a> {
    fn new(config: &'a ModelConfig, source: &'a dyn TensorSource) -> Self {
        Self { config, source, used: RefCell::default(), precision: Precision::F32 }
    }

    fn find(&self, name: &str) -> Option<usize> {
        let bare = name.strip_prefix(self.config.architecture.names.prefix);
        self.source.find(name).or_else(|| bare.and_then(|bare| self.source.find(bare)))
    }

    fn locate(&self, name: &str, shape: &[usize]) -> Result<usize, ModelError> {
        let index = self.find(name).ok_or_else(|| ModelError::MissingTensor {
            file: self.source.origin().into(),
            tensor: name.into(),
            shape: shape.into(),
            hint: if name == self.config.architecture.names.head {
                "if the model has no head of its own, its config needs \"tie_word_embeddings\": true".into()
            } else {
                "the config may belong to another model, or the download is incomplete".into()
            },
        })?;
        let stored = &self.source.tensors()[index];
        if stored.shape != shape {
            return Err(ModelError::Shape {
                file: self.source.origin().into(),
                tensor: name.into(),
                expected: shape.into(),
                found: stored.shape.clone(),
            });
        }
        if matches!(stored.stored, StoredType::Other(_)) {
            return Err(unreadable(self.source.origin(), stored));
        }
        self.used.borrow_mut().insert(index);
        Ok(index)
    }

    fn read(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        self.source.read(self.locate(name, shape)?)
    }

    /// A parameter that products are made with, on the device in the precision asked for.
    fn matrix<const D: usize>(&self, values: Vec<f32>, shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
        let param = Param::from_data(TensorData::new(values, shape), device);
        match self.precision {
            Precision::F32 => param,
            half => param.map(|x: Tensor<D>| x.cast(half.dtype())),
        }
    }

    fn norm(&self, name: &str, device: &Device) -> Result<Norm, ModelError> {
        let shape = [self.config.hidden_size];
        let vector = |kind: &str| -> Result<Param<Tensor<1>>, ModelError> {
            let values = self.read(&format!("{name}.{kind}"), &shape)?;
            Ok(Param::from_data(TensorData::new(values, shape), device))
        };
        Ok(match Norm::init(self.config, device) {
            Norm::Rms(mut norm) => {
                norm.gamma = vector("weight")?;
                Norm::Rms(norm)
            }
            Norm::Layer(mut norm) => {
                norm.gamma = vector("weight")?;
                norm.beta = Some(vector("bias")?);
                Norm::Layer(norm)
            }
        })
    }

    fn linear(&self, fused: &Fused, device: &Device) -> Result<Linear, ModelError> {
        let output = fused.output();
        let mut weight = vec![0.0; fused.input * output];
        let mut bias = vec![0.0; if fused.bias { output } else { 0 }];
        let mut first = 0;
        for part in &fused.parts {
            let stored = self.read(&format!("{}.weight", part.name), &fused.shape(part))?;
            place(&mut weight, output, first, &stored, fused, part);
            if fused.bias {
                let stored = self.read(&format!("{}.bias", part.name), &[part.output])?;
                for (row, value) in stored.into_iter().enumerate() {
                    bias[first + part.column(row)] = value;
                }
            }
            first += part.output;
        }
        Ok(Linear {
            weight: self.matrix(weight, [fused.input, output], device),
            bias: fused.bias.then(|| self.matrix(bias, [output], device)),
        })
    }

    fn warn_unused(&self) {
        let used = self.used.borrow();
        let head = self.config.architecture.names.head;
        for (index, tensor) in self.source.tensors().iter().enumerate() {
            if used.contains(&index) || BUFFERS.iter().any(|ending| tensor.name.ends_with(ending)) {
                continue;
            }
            if self.config.tie_word_embeddings && tensor.name == head {
                let embedding =
                    self.find(&(Plan { config: self.config }).full(self.config.architecture.names.embedding));
                if embedding.is_some_and(|e| self.source.bytes(e) != self.source.bytes(index)) {
                    tracing::warn!(
                        "{}: `{head}` differs from the embedding but the config ties them; the embedding is used",
                        self.source.origin()
                    );
                }
                continue;
            }
            tracing::warn!(
                "{}: tensor `{}` is not part of the model and is ignored",
                self.source.origin(),
                tensor.name
            );
        }
    }
}

/// Copies a stored part into columns `first..` of `weight` `[input, output]`.
fn place(weight: &mut [f32], output: usize, first: usize, stored: &[f32], fused: &Fused, part: &Part) {
    let input = fused.input;
    weight.par_chunks_mut(TILE * output).enumerate().for_each(|(tile, rows)| {
        let from = tile * TILE;
        let count = rows.len() / output;
        if fused.input_major {
            for i in 0..count {
                let source = &stored[(from + i) * part.output..][..part.output];
                for (row, value) in source.iter().enumerate() {
                    rows[i * output + first + part.column(row)] = *value;
                }
            }
        } else {
            for row in 0..part.output {
                let column = first + part.column(row);
                for (i, value) in stored[row * input + from..][..count].iter().enumerate() {
                    rows[i * output + column] = *value;
                }
            }
        }
    });
}

/// The inverse of [`place`].
fn take(weight: &[f32], output: usize, first: usize, fused: &Fused, part: &Part) -> Vec<f32> {
    let input = fused.input;
    let mut stored = vec![0.0; input * part.output];
    for i in 0..input {
        for row in 0..part.output {
            let at = if fused.input_major { i * part.output + row } else { row * input + i };
            stored[at] = weight[i * output + first + part.column(row)];
        }
    }
    stored
}

impl LanguageModel {
    /// The weights under transformers' names and in its layout, f32, in the order of the model.
    pub fn to_hf_tensors(&self) -> Vec<(String, TensorData)> {
        let plan = Plan { config: &self.config };
        let names = &self.config.architecture.names;
        let mut all = vec![(plan.full(names.embedding), host(&self.embedding.weight))];
        if let (Some(name), Some(positions)) = (names.positions, &self.positions) {
            all.push((plan.full(name), host(&positions.weight)));
        }
        for (layer, block) in self.blocks.iter().enumerate() {
            let [attention_norm, mlp_norm] = plan.norms(layer);
            export_norm(&attention_norm, &block.attention_norm, &mut all);
            export_linear(&plan.qkv(layer), &block.qkv, &mut all);
            export_linear(&plan.out(layer), &block.out, &mut all);
            export_norm(&mlp_norm, &block.mlp_norm, &mut all);
            export_linear(&plan.mlp_in(layer), &block.mlp_in, &mut all);
            export_linear(&plan.mlp_out(layer), &block.mlp_out, &mut all);
        }
        export_norm(&plan.full(names.final_norm), &self.norm, &mut all);
        if let (Some(fused), Some(head)) = (plan.head(), &self.head) {
            export_linear(&fused, head, &mut all);
        }
        all
    }
}

fn host<const D: usize>(param: &Param<Tensor<D>>) -> TensorData {
    param.val().into_data().convert::<f32>()
}

fn floats<const D: usize>(param: &Param<Tensor<D>>) -> Vec<f32> {
    host(param).as_slice::<f32>().expect("converted to f32").to_vec()
}

fn export_norm(name: &str, norm: &Norm, all: &mut Vec<(String, TensorData)>) {
    let (gamma, beta) = match norm {
        Norm::Rms(norm) => (&norm.gamma, None),
        Norm::Layer(norm) => (&norm.gamma, norm.beta.as_ref()),
    };
    all.push((format!("{name}.weight"), host(gamma)));
    if let Some(beta) = beta {
        all.push((format!("{name}.bias"), host(beta)));
    }
}

fn export_linear(fused: &Fused, linear: &Linear, all: &mut Vec<(String, TensorData)>) {
    let output = fused.output();
    let weight = floats(&linear.weight);
    let bias = linear.bias.as_ref().map(floats);
    let mut first = 0;
    for part in &fused.parts {
        let stored = take(&weight, output, first, fused, part);
        all.push((format!("{}.weight", part.name), TensorData::new(stored, fused.shape(part))));
        if let Some(bias) = &bias {
            let stored: Vec<f32> = (0..part.output).map(|row| bias[first + part.column(row)]).collect();
            all.push((format!("{}.bias", part.name), TensorData::new(stored, [part.output])));
        }
        first += part.output;
    }
}
