//! Verdicts of the evidence chain on made-up numbers: each way to decide, controls that must not pass, and numbers that
//! are missing, zero or not finite.

use std::collections::BTreeSet;

use headq::scheme::Family;
use headq_lab::diagnose::data::{
    EntropyBin, FlipResult, Interval, Judgement, KeyPoint, Metric, NullCurve, NullPoint, QueryCorrelation, Role,
    Setting, Spectrum, ValuePoint, Verdict,
};
use headq_lab::diagnose::judge::{
    BasisDetail, Measured, MeasuredFamily, MeasuredRow, Reference, bases, counterexamples, direction, metric,
    null_space, perplexity, route_flips,
};
use headq_lab::diagnose::statistics::spearman;
use headq_lab::diagnose::thresholds::Thresholds;
use headq_lab::evaluate::SchemeResult;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

fn thresholds() -> Thresholds {
    Thresholds { replicates: 300, ..Thresholds::default() }
}

/// The verdict, after checking that the link can be stored and read as it is: serde_json writes NaN and infinities as
/// `null`.
fn verdict<T>(link: &T, judgement: &Judgement) -> Verdict
where
    T: Serialize + for<'de> serde::Deserialize<'de> + PartialEq + std::fmt::Debug,
{
    let text = serde_json::to_string(link).expect("a link is JSON");
    assert_eq!(&serde_json::from_str::<T>(&text).expect("no number is null"), link);
    for sentence in [&judgement.because, &judgement.would_change] {
        assert!(!sentence.contains("NaN") && !sentence.contains("inf ") && sentence.ends_with('.'), "{sentence}");
    }
    judgement.verdict
}

// Links 1 and 2.

const QUANTIZERS: [&str; 3] = ["kivi", "token", "rotated"];

/// Every quantizer at 1 to `bits` bits.
fn settings(bits: u32) -> Vec<Setting> {
    let of = |q: &'static str| {
        (1..=bits).map(move |b| Setting {
            scheme: format!("{q}-{b}"),
            quantizer: q.into(),
            bits: b,
            code_bits: f64::from(b) + 1.0,
        })
    };
    QUANTIZERS.into_iter().flat_map(of).collect()
}

/// Points whose KL follows the Fisher error to `noise`, while storage MSE follows it to `storage_noise`.
fn points(seed: u64, layers: usize, heads: usize, settings: usize, noise: f64, storage_noise: f64) -> Vec<KeyPoint> {
    let mut rng = rng(seed);
    let mut all = Vec::new();
    for layer in 0..layers {
        for head in 0..heads {
            for setting in 0..settings {
                let fisher: f64 = (-6.0 * rng.random::<f64>()).exp();
                let mut off = |noise: f64| fisher * (noise * (rng.random::<f64>() - 0.5)).exp();
                let (kl, mse, output_error) = (off(noise), off(storage_noise), off(noise));
                all.push(KeyPoint { layer, head, setting, mse, fisher, kl, output_error });
            }
        }
    }
    all
}

fn keys_only(settings: Vec<Setting>, points: Vec<KeyPoint>) -> Metric {
    metric(settings, points, vec![], vec![], &thresholds(), 1)
}

fn metric_verdict(m: &Metric) -> Verdict {
    verdict(m, &m.judgement)
}

#[test]
fn a_better_metric_is_supported_and_its_shuffle_is_not() {
    let link = keys_only(settings(5), points(1, 4, 3, 15, 0.5, 8.0));
    assert_eq!(metric_verdict(&link), Verdict::Supported, "{:?}", link.judgement);
    let groups: Vec<&str> = link.keys.iter().map(|c| c.group.as_str()).collect();
    assert_eq!(groups, ["pooled", "kivi", "token", "rotated"]);
    assert_eq!((link.keys[0].points, link.keys[2].points), (180, 60));
    let chance = link.shuffled.operator.unwrap();
    // The permutation distribution of ρ has mean 0 and variance 1 / (n − 1).
    assert!(chance.estimate.abs() < 0.02, "{chance:?}");
    for (bound, quantile) in [(chance.low, -1.96), (chance.high, 1.96)] {
        assert!((bound * 179f64.sqrt() - quantile).abs() < 0.35, "{chance:?}");
    }
    for group in &link.keys {
        let own: Vec<&KeyPoint> = link
            .points
            .iter()
            .filter(|p| group.group == "pooled" || link.settings[p.setting].quantizer == group.group)
            .collect();
        let series = |of: fn(&KeyPoint) -> f64| own.iter().map(|p| of(p)).collect::<Vec<f64>>();
        let kl = series(|p| p.kl);
        assert_eq!(group.operator.unwrap().estimate, spearman(&series(|p| p.fisher), &kl).unwrap());
        assert_eq!(group.storage.unwrap().estimate, spearman(&series(|p| p.mse), &kl).unwrap());
    }
}

