//! `headq run`: calibration, bases and evaluation from one configuration, into one folder.
//!
//! The folder holds `run.json` (what was asked, of which model and texts), the artifacts, `parts/` (finished parts of the
//! evaluation), and at the end `report.json`. Started again with the same configuration, a run goes on from what is
//! there; with another one it is an error, and nothing is touched.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use headq::device::{DeviceName, Precision};
use headq::scheme::{BaseScheme, Family, Metric, Scheme};
use headq_hub::HubName;
use headq_models::{Fingerprint, LoadOptions, LoadedModel, ModelError, Tokenizer, load};
use serde::{Deserialize, Serialize};

use crate::artifact::{BasisArtifact, BasisHeader, StatsArtifact, is_temporary, write_atomic};
use crate::calibrate::check_base;
use crate::compare::candidates::Asked;
use crate::diagnose::thresholds::Thresholds;
use crate::evaluate::{Evaluation, PartStore, PlannedScheme, Request, Sources};
use crate::overlap::{self, MadeFrom, Passages};
use crate::pass::{Pass, PassName};
use crate::text::{TextInfo, WindowOptions, Windows, load_windows};
use crate::{LabError, Observer, calibrate, finetune, hub};

/// A run's configuration, as TOML. Paths are relative to the file. `${NAME}` stands for an environment variable; a path that begins
/// with one is relative to the folder that the program is started in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Name of the run, and of its folder under `runs/`.
    pub name: String,
    /// Model: a folder, a file, or `hf:ORG/NAME[@REV][:FILE]`.
    pub model: String,
    /// Device.
    #[serde(default = "default_device")]
    pub device: String,
    /// Type of the weights: `f32`, `f16` or `bf16`.
    #[serde(default)]
    pub dtype: Precision,
    /// Seed of random bases.
    #[serde(default)]
    pub seed: u64,
    /// Begin every window with the beginning-of-sequence token.
    #[serde(default)]
    pub add_bos: bool,
    /// Score also text that was calibrated on, and report that it was; otherwise an error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_overlap: bool,
    /// What teacher-forced passes under schemes go through: `packed`, the default on flex, or `tensors`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<PassName>,
    /// A `config.json` for a model that has none beside it, or in place of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_config: Option<String>,
    /// Keys of the model's `config.json` to add or replace.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub model_set: serde_json::Map<String, serde_json::Value>,
    /// Text to calibrate on; needed where a scheme has a side code and no basis file covers it. A diagnosis without it calibrates on
    /// windows of its own text that it does not measure on.
    pub calibrate: Option<TextConfig>,
    /// How to train bases: for the schemes of the family `learned` in `[eval]`, or for the scheme of `[compare]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finetune: Option<FinetuneConfig>,
    /// What to evaluate; this, `diagnose` or `compare`.
    pub eval: Option<EvalConfig>,
    /// What to diagnose.
    pub diagnose: Option<DiagnoseConfig>,
    /// Which bases to compare.
    pub compare: Option<CompareConfig>,
}

/// The evidence chain on one text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiagnoseConfig {
    /// One file, or a list.
    pub text: OneOrMany,
    /// Use only the first so many characters of each.
    pub max_chars: Option<usize>,
    /// Tokens in a window.
    #[serde(default = "default_context")]
    pub context: usize,
    /// Windows of each text.
    #[serde(default = "default_windows")]
    pub windows: usize,
    /// Links to take; all by default.
    pub links: Option<Vec<String>>,
    /// Base quantizer that is corrected.
    #[serde(default = "default_base")]
    pub base: String,
    /// Rank of the correction.
    #[serde(default = "default_four")]
    pub rank: usize,
    /// Bits of its side codes.
    #[serde(default = "default_side_bits")]
    pub bits: u32,
    /// Windows of each text to calibrate on, after those that are measured; where there is no `[calibrate]`.
    #[serde(default = "default_four")]
    pub calibration_windows: usize,
    /// What decides verdicts.
    #[serde(default)]
    pub thresholds: Thresholds,
}

fn default_context() -> usize {
    512
}

fn default_windows() -> usize {
    8
}

fn default_base() -> String {
    "kivi-2(g=32,r=32)".into()
}

fn default_four() -> usize {
    4
}

fn default_side_bits() -> u32 {
    4
}

/// Text and windows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextConfig {
    /// One file, or a list.
    pub text: OneOrMany,
    /// Use only the first so many characters of each.
    pub max_chars: Option<usize>,
    /// Tokens in a window.
    pub context: usize,
    /// Windows of each text.
    pub windows: usize,
}

/// Text, windows and training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FinetuneConfig {
    /// One file, or a list.
    pub text: OneOrMany,
    /// Use only the first so many characters of each.
    pub max_chars: Option<usize>,
    /// Tokens in a window.
    pub context: usize,
    /// Windows of each text to train on.
    pub windows: usize,
    /// Windows of each text that are held out, after those.
    #[serde(default = "default_four")]
    pub held_out: usize,
    /// How.
    #[serde(default)]
    pub training: finetune::Settings,
}

