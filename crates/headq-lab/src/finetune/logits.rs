//! The loss `logits`: KL of next-token distributions, end to end through the frozen model, all layers trained together.
//!
//! Nothing of the model is kept for the backward pass but what goes into each layer (1.2 MB a layer for 512 tokens of
//! SmolLM2-135M): layers are run again one at a time, last one first, each in a graph of its own that is given the gradient of its
//! output. The head and its logits are taken a few rows at a time.

use burn::tensor::{Gradients, Tensor};
use headq::learn::logits_kl;
use headq::scheme::{KeyScheme, Scheme};
use headq::{Attention, HeadqAttention, KeyStatistics, QuantizedCache};
use headq_models::LanguageModel;

use super::state::{Checkpoint, InitialLosses, StateFolder};
use super::train::{Course, LayerTrained, Leaves, Point, Progress, batch, initial, learning_rate, train, updated};
use super::{Basis, Request, Settings};
use crate::LabError;

/// Rows whose logits exist at a time.
const ROWS: usize = 128;

/// The frozen model, run under an attention that loses something beside itself without loss.
struct Frozen<'a>(&'a LanguageModel);

/// A pass through the model as the corrections read it.
struct Pass {
    /// What each layer is given, and the last one's output: `[1, tokens, hidden]`
    inputs: Vec<Tensor<3>>,
    /// Mean KL over the window's tokens, nats.
    loss: f64,
    /// Its gradient by the last layer's output; none where it was not asked for.
    gradient: Option<Tensor<3>>,
}

impl Frozen<'_> {
    fn layers(&self) -> usize {
        self.0.config().num_layers
    }

    /// Runs a window under `read`, which is part of no autodiff graph, beside the dense model.
    fn pass(&self, window: &[u32], read: &mut dyn Attention, gradient: bool) -> Result<Pass, LabError> {
        let model = self.0;
        let mut dense = QuantizedCache::teacher_forced(Scheme::DENSE, None, self.layers(), &model.device());
        let expected = model.hidden(model.ids(window, 1, 0)?, 0, &mut dense);
        let mut inputs = vec![model.embed(model.ids(window, 1, 0)?, 0)];
        for layer in 0..self.layers() {
            inputs.push(model.layer(layer, inputs[layer].clone(), 0, read));
        }
        let [_, tokens, _] = expected.dims();
        let output = inputs[self.layers()].clone();
        let (mut loss, mut gradients) = (0.0, Vec::new());
        for start in (0..tokens).step_by(ROWS) {
            let rows = ROWS.min(tokens - start);
            let part = |x: &Tensor<3>| x.clone().narrow(1, start, rows);
            let logits = |x: Tensor<3>| model.logits(x).reshape([rows, model.config().vocab_size]);
            let own = if gradient { part(&output).autodiff().require_grad() } else { part(&output) };
            let kl = logits_kl(logits(part(&expected)), logits(model.finish(own.clone()))).sum();
            loss += value(&kl) / tokens as f64;
            if gradient {
                let found = own.grad(&kl.mul_scalar(1.0 / tokens as f64).backward());
                gradients.push(found.unwrap_or_else(|| part(&output).zeros_like()));
            }
        }
        let gradient = gradient.then(|| Tensor::cat(gradients, 1));
        Ok(Pass { inputs, loss, gradient })
    }

    /// Runs the layers of a pass again, the last one first, each in a graph of its own under `read`, and hands the gradients of each to
    /// `take`: those of `weight` times the pass's loss, by whatever of `read` they are asked for.
    fn backward(&self, pass: &Pass, weight: f64, read: &mut dyn Attention, mut take: impl FnMut(usize, &Gradients)) {
        let mut gradient = pass.gradient.clone().expect("the pass was asked for its gradient").mul_scalar(weight);
        for layer in (0..self.layers()).rev() {
            let input = pass.inputs[layer].clone().autodiff().require_grad();
            let output = self.0.layer(layer, input.clone(), 0, read);
            let gradients = (output * gradient).sum().backward();
            gradient = input.grad(&gradients).expect("the residual stream has a gradient");
            take(layer, &gradients);
        }
    }
}

/// A scalar's number, inside an autodiff graph or not.
fn value(x: &Tensor<1>) -> f64 {
    let plain = if x.is_autodiff() { x.clone().inner() } else { x.clone() };
    plain.into_data_as::<f64>().try_to_vec::<f64>().expect("the data was converted to f64")[0]
}

