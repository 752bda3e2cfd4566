//! A model's configuration: what `config.json` says, parsed into data that the one [`LanguageModel`](crate::LanguageModel) runs on.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::arch::Architecture;
use crate::error::ModelError;

/// Sizes above this are typing errors or attacks, and would overflow products of sizes.
const MAX_SIZE: usize = 1 << 24;

/// What is kept for each layer must not fill the memory before the weights are looked at. The deepest networks have a thousand.
const MAX_LAYERS: usize = 1 << 14;

/// Normalisation of the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum NormKind {
    /// Mean and variance, with weight and bias.
    Layer,
    /// Root mean square, with weight.
    Rms,
}

/// Non-linearity of the MLP, named as `hidden_act` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Activation {
    /// x·Φ(x): `gelu`.
    Gelu,
    /// The tanh approximation of GELU: `gelu_new`, `gelu_fast`, `gelu_pytorch_tanh`.
    GeluTanh,
    /// x·σ(x): `silu`, `swish`.
    Silu,
    /// max(x, 0): `relu`.
    Relu,
}

impl Activation {
    fn parse(f: &Fields, key: &str, default: Self) -> Result<Self, ModelError> {
        match f.text(key)? {
            None => Ok(default),
            Some("gelu") => Ok(Self::Gelu),
            Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh") => Ok(Self::GeluTanh),
            Some("silu" | "swish") => Ok(Self::Silu),
            Some("relu") => Ok(Self::Relu),
            Some(other) => Err(f.wrong(
                key,
                "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, silu, swish or relu",
                format!("{other:?}"),
            )),
        }
    }

    /// The name transformers has for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_new",
            Self::Silu => "silu",
            Self::Relu => "relu",
        }
    }
}

/// How inverse frequencies are stretched for long contexts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth ramp between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context of pre-training.
        original_context: usize,
    },
    /// A divisor for each frequency (GGUF's `rope_freqs.weight`), `rotary_dim / 2` of them.
    Factors(Vec<f64>),
}

/// Rotary position embedding of the "rotate half" kind: channel i is paired with channel i + rotary_dim/2.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rope {
    /// Base of the geometric frequencies.
    pub theta: f64,
    /// Leading channels that are rotated; the others pass. Even.
    pub rotary_dim: usize,
    /// Stretching of the frequencies.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Radians per position for each of the `rotary_dim / 2` channel pairs.
    ///
    /// The formulas are those of transformers' `modeling_rope_utils`, in f64.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        let base = (0..self.rotary_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / self.rotary_dim as f64));
        match &self.scaling {
            RopeScaling::None => base.collect(),
            RopeScaling::Linear { factor } => base.map(|w| w / factor).collect(),
            RopeScaling::Factors(factors) => base.zip(factors).map(|(w, f)| w / f).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => base
                .map(|w| {
                    let turns = *original_context as f64 * w / std::f64::consts::TAU;
                    let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    w * ((1.0 - kept) / factor + kept)
                })
                .collect(),
        }
    }
}

/// Which linear layers have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Biases {
    /// Query, key and value projections.
    pub qkv: bool,
    /// Attention output projection.
    pub out: bool,
    /// Both MLP layers.
    pub mlp: bool,
}

