//! How a fine-tuning went, for reports.

use headq_models::Fingerprint;
use serde::{Deserialize, Serialize};

use super::Settings;
use super::state::mean;
use super::train::LayerTrained;
use crate::text::TextInfo;

/// File of a state folder that holds its [`Summary`]; it is written last.
pub const SUMMARY: &str = "finetuned.json";

/// File of a state folder that holds every [`Measurement`](super::Measurement), one JSON object a line.
pub const METRICS: &str = "metrics.jsonl";

/// What was trained, on what, and what it came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Summary {
    /// `headq` and its version.
    pub program: String,
    /// The command that makes it again.
    pub command: String,
    /// Model as given.
    pub model: String,
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Device as given.
    pub device: String,
    /// Seed of the order of windows, and of random bases.
    pub seed: u64,
    /// Whether windows began with the beginning-of-sequence token.
    pub add_bos: bool,
    /// Tokens in a window.
    pub context: usize,
    /// The scheme whose side code was trained, in its written form.
    pub scheme: String,
    /// How.
    pub settings: Settings,
    /// Texts that were trained on, and all their windows.
    pub train: Trained,
    /// Texts that decided when to stop, and all their windows.
    pub held_out: Trained,
    /// What is to be kept in mind; each was said on standard error, too.
    pub warnings: Vec<String>,
    /// Layer by layer; one for all of them where they were trained together.
    pub layers: Vec<LayerSummary>,
}

/// Texts and the number of their windows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trained {
    /// Texts.
    pub texts: Vec<TextInfo>,
    /// Windows of all of them together.
    pub windows: usize,
}

/// A layer from its beginning to its end. Losses are means over heads on the held-out windows, in nats but for `score`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSummary {
    /// Layer, from 0; `null` for all of them together.
    pub layer: Option<usize>,
    /// Loss without a correction.
    pub uncorrected: f64,
    /// Loss of the initial basis.
    pub initial: f64,
    /// Loss of what is saved: the best of each head.
    pub best: f64,
    /// Optimizer steps after which a head got better for the last time; 0 is the initial basis.
    pub best_step: usize,
    /// Optimizer steps taken.
    pub steps: usize,
    /// Why no more.
    pub stopped: Stopped,
    /// Seconds spent on it. Layers are trained side by side.
    pub seconds: f64,
}

/// Why training ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stopped {
    /// All steps were taken.
    Steps,
    /// Held-out windows had not liked anything better for a while.
    Patience,
    /// The initial basis left no loss, or there is nothing to correct.
    NothingToLearn,
}

impl LayerSummary {
    /// Of a layer that was trained to its end.
    pub(super) fn of(layer: Option<usize>, trained: &LayerTrained, settings: &Settings) -> Self {
        let mut better = trained.measurements.windows(2).filter(|pair| pair[1].best < pair[0].best);
        Self {
            layer,
            uncorrected: mean(&trained.uncorrected_loss),
            initial: mean(&trained.initial_loss),
            best: mean(&trained.best_loss),
            best_step: better.next_back().map_or(0, |pair| pair[1].step),
            steps: trained.steps,
            stopped: match trained.steps {
                0 => Stopped::NothingToLearn,
                n if n == settings.steps => Stopped::Steps,
                _ => Stopped::Patience,
            },
            seconds: trained.seconds,
        }
    }
}
