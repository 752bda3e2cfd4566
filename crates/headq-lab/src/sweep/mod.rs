//! `headq sweep`: every family of schemes on one text, and which of them no other dominates.
//!
//! | file | what |
//! |---|---|
//! | `data` | what a sweep finds, as `sweep.json` has it |
//! | `schemes` | the schemes that it takes by itself |
//! | `score` | losses, and divergence of next-token distributions from the dense model's |
//! | `front` | fronts, and the best schemes within budgets |
//! | `table` | what a terminal shows |
//!
//! The folder of a sweep holds what decides its numbers (`settings.json`: model, device, texts, windows, seed, artifacts), each scheme's
//! numbers as they come (`parts/`), statistics that it calibrates, and at the end [`FILE`]. Started again it takes up what is there,
//! also with more schemes or other budgets; with other settings it is an error, and nothing is touched.

pub mod data;
mod front;
mod schemes;
mod score;
pub mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use headq::Scheme;
use headq::budget::Budget;
use headq::scheme::{BaseScheme, Family, Policy};
use headq_models::{Fingerprint, LoadedModel, ModelConfig};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use self::data::{BitsOf, Coded, Given, LeftOut, Row, Sweep};
use self::schemes::{Sizes, family};
use self::score::{Keep, Scorer};
use crate::calibrate::check_base;
use crate::evaluate::{PartStore, PlannedScheme, Request, Sources, head_shape, part};
use crate::run::{Folder, bases_to_calibrate, file_sha256, kept, kept_statistics, slug, write_json};
use crate::text::{TextInfo, Windows, hex};
use crate::{LabError, Observer, calibrate, memory, scheme_file};

/// File of a sweep's folder that holds what it found.
pub const FILE: &str = "sweep.json";
/// File that says what a folder's numbers belong to.
const SETTINGS: &str = "settings.json";

/// Which schemes a sweep takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kv {
    /// Keys only.
    K,
    /// Keys and values.
    Kv,
    /// Both.
    Both,
}

impl std::str::FromStr for Kv {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "k" => Ok(Kv::K),
            "kv" => Ok(Kv::Kv),
            "both" => Ok(Kv::Both),
            _ => Err(format!("'{text}' is not known; known are k, kv, both")),
        }
    }
}

impl std::fmt::Display for Kv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kv::K => "k",
            Kv::Kv => "kv",
            Kv::Both => "both",
        })
    }
}

/// What a sweep is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// Which of the default schemes; none where `schemes` are all.
    pub defaults: Option<Kv>,
    /// First tokens that they keep dense.
    pub sinks: usize,
    /// Newest tokens that they keep dense.
    pub residual: usize,
    /// Further schemes.
    pub schemes: Vec<String>,
    /// Budgets for which the best scheme of each family is named.
    pub budgets: Vec<f64>,
    /// What they bound.
    pub bits: BitsOf,
}

impl Asked {
    /// Checks everything that can be checked without a model.
    ///
    /// # Errors
    /// [`LabError::Method`] for a malformed scheme; [`LabError::Usage`] for no scheme at all, or a budget that is no number of bits.
    pub fn check(&self) -> Result<(), LabError> {
        self.schemes.iter().try_for_each(|s| scheme_file::resolve(s).map(drop))?;
        if self.defaults.is_none() && self.schemes.is_empty() {
            return Err(LabError::Usage("no schemes to sweep over: give --scheme, or leave out --only-schemes".into()));
        }
        match self.budgets.iter().find(|b| !(b.is_finite() && **b > 0.0 && **b <= 16.0)) {
            Some(bad) => {
                Err(LabError::Usage(format!("budget {bad}: expected bits per element, above 0 and at most 16")))
            }
            None => Ok(()),
        }
    }
}

