//! What a packed cache takes of the process's memory. A binary of its own, so that nothing else is measured.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use burn::tensor::Device;
use common::{basis, modules, normal};
use headq::budget::{Budget, HeadShape};
use headq::scheme::Scheme;
use headq::{AttentionSite, DecodeAttention, DenseType, PackedCache};

/// Bytes of memory that are resident, anonymous ones only: `None` where the system does not say.
fn resident() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("RssAnon:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<f64>().ok()? * 1024.0)
}

/// Fills a cache as decoding does: a few tokens at a time, codes when they are due.
fn fill(cache: &mut PackedCache, shape: &HeadShape, tokens: usize) {
    const STRETCH: usize = 64;
    let device = Device::flex();
    for start in (0..tokens).step_by(STRETCH) {
        for layer in 0..shape.layers {
            let part = |seed: usize| {
                normal([1, shape.kv_heads, STRETCH, shape.head_dim], (start + layer + seed) as u64, &device)
            };
            cache.extend(layer, part(1), part(2));
        }
    }
}

#[test]
fn resident_memory_grows_by_what_is_accounted() {
    if resident().is_none() {
        eprintln!("skipped: this system does not say how much memory is resident");
        return;
    }
    // SmolLM2-135M.
    let shape = HeadShape { layers: 30, heads: 9, kv_heads: 3, head_dim: 64 };
    let scheme: Scheme = "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)".parse().unwrap();
    let basis = basis(&scheme, 1, shape.heads, shape.kv_heads, shape.head_dim);
    let device = Device::flex();
    let cache = || {
        let layer = || modules(&scheme, basis.as_ref(), shape.kv_heads, shape.head_dim, &device);
        PackedCache::new((0..shape.layers).map(|_| layer()).collect(), shape, DenseType::F16).unwrap()
    };
    // What quantizers and allocators keep for themselves is there before the measurement.
    fill(&mut cache(), &shape, 256);
    let mut measured = cache();
    let before = resident().unwrap();
    let tokens = 16_384;
    fill(&mut measured, &shape, tokens);
    let (q, k, v) = (vec![0.1; 9 * 64], vec![0.2; 3 * 64], vec![0.3; 3 * 64]);
    let mut out = vec![0.0; q.len()];
    for layer in 0..shape.layers {
        let site = AttentionSite { layer, start: tokens, scale: 0.125, window: None };
        measured.attend_one(&site, &q, &k, &v, &mut out);
    }
    let grown = resident().unwrap() - before;
    let accounted = Budget::at(&scheme, &shape, tokens).bytes_per_token * tokens as f64;
    let f16 = (tokens * 2 * shape.layers * shape.kv_heads * shape.head_dim * 2) as f64;
    println!(
        "16,384 tokens: resident growth {:.1} MB, pages {:.1} MB, accounted {:.1} MB, f16 {:.1} MB",
        grown / 1e6,
        measured.bytes() as f64 / 1e6,
        accounted / 1e6,
        f16 / 1e6
    );
    assert!(grown <= 1.1 * accounted, "{:.3} times the accounted bytes", grown / accounted);
    assert!(grown < 0.25 * f16, "{:.3} of f16", grown / f16);
    assert!(grown > 0.9 * accounted, "the codes are really there: {:.3}", grown / accounted);
}
