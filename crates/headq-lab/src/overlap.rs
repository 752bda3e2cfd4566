//! Whether text that is scored was calibrated on, wherever in a file it stands.
//!
//! An artifact keeps hashes of the passages that it was made from: [`PASSAGE`] tokens each, one after the other, and the last of them
//! from the end. Scored text is hashed at every offset, so that whatever the two have in common is found if it holds one whole
//! passage, and 2 · [`PASSAGE`] − 1 tokens in a row always do. Tokens are compared rather than characters: files that differ in
//! line ends, that hold one another, or of which one begins elsewhere, are known by what they share. A beginning-of-sequence token
//! that windows were given is left out. Where fewer tokens than a passage are scored, whole texts are compared instead.
//!
//! Statistics of artifacts older than these hashes are *unknown*, which is reported and not refused.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use headq::basis::split_mix;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::LabError;
use crate::text::{TextInfo, Windows, hex, read_text};

/// Tokens in a passage.
pub const PASSAGE: usize = 64;

/// Hashes of the passages of one text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct Passages {
    /// The text, by [`TextInfo::tokens_sha256`].
    pub tokens_sha256: String,
    /// Tokens in each passage: [`PASSAGE`], or all of the text where it has fewer.
    length: usize,
    hashes: Vec<u64>,
}

/// As headers hold it: 16 hexadecimal digits for each hash.
#[derive(Serialize, Deserialize)]
struct Stored {
    tokens_sha256: String,
    length: usize,
    hashes: String,
}

impl From<Passages> for Stored {
    fn from(p: Passages) -> Self {
        let hashes = p.hashes.iter().map(|hash| format!("{hash:016x}")).collect();
        Self { tokens_sha256: p.tokens_sha256, length: p.length, hashes }
    }
}

impl TryFrom<Stored> for Passages {
    type Error = String;

    fn try_from(stored: Stored) -> Result<Self, String> {
        let Stored { tokens_sha256, length, hashes } = stored;
        if length == 0 || length > PASSAGE {
            return Err(format!("passages of {length} tokens: expected 1 to {PASSAGE}"));
        }
        let (digits, rest) = hashes.as_bytes().as_chunks::<16>();
        let number = |digits: &[u8; 16]| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
        let hashes: Option<Vec<u64>> = digits.iter().map(number).collect();
        match hashes.filter(|_| rest.is_empty()) {
            Some(hashes) => Ok(Self { tokens_sha256, length, hashes }),
            None => Err("hashes of passages: expected 16 hexadecimal digits each".into()),
        }
    }
}

impl Passages {
    /// Of a text's windows; `add_bos` says that each begins with a token of its own.
    pub fn of(text: &Windows, add_bos: bool) -> Self {
        let tokens = stream(text, add_bos);
        let length = tokens.len().clamp(1, PASSAGE);
        let all = rolling(&tokens, length);
        let last = all.len().saturating_sub(1);
        // The last passage covers what is left over.
        let at: BTreeSet<usize> = (0..all.len()).step_by(length).chain((!all.is_empty()).then_some(last)).collect();
        let hashes = at.into_iter().map(|i| all[i]).collect();
        Self { tokens_sha256: text.text.tokens_sha256.clone(), length, hashes }
    }

    /// Of several texts.
    pub fn of_all<'a>(texts: impl IntoIterator<Item = &'a Windows>, add_bos: bool) -> Vec<Self> {
        texts.into_iter().map(|text| Self::of(text, add_bos)).collect()
    }
}

/// The tokens of a text's windows in a row.
fn stream(text: &Windows, add_bos: bool) -> Vec<u32> {
    text.windows.iter().flat_map(|w| w.iter().skip(usize::from(add_bos)).copied()).collect()
}

/// 2⁶¹ − 1, a prime.
const MODULUS: u64 = (1 << 61) - 1;
/// The base of the polynomial, below the modulus.
const BASE: u64 = 0x0f3a_5c81_94d7_2e6b;

fn times(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    add((product & u128::from(MODULUS)) as u64, (product >> 61) as u64)
}

fn add(a: u64, b: u64) -> u64 {
    let sum = a + b;
    if sum >= MODULUS { sum - MODULUS } else { sum }
}

