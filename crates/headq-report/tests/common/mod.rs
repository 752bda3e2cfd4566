//! Made-up runs that look like real ones. None of the numbers was measured.

#![allow(dead_code, clippy::unwrap_used, missing_docs)]

use headq_lab::PROGRAM;
use headq_lab::compare::data::*;
use headq_lab::diagnose::data::*;
use headq_lab::diagnose::thresholds::Thresholds;
use headq_lab::evaluate::{Evaluation, SchemeResult};
use headq_lab::finetune::{LayerSummary, Measurement, Settings, Stopped, Summary, Trained};
use headq_lab::overlap::Overlaps;
use headq_lab::text::TextInfo;
use headq_models::Fingerprint;
use headq_report::{Finetuning, Run};

/// Sizes of a made-up run.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub seed: u64,
}

pub const SMALL: Shape = Shape { layers: 30, kv_heads: 3, head_dim: 64, seed: 7 };
pub const LARGE: Shape = Shape { layers: 40, kv_heads: 32, head_dim: 128, seed: 8 };
pub const LEAST: Shape = Shape { layers: 1, kv_heads: 1, head_dim: 2, seed: 9 };

/// Numbers from 0 to 1 that are always the same (a linear congruential generator).
pub struct Numbers(u64);

impl Numbers {
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// About normal, with this deviation.
    fn noise(&mut self, deviation: f64) -> f64 {
        deviation * ((0..6).map(|_| self.next()).sum::<f64>() - 3.0) * 2f64.sqrt()
    }
}

pub fn interval(estimate: f64, half: f64) -> Option<Interval> {
    Some(Interval { estimate, low: estimate - half, high: estimate + half })
}

pub fn text(path: &str) -> TextInfo {
    TextInfo {
        path: path.into(),
        sha256: "3f0a".repeat(16),
        chars: 200_000,
        tokens: 45_211,
        tokens_sha256: "77c1".repeat(16),
    }
}

pub fn fingerprint(shape: Shape) -> Fingerprint {
    Fingerprint {
        architecture: "llama".into(),
        layers: shape.layers,
        heads: 3 * shape.kv_heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        hidden: 3 * shape.kv_heads * shape.head_dim,
        vocab: 49_152,
        config_sha256: "a1b2".repeat(16),
        weights_sha256: "c3d4".repeat(16),
    }
}

pub const BASE: &str = "kivi-2(g=32,r=32)";
pub const DENSE_PPL: f64 = 31.7;

pub fn result(scheme: &str, ppl: f64, code_bits: f64, cache_bits: f64, kl: Option<f64>) -> SchemeResult {
    let nll = ppl.ln() - DENSE_PPL.ln();
    SchemeResult {
        scheme: scheme.into(),
        canonical: scheme.into(),
        ppl,
        nll: ppl.ln(),
        key_bits: code_bits,
        value_bits: if scheme.contains('/') { 3.0 } else { 16.0 },
        cache_bits,
        bytes_per_token: 23_040.0 * cache_bits / 16.0,
        fisher: kl.map(|kl| 1.1 * kl),
        kl,
        key_mse: kl.map(|kl| 2.0 * kl),
        key_mse_corrected: kl.filter(|_| scheme.contains('+')).map(|kl| 1.7 * kl),
        value_mse: kl.filter(|_| scheme.contains('/')).map(|_| 0.031),
        readout_error: kl.filter(|_| scheme.contains('/')).map(|_| 0.0042),
        readout_diagonal: kl.filter(|_| scheme.contains('/')).map(|_| 0.0038),
        output_error: kl.map(|kl| 0.7 * kl),
        excess_removed: (scheme != "dense").then(|| 1.0 - nll / (36.2f64 / DENSE_PPL).ln()),
        nll_minus_dense: nll,
        nll_minus_dense_se: Some(0.0031),
        nll_by_text: vec![ppl.ln() - 0.02, ppl.ln() + 0.03],
        seconds: None,
    }
}

pub fn dense() -> SchemeResult {
    result("dense", DENSE_PPL, 16.0, 16.0, Some(0.0))
}

fn judgement(verdict: Verdict, because: &str) -> Judgement {
    Judgement {
        verdict,
        because: because.into(),
        would_change: "An interval that reaches the threshold, on more windows or another text.".into(),
    }
}

