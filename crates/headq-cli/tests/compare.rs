//! `headq compare`, and configurations with a section `[compare]`.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::path::Path;

use common::{BASE, GQA, World};
use serde_json::{Value, json};

const SCHEME: &str = "kivi-2(g=8,r=4)+query-pca(rank=4,bits=4)";
const TEXT: [&str; 8] = ["compare", "model", "--text", "other.txt", "--context", "32", "--windows", "5"];

/// A tiny model with `stats.safetensors`, taken from `text.txt`.
fn world() -> World {
    World::new(GQA).calibrated()
}

fn make_basis(world: &World, family: &str, rank: &str, scope: &str, out: &str) {
    let args = ["basis", "stats.safetensors", "--family", family, "--rank", rank, "--scope", scope, "--out", out];
    world.succeeds(&args);
}

fn compare(world: &World, args: &[&str]) -> Value {
    world.prints(&[&TEXT, args, &["--quiet"]].concat())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

/// A table by layer and head, in one row.
fn flat(table: &Value) -> Vec<f64> {
    table.as_array().unwrap().iter().flat_map(numbers).collect()
}

fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    values.iter().sum::<f64>() / values.len() as f64
}

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-3), "{a} and {b}");
}

/// One line on standard error that has all of `needles`, the exit status, and every file as it was.
#[track_caller]
fn fails(world: &World, args: &[&str], status: i32, needles: &[&str]) {
    let before = world.snapshot();
    let output = world.run(&[args, &["--quiet"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{error}");
    assert!(error.starts_with("error: ") && error.lines().count() == 1 && output.stdout.is_empty(), "{error}");
    for needle in needles {
        assert!(error.contains(needle), "{needle:?} is not in: {error}");
    }
    assert!(before == world.snapshot(), "{args:?} changed files: {error}");
}

#[test]
fn a_basis_does_not_differ_from_itself() {
    let world = world();
    make_basis(&world, "query-pca", "4", "kv-head", "pca");
    std::fs::copy(world.path("pca"), world.path("copy")).unwrap();
    let args = ["--basis", "pca", "--basis", "copy", "--stats", "stats.safetensors", "--family", "query-pca"];
    let found = compare(&world, &[&["--scheme", SCHEME][..], &args].concat());
    let exactly = |value: f64| json!({"estimate": value, "low": value, "high": value});
    for (basis, name) in found["bases"].as_array().unwrap().iter().zip(["pca", "copy", "query-pca"]) {
        assert_eq!((&basis["name"], &basis["derived"]), (&json!(name), &json!(name == "query-pca")));
        assert_eq!(basis["result"], found["bases"][0]["result"]);
        for difference in ["nll", "captured"] {
            assert_eq!(basis["to_first"][difference], exactly(0.0), "{name}: {difference}");
        }
        for ratio in ["fisher", "kl", "output_error", "key_mse"] {
            let same = json!({"of_means": exactly(1.0), "by_head": exactly(1.0), "heads_better": null});
            assert_eq!(basis["to_first"][ratio], same, "{name}: {ratio}");
        }
        // No correction at all is worse, significantly so.
        assert!(number(&basis["to_base"]["kl"]["of_means"]["high"]) < 1.0);
    }
    let pairs: Vec<_> =
        found["angles"].as_array().unwrap().iter().map(|p| (p["first"].clone(), p["second"].clone())).collect();
    assert_eq!(pairs, [(json!(0), json!(1)), (json!(0), json!(2)), (json!(1), json!(2))]);
    for pair in found["angles"].as_array().unwrap() {
        // Degrees; what is left is the rounding of f64.
        assert!(number(&pair["decoder"]["largest"]) < 1e-10, "{pair}");
        assert_eq!((&pair["scope"], &pair["encoder"]), (&json!("kv-head"), &Value::Null));
        assert_eq!(pair["decoder"]["heads"].as_array().unwrap().len(), 3);
        assert!(pair["decoder"]["heads"].as_array().unwrap().iter().all(|l| l.as_array().unwrap().len() == 2));
    }
}

#[test]
fn every_row_is_what_eval_finds() {
    let world = world();
    make_basis(&world, "query-pca", "2", "kv-head", "pca2");
    make_basis(&world, "score-optimal", "3", "query-head", "optimal");
    let scheme = "kivi-2(g=8,r=4)+learned(rank=9,bits=3,scales=token)/token-2(c=8)";
    let args = ["--scheme", scheme, "--basis", "pca2", "--basis", "optimal"];
    let found = compare(&world, &args);
    let side = "bits=3,scales=token";
    let (pca, optimal) = (
        format!("kivi-2(g=8,r=4)+query-pca(rank=2,{side})/token-2(c=8)"),
        format!("kivi-2(g=8,r=4)+score-optimal(rank=3,{side},scope=query-head)/token-2(c=8)"),
    );
    let schemes = ["--scheme", "kivi-2(g=8,r=4)/token-2(c=8)", "--scheme", &pca, "--scheme", &optimal];
    let eval = [&["eval"][..], &TEXT[1..], &schemes, &["--basis", "pca2", "--basis", "optimal", "-q"]].concat();
    let evaluation = world.prints(&eval);
    let rows = &evaluation["schemes"];
    assert_eq!([&found["dense"], &found["base"]], [&rows[0], &rows[1]]);
    assert_eq!([&found["bases"][0]["result"], &found["bases"][1]["result"]], [&rows[2], &rows[3]]);
    for field in ["model", "fingerprint", "device", "seed", "tokens", "context", "windows", "texts", "add_bos"] {
        assert_eq!(found[field], evaluation[field], "{field}");
    }
    assert_eq!(found["scheme"], scheme);
    // Each query head has codes of its own, so that no one key is stood for.
    assert_eq!(found["bases"][1]["to_first"]["key_mse"]["of_means"]["estimate"], Value::Null);
    // Two directions of three, by query head, with encoders of their own.
    let pair = &found["angles"][0];
    assert_eq!(pair["scope"], "query-head");
    for span in ["decoder", "encoder"] {
        assert_eq!(pair[span]["heads"][2].as_array().unwrap().len(), 8);
        assert_eq!(numbers(&pair[span]["heads"][2][7]).len(), 2);
        assert_eq!(numbers(&pair[span]["median"]).len(), 2);
    }
    assert_ne!(pair["decoder"], pair["encoder"]);
}

#[test]
fn a_learned_basis_is_a_basis_like_any_other() {
    let world = world();
    make_basis(&world, "score-optimal", "4", "kv-head", "optimal");
    let (tensors, header) = world.artifact("optimal");
    let mut header: Value = serde_json::from_str(&header).unwrap();
    header["basis"]["family"] = json!("learned");
    header["basis"]["loss"] = json!("kl");
    world.write_tensors("learned", &tensors, Some(&header.to_string()));
    let found = compare(&world, &["--scheme", SCHEME, "--basis", "learned", "--basis", "optimal"]);
    let [learned, optimal] = [0, 1].map(|i| &found["bases"][i]);
    assert_eq!(
        [&learned["family"], &learned["loss"], &optimal["loss"]],
        [&json!("learned"), &json!("kl"), &Value::Null]
    );
    assert_eq!(learned["result"]["canonical"], "kivi-2(g=8,r=4)+learned(rank=4,bits=4)");
    assert_eq!([&learned["heads"], &learned["window_nll"]], [&optimal["heads"], &optimal["window_nll"]]);
    assert!(number(&found["angles"][0]["encoder"]["largest"]) < 1e-10);
    // What it was trained against is the base quantizer, too.
    let other = "kivi-3(g=8,r=4)+learned(rank=4,bits=4)";
    fails(&world, &[&TEXT[..], &["--scheme", other, "--basis", "learned"]].concat(), 1, &["learned", "needs its own"]);
}

#[test]
fn differences_and_ratios_are_those_of_the_tables() {
    let world = world();
    make_basis(&world, "query-pca", "4", "kv-head", "pca");
    let args = ["--scheme", SCHEME, "--basis", "pca", "--stats", "stats.safetensors", "--family", "random"];
    let found = compare(&world, &args);
    let (first, second) = (&found["bases"][0], &found["bases"][1]);
    let losses = |row: &Value| numbers(&row["window_nll"]);
    assert_eq!(losses(second).len(), 5);
    close(mean(losses(second)), number(&second["result"]["nll"]));
    close(mean(losses(second)) - mean(losses(first)), number(&second["to_first"]["nll"]["estimate"]));
    let base = numbers(&found["base_window_nll"]);
    close(mean(losses(second)) - mean(base), number(&second["to_base"]["nll"]["estimate"]));
    for (error, of_result) in [("fisher", "fisher"), ("kl", "kl"), ("key_mse", "key_mse_corrected")] {
        let (own, other) = (flat(&second["heads"][error]), flat(&first["heads"][error]));
        assert_eq!(own.len(), 6);
        close(mean(own.clone()), number(&second["result"][of_result]));
        let ratio = &second["to_first"][error];
        close(mean(own.clone()) / mean(other.clone()), number(&ratio["of_means"]["estimate"]));
        let logs = own.iter().zip(&other).map(|(a, b)| (a / b).ln());
        close(mean(logs).exp(), number(&ratio["by_head"]["estimate"]));
        let better = own.iter().zip(&other).filter(|(a, b)| a < b).count();
        close(better as f64 / 6.0, number(&ratio["heads_better"]));
    }
    let ratio = number(&second["result"]["output_error"]) / number(&first["result"]["output_error"]);
    close(ratio, number(&second["to_first"]["output_error"]["of_means"]["estimate"]));
    for row in [first, second] {
        close(mean(flat(&row["heads"]["captured"])), number(&row["captured"]["estimate"]));
        let (low, high) = (number(&row["captured"]["low"]), number(&row["captured"]["high"]));
        assert!(low < number(&row["captured"]["estimate"]) && number(&row["captured"]["estimate"]) < high);
    }
    // With too few windows there is a difference and no interval.
    let few = world.prints(&[&TEXT[..6], &["--windows", "3", "-q"], &args].concat());
    let nll = &few["bases"][1]["to_first"]["nll"];
    assert!(nll["estimate"].is_f64() && nll["low"].is_null() && nll["high"].is_null());
    assert!(few["bases"][1]["to_first"]["kl"]["of_means"]["low"].is_f64());
}

/// Tensors of an artifact as numbers.
fn tensor(world: &World, file: &str, name: &str) -> Vec<f64> {
    let (tensors, _) = world.artifact(file);
    let (dtype, _, bytes) = &tensors[name];
    match dtype {
        safetensors::Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
        safetensors::Dtype::F64 => bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
    }
}

#[test]
fn captured_shares_come_from_moments_of_the_measured_text() {
    const D: usize = 16;
    let world = world();
    make_basis(&world, "score-optimal", "3", "kv-head", "optimal");
    let found = compare(&world, &["--scheme", SCHEME, "--basis", "optimal"]);
    // The same windows, as calibration sees them.
    let measured = [&["calibrate"][..], &TEXT[1..], &["--base", BASE, "--out", "measured", "-q"]].concat();
    world.succeeds(&measured);
    let of = |name: &str| tensor(&world, "measured", name);
    let (q, q_count) = (of("q.outer"), of("q.count"));
    let (e, e_sum, e_count) = (of("e.outer"), of("e.sum"), of("e.count"));
    let (u, w) = (tensor(&world, "optimal", "decoder"), tensor(&world, "optimal", "encoder"));
    let shares = flat(&found["bases"][0]["heads"]["captured"]);
    for (head, share) in shares.into_iter().enumerate() {
        // Four query heads share a KV head.
        let c_q = |i: usize, j: usize| {
            (4 * head..4 * head + 4).map(|h| q[(h * D + i) * D + j]).sum::<f64>() / (4.0 * q_count[4 * head])
        };
        let n = e_count[head];
        let c_e =
            |i: usize, j: usize| e[(head * D + i) * D + j] / n - e_sum[head * D + i] * e_sum[head * D + j] / (n * n);
        let left = |i: usize, j: usize| {
            let at = |m: &[f64], row: usize, c: usize| m[(head * D + row) * 3 + c];
            f64::from(u8::from(i == j)) - (0..3).map(|c| at(&u, i, c) * at(&w, j, c)).sum::<f64>()
        };
        let (mut whole, mut rest) = (0.0, 0.0);
        for (i, j) in (0..D).flat_map(|i| (0..D).map(move |j| (i, j))) {
            whole += c_q(i, j) * c_e(j, i);
            for (a, b) in (0..D).flat_map(|a| (0..D).map(move |b| (a, b))) {
                rest += c_q(i, j) * left(j, a) * c_e(a, b) * left(i, b);
            }
        }
        close(share, 1.0 - rest / whole);
    }
}

fn embedded() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/headq-embedded").canonicalize().unwrap()
}

#[cfg(unix)]
#[test]
fn the_example_of_the_help_text_runs_and_random_is_worst() {
    let world = world();
    std::fs::create_dir(world.path("checkpoints")).unwrap();
    std::os::unix::fs::symlink(embedded(), world.path("checkpoints/headq-embedded")).unwrap();
    let help = world.succeeds(&["compare", "--help"]);
    let example = help.split("Example:").nth(1).unwrap().trim_start().split("\n\n").next().unwrap();
    let example = example.replace("\\\n", " ").replace('\'', "");
    let words: Vec<&str> = example.split_whitespace().collect();
    assert_eq!(words[..2], ["headq", "compare"]);
    let model = "checkpoints/headq-embedded";
    let text = format!("{model}/calibration.txt");
    let calibrate = ["calibrate", model, "--text", &text, "--context", "256", "--windows", "16", "-q"];
    std::fs::remove_file(world.path("stats.safetensors")).unwrap();
    world.succeeds(&[&calibrate[..], &["--out", "stats.safetensors"]].concat());
    make_basis(&world, "query-pca", "4", "kv-head", "basis.safetensors");
    let found = world.prints(&words[1..]);
    let [pca, optimal, random] = [0, 1, 2].map(|i| &found["bases"][i]);
    for basis in [pca, optimal] {
        for field in ["ppl", "kl", "fisher", "output_error"] {
            let [own, random, base] = [&basis["result"], &random["result"], &found["base"]].map(|r| number(&r[field]));
            assert!(own < random && random < base, "{field}: {own}, {random}, {base}");
        }
        assert!(number(&basis["captured"]["low"]) > number(&random["captured"]["high"]));
        assert!(number(&basis["result"]["excess_removed"]) > number(&random["result"]["excess_removed"]));
    }
    assert!(
        number(&random["to_first"]["nll"]["low"]) > 0.0 && number(&random["to_first"]["kl"]["of_means"]["low"]) > 1.0
    );
    assert_eq!((&found["seen"], &found["seen_by"]), (&json!(false), &json!([])));
    // Four random directions of 32 are far from four others; the closest of two learned bases are near.
    let median = |pair: usize| numbers(&found["angles"][pair]["decoder"]["median"]);
    assert!(median(0)[0] < 20.0 && median(1)[0] > 40.0 && median(2)[0] > 40.0);
    let shown = world.succeeds(&[&words[1..], &["-q"]].concat());
    for part in ["no correction", "score-optimal", "query-pca (basis.safetensors)", "principal angles", "encoders"] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
}

#[test]
fn texts_that_an_artifact_was_made_from_are_marked() {
    let world = world();
    make_basis(&world, "query-pca", "4", "kv-head", "pca");
    world.succeeds(&[&["calibrate"][..], &TEXT[1..], &["--base", BASE, "--out", "other-stats", "-q"]].concat());
    let basis = ["basis", "other-stats", "--family", "query-pca", "--rank", "4", "--out", "other"];
    world.succeeds(&basis);
    let run = |text: &[&str], more: &[&str]| {
        let args =
            ["compare", "model", "--context", "32", "--windows", "2", "--scheme", SCHEME, "--json", "--allow-overlap"];
        let output = world.run(&[&args, text, &["--basis", "pca", "--basis", "other"], more].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{error}");
        (serde_json::from_slice::<Value>(&output.stdout).unwrap(), error)
    };
    let seen = |found: &Value| [0, 1].map(|i| found["bases"][i]["seen"].as_bool().unwrap());
    for part in [&[][..], &["--max-chars", "400"]] {
        let (found, error) = run(&[&["--text", "calibration.txt"], part].concat(), &[]);
        assert_eq!((&found["seen"], seen(&found)), (&json!(true), [true, false]));
        assert_eq!(found["seen_by"], json!([{"artifact": "pca", "text": "calibration.txt"}]));
        assert!(error.contains("text calibration.txt: at least 64 of its 64 tokens (2 of 2 windows)"), "{error}");
        assert!(error.contains("which pca was made from: this is no test on new text"), "{error}");
        assert_eq!(found["overlap"]["status"], "found");
    }
    let (found, error) = run(&["--text", "calibration.txt", "--text", "other.txt"], &["--quiet"]);
    assert_eq!((seen(&found), error.as_str()), ([true, true], ""));
    world.write("new.txt", common::text(2400, 9));
    let (found, error) = run(&["--text", "new.txt"], &[]);
    assert_eq!((&found["seen"], seen(&found)), (&json!(false), [false, false]));
    assert!(!error.contains("new text"), "{error}");
    assert_eq!(found["overlap"], json!({"status": "none", "found": [], "unknown": []}));
}

#[test]
fn the_same_seed_gives_the_same_bytes_whatever_the_threads() {
    let world = world();
    let args = ["--scheme", SCHEME, "--stats", "stats.safetensors", "--family", "random", "--family", "query-pca"];
    let run = |more: &[&str]| compare(&world, &[&args, more].concat());
    let one = run(&["--threads", "1"]);
    assert_eq!(one, run(&["--threads", "1"]));
    assert_ne!(one["bases"], run(&["--threads", "1", "--seed", "3"])["bases"]);
    let two = run(&["--threads", "2"]);
    for i in 0..2 {
        close(number(&one["bases"][i]["result"]["nll"]), number(&two["bases"][i]["result"]["nll"]));
        let bound = |found: &Value| number(&found["bases"][i]["to_base"]["kl"]["by_head"]["high"]);
        close(bound(&one), bound(&two));
    }
}

#[test]
fn static_base_quantizers_take_their_scales_from_the_statistics() {
    let world = world();
    make_basis(&world, "query-pca", "4", "kv-head", "pca");
    let scheme = ["--scheme", "grid-3(g=8,r=4,center)+query-pca(rank=4,bits=4)", "--basis", "pca"];
    let found = compare(&world, &[&scheme[..], &["--stats", "stats.safetensors"]].concat());
    assert!(number(&found["bases"][0]["captured"]["estimate"]) > 0.0);
    fails(&world, &[&TEXT[..], &scheme].concat(), 2, &["needs statistics of keys and queries", "--stats"]);
}

#[test]
fn what_is_written_is_what_is_printed() {
    let world = world();
    let args = ["--scheme", SCHEME, "--stats", "stats.safetensors", "--family", "random", "--out", "found.json"];
    let printed = compare(&world, &args);
    assert_eq!(world.json("found.json"), printed);
    compare(&world, &args);
    world.write("mine", "mine");
    for out in ["mine", "text.txt", "stats.safetensors", "nowhere/found.json", "model"] {
        fails(&world, &[&TEXT[..], &args[..7], &[out]].concat(), 1, &[out]);
    }
}

// Configurations.

fn config(windows: usize, families: &str) -> String {
    format!(
        r#"name = "pairs"
model = "model"

[calibrate]
text = "text.txt"
context = 32
windows = 4

[compare]
text = ["other.txt"]
context = 32
windows = {windows}
scheme = "{SCHEME}"
basis = ["made.safetensors"]
families = [{families}]
"#
    )
}

#[test]
fn a_run_compares_and_goes_on_where_it_stopped() {
    let world = World::new(GQA);
    let calibrate = ["calibrate", "model", "--text", "text.txt", "--context", "32", "--windows", "4", "--base", BASE];
    world.succeeds(&[&calibrate[..], &["--out", "stats.safetensors"]].concat());
    make_basis(&world, "query-pca", "2", "kv-head", "made.safetensors");
    world.write("run.toml", config(5, "\"score-optimal\", \"random\""));
    let printed = world.prints(&["run", "run.toml"]);
    let files: Vec<String> = world.list("runs/pairs").into_iter().filter(|n| !n.starts_with('.')).collect();
    assert_eq!(
        files,
        [
            "basis-random-rank4-kv-head-kivi-2_g8_r4.safetensors",
            "basis-score-optimal-rank4-kv-head-kivi-2_g8_r4.safetensors",
            "comparison.json",
            "parts",
            "report.html",
            "report.md",
            "run.json",
            "stats-kivi-2_g8_r4.safetensors"
        ]
    );
    assert_eq!(world.json("runs/pairs/comparison.json"), printed);
    let markdown = String::from_utf8(world.read("runs/pairs/report.md")).unwrap();
    for part in
        ["# pairs", "made.safetensors", "Principal angles between the subspaces", "headq run run.toml", "other.txt"]
    {
        assert!(markdown.contains(part), "{part} is not in {markdown}");
    }
    // By hand, from the artifacts that the run left.
    let by_hand = compare(
        &world,
        &[
            &["--scheme", SCHEME, "--basis", "made.safetensors"][..],
            &[
                "--stats",
                "runs/pairs/stats-kivi-2_g8_r4.safetensors",
                "--family",
                "score-optimal",
                "--family",
                "random",
            ],
        ]
        .concat(),
    );
    assert_eq!((&by_hand["bases"], &by_hand["angles"]), (&printed["bases"], &printed["angles"]));
    let kept = "runs/pairs/basis-random-rank4-kv-head-kivi-2_g8_r4.safetensors";
    let of_file = compare(&world, &["--scheme", SCHEME, "--basis", kept]);
    assert_eq!(of_file["bases"][0]["result"], printed["bases"][2]["result"]);
    // Any part may be lost, or broken by others.
    let parts = world.list("runs/pairs/parts");
    assert_eq!(
        parts,
        ["captured.json", "dense.json", "scheme-1.json", "scheme-2.json", "scheme-3.json", "scheme-4.json"]
    );
    for part in &parts {
        let path = format!("runs/pairs/parts/{part}");
        for broken in ["", "[[0.5]]"] {
            world.write(&path, broken);
            assert_eq!(world.prints(&["run", "run.toml"]), printed, "{part}: {broken}");
        }
        let modified = || std::fs::metadata(world.path(&path)).unwrap().modified().unwrap();
        let before = modified();
        world.succeeds(&["run", "run.toml", "-q"]);
        assert_eq!(before, modified(), "{part} was made again");
    }
    // Another basis under the same name is another run.
    make_basis(&world, "random", "2", "kv-head", "made.safetensors");
    fails(&world, &["run", "run.toml"], 1, &["another basis file"]);
    let suite = world.prints(&["suite", "run.toml", "--out", "suite", "-q"]);
    assert_eq!(suite, json!({"runs": ["suite/pairs"], "report": "suite/report.html"}));
}

#[test]
fn configurations_that_cannot_be_compared() {
    let world = world();
    make_basis(&world, "query-pca", "2", "kv-head", "made.safetensors");
    let whole = config(2, "\"random\"");
    let cases = [
        (whole.replace("+query-pca(rank=4,bits=4)", ""), 1, "no side code"),
        (whole.replace("kivi-2", "kivi-9"), 1, "from 1 to 8"),
        (whole.replace("\"random\"", "\"learned\""), 1, "trained"),
        (whole.replace("\"random\"", "\"pca\""), 1, "known are query-pca"),
        (whole.replace("[\"made.safetensors\"]", "[]").replace("[\"random\"]", "[]"), 1, "nothing to compare"),
        (whole.replace("families", "family"), 1, "unknown field `family`"),
        (whole.replace("[\"made.safetensors\"]", "[\"made.safetensors\", \"./made.safetensors\"]"), 1, "given twice"),
        (whole.replace("made.safetensors", "nowhere"), 1, "No such file"),
        (whole.replace("context = 32", "context = 7"), 1, "at least 8"),
        (
            whole.split("[calibrate]").next().unwrap().to_string() + &whole[whole.find("[compare]").unwrap()..],
            1,
            "no [calibrate]",
        ),
        (whole.clone() + "\n[diagnose]\ntext = \"text.txt\"\n", 1, "has both [diagnose] and [compare]"),
    ];
    for (text, status, needle) in cases {
        world.write("run.toml", text);
        fails(&world, &["run", "run.toml"], status, &[needle]);
    }
}

// Bad input.

#[test]
fn nothing_to_compare() {
    let world = world();
    make_basis(&world, "query-pca", "4", "kv-head", "pca");
    let with = |args: &[&'static str]| [&TEXT[..], args].concat();
    fails(&world, &with(&["--scheme", SCHEME]), 2, &["nothing to compare"]);
    fails(&world, &with(&["--scheme", SCHEME, "--stats", "stats.safetensors"]), 2, &["nothing to compare"]);
    for twice in ["pca", "./pca"] {
        let args = [&TEXT[..], &["--scheme", SCHEME, "--basis", "pca", "--basis", twice]].concat();
        fails(&world, &args, 2, &["given twice"]);
    }
    let families = ["--scheme", SCHEME, "--stats", "stats.safetensors", "--family", "random", "--family", "random"];
    fails(&world, &with(&families), 2, &["family random is given twice"]);
    fails(&world, &with(&["--scheme", SCHEME, "--family", "random"]), 2, &["needs statistics", "--stats"]);
    let vain = ["--scheme", SCHEME, "--basis", "pca", "--stats", "stats.safetensors"];
    fails(&world, &with(&vain), 1, &["stats.safetensors", "no use for statistics"]);
}

#[test]
fn schemes_without_a_place_for_bases() {
    let world = world();
    make_basis(&world, "query-pca", "4", "kv-head", "pca");
    for (scheme, needle) in [
        ("dense", "no side code"),
        (BASE, "no side code"),
        ("dense/token-2(c=8)", "no side code"),
        ("kivi-9+query-pca(rank=4,bits=4)", "from 1 to 8"),
        ("kivi-2(g=8,r=4)+query-pca(rank=4)", "bits"),
        ("kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)", "read dense throughout"),
        ("kivi-2(g=64,r=0)+query-pca(rank=4,bits=4)", "no whole group"),
    ] {
        fails(&world, &[&TEXT[..], &["--scheme", scheme, "--basis", "pca"]].concat(), 2, &[needle]);
    }
    let wide = "kivi-2(g=8,r=4)+query-pca(rank=17,bits=4)";
    fails(&world, &[&TEXT[..], &["--scheme", wide, "--basis", "pca"]].concat(), 1, &["rank=17", "head width 16"]);
}

#[test]
fn bases_that_do_not_belong_here() {
    let world = world();
    let with = |file: &'static str| [&TEXT[..], &["--scheme", SCHEME, "--basis", file]].concat();
    fails(&world, &with("nowhere"), 1, &["nowhere", "No such file"]);
    fails(&world, &with("stats.safetensors"), 1, &["expected basis, found \"statistics\""]);
    let wrong = [&TEXT[..], &["--scheme", SCHEME, "--stats", "nowhere", "--family", "random"]].concat();
    fails(&world, &wrong, 1, &["nowhere", "No such file"]);
    // Residuals of another base quantizer: fatal to families that use them, no matter to others.
    make_basis(&world, "score-optimal", "4", "kv-head", "optimal");
    make_basis(&world, "query-pca", "4", "kv-head", "pca");
    let other = "kivi-3(g=8,r=4)+query-pca(rank=4,bits=4)";
    let needles = ["kivi-2(g=8,r=32)", "--base 'kivi-3(g=8,r=4)'"];
    fails(&world, &[&TEXT[..], &["--scheme", other, "--basis", "optimal"]].concat(), 1, &needles);
    let derived =
        [&TEXT[..], &["--scheme", other, "--stats", "stats.safetensors", "--family", "residual-pca"]].concat();
    fails(&world, &derived, 1, &needles);
    compare(&world, &["--scheme", other, "--basis", "pca"]);
    // Another model of the same shapes.
    world.surgery(|t| t.get_mut("model.norm.weight").unwrap().2[0] ^= 1);
    fails(&world, &with("pca"), 1, &["pca", "another model"]);
}

#[test]
fn bases_that_are_broken() {
    let world = world();
    make_basis(&world, "query-pca", "4", "kv-head", "pca");
    let (tensors, header) = world.artifact("pca");
    let with = [&TEXT[..], &["--scheme", SCHEME, "--basis", "pca"]].concat();
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut json: Value = serde_json::from_str(&header).unwrap();
        edit(&mut json["basis"]);
        json.to_string()
    };
    let reshaped = |rank: usize| {
        let mut tensors = tensors.clone();
        let decoder = tensors.get_mut("decoder").unwrap();
        decoder.1 = vec![3, 2, 16, rank];
        decoder.2 = vec![0; 3 * 2 * 16 * rank * 4];
        tensors
    };
    let mut nan = tensors.clone();
    nan.get_mut("decoder").unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    for (tensors, header, needle) in [
        (tensors.clone(), edited(&|b| b["scope"] = json!("query-head")), "[3, 8, 16, 4]"),
        (tensors.clone(), edited(&|b| b["scope"] = json!("head")), "'head' is not known"),
        (tensors.clone(), edited(&|b| b["rank"] = json!(5)), "[3, 2, 16, 5]"),
        (reshaped(17), edited(&|b| b["rank"] = json!(17)), "rank 17 is outside 1 to the head width 16"),
        (reshaped(0), edited(&|b| b["rank"] = json!(0)), "rank 0 is outside 1"),
        (nan, header.clone(), "NaN or infinity"),
    ] {
        world.write_tensors("pca", &tensors, Some(&header));
        fails(&world, &with, 1, &["pca", needle]);
    }
}
