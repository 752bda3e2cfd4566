//! Where numbers come from.

use headq_lab::compare::data::Comparison;
use headq_lab::diagnose::data::Diagnosis;
use headq_lab::diagnose::thresholds::Thresholds;
use headq_lab::evaluate::Evaluation;
use headq_lab::finetune::{Summary, Trained};
use headq_lab::overlap::{Overlaps, Status};
use headq_lab::sweep::data::{Given, Sweep};
use headq_lab::text::TextInfo;
use headq_models::Fingerprint;

use crate::Run;
use crate::document::{Align, Block, Cell, Column, Source, Table, Text};
use crate::format::{count, plural, short_hash, tick};

/// What all kinds of results say of where they come from.
struct Measured<'a> {
    program: &'a str,
    model: &'a str,
    fingerprint: &'a Fingerprint,
    device: &'a str,
    seed: u64,
    add_bos: bool,
    context: usize,
    windows: usize,
    tokens: usize,
    texts: &'a [TextInfo],
    overlap: Option<&'a Overlaps>,
}

/// The same fields of a diagnosis, an evaluation and a comparison.
macro_rules! measured {
    ($run:expr) => {
        Measured {
            program: &$run.program,
            model: &$run.model,
            fingerprint: &$run.fingerprint,
            device: &$run.device,
            seed: $run.seed,
            add_bos: $run.add_bos,
            context: $run.context,
            windows: $run.windows,
            tokens: $run.tokens,
            texts: &$run.texts,
            overlap: $run.overlap.as_ref(),
        }
    };
}

impl Measured<'_> {
    /// Model, text, tokens, context and seed in a line.
    fn line(&self) -> Text {
        let texts: Vec<String> = self.texts.iter().map(|text| text.path.display().to_string()).collect();
        let texts = if texts.is_empty() { "no text".to_string() } else { texts.join(", ") };
        Text::from("Model ")
            .then_code(self.model)
            .then(format!(" ({})", architecture(self.fingerprint)))
            .then("; text ")
            .then_code(texts)
            .then(format!(
                "; {} scored in {} of {}; seed {}.",
                plural(self.tokens, "token"),
                plural(self.windows * self.texts.len().max(1), "window"),
                count(self.context as u64),
                self.seed
            ))
    }

    fn rows(&self) -> Vec<Vec<Cell>> {
        let f = self.fingerprint;
        let windows = format!(
            "{} of {} tokens for each text{}",
            plural(self.windows, "window"),
            count(self.context as u64),
            if self.add_bos { ", each begun with the beginning-of-sequence token" } else { "" }
        );
        vec![
            row("model", Text::code(self.model)),
            row("architecture", architecture(f)),
            row("vocabulary", count(f.vocab as u64)),
            row("configuration, SHA-256", Text::code(&f.config_sha256)),
            row("weights, SHA-256", Text::code(&f.weights_sha256)),
            row("device", Text::code(self.device)),
            row("seed", self.seed.to_string()),
            row("windows", windows),
            row("tokens scored", count(self.tokens as u64)),
            row("shared with calibration text", shared(self.overlap)),
            row("program", self.program.to_string()),
        ]
    }
}

/// Whether measured text was calibrated on, in a few words.
fn shared(overlap: Option<&Overlaps>) -> String {
    match overlap.map(|o| (o.status, o)) {
        None => "not looked for: an older version measured".into(),
        Some((Status::None, _)) => "nothing".into(),
        Some((_, overlap)) => overlap.lines().join("; "),
    }
}

/// What must be said where measured text was calibrated on, or may have been.
pub fn not_held_out(overlap: Option<&Overlaps>) -> Option<Block> {
    let overlap = overlap.filter(|o| o.status != Status::None)?;
    let stressed = match overlap.status {
        Status::Found => "Not held out:",
        _ => "Perhaps not held out:",
    };
    Some(Block::Paragraph(Text::strong(stressed).then(format!(" {}.", overlap.lines().join("; ")))))
}

fn row(name: &str, value: impl Into<Text>) -> Vec<Cell> {
    vec![name.into(), Cell::Text(value.into())]
}

/// Architecture and sizes of a model.
pub fn architecture(f: &Fingerprint) -> String {
    format!(
        "{}, {}, {} on {}, width {}",
        f.architecture,
        plural(f.layers, "layer"),
        plural(f.heads, "query head"),
        plural(f.kv_heads, "KV head"),
        f.head_dim
    )
}

/// Provenance of the figures of a diagnosis.
pub fn of_diagnosis(diagnosis: &Diagnosis, command: &str) -> Source {
    Source { measured: measured!(diagnosis).line(), command: Some(diagnosis.command.clone()), report: command.into() }
}

