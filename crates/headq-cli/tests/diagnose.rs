//! `headq diagnose`: the numbers of the seven links agree with each other and with `headq eval`, and depend on nothing else.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::BTreeSet;
use std::sync::LazyLock;

use common::{ALL, DIAGNOSE, GQA, SMALL, World};
use headq_lab::diagnose::data::{
    Correlation, Counterexample, Diagnosis, Interval, KeyPoint, LINKS, Role, Setting, Verdict,
};
use headq_lab::diagnose::statistics::spearman;
use headq_lab::diagnose::thresholds::Thresholds;
use headq_lab::evaluate::{Evaluation, SchemeResult};
use headq_lab::overlap::Status;
use serde_json::Value;

/// On the trained model: the default base in windows as long as its context.
const TRAINED: [&str; 6] = ["--context", "256", "--windows", "4", "--calibration-text", "other.txt"];

const HEADS: usize = 3 * 2;

struct Made {
    printed: String,
    file: String,
    diagnosis: Diagnosis,
}

/// One diagnosis of the trained model for all tests that only read it.
static MADE: LazyLock<Made> = LazyLock::new(|| {
    let world = World::embedded();
    let printed = world.succeeds(&[&DIAGNOSE[..], &TRAINED, &["--json"]].concat());
    let file = String::from_utf8(world.read("made/diagnosis.json")).unwrap();
    let diagnosis = serde_json::from_str(&file).unwrap();
    Made { printed, file, diagnosis }
});

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a} and {b}");
}

fn ordered(interval: Option<Interval>) -> Interval {
    let interval = interval.expect("an interval of six heads or four windows");
    assert!(interval.low <= interval.high, "{interval:?}");
    interval
}

/// Every link was taken, says why, and has only numbers where there must be numbers.
#[track_caller]
fn whole(diagnosis: &Diagnosis) {
    let text = serde_json::to_string(diagnosis).unwrap();
    for ((name, ..), judgement) in LINKS.iter().zip(diagnosis.judgements()) {
        let judgement = judgement.unwrap_or_else(|| panic!("{name} is missing"));
        assert!(judgement.because.ends_with('.') && judgement.would_change.ends_with('.'), "{name}: {judgement:?}");
    }
    let words = text.split(|c: char| !c.is_alphanumeric());
    let bad: Vec<&str> = words.filter(|w| ["nan", "inf", "infinity"].contains(&&*w.to_lowercase())).collect();
    assert!(bad.is_empty(), "{bad:?}");
    // A number that was not finite would have become null, which is no number.
    assert_eq!(&serde_json::from_str::<Diagnosis>(&text).unwrap(), diagnosis);
}

/// The verdicts on which a model of random weights must earn no praise.
fn of_losses(diagnosis: &Diagnosis) -> [Verdict; 3] {
    [3, 4, 6].map(|link| diagnosis.judgements()[link].unwrap().verdict)
}

// The chain on a trained model.

#[test]
fn what_is_printed_is_what_is_kept() {
    assert_eq!(MADE.printed, MADE.file);
    whole(&MADE.diagnosis);
    let json: Value = serde_json::from_str(&MADE.printed).unwrap();
    for link in LINKS.map(|(name, ..)| name.replace('-', "_")) {
        let verdict = json[&link]["judgement"]["verdict"].as_str().unwrap();
        assert!(["supported", "not supported", "inconclusive"].contains(&verdict), "{link}: {verdict}");
    }
    let d = &MADE.diagnosis;
    assert_eq!((d.context, d.windows, d.tokens), (256, 4, 4 * 255));
    assert_eq!((d.calibration.first_window, d.calibration.tokens), (0, 4 * 256));
    let command =
        "headq diagnose model --text text.txt --out made --context 256 --windows 4 --calibration-text other.txt";
    assert_eq!(d.command, command);
}