#[test]
fn shuffled_pairs_are_never_supported() {
    for seed in 0..40 {
        let mut all = points(seed, 3, 2, 15, 0.2, 8.0);
        let mut rng = rng(seed);
        for i in (1..all.len()).rev() {
            let j = rng.random_range(0..=i);
            let (a, b) = (all[i].kl, all[j].kl);
            (all[i].kl, all[j].kl) = (b, a);
        }
        let link = keys_only(settings(5), all);
        assert_eq!(metric_verdict(&link), Verdict::NotSupported, "{:?}", link.judgement);
    }
}

#[test]
fn a_metric_that_is_no_better_than_storage_is_not_supported() {
    let link = keys_only(settings(5), points(2, 4, 3, 15, 0.5, 0.0));
    assert_eq!(metric_verdict(&link), Verdict::NotSupported, "equal predictors: the difference is exactly 0");
    assert_eq!(link.keys[0].difference, Some(Interval { estimate: 0.0, low: 0.0, high: 0.0 }));
    // The weaker predictor: MSE is now closer to KL than Fisher is.
    let mut worse = points(3, 4, 3, 15, 0.1, 3.0);
    worse.iter_mut().for_each(|p| (p.mse, p.fisher) = (p.fisher, p.mse));
    assert_eq!(metric_verdict(&keys_only(settings(5), worse)), Verdict::NotSupported);
}

#[test]
fn predictors_that_are_equally_good_do_not_decide() {
    let mut alike = points(9, 4, 3, 15, 0.0, 0.0);
    let mut rng = rng(9);
    let mut off = |x: f64| x * (0.5 * (rng.random::<f64>() - 0.5)).exp();
    alike.iter_mut().for_each(|p| (p.mse, p.fisher) = (off(p.kl), off(p.kl)));
    let link = keys_only(settings(5), alike);
    let difference = link.keys[0].difference.unwrap();
    assert!(link.keys[0].operator.unwrap().low > 0.8 && difference.low < 0.0 && difference.high > 0.0);
    assert_eq!(metric_verdict(&link), Verdict::Inconclusive);
}

#[test]
fn a_metric_without_enough_to_go_on_is_inconclusive() {
    let few = keys_only(settings(5), points(4, 1, 1, 15, 0.1, 8.0));
    assert_eq!(metric_verdict(&few), Verdict::Inconclusive);
    assert!(few.judgement.because.contains("15 points") && few.judgement.would_change.contains("min-points"));
    let none = keys_only(vec![], vec![]);
    assert_eq!(metric_verdict(&none), Verdict::Inconclusive);
    assert_eq!((none.keys[0].points, none.keys[0].operator), (0, None));
    let mut zero = points(5, 3, 2, 15, 0.1, 8.0);
    zero.iter_mut().for_each(|p| (p.mse, p.fisher, p.kl, p.output_error) = (0.0, 0.0, 0.0, 0.0));
    let zero = keys_only(settings(5), zero);
    assert_eq!(metric_verdict(&zero), Verdict::Inconclusive);
    assert!(zero.judgement.because.contains("undefined"), "{:?}", zero.judgement);
    let mut broken = points(6, 3, 2, 15, 0.1, 8.0);
    (broken[3].kl, broken[7].fisher) = (f64::NAN, f64::INFINITY);
    let broken = keys_only(settings(5), broken);
    assert_eq!(metric_verdict(&broken), Verdict::Inconclusive);
    assert_eq!(broken.points.len(), 88);
}

#[test]
fn exact_reconstructions_are_ties_and_do_no_harm() {
    let mut all = points(7, 4, 3, 15, 0.3, 8.0);
    for p in all.iter_mut().filter(|p| p.setting % 5 == 4) {
        (p.mse, p.fisher, p.kl, p.output_error) = (0.0, 0.0, 0.0, 0.0);
    }
    assert_eq!(metric_verdict(&keys_only(settings(5), all.clone())), Verdict::Supported);
    let link = counterexamples(&settings(5), &all, &thresholds(), 1);
    assert_ne!(verdict(&link, &link.judgement), Verdict::Inconclusive);
}

#[test]
fn one_head_resamples_points() {
    let link = keys_only(settings(20), points(8, 1, 1, 60, 0.3, 10.0));
    assert!(link.resampled.starts_with("60 points"), "{}", link.resampled);
    assert_eq!(metric_verdict(&link), Verdict::Supported);
    let few = keys_only(settings(20), points(8, 3, 1, 60, 0.3, 10.0));
    assert!(few.resampled.starts_with("180 points"), "{}", few.resampled);
    let heads = keys_only(settings(20), points(8, 4, 1, 60, 0.3, 10.0));
    assert!(heads.resampled.starts_with("4 KV heads"), "{}", heads.resampled);
}

