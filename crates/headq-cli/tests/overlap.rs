//! Text that was calibrated on is not scored unawares, wherever in a file it stands.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{BASE, DIAGNOSE, GQA, SMALL, World, config};
use serde_json::{Value, json};

const SCHEME: &str = "kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)";

/// `headq eval` of a text in windows of 32 with the statistics of `calibration.txt`, whose first 128 tokens were calibrated on.
fn eval<'a>(text: &'a str, windows: &'a str) -> Vec<&'a str> {
    let args = ["eval", "model", "--text", text, "--context", "32", "--windows", windows, "--scheme", SCHEME];
    [&args[..], &["--stats", "stats.safetensors"]].concat()
}

/// Fails with exit status 1 and one line that has all of `needles`, and changes no file.
#[track_caller]
fn refused(world: &World, args: &[&str], needles: &[&str]) {
    let before = world.snapshot();
    let output = world.run(&[args, &["--quiet"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), error.lines().count(), output.stdout.len()), (Some(1), 1, 0), "{error}");
    for needle in [&["--allow-overlap"], needles].concat() {
        assert!(error.contains(needle), "{needle:?} is not in: {error}");
    }
    assert!(before == world.snapshot(), "{args:?} changed files");
}

/// The words of a text, without its line ends.
fn words(world: &World, name: &str) -> Vec<String> {
    String::from_utf8(world.read(name)).unwrap().split_whitespace().map(str::to_owned).collect()
}

#[test]
fn shared_text_is_found_at_any_offset_and_with_any_line_ends() {
    let world = World::new(GQA).calibrated();
    let calibrated = words(&world, "calibration.txt");
    refused(
        &world,
        &eval("calibration.txt", "8"),
        &["at least 128 of its 256 tokens (4 of 8 windows)", "stats.safetensors"],
    );
    for (from, to, count) in [(0, 37, 128), (1, 0, 127), (1, 129, 127), (0, 100, 127), (0, 64, 64)] {
        let mut other = words(&world, "other.txt");
        other.splice(to..to + count, calibrated[from..from + count].iter().cloned());
        world.write("mixed.txt", other.join("\r\n"));
        refused(
            &world,
            &eval("mixed.txt", "8"),
            &["text mixed.txt: at least ", "are in calibration.txt, which stats.safetensors"],
        );
    }
    // What was not calibrated on is new, in the same file too; and 63 tokens are no passage.
    for (name, text) in [("later.txt", calibrated[128..].join(" ")), ("short.txt", calibrated[..63].join("\n"))] {
        let rest = words(&world, "other.txt").join(" ");
        world.write(name, format!("{text} {rest}"));
        let found = world.prints(&eval(name, "8"));
        assert_eq!(found["overlap"], json!({"status": "none", "found": [], "unknown": []}), "{name}");
    }
}

#[test]
fn what_is_allowed_is_reported() {
    let world = World::new(GQA).calibrated();
    let args = [&eval("calibration.txt", "8")[..], &["--allow-overlap"]].concat();
    let found = world.prints(&args);
    let one = json!({
        "artifact": "stats.safetensors", "made_from": "calibration.txt", "text": "calibration.txt",
        "tokens": 128, "of_tokens": 256, "windows": 4, "of_windows": 8,
    });
    assert_eq!(found["overlap"], json!({"status": "found", "found": [one], "unknown": []}));
    let shown = world.succeeds(&args);
    assert!(
        shown.contains("OVERLAP: text calibration.txt: at least 128 of its 256 tokens (4 of 8 windows)"),
        "{shown}"
    );
    assert!(!world.succeeds(&eval("text.txt", "8")).contains("OVERLAP"));
}

#[test]
fn every_artifact_of_the_text_knows_it() {
    let world = World::new(GQA).calibrated().with_basis();
    let scheme = ["--scheme", SCHEME, "--basis", "basis.safetensors"];
    let text = |name| ["model", "--text", name, "--context", "32", "--windows", "2"];
    refused(
        &world,
        &[&["eval"], &text("calibration.txt")[..], &scheme].concat(),
        &["which basis.safetensors was made from"],
    );
    refused(
        &world,
        &[&["compare"], &text("calibration.txt")[..], &scheme].concat(),
        &["which basis.safetensors was made from"],
    );
    // Trained on other text, from those statistics.
    let learned = "kivi-2(g=8,r=4)+learned(rank=2,bits=3)";
    let train = [
        "--context",
        "64",
        "--windows",
        "3",
        "--held-out",
        "1",
        "--steps",
        "2",
        "--stats",
        "stats.safetensors",
        "--quiet",
    ];
    let train =
        [&["finetune", "model", "--text", "other.txt", "--scheme", learned, "--out", "learned"], &train[..]].concat();
    world.succeeds(&train);
    let scheme = ["--scheme", learned, "--basis", "learned"];
    for (name, from) in [("calibration.txt", "calibration.txt"), ("other.txt", "other.txt")] {
        refused(&world, &[&["eval"], &text(name)[..], &scheme].concat(), &[from, "which learned was made from"]);
    }
    assert_eq!(world.prints(&[&["eval"], &text("text.txt")[..], &scheme].concat())["overlap"]["status"], "none");
}

