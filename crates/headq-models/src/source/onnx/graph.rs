//! The graph: nodes, the values between them, and walks along them.

use std::collections::{HashMap, HashSet};

use onnx_ir::{AttributeProto, NodeProto};

use super::file::{Constant, OnnxFile, unsupported};
use crate::error::ModelError;

/// The standard operators that exports of decoders are made of.
#[rustfmt::skip]
const KNOWN: &[&str] = &[
    "Abs", "Add", "And", "Attention", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "Cast", "CastLike", "Clip", "Concat",
    "Constant", "ConstantOfShape", "Cos", "CumSum", "Div", "Dropout", "Equal", "Erf", "Exp", "Expand", "Flatten",
    "Floor", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "Greater", "GreaterOrEqual", "Identity", "IsInf",
    "IsNaN", "LayerNormalization", "Less", "LessOrEqual", "MatMul", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
    "Pow", "RMSNormalization", "Range", "Reciprocal", "ReduceAll", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
    "Relu", "Reshape", "RotaryEmbedding", "ScatterElements", "ScatterND", "SequenceAt", "Shape", "Sigmoid",
    "SimplifiedLayerNormalization", "Sin", "Size", "Slice", "Softmax", "Split", "SplitToSequence", "Sqrt", "Squeeze",
    "Sub", "Swish", "Tanh", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
];

/// Operators of weights in fewer bits.
#[rustfmt::skip]
const QUANTIZED: &[&str] = &[
    "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "GatherBlockQuantized", "MatMulBnb4",
    "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QAttention", "QGemm", "QLinearMatMul", "QuantizeLinear",
];

/// Operators whose result is their first input, seen in another shape, type or part.
const PASSING: &[&str] =
    &["Identity", "Cast", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Dropout", "Slice"];

/// A value's place in the lists of [`Graph`].
pub(super) type Value = usize;

/// An operator with its values; an optional input that is left out is `None`.
pub(super) struct Node<'a> {
    proto: &'a NodeProto,
    pub inputs: Vec<Option<Value>>,
    pub outputs: Vec<Value>,
}

impl<'a> Node<'a> {
    pub fn op(&self) -> &'a str {
        &self.proto.op_type
    }

    pub fn is(&self, ops: &[&str]) -> bool {
        ops.contains(&self.op())
    }

    pub fn input(&self, index: usize) -> Option<Value> {
        self.inputs.get(index).copied().flatten()
    }

    pub fn attribute(&self, name: &str) -> Option<&'a AttributeProto> {
        self.proto.attribute.iter().find(|a| a.name == name)
    }

    pub fn integer(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).map_or(default, |a| a.i)
    }

    pub fn float(&self, name: &str, default: f32) -> f32 {
        self.attribute(name).map_or(default, |a| a.f)
    }

    /// For messages.
    pub fn label(&self) -> String {
        format!("{} ({})", self.op(), named(self.proto))
    }
}

/// A constant matrix or vector as an operator sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    /// Index in [`Graph::constants`].
    pub constant: usize,
    pub transposed: bool,
}

/// What lies behind a value: everything it is computed from, up to where a walk stops.
pub(super) struct Behind {
    /// Values where the walk stopped.
    pub stops: HashSet<Value>,
    /// Nodes passed, the nearest first.
    pub nodes: Vec<usize>,
}

/// The nodes of a file, in an order in which they can be computed.
pub(super) struct Graph<'a> {
    pub file: &'a str,
    pub nodes: Vec<Node<'a>>,
    pub constants: &'a [Constant],
    names: Vec<&'a str>,
    producers: Vec<Option<usize>>,
    consumers: Vec<Vec<usize>>,
    constant_of: Vec<Option<usize>>,
    /// Values that come from outside.
    inputs: HashSet<Value>,
    pub outputs: Vec<Value>,
}

impl<'a> Graph<'a> {
    /// # Errors
    /// An operator that is not known, a value made twice, or nodes that are not in order.
    pub fn new(onnx: &'a OnnxFile) -> Result<Self, ModelError> {
        let mut graph = Self {
            file: &onnx.file,
            nodes: Vec::new(),
            constants: &onnx.constants,
            names: Vec::new(),
            producers: Vec::new(),
            consumers: Vec::new(),
            constant_of: Vec::new(),
            inputs: HashSet::new(),
            outputs: Vec::new(),
        };
        let mut known = HashMap::new();
        for (index, constant) in onnx.constants.iter().enumerate() {
            let value = graph.value(&mut known, &constant.name);
            graph.constant_of[value] = Some(index);
        }
        for input in &onnx.graph.input {
            let value = graph.value(&mut known, &input.name);
            // Older files list their initializers as inputs too.
            if graph.constant_of[value].is_none() {
                graph.inputs.insert(value);
            }
        }
        for node in &onnx.graph.node {
            graph.add(node, &mut known)?;
        }
        graph.outputs = onnx.graph.output.iter().filter_map(|o| known.get(o.name.as_str()).copied()).collect();
        Ok(graph)
    }