/// Hashes of `length` tokens at every offset: Σ_i m(token_i) · BASE^(length−1−i) modulo 2⁶¹ − 1, where m scatters ids.
fn rolling(tokens: &[u32], length: usize) -> Vec<u64> {
    if tokens.len() < length {
        return Vec::new();
    }
    let scattered = |token: u32| split_mix(u64::from(token)) % MODULUS;
    let leading = (1..length).fold(1, |power, _| times(power, BASE));
    let mut hash = tokens[..length].iter().fold(0, |hash, &t| add(times(hash, BASE), scattered(t)));
    let mut all = vec![hash];
    for (out, &token) in tokens.iter().zip(&tokens[length..]) {
        let without = add(hash, MODULUS - times(scattered(*out), leading));
        hash = add(times(without, BASE), scattered(token));
        all.push(hash);
    }
    all
}

/// What an artifact, or a part of a run, was made from.
#[derive(Debug, Clone)]
pub struct MadeFrom<'a> {
    /// The artifact as given, or what a run makes.
    pub artifact: String,
    /// Its texts.
    pub texts: &'a [TextInfo],
    /// Passages of those texts; a text without is one that an older version calibrated on.
    pub passages: &'a [Passages],
}

/// Scored text that an artifact was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlap {
    /// The artifact as given.
    pub artifact: String,
    /// The file that it was made from.
    pub made_from: String,
    /// The file that is scored.
    pub text: String,
    /// Tokens of the scored windows that stand in passages of that file: at least so many are shared, as a passage is found whole or
    /// not at all.
    pub tokens: usize,
    /// Tokens of the scored windows.
    pub of_tokens: usize,
    /// Windows that hold any of them.
    pub windows: usize,
    /// Windows scored.
    pub of_windows: usize,
}

/// An artifact that does not say which passages it was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unknown {
    /// The artifact as given.
    pub artifact: String,
    /// The file that it was made from.
    pub made_from: String,
    /// The scored file that is the same text by its own hash, or begins with it or is its beginning; `null` where none is.
    pub same_text: Option<String>,
}

/// Whether scored and calibrated text overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Nothing is shared, or nothing was calibrated.
    #[default]
    None,
    /// Some artifacts do not say; the others share nothing.
    Unknown,
    /// Some text is shared, and was allowed to be.
    Found,
}

/// What was found of an overlap: the field `overlap` of results.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overlaps {
    /// In a word.
    pub status: Status,
    /// By artifact, the file that it was made from, and scored file.
    pub found: Vec<Overlap>,
    /// Artifacts of which it cannot be told.
    pub unknown: Vec<Unknown>,
}

impl Overlaps {
    /// In a line each, for terminals and reports; empty where nothing is to be said.
    pub fn lines(&self) -> Vec<String> {
        let found = self.found.iter().map(|o| format!("{o}: this is no test on new text"));
        let unknown = self.unknown.iter().map(|u| {
            let same = u.same_text.as_ref().map_or(String::new(), |text| format!(", and {text} is that text"));
            format!(
                "{} does not say which passages of {} it was made from (an older version made it){same}: whether scored text is among \
                 them is unknown",
                u.artifact, u.made_from
            )
        });
        found.chain(unknown).collect()
    }

    /// Says on standard error what there is to say.
    pub fn warn(&self) {
        self.lines().iter().for_each(|line| tracing::warn!("{line}"));
    }

    /// Artifacts that had seen scored text, with that text.
    pub fn seen(&self) -> impl Iterator<Item = (&str, &str)> {
        let found = self.found.iter().map(|o| (o.artifact.as_str(), o.text.as_str()));
        found.chain(self.unknown.iter().filter_map(|u| Some((u.artifact.as_str(), u.same_text.as_deref()?))))
    }
}

impl std::fmt::Display for Overlap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { artifact, made_from, text, tokens, of_tokens, windows, of_windows } = self;
        write!(
            f,
            "text {text}: at least {tokens} of its {of_tokens} tokens ({windows} of {of_windows} windows) are in {made_from}, which \
             {artifact} was made from"
        )
    }
}

/// Holds scored texts against all that the artifacts were made from. What is allowed, or unknown, is warned of.
///
/// # Errors
/// [`LabError::Overlap`] where some text is shared and `allow` does not let it pass; if a text cannot be read any more.
pub fn check(scored: &[Windows], add_bos: bool, made_from: &[MadeFrom], allow: bool) -> Result<Overlaps, LabError> {
    let overlaps = find(scored, add_bos, made_from)?;
    match overlaps.found.first() {
        Some(first) if !allow => {
            let more = match overlaps.found.len() {
                1 => String::new(),
                n => format!(" (and {} more such overlaps)", n - 1),
            };
            Err(LabError::Overlap(format!(
                "{first}{more}; score on text that was not calibrated on, or give --allow-overlap to have this reported instead"
            )))
        }
        _ => {
            overlaps.warn();
            Ok(overlaps)
        }
    }
}

