//! Captured share of the score error on the measured text.

use burn::tensor::Device;
use headq::KeyStatistics;
use headq::basis::{Basis, HeadBasis, captured_share};
use headq::quant::BaseQuantizer;
use headq::scheme::{BaseScheme, Scope};
use headq::stats::{LayerStats, Moments};
use rayon::prelude::*;

use super::angles::{decoder, encoder};

/// The base quantizer of every layer, with the scales that its scheme has, and what a basis learned for it.
pub fn quantizers(
    base: BaseScheme,
    keys: Option<&KeyStatistics>,
    basis: Option<&Basis>,
    layers: usize,
    device: &Device,
) -> Vec<BaseQuantizer> {
    let of_layer = |layer| {
        let quantizer = match keys {
            Some(keys) => BaseQuantizer::calibrated(base, keys, layer, device),
            None => BaseQuantizer::new(base),
        };
        basis.map_or(quantizer.clone(), |basis| basis.clipping(quantizer, layer, device))
    };
    (0..layers).map(of_layer).collect()
}

/// Share of the expected squared score error E[(qᵀe)²] that a basis removes before side quantization, by layer and KV head in one
/// order; `None` in heads without score error.
///
/// Where each query head has a matrix of its own, a KV head's share is that of the error summed over its query heads.
pub fn captured(basis: &Basis, measured: &[LayerStats]) -> Vec<Option<f64>> {
    let kv_heads = measured.first().map_or(0, |layer| layer.k.len());
    let heads = 0..measured.len() * kv_heads;
    heads.into_par_iter().map(|i| of_head(basis, &measured[i / kv_heads], i / kv_heads, i % kv_heads)).collect()
}

fn of_head(basis: &Basis, measured: &LayerStats, layer: usize, kv_head: usize) -> Option<f64> {
    let e = &measured.e[kv_head];
    let group = basis.side_heads / measured.k.len();
    let (mut removed, mut whole) = (0.0, 0.0);
    for head in kv_head * group..(kv_head + 1) * group {
        let q = match basis.scope {
            Scope::KvHead => measured.pooled_queries(kv_head),
            Scope::QueryHead => measured.q[head].clone(),
        };
        let matrices = HeadBasis {
            decoder: decoder(basis, layer, head),
            encoder: (!basis.is_tied()).then(|| encoder(basis, layer, head)),
        };
        // A query head without score error has none to remove.
        let error = score_error(&q, e);
        removed += captured_share(&q, e, &matrices).map_or(0.0, |share| share * error);
        whole += error;
    }
    Some(removed / whole).filter(|share| share.is_finite())
}

/// tr C_q C_e, with C_q uncentered and C_e centred.
fn score_error(q: &Moments, e: &Moments) -> f64 {
    (q.second() * e.covariance()).trace()
}

#[cfg(test)]
mod tests {
    use super::*;
    use headq::scheme::Family;
    use nalgebra::DVector;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const WIDTH: usize = 6;

    /// Rows of 4 query heads and 2 KV heads, and their statistics.
    fn layer(seed: u64) -> (Vec<f32>, Vec<f32>, LayerStats) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut rows = |heads: usize| -> Vec<f32> {
            let uneven = |i: usize| 1.0 / (1 + i % WIDTH) as f32 + (i / WIDTH % 3) as f32;
            (0..heads * 20 * WIDTH).map(|i| (rng.random::<f32>() - 0.3) * uneven(i)).collect()
        };
        let (q, e) = (rows(4), rows(2));
        let mut stats = LayerStats::new(4, 2, WIDTH);
        stats.add(&q, &e, &e, &e);
        (q, e, stats)
    }

    fn vectors(rows: &[f32], head: usize) -> Vec<DVector<f64>> {
        let own = &rows[head * 20 * WIDTH..(head + 1) * 20 * WIDTH];
        own.chunks(WIDTH).map(|x| DVector::from_iterator(WIDTH, x.iter().map(|&v| f64::from(v)))).collect()
    }

    #[test]
    fn shares_are_those_of_every_query_with_every_residual() {
        let (fitted, seen) = ([layer(1).2], layer(2));
        for (family, scope) in [
            (Family::ScoreOptimal, Scope::KvHead),
            (Family::ScoreOptimal, Scope::QueryHead),
            (Family::QueryPca, Scope::KvHead),
            (Family::Random, Scope::QueryHead),
        ] {
            let basis = Basis::fit(&fitted, family, 2, scope, 5).unwrap();
            let found = captured(&basis, std::slice::from_ref(&seen.2));
            assert_eq!(found.len(), 2);
            for (kv_head, share) in found.into_iter().enumerate() {
                let residuals = vectors(&seen.1, kv_head);
                let mean = residuals.iter().sum::<DVector<f64>>() / 20.0;
                let (mut before, mut after) = (0.0, 0.0);
                for head in [2 * kv_head, 2 * kv_head + 1] {
                    let side = if scope == Scope::KvHead { kv_head } else { head };
                    let (u, w) = (decoder(&basis, 0, side), encoder(&basis, 0, side));
                    for q in vectors(&seen.0, head) {
                        for e in &residuals {
                            let e = e - &mean;
                            before += q.dot(&e).powi(2);
                            after += q.dot(&(&e - &u * (w.transpose() * &e))).powi(2);
                        }
                    }
                }
                assert!((share.unwrap() - (1.0 - after / before)).abs() < 1e-9, "{family} {scope}");
            }
        }
    }

    #[test]
    fn heads_without_residuals_have_no_share() {
        let mut stats = LayerStats::new(4, 2, WIDTH);
        stats.add(&[1.0; 4 * WIDTH], &[1.0; 2 * WIDTH], &[0.0; 2 * WIDTH], &[1.0; 2 * WIDTH]);
        let basis = Basis::fit(&[layer(1).2], Family::Random, 2, Scope::KvHead, 5).unwrap();
        assert_eq!(captured(&basis, &[stats]), [None, None]);
    }
}
