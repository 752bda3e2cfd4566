//! Fine-tuning: gradients for the correction, and where asked for the base quantizer below it, and for nothing else.
//!
//! The clip factors of a base quantizer (`train_base_clip`: one for each KV head of `kivi` and `token`, one for each coefficient of `klt`)
//! and the transforms of `klt` (`train_transform`: [`headq::transform`]) are trained together with U, W and the clip factors of the side
//! quantizer. Keys are then coded anew in every step.
//!
//! The losses local to a layer ([`headq::learn::Loss`]) need the dense model's queries and keys and no more: a dense pass captures
//! them for as many layers as [`CAPTURE_BYTES`] hold (3 KiB a token and layer for SmolLM2-135M, 30 MiB a layer for 20 windows of
//! 512), and each of these layers is then trained on its own, all of its heads at once, on as many cores as there are. A layer in
//! training keeps its samples ([`headq::learn::Sample`], 10 MiB a window of 512 for 9 heads) up to [`SAMPLE_BYTES`], and makes them
//! anew for every step beyond that.
//!
//! Optimizer: AdamW of Burn with the gradients of all of them; linear warm-up, then a cosine to zero. Held-out windows
//! decide: every few steps they are measured, and what is saved is, for each KV head, the best of all that was measured, the
//! initial basis included. A layer stops early when none of its heads has got better for a while.
//!
//! A state folder holds one checkpoint for each layer, written whole or not at all, with the optimizer's moments; a run that was
//! killed goes on from there to exactly the result of an uninterrupted one. At the end [`METRICS`] there has one line for each
//! measurement, and [`SUMMARY`] says how it went.

mod capture;
mod logits;
mod state;
mod summary;
mod train;
mod warnings;

use std::path::Path;

use headq::basis::{Basis, TrainedTransform};
use headq::learn::Loss;
use headq::quant::BaseQuantizer;
use headq::scheme::{Family, KeyScheme, Quantizer, Scheme, Scope};
use headq::{AttentionSite, Correction, KeyStatistics};
use headq_models::{Fingerprint, LanguageModel};
use serde::{Deserialize, Serialize};

use crate::artifact::{BasisArtifact, BasisHeader, StatsArtifact};
use crate::overlap::Passages;
use crate::text::{TextInfo, Windows};
use crate::workers::{Cores, map_in_order};
use crate::{LabError, Observer, PROGRAM};
use state::StateFolder;
pub use summary::{LayerSummary, METRICS, SUMMARY, Stopped, Summary, Trained};
pub use train::Measurement;
use train::{LayerTask, LayerTrained, Point};
use warnings::count;

/// Memory for captured queries and keys, in bytes.
pub const CAPTURE_BYTES: u64 = 2 << 30;
/// Memory for the samples of a layer in training, in bytes.
pub const SAMPLE_BYTES: u64 = 1 << 30;

/// How to train.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// `kl`, `fisher` or `score`, local to a layer; or `logits`, end to end.
    #[serde(default = "defaults::loss")]
    pub loss: String,
    /// Family to begin with; `best` takes, for each head, the closed form of the least loss on the training windows.
    #[serde(default = "defaults::init")]
    pub init: String,
    /// Optimizer steps for each layer.
    #[serde(default = "defaults::steps")]
    pub steps: usize,
    /// Passes over the training windows instead of steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<usize>,
    /// Peak learning rate. Columns of U and W have a norm near 1.
    #[serde(default = "defaults::lr")]
    pub lr: f64,
    /// Steps of linear warm-up.
    #[serde(default = "defaults::warmup")]
    pub warmup: usize,
    /// Windows in a step.
    #[serde(default = "defaults::batch")]
    pub batch: usize,
    /// One orthonormal matrix for encoder and decoder.
    #[serde(default)]
    pub tied: bool,
    /// Learn clip factors of the side quantizer, too.
    #[serde(default)]
    pub train_clip: bool,
    /// Learn clip factors of the base quantizer, too: one for each KV head of `kivi` and `token`, one for each coefficient of `klt`. Keys are
    /// then coded anew in every step, which takes several times as long.
    #[serde(default)]
    pub train_base_clip: bool,
    /// Learn the transforms of a base quantizer `klt`, too, in the same way.
    #[serde(default)]
    pub train_transform: bool,
    /// Steps between two measurements on held-out windows.
    #[serde(default = "defaults::measure_every")]
    pub measure_every: usize,
    /// Measurements without a better head after which a layer stops.
    #[serde(default = "defaults::patience")]
    pub patience: usize,
    /// Steps between two checkpoints.
    #[serde(default = "defaults::save_every")]
    pub save_every: usize,
}

