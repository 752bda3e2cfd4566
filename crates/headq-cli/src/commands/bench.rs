//! `headq bench`

use std::path::Path;

use headq::DenseType;
use headq_lab::artifact::{Output, check_writable, write_atomic};
use headq_lab::bench::{BenchReport, Contender, Plan, Reading, Spread};
use headq_lab::evaluate::{PlannedScheme, Sources};
use headq_lab::{LabError, memory};
use headq_models::load;

use super::Context;
use crate::args::Bench;

pub fn run(context: &Context, args: &Bench) -> Result<(), LabError> {
    for scheme in &args.scheme {
        headq_lab::scheme_file::resolve(scheme)?;
    }
    if let (Some(out), Some(plot)) = (&args.out, &args.plot)
        && same_place(out, plot)
    {
        return Err(LabError::Usage(format!("--out and --plot are both {}; give two files", out.display())));
    }
    args.out.as_deref().map_or(Ok(()), |out| check_writable(out, Output::Benchmark))?;
    args.plot.as_deref().map_or(Ok(()), |plot| check_writable(plot, Output::Plot))?;
    let device = context.device(&context.device_name())?;
    let loaded = load(context.locate(&args.model)?, &device, &context.load_options)?;
    let sources = Sources::load(&args.stats, &args.basis, &loaded.fingerprint)?
        .with_scheme_files(&args.scheme, &loaded.fingerprint)?;
    let dense = PlannedScheme::dense();
    let schemes = sources.plan_all(&args.scheme, loaded.config(), context.seed())?;
    let both = [DenseType::F32, DenseType::F16].map(|kind| Contender { planned: &dense, dense: kind });
    let coded = schemes.iter().map(|planned| Contender { planned, dense: DenseType::F16 });
    let mut threads: Vec<usize> = args.thread_counts.iter().map(|n| n.get()).collect();
    if let Some(most) = threads.iter().max().filter(|most| **most > context.threads) {
        tracing::warn!("--thread-counts {most}: only {} can run at a time", context.threads);
    }
    if threads.is_empty() {
        threads = vec![1, context.threads];
        threads.dedup();
    }
    let plan = Plan {
        model: &loaded.model,
        name: args.model.display().to_string(),
        contenders: both.into_iter().chain(coded).collect(),
        contexts: args.contexts.iter().map(|n| n.get()).collect(),
        threads,
        rounds: args.rounds.get(),
        whole_steps: !args.attention_only,
        seed: context.seed(),
    };
    let weights = loaded.description.parameters * context.dtype().bytes();
    plan.check_memory(weights)?;
    say_memory(context, plan.cache_bytes(), weights);
    let report = plan.run(&context.bars)?;
    let json = || super::json(&report);
    if let Some(out) = &args.out {
        write_atomic(out, format!("{:#}\n", json()).as_bytes())?;
    }
    if let Some(plot) = &args.plot {
        write_atomic(plot, headq_report::bench_plot(&report).as_bytes())?;
    }
    context.print(json, || table(&report))
}

fn say_memory(context: &Context, caches: u64, weights: u64) {
    let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
    let free = memory::available();
    let of = free.map_or(String::new(), |free| format!(" of {:.1} GiB available", gib(free)));
    context.bars.note(&format!(
        "needs about {:.2} GiB{of}: weights {:.2}, caches of the longest context {:.2}",
        gib(caches + weights),
        gib(weights),
        gib(caches)
    ));
}

/// Whether two paths name one file, as far as that can be said without following links.
fn same_place(a: &Path, b: &Path) -> bool {
    a == b || std::path::absolute(a).is_ok_and(|a| std::path::absolute(b).is_ok_and(|b| a == b))
}

fn table(report: &BenchReport) -> String {
    use comfy_table::{CellAlignment, Table, presets};
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "context",
        "threads",
        "cache",
        "MB",
        "attention ms",
        "GB/s",
        "× f32",
        "step ms",
        "GB/s",
        "× f32",
    ]);
    for column in [0, 1, 3, 4, 5, 6, 7, 8, 9] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for reading in &report.readings {
        let base = dense_f32(report, reading);
        let ratio = |own: Option<Spread>, of: Option<Spread>| match (own, of) {
            (Some(own), Some(of)) => format!("{:.2}", of.median / own.median),
            _ => "–".into(),
        };
        let name =
            if reading.scheme == "dense" { format!("dense {}", reading.cache_dtype) } else { reading.scheme.clone() };
        table.add_row([
            reading.context.to_string(),
            reading.threads.to_string(),
            name,
            format!("{:.1}", reading.cache_bytes as f64 / 1e6),
            spread(Some(reading.attention_ms)),
            format!("{:.1}", reading.attention_gb_per_s),
            ratio(Some(reading.attention_ms), base.map(|b| b.attention_ms)),
            spread(reading.step_ms),
            reading.step_gb_per_s.map_or("–".into(), |s| format!("{s:.1}")),
            ratio(reading.step_ms, base.and_then(|b| b.step_ms)),
        ]);
    }
    let memory: Vec<String> =
        report.bandwidth.iter().map(|b| format!("{:.1} GB/s on {} thread(s)", b.gb_per_s, b.threads)).collect();
    format!(
        "{}: {} layers, {} query heads on {} KV heads of width {}; {:.0} MB of weights; {}\nreading memory: {}\n{table}\nmedian [quartiles] of {} steps",
        report.model,
        report.shape.layers,
        report.shape.heads,
        report.shape.kv_heads,
        report.shape.head_dim,
        report.weight_bytes as f64 / 1e6,
        report.instructions,
        memory.join(", "),
        report.rounds
    )
}

/// What dense keys and values in f32 took at the same context on as many threads.
fn dense_f32<'a>(report: &'a BenchReport, reading: &Reading) -> Option<&'a Reading> {
    report.readings.iter().find(|r| {
        (r.context, r.threads) == (reading.context, reading.threads) && r.scheme == "dense" && r.cache_dtype == "f32"
    })
}

fn spread(s: Option<Spread>) -> String {
    s.map_or("–".into(), |s| format!("{:.2} [{:.2}–{:.2}]", s.median, s.lower, s.upper))
}