/// A parsed and checked model configuration.
///
/// Its JSON form (through `serde`) is canonical: configs that say the same in different words are equal here.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// The family; its tensor names and file formats.
    pub architecture: &'static Architecture,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Context the model was made for; a hard limit only with learned positions.
    pub max_position_embeddings: usize,
    /// Kind of normalisation.
    pub norm: NormKind,
    /// ε of the normalisation.
    pub norm_eps: f64,
    /// Non-linearity of the MLP.
    pub activation: Activation,
    /// Whether the MLP is down(act(gate(x)) ⊙ up(x)) rather than down(act(up(x))).
    pub gated_mlp: bool,
    /// Rotary embedding; `None` means learned positions.
    pub rope: Option<Rope>,
    /// Sliding window of each layer, in tokens.
    pub windows: Vec<Option<usize>>,
    /// Score scale of each layer.
    pub scales: Vec<f64>,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Which linear layers have a bias.
    pub biases: Biases,
    /// Whether attention and MLP both read the block's input (GPT-J style) rather than one after the other.
    pub parallel_residual: bool,
    /// Beginning-of-sequence token.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Parses a `config.json` of transformers 4 or 5.
    ///
    /// # Errors
    /// [`ModelError`] naming the key, if the model type is unknown, a size is missing or impossible, or a feature is not
    /// implemented.
    pub fn from_json(config: &Value) -> Result<Self, ModelError> {
        Self::from_json_named(config, "config.json")
    }

    /// [`from_json`](Self::from_json) with the file's name for messages.
    pub fn from_json_named(config: &Value, file: &str) -> Result<Self, ModelError> {
        Self::from_json_with(config, &Map::new(), file)
    }

    /// [`from_json_named`](Self::from_json_named) with the keys of `settings` in place of the file's own.
    ///
    /// # Errors
    /// Also if one of these keys is not looked at in a config of this kind, so that it would change nothing.
    pub fn from_json_with(config: &Value, settings: &Map<String, Value>, file: &str) -> Result<Self, ModelError> {
        let mut config = config.clone();
        if let Value::Object(object) = &mut config {
            object.extend(settings.clone());
        }
        let Value::Object(object) = &config else {
            return Err(ModelError::Config {
                file: file.into(),
                key: "(whole file)".into(),
                expected: "a JSON object".into(),
                found: kind_of(&config).into(),
            });
        };
        let f = Fields { file, object, settings, read: RefCell::default() };
        let config = Self::parse(&f)?;
        f.check_used(object.keys().filter(|key| settings.contains_key(*key)))?;
        Ok(config)
    }

    fn parse(f: &Fields) -> Result<Self, ModelError> {
        let architecture = Architecture::from_config(f)?;
        if f.present("quantization_config") {
            return Err(f.unsupported(
                "`quantization_config` (weights quantized by another tool)",
                "use the unquantized checkpoint or a GGUF file",
            ));
        }
        let config = (architecture.parse)(f)?;
        config.check(f)?;
        Ok(config)
    }

    /// Writes the configuration as transformers (4 and 5) read it.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for rope factors read from a GGUF file, which `config.json` has no key for.
    pub fn to_json(&self) -> Result<Value, ModelError> {
        let mut out = Map::new();
        out.insert("architectures".into(), vec![self.architecture.class].into());
        out.insert("model_type".into(), self.architecture.name.into());
        (self.architecture.write)(self, &mut out)?;
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => (*one).into(),
            many => many.into(),
        };
        out.insert("bos_token_id".into(), self.bos_token_id.into());
        out.insert("eos_token_id".into(), eos);
        out.insert("tie_word_embeddings".into(), self.tie_word_embeddings.into());
        out.insert("torch_dtype".into(), "float32".into());
        Ok(Value::Object(out))
    }

    /// Width of the queries of all heads.
    pub fn query_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of the keys (or values) of all KV heads.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Positions that can be embedded: `None` without a limit (rotary), else the number of learned positions.
    pub fn position_limit(&self) -> Option<usize> {
        self.rope.is_none().then_some(self.max_position_embeddings)
    }

    fn check(&self, f: &Fields) -> Result<(), ModelError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_layers),
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (key, size) in sizes {
            if !(1..=MAX_SIZE).contains(&size) {
                return Err(f.wrong(key, &format!("a whole number from 1 to {MAX_SIZE}"), size));
            }
        }
        if self.query_width() > MAX_SIZE {
            return Err(f.wrong("head_dim", &format!("heads × head_dim of at most {MAX_SIZE}"), self.query_width()));
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("a divisor of the {} query heads", self.num_heads);
            return Err(f.wrong("num_key_value_heads", &expected, self.num_kv_heads));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps.is_finite()) {
            return Err(f.wrong("norm epsilon", "a positive number", self.norm_eps));
        }
        if let Some(rope) = &self.rope {
            if !(rope.theta > 0.0 && rope.theta.is_finite()) {
                return Err(f.wrong("rope_theta", "a positive number", rope.theta));
            }
            if rope.rotary_dim == 0 || !rope.rotary_dim.is_multiple_of(2) || rope.rotary_dim > self.head_dim {
                let expected = format!("an even number of rotated channels, at most head_dim = {}", self.head_dim);
                return Err(f.wrong("partial_rotary_factor", &expected, rope.rotary_dim));
            }
        }
        Ok(())
    }
}

