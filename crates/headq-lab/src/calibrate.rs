//! Calibration: one dense pass over text, from which bases of any family and rank are derived, and for transforms in nats one pass back.

use burn::tensor::Tensor;
use half::f16;
use headq::quant::BaseQuantizer;
use headq::scheme::{BaseScheme, KeyScheme};
use headq::stats::{LayerStats, SAMPLE_RUN, Sample};
use headq::{Attention, AttentionSite, KeyStatistics, QuantizedCache, Scheme};
use headq_models::{Fingerprint, LanguageModel};
use nalgebra::DMatrix;

use crate::artifact::{Header, SCHEMA, StatsArtifact};
use crate::overlap::Passages;
use crate::text::Windows;
use crate::workers::{Cores, map_in_order};
use crate::{LabError, Observer, PROGRAM};

/// Dense attention that accumulates the moments of q, k, v and, where there are quantizers, of their residuals.
struct Capture {
    dense: QuantizedCache,
    /// By layer; empty where no residuals are wanted.
    quantizers: Vec<BaseQuantizer>,
    layers: Vec<LayerStats>,
    keep: Keep,
}

/// What is kept of a window beside sums over all of it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Keep {
    /// First tokens, which are never coded: keys and values leave them out.
    sinks: usize,
    /// Runs of consecutive tokens that are kept as they are.
    runs: usize,
}

impl Keep {
    /// Sums alone, of tokens after the sinks.
    pub fn after(sinks: usize) -> Self {
        Self { sinks, runs: 0 }
    }
}

/// Tokens of each head that a sample holds, where the texts have as many.
const SAMPLE_TOKENS: usize = 1024;

/// Where the runs of a sample begin in a window: spread evenly.
fn runs(keep: Keep, tokens: usize) -> impl Iterator<Item = usize> {
    let room = tokens.saturating_sub(keep.sinks);
    let runs = keep.runs.min(room / SAMPLE_RUN);
    (0..runs).map(move |i| keep.sinks + room * i / runs)
}

impl Capture {
    fn new(model: &LanguageModel, quantizers: &[BaseQuantizer], keep: Keep) -> Self {
        let c = model.config();
        Self {
            dense: QuantizedCache::teacher_forced(Scheme::DENSE, None, c.num_layers, &model.device()),
            quantizers: quantizers.to_vec(),
            layers: vec![LayerStats::new(c.num_heads, c.num_kv_heads, c.head_dim); c.num_layers],
            keep,
        }
    }

    /// Runs of a window's rows, by head.
    fn sample(&self, x: &Tensor<4>) -> Vec<Vec<f16>> {
        let [_, heads, tokens, _] = x.dims();
        let mut by_head = vec![Vec::new(); heads];
        for start in runs(self.keep, tokens) {
            let run = host(x.clone().narrow(2, start, SAMPLE_RUN));
            for (to, rows) in by_head.iter_mut().zip(run.chunks(run.len() / heads)) {
                to.extend(rows.iter().map(|v| f16::from_f32(*v)));
            }
        }
        by_head
    }

    /// e = k − B_b(k) over the whole groups after the sinks.
    fn residual(&self, layer: usize, k: &Tensor<4>) -> Vec<f32> {
        let Some(quantizer) = self.quantizers.get(layer) else { return Vec::new() };
        let flush = quantizer.scheme().flush;
        let groups = k.dims()[2].saturating_sub(flush.sinks) / flush.group;
        if groups == 0 {
            return Vec::new();
        }
        let k = quantizer.shift(k.clone().narrow(2, flush.sinks, groups * flush.group));
        host(k.clone() - quantizer.read_back(k))
    }
}

fn host(x: Tensor<4>) -> Vec<f32> {
    x.into_data_as::<f32>().try_to_vec().expect("the data was converted to f32")
}

impl Attention for Capture {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let residual = self.residual(site.layer, &k);
        if self.keep.runs > 0 {
            let sample = Sample { k: self.sample(&k), v: self.sample(&v) };
            self.layers[site.layer].sample = Some(sample);
        }
        let tokens = k.dims()[2];
        let sinks = self.keep.sinks.min(tokens - 1);
        let coded = |x: &Tensor<4>| host(x.clone().narrow(2, sinks, tokens - sinks));
        self.layers[site.layer].add(&host(q.clone()), &coded(&k), &residual, &coded(&v));
        self.dense.attend(site, q, k, v)
    }
}

