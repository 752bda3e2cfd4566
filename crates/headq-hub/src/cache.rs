//! The cache, laid out as `huggingface_hub` lays it out:
//!
//! ```text
//! models--ORG--NAME/blobs/CHECKSUM               contents, by what the hub lists
//!                   snapshots/COMMIT/FILE        links to them
//!                   refs/REVISION                the commit that a branch or tag was when last pulled
//! .locks/models--ORG--NAME/CHECKSUM.lock         held while a blob is written
//! ```

use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::error::HubError;
use crate::name::HubName;

/// A repository's part of the cache.
pub(crate) struct Repository {
    layout: CacheRepo,
    root: PathBuf,
    locks: PathBuf,
    revision: String,
}

impl Repository {
    pub fn new(cache: &Path, name: &HubName) -> Self {
        let repo = Repo::with_revision(name.repo.clone(), RepoType::Model, name.revision.clone());
        let folder = repo.folder_name();
        Self {
            layout: Cache::new(cache.to_owned()).repo(repo),
            root: cache.join(&folder),
            locks: cache.join(".locks").join(folder),
            revision: name.revision.clone(),
        }
    }

    /// The commit that the revision was when last pulled.
    pub fn commit(&self) -> Option<String> {
        if is_hex(&self.revision, 40) {
            return Some(self.revision.clone());
        }
        let commit = fs::read_to_string(self.root.join("refs").join(&self.revision)).ok()?;
        Some(commit.trim().to_string()).filter(|commit| is_hex(commit, 40))
    }

    /// Remembers the commit of the revision.
    pub fn remember(&self, commit: &str) -> Result<(), HubError> {
        match self.revision == commit {
            true => Ok(()),
            false => self.layout.create_ref(commit).map_err(HubError::cache(&self.root)),
        }
    }

    /// The folder of a commit.
    pub fn folder(&self, commit: &str) -> PathBuf {
        self.layout.pointer_path(commit)
    }

    pub fn blob(&self, checksum: &Checksum) -> PathBuf {
        self.layout.blob_path(checksum.hex())
    }

    /// Waits until no other process writes the blob. The lock ends with the file that is returned.
    pub fn lock(&self, checksum: &Checksum) -> Result<File, HubError> {
        let path = self.locks.join(format!("{}.lock", checksum.hex()));
        for folder in [self.root.join("blobs"), self.locks.clone()] {
            fs::create_dir_all(&folder).map_err(HubError::cache(&folder))?;
        }
        let file = File::options().create(true).append(true).open(&path).map_err(HubError::cache(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                tracing::warn!("{}: waiting for another program that fetches this file", path.display());
                file.lock().map_err(HubError::cache(&path))?;
            }
            // Some network file systems have no locks; the worst is that a file is fetched twice.
            Err(TryLockError::Error(error)) => tracing::debug!("{}: {error}", path.display()),
        }
        Ok(file)
    }

    /// Makes `file` of a commit lead to a blob.
    pub fn link(&self, commit: &str, file: &str, checksum: &Checksum) -> Result<PathBuf, HubError> {
        let path = self.folder(commit).join(file);
        let folder = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(folder).map_err(HubError::cache(folder))?;
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", checksum.hex()));
        if fs::read_link(&path).is_ok_and(|found| found == target) {
            return Ok(path);
        }
        let made = match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => lead(&path, &target, &self.blob(checksum)),
        };
        made.map_err(HubError::cache(&path))?;
        Ok(path)
    }
}

#[cfg(unix)]
fn lead(path: &Path, target: &Path, _blob: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

/// Links of files need privileges elsewhere.
#[cfg(not(unix))]
fn lead(path: &Path, _target: &Path, blob: &Path) -> io::Result<()> {
    fs::hard_link(blob, path).or_else(|_| fs::copy(blob, path).map(drop))
}

/// The files below a folder, in the words of the hub; links that lead nowhere are left out.
pub(crate) fn files_in(folder: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![(folder.to_owned(), String::new())];
    while let Some((folder, prefix)) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let name = format!("{prefix}{name}");
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push((entry.path(), format!("{name}/")));
            } else if entry.path().is_file() {
                files.push(name);
            }
        }
    }
    files.sort();
    files
}