#[test]
fn only_documented_numbers_are_undefined() {
    fn nulls(value: &Value, path: &str, found: &mut BTreeSet<String>) {
        match value {
            Value::Null => drop(found.insert(path.into())),
            Value::Array(items) => items.iter().for_each(|item| nulls(item, path, found)),
            Value::Object(fields) => fields.iter().for_each(|(k, v)| nulls(v, &format!("{path}/{k}"), found)),
            _ => {}
        }
    }
    let mut found = BTreeSet::new();
    nulls(&serde_json::from_str(&MADE.file).unwrap(), "", &mut found);
    let undefined = |path: &String| {
        // Keys or values that are not coded have no storage error, rows without a reference gain nothing, the last bin is open.
        ["key_mse", "key_mse_corrected", "value_mse", "excess_removed", "gain", "high"]
            .iter()
            .any(|field| path.ends_with(&format!("/{field}")))
    };
    assert!(found.iter().all(undefined), "{found:?}");
    for row in &MADE.diagnosis.perplexity.as_ref().unwrap().rows {
        let r = &row.result;
        assert_eq!(r.key_mse.is_some(), !r.canonical.starts_with("dense"), "{}", r.canonical);
        assert_eq!(r.value_mse.is_some(), r.canonical.contains('/'), "{}", r.canonical);
    }
}

/// ρ of each group, from predictors and target by setting.
#[track_caller]
fn ranks_agree(settings: &[Setting], points: &[(usize, [f64; 3])], found: &[Correlation]) {
    assert_eq!(found[0].group, "pooled");
    assert_eq!(found[0].points, HEADS * settings.len());
    assert_eq!(found[1..].iter().map(|c| c.points).sum::<usize>(), found[0].points);
    for c in found {
        let inside = |setting: usize| c.group == "pooled" || c.group == settings[setting].quantizer;
        let own: Vec<[f64; 3]> = points.iter().filter(|(s, _)| inside(*s)).map(|(_, p)| *p).collect();
        assert_eq!(c.points, own.len(), "{}", c.group);
        let series = |i: usize| own.iter().map(|p| p[i]).collect::<Vec<f64>>();
        let rho = |i: usize| spearman(&series(i), &series(2)).unwrap();
        for (interval, expected) in [(c.storage, rho(0)), (c.operator, rho(1)), (c.difference, rho(1) - rho(0))] {
            assert!((ordered(interval).estimate - expected).abs() < 1e-12, "{}", c.group);
        }
    }
}

#[test]
fn the_metric_link_ranks_every_head_under_every_setting() {
    let metric = MADE.diagnosis.metric.as_ref().unwrap();
    let places: BTreeSet<_> = metric.points.iter().map(|p| (p.layer, p.head, p.setting)).collect();
    assert_eq!(places.len(), HEADS * metric.settings.len());
    let keys: Vec<_> = metric.points.iter().map(|p| (p.setting, [p.mse, p.fisher, p.kl])).collect();
    ranks_agree(&metric.settings, &keys, &metric.keys);
    let values: Vec<_> = metric.value_points.iter().map(|p| (p.setting, [p.mse, p.a2, p.readout])).collect();
    ranks_agree(&metric.value_settings, &values, &metric.values);
    let positive = |x: &f64| *x > 0.0;
    assert!(metric.points.iter().all(|p| [p.mse, p.fisher, p.kl, p.output_error].iter().all(positive)));
    assert!(metric.value_points.iter().all(|p| [p.mse, p.a2, p.readout].iter().all(positive)));
    // Enough settings to correlate over; chance is far from what pairs say.
    assert!(metric.settings.len() >= 15);
    let rho = |c: &Correlation| c.operator.unwrap().estimate;
    assert!(rho(&metric.shuffled).abs() < 0.02 && rho(&metric.keys[0]) > 0.9);
}

