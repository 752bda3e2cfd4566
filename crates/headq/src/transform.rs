//! Transform coding (`klt`): coordinates in which squared error *is* what an error costs, up to a constant.
//!
//! With M the metric, εᵀMε the cost of an error ε, and C the covariance of the keys about their mean μ, V Λ Vᵀ = M^{½} C M^{½}.
//! Coefficients y = Vᵀ M^{½} (k − μ) are uncorrelated with variances Λ, k̂ − μ = M^{−½} V ŷ, and ‖y − ŷ‖² = (k − k̂)ᵀ M (k − k̂).
//! So bits go to coefficients as in any transform code (reverse water-filling; whole bits by largest marginal gain): those that
//! matter too little get none and are not stored. Attention-preserving transforms and bits by importance are also in arXiv:2608.04074 and
//! arXiv:2605.06675.
//!
//! M is C_q = `E[q qᵀ]` of the queries that read a head, and the cost the squared error of scores (`metric=queries`); or it is made of the
//! gradients of the model's log-likelihood, and the cost in nats (`metric=fisher`, [`metric`]), which can be compared between heads: so
//! that one pool of bits serves the whole model (`pool=model`). Values are coded in the same way, by gradients or by the output
//! projection that reads them (`metric=output`).
//!
//! M is taken relative to its mean eigenvalue, so that coefficients have the size of keys and their scales fit in halves, and its
//! eigenvalues are floored at [`QUERY_FLOOR`] of the largest, because what mattered little in calibration may matter later.
//!
//! # Learned transforms
//!
//! All of this is optimal for Gaussian keys at high rates, under a metric that is one average. At one or two bits little of that holds, and so
//! the matrices, and a factor ρ on the ranges, the step or the levels of each coefficient, can be trained through the coder against what
//! attention makes of its errors, as learned transforms of transform codes are (Ballé, Laparra and Simoncelli, arXiv:1611.01704; Ballé et
//! al., arXiv:2007.03034). Rounding has the gradient of the identity (straight-through, Bengio, Léonard and Courville, arXiv:1308.3432),
//! as that of side codes. With D the diagonal of the coefficients' calibrated standard deviations (relative to the largest, floored at
//! [`DEVIATION_FLOOR`]),
//!
//! y' = D (I + E) D⁻¹ y is coded in the place of y, and ŷ' = D (I + F) D⁻¹ ŷ read in the place of ŷ.
//!
//! E and F, `[head_dim, head_dim]` each, begin at 0. They change coefficients in units of their own standard deviations, which differ by
//! orders of magnitude, so that one learning rate fits all of them. What has no bits is coded as 0 whatever E says, and has no gradient;
//! F may still predict it from what is stored. Bits are those of calibration. E, F and ρ mean nothing but beside the statistics that they
//! were trained with.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;

use crate::basis::descending_eigen;
use crate::gaussian::{grid_distortion, lloyd_max, uniform_distortion, uniform_step};
use crate::quant::{BaseParts, Stored, float_dtype, plain, stored};
use crate::scheme::{
    BaseScheme, Bits, MOST_KLT_BITS, MOST_LLOYD_BITS, MOST_POOLED_BITS, Meta, Metric, Pool, RangeSource,
};
use crate::stats::{HeadMoments, KeyStatistics, SAMPLE_RUN, symmetric};

/// Eigenvalues of the metric are floored at this share of the largest.
pub const QUERY_FLOOR: f64 = 1e-4;

/// Standard deviations of coefficients, by which learned changes are measured, are floored at this share of the largest.
pub const DEVIATION_FLOOR: f64 = 1e-3;

/// The least and the largest that a learned factor on a coefficient's ranges, step or levels may be.
pub const CLIP_BOUNDS: [f64; 2] = [0.25, 4.0];

/// Shares of F, C_q and I, each by its trace, in the metric of [`Metric::Fisher`]: gradients are few and noisy, queries are many.
const FISHER_SHARES: [f64; 3] = [0.75, 0.2, 0.05];

/// What the min/max ranges of groups are wider by than [`gain`] says. Of 1, 1.1 and 1.25 it left the lowest perplexity of WikiText's
/// validation text at 1, 1.5 and 2 bits (SmolLM2-135M, two windows of 2,048 tokens that no statistics are of).
const MORE_SPREAD: f64 = 1.1;

/// Smallest share that [`gain`] makes up for.
const LEAST_KEPT: f64 = 0.25;

/// Sampled coefficients of a class below which its levels are those for a Gaussian.
const LEAST_SAMPLE: usize = 256;

/// The transform of one head and the bits of its coefficients, largest variance first.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadTransform {
    /// A = M^{½} V: y = Aᵀ(k − μ). `[head_dim, head_dim]`
    pub analysis: DMatrix<f64>,
    /// S = M^{−½} V: k̂ − μ = S ŷ. `[head_dim, head_dim]`
    pub synthesis: DMatrix<f64>,
    /// Λ, the variances of the coefficients, descending: `[head_dim]`
    pub spread: DVector<f64>,
    /// The mean eigenvalue of M, by which it was divided: what a unit of squared coefficient error costs.
    pub weight: f64,
    /// Bits of each coefficient, descending: `[head_dim]`
    pub bits: Vec<u32>,
    /// Levels of coefficients of unit variance with 1, 2, … bits, ascending, under `ranges=lloyd`.
    pub levels: Vec<Vec<f64>>,
    /// Of coefficients with 0, 1, 2, … bits: the factor on the half-width of min/max ranges ([`range_factor`] where there is no sample), under
    /// `ranges=static` that on the best step for a Gaussian of their variance ([`uniform_step`]).
    pub factors: Vec<f64>,
}

/// The metric M of one head in which errors are measured: `[head_dim, head_dim]`.
///
/// Of [`Metric::Queries`] and [`Metric::Output`] it is what [`HeadMoments`] holds, of [`Metric::Fisher`] it is tr F · (0.75 F/tr F + 0.2 C_q/tr C_q + 0.05 I/d), where F are the second moments of gradients.
///
/// # Panics
/// If the metric needs gradients or the output projection and there are none ([`KeyStatistics::check`]).
pub fn metric(moments: &HeadMoments, metric: Metric) -> DMatrix<f64> {
    match metric {
        Metric::Queries => moments.queries.clone(),
        Metric::Output => moments.output.clone().expect("statistics were checked for the output projection"),
        Metric::Fisher => {
            let gradients = moments.gradients.as_ref().expect("statistics were checked for gradients");
            let (d, cost) = (gradients.nrows(), gradients.trace());
            let parts = [gradients, &moments.queries, &DMatrix::identity(d, d)];
            let shared = parts.iter().zip(FISHER_SHARES).filter(|(part, _)| part.trace() > 0.0);
            shared.fold(DMatrix::zeros(d, d), |sum, (part, share)| sum + *part * (share * cost / part.trace()))
        }
    }
}

