//! Score-aware rounding: channels are rounded one after the other, each after the errors of those before it have been passed on.
//!
//! A key's error ε = k − k̂ costs the expected squared score error `E[(q·ε)²]` = εᵀC_qε. With H = C_q + λ·mean(diag C_q)·I = M D Mᵀ, M
//! unit *upper* triangular, εᵀHε = Σ_i D_i (ε_i + Σ_{j<i} M_ji ε_j)²: component i knows only channels up to i. Rounding channel i of
//! k_i + Σ_{j<i} M_ji (k_j − k̂_j) to k̂_i makes the bracket that channel's own, fresh rounding error, so that what is left is Σ_i D_i
//! times its square instead of Σ_i H_ii times it, and D_i ≤ H_ii (Hadamard). This is the feedback of GPTQ (arXiv:2210.17323) and QuIP's
//! LDLQ (arXiv:2307.13304) with keys for weights and queries for inputs; it stores nothing.

use burn::tensor::{Tensor, TensorData};
use nalgebra::DMatrix;
use rayon::prelude::*;

use crate::kernels::{on_host, vectorized};

/// M of H = C_q + λ·mean(diag C_q)·I = M D Mᵀ, unit upper triangular; the identity where all queries are zero.
///
/// # Shapes
/// `c_q`: `[head_dim, head_dim]`, as the result
pub fn factor(c_q: &DMatrix<f64>, lambda: f64) -> DMatrix<f64> {
    let n = c_q.nrows();
    let mut rest = c_q + DMatrix::identity(n, n) * (lambda * c_q.trace() / n as f64);
    let least = rest.diagonal().max() * f64::EPSILON;
    let mut m = DMatrix::identity(n, n);
    for i in (0..n).rev() {
        let d = rest[(i, i)];
        // What rounding has made of nothing.
        if d.is_nan() || d <= least {
            continue;
        }
        for j in 0..i {
            m[(j, i)] = rest[(j, i)] / d;
        }
        for j in 0..i {
            for k in 0..i {
                rest[(j, k)] -= m[(j, i)] * d * m[(k, i)];
            }
        }
    }
    m
}

/// Codes of channels with uniform levels zero + code · scale, 0 ≤ code ≤ top, and the errors that were passed on.
#[derive(Debug, Clone)]
pub(crate) struct Rounded {
    /// `[batch, heads, tokens, width]`
    pub codes: Tensor<4>,
    /// What was rounded: the keys with the errors of earlier channels. `[batch, heads, tokens, width]`
    pub corrected: Tensor<4>,
}

/// Rounds channel after channel, in the order of their indices.
///
/// # Shapes
/// - `x`: `[batch, heads, groups · G, width]`
/// - `scale`, `zero`: `[batch, heads, groups, width]`; a scale of 0 has code 0 alone
/// - `factor`: M of each head, `[1, heads, width, width]`
pub(crate) fn round(x: Tensor<4>, scale: Tensor<4>, zero: Tensor<4>, top: f64, factor: &Tensor<4>) -> Rounded {
    if on_host(&x) {
        round_on_host(x, scale, zero, top as f32, factor)
    } else {
        round_by_channel(x, scale, zero, top, factor)
    }
}

/// As tensor operations, one channel of all tokens at a time.
fn round_by_channel(x: Tensor<4>, scale: Tensor<4>, zero: Tensor<4>, top: f64, factor: &Tensor<4>) -> Rounded {
    let [b, h, n, d] = x.dims();
    let groups = scale.dims()[2];
    let split = [b, h, groups, n / groups, d];
    let (x, scale, zero) = (x.reshape(split), scale.unsqueeze_dim::<5>(3), zero.unsqueeze_dim::<5>(3));
    let used = scale.clone().not_equal_scalar(0.0).float().cast(x.dtype());
    let divisor = scale.clone().mask_fill(scale.clone().equal_scalar(0.0), 1.0);
    let factor = factor.clone().cast(x.dtype());
    let mut corrected = x.clone();
    let mut codes = Vec::with_capacity(d);
    for i in 0..d {
        let of = |t: &Tensor<5>| t.clone().narrow(4, i, 1);
        let code = ((of(&corrected) - of(&zero)) / of(&divisor)).round().clamp(0.0, top) * of(&used);
        let error = of(&x) - (code.clone() * of(&scale) + of(&zero));
        codes.push(code);
        if i + 1 < d {
            // Row i of M right of the diagonal.
            let row = factor.clone().narrow(2, i, 1).narrow(3, i + 1, d - i - 1).reshape([1, h, 1, 1, d - i - 1]);
            let later = corrected.clone().narrow(4, i + 1, d - i - 1) + error * row;
            corrected = Tensor::cat(vec![corrected.narrow(4, 0, i + 1), later], 4);
        }
    }
    Rounded { codes: Tensor::cat(codes, 4).reshape([b, h, n, d]), corrected: corrected.reshape([b, h, n, d]) }
}

