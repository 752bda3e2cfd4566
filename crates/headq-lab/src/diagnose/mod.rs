//! `headq diagnose`: the seven links of the evidence chain, each with its numbers and its verdict.
//!
//! | file | what |
//! |---|---|
//! | `data` | what a diagnosis finds, as `diagnosis.json` has it |
//! | `thresholds` | what decides verdicts |
//! | `settings` | which quantizers, policies and schemes are compared |
//! | `chain` | the passes over text that the links share, kept part by part |
//! | `flips` | constant-size summaries of single queries |
//! | `statistics`, `judge` | rank correlations, bootstrap intervals, verdicts: pure functions of the data |
//!
//! Everything is measured in passes over windows of text, of which one per core is in flight; what a pass keeps does not grow with the
//! text, but for the loss of each scored token. Finished passes are parts of
//! the run's folder, so that an interrupted diagnosis goes on where it stopped, link by link; verdicts are drawn anew each time, so
//! that another threshold needs no new measurement.

mod chain;
pub mod data;
mod flips;
pub mod judge;
pub mod settings;
pub mod statistics;
pub mod thresholds;

use std::collections::HashSet;
use std::path::Path;

use headq::scheme::{BaseScheme, Family, Scheme};
use headq_models::LoadedModel;

use self::chain::Chain;
use self::data::{Calibration, Diagnosis, LINKS};
use self::settings::Plan;
use crate::artifact::StatsArtifact;
use crate::calibrate::check_base;
use crate::evaluate::{Request, Sources};
use crate::overlap::{self, MadeFrom, Overlaps, Passages};
use crate::pass::Pass;
use crate::run::{
    Announce, DiagnoseConfig, Folder, Manifest, RunConfig, RunOptions, check_context, kept_statistics, windows,
    write_json,
};
use crate::text::{WindowOptions, Windows};
use crate::{LabError, Observer, calibrate};

/// File of a run's folder that holds its diagnosis.
pub const FILE: &str = "diagnosis.json";

/// The links asked for, by their place in the chain.
///
/// # Errors
/// In words, for an unknown name, one given twice, or none at all.
pub fn asked_links(names: Option<&[String]>) -> Result<[bool; 7], String> {
    let Some(names) = names else { return Ok([true; 7]) };
    let mut asked = [false; 7];
    for name in names {
        let known = || LINKS.map(|(name, ..)| name).join(", ");
        let at = LINKS.iter().position(|(known, ..)| known == name);
        let at = at.ok_or_else(|| format!("links: '{name}' is not known; known are {}", known()))?;
        if std::mem::replace(&mut asked[at], true) {
            return Err(format!("links: '{name}' is given twice"));
        }
    }
    if names.is_empty() {
        return Err("links: the list is empty; leave it out to take all".into());
    }
    Ok(asked)
}

/// Texts to measure on and to calibrate on.
struct Texts {
    measured: Vec<Windows>,
    calibration: Vec<Windows>,
    calibration_context: usize,
    first_calibration_window: usize,
}

impl Texts {
    fn load(config: &RunConfig, diagnose: &DiagnoseConfig, loaded: &LoadedModel) -> Result<Self, LabError> {
        let tokenizer = loaded.tokenizer()?;
        let own = WindowOptions {
            max_chars: diagnose.max_chars,
            context: diagnose.context,
            windows: diagnose.windows,
            add_bos: config.add_bos,
        };
        if diagnose.windows == 0 {
            return Err(LabError::Usage("windows 0: at least one is needed".into()));
        }
        if let Some(c) = &config.calibrate {
            let options = WindowOptions { max_chars: c.max_chars, context: c.context, windows: c.windows, ..own };
            return Ok(Self {
                measured: windows(&diagnose.text, &tokenizer, &own)?,
                calibration: windows(&c.text, &tokenizer, &options)?,
                calibration_context: c.context,
                first_calibration_window: 0,
            });
        }
        let (w, c) = (diagnose.windows, diagnose.calibration_windows);
        if c == 0 {
            let reason =
                "calibration windows 0: bases, means and scales come from at least one window that is not measured";
            return Err(LabError::Usage(reason.into()));
        }
        let both = windows(&diagnose.text, &tokenizer, &WindowOptions { windows: w.saturating_add(c), ..own })
            .map_err(|e| match e {
                LabError::Text { path, reason } if reason.contains("windows of") => LabError::Text {
                    path,
                    reason: format!(
                        "{reason} ({w} windows are measured, {c} are for calibration unless it has a text of its own)"
                    ),
                },
                other => other,
            })?;
        let (measured, calibration) = both.into_iter().map(|text| text.split(w)).unzip();
        Ok(Self { measured, calibration, calibration_context: diagnose.context, first_calibration_window: w })
    }

