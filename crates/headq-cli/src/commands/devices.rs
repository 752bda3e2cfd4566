//! `headq devices`, and the check of a device before it is used.
//!
//! A driver that is installed but broken can panic, hang or end the process at the first tensor. So devices that have a driver are tried
//! by a child of this process (`headq devices --probe D`), and what it says is passed on.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use comfy_table::{Table, presets};
use headq::device::{Backend, DeviceName, exercise, identity};
use headq_lab::LabError;
use serde_json::{Value, json};

use super::Context;
use crate::args::Devices;

/// A device that has not answered by then is taken as broken. Compiling the first kernels takes seconds.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn run(context: &Context, args: &Devices) -> Result<(), LabError> {
    if let Some(name) = &args.probe {
        let found = probe(name)?;
        return context.print(|| Value::Array(found.iter().map(Found::json).collect()), || lines(&found));
    }
    let rows: Vec<(Backend, Result<Vec<Found>, String>)> = Backend::ALL.into_iter().map(|b| (b, survey(b))).collect();
    context.print(
        || {
            let row = |(backend, devices): &(Backend, Result<Vec<Found>, String>)| {
                json!({
                    "backend": backend.name(),
                    "built": backend.is_built(),
                    "devices": devices.iter().flatten().map(Found::json).collect::<Vec<_>>(),
                    "problem": devices.as_ref().err(),
                })
            };
            json!({ "backends": rows.iter().map(row).collect::<Vec<_>>() })
        },
        || table(&rows),
    )
}

/// Fails where a device that has a driver is not there, or does not work.
///
/// # Errors
/// One line: what the device, or its driver, says.
pub fn check(name: &DeviceName) -> Result<(), LabError> {
    let backend = name.backend();
    if !(backend.has_driver() && backend.is_built()) {
        return Ok(());
    }
    let device = name.to_string();
    in_child(&device).map_err(|reason| headq::Error::Device { device, reason })?;
    Ok(())
}

/// A device that is there and works.
struct Found {
    device: String,
    what: Option<String>,
}

impl Found {
    fn json(&self) -> Value {
        json!({ "device": self.device, "name": self.what })
    }

    fn parse(value: &Value) -> Option<Self> {
        let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        Some(Self { device: text("device")?, what: text("name") })
    }
}

fn lines(found: &[Found]) -> String {
    found.iter().map(|f| format!("{}  {}\n", f.device, f.what.as_deref().unwrap_or_default())).collect()
}

/// Opens and exercises a device, or every device of a backend given without a number.
fn probe(name: &str) -> Result<Vec<Found>, LabError> {
    let asked: DeviceName = name.parse()?;
    let names = match asked {
        DeviceName::Cuda(_) | DeviceName::Wgpu(_) if !name.contains(':') => {
            let numbered = |i: usize| match asked.backend() {
                Backend::Cuda => DeviceName::Cuda(i),
                _ => DeviceName::Wgpu(Some(i)),
            };
            // The first must be there; the others end at the first that is not.
            (0..).map(numbered).take_while(|n| *n == numbered(0) || n.open().is_ok()).collect()
        }
        _ => vec![asked],
    };
    names
        .into_iter()
        .map(|name| {
            let device = name.open()?;
            exercise(&device).map_err(|reason| headq::Error::Device { device: name.to_string(), reason })?;
            let device_text = match &name {
                DeviceName::Cuda(i) => format!("cuda:{i}"),
                other => other.to_string(),
            };
            Ok(Found { device: device_text, what: identity(&device) })
        })
        .collect()
}

/// The devices of a backend, or why there are none.
fn survey(backend: Backend) -> Result<Vec<Found>, String> {
    let cpu = |device: &str| {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Ok(vec![Found { device: device.into(), what: Some(format!("CPU, {cores} cores")) }])
    };
    match backend {
        b if !b.is_built() => Err(format!("not in this build; `cargo build --release --features {b}`")),
        Backend::Flex | Backend::NdArray => cpu(backend.name()),
        Backend::Remote => Ok(Vec::new()),
        Backend::Cuda | Backend::Wgpu => in_child(backend.name()),
    }
}

/// Probes in a child process; the error is what is wrong with the device.
fn in_child(name: &str) -> Result<Vec<Found>, String> {
    let program = std::env::current_exe().map_err(|e| format!("cannot find this program's own file: {e}"))?;
    let mut child = Command::new(program)
        .args(["devices", "--json", "--quiet", "--probe", name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot start a process to try it in: {e}"))?;
    // Read on threads of their own, so that a talkative driver cannot fill a pipe and stand still.
    let mut pipes = (child.stdout.take(), child.stderr.take());
    let read = |pipe: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // What was read before an error is what there is to tell.
            let _ = pipe.map(|mut p| p.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let out = read(pipes.0.take().map(|p| Box::new(p) as _));
    let err = read(pipes.1.take().map(|p| Box::new(p) as _));
    let begun = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if begun.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                // It may have ended by itself just now.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("it does not answer within {} s", PATIENCE.as_secs()));
            }
            Err(e) => return Err(e.to_string()),
        }
    };
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    if !status.success() {
        // The program's own errors are whole lines; anything else is a driver's.
        let own = err.lines().rev().find_map(|line| line.strip_prefix("error: device '")?.split_once("': "));
        return Err(
            own.map_or_else(|| format!("its driver fails: {}", last_words(&err, &status)), |(_, r)| r.to_owned())
        );
    }
    let found = serde_json::from_str::<Value>(&out).ok();
    let found = found.as_ref().and_then(Value::as_array);
    found
        .map(|list| list.iter().filter_map(Found::parse).collect())
        .ok_or_else(|| "the process that tried it gave no answer".into())
}

/// What a process said before it ended.
fn last_words(err: &str, status: &std::process::ExitStatus) -> String {
    let ignored =
        |line: &&str| !line.trim().is_empty() && !line.contains("RUST_BACKTRACE") && !line.starts_with("thread '");
    match err.lines().rev().find(ignored) {
        Some(line) => format!("{} ({status})", line.trim()),
        None => status.to_string(),
    }
}

fn table(rows: &[(Backend, Result<Vec<Found>, String>)]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(["backend", "built", "device", ""]);
    for (backend, devices) in rows {
        let built = if backend.is_built() { "yes" } else { "no" };
        match devices {
            Ok(found) if found.is_empty() => {
                table.add_row([backend.name(), built, "remote:ws://HOST:PORT", "a device lent by `headq serve`"]);
            }
            Ok(found) => {
                for f in found {
                    table.add_row([backend.name(), built, &f.device, f.what.as_deref().unwrap_or_default()]);
                }
            }
            Err(reason) => {
                table.add_row([backend.name(), built, "none", reason]);
            }
        }
    }
    table.to_string()
}