fn metric(shape: Shape) -> Metric {
    let mut numbers = Numbers(shape.seed);
    let quantizers = ["kivi", "token", "grid", "rotated"];
    let settings: Vec<Setting> = quantizers
        .iter()
        .flat_map(|q| (2..=5).map(move |bits| (q, bits)))
        .map(|(q, bits)| Setting {
            scheme: format!("{q}-{bits}(g=32,r=32)"),
            quantizer: q.to_string(),
            bits,
            code_bits: f64::from(bits) + 1.0,
        })
        .collect();
    let mut points = Vec::new();
    for layer in 0..shape.layers {
        for head in 0..shape.kv_heads {
            let scale = 10f64.powf(numbers.noise(0.4));
            for (i, setting) in settings.iter().enumerate() {
                let q = (i / 4) as f64;
                let mse = scale * 4f64.powi(-(setting.bits as i32)) * (1.0 + q) * 10f64.powf(numbers.noise(0.25));
                let fisher = 0.4 * mse * 10f64.powf(numbers.noise(0.35) - 0.3 * q);
                let kl = fisher / (1.0 + 0.3 * fisher) * 10f64.powf(numbers.noise(0.05));
                points.push(KeyPoint { layer, head, setting: i, mse, fisher, kl, output_error: 0.6 * kl });
            }
        }
    }
    let policies = ["token", "a2", "mse", "random", "recency"];
    let value_settings: Vec<Setting> = policies
        .iter()
        .flat_map(|p| [2, 3].map(|bits| (p, bits)))
        .map(|(p, bits)| Setting {
            scheme: format!("dense/{p}-{bits}(c=32,g=32,r=32)"),
            quantizer: p.to_string(),
            bits,
            code_bits: f64::from(bits) + 1.0,
        })
        .collect();
    let value_points = (0..shape.layers)
        .flat_map(|layer| (0..shape.kv_heads).map(move |head| (layer, head)))
        .flat_map(|(layer, head)| (0..value_settings.len()).map(move |setting| (layer, head, setting)))
        .map(|(layer, head, setting)| {
            let mse = 10f64.powf(-1.5 + numbers.noise(0.4));
            let a2 = 0.1 * mse * 10f64.powf(numbers.noise(0.2));
            ValuePoint { layer, head, setting, mse, a2, readout: 1.2 * a2 * 10f64.powf(numbers.noise(0.06)) }
        })
        .collect();
    let correlation = |group: &str, points: usize, storage: f64, operator: f64| Correlation {
        group: group.into(),
        points,
        storage: interval(storage, 0.04),
        operator: interval(operator, 0.01),
        difference: interval(operator - storage, 0.042),
    };
    let pooled = points.len();
    let keys = std::iter::once(correlation("pooled", pooled, 0.871, 0.991))
        .chain(quantizers.iter().map(|q| correlation(q, pooled / 4, 0.803, 0.985)))
        .collect();
    let rival = |policy: &str, ratio: f64, won: f64| SelectionRival {
        policy: policy.into(),
        code_bits: if policy == "token" { 3.0 } else { 3.016 },
        readout: 0.0041 * ratio.exp(),
        log_ratio: interval(ratio, 0.05),
        heads_won: Some(won),
    };
    let selection = |bits: u32, shift: f64| Selection {
        bits,
        a2: 0.0041,
        others: vec![
            rival("token", 0.21 + shift, 0.91),
            rival("mse", 0.02 + shift, 0.55),
            rival("random", 0.33 + shift, 0.98),
            rival("recency", -0.14 + shift, 0.22),
        ],
    };
    Metric {
        judgement: judgement(Verdict::Supported, "Pooled ρ of Fisher error with KL is 0.991, of storage MSE 0.871."),
        resampled: "layers × heads".into(),
        replicates: 1000,
        settings,
        points,
        keys,
        shuffled: correlation("pooled", pooled, 0.012, -0.008),
        value_settings,
        value_points,
        values: vec![correlation("pooled", pooled, 0.72, 0.96), correlation("a2", pooled / 5, 0.7, 0.97)],
        selection: vec![selection(2, 0.0), selection(3, 0.2)],
    }
}

fn counterexamples() -> Counterexamples {
    let example = |i: usize| Counterexample {
        layer: 3 * i % 30,
        head: i % 3,
        stored_better: "rotated-2(g=32,r=32)".into(),
        read_better: "kivi-2(g=32,r=32)".into(),
        code_bits: [3.0, 3.0],
        mse: [0.0812, 0.0961],
        kl: [0.41 / (i + 1) as f64, 0.012],
        output_error: [0.22, 0.0061],
        strength: 34.2 / (i + 1) as f64,
    };
    Counterexamples {
        judgement: judgement(Verdict::Supported, "134 of 2,160 pairs (6.2 %) are counterexamples."),
        pairs: 2160,
        count: 134,
        share: interval(0.062, 0.011),
        strongest: (0..10).map(example).collect(),
    }
}

