//! `headq finetune`

use std::path::PathBuf;

use headq_lab::LabError;
use headq_lab::artifact::{Output, StatsArtifact, check_writable};
use headq_lab::finetune::{Finetuned, Request, Settings, check_scheme};

use super::Context;
use crate::args::{Finetune, TextArgs};

pub fn run(context: &Context, args: &Finetune) -> Result<(), LabError> {
    let scheme = headq_lab::scheme_file::resolve(&args.scheme)?;
    let settings = settings(args);
    settings.check().map_err(|e| LabError::Usage(format!("--{}", e.replacen('_', "-", 1))))?;
    if args.held_out == 0 {
        return Err(LabError::Usage(
            "--held-out: expected at least 1 window, found 0; they decide when to stop".into(),
        ));
    }
    let stats = StatsArtifact::load(&args.stats)?;
    settings.check_key(&check_scheme(&scheme, &stats)?)?;
    check_writable(&args.out, Output::Basis)?;
    let all = TextArgs { windows: args.text.windows + args.held_out, text: args.text.text.clone(), ..args.text };
    let (loaded, windows) = context.load(&args.model, &all)?;
    stats.header.check_model(&args.stats, &loaded.fingerprint)?;
    scheme.check(loaded.config().head_dim)?;
    let (train, held_out): (Vec<_>, Vec<_>) = windows.into_iter().map(|w| w.split(args.text.windows)).unzip();
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        name: args.model.display().to_string(),
        device: context.device_name(),
        command: super::diagnose::command_line(),
        train: &train,
        held_out: &held_out,
        add_bos: args.text.add_bos,
        stats: &stats,
        scheme,
        settings: &settings,
        seed: context.seed(),
        threads: context.threads,
    };
    let state = args.state.clone().unwrap_or_else(|| {
        let mut name = args.out.clone().into_os_string();
        name.push(".state");
        PathBuf::from(name)
    });
    let made = request.run(&state, &context.bars)?;
    made.artifact.save(&args.out)?;
    context.print(
        || {
            serde_json::json!({
                "out": args.out.to_string_lossy(),
                "state": state.to_string_lossy(),
                "header": super::json(&made.artifact.header),
                "settings": super::json(&made.summary.settings),
                "warnings": made.summary.warnings,
                "held_out": { "uncorrected": made.uncorrected, "initial": made.held_out.0, "trained": made.held_out.1 },
            })
        },
        || summary(args, &made),
    )
}

fn settings(args: &Finetune) -> Settings {
    let default = Settings::default();
    Settings {
        loss: args.loss.clone(),
        init: args.init.clone(),
        steps: args.steps.unwrap_or(default.steps),
        epochs: args.epochs,
        lr: args.lr.unwrap_or(default.lr),
        warmup: args.warmup.unwrap_or(default.warmup),
        batch: args.batch.unwrap_or(default.batch),
        tied: args.tied,
        train_clip: args.train_clip,
        train_base_clip: args.train_base_clip,
        train_transform: args.train_transform,
        measure_every: args.measure_every.unwrap_or(default.measure_every),
        patience: args.patience.unwrap_or(default.patience),
        save_every: args.save_every.unwrap_or(default.save_every),
    }
}

fn summary(args: &Finetune, made: &Finetuned) -> String {
    let (initial, trained) = made.held_out;
    let change = match initial > 0.0 {
        true => format!(" ({:+.1} %)", 100.0 * (trained / initial - 1.0)),
        false => String::new(),
    };
    format!(
        "{}: {} on held-out windows {:.5} without a correction, {initial:.5} with the initial basis, {trained:.5} trained{}",
        args.out.display(),
        args.loss,
        made.uncorrected,
        change
    )
}