#[test]
fn value_policies_are_compared_at_the_same_mean_bits() {
    let policy = |name: &str, bits: u32, code_bits: f64| Setting {
        scheme: format!("dense/{name}-{bits}"),
        quantizer: name.into(),
        bits,
        code_bits,
    };
    let settings = vec![
        policy("token", 2, 4.0),
        policy("token", 2, 3.0),
        policy("a2", 2, 3.05),
        policy("mse", 2, 3.05),
        policy("recency", 3, 4.05),
        policy("random", 2, 3.05),
    ];
    let mut values = Vec::new();
    for head in 0..12 {
        // a2 is half of `token-2`, loses to `mse` on every third head, and `random` loses nothing on the first.
        let unit = 1.0 + head as f64;
        let of = [9.0 * unit, 2.0 * unit, unit, if head % 3 == 0 { 0.5 * unit } else { 2.0 * unit }, unit, unit];
        for (setting, readout) in of.into_iter().enumerate() {
            let readout = if head == 0 && setting == 5 { 0.0 } else { readout };
            values.push(ValuePoint { layer: head / 4, head: head % 4, setting, mse: 1.0, a2: readout, readout });
        }
    }
    let link = metric(vec![], vec![], settings, values, &thresholds(), 1);
    metric_verdict(&link);
    assert_eq!(link.values[0].operator.unwrap().estimate, 1.0);
    assert_eq!(link.values[0].storage, None);
    let [selection] = link.selection.as_slice() else { panic!("{:?}", link.selection) };
    assert_eq!((selection.bits, selection.a2), (2, 6.5));
    let policies: Vec<&str> = selection.others.iter().map(|o| o.policy.as_str()).collect();
    assert_eq!(policies, ["token", "mse", "random"], "recency has other bits");
    let [token, mse, random] = selection.others.as_slice() else { panic!() };
    assert_eq!((token.code_bits, token.readout, token.heads_won), (3.0, 13.0, Some(1.0)));
    assert!((token.log_ratio.unwrap().estimate - 2f64.ln()).abs() < 1e-12);
    assert_eq!(mse.heads_won, Some(8.0 / 12.0));
    assert!((mse.log_ratio.unwrap().estimate - 2f64.ln() / 3.0).abs() < 1e-12);
    assert_eq!((random.heads_won, random.log_ratio.unwrap().estimate), (Some(0.0), 0.0), "eleven ratios of 1");
}

/// The same search with three loops: pairs, and counterexamples as (layer, head, setting with the lower MSE, the
/// other).
fn by_loops(
    settings: &[Setting],
    points: &[KeyPoint],
    tolerance: f64,
) -> (usize, BTreeSet<(usize, usize, usize, usize)>) {
    let heads: BTreeSet<(usize, usize)> = points.iter().map(|p| (p.layer, p.head)).collect();
    let (mut pairs, mut found) = (0, BTreeSet::new());
    for head in heads {
        for a in points {
            for b in points {
                let same = (a.layer, a.head) == head && (b.layer, b.head) == head && a.setting != b.setting;
                if !same || (settings[a.setting].code_bits - settings[b.setting].code_bits).abs() > tolerance {
                    continue;
                }
                pairs += 1;
                if a.mse < b.mse && a.kl > b.kl && a.output_error > b.output_error {
                    found.insert((head.0, head.1, a.setting, b.setting));
                }
            }
        }
    }
    // Ordered pairs were counted.
    (pairs / 2, found)
}

#[test]
fn counterexamples_are_those_of_three_loops() {
    for seed in 0..20 {
        let settings = settings(4);
        let mut rng = rng(seed);
        let mut all = points(seed, 2, 3, 12, 2.0, 3.0);
        // Few levels, so that there are ties, some of them zeros.
        let level = |rng: &mut ChaCha8Rng| rng.random_range(0..4) as f64;
        if seed % 2 == 0 {
            for p in &mut all {
                (p.mse, p.kl, p.output_error) = (level(&mut rng), level(&mut rng), level(&mut rng));
            }
        }
        let link = counterexamples(&settings, &all, &thresholds(), 1);
        verdict(&link, &link.judgement);
        let (pairs, found) = by_loops(&settings, &all, thresholds().budget_tolerance);
        assert_eq!((link.pairs, link.count), (pairs, found.len()), "6 heads x 4 budgets x 3 pairs");
        assert!((link.share.unwrap().estimate - found.len() as f64 / pairs as f64).abs() < 1e-15);
        let index = |scheme: &str| settings.iter().position(|s| s.scheme == scheme).unwrap();
        for c in &link.strongest {
            assert!(found.contains(&(c.layer, c.head, index(&c.stored_better), index(&c.read_better))));
            assert!(c.strength > 1.0 && c.mse[0] < c.mse[1]);
            let ratios = [c.kl[0] / c.kl[1], c.output_error[0] / c.output_error[1]];
            assert_eq!(c.strength, ratios[0].min(ratios[1]));
        }
        assert!(link.strongest.windows(2).all(|w| w[0].strength >= w[1].strength));
        let mut reversed = all.clone();
        reversed.reverse();
        assert_eq!(counterexamples(&settings, &reversed, &thresholds(), 1).strongest, link.strongest);
    }
}

