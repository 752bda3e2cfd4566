//! Losses of a scheme, and how far its next-token distributions are from those of the dense model.

use burn::tensor::{Device, Tensor, TensorData};
use headq::kernels::log_sum_exp;
use headq::{Attention, QuantizedCache, Scheme};
use headq_models::LanguageModel;
use rayon::prelude::*;

use crate::evaluate::{PlannedScheme, Request};
use crate::workers::map_in_order;
use crate::{LabError, Observer};

/// Rows of logits that are made at a time.
const ROWS: usize = 128;

/// What is kept of the dense model, window by window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Logits, so that they are made once.
    Logits,
    /// Hidden states, which take less by the vocabulary over the width, and from which logits are made again for every scheme.
    Hidden,
}

impl Keep {
    /// Logits where they fit into a third of the memory that is free.
    pub fn fitting(free: Option<u64>, logits: u64) -> Self {
        if free.is_none_or(|free| logits > free / 3) { Keep::Hidden } else { Keep::Logits }
    }
}

/// The dense model on all windows.
pub struct Dense {
    /// Mean nll of each window, nats per token.
    pub window_nll: Vec<f64>,
    keep: Keep,
    /// By window, rows of logits or of hidden states of the scored positions.
    kept: Vec<Vec<f32>>,
}

/// Means over the scored tokens of a window.
struct Window {
    nll: f64,
    kl: f64,
}

fn rows(x: Tensor<3>) -> Vec<f32> {
    x.into_data().convert::<f32>().try_to_vec().expect("the data was converted to f32")
}

/// Logits of rows of hidden states, in the same pieces whatever is kept, so that both give the same bits.
fn logits(model: &LanguageModel, hidden: &[f32], device: &Device) -> Vec<f32> {
    let width = model.config().hidden_size;
    let data = TensorData::new(hidden.to_vec(), [1, hidden.len() / width, width]);
    rows(model.logits(Tensor::from_data(data, device)))
}

/// −log q(target) and Σ p log(p/q) in nats, where p and q are the softmax of `dense` and of `own`.
fn row(dense: &[f32], own: &[f32], target: usize) -> (f64, f64) {
    let greatest = |x: &[f32]| f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let (top, own_top) = (greatest(dense), greatest(own));
    let (mut sum, mut own_sum, mut change) = (0.0, 0.0, 0.0);
    for (&a, &b) in dense.iter().zip(own) {
        let (a, b) = (f64::from(a), f64::from(b));
        let weight = (a - top).exp();
        sum += weight;
        own_sum += (b - own_top).exp();
        change += weight * (b - a);
    }
    let kl = (own_top + own_sum.ln()) - (top + sum.ln()) - change / sum;
    // Below 0 only by rounding; NaN stays what it is.
    let kl = if kl < 0.0 { 0.0 } else { kl };
    (log_sum_exp(own) - f64::from(own[target]), kl)
}

/// Passes over the windows of a request.
pub struct Scorer<'a> {
    pub request: &'a Request<'a>,
    pub observer: &'a dyn Observer,
}

