//! Diagnoses from configurations: `headq run` of one, `headq suite` of several.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use common::{DIAGNOSE, GQA, World, repository};
use headq_lab::diagnose::data::Diagnosis;
use serde_json::{Value, json};

/// A configuration of a diagnosis of random weights.
fn diagnosis(name: &str, model: &str) -> String {
    format!(
        r#"name = "{name}"
model = "{model}"

[diagnose]
text = "text.txt"
context = 64
windows = 4
links = ["metric", "null-space"]
base = "kivi-2(g=8,r=4)"
thresholds = {{ replicates = 50, min-rho = 0.9 }}
"#
    )
}

fn modified(world: &World) -> BTreeMap<PathBuf, SystemTime> {
    let parts = world.snapshot().into_keys().filter(|p| p.is_file() && p.to_string_lossy().contains("/parts/"));
    parts.map(|p| (p.clone(), std::fs::metadata(p).unwrap().modified().unwrap())).collect()
}

#[track_caller]
fn fails(world: &World, args: &[&str], needles: &[&str]) {
    let before = world.snapshot();
    let output = world.run(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{args:?}: {error}");
    assert!(error.starts_with("error: ") && error.lines().count() == 1, "{args:?}: {error}");
    needles.iter().for_each(|needle| assert!(error.contains(needle), "{needle:?} is not in: {error}"));
    assert!(before == world.snapshot(), "{args:?} changed files: {error}");
}

#[test]
fn a_configuration_says_what_the_command_line_says() {
    let world = World::new(GQA);
    world.write("run.toml", diagnosis("tiny", "model"));
    let printed = world.prints(&["run", "run.toml"]);
    assert_eq!(world.json("runs/tiny/diagnosis.json"), printed);
    let by_hand = world.prints(
        &[
            &DIAGNOSE[..],
            &["--context", "64", "--windows", "4", "--links", "metric,null-space", "--base", "kivi-2(g=8,r=4)"],
            &["--threshold", "replicates=50", "--threshold", "min-rho=0.9"],
        ]
        .concat(),
    );
    let but_for_its_place = |mut diagnosis: Value| {
        let fields = diagnosis.as_object_mut().unwrap();
        assert!(fields.remove("name").is_some() && fields.remove("command").is_some());
        diagnosis
    };
    assert_eq!(printed["command"], "headq run run.toml");
    assert_eq!(but_for_its_place(printed), but_for_its_place(by_hand));
    // The command line's seed comes before the configuration's, and makes it another run.
    let output = world.run(&["run", "run.toml", "--seed", "3"]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("runs/tiny: holds a run with another configuration"));
}

#[test]
fn a_run_calibrates_on_the_text_it_names() {
    let world = World::new(GQA);
    let calibrate = "[calibrate]\ntext = [\"other.txt\"]\ncontext = 32\nwindows = 3\n";
    world.write("run.toml", diagnosis("tiny", "model") + calibrate);
    let found: Diagnosis = serde_json::from_value(world.prints(&["run", "run.toml"])).unwrap();
    let calibration = &found.calibration;
    assert_eq!((calibration.windows, calibration.context, calibration.tokens), (3, 32, 96));
    assert_eq!((calibration.first_window, calibration.texts[0].path.to_str()), (0, Some("other.txt")));
    // By default, the windows after those that are measured.
    world.write("run.toml", diagnosis("later", "model"));
    let found: Diagnosis = serde_json::from_value(world.prints(&["run", "run.toml"])).unwrap();
    assert_eq!((found.calibration.first_window, found.calibration.windows), (4, 4));
}

#[test]
fn a_suite_runs_what_it_can_and_goes_on_where_it_stopped() {
    let world = World::new(GQA);
    for (name, model) in [("a", "model"), ("b", "absent"), ("c", "model")] {
        world.write(&format!("{name}.toml"), diagnosis(name, model));
    }
    let suite = ["suite", "a.toml", "b.toml", "c.toml", "--out", "made"];
    let output = world.run(&suite);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{error}");
    let last = error.lines().last().unwrap();
    assert!(error.contains("absent: no such file or folder") && last == "error: 1 of 3 runs failed: b", "{error}");
    let made = |name: &str| world.path(&format!("made/{name}/diagnosis.json")).exists();
    assert_eq!(["a", "b", "c"].map(made), [true, false, true]);
    assert!(!world.path("made/b").exists());

    let (before, first) = (modified(&world), world.read("made/a/diagnosis.json"));
    world.add_model("absent", "gpt2");
    let output = world.run(&[&suite[..], &["--json"]].concat());
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{progress}");
    let passes = progress.lines().filter(|l| l.contains(" windows in ")).count();
    assert_eq!(passes, 3, "calibration, settings and shifted keys of b: {progress}");
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed, json!({"runs": ["made/a", "made/b", "made/c"], "report": "made/report.html"}));
    let after = modified(&world);
    assert!(before.iter().all(|(path, time)| after[path] == *time), "finished passes are repeated");
    assert!(first == world.read("made/a/diagnosis.json") && made("b"));
}

