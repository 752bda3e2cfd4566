//! Learned transforms and factors of `klt`: gradients against computations in f64 that share nothing with the tensors, forward values
//! against inference, degenerate heads, and training from statistics of other keys.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use burn::optim::{AdamConfig, Optimizer};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use common::{LearnedHead, key_statistics, normal, with_learned};
use headq::basis::TrainedTransform;
use headq::correction::Parts;
use headq::gaussian::uniform_step;
use headq::learn::{Loss, Sample};
use headq::quant::{BaseParts, BaseQuantizer};
use headq::scheme::{BaseScheme, KeyScheme, MOST_LLOYD_BITS, RangeSource, Scheme};
use headq::transform::{CLIP_BOUNDS, HeadTransform};
use headq::{
    Attention, AttentionSite, Basis, Correction, DenseAttention, HeadMoments, HeadqAttention, KeyStatistics,
    QuantizedCache,
};
use nalgebra::{DMatrix, DVector};

const KV: usize = 2;
const D: usize = 8;
const G: usize = 8;

const SCHEMES: &[&str] = &[
    "klt-2(g=8,r=4,meta=f32)",
    "klt-1.5(g=8,r=4,ranges=static)",
    "klt-1.5(g=8,r=4,ranges=lloyd,meta=f32)",
    "klt-4(g=8,r=4,ranges=lloyd,metric=fisher,meta=f32)",
];

fn base(scheme: &str) -> BaseScheme {
    scheme.parse().unwrap()
}

fn calibrated(base: BaseScheme) -> BaseQuantizer {
    BaseQuantizer::calibrated(base, &key_statistics(KV, D), 0, &Device::flex())
}

fn host<const N: usize>(x: Tensor<N>) -> Vec<f64> {
    let x = if x.is_autodiff() { x.inner() } else { x };
    x.into_data_as::<f64>().try_to_vec().unwrap()
}

fn double<const N: usize>(values: Vec<f64>, shape: [usize; N]) -> Tensor<N> {
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), DType::F64))
}

fn tracked(x: &Tensor<3>) -> Tensor<3> {
    x.clone().autodiff().require_grad()
}

/// Factors about 1, E and F of moderate size, of `kv` heads.
fn parts(kv: usize) -> BaseParts {
    let three =
        |shape: [usize; 3], seed| normal([1, shape[0], shape[1], shape[2]], seed, &Device::flex()).reshape(shape);
    let square = |seed| three([kv, D, D], seed).mul_scalar(0.1).cast(FloatDType::F64);
    let clip = three([kv, 1, D], 41).mul_scalar(0.1).add_scalar(1.0).cast(FloatDType::F64);
    BaseParts { clip: Some(clip), transform: Some([square(42), square(43)]) }
}

/// One head's part of learned tensors.
fn of_head(parts: &BaseParts, head: usize) -> LearnedHead {
    let own = |x: &Tensor<3>| host(x.clone().narrow(0, head, 1));
    let [e, f] = parts.transform.as_ref().unwrap();
    LearnedHead {
        clip: own(parts.clip.as_ref().unwrap()).into_iter().map(|v| v as f32).collect(),
        analysis: DMatrix::from_row_slice(D, D, &own(e)),
        synthesis: DMatrix::from_row_slice(D, D, &own(f)),
    }
}

/// A coefficient's number at the point where it is linearized: ŷ = slope·y + ρ·unit + rest.
#[derive(Clone, Copy, Default)]
struct Frozen {
    slope: f64,
    unit: f64,
    rest: f64,
}