fn null_space() -> NullSpace {
    let curve = |scheme: &str, equivariant: bool, rise: f64| NullCurve {
        scheme: scheme.into(),
        equivariant,
        points: (0..9)
            .map(|i| {
                let alpha = 0.25 * f64::from(i);
                let fisher = 0.031 * (rise * alpha).exp();
                NullPoint { alpha, fisher, kl: 0.9 * fisher, mse: 0.08 * (1.0 + rise * alpha) }
            })
            .collect(),
    };
    NullSpace {
        judgement: judgement(
            Verdict::Supported,
            "The static grid's Fisher error rises 33-fold; kivi's changes by 0.4 %.",
        ),
        dense_change: 3.1e-6,
        dense_tolerance: 1e-5,
        curves: vec![
            curve("grid-3(g=32,r=32,center)", false, 1.75),
            curve("grid-4(g=32,r=32,center)", false, 1.1),
            curve("kivi-2(g=32,r=32,center)", true, 0.002),
        ],
    }
}

fn bases(shape: Shape) -> Bases {
    let mut numbers = Numbers(shape.seed + 1);
    let families = [
        ("query-pca", 0.81, 32.5),
        ("query-pca-centered", 0.41, 34.4),
        ("residual-pca", 0.62, 33.2),
        ("score-optimal", 0.85, 32.3),
        ("random", 0.07, 35.8),
    ];
    let scheme = |family: &str| format!("{BASE}+{family}(rank=4,bits=4)");
    let family = |(family, captured, ppl): (&str, f64, f64)| FamilyResult {
        family: family.into(),
        result: result(&scheme(family), ppl, 3.3125, 11.654, Some(0.09 * (1.0 - captured))),
        captured: interval(captured, 0.02),
        gain: interval((36.2f64 / ppl).ln(), 0.006),
    };
    let ranks: Vec<usize> = vec![1, 2, 4, 8, 16, 32, 64].into_iter().filter(|r| *r <= shape.head_dim).collect();
    let curve = |(family, captured, _): (&str, f64, f64)| RankCurve {
        family: family.into(),
        shares: ranks.iter().map(|r| Some(1.0 - (1.0 - captured).powf((*r as f64 / 4.0).powf(0.6)))).collect(),
    };
    let spectrum = |factor: f64| -> Vec<f64> {
        let values = (0..shape.head_dim).map(|i| 0.4 * (-0.9 * ((i + 1) as f64).powf(0.55)).exp());
        values.enumerate().map(|(i, v)| v * factor.powf(1.0 + i as f64 / 20.0)).collect()
    };
    let map = |scheme: String, factor: f64, numbers: &mut Numbers| HeadMap {
        scheme,
        fisher: (0..shape.layers)
            .map(|_| (0..shape.kv_heads).map(|_| Some(factor * 10f64.powf(numbers.noise(0.5)))).collect())
            .collect(),
    };
    let maps = vec![
        map(BASE.into(), 0.09, &mut numbers),
        map(scheme("query-pca"), 0.02, &mut numbers),
        map(scheme("score-optimal"), 0.016, &mut numbers),
        map(scheme("random"), 0.08, &mut numbers),
    ];
    Bases {
        judgement: judgement(
            Verdict::Supported,
            "query-pca captures 81 % and random 7 % of the score error at rank 4.",
        ),
        dense: dense(),
        base: result(BASE, 36.2, 3.0, 11.547, Some(0.09)),
        families: families.map(family).into(),
        curves: families.map(curve).into(),
        ranks,
        spectrum: Spectrum { low: spectrum(0.75), median: spectrum(1.0), high: spectrum(1.3) },
        maps,
    }
}

fn direction() -> Direction {
    Direction {
        judgement: judgement(
            Verdict::Inconclusive,
            "The flipped correction adds 0.62 nats, 4.7 times what quantizing adds.",
        ),
        dense: dense(),
        base: result(BASE, 36.2, 3.0, 11.547, Some(0.09)),
        corrected: result("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)", 32.5, 3.3125, 11.654, Some(0.02)),
        flipped: result("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4,sign=-1)", 67.2, 3.3125, 11.654, Some(0.25)),
        corrected_gain: interval(0.108, 0.009),
        flipped_loss: interval(0.62, 0.04),
        base_loss: interval(0.132, 0.01),
    }
}

