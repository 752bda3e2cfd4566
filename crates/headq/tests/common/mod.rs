//! A cache written from the definitions: one query, one key and one channel at a time, in f64.

#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use half::f16;
use headq::basis::{TrainedSide, TrainedTransform};
use headq::gaussian::{lloyd_max, uniform_distortion, uniform_step};
use headq::scheme::{
    BaseScheme, Family, Flush, MOST_LLOYD_BITS, Metric, Policy, Quantizer, RangeSource, Scheme, Scope, SideScales,
    ValueScheme,
};
use headq::transform::{DEVIATION_FLOOR, HeadTransform, range_factor};
use headq::{AttentionSite, Basis, HeadMoments, HeadqAttention, KeyStatistics, QuantizedCache};
use nalgebra::DMatrix;

/// Rows of one head: `[tokens][head_dim]`.
pub type Head = Vec<Vec<f64>>;

/// Schemes of every quantizer, side code and policy, for heads 16 wide.
pub const SCHEMES: &[&str] = &[
    "dense",
    "kivi-1(g=8,r=5)",
    "kivi-2(g=8,r=5)",
    "kivi-3(g=8,r=0)",
    "kivi-4(g=8,r=5,sinks=3)",
    "kivi-8(g=8,r=5)",
    "token-1(g=8,r=5)",
    "token-2(g=8,r=5,c=8)",
    "token-4(g=1,r=1)",
    "token-8(g=8,r=5,sinks=2,c=4)",
    "kivi-2(g=8,r=5)+query-pca(rank=4,bits=4)",
    "kivi-2(g=8,r=5)+query-pca(rank=4,bits=4,sign=-1)",
    "kivi-2(g=8,r=5)+query-pca-centered(rank=3,bits=2,scales=token)",
    "kivi-2(g=8,r=5)+score-optimal(rank=4,bits=3)",
    "kivi-2(g=8,r=5,sinks=4)+score-optimal(rank=5,bits=8,scope=query-head)",
    "token-2(g=8,r=5)+residual-pca(rank=2,bits=5)",
    "token-2(g=8,r=5)+random(rank=16,bits=8,scales=token)",
    "dense/token-2(g=8,r=5,c=8)",
    "kivi-2(g=8,r=5)/token-2(c=4)",
    "kivi-2(g=8,r=5,sinks=1)+query-pca(rank=4,bits=4)/token-3(c=8,g=4,r=9,sinks=2)",
    "kivi-2(g=8,r=5,center,range=0.85)",
    "token-2(g=8,r=5,center,sinks=2)",
    "grid-1(g=8,r=5)",
    "grid-2(g=8,r=5,c=1)",
    "grid-3(g=8,r=0,c=4,center,range=0.9)",
    "grid-8(g=8,r=5,center)",
    "grid-2(g=8,r=5,center)+score-optimal(rank=4,bits=3)/token-2(c=8)",
    "kivi-2(g=8,r=5,range=0.85,rounding=score-aware)",
    "kivi-3(g=8,r=5,sinks=2,rounding=score-aware,lambda=0.1,center)+score-optimal(rank=4,bits=3)/a2-2(c=8)",
    "grid-3(g=8,r=5,c=4,rounding=score-aware,center)",
    "grid-2(g=1,r=1,rounding=score-aware,lambda=0.5)",
    "klt-2(g=8,r=5)",
    "klt-1.5(g=8,r=0,sinks=0,range=1.25,meta=f32)/token-2(c=8)",
    "klt-4.5(g=8,r=5,sinks=1)+query-pca(rank=4,bits=4)",
    "klt-3(g=8,r=5,ranges=static)",
    "klt-1(g=1,r=3,sinks=0,range=0.9,ranges=static)+score-optimal(rank=4,bits=3,scope=query-head)",
    "klt-2(g=8,r=5,metric=fisher,ranges=lloyd)",
    "klt-4.5(g=8,r=0,sinks=1,ranges=lloyd)+query-pca(rank=4,bits=4)/klt-3(ranges=static)",
    "klt-1(g=8,r=5,metric=fisher)/klt-1.5(r=9)",
    "kivi-2(g=8,r=5,sinks=1)/klt-4(g=4,r=9,sinks=2,ranges=lloyd,meta=f32)",
    "dense/klt-2.5(g=8,r=5,ranges=lloyd)",
    "klt-2(g=8,r=5)/klt-2.5(ranges=static,metric=output)",
    "dense/klt-3(g=8,r=5,ranges=lloyd,metric=output)",
    "dense/channel-2(g=8,r=5)",
    "kivi-2(g=8,r=5)+query-pca(rank=4,bits=4)/channel-3(g=4,r=9,sinks=2,range=0.9)",
    "klt-2(g=8,r=5)+learned(rank=4,bits=3)",
    "klt-3(g=8,r=0,sinks=1,ranges=static)+learned(rank=2,bits=4)/klt-3(ranges=static)",
    "klt-4.5(g=8,r=5,ranges=lloyd)+learned(rank=4,bits=3,scales=token)/token-2(c=8)",
    "rotated-1(g=8,r=5)",
    "rotated-2(g=8,r=5,c=4,center)",
    "rotated-4(g=1,r=3,sinks=2)",
    "rotated-8(g=8,r=5)",
    "rotated-3(g=8,r=5)+query-pca(rank=4,bits=4,scope=query-head)/a2-3(c=8)",
    "dense/a2-2(g=8,r=5,c=8)",
    "kivi-2(g=8,r=0)/a2-4(g=4,r=0)",
    "kivi-2(g=8,r=5,sinks=3)+query-pca(rank=4,bits=4)/a2-2(c=8,g=6,r=7,sinks=1)",
    "kivi-2(g=8,r=5)/mse-2(c=8)",
    "kivi-2(g=8,r=5)/random-3(c=4)",
    "kivi-2(g=8,r=5)/recency-2(c=8,sinks=2)",
];

