//! Training of one layer: all of its heads at once, each with its own loss.

use std::time::Instant;

use burn::optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, Optimizer};
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use headq::AttentionSite;
use headq::Correction;
use headq::basis::{Basis, head_seed};
use headq::correction::Parts;
use headq::learn::{LayerLoss, Loss, Sample};
use headq::quant::{BaseParts, BaseQuantizer, clip_width};
use headq::scheme::KeyScheme;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::capture::Captured;
use super::state::{Checkpoint, InitialLosses, StateFolder, mean};
use super::{SAMPLE_BYTES, Settings};
use crate::{LabError, Observer};

/// Clip factors to begin with, of which each head takes the best.
const INITIAL_CLIPS: [f32; 3] = [1.0, 0.9, 0.8];

/// One measurement on held-out windows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Layer.
    pub layer: usize,
    /// Optimizer steps done.
    pub step: usize,
    /// Learning rate of the last of them.
    pub lr: f64,
    /// Training loss, mean over heads and the steps since the last measurement, nats (but for `score`).
    pub loss: f64,
    /// Held-out loss, mean over heads.
    pub held_out: f64,
    /// Held-out loss of the best parameters of each head so far, mean over heads.
    pub best: f64,
}

/// Parameters of a layer, row-major, or anything of their shapes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Point {
    /// U: `[side_heads, head_dim, rank]`
    pub decoder: Vec<f32>,
    /// W; `None` where tied.
    pub encoder: Option<Vec<f32>>,
    /// ρ: `[side_heads, 1, clip_width]`
    pub clip: Option<Vec<f32>>,
    /// Clip factors of the base quantizer: `[kv_heads, 1, 1]`, of `klt` `[kv_heads, 1, head_dim]`
    pub base_clip: Option<Vec<f32>>,
    /// E of a base quantizer `klt`: `[kv_heads, head_dim, head_dim]`
    pub base_analysis: Option<Vec<f32>>,
    /// F, where there is E.
    pub base_synthesis: Option<Vec<f32>>,
}

/// What reads keys at a point: the correction, and the base quantizer where it is trained, too.
pub struct Codec {
    pub correction: Correction,
    pub base: Option<BaseQuantizer>,
}

/// What is trained, as tensors of one graph.
pub struct Leaves {
    pub parts: Parts,
    pub base: BaseParts,
}

impl Leaves {
    /// Those that are there.
    pub fn all(&self) -> impl Iterator<Item = &Tensor<3>> {
        let Self { parts: Parts { decoder, encoder, clip }, base } = self;
        [Some(decoder), encoder.as_ref(), clip.as_ref(), base.clip.as_ref()]
            .into_iter()
            .flatten()
            .chain(base.transform.iter().flatten())
    }
}

impl Codec {
    pub fn leaves(&self) -> Leaves {
        let base = self.base.as_ref().map(BaseQuantizer::parts).unwrap_or_default();
        Leaves { parts: self.correction.parts(), base }
    }

    fn loss(&self, sample: &Sample) -> LayerLoss {
        match &self.base {
            None => sample.loss(&self.correction),
            Some(base) => sample.loss_through(base, &self.correction),
        }
    }
}

