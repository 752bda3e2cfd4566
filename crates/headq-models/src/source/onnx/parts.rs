//! The parts of a decoder, each found by the operators it is made of: embeddings, linear layers, normalisations.

use std::collections::HashMap;

use super::file::unsupported;
use super::graph::{Graph, Value, View};
use crate::config::NormKind;
use crate::error::ModelError;

/// A linear layer: x · weight + bias.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    /// `[in, out]` as seen.
    pub weight: View,
    pub shape: [usize; 2],
    pub bias: Option<View>,
    pub input: Value,
    pub output: Value,
    /// For messages.
    pub label: String,
}

/// A normalisation with its scale and shift.
#[derive(Debug, Clone)]
pub(super) struct Norm {
    pub kind: NormKind,
    pub weight: View,
    pub bias: Option<View>,
    /// `None` where it is not a constant.
    pub eps: Option<f64>,
    pub input: Value,
}

/// A table of which rows are gathered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table {
    pub view: View,
    pub shape: [usize; 2],
    /// The rows' numbers are an input of the graph, other than positions: token ids.
    pub of_tokens: bool,
}

/// All linear layers of a graph, and which values are the output of which.
pub(super) struct Linears {
    pub all: Vec<Linear>,
    /// By the output before the bias, and after it.
    pub by_output: HashMap<Value, usize>,
}

impl Linears {
    /// # Errors
    /// A `Gemm` that scales or transposes its input.
    pub fn find(graph: &Graph) -> Result<Self, ModelError> {
        let mut found = Self { all: Vec::new(), by_output: HashMap::new() };
        for (index, node) in graph.nodes.iter().enumerate() {
            let linear = match node.op() {
                "MatMul" => matmul(graph, index),
                "Gemm" => gemm(graph, index)?,
                _ => None,
            };
            if let Some(linear) = linear {
                found.by_output.insert(node.outputs[0], found.all.len());
                found.by_output.insert(linear.output, found.all.len());
                found.all.push(linear);
            }
        }
        Ok(found)
    }
}

fn matmul(graph: &Graph, index: usize) -> Option<Linear> {
    let node = &graph.nodes[index];
    let (input, (weight, shape)) = (node.input(0)?, graph.matrix(node.input(1)?)?);
    if graph.view(input).is_some() {
        return None;
    }
    let product = node.outputs[0];
    let added = graph.consumers(product).iter().find_map(|&n| {
        let (bias, _) = vector_operand(graph, n, "Add")?;
        (graph.constants[bias.constant].shape == [shape[1]]).then_some((bias, graph.nodes[n].outputs[0]))
    });
    let (bias, output) = added.map_or((None, product), |(bias, sum)| (Some(bias), sum));
    Some(Linear { weight, shape, bias, input, output, label: node.label() })
}

fn gemm(graph: &Graph, index: usize) -> Result<Option<Linear>, ModelError> {
    let node = &graph.nodes[index];
    let (Some(input), Some((view, [rows, columns]))) = (node.input(0), node.input(1).and_then(|w| graph.matrix(w)))
    else {
        return Ok(None);
    };
    let bias = node.input(2).and_then(|b| graph.vector(b));
    if node.integer("transA", 0) != 0
        || node.float("alpha", 1.0) != 1.0
        || node.input(2).is_some() && (node.float("beta", 1.0) != 1.0 || bias.is_none())
    {
        let hint = "a linear layer is x · W + b; export the model with torch.onnx.export or optimum";
        return Err(unsupported(graph.file, format!("the scaled or transposed product {}", node.label()), hint));
    }
    let swap = node.integer("transB", 0) != 0;
    let weight = View { transposed: view.transposed != swap, ..view };
    let shape = if swap { [columns, rows] } else { [rows, columns] };
    Ok(Some(Linear { weight, shape, bias, input, output: node.outputs[0], label: node.label() }))
}

