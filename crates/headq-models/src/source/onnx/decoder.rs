//! What each weight of a graph is for.
//!
//! Exporters rename weights, transpose them and fold them into others, so names say little; the graph says all. Linear layers
//! that read a normalisation of the residual stream (*readers*) are the projections into attention and MLP, and the head;
//! all others (*writers*) add to the stream, and what lies behind a writer says which readers belong to it, and whether
//! with a softmax between. The number of writers in the stream that a block reads is its depth. Queries, keys and values
//! are told apart by the two products of attention, gate and up by the non-linearity.

use std::collections::{BTreeSet, HashSet};

use super::file::{Constant, unsupported};
use super::graph::{Behind, Graph, Value, numbers};
use super::parts::{Linear, Linears, Norm, Table, norm, table, vector_operand};
use crate::config::Activation;
use crate::error::ModelError;
use crate::source::StoredType;

/// Non-linearities of MLPs, and what exporters write out for them.
const NONLINEAR: &[&str] = &["Sigmoid", "Swish", "Erf", "Gelu", "Tanh", "Relu"];
const HINT: &str = "the graph must be a decoder of a known architecture, as torch.onnx.export or optimum writes it; or give a \
                    safetensors folder instead";

/// A decoder with every weight in its place.
#[derive(Debug)]
pub(super) struct Decoder {
    pub tokens: Table,
    /// Learned positions.
    pub positions: Option<Table>,
    pub layers: Vec<Layer>,
    pub norm: Norm,
    pub head: Linear,
    pub parallel_residual: bool,
    /// Radians per position of the rotary embedding, where they are one constant.
    pub frequencies: Option<Vec<f64>>,
}

#[derive(Debug)]
pub(super) struct Layer {
    pub attention_norm: Norm,
    /// Query, key and value; or one layer for all.
    pub qkv: Vec<Linear>,
    pub out: Linear,
    pub mlp_norm: Norm,
    /// Gate and up; or up alone.
    pub mlp_in: Vec<Linear>,
    pub mlp_out: Linear,
    pub activation: Activation,
    /// Width of the heads that queries are reshaped to before attention.
    pub head_width: Option<usize>,
    /// Whether that is done to the output of a projection as a whole: where query, key and value are one, the width is that of
    /// three, head by head.
    pub by_head: bool,
    /// Factor on the scores, where it is a constant.
    pub scale: Option<f64>,
    pub window: Option<usize>,
}

impl Decoder {
    pub fn find(graph: &Graph) -> Result<Self, ModelError> {
        Search::new(graph)?.decoder()
    }
}

/// A linear layer that reads the residual stream.
struct Reader {
    norm: Norm,
    /// Writers in the stream that it reads.
    depth: BTreeSet<usize>,
}

/// A block of attention or of an MLP: what reads the stream, and what writes to it.
struct Block {
    readers: Vec<usize>,
    writer: usize,
    behind: Behind,
}