/// The same without a judgement.
///
/// # Errors
/// If a text cannot be read any more.
pub fn find(scored: &[Windows], add_bos: bool, made_from: &[MadeFrom]) -> Result<Overlaps, LabError> {
    let mut whole = Whole::default();
    let mut overlaps = Overlaps::default();
    let scored: Vec<Scored> = scored.iter().map(|windows| Scored::new(windows, add_bos)).collect();
    for made in made_from {
        for from in made.texts {
            let passages = made.passages.iter().find(|p| p.tokens_sha256 == from.tokens_sha256);
            let Some(passages) = passages else {
                let mut same_text = None;
                for s in &scored {
                    if same_text.is_none() && whole.same(s.windows, from)? {
                        same_text = Some(s.path());
                    }
                }
                overlaps.unknown.push(Unknown {
                    artifact: made.artifact.clone(),
                    made_from: from.path.to_string_lossy().into_owned(),
                    same_text,
                });
                continue;
            };
            for s in &scored {
                let shared = match s.tokens.len() < passages.length {
                    true if whole.same(s.windows, from)? => vec![true; s.tokens.len()],
                    true => Vec::new(),
                    false => s.shared(passages),
                };
                overlaps.found.extend(s.overlap(&shared, made, from));
            }
        }
    }
    overlaps.found.dedup();
    overlaps.unknown.dedup();
    overlaps.status = match (overlaps.found.is_empty(), overlaps.unknown.is_empty()) {
        (false, _) => Status::Found,
        (true, false) => Status::Unknown,
        (true, true) => Status::None,
    };
    Ok(overlaps)
}

/// A scored text.
struct Scored<'a> {
    windows: &'a Windows,
    tokens: Vec<u32>,
    /// Tokens of a window, without the one it may begin with.
    own: usize,
}

impl<'a> Scored<'a> {
    fn new(windows: &'a Windows, add_bos: bool) -> Self {
        let own = windows.windows.first().map_or(1, |w| w.len().saturating_sub(usize::from(add_bos)).max(1));
        Self { windows, tokens: stream(windows, add_bos), own }
    }

    fn path(&self) -> String {
        self.windows.text.path.to_string_lossy().into_owned()
    }

    /// Which tokens stand in one of the passages.
    fn shared(&self, passages: &Passages) -> Vec<bool> {
        let known: HashSet<u64> = passages.hashes.iter().copied().collect();
        let mut shared = vec![false; self.tokens.len()];
        let mut marked = 0;
        for (i, _) in rolling(&self.tokens, passages.length).iter().enumerate().filter(|(_, h)| known.contains(*h)) {
            let end = i + passages.length;
            shared[marked.max(i)..end].fill(true);
            marked = end;
        }
        shared
    }

    fn overlap(&self, shared: &[bool], made: &MadeFrom, from: &TextInfo) -> Option<Overlap> {
        let tokens = shared.iter().filter(|s| **s).count();
        (tokens > 0).then(|| Overlap {
            artifact: made.artifact.clone(),
            made_from: from.path.to_string_lossy().into_owned(),
            text: self.path(),
            tokens,
            of_tokens: self.tokens.len(),
            windows: shared.chunks(self.own).filter(|w| w.contains(&true)).count(),
            of_windows: self.windows.windows.len(),
        })
    }
}

/// Scored texts as whole files, read where they are needed.
#[derive(Default)]
struct Whole {
    texts: BTreeMap<std::path::PathBuf, String>,
    /// Hashes of the first so many characters of a text.
    prefixes: BTreeMap<(std::path::PathBuf, usize), Option<String>>,
}

impl Whole {
    /// Whether a text is the other: the same characters, the same windows of tokens, or a longer or shorter part from the beginning
    /// of the same file.
    fn same(&mut self, scored: &Windows, other: &TextInfo) -> Result<bool, LabError> {
        let own = &scored.text;
        Ok(own.sha256 == other.sha256
            || own.tokens_sha256 == other.tokens_sha256
            || self.prefix(&own.path, other.chars)?.is_some_and(|hash| hash == other.sha256))
    }