/// What the gated RMSNorm families (Llama, Qwen2, Mistral) differ in when a key is absent.
pub(crate) struct Defaults {
    pub kv_heads: Option<usize>,
    pub max_positions: usize,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
}

/// The configuration shared by Llama, Qwen2 and Mistral; no biases and no windows yet.
pub(crate) fn gated_decoder(
    f: &Fields,
    architecture: &'static Architecture,
    defaults: &Defaults,
) -> Result<ModelConfig, ModelError> {
    let hidden_size = f.size("hidden_size")?;
    let num_layers = f.layers("num_hidden_layers")?;
    let num_heads = f.size("num_attention_heads")?;
    let kv_default =
        if f.object.contains_key("num_key_value_heads") { num_heads } else { defaults.kv_heads.unwrap_or(num_heads) };
    let head_dim = match f.optional_size("head_dim")? {
        Some(d) => d,
        None => f.head_dim("num_attention_heads", hidden_size, num_heads)?,
    };
    Ok(ModelConfig {
        architecture,
        vocab_size: f.size("vocab_size")?,
        hidden_size,
        intermediate_size: f.size("intermediate_size")?,
        num_layers,
        num_heads,
        num_kv_heads: f.optional_size("num_key_value_heads")?.unwrap_or(kv_default),
        head_dim,
        max_position_embeddings: f.optional_size("max_position_embeddings")?.unwrap_or(defaults.max_positions),
        norm: NormKind::Rms,
        norm_eps: f.number("rms_norm_eps")?.unwrap_or(1e-6),
        activation: Activation::parse(f, "hidden_act", Activation::Silu)?,
        gated_mlp: true,
        rope: Some(f.rope(head_dim, 1.0)?),
        windows: vec![None; num_layers],
        scales: vec![1.0 / (head_dim as f64).sqrt(); num_layers],
        tie_word_embeddings: f.flag("tie_word_embeddings")?.unwrap_or(false),
        biases: Biases { qkv: false, out: false, mlp: false },
        parallel_residual: false,
        bos_token_id: f.token_id("bos_token_id", defaults.bos)?,
        eos_token_ids: f.token_ids("eos_token_id", defaults.eos)?,
    })
}

/// The inverse of [`gated_decoder`].
pub(crate) fn write_gated_decoder(c: &ModelConfig, out: &mut Map<String, Value>) -> Result<(), ModelError> {
    out.insert("vocab_size".into(), c.vocab_size.into());
    out.insert("hidden_size".into(), c.hidden_size.into());
    out.insert("intermediate_size".into(), c.intermediate_size.into());
    out.insert("num_hidden_layers".into(), c.num_layers.into());
    out.insert("num_attention_heads".into(), c.num_heads.into());
    out.insert("num_key_value_heads".into(), c.num_kv_heads.into());
    out.insert("head_dim".into(), c.head_dim.into());
    out.insert("max_position_embeddings".into(), c.max_position_embeddings.into());
    out.insert("rms_norm_eps".into(), c.norm_eps.into());
    out.insert("hidden_act".into(), c.activation.name().into());
    if let Some(rope) = &c.rope {
        out.insert("rope_theta".into(), rope.theta.into());
        out.insert("rope_scaling".into(), write_scaling(rope)?);
        if rope.rotary_dim != c.head_dim {
            out.insert("partial_rotary_factor".into(), (rope.rotary_dim as f64 / c.head_dim as f64).into());
        }
    }
    Ok(())
}

