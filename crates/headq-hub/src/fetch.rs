//! Requests: what a repository has, and one file of it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use hf_hub::{Repo, RepoType};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, header};
use ureq::{Agent, Body};

use crate::Progress;
use crate::cache::{Checksum, is_hex};
use crate::error::HubError;
use crate::name::{HubName, is_inside};
use crate::settings::Settings;

/// Attempts without a byte more before a request is given up.
const ATTEMPTS: u32 = 5;

/// Wait before the second attempt; doubled before each further one.
const FIRST_WAIT: Duration = Duration::from_millis(200);

/// The longest wait that a server may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);

/// How often whoever waits looks whether to go on.
const LOOK: Duration = Duration::from_millis(50);

/// Bytes read at once.
const CHUNK: usize = 1 << 18;

/// The largest repositories have some megabytes of file names.
const LONGEST_LIST: u64 = 64 << 20;

/// Kept as they are in the path of an address.
const IN_PATHS: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b'/');

/// A commit of a repository.
#[derive(Debug)]
pub(crate) struct Listing {
    pub commit: String,
    pub files: Vec<Listed>,
}

/// A file of a commit.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub name: String,
    pub size: u64,
    pub checksum: Checksum,
}

/// Why an attempt ended before its end.
enum Stop {
    /// Another may succeed, after the wait that the server asks for.
    Again {
        reason: String,
        wait: Option<Duration>,
    },
    Failed(HubError),
}

impl Stop {
    fn again(reason: impl std::fmt::Display) -> Self {
        Self::Again { reason: one_line(reason), wait: None }
    }
}

impl From<HubError> for Stop {
    fn from(error: HubError) -> Self {
        Self::Failed(error)
    }
}

/// Attempts in a row that got nowhere.
struct Patience(u32);

impl Patience {
    /// Waits before another attempt, as long as the server asks for at least; `false` where there have been enough.
    fn wait(&mut self, asked: Option<Duration>, progress: &dyn Progress) -> Result<bool, HubError> {
        if self.0 + 1 == ATTEMPTS {
            return Ok(false);
        }
        let own = FIRST_WAIT * 2u32.pow(self.0);
        let end = Instant::now() + asked.map_or(own, |asked| asked.max(own));
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if progress.cancelled() {
                return Err(HubError::Interrupted);
            }
            thread::sleep(left.min(LOOK));
        }
        self.0 += 1;
        if progress.cancelled() { Err(HubError::Interrupted) } else { Ok(true) }
    }
}

/// What a thread of its own gets from the network. A call that waits for a server cannot be stopped, but who waits for the thread can
/// turn away; the thread then ends when its call does.
fn in_background<T: Send + 'static>(work: impl FnOnce(&SyncSender<T>) + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = sync_channel(2);
    thread::spawn(move || work(&sender));
    receiver
}