/// Text, windows and schemes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalConfig {
    /// One file, or a list.
    pub text: OneOrMany,
    /// Use only the first so many characters of each.
    pub max_chars: Option<usize>,
    /// Tokens in a window.
    pub context: usize,
    /// Windows of each text.
    pub windows: usize,
    /// Schemes in their written form.
    pub schemes: Vec<String>,
    /// Basis artifacts to use before deriving any.
    #[serde(default)]
    pub basis: Vec<String>,
}

/// Bases to compare in one scheme.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompareConfig {
    /// One file, or a list.
    pub text: OneOrMany,
    /// Use only the first so many characters of each.
    pub max_chars: Option<usize>,
    /// Tokens in a window.
    pub context: usize,
    /// Windows of each text.
    pub windows: usize,
    /// Scheme in whose side code the bases take turns.
    pub scheme: String,
    /// Basis artifacts.
    #[serde(default)]
    pub basis: Vec<String>,
    /// Families to derive from the statistics of `[calibrate]`, at the scheme's rank and scope. Where there is a section `[finetune]`,
    /// `learned` stands for the basis that it trains for the scheme, which comes last if it is not named.
    #[serde(default)]
    pub families: Vec<String>,
}

/// A string or a list of strings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a file name or a list of file names")]
pub enum OneOrMany {
    /// One.
    One(String),
    /// A list.
    Many(Vec<String>),
}

impl OneOrMany {
    /// As a list.
    pub fn as_slice(&self) -> &[String] {
        match self {
            OneOrMany::One(one) => std::slice::from_ref(one),
            OneOrMany::Many(many) => many,
        }
    }
}

fn default_device() -> String {
    "flex".into()
}

impl RunConfig {
    /// Without what changes no number.
    pub(crate) fn identity(&self) -> Self {
        Self { allow_overlap: false, ..self.clone() }
    }

    /// How the model is loaded.
    pub fn load_options(&self) -> LoadOptions {
        LoadOptions {
            precision: self.dtype,
            config: self.model_config.as_ref().map(Into::into),
            settings: self.model_set.clone(),
            ..LoadOptions::default()
        }
    }

    /// The model on its device, and what reports call that device.
    pub(crate) fn load_model(&self, observer: &dyn Observer) -> Result<(LoadedModel, String), LabError> {
        let name: DeviceName = self.device.parse()?;
        let device = name.open()?;
        let path = hub::locate(Path::new(&self.model), observer)?;
        let loaded = load(path, &device, &self.load_options())?;
        Ok((loaded, name.label(&device, self.dtype)))
    }

    /// Reads a configuration and resolves its paths and environment variables.
    ///
    /// # Errors
    /// [`LabError::Config`] naming the key and what is expected.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        const EXPECTED: &str = "expected a configuration in TOML, like configs/quickstart.toml";
        let text = std::fs::read_to_string(path).map_err(LabError::input(path, EXPECTED))?;
        let fail = |reason: String| LabError::Config { path: path.to_owned(), reason };
        let mut config: RunConfig = toml::from_str(&text).map_err(|e| {
            let line =
                e.span().map_or(String::new(), |s| format!("line {}: ", 1 + text[..s.start].matches('\n').count()));
            fail(format!("{line}{}", e.message().replace('\n', " ")))
        })?;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if config.name.is_empty() || config.name.starts_with('.') || !config.name.chars().all(plain) {
            return Err(fail(format!(
                "name '{}': expected letters, digits, '-', '_' and '.'; it names a folder",
                config.name
            )));
        }
        config.check_sections().map_err(fail)?;
        if let Some(finetune) = &config.finetune {
            finetune.training.check().map_err(|e| fail(format!("finetune.training.{e}")))?;
            if has_steps_and_epochs(&text) {
                return Err(fail(
                    "finetune.training: steps and epochs say the same in two ways; give one of them".into(),
                ));
            }
        }
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let resolve = |value: &mut String| -> Result<(), LabError> {
            let expanded = expand(value, &|name| std::env::var(name).ok()).map_err(fail)?;
            // A variable is set where the program is started, and so are relative paths in it.
            let path = if value.starts_with("${") { PathBuf::from(expanded) } else { folder.join(expanded) };
            *value = shortest(path).to_string_lossy().into_owned();
            Ok(())
        };
        if hub::is_name(&config.model) {
            config.model.parse::<HubName>().map_err(|e| fail(e.to_string()))?;
        } else {
            resolve(&mut config.model)?;
        }
        config.model_config.iter_mut().try_for_each(&resolve)?;
        let texts = [
            config.eval.as_mut().map(|c| &mut c.text),
            config.diagnose.as_mut().map(|c| &mut c.text),
            config.compare.as_mut().map(|c| &mut c.text),
            config.calibrate.as_mut().map(|c| &mut c.text),
            config.finetune.as_mut().map(|c| &mut c.text),
        ];
        for texts in texts.into_iter().flatten() {
            match texts {
                OneOrMany::One(one) => resolve(one)?,
                OneOrMany::Many(many) if many.is_empty() => {
                    return Err(fail("text is an empty list; name at least one file".into()));
                }
                OneOrMany::Many(many) => many.iter_mut().try_for_each(&resolve)?,
            }
        }
        config.eval.iter_mut().flat_map(|eval| &mut eval.basis).try_for_each(&resolve)?;
        config.compare.iter_mut().flat_map(|compare| &mut compare.basis).try_for_each(resolve)?;
        Ok(config)
    }
}

