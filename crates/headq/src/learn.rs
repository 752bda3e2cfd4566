//! Losses that train a [`Correction`] against what attention makes of it (DESIGN §5 of the project's notes).
//!
//! | loss | of one query, with p its dense attention and δ the changes of its scores | |
//! |---|---|---|
//! | `score` | variance of δ over the coded keys, all alike | the closed forms' objective |
//! | `fisher` | ½ Var_p(δ) (E2), nats | |
//! | `kl` | log Σ p e^δ − Σ p δ (E3), nats | |
//! | `logits` | KL of next-token distributions ([`logits_kl`]), nats | end to end |
//!
//! The first three are local to a layer and a KV head: dense queries and keys go in, nothing of the rest of the model. Which keys a
//! query reads from codes follows E10 exactly as in the cache; dense keys have δ = 0 and stay in the softmax. Where
//! nothing but the correction is trained, the base code, p and the base code's own δ are constants, and a [`Sample`] holds them; a base
//! quantizer that is trained with it codes the keys anew ([`Sample::loss_through`]).

use std::fmt;
use std::str::FromStr;

use burn::tensor::activation::log_softmax;
use burn::tensor::{Tensor, TensorData};
use rayon::prelude::*;

use crate::attention::{Segments, first_visible, grouped_queries, probabilities, tiles};
use crate::codec::coded_mask;
use crate::correction::{Correction, project_queries};
use crate::kernels::{self, RowKind, RowLoss};
use crate::metrics::{attention_kl, fisher_error};
use crate::quant::{BaseQuantizer, plain};
use crate::seam::AttentionSite;

/// Losses local to a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Variance of δ over the coded keys of a query.
    Score,
    /// E2.
    Fisher,
    /// E3.
    Kl,
}

impl Loss {
    /// All losses.
    pub const ALL: [Loss; 3] = [Loss::Score, Loss::Fisher, Loss::Kl];

    /// The name in commands and artifacts.
    pub fn name(self) -> &'static str {
        match self {
            Loss::Score => "score",
            Loss::Fisher => "fisher",
            Loss::Kl => "kl",
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Loss {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|l| l.name() == text).ok_or_else(|| format!("'{text}' is not known"))
    }
}

/// One window of one layer, ready for a loss: everything that does not depend on the correction.
#[derive(Debug, Clone)]
pub struct Sample {
    loss: Loss,
    /// Coded tokens' keys, shifted: `[batch, kv_heads, tokens, head_dim]`
    keys: Tensor<4>,
    /// e = k − k̂ of the coded tokens: `[batch, kv_heads, tokens, head_dim]`
    residual: Tensor<4>,
    tiles: Vec<SampleTile>,
    /// Queries of each KV head, those that read no codes, too.
    queries: usize,
}

/// Queries of a tile, and the columns that some of them read from codes, from the first coded token on.
#[derive(Debug, Clone)]
struct SampleTile {
    /// Scaled: `[batch, kv_heads, groups · queries, head_dim]`
    q: Tensor<4>,
    /// First column, counted from the first coded token.
    first: usize,
    /// Weights of the columns, 0 where a query reads a key dense: `[batch, kv_heads, groups · queries, columns]`
    p: Tensor<4>,
    /// 1 − Σp, the weight of all that has δ = 0: `[batch, kv_heads, groups · queries, 1]`
    rest: Tensor<4>,
    /// q·(k̂ − k): as `p`
    base: Tensor<4>,
}

/// What a loss came to.
#[derive(Debug, Clone)]
pub struct LayerLoss {
    /// Mean over queries and the query heads of each side head: `[side_heads]`
    pub by_head: Vec<f64>,
    /// Their sum, as part of the correction's graph: a scalar. Heads share no parameters, so that each trains on its own.
    pub total: Tensor<1>,
}