/// The next that arrives; `None` after the last.
fn next<T>(arriving: &Receiver<T>, progress: &dyn Progress) -> Result<Option<T>, HubError> {
    loop {
        if progress.cancelled() {
            return Err(HubError::Interrupted);
        }
        match arriving.recv_timeout(LOOK) {
            Ok(next) => return Ok(Some(next)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

/// The one thing that a call gives.
fn wait_for<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
    progress: &dyn Progress,
) -> Result<T, HubError> {
    // A receiver that is gone has no use for it.
    let arriving = in_background(move |sender| drop(sender.send(call())));
    Ok(next(&arriving, progress)?.expect("the thread sends before it ends"))
}

/// Talks to the hub about one repository.
pub(crate) struct Client<'a> {
    agent: Agent,
    settings: &'a Settings,
    name: &'a HubName,
}

impl<'a> Client<'a> {
    pub fn new(settings: &'a Settings, name: &'a HubName) -> Self {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // The hub sends downloads on to other hosts, which must not see the token.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .user_agent(concat!("headq/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(settings.timeout))
            .timeout_per_read(Some(settings.timeout));
        let host = settings.endpoint.split_once("://").map_or("", |(_, rest)| rest);
        if ["localhost", "127.", "[::1]"].iter().any(|local| host.starts_with(local)) {
            config = config.proxy(None);
        }
        Self { agent: config.build().into(), settings, name }
    }

    fn repo(&self, revision: &str) -> Repo {
        Repo::with_revision(self.name.repo.clone(), RepoType::Model, revision.into())
    }

    fn get(&self, url: &str, from: u64, progress: &dyn Progress) -> Result<Response<Body>, Stop> {
        // A compressed answer could not be resumed.
        let mut request = self.agent.get(url).header(header::ACCEPT_ENCODING, "identity");
        if let Some(token) = &self.settings.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        wait_for(move || request.call(), progress)?.map_err(|error| self.not_answered(error))
    }

    /// The files of the revision, with sizes and checksums.
    pub fn list(&self, progress: &dyn Progress) -> Result<Listing, HubError> {
        let mut patience = Patience(0);
        loop {
            match self.list_once(progress) {
                Ok(listing) => return Ok(listing),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Again { wait, .. }) if patience.wait(wait, progress)? => {}
                Err(Stop::Again { reason, .. }) => return Err(self.unreachable(reason)),
            }
        }
    }

    fn list_once(&self, progress: &dyn Progress) -> Result<Listing, Stop> {
        let url = format!("{}/api/{}?blobs=true", self.settings.endpoint, self.repo(&self.name.revision).api_url());
        let mut response = self.get(&url, 0, progress)?;
        if !response.status().is_success() {
            return Err(self.refused(&url, &response));
        }
        let body = move || response.body_mut().with_config().limit(LONGEST_LIST).read_to_vec();
        let body = wait_for(body, progress)?.map_err(Stop::again)?;
        parse_listing(&body).map_err(|reason| HubError::Answer { url, reason }.into())
    }

    /// Fetches a file of a commit into `part`, from where that ends; returns the bytes received. The checksum is not looked at.
    pub fn fetch(&self, commit: &str, file: &Listed, part: &Path, progress: &dyn Progress) -> Result<u64, HubError> {
        if length(part)? > file.size || file.size == 0 {
            File::create(part).map_err(HubError::cache(part))?;
        }
        progress.begin(&file.name, file.size, length(part)?);
        let received = self.fetch_rest(commit, file, part, progress);
        progress.end();
        received
    }

    fn fetch_rest(&self, commit: &str, file: &Listed, part: &Path, progress: &dyn Progress) -> Result<u64, HubError> {
        let repo = self.repo(commit);
        let path = utf8_percent_encode(&file.name, IN_PATHS);
        let url = format!("{}/{}/resolve/{}/{path}", self.settings.endpoint, repo.url(), repo.url_revision());
        let mut download = Download { part, file, received: 0, timeout: self.settings.timeout, progress };
        let (mut patience, mut most) = (Patience(0), length(part)?);
        loop {
            let have = length(part)?;
            if have == file.size {
                return Ok(download.received);
            }
            let stop = self.get(&url, have, progress).and_then(|response| match response.status().as_u16() {
                200 | 206 => download.append(response, have),
                // Nothing there: the server's file is shorter than the hub says.
                416 => {
                    let (expected, found) = (format!("{} bytes", file.size), format!("{have} at most"));
                    Err(self.damaged(file, part, expected, found).into())
                }
                _ => Err(self.refused(&url, &response)),
            });
            let now = length(part)?;
            if now > most {
                (most, patience) = (now, Patience(0));
            }
            match stop {
                Ok(()) => {}
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Again { wait, .. }) if patience.wait(wait, progress)? => {}
                Err(Stop::Again { reason, .. }) => {
                    let (file, size) = (self.full_name(file), file.size);
                    return Err(HubError::Broken { file, have: now, size, attempts: ATTEMPTS, reason });
                }
            }
        }
    }

    /// The error for bytes that are not those listed; what has arrived is removed.
    pub fn damaged(&self, file: &Listed, part: &Path, expected: String, found: String) -> HubError {
        match fs::remove_file(part) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => HubError::cache(part)(error),
            _ => HubError::Damaged { file: self.full_name(file), expected, found },
        }
    }

    fn full_name(&self, file: &Listed) -> String {
        format!("{}: {}", self.name.repo, file.name)
    }

    fn unreachable(&self, reason: String) -> HubError {
        HubError::Unreachable { endpoint: self.settings.endpoint.clone(), reason }
    }

    /// Whether a request without an answer is worth another attempt.
    fn not_answered(&self, error: ureq::Error) -> Stop {
        use ureq::Error::{BodyStalled, ConnectionFailed, HostNotFound, Io, Protocol, Timeout};
        match error {
            Timeout(ureq::Timeout::PerRead | ureq::Timeout::RecvResponse) => Stop::again(silent(self.settings.timeout)),
            Io(_) | Timeout(_) | HostNotFound | ConnectionFailed | Protocol(_) | BodyStalled => Stop::again(error),
            other => self.unreachable(one_line(other)).into(),
        }
    }

    /// What a status other than success means. The hub says more in a header.
    fn refused(&self, url: &str, response: &Response<Body>) -> Stop {
        let (repo, endpoint) = (self.name.repo.clone(), self.settings.endpoint.clone());
        let status = response.status().as_u16();
        let code = response.headers().get("x-error-code").and_then(|code| code.to_str().ok());
        match (status, code) {
            (401 | 403, _) | (_, Some("GatedRepo")) => {
                let hint = self.how_to_get_access(status);
                HubError::Denied { repo, endpoint, status, hint }.into()
            }
            (404, Some("RevisionNotFound")) => {
                HubError::NoRevision { repo, revision: self.name.revision.clone(), endpoint }.into()
            }
            (404, Some("EntryNotFound")) => HubError::Status { url: url.into(), status }.into(),
            // Mirrors may leave the header out, and then either is missing.
            (404, None) if self.name.revision != "main" => {
                let repo = format!("{repo}, or its revision '{}'", self.name.revision);
                HubError::NoRepository { repo, endpoint }.into()
            }
            (404, _) => HubError::NoRepository { repo, endpoint }.into(),
            (408 | 429 | 500..=599, _) => match retry_after(response) {
                Some(wait) if wait > LONGEST_WAIT => HubError::Busy { endpoint, seconds: wait.as_secs() }.into(),
                wait => Stop::Again { reason: format!("status {status}"), wait },
            },
            _ => HubError::Status { url: url.into(), status }.into(),
        }
    }

    fn how_to_get_access(&self, status: u16) -> String {
        let Settings { endpoint, token, .. } = self.settings;
        let ask = format!("ask for access at {endpoint}/{}", self.name.repo);
        match (token, status) {
            (None, _) => format!(
                "it is private or gated, or does not exist; check the spelling, {ask} where it is gated, then set HF_TOKEN or run `hf auth login`"
            ),
            (Some(_), 401) => "the token is not valid; set HF_TOKEN to another, or run `hf auth login`".into(),
            (Some(_), _) => format!("the token has no access; {ask}, or set HF_TOKEN to another"),
        }
    }
}

