//! Score-KLT transform coding of keys (`klt`): coordinates in which squared error *is* expected squared score error, up to a constant.
//!
//! With C_q = `E[q qᵀ]` of the queries that read a head and C_k the covariance of its keys about their mean μ, V Λ Vᵀ = C_q^{½} C_k C_q^{½}.
//! Coefficients y = Vᵀ C_q^{½} (k − μ) are uncorrelated with variances Λ, k̂ − μ = C_q^{−½} V ŷ, and ‖y − ŷ‖² = (k − k̂)ᵀ C_q (k − k̂).
//! So bits go to coefficients as in any transform code (reverse water-filling; whole bits by largest marginal gain): those that
//! matter too little get none and are not stored. Attention-preserving transforms and bits by importance are also in arXiv:2608.04074 and
//! arXiv:2605.06675.
//!
//! C_q is taken relative to its mean eigenvalue, so that coefficients have the size of keys and their scales fit in halves, and its
//! eigenvalues are floored at [`QUERY_FLOOR`] of the largest, because what queries did not read in calibration they may read later.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;

use crate::basis::descending_eigen;
use crate::gaussian::{uniform_distortion, uniform_step};
use crate::quant::{Stored, float_dtype, stored, straight_through};
use crate::scheme::{BaseScheme, Bits, MOST_KLT_BITS, Meta, RangeSource};
use crate::stats::{HeadMoments, KeyStatistics, symmetric};

/// Eigenvalues of C_q are floored at this share of the largest.
pub const QUERY_FLOOR: f64 = 1e-4;

/// The transform of one head and the bits of its coefficients, largest variance first.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadTransform {
    /// A = C_q^{½} V: y = Aᵀ(k − μ). `[head_dim, head_dim]`
    pub analysis: DMatrix<f64>,
    /// S = C_q^{−½} V: k̂ − μ = S ŷ. `[head_dim, head_dim]`
    pub synthesis: DMatrix<f64>,
    /// Λ, the variances of the coefficients, descending: `[head_dim]`
    pub spread: DVector<f64>,
    /// Bits of each coefficient, descending: `[head_dim]`
    pub bits: Vec<u32>,
}

impl HeadTransform {
    /// From a head's second moments and mean bits for each coefficient. Where no query reads anything, C_q = I is taken.
    pub fn fit(moments: &HeadMoments, mean: Bits) -> Self {
        let width = moments.keys.nrows();
        let (values, vectors) = descending_eigen(symmetric(moments.queries.clone()));
        let typical = values.sum() / width as f64;
        let roots = match typical > 0.0 {
            true => values.map(|v| (v.max(values[0] * QUERY_FLOOR) / typical).sqrt()),
            false => values.map(|_| 1.0),
        };
        let half = &vectors * DMatrix::from_diagonal(&roots) * vectors.transpose();
        let inverse_half = &vectors * DMatrix::from_diagonal(&roots.map(|r| 1.0 / r)) * vectors.transpose();
        let (spread, v) = descending_eigen(symmetric(&half * &moments.keys * &half));
        // A covariance has no negative eigenvalues but by rounding.
        let spread = spread.map(|s| s.max(0.0));
        let bits = allocate(spread.as_slice(), budget(mean, width));
        Self { analysis: half * &v, synthesis: inverse_half * v, spread, bits }
    }

    /// Coefficients that are stored.
    pub fn width(&self) -> usize {
        self.bits.iter().filter(|b| **b > 0).count()
    }

    /// Expected squared coefficient error on uniform grids of calibrated steps, for Gaussian keys: Σ λ_i · D(b_i).
    pub fn distortion(&self) -> f64 {
        self.spread.iter().zip(&self.bits).map(|(s, b)| s * uniform_distortion(*b)).sum()
    }
}

/// Whole bits of a head `width` wide: B·d, rounded down.
fn budget(mean: Bits, width: usize) -> usize {
    // Thousandths, so that no product is rounded to just below a whole number.
    ((mean.mean() * 1000.0).round() as usize * width) / 1000
}