impl Sample {
    /// Codes a window's keys, and weighs what each query reads of them.
    ///
    /// # Shapes
    /// `q` `[batch, heads, tokens, head_dim]`, `k` `[batch, kv_heads, tokens, head_dim]`, post-RoPE, of no autodiff graph
    ///
    /// # Panics
    /// If the window is too short for any key to be coded: [`Sample::needs`] tokens are enough.
    pub fn new(loss: Loss, base: &BaseQuantizer, site: &AttentionSite, q: &Tensor<4>, k: &Tensor<4>) -> Self {
        let ([_, heads, total, _], kv_heads) = (q.dims(), k.dims()[1]);
        let flush = base.scheme().flush;
        let coded = flush.flushed(total - 1);
        assert!(coded > 0, "a window of {total} tokens has coded keys");
        let k = base.shift(k.clone());
        let own = k.clone().narrow(2, flush.sinks, coded);
        let residual = own.clone() - base.read_back(own.clone());
        let tile = |queries: std::ops::Range<usize>| {
            let first = first_visible(site, &queries);
            let segments = Segments::new(Some(flush), &queries, first);
            let columns = segments.coded.start..segments.mixed.end;
            if columns.is_empty() {
                return None;
            }
            let (start, n) = (columns.start - flush.sinks, columns.len());
            let q = grouped_queries(site, q, kv_heads, &queries);
            let change = q.clone().matmul(-residual.clone().narrow(2, start, n).swap_dims(2, 3));
            let shape @ [b, kv, rows, _] = change.dims();
            let split = [b, kv, rows / queries.len(), queries.len(), n];
            let mask = coded_mask(&flush, queries.clone(), columns.clone(), &change.device()).bool_not().expand(split);
            let masked = |x: Tensor<4>| x.reshape(split).mask_fill(mask.clone(), 0.0).reshape(shape);
            let p = match loss {
                Loss::Score => uniform(masked(change.ones_like())),
                Loss::Fisher | Loss::Kl => {
                    let scores = q.clone().matmul(k.clone().narrow(2, first, queries.end - first).swap_dims(2, 3));
                    let p = probabilities(site, scores, &queries, &(first..queries.end));
                    masked(p.narrow(3, columns.start - first, n))
                }
            };
            let rest = -p.clone().sum_dim(3) + 1.0;
            Some(SampleTile { q, first: start, p, rest, base: masked(change) })
        };
        let tiles = tiles(0, total).filter_map(tile).collect();
        Self { loss, keys: own, residual, tiles, queries: q.dims()[0] * heads / kv_heads * total }
    }

    /// Tokens that a window needs for a key to be coded.
    pub fn needs(base: &BaseQuantizer) -> usize {
        let flush = base.scheme().flush;
        flush.sinks + flush.residual + flush.group
    }

    /// Bytes that a window of `tokens` tokens keeps at most, with f32 numbers.
    pub fn bytes(heads: usize, kv_heads: usize, head_dim: usize, tokens: usize) -> u64 {
        let weights = 2 * heads * tokens * (tokens / 2 + 128);
        4 * (weights + (heads + 2 * kv_heads) * tokens * head_dim) as u64
    }

    /// e = k − k̂ of the coded tokens: `[batch, kv_heads, tokens, head_dim]`.
    pub fn residual(&self) -> &Tensor<4> {
        &self.residual
    }

    /// The loss under a correction.
    pub fn loss(&self, correction: &Correction) -> LayerLoss {
        self.loss_of(correction.decoder(), correction.code(self.residual.clone()))
    }

    /// The loss under a correction and a base quantizer that is trained with it, which codes the sample's keys anew.
    ///
    /// # Panics
    /// If the base quantizer's scheme is another than the sample's.
    pub fn loss_through(&self, base: &BaseQuantizer, correction: &Correction) -> LayerLoss {
        let residual = self.keys.clone() - base.read_back(self.keys.clone());
        assert_eq!(residual.dims(), self.residual.dims(), "the base quantizer of the sample");
        let side = correction.code(residual.clone());
        let base = |tile: &SampleTile| {
            let own = residual.clone().narrow(2, tile.first, tile.p.dims()[3]);
            tile.q.clone().matmul(-own.swap_dims(2, 3))
        };
        self.loss_of_tensors(&base, correction.decoder(), side)
    }