    /// SHA-256 of the first `chars` characters; `None` where there are fewer.
    fn prefix(&mut self, path: &std::path::Path, chars: usize) -> Result<Option<String>, LabError> {
        let key = (path.to_owned(), chars);
        if let Some(known) = self.prefixes.get(&key) {
            return Ok(known.clone());
        }
        if !self.texts.contains_key(path) {
            self.texts.insert(path.to_owned(), read_text(path, None)?);
        }
        let whole = &self.texts[path];
        let end = whole.char_indices().map(|(at, _)| at).chain([whole.len()]).nth(chars);
        let hash = end.map(|end| hex(&Sha256::digest(&whole.as_bytes()[..end])));
        self.prefixes.insert(key, hash.clone());
        Ok(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn info(text: &str, path: &Path) -> TextInfo {
        TextInfo {
            path: path.to_owned(),
            sha256: hex(&Sha256::digest(text.as_bytes())),
            chars: text.chars().count(),
            tokens: 0,
            tokens_sha256: hex(&Sha256::digest(format!("tokens of {text}"))),
        }
    }

    /// A text that is nothing but tokens, in windows of `context` tokens, which with `bos` follow one of their own.
    fn windows(name: &str, tokens: &[u32], context: usize, bos: bool) -> Windows {
        let windows: Vec<Vec<u32>> = tokens
            .chunks_exact(context)
            .map(|w| bos.then_some(9999).into_iter().chain(w.iter().copied()).collect())
            .collect();
        let ids: Vec<u8> = windows.iter().flatten().flat_map(|t| t.to_le_bytes()).collect();
        let text = TextInfo { tokens_sha256: hex(&Sha256::digest(&ids)), ..info(name, Path::new(name)) };
        Windows { text, windows }
    }

    /// Random tokens below `vocabulary`.
    fn tokens(count: usize, seed: u64, vocabulary: u64) -> Vec<u32> {
        (0..count as u64).map(|i| (split_mix(split_mix(seed) ^ i) % vocabulary) as u32).collect()
    }

    /// What is found where `scored` is held against `calibrated`, through the written form of the passages.
    fn found(scored: &Windows, calibrated: &Windows, add_bos: bool) -> Vec<Overlap> {
        let json = serde_json::to_string(&Passages::of_all([calibrated], add_bos)).unwrap();
        let passages: Vec<Passages> = serde_json::from_str(&json).unwrap();
        let texts = [calibrated.text.clone()];
        let made = MadeFrom { artifact: "stats".into(), texts: &texts, passages: &passages };
        let overlaps = find(std::slice::from_ref(scored), add_bos, &[made]).unwrap();
        assert!(overlaps.unknown.is_empty());
        overlaps.found
    }

    #[test]
    fn a_hash_is_that_of_the_polynomial_written_out() {
        let tokens = tokens(40, 3, 50_000);
        for length in [1, 2, 7, 40] {
            let expected = |i: usize| {
                let terms = tokens[i..i + length].iter();
                terms.fold(0u128, |h, t| {
                    let token = u128::from(split_mix(u64::from(*t)));
                    (h * u128::from(BASE) + token) % u128::from(MODULUS)
                })
            };
            let all = rolling(&tokens, length);
            assert_eq!(all.len(), 41 - length);
            assert!(all.iter().enumerate().all(|(i, h)| u128::from(*h) == expected(i)), "{length}");
        }
        assert!(rolling(&tokens, 41).is_empty());
    }

    #[test]
    fn any_overlap_of_128_tokens_is_found_at_any_offset() {
        for trial in 0..400u64 {
            let draw = |what: u64, below: usize| (split_mix(trial * 16 + what) % below as u64) as usize;
            // Tokens of few kinds, of many, and of all; windows that no passage divides.
            let vocabulary = [8, 300, 50_000][draw(0, 3)];
            let (own, other) = (tokens(700, 2 * trial + 1000, vocabulary), tokens(900, 2 * trial + 1001, vocabulary));
            let shared = 127 + draw(1, 300);
            let (from, to) = (draw(2, own.len() - shared), draw(3, other.len() - shared));
            let mut other = other;
            other[to..to + shared].copy_from_slice(&own[from..from + shared]);
            let (context, bos) = ([32, 50, 100, 233][draw(4, 4)], draw(5, 2) == 1);
            let (calibrated, scored) = (windows("a", &own, context, bos), windows("b", &other, 75, bos));
            // Only what stands in whole windows counts.
            let inside = |length: usize, context: usize, at: usize| (length / context * context).min(at + shared);
            let left = (inside(own.len(), context, from).saturating_sub(from))
                .min(inside(other.len(), 75, to).saturating_sub(to));
            let found = found(&scored, &calibrated, bos);
            if left >= 127 {
                assert_eq!(found.len(), 1, "trial {trial}: {left} tokens at {from} and {to}");
                assert!(found[0].tokens <= shared + 8 && found[0].tokens >= left - 126, "trial {trial}: {found:?}");
                assert!(found[0].windows >= 1 && found[0].windows <= shared / 75 + 2);
            }
        }
    }

    #[test]
    fn texts_that_share_nothing_are_not_reported() {
        for trial in 0..200u64 {
            let vocabulary = [8, 300, 50_000][(trial % 3) as usize];
            let (own, mut other) = (tokens(1000, 2 * trial, vocabulary), tokens(1000, 2 * trial + 1, vocabulary));
            assert!(found(&windows("b", &other, 100, false), &windows("a", &own, 100, false), false).is_empty());
            // 63 tokens in a row are less than a passage, in however many places.
            for at in (1..900).step_by(90) {
                other[at - 1] = own[at - 1] + 1;
                other[at..at + 63].copy_from_slice(&own[at..at + 63]);
                other[at + 63] = own[at + 63] + 1;
            }
            assert!(found(&windows("b", &other, 100, false), &windows("a", &own, 100, false), false).is_empty());
        }
    }

    #[test]
    fn a_text_against_itself_is_found_whole() {
        for (count, context) in [(640, 32), (650, 65), (100, 50), (40, 20), (3, 3)] {
            let text = tokens(count, 7, 1000);
            let all = found(&windows("b", &text, context, true), &windows("a", &text, context, true), true);
            let windows = count / context;
            assert_eq!((all[0].tokens, all[0].of_tokens), (windows * context, windows * context), "{count} {context}");
            assert_eq!((all[0].windows, all[0].of_windows), (windows, windows));
        }
    }

    #[test]
    fn fewer_tokens_than_a_passage_are_known_by_their_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, "Größe zählt nicht").unwrap();
        let few = Windows { text: info("Größe zählt", &path), windows: vec![tokens(20, 1, 100)] };
        let long = windows("long", &tokens(640, 2, 100), 64, false);
        let passages = Passages::of(&long, false);
        let elsewhere = folder.path().join("copy");
        let of = |text: &str| {
            let texts = [info(text, &elsewhere)];
            let passages = [Passages { tokens_sha256: texts[0].tokens_sha256.clone(), ..passages.clone() }];
            let made = MadeFrom { artifact: "stats".into(), texts: &texts, passages: &passages };
            find(std::slice::from_ref(&few), false, &[made]).unwrap()
        };
        for same in ["Größe zählt", "Größe", "Größe zählt nicht"] {
            assert_eq!((of(same).status, of(same).found[0].tokens), (Status::Found, 20), "{same}");
        }
        for other in ["Größe zählt nicht immer", "Grösse", "zählt"] {
            assert_eq!(of(other), Overlaps::default(), "{other}");
        }
    }

