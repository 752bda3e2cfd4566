//! `headq diagnose`

use std::path::{Path, PathBuf};

use headq::Scheme;
use headq_lab::LabError;
use headq_lab::diagnose::data::{Diagnosis, LINKS};
use headq_lab::diagnose::diagnose;
use headq_lab::diagnose::thresholds::Thresholds;
use headq_lab::run::{DiagnoseConfig, OneOrMany, RunConfig, RunOptions, TextConfig};
use headq_models::LoadedModel;

use super::Context;
use crate::args::Diagnose;

pub fn run(context: &Context, args: &Diagnose) -> Result<(), LabError> {
    let config = config(context, args)?;
    let options = RunOptions { out: args.out.clone(), threads: context.threads, command: command_line() };
    let diagnosis = take(context, &config, &options)?;
    super::report::write(std::slice::from_ref(&args.out), &args.out.join("report.html"), &options.command)?;
    context.print(|| super::json(&diagnosis), || summary(&diagnosis, &args.out))
}

/// Carries out a configuration with a section `[diagnose]`.
pub fn take(context: &Context, config: &RunConfig, options: &RunOptions) -> Result<Diagnosis, LabError> {
    let announce = |loaded: &LoadedModel, tokens: usize, schemes: &[Scheme]| context.announce(loaded, tokens, schemes);
    diagnose(config, options, &context.bars, &announce)
}

fn config(context: &Context, args: &Diagnose) -> Result<RunConfig, LabError> {
    let mut thresholds = Thresholds::default();
    args.threshold.iter().try_for_each(|t| thresholds.set(t)).map_err(LabError::Usage)?;
    args.base.parse::<headq::scheme::BaseScheme>()?;
    let texts = |paths: &[PathBuf]| OneOrMany::Many(paths.iter().map(|p| p.to_string_lossy().into_owned()).collect());
    let name = args.out.file_name().map_or("diagnosis".into(), |n| n.to_string_lossy().into_owned());
    let calibrate = (!args.calibration_text.is_empty()).then(|| TextConfig {
        text: texts(&args.calibration_text),
        max_chars: args.max_chars,
        context: args.context,
        windows: args.calibration_windows,
    });
    Ok(RunConfig {
        name,
        model: args.model.to_string_lossy().into_owned(),
        device: context.device_name(),
        dtype: context.dtype(),
        seed: context.seed(),
        add_bos: args.add_bos,
        allow_overlap: args.overlap.allow_overlap,
        pass: None,
        model_config: context.load_options.config.as_ref().map(|p| p.to_string_lossy().into_owned()),
        model_set: context.load_options.settings.clone(),
        calibrate,
        finetune: None,
        eval: None,
        compare: None,
        diagnose: Some(DiagnoseConfig {
            text: texts(&args.text),
            max_chars: args.max_chars,
            context: args.context,
            windows: args.windows,
            links: args.links.clone(),
            base: args.base.clone(),
            rank: args.rank,
            bits: args.bits,
            calibration_windows: args.calibration_windows,
            thresholds,
        }),
    })
}

/// The command that was given, quoted for a shell. What does not change results is left out, and the choice of links, which add up
/// from call to call.
pub fn command_line() -> String {
    let mut words = vec!["headq".to_string()];
    let mut arguments = std::env::args_os().skip(1).map(|a| a.to_string_lossy().into_owned());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quiet" | "-q" | "--json" => {}
            "--threads" | "--links" => drop(arguments.next()),
            _ if argument.starts_with("--threads=") || argument.starts_with("--links=") => {}
            _ => words.push(quoted(&argument)),
        }
    }
    words.join(" ")
}

pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Verdicts in a few lines.
pub fn summary(diagnosis: &Diagnosis, out: &Path) -> String {
    let d = diagnosis;
    let mut text = format!(
        "{} ({})\n{} tokens in windows of {}; {} with rank {} and {} bits; seed {}\n\n",
        d.model, d.fingerprint, d.tokens, d.context, d.base, d.rank, d.bits, d.seed
    );
    for ((_, title, claim), judgement) in LINKS.iter().zip(d.judgements()) {
        let Some(j) = judgement else { continue };
        text += &format!("{title}: {}\n  claim    {claim}\n  because  {}\n", j.verdict, j.because);
        text += &format!("  changes  {}\n", j.would_change);
    }
    text + &format!("\nreport: {}", out.join("report.html").display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_a_shell() {
        for (word, expected) in
            [("a-b_c.d", "a-b_c.d"), ("kivi-2(g=32)", "'kivi-2(g=32)'"), ("it's", r"'it'\''s'"), ("", "''")]
        {
            assert_eq!(quoted(word), expected);
        }
    }
}
