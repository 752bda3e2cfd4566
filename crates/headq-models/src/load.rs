//! From a path to a model.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use headq::device::Precision;
use serde_json::{Map, Value};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::fingerprint::Fingerprint;
use crate::gguf_config;
use crate::model::LanguageModel;
use crate::onnx_config;
use crate::source::{GgufFile, GgufSource, OnnxModel, SafetensorsSource, TensorSource};
use crate::tokenizer::Tokenizer;
use crate::weights;

/// How to load a model.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Name of the config file within a model folder; `config.json` by default.
    pub config_file: String,
    /// Type of the matrices on the device.
    pub precision: Precision,
    /// A config from elsewhere, in place of the model's own or of one that it lacks; not for GGUF files, which have theirs
    /// inside.
    pub config: Option<PathBuf>,
    /// Keys of the config to add or replace, e.g. `rope_theta` of an ONNX file that comes without a config.
    pub settings: Map<String, Value>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { config_file: "config.json".into(), precision: Precision::default(), config: None, settings: Map::new() }
    }
}

/// What is known of a model without reading its weights.
#[derive(Debug, Clone)]
pub struct Description {
    /// The file or folder as given.
    pub path: PathBuf,
    /// Format and number of files, e.g. `safetensors, 3 shards`.
    pub format: String,
    /// The configuration.
    pub config: ModelConfig,
    /// Stored tensors.
    pub tensors: usize,
    /// Element types on disk and how many tensors have each, the most frequent first.
    pub stored_types: Vec<(String, usize)>,
    /// Bytes of all tensors on disk.
    pub bytes: u64,
    /// Parameters of the model, a tied head counted once.
    pub parameters: u64,
}

/// A model ready to run.
pub struct LoadedModel {
    /// The model, on the device asked for.
    pub model: LanguageModel,
    /// Identity, for artifacts.
    pub fingerprint: Fingerprint,
    /// What was loaded.
    pub description: Description,
    tokenizer: TokenizerSource,
}

impl std::fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LoadedModel({}: {})", self.description.path.display(), self.fingerprint)
    }
}

impl LoadedModel {
    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// The model's tokenizer, built on each call.
    ///
    /// # Errors
    /// If the model came without one, or with one that does not fit.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        self.tokenizer.load(self.config())
    }
}

enum TokenizerSource {
    Folder(PathBuf),
    Gguf(Box<GgufFile>),
}

impl TokenizerSource {
    fn load(&self, config: &ModelConfig) -> Result<Tokenizer, ModelError> {
        match self {
            Self::Folder(folder) => Tokenizer::from_folder(folder, config),
            Self::Gguf(header) => Tokenizer::from_gguf(header, config),
        }
    }
}

/// Loads a model: a folder with a config and safetensors, a `.gguf` or `.onnx` file, or a folder with one (in a folder with
/// several ONNX files, `model.onnx` or `onnx/model.onnx`).
///
/// The config of an ONNX file is `config.json` in its folder (in the folder above, if its own is called `onnx`), and is held
/// against what the graph computes. Without one, the graph says most of what is needed, `LoadOptions::settings` the rest.
///
/// # Errors
/// [`ModelError`]: one line that says what is wrong with which file.
pub fn load(path: impl AsRef<Path>, device: &Device, options: &LoadOptions) -> Result<LoadedModel, ModelError> {
    if !options.precision.is_on(device) {
        return Err(ModelError::Precision {
            asked: options.precision,
            known: Precision::ALL.into_iter().filter(|p| p.is_on(device)).collect(),
        });
    }
    let opened = Opened::new(path.as_ref(), options)?;
    let source = opened.source();
    let model = weights::load(&opened.config, source, device, options.precision)?;
    let fingerprint = Fingerprint::new(&opened.config, source);
    let description = opened.describe();
    let tokenizer = match opened.files {
        Files::Folder(folder, _) => TokenizerSource::Folder(folder),
        Files::Gguf(source) => TokenizerSource::Gguf(Box::new(source.into_header())),
    };
    tracing::info!("{}: {fingerprint}", description.path.display());
    Ok(LoadedModel { model, fingerprint, description, tokenizer })
}