/// Provenance of the figures of an evaluation.
pub fn of_evaluation(evaluation: &Evaluation, command: &str) -> Source {
    Source { measured: measured!(evaluation).line(), command: evaluation.command.clone(), report: command.into() }
}

/// Provenance of the figures of a sweep.
pub fn of_sweep(sweep: &Sweep, command: &str) -> Source {
    Source { measured: measured!(sweep).line(), command: Some(sweep.command.clone()), report: command.into() }
}

/// Provenance of the tables of a comparison, and the commands that make them.
pub fn of_comparison(comparison: &Comparison, command: &str) -> Text {
    let source =
        Source { measured: measured!(comparison).line(), command: comparison.command.clone(), report: command.into() };
    let line =
        |text: Text, (done, command): (&str, &str)| text.then(format!(" {done} by ")).then_code(command).then(".");
    source.commands().into_iter().fold(source.measured.clone(), line)
}

/// Provenance of the figures of a fine-tuning.
pub fn of_finetuning(summary: &Summary, command: &str) -> Source {
    let texts: Vec<String> = summary.train.texts.iter().map(|text| text.path.display().to_string()).collect();
    let measured = Text::from("Model ")
        .then_code(&summary.model)
        .then(format!(" ({}); text ", architecture(&summary.fingerprint)))
        .then_code(texts.join(", "))
        .then(format!(
            "; {} of {} to train on, {} held out; seed {}.",
            plural(summary.train.windows, "window"),
            count(summary.context as u64),
            count(summary.held_out.windows as u64),
            summary.seed
        ));
    Source { measured, command: Some(summary.command.clone()), report: command.into() }
}

fn finetuning(summary: &Summary) -> Table {
    let windows = |trained: &Trained| format!("{} of {}", count(trained.windows as u64), count(summary.context as u64));
    let settings = serde_json::to_value(&summary.settings).unwrap_or_default();
    let settings = settings.as_object().into_iter().flatten();
    let setting = |(name, value): (&String, &serde_json::Value)| {
        let value = value.as_str().map_or(value.to_string(), str::to_owned);
        row(&name.replace('_', " "), value)
    };
    let rows = [
        row("model", Text::code(&summary.model)),
        row("weights, SHA-256", Text::code(&summary.fingerprint.weights_sha256)),
        row("device", Text::code(&summary.device)),
        row("seed", summary.seed.to_string()),
        row("windows to train on", windows(&summary.train)),
        row("windows held out", windows(&summary.held_out)),
        row("program", summary.program.clone()),
    ];
    let caption = Text::from("The fine-tuning of ").then_code(&summary.scheme).then(".");
    facts(caption, rows.into_iter().chain(settings.map(setting)).collect())
}

/// Everything that is needed to make a run again.
pub fn blocks(run: &Run) -> Vec<Block> {
    let mut blocks = Vec::new();
    if let Some(diagnosis) = &run.diagnosis {
        let mut rows = measured!(diagnosis).rows();
        rows.push(row("base quantizer", Text::code(&diagnosis.base)));
        rows.push(row("correction", format!("rank {}, {}", diagnosis.rank, plural(diagnosis.bits as usize, "bit"))));
        rows.push(row("command", Text::code(&diagnosis.command)));
        blocks.push(Block::Table(facts("The diagnosis.", rows)));
        blocks.push(Block::Table(texts("Texts that were measured on.", &diagnosis.texts)));
        blocks.push(Block::Table(calibration(diagnosis)));
        if !diagnosis.calibration.texts.is_empty() {
            blocks.push(Block::Table(texts("Texts that were calibrated on.", &diagnosis.calibration.texts)));
        }
        blocks.push(Block::Table(thresholds(&diagnosis.thresholds)));
    }
    for summary in run.finetunings.iter().map(|f| &f.summary) {
        blocks.push(Block::Table(finetuning(summary)));
        blocks.push(Block::Table(texts("Texts that were trained on.", &summary.train.texts)));
    }
    if let Some(evaluation) = &run.evaluation {
        blocks.push(Block::Table(facts("The evaluation.", measured!(evaluation).rows())));
        blocks.push(Block::Table(texts("Texts that were evaluated.", &evaluation.texts)));
    }
    if let Some(comparison) = &run.comparison {
        blocks.push(Block::Table(facts("The comparison.", measured!(comparison).rows())));
        blocks.push(Block::Table(texts("Texts that bases were compared on.", &comparison.texts)));
    }
    if let Some(sweep) = &run.sweep {
        let mut rows = measured!(sweep).rows();
        rows.push(row("sinks of default schemes", count(sweep.sinks as u64)));
        rows.push(row("dense window of default schemes", count(sweep.residual as u64)));
        rows.push(row("command", Text::code(&sweep.command)));
        blocks.push(Block::Table(facts("The sweep.", rows)));
        blocks.push(Block::Table(texts("Texts that were swept over.", &sweep.texts)));
        if !sweep.calibration.is_empty() {
            blocks.push(Block::Table(texts("Texts that were calibrated on.", &sweep.calibration)));
        }
        if !sweep.artifacts.is_empty() {
            blocks.push(Block::Table(given(&sweep.artifacts)));
        }
    }
    blocks
}

