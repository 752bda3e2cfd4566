//! Runs that are loaded and reports that are written: every failure is one clear line, and nothing foreign is lost.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs;
use std::path::Path;

use common::*;
use headq_report::{Finetuning, ReportError, Run, check, is_own_output, load, write};

const COMMAND: &str = "headq report runs/usual --out usual.html";

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn put(folder: &Path, run: &Run) {
    if let Some(diagnosis) = &run.diagnosis {
        fs::write(folder.join("diagnosis.json"), serde_json::to_vec_pretty(diagnosis).unwrap()).unwrap();
    }
    if let Some(evaluation) = &run.evaluation {
        fs::write(folder.join("report.json"), serde_json::to_vec_pretty(evaluation).unwrap()).unwrap();
    }
}

/// What a fine-tuning leaves in its folder.
fn put_finetuning(folder: &Path, finetuning: &Finetuning) {
    fs::create_dir_all(folder).unwrap();
    let lines: Vec<String> = finetuning.measurements.iter().map(|m| serde_json::to_string(m).unwrap() + "\n").collect();
    fs::write(folder.join("metrics.jsonl"), lines.concat()).unwrap();
    fs::write(folder.join("finetuned.json"), serde_json::to_vec_pretty(&finetuning.summary).unwrap()).unwrap();
}

#[test]
fn what_was_trained_is_loaded_from_a_run_and_from_a_state_folder() {
    let (run, state) = (folder(), folder());
    let (one, other) = (finetuning(3, &|v| v), finetuning(2, &|v| 2.0 * v));
    put(run.path(), &evaluated());
    put_finetuning(&run.path().join("finetune-b"), &other);
    put_finetuning(&run.path().join("finetune-a"), &one);
    // One that goes on, and folders of something else.
    fs::create_dir_all(run.path().join("finetune-c")).unwrap();
    fs::create_dir_all(run.path().join("parts")).unwrap();
    let loaded = load(run.path()).unwrap();
    assert_eq!((loaded.finetunings, loaded.evaluation), (vec![one.clone(), other], evaluated().evaluation));
    put_finetuning(state.path(), &one);
    let loaded = load(state.path()).unwrap();
    assert_eq!(loaded.finetunings, [one]);
    let metrics = state.path().join("metrics.jsonl");
    fs::write(&metrics, "{\"layer\": 0}\n").unwrap();
    message(load(state.path()), &metrics, &["not measurements", "make the run again"]);
    fs::remove_file(&metrics).unwrap();
    assert!(matches!(load(state.path()), Err(ReportError::Io { .. })));
}

/// The message of an error, which is one line that names the path and says what to do.
fn message<T: std::fmt::Debug>(result: Result<T, ReportError>, path: &Path, parts: &[&str]) {
    let message = result.unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    assert!(message.contains(&path.display().to_string()), "{message}");
    for part in parts {
        assert!(message.contains(part), "'{part}' in {message}");
    }
}

#[test]
fn what_a_run_wrote_is_loaded() {
    let (with_both, evaluated_only) = (folder(), folder());
    let both = Run { evaluation: Some(evaluation(SMALL)), ..diagnosed("usual", SMALL) };
    put(with_both.path(), &both);
    assert_eq!(load(with_both.path()).unwrap(), both);
    put(evaluated_only.path(), &evaluated());
    let loaded = load(evaluated_only.path()).unwrap();
    assert_eq!((loaded.diagnosis, loaded.evaluation), (None, evaluated().evaluation));
    assert_eq!(loaded.name, evaluated_only.path().file_name().unwrap().to_string_lossy());
}

#[test]
fn a_file_of_another_version_is_loaded_if_it_can_be_read() {
    let folder = folder();
    let mut run = diagnosed("usual", SMALL);
    run.diagnosis.as_mut().unwrap().program = "headq 99.0.0".into();
    put(folder.path(), &run);
    assert_eq!(load(folder.path()).unwrap(), run);
    let json = fs::read_to_string(folder.path().join("diagnosis.json")).unwrap();
    fs::write(folder.path().join("diagnosis.json"), json.replacen("\"seed\"", "\"unheard_of\"", 1)).unwrap();
    message(load(folder.path()), &folder.path().join("diagnosis.json"), &["unheard_of", "headq 99.0.0 wrote it"]);
}

