//! From a name to files on disk.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::Progress;
use crate::cache::{Checksum, FileDigest, Repository, digest, files_in};
use crate::error::HubError;
use crate::fetch::{Client, Listing};
use crate::name::HubName;
use crate::select::{Choice, choose, shards};
use crate::settings::Settings;

/// A hub and its cache.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
}

/// A model in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pulled {
    /// `ORG/NAME`.
    pub repo: String,
    /// The revision asked for.
    pub revision: String,
    /// The commit that it is.
    pub commit: String,
    /// The folder of that commit.
    pub folder: PathBuf,
    /// What is loaded: the folder, or a file in it.
    pub model: PathBuf,
    /// The files that the model needs.
    pub files: Vec<PulledFile>,
    /// Bytes that came over the network; 0 where everything was there.
    pub bytes_downloaded: u64,
}

/// A file of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PulledFile {
    /// Path within the repository.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 of the content.
    pub sha256: String,
}

impl PulledFile {
    fn new(name: &str, digest: FileDigest) -> Self {
        Self { name: name.into(), size: digest.size, sha256: digest.sha256 }
    }
}

impl Hub {
    /// A hub with these settings. Nothing is asked or written yet.
    pub fn new(settings: Settings) -> Self {
        Self { settings }
    }

    /// The file or folder of a model in the cache, which is filled first where the model is not there.
    ///
    /// What is there is not compared with the hub, so that it works without a network; [`pull`](Self::pull) does.
    ///
    /// # Errors
    /// As [`pull`](Self::pull).
    pub fn locate(&self, name: &HubName, progress: &dyn Progress) -> Result<PathBuf, HubError> {
        match self.kept(name) {
            Some(kept) => Ok(kept.model()),
            None => self.pull(name, progress).map(|pulled| pulled.model),
        }
    }

    /// Fetches what a model needs and the cache lacks, and checks all of it. Offline, it checks what is there.
    ///
    /// Interrupted or broken off, it goes on from the bytes that arrived. A branch or tag stays what it was until all is there.
    ///
    /// # Errors
    /// [`HubError`]: one line that says what is wrong and what to do. No file is left that could be taken for whole.
    pub fn pull(&self, name: &HubName, progress: &dyn Progress) -> Result<Pulled, HubError> {
        if self.settings.offline {
            let offline = || HubError::Offline { name: name.to_string(), cache: self.settings.cache.clone() };
            return self.kept(name).ok_or_else(offline)?.describe(name);
        }
        let client = Client::new(&self.settings, name);
        let listing = client.list(progress)?;
        let names: Vec<String> = listing.files.iter().map(|file| file.name.clone()).collect();
        let unusable = |reason| HubError::Choice { name: name.to_string(), reason };
        let choice = choose(name, &names).map_err(unusable)?;
        let repository = Repository::new(&self.settings.cache, name);
        let mut pull = Pull { client, listing, repository, progress, files: Vec::new(), bytes: 0 };
        for file in &choice.files {
            pull.fetch(file)?;
        }
        for shard in pull.shards(&choice).map_err(unusable)? {
            pull.fetch(&shard)?;
        }
        pull.repository.remember(&pull.listing.commit)?;
        let folder = pull.repository.folder(&pull.listing.commit);
        Ok(Pulled {
            repo: name.repo.clone(),
            revision: name.revision.clone(),
            commit: pull.listing.commit,
            model: choice.model(&folder),
            folder,
            files: pull.files,
            bytes_downloaded: pull.bytes,
        })
    }

    /// The model as far as the cache has it, if it has all of it.
    fn kept(&self, name: &HubName) -> Option<Kept> {
        let repository = Repository::new(&self.settings.cache, name);
        let commit = repository.commit()?;
        let folder = repository.folder(&commit);
        let files = files_in(&folder);
        let mut choice = choose(name, &files).ok()?;
        let shards = shards_in(&folder, &choice).ok()?;
        let whole = shards.iter().all(|shard| files.contains(shard));
        choice.files.extend(shards);
        whole.then_some(Kept { commit, folder, choice })
    }
}

