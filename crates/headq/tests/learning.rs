//! Trainable corrections: gradients against finite differences, the straight-through rule against its definition, forward values
//! against inference, and training against closed forms.
#![allow(clippy::unwrap_used, missing_docs)]

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use headq::basis::{Basis, TrainedSide, captured_share, fit_head};
use headq::correction::Parts;
use headq::learn::{LayerLoss, Loss, Sample, logits_kl};
use headq::quant::{BaseQuantizer, side_read_back};
use headq::scheme::{Family, KeyScheme, Scheme, SideScales, SideScheme};
use headq::{AttentionSite, Correction, HeadqAttention, Moments};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

const HEADS: usize = 4;
const KV: usize = 2;
const TOKENS: usize = 150;
const D: usize = 8;

fn normal<const N: usize>(shape: [usize; N], seed: u64) -> Tensor<N> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| rng.sample(StandardNormal)).collect();
    Tensor::from_data(TensorData::new(data, shape), &Device::flex())
}

fn key(scheme: &str) -> KeyScheme {
    scheme.parse::<Scheme>().unwrap().key.unwrap()
}

fn sample(loss: Loss, key: &KeyScheme, window: Option<usize>, dtype: FloatDType) -> Sample {
    let site = AttentionSite { layer: 0, start: 0, scale: 1.0 / (D as f64).sqrt(), window };
    let q = normal([1, HEADS, TOKENS, D], 1).mul_scalar(2.0).cast(dtype);
    let k = normal([1, KV, TOKENS, D], 2).cast(dtype);
    Sample::new(loss, &BaseQuantizer::new(key.base), &site, &q, &k)
}

fn host<const N: usize>(x: Tensor<N>) -> Vec<f64> {
    let x = if x.is_autodiff() { x.inner() } else { x };
    x.into_data_as::<f64>().try_to_vec().unwrap()
}

/// Parameters of 2 KV heads or 4 query heads, rank 3, with clip factors below 1.
fn parts(side_heads: usize, width: usize, dtype: FloatDType) -> Parts {
    Parts {
        decoder: normal([side_heads, D, 3], 3).mul_scalar(0.3).cast(dtype),
        encoder: Some(normal([side_heads, D, 3], 4).mul_scalar(0.3).cast(dtype)),
        clip: Some(
            normal([side_heads, 1, width], 5).abs().mul_scalar(-0.1).add_scalar(0.9).clamp(0.3, 1.0).cast(dtype),
        ),
    }
}

fn tracked(x: &Tensor<3>) -> Tensor<3> {
    x.clone().autodiff().require_grad()
}

/// Central differences of `loss` by some elements of `x`, beside `gradient`.
fn check_gradient(name: &str, x: &Tensor<3>, gradient: Tensor<3>, h: f64, loss: impl Fn(Tensor<3>) -> f64) {
    let (values, gradient, shape) = (host(x.clone()), host(gradient), x.dims());
    let largest = gradient.iter().fold(0.0f64, |a, g| a.max(g.abs()));
    assert!(largest > 0.0, "{name} has a gradient");
    for at in (0..values.len()).step_by((values.len() / 7).max(1)) {
        let nudged = |by: f64| {
            let mut values = values.clone();
            values[at] += by;
            loss(Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), DType::F64)))
        };
        let difference = (nudged(h) - nudged(-h)) / (2.0 * h);
        assert!((gradient[at] - difference).abs() < 1e-6 * largest, "{name}[{at}]: {} and {difference}", gradient[at]);
    }
}

/// Stands for the side quantizer: smooth in z and ρ, and saturating.
fn smooth(z: Tensor<4>, clip: Tensor<3>) -> Tensor<4> {
    let [heads, _, width] = clip.dims();
    let clip = clip.reshape([1, heads, 1, width]);
    (z / clip.clone()).tanh() * clip
}