#[test]
fn folders_that_hold_no_run() {
    let folder = folder();
    let missing = folder.path().join("missing");
    message(load(&missing), &missing, &["no such folder", "headq diagnose"]);
    message(
        load(folder.path()),
        folder.path(),
        &["no diagnosis.json, report.json, comparison.json, sweep.json or finetuned.json"],
    );
    let file = folder.path().join("diagnosis.json");
    fs::write(&file, "{").unwrap();
    message(load(&file), &file, &["not a folder"]);
    message(load(folder.path()), &file, &["not a diagnosis", "line 1", "make the run again"]);
    fs::write(&file, "[1, 2]").unwrap();
    message(load(folder.path()), &file, &["not a diagnosis"]);
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert!(matches!(load(folder.path()), Err(ReportError::Io { .. })));
    let evaluation = folder.path().join("report.json");
    fs::remove_dir(&file).unwrap();
    fs::write(&evaluation, "null").unwrap();
    message(load(folder.path()), &evaluation, &["not an evaluation"]);
}

#[test]
fn both_files_are_written_and_replaced() {
    let folder = folder();
    let out = folder.path().join("usual.html");
    let runs = [diagnosed("usual", SMALL)];
    let written = write(&runs, &out, COMMAND).unwrap();
    assert_eq!(written, [out.clone(), folder.path().join("usual.md")]);
    assert!(written.iter().all(|file| is_own_output(file)));
    let first = fs::read(&out).unwrap();
    write(&[evaluated()], &out, COMMAND).unwrap();
    assert_ne!(fs::read(&out).unwrap(), first);
    write(&runs, &out, COMMAND).unwrap();
    assert_eq!(fs::read(&out).unwrap(), first);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left behind");
}

#[test]
fn foreign_files_are_kept() {
    for (foreign, content) in [
        ("usual.html", "<!DOCTYPE html><html><head><title>mine</title></head></html>"),
        ("usual.html", "<!DOCTYPE html><html><head></head><meta name=\"generator\" content=\"headq 0.1.0\"></html>"),
        ("usual.html", ""),
        ("usual.md", "# Notes\n\n<!-- made by hand -->\n"),
        ("usual.md", "<!-- made by headq 0.1.0 -->\n\nand continued by me\n"),
        ("usual.md", "{\"program\": \"headq 0.1.0\"}"),
    ] {
        let folder = folder();
        let (out, foreign) = (folder.path().join("usual.html"), folder.path().join(foreign));
        fs::write(&foreign, content).unwrap();
        assert!(!is_own_output(&foreign));
        message(write(&[evaluated()], &out, COMMAND), &foreign, &["nothing is overwritten"]);
        assert_eq!(fs::read_to_string(&foreign).unwrap(), content);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "neither file is written");
    }
}

#[cfg(unix)]
#[test]
fn links_and_folders_are_kept() {
    let folder = folder();
    let out = folder.path().join("usual.html");
    write(&[evaluated()], &out, COMMAND).unwrap();
    let link = folder.path().join("link.html");
    std::os::unix::fs::symlink(&out, &link).unwrap();
    message(write(&[evaluated()], &link, COMMAND), &link, &["nothing is overwritten"]);
    fs::create_dir(folder.path().join("folder.html")).unwrap();
    let named = folder.path().join("folder.html");
    message(write(&[evaluated()], &named, COMMAND), &named, &["nothing is overwritten"]);
}

#[test]
fn places_where_no_report_can_be_written() {
    let folder = folder();
    for name in ["usual.htm", "usual", "usual.md", ".html"] {
        let out = folder.path().join(name);
        message(check(&out), &out, &["ends in .html"]);
        message(write(&[evaluated()], &out, COMMAND), &out, &["ends in .html"]);
    }
    let out = folder.path().join("missing/usual.html");
    message(check(&out), &out, &["does not exist", "make it first"]);
    let out = folder.path().join("usual.html");
    assert!(matches!(write(&[], &out, COMMAND), Err(ReportError::NoRuns)));
    assert!(check(&out).is_ok() && !out.exists());
}