    fn value(&mut self, known: &mut HashMap<&'a str, Value>, name: &'a str) -> Value {
        *known.entry(name).or_insert_with(|| {
            self.names.push(name);
            self.producers.push(None);
            self.consumers.push(Vec::new());
            self.constant_of.push(None);
            self.names.len() - 1
        })
    }

    fn add(&mut self, proto: &'a NodeProto, known: &mut HashMap<&'a str, Value>) -> Result<(), ModelError> {
        check_operator(self.file, proto)?;
        let index = self.nodes.len();
        let mut inputs = Vec::with_capacity(proto.input.len());
        for name in &proto.input {
            let value = match (name.as_str(), known.get(name.as_str())) {
                ("", _) => None,
                (_, Some(&value)) => Some(value),
                _ => {
                    let reason = format!("node `{}` reads `{name}`, which nothing before it makes", proto.name);
                    return Err(ModelError::corrupt(self.file, reason));
                }
            };
            inputs.push(value);
        }
        for &value in inputs.iter().flatten() {
            self.consumers[value].push(index);
        }
        let mut outputs = Vec::with_capacity(proto.output.len());
        for name in &proto.output {
            let value = self.value(known, name);
            let constant = proto.op_type == "Constant" && self.constant_of[value].is_some();
            let taken = self.producers[value].is_some() || self.inputs.contains(&value);
            if !name.is_empty() && (taken || self.constant_of[value].is_some() && !constant) {
                return Err(ModelError::corrupt(self.file, format!("value `{name}` is made twice")));
            }
            self.producers[value] = Some(index);
            outputs.push(value);
        }
        self.nodes.push(Node { proto, inputs, outputs });
        Ok(())
    }

