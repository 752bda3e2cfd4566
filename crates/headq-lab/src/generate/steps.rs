//! One token in, logits out, on any device.

use headq_models::{Decoder, LanguageModel, ModelError};

use super::cache::Cache;

/// Runs a model token by token: on slices where it is in this machine's memory (Burn's Flex backend), through tensors elsewhere.
#[derive(Debug)]
pub struct Steps<'a> {
    model: &'a LanguageModel,
    /// Present on the host.
    decoder: Option<Decoder>,
    logits: Vec<f32>,
}

impl<'a> Steps<'a> {
    /// Steps of a model.
    pub fn of(model: &'a LanguageModel) -> Self {
        Self { model, decoder: Decoder::new(model).ok(), logits: Vec::new() }
    }

    /// Logits of the token after a prompt, which goes into an empty cache in one pass: `[vocab]`.
    ///
    /// # Errors
    /// As [`LanguageModel::ids`].
    pub fn prompt(&mut self, tokens: &[u32], cache: &mut Cache) -> Result<&[f32], ModelError> {
        pass(self.model, tokens, 0, cache, &mut self.logits)
    }

    /// Logits of the token after `token`, which follows those in the cache: `[vocab]`.
    ///
    /// # Errors
    /// As [`Decoder::step`].
    pub fn step(&mut self, token: u32, cache: &mut Cache) -> Result<&[f32], ModelError> {
        let position = cache.len();
        match &mut self.decoder {
            Some(decoder) => decoder.step(token, position, cache),
            None => pass(self.model, &[token], position, cache, &mut self.logits),
        }
    }
}

/// Logits after the last of some tokens.
fn pass<'l>(
    model: &LanguageModel,
    tokens: &[u32],
    start: usize,
    cache: &mut Cache,
    logits: &'l mut Vec<f32>,
) -> Result<&'l [f32], ModelError> {
    let hidden = model.hidden(model.ids(tokens, 1, start)?, start, cache);
    let last = model.logits(hidden.narrow(1, tokens.len() - 1, 1)).into_data().convert::<f32>();
    *logits = last.try_to_vec::<f32>().expect("converted to f32");
    Ok(logits)
}
