//! `headq bench`: how fast attention over a packed cache, and a whole decode step, are beside dense caches.
//!
//! Every contender of a context holds its cache at the same time and takes its turn in every round, so that what disturbs the machine
//! disturbs them alike: compare within one run, and ratios rather than times. Keys and values are normal random numbers, which cost
//! what a model's own do.

mod bandwidth;

use std::time::Instant;

use burn::tensor::{Device, Tensor, TensorData};
use headq::budget::HeadShape;
use headq::{AttentionSite, DecodeAttention, DenseType, PackedCache};
use headq_models::{Decoder, LanguageModel};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use crate::evaluate::{PlannedScheme, head_shape};
use crate::{LabError, Observer, PROGRAM, memory};

pub use bandwidth::read_bandwidth;

/// Tokens that are made at a time, and over again.
const CHUNK: usize = 1024;

/// A cache that takes part.
#[derive(Debug)]
pub struct Contender<'a> {
    /// Its scheme.
    pub planned: &'a PlannedScheme,
    /// How it holds dense tokens.
    pub dense: DenseType,
}

/// What to measure.
#[derive(Debug)]
pub struct Plan<'a> {
    /// The model; its weights are read in whole steps only.
    pub model: &'a LanguageModel,
    /// The model as it was asked for.
    pub name: String,
    /// The caches.
    pub contenders: Vec<Contender<'a>>,
    /// Cached tokens.
    pub contexts: Vec<usize>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Steps of each contender that are timed, after one that is not.
    pub rounds: usize,
    /// Whether whole decode steps are measured too.
    pub whole_steps: bool,
    /// Seed of keys, values and queries.
    pub seed: u64,
}

/// Milliseconds of a step over all rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Half of the steps took no longer.
    pub median: f64,
    /// A quarter did not.
    pub lower: f64,
    /// Three quarters did not.
    pub upper: f64,
}

/// One contender at one context on one number of threads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// The scheme as asked.
    pub scheme: String,
    /// How dense tokens are held.
    pub cache_dtype: String,
    /// Cached tokens.
    pub context: usize,
    /// Threads.
    pub threads: usize,
    /// Bytes that the cache's pages hold; a step reads nearly all of them once.
    pub cache_bytes: u64,
    /// Attention of all layers for one token, milliseconds.
    pub attention_ms: Spread,
    /// Cache bytes over the median, in 10⁹ bytes per second.
    pub attention_gb_per_s: f64,
    /// A whole decode step, milliseconds; `None` where it was not measured.
    pub step_ms: Option<Spread>,
    /// Cache and weight bytes over the median, in 10⁹ bytes per second.
    pub step_gb_per_s: Option<f64>,
}

/// What reading memory alone reaches.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Threads.
    pub threads: usize,
    /// The best of several passes over more memory than caches hold, in 10⁹ bytes per second.
    pub gb_per_s: f64,
}

/// A whole benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// Program and version.
    pub program: String,
    /// The model as asked.
    pub model: String,
    /// Layers, heads and their width.
    pub shape: HeadShape,
    /// Timed steps of each reading.
    pub rounds: usize,
    /// Seed.
    pub seed: u64,
    /// Instruction set that vector loops were dispatched to.
    pub instructions: String,
    /// Bytes of weights that a step reads.
    pub weight_bytes: u64,
    /// Memory read bandwidth of this machine in the same run.
    pub bandwidth: Vec<Bandwidth>,
    /// All measurements: contexts in order, then threads, then contenders.
    pub readings: Vec<Reading>,
}

