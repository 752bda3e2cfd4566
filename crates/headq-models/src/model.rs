//! The decoder-only language model that all architectures are instances of.

use burn::module::{Initializer, Module, Param};
use burn::nn::{Embedding, LayerNorm, LayerNormConfig, Linear, RmsNorm, RmsNormConfig};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, activation};
use headq::{Attention, AttentionSite};
use rayon::prelude::*;

use crate::config::{Activation, ModelConfig, NormKind};
use crate::error::ModelError;
use crate::rope::RopeTable;

/// Rows of hidden states whose logits exist at a time in [`LanguageModel::token_nll`]: 25 MB at a vocabulary of 49,152.
const NLL_ROWS: usize = 128;

/// Layer or RMS normalisation.
#[derive(Module, Debug)]
pub(crate) enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    pub fn init(config: &ModelConfig, device: &Device) -> Self {
        let (width, eps) = (config.hidden_size, config.norm_eps);
        match config.norm {
            NormKind::Layer => Self::Layer(LayerNormConfig::new(width).with_epsilon(eps).init(device)),
            NormKind::Rms => Self::Rms(RmsNormConfig::new(width).with_epsilon(eps).init(device)),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::Rms(norm) => rms_norm(norm, x),
        }
    }
}

/// One decoder layer. Query, key and value are one matrix, and so are gate and up.
#[derive(Module, Debug)]
pub(crate) struct Block {
    pub attention_norm: Norm,
    /// `[hidden, (heads + 2·kv_heads)·head_dim]`
    pub qkv: Linear,
    /// `[heads·head_dim, hidden]`
    pub out: Linear,
    pub mlp_norm: Norm,
    /// `[hidden, intermediate]`, or `[hidden, 2·intermediate]` with a gate
    pub mlp_in: Linear,
    /// `[intermediate, hidden]`
    pub mlp_out: Linear,
}

/// A decoder-only language model.
///
/// A Burn module of float parameters: it trains with Burn's optimizers on an autodiff device, where the given
/// [`Attention`] must be differentiable (as [`headq::DenseAttention`] is). Load one with [`crate::load`].
#[derive(Module, Debug)]
pub struct LanguageModel {
    pub(crate) embedding: Embedding,
    pub(crate) positions: Option<Embedding>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) norm: Norm,
    /// `None` where the head is the embedding.
    pub(crate) head: Option<Linear>,
    #[module(skip)]
    pub(crate) config: ModelConfig,
    #[module(skip)]
    pub(crate) inverse_frequencies: Vec<f64>,
}

/// What all layers of a pass share.
struct Pass {
    batch: usize,
    tokens: usize,
    start: usize,
    rope: Option<RopeTable>,
}

