//! Search for the bits of every layer and head under a budget: by what statistics say that errors cost, then by measured KL.
//!
//! One pool of bits serves the keys, or keys and values, of the whole model ([`headq::transform::shared_bits`]): the Lagrangian
//! allocation. What statistics say is good to second order and on average, so that some of it is measured on windows of text and
//! corrected, each time keeping what has the smaller KL of next-token distributions to the dense model:
//!
//! 1. what errors of values cost beside those of keys, by factors of two;
//! 2. what errors of each layer cost beside those of others, by the KL with that layer alone in codes;
//! 3. values coded token by token instead (`token-B`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::Tensor;
use headq::learn::logits_kl;
use headq::scheme::{
    BaseScheme, Bits, Flush, HeadBudgets, KeyScheme, Meta, Metric, Policy, Pool, Quantizer, RangeSource, Rounding,
    ValueScheme,
};
use headq::transform::{Member, shared_bits};
use headq::{Attention, HeadqAttention, KeyStatistics, QuantizedCache, Scheme};
use headq_models::{Fingerprint, LanguageModel};
use serde::{Deserialize, Serialize};

use crate::artifact::write_atomic;
use crate::scheme_file::SchemeFile;
use crate::text::Windows;
use crate::workers::{Cores, map_in_order};
use crate::{LabError, Observer};

/// Rows whose logits exist at a time.
const ROWS: usize = 128;
/// Smallest and largest factor on what errors of a layer cost.
const MOST_FACTOR: f64 = 4.0;

/// What is coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Coded {
    /// Keys alone.
    Keys,
    /// Keys and values, sharing the bits.
    KeysAndValues,
}

/// What a search is asked for.
#[derive(Debug)]
pub struct Request<'a> {
    /// Model.
    pub model: &'a LanguageModel,
    /// Its identity.
    pub fingerprint: &'a Fingerprint,
    /// Statistics with gradients.
    pub keys: &'a KeyStatistics,
    /// Text that candidates are measured on, cut into windows of one length.
    pub texts: &'a [Windows],
    /// Whether windows begin with the beginning-of-sequence token.
    pub add_bos: bool,
    /// Mean code bits per coded element, scales and zeros counted.
    pub bits: f64,
    /// What is coded.
    pub coded: Coded,
    /// When tokens are coded.
    pub flush: Flush,
    /// Cores to use.
    pub threads: usize,
    /// Identity of the statistics and of everything else that decides numbers, for taking up measurements.
    pub identity: String,
}

/// A candidate and its KL.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What was tried.
    pub what: String,
    /// The scheme; its bits by head stand in the file of the best one only.
    pub scheme: String,
    /// Mean KL of next-token distributions to the dense model, nats per token.
    pub kl: f64,
    /// Whether it was the best so far.
    pub kept: bool,
}

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// The scheme, with the bits of every head.
    pub file: SchemeFile,
    /// Everything that was measured, in order.
    pub steps: Vec<Step>,
}

/// Measurements that were made before, kept in a file beside the result while the search runs.
struct Kept {
    path: PathBuf,
    all: KeptFile,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct KeptFile {
    identity: String,
    kl: BTreeMap<String, f64>,
}

impl Kept {
    /// What is kept there, if it belongs to this search; fails where it is no search's, which would be overwritten.
    fn open(path: &Path, identity: &str) -> Result<Self, LabError> {
        let read = match std::fs::read(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            other => Some(other.map_err(LabError::io(path))?),
        };
        let parse = |bytes: Vec<u8>| {
            serde_json::from_slice::<KeptFile>(&bytes).map_err(|_| LabError::Artifact {
                path: path.to_owned(),
                reason: "is not what a search left behind; move it away, or name another --out".into(),
            })
        };
        let all = read.map(parse).transpose()?.filter(|kept| kept.identity == identity);
        let all = all.unwrap_or(KeptFile { identity: identity.into(), ..KeptFile::default() });
        Ok(Self { path: path.to_owned(), all })
    }

    fn get(&mut self, name: &str, measure: impl FnOnce() -> Result<f64, LabError>) -> Result<f64, LabError> {
        if let Some(kl) = self.all.kl.get(name) {
            return Ok(*kl);
        }
        let kl = measure()?;
        self.put(name, kl)?;
        Ok(kl)
    }

