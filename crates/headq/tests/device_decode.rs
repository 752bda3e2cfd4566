//! Attention over packed codes on a device gives what the host's pages give.
//!
//! Only in builds with `wgpu` or `cuda`, and where there is such a device; what is left out is printed.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use burn::tensor::{Device, Tensor};
use common::{basis, modules, normal};
use headq::budget::HeadShape;
use headq::device::Backend;
use headq::scheme::Scheme;
use headq::{Attention, AttentionSite, DecodeAttention, DenseType, DeviceName, PackedCache};

/// Devices that CubeCL runs.
fn devices() -> Vec<(DeviceName, Device)> {
    let found: Vec<_> = DeviceName::present()
        .into_iter()
        .filter(|(name, _)| matches!(name.backend(), Backend::Cuda | Backend::Wgpu))
        .collect();
    for backend in [Backend::Cuda, Backend::Wgpu] {
        if !found.iter().any(|(name, _)| name.backend() == backend) {
            let why = if backend.is_built() { "no such device here" } else { "not in this build" };
            println!("skipped: {}, {why}", backend.name());
        }
    }
    found
}

struct Case {
    scheme: Scheme,
    shape: HeadShape,
    window: Option<usize>,
    qkv: [Tensor<4>; 3],
}

impl Case {
    fn new(scheme: &str, (heads, kv_heads, window): (usize, usize, Option<usize>), width: usize, total: usize) -> Self {
        let host = Device::flex();
        let part = |heads, seed| normal([1, heads, total, width], seed, &host);
        let qkv = [part(heads, 1), part(kv_heads, 2) + 0.5, part(kv_heads, 3)];
        let shape = HeadShape { layers: 1, heads, kv_heads, head_dim: width };
        Self { scheme: scheme.parse().unwrap(), shape, window, qkv }
    }

    fn cache(&self, device: &Device, rewind: usize) -> PackedCache {
        let HeadShape { heads, kv_heads, head_dim, .. } = self.shape;
        let basis = basis(&self.scheme, 1, heads, kv_heads, head_dim);
        let module = modules(&self.scheme, basis.as_ref(), kv_heads, head_dim, device);
        PackedCache::with_rewind(vec![module], self.shape, DenseType::F16, rewind).unwrap()
    }

    fn site(&self, start: usize) -> AttentionSite {
        let scale = 1.0 / (self.shape.head_dim as f64).sqrt();
        AttentionSite { layer: 0, start, scale, window: self.window }
    }

    /// Tokens through tensors of a device: `[tokens][heads · width]`.
    fn feed(&self, cache: &mut PackedCache, device: &Device, start: usize, end: usize) -> Vec<Vec<f32>> {
        let part = |x: Tensor<4>| Tensor::from_data(x.narrow(2, start, end - start).into_data(), device);
        let [q, k, v] = self.qkv.clone().map(part);
        let out = cache.attend(&self.site(start), q, k, v);
        (0..end - start).map(|t| out.clone().narrow(2, t, 1).try_into_vec_as().unwrap()).collect()
    }

    /// One token through slices of the host.
    fn step(&self, cache: &mut PackedCache, t: usize) -> Vec<f32> {
        let [q, k, v] = self.qkv.clone().map(|x| x.narrow(2, t, 1).try_into_vec_as::<f32>().unwrap());
        let mut out = vec![f32::NAN; q.len()];
        cache.attend_one(&self.site(t), &q, &k, &v, &mut out);
        out
    }

    fn check(&self, found: &[f32], expected: &[f32], what: &str) {
        assert_eq!(found.len(), expected.len());
        let scale = expected.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
        let off = found.iter().zip(expected).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / scale;
        assert!(off < 1e-4, "{} {:?} {:?}, {what}: {off:e}", self.scheme, self.shape, self.window);
    }
}