impl Point {
    /// Those that are there, with their names.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, &Vec<f32>)> {
        let all = [
            ("decoder", Some(&self.decoder)),
            ("encoder", self.encoder.as_ref()),
            ("clip", self.clip.as_ref()),
            ("base_clip", self.base_clip.as_ref()),
            ("base_analysis", self.base_analysis.as_ref()),
            ("base_synthesis", self.base_synthesis.as_ref()),
        ];
        all.into_iter().filter_map(|(name, part)| Some((name, part?)))
    }

    /// What `of` makes of each part.
    fn map(&self, of: impl Fn(&Vec<f32>) -> Vec<f32>) -> Self {
        Self {
            decoder: of(&self.decoder),
            encoder: self.encoder.as_ref().map(&of),
            clip: self.clip.as_ref().map(&of),
            base_clip: self.base_clip.as_ref().map(&of),
            base_analysis: self.base_analysis.as_ref().map(&of),
            base_synthesis: self.base_synthesis.as_ref().map(&of),
        }
    }

    pub fn zeros_like(&self) -> Self {
        self.map(|x| vec![0.0; x.len()])
    }

    /// Takes one head's parameters from another point.
    pub fn take_head(&mut self, other: &Point, head: usize, heads: usize) {
        let copy = |to: &mut Vec<f32>, from: &Vec<f32>| {
            let size = to.len() / heads;
            to[head * size..(head + 1) * size].copy_from_slice(&from[head * size..(head + 1) * size]);
        };
        copy(&mut self.decoder, &other.decoder);
        let optional = [
            (&mut self.encoder, &other.encoder),
            (&mut self.clip, &other.clip),
            (&mut self.base_clip, &other.base_clip),
            (&mut self.base_analysis, &other.base_analysis),
            (&mut self.base_synthesis, &other.base_synthesis),
        ];
        for (to, from) in optional {
            if let (Some(to), Some(from)) = (to, from) {
                copy(to, from);
            }
        }
    }

    /// The correction at this point, on the plain device or, to be trained, on its autodiff twin.
    ///
    /// `shape` is `[side_heads, head_dim, rank]`.
    pub fn correction(&self, key: &KeyScheme, shape: [usize; 3], device: &Device) -> Correction {
        let clip = [shape[0], 1, clip_width(key.side.map(|s| s.scales).unwrap_or_default(), shape[2])];
        let tensor = |x: &Vec<f32>, shape: [usize; 3]| Tensor::from_data(TensorData::new(x.clone(), shape), device);
        let parts = Parts {
            decoder: tensor(&self.decoder, shape),
            encoder: self.encoder.as_ref().map(|w| tensor(w, shape)),
            clip: self.clip.as_ref().map(|c| tensor(c, clip)),
        };
        Correction::of(key, parts)
    }

    /// What is trained of the base quantizer, of so many KV heads this wide; `None` where nothing is.
    pub fn base(&self, [heads, d]: [usize; 2], device: &Device) -> Option<BaseParts> {
        let tensor = |x: &Vec<f32>, shape: [usize; 3]| Tensor::from_data(TensorData::new(x.clone(), shape), device);
        let clip = self.base_clip.as_ref().map(|x| tensor(x, [heads, 1, x.len() / heads]));
        let transform = self.base_analysis.as_ref().zip(self.base_synthesis.as_ref());
        let transform = transform.map(|(e, f)| [e, f].map(|x| tensor(x, [heads, d, d])));
        (clip.is_some() || transform.is_some()).then_some(BaseParts { clip, transform })
    }

    /// Points of all layers as one.
    pub fn concat(points: &[Point]) -> Self {
        let join = |part: &dyn Fn(&Point) -> Option<&Vec<f32>>| -> Option<Vec<f32>> {
            points.iter().map(|p| part(p).cloned()).collect::<Option<Vec<_>>>().map(|all| all.concat())
        };
        Self {
            decoder: join(&|p| Some(&p.decoder)).unwrap_or_default(),
            encoder: join(&|p| p.encoder.as_ref()),
            clip: join(&|p| p.clip.as_ref()),
            base_clip: join(&|p| p.base_clip.as_ref()),
            base_analysis: join(&|p| p.base_analysis.as_ref()),
            base_synthesis: join(&|p| p.base_synthesis.as_ref()),
        }
    }

    /// The points of `layers` layers.
    pub fn split(&self, layers: usize) -> Vec<Point> {
        let part = |x: &Vec<f32>, i: usize| x[i * (x.len() / layers)..(i + 1) * (x.len() / layers)].to_vec();
        (0..layers).map(|i| self.map(|x| part(x, i))).collect()
    }

    /// The same with U = 0, which corrects nothing.
    pub fn without_correction(&self) -> Self {
        Self { decoder: vec![0.0; self.decoder.len()], ..self.clone() }
    }

    pub fn is_finite(&self) -> bool {
        self.parts().all(|(_, x)| x.iter().all(|v| v.is_finite()))
    }
}

/// A layer trained to its end.
#[derive(Debug, Clone)]
pub struct LayerTrained {
    pub best: Point,
    pub uncorrected_loss: Vec<f64>,
    pub initial_loss: Vec<f64>,
    pub best_loss: Vec<f64>,
    pub measurements: Vec<Measurement>,
    /// Optimizer steps taken.
    pub steps: usize,
    /// Seconds that they took, measurements included.
    pub seconds: f64,
}

