//! Vector loops on the host: exponentials and the reductions that need them.
//!
//! Where a tensor lives in host memory ([`on_host`]), softmax over visible tokens and SwiGLU are one pass over it; elsewhere, and
//! under autodiff, they are tensor operations with the same results.
//!
//! Plain loops over fixed lanes, compiled for the best instruction set that the running machine has ([`pulp`] dispatches). Lanes are
//! summed in a fixed order, so that results do not depend on the instruction set.

use std::ops::Range;

use burn::tensor::activation::silu;
use burn::tensor::{DType, Device, Tensor, TensorData};
use rayon::prelude::*;

/// Runs a loop compiled for the running machine. The loop is a method of a type, because that is what gets inlined into the code
/// that may use the machine's instructions.
macro_rules! vectorized {
    (|$($name:ident: $type:ty),*| -> $output:ty $body:block) => {{
        struct Loop<'a>($($type,)* std::marker::PhantomData<&'a ()>);
        impl<'a> pulp::NullaryFnOnce for Loop<'a> {
            type Output = $output;
            #[inline(always)]
            fn call(self) -> $output {
                let Loop($($name,)* _) = self;
                $body
            }
        }
        pulp::Arch::new().dispatch(Loop($($name,)* std::marker::PhantomData))
    }};
}
pub(crate) use vectorized;

/// Lanes of an f64 accumulator: one AVX-512 register.
const LANES: usize = 8;
/// Lanes of an f32 accumulator.
const WIDE: usize = 16;

/// e^x for finite x, to about 1 ulp; 0 and ∞ beyond the range of f64. Cody–Waite reduction and a Taylor polynomial.
#[inline(always)]
fn exp64(x: f64) -> f64 {
    const LOG2_E: f64 = std::f64::consts::LOG2_E;
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// 1.5·2⁵²: adding it rounds to a whole number, which stands in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let clamped = x.clamp(-708.0, 709.0);
    let shifted = clamped.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    // 1/k! for k = 13 down to 0; |r| ≤ ln 2 / 2.
    let mut p = 1.605_904_383_682_161_5e-10;
    for c in [
        2.087_675_698_786_81e-9,
        2.505_210_838_544_172e-8,
        2.755_731_922_398_589e-7,
        2.755_731_922_398_589_3e-6,
        2.480_158_730_158_73e-5,
        1.984_126_984_126_984e-4,
        1.388_888_888_888_889e-3,
        8.333_333_333_333_333e-3,
        4.166_666_666_666_666_4e-2,
        1.666_666_666_666_666_6e-1,
        0.5,
        1.0,
        1.0,
    ] {
        p = r.mul_add(p, c);
    }
    let scale = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    let y = p * scale;
    let y = if x < -708.0 { 0.0 } else { y };
    if x > 709.0 { f64::INFINITY } else { y }
}

/// e^x − 1 − x without cancellation; ≥ 0.
#[inline(always)]
fn exp_excess(x: f64) -> f64 {
    // x²/2! + x³/3! + … + x⁸/8!; at 0.1 the next term is below 1e-12 of the first.
    let mut series = 1.0 / 40_320.0;
    for c in [1.0 / 5_040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        series = x.mul_add(series, c);
    }
    let direct = exp64(x) - 1.0 - x;
    if x.abs() < 0.1 { x * x * series } else { direct }
}

/// e^x for x ≤ 88, to about 2 ulp; 0 below −87.
///
/// Inlined into loops that are compiled for several instruction sets.
#[inline(always)]
pub fn exp32(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5·2²³
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.0 / 5_040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = r.mul_add(p, c);
    }
    let y = p * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { y }
}