/// Heads of a `[1, heads, tokens, width]` tensor.
pub fn heads(x: &Tensor<4>) -> Vec<Head> {
    let [_, _, tokens, width] = x.dims();
    let flat: Vec<f32> = x.clone().try_into_vec_as().unwrap();
    let flat: Vec<f64> = flat.into_iter().map(f64::from).collect();
    flat.chunks(tokens * width).map(|head| head.chunks(width).map(<[f64]>::to_vec).collect()).collect()
}

pub fn tensor(heads: &[Head], device: &Device) -> Tensor<4> {
    let shape = [1, heads.len(), heads[0].len(), heads[0][0].len()];
    let flat: Vec<f32> = heads.iter().flatten().flatten().map(|&v| v as f32).collect();
    Tensor::from_data(TensorData::new(flat, shape), device)
}

pub fn normal(shape: [usize; 4], seed: u64, device: &Device) -> Tensor<4> {
    use rand::{RngExt, SeedableRng};
    // Not the device's generator, which all test threads share.
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| rng.sample(rand_distr::StandardNormal)).collect();
    Tensor::from_data(TensorData::new(data, shape), device)
}

/// Scale and zero of numbers that share a range, which is shrunk about its middle; as f16 unless they are `wide`.
fn scale_and_zero(x: &[f64], bits: u32, range: f64, wide: bool) -> (f64, f64) {
    let top = (1u32 << bits) - 1;
    let (low, high) = x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &v| (l.min(v), h.max(v)));
    let width = ((high as f32) - (low as f32)) * range as f32;
    let low = if range == 1.0 { low as f32 } else { ((high as f32) + (low as f32)) * 0.5 - width * 0.5 };
    let stored = |x: f32| if wide { f64::from(x) } else { f16::from_f32(x).to_f64() };
    (stored(width / top as f32), stored(low))
}

/// Width of the equal cells that divide a shrunk range, and the middle of the lowest.
fn cells(x: &[f64], bits: u32, range: f64, wide: bool) -> (f64, f64) {
    let (low, high) = x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &v| (l.min(v), h.max(v)));
    let width = (high - low) * range;
    let cell = width / f64::from(1u32 << bits);
    let stored = |x: f64| if wide { x } else { f16::from_f64(x).to_f64() };
    (stored(cell), stored((low + high) / 2.0 - width / 2.0 + cell / 2.0))
}

/// The nearest of the levels zero + code · scale.
fn nearest(v: f64, bits: u32, (scale, zero): (f64, f64)) -> f64 {
    let level = |c: u32| zero + f64::from(c) * scale;
    (0..1u32 << bits).map(level).min_by(|a, b| (a - v).abs().total_cmp(&(b - v).abs())).unwrap()
}

/// What numbers that share a range read back as: the range shrunk about its middle, f16 scale and zero, then the nearest level.
pub fn levels(x: &[f64], bits: u32, range: f64) -> Vec<f64> {
    let range = scale_and_zero(x, bits, range, false);
    x.iter().map(|&v| nearest(v, bits, range)).collect()
}

