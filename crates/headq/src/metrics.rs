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

/// E8, (PPL_base − PPL_x) / (PPL_base − PPL_dense); `None` where base and dense are equal.
pub fn excess_removed(base: f64, x: f64, dense: f64) -> Option<f64> {
    let share = (base - x) / (base - dense);
    (base != dense && share.is_finite()).then_some(share)
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
}

fn ratio(sum: f64, count: f64) -> Option<f64> {
    (count > 0.0).then(|| sum / count)
}

/// Dense attention that measures, on the way, what each of several schemes would have done to the same q, k and v.
#[derive(Debug)]
pub struct LayerProbe<'a> {
    /// By scheme, then by layer.
    schemes: Vec<&'a [HeadqAttention]>,
    sums: Vec<Diagnostics>,
}

impl<'a> LayerProbe<'a> {
    /// Measures each of `schemes`, given by layer.
    pub fn new(schemes: Vec<&'a [HeadqAttention]>) -> Self {
        let sums = vec![Diagnostics::default(); schemes.len()];
        Self { schemes, sums }
    }

    /// What was measured, by scheme.
    pub fn finish(self) -> Vec<Diagnostics> {
        self.sums
    }
}

impl Attention for LayerProbe<'_> {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let modules: Vec<&HeadqAttention> = self.schemes.iter().map(|layers| &layers[site.layer]).collect();
        measure(&modules, site, &q, &k, &v, &mut self.sums)
    }
}

/// One scheme's codes of a layer, beside the errors they make.
struct Coded<'a> {
    module: &'a HeadqAttention,
    state: LayerState,
    /// k̂ − k and ẑ of coded keys.
    key_errors: Option<CodedKeys>,
    /// v̂ − v of coded values, and its squared norm per token `[batch, kv_heads, tokens]`.
    value_errors: Option<(Tensor<4>, Vec<f32>)>,
}

impl<'a> Coded<'a> {
    fn new(module: &'a HeadqAttention, k: &Tensor<4>, v: &Tensor<4>, sums: &mut Diagnostics) -> Self {
        let mut state = LayerState::default();
        state.append(module, k.clone(), v.clone());
        let t = k.dims()[2];
        let whole = |flush: Option<Flush>| flush.map(|f| (f.sinks, f.flushed(t - 1))).filter(|(_, n)| *n > 0);
        let key_errors = whole(module.key_flush()).map(|(sinks, n)| {
            let coded = state.coded_keys().expect("flushed keys have codes");
            let e = coded.base.clone() - k.clone().narrow(2, sinks, n);
            sums.key_elements += e.shape().num_elements() as f64;
            sums.key_error += sum_of_squares(&e);
            let corrected = match (&coded.side, module.decode_side(coded)) {
                (None, _) => Some(e.clone()),
                (Some(_), correction) => correction.map(|c| e.clone() + c),
            };
            if let Some(corrected) = corrected {
                sums.key_elements_corrected += corrected.shape().num_elements() as f64;
                sums.key_error_corrected += sum_of_squares(&corrected);
            }
            CodedKeys { base: e, side: coded.side.clone() }
        });
        let value_errors = whole(module.value_flush()).map(|(sinks, n)| {
            let e = state.coded_values().expect("flushed values have codes").clone() - v.clone().narrow(2, sinks, n);
            sums.value_elements += e.shape().num_elements() as f64;
            sums.value_error += sum_of_squares(&e);
            let norms = host(e.clone().square().sum_dim(3));
            (e, norms)
        });
        Self { module, state, key_errors, value_errors }
    }
}