/// The largest element that is not NaN; −∞ for an empty row.
#[inline(always)]
fn row_max(row: &[f32]) -> f32 {
    let whole = row.len() / WIDE * WIDE;
    let mut max = [f32::NEG_INFINITY; WIDE];
    for x in row[..whole].chunks_exact(WIDE) {
        for i in 0..WIDE {
            max[i] = if x[i] > max[i] { x[i] } else { max[i] };
        }
    }
    max.iter().chain(&row[whole..]).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Σ over i of each of N terms, in fixed lanes.
#[inline(always)]
fn lane_sums<const N: usize, X: Copy + Into<f64>>(p: &[f32], x: &[X], term: impl Fn(f64, f64) -> [f64; N]) -> [f64; N] {
    let mut lanes = [[0.0f64; LANES]; N];
    let n = p.len().min(x.len());
    let (p, x) = (&p[..n], &x[..n]);
    let whole = n / LANES * LANES;
    for (p, x) in p[..whole].chunks_exact(LANES).zip(x[..whole].chunks_exact(LANES)) {
        for i in 0..LANES {
            let terms = term(f64::from(p[i]), x[i].into());
            for k in 0..N {
                lanes[k][i] += terms[k];
            }
        }
    }
    let mut sums = lanes.map(|l| l.iter().sum::<f64>());
    for i in whole..n {
        let terms = term(f64::from(p[i]), x[i].into());
        for k in 0..N {
            sums[k] += terms[k];
        }
    }
    sums
}

/// Σp and Σpx.
pub(crate) fn mass_and_mean(p: &[f32], x: &[f32]) -> [f64; 2] {
    vectorized!(|p: &'a [f32], x: &'a [f32]| -> [f64; 2] {
        lane_sums(
            p,
            x,
            #[inline(always)]
            |p, x| [p, p * x],
        )
    })
}

/// Σp(x − μ)² and Σp(e^{x−μ} − 1 − (x − μ)).
pub(crate) fn square_and_excess(p: &[f32], x: &[f32], mean: f64) -> [f64; 2] {
    vectorized!(|p: &'a [f32], x: &'a [f32], mean: f64| -> [f64; 2] {
        lane_sums(
            p,
            x,
            #[inline(always)]
            |p, x| {
                let x = x - mean;
                [p * x * x, p * exp_excess(x)]
            },
        )
    })
}

/// E2 and E3 of one query from its visible scores `s` and their changes `x`, by log-sum-exp in f64.
///
/// For changes so large that probabilities too small for f32 count once they are multiplied by e^x.
pub(crate) fn fisher_and_kl_of_scores(s: &[f32], x: &[f32]) -> (f64, f64) {
    let log_sum = |value: &dyn Fn(usize) -> f64| -> f64 {
        let max = (0..s.len()).map(value).fold(f64::NEG_INFINITY, f64::max);
        max + (0..s.len()).map(|j| (value(j) - max).exp()).sum::<f64>().ln()
    };
    let before = log_sum(&|j| f64::from(s[j]));
    let after = log_sum(&|j| f64::from(s[j]) + f64::from(x[j]));
    let p = |j: usize| (f64::from(s[j]) - before).exp();
    let mean: f64 = (0..s.len()).map(|j| p(j) * f64::from(x[j])).sum();
    let square: f64 = (0..s.len()).map(|j| p(j) * (f64::from(x[j]) - mean).powi(2)).sum();
    (0.5 * square, (after - before - mean).max(0.0))
}

/// −Σ p ln p, in nats.
pub(crate) fn entropy(p: &[f32]) -> f64 {
    p.iter().filter(|p| **p > 0.0).map(|&p| -f64::from(p) * f64::from(p.ln())).sum()
}

/// Index of the largest element; of equals, the first.
pub(crate) fn first_largest(x: &[f32]) -> usize {
    (1..x.len()).fold(0, |best, i| if x[i] > x[best] { i } else { best })
}

/// What the loss of one query needs of its coded columns, and what it gives: see [`row_loss`].
pub(crate) struct RowLoss<'a> {
    /// Probabilities of the columns; 0 where a column does not count.
    pub p: &'a [f32],
    /// 1 − Σp: the probability of everything that does not change.
    pub rest: f64,
    /// δ without the correction.
    pub base: &'a [f32],
    /// qU of the query: `[rank]`
    pub q_side: &'a [f32],
    /// ẑ of the columns, coefficient by coefficient: `[rank, stride]`, of which the first `p.len()` of each count.
    pub side: &'a [f32],
    pub stride: usize,
}

/// Which function of p and δ: [`row_loss`].
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum RowKind {
    /// ½ Var_p(δ)
    Fisher,
    /// log Σ p e^δ − Σ p δ
    Kl,
}

/// Changes of a score in nats beyond this are taken as this large in e^δ, so that a loss far from any minimum stays finite.
const LARGEST_EXPONENT: f64 = 200.0;