#[test]
fn value_policies_are_compared_on_the_heads_that_were_measured() {
    let metric = MADE.diagnosis.metric.as_ref().unwrap();
    let readout = |policy: &str, bits: u32| -> Vec<f64> {
        let at = metric.value_settings.iter().position(|s| s.quantizer == policy && s.bits == bits).unwrap();
        metric.value_points.iter().filter(|p| p.setting == at).map(|p| p.readout).collect()
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    assert_eq!(metric.selection.iter().map(|s| s.bits).collect::<Vec<_>>(), [2, 3]);
    for selection in &metric.selection {
        let a2 = readout("a2", selection.bits);
        close(selection.a2, mean(&a2));
        assert_eq!(
            selection.others.iter().map(|o| o.policy.as_str()).collect::<Vec<_>>(),
            ["token", "mse", "random", "recency"]
        );
        for rival in &selection.others {
            let theirs = readout(&rival.policy, selection.bits);
            close(rival.readout, mean(&theirs));
            let ratios: Vec<f64> = a2.iter().zip(&theirs).map(|(a2, other)| (other / a2).ln()).collect();
            close(ordered(rival.log_ratio).estimate, mean(&ratios));
            let won = ratios.iter().filter(|r| **r > 0.0).count();
            close(rival.heads_won.unwrap(), won as f64 / HEADS as f64);
        }
    }
}

#[test]
fn counterexamples_are_those_of_the_metric_links_points() {
    let (metric, link) = (MADE.diagnosis.metric.as_ref().unwrap(), MADE.diagnosis.counterexamples.as_ref().unwrap());
    let bits = |p: &KeyPoint| metric.settings[p.setting].code_bits;
    let (mut pairs, mut strengths) = (0, Vec::new());
    for a in &metric.points {
        for b in metric.points.iter().filter(|b| (b.layer, b.head) == (a.layer, a.head) && b.setting > a.setting) {
            if (bits(a) - bits(b)).abs() > 0.001 {
                continue;
            }
            pairs += 1;
            let (stored, read) = if a.mse < b.mse { (a, b) } else { (b, a) };
            if stored.mse < read.mse && stored.kl > read.kl && stored.output_error > read.output_error {
                strengths.push((stored.kl / read.kl).min(stored.output_error / read.output_error));
            }
        }
    }
    assert_eq!((link.pairs, link.count), (pairs, strengths.len()));
    close(ordered(link.share).estimate, strengths.len() as f64 / pairs as f64);
    strengths.sort_by(|a, b| b.total_cmp(a));
    let listed: Vec<f64> = link.strongest.iter().map(|c| c.strength).collect();
    assert_eq!(listed, strengths[..10]);
    let point = |c: &Counterexample, scheme: &str| {
        let own = |p: &&KeyPoint| (p.layer, p.head) == (c.layer, c.head) && metric.settings[p.setting].scheme == scheme;
        *metric.points.iter().find(own).unwrap()
    };
    for c in &link.strongest {
        let (stored, read) = (point(c, &c.stored_better), point(c, &c.read_better));
        assert_eq!(
            [c.mse, c.kl, c.output_error],
            [[stored.mse, read.mse], [stored.kl, read.kl], [stored.output_error, read.output_error]]
        );
        assert_eq!(c.code_bits, [bits(&stored), bits(&read)]);
    }
}

#[test]
fn shifted_keys_move_the_static_quantizer_only() {
    let link = MADE.diagnosis.null_space.as_ref().unwrap();
    assert!(link.dense_change > 0.0 && link.dense_change <= link.dense_tolerance && link.dense_tolerance < 1e-4);
    assert_eq!(link.curves.iter().map(|c| c.equivariant).collect::<Vec<_>>(), [false, false, true]);
    for curve in &link.curves {
        let alphas: Vec<f64> = curve.points.iter().map(|p| p.alpha).collect();
        assert_eq!(alphas, [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]);
        let fisher = || curve.points.iter().map(|p| p.fisher);
        let (least, most) = (fisher().fold(f64::INFINITY, f64::min), fisher().fold(0.0, f64::max));
        let moved = (most - least) / most;
        assert!(
            least > 0.0 && (if curve.equivariant { moved < 1e-5 } else { moved > 0.05 }),
            "{}: {moved}",
            curve.scheme
        );
    }
}

#[test]
fn whole_bases_capture_everything_and_families_share_a_budget() {
    let link = MADE.diagnosis.bases.as_ref().unwrap();
    let names = ["query-pca", "query-pca-centered", "residual-pca", "random", "score-optimal"];
    assert_eq!(link.families.iter().map(|f| f.family.as_str()).collect::<Vec<_>>(), names);
    assert_eq!(link.ranks, [1, 2, 4, 8, 16, 32]);
    for (curve, family) in link.curves.iter().zip(&link.families) {
        let shares: Vec<f64> = curve.shares.iter().map(|s| s.unwrap()).collect();
        assert_eq!(curve.family, family.family);
        assert!((shares[5] - 1.0).abs() < 1e-6 && shares[..5].iter().all(|s| (0.0..1.0).contains(s)), "{curve:?}");
        // The correction's rank is one of the curve's.
        close(ordered(family.captured).estimate, shares[2]);
        let r = &family.result;
        assert_eq!((r.key_bits, r.value_bits), (3.0 + 4.0 * (4.0 + 1.0) / 32.0, 16.0), "{}", r.scheme);
        assert_eq!(r.cache_bits, link.families[0].result.cache_bits);
        close(ordered(family.gain).estimate, link.base.nll - r.nll);
        assert_eq!(r.key_mse, link.base.key_mse, "a side code leaves the base code alone");
    }
    let evaluated = std::iter::once(&link.base).chain(link.families.iter().map(|f| &f.result));
    for (map, result) in link.maps.iter().zip(evaluated) {
        assert_eq!(map.scheme, result.canonical);
        assert_eq!(map.fisher.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 2]);
        close(map.fisher.iter().flatten().map(|f| f.unwrap()).sum::<f64>() / HEADS as f64, result.fisher.unwrap());
    }
    assert_eq!(link.maps.len(), 1 + link.families.len());
}

