//! The stable contract of the command line.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{ALL, BASE, CALIBRATE, GQA, SIDE, World, config};
use predicates::prelude::*;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

const COMMANDS: [&str; 8] = ["inspect", "calibrate", "basis", "eval", "compare", "diagnose", "run", "suite"];

/// Takes an example from a help text apart as a shell would.
fn shell_words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), String::new(), false);
    for c in text.replace("\\\n", " ").chars() {
        match c {
            '\'' => quoted = !quoted,
            c if c.is_whitespace() && !quoted => words.extend((!word.is_empty()).then(|| std::mem::take(&mut word))),
            c => word.push(c),
        }
    }
    words.extend((!word.is_empty()).then_some(word));
    words
}

fn scheme(evaluation: &Value, i: usize) -> &Value {
    &evaluation["schemes"][i]
}

fn names(evaluation: &Value) -> Vec<&str> {
    evaluation["schemes"].as_array().unwrap().iter().map(|s| s["scheme"].as_str().unwrap()).collect()
}

/// Every number of `a` and `b` agrees to `bound` relative; everything else is equal.
#[track_caller]
fn close(a: &Value, b: &Value, bound: f64) {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            assert!(a.keys().eq(b.keys()));
            a.iter().for_each(|(key, value)| close(value, &b[key], bound));
        }
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len());
            a.iter().zip(b).for_each(|(a, b)| close(a, b, bound));
        }
        (Value::Number(x), Value::Number(y)) => {
            let (x, y) = (x.as_f64().unwrap(), y.as_f64().unwrap());
            assert!((x - y).abs() <= bound * x.abs().max(y.abs()), "{x} and {y}");
        }
        _ => assert_eq!(a, b),
    }
}

#[test]
fn every_help_has_an_example_that_parses() {
    let world = World::new(GQA);
    for command in COMMANDS {
        let help = world.succeeds(&[command, "--help"]);
        let example = help.split("Example:").nth(1).unwrap_or_else(|| panic!("{command}: no example"));
        let example = example.trim_start().split("\n\n").next().unwrap();
        let words: Vec<String> = shell_words(example).into_iter().skip_while(|word| word.contains('=')).collect();
        assert_eq!(words[..2], ["headq", command]);
        let output = world.run(&words[1..].iter().map(String::as_str).collect::<Vec<_>>());
        let error = String::from_utf8(output.stderr).unwrap();
        // The files are not here, but the command line is understood.
        assert_eq!(output.status.code(), Some(1), "{command}: {error}");
        assert!(error.contains("No such file") || error.contains("no such file"), "{command}: {error}");
    }
    let help = world.succeeds(&["--help"]);
    COMMANDS.iter().for_each(|c| assert!(help.contains(c)));
    assert!(predicate::str::is_match(r"^headq \d+\.\d+\.\d+\n$").unwrap().eval(&world.succeeds(&["--version"])));
}