#[test]
fn artifacts_of_older_versions_are_unknown() {
    let world = World::new(GQA).calibrated();
    let (tensors, header) = world.artifact("stats.safetensors");
    let mut header: Value = serde_json::from_str(&header).unwrap();
    let passages = header.as_object_mut().unwrap().remove("passages").unwrap();
    world.write_tensors("old", &tensors, Some(&header.to_string()));
    let args = |text| {
        let mut args = eval(text, "2");
        *args.last_mut().unwrap() = "old";
        args
    };
    for (text, same) in [("text.txt", Value::Null), ("calibration.txt", json!("calibration.txt"))] {
        let output = world.run(&[&args(text)[..], &["--json"]].concat());
        let warning = String::from_utf8(output.stderr).unwrap();
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let unknown = json!({"artifact": "old", "made_from": "calibration.txt", "same_text": same});
        assert_eq!(found["overlap"], json!({"status": "unknown", "found": [], "unknown": [unknown]}));
        assert!(warning.contains("old does not say which passages of calibration.txt"), "{warning}");
    }
    // What a file says in vain is said of the file.
    for (key, value) in [("length", json!(0)), ("length", json!(65)), ("hashes", json!("0123"))] {
        let mut broken = passages.clone();
        broken[0][key] = value;
        header["passages"] = broken;
        world.write_tensors("old", &tensors, Some(&header.to_string()));
        let output = world.run(&[&args("text.txt")[..], &["--quiet"]].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(1) && error.starts_with("error: old: ") && error.lines().count() == 1,
            "{error}"
        );
    }
}

#[test]
fn runs_are_refused_before_they_begin() {
    let world = World::new(GQA);
    let same = config(4).replace("text = \"calibration.txt\"", "text = \"other.txt\"");
    world.write("run.toml", &same);
    let needles = ["text other.txt: at least 128 of its 128 tokens", "which what [calibrate] finds was made from"];
    refused(&world, &["run", "run.toml", "--out", "made"], &needles);
    let report = world.prints(&["run", "run.toml", "--out", "made", "--allow-overlap"]);
    assert_eq!(report["overlap"]["found"][0]["artifact"], "made/stats-kivi-2_g8_r4.safetensors");
    assert!(String::from_utf8(world.read("made/report.md")).unwrap().contains("Not held out:"));
    // The configuration may say the same; it goes on with the same run.
    world.write("run.toml", format!("allow_overlap = true\n{same}"));
    assert_eq!(world.prints(&["run", "run.toml", "--out", "made"]), report);
    let diagnosis = [&DIAGNOSE[..], &SMALL, &["--links", "null-space"]].concat();
    std::fs::remove_dir_all(world.path("made")).unwrap();
    let own = ["--calibration-text", "text.txt"];
    refused(
        &world,
        &[&diagnosis[..], &own].concat(),
        &["text text.txt", "(4 of 4 windows) are in text.txt, which the calibration"],
    );
    let found = world.prints(&[&diagnosis[..], &own, &["--allow-overlap"]].concat());
    assert_eq!(found["overlap"]["status"], "found");
    assert!(String::from_utf8(world.read("made/report.md")).unwrap().contains("Not held out:"));
}

#[test]
fn text_that_is_held_out_and_was_calibrated_on_is_warned_of() {
    let world = World::new(GQA).calibrated();
    let learned = "kivi-2(g=8,r=4)+learned(rank=2,bits=3)";
    let train = |text, out| {
        let args =
            ["--context", "32", "--windows", "2", "--held-out", "2", "--steps", "2", "--stats", "stats.safetensors"];
        let args = [&["finetune", "model", "--text", text, "--scheme", learned, "--out", out], &args[..]].concat();
        String::from_utf8(world.run(&args).stderr).unwrap()
    };
    let warning = train("calibration.txt", "a");
    assert!(warning.contains("held out is not new: text calibration.txt: at least 64 of its 64 tokens"), "{warning}");
    assert!(!train("other.txt", "b").contains("held out is not new"));
}

#[test]
fn windows_that_begin_with_a_token_of_their_own_share_what_follows_it() {
    let world = World::new(GQA);
    let windows = ["--context", "32", "--windows", "4"];
    let calibrate = ["calibrate", "model", "--text", "calibration.txt", "--add-bos", "--out", "stats", "--quiet"];
    world.succeeds(&[&calibrate[..], &windows, &["--base", "kivi-2(g=8)"]].concat());
    let eval = ["eval", "model", "--text", "calibration.txt", "--scheme", SCHEME, "--stats", "stats"];
    // 4 · 31 tokens were calibrated on.
    refused(&world, &[&eval[..], &windows].concat(), &["at least 124 of its 128 tokens (4 of 4 windows)"]);
    refused(
        &world,
        &[&eval[..], &windows, &["--add-bos"]].concat(),
        &["at least 124 of its 124 tokens (4 of 4 windows)"],
    );
}

#[test]
fn the_texts_of_the_embedded_model_share_nothing() {
    let world = World::embedded();
    let calibrate =
        ["calibrate", "model", "--text", "calibration.txt", "--context", "256", "--windows", "32", "--quiet"];
    world.succeeds(&[&calibrate[..], &["--out", "stats"]].concat());
    let eval = ["eval", "model", "--text", "text.txt", "--context", "256", "--windows", "32", "--no-diagnostics"];
    let found = world.prints(&[&eval[..], &["--scheme", BASE, "--stats", "stats"]].concat());
    assert_eq!(found["overlap"]["status"], "none");
}