#[test]
fn a_device_reads_codes_as_the_host_does() {
    for (name, device) in devices() {
        for scheme in [
            "kivi-2(g=8,r=5)/token-2(c=8)",
            "kivi-1(g=8,r=5)/token-1",
            "kivi-3(g=8,r=0,sinks=3)/token-3(c=8)",
            "kivi-5(g=12,r=5)/token-5(g=5,r=3,sinks=2)",
            "kivi-6(g=8,r=5,meta=f32)/token-6(c=4,meta=f32)",
            "kivi-7(g=1,r=1)/token-7(g=1,r=0)",
            "token-4(g=8,r=5,c=8)/token-4(c=8)",
            "token-8(g=8,r=5,sinks=2,c=4)/token-8",
            "kivi-2(g=8,r=5)+query-pca(rank=4,bits=4)/token-2",
            "kivi-2(g=8,r=5,center,range=0.85)+query-pca(rank=3,bits=3,sign=-1)/token-2",
            "kivi-2(g=8,r=5,sinks=4)+score-optimal(rank=5,bits=8,scope=query-head)/token-3(c=8,g=4,r=9,sinks=2)",
            "token-2(g=8,r=5)+random(rank=7,bits=5,scales=token)/token-2",
            "rotated-3(g=8,r=5)+query-pca(rank=4,bits=4)/token-4(c=8)",
            "rotated-2(g=8,r=5,c=4,center)/token-2",
            "kivi-2(g=8,r=5)",
            "dense/token-2(g=8,r=5,c=8)",
            "dense",
        ] {
            for shape in [(4, 4, None), (6, 2, Some(11)), (5, 1, None)] {
                let case = Case::new(scheme, shape, 16, 47);
                let (mut here, mut there) = (case.cache(&Device::flex(), 0), case.cache(&device, 0));
                for t in 0..47 {
                    let expected = case.step(&mut here, t);
                    let found = &case.feed(&mut there, &device, t, t + 1)[0];
                    case.check(found, &expected, &format!("{name}, token {t}"));
                }
                assert!(there.device_bytes() > 0, "{scheme} is read on {name}");
                assert_eq!(here.device_bytes(), 0);
            }
        }
    }
}

#[test]
fn what_is_not_covered_goes_through_tensors() {
    for (name, device) in devices() {
        for (scheme, width) in [("grid-2(g=8,r=5)/token-2", 16), ("kivi-2(g=8,r=5)/a2-2", 16), ("kivi-2/token-2", 20)] {
            let case = Case::new(scheme, (4, 2, None), width, 30);
            let (mut here, mut there) = (case.cache(&Device::flex(), 0), case.cache(&device, 0));
            for t in 0..30 {
                let expected = case.step(&mut here, t);
                case.check(&case.feed(&mut there, &device, t, t + 1)[0], &expected, &format!("{name}, token {t}"));
            }
            assert_eq!(there.device_bytes(), 0, "{scheme} is not read on {name}");
        }
    }
}

/// Long contexts fill several pages and, where few tokens fit, more than one segment; prompts fill them at once.
#[test]
fn prompts_and_long_contexts_cross_pages_and_segments() {
    for (name, device) in devices() {
        for (scheme, shape, width, total, prompt) in [
            ("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)", (9, 3, None), 64, 600, 70),
            ("kivi-3(g=128,r=100,sinks=4)+score-optimal(rank=8,bits=3)/token-5", (9, 3, Some(333)), 64, 600, 590),
            ("kivi-5(g=48,r=7,sinks=70)/token-7(g=16,r=3,sinks=5,c=16)", (14, 2, None), 80, 600, 300),
            ("token-6(g=20,r=33,c=24)/token-2(g=64,r=128)", (4, 2, Some(200)), 48, 620, 610),
            ("kivi-4(g=100,r=20)/token-4(c=64)", (4, 1, Some(150)), 128, 3300, 3250),
            ("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)", (2, 1, None), 32, 2120, 2000),
            ("dense/token-2(c=32)", (4, 2, None), 32, 1100, 1000),
        ] {
            let case = Case::new(scheme, shape, width, total);
            let (mut here, mut there) = (case.cache(&Device::flex(), 0), case.cache(&device, 0));
            case.feed(&mut here, &Device::flex(), 0, prompt);
            case.feed(&mut there, &device, 0, prompt);
            for t in prompt..total {
                let expected = case.step(&mut here, t);
                case.check(&case.feed(&mut there, &device, t, t + 1)[0], &expected, &format!("{name}, token {t}"));
            }
        }
    }
}

