//! A folder with a tiny model and a text, and the program run in it.
#![allow(dead_code, clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Output;

use headq_lab::diagnose::data::Diagnosis;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};

pub const ALL: [&str; 10] = [
    "gpt2",
    "llama-tied",
    "llama-untied",
    "llama3-ropescaled",
    "mistral-nosw",
    "mistral-sw16",
    "neox-seqres",
    "pythia",
    "qwen2-tied",
    "qwen2-untied",
];

/// 8 query heads share 2 KV heads of width 16.
pub const GQA: &str = "llama-untied";

pub const BASE: &str = "kivi-2(g=8,r=4)";
pub const SIDE: &str = "kivi-2(g=8,r=4)+score-optimal(rank=4,bits=3)/token-2(c=8)";

/// A stored tensor: type, shape, little-endian bytes.
pub type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// Tensors and the text under `headq` in the metadata.
pub type Artifact = (BTreeMap<String, Stored>, String);

/// Lines of words `w0`…`w511`, the small ones much more often.
pub fn text(words: usize, mut state: u64) -> String {
    let mut text = String::new();
    for i in 0..words {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let uniform = (state >> 40) as f64 / f64::from(1 << 24);
        let word = (512.0 * uniform.powi(4)) as usize;
        let end = if i % 12 == 11 { '\n' } else { ' ' };
        write!(text, "w{word}{end}").unwrap();
    }
    text
}

/// A tokenizer with one token for each of `words` words.
pub fn tokenizer(words: usize) -> Value {
    let vocab: Map<String, Value> = (0..words).map(|i| (format!("w{i}"), json!(i))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w3"},
    })
}

/// A file or folder of the repository.
pub fn repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

fn fixture(name: &str) -> PathBuf {
    repository("crates/headq-models/tests/fixtures/tiny").join(name)
}

/// A temporary folder with `model/`, and three texts that share nothing.
pub struct World(tempfile::TempDir);

impl World {
    pub fn new(model: &str) -> Self {
        let world = Self(tempfile::tempdir().unwrap());
        world.add_model("model", model);
        world.write("text.txt", text(2400, 1));
        world.write("other.txt", text(2400, 2));
        world.write("calibration.txt", text(2400, 3));
        world
    }

    /// The trained model that comes with the program: `text.txt` is its test text, `other.txt` and `calibration.txt` its
    /// calibration text.
    pub fn embedded() -> Self {
        let world = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(world.path("model")).unwrap();
        for (from, to) in [
            ("config.json", "model/config.json"),
            ("model.safetensors", "model/model.safetensors"),
            ("tokenizer.json", "model/tokenizer.json"),
            ("test.txt", "text.txt"),
            ("calibration.txt", "other.txt"),
            ("calibration.txt", "calibration.txt"),
        ] {
            std::fs::copy(repository("checkpoints/headq-embedded").join(from), world.path(to)).unwrap();
        }
        world
    }