#[test]
fn counterexamples_by_share() {
    // MSE and KL in opposite orders everywhere, then in the same.
    let mut contrary = points(1, 3, 4, 12, 0.0, 0.0);
    contrary.iter_mut().for_each(|p| p.mse = 1.0 - p.fisher);
    let link = counterexamples(&settings(4), &contrary, &thresholds(), 1);
    assert_eq!(verdict(&link, &link.judgement), Verdict::Supported);
    assert_eq!((link.count, link.pairs, link.strongest.len()), (144, 144, 10));

    let agreed = points(1, 16, 4, 12, 0.0, 0.0);
    let link = counterexamples(&settings(4), &agreed, &thresholds(), 1);
    assert_eq!(verdict(&link, &link.judgement), Verdict::NotSupported);
    // None of 144 pairs leaves room for 2.5 %.
    let link = counterexamples(&settings(4), &agreed[..144], &thresholds(), 1);
    assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);

    let one_head = counterexamples(&settings(4), &contrary[..12], &thresholds(), 1);
    assert_eq!(verdict(&one_head, &one_head.judgement), Verdict::Inconclusive);
    assert_eq!((one_head.count, one_head.share), (12, None));
    let unequal = counterexamples(&settings(4)[..4], &points(1, 3, 3, 4, 1.0, 1.0), &thresholds(), 1);
    assert_eq!(verdict(&unequal, &unequal.judgement), Verdict::Inconclusive);
    assert_eq!((unequal.pairs, unequal.share), (0, None));
}

#[test]
fn a_zero_denominator_leaves_a_counterexample_counted() {
    let point =
        |setting, mse, kl, output_error| KeyPoint { layer: 0, head: 0, setting, mse, fisher: kl, kl, output_error };
    let settings: Vec<Setting> = settings(1);
    let both = [point(0, 1.0, 0.5, 0.5), point(1, 2.0, 0.0, 0.0)];
    let link = counterexamples(&settings, &both, &thresholds(), 1);
    verdict(&link, &link.judgement);
    assert_eq!((link.count, link.strongest.len()), (1, 0));
    let one = [point(0, 1.0, 0.5, 0.5), point(1, 2.0, 0.0, 0.25)];
    let link = counterexamples(&settings, &one, &thresholds(), 1);
    assert_eq!((link.count, link.strongest[0].strength), (1, 2.0));
}

#[test]
fn budgets_differ_by_the_tolerance_at_most() {
    let mut settings = settings(1);
    (settings[0].code_bits, settings[1].code_bits, settings[2].code_bits) = (3.0, 3.001, 3.0021);
    let link = counterexamples(&settings, &points(1, 2, 1, 3, 1.0, 1.0), &thresholds(), 1);
    assert_eq!(link.pairs, 2, "one on each head, 3.001 - 3 being just above 0.001 in binary");
}

// Link 3.

fn curve(scheme: &str, equivariant: bool, fisher: &[f64]) -> NullCurve {
    let point = |(i, &fisher): (usize, &f64)| NullPoint { alpha: 0.5 * i as f64, fisher, kl: fisher, mse: 0.1 };
    NullCurve { scheme: scheme.into(), equivariant, points: fisher.iter().enumerate().map(point).collect() }
}

fn null_verdict(change: f64, grid: &[f64], kivi: &[f64]) -> Verdict {
    let curves = vec![curve("grid-2", false, grid), curve("kivi-2", true, kivi)];
    let link = null_space(change, 1e-5, curves, &thresholds());
    verdict(&link, &link.judgement)
}

#[test]
fn a_shift_that_only_the_static_quantizer_feels_is_supported() {
    let (rising, flat) = ([0.1, 0.15, 0.4, 0.9], [0.2, 0.2001, 0.1999, 0.2]);
    assert_eq!(null_verdict(1e-6, &rising, &flat), Verdict::Supported);
    assert_eq!(null_verdict(1e-6, &[0.0, 0.1, 0.2, 0.4], &flat), Verdict::Supported, "from no error at all");
    assert_eq!(null_verdict(1e-6, &flat, &flat), Verdict::NotSupported);
    assert_eq!(null_verdict(1e-6, &rising, &[0.2, 0.21, 0.2, 0.2]), Verdict::NotSupported);
    assert_eq!(null_verdict(1e-6, &rising, &[0.0, 0.0, 0.1, 0.2]), Verdict::NotSupported);
    assert_eq!(null_verdict(1e-6, &[0.9, 0.4, 0.2, 0.1], &flat), Verdict::Inconclusive, "it falls");
    assert_eq!(null_verdict(1e-6, &[0.9, 0.2, 0.2, 0.91], &flat), Verdict::Inconclusive, "as bad on centered keys");
    assert_eq!(null_verdict(1e-6, &rising, &[0.0; 4]), Verdict::Inconclusive);
    assert_eq!(null_verdict(1e-6, &[0.0; 4], &[0.0; 4]), Verdict::Inconclusive);
    assert_eq!(null_verdict(1e-6, &[0.3], &[0.3]), Verdict::Inconclusive);
    assert_eq!(null_verdict(1e-6, &rising, &[0.2, f64::NAN, 0.2, 0.2]), Verdict::Inconclusive);
}