impl LanguageModel {
    /// A model with random weights: normal with standard deviation 0.02, smaller by √(2·layers) where a layer writes to
    /// the residual stream, biases 0, norms 1. Reproducible after `device.seed(…)`.
    pub fn init(config: &ModelConfig, device: &Device) -> Self {
        const STD: f64 = 0.02;
        let residual = STD / (2.0 * config.num_layers as f64).sqrt();
        let hidden = config.hidden_size;
        let mlp = config.intermediate_size;
        let gates = if config.gated_mlp { 2 } else { 1 };
        let qkv = config.query_width() + 2 * config.kv_width();
        let block = || Block {
            attention_norm: Norm::init(config, device),
            qkv: random_linear(hidden, qkv, config.biases.qkv, STD, device),
            out: random_linear(config.query_width(), hidden, config.biases.out, residual, device),
            mlp_norm: Norm::init(config, device),
            mlp_in: random_linear(hidden, gates * mlp, config.biases.mlp, STD, device),
            mlp_out: random_linear(mlp, hidden, config.biases.mlp, residual, device),
        };
        let table = |rows: usize| Embedding { weight: normal(STD).init([rows, hidden], device) };
        Self {
            embedding: table(config.vocab_size),
            positions: config.rope.is_none().then(|| table(config.max_position_embeddings)),
            blocks: (0..config.num_layers).map(|_| block()).collect(),
            norm: Norm::init(config, device),
            head: (!config.tie_word_embeddings).then(|| random_linear(hidden, config.vocab_size, false, STD, device)),
            inverse_frequencies: config.rope.as_ref().map(|r| r.inverse_frequencies()).unwrap_or_default(),
            config: config.clone(),
        }
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device the parameters are on.
    pub fn device(&self) -> Device {
        self.embedding.weight.val().device()
    }

    /// Whether matrices are held in half precision, f16 or bf16.
    pub fn has_half_weights(&self) -> bool {
        matches!(self.embedding.weight.val().dtype(), DType::F16 | DType::BF16)
    }

    /// Token ids as the tensor that the model takes: `batch` sequences of equal length, one after the other in `tokens`.
    ///
    /// # Shapes
    /// - returns `[batch, tokens.len() / batch]`
    ///
    /// # Errors
    /// An id outside the vocabulary, a length that is not a multiple of `batch` (or zero), or positions up to
    /// `start + length` that a model with learned positions does not have.
    pub fn ids(&self, tokens: &[u32], batch: usize, start: usize) -> Result<Tensor<2, Int>, ModelError> {
        if batch == 0 || tokens.is_empty() || !tokens.len().is_multiple_of(batch) {
            let expected = format!("a multiple of the batch size {batch}, not zero");
            return Err(ModelError::Length { what: "token ids", expected, found: tokens.len() });
        }
        let length = tokens.len() / batch;
        self.check_tokens(tokens)?;
        if let Some(limit) = self.config.position_limit().filter(|limit| start + length > *limit) {
            return Err(ModelError::ContextTooLong { needed: start + length, limit });
        }
        let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        Ok(Tensor::from_data(TensorData::new(ids, [batch, length]), &self.device()))
    }

    /// Final hidden states, after the last normalisation.
    ///
    /// # Shapes
    /// - `ids`: `[batch, tokens]`, at positions `start .. start + tokens`; see [`ids`](Self::ids)
    /// - returns `[batch, tokens, hidden]`
    ///
    /// # Panics
    /// If `ids` has tokens or positions the model does not have; [`ids`](Self::ids) makes tensors that are safe.
    pub fn hidden(&self, ids: Tensor<2, Int>, start: usize, attention: &mut dyn Attention) -> Tensor<3> {
        self.run(ids, start, attention, &mut |_| ())
    }

    /// The hidden states that transformers' `output_hidden_states` gives: the embeddings, each layer's output but the
    /// last's, and the final hidden states (after the last normalisation); layers + 1 tensors of `[batch, tokens, hidden]`.
    ///
    /// # Panics
    /// As [`hidden`](Self::hidden).
    pub fn hidden_states(&self, ids: Tensor<2, Int>, start: usize, attention: &mut dyn Attention) -> Vec<Tensor<3>> {
        let mut states = Vec::with_capacity(self.blocks.len() + 1);
        let last = self.run(ids, start, attention, &mut |x| states.push(x));
        states.push(last);
        states
    }

    /// Next-token logits of hidden states.
    ///
    /// # Shapes
    /// - `hidden`: `[batch, tokens, hidden]`, from [`hidden`](Self::hidden)
    /// - returns `[batch, tokens, vocab]`
    pub fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        let [batch, tokens, width] = hidden.dims();
        self.project(hidden.reshape([batch * tokens, width])).reshape([batch, tokens, self.config.vocab_size])
    }

    /// Next-token logits of token ids: [`hidden`](Self::hidden), then [`logits`](Self::logits).
    ///
    /// # Panics
    /// As [`hidden`](Self::hidden).
    pub fn forward(&self, ids: Tensor<2, Int>, start: usize, attention: &mut dyn Attention) -> Tensor<3> {
        self.logits(self.hidden(ids, start, attention))
    }

    /// Negative log-likelihood of each target under the hidden state at its place, in nats.
    ///
    /// The target of position t is usually token t + 1. Logits are made for a few rows at a time, and reduced on the host
    /// with the maximum subtracted and the sum in f64.
    ///
    /// # Shapes
    /// - `hidden`: `[batch, tokens, hidden]`
    /// - `targets`: batch · tokens ids, and as many results, in row-major order
    ///
    /// # Errors
    /// If the number of targets differs, or one is outside the vocabulary.
    pub fn token_nll(&self, hidden: Tensor<3>, targets: &[u32]) -> Result<Vec<f64>, ModelError> {
        let [batch, tokens, width] = hidden.dims();
        let rows = batch * tokens;
        if targets.len() != rows {
            return Err(ModelError::Length { what: "targets", expected: rows.to_string(), found: targets.len() });
        }
        self.check_tokens(targets)?;
        let hidden = hidden.reshape([rows, width]);
        let mut nll = Vec::with_capacity(rows);
        for (chunk, targets) in targets.chunks(NLL_ROWS).enumerate() {
            let logits = self.project(hidden.clone().narrow(0, chunk * NLL_ROWS, targets.len()));
            let logits = logits.into_data().convert::<f32>();
            let logits = logits.as_slice::<f32>().expect("converted to f32");
            nll.par_extend(
                logits.par_chunks(self.config.vocab_size).zip(targets).map(|(row, &t)| row_nll(row, t as usize)),
            );
        }
        Ok(nll)
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), ModelError> {
        let vocab = self.config.vocab_size;
        match tokens.iter().position(|&t| t as usize >= vocab) {
            Some(position) => Err(ModelError::TokenOutOfRange { token: tokens[position], position, vocab }),
            None => Ok(()),
        }
    }

