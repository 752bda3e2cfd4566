//! Evaluation: perplexity of the quantized pass, diagnostics on the dense pass, and what each scheme stores.
//!
//! The quantized pass is one of [`crate::pass`]; diagnostics are always taken through tensors.

use std::path::Path;

use burn::tensor::Device;
use headq::basis::Basis;
use headq::budget::{Budget, HeadShape};
use headq::metrics::excess_removed;
use headq::scheme::{BaseScheme, SideScheme};
use headq::{
    Attention, Diagnostics, HeadDiagnostics, HeadqAttention, KeyStatistics, LayerProbe, QuantizedCache, Scheme,
};
use headq_models::{Fingerprint, LanguageModel, ModelConfig};
use serde::{Deserialize, Serialize};

use crate::artifact::{BasisArtifact, StatsArtifact};
use crate::generate::Cache;
use crate::overlap::{MadeFrom, Overlaps};
use crate::pass::{Pass, Runner};
use crate::text::{TextInfo, Windows};
use crate::workers::{Cores, map_in_order};
use crate::{LabError, Observer, PROGRAM, scheme_file};

/// A scheme with the basis that it needs.
#[derive(Debug, Clone)]
pub struct PlannedScheme {
    /// The text that named it.
    pub asked: String,
    /// What it means.
    pub scheme: Scheme,
    /// Present where the scheme has a side code.
    pub basis: Option<Basis>,
    /// Present where the base quantizer is calibrated.
    pub keys: Option<KeyStatistics>,
}

impl PlannedScheme {
    /// Dense keys and values.
    pub fn dense() -> Self {
        Self { asked: "dense".into(), scheme: Scheme::DENSE, basis: None, keys: None }
    }

    /// What the scheme stores in windows of `context` tokens.
    pub fn budget(&self, shape: &HeadShape, context: usize) -> Budget {
        Budget::calibrated(&self.scheme, self.keys.as_ref(), shape, context)
    }

    /// The scheme's codec of every layer.
    pub fn modules(&self, layers: usize, device: &Device) -> Vec<HeadqAttention> {
        let module =
            |layer| HeadqAttention::calibrated(self.scheme, self.basis.as_ref(), self.keys.as_ref(), layer, device);
        (0..layers).map(module).collect()
    }
}

/// Statistics and bases that schemes may draw on, with the files they came from.
#[derive(Debug, Default)]
pub struct Sources {
    /// Statistics artifacts.
    pub stats: Vec<(std::path::PathBuf, StatsArtifact)>,
    /// Basis artifacts.
    pub bases: Vec<(std::path::PathBuf, BasisArtifact)>,
    /// Scheme files.
    pub schemes: Vec<(std::path::PathBuf, scheme_file::SchemeFile)>,
    /// The basis that a comparison trains for its scheme.
    pub trained: Option<(std::path::PathBuf, BasisArtifact)>,
}

/// Shape of a model's attention.
pub fn head_shape(config: &ModelConfig) -> HeadShape {
    HeadShape {
        layers: config.num_layers,
        heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
    }
}

impl Sources {
    /// One statistics artifact.
    pub fn of_stats(path: &Path, artifact: StatsArtifact) -> Self {
        Self { stats: vec![(path.to_owned(), artifact)], ..Self::default() }
    }

    /// Loads artifacts and checks that they were made from this model.
    ///
    /// # Errors
    /// If a file cannot be read, or is of another model (naming both fingerprints).
    pub fn load<P: AsRef<Path>>(stats: &[P], bases: &[P], model: &Fingerprint) -> Result<Self, LabError> {
        let mut sources = Self::default();
        for path in stats.iter().map(AsRef::as_ref) {
            let artifact = StatsArtifact::load(path)?;
            artifact.header.check_model(path, model)?;
            sources.stats.push((path.to_owned(), artifact));
        }
        for path in bases.iter().map(AsRef::as_ref) {
            let artifact = BasisArtifact::load(path)?;
            artifact.header.check_model(path, model)?;
            sources.bases.push((path.to_owned(), artifact));
        }
        Ok(sources)
    }