/// The numbers of coefficient i that share a group, linearized by the straight-through rule: with levels m + ρl, rounding adds to (y − m)/ρ
/// what it adds here, and beyond the outermost cell ŷ is the outermost level. Ranges of the data are constants.
fn freeze(head: &HeadTransform, base: &BaseScheme, i: usize, y: &[f64], rho: f64) -> Vec<Frozen> {
    let (bits, size) = (head.bits[i], head.spread[i].sqrt() * f64::from(base.range));
    if bits == 0 {
        return vec![Frozen::default(); y.len()];
    }
    let cells = f64::from(1u32 << bits);
    let even = |cell: f64| (0..1u32 << bits).map(|c| (f64::from(c) - 0.5 * (cells - 1.0)) * cell).collect::<Vec<f64>>();
    let (middle, levels) = match base.ranges {
        RangeSource::Lloyd if bits <= MOST_LLOYD_BITS => {
            (0.0, head.levels[bits as usize - 1].iter().map(|l| l * size).collect())
        }
        RangeSource::Static => (0.0, even(uniform_step(bits) * size * head.factors[bits as usize])),
        RangeSource::Group | RangeSource::Lloyd => {
            let (low, high) = y.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
            let factor = head.factors[bits as usize] * f64::from(base.range);
            (0.5 * (low + high), even(factor * (high - low) / cells))
        }
    };
    let margin = 0.5 * (levels[1] - levels[0]);
    let of = |y: &f64| {
        let u = (y - middle) / rho;
        let nearest = *levels.iter().min_by(|a, b| (*a - u).abs().total_cmp(&(*b - u).abs())).unwrap();
        match u > levels[0] - margin && u < levels[levels.len() - 1] + margin {
            true => Frozen { slope: 1.0, unit: nearest - u, rest: 0.0 },
            false => Frozen { slope: 0.0, unit: nearest, rest: middle },
        }
    };
    y.iter().map(of).collect()
}

/// Σ w·k̂ of one head, whose rounding is frozen where `at` says.
struct Surrogate {
    head: HeadTransform,
    keys: Vec<DVector<f64>>,
    weights: Vec<DVector<f64>>,
    /// By token, then by coefficient.
    frozen: Vec<Vec<Frozen>>,
}

impl Surrogate {
    fn new(base: &BaseScheme, moments: &HeadMoments, [keys, weights]: [&[f64]; 2], at: &LearnedHead) -> Self {
        let rows = |x: &[f64]| x.chunks(D).map(DVector::from_column_slice).collect::<Vec<_>>();
        let (head, keys) = (HeadTransform::fit(moments, base), rows(keys));
        let here = with_learned(head.clone(), at);
        let y: Vec<DVector<f64>> = keys.iter().map(|k| here.analysis.transpose() * k).collect();
        let mut frozen = vec![vec![Frozen::default(); D]; y.len()];
        for (i, first) in (0..D).flat_map(|i| (0..y.len()).step_by(G).map(move |first| (i, first))) {
            let own: Vec<f64> = (0..G).map(|t| y[first + t][i]).collect();
            let found = freeze(&head, base, i, &own, f64::from(at.clip[i]));
            found.into_iter().enumerate().for_each(|(t, f)| frozen[first + t][i] = f);
        }
        Self { head, weights: rows(weights), keys, frozen }
    }

    fn value(&self, at: &LearnedHead, clip: &[f64]) -> f64 {
        let here = with_learned(self.head.clone(), at);
        let of = |(k, (w, frozen)): (&DVector<f64>, (&DVector<f64>, &Vec<Frozen>))| {
            let y = here.analysis.transpose() * k;
            let read = |i: usize| frozen[i].slope * y[i] + clip[i] * frozen[i].unit + frozen[i].rest;
            w.dot(&(&here.synthesis * DVector::from_fn(D, |i, _| read(i))))
        };
        self.keys.iter().zip(self.weights.iter().zip(&self.frozen)).map(of).sum()
    }
}

