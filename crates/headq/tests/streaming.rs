//! Token by token, all at once, and the definition agree (E9, E10).

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use burn::tensor::{Device, Tensor};
use common::{SCHEMES, basis, heads, modules, normal, read, teacher_forced};
use headq::scheme::{Flush, Scheme};
use headq::{Attention, AttentionSite, DenseAttention, DeviceName, QuantizedCache};

const D: usize = 16;

fn site(start: usize, window: Option<usize>) -> AttentionSite {
    AttentionSite { layer: 0, start, scale: 1.0 / (D as f64).sqrt(), window }
}

/// Prompt lengths 1, R−1, R, R+G−1, R+G, 3G+7.
fn lengths(scheme: &Scheme) -> Vec<usize> {
    let f = scheme.key.map(|k| k.base.flush).or(scheme.value.map(|v| v.flush(None))).unwrap_or(Flush {
        group: 8,
        residual: 5,
        sinks: 0,
    });
    let (g, r) = (f.group, f.residual);
    [1, r.saturating_sub(1), r, r + g - 1, r + g, 3 * g + 7].into_iter().filter(|&n| n > 0).collect()
}

fn worst(a: &Tensor<4>, b: &Tensor<4>) -> f32 {
    let scale: f32 = b.clone().abs().max().into_scalar();
    let difference: f32 = (a.clone() - b.clone()).abs().max().into_scalar();
    difference / scale.max(1e-6)
}

/// Feeds a prompt of `prompt` tokens and then the rest one by one.
fn stream(
    scheme: Scheme,
    basis: Option<&headq::Basis>,
    window: Option<usize>,
    qkv: &[Tensor<4>; 3],
    prompt: usize,
) -> Tensor<4> {
    let device = qkv[0].device();
    let kv_heads = qkv[1].dims()[1];
    let mut cache = QuantizedCache::streaming_of(vec![modules(&scheme, basis, kv_heads, D, &device)]);
    let total = qkv[0].dims()[2];
    let mut outputs = Vec::new();
    let mut start = 0;
    while start < total {
        let n = if start == 0 { prompt } else { 1 };
        let [q, k, v] = qkv.clone().map(|x| x.narrow(2, start, n));
        outputs.push(cache.attend(&site(start, window), q, k, v));
        start += n;
    }
    Tensor::cat(outputs, 2)
}

