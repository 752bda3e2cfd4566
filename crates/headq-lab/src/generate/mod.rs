//! Generating text with a quantized cache.

mod cache;
mod sampler;
mod steps;
mod text;

use std::time::Instant;

use headq::DenseType;
use headq_models::{Fingerprint, LanguageModel, ModelConfig, ModelError, Tokenizer};
use serde::Serialize;

pub use cache::Cache;
pub use sampler::{Sampler, Sampling};
pub use steps::Steps;
pub use text::{Passed, StopStrings, TextStream};

use crate::evaluate::PlannedScheme;
use crate::{LabError, Observer, PROGRAM};

/// New tokens where no number is asked for and the context has room.
const DEFAULT_TOKENS: usize = 128;

/// Token ids of a prompt: of its text, after the beginning-of-sequence token if `add_bos`. An empty text is the beginning-of-sequence
/// token alone.
///
/// # Errors
/// If the tokenizer cannot encode the text, or the model has no beginning-of-sequence token where one is needed.
pub fn prompt_tokens(tokenizer: &Tokenizer, text: &str, add_bos: bool) -> Result<Vec<u32>, LabError> {
    let mut tokens = tokenizer.encode(text)?;
    if add_bos || tokens.is_empty() {
        let bos = tokenizer.bos().ok_or_else(|| {
            LabError::Usage(match add_bos {
                true => "this model's tokenizer has no beginning-of-sequence token; leave out --add-bos".into(),
                false => {
                    "the prompt is empty, and this model has no beginning-of-sequence token to start from; give some text".into()
                }
            })
        })?;
        tokens.insert(0, bos);
    }
    Ok(tokens)
}

/// How many tokens to generate: as many as asked, or what the context has room for, but not more than 128.
///
/// # Errors
/// If prompt and new tokens exceed the context that the model was made for, unless `beyond_context` allows it; learned positions
/// allow nothing beyond.
pub fn new_tokens(
    config: &ModelConfig,
    prompt: usize,
    asked: Option<usize>,
    beyond_context: bool,
) -> Result<usize, LabError> {
    if asked == Some(0) {
        return Err(LabError::Usage("0 new tokens: at least one is needed".into()));
    }
    let limit = config.max_position_embeddings;
    let wanted = asked.unwrap_or(DEFAULT_TOKENS.min(limit.saturating_sub(prompt)).max(1));
    let needed = prompt.saturating_add(wanted);
    if needed <= limit {
        return Ok(wanted);
    }
    match config.position_limit() {
        Some(limit) => Err(ModelError::ContextTooLong { needed, limit }.into()),
        None if beyond_context => Ok(asked.unwrap_or(DEFAULT_TOKENS)),
        None => Err(LabError::Usage(format!(
            "{prompt} tokens of prompt and {wanted} new ones exceed the {limit} positions that this model was made for; give a shorter prompt, a smaller --max-tokens, or --beyond-context"
        ))),
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StopReason {
    /// As many tokens as asked for.
    Length,
    /// An end-of-sequence token.
    Eos,
    /// A stop string.
    Stop,
    /// Interrupted from outside.
    Interrupted,
    /// Nobody reads the text any more.
    Closed,
}

/// What a generation is asked to do.
#[derive(Debug)]
pub struct Request<'a> {
    /// Model.
    pub model: &'a LanguageModel,
    /// Its identity.
    pub fingerprint: &'a Fingerprint,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Model as the user named it.
    pub name: String,
    /// Device as the user named it.
    pub device: String,
    /// Scheme of the cache.
    pub scheme: &'a PlannedScheme,
    /// Type of the keys and values that the cache holds dense.
    pub cache_type: DenseType,
    /// Token ids of the prompt, at least one; see [`prompt_tokens`].
    pub prompt: &'a [u32],
    /// New tokens at most; see [`new_tokens`].
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Seed of random choices.
    pub seed: u64,
    /// Strings that end the text; they are no part of it.
    pub stops: &'a [String],
    /// Whether to go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Cores to use.
    pub threads: usize,
}

/// A generated text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Generation {
    /// Program and version.
    pub program: String,
    /// Model as given.
    pub model: String,
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Device as given.
    pub device: String,
    /// Scheme as asked.
    pub scheme: String,
    /// In canonical form, every default spelled out.
    pub canonical: String,
    /// Type of the keys and values that the cache holds dense.
    pub cache_dtype: String,
    /// Null where the most probable token is taken.
    pub temperature: Option<f64>,
    /// Null where all tokens are kept.
    pub top_k: Option<usize>,
    /// Null where all tokens are kept.
    pub top_p: Option<f64>,
    /// Seed of random choices.
    pub seed: u64,
    /// The new text, without the prompt and without a stop string.
    pub text: String,
    /// Ids of all new tokens, those of a stop string and an end-of-sequence token included.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of new tokens.
    pub new_tokens: usize,
    /// Why it ended.
    pub stop_reason: StopReason,
    /// Seconds from the prompt to the logits of the first new token.
    pub prefill_seconds: f64,
    /// Seconds from these to the end.
    pub decode_seconds: f64,
    /// Decode steps per second: new tokens after the first, over `decode_seconds`. Null without any.
    pub tokens_per_second: Option<f64>,
    /// Tokens in the cache at the end.
    pub cached_tokens: usize,
    /// Bytes that the cache takes at the end.
    pub cache_bytes: u64,
    /// Bytes that f16 keys and values of as many tokens take.
    pub f16_bytes: u64,
}

