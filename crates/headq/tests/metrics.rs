//! E1–E8 against an f64 brute force, and the properties that they must have.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use burn::tensor::{Device, Tensor, TensorData};
use common::{basis, heads, normal, read, teacher_forced};
use headq::metrics::{attention_kl, excess_removed, fisher_and_kl, fisher_error};
use headq::scheme::{Flush, Scheme};
use headq::{
    Attention, AttentionSite, DenseAttention, Diagnostics, HeadDiagnostics, LayerProbe, QuantizedCache, QueryReading,
    QuerySink,
};

const D: usize = 8;

/// E2 as written.
fn brute_fisher(p: &[f64], delta: &[f64]) -> f64 {
    let mean: f64 = p.iter().zip(delta).map(|(p, x)| p * x).sum();
    let square: f64 = p.iter().zip(delta).map(|(p, x)| p * x * x).sum();
    0.5 * (square - mean * mean)
}

/// E3 as written: Σ p (log p − log p̂).
fn brute_kl(p: &[f64], delta: &[f64]) -> f64 {
    let z: f64 = p.iter().zip(delta).map(|(p, x)| p * x.exp()).sum();
    p.iter().zip(delta).map(|(p, x)| if *p > 0.0 { p * (p.ln() - (p * x.exp() / z).ln()) } else { 0.0 }).sum()
}

