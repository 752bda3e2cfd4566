//! How losses under a scheme are taken: whole windows through tensors, whole windows through the packed cache, or token by token.
//!
//! All three have the streaming semantics of the cache (E10) and agree on one layer, given the same queries, keys and values, to 1e-5.
//! On a whole model they need not: products of matrices round differently from products with a vector, the difference moves a key across
//! a threshold of its quantizer, and a flipped 2-bit code is a large step that the layers above code anew. That moves a perplexity by
//! tenths of a percent, in either direction.
//!
//! The packed pass ([`Pass::Packed`]) is therefore made of the decoder's own operations in the decoder's own order
//! ([`Decoder::pass`]), with the cache that generation uses: what it measures is to the bit what decoding does. It is the default where
//! the model is in this machine's memory. [`Pass::Tensors`] runs on every device and is written independently of the other two, as the
//! reference that they are held against.

use std::fmt;
use std::str::FromStr;

use headq::{DenseType, Scheme};
use headq_models::{Decoder, LanguageModel, ModelError};
use serde::{Deserialize, Serialize};

use crate::generate::{Cache, Steps};
use crate::{LabError, Observer};

/// Tokens that a layer takes before the next one does: enough to read weights for, few enough to hold what they come to, and to stop
/// soon after an interruption.
pub(crate) const CHUNK: usize = 256;

/// A teacher-forced pass as it is asked for: `packed` or `tensors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PassName {
    /// Through the packed cache, on the host.
    Packed,
    /// Through tensors, on any device.
    Tensors,
}

impl FromStr for PassName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "packed" => Ok(Self::Packed),
            "tensors" => Ok(Self::Tensors),
            _ => Err(format!("unknown pass '{text}': expected packed or tensors")),
        }
    }
}

/// How losses under a scheme are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Teacher-forced through tensors, on any device.
    Tensors,
    /// Teacher-forced through the packed cache, which holds dense keys and values of that type; on the host.
    Packed(DenseType),
    /// Token by token through the packed cache.
    Decode(DenseType),
}

impl Pass {
    /// The teacher-forced pass that was asked for, or else the default of a model on a device of that name: packed where there is a
    /// [`Decoder`] for it, which is in this machine's memory. Keys and values that a cache holds dense are `dense`, or else f32.
    ///
    /// # Errors
    /// [`LabError::Usage`] where there is no decoder and the packed pass is asked for, or a type for its cache.
    pub fn choose(
        asked: Option<PassName>,
        dense: Option<DenseType>,
        model: &LanguageModel,
        device: &str,
    ) -> Result<Self, LabError> {
        let packed = Ok(Self::Packed(dense.unwrap_or(DenseType::F32)));
        match (asked, Decoder::new(model)) {
            (Some(PassName::Packed) | None, Ok(_)) => packed,
            (Some(PassName::Packed), Err(error)) => Err(LabError::Usage(format!(
                "the packed pass does not run on {device} ({error}); take the device flex, or the pass 'tensors'"
            ))),
            _ => match dense {
                None => Ok(Self::Tensors),
                Some(dense) => Err(LabError::Usage(format!(
                    "this pass on {device} goes through tensors and has no cache to hold in {dense}; leave --cache-dtype out, or take \
                     --device flex and --pass packed, or --decode"
                ))),
            },
        }
    }

    /// Its name in reports: `tensors`, `packed` or `decode`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tensors => "tensors",
            Self::Packed(_) => "packed",
            Self::Decode(_) => "decode",
        }
    }

    /// Type of the dense keys and values of the cache, where it has one.
    pub fn cache_type(self) -> Option<DenseType> {
        match self {
            Self::Tensors => None,
            Self::Packed(dense) | Self::Decode(dense) => Some(dense),
        }
    }

    /// Those of some schemes that caches are made under: all or none.
    pub fn cached(self, schemes: &[Scheme]) -> &[Scheme] {
        if self.cache_type().is_some() { schemes } else { &[] }
    }

    /// Whether the dense model's losses may be those of the pass through tensors that its diagnostics are taken on: they are the same but
    /// for rounding, to 1e-7 nats. Where weights are halves they are not, as products of tensors then round activations to halves.
    pub(crate) fn takes_dense_from_tensors(self, model: &LanguageModel) -> bool {
        match self {
            Self::Tensors => true,
            Self::Packed(dense) => dense == DenseType::F32 && !model.has_half_weights(),
            Self::Decode(_) => false,
        }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a worker runs windows with. Clones share weights.
#[derive(Clone)]
pub(crate) enum Runner<'a> {
    Packed(Box<Decoder>),
    Steps(Box<Steps<'a>>),
}

impl<'a> Runner<'a> {
    /// For [`Pass::Packed`] or [`Pass::Decode`].
    pub fn of(pass: Pass, model: &'a LanguageModel) -> Result<Self, LabError> {
        match pass {
            Pass::Packed(_) => Ok(Self::Packed(Box::new(Decoder::new(model)?))),
            _ => Ok(Self::Steps(Box::new(Steps::of(model)))),
        }
    }

    /// Losses of a window's tokens but the first, through an empty cache, in nats.
    pub fn losses(&mut self, window: &[u32], cache: &mut Cache, observer: &dyn Observer) -> Result<Vec<f64>, LabError> {
        let scored = window.len() - 1;
        let mut losses = Vec::with_capacity(scored);
        let chunk = match self {
            Self::Packed(_) => CHUNK,
            Self::Steps(_) => 1,
        };
        for start in (0..scored).step_by(chunk) {
            if observer.cancelled() {
                return Err(LabError::Interrupted);
            }
            match self {
                Self::Packed(decoder) => {
                    let tokens = &window[start..scored.min(start + chunk)];
                    decoder.pass(tokens, start, cache, |t, logits| losses.push(loss(logits, window, start + t + 1)))?;
                }
                Self::Steps(steps) => losses.push(loss(steps.step(window[start], cache)?, window, start + 1)),
            }
        }
        losses.into_iter().collect()
    }
}

/// −log softmax(logits) of the token at a position, in nats.
fn loss(logits: &[f32], window: &[u32], position: usize) -> Result<f64, LabError> {
    let (token, vocab) = (window[position], logits.len());
    let target = logits.get(token as usize).ok_or(ModelError::TokenOutOfRange { token, position, vocab })?;
    Ok(headq::kernels::log_sum_exp(logits) - f64::from(*target))
}