impl RunConfig {
    /// Checks that there is exactly one section that says what to do, and what can be checked of it without a model.
    fn check_sections(&self) -> Result<(), String> {
        let sections = [
            ("[eval]", self.eval.is_some()),
            ("[diagnose]", self.diagnose.is_some()),
            ("[compare]", self.compare.is_some()),
        ];
        let found: Vec<&str> = sections.iter().filter(|(_, found)| *found).map(|(name, _)| *name).collect();
        match found[..] {
            [] => return Err("expected a section [compare], [eval] or [diagnose], found none".into()),
            [_] => {}
            _ => {
                let found = found.join(" and ");
                return Err(format!("has both {found}; make each a configuration with a run of its own"));
            }
        }
        if self.eval.as_ref().is_some_and(|eval| eval.schemes.is_empty()) {
            return Err("eval.schemes is empty; list at least one scheme, e.g. \"kivi-2(g=32,r=32)\"".into());
        }
        if let Some(finetune) = &self.finetune {
            for (key, count) in [("windows", finetune.windows), ("held_out", finetune.held_out)] {
                if count == 0 {
                    return Err(format!("finetune.{key}: expected at least 1, found 0"));
                }
            }
        }
        if let Some(diagnose) = &self.diagnose {
            if self.finetune.is_some() {
                return Err(
                    "a diagnosis trains no basis: take out [finetune], or make it a configuration with [compare]"
                        .into(),
                );
            }
            diagnose.check()?;
        }
        let compare = self.compare.as_ref();
        compare.map_or(Ok(()), |compare| compare.asked(self.finetune.is_some()).map(drop).map_err(|e| e.to_string()))
    }
}

/// Whether a configuration says both how many steps and how many epochs to train.
fn has_steps_and_epochs(text: &str) -> bool {
    let config: toml::Table = toml::from_str(text).unwrap_or_default();
    let training = config.get("finetune").and_then(|finetune| finetune.get("training"));
    training.is_some_and(|training| ["steps", "epochs"].iter().all(|key| training.get(key).is_some()))
}

/// The path without detours (`configs/../checkpoints`), where it exists below the current folder.
fn shortest(path: PathBuf) -> PathBuf {
    let below = || {
        path.canonicalize()
            .ok()?
            .strip_prefix(std::env::current_dir().ok()?.canonicalize().ok()?)
            .ok()
            .map(PathBuf::from)
    };
    below().filter(|p| !p.as_os_str().is_empty()).unwrap_or(path.clone())
}

/// Replaces `${NAME}` by what `lookup` gives.
fn expand(text: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        let end = rest[start..].find('}').ok_or_else(|| format!("'{text}' opens ${{ and does not close it"))? + start;
        let name = &rest[start + 2..end];
        out += &rest[..start];
        let value = lookup(name).filter(|value| !value.is_empty());
        out += &value.ok_or_else(|| format!("'{text}' needs the environment variable {name}, which is not set"))?;
        rest = &rest[end + 1..];
    }
    Ok(out + rest)
}

/// What a run is: written first, compared when it is started again.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub program: String,
    pub config: RunConfig,
    pub model: Fingerprint,
    pub texts: Vec<crate::text::TextInfo>,
    /// SHA-256 of each basis file.
    pub bases: Vec<String>,
}

/// A run's folder.
pub(crate) struct Folder(pub PathBuf);

impl Folder {
    /// Makes the folder, or takes up a run of the same manifest, and holds a lock on it.
    pub fn open(path: &Path, manifest: &Manifest) -> Result<(Self, Hold), LabError> {
        Self::take(path, "run.json", "run", manifest, |file| {
            let found: Option<Manifest> = kept(file, "the run")?;
            let other = |what: &str| LabError::Artifact {
                path: path.to_owned(),
                reason: format!("holds a run with another {what}; give another --out, or remove the folder"),
            };
            match found {
                None => Err(other("version of this program")),
                Some(f) if f.model != manifest.model => Err(other("model")),
                Some(f) if f.config != manifest.config => {
                    Err(other(&format!("configuration ({})", differences(&f.config, &manifest.config))))
                }
                Some(f) if f.texts != manifest.texts => Err(other("text or tokenizer")),
                Some(f) if f.bases != manifest.bases => Err(other("basis file")),
                Some(f) if f.program != manifest.program => Err(other("version of this program")),
                Some(_) => Ok(()),
            }
        })
    }

