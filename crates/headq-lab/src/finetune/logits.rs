//! The loss `logits`: KL of next-token distributions, end to end through the frozen model, all layers trained together.
//!
//! Nothing of the model is kept for the backward pass but what goes into each layer (1.2 MB a layer for 512 tokens of
//! SmolLM2-135M): layers are run again one at a time, last one first, each in a graph of its own that is given the gradient of its
//! output. The head and its logits are taken a few rows at a time.

use burn::tensor::Tensor;
use headq::learn::logits_kl;
use headq::scheme::{KeyScheme, Scheme};
use headq::{HeadqAttention, QuantizedCache};

use super::state::{Checkpoint, LayerHeader, StateFolder};
use super::train::{
    DIVERGED, LayerTrained, Measurement, NO_LOSS, Point, Progress, batch, initial, learning_rate, updated,
};
use super::{Basis, Request};
use crate::LabError;

/// Rows whose logits exist at a time.
const ROWS: usize = 128;

/// Trains all layers at once.
pub struct EndToEnd<'a> {
    pub request: &'a Request<'a>,
    pub key: KeyScheme,
    pub candidates: &'a [Basis],
}

/// A pass through the model as the corrections read it.
struct Pass {
    /// What each layer is given, and the last one's output: `[1, tokens, hidden]`
    inputs: Vec<Tensor<3>>,
    /// Mean KL over the window's tokens, nats.
    loss: f64,
    /// Its gradient by the last layer's output.
    gradient: Option<Tensor<3>>,
}