    /// What every artifact was made from, to hold scored text against.
    pub fn made_from(&self) -> Vec<MadeFrom<'_>> {
        let stats = self.stats.iter().map(|(path, artifact)| artifact.header.made_from(path));
        let bases = self.bases.iter().chain(&self.trained).map(|(path, artifact)| artifact.header.made_from(path));
        let schemes = self.schemes.iter().map(|(path, file)| file.made_from(path));
        stats.chain(bases).chain(schemes).collect()
    }

    /// Takes note of the scheme files among what was asked for, which were chosen on texts of their own.
    ///
    /// # Errors
    /// If one cannot be read, or was made for another model.
    pub fn with_scheme_files(mut self, asked: &[String], model: &Fingerprint) -> Result<Self, LabError> {
        for asked in asked {
            scheme_file::check_model(asked, model)?;
            self.schemes.extend(scheme_file::read(asked)?);
        }
        Ok(self)
    }

    /// Parses a scheme, checks it against the model and finds or derives its basis.
    ///
    /// # Errors
    /// If the scheme is malformed, does not fit, or no given artifact agrees with its family, rank, scope and (where residuals
    /// matter) base quantizer.
    pub fn plan(&self, asked: &str, config: &ModelConfig, seed: u64) -> Result<PlannedScheme, LabError> {
        let scheme = scheme_file::resolve(asked)?;
        scheme.check(config.head_dim)?;
        let basis = match (scheme.key, scheme.side()) {
            (Some(key), Some(side)) => Some(self.basis(&scheme, &key.base, side, config, seed)?),
            _ => None,
        };
        let keys = if scheme.needs_statistics() { Some(self.key_statistics(&scheme)?) } else { None };
        Ok(PlannedScheme { asked: asked.trim().to_string(), scheme, basis, keys })
    }

    /// Statistics of keys and queries, which are the same whatever base quantizer was calibrated; of several, those that were
    /// calibrated for the scheme's own residuals.
    pub(crate) fn key_statistics(&self, scheme: &Scheme) -> Result<KeyStatistics, LabError> {
        let (path, artifact) = self.statistics_for(scheme)?;
        let found = KeyStatistics::of(&artifact.layers).and_then(|keys| keys.check(scheme).map(|()| keys));
        found.map_err(|e| LabError::Artifact { path: path.clone(), reason: e.to_string() })
    }

    /// Fails where a basis has learned parts of the transforms of other statistics than those that a scheme is given.
    ///
    /// # Errors
    /// [`LabError::Artifact`] naming both files.
    pub(crate) fn check_calibration(
        &self,
        path: &Path,
        artifact: &BasisArtifact,
        scheme: &Scheme,
    ) -> Result<(), LabError> {
        let trained_with = artifact.header.basis.as_ref().and_then(|basis| basis.calibration.as_ref());
        let Some((key, trained_with)) = scheme.key.zip(trained_with) else { return Ok(()) };
        let (found, statistics) = self.statistics_for(scheme)?;
        if statistics.calibration_of(&key.base) == *trained_with {
            return Ok(());
        }
        let reason = format!(
            "{} was trained with the transforms of other statistics; give those that it was trained with",
            path.display()
        );
        Err(LabError::Artifact { path: found.clone(), reason })
    }

    fn statistics_for(&self, scheme: &Scheme) -> Result<&(std::path::PathBuf, StatsArtifact), LabError> {
        let own = |artifact: &StatsArtifact| {
            let made: Option<BaseScheme> = artifact.header.base.parse().ok();
            scheme.key.zip(made).is_some_and(|(key, made)| made.same_residuals(&key.base))
        };
        // Of those with gradients, where they are needed.
        let fits = |a: &StatsArtifact| !scheme.needs_gradients() || a.layers.iter().all(|l| l.gradients.is_some());
        let all = || self.stats.iter();
        let found = all().find(|(_, a)| own(a) && fits(a)).or(all().find(|(_, a)| fits(a))).or(self.stats.first());
        found.ok_or_else(|| {
            let base = scheme.key.map_or(String::new(), |key| format!(" --base '{}'", key.base));
            let gradients = if scheme.needs_gradients() { " --gradients" } else { "" };
            LabError::Usage(format!(
                "scheme '{scheme}' needs statistics of keys and queries: run `headq calibrate MODEL --text FILE{base}{gradients} \
                 --out STATS` and give --stats STATS"
            ))
        })
    }

    /// Plans several schemes; a basis artifact that none of them can use is an error.
    ///
    /// # Errors
    /// As [`Sources::plan`], and for an artifact given in vain.
    pub fn plan_all(&self, asked: &[String], config: &ModelConfig, seed: u64) -> Result<Vec<PlannedScheme>, LabError> {
        let planned = asked.iter().map(|s| self.plan(s, config, seed)).collect::<Result<Vec<_>, _>>()?;
        self.check_used(planned.iter().map(|p| &p.scheme), config)?;
        Ok(planned)
    }

    /// Fails where none of these schemes can use a given basis.
    pub(crate) fn check_used<'a>(
        &self,
        schemes: impl Iterator<Item = &'a Scheme> + Clone,
        config: &ModelConfig,
    ) -> Result<(), LabError> {
        let corrected = || schemes.clone().filter_map(|s| Some((s.key?.base, s.key?.side?)));
        for (path, artifact) in &self.bases {
            let reasons: Vec<String> =
                corrected().filter_map(|(base, side)| artifact_agrees(artifact, &base, &side, config).err()).collect();
            if !reasons.is_empty() && reasons.len() == corrected().count() {
                let reason = format!("agrees with no scheme asked for: {}", reasons[0]);
                return Err(LabError::Artifact { path: path.clone(), reason });
            }
        }
        Ok(())
    }

    fn basis(
        &self,
        scheme: &Scheme,
        base: &BaseScheme,
        side: &SideScheme,
        config: &ModelConfig,
        seed: u64,
    ) -> Result<Basis, LabError> {
        let mut reasons = Vec::new();
        for (path, artifact) in &self.bases {
            match artifact_agrees(artifact, base, side, config) {
                Ok(()) => {
                    self.check_calibration(path, artifact, scheme)?;
                    return Ok(artifact.basis.clone());
                }
                Err(reason) => reasons.push(format!("{}: {reason}", path.display())),
            }
        }
        for (path, artifact) in &self.stats {
            match same_base(side, base, &artifact.header.base) {
                Ok(()) => return Ok(Basis::fit(&artifact.layers, side.family, side.rank, side.scope, seed)?),
                Err(reason) => reasons.push(format!("{}: {reason}", path.display())),
            }
        }
        Err(LabError::Usage(match reasons.is_empty() {
            true => format!(
                "scheme '{scheme}' needs a basis: give --stats (from headq calibrate) or --basis (from headq basis)"
            ),
            false => format!("scheme '{scheme}': no given artifact agrees with it; {}", reasons.join("; ")),
        }))
    }
}