#[test]
fn the_spectrum_descends_and_its_quartiles_are_in_order() {
    let spectrum = &MADE.diagnosis.bases.as_ref().unwrap().spectrum;
    for values in [&spectrum.low, &spectrum.median, &spectrum.high] {
        assert_eq!(values.len(), 32);
        assert!(values.is_sorted_by(|a, b| a >= b) && values[31] >= 0.0);
    }
    let between = |i: usize| spectrum.low[i] <= spectrum.median[i] && spectrum.median[i] <= spectrum.high[i];
    assert!((0..32).all(between));
    // Each head's sums to 1, and so the quartiles' lie around it.
    assert!(spectrum.low.iter().sum::<f64>() <= 1.0 && spectrum.high.iter().sum::<f64>() >= 1.0);
}

#[test]
fn a_flipped_correction_is_worse_than_none() {
    let (link, bases) = (MADE.diagnosis.direction.as_ref().unwrap(), MADE.diagnosis.bases.as_ref().unwrap());
    assert!(
        link.flipped.ppl > link.base.ppl && link.base.ppl > link.corrected.ppl && link.corrected.ppl > link.dense.ppl
    );
    assert_eq!(link.flipped.key_bits, link.corrected.key_bits);
    close(ordered(link.base_loss).estimate, link.base.nll - link.dense.nll);
    close(ordered(link.corrected_gain).estimate, link.base.nll - link.corrected.nll);
    close(ordered(link.flipped_loss).estimate, link.flipped.nll - link.base.nll);
    // One measurement serves both links.
    assert_eq!((&link.dense, &link.base, &link.corrected), (&bases.dense, &bases.base, &bases.families[0].result));
}