#[test]
fn cutting_prompts_in_between_and_other_devices_leave_nothing_behind() {
    for (name, device) in devices() {
        for scheme in [
            "kivi-2(g=8,r=5,sinks=3)+query-pca(rank=4,bits=4)/token-2(c=8,g=4,r=9)",
            "rotated-3(g=8,r=5)/token-3(g=3,r=2)",
            "dense/token-2(g=8,r=5,c=8)",
        ] {
            let case = Case::new(scheme, (4, 2, Some(60)), 16, 120);
            let (mut here, mut there) = (case.cache(&Device::flex(), 25), case.cache(&device, 25));
            let mut t = 0;
            // One by one up to a length, some tokens at once, then back to a length.
            for (to, more, back) in
                [(40, 0, 20), (50, 9, 45), (60, 20, 79), (90, 1, 70), (100, 0, 99), (101, 0, 76), (3, 40, 0), (9, 0, 0)]
            {
                for t in t..to {
                    let expected = case.step(&mut here, t);
                    case.check(&case.feed(&mut there, &device, t, t + 1)[0], &expected, &format!("{name}, token {t}"));
                }
                t = t.max(to);
                if more > 0 {
                    case.feed(&mut here, &Device::flex(), t, t + more);
                    case.feed(&mut there, &device, t, t + more);
                }
                here.truncate(back).unwrap();
                there.truncate(back).unwrap();
                t = back;
            }
        }
    }
}

/// A cache that the host saved goes on on a device, and one that a device filled goes on on the host.
#[test]
fn saved_caches_go_on_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    for (name, device) in devices() {
        let scheme = "kivi-3(g=8,r=5,sinks=3)+query-pca(rank=4,bits=4)/token-2(c=8)";
        let case = Case::new(scheme, (4, 2, None), 16, 90);
        let load = |cache: &mut PackedCache, to: &Device| {
            let path = folder.path().join("cache.safetensors");
            cache.save(&path, "model").unwrap();
            let basis = basis(&case.scheme, 1, 4, 2, 16);
            let module = modules(&case.scheme, basis.as_ref(), 2, 16, to);
            PackedCache::load(&path, "model", vec![module], case.shape).unwrap()
        };
        let (mut here, mut first) = (case.cache(&Device::flex(), 0), case.cache(&Device::flex(), 0));
        (0..40).for_each(|t| drop((case.step(&mut here, t), case.step(&mut first, t))));
        let mut there = load(&mut first, &device);
        for t in 40..70 {
            let expected = case.step(&mut here, t);
            case.check(&case.feed(&mut there, &device, t, t + 1)[0], &expected, &format!("{name}, token {t}"));
        }
        assert!(there.device_bytes() > 0);
        let mut back = load(&mut there, &Device::flex());
        for t in 70..90 {
            let expected = case.step(&mut here, t);
            case.check(&case.step(&mut back, t), &expected, &format!("back from {name}, token {t}"));
        }
    }
}

/// What is coded is not kept wide: a token's bytes are those of its codes, scales and zeros.
#[test]
fn codes_stay_packed_on_the_device() {
    for (_, device) in devices() {
        let case = Case::new("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)", (9, 3, None), 64, 1057);
        let mut cache = case.cache(&device, 0);
        case.feed(&mut cache, &device, 0, 1056);
        case.feed(&mut cache, &device, 1056, 1057);
        // 1024 tokens are coded. A group of 32 has, in each head, 2-bit keys and values, 4-bit side codes, and halves: a scale and a
        // zero of each key channel and side coefficient, and for each token two of both.
        let group = 32 * (64 / 4 + 64 / 4 + 4 / 2) + 2 * (2 * 64 + 2 * 4 + 32 * 2 * 2);
        let window = 2 * (32 + 32) * 3 * 64 * 4;
        assert_eq!(cache.device_bytes(), 1024 / 32 * 3 * group + window);
    }
}