#[test]
fn gradients_agree_with_central_differences_where_the_quantizer_is_smooth() {
    let key = key("kivi-2(g=8,r=4,sinks=1,meta=f32)+learned(rank=3,bits=3)");
    for (loss, window) in [(Loss::Score, None), (Loss::Fisher, None), (Loss::Kl, None), (Loss::Kl, Some(60))] {
        let sample = sample(loss, &key, window, FloatDType::F64);
        // One basis for each KV head, or for each query head.
        for side_heads in [KV, HEADS] {
            let value = |u: Tensor<3>, w: Tensor<3>, c: Tensor<3>| -> LayerLoss {
                let [_, d, r] = w.dims();
                let residual = headq::repeat_kv(sample.residual().clone(), side_heads / KV);
                sample.loss_of(u, smooth(residual.matmul(w.reshape([1, side_heads, d, r])), c))
            };
            let p = parts(side_heads, 3, FloatDType::F64);
            let (u, w, c) = (p.decoder, p.encoder.unwrap(), p.clip.unwrap());
            let sum = |l: LayerLoss| l.by_head.iter().sum::<f64>();
            let (tu, tw, tc) = (tracked(&u), tracked(&w), tracked(&c));
            let made = value(tu.clone(), tw.clone(), tc.clone());
            assert!((host(made.total.clone())[0] - made.by_head.iter().sum::<f64>()).abs() < 1e-12);
            let gradients = made.total.backward();
            let name = |part: &str| format!("{part} of {loss}, {side_heads} heads");
            let gradient = |x: &Tensor<3>| x.grad(&gradients).unwrap();
            check_gradient(&name("U"), &u, gradient(&tu), 1e-5, |x| sum(value(x, w.clone(), c.clone())));
            check_gradient(&name("W"), &w, gradient(&tw), 1e-5, |x| sum(value(u.clone(), x, c.clone())));
            check_gradient(&name("clip"), &c, gradient(&tc), 1e-5, |x| sum(value(u.clone(), w.clone(), x)));
            // Tied: one matrix on both sides, which has both gradients.
            let (tu, tc) = (tracked(&u), tracked(&c));
            let gradients = value(tu.clone(), tu.clone(), tc.clone()).total.backward();
            let gradient = |x: &Tensor<3>| x.grad(&gradients).unwrap();
            check_gradient(&name("tied U"), &u, gradient(&tu), 1e-5, |x| sum(value(x.clone(), x, c.clone())));
            check_gradient(&name("tied clip"), &c, gradient(&tc), 1e-5, |x| sum(value(u.clone(), u.clone(), x)));
        }
    }
}

#[test]
fn logits_kl_agrees_with_central_differences() {
    let dense = normal([5, 7], 1).cast(FloatDType::F64);
    let read = normal([1, 5, 7], 2).cast(FloatDType::F64);
    let value = |x: Tensor<3>| logits_kl(dense.clone(), x.reshape([5, 7])).sum();
    let t = tracked(&read);
    let gradients = value(t.clone()).backward();
    check_gradient("logits", &read, t.grad(&gradients).unwrap(), 1e-5, |x| host(value(x))[0]);
    assert!(host(logits_kl(dense.clone(), dense.clone())).iter().all(|kl| kl.abs() < 1e-12));
}

/// The host's one-pass gradients are those of the tensor operations.
#[test]
fn both_ways_to_a_loss_agree() {
    for scheme in [
        "kivi-2(g=8,r=4)+learned(rank=3,bits=3)",
        "token-2(g=8,r=4,sinks=3)+learned(rank=3,bits=4,scales=token,scope=query-head)",
    ] {
        let key = key(scheme);
        let side = key.side.unwrap();
        let side_heads = if scheme.contains("query-head") { HEADS } else { KV };
        let width = headq::quant::clip_width(side.scales, 3);
        for loss in Loss::ALL {
            let made: Vec<(LayerLoss, [Vec<f64>; 3])> = [FloatDType::F32, FloatDType::F64]
                .into_iter()
                .map(|dtype| {
                    let sample = sample(loss, &key, None, dtype);
                    // Codes are those of f32 in both.
                    let p = parts(side_heads, width, FloatDType::F32);
                    let wide = |x: Tensor<3>| tracked(&x.cast(dtype));
                    let (u, z) = (wide(p.decoder), normal([1, side_heads, sample.residual().dims()[2], 3], 9));
                    let z = z.cast(dtype).autodiff().require_grad();
                    let made = sample.loss_of(u.clone(), z.clone());
                    let gradients = made.total.backward();
                    let all = [host(u.grad(&gradients).unwrap()), host(z.grad(&gradients).unwrap()), Vec::new()];
                    (made, all)
                })
                .collect();
            for (a, b) in made[0].0.by_head.iter().zip(&made[1].0.by_head) {
                assert!((a / b - 1.0).abs() < 1e-5, "{loss}: {a} and {b}");
            }
            for (a, b) in made[0].1.iter().zip(&made[1].1) {
                let largest = b.iter().fold(0.0f64, |m, x| m.max(x.abs()));
                a.iter().zip(b).for_each(|(a, b)| assert!((a - b).abs() < 2e-5 * largest, "{loss}: {a} and {b}"));
            }
        }
    }
}