/// Trains all layers at once.
pub struct EndToEnd<'a> {
    pub request: &'a Request<'a>,
    pub key: KeyScheme,
    /// Where the base quantizer needs them.
    pub keys: Option<KeyStatistics>,
    pub candidates: &'a [Basis],
    /// Heads of each layer that keep their initial parameters.
    pub settled: &'a [Vec<usize>],
}

impl EndToEnd<'_> {
    fn frozen(&self) -> Frozen<'_> {
        Frozen(self.request.model)
    }

    fn layers(&self) -> usize {
        self.frozen().layers()
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
        let shape @ [heads, d, _] = self.shape();
        let module = |(layer, point): (usize, &Point)| {
            HeadqAttention::calibrated(scheme, Some(basis), self.keys.as_ref(), layer, &device)
                .with_correction(point.correction(&self.key, shape, &device))
                .with_base_parts(point.base([heads, d], &device).unwrap_or_default())
        };
        points.iter().enumerate().map(module).collect()
    }

    /// Windows to train on, and those held out.
    fn windows(&self) -> (Vec<&[u32]>, Vec<&[u32]>) {
        let mut train = self.request.windows();
        let held_out = train.split_off(self.request.train.iter().map(|t| t.windows.len()).sum());
        (train, held_out)
    }

    /// Heads that keep their initial parameters, counted through all layers.
    fn settled(&self) -> Vec<usize> {
        let heads = self.shape()[0];
        let layers = self.settled.iter().enumerate();
        layers.flat_map(|(layer, own)| own.iter().map(move |head| layer * heads + head)).collect()
    }

    fn mean(&self, windows: &[&[u32]], points: &[Point]) -> Result<f64, LabError> {
        let mut cache = QuantizedCache::of(self.modules(points, false));
        let losses = windows.iter().map(|w| Ok(self.frozen().pass(w, &mut cache, false)?.loss));
        Ok(losses.sum::<Result<f64, LabError>>()? / windows.len() as f64)
    }

    /// Trains to the end, from the last checkpoint if there is one; measurements are those of the first of the layers.
    pub fn run(&self, folder: &StateFolder, progress: &Progress) -> Result<Vec<LayerTrained>, LabError> {
        let layers = self.layers();
        let whole = LayerTrained::from(train(self, 0, folder, progress)?);
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
        let frozen = self.frozen();
        let share = 1.0 / windows.len() as f64;
        let leaves: Vec<Leaves> = tracked.iter().map(leaves).collect();
        let (mut read, mut again) = (QuantizedCache::of(plain.to_vec()), QuantizedCache::of(tracked.to_vec()));
        let mut loss = 0.0;
        let mut totals: Vec<Tensor<1>> = leaves.iter().map(|l| l.parts.decoder.clone().mul_scalar(0.0).sum()).collect();
        for window in windows {
            let pass = frozen.pass(window, &mut read, true)?;
            loss += share * pass.loss;
            frozen.backward(&pass, share, &mut again, |layer, gradients| {
                totals[layer] = with_gradients(totals[layer].clone(), &leaves[layer], gradients);
            });
        }
        Ok((loss, totals))
    }
}