/// Bits by largest marginal gain λ (D(b) − D(b+1)), ties to the first; all of `budget` is spent, at most [`MOST_KLT_BITS`] on each.
///
/// D is convex in b, so that no other whole numbers of the same sum leave less Σ λ_i D(b_i), and larger variances never get fewer bits.
///
/// # Shapes
/// `spread`: `[width]`, descending, as the result
pub fn allocate(spread: &[f64], budget: usize) -> Vec<u32> {
    let mut bits = vec![0u32; spread.len()];
    for _ in 0..budget.min(spread.len() * MOST_KLT_BITS as usize) {
        let gain = |i: usize| spread[i] * (uniform_distortion(bits[i]) - uniform_distortion(bits[i] + 1));
        let open = (0..bits.len()).filter(|&i| bits[i] < MOST_KLT_BITS);
        let best = open.reduce(|best, i| if gain(i) > gain(best) { i } else { best });
        bits[best.expect("less than the budget is spent")] += 1;
    }
    bits
}

/// Factor on the half-width of a coefficient's min/max range, which 2^b equal cells divide: few levels are better spent on the middle.
/// Of 128 Gaussian numbers it leaves cells of about [`uniform_step`] with 2 and 3 bits, and a third wider ones with 1.
pub fn range_factor(bits: u32) -> f32 {
    if bits <= 2 { 0.8 } else { 0.95 }
}

/// The transforms of one layer's heads.
fn fit_layer(base: &BaseScheme, keys: &KeyStatistics, layer: usize) -> Vec<HeadTransform> {
    keys.moments_of(layer).par_iter().map(|moments| HeadTransform::fit(moments, base.bits)).collect()
}

/// Code bits per key element: codes, and scales and zeros of the coefficients that are stored, averaged over all layers and heads.
pub fn code_bits(base: &BaseScheme, keys: &KeyStatistics) -> f64 {
    let of_head = |moments: &HeadMoments| {
        let head = HeadTransform::fit(moments, base.bits);
        let codes = f64::from(head.bits.iter().sum::<u32>());
        (codes + range_bits(base) * head.width() as f64) / head.bits.len() as f64
    };
    let all: Vec<f64> = keys.moments.par_iter().map(of_head).collect();
    all.iter().sum::<f64>() / all.len() as f64
}

/// The most that [`code_bits`] can be: as many coefficients stored as there are bits for.
pub fn most_code_bits(base: &BaseScheme, head_dim: usize) -> f64 {
    let bits = budget(base.bits, head_dim);
    (bits as f64 + range_bits(base) * bits.min(head_dim) as f64) / head_dim as f64
}

/// Bits of scale and zero for each coefficient of a token.
fn range_bits(base: &BaseScheme) -> f64 {
    match base.ranges {
        RangeSource::Static => 0.0,
        RangeSource::Group => 2.0 * base.meta.bits() / base.flush.group as f64,
    }
}

/// Transform coding of one layer's keys.
#[derive(Module, Debug)]
pub(crate) struct Transform {
    /// A of each head: `[kv_heads, head_dim, head_dim]`
    analysis: Tensor<3>,
    /// S of each head, as `analysis`.
    synthesis: Tensor<3>,
    /// 2^b − 1 of each coefficient: `[1, kv_heads, 1, 1, head_dim]`
    top: Tensor<5>,
    /// Under `ranges=group` the factor on each range, under `ranges=static` each step; as `top`.
    measure: Tensor<5>,
    #[module(skip)]
    bits: Arc<[Vec<u32>]>,
    #[module(skip)]
    ranges: RangeSource,
    #[module(skip)]
    group: usize,
    #[module(skip)]
    meta: Meta,
}

/// Codes of coefficients, `[batch, heads, groups, G, width]`, and what turns them back.
struct Coded {
    codes: Tensor<5>,
    scale: Tensor<5>,
    zero: Tensor<5>,
    inside: Tensor<5, Bool>,
}

