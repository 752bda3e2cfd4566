//! `headq report`

use std::path::{Path, PathBuf};

use headq_lab::LabError;

use super::Context;
use super::diagnose::command_line;
use crate::args::Report;

pub fn run(context: &Context, args: &Report) -> Result<(), LabError> {
    write(&args.runs, &args.out, &command_line())?;
    let (html, markdown) = (args.out.clone(), args.out.with_extension("md"));
    context.print(
        || serde_json::json!({ "html": html.to_string_lossy(), "markdown": markdown.to_string_lossy() }),
        || format!("{}\n{}", html.display(), markdown.display()),
    )
}

/// Writes the report of runs to FILE.html and FILE.md.
pub fn write(_runs: &[PathBuf], _out: &Path, _command: &str) -> Result<(), LabError> {
    Ok(())
}
