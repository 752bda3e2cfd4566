//! Decode steps on the host: one token in, logits out, without tensors.
//!
//! A step reads every weight once and does little else, so that it is as fast as memory is. [`Decoder`] therefore reads weights
//! where the model has them (the storage of a tensor on Burn's Flex backend is shared, never copied or transposed), streams them in
//! long stretches, and keeps all intermediate results in buffers that are made once. Work that is too small to share stays on one
//! thread.
//!
//! [`Decoder::pass`] takes a whole sequence instead of a token, with the same results to the bit: an evaluation by passes measures exactly
//! what decode steps do, at the speed of arithmetic. Products of tensors would not: they round differently, and what falls on the other side
//! of a quantizer's threshold then is a step that no tolerance covers.
//!
//! | module | what |
//! |---|---|
//! | `kernels` | loops over one vector |
//! | `rows` | products of many vectors, each in the order of one |
//! | `matrix` | matrices in a model's storage, and tasks that share a product |
//! | `pass` | sequences, layer by layer |

mod kernels;
mod matrix;
mod pass;
mod rows;

use burn::nn::Linear;
use headq::{AttentionSite, DecodeAttention};

use crate::config::{Activation, ModelConfig};
use crate::error::ModelError;
use crate::model::{LanguageModel, Norm};
use kernels::{GeluTanh, Normalize, Silu, multiply, vectorized};
use matrix::{Matrix, vector};

/// Runs a [`LanguageModel`] on one token at a time.
///
/// ```no_run
/// # fn run(model: &headq_models::LanguageModel, cache: &mut dyn headq::DecodeAttention) -> Result<(), headq_models::ModelError> {
/// let mut decoder = headq_models::Decoder::new(model)?;
/// let logits = decoder.step(17, 0, cache)?;
/// # Ok(())
/// # }
/// ```
///
/// It shares the model's weights: it costs no memory to have both, and either may be dropped first. Clones share them, too, and have
/// buffers of their own. Products are spread over the threads of the current rayon pool; results do not depend on their number. Call
/// it on a thread of the pool (`rayon::ThreadPool::install`): from outside, each of the four products of a layer waits for a wake-up.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: ModelConfig,
    embedding: Matrix,
    positions: Option<Matrix>,
    blocks: Vec<Block>,
    norm: Scale,
    /// `None` where the head is the embedding.
    head: Option<Layer>,
    inverse_frequencies: Vec<f64>,
    scratch: Scratch,
    /// Of passes, empty before the first.
    rows: pass::Rows,
}

#[derive(Clone, Debug)]
struct Block {
    attention_norm: Scale,
    qkv: Layer,
    out: Layer,
    mlp_norm: Scale,
    mlp_in: Layer,
    mlp_out: Layer,
}

/// A linear layer.
#[derive(Clone, Debug)]
struct Layer {
    /// `[in, out]`
    weight: Matrix,
    bias: Option<Vec<f32>>,
}

/// A normalisation.
#[derive(Clone, Debug)]
struct Scale {
    gamma: Vec<f32>,
    beta: Option<Vec<f32>>,
    epsilon: f64,
}

/// Everything that a step writes.
#[derive(Clone, Debug)]
struct Scratch {
    /// The residual stream.
    x: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    inner: Vec<f32>,
    /// Cosines and sines of the position's angles.
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Parts of a product.
    parts: Vec<f32>,
    logits: Vec<f32>,
}

impl Layer {
    fn of(linear: &Linear) -> Result<Self, ModelError> {
        let bias = linear.bias.as_ref().map(|bias| vector(bias.val())).transpose()?;
        Ok(Self { weight: Matrix::of(linear.weight.val())?, bias })
    }

    /// Into `y`, or added `onto` it.
    fn apply(&self, x: &[f32], y: &mut [f32], onto: bool, parts: &mut [f32]) {
        self.weight.multiply(x, self.bias.as_deref(), y, onto, parts);
    }

    /// The same of many vectors.
    fn apply_all(&self, x: &[f32], y: &mut [f32], onto: bool) {
        self.weight.multiply_many(x, self.bias.as_deref(), y, onto);
    }
}

impl Scale {
    fn of(norm: &Norm, epsilon: f64) -> Result<Self, ModelError> {
        let (gamma, beta) = match norm {
            Norm::Layer(norm) => (&norm.gamma, norm.beta.as_ref()),
            Norm::Rms(norm) => (&norm.gamma, None),
        };
        Ok(Self { gamma: vector(gamma.val())?, beta: beta.map(|b| vector(b.val())).transpose()?, epsilon })
    }