    pub fn name(&self, value: Value) -> &'a str {
        self.names[value]
    }

    /// The node that makes a value; `None` for constants and inputs.
    pub fn producer(&self, value: Value) -> Option<usize> {
        self.producers[value].filter(|_| self.constant_of[value].is_none())
    }

    pub fn consumers(&self, value: Value) -> &[usize] {
        &self.consumers[value]
    }

    pub fn is_input(&self, value: Value) -> bool {
        self.inputs.contains(&value)
    }

    /// The value that `value` is, seen in another shape, type or part.
    pub fn strip(&self, mut value: Value) -> Value {
        // Ends, for the nodes are in order.
        while let Some(node) = self.producer(value).map(|n| &self.nodes[n]).filter(|n| n.is(PASSING)) {
            match node.input(0) {
                Some(input) => value = input,
                None => break,
            }
        }
        value
    }

    /// A constant, possibly cast or transposed.
    pub fn view(&self, value: Value) -> Option<View> {
        if let Some(constant) = self.constant_of[value] {
            return Some(View { constant, transposed: false });
        }
        let node = &self.nodes[self.producer(value)?];
        let inner = || self.view(node.input(0)?);
        match node.op() {
            "Identity" | "Cast" | "CastLike" => inner(),
            "Transpose" => {
                let swap = node.attribute("perm").is_none_or(|perm| perm.ints == [1, 0]);
                let view = inner().filter(|v| swap && self.constants[v.constant].shape.len() == 2)?;
                Some(View { transposed: !view.transposed, ..view })
            }
            _ => None,
        }
    }

    /// A float matrix, as [`view`](Self::view), with its shape as seen.
    pub fn matrix(&self, value: Value) -> Option<(View, [usize; 2])> {
        let view = self.view(value)?;
        match self.constants[view.constant].shape[..] {
            [rows, columns] if self.constants[view.constant].is_float() => {
                Some((view, if view.transposed { [columns, rows] } else { [rows, columns] }))
            }
            _ => None,
        }
    }

    /// A float vector of more than one element.
    pub fn vector(&self, value: Value) -> Option<View> {
        let view = self.view(value)?;
        let constant = &self.constants[view.constant];
        (constant.is_float() && constant.shape.len() == 1 && constant.shape[0] > 1).then_some(view)
    }

    /// The constant of a value that is a constant in whatever shape.
    fn constant(&self, value: Value) -> Option<&'a Constant> {
        self.constant_of[self.strip(value)].map(|index| &self.constants[index])
    }

    /// The one number of a constant; a number in f32 becomes the shortest decimal that is that f32.
    pub fn scalar(&self, value: Value) -> Option<f64> {
        let constant = self.constant(value).filter(|c| c.elements() == 1)?;
        if let Some(integers) = constant.integers() {
            return integers.first().map(|&i| i as f64);
        }
        numbers(constant)?.first().copied()
    }

    /// The last element of a shape: of a constant, or of the last constant that is joined to one.
    pub fn last_dimension(&self, shape: Value) -> Option<i64> {
        if let Some(constant) = self.constant(shape) {
            return constant.integers()?.last().copied();
        }
        let node = &self.nodes[self.producer(self.strip(shape))?];
        let last = node.inputs.last().copied().flatten().filter(|_| node.op() == "Concat")?;
        self.constant(last)?.integers()?.last().copied()
    }

    /// Everything behind `value`, up to values that `stop`, constants and inputs; what is read of a shape is not followed.
    pub fn behind(&self, value: Value, stop: impl Fn(Value) -> bool) -> Behind {
        let mut found = Behind { stops: HashSet::new(), nodes: Vec::new() };
        let mut seen = HashSet::from([value]);
        let mut queue = std::collections::VecDeque::from([value]);
        while let Some(value) = queue.pop_front() {
            if stop(value) {
                found.stops.insert(value);
                continue;
            }
            let Some(index) = self.producer(value) else { continue };
            let node = &self.nodes[index];
            if node.is(&["Shape", "Size"]) {
                continue;
            }
            if !found.nodes.contains(&index) {
                found.nodes.push(index);
            }
            queue.extend(node.inputs.iter().flatten().filter(|v| seen.insert(**v)));
        }
        found
    }

    /// For each value whether it is computed from `source` (not only from its shape).
    pub fn downstream(&self, source: Value) -> Vec<bool> {
        let mut live = vec![false; self.names.len()];
        live[source] = true;
        for node in self.nodes.iter().filter(|n| !n.is(&["Shape", "Size"])) {
            if node.inputs.iter().flatten().any(|&v| live[v]) {
                node.outputs.iter().for_each(|&v| live[v] = true);
            }
        }
        live
    }
}

/// The elements of a float constant; those in f32 as the shortest decimals that are those f32.
pub(super) fn numbers(constant: &Constant) -> Option<Vec<f64>> {
    let values = crate::source::plain_floats(&constant.stored, &constant.data)?;
    Some(values.into_iter().map(|x| x.to_string().parse().unwrap_or_else(|_| f64::from(x))).collect())
}

/// A node by its name, or by what it gives where it has none.
fn named(node: &NodeProto) -> String {
    match (node.name.as_str(), node.output.first()) {
        ("", Some(output)) => format!("the node that gives `{output}`"),
        (name, _) => format!("node `{name}`"),
    }
}

fn check_operator(file: &str, node: &NodeProto) -> Result<(), ModelError> {
    let op = node.op_type.as_str();
    let standard = node.domain.is_empty() || node.domain == "ai.onnx";
    let label = if standard { op.to_owned() } else { format!("{}::{op}", node.domain) };
    let what = |kind: &str| format!("{kind} {label} ({})", named(node));
    if QUANTIZED.contains(&op) {
        let hint = "weights in fewer bits cannot be imported from ONNX; export the model in f32, f16 or bf16";
        return Err(unsupported(file, what("operator"), hint));
    }
    if !standard {
        let hint = "export the model without the optimizations of a runtime (optimum-cli export onnx without -O, or \
                    torch.onnx.export)";
        return Err(unsupported(file, what("operator"), hint));
    }
    if matches!(op, "If" | "Loop" | "Scan") {
        let hint = "export the model as one straight graph (optimum-cli export onnx --no-post-process)";
        return Err(unsupported(file, what("control flow by"), hint));
    }
    if !KNOWN.contains(&op) {
        let hint = "it occurs in none of the known architectures; give a safetensors folder instead";
        return Err(unsupported(file, what("operator"), hint));
    }
    Ok(())
}
