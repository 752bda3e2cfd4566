//! The packed cache reads what the teacher-forced evaluation reads, and holds what the accounting says.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use common::{SCHEMES, basis, key_statistics, modules, normal, teacher_forced};
use headq::budget::{Budget, HeadShape};
use headq::scheme::Scheme;
use headq::{Attention, AttentionSite, DecodeAttention, DenseType, DeviceName, PackedCache};

fn site(start: usize, window: Option<usize>, width: usize) -> AttentionSite {
    AttentionSite { layer: 0, start, scale: 1.0 / (width as f64).sqrt(), window }
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / scale
}

fn floats(x: Tensor<4>) -> Vec<f32> {
    x.try_into_vec_as().unwrap()
}

/// One layer's heads and everything that is needed to fill a cache.
struct Case {
    scheme: Scheme,
    heads: usize,
    kv_heads: usize,
    width: usize,
    window: Option<usize>,
    qkv: [Tensor<4>; 3],
}

impl Case {
    fn new(scheme: &str, (heads, kv_heads, window): (usize, usize, Option<usize>), width: usize, total: usize) -> Self {
        let device = Device::flex();
        let qkv = [
            normal([1, heads, total, width], 1, &device),
            normal([1, kv_heads, total, width], 2, &device) + 0.5,
            normal([1, kv_heads, total, width], 3, &device),
        ];
        Self { scheme: scheme.parse().unwrap(), heads, kv_heads, width, window, qkv }
    }

    fn shape(&self) -> HeadShape {
        HeadShape { layers: 1, heads: self.heads, kv_heads: self.kv_heads, head_dim: self.width }
    }

    fn cache(&self, dense: DenseType, rewind: usize) -> PackedCache {
        let basis = basis(&self.scheme, 1, self.heads, self.kv_heads, self.width);
        let module = modules(&self.scheme, basis.as_ref(), self.kv_heads, self.width, &Device::flex());
        PackedCache::with_rewind(vec![module], self.shape(), dense, rewind).unwrap()
    }

    /// All tokens at once: `[tokens][heads · width]`.
    fn reference(&self) -> Vec<Vec<f32>> {
        self.reference_on(&Device::flex())
    }

    fn reference_on(&self, device: &Device) -> Vec<Vec<f32>> {
        let basis = basis(&self.scheme, 1, self.heads, self.kv_heads, self.width);
        let mut whole = teacher_forced(&self.scheme, basis.as_ref(), self.kv_heads, self.width, device);
        let [q, k, v] = self.qkv.clone().map(|x| Tensor::<4>::from_data(x.into_data(), device));
        let out = whole.attend(&site(0, self.window, self.width), q, k, v);
        let total = out.dims()[2];
        (0..total).map(|t| floats(out.clone().narrow(2, t, 1))).collect()
    }

    /// Feeds tokens `start..end` in one call through tensors.
    fn feed(&self, cache: &mut PackedCache, start: usize, end: usize) -> Vec<Vec<f32>> {
        let [q, k, v] = self.qkv.clone().map(|x| x.narrow(2, start, end - start));
        let out = cache.attend(&site(start, self.window, self.width), q, k, v);
        (0..end - start).map(|t| floats(out.clone().narrow(2, t, 1))).collect()
    }

    /// Feeds one token through slices.
    fn step(&self, cache: &mut PackedCache, t: usize) -> Vec<f32> {
        let [q, k, v] = self.qkv.clone().map(|x| floats(x.narrow(2, t, 1)));
        let mut out = vec![f32::NAN; q.len()];
        cache.attend_one(&site(t, self.window, self.width), &q, &k, &v, &mut out);
        out
    }
}

#[test]
fn decoding_through_packed_codes_is_the_teacher_forced_pass() {
    for scheme in SCHEMES {
        for shape in [(4, 4, None), (6, 2, None), (6, 2, Some(11)), (5, 1, Some(3))] {
            let case = Case::new(scheme, shape, 16, 47);
            let reference = case.reference();
            // One by one; a prompt first; and a second stretch of many tokens on top of codes.
            for stretches in [vec![], vec![21], vec![5, 30]] {
                let mut cache = case.cache(DenseType::F32, 0);
                let mut found = Vec::new();
                for end in &stretches {
                    found.extend(case.feed(&mut cache, found.len(), *end));
                }
                for t in found.len()..47 {
                    found.push(case.step(&mut cache, t));
                }
                assert_eq!(cache.len(), 47);
                for (t, (found, expected)) in found.iter().zip(&reference).enumerate() {
                    let off = worst(found, expected);
                    assert!(off < 1e-5, "{scheme} {shape:?} {stretches:?}, token {t}: {off:e}");
                }
            }
        }
    }
}