impl HeadTransform {
    /// From a head's second moments, its coefficients sharing its own bits. Where nothing costs anything, M = I is taken.
    ///
    /// # Panics
    /// As [`metric`].
    pub fn fit(moments: &HeadMoments, base: &BaseScheme) -> Self {
        let mut head = Self::coordinates(moments, base.metric);
        head.bits = allocate(head.spread.as_slice(), budget(base.bits, head.spread.len()));
        head.fit_levels(moments, base);
        head
    }

    /// Everything but bits and levels.
    fn coordinates(moments: &HeadMoments, by: Metric) -> Self {
        let width = moments.keys.nrows();
        let (values, vectors) = descending_eigen(symmetric(metric(moments, by)));
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
        Self {
            analysis: half * &v,
            synthesis: inverse_half * v,
            spread,
            weight: typical.max(0.0),
            bits: vec![0; width],
            levels: Vec::new(),
            factors: Vec::new(),
        }
    }

    /// Levels and range factors that leave the least squared error in the sample, for coefficients of the same bits together.
    fn fit_levels(&mut self, moments: &HeadMoments, base: &BaseScheme) {
        let width = self.spread.len();
        // Row-major [tokens, width] is column-major [width, tokens].
        let tokens = moments.sample.len() / width;
        let rows = DMatrix::from_iterator(width, tokens, moments.sample.iter().map(|&v| f64::from(v)));
        let sample = self.analysis.transpose() * rows;
        let (assigned, spreads) = (&self.bits, &self.spread);
        let coded: f64 = assigned.iter().zip(spreads.iter()).filter(|(bits, _)| **bits > 0).map(|(_, s)| s).sum();
        let stored = if spreads.sum() > 0.0 { coded / spreads.sum() } else { 1.0 };
        let of_bits = |bits: u32| (0..width).filter(move |&i| assigned[i] == bits && spreads[i] > 0.0);
        // Numbers of unit variance and the variance that they are of.
        let classed = |bits: u32| -> Vec<(f64, f64)> {
            let of = |i: usize| sample.row(i).iter().map(|y| (y / spreads[i].sqrt(), spreads[i])).collect::<Vec<_>>();
            of_bits(bits).flat_map(of).collect()
        };
        let fitted = |bits: u32| {
            let gaussian = lloyd_max(bits).levels.clone();
            let classed = classed(bits);
            let (levels, kept) = match classed.len() < LEAST_SAMPLE {
                true => (gaussian, 1.0 - lloyd_max(bits).distortion),
                false => {
                    let levels = lloyd(classed.clone(), gaussian.len());
                    let kept = kept_of(classed.iter().map(weighted(&levels)));
                    (levels, kept)
                }
            };
            let gain = gain(base.metric, kept, stored);
            levels.into_iter().map(|level| level * gain).collect()
        };
        let levels = match base.ranges {
            RangeSource::Lloyd => (1..=MOST_LLOYD_BITS).map(fitted).collect(),
            RangeSource::Group | RangeSource::Static => Vec::new(),
        };
        let run = base.flush.group.min(SAMPLE_RUN);
        let factor = |bits: u32| {
            let of_class: Vec<Vec<f64>> = match bits > 0 && stores_range(base, bits) {
                true => of_bits(bits).map(|i| sample.row(i).iter().copied().collect()).collect(),
                false => Vec::new(),
            };
            match of_class.iter().map(Vec::len).sum::<usize>() < LEAST_SAMPLE {
                true => f64::from(range_factor(bits)),
                false => {
                    let (factor, kept) = best_factor(&of_class, run, bits);
                    let more = if base.metric == Metric::Queries { MORE_SPREAD } else { 1.0 };
                    factor * gain(base.metric, kept, stored) * more
                }
            }
        };
        let step = |bits: u32| {
            let (factor, kept) = match (bits, classed(bits)) {
                (0, _) => return 1.0,
                (_, few) if few.len() < LEAST_SAMPLE => (1.0, 1.0 - uniform_distortion(bits)),
                (_, classed) => best_step(&classed, bits),
            };
            factor * gain(base.metric, kept, stored)
        };
        let factors = match base.ranges {
            RangeSource::Static => (0..=MOST_POOLED_BITS).map(step).collect(),
            RangeSource::Group | RangeSource::Lloyd => (0..=MOST_POOLED_BITS).map(factor).collect(),
        };
        (self.levels, self.factors) = (levels, factors);
    }

    /// Coefficients that are stored.
    pub fn width(&self) -> usize {
        self.bits.iter().filter(|b| **b > 0).count()
    }

    /// Expected squared coefficient error on the uniform grids of `ranges=static`, for Gaussian keys: Σ λ_i · D_i, with D_i the distortion of
    /// a unit Gaussian by the grid of coefficient i. Of transforms that were fitted for other ranges it says nothing.
    pub fn distortion(&self) -> f64 {
        let of = |bits: u32| grid_distortion(bits, uniform_step(bits.max(1)) * self.factors[bits as usize]);
        self.spread.iter().zip(&self.bits).map(|(s, b)| s * of(*b)).sum()
    }

    /// Code bits per element: codes, scales and zeros.
    fn code_bits(&self, base: &BaseScheme) -> f64 {
        self.bits.iter().map(|&b| cost(base, b)).sum::<f64>() / self.bits.len() as f64
    }
}

/// `count` Lloyd–Max levels of weighted numbers: each the mean of the numbers that are nearest to it. They begin as quantiles, so that none
/// is without numbers.
fn lloyd(mut numbers: Vec<(f64, f64)>, count: usize) -> Vec<f64> {
    numbers.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all = numbers.len();
    let mut levels: Vec<f64> = (0..count).map(|i| numbers[all * (2 * i + 1) / (2 * count)].0).collect();
    for _ in 0..100 {
        let mut start = 0;
        let mut moved = 0.0f64;
        let edges: Vec<f64> = levels.windows(2).map(|w| 0.5 * (w[0] + w[1])).chain([f64::INFINITY]).collect();
        for (level, edge) in levels.iter_mut().zip(edges) {
            let end = start + numbers[start..].partition_point(|(x, _)| *x <= edge);
            let (sum, weight) = numbers[start..end].iter().fold((0.0, 0.0), |(s, w), (x, own)| (s + x * own, w + own));
            if weight > 0.0 {
                moved = moved.max((sum / weight - *level).abs());
                *level = sum / weight;
            }
            start = end;
        }
        if moved < 1e-6 {
            break;
        }
    }
    levels
}