#[test]
fn every_query_that_reads_codes_is_in_one_bin() {
    let link = MADE.diagnosis.route_flips.as_ref().unwrap();
    let direction = MADE.diagnosis.direction.as_ref().unwrap();
    let names: Vec<&str> = link.schemes.iter().map(|s| s.scheme.as_str()).collect();
    assert_eq!(names, [&direction.base.canonical, &direction.corrected.canonical]);
    for scheme in &link.schemes {
        // The first group of 32 is read from codes once 32 newer tokens are there.
        assert_eq!(scheme.queries, (3 * 4 * 4 * (256 - 63)) as u64);
        let sums = scheme.bins.iter().fold((0, 0), |(q, f), b| (q + b.queries, f + b.flips));
        assert_eq!(sums, (scheme.queries, scheme.flips));
        assert!(scheme.bins.iter().all(|b| b.flips <= b.queries));
        assert!(
            scheme.bins.windows(2).all(|b| b[0].high == Some(b[1].low)) && scheme.bins.last().unwrap().high.is_none()
        );
        close(scheme.share.unwrap(), scheme.flips as f64 / scheme.queries as f64);
        assert_eq!((scheme.flipped.queries, scheme.unflipped.queries), (scheme.flips, scheme.queries - scheme.flips));
        assert_eq!(scheme.flipped.sampled as u64, scheme.flips, "few enough to keep all");
        assert!(ordered(scheme.unflipped.rho).estimate > 0.9);
    }
    assert!(link.schemes[1].flips < link.schemes[0].flips, "the correction keeps routes");
}

#[test]
fn excess_is_removed_against_each_rows_own_reference() {
    let rows = &MADE.diagnosis.perplexity.as_ref().unwrap().rows;
    let dense = &rows[0].result;
    assert_eq!((rows[0].role, dense.canonical.as_str()), (Role::Dense, "dense"));
    for row in rows {
        let r = &row.result;
        close(r.ppl, r.nll.exp());
        close(r.nll_minus_dense, r.nll - dense.nll);
        let Some(reference) = &row.reference else {
            assert_eq!((row.gain, r.excess_removed), (None, None), "{}", r.scheme);
            continue;
        };
        let reference = &rows.iter().find(|row| row.result.canonical == *reference).unwrap().result;
        close(r.excess_removed.unwrap(), (reference.ppl - r.ppl) / (reference.ppl - dense.ppl));
        close(ordered(row.gain).estimate, reference.nll - r.nll);
        // Same window of dense tokens, same values.
        assert_eq!(r.canonical.split_once('/').map(|v| v.1), reference.canonical.split_once('/').map(|v| v.1));
    }
    let count = |role: Role| rows.iter().filter(|r| r.role == role).count();
    let roles = [Role::Dense, Role::Base, Role::Corrected, Role::Control, Role::Published];
    assert_eq!(roles.map(count), [1, 1, 4, 3, 4]);
    // Values only, keys and values, and with the correction: uniform, a2, mse, random, recency.
    assert_eq!([Role::Values, Role::Full, Role::FullCorrected].map(count), [5; 3]);
}

#[test]
fn rows_are_what_eval_says_of_them() {
    let world = World::embedded();
    let calibrate =
        "calibrate model --text other.txt --context 256 --windows 4 --base kivi-2(g=32,r=32) --out stats.safetensors";
    world.succeeds(&calibrate.split(' ').collect::<Vec<_>>());
    let rows = &MADE.diagnosis.perplexity.as_ref().unwrap().rows;
    let mut args = vec!["eval", "model", "--text", "text.txt", "--context", "256", "--windows", "4"];
    args.extend(["--stats", "stats.safetensors", "--json"]);
    args.extend(rows.iter().flat_map(|row| ["--scheme", &row.result.canonical]));
    let evaluation: Evaluation = serde_json::from_str(&world.succeeds(&args)).unwrap();
    assert_eq!((&evaluation.texts, evaluation.tokens), (&MADE.diagnosis.texts, MADE.diagnosis.tokens));
    let alone = |r: &SchemeResult| SchemeResult { excess_removed: None, ..r.clone() };
    for (row, result) in rows.iter().zip(&evaluation.schemes) {
        assert_eq!(alone(&row.result), alone(result));
    }
}

// What it depends on.

