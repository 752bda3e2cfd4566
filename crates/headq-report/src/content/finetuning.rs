//! Trained bases: losses by step, and what each layer came to.

use std::collections::{BTreeMap, BTreeSet};

use headq_lab::finetune::{LayerSummary, Measurement, Stopped, Summary};

use super::columns::number;
use super::provenance;
use crate::Finetuning;
use crate::document::{Align, Block, Column, Figure, Panel, Source, Table, Text};
use crate::format::{self, count, maybe, percent, plural};
use crate::plot::Key;
use crate::plot::curves::{Curve, Curves, Kind};

/// Steps that are shown at most.
const MOST_STEPS: usize = 100;

/// Everything that is said of the bases that a run trained; none where it trained none.
pub fn blocks(finetunings: &[Finetuning], command: &str) -> Option<Vec<Block>> {
    (!finetunings.is_empty()).then(|| finetunings.iter().flat_map(|f| one(f, command)).collect())
}

fn one(Finetuning { summary, measurements }: &Finetuning, command: &str) -> Vec<Block> {
    let warnings = summary.warnings.iter().map(|w| Block::Paragraph(Text::strong("Note:").then(format!(" {w}."))));
    let mut blocks = vec![Block::Paragraph(how(summary))];
    blocks.extend(warnings);
    blocks.push(Block::Table(layers(summary)));
    blocks.push(Block::Figure(figure(summary, measurements, provenance::of_finetuning(summary, command))));
    blocks
}

/// What was trained, and how, in a line.
fn how(summary: &Summary) -> Text {
    let s = &summary.settings;
    let trained = match (s.tied, s.train_clip) {
        (false, false) => "encoder and decoder",
        (false, true) => "encoder, decoder and clip factors of the side quantizer",
        (true, false) => "one orthonormal matrix, encoder and decoder in one,",
        (true, true) => "one orthonormal matrix, encoder and decoder in one, and clip factors of the side quantizer",
    };
    let base = match (s.train_base_clip, s.train_transform) {
        (false, false) => "",
        (true, false) => ", with clip factors of the base quantizer,",
        (false, true) => ", with the transforms of the base quantizer,",
        (true, true) => ", with transforms and clip factors of the base quantizer,",
    };
    let init = if s.init == "best" { "the best closed form of each head".to_string() } else { s.init.clone() };
    Text::code(&summary.scheme).then(format!(
        ": {trained}{base} trained on the loss {}, beginning with {init}; learning rate {}, {} in a step, at most {}.",
        s.loss,
        format::tick(s.lr),
        plural(s.batch, "window"),
        plural(s.steps, "step"),
    ))
}

/// Losses, as captions say it.
fn losses(summary: &Summary) -> &'static str {
    match summary.settings.loss.as_str() {
        "score" => "loss (score error, squared)",
        "logits" => "loss (KL of next-token distributions, nats)",
        "fisher" => "loss (Fisher error, nats)",
        _ => "loss (attention KL, nats)",
    }
}

/// A row of the table: a layer, or all of them.
struct Row {
    layer: Option<usize>,
    uncorrected: f64,
    initial: f64,
    best: f64,
    best_step: usize,
    steps: usize,
    /// None where layers stopped for different reasons.
    stopped: Option<Stopped>,
    seconds: f64,
}

impl Row {
    fn of(layers: &[LayerSummary]) -> Option<Self> {
        let (first, n) = (layers.first()?, layers.len() as f64);
        let mean = |value: fn(&LayerSummary) -> f64| layers.iter().map(value).sum::<f64>() / n;
        let most = |value: fn(&LayerSummary) -> usize| layers.iter().map(value).max().unwrap_or(0);
        Some(Self {
            layer: first.layer.filter(|_| layers.len() == 1),
            uncorrected: mean(|l| l.uncorrected),
            initial: mean(|l| l.initial),
            best: mean(|l| l.best),
            best_step: most(|l| l.best_step),
            steps: most(|l| l.steps),
            stopped: layers.iter().all(|l| l.stopped == first.stopped).then_some(first.stopped),
            seconds: layers.iter().map(|l| l.seconds).sum(),
        })
    }

    /// Relative change from the initial basis to the best.
    fn change(&self) -> Option<f64> {
        (self.initial > 0.0).then(|| self.best / self.initial - 1.0)
    }
}