#[test]
fn wrong_usage_is_status_2_and_every_other_failure_1() {
    let world = World::new(GQA);
    let eval = ["eval", "model", "--text", "text.txt", "--context", "32", "--windows", "2", "--scheme"];
    for args in [
        &[][..],
        &["no-such-command"],
        &["inspect"],
        &["inspect", "model", "--no-such-flag"],
        &["eval", "model", "--scheme", "dense"],
        &["inspect", "model", "--threads", "0"],
        &["inspect", "model", "--seed", "-1"],
        &["inspect", "model", "--context", "0"],
        &[&eval[..], &["kivi-9"]].concat(),
        &[&eval[..], &["dense", "--device", "abacus"]].concat(),
    ] {
        let output = world.run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    for args in [
        &["inspect", "nowhere"][..],
        &["basis", "nowhere", "--family", "random", "--rank", "1", "--out", "b"],
        &["run", "nowhere"],
    ] {
        assert_eq!(world.run(args).status.code(), Some(1), "{args:?}");
    }
}

#[test]
fn json_is_one_object_and_quiet_is_silent() {
    let world = World::new(GQA);
    world.write("run.toml", config(2));
    let basis = "basis stats.safetensors --family query-pca --rank 2 --out basis.safetensors";
    let eval = "eval model --text text.txt --context 32 --windows 2 --scheme kivi-2(g=8,r=4)+query-pca(rank=2,bits=4) \
                --basis basis.safetensors --out report.json";
    for line in ["inspect model --fingerprint", CALIBRATE, basis, eval, "run run.toml --out made"] {
        let args: Vec<&str> = line.split_whitespace().filter(|a| *a != "--quiet").collect();
        for format in [&[][..], &["--json"]] {
            let output = world.run(&[&args, format, &["--quiet"]].concat());
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && error.is_empty(), "{line}: {error}");
            // Neither bars nor colours.
            assert!(!output.stdout.contains(&0x1b) && output.stdout.ends_with(b"\n"), "{line}");
            let parsed: Result<Value, _> = serde_json::from_slice(&output.stdout);
            assert_eq!(parsed.is_ok_and(|v| v.is_object()), format == ["--json"], "{line}");
        }
        assert_eq!(
            world.run(&[&args[..], &["--json"]].concat()).stdout,
            world.run(&[&args[..], &["--json", "-q"]].concat()).stdout
        );
    }
    let mut command = world.command(&eval.split_whitespace().collect::<Vec<_>>());
    let output = command.env("HEADQ_LOG", "trace").arg("--json").output().unwrap();
    assert!(
        serde_json::from_slice::<Value>(&output.stdout).is_ok() && !output.stderr.is_empty(),
        "logs go to standard error"
    );
    assert_eq!(world.json("report.json"), serde_json::from_slice::<Value>(&output.stdout).unwrap());
}

#[test]
fn inspect_counts_what_caches_take() {
    let world = World::new(GQA);
    let shown = world.prints(&["inspect", "model", "--context", "64", "--scheme", "dense", "--scheme", SIDE]);
    assert_eq!(shown["architecture"], "llama");
    assert_eq!(shown["tensors"], 30);
    assert_eq!(shown["fingerprint"], Value::Null);
    assert_eq!(scheme(&shown, 0)["bytes_per_token"], 384.0);
    // 2 + 32/8 bits, and rank 4 of 3 + 32/8 bits over 16 channels.
    assert_eq!(scheme(&shown, 1)["key_bits"], 6.0 + 4.0 * 7.0 / 16.0);
    let evaluated =
        world.prints(&["eval", "model", "--text", "text.txt", "--context", "64", "--windows", "1", "--scheme", BASE]);
    let shown = world.prints(&["inspect", "model", "--context", "64", "--scheme", BASE]);
    for field in ["key_bits", "value_bits"] {
        assert_eq!(scheme(&shown, 0)[field], scheme(&evaluated, 1)[field]);
    }
    // Of 64 keys 56 are in codes of 6 bits, 8 are dense, and so are all values; evaluation averages over shorter caches.
    let held = ((56.0 * 6.0 + 8.0 * 16.0) / 64.0 + 16.0) / 2.0;
    assert_eq!(scheme(&shown, 0)["cache_bits"], held);
    assert_eq!(scheme(&shown, 0)["bytes_per_token"], 384.0 * held / 16.0);
    assert!(scheme(&evaluated, 1)["cache_bits"].as_f64().unwrap() > held);
}