    fn put(&mut self, name: &str, kl: f64) -> Result<(), LabError> {
        self.all.kl.insert(name.into(), kl);
        let json = serde_json::to_vec(&self.all);
        let json = json.map_err(|e| LabError::Artifact { path: self.path.clone(), reason: e.to_string() })?;
        write_atomic(&self.path, &json)
    }
}

/// Factors on what errors cost: of each key head, and of each value head.
#[derive(Debug, Clone)]
struct Factors([Vec<f64>; 2]);

impl Request<'_> {
    fn base(&self) -> BaseScheme {
        BaseScheme {
            quantizer: Quantizer::Klt,
            bits: Bits::whole(1),
            flush: self.flush,
            channels: None,
            range: 1.0,
            ranges: RangeSource::Lloyd,
            metric: Metric::Fisher,
            pool: Pool::Model,
            rounding: Rounding::Nearest,
            center: true,
            meta: Meta::F16,
        }
    }

    fn value(&self, policy: Policy, bits: Bits, pool: Pool) -> ValueScheme {
        let ranges = if policy == Policy::Klt { RangeSource::Lloyd } else { RangeSource::Group };
        let (group, residual, sinks) = (None, None, None);
        ValueScheme {
            policy,
            bits,
            channels: None,
            ranges,
            metric: Metric::Fisher,
            pool,
            group,
            residual,
            sinks,
            range: 1.0,
            meta: Meta::F16,
        }
    }

    fn layers(&self) -> usize {
        self.model.config().num_layers
    }

    fn windows(&self) -> Vec<&[u32]> {
        self.texts.iter().flat_map(|t| t.windows.iter().map(Vec::as_slice)).collect()
    }

    /// The allocation under some factors: its scheme, and what it costs by layer by the statistics.
    fn allocated(&self, factors: &Factors, bits: f64) -> (Scheme, Vec<f64>) {
        let base = self.base();
        let values = self.keys.values.as_ref().filter(|_| self.coded == Coded::KeysAndValues);
        let member = |statistics, factors| Member { base: &base, statistics, factors };
        let mut members = vec![member(self.keys, &factors.0[0][..])];
        members.extend(values.map(|values| member(values.as_ref(), &factors.0[1][..])));
        let shared = shared_bits(&members, bits);
        // Up to the next thousandth, so that each head can be given what it has here.
        let plan = |of: &[(f64, f64)]| {
            let bits = of.iter().map(|(bits, _)| Bits::nearest((bits * 1000.0 - 1e-6).ceil() / 1000.0)).collect();
            let budgets = HeadBudgets::interned(bits);
            (budgets.mean(), Pool::Plan(budgets))
        };
        let (mean, pool) = plan(&shared[0]);
        let key = KeyScheme { base: BaseScheme { bits: mean, pool, ..base }, side: None };
        let value = shared.get(1).map(|of| plan(of)).map(|(mean, pool)| self.value(Policy::Klt, mean, pool));
        let heads = self.keys.kv_heads;
        let cost = |layer: usize| {
            let own = layer * heads..(layer + 1) * heads;
            shared.iter().flat_map(|of| of[own.clone()].iter().map(|(_, lost)| lost)).sum()
        };
        (Scheme { key: Some(key), value }, (0..self.layers()).map(cost).collect())
    }

    /// KL of one window under some codecs.
    fn window_kl(
        &self,
        model: &LanguageModel,
        window: &[u32],
        expected: &Tensor<3>,
        modules: Vec<HeadqAttention>,
    ) -> Result<f64, LabError> {
        let mut cache = QuantizedCache::of(modules);
        let read = model.hidden(model.ids(window, 1, 0)?, 0, &mut cache as &mut dyn Attention);
        let [_, tokens, _] = expected.dims();
        let vocab = model.config().vocab_size;
        let mut total = 0.0;
        for start in (0..tokens).step_by(ROWS) {
            let rows = ROWS.min(tokens - start);
            let logits = |x: &Tensor<3>| model.logits(x.clone().narrow(1, start, rows)).reshape([rows, vocab]);
            let kl = logits_kl(logits(expected), logits(&read)).sum();
            total += kl.into_data_as::<f64>().try_to_vec::<f64>().expect("converted to f64")[0];
        }
        Ok(total / tokens as f64)
    }