impl Transform {
    pub fn new(base: &BaseScheme, keys: &KeyStatistics, layer: usize, device: &Device) -> Self {
        let (heads, d) = (keys.kv_heads, keys.head_dim);
        let fitted = fit_layer(base, keys, layer);
        let matrix = |pick: &dyn Fn(&HeadTransform) -> &DMatrix<f64>| {
            // Transposed, column-major is row-major.
            let all: Vec<f32> =
                fitted.iter().flat_map(|f| pick(f).transpose().iter().map(|&v| v as f32).collect::<Vec<_>>()).collect();
            Tensor::from_data(TensorData::new(all, [heads, d, d]), device)
        };
        let each = |of: &dyn Fn(&HeadTransform, usize) -> f64| {
            let all: Vec<f32> = fitted.iter().flat_map(|f| (0..d).map(move |i| of(f, i) as f32)).collect();
            Tensor::from_data(TensorData::new(all, [1, heads, 1, 1, d]), device)
        };
        let measure = |f: &HeadTransform, i: usize| match (base.ranges, f.bits[i]) {
            (_, 0) => 0.0,
            (RangeSource::Group, b) => f64::from((range_factor(b) * base.range).min(1.0)),
            (RangeSource::Static, b) => uniform_step(b) * f.spread[i].sqrt() * f64::from(base.range),
        };
        Self {
            analysis: matrix(&|f| &f.analysis),
            synthesis: matrix(&|f| &f.synthesis),
            top: each(&|f, i| f64::from((1u32 << f.bits[i]) - 1)),
            measure: each(&measure),
            bits: fitted.iter().map(|f| f.bits.clone()).collect(),
            ranges: base.ranges,
            group: base.flush.group,
            meta: base.meta,
        }
    }

    /// Bits of each head's coefficients, descending.
    pub fn bits(&self) -> &[Vec<u32>] {
        &self.bits
    }

    /// Sᵀ of each head, which turns a query to the coefficients that it meets: `[kv_heads, head_dim, head_dim]`.
    pub fn query_side(&self) -> Tensor<3> {
        self.synthesis.clone().swap_dims(1, 2)
    }

    /// Everything that decides what codes mean.
    pub fn constants(&self) -> Vec<Tensor<1>> {
        let flat = |x: &Tensor<5>| x.clone().flatten(0, 4);
        vec![self.synthesis.clone().flatten(0, 2), flat(&self.top), flat(&self.measure)]
    }

    /// One product for each group, so that a group's codes do not depend on how many groups are coded together.
    fn product(x: Tensor<5>, matrix: Tensor<3>) -> Tensor<5> {
        let [b, h, groups, _, d] = x.dims();
        let matrix = matrix.cast(float_dtype(x.dtype()));
        x.matmul(matrix.reshape([1, h, 1, d, d]).expand([b, h, groups, d, d]))
    }

    fn coefficients(&self, keys: Tensor<4>) -> Tensor<5> {
        let [b, h, n, d] = keys.dims();
        Self::product(keys.reshape([b, h, n / self.group, self.group, d]), self.analysis.clone())
    }

    /// k̂ − μ of k − μ, with the straight-through gradient.
    ///
    /// # Shapes
    /// `[batch, kv_heads, groups · G, head_dim]`, in and out
    pub fn read_back(&self, keys: Tensor<4>) -> Tensor<4> {
        let shape = keys.dims();
        let read = straight_through(self.coefficients(keys), |y| {
            let coded = self.code(y);
            (coded.codes * coded.scale + coded.zero, coded.inside)
        });
        Self::product(read, self.query_side()).reshape(shape)
    }

    /// What is stored: what [`Transform::read_back`] reads back.
    pub fn store(&self, keys: Tensor<4>) -> Stored {
        let shape @ [b, h, n, d] = keys.dims();
        let coded = self.code(self.coefficients(keys));
        let ranges = |x: Tensor<5>| match self.ranges {
            RangeSource::Static => None,
            RangeSource::Group => Some(x.reshape([b, h, n / self.group, d])),
        };
        Stored { codes: coded.codes.reshape(shape), scale: ranges(coded.scale), zero: ranges(coded.zero) }
    }