/// Whether a basis artifact is the one that a scheme's side code needs.
pub(crate) fn artifact_agrees(
    artifact: &BasisArtifact,
    base: &BaseScheme,
    side: &SideScheme,
    config: &ModelConfig,
) -> Result<(), String> {
    let shape = head_shape(config);
    let agrees = artifact.basis.check(side, shape.layers, shape.heads, shape.kv_heads, shape.head_dim);
    agrees.map_err(|e| e.to_string()).and_then(|()| same_base(side, base, &artifact.header.base))
}

/// Whether an artifact made with the base quantizer `made_with` serves side codes on `base`.
pub(crate) fn same_base(side: &SideScheme, base: &BaseScheme, made_with: &str) -> Result<(), String> {
    if !side.family.uses_residual() {
        return Ok(());
    }
    let made: BaseScheme = made_with.parse().map_err(|e: headq::Error| e.to_string())?;
    if made.same_residuals(base) {
        return Ok(());
    }
    Err(format!(
        "its residuals are those of {made_with}, but {} on {base} needs its own: calibrate with --base '{base}'",
        side.family
    ))
}

/// Results of one scheme. Undefined numbers are `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SchemeResult {
    /// As asked.
    pub scheme: String,
    /// In canonical form, every default spelled out.
    pub canonical: String,
    /// exp of the mean negative log-likelihood.
    pub ppl: f64,
    /// Mean negative log-likelihood, nats per token.
    pub nll: f64,
    /// Code bits per coded key element, all in; 16 where keys are dense.
    pub key_bits: f64,
    /// Code bits per coded value element, all in; 16 where values are dense.
    pub value_bits: f64,
    /// Mean bits per element of all that the cache holds, over the evaluated query positions.
    pub cache_bits: f64,
    /// Bytes per cached token, whole model.
    pub bytes_per_token: f64,
    /// E2, nats.
    pub fisher: Option<f64>,
    /// E3, nats.
    pub kl: Option<f64>,
    /// E4 of the base code's k̂.
    pub key_mse: Option<f64>,
    /// E4 of base and side code together.
    pub key_mse_corrected: Option<f64>,
    /// E4 of values.
    pub value_mse: Option<f64>,
    /// E5.
    pub readout_error: Option<f64>,
    /// E6.
    pub readout_diagonal: Option<f64>,
    /// E7.
    pub output_error: Option<f64>,
    /// E8, against the first non-dense scheme.
    pub excess_removed: Option<f64>,
    /// Mean over tokens of nll − dense nll, nats.
    pub nll_minus_dense: f64,
    /// Standard error of that mean over tokens, paired.
    pub nll_minus_dense_se: Option<f64>,
    /// Mean nll by text, in order.
    pub nll_by_text: Vec<f64>,
    /// Seconds of this scheme's own pass and its share of the diagnostics; only where timings were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
}