struct Search<'a> {
    graph: &'a Graph<'a>,
    linears: Linears,
    /// For each value whether it is computed from the token embedding.
    live: Vec<bool>,
    tables: Vec<Table>,
    readers: Vec<Option<Reader>>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph<'a>) -> Result<Self, ModelError> {
        let linears = Linears::find(graph)?;
        let is_tokens = |v: &Value| table(graph, *v).is_some_and(|t| t.of_tokens);
        let embedded = graph.nodes.iter().flat_map(|n| &n.outputs).copied().find(is_tokens);
        let embedded = embedded.ok_or_else(|| {
            unsupported(graph.file, "a graph without an embedding of token ids (Gather of a matrix by an input)", HINT)
        })?;
        let live = graph.downstream(embedded);
        let mut search = Self { graph, linears, live, tables: Vec::new(), readers: Vec::new() };
        for index in 0..search.linears.all.len() {
            let reader = search.reader(index)?;
            search.readers.push(reader);
        }
        Ok(search)
    }

    fn unknown(&self, what: impl Into<String>) -> ModelError {
        unsupported(self.graph.file, what, HINT)
    }

    fn reader(&mut self, index: usize) -> Result<Option<Reader>, ModelError> {
        let Some(norm) = norm(self.graph, self.linears.all[index].input) else { return Ok(None) };
        let depth = self.stream(norm.input)?;
        Ok(Some(Reader { norm, depth }))
    }

    /// The writers whose sum, with the embeddings, a value is.
    fn stream(&mut self, value: Value) -> Result<BTreeSet<usize>, ModelError> {
        let mut writers = BTreeSet::new();
        let (mut seen, mut open) = (HashSet::new(), vec![value]);
        while let Some(value) = open.pop().map(|v| self.graph.strip(v)) {
            if !seen.insert(value) {
                continue;
            }
            if let Some(&linear) = self.linears.by_output.get(&value) {
                writers.insert(linear);
            } else if let Some(table) = table(self.graph, value) {
                if !self.tables.iter().any(|t| t.view == table.view) {
                    self.tables.push(table);
                }
            } else {
                let node = self.graph.producer(value).map(|n| &self.graph.nodes[n]);
                match node.filter(|n| n.op() == "Add") {
                    Some(node) => open.extend(node.inputs.iter().flatten()),
                    None => {
                        let name = || format!("the constant or input `{}`", self.graph.name(value));
                        let label = node.map_or_else(name, |n| n.label());
                        return Err(self.unknown(format!("{label} in the residual stream")));
                    }
                }
            }
        }
        Ok(writers)
    }

    fn decoder(self) -> Result<Decoder, ModelError> {
        let (attentions, mlps) = self.blocks()?;
        if attentions.is_empty() || attentions.len() != mlps.len() {
            let what = format!("a graph with {} blocks of attention and {} of MLPs", attentions.len(), mlps.len());
            return Err(self.unknown(what));
        }
        let parallel_residual = self.depth(&mlps[0]).is_empty();
        let layers = self.layers(&attentions, &mlps, parallel_residual)?;
        let blocks: Vec<Block> = attentions.into_iter().chain(mlps).collect();
        let (head, norm) = self.head(&blocks)?;
        let (tokens, positions) = self.embeddings()?;
        let frequencies = self.frequencies();
        let decoder = Decoder { tokens, positions, layers, norm, head, parallel_residual, frequencies };
        self.check_nothing_is_left(&decoder)?;
        Ok(decoder)
    }

    /// The layers in order: each block must read all that was written before it, and nothing else.
    fn layers(&self, attentions: &[Block], mlps: &[Block], parallel: bool) -> Result<Vec<Layer>, ModelError> {
        let mut written = BTreeSet::new();
        let mut layers = Vec::with_capacity(mlps.len());
        for (number, (attention, mlp)) in attentions.iter().zip(mlps).enumerate() {
            let before = written.clone();
            written.insert(attention.writer);
            let between = if parallel { &before } else { &written };
            if *self.depth(attention) != before || self.depth(mlp) != between {
                return Err(self.unknown(format!("the order of the blocks from layer {number} on")));
            }
            layers.push(self.layer(number, attention, mlp)?);
            written.insert(mlp.writer);
        }
        Ok(layers)
    }

    /// The reader that belongs to no block, and its normalisation.
    fn head(&self, blocks: &[Block]) -> Result<(Linear, Norm), ModelError> {
        let in_blocks: BTreeSet<usize> = blocks.iter().flat_map(|b| &b.readers).copied().collect();
        let written: BTreeSet<usize> = blocks.iter().map(|b| b.writer).collect();
        let candidates = self.readers.iter().zip(&self.linears.all).enumerate();
        let heads: Vec<(&Reader, &Linear)> = candidates
            .filter(|(index, (_, linear))| !in_blocks.contains(index) && self.live[linear.output])
            .filter_map(|(_, (reader, linear))| Some((reader.as_ref()?, linear)))
            .collect();
        let [(reader, head)] = heads[..] else {
            return Err(
                self.unknown(format!("a graph with {} output heads (products of normalised states)", heads.len()))
            );
        };
        if head.bias.is_some() {
            return Err(self.unknown(format!("the bias on the output head's {}", head.label)));
        }
        if reader.depth != written {
            return Err(self.unknown("an output head that does not read all layers"));
        }
        if !self.graph.outputs.iter().any(|o| self.graph.strip(*o) == head.output) {
            return Err(self.unknown(format!("an operator between the head's {} and the logits", head.label)));
        }
        Ok((head.clone(), reader.norm.clone()))
    }

    fn depth(&self, block: &Block) -> &BTreeSet<usize> {
        // Blocks are made of readers, and have at least one.
        &self.readers[block.readers[0]].as_ref().expect("a reader").depth
    }

    fn embeddings(&self) -> Result<(Table, Option<Table>), ModelError> {
        let (tokens, positions): (Vec<Table>, Vec<Table>) = self.tables.iter().partition(|t| t.of_tokens);
        match (tokens.as_slice(), positions.as_slice()) {
            ([tokens], []) => Ok((*tokens, None)),
            ([tokens], [positions]) => Ok((*tokens, Some(*positions))),
            _ => Err(self.unknown(format!("a residual stream that begins with {} embeddings", self.tables.len()))),
        }
    }

    /// The blocks of attention and of MLPs, each kind by depth.
    fn blocks(&self) -> Result<(Vec<Block>, Vec<Block>), ModelError> {
        let (mut attentions, mut mlps) = (Vec::new(), Vec::new());
        for (writer, linear) in self.linears.all.iter().enumerate() {
            if self.readers[writer].is_some() || !self.live[linear.output] {
                continue;
            }
            let behind = self.behind(linear.input);
            let readers = self.linears_of(&behind);
            if readers.is_empty() || readers.iter().any(|r| self.readers[*r].is_none()) {
                return Err(self.unknown(format!("what the linear layer {} reads", linear.label)));
            }
            let first = &self.readers[readers[0]].as_ref().expect("checked above").norm;
            if readers.iter().flat_map(|r| &self.readers[*r]).any(|r| r.norm.weight != first.weight) {
                return Err(self.unknown(format!("the several normalisations that {} reads", linear.label)));
            }
            let kind = if self.has(&behind, &["Softmax", "Attention"]) { &mut attentions } else { &mut mlps };
            kind.push(Block { readers, writer, behind });
        }
        for blocks in [&mut attentions, &mut mlps] {
            blocks.sort_by_key(|b| self.depth(b).len());
        }
        Ok((attentions, mlps))
    }

    fn behind(&self, value: Value) -> Behind {
        self.graph.behind(value, |v| self.linears.by_output.contains_key(&v) || table(self.graph, v).is_some())
    }

    fn linears_of(&self, behind: &Behind) -> Vec<usize> {
        let found: BTreeSet<usize> =
            behind.stops.iter().filter_map(|v| self.linears.by_output.get(v)).copied().collect();
        found.into_iter().collect()
    }

    fn has(&self, behind: &Behind, ops: &[&str]) -> bool {
        behind.nodes.iter().any(|&n| self.graph.nodes[n].is(ops))
    }

    fn layer(&self, number: usize, attention: &Block, mlp: &Block) -> Result<Layer, ModelError> {
        let get = |indices: &[usize]| indices.iter().map(|i| self.linears.all[*i].clone()).collect::<Vec<_>>();
        // Blocks are made of readers.
        let norm = |block: &Block| self.readers[block.readers[0]].as_ref().expect("a reader").norm.clone();
        let (qkv, scores) = self.attention(number, attention)?;
        let (mlp_in, activation) = self.mlp(number, mlp)?;
        let heads = self.heads(scores.query);
        Ok(Layer {
            attention_norm: norm(attention),
            qkv: get(&qkv),
            out: self.linears.all[attention.writer].clone(),
            mlp_norm: norm(mlp),
            mlp_in: get(&mlp_in),
            mlp_out: self.linears.all[mlp.writer].clone(),
            activation,
            head_width: heads.map(|(width, _)| width),
            by_head: heads.is_some_and(|(_, whole)| whole),
            scale: scores.scale,
            window: self.window(&attention.behind),
        })
    }

    /// The readers as query, key and value, by the products they enter: (q · kᵀ), then softmax · v.
    fn attention(&self, number: usize, block: &Block) -> Result<(Vec<usize>, Scores), ModelError> {
        let operands = self.operands(number, block)?;
        let scores = self.scores(number, &operands)?;
        if block.readers.len() == 1 {
            return Ok((block.readers.clone(), scores));
        }
        let mut order = Vec::new();
        for value in [operands.query, operands.key, operands.value] {
            match self.linears_of(&self.behind(value))[..] {
                [one] if !order.contains(&one) => order.push(one),
                _ => {
                    return Err(
                        self.unknown(format!("what queries, keys and values are computed from in layer {number}"))
                    );
                }
            }
        }
        Ok((order, scores))
    }

    fn operands(&self, number: usize, block: &Block) -> Result<Operands, ModelError> {
        let graph = self.graph;
        let is_product = |n: &&usize| {
            let node = &graph.nodes[**n];
            node.op() == "MatMul" && node.inputs.iter().flatten().all(|&v| self.live[v])
        };
        if let Some(&whole) = block.behind.nodes.iter().find(|n| graph.nodes[**n].op() == "Attention") {
            return self.operator(whole);
        }
        let products: Vec<usize> = block.behind.nodes.iter().filter(is_product).copied().collect();
        if let [weighted, scores] = products[..] {
            let (weighted, scores) = (&graph.nodes[weighted], &graph.nodes[scores]);
            let softmax = |v: Value| self.has(&self.behind(v), &["Softmax"]);
            if let (Some(p), Some(value), Some(query), Some(key)) =
                (weighted.input(0), weighted.input(1), scores.input(0), scores.input(1))
                && softmax(p)
                && !softmax(value)
            {
                return Ok(Operands { query, key, value, scored: Some(p), whole: None });
            }
        }
        Err(self.unknown(format!("attention that is not softmax(q · kᵀ) · v in layer {number}")))
    }

    /// The operands of attention as one operator.
    fn operator(&self, index: usize) -> Result<Operands, ModelError> {
        let node = &self.graph.nodes[index];
        if node.float("softcap", 0.0) != 0.0 {
            return Err(self.unknown(format!("{} with a soft cap on the scores", node.label())));
        }
        match (node.input(0), node.input(1), node.input(2)) {
            (Some(query), Some(key), Some(value)) => {
                Ok(Operands { query, key, value, scored: None, whole: Some(index) })
            }
            _ => Err(self.unknown(format!("{} without queries, keys and values", node.label()))),
        }
    }

    /// What is done to the scores: their factor, and that nothing else is.
    fn scores(&self, number: usize, operands: &Operands) -> Result<Scores, ModelError> {
        let ends = operands.scored.map_or(vec![operands.query, operands.key], |p| vec![p]);
        let nodes: BTreeSet<usize> = ends.iter().flat_map(|v| self.behind(*v).nodes).collect();
        let mut factor = 1.0;
        for node in nodes.iter().map(|n| &self.graph.nodes[*n]) {
            let (Some(a), b) = (node.input(0), node.input(1)) else { continue };
            if !node.inputs.iter().flatten().any(|&v| self.live[v]) {
                continue;
            }
            let constant = |v: Option<Value>| v.and_then(|v| self.graph.scalar(v));
            match node.op() {
                "Mul" => factor *= constant(Some(a)).or(constant(b)).unwrap_or(1.0),
                "Div" => factor /= constant(b).unwrap_or(1.0),
                "Tanh" | "LayerNormalization" | "RMSNormalization" | "ReduceMean" => {
                    return Err(self.unknown(format!("{} on queries, keys or scores in layer {number}", node.label())));
                }
                _ => {}
            }
        }
        let explicit = operands.whole.and_then(|n| self.graph.nodes[n].attribute("scale")).map(|a| f64::from(a.f));
        let scale = explicit.map(|scale| scale * factor).or((factor != 1.0).then_some(factor));
        Ok(Scores { query: operands.query, scale })
    }

    /// The last width that queries are reshaped to, and whether what is reshaped is the output of a linear layer.
    fn heads(&self, query: Value) -> Option<(usize, bool)> {
        let behind = self.graph.behind(query, |v| !self.live[v] || self.linears.by_output.contains_key(&v));
        let reshape = behind.nodes.iter().map(|n| &self.graph.nodes[*n]).find(|n| n.op() == "Reshape")?;
        let width = usize::try_from(self.graph.last_dimension(reshape.input(1)?)?).ok().filter(|width| *width > 0)?;
        Some((width, self.linears.by_output.contains_key(&reshape.input(0)?)))
    }

    /// A mask by which keys must come after the query's position less a constant.
    fn window(&self, behind: &Behind) -> Option<usize> {
        let graph = self.graph;
        behind.nodes.iter().map(|n| &graph.nodes[*n]).filter(|n| n.is(&["Greater", "Less"])).find_map(|comparison| {
            let earliest = comparison.input(if comparison.op() == "Greater" { 1 } else { 0 })?;
            let node = &graph.nodes[graph.producer(graph.strip(earliest))?];
            let back = match node.op() {
                "Sub" => graph.scalar(node.input(1)?)?,
                "Add" => -graph.scalar(node.input(1)?)?,
                _ => return None,
            };
            (back >= 1.0).then_some(back as usize)
        })
    }

    /// The readers as gate and up, or up alone, and the non-linearity.
    fn mlp(&self, number: usize, block: &Block) -> Result<(Vec<usize>, Activation), ModelError> {
        let nonlinear: Vec<usize> =
            block.behind.nodes.iter().filter(|n| self.graph.nodes[**n].is(NONLINEAR)).copied().collect();
        let [one] = nonlinear[..] else {
            return Err(self.unknown(format!("an MLP with {} non-linearities in layer {number}", nonlinear.len())));
        };
        let node = &self.graph.nodes[one];
        let Some(input) = node.input(0) else {
            return Err(self.unknown(format!("{} without an input", node.label())));
        };
        let bent = self.linears_of(&self.behind(input));
        let readers = match (&block.readers[..], &bent[..]) {
            ([up], _) => vec![*up],
            ([a, b], [gate]) => vec![*gate, if gate == a { *b } else { *a }],
            _ => return Err(self.unknown(format!("what the MLP of layer {number} multiplies"))),
        };
        let direct = self.linears.by_output.contains_key(&self.graph.strip(input));
        let activation = match node.op() {
            "Sigmoid" | "Swish" if direct => Some(Activation::Silu),
            "Relu" if direct => Some(Activation::Relu),
            "Gelu" if node.attribute("approximate").is_some_and(|a| &a.s[..] == b"tanh") => Some(Activation::GeluTanh),
            "Gelu" | "Erf" => Some(Activation::Gelu),
            "Tanh" if !direct => Some(Activation::GeluTanh),
            _ => None,
        };
        let activation = activation.ok_or_else(|| {
            self.unknown(format!("the non-linearity with {} in the MLP of layer {number}", node.label()))
        })?;
        Ok((readers, activation))
    }

    /// The frequencies whose products with positions go into the first cosine.
    fn frequencies(&self) -> Option<Vec<f64>> {
        let cosine = self.graph.nodes.iter().find(|n| n.op() == "Cos")?;
        let behind = self.graph.behind(cosine.input(0)?, |_| false);
        let inputs = behind.nodes.iter().flat_map(|n| self.graph.nodes[*n].inputs.iter().flatten());
        let views: Vec<usize> = inputs.filter_map(|v| self.graph.view(*v)).map(|v| v.constant).collect();
        // In half precision they would not be those that the model was trained with.
        let precise = |c: &&Constant| matches!(c.stored, StoredType::F32 | StoredType::F64) && c.elements() > 1;
        numbers(views.iter().map(|c| &self.graph.constants[*c]).find(precise)?)
    }

    /// Every weight that the logits depend on must have found its place.
    fn check_nothing_is_left(&self, decoder: &Decoder) -> Result<(), ModelError> {
        let norms = decoder.layers.iter().flat_map(|l| [&l.attention_norm, &l.mlp_norm]).chain([&decoder.norm]);
        let linears = decoder.layers.iter().flat_map(|l| l.qkv.iter().chain(&l.mlp_in).chain([&l.out, &l.mlp_out]));
        let vectors =
            norms.flat_map(|n| [Some(n.weight), n.bias]).chain(linears.chain([&decoder.head]).map(|l| l.bias));
        let placed: HashSet<usize> = vectors.flatten().map(|v| v.constant).collect();
        for (index, node) in self.graph.nodes.iter().enumerate() {
            if !node.outputs.iter().any(|&v| self.live[v]) {
                continue;
            }
            let operand = |op| vector_operand(self.graph, index, op).filter(|(_, other)| self.live[*other]);
            let vector = match node.op() {
                "Add" => operand("Add").map(|(v, _)| v),
                "Mul" => operand("Mul").map(|(v, _)| v),
                "LayerNormalization" | "RMSNormalization" => node.input(1).and_then(|v| self.graph.vector(v)),
                _ => None,
            };
            if let Some(vector) = vector.filter(|v| !placed.contains(&v.constant)) {
                let name = &self.graph.constants[vector.constant].name;
                return Err(self.unknown(format!("{} with the weight `{name}`", node.label())));
            }
        }
        Ok(())
    }
}

struct Operands {
    query: Value,
    key: Value,
    value: Value,
    /// What is multiplied with the values.
    scored: Option<Value>,
    /// Attention as one operator.
    whole: Option<usize>,
}

struct Scores {
    query: Value,
    scale: Option<f64>,
}
