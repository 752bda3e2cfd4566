//! `headq inspect`

use std::fmt::Write;

use comfy_table::{Table, presets};
use headq::budget::{Budget, depends_on_calibration};
use headq_lab::LabError;
use headq_lab::artifact::Outline;
use headq_lab::evaluate::head_shape;
use headq_models::{describe, fingerprint};
use serde_json::json;

use super::Context;
use crate::args::Inspect;

/// Sized where no scheme is named: full precision, common runtimes' 8 and 4 bits, KIVI as published, and a correction on it.
const COMMON: &[&str] = &[
    "dense",
    "token-8(g=1,r=0,c=32)/token-8(c=32)",
    "token-4(g=1,r=0,c=32)/token-4(c=32)",
    "kivi-4(g=32,r=128)/token-4(c=32)",
    "kivi-2(g=32,r=128)/token-2(c=32)",
];

/// Every position of a context is looked at; beyond this nothing sensible is meant.
const MOST_TOKENS: usize = 1 << 24;

pub fn run(context: &Context, args: &Inspect) -> Result<(), LabError> {
    let is_artifact = args.model.is_file() && args.model.extension().is_some_and(|e| e == "safetensors");
    if let Some(outline) = is_artifact.then(|| Outline::of(&args.model)).transpose()?.flatten() {
        return artifact(context, args, &outline);
    }
    let options = &context.load_options;
    let path = context.locate(&args.model)?;
    let described = describe(&path, options)?;
    let config = &described.config;
    let shape = head_shape(config);
    if !(1..=MOST_TOKENS).contains(&args.context) {
        return Err(LabError::Usage(format!("context {}: expected 1 to {MOST_TOKENS} tokens", args.context)));
    }
    let common: Vec<String> =
        COMMON.iter().filter(|_| config.head_dim.is_multiple_of(32)).map(|s| s.to_string()).collect();
    let asked = match args.scheme.is_empty() {
        false => args.scheme.clone(),
        true if common.is_empty() => ["dense", "token-4/token-4", "kivi-2/token-2"].map(String::from).to_vec(),
        true => common,
    };
    let mut budgets = Vec::new();
    for text in &asked {
        let scheme: headq::Scheme = text.parse()?;
        scheme.check(config.head_dim)?;
        budgets.push((text.clone(), Budget::at(&scheme, &shape, args.context), depends_on_calibration(&scheme)));
    }
    let identity = args.fingerprint.then(|| fingerprint(&path, options)).transpose()?;
    context.print(
        || {
            json!({
                "model": args.model.to_string_lossy(),
                "format": described.format,
                "architecture": config.architecture.name,
                "config": super::json(config),
                "parameters": described.parameters,
                "tensors": described.tensors,
                "stored_types": described.stored_types.iter().map(|(t, n)| json!({"type": t, "tensors": n})).collect::<Vec<_>>(),
                "bytes_on_disk": described.bytes,
                "fingerprint": identity,
                "context": args.context,
                "schemes": budgets.iter().map(|(scheme, b, bound)| json!({
                    "scheme": scheme, "key_bits": b.key_bits, "value_bits": b.value_bits, "cache_bits": b.cache_bits,
                    "bytes_per_token": b.bytes_per_token, "upper_bound": bound,
                })).collect::<Vec<_>>(),
            })
        },
        || {
            let mut text = String::new();
            let mut line = |name: &str, value: String| {
                let _ = writeln!(text, "{name:14} {value}");
            };
            line("model", args.model.display().to_string());
            line("format", described.format.clone());
            line("architecture", config.architecture.name.to_string());
            line("parameters", format!("{:.2} M", described.parameters as f64 / 1e6));
            line("layers", config.num_layers.to_string());
            line("heads", format!("{} query, {} key-value, {} wide", config.num_heads, config.num_kv_heads, config.head_dim));
            line("hidden", format!("{}, MLP {}", config.hidden_size, config.intermediate_size));
            line("vocabulary", format!("{}{}", config.vocab_size, if config.tie_word_embeddings { ", head tied" } else { "" }));
            line("positions", config.position_limit().map_or("rotary".into(), |n| format!("learned, at most {n}")));
            let types: Vec<_> = described.stored_types.iter().map(|(t, n)| format!("{n} {t}")).collect();
            line("tensors", format!("{} ({}), {:.1} MB", described.tensors, types.join(", "), described.bytes as f64 / 1e6));
            if let Some(identity) = &identity {
                line("fingerprint", identity.to_string());
            }
            let mut table = Table::new();
            table.load_style(presets::ASCII_MARKDOWN);
            table.set_header(["scheme", "key bits", "value bits", "cache bits", "bytes/token", &format!("MiB at {}", args.context)]);
            for (scheme, b, _) in &budgets {
                let mib = b.bytes_per_token * args.context as f64 / f64::from(1 << 20);
                table.add_row([
                    scheme.clone(),
                    format!("{:.4}", b.key_bits),
                    format!("{:.4}", b.value_bits),
                    format!("{:.3}", b.cache_bits),
                    format!("{:.0}", b.bytes_per_token),
                    format!("{mib:.2}"),
                ]);
            }
            let bounds: Vec<&str> = budgets.iter().filter(|(.., bound)| *bound).map(|(s, ..)| s.as_str()).collect();
            let note = match bounds.is_empty() {
                true => String::new(),
                false => format!(
                    "\n{}: at most; how many coefficients have scales is calibrated, and headq eval --stats prints it",
                    bounds.join(", ")
                ),
            };
            format!("{text}\n{table}{note}")
        },
    )
}

/// What an artifact is, and its tensors.
fn artifact(context: &Context, args: &Inspect, outline: &Outline) -> Result<(), LabError> {
    let Outline { header, tensors } = outline;
    context.print(
        || json!({ "artifact": args.model.to_string_lossy(), "header": super::json(header), "tensors": super::json(tensors) }),
        || {
            let mut text = String::new();
            let mut line = |name: &str, value: String| {
                let _ = writeln!(text, "{name:14} {value}");
            };
            line("artifact", args.model.display().to_string());
            line("kind", header.kind.clone());
            line("program", header.program.clone());
            line("model", header.model.to_string());
            line("base", header.base.clone());
            line("tokens", format!("{} in windows of {}", header.tokens, header.context));
            header.texts.iter().for_each(|t| line("text", format!("{} ({} characters)", t.path.display(), t.chars)));
            if let Some(basis) = &header.basis {
                let loss = basis.loss.as_ref().map_or(String::new(), |loss| format!(", trained on {loss}"));
                line("basis", format!("{}, rank {}, scope {}{loss}", basis.family, basis.rank, basis.scope));
                if let Some((bits, scales)) = basis.bits.zip(basis.scales.as_ref()) {
                    line("side codes", format!("{bits} bits, scales {scales}"));
                }
            }
            let mut table = Table::new();
            table.load_style(presets::ASCII_MARKDOWN);
            table.set_header(["tensor", "type", "shape"]);
            for tensor in tensors {
                table.add_row([tensor.name.clone(), tensor.dtype.clone(), format!("{:?}", tensor.shape)]);
            }
            format!("{text}\n{table}")
        },
    )
}