/// What the hub lists of a file's content: SHA-256 of large files, git's SHA-1 of the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Checksum {
    Sha256(String),
    GitSha1(String),
}

impl Checksum {
    /// That of the blob that a file of a commit leads to; `None` where it is no link to one.
    pub fn of_link(path: &Path) -> Option<Self> {
        let blob = fs::read_link(path).ok()?;
        match blob.file_name()?.to_str()? {
            hex if is_hex(hex, 64) => Some(Self::Sha256(hex.into())),
            hex if is_hex(hex, 40) => Some(Self::GitSha1(hex.into())),
            _ => None,
        }
    }

    /// The name of the blob.
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitSha1(hex) => hex,
        }
    }

    /// The checksum of this kind of what a file holds.
    pub fn of(&self, digest: &FileDigest) -> Self {
        match self {
            Self::Sha256(_) => Self::Sha256(digest.sha256.clone()),
            Self::GitSha1(_) => Self::GitSha1(digest.git_sha1.clone()),
        }
    }
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sha256(hex) => write!(f, "SHA-256 {hex}"),
            Self::GitSha1(hex) => write!(f, "git SHA-1 {hex}"),
        }
    }
}

pub(crate) fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Size and checksums of a file, read once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileDigest {
    pub size: u64,
    pub sha256: String,
    pub git_sha1: String,
}

pub(crate) fn digest(path: &Path) -> io::Result<FileDigest> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut sha256 = Sha256::new();
    // As `git hash-object`: a header, then the content.
    let mut git_sha1 = Sha1::new_with_prefix(format!("blob {size}\0"));
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                sha256.update(&buffer[..n]);
                git_sha1.update(&buffer[..n]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
    Ok(FileDigest { size, sha256: hex(&sha256.finalize()), git_sha1: hex(&git_sha1.finalize()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `sha256sum` and `git hash-object` print.
    #[test]
    fn digests_are_those_of_git_and_coreutils() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let of = |content: &str| {
            fs::write(file.path(), content).unwrap();
            digest(file.path()).unwrap()
        };
        let hello = of("hello\n");
        assert_eq!(hello.size, 6);
        assert_eq!(hello.sha256, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03");
        assert_eq!(hello.git_sha1, "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(of("").git_sha1, "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
    }

    #[test]
    fn links_lead_from_any_depth() {
        let folder = tempfile::tempdir().unwrap();
        let repository = Repository::new(folder.path(), &"hf:a/b".parse().unwrap());
        let sum = Checksum::GitSha1("ce013625030ba8dba906f756967f9e9ca394464a".into());
        drop(repository.lock(&sum).unwrap());
        fs::write(repository.blob(&sum), "hello\n").unwrap();
        let commit = "0".repeat(40);
        for _ in 0..2 {
            for file in ["x", "a/b/x"] {
                let path = repository.link(&commit, file, &sum).unwrap();
                assert_eq!(fs::read_to_string(path).unwrap(), "hello\n");
            }
        }
        assert_eq!(files_in(&repository.folder(&commit)), ["a/b/x", "x"]);
        fs::remove_file(repository.blob(&sum)).unwrap();
        assert!(cfg!(not(unix)) || files_in(&repository.folder(&commit)).is_empty(), "links that lead nowhere");
    }

    #[test]
    fn a_reference_that_is_no_commit_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let repository = Repository::new(folder.path(), &"hf:a/b@dev/x".parse().unwrap());
        assert_eq!(repository.commit(), None);
        let commit = "0123456789".repeat(4);
        repository.remember(&commit).unwrap();
        assert_eq!(repository.commit(), Some(commit));
        fs::write(folder.path().join("models--a--b/refs/dev/x"), "../../elsewhere").unwrap();
        assert_eq!(repository.commit(), None);
    }
}