impl From<Checkpoint> for LayerTrained {
    fn from(c: Checkpoint) -> Self {
        Self {
            best: c.best,
            steps: c.header.step,
            seconds: c.header.seconds,
            uncorrected_loss: c.header.uncorrected_loss,
            initial_loss: c.header.initial_loss,
            best_loss: c.header.best_loss,
            measurements: c.header.measurements,
        }
    }
}

/// Shows the steps of all layers as one piece of work; what [`crate::workers`] counts are layers.
pub struct Progress<'a> {
    observer: &'a dyn Observer,
    /// Whether layers are to be told apart.
    several: bool,
}

impl<'a> Progress<'a> {
    pub fn new(observer: &'a dyn Observer, layers: usize, steps: usize) -> Self {
        observer.begin_units("training", layers * steps, "steps");
        Self { observer, several: layers > 1 }
    }

    /// The layers are done, or given up.
    pub fn close(&self) {
        self.observer.end();
    }

    /// Counts steps, also those that a layer that stops early, or goes on from a checkpoint, does not take.
    pub fn advance(&self, steps: usize) {
        (0..steps).for_each(|_| self.observer.step());
    }

    /// Says how training goes.
    pub fn show(&self, m: &Measurement) {
        let layer = if self.several { format!("layer {}: ", m.layer) } else { String::new() };
        self.observer.say(&format!("{layer}loss {:.4}, held out {:.4}", m.loss, m.held_out));
    }
}

impl Observer for Progress<'_> {
    fn begin(&self, _: &str, _: usize) {}
    fn step(&self) {}
    fn end(&self) {}
    fn cancelled(&self) -> bool {
        self.observer.cancelled()
    }
}

/// One layer to be trained.
pub struct LayerTask<'a> {
    pub key: KeyScheme,
    pub loss: Loss,
    pub layer: usize,
    pub site: AttentionSite,
    pub quantizer: &'a BaseQuantizer,
    /// Training windows, then the held-out ones.
    pub windows: &'a [Captured],
    pub held_out: usize,
    pub candidates: &'a [Basis],
    /// Heads that keep their initial parameters.
    pub settled: &'a [usize],
    pub settings: &'a Settings,
    pub seed: u64,
    pub device: Device,
}

/// Samples, kept or made anew.
struct Samples<'a> {
    task: &'a LayerTask<'a>,
    kept: Option<Vec<Sample>>,
}

impl<'a> Samples<'a> {
    fn new(task: &'a LayerTask<'a>) -> Self {
        let (q, k) = task.windows[0].tensors(&task.device);
        let ([_, heads, tokens, d], kv_heads) = (q.dims(), k.dims()[1]);
        let bytes = Sample::bytes(heads, kv_heads, d, tokens) * task.windows.len() as u64;
        let kept = (bytes <= SAMPLE_BYTES).then(|| (0..task.windows.len()).map(|i| task.sample(i)).collect());
        Self { task, kept }
    }

    fn with<T>(&self, window: usize, work: impl FnOnce(&Sample) -> T) -> T {
        match &self.kept {
            Some(kept) => work(&kept[window]),
            None => work(&self.task.sample(window)),
        }
    }

    /// Mean loss of each head over windows.
    fn mean(&self, windows: std::ops::Range<usize>, codec: &Codec) -> Vec<f64> {
        let n = windows.len() as f64;
        let mut sums: Vec<f64> = Vec::new();
        for window in windows {
            let losses = self.with(window, |sample| codec.loss(sample).by_head);
            sums.resize(losses.len(), 0.0);
            sums.iter_mut().zip(losses).for_each(|(sum, loss)| *sum += loss / n);
        }
        sums
    }
}