#[test]
fn dense_attention_that_moves_says_nothing() {
    let (rising, flat) = ([0.1, 0.15, 0.4, 0.9], [0.2; 4]);
    assert_eq!(null_verdict(1e-4, &rising, &flat), Verdict::Inconclusive);
    for change in [f64::NAN, f64::INFINITY] {
        assert_eq!(null_verdict(change, &rising, &flat), Verdict::Inconclusive);
    }
    let moved = null_space(0.01, 1e-5, vec![curve("grid-2", false, &rising)], &thresholds());
    assert!(moved.judgement.because.contains("Dense attention moved"));
    // One static quantizer that rises is enough: another may clip attention sinks on centered keys.
    let curves = [("grid-3", false, [0.9, 0.2, 0.2, 0.91]), ("grid-3(sinks=4)", false, rising), ("kivi-2", true, flat)];
    let curves = curves.map(|(scheme, equivariant, fisher)| curve(scheme, equivariant, &fisher)).to_vec();
    let both = null_space(0.0, 1e-5, curves, &thresholds());
    assert_eq!(verdict(&both, &both.judgement), Verdict::Supported);
    let alone = null_space(0.0, 1e-5, vec![curve("grid-2", false, &rising)], &thresholds());
    assert_eq!(verdict(&alone, &alone.judgement), Verdict::Inconclusive);
}

// Links 4, 5 and 7.

const VOCABULARY: usize = 50_000;
const BASE: &str = "kivi-2(g=32,r=32)";

fn measured(scheme: &str, window_nll: Vec<f64>) -> Measured {
    let nll = window_nll.iter().sum::<f64>() / window_nll.len() as f64;
    let result = SchemeResult {
        scheme: scheme.into(),
        canonical: scheme.into(),
        ppl: nll.exp(),
        nll,
        key_bits: 3.0,
        value_bits: 16.0,
        cache_bits: 9.5,
        bytes_per_token: 1000.0,
        fisher: Some(0.1),
        kl: Some(0.1),
        key_mse: Some(0.1),
        key_mse_corrected: Some(0.1),
        value_mse: None,
        readout_error: None,
        readout_diagonal: None,
        output_error: Some(0.1),
        excess_removed: None,
        nll_minus_dense: 0.1,
        nll_minus_dense_se: None,
        nll_by_text: vec![nll],
        seconds: None,
    };
    Measured { result, window_nll }
}

/// Windows of unequal difficulty around `level`; a scheme adds `damage` to each, give or take a little.
fn windows(seed: u64, count: usize, level: f64, damage: f64) -> Vec<f64> {
    let (mut text, mut own) = (rng(0), rng(seed));
    let mut one = || level + text.random::<f64>() + damage * (0.9 + 0.2 * own.random::<f64>());
    (0..count).map(|_| one()).collect()
}

/// A scheme that costs `damage` nats per token over dense on 16 windows.
fn costing(scheme: &str, damage: f64) -> Measured {
    let seed = scheme.bytes().fold(1, |s, b| s * 31 % 65_521 + u64::from(b));
    measured(scheme, windows(seed, 16, 3.0, damage))
}

fn reference(damage: f64) -> Reference {
    Reference { dense: costing("dense", 0.0), base: costing(BASE, damage), vocabulary: VOCABULARY }
}

/// What a model of random weights gives: losses at chance, noise everywhere.
fn random_weights(seed: u64, scheme: &str) -> Measured {
    let mut rng = rng(seed);
    let chance = (VOCABULARY as f64).ln();
    measured(scheme, (0..16).map(|_| chance + 0.2 * rng.random::<f64>()).collect())
}

fn corrected(family: Family) -> String {
    format!("{BASE}+{family}(rank=4,bits=4)")
}

fn family(family: Family, damage: f64, kl: f64, captured: f64) -> MeasuredFamily {
    let mut run = costing(&corrected(family), damage);
    run.result.kl = Some(kl);
    MeasuredFamily { family, run, captured: vec![Some(captured), None, Some(captured + 0.02)] }
}

fn detail() -> BasisDetail {
    let spectrum = Spectrum { low: vec![0.5], median: vec![0.6], high: vec![0.7] };
    BasisDetail { ranks: vec![], curves: vec![], spectrum, maps: vec![] }
}

fn families(query_pca: (f64, f64, f64), residual_pca: (f64, f64, f64)) -> Vec<MeasuredFamily> {
    let of = |f, (damage, kl, captured)| family(f, damage, kl, captured);
    vec![
        of(Family::QueryPca, query_pca),
        of(Family::QueryPcaCentered, (0.35, 0.3, 0.2)),
        of(Family::ResidualPca, residual_pca),
        of(Family::Random, (0.38, 0.35, 0.05)),
        of(Family::ScoreOptimal, (0.3, 0.3, 0.3)),
    ]
}

