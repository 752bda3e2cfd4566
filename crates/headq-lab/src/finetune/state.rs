//! The state folder: what is trained, and how far.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::train::{LayerTrained, Measurement, Point};
use super::{Manifest, Settings, Summary};
use crate::LabError;
use crate::artifact::{is_temporary, write_atomic};

/// A training loss this many times the initial one has diverged.
const DIVERGED: f64 = 100.0;

/// Losses below this are not told apart.
const NO_LOSS: f64 = 1e-9;

/// A folder with `finetune.json` (what is asked for), `layer-N.safetensors` (how far each layer is) and, at the end,
/// [`METRICS`](super::METRICS) and [`SUMMARY`](super::SUMMARY). Locked while it is in use.
pub struct StateFolder {
    path: PathBuf,
    _lock: File,
}

const MANIFEST: &str = "finetune.json";
const LOCK: &str = ".lock";

/// Everything about a layer in training that is not a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerHeader {
    /// Steps done.
    pub step: usize,
    /// Whether no more are to come.
    pub finished: bool,
    /// Measurements since any head got better.
    pub idle: usize,
    /// Sum of the training losses since the last measurement, and their number.
    pub running: (f64, usize),
    /// Held-out losses of each head: without a correction, of the initial basis, and the best.
    pub uncorrected_loss: Vec<f64>,
    /// See `uncorrected_loss`.
    pub initial_loss: Vec<f64>,
    /// See `uncorrected_loss`.
    pub best_loss: Vec<f64>,
    /// Training loss of the initial basis, all heads together.
    pub initial_train: f64,
    /// Measurements so far.
    pub measurements: Vec<Measurement>,
    /// Seconds spent so far.
    #[serde(default)]
    pub seconds: f64,
}

/// Losses before the first step.
pub struct InitialLosses {
    /// On the training windows, all heads together.
    pub train: f64,
    /// On the held-out windows, by head.
    pub held_out: Vec<f64>,
    /// The same without a correction.
    pub uncorrected: Vec<f64>,
}

impl LayerHeader {
    /// Fails where a training loss says that training has diverged.
    pub fn check(&self, loss: f64, settings: &Settings) -> Result<(), String> {
        if loss.is_nan() || loss > DIVERGED * self.initial_train.max(NO_LOSS) {
            let (from, lr) = (self.initial_train, settings.lr);
            return Err(format!("the loss has grown from {from:.3e} to {loss:.3e}; lower the learning rate {lr}"));
        }
        Ok(())
    }

    /// Adds a measurement of the held-out loss, beside the mean training loss of `heads` heads since the last one.
    pub fn note(&mut self, layer: usize, lr: f64, heads: usize, held_out: f64) {
        let (sum, count) = std::mem::take(&mut self.running);
        self.measurements.push(Measurement {
            layer,
            step: self.step,
            lr,
            loss: sum / (count * heads) as f64,
            held_out,
            best: mean(&self.best_loss),
        });
    }
}

pub fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// A layer's checkpoint: the parameters, AdamW's two moments of each, and the best parameters so far.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Numbers.
    pub header: LayerHeader,
    /// Where training is.
    pub now: Point,
    /// First moments, of a shape with `now`.
    pub first: Point,
    /// Second moments.
    pub second: Point,
    /// The best parameters of each head.
    pub best: Point,
}

impl StateFolder {
    /// Makes the folder, or takes it up.
    pub fn open(path: &Path, manifest: &Manifest) -> Result<Self, LabError> {
        let fail = |reason: &str| LabError::Artifact { path: path.to_owned(), reason: reason.into() };
        let file = path.join(MANIFEST);
        let entries = || -> Result<Vec<PathBuf>, LabError> {
            let entries =
                std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(LabError::io(path))?;
            Ok(entries.iter().map(std::fs::DirEntry::path).collect())
        };
        if file.exists() {
            match crate::run::kept::<Manifest>(&file, "the fine-tuning")? {
                Some(found) if found == *manifest => {}
                _ => {
                    return Err(fail(
                        "holds a fine-tuning of another model, text, scheme or settings; remove the folder, or name another",
                    ));
                }
            }
        } else if path.exists() && entries()?.iter().any(|p| !is_temporary(p) && !p.ends_with(LOCK)) {
            return Err(fail("is not empty and holds no fine-tuning; name another folder"));
        }
        std::fs::create_dir_all(path).map_err(LabError::io(path))?;
        let lock = File::create(path.join(LOCK)).map_err(LabError::io(path))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(fail("another headq is at work on it; wait for it, or name another folder"));
        }
        for left in entries()?.iter().filter(|p| is_temporary(p)) {
            std::fs::remove_file(left).map_err(LabError::io(left))?;
        }
        if !file.exists() {
            crate::run::write_json(&file, manifest)?;
        }
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Removes everything.
    pub fn discard(self) -> Result<(), LabError> {
        std::fs::remove_dir_all(&self.path).map_err(LabError::io(&self.path))
    }

    fn layer(&self, layer: usize) -> PathBuf {
        self.path.join(format!("layer-{layer}.safetensors"))
    }