fn given(artifacts: &[Given]) -> Table {
    const COLUMNS: &[Column<Given>] = &[
        ("file", Align::Left, |g| Text::code(&g.path).into()),
        ("SHA-256", Align::Left, |g| Text::code(short_hash(&g.sha256)).into()),
    ];
    Table::of("Statistics and bases that were given.", COLUMNS, artifacts)
}

fn facts(caption: impl Into<Text>, rows: Vec<Vec<Cell>>) -> Table {
    Table::from_rows(caption, ["setting", "value"].map(|title| (title.to_string(), Align::Left)).to_vec(), rows)
}

fn texts(caption: &str, texts: &[TextInfo]) -> Table {
    const COLUMNS: &[Column<TextInfo>] = &[
        ("text", Align::Left, |t| Text::code(t.path.display().to_string()).into()),
        ("characters", Align::Right, |t| count(t.chars as u64).into()),
        ("tokens", Align::Right, |t| count(t.tokens as u64).into()),
        ("SHA-256 of the characters", Align::Left, |t| Text::code(short_hash(&t.sha256)).into()),
        ("of the windows' tokens", Align::Left, |t| Text::code(short_hash(&t.tokens_sha256)).into()),
    ];
    Table::of(caption, COLUMNS, texts)
}

fn calibration(diagnosis: &Diagnosis) -> Table {
    let c = &diagnosis.calibration;
    let windows = format!("{} of {} tokens for each text", plural(c.windows, "window"), count(c.context as u64));
    let first = match c.first_window {
        0 => "the first of the text".to_string(),
        n => format!("number {}, after those that are measured", n + 1),
    };
    facts(
        "Calibration: where bases, key means and grid scales come from. None of its windows is measured on.",
        vec![row("windows", windows), row("first window", first), row("tokens seen", count(c.tokens as u64))],
    )
}

/// What each threshold decides.
const THRESHOLDS: &[(&str, &str)] = &[
    ("confidence", "confidence level of every interval"),
    ("replicates", "bootstrap replicates"),
    (
        "min-units",
        "every interval: least number of windows or heads to resample; with fewer heads, points are resampled in their place",
    ),
    ("min-points", "metric, route flips: least number of points for a correlation"),
    ("min-rho", "metric: least Spearman ρ of Fisher error with attention KL"),
    ("min-counterexamples", "counterexamples: least share of equal-budget pairs"),
    ("budget-tolerance", "metric, counterexamples: code bits per element by which equal budgets may differ"),
    (
        "min-null-rise",
        "null space: least ratio of the greatest Fisher error over α to that of centered keys, for a static quantizer",
    ),
    (
        "max-null-change",
        "null space: most relative change of the Fisher error over α for a shift-equivariant quantizer",
    ),
    ("min-damage", "bases, direction, perplexity: least damage of the base quantizer, nats per token"),
    ("max-dense-loss", "bases, direction, perplexity: share of ln(vocabulary) that the dense loss must stay below"),
    ("min-flip-ratio", "direction: least ratio of the flipped correction's added loss to the base quantizer's"),
    ("min-flip-rise", "route flips: least ratio of the flip share above the median entropy to that below"),
    ("min-excess-removed", "perplexity: least share of the excess perplexity that the correction removes"),
];

fn thresholds(thresholds: &Thresholds) -> Table {
    const COLUMNS: &[Column<(String, String)>] = &[
        ("threshold", Align::Left, |(name, _)| Text::code(name).into()),
        ("value", Align::Right, |(_, value)| value.as_str().into()),
        ("decides", Align::Left, |(name, _)| meaning(name).into()),
    ];
    // Those that a later version adds are shown too.
    let json = serde_json::to_value(thresholds).unwrap_or_default();
    let values = json.as_object().into_iter().flatten();
    let shown = |value: &serde_json::Value| value.as_f64().map_or(value.to_string(), tick);
    let values: Vec<(String, String)> = values.map(|(name, value)| (name.clone(), shown(value))).collect();
    Table::of("Thresholds of the verdicts.", COLUMNS, &values)
}

fn meaning(threshold: &str) -> &'static str {
    THRESHOLDS.iter().find(|(name, _)| *name == threshold).map_or("", |(_, meaning)| meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_threshold_is_explained() {
        let json = serde_json::to_value(Thresholds::default()).unwrap();
        let names: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names, THRESHOLDS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }
}
