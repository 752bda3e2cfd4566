//! E1–E8: cache error where it is read.
//!
//! Diagnostics are taken on the dense pass's q, k and v. Two forms stand side by side: row functions in f64 on the host, which
//! evaluation uses on every device, and tensor functions that work under autodiff.

use burn::tensor::{Tensor, TensorData};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::attention::{Segments, first_visible, grouped_queries, probabilities, tiles, visible};
use crate::codec::{CodedKeys, HeadqAttention, coded_mask};
use crate::scheme::Flush;
use crate::seam::{Attention, AttentionSite};
use crate::{LayerState, kernels};

/// E2 and E3 of one query, in nats.
///
/// `p` are its attention probabilities over the keys whose scores changed by `delta`; all other keys together have probability
/// `rest` and no change. Centred first, so that nothing is lost to cancellation: with δ' = δ − Σpδ,
/// F = ½Σpδ'² and KL = log1p(Σp(e^{δ'} − 1 − δ')).
pub fn fisher_and_kl(p: &[f32], delta: &[f32], rest: f64) -> (f64, f64) {
    let [mass, mean] = kernels::mass_and_mean(p, delta);
    let mass = mass + rest;
    let mean = mean / mass;
    let [square, excess] = kernels::square_and_excess(p, delta, mean);
    let (square, excess) = (square + rest * mean * mean, excess + rest * kernels::excess(-mean));
    (0.5 * square / mass, (excess / mass).ln_1p())
}

/// E2 along the last axis: ½ Σ_j p_j δ'_j², δ' = δ − Σpδ, in nats; works under autodiff.
///
/// # Shapes
/// `p` and `delta` `[…, tokens]`, returns `[…, 1]`
pub fn fisher_error<const D: usize>(p: Tensor<D>, delta: Tensor<D>) -> Tensor<D> {
    let centred = centre(&p, delta);
    (p * centred.square()).sum_dim(D - 1).mul_scalar(0.5)
}

/// E3 along the last axis: KL(p ‖ p̂) with p̂ ∝ p·e^δ, in nats; works under autodiff.
///
/// # Shapes
/// `p` and `delta` `[…, tokens]`, returns `[…, 1]`
pub fn attention_kl<const D: usize>(p: Tensor<D>, delta: Tensor<D>) -> Tensor<D> {
    let x = centre(&p, delta);
    let small = x.clone().abs().lower_elem(0.5);
    // Both branches are finite where the other is taken, so that no gradient is poisoned.
    let y = x.clone().mask_fill(small.clone().bool_not(), 0.0);
    let series = (2..=10).rev().fold(y.zeros_like(), |sum, k| {
        let inverse_factorial = 1.0 / (1..=k).map(f64::from).product::<f64>();
        sum * y.clone() + inverse_factorial
    });
    let series = series * y.square();
    let z = x.mask_fill(small.clone(), 0.0);
    let direct = z.clone().exp() - 1.0 - z;
    let excess = direct.mask_where(small, series);
    (p * excess).sum_dim(D - 1).log1p()
}

fn centre<const D: usize>(p: &Tensor<D>, delta: Tensor<D>) -> Tensor<D> {
    let mean = (p.clone() * delta.clone()).sum_dim(D - 1);
    delta - mean
}

/// E8, (PPL_base − PPL_x) / (PPL_base − PPL_dense); `None` where the base has no excess over dense.
pub fn excess_removed(base: f64, x: f64, dense: f64) -> Option<f64> {
    let share = (base - x) / (base - dense);
    (base > dense && share.is_finite()).then_some(share)
}

/// Changes of a score, in nats, up to which f32 probabilities are enough: those below e⁻⁸⁷ are 0, and centred changes of at most
/// twice this bring them to no more than e⁻²⁷.
const LARGE_CHANGE: f32 = 30.0;

/// Sums of the diagnostics of one scheme, over layers, heads, queries and windows.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Diagnostics {
    queries: f64,
    fisher: f64,
    kl: f64,
    key_elements: f64,
    key_error: f64,
    key_elements_corrected: f64,
    key_error_corrected: f64,
    value_elements: f64,
    value_error: f64,
    readout: f64,
    readout_diagonal: f64,
    output_error: f64,
    output_norm: f64,
}

