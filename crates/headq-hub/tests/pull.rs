//! Pulls from a hub on this machine, on good days and on bad ones.
#![allow(clippy::unwrap_used, missing_docs)]

mod hub_server;

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use headq_hub::{Hub, HubError, Progress, Pulled, SILENCE, Settings};
use hub_server::{COMMIT, Fault, HubServer, REPO, git_sha1, sha256};

const NAME: &str = "hf:org/tiny";
const WEIGHTS: &str = "model.safetensors";

/// Bytes without a pattern.
fn noise(length: usize, mut state: u64) -> Vec<u8> {
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn model() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        (".gitattributes", b"*.bin lfs".to_vec()),
        ("README.md", b"# tiny".to_vec()),
        ("config.json", b"{\"model_type\": \"llama\"}".to_vec()),
        ("model.safetensors", noise(700_000, 1)),
        ("onnx/model.onnx", noise(100, 2)),
        ("pytorch_model.bin", noise(100, 3)),
        ("tokenizer.json", b"{}".to_vec()),
        ("tokenizer_config.json", Vec::new()),
    ]
}

fn total() -> u64 {
    700_000 + 23 + 2
}

/// A hub and an empty cache.
struct Setup {
    server: HubServer,
    cache: tempfile::TempDir,
}

impl Setup {
    fn new() -> Self {
        Self::of(model())
    }

    fn of(files: Vec<(&str, Vec<u8>)>) -> Self {
        Self { server: HubServer::new(files), cache: tempfile::tempdir().unwrap() }
    }

    fn settings(&self) -> Settings {
        let (endpoint, cache) = (self.server.endpoint.clone(), self.cache.path().to_owned());
        Settings { endpoint, token: None, cache, offline: false, timeout: SILENCE }
    }

    fn pull(&self, name: &str) -> Result<Pulled, HubError> {
        Hub::new(self.settings()).pull(&name.parse().unwrap(), &())
    }

    /// Without patience for a silent server.
    fn pull_quickly(&self) -> Result<Pulled, HubError> {
        let hub = Hub::new(Settings { timeout: Duration::from_millis(100), ..self.settings() });
        hub.pull(&NAME.parse().unwrap(), &())
    }

    /// What is there without a network.
    fn kept(&self, name: &str) -> Result<PathBuf, HubError> {
        Hub::new(Settings { offline: true, ..self.settings() }).locate(&name.parse().unwrap(), &())
    }

    fn blob(&self, content: &[u8]) -> PathBuf {
        self.cache.path().join("models--org--tiny/blobs").join(sha256(content))
    }

    fn part(&self, content: &[u8]) -> PathBuf {
        self.blob(content).with_extension("incomplete")
    }

    /// Fails with one line that has all of `needles`; nothing is there that could be taken for the model.
    #[track_caller]
    fn fails(&self, name: &str, needles: &[&str]) {
        one_line(&self.pull(name).unwrap_err(), needles);
        assert!(matches!(self.kept(name), Err(HubError::Offline { .. })), "something is taken for whole");
    }
}

#[track_caller]
fn one_line(error: &HubError, needles: &[&str]) {
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message}");
    for needle in needles {
        assert!(message.contains(needle), "{needle:?} is not in: {message}");
    }
}

fn weights() -> Vec<u8> {
    model().into_iter().find(|(name, _)| *name == WEIGHTS).unwrap().1
}

#[test]
fn only_what_is_needed_comes_and_only_once() {
    let setup = Setup::new();
    let pulled = setup.pull(NAME).unwrap();
    let names: Vec<&str> = pulled.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS]);
    assert_eq!((pulled.repo.as_str(), pulled.revision.as_str(), pulled.commit.as_str()), (REPO, "main", COMMIT));
    assert_eq!(pulled.bytes_downloaded, total());
    assert_eq!(pulled.model, pulled.folder);
    for file in &pulled.files {
        let content = fs::read(pulled.folder.join(&file.name)).unwrap();
        assert_eq!(content, model().into_iter().find(|(name, _)| *name == file.name).unwrap().1);
        assert_eq!((file.size, &file.sha256), (content.len() as u64, &sha256(&content)));
    }
    assert!(setup.server.requests().iter().all(|r| !r.path.contains("pytorch") && !r.path.contains("README")));

    let again = setup.pull(NAME).unwrap();
    assert_eq!(again, Pulled { bytes_downloaded: 0, ..pulled.clone() });
    let requests = setup.server.requests().len();
    assert_eq!(Hub::new(setup.settings()).locate(&NAME.parse().unwrap(), &()).unwrap(), pulled.folder);
    assert_eq!(setup.server.requests().len(), requests, "what is there needs no network");
    let offline = Hub::new(Settings { offline: true, ..setup.settings() });
    assert_eq!(offline.pull(&NAME.parse().unwrap(), &()).unwrap(), again);
}

