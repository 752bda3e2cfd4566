//! Queries and keys of some layers, from one dense pass over all windows.

use burn::tensor::{Device, Tensor, TensorData};
use headq::{Attention, AttentionSite, QuantizedCache, Scheme};
use headq_models::{LanguageModel, ModelConfig};

use super::{CAPTURE_BYTES, Request};
use crate::workers::{Cores, map_in_order};
use crate::{LabError, Observer};

/// Post-RoPE queries and keys of one layer and window, on the host.
#[derive(Debug, Clone)]
pub struct Captured {
    /// `[1, heads, tokens, head_dim]`
    q: TensorData,
    /// `[1, kv_heads, tokens, head_dim]`
    k: TensorData,
}

impl Captured {
    /// Queries and keys as tensors.
    pub fn tensors(&self, device: &Device) -> (Tensor<4>, Tensor<4>) {
        (Tensor::from_data(self.q.clone(), device), Tensor::from_data(self.k.clone(), device))
    }
}

/// Layers whose queries and keys fit into [`CAPTURE_BYTES`], at least one for each core.
pub fn layers_at_once(config: &ModelConfig, windows: usize, context: usize, threads: usize) -> usize {
    let layer = 4 * (windows * context * (config.query_width() + config.kv_width())) as u64;
    ((CAPTURE_BYTES / layer.max(1)) as usize).clamp(threads.max(1), config.num_layers.max(threads))
}

/// Dense attention that keeps what it is given for some layers.
struct Capture<'a> {
    dense: QuantizedCache,
    layers: &'a [usize],
    kept: Vec<Captured>,
}

impl Attention for Capture<'_> {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        if self.layers.contains(&site.layer) {
            self.kept.push(Captured { q: q.clone().into_data(), k: k.clone().into_data() });
        }
        self.dense.attend(site, q, k, v)
    }
}

/// By layer of `layers`, then by window.
pub fn capture(request: &Request, layers: &[usize], observer: &dyn Observer) -> Result<Vec<Vec<Captured>>, LabError> {
    let windows = request.windows();
    let mut all: Vec<Vec<Captured>> = layers.iter().map(|_| Vec::with_capacity(windows.len())).collect();
    let what = format!("queries and keys of {} layers", layers.len());
    map_in_order(
        &what,
        windows.len(),
        Cores::on(&request.model.device(), request.threads),
        observer,
        || request.model.clone(),
        |model, i| {
            let kept = pass(model, windows[i], layers)?;
            let finite = |x: &TensorData| x.as_slice::<f32>().is_ok_and(|x| x.iter().all(|v| v.is_finite()));
            match kept.iter().all(|c| finite(&c.q) && finite(&c.k)) {
                true => Ok(kept),
                false => Err(LabError::NotFinite { scheme: "dense".into(), window: i }),
            }
        },
        |_, kept| all.iter_mut().zip(kept).for_each(|(layer, window)| layer.push(window)),
    )?;
    Ok(all)
}

fn pass(model: &LanguageModel, window: &[u32], layers: &[usize]) -> Result<Vec<Captured>, LabError> {
    let dense = QuantizedCache::teacher_forced(Scheme::DENSE, None, model.config().num_layers, &model.device());
    let mut capture = Capture { dense, layers, kept: Vec::with_capacity(layers.len()) };
    let _ = model.hidden(model.ids(window, 1, 0)?, 0, &mut capture);
    Ok(capture.kept)
}