/// Takes text as it comes; `false` where nobody reads it any more.
pub type Sink<'a> = dyn FnMut(&str) -> Result<bool, LabError> + Send + 'a;

impl Request<'_> {
    /// Generates, giving text to `sink` as soon as it is certain. An interruption ends it as any other reason does.
    ///
    /// # Errors
    /// If the model gives logits that are not finite, the sink fails, or the prompt's pass is interrupted.
    pub fn run(&self, observer: &dyn Observer, sink: &mut Sink) -> Result<Generation, LabError> {
        self.sampling.check()?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.threads)
            .build()
            .map_err(|e| LabError::Usage(format!("cannot start {} threads: {e}", self.threads)))?;
        // Decode steps have many short parallel parts, which start faster from within the pool.
        pool.install(|| self.run_here(observer, sink))
    }

    fn run_here(&self, observer: &dyn Observer, sink: &mut Sink) -> Result<Generation, LabError> {
        let mut cache = Cache::new(self.scheme, self.model.config(), self.cache_type, &self.model.device())?;
        let mut steps = Steps::of(self.model);
        let start = Instant::now();
        let logits = steps.prompt(self.prompt, &mut cache, observer)?;
        let prefill_seconds = start.elapsed().as_secs_f64();

        let start = Instant::now();
        let mut writer = Writer {
            stream: TextStream::after(self.tokenizer, self.prompt)?,
            stops: StopStrings::new(self.stops),
            sink,
            text: String::new(),
        };
        let mut sampler = Sampler::new(self.sampling, self.seed);
        let mut tokens = Vec::new();
        let mut next = sampler.next(logits);
        let stop_reason = loop {
            if observer.cancelled() {
                break StopReason::Interrupted;
            }
            let token = next.ok_or(LabError::BrokenLogits { token: tokens.len() })?;
            tokens.push(token);
            if !self.ignore_eos && self.tokenizer.eos().contains(&token) {
                break StopReason::Eos;
            }
            if let Some(reason) = writer.push(token)? {
                break reason;
            }
            if tokens.len() == self.max_tokens {
                break StopReason::Length;
            }
            next = sampler.next(steps.step(token, &mut cache)?);
        };
        let text = writer.finish(stop_reason)?;
        let decode_seconds = start.elapsed().as_secs_f64();

        let (temperature, top_k, top_p) = match self.sampling {
            Sampling::Greedy => (None, None, None),
            Sampling::Random { temperature, top_k, top_p } => (Some(temperature), top_k, top_p),
        };
        let steps = tokens.len().saturating_sub(1);
        Ok(Generation {
            program: PROGRAM.into(),
            model: self.name.clone(),
            fingerprint: self.fingerprint.clone(),
            device: self.device.clone(),
            scheme: self.scheme.asked.clone(),
            canonical: self.scheme.scheme.to_string(),
            cache_dtype: self.cache_type.to_string(),
            temperature,
            top_k,
            top_p,
            seed: self.seed,
            text,
            prompt_tokens: self.prompt.len(),
            new_tokens: tokens.len(),
            tokens,
            stop_reason,
            prefill_seconds,
            decode_seconds,
            tokens_per_second: (steps > 0).then(|| steps as f64 / decode_seconds),
            cached_tokens: cache.len(),
            cache_bytes: cache.bytes(),
            f16_bytes: cache.f16_bytes(),
        })
    }
}

/// Tokens to text, up to a stop string, to the sink.
struct Writer<'a, 's, 'f> {
    stream: TextStream<'a>,
    stops: StopStrings,
    sink: &'s mut Sink<'f>,
    text: String,
}

impl Writer<'_, '_, '_> {
    /// Why to end after this token, if so.
    fn push(&mut self, token: u32) -> Result<Option<StopReason>, LabError> {
        let text = self.stream.push(token)?;
        self.write(&text)
    }

    fn write(&mut self, text: &str) -> Result<Option<StopReason>, LabError> {
        let passed = self.stops.push(text);
        let read = self.give(&passed.text)?;
        Ok(match (passed.stopped, read) {
            (true, _) => Some(StopReason::Stop),
            (false, true) => None,
            (false, false) => Some(StopReason::Closed),
        })
    }

    fn give(&mut self, text: &str) -> Result<bool, LabError> {
        self.text.push_str(text);
        if text.is_empty() { Ok(true) } else { (self.sink)(text) }
    }

    /// Gives what still waits, unless a stop string ended the text; the whole text.
    fn finish(mut self, reason: StopReason) -> Result<String, LabError> {
        if reason != StopReason::Stop && reason != StopReason::Closed {
            let rest = self.stream.rest()?;
            if self.write(&rest)?.is_none() {
                let held = self.stops.rest();
                self.give(&held)?;
            }
        }
        Ok(self.text)
    }
}
