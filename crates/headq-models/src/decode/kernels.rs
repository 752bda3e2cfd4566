//! Vector loops of a decode step: products of one vector with a matrix at the speed of memory, norms and activations.
//!
//! Plain loops, compiled for the best instruction set that the running machine has ([`pulp`] dispatches: AVX-512, AVX2, NEON or none).
//! Every sum has one order, whatever the instruction set.

use half::{bf16, f16};
use headq::kernels::exp32;
use pulp::{Arch, NullaryFnOnce};

/// Rows of a matrix that one pass over the result adds: as many streams of memory, and one load and store of the result for all.
pub(super) const ROWS: usize = 8;
/// Rows of a transposed matrix whose dot products are taken together.
const DOTS: usize = 4;
/// Lanes of an f32 accumulator: one AVX-512 register.
pub(super) const WIDE: usize = 16;
/// Lanes of an f64 accumulator.
const LANES: usize = 8;

/// A stored weight.
pub(super) trait Weight: Copy + Send + Sync {
    /// Its value.
    fn wide(self) -> f32;

    /// The values of weights that lie in memory as they are.
    #[inline(always)]
    fn plain(_: &[Self]) -> Option<&[f32]> {
        None
    }
}

impl Weight for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }

    #[inline(always)]
    fn plain(weights: &[Self]) -> Option<&[f32]> {
        Some(weights)
    }
}

impl Weight for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Weight for f16 {
    /// Exact for every half; without branches, so that loops over it are vector loops.
    #[inline(always)]
    fn wide(self) -> f32 {
        /// 2¹¹²: the difference of the exponents' biases.
        const RESCALE: f32 = f32::from_bits((112 + 127) << 23);
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        let finite = (f32::from_bits(magnitude) * RESCALE).to_bits();
        let value = if magnitude >= 0x7c00 << 13 { magnitude | 0x7f80_0000 } else { finite };
        f32::from_bits(value | (bits & 0x8000) << 16)
    }
}

/// y = Σ_i x_i W[i, :], of some columns of some rows.
pub(super) struct SumRows<'a, E> {
    pub y: &'a mut [f32],
    /// One for each row.
    pub x: &'a [f32],
    /// From the first of the columns in the first of the rows on.
    pub weights: &'a [E],
    /// Elements from row to row.
    pub stride: usize,
}

impl<E: Weight> SumRows<'_, E> {
    pub fn run(self) {
        Arch::new().dispatch(self)
    }
}

impl<E: Weight> NullaryFnOnce for SumRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { y, x, weights, stride } = self;
        y.fill(0.0);
        let n = y.len();
        let (blocks, rest) = x.as_chunks::<ROWS>();
        for (block, x) in blocks.iter().enumerate() {
            let row = |i: usize| &weights[(block * ROWS + i) * stride..][..n];
            let rows: [&[E]; ROWS] = [row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)];
            for j in 0..n {
                let mut even = y[j];
                let mut odd = x[1] * rows[1][j].wide();
                even = x[0].mul_add(rows[0][j].wide(), even);
                even = x[2].mul_add(rows[2][j].wide(), even);
                odd = x[3].mul_add(rows[3][j].wide(), odd);
                even = x[4].mul_add(rows[4][j].wide(), even);
                odd = x[5].mul_add(rows[5][j].wide(), odd);
                even = x[6].mul_add(rows[6][j].wide(), even);
                odd = x[7].mul_add(rows[7][j].wide(), odd);
                y[j] = even + odd;
            }
        }
        for (i, &x) in rest.iter().enumerate() {
            let row = &weights[(blocks.len() * ROWS + i) * stride..][..n];
            for (y, w) in y.iter_mut().zip(row) {
                *y = x.mul_add(w.wide(), *y);
            }
        }
    }
}

/// y_i = W[i, :]·x, of some rows.
pub(super) struct DotRows<'a, E> {
    pub y: &'a mut [f32],
    pub x: &'a [f32],
    /// From the first of the rows on; rows are as long as x.
    pub weights: &'a [E],
}