impl Diagnostics {
    /// Adds what another accumulator has seen.
    pub fn merge(&mut self, other: &Diagnostics) {
        let pairs = [
            (&mut self.queries, other.queries),
            (&mut self.fisher, other.fisher),
            (&mut self.kl, other.kl),
            (&mut self.key_elements, other.key_elements),
            (&mut self.key_error, other.key_error),
            (&mut self.key_elements_corrected, other.key_elements_corrected),
            (&mut self.key_error_corrected, other.key_error_corrected),
            (&mut self.value_elements, other.value_elements),
            (&mut self.value_error, other.value_error),
            (&mut self.readout, other.readout),
            (&mut self.readout_diagonal, other.readout_diagonal),
            (&mut self.output_error, other.output_error),
            (&mut self.output_norm, other.output_norm),
        ];
        for (mine, theirs) in pairs {
            *mine += theirs;
        }
    }

    /// E2, mean over layers, query heads and queries, in nats; `None` before any query.
    pub fn fisher(&self) -> Option<f64> {
        ratio(self.fisher, self.queries)
    }

    /// E3, mean over layers, query heads and queries, in nats.
    pub fn kl(&self) -> Option<f64> {
        ratio(self.kl, self.queries)
    }

    /// E4 of the base code: mean of (k̂ − k)² over coded tokens and channels; `None` where no key is coded.
    pub fn key_mse(&self) -> Option<f64> {
        ratio(self.key_error, self.key_elements)
    }

    /// E4 of what base and side code together stand for: mean of (k̂ + Uẑ − k)². Scores never form this sum. `None` also where each
    /// query head has a side code of its own, so that no one key is stood for.
    pub fn key_mse_corrected(&self) -> Option<f64> {
        ratio(self.key_error_corrected, self.key_elements_corrected)
    }

    /// E4 of values: mean of (v̂ − v)² over coded tokens and channels.
    pub fn value_mse(&self) -> Option<f64> {
        ratio(self.value_error, self.value_elements)
    }

    /// E5, ‖Σ p (v̂ − v)‖²/d, mean over layers, query heads and queries.
    pub fn readout_error(&self) -> Option<f64> {
        ratio(self.readout, self.queries)
    }

    /// E6, Σ p² ‖v̂ − v‖²/d, mean over layers, query heads and queries.
    pub fn readout_diagonal(&self) -> Option<f64> {
        ratio(self.readout_diagonal, self.queries)
    }

    /// E7, Σ‖ô − o‖² / Σ‖o‖², before W_o.
    pub fn output_error(&self) -> Option<f64> {
        ratio(self.output_error, self.output_norm)
    }

    /// Σ‖o‖² of dense attention, before W_o: what E7 is relative to, and so what a head weighs in the E7 of several.
    pub fn output_norm(&self) -> f64 {
        self.output_norm
    }
}

fn ratio(sum: f64, count: f64) -> Option<f64> {
    (count > 0.0).then(|| sum / count)
}

/// Sums of the diagnostics of one scheme for each layer and KV head; the query heads of a KV head are taken together.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct HeadDiagnostics {
    /// KV heads per layer; 0 before anything was seen.
    pub kv_heads: usize,
    /// `[layers, kv_heads]`, row-major.
    pub heads: Vec<Diagnostics>,
}

impl HeadDiagnostics {
    /// Adds what another accumulator has seen.
    pub fn merge(&mut self, other: &HeadDiagnostics) {
        if self.heads.len() < other.heads.len() {
            self.kv_heads = other.kv_heads;
            self.heads.resize(other.heads.len(), Diagnostics::default());
        }
        self.heads.iter_mut().zip(&other.heads).for_each(|(mine, theirs)| mine.merge(theirs));
    }

    /// Over all layers and heads.
    pub fn total(&self) -> Diagnostics {
        self.heads.iter().fold(Diagnostics::default(), |mut total, head| {
            total.merge(head);
            total
        })
    }

    /// One KV head of one layer.
    pub fn head(&self, layer: usize, head: usize) -> &Diagnostics {
        &self.heads[layer * self.kv_heads + head]
    }

    fn layer(&mut self, layer: usize, kv_heads: usize) -> &mut [Diagnostics] {
        self.kv_heads = kv_heads;
        let end = (layer + 1) * kv_heads;
        if self.heads.len() < end {
            self.heads.resize(end, Diagnostics::default());
        }
        &mut self.heads[layer * kv_heads..end]
    }
}