mod defaults {
    pub fn loss() -> String {
        "kl".into()
    }
    pub fn init() -> String {
        "best".into()
    }
    pub fn steps() -> usize {
        300
    }
    pub fn lr() -> f64 {
        0.01
    }
    pub fn warmup() -> usize {
        20
    }
    pub fn batch() -> usize {
        2
    }
    pub fn measure_every() -> usize {
        20
    }
    pub fn patience() -> usize {
        6
    }
    pub fn save_every() -> usize {
        100
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            loss: defaults::loss(),
            init: defaults::init(),
            steps: defaults::steps(),
            epochs: None,
            lr: defaults::lr(),
            warmup: defaults::warmup(),
            batch: defaults::batch(),
            tied: false,
            train_clip: false,
            train_base_clip: false,
            train_transform: false,
            measure_every: defaults::measure_every(),
            patience: defaults::patience(),
            save_every: defaults::save_every(),
        }
    }
}

impl Settings {
    /// Checks everything that can be checked without a model.
    ///
    /// # Errors
    /// The setting, what was expected and what was found.
    pub fn check(&self) -> Result<(), String> {
        if !self.is_end_to_end() {
            self.local_loss()?;
        }
        self.candidates()?;
        if !(self.lr.is_finite() && self.lr > 0.0) {
            return Err(format!("lr: expected a number above 0, found {}", self.lr));
        }
        let counts = [
            ("steps", self.steps),
            ("epochs", self.epochs.unwrap_or(1)),
            ("batch", self.batch),
            ("measure_every", self.measure_every),
            ("patience", self.patience),
            ("save_every", self.save_every),
        ];
        match counts.iter().find(|(_, n)| *n == 0) {
            Some((name, _)) => Err(format!("{name}: expected at least 1, found 0")),
            None => Ok(()),
        }
    }

    /// The same in steps, where it is in passes over so many training windows.
    fn in_steps(&self, windows: usize) -> Option<Self> {
        let steps = self.epochs?.saturating_mul(windows.max(1).div_ceil(self.batch));
        Some(Self { steps, epochs: None, ..self.clone() })
    }

    /// Fails where a scheme's keys cannot be trained in this way.
    ///
    /// # Errors
    /// [`LabError::Usage`] saying what would do.
    pub fn check_key(&self, key: &KeyScheme) -> Result<(), LabError> {
        let scope = key.side.map(|side| side.scope).unwrap_or_default();
        let base = &key.base;
        if self.train_base_clip && base.clip_factors(1).is_none() {
            let reason = format!(
                "train_base_clip: {base} has no clip factors to learn; kivi and token have, rounded to nearest, and klt"
            );
            return Err(LabError::Usage(reason));
        }
        if self.train_transform && base.quantizer != Quantizer::Klt {
            return Err(LabError::Usage(format!("train_transform: {base} has no transform to learn; klt has")));
        }
        for (name, asked) in [("train_base_clip", self.train_base_clip), ("train_transform", self.train_transform)] {
            if asked && scope == Scope::QueryHead {
                let reason =
                    format!("{name}: query heads share the base code of their KV head; train with scope=kv-head");
                return Err(LabError::Usage(reason));
            }
        }
        Ok(())
    }

    fn is_end_to_end(&self) -> bool {
        self.loss == "logits"
    }

    fn local_loss(&self) -> Result<Loss, String> {
        self.loss.parse().map_err(|e: String| format!("loss: {e}; known are kl, fisher, score, logits"))
    }

    /// Families to choose the initial basis of each head from.
    fn candidates(&self) -> Result<Vec<Family>, String> {
        let closed =
            |tied: bool| Family::ALL.iter().copied().filter(move |f| *f != Family::Learned && (f.tied() || !tied));
        if self.init == "best" {
            let best = [Family::QueryPca, Family::ResidualPca, Family::ScoreOptimal];
            return Ok(closed(self.tied).filter(|f| best.contains(f)).collect());
        }
        closed(self.tied).find(|f| f.name() == self.init).map(|f| vec![f]).ok_or_else(|| {
            let known: Vec<&str> = closed(self.tied).map(Family::name).collect();
            let what = if self.tied { "a tied basis begins with" } else { "known are" };
            format!("init: '{}' is not known; {what} best, {}", self.init, known.join(", "))
        })
    }
}