/// The same pages, read through tensors on every device that this build has.
#[test]
fn every_device_reads_the_same_pages() {
    for (name, device) in DeviceName::present() {
        for scheme in [
            "kivi-2(g=8,r=5,sinks=3)+query-pca(rank=4,bits=4)/token-2(c=8)",
            "rotated-3(g=8,r=5)/a2-3(c=8)",
            "grid-2(g=4,r=3,center)",
            "klt-2(g=4,r=3)+query-pca(rank=4,bits=4)",
            "klt-2(g=4,r=3,ranges=lloyd)+learned(rank=4,bits=4)",
            "klt-1.5(g=1,r=3,ranges=static)",
            "kivi-2(g=4,r=3,rounding=score-aware)",
            "dense",
        ] {
            let case = Case::new(scheme, (4, 2, Some(19)), 16, 40);
            let reference = case.reference_on(&device);
            let basis = basis(&case.scheme, 1, 4, 2, 16);
            let module = modules(&case.scheme, basis.as_ref(), 2, 16, &device);
            let mut cache = PackedCache::new(vec![module], case.shape(), DenseType::F32).unwrap();
            let mut start = 0;
            for end in std::iter::once(14).chain(15..=40) {
                let on_device = |x: Tensor<4>| Tensor::from_data(x.narrow(2, start, end - start).into_data(), &device);
                let [q, k, v] = case.qkv.clone().map(on_device);
                let out = cache.attend(&site(start, case.window, 16), q, k, v);
                for (t, expected) in reference.iter().enumerate().take(end).skip(start) {
                    let found: Vec<f32> = out.clone().narrow(2, t - start, 1).try_into_vec_as().unwrap();
                    let off = worst(&found, expected);
                    assert!(off < 1e-4, "{name}: {scheme}, token {t}: {off:e}");
                }
                start = end;
            }
        }
    }
}

#[test]
fn long_contexts_and_wide_heads_cross_pages_and_pieces() {
    for (scheme, shape, width, total) in [
        ("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)", (9, 3, None), 64, 700),
        ("kivi-3(g=128,r=100,sinks=4)+score-optimal(rank=8,bits=3,scales=token)/token-5", (9, 3, Some(333)), 64, 900),
        ("kivi-5(g=48,r=7,sinks=70)/token-7(g=16,r=3,sinks=5,c=16)", (14, 2, None), 80, 600),
        ("rotated-3(g=16,r=40,c=16)+random(rank=3,bits=6,scope=query-head)/a2-3(c=32)", (8, 2, None), 32, 500),
        ("token-6(g=20,r=33,c=24)/a2-2(g=64,r=128)", (4, 2, Some(200)), 48, 640),
        ("grid-4(g=1,r=1,c=1,center)/random-4(g=10,r=0)", (2, 1, None), 24, 400),
        ("kivi-1(g=100,r=0)+query-pca(rank=64,bits=8)", (6, 6, None), 64, 450),
        ("klt-2(g=128,r=100)+score-optimal(rank=4,bits=2)/token-2(c=32)", (9, 3, None), 64, 700),
        ("klt-1.25(g=16,r=7,sinks=70)", (14, 2, Some(200)), 80, 500),
        ("klt-3(g=20,r=33)/token-3(g=64,r=64)", (4, 2, None), 24, 400),
        ("klt-2.5(g=1,r=16,ranges=static)", (6, 6, None), 32, 400),
        ("kivi-2(g=32,r=32)/channel-3(g=100,r=7,sinks=2)", (9, 3, Some(250)), 64, 500),
        ("dense/klt-2.5(g=16,r=16,ranges=static,metric=output)", (14, 2, None), 80, 400),
        ("klt-1.5(g=32,r=32,ranges=lloyd,metric=fisher)+learned(rank=4,bits=2)", (9, 3, None), 64, 400),
        ("kivi-2(g=32,r=32,range=0.85,rounding=score-aware)+query-pca(rank=4,bits=4)", (9, 3, None), 64, 400),
        ("dense/token-4(g=64,r=64)", (32, 4, None), 128, 500),
        ("dense", (7, 7, Some(90)), 20, 400),
    ] {
        let case = Case::new(scheme, shape, width, total);
        let reference = case.reference();
        let mut cache = case.cache(DenseType::F32, 0);
        let prompt = total / 2;
        let mut found = case.feed(&mut cache, 0, prompt);
        found.extend((prompt..total).map(|t| case.step(&mut cache, t)));
        for (t, (found, expected)) in found.iter().zip(&reference).enumerate() {
            let off = worst(found, expected);
            assert!(off < 1e-5, "{scheme}, token {t}: {off:e}");
        }
    }
}

