//! Trains the small language model that ships with HeadQ, and measures it.
//!
//! ```text
//! cargo run --release --example train-embedded -- --out checkpoints/headq-embedded
//! cargo run --release --example train-embedded -- --report checkpoints/headq-embedded
//! ```
//!
//! The model is a Qwen2 of less than a million parameters that learns the language of [`headq_examples::valley`]. Training pages
//! come from an endless seeded stream; `calibration.txt` and `test.txt` come from other streams of the same seed, so that neither
//! was seen in training. The same seed gives the same files with the same number of threads (`RAYON_NUM_THREADS`).

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Parser;
use headq::DenseAttention;
use headq_examples::valley::{self, PAGE};
use headq_examples::words;
use headq_lab::text::{WindowOptions, load_windows};
use headq_models::{LanguageModel, LoadOptions, ModelConfig, load};
use indicatif::{ProgressBar, ProgressStyle};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Streams of the seed that texts are drawn from.
const TRAINING: u64 = 0;
const CALIBRATION: u64 = 1;
const TEST: u64 = 2;
/// Pages in `calibration.txt` and in `test.txt`.
const TEXT_PAGES: usize = 64;
/// Tokens in a short drill.
const DRILL: usize = 64;
/// Loss that ends the drills: most of what can be recalled is.
const MASTERED: f64 = 1.7;
/// Steps to reach the full learning rate in.
const WARM_UP: f64 = 100.0;
/// Steps between two checkpoints, which `--from` takes up.
const SAVE_EVERY: usize = 200;
/// Steps between two lines of the log.
const LOG_EVERY: u64 = 50;