impl Scorer<'_> {
    /// Bytes that keeping the logits of all windows takes, and the hidden states.
    pub fn bytes(&self) -> (u64, u64) {
        let scored: usize = self.request.windows().iter().map(|w| w.len() - 1).sum();
        let config = self.request.model.config();
        let of = |width: usize| 4 * scored as u64 * width as u64;
        (of(config.vocab_size), of(config.hidden_size))
    }

    /// Hidden states of the positions of a window that are scored.
    fn hidden(
        &self,
        model: &LanguageModel,
        window: &[u32],
        attention: &mut dyn Attention,
    ) -> Result<Vec<f32>, LabError> {
        let hidden = model.hidden(model.ids(window, 1, 0)?, 0, attention);
        Ok(rows(hidden.narrow(1, 0, window.len() - 1)))
    }

    /// The dense pass.
    pub fn dense(&self, keep: Keep) -> Result<Dense, LabError> {
        let windows = self.request.windows();
        let config = self.request.model.config();
        let (layers, device) = (config.num_layers, self.request.model.device());
        let mut dense = Dense { window_nll: Vec::new(), keep, kept: Vec::new() };
        map_in_order(
            "dense",
            windows.len(),
            self.request.cores(),
            self.observer,
            || (self.request.model.clone(), QuantizedCache::teacher_forced(Scheme::DENSE, None, layers, &device)),
            |(model, cache), i| {
                let hidden = self.hidden(model, windows[i], cache)?;
                let mut all = Vec::new();
                let mut nll = 0.0;
                for (part, targets) in hidden.chunks(ROWS * config.hidden_size).zip(windows[i][1..].chunks(ROWS)) {
                    let logits = logits(model, part, &device);
                    let losses: Vec<f64> = logits
                        .par_chunks(config.vocab_size)
                        .zip(targets)
                        .map(|(row, &t)| log_sum_exp(row) - f64::from(row[t as usize]))
                        .collect();
                    nll += losses.iter().sum::<f64>();
                    if keep == Keep::Logits {
                        all.extend(logits);
                    }
                }
                let nll = nll / (windows[i].len() - 1) as f64;
                let kept = if keep == Keep::Logits { all } else { hidden };
                match nll.is_finite() {
                    true => Ok((nll, kept)),
                    false => Err(LabError::NotFinite { scheme: "dense".into(), window: i }),
                }
            },
            |_, (nll, kept)| {
                dense.window_nll.push(nll);
                dense.kept.push(kept);
            },
        )?;
        Ok(dense)
    }

    /// Mean nll and divergence of each window.
    pub fn scheme(&self, planned: &PlannedScheme, dense: &Dense) -> Result<(Vec<f64>, Vec<f64>), LabError> {
        let windows = self.request.windows();
        let (layers, device) = (self.request.model.config().num_layers, self.request.model.device());
        let (mut nll, mut kl) = (Vec::new(), Vec::new());
        map_in_order(
            &planned.asked,
            windows.len(),
            self.request.cores(),
            self.observer,
            || (self.request.model.clone(), QuantizedCache::of(planned.modules(layers, &device))),
            |(model, cache), i| {
                let found = self.window(model, windows[i], cache, dense, i, &device)?;
                match found.nll.is_finite() && found.kl.is_finite() {
                    true => Ok(found),
                    false => Err(LabError::NotFinite { scheme: planned.asked.clone(), window: i }),
                }
            },
            |_, found: Window| {
                nll.push(found.nll);
                kl.push(found.kl);
            },
        )?;
        Ok((nll, kl))
    }

    fn window(
        &self,
        model: &LanguageModel,
        window: &[u32],
        attention: &mut dyn Attention,
        dense: &Dense,
        at: usize,
        device: &Device,
    ) -> Result<Window, LabError> {
        let (width, vocabulary) = (model.config().hidden_size, model.config().vocab_size);
        let hidden = self.hidden(model, window, attention)?;
        let kept_width = if dense.keep == Keep::Logits { vocabulary } else { width };
        let (mut nll, mut kl) = (0.0, 0.0);
        let parts = hidden.chunks(ROWS * width).zip(dense.kept[at].chunks(ROWS * kept_width));
        for ((part, kept), targets) in parts.zip(window[1..].chunks(ROWS)) {
            let own = logits(model, part, device);
            let made = (dense.keep == Keep::Hidden).then(|| logits(model, kept, device));
            let reference = made.as_deref().unwrap_or(kept);
            let found: Vec<(f64, f64)> = own
                .par_chunks(vocabulary)
                .zip(reference.par_chunks(vocabulary))
                .zip(targets)
                .map(|((own, dense), &t)| row(dense, own, t as usize))
                .collect();
            // In order, so that sums do not depend on the number of threads.
            for (loss, divergence) in found {
                nll += loss;
                kl += divergence;
            }
        }
        let scored = (window.len() - 1) as f64;
        Ok(Window { nll: nll / scored, kl: kl / scored })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headq::basis::split_mix;

    #[test]
    fn divergences_are_those_of_the_distributions_written_out() {
        for trial in 0..50u64 {
            let draw = |i: u64| (split_mix(trial * 1000 + i) >> 40) as f32 / (1 << 22) as f32;
            let dense: Vec<f32> = (0..50).map(|i| draw(i) * 4.0 - 30.0).collect();
            // From far apart to hardly at all.
            let size = 10f32.powi(-(trial as i32 % 5));
            let own: Vec<f32> = dense.iter().zip(50..).map(|(x, i)| x + size * draw(i) + 5.0).collect();
            let softmax = |x: &[f32]| {
                let powers: Vec<f64> = x.iter().map(|v| (f64::from(*v) + 20.0).exp()).collect();
                let sum: f64 = powers.iter().sum();
                powers.into_iter().map(|p| p / sum).collect::<Vec<f64>>()
            };
            let (p, q) = (softmax(&dense), softmax(&own));
            let expected: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
            let (nll, kl) = row(&dense, &own, 7);
            assert!((kl - expected).abs() < 1e-12 + 1e-9 * expected, "{kl} {expected}");
            assert!((nll + q[7].ln()).abs() < 1e-5, "{nll}");
            assert_eq!(row(&dense, &dense, 7).1, 0.0);
        }
    }

    #[test]
    fn logits_are_kept_where_they_fit() {
        assert_eq!(Keep::fitting(Some(300), 100), Keep::Logits);
        assert_eq!(Keep::fitting(Some(299), 100), Keep::Hidden);
        assert_eq!(Keep::fitting(None, 100), Keep::Hidden);
    }
}