fn bases_verdict(query_pca: (f64, f64, f64), residual_pca: (f64, f64, f64)) -> Verdict {
    let link = bases(reference(0.4), families(query_pca, residual_pca), detail(), &thresholds(), 1);
    assert_eq!(link.families.len(), 5);
    verdict(&link, &link.judgement)
}

#[test]
fn bases_by_loss_kl_and_captured_share() {
    assert_eq!(bases_verdict((0.1, 0.1, 0.8), (0.3, 0.2, 0.4)), Verdict::Supported);
    assert_eq!(bases_verdict((0.4, 0.4, 0.1), (0.1, 0.1, 0.8)), Verdict::NotSupported);
    assert_eq!(bases_verdict((0.1, 0.1, 0.3), (0.3, 0.2, 0.8)), Verdict::Inconclusive, "a rival captures more");
    assert_eq!(bases_verdict((0.1, 0.35, 0.8), (0.3, 0.2, 0.4)), Verdict::NotSupported, "a rival has the lowest KL");
    assert_eq!(bases_verdict((0.3, 0.1, 0.8), (0.3, 0.2, 0.4)), Verdict::Inconclusive, "equal losses");
}

#[test]
fn gains_of_bases_are_paired_by_window() {
    // Captured shares are those of two heads here.
    let thresholds = Thresholds { min_units: 2, ..thresholds() };
    let link = bases(reference(0.4), families((0.1, 0.1, 0.8), (0.3, 0.2, 0.4)), detail(), &thresholds, 1);
    let gain = link.families[0].gain.unwrap();
    let expected = link.base.nll - link.families[0].result.nll;
    assert!((gain.estimate - expected).abs() < 1e-12 && gain.high - gain.low < 0.1, "{gain:?}");
    assert!((link.families[0].captured.unwrap().estimate - 0.81).abs() < 1e-12);
    assert!(link.judgement.because.starts_with("query-pca is better by"), "{}", link.judgement.because);
}

#[test]
fn bases_with_something_missing_are_inconclusive() {
    let verdict_of = |reference: Reference, families: Vec<MeasuredFamily>| {
        let link = bases(reference, families, detail(), &thresholds(), 1);
        verdict(&link, &link.judgement)
    };
    let good = || families((0.1, 0.1, 0.8), (0.3, 0.2, 0.4));
    assert_eq!(verdict_of(reference(0.4), good().split_off(1)[..3].to_vec()), Verdict::Inconclusive, "no query-pca");
    assert_eq!(verdict_of(reference(0.4), vec![good().swap_remove(0)]), Verdict::Inconclusive, "no rival");
    assert_eq!(verdict_of(reference(0.4), vec![]), Verdict::Inconclusive);
    let mut undefined = good();
    undefined.iter_mut().for_each(|f| (f.run.result.kl, f.captured) = (None, vec![]));
    assert_eq!(verdict_of(reference(0.4), undefined), Verdict::Inconclusive);
    let mut broken = good();
    broken[3].run.window_nll[2] = f64::NAN;
    assert_eq!(verdict_of(reference(0.4), broken), Verdict::Inconclusive);
    let mut short = good();
    short[0].run.window_nll.pop();
    assert_eq!(verdict_of(reference(0.4), short), Verdict::Inconclusive);
}

#[test]
fn without_damage_there_is_nothing_to_correct() {
    for damage in [0.0, 0.001, -0.1] {
        let families = families((damage - 0.2, 0.1, 0.8), (damage, 0.2, 0.4));
        let link = bases(reference(damage), families, detail(), &thresholds(), 1);
        assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
        assert!(link.judgement.because.contains("nothing to correct"), "{}", link.judgement.because);
        let link = direction(reference(damage), costing("a", damage - 0.2), costing("b", 1.0), &thresholds(), 1);
        assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
    }
}

#[test]
fn few_windows_or_windows_all_alike_give_no_verdict() {
    let of = |windows: Vec<f64>, scheme: &str, more: f64| measured(scheme, windows.iter().map(|w| w + more).collect());
    let few = |n: &str| format!("Losses of {n} give no interval.");
    for (windows, reason) in [
        (vec![3.0], few("1 window")),
        (vec![3.0, 3.1, 2.9], few("3 windows")),
        (vec![3.0; 8], "All windows lose exactly the same, so that resampling them says nothing.".into()),
    ] {
        let reference = Reference {
            dense: of(windows.clone(), "dense", 0.0),
            base: of(windows.clone(), BASE, 0.5),
            vocabulary: VOCABULARY,
        };
        let link = direction(reference, of(windows.clone(), "a", 0.1), of(windows.clone(), "b", 2.0), &thresholds(), 1);
        assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
        assert_eq!(link.judgement.because, reason);
    }
}

fn direction_verdict(corrected: f64, flipped: f64) -> Verdict {
    let (corrected, flipped) = (costing("corrected", corrected), costing("flipped", flipped));
    let link = direction(reference(0.4), corrected, flipped, &thresholds(), 1);
    verdict(&link, &link.judgement)
}

