//! `headq sweep`: fronts, numbers that agree with `headq eval`, interruption, bad input.
#![cfg(unix)]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{GQA, World, text};
use serde_json::Value;

/// Windows of 64 tokens; nothing needs statistics.
const PLAIN: [&str; 12] =
    ["sweep", "model", "--text", "text.txt", "--context", "64", "--windows", "4", "--residual", "8", "--out", "made"];

/// Two schemes alone.
const TWO: [&str; 5] = ["--only-schemes", "--scheme", "kivi-2(g=8,r=4)", "--scheme", "kivi-2(g=8,r=4)/token-2(c=8)"];

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn rows(sweep: &Value) -> &[Value] {
    sweep["rows"].as_array().unwrap()
}

fn schemes(sweep: &Value) -> Vec<&str> {
    rows(sweep).iter().map(|r| r["scheme"].as_str().unwrap()).collect()
}

/// Fails with this exit status and one line that has all of `needles`, and changes no file.
#[track_caller]
fn fails(world: &World, args: &[&str], status: i32, needles: &[&str]) {
    let before = world.snapshot();
    let output = world.run(&[args, &["--quiet"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), error.lines().count(), output.stdout.len()), (Some(status), 1, 0), "{error}");
    for needle in needles {
        assert!(error.contains(needle), "{needle:?} is not in: {error}");
    }
    assert!(before == world.snapshot(), "{args:?} changed files: {error}");
}

/// Replaces the value after a flag.
fn with<'a>(args: &[&'a str], flag: &str, value: &'a str) -> Vec<&'a str> {
    let mut args = args.to_vec();
    let at = args.iter().position(|a| *a == flag).unwrap();
    args[at + 1] = value;
    args
}

#[test]
fn every_family_is_swept_and_the_fronts_are_what_nothing_dominates() {
    let world = World::embedded();
    let args = [
        "sweep",
        "model",
        "--text",
        "text.txt",
        "--context",
        "256",
        "--windows",
        "3",
        "--calibration-text",
        "calibration.txt",
        "--calibration-windows",
        "4",
        "--residual",
        "32",
        "--bits",
        "2.25,3",
        "--out",
        "made",
        "--seed",
        "1",
    ];
    let sweep = world.prints(&args);
    assert_eq!(sweep, world.json("made/sweep.json"));
    let rows = rows(&sweep);
    let families: std::collections::BTreeSet<&str> = rows.iter().map(|r| r["family"].as_str().unwrap()).collect();
    for key in [
        "kivi",
        "kivi score-aware",
        "kivi+query-pca",
        "kivi+score-optimal",
        "token",
        "token+query-pca",
        "token+score-optimal",
        "grid",
        "grid score-aware",
        "rotated",
        "klt",
        "klt static",
    ] {
        for family in [key.to_string(), format!("{key}/token"), format!("{key}/a2")] {
            assert!(families.contains(family.as_str()), "{family} is missing in {families:?}");
        }
    }
    assert_eq!(sweep["left_out"].as_array().unwrap().len(), 0);
    let dense = number(&sweep["dense"]["ppl"]);
    for kv in ["k", "kv"] {
        let own: Vec<&Value> = rows.iter().filter(|r| r["kv"] == kv).collect();
        assert!(own.len() > 60);
        for (flag, cost) in [("front_ppl", "ppl"), ("front_kl", "kl")] {
            let point = |r: &Value| (number(&r["cache_bits"]), number(&r[cost]));
            let dominates = |a: (f64, f64), b: (f64, f64)| a.0 <= b.0 && a.1 <= b.1 && a != b;
            for row in &own {
                let dominated = own.iter().any(|other| dominates(point(other), point(row)));
                assert_eq!(row[flag], !dominated, "{} {flag}", row["scheme"]);
            }
            assert!(own.iter().any(|r| r[flag] == true));
        }
    }
    for row in rows {
        assert_eq!(row["kv"] == "kv", row["scheme"].as_str().unwrap().contains('/'));
        assert!((number(&row["excess"]) - (number(&row["ppl"]) / dense - 1.0)).abs() < 1e-9);
        let (own, reference) = (numbers(&row["window_nll"]), numbers(&sweep["dense"]["window_nll"]));
        let differences: Vec<f64> = own.iter().zip(&reference).map(|(a, b)| a - b).collect();
        let mean = differences.iter().sum::<f64>() / 3.0;
        let se = (differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / 6.0).sqrt();
        assert!((number(&row["excess_se"]) - mean.exp() * se).abs() < 1e-12);
        assert!(numbers(&row["window_kl"]).iter().all(|kl| *kl > 0.0 && kl.is_finite()), "{}", row["scheme"]);
    }
    // Four bits lose less than one, in every family of keys.
    for family in ["kivi", "token", "rotated", "klt", "klt static"] {
        let of = |most: bool| {
            let own = rows.iter().filter(|r| r["family"] == family);
            let bits = |r: &&Value| number(&r["key_bits"]);
            let row = if most {
                own.max_by(|a, b| bits(a).total_cmp(&bits(b)))
            } else {
                own.min_by(|a, b| bits(a).total_cmp(&bits(b)))
            };
            let row = row.unwrap();
            (number(&row["kl"]), number(&row["ppl"]))
        };
        assert!(of(true).0 < of(false).0 && of(true).1 < of(false).1, "{family}");
    }
    check_budgets(&sweep);
    let shown = world.succeeds(&[&args[..], &["--quiet"]].concat());
    for part in ["Keys only", "Keys and values", "The best of each family within a budget", "KL to dense", "ppl, KL"] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
    let markdown = String::from_utf8(world.read("made/report.md")).unwrap();
    for part in ["## Sweep", "klt-1.5", "Keys only, at most 2.25 code bits", "headq sweep model"] {
        assert!(markdown.contains(part), "{part} is not in the report");
    }
    let html = String::from_utf8(world.read("made/report.html")).unwrap();
    assert!(html.contains("Keys only: excess perplexity against cache bits of") && !html.contains("NaN"));
    let svg = String::from_utf8(world.read("made/front.svg")).unwrap();
    assert!(
        svg.starts_with("<svg ")
            && svg.ends_with("</svg>\n")
            && svg.contains("excess perplexity")
            && !svg.contains("NaN")
    );
}