/// What one query of one query head sees under a scheme, beside dense attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryReading {
    /// Layer.
    pub layer: usize,
    /// Query head.
    pub head: usize,
    /// Position of the query.
    pub position: usize,
    /// Entropy of the dense attention, nats.
    pub entropy: f64,
    /// The most attended token of dense attention; of equals, the first.
    pub top: usize,
    /// The most attended token as read from the cache.
    pub top_read: usize,
    /// E2, nats.
    pub fisher: f64,
    /// E3, nats.
    pub kl: f64,
}

/// Receives every query that reads at least one coded key, scheme by scheme.
pub trait QuerySink {
    /// One query under the scheme of this index.
    fn query(&mut self, scheme: usize, reading: &QueryReading);
}

/// Dense attention that measures, on the way, what each of several schemes would have done to the same q, k and v.
pub struct LayerProbe<'a> {
    /// By scheme, then by layer.
    schemes: Vec<&'a [HeadqAttention]>,
    sums: Vec<HeadDiagnostics>,
    queries: Option<&'a mut dyn QuerySink>,
}

impl<'a> LayerProbe<'a> {
    /// Measures each of `schemes`, given by layer.
    pub fn new(schemes: Vec<&'a [HeadqAttention]>) -> Self {
        let sums = vec![HeadDiagnostics::default(); schemes.len()];
        Self { schemes, sums, queries: None }
    }

    /// Hands every query's own numbers to `queries`, too.
    pub fn with_queries(self, queries: &'a mut dyn QuerySink) -> Self {
        Self { queries: Some(queries), ..self }
    }

    /// What was measured, by scheme.
    pub fn finish(self) -> Vec<HeadDiagnostics> {
        self.sums
    }
}

impl Attention for LayerProbe<'_> {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        assert_eq!(site.start, 0, "diagnostics are taken on whole sequences");
        let [b, heads, total, d] = q.dims();
        let kv_heads = k.dims()[1];
        let mut coded: Vec<Coded> = self
            .schemes
            .iter()
            .zip(&mut self.sums)
            .map(|(layers, sums)| Coded::new(&layers[site.layer], &k, &v, sums.layer(site.layer, kv_heads)))
            .collect();
        let outputs = tiles(0, total).map(|queries| {
            let first = first_visible(site, &queries);
            let tile = Tile::new(site, &q, &k, &v, queries, first);
            for (scheme, coded) in coded.iter_mut().enumerate() {
                let sums = self.sums[scheme].layer(site.layer, kv_heads);
                let readings = tile.measure(coded, &v, sums, self.queries.is_some());
                if let Some(sink) = &mut self.queries {
                    readings.iter().for_each(|reading| sink.query(scheme, reading));
                }
            }
            let m = tile.queries.len();
            debug_assert_eq!(tile.output.dims(), [b, kv_heads, heads / kv_heads * m, d]);
            tile.output.reshape([b, heads, m, d])
        });
        Tensor::cat(outputs.collect(), 2)
    }
}

/// What subtracting one vector from every key does to dense attention: nothing, but for rounding.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ShiftChange {
    /// Largest change of a probability.
    pub probability: f64,
    /// Largest score in magnitude, shifted or not: what rounding is relative to.
    pub score: f64,
}

impl ShiftChange {
    /// Dense attention over `k` beside that over k − `offset`.
    ///
    /// # Shapes
    /// `q` `[batch, heads, tokens, head_dim]`, `k` `[batch, kv_heads, tokens, head_dim]`, `offset` `[1, kv_heads, 1, head_dim]`
    pub fn of(site: &AttentionSite, q: &Tensor<4>, k: &Tensor<4>, offset: &Tensor<4>) -> Self {
        let (kv_heads, total) = (k.dims()[1], k.dims()[2]);
        let shifted = k.clone() - offset.clone();
        let change = |queries: std::ops::Range<usize>| {
            let tokens = first_visible(site, &queries)..queries.end;
            let q = grouped_queries(site, q, kv_heads, &queries);
            let read = |k: &Tensor<4>| {
                let scores = q.clone().matmul(k.clone().narrow(2, tokens.start, tokens.len()).swap_dims(2, 3));
                let largest: f32 = scores.clone().abs().max().into_scalar();
                (probabilities(site, scores, &queries, &tokens), largest)
            };
            let ((p, largest), (p_shifted, largest_shifted)) = (read(k), read(&shifted));
            let change: f32 = (p - p_shifted).abs().max().into_scalar();
            Self { probability: change.into(), score: largest.max(largest_shifted).into() }
        };
        tiles(0, total).map(change).fold(Self::default(), Self::worst)
    }

