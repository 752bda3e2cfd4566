//! The static and rotated quantizers and the value policies, through `headq eval` on a trained model.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{GQA, World};
use headq_lab::evaluate::{Evaluation, SchemeResult};

/// `headq eval` of schemes in 4 windows of 256, with statistics where asked for.
#[track_caller]
fn evaluate(world: &World, schemes: &[&str], stats: bool) -> Vec<SchemeResult> {
    let mut args = vec!["eval", "model", "--text", "text.txt", "--context", "256", "--windows", "4"];
    args.extend(schemes.iter().flat_map(|s| ["--scheme", s]));
    if stats {
        let calibrate = "calibrate model --text other.txt --context 256 --windows 4 --out stats.safetensors";
        world.succeeds(&calibrate.split(' ').collect::<Vec<_>>());
        args.extend(["--stats", "stats.safetensors"]);
    }
    let evaluation: Evaluation = serde_json::from_value(world.prints(&args)).unwrap();
    assert_eq!(evaluation.schemes[0].canonical, "dense");
    evaluation.schemes
}

#[test]
fn static_and_rotated_keys_cost_what_they_store() {
    let world = World::embedded();
    let schemes =
        ["kivi-2", "kivi-2(center)", "token-2(center)", "grid-3", "grid-3(center)", "grid-3(c=1)", "rotated-2"];
    let results = evaluate(&world, &schemes, true);
    let (dense, coded) = results.split_first().unwrap();
    // Codes, and where a group or a token has scales of its own, 16 bits for each of them.
    let bits = [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 2.0 + 16.0 / 32.0];
    for ((result, scheme), bits) in coded.iter().zip(schemes).zip(bits) {
        assert_eq!((result.scheme.as_str(), result.key_bits, result.value_bits), (scheme, bits, 16.0));
        assert!(result.key_mse.unwrap() > 0.0 && result.kl.unwrap() > 0.0, "{scheme}");
        assert_eq!((result.value_mse, result.readout_error), (None, Some(0.0)), "{scheme}");
        assert!(result.ppl > dense.ppl && result.ppl < 1.5 * dense.ppl, "{scheme}: {} of {}", result.ppl, dense.ppl);
    }
    // Ranges move with the keys.
    let [kivi, centered] = [&coded[0], &coded[1]];
    assert!((centered.ppl / kivi.ppl - 1.0).abs() < 0.005, "{} and {}", kivi.ppl, centered.ppl);
}

#[test]
fn more_bits_lose_less() {
    let results = evaluate(&World::embedded(), &["rotated-1", "rotated-2", "rotated-4", "rotated-8"], false);
    for pair in results[1..].windows(2) {
        assert!(
            pair[0].kl > pair[1].kl && pair[0].key_mse > pair[1].key_mse,
            "{} and {}",
            pair[0].scheme,
            pair[1].scheme
        );
    }
    assert!((results[4].ppl / results[0].ppl - 1.0).abs() < 0.005);
}

#[test]
fn attention_mass_selects_better_than_error_or_chance() {
    let world = World::embedded();
    for (keys, bits) in [("dense", 2), ("kivi-2", 2), ("dense", 3)] {
        let schemes = ["token", "a2", "mse", "random", "recency"].map(|p| format!("{keys}/{p}-{bits}(c=32)"));
        let results = evaluate(&world, &schemes.each_ref().map(String::as_str), false);
        let [uniform, mixed @ ..] = &results[1..] else { panic!("five policies") };
        let scales = 2.0 * 16.0 / 32.0;
        assert_eq!(uniform.value_bits, f64::from(bits) + scales);
        for result in mixed {
            // One bit more for each token of 32 elements, which says how many its codes have.
            assert_eq!(result.value_bits, f64::from(bits) + scales + 1.0 / 32.0, "{}", result.scheme);
            assert_eq!(result.key_bits, if keys == "dense" { 16.0 } else { 3.0 });
        }
        let [a2, mse, random, recency] = mixed else { panic!("four mixed policies") };
        for rival in [mse, random, recency] {
            assert!(a2.readout_error < rival.readout_error, "{} and {}", a2.scheme, rival.scheme);
            assert!(a2.ppl < rival.ppl, "{} and {}", a2.scheme, rival.scheme);
        }
        // Which is what it selects by, and not what it stores.
        assert!(mse.value_mse < a2.value_mse && a2.readout_diagonal < mse.readout_diagonal);
    }
}

