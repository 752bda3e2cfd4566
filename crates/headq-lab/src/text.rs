//! Texts, cut into windows of tokens.
//!
//! Line ends are read as most language tools read text files: CRLF and a lone CR become LF, before characters are counted. A byte
//! order mark at the beginning is no part of the text.

use std::path::{Path, PathBuf};

use headq_models::Tokenizer;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::LabError;

/// How texts become windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowOptions {
    /// Use only the first so many characters (Unicode scalars).
    pub max_chars: Option<usize>,
    /// T: tokens in a window.
    pub context: usize,
    /// W: windows per text.
    pub windows: usize,
    /// Put the beginning-of-sequence token first in every window (it is one of the T tokens).
    pub add_bos: bool,
}

/// Where windows came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextInfo {
    /// File as given.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// SHA-256 of the characters used.
    pub sha256: String,
    /// Characters used.
    pub chars: usize,
    /// Tokens in them.
    pub tokens: usize,
    /// SHA-256 of the ids of the windows' tokens, as little-endian 32-bit numbers: another tokenizer gives another.
    pub tokens_sha256: String,
}

/// A text's windows: window i is tokens [iT, (i+1)T).
#[derive(Debug, Clone)]
pub struct Windows {
    /// Where they came from.
    pub text: TextInfo,
    /// Token ids, each of length T.
    pub windows: Vec<Vec<u32>>,
}

impl Windows {
    /// The first `at` windows, and the others.
    pub fn split(mut self, at: usize) -> (Windows, Windows) {
        let rest = self.windows.split_off(at);
        let with = |windows: Vec<Vec<u32>>| {
            let text = TextInfo { tokens_sha256: tokens_sha256(&windows), ..self.text.clone() };
            Windows { text, windows }
        };
        (with(self.windows.clone()), with(rest))
    }
}

fn tokens_sha256(windows: &[Vec<u32>]) -> String {
    hex(&Sha256::digest(windows.iter().flatten().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>()))
}

/// Reads the part of a text that is used, with LF line ends.
///
/// # Errors
/// If the file cannot be read, is not UTF-8 throughout, or has only white space in that part.
pub fn read_text(path: &Path, max_chars: Option<usize>) -> Result<String, LabError> {
    let text_error = |reason: String| LabError::Text { path: path.to_owned(), reason };
    let bytes = std::fs::read(path).map_err(LabError::input(path, "expected a text to read, plain and in UTF-8"))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        text_error(format!(
            "not UTF-8: byte {} begins no character; convert the file, e.g. with iconv",
            e.utf8_error().valid_up_to()
        ))
    })?;
    let text = text.strip_prefix('\u{feff}').map_or(text.clone(), str::to_owned);
    let text = if text.contains('\r') { text.replace("\r\n", "\n").replace('\r', "\n") } else { text };
    let text = match max_chars.and_then(|n| text.char_indices().nth(n)) {
        None => text,
        Some((end, _)) => text[..end].to_owned(),
    };
    if text.trim().is_empty() {
        return Err(text_error("empty; give a text with at least one window of tokens".into()));
    }
    Ok(text)
}

/// Reads, encodes and cuts one text.
///
/// # Errors
/// As [`read_text`], and if it has fewer windows than asked for.
pub fn load_windows(path: &Path, tokenizer: &Tokenizer, options: &WindowOptions) -> Result<Windows, LabError> {
    let text_error = |reason: String| LabError::Text { path: path.to_owned(), reason };
    if options.context < 2 {
        return Err(LabError::Usage(format!(
            "context {}: a window needs at least 2 tokens, one to read and one to predict",
            options.context
        )));
    }
    if options.windows == 0 {
        return Err(LabError::Usage("windows 0: at least one is needed".into()));
    }
    let bos = match options.add_bos {
        false => None,
        true => Some(tokenizer.bos().ok_or_else(|| {
            LabError::Usage("this model's tokenizer has no beginning-of-sequence token; leave out --add-bos".into())
        })?),
    };
    let text = read_text(path, options.max_chars)?;
    let tokens = tokenizer.encode(&text)?;
    let own = options.context - usize::from(bos.is_some());
    let have = tokens.len() / own;
    if have < options.windows {
        let limit = options.max_chars.map_or(String::new(), |n| format!(" in its first {n} characters"));
        return Err(text_error(format!(
            "{} tokens{limit} make {have} windows of {}, and {} were asked for; give a longer text, a smaller context or fewer windows",
            tokens.len(),
            options.context,
            options.windows
        )));
    }
    let windows: Vec<Vec<u32>> = tokens
        .chunks_exact(own)
        .take(options.windows)
        .map(|w| bos.into_iter().chain(w.iter().copied()).collect())
        .collect();
    let info = TextInfo {
        path: path.to_owned(),
        sha256: hex(&Sha256::digest(text.as_bytes())),
        chars: text.chars().count(),
        tokens: tokens.len(),
        tokens_sha256: tokens_sha256(&windows),
    };
    Ok(Windows { text: info, windows })
}

/// JSON has no paths that are not Unicode.
fn lossy<S: serde::Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