/// The diagnosis without the lines that say where it went.
fn but_for_its_place(world: &World, folder: &str) -> String {
    let text = String::from_utf8(world.read(&format!("{folder}/diagnosis.json"))).unwrap();
    let own = |line: &&str| !line.starts_with("  \"name\": ") && !line.starts_with("  \"command\": ");
    text.split_inclusive('\n').filter(own).collect()
}

#[test]
fn threads_and_folders_change_nothing_and_seeds_only_what_is_random() {
    let world = World::embedded();
    let run = |folder: &str, more: &[&str]| -> Diagnosis {
        let args = ["diagnose", "model", "--text", "text.txt", "--context", "128", "--windows", "5", "--out", folder];
        serde_json::from_value(world.prints(&[&args, more].concat())).unwrap()
    };
    let one = run("one", &["--threads", "1"]);
    let two = run("two", &["--threads", "2"]);
    assert!(but_for_its_place(&world, "one") == but_for_its_place(&world, "two"), "threads change results");
    assert_eq!(one.command.replace("--out one", "--out two"), two.command);
    let seeded = run("seeded", &["--seed", "1", "--links", "bases"]);
    for (a, b) in seeded.bases.unwrap().families.iter().zip(&one.bases.unwrap().families) {
        assert_eq!(a.result == b.result, a.family != "random", "{}", a.family);
    }
}

#[test]
fn links_take_up_what_others_measured() {
    let world = World::embedded();
    let run = |more: &[&str]| {
        let output = world.run(&[&DIAGNOSE[..], &TRAINED, more].concat());
        let progress = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{progress}");
        let diagnosis: Diagnosis = serde_json::from_value(world.json("made/diagnosis.json")).unwrap();
        let passes: Vec<String> = progress.lines().filter(|l| l.contains(" windows in ")).map(str::to_owned).collect();
        (diagnosis, passes)
    };
    let passes_of = |passes: &[String], link: &str| passes.iter().filter(|p| p.contains(link)).count();
    let (diagnosis, passes) = run(&["--links", "metric"]);
    assert_eq!(diagnosis.judgements().map(|j| j.is_some()), [true, false, false, false, false, false, false]);
    assert_eq!((passes.len(), passes_of(&passes, "1/7 metric: ")), (2, 1), "{passes:?}");
    let (diagnosis, passes) = run(&["--links", "direction,counterexamples"]);
    assert_eq!(
        diagnosis.judgements().map(|j| j.is_some()),
        [true, true, false, false, true, false, false],
        "they add up"
    );
    // Errors of four schemes, and a pass of each that is not dense.
    assert_eq!((passes.len(), passes_of(&passes, "5/7 direction: ")), (4, 4), "{passes:?}");
    let (mut all, passes) = run(&[]);
    assert_eq!(passes_of(&passes, "1/7 metric") + passes_of(&passes, "5/7 direction"), 0, "{passes:?}");
    assert_eq!(passes_of(&passes, "3/7 null-space: ") + passes_of(&passes, "6/7 route-flips: "), 2, "{passes:?}");
    all.command = MADE.diagnosis.command.clone();
    assert!(all == MADE.diagnosis, "the order of links changes results");

    // Other thresholds need no measurement.
    let (judged, passes) = run(&["--threshold", "min-rho=1", "--threshold", "max-dense-loss=0.01"]);
    assert_eq!(passes, [""; 0]);
    let verdicts = judged.judgements().map(|j| j.unwrap().verdict);
    assert_eq!((verdicts[0], verdicts[5]), (Verdict::NotSupported, Verdict::NotSupported));
    assert_eq!(of_losses(&judged), [Verdict::Inconclusive; 3]);
    for (i, judgement) in judged.judgements().iter().enumerate().filter(|(i, _)| [1, 2].contains(i)) {
        assert_eq!(*judgement, MADE.diagnosis.judgements()[i]);
    }
    let (judged, _) = run(&["--threshold", "min-counterexamples=0.9", "--threshold", "min-null-rise=100"]);
    let verdicts = judged.judgements().map(|j| j.unwrap().verdict);
    assert_eq!((verdicts[1], verdicts[2]), (Verdict::NotSupported, Verdict::NotSupported));
    let numbers = |d: &Diagnosis| (d.metric.clone().unwrap().points, d.perplexity.clone().unwrap().rows);
    assert_eq!(numbers(&judged), numbers(&MADE.diagnosis));
}