impl EndToEnd<'_> {
    fn layers(&self) -> usize {
        self.request.model.config().num_layers
    }

    fn shape(&self) -> [usize; 3] {
        let basis = &self.candidates[0];
        [basis.side_heads, basis.head_dim, basis.rank]
    }

    /// The codecs of all layers at a point, on the plain device or its autodiff twin.
    fn modules(&self, points: &[Point], tracked: bool) -> Vec<HeadqAttention> {
        let plain = self.request.model.device();
        let device = if tracked { plain.clone().autodiff() } else { plain };
        let basis = &self.candidates[0];
        let scheme = Scheme { value: None, ..self.request.scheme };
        let keys = headq::KeyStatistics::of(&self.request.stats.layers).ok();
        let module = |(layer, point): (usize, &Point)| {
            HeadqAttention::calibrated(scheme, Some(basis), keys.as_ref(), layer, &device)
                .with_correction(point.correction(&self.key, self.shape(), &device))
        };
        points.iter().enumerate().map(module).collect()
    }

    /// Runs a window with the given codecs, beside the dense model.
    fn pass(&self, window: &[u32], modules: &[HeadqAttention], gradient: bool) -> Result<Pass, LabError> {
        let model = self.request.model;
        let mut dense = QuantizedCache::teacher_forced(Scheme::DENSE, None, self.layers(), &model.device());
        let expected = model.hidden(model.ids(window, 1, 0)?, 0, &mut dense);
        let mut cache = QuantizedCache::of(modules.to_vec());
        let mut inputs = vec![model.embed(model.ids(window, 1, 0)?, 0)];
        for layer in 0..self.layers() {
            inputs.push(model.layer(layer, inputs[layer].clone(), 0, &mut cache));
        }
        let [_, tokens, width] = expected.dims();
        let output = inputs[self.layers()].clone();
        let (mut loss, mut gradients) = (0.0, Vec::new());
        for start in (0..tokens).step_by(ROWS) {
            let rows = ROWS.min(tokens - start);
            let part = |x: &Tensor<3>| x.clone().narrow(1, start, rows);
            let logits = |x: Tensor<3>| model.logits(x).reshape([rows, model.config().vocab_size]);
            let read = if gradient { part(&output).autodiff().require_grad() } else { part(&output) };
            let kl = logits_kl(logits(part(&expected)), logits(model.finish(read.clone()))).sum();
            let value = if gradient { kl.clone().inner() } else { kl.clone() };
            loss += f64::from(value.into_scalar::<f32>()) / tokens as f64;
            if gradient {
                let own = read.grad(&kl.mul_scalar(1.0 / tokens as f64).backward());
                gradients.push(own.unwrap_or_else(|| Tensor::zeros([1, rows, width], &model.device())));
            }
        }
        let gradient = gradient.then(|| Tensor::cat(gradients, 1));
        Ok(Pass { inputs, loss, gradient })
    }

    fn mean(&self, windows: &[&[u32]], points: &[Point]) -> Result<f64, LabError> {
        let modules = self.modules(points, false);
        let losses = windows.iter().map(|w| Ok(self.pass(w, &modules, false)?.loss));
        Ok(losses.sum::<Result<f64, LabError>>()? / windows.len() as f64)
    }

    /// Where training begins: the last candidate, which is the best closed form on its own.
    fn begin(&self, train: &[&[u32]], held_out: &[&[u32]]) -> Result<Checkpoint, LabError> {
        let basis = &self.candidates[self.candidates.len() - 1];
        let settings = self.request.settings;
        let points: Vec<Point> =
            (0..self.layers()).map(|layer| initial(&self.key, settings, basis, layer).swap_remove(0)).collect();
        let nothing: Vec<Point> =
            points.iter().map(|p| Point { decoder: vec![0.0; p.decoder.len()], ..p.clone() }).collect();
        let initial_train = self.mean(&train[..settings.batch.min(train.len())], &points)?;
        let initial_loss = self.mean(held_out, &points)?;
        let uncorrected = self.mean(held_out, &nothing)?;
        let first =
            Measurement { layer: 0, step: 0, lr: 0.0, loss: initial_train, held_out: initial_loss, best: initial_loss };
        let header = LayerHeader {
            step: 0,
            finished: initial_train <= NO_LOSS,
            idle: 0,
            running: (0.0, 0),
            uncorrected_loss: vec![uncorrected],
            best_loss: vec![initial_loss],
            initial_loss: vec![initial_loss],
            initial_train,
            measurements: vec![first],
        };
        let now = Point::concat(&points);
        let zeros = now.zeros_like();
        Ok(Checkpoint { header, best: now.clone(), first: zeros.clone(), second: zeros, now })
    }

    /// Trains to the end, from the last checkpoint if there is one.
    pub fn run(&self, folder: &StateFolder, progress: &Progress) -> Result<Vec<LayerTrained>, LabError> {
        let (settings, windows) = (self.request.settings, self.request.windows());
        let (train, held_out) = windows.split_at(self.request.train.iter().map(|t| t.windows.len()).sum());
        let mut c = match folder.load(0)? {
            Some(checkpoint) => checkpoint,
            None => self.begin(train, held_out)?,
        };
        progress.advance(c.header.step);
        while !c.header.finished {
            if progress.stops() {
                folder.save(0, &c)?;
                return Err(LabError::Interrupted);
            }
            self.step(train, &mut c)?;
            progress.advance(1);
            let last = c.header.step == settings.steps;
            if last || c.header.step.is_multiple_of(settings.measure_every) {
                self.measure(held_out, &mut c)?;
                progress.show(&c.header.measurements[c.header.measurements.len() - 1]);
                c.header.finished = last || c.header.idle >= settings.patience;
            }
            if c.header.finished || c.header.step.is_multiple_of(settings.save_every) {
                folder.save(0, &c)?;
            }
        }
        progress.advance(settings.steps - c.header.step);
        let layers = self.layers();
        let whole = LayerTrained::from(c);
        let one = |(layer, best)| {
            let measurements = if layer == 0 { whole.measurements.clone() } else { Vec::new() };
            LayerTrained { best, measurements, ..whole.clone() }
        };
        Ok(whole.best.split(layers).into_iter().enumerate().map(one).collect())
    }

    /// Mean loss of windows; and by layer a scalar whose gradient by the parameters of `tracked` is that of the loss.
    fn gradients(
        &self,
        windows: &[&[u32]],
        plain: &[HeadqAttention],
        tracked: &[HeadqAttention],
    ) -> Result<(f64, Vec<Tensor<1>>), LabError> {
        let share = 1.0 / windows.len() as f64;
        let mut loss = 0.0;
        let zero = || Tensor::zeros([1], &self.request.model.device().autodiff());
        let mut totals: Vec<Tensor<1>> = (0..self.layers()).map(|_| zero()).collect();
        for window in windows {
            let pass = self.pass(window, plain, true)?;
            loss += share * pass.loss;
            let mut gradient = pass.gradient.expect("asked for").mul_scalar(share);
            for (layer, total) in totals.iter_mut().enumerate().rev() {
                let input = pass.inputs[layer].clone().autodiff().require_grad();
                let mut cache = QuantizedCache::of(tracked.to_vec());
                let output = self.request.model.layer(layer, input.clone(), 0, &mut cache);
                let gradients = (output * gradient).sum().backward();
                gradient = input.grad(&gradients).expect("the residual stream has a gradient");
                let own = tracked[layer].correction().expect("the scheme has a side code");
                *total = with_gradients(total.clone(), own, &gradients);
            }
        }
        Ok((loss, totals))
    }

    fn step(&self, train: &[&[u32]], c: &mut Checkpoint) -> Result<(), LabError> {
        let (settings, step, layers) = (self.request.settings, c.header.step, self.layers());
        let fail = |reason: String| LabError::Training { layer: layers - 1, step: step + 1, reason };
        let points = c.now.split(layers);
        let tracked = self.modules(&points, true);
        let windows: Vec<&[u32]> =
            batch(settings, train.len(), self.request.seed, step).into_iter().map(|w| train[w]).collect();
        let (loss, totals) = self.gradients(&windows, &self.modules(&points, false), &tracked)?;
        let limit = DIVERGED * c.header.initial_train.max(NO_LOSS);
        if loss.is_nan() || loss > limit {
            let reason = format!(
                "the loss has grown from {:.3e} to {loss:.3e}; lower the learning rate {}",
                c.header.initial_train, settings.lr
            );
            return Err(fail(reason));
        }
        let (mut first, mut second) = (c.first.split(layers), c.second.split(layers));
        let mut now = Vec::with_capacity(layers);
        for (layer, total) in totals.into_iter().enumerate() {
            let own = tracked[layer].correction().ok_or_else(|| fail("no correction".into()))?;
            let gradients = total.backward();
            let moments = (&mut first[layer], &mut second[layer]);
            now.push(updated(&self.key, own.parts(), &gradients, learning_rate(settings, step), step, moments));
        }
        (c.now, c.first, c.second) = (Point::concat(&now), Point::concat(&first), Point::concat(&second));
        if !c.now.is_finite() {
            return Err(fail(format!("the parameters are not finite; lower the learning rate {}", settings.lr)));
        }
        c.header.step += 1;
        c.header.running.0 += loss;
        c.header.running.1 += 1;
        Ok(())
    }

    fn measure(&self, held_out: &[&[u32]], c: &mut Checkpoint) -> Result<(), LabError> {
        let loss = self.mean(held_out, &c.now.split(self.layers()))?;
        c.header.idle += 1;
        if loss < c.header.best_loss[0] {
            c.header.best_loss[0] = loss;
            c.best = c.now.clone();
            c.header.idle = 0;
        }
        let (sum, count) = std::mem::take(&mut c.header.running);
        c.header.measurements.push(Measurement {
            layer: 0,
            step: c.header.step,
            lr: learning_rate(self.request.settings, c.header.step - 1),
            loss: sum / count as f64,
            held_out: loss,
            best: c.header.best_loss[0],
        });
        Ok(())
    }
}