    /// The larger of both in each respect.
    pub fn worst(self, other: Self) -> Self {
        Self { probability: self.probability.max(other.probability), score: self.score.max(other.score) }
    }
}

/// One scheme's codes of a layer, beside the errors they make.
struct Coded<'a> {
    module: &'a HeadqAttention,
    state: LayerState,
    /// k̂ − k and ẑ of coded keys.
    key_errors: Option<CodedKeys>,
    /// v̂ − v of the values coded so far, and its squared norm per token `[batch, kv_heads, tokens, 1]`.
    value_errors: Option<(Tensor<4>, Tensor<4>)>,
}

impl<'a> Coded<'a> {
    fn new(module: &'a HeadqAttention, k: &Tensor<4>, v: &Tensor<4>, sums: &mut [Diagnostics]) -> Self {
        let mut state = LayerState::default();
        state.append(module, k.clone(), v.clone());
        let t = k.dims()[2];
        let whole = |flush: Option<Flush>| flush.map(|f| (f.sinks, f.flushed(t - 1))).filter(|(_, n)| *n > 0);
        let key_errors = whole(module.key_flush()).map(|(sinks, n)| {
            let coded = state.coded_keys().expect("flushed keys have codes");
            let e = coded.base.clone() - module.shift_keys(k.clone()).narrow(2, sinks, n);
            add_squares(&e, sums, |s| (&mut s.key_error, &mut s.key_elements));
            let corrected = match (&coded.side, module.decode_side(coded)) {
                (None, _) => Some(e.clone()),
                (Some(_), correction) => correction.map(|c| e.clone() + c),
            };
            if let Some(corrected) = corrected {
                add_squares(&corrected, sums, |s| (&mut s.key_error_corrected, &mut s.key_elements_corrected));
            }
            CodedKeys { base: e, side: coded.side.clone() }
        });
        let mut coded = Self { module, state, key_errors, value_errors: None };
        coded.take_value_errors(v, sums);
        coded
    }

    /// Takes the errors of values that were coded since the last time.
    fn take_value_errors(&mut self, v: &Tensor<4>, sums: &mut [Diagnostics]) {
        let (Some(coded), Some(flush)) = (self.state.coded_values(), self.module.value_flush()) else { return };
        let n = coded.dims()[2];
        let seen = self.value_errors.as_ref().map_or(0, |(e, _)| e.dims()[2]);
        if n == seen {
            return;
        }
        let e = coded.clone().narrow(2, seen, n - seen) - v.clone().narrow(2, flush.sinks + seen, n - seen);
        add_squares(&e, sums, |s| (&mut s.value_error, &mut s.value_elements));
        let norms = e.clone().square().sum_dim(3);
        self.value_errors = Some(match self.value_errors.take() {
            None => (e, norms),
            Some((older, older_norms)) => (Tensor::cat(vec![older, e], 2), Tensor::cat(vec![older_norms, norms], 2)),
        });
    }
}

/// Adds Σx² and the number of elements of each head of `[batch, heads, tokens, width]` to the picked sums.
fn add_squares(x: &Tensor<4>, sums: &mut [Diagnostics], pick: impl Fn(&mut Diagnostics) -> (&mut f64, &mut f64)) {
    let [_, heads, n, d] = x.dims();
    for (i, part) in host(x.clone()).chunks(n * d).enumerate() {
        let (error, elements) = pick(&mut sums[i % heads]);
        *error += kernels::difference_and_norm(part, part)[1];
        *elements += part.len() as f64;
    }
}

/// The dense attention of a tile of queries.
struct Tile {
    site: AttentionSite,
    queries: std::ops::Range<usize>,
    /// Position of the first column.
    first: usize,
    /// `[batch, kv_heads, groups · queries, head_dim]`, scaled
    q: Tensor<4>,
    /// Scores of all tokens, hidden ones too: `[batch, kv_heads, groups · queries, tokens]`
    scores: Tensor<4>,
    p: Tensor<4>,
    p_host: Vec<f32>,
    /// o: `[batch, kv_heads, groups · queries, head_dim]`
    output: Tensor<4>,
    output_host: Vec<f32>,
}