/// What a fine-tuning is asked to do.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// Frozen model.
    pub model: &'a LanguageModel,
    /// Its identity.
    pub fingerprint: &'a Fingerprint,
    /// Model as given.
    pub name: String,
    /// Device as given.
    pub device: String,
    /// The command that was given.
    pub command: String,
    /// Texts to train on.
    pub train: &'a [Windows],
    /// Texts that decide when to stop.
    pub held_out: &'a [Windows],
    /// Whether windows begin with the beginning-of-sequence token.
    pub add_bos: bool,
    /// Statistics that initial bases are derived from.
    pub stats: &'a StatsArtifact,
    /// Scheme whose side code is trained; its family is `learned`.
    pub scheme: Scheme,
    /// How.
    pub settings: &'a Settings,
    /// Seed of the order of windows, and of random bases.
    pub seed: u64,
    /// Cores to use.
    pub threads: usize,
}

/// What a state folder belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Manifest {
    program: String,
    scheme: String,
    settings: Settings,
    seed: u64,
    model: Fingerprint,
    train: Vec<TextInfo>,
    held_out: Vec<TextInfo>,
    context: usize,
    add_bos: bool,
    initial: Vec<String>,
}

/// A trained basis and how it came about.
#[derive(Debug)]
pub struct Finetuned {
    /// The basis, of the family `learned`.
    pub artifact: BasisArtifact,
    /// Every measurement, by layer.
    pub measurements: Vec<Measurement>,
    /// How it went.
    pub summary: Summary,
    /// Loss on held-out windows, mean over layers and heads: of the initial basis, and of what is saved.
    pub held_out: (f64, f64),
    /// The same without a correction.
    pub uncorrected: f64,
}

/// Fails where a scheme has no side code that could be trained, or the statistics are of another base quantizer.
///
/// # Errors
/// [`LabError::Usage`] saying what would do.
pub fn check_scheme(scheme: &Scheme, stats: &StatsArtifact) -> Result<KeyScheme, LabError> {
    let usage = |reason: String| Err(LabError::Usage(format!("scheme '{scheme}': {reason}")));
    let Some((key, side)) = scheme.key.and_then(|key| Some((key, key.side?))) else {
        return usage("has no side code to train; add e.g. +learned(rank=4,bits=3)".into());
    };
    if side.family != Family::Learned {
        return usage(format!(
            "what is trained is of the family learned, not {0}; write +learned(…), and --init {0}",
            side.family
        ));
    }
    let made: headq::scheme::BaseScheme = stats.header.base.parse()?;
    if !made.same_residuals(&key.base) {
        return usage(format!("the statistics have residuals of {made}; calibrate with --base '{}'", key.base));
    }
    Ok(key)
}