/// Results of an evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Program and version.
    pub program: String,
    /// The command that makes it again, where a run did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Model as given.
    pub model: String,
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Device as given.
    pub device: String,
    /// Seed of random bases.
    pub seed: u64,
    /// Tokens scored: windows · (T − 1), over all texts.
    pub tokens: usize,
    /// T.
    pub context: usize,
    /// Windows of each text.
    pub windows: usize,
    /// Whether windows began with the beginning-of-sequence token.
    pub add_bos: bool,
    /// Texts.
    pub texts: Vec<TextInfo>,
    /// Whether any of them was calibrated on; absent where an older version evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<Overlaps>,
    /// How losses under schemes were taken: `tensors` and `packed` in teacher-forced passes, `decode` token by token; absent where an older
    /// version evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<String>,
    /// Type of the keys and values that a packed cache held dense, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_dtype: Option<String>,
    /// By scheme, in the order asked; dense first if it was not asked for.
    pub schemes: Vec<SchemeResult>,
    /// Seconds of the dense pass without diagnostics; only where timings were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_seconds: Option<f64>,
}

/// Where finished parts of an evaluation are kept, so that it can go on after an interruption.
pub trait PartStore {
    /// A part that was kept before.
    ///
    /// # Errors
    /// If it is there and cannot be read.
    fn get(&self, part: &str) -> Result<Option<serde_json::Value>, LabError>;
    /// Keeps a part.
    ///
    /// # Errors
    /// If it cannot be written.
    fn put(&self, part: &str, value: &serde_json::Value) -> Result<(), LabError>;
}

/// Keeps nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Forget;

impl PartStore for Forget {
    fn get(&self, _: &str) -> Result<Option<serde_json::Value>, LabError> {
        Ok(None)
    }
    fn put(&self, _: &str, _: &serde_json::Value) -> Result<(), LabError> {
        Ok(())
    }
}

/// What an evaluation is asked to do.
#[derive(Debug)]
pub struct Request<'a> {
    /// Model.
    pub model: &'a LanguageModel,
    /// Its identity.
    pub fingerprint: &'a Fingerprint,
    /// Model as the user named it.
    pub name: String,
    /// Device as the user named it.
    pub device: String,
    /// Texts, cut into windows of one length.
    pub texts: &'a [Windows],
    /// Whether windows begin with the beginning-of-sequence token.
    pub add_bos: bool,
    /// What they share with text that was calibrated on.
    pub overlap: Overlaps,
    /// Schemes.
    pub schemes: &'a [PlannedScheme],
    /// Seed that the bases were made with.
    pub seed: u64,
    /// Whether to take diagnostics (E2–E7) on the dense pass.
    pub diagnostics: bool,
    /// Cores to use.
    pub threads: usize,
    /// Whether to report how long each pass took, which no two runs agree on.
    pub timings: bool,
    /// How losses under schemes are taken. There are no diagnostics with [`Pass::Decode`].
    pub pass: Pass,
}