/// What reads a layer's values ([`LayerStats::output`]), by KV head.
fn output_moments(model: &LanguageModel, layer: usize) -> Vec<DMatrix<f64>> {
    let (c, projection) = (model.config(), model.output_projection(layer));
    let [_, hidden] = projection.dims();
    let rows: Vec<f32> = projection.into_data_as::<f32>().try_to_vec().expect("the data was converted to f32");
    let group = c.num_heads / c.num_kv_heads;
    let of_kv_head = |heads: &[f32]| {
        let of_head = |rows: &[f32]| {
            // Row-major [head_dim, hidden] is column-major [hidden, head_dim].
            let columns = DMatrix::from_iterator(hidden, c.head_dim, rows.iter().map(|&w| f64::from(w)));
            columns.tr_mul(&columns)
        };
        let sum = heads.chunks(c.head_dim * hidden).map(of_head).reduce(|sum, own| sum + own);
        // As good as symmetric: only the order of the sums differs.
        let mean = sum.expect("a KV head has query heads") / group as f64;
        (&mean + mean.transpose()) * 0.5
    };
    rows.chunks(group * c.head_dim * hidden).map(of_kv_head).collect()
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
/// Each window's sums are made apart and added in window order, so that the result does not depend on `threads`. A static base
/// quantizer takes two passes: its scales come from the first. With a seed for `gradients`, a pass forth and back follows
/// (module `gradients`), which keys and values are read from codes in as `base` says.
///
/// # Errors
/// If windows are shorter than one group of the base quantizer, a pass gives numbers that are not finite, or on interruption.
#[allow(clippy::too_many_arguments)]
pub fn calibrate(
    model: &LanguageModel,
    fingerprint: &Fingerprint,
    texts: &[Windows],
    add_bos: bool,
    base: BaseScheme,
    gradients: Option<u64>,
    threads: usize,
    observer: &dyn Observer,
) -> Result<StatsArtifact, LabError> {
    let windows: Vec<&[u32]> = texts.iter().flat_map(|t| t.windows.iter().map(Vec::as_slice)).collect();
    let context = windows.first().map_or(0, |w| w.len());
    check_base(&base, context, model.config().head_dim)?;
    let sinks = base.flush.sinks;
    let with = |what: &str, quantizers: &[BaseQuantizer], runs: usize| {
        accumulate(what, model, &windows, quantizers, Keep { sinks, runs }, threads, observer)
    };
    let gradients = match gradients {
        None => None,
        Some(seed) => Some(crate::gradients::accumulate(model, &windows, base.flush, seed, threads, observer)?),
    };
    let with_gradients = |mut layers: Vec<LayerStats>| {
        for (layer, found) in layers.iter_mut().zip(gradients.iter().flatten()) {
            layer.gradients = Some(found.clone());
        }
        layers
    };
    // Of long texts the first windows give what there is room for; there is always one run of each.
    let runs = (SAMPLE_TOKENS / SAMPLE_RUN).div_ceil(windows.len().max(1));
    let layers = 0..model.config().num_layers;
    let quantizers: Vec<BaseQuantizer> = match base.is_static() {
        false => layers.map(|_| BaseQuantizer::new(base)).collect(),
        true => {
            let keys = KeyStatistics::of(&with_gradients(with(&format!("keys of {base}"), &[], runs)?))?;
            keys.check(&Scheme { key: Some(KeyScheme { base, side: None }), value: None })?;
            layers.map(|layer| BaseQuantizer::calibrated(base, &keys, layer, &model.device())).collect()
        }
    };
    let mut layers = with_gradients(with(&format!("calibrating {base}"), &quantizers, runs)?);
    for (i, layer) in layers.iter_mut().enumerate() {
        layer.output = Some(output_moments(model, i));
    }
    let header = Header {
        schema: SCHEMA,
        kind: "statistics".into(),
        program: PROGRAM.into(),
        model: fingerprint.clone(),
        texts: texts.iter().map(|t| t.text.clone()).collect(),
        passages: Passages::of_all(texts, add_bos),
        tokens: windows.len() * context,
        context,
        add_bos,
        rope: if model.config().rope.is_some() { "post-rope rotate-half" } else { "none" }.into(),
        base: base.to_string(),
        basis: None,
    };
    Ok(StatsArtifact { header, layers })
}

/// One dense pass over the windows.
pub(crate) fn accumulate(
    what: &str,
    model: &LanguageModel,
    windows: &[&[u32]],
    quantizers: &[BaseQuantizer],
    keep: Keep,
    threads: usize,
    observer: &dyn Observer,
) -> Result<Vec<LayerStats>, LabError> {
    let mut total: Option<Vec<LayerStats>> = None;
    map_in_order(
        what,
        windows.len(),
        Cores::on(&model.device(), threads),
        observer,
        || model.clone(),
        |model, i| {
            // Beyond what a sample has room for, windows are only summed up.
            let runs = if i * keep.runs * SAMPLE_RUN < SAMPLE_TOKENS { keep.runs } else { 0 };
            let mut capture = Capture::new(model, quantizers, Keep { runs, ..keep });
            let ids = model.ids(windows[i], 1, 0)?;
            // The last layer's attention has been captured when the pass ends; its hidden states are not needed.
            let _ = model.hidden(ids, 0, &mut capture);
            match capture.layers.iter().all(LayerStats::is_finite) {
                true => Ok(capture.layers),
                false => Err(LabError::NotFinite { scheme: what.to_string(), window: i }),
            }
        },
        |_, layers| match &mut total {
            None => total = Some(layers),
            Some(total) => total.iter_mut().zip(&layers).for_each(|(t, l)| t.merge(l)),
        },
    )?;
    total.ok_or_else(|| LabError::Usage("no windows to calibrate on".into()))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};
    use headq_models::{LoadOptions, LoadedModel, load};

    use super::*;

    fn tiny(name: &str) -> LoadedModel {
        let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../headq-models/tests/fixtures/tiny");
        load(fixtures.join(name), &Device::flex(), &LoadOptions::default()).unwrap()
    }

    /// Attention of one token that comes to ε in one head and to nothing in the others.
    struct Only {
        head: usize,
        error: Vec<f32>,
    }

    impl Attention for Only {
        fn attend(&mut self, _: &AttentionSite, q: Tensor<4>, _: Tensor<4>, _: Tensor<4>) -> Tensor<4> {
            let [_, heads, _, d] = q.dims();
            let mut out = vec![0.0; heads * d];
            out[self.head * d..][..d].copy_from_slice(&self.error);
            Tensor::from_data(TensorData::new(out, [1, heads, 1, d]), &q.device())
        }
    }

    /// In a layer whose branches are parallel, what attention comes to is added to the residual stream and nothing else sees it.
    #[test]
    fn output_moments_measure_what_values_add_to_the_residual_stream() {
        let model = tiny("pythia").model;
        let c = model.config().clone();
        assert!(c.parallel_residual && c.num_heads == c.num_kv_heads);
        let x = model.embed(model.ids(&[3], 1, 0).unwrap(), 0);
        for (layer, head) in [(0, 0), (0, c.num_heads - 1), (c.num_layers - 1, 1)] {
            let added = |error: Vec<f32>| host(model.layer(layer, x.clone(), 0, &mut Only { head, error }).unsqueeze());
            let error: Vec<f32> = (0..c.head_dim).map(|i| ((i * 37 + head) % 11) as f32 - 5.0).collect();
            let difference = added(error.clone()).into_iter().zip(added(vec![0.0; c.head_dim]));
            let seen: f64 = difference.map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let error = nalgebra::DVector::from_iterator(c.head_dim, error.into_iter().map(f64::from));
            let predicted = error.dot(&(&output_moments(&model, layer)[head] * &error));
            assert!((predicted / seen - 1.0).abs() < 1e-3, "{layer} {head}: {predicted} {seen}");
        }
    }

    #[test]
    fn output_moments_are_the_mean_of_those_of_a_kv_heads_query_heads() {
        let model = tiny("llama-untied").model;
        let c = model.config().clone();
        let (group, d) = (c.num_heads / c.num_kv_heads, c.head_dim);
        assert!(group > 1 && c.num_kv_heads > 1);
        let projection = model.output_projection(1);
        let hidden = projection.dims()[1];
        let w: Vec<f32> = projection.try_into_vec_as().unwrap();
        let at = |head: usize, channel: usize, to: usize| f64::from(w[(head * d + channel) * hidden + to]);
        for (kv, found) in output_moments(&model, 1).iter().enumerate() {
            for (i, j) in [(0, 0), (0, d - 1), (d - 1, 1), (2, 3)] {
                let heads = kv * group..(kv + 1) * group;
                let sum: f64 = heads.map(|h| (0..hidden).map(|o| at(h, i, o) * at(h, j, o)).sum::<f64>()).sum();
                assert!((found[(i, j)] - sum / group as f64).abs() < 1e-12, "{kv} {i} {j}");
            }
        }
    }
}