/// All layers together, and each of them where there are several.
fn layers(summary: &Summary) -> Table {
    const COLUMNS: &[Column<Row>] = &[
        ("layer", Align::Left, |r| r.layer.map_or("all".into(), |layer| layer.to_string()).into()),
        ("no correction", Align::Right, |r| number(Some(r.uncorrected))),
        ("initial basis", Align::Right, |r| number(Some(r.initial))),
        ("best", Align::Right, |r| number(Some(r.best))),
        ("change", Align::Right, |r| maybe(r.change(), percent).into()),
        ("best at step", Align::Right, |r| count(r.best_step as u64).into()),
        ("steps", Align::Right, |r| count(r.steps as u64).into()),
        ("stopped", Align::Left, |r| r.stopped.map_or(format::NONE, stopped).into()),
        ("seconds", Align::Right, |r| format::fixed(r.seconds, 1).into()),
    ];
    let caption = format!(
        "Held-out {}, mean over heads: without a correction, of the initial basis, and the best of each head, which is what is saved. \
         After the step of the best no head of the layer got better. All layers: means, the last step of any, and the sum of their \
         seconds, which overlap where layers are trained side by side.",
        losses(summary)
    );
    let together = Row::of(&summary.layers).into_iter();
    let single = summary.layers.chunks(1).filter(|_| summary.layers.len() > 1).filter_map(Row::of);
    Table::of(caption, COLUMNS, &together.chain(single).collect::<Vec<_>>())
}

fn stopped(why: Stopped) -> &'static str {
    match why {
        Stopped::Steps => "all steps taken",
        Stopped::Patience => "nothing better for a while",
        Stopped::NothingToLearn => "nothing to learn",
    }
}

/// Losses at a step, means over layers.
struct Step {
    step: usize,
    loss: f64,
    held_out: f64,
    best: f64,
}

/// Means by step; a layer that has stopped counts with the losses that it had then.
fn steps(measurements: &[Measurement]) -> Vec<Step> {
    let mut layers: BTreeMap<usize, Vec<&Measurement>> = BTreeMap::new();
    measurements.iter().for_each(|m| layers.entry(m.layer).or_default().push(m));
    let all: BTreeSet<usize> = measurements.iter().map(|m| m.step).collect();
    let at = |step: usize| {
        let latest =
            |own: &Vec<&Measurement>| own.iter().rev().find(|m| m.step <= step).map(|m| [m.loss, m.held_out, m.best]);
        let now: Vec<[f64; 3]> = layers.values().filter_map(latest).collect();
        let [loss, held_out, best] = [0, 1, 2].map(|i| now.iter().map(|m| m[i]).sum::<f64>() / now.len() as f64);
        Step { step, loss, held_out, best }
    };
    all.into_iter().map(at).collect()
}

/// Every so many-th step, so that not too many are left; the last one is kept.
fn thinned(steps: Vec<Step>) -> (usize, Vec<Step>) {
    let (every, last) = (steps.len().div_ceil(MOST_STEPS).max(1), steps.len().saturating_sub(1));
    let kept = |(i, step): (usize, Step)| (i % every == 0 || i == last).then_some(step);
    (every, steps.into_iter().enumerate().filter_map(kept).collect())
}

/// A curve: what it shows, and its value at a step.
type Line = (&'static str, fn(&Step) -> f64);

const CURVES: [Line; 3] =
    [("training", |s| s.loss), ("held out", |s| s.held_out), ("held out, best so far", |s| s.best)];

fn figure(summary: &Summary, measurements: &[Measurement], source: Source) -> Figure {
    const COLUMNS: &[Column<Step>] = &[
        ("step", Align::Right, |s| count(s.step as u64).into()),
        (CURVES[0].0, Align::Right, |s| number(Some(s.loss))),
        (CURVES[1].0, Align::Right, |s| number(Some(s.held_out))),
        (CURVES[2].0, Align::Right, |s| number(Some(s.best))),
    ];
    let (every, steps) = thinned(steps(measurements));
    let curve = |(series, (_, value)): (usize, &Line)| Curve {
        series,
        points: steps.iter().map(|s| (s.step as f64, value(s))).collect(),
    };
    let mut notes = vec![
        "Training losses are means over the steps since the last measurement, in which windows differ from step to step. The best so far \
         takes each head at its own best step."
            .to_string(),
    ];
    if every > 1 {
        notes.push(format!("One of {every} measurements is shown."));
    }
    Figure {
        title: format!("Fine-tuning: {} by optimizer step, mean over layers and heads.", losses(summary)),
        notes,
        panels: vec![Panel {
            title: None,
            label: format!("Training and held-out loss against the step, {}", plural(steps.len(), "measurement")),
            plot: Box::new(Curves { curves: CURVES.iter().enumerate().map(curve).collect(), kind: Kind::LossByStep }),
        }],
        legend: CURVES.iter().enumerate().map(|(i, (name, _))| (Key::Line(i), (*name).into())).collect(),
        source,
        data: vec![Table::of("Losses by step.", COLUMNS, &steps)],
    }
}