impl Tile {
    fn new(
        site: &AttentionSite,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
        queries: std::ops::Range<usize>,
        first: usize,
    ) -> Self {
        let tokens = first..queries.end;
        let q = grouped_queries(site, q, k.dims()[1], &queries);
        let part = |x: &Tensor<4>| x.clone().narrow(2, first, tokens.len());
        let scores = q.clone().matmul(part(k).swap_dims(2, 3));
        let p = probabilities(site, scores.clone(), &queries, &tokens);
        let output = p.clone().matmul(part(v));
        let (p_host, output_host) = (host(p.clone()), host(output.clone()));
        Self { site: *site, queries, first, q, scores, p, p_host, output, output_host }
    }

    /// Adds the errors of one scheme, by KV head; returns each query's own where `readings` asks for them.
    fn measure(&self, coded: &mut Coded, v: &Tensor<4>, sums: &mut [Diagnostics], readings: bool) -> Vec<QueryReading> {
        let [_, kv_heads, rows, d] = self.q.dims();
        let (p_hat, errors) = self.measure_keys(coded, sums);
        coded.state.weigh(coded.module, &p_hat, &self.queries, self.first);
        coded.take_value_errors(v, sums);
        self.measure_values(coded, sums);
        let output = host(coded.module.read_values(&coded.state, p_hat.clone(), &self.queries, self.first));
        let heads = output.chunks(rows * d).zip(self.output_host.chunks(rows * d)).enumerate();
        for (i, (read, dense)) in heads {
            let [error, norm] = kernels::difference_and_norm(read, dense);
            let sums = &mut sums[i % kv_heads];
            sums.queries += rows as f64;
            sums.output_error += error;
            sums.output_norm += norm;
        }
        match errors {
            Some(errors) if readings => self.readings(coded.module, &host(p_hat), &errors),
            _ => Vec::new(),
        }
    }

