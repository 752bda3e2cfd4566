//! Runs that are interrupted or killed go on to the same report.
#![cfg(unix)]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use common::{DIAGNOSE, GQA, World, config, text};

const RUN: &[&str] = &["run", "run.toml", "--out", "made", "--json", "--threads", "1"];

fn world() -> World {
    let world = World::new(GQA);
    world.write("text.txt", text(20_000, 4));
    world.write("other.txt", text(20_000, 5));
    world.write("calibration.txt", text(20_000, 6));
    world.write("run.toml", config(40).replace("context = 32", "context = 128"));
    world
}

fn start(world: &World) -> Child {
    world.command(RUN).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn signal(child: &Child, name: &str) {
    let status =
        std::process::Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Waits until the program has come so far, or has ended.
fn wait_for(child: &mut Child, far_enough: impl Fn() -> bool) -> Option<ExitStatus> {
    let start = Instant::now();
    while !far_enough() {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        assert!(start.elapsed() < Duration::from_secs(60), "nothing happens");
        std::thread::sleep(Duration::from_millis(2));
    }
    None
}

/// Every JSON and safetensors file in the run's folder is whole.
fn check_whole(world: &World) {
    let broken = |name: &str| match name.rsplit('.').next() {
        Some("json") => serde_json::from_slice::<serde_json::Value>(&world.read(name)).is_err(),
        Some("safetensors") => world.artifact(name).1.is_empty(),
        _ => false,
    };
    for folder in ["made", "made/parts"] {
        if world.path(folder).exists() {
            world
                .list(folder)
                .iter()
                .for_each(|n| assert!(!broken(&format!("{folder}/{n}")), "{folder}/{n} is broken"));
        }
    }
}

fn temporary(world: &World) -> Vec<String> {
    let all = ["made", "made/parts"].into_iter().filter(|f| world.path(f).exists()).flat_map(|f| world.list(f));
    all.filter(|n| n.ends_with(".tmp")).collect()
}

/// What an uninterrupted run prints, with its files gone again.
fn uninterrupted(world: &World) -> String {
    let report = world.succeeds(RUN);
    std::fs::remove_dir_all(world.path("made")).unwrap();
    report
}

#[test]
fn interrupted_runs_go_on() {
    let world = world();
    let expected = uninterrupted(&world);
    // During the calibration, during the dense pass, and during a scheme's pass.
    for file in ["made/parts", "made/stats-kivi-2_g8_r4.safetensors", "made/parts/dense.json"] {
        let mut child = start(&world);
        assert_eq!(wait_for(&mut child, || world.path(file).exists()), None, "the run is too short to interrupt");
        signal(&child, "INT");
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("\nerror: interrupted") && output.stdout.is_empty(), "{error}");
        check_whole(&world);
        assert_eq!(temporary(&world), [""; 0]);
        assert!(!world.path("made/report.json").exists());
    }
    assert_eq!(world.succeeds(RUN), expected);
    assert_eq!(world.list("made/parts").len(), 4);
}

#[test]
fn interrupted_diagnoses_go_on_link_by_link() {
    let world = world();
    let sizes = ["--context", "128", "--windows", "8", "--base", "kivi-2(g=8,r=4)", "--threshold", "replicates=50"];
    let args = [&DIAGNOSE[..], &sizes, &["--json", "--threads", "1"]].concat();
    let expected = world.succeeds(&args);
    std::fs::remove_dir_all(world.path("made")).unwrap();
    // During the calibration, and during the passes of the first link, the third, the fourth, the sixth and the last.
    for (file, done) in [
        ("run.json", 0),
        ("stats-calibration.safetensors", 0),
        ("parts/settings.json", 0),
        ("parts/null-space.json", 2),
        ("stats-measured.safetensors", 3),
        ("parts/route-flips.json", 4),
    ] {
        let file = format!("made/{file}");
        let mut child = world.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        assert_eq!(wait_for(&mut child, || world.path(&file).exists()), None, "the run is too short to interrupt");
        signal(&child, "INT");
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("\nerror: interrupted") && output.stdout.is_empty(), "{error}");
        // Links that were finished before are not measured again.
        assert!((1..=done).all(|link| !error.contains(&format!("{link}/7 "))), "{error}");
        check_whole(&world);
        assert_eq!(temporary(&world), [""; 0]);
        assert!(!world.path("made/diagnosis.json").exists());
    }
    assert_eq!(world.succeeds(&args), expected);
}

