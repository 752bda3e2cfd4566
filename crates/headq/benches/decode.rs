//! One layer's decode attention over a packed cache, by scheme and context: `cargo bench --bench decode`.
//!
//! The heads are SmolLM2-135M's. Times of one run compare with each other only where the machine was left alone.

#![allow(missing_docs)]

use burn::tensor::{Device, Tensor, TensorData};
use divan::Bencher;
use divan::counter::BytesCount;
use headq::budget::HeadShape;
use headq::scheme::{Family, Scheme, Scope};
use headq::{AttentionSite, Basis, DecodeAttention, DenseType, HeadqAttention, LayerStats, PackedCache};

const SHAPE: HeadShape = HeadShape { layers: 1, heads: 9, kv_heads: 3, head_dim: 64 };

const CONTEXTS: [usize; 2] = [1024, 8192];

const SCHEMES: [&str; 9] = [
    "dense f32",
    "dense f16",
    "kivi-1(g=32,r=32)/token-1(c=32)",
    "kivi-2(g=32,r=32)/token-2(c=32)",
    "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)",
    "kivi-3(g=32,r=32)/token-3(c=32)",
    "kivi-4(g=32,r=32)/token-4(c=32)",
    "token-2(g=32,r=32,c=32)/token-2(c=32)",
    "rotated-2(g=32,r=32)/token-2(c=32)",
];

fn main() {
    divan::main();
}

/// Numbers that look random.
fn noise(count: usize, salt: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + salt * 104_729) % 1009) as f32 / 504.5 - 1.0).collect()
}

fn filled(scheme: &str, context: usize) -> PackedCache {
    let (scheme, dense) = match scheme.strip_prefix("dense ") {
        Some("f32") => ("dense", DenseType::F32),
        Some(_) => ("dense", DenseType::F16),
        None => (scheme, DenseType::F16),
    };
    let scheme: Scheme = scheme.parse().expect("a scheme of the list");
    let device = Device::flex();
    let HeadShape { heads, kv_heads, head_dim, .. } = SHAPE;
    let basis = scheme.side().map(|side| {
        let mut stats = LayerStats::new(heads, kv_heads, head_dim);
        let rows = |heads: usize, salt: usize| noise(heads * 200 * head_dim, salt);
        stats.add(&rows(heads, 1), &rows(kv_heads, 2), &rows(kv_heads, 3), &rows(kv_heads, 4));
        Basis::fit(&[stats], Family::QueryPca, side.rank, Scope::KvHead, 0).expect("statistics of full rank")
    });
    let module = HeadqAttention::new(scheme, basis.as_ref(), 0, &device);
    let mut cache = PackedCache::new(vec![module], SHAPE, dense).expect("a scheme that fits the heads");
    let tensor = |salt: usize| {
        let data = TensorData::new(noise(kv_heads * context * head_dim, salt), [1, kv_heads, context, head_dim]);
        Tensor::<4>::from_data(data, &device)
    };
    cache.extend(0, tensor(5), tensor(6));
    cache
}

/// Bytes per second are those of the cache's pages.
#[divan::bench(args = CONTEXTS.iter().flat_map(|&c| SCHEMES.iter().map(move |&s| Case(c, s))))]
fn attend_one(bencher: Bencher, Case(context, scheme): Case) {
    let mut cache = filled(scheme, context);
    let (q, k, v) = (noise(9 * 64, 7), noise(3 * 64, 8), noise(3 * 64, 9));
    let mut out = vec![0.0; q.len()];
    bencher.counter(BytesCount::new(cache.bytes())).bench_local(|| {
        let site = AttentionSite { layer: 0, start: cache.len(), scale: 0.125, window: None };
        cache.attend_one(&site, &q, &k, &v, &mut out);
        out[0]
    });
}

#[derive(Clone, Copy)]
struct Case(usize, &'static str);

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:>5} {}", self.0, self.1)
    }
}
