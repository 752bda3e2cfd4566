//! `headq compare`

use std::path::Path;

use headq::Scheme;
use headq_lab::artifact::{Output, check_writable, write_atomic};
use headq_lab::compare::candidates::Asked;
use headq_lab::compare::data::Comparison;
use headq_lab::compare::{self, compare, table};
use headq_lab::evaluate::{Forget, Request, Sources};
use headq_lab::pass::Pass;
use headq_lab::run::{RunConfig, RunOptions};
use headq_lab::{LabError, overlap};
use headq_models::LoadedModel;

use super::Context;
use crate::args::Compare;

pub fn run(context: &Context, args: &Compare) -> Result<(), LabError> {
    let asked = Asked::new(&args.scheme, &args.basis, &args.family)?;
    let (loaded, windows) = context.load(&args.model, &args.text)?;
    asked.check(args.text.context, loaded.config())?;
    let sources = Sources::load(args.stats.as_slice(), &args.basis, &loaded.fingerprint)?
        .with_scheme_files(std::slice::from_ref(&args.scheme), &loaded.fingerprint)?;
    asked.check_files(&sources, loaded.config())?;
    let overlap = overlap::check(&windows, args.text.add_bos, &sources.made_from(), args.overlap.allow_overlap)?;
    args.out.as_deref().map_or(Ok(()), |out| check_writable(out, Output::Report))?;
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        name: args.model.display().to_string(),
        device: context.device_label(&loaded)?,
        texts: &windows,
        add_bos: args.text.add_bos,
        overlap,
        schemes: &[],
        seed: context.seed(),
        diagnostics: true,
        threads: context.threads,
        timings: false,
        pass: Pass::choose(None, None, &loaded.model, &context.device_name())?,
    };
    let comparison = compare(&request, &asked, &sources, &context.bars, &Forget)?;
    let json = || super::json(&comparison);
    if let Some(out) = &args.out {
        write_atomic(out, format!("{:#}\n", json()).as_bytes())?;
    }
    context.print(json, || summary(&comparison))
}

/// Carries out a configuration with a section `[compare]`.
pub fn take(context: &Context, config: &RunConfig, options: &RunOptions) -> Result<Comparison, LabError> {
    let announce = |loaded: &LoadedModel, tokens: usize, schemes: &[Scheme]| context.announce(loaded, tokens, schemes);
    compare::run(config, options, &context.bars, &announce)
}

/// Provenance and tables.
pub fn summary(comparison: &Comparison) -> String {
    let provenance = table::provenance(comparison).join("\n");
    let angles = table::angles(comparison).map_or(String::new(), |angles| format!("\n\nprincipal angles\n{angles}"));
    format!("{provenance}\n{}{angles}", table::results(comparison))
}

/// The same with where the run's files are.
pub fn summary_of_run(comparison: &Comparison, out: &Path) -> String {
    format!("{}\nreport: {}", summary(comparison), out.join("report.html").display())
}