/// The best of each family within a budget, from the rows.
fn check_budgets(sweep: &Value) {
    let bits = |r: &Value| match r["kv"].as_str().unwrap() {
        "k" => number(&r["key_bits"]),
        _ => (number(&r["key_bits"]) + number(&r["value_bits"])) / 2.0,
    };
    let budgets = sweep["budgets"].as_array().unwrap();
    for budget in [2.25, 3.0] {
        for kv in ["k", "kv"] {
            let within: Vec<&Value> = rows(sweep).iter().filter(|r| r["kv"] == kv && bits(r) <= budget).collect();
            let named: Vec<&Value> =
                budgets.iter().filter(|b| number(&b["budget"]) == budget && b["kv"] == kv).collect();
            let families: std::collections::BTreeSet<&str> =
                within.iter().map(|r| r["family"].as_str().unwrap()).collect();
            assert_eq!(named.len(), families.len());
            let least = within.iter().map(|r| number(&r["ppl"])).fold(f64::INFINITY, f64::min);
            let best = within.iter().find(|r| number(&r["ppl"]) == least).unwrap();
            for row in named {
                let own = within.iter().filter(|r| r["family"] == row["family"]).map(|r| number(&r["ppl"]));
                assert_eq!(number(&row["ppl"]), own.fold(f64::INFINITY, f64::min));
                let scheme = within.iter().find(|r| r["scheme"] == row["scheme"]).unwrap();
                let differences: Vec<f64> = numbers(&scheme["window_nll"])
                    .iter()
                    .zip(numbers(&best["window_nll"]))
                    .map(|(a, b)| a - b)
                    .collect();
                let mean = differences.iter().sum::<f64>() / 3.0;
                let se = (differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / 6.0).sqrt();
                assert_eq!(row["close"], number(&row["ppl"]) <= 1.003 * least || mean <= se, "{row}");
            }
        }
    }
}