/// The factor on the half-width of min/max ranges, of those from 0.4 to 1.6 in steps of 0.02, that leaves the least squared error, and the
/// share of y that it keeps.
///
/// # Shapes
/// `rows`: numbers of each coefficient, `run` neighbours sharing a range
fn best_factor(rows: &[Vec<f64>], run: usize, bits: u32) -> (f64, f64) {
    let cells = f64::from(1u32 << bits);
    // Numbers with what they read back as, both from the middle of their range, which is kept as it is.
    let read = |factor: f64| {
        let of_run = move |y: &'_ [f64]| {
            let (low, high) = y.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
            let (middle, cell) = (0.5 * (low + high), factor * (high - low) / cells);
            let zero = middle - 0.5 * cell * (cells - 1.0);
            let of = |&v: &f64| {
                let code = if cell > 0.0 { ((v - zero) / cell).round().clamp(0.0, cells - 1.0) } else { 0.0 };
                (v - middle, zero + code * cell - middle)
            };
            y.iter().map(of).collect::<Vec<_>>()
        };
        // Runs are whole: those of different places of a text do not share a range.
        rows.iter().flat_map(|row| row.chunks(SAMPLE_RUN).flat_map(|r| r.chunks(run))).flat_map(of_run)
    };
    let factor = least_error(|factor| read(factor).map(|(y, read)| (y - read).powi(2)).sum());
    (factor, kept_of(read(factor)))
}

/// The factor on [`uniform_step`] that leaves the least squared error in numbers of unit variance, and the share of them that is kept.
///
/// # Shapes
/// `numbers`: each with the variance that it stands for
fn best_step(numbers: &[(f64, f64)], bits: u32) -> (f64, f64) {
    let cells = 1u32 << bits;
    let levels = |factor: f64| -> Vec<f64> {
        let step = factor * uniform_step(bits);
        (0..cells).map(|code| (f64::from(code) - 0.5 * f64::from(cells - 1)) * step).collect()
    };
    let error = |levels: Vec<f64>| numbers.iter().map(weighted(&levels)).map(|(y, read)| (y - read).powi(2)).sum();
    let factor = least_error(|factor| error(levels(factor)));
    (factor, kept_of(numbers.iter().map(weighted(&levels(factor)))))
}

/// A number of unit variance and the level that it is read as, both in the units of the variance that it stands for.
fn weighted(levels: &[f64]) -> impl Fn(&(f64, f64)) -> (f64, f64) {
    move |&(y, variance)| (y * variance.sqrt(), nearest(levels, y) * variance.sqrt())
}

/// Which factor from 0.4 to 1.6, in steps of 0.02, leaves the least error.
fn least_error(error: impl Fn(f64) -> f64) -> f64 {
    let all = (20..=80).map(|i| f64::from(i) * 0.02).map(|factor| (error(factor), factor));
    all.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(1.0, |(_, factor)| factor)
}

/// What levels are multiplied by, given the share of y that its least-squares levels keep ([`kept_of`]), and the share of Λ that is stored.
///
/// Levels of least squared error shrink, and coefficients without bits are gone. Where the metric is that of scores, shrunken scores
/// flatten every softmax, which squared errors do not see, and levels are spread until scores keep their size: each class of coefficients
/// its own, all together that of those that are not stored. Where the metric is that of gradients, which did see the softmax, or values
/// are read, which no softmax follows, least squares are left alone.
fn gain(by: Metric, kept: f64, stored: f64) -> f64 {
    match by {
        Metric::Queries => 1.0 / (kept * stored).max(LEAST_KEPT),
        Metric::Fisher | Metric::Output => 1.0,
    }
}

/// The level nearest to a number, of ascending ones.
fn nearest(levels: &[f64], y: f64) -> f64 {
    let after = levels.partition_point(|level| *level < y).clamp(1, levels.len() - 1);
    let [below, above] = [levels[after - 1], levels[after]];
    if y - below <= above - y { below } else { above }
}

/// Which share of numbers y is left in what they read back as: Σ y·ŷ over Σ y².
fn kept_of(numbers: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (product, energy) = numbers.fold((0.0, 0.0), |(p, e), (y, read)| (p + y * read, e + y * y));
    if energy > 0.0 { product / energy } else { 1.0 }
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

/// Whether a coefficient of so many bits has a scale and a zero.
fn stores_range(base: &BaseScheme, bits: u32) -> bool {
    match base.ranges {
        RangeSource::Group => bits > 0,
        RangeSource::Static => false,
        RangeSource::Lloyd => bits > MOST_LLOYD_BITS,
    }
}

/// Bits that a coefficient takes of each token's, its share of scale and zero included.
fn cost(base: &BaseScheme, bits: u32) -> f64 {
    let range = if stores_range(base, bits) { 2.0 * base.meta.bits() / base.flush.group as f64 } else { 0.0 };
    f64::from(bits) + range
}

/// Expected squared error of a coefficient of unit variance, were it Gaussian.
fn expected_error(base: &BaseScheme, bits: u32) -> f64 {
    match base.ranges {
        RangeSource::Lloyd if (1..=MOST_LLOYD_BITS).contains(&bits) => lloyd_max(bits).distortion,
        _ => uniform_distortion(bits),
    }
}

/// A step up of a coefficient: bits afterwards, what they cost more, and the error of a unit variance that they save.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Step {
    bits: u32,
    cost: f64,
    gain: f64,
}

/// The steps along the lower convex hull of cost and error, so that each saves less for its cost than the one before.
fn hull(base: &BaseScheme) -> Vec<Step> {
    let (mut steps, mut at) = (Vec::new(), 0);
    while at < MOST_POOLED_BITS {
        let step = |bits: u32| Step {
            bits,
            cost: cost(base, bits) - cost(base, at),
            gain: expected_error(base, at) - expected_error(base, bits),
        };
        let rate = |s: &Step| s.gain / s.cost;
        let best = (at + 1..=MOST_POOLED_BITS).map(step).max_by(|a, b| rate(a).total_cmp(&rate(b)));
        let Some(best) = best else { break };
        at = best.bits;
        steps.push(best);
    }
    steps
}

/// Bits of the coefficients of several heads out of one pool of `budget` code bits, scales and zeros counted: by largest gain for what it
/// costs, ties to the first, until no step fits.
///
/// # Shapes
/// `spread`: for each head variances times what their error costs, descending: as the result
pub fn allocate_pool(base: &BaseScheme, spread: &[Vec<f64>], budget: f64) -> Vec<Vec<u32>> {
    let steps = hull(base);
    let each = spread.iter().enumerate().flat_map(|(h, of)| of.iter().enumerate().map(move |(i, s)| (h, i, *s)));
    let mut all: Vec<(f64, usize, usize, Step)> =
        each.flat_map(|(h, i, s)| steps.iter().map(move |step| (s * step.gain / step.cost, h, i, *step))).collect();
    // Stable: the steps of a coefficient stay in order.
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut bits: Vec<Vec<u32>> = spread.iter().map(|of| vec![0; of.len()]).collect();
    // Costs are multiples of 1/1024 or so: what is left over by rounding is no bit.
    let mut left = budget + 1e-6;
    let before = |step: &Step| steps.iter().take_while(|s| s.bits < step.bits).last().map_or(0, |s| s.bits);
    for (rate, head, i, step) in all {
        if rate > 0.0 && step.cost <= left && bits[head][i] == before(&step) {
            bits[head][i] = step.bits;
            left -= step.cost;
        }
    }
    bits
}