/// A file on its way.
struct Download<'a> {
    part: &'a Path,
    file: &'a Listed,
    received: u64,
    timeout: Duration,
    progress: &'a dyn Progress,
}

impl Download<'_> {
    /// Appends an answer to the part that has `have` bytes, or writes it anew where the server ignored the range.
    fn append(&mut self, response: Response<Body>, have: u64) -> Result<(), Stop> {
        let resumed = response.status().as_u16() == 206;
        let mut have = if resumed { have } else { 0 };
        let mut options = File::options();
        options.create(true).append(resumed).write(true).truncate(!resumed);
        let mut part = options.open(self.part).map_err(HubError::cache(self.part))?;
        let arriving = in_background(move |sender| read_chunks(response, sender));
        while have < self.file.size {
            let chunk = match next(&arriving, self.progress)? {
                None => return Err(Stop::again("the server closed the connection")),
                Some(Err(error)) if is_timeout(&error) => return Err(Stop::again(silent(self.timeout))),
                Some(Err(error)) => return Err(Stop::again(error)),
                Some(Ok(chunk)) => chunk,
            };
            let count = chunk.len().min(usize::try_from(self.file.size - have).unwrap_or(usize::MAX));
            part.write_all(&chunk[..count]).map_err(HubError::cache(self.part))?;
            have += count as u64;
            self.received += count as u64;
            self.progress.advance(count as u64);
        }
        Ok(())
    }
}

