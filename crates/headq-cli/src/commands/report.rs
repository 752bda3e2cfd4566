//! `headq report`

use std::path::{Path, PathBuf};

use headq_lab::LabError;
use headq_report::ReportError;

use super::Context;
use super::diagnose::command_line;
use crate::args::Report;

pub fn run(context: &Context, args: &Report) -> Result<(), LabError> {
    check(&args.out)?;
    write(&args.runs, &args.out, &command_line())?;
    let (html, markdown) = (args.out.clone(), args.out.with_extension("md"));
    context.print(
        || serde_json::json!({ "html": html.to_string_lossy(), "markdown": markdown.to_string_lossy() }),
        || format!("{}\n{}", html.display(), markdown.display()),
    )
}

/// Fails early where a report could not be written.
pub fn check(out: &Path) -> Result<(), LabError> {
    headq_report::check(out).map_err(failed)
}

/// Writes the report of runs to FILE.html and FILE.md.
pub fn write(runs: &[PathBuf], out: &Path, command: &str) -> Result<(), LabError> {
    let loaded = runs.iter().map(|folder| headq_report::load(folder)).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    headq_report::write(&loaded, out, command).map_err(failed)?;
    Ok(())
}

/// A report's error as one of the program's, with its exit status.
fn failed(error: ReportError) -> LabError {
    match error {
        ReportError::Write(error) => error,
        ReportError::NoRuns | ReportError::NotHtml(_) => LabError::Usage(error.to_string()),
        other => LabError::Report(other.to_string()),
    }
}