    /// Makes the folder of some `work`, whose file `name` holds what it is; or takes it up where `same` finds that file to be of the
    /// same kind. Holds a lock on it.
    pub fn take(
        path: &Path,
        name: &str,
        work: &str,
        manifest: &impl Serialize,
        same: impl FnOnce(&Path) -> Result<(), LabError>,
    ) -> Result<(Self, Hold), LabError> {
        let file = path.join(name);
        let taken_up = file.exists();
        if taken_up {
            same(&file)?;
        } else if path.exists() && list(path)?.iter().any(|p| !is_temporary(p) && !p.ends_with(LOCK)) {
            let reason = format!("is not empty and holds no {work}; give another --out");
            return Err(LabError::Artifact { path: path.to_owned(), reason });
        }
        let made_folder = !path.exists();
        std::fs::create_dir_all(path).map_err(LabError::io(path))?;
        let lock = File::create(path.join(LOCK)).map_err(LabError::io(path))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            let reason = format!("another headq is at work on this {work}; wait for it, or give another --out");
            return Err(LabError::Artifact { path: path.to_owned(), reason });
        }
        if !taken_up {
            write_json(&file, manifest)?;
        }
        let parts = path.join("parts");
        std::fs::create_dir_all(&parts).map_err(LabError::io(&parts))?;
        // What a killed run was writing.
        for left in list(path)?.iter().chain(&list(&parts)?).filter(|p| is_temporary(p)) {
            std::fs::remove_file(left).map_err(LabError::io(left))?;
        }
        Ok((Self(path.to_owned()), Hold { _lock: lock, path: path.to_owned(), file, made: !taken_up, made_folder }))
    }
}

/// What a folder belongs to, by the file that says so; `None` where another version of this program wrote it.
///
/// # Errors
/// If the file cannot be read, or is damaged; `what` is what its folder holds.
pub(crate) fn kept<T: serde::de::DeserializeOwned>(file: &Path, what: &str) -> Result<Option<T>, LabError> {
    let bytes = std::fs::read(file).map_err(LabError::io(file))?;
    let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
    if json["program"].as_str().is_none_or(|program| program == crate::PROGRAM) {
        return match serde_json::from_value(json) {
            Ok(kept) => Ok(Some(kept)),
            Err(error) => {
                let reason = format!("damaged ({error}); remove the folder to make {what} again, or name another");
                Err(LabError::Artifact { path: file.to_owned(), reason })
            }
        };
    }
    Ok(serde_json::from_value(json).ok())
}

/// Keys in which two configurations differ, with both values.
fn differences(kept: &RunConfig, asked: &RunConfig) -> String {
    fn walk(path: &str, a: &serde_json::Value, b: &serde_json::Value, found: &mut Vec<String>) {
        match (a.as_object(), b.as_object()) {
            (Some(x), Some(y)) => {
                for key in x.keys().chain(y.keys().filter(|k| !x.contains_key(*k))) {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    let none = serde_json::Value::Null;
                    walk(&path, x.get(key).unwrap_or(&none), y.get(key).unwrap_or(&none), found);
                }
            }
            _ if a != b => found.push(format!("{path} was {a}, now {b}")),
            _ => {}
        }
    }
    let json = |config| serde_json::to_value(config).unwrap_or_default();
    let mut found = Vec::new();
    walk("", &json(kept), &json(asked), &mut found);
    found.join("; ")
}