impl Course for EndToEnd<'_> {
    fn settings(&self) -> &Settings {
        self.request.settings
    }

    /// Where training begins: the last candidate, which is the best closed form on its own.
    fn begin(&self) -> Result<Checkpoint, LabError> {
        let basis = &self.candidates[self.candidates.len() - 1];
        let settings = self.settings();
        let points: Vec<Point> =
            (0..self.layers()).map(|layer| initial(&self.key, settings, basis, layer).swap_remove(0)).collect();
        let nothing: Vec<Point> = points.iter().map(Point::without_correction).collect();
        let (train, held_out) = self.windows();
        let initial_train = self.mean(&train[..settings.batch.min(train.len())], &points)?;
        let initial_loss = self.mean(&held_out, &points)?;
        let uncorrected = self.mean(&held_out, &nothing)?;
        let losses =
            InitialLosses { train: initial_train, held_out: vec![initial_loss], uncorrected: vec![uncorrected] };
        let all = self.layers() * self.shape()[0];
        Ok(Checkpoint::new(0, Point::concat(&points), losses, self.settled().len() == all))
    }

    fn step(&self, c: &mut Checkpoint) -> Result<(), LabError> {
        let (settings, step, layers) = (self.settings(), c.header.step, self.layers());
        let fail = |reason: String| LabError::Training { layer: layers - 1, step: step + 1, reason };
        let points = c.now.split(layers);
        let tracked = self.modules(&points, true);
        let (train, _) = self.windows();
        let windows: Vec<&[u32]> =
            batch(settings, train.len(), self.request.seed, step).into_iter().map(|w| train[w]).collect();
        let (loss, totals) = self.gradients(&windows, &self.modules(&points, false), &tracked)?;
        c.header.check(loss, settings).map_err(fail)?;
        let (mut first, mut second) = (c.first.split(layers), c.second.split(layers));
        let mut now = Vec::with_capacity(layers);
        for (layer, total) in totals.into_iter().enumerate() {
            let gradients = total.backward();
            let moments = (&mut first[layer], &mut second[layer]);
            now.push(updated(
                &self.key,
                leaves(&tracked[layer]),
                &gradients,
                learning_rate(settings, step),
                step,
                moments,
            ));
        }
        (c.first, c.second) = (Point::concat(&first), Point::concat(&second));
        let heads = layers * self.shape()[0];
        c.advance(Point::concat(&now), loss, &self.settled(), heads, settings).map_err(fail)
    }

    fn measure(&self, c: &mut Checkpoint) -> Result<(), LabError> {
        let loss = self.mean(&self.windows().1, &c.now.split(self.layers()))?;
        c.header.idle += 1;
        if loss < c.header.best_loss[0] {
            c.header.best_loss[0] = loss;
            c.best = c.now.clone();
            c.header.idle = 0;
        }
        let lr = learning_rate(self.settings(), c.header.step - 1);
        c.header.note(0, lr, 1, loss);
        Ok(())
    }
}

/// What is trained of a layer's codec.
fn leaves(module: &HeadqAttention) -> Leaves {
    let correction = module.correction().expect("the scheme has a side code");
    Leaves { parts: correction.parts(), base: module.base_parts() }
}