/// Train the embedded model, or report on it.
#[derive(Debug, Parser)]
struct Options {
    /// Folder to write the model, its tokenizer and its texts to.
    #[arg(long, required_unless_present = "report")]
    out: Option<PathBuf>,
    /// Measure the model in this folder instead of training one.
    #[arg(long, conflicts_with = "out")]
    report: Option<PathBuf>,
    /// Seed of weights and texts.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Go on from the model in this folder, on pages only, instead of starting with drills.
    #[arg(long)]
    from: Option<PathBuf>,
    /// Optimizer steps on pages.
    #[arg(long, default_value_t = 330)]
    steps: usize,
    /// Most steps on drills before that; they end sooner when they are mastered.
    #[arg(long, default_value_t = 1000)]
    drill_steps: usize,
    /// Pages in a step.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Peak learning rate.
    #[arg(long, default_value_t = 2e-3)]
    learning_rate: f64,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match (&options.out, &options.report) {
        (Some(out), _) => train(out, &options),
        (None, Some(folder)) => report(folder, options.seed),
        (None, None) => Err("give --out or --report".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The sizes of the model.
fn config(vocabulary: usize) -> Result<ModelConfig> {
    let json = serde_json::json!({
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": PAGE,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 1000.0,
        "tie_word_embeddings": true,
        "bos_token_id": null,
        "eos_token_id": null,
    });
    Ok(ModelConfig::from_json(&json)?)
}

/// Pages of one stream of the seed, as text or as token ids.
struct Pages(ChaCha8Rng);

impl Pages {
    fn new(seed: u64, stream: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Self(rng)
    }

    fn text(mut self, pages: usize) -> String {
        (0..pages).map(|_| valley::render(&valley::page(&mut self.0))).collect()
    }

    /// Token ids of pages, one after the other.
    fn pages(&mut self, n: usize) -> Result<Vec<u32>> {
        (0..n).flat_map(|_| valley::page(&mut self.0)).map(id).collect()
    }

    /// Token ids of drills.
    fn drills(&mut self, n: usize, length: usize) -> Result<Vec<u32>> {
        (0..n).flat_map(|_| valley::drill(length, &mut self.0)).map(id).collect()
    }
}

fn id(word: &str) -> Result<u32> {
    let found = words::tokens().iter().position(|v| *v == word);
    found.map(|id| id as u32).ok_or_else(|| format!("{word:?} is not in the vocabulary").into())
}

fn train(out: &Path, options: &Options) -> Result<()> {
    let device = Device::flex().autodiff();
    device.seed(options.seed);
    let (mut model, drill_steps) = match &options.from {
        Some(folder) => (load(folder, &device, &LoadOptions::default())?.model, 0),
        None => (LanguageModel::init(&config(words::tokens().len())?, &device), options.drill_steps),
    };
    // Clipping is per parameter, as Burn has it.
    let clipping = burn::optim::grad_clipping::GradientClippingConfig::Norm(1.0);
    let mut optimizer: ModuleOptimizer = AdamWConfig::new()
        .with_beta_2(0.98)
        .with_epsilon(1e-8)
        .with_weight_decay(0.05)
        .with_grad_clipping(Some(clipping))
        .init();
    let mut pages = Pages::new(options.seed, TRAINING);
    let mut progress = Progress::new("drills", drill_steps)?;
    for step in 0..drill_steps {
        let rate = options.learning_rate * warm_up(step);
        let loss;
        (model, loss) = learn(model, &pages.drills(options.batch * PAGE / DRILL, DRILL)?, DRILL, rate, &mut optimizer)?;
        if progress.step(loss) < MASTERED {
            break;
        }
    }
    progress.finish();
    write_texts(out, options.seed)?;
    model.valid().save_hf(out)?;
    let mut progress = Progress::new("pages", options.steps)?;
    for step in 0..options.steps {
        let rate = options.learning_rate * warm_up(step) * cosine(step as f64 / options.steps as f64);
        let drills = if step < options.steps / 2 && options.from.is_none() { options.batch / 4 } else { 0 };
        let mut tokens = pages.pages(options.batch - drills)?;
        tokens.extend(pages.drills(drills, PAGE)?);
        let loss;
        (model, loss) = learn(model, &tokens, PAGE, rate, &mut optimizer)?;
        progress.step(loss);
        if (step + 1) % SAVE_EVERY == 0 {
            model.valid().save_hf(out)?;
        }
    }
    progress.finish();
    model.valid().save_hf(out)?;
    eprintln!("wrote {}", out.display());
    report(out, options.seed)
}

/// Writes what the model is used with.
fn write_texts(out: &Path, seed: u64) -> Result<()> {
    fs::create_dir_all(out)?;
    let tokenizer = words::tokenizer().and_then(|t| t.to_string(true)).map_err(|e| e.to_string())?;
    write_atomically(&out.join("tokenizer.json"), &(tokenizer + "\n"))?;
    for (name, stream) in [("calibration.txt", CALIBRATION), ("test.txt", TEST)] {
        write_atomically(&out.join(name), &Pages::new(seed, stream).text(TEXT_PAGES))?;
    }
    Ok(())
}

/// A bar on a terminal, and a line now and then.
struct Progress {
    bar: ProgressBar,
    what: &'static str,
    recent: f64,
}

impl Progress {
    fn new(what: &'static str, steps: usize) -> Result<Self> {
        let template = format!("{what} {{wide_bar}} {{pos}}/{{len}} steps, {{elapsed}} + {{eta}} left, loss {{msg}}");
        let bar = ProgressBar::new(steps as u64).with_style(ProgressStyle::with_template(&template)?);
        Ok(Self { bar, what, recent: f64::NAN })
    }

    /// Counts a step; returns the mean loss of about the last twenty.
    fn step(&mut self, loss: f64) -> f64 {
        self.recent = if self.recent.is_nan() { loss } else { 0.95 * self.recent + 0.05 * loss };
        self.bar.set_message(format!("{:.3}", self.recent));
        self.bar.inc(1);
        if self.bar.position().is_multiple_of(LOG_EVERY) {
            self.log();
        }
        self.recent
    }

    fn log(&self) {
        let (step, seconds) = (self.bar.position(), self.bar.elapsed().as_secs());
        self.bar.suspend(|| eprintln!("{} {step:5}, {seconds:4} s: loss {:.4}", self.what, self.recent));
    }

    fn finish(self) {
        if self.bar.position() > 0 {
            self.log();
        }
        self.bar.finish_and_clear();
    }
}

/// Linear from 0 to 1 over the first steps.
fn warm_up(step: usize) -> f64 {
    ((step + 1) as f64 / WARM_UP).min(1.0)
}

/// From 1 at 0 to a twentieth at 1.
fn cosine(done: f64) -> f64 {
    0.525 + 0.475 * (std::f64::consts::PI * done).cos()
}

/// One step of the optimizer; returns the model and the loss before the step.
fn learn(
    model: LanguageModel,
    tokens: &[u32],
    length: usize,
    rate: f64,
    optimizer: &mut ModuleOptimizer,
) -> Result<(LanguageModel, f64)> {
    let loss = cross_entropy(&model, tokens, length)?;
    let value = loss.clone().into_data().convert::<f32>().try_to_vec::<f32>()?[0];
    if !value.is_finite() {
        return Err("the loss is not finite; lower --learning-rate".into());
    }
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    Ok((optimizer.step(rate, model, gradients), f64::from(value)))
}

/// Mean loss of sequences of `length` tokens, each token after the first one predicted, in nats.
fn cross_entropy(model: &LanguageModel, tokens: &[u32], length: usize) -> Result<Tensor<1>> {
    let sequences = tokens.chunks(length);
    let batch = sequences.len();
    let inputs: Vec<u32> = sequences.clone().flat_map(|s| &s[..length - 1]).copied().collect();
    let targets: Vec<i32> = sequences.flat_map(|s| &s[1..]).map(|&t| t as i32).collect();
    let rows = targets.len();
    let targets: Tensor<2, Int> = Tensor::from_data(TensorData::new(targets, [rows, 1]), &model.device());
    let logits = model.forward(model.ids(&inputs, batch, 0)?, 0, &mut DenseAttention::new());
    let logits: Tensor<2> = logits.reshape([rows, model.config().vocab_size]);
    Ok(-log_softmax(logits, 1).gather(1, targets).mean())
}

fn write_atomically(path: &Path, text: &str) -> Result<()> {
    Ok(headq_lab::artifact::write_atomic(path, text.as_bytes())?)
}

/// Prints what the folder's README quotes: sizes, and perplexities of `test.txt`.
fn report(folder: &Path, seed: u64) -> Result<()> {
    let loaded = load(folder, &Device::flex(), &LoadOptions::default())?;
    let tokenizer = loaded.tokenizer()?;
    let options = WindowOptions { max_chars: None, context: PAGE, windows: TEXT_PAGES, add_bos: false };
    let test = load_windows(&folder.join("test.txt"), &tokenizer, &options)?;
    let counted = Pages::new(seed, TRAINING).pages(1000)?;
    let mut counts = vec![1.0; tokenizer.vocab_size()];
    counted.iter().for_each(|&t| counts[t as usize] += 1.0);
    let total: f64 = counts.iter().sum();
    let (mut unigram, mut dense, mut tokens) = (0.0, 0.0, 0);
    for window in &test.windows {
        let (inputs, targets) = (&window[..PAGE - 1], &window[1..]);
        let hidden = loaded.model.hidden(loaded.model.ids(inputs, 1, 0)?, 0, &mut DenseAttention::new());
        dense += loaded.model.token_nll(hidden, targets)?.iter().sum::<f64>();
        unigram -= targets.iter().map(|&t| (counts[t as usize] / total).ln()).sum::<f64>();
        tokens += targets.len();
    }
    println!("fingerprint          {}", loaded.fingerprint);
    println!("parameters           {}", loaded.description.parameters);
    println!("vocabulary           {}", tokenizer.vocab_size());
    println!("test tokens          {tokens} of {TEXT_PAGES} pages");
    println!("unigram perplexity   {:.2}", (unigram / tokens as f64).exp());
    println!("model's perplexity   {:.4}", (dense / tokens as f64).exp());
    for file in ["model.safetensors", "config.json", "tokenizer.json", "calibration.txt", "test.txt"] {
        println!("{file:20} {} bytes", fs::metadata(folder.join(file))?.len());
    }
    Ok(())
}
