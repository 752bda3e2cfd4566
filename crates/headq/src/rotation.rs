//! The randomized Hadamard rotation of `rotated` keys.
//!
//! A head's channels are multiplied by fixed random signs D and by an orthonormal H, so that each rotated channel is a mixture of all
//! of them and nearly Gaussian (QuaRot, arXiv:2404.00456). For a head width d = 2ᵏ·m with m odd, H = H₂ₖ ⊗ C_m: Sylvester's Hadamard
//! matrix of order 2ᵏ and the orthonormal DCT-II of order m, which is 1 where d is a power of two.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Signs are part of the codec: the same for every layer, head and run.
const SIGN_SEED: u64 = 0x4845_4144_5121;

/// Entry (i, j) of Sylvester's orthonormal Hadamard matrix of order n, a power of two: (−1)^{popcount(i ∧ j)}/√n.
fn hadamard(n: usize, i: usize, j: usize) -> f64 {
    let sign = if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    sign / (n as f64).sqrt()
}

/// Entry (i, j) of the orthonormal DCT-II of order m: input channel i, output channel j.
fn cosine(m: usize, i: usize, j: usize) -> f64 {
    let scale = if j == 0 { 1.0 } else { 2.0f64 };
    (scale / m as f64).sqrt() * (std::f64::consts::PI * (i as f64 + 0.5) * j as f64 / m as f64).cos()
}

/// R = D·(H₂ₖ ⊗ C_m), orthonormal: `[head_dim, head_dim]`, row-major; a row vector x is rotated to xR and back by Rᵀ.
pub fn rotation(head_dim: usize) -> Vec<f64> {
    let odd = head_dim >> head_dim.trailing_zeros();
    let power = head_dim / odd;
    let mut rng = ChaCha8Rng::seed_from_u64(SIGN_SEED);
    let signs: Vec<f64> = (0..head_dim).map(|_| if rng.random::<bool>() { 1.0 } else { -1.0 }).collect();
    (0..head_dim * head_dim)
        .map(|at| {
            let (i, j) = (at / head_dim, at % head_dim);
            signs[i] * hadamard(power, i / odd, j / odd) * cosine(odd, i % odd, j % odd)
        })
        .collect()
}

/// The same in f32, made once for each width: a cache that codes token by token asks for it every time.
pub(crate) fn kept_rotation(head_dim: usize) -> Arc<[f32]> {
    static KEPT: Mutex<BTreeMap<usize, Arc<[f32]>>> = Mutex::new(BTreeMap::new());
    // A panic while the lock was held can only have been in making a matrix, before anything was kept.
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let make = || rotation(head_dim).into_iter().map(|v| v as f32).collect();
    kept.entry(head_dim).or_insert_with(make).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fast transform, by butterflies.
    fn walsh_hadamard(x: &mut [f64]) {
        let mut half = 1;
        while half < x.len() {
            for block in x.chunks_mut(2 * half) {
                for i in 0..half {
                    let (a, b) = (block[i], block[i + half]);
                    (block[i], block[i + half]) = (a + b, a - b);
                }
            }
            half *= 2;
        }
    }

    #[test]
    fn it_is_the_walsh_hadamard_transform_of_signed_channels() {
        for d in [1usize, 2, 8, 64, 128] {
            let r = rotation(d);
            let x: Vec<f64> = (0..d).map(|i| ((i * 37 % 23) as f64 - 11.0) / 7.0).collect();
            let signs: Vec<f64> = (0..d).map(|i| r[i * d].signum()).collect();
            let mut expected: Vec<f64> = x.iter().zip(&signs).map(|(x, s)| x * s).collect();
            walsh_hadamard(&mut expected);
            for j in 0..d {
                let found: f64 = (0..d).map(|i| x[i] * r[i * d + j]).sum();
                assert!((found - expected[j] / (d as f64).sqrt()).abs() < 1e-12, "{d} {j}");
            }
        }
    }

    #[test]
    fn it_is_orthonormal_for_every_width_and_mixes_all_channels() {
        for d in [1, 2, 3, 12, 24, 40, 64, 80, 96, 112, 160, 256] {
            let r = rotation(d);
            for i in 0..d {
                for j in 0..=i {
                    let dot: f64 = (0..d).map(|k| r[i * d + k] * r[j * d + k]).sum();
                    assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-12, "{d}: rows {i}, {j}");
                }
            }
            // One large channel is spread: no rotated channel takes more than twice its even share of a DCT of odd order.
            assert!(r.iter().all(|v| v * v <= 2.0 / d as f64 * (1.0 + 1e-9)), "{d}");
        }
    }

    #[test]
    fn signs_are_balanced_and_fixed() {
        let r = rotation(256);
        let positive = (0..256).filter(|i| r[i * 256] > 0.0).count();
        assert!((96..160).contains(&positive), "{positive}");
        assert_eq!(r, rotation(256));
    }
}