/// Factor on the half-width of a coefficient's min/max range, which 2^b equal cells divide, where there is no sample to choose it by: few
/// levels are better spent on the middle. Of 128 Gaussian numbers it leaves cells of about [`uniform_step`] with 2 and 3 bits, and a
/// third wider ones with 1.
pub fn range_factor(bits: u32) -> f32 {
    if bits <= 2 { 0.8 } else { 0.95 }
}

/// The transforms of all heads, `[layers, kv_heads]`.
///
/// # Panics
/// If the statistics do not hold what the scheme needs ([`KeyStatistics::check`]).
pub fn fit(base: &BaseScheme, keys: &KeyStatistics) -> Arc<Vec<HeadTransform>> {
    // When tokens are coded plays no part, but for how many share a range.
    keys.fits.of(base.to_string(), || {
        let mut heads: Vec<HeadTransform> =
            keys.moments.par_iter().map(|m| HeadTransform::coordinates(m, base.metric)).collect();
        let width = keys.head_dim;
        let bits = match base.pool {
            Pool::Head => {
                let own = |h: &HeadTransform| allocate(h.spread.as_slice(), budget(base.bits, width));
                heads.par_iter().map(own).collect()
            }
            Pool::Model => {
                let weighted: Vec<Vec<f64>> = heads.iter().map(HeadTransform::weighted).collect();
                allocate_pool(base, &weighted, base.bits.mean() * (width * heads.len()) as f64)
            }
            Pool::Plan(budgets) => {
                let own = |(h, bits): (&HeadTransform, &Bits)| {
                    allocate_pool(base, &[h.weighted()], bits.mean() * width as f64).remove(0)
                };
                heads.par_iter().zip(budgets.bits().par_iter()).map(own).collect()
            }
        };
        heads.iter_mut().zip(bits).for_each(|(head, bits)| head.bits = bits);
        heads.par_iter_mut().zip(keys.moments.par_iter()).for_each(|(head, m)| head.fit_levels(m, base));
        heads
    })
}

impl HeadTransform {
    /// Variances times what a unit of their error costs.
    fn weighted(&self) -> Vec<f64> {
        self.spread.iter().map(|s| s * self.weight).collect()
    }
}

/// Code bits per key element: codes, and scales and zeros of the coefficients that have some, averaged over all layers and heads.
pub fn code_bits(base: &BaseScheme, keys: &KeyStatistics) -> f64 {
    let heads = fit(base, keys);
    heads.iter().map(|head| head.code_bits(base)).sum::<f64>() / heads.len() as f64
}

/// Keys or values that share a pool of bits with others.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// How they are coded.
    pub base: &'a BaseScheme,
    /// Their statistics.
    pub statistics: &'a KeyStatistics,
    /// What errors of each head cost beyond what the statistics say, `[layers, kv_heads]`: 1 where they are right.
    pub factors: &'a [f64],
}

