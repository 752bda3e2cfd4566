//! `headq search`

use std::path::PathBuf;

use headq::KeyStatistics;
use headq::scheme::Flush;
use headq_lab::LabError;
use headq_lab::artifact::{Output, StatsArtifact, check_writable};
use headq_lab::search::{Coded, Found, Request};

use super::Context;
use crate::args::{Search, TextArgs};

pub fn run(context: &Context, args: &Search) -> Result<(), LabError> {
    if !(0.25..=8.0).contains(&args.bits) {
        return Err(LabError::Usage(format!("--bits {}: expected a number from 0.25 to 8", args.bits)));
    }
    if args.out.extension().is_none_or(|e| !e.eq_ignore_ascii_case("json")) {
        let out = args.out.display();
        return Err(LabError::Usage(format!(
            "--out {out}: expected a name that ends in .json, by which schemes know files"
        )));
    }
    let stats = StatsArtifact::load(&args.stats)?;
    let fail = |e: headq::Error| LabError::Artifact { path: args.stats.clone(), reason: e.to_string() };
    let keys = KeyStatistics::of(&stats.layers).map_err(fail)?;
    let flush = Flush { group: args.group.get(), residual: args.residual, sinks: args.sinks };
    let least = flush.sinks + flush.residual + flush.group;
    if args.text.context <= least {
        return Err(LabError::Usage(format!(
            "--context {}: with groups of {}, a window of {} and {} sinks nothing is read from codes; give more than {least}",
            args.text.context, flush.group, flush.residual, flush.sinks
        )));
    }
    check_writable(&args.out, Output::Scheme)?;
    let all = TextArgs { windows: args.text.windows + args.skip, text: args.text.text.clone(), ..args.text };
    let (loaded, windows) = context.load(&args.model, &all)?;
    stats.header.check_model(&args.stats, &loaded.fingerprint)?;
    let texts: Vec<_> = windows.into_iter().map(|w| w.split(args.skip).1).collect();
    let coded = if args.keys_only { Coded::Keys } else { Coded::KeysAndValues };
    let decides = serde_json::json!({
        "statistics": super::json(&stats.header),
        "texts": texts.iter().map(|t| super::json(&t.text)).collect::<Vec<_>>(),
        "context": args.text.context,
        "device": context.device_label(&loaded)?,
    });
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        keys: &keys,
        texts: &texts,
        add_bos: args.text.add_bos,
        bits: args.bits,
        coded,
        flush,
        threads: context.threads,
        identity: decides.to_string(),
    };
    request.check().map_err(fail)?;
    let mut kept = args.out.clone().into_os_string();
    kept.push(".partial");
    let found = request.run(&PathBuf::from(kept), &context.bars)?;
    found.file.save(&args.out)?;
    context.print(
        || serde_json::json!({ "out": args.out.to_string_lossy(), "scheme": super::json(&found.file) }),
        || summary(args, &found),
    )
}

fn summary(args: &Search, found: &Found) -> String {
    let steps = found.steps.iter().map(|step| {
        let mark = if step.kept { "kept" } else { "" };
        format!("{:>10.6}  {:<4}  {}", step.kl, mark, step.what)
    });
    let steps: Vec<String> = steps.collect();
    format!("   KL nats  \n{}\n{}: {}", steps.join("\n"), args.out.display(), found.file.scheme)
}