    fn modules(&self, scheme: Scheme) -> Vec<HeadqAttention> {
        let device = self.model.device();
        (0..self.layers())
            .map(|layer| HeadqAttention::calibrated(scheme, None, Some(self.keys), layer, &device))
            .collect()
    }

    /// Last hidden states of the dense model, by window.
    fn dense(&self, observer: &dyn Observer) -> Result<Vec<Tensor<3>>, LabError> {
        let windows = self.windows();
        let mut all = Vec::new();
        map_in_order(
            "dense",
            windows.len(),
            Cores::on(&self.model.device(), self.threads),
            observer,
            || self.model.clone(),
            |model, i| {
                let mut dense =
                    QuantizedCache::teacher_forced(Scheme::DENSE, None, self.layers(), &self.model.device());
                Ok(model.hidden(model.ids(windows[i], 1, 0)?, 0, &mut dense))
            },
            |_, hidden| all.push(hidden),
        )?;
        Ok(all)
    }

    /// Mean KL over all windows, with each of `jobs` as the codecs; `done` is told of each job as it is finished.
    fn kl(
        &self,
        what: &str,
        dense: &[Tensor<3>],
        jobs: &[Vec<HeadqAttention>],
        observer: &dyn Observer,
        mut done: impl FnMut(usize, f64),
    ) -> Result<(), LabError> {
        let windows = self.windows();
        let mut total = 0.0;
        map_in_order(
            what,
            jobs.len() * windows.len(),
            Cores::on(&self.model.device(), self.threads),
            observer,
            || self.model.clone(),
            |model, i| {
                let window = i % windows.len();
                let modules = jobs[i / windows.len()].clone();
                let kl = self.window_kl(model, windows[window], &dense[window], modules)?;
                match kl.is_finite() {
                    true => Ok(kl),
                    false => Err(LabError::NotFinite { scheme: what.into(), window }),
                }
            },
            |i, kl| {
                total += kl / windows.len() as f64;
                if (i + 1).is_multiple_of(windows.len()) {
                    done(i / windows.len(), std::mem::take(&mut total));
                }
            },
        )
    }

    /// Whether the statistics hold what schemes of this search need.
    ///
    /// # Errors
    /// [`headq::Error::Keys`] saying what they lack.
    pub fn check(&self) -> Result<(), headq::Error> {
        let key = KeyScheme { base: self.base(), side: None };
        let value = (self.coded == Coded::KeysAndValues).then(|| self.value(Policy::Klt, Bits::whole(1), Pool::Model));
        self.keys.check(&Scheme { key: Some(key), value })
    }

