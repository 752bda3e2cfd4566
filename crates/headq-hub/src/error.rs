//! What can go wrong between here and the hub. Each error is one line.

use std::path::{Path, PathBuf};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A name that is none.
    #[error("{name}: {reason}; expected hf:ORG/NAME[@REV][:FILE]")]
    Name {
        /// The name as given.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An environment variable that makes no sense.
    #[error("{variable}: {reason}")]
    Setting {
        /// The variable, or the file that it names.
        variable: String,
        /// What was expected and what was found.
        reason: String,
    },
    /// Not in the cache, and the network is not to be used.
    #[error(
        "{name}: not in the cache {}, and HF_HUB_OFFLINE is set; unset it, or pull the model where there is a network",
        cache.display()
    )]
    Offline {
        /// The model.
        name: String,
        /// The cache.
        cache: PathBuf,
    },
    /// No answer.
    #[error("{endpoint}: not reachable ({reason}); check the network, HF_ENDPOINT and the proxy, or try again later")]
    Unreachable {
        /// The hub, or the server it sends downloads to.
        endpoint: String,
        /// What happened, at last.
        reason: String,
    },
    /// 404 for a repository.
    #[error(
        "{repo}: no such repository at {endpoint}; check the spelling, and for a private one set HF_TOKEN or run `hf auth login`"
    )]
    NoRepository {
        /// `ORG/NAME`.
        repo: String,
        /// The hub.
        endpoint: String,
    },
    /// 404 for a revision.
    #[error("{repo}: no revision '{revision}' at {endpoint}; a revision is a branch, a tag or a commit")]
    NoRevision {
        /// `ORG/NAME`.
        repo: String,
        /// The revision.
        revision: String,
        /// The hub.
        endpoint: String,
    },
    /// 401 or 403.
    #[error("{repo}: access denied by {endpoint} ({status}): {hint}")]
    Denied {
        /// `ORG/NAME`.
        repo: String,
        /// The hub.
        endpoint: String,
        /// The HTTP status.
        status: u16,
        /// What to do.
        hint: String,
    },
    /// Any other status.
    #[error("{url}: the server answered with status {status}; check HF_ENDPOINT, or try again later")]
    Status {
        /// What was asked for.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// 429 or 503, with a wait that is longer than one would sit through.
    #[error("{endpoint}: too many requests; the server asks to wait {seconds} seconds, try again then")]
    Busy {
        /// The hub, or the server it sends downloads to.
        endpoint: String,
        /// Seconds, as the server says.
        seconds: u64,
    },
    /// An answer that a hub would not give.
    #[error("{url}: {reason}; is HF_ENDPOINT a Hugging Face hub?")]
    Answer {
        /// What was asked for.
        url: String,
        /// What was expected and what was found.
        reason: String,
    },
    /// A repository without a model, or with several.
    #[error("{name}: {reason}")]
    Choice {
        /// The model as asked for.
        name: String,
        /// What is there, and what to do.
        reason: String,
    },
    /// A download that does not come to its end.
    #[error(
        "{file}: the download broke off at {have} of {size} bytes, {attempts} times in a row ({reason}); pull again to resume it"
    )]
    Broken {
        /// Repository and file.
        file: String,
        /// Bytes that are there.
        have: u64,
        /// Bytes that there should be.
        size: u64,
        /// How often it was tried without a byte more.
        attempts: u32,
        /// What happened, at last.
        reason: String,
    },
    /// Other bytes than the hub lists, from the server or in the cache.
    #[error("{file}: expected {expected}, found {found}; pull the model again")]
    Damaged {
        /// Repository and file.
        file: String,
        /// Size or checksum by the hub's list.
        expected: String,
        /// Size or checksum of what came, or of what is there.
        found: String,
    },
    /// The cache cannot be read or written.
    #[error("{}: {source}; free space or permit writing there, or set HF_HUB_CACHE to another folder", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Stopped from outside.
    #[error("interrupted; pull again to resume")]
    Interrupted,
}

impl HubError {
    pub(crate) fn cache(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Cache { path: path.to_owned(), source }
    }
}