#[test]
fn halves_that_are_given_are_held_exactly() {
    for scheme in ["kivi-2(g=8,r=5,sinks=1)+query-pca(rank=4,bits=4)/token-3(c=8)", "dense", "rotated-3(g=8,r=5)/a2-3"]
    {
        let mut case = Case::new(scheme, (6, 2, None), 16, 60);
        case.qkv = case.qkv.map(|x| {
            let shape = x.shape();
            let halves = floats(x).into_iter().map(|v| half::f16::from_f32(v).to_f32()).collect::<Vec<_>>();
            Tensor::from_data(TensorData::new(halves, shape), &Device::flex())
        });
        let reference = case.reference();
        let mut cache = case.cache(DenseType::F16, 0);
        let mut found = case.feed(&mut cache, 0, 20);
        found.extend((20..60).map(|t| case.step(&mut cache, t)));
        for (t, (found, expected)) in found.iter().zip(&reference).enumerate() {
            let off = worst(found, expected);
            assert!(off < 1e-5, "{scheme}, token {t}: {off:e}");
        }
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let case = Case::new("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)", (9, 3, None), 64, 1400);
            let mut cache = case.cache(DenseType::F16, 0);
            case.feed(&mut cache, 0, 1390);
            (1390..1400).map(|t| case.step(&mut cache, t)).collect::<Vec<_>>()
        })
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn cutting_and_appending_again_is_never_having_gone_further() {
    for (scheme, rewind) in [
        ("kivi-2(g=8,r=5,sinks=3)+query-pca(rank=4,bits=4)/token-2(c=8)", 0),
        ("kivi-2(g=8,r=5,sinks=3)+query-pca(rank=4,bits=4)/token-2(c=8,g=4,r=9)", 13),
        ("token-3(g=4,r=0)/mse-3(c=4)", 20),
        ("dense", 0),
        ("rotated-3(g=3,r=7)/random-2(g=4)", 6),
        ("klt-1.5(g=8,r=5)/token-2", 9),
        ("dense/channel-2(g=8,r=5)", 9),
    ] {
        let case = Case::new(scheme, (4, 2, None), 16, 90);
        let mut cache = case.cache(DenseType::F16, rewind);
        let mut expected = case.feed(&mut cache, 0, 30);
        expected.extend((30..90).map(|t| case.step(&mut cache, t)));
        let shortest = cache.shortest();
        assert!(shortest <= 90 - rewind, "{scheme}: {shortest}");
        // Back from 90 to every length that is possible, from a fresh cache each time.
        for len in (shortest.max(30)..90).chain([0]) {
            let mut cache = case.cache(DenseType::F16, rewind);
            case.feed(&mut cache, 0, 30);
            (30..90).for_each(|t| drop(case.step(&mut cache, t)));
            cache.truncate(len).unwrap();
            assert_eq!(cache.len(), len);
            for t in len..90 {
                assert_eq!(case.step(&mut cache, t), expected_from(&expected, t, len, &case), "{scheme}: {len}, {t}");
            }
        }
        if shortest > 1 {
            let error = cache.truncate(shortest - 1).unwrap_err().to_string();
            assert!(error.contains(&format!("give {shortest} or more")), "{error}");
            assert_eq!(cache.len(), 90, "nothing is cut");
        }
    }
}

/// The expected output: of the same run, or from 0 of a run without a prompt, whose first tokens are summed in another order.
fn expected_from(expected: &[Vec<f32>], t: usize, len: usize, case: &Case) -> Vec<f32> {
    if len > 0 {
        return expected[t].clone();
    }
    let mut cache = case.cache(DenseType::F16, 0);
    (0..=t).map(|t| case.step(&mut cache, t)).last().unwrap()
}

