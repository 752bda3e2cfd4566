//! `headq run`

use headq_lab::run::{RunConfig, RunOptions, run as run_config};
use headq_lab::{LabError, report};
use headq_models::LoadedModel;

use super::Context;
use crate::args::Run;

pub fn run(context: &Context, args: &Run) -> Result<(), LabError> {
    let mut config = RunConfig::load(&args.config)?;
    if let Some(device) = &context.device {
        config.device = device.clone();
    }
    if let Some(seed) = context.seed {
        config.seed = seed;
    }
    let out = args.out.clone().unwrap_or_else(|| std::path::Path::new("runs").join(&config.name));
    let options = RunOptions {
        out: out.clone(),
        threads: context.threads,
        command: format!("headq run {}", args.config.display()),
    };
    let announce = |loaded: &LoadedModel, tokens: usize| context.say_memory(&loaded.description, tokens, usize::MAX);
    let evaluation = run_config(&config, &options, &context.bars, &announce)?;
    context.print(
        || super::json(&evaluation),
        || {
            let (provenance, table) = (report::provenance(&evaluation).join("\n"), report::table(&evaluation, false));
            format!("{provenance}\n{table}\nreport: {}", out.join("report.md").display())
        },
    )
}