#[test]
fn another_diagnosis_does_not_touch_the_folder() {
    let world = World::new(GQA);
    let args = [&DIAGNOSE[..], &SMALL, &["--links", "null-space"]].concat();
    world.succeeds(&args);
    let before = world.snapshot();
    let refused = |args: &[&str], part: &str| {
        let output = world.run(args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("error: made: holds a run with another ") && error.contains(part), "{error}");
    };
    for (flag, value) in [
        ("--seed", "1"),
        ("--rank", "2"),
        ("--bits", "3"),
        ("--calibration-windows", "2"),
        ("--calibration-text", "other.txt"),
        ("--max-chars", "4000"),
    ] {
        refused(&[&args[..], &[flag, value]].concat(), "configuration");
    }
    for (from, to) in [("kivi-2(g=8,r=4)", "kivi-2(g=8,r=5)"), ("text.txt", "other.txt"), ("64", "63")] {
        let other: Vec<&str> = args.iter().map(|a| if *a == from { to } else { a }).collect();
        refused(&other, "configuration");
    }
    assert!(before == world.snapshot(), "a refused diagnosis changes files");
    world.write("text.txt", common::text(2400, 4));
    refused(&args, "text");
    world.write("text.txt", common::text(2400, 1));
    world.surgery(|t| t.get_mut("model.norm.weight").unwrap().2[0] ^= 1);
    refused(&args, "model");
    world.surgery(|t| t.get_mut("model.norm.weight").unwrap().2[0] ^= 1);
    world.succeeds(&args);
}

#[test]
fn lost_and_broken_parts_are_measured_again() {
    let world = World::new(GQA);
    let args = [&DIAGNOSE[..], &SMALL].concat();
    let first = world.succeeds(&[&args[..], &["--json"]].concat());
    let parts: Vec<String> = world.list("made/parts").into_iter().map(|n| format!("made/parts/{n}")).collect();
    assert!(parts.len() > 50);
    // Every kind of part: cut short, of another shape, gone.
    for (i, part) in parts.iter().enumerate() {
        match i % 4 {
            0 => world.write(part, "{\"half\": [1"),
            1 => world.write(part, "[]"),
            2 => std::fs::remove_file(world.path(part)).unwrap(),
            _ => {}
        }
    }
    assert_eq!(world.succeeds(&[&args[..], &["--json"]].concat()), first);
}

#[test]
fn the_help_names_every_threshold_and_link() {
    let help = World::new(GQA).succeeds(&["diagnose", "--help"]);
    for (name, value) in serde_json::to_value(Thresholds::default()).unwrap().as_object().unwrap() {
        let threshold = format!("{name}={}", value.as_f64().unwrap());
        assert!(help.split_whitespace().any(|word| word.trim_end_matches('.') == threshold), "{threshold}");
    }
    LINKS.iter().for_each(|(name, ..)| assert!(help.contains(&format!("  {name} ")), "{name}"));
}

// Models that know nothing, and models of odd shapes.

#[test]
fn random_weights_earn_no_praise() {
    for model in ALL {
        let world = World::new(model);
        let diagnosis = world.diagnose(&SMALL);
        whole(&diagnosis);
        assert!(!of_losses(&diagnosis).contains(&Verdict::Supported), "{model}: {:?}", of_losses(&diagnosis));
        let null = diagnosis.null_space.unwrap();
        assert!(null.dense_change <= null.dense_tolerance, "{model}: {}", null.dense_change);
    }
}