/// `rope_scaling` as transformers 4 writes it and 5 reads it.
pub(crate) fn write_scaling(rope: &Rope) -> Result<Value, ModelError> {
    Ok(match &rope.scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => serde_json::json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => serde_json::json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_context,
        }),
        RopeScaling::Factors(_) => {
            return Err(ModelError::Unsupported {
                file: "config.json".into(),
                what: "rope scaling by explicit factors".into(),
                hint: "it comes from a GGUF file and has no key in config.json".into(),
            });
        }
    })
}

/// Where keys come from that are given in place of a file's own.
const GIVEN: &str = "--model-set (in a run, [model_set])";

/// Where the value of a key comes from: `settings`, or else `file`. What no single key says is known by what its keys have in common.
pub(crate) fn source_of<'f>(key: &str, settings: &Map<String, Value>, file: &'f str) -> &'f str {
    let any = |parts: &[&str]| settings.keys().any(|given| parts.iter().any(|part| given.contains(part)));
    let given = match key {
        "norm epsilon" => any(&["_eps"]),
        "rope parameters" => any(&["rope", "rotary"]),
        "sliding_window" => any(&["sliding_window", "layer_types"]),
        "num_key_value_heads" => any(&["num_key_value_heads", "num_attention_heads"]),
        "num_hidden_layers" => any(&["num_hidden_layers", "n_layer"]),
        "hidden_act" => any(&["hidden_act", "activation_function"]),
        "scale of the attention scores" => any(&["scale_attn"]),
        key if key.starts_with("bias of") => any(&["bias", "model_type"]),
        key => settings.contains_key(key),
    };
    if given { GIVEN } else { file }
}

