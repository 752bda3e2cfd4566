//! `headq suite`

use std::path::PathBuf;

use headq_lab::LabError;
use headq_lab::run::{RunConfig, RunOptions};

use super::Context;
use super::diagnose::command_line;
use crate::args::Suite;

pub fn run(context: &Context, args: &Suite) -> Result<(), LabError> {
    let configs = load(context, args)?;
    if args.out.exists() {
        super::report::check(&args.out.join("report.html"))?;
    }
    let mut done: Vec<PathBuf> = Vec::new();
    let mut failed = Vec::new();
    for (i, (path, config)) in configs.iter().enumerate() {
        context.bars.note(&format!("{}/{}: {}", i + 1, configs.len(), config.name));
        let options = RunOptions {
            out: args.out.join(&config.name),
            threads: context.threads,
            command: format!("headq run {}", super::diagnose::quoted(&path.to_string_lossy())),
        };
        match super::run::take(context, config, &options) {
            Ok(_) => done.push(options.out),
            Err(LabError::Interrupted) => return Err(LabError::Interrupted),
            Err(error) => {
                tracing::error!("{}: {error}", path.display());
                failed.push(config.name.clone());
            }
        }
    }
    let report = (!done.is_empty()).then(|| args.out.join("report.html"));
    if let Some(report) = &report {
        super::report::write(&done, report, &command_line())?;
    }
    if !failed.is_empty() {
        let (n, total) = (failed.len(), configs.len());
        return Err(LabError::Suite { failed: n, total, names: failed.join(", ") });
    }
    context.print(
        || {
            let runs: Vec<_> = done.iter().map(|d| d.to_string_lossy()).collect();
            serde_json::json!({ "runs": runs, "report": report.as_ref().map(|r| r.to_string_lossy()) })
        },
        || {
            let report = report.as_ref().map_or(String::new(), |r| format!("\nreport: {}", r.display()));
            format!("{} runs{report}", done.len())
        },
    )
}

/// All configurations, checked before the first is run.
fn load(context: &Context, args: &Suite) -> Result<Vec<(PathBuf, RunConfig)>, LabError> {
    let mut configs: Vec<(PathBuf, RunConfig)> = Vec::new();
    for path in &args.configs {
        let mut config = super::run::load(context, path)?;
        config.allow_overlap |= args.overlap.allow_overlap;
        if let Some((other, _)) = configs.iter().find(|(_, c)| c.name == config.name) {
            let reason = format!(
                "name '{}' is also that of {}; results go to a folder of that name",
                config.name,
                other.display()
            );
            return Err(LabError::Config { path: path.clone(), reason });
        }
        configs.push((path.clone(), config));
    }
    Ok(configs)
}