    /// Random weights with learned positions, so that heads may have any width.
    pub fn of_heads(layers: usize, heads: usize, width: usize) -> Self {
        let world = Self::new("gpt2");
        let hidden = heads * width;
        world.config(|c| {
            for (key, value) in [("n_layer", layers), ("n_head", heads), ("n_embd", hidden), ("n_inner", 2 * hidden)] {
                c.insert(key.into(), value.into());
            }
        });
        let mut tensors = BTreeMap::new();
        let mut state = 1u64;
        let mut add = |name: String, shape: &[usize]| {
            let value = |_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            };
            let values = (0..shape.iter().product()).map(value);
            tensors.insert(name, (Dtype::F32, shape.to_vec(), values.flat_map(f32::to_le_bytes).collect()));
        };
        add("wte.weight".into(), &[512, hidden]);
        add("wpe.weight".into(), &[256, hidden]);
        let mut linear = |name: String, shape: &[usize]| {
            add(format!("{name}.weight"), shape);
            add(format!("{name}.bias"), &shape[shape.len() - 1..]);
        };
        for layer in 0..layers {
            linear(format!("h.{layer}.ln_1"), &[hidden]);
            linear(format!("h.{layer}.attn.c_attn"), &[hidden, 3 * hidden]);
            linear(format!("h.{layer}.attn.c_proj"), &[hidden, hidden]);
            linear(format!("h.{layer}.ln_2"), &[hidden]);
            linear(format!("h.{layer}.mlp.c_fc"), &[hidden, 2 * hidden]);
            linear(format!("h.{layer}.mlp.c_proj"), &[2 * hidden, hidden]);
        }
        linear("ln_f".into(), &[hidden]);
        world.write_tensors("model/model.safetensors", &tensors, None);
        world
    }

    pub fn add_model(&self, folder: &str, name: &str) {
        std::fs::create_dir(self.path(folder)).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(fixture(name).join(file), self.path(folder).join(file)).unwrap();
        }
        self.write(&format!("{folder}/tokenizer.json"), tokenizer(512).to_string());
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.read(name)).unwrap()
    }

    /// Edits the model's config.
    pub fn config(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        let mut json = self.json("model/config.json");
        edit(json.as_object_mut().unwrap());
        self.write("model/config.json", json.to_string());
    }

    /// Edits the model's tensors.
    pub fn surgery(&self, edit: impl FnOnce(&mut BTreeMap<String, Stored>)) {
        let (mut tensors, _) = self.artifact("model/model.safetensors");
        edit(&mut tensors);
        self.write_tensors("model/model.safetensors", &tensors, None);
    }

    /// The tensors of a file and its `headq` header, empty where there is none.
    pub fn artifact(&self, name: &str) -> Artifact {
        let bytes = self.read(name);
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let header = metadata.metadata().as_ref().and_then(|m| m.get("headq")).cloned().unwrap_or_default();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let own = |t: TensorView| (t.dtype(), t.shape().to_vec(), t.data().to_vec());
        (file.tensors().into_iter().map(|(name, t)| (name, own(t))).collect(), header)
    }

    pub fn write_tensors(&self, name: &str, tensors: &BTreeMap<String, Stored>, header: Option<&str>) {
        let views =
            tensors.iter().map(|(name, (d, shape, data))| (name, TensorView::new(*d, shape.clone(), data).unwrap()));
        let metadata = header.map(|h| [("headq".to_string(), h.to_string())].into());
        self.write(name, safetensors::serialize(views, metadata).unwrap());
    }

    pub fn command(&self, args: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_headq"));
        command.current_dir(self.0.path()).env_remove("HEADQ_LOG").env_remove("HEADQ_TEST_UNSET").args(args);
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Standard output of a command that must succeed.
    #[track_caller]
    pub fn succeeds(&self, args: &[&str]) -> String {
        let output = assert_cmd::Command::from_std(self.command(args)).assert().success().get_output().clone();
        String::from_utf8(output.stdout).unwrap()
    }

    /// The one JSON object that a command prints.
    #[track_caller]
    pub fn prints(&self, args: &[&str]) -> Value {
        let value: Value = serde_json::from_str(&self.succeeds(&[args, &["--json"]].concat())).unwrap();
        assert!(value.is_object());
        value
    }

    /// With `basis.safetensors`, query-pca of rank 2 from `stats.safetensors`.
    pub fn with_basis(self) -> Self {
        let args = "basis stats.safetensors --family query-pca --rank 2 --out basis.safetensors";
        self.succeeds(&args.split(' ').collect::<Vec<_>>());
        self
    }

    /// `headq eval model --text text.txt` in 3 windows of 32 with more arguments, as JSON.
    #[track_caller]
    pub fn eval(&self, args: &[&str]) -> Value {
        self.prints(&[&["eval", "model", "--text", "text.txt", "--context", "32", "--windows", "3"], args].concat())
    }

    /// `headq diagnose model --text text.txt --out made` with more arguments.
    #[track_caller]
    pub fn diagnose(&self, args: &[&str]) -> Diagnosis {
        let printed = self.succeeds(&[&DIAGNOSE, args, &["--json"]].concat());
        serde_json::from_str(&printed).unwrap_or_else(|e| panic!("{e}: {printed}"))
    }

    /// Statistics of [`BASE`] in `stats.safetensors`.
    #[track_caller]
    pub fn calibrated(self) -> Self {
        self.succeeds(&CALIBRATE.split(' ').collect::<Vec<_>>());
        self
    }

    /// Every file below the folder, hidden ones too, with its content.
    pub fn snapshot(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        let mut folders = vec![self.0.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
                if path.is_dir() {
                    files.insert(path.clone(), Vec::new());
                    folders.push(path);
                } else {
                    files.insert(path.clone(), std::fs::read(&path).unwrap());
                }
            }
        }
        files
    }

    /// Names of the files in a folder, sorted.
    pub fn list(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Fills the folder `made`.
pub const DIAGNOSE: [&str; 6] = ["diagnose", "model", "--text", "text.txt", "--out", "made"];

/// A diagnosis of models whose weights are random: small windows, few replicates.
pub const SMALL: [&str; 8] =
    ["--context", "64", "--windows", "4", "--base", "kivi-2(g=8,r=4)", "--threshold", "replicates=100"];

/// Makes `stats.safetensors`.
pub const CALIBRATE: &str = "calibrate model --text calibration.txt --context 32 --windows 4 --base kivi-2(g=8) --out stats.safetensors --quiet";

/// A configuration with statistics, two bases and values.
pub fn config(windows: usize) -> String {
    format!(
        r#"name = "tiny"
model = "model"

[calibrate]
text = "calibration.txt"
context = 32
windows = {windows}

[eval]
text = ["text.txt", "other.txt"]
context = 32
windows = {windows}
schemes = ["{BASE}", "kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)", "{SIDE}"]
"#
    )
}