#[test]
fn direction_by_what_the_flipped_sign_adds() {
    assert_eq!(direction_verdict(0.1, 1.5), Verdict::Supported);
    assert_eq!(direction_verdict(0.1, 0.6), Verdict::Inconclusive, "worse, but by half of the damage only");
    assert_eq!(direction_verdict(0.1, 0.2), Verdict::NotSupported);
    assert_eq!(direction_verdict(0.6, 1.5), Verdict::NotSupported, "the right sign does not help");
    assert_eq!(direction_verdict(0.4, 1.5), Verdict::Inconclusive, "the right sign does nothing");
}

fn row(role: Role, scheme: &str, reference: Option<&str>, damage: f64) -> MeasuredRow {
    MeasuredRow { role, run: costing(scheme, damage), reference: reference.map(Into::into) }
}

fn rows(query_pca: f64, random: f64) -> Vec<MeasuredRow> {
    let full = format!("{BASE}/token-2(c=32)");
    let full_corrected = format!("{}/token-2(c=32)", corrected(Family::QueryPca));
    let flipped = format!("{BASE}+query-pca(rank=4,bits=4,sign=-1)");
    vec![
        row(Role::Dense, "dense", None, 0.0),
        row(Role::Base, BASE, None, 0.4),
        row(Role::Corrected, &corrected(Family::QueryPca), Some(BASE), query_pca),
        row(Role::Corrected, &corrected(Family::ResidualPca), Some(BASE), 0.01),
        row(Role::Control, &corrected(Family::Random), Some(BASE), random),
        row(Role::Control, &flipped, Some(BASE), 2.0),
        row(Role::Control, "kivi-3(g=32,r=32)", Some(BASE), 0.05),
        row(Role::Full, &full, None, 0.6),
        row(Role::FullCorrected, &full_corrected, Some(&full), 0.3),
    ]
}

fn perplexity_verdict(query_pca: f64, random: f64) -> Verdict {
    let link = perplexity(rows(query_pca, random), VOCABULARY, &thresholds(), 1);
    verdict(&link, &link.judgement)
}

#[test]
fn perplexity_by_gain_excess_and_the_random_control() {
    assert_eq!(perplexity_verdict(0.15, 0.38), Verdict::Supported);
    assert_eq!(perplexity_verdict(0.35, 0.38), Verdict::Inconclusive, "too little of the excess");
    assert_eq!(perplexity_verdict(0.15, 0.1), Verdict::NotSupported, "a random basis removes more");
    assert_eq!(perplexity_verdict(0.5, 0.6), Verdict::NotSupported, "it costs");
}

#[test]
fn a_flipped_sign_is_neither_the_correction_nor_the_random_control() {
    let mut all = rows(0.15, 0.38);
    let flipped = |family: Family| format!("{BASE}+{family}(rank=4,bits=4,sign=-1)");
    all.push(row(Role::Control, &flipped(Family::Random), Some(BASE), 0.05));
    all.push(row(Role::Corrected, &flipped(Family::ScoreOptimal), Some(BASE), 0.02));
    let link = perplexity(all, VOCABULARY, &thresholds(), 1);
    assert_eq!(verdict(&link, &link.judgement), Verdict::Supported);
    assert!(link.judgement.because.starts_with(&corrected(Family::QueryPca)), "{}", link.judgement.because);
}

#[test]
fn perplexity_rows_are_compared_with_their_own_reference() {
    let link = perplexity(rows(0.15, 0.38), VOCABULARY, &thresholds(), 1);
    let nll = |i: usize| link.rows[i].result.nll;
    let ppl = |i: usize| link.rows[i].result.ppl;
    assert!((link.rows[8].gain.unwrap().estimate - (nll(7) - nll(8))).abs() < 1e-12);
    let excess = (ppl(7) - ppl(8)) / (ppl(7) - ppl(0));
    assert!((link.rows[8].result.excess_removed.unwrap() - excess).abs() < 1e-12);
    assert_eq!((link.rows[0].gain, link.rows[1].result.excess_removed, link.rows[7].gain), (None, None, None));
    let because = &link.judgement.because;
    assert!(because.contains("One more bit for every key (kivi-3(g=32,r=32)"), "{because}");
    assert!(because.contains("more than the correction."), "{because}");
    assert!(because.contains("With values coded too, the correction gains in 1 of 1 comparison"), "{because}");
}

#[test]
fn perplexity_with_rows_missing_is_inconclusive() {
    let all = rows(0.15, 0.38);
    for missing in [0, 1, 2, 4] {
        let mut some = all.clone();
        some.remove(missing);
        let link = perplexity(some, VOCABULARY, &thresholds(), 1);
        assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive, "{}", all[missing].run.result.scheme);
    }
    let link = perplexity(vec![], VOCABULARY, &thresholds(), 1);
    assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
    let link = perplexity(all, 0, &thresholds(), 1);
    assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
}

