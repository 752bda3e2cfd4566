//! The same results on every backend that this build has and this machine can run, against those on Flex; and devices by name.
//!
//! Build with `--features ndarray,wgpu,remote` to have them all; what is left out is printed.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{DIAGNOSE, GQA, SMALL, World};
use headq::basis::descending_eigen;
use headq::device::Backend;
use headq_lab::artifact::{BasisArtifact, StatsArtifact};
use headq_lab::compare::angles::principal_angles;
use nalgebra::DMatrix;
use serde_json::Value;

/// The embedded model's quickstart with fewer windows.
const QUICK: &str = r#"
name = "parity"
model = "model"
seed = 1
pass = "tensors"
[calibrate]
text = "other.txt"
context = 256
windows = 8
[eval]
text = "text.txt"
context = 256
windows = 4
schemes = [
  "kivi-2(g=32,r=32)",
  "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)",
  "kivi-2(g=32,r=32)+score-optimal(rank=4,bits=3)",
  "kivi-2(g=32,r=32)+random(rank=4,bits=4)",
  "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4,sign=-1)",
  "kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)",
  "token-3(g=32,r=32)/a2-2(c=32)",
  "rotated-2(g=32,r=32)",
  "grid-3(g=32,r=32,center)",
  "klt-2(g=32,r=32)",
  "klt-1.5(g=32,r=32,ranges=static)",
  "kivi-2(g=32,r=32,rounding=score-aware)",
]
"#;