impl Plan<'_> {
    /// Bytes of all caches of the longest context.
    pub fn cache_bytes(&self) -> u64 {
        let shape = head_shape(self.model.config());
        let longest = self.contexts.iter().copied().max().unwrap_or(0);
        let of = |c: &Contender| {
            let Contender { planned, .. } = c;
            let budget = headq::budget::Budget::calibrated_at(&planned.scheme, planned.keys.as_ref(), &shape, longest);
            let wide = if c.planned.scheme.is_dense() && c.dense == DenseType::F32 { 2.0 } else { 1.0 };
            budget.bytes_per_token * longest as f64 * wide
        };
        self.contenders.iter().map(of).sum::<f64>() as u64
    }

    /// Holds what all caches of the longest context take, beside `weights` bytes, against the memory that is free.
    ///
    /// # Errors
    /// If it is more.
    pub fn check_memory(&self, weights: u64) -> Result<(), LabError> {
        let needed = self.cache_bytes().saturating_add(weights);
        match memory::available().filter(|free| *free < needed) {
            None => Ok(()),
            Some(free) => {
                let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
                Err(LabError::Usage(format!(
                    "the caches of --contexts {} need about {:.2} GiB, and {:.2} GiB are available; give shorter contexts or fewer schemes",
                    self.contexts.iter().max().unwrap_or(&0),
                    gib(needed),
                    gib(free)
                )))
            }
        }
    }

    /// Measures everything.
    ///
    /// # Errors
    /// If a scheme does not fit, the model is not on the host, or the run is interrupted.
    pub fn run(&self, observer: &dyn Observer) -> Result<BenchReport, LabError> {
        let pools = self
            .threads
            .iter()
            .map(|&n| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build();
                pool.map_err(|e| LabError::Usage(format!("cannot start {n} threads: {e}")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let shape = head_shape(self.model.config());
        let decoder = Decoder::new(self.model)?;
        let weight_bytes = decoder.bytes_per_step() as u64;
        let rounds = (self.rounds + 1) * self.contexts.len() * self.threads.len();
        observer.begin_units("decode steps of all caches in turn", rounds, "rounds");
        let mut bandwidth = Vec::new();
        for (&threads, pool) in self.threads.iter().zip(&pools) {
            bandwidth.push(Bandwidth { threads, gb_per_s: pool.install(read_bandwidth) });
        }
        let mut readings = Vec::new();
        for &context in &self.contexts {
            let mut caches =
                self.contenders.iter().map(|c| self.filled(c, shape, context)).collect::<Result<Vec<_>, _>>()?;
            for (&threads, pool) in self.threads.iter().zip(&pools) {
                let times = pool.install(|| self.time(&mut caches, shape, decoder.clone(), observer))?;
                for ((contender, cache), times) in self.contenders.iter().zip(&caches).zip(times) {
                    let cache_bytes = cache.bytes() as u64;
                    let attention_ms = Spread::of(times.attention);
                    let step_ms = (!times.step.is_empty()).then(|| Spread::of(times.step));
                    let speed = |bytes: u64, ms: f64| bytes as f64 / ms / 1e6;
                    readings.push(Reading {
                        scheme: contender.planned.asked.clone(),
                        cache_dtype: contender.dense.to_string(),
                        context,
                        threads,
                        cache_bytes,
                        attention_ms,
                        attention_gb_per_s: speed(cache_bytes, attention_ms.median),
                        step_ms,
                        step_gb_per_s: step_ms.map(|ms| speed(cache_bytes + weight_bytes, ms.median)),
                    });
                }
            }
        }
        observer.end();
        Ok(BenchReport {
            program: PROGRAM.into(),
            model: self.name.clone(),
            shape,
            rounds: self.rounds,
            seed: self.seed,
            instructions: headq::kernels::instructions().into(),
            weight_bytes,
            bandwidth,
            readings,
        })
    }

    /// A cache of `context` random tokens.
    fn filled(&self, contender: &Contender, shape: HeadShape, context: usize) -> Result<PackedCache, LabError> {
        let device = Device::flex();
        let layers = contender.planned.modules(shape.layers, &device);
        let mut cache = PackedCache::new(layers, shape, contender.dense)?;
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let size = shape.kv_heads * CHUNK * shape.head_dim;
        let mut noise = || -> Vec<f32> { (0..size).map(|_| rng.sample(StandardNormal)).collect() };
        let tensor = |x: Vec<f32>| {
            Tensor::<4>::from_data(TensorData::new(x, [1, shape.kv_heads, CHUNK, shape.head_dim]), &device)
        };
        let (keys, values) = (tensor(noise()), tensor(noise()));
        for layer in 0..shape.layers {
            for start in (0..context).step_by(CHUNK) {
                let part = |x: &Tensor<4>| x.clone().narrow(2, 0, CHUNK.min(context - start));
                cache.extend(layer, part(&keys), part(&values));
            }
        }
        Ok(cache)
    }

    /// Steps of every cache in turn.
    fn time(
        &self,
        caches: &mut [PackedCache],
        shape: HeadShape,
        mut decoder: Decoder,
        observer: &dyn Observer,
    ) -> Result<Vec<Times>, LabError> {
        let config = self.model.config();
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed ^ 1);
        let mut noise =
            |heads: usize| -> Vec<f32> { (0..heads * shape.head_dim).map(|_| rng.sample(StandardNormal)).collect() };
        let (q, k, v) = (noise(shape.heads), noise(shape.kv_heads), noise(shape.kv_heads));
        let mut out = vec![0.0; q.len()];
        let mut times: Vec<Times> = caches.iter().map(|_| Times::default()).collect();
        for round in 0..=self.rounds {
            if observer.cancelled() {
                return Err(LabError::Interrupted);
            }
            for (cache, times) in caches.iter_mut().zip(&mut times) {
                let start = cache.len();
                let begin = Instant::now();
                for layer in 0..shape.layers {
                    let (scale, window) = (config.scales[layer], config.windows[layer]);
                    cache.attend_one(&AttentionSite { layer, start, scale, window }, &q, &k, &v, &mut out);
                }
                let attention = begin.elapsed().as_secs_f64() * 1e3;
                // The first round of each fills pages, buffers and clocks.
                if round > 0 {
                    times.attention.push(attention);
                }
                let fits = config.position_limit().is_none_or(|limit| cache.len() < limit);
                if self.whole_steps && fits {
                    let begin = Instant::now();
                    decoder.step(0, cache.len(), cache)?;
                    if round > 0 {
                        times.step.push(begin.elapsed().as_secs_f64() * 1e3);
                    }
                }
            }
            observer.step();
        }
        Ok(times)
    }
}

/// Milliseconds of each step.
#[derive(Debug, Default)]
struct Times {
    attention: Vec<f64>,
    step: Vec<f64>,
}

impl Spread {
    /// Of at least one time.
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        Self { median: at(0.5), lower: at(0.25), upper: at(0.75) }
    }
}
