//! Scalar quantizers that are optimal for a unit Gaussian: Lloyd–Max levels and the best uniform grid.
//!
//! Lloyd (1982), *Least squares quantization in PCM*; Max (1960), *Quantizing for minimum distortion*. Max's tables hold both kinds
//! up to 36 levels and are what the tests compare with.

use std::sync::OnceLock;

/// Most bits of a quantizer.
const MOST_BITS: u32 = 8;

/// A quantizer with 2^bits levels, symmetric about 0.
#[derive(Debug, Clone, PartialEq)]
pub struct GaussianLevels {
    /// Levels, ascending: `[2^bits]`
    pub levels: Vec<f64>,
    /// Boundaries between neighbouring levels, ascending: `[2^bits − 1]`
    pub thresholds: Vec<f64>,
    /// Expected squared error for a unit Gaussian.
    pub distortion: f64,
}

/// φ(x), the density of the unit Gaussian.
fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt()
}

/// Probability that a unit Gaussian lies between 0 ≤ a < b ≤ ∞, without cancellation in the tail.
fn mass(a: f64, b: f64) -> f64 {
    let tail = |x: f64| 0.5 * libm::erfc(x / std::f64::consts::SQRT_2);
    tail(a) - tail(b)
}

/// Expected squared error of a quantizer whose positive half has these `levels`, each the nearest in its cell.
fn distortion(levels: &[f64]) -> f64 {
    let edges = edges(levels);
    // E[x²] − 2 E[x·Q(x)] + E[Q(x)²], over the positive half, twice.
    let cells = levels.iter().zip(edges.windows(2));
    1.0 + 2.0 * cells.map(|(l, e)| l * l * mass(e[0], e[1]) - 2.0 * l * (density(e[0]) - density(e[1]))).sum::<f64>()
}

/// Cell edges of the positive half: 0, the midpoints, ∞.
fn edges(levels: &[f64]) -> Vec<f64> {
    let middles = levels.windows(2).map(|w| 0.5 * (w[0] + w[1]));
    std::iter::once(0.0).chain(middles).chain([f64::INFINITY]).collect()
}

/// Lloyd–Max levels: every level is the mean of its cell, every boundary the middle of its levels.
///
/// # Panics
/// If `bits` is not from 1 to 8.
pub fn lloyd_max(bits: u32) -> &'static GaussianLevels {
    static TABLES: [OnceLock<GaussianLevels>; MOST_BITS as usize] = [const { OnceLock::new() }; MOST_BITS as usize];
    TABLES[index(bits)].get_or_init(|| GaussianLevels::symmetric(solve(1 << (bits - 1))))
}

/// Step of the uniform grid ±½Δ, ±3⁄2Δ, … of 2^bits levels with the least expected squared error for a unit Gaussian.
///
/// # Panics
/// If `bits` is not from 1 to 8.
pub fn uniform_step(bits: u32) -> f64 {
    static STEPS: [OnceLock<f64>; MOST_BITS as usize] = [const { OnceLock::new() }; MOST_BITS as usize];
    *STEPS[index(bits)].get_or_init(|| {
        let half = 1usize << (bits - 1);
        golden_section(|step| grid_distortion(bits, step), 1e-3, 8.0 / half as f64)
    })
}

/// Expected squared error of the uniform grid ±½Δ, ±3⁄2Δ, … of 2^bits levels for a unit Gaussian, whatever Δ is; 1 without bits.
///
/// # Panics
/// If `bits` is above 8.
pub fn grid_distortion(bits: u32, step: f64) -> f64 {
    if bits == 0 {
        return 1.0;
    }
    let half = 1usize << index(bits);
    distortion(&(0..half).map(|i| (i as f64 + 0.5) * step).collect::<Vec<_>>())
}

/// Expected squared error of the best uniform grid of 2^bits levels ([`uniform_step`]) for a unit Gaussian; 1 without bits.
///
/// # Panics
/// If `bits` is above 8.
pub fn uniform_distortion(bits: u32) -> f64 {
    if bits == 0 {
        return 1.0;
    }
    static ERRORS: [OnceLock<f64>; MOST_BITS as usize] = [const { OnceLock::new() }; MOST_BITS as usize];
    *ERRORS[index(bits)].get_or_init(|| grid_distortion(bits, uniform_step(bits)))
}

fn index(bits: u32) -> usize {
    assert!((1..=MOST_BITS).contains(&bits), "{bits} bits; 1 to {MOST_BITS} are possible");
    bits as usize - 1
}

/// Where a function with a single minimum has it, to 1e-10.
fn golden_section(f: impl Fn(f64) -> f64, mut low: f64, mut high: f64) -> f64 {
    let ratio = (5.0f64.sqrt() - 1.0) / 2.0;
    while high - low > 1e-10 {
        let (a, b) = (high - ratio * (high - low), low + ratio * (high - low));
        if f(a) < f(b) { high = b } else { low = a }
    }
    0.5 * (low + high)
}

/// Newton's method on "level − mean of its cell = 0" for the positive levels; the Jacobian is tridiagonal.
fn solve(half: usize) -> Vec<f64> {
    // Panter and Dite's companding law, which is exact as the levels become many: density of levels ∝ φ^{1/3}.
    let mut levels: Vec<f64> =
        (0..half).map(|i| 3.0f64.sqrt() * inverse_half_mass((i as f64 + 0.5) / (2 * half) as f64)).collect();
    for _ in 0..60 {
        let step = newton_step(&levels);
        // Levels stay in order.
        let room = |i: usize| if i == 0 { levels[0] } else { levels[i] - levels[i - 1] };
        let shrink = (0..half).map(|i| 0.5 * room(i) / (step[i].abs().max(1e-300))).fold(1.0, f64::min);
        levels.iter_mut().zip(&step).for_each(|(l, s)| *l -= shrink * s);
        if step.iter().all(|s| s.abs() < 1e-13) {
            break;
        }
    }
    levels
}

