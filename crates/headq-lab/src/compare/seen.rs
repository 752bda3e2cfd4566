//! Whether a text that is measured was calibrated or trained on.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::LabError;
use crate::text::{TextInfo, Windows, hex, read_text};

/// Measured texts, to be held against those that artifacts were made from.
pub struct Texts<'a> {
    measured: &'a [Windows],
    /// All characters of each, also those beyond `max_chars`.
    whole: Vec<String>,
    /// Hashes of the first so many characters of a text.
    prefixes: BTreeMap<(usize, usize), Option<String>>,
}

impl<'a> Texts<'a> {
    /// Reads the whole of every measured text.
    ///
    /// # Errors
    /// If a text cannot be read any more.
    pub fn new(measured: &'a [Windows]) -> Result<Self, LabError> {
        let whole = measured.iter().map(|w| read_text(&w.text.path, None)).collect::<Result<_, _>>()?;
        Ok(Self { measured, whole, prefixes: BTreeMap::new() })
    }

    /// The measured texts of which `texts` has one: the same characters, the same windows of tokens, or a longer or shorter part from
    /// the beginning of the same file.
    pub fn seen_in(&mut self, texts: &[TextInfo]) -> Vec<&'a TextInfo> {
        let measured = self.measured;
        let seen = |(i, w): (usize, &'a Windows)| texts.iter().any(|t| self.same(i, t)).then_some(&w.text);
        measured.iter().enumerate().filter_map(seen).collect()
    }

    fn same(&mut self, i: usize, other: &TextInfo) -> bool {
        let own = &self.measured[i].text;
        own.sha256 == other.sha256
            || own.tokens_sha256 == other.tokens_sha256
            || self.prefix(i, other.chars).is_some_and(|hash| hash == other.sha256)
    }

    /// SHA-256 of the first `chars` characters; `None` where there are fewer.
    fn prefix(&mut self, i: usize, chars: usize) -> Option<String> {
        let whole = &self.whole[i];
        let hash = || {
            let end = whole.char_indices().map(|(at, _)| at).chain([whole.len()]).nth(chars)?;
            Some(hex(&Sha256::digest(&whole.as_bytes()[..end])))
        };
        self.prefixes.entry((i, chars)).or_insert_with(hash).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str, path: &std::path::Path) -> TextInfo {
        TextInfo {
            path: path.to_owned(),
            sha256: hex(&Sha256::digest(text.as_bytes())),
            chars: text.chars().count(),
            tokens: 0,
            tokens_sha256: hex(&Sha256::digest(format!("tokens of {text}"))),
        }
    }

    #[test]
    fn texts_are_known_by_their_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, "Größe zählt nicht").unwrap();
        let measured = [Windows { text: info("Größe zählt", &path), windows: vec![] }];
        let mut texts = Texts::new(&measured).unwrap();
        let elsewhere = folder.path().join("copy");
        for same in ["Größe zählt", "Größe", "Größe zählt nicht"] {
            assert_eq!(texts.seen_in(&[info("another", &path), info(same, &elsewhere)]), [&measured[0].text], "{same}");
        }
        for other in ["Größe zählt nicht immer", "Grösse", "zählt"] {
            assert!(texts.seen_in(&[info(other, &path)]).is_empty(), "{other}");
        }
        let tokens = TextInfo { tokens_sha256: measured[0].text.tokens_sha256.clone(), ..info("retold", &path) };
        assert_eq!(texts.seen_in(&[tokens]).len(), 1);
    }
}