fn route_flips() -> RouteFlips {
    let edges = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0];
    let bins = |factor: f64| -> Vec<EntropyBin> {
        edges
            .iter()
            .enumerate()
            .map(|(i, low)| {
                let queries = [812_345, 401_233, 356_120, 298_112, 240_001, 131_092, 62_023, 9_120, 812][i];
                let share = factor * (0.02 + 0.09 * (i as f64).powf(0.8));
                let flips = (queries as f64 * share) as u64;
                EntropyBin { low: *low, high: edges.get(i + 1).copied(), queries, flips }
            })
            .collect()
    };
    let flips = |scheme: &str, factor: f64| {
        let bins = bins(factor);
        let (queries, flips) = bins.iter().fold((0, 0), |(q, f), b| (q + b.queries, f + b.flips));
        let rho = |queries, estimate| QueryCorrelation { queries, sampled: 20_000, rho: interval(estimate, 0.01) };
        FlipResult {
            scheme: scheme.into(),
            queries,
            flips,
            share: Some(flips as f64 / queries as f64),
            bins,
            flipped: rho(flips, 0.83),
            unflipped: rho(queries - flips, 0.998),
        }
    };
    RouteFlips {
        judgement: judgement(
            Verdict::NotSupported,
            "Flips above the median entropy are 1.2 times as frequent as below it.",
        ),
        schemes: vec![flips(BASE, 1.0), flips("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)", 0.45)],
    }
}

fn perplexity() -> Perplexity {
    let row = |role: Role, scheme: &str, ppl: f64, code_bits: f64, cache_bits: f64| PerplexityRow {
        role,
        result: result(scheme, ppl, code_bits, cache_bits, Some(0.1 * (ppl / DENSE_PPL).ln().max(0.0))),
        reference: matches!(role, Role::Corrected | Role::FullCorrected | Role::Control).then(|| BASE.to_string()),
        gain: matches!(role, Role::Corrected | Role::FullCorrected | Role::Control)
            .then(|| interval((36.2 / ppl).ln(), 0.006))
            .flatten(),
    };
    let key = |side: &str| format!("{BASE}+{side}");
    let rows = vec![
        row(Role::Dense, "dense", DENSE_PPL, 16.0, 16.0),
        row(Role::Base, BASE, 36.2, 3.0, 11.547),
        row(Role::Corrected, &key("query-pca(rank=4,bits=4)"), 32.5, 3.3125, 11.654),
        row(Role::Corrected, &key("query-pca-centered(rank=4,bits=4)"), 34.4, 3.3125, 11.654),
        row(Role::Corrected, &key("residual-pca(rank=4,bits=4)"), 33.2, 3.3125, 11.654),
        row(Role::Corrected, &key("score-optimal(rank=4,bits=4)"), 32.3, 3.3125, 11.654),
        row(Role::Corrected, &key("score-optimal(rank=4,bits=3)"), 32.4, 3.25, 11.633),
        row(Role::Control, &key("random(rank=4,bits=4)"), 35.8, 3.3125, 11.654),
        row(Role::Control, &key("query-pca(rank=4,bits=4,sign=-1)"), 67.2, 3.3125, 11.654),
        row(Role::Control, "kivi-3(g=32,r=32)", 31.9, 4.0, 11.89),
        row(Role::Published, "kivi-2(g=32,r=128)/token-2(c=32,g=32,r=128)", 35.1, 3.0, 9.91),
        row(Role::Published, "kivi-4(g=32,r=128)/token-4(c=32,g=32,r=128)", 31.74, 5.0, 11.02),
        row(Role::Published, "token-8(c=32,g=1,r=0)/token-8(c=32,g=1,r=0)", 31.71, 9.0, 9.0),
        row(Role::Published, "token-4(c=32,g=1,r=0)/token-4(c=32,g=1,r=0)", 32.9, 5.0, 5.0),
        row(Role::Values, "dense/token-2(c=32,g=32,r=32)", 33.4, 16.0, 11.547),
        row(Role::Values, "dense/a2-2(c=32,g=32,r=32)", 32.6, 16.0, 11.552),
        row(Role::Full, "kivi-2(g=32,r=32)/token-2(c=32)", 38.3, 3.0, 7.094),
        row(Role::Full, "kivi-2(g=32,r=32)/a2-2(c=32)", 37.4, 3.0, 7.1),
        row(Role::Full, "kivi-2(g=32,r=32)/random-2(c=32)", 38.9, 3.0, 7.1),
        row(Role::Full, "kivi-2(g=32,r=32)/recency-2(c=32)", 37.9, 3.0, 7.1),
        row(Role::Full, "kivi-2(g=32,r=32)/mse-2(c=32)", 38.1, 3.0, 7.1),
        row(Role::FullCorrected, "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)", 34.3, 3.3125, 7.201),
        row(Role::FullCorrected, "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/a2-2(c=32)", 33.4, 3.3125, 7.206),
        row(Role::FullCorrected, "kivi-2(g=32,r=32)+score-optimal(rank=4,bits=4)/a2-2(c=32)", 33.2, 3.3125, 7.206),
    ];
    Perplexity {
        judgement: judgement(Verdict::Supported, "query-pca removes 81 % of the excess perplexity [77 %, 85 %]."),
        rows,
    }
}

