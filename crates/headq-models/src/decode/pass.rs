//! Whole sequences on the host, layer by layer, with the results of one decode step after the other.

use headq::{AttentionSite, DecodeAttention};
use rayon::prelude::*;

use super::kernels::multiply;
use super::{Decoder, activate, angles_at, rotate};
use crate::error::ModelError;

/// Tokens whose logits exist at a time: a head's weights are read once for so many.
const LOGITS: usize = 64;
/// Rows of norms and activations that a task takes at least.
const TASK_ROWS: usize = 16;

/// Everything that a pass writes: `[tokens, width]` each.
#[derive(Clone, Debug, Default)]
pub(super) struct Rows {
    /// The residual stream.
    x: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    inner: Vec<f32>,
    activated: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Of [`LOGITS`] tokens.
    logits: Vec<f32>,
}

impl Decoder {
    /// Runs the tokens that stand from position `start` on, and calls `each` with the logits after every one of them, in order.
    ///
    /// Logits, [`Decoder::hidden`] and what `attention` holds are to the bit those of [`Decoder::step`] for one token after the other:
    /// every number comes from the same operations in the same order. Weights are read once for all tokens, though, which makes a pass
    /// many times as fast. Within a layer `attention` is given the tokens in order, but all tokens of a layer come before the first of
    /// the next. Buffers grow with the number of tokens: cut long sequences into passes.
    ///
    /// # Shapes
    /// - `each`: the place among `tokens`, and logits `[vocab]`
    ///
    /// # Errors
    /// As [`Decoder::step`], for the first token that it would fail for; nothing is done then.
    pub fn pass(
        &mut self,
        tokens: &[u32],
        start: usize,
        attention: &mut dyn DecodeAttention,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        for (t, token) in tokens.iter().enumerate() {
            self.check(*token, start + t)?;
        }
        if tokens.is_empty() {
            return Ok(());
        }
        self.make_room(tokens.len());
        self.embed_all(tokens, start);
        for layer in 0..self.blocks.len() {
            self.attend_all(layer, start, attention);
            self.mlp_all(layer);
        }
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let Rows { x, normed, logits, .. } = &mut self.rows;
        each_row(x, normed, [hidden; 2], |x, y| self.norm.apply(x, y));
        for (i, normed) in normed.chunks(LOGITS * hidden).enumerate() {
            let logits = &mut logits[..normed.len() / hidden * vocab];
            match &self.head {
                Some(head) => head.apply_all(normed, logits, false),
                None => self.embedding.multiply_transposed_many(normed, logits),
            }
            logits.chunks(vocab).enumerate().for_each(|(t, logits)| each(i * LOGITS + t, logits));
        }
        self.scratch.normed.copy_from_slice(&normed[normed.len() - hidden..]);
        Ok(())
    }

    fn make_room(&mut self, tokens: usize) {
        let (c, angles) = (&self.config, self.inverse_frequencies.len());
        let gates = if c.gated_mlp { 2 } else { 1 };
        let Rows { x, normed, qkv, attended, inner, activated, cos, sin, logits } = &mut self.rows;
        for (buffer, width) in [
            (x, c.hidden_size),
            (normed, c.hidden_size),
            (qkv, c.query_width() + 2 * c.kv_width()),
            (attended, c.query_width()),
            (inner, gates * c.intermediate_size),
            (activated, c.intermediate_size),
            (cos, angles),
            (sin, angles),
        ] {
            buffer.resize(tokens * width, 0.0);
        }
        logits.resize(tokens.min(LOGITS) * c.vocab_size, 0.0);
    }

    fn embed_all(&mut self, tokens: &[u32], start: usize) {
        let Rows { x, cos, sin, .. } = &mut self.rows;
        for (t, (token, x)) in tokens.iter().zip(x.chunks_exact_mut(self.config.hidden_size)).enumerate() {
            self.embedding.row(*token as usize, x, false);
            if let Some(positions) = &self.positions {
                positions.row(start + t, x, true);
            }
        }
        let angles = self.inverse_frequencies.len();
        if angles > 0 {
            for (t, (cos, sin)) in cos.chunks_exact_mut(angles).zip(sin.chunks_exact_mut(angles)).enumerate() {
                angles_at(&self.inverse_frequencies, start + t, cos, sin);
            }
        }
    }

    /// [`Decoder::attend`] of all tokens.
    fn attend_all(&mut self, layer: usize, start: usize, attention: &mut dyn DecodeAttention) {
        let (c, block) = (&self.config, &self.blocks[layer]);
        let (hidden, angles) = (c.hidden_size, self.inverse_frequencies.len());
        let Rows { x, normed, qkv, attended, inner, cos, sin, .. } = &mut self.rows;
        each_row(x, normed, [hidden; 2], |x, y| block.attention_norm.apply(x, y));
        block.qkv.apply_all(normed, qkv, false);
        if c.parallel_residual {
            each_row(x, normed, [hidden; 2], |x, y| block.mlp_norm.apply(x, y));
            block.mlp_in.apply_all(normed, inner, false);
        }
        let (query, width) = (c.query_width(), c.query_width() + 2 * c.kv_width());
        for (t, (qkv, out)) in qkv.chunks_exact_mut(width).zip(attended.chunks_exact_mut(query)).enumerate() {
            let (cos, sin) = (&cos[t * angles..][..angles], &sin[t * angles..][..angles]);
            let (qk, v) = qkv.split_at_mut(query + c.kv_width());
            qk.chunks_exact_mut(c.head_dim).for_each(|head| rotate(head, cos, sin));
            let (q, k) = qk.split_at(query);
            let site = AttentionSite { layer, start: start + t, scale: c.scales[layer], window: c.windows[layer] };
            attention.attend_one(&site, q, k, v, out);
        }
        block.out.apply_all(attended, x, true);
    }

    /// [`Decoder::mlp`] of all tokens.
    fn mlp_all(&mut self, layer: usize) {
        let (c, block) = (&self.config, &self.blocks[layer]);
        let Rows { x, normed, inner, activated, .. } = &mut self.rows;
        if !c.parallel_residual {
            each_row(x, normed, [c.hidden_size; 2], |x, y| block.mlp_norm.apply(x, y));
            block.mlp_in.apply_all(normed, inner, false);
        }
        let (width, gates) = (c.intermediate_size, inner.len() / activated.len());
        each_row(inner, activated, [gates * width, width], |inner, activated| {
            let (gate, up) = inner.split_at(width);
            activated.copy_from_slice(gate);
            activate(c.activation, activated);
            if c.gated_mlp {
                multiply(activated, up);
            }
        });
        block.mlp_out.apply_all(activated, x, true);
    }
}

/// Makes each row of y, `to` wide, from one of x.
fn each_row(x: &[f32], y: &mut [f32], [from, to]: [usize; 2], make: impl Fn(&[f32], &mut [f32]) + Sync) {
    let rows = x.par_chunks_exact(from).zip(y.par_chunks_exact_mut(to));
    rows.with_min_len(TASK_ROWS).for_each(|(x, y)| make(x, y));
}