#[test]
fn losses_and_bits_are_those_of_an_evaluation() {
    let world = World::new(GQA).calibrated();
    let names = ["kivi-2(g=8,r=4)+score-optimal(rank=2,bits=4)", "klt-1.5(g=8,r=4)/a2-2", "dense/token-2(g=8,r=4)"];
    let args: Vec<&str> = names.iter().flat_map(|s| ["--scheme", s]).collect();
    let stats = ["--stats", "stats.safetensors"];
    let sweep = world.prints(&[&PLAIN[..], &args, &["--only-schemes"], &stats].concat());
    let eval = ["eval", "model", "--text", "text.txt", "--context", "64", "--windows", "4", "--no-diagnostics"];
    let eval = world.prints(&[&eval[..], &args, &stats, &["--pass", "tensors"]].concat());
    let close = |a: &Value, b: &Value| assert!((number(a) - number(b)).abs() <= 1e-12 * number(b).abs(), "{a} {b}");
    close(&sweep["dense"]["ppl"], &eval["schemes"][0]["ppl"]);
    assert_eq!((sweep["tokens"].clone(), rows(&sweep).len()), (eval["tokens"].clone(), 3));
    for row in rows(&sweep) {
        let own = eval["schemes"].as_array().unwrap().iter().find(|s| s["scheme"] == row["scheme"]).unwrap();
        for field in ["ppl", "nll"] {
            close(&row[field], &own[field]);
        }
        for field in ["canonical", "key_bits", "value_bits", "cache_bits", "bytes_per_token"] {
            assert_eq!(row[field], own[field], "{}", row["scheme"]);
        }
    }
    assert_eq!(sweep["overlap"]["status"], "none");
    assert_eq!(sweep["artifacts"][0]["path"], "stats.safetensors");
}

#[test]
fn without_statistics_the_schemes_that_need_none_are_swept() {
    let world = World::new(GQA);
    let sweep = world.prints(&[&PLAIN[..], &["--kv", "k"]].concat());
    // Groups of 128 tokens do not end within 64.
    let swept = schemes(&sweep);
    assert!(swept.iter().all(|s| s.contains("(g=32,r=8,sinks=4") && !s.contains('/')), "{swept:?}");
    let families: std::collections::BTreeSet<&str> =
        rows(&sweep).iter().map(|r| r["family"].as_str().unwrap()).collect();
    assert_eq!(families.into_iter().collect::<Vec<_>>(), ["kivi", "rotated", "token"]);
    let why = |part: &str| {
        let out =
            sweep["left_out"].as_array().unwrap().iter().find(|l| l["scheme"].as_str().unwrap().starts_with(part));
        out.unwrap_or_else(|| panic!("{part} is not left out"))["reason"].as_str().unwrap().to_string()
    };
    assert!(why("klt-2(g=32").contains("needs statistics"));
    assert!(why("kivi-2(g=128").contains("read dense throughout; give a context of at least 141"));
    assert!(why("kivi-2(g=32,r=8,sinks=4)+").contains("needs a basis"));
    assert!(String::from_utf8(world.read("made/report.md")).unwrap().contains("Default schemes that were left out"));
}

#[test]
fn a_sweep_goes_on_where_it_stopped() {
    let world = World::new(GQA);
    world.write("long.txt", text(20_000, 7));
    let args = with(&with(&with(&PLAIN, "--text", "long.txt"), "--context", "128"), "--windows", "16");
    let args = [&args[..], &["--kv", "k", "--threads", "1", "--calibration-text", "calibration.txt"]].concat();
    let expected = world.succeeds(&[&args[..], &["--json"]].concat());
    let files = |name: &str| world.read(&format!("made/{name}"));
    let first = ["sweep.json", "front.svg", "report.md", "report.html"].map(files);
    let parts = world.list("made/parts");
    // A part less is one to do.
    for lost in [&parts[0], &parts[parts.len() / 2]] {
        std::fs::remove_file(world.path(&format!("made/parts/{lost}"))).unwrap();
        let output = world.run(&args);
        let notes = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && notes.contains(": 1 to evaluate, 16 passes"), "{notes}");
        assert!(["sweep.json", "front.svg", "report.md", "report.html"].map(files) == first);
    }
    // One that is damaged, too.
    world.write(&format!("made/parts/{}", parts[1]), "{");
    assert_eq!(world.succeeds(&[&args[..], &["--json"]].concat()), expected);
    std::fs::remove_dir_all(world.path("made")).unwrap();
    for count in [0, 1, 6] {
        let mut child = world.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let start = Instant::now();
        let done = || if world.path("made/parts").exists() { world.list("made/parts").len() } else { 0 };
        while !world.path("made/settings.json").exists() || done() < count {
            assert!(
                child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(60),
                "too short to interrupt"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        let status = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(status.success());
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{error}");
        assert!(error.contains("\nerror: interrupted") && !world.path("made/sweep.json").exists(), "{error}");
    }
    assert_eq!(world.succeeds(&[&args[..], &["--json"]].concat()), expected);
    assert!(["sweep.json", "front.svg", "report.md", "report.html"].map(files) == first);
}

#[test]
fn more_schemes_and_other_budgets_go_on_with_the_same_folder() {
    let world = World::new(GQA);
    let args = [&PLAIN[..], &TWO].concat();
    let two = world.prints(&args);
    let output = world.run(&[&args[..], &["--scheme", "token-3(g=8,r=4)", "--bits", "3,16"]].concat());
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && notes.contains("3 schemes (2 keys only, 1 keys and values)"), "{notes}");
    assert!(notes.contains(": 1 to evaluate, 4 passes over windows"), "{notes}");
    let three = world.json("made/sweep.json");
    let numbers_of =
        |sweep: &Value, name: &str| rows(sweep).iter().find(|r| r["scheme"] == name).unwrap()["window_kl"].clone();
    for name in [TWO[2], TWO[4]] {
        assert_eq!(numbers_of(&two, name), numbers_of(&three, name));
    }
    assert_eq!(three["budgets"].as_array().unwrap().len(), 3, "{:#}", three["budgets"]);
    // Text is looked at by what it holds.
    std::fs::create_dir(world.path("elsewhere")).unwrap();
    std::fs::rename(world.path("text.txt"), world.path("elsewhere/copy.txt")).unwrap();
    world.succeeds(&[&with(&PLAIN, "--text", "elsewhere/copy.txt")[..], &TWO, &["--quiet"]].concat());
}