    /// Searches; measurements are kept in `kept` until the end, and taken up from there.
    ///
    /// # Errors
    /// Where the statistics lack gradients, the budget fits nothing, a pass gives numbers that are not finite, or on interruption.
    pub fn run(&self, kept: &Path, observer: &dyn Observer) -> Result<Found, LabError> {
        let heads = self.keys.moments.len();
        let mut factors = Factors([vec![1.0; heads], vec![1.0; heads]]);
        self.check()?;
        let (mut scheme, _) = self.allocated(&factors, self.bits);
        let dense = self.dense(observer)?;
        let mut kept = Kept::open(kept, &self.identity)?;
        let mut steps: Vec<Step> = Vec::new();
        let mut measure = |what: String, scheme: Scheme, best: f64, kept: &mut Kept| -> Result<f64, LabError> {
            let kl = kept.get(&scheme.to_string(), || {
                let mut found = f64::NAN;
                self.kl(&what, &dense, &[self.modules(scheme)], observer, |_, kl| found = kl)?;
                Ok(found)
            })?;
            steps.push(Step { what, scheme: scheme.to_string(), kl, kept: kl < best });
            Ok(kl)
        };
        let mut best = measure("by the statistics".into(), scheme, f64::INFINITY, &mut kept)?;
        // What errors of values cost beside those of keys.
        if self.coded == Coded::KeysAndValues {
            'directions: for by in [2.0, 0.5] {
                let mut improved = false;
                loop {
                    let mut tried = factors.clone();
                    tried.0[1].iter_mut().for_each(|f| *f *= by);
                    let total = tried.0[1][0];
                    let (candidate, _) = self.allocated(&tried, self.bits);
                    let kl = measure(format!("errors of values times {total}"), candidate, best, &mut kept)?;
                    if kl >= best || !(1.0 / 16.0..=16.0).contains(&total) {
                        break;
                    }
                    (best, scheme, factors, improved) = (kl, candidate, tried, true);
                }
                if improved {
                    break 'directions;
                }
            }
        }
        // What errors of each layer cost beside those of others.
        let (_, predicted) = self.allocated(&factors, self.bits);
        let alone = self.by_layer(scheme, &dense, &mut kept, observer)?;
        let ratios: Vec<f64> = alone.iter().zip(&predicted).map(|(kl, cost)| kl.max(1e-12) / cost.max(1e-30)).collect();
        let typical = (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64).exp();
        for power in [0.5, 1.0] {
            let mut tried = factors.clone();
            for (i, ratio) in ratios.iter().enumerate() {
                let factor = (ratio / typical).powf(power).clamp(1.0 / MOST_FACTOR, MOST_FACTOR);
                let own = i * self.keys.kv_heads..(i + 1) * self.keys.kv_heads;
                tried.0.iter_mut().for_each(|of| of[own.clone()].iter_mut().for_each(|f| *f *= factor));
            }
            let (candidate, _) = self.allocated(&tried, self.bits);
            let what = format!("layers by their KL alone, to the power of {power}");
            let kl = measure(what, candidate, best, &mut kept)?;
            if kl < best {
                (best, scheme) = (kl, candidate);
            }
        }
        if self.coded == Coded::KeysAndValues {
            for (bits, keys) in self.token_values() {
                let request = Request { coded: Coded::Keys, texts: self.texts, identity: String::new(), ..*self };
                let (mut candidate, _) = request.allocated(&factors, keys);
                candidate.value = Some(self.value(Policy::Token, Bits::whole(bits), Pool::Head));
                let kl = measure(format!("values in token-{bits}"), candidate, best, &mut kept)?;
                if kl < best {
                    (best, scheme) = (kl, candidate);
                }
            }
        }
        let _ = std::fs::remove_file(&kept.path);
        let search = serde_json::json!({ "bits": self.bits, "coded": self.coded, "kl": best, "steps": steps });
        Ok(Found { file: SchemeFile::new(&scheme, self.fingerprint, self.texts, self.add_bos, search), steps })
    }

    /// Bits of `token` values that leave keys a sensible share, with that share.
    fn token_values(&self) -> Vec<(u32, f64)> {
        let d = self.keys.head_dim as f64;
        let keys = |bits: u32| 2.0 * self.bits - (f64::from(bits) + 32.0 / d);
        (1..=8).map(|bits| (bits, keys(bits))).filter(|(_, keys)| (0.25..=self.bits + 1.0).contains(keys)).collect()
    }

    /// KL with one layer alone in codes.
    fn by_layer(
        &self,
        scheme: Scheme,
        dense: &[Tensor<3>],
        kept: &mut Kept,
        observer: &dyn Observer,
    ) -> Result<Vec<f64>, LabError> {
        let names: Vec<String> = (0..self.layers()).map(|layer| format!("layer {layer} of {scheme}")).collect();
        let open: Vec<usize> = (0..self.layers()).filter(|&layer| !kept.all.kl.contains_key(&names[layer])).collect();
        if !open.is_empty() {
            let (coded, plain) = (self.modules(scheme), self.modules(Scheme::DENSE));
            let alone = |&layer: &usize| {
                let mut modules = plain.clone();
                modules[layer] = coded[layer].clone();
                modules
            };
            let jobs: Vec<_> = open.iter().map(alone).collect();
            let mut written = Ok(());
            let measured = self.kl("layers alone", dense, &jobs, observer, |job, kl| {
                let own = kept.put(&names[open[job]], kl);
                if written.is_ok() {
                    written = own;
                }
            });
            measured.and(written)?;
        }
        names.iter().map(|name| kept.get(name, || unreachable!("every layer was measured"))).collect()
    }
}