#[test]
fn heads_of_any_number_and_width_are_diagnosed() {
    for (layers, heads, width) in [(2, 3, 7), (1, 2, 24), (2, 2, 33), (1, 4, 1)] {
        let world = World::of_heads(layers, heads, width);
        let diagnosis = world.diagnose(&[&SMALL[..], &["--rank", "1"]].concat());
        whole(&diagnosis);
        assert!(!of_losses(&diagnosis).contains(&Verdict::Supported), "{layers} × {heads} × {width}");
        let metric = diagnosis.metric.unwrap();
        assert_eq!(metric.points.len(), layers * heads * metric.settings.len());
    }
}

#[test]
fn one_head_decides_little_and_says_so() {
    let diagnosis = World::of_heads(1, 1, 8).diagnose(&SMALL);
    whole(&diagnosis);
    let judgements = diagnosis.judgements().map(Option::unwrap);
    let metric = diagnosis.metric.as_ref().unwrap();
    assert_eq!(judgements[0].verdict, Verdict::Inconclusive);
    assert!(judgements[0].because.contains(&format!("{} points, too few", metric.points.len())), "{judgements:?}");
    assert_eq!(judgements[1].verdict, Verdict::Inconclusive);
    assert!(judgements[1].because.contains("on 1 head, too few for an interval"), "{}", judgements[1].because);
    assert!(judgements[1].would_change.contains("At least 4 KV heads"), "{}", judgements[1].would_change);
    assert!(!of_losses(&diagnosis).contains(&Verdict::Supported));
}

#[test]
fn keys_that_are_zero_lose_nothing_and_decide_nothing() {
    let world = World::new(GQA);
    let keys = |name: &str| name.ends_with("k_proj.weight");
    world.surgery(|tensors| tensors.iter_mut().filter(|(name, _)| keys(name)).for_each(|(_, t)| t.2.fill(0)));
    let diagnosis = world.diagnose(&SMALL);
    whole(&diagnosis);
    let verdicts = diagnosis.judgements().map(|j| j.unwrap().verdict);
    assert_eq!(verdicts, [Verdict::Inconclusive; 7]);
    assert!(diagnosis.metric.unwrap().points.iter().all(|p| [p.mse, p.fisher, p.kl, p.output_error] == [0.0; 4]));
    // Up to what two passes round differently.
    assert!(diagnosis.bases.unwrap().base.nll_minus_dense.abs() < 1e-6);
}

#[test]
fn too_few_windows_decide_nothing_and_say_so() {
    let world = World::embedded();
    for windows in ["1", "3"] {
        let folder = format!("of-{windows}");
        let diagnosis: Diagnosis = serde_json::from_value(world.prints(&[
            "diagnose",
            "model",
            "--text",
            "text.txt",
            "--out",
            &folder,
            "--context",
            "128",
            "--windows",
            windows,
            "--links",
            "bases,direction,perplexity",
        ]))
        .unwrap();
        assert_eq!(of_losses(&diagnosis), [Verdict::Inconclusive; 3]);
        for judgement in diagnosis.judgements().into_iter().flatten() {
            let said = format!("Losses of {windows} window{} give no interval.", if windows == "1" { "" } else { "s" });
            assert_eq!(
                (judgement.because.as_str(), judgement.would_change.as_str()),
                (said.as_str(), "At least 4 windows (min-units).")
            );
        }
    }
}

#[test]
fn a_text_of_one_repeated_token_decides_nothing_about_losses() {
    for (world, word) in [(World::new(GQA), "w5 "), (World::embedded(), "the ")] {
        world.write("text.txt", word.repeat(2400));
        // All windows are alike, also those that are calibrated on.
        let diagnosis = world.diagnose(&[&SMALL[..], &["--allow-overlap"]].concat());
        whole(&diagnosis);
        assert_eq!(diagnosis.overlap.as_ref().unwrap().status, Status::Found);
        assert_eq!(of_losses(&diagnosis), [Verdict::Inconclusive; 3]);
        let said = &diagnosis.perplexity.unwrap().judgement.because;
        assert!(said.contains("exactly the same") || said.contains("does not predict"), "{said}");
    }
}