/// The constant vector and the other operand of a node `op` that has one of each.
pub(super) fn vector_operand(graph: &Graph, index: usize, op: &str) -> Option<(View, Value)> {
    let node = &graph.nodes[index];
    let (a, b) = (node.input(0)?, node.input(1)?);
    if node.op() != op {
        return None;
    }
    match (graph.vector(a), graph.vector(b)) {
        (Some(vector), None) => Some((vector, b)),
        (None, Some(vector)) => Some((vector, a)),
        _ => None,
    }
}

/// The table that a value is rows of.
pub(super) fn table(graph: &Graph, value: Value) -> Option<Table> {
    let node = &graph.nodes[graph.producer(value)?];
    if node.op() != "Gather" || node.integer("axis", 0) != 0 {
        return None;
    }
    let (view, shape) = graph.matrix(node.input(0)?)?;
    let rows = graph.strip(node.input(1)?);
    let of_tokens = graph.is_input(rows) && !graph.name(rows).contains("position");
    Some(Table { view, shape, of_tokens })
}

/// The normalisation whose output `value` is: one operator, or what exporters write out for it.
pub(super) fn norm(graph: &Graph, value: Value) -> Option<Norm> {
    let index = graph.producer(graph.strip(value))?;
    let node = &graph.nodes[index];
    match node.op() {
        "LayerNormalization" | "RMSNormalization" | "SimplifiedLayerNormalization" => {
            let kind = if node.op() == "LayerNormalization" { NormKind::Layer } else { NormKind::Rms };
            let eps = node.float("epsilon", 1e-5).to_string().parse().ok();
            let bias = node.input(2).and_then(|b| graph.vector(b));
            Some(Norm { kind, weight: graph.vector(node.input(1)?)?, bias, eps, input: node.input(0)? })
        }
        "Mul" => {
            let (weight, scaled) = vector_operand(graph, index, "Mul")?;
            let (kind, eps, input) = normalised(graph, scaled)?;
            Some(Norm { kind, weight, bias: None, eps, input })
        }
        "Add" => {
            let (bias, scaled) = vector_operand(graph, index, "Add")?;
            let inner = norm(graph, scaled)?;
            (inner.bias.is_none() && inner.kind == NormKind::Layer).then_some(Norm { bias: Some(bias), ..inner })
        }
        _ => None,
    }
}

/// x / √(mean x² + ε), or the same of x − mean x: which, ε, and x.
fn normalised(graph: &Graph, value: Value) -> Option<(NormKind, Option<f64>, Value)> {
    let node = &graph.nodes[graph.producer(graph.strip(value))?];
    let (a, b) = (node.input(0)?, node.input(1)?);
    let (x, eps) = match node.op() {
        "Div" => (a, epsilon(graph, b)?),
        "Mul" => epsilon(graph, b).map(|eps| (a, eps)).or_else(|| Some((b, epsilon(graph, a)?)))?,
        _ => return None,
    };
    let centred = graph.producer(graph.strip(x)).map(|n| &graph.nodes[n]).filter(|n| n.op() == "Sub");
    let mean = centred.and_then(|n| n.input(1)).and_then(|m| graph.producer(graph.strip(m)));
    match mean.map(|n| graph.nodes[n].op()) {
        Some("ReduceMean") => Some((NormKind::Layer, Some(eps), centred?.input(0)?)),
        _ => Some((NormKind::Rms, Some(eps), x)),
    }
}

/// ε of a value that is √(mean + ε) or its reciprocal.
fn epsilon(graph: &Graph, value: Value) -> Option<f64> {
    let node = &graph.nodes[graph.producer(graph.strip(value))?];
    match node.op() {
        "Sqrt" | "Reciprocal" | "Pow" => epsilon(graph, node.input(0)?),
        "Div" => graph.scalar(node.input(0)?).and_then(|_| epsilon(graph, node.input(1)?)),
        "Add" => {
            let (a, b) = (node.input(0)?, node.input(1)?);
            let (mean, eps) = graph.scalar(b).map(|eps| (a, eps)).or_else(|| Some((b, graph.scalar(a)?)))?;
            let mean = &graph.nodes[graph.producer(graph.strip(mean))?];
            (mean.op() == "ReduceMean").then_some(eps)
        }
        _ => None,
    }
}