#[test]
fn random_selection_follows_the_seed() {
    let world = World::new(GQA);
    let run = |seed: &str| {
        let scheme = "dense/random-2(c=8,g=8,r=4)";
        world.eval(&["--scheme", scheme, "--scheme", "dense/recency-2(c=8,g=8,r=4)", "--seed", seed])["schemes"].clone()
    };
    let (first, again, other) = (run("1"), run("1"), run("2"));
    assert_eq!(first, again);
    assert_eq!(first[2], other[2]);
}

#[test]
fn quantizers_matched_to_scores_lose_less_at_no_more_bits() {
    let world = World::embedded();
    let schemes = [
        "kivi-2(sinks=4)",
        "kivi-2(sinks=4,rounding=score-aware,lambda=0.1)",
        "klt-2",
        "klt-3",
        "klt-2(ranges=static)",
        "klt-1.5",
    ];
    let results = evaluate(&world, &schemes, true);
    let [dense, kivi, aware, klt, more, fixed, less] = results.as_slice() else { panic!("six schemes and dense") };
    assert_eq!((kivi.key_bits, aware.key_bits, fixed.key_bits), (3.0, 3.0, 2.0));
    // Scales for no more coefficients than have bits.
    for (result, bits) in [(klt, 2.0), (more, 3.0), (less, 1.5)] {
        assert!(
            result.key_bits > bits && result.key_bits < bits + 32.0 / 32.0,
            "{}: {}",
            result.scheme,
            result.key_bits
        );
    }
    assert!(aware.kl < kivi.kl && aware.ppl < kivi.ppl, "{} and {}", aware.ppl, kivi.ppl);
    assert!(klt.kl < kivi.kl && klt.ppl < kivi.ppl && more.kl < klt.kl && klt.kl < less.kl);
    assert!(results.iter().all(|r| r.ppl < 1.5 * dense.ppl));
}

/// The same keys through the packed cache, token by token; a side code on top has the residuals that its base was calibrated with.
#[test]
fn matched_quantizers_decode_and_carry_side_codes() {
    let world = World::embedded();
    for base in ["klt-2(g=16,r=16)", "kivi-2(g=16,r=16,rounding=score-aware)"] {
        let calibrate = "calibrate model --text other.txt --context 128 --windows 4 --out stats.safetensors --base";
        world.succeeds(&calibrate.split(' ').chain([base]).collect::<Vec<_>>());
        let corrected = format!("{base}+score-optimal(rank=4,bits=3)/token-3(c=32)");
        let args = ["eval", "model", "--text", "text.txt", "--context", "128", "--windows", "2", "--stats"];
        let args = [&args[..], &["stats.safetensors", "--scheme", base, "--scheme", &corrected]].concat();
        let evaluate = |more: &[&str]| -> Vec<SchemeResult> {
            let found: Evaluation = serde_json::from_value(world.prints(&[&args, more].concat())).unwrap();
            found.schemes
        };
        let (whole, steps) = (evaluate(&[]), evaluate(&["--decode", "--cache-dtype", "f32"]));
        assert!(whole[2].kl < whole[1].kl, "{base}");
        for (whole, steps) in whole.iter().zip(&steps) {
            assert_eq!((whole.key_bits, whole.cache_bits), (steps.key_bits, steps.cache_bits));
            assert!((steps.ppl / whole.ppl - 1.0).abs() < 2e-3, "{}: {} {}", whole.scheme, steps.ppl, whole.ppl);
        }
    }
}