    /// Fails where text is measured and calibrated on, unless the configuration allows it.
    fn overlap(&self, config: &RunConfig) -> Result<Overlaps, LabError> {
        let texts: Vec<_> = self.calibration.iter().map(|t| t.text.clone()).collect();
        let passages = Passages::of_all(&self.calibration, config.add_bos);
        let made_from = MadeFrom { artifact: "the calibration".into(), texts: &texts, passages: &passages };
        overlap::check(&self.measured, config.add_bos, &[made_from], config.allow_overlap)
    }

    fn calibration_windows(&self) -> usize {
        self.calibration.first().map_or(0, |t| t.windows.len())
    }
}

/// Tokens in a passage by which texts are compared.
const PASSAGE: usize = 32;
/// Share of passages that two different texts may have in common: headings and turns of phrase.
const MOST_SHARED: f64 = 0.05;

/// Share of the passages of `other` that also stand, at any place, in the windows of `text`.
fn shared_share(text: &Windows, other: &Windows) -> f64 {
    fn passages(of: &Windows) -> impl Iterator<Item = &[u32]> {
        let length = of.windows.iter().map(Vec::len).min().unwrap_or(0).clamp(1, PASSAGE);
        of.windows.iter().flat_map(move |w| w.windows(length))
    }
    let known: HashSet<&[u32]> = passages(text).collect();
    let shared = passages(other).filter(|p| known.contains(p)).count();
    shared as f64 / passages(other).count().max(1) as f64
}

/// Fails where one text is measured twice, which would make intervals too narrow.
fn check_distinct(texts: &[Windows]) -> Result<(), LabError> {
    for (i, text) in texts.iter().enumerate() {
        if let Some(first) = texts[..i].iter().find(|t| shared_share(t, text) > MOST_SHARED) {
            let reason = format!(
                "holds what {} holds; measured twice, it would make intervals narrower than they are",
                first.text.path.display()
            );
            return Err(LabError::Text { path: text.text.path.clone(), reason });
        }
    }
    Ok(())
}

/// Fails where the base quantizer codes nothing, or the correction does not fit the heads.
fn check(plan: &Plan, diagnose: &DiagnoseConfig, texts: &Texts) -> Result<(), LabError> {
    for scheme in [plan.uncorrected(), plan.corrected(Family::QueryPca)] {
        scheme.check(plan.head_dim)?;
    }
    let least = plan.least_context() + 1;
    if diagnose.context < least {
        return Err(LabError::Usage(format!(
            "windows of {} tokens are read dense throughout under {}; give a context of at least {least}",
            diagnose.context, plan.base
        )));
    }
    check_base(&plan.base, texts.calibration_context, plan.head_dim)
}

/// What makes a diagnosis another one: links and thresholds can be changed and the run still goes on.
fn identity(config: &RunConfig) -> RunConfig {
    let mut config = config.identity();
    if let Some(diagnose) = &mut config.diagnose {
        config.name = String::new();
        diagnose.links = None;
        diagnose.thresholds = Default::default();
    }
    config
}