/// Each column of a block shares a range.
fn per_channel(block: &[Vec<f64>], bits: u32, range: f64) -> Head {
    let width = block[0].len();
    let columns: Vec<Vec<f64>> =
        (0..width).map(|c| levels(&block.iter().map(|r| r[c]).collect::<Vec<_>>(), bits, range)).collect();
    (0..block.len()).map(|t| (0..width).map(|c| columns[c][t]).collect()).collect()
}

/// Each row's groups of c channels share a range.
fn per_token(block: &[Vec<f64>], bits: u32, c: usize, range: f64) -> Head {
    block.iter().map(|row| row.chunks(c).flat_map(|part| levels(part, bits, range)).collect()).collect()
}

/// Means and scales of keys with no structure, `[1, kv_heads, width]`.
pub fn key_statistics(kv_heads: usize, width: usize) -> KeyStatistics {
    let row = |scale: f32, shift: f32| -> Vec<f32> {
        (0..kv_heads * width).map(|i| ((i * 7919 % 31) as f32 / 31.0 - 0.5) * scale + shift).collect()
    };
    // Second moments of vectors with no structure but that channels differ in size.
    let second = |head: usize, salt: usize| {
        let x = DMatrix::from_fn(2 * width, width, |i, j| {
            let noise = ((i * width + j + 1) * (7919 + 2 * salt + 64 * head) % 1009) as f64 / 504.5 - 1.0;
            noise * (1.0 + j as f64 / 4.0)
        });
        x.transpose() * &x / (2 * width) as f64
    };
    let moments = |salt: usize| {
        let of = move |head| HeadMoments {
            gradients: Some(second(head, salt + 2)),
            output: Some(second(head, salt + 3)),
            ..HeadMoments::new(second(head, salt), second(head, salt + 1))
        };
        (0..kv_heads).map(of).collect()
    };
    let statistics = |salt: usize, values| KeyStatistics {
        kv_heads,
        head_dim: width,
        mean: row(2.0, 0.3 * salt as f32),
        deviation: row(0.5, 1.0),
        rms: row(0.7, 1.2),
        moments: moments(salt),
        values,
        fits: Default::default(),
    };
    statistics(1, Some(Arc::new(statistics(4, None))))
}

/// What is learned of one head's transform: ρ, E and F.
#[derive(Debug, Clone)]
pub struct LearnedHead {
    pub clip: Vec<f32>,
    pub analysis: DMatrix<f64>,
    pub synthesis: DMatrix<f64>,
}

/// What a basis learned of the base quantizer of a KV head, nothing where it did not.
pub fn learned_head(basis: Option<&Basis>, layer: usize, head: usize, width: usize) -> LearnedHead {
    let floats = |x: TensorData| x.try_to_vec::<f32>().unwrap();
    let clip = basis.and_then(|b| b.base_clip_of(layer)).map(|c| floats(c)[head * width..(head + 1) * width].to_vec());
    let square = |x: TensorData| {
        let own = &floats(x)[head * width * width..][..width * width];
        DMatrix::from_row_iterator(width, width, own.iter().map(|&v| f64::from(v)))
    };
    let none = || [DMatrix::zeros(width, width), DMatrix::zeros(width, width)];
    let [analysis, synthesis] = basis.and_then(|b| b.base_transform_of(layer)).map_or_else(none, |x| x.map(square));
    LearnedHead { clip: clip.unwrap_or_else(|| vec![1.0; width]), analysis, synthesis }
}

/// A head's transform with D (I + E) D⁻¹ before the coder, and D (I + F) D⁻¹ behind it.
pub fn with_learned(head: HeadTransform, learned: &LearnedHead) -> HeadTransform {
    let (d, largest) = (head.spread.len(), head.spread[0]);
    let deviation = head.spread.map(|s| if largest > 0.0 { (s / largest).sqrt().max(DEVIATION_FLOOR) } else { 1.0 });
    let own = |x: &DMatrix<f64>| {
        let inverse = DMatrix::from_diagonal(&deviation.map(|v| 1.0 / v));
        DMatrix::from_diagonal(&deviation) * (DMatrix::identity(d, d) + x) * inverse
    };
    HeadTransform {
        analysis: &head.analysis * own(&learned.analysis).transpose(),
        synthesis: &head.synthesis * own(&learned.synthesis),
        ..head
    }
}