impl LayerTask<'_> {
    fn sample(&self, window: usize) -> Sample {
        let (q, k) = self.windows[window].tensors(&self.device);
        Sample::new(self.loss, self.quantizer, &self.site, &q, &k)
    }

    fn train_windows(&self) -> usize {
        self.windows.len() - self.held_out
    }

    fn shape(&self) -> [usize; 3] {
        let basis = &self.candidates[0];
        [basis.side_heads, basis.head_dim, basis.rank]
    }

    fn codec(&self, point: &Point, device: &Device) -> Codec {
        let shape @ [heads, d, _] = self.shape();
        let base = point.base([heads, d], device).map(|parts| self.quantizer.clone().with_parts(parts));
        Codec { correction: point.correction(&self.key, shape, device), base }
    }

    /// Trains to the end, from the last checkpoint if there is one.
    pub fn run(&self, folder: &StateFolder, progress: &Progress) -> Result<LayerTrained, LabError> {
        train(&Samples::new(self), self.layer, folder, progress).map(LayerTrained::from)
    }
}

/// What is trained as one: a layer, or all of them.
pub trait Course {
    fn settings(&self) -> &Settings;
    /// Where training begins.
    fn begin(&self) -> Result<Checkpoint, LabError>;
    /// One step of the optimizer.
    fn step(&self, c: &mut Checkpoint) -> Result<(), LabError>;
    /// Measures held-out windows, and takes note of what has got better.
    fn measure(&self, c: &mut Checkpoint) -> Result<(), LabError>;
}

/// Trains to the end, from checkpoint `at` of the folder if there is one.
pub fn train(
    course: &impl Course,
    at: usize,
    folder: &StateFolder,
    progress: &Progress,
) -> Result<Checkpoint, LabError> {
    let begun = Instant::now();
    let settings = course.settings();
    let mut c = match folder.load(at)? {
        Some(checkpoint) if checkpoint.header.finished => {
            progress.advance(settings.steps);
            return Ok(checkpoint);
        }
        Some(checkpoint) => checkpoint,
        None => course.begin()?,
    };
    let before = c.header.seconds;
    let save = |c: &mut Checkpoint| {
        c.header.seconds = before + begun.elapsed().as_secs_f64();
        folder.save(at, c)
    };
    progress.advance(c.header.step);
    while !c.header.finished {
        if progress.cancelled() {
            save(&mut c)?;
            return Err(LabError::Interrupted);
        }
        course.step(&mut c)?;
        progress.advance(1);
        let last = c.header.step == settings.steps;
        if last || c.header.step.is_multiple_of(settings.measure_every) {
            course.measure(&mut c)?;
            progress.show(&c.header.measurements[c.header.measurements.len() - 1]);
            c.header.finished = last || c.header.idle >= settings.patience;
        }
        if !c.header.finished && c.header.step.is_multiple_of(settings.save_every) {
            save(&mut c)?;
        }
    }
    progress.advance(settings.steps - c.header.step);
    save(&mut c)?;
    Ok(c)
}

impl Course for Samples<'_> {
    fn settings(&self) -> &Settings {
        self.task.settings
    }

    /// For each head the candidate of the least training loss.
    fn begin(&self) -> Result<Checkpoint, LabError> {
        let task = self.task;
        let train = 0..task.train_windows();
        let points: Vec<Point> =
            task.candidates.iter().flat_map(|b| initial(&task.key, task.settings, b, task.layer)).collect();
        let losses: Vec<Vec<f64>> =
            points.iter().map(|p| self.mean(train.clone(), &task.codec(p, &task.device))).collect();
        let heads = losses[0].len();
        let mut now = points[0].clone();
        let mut initial_train = 0.0;
        for head in 0..heads {
            let own: Vec<f64> = losses.iter().map(|of_heads| of_heads[head]).collect();
            let best = (0..own.len()).fold(0, |best, i| if own[i] < own[best] { i } else { best });
            now.take_head(&points[best], head, heads);
            initial_train += own[best];
        }
        let held_out =
            |point: &Point| self.mean(task.train_windows()..task.windows.len(), &task.codec(point, &task.device));
        let losses = InitialLosses {
            train: initial_train,
            held_out: held_out(&now),
            uncorrected: held_out(&now.without_correction()),
        };
        Ok(Checkpoint::new(task.layer, now, losses, task.settled.len() == heads))
    }

    fn step(&self, c: &mut Checkpoint) -> Result<(), LabError> {
        let (task, step) = (self.task, c.header.step);
        let fail = |reason: String| LabError::Training { layer: task.layer, step: step + 1, reason };
        let codec = task.codec(&c.now, &task.device.clone().autodiff());
        let windows = batch(task.settings, task.train_windows(), head_seed(task.seed, task.layer, 0), step);
        let share = 1.0 / windows.len() as f64;
        let (mut loss, mut graph) = (0.0, None);
        for window in windows {
            let made = self.with(window, |sample| codec.loss(sample));
            loss += share * made.by_head.iter().sum::<f64>();
            let scaled = made.total.mul_scalar(share);
            graph = Some(graph.map_or(scaled.clone(), |sum: Tensor<1>| sum + scaled));
        }
        c.header.check(loss, task.settings).map_err(fail)?;
        let gradients = graph.ok_or_else(|| fail("no windows".into()))?.backward();
        let rate = learning_rate(task.settings, step);
        let now = updated(&task.key, codec.leaves(), &gradients, rate, step, (&mut c.first, &mut c.second));
        let heads = c.header.best_loss.len();
        c.advance(now, loss, task.settled, heads, task.settings).map_err(fail)
    }

    fn measure(&self, c: &mut Checkpoint) -> Result<(), LabError> {
        let task = self.task;
        let losses = self.mean(task.train_windows()..task.windows.len(), &task.codec(&c.now, &task.device));
        let heads = losses.len();
        c.header.idle += 1;
        for (head, &loss) in losses.iter().enumerate() {
            if loss < c.header.best_loss[head] {
                c.header.best_loss[head] = loss;
                c.best.take_head(&c.now, head, heads);
                c.header.idle = 0;
            }
        }
        let lr = learning_rate(task.settings, c.header.step - 1);
        c.header.note(task.layer, lr, heads, mean(&losses));
        Ok(())
    }
}