#[test]
fn eval_has_all_documented_fields() {
    let world = World::new(GQA).calibrated();
    let evaluation = world.eval(&["--scheme", BASE, "--scheme", SIDE, "--stats", "stats.safetensors"]);
    assert_eq!(evaluation["model"], "model");
    assert_eq!(evaluation["device"], "flex");
    assert_eq!(evaluation["tokens"], 3 * 31);
    assert_eq!(names(&evaluation), ["dense", BASE, SIDE]);
    for (i, row) in evaluation["schemes"].as_array().unwrap().iter().enumerate() {
        for field in [
            "ppl",
            "nll",
            "key_bits",
            "value_bits",
            "cache_bits",
            "bytes_per_token",
            "nll_minus_dense",
            "nll_minus_dense_se",
        ] {
            assert!(row[field].is_f64(), "{field} of scheme {i}: {}", row[field]);
        }
        for field in ["fisher", "kl", "output_error"] {
            assert!(row[field].as_f64().is_some_and(|v| (v > 0.0) == (i > 0)), "{field} of scheme {i}");
        }
        for field in ["key_mse", "excess_removed"] {
            assert_eq!(row.get(field).map(Value::is_f64), Some(i > 0), "{field} of scheme {i}");
        }
        let (ppl, nll) = (row["ppl"].as_f64().unwrap(), row["nll"].as_f64().unwrap());
        assert!((ppl - nll.exp()).abs() < 1e-9 * ppl);
        let bits = if i == 0 { [16.0, 16.0] } else { [[6.0, 16.0], [7.75, 6.0]][i - 1] };
        assert_eq!([row["key_bits"].as_f64().unwrap(), row["value_bits"].as_f64().unwrap()], bits);
    }
    assert_eq!(scheme(&evaluation, 0)["nll_minus_dense"], 0.0);
    let first = scheme(&evaluation, 1)["excess_removed"].as_f64().unwrap();
    assert!(first == 0.0 && first.is_sign_positive());
    // The published baseline: 2-bit codes and two 16-bit numbers for 32 tokens.
    let kivi = world.prints(&[
        "eval",
        "model",
        "--text",
        "text.txt",
        "--context",
        "96",
        "--windows",
        "1",
        "--scheme",
        "kivi-2",
    ]);
    assert_eq!(scheme(&kivi, 1)["key_bits"], 3.0);
    assert_eq!(scheme(&kivi, 1)["scheme"], "kivi-2");
}

#[test]
fn dense_is_always_run_and_the_order_is_kept() {
    let world = World::new(GQA);
    assert_eq!(names(&world.eval(&["--scheme", BASE])), ["dense", BASE]);
    let asked = world.eval(&["--scheme", "token-2(g=8,r=4)", "--scheme", "dense", "--scheme", BASE]);
    assert_eq!(names(&asked), ["token-2(g=8,r=4)", "dense", BASE]);
    assert_eq!(scheme(&asked, 1)["excess_removed"], Value::Null);
    // A random model may lose less with a quantized cache; there is then no excess to remove.
    let excess = scheme(&asked, 0)["ppl"].as_f64() > scheme(&asked, 1)["ppl"].as_f64();
    assert_eq!(scheme(&asked, 0)["excess_removed"] == 0.0, excess);
    assert_eq!([0, 2].map(|i| scheme(&asked, i)["excess_removed"].is_f64()), [excess; 2]);
    let only = world.eval(&["--scheme", "dense"]);
    assert_eq!(names(&only), ["dense"]);
    assert_eq!(scheme(&only, 0)["nll"], scheme(&asked, 1)["nll"]);
    // A window that holds no whole group is dense throughout.
    for options in [&["--pass", "tensors"][..], &["--no-diagnostics"], &["--no-diagnostics", "--cache-dtype", "f16"]] {
        let untouched = world.eval(&[&["--scheme", "kivi-2(g=32,r=32)"][..], options].concat());
        assert_eq!(scheme(&untouched, 1)["nll_minus_dense"], 0.0);
        assert_eq!(scheme(&untouched, 1)["excess_removed"], Value::Null);
        assert_eq!(scheme(&untouched, 1)["key_mse"], Value::Null);
    }
    // Beside diagnostics the dense losses are those of the pass that these are taken on.
    let untouched = world.eval(&["--scheme", "kivi-2(g=32,r=32)"]);
    assert!(scheme(&untouched, 1)["nll_minus_dense"].as_f64().unwrap().abs() < 1e-6);
}