/// A model with texts to sweep over and to calibrate on.
pub struct Job<'a> {
    /// Model, scored texts and what they share with what was calibrated on; its own schemes play no part.
    pub request: &'a Request<'a>,
    /// The model as it was loaded.
    pub loaded: &'a LoadedModel,
    /// Which schemes.
    pub asked: &'a Asked,
    /// Texts to calibrate on where no given statistics serve.
    pub calibration: &'a [Windows],
    /// The folder.
    pub out: &'a Path,
    /// The command that was given.
    pub command: String,
}

/// What decides every number of a folder but the scheme.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Settings {
    program: String,
    model: Fingerprint,
    device: String,
    seed: u64,
    add_bos: bool,
    context: usize,
    windows: usize,
    texts: Vec<TextInfo>,
    calibration: Vec<TextInfo>,
    calibration_windows: usize,
    artifacts: Vec<Given>,
}

/// What is kept of a scheme.
#[derive(Debug, Serialize, Deserialize)]
struct Part {
    scheme: String,
    window_nll: Vec<f64>,
    window_kl: Vec<f64>,
    /// Why there are no numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// A scheme that will be evaluated.
struct Candidate {
    asked: String,
    canonical: String,
    kv: Coded,
    family: String,
    /// Whether it was asked for by name, so that it cannot be left out.
    named: bool,
}

/// What can be said of the schemes before anything is run.
struct Plan {
    candidates: Vec<Candidate>,
    left_out: Vec<LeftOut>,
    /// Base quantizers to calibrate.
    bases: Vec<BaseScheme>,
    /// Whether statistics made here need gradients.
    gradients: bool,
}

/// One scheme is under way among many: only its windows count.
struct Overall<'a>(&'a dyn Observer);

impl Observer for Overall<'_> {
    fn begin(&self, _: &str, _: usize) {}
    fn step(&self) {
        self.0.step();
    }
    fn end(&self) {}
    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