/// A model that the cache has.
struct Kept {
    commit: String,
    folder: PathBuf,
    choice: Choice,
}

impl Kept {
    fn model(&self) -> PathBuf {
        self.choice.model(&self.folder)
    }

    fn describe(self, name: &HubName) -> Result<Pulled, HubError> {
        let file = |file: &String| {
            let path = self.folder.join(file);
            let digest = digest(&path).map_err(HubError::cache(&path))?;
            if let Some(expected) = Checksum::of_link(&path)
                && expected.of(&digest) != expected
            {
                let (file, found) = (path.display().to_string(), expected.of(&digest).to_string());
                return Err(HubError::Damaged { file, expected: expected.to_string(), found });
            }
            Ok(PulledFile::new(file, digest))
        };
        Ok(Pulled {
            repo: name.repo.clone(),
            revision: name.revision.clone(),
            files: self.choice.files.iter().map(file).collect::<Result<_, HubError>>()?,
            model: self.model(),
            commit: self.commit,
            folder: self.folder,
            bytes_downloaded: 0,
        })
    }
}

/// The shards of a model whose index is in a folder; none where there is no index.
fn shards_in(folder: &Path, choice: &Choice) -> Result<Vec<String>, String> {
    let Some(index) = &choice.index else { return Ok(Vec::new()) };
    let path = folder.join(index);
    let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(shards(&bytes)?.into_iter().collect())
}

/// A pull under way.
struct Pull<'a> {
    client: Client<'a>,
    listing: Listing,
    repository: Repository,
    progress: &'a dyn Progress,
    files: Vec<PulledFile>,
    bytes: u64,
}

impl Pull<'_> {
    /// The shards that the index names, each of which the repository must have.
    fn shards(&self, choice: &Choice) -> Result<Vec<String>, String> {
        let shards = shards_in(&self.repository.folder(&self.listing.commit), choice)?;
        match shards.iter().find(|shard| !self.listing.files.iter().any(|file| file.name == **shard)) {
            Some(shard) => Err(format!("the index names the shard {shard}, which the repository lacks")),
            None => Ok(shards),
        }
    }

    /// Makes sure that a listed file is in the cache and right.
    fn fetch(&mut self, name: &str) -> Result<(), HubError> {
        let file = self.listing.files.iter().find(|file| file.name == name);
        let file = file.expect("files are chosen from the list, and shards are looked up in it");
        let blob = self.repository.blob(&file.checksum);
        let _lock = self.repository.lock(&file.checksum)?;
        let right = |digest: &FileDigest| digest.size == file.size && file.checksum.of(digest) == file.checksum;
        let kept = match digest(&blob) {
            Ok(digest) => Some(digest),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(HubError::cache(&blob)(error)),
        };
        let digest = match kept.filter(right) {
            Some(digest) => digest,
            None => {
                let part = blob.with_extension("incomplete");
                self.bytes += self.client.fetch(&self.listing.commit, file, &part, self.progress)?;
                let digest = digest(&part).map_err(HubError::cache(&part))?;
                if !right(&digest) {
                    let (expected, found) = (file.checksum.to_string(), file.checksum.of(&digest).to_string());
                    return Err(self.client.damaged(file, &part, expected, found));
                }
                settle(&part, &blob).map_err(HubError::cache(&blob))?;
                digest
            }
        };
        self.repository.link(&self.listing.commit, name, &file.checksum)?;
        self.files.push(PulledFile::new(name, digest));
        Ok(())
    }
}

/// Gives a file its final name once it is on disk.
fn settle(part: &Path, blob: &Path) -> io::Result<()> {
    File::open(part)?.sync_all()?;
    fs::rename(part, blob)
}
