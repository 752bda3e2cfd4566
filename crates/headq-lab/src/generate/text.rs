//! From tokens to text as it comes: whole characters only, and no further than a stop string.

use headq_models::{ModelError, Tokenizer};

/// Tokens of context that a text is decoded with, since some tokenizers write a space only between tokens.
const CONTEXT: usize = 8;
/// Tokens that may wait for the end of a character. A character has at most four bytes, and a token at least one; what does not end by
/// then is not going to be one.
const WAITING: usize = 32;
/// What decoders write in the place of bytes that are no character (yet).
const REPLACEMENT: char = '\u{fffd}';

/// Decodes tokens one by one.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens whose text has been given, and after `given` those that wait.
    ids: Vec<u32>,
    given: usize,
    /// The text of the given ones.
    before: String,
}

impl<'a> TextStream<'a> {
    /// For tokens that follow `prompt`.
    ///
    /// # Errors
    /// If the decoder fails.
    pub fn after(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self, ModelError> {
        let ids = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        let before = tokenizer.decode(&ids)?;
        Ok(Self { tokenizer, given: ids.len(), ids, before })
    }

    /// Text that is complete with this token; empty while a character is not.
    ///
    /// # Errors
    /// If the decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String, ModelError> {
        self.ids.push(id);
        let text = self.waiting()?;
        if text.is_empty() || text.ends_with(REPLACEMENT) && self.ids.len() - self.given < WAITING {
            return Ok(String::new());
        }
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        self.before = self.tokenizer.decode(&self.ids)?;
        Ok(text)
    }

    /// What is left at the end: a replacement character for bytes that make none.
    ///
    /// # Errors
    /// If the decoder fails.
    pub fn rest(&mut self) -> Result<String, ModelError> {
        let text = self.waiting()?;
        self.given = self.ids.len();
        self.before = self.tokenizer.decode(&self.ids)?;
        Ok(text)
    }

    /// Text of the tokens after the given ones.
    fn waiting(&self) -> Result<String, ModelError> {
        let whole = self.tokenizer.decode(&self.ids)?;
        match whole.strip_prefix(&self.before) {
            Some(text) => Ok(text.to_owned()),
            // Bytes that a decoder reads together with earlier ones.
            None => self.tokenizer.decode(&self.ids[self.given..]),
        }
    }
}

/// Holds text back while it may be the beginning of a stop string.
#[derive(Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
}

/// What [`StopStrings::push`] lets through.
#[derive(Debug, PartialEq, Eq)]
pub struct Passed {
    /// Text before any stop string.
    pub text: String,
    /// Whether a stop string followed.
    pub stopped: bool,
}

impl StopStrings {
    /// Stop strings; empty ones are left out.
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Takes more text, and gives what can be no part of a stop string.
    pub fn push(&mut self, text: &str) -> Passed {
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            let text = self.held[..at].to_owned();
            self.held.clear();
            return Passed { text, stopped: true };
        }
        let begins = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let safe = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(safe);
        Passed { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// What was held back, now that nothing follows.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool, String) {
        let mut strings = StopStrings::new(&stops.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        let mut texts = Vec::new();
        for piece in pieces {
            let passed = strings.push(piece);
            texts.push(passed.text);
            if passed.stopped {
                return (texts, true, strings.rest());
            }
        }
        (texts, false, strings.rest())
    }

    #[test]
    fn stop_strings_are_found_across_pieces() {
        let (texts, stopped, rest) = run(&["END"], &["one E", "N", "D two"]);
        assert_eq!((texts.concat().as_str(), stopped, rest.as_str()), ("one ", true, ""));
        assert_eq!(texts, ["one ", "", ""]);
    }

    #[test]
    fn what_only_looks_like_a_stop_string_comes_through() {
        let (texts, stopped, rest) = run(&["END", "aab"], &["E", "EN", "aa", "a", "c", "EN"]);
        assert_eq!(texts, ["", "E", "EN", "a", "aac", ""]);
        assert_eq!((stopped, rest.as_str()), (false, "EN"));
    }

    #[test]
    fn the_first_stop_string_counts() {
        assert_eq!(run(&["y", "xy", "é"], &["wxyz"]).0, ["w"]);
        assert_eq!(run(&["\n\n"], &["a\n", "\nb"]).0, ["a", ""]);
        assert_eq!(run(&["", "q"], &["abc"]), (vec!["abc".into()], false, String::new()));
        assert_eq!(run(&["é"], &["cafés"]).0, ["caf"]);
    }
}
