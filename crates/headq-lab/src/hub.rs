//! Models by name: paths as they are, and `hf:ORG/NAME[@REV][:FILE]` by way of the hub's cache.

use std::path::{Path, PathBuf};

use headq_hub::{Hub, HubName, Progress, Pulled, Settings};

use crate::{LabError, Observer};

/// Unit in which downloads are observed.
pub const BYTES: &str = "bytes";

/// Where a model is: its path, or for a name of the hub what the cache has, pulled first where it has nothing.
///
/// # Errors
/// As [`pull`]; a path that does not exist is none here.
pub fn locate(model: &Path, observer: &dyn Observer) -> Result<PathBuf, LabError> {
    match model.to_str().filter(|name| is_name(name)) {
        None => Ok(model.to_owned()),
        Some(name) => Ok(hub()?.locate(&name.parse()?, &Watched(observer))?),
    }
}

/// Fetches a model of the hub, or what has changed of it, into the cache.
///
/// # Errors
/// If the name is none, the hub does not answer or refuses, or what arrives is not what it lists.
pub fn pull(name: &str, observer: &dyn Observer) -> Result<Pulled, LabError> {
    Ok(hub()?.pull(&name.parse()?, &Watched(observer))?)
}

/// Whether a model is named, rather than given by its path.
pub(crate) fn is_name(model: &str) -> bool {
    model.starts_with(HubName::PREFIX)
}

fn hub() -> Result<Hub, LabError> {
    Ok(Hub::new(Settings::from_env()?))
}

/// Downloads, for those who watch passes.
struct Watched<'a>(&'a dyn Observer);

impl Progress for Watched<'_> {
    fn begin(&self, file: &str, size: u64, have: u64) {
        self.0.begin_units(file, size as usize, BYTES);
        self.0.steps(have as usize);
    }

    fn advance(&self, bytes: u64) {
        self.0.steps(bytes as usize);
    }

    fn end(&self) {
        self.0.end();
    }

    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}
