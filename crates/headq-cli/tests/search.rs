//! `headq calibrate --gradients` and `headq search`: bits that are found fit the budget, are written down, and are read back.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{GQA, World};
use serde_json::Value;

const CALIBRATE: [&str; 13] = [
    "calibrate",
    "model",
    "--text",
    "calibration.txt",
    "--context",
    "48",
    "--windows",
    "4",
    "--base",
    "klt-2(g=8,r=8)",
    "--gradients",
    "--out",
    "stats.safetensors",
];

fn search<'a>(bits: &'a str, out: &'a str) -> Vec<&'a str> {
    let sizes = ["--group", "8", "--residual", "8", "--context", "48", "--windows", "1", "--skip", "4"];
    let asked = ["search", "model", "--stats", "stats.safetensors", "--text", "calibration.txt", "--bits", bits];
    [&asked[..], &sizes, &["--out", out]].concat()
}

fn eval<'a>(scheme: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let args = ["eval", "model", "--text", "other.txt", "--context", "48", "--windows", "2", "--scheme", scheme];
    [&args[..], &["--stats", "stats.safetensors"], more].concat()
}

fn world() -> World {
    let world = World::new(GQA);
    world.succeeds(&CALIBRATE);
    world
}

#[track_caller]
fn refused(world: &World, args: &[&str], needle: &str) {
    let before = world.snapshot();
    let output = world.run(&[args, &["--quiet"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((error.lines().count(), output.stdout.len()), (1, 0), "{error}");
    // 2 where the command line itself asks for what cannot be.
    assert!(matches!(output.status.code(), Some(1 | 2)), "{error}");
    assert!(error.contains(needle), "{needle:?} is not in: {error}");
    assert!(before == world.snapshot(), "{args:?} changed files");
}

#[test]
fn what_is_found_fits_the_budget_and_is_read_back() {
    let world = world();
    for (bits, more, has_values) in [("2.25", &[][..], true), ("1.5", &["--keys-only"], false)] {
        let args = [&search(bits, "scheme.json")[..], more].concat();
        world.succeeds(&args);
        let whole = world.read("scheme.json");
        let file: Value = serde_json::from_slice(&whole).unwrap();
        let mean = |name: &str| {
            let layers = file[name].as_array()?;
            let all: Vec<f64> =
                layers.iter().flat_map(|l| l.as_array().unwrap()).map(|b| b.as_f64().unwrap()).collect();
            Some(all.iter().sum::<f64>() / all.len() as f64)
        };
        let found = world.prints(&eval("scheme.json", &[]));
        let row = &found["schemes"][1];
        let (key, value) = (row["key_bits"].as_f64().unwrap(), row["value_bits"].as_f64().unwrap());
        let asked: f64 = bits.parse().unwrap();
        let spent = if has_values { (key + value) / 2.0 } else { key };
        // Bits of heads are written in thousandths, rounded up.
        assert!(spent <= asked + 2e-3 && spent > asked - 0.35, "{spent} of {asked}");
        assert_eq!(value == 16.0, !has_values);
        assert!((mean("key_bits").unwrap() - key).abs() < 2e-3, "{key}");
        // The best that was measured is what is kept.
        let steps = file["search"]["steps"].as_array().unwrap();
        let kl = |s: &Value| s["kl"].as_f64().unwrap();
        let best = steps.iter().map(kl).fold(f64::INFINITY, f64::min);
        assert_eq!(file["search"]["kl"].as_f64().unwrap(), best);
        assert!(steps.len() >= 3 && steps[0]["kept"] == true);
        // The same again, from the beginning.
        world.succeeds(&args);
        assert!(world.read("scheme.json") == whole, "searching again gives the same file");
        // Token by token it reads what the teacher-forced pass reads.
        let decoded = world.prints(&eval("scheme.json", &["--decode", "--cache-dtype", "f32"]));
        let ppl = |found: &Value| found["schemes"][1]["ppl"].as_f64().unwrap();
        assert!((ppl(&decoded) / ppl(&found) - 1.0).abs() < 1e-3, "{} {}", ppl(&decoded), ppl(&found));
    }
}

#[test]
fn searches_repeat_and_say_what_they_were_chosen_on() {
    let world = world();
    world.succeeds(&search("2", "whole.json"));
    let file: Value = serde_json::from_slice(&world.read("whole.json")).unwrap();
    // What an ended search of something else left behind is not taken up.
    world.write("again.json.partial", r#"{"identity": "other", "kl": {}}"#);
    world.succeeds(&search("2", "again.json"));
    assert!(world.read("whole.json") == world.read("again.json"));
    assert!(file["texts"][0]["path"] == "calibration.txt" && file["passages"].as_array().unwrap().len() == 1);
    // The windows that it was chosen on are not scored unawares.
    let args =
        ["eval", "model", "--text", "calibration.txt", "--context", "240", "--windows", "1", "--scheme", "whole.json"];
    let args = [&args[..], &["--stats", "stats.safetensors"]].concat();
    refused(&world, &args, "--allow-overlap");
}

#[test]
fn bad_requests_are_refused_in_one_line() {
    let world = world();
    refused(&world, &search("0.1", "scheme.json"), "--bits 0.1: expected a number from 0.25 to 8");
    refused(&world, &search("9", "scheme.json"), "--bits 9");
    refused(&world, &search("2", "scheme.toml"), "ends in .json");
    refused(&world, &search("2", "stats.safetensors"), "ends in .json");
    world.write("notes.json", "{\"mine\": 1}");
    refused(&world, &search("2", "notes.json"), "nothing is overwritten");
    refused(&world, &eval("notes.json", &[]), "expected a scheme file");
    refused(&world, &eval("missing.json", &[]), "missing.json");
    refused(&world, &eval("klt-2(pool=0123456789abcdef)", &[]), "stand in a scheme file");
    let plain: Vec<&str> = CALIBRATE.iter().copied().filter(|a| *a != "--gradients").collect();
    let plain: Vec<&str> =
        plain.iter().map(|a| if *a == "stats.safetensors" { "plain.safetensors" } else { a }).collect();
    world.succeeds(&plain);
    let with = |scheme| {
        let args = ["eval", "model", "--text", "other.txt", "--context", "48", "--windows", "2", "--scheme", scheme];
        [&args[..], &["--stats", "plain.safetensors"]].concat()
    };
    refused(&world, &with("klt-2(g=8,r=8,metric=fisher)"), "--gradients");
    refused(&world, &with("dense/klt-2(g=8,r=8)"), "--gradients");
    let short = [&CALIBRATE[..5], &["16"], &CALIBRATE[6..12], &["short.safetensors"]].concat();
    refused(&world, &short, "give a context of at least 20");
    // Damaged files.
    world.succeeds(&search("2", "scheme.json"));
    let text = String::from_utf8(world.read("scheme.json")).unwrap();
    for (from, to, needle) in [
        ("\"schema\": 1", "\"schema\": 9", "schema 9"),
        ("\"kind\": \"scheme\"", "\"kind\": \"song\"", "kind"),
        ("\"key_bits\": [", "\"key_bits\": [[99.0],", "key_bits"),
        ("pool=", "pool=f", "pool"),
        ("\"layers\": ", "\"layers\": 1", "expected"),
    ] {
        world.write("damaged.json", text.replacen(from, to, 1));
        refused(&world, &eval("damaged.json", &[]), needle);
    }
    world.write("damaged.json", &text[..text.len() / 2]);
    refused(&world, &eval("damaged.json", &[]), "not JSON");
}

/// Interrupted among the layers, a search keeps those that are measured, and ends as if it had not been.
#[cfg(unix)]
#[test]
fn interrupted_searches_go_on() {
    let world = world();
    let args = [&search("2", "scheme.json")[..], &["--threads", "1"]].concat();
    world.succeeds(&args);
    let whole = world.read("scheme.json");
    std::fs::remove_file(world.path("scheme.json")).unwrap();
    let layers = || -> usize {
        let Ok(bytes) = std::fs::read(world.path("scheme.json.partial")) else { return 0 };
        let kept: Value = serde_json::from_slice(&bytes).expect("written whole");
        kept["kl"].as_object().unwrap().keys().filter(|name| name.starts_with("layer ")).count()
    };
    let mut child = world.command(&args).stdout(std::process::Stdio::null()).spawn().unwrap();
    while layers() == 0 && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let _ = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    // Where the machine was too fast it has ended, and there is nothing to take up.
    if !child.wait().unwrap().success() {
        assert!(layers() > 0 && !world.path("scheme.json").exists());
        world.succeeds(&args);
    }
    assert!(whole == world.read("scheme.json"));
    assert!(!world.path("scheme.json.partial").exists());
}

#[test]
fn what_is_no_searchs_is_not_overwritten() {
    let world = world();
    world.write("scheme.json.partial", "{\"mine\": 1}");
    refused(&world, &search("2", "scheme.json"), "is not what a search left behind");
}

/// Values that are transformed take statistics whatever their keys are, in every command that evaluates schemes.
#[test]
fn transformed_values_are_evaluated_beside_any_keys() {
    let world = world();
    let values = ["dense/klt-2(g=8,r=8)", "dense/klt-2(g=8,r=8,metric=output)", "kivi-2(g=8,r=8)/klt-2(metric=output)"];
    let schemes: Vec<&str> = values.iter().flat_map(|scheme| ["--scheme", *scheme]).collect();
    let text = ["--text", "other.txt", "--context", "48", "--windows", "2"];
    let sweep = [&["sweep", "model", "--only-schemes"][..], &text, &schemes].concat();
    for (out, from) in
        [("given", ["--stats", "stats.safetensors"]), ("made", ["--calibration-text", "calibration.txt"])]
    {
        let found = world.prints(&[&sweep[..], &from, &["--out", out]].concat());
        assert_eq!(found["rows"].as_array().unwrap().len(), 3, "{out}: {}", found["left_out"]);
    }
    // In a run, alone, too.
    for (i, scheme) in values.iter().enumerate() {
        let config = format!(
            "name = \"values\"\nmodel = \"model\"\n[calibrate]\ntext = \"calibration.txt\"\ncontext = 48\nwindows = 4\n\
             [eval]\ntext = \"other.txt\"\ncontext = 48\nwindows = 2\nschemes = [\"{scheme}\"]\n"
        );
        world.write("values.toml", config);
        let found = world.prints(&["run", "values.toml", "--out", &format!("run-{i}")]);
        let row = &found["schemes"][1];
        assert!(row["value_bits"].as_f64().unwrap() < 6.1 && row["nll"].is_f64(), "{scheme}: {row}");
    }
}

#[test]
fn statistics_without_gradients_are_refused_by_name() {
    let world = World::new(GQA);
    world.succeeds(&[&CALIBRATE[..10], &CALIBRATE[11..]].concat());
    for more in [&[][..], &["--keys-only"]] {
        let args = [&search("2.25", "scheme.json")[..], more].concat();
        refused(&world, &args, "stats.safetensors: statistics of keys: they hold no gradients");
    }
}