/// Typed access to the keys of a config. An absent key and `null` are the same.
pub(crate) struct Fields<'a> {
    pub file: &'a str,
    pub object: &'a Map<String, Value>,
    /// Keys that were given in place of the file's own.
    pub settings: &'a Map<String, Value>,
    /// Keys that were looked at.
    pub read: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    pub fn wrong(&self, key: &str, expected: &str, found: impl std::fmt::Display) -> ModelError {
        ModelError::Config {
            file: self.source(key).into(),
            key: key.into(),
            expected: expected.into(),
            found: found.to_string(),
        }
    }

    /// `what` names the keys that ask for it.
    pub fn unsupported(&self, what: impl Into<String>, hint: impl Into<String>) -> ModelError {
        let what = what.into();
        let named = self.settings.keys().find(|key| what.contains(&format!("`{key}`")));
        let file = named.map_or(self.file, |key| self.source(key)).into();
        ModelError::Unsupported { file, what, hint: hint.into() }
    }

    /// Where the value of a key comes from, for messages.
    pub fn source(&self, key: &str) -> &'a str {
        source_of(key, self.settings, self.file)
    }

    /// Fails for a key that was given for this model and never looked at.
    fn check_used<'k>(&self, mut given: impl Iterator<Item = &'k String>) -> Result<(), ModelError> {
        let read = self.read.borrow();
        given.find(|key| !read.contains(*key)).map_or(Ok(()), |key| {
            let known = read.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            Err(self.wrong(key, &format!("a key that matters to this model ({known})"), "one that does not"))
        })
    }

    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(key.to_owned());
        self.object.get(key).filter(|v| !v.is_null())
    }

    pub fn present(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    fn typed<T>(&self, key: &str, what: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ModelError> {
        self.get(key).map(|v| read(v).ok_or_else(|| self.wrong(key, what, v))).transpose()
    }

    pub fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| self.wrong(key, "a whole number", "nothing"))
    }

    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.bounded(key, MAX_SIZE)
    }

    /// The number of layers.
    pub fn layers(&self, key: &str) -> Result<usize, ModelError> {
        self.bounded(key, MAX_LAYERS)?.ok_or_else(|| self.wrong(key, "a whole number", "nothing"))
    }

    fn bounded(&self, key: &str, most: usize) -> Result<Option<usize>, ModelError> {
        let read = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=most).contains(n));
        self.typed(key, &format!("a whole number from 1 to {most}"), read)
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A token id; the default counts only where the key is absent, an explicit `null` means none.
    pub fn token_id(&self, key: &str, default: Option<u32>) -> Result<Option<u32>, ModelError> {
        Ok(self.token_ids(key, default)?.first().copied())
    }

    /// A token id or a list of them.
    pub fn token_ids(&self, key: &str, default: Option<u32>) -> Result<Vec<u32>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let read = |v: &Value| match v {
            Value::Array(ids) => ids.iter().map(id).collect(),
            one => id(one).map(|n| vec![n]),
        };
        match self.typed(key, "a token id or a list of them", read)? {
            Some(ids) => Ok(ids),
            None if self.object.contains_key(key) => Ok(Vec::new()),
            None => Ok(default.into_iter().collect()),
        }
    }

    /// hidden / heads, which must be whole.
    pub fn head_dim(&self, heads_key: &str, hidden: usize, heads: usize) -> Result<usize, ModelError> {
        if heads == 0 || !hidden.is_multiple_of(heads) {
            return Err(self.wrong(heads_key, &format!("a divisor of the hidden size {hidden}"), heads));
        }
        Ok(hidden / heads)
    }

    /// The activation under `key`.
    pub fn activation(&self, key: &str, default: Activation) -> Result<Activation, ModelError> {
        Activation::parse(self, key, default)
    }

    /// Rotary embedding from `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling` and `rotary_*` (4).
    pub fn rope(&self, head_dim: usize, default_part: f64) -> Result<Rope, ModelError> {
        let object = |key: &str| self.typed(key, "an object", Value::as_object);
        let (key, nested) = match object("rope_parameters")? {
            Some(o) => ("rope_parameters", Some(o)),
            None => ("rope_scaling", object("rope_scaling")?),
        };
        let empty = Map::new();
        let file = format!("{}: `{key}`", self.source(key));
        let object = nested.unwrap_or(&empty);
        let r = Fields { file: &file, object, settings: &empty, read: RefCell::default() };
        if r.object.values().any(Value::is_object) {
            return Err(
                self.unsupported(format!("`{key}` with an entry per layer type"), "one set of rope parameters is")
            );
        }
        let theta = match (r.number("rope_theta")?, self.number("rope_theta")?, self.number("rotary_emb_base")?) {
            (Some(theta), _, _) | (None, Some(theta), _) | (None, None, Some(theta)) => theta,
            _ => 10_000.0,
        };
        let part = match (
            r.number("partial_rotary_factor")?,
            self.number("partial_rotary_factor")?,
            self.number("rotary_pct")?,
        ) {
            (Some(part), _, _) | (None, Some(part), _) | (None, None, Some(part)) => part,
            _ => default_part,
        };
        if !(part > 0.0 && part <= 1.0) {
            return Err(self.wrong("partial_rotary_factor", "a share above 0, at most 1", part));
        }
        Ok(Rope { theta, rotary_dim: (head_dim as f64 * part) as usize, scaling: r.scaling()? })
    }

    fn scaling(&self) -> Result<RopeScaling, ModelError> {
        let positive = |key: &str| match self.number(key)? {
            Some(x) if x > 0.0 && x.is_finite() => Ok(x),
            Some(x) => Err(self.wrong(key, "a positive number", x)),
            None => Err(self.wrong(key, "a positive number", "nothing")),
        };
        let kind = match self.text("rope_type")? {
            Some(kind) => kind,
            None => self.text("type")?.unwrap_or("default"),
        };
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: positive("factor")? }),
            "llama3" => {
                let (low, high) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
                if high <= low {
                    return Err(self.wrong("high_freq_factor", &format!("more than low_freq_factor = {low}"), high));
                }
                Ok(RopeScaling::Llama3 {
                    factor: positive("factor")?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_context: self.size("original_max_position_embeddings")?,
                })
            }
            other => Err(self.unsupported(format!("rope type {other:?}"), "default, linear and llama3 are")),
        }
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