/// Ranges and M of one head's group.
struct Channels<'a> {
    scale: &'a [f32],
    zero: &'a [f32],
    top: f32,
    /// `[width, width]`
    factor: &'a [f32],
}

/// As loops over the tokens of each group, which lie beside each other.
fn round_on_host(x: Tensor<4>, scale: Tensor<4>, zero: Tensor<4>, top: f32, factor: &Tensor<4>) -> Rounded {
    let (shape @ [_, h, n, d], groups) = (x.dims(), scale.dims()[2]);
    let device = x.device();
    let host = |x: Tensor<4>| -> Vec<f32> { x.into_data().try_to_vec().expect("f32 on the host, as on_host says") };
    let (mut codes, scale, zero, factor) = (host(x), host(scale), host(zero), host(factor.clone()));
    let mut corrected = vec![0.0; codes.len()];
    let size = n / groups * d;
    codes.par_chunks_mut(size).zip(corrected.par_chunks_mut(size)).enumerate().for_each(|(at, (x, corrected))| {
        let head = at / groups % h;
        let channels = Channels {
            scale: &scale[at * d..(at + 1) * d],
            zero: &zero[at * d..(at + 1) * d],
            top,
            factor: &factor[head * d * d..(head + 1) * d * d],
        };
        round_group(x, corrected, &channels);
    });
    let tensor = |data| Tensor::from_data(TensorData::new(data, shape), &device);
    Rounded { codes: tensor(codes), corrected: tensor(corrected) }
}

/// Puts codes in the place of a group's keys `[tokens, width]`.
fn round_group(x: &mut [f32], corrected: &mut [f32], channels: &Channels) {
    let d = channels.scale.len();
    let tokens = x.len() / d;
    // Channel by channel: what is to be rounded, then its error.
    let mut error = vec![0.0f32; d * tokens];
    let mut line = vec![0.0f32; tokens];
    for i in 0..d {
        line.iter_mut().enumerate().for_each(|(t, to)| *to = x[t * d + i]);
        pass_on(&error[..i * tokens], &mut line, &channels.factor[i..], d);
        let (scale, zero) = (channels.scale[i], channels.zero[i]);
        for (t, to) in line.iter().enumerate() {
            let code =
                if scale == 0.0 { 0.0 } else { ((to - zero) / scale).round_ties_even().clamp(0.0, channels.top) };
            corrected[t * d + i] = *to;
            error[i * tokens + t] = x[t * d + i] - (code * scale + zero);
            x[t * d + i] = code;
        }
    }
}