/// Adds Σ parameter · gradient to a total, whose own gradient by the parameters is then the sum of the gradients.
fn with_gradients(total: Tensor<1>, correction: &headq::Correction, gradients: &burn::tensor::Gradients) -> Tensor<1> {
    let parts = correction.parts();
    let parts = [Some(parts.decoder), parts.encoder, parts.clip].into_iter().flatten();
    parts.fold(total, |total, x| match x.grad(gradients) {
        Some(gradient) => total + (x * gradient).sum(),
        None => total,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use headq_models::{LoadOptions, load};

    use super::*;
    use crate::text::{TextInfo, Windows};
    use crate::{Silent, calibrate};

    /// Layers run again one at a time give the gradients of one graph through the whole model.
    #[test]
    fn recomputed_gradients_are_those_of_one_graph() {
        let folder =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../headq-models/tests/fixtures/tiny/llama-untied");
        let loaded = load(&folder, &burn::tensor::Device::flex(), &LoadOptions::default()).unwrap();
        let window: Vec<u32> = (0..40u32).map(|i| i * 7 % 90).collect();
        let text =
            TextInfo { path: "none".into(), sha256: String::new(), chars: 0, tokens: 40, tokens_sha256: String::new() };
        let windows = [Windows { text, windows: vec![window.clone()] }];
        let scheme: Scheme = "kivi-2(g=8,r=4)+learned(rank=2,bits=3)".parse().unwrap();
        let key = scheme.key.unwrap();
        let stats = calibrate(&loaded.model, &loaded.fingerprint, &windows, false, key.base, 1, &Silent).unwrap();
        let settings = super::super::Settings { loss: "logits".into(), train_clip: true, ..Default::default() };
        let request = Request {
            model: &loaded.model,
            fingerprint: &loaded.fingerprint,
            train: &windows,
            held_out: &windows,
            add_bos: false,
            stats: &stats,
            scheme,
            settings: &settings,
            seed: 0,
            threads: 1,
        };
        let candidates = request.candidates(&key).unwrap();
        let task = EndToEnd { request: &request, key, candidates: &candidates };
        let points: Vec<Point> =
            (0..task.layers()).map(|l| initial(&key, &settings, &candidates[0], l).swap_remove(1)).collect();
        let (plain, tracked) = (task.modules(&points, false), task.modules(&points, true));
        let (loss, totals) = task.gradients(&[&window], &plain, &tracked).unwrap();
        // One graph.
        let model = &loaded.model;
        let whole = task.modules(&points, true);
        let ids = || model.ids(&window, 1, 0).unwrap();
        let [rows, vocab] = [window.len(), model.config().vocab_size];
        let dense = model.forward(ids(), 0, &mut headq::DenseAttention::new()).reshape([rows, vocab]);
        let read = model.forward(ids(), 0, &mut QuantizedCache::of(whole.clone())).reshape([rows, vocab]);
        let kl = logits_kl(dense, read).mean();
        assert!((f64::from(kl.clone().inner().into_scalar::<f32>()) / loss - 1.0).abs() < 1e-3, "{loss}");
        let expected = kl.backward();
        let host = |x: Tensor<3>| -> Vec<f32> { x.into_data().try_to_vec().unwrap() };
        for (layer, total) in totals.iter().enumerate() {
            let found = total.backward();
            let parts = |m: &HeadqAttention| {
                let p = m.correction().unwrap().parts();
                [p.decoder, p.encoder.unwrap(), p.clip.unwrap()]
            };
            for (a, b) in parts(&tracked[layer]).into_iter().zip(parts(&whole[layer])) {
                let (a, b) = (host(a.grad(&found).unwrap()), host(b.grad(&expected).unwrap()));
                let largest = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                assert!(largest > 0.0);
                a.iter().zip(&b).for_each(|(a, b)| assert!((a - b).abs() < 2e-2 * largest, "layer {layer}: {a} {b}"));
            }
        }
    }
}