#[test]
fn an_interrupted_suite_ends_and_goes_on() {
    let world = world();
    for name in ["a", "b"] {
        let links = r#"links = ["metric", "null-space"]"#;
        let sizes = "context = 128\nwindows = 8\nbase = \"kivi-2(g=8,r=4)\"";
        let text = format!("name = \"{name}\"\nmodel = \"model\"\n[diagnose]\ntext = \"text.txt\"\n{sizes}\n{links}\n");
        world.write(&format!("{name}.toml"), text);
    }
    let suite = ["suite", "a.toml", "b.toml", "--out", "made", "--threads", "1"];
    let mut child = world.command(&suite).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    assert_eq!(wait_for(&mut child, || world.path("made/a/parts/settings.json").exists()), None);
    signal(&child, "INT");
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("\nerror: interrupted"), "{error}");
    assert!(!world.path("made/a/diagnosis.json").exists() && !world.path("made/b").exists(), "others are not begun");
    let output = world.run(&suite);
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{progress}");
    assert_eq!(progress.matches("1/7 metric: ").count(), 1, "a's settings are measured again: {progress}");
    assert!(["a", "b"].iter().all(|name| world.path(&format!("made/{name}/diagnosis.json")).exists()));
}

#[test]
fn killed_runs_go_on() {
    let world = world();
    let expected = uninterrupted(&world);
    let mut kills = 0;
    for delay in (0..).map(|i| Duration::from_millis(20 + 100 * i)) {
        let mut child = start(&world);
        let begun = Instant::now();
        let ended = wait_for(&mut child, || begun.elapsed() >= delay);
        if let Some(status) = ended {
            assert!(status.success());
            let output = child.wait_with_output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "after {kills} kills");
            break;
        }
        signal(&child, "KILL");
        child.wait().unwrap();
        kills += 1;
        check_whole(&world);
    }
    assert!(kills >= 3, "the run is too short to kill");
    assert_eq!(temporary(&world), [""; 0]);
}

#[test]
fn leftovers_of_a_killed_run_are_cleared_away() {
    let world = World::new(GQA);
    world.write("run.toml", config(2));
    // Killed before it had written what it is.
    std::fs::create_dir(world.path("made")).unwrap();
    world.write("made/.headq-abcdef.tmp", "half");
    world.succeeds(RUN);
    world.write("made/parts/.headq-abcdef.tmp", "half");
    world.succeeds(RUN);
    assert_eq!(temporary(&world), [""; 0]);
}

#[test]
fn one_run_at_a_time() {
    let world = world();
    let mut child = start(&world);
    assert_eq!(wait_for(&mut child, || world.path("made/parts").exists()), None);
    let output = world.run(RUN);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("error: made: another headq is at work"), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
    world.succeeds(RUN);
}

#[test]
fn interrupted_commands_write_nothing() {
    let world = world();
    let text =
        ["model", "--text", "text.txt", "--context", "128", "--windows", "150", "--threads", "1", "--out", "out"];
    for command in [&["calibrate"][..], &["eval", "--scheme", "kivi-2(g=8,r=4)/token-2(c=8)"]] {
        let mut child =
            world.command(&[command, &text].concat()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        assert_eq!(wait_for(&mut child, || after(Duration::from_millis(150))), None);
        signal(&child, "TERM");
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(1) && error.contains("error: interrupted") && output.stdout.is_empty(),
            "{error}"
        );
        assert_eq!(world.list("."), ["calibration.txt", "model", "other.txt", "run.toml", "text.txt"]);
    }
}

/// Sleeps, then says that it is time.
fn after(delay: Duration) -> bool {
    std::thread::sleep(delay);
    true
}