/// A whole diagnosis of a model of this shape.
pub fn diagnosis(name: &str, shape: Shape) -> Diagnosis {
    Diagnosis {
        program: PROGRAM.into(),
        name: name.into(),
        command: format!(
            "headq diagnose checkpoints/{name} --text wiki.test.raw --context 512 --windows 8 --out runs/{name}"
        ),
        model: format!("checkpoints/{name}"),
        fingerprint: fingerprint(shape),
        device: "flex".into(),
        seed: 1,
        add_bos: false,
        context: 512,
        windows: 8,
        tokens: 8176,
        texts: vec![text("texts/wiki.test.raw"), text("texts/code.test.txt")],
        overlap: Some(Overlaps::default()),
        calibration: Calibration {
            texts: vec![text("texts/valid.clean.txt")],
            first_window: 0,
            windows: 4,
            context: 512,
            tokens: 2048,
        },
        base: BASE.into(),
        rank: 4,
        bits: 4,
        thresholds: Thresholds::default(),
        metric: Some(metric(shape)),
        counterexamples: Some(counterexamples()),
        null_space: Some(null_space()),
        bases: Some(bases(shape)),
        direction: Some(direction()),
        route_flips: Some(route_flips()),
        perplexity: Some(perplexity()),
    }
}

/// An evaluation of the schemes of the perplexity link.
pub fn evaluation(shape: Shape) -> Evaluation {
    Evaluation {
        program: PROGRAM.into(),
        command: Some("headq run evaluated.toml".into()),
        model: "checkpoints/evaluated".into(),
        fingerprint: fingerprint(shape),
        device: "flex".into(),
        seed: 1,
        tokens: 8176,
        context: 512,
        windows: 8,
        add_bos: true,
        texts: vec![text("texts/wiki.test.raw"), text("texts/code.test.txt")],
        overlap: Some(Overlaps::default()),
        pass: Some("packed".into()),
        cache_dtype: Some("f32".into()),
        schemes: perplexity().rows.into_iter().map(|row| row.result).take(12).collect(),
        dense_seconds: None,
    }
}

pub fn diagnosed(name: &str, shape: Shape) -> Run {
    Run {
        name: name.into(),
        diagnosis: Some(diagnosis(name, shape)),
        evaluation: None,
        comparison: None,
        sweep: None,
        finetunings: Vec::new(),
    }
}

pub fn evaluated() -> Run {
    Run {
        name: "evaluated".into(),
        diagnosis: None,
        evaluation: Some(evaluation(SMALL)),
        comparison: None,
        sweep: None,
        finetunings: Vec::new(),
    }
}

/// A comparison of a query-pca basis with a learned one, which had seen the text.
pub fn comparison(shape: Shape) -> Comparison {
    let estimate = |v: f64| Estimate { estimate: Some(v), low: Some(v - 0.01), high: Some(v + 0.01) };
    let ratio = |v: f64| Ratio { of_means: estimate(v), by_head: estimate(v + 0.02), heads_better: Some(0.75) };
    let against = |v: f64| Against {
        nll: estimate(v - 1.0),
        captured: estimate(0.03),
        fisher: ratio(v),
        kl: ratio(v),
        output_error: ratio(v),
        key_mse: Ratio { of_means: Estimate::default(), by_head: Estimate::default(), heads_better: None },
    };
    let basis = |name: &str, family: &str, loss: Option<&str>| ComparedBasis {
        name: name.into(),
        artifact: name.into(),
        derived: loss.is_none(),
        family: family.into(),
        rank: 2,
        scope: "kv-head".into(),
        tied: loss.is_none(),
        loss: loss.map(Into::into),
        base: "kivi-2(g=32,r=32)".into(),
        calibration: vec![text("texts/valid.txt")],
        seen: loss.is_some(),
        result: result(&format!("kivi-2(g=32,r=32)+{family}(rank=2,bits=4)"), 31.0, 3.2, 11.6, Some(0.04)),
        window_nll: vec![3.4; 8],
        captured: estimate(0.57),
        to_first: against(1.0),
        to_base: against(0.5),
        heads: HeadTables::default(),
    };
    let angles = |a: f64| Angles { median: vec![a, 41.25], largest: Some(89.5), heads: Vec::new() };
    Comparison {
        program: PROGRAM.into(),
        command: Some("headq run compared.toml".into()),
        model: "checkpoints/compared".into(),
        fingerprint: fingerprint(shape),
        device: "flex".into(),
        seed: 1,
        add_bos: false,
        context: 512,
        windows: 8,
        tokens: 4088,
        texts: vec![text("texts/test.txt")],
        overlap: None,
        scheme: "kivi-2(g=32,r=32)+query-pca(rank=2,bits=4)".into(),
        seen: true,
        seen_by: vec![Seen { artifact: "learned.safetensors".into(), text: "texts/test.txt".into() }],
        bootstrap: BootstrapInfo { confidence: 0.95, replicates: 1000, min_units: 4 },
        dense: dense(),
        base: result("kivi-2(g=32,r=32)", 34.1, 3.0, 11.5, Some(0.09)),
        dense_window_nll: vec![3.3; 8],
        base_window_nll: vec![3.5; 8],
        base_heads: HeadTables::default(),
        bases: vec![basis("query-pca", "query-pca", None), basis("learned.safetensors", "learned", Some("kl"))],
        angles: vec![PairAngles {
            first: 0,
            second: 1,
            scope: "kv-head".into(),
            decoder: angles(7.5),
            encoder: Some(angles(9.25)),
        }],
    }
}