/// A device lent by `headq serve`, until it is dropped.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn new(device: &str, token: Option<&str>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_headq"));
        command.args(["serve", "--device", device, "--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
        token.map(|t| command.env("HEADQ_REMOTE_TOKEN", t));
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.split_once("ws://").unwrap().1.split(';').next().unwrap();
        Self { url: format!("ws://{url}"), child }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Devices that are here, first of each backend, as `headq devices` says; and why others are not.
fn present(world: &World) -> (Vec<String>, Vec<String>) {
    let listed = world.prints(&["devices"]);
    let mut present = Vec::new();
    let mut absent = Vec::new();
    for backend in listed["backends"].as_array().unwrap() {
        match backend["devices"].as_array().unwrap().first() {
            Some(device) => present.push(device["device"].as_str().unwrap().to_owned()),
            None if backend["backend"] == "remote" && backend["built"] == true => {}
            None => absent.push(format!("{}: {}", backend["backend"], backend["problem"])),
        }
    }
    (present, absent)
}

fn run(world: &World, device: &str) -> Value {
    let out = device.replace([':', '/'], "_");
    world.prints(&["run", "run.toml", "--device", device, "--out", &out, "--quiet"])
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[track_caller]
fn close(what: &str, found: f64, expected: f64, relative: f64) {
    assert!((found - expected).abs() <= relative * expected.abs(), "{what}: {found}, on flex {expected}");
}

/// Perplexities to 0.1 %, storage error to 0.1 %, what depends on it through the model to 1 %, and bits exactly: a code that rounds
/// the other way changes an error in the third digit.
fn assert_parity(device: &str, found: &Value, flex: &Value) {
    let (found, flex) = (found["schemes"].as_array().unwrap(), flex["schemes"].as_array().unwrap());
    assert_eq!(found.len(), flex.len());
    for (a, b) in found.iter().zip(flex) {
        assert_eq!(a["scheme"], b["scheme"]);
        for (field, tolerance) in
            [("ppl", 1e-3), ("key_mse", 1e-3), ("fisher", 1e-2), ("kl", 1e-2), ("output_error", 1e-2)]
        {
            let what = format!("{device}, {}, {field}", a["scheme"]);
            match (&a[field], &b[field]) {
                (Value::Null, Value::Null) => {}
                (a, b) => close(&what, number(a), number(b), tolerance),
            }
        }
        for field in ["key_bits", "value_bits", "cache_bits", "bytes_per_token"] {
            assert_eq!(a[field], b[field], "{device}, {}, {field}", a["scheme"]);
        }
    }
}

fn decoder(artifact: &BasisArtifact, layer: usize, head: usize) -> DMatrix<f64> {
    let b = &artifact.basis;
    let size = b.head_dim * b.rank;
    let all = &b.decoder[(layer * b.side_heads + head) * size..][..size];
    DMatrix::from_row_iterator(b.head_dim, b.rank, all.iter().map(|&x| f64::from(x)))
}

/// Query-PCA bases span the same spaces to 1e-3 wherever the spectrum says which space that is: λ_r/λ_{r+1} ≥ 1.05.
fn assert_bases_agree(device: &str, found: &Path, flex: &Path) -> usize {
    let basis = "basis-query-pca-rank4-kv-head-kivi-2_g32_r32.safetensors";
    let stats = StatsArtifact::load(&flex.join("stats-kivi-2_g32_r32.safetensors")).unwrap();
    let (found, flex) =
        (BasisArtifact::load(&found.join(basis)).unwrap(), BasisArtifact::load(&flex.join(basis)).unwrap());
    let mut compared = 0;
    for (layer, moments) in stats.layers.iter().enumerate() {
        for head in 0..flex.basis.side_heads {
            let spectrum = descending_eigen(moments.pooled_queries(head).second()).0;
            if spectrum[3] < 1.05 * spectrum[4] {
                continue;
            }
            let angles = principal_angles(&decoder(&found, layer, head), &decoder(&flex, layer, head));
            assert!(angles.iter().all(|a| *a <= 1e-3), "{device}, layer {layer}, head {head}: {angles:?}");
            compared += 1;
        }
    }
    compared
}

/// Every device but Flex: those that are here, and Flex lent by a server.
struct Others {
    devices: Vec<String>,
    _server: Option<Server>,
}

impl Others {
    fn new(world: &World) -> Self {
        let (mut devices, absent) = present(world);
        assert!(devices.contains(&"flex".to_string()));
        devices.retain(|d| d != "flex");
        let server = Backend::Remote.is_built().then(|| Server::new("flex", None));
        devices.extend(server.iter().map(|s| format!("remote:{}", s.url)));
        absent.iter().for_each(|a| println!("skipped: {a}"));
        Self { devices, _server: server }
    }
}

/// Numbers of two results, each by its path; `tolerance` gives what they may differ by, relative and absolute, or leaves a path out.
/// Everything else in them is the same, and nothing is defined in one of them only.
#[track_caller]
fn assert_alike(device: &str, found: &Value, flex: &Value, tolerance: &dyn Fn(&str) -> Option<(f64, f64)>) -> usize {
    let (mut compared, mut wrong) = (0, Vec::new());
    let mut open = vec![(String::new(), found, flex)];
    while let Some((path, a, b)) = open.pop() {
        let Some((relative, absolute)) = tolerance(&path) else { continue };
        match (a, b) {
            (Value::Object(x), Value::Object(y)) if x.keys().eq(y.keys()) => {
                open.extend(x.iter().zip(y.values()).map(|((key, x), y)| (format!("{path}/{key}"), x, y)));
            }
            (Value::Array(x), Value::Array(y)) if x.len() == y.len() => {
                open.extend(x.iter().zip(y).enumerate().map(|(i, (x, y))| (format!("{path}/{i}"), x, y)));
            }
            (Value::Number(x), Value::Number(y)) => {
                let (x, y) = (x.as_f64().unwrap(), y.as_f64().unwrap());
                if (x - y).abs() > absolute + relative * y.abs() {
                    wrong.push(format!("{path}: {x}, on flex {y}"));
                }
                compared += 1;
            }
            _ if a == b => {}
            _ => wrong.push(format!("{path}: {a}, on flex {b}")),
        }
    }
    assert!(
        wrong.is_empty(),
        "{device}: {} of {compared} differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(40)].join("\n")
    );
    compared
}

#[test]
fn every_device_gives_the_results_of_flex() {
    let world = World::embedded();
    world.write("run.toml", QUICK);
    let flex = run(&world, "flex");
    assert_eq!(flex["device"], "flex");
    let others = Others::new(&world);
    for device in &others.devices {
        let found = run(&world, device);
        assert!(found["device"].as_str().unwrap().starts_with(device.as_str()), "{}", found["device"]);
        assert_parity(device, &found, &flex);
        let folder = world.path(&device.replace([':', '/'], "_"));
        let compared = assert_bases_agree(device, &folder, &world.path("flex"));
        assert!(compared > 0, "no head has a gap");
        let report = std::fs::read_to_string(folder.join("report.md")).unwrap();
        assert!(report.contains(device.as_str()), "the report does not name {device}");
        println!("compared with flex: {device}, {compared} bases");
    }
}

/// 4 windows of 64 to train on, 2 held out, 6 steps of the optimizer.
const FINETUNE: &str = "finetune model --text text.txt --context 64 --windows 4 --held-out 2 --stats stats.safetensors \
    --scheme kivi-2(g=8,r=4)+learned(rank=2,bits=3) --train-clip --steps 6 --measure-every 3 --warmup 2 --quiet";

/// Fine-tunes on a device: what it prints, and where the basis is.
fn finetune(world: &World, device: &str, loss: &str) -> (Value, String) {
    let out = format!("{loss}-{}.safetensors", device.replace([':', '/'], "_"));
    let args: Vec<&str> = FINETUNE.split_whitespace().collect();
    (world.prints(&[&args[..], &["--loss", loss, "--device", device, "--out", &out]].concat()), out)
}

/// Losses before training to 0.1 %; after it to `loss`, relative, and every column of every U within `angle` of the span that Flex comes
/// to. A code that rounds the other way changes a gradient, and the optimizer takes steps of one size whatever the gradient's: weights
/// that differ in the seventh digit move what is trained as far.
fn assert_training_agrees(
    world: &World,
    device: &str,
    (made, basis): &(Value, String),
    flex: &(Value, String),
    (loss, angle): (f64, f64),
) {
    for (when, tolerance) in [("uncorrected", 1e-3), ("initial", 1e-3), ("trained", loss)] {
        let held_out = |made: &Value| number(&made["held_out"][when]);
        close(&format!("{device}, {when}"), held_out(made), held_out(&flex.0), tolerance);
    }
    assert!(number(&made["held_out"]["trained"]) < number(&made["held_out"]["initial"]), "{made:#}");
    let load = |name: &str| BasisArtifact::load(&world.path(name)).unwrap();
    let (found, flex) = (load(basis), load(&flex.1));
    for layer in 0..found.basis.layers {
        for head in 0..found.basis.side_heads {
            let angles = principal_angles(&decoder(&found, layer, head), &decoder(&flex, layer, head));
            assert!(angles.iter().all(|a| *a <= angle), "{device}, layer {layer}, head {head}: {angles:?}");
        }
    }
}

#[test]
fn every_device_trains_the_basis_of_flex() {
    let world = World::embedded().calibrated();
    let flex = finetune(&world, "flex", "kl");
    let others = Others::new(&world);
    for device in &others.devices {
        assert_training_agrees(&world, device, &finetune(&world, device, "kl"), &flex, (5e-3, 0.1));
        println!("trained as on flex: {device}");
    }
}

/// Every number that a comparison finds.
#[test]
fn every_device_compares_as_flex_does() {
    let world = World::embedded().calibrated();
    let args = "compare model --text text.txt --context 64 --windows 4 --scheme kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)/token-2(c=8) \
        --stats stats.safetensors --family query-pca --family score-optimal --family random --quiet";
    let args: Vec<&str> = args.split_whitespace().collect();
    let compared = |device: &str| world.prints(&[&args[..], &["--device", device]].concat());
    let flex = compared("flex");
    let others = Others::new(&world);
    for device in &others.devices {
        let found = compared(device);
        assert!(found["device"].as_str().unwrap().starts_with(device.as_str()), "{}", found["device"]);
        let numbers = assert_alike(device, &found, &flex, &|path| match path {
            "/device" => None,
            // Between numbers that differ in the third digit.
            path if path.ends_with("/heads_better") => None,
            // An end of a bootstrap interval over a few windows moves as far as the most extreme of them does.
            path if path.ends_with("/low") || path.ends_with("/high") => Some((2e-2, 1e-2)),
            _ => Some((2e-2, 2e-3)),
        });
        println!("compared as on flex: {device}, {numbers} numbers");
    }
}

/// Every number that the evidence chain finds, and every verdict.
#[test]
fn every_device_diagnoses_as_flex_does() {
    let world = World::new(GQA);
    let diagnosis = |device: &str| {
        let out = device.replace([':', '/'], "_");
        let args: Vec<&str> = DIAGNOSE[..4].iter().chain(&SMALL).copied().collect();
        let args = [&args[..], &["--device", device, "--out", &out, "--quiet"]].concat();
        world.succeeds(&args);
        world.json(&format!("{out}/diagnosis.json"))
    };
    let flex = diagnosis("flex");
    let others = Others::new(&world);
    for device in &others.devices {
        let found = diagnosis(device);
        assert!(found["device"].as_str().unwrap().starts_with(device.as_str()), "{}", found["device"]);
        let numbers = assert_alike(device, &found, &flex, &|path| match path {
            "/device" | "/command" | "/name" => None,
            // Numbers in words; an order among equals; the quotient of two differences that are next to nothing.
            path if ["/because", "/would_change", "/excess_removed"].iter().any(|end| path.ends_with(end)) => None,
            path if path.starts_with("/counterexamples/strongest") => None,
            _ => Some((3e-2, 2e-3)),
        });
        println!("diagnosed as on flex: {device}, {numbers} numbers");
    }
}

/// Half precision moves perplexity by its rounding, and not at all where the weights are as they were.
#[test]
fn half_precision_is_close() {
    let world = World::embedded();
    let eval =
        ["eval", "model", "--text", "text.txt", "--context", "256", "--windows", "4", "--scheme", "dense", "--quiet"];
    let (devices, _) = present(&world);
    for device in devices {
        let on = |dtype: &str| world.run(&[&eval[..], &["--json", "--device", &device, "--dtype", dtype]].concat());
        let ppl = |output: &std::process::Output| {
            let json: Value = serde_json::from_slice(&output.stdout).unwrap();
            (number(&json["schemes"][0]["ppl"]), json["device"].as_str().unwrap().to_owned())
        };
        let (full, _) = ppl(&on("f32"));
        for (dtype, tolerance) in [("f16", 2e-3), ("bf16", 2e-2)] {
            let output = on(dtype);
            if !output.status.success() {
                let error = String::from_utf8(output.stderr).unwrap();
                let line =
                    error.lines().find(|line| line.starts_with("error: ") && line.contains(&format!("has no {dtype}")));
                println!("skipped: {device}, {}", line.unwrap_or_else(|| panic!("{error}")));
                continue;
            }
            let (half, label) = ppl(&output);
            assert!(label.ends_with(&format!(", {dtype} weights")), "{label}");
            assert_ne!(half, full, "{device}, {dtype}: not rounded at all");
            close(&format!("{device}, {dtype}"), half, full, tolerance);
        }
    }
}

#[test]
fn devices_lists_every_backend() {
    let world = World::new(GQA);
    let listed = world.prints(&["devices"]);
    let names: Vec<&str> =
        listed["backends"].as_array().unwrap().iter().map(|b| b["backend"].as_str().unwrap()).collect();
    assert_eq!(names, ["flex", "ndarray", "cuda", "wgpu", "remote"]);
    for backend in listed["backends"].as_array().unwrap() {
        let built = backend["built"] == true;
        let named = backend["problem"].as_str().is_some_and(|p| p.contains("--features"));
        assert_ne!(built, named, "{backend}");
    }
}

#[cfg(feature = "remote")]
mod remote {
    use super::*;
    use common::BASE;

    const EVAL: [&str; 10] =
        ["eval", "model", "--text", "text.txt", "--context", "32", "--windows", "2", "--scheme", BASE];

    #[track_caller]
    fn refused(world: &World, device: &str, token: Option<&str>, needles: &[&str]) {
        let mut command = world.command(&[&EVAL[..], &["--device", device, "--quiet"]].concat());
        command.env_remove("HEADQ_REMOTE_TOKEN");
        token.map(|t| command.env("HEADQ_REMOTE_TOKEN", t));
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
        needles.iter().for_each(|n| assert!(error.contains(n), "{n:?} is not in: {error}"));
    }

    #[test]
    fn tokens_and_numbers_are_checked() {
        let world = World::new(GQA);
        let server = Server::new("flex", Some("sesame"));
        let device = format!("remote:{}", server.url);
        refused(&world, &device, None, &["token", "HEADQ_REMOTE_TOKEN"]);
        refused(&world, &device, Some("parsley"), &["token"]);
        refused(&world, &format!("{device}#1"), Some("sesame"), &["1 device"]);
        let mut command = world.command(&[&EVAL[..], &["--device", &device, "--quiet"]].concat());
        assert!(command.env("HEADQ_REMOTE_TOKEN", "sesame").status().unwrap().success());
    }

    /// End to end: the gradients of all layers go through the frozen model on the other side.
    #[test]
    fn end_to_end_training_on_a_remote_device() {
        let world = World::embedded().calibrated();
        let server = Server::new("flex", None);
        let device = format!("remote:{}", server.url);
        let flex = finetune(&world, "flex", "logits");
        assert_training_agrees(&world, &device, &finetune(&world, &device, "logits"), &flex, (2e-2, 0.15));
    }

    #[test]
    fn nobody_there() {
        let world = World::new(GQA);
        refused(&world, "remote:ws://127.0.0.1:9", None, &["127.0.0.1:9", "headq serve"]);
    }

    #[test]
    fn a_port_that_is_taken() {
        let world = World::new(GQA);
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let output = world.run(&["serve", "--listen", &address]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && error.contains(&address) && error.lines().count() == 1, "{error}");
    }
}