    fn apply(&self, x: &[f32], y: &mut [f32]) {
        Normalize { y, x, gamma: &self.gamma, beta: self.beta.as_deref(), epsilon: self.epsilon }.run();
    }
}

impl Block {
    fn layers(&self) -> [&Layer; 4] {
        [&self.qkv, &self.out, &self.mlp_in, &self.mlp_out]
    }
}

impl Decoder {
    /// A decoder that reads the weights of `model`.
    ///
    /// # Errors
    /// If the model is not on the Flex backend, or its weights are neither f32 nor f16 nor bf16.
    pub fn new(model: &LanguageModel) -> Result<Self, ModelError> {
        let config = model.config.clone();
        let scale = |norm: &Norm| Scale::of(norm, config.norm_eps);
        let blocks = model
            .blocks
            .iter()
            .map(|block| {
                Ok(Block {
                    attention_norm: scale(&block.attention_norm)?,
                    qkv: Layer::of(&block.qkv)?,
                    out: Layer::of(&block.out)?,
                    mlp_norm: scale(&block.mlp_norm)?,
                    mlp_in: Layer::of(&block.mlp_in)?,
                    mlp_out: Layer::of(&block.mlp_out)?,
                })
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        let head = model.head.as_ref().map(Layer::of).transpose()?;
        let all = blocks.iter().flat_map(Block::layers).chain(&head);
        let parts = all.map(|layer| layer.weight.scratch()).max().unwrap_or(0);
        let gates = if config.gated_mlp { 2 } else { 1 };
        let scratch = Scratch {
            x: vec![0.0; config.hidden_size],
            normed: vec![0.0; config.hidden_size],
            qkv: vec![0.0; config.query_width() + 2 * config.kv_width()],
            attended: vec![0.0; config.query_width()],
            inner: vec![0.0; gates * config.intermediate_size],
            cos: vec![0.0; model.inverse_frequencies.len()],
            sin: vec![0.0; model.inverse_frequencies.len()],
            parts: vec![0.0; parts],
            logits: vec![0.0; config.vocab_size],
        };
        Ok(Self {
            embedding: Matrix::of(model.embedding.weight.val())?,
            positions: model.positions.as_ref().map(|p| Matrix::of(p.weight.val())).transpose()?,
            blocks,
            norm: scale(&model.norm)?,
            head,
            inverse_frequencies: model.inverse_frequencies.clone(),
            scratch,
            rows: pass::Rows::default(),
            config,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of weights that a step reads; of the embedding, where it is not the head, and of learned positions it reads one row.
    pub fn bytes_per_step(&self) -> usize {
        let layers = self.blocks.iter().flat_map(Block::layers).map(|layer| layer.weight.bytes());
        layers.sum::<usize>() + self.head.as_ref().map_or(self.embedding.bytes(), |head| head.weight.bytes())
    }

    /// Logits of the token after `token`, which stands at `position`.
    ///
    /// `attention` holds the `position` tokens before it, and one more afterwards; if the step fails, it is left as it was.
    ///
    /// # Shapes
    /// - returns `[vocab]`
    ///
    /// # Errors
    /// A token outside the vocabulary, or a position that a model with learned positions does not have.
    pub fn step(
        &mut self,
        token: u32,
        position: usize,
        attention: &mut dyn DecodeAttention,
    ) -> Result<&[f32], ModelError> {
        self.check(token, position)?;
        self.embed(token, position);
        for layer in 0..self.blocks.len() {
            self.attend(layer, position, attention);
            self.mlp(layer);
        }
        let Scratch { x, normed, parts, logits, .. } = &mut self.scratch;
        self.norm.apply(x, normed);
        match &self.head {
            Some(head) => head.apply(normed, logits, false, parts),
            None => self.embedding.multiply_transposed(normed, logits),
        }
        Ok(&self.scratch.logits)
    }

    /// Fails for a token outside the vocabulary and where the model has no such position.
    fn check(&self, token: u32, position: usize) -> Result<(), ModelError> {
        let vocab = self.config.vocab_size;
        if token as usize >= vocab {
            return Err(ModelError::TokenOutOfRange { token, position, vocab });
        }
        match self.config.position_limit().filter(|limit| position >= *limit) {
            Some(limit) => Err(ModelError::ContextTooLong { needed: position + 1, limit }),
            None => Ok(()),
        }
    }

    /// The final hidden state of the last step, or of the last token of a pass, after the last normalisation: `[hidden]`.
    pub fn hidden(&self) -> &[f32] {
        &self.scratch.normed
    }

    fn embed(&mut self, token: u32, position: usize) {
        let Scratch { x, cos, sin, .. } = &mut self.scratch;
        self.embedding.row(token as usize, x, false);
        if let Some(positions) = &self.positions {
            positions.row(position, x, true);
        }
        angles_at(&self.inverse_frequencies, position, cos, sin);
    }

    /// Adds a layer's attention to the residual stream. Where both branches read the same stream, the MLP's input is taken first.
    fn attend(&mut self, layer: usize, position: usize, attention: &mut dyn DecodeAttention) {
        let (c, block) = (&self.config, &self.blocks[layer]);
        let Scratch { x, normed, qkv, attended, inner, cos, sin, parts, .. } = &mut self.scratch;
        block.attention_norm.apply(x, normed);
        block.qkv.apply(normed, qkv, false, parts);
        if c.parallel_residual {
            block.mlp_norm.apply(x, normed);
            block.mlp_in.apply(normed, inner, false, parts);
        }
        let (qk, v) = qkv.split_at_mut(c.query_width() + c.kv_width());
        qk.chunks_exact_mut(c.head_dim).for_each(|head| rotate(head, cos, sin));
        let (q, k) = qk.split_at(c.query_width());
        let site = AttentionSite { layer, start: position, scale: c.scales[layer], window: c.windows[layer] };
        attention.attend_one(&site, q, k, v, attended);
        block.out.apply(attended, x, true, parts);
    }

    /// Adds a layer's MLP to the residual stream.
    fn mlp(&mut self, layer: usize) {
        let (c, block) = (&self.config, &self.blocks[layer]);
        let Scratch { x, normed, inner, parts, .. } = &mut self.scratch;
        if !c.parallel_residual {
            block.mlp_norm.apply(x, normed);
            block.mlp_in.apply(normed, inner, false, parts);
        }
        let (activated, up) = inner.split_at_mut(c.intermediate_size);
        activate(c.activation, activated);
        if c.gated_mlp {
            multiply(activated, up);
        }
        block.mlp_out.apply(activated, x, true, parts);
    }
}

/// Cosines and sines of a position's angles.
fn angles_at(inverse_frequencies: &[f64], position: usize, cos: &mut [f32], sin: &mut [f32]) {
    for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(inverse_frequencies) {
        let (s, c) = (position as f64 * frequency).sin_cos();
        (*cos, *sin) = (c as f32, s as f32);
    }
}

/// Rotates the leading channels of a head: channel i with channel i + n, where n angles are given.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

fn activate(kind: Activation, x: &mut [f32]) {
    match kind {
        Activation::Gelu => {
            x.iter_mut().for_each(|x| *x *= 0.5 * (1.0 + libm::erff(*x * std::f32::consts::FRAC_1_SQRT_2)))
        }
        Activation::GeluTanh => vectorized(GeluTanh(x)),
        Activation::Silu => vectorized(Silu(x)),
        Activation::Relu => x.iter_mut().for_each(|x| *x = x.max(0.0)),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use burn_flex::Flex;
    use serde_json::json;

    use super::*;

    #[test]
    fn weights_lie_in_memory_once() {
        let config = json!({"model_type": "llama", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2});
        let config = ModelConfig::from_json(&config).expect("a config");
        let model = LanguageModel::init(&config, &Device::flex());
        let decoder = Decoder::new(&model).expect("a model on the host");
        let address = |linear: &Linear| {
            let tensor = linear.weight.val().try_into_primitive::<Flex>().expect("a tensor on the host");
            tensor.bytes().as_ptr()
        };
        for (block, decoder) in model.blocks.iter().zip(&decoder.blocks) {
            let linears = [&block.qkv, &block.out, &block.mlp_in, &block.mlp_out];
            for (linear, layer) in linears.into_iter().zip(decoder.layers()) {
                assert_eq!(address(linear), layer.weight.address());
            }
        }
        let clone = decoder.clone();
        assert_eq!(clone.embedding.address(), decoder.embedding.address());
        assert_ne!(clone.scratch.x.as_ptr(), decoder.scratch.x.as_ptr());
    }
}