#[test]
fn schemes_do_not_disturb_each_other() {
    let world = World::new(GQA).calibrated();
    let stats = ["--stats", "stats.safetensors"];
    let both = world.eval(&[&["--scheme", SIDE, "--scheme", BASE][..], &stats].concat());
    let alone = world.eval(&["--scheme", BASE]);
    for field in ["nll", "kl", "fisher", "key_mse", "output_error"] {
        assert_eq!(scheme(&both, 2)[field], scheme(&alone, 1)[field], "{field}");
    }
    let plain = world.eval(&["--scheme", BASE, "--no-diagnostics"]);
    assert_eq!(scheme(&plain, 1)["kl"], Value::Null);
    assert_eq!(scheme(&plain, 1)["nll"], scheme(&alone, 1)["nll"]);
}

#[test]
fn the_same_seed_gives_the_same_bytes_whatever_the_threads() {
    let world = World::new(GQA).calibrated();
    let random = "kivi-2(g=8,r=4)+random(rank=4,bits=4)/token-2(c=8)";
    let eval = [
        "eval",
        "model",
        "--text",
        "text.txt",
        "--context",
        "64",
        "--windows",
        "5",
        "--scheme",
        random,
        "--scheme",
        SIDE,
    ];
    let run = |more: &[&str]| world.succeeds(&[&eval[..], &["--stats", "stats.safetensors", "--json"], more].concat());
    let one = run(&["--seed", "7", "--threads", "1"]);
    assert_eq!(one, run(&["--seed", "7", "--threads", "1"]));
    assert_ne!(one, run(&["--seed", "8", "--threads", "1"]).replace("\"seed\": 8", "\"seed\": 7"));
    for threads in ["2", "3", "16"] {
        let other = run(&["--seed", "7", "--threads", threads]);
        close(&serde_json::from_str(&one).unwrap(), &serde_json::from_str(&other).unwrap(), 1e-12);
    }
    let stats = world.read("stats.safetensors");
    for threads in ["1", "2", "7"] {
        world.succeeds(&[&CALIBRATE.split(' ').collect::<Vec<_>>()[..], &["--threads", threads]].concat());
        assert!(world.read("stats.safetensors") == stats, "{threads} threads");
    }
}

#[test]
fn several_texts_give_windows_each() {
    let world = World::new(GQA);
    let both = world.eval(&["--text", "other.txt", "--scheme", BASE]);
    assert_eq!(both["tokens"], 2 * 3 * 31);
    assert_eq!(both["texts"].as_array().unwrap().len(), 2);
    let first = world.eval(&["--scheme", BASE]);
    let by_text = &scheme(&both, 1)["nll_by_text"];
    assert_eq!(by_text[0], scheme(&first, 1)["nll"]);
    let mean = (by_text[0].as_f64().unwrap() + by_text[1].as_f64().unwrap()) / 2.0;
    assert!((mean - scheme(&both, 1)["nll"].as_f64().unwrap()).abs() < 1e-12);
    assert_ne!(by_text[0], by_text[1]);
}

#[test]
fn bos_begins_every_window_and_is_one_of_its_tokens() {
    let world = World::new(GQA);
    let with = world.eval(&["--add-bos", "--scheme", BASE]);
    assert_eq!((&with["add_bos"], &with["tokens"]), (&json!(true), &json!(93)));
    // The config's token 1 is `w1`: the same windows, written out.
    let text = String::from_utf8(world.read("text.txt")).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    let written: Vec<String> = words.chunks(31).map(|c| format!("w1 {}", c.join(" "))).collect();
    world.write("text.txt", written.join("\n"));
    let same = world.eval(&["--scheme", BASE]);
    assert_eq!(with["schemes"], same["schemes"]);
}

#[test]
fn characters_beyond_the_limit_do_not_matter() {
    let world = World::new(GQA);
    let whole = world.eval(&["--scheme", BASE]);
    let cut = world.eval(&["--scheme", BASE, "--max-chars", "1000"]);
    assert_eq!(cut["texts"][0]["chars"], 1000);
    assert_eq!(whole["schemes"], cut["schemes"]);
    // Unicode scalars, not bytes.
    let text = String::from_utf8(world.read("text.txt")).unwrap();
    world.write("text.txt", format!("日本 {text}"));
    assert_eq!(world.eval(&["--scheme", "dense", "--max-chars", "1000"])["texts"][0]["chars"], 1000);
}