/// A closed form as points of several clip factors; columns of U and W get equal norms, which changes no product UWᵀ.
pub fn initial(key: &KeyScheme, settings: &Settings, basis: &Basis, layer: usize) -> Vec<Point> {
    let (heads, d, rank) = (basis.side_heads, basis.head_dim, basis.rank);
    let size = heads * d * rank;
    let own = |all: &[f32]| all[layer * size..(layer + 1) * size].to_vec();
    let mut decoder = own(&basis.decoder);
    let mut encoder = basis.encoder.as_ref().map(|w| own(w));
    if let Some(encoder) = &mut encoder {
        balance(&mut decoder, encoder, [heads, d, rank]);
    }
    let encoder = (!settings.tied).then(|| encoder.unwrap_or_else(|| decoder.clone()));
    let factors = key.base.clip_factors(d).filter(|_| settings.train_base_clip);
    let matrices = settings.train_transform.then(|| vec![0.0; heads * d * d]);
    let unclipped = Point {
        decoder,
        encoder,
        clip: None,
        base_clip: factors.map(|width| vec![1.0; heads * width]),
        base_analysis: matrices.clone(),
        base_synthesis: matrices,
    };
    if !settings.train_clip {
        return vec![unclipped];
    }
    let width = clip_width(key.side.map(|s| s.scales).unwrap_or_default(), rank);
    let clipped = |clip: f32| Point { clip: Some(vec![clip; heads * width]), ..unclipped.clone() };
    INITIAL_CLIPS.map(clipped).to_vec()
}

/// Gives each column of W the norm of the same column of U, which takes it up.
fn balance(decoder: &mut [f32], encoder: &mut [f32], [heads, d, rank]: [usize; 3]) {
    for (head, column) in (0..heads).flat_map(|head| (0..rank).map(move |column| (head, column))) {
        let at = |row: usize| (head * d + row) * rank + column;
        let norm = |x: &[f32]| (0..d).map(|row| f64::from(x[at(row)]).powi(2)).sum::<f64>().sqrt();
        let ratio = (norm(encoder) / norm(decoder)).sqrt();
        if ratio.is_finite() && ratio > 0.0 {
            (0..d).for_each(|row| {
                decoder[at(row)] = (f64::from(decoder[at(row)]) * ratio) as f32;
                encoder[at(row)] = (f64::from(encoder[at(row)]) / ratio) as f32;
            });
        }
    }
}