#[test]
fn results_do_not_depend_on_the_threads() {
    let world = World::new(GQA);
    let of = |threads: &str| {
        let sweep = world.prints(&[&PLAIN[..], &TWO, &["--threads", threads]].concat());
        std::fs::remove_dir_all(world.path("made")).unwrap();
        sweep
    };
    assert_eq!(of("1"), of("2"));
}

#[test]
fn a_folder_of_other_settings_is_refused() {
    let world = World::new(GQA).calibrated();
    let stats = ["--stats", "stats.safetensors"];
    let args = [&PLAIN[..], &TWO, &stats].concat();
    world.succeeds(&[&args[..], &["--quiet"]].concat());
    let other = |what: &str| format!("made: holds a sweep with another {what}; give another --out");
    for (flag, value, what) in [
        ("--text", "other.txt", "text or tokenizer"),
        ("--context", "65", "context"),
        ("--windows", "5", "number of windows"),
    ] {
        fails(&world, &with(&args, flag, value), 1, &[&other(what)]);
    }
    fails(&world, &[&args[..], &["--seed", "7"]].concat(), 1, &[&other("seed")]);
    fails(&world, &[&args[..], &["--calibration-text", "calibration.txt"]].concat(), 1, &[&other("calibration text")]);
    fails(&world, &[&PLAIN[..], &TWO].concat(), 1, &[&other("statistics or basis file")]);
    // Other numbers in a file of the same name.
    world.succeeds(&"calibrate model --text calibration.txt --context 32 --windows 5 --base kivi-2(g=8) --out stats.safetensors -q".split(' ').collect::<Vec<_>>());
    fails(&world, &args, 1, &[&other("statistics or basis file")]);
    world.add_model("another", "llama-tied");
    fails(&world, &[&["sweep", "another"], &PLAIN[2..], &TWO].concat(), 1, &[&other("model")]);
    // A folder of something else, and of another kind of run.
    world.write("mine", "");
    fails(&world, &with(&args, "--out", "mine"), 1, &["mine"]);
    fails(&world, &with(&args, "--out", "model"), 1, &["model: is not empty and holds no sweep"]);
}