#[test]
fn line_ends_do_not_matter() {
    let world = World::new(GQA);
    let lf = world.eval(&["--scheme", BASE, "--max-chars", "900"]);
    let text = String::from_utf8(world.read("text.txt")).unwrap();
    world.write("text.txt", text.replace('\n', "\r\n"));
    assert_eq!(lf, world.eval(&["--scheme", BASE, "--max-chars", "900"]));
}

#[test]
fn a_basis_file_is_what_the_statistics_give() {
    let world = World::new(GQA).calibrated();
    for (family, scope) in [
        ("query-pca", "kv-head"),
        ("query-pca-centered", "query-head"),
        ("residual-pca", "kv-head"),
        ("random", "query-head"),
        ("score-optimal", "kv-head"),
        ("score-optimal", "query-head"),
    ] {
        let basis = [
            "basis",
            "stats.safetensors",
            "--family",
            family,
            "--rank",
            "3",
            "--scope",
            scope,
            "--out",
            "basis.safetensors",
        ];
        let printed = world.prints(&[&basis[..], &["--seed", "5"]].concat());
        assert_eq!(printed["header"]["basis"], json!({"family": family, "rank": 3, "scope": scope, "seed": 5}));
        let scheme = format!("kivi-2(g=8,r=4)+{family}(rank=3,bits=4,scope={scope})");
        let eval = |source: &[&str]| world.eval(&[&["--seed", "5", "--scheme", &scheme][..], source].concat());
        assert_eq!(eval(&["--stats", "stats.safetensors"]), eval(&["--basis", "basis.safetensors"]), "{family}");
    }
}

#[test]
fn every_architecture_calibrates_and_evaluates() {
    for model in ALL {
        let world = World::new(model).calibrated();
        let evaluation = world.eval(&["--scheme", BASE, "--scheme", SIDE, "--stats", "stats.safetensors", "--add-bos"]);
        let (base, side) = (scheme(&evaluation, 1), scheme(&evaluation, 2));
        assert!(scheme(&evaluation, 0)["ppl"].as_f64().unwrap() > 1.0, "{model}");
        assert!(side["kl"].as_f64().unwrap() < base["kl"].as_f64().unwrap(), "{model}: {side} and {base}");
        assert_eq!(side["key_mse"], base["key_mse"], "{model}");
        assert!(
            side["output_error"].as_f64().unwrap() > 0.0 && base["output_error"].as_f64().unwrap() > 0.0,
            "{model}"
        );
        assert_eq!(evaluation["fingerprint"]["architecture"], world.prints(&["inspect", "model"])["architecture"]);
    }
}