/// Loss of one query in nats with δ_j = base_j + q_side·ẑ_j, and its gradients by qU (`[rank]`, written) and by ẑ (`[rank, stride]`,
/// added to). `delta` is scratch of p's length.
pub(crate) fn row_loss(
    kind: RowKind,
    row: RowLoss,
    delta: &mut [f64],
    q_gradient: &mut [f32],
    side_gradient: &mut [f32],
) -> f64 {
    let fisher = kind == RowKind::Fisher;
    vectorized!(|row: RowLoss<'a>,
                 delta: &'a mut [f64],
                 q_gradient: &'a mut [f32],
                 side_gradient: &'a mut [f32],
                 fisher: bool|
     -> f64 {
        let n = row.p.len();
        let (p, base, delta) = (&row.p[..n], &row.base[..n], &mut delta[..n]);
        for (delta, &base) in delta.iter_mut().zip(base) {
            *delta = f64::from(base);
        }
        for (side, &q) in row.side.chunks_exact(row.stride).zip(row.q_side) {
            let q = f64::from(q);
            for (delta, &side) in delta.iter_mut().zip(&side[..n]) {
                *delta = q.mul_add(f64::from(side), *delta);
            }
        }
        let mean = lane_sums(
            p,
            delta,
            #[inline(always)]
            |p, x| [p * x],
        )[0];
        // delta becomes the gradient of the loss by δ.
        let loss = if fisher {
            let square = lane_sums(
                p,
                delta,
                #[inline(always)]
                |p, x| [p * (x - mean) * (x - mean)],
            )[0];
            for (x, &p) in delta.iter_mut().zip(p) {
                *x = f64::from(p) * (*x - mean);
            }
            0.5 * (square + row.rest * mean * mean)
        } else {
            for x in delta.iter_mut() {
                let centred = *x - mean;
                let bounded = centred.min(LARGEST_EXPONENT);
                *x = exp_excess(bounded) + bounded;
            }
            // Σp(e^x − 1 − x) = Σp(e^x − 1), as Σpx = 0 over all columns; the rest has x = −μ.
            let rest = row.rest * (exp_excess((-mean).min(LARGEST_EXPONENT)) - mean);
            let growth = lane_sums(
                p,
                delta,
                #[inline(always)]
                |p, x| [p * x],
            )[0] + rest;
            let inverse = 1.0 / (1.0 + growth);
            for (x, &p) in delta.iter_mut().zip(p) {
                *x = f64::from(p) * (*x - growth) * inverse;
            }
            growth.ln_1p()
        };
        let sides = row.side.chunks_exact(row.stride).zip(side_gradient.chunks_exact_mut(row.stride));
        for ((side, side_gradient), (&q, q_gradient)) in sides.zip(row.q_side.iter().zip(q_gradient)) {
            *q_gradient = lane_sums(
                &side[..n],
                delta,
                #[inline(always)]
                |s, x| [s * x],
            )[0] as f32;
            for (gradient, &x) in side_gradient[..n].iter_mut().zip(delta.iter()) {
                *gradient = q.mul_add(x as f32, *gradient);
            }
        }
        loss
    })
}

/// e^x − 1 − x of one number.
pub(crate) fn excess(x: f64) -> f64 {
    exp_excess(x)
}

/// Σ(a − b)² and Σb².
pub(crate) fn difference_and_norm(a: &[f32], b: &[f32]) -> [f64; 2] {
    vectorized!(|a: &'a [f32], b: &'a [f32]| -> [f64; 2] {
        lane_sums(
            a,
            b,
            #[inline(always)]
            |a, b| [(a - b) * (a - b), b * b],
        )
    })
}

/// log Σ e^x over a row, in nats, with the maximum subtracted and the sum in f64.
///
/// NaN where the row has a NaN; −∞ for an empty row.
pub fn log_sum_exp(row: &[f32]) -> f64 {
    let (max, sum) = vectorized!(|row: &'a [f32]| -> (f32, f64) {
        let whole = row.len() / WIDE * WIDE;
        let max = row_max(row);
        // Each lane adds a block in f32 before it goes to f64: 64 terms lose less than 1e-5 of a term.
        let mut sum = 0.0f64;
        for block in row[..whole].chunks(WIDE * 64) {
            let mut lanes = [0.0f32; WIDE];
            for x in block.chunks_exact(WIDE) {
                for i in 0..WIDE {
                    lanes[i] += exp32(x[i] - max);
                }
            }
            sum += lanes.iter().map(|&v| f64::from(v)).sum::<f64>();
        }
        (max, sum + row[whole..].iter().map(|&x| f64::from(exp32(x - max))).sum::<f64>())
    });
    f64::from(max) + sum.ln()
}

/// The sum of a slice in fixed lanes: what reads memory as fast as it comes.
pub fn lane_total(x: &[f32]) -> f32 {
    vectorized!(|x: &'a [f32]| -> f32 {
        const STREAMS: usize = 4 * WIDE;
        let mut lanes = [0.0f32; STREAMS];
        let (blocks, rest) = x.as_chunks::<STREAMS>();
        for x in blocks {
            for i in 0..STREAMS {
                lanes[i] += x[i];
            }
        }
        lanes.iter().chain(rest).sum()
    })
}