#[test]
fn what_cannot_be_swept_is_said_before_anything_runs() {
    let world = World::new(GQA).calibrated();
    let scheme = |s: &'static str| [&PLAIN[..], &["--only-schemes", "--scheme", s]].concat();
    fails(&world, &scheme("kivi-9"), 2, &["kivi-9", "expected"]);
    fails(&world, &scheme("kivi-2(g=8,r=4)+query-pca(rank=17,bits=4)"), 1, &["rank=17 exceeds the head width 16"]);
    fails(&world, &scheme("kivi-2(g=64,r=4)"), 2, &["windows of 64 tokens are read dense throughout", "at least 69"]);
    fails(&world, &scheme("klt-2(g=8,r=4)"), 2, &["klt-2(g=8,r=4)", "needs statistics", "--stats"]);
    let learned = "kivi-2(g=8,r=4)+learned(rank=2,bits=4)";
    fails(&world, &scheme(learned), 2, &[learned, "needs a basis"]);
    fails(&world, &[&scheme(learned)[..], &["--calibration-text", "calibration.txt"]].concat(), 2, &["needs a basis"]);
    let residual = "kivi-3(g=8,r=4)+score-optimal(rank=2,bits=4)";
    fails(
        &world,
        &[&scheme(residual)[..], &["--stats", "stats.safetensors"]].concat(),
        2,
        &["calibrate with --base 'kivi-3(g=8,r=4)'"],
    );
    // Of many, the last is looked at before the first is run.
    fails(
        &world,
        &[&PLAIN[..], &["--scheme", "kivi-2(g=8,r=4)", "--scheme", "klt-2(g=8,r=4)"]].concat(),
        2,
        &["klt-2"],
    );
    for (bits, needle) in [("0", "budget 0"), ("17", "budget 17"), ("nan", "budget NaN"), ("-1", "budget -1")] {
        fails(&world, &[&PLAIN[..], &TWO, &[&format!("--bits={bits}")]].concat(), 2, &[needle]);
    }
}

#[test]
fn sizes_that_leave_nothing_coded_leave_no_scheme() {
    let world = World::new(GQA);
    let needles = ["no scheme can be evaluated here", "read dense throughout"];
    fails(&world, &with(&PLAIN, "--residual", "100"), 2, &needles);
    let sinks = [&PLAIN[..], &["--sinks", "60"]].concat();
    fails(&world, &sinks, 2, &needles);
    fails(&world, &with(&PLAIN, "--text", "nowhere"), 1, &["nowhere"]);
    let lacking = [&PLAIN[..], &["--calibration-text", "nowhere"]].concat();
    fails(&world, &lacking, 1, &["nowhere"]);
    let broken = [&PLAIN[..], &["--stats", "text.txt"]].concat();
    fails(&world, &broken, 1, &["text.txt"]);
}

#[test]
fn text_that_was_calibrated_on_is_refused() {
    let world = World::new(GQA).calibrated();
    let own = ["--calibration-text", "text.txt"];
    fails(
        &world,
        &[&PLAIN[..], &TWO, &own].concat(),
        1,
        &["text text.txt: at least 256 of its 256 tokens", "--allow-overlap"],
    );
    let args = [&with(&PLAIN, "--text", "calibration.txt")[..], &TWO, &["--stats", "stats.safetensors"]].concat();
    fails(
        &world,
        &args,
        1,
        &["text calibration.txt: at least 128 of its 256 tokens (2 of 4 windows)", "stats.safetensors"],
    );
    let found = world.prints(&[&args[..], &["--allow-overlap"]].concat());
    assert_eq!(found["overlap"]["status"], "found");
    assert!(String::from_utf8(world.read("made/report.md")).unwrap().contains("Not held out:"));
}

#[test]
fn a_basis_that_no_scheme_uses_is_an_error() {
    let world = World::new(GQA).calibrated().with_basis();
    let args = [&PLAIN[..], &["--only-schemes", "--basis", "basis.safetensors", "--scheme"]].concat();
    fails(
        &world,
        &[&args[..], &["kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)", "--scheme", "nonsense"]].concat(),
        2,
        &["nonsense"],
    );
    let needles = ["basis.safetensors", "agrees with no scheme"];
    let rank = [&args[..], &["kivi-2(g=8,r=4)+query-pca(rank=3,bits=4)", "--stats", "stats.safetensors"]].concat();
    fails(&world, &rank, 1, &needles);
    let sweep = world.prints(&[&args[..], &["kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)"]].concat());
    assert_eq!(rows(&sweep).len(), 1);
}

#[test]
fn a_sweep_is_reported_beside_other_runs() {
    let world = World::new(GQA);
    world.succeeds(&[&PLAIN[..], &TWO, &["--quiet"]].concat());
    world.succeeds(&["report", "made", "--out", "again.html"]);
    let markdown = String::from_utf8(world.read("again.md")).unwrap();
    assert!(markdown.contains("## Sweep") && markdown.contains(TWO[4]), "{markdown}");
    world.write("run.toml", common::config(2));
    world.succeeds(&["run", "run.toml", "--out", "run", "--quiet"]);
    world.succeeds(&["report", "made", "run", "--out", "both.html"]);
    assert!(String::from_utf8(world.read("both.md")).unwrap().contains("2 runs side by side"));
}