/// Gradients by ρ, E and F of every form of `klt` are the derivatives of what the straight-through rule defines, by central differences.
#[test]
fn gradients_are_those_of_the_straight_through_rule() {
    for scheme in SCHEMES {
        let base = base(scheme);
        let (keys, weights) =
            (normal([1, KV, 4 * G, D], 2, &Device::flex()), normal([1, KV, 4 * G, D], 3, &Device::flex()));
        let [keys, weights] = [keys * 1.5, weights].map(|x| x.cast(FloatDType::F64));
        let at = parts(KV);
        let leaves = BaseParts {
            clip: at.clip.as_ref().map(tracked),
            transform: at.transform.as_ref().map(|both| both.each_ref().map(tracked)),
        };
        let quantizer = calibrated(base).with_parts(leaves.clone());
        let total = (quantizer.read_back(keys.clone()) * weights.clone()).sum();
        let gradients = total.clone().backward();
        let gradient = |x: &Tensor<3>| host(x.grad(&gradients).unwrap());
        let [e, f] = leaves.transform.as_ref().unwrap();
        let [of_clip, of_e, of_f] = [leaves.clip.as_ref().unwrap(), e, f].map(gradient);
        let (mut sum, mut clipped) = (0.0, 0);
        for head in 0..KV {
            let learned = of_head(&at, head);
            let own = |x: &Tensor<4>| host(x.clone().narrow(1, head, 1));
            let moments = &key_statistics(KV, D).moments[head];
            let surrogate = Surrogate::new(&base, moments, [&own(&keys), &own(&weights)], &learned);
            let clip: Vec<f64> = host(at.clip.clone().unwrap().narrow(0, head, 1));
            sum += surrogate.value(&learned, &clip);
            let all = surrogate.frozen.iter().flatten();
            clipped += all.filter(|f| f.slope == 0.0 && f.unit != 0.0).count();
            let h = 1e-5;
            let close = |name: &str, found: f64, difference: f64, largest: f64| {
                let off = (found - difference).abs();
                assert!(off < 1e-4 * largest, "{scheme}, {name} of head {head}: {found} and {difference} of {largest}");
            };
            let largest = |x: &[f64]| x.iter().fold(1e-9f64, |m, v| m.max(v.abs()));
            for i in 0..D {
                let nudged = |by: f64| {
                    let mut clip = clip.clone();
                    clip[i] += by;
                    surrogate.value(&learned, &clip)
                };
                close("clip", of_clip[head * D + i], (nudged(h) - nudged(-h)) / (2.0 * h), largest(&of_clip));
            }
            for (i, j) in (0..D).flat_map(|i| (0..D).map(move |j| (i, j))) {
                let nudged = |by: [f64; 2]| {
                    let mut learned = learned.clone();
                    learned.analysis[(i, j)] += by[0];
                    learned.synthesis[(i, j)] += by[1];
                    surrogate.value(&learned, &clip)
                };
                let slope = |by: [f64; 2]| (nudged(by) - nudged(by.map(|b| -b))) / (2.0 * h);
                let at = (head * D + i) * D + j;
                close(&format!("E[{i},{j}]"), of_e[at], slope([h, 0.0]), largest(&of_e));
                close(&format!("F[{i},{j}]"), of_f[at], slope([0.0, h]), largest(&of_f));
                // What is not stored has no part in it.
                let bits = &surrogate.head.bits;
                assert!(bits[i] > 0 || of_e[at] == 0.0);
                assert!(bits[j] > 0 || of_f[at] == 0.0);
            }
        }
        let found = host(total)[0];
        assert!((found - sum).abs() < 1e-4 * sum.abs().max(1.0), "{scheme}: {found} and {sum}");
        assert!(clipped > 0, "{scheme}: something lies outside");
    }
}

