//! Errors of reports. Each is one line.

use std::path::PathBuf;

use headq_lab::LabError;

/// What can go wrong with a report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// No run was given.
    #[error("no run to report on; give the folder of at least one")]
    NoRuns,
    /// The folder of a run does not exist.
    #[error("{}: no such folder; give the folder that `headq diagnose` or `headq run` made", .0.display())]
    NoFolder(PathBuf),
    /// A file was given in place of its folder.
    #[error("{}: not a folder; give the folder of the run", .0.display())]
    NotAFolder(PathBuf),
    /// A folder without results.
    #[error(
        "{}: holds no diagnosis.json, report.json, comparison.json, sweep.json or finetuned.json; the run has not finished (start it again, it goes \
         on), or this is another folder",
        .0.display()
    )]
    NoResults(PathBuf),
    /// A file that cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that is not what its name says.
    #[error("{}: not {expected} that {} can read ({reason}); {advice}", path.display(), headq_lab::PROGRAM)]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
        /// What was found, and where.
        reason: String,
        /// What to do.
        advice: String,
    },
    /// A name that would not be an HTML file.
    #[error("{}: a report is an HTML file; give a name that ends in .html", .0.display())]
    NotHtml(PathBuf),
    /// The folder to write into does not exist.
    #[error("{}: the folder {} does not exist; make it first", path.display(), folder.display())]
    NoOutputFolder {
        /// The file that was asked for.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// A file that something else made.
    #[error("{}: exists and is no report of this program; nothing is overwritten, name another file", .0.display())]
    Foreign(PathBuf),
    /// A report could not be written.
    #[error(transparent)]
    Write(#[from] LabError),
}