    /// Steps of static grids and the values of their code 0: `[kv_heads, head_dim]` each; `None` where ranges are stored.
    pub fn fixed_ranges(&self) -> Option<(Tensor<5>, Tensor<5>)> {
        (self.ranges == RangeSource::Static).then(|| (self.measure.clone(), self.lowest()))
    }

    /// −(2^{b−1} − ½)Δ
    fn lowest(&self) -> Tensor<5> {
        (self.top.clone() * self.measure.clone()).mul_scalar(-0.5)
    }

    fn code(&self, y: Tensor<5>) -> Coded {
        let dtype = float_dtype(y.dtype());
        let (top, measure) = (self.top.clone().cast(dtype), self.measure.clone().cast(dtype));
        let (scale, zero) = match self.ranges {
            RangeSource::Static => (measure, self.lowest().cast(dtype)),
            RangeSource::Group => {
                let (low, high) = (y.clone().min_dim(3), y.clone().max_dim(3));
                let middle = (high.clone() + low.clone()).mul_scalar(0.5);
                let width = (high - low) * measure;
                // Levels in the middle of equal cells: with 1 or 2 bits, levels at the ends of the range would lie far from most numbers.
                let cell = width.clone() / top.clone().add_scalar(1.0);
                let low = middle - (width - cell.clone()).mul_scalar(0.5);
                // Coefficients without bits read as 0, their mean.
                let has = top.clone().clamp_max(1.0);
                (stored(cell, self.meta) * has.clone(), stored(low, self.meta) * has)
            }
        };
        let shape = y.shape();
        let empty = scale.clone().equal_scalar(0.0);
        let divisor = scale.clone().mask_fill(empty.clone(), 1.0);
        let codes = ((y.clone() - zero.clone()) / divisor).round().clamp_min(0.0);
        // An empty range has one code, whatever rounding of the zero did to the quotient.
        let most = top.clone().expand(shape.clone()).mask_fill(empty.expand(shape.clone()), 0.0);
        let codes = codes.min_pair(most);
        // Outermost cells are as wide as the others.
        let edge = scale.clone().mul_scalar(0.5);
        let high = zero.clone() + scale.clone() * top.clone() + edge.clone();
        let inside = y.clone().greater_equal((zero.clone() - edge).expand(shape.clone()));
        let inside = inside.bool_and(y.lower_equal(high.expand(shape.clone())));
        let inside = inside.bool_and(top.greater_elem(0.0).expand(shape));
        Coded { codes, scale, zero, inside }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::BaseQuantizer;

    /// Moments of Gaussian keys and queries with no structure but that channels differ in size, of a given rank.
    fn moments(width: usize, ranks: [usize; 2], seed: u64) -> HeadMoments {
        let second = |rank: usize, seed: u64| {
            let x: Vec<f32> = crate::normal([width * rank], seed, &Device::flex()).try_into_vec_as().unwrap();
            let x = DMatrix::from_fn(width, rank, |i, j| f64::from(x[i * rank + j]) * (1.0 + (i * 5 % 7) as f64 / 3.0));
            &x * x.transpose() / rank as f64
        };
        HeadMoments { queries: second(ranks[0], seed), keys: second(ranks[1], seed + 1000) }
    }

    fn statistics(moments: Vec<HeadMoments>, mean: f32) -> KeyStatistics {
        let (kv_heads, head_dim) = (moments.len(), moments[0].keys.nrows());
        let all = vec![mean; kv_heads * head_dim];
        KeyStatistics {
            kv_heads,
            head_dim,
            mean: all.clone(),
            deviation: all.clone(),
            rms: all,
            moments: moments.into(),
        }
    }

    fn quantizer(scheme: &str, moments: &HeadMoments, device: &Device) -> BaseQuantizer {
        let keys = statistics(vec![moments.clone()], 0.7);
        BaseQuantizer::calibrated(scheme.parse::<BaseScheme>().unwrap(), &keys, 0, device)
    }

    /// Gaussian rows of a covariance.
    fn rows(covariance: &DMatrix<f64>, n: usize, seed: u64) -> Vec<DVector<f64>> {
        let d = covariance.nrows();
        let (values, vectors) = descending_eigen(covariance.clone());
        let root = vectors * DMatrix::from_diagonal(&values.map(|v| v.max(0.0).sqrt()));
        let z: Vec<f32> = crate::normal([n * d], seed, &Device::flex()).try_into_vec_as().unwrap();
        z.chunks(d).map(|z| &root * DVector::from_iterator(d, z.iter().map(|&v| f64::from(v)))).collect()
    }

    fn tensor(rows: &[DVector<f64>], device: &Device) -> Tensor<4> {
        let flat: Vec<f32> = rows.iter().flat_map(|r| r.iter().map(|&v| v as f32)).collect();
        Tensor::from_data(TensorData::new(flat, [1, 1, rows.len(), rows[0].len()]), device)
    }

    /// Mean of εᵀC_qε.
    fn score_error(rows: &[DVector<f64>], read: Tensor<4>, c_q: &DMatrix<f64>) -> f64 {
        let d = c_q.nrows();
        let read: Vec<f32> = read.try_into_vec_as().unwrap();
        let error = |(row, read): (&DVector<f64>, &[f32])| {
            let e = row - DVector::from_iterator(d, read.iter().map(|&v| f64::from(v)));
            e.dot(&(c_q * &e))
        };
        rows.iter().zip(read.chunks(d)).map(error).sum::<f64>() / rows.len() as f64
    }

    #[test]
    fn coefficients_are_uncorrelated_and_their_error_is_score_error() {
        let moments = moments(12, [12, 12], 1);
        let head = HeadTransform::fit(&moments, Bits::whole(2));
        let identity = DMatrix::identity(12, 12);
        assert!((head.analysis.transpose() * &head.synthesis - &identity).abs().max() < 1e-9);
        let variances = head.analysis.transpose() * &moments.keys * &head.analysis;
        let expected = DMatrix::from_diagonal(&head.spread);
        assert!((variances - expected).abs().max() < 1e-9 * head.spread[0]);
        // εᵀC_qε of ε = Sη is ‖η‖² times the mean eigenvalue that C_q was divided by.
        let typical = moments.queries.trace() / 12.0;
        let metric = head.synthesis.transpose() * &moments.queries * &head.synthesis / typical;
        assert!((metric - identity).abs().max() < 1e-9);
    }

    #[test]
    fn every_bit_of_the_budget_is_spent_and_none_better() {
        for width in [4, 16, 64, 80] {
            let head = moments(width, [width, width], width as u64);
            for mean in ["klt-0.25", "klt-0.5", "klt-1", "klt-1.5", "klt-2.25", "klt-3.333", "klt-6"] {
                let base: BaseScheme = mean.parse().unwrap();
                let bits = HeadTransform::fit(&head, base.bits).bits;
                let exact = base.bits.mean() * width as f64;
                assert_eq!(f64::from(bits.iter().sum::<u32>()), (exact + 1e-9).floor(), "{mean} of {width}");
                assert!(bits.is_sorted_by(|a, b| a >= b) && bits.iter().all(|b| *b <= MOST_KLT_BITS));
            }
        }
        // Against all ways of spending them.
        for (spread, budget) in [([9.0, 4.0, 1.0, 0.3], 7), ([1.0, 1.0, 1.0, 1.0], 6), ([1e6, 1.0, 0.1, 0.0], 9)] {
            let cost = |bits: &[u32]| spread.iter().zip(bits).map(|(s, b)| s * uniform_distortion(*b)).sum::<f64>();
            let all = (0..7u32.pow(4)).map(|i| [i % 7, i / 7 % 7, i / 49 % 7, i / 343]);
            let best = all.filter(|b| b.iter().sum::<u32>() == budget).map(|b| cost(&b)).fold(f64::INFINITY, f64::min);
            let found = allocate(&spread, budget as usize);
            assert_eq!(found.iter().sum::<u32>(), budget);
            assert!(cost(&found) <= best * (1.0 + 1e-12), "{spread:?}: {found:?}");
        }
    }

    #[test]
    fn predicted_distortion_is_measured_on_gaussian_keys() {
        let device = Device::flex();
        for (seed, bits) in [(1, "3"), (2, "3.5"), (3, "4"), (4, "5")] {
            let moments = moments(16, [16, 16], seed);
            let scheme = format!("klt-{bits}(g=64,r=0,ranges=static)");
            let keys = rows(&moments.keys, 8192, 7 + seed);
            let read = quantizer(&scheme, &moments, &device).read_back(tensor(&keys, &device));
            let head = HeadTransform::fit(&moments, scheme.parse::<BaseScheme>().unwrap().bits);
            let predicted = head.distortion() * moments.queries.trace() / 16.0;
            let measured = score_error(&keys, read, &moments.queries);
            assert!((measured / predicted - 1.0).abs() < 0.1, "{scheme}: {measured} for {predicted}");
        }
    }

    #[test]
    fn scores_lose_less_than_with_channels_of_equal_bits() {
        let device = Device::flex();
        for seed in 0..4 {
            let moments = moments(16, [16, 16], 20 + seed);
            let keys = rows(&moments.keys, 2048, seed);
            let error = |scheme: &str| {
                let read = quantizer(scheme, &moments, &device).read_back(tensor(&keys, &device));
                score_error(&keys, read, &moments.queries)
            };
            let (kivi, klt) = (error("kivi-2(g=128,range=0.85,center)"), error("klt-2(g=128)"));
            assert!(klt < 0.8 * kivi, "{klt} {kivi}");
            assert!(error("klt-1.5(g=128)") > klt && error("klt-4(g=128)") < klt);
        }
    }

    #[test]
    fn what_is_stored_is_counted() {
        let keys = statistics(vec![moments(16, [16, 16], 1), moments(16, [2, 16], 2)], 0.0);
        for scheme in ["klt-2(g=128)", "klt-0.5(g=32,meta=f32)", "klt-6(g=8)", "klt-2.5(ranges=static)"] {
            let base: BaseScheme = scheme.parse().unwrap();
            let meta = 2.0 * base.meta.bits() / base.flush.group as f64;
            let of_head = |m: &HeadMoments| {
                let stored: Vec<u32> = HeadTransform::fit(m, base.bits).bits.into_iter().filter(|b| *b > 0).collect();
                let ranges = if base.ranges == RangeSource::Static { 0.0 } else { meta * stored.len() as f64 };
                (f64::from(stored.iter().sum::<u32>()) + ranges) / 16.0
            };
            let expected = keys.moments.iter().map(of_head).sum::<f64>() / 2.0;
            assert!((code_bits(&base, &keys) - expected).abs() < 1e-12, "{scheme}");
            assert!(code_bits(&base, &keys) <= most_code_bits(&base, 16), "{scheme}");
        }
    }

    #[test]
    fn degenerate_heads_stay_finite() {
        let device = Device::flex();
        let zero = DMatrix::zeros(8, 8);
        let deficient = moments(8, [1, 2], 3);
        for moments in [
            HeadMoments { queries: zero.clone(), keys: zero.clone() },
            HeadMoments { queries: zero.clone(), keys: deficient.keys.clone() },
            HeadMoments { queries: deficient.queries.clone(), keys: zero },
            HeadMoments { queries: deficient.queries.clone() * 1e-30, keys: deficient.keys.clone() * 1e20 },
            deficient,
        ] {
            for scheme in ["klt-2(g=4)", "klt-0.25(g=4)", "klt-6(g=4,meta=f32)", "klt-2(g=4,ranges=static)"] {
                let quantizer = quantizer(scheme, &moments, &device);
                for keys in [crate::normal([1, 1, 8, 8], 4, &device), Tensor::full([1, 1, 8, 8], 0.25, &device)] {
                    let read: Vec<f32> = quantizer.read_back(quantizer.shift(keys)).try_into_vec_as().unwrap();
                    assert!(read.iter().all(|v| v.is_finite()), "{scheme}: {read:?}");
                }
            }
        }
    }

    /// Straight through: the gradient is that of projecting on the coefficients that are stored and not clipped.
    #[test]
    fn gradients_pass_through_stored_coefficients() {
        let device = Device::flex();
        let moments = moments(8, [8, 8], 5);
        for scheme in ["klt-1.5(g=16,meta=f32)", "klt-2.5(g=16,range=0.5)", "klt-2(g=16,range=0.6,ranges=static)"] {
            let base: BaseScheme = scheme.parse().unwrap();
            let keys = rows(&moments.keys, 16, 6);
            let x = tensor(&keys, &device);
            let tracked = x.clone().autodiff().require_grad();
            let read = quantizer(scheme, &moments, &device.clone().autodiff()).read_back(tracked.clone());
            let plain = quantizer(scheme, &moments, &device).read_back(x);
            assert_eq!(read.clone().inner().into_data(), plain.into_data(), "bit for bit");
            let weights = crate::normal([1, 1, 16, 8], 7, &device);
            let gradient = tracked.grad(&(read * weights.clone().autodiff()).sum().backward()).unwrap();
            let gradient: Vec<f32> = gradient.try_into_vec_as().unwrap();
            let weights: Vec<f32> = weights.try_into_vec_as().unwrap();
            let head = HeadTransform::fit(&moments, base.bits);
            let y: Vec<DVector<f64>> = keys.iter().map(|k| head.analysis.transpose() * k).collect();
            let (mut seen, mut sure) = ([0; 2], 0);
            for t in 0..16 {
                // ∂/∂k Σ w·k̂ = A diag(inside) Sᵀ w: solved for what each coefficient passed.
                let own = |x: &[f32]| DVector::from_iterator(8, x[t * 8..(t + 1) * 8].iter().map(|&v| f64::from(v)));
                let (of_y, whole) =
                    (head.synthesis.transpose() * own(&gradient), head.synthesis.transpose() * own(&weights));
                for i in 0..8 {
                    let passed = of_y[i] / whole[i];
                    assert!(passed.abs() < 1e-3 || (passed - 1.0).abs() < 1e-3, "{scheme}: {passed}");
                    if head.bits[i] == 0 {
                        assert!(passed.abs() < 1e-3);
                        continue;
                    }
                    seen[usize::from(passed > 0.5)] += 1;
                    let column = y.iter().map(|y| y[i]);
                    let (low, high) =
                        (column.clone().fold(f64::INFINITY, f64::min), column.fold(f64::NEG_INFINITY, f64::max));
                    let (middle, half) = match base.ranges {
                        RangeSource::Group => {
                            let factor = f64::from(range_factor(head.bits[i]) * base.range);
                            ((low + high) / 2.0, factor * (high - low) / 2.0)
                        }
                        RangeSource::Static => {
                            let step = uniform_step(head.bits[i]) * head.spread[i].sqrt() * 0.6;
                            (0.0, step * f64::from(1u32 << head.bits[i]) / 2.0)
                        }
                    };
                    let beyond = (y[t][i] - middle).abs() - half;
                    if beyond.abs() > 2e-3 * (high - low) {
                        assert_eq!(beyond < 0.0, passed > 0.5, "{scheme}: {beyond}");
                        sure += 1;
                    }
                }
            }
            assert!(seen[0] > 5 && seen[1] > 5 && sure > 60, "{scheme}: {seen:?} {sure}");
        }
    }
}
