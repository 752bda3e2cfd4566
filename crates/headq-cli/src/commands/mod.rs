//! One file per subcommand.

pub mod basis;
pub mod bench;
pub mod calibrate;
pub mod compare;
pub mod devices;
pub mod diagnose;
pub mod eval;
pub mod finetune;
pub mod generate;
pub mod inspect;
pub mod pull;
pub mod report;
pub mod run;
pub mod search;
pub mod serve;
pub mod suite;
pub mod sweep;

use std::io::Write;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use headq::device::Precision;
use headq::{DenseType, DeviceName, Scheme};
use headq_lab::LabError;
use headq_lab::memory::{self, Estimate};
use headq_lab::text::{WindowOptions, Windows, load_windows};
use headq_models::{Description, LoadOptions, LoadedModel, Tokenizer, describe, load};
use serde_json::Value;

use crate::args::{Global, TextArgs};
use crate::progress::Bars;

/// What passes over windows need memory for, beside activations of the dense model.
#[derive(Clone, Copy)]
pub enum Need<'a> {
    /// Nothing, or little.
    Passes,
    /// Passes back, too.
    Gradients,
    /// Packed caches of one of these schemes at a time, dense tokens in that type.
    Caches(&'a [Scheme], DenseType),
}

/// What every command has.
pub struct Context {
    pub json: bool,
    pub bars: Bars,
    pub device: Option<DeviceName>,
    pub dtype: Option<Precision>,
    pub seed: Option<u64>,
    pub threads: usize,
    /// How models are loaded.
    pub load_options: LoadOptions,
}

impl Context {
    pub fn new(global: Global) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = global.threads.map_or(cores, |n| n.get());
        if threads > cores {
            tracing::warn!("--threads {threads}: using the {cores} cores that this machine has");
        }
        let threads = threads.min(cores);
        // Loading hashes and converts weights on this pool; passes over windows have pools of their own.
        if let Err(error) = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global() {
            tracing::warn!("using the default number of threads: {error}");
        }
        for (i, (key, _)) in global.model_set.iter().enumerate() {
            if global.model_set[..i].iter().any(|(other, _)| other == key) {
                tracing::warn!("--model-set {key} is given more than once; the last one counts");
            }
        }
        let load_options = LoadOptions {
            precision: global.dtype.unwrap_or_default(),
            config: global.model_config,
            settings: global.model_set.into_iter().collect(),
            ..LoadOptions::default()
        };
        let bars = Bars::new(global.quiet);
        Self {
            json: global.json,
            bars,
            device: global.device,
            dtype: global.dtype,
            seed: global.seed,
            threads,
            load_options,
        }
    }

    pub fn device_name(&self) -> String {
        self.device.as_ref().unwrap_or(&DeviceName::Flex).to_string()
    }

    /// A device by name, tried in a process of its own where a broken driver could end this one.
    pub fn device(&self, name: &str) -> Result<Device, LabError> {
        let name: DeviceName = name.parse()?;
        devices::check(&name)?;
        Ok(name.open()?)
    }

    pub fn dtype(&self) -> Precision {
        self.dtype.unwrap_or_default()
    }

    /// What results call the device that a model is on.
    pub fn device_label(&self, model: &LoadedModel) -> Result<String, LabError> {
        let name: DeviceName = self.device_name().parse()?;
        Ok(name.label(&model.model.device(), self.dtype()))
    }

    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }

    /// Prints a result: one JSON object, or text. A reader that closes the pipe early has what it wanted.
    pub fn print(&self, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) -> Result<(), LabError> {
        let shown = if self.json { format!("{:#}\n", json()) } else { format!("{}\n", text().trim_end()) };
        let mut out = std::io::stdout().lock();
        match out.write_all(shown.as_bytes()).and_then(|()| out.flush()) {
            Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(LabError::Io { path: "standard output".into(), source })
            }
            _ => Ok(()),
        }
    }

    /// The file or folder of a model, fetched first where it is named and not there yet.
    pub fn locate(&self, model: &Path) -> Result<PathBuf, LabError> {
        headq_lab::hub::locate(model, &self.bars)
    }

    /// Loads the texts and the model, saying first what it will take.
    pub fn load(&self, model: &Path, text: &TextArgs) -> Result<(LoadedModel, Vec<Windows>), LabError> {
        self.load_for(model, text, Need::Passes)
    }

    /// The same, for more than dense passes.
    pub fn load_for(&self, model: &Path, text: &TextArgs, need: Need) -> Result<(LoadedModel, Vec<Windows>), LabError> {
        let device = self.device(&self.device_name())?;
        let options = &self.load_options;
        let model = self.locate(model)?;
        let described = describe(&model, options)?;
        // Texts first: they are quick to read, and most mistakes are in them.
        let tokenizer = headq_models::tokenizer(&model, options)?;
        let windows = windows(&text.text, &tokenizer, text)?;
        self.say_memory(&described, text.context, windows.iter().map(|w| w.windows.len()).sum(), need);
        Ok((load(model, &device, options)?, windows))
    }

    /// Says what the passes of a loaded model will need: dense ones, and packed ones under some schemes.
    pub fn announce(&self, model: &LoadedModel, context: usize, schemes: &[Scheme]) {
        self.say_memory(&model.description, context, usize::MAX, Need::Caches(schemes, DenseType::F32));
    }

    /// Says what a pass will need, and warns where the machine has less.
    fn say_memory(&self, model: &Description, context: usize, windows: usize, need: Need) {
        let workers = self.threads.min(windows.max(1));
        let estimate = Estimate::of(&model.config, model.parameters, self.dtype(), context, workers);
        let estimate = match need {
            Need::Passes => estimate,
            Need::Gradients => estimate.with_gradients(&model.config, context, workers),
            Need::Caches(schemes, dense) => estimate.with_caches(&model.config, schemes, dense, context, workers),
        };
        let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
        let free = memory::available();
        let of = free.map_or(String::new(), |free| format!(" of {:.1} GiB available", gib(free)));
        self.bars.note(&format!(
            "needs about {:.2} GiB{of}: weights {:.2}, {workers} windows of {context} tokens in flight {:.2}",
            gib(estimate.total()),
            gib(estimate.weights),
            gib(estimate.activations)
        ));
        if context > model.config.max_position_embeddings {
            tracing::warn!(
                "windows of {context} tokens exceed the {} that this model was trained on; expect high perplexities",
                model.config.max_position_embeddings
            );
        }
        if free.is_some_and(|free| free < estimate.total()) {
            tracing::warn!("this machine may not have enough memory; fewer --threads or a smaller --context need less");
        }
    }
}

fn windows(paths: &[PathBuf], tokenizer: &Tokenizer, text: &TextArgs) -> Result<Vec<Windows>, LabError> {
    let options = WindowOptions {
        max_chars: text.max_chars,
        context: text.context,
        windows: text.windows,
        add_bos: text.add_bos,
    };
    paths.iter().map(|path| load_windows(path, tokenizer, &options)).collect()
}

/// Any serialisable result as JSON.
pub fn json(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_else(|e| Value::String(e.to_string()))
}