/// The instruction set that vector loops are dispatched to here.
pub fn instructions() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if pulp::x86::V4::is_available() {
            return "AVX-512";
        }
        if pulp::x86::V3::is_available() {
            return "AVX2";
        }
    }
    std::env::consts::ARCH
}

/// Whether a tensor's f32 data can be worked on in place: on the Flex CPU backend and not part of an autodiff graph.
pub fn on_host<const D: usize>(x: &Tensor<D>) -> bool {
    x.dtype() == DType::F32 && !x.is_autodiff() && x.device() == Device::flex()
}

/// Runs `work` on a host tensor's data; without a copy where nothing else holds it.
fn in_place<const D: usize>(x: Tensor<D>, work: impl FnOnce(&mut [f32])) -> Tensor<D> {
    let device = x.device();
    let mut data = x.into_data();
    work(data.as_mut_slice::<f32>().expect("f32 on the host, as on_host says"));
    Tensor::from_data(data, &device)
}

/// Softmax of each row of a host tensor over its visible columns; the others become 0.
///
/// `visible(i)` are the visible columns of row i, not empty.
pub(crate) fn softmax_rows<const D: usize>(x: Tensor<D>, visible: impl Fn(usize) -> Range<usize> + Sync) -> Tensor<D> {
    let columns = x.dims()[D - 1];
    in_place(x, |data| {
        data.par_chunks_mut(columns).with_min_len(16).enumerate().for_each(|(i, row)| {
            let visible = visible(i);
            row[..visible.start].fill(0.0);
            row[visible.end..].fill(0.0);
            softmax(&mut row[visible]);
        })
    })
}

/// Softmax in place, with the maximum subtracted.
fn softmax(row: &mut [f32]) {
    vectorized!(|row: &'a mut [f32]| -> () {
        let whole = row.len() / WIDE * WIDE;
        let max = row_max(row);
        let mut lanes = [0.0f32; WIDE];
        for x in row[..whole].chunks_exact_mut(WIDE) {
            for i in 0..WIDE {
                x[i] = exp32(x[i] - max);
                lanes[i] += x[i];
            }
        }
        let mut sum = lanes.iter().sum::<f32>();
        for x in &mut row[whole..] {
            *x = exp32(*x - max);
            sum += *x;
        }
        let inverse = 1.0 / sum;
        row.iter_mut().for_each(|x| *x *= inverse);
    })
}

