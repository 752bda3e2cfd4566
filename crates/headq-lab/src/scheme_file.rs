//! Scheme files: bits of every head, which are too many to be written on a command line.
//!
//! A JSON object, as `headq search` writes it. `scheme` is a scheme in the usual written form, whose `pool=` is not `head` or `model` but
//! names bits by their hash; `key_bits` and `value_bits` are these bits, `[layers][kv_heads]`, code bits per element with scales and
//! zeros counted. Wherever a command takes a scheme, it takes the name of such a file, which ends in `.json`.

use std::path::{Path, PathBuf};

use headq::Scheme;
use headq::scheme::{Bits, HeadBudgets, Pool};
use headq_models::Fingerprint;
use serde::{Deserialize, Serialize};

use crate::artifact::write_atomic;
use crate::overlap::{MadeFrom, Passages};
use crate::text::{TextInfo, Windows};
use crate::{LabError, PROGRAM};

/// Version of the layout.
const SCHEMA: u32 = 1;
/// What the file calls itself.
const KIND: &str = "scheme";
/// What is expected where a file is not one.
const EXPECTED: &str =
    "expected a scheme file, which `headq search MODEL --stats STATS --text FILE --bits B --out SCHEME.json` makes";

/// A scheme with the bits of every head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SchemeFile {
    schema: u32,
    kind: String,
    program: String,
    /// The model that it was made for, and the only one that it may be used with.
    pub model: Fingerprint,
    /// In its written form.
    pub scheme: String,
    /// Code bits per key element, `[layers][kv_heads]`; none where keys are dense.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_bits: Option<Vec<Vec<f64>>>,
    /// Code bits per value element, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_bits: Option<Vec<Vec<f64>>>,
    /// Texts that it was chosen on.
    pub texts: Vec<TextInfo>,
    /// Hashes of their passages.
    #[serde(default)]
    pub passages: Vec<Passages>,
    /// How it was found.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub search: serde_json::Value,
}

/// Bits of one pool, by layer and head.
fn by_layer(pool: Option<Pool>, kv_heads: usize) -> Option<Vec<Vec<f64>>> {
    let Some(Pool::Plan(budgets)) = pool else { return None };
    Some(budgets.bits().chunks(kv_heads).map(|layer| layer.iter().map(|b| b.mean()).collect()).collect())
}

fn interned(bits: &[Vec<f64>]) -> &'static HeadBudgets {
    HeadBudgets::interned(bits.iter().flatten().map(|b| Bits::nearest(*b)).collect())
}

impl SchemeFile {
    /// Of a scheme for a model.
    pub fn new(
        scheme: &Scheme,
        model: &Fingerprint,
        texts: &[Windows],
        add_bos: bool,
        search: serde_json::Value,
    ) -> Self {
        Self {
            schema: SCHEMA,
            kind: KIND.into(),
            program: PROGRAM.into(),
            model: model.clone(),
            scheme: scheme.to_string(),
            key_bits: by_layer(scheme.key.map(|key| key.base.pool), model.kv_heads),
            value_bits: by_layer(scheme.value.map(|value| value.pool), model.kv_heads),
            texts: texts.iter().map(|t| t.text.clone()).collect(),
            passages: Passages::of_all(texts, add_bos),
            search,
        }
    }

    /// What it was chosen on.
    pub fn made_from(&self, path: &Path) -> MadeFrom<'_> {
        MadeFrom { artifact: path.to_string_lossy().into_owned(), texts: &self.texts, passages: &self.passages }
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), LabError> {
        let json = serde_json::to_string_pretty(self);
        let json = json.map_err(|e| LabError::Artifact { path: path.to_owned(), reason: e.to_string() })?;
        write_atomic(path, format!("{json}\n").as_bytes())
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`LabError::Artifact`] saying what is wrong with it.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        let bytes = std::fs::read(path).map_err(LabError::input(path, EXPECTED))?;
        let fail = |reason: String| LabError::Artifact { path: path.to_owned(), reason };
        let value: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|e| fail(format!("not JSON ({e}); {EXPECTED}")))?;
        if value["kind"] != KIND {
            return Err(fail(format!("its kind is {}; {EXPECTED}", value["kind"])));
        }
        if value["schema"] != SCHEMA {
            return Err(fail(format!(
                "schema {} is not the one this program reads, {SCHEMA}; search again",
                value["schema"]
            )));
        }
        let file: Self = serde_json::from_value(value).map_err(|e| fail(e.to_string()))?;
        for (name, bits) in [("key_bits", &file.key_bits), ("value_bits", &file.value_bits)] {
            let Some(bits) = bits else { continue };
            let (layers, heads) = (file.model.layers, file.model.kv_heads);
            if bits.len() != layers || bits.iter().any(|layer| layer.len() != heads) {
                return Err(fail(format!("'{name}': expected {layers} layers of {heads} numbers; search again")));
            }
            if let Some(wrong) = bits.iter().flatten().find(|b| !(0.0..=8.0).contains(*b)) {
                return Err(fail(format!("'{name}': expected numbers from 0 to 8, found {wrong}")));
            }
        }
        file.scheme().map_err(|e| fail(e.to_string()))?;
        Ok(file)
    }

    /// The scheme.
    ///
    /// # Errors
    /// If it is malformed, or names other bits than the file's.
    pub fn scheme(&self) -> Result<Scheme, LabError> {
        for bits in [&self.key_bits, &self.value_bits].into_iter().flatten() {
            interned(bits);
        }
        Ok(self.scheme.parse()?)
    }
}

/// The scheme that a command was asked for: in its written form, or in a file.
///
/// # Errors
/// If the text is neither a scheme nor the name of a scheme file.
pub fn resolve(asked: &str) -> Result<Scheme, LabError> {
    let asked = asked.trim();
    if !is_file(asked) {
        return Ok(asked.parse()?);
    }
    SchemeFile::load(Path::new(asked))?.scheme()
}

/// The scheme file that a command was asked for, if it was one.
///
/// # Errors
/// As [`SchemeFile::load`].
pub(crate) fn read(asked: &str) -> Result<Option<(PathBuf, SchemeFile)>, LabError> {
    let asked = asked.trim();
    if !is_file(asked) {
        return Ok(None);
    }
    Ok(Some((asked.into(), SchemeFile::load(Path::new(asked))?)))
}

fn is_file(asked: &str) -> bool {
    Path::new(asked).extension().is_some_and(|e| e.eq_ignore_ascii_case("json"))
}

/// Fails where a scheme file was made for another model.
///
/// # Errors
/// [`LabError::Artifact`] that names both fingerprints.
pub fn check_model(asked: &str, model: &Fingerprint) -> Result<(), LabError> {
    let asked = asked.trim();
    if !is_file(asked) {
        return Ok(());
    }
    let file = SchemeFile::load(Path::new(asked))?;
    match file.model == *model {
        true => Ok(()),
        false => Err(LabError::Artifact {
            path: asked.into(),
            reason: format!(
                "made for another model: [{}], but this model is [{model}]; search for this model",
                file.model
            ),
        }),
    }
}