impl<E: Weight> DotRows<'_, E> {
    pub fn run(self) {
        Arch::new().dispatch(self)
    }
}

impl<E: Weight> NullaryFnOnce for DotRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { y, x, weights } = self;
        let n = x.len();
        let whole = y.len() / DOTS * DOTS;
        for (block, y) in y[..whole].chunks_exact_mut(DOTS).enumerate() {
            let rows = &weights[block * DOTS * n..][..DOTS * n];
            let (first, second) = rows.split_at(2 * n);
            let sums = dots(x, [&first[..n], &first[n..], &second[..n], &second[n..]]);
            y.copy_from_slice(&sums);
        }
        for (i, y) in y[whole..].iter_mut().enumerate() {
            *y = dots(x, [&weights[(whole + i) * n..][..n]])[0];
        }
    }
}

/// Dot products of x with rows of its length, in fixed lanes.
#[inline(always)]
fn dots<E: Weight, const N: usize>(x: &[f32], rows: [&[E]; N]) -> [f32; N] {
    let mut lanes = [[0.0f32; WIDE]; N];
    let (blocks, rest) = x.as_chunks::<WIDE>();
    let rows = rows.map(|row| row.as_chunks::<WIDE>());
    for (j, x) in blocks.iter().enumerate() {
        for k in 0..N {
            let w = &rows[k].0[j];
            for i in 0..WIDE {
                lanes[k][i] = x[i].mul_add(w[i].wide(), lanes[k][i]);
            }
        }
    }
    let mut sums = lanes.map(sum);
    for k in 0..N {
        for (x, w) in rest.iter().zip(rows[k].1) {
            sums[k] = x.mul_add(w.wide(), sums[k]);
        }
    }
    sums
}

/// The sum of lanes, by halves.
#[inline(always)]
pub(super) fn sum(mut lanes: [f32; WIDE]) -> f32 {
    let mut half = WIDE / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Adds up parts of a result in their order, then a bias, into `y` or onto it.
pub(super) struct Gather<'a> {
    pub y: &'a mut [f32],
    /// Whole parts, of the length of y each; the first becomes their sum.
    pub parts: &'a mut [f32],
    pub bias: Option<&'a [f32]>,
    /// Add to what y holds.
    pub onto: bool,
}

impl Gather<'_> {
    pub fn run(self) {
        Arch::new().dispatch(self)
    }
}

impl NullaryFnOnce for Gather<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let n = self.y.len();
        let (sum, others) = self.parts.split_at_mut(n);
        for part in others.chunks_exact(n) {
            for (sum, part) in sum.iter_mut().zip(part) {
                *sum += part;
            }
        }
        for (sum, bias) in sum.iter_mut().zip(self.bias.unwrap_or_default()) {
            *sum += bias;
        }
        match self.onto {
            true => self.y.iter_mut().zip(sum).for_each(|(y, sum)| *y += *sum),
            false => self.y.copy_from_slice(sum),
        }
    }
}

/// Root mean square (without `beta`) or layer normalisation of x.
pub(super) struct Normalize<'a> {
    pub y: &'a mut [f32],
    pub x: &'a [f32],
    pub gamma: &'a [f32],
    /// Present in layer normalisation, which takes the mean away first.
    pub beta: Option<&'a [f32]>,
    pub epsilon: f64,
}

impl Normalize<'_> {
    pub fn run(self) {
        Arch::new().dispatch(self)
    }
}

impl NullaryFnOnce for Normalize<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { y, x, gamma, beta, epsilon } = self;
        let n = x.len() as f64;
        let mean = beta.map_or(0.0, |_| {
            lane_sum(
                x,
                #[inline(always)]
                |x| x,
            ) / n
        });
        let square = lane_sum(
            x,
            #[inline(always)]
            |x| (x - mean) * (x - mean),
        ) / n;
        let (mean, scale) = (mean as f32, (1.0 / (square + epsilon).sqrt()) as f32);
        for ((y, x), gamma) in y.iter_mut().zip(x).zip(gamma) {
            *y = (x - mean) * scale * gamma;
        }
        for (y, beta) in y.iter_mut().zip(beta.unwrap_or_default()) {
            *y += beta;
        }
    }
}

