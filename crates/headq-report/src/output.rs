//! Reports as files. Nothing is overwritten but reports of this program.

use std::path::{Path, PathBuf};

use headq_lab::PROGRAM;
use headq_lab::artifact::write_atomic;

use crate::{ReportError, Run, html, markdown};

/// What the name of the program begins with, in every version.
const NAME: &str = "headq ";

/// Begins the element by which an HTML report is recognised.
const HTML_MARK: &str = r#"<meta name="generator" content=""#;

/// Begins the last line of a Markdown report, by which it is recognised.
const MARKDOWN_MARK: &str = "<!-- made by ";

/// The last line of a Markdown report.
pub(crate) fn markdown_mark() -> String {
    format!("{MARKDOWN_MARK}{PROGRAM} -->")
}

/// Whether a file is a report that this program wrote, in any of its versions, as HTML or as Markdown.
pub fn is_own_output(path: &Path) -> bool {
    // A link is not followed: what it points to was put there for another purpose.
    if !path.symlink_metadata().is_ok_and(|found| found.is_file()) {
        return false;
    }
    let Ok(bytes) = std::fs::read(path) else { return false };
    let text = String::from_utf8_lossy(&bytes);
    let head = text.split("</head>").next().unwrap_or_default();
    let html = text.starts_with("<!DOCTYPE html>") && head.contains(&format!("{HTML_MARK}{NAME}"));
    let last = text.trim_end().lines().next_back().unwrap_or_default();
    html || (last.starts_with(&format!("{MARKDOWN_MARK}{NAME}")) && last.ends_with("-->"))
}

/// The files that [`write()`] writes for FILE.html: itself, and FILE.md beside it.
fn files(out: &Path) -> [PathBuf; 2] {
    [out.to_owned(), out.with_extension("md")]
}

/// Fails early where [`write()`] would fail: before runs are loaded and reports are drawn.
///
/// # Errors
/// If the name does not end in `.html`, its folder does not exist, or FILE.html or FILE.md exists and is not a report of this
/// program.
pub fn check(out: &Path) -> Result<(), ReportError> {
    if out.extension().is_none_or(|extension| extension != "html") {
        return Err(ReportError::NotHtml(out.to_owned()));
    }
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return Err(ReportError::NoOutputFolder { path: out.to_owned(), folder: folder.to_owned() });
    }
    match files(out).into_iter().find(|file| file.symlink_metadata().is_ok() && !is_own_output(file)) {
        Some(foreign) => Err(ReportError::Foreign(foreign)),
        None => Ok(()),
    }
}

/// Writes the report of these runs to FILE.html and, beside it, to FILE.md; each is written whole or not at all. Returns both paths.
///
/// `command` is the command that makes the report.
///
/// # Errors
/// As [`check`], if there is no run, or if a file cannot be written.
pub fn write(runs: &[Run], out: &Path, command: &str) -> Result<[PathBuf; 2], ReportError> {
    if runs.is_empty() {
        return Err(ReportError::NoRuns);
    }
    check(out)?;
    let files = files(out);
    for (file, report) in files.iter().zip([html(runs, command), markdown(runs, command)]) {
        write_atomic(file, report.as_bytes())?;
    }
    Ok(files)
}