/// A run's folder is held while this lives. A run that ends before it has finished anything leaves nothing behind.
pub(crate) struct Hold {
    _lock: File,
    path: PathBuf,
    /// Says what the run is.
    file: PathBuf,
    /// Whether the run began here, rather than being taken up.
    made: bool,
    made_folder: bool,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let (manifest, parts, lock) = (self.file.clone(), self.path.join("parts"), self.path.join(LOCK));
        let own = [&manifest, &parts, &lock];
        let nothing_else = |found: Vec<PathBuf>| found.iter().all(|f| own.contains(&f));
        let unfinished = list(&self.path).is_ok_and(nothing_else) && list(&parts).is_ok_and(|parts| parts.is_empty());
        if !(self.made && unfinished) {
            return;
        }
        // What cannot be removed does no harm: a run of the same kind takes it up.
        let _ = std::fs::remove_file(manifest).and_then(|()| std::fs::remove_dir(parts));
        let _ = std::fs::remove_file(lock);
        if self.made_folder {
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

/// How the folders of a run begin in which bases are trained.
pub const TRAINED: &str = "finetune-";

/// Locked while a run is at work in its folder.
const LOCK: &str = ".lock";

fn list(folder: &Path) -> Result<Vec<PathBuf>, LabError> {
    let entries =
        std::fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(LabError::io(folder))?;
    Ok(entries.iter().map(std::fs::DirEntry::path).collect())
}

impl PartStore for Folder {
    fn get(&self, part: &str) -> Result<Option<serde_json::Value>, LabError> {
        let path = self.0.join("parts").join(format!("{part}.json"));
        match std::fs::read(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(LabError::io(&path)(e)),
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        }
    }

    fn put(&self, part: &str, value: &serde_json::Value) -> Result<(), LabError> {
        write_json(&self.0.join("parts").join(format!("{part}.json")), value)
    }
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), LabError> {
    let mut bytes = serde_json::to_vec_pretty(value)
        .map_err(|e| LabError::Artifact { path: path.to_owned(), reason: e.to_string() })?;
    bytes.push(b'\n');
    write_atomic(path, &bytes)
}

/// A file name out of a scheme: `kivi-2(g=32,r=32)` → `kivi-2_g32_r32`.
pub(crate) fn slug(text: &str) -> String {
    let kept = text.chars().filter_map(|c| match c {
        '=' | ')' => None,
        c if c.is_ascii_alphanumeric() || c == '-' || c == '.' => Some(c),
        _ => Some('_'),
    });
    kept.collect()
}

/// Base quantizers that must be calibrated: each one whose residuals a side scheme depends on, or any one where queries or keys alone
/// matter.
pub(crate) fn bases_to_calibrate(schemes: &[Scheme]) -> Vec<BaseScheme> {
    let with_side = || schemes.iter().filter_map(|s| Some((s.key?.base, s.key?.side?)));
    let mut bases: Vec<BaseScheme> = Vec::new();
    for (base, side) in with_side() {
        if side.family.uses_residual() && !bases.iter().any(|b| b.same_residuals(&base)) {
            bases.push(base);
        }
    }
    let needs = |s: &&Scheme| s.side().is_some() || s.needs_statistics();
    let any = schemes.iter().find(needs).and_then(|s| {
        // What reads values is of the model: keys are calibrated as they are by default.
        let metric = |m: Metric| if m == Metric::Output { Metric::default() } else { m };
        let values = s.value.and_then(|value| value.as_keys(s.key.as_ref()));
        s.key.map(|key| key.base).or(values.map(|base| BaseScheme { metric: metric(base.metric), ..base }))
    });
    match (bases.is_empty(), any) {
        (true, Some(base)) => vec![base],
        _ => bases,
    }
}

impl CompareConfig {
    /// Checks everything that can be checked without a model; `trains` says whether there is a section `[finetune]`.
    ///
    /// # Errors
    /// As [`Asked::with_training`], and for the family `learned` where nothing is trained.
    pub fn asked(&self, trains: bool) -> Result<Asked, LabError> {
        let learned = Family::Learned.to_string();
        let named = self.families.contains(&learned);
        if trains && self.basis.is_empty() && self.families.iter().all(|family| *family == learned) {
            return Err(LabError::Usage(
                "compare.families: nothing to compare the trained basis with; name at least one family, e.g. \"query-pca\", or a \
                 file in compare.basis"
                    .into(),
            ));
        }
        if named && !trains {
            return Err(LabError::Usage(
                "family learned: such a basis is trained; add a section [finetune], or name its file in compare.basis"
                    .into(),
            ));
        }
        let families = self.families.iter().cloned().chain((trains && !named).then_some(learned));
        Asked::with_training(&self.scheme, &self.basis, &families.collect::<Vec<_>>())
    }
}

/// No head is wider.
const MOST_RANK: usize = 1 << 16;

impl DiagnoseConfig {
    /// Checks everything that can be checked without a model.
    ///
    /// # Errors
    /// The key, what was expected and what was found.
    pub fn check(&self) -> Result<(), String> {
        self.base.parse::<BaseScheme>().map_err(|e| format!("base: {e}"))?;
        if !(2..=8).contains(&self.bits) {
            return Err(format!("bits: a side code has from 2 to 8 bits, found {}", self.bits));
        }
        if self.rank == 0 || self.rank > MOST_RANK {
            return Err(format!("rank: expected 1 to the head width of the model, found {}", self.rank));
        }
        self.thresholds.check()?;
        crate::diagnose::asked_links(self.links.as_deref()).map(|_| ())
    }
}

/// Settings that come from the command line rather than the configuration.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The run's folder.
    pub out: PathBuf,
    /// Cores to use.
    pub threads: usize,
    /// The command that was given, for the report.
    pub command: String,
}

/// Called once the model is loaded, with the context and the schemes whose caches there will be, before anything heavy starts.
pub type Announce<'a> = &'a dyn Fn(&LoadedModel, usize, &[Scheme]);

/// Carries out a run, or goes on with it.
///
/// # Errors
/// On any bad input, before the folder is touched where possible; on interruption, with finished parts kept.
pub fn run(
    config: &RunConfig,
    options: &RunOptions,
    observer: &dyn Observer,
    announce: Announce,
) -> Result<Evaluation, LabError> {
    let eval =
        config.eval.as_ref().ok_or_else(|| LabError::Usage("this configuration has no [eval] section".into()))?;
    let schemes: Vec<Scheme> = eval.schemes.iter().map(|s| s.parse()).collect::<Result<_, headq::Error>>()?;
    let (loaded, device) = config.load_model(observer)?;
    schemes.iter().try_for_each(|s| s.check(loaded.config().head_dim))?;
    if config.finetune.is_some() && !schemes.iter().any(is_learned) {
        let reason = "[finetune] trains bases of the family learned, and eval.schemes has no scheme of that family";
        return Err(LabError::Usage(reason.into()));
    }
    if let Some(finetune) = &config.finetune {
        let keys = schemes.iter().filter(|s| is_learned(s)).filter_map(|s| s.key);
        keys.into_iter().try_for_each(|key| finetune.training.check_key(&key))?;
    }
    let tokenizer = loaded.tokenizer()?;
    let eval_texts = windows(&eval.text, &tokenizer, &window_options(config, eval))?;
    let calibration_texts = match &config.calibrate {
        None => Vec::new(),
        Some(c) => windows(
            &c.text,
            &tokenizer,
            &WindowOptions { max_chars: c.max_chars, context: c.context, windows: c.windows, add_bos: config.add_bos },
        )?,
    };
    let training_texts =
        config.finetune.as_ref().map(|f| training_windows(f, &tokenizer, config.add_bos)).transpose()?;
    let given = Sources::load::<String>(&[], &eval.basis, &loaded.fingerprint)?
        .with_scheme_files(&eval.schemes, &loaded.fingerprint)?;
    let others = [config.calibrate.as_ref().map(|c| c.context), config.finetune.as_ref().map(|f| f.context)];
    let needed = others.into_iter().flatten().fold(eval.context, usize::max);
    check_context(&loaded, needed)?;
    let bases = planned_calibrations(config, &schemes, &given, &loaded)?;
    let calibrated_on = if bases.bases.is_empty() { &[] } else { calibration_texts.as_slice() };
    check_overlap(config, &eval_texts, calibrated_on, training_texts.as_ref(), &given)?;
    let pass = Pass::choose(config.pass, None, &loaded.model, &device)?;
    announce(&loaded, needed, pass.cached(&schemes));
    let manifest = Manifest {
        program: crate::PROGRAM.into(),
        config: config.identity(),
        model: loaded.fingerprint.clone(),
        texts: calibration_texts
            .iter()
            .chain(training_texts.iter().flat_map(|(train, held_out)| train.iter().chain(held_out)))
            .chain(&eval_texts)
            .map(|t| t.text.clone())
            .collect(),
        bases: eval.basis.iter().map(|b| file_sha256(Path::new(b))).collect::<Result<_, _>>()?,
    };
    let (folder, _lock) = Folder::open(&options.out, &manifest)?;
    let mut sources = calibrated(config, bases, given, &loaded, &calibration_texts, &folder, options, observer)?;
    if let (Some(finetune), Some((train, held_out))) = (&config.finetune, &training_texts) {
        for scheme in open_learned(&schemes, &sources, &loaded, config.seed) {
            let request = Training { config, finetune, train, held_out, scheme, options };
            let learned = request.run(&loaded, &sources, &folder, observer)?;
            sources.bases.push(learned);
        }
    }
    let planned = sources.plan_all(&eval.schemes, loaded.config(), config.seed)?;
    keep_bases(&planned, &sources, &folder, config.seed)?;
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        name: config.model.clone(),
        device,
        texts: &eval_texts,
        add_bos: config.add_bos,
        overlap: overlap::find(&eval_texts, config.add_bos, &sources.made_from())?,
        schemes: &planned,
        seed: config.seed,
        diagnostics: true,
        threads: options.threads,
        timings: false,
        pass,
    };
    let mut evaluation = request.run(observer, &folder)?;
    evaluation.command = Some(options.command.clone());
    write_json(&folder.0.join("report.json"), &evaluation)?;
    Ok(evaluation)
}

