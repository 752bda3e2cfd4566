//! A cache written from the definitions: one query, one key and one channel at a time, in f64.

#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use burn::tensor::{Device, Tensor, TensorData};
use half::f16;
use headq::scheme::{Flush, Quantizer, Scheme, Scope, SideScales};
use headq::{AttentionSite, Basis};

/// Rows of one head: `[tokens][head_dim]`.
pub type Head = Vec<Vec<f64>>;

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

/// What numbers that share a range read back as: f16 scale and zero, then the nearest level.
pub fn levels(x: &[f64], bits: u32) -> Vec<f64> {
    let top = (1u32 << bits) - 1;
    let (low, high) = x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &v| (l.min(v), h.max(v)));
    let zero = f16::from_f64(low).to_f64();
    let scale = f16::from_f32(((high as f32) - (low as f32)) / top as f32).to_f64();
    let nearest = |v: f64| {
        let level = |c: u32| zero + f64::from(c) * scale;
        (0..=top).map(level).min_by(|a, b| (a - v).abs().total_cmp(&(b - v).abs())).unwrap()
    };
    x.iter().map(|&v| nearest(v)).collect()
}

/// Each column of a block shares a range.
fn per_channel(block: &[Vec<f64>], bits: u32) -> Head {
    let width = block[0].len();
    let columns: Vec<Vec<f64>> =
        (0..width).map(|c| levels(&block.iter().map(|r| r[c]).collect::<Vec<_>>(), bits)).collect();
    (0..block.len()).map(|t| (0..width).map(|c| columns[c][t]).collect()).collect()
}

/// Each row's groups of c channels share a range.
fn per_token(block: &[Vec<f64>], bits: u32, c: usize) -> Head {
    block.iter().map(|row| row.chunks(c).flat_map(|part| levels(part, bits)).collect()).collect()
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

/// Codes of one head's keys. `w` is the encoder of the side head, if there is one.
pub fn code_keys(scheme: &Scheme, keys: &Head, w: Option<&Head>) -> CodedHead {
    let mut coded = CodedHead { base: vec![None; keys.len()], side: vec![None; keys.len()] };
    let Some(key) = &scheme.key else { return coded };
    let width = keys[0].len();
    for block in blocks(&key.base.flush, keys.len()) {
        let rows = &keys[block.clone()];
        let base = match key.base.quantizer {
            Quantizer::Kivi => per_channel(rows, key.base.bits),
            Quantizer::Token => per_token(rows, key.base.bits, key.base.channels.unwrap_or(width)),
        };
        let side = key.side.map(|side| {
            let z: Head = rows
                .iter()
                .zip(&base)
                .map(|(k, b)| project(&k.iter().zip(b).map(|(k, b)| k - b).collect::<Vec<_>>(), w.unwrap()))
                .collect();
            let read = match side.scales {
                SideScales::Group => per_channel(&z, side.bits),
                SideScales::Token => per_token(&z, side.bits, side.rank),
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
    pub output: Vec<f64>,
    pub dense_output: Vec<f64>,
    /// E6: Σ_j p_tj² ‖v̂_j − v_j‖² / d over coded values, with dense probabilities.
    pub diagonal: f64,
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
    (0..q.len())
        .map(|h| {
            let kv = h / group;
            let side_head = scheme.side().map_or(kv, |s| if s.scope == Scope::QueryHead { h } else { kv });
            let u = basis.map(|b| matrix(b, b.decoder_of(site.layer), side_head));
            let w = basis.map(|b| matrix(b, b.encoder_of(site.layer), side_head));
            let keys = code_keys(scheme, &k[kv], w.as_ref());
            let value_flush = scheme.value.map(|s| s.flush(scheme.key.as_ref()));
            let mut values: Vec<Option<Vec<f64>>> = vec![None; v[kv].len()];
            if let (Some(value), Some(flush)) = (&scheme.value, &value_flush) {
                let c = value.channels.unwrap_or(v[kv][0].len());
                for block in blocks(flush, v[kv].len()) {
                    for (j, row) in block.clone().zip(per_token(&v[kv][block], value.bits, c)) {
                        values[j] = Some(row);
                    }
                }
            }
            let is_coded = |flush: Option<&Flush>, t: usize, j: usize| {
                flush.is_some_and(|f| j >= f.sinks && j < f.sinks + flushed(f, t))
            };
            (0..q[h].len())
                .map(|t| {
                    let first = site.window.map_or(0, |w| (t + 1).saturating_sub(w));
                    let (mut dense, mut delta) = (Vec::new(), Vec::new());
                    for j in first..=t {
                        let s = dot(&q[h][t], &k[kv][j]) * site.scale;
                        dense.push(s);
                        delta.push(if is_coded(scheme.key.as_ref().map(|k| &k.base.flush), t, j) {
                            let mut read = dot(&q[h][t], keys.base[j].as_ref().unwrap()) * site.scale;
                            if let (Some(u), Some(z)) = (&u, &keys.side[j]) {
                                read += dot(&project(&q[h][t], u), z) * site.scale;
                            }
                            read - s
                        } else {
                            0.0
                        });
                    }
                    let softmax = |s: &[f64]| {
                        let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                        let e: Vec<f64> = s.iter().map(|v| (v - max).exp()).collect();
                        let sum: f64 = e.iter().sum();
                        e.into_iter().map(|v| v / sum).collect::<Vec<_>>()
                    };
                    let p = softmax(&dense);
                    let p_hat = softmax(&dense.iter().zip(&delta).map(|(s, x)| s + x).collect::<Vec<_>>());
                    let width = v[kv][0].len();
                    let mix = |p: &[f64], coded: bool| -> Vec<f64> {
                        (0..width)
                            .map(|c| {
                                p.iter()
                                    .zip(first..)
                                    .map(|(p, j)| {
                                        let from_codes = coded && is_coded(value_flush.as_ref(), t, j);
                                        p * if from_codes { values[j].as_ref().unwrap()[c] } else { v[kv][j][c] }
                                    })
                                    .sum()
                            })
                            .collect()
                    };
                    let squared_error = |j: usize| -> f64 {
                        if !is_coded(value_flush.as_ref(), t, j) {
                            return 0.0;
                        }
                        values[j].as_ref().unwrap().iter().zip(&v[kv][j]).map(|(a, b)| (a - b).powi(2)).sum()
                    };
                    let diagonal =
                        p.iter().zip(first..).map(|(p, j)| p * p * squared_error(j)).sum::<f64>() / width as f64;
                    let max = dense.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let log_sum = max + dense.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
                    let log_p = dense.iter().map(|s| s - log_sum).collect();
                    Reading { output: mix(&p_hat, true), dense_output: mix(&p, false), p, log_p, delta, diagonal }
                })
                .collect()
        })
        .collect()
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
    Some(Basis::fit(&stats, side.family, side.rank, side.scope, 11).unwrap())
}