/// Dense attention of one layer and one call, adding each scheme's errors to its `sums`.
///
/// # Shapes
/// `q` `[batch, heads, tokens, head_dim]`, `k` and `v` `[batch, kv_heads, tokens, head_dim]`; returns the dense output, as `q`
fn measure(
    modules: &[&HeadqAttention],
    site: &AttentionSite,
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    sums: &mut [Diagnostics],
) -> Tensor<4> {
    assert_eq!(site.start, 0, "diagnostics are taken on whole sequences");
    let [b, heads, total, d] = q.dims();
    let kv_heads = k.dims()[1];
    let coded: Vec<_> = modules.iter().zip(sums.iter_mut()).map(|(m, s)| Coded::new(m, k, v, s)).collect();
    let outputs = tiles(0, total).map(|queries| {
        let first = first_visible(site, &queries);
        let tile = Tile::new(site, q, k, v, queries, first);
        for (coded, sums) in coded.iter().zip(sums.iter_mut()) {
            tile.measure(coded, sums);
        }
        let m = tile.queries.len();
        debug_assert_eq!(tile.output.dims(), [b, kv_heads, heads / kv_heads * m, d]);
        tile.output.reshape([b, heads, m, d])
    });
    Tensor::cat(outputs.collect(), 2)
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

    fn measure(&self, coded: &Coded, sums: &mut Diagnostics) {
        let rows = self.output_host.len() / self.q.dims()[3];
        sums.queries += rows as f64;
        let p_hat = self.measure_keys(coded, sums);
        self.measure_values(coded, sums);
        let output = host(coded.module.read_values(&coded.state, p_hat, &self.queries, self.first));
        let [error, norm] = kernels::difference_and_norm(&output, &self.output_host);
        sums.output_error += error;
        sums.output_norm += norm;
    }

    /// E1–E3; returns the probabilities under the scheme's scores.
    fn measure_keys(&self, coded: &Coded, sums: &mut Diagnostics) -> Tensor<4> {
        let Some((flush, errors)) = coded.module.key_flush().zip(coded.key_errors.as_ref()) else {
            return self.p.clone();
        };
        let columns = self.coded_columns(flush);
        if columns.is_empty() {
            return self.p.clone();
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
        let delta_host = host(delta.clone());
        let width = self.queries.end - self.first;
        let offset = columns.start - self.first;
        let scores = std::sync::OnceLock::new();
        let (fisher, kl) = self
            .p_host
            .par_chunks(width)
            .zip(delta_host.par_chunks(n))
            .enumerate()
            .map(|(row, (p, delta))| {
                if delta.iter().any(|x| x.abs() > LARGE_CHANGE) {
                    let scores = scores.get_or_init(|| host(self.scores.clone()));
                    let visible = visible(&self.site, self.queries.start + row % m);
                    let mut changes = vec![0.0; width];
                    changes[offset..offset + n].copy_from_slice(delta);
                    let visible = visible.start.max(self.first) - self.first..visible.end - self.first;
                    return kernels::fisher_and_kl_of_scores(
                        &scores[row * width..][visible.clone()],
                        &changes[visible],
                    );
                }
                let rest = p[..offset].iter().chain(&p[offset + n..]).map(|&p| f64::from(p)).sum();
                fisher_and_kl(&p[offset..offset + n], delta, rest)
            })
            .collect::<Vec<_>>()
            .into_iter()
            .fold((0.0, 0.0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
        sums.fisher += fisher;
        sums.kl += kl;
        let changed = self.scores.clone().narrow(3, offset, n) + delta;
        let slices = [0..b, 0..kv, 0..rows, offset..offset + n];
        let scores = self.scores.clone().slice_assign(slices, changed);
        probabilities(&self.site, scores, &self.queries, &(self.first..self.queries.end))
    }

    /// E5 and E6, with the dense probabilities.
    fn measure_values(&self, coded: &Coded, sums: &mut Diagnostics) {
        let Some((flush, (errors, norms))) = coded.module.value_flush().zip(coded.value_errors.as_ref()) else {
            return;
        };
        let columns = self.coded_columns(flush);
        if columns.is_empty() {
            return;
        }
        let (m, offset) = (self.queries.len(), columns.start - self.first);
        let p = self.p.clone().narrow(3, offset, columns.len());
        let shape @ [b, kv, rows, n] = p.dims();
        let split = [b, kv, rows / m, m, n];
        let mask = coded_mask(&flush, self.queries.clone(), columns.clone(), &p.device());
        let p = p.reshape(split).mask_fill(mask.bool_not().expand(split), 0.0).reshape(shape);
        let width = self.output.dims()[3] as f64;
        let readout = p.clone().matmul(errors.clone().narrow(2, columns.start - flush.sinks, n));
        sums.readout += sum_of_squares(&readout) / width;
        let per_head = norms.len() / (b * kv);
        let from = columns.start - flush.sinks;
        for (row, p) in host(p).chunks(n).enumerate() {
            let norms = &norms[row / rows * per_head + from..][..n];
            sums.readout_diagonal +=
                p.iter().zip(norms).map(|(&p, &e)| f64::from(p).powi(2) * f64::from(e)).sum::<f64>() / width;
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

fn sum_of_squares(x: &Tensor<4>) -> f64 {
    let x = host(x.clone());
    kernels::difference_and_norm(&x, &x)[1]
}