/// Adds Σ parameter · gradient to a total, whose own gradient by the parameters is then the sum of the gradients.
fn with_gradients(total: Tensor<1>, leaves: &Leaves, gradients: &Gradients) -> Tensor<1> {
    leaves.all().fold(total, |total, x| match x.grad(gradients) {
        Some(gradient) => total + (x.clone() * gradient).sum(),
        None => total,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use burn::module::{Module, ModuleMapper, Param};
    use burn::tensor::{DType, Device, FloatDType, TensorData};
    use headq::correction::Parts;
    use headq::{AttentionSite, Correction, dense_attention, repeat_kv};
    use headq_models::{LoadOptions, LoadedModel, load};

    use super::*;
    use crate::text::{TextInfo, Windows};
    use crate::{Silent, calibrate};

    fn tiny(name: &str) -> LoadedModel {
        let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../headq-models/tests/fixtures/tiny");
        load(fixtures.join(name), &Device::flex(), &LoadOptions::default()).unwrap()
    }

    fn window(tokens: u32) -> Vec<u32> {
        (0..tokens).map(|i| i * 7 % 90).collect()
    }

    /// The model in double precision, in which central differences are sharp.
    fn wide(model: &LanguageModel) -> LanguageModel {
        struct Widen;
        impl ModuleMapper for Widen {
            fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
                parameter.map(|x| x.cast(FloatDType::F64))
            }
        }
        model.clone().map(&mut Widen)
    }

    /// Numbers without a pattern, from −1 to 1.
    fn numbers(shape: [usize; 3], seed: u64) -> Tensor<3> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        };
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| next()).collect();
        double(values, shape)
    }

    fn double(values: Vec<f64>, shape: [usize; 3]) -> Tensor<3> {
        Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), DType::F64))
    }

    fn host(x: Tensor<3>) -> Vec<f64> {
        let x = if x.is_autodiff() { x.inner() } else { x };
        x.into_data_as::<f64>().try_to_vec().unwrap()
    }

    /// Parameters of a layer in double precision; all of them small enough for differences and large enough to matter.
    fn parts([heads, width, rank]: [usize; 3], seed: u64) -> Parts {
        Parts {
            decoder: numbers([heads, width, rank], 3 * seed),
            encoder: Some(numbers([heads, width, rank], 3 * seed + 1)),
            clip: Some(numbers([heads, 1, rank], 3 * seed + 2).mul_scalar(0.2).add_scalar(0.7)),
        }
    }

    fn tracked(parts: &Parts) -> Parts {
        let track = |x: &Tensor<3>| x.clone().autodiff().require_grad();
        Parts {
            decoder: track(&parts.decoder),
            encoder: parts.encoder.as_ref().map(track),
            clip: parts.clip.as_ref().map(track),
        }
    }

    /// U, W and ρ with their names, in an order that [`with_part`] knows.
    fn named(parts: &Parts) -> [(&'static str, Tensor<3>); 3] {
        let own = |x: &Option<Tensor<3>>| x.clone().unwrap();
        [("U", parts.decoder.clone()), ("W", own(&parts.encoder)), ("clip", own(&parts.clip))]
    }

    fn with_part(parts: &Parts, at: usize, x: Tensor<3>) -> Parts {
        let mut parts = parts.clone();
        match at {
            0 => parts.decoder = x,
            1 => parts.encoder = Some(x),
            _ => parts.clip = Some(x),
        }
        parts
    }

    /// Central differences of `loss` by some elements of `x`, beside `gradient`.
    fn check_gradient(name: &str, x: &Tensor<3>, gradient: Tensor<3>, loss: impl Fn(Tensor<3>) -> f64) {
        let (values, gradient, h) = (host(x.clone()), host(gradient), 1e-4);
        let largest = gradient.iter().fold(0.0f64, |a, g| a.max(g.abs()));
        assert!(largest > 0.0, "{name} has a gradient");
        for at in (0..values.len()).step_by((values.len() / 4).max(1)) {
            let nudged = |by: f64| {
                let mut values = values.clone();
                values[at] += by;
                loss(double(values, x.dims()))
            };
            let difference = (nudged(h) - nudged(-h)) / (2.0 * h);
            let found = gradient[at];
            assert!((found - difference).abs() < 1e-5 * largest, "{name}[{at}]: {found} and {difference} of {largest}");
        }
    }

    /// Attention to keys as a codec would read them whose base and side quantizers are smooth.
    struct Smooth(Vec<Parts>);

    impl Attention for Smooth {
        fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
            let parts = &self.0[site.layer];
            let matrix = |x: &Tensor<3>| x.clone().unsqueeze::<4>();
            let base = k.clone().mul_scalar(1.3).tanh();
            let clip = matrix(parts.clip.as_ref().unwrap());
            let z = (k - base.clone()).matmul(matrix(parts.encoder.as_ref().unwrap()));
            let side = (z / clip.clone()).tanh() * clip;
            let read = base + side.matmul(matrix(&parts.decoder).swap_dims(2, 3));
            let groups = q.dims()[1] / read.dims()[1];
            dense_attention(site, q, repeat_kv(read, groups), repeat_kv(v, groups))
        }
    }

    /// Through every layer's U, W and clip factors, and through all layers after it.
    #[test]
    fn end_to_end_gradients_agree_with_central_differences_where_the_quantizers_are_smooth() {
        for name in ["llama-untied", "gpt2", "pythia"] {
            let loaded = tiny(name);
            let model = wide(&loaded.model);
            let (frozen, window) = (Frozen(&model), window(24));
            let config = model.config();
            let shape = [config.num_kv_heads, config.head_dim, 3];
            let points: Vec<Parts> = (0..config.num_layers as u64).map(|layer| parts(shape, layer)).collect();
            let mut again = Smooth(points.iter().map(tracked).collect());
            let leaves: Vec<_> = again.0.iter().map(named).collect();
            let pass = frozen.pass(&window, &mut Smooth(points.clone()), true).unwrap();
            assert!(pass.loss > 1e-6, "{name}: {}", pass.loss);
            let mut found: Vec<Vec<Option<Tensor<3>>>> = vec![Vec::new(); points.len()];
            frozen.backward(&pass, 1.0, &mut again, |layer, gradients| {
                found[layer] = leaves[layer].iter().map(|(_, x)| x.grad(gradients)).collect();
            });
            for (layer, point) in points.iter().enumerate() {
                for (at, (part, x)) in named(point).into_iter().enumerate() {
                    let loss = |x: Tensor<3>| {
                        let mut changed = points.clone();
                        changed[layer] = with_part(point, at, x);
                        frozen.pass(&window, &mut Smooth(changed), false).unwrap().loss
                    };
                    let gradient = found[layer][at].clone().unwrap();
                    check_gradient(&format!("{name}, layer {layer}, {part}"), &x, gradient, loss);
                }
            }
        }
    }

    /// The last layer's U changes no code, so that its gradient is the derivative under the codec itself, windows and sinks included.
    #[test]
    fn gradients_by_the_last_decoder_agree_with_central_differences_under_the_codec() {
        let loaded = tiny("llama-untied");
        let model = wide(&loaded.model);
        let (frozen, window) = (Frozen(&model), window(40));
        let scheme: Scheme = "kivi-2(g=8,r=4,sinks=2,meta=f32)+learned(rank=3,bits=3)".parse().unwrap();
        let key = scheme.key.unwrap();
        let config = model.config();
        let shape = [config.num_kv_heads, config.head_dim, 3];
        let points: Vec<Parts> = (0..config.num_layers as u64).map(|layer| parts(shape, layer)).collect();
        let modules = |points: &[Parts]| -> Vec<HeadqAttention> {
            let basis = Basis::learned(
                &key.side.unwrap(),
                &points.iter().map(|p| Correction::of(&key, p.clone())).collect::<Vec<_>>(),
            );
            let module = |(layer, point): (usize, &Parts)| {
                HeadqAttention::new(scheme, Some(&basis), layer, &Device::flex())
                    .with_correction(Correction::of(&key, point.clone()))
            };
            points.iter().enumerate().map(module).collect()
        };
        let leaves: Vec<Parts> = points.iter().map(tracked).collect();
        let last = points.len() - 1;
        let pass = frozen.pass(&window, &mut QuantizedCache::of(modules(&points)), true).unwrap();
        let mut found = None;
        frozen.backward(&pass, 1.0, &mut QuantizedCache::of(modules(&leaves)), |layer, gradients| {
            if layer == last {
                found = leaves[last].decoder.grad(gradients);
            }
        });
        let loss = |u: Tensor<3>| {
            let mut changed = points.clone();
            changed[last].decoder = u;
            frozen.pass(&window, &mut QuantizedCache::of(modules(&changed)), false).unwrap().loss
        };
        check_gradient("the last U", &points[last].decoder, found.unwrap(), loss);
    }

    /// Layers run again one at a time give the gradients of one graph through the whole model.
    #[test]
    fn recomputed_gradients_are_those_of_one_graph() {
        let loaded = tiny("llama-untied");
        // Of few bits where gradients of the base quantizer, which are sums of many terms, are to stand out from rounding.
        for (scheme, base) in [("kivi-2(g=8,r=4)", false), ("kivi-1(g=8,r=4)", true), ("klt-1(g=8,r=4,sinks=0)", true)]
        {
            gradients_agree(&loaded, format!("{scheme}+learned(rank=2,bits=3)").parse().unwrap(), base);
        }
    }

    fn gradients_agree(loaded: &LoadedModel, scheme: Scheme, base: bool) {
        let window = window(40);
        let text =
            TextInfo { path: "none".into(), sha256: String::new(), chars: 0, tokens: 40, tokens_sha256: String::new() };
        let windows = [Windows { text, windows: vec![window.clone()] }];
        let key = scheme.key.unwrap();
        let stats = calibrate(&loaded.model, &loaded.fingerprint, &windows, false, key.base, None, 1, &Silent).unwrap();
        let settings = Settings {
            loss: "logits".into(),
            train_clip: true,
            train_base_clip: base,
            train_transform: key.base.is_static(),
            ..Default::default()
        };
        let keys = headq::KeyStatistics::of(&stats.layers).ok();
        let request = Request {
            model: &loaded.model,
            fingerprint: &loaded.fingerprint,
            name: "llama-untied".into(),
            device: "flex".into(),
            command: String::new(),
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
        let settled = vec![Vec::new(); loaded.config().num_layers];
        let task = EndToEnd { request: &request, key, keys, candidates: &candidates, settled: &settled };
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
            let [found_by, expected_by] = [&tracked[layer], &whole[layer]].map(leaves);
            let trained = 3 + usize::from(base) + 2 * usize::from(settings.train_transform);
            assert_eq!(found_by.all().count(), trained);
            for (a, b) in found_by.all().zip(expected_by.all()) {
                let (a, b) = (host(a.grad(&found).unwrap()), host(b.grad(&expected).unwrap()));
                let largest = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                assert!(largest > 0.0);
                a.iter()
                    .zip(&b)
                    .for_each(|(a, b)| assert!((a - b).abs() < 2e-2 * largest, "{scheme}, layer {layer}: {a} {b}"));
            }
        }
    }
}
