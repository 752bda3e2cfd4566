//! `headq sweep`

use headq_lab::artifact::write_atomic;
use headq_lab::evaluate::{Request, Sources};
use headq_lab::overlap::{self, MadeFrom, Passages};
use headq_lab::pass::Pass;
use headq_lab::sweep::data::{Coded, Sweep};
use headq_lab::sweep::{Asked, Job, table};
use headq_lab::text::TextInfo;
use headq_lab::{LabError, run::check_context};

use super::Context;
use super::diagnose::command_line;
use crate::args::{self, TextArgs};

/// Drawing of the fronts, beside the report.
const PLOT: &str = "front.svg";

pub fn run(context: &Context, args: &args::Sweep) -> Result<(), LabError> {
    let asked = Asked {
        defaults: (!args.only_schemes).then_some(args.kv),
        sinks: args.sinks,
        residual: args.residual,
        schemes: args.scheme.clone(),
        budgets: args.bits.clone(),
        bits: args.bits_of,
    };
    asked.check()?;
    let (loaded, windows) = context.load(&args.model, &args.text)?;
    check_context(&loaded, args.text.context)?;
    let calibration = match args.calibration_text.is_empty() {
        true => Vec::new(),
        false => {
            let text = TextArgs { text: args.calibration_text.clone(), windows: args.calibration_windows, ..args.text };
            super::windows(&args.calibration_text, &loaded.tokenizer()?, &text)?
        }
    };
    let sources = Sources::load(&args.stats, &args.basis, &loaded.fingerprint)?
        .with_scheme_files(&args.scheme, &loaded.fingerprint)?;
    let add_bos = args.text.add_bos;
    let texts: Vec<TextInfo> = calibration.iter().map(|t| t.text.clone()).collect();
    let passages = Passages::of_all(&calibration, add_bos);
    let mut made_from = sources.made_from();
    made_from.push(MadeFrom { artifact: "what --calibration-text finds".into(), texts: &texts, passages: &passages });
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        name: args.model.display().to_string(),
        device: context.device_label(&loaded)?,
        texts: &windows,
        add_bos,
        overlap: overlap::check(&windows, add_bos, &made_from, args.overlap.allow_overlap)?,
        schemes: &[],
        seed: context.seed(),
        diagnostics: false,
        threads: context.threads,
        timings: false,
        pass: Pass::Tensors,
    };
    if args.out.exists() {
        super::report::check(&args.out.join("report.html"))?;
    }
    let command = command_line();
    let job = Job {
        request: &request,
        loaded: &loaded,
        asked: &asked,
        calibration: &calibration,
        out: &args.out,
        command: command.clone(),
    };
    let sweep = job.run(sources, &context.bars, &|text| context.bars.note(text))?;
    write_atomic(&args.out.join(PLOT), headq_report::sweep_plot(&sweep).as_bytes())?;
    super::report::write(std::slice::from_ref(&args.out), &args.out.join("report.html"), &command)?;
    context.print(|| super::json(&sweep), || summary(&sweep, args))
}

fn summary(sweep: &Sweep, args: &args::Sweep) -> String {
    let mut text = table::provenance(sweep).join("\n");
    for kv in [Coded::K, Coded::Kv] {
        if let Some(rows) = table::rows(sweep, kv) {
            text += &format!("\n\n{}\n{rows}", kv.title());
        }
    }
    if let Some(budgets) = table::budgets(sweep) {
        text += &format!("\n\nThe best of each family within a budget\n{budgets}");
    }
    if !sweep.left_out.is_empty() {
        text += &format!("\n\n{} default schemes were left out; the report says why", sweep.left_out.len());
    }
    format!("{text}\nreport: {}", args.out.join("report.html").display())
}