/// No code depends on F: where no side code does either, the gradients of losses by it are derivatives of the losses themselves.
#[test]
fn gradients_of_losses_by_the_synthesis_agree_with_central_differences() {
    let scheme: Scheme = "klt-2(g=8,r=4,sinks=1)+learned(rank=2,bits=3)".parse().unwrap();
    let key = scheme.key.unwrap();
    let wide = |x: Tensor<4>| x.cast(FloatDType::F64);
    let (q, k) = (normal([1, 4, 90, D], 1, &Device::flex()), normal([1, KV, 90, D], 2, &Device::flex()));
    let site = AttentionSite { layer: 0, start: 0, scale: 1.0 / (D as f64).sqrt(), window: None };
    for loss in Loss::ALL {
        let sample = Sample::new(loss, &calibrated(key.base), &site, &wide(q.clone() * 2.0), &wide(k.clone()));
        let encoder = normal([1, KV, D, 2], 5, &Device::flex()).reshape([KV, D, 2]).cast(FloatDType::F64);
        let decoder = encoder.zeros_like();
        let correction = Correction::of(&key, Parts { decoder, encoder: Some(encoder), clip: None });
        let BaseParts { clip, transform } = parts(KV);
        let [e, f] = transform.unwrap();
        let value = |f: Tensor<3>| {
            let parts = BaseParts { clip: clip.clone(), transform: Some([e.clone(), f]) };
            sample.loss_through(&calibrated(key.base).with_parts(parts), &correction)
        };
        let leaf = tracked(&f);
        let found = host(leaf.grad(&value(leaf.clone()).total.backward()).unwrap());
        let largest = found.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        assert!(largest > 0.0);
        for at in (0..found.len()).step_by(9) {
            let nudged = |by: f64| {
                let mut values = host(f.clone());
                values[at] += by;
                value(double(values, f.dims())).by_head.iter().sum::<f64>()
            };
            let difference = (nudged(1e-5) - nudged(-1e-5)) / 2e-5;
            assert!((found[at] - difference).abs() < 1e-6 * largest, "{loss}[{at}]: {} and {difference}", found[at]);
        }
    }
}

/// E = F = 0 and ρ = 1.
fn nothing(kv: usize, d: usize) -> BaseParts {
    let device = Device::flex();
    BaseParts {
        clip: Some(Tensor::ones([kv, 1, d], &device)),
        transform: Some([Tensor::zeros([kv, d, d], &device), Tensor::zeros([kv, d, d], &device)]),
    }
}

#[test]
fn zeros_and_ones_change_no_bit() {
    let pools =
        ["klt-1.5(g=8,metric=fisher,pool=model)", "klt-2.5(g=8,range=0.9,ranges=lloyd,metric=fisher,pool=model)"];
    for scheme in SCHEMES.iter().chain(&pools) {
        let quantizer = calibrated(base(scheme));
        let keys = quantizer.shift(normal([2, KV, 4 * G, D], 4, &Device::flex()) + 0.3);
        let expected = quantizer.read_back(keys.clone()).into_data();
        let learned = quantizer.clone().with_parts(nothing(KV, D));
        assert_eq!(learned.read_back(keys.clone()).into_data(), expected, "{scheme}");
        let BaseParts { clip, transform } = nothing(KV, D);
        let leaves =
            BaseParts { clip: clip.as_ref().map(tracked), transform: transform.map(|x| x.map(|x| tracked(&x))) };
        let graph = quantizer.with_parts(leaves).read_back(keys.clone());
        assert_eq!(graph.inner().into_data(), expected, "{scheme}: under autodiff");
        // Away from them, too, a graph forwards what inference reads.
        let BaseParts { clip, transform } = parts(KV);
        let narrow = |x: Tensor<3>| x.cast(FloatDType::F32);
        let (clip, transform) = (clip.map(narrow), transform.map(|x| x.map(narrow)));
        let plain = BaseParts { clip: clip.clone(), transform: transform.clone() };
        let leaves =
            BaseParts { clip: clip.as_ref().map(tracked), transform: transform.map(|x| x.map(|x| tracked(&x))) };
        let plain = calibrated(base(scheme)).with_parts(plain).read_back(keys.clone()).into_data();
        assert_ne!(plain, expected);
        assert_eq!(calibrated(base(scheme)).with_parts(leaves).read_back(keys).inner().into_data(), plain, "{scheme}");
    }
}