fn example(n: usize) -> (Vec<f32>, Vec<f32>) {
    let raw: Vec<f64> = (0..n).map(|i| ((i * 37 % 17) as f64 / 4.0).exp()).collect();
    let total: f64 = raw.iter().sum();
    let delta = (0..n).map(|i| ((i * 29 % 23) as f32 - 11.0) / 6.0).collect();
    (raw.into_iter().map(|v| (v / total) as f32).collect(), delta)
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

fn close(found: f64, expected: f64, relative: f64) {
    assert!((found - expected).abs() <= relative * expected.abs() + 1e-15, "found {found:e}, expected {expected:e}");
}

fn row(x: &[f32]) -> Tensor<2> {
    Tensor::from_data(TensorData::new(x.to_vec(), [1, x.len()]), &Device::flex())
}

#[test]
fn fisher_and_kl_are_e2_and_e3() {
    let (p, delta) = example(40);
    let (fisher, kl) = fisher_and_kl(&p, &delta, 0.0);
    close(fisher, brute_fisher(&wide(&p), &wide(&delta)), 1e-6);
    close(kl, brute_kl(&wide(&p), &wide(&delta)), 1e-6);
    let tensor: f32 = fisher_error(row(&p), row(&delta)).into_scalar();
    close(tensor.into(), fisher, 1e-5);
    let tensor: f32 = attention_kl(row(&p), row(&delta)).into_scalar();
    close(tensor.into(), kl, 1e-5);
}

#[test]
fn keys_that_do_not_change_may_be_left_out() {
    let (p, mut delta) = example(40);
    delta[25..].fill(0.0);
    let rest = p[25..].iter().map(|&v| f64::from(v)).sum();
    let (fisher, kl) = fisher_and_kl(&p[..25], &delta[..25], rest);
    close(fisher, brute_fisher(&wide(&p), &wide(&delta)), 1e-6);
    close(kl, brute_kl(&wide(&p), &wide(&delta)), 1e-6);
}

#[test]
fn kl_over_fisher_tends_to_one_as_the_perturbation_shrinks() {
    let (p, delta) = example(40);
    let mut last = f64::INFINITY;
    for power in 0..7 {
        let shrunk: Vec<f32> = delta.iter().map(|&x| x * 0.1f32.powi(power)).collect();
        let (fisher, kl) = fisher_and_kl(&p, &shrunk, 0.0);
        let off = (kl / fisher - 1.0).abs();
        // The next term of the expansion is third order, so that each step brings the ratio ten times nearer.
        assert!(off < last * 0.2 || off < 1e-9, "1e-{power}: {off:e} after {last:e}");
        last = off;
        let tensor: f32 = attention_kl(row(&p), row(&shrunk)).into_scalar();
        close(tensor.into(), kl, 2e-5);
        let tensor: f32 = fisher_error(row(&p), row(&shrunk)).into_scalar();
        close(tensor.into(), fisher, 2e-5);
    }
    assert!(last < 1e-6);
}

#[test]
fn a_constant_change_of_all_scores_is_no_error() {
    let (p, _) = example(40);
    for constant in [1e-3f32, 1.0, 1e3] {
        let delta = vec![constant; 40];
        let (fisher, kl) = fisher_and_kl(&p, &delta, 0.0);
        assert!(
            fisher.abs() < 1e-18 * f64::from(constant).powi(2).max(1.0)
                && kl.abs() < 1e-18 * f64::from(constant).powi(2).max(1.0)
        );
        let tensor: f32 = attention_kl(row(&p), row(&delta)).into_scalar();
        assert!(tensor.abs() < 1e-9 * constant.powi(2).max(1.0));
    }
}

/// The same constant vector added to every key: E2 and E3 stay at 0 while E4 is as large as the vector.
#[test]
fn a_constant_vector_on_all_keys_is_null_for_scores_and_not_for_storage() {
    let device = Device::flex();
    let (q, k) = (normal([1, 1, 20, D], 1, &device), normal([1, 1, 20, D], 2, &device));
    let (q, k) = (heads(&q).remove(0), heads(&k).remove(0));
    let shift = 7.0;
    let shifted: Vec<Vec<f64>> = k.iter().map(|k| k.iter().map(|v| v + shift).collect()).collect();
    let mse =
        k.iter().flatten().zip(shifted.iter().flatten()).map(|(a, b)| (b - a).powi(2)).sum::<f64>() / (20 * D) as f64;
    for q in &q {
        let scores: Vec<f64> = k.iter().map(|k| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()).collect();
        let total: f64 = scores.iter().map(|s| s.exp()).sum();
        let p: Vec<f32> = scores.iter().map(|s| (s.exp() / total) as f32).collect();
        let dot = |k: &[f64]| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
        let delta: Vec<f32> = k.iter().zip(&shifted).map(|(k, s)| (dot(s) - dot(k)) as f32).collect();
        let (fisher, kl) = fisher_and_kl(&p, &delta, 0.0);
        assert!(mse > 1e10 * fisher.max(kl), "E4 is {mse}, E2 {fisher:e}, E3 {kl:e}");
    }
}

#[test]
fn kl_has_finite_gradients_where_the_change_is_zero_or_huge() {
    let device = Device::flex().autodiff();
    let p = Tensor::<2>::from_data(TensorData::new(vec![0.25f32; 4], [1, 4]), &device);
    let delta = Tensor::<2>::from_data(TensorData::new(vec![0.0f32, 1e-6, 0.6, 20.0], [1, 4]), &device).require_grad();
    let gradients = attention_kl(p, delta.clone()).sum().backward();
    let found: Vec<f32> = delta.grad(&gradients).unwrap().try_into_vec_as().unwrap();
    // ∂KL/∂δ_j = p̂_j − p_j.
    let z: f64 = [0.0f64, 1e-6, 0.6, 20.0].iter().map(|x| x.exp()).sum();
    for (x, g) in [0.0f64, 1e-6, 0.6, 20.0].iter().zip(found) {
        assert!((f64::from(g) - (x.exp() / z - 0.25)).abs() < 1e-4, "{g}");
    }
}

/// Everything that a probe says of a scheme: sums by head, and every query.
struct Probed {
    heads: HeadDiagnostics,
    queries: Vec<QueryReading>,
}

#[derive(Default)]
struct Told(Vec<QueryReading>);

impl QuerySink for Told {
    fn query(&mut self, _: usize, reading: &QueryReading) {
        self.0.push(*reading);
    }
}

fn site(window: Option<usize>) -> AttentionSite {
    AttentionSite { layer: 0, start: 0, scale: 1.0 / (D as f64).sqrt(), window }
}

fn probe(scheme: &Scheme, window: Option<usize>, tokens: usize) -> (Probed, Expected) {
    let device = Device::flex();
    let basis = basis(scheme, 1, 4, 2, D);
    let (q, k, v) = (
        normal([1, 4, tokens, D], 7, &device),
        normal([1, 2, tokens, D], 8, &device),
        normal([1, 2, tokens, D], 9, &device),
    );
    let site = site(window);
    let expected = Expected::new(scheme, basis.as_ref(), &site, [&q, &k, &v]);
    let cache = teacher_forced(scheme, basis.as_ref(), 2, D, &device);
    let mut queries = Told::default();
    let mut probe = LayerProbe::new(vec![cache.layers()]).with_queries(&mut queries);
    let dense = probe.attend(&site, q.clone(), k.clone(), v.clone());
    let heads = probe.finish().remove(0);
    let reference = DenseAttention::new().attend(&site, q, k, v);
    let off: f32 = (dense - reference).abs().max().into_scalar();
    assert!(off < 1e-5, "the probe is dense attention");
    (Probed { heads, queries: queries.0 }, expected)
}

/// The diagnostics of each KV head, from the definitions.
struct Expected {
    /// By query head, then by token.
    rows: Vec<Vec<common::Reading>>,
    /// Squared errors of coded key elements, by KV head.
    key_errors: Vec<Vec<f64>>,
}

impl Expected {
    fn new(scheme: &Scheme, basis: Option<&headq::Basis>, site: &AttentionSite, [q, k, v]: [&Tensor<4>; 3]) -> Self {
        let rows = read(scheme, basis, site, &heads(q), &heads(k), &heads(v));
        let errors = |(h, k): (usize, &common::Head)| -> Vec<f64> {
            let w = basis.map(|b| common::matrix(b, b.encoder_of(0), h));
            let held = common::shifted(scheme, k, h);
            let coded = common::code_keys(scheme, &held, h, w.as_ref(), &common::learned_head(basis, 0, h, D));
            let pairs = held.iter().zip(coded.base).filter_map(|(k, base)| Some((k, base?)));
            pairs.flat_map(|(k, base)| base.into_iter().zip(k.clone()).map(|(b, k)| (b - k).powi(2))).collect()
        };
        Self { rows, key_errors: heads(k).iter().enumerate().map(errors).collect() }
    }

    /// Holds the sums of the query heads `of` and the KV heads that they read against the definitions.
    fn check(&self, found: &Diagnostics, of: std::ops::Range<usize>) {
        let group = self.rows.len() / self.key_errors.len();
        let rows: Vec<&common::Reading> = self.rows[of.clone()].iter().flatten().collect();
        let mean = |f: &dyn Fn(&common::Reading) -> f64| rows.iter().map(|r| f(r)).sum::<f64>() / rows.len() as f64;
        let distance = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        close(found.fisher().unwrap(), mean(&|r| brute_fisher(&r.p, &r.delta)), 2e-5);
        close(found.kl().unwrap(), mean(&|r| brute_kl(&r.p, &r.delta)), 2e-5);
        close(found.readout_error().unwrap(), mean(&|r| distance(&r.readout, &r.dense_output) / D as f64), 2e-5);
        close(found.readout_diagonal().unwrap(), mean(&|r| r.diagonal), 2e-5);
        let norm = mean(&|r| r.dense_output.iter().map(|b| b * b).sum::<f64>());
        close(found.output_error().unwrap(), mean(&|r| distance(&r.output, &r.dense_output)) / norm, 2e-5);
        let errors: Vec<f64> = self.key_errors[of.start / group..of.end / group].concat();
        match errors.is_empty() {
            true => assert_eq!(found.key_mse(), None),
            false => close(found.key_mse().unwrap(), errors.iter().sum::<f64>() / errors.len() as f64, 1e-5),
        }
    }
}

#[test]
fn diagnostics_agree_with_the_definitions() {
    for scheme in [
        "kivi-2(g=8,r=5)",
        "token-3(g=8,r=5,sinks=3)",
        "kivi-2(g=8,r=5)+query-pca(rank=3,bits=4)",
        "kivi-2(g=8,r=5)+score-optimal(rank=3,bits=3,sign=-1)",
        "dense/token-2(g=8,r=5,c=4)",
        "kivi-2(g=8,r=5,sinks=1)+query-pca(rank=3,bits=4)/token-2(c=4,g=4,r=9,sinks=2)",
        "grid-2(g=8,r=5,c=1)",
        "grid-3(g=8,r=5,center)/a2-2(c=4,g=4,r=9)",
        "rotated-2(g=8,r=5)/a2-3(c=4)",
        "kivi-2(g=8,r=5,center)/mse-2(c=4)",
        "dense/a2-2(g=8,r=5,c=4,sinks=1)",
        "kivi-2(g=8,r=5)/random-2(c=4)",
        "kivi-2(g=8,r=5)/recency-2(c=4)",
        "dense/channel-2(g=8,r=5)",
        "kivi-2(g=8,r=5)/channel-3(g=4,r=9,range=0.9)",
        "dense/klt-2(g=8,r=5,metric=output)",
        "klt-2(g=8,r=5)/klt-2.5(ranges=static,metric=output)",
    ] {
        let scheme: Scheme = scheme.parse().unwrap();
        for (window, tokens) in [(None, 45), (Some(9), 45), (None, 150), (Some(40), 150)] {
            let (found, expected) = probe(&scheme, window, tokens);
            expected.check(&found.heads.total(), 0..4);
            expected.check(found.heads.head(0, 0), 0..2);
            expected.check(found.heads.head(0, 1), 2..4);
        }
    }
}

#[test]
fn each_query_that_reads_codes_is_told_once_with_its_own_numbers() {
    for scheme in ["kivi-2(g=8,r=5,sinks=3)+query-pca(rank=3,bits=4)", "rotated-2(g=8,r=0)", "dense/token-2(g=8,r=5)"] {
        let scheme: Scheme = scheme.parse().unwrap();
        for (window, tokens) in [(None, 45), (Some(9), 150)] {
            let (found, expected) = probe(&scheme, window, tokens);
            let told = |h: usize, t: usize| found.queries.iter().filter(move |r| (r.head, r.position) == (h, t));
            for (h, rows) in expected.rows.iter().enumerate() {
                for (t, row) in rows.iter().enumerate() {
                    let flush = scheme.key.map(|k| k.base.flush);
                    let first = window.map_or(0, |w| (t + 1).saturating_sub(w));
                    let reads = |f: &Flush| (first..=t).any(|j| j >= f.sinks && j < f.sinks + f.flushed(t));
                    let told: Vec<_> = told(h, t).collect();
                    assert_eq!(told.len(), usize::from(flush.as_ref().is_some_and(reads)), "{scheme} {h} {t}");
                    let Some(told) = told.first() else { continue };
                    close(told.fisher, brute_fisher(&row.p, &row.delta), 1e-4);
                    close(told.kl, brute_kl(&row.p, &row.delta), 1e-4);
                    let entropy: f64 = row.p.iter().map(|p| -p * p.ln()).sum();
                    close(told.entropy, entropy, 1e-5);
                    let top = |p: &[f64]| {
                        first + (0..p.len()).max_by(|&a, &b| p[a].total_cmp(&p[b])).expect("a query sees itself")
                    };
                    assert_eq!((told.top, told.top_read), (top(&row.p), top(&row.p_hat)), "{scheme} {h} {t}");
                }
            }
        }
    }
}

/// Scores so far apart that f32 probabilities are 0, and changes that bring them back.
#[test]
fn peaked_attention_with_large_errors_loses_nothing() {
    let device = Device::flex();
    let scheme: Scheme = "kivi-2(g=8,r=0)".parse().unwrap();
    for scale in [1.0, 10.0, 30.0, 100.0, 1000.0] {
        let x = |heads, seed| normal([1, heads, 40, D], seed, &device);
        let (q, k, v) = (x(4, 7) * scale, x(2, 8), x(2, 9));
        let site = AttentionSite { layer: 0, start: 0, scale: 1.0 / (D as f64).sqrt(), window: Some(30) };
        let rows: Vec<_> =
            read(&scheme, None, &site, &heads(&q), &heads(&k), &heads(&v)).into_iter().flatten().collect();
        // From the scores' own differences, as E3's second form says: log Σ p e^δ − Σ p δ, in f64 throughout.
        let kl = |r: &common::Reading| {
            let logs: Vec<f64> = r.log_p.iter().zip(&r.delta).map(|(p, x)| p + x).collect();
            let max = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            max + logs.iter().map(|l| (l - max).exp()).sum::<f64>().ln()
                - r.p.iter().zip(&r.delta).map(|(p, x)| p * x).sum::<f64>()
        };
        let expected = rows.iter().map(kl).sum::<f64>() / rows.len() as f64;
        let cache = QuantizedCache::teacher_forced(scheme, None, 1, &device);
        let mut probe = LayerProbe::new(vec![cache.layers()]);
        probe.attend(&site, q, k, v);
        let found = probe.finish().remove(0).total();
        close(found.kl().unwrap(), expected, 1e-4);
        assert!(found.fisher().unwrap().is_finite());
    }
}

/// E6 is the diagonal of E5: they agree where a query reads a single value.
#[test]
fn the_a2_surrogate_is_the_diagonal() {
    let scheme: Scheme = "dense/token-2(g=1,r=0,c=8)".parse().unwrap();
    // A window of one token: a single term, so that diagonal and whole are the same.
    let found = probe(&scheme, Some(1), 30).0.heads.total();
    close(found.readout_diagonal().unwrap(), found.readout_error().unwrap(), 1e-5);
    assert!(found.readout_error().unwrap() > 0.0);
}

#[test]
fn a_dense_scheme_has_no_error_and_undefined_storage_mse() {
    let found = probe(&Scheme::DENSE, None, 30).0.heads.total();
    assert_eq!((found.fisher(), found.kl(), found.output_error()), (Some(0.0), Some(0.0), Some(0.0)));
    assert_eq!((found.key_mse(), found.value_mse()), (None, None));
}

#[test]
fn excess_removed_is_e8() {
    assert_eq!(excess_removed(34.0, 31.0, 30.0), Some(0.75));
    assert_eq!(excess_removed(34.0, 34.0, 30.0), Some(0.0));
    assert_eq!(excess_removed(34.0, 38.0, 30.0), Some(-1.0));
    assert_eq!(excess_removed(30.0, 31.0, 30.0), None);
    assert_eq!(excess_removed(29.0, 31.0, 30.0), None, "a base better than dense has no excess");
    assert_eq!(excess_removed(f64::INFINITY, 31.0, 30.0), None);
}