    /// The head: `[n, hidden]` → `[n, vocab]`. A tied head reads the embedding through a transposed view.
    fn project(&self, x: Tensor<2>) -> Tensor<2> {
        match &self.head {
            Some(head) => product(head, x),
            None => with_weights(&self.embedding.weight.val(), x, |x, table| x.matmul(table.transpose())),
        }
    }

    fn run(
        &self,
        ids: Tensor<2, Int>,
        start: usize,
        attention: &mut dyn Attention,
        observe: &mut dyn FnMut(Tensor<3>),
    ) -> Tensor<3> {
        let mut x = self.embed(ids, start);
        let pass = self.pass(&x, start);
        for layer in 0..self.blocks.len() {
            observe(x.clone());
            x = self.block(layer, x, &pass, attention);
        }
        self.finish(x)
    }

    /// What the first layer is given.
    ///
    /// # Shapes
    /// - `ids`: `[batch, tokens]`, at positions `start .. start + tokens`
    /// - returns `[batch, tokens, hidden]`
    pub fn embed(&self, ids: Tensor<2, Int>, start: usize) -> Tensor<3> {
        let tokens = ids.dims()[1];
        let x = wide(self.embedding.forward(ids));
        match &self.positions {
            Some(positions) => x + wide(positions.weight.val().narrow(0, start, tokens)).unsqueeze(),
            None => x,
        }
    }

    /// One layer: [`embed`](Self::embed), every layer in turn and [`finish`](Self::finish) are [`hidden`](Self::hidden).
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, in and out, at positions `start .. start + tokens`
    pub fn layer(&self, layer: usize, x: Tensor<3>, start: usize, attention: &mut dyn Attention) -> Tensor<3> {
        let pass = self.pass(&x, start);
        self.block(layer, x, &pass, attention)
    }

    /// The rows of a layer's output projection W_o: row h · head_dim + i is what channel i of query head h adds to the residual stream.
    ///
    /// # Shapes
    /// - returns `[heads · head_dim, hidden]`, in the type of the weights
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn output_projection(&self, layer: usize) -> Tensor<2> {
        self.blocks[layer].out.weight.val()
    }

    /// The last normalisation.
    pub fn finish(&self, x: Tensor<3>) -> Tensor<3> {
        let shape @ [batch, tokens, width] = x.dims();
        self.norm.forward(x.reshape([batch * tokens, width])).reshape(shape)
    }

    fn pass(&self, x: &Tensor<3>, start: usize) -> Pass {
        let [batch, tokens, _] = x.dims();
        let rope = (!self.inverse_frequencies.is_empty())
            .then(|| RopeTable::new(&self.inverse_frequencies, start, tokens, x.dtype(), &self.device()));
        Pass { batch, tokens, start, rope }
    }

    fn block(&self, layer: usize, x: Tensor<3>, pass: &Pass, attention: &mut dyn Attention) -> Tensor<3> {
        let shape @ [batch, tokens, width] = x.dims();
        let block = &self.blocks[layer];
        // Two dimensions: linear layers are then single matrix products.
        let x = x.reshape([batch * tokens, width]);
        let normed = block.attention_norm.forward(x.clone());
        let attended = self.attend(block, layer, normed, pass, attention);
        let x = if self.config.parallel_residual {
            let mlp = self.mlp(block, block.mlp_norm.forward(x.clone()));
            x + attended + mlp
        } else {
            let x = x + attended;
            let mlp = self.mlp(block, block.mlp_norm.forward(x.clone()));
            x + mlp
        };
        x.reshape(shape)
    }