/// Fails where a scored text is one that the run calibrates or trains on, or that a given artifact was made from, unless the
/// configuration allows it.
pub(crate) fn check_overlap(
    config: &RunConfig,
    scored: &[Windows],
    calibrated_on: &[Windows],
    trained_on: Option<&(Vec<Windows>, Vec<Windows>)>,
    given: &Sources,
) -> Result<(), LabError> {
    let own = |texts: Vec<&Windows>| -> (Vec<TextInfo>, Vec<Passages>) {
        (texts.iter().map(|t| t.text.clone()).collect(), Passages::of_all(texts, config.add_bos))
    };
    let (calibration, training) = (
        own(calibrated_on.iter().collect()),
        own(trained_on.iter().flat_map(|(train, held_out)| train.iter().chain(held_out)).collect()),
    );
    let own = [("what [calibrate] finds", &calibration), ("what [finetune] trains", &training)];
    let own = own.map(|(name, (texts, passages))| MadeFrom { artifact: name.into(), texts, passages });
    let made_from: Vec<MadeFrom> = own.into_iter().chain(given.made_from()).collect();
    overlap::check(scored, config.add_bos, &made_from, config.allow_overlap).map(drop)
}

fn is_learned(scheme: &Scheme) -> bool {
    scheme.side().is_some_and(|side| side.family == Family::Learned)
}