/// Coefficient by coefficient, each over the tokens of a block, and back.
fn transform_and_code(rows: &[Vec<f64>], base: &BaseScheme, moments: &HeadMoments, learned: &LearnedHead) -> Head {
    let head = with_learned(HeadTransform::fit(moments, base), learned);
    let (d, wide) = (rows[0].len(), base.meta == headq::scheme::Meta::F32);
    let y = |row: &[f64], i: usize| (0..d).map(|c| head.analysis[(c, i)] * row[c]).sum::<f64>();
    let mut read = vec![vec![0.0; d]; rows.len()];
    let coded: f64 = (0..d).filter(|i| head.bits[*i] > 0).map(|i| head.spread[i]).sum();
    let stored = coded / head.spread.sum();
    for (i, &bits) in head.bits.iter().enumerate().filter(|(_, bits)| **bits > 0) {
        let column: Vec<f64> = rows.iter().map(|row| y(row, i)).collect();
        let clip = f64::from(learned.clip[i]);
        let range = match base.ranges {
            RangeSource::Lloyd if bits <= MOST_LLOYD_BITS => {
                // Levels that keep the size of scores, where the metric is theirs.
                let table = lloyd_max(bits);
                let kept = if base.metric == Metric::Queries { (1.0 - table.distortion) * stored } else { 1.0 };
                let size = head.spread[i].sqrt() * f64::from(base.range) / kept * clip;
                let levels = &table.levels;
                for (row, y) in read.iter_mut().zip(&column) {
                    let nearest = levels.iter().map(|l| l * size);
                    let y = nearest.min_by(|a, b| (a - y).abs().total_cmp(&(b - y).abs())).unwrap();
                    (0..d).for_each(|c| row[c] += head.synthesis[(c, i)] * y);
                }
                continue;
            }
            RangeSource::Group | RangeSource::Lloyd => {
                let factor = f64::from(range_factor(bits)) * f64::from(base.range) * clip;
                cells(&column, bits, factor, wide)
            }
            RangeSource::Static => {
                // Steps that keep the size of scores, where the metric is theirs.
                let kept = if base.metric == Metric::Queries { (1.0 - uniform_distortion(bits)) * stored } else { 1.0 };
                let step = (uniform_step(bits) * head.spread[i].sqrt() * f64::from(base.range) / kept) as f32;
                let step = f64::from(step * learned.clip[i]);
                (step, -0.5 * f64::from((1u32 << bits) - 1) * step)
            }
        };
        for (row, y) in read.iter_mut().zip(column) {
            let y = nearest(y, bits, range);
            (0..d).for_each(|c| row[c] += head.synthesis[(c, i)] * y);
        }
    }
    read
}

/// M of H = C_q + λ·mean(diag C_q)·I = M D Mᵀ, unit upper triangular: the Cholesky factor of H from the last channel to the first.
pub fn upper_factor(c_q: &DMatrix<f64>, lambda: f64) -> DMatrix<f64> {
    let n = c_q.nrows();
    let h = c_q + DMatrix::identity(n, n) * (lambda * c_q.trace() / n as f64);
    let l = DMatrix::from_fn(n, n, |i, j| h[(n - 1 - i, n - 1 - j)]).cholesky().unwrap().l();
    DMatrix::from_fn(n, n, |i, j| l[(n - 1 - i, n - 1 - j)] / l[(n - 1 - j, n - 1 - j)])
}

/// Channel by channel of each token, errors passed on; `ranges` are scales and zeros of the channels.
fn pass_on(rows: &[Vec<f64>], bits: u32, ranges: &[(f64, f64)], m: &DMatrix<f64>) -> Head {
    let code = |row: &Vec<f64>| {
        let mut read: Vec<f64> = Vec::new();
        for (i, range) in ranges.iter().enumerate() {
            let errors: f64 = read.iter().enumerate().map(|(j, read)| m[(j, i)] * (row[j] - read)).sum();
            read.push(nearest(row[i] + errors, bits, *range));
        }
        read
    };
    rows.iter().map(code).collect()
}

/// One layer's codec, with the statistics above where the scheme needs them.
pub fn modules(
    scheme: &Scheme,
    basis: Option<&Basis>,
    kv_heads: usize,
    width: usize,
    device: &Device,
) -> HeadqAttention {
    let keys = key_statistics(kv_heads, width);
    HeadqAttention::calibrated(*scheme, basis, Some(&keys), 0, device)
}

/// A teacher-forced cache of one layer.
pub fn teacher_forced(
    scheme: &Scheme,
    basis: Option<&Basis>,
    kv_heads: usize,
    width: usize,
    device: &Device,
) -> QuantizedCache {
    QuantizedCache::of(vec![modules(scheme, basis, kv_heads, width, device)])
}