#[test]
fn token_by_token_and_teacher_forced_agree_for_every_quantizer() {
    let device = Device::flex();
    for scheme in SCHEMES {
        let scheme: Scheme = scheme.parse().unwrap();
        for (heads, kv_heads, window) in [(4, 4, None), (6, 2, None), (6, 2, Some(11)), (4, 1, Some(3))] {
            let basis = basis(&scheme, 1, heads, kv_heads, D);
            for prompt in lengths(&scheme) {
                let total = prompt + 19;
                let qkv = [
                    normal([2, heads, total, D], 1, &device),
                    normal([2, kv_heads, total, D], 2, &device) + 0.5,
                    normal([2, kv_heads, total, D], 3, &device),
                ];
                let [q, k, v] = qkv.clone();
                let mut whole = teacher_forced(&scheme, basis.as_ref(), kv_heads, D, &device);
                let whole = whole.attend(&site(0, window), q, k, v);
                for first in [1, prompt] {
                    let streamed = stream(scheme, basis.as_ref(), window, &qkv, first);
                    let worst = worst(&streamed, &whole);
                    assert!(
                        worst < 1e-5,
                        "{scheme}, {heads}/{kv_heads} heads, window {window:?}, prompt {first}: {worst:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn long_texts_cross_tiles() {
    let device = Device::flex();
    for (scheme, window) in [
        ("kivi-2(g=8,r=5,sinks=3)+score-optimal(rank=4,bits=3)/token-2(c=4,g=16,r=40)", None),
        ("kivi-2(g=96,r=64)+query-pca(rank=4,bits=4)", Some(150)),
        ("token-2(g=1,r=0)", None),
        ("grid-3(g=8,r=5,center)/a2-2(c=8,g=32,r=20)", None),
        ("rotated-2(g=16,r=5)/a2-3(g=16,r=100,sinks=2)", Some(130)),
        ("dense/a2-2(g=200,r=0)", None),
        ("klt-2(g=16,r=40)/token-2(c=4)", None),
        ("klt-1.5(g=8,r=5,ranges=static)", Some(130)),
        ("dense/channel-2(g=16,r=40)", Some(130)),
        ("dense/klt-2(g=16,r=40,metric=output)", None),
        ("kivi-2(g=16,r=5,rounding=score-aware)", None),
    ] {
        let scheme: Scheme = scheme.parse().unwrap();
        let basis = basis(&scheme, 1, 4, 2, D);
        let qkv = [
            normal([1, 4, 301, D], 4, &device),
            normal([1, 2, 301, D], 5, &device),
            normal([1, 2, 301, D], 6, &device),
        ];
        let [q, k, v] = qkv.clone();
        let whole = teacher_forced(&scheme, basis.as_ref(), 2, D, &device).attend(&site(0, window), q, k, v);
        assert!(worst(&stream(scheme, basis.as_ref(), window, &qkv, 1), &whole) < 1e-5, "{scheme}");
    }
}

#[test]
fn the_cache_reads_what_the_definition_says() {
    for (name, device) in DeviceName::present() {
        reads_what_the_definition_says(&name, &device);
    }
}

fn reads_what_the_definition_says(name: &DeviceName, device: &Device) {
    for scheme in SCHEMES {
        let scheme: Scheme = scheme.parse().unwrap();
        for window in [None, Some(9)] {
            let basis = basis(&scheme, 1, 4, 2, D);
            let (q, k, v) =
                (normal([1, 4, 45, D], 7, device), normal([1, 2, 45, D], 8, device), normal([1, 2, 45, D], 9, device));
            let site = site(0, window);
            let expected = read(&scheme, basis.as_ref(), &site, &heads(&q), &heads(&k), &heads(&v));
            let expected: Vec<_> =
                expected.into_iter().map(|h| h.into_iter().map(|r| r.output).collect::<Vec<_>>()).collect();
            let found = teacher_forced(&scheme, basis.as_ref(), 2, D, device).attend(&site, q, k, v);
            let worst = worst(&found, &common::tensor(&expected, device));
            assert!(worst < 2e-5, "{name}: {scheme}, window {window:?}: {worst:e}");
        }
    }
}

#[test]
fn a_dense_scheme_is_dense_attention_and_burns_own_attention() {
    let device = Device::flex();
    for window in [None, Some(13)] {
        let (q, k, v) =
            (normal([2, 6, 40, D], 1, &device), normal([2, 3, 40, D], 2, &device), normal([2, 3, 40, D], 3, &device));
        let ours = QuantizedCache::teacher_forced(Scheme::DENSE, None, 1, &device).attend(
            &site(0, window),
            q.clone(),
            k.clone(),
            v.clone(),
        );
        let burn = DenseAttention::new().attend(&site(0, window), q, k, v);
        assert!(worst(&ours, &burn) < 1e-5);
    }
}

#[test]
fn a_prompt_shorter_than_a_window_and_a_group_is_dense() {
    let device = Device::flex();
    let scheme: Scheme = "kivi-1(g=8,r=5)/token-1(c=4)".parse().unwrap();
    let qkv = [normal([1, 2, 13, D], 1, &device), normal([1, 2, 13, D], 2, &device), normal([1, 2, 13, D], 3, &device)];
    let [q, k, v] = qkv.clone();
    let coded = QuantizedCache::teacher_forced(scheme, None, 1, &device).attend(
        &site(0, None),
        q.clone(),
        k.clone(),
        v.clone(),
    );
    let dense = DenseAttention::new().attend(&site(0, None), q, k, v);
    let twelve = |x: &Tensor<4>| x.clone().narrow(2, 0, 12);
    assert!(worst(&twelve(&coded), &twelve(&dense)) < 1e-6, "12 = R + G − 1 tokens are dense");
    assert!(worst(&coded, &dense) > 1e-3, "the 13th flushes the first group");
}

#[test]
fn flushed_tokens_leave_the_dense_window() {
    let device = Device::flex();
    let scheme: Scheme = "kivi-2(g=8,r=5,sinks=3)".parse().unwrap();
    let module = headq::HeadqAttention::new(scheme, None, 0, &device);
    let mut state = headq::LayerState::default();
    for t in 0..60 {
        let x = normal([1, 1, 1, D], t as u64, &device);
        module.forward(&mut state, &site(t, None), x.clone(), x.clone(), x);
        let flushed = (t + 1).saturating_sub(8) / 8 * 8;
        assert_eq!(state.coded_and_dense_keys(), (flushed, t + 1 - flushed));
    }
}

#[test]
fn attention_works_under_autodiff_and_forwards_the_same_codes() {
    for scheme in [
        "kivi-2(g=8,r=5)+score-optimal(rank=4,bits=3)/token-4(c=8)",
        "grid-3(g=8,r=5,center,c=4)+score-optimal(rank=4,bits=3)/a2-4(c=8)",
        "rotated-3(g=8,r=5)+score-optimal(rank=4,bits=3)/mse-4(c=8)",
        "kivi-2(g=8,r=5,range=0.85,rounding=score-aware)+score-optimal(rank=4,bits=3)",
        "grid-3(g=8,r=5,rounding=score-aware,center)+score-optimal(rank=4,bits=3)",
        "klt-2(g=8,r=5,sinks=0)+score-optimal(rank=4,bits=3)",
        "klt-2.5(g=8,r=5,sinks=0,ranges=static)+score-optimal(rank=4,bits=3)",
    ] {
        for (_, device) in DeviceName::present() {
            forwards_the_same_codes_under_autodiff(&scheme.parse().unwrap(), &device);
        }
    }
}

fn forwards_the_same_codes_under_autodiff(scheme: &Scheme, device: &Device) {
    let basis = basis(scheme, 1, 4, 2, D);
    let (q, k, v) =
        (normal([1, 4, 40, D], 1, device), normal([1, 2, 40, D], 2, device), normal([1, 2, 40, D], 3, device));
    let plain =
        teacher_forced(scheme, basis.as_ref(), 2, D, device).attend(&site(0, None), q.clone(), k.clone(), v.clone());
    let tracked = device.clone().autodiff();
    let (q, k, v) = (q.autodiff().require_grad(), k.autodiff().require_grad(), v.autodiff().require_grad());
    let mut cache = teacher_forced(scheme, basis.as_ref(), 2, D, &tracked);
    let output = cache.attend(&site(0, None), q.clone(), k.clone(), v.clone());
    let groups = |k: &Tensor<4>| k.clone().narrow(2, 0, 32);
    let tracked = cache.layers()[0].code_keys(groups(&k));
    let inference = modules(scheme, basis.as_ref(), 2, D, device).code_keys(groups(&k.clone().inner()));
    assert_eq!(tracked.base.inner().to_data(), inference.base.to_data(), "bit for bit");
    assert_eq!(tracked.side.unwrap().inner().to_data(), inference.side.unwrap().to_data(), "bit for bit");
    // Softmax is one fused kernel in inference and several operations under autodiff.
    assert!(worst(&output.clone().inner(), &plain) < 1e-6);
    let gradients = output.square().sum().backward();
    for (name, x) in [("q", &q), ("k", &k), ("v", &v)] {
        let total: f32 = x.grad(&gradients).expect(name).abs().sum().into_scalar();
        assert!(total.is_finite() && total > 0.0, "{name}: {total}");
    }
    let decoder = cache.layers()[0].decoder().unwrap();
    let total: f32 = decoder.grad(&gradients).expect("U is a parameter").abs().sum().into_scalar();
    assert!(total.is_finite() && total > 0.0);
}

/// The rounding gradients are by definition not those of the function; with codes fixed the rest of the path is smooth, and is
/// checked here against central differences in f64.
#[test]
fn gradients_of_the_smooth_path_agree_with_finite_differences() {
    use burn::tensor::{DType, FloatDType};
    let device = Device::flex();
    // All tokens stay dense, so that attention is smooth in q, k and v; GQA and a sliding window are in the path.
    let scheme: Scheme = "kivi-2(g=64,r=64)".parse().unwrap();
    let wide = |x: Tensor<4>| x.cast(FloatDType::F64);
    let inputs = [
        wide(normal([1, 4, 9, 4], 1, &device)),
        wide(normal([1, 2, 9, 4], 2, &device)),
        wide(normal([1, 2, 9, 4], 3, &device)),
    ];
    let at = AttentionSite { layer: 0, start: 0, scale: 0.5, window: Some(5) };
    let loss = |[q, k, v]: [Tensor<4>; 3]| {
        let mut cache = QuantizedCache::teacher_forced(scheme, None, 1, &q.device());
        cache.attend(&at, q, k, v).powi_scalar(3).sum()
    };
    let tracked = inputs.clone().map(|x| x.autodiff().require_grad());
    let gradients = loss(tracked.clone()).backward();
    for i in 0..3 {
        let gradient: Vec<f64> = tracked[i].grad(&gradients).unwrap().try_into_vec_as().unwrap();
        for at in [0, 7, gradient.len() - 1] {
            let nudged = |h: f64| -> f64 {
                let mut inputs = inputs.clone();
                let shape = inputs[i].dims();
                let mut data: Vec<f64> = inputs[i].clone().try_into_vec_as().unwrap();
                data[at] += h;
                inputs[i] = Tensor::from_data(burn::tensor::TensorData::new(data, shape), (&device, DType::F64));
                loss(inputs).into_scalar()
            };
            let difference = (nudged(1e-5) - nudged(-1e-5)) / 2e-5;
            assert!(
                (gradient[at] - difference).abs() < 1e-6 * (1.0 + difference.abs()),
                "{i}/{at}: {} {difference}",
                gradient[at]
            );
        }
    }
}