#[test]
fn bytes_are_those_of_the_accounting() {
    for scheme in [
        "kivi-2(g=32,r=32)",
        "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)",
        "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)",
        "kivi-3(g=128,r=128,sinks=4)+score-optimal(rank=4,bits=3)/token-3(c=64)",
        "kivi-4(g=64,r=32)+query-pca(rank=8,bits=4,scope=query-head)/token-4",
        "token-2(g=32,r=32,c=32)/a2-3(c=32)",
        "rotated-2(g=32,r=32)/random-2(c=64)",
        "grid-2(g=32,r=32)/token-8",
        "kivi-2(g=32,r=32,meta=f32)/token-2(c=32,meta=f32)",
        "kivi-2(g=32,r=32,rounding=score-aware)",
        "klt-2(g=32,r=32)",
        "klt-1.5(g=128,r=128)+score-optimal(rank=4,bits=2)/token-2(c=32)",
        "klt-1(g=128,r=124,meta=f32)/token-2(c=32)",
        "klt-2(g=32,r=32,ranges=static)",
        "klt-3(g=128,r=128,ranges=lloyd,metric=fisher)/klt-4(ranges=lloyd)",
        "dense/klt-2(g=128,r=124)",
        "dense/klt-3(g=32,r=32,ranges=static,metric=output)",
        "dense/channel-2(g=128,r=124)",
        "dense/token-2(c=32)",
        "dense",
    ] {
        for (heads, kv_heads, width) in [(9, 3, 64), (8, 8, 64), (14, 2, 64), (32, 8, 128)] {
            let case = Case::new(scheme, (heads, kv_heads, None), width, 1);
            let mut cache = case.cache(DenseType::F16, 0);
            let device = Device::flex();
            // Values under a2 need queries, a few at a time so that their scores fit.
            let stretch = 1024;
            for start in (0..4096).step_by(stretch) {
                let part = |heads, seed| normal([1, heads, stretch, width], seed + start as u64, &device);
                if scheme.contains("a2") {
                    let site = site(start, Some(64), width);
                    cache.attend(&site, part(heads, 1), part(kv_heads, 2), part(kv_heads, 3));
                } else {
                    cache.extend(0, part(kv_heads, 2), part(kv_heads, 3));
                }
            }
            let keys = key_statistics(kv_heads, width);
            let budget = Budget::calibrated_at(&case.scheme, Some(&keys), &case.shape(), 4096);
            let accounted = budget.bytes_per_token * 4096.0;
            assert!(budget.key_bits <= Budget::at(&case.scheme, &case.shape(), 4096).key_bits + 1e-9, "{scheme}");
            let off = cache.bytes() as f64 / accounted - 1.0;
            assert!((-0.001..0.02).contains(&off), "{scheme}, {kv_heads} heads of {width}: {off:+.4}");
        }
    }
}

#[test]
fn a_saved_cache_loads_bit_for_bit_and_anything_else_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for scheme in [
        "kivi-2(g=8,r=5,sinks=3)+query-pca(rank=4,bits=4)/token-2(c=8)",
        "rotated-3(g=8,r=5)+random(rank=3,bits=6,scope=query-head)/a2-3(c=8,g=4,r=9)",
        "grid-2(g=1,r=1)",
        "klt-1.5(g=8,r=5)+query-pca(rank=4,bits=4)",
        "klt-1.5(g=8,r=5)+learned(rank=4,bits=4)",
        "klt-2(g=4,r=5,ranges=static)",
        "klt-4(g=4,r=5,ranges=lloyd,metric=fisher)/klt-4(ranges=lloyd)",
        "dense/klt-2.5(g=8,r=5)",
        "dense/channel-2(g=8,r=5)",
        "dense",
    ] {
        let case = Case::new(scheme, (4, 2, None), 16, 60);
        let path = folder.path().join("cache.safetensors");
        for (len, dense) in [(0, DenseType::F16), (2, DenseType::F32), (37, DenseType::F16), (50, DenseType::F32)] {
            let mut cache = case.cache(dense, 0);
            (0..len).for_each(|t| drop(case.step(&mut cache, t)));
            cache.save(&path, "model").unwrap();
            let modules = || {
                let basis = basis(&case.scheme, 1, 4, 2, 16);
                vec![modules(&case.scheme, basis.as_ref(), 2, 16, &Device::flex())]
            };
            let mut loaded = PackedCache::load(&path, "model", modules(), case.shape()).unwrap();
            assert_eq!((loaded.len(), loaded.dense_type()), (len, dense));
            // What it holds is the same bits, and so is everything after.
            let again = folder.path().join("again.safetensors");
            loaded.save(&again, "model").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&again).unwrap(), "{scheme} {len}");
            for t in len..60 {
                assert_eq!(case.step(&mut loaded, t), case.step(&mut cache, t), "{scheme} {len}, token {t}");
            }
            let refused = |path: &std::path::Path, model: &str, shape| {
                let error = PackedCache::load(path, model, modules(), shape).map(|_| ()).unwrap_err().to_string();
                assert!(error.contains(&path.display().to_string()), "{error}");
                error
            };
            assert!(refused(&path, "other", case.shape()).contains("model is model, expected other"));
            assert!(refused(&path, "model", HeadShape { kv_heads: 4, ..case.shape() }).contains("shape is"));
            assert!(refused(folder.path(), "model", case.shape()).contains("cannot be read"));
            // Every byte counts: flipped or cut off.
            let whole = std::fs::read(&path).unwrap();
            let damaged = folder.path().join("damaged.safetensors");
            for at in (0..whole.len()).step_by(whole.len() / 40 + 1).chain([whole.len() - 1]) {
                let mut bytes = whole.clone();
                bytes[at] ^= 4;
                std::fs::write(&damaged, &bytes).unwrap();
                refused(&damaged, "model", case.shape());
                std::fs::write(&damaged, &whole[..at]).unwrap();
                refused(&damaged, "model", case.shape());
            }
        }
    }
}