#[test]
fn random_weights_are_never_praised() {
    for seed in 0..30 {
        let of = |i: u64, scheme: &str| random_weights(100 * seed + i, scheme);
        let reference = Reference { dense: of(0, "dense"), base: of(1, BASE), vocabulary: VOCABULARY };
        let list = [Family::QueryPca, Family::Random, Family::ResidualPca, Family::ScoreOptimal];
        let runs = list.iter().zip(2..).map(|(&f, i)| MeasuredFamily { run: of(i, ""), ..family(f, 0.0, 0.1, 0.2) });
        let link = bases(reference.clone(), runs.collect(), detail(), &thresholds(), seed);
        assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
        assert!(link.judgement.because.contains("does not predict"), "{}", link.judgement.because);
        let link = direction(reference, of(8, "a"), of(9, "b"), &thresholds(), seed);
        assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
        let mut rows = rows(0.1, 0.3);
        rows.iter_mut().zip(10..).for_each(|(r, i)| r.run = of(i, &r.run.result.scheme));
        let link = perplexity(rows, VOCABULARY, &thresholds(), seed);
        assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
    }
}

// Link 6.

fn flips(bins: &[(u64, u64)], rho: Option<(f64, f64, f64)>) -> FlipResult {
    let edge = |i: usize| 0.5 * i as f64;
    let bins: Vec<EntropyBin> = bins
        .iter()
        .enumerate()
        .map(|(i, &(queries, flips))| EntropyBin {
            low: edge(i),
            high: (i + 1 < bins.len()).then(|| edge(i + 1)),
            queries,
            flips,
        })
        .collect();
    let (queries, flipped) = bins.iter().fold((0, 0), |(q, f), b| (q + b.queries, f + b.flips));
    let rho = rho.map(|(low, estimate, high)| Interval { estimate, low, high });
    FlipResult {
        scheme: BASE.into(),
        queries,
        flips: flipped,
        share: (queries > 0).then(|| flipped as f64 / queries as f64),
        bins,
        flipped: QueryCorrelation { queries: flipped, sampled: flipped.min(500) as usize, rho: None },
        unflipped: QueryCorrelation { queries: queries - flipped, sampled: (queries - flipped).min(500) as usize, rho },
    }
}

fn flip_verdict(bins: &[(u64, u64)], rho: Option<(f64, f64, f64)>) -> Verdict {
    let link = route_flips(vec![flips(bins, rho)], &thresholds());
    verdict(&link, &link.judgement)
}

#[test]
fn route_flips_by_entropy_and_correlation() {
    let good = Some((0.9, 0.95, 0.97));
    let rising = [(500, 5), (500, 20), (500, 60), (500, 150)];
    assert_eq!(flip_verdict(&rising, good), Verdict::Supported);
    assert_eq!(flip_verdict(&[(500, 0), (500, 0), (500, 60), (500, 150)], good), Verdict::Supported, "none below");
    assert_eq!(flip_verdict(&rising, Some((0.5, 0.6, 0.7))), Verdict::NotSupported);
    assert_eq!(flip_verdict(&rising, Some((0.7, 0.8, 0.9))), Verdict::Inconclusive);
    assert_eq!(flip_verdict(&[(500, 150), (500, 60), (500, 20), (500, 5)], good), Verdict::NotSupported, "it falls");
    assert_eq!(flip_verdict(&[(500, 50), (500, 50), (500, 60), (500, 60)], good), Verdict::Inconclusive);
}

#[test]
fn the_median_is_the_bin_edge_that_halves_the_queries_best() {
    // Most queries lie in the first bin: the edge after it is the nearest.
    let link = route_flips(vec![flips(&[(900, 9), (60, 30), (40, 20)], Some((0.9, 0.95, 0.97)))], &thresholds());
    let because = &link.judgement.because;
    assert!(because.contains("50 % of queries above the median entropy (0.5 nats) and for 1 %"), "{because}");
}

#[test]
fn route_flips_without_enough_to_go_on_are_inconclusive() {
    let good = Some((0.9, 0.95, 0.97));
    assert_eq!(flip_verdict(&[(500, 0), (500, 0)], good), Verdict::Inconclusive);
    assert_eq!(flip_verdict(&[(500, 2), (500, 9)], good), Verdict::Inconclusive, "eleven flips");
    assert_eq!(flip_verdict(&[(50, 2), (50, 90)], None), Verdict::Inconclusive, "eight unflipped");
    assert_eq!(flip_verdict(&[(0, 0), (1000, 100)], good), Verdict::Inconclusive, "one bin");
    assert_eq!(flip_verdict(&[(500, 5), (500, 100)], None), Verdict::Inconclusive);
    assert_eq!(flip_verdict(&[], None), Verdict::Inconclusive);
    let link = route_flips(vec![], &thresholds());
    assert_eq!(verdict(&link, &link.judgement), Verdict::Inconclusive);
}