/// The layout that `huggingface_hub` documents, so that it finds what was pulled here.
#[test]
fn the_cache_has_the_layout_of_other_tools() {
    let setup = Setup::new();
    let pulled = setup.pull(NAME).unwrap();
    let root = setup.cache.path().join("models--org--tiny");
    assert_eq!(pulled.folder, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(fs::read(root.join("blobs").join(sha256(&weights()))).unwrap(), weights());
    assert_eq!(fs::read(root.join("blobs").join(git_sha1(b"{}"))).unwrap(), b"{}");
    if cfg!(unix) {
        let target = Path::new("../../blobs").join(sha256(&weights()));
        assert_eq!(fs::read_link(pulled.folder.join(WEIGHTS)).unwrap(), target);
    }
    assert_eq!(fs::read_dir(root.join("blobs")).unwrap().count(), 4, "nothing is left over");
}

#[test]
fn revisions_are_branches_tags_and_commits() {
    let setup = Setup::new();
    for revision in ["v1", "feature/x", COMMIT] {
        let name = format!("{NAME}@{revision}");
        let pulled = setup.pull(&name).unwrap();
        assert_eq!((pulled.revision.as_str(), pulled.commit.as_str()), (revision, COMMIT));
        assert_eq!(setup.kept(&name).unwrap(), pulled.folder);
    }
    assert!(setup.kept(NAME).is_err(), "main was not pulled");
}

#[test]
fn a_dropped_connection_is_resumed() {
    let setup = Setup::new();
    setup.server.fault(WEIGHTS, 3, &[Fault::Drop(200_000)]);
    assert_eq!(setup.pull(NAME).unwrap().bytes_downloaded, total(), "every byte came once");
    let ranges: Vec<_> =
        setup.server.requests_of(WEIGHTS).iter().map(|r| r.header("range").map(String::from)).collect();
    assert_eq!(ranges.len(), 4);
    assert_eq!(ranges[0], None);
    assert_eq!(ranges[1].as_deref(), Some("bytes=200000-"));
    assert_eq!(ranges[3].as_deref(), Some("bytes=600000-"));
}

#[test]
fn a_server_without_ranges_starts_again() {
    let setup = Setup::new();
    fs::create_dir_all(setup.part(&weights()).parent().unwrap()).unwrap();
    fs::write(setup.part(&weights()), &weights()[..1000]).unwrap();
    setup.server.fault(WEIGHTS, 1, &[Fault::Drop(200_000), Fault::NoRanges]);
    let pulled = setup.pull(NAME).unwrap();
    assert_eq!(fs::read(pulled.folder.join(WEIGHTS)).unwrap(), weights());
}

#[test]
fn a_download_that_gets_nowhere_is_given_up_and_resumed_later() {
    let setup = Setup::new();
    setup.server.fault(WEIGHTS, usize::MAX, &[Fault::Stuck(300_000)]);
    setup.fails(NAME, &["org/tiny: model.safetensors", "broke off at 300000 of 700000 bytes", "5 times", "pull again"]);
    setup.server.fault(WEIGHTS, 0, &[]);
    assert_eq!(setup.pull(NAME).unwrap().bytes_downloaded, 400_000);
    let last = setup.server.requests_of(WEIGHTS).pop().unwrap();
    assert_eq!(last.header("range"), Some("bytes=300000-"));
}

#[test]
fn an_interrupted_pull_goes_on_where_it_was() {
    struct Impatient(Cell<u64>);
    impl Progress for Impatient {
        fn begin(&self, _: &str, _: u64, have: u64) {
            self.0.set(have);
        }
        fn advance(&self, bytes: u64) {
            self.0.set(self.0.get() + bytes);
        }
        fn end(&self) {}
        fn cancelled(&self) -> bool {
            self.0.get() > 100_000
        }
    }
    let setup = Setup::new();
    let error = Hub::new(setup.settings()).pull(&NAME.parse().unwrap(), &Impatient(Cell::new(0))).unwrap_err();
    assert!(matches!(error, HubError::Interrupted), "{error}");
    assert!(setup.kept(NAME).is_err());
    let have = fs::metadata(setup.part(&weights())).unwrap().len();
    assert!(have > 100_000 && have < 700_000);
    assert_eq!(setup.pull(NAME).unwrap().bytes_downloaded, 700_000 - have);
}

#[test]
fn a_busy_server_is_asked_again() {
    let setup = Setup::new();
    setup.server.fault_of_list(503, "", "");
    setup.server.fault(WEIGHTS, 2, &[Fault::Status(429, "")]);
    assert_eq!(setup.pull(NAME).unwrap().bytes_downloaded, total());
}

#[test]
fn a_server_that_goes_silent_is_asked_again() {
    let setup = Setup::new();
    setup.server.silence_list(1);
    setup.server.fault(WEIGHTS, 2, &[Fault::Silent(300_000)]);
    let pulled = setup.pull_quickly().unwrap();
    assert_eq!(fs::read(pulled.folder.join(WEIGHTS)).unwrap(), weights());
    assert_eq!(pulled.bytes_downloaded, total(), "every byte came once");
    assert_eq!(setup.server.requests_of(WEIGHTS).pop().unwrap().header("range"), Some("bytes=300000-"));
}

#[test]
fn a_server_that_stays_silent_is_given_up_and_the_pull_resumed_later() {
    let setup = Setup::new();
    setup.server.silence_list(usize::MAX);
    one_line(&setup.pull_quickly().unwrap_err(), &["not reachable (no byte in 0.1 s)", "try again later"]);
    setup.server.silence_list(0);
    setup.server.fault(WEIGHTS, usize::MAX, &[Fault::Silent(300_000)]);
    let needles = ["broke off at 300000 of 700000 bytes", "5 times", "(no byte in 0.1 s)", "pull again"];
    one_line(&setup.pull_quickly().unwrap_err(), &needles);
    assert!(setup.kept(NAME).is_err(), "something is taken for whole");
    setup.server.fault(WEIGHTS, 0, &[]);
    let pulled = setup.pull(NAME).unwrap();
    assert_eq!(pulled.bytes_downloaded, 400_000);
    assert_eq!(fs::read(pulled.folder.join(WEIGHTS)).unwrap(), weights());
}

/// Whoever waits for a server can turn away, long before its time is up.
#[test]
fn a_pull_from_a_silent_server_can_be_interrupted() {
    struct Until(Instant);
    impl Progress for Until {
        fn begin(&self, _: &str, _: u64, _: u64) {}
        fn advance(&self, _: u64) {}
        fn end(&self) {}
        fn cancelled(&self) -> bool {
            Instant::now() > self.0
        }
    }
    let setup = Setup::new();
    let interrupted = || {
        let start = Instant::now();
        let hub = Hub::new(setup.settings());
        let error = hub.pull(&NAME.parse().unwrap(), &Until(start + Duration::from_millis(500))).unwrap_err();
        assert!(matches!(error, HubError::Interrupted), "{error}");
        assert!(start.elapsed() < SILENCE / 3);
    };
    setup.server.silence_list(1);
    interrupted();
    setup.server.fault(WEIGHTS, 1, &[Fault::Silent(300_000)]);
    interrupted();
    setup.server.fault(WEIGHTS, 1, &[Fault::Busy("60")]);
    interrupted();
    let pulled = setup.pull(NAME).unwrap();
    assert_eq!(pulled.bytes_downloaded, 400_000);
    assert_eq!(fs::read(pulled.folder.join(WEIGHTS)).unwrap(), weights());
}

#[test]
fn a_busy_server_says_when_to_come_again() {
    let setup = Setup::new();
    setup.server.fault(WEIGHTS, 1, &[Fault::Busy("2")]);
    let start = Instant::now();
    assert_eq!(setup.pull(NAME).unwrap().bytes_downloaded, total());
    assert!(start.elapsed() >= Duration::from_secs(2), "it came too early");
    // Neither for ever, nor at once.
    for (when, needles) in [
        ("3600", &["too many requests", "asks to wait 3600 seconds", "try again then"][..]),
        ("18446744073709551615", &["18446744073709551615 seconds"]),
        ("Wed, 21 Oct 2015 07:28:00 GMT", &["5 times in a row (status 429)"]),
        ("-1", &["5 times in a row (status 429)"]),
    ] {
        let setup = Setup::new();
        setup.server.fault(WEIGHTS, usize::MAX, &[Fault::Busy(when)]);
        setup.fails(NAME, needles);
    }
}

#[test]
fn a_model_in_parts_is_refused_before_it_is_fetched() {
    let part = |n: u32| format!("m-0000{n}-of-00003.gguf");
    let names = [part(1), part(2), part(3)];
    let setup = Setup::of(names.iter().map(|name| (name.as_str(), noise(10, 1))).collect());
    setup.fails(NAME, &["hf:org/tiny: m-00001-of-00003.gguf is one of 3 files", "gguf-split --merge"]);
    setup.fails("hf:org/tiny:m-00002-of-00003.gguf", &["m-00002-of-00003.gguf is one of 3 files"]);
    assert_eq!(setup.server.requests().len(), 2, "nothing was fetched");
}

#[test]
fn no_such_repository() {
    let setup = Setup::new();
    let error = setup.pull("hf:org/tinny").unwrap_err();
    one_line(&error, &["org/tinny: no such repository at http://127.0.0.1", "check the spelling", "HF_TOKEN"]);
}

#[test]
fn no_such_revision() {
    let setup = Setup::new();
    setup.server.fault_of_list(404, "", "Not Found");
    setup.fails("hf:org/tiny@v1", &["org/tiny, or its revision 'v1': no such repository"]);
    setup.fails("hf:org/tiny@v9", &["org/tiny: no revision 'v9' at http://127.0.0.1", "a branch, a tag or a commit"]);
}

#[test]
fn private_and_gated_repositories() {
    let setup = Setup::new();
    setup.server.fault_of_list(401, "RepoNotFound", "{}");
    setup.fails(NAME, &["org/tiny: access denied", "(401)", "private or gated", "set HF_TOKEN or run `hf auth login`"]);
    setup.server.gate("hf_right");
    setup.fails(NAME, &["(401)", "ask for access at http://127.0.0.1", "HF_TOKEN", "hf auth login"]);
    let with = |token: &str| Hub::new(Settings { token: Some(token.into()), ..setup.settings() });
    let error = with("hf_wrong").pull(&NAME.parse().unwrap(), &()).unwrap_err();
    one_line(&error, &["(403)", "the token has no access; ask for access at"]);
    assert!(!error.to_string().contains("hf_wrong"), "a token is never printed");
    with("hf_right").pull(&NAME.parse().unwrap(), &()).unwrap();
    let told = setup.server.requests_of(WEIGHTS).iter().any(|r| r.header("authorization").is_some());
    assert!(!told, "the host that downloads are sent on to does not see the token");
}

#[test]
fn a_truncated_file() {
    let setup = Setup::new();
    setup.server.fault(WEIGHTS, usize::MAX, &[Fault::Short(500_000)]);
    setup.fails(NAME, &["org/tiny: model.safetensors", "expected 700000 bytes", "found 500000 at most"]);
    assert!(!setup.part(&weights()).exists() && !setup.blob(&weights()).exists());
    let setup = Setup::new();
    setup.server.fault("config.json", usize::MAX, &[Fault::Short(0)]);
    setup.fails(NAME, &["org/tiny: config.json", "broke off at 0 of 23 bytes"]);
}

#[test]
fn wrong_bytes() {
    let setup = Setup::new();
    setup.server.fault(WEIGHTS, 1, &[Fault::Wrong(123_456)]);
    let expected = format!("expected SHA-256 {}", sha256(&weights()));
    setup.fails(NAME, &["org/tiny: model.safetensors", &expected, "found SHA-256", "pull the model again"]);
    assert!(!setup.part(&weights()).exists() && !setup.blob(&weights()).exists());
    let setup = Setup::new();
    setup.server.fault("tokenizer.json", 1, &[Fault::Wrong(0)]);
    setup.fails(NAME, &["org/tiny: tokenizer.json", &format!("expected git SHA-1 {}", git_sha1(b"{}"))]);
    setup.pull(NAME).unwrap();
}

#[test]
fn a_part_of_something_else_is_not_completed() {
    let setup = Setup::new();
    fs::create_dir_all(setup.part(&weights()).parent().unwrap()).unwrap();
    fs::write(setup.part(&weights()), noise(1000, 9)).unwrap();
    setup.fails(NAME, &["expected SHA-256", "pull the model again"]);
    setup.pull(NAME).unwrap();
    fs::write(setup.part(&weights()), noise(800_000, 9)).unwrap();
    fs::remove_file(setup.blob(&weights())).unwrap();
    assert_eq!(setup.pull(NAME).unwrap().bytes_downloaded, 700_000, "a part that is too long is begun anew");
}

#[test]
fn a_damaged_cache_is_mended() {
    let setup = Setup::new();
    setup.pull(NAME).unwrap();
    fs::write(setup.blob(&weights()), noise(700_000, 9)).unwrap();
    let offline = Hub::new(Settings { offline: true, ..setup.settings() });
    one_line(
        &offline.pull(&NAME.parse().unwrap(), &()).unwrap_err(),
        &[WEIGHTS, "expected SHA-256", "pull the model again"],
    );
    let pulled = setup.pull(NAME).unwrap();
    assert_eq!(pulled.bytes_downloaded, 700_000);
    assert_eq!(fs::read(pulled.folder.join(WEIGHTS)).unwrap(), weights());
}

#[test]
fn two_at_once_fetch_once() {
    let setup = Setup::new();
    let settings = setup.settings();
    let pull = || Hub::new(settings.clone()).pull(&NAME.parse().unwrap(), &()).unwrap();
    let (one, other) = std::thread::scope(|scope| {
        let other = scope.spawn(pull);
        (pull(), other.join().unwrap())
    });
    assert_eq!((&one.files, one.bytes_downloaded + other.bytes_downloaded), (&other.files, total()));
}

#[test]
fn a_failed_update_leaves_the_old_commit() {
    let setup = Setup::new();
    let old = setup.pull(NAME).unwrap().folder;
    setup.server.commit(&COMMIT.replace('0', "f"), WEIGHTS, &noise(700_000, 5));
    setup.server.fault(WEIGHTS, 1, &[Fault::Wrong(1)]);
    one_line(&setup.pull(NAME).unwrap_err(), &["expected SHA-256"]);
    assert_eq!(setup.kept(NAME).unwrap(), old);
    let new = setup.pull(NAME).unwrap();
    assert_eq!(new.bytes_downloaded, 700_000, "the other files are the same");
    assert_eq!(setup.kept(NAME).unwrap(), new.folder);
    assert!(old.join(WEIGHTS).is_file() && old != new.folder);
}

#[test]
fn shards_come_by_their_index() {
    let index =
        |last: &str| serde_json::json!({"weight_map": {"a": "m-1.safetensors", "b": last}}).to_string().into_bytes();
    let files = |last| {
        vec![
            ("config.json", b"{}".to_vec()),
            ("m-1.safetensors", noise(10, 1)),
            ("m-2.safetensors", noise(20, 2)),
            ("m-3.safetensors", noise(30, 3)),
            ("model.safetensors.index.json", index(last)),
        ]
    };
    let setup = Setup::of(files("m-2.safetensors"));
    let pulled = setup.pull(NAME).unwrap();
    let names: Vec<&str> = pulled.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["config.json", "model.safetensors.index.json", "m-1.safetensors", "m-2.safetensors"]);
    assert_eq!(setup.kept(NAME).unwrap(), pulled.folder);
    fs::remove_file(pulled.folder.join("m-2.safetensors")).unwrap();
    assert!(setup.kept(NAME).is_err(), "a shard is missing");
    let lacking = Setup::of(files("m-9.safetensors"));
    lacking.fails(NAME, &["hf:org/tiny", "names the shard m-9.safetensors, which the repository lacks"]);
    Setup::of(files("../m-2.safetensors")).fails(NAME, &["names the shard \"../m-2.safetensors\""]);
}