/// Element by element: ẑ, ∂ẑ/∂z and ∂ẑ/∂ρ as `quant` defines them.
#[test]
fn the_straight_through_rule_is_its_definition() {
    for scales in [SideScales::Group, SideScales::Token] {
        let side = SideScheme { scales, ..key("kivi-2+learned(rank=3,bits=2)").side.unwrap() };
        let width = headq::quant::clip_width(scales, 3);
        let (group, tokens) = (8, 16);
        let z = normal([1, 2, tokens, 3], 7);
        let clip = parts(2, width, FloatDType::F32).clip.unwrap();
        let (tz, tc) = (z.clone().autodiff().require_grad(), tracked(&clip));
        let weights = normal([1, 2, tokens, 3], 8);
        let meta = headq::scheme::Meta::F32;
        let read = side_read_back(&side, group, meta, tz.clone(), Some(tc.clone()));
        let inference = side_read_back(&side, group, meta, z.clone(), Some(clip.clone()));
        assert_eq!(read.clone().inner().to_data(), inference.to_data(), "forward is inference, bit for bit");
        let gradients = (read * weights.clone()).sum().backward();
        let (dz, dc) = (host(tz.grad(&gradients).unwrap()), host(tc.grad(&gradients).unwrap()));
        let (z, clip, weights, read) = (host(z), host(clip), host(weights), host(inference));
        let mut expected = vec![0.0; dc.len()];
        let at = |head: usize, token: usize, c: usize| (head * tokens + token) * 3 + c;
        let shared = |token: usize, c: usize| -> Vec<(usize, usize)> {
            match scales {
                SideScales::Group => (0..group).map(|i| (token / group * group + i, c)).collect(),
                SideScales::Token => (0..3).map(|c| (token, c)).collect(),
            }
        };
        for head in 0..2 {
            for token in 0..tokens {
                for c in 0..3 {
                    let own: Vec<f64> = shared(token, c).into_iter().map(|(t, c)| z[at(head, t, c)]).collect();
                    let low = own.iter().copied().fold(f64::INFINITY, f64::min);
                    let whole = own.iter().copied().fold(f64::NEG_INFINITY, f64::max) - low;
                    let slot = head * width + if width == 1 { 0 } else { c };
                    let (rho, i) = (clip[slot], at(head, token, c));
                    let (scale, zero) = (rho * whole / 3.0, low + (1.0 - rho) * whole / 2.0);
                    let code = ((z[i] - zero) / scale).round().clamp(0.0, 3.0);
                    assert!((read[i] - (zero + code * scale)).abs() < 1e-5);
                    let inside = z[i] >= zero && z[i] <= zero + 3.0 * scale;
                    assert!((dz[i] - if inside { weights[i] } else { 0.0 }).abs() < 1e-6);
                    let slope = match inside {
                        true => (code - (z[i] - zero) / scale) * whole / 3.0,
                        false => (code / 3.0 - 0.5) * whole,
                    };
                    expected[slot] += slope * weights[i];
                }
            }
        }
        for (a, b) in dc.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-4, "{scales}: {dc:?} and {expected:?}");
        }
    }
}