/// Adds M_ji times the errors of channel j, `[channels, tokens]`, for each channel j before i; `column` begins at M_0i.
fn pass_on(errors: &[f32], line: &mut [f32], column: &[f32], stride: usize) {
    vectorized!(|errors: &'a [f32], line: &'a mut [f32], column: &'a [f32], stride: usize| -> () {
        let tokens = line.len();
        for (errors, m) in errors.chunks_exact(tokens).zip(column.iter().step_by(stride)) {
            for (to, error) in line.iter_mut().zip(errors) {
                *to += m * error;
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::quant::BaseQuantizer;
    use crate::scheme::BaseScheme;
    use crate::stats::{HeadMoments, KeyStatistics};

    /// XXᵀ of an X of independent entries whose rows differ in size: any spectrum, no structure.
    fn second(width: usize, rank: usize, seed: u64) -> DMatrix<f64> {
        let x: Vec<f32> = crate::normal([width * rank], seed, &Device::flex()).try_into_vec_as().unwrap();
        let x = DMatrix::from_fn(width, rank, |i, j| f64::from(x[i * rank + j]) * (1.0 + (i * 5 % 7) as f64));
        &x * x.transpose() / rank as f64
    }

    fn statistics(queries: &[DMatrix<f64>]) -> KeyStatistics {
        let width = queries[0].nrows();
        let moments = |q: &DMatrix<f64>| HeadMoments::new(q.clone(), DMatrix::identity(width, width));
        let all = vec![1.0; queries.len() * width];
        KeyStatistics {
            kv_heads: queries.len(),
            head_dim: width,
            mean: vec![0.5; all.len()],
            deviation: all.clone(),
            rms: all,
            moments: queries.iter().map(moments).collect(),
            values: None,
            fits: Default::default(),
        }
    }

    fn quantizer(scheme: &str, queries: &[DMatrix<f64>], device: &Device) -> BaseQuantizer {
        BaseQuantizer::calibrated(scheme.parse::<BaseScheme>().unwrap(), &statistics(queries), 0, device)
    }

    /// Mean of εᵀC_qε over the tokens of all heads.
    fn score_error(x: &Tensor<4>, read: Tensor<4>, queries: &[DMatrix<f64>]) -> f64 {
        let [_, heads, n, d] = x.dims();
        let e: Vec<f32> = (x.clone() - read).try_into_vec_as().unwrap();
        let of = |(i, e): (usize, &[f32])| {
            let e = nalgebra::DVector::from_iterator(d, e.iter().map(|&v| f64::from(v)));
            e.dot(&(&queries[i / n % heads] * &e))
        };
        e.chunks(d).enumerate().map(of).sum::<f64>() / (e.len() / d) as f64
    }

    #[test]
    fn the_factor_is_upper_triangular_and_leaves_less_than_the_diagonal() {
        for (rank, lambda) in [(12, 1e-6), (12, 0.01), (3, 0.01), (1, 0.5), (12, 100.0)] {
            let c_q = second(12, rank, 1);
            let h = &c_q + DMatrix::identity(12, 12) * (lambda * c_q.trace() / 12.0);
            let m = factor(&c_q, lambda);
            let inverse = m.clone().try_inverse().unwrap();
            let d = &inverse * &h * inverse.transpose();
            for i in 0..12 {
                assert_eq!(m[(i, i)], 1.0);
                assert!((0..i).all(|j| m[(i, j)] == 0.0));
                assert!((0..12).all(|j| i == j || d[(i, j)].abs() < 1e-9 * h.trace()), "rank {rank}, {lambda}");
                assert!(d[(i, i)] > 0.0 && d[(i, i)] <= h[(i, i)] * (1.0 + 1e-12));
            }
        }
        assert_eq!(factor(&DMatrix::zeros(5, 5), 0.01), DMatrix::identity(5, 5));
        let uncorrelated = DMatrix::from_diagonal(&nalgebra::DVector::from_vec(vec![4.0, 0.0, 1.0]));
        assert_eq!(factor(&uncorrelated, 0.01), DMatrix::identity(3, 3));
    }

    #[test]
    fn score_error_is_never_above_that_of_the_nearest_levels() {
        let device = Device::flex();
        for seed in 0..6 {
            let queries = [second(16, 16, seed), second(16, 3, 100 + seed)];
            let x = crate::normal([1, 2, 1024, 16], 200 + seed, &device);
            for scheme in
                ["kivi-2(g=32", "kivi-3(g=32", "kivi-4(g=128", "kivi-2(g=32,range=0.85", "grid-2(g=32", "grid-4(g=32"]
            {
                let error = |rest: &str| {
                    let read = quantizer(&format!("{scheme}{rest})"), &queries, &device).read_back(x.clone());
                    score_error(&x, read, &queries)
                };
                let nearest = error("");
                for lambda in ["1", "0.1", "0.01"] {
                    let aware = error(&format!(",rounding=score-aware,lambda={lambda}"));
                    assert!(aware < nearest, "{scheme}, seed {seed}, lambda {lambda}: {aware} and {nearest}");
                }
            }
        }
    }

    /// With levels so fine that nothing is clipped, fresh errors are uniform, Δ²/12 each: Σ D_i Δ_i²/12 remains of Σ H_ii Δ_i²/12.
    #[test]
    fn only_fresh_errors_remain() {
        let device = Device::flex();
        let c_q = second(12, 4, 3);
        let (lambda, x) = (0.02, crate::normal([1, 1, 4096, 12], 5, &device) * 0.5);
        let h = &c_q + DMatrix::identity(12, 12) * (lambda * c_q.trace() / 12.0);
        let inverse = factor(&c_q, lambda).try_inverse().unwrap();
        let fresh = (&inverse * &h * inverse.transpose()).diagonal();
        let read = |rest: &str| {
            let scheme = format!("grid-6(g=64{rest})");
            quantizer(&scheme, std::slice::from_ref(&c_q), &device).read_back(x.clone())
        };
        let step = crate::gaussian::uniform_step(6);
        let aware = score_error(&x, read(",rounding=score-aware,lambda=0.02"), std::slice::from_ref(&h));
        let nearest = score_error(&x, read(""), std::slice::from_ref(&h));
        let expected = |weights: f64| weights * step * step / 12.0;
        assert!((nearest / expected(h.trace()) - 1.0).abs() < 0.05, "{nearest} {}", expected(h.trace()));
        assert!((aware / expected(fresh.sum()) - 1.0).abs() < 0.05, "{aware} {}", expected(fresh.sum()));
        assert!(aware < 0.5 * nearest);
    }

    #[test]
    fn loops_and_tensor_operations_agree() {
        let device = Device::flex();
        let (b, h, groups, g, d) = (2, 3, 4, 8, 10);
        let x = crate::normal([b, h, groups * g, d], 1, &device);
        let scale = crate::normal([b, h, groups, d], 2, &device).abs().clamp_min(0.3);
        // Some ranges are empty.
        let scale = scale.clone().mask_fill(scale.greater_elem(1.5), 0.0);
        let zero = crate::normal([b, h, groups, d], 3, &device) - 1.5;
        let m: Vec<f32> = (0..h)
            .flat_map(|i| {
                factor(&second(d, d, i as u64), 0.01).transpose().iter().map(|&v| v as f32).collect::<Vec<_>>()
            })
            .collect();
        let m = Tensor::from_data(TensorData::new(m, [1, h, d, d]), &device);
        let loops = round_on_host(x.clone(), scale.clone(), zero.clone(), 3.0, &m);
        let operations = round_by_channel(x, scale, zero, 3.0, &m);
        // Numbers, not bits: zeros have either sign.
        let numbers = |x: Tensor<4>| x.try_into_vec_as::<f32>().unwrap();
        assert_eq!(numbers(loops.codes), numbers(operations.codes));
        assert_eq!(numbers(loops.corrected), numbers(operations.corrected));
    }

    #[test]
    fn gradients_are_those_of_the_identity_where_what_is_rounded_lies_in_range() {
        let device = Device::flex();
        let queries = [second(6, 6, 1)];
        for scheme in ["kivi-2(g=8,range=0.6,rounding=score-aware)", "grid-1(g=8,range=0.5,rounding=score-aware)"] {
            let x = crate::normal([1, 1, 16, 6], 2, &device);
            let tracked = x.clone().autodiff().require_grad();
            let read = quantizer(scheme, &queries, &device.clone().autodiff()).read_back(tracked.clone());
            let plain = quantizer(scheme, &queries, &device).read_back(x.clone());
            assert_eq!(read.clone().inner().into_data(), plain.clone().into_data(), "bit for bit");
            let gradient = tracked.grad(&(read * 2.0).sum().backward()).unwrap();
            let gradient: Vec<f32> = gradient.try_into_vec_as().unwrap();
            let (x, read): (Vec<f32>, Vec<f32>) = (x.try_into_vec_as().unwrap(), plain.try_into_vec_as().unwrap());
            // From the definition: a number that is rounded to a level within half a step of it was not clipped.
            let m = factor(&queries[0], f64::from(crate::scheme::DEFAULT_LAMBDA));
            let mut seen = [0; 2];
            for (t, (row, read)) in x.chunks(6).zip(read.chunks(6)).enumerate() {
                for i in 0..6 {
                    let passed: f64 = (0..i).map(|j| m[(j, i)] * f64::from(row[j] - read[j])).sum();
                    let rounded = f64::from(row[i]) + passed;
                    let found = gradient[t * 6 + i];
                    assert!(found == 0.0 || found == 2.0);
                    seen[usize::from(found != 0.0)] += 1;
                    let column: Vec<f64> = x.chunks(6).skip(t / 8 * 8).take(8).map(|r| f64::from(r[i])).collect();
                    let (low, high) =
                        column.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
                    let (middle, half) = match scheme.starts_with("kivi") {
                        true => ((low + high) / 2.0, 0.6 * (high - low) / 2.0),
                        false => (0.0, 0.5 * crate::gaussian::uniform_step(1)),
                    };
                    let beyond = (rounded - middle).abs() - half;
                    // But where rounding of scale and zero to halves decides.
                    assert!(beyond.abs() < 4e-3 || (beyond < 0.0) == (found != 0.0), "{scheme}: {beyond} {found}");
                }
            }
            assert!(seen[0] > 5 && seen[1] > 5, "{scheme}: {seen:?}");
        }
    }
}
