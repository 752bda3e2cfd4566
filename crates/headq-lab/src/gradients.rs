//! Second moments of the log-likelihood's gradients by keys and values as codes are read: what errors of codes cost, in nats.
//!
//! At each position a token is drawn from the model's own distribution, so that `E[g gᵀ]` is the Fisher information and not what one
//! text's tokens happen to prefer; tokens drawn apart have no covariance, so that one pass back gives the sum over all positions.
//! Layers are run again one at a time, last one first, as in [`crate::finetune`].

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData};
use headq::probe::ErrorProbe;
use headq::scheme::Flush;
use headq::stats::{GradientMoments, Moments};
use headq::{QuantizedCache, Scheme};
use headq_models::LanguageModel;

use crate::workers::{Cores, map_in_order};
use crate::{LabError, Observer};

/// Rows whose logits exist at a time.
const ROWS: usize = 128;

/// Uniform in [0, 1), by seed, window and position alone (SplitMix64).
fn uniform(seed: u64, window: usize, position: usize) -> f64 {
    let mix = |state: u64, next: u64| {
        let mut z = state
            .wrapping_mul(0xd134_2543_de82_ef95)
            .wrapping_add(next.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let state = [window as u64, position as u64].into_iter().fold(seed, mix);
    (state >> 11) as f64 / (1u64 << 53) as f64
}

/// A token of the distribution with these log-probabilities, at quantile `u`.
fn draw(log_p: &[f32], u: f64) -> usize {
    let mut left = u * log_p.iter().map(|l| f64::from(*l).exp()).sum::<f64>();
    for (token, l) in log_p.iter().enumerate() {
        left -= f64::from(*l).exp();
        if left < 0.0 {
            return token;
        }
    }
    // All that is left is rounding: the likeliest token.
    (0..log_p.len()).max_by(|a, b| log_p[*a].total_cmp(&log_p[*b])).unwrap_or(0)
}

/// Gradient of the sum over positions of −log p(token drawn) by the last layer's output, `[1, tokens, hidden]`.
fn of_output(model: &LanguageModel, output: &Tensor<3>, seed: u64, window: usize) -> Result<Tensor<3>, LabError> {
    let tokens = output.dims()[1];
    let mut gradients = Vec::new();
    for start in (0..tokens).step_by(ROWS) {
        let rows = ROWS.min(tokens - start);
        let own = output.clone().narrow(1, start, rows).autodiff().require_grad();
        let logits = model.logits(model.finish(own.clone())).reshape([rows, model.config().vocab_size]);
        let log_p = log_softmax(logits, 1);
        let host: Vec<f32> = log_p.clone().inner().into_data_as::<f32>().try_to_vec().expect("converted to f32");
        if !host.iter().all(|l| l.is_finite() || *l == f32::NEG_INFINITY) {
            return Err(LabError::NotFinite { scheme: "gradients".into(), window });
        }
        let drawn = host.chunks(model.config().vocab_size).enumerate();
        let drawn: Vec<i64> = drawn.map(|(i, row)| draw(row, uniform(seed, window, start + i)) as i64).collect();
        let drawn = Tensor::<2, Int>::from_data(TensorData::new(drawn, [rows, 1]), &own.device());
        let loss = log_p.gather(1, drawn).sum().neg();
        let found = own.grad(&loss.backward());
        gradients.push(found.unwrap_or_else(|| output.clone().narrow(1, start, rows).zeros_like()));
    }
    Ok(Tensor::cat(gradients, 1))
}

/// Adds rows `[1, heads, tokens, head_dim]` to the moments of each head.
fn add(moments: &mut [Moments], x: Tensor<4>) {
    let rows: Vec<f32> = x.into_data_as::<f32>().try_to_vec().expect("converted to f32");
    let per_head = rows.len() / moments.len();
    moments.iter_mut().zip(rows.chunks(per_head)).for_each(|(m, rows)| m.add(rows));
}

/// Of one window, by layer.
fn of_window(
    model: &LanguageModel,
    tokens: &[u32],
    flush: Flush,
    seed: u64,
    window: usize,
) -> Result<Vec<GradientMoments>, LabError> {
    let config = model.config();
    let mut dense = QuantizedCache::teacher_forced(Scheme::DENSE, None, config.num_layers, &model.device());
    let mut inputs = vec![model.embed(model.ids(tokens, 1, 0)?, 0)];
    for layer in 0..config.num_layers {
        inputs.push(model.layer(layer, inputs[layer].clone(), 0, &mut dense));
    }
    let output = inputs.pop().expect("there is the embedding, if no layer");
    let mut gradient = of_output(model, &output, seed, window)?;
    let empty = || vec![Moments::new(config.head_dim); config.num_kv_heads];
    let mut all: Vec<_> = (0..config.num_layers).map(|_| GradientMoments { k: empty(), v: empty() }).collect();
    for (layer, moments) in all.iter_mut().enumerate().rev() {
        let input = inputs[layer].clone().autodiff().require_grad();
        let mut probe = ErrorProbe::new(flush);
        let output = model.layer(layer, input.clone(), 0, &mut probe);
        let gradients = (output * gradient.autodiff()).sum().backward();
        gradient = input.grad(&gradients).expect("the residual stream has a gradient");
        if let Some([k, v]) = probe.take_errors() {
            for (moments, x) in [(&mut moments.k, k), (&mut moments.v, v)] {
                if let Some(g) = x.grad(&gradients) {
                    add(moments, g);
                }
            }
        }
        let finite = |all: &[Moments]| all.iter().all(Moments::is_finite);
        if !finite(&moments.k) || !finite(&moments.v) {
            return Err(LabError::NotFinite { scheme: "gradients".into(), window });
        }
    }
    Ok(all)
}

/// Moments of the gradients of all windows, by layer; the same whatever the number of threads.
///
/// # Errors
/// Where windows are so short that nothing is read from codes, a gradient is not finite, or on interruption.
pub(crate) fn accumulate(
    model: &LanguageModel,
    windows: &[&[u32]],
    flush: Flush,
    seed: u64,
    threads: usize,
    observer: &dyn Observer,
) -> Result<Vec<GradientMoments>, LabError> {
    let context = windows.first().map_or(0, |w| w.len());
    if context == 0 || flush.flushed(context - 1) == 0 {
        let least = flush.sinks + flush.residual + flush.group;
        return Err(LabError::Usage(format!(
            "gradients: of windows of {context} tokens none is read from codes; give a context of at least {least}"
        )));
    }
    let mut total: Option<Vec<GradientMoments>> = None;
    map_in_order(
        "gradients",
        windows.len(),
        Cores::on(&model.device(), threads),
        observer,
        || model.clone(),
        |model, i| of_window(model, windows[i], flush, seed, i),
        |_, found| match &mut total {
            None => total = Some(found),
            Some(total) => total.iter_mut().zip(&found).for_each(|(t, f)| t.merge(f)),
        },
    )?;
    total.ok_or_else(|| LabError::Usage("no windows to calibrate on".into()))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};
    use headq::{Attention, AttentionSite, dense_attention, repeat_kv};
    use headq_models::{LoadOptions, LoadedModel, load};

    use super::*;
    use crate::Silent;

    fn tiny(name: &str) -> LoadedModel {
        let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../headq-models/tests/fixtures/tiny");
        load(fixtures.join(name), &Device::flex(), &LoadOptions::default()).unwrap()
    }

    #[test]
    fn tokens_are_drawn_with_their_probabilities() {
        let p = [0.5f64, 0.0, 0.3, 0.2];
        let log_p: Vec<f32> = p.iter().map(|p| p.ln() as f32).collect();
        let mut seen = [0.0; 4];
        let n = 40_000;
        (0..n).for_each(|i| seen[draw(&log_p, uniform(3, i / 200, i % 200))] += 1.0 / n as f64);
        assert!(seen.iter().zip(p).all(|(seen, p)| (seen - p).abs() < 0.01), "{seen:?}");
        assert_eq!((draw(&log_p, 0.0), draw(&log_p, 1.0 - 1e-16)), (0, 3));
    }

    /// Moves one key of one layer by a little wherever codes are read, in all the queries that read it so.
    struct Moved {
        layer: usize,
        head: usize,
        token: usize,
        channel: usize,
        by: f32,
        flush: Flush,
    }

    impl Attention for Moved {
        fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
            let groups = q.dims()[1] / k.dims()[1];
            let dense =
                |k: Tensor<4>| dense_attention(site, q.clone(), repeat_kv(k, groups), repeat_kv(v.clone(), groups));
            if site.layer != self.layer {
                return dense(k);
            }
            let [_, _, tokens, d] = k.dims();
            let mut change = vec![0.0f32; k.shape().num_elements()];
            change[(self.head * tokens + self.token) * d + self.channel] = self.by;
            let moved = dense(k.clone() + Tensor::from_data(TensorData::new(change, k.dims()), &k.device()));
            let first = self.flush.time(self.token);
            Tensor::cat(vec![dense(k).narrow(2, 0, first), moved.narrow(2, first, tokens - first)], 2)
        }
    }

    /// Σ over positions of −log p(token drawn), in f64.
    fn loss(model: &LanguageModel, tokens: &[u32], drawn: &[usize], attention: &mut dyn Attention) -> f64 {
        let [n, vocab] = [tokens.len(), model.config().vocab_size];
        let logits = model.forward(model.ids(tokens, 1, 0).unwrap(), 0, attention).reshape([n, vocab]);
        let logits: Vec<f64> = logits.cast(DType::F64).into_data_as::<f64>().try_to_vec().unwrap();
        let one = |(row, drawn): (&[f64], &usize)| {
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            most + row.iter().map(|l| (l - most).exp()).sum::<f64>().ln() - row[*drawn]
        };
        logits.chunks(vocab).zip(drawn).map(one).sum()
    }

    /// The gradient by one key, through all layers above, against central differences: its square is the moment's diagonal where a
    /// window is short enough for one group.
    #[test]
    fn moments_are_those_of_central_differences() {
        for name in ["llama-untied", "gpt2"] {
            let loaded = tiny(name);
            let model = &loaded.model;
            let tokens: Vec<u32> = (0..24).map(|i| i * 7 % 90).collect();
            let flush = Flush { group: 2, residual: 19, sinks: 3 };
            assert_eq!(flush.flushed(23), 2, "two tokens are read from codes");
            let found = of_window(model, &tokens, flush, 5, 0).unwrap();
            let vocab = model.config().vocab_size;
            let dense = &mut headq::DenseAttention::new();
            let logits = model.forward(model.ids(&tokens, 1, 0).unwrap(), 0, dense).reshape([24, vocab]);
            let log_p: Vec<f32> = log_softmax(logits, 1).into_data_as::<f32>().try_to_vec().unwrap();
            let drawn: Vec<usize> =
                log_p.chunks(vocab).enumerate().map(|(i, row)| draw(row, uniform(5, 0, i))).collect();
            for (layer, found) in found.iter().enumerate() {
                let moments = &found.k[0];
                assert_eq!(moments.n, 2);
                for channel in [0, 3] {
                    let gradient = |token: usize| {
                        let at = |by: f32| {
                            let moved = &mut Moved { layer, head: 0, token, channel, by, flush };
                            loss(model, &tokens, &drawn, moved)
                        };
                        (at(0.05) - at(-0.05)) / 0.1
                    };
                    let expected: f64 = [3, 4].into_iter().map(|token| gradient(token).powi(2)).sum();
                    let own = moments.outer[(channel, channel)];
                    // Sums of f32 losses leave differences with errors of about 1e-5.
                    let close = (own.sqrt() - expected.sqrt()).abs() < 0.02 * expected.sqrt() + 3e-5;
                    assert!(close, "{name}, layer {layer}, channel {channel}: {own:e} {expected:e}");
                }
            }
        }
    }

    #[test]
    fn threads_change_nothing() {
        let loaded = tiny("llama-untied");
        let text: Vec<Vec<u32>> = (0..3).map(|w| (0..40).map(|i| (i * 7 + w * 13) % 90).collect()).collect();
        let windows: Vec<&[u32]> = text.iter().map(Vec::as_slice).collect();
        let flush = Flush { group: 8, residual: 8, sinks: 2 };
        let run = |threads| accumulate(&loaded.model, &windows, flush, 1, threads, &Silent).unwrap();
        assert_eq!(run(1), run(2));
        assert!(accumulate(&loaded.model, &windows, Flush { residual: 64, ..flush }, 1, 1, &Silent).is_err());
    }
}
