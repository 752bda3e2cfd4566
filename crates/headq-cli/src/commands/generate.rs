//! `headq generate`

use std::io::{ErrorKind, Read, Write};
use std::path::Path;

use headq_lab::LabError;
use headq_lab::evaluate::Sources;
use headq_lab::generate::{Generation, Request, Sampling, StopReason, new_tokens, prompt_tokens};
use headq_models::{describe, load};

use super::Context;
use crate::args::Generate;

pub fn run(context: &Context, args: &Generate) -> Result<(), LabError> {
    // What needs no model first.
    headq_lab::scheme_file::resolve(&args.scheme)?;
    let sampling = sampling(args);
    sampling.check()?;
    if args.stop.iter().any(String::is_empty) {
        return Err(LabError::Usage("--stop: an empty string would end every text before it begins".into()));
    }
    let device = context.device(&context.device_name())?;
    let options = &context.load_options;
    let path = context.locate(&args.model)?;
    let config = describe(&path, options)?.config;
    let tokenizer = headq_models::tokenizer(&path, options)?;
    let prompt = prompt_tokens(&tokenizer, &prompt(args)?, args.add_bos)?;
    let max_tokens = new_tokens(&config, prompt.len(), args.max_tokens, args.beyond_context)?;
    let loaded = load(&path, &device, options)?;
    let sources = Sources::load(&args.stats, &args.basis, &loaded.fingerprint)?
        .with_scheme_files(std::slice::from_ref(&args.scheme), &loaded.fingerprint)?;
    let schemes = sources.plan_all(std::slice::from_ref(&args.scheme), &config, context.seed())?;
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        tokenizer: &tokenizer,
        name: args.model.display().to_string(),
        device: context.device_label(&loaded)?,
        scheme: &schemes[0],
        cache_type: args.cache_dtype,
        prompt: &prompt,
        max_tokens,
        sampling,
        seed: context.seed(),
        stops: &args.stop,
        ignore_eos: args.ignore_eos,
        threads: context.threads,
    };
    let stream = !context.json;
    let generation = request.run(&context.bars, &mut |text| if stream { print(text) } else { Ok(true) })?;
    if stream {
        print("\n")?;
    } else {
        context.print(|| super::json(&generation), String::new)?;
    }
    context.bars.note(&summary(&generation));
    match generation.stop_reason {
        StopReason::Interrupted => Err(LabError::Cut),
        _ => Ok(()),
    }
}

fn sampling(args: &Generate) -> Sampling {
    match (args.temperature, args.top_k, args.top_p) {
        (None, None, None) => Sampling::Greedy,
        (temperature, top_k, top_p) => Sampling::Random { temperature: temperature.unwrap_or(1.0), top_k, top_p },
    }
}

/// The prompt's text, from wherever it is.
fn prompt(args: &Generate) -> Result<String, LabError> {
    let (path, bytes) = match (&args.prompt_file, args.prompt.as_deref()) {
        (Some(path), _) => {
            (path.as_path(), std::fs::read(path).map_err(LabError::input(path, "--prompt-file is a text file, UTF-8"))?)
        }
        (None, Some("-")) => {
            let (path, mut bytes) = (Path::new("standard input"), Vec::new());
            std::io::stdin().read_to_end(&mut bytes).map_err(LabError::io(path))?;
            (path, bytes)
        }
        (None, text) => return Ok(text.unwrap_or_default().to_owned()),
    };
    let text = String::from_utf8(bytes).map_err(|e| LabError::Text {
        path: path.to_owned(),
        reason: format!(
            "not UTF-8: byte {} begins no character; convert it, e.g. with iconv",
            e.utf8_error().valid_up_to()
        ),
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text).replace("\r\n", "\n");
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// Writes text at once; `false` where nobody reads it any more.
fn print(text: &str) -> Result<bool, LabError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(source) => Err(LabError::Io { path: "standard output".into(), source }),
    }
}

fn summary(g: &Generation) -> String {
    let speed = g.tokens_per_second.map_or(String::new(), |s| format!(", {s:.1} tokens per second"));
    let end = match g.stop_reason {
        StopReason::Length => "",
        StopReason::Eos => " (end of sequence)",
        StopReason::Stop => " (stop string)",
        StopReason::Interrupted => " (interrupted)",
        StopReason::Closed => " (output closed)",
    };
    format!(
        "{} tokens of prompt in {:.2} s, {} new tokens{end} in {:.2} s{speed}\ncache: {} bytes for {} tokens with {}; f16 takes {} ({:.2} times as much)",
        g.prompt_tokens,
        g.prefill_seconds,
        g.new_tokens,
        g.decode_seconds,
        g.cache_bytes,
        g.cached_tokens,
        g.scheme,
        g.f16_bytes,
        g.f16_bytes as f64 / g.cache_bytes as f64
    )
}