#[test]
fn a_cache_of_another_calibration_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for scheme in [
        "klt-2(g=8,r=5)",
        "klt-2(g=8,r=5,ranges=static)",
        "klt-2(g=8,r=5,ranges=lloyd,metric=fisher)",
        "dense/klt-2(g=8,r=5,ranges=lloyd)",
        "dense/klt-2(g=8,r=5,ranges=static,metric=output)",
        "grid-2(g=8,r=5)",
        "kivi-2(g=8,r=5,center)",
    ] {
        let case = Case::new(scheme, (4, 2, None), 16, 40);
        let path = folder.path().join("cache.safetensors");
        let mut cache = case.cache(DenseType::F16, 0);
        (0..40).for_each(|t| drop(case.step(&mut cache, t)));
        cache.save(&path, "model").unwrap();
        let mut keys = key_statistics(2, 16);
        [&mut keys.mean, &mut keys.deviation, &mut keys.rms].into_iter().flatten().for_each(|x| *x *= 1.5);
        let reversed = |keys: &headq::KeyStatistics| keys.moments.iter().rev().cloned().collect();
        keys.moments = reversed(&keys);
        let values = keys.values.as_ref().unwrap();
        keys.values = Some(Arc::new(headq::KeyStatistics { moments: reversed(values), ..(**values).clone() }));
        keys.fits = Default::default();
        let module = headq::HeadqAttention::calibrated(case.scheme, None, Some(&keys), 0, &Device::flex());
        let error = PackedCache::load(&path, "model", vec![module], case.shape()).unwrap_err().to_string();
        assert!(error.contains("calibration is") && error.contains("belongs to something else"), "{error}");
    }
}

/// E and F, and the factors of coefficients whose levels are fixed, are part of what codes mean; those of min/max ranges are not.
#[test]
fn a_cache_of_another_learned_transform_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    for (scheme, fixed) in [
        ("klt-2(g=8,r=5,ranges=static)+learned(rank=2,bits=3)", true),
        ("klt-2(g=8,r=5)+learned(rank=2,bits=3)", false),
    ] {
        let case = Case::new(scheme, (4, 2, None), 16, 40);
        let mut cache = case.cache(DenseType::F16, 0);
        (0..40).for_each(|t| drop(case.step(&mut cache, t)));
        cache.save(&path, "model").unwrap();
        let learned = basis(&case.scheme, 1, 4, 2, 16).unwrap();
        let load = |basis: headq::Basis| {
            let module = modules(&case.scheme, Some(&basis), 2, 16, &Device::flex());
            PackedCache::load(&path, "model", vec![module], case.shape()).map(|_| ()).map_err(|e| e.to_string())
        };
        assert_eq!(load(learned.clone()), Ok(()));
        let error = load(learned.clone().with_base_transform(None)).unwrap_err();
        assert!(error.contains("calibration is"), "{error}");
        assert!(!fixed || load(learned.with_base_clip(None)).unwrap_err().contains("calibration is"), "{scheme}");
    }
}
