//! `headq run`

use std::path::Path;

use headq::Scheme;
use headq_lab::compare::data::Comparison;
use headq_lab::diagnose::data::Diagnosis;
use headq_lab::evaluate::Evaluation;
use headq_lab::run::{RunConfig, RunOptions, run as run_config};
use headq_lab::{LabError, report};
use headq_models::LoadedModel;

use super::Context;
use crate::args::Run;

/// What a run came to, by the section that its configuration has.
pub enum Outcome {
    Evaluation(Box<Evaluation>),
    Diagnosis(Box<Diagnosis>),
    Comparison(Box<Comparison>),
}

pub fn run(context: &Context, args: &Run) -> Result<(), LabError> {
    let mut config = load(context, &args.config)?;
    config.allow_overlap |= args.overlap.allow_overlap;
    let out = args.out.clone().unwrap_or_else(|| Path::new("runs").join(&config.name));
    let options = RunOptions {
        out: out.clone(),
        threads: context.threads,
        command: format!("headq run {}", super::diagnose::quoted(&args.config.to_string_lossy())),
    };
    match take(context, &config, &options).map_err(in_config(&args.config))? {
        Outcome::Evaluation(evaluation) => context.print(
            || super::json(&evaluation),
            || {
                let provenance = report::provenance(&evaluation).join("\n");
                let table = report::table(&evaluation, false);
                format!("{provenance}\n{table}\nreport: {}", out.join("report.html").display())
            },
        ),
        Outcome::Diagnosis(diagnosis) => {
            context.print(|| super::json(&diagnosis), || super::diagnose::summary(&diagnosis, &out))
        }
        Outcome::Comparison(comparison) => {
            context.print(|| super::json(&comparison), || super::compare::summary_of_run(&comparison, &out))
        }
    }
}

/// Reads a configuration; device, type, seed and what is said of the model on the command line come before its own.
pub fn load(context: &Context, path: &Path) -> Result<RunConfig, LabError> {
    let mut config = RunConfig::load(path)?;
    if let Some(device) = &context.device {
        config.device = device.to_string();
    }
    if let Some(dtype) = context.dtype {
        config.dtype = dtype;
    }
    if let Some(seed) = context.seed {
        config.seed = seed;
    }
    let given = &context.load_options;
    if let Some(path) = &given.config {
        config.model_config = Some(path.to_string_lossy().into_owned());
    }
    config.model_set.extend(given.settings.clone());
    Ok(config)
}

/// What a configuration asks for in vain is no wrong usage of the command line: the error names the configuration.
fn in_config(path: &Path) -> impl FnOnce(LabError) -> LabError {
    move |error| match error {
        LabError::Usage(_) | LabError::Method(headq::Error::Scheme { .. } | headq::Error::DeviceName { .. }) => {
            LabError::Config { path: path.to_owned(), reason: error.to_string() }
        }
        other => other,
    }
}

/// Carries out a configuration of any kind.
pub fn take(context: &Context, config: &RunConfig, options: &RunOptions) -> Result<Outcome, LabError> {
    super::devices::check(&config.device.parse()?)?;
    let outcome = match (&config.diagnose, &config.compare) {
        (Some(_), _) => Outcome::Diagnosis(Box::new(super::diagnose::take(context, config, options)?)),
        (None, Some(_)) => Outcome::Comparison(Box::new(super::compare::take(context, config, options)?)),
        (None, None) => {
            let announce =
                |loaded: &LoadedModel, tokens: usize, schemes: &[Scheme]| context.announce(loaded, tokens, schemes);
            Outcome::Evaluation(Box::new(run_config(config, options, &context.bars, &announce)?))
        }
    };
    super::report::write(std::slice::from_ref(&options.out), &options.out.join("report.html"), &options.command)?;
    Ok(outcome)
}
