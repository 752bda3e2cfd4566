//! Models by their names on a hub: pulled, used, and kept for days without a network.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
#[path = "../../headq-hub/tests/hub_server/mod.rs"]
mod hub_server;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{BASE, GQA, World, config};
use hub_server::{COMMIT, Fault, HubServer, sha256};
use serde_json::Value;

const NAME: &str = "hf:org/tiny";
const WEIGHTS: &str = "model.safetensors";
const EVAL: &[&str] = &["--text", "text.txt", "--context", "32", "--windows", "2", "--scheme", BASE, "--json", "-q"];

/// A tiny model in a folder and on a hub, and an empty cache.
struct Setup {
    world: World,
    server: HubServer,
}

impl Setup {
    fn new() -> Self {
        let world = World::new(GQA);
        let read = |file: &'static str| (file, world.read(&format!("model/{file}")));
        let server = HubServer::new(["config.json", "tokenizer.json", WEIGHTS].map(read));
        Self { world, server }
    }

    /// The same with other files on the hub.
    fn of<const N: usize>(files: [(&str, Vec<u8>); N]) -> Self {
        Self { server: HubServer::new(files), world: World::new(GQA) }
    }

    fn command(&self, args: &[&str], variables: &[(&str, &str)]) -> Command {
        let mut command = self.world.command(args);
        for inherited in
            ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_HUB_DOWNLOAD_TIMEOUT", "XDG_CACHE_HOME"]
        {
            command.env_remove(inherited);
        }
        command.env("HF_HOME", self.world.path("cache")).env("HF_ENDPOINT", &self.server.endpoint);
        command.envs(variables.iter().copied());
        command
    }

    fn run(&self, args: &[&str], variables: &[(&str, &str)]) -> Output {
        self.command(args, variables).output().unwrap()
    }

    /// What was pulled is what is on the hub.
    #[track_caller]
    fn has_the_model(&self) {
        let identity = |model| {
            let printed = self.prints(&["inspect", model, "--fingerprint", "--json"], &[("HF_HUB_OFFLINE", "1")]);
            printed["fingerprint"].clone()
        };
        assert_eq!(identity(NAME), identity("model"));
    }