#[test]
fn degenerate_heads_stay_finite() {
    let zero = DMatrix::zeros(D, D);
    let usual = key_statistics(1, D).moments[0].clone();
    let mut one = zero.clone();
    one[(2, 2)] = 4.0;
    let no_gradients = Some(zero.clone());
    for moments in [
        HeadMoments { gradients: no_gradients.clone(), ..HeadMoments::new(zero.clone(), zero.clone()) },
        HeadMoments { keys: zero.clone(), ..usual.clone() },
        HeadMoments { keys: one.clone(), ..usual.clone() },
        HeadMoments { queries: one, gradients: no_gradients, ..usual.clone() },
        HeadMoments { keys: usual.keys.clone() * 1e18, ..usual.clone() },
        HeadMoments { keys: usual.keys.clone() * 1e-30, ..usual },
    ] {
        let keys = KeyStatistics { moments: [moments].into(), fits: Default::default(), ..key_statistics(1, D) };
        for scheme in SCHEMES.iter().chain(&["klt-0.25(g=8)", "klt-6(g=8,ranges=static)"]) {
            for rho in CLIP_BOUNDS {
                let narrow = |x: Tensor<3>| tracked(&x.cast(FloatDType::F32).mul_scalar(5.0));
                let clip = tracked(&Tensor::full([1, 1, D], rho as f32, &Device::flex()));
                let transform = parts(1).transform.map(|both| both.map(narrow));
                let leaves = BaseParts { clip: Some(clip), transform };
                let quantizer = BaseQuantizer::calibrated(base(scheme), &keys, 0, &Device::flex());
                let quantizer = quantizer.with_parts(leaves.clone());
                for x in [
                    normal([1, 1, 2 * G, D], 4, &Device::flex()),
                    Tensor::full([1, 1, 2 * G, D], 0.25, &Device::flex()),
                ] {
                    let read = quantizer.read_back(quantizer.shift(x));
                    let gradients = read.clone().square().sum().backward();
                    let all = leaves.transform.iter().flatten().chain(&leaves.clip);
                    for x in all.map(|x| x.grad(&gradients).unwrap()).map(host).chain([host(read)]) {
                        assert!(x.iter().all(|v| v.is_finite()), "{scheme}: {x:?}");
                    }
                }
            }
        }
    }
}

/// Gaussian rows of an uneven spectrum, turned by a matrix that `seed` decides.
fn rows(heads: usize, tokens: usize, seed: u64, turn: u64) -> Tensor<4> {
    let device = Device::flex();
    let spectrum = Tensor::<4>::from_data([[[[2.5f32, 1.8, 1.2, 0.8, 0.5, 0.3, 0.2, 0.1]]]], &device);
    let matrix: Vec<f64> = host(normal([1, 1, D, D], turn, &device));
    let q = DMatrix::from_row_slice(D, D, &matrix).qr().q();
    let q: Vec<f32> = q.iter().map(|v| *v as f32).collect();
    let turned = Tensor::<4>::from_data(TensorData::new(q, [1, 1, D, D]), &device).expand([1, heads, D, D]);
    (normal([1, heads, tokens, D], seed, &device) * spectrum).matmul(turned)
}

fn second(x: &Tensor<4>, head: usize) -> DMatrix<f64> {
    let x = host(x.clone().narrow(1, head, 1));
    let rows = DMatrix::from_row_slice(x.len() / D, D, &x);
    rows.transpose() * &rows / rows.nrows() as f64
}