/// Learning rate of a step, from 0: linear warm-up, then a cosine to zero.
pub fn learning_rate(settings: &Settings, step: usize) -> f64 {
    let s = settings;
    if step < s.warmup {
        return s.lr * (step + 1) as f64 / s.warmup as f64;
    }
    let share = (step - s.warmup) as f64 / (s.steps - s.warmup.min(s.steps - 1)) as f64;
    s.lr * 0.5 * (1.0 + (std::f64::consts::PI * share).cos())
}

/// The windows of a step, of `n`: each epoch is a permutation of its own.
pub fn batch(settings: &Settings, n: usize, seed: u64, step: usize) -> Vec<usize> {
    let at = |position: usize| {
        let mut order: Vec<usize> = (0..n).collect();
        order.shuffle(&mut ChaCha8Rng::seed_from_u64(head_seed(seed, 0, position / n)));
        order[position % n]
    };
    let size = settings.batch.min(n);
    (step * size..(step + 1) * size).map(at).collect()
}

/// The point after one step of AdamW and the constraints; `moments` are read and written.
pub fn updated(
    key: &KeyScheme,
    Leaves { parts, base }: Leaves,
    gradients: &Gradients,
    rate: f64,
    step: usize,
    (first, second): (&mut Point, &mut Point),
) -> Point {
    let gradient = |x: &Tensor<3>| x.grad(gradients).unwrap_or_else(|| x.clone().inner().zeros_like());
    let adam = Adam { rate, time: step, optimizer: adamw() };
    let optional = |x: &Option<Tensor<3>>, first: &mut Option<Vec<f32>>, second: &mut Option<Vec<f32>>| {
        let (x, first, second) = (x.as_ref()?, first.as_mut()?, second.as_mut()?);
        Some(adam.update(x, gradient(x), first, second))
    };
    let decoder = adam.update(&parts.decoder, gradient(&parts.decoder), &mut first.decoder, &mut second.decoder);
    let encoder = optional(&parts.encoder, &mut first.encoder, &mut second.encoder);
    let clip = optional(&parts.clip, &mut first.clip, &mut second.clip);
    let base_clip = optional(&base.clip, &mut first.base_clip, &mut second.base_clip);
    let [analysis, synthesis] = base.transform.map_or([None, None], |both| both.map(Some));
    let base_analysis = optional(&analysis, &mut first.base_analysis, &mut second.base_analysis);
    let base_synthesis = optional(&synthesis, &mut first.base_synthesis, &mut second.base_synthesis);
    let [least, most] = key.base.clip_bounds();
    let retracted = Correction::of(key, Parts { decoder, encoder, clip }).retracted().parts();
    Point {
        decoder: host(retracted.decoder),
        encoder: retracted.encoder.map(host),
        clip: retracted.clip.map(host),
        base_clip: base_clip.map(|c| host(c.clamp(least, most))),
        base_analysis: base_analysis.map(host),
        base_synthesis: base_synthesis.map(host),
    }
}

fn host(x: Tensor<3>) -> Vec<f32> {
    let x = if x.is_autodiff() { x.inner() } else { x };
    x.into_data_as::<f32>().try_to_vec().expect("the data was converted to f32")
}

/// Losses are small numbers of nats, and so are their gradients: nothing but zero is to be drowned by epsilon. No weight decay: UWᵀ
/// has a scale of its own.
fn adamw() -> AdamW {
    AdamWConfig::new().with_beta_2(0.99).with_epsilon(1e-12).with_weight_decay(0.0).build()
}

struct Adam {
    rate: f64,
    time: usize,
    optimizer: AdamW,
}

impl Adam {
    /// One step of a parameter; moments are read and written.
    fn update(&self, x: &Tensor<3>, gradient: Tensor<3>, first: &mut Vec<f32>, second: &mut Vec<f32>) -> Tensor<3> {
        let (x, device) = (x.clone().inner(), gradient.device());
        let shape = x.dims();
        let moment = |values: &Vec<f32>| Tensor::<3>::from_data(TensorData::new(values.clone(), shape), &device);
        let state = (self.time > 0)
            .then(|| AdamWState::new(AdaptiveMomentumState::new(self.time, moment(first), moment(second))));
        let (x, state) = self.optimizer.step(self.rate, x, gradient, state);
        if let Some(state) = state {
            *first = host(state.momentum.moment_1);
            *second = host(state.momentum.moment_2);
        }
        x
    }
}