    #[test]
    fn artifacts_without_passages_are_unknown_and_let_pass() {
        let text = windows("a", &tokens(640, 1, 100), 64, false);
        let other = TextInfo { sha256: "0".into(), tokens_sha256: "0".into(), chars: usize::MAX, ..text.text.clone() };
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), "text").unwrap();
        let mut scored = text.clone();
        scored.text.path = folder.path().join("a");
        let of = |texts: &[TextInfo]| {
            let made = MadeFrom { artifact: "old".into(), texts, passages: &[] };
            check(std::slice::from_ref(&scored), false, &[made], false).unwrap()
        };
        let unknown = of(std::slice::from_ref(&other));
        assert_eq!((unknown.status, &unknown.unknown[0].same_text), (Status::Unknown, &None));
        let same = of(std::slice::from_ref(&text.text));
        assert_eq!((same.status, same.seen().count()), (Status::Unknown, 1));
        assert!(same.lines()[0].contains("is that text"));
    }

    #[test]
    fn what_is_shared_is_refused_unless_it_is_allowed() {
        let text = windows("a", &tokens(640, 1, 100), 64, false);
        let passages = Passages::of_all([&text], false);
        let texts = [text.text.clone()];
        let made = [MadeFrom { artifact: "stats".into(), texts: &texts, passages: &passages }];
        let error = check(std::slice::from_ref(&text), false, &made, false).unwrap_err().to_string();
        assert!(error.contains("at least 640 of its 640 tokens (10 of 10 windows)"), "{error}");
        assert!(error.contains("--allow-overlap") && !error.contains('\n'), "{error}");
        assert_eq!(check(std::slice::from_ref(&text), false, &made, true).unwrap().status, Status::Found);
    }

    #[test]
    fn broken_passages_are_refused() {
        for (length, hashes) in [(0, ""), (65, ""), (64, "0123"), (64, "zzzzzzzzzzzzzzzz"), (64, "é23456789012345")] {
            let json = serde_json::json!({"tokens_sha256": "", "length": length, "hashes": hashes});
            assert!(serde_json::from_value::<Passages>(json).is_err(), "{length} {hashes}");
        }
    }
}