    /// A layer that is trained to its end.
    pub fn finished(&self, layer: usize) -> Result<Option<LayerTrained>, LabError> {
        Ok(self.load(layer)?.filter(|c| c.header.finished).map(LayerTrained::from))
    }

    /// How far a layer is; `None` at its beginning.
    pub fn load(&self, layer: usize) -> Result<Option<Checkpoint>, LabError> {
        let path = self.layer(layer);
        let bytes = match std::fs::read(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(LabError::io(&path))?,
        };
        let broken = || LabError::Artifact {
            path: path.clone(),
            reason: "is no checkpoint of this program; remove it, and the layer is trained again".into(),
        };
        Checkpoint::parse(&bytes).ok_or_else(broken).map(Some)
    }

    /// Keeps a checkpoint.
    pub fn save(&self, layer: usize, checkpoint: &Checkpoint) -> Result<(), LabError> {
        let path = self.layer(layer);
        let bytes = checkpoint.bytes().map_err(|reason| LabError::Artifact { path: path.clone(), reason })?;
        write_atomic(&path, &bytes)
    }

    /// Writes how it went, and all measurements, one JSON object a line.
    pub fn conclude(&self, layers: &[LayerTrained], summary: &Summary) -> Result<(), LabError> {
        let path = self.path.join(super::METRICS);
        let mut text = String::new();
        for measurement in layers.iter().flat_map(|l| &l.measurements) {
            let line = serde_json::to_string(measurement)
                .map_err(|e| LabError::Artifact { path: path.clone(), reason: e.to_string() })?;
            text.push_str(&line);
            text.push('\n');
        }
        write_atomic(&path, text.as_bytes())?;
        crate::run::write_json(&self.path.join(super::SUMMARY), summary)
    }
}

impl Checkpoint {
    /// The beginning of layer `layer` at a point; its end, too, where all heads are settled.
    pub fn new(layer: usize, now: Point, losses: InitialLosses, settled: bool) -> Self {
        let held_out = mean(&losses.held_out);
        let loss = losses.train / losses.held_out.len() as f64;
        let header = LayerHeader {
            step: 0,
            // A base code that loses nothing leaves nothing to learn.
            finished: settled || losses.train <= NO_LOSS,
            idle: 0,
            running: (0.0, 0),
            uncorrected_loss: losses.uncorrected,
            best_loss: losses.held_out.clone(),
            initial_loss: losses.held_out,
            initial_train: losses.train,
            measurements: vec![Measurement { layer, step: 0, lr: 0.0, loss, held_out, best: held_out }],
            seconds: 0.0,
        };
        let zeros = now.zeros_like();
        Self { header, best: now.clone(), first: zeros.clone(), second: zeros, now }
    }

    /// Takes a step to `now`, after a training loss; those of `heads` heads that are settled stay where they are.
    ///
    /// Fails where a number is not finite.
    pub fn advance(
        &mut self,
        mut now: Point,
        loss: f64,
        settled: &[usize],
        heads: usize,
        settings: &Settings,
    ) -> Result<(), String> {
        settled.iter().for_each(|&head| now.take_head(&self.now, head, heads));
        if !now.is_finite() {
            return Err(format!("the parameters are not finite; lower the learning rate {}", settings.lr));
        }
        self.now = now;
        self.header.step += 1;
        self.header.running.0 += loss;
        self.header.running.1 += 1;
        Ok(())
    }

    fn points(&self) -> [(&'static str, &Point); 4] {
        [("now", &self.now), ("first", &self.first), ("second", &self.second), ("best", &self.best)]
    }

    fn bytes(&self) -> Result<Vec<u8>, String> {
        let mut tensors = Vec::new();
        for (name, point) in self.points() {
            for (part, values) in point.parts() {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                tensors.push((format!("{name}.{part}"), values.len(), bytes));
            }
        }
        let views = tensors.iter().map(|(name, length, bytes)| {
            let view = TensorView::new(Dtype::F32, vec![*length], bytes).map_err(|e| e.to_string())?;
            Ok((name.as_str(), view))
        });
        let views = views.collect::<Result<Vec<_>, String>>()?;
        let header = serde_json::to_string(&self.header).map_err(|e| e.to_string())?;
        let metadata = std::collections::HashMap::from([("headq".to_string(), header)]);
        safetensors::serialize(views, Some(metadata)).map_err(|e| e.to_string())
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).ok()?;
        let tensors = SafeTensors::deserialize(bytes).ok()?;
        let header: LayerHeader = from_json(metadata.metadata().as_ref()?.get("headq")?)?;
        let part = |name: &str| -> Option<Vec<f32>> {
            let data = tensors.tensor(name).ok()?.data();
            Some(data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let point = |name: &str| {
            Some(Point {
                decoder: part(&format!("{name}.decoder"))?,
                encoder: part(&format!("{name}.encoder")),
                clip: part(&format!("{name}.clip")),
                base_clip: part(&format!("{name}.base_clip")),
                base_analysis: part(&format!("{name}.base_analysis")),
                base_synthesis: part(&format!("{name}.base_synthesis")),
            })
        };
        Some(Self {
            header,
            now: point("now")?,
            first: point("first")?,
            second: point("second")?,
            best: point("best")?,
        })
    }
}

fn from_json<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}