    /// The loss under any decoder U `[side_heads, head_dim, rank]` and side code ẑ `[batch, side_heads, tokens, rank]`.
    pub fn loss_of(&self, decoder: Tensor<3>, side: Tensor<4>) -> LayerLoss {
        match self.tiles.iter().all(|t| kernels::on_host(&t.p)) && side.dtype() == self.residual.dtype() {
            true => self.loss_on_host(decoder, side),
            false => self.loss_of_tensors(&|tile| tile.base.clone(), decoder, side),
        }
    }

    /// The loss by the host's one-pass gradients.
    fn loss_on_host(&self, decoder: Tensor<3>, side: Tensor<4>) -> LayerLoss {
        let mut sums = HeadSums::new(self, &decoder);
        let mut side_gradient = vec![0.0f32; side.shape().num_elements()];
        let mut total = None;
        for tile in &self.tiles {
            let q_side = project_queries(&tile.q, decoder.clone());
            let (own, gradient) = self.tile_gradients(tile, &q_side, &side, &mut side_gradient);
            sums.add(&own);
            accumulate(&mut total, (q_side * gradient).sum());
        }
        let gradient = Tensor::from_data(TensorData::new(side_gradient, side.shape()), &plain(side.clone()).device());
        accumulate(&mut total, (side * gradient).sum());
        // It has the loss's gradient, but not its value.
        let total = total.expect("a sample has coded keys").mul_scalar(sums.scale);
        let value = sums.by_head.iter().sum::<f64>();
        LayerLoss { by_head: sums.by_head, total: total.clone() - total.detach() + value }
    }

    /// The loss by tensor operations; `base` gives q·(k̂ − k) of a tile.
    fn loss_of_tensors(
        &self,
        base: &dyn Fn(&SampleTile) -> Tensor<4>,
        decoder: Tensor<3>,
        side: Tensor<4>,
    ) -> LayerLoss {
        let mut sums = HeadSums::new(self, &decoder);
        let mut total = None;
        for tile in &self.tiles {
            let q_side = project_queries(&tile.q, decoder.clone());
            let own = self.tile_loss(tile, base(tile), q_side, &side).sum_dim(2);
            let host = plain(own.clone()).into_data_as::<f64>();
            sums.add(&host.try_to_vec::<f64>().expect("the data was converted to f64"));
            accumulate(&mut total, own.sum());
        }
        let total = total.expect("a sample has coded keys").mul_scalar(sums.scale);
        LayerLoss { by_head: sums.by_head, total }
    }

    /// ẑ of a tile's columns.
    fn columns(tile: &SampleTile, side: &Tensor<4>) -> Tensor<4> {
        side.clone().narrow(2, tile.first, tile.p.dims()[3])
    }

    /// Loss of each query as tensor operations: `[batch, side_heads, rows, 1]`.
    fn tile_loss(&self, tile: &SampleTile, base: Tensor<4>, q_side: Tensor<4>, side: &Tensor<4>) -> Tensor<4> {
        let [b, side_heads, rows, _] = q_side.dims();
        let n = tile.p.dims()[3];
        let delta = base.reshape([b, side_heads, rows, n]) + q_side.matmul(Self::columns(tile, side).swap_dims(2, 3));
        // Everything that does not change is one more column.
        let (p, rest) = (tile.p.clone().reshape([b, side_heads, rows, n]), tile.rest.clone());
        let rest = rest.reshape([b, side_heads, rows, 1]);
        let delta = Tensor::cat(vec![delta, rest.zeros_like()], 3);
        let p = Tensor::cat(vec![p, rest], 3);
        match self.loss {
            Loss::Score => fisher_error(p, delta).mul_scalar(2.0),
            Loss::Fisher => fisher_error(p, delta),
            Loss::Kl => attention_kl(p, delta),
        }
    }