/// Statistics of other keys make a transform that does not fit. Training through the coder, together with U and W, makes up for it: on
/// windows that it never saw, by its loss and by what teacher-forced attention puts out.
#[test]
fn training_makes_up_for_statistics_of_other_keys() {
    let (heads, tokens) = (4, 160);
    for scheme in [
        "klt-2(g=16,r=8)+learned(rank=2,bits=3)",
        "klt-1.5(g=16,r=8,ranges=static)+learned(rank=2,bits=3)",
        "klt-1.5(g=16,r=8,ranges=lloyd)+learned(rank=2,bits=3)",
    ] {
        let scheme: Scheme = scheme.parse().unwrap();
        let key: KeyScheme = scheme.key.unwrap();
        let window =
            |seed: u64| [rows(heads, tokens, seed, 90), rows(KV, tokens, seed + 1, 91), rows(KV, tokens, seed + 2, 92)];
        // Keys as large as these, but turned elsewhere.
        let (other, queries) = (rows(KV, 2048, 7, 80), rows(heads, 2048, 8, 81));
        let moments = (0..KV).map(|h| HeadMoments::new(second(&queries, 2 * h), second(&other, h))).collect();
        let keys =
            KeyStatistics { moments, mean: vec![0.0; KV * D], fits: Default::default(), ..key_statistics(KV, D) };
        let quantizer = BaseQuantizer::calibrated(key.base, &keys, 0, &Device::flex());
        let site = AttentionSite { layer: 0, start: 0, scale: 1.0 / (D as f64).sqrt(), window: None };
        let sample = |seed: u64| {
            let [q, k, _] = window(seed);
            Sample::new(Loss::Kl, &quantizer, &site, &q, &k)
        };
        let (train, held_out): (Vec<Sample>, Vec<Sample>) =
            ((100..130).step_by(5).map(sample).collect(), (200..210).step_by(5).map(sample).collect());
        let narrow = |x: Tensor<4>| x.reshape([KV, D, 2]).mul_scalar(0.2);
        let (u, w) =
            (narrow(normal([1, KV, D, 2], 5, &Device::flex())), narrow(normal([1, KV, D, 2], 6, &Device::flex())));
        let BaseParts { clip, transform } = nothing(KV, D);
        let [e, f] = transform.unwrap();
        let mut at = [u, w, clip.unwrap(), e, f];
        let codec = |[u, w, c, e, f]: &[Tensor<3>; 5]| {
            let parts = BaseParts { clip: Some(c.clone()), transform: Some([e.clone(), f.clone()]) };
            let correction = Parts { decoder: u.clone(), encoder: Some(w.clone()), clip: None };
            (quantizer.clone().with_parts(parts), Correction::of(&key, correction))
        };
        let loss = |at: &[Tensor<3>; 5], samples: &[Sample]| {
            let (base, correction) = codec(at);
            samples.iter().flat_map(|s| s.loss_through(&base, &correction).by_head).sum::<f64>()
        };
        let before = loss(&at, &held_out);
        let adam = AdamConfig::new().build();
        let mut states = [None, None, None, None, None];
        let steps = 150;
        for step in 0..steps {
            let leaves = at.each_ref().map(tracked);
            let (base, correction) = codec(&leaves);
            let gradients = train[step % train.len()].loss_through(&base, &correction).total.backward();
            let rate = 0.02 * (1.0 - step as f64 / steps as f64);
            for ((x, leaf), state) in at.iter_mut().zip(&leaves).zip(&mut states) {
                let (new, kept) = adam.step(rate, x.clone(), leaf.grad(&gradients).unwrap(), state.take());
                (*x, *state) = (new, kept);
            }
            at[2] = at[2].clone().clamp(CLIP_BOUNDS[0], CLIP_BOUNDS[1]);
        }
        let after = loss(&at, &held_out);
        assert!(after < 0.7 * before, "{scheme}: {before} to {after}");
        // As an artifact would hold it.
        let floats = |x: &Tensor<3>| x.clone().into_data().try_to_vec::<f32>().unwrap();
        let learned = Basis::learned(&key.side.unwrap(), &[codec(&at).1])
            .with_base_clip(Some(floats(&at[2])))
            .with_base_transform(Some(TrainedTransform { analysis: floats(&at[3]), synthesis: floats(&at[4]) }));
        let untrained = learned.clone().with_base_clip(None).with_base_transform(None);
        let error = |basis: &Basis| {
            let module = HeadqAttention::calibrated(scheme, Some(basis), Some(&keys), 0, &Device::flex());
            let mut cache = QuantizedCache::of(vec![module]);
            let [q, k, v] = window(300);
            let dense = DenseAttention::new().attend(&site, q.clone(), k.clone(), v.clone());
            host((cache.attend(&site, q, k, v) - dense).square().sum())[0]
        };
        let (without, with) = (error(&untrained), error(&learned));
        assert!(with < 0.8 * without, "{scheme}: attention error {without} without, {with} with");
    }
}
