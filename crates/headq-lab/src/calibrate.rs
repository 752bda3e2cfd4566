//! Calibration: one dense pass over text, from which bases of any family and rank are derived.

use burn::tensor::Tensor;
use headq::quant::base_read_back;
use headq::scheme::BaseScheme;
use headq::stats::LayerStats;
use headq::{Attention, AttentionSite, QuantizedCache, Scheme};
use headq_models::{Fingerprint, LanguageModel};

use crate::artifact::{Header, SCHEMA, StatsArtifact};
use crate::text::Windows;
use crate::workers::map_in_order;
use crate::{LabError, Observer, PROGRAM};

/// Dense attention that accumulates the moments of q, k, v and of the base quantizer's residual.
struct Capture {
    dense: QuantizedCache,
    base: BaseScheme,
    layers: Vec<LayerStats>,
}

impl Capture {
    fn new(model: &LanguageModel, base: BaseScheme) -> Self {
        let c = model.config();
        Self {
            dense: QuantizedCache::teacher_forced(Scheme::DENSE, None, c.num_layers, &model.device()),
            base,
            layers: vec![LayerStats::new(c.num_heads, c.num_kv_heads, c.head_dim); c.num_layers],
        }
    }

    /// e = k − B_b(k) over the whole groups after the sinks.
    fn residual(&self, k: &Tensor<4>) -> Vec<f32> {
        let flush = self.base.flush;
        let groups = k.dims()[2].saturating_sub(flush.sinks) / flush.group;
        if groups == 0 {
            return Vec::new();
        }
        let k = k.clone().narrow(2, flush.sinks, groups * flush.group);
        host(k.clone() - base_read_back(&self.base, k))
    }
}

fn host(x: Tensor<4>) -> Vec<f32> {
    x.into_data_as::<f32>().try_to_vec().expect("the data was converted to f32")
}

impl Attention for Capture {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let residual = self.residual(&k);
        self.layers[site.layer].add(&host(q.clone()), &host(k.clone()), &residual, &host(v.clone()));
        self.dense.attend(site, q, k, v)
    }
}

/// Fails where windows of `context` tokens give no residuals of a base quantizer, or its channel groups do not fit the heads.
///
/// # Errors
/// [`LabError::Usage`] saying what would do.
pub fn check_base(base: &BaseScheme, context: usize, head_dim: usize) -> Result<(), LabError> {
    let least = base.flush.sinks + base.flush.group;
    if context < least {
        let reason =
            format!("windows of {context} tokens hold no whole group of {base}; give a context of at least {least}");
        return Err(LabError::Usage(reason));
    }
    match base.channels {
        Some(c) if !head_dim.is_multiple_of(c) => {
            Err(LabError::Usage(format!("{base}: c={c} does not divide the head width {head_dim}")))
        }
        _ => Ok(()),
    }
}

/// Streams windows through the model and accumulates statistics in f64.
///
/// Each window's sums are made apart and added in window order, so that the result does not depend on `threads`.
///
/// # Errors
/// If windows are shorter than one group of the base quantizer, a pass gives numbers that are not finite, or on interruption.
pub fn calibrate(
    model: &LanguageModel,
    fingerprint: &Fingerprint,
    texts: &[Windows],
    add_bos: bool,
    base: BaseScheme,
    threads: usize,
    observer: &dyn Observer,
) -> Result<StatsArtifact, LabError> {
    let windows: Vec<&[u32]> = texts.iter().flat_map(|t| t.windows.iter().map(Vec::as_slice)).collect();
    let context = windows.first().map_or(0, |w| w.len());
    check_base(&base, context, model.config().head_dim)?;
    let mut total: Option<Vec<LayerStats>> = None;
    map_in_order(
        &format!("calibrating {base}"),
        windows.len(),
        threads,
        observer,
        || model.clone(),
        |model, i| {
            let mut capture = Capture::new(model, base);
            let ids = model.ids(windows[i], 1, 0)?;
            // The last layer's attention has been captured when the pass ends; its hidden states are not needed.
            let _ = model.hidden(ids, 0, &mut capture);
            match capture.layers.iter().all(LayerStats::is_finite) {
                true => Ok(capture.layers),
                false => Err(LabError::NotFinite { scheme: format!("calibrating {base}"), window: i }),
            }
        },
        |_, layers| match &mut total {
            None => total = Some(layers),
            Some(total) => total.iter_mut().zip(&layers).for_each(|(t, l)| t.merge(l)),
        },
    )?;
    let layers = total.ok_or_else(|| LabError::Usage("no windows to calibrate on".into()))?;
    let header = Header {
        schema: SCHEMA,
        kind: "statistics".into(),
        program: PROGRAM.into(),
        model: fingerprint.clone(),
        texts: texts.iter().map(|t| t.text.clone()).collect(),
        tokens: windows.len() * context,
        context,
        add_bos,
        rope: if model.config().rope.is_some() { "post-rope rotate-half" } else { "none" }.into(),
        base: base.to_string(),
        basis: None,
    };
    Ok(StatsArtifact { header, layers })
}
