//! A hub on this machine that serves one repository, and can be told to misbehave.
#![allow(dead_code, clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

pub const REPO: &str = "org/tiny";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong with the content of a file.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// The connection ends after so many bytes of an answer.
    Drop(usize),
    /// The connection ends at this byte of the file.
    Stuck(usize),
    /// The server says nothing more from this byte of the file on, and keeps the connection.
    Silent(usize),
    /// The server has only the first so many bytes.
    Short(usize),
    /// The byte at this place is another.
    Wrong(usize),
    /// Ranges are ignored.
    NoRanges,
    /// This status instead of the content, with an error code in the hub's words.
    Status(u16, &'static str),
    /// Too many requests, and when to come again.
    Busy(&'static str),
}

/// A request that arrived.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    headers: BTreeMap<String, String>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    commit: String,
    /// By file; how many more times.
    faults: BTreeMap<String, (usize, Vec<Fault>)>,
    /// Answers to requests for the list, before it is given.
    list_faults: Vec<(u16, &'static str, String)>,
    /// Requests for the list that get no answer.
    list_silences: usize,
    token: Option<String>,
    requests: Vec<Request>,
}

pub struct HubServer {
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

impl HubServer {
    /// Serves these files as `main` and `v1` of [`REPO`], until the process ends.
    pub fn new<'a>(files: impl IntoIterator<Item = (&'a str, Vec<u8>)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files = files.into_iter().map(|(name, content)| (name.to_string(), content)).collect();
        let state = Arc::new(Mutex::new(State { files, commit: COMMIT.into(), ..State::default() }));
        let shared = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = shared.clone();
                // A client that goes away is no failure of the server's.
                thread::spawn(move || drop(answer(&stream.unwrap(), &shared)));
            }
        });
        Self { endpoint, state }
    }

    /// All of `faults` from now on, `times` times.
    pub fn fault(&self, file: &str, times: usize, faults: &[Fault]) {
        self.state.lock().unwrap().faults.insert(file.into(), (times, faults.to_vec()));
    }

    /// The next request for the list gets this answer.
    pub fn fault_of_list(&self, status: u16, code: &'static str, body: &str) {
        self.state.lock().unwrap().list_faults.push((status, code, body.into()));
    }

    /// The next requests for the list get no answer, and the connection stays.
    pub fn silence_list(&self, times: usize) {
        self.state.lock().unwrap().list_silences = times;
    }

    /// The contents of the repository need this token.
    pub fn gate(&self, token: &str) {
        self.state.lock().unwrap().token = Some(token.into());
    }

    /// `main` becomes another commit.
    pub fn commit(&self, commit: &str, file: &str, content: &[u8]) {
        let mut state = self.state.lock().unwrap();
        state.commit = commit.into();
        state.files.insert(file.into(), content.into());
    }

    pub fn requests(&self) -> Vec<Request> {
        self.state.lock().unwrap().requests.clone()
    }

    /// Requests for the content of a file.
    pub fn requests_of(&self, file: &str) -> Vec<Request> {
        let content = self.state.lock().unwrap().files[file].clone();
        let paths = [format!("/{REPO}/resolve/{COMMIT}/{file}"), format!("/cdn/{}", sha256(&content))];
        let last = if is_large(file) { &paths[1] } else { &paths[0] };
        self.requests().into_iter().filter(|request| request.path == *last).collect()
    }
}

/// Large files are stored elsewhere and known by their SHA-256.
fn is_large(file: &str) -> bool {
    [".safetensors", ".gguf", ".onnx", ".bin"].iter().any(|ending| file.ends_with(ending))
}

pub fn sha256(content: &[u8]) -> String {
    hex(&Sha256::digest(content))
}

pub fn git_sha1(content: &[u8]) -> String {
    hex(&Sha1::digest([format!("blob {}\0", content.len()).as_bytes(), content].concat()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_string();
    let header = |line: String| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_string()));
    Some(Request { path, headers: lines.take_while(|line| !line.is_empty()).filter_map(header).collect() })
}

fn answer(mut stream: &TcpStream, shared: &Mutex<State>) -> std::io::Result<()> {
    let Some(request) = read_request(stream) else { return Ok(()) };
    let (answer, cut) = {
        let mut state = shared.lock().unwrap();
        state.requests.push(request.clone());
        if request.path.starts_with("/api/") && state.list_silences > 0 {
            state.list_silences -= 1;
            drop(state);
            return silence();
        }
        state.answer(&request, &format!("localhost:{}", stream.local_addr()?.port()))
    };
    let Answer { status, headers, body } = answer;
    let mut head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    let end = cut.as_ref().map_or(body.len(), |cut| cut.after.min(body.len()));
    stream.write_all(&body[..end])?;
    if cut.is_some_and(|cut| cut.stays) { silence() } else { Ok(()) }
}

/// Longer than any test takes.
fn silence() -> std::io::Result<()> {
    thread::sleep(Duration::from_secs(600));
    Ok(())
}