/// The dense pass: token losses and every scheme's diagnostics.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct DensePart {
    pub nll: Vec<f64>,
    pub diagnostics: Vec<HeadDiagnostics>,
}

impl Request<'_> {
    /// Runs the evaluation, taking up finished parts from `store`.
    ///
    /// # Errors
    /// If a pass gives numbers that are not finite, a part cannot be kept, or on interruption.
    pub fn run(&self, observer: &dyn Observer, store: &dyn PartStore) -> Result<Evaluation, LabError> {
        let mut schemes = self.schemes.to_vec();
        if !schemes.iter().any(|s| s.scheme.is_dense()) {
            schemes.insert(0, PlannedScheme::dense());
        }
        let measured: &[PlannedScheme] = if self.diagnostics && !self.decodes() { &schemes } else { &[] };
        // The clock needs a dense pass of its own; otherwise diagnostics are taken on the one that is run anyway.
        let dense_seconds = self
            .timings
            .then(|| {
                timed(|| match self.pass {
                    Pass::Decode(_) => self.dense_pass("dense", &[], observer),
                    // As diagnostics are taken on it.
                    Pass::Tensors | Pass::Packed(_) => self.dense_tensors("dense", &[], observer),
                })
            })
            .transpose()?
            .map(|(_, seconds)| seconds);
        let mut results = Vec::new();
        let scored: usize = self.windows().iter().map(|w| w.len() - 1).sum();
        let fits = |nll: &Vec<f64>| nll.len() == scored;
        let fits_dense = |d: &DensePart| fits(&d.nll) && d.diagnostics.len() == measured.len();
        let (dense, with_diagnostics): (DensePart, f64) =
            timed(|| part(store, "dense", fits_dense, || self.dense_pass("dense", measured, observer)))?;
        // What diagnostics cost is the coded schemes' to bear: the dense one has nothing to measure.
        let coded = schemes.iter().filter(|s| !s.scheme.is_dense()).count().max(1) as f64;
        for (i, planned) in schemes.iter().enumerate() {
            let (nll, seconds): (Vec<f64>, f64) = match planned.scheme.is_dense() {
                true => (dense.nll.clone(), 0.0),
                false => timed(|| part(store, &format!("scheme-{i}"), fits, || self.scheme_pass(planned, observer)))?,
            };
            let diagnostics = dense_seconds.map(|d| (with_diagnostics - d).max(0.0) / coded);
            let seconds = diagnostics.map(|d| seconds + d).filter(|_| !planned.scheme.is_dense());
            results.push(self.result(
                planned,
                &nll,
                &dense.nll,
                dense.diagnostics.get(i).map(HeadDiagnostics::total).as_ref(),
                seconds,
            ));
        }
        let dense_ppl = (dense.nll.iter().sum::<f64>() / dense.nll.len() as f64).exp();
        let base = results.iter().find(|r| r.canonical != Scheme::DENSE.to_string()).map(|r| r.ppl);
        for result in results.iter_mut().filter(|r| r.canonical != Scheme::DENSE.to_string()) {
            // The sum has no negative zero.
            result.excess_removed =
                base.and_then(|base| excess_removed(base, result.ppl, dense_ppl)).map(|share| share + 0.0);
        }
        let context = self.texts[0].windows[0].len();
        Ok(Evaluation {
            program: PROGRAM.into(),
            command: None,
            model: self.name.clone(),
            fingerprint: self.fingerprint.clone(),
            device: self.device.clone(),
            seed: self.seed,
            tokens: dense.nll.len(),
            context,
            windows: self.texts[0].windows.len(),
            add_bos: self.add_bos,
            texts: self.texts.iter().map(|t| t.text.clone()).collect(),
            overlap: Some(self.overlap.clone()),
            pass: Some(self.pass.name().into()),
            cache_dtype: self.pass.cache_type().map(|dense| dense.to_string()),
            schemes: results,
            dense_seconds,
        })
    }

    pub(crate) fn windows(&self) -> Vec<&[u32]> {
        self.texts.iter().flat_map(|t| t.windows.iter().map(Vec::as_slice)).collect()
    }

    /// Mean nll of each window, nats per token, from the losses of all scored tokens in order.
    pub(crate) fn by_window(&self, nll: &[f64]) -> Vec<f64> {
        let mut rest = nll;
        let mut mean = |scored: usize| {
            let (own, others) = rest.split_at(scored);
            rest = others;
            own.iter().sum::<f64>() / scored as f64
        };
        self.windows().iter().map(|w| mean(w.len() - 1)).collect()
    }

    /// Token losses of one window under any attention.
    fn losses(
        &self,
        model: &LanguageModel,
        window: &[u32],
        attention: &mut dyn Attention,
    ) -> Result<Vec<f64>, LabError> {
        let hidden = model.hidden(model.ids(window, 1, 0)?, 0, attention);
        Ok(model.token_nll(hidden.narrow(1, 0, window.len() - 1), &window[1..])?)
    }

    fn checked(&self, scheme: &str, window: usize, nll: Vec<f64>) -> Result<Vec<f64>, LabError> {
        match nll.iter().all(|v| v.is_finite()) {
            true => Ok(nll),
            false => Err(LabError::NotFinite { scheme: scheme.into(), window }),
        }
    }

    /// Token losses of the dense model, and what each of `measured` would have done to its attention; `what` names the pass.
    pub(crate) fn dense_pass(
        &self,
        what: &str,
        measured: &[PlannedScheme],
        observer: &dyn Observer,
    ) -> Result<DensePart, LabError> {
        let mut part = match measured.is_empty() && self.pass != Pass::Tensors {
            true => DensePart::default(),
            false => self.dense_tensors(what, measured, observer)?,
        };
        if part.nll.is_empty() || !self.pass.takes_dense_from_tensors(self.model) {
            part.nll = self.scheme_losses(what, &PlannedScheme::dense(), observer)?;
        }
        Ok(part)
    }

    fn decodes(&self) -> bool {
        matches!(self.pass, Pass::Decode(_))
    }

    fn dense_tensors(
        &self,
        what: &str,
        measured: &[PlannedScheme],
        observer: &dyn Observer,
    ) -> Result<DensePart, LabError> {
        let windows = self.windows();
        let (layers, device) = (self.model.config().num_layers, self.model.device());
        let mut whole = DensePart { nll: Vec::new(), diagnostics: vec![HeadDiagnostics::default(); measured.len()] };
        map_in_order(
            what,
            windows.len(),
            self.cores(),
            observer,
            || (self.model.clone(), measured.iter().map(|s| s.modules(layers, &device)).collect::<Vec<_>>()),
            |(model, modules), i| {
                let mut probe = LayerProbe::new(modules.iter().map(Vec::as_slice).collect());
                let nll = self.losses(model, windows[i], &mut probe)?;
                Ok((self.checked("dense", i, nll)?, probe.finish()))
            },
            |_, (nll, diagnostics)| {
                whole.nll.extend(nll);
                whole.diagnostics.iter_mut().zip(&diagnostics).for_each(|(t, d)| t.merge(d));
            },
        )?;
        Ok(whole)
    }

    /// What passes over windows may use.
    pub(crate) fn cores(&self) -> Cores {
        Cores::on(&self.model.device(), self.threads)
    }

    /// Token losses of all windows under a scheme.
    pub(crate) fn scheme_pass(&self, planned: &PlannedScheme, observer: &dyn Observer) -> Result<Vec<f64>, LabError> {
        self.scheme_losses(&planned.asked, planned, observer)
    }

    /// The same, where `what` names the pass.
    fn scheme_losses(
        &self,
        what: &str,
        planned: &PlannedScheme,
        observer: &dyn Observer,
    ) -> Result<Vec<f64>, LabError> {
        let (windows, device) = (self.windows(), self.model.device());
        let mut whole = Vec::new();
        let take = |_: usize, nll: Vec<f64>| whole.extend(nll);
        let Some(dense) = self.pass.cache_type() else {
            let layers = self.model.config().num_layers;
            map_in_order(
                what,
                windows.len(),
                self.cores(),
                observer,
                || (self.model.clone(), QuantizedCache::of(planned.modules(layers, &device))),
                |(model, cache), i| self.checked(&planned.asked, i, self.losses(model, windows[i], cache)?),
                take,
            )?;
            return Ok(whole);
        };
        let runner = Runner::of(self.pass, self.model)?;
        map_in_order(
            what,
            windows.len(),
            self.cores(),
            observer,
            || runner.clone(),
            |runner, i| {
                let mut cache = Cache::new(planned, self.model.config(), dense, &device)?;
                self.checked(&planned.asked, i, runner.losses(windows[i], &mut cache, observer)?)
            },
            take,
        )?;
        Ok(whole)
    }

    pub(crate) fn result(
        &self,
        planned: &PlannedScheme,
        nll: &[f64],
        dense: &[f64],
        diagnostics: Option<&Diagnostics>,
        seconds: Option<f64>,
    ) -> SchemeResult {
        let shape = head_shape(self.model.config());
        let context = self.texts[0].windows[0].len();
        let budget = planned.budget(&shape, context);
        let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
        let differences: Vec<f64> = nll.iter().zip(dense).map(|(a, b)| a - b).collect();
        let (difference, n) = (mean(&differences), differences.len() as f64);
        let variance = differences.iter().map(|d| (d - difference).powi(2)).sum::<f64>() / (n - 1.0);
        let mut rest = nll;
        let nll_by_text = self
            .texts
            .iter()
            .map(|t| {
                let (own, others) = rest.split_at(t.windows.iter().map(|w| w.len() - 1).sum());
                rest = others;
                mean(own)
            })
            .collect();
        SchemeResult {
            scheme: planned.asked.clone(),
            canonical: planned.scheme.to_string(),
            ppl: mean(nll).exp(),
            nll: mean(nll),
            key_bits: budget.key_bits,
            value_bits: budget.value_bits,
            cache_bits: budget.cache_bits,
            bytes_per_token: budget.bytes_per_token,
            fisher: diagnostics.and_then(Diagnostics::fisher),
            kl: diagnostics.and_then(Diagnostics::kl),
            key_mse: diagnostics.and_then(Diagnostics::key_mse),
            key_mse_corrected: diagnostics.and_then(Diagnostics::key_mse_corrected),
            value_mse: diagnostics.and_then(Diagnostics::value_mse),
            readout_error: diagnostics.and_then(Diagnostics::readout_error),
            readout_diagonal: diagnostics.and_then(Diagnostics::readout_diagonal),
            output_error: diagnostics.and_then(Diagnostics::output_error),
            excess_removed: None,
            nll_minus_dense: difference,
            nll_minus_dense_se: (n > 1.0).then(|| (variance / n).sqrt()),
            nll_by_text,
            seconds,
        }
    }
}

fn timed<T>(work: impl FnOnce() -> Result<T, LabError>) -> Result<(T, f64), LabError> {
    let start = std::time::Instant::now();
    Ok((work()?, start.elapsed().as_secs_f64()))
}

/// Takes a part from the store if it is there and fits, or makes and keeps it. JSON keeps every bit of a number.
pub(crate) fn part<T: Serialize + for<'de> Deserialize<'de>>(
    store: &dyn PartStore,
    name: &str,
    fits: impl Fn(&T) -> bool,
    make: impl FnOnce() -> Result<T, LabError>,
) -> Result<T, LabError> {
    if let Some(value) = store.get(name)?
        && let Ok(part) = serde_json::from_value(value)
        && fits(&part)
    {
        return Ok(part);
    }
    let part = make()?;
    let value = serde_json::to_value(&part).map_err(|e| LabError::Usage(format!("part {name}: {e}")))?;
    store.put(name, &value)?;
    Ok(part)
}