/// Texts to train on, and what is held out of them.
pub(crate) fn training_windows(
    finetune: &FinetuneConfig,
    tokenizer: &Tokenizer,
    add_bos: bool,
) -> Result<(Vec<Windows>, Vec<Windows>), LabError> {
    let options = WindowOptions {
        max_chars: finetune.max_chars,
        context: finetune.context,
        windows: finetune.windows + finetune.held_out,
        add_bos,
    };
    Ok(windows(&finetune.text, tokenizer, &options)?.into_iter().map(|w| w.split(finetune.windows)).unzip())
}

/// Schemes of the family `learned` that no basis serves yet, one for each basis that they need.
fn open_learned(schemes: &[Scheme], sources: &Sources, loaded: &LoadedModel, seed: u64) -> Vec<Scheme> {
    let mut open: Vec<Scheme> = Vec::new();
    for scheme in schemes.iter().filter(|s| is_learned(s)) {
        let keys = Scheme { value: None, ..*scheme };
        if !open.contains(&keys) && sources.plan(&keys.to_string(), loaded.config(), seed).is_err() {
            open.push(keys);
        }
    }
    open
}

/// One basis to be trained for a run.
pub(crate) struct Training<'a> {
    pub config: &'a RunConfig,
    pub finetune: &'a FinetuneConfig,
    pub train: &'a [Windows],
    pub held_out: &'a [Windows],
    /// Its side code is of the family `learned`, its values are dense.
    pub scheme: Scheme,
    pub options: &'a RunOptions,
}

impl Training<'_> {
    /// Trains and keeps the basis in the run's folder, with its state beside it.
    pub fn run(
        &self,
        loaded: &LoadedModel,
        sources: &Sources,
        folder: &Folder,
        observer: &dyn Observer,
    ) -> Result<(PathBuf, BasisArtifact), LabError> {
        let serves = sources.stats.iter().find(|(_, stats)| finetune::check_scheme(&self.scheme, stats).is_ok());
        let (_, stats) = serves.ok_or_else(|| {
            let reason = format!("scheme '{}': no statistics of its base quantizer to begin with", self.scheme);
            LabError::Usage(reason)
        })?;
        let request = finetune::Request {
            model: &loaded.model,
            fingerprint: &loaded.fingerprint,
            name: self.config.model.clone(),
            device: self.config.device.clone(),
            command: self.options.command.clone(),
            train: self.train,
            held_out: self.held_out,
            add_bos: self.config.add_bos,
            stats,
            scheme: self.scheme,
            settings: &self.finetune.training,
            seed: self.config.seed,
            threads: self.options.threads,
        };
        let name = slug(&self.scheme.to_string());
        let made = request.run(&folder.0.join(format!("{TRAINED}{name}")), observer)?;
        let path = folder.0.join(format!("basis-{name}.safetensors"));
        made.artifact.save(&path)?;
        Ok((path, made.artifact))
    }
}

pub(crate) fn file_sha256(path: &Path) -> Result<String, LabError> {
    use sha2::{Digest, Sha256};
    Ok(crate::text::hex(&Sha256::digest(std::fs::read(path).map_err(LabError::io(path))?)))
}

fn window_options(config: &RunConfig, eval: &EvalConfig) -> WindowOptions {
    WindowOptions { max_chars: eval.max_chars, context: eval.context, windows: eval.windows, add_bos: config.add_bos }
}

pub(crate) fn windows(
    texts: &OneOrMany,
    tokenizer: &Tokenizer,
    options: &WindowOptions,
) -> Result<Vec<Windows>, LabError> {
    texts.as_slice().iter().map(|path| load_windows(Path::new(path), tokenizer, options)).collect()
}

/// Fails where a model with learned positions has too few of them.
///
/// # Errors
/// [`ModelError::ContextTooLong`] naming both.
pub fn check_context(loaded: &LoadedModel, needed: usize) -> Result<(), LabError> {
    match loaded.config().position_limit().filter(|limit| needed > *limit) {
        Some(limit) => Err(ModelError::ContextTooLong { needed, limit }.into()),
        None => Ok(()),
    }
}

/// Base quantizers to calibrate for the schemes that no given basis covers; fails where the run could not come to its end.
fn planned_calibrations(
    config: &RunConfig,
    schemes: &[Scheme],
    given: &Sources,
    loaded: &LoadedModel,
) -> Result<Calibrations, LabError> {
    let covered = |s: &Scheme| given.plan(&s.to_string(), loaded.config(), config.seed).is_ok();
    let calibrated = |s: &Scheme| s.side().is_some() || s.needs_statistics();
    let open: Vec<Scheme> = schemes.iter().copied().filter(|s| calibrated(s) && !covered(s)).collect();
    if let Some(scheme) = open.iter().find(|s| is_learned(s)).filter(|_| config.finetune.is_none()) {
        return Err(LabError::Usage(format!(
            "scheme '{scheme}': a learned basis is trained, not calibrated; add a section [finetune], or name its file in eval.basis"
        )));
    }
    let bases = bases_to_calibrate(&open);
    match (&config.calibrate, bases.first()) {
        (None, Some(base)) => {
            let reason = format!(
                "schemes on {base} need statistics, and the configuration has no [calibrate] section to take them from"
            );
            return Err(LabError::Usage(reason));
        }
        (Some(c), Some(_)) => bases.iter().try_for_each(|b| check_base(b, c.context, loaded.config().head_dim))?,
        _ => {}
    }
    Ok(Calibrations { bases, gradients: open.iter().any(Scheme::needs_gradients) })
}