    fn attend(
        &self,
        block: &Block,
        layer: usize,
        x: Tensor<2>,
        pass: &Pass,
        attention: &mut dyn Attention,
    ) -> Tensor<2> {
        let c = &self.config;
        let (heads, kv, all) = (c.num_heads, c.num_kv_heads, c.num_heads + 2 * c.num_kv_heads);
        let qkv = product(&block.qkv, x).reshape([pass.batch, pass.tokens, all, c.head_dim]).swap_dims(1, 2);
        let v = qkv.clone().narrow(1, heads + kv, kv);
        let qk = qkv.narrow(1, 0, heads + kv);
        let qk = match &pass.rope {
            Some(rope) => rope.apply(qk),
            None => qk,
        };
        let (q, k) = (qk.clone().narrow(1, 0, heads), qk.narrow(1, heads, kv));
        let site = AttentionSite { layer, start: pass.start, scale: c.scales[layer], window: c.windows[layer] };
        let attended = attention.attend(&site, q, k, v);
        product(&block.out, attended.swap_dims(1, 2).reshape([pass.batch * pass.tokens, c.query_width()]))
    }

    fn mlp(&self, block: &Block, x: Tensor<2>) -> Tensor<2> {
        let inner = product(&block.mlp_in, x);
        let inner = if self.config.gated_mlp && self.config.activation == Activation::Silu {
            headq::kernels::swiglu(inner)
        } else if self.config.gated_mlp {
            let width = self.config.intermediate_size;
            let (gate, up) = (inner.clone().narrow(1, 0, width), inner.narrow(1, width, width));
            activate(self.config.activation, gate) * up
        } else {
            activate(self.config.activation, inner)
        };
        product(&block.mlp_out, inner)
    }
}

/// A linear layer in the type of its weights, whatever that is; in and out are f32.
fn product(layer: &Linear, x: Tensor<2>) -> Tensor<2> {
    with_weights(&layer.weight.val(), x, |x, _| layer.forward(x))
}

/// `f` of x in the type of some weights and of these; back in the type of x.
fn with_weights(weights: &Tensor<2>, x: Tensor<2>, f: impl FnOnce(Tensor<2>, Tensor<2>) -> Tensor<2>) -> Tensor<2> {
    match (weights.dtype(), x.dtype()) {
        (stored, given) if stored == given => f(x, weights.clone()),
        (DType::F16, _) => wide(f(x.cast(FloatDType::F16), weights.clone())),
        (DType::BF16, _) => wide(f(x.cast(FloatDType::BF16), weights.clone())),
        (_, _) => f(x, weights.clone()),
    }
}

/// Half precision as f32; anything else as it is.
fn wide<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(FloatDType::F32),
        _ => x,
    }
}

/// Burn's RmsNorm takes its mean in f32 whatever it is given, which is right for narrower types and loses half of what f64 holds.
fn rms_norm(norm: &RmsNorm, x: Tensor<2>) -> Tensor<2> {
    if x.dtype() != DType::F64 {
        return norm.forward(x);
    }
    let rms = (x.clone().square().mean_dim(1) + norm.epsilon).sqrt();
    x / rms * norm.gamma.val().unsqueeze()
}

/// −log softmax(row)[target], in nats.
fn row_nll(row: &[f32], target: usize) -> f64 {
    headq::kernels::log_sum_exp(row) - f64::from(row[target])
}

fn activate(kind: Activation, x: Tensor<2>) -> Tensor<2> {
    match kind {
        Activation::Gelu => activation::gelu(x),
        Activation::GeluTanh => gelu_tanh(x),
        Activation::Silu => activation::silu(x),
        Activation::Relu => activation::relu(x),
    }
}

/// ½x(1 + tanh(√(2/π)(x + 0.044715x³))). Burn's `gelu_approximate` is the same with a general power for the cube, which is
/// slower, and undefined for negative x on some devices.
fn gelu_tanh(x: Tensor<2>) -> Tensor<2> {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let slope = x.clone().square() * (0.044715 * root) + root;
    let tanh = (slope * x.clone()).tanh();
    x * 0.5 * (tanh + 1.0)
}

fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}

fn random_linear(input: usize, output: usize, bias: bool, std: f64, device: &Device) -> Linear {
    let bias: Option<Param<Tensor<1>>> = bias.then(|| Initializer::Zeros.init([output], device));
    Linear { weight: normal(std).init([input, output], device), bias }
}