#[test]
fn unclipped_factors_change_no_code() {
    let side = key("kivi-2+learned(rank=3,bits=3)").side.unwrap();
    let z = normal([2, 2, 24, 3], 7);
    let meta = headq::scheme::Meta::F16;
    let plain = side_read_back(&side, 8, meta, z.clone(), None);
    let ones = side_read_back(&side, 8, meta, z, Some(Tensor::ones([2, 1, 3], &Device::flex())));
    assert_eq!(plain.to_data(), ones.to_data());
}

/// A learned basis with clip factors: the module reads the same codes inside and outside an autodiff graph.
#[test]
fn a_learned_codec_forwards_its_inference_values() {
    let scheme: Scheme = "kivi-2(g=8,r=4)+learned(rank=3,bits=3)".parse().unwrap();
    let p = parts(KV, 3, FloatDType::F32);
    let floats = |x: Tensor<3>| -> Vec<f32> { x.into_data().try_to_vec().unwrap() };
    let basis = Basis {
        family: Family::Learned,
        scope: scheme.side().unwrap().scope,
        layers: 1,
        side_heads: KV,
        head_dim: D,
        rank: 3,
        decoder: floats(p.decoder),
        encoder: Some(floats(p.encoder.unwrap())),
        trained: Some(TrainedSide {
            bits: 3,
            scales: SideScales::Group,
            clip: Some(floats(p.clip.unwrap())),
            base_clip: None,
            base_transform: None,
        }),
    };
    let keys = normal([1, KV, 32, D], 2);
    let plain = HeadqAttention::new(scheme, Some(&basis), 0, &Device::flex()).code_keys(keys.clone());
    let module = HeadqAttention::new(scheme, Some(&basis), 0, &Device::flex().autodiff());
    let graph = module.code_keys(keys.autodiff().require_grad());
    assert_eq!(graph.side.clone().unwrap().inner().to_data(), plain.side.unwrap().to_data(), "bit for bit");
    let gradients = graph.side.unwrap().square().sum().backward();
    let parts = module.correction().unwrap().parts();
    for (name, x) in [("W", parts.encoder.unwrap()), ("clip", parts.clip.unwrap())] {
        assert!(host(x.grad(&gradients).expect(name)).iter().any(|g| *g != 0.0), "{name}");
    }
    let other: Scheme = "kivi-2(g=8,r=4)+learned(rank=3,bits=4)".parse().unwrap();
    let error = basis.check(other.side().unwrap(), 1, HEADS, KV, D).unwrap_err().to_string();
    assert!(error.contains("side bits 3") && error.contains("need 4"), "{error}");
}

/// One loss by the host's kernels with the base code of the sample, and by tensor operations with a base code that is trained.
#[test]
fn a_trained_base_quantizer_begins_as_the_one_that_it_was() {
    for scheme in
        ["kivi-2(g=8,r=4,sinks=1)+learned(rank=3,bits=3)", "token-3(c=4,g=8,r=4,range=0.9)+learned(rank=3,bits=3)"]
    {
        let key = key(scheme);
        for loss in Loss::ALL {
            let sample = sample(loss, &key, None, FloatDType::F32);
            let correction = Correction::of(&key, parts(KV, 3, FloatDType::F32));
            let clip = Tensor::<3>::ones([KV, 1, 1], &Device::flex());
            let base = |clip: Tensor<3>| BaseQuantizer::new(key.base).with_clip(clip);
            let (fixed, through) = (sample.loss(&correction), sample.loss_through(&base(clip.clone()), &correction));
            for (a, b) in fixed.by_head.iter().zip(&through.by_head) {
                assert!((a / b - 1.0).abs() < 1e-4, "{scheme}, {loss}: {a} and {b}");
            }
            // Heads have nothing to do with one another.
            let half = Tensor::<3>::from_data([[[1.0f32]], [[0.7]]], &Device::flex());
            let other = sample.loss_through(&base(half), &correction);
            assert!((other.by_head[0] / through.by_head[0] - 1.0).abs() < 1e-5);
            assert!((other.by_head[1] / through.by_head[1] - 1.0).abs() > 1e-3, "{scheme}, {loss}");
        }
    }
}