impl Request<'_> {
    /// Trains, going on from what `folder` holds.
    ///
    /// # Errors
    /// If windows are too short, a layer diverges, a checkpoint cannot be kept, or on interruption.
    pub fn run(&self, folder: &Path, observer: &dyn Observer) -> Result<Finetuned, LabError> {
        let key = check_scheme(&self.scheme, self.stats)?;
        self.settings.check().map_err(LabError::Usage)?;
        if let Some(settings) = self.settings.in_steps(count(self.train)) {
            return Request { settings: &settings, ..self.clone() }.run(folder, observer);
        }
        self.settings.check_key(&key)?;
        let quantizers = self.quantizers(&key)?;
        self.check_windows(&quantizers[0])?;
        let candidates = self.candidates(&key)?;
        let settled: Vec<Vec<usize>> =
            self.stats.layers.iter().map(|layer| warnings::settled(layer, candidates[0].scope)).collect();
        let state = StateFolder::open(folder, &self.manifest(&candidates))?;
        let mut warnings = warnings::before(self, &key, &settled);
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let trained = match self.settings.is_end_to_end() {
            true => self.end_to_end(key, &candidates, &settled, &state, observer),
            false => self.by_layer(key, &quantizers, &candidates, &settled, &state, observer),
        };
        let trained = match trained {
            // Settings that diverge are not taken up again.
            Err(error @ LabError::Training { .. }) => return Err(state.discard().err().unwrap_or(error)),
            other => other?,
        };
        let late = warnings::after(self.settings.lr, &trained);
        late.iter().for_each(|warning| tracing::warn!("{warning}"));
        warnings.extend(late);
        let summary = self.summary(&trained, warnings);
        state.conclude(&trained, &summary)?;
        Ok(self.finish(&key, &trained, summary))
    }

    fn end_to_end(
        &self,
        key: KeyScheme,
        candidates: &[Basis],
        settled: &[Vec<usize>],
        state: &StateFolder,
        observer: &dyn Observer,
    ) -> Result<Vec<LayerTrained>, LabError> {
        let progress = train::Progress::new(observer, 1, self.settings.steps);
        let keys = key.base.is_static().then(|| KeyStatistics::of(&self.stats.layers)).transpose()?;
        let trained = logits::EndToEnd { request: self, key, keys, candidates, settled }.run(state, &progress);
        progress.close();
        trained
    }

    fn by_layer(
        &self,
        key: KeyScheme,
        quantizers: &[BaseQuantizer],
        candidates: &[Basis],
        settled: &[Vec<usize>],
        state: &StateFolder,
        observer: &dyn Observer,
    ) -> Result<Vec<LayerTrained>, LabError> {
        let loss = self.settings.local_loss().map_err(LabError::Usage)?;
        let layers = self.model.config().num_layers;
        let mut trained: Vec<Option<LayerTrained>> =
            (0..layers).map(|layer| state.finished(layer)).collect::<Result<_, _>>()?;
        let open: Vec<usize> = (0..layers).filter(|&layer| trained[layer].is_none()).collect();
        let captured = capture::layers_at_once(self.model.config(), self.window_count(), self.context(), self.threads);
        for layers in open.chunks(captured) {
            let captures = capture::capture(self, layers, observer)?;
            let progress = train::Progress::new(observer, layers.len(), self.settings.steps);
            let result = map_in_order(
                "",
                layers.len(),
                Cores::on(&self.model.device(), self.threads),
                &progress,
                || (),
                |(), i| {
                    let layer = layers[i];
                    let task = LayerTask {
                        key,
                        loss,
                        layer,
                        site: self.site(layer),
                        quantizer: &quantizers[layer],
                        windows: &captures[i],
                        held_out: count(self.held_out),
                        candidates,
                        settled: &settled[layer],
                        settings: self.settings,
                        seed: self.seed,
                        device: self.model.device(),
                    };
                    task.run(state, &progress)
                },
                |i, done| trained[layers[i]] = Some(done),
            );
            progress.close();
            result?;
        }
        Ok(trained.into_iter().flatten().collect())
    }

    fn context(&self) -> usize {
        self.train.first().and_then(|t| t.windows.first()).map_or(0, Vec::len)
    }

    fn windows(&self) -> Vec<&[u32]> {
        self.train.iter().chain(self.held_out).flat_map(|t| t.windows.iter().map(Vec::as_slice)).collect()
    }

    fn window_count(&self) -> usize {
        count(self.train) + count(self.held_out)
    }

    fn site(&self, layer: usize) -> AttentionSite {
        let config = self.model.config();
        AttentionSite { layer, start: 0, scale: config.scales[layer], window: config.windows[layer] }
    }

    fn quantizers(&self, key: &KeyScheme) -> Result<Vec<BaseQuantizer>, LabError> {
        let layers = 0..self.model.config().num_layers;
        if !key.base.is_static() {
            return Ok(layers.map(|_| BaseQuantizer::new(key.base)).collect());
        }
        let keys = KeyStatistics::of(&self.stats.layers)?;
        keys.check(&self.scheme)?;
        Ok(layers.map(|layer| BaseQuantizer::calibrated(key.base, &keys, layer, &self.model.device())).collect())
    }

    fn check_windows(&self, quantizer: &BaseQuantizer) -> Result<(), LabError> {
        if count(self.train) == 0 || count(self.held_out) == 0 {
            let reason = "fine-tuning needs at least one window to train on and one held out to stop by";
            return Err(LabError::Usage(reason.into()));
        }
        let needs = headq::learn::Sample::needs(quantizer);
        if self.windows().iter().any(|w| w.len() < needs) {
            let reason = format!(
                "windows of {} tokens hold no key that is read from codes; give a context of at least {needs}",
                self.context()
            );
            return Err(LabError::Usage(reason));
        }
        Ok(())
    }

    /// Initial bases to choose from, with the names of their families.
    fn candidates(&self, key: &KeyScheme) -> Result<Vec<Basis>, LabError> {
        let side = key.side.ok_or_else(|| LabError::Usage("no side code".into()))?;
        let families = self.settings.candidates().map_err(LabError::Usage)?;
        let fit = |family| Basis::fit(&self.stats.layers, family, side.rank, side.scope, self.seed);
        let mut candidates = families.into_iter().map(fit).collect::<Result<Vec<_>, _>>()?;
        if !self.settings.tied {
            let equalized = candidates.iter().map(|basis| basis.equalized(&self.stats.layers));
            let equalized = equalized.collect::<Result<Vec<_>, _>>()?;
            candidates.extend(equalized);
        }
        Ok(candidates)
    }

    fn manifest(&self, candidates: &[Basis]) -> Manifest {
        let info = |texts: &[Windows]| texts.iter().map(|t| t.text.clone()).collect();
        Manifest {
            program: PROGRAM.into(),
            scheme: self.scheme.to_string(),
            settings: self.settings.clone(),
            seed: self.seed,
            model: self.fingerprint.clone(),
            train: info(self.train),
            held_out: info(self.held_out),
            context: self.context(),
            add_bos: self.add_bos,
            initial: candidates.iter().map(hash).collect(),
        }
    }

    fn summary(&self, trained: &[LayerTrained], warnings: Vec<String>) -> Summary {
        let texts = |texts: &[Windows]| Trained {
            texts: texts.iter().map(|t| t.text.clone()).collect(),
            windows: count(texts),
        };
        let one = |layer, trained: &LayerTrained| LayerSummary::of(layer, trained, self.settings);
        let layers = match self.settings.is_end_to_end() {
            true => vec![one(None, &trained[0])],
            false => trained.iter().enumerate().map(|(layer, trained)| one(Some(layer), trained)).collect(),
        };
        Summary {
            program: PROGRAM.into(),
            command: self.command.clone(),
            model: self.name.clone(),
            fingerprint: self.fingerprint.clone(),
            device: self.device.clone(),
            seed: self.seed,
            add_bos: self.add_bos,
            context: self.context(),
            scheme: self.scheme.to_string(),
            settings: self.settings.clone(),
            train: texts(self.train),
            held_out: texts(self.held_out),
            warnings,
            layers,
        }
    }

    /// All layers' parameters as one artifact.
    fn finish(&self, key: &KeyScheme, trained: &[LayerTrained], summary: Summary) -> Finetuned {
        let side = key.side.expect("check_scheme found a side code");
        let mean = |loss: &dyn Fn(&LayerTrained) -> &[f64]| {
            let all: Vec<f64> = trained.iter().flat_map(|t| loss(t).iter().copied()).collect();
            state::mean(&all)
        };
        let head_dim = self.model.config().head_dim;
        let side_heads = trained[0].best.decoder.len() / (head_dim * side.rank);
        let correction =
            |t: &LayerTrained| t.best.correction(key, [side_heads, head_dim, side.rank], &self.model.device());
        let corrections: Vec<Correction> = trained.iter().map(correction).collect();
        let best: Vec<Point> = trained.iter().map(|t| t.best.clone()).collect();
        let Point { base_clip, base_analysis, base_synthesis, .. } = Point::concat(&best);
        let transform = base_analysis.zip(base_synthesis);
        let transform = transform.map(|(analysis, synthesis)| TrainedTransform { analysis, synthesis });
        let basis = Basis::learned(&side, &corrections).with_base_clip(base_clip).with_base_transform(transform);
        let relative = key.base.quantizer == Quantizer::Klt && basis.changes_base();
        let mut header = self.stats.header.clone();
        header.kind = "basis".into();
        header.program = PROGRAM.into();
        let trained_on = self.train.iter().chain(self.held_out).map(|t| t.text.clone());
        header.texts = trained_on.chain(self.stats.header.texts.clone()).collect();
        let trained_on = Passages::of_all(self.train.iter().chain(self.held_out), self.add_bos);
        header.passages = trained_on.into_iter().chain(self.stats.header.passages.clone()).collect();
        header.tokens = self.window_count() * self.context();
        header.context = self.context();
        header.add_bos = self.add_bos;
        header.base = key.base.to_string();
        header.basis = Some(BasisHeader {
            loss: Some(self.settings.loss.clone()),
            bits: Some(side.bits),
            scales: Some(side.scales.to_string()),
            calibration: relative.then(|| self.stats.calibration_of(&key.base)),
            ..BasisHeader::derived(Family::Learned, side.rank, side.scope, self.seed)
        });
        Finetuned {
            artifact: BasisArtifact { header, basis },
            measurements: trained.iter().flat_map(|t| t.measurements.clone()).collect(),
            summary,
            held_out: (mean(&|t| &t.initial_loss), mean(&|t| &t.best_loss)),
            uncorrected: mean(&|t| &t.uncorrected_loss),
        }
    }
}

fn hash(basis: &Basis) -> String {
    use sha2::{Digest, Sha256};
    let numbers = basis.decoder.iter().chain(basis.encoder.iter().flatten());
    let bytes: Vec<u8> = numbers.flat_map(|v| v.to_le_bytes()).collect();
    format!("{} {}", basis.family, crate::text::hex(&Sha256::digest(bytes)))
}
