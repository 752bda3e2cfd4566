//! Which files of a repository a model needs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::name::{HubName, is_inside};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// Small files that belong to a model, where they are there.
const COMPANIONS: [&str; 4] = [CONFIG, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];

/// Weights in formats that are not read.
const UNREAD: [&str; 8] = [".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".tflite"];

/// A model in a repository.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The one file that is loaded; `None` where it is the folder.
    pub file: Option<String>,
    /// What is needed, in the order to fetch it: the weights last, so that where they are, all is.
    pub files: Vec<String>,
    /// That of them that names further ones, to be read by [`shards`].
    pub index: Option<String>,
}

impl Choice {
    /// What is loaded, below a folder.
    pub fn model(&self, folder: &Path) -> PathBuf {
        self.file.as_ref().map_or(folder.to_owned(), |file| folder.join(file))
    }
}

/// Chooses among the files of a repository: the file asked for; else safetensors; else the only GGUF file; else the only ONNX file.
///
/// # Errors
/// What is there instead, and what to do.
pub(crate) fn choose(name: &HubName, files: &[String]) -> Result<Choice, String> {
    if let Some(file) = &name.file {
        return match (files.contains(file), parts(file)) {
            (true, None) => Ok(one_file(file, files)),
            (true, Some(count)) => Err(split(file, count)),
            (false, _) => Err(format!("no such file in the repository{}", candidates(name, files))),
        };
    }
    let has = |file: &str| files.iter().any(|f| f == file);
    let weights = [SINGLE, INDEX].into_iter().find(|file| has(file));
    if let Some(weights) = weights.filter(|_| has(CONFIG)) {
        let mut files: Vec<String> = COMPANIONS.into_iter().filter(|f| has(f)).map(Into::into).collect();
        files.push(weights.into());
        return Ok(Choice { file: None, files, index: (weights == INDEX).then(|| INDEX.into()) });
    }
    for ending in [".gguf", ".onnx"] {
        let mut found = files.iter().filter(|f| f.ends_with(ending) && parts(f).is_none());
        match (found.next(), found.count()) {
            (None, _) => {}
            (Some(one), 0) => return Ok(one_file(one, files)),
            (Some(_), more) => {
                let reason = format!("the repository has {} {ending} files", more + 1);
                return Err(reason + &candidates(name, files));
            }
        }
    }
    let part = files.iter().find_map(|file| Some((file, parts(file)?)));
    Err(match (weights, part) {
        (Some(weights), _) => format!("the repository has {weights}, but no {CONFIG} that says what it is"),
        (None, Some((file, count))) => split(file, count),
        (None, None) => nothing_usable(files),
    })
}

/// The shards that an index names.
///
/// # Errors
/// If it is no index, or names files outside its folder.
pub(crate) fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } =
        serde_json::from_slice(index).map_err(|e| format!("{INDEX} is not a safetensors index ({e})"))?;
    let shards: BTreeSet<String> = weight_map.into_values().collect();
    match shards.iter().find(|shard| !is_inside(shard) || !shard.ends_with(".safetensors")) {
        Some(shard) => {
            Err(format!("{INDEX} names the shard {shard:?}, which is not a safetensors file of the repository"))
        }
        None => Ok(shards),
    }
}

/// A GGUF file is whole; an ONNX file may keep its weights in files beside it, which exporters name after it.
fn one_file(file: &str, files: &[String]) -> Choice {
    let mut needed = Vec::new();
    if let Some(stem) = file.strip_suffix(".onnx") {
        let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
        let beside = |f: &String| match f.rsplit_once('/') {
            Some((of, name)) => of == folder && COMPANIONS.contains(&name),
            None => COMPANIONS.contains(&f.as_str()),
        };
        let data = |f: &String| {
            let rest = f.strip_prefix(stem).and_then(|rest| rest.strip_prefix(".onnx"));
            rest.is_some_and(|rest| rest.starts_with("_data") || rest.starts_with(".data"))
        };
        needed.extend(files.iter().filter(|f| beside(f)).cloned());
        needed.extend(files.iter().filter(|f| data(f)).cloned());
    }
    needed.push(file.into());
    Choice { file: Some(file.into()), files: needed, index: None }
}