/// Clip factors are the scheme's `range`, for each head.
#[test]
fn a_clip_factor_of_the_base_quantizer_is_a_range() {
    let keys = normal([1, KV, 32, D], 2);
    let read = |scheme: &str| BaseQuantizer::new(key(scheme).base).read_back(keys.clone());
    let clip = Tensor::<3>::from_data([[[0.8f32]], [[0.6]]], &Device::flex());
    let clipped = BaseQuantizer::new(key("kivi-4(g=8,r=0,meta=f32)").base).with_clip(clip).read_back(keys.clone());
    for (head, range) in [0.8, 0.6].into_iter().enumerate() {
        let expected = read(&format!("kivi-4(g=8,r=0,range={range},meta=f32)")).narrow(1, head, 1);
        let off = host((clipped.clone().narrow(1, head, 1) - expected).abs());
        // Rounding differs by an ulp, which may turn a tie.
        assert!(off.iter().filter(|x| **x > 1e-5).count() <= off.len() / 100, "range {range}");
    }
}

/// ∂k̂/∂ρ of each head as `quant` defines it, element by element; and what losses make of it.
#[test]
fn gradients_reach_the_base_quantizers_clip_factors() {
    let (group, tokens) = (8, 32);
    let key = key("kivi-2(g=8,r=4,meta=f32)+learned(rank=3,bits=3)");
    let clip = Tensor::<3>::from_data([[[0.9f32]], [[0.8]]], &Device::flex());
    let base = |clip: Tensor<3>| BaseQuantizer::new(key.base).with_clip(clip);
    let (keys, weights) = (normal([1, KV, tokens, D], 2), normal([1, KV, tokens, D], 8));
    let leaf = tracked(&clip);
    let gradients = (base(leaf.clone()).read_back(keys.clone()) * weights.clone()).sum().backward();
    let found = host(leaf.grad(&gradients).unwrap());
    let (keys, weights) = (host(keys), host(weights));
    for (head, rho) in [0.9, 0.8].into_iter().enumerate() {
        let mut expected = 0.0;
        for (first, channel) in (0..tokens).step_by(group).flat_map(|first| (0..D).map(move |c| (first, c))) {
            let at = |i: usize| (head * tokens + first + i) * D + channel;
            let own: Vec<f64> = (0..group).map(|i| keys[at(i)]).collect();
            let low = own.iter().copied().fold(f64::INFINITY, f64::min);
            let whole = own.iter().copied().fold(f64::NEG_INFINITY, f64::max) - low;
            let (scale, zero) = (rho * whole / 3.0, low + (1.0 - rho) * whole / 2.0);
            for (i, x) in own.iter().enumerate() {
                let code = (x - zero) / scale;
                let slope = match (0.0..=3.0).contains(&code) {
                    true => (code.round() - code) * whole / 3.0,
                    false => (code.clamp(0.0, 3.0) / 3.0 - 0.5) * whole,
                };
                expected += slope * weights[at(i)];
            }
        }
        assert!((found[head] - expected).abs() < 1e-3, "head {head}: {} and {expected}", found[head]);
    }
    let clip = clip.cast(FloatDType::F64);
    for loss in Loss::ALL {
        let sample = sample(loss, &key, None, FloatDType::F64);
        let p = parts(KV, 3, FloatDType::F64);
        let with = |u: Tensor<3>| Correction::of(&key, Parts { decoder: u, ..p.clone() });
        let (u, c) = (tracked(&p.decoder), tracked(&clip));
        let gradients = sample.loss_through(&base(c.clone()), &with(u.clone())).total.backward();
        let value = |x: Tensor<3>| sample.loss_through(&base(clip.clone()), &with(x)).by_head.iter().sum::<f64>();
        check_gradient(&format!("U of {loss}"), &p.decoder, u.grad(&gradients).unwrap(), 1e-5, value);
        let own = host(c.grad(&gradients).unwrap());
        assert!(own.iter().all(|g| g.is_finite() && *g != 0.0), "{loss}: {own:?}");
    }
}