#[test]
fn a_suite_is_checked_before_any_of_it_runs() {
    let world = World::new(GQA);
    world.write("a.toml", diagnosis("a", "model"));
    world.write("again.toml", diagnosis("a", "model"));
    world.write("bad.toml", diagnosis("bad", "model").replace("windows", "window"));
    let needles = ["config again.toml", "name 'a' is also that of a.toml"];
    fails(&world, &["suite", "a.toml", "again.toml", "--out", "made"], &needles);
    fails(&world, &["suite", "a.toml", "a.toml", "--out", "made"], &["config a.toml", "is also that of a.toml"]);
    fails(&world, &["suite", "a.toml", "bad.toml", "--out", "made"], &["config bad.toml", "line 7", "`window`"]);
    fails(&world, &["suite", "a.toml", "absent.toml", "--out", "made"], &["absent.toml", "No such file"]);
    assert_eq!(world.run(&["suite", "--out", "made"]).status.code(), Some(2));
    assert_eq!(world.run(&["suite", "a.toml"]).status.code(), Some(2));
}

#[test]
fn the_papers_configurations_lack_nothing_but_models_and_texts() {
    let world = World::new(GQA);
    let folder = repository("configs/paper");
    let mut configs: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().to_str().unwrap().to_owned())
        .filter(|path| path.ends_with(".toml"))
        .collect();
    configs.sort();
    assert_eq!(configs.len(), 9);
    for config in &configs {
        let run = |set: bool| {
            let mut command = world.command(&["run", config, "-q"]);
            for variable in ["HEADQ_MODELS", "HEADQ_TEXT"] {
                match set {
                    true => command.env(variable, "placeholder"),
                    false => command.env_remove(variable),
                };
            }
            let output = command.output().unwrap();
            assert_eq!(output.status.code(), Some(1), "{config}");
            String::from_utf8(output.stderr).unwrap()
        };
        let name = std::path::Path::new(config).file_stem().unwrap().to_str().unwrap();
        let set = run(true);
        assert!(set.starts_with(&format!("error: placeholder/{name}: no such file or folder")), "{set}");
        let unset = run(false);
        assert!(
            unset.contains(config) && unset.contains("environment variable HEADQ_MODELS, which is not set"),
            "{unset}"
        );
    }
    // As the suite that they are: names that differ, each named where it fails.
    let mut args = vec!["suite", "--out", "made", "-q"];
    args.extend(configs.iter().map(String::as_str));
    let output =
        world.command(&args).env("HEADQ_MODELS", "placeholder").env("HEADQ_TEXT", "placeholder").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("error: 9 of 9 runs failed: "), "{error}");
    assert!(!world.path("made").exists() && !world.path("runs").exists());
}