#[test]
fn one_file_of_many() {
    let setup =
        Setup::of(vec![("a.gguf", noise(10, 1)), ("q 8/b.gguf", noise(20, 2)), ("config.json", b"{}".to_vec())]);
    setup.fails(NAME, &["2 .gguf files", "name one of them: hf:org/tiny:a.gguf, hf:org/tiny:q 8/b.gguf"]);
    setup.fails("hf:org/tiny:c.gguf", &["hf:org/tiny:c.gguf: no such file", "hf:org/tiny:a.gguf"]);
    let pulled = setup.pull("hf:org/tiny:q 8/b.gguf").unwrap();
    assert_eq!(fs::read(&pulled.model).unwrap(), noise(20, 2));
    assert_eq!((pulled.files.len(), pulled.bytes_downloaded), (1, 20));
    assert_eq!(setup.kept("hf:org/tiny:q 8/b.gguf").unwrap(), pulled.model);
    assert!(setup.kept("hf:org/tiny:a.gguf").is_err());
}

#[test]
fn a_repository_without_a_model() {
    let setup = Setup::of(vec![("config.json", b"{}".to_vec()), ("pytorch_model.bin", noise(10, 1))]);
    setup.fails(
        NAME,
        &["hf:org/tiny: the repository has no model.safetensors", "only pytorch_model.bin", "save_pretrained"],
    );
    assert_eq!(setup.server.requests().len(), 1, "nothing was fetched");
}