    /// E1–E3; returns the probabilities under the scheme's scores, and E2 and E3 of every row where any may differ from 0.
    fn measure_keys(&self, coded: &Coded, sums: &mut [Diagnostics]) -> (Tensor<4>, Option<Vec<(f64, f64)>>) {
        let Some((flush, errors)) = coded.module.key_flush().zip(coded.key_errors.as_ref()) else {
            return (self.p.clone(), None);
        };
        let columns = self.coded_columns(flush);
        if columns.is_empty() {
            return (self.p.clone(), None);
        }
        // δs = (q·(k̂ − k) + (qU)·ẑ)/√d (E1, E9), for the columns that some query of the tile reads from codes.
        let q_side = coded.module.project_queries(&self.q);
        let errors = errors.narrow(columns.start - flush.sinks, columns.len());
        let delta = crate::codec::coded_scores(&self.q, q_side.as_ref(), &errors);
        let shape @ [b, kv, rows, n] = delta.dims();
        let m = self.queries.len();
        let split = [b, kv, rows / m, m, n];
        let mask = coded_mask(&flush, self.queries.clone(), columns.clone(), &delta.device());
        let delta = delta.reshape(split).mask_fill(mask.bool_not().expand(split), 0.0).reshape(shape);
        let by_row = self.fisher_and_kl(&host(delta.clone()), columns.start - self.first, n);
        for (i, head) in by_row.chunks(rows).enumerate() {
            let sums = &mut sums[i % kv];
            let (fisher, kl) = head.iter().fold((0.0, 0.0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
            sums.fisher += fisher;
            sums.kl += kl;
        }
        let offset = columns.start - self.first;
        let changed = self.scores.clone().narrow(3, offset, n) + delta;
        let slices = [0..b, 0..kv, 0..rows, offset..offset + n];
        let scores = self.scores.clone().slice_assign(slices, changed);
        let p_hat = probabilities(&self.site, scores, &self.queries, &(self.first..self.queries.end));
        (p_hat, Some(by_row))
    }

    /// E2 and E3 of each row of the tile, given the changes of the scores of columns `offset..offset + n`.
    fn fisher_and_kl(&self, delta: &[f32], offset: usize, n: usize) -> Vec<(f64, f64)> {
        let (m, width) = (self.queries.len(), self.queries.end - self.first);
        let scores = std::sync::OnceLock::new();
        let rows = self.p_host.par_chunks(width).zip(delta.par_chunks(n)).enumerate();
        rows.map(|(row, (p, delta))| {
            if delta.iter().any(|x| x.abs() > LARGE_CHANGE) {
                let scores = scores.get_or_init(|| host(self.scores.clone()));
                let visible = visible(&self.site, self.queries.start + row % m);
                let mut changes = vec![0.0; width];
                changes[offset..offset + n].copy_from_slice(delta);
                let visible = visible.start.max(self.first) - self.first..visible.end - self.first;
                return kernels::fisher_and_kl_of_scores(&scores[row * width..][visible.clone()], &changes[visible]);
            }
            let rest = p[..offset].iter().chain(&p[offset + n..]).map(|&p| f64::from(p)).sum();
            fisher_and_kl(&p[offset..offset + n], delta, rest)
        })
        .collect()
    }

    /// The queries of the tile that read at least one coded key.
    fn readings(&self, module: &HeadqAttention, p_hat: &[f32], errors: &[(f64, f64)]) -> Vec<QueryReading> {
        let (m, width) = (self.queries.len(), self.queries.end - self.first);
        let flush = module.key_flush().expect("only coded keys have errors");
        let heads = self.q.dims()[1] * self.q.dims()[2] / m;
        let reading = |(row, p): (usize, &[f32])| {
            let position = self.queries.start + row % m;
            let coded_end = flush.sinks + flush.flushed(position);
            let reads_codes = coded_end > visible(&self.site, position).start.max(flush.sinks);
            reads_codes.then(|| QueryReading {
                layer: self.site.layer,
                head: row / m % heads,
                position,
                entropy: kernels::entropy(p),
                top: self.first + kernels::first_largest(p),
                top_read: self.first + kernels::first_largest(&p_hat[row * width..(row + 1) * width]),
                fisher: errors[row].0,
                kl: errors[row].1,
            })
        };
        self.p_host.par_chunks(width).enumerate().filter_map(reading).collect()
    }

    /// E5 and E6, with the dense probabilities.
    fn measure_values(&self, coded: &Coded, sums: &mut [Diagnostics]) {
        let Some((flush, (errors, norms))) = coded.module.value_flush().zip(coded.value_errors.as_ref()) else {
            return;
        };
        let columns = self.coded_columns(flush);
        if columns.is_empty() {
            return;
        }
        let (m, offset, from) = (self.queries.len(), columns.start - self.first, columns.start - flush.sinks);
        let p = self.p.clone().narrow(3, offset, columns.len());
        let shape @ [b, kv, rows, n] = p.dims();
        let split = [b, kv, rows / m, m, n];
        let mask = coded_mask(&flush, self.queries.clone(), columns.clone(), &p.device());
        let p = p.reshape(split).mask_fill(mask.bool_not().expand(split), 0.0).reshape(shape);
        let width = self.output.dims()[3];
        let readout = host(p.clone().matmul(errors.clone().narrow(2, from, n)));
        let (p, norms) = (host(p), host(norms.clone().narrow(2, from, n)));
        for (i, (readout, p)) in readout.chunks(rows * width).zip(p.chunks(rows * n)).enumerate() {
            let sums = &mut sums[i % kv];
            sums.readout += kernels::difference_and_norm(readout, readout)[1] / width as f64;
            let norms = &norms[i * n..(i + 1) * n];
            let diagonal =
                |p: &[f32]| -> f64 { p.iter().zip(norms).map(|(&p, &e)| f64::from(p).powi(2) * f64::from(e)).sum() };
            sums.readout_diagonal += p.chunks(n).map(diagonal).sum::<f64>() / width as f64;
        }
    }

    /// Columns that some query of the tile reads from codes.
    fn coded_columns(&self, flush: Flush) -> std::ops::Range<usize> {
        let segments = Segments::new(Some(flush), &self.queries, self.first);
        segments.coded.start..segments.mixed.end
    }
}

fn host<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    let data: TensorData = x.into_data_as::<f32>();
    data.try_to_vec().expect("the data was converted to f32")
}