/// Carries out a diagnosis, or goes on with it.
///
/// # Errors
/// On any bad input, before the folder is touched; on interruption, with finished parts kept.
pub fn diagnose(
    config: &RunConfig,
    options: &RunOptions,
    observer: &dyn Observer,
    announce: Announce,
) -> Result<Diagnosis, LabError> {
    let missing = || LabError::Usage("this configuration has no [diagnose] section".into());
    let asked = config.diagnose.as_ref().ok_or_else(missing)?;
    asked.check().map_err(LabError::Usage)?;
    let links = asked_links(asked.links.as_deref()).map_err(LabError::Usage)?;
    let base: BaseScheme = asked.base.parse()?;
    let (loaded, device) = config.load_model(observer)?;
    let plan = Plan { base, rank: asked.rank, bits: asked.bits, head_dim: loaded.config().head_dim };
    let texts = Texts::load(config, asked, &loaded)?;
    check_distinct(&texts.measured)?;
    check(&plan, asked, &texts)?;
    let overlap = texts.overlap(config)?;
    let needed = asked.context.max(texts.calibration_context);
    check_context(&loaded, needed)?;
    let pass = Pass::choose(config.pass, None, &loaded.model, &device)?;
    announce(&loaded, needed, pass.cached(&[plan.uncorrected()]));
    let manifest = Manifest {
        program: crate::PROGRAM.into(),
        config: identity(config),
        model: loaded.fingerprint.clone(),
        texts: texts.calibration.iter().chain(&texts.measured).map(|t| t.text.clone()).collect(),
        bases: Vec::new(),
    };
    let (folder, _lock) = Folder::open(&options.out, &manifest)?;
    let links = with_links_of(&folder.0.join(FILE), links);
    let statistics = |file: &str, of: &[Windows], observer: &dyn Observer| -> Result<StatsArtifact, LabError> {
        kept_statistics(&folder.0.join(file), &loaded, || {
            calibrate(&loaded.model, &loaded.fingerprint, of, config.add_bos, base, None, options.threads, observer)
        })
    };
    let calibrated = statistics("stats-calibration.safetensors", &texts.calibration, observer)?;
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        name: config.model.clone(),
        device,
        texts: &texts.measured,
        add_bos: config.add_bos,
        overlap,
        schemes: &[],
        seed: config.seed,
        diagnostics: true,
        threads: options.threads,
        timings: false,
        pass,
    };
    let held_out = |observer: &dyn Observer| statistics("stats-measured.safetensors", &texts.measured, observer);
    let chain = Chain {
        request: &request,
        plan: &plan,
        sources: &Sources::of_stats(Path::new("stats-calibration.safetensors"), calibrated),
        held_out: &held_out,
        thresholds: &asked.thresholds,
        observer,
        store: &folder,
    };
    let diagnosis = chain.take(links, skeleton(config, asked, &request, &texts, options))?;
    write_json(&folder.0.join(FILE), &diagnosis)?;
    Ok(diagnosis)
}

/// The links asked for, and those that an earlier call on the same run has taken: their parts are there, and their verdicts are
/// drawn anew.
fn with_links_of(file: &Path, mut links: [bool; 7]) -> [bool; 7] {
    let earlier = std::fs::read(file).ok().and_then(|bytes| serde_json::from_slice::<Diagnosis>(&bytes).ok());
    if let Some(earlier) = earlier {
        links.iter_mut().zip(earlier.judgements()).for_each(|(asked, taken)| *asked |= taken.is_some());
    }
    links
}

/// Everything but the links.
fn skeleton(
    config: &RunConfig,
    asked: &DiagnoseConfig,
    request: &Request,
    texts: &Texts,
    options: &RunOptions,
) -> Diagnosis {
    Diagnosis {
        program: crate::PROGRAM.into(),
        name: config.name.clone(),
        command: options.command.clone(),
        model: config.model.clone(),
        fingerprint: request.fingerprint.clone(),
        device: request.device.clone(),
        seed: config.seed,
        add_bos: config.add_bos,
        context: asked.context,
        windows: asked.windows,
        tokens: request.windows().iter().map(|w| w.len() - 1).sum(),
        texts: texts.measured.iter().map(|t| t.text.clone()).collect(),
        overlap: Some(request.overlap.clone()),
        calibration: Calibration {
            texts: texts.calibration.iter().map(|t| t.text.clone()).collect(),
            first_window: texts.first_calibration_window,
            windows: texts.calibration_windows(),
            context: texts.calibration_context,
            tokens: texts.calibration.iter().flat_map(|t| &t.windows).map(Vec::len).sum(),
        },
        base: asked.base.parse::<Scheme>().map_or(asked.base.clone(), |s| s.to_string()),
        rank: asked.rank,
        bits: asked.bits,
        thresholds: asked.thresholds,
        metric: None,
        counterexamples: None,
        null_space: None,
        bases: None,
        direction: None,
        route_flips: None,
        perplexity: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_named_once_each() {
        let asked = |names: &[&str]| asked_links(Some(&names.iter().map(|n| n.to_string()).collect::<Vec<_>>()));
        assert_eq!(asked_links(None), Ok([true; 7]));
        assert_eq!(asked(&["direction", "metric"]), Ok([true, false, false, false, true, false, false]));
        assert!(asked(&["metrics"]).unwrap_err().contains("known are metric, counterexamples, null-space, bases"));
        assert!(asked(&["metric", "metric"]).unwrap_err().contains("twice"));
        assert!(asked(&[]).unwrap_err().contains("empty"));
    }
}