/// The content of an answer, in pieces that are not empty, up to its end or the first error.
fn read_chunks(response: Response<Body>, sender: &SyncSender<io::Result<Vec<u8>>>) {
    let mut body = response.into_body().into_reader();
    loop {
        let mut chunk = vec![0; CHUNK];
        let read = match body.read(&mut chunk) {
            Ok(0) => return,
            Ok(count) => {
                chunk.truncate(count);
                Ok(chunk)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => Err(error),
        };
        let last = read.is_err();
        if sender.send(read).is_err() || last {
            return;
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>());
    error.kind() == io::ErrorKind::TimedOut || matches!(inner, Some(ureq::Error::Timeout(_)))
}

fn silent(timeout: Duration) -> String {
    format!("no byte in {} s", timeout.as_secs_f64())
}

/// The wait in seconds that a busy server asks for. A date instead is not read; the usual wait stands for it.
fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let text = response.headers().get(header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

/// Bytes of a file, 0 where there is none.
fn length(path: &Path) -> Result<u64, HubError> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(metadata.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(HubError::cache(path)(error)),
    }
}

/// The answer to `/api/models/ORG/NAME/revision/REV?blobs=true`. Names and checksums become paths, so that each is checked.
fn parse_listing(body: &[u8]) -> Result<Listing, String> {
    #[derive(Deserialize)]
    struct Info {
        sha: String,
        siblings: Vec<Sibling>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Sibling {
        rfilename: String,
        size: Option<u64>,
        blob_id: Option<String>,
        lfs: Option<Lfs>,
    }
    #[derive(Deserialize)]
    struct Lfs {
        sha256: String,
        size: u64,
    }
    let Info { sha, siblings } =
        serde_json::from_slice(body).map_err(|e| format!("expected a list of files, found something else ({e})"))?;
    if !is_hex(&sha, 40) {
        return Err(format!("expected a commit, found {sha:?}"));
    }
    let listed = |sibling: Sibling| {
        let name = sibling.rfilename;
        let (size, checksum) = match (sibling.lfs, sibling.size, sibling.blob_id) {
            (Some(lfs), _, _) if is_hex(&lfs.sha256, 64) => (lfs.size, Checksum::Sha256(lfs.sha256)),
            (None, Some(size), Some(id)) if is_hex(&id, 40) => (size, Checksum::GitSha1(id)),
            _ => return Err(format!("expected size and checksum of {name:?}, found none")),
        };
        match is_inside(&name) {
            true => Ok(Listed { name, size, checksum }),
            false => Err(format!("expected names of files within the repository, found {name:?}")),
        }
    };
    let files = siblings.into_iter().map(listed).collect::<Result<_, _>>()?;
    Ok(Listing { commit: sha, files })
}

fn one_line(error: impl std::fmt::Display) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn listing(edit: impl FnOnce(&mut Value)) -> Result<Listing, String> {
        let mut answer = json!({
            "id": "a/b", "sha": "0123456789".repeat(4), "siblings": [
                {"rfilename": "config.json", "size": 3, "blobId": "ab".repeat(20)},
                {"rfilename": "q/m.gguf", "size": 9, "blobId": "cd".repeat(20), "lfs": {"sha256": "ef".repeat(32), "size": 9, "pointerSize": 134}},
            ],
        });
        edit(&mut answer);
        parse_listing(answer.to_string().as_bytes())
    }

    #[test]
    fn lists_have_checksums_of_contents() {
        let files = listing(|_| {}).unwrap().files;
        assert_eq!(files[0].checksum, Checksum::GitSha1("ab".repeat(20)));
        assert_eq!((files[1].size, &files[1].checksum), (9, &Checksum::Sha256("ef".repeat(32))));
    }

    #[test]
    fn lists_that_could_leave_the_cache_are_refused() {
        for name in ["../config.json", "/etc/passwd", "a/../../b", "a\\..\\b", "", "c:b", "a//b"] {
            assert!(listing(|l| l["siblings"][0]["rfilename"] = name.into()).is_err(), "{name}");
        }
        assert!(listing(|l| l["sha"] = "../../x".into()).is_err());
        assert!(listing(|l| l["siblings"][0]["blobId"] = "/etc/passwd".into()).is_err());
        assert!(listing(|l| l["siblings"][1]["lfs"]["sha256"] = "../x".into()).is_err());
        assert!(listing(|l| drop(l["siblings"][0].as_object_mut().unwrap().shift_remove("size"))).is_err());
        assert!(parse_listing(b"<html>").unwrap_err().contains("list of files"));
    }
}