/// The number of files that a GGUF model is split over, by the names that llama.cpp gives them: `NAME-00001-of-00003.gguf`.
fn parts(file: &str) -> Option<u32> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (_, part) = rest.rsplit_once('-')?;
    let numbered = [part, count].iter().all(|n| n.len() == 5 && n.bytes().all(|b| b.is_ascii_digit()));
    count.parse().ok().filter(|count| numbered && *count > 1)
}

fn split(file: &str, count: u32) -> String {
    format!(
        "{file} is one of {count} files that a GGUF model is split over, which is not supported; name a model in one file, or fetch the \
         parts and merge them with llama.cpp's gguf-split --merge"
    )
}

/// The models that could have been named, as a clause.
fn candidates(name: &HubName, files: &[String]) -> String {
    let models: Vec<String> = files
        .iter()
        .filter(|f| (f.ends_with(".gguf") && parts(f).is_none()) || f.ends_with(".onnx"))
        .map(|f| name.with_file(f).to_string())
        .collect();
    match models.as_slice() {
        [] => String::from(", nor any other .gguf or .onnx file"),
        models => format!("; name one of them: {}", models.join(", ")),
    }
}

fn nothing_usable(files: &[String]) -> String {
    let named = |wanted: &dyn Fn(&str) -> bool| -> Vec<&str> {
        files.iter().map(String::as_str).filter(|f| wanted(f)).take(5).collect()
    };
    let safetensors = named(&|f| f.ends_with(".safetensors"));
    let unread = named(&|f| UNREAD.iter().any(|ending| f.ends_with(ending)));
    let found = match (safetensors.as_slice(), unread.as_slice()) {
        ([], []) => String::new(),
        ([], unread) => {
            format!(
                ", only {}; convert the model with transformers' save_pretrained(..., safe_serialization=True)",
                unread.join(", ")
            )
        }
        (others, _) => format!("; {} may be an adapter or a part of another model", others.join(", ")),
    };
    format!("the repository has no {SINGLE}, no {INDEX}, no .gguf and no .onnx file{found}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(name: &str, files: &[&str]) -> Result<Choice, String> {
        choose(&name.parse().unwrap(), &files.iter().map(|f| f.to_string()).collect::<Vec<_>>())
    }

    #[track_caller]
    fn needs(name: &str, files: &[&str], file: Option<&str>, expected: &[&str]) {
        let choice = chosen(name, files).unwrap();
        assert_eq!(
            (choice.file.as_deref(), choice.files.iter().map(String::as_str).collect()),
            (file, expected.to_vec())
        );
    }

    #[test]
    fn only_what_a_model_needs() {
        let clutter =
            ["README.md", ".gitattributes", "pytorch_model.bin", "flax_model.msgpack", "tf_model.h5", "vocab.json"];
        let model = ["tokenizer.json", "model.safetensors", "config.json", "onnx/model.onnx", "model.gguf"];
        let expected = ["config.json", "tokenizer.json", "model.safetensors"];
        needs("hf:a/b", &[&clutter[..], &model].concat(), None, &expected);
        needs("hf:a/b:model.gguf", &[&clutter[..], &model].concat(), Some("model.gguf"), &["model.gguf"]);
        needs("hf:a/b", &["README.md", "q4/only.gguf", "config.json"], Some("q4/only.gguf"), &["q4/only.gguf"]);
    }

    #[test]
    fn onnx_comes_with_its_data_and_its_tokenizer() {
        let files = [
            "config.json",
            "onnx/model.onnx",
            "onnx/model.onnx_data",
            "onnx/model.onnx_data_1",
            "onnx/model_fp16.onnx_data",
            "other/tokenizer.json",
            "tokenizer.json",
        ];
        let expected =
            ["config.json", "tokenizer.json", "onnx/model.onnx_data", "onnx/model.onnx_data_1", "onnx/model.onnx"];
        needs("hf:a/b", &files, Some("onnx/model.onnx"), &expected);
        needs("hf:a/b", &["m.onnx", "m.onnx.data"], Some("m.onnx"), &["m.onnx.data", "m.onnx"]);
    }

    #[test]
    fn several_models_are_listed() {
        let reason = chosen("hf:a/b@v1", &["x.Q4.gguf", "x.Q8.gguf", "config.json"]).unwrap_err();
        assert_eq!(
            reason,
            "the repository has 2 .gguf files; name one of them: hf:a/b@v1:x.Q4.gguf, hf:a/b@v1:x.Q8.gguf"
        );
        let reason = chosen("hf:a/b:y.gguf", &["x.gguf"]).unwrap_err();
        assert_eq!(reason, "no such file in the repository; name one of them: hf:a/b:x.gguf");
    }

    #[test]
    fn models_in_parts_are_known_by_their_names() {
        let part = "q8/m.Q8-00001-of-00003.gguf";
        let others = ["q8/m.Q8-00002-of-00003.gguf", "q8/m.Q8-00003-of-00003.gguf"];
        let all = [&[part][..], &others].concat();
        for name in ["hf:a/b", "hf:a/b:q8/m.Q8-00001-of-00003.gguf", "hf:a/b:q8/m.Q8-00003-of-00003.gguf"] {
            let reason = chosen(name, &all).unwrap_err();
            assert!(reason.contains("is one of 3 files") && reason.contains("gguf-split --merge"), "{reason}");
        }
        // A whole one beside them is the only one that can be meant.
        needs("hf:a/b", &[&all[..], &["m.Q4.gguf"]].concat(), Some("m.Q4.gguf"), &["m.Q4.gguf"]);
        let reason = chosen("hf:a/b:x.gguf", &[&all[..], &["m.Q4.gguf"]].concat()).unwrap_err();
        assert_eq!(reason, "no such file in the repository; name one of them: hf:a/b:m.Q4.gguf");
        for whole in ["m-00001-of-00001.gguf", "best-of-10.gguf", "m-1-of-3.gguf", "state-of-00003.gguf"] {
            needs("hf:a/b", &[whole], Some(whole), &[whole]);
        }
    }

    #[test]
    fn what_is_there_instead() {
        let pickled = chosen("hf:a/b", &["config.json", "pytorch_model.bin"]).unwrap_err();
        assert!(
            pickled.contains("only pytorch_model.bin; convert") && pickled.contains("safe_serialization"),
            "{pickled}"
        );
        let adapter = chosen("hf:a/b", &["adapter_model.safetensors"]).unwrap_err();
        assert!(adapter.contains("adapter_model.safetensors may be an adapter"), "{adapter}");
        let unnamed = chosen("hf:a/b", &["model.safetensors"]).unwrap_err();
        assert!(unnamed.contains("no config.json"), "{unnamed}");
        assert!(chosen("hf:a/b", &[]).unwrap_err().ends_with("no .onnx file"));
    }

    #[test]
    fn shards_are_files_of_the_repository() {
        let index = |shard: &str| serde_json::json!({"weight_map": {"x": "a.safetensors", "y": shard}}).to_string();
        let found = shards(index("b.safetensors").as_bytes()).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a.safetensors", "b.safetensors"]);
        for shard in ["../b.safetensors", "/b.safetensors", "b.bin", ""] {
            assert!(shards(index(shard).as_bytes()).unwrap_err().contains("names the shard"), "{shard}");
        }
        assert!(shards(b"{}").unwrap_err().contains("not a safetensors index"));
    }
}