pub fn compared() -> Run {
    Run {
        name: "compared".into(),
        diagnosis: None,
        evaluation: None,
        comparison: Some(comparison(SMALL)),
        sweep: None,
        finetunings: Vec::new(),
    }
}

/// A fine-tuning of so many layers, each a third as long as the one before it; losses are changed by `change`.
pub fn finetuning(layers: usize, change: &dyn Fn(f64) -> f64) -> Finetuning {
    let steps = |layer: usize| (600 / 3usize.pow(layer as u32)).max(20) / 20 * 20;
    let measurement = |layer: usize, step: usize| {
        let loss = 0.04 + 0.1 * (-(step as f64) / 150.0).exp() / (layer + 1) as f64;
        Measurement {
            layer,
            step,
            lr: 0.003,
            loss: change(loss),
            held_out: change(1.1 * loss),
            best: change(1.05 * loss),
        }
    };
    let measurements: Vec<Measurement> = (0..layers)
        .flat_map(|layer| (0..=steps(layer)).step_by(20).map(move |step| measurement(layer, step)))
        .collect();
    let summary = |layer: usize| LayerSummary {
        layer: Some(layer),
        uncorrected: change(0.4),
        initial: change(0.14),
        best: change(0.07),
        best_step: steps(layer) / 40 * 20,
        steps: steps(layer),
        stopped: if layer == 0 { Stopped::Steps } else { Stopped::Patience },
        seconds: change(12.5),
    };
    let texts = |windows: usize| Trained { texts: vec![text("texts/train.txt")], windows };
    Finetuning {
        summary: Summary {
            program: PROGRAM.into(),
            command: "headq run trained.toml".into(),
            model: "checkpoints/trained".into(),
            fingerprint: fingerprint(SMALL),
            device: "flex".into(),
            seed: 1,
            add_bos: false,
            context: 512,
            scheme: "kivi-2(g=32,r=32)+learned(rank=4,bits=3)".into(),
            settings: Settings { steps: 600, train_clip: true, ..Settings::default() },
            train: texts(1),
            held_out: texts(4),
            warnings: vec!["one window of 512 tokens to train on".into()],
            layers: (0..layers).map(summary).collect(),
        },
        measurements,
    }
}

pub fn finetuned() -> Run {
    Run {
        name: "trained".into(),
        diagnosis: None,
        evaluation: None,
        comparison: None,
        sweep: None,
        finetunings: vec![finetuning(3, &|v| v)],
    }
}