/// Σ of a term over x, in f64.
#[inline(always)]
fn lane_sum(x: &[f32], term: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for x in blocks {
        for i in 0..LANES {
            lanes[i] += term(f64::from(x[i]));
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&x| term(f64::from(x))).sum::<f64>()
}

/// x·σ(x) in place.
pub(super) struct Silu<'a>(pub &'a mut [f32]);

impl NullaryFnOnce for Silu<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for x in self.0 {
            *x /= 1.0 + exp32(-*x);
        }
    }
}

/// ½x(1 + tanh(u)) with u = √(2/π)(x + 0.044715x³), in place; it is x·σ(2u).
pub(super) struct GeluTanh<'a>(pub &'a mut [f32]);

impl NullaryFnOnce for GeluTanh<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let twice_root = (8.0 / std::f64::consts::PI).sqrt() as f32;
        for x in self.0 {
            let twice_u = twice_root * *x * (0.044715 * *x * *x + 1.0);
            *x /= 1.0 + exp32(-twice_u);
        }
    }
}

/// y ·= x.
pub(super) fn multiply(y: &mut [f32], x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y *= x);
}

/// Runs a loop compiled for the running machine.
pub(super) fn vectorized<R>(work: impl NullaryFnOnce<Output = R>) -> R {
    Arch::new().dispatch(work)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn halves_are_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            let same = |found: f32, expected: f32| {
                found.to_bits() == expected.to_bits() || expected.is_nan() && found.is_nan()
            };
            assert!(same(half.wide(), half.to_f32()), "{bits:#x}");
            assert!(same(brain.wide(), brain.to_f32()), "{bits:#x}");
        }
    }

    pub(in super::super) fn noise(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0).collect()
    }

    #[test]
    fn products_are_sums_over_ragged_shapes() {
        for (rows, columns, stride) in [(1, 1, 1), (7, 5, 9), (8, 16, 16), (19, 33, 40), (64, 100, 100)] {
            let (x, w) = (noise(rows, 1), noise(rows * stride, 2));
            let mut y = noise(columns, 3);
            SumRows { y: &mut y, x: &x, weights: &w, stride }.run();
            for (j, y) in y.iter().enumerate() {
                let exact: f64 = (0..rows).map(|i| f64::from(x[i]) * f64::from(w[i * stride + j])).sum();
                assert!((f64::from(*y) - exact).abs() < 1e-5, "{rows} {columns}");
            }
        }
        for (rows, width) in [(1, 1), (3, 16), (4, 17), (9, 100)] {
            let (x, w) = (noise(width, 1), noise(rows * width, 2));
            let mut y = noise(rows, 3);
            DotRows { y: &mut y, x: &x, weights: &w }.run();
            for (i, y) in y.iter().enumerate() {
                let exact: f64 = (0..width).map(|j| f64::from(x[j]) * f64::from(w[i * width + j])).sum();
                assert!((f64::from(*y) - exact).abs() < 1e-5, "{rows} {width}");
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let (x, w) = (noise(64, 1), noise(64 * 100, 2));
        let run = |dispatched: bool| {
            let mut y = vec![0.0; 100];
            let sums = SumRows { y: &mut y, x: &x, weights: &w, stride: 100 };
            if dispatched {
                sums.run()
            } else {
                sums.call()
            }
            let mut z = vec![0.0; 64];
            let dots = DotRows { y: &mut z, x: &y, weights: &w };
            if dispatched {
                dots.run()
            } else {
                dots.call()
            }
            z
        };
        assert_eq!(run(true), run(false));
    }

    /// Without AVX-512 in the build, decoding is slower than memory on machines that have it.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_best_instruction_set_is_dispatched() {
        let (best, found) = (std::is_x86_feature_detected!("avx512vl"), format!("{:?}", Arch::new()));
        assert!(!best || found.starts_with("V4"), "{found}");
        assert!(best || !std::is_x86_feature_detected!("fma") || found.starts_with("V3"), "{found}");
    }
}