#[test]
fn statistics_are_as_documented() {
    let world = World::new(GQA).calibrated();
    let (tensors, header) = world.artifact("stats.safetensors");
    let header: Value = serde_json::from_str(&header).unwrap();
    let identity = world.prints(&["inspect", "model", "--fingerprint"]);
    assert_eq!(header["model"], identity["fingerprint"]);
    for (key, value) in [
        ("schema", json!(1)),
        ("kind", json!("statistics")),
        ("tokens", json!(128)),
        ("context", json!(32)),
        ("add_bos", json!(false)),
        ("rope", json!("post-rope rotate-half")),
        ("base", json!("kivi-2(g=8,r=32)")),
        ("basis", Value::Null),
    ] {
        assert_eq!(header[key], value, "{key}");
    }
    assert_eq!(header["texts"][0]["path"], "calibration.txt");
    assert_eq!(header["texts"][0]["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(tensors.len(), 13);
    let (dtype, shape, bytes) = &tensors["output"];
    assert_eq!((*dtype, shape.as_slice()), (Dtype::F64, &[3, 2, 16, 16][..]));
    let output: Vec<f64> = bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
    for gram in output.chunks(256) {
        assert!((0..16).all(|i| gram[i * 17] > 0.0), "every channel is read");
        (0..256).for_each(|at| assert_eq!(gram[at], gram[at % 16 * 16 + at / 16], "output is symmetric"));
    }
    for (name, heads, count) in [("q", 8, 128), ("k", 2, 128), ("e", 2, 128), ("v", 2, 128)] {
        let get = |part: &str, dtype: Dtype, shape: &[usize]| {
            let (found, s, bytes) = &tensors[&format!("{name}.{part}")];
            assert_eq!((*found, s.as_slice()), (dtype, shape), "{name}.{part}");
            bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect::<Vec<_>>()
        };
        assert!(get("count", Dtype::I64, &[3, heads]).iter().all(|n| *n == count), "{name}");
        let sums: Vec<f64> = get("sum", Dtype::F64, &[3, heads, 16]).into_iter().map(f64::from_bits).collect();
        let outers: Vec<f64> = get("outer", Dtype::F64, &[3, heads, 16, 16]).into_iter().map(f64::from_bits).collect();
        for (sum, outer) in sums.chunks(16).zip(outers.chunks(256)) {
            for i in 0..16 {
                // Second moments are at least squared means (Cauchy–Schwarz).
                assert!(outer[i * 17] >= sum[i] * sum[i] / count as f64 * (1.0 - 1e-9), "{name}");
                (0..16).for_each(|j| assert_eq!(outer[i * 16 + j], outer[j * 16 + i], "{name} is symmetric"));
            }
        }
    }
    assert!(world.list(".").iter().all(|name| !name.starts_with('.')), "no temporary files");
}

#[test]
fn bases_are_as_documented() {
    let world = World::new(GQA).calibrated();
    for (family, scope, heads, tensors) in
        [("query-pca", "kv-head", 2, 1), ("score-optimal", "query-head", 8, 2), ("random", "query-head", 8, 1)]
    {
        world.succeeds(&[
            "basis",
            "stats.safetensors",
            "--family",
            family,
            "--rank",
            "4",
            "--scope",
            scope,
            "--out",
            "b.safetensors",
        ]);
        let (found, header) = world.artifact("b.safetensors");
        let header: Value = serde_json::from_str(&header).unwrap();
        assert_eq!((&header["kind"], &header["base"]), (&json!("basis"), &json!("kivi-2(g=8,r=32)")));
        assert_eq!(found.len(), tensors, "{family}");
        let columns = |name: &str, head: usize| -> Vec<Vec<f64>> {
            let (dtype, shape, bytes) = &found[name];
            assert_eq!((*dtype, shape.as_slice()), (Dtype::F32, &[3, heads, 16, 4][..]));
            let all: Vec<f64> = bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
            (0..4).map(|c| (0..16).map(|row| all[(head * 16 + row) * 4 + c]).collect()).collect()
        };
        let encoder = if tensors == 2 { "encoder" } else { "decoder" };
        for head in 0..3 * heads {
            // WᵀU = I, tied or not.
            for (i, w) in columns(encoder, head).iter().enumerate() {
                for (j, u) in columns("decoder", head).iter().enumerate() {
                    let dot: f64 = w.iter().zip(u).map(|(w, u)| w * u).sum();
                    assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-4, "{family}: {dot}");
                }
            }
        }
    }
}

#[test]
fn only_files_of_the_same_kind_are_replaced() {
    let world = World::new(GQA).calibrated().calibrated();
    assert!(world.artifact("stats.safetensors").1.contains("statistics"));
    assert_eq!(world.list("."), ["calibration.txt", "model", "other.txt", "stats.safetensors", "text.txt"]);
    std::os::unix::fs::symlink("text.txt", world.path("link")).unwrap();
    world.write("mine.json", "{}");
    let before = world.snapshot();
    let text = ["--text", "text.txt", "--context", "32", "--windows", "2"];
    let calibrate = |out| [&["calibrate", "model"][..], &text, &["--base", "kivi-2(g=8)", "--out", out]].concat();
    for args in [
        calibrate("text.txt"),
        calibrate("model/model.safetensors"),
        calibrate("link"),
        calibrate("/dev/null"),
        ["basis", "stats.safetensors", "--family", "query-pca", "--rank", "2", "--out", "stats.safetensors"].to_vec(),
        [&["eval", "model"][..], &text, &["--scheme", BASE, "--out", "mine.json"]].concat(),
    ] {
        let output = world.run(&args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(before == world.snapshot(), "{args:?}");
    }
}

#[test]
fn run_does_all_of_it() {
    let world = World::new(GQA);
    world.write("run.toml", config(3));
    let printed = world.prints(&["run", "run.toml"]);
    assert_eq!(
        world.list("runs/tiny").iter().filter(|n| !n.starts_with('.')).collect::<Vec<_>>(),
        [
            "basis-query-pca-rank2-kv-head-kivi-2_g8_r4.safetensors",
            "basis-score-optimal-rank4-kv-head-kivi-2_g8_r4.safetensors",
            "parts",
            "report.html",
            "report.json",
            "report.md",
            "run.json",
            "stats-kivi-2_g8_r4.safetensors",
        ]
    );
    assert_eq!(world.json("runs/tiny/report.json"), printed);
    assert_eq!(names(&printed), ["dense", BASE, "kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)", SIDE]);
    let markdown = String::from_utf8(world.read("runs/tiny/report.md")).unwrap();
    for part in ["# tiny", SIDE, "headq run run.toml", "other.txt"] {
        assert!(markdown.contains(part), "{part} is not in {markdown}");
    }
    // The same by hand, with the artifacts that the run left.
    let args = ["--text", "other.txt", "--scheme", BASE, "--scheme", names(&printed)[2], "--scheme", SIDE];
    let stats = ["--stats", "runs/tiny/stats-kivi-2_g8_r4.safetensors"];
    assert_eq!(world.eval(&[&args[..], &stats].concat())["schemes"], printed["schemes"]);
    let bases: Vec<String> = world
        .list("runs/tiny")
        .into_iter()
        .filter(|n| n.starts_with("basis"))
        .map(|n| format!("runs/tiny/{n}"))
        .collect();
    assert_eq!(
        world.eval(&[&args[..], &["--basis", &bases[0], "--basis", &bases[1]]].concat())["schemes"],
        printed["schemes"]
    );
}

#[test]
fn run_again_reuses_what_is_there() {
    let world = World::new(GQA);
    world.write("run.toml", config(3));
    let first = world.succeeds(&["run", "run.toml", "--json", "--out", "made"]);
    let report = world.read("made/report.json");
    let modified = |name: &str| std::fs::metadata(world.path(name)).unwrap().modified().unwrap();
    let kept: Vec<String> =
        world.list("made").into_iter().filter(|n| n.ends_with(".safetensors")).map(|n| format!("made/{n}")).collect();
    let kept: Vec<String> =
        kept.into_iter().chain(world.list("made/parts").into_iter().map(|n| format!("made/parts/{n}"))).collect();
    assert_eq!(kept.len(), 3 + 4);
    let before: Vec<_> = kept.iter().map(|n| modified(n)).collect();
    assert_eq!(first, world.succeeds(&["run", "run.toml", "--json", "--out", "made", "--threads", "1"]));
    assert_eq!(before, kept.iter().map(|n| modified(n)).collect::<Vec<_>>());
    assert_eq!(report, world.read("made/report.json"));
    // Any part may be lost, or broken by others.
    for lost in kept.iter().map(String::as_str).chain(["made/report.json", "made/report.md", "made/report.html"]) {
        std::fs::remove_file(world.path(lost)).unwrap();
        assert_eq!(first, world.succeeds(&["run", "run.toml", "--json", "--out", "made"]), "without {lost}");
        assert_eq!(report, world.read("made/report.json"), "without {lost}");
        assert!(world.path(lost).exists());
    }
    for (name, broken) in [
        ("dense", "{\"nll\": [1.0"),
        ("dense", "{\"nll\": [1.0], \"diagnostics\": []}"),
        ("scheme-0", "null"),
        ("scheme-1", "[1.0]"),
        ("scheme-2", ""),
    ] {
        world.write(&format!("made/parts/{name}.json"), broken);
        assert_eq!(first, world.succeeds(&["run", "run.toml", "--json", "--out", "made"]), "{name}: {broken}");
    }
}

#[test]
fn another_run_does_not_touch_the_folder() {
    let world = World::new(GQA);
    world.add_model("another", "llama-tied");
    world.write("run.toml", config(2));
    world.succeeds(&["run", "run.toml", "--out", "made"]);
    let before = world.snapshot();
    let fails = |file: &str, args: &[&str], part: &str| {
        let output = world.run(&[&["run", file, "--out", "made"], args].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("error: made: ") && error.contains(part), "{error}");
    };
    fails("run.toml", &["--seed", "1"], "another configuration");
    assert_eq!(before, world.snapshot());
    world.write("b.toml", config(3));
    fails("b.toml", &[], "another configuration");
    world.write("b.toml", config(2).replace("\"model\"", "\"another\""));
    fails("b.toml", &[], "another model");
    world.write("text.txt", common::text(2400, 4));
    fails("run.toml", &[], "another text");
    world.write("text.txt", common::text(2400, 1));
    std::fs::remove_file(world.path("b.toml")).unwrap();
    assert_eq!(before, world.snapshot());
    std::fs::create_dir(world.path("full")).unwrap();
    world.write("full/notes.txt", "mine");
    let output = world.run(&["run", "run.toml", "--out", "full"]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("not empty"));
    assert_eq!(world.list("full"), ["notes.txt"]);
}

#[test]
fn paths_of_a_configuration_are_relative_to_it() {
    let world = World::new(GQA);
    std::fs::create_dir(world.path("configs")).unwrap();
    let text = config(2)
        .replace("\"model\"", "\"../${HEADQ_TEST_MODEL}\"")
        .replace("other.txt", "../other.txt")
        .replace("calibration.txt", "../calibration.txt");
    world.write("configs/run.toml", text.replace("\"text.txt", "\"../text.txt"));
    let output =
        world.command(&["run", "configs/run.toml", "--json"]).env("HEADQ_TEST_MODEL", "model").output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(report["model"], "model");
    assert!(world.path("runs/tiny/report.json").exists());
}

#[cfg(unix)]
#[test]
fn readers_that_leave_early_and_full_disks_are_no_panics() {
    use std::process::Stdio;
    let world = World::new(GQA);
    for json in [&[][..], &["--json"]] {
        // The reading end is closed before anything is written.
        let mut child = world
            .command(&[&["inspect", "model"], json].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
        assert!(output.status.success());
    }
    let eval = ["eval", "model", "--text", "text.txt", "--context", "32", "--windows", "2", "--scheme", BASE];
    let mut child = world.command(&eval).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && !output.stdout.is_empty());
    if let Ok(full) = std::fs::File::options().write(true).open("/dev/full") {
        let output = world.command(&["inspect", "model"]).stdout(full).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(error.starts_with("error: standard output: ") && error.lines().count() == 1, "{error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn paths_need_not_be_unicode() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let world = World::new(GQA);
    let name = OsStr::from_bytes(b"t\xff.txt");
    std::fs::copy(world.path("text.txt"), world.path("").join(name)).unwrap();
    let folder = OsStr::from_bytes(b"m\xff");
    std::fs::rename(world.path("model"), world.path("").join(folder)).unwrap();
    for (before, after) in [
        (&["inspect"][..], &[][..]),
        (&["eval", "--text"], &["--context", "32", "--windows", "2", "--scheme", BASE]),
        (
            &["calibrate", "--text"],
            &["--context", "32", "--windows", "2", "--base", "kivi-2(g=8)", "--out", "s.safetensors"],
        ),
    ] {
        let mut command = world.command(before);
        if before.len() == 2 {
            command.arg(name);
        }
        let output = command.args(after).arg(folder).arg("--json").output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{error}");
        assert!(serde_json::from_slice::<Value>(&output.stdout).unwrap().is_object());
    }
}