/// Where an answer ends before its end.
struct Cut {
    after: usize,
    /// Whether the connection stays.
    stays: bool,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn error(status: u16, code: &str) -> Self {
        let headers = if code.is_empty() { Vec::new() } else { vec![("X-Error-Code", code.to_string())] };
        Self { status, headers, body: b"{\"error\":\"no\"}".to_vec() }
    }
}

impl State {
    fn answer(&mut self, request: &Request, elsewhere: &str) -> (Answer, Option<Cut>) {
        let path = request.path.clone();
        if let Some(rest) = path.strip_prefix("/api/models/") {
            return (self.list(rest), None);
        }
        if let Some(wanted) = path.strip_prefix("/cdn/") {
            let file = self.files.iter().find(|(_, content)| sha256(content) == wanted).map(|(file, _)| file.clone());
            return file.map_or((Answer::error(404, ""), None), |file| self.content(&file, request));
        }
        let file = path.strip_prefix(&format!("/{REPO}/resolve/{}/", self.commit)).unwrap_or("").replace("%20", " ");
        let authorization = self.token.as_ref().map(|token| format!("Bearer {token}"));
        match self.files.get(&file) {
            None => (Answer::error(404, "EntryNotFound"), None),
            Some(_) if authorization.is_some() && request.header("authorization") != authorization.as_deref() => {
                let status = if request.header("authorization").is_some() { 403 } else { 401 };
                (Answer::error(status, "GatedRepo"), None)
            }
            Some(content) if is_large(&file) => {
                let location = format!("http://{elsewhere}/cdn/{}", sha256(content));
                let headers = vec![("Location", location), ("X-Linked-Etag", format!("\"{}\"", sha256(content)))];
                (Answer { status: 302, headers, body: Vec::new() }, None)
            }
            Some(_) => self.content(&file, request),
        }
    }

    fn list(&mut self, rest: &str) -> Answer {
        if let Some((status, code, body)) = self.list_faults.pop() {
            return Answer { body: body.into_bytes(), ..Answer::error(status, code) };
        }
        let (repo, revision) = rest.trim_end_matches("?blobs=true").split_once("/revision/").unwrap_or((rest, "main"));
        match (repo, revision) {
            (REPO, "main" | "v1" | "feature%2Fx") => {}
            (REPO, commit) if commit == self.commit => {}
            (REPO, _) => return Answer::error(404, "RevisionNotFound"),
            _ => return Answer::error(404, "RepoNotFound"),
        }
        let sibling = |(file, content): (&String, &Vec<u8>)| {
            let mut sibling =
                serde_json::json!({"rfilename": file, "size": content.len(), "blobId": git_sha1(content)});
            if is_large(file) {
                sibling["lfs"] =
                    serde_json::json!({"sha256": sha256(content), "size": content.len(), "pointerSize": 134});
            }
            sibling
        };
        let siblings: Vec<_> = self.files.iter().map(sibling).collect();
        let body = serde_json::json!({"id": REPO, "sha": self.commit, "siblings": siblings}).to_string().into_bytes();
        Answer { status: 200, headers: vec![("Content-Type", "application/json".into())], body }
    }

    /// The content of a file or what a range asks for, and where that ends early.
    fn content(&mut self, file: &str, request: &Request) -> (Answer, Option<Cut>) {
        let faults = match self.faults.get_mut(file) {
            Some((times, faults)) if *times > 0 => {
                *times -= 1;
                faults.clone()
            }
            _ => Vec::new(),
        };
        let mut content = self.files[file].clone();
        let (mut drop_after, mut stuck, mut stays, mut ranges) = (None, None, false, true);
        for fault in faults {
            match fault {
                Fault::Drop(bytes) => drop_after = Some(bytes),
                Fault::Stuck(at) => stuck = Some(at),
                Fault::Silent(at) => (stuck, stays) = (Some(at), true),
                Fault::Short(bytes) => content.truncate(bytes),
                Fault::Wrong(at) => content[at] ^= 1,
                Fault::NoRanges => ranges = false,
                Fault::Status(status, code) => return (Answer::error(status, code), None),
                Fault::Busy(when) => {
                    let mut answer = Answer::error(429, "");
                    answer.headers.push(("Retry-After", when.into()));
                    return (answer, None);
                }
            }
        }
        let from = request.header("range").filter(|_| ranges).and_then(|range| {
            range.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-')).and_then(|from| from.parse().ok())
        });
        let drop_after = drop_after.or(stuck.map(|at: usize| at.saturating_sub(from.unwrap_or(0))));
        let answer = match from {
            None => Answer { status: 200, headers: Vec::new(), body: content },
            Some(from) if from >= content.len() => Answer::error(416, ""),
            Some(from) => {
                let range = format!("bytes {from}-{}/{}", content.len() - 1, content.len());
                Answer { status: 206, headers: vec![("Content-Range", range)], body: content[from..].to_vec() }
            }
        };
        (answer, drop_after.map(|after| Cut { after, stays }))
    }
}