/// Code bits per element of each head, scales and zeros counted, where all members share `mean` bits per element; and what errors then
/// cost by the statistics, Σ λ D(b), factors left out. For each member `[layers, kv_heads]`, row-major.
///
/// # Panics
/// If members differ in what codes cost, or as [`metric`].
pub fn shared_bits(members: &[Member<'_>], mean: f64) -> Vec<Vec<(f64, f64)>> {
    let base = members[0].base;
    assert!(members.iter().all(|m| hull(m.base) == hull(base)), "members of a pool pay alike");
    let heads: Vec<(Vec<f64>, f64)> = members
        .iter()
        .flat_map(|m| {
            m.statistics
                .moments
                .par_iter()
                .zip(m.factors)
                .map(|(own, f)| (HeadTransform::coordinates(own, m.base.metric).weighted(), *f))
                .collect::<Vec<_>>()
        })
        .collect();
    let scaled: Vec<Vec<f64>> = heads.iter().map(|(of, factor)| of.iter().map(|s| s * factor).collect()).collect();
    let elements: usize = scaled.iter().map(Vec::len).sum();
    let bits = allocate_pool(base, &scaled, mean * elements as f64);
    let of_head = |((spread, _), bits): (&(Vec<f64>, f64), &Vec<u32>)| {
        let spent: f64 = bits.iter().map(|&b| cost(base, b)).sum();
        let lost = spread.iter().zip(bits).map(|(s, &b)| s * expected_error(base, b)).sum();
        (spent / bits.len() as f64, lost)
    };
    let mut all = heads.iter().zip(&bits).map(of_head);
    members.iter().map(|m| all.by_ref().take(m.factors.len()).collect()).collect()
}

/// The most that [`code_bits`] can be: where heads have bits of their own, as many coefficients stored as there are bits for.
pub fn most_code_bits(base: &BaseScheme, head_dim: usize) -> f64 {
    if base.pool != Pool::Head {
        return base.bits.mean();
    }
    let bits = budget(base.bits, head_dim);
    let range = |b: u32| cost(base, b) - f64::from(b);
    // Under `lloyd` a range comes with the fourth bit.
    let with_range = (1..=MOST_KLT_BITS).find(|b| stores_range(base, *b)).map_or(0, |b| bits / b as usize);
    (bits as f64 + range(MOST_KLT_BITS) * with_range.min(head_dim) as f64) / head_dim as f64
}

/// Transform coding of one layer's keys or values.
#[derive(Module, Debug)]
pub(crate) struct Transform {
    /// A of each head: `[kv_heads, head_dim, head_dim]`
    analysis: Tensor<3>,
    /// S of each head, as `analysis`.
    synthesis: Tensor<3>,
    /// 2^b − 1 of each coefficient: `[1, kv_heads, 1, 1, head_dim]`
    top: Tensor<5>,
    /// Where a range is stored the factor on it, else each step; as `top`.
    measure: Tensor<5>,
    /// 1 where a range is stored, as `top`; `None` where all are or none is.
    ranged: Option<Tensor<5>>,
    /// Levels of `lloyd`, where no range is stored.
    table: Option<Table>,
    /// The diagonal of D: `[kv_heads, 1, head_dim]`
    deviation: Tensor<3>,
    /// ρ of each coefficient, which `measure` and `table` hold already; as `top`, `None` where it is not learned.
    clip: Option<Tensor<5>>,
    #[module(skip)]
    bits: Arc<[Vec<u32>]>,
    #[module(skip)]
    ranges: RangeSource,
    #[module(skip)]
    group: usize,
    #[module(skip)]
    meta: Meta,
}

/// Levels of each coefficient, as sums of steps over thresholds; `[1, kv_heads, 1, 1, head_dim]` each.
#[derive(Module, Debug)]
struct Table {
    lowest: Tensor<5>,
    /// Thresholds, infinite where a coefficient has no more levels.
    thresholds: Vec<Tensor<5>>,
    steps: Vec<Tensor<5>>,
    /// Standard deviations.
    spread: Tensor<5>,
    /// Levels of a unit variance by head, bits − 1 and code.
    #[module(skip)]
    unit: Arc<[Vec<Vec<f64>>]>,
}

/// Codes of coefficients, `[batch, heads, groups, G, width]`, and what turns them back.
struct Coded {
    codes: Tensor<5>,
    /// What they read back as.
    read: Tensor<5>,
    scale: Tensor<5>,
    zero: Tensor<5>,
    inside: Tensor<5, Bool>,
    /// Middle of the levels, from which ρ moves them away.
    middle: Tensor<5>,
}

/// What coefficients are packed as.
pub(crate) struct Packed {
    /// Bits of each head's coefficients that have no range stored, and those that have: `[kv_heads][head_dim]`
    pub bits: [Vec<Vec<u32>>; 2],
    /// Scale and zero where no range is stored: `[kv_heads, head_dim]`
    pub fixed: (Vec<f32>, Vec<f32>),
    /// Levels that codes stand for where no range is stored, by head, bits − 1 and code.
    pub levels: Option<Arc<[Vec<Vec<f64>>]>>,
}

impl Transform {
    pub fn new(base: &BaseScheme, keys: &KeyStatistics, layer: usize, device: &Device) -> Self {
        let (heads, d) = (keys.kv_heads, keys.head_dim);
        let all = fit(base, keys);
        let fitted = &all[layer * heads..(layer + 1) * heads];
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
        let range = f64::from(base.range);
        let measure = |f: &HeadTransform, i: usize| match f.bits[i] {
            0 => 0.0,
            b if stores_range(base, b) => f.factors[b as usize] * range,
            b => uniform_step(b) * f.spread[i].sqrt() * f.factors[b as usize] * range,
        };
        let levels = |f: &HeadTransform, i: usize| match f.bits[i] {
            b @ 1..=MOST_LLOYD_BITS => {
                let size = f.spread[i].sqrt() * range;
                f.levels[b as usize - 1].iter().map(|l| l * size).collect()
            }
            _ => vec![0.0],
        };
        let table = || Table {
            lowest: each(&|f, i| levels(f, i)[0]),
            thresholds: (1..1usize << MOST_LLOYD_BITS)
                .map(|k| each(&|f, i| levels(f, i).get(k - 1..=k).map_or(f64::from(f32::MAX), |l| 0.5 * (l[0] + l[1]))))
                .collect(),
            steps: (1..1usize << MOST_LLOYD_BITS)
                .map(|k| each(&|f, i| levels(f, i).get(k - 1..=k).map_or(0.0, |l| l[1] - l[0])))
                .collect(),
            spread: each(&|f, i| f.spread[i].sqrt() * range),
            unit: fitted.iter().map(|f| f.levels.clone()).collect(),
        };
        let lloyd = base.ranges == RangeSource::Lloyd;
        Self {
            analysis: matrix(&|f| &f.analysis),
            synthesis: matrix(&|f| &f.synthesis),
            top: each(&|f, i| f64::from((1u32 << f.bits[i]) - 1)),
            measure: each(&measure),
            ranged: lloyd.then(|| each(&|f, i| f64::from(u8::from(stores_range(base, f.bits[i]))))),
            table: lloyd.then(table),
            deviation: Tensor::from_data(TensorData::new(deviations(fitted), [heads, 1, d]), device),
            clip: None,
            bits: fitted.iter().map(|f| f.bits.clone()).collect(),
            ranges: base.ranges,
            group: base.flush.group,
            meta: base.meta,
        }
    }

    /// The transform with what was learned for it, part of the learned tensors' graph. Zeros and ones change no bit.
    pub fn learned(&self, parts: &BaseParts) -> Self {
        let mut own = self.clone();
        if let Some([e, f]) = &parts.transform {
            let dtype = float_dtype(e.dtype());
            let [a, s, deviation] = [&self.analysis, &self.synthesis, &self.deviation].map(|x| x.clone().cast(dtype));
            // Rows are coded: y'ᵀ = kᵀA (I + D⁻¹EᵀD), and k̂ᵀ = ŷᵀ(S (I + DFD⁻¹))ᵀ.
            let change = (a.clone() / deviation.clone()).matmul(e.clone().swap_dims(1, 2)) * deviation.clone();
            own.analysis = a + change;
            own.synthesis = s.clone() + (s * deviation.clone()).matmul(f.clone()) / deviation;
        }
        if let Some(clip) = &parts.clip {
            let [heads, _, d] = clip.dims();
            let clip = clip.clone().reshape([1, heads, 1, 1, d]);
            let factor = plain(clip.clone());
            let scaled = |x: &Tensor<5>| x.clone().cast(float_dtype(factor.dtype())) * factor.clone();
            own.measure = scaled(&self.measure);
            own.table = self.table.as_ref().map(|table| Table {
                lowest: scaled(&table.lowest),
                thresholds: table.thresholds.iter().map(scaled).collect(),
                steps: table.steps.iter().map(scaled).collect(),
                spread: scaled(&table.spread),
                unit: table.unit.clone(),
            });
            own.clip = Some(clip);
        }
        own
    }

    /// Sᵀ of each head, which turns a query to the coefficients that it meets: `[kv_heads, head_dim, head_dim]`.
    pub fn query_side(&self) -> Tensor<3> {
        self.synthesis.clone().swap_dims(1, 2)
    }

    /// Coefficients of a head, stored or not.
    pub fn width(&self) -> usize {
        self.analysis.dims()[2]
    }

    /// Everything that decides what codes mean.
    pub fn constants(&self) -> Vec<Tensor<1>> {
        let flat = |x: &Tensor<5>| x.clone().flatten(0, 4);
        let mut all = vec![self.synthesis.clone().flatten(0, 2), flat(&self.top), flat(&self.measure)];
        if let Some(table) = &self.table {
            all.push(flat(&table.lowest));
            all.extend(table.steps.iter().map(flat));
        }
        all
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
        let read = self.read_coefficients(self.coefficients(keys));
        Self::product(read, self.query_side()).reshape(shape)
    }

    /// ŷ of coefficients.
    ///
    /// Backward for y as ever: identity inside the clip range, zero outside. For ρ (LSQ, arXiv:1902.08153): with m the middle of the levels,
    /// ŷ = m + ρ·Q((y − m)/ρ), and rounding has the gradient of the identity, so that ∂ŷ/∂ρ = (ŷ − y)/ρ inside the clip range and
    /// (ŷ − m)/ρ, the outermost level's, outside.
    fn read_coefficients(&self, y: Tensor<5>) -> Tensor<5> {
        let fixed = plain(y.clone());
        let Coded { read, inside, middle, .. } = self.code(fixed.clone());
        let clip = self.clip.clone().filter(Tensor::is_autodiff);
        if !y.is_autodiff() && clip.is_none() {
            return read;
        }
        let (shape, dtype) = (fixed.shape(), float_dtype(fixed.dtype()));
        let of_y = inside.clone().float().cast(dtype) * (y - fixed.clone());
        let of_clip = clip.map(|clip| {
            let clip = clip.cast(dtype);
            let factor = plain(clip.clone());
            let from = middle.expand(shape).mask_where(inside, fixed);
            (read.clone() - from) / factor.clone() * (clip - factor)
        });
        let read = read + of_y;
        match of_clip {
            None => read,
            Some(of_clip) => read + of_clip,
        }
    }

    /// What is stored: what [`Transform::read_back`] reads back.
    pub fn store(&self, keys: Tensor<4>) -> Stored {
        let shape @ [b, h, n, d] = keys.dims();
        let coded = self.code(plain(self.coefficients(keys)));
        let ranges = |x: Tensor<5>| match self.ranges {
            RangeSource::Static => None,
            RangeSource::Group | RangeSource::Lloyd => Some(x.reshape([b, h, n / self.group, d])),
        };
        Stored { codes: coded.codes.reshape(shape), scale: ranges(coded.scale), zero: ranges(coded.zero) }
    }

    /// How coefficients are packed.
    pub fn packed(&self) -> Packed {
        let with_range = |b: u32| match self.ranges {
            RangeSource::Group => true,
            RangeSource::Static => false,
            RangeSource::Lloyd => b > MOST_LLOYD_BITS,
        };
        let part = |ranged: bool| -> Vec<Vec<u32>> {
            let own = |b: &u32| if with_range(*b) == ranged { *b } else { 0 };
            self.bits.iter().map(|bits| bits.iter().map(own).collect()).collect()
        };
        let host = |x: Tensor<5>| x.into_data_as::<f32>().try_to_vec::<f32>().expect("converted to f32");
        let fixed = match &self.table {
            None => (host(self.measure.clone()), host(self.lowest())),
            Some(table) => (host(table.spread.clone()), vec![0.0; self.bits.len() * self.bits[0].len()]),
        };
        Packed { bits: [part(false), part(true)], fixed, levels: self.table.as_ref().map(|t| t.unit.clone()) }
    }

    /// −(2^{b−1} − ½)Δ
    fn lowest(&self) -> Tensor<5> {
        (self.top.clone().cast(float_dtype(self.measure.dtype())) * self.measure.clone()).mul_scalar(-0.5)
    }

    /// Codes of coefficients that are part of no autodiff graph.
    fn code(&self, y: Tensor<5>) -> Coded {
        let ranged = |y| self.code_ranged(y);
        match (&self.ranged, &self.table) {
            (Some(mask), Some(table)) => {
                let (one, other) = (ranged(y.clone()), table.code(y.clone()));
                let mask = plain(mask.clone()).greater_elem(0.5);
                let middle = one.middle.clone();
                let middle = middle.zeros_like().mask_where(mask.clone().expand(middle.shape()), middle);
                let mask = mask.expand(y.shape());
                Coded {
                    codes: other.codes.mask_where(mask.clone(), one.codes),
                    read: other.read.mask_where(mask.clone(), one.read),
                    inside: mask.clone().bool_and(one.inside).bool_or(mask.bool_not().bool_and(other.inside)),
                    scale: one.scale,
                    zero: one.zero,
                    middle,
                }
            }
            _ => ranged(y),
        }
    }

    fn code_ranged(&self, y: Tensor<5>) -> Coded {
        let dtype = float_dtype(y.dtype());
        let own = |x: Tensor<5>| plain(x).cast(dtype);
        let (top, measure) = (own(self.top.clone()), own(self.measure.clone()));
        let (scale, zero) = match self.ranges {
            RangeSource::Static => (measure, own(self.lowest())),
            RangeSource::Group | RangeSource::Lloyd => {
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
        let inside = inside.bool_and(top.clone().greater_elem(0.0).expand(shape));
        let read = codes.clone() * scale.clone() + zero.clone();
        let middle = zero.clone() + (scale.clone() * top).mul_scalar(0.5);
        Coded { codes, read, scale, zero, inside, middle }
    }
}

/// The diagonal of D, relative to its largest element: `[kv_heads, head_dim]`; ones where no coefficient varies.
fn deviations(heads: &[HeadTransform]) -> Vec<f32> {
    let of_head = |head: &HeadTransform| {
        let largest = head.spread.max();
        head.spread
            .iter()
            .map(|s| if largest > 0.0 { (s / largest).sqrt().max(DEVIATION_FLOOR) as f32 } else { 1.0 })
            .collect::<Vec<_>>()
    };
    heads.iter().flat_map(of_head).collect()
}

impl Table {
    fn code(&self, y: Tensor<5>) -> Coded {
        let (shape, dtype) = (y.shape(), float_dtype(y.dtype()));
        let cast = |x: &Tensor<5>| plain(x.clone()).cast(dtype);
        let mut codes = y.zeros_like();
        let mut read = cast(&self.lowest).expand(shape.clone());
        let mut outermost = (cast(&self.lowest), cast(&self.lowest));
        for (threshold, step) in self.thresholds.iter().zip(&self.steps) {
            let above = y.clone().greater(cast(threshold).expand(shape.clone())).float().cast(dtype);
            codes = codes + above.clone();
            read = read + above * cast(step);
            outermost.1 = outermost.1 + cast(step);
        }
        // Outermost levels stand for what lies as far outside as their neighbours lie inside, at least.
        let edge = cast(&self.steps[0]).mul_scalar(0.5);
        let low = (outermost.0 - edge.clone()).expand(shape.clone());
        let high = (outermost.1 + edge).expand(shape);
        let inside = y.clone().greater(low).bool_and(y.lower(high));
        let nothing = cast(&self.lowest).zeros_like();
        Coded { codes, read, scale: nothing.clone(), zero: nothing.clone(), inside, middle: nothing }
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
        HeadMoments::new(second(ranks[0], seed), second(ranks[1], seed + 1000))
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
            values: None,
            fits: Default::default(),
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
        let head = HeadTransform::fit(&moments, &"klt-2".parse().unwrap());
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
                let bits = HeadTransform::fit(&head, &base).bits;
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
            let head = HeadTransform::fit(&moments, &scheme.parse().unwrap());
            let predicted = head.distortion() * moments.queries.trace() / 16.0;
            let measured = score_error(&keys, read, &moments.queries);
            assert!((measured / predicted - 1.0).abs() < 0.1, "{scheme}: {measured} for {predicted}");
            // What grids of least squared error would leave: steps that keep the size of scores cost little more.
            let least = head.spread.iter().zip(&head.bits).map(|(s, b)| s * uniform_distortion(*b)).sum::<f64>();
            assert!((1.0..1.2).contains(&(head.distortion() / least)), "{scheme}: {} and {least}", head.distortion());
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
                let stored: Vec<u32> = HeadTransform::fit(m, &base).bits.into_iter().filter(|b| *b > 0).collect();
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
            HeadMoments::new(zero.clone(), zero.clone()),
            HeadMoments::new(zero.clone(), deficient.keys.clone()),
            HeadMoments::new(deficient.queries.clone(), zero),
            HeadMoments::new(deficient.queries.clone() * 1e-30, deficient.keys.clone() * 1e20),
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
            let head = HeadTransform::fit(&moments, &base);
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
                        RangeSource::Group | RangeSource::Lloyd => {
                            let factor = f64::from(range_factor(head.bits[i]) * base.range);
                            ((low + high) / 2.0, factor * (high - low) / 2.0)
                        }
                        RangeSource::Static => {
                            let step = uniform_step(head.bits[i]) * head.spread[i].sqrt() * 0.6;
                            let step = step * head.factors[head.bits[i] as usize];
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

    /// Heads whose errors cost unlike much, with gradients and samples of sines, which rotated channels are.
    fn heads(width: usize, count: usize) -> KeyStatistics {
        let head = |i: usize| {
            let own = moments(width, [width, width], 70 + i as u64);
            let gradients = moments(width, [width, width], 90 + i as u64).queries * 10f64.powi(i as i32 % 3 - 1);
            let tokens = 1024;
            let scale = |c: usize| own.keys[(c, c)].sqrt() * 2f64.sqrt();
            let wave = |t: usize, c: usize| (t as f64 * (0.9 / (1.0 + c as f64)) + c as f64 * 1.7).sin() * scale(c);
            let sample = (0..tokens * width).map(|at| wave(at / width, at % width) as f32).collect();
            // Their own covariance, so that calibrated variances are those of the sample.
            let rows = DMatrix::from_fn(width, tokens, |c, t| wave(t, c));
            HeadMoments { keys: &rows * rows.transpose() / tokens as f64, gradients: Some(gradients), sample, ..own }
        };
        let all: Vec<HeadMoments> = (0..count).map(head).collect();
        KeyStatistics { kv_heads: 2, ..statistics(all, 0.0) }
    }

    fn scheme(text: &str) -> BaseScheme {
        text.parse().unwrap()
    }

    #[test]
    fn a_pool_spends_its_budget_where_errors_cost_most() {
        let keys = heads(8, 6);
        for text in ["klt-1", "klt-2.25", "klt-0.5", "klt-4.5", "klt-7"] {
            for options in ["g=128,ranges=static", "g=128,ranges=lloyd", "g=32", "g=128,ranges=lloyd,meta=f32"] {
                let base = scheme(&format!("{text}({options},metric=fisher,pool=model)"));
                let fitted = fit(&base, &keys);
                let (found, asked) = (code_bits(&base, &keys), base.bits.mean());
                // No step costs more than eight bits and a range, of 48 coefficients; whole bits are spent to the last.
                assert!(found <= asked + 1e-6 && asked - found < 9.5 / 48.0, "{base}: {found}");
                if base.ranges == RangeSource::Static {
                    assert_eq!((found * 48.0).round(), (asked * 48.0).floor(), "{base}");
                }
                assert!(found <= most_code_bits(&base, 8) + 1e-9);
                // Nobody gains by passing on a bit: the least that was saved by the last is no less than the most that the next would.
                let steps = hull(&base);
                let rates = |head: &HeadTransform, i: usize| {
                    let at = steps.iter().position(|s| s.bits > head.bits[i]).unwrap_or(steps.len());
                    let rate = |s: &Step| head.spread[i] * head.weight * s.gain / s.cost;
                    (
                        at.checked_sub(1).map_or(f64::INFINITY, |at| rate(&steps[at])),
                        steps.get(at).map(rate),
                        steps.get(at),
                    )
                };
                let all = || fitted.iter().flat_map(|h| (0..8).map(move |i| (h, i))).map(|(h, i)| rates(h, i));
                let taken = all().map(|r| r.0).fold(f64::INFINITY, f64::min);
                let left = (asked - found) * 48.0;
                let open = all().filter(|r| r.2.is_some_and(|s| s.cost <= left + 1e-9)).filter_map(|r| r.1);
                assert!(open.fold(0.0, f64::max) <= taken * (1.0 + 1e-9), "{base}");
                assert!(fitted.iter().all(|h| h.bits.is_sorted_by(|a, b| a >= b)));
            }
        }
        // Against all ways of spending whole bits.
        let base = scheme("klt-1(ranges=static)");
        for (spread, budget) in [([9.0, 4.0, 1.0, 0.3], 7.0), ([1.0, 1.0, 1.0, 1.0], 6.0), ([1e6, 1.0, 0.1, 0.0], 9.0)]
        {
            let split = vec![spread[..2].to_vec(), spread[2..].to_vec()];
            let cost = |b: &[u32]| spread.iter().zip(b).map(|(s, b)| s * uniform_distortion(*b)).sum::<f64>();
            let all = (0..9u32.pow(4)).map(|i| [i % 9, i / 9 % 9, i / 81 % 9, i / 729]);
            let best =
                all.filter(|b| f64::from(b.iter().sum::<u32>()) <= budget).map(|b| cost(&b)).fold(f64::MAX, f64::min);
            let found = allocate_pool(&base, &split, budget).concat();
            assert!(cost(&found) <= best * (1.0 + 1e-12), "{spread:?}: {found:?}");
        }
    }

    #[test]
    fn bits_by_head_in_a_file_are_those_of_the_pool() {
        let (keys, values) = (heads(8, 6), heads(8, 4));
        for options in ["g=128,ranges=static", "g=128,ranges=lloyd", "g=32"] {
            let base = scheme(&format!("klt-1.7({options},metric=fisher,pool=model)"));
            let one = vec![1.0; 6];
            let shared = shared_bits(&[Member { base: &base, statistics: &keys, factors: &one }], 1.7);
            let bits = shared[0].iter().map(|(bits, _)| Bits::nearest((bits * 1000.0).ceil() / 1000.0)).collect();
            let budgets = crate::scheme::HeadBudgets::interned(bits);
            let planned = BaseScheme { bits: budgets.mean(), pool: Pool::Plan(budgets), ..base };
            assert_eq!(planned.to_string().parse::<BaseScheme>().unwrap(), planned);
            let (a, b) = (fit(&base, &keys), fit(&planned, &keys));
            assert!(a.iter().zip(b.iter()).all(|(a, b)| a == b), "{base}");
            // Errors that count more get more bits, at the expense of others.
            let dear = vec![10.0; 4];
            let with = |factors: &[f64]| {
                let members = [
                    Member { base: &base, statistics: &keys, factors: &one },
                    Member { base: &base, statistics: &values, factors },
                ];
                let of = |all: &[(f64, f64)]| all.iter().map(|(bits, _)| bits).sum::<f64>();
                let shared = shared_bits(&members, 1.7);
                [of(&shared[0]), of(&shared[1])]
            };
            let (plain, more) = (with(&[1.0; 4]), with(&dear));
            assert!(more[1] > plain[1] + 0.5 && more[0] < plain[0] - 0.5, "{plain:?} {more:?}");
            assert!((plain[0] + plain[1]) / 10.0 <= 1.7 + 1e-9 && (plain[0] + plain[1]) / 10.0 > 1.55);
        }
    }

    #[test]
    fn the_metric_of_gradients_is_in_nats_whatever_their_size() {
        let keys = heads(6, 2);
        let own = &keys.moments[0];
        let m = metric(own, Metric::Fisher);
        let cost = own.gradients.as_ref().unwrap().trace();
        assert!((m.trace() / cost - 1.0).abs() < 1e-12);
        let times = |factor: f64| HeadMoments { gradients: own.gradients.clone().map(|g| g * factor), ..own.clone() };
        let base = scheme("klt-2(metric=fisher)");
        let (one, other) = (HeadTransform::fit(own, &base), HeadTransform::fit(&times(1e-8), &base));
        assert!((other.weight / one.weight / 1e-8 - 1.0).abs() < 1e-9);
        assert!((&one.spread - &other.spread).abs().max() < 1e-9 * one.spread[0]);
        // Where queries and gradients agree, the metric is theirs but for the floor.
        let same = HeadMoments { gradients: Some(own.queries.clone() * 3.0), ..own.clone() };
        let floor = DMatrix::identity(6, 6) * (0.05 * 3.0 * own.queries.trace() / 6.0);
        assert!((metric(&same, Metric::Fisher) - &own.queries * (0.95 * 3.0) - floor).abs().max() < 1e-9);
        // No gradients at all: errors cost nothing, and nothing breaks.
        assert_eq!(metric(&times(0.0), Metric::Fisher).abs().max(), 0.0);
        assert_eq!(HeadTransform::fit(&times(0.0), &base).weight, 0.0);
    }

    #[test]
    fn levels_and_factors_of_a_sample_fit_it_better_than_those_for_gaussians() {
        let device = Device::flex();
        let keys = heads(8, 2);
        let plain: Vec<HeadMoments> =
            keys.moments.iter().map(|m| HeadMoments { sample: Vec::new(), ..m.clone() }).collect();
        let gaussian = KeyStatistics { moments: plain.into(), fits: Default::default(), ..keys.clone() };
        let options = ["klt-1(g=128,ranges=lloyd", "klt-2(g=128,ranges=lloyd", "klt-1(g=128", "klt-2(g=64"];
        for text in options.map(|text| format!("{text},metric=fisher)")) {
            let base = scheme(&text);
            let rows: Vec<f32> = keys.moments.iter().flat_map(|m| m.sample.clone()).collect();
            let x = Tensor::<4>::from_data(TensorData::new(rows, [1, 2, 1024, 8]), &device);
            let error = |keys: &KeyStatistics| -> f64 {
                let fitted = fit(&base, keys);
                let e: Vec<f32> = (BaseQuantizer::calibrated(base, keys, 0, &device).read_back(x.clone()) - x.clone())
                    .try_into_vec_as()
                    .unwrap();
                let of = |(i, e): (usize, &[f32])| {
                    let e = DVector::from_iterator(8, e.iter().map(|v| f64::from(*v)));
                    (fitted[i / 1024].analysis.transpose() * e).norm_squared()
                };
                e.chunks(8).enumerate().map(of).sum()
            };
            let (own, other) = (error(&keys), error(&gaussian));
            assert!(own < 0.97 * other, "{text}: {own} and {other}");
        }
        // Lloyd's conditions: each level is the mean of the numbers that are nearest to it.
        let numbers: Vec<(f64, f64)> =
            (0..2000).map(|i| ((i as f64 * 0.37).sin() * 1.4, 1.0 + (i % 3) as f64)).collect();
        let levels = lloyd(numbers.clone(), 8);
        for (i, level) in levels.iter().enumerate() {
            let nearest =
                |x: f64| (0..8).min_by(|a, b| (levels[*a] - x).abs().total_cmp(&(levels[*b] - x).abs())).unwrap();
            let own = numbers.iter().filter(|(x, _)| nearest(*x) == i);
            let (sum, weight) = own.fold((0.0, 0.0), |(s, w), (x, own)| (s + x * own, w + own));
            assert!((sum / weight - level).abs() < 1e-3, "{levels:?}");
        }
    }

    /// Level by level, from the definition.
    #[test]
    fn looked_up_levels_are_the_nearest() {
        let device = Device::flex();
        let keys = heads(8, 2);
        let base = scheme("klt-2.5(g=128,ranges=lloyd,metric=fisher)");
        let fitted = fit(&base, &keys);
        let x = crate::normal([1, 2, 128, 8], 3, &device) * 3.0;
        let quantizer = BaseQuantizer::calibrated(base, &keys, 0, &device);
        let (host, read): (Vec<f32>, Vec<f32>) =
            (x.clone().try_into_vec_as().unwrap(), quantizer.read_back(x).try_into_vec_as().unwrap());
        let vector =
            |all: &[f32], at: usize| DVector::from_iterator(8, all[at * 8..(at + 1) * 8].iter().map(|v| f64::from(*v)));
        let mut looked_up = 0;
        for (at, head) in (0..256).map(|at| (at, &fitted[at / 128])) {
            let y = head.analysis.transpose() * vector(&host, at);
            let back = head.synthesis.clone().try_inverse().unwrap() * vector(&read, at);
            for i in (0..8).filter(|&i| (1..=MOST_LLOYD_BITS).contains(&head.bits[i])) {
                let levels = head.levels[head.bits[i] as usize - 1].iter().map(|l| l * head.spread[i].sqrt());
                let nearest = levels.min_by(|a, b| (a - y[i]).abs().total_cmp(&(b - y[i]).abs())).unwrap();
                assert!((back[i] - nearest).abs() < 1e-4 * head.spread[0].sqrt(), "{} {nearest}", back[i]);
                looked_up += 1;
            }
        }
        assert!(looked_up > 500);
    }
}
