//! The folder of a run, loaded.

use std::path::{Path, PathBuf};

use headq_lab::compare::data::Comparison;
use headq_lab::diagnose::data::Diagnosis;
use headq_lab::evaluate::Evaluation;
use headq_lab::finetune::{METRICS, Measurement, SUMMARY, Summary};
use headq_lab::run::TRAINED;
use headq_lab::sweep::data::Sweep;
use serde::de::DeserializeOwned;

use crate::ReportError;

/// What a run left behind.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Name in the report: that of the diagnosis, or of the folder.
    pub name: String,
    /// `diagnosis.json`.
    pub diagnosis: Option<Diagnosis>,
    /// `report.json`.
    pub evaluation: Option<Evaluation>,
    /// `comparison.json`.
    pub comparison: Option<Comparison>,
    /// `sweep.json`.
    pub sweep: Option<Sweep>,
    /// Bases that the run trained, each in a folder of its own.
    pub finetunings: Vec<Finetuning>,
}

/// A basis that was trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Finetuning {
    /// How it went.
    pub summary: Summary,
    /// Every measurement, by layer.
    pub measurements: Vec<Measurement>,
}

/// Loads what the folder of a run holds: `diagnosis.json`, `report.json`, `comparison.json`, `sweep.json`, and what was trained; or the state
/// folder of one fine-tuning.
///
/// # Errors
/// If there is no such folder, it holds nothing of the kind, or one of the files cannot be read.
pub fn load(folder: &Path) -> Result<Run, ReportError> {
    if !folder.exists() {
        return Err(ReportError::NoFolder(folder.to_owned()));
    }
    if !folder.is_dir() {
        return Err(ReportError::NotAFolder(folder.to_owned()));
    }
    let diagnosis: Option<Diagnosis> = read(&folder.join("diagnosis.json"), "a diagnosis")?;
    let evaluation: Option<Evaluation> = read(&folder.join("report.json"), "an evaluation")?;
    let comparison: Option<Comparison> = read(&folder.join("comparison.json"), "a comparison")?;
    let sweep: Option<Sweep> = read(&folder.join(headq_lab::sweep::FILE), "a sweep")?;
    let mut finetunings = Vec::new();
    for folder in [folder.to_owned()].into_iter().chain(trained(folder)?) {
        finetunings.extend(finetuning(&folder)?);
    }
    if diagnosis.is_none() && evaluation.is_none() && comparison.is_none() && sweep.is_none() && finetunings.is_empty()
    {
        return Err(ReportError::NoResults(folder.to_owned()));
    }
    let name = match &diagnosis {
        Some(diagnosis) => diagnosis.name.clone(),
        None => folder_name(folder),
    };
    Ok(Run { name, diagnosis, evaluation, comparison, sweep, finetunings })
}

/// Folders of a run in which bases were trained, by name.
fn trained(folder: &Path) -> Result<Vec<PathBuf>, ReportError> {
    let fail = |source| ReportError::Io { path: folder.to_owned(), source };
    let entries = std::fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(fail)?;
    let named = |path: &PathBuf| path.is_dir() && folder_name(path).starts_with(TRAINED);
    let mut folders: Vec<PathBuf> = entries.iter().map(std::fs::DirEntry::path).filter(named).collect();
    folders.sort();
    Ok(folders)
}

/// The fine-tuning of a state folder; none where it has not come to its end.
fn finetuning(folder: &Path) -> Result<Option<Finetuning>, ReportError> {
    let Some(summary) = read(&folder.join(SUMMARY), "a fine-tuning")? else { return Ok(None) };
    let path = folder.join(METRICS);
    let text = std::fs::read_to_string(&path).map_err(|source| ReportError::Io { path: path.clone(), source })?;
    let measurements =
        text.lines().map(|line| parse(&path, line.as_bytes(), "measurements")).collect::<Result<_, _>>()?;
    Ok(Some(Finetuning { summary, measurements }))
}

/// Last part of a folder's path, also where it is given as `.` or ends in `..`.
fn folder_name(folder: &Path) -> String {
    let whole: PathBuf = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned()
}

/// The contents of a file of results, where there is one.
fn read<T: DeserializeOwned>(path: &Path, expected: &'static str) -> Result<Option<T>, ReportError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(ReportError::Io { path: path.to_owned(), source }),
    };
    parse(path, &bytes, expected).map(Some)
}

fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8], expected: &'static str) -> Result<T, ReportError> {
    serde_json::from_slice(bytes).map_err(|e| ReportError::Unreadable {
        path: path.to_owned(),
        expected,
        reason: e.to_string(),
        advice: advice(bytes),
    })
}

/// What to do about a file that cannot be read: it may have come from another version.
fn advice(bytes: &[u8]) -> String {
    let json: Option<serde_json::Value> = serde_json::from_slice(bytes).ok();
    let program = json.as_ref().and_then(|json| json["program"].as_str()).filter(|p| *p != headq_lab::PROGRAM);
    match program {
        Some(program) => format!("{program} wrote it: report with that version, or make the run again with this one"),
        None => "make the run again".to_string(),
    }
}