impl Job<'_> {
    /// Carries out a sweep, or goes on with it. `note` is told what it needs before it starts.
    ///
    /// # Errors
    /// On any bad input, before the folder is touched; on interruption, with finished schemes kept.
    pub fn run(&self, sources: Sources, observer: &dyn Observer, note: &dyn Fn(&str)) -> Result<Sweep, LabError> {
        self.asked.check()?;
        let plan = self.plan(&sources)?;
        let settings = self.settings(&sources)?;
        let windows = self.request.windows().len();
        let (folder, _lock) = settings.open(self.out)?;
        let open = plan.candidates.iter().filter(|c| self.part(&folder, c, windows).ok().flatten().is_none()).count();
        let scorer = Scorer { request: self.request, observer };
        let (logits, hidden) = scorer.bytes();
        let keep = Keep::fitting(memory::available(), logits);
        let count = |kv: Coded| plan.candidates.iter().filter(|c| c.kv == kv).count();
        let kept = if keep == Keep::Logits { ("logits", logits) } else { ("hidden states", hidden) };
        note(&format!(
            "{} schemes ({} keys only, {} keys and values) on {windows} windows of {} tokens: {open} to evaluate, {} passes over windows \
             and {windows} dense ones, {} calibrations; {:.2} GiB hold dense {} of all windows",
            plan.candidates.len(),
            count(Coded::K),
            count(Coded::Kv),
            self.context(),
            open * windows,
            plan.bases.len(),
            kept.1 as f64 / f64::from(1u32 << 30),
            kept.0,
        ));
        if !plan.left_out.is_empty() {
            note(&format!(
                "{} default schemes are left out; the report says why, e.g. {}: {}",
                plan.left_out.len(),
                plan.left_out[0].scheme,
                plan.left_out[0].reason
            ));
        }
        let sources = self.calibrated(&plan.bases, plan.gradients, sources, &folder, observer)?;
        let sweep = self.evaluate(plan, settings, &sources, &folder, keep, observer)?;
        write_json(&folder.0.join(FILE), &sweep)?;
        Ok(sweep)
    }

    fn config(&self) -> &ModelConfig {
        self.request.model.config()
    }

    fn context(&self) -> usize {
        self.request.texts[0].windows[0].len()
    }

    /// Checks all schemes.
    fn plan(&self, sources: &Sources) -> Result<Plan, LabError> {
        let mut plan = Plan { candidates: Vec::new(), left_out: Vec::new(), bases: Vec::new(), gradients: false };
        let mut known: BTreeSet<String> = BTreeSet::new();
        let mut checked: BTreeMap<String, Result<bool, String>> = BTreeMap::new();
        let mut schemes: Vec<Scheme> = Vec::new();
        let mut uncovered: Vec<Scheme> = Vec::new();
        for (named, text) in self.schemes() {
            let scheme = match scheme_file::resolve(&text) {
                Ok(scheme) => scheme,
                Err(error) if named => return Err(error),
                Err(error) => {
                    plan.left_out.push(LeftOut { scheme: text, reason: error.to_string() });
                    continue;
                }
            };
            if scheme.is_dense() || !known.insert(scheme.to_string()) {
                continue;
            }
            match self.covered(&scheme, named, sources, &mut checked) {
                Ok(covered) => {
                    schemes.push(scheme);
                    uncovered.extend((!covered).then_some(scheme));
                    plan.candidates.push(Candidate {
                        canonical: scheme.to_string(),
                        kv: if scheme.value.is_some() { Coded::Kv } else { Coded::K },
                        family: family(&scheme),
                        asked: text,
                        named,
                    });
                }
                Err(error) if named => return Err(error),
                Err(error) => plan.left_out.push(LeftOut { scheme: text, reason: error.to_string() }),
            }
        }
        if plan.candidates.is_empty() {
            let why = plan.left_out.first().map_or(String::new(), |l| format!(" ({}: {})", l.scheme, l.reason));
            return Err(LabError::Usage(format!("no scheme can be evaluated here{why}")));
        }
        sources.check_used(schemes.iter(), self.config())?;
        plan.bases = bases_to_calibrate(&uncovered);
        plan.gradients = uncovered.iter().any(Scheme::needs_gradients);
        Ok(plan)
    }

    /// Every scheme, and whether it was asked for by name.
    fn schemes(&self) -> Vec<(bool, String)> {
        let Asked { sinks, residual, .. } = *self.asked;
        let sizes = Sizes { sinks, residual, head_dim: self.config().head_dim };
        let coded: &[Coded] = match self.asked.defaults {
            None => &[],
            Some(Kv::K) => &[Coded::K],
            Some(Kv::Kv) => &[Coded::Kv],
            Some(Kv::Both) => &[Coded::K, Coded::Kv],
        };
        let named = self.asked.schemes.iter().map(|s| (true, s.trim().to_string()));
        named.chain(coded.iter().flat_map(|c| sizes.schemes(*c)).map(|s| (false, s))).collect()
    }

    /// Whether the given artifacts serve a scheme, or else what is calibrated here will.
    fn covered(
        &self,
        scheme: &Scheme,
        named: bool,
        sources: &Sources,
        checked: &mut BTreeMap<String, Result<bool, String>>,
    ) -> Result<bool, LabError> {
        scheme.check(self.config().head_dim)?;
        let context = self.context();
        let flushes = [scheme.key.map(|k| k.base.flush), scheme.value.map(|v| v.flush(scheme.key.as_ref()))];
        // The last position is not scored.
        if !flushes.into_iter().flatten().any(|f| f.flushed(context.saturating_sub(2)) > 0) {
            let least = flushes.into_iter().flatten().map(|f| f.sinks + f.group + f.residual + 1).min().unwrap_or(0);
            return Err(LabError::Usage(format!(
                "scheme '{scheme}': windows of {context} tokens are read dense throughout; give a context of at least {least}"
            )));
        }
        let keys = planned_for(scheme);
        let look = || match sources.plan(&keys.to_string(), self.config(), self.request.seed) {
            Ok(_) => Ok(true),
            Err(error) => self.calibrates(scheme, error).map(|()| false),
        };
        if named {
            return look();
        }
        let found = checked.entry(keys.to_string()).or_insert_with(|| look().map_err(|e| e.to_string()));
        found.clone().map_err(LabError::Usage)
    }

    /// Fails where statistics of the calibration text would not serve a scheme that no given artifact serves.
    fn calibrates(&self, scheme: &Scheme, error: LabError) -> Result<(), LabError> {
        let learned = scheme.side().is_some_and(|side| side.family == Family::Learned);
        let bases = bases_to_calibrate(&[*scheme]);
        match (bases.first(), self.calibration.first().and_then(|t| t.windows.first())) {
            (Some(base), Some(window)) if !learned => check_base(base, window.len(), self.config().head_dim),
            _ => Err(error),
        }
    }

    fn settings(&self, sources: &Sources) -> Result<Settings, LabError> {
        let files = sources.stats.iter().map(|(path, _)| path).chain(sources.bases.iter().map(|(path, _)| path));
        let given =
            |path: &PathBuf| Ok(Given { path: path.to_string_lossy().into_owned(), sha256: file_sha256(path)? });
        Ok(Settings {
            program: crate::PROGRAM.into(),
            model: self.request.fingerprint.clone(),
            device: self.request.device.clone(),
            seed: self.request.seed,
            add_bos: self.request.add_bos,
            context: self.context(),
            windows: self.request.texts[0].windows.len(),
            texts: self.request.texts.iter().map(|t| t.text.clone()).collect(),
            calibration: self.calibration.iter().map(|t| t.text.clone()).collect(),
            calibration_windows: self.calibration.first().map_or(0, |t| t.windows.len()),
            artifacts: files.map(given).collect::<Result<_, LabError>>()?,
        })
    }

    /// Statistics of each base quantizer that no given artifact serves, from the folder or newly made.
    fn calibrated(
        &self,
        bases: &[BaseScheme],
        gradients: bool,
        mut sources: Sources,
        folder: &Folder,
        observer: &dyn Observer,
    ) -> Result<Sources, LabError> {
        let Request { model, fingerprint, add_bos, threads, .. } = *self.request;
        for base in bases {
            let with = if gradients { "-gradients" } else { "" };
            let path = folder.0.join(format!("stats-{}{with}.safetensors", slug(&base.to_string())));
            let seed = gradients.then_some(self.request.seed);
            let artifact = kept_statistics(&path, self.loaded, || {
                calibrate(model, fingerprint, self.calibration, add_bos, *base, seed, threads, observer)
            })?;
            sources.stats.push((path, artifact));
        }
        Ok(sources)
    }

    /// A scheme's numbers where they are kept already.
    fn part(&self, folder: &Folder, candidate: &Candidate, windows: usize) -> Result<Option<Part>, LabError> {
        let value = folder.get(&part_name(candidate))?;
        let part = value.and_then(|value| serde_json::from_value::<Part>(value).ok());
        Ok(part.filter(|part| fits(part, candidate, windows)))
    }

    fn evaluate(
        &self,
        plan: Plan,
        settings: Settings,
        sources: &Sources,
        folder: &Folder,
        keep: Keep,
        observer: &dyn Observer,
    ) -> Result<Sweep, LabError> {
        let windows = self.request.windows().len();
        let Plan { candidates, mut left_out, .. } = plan;
        let open = candidates.iter().map(|c| Ok(self.part(folder, c, windows)?.is_none()));
        let open = open.collect::<Result<Vec<bool>, LabError>>()?.into_iter().filter(|open| *open).count();
        let dense_nll = match folder.get("dense")?.and_then(|value| serde_json::from_value::<Vec<f64>>(value).ok()) {
            Some(nll) if open == 0 && nll.len() == windows => nll,
            _ => Vec::new(),
        };
        // The dense model is run again for what is kept in memory only.
        let mut dense = None;
        if dense_nll.is_empty() {
            let made = Scorer { request: self.request, observer }.dense(keep)?;
            folder.put("dense", &serde_json::json!(made.window_nll))?;
            dense = Some(made);
        }
        let dense_nll = dense.as_ref().map_or(dense_nll, |d| d.window_nll.clone());
        if open > 0 {
            observer.begin_units("sweep", open * windows, "windows");
        }
        let rows = self.rows(&candidates, sources, folder, dense.as_ref(), &dense_nll, &mut left_out, observer);
        if open > 0 {
            observer.end();
        }
        let mut rows = rows?;
        rows.sort_by(|a, b| {
            (a.kv, a.cache_bits).partial_cmp(&(b.kv, b.cache_bits)).unwrap_or(std::cmp::Ordering::Equal)
        });
        front::mark(&mut rows);
        let nll = mean(&dense_nll);
        let request = self.request;
        Ok(Sweep {
            program: crate::PROGRAM.into(),
            command: self.command.clone(),
            model: request.name.clone(),
            fingerprint: request.fingerprint.clone(),
            device: request.device.clone(),
            seed: request.seed,
            add_bos: request.add_bos,
            context: self.context(),
            windows: settings.windows,
            tokens: request.windows().iter().map(|w| w.len() - 1).sum(),
            texts: settings.texts,
            overlap: Some(request.overlap.clone()),
            artifacts: settings.artifacts,
            calibration: settings.calibration,
            sinks: self.asked.sinks,
            residual: self.asked.residual,
            dense: data::Dense { ppl: nll.exp(), nll, window_nll: dense_nll },
            budgets: front::best(&rows, &self.asked.budgets, self.asked.bits),
            rows,
            left_out,
            bits: self.asked.bits,
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn rows(
        &self,
        candidates: &[Candidate],
        sources: &Sources,
        folder: &Folder,
        dense: Option<&score::Dense>,
        dense_nll: &[f64],
        left_out: &mut Vec<LeftOut>,
        observer: &dyn Observer,
    ) -> Result<Vec<Row>, LabError> {
        let overall = Overall(observer);
        let scorer = Scorer { request: self.request, observer: &overall };
        let shape = head_shape(self.config());
        let mut rows = Vec::new();
        // Schemes that are planned alike follow one another, and statistics are large.
        let mut last: Option<(String, PlannedScheme)> = None;
        for (i, candidate) in candidates.iter().enumerate() {
            let scheme: Scheme = candidate.canonical.parse()?;
            let keys = planned_for(&scheme).to_string();
            if last.as_ref().is_none_or(|(own, _)| *own != keys) {
                last = Some((keys.clone(), sources.plan(&keys, self.config(), self.request.seed)?));
            }
            let (_, planned) = last.as_ref().expect("it was just planned");
            let planned = PlannedScheme { asked: candidate.asked.clone(), scheme, ..planned.clone() };
            observer.say(&format!("{}/{} {}", i + 1, candidates.len(), candidate.asked));
            let fits = |part: &Part| fits(part, candidate, dense_nll.len());
            let found = part(folder, &part_name(candidate), fits, || {
                let dense = dense.ok_or_else(|| LabError::Usage("the dense model was not run".into()))?;
                let part = |window_nll, window_kl, problem| Part {
                    scheme: candidate.canonical.clone(),
                    window_nll,
                    window_kl,
                    problem,
                };
                match scorer.scheme(&planned, dense) {
                    Ok((nll, kl)) => Ok(part(nll, kl, None)),
                    // One of many defaults is no reason to end the others.
                    Err(error @ LabError::NotFinite { .. }) if !candidate.named => {
                        Ok(part(Vec::new(), Vec::new(), Some(error.to_string())))
                    }
                    Err(error) => Err(error),
                }
            })?;
            match found.problem {
                Some(reason) => left_out.push(LeftOut { scheme: candidate.asked.clone(), reason }),
                None => {
                    let budget = Budget::calibrated(&planned.scheme, planned.keys.as_ref(), &shape, self.context());
                    rows.push(row(candidate, budget, found, dense_nll));
                }
            }
        }
        Ok(rows)
    }
}

/// What of a scheme decides which statistics and basis it is given: values that are not transformed need none.
fn planned_for(scheme: &Scheme) -> Scheme {
    match scheme.value.is_some_and(|v| v.policy == Policy::Klt) {
        true => *scheme,
        false => Scheme { value: None, ..*scheme },
    }
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// File of a scheme's part: schemes make poor file names.
fn part_name(candidate: &Candidate) -> String {
    hex(&Sha256::digest(candidate.canonical.as_bytes())[..12])
}

fn fits(part: &Part, candidate: &Candidate, windows: usize) -> bool {
    // A scheme that is asked for by name has to say itself what is wrong.
    let whole = match part.problem {
        None => part.window_nll.len() == windows && part.window_kl.len() == windows,
        Some(_) => !candidate.named,
    };
    whole && part.scheme == candidate.canonical
}

fn row(candidate: &Candidate, budget: Budget, part: Part, dense_nll: &[f64]) -> Row {
    let nll = mean(&part.window_nll);
    let (difference, se) = front::paired(&part.window_nll, dense_nll);
    Row {
        scheme: candidate.asked.clone(),
        canonical: candidate.canonical.clone(),
        kv: candidate.kv,
        family: candidate.family.clone(),
        key_bits: budget.key_bits,
        value_bits: budget.value_bits,
        cache_bits: budget.cache_bits,
        bytes_per_token: budget.bytes_per_token,
        ppl: nll.exp(),
        nll,
        window_nll: part.window_nll,
        excess: difference.exp_m1(),
        // To first order, as the differences are small.
        excess_se: se.map(|se| difference.exp() * se),
        kl: mean(&part.window_kl),
        window_kl: part.window_kl,
        front_ppl: false,
        front_kl: false,
    }
}

impl Settings {
    /// Makes the folder, or takes up a sweep of the same settings.
    fn open(&self, path: &Path) -> Result<(Folder, crate::run::Hold), LabError> {
        Folder::take(path, SETTINGS, "sweep", self, |file| {
            let other = |what: &str| LabError::Artifact {
                path: path.to_owned(),
                reason: format!("holds a sweep with another {what}; give another --out, or remove the folder"),
            };
            let Some(found) = kept::<Settings>(file, "the sweep")? else {
                return Err(other("version of this program"));
            };
            let hashes = |texts: &[TextInfo]| -> Vec<(String, String)> {
                texts.iter().map(|t| (t.sha256.clone(), t.tokens_sha256.clone())).collect()
            };
            let files = |given: &[Given]| -> Vec<String> { given.iter().map(|g| g.sha256.clone()).collect() };
            let same = [
                ("version of this program", found.program == self.program),
                ("model", found.model == self.model),
                ("device or type of weights", found.device == self.device),
                ("seed", found.seed == self.seed),
                ("--add-bos", found.add_bos == self.add_bos),
                ("context", found.context == self.context),
                ("number of windows", found.windows == self.windows),
                ("text or tokenizer", hashes(&found.texts) == hashes(&self.texts)),
                ("calibration text", hashes(&found.calibration) == hashes(&self.calibration)),
                ("number of calibration windows", found.calibration_windows == self.calibration_windows),
                ("statistics or basis file", files(&found.artifacts) == files(&self.artifacts)),
            ];
            match same.iter().find(|(_, same)| !same) {
                Some((what, _)) => Err(other(what)),
                None => Ok(()),
            }
        })
    }
}
