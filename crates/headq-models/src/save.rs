//! Writing a model as a folder that transformers, and this crate, read.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use burn::tensor::TensorData;
use safetensors::tensor::{Dtype, TensorView};

use crate::error::ModelError;
use crate::model::LanguageModel;

impl LanguageModel {
    /// Writes `model.safetensors` (f32) and `config.json` into `folder`, which is made if needed.
    ///
    /// Each file appears whole or not at all: it is written under another name, synced and renamed.
    ///
    /// # Errors
    /// If a file cannot be written, or the config cannot be expressed (see [`crate::ModelConfig::to_json`]).
    pub fn save_hf(&self, folder: impl AsRef<Path>) -> Result<(), ModelError> {
        let folder = folder.as_ref();
        let config = format!("{:#}\n", self.config().to_json()?);
        std::fs::create_dir_all(folder).map_err(ModelError::io(folder))?;
        let path = folder.join("model.safetensors");
        let bytes = serialize(&self.to_hf_tensors())
            .map_err(|e| ModelError::Io { path: path.clone(), source: std::io::Error::other(e) })?;
        write_atomically(&path, &bytes)?;
        write_atomically(&folder.join("config.json"), config.as_bytes())
    }
}

fn serialize(tensors: &[(String, TensorData)]) -> Result<Vec<u8>, safetensors::SafeTensorError> {
    let views = tensors
        .iter()
        .map(|(name, data)| Ok((name, TensorView::new(Dtype::F32, data.shape().to_vec(), data.bytes())?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    let metadata = [("format".to_owned(), "pt".to_owned())];
    safetensors::serialize(views, Some(metadata.into()))
}

fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().map_err(|source| {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&temporary);
        ModelError::Io { path: path.to_owned(), source }
    })
}