/// x with P(0 < X < x) = p for a unit Gaussian, by bisection.
fn inverse_half_mass(p: f64) -> f64 {
    let (mut low, mut high) = (0.0, 40.0);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if mass(0.0, middle) < p { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// J⁻¹G of G_i = x_i − c(e_i, e_{i+1}), with c the mean of a cell.
fn newton_step(levels: &[f64]) -> Vec<f64> {
    let n = levels.len();
    let edges = edges(levels);
    let (mut below, mut diagonal, mut above, mut g) = (vec![0.0; n], vec![0.0; n], vec![0.0; n], vec![0.0; n]);
    for i in 0..n {
        let (a, b) = (edges[i], edges[i + 1]);
        let p = mass(a, b);
        let mean = (density(a) - density(b)) / p;
        // ∂c/∂a = φ(a)(c − a)/p, ∂c/∂b = φ(b)(b − c)/p; inner edges move by half of each neighbour.
        let by_a = if i == 0 { 0.0 } else { density(a) * (mean - a) / p };
        let by_b = if b.is_finite() { density(b) * (b - mean) / p } else { 0.0 };
        g[i] = levels[i] - mean;
        below[i] = -0.5 * by_a;
        above[i] = -0.5 * by_b;
        diagonal[i] = 1.0 - 0.5 * by_a - 0.5 * by_b;
    }
    // Thomas's algorithm.
    for i in 1..n {
        let factor = below[i] / diagonal[i - 1];
        diagonal[i] -= factor * above[i - 1];
        g[i] -= factor * g[i - 1];
    }
    for i in (0..n).rev() {
        let next = if i + 1 < n { above[i] * g[i + 1] } else { 0.0 };
        g[i] = (g[i] - next) / diagonal[i];
    }
    g
}

impl GaussianLevels {
    fn symmetric(positive: Vec<f64>) -> Self {
        let levels: Vec<f64> = positive.iter().rev().map(|l| -l).chain(positive.iter().copied()).collect();
        let thresholds = levels.windows(2).map(|w| 0.5 * (w[0] + w[1])).collect();
        Self { distortion: distortion(&positive), levels, thresholds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Max (1960), table I: positive levels and mean squared error of the optimum quantizer.
    #[test]
    fn levels_are_those_of_max() {
        let tables: [(u32, &[f64], f64); 4] = [
            (1, &[0.7980], 0.3634),
            (2, &[0.4528, 1.510], 0.1175),
            (3, &[0.2451, 0.7560, 1.344, 2.152], 0.03454),
            (4, &[0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
        ];
        for (bits, positive, error) in tables {
            let found = lloyd_max(bits);
            assert_eq!(found.levels.len(), 1 << bits);
            for (found, known) in found.levels[1 << (bits - 1)..].iter().zip(positive) {
                assert!((found - known).abs() < 6e-4, "{bits} bits: {found} for {known}");
            }
            assert!((found.distortion / error - 1.0).abs() < 1e-3, "{bits} bits: {}", found.distortion);
        }
        // √(2/π) and 1 − 2/π, exactly.
        let two_over_pi = 2.0 / std::f64::consts::PI;
        assert!((lloyd_max(1).levels[1] - two_over_pi.sqrt()).abs() < 1e-12);
        assert!((lloyd_max(1).distortion - (1.0 - two_over_pi)).abs() < 1e-12);
    }

    /// Max (1960), table II: step and mean squared error of the best equally spaced quantizer.
    #[test]
    fn uniform_steps_are_those_of_max() {
        for (bits, step, error) in
            [(1, 1.596, 0.3634), (2, 0.9957, 0.1188), (3, 0.5860, 0.03744), (4, 0.3352, 0.01154), (5, 0.1881, 0.003495)]
        {
            let found = uniform_step(bits);
            assert!((found - step).abs() < 6e-5 * 10.0, "{bits} bits: {found}");
            let half = 1usize << (bits - 1);
            let levels: Vec<f64> = (0..half).map(|i| (i as f64 + 0.5) * found).collect();
            assert!((distortion(&levels) / error - 1.0).abs() < 2e-3, "{bits} bits: {}", distortion(&levels));
            assert_eq!(uniform_distortion(bits), distortion(&levels));
        }
    }

    /// Both conditions of optimality and the distortion, by numerical integration.
    #[test]
    fn every_level_is_the_mean_of_its_cell() {
        for bits in 1..=8 {
            let q = lloyd_max(bits);
            let mut error = 0.0;
            for (i, level) in q.levels.iter().enumerate() {
                let low = if i == 0 { -9.0 } else { q.thresholds[i - 1] };
                let high = q.thresholds.get(i).copied().unwrap_or(9.0);
                let n = 4_000;
                let (mut weight, mut moment) = (0.0, 0.0);
                for k in 0..n {
                    let x = low + (high - low) * (f64::from(k) + 0.5) / f64::from(n);
                    let w = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt() * (high - low) / f64::from(n);
                    weight += w;
                    moment += w * x;
                    error += w * (x - level).powi(2);
                }
                assert!((moment / weight - level).abs() < 2e-5, "{bits} bits, level {i}");
            }
            assert!((error / q.distortion - 1.0).abs() < 1e-4, "{bits} bits");
            // Bennett's integral, √3π/2 · 4^{−bits}, from below as levels become many.
            let bennett = 3.0f64.sqrt() * std::f64::consts::PI / 2.0 / 4f64.powi(bits as i32);
            assert!(q.distortion < bennett && (bits < 6 || q.distortion > 0.9 * bennett));
        }
    }
}