/// Reads the config and all headers, and checks that every tensor is there with the right shape; reads no weights.
///
/// # Errors
/// As [`load`].
pub fn describe(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Description, ModelError> {
    let opened = Opened::new(path.as_ref(), options)?;
    weights::check(&opened.config, opened.source())?;
    Ok(opened.describe())
}

/// The fingerprint of a model on disk: as [`describe`], and reads all bytes.
///
/// # Errors
/// As [`load`].
pub fn fingerprint(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Fingerprint, ModelError> {
    let opened = Opened::new(path.as_ref(), options)?;
    weights::check(&opened.config, opened.source())?;
    Ok(Fingerprint::new(&opened.config, opened.source()))
}

/// The tokenizer of a model on disk, without the weights.
///
/// # Errors
/// As [`load`], and if there is no tokenizer or it does not fit.
pub fn tokenizer(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Tokenizer, ModelError> {
    let opened = Opened::new(path.as_ref(), options)?;
    match &opened.files {
        Files::Folder(folder, _) => Tokenizer::from_folder(folder, &opened.config),
        Files::Gguf(source) => Tokenizer::from_gguf(source.header(), &opened.config),
    }
}

enum Files {
    /// Weights, and the folder with the tokenizer.
    Folder(PathBuf, Box<dyn TensorSource>),
    Gguf(GgufSource),
}

/// A model's files, headers read and checked.
struct Opened {
    path: PathBuf,
    config: ModelConfig,
    files: Files,
}

impl Opened {
    fn new(path: &Path, options: &LoadOptions) -> Result<Self, ModelError> {
        let (config, files) = match locate(path, options)? {
            Location::Folder => {
                let own = path.join(&options.config_file);
                let (config, _) = read_config(&own, options)?;
                (config, Files::Folder(path.to_owned(), Box::new(SafetensorsSource::open(path)?)))
            }
            Location::Onnx(file) => open_onnx(&file, options)?,
            Location::Gguf(file) => {
                if options.config.is_some() || !options.settings.is_empty() {
                    return Err(ModelError::Unsupported {
                        file: file.display().to_string(),
                        what: "a config for a GGUF file".into(),
                        hint: "the file has its own; leave out --model-config and --model-set".into(),
                    });
                }
                let source = GgufSource::open(&file)?;
                (gguf_config::config(&source)?, Files::Gguf(source))
            }
        };
        Ok(Self { path: path.to_owned(), config, files })
    }

    fn source(&self) -> &dyn TensorSource {
        match &self.files {
            Files::Folder(_, source) => source.as_ref(),
            Files::Gguf(source) => source,
        }
    }

    fn describe(&self) -> Description {
        let source = self.source();
        let mut stored_types: Vec<(String, usize)> = Vec::new();
        for tensor in source.tensors() {
            let name = tensor.stored.to_string();
            match stored_types.iter_mut().find(|(known, _)| *known == name) {
                Some((_, count)) => *count += 1,
                None => stored_types.push((name, 1)),
            }
        }
        stored_types.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
        Description {
            path: self.path.clone(),
            format: source.format(),
            config: self.config.clone(),
            tensors: source.tensors().len(),
            stored_types,
            bytes: source.total_bytes(),
            parameters: weights::parameter_count(&self.config),
        }
    }
}

enum Location {
    /// A folder with safetensors.
    Folder,
    Onnx(PathBuf),
    Gguf(PathBuf),
}

fn locate(path: &Path, options: &LoadOptions) -> Result<Location, ModelError> {
    let not_a_model = |reason: String| ModelError::NotAModel { path: path.to_owned(), reason };
    match std::fs::metadata(path) {
        Ok(_) => {}
        Err(e) if e.kind() == ErrorKind::NotFound && path.is_symlink() => {
            return Err(not_a_model("a link that leads nowhere".into()));
        }
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Err(ModelError::NotFound(path.to_owned()));
        }
        // No permission, links in a circle.
        Err(e) => return Err(ModelError::io(path)(e)),
    }
    if path.is_file() {
        let other = "not a .gguf or .onnx file; for safetensors give the folder that has config.json";
        return location(path).ok_or_else(|| not_a_model(other.into()));
    }
    let config = path.join(&options.config_file);
    let config = options.config.is_some() || config.is_file() || config.is_symlink();
    if config && SafetensorsSource::is_in(path) {
        return Ok(Location::Folder);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(ModelError::io(path))? {
        files.extend(location(&entry.map_err(ModelError::io(path))?.path()));
    }
    let ggufs = files.iter().any(|f| matches!(f, Location::Gguf(_)));
    let usual = [path.join("model.onnx"), path.join("onnx").join("model.onnx")].into_iter().find(|p| p.is_file());
    match (usual, files.len()) {
        (Some(model), _) if !ggufs => Ok(Location::Onnx(model)),
        (None, _) if config && files.iter().all(|f| matches!(f, Location::Gguf(_))) => Ok(Location::Folder),
        (_, 0) => Err(not_a_model(format!("no {} in this folder, and no .gguf or .onnx file", options.config_file))),
        (_, 1) => Ok(files.remove(0)),
        (_, more) => Err(not_a_model(format!("{more} .gguf and .onnx files in this folder; name one of them"))),
    }
}

/// Where the weights are, by a file's extension.
fn location(path: &Path) -> Option<Location> {
    let extension = path.extension().filter(|_| path.is_file())?;
    if extension.eq_ignore_ascii_case("gguf") {
        return Some(Location::Gguf(path.to_owned()));
    }
    extension.eq_ignore_ascii_case("onnx").then(|| Location::Onnx(path.to_owned()))
}

fn open_onnx(file: &Path, options: &LoadOptions) -> Result<(ModelConfig, Files), ModelError> {
    let model = OnnxModel::open(file)?;
    let own = file.parent().unwrap_or(Path::new(""));
    // Exports for the web keep several ONNX files in a folder of their own, below the config.
    let above = own.parent().filter(|_| own.ends_with("onnx") && !own.join(&options.config_file).is_file());
    let folder = above.unwrap_or(own);
    let beside = Some(folder.join(&options.config_file)).filter(|p| p.is_file());
    let config = match options.config.clone().or(beside) {
        Some(own) => {
            let (config, name) = read_config(&own, options)?;
            onnx_config::check(&config, &options.settings, &name, &model)?;
            config
        }
        None => onnx_config::infer(&model, &options.settings)?,
    };
    let source = model.into_source(&config)?;
    Ok((config, Files::Folder(folder.to_owned(), Box::new(source))))
}

/// The config that was given, or else the model's own, with the keys of the settings in place of its own; and the file's name for
/// messages.
fn read_config(own: &Path, options: &LoadOptions) -> Result<(ModelConfig, String), ModelError> {
    let (path, settings) = (options.config.as_deref().unwrap_or(own), &options.settings);
    let file = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|error| match options.config.is_some() {
        true => {
            let reason = format!("{error}; --model-config (in a run, model_config) takes the config.json of the model");
            ModelError::NotAModel { path: path.to_owned(), reason }
        }
        false => ModelError::io(path)(error),
    })?;
    let json: Value =
        serde_json::from_slice(&bytes).map_err(|e| ModelError::corrupt(&file, format!("not JSON ({e})")))?;
    Ok((ModelConfig::from_json_with(&json, settings, &file)?, file))
}
