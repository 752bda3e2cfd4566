//! One token in, logits out, on any device.

use headq_models::{Decoder, LanguageModel};

use super::cache::Cache;
use crate::{LabError, Observer, Silent};

/// Prompts of fewer tokens take too short a time to show progress of.
const LONG: usize = 1024;

/// Runs a model token by token: on slices where it is in this machine's memory (Burn's Flex backend), through tensors elsewhere.
#[derive(Debug, Clone)]
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
    /// As [`LanguageModel::ids`], and [`LabError::Interrupted`], which is looked for before each layer.
    pub fn prompt(&mut self, tokens: &[u32], cache: &mut Cache, observer: &dyn Observer) -> Result<&[f32], LabError> {
        let observer = if tokens.len() < LONG { &Quiet(observer) } else { observer };
        let layers = self.model.config().num_layers;
        observer.begin_units(&format!("prompt of {} tokens", tokens.len()), layers, "layers");
        let result = pass(self.model, tokens, 0, cache, observer, &mut self.logits);
        observer.end();
        result
    }

    /// Logits of the token after `token`, which follows those in the cache: `[vocab]`.
    ///
    /// # Errors
    /// As [`Decoder::step`].
    pub fn step(&mut self, token: u32, cache: &mut Cache) -> Result<&[f32], LabError> {
        let position = cache.len();
        match &mut self.decoder {
            Some(decoder) => Ok(decoder.step(token, position, cache)?),
            None => pass(self.model, &[token], position, cache, &Silent, &mut self.logits),
        }
    }
}

/// Shows nothing, but can be stopped.
struct Quiet<'a>(&'a dyn Observer);

impl Observer for Quiet<'_> {
    fn begin(&self, _: &str, _: usize) {}
    fn step(&self) {}
    fn end(&self) {}
    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

/// Logits after the last of some tokens, layer by layer.
fn pass<'l>(
    model: &LanguageModel,
    tokens: &[u32],
    start: usize,
    cache: &mut Cache,
    observer: &dyn Observer,
    logits: &'l mut Vec<f32>,
) -> Result<&'l [f32], LabError> {
    let mut x = model.embed(model.ids(tokens, 1, start)?, start);
    for layer in 0..model.config().num_layers {
        if observer.cancelled() {
            return Err(LabError::Interrupted);
        }
        x = model.layer(layer, x, start, cache);
        observer.step();
    }
    let last = model.finish(x.narrow(1, tokens.len() - 1, 1));
    let last = model.logits(last).into_data().convert::<f32>();
    *logits = last.try_to_vec::<f32>().expect("converted to f32");
    Ok(logits)
}