/// Each number to the nearest of the levels ±½Δ, ±3⁄2Δ, …, Δ from the root mean square of `spread` over c channels.
fn on_grid(row: &[f64], spread: &[f32], bits: u32, range: f64, c: usize) -> Vec<f64> {
    let half = 1i64 << (bits - 1);
    let parts = row.chunks(c).zip(spread.chunks(c));
    parts
        .flat_map(|(row, spread)| {
            let rms = (spread.iter().map(|&s| f64::from(s).powi(2)).sum::<f64>() / c as f64).sqrt();
            let step = f64::from((uniform_step(bits) * range * rms) as f32);
            let level = move |i: i64| (i as f64 + 0.5) * step;
            row.iter()
                .map(move |x| (-half..half).map(level).min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs())).unwrap())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Signed, Walsh–Hadamard by butterflies, the nearest Gaussian level of each c numbers over their f16 root mean square, and back.
/// Widths are powers of two here.
fn rotate_and_code(row: &[f64], bits: u32, c: usize) -> Vec<f64> {
    let d = row.len();
    let matrix = headq::rotation::rotation(d);
    let signs: Vec<f64> = (0..d).map(|i| matrix[i * d].signum()).collect();
    let transform = |x: &mut Vec<f64>| {
        let mut half = 1;
        while half < d {
            for start in (0..d).step_by(2 * half) {
                for i in start..start + half {
                    (x[i], x[i + half]) = (x[i] + x[i + half], x[i] - x[i + half]);
                }
            }
            half *= 2;
        }
        x.iter_mut().for_each(|v| *v /= (d as f64).sqrt());
    };
    let mut y: Vec<f64> = row.iter().zip(&signs).map(|(x, s)| x * s).collect();
    transform(&mut y);
    let mut read: Vec<f64> = y
        .chunks(c)
        .flat_map(|part| {
            let rms = (part.iter().map(|v| v * v).sum::<f64>() / c as f64).sqrt();
            let scale = f16::from_f64(rms).to_f64();
            part.iter()
                .map(|v| {
                    let levels = lloyd_max(bits).levels.iter().map(|l| l * scale);
                    levels.min_by(|a, b| (a - v).abs().total_cmp(&(b - v).abs())).unwrap()
                })
                .collect::<Vec<_>>()
        })
        .collect();
    transform(&mut read);
    read.iter().zip(&signs).map(|(x, s)| x * s).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// xᵀ M for M `[width][rank]`.
fn project(x: &[f64], m: &[Vec<f64>]) -> Vec<f64> {
    (0..m[0].len()).map(|r| x.iter().zip(m).map(|(x, row)| x * row[r]).sum()).collect()
}

fn flushed(flush: &Flush, t: usize) -> usize {
    (((t + 1) as i64 - flush.residual as i64 - flush.sinks as i64).max(0) as usize / flush.group) * flush.group
}

/// A coded head with everything that a query may read: `base[j]`, `side[j]` exist for coded tokens.
pub struct CodedHead {
    pub base: Vec<Option<Vec<f64>>>,
    pub side: Vec<Option<Vec<f64>>>,
}

fn blocks(flush: &Flush, tokens: usize) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
    let n = flushed(flush, tokens - 1);
    (0..n / flush.group).map(move |i| flush.sinks + i * flush.group..flush.sinks + (i + 1) * flush.group)
}

/// One head's keys as the cache holds them: less μ under `center`.
pub fn shifted(scheme: &Scheme, keys: &Head, head: usize) -> Head {
    let width = keys[0].len();
    if !scheme.key.is_some_and(|k| k.base.center) {
        return keys.clone();
    }
    let mean = key_statistics(head + 1, width).mean;
    keys.iter().map(|k| k.iter().zip(&mean[head * width..]).map(|(k, m)| k - f64::from(*m)).collect()).collect()
}

/// Codes of one head's shifted keys. `w` is the encoder of the side head, if there is one.
pub fn code_keys(scheme: &Scheme, keys: &Head, head: usize, w: Option<&Head>, learned: &LearnedHead) -> CodedHead {
    let mut coded = CodedHead { base: vec![None; keys.len()], side: vec![None; keys.len()] };
    let Some(key) = &scheme.key else { return coded };
    let width = keys[0].len();
    for block in blocks(&key.base.flush, keys.len()) {
        let rows = &keys[block.clone()];
        let (bits, range, c) = (key.base.bits.ceil(), f64::from(key.base.range), key.base.channels.unwrap_or(width));
        let statistics = key_statistics(head + 1, width);
        let moments = &statistics.moments[head];
        let spread = if key.base.center { &statistics.deviation } else { &statistics.rms };
        let spread = &spread[head * width..];
        let factor = key.base.lambda().map(|lambda| upper_factor(&moments.queries, lambda));
        let column = |i: usize| rows.iter().map(|row| row[i]).collect::<Vec<_>>();
        let base = match (key.base.quantizer, factor) {
            (Quantizer::Kivi, None) => per_channel(rows, bits, range),
            (Quantizer::Kivi, Some(m)) => {
                let ranges: Vec<_> = (0..width).map(|i| scale_and_zero(&column(i), bits, range, false)).collect();
                pass_on(rows, bits, &ranges, &m)
            }
            (Quantizer::Token, _) => per_token(rows, bits, c, range),
            (Quantizer::Grid, None) => rows.iter().map(|row| on_grid(row, spread, bits, range, c)).collect(),
            (Quantizer::Grid, Some(m)) => {
                // The lowest level is what a number far below reads as.
                let lowest = on_grid(&vec![-1e9; width], spread, bits, range, c);
                let step = |low: f64| -low / (f64::from(1u32 << (bits - 1)) - 0.5);
                let ranges: Vec<_> = lowest.into_iter().map(|low| (step(low), low)).collect();
                pass_on(rows, bits, &ranges, &m)
            }
            (Quantizer::Rotated, _) => rows.iter().map(|row| rotate_and_code(row, bits, c)).collect(),
            (Quantizer::Klt, _) => transform_and_code(rows, &key.base, moments, learned),
        };
        let side = key.side.map(|side| {
            let z: Head = rows
                .iter()
                .zip(&base)
                .map(|(k, b)| project(&k.iter().zip(b).map(|(k, b)| k - b).collect::<Vec<_>>(), w.unwrap()))
                .collect();
            let read = match side.scales {
                SideScales::Group => per_channel(&z, side.bits, 1.0),
                SideScales::Token => per_token(&z, side.bits, side.rank, 1.0),
            };
            read.into_iter()
                .map(|row| row.into_iter().map(|v| v * side.sign.factor()).collect::<Vec<_>>())
                .collect::<Vec<_>>()
        });
        for (i, j) in block.enumerate() {
            coded.base[j] = Some(base[i].clone());
            coded.side[j] = side.as_ref().map(|s| s[i].clone());
        }
    }
    coded
}

/// U or W of one side head: `[head_dim][rank]`.
pub fn matrix(basis: &Basis, flat: TensorData, head: usize) -> Head {
    let flat: Vec<f32> = flat.try_to_vec().unwrap();
    let size = basis.head_dim * basis.rank;
    flat[head * size..(head + 1) * size].chunks(basis.rank).map(|r| r.iter().map(|&v| f64::from(v)).collect()).collect()
}

/// What query t of a head sees: probabilities, the change of each score, and the output, dense and as read from the cache.
pub struct Reading {
    pub p: Vec<f64>,
    /// log p, also where p is too small for a number.
    pub log_p: Vec<f64>,
    pub delta: Vec<f64>,
    /// Probabilities as read from the cache.
    pub p_hat: Vec<f64>,
    pub output: Vec<f64>,
    /// Σ_j p_tj v̂_j: values from the cache, dense probabilities.
    pub readout: Vec<f64>,
    pub dense_output: Vec<f64>,
    /// E6: Σ_j p_tj² ‖v̂_j − v_j‖² / d over coded values, with dense probabilities.
    pub diagonal: f64,
}

fn is_coded(flush: Option<&Flush>, t: usize, j: usize) -> bool {
    flush.is_some_and(|f| j >= f.sinks && j < f.sinks + flushed(f, t))
}

fn softmax(s: &[f64]) -> Vec<f64> {
    let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = s.iter().map(|v| (v - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|v| v / sum).collect()
}

fn squared_distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

/// Values of one head as read from codes. `mass(j)` is the attention that token j got before its group was coded.
fn code_values(
    value: &ValueScheme,
    flush: &Flush,
    head: usize,
    v: &Head,
    mass: &dyn Fn(usize) -> f64,
) -> Vec<Option<Vec<f64>>> {
    let c = value.channels.unwrap_or(v[0].len());
    let mut read = vec![None; v.len()];
    for block in blocks(flush, v.len()) {
        let at = |bits: u32| per_token(&v[block.clone()], bits, c, value.range.into());
        let start = block.start;
        if value.policy == Policy::Channel {
            let base = value.as_keys(None).unwrap();
            let back = per_channel(&v[block.clone()], base.bits.ceil(), value.range.into());
            block.clone().zip(back).for_each(|(j, row)| read[j] = Some(row));
            continue;
        }
        if let Some(base) = value.as_keys(None) {
            let statistics = key_statistics(head + 1, v[0].len());
            let values = statistics.values.as_ref().unwrap();
            let mean: Vec<f64> = values.mean[head * v[0].len()..].iter().map(|m| f64::from(*m)).collect();
            let shifted: Head =
                v[block.clone()].iter().map(|row| row.iter().zip(&mean).map(|(v, m)| v - m).collect()).collect();
            let back = {
                let learned = learned_head(None, 0, head, shifted[0].len());
                transform_and_code(&shifted, &base, &values.moments[head], &learned)
            };
            let whole = |row: Vec<f64>| row.iter().zip(&mean).map(|(v, m)| v + m).collect();
            block.clone().zip(back).for_each(|(j, row)| read[j] = Some(whole(row)));
            continue;
        }
        if value.policy == Policy::Token {
            block.clone().zip(at(value.bits.ceil())).for_each(|(j, row)| read[j] = Some(row));
            continue;
        }
        let mean = at(value.bits.ceil());
        let weight = |j: usize| match value.policy {
            Policy::Token | Policy::Channel | Policy::Klt => unreachable!("values that tokens share were coded above"),
            Policy::A2 => mass(j),
            Policy::Mse => squared_distance(&mean[j - start], &v[j]),
            Policy::Recency => j as f64,
            // There is no definition to compare with but the one that is written down: SplitMix64 of position, layer 0 and head.
            Policy::Random => {
                let state = [0u64, head as u64].iter().fold(j as u64, |state, next| {
                    let mut z = state.wrapping_add((next + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                    z ^ (z >> 31)
                });
                (state >> 40) as f64
            }
        };
        let mut order: Vec<usize> = block.clone().collect();
        order.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)).then(a.cmp(&b)));
        let (more, less) = (at(value.bits.ceil() + 1), at(value.bits.ceil() - 1));
        for (place, &j) in order.iter().enumerate() {
            read[j] = Some(if place < order.len() / 2 { more[j - start].clone() } else { less[j - start].clone() });
        }
    }
    read
}

/// One query's scores over the tokens from `first` on: dense, their changes, and both softmaxes.
struct Scores {
    first: usize,
    dense: Vec<f64>,
    delta: Vec<f64>,
    p: Vec<f64>,
    p_hat: Vec<f64>,
}

/// Attention of every query head and token, by E9 and E10: `[heads][tokens]`.
pub fn read(
    scheme: &Scheme,
    basis: Option<&Basis>,
    site: &AttentionSite,
    q: &[Head],
    k: &[Head],
    v: &[Head],
) -> Vec<Vec<Reading>> {
    let group = q.len() / k.len();
    let key_flush = scheme.key.as_ref().map(|k| &k.base.flush);
    let value_flush = scheme.value.map(|s| s.flush(scheme.key.as_ref()));
    let scores: Vec<Vec<Scores>> = (0..q.len())
        .map(|h| {
            let kv = h / group;
            let side_head = scheme.side().map_or(kv, |s| if s.scope == Scope::QueryHead { h } else { kv });
            let u = basis.map(|b| matrix(b, b.decoder_of(site.layer), side_head));
            let w = basis.map(|b| matrix(b, b.encoder_of(site.layer), side_head));
            let held = shifted(scheme, &k[kv], kv);
            let learned = learned_head(basis, site.layer, kv, k[kv][0].len());
            let keys = code_keys(scheme, &held, kv, w.as_ref(), &learned);
            (0..q[h].len())
                .map(|t| {
                    let first = site.window.map_or(0, |w| (t + 1).saturating_sub(w));
                    let (mut dense, mut delta) = (Vec::new(), Vec::new());
                    for j in first..=t {
                        dense.push(dot(&q[h][t], &k[kv][j]) * site.scale);
                        delta.push(if is_coded(key_flush, t, j) {
                            let mut change = dot(&q[h][t], keys.base[j].as_ref().unwrap()) - dot(&q[h][t], &held[j]);
                            if let (Some(u), Some(z)) = (&u, &keys.side[j]) {
                                change += dot(&project(&q[h][t], u), z);
                            }
                            change * site.scale
                        } else {
                            0.0
                        });
                    }
                    let p = softmax(&dense);
                    let p_hat = softmax(&dense.iter().zip(&delta).map(|(s, x)| s + x).collect::<Vec<_>>());
                    Scores { first, dense, delta, p, p_hat }
                })
                .collect()
        })
        .collect();
    let values: Vec<Vec<Option<Vec<f64>>>> = (0..v.len())
        .map(|kv| {
            let (Some(value), Some(flush)) = (&scheme.value, &value_flush) else { return vec![None; v[kv].len()] };
            // w_j: every query head of the group, every query that came before the one that reads token j from codes.
            let mass = |j: usize| -> f64 {
                let rows = scores[kv * group..(kv + 1) * group].iter().flat_map(|head| head.iter().enumerate());
                rows.filter(|(t, s)| j >= s.first && j <= *t && !is_coded(Some(flush), *t, j))
                    .map(|(_, s)| s.p_hat[j - s.first].powi(2))
                    .sum()
            };
            code_values(value, flush, kv, &v[kv], &mass)
        })
        .collect();
    let reading = |h: usize, t: usize, s: &Scores| -> Reading {
        let (v, values) = (&v[h / group], &values[h / group]);
        let (width, tokens) = (v[0].len(), s.first..=t);
        let from_codes = |j: usize| is_coded(value_flush.as_ref(), t, j);
        let mix = |p: &[f64], coded: bool| -> Vec<f64> {
            let row = |j: usize| if coded && from_codes(j) { values[j].as_ref().unwrap() } else { &v[j] };
            (0..width).map(|c| p.iter().zip(tokens.clone()).map(|(p, j)| p * row(j)[c]).sum()).collect()
        };
        let squared_error =
            |j: usize| if from_codes(j) { squared_distance(values[j].as_ref().unwrap(), &v[j]) } else { 0.0 };
        let diagonal =
            s.p.iter().zip(tokens.clone()).map(|(p, j)| p * p * squared_error(j)).sum::<f64>() / width as f64;
        let max = s.dense.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = max + s.dense.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
        Reading {
            output: mix(&s.p_hat, true),
            readout: mix(&s.p, true),
            dense_output: mix(&s.p, false),
            p: s.p.clone(),
            p_hat: s.p_hat.clone(),
            log_p: s.dense.iter().map(|s| s - log_sum).collect(),
            delta: s.delta.clone(),
            diagonal,
        }
    };
    let rows = scores.iter().enumerate();
    rows.map(|(h, rows)| rows.iter().enumerate().map(|(t, s)| reading(h, t, s)).collect()).collect()
}

/// A basis with no structure, tied or not.
pub fn basis(scheme: &Scheme, layers: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Option<Basis> {
    let side = scheme.side()?;
    let stats: Vec<_> = (0..layers)
        .map(|layer| {
            let rows = |n: usize, salt: usize| -> Vec<f32> {
                (0..n * 40 * head_dim)
                    .map(|i| (((i * 7919 + salt * 104_729 + layer) % 1009) as f32 / 504.5 - 1.0).powi(3))
                    .collect()
            };
            let mut s = headq::LayerStats::new(heads, kv_heads, head_dim);
            s.add(&rows(heads, 1), &rows(kv_heads, 2), &rows(kv_heads, 3), &rows(kv_heads, 4));
            s
        })
        .collect();
    if side.family != Family::Learned {
        return Some(Basis::fit(&stats, side.family, side.rank, side.scope, 11).unwrap());
    }
    let fitted = Basis::fit(&stats, Family::ScoreOptimal, side.rank, side.scope, 11).unwrap();
    let numbers = |count: usize, salt: usize| (0..count).map(move |i| ((i * 7919 + salt) % 1009) as f32 / 504.5 - 1.0);
    let square = |salt| numbers(layers * kv_heads * head_dim * head_dim, salt).map(|x| 0.15 * x.powi(3)).collect();
    let trained = TrainedSide {
        bits: side.bits,
        scales: side.scales,
        clip: None,
        base_clip: Some(numbers(layers * kv_heads * head_dim, 5).map(|x| 1.1 + 0.4 * x).collect()),
        base_transform: Some(TrainedTransform { analysis: square(17), synthesis: square(401) }),
    };
    Some(Basis { family: Family::Learned, trained: Some(trained), ..fitted })
}