/// What is to be calibrated.
pub(crate) struct Calibrations {
    /// Base quantizers whose residuals are taken.
    pub bases: Vec<BaseScheme>,
    /// Whether gradients are taken as well.
    pub gradients: bool,
}

/// Statistics of each base quantizer, from the folder or newly made.
#[allow(clippy::too_many_arguments)]
pub(crate) fn calibrated(
    config: &RunConfig,
    wanted: Calibrations,
    mut sources: Sources,
    loaded: &LoadedModel,
    texts: &[Windows],
    folder: &Folder,
    options: &RunOptions,
    observer: &dyn Observer,
) -> Result<Sources, LabError> {
    for base in wanted.bases {
        let with = if wanted.gradients { "-gradients" } else { "" };
        let path = folder.0.join(format!("stats-{}{with}.safetensors", slug(&base.to_string())));
        let seed = wanted.gradients.then_some(config.seed);
        let artifact = kept_statistics(&path, loaded, || {
            calibrate(&loaded.model, &loaded.fingerprint, texts, config.add_bos, base, seed, options.threads, observer)
        })?;
        sources.stats.push((path, artifact));
    }
    Ok(sources)
}

/// Statistics from a file of the run, or newly made and kept there.
pub(crate) fn kept_statistics(
    path: &Path,
    loaded: &LoadedModel,
    make: impl FnOnce() -> Result<StatsArtifact, LabError>,
) -> Result<StatsArtifact, LabError> {
    let artifact = match path.exists() {
        true => StatsArtifact::load(path).map_err(|error| match error {
            LabError::Artifact { path, reason } => {
                LabError::Artifact { path, reason: format!("{reason}; remove the file, and the run makes it again") }
            }
            other => other,
        })?,
        false => {
            let made = make()?;
            made.save(path)?;
            made
        }
    };
    artifact.header.check_model(path, &loaded.fingerprint)?;
    Ok(artifact)
}

/// Leaves every derived basis in the folder, for use elsewhere.
pub(crate) fn keep_bases(
    planned: &[PlannedScheme],
    sources: &Sources,
    folder: &Folder,
    seed: u64,
) -> Result<(), LabError> {
    for planned in planned {
        let (Some(side), Some(basis)) = (planned.scheme.side(), &planned.basis) else { continue };
        let Some(base) = planned.scheme.key.map(|k| k.base) else { continue };
        let name =
            format!("basis-{}-rank{}-{}-{}.safetensors", side.family, side.rank, side.scope, slug(&base.to_string()));
        let path = folder.0.join(name);
        let Some((_, stats)) = sources.stats.first() else { continue };
        // Given and trained bases are files already.
        if side.family == Family::Learned || path.exists() || sources.bases.iter().any(|(_, b)| b.basis == *basis) {
            continue;
        }
        let mut artifact = BasisArtifact { header: stats.header.clone(), basis: basis.clone() };
        if side.family.uses_residual() {
            artifact.header.base = base.to_string();
        }
        artifact.header.kind = "basis".into();
        artifact.header.basis = Some(BasisHeader::derived(side.family, side.rank, side.scope, seed));
        artifact.save(&path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_expanded() {
        let lookup = |name: &str| (name == "A").then(|| "x".to_string());
        assert_eq!(expand("${A}/b${A}", &lookup).unwrap(), "x/bx");
        assert!(expand("${B}/b", &lookup).unwrap_err().contains("environment variable B, which is not set"));
        assert!(expand("${A", &lookup).unwrap_err().contains("does not close"));
    }

    #[test]
    fn one_calibration_serves_all_schemes_that_only_need_queries() {
        let parse = |texts: &[&str]| texts.iter().map(|t| t.parse().unwrap()).collect::<Vec<Scheme>>();
        let bases =
            |texts: &[&str]| bases_to_calibrate(&parse(texts)).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(bases(&["dense", "kivi-2"]).is_empty());
        assert_eq!(bases(&["dense/klt-2(metric=output)"]), ["klt-2(g=32,r=32)"]);
        assert_eq!(bases(&["dense/klt-2"]), ["klt-2(g=32,r=32,metric=fisher)"]);
        assert_eq!(bases(&["kivi-2/klt-2(metric=output)"]), ["kivi-2(g=32,r=32)"]);
        assert_eq!(bases(&["kivi-2+query-pca(rank=4,bits=4)", "kivi-3+random(rank=4,bits=4)"]), ["kivi-2(g=32,r=32)"]);
        assert_eq!(
            bases(&[
                "kivi-2+query-pca(rank=4,bits=4)",
                "kivi-3+score-optimal(rank=4,bits=4)",
                "kivi-3(r=64)+residual-pca(rank=2,bits=4)"
            ]),
            ["kivi-3(g=32,r=32)"]
        );
    }
}