#[test]
fn a_server_that_is_no_hub() {
    let setup = Setup::new();
    setup.server.fault_of_list(200, "", "<!DOCTYPE html>\n<html></html>");
    setup.fails(NAME, &["/api/models/org/tiny", "expected a list of files", "is HF_ENDPOINT a Hugging Face hub?"]);
    setup.server.fault_of_list(418, "", "");
    setup.fails(NAME, &["status 418"]);
}

#[test]
fn a_server_that_is_not_there() {
    let mut setup = Setup::new();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    setup.server.endpoint = format!("http://{nobody}");
    setup.fails(NAME, &[&format!("http://{nobody}: not reachable"), "refused", "HF_ENDPOINT"]);
}

#[test]
fn no_network_and_nothing_there() {
    let setup = Setup::new();
    let cache = setup.cache.path().display().to_string();
    for name in [NAME, "hf:org/tiny@main", "hf:org/tiny@v1"] {
        let needle = format!("{name}: not in the cache");
        one_line(&setup.kept(name).unwrap_err(), &[&needle, &cache, "HF_HUB_OFFLINE"]);
    }
    assert!(setup.server.requests().is_empty());
    assert_eq!(fs::read_dir(setup.cache.path()).unwrap().count(), 0, "nothing was written");
}

#[test]
fn a_cache_that_cannot_be_written() {
    let setup = Setup::new();
    let file = setup.cache.path().join("file");
    fs::write(&file, "mine").unwrap();
    let hub = Hub::new(Settings { cache: file.join("cache"), ..setup.settings() });
    let error = hub.pull(&NAME.parse().unwrap(), &()).unwrap_err();
    one_line(&error, &[&file.display().to_string(), "Not a directory", "HF_HUB_CACHE"]);
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

/// A device that is always full, in the place of the part.
#[test]
#[cfg(target_os = "linux")]
fn no_space_left() {
    let setup = Setup::new();
    fs::create_dir_all(setup.part(&weights()).parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("/dev/full", setup.part(&weights())).unwrap();
    setup.fails(NAME, &[".incomplete", "No space left on device", "HF_HUB_CACHE"]);
    fs::remove_file(setup.part(&weights())).unwrap();
    setup.pull(NAME).unwrap();
}