/// Every number of a run, changed by `change`; what is counted is left as it is.
pub fn with_numbers(run: &Run, change: &dyn Fn(f64) -> f64) -> Run {
    let mut run = run.clone();
    let Some(d) = &mut run.diagnosis else { return run };
    let result = |r: &mut SchemeResult| {
        let numbers = [&mut r.ppl, &mut r.nll, &mut r.key_bits, &mut r.value_bits, &mut r.cache_bits];
        numbers.into_iter().for_each(|v| *v = change(*v));
        let more = [&mut r.fisher, &mut r.kl, &mut r.key_mse, &mut r.output_error, &mut r.excess_removed];
        more.into_iter().flatten().for_each(|v| *v = change(*v));
        r.nll_by_text.iter_mut().for_each(|v| *v = change(*v));
        r.nll_minus_dense = change(r.nll_minus_dense);
    };
    let interval = |i: &mut Option<Interval>| {
        if let Some(i) = i {
            *i = Interval { estimate: change(i.estimate), low: change(i.low), high: change(i.high) };
        }
    };
    if let Some(link) = &mut d.metric {
        for p in &mut link.points {
            (p.mse, p.fisher, p.kl, p.output_error) =
                (change(p.mse), change(p.fisher), change(p.kl), change(p.output_error));
        }
        for p in &mut link.value_points {
            (p.mse, p.a2, p.readout) = (change(p.mse), change(p.a2), change(p.readout));
        }
        for c in link.keys.iter_mut().chain(&mut link.values) {
            [&mut c.storage, &mut c.operator, &mut c.difference].into_iter().for_each(interval);
        }
        for rival in link.selection.iter_mut().flat_map(|s| &mut s.others) {
            rival.readout = change(rival.readout);
            interval(&mut rival.log_ratio);
        }
    }
    if let Some(link) = &mut d.counterexamples {
        interval(&mut link.share);
        for c in &mut link.strongest {
            c.strength = change(c.strength);
            let pairs = [&mut c.code_bits, &mut c.mse, &mut c.kl, &mut c.output_error];
            pairs.into_iter().for_each(|pair| *pair = pair.map(change));
        }
    }
    if let Some(link) = &mut d.null_space {
        link.dense_change = change(link.dense_change);
        for p in link.curves.iter_mut().flat_map(|c| &mut c.points) {
            (p.fisher, p.kl, p.mse) = (change(p.fisher), change(p.kl), change(p.mse));
        }
    }
    if let Some(link) = &mut d.bases {
        for family in &mut link.families {
            result(&mut family.result);
            [&mut family.captured, &mut family.gain].into_iter().for_each(interval);
        }
        link.curves.iter_mut().flat_map(|c| &mut c.shares).flatten().for_each(|v| *v = change(*v));
        let spectrum = [&mut link.spectrum.low, &mut link.spectrum.median, &mut link.spectrum.high];
        spectrum.into_iter().flatten().for_each(|v| *v = change(*v));
        link.maps.iter_mut().flat_map(|m| &mut m.fisher).flatten().flatten().for_each(|v| *v = change(*v));
    }
    if let Some(link) = &mut d.direction {
        [&mut link.base, &mut link.corrected, &mut link.flipped].into_iter().for_each(result);
        [&mut link.corrected_gain, &mut link.flipped_loss, &mut link.base_loss].into_iter().for_each(interval);
    }
    if let Some(link) = &mut d.route_flips {
        for scheme in &mut link.schemes {
            scheme.share = scheme.share.map(change);
            [&mut scheme.flipped.rho, &mut scheme.unflipped.rho].into_iter().for_each(interval);
        }
    }
    for row in d.perplexity.iter_mut().flat_map(|p| &mut p.rows) {
        result(&mut row.result);
        interval(&mut row.gain);
    }
    run
}

/// All links there, with nothing in them.
fn hollow() -> Run {
    let mut run = diagnosed("hollow", LEAST);
    let d = run.diagnosis.as_mut().unwrap();
    d.texts.clear();
    d.calibration.texts.clear();
    let metric = d.metric.as_mut().unwrap();
    metric.settings.clear();
    metric.points.clear();
    metric.keys.clear();
    metric.value_settings.clear();
    metric.value_points.clear();
    metric.values.clear();
    metric.selection.iter_mut().for_each(|s| s.others.clear());
    let none = |c: &mut Correlation| (c.storage, c.operator, c.difference) = (None, None, None);
    none(&mut metric.shuffled);
    let counterexamples = d.counterexamples.as_mut().unwrap();
    (counterexamples.pairs, counterexamples.count, counterexamples.share) = (0, 0, None);
    counterexamples.strongest.clear();
    d.null_space.as_mut().unwrap().curves.clear();
    let bases = d.bases.as_mut().unwrap();
    bases.families.clear();
    bases.ranks.clear();
    bases.curves.iter_mut().for_each(|c| c.shares.clear());
    bases.maps.iter_mut().for_each(|m| m.fisher.clear());
    bases.spectrum = Spectrum { low: vec![], median: vec![], high: vec![] };
    let direction = d.direction.as_mut().unwrap();
    (direction.base_loss, direction.flipped_loss, direction.corrected_gain) = (None, None, None);
    let flips = d.route_flips.as_mut().unwrap();
    flips.schemes.iter_mut().for_each(|s| (s.share, s.flipped.rho, s.bins) = (None, None, vec![]));
    d.perplexity.as_mut().unwrap().rows.clear();
    run
}