#[test]
fn a_tied_basis_stays_orthonormal() {
    let key = key("kivi-2(g=8,r=4)+learned(rank=3,bits=3)");
    let parts = Parts { decoder: normal([2, D, 3], 3), encoder: None, clip: None };
    let u = Correction::of(&key, parts).retracted().decoder();
    let product = u.clone().swap_dims(1, 2).matmul(u.clone());
    let off = host(product - Tensor::<2>::eye(3, &Device::flex()).unsqueeze());
    assert!(off.iter().all(|x| x.abs() < 1e-6));
    // An orthonormal matrix is its own retraction.
    let again = Correction::of(&key, Parts { decoder: u.clone(), encoder: None, clip: None }).retracted().decoder();
    assert!(host(again - u).iter().all(|x| x.abs() < 1e-6));
}

/// Gaussian queries and keys with uneven spectra, no side quantization: from any start, gradient descent on the score loss comes to the
/// closed form, which takes queries and residuals for independent.
#[test]
fn training_reaches_the_score_optimal_closed_form() {
    use burn::optim::{AdamConfig, Optimizer};
    let (rank, tokens) = (2, 1024);
    let spectrum = Tensor::<4>::from_data([[[[1.0f32, 0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1]]]], &Device::flex());
    let rows = |seed: u64| {
        let mix = normal([1, 1, D, D], seed + 10) * spectrum.clone();
        normal([1, 1, tokens, D], seed).matmul(mix.swap_dims(2, 3))
    };
    // Channels of a residual have the widths of the keys' channels.
    let (q, k) = (rows(1), normal([1, 1, tokens, D], 2) * spectrum.clone().flip([3]).square());
    let key = key("kivi-2(g=8,r=0)+learned(rank=2,bits=3)");
    let site = AttentionSite { layer: 0, start: 0, scale: 1.0 / (D as f64).sqrt(), window: None };
    let sample = Sample::new(Loss::Score, &BaseQuantizer::new(key.base), &site, &q, &k);
    let moments = |x: &Tensor<4>| {
        let mut m = Moments::new(D);
        m.add(&x.clone().into_data().try_to_vec::<f32>().unwrap());
        m
    };
    let (mq, me) = (moments(&q), moments(sample.residual()));
    let tensor = |x: &nalgebra::DMatrix<f64>| {
        let data: Vec<f32> = x.transpose().iter().map(|v| *v as f32).collect();
        Tensor::<3>::from_data(TensorData::new(data, [1, D, rank]), &Device::flex())
    };
    let encode = |w: Tensor<3>| sample.residual().clone().matmul(w.unsqueeze());
    let loss = |u: &Tensor<3>, w: &Tensor<3>| sample.loss_of(u.clone(), encode(w.clone())).by_head[0];
    let closed = fit_head(Family::ScoreOptimal, rank, &mq, &me, 0).unwrap();
    let best = loss(&tensor(&closed.decoder), &tensor(closed.encoder.as_ref().unwrap()));
    for family in [Family::Random, Family::QueryPca] {
        let start = tensor(&fit_head(family, rank, &mq, &me, 3).unwrap().decoder);
        let (mut u, mut w) = (start.clone(), start);
        assert!(loss(&u, &w) > 1.05 * best, "{family} has something to learn");
        let adam = AdamConfig::new().build();
        let (mut su, mut sw) = (None, None);
        let steps = 500;
        for step in 0..steps {
            let (tu, tw) = (tracked(&u), tracked(&w));
            let gradients = sample.loss_of(tu.clone(), encode(tw.clone())).total.backward();
            let rate = 0.03 * (1.0 - f64::from(step) / f64::from(steps));
            (u, su) = adam.step(rate, u, tu.grad(&gradients).unwrap(), su);
            (w, sw) = adam.step(rate, w, tw.grad(&gradients).unwrap(), sw);
        }
        let share = captured_share(
            &mq,
            &me,
            &headq::basis::HeadBasis {
                decoder: nalgebra::DMatrix::from_row_slice(D, rank, &host(u.clone())),
                encoder: Some(nalgebra::DMatrix::from_row_slice(D, rank, &host(w.clone()))),
            },
        );
        let closed = captured_share(&mq, &me, &closed).unwrap();
        let left = (1.0 - share.unwrap()) / (1.0 - closed);
        assert!(loss(&u, &w) < 1.02 * best, "{family}: {} of {best}", loss(&u, &w));
        assert!(left < 1.02, "{family} leaves {left} of what the closed form leaves");
    }
}
