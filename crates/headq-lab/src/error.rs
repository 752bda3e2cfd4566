//! Errors of calibration, evaluation and artifacts. Each is one line.

use std::path::{Path, PathBuf};

use headq_hub::HubError;
use headq_models::ModelError;

/// What can go wrong in an experiment.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A model of the hub.
    #[error(transparent)]
    Hub(HubError),
    /// A scheme or basis.
    #[error(transparent)]
    Method(#[from] headq::Error),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that was given could not be read.
    #[error("{}: {source}; {expected}", path.display())]
    Input {
        /// The file as given.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
        /// What it should be, and where such a file comes from.
        expected: &'static str,
    },
    /// A text that cannot be used.
    #[error("text {}: {reason}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// Text is scored that was calibrated on.
    #[error("{0}")]
    Overlap(String),
    /// An artifact that cannot be read, or does not belong here.
    #[error("{}: {reason}", path.display())]
    Artifact {
        /// The file.
        path: PathBuf,
        /// What was expected, what was found, what to do.
        reason: String,
    },
    /// A run's configuration.
    #[error("config {}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key, what was expected and what was found.
        reason: String,
    },
    /// A request that cannot be carried out.
    #[error("{0}")]
    Usage(String),
    /// The model gave something other than finite numbers.
    #[error(
        "{scheme}: window {window} has a loss that is not finite; the weights or the text are broken, or the cache loses too much"
    )]
    NotFinite {
        /// The scheme being evaluated.
        scheme: String,
        /// Window, from 0.
        window: usize,
    },
    /// The model gave logits that no token can be chosen from.
    #[error("the logits of new token {token} are not finite; the weights are broken, or the cache loses too much")]
    BrokenLogits {
        /// New tokens before it.
        token: usize,
    },
    /// A report could not be made.
    #[error("{0}")]
    Report(String),
    /// A layer cannot be trained.
    #[error("training of layer {layer}, step {step}: {reason}")]
    Training {
        /// Layer, from 0.
        layer: usize,
        /// Optimizer step, from 1.
        step: usize,
        /// What happened and what to do.
        reason: String,
    },
    /// Some of a suite's runs failed.
    #[error("{failed} of {total} runs failed: {names}")]
    Suite {
        /// Runs that failed.
        failed: usize,
        /// Runs asked for.
        total: usize,
        /// Their names.
        names: String,
    },
    /// Interrupted from outside.
    #[error("interrupted; nothing half-written is left behind")]
    Interrupted,
    /// A text interrupted from outside.
    #[error("interrupted; the text ends here")]
    Cut,
}

impl From<HubError> for LabError {
    fn from(error: HubError) -> Self {
        match error {
            HubError::Interrupted => Self::Interrupted,
            HubError::Name { .. } => Self::Usage(error.to_string()),
            other => Self::Hub(other),
        }
    }
}

impl LabError {
    /// Attaches a path to a system error.
    pub fn io(path: &Path) -> impl FnOnce(std::io::Error) -> LabError + '_ {
        move |source| LabError::Io { path: path.to_owned(), source }
    }

    /// Attaches a path that was given, and what is expected there, to a system error.
    pub fn input<'a>(path: &'a Path, expected: &'static str) -> impl FnOnce(std::io::Error) -> LabError + 'a {
        move |source| LabError::Input { path: path.to_owned(), source, expected }
    }
}