/// Parts that do not fit one another.
fn ragged() -> Run {
    let mut run = diagnosed("ragged", SMALL);
    let d = run.diagnosis.as_mut().unwrap();
    d.metric.as_mut().unwrap().settings.truncate(5);
    let bases = d.bases.as_mut().unwrap();
    bases.curves[0].shares.truncate(2);
    bases.curves[1].shares.extend([None, Some(3.0)]);
    bases.curves[2].shares[1] = None;
    bases.maps[0].fisher[3].clear();
    bases.maps[1].fisher.truncate(4);
    bases.maps[2].fisher.iter_mut().flatten().step_by(3).for_each(|v| *v = None);
    bases.spectrum.high.truncate(3);
    let flips = d.route_flips.as_mut().unwrap();
    flips.schemes[1].bins.truncate(2);
    flips.schemes[0].bins[0].queries = 0;
    d.perplexity.as_mut().unwrap().rows.iter_mut().for_each(|row| row.result.nll_by_text.truncate(1));
    run
}

/// What HTML and Markdown take for more than text.
pub const SPECIAL: &str = "<script>alert('1' & \"2\")</script>|`*_]( {not}";

/// Names that are long and full of [`SPECIAL`].
fn long_names() -> Run {
    let long = |part: &str| format!("{}/{SPECIAL}/{part}", "verylongfoldername".repeat(12));
    let mut run = diagnosed(&long("run"), SMALL);
    let d = run.diagnosis.as_mut().unwrap();
    (d.model, d.command, d.base) = (long("model"), long("command"), long("base"));
    d.texts[0].path = long("text").into();
    for (i, row) in d.perplexity.as_mut().unwrap().rows.iter_mut().enumerate() {
        row.result.scheme = long(&format!("scheme-{i}"));
    }
    d.bases.as_mut().unwrap().maps.iter_mut().for_each(|m| m.scheme = long("map"));
    d.bases.as_mut().unwrap().curves.iter_mut().for_each(|c| c.family = long("family"));
    d.null_space.as_mut().unwrap().curves.iter_mut().for_each(|c| c.scheme = long("null"));
    d.metric.as_mut().unwrap().settings.iter_mut().for_each(|s| s.quantizer = long("quantizer"));
    d.route_flips.as_mut().unwrap().schemes.iter_mut().for_each(|s| s.scheme = long("flips"));
    run
}

/// Far more of everything than usual.
fn many() -> Run {
    let mut run = diagnosed("many", LARGE);
    let d = run.diagnosis.as_mut().unwrap();
    let bases = d.bases.as_mut().unwrap();
    bases.curves =
        (0..24).map(|i| RankCurve { family: format!("family-{i}"), ..bases.curves[i % 5].clone() }).collect();
    let flips = d.route_flips.as_mut().unwrap();
    flips.schemes = (0..9).map(|i| flips.schemes[i % 2].clone()).collect();
    for scheme in &mut flips.schemes {
        scheme.bins =
            (0..40).map(|i| EntropyBin { low: f64::from(i) / 4.0, high: None, queries: u64::MAX, flips: 1 }).collect();
    }
    let rows = &mut d.perplexity.as_mut().unwrap().rows;
    *rows = (0..240).map(|i| rows[i % rows.len()].clone()).collect();
    run
}

/// Runs that a report must survive, by name.
pub fn extremes() -> Vec<(&'static str, Run)> {
    let usual = diagnosed("usual", SMALL);
    let mut nothing = diagnosed("nothing", LEAST);
    let d = nothing.diagnosis.as_mut().unwrap();
    (d.metric, d.counterexamples, d.null_space, d.bases) = (None, None, None, None);
    (d.direction, d.route_flips, d.perplexity) = (None, None, None);
    let trained = |finetuning: Finetuning| Run { finetunings: vec![finetuning], ..finetuned() };
    vec![
        ("trained-nothing", trained(Finetuning { measurements: vec![], ..finetuning(0, &|v| v) })),
        ("trained-flat", trained(finetuning(2, &|_| 0.0))),
        ("trained-not-a-number", trained(finetuning(2, &|_| f64::NAN))),
        ("trained-huge", trained(finetuning(2, &|v| v * 1e307))),
        ("nothing", nothing),
        ("hollow", hollow()),
        ("ragged", ragged()),
        ("long-names", long_names()),
        ("many", many()),
        ("least", diagnosed("least", LEAST)),
        ("zeros", with_numbers(&usual, &|_| 0.0)),
        ("equal", with_numbers(&usual, &|_| 0.25)),
        ("negative", with_numbers(&usual, &|v| -v)),
        ("tiny", with_numbers(&usual, &|v| v * 1e-310)),
        ("huge", with_numbers(&usual, &|v| v * 1e307)),
        ("not-a-number", with_numbers(&usual, &|_| f64::NAN)),
        ("infinite", with_numbers(&usual, &|v| if v > 0.1 { f64::INFINITY } else { f64::NEG_INFINITY })),
    ]
}