/// silu(gate) · up, the activation of gated MLPs.
///
/// # Shapes
/// `[rows, 2 · width]`, gate first, to `[rows, width]`
pub fn swiglu(x: Tensor<2>) -> Tensor<2> {
    let [rows, twice] = x.dims();
    let width = twice / 2;
    if !on_host(&x) {
        return silu(x.clone().narrow(1, 0, width)) * x.narrow(1, width, width);
    }
    let device = x.device();
    let data = x.into_data();
    let data = data.as_slice::<f32>().expect("f32 on the host, as on_host says");
    let mut out = vec![0.0f32; rows * width];
    out.par_chunks_mut(width).zip(data.par_chunks(twice)).with_min_len(16).for_each(|(out, row)| {
        let (gate, up) = row.split_at(width);
        vectorized!(|out: &'a mut [f32], gate: &'a [f32], up: &'a [f32]| -> () {
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate / (1.0 + exp32(-gate)) * up;
            }
        })
    });
    Tensor::from_data(TensorData::new(out, [rows, width]), &device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_agree_with_the_standard_library() {
        for i in -70_000..=70_000 {
            let x = f64::from(i) / 99.0;
            let off = (exp64(x) / x.exp() - 1.0).abs();
            assert!(off < 4e-16 * 3.0, "{x}: {off:e}");
        }
        for i in -8_600..=8_800 {
            let x = i as f32 / 100.0;
            let off = (f64::from(exp32(x)) / f64::from(x).exp() - 1.0).abs();
            assert!(off < 3e-7, "{x}: {off:e}");
        }
        assert_eq!((exp64(-1e4), exp64(1e4), exp32(-200.0)), (0.0, f64::INFINITY, 0.0));
        assert!(exp64(f64::NAN).is_nan() && exp32(f32::NAN).is_nan());
    }

    #[test]
    fn exp_excess_loses_nothing_to_cancellation() {
        // Σ_{k≥2} x^k/k!, summed from its smallest term.
        let reference = |x: f64| {
            let terms: Vec<f64> = (2..60)
                .scan(x, |t, k| {
                    *t *= x / f64::from(k);
                    Some(*t)
                })
                .collect();
            terms.iter().rev().sum::<f64>()
        };
        for x in [-3.0, -0.5, -0.1, -0.0999, -1e-3, -1e-9, 1e-12, 1e-6, 0.02, 0.0999, 0.1, 0.7, 2.0, 5.0] {
            assert!((exp_excess(x) / reference(x) - 1.0).abs() < 1e-11, "{x}");
        }
        assert_eq!(exp_excess(0.0), 0.0);
    }

    #[test]
    fn sums_cover_ragged_lengths() {
        for n in [0, 1, 7, 8, 9, 63, 200] {
            let p: Vec<f32> = (0..n).map(|i| (i % 5) as f32 / 7.0).collect();
            let x: Vec<f32> = (0..n).map(|i| (i % 11) as f32 / 3.0 - 1.5).collect();
            let pairs = || p.iter().zip(&x).map(|(&p, &x)| (f64::from(p), f64::from(x)));
            let [mass, mean] = mass_and_mean(&p, &x);
            assert!((mass - pairs().map(|(p, _)| p).sum::<f64>()).abs() < 1e-10);
            assert!((mean - pairs().map(|(p, x)| p * x).sum::<f64>()).abs() < 1e-10);
            let [square, excess] = square_and_excess(&p, &x, 0.3);
            assert!((square - pairs().map(|(p, x)| p * (x - 0.3).powi(2)).sum::<f64>()).abs() < 1e-10);
            let direct = pairs().map(|(p, x)| p * ((x - 0.3).exp() - 1.0 - (x - 0.3))).sum::<f64>();
            assert!((excess - direct).abs() < 1e-9);
            let [difference, norm] = difference_and_norm(&p, &x);
            assert!((difference - pairs().map(|(p, x)| (p - x).powi(2)).sum::<f64>()).abs() < 1e-10);
            assert!((norm - pairs().map(|(_, x)| x * x).sum::<f64>()).abs() < 1e-10);
        }
    }

    #[test]
    fn log_sum_exp_is_exact_over_long_and_short_rows() {
        for n in [1usize, 5, 16, 17, 1024, 49_152] {
            for shift in [-300.0f32, 0.0, 500.0] {
                let row: Vec<f32> = (0..n).map(|i| ((i * 7919) % 1009) as f32 / 50.0 + shift).collect();
                let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                let expected = max + row.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
                assert!((log_sum_exp(&row) - expected).abs() < 1e-6, "{n} {shift}");
            }
        }
        assert_eq!(log_sum_exp(&[]), f64::NEG_INFINITY);
        assert!(log_sum_exp(&[1.0, f32::NAN, 2.0]).is_nan());
        assert!(log_sum_exp(&[f32::NAN; 40]).is_nan());
    }

    #[test]
    fn swiglu_is_the_tensor_operation() {
        let device = Device::flex();
        let x = crate::normal([5, 46], 1, &device) * 5.0;
        let extreme = Tensor::<2>::from_data([[-1e4f32, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]], &device);
        for x in [x, extreme] {
            let width = x.dims()[1] / 2;
            let plain = silu(x.clone().narrow(1, 0, width)) * x.clone().narrow(1, width, width);
            let off: f32 = (swiglu(x) - plain).abs().max().into_scalar();
            assert!(off < 1e-5, "{off}");
        }
    }

    #[test]
    fn softmax_rows_is_softmax_over_the_visible_columns() {
        let device = Device::flex();
        let x = crate::normal([40, 37], 2, &device) * 9.0;
        let visible = |i: usize| i.saturating_sub(12)..(i + 1).min(37);
        let rows: Vec<f32> = x.clone().try_into_vec_as().unwrap();
        let found: Vec<f32> = softmax_rows(x, visible).try_into_vec_as().unwrap();
        for (i, (row, found)) in rows.chunks(37).zip(found.chunks(37)).enumerate() {
            let total: f64 = row[visible(i)].iter().map(|&v| f64::from(v).exp()).sum();
            for (j, (&x, &p)) in row.iter().zip(found).enumerate() {
                let expected = if visible(i).contains(&j) { f64::from(x).exp() / total } else { 0.0 };
                assert!((f64::from(p) - expected).abs() < 1e-6 * expected.max(1e-3), "{i} {j}");
            }
        }
    }
}