    /// Sums of the losses over the queries of each `[batch, side_head]`, the gradient by qU, and the gradient by ẑ added to
    /// `side_gradient`, in one pass over the host's memory.
    fn tile_gradients(
        &self,
        tile: &SampleTile,
        q_side: &Tensor<4>,
        side: &Tensor<4>,
        side_gradient: &mut [f32],
    ) -> (Vec<f64>, Tensor<4>) {
        let (shape @ [_, _, rows, rank], n) = (q_side.dims(), tile.p.dims()[3]);
        let tokens = side.dims()[2];
        let (kind, factor) = match self.loss {
            Loss::Score => (RowKind::Fisher, 2.0),
            Loss::Fisher => (RowKind::Fisher, 1.0),
            Loss::Kl => (RowKind::Kl, 1.0),
        };
        let (p, base) = (host(tile.p.clone()), host(tile.base.clone()));
        let (rest, q) = (host(tile.rest.clone()), host(plain(q_side.clone())));
        let by_coefficient = host(plain(Self::columns(tile, side)).swap_dims(2, 3));
        let mut gradient = vec![0.0f32; q.len()];
        let heads = gradient.par_chunks_mut(rows * rank).zip(side_gradient.par_chunks_mut(tokens * rank)).enumerate();
        let head = |(head, (gradient, side_gradient)): (usize, (&mut [f32], &mut [f32]))| {
            let side = &by_coefficient[head * rank * n..(head + 1) * rank * n];
            let (mut delta, mut by_column) = (vec![0.0; n], vec![0.0f32; rank * n]);
            let mut sum = 0.0;
            for (i, gradient) in gradient.chunks_exact_mut(rank).enumerate() {
                let at = head * rows + i;
                let row = RowLoss {
                    p: &p[at * n..(at + 1) * n],
                    rest: f64::from(rest[at]),
                    base: &base[at * n..(at + 1) * n],
                    q_side: &q[at * rank..(at + 1) * rank],
                    side,
                    stride: n,
                };
                sum += kernels::row_loss(kind, row, &mut delta, gradient, &mut by_column);
                gradient.iter_mut().for_each(|g| *g *= factor as f32);
            }
            for (c, column) in by_column.chunks_exact(n).enumerate() {
                for (j, g) in column.iter().enumerate() {
                    side_gradient[(tile.first + j) * rank + c] += factor as f32 * g;
                }
            }
            factor * sum
        };
        let sums = heads.map(head).collect();
        (sums, Tensor::from_data(TensorData::new(gradient, shape), &tile.p.device()))
    }
}

/// Losses of each side head, as means over its queries.
struct HeadSums {
    by_head: Vec<f64>,
    /// From the sum over queries to the mean.
    scale: f64,
}

impl HeadSums {
    fn new(sample: &Sample, decoder: &Tensor<3>) -> Self {
        let (side_heads, kv_heads) = (decoder.dims()[0], sample.residual.dims()[1]);
        Self { by_head: vec![0.0; side_heads], scale: kv_heads as f64 / (side_heads * sample.queries) as f64 }
    }

    /// Adds sums over a tile's queries, `[batch, side_heads]`.
    fn add(&mut self, sums: &[f64]) {
        let heads = self.by_head.len();
        sums.iter().enumerate().for_each(|(i, sum)| self.by_head[i % heads] += sum * self.scale);
    }
}

/// Each row divided by its sum; rows of zeros stay.
fn uniform(mask: Tensor<4>) -> Tensor<4> {
    let count = mask.clone().sum_dim(3);
    mask / count.clamp_min(1.0)
}

fn accumulate(total: &mut Option<Tensor<1>>, x: Tensor<1>) {
    *total = Some(match total.take() {
        None => x,
        Some(sum) => sum + x,
    });
}

fn host(x: Tensor<4>) -> Vec<f32> {
    x.into_data().try_to_vec().expect("f32 on the host, as on_host says")
}

/// KL(p ‖ p̂) of next-token distributions, in nats; works under autodiff.
///
/// # Shapes
/// Logits `[rows, vocabulary]` of the dense model and as read under a scheme; returns `[rows, 1]`.
pub fn logits_kl(dense: Tensor<2>, read: Tensor<2>) -> Tensor<2> {
    let (p, read) = (log_softmax(dense, 1), log_softmax(read, 1));
    (p.clone().exp() * (p - read)).sum_dim(1)
}