    /// The one JSON object that a command prints.
    #[track_caller]
    fn prints(&self, args: &[&str], variables: &[(&str, &str)]) -> Value {
        let output = self.run(args, variables);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Fails with this status and one line that has all of `needles`.
    #[track_caller]
    fn fails(&self, status: i32, args: &[&str], variables: &[(&str, &str)], needles: &[&str]) {
        let output = self.run(&[args, &["--quiet"]].concat(), variables);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{args:?}: {error}");
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{args:?}: {error}");
        assert!(output.stdout.is_empty() && !error.contains("panicked"), "{args:?}: {error}");
        for needle in needles {
            assert!(error.contains(needle), "{needle:?} is not in: {error}");
        }
    }
}

#[test]
fn a_pulled_model_is_used_without_a_network() {
    let setup = Setup::new();
    let pulled = setup.prints(&["pull", NAME, "--json"], &[]);
    let weights = setup.world.read("model/model.safetensors");
    assert_eq!(
        (&pulled["repo"], &pulled["revision"], &pulled["commit"]),
        (&"org/tiny".into(), &"main".into(), &COMMIT.into())
    );
    let folder = pulled["folder"].as_str().unwrap();
    assert!(folder.starts_with(setup.world.path("cache/hub").to_str().unwrap()), "{folder}");
    let file = pulled["files"].as_array().unwrap().iter().find(|file| file["name"] == WEIGHTS).unwrap();
    assert_eq!((file["size"].as_u64(), &file["sha256"]), (Some(weights.len() as u64), &sha256(&weights).into()));
    let total: u64 = pulled["files"].as_array().unwrap().iter().map(|file| file["size"].as_u64().unwrap()).sum();
    assert_eq!(pulled["bytes_downloaded"].as_u64(), Some(total));

    let requests = setup.server.requests().len();
    let offline = [("HF_HUB_OFFLINE", "1")];
    let [by_name, by_path] =
        [NAME, "model"].map(|model| setup.prints(&["inspect", model, "--fingerprint", "--json"], &offline));
    assert_eq!(by_name["model"], NAME);
    assert_eq!(by_name["fingerprint"], by_path["fingerprint"]);
    assert_eq!(setup.prints(&["pull", NAME, "--json"], &offline)["bytes_downloaded"], 0);
    assert_eq!(setup.server.requests().len(), requests);
}

#[test]
fn commands_and_runs_fetch_what_is_not_there() {
    let setup = Setup::new();
    let [by_name, by_path] = [NAME, "model"].map(|model| setup.prints(&[&["eval", model], EVAL].concat(), &[]));
    assert_eq!(by_name["schemes"], by_path["schemes"]);
    assert_eq!((&by_name["model"], setup.server.requests_of(WEIGHTS).len()), (&NAME.into(), 1));
    let name = format!("{NAME}@{COMMIT}");
    setup.world.write("run.toml", config(2).replace("\"model\"", &format!("\"{name}\"")));
    let report = setup.prints(&["run", "run.toml", "--out", "made", "--json", "-q"], &[]);
    assert_eq!(report["model"], name.as_str());
    assert_eq!(setup.world.json("made/run.json")["config"]["model"], name.as_str());
}

#[test]
fn progress_goes_to_standard_error() {
    let setup = Setup::new();
    let output = setup.run(&["pull", NAME], &[]);
    let (out, notes) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(out.contains(COMMIT) && out.contains("all files checked") && out.contains(WEIGHTS), "{out}");
    assert!(notes.lines().any(|line| line.starts_with("model.safetensors: ") && line.contains("MB in")), "{notes}");
    assert!(setup.run(&["pull", NAME, "-q"], &[]).stderr.is_empty());
}

#[test]
fn what_a_hub_refuses() {
    let setup = Setup::new();
    let inspect = |name| ["inspect", name];
    setup.fails(1, &["pull", "hf:org/other"], &[], &["org/other: no such repository"]);
    setup.fails(1, &inspect("hf:org/other"), &[], &["org/other: no such repository"]);
    setup.fails(1, &inspect("hf:org/tiny@v9"), &[], &["no revision 'v9'"]);
    setup.fails(1, &inspect("hf:org/tiny:x.gguf"), &[], &["hf:org/tiny:x.gguf: no such file in the repository"]);
    setup.server.gate("hf_right");
    setup.fails(1, &inspect(NAME), &[], &["(401)", "set HF_TOKEN or run `hf auth login`"]);
    setup.fails(1, &inspect(NAME), &[("HF_TOKEN", "hf_wrong")], &["(403)", "the token has no access"]);
    setup.world.write("token", "hf_right\n");
    setup.prints(&["inspect", NAME, "--json"], &[("HF_TOKEN_PATH", "token")]);
}

#[test]
fn bytes_that_are_not_the_models() {
    let setup = Setup::new();
    setup.server.fault(WEIGHTS, 1, &[Fault::Wrong(5000)]);
    setup.fails(1, &[&["eval", NAME], &EVAL[..8]].concat(), &[], &["org/tiny: model.safetensors: expected SHA-256"]);
    setup.fails(
        1,
        &["inspect", NAME],
        &[("HF_HUB_OFFLINE", "1")],
        &["hf:org/tiny: not in the cache", "HF_HUB_OFFLINE"],
    );
    setup.world.write("run.toml", config(2).replace("\"model\"", "\"hf:org/tiny\""));
    setup.server.fault(WEIGHTS, 1, &[Fault::Wrong(5000)]);
    setup.fails(1, &["run", "run.toml", "--out", "made"], &[], &["expected SHA-256"]);
    assert!(!setup.world.path("made").exists());
}

#[test]
fn a_server_that_goes_silent() {
    let setup = Setup::new();
    let quickly = [("HF_HUB_DOWNLOAD_TIMEOUT", "0.2")];
    setup.server.fault(WEIGHTS, usize::MAX, &[Fault::Silent(40_000)]);
    let needles =
        ["org/tiny: model.safetensors", "broke off at 40000 of", "(no byte in 0.2 s)", "pull again to resume"];
    setup.fails(1, &["pull", NAME], &quickly, &needles);
    let offline = [("HF_HUB_OFFLINE", "1")];
    setup.fails(1, &["inspect", "hf:org/tiny@main"], &offline, &["hf:org/tiny@main: not in the cache"]);
    setup.server.fault(WEIGHTS, 1, &[Fault::Silent(50_000)]);
    setup.prints(&["pull", NAME, "--json"], &quickly);
    setup.has_the_model();
}

/// Ctrl-C while the server says nothing, long before its time is up; what had arrived does not come again.
#[test]
#[cfg(unix)]
fn an_interrupted_pull_goes_on_where_it_was() {
    let setup = Setup::new();
    setup.server.fault(WEIGHTS, 1, &[Fault::Silent(40_000)]);
    let mut command = setup.command(&["pull", NAME], &[]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let part = setup.world.path("cache/hub/models--org--tiny/blobs");
    let part = part.join(format!("{}.incomplete", sha256(&setup.world.read("model/model.safetensors"))));
    let start = Instant::now();
    while std::fs::metadata(&part).map_or(0, |part| part.len()) < 40_000 {
        assert!(start.elapsed() < Duration::from_secs(20), "nothing arrives");
        std::thread::sleep(Duration::from_millis(5));
    }
    let start = Instant::now();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("\nerror: interrupted"), "{error}");
    assert!(output.stdout.is_empty() && start.elapsed() < Duration::from_secs(10), "{error}");
    setup.fails(1, &["inspect", NAME], &[("HF_HUB_OFFLINE", "1")], &["hf:org/tiny: not in the cache"]);
    setup.prints(&["pull", NAME, "--json"], &[]);
    assert_eq!(setup.server.requests_of(WEIGHTS).pop().unwrap().header("range"), Some("bytes=40000-"));
    setup.has_the_model();
}

#[test]
fn a_model_in_parts_is_not_fetched() {
    let setup = Setup::of(["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"].map(|file| (file, vec![0; 100])));
    for name in [NAME, "hf:org/tiny:m-00001-of-00002.gguf"] {
        setup.fails(1, &["inspect", name], &[], &["m-00001-of-00002.gguf is one of 2 files", "gguf-split --merge"]);
    }
    assert!(setup.server.requests().iter().all(|request| !request.path.contains("resolve")), "something was fetched");
}

#[test]
fn names_and_settings_that_make_no_sense() {
    let setup = Setup::new();
    for name in
        ["hf:", "hf:tiny", "hf:../tiny", "hf:org/..", "hf:org/tiny@../x", "hf:org/tiny:../x.gguf", "hf:/etc/passwd"]
    {
        for command in ["pull", "inspect"] {
            setup.fails(2, &[command, name], &[], &[name, "expected hf:ORG/NAME[@REV][:FILE]"]);
        }
    }
    setup.fails(2, &["pull", "model"], &[], &["model: it does not begin with hf:"]);
    setup.world.write("run.toml", config(2).replace("\"model\"", "\"hf:org\""));
    setup.fails(1, &["run", "run.toml"], &[], &["run.toml", "'org' is not ORG/NAME"]);
    for endpoint in ["mirror", "http://"] {
        let found = format!("found '{endpoint}'");
        setup.fails(1, &["pull", NAME], &[("HF_ENDPOINT", endpoint)], &["HF_ENDPOINT: expected an address", &found]);
    }
    let patience = ("HF_HUB_DOWNLOAD_TIMEOUT", "soon");
    setup.fails(1, &["pull", NAME], &[patience], &["HF_HUB_DOWNLOAD_TIMEOUT: expected seconds", "'soon'"]);
    setup.fails(1, &["pull", NAME], &[("HF_TOKEN", "hf_ö")], &["HF_TOKEN: expected an access token"]);
    let cache = setup.world.path("text.txt/cache");
    setup.fails(1, &["pull", NAME], &[("HF_HUB_CACHE", cache.to_str().unwrap())], &["text.txt/cache", "HF_HUB_CACHE"]);
    assert!(setup.server.requests().iter().all(|request| !request.path.contains("resolve")), "nothing was fetched");
}
