//! The configuration of an ONNX export: from a `config.json`, held against the graph; or from the graph alone.

use serde_json::{Map, Value, json};

use crate::arch::QkvNames;
use crate::config::{ModelConfig, NormKind, Rope, RopeScaling, source_of};
use crate::error::ModelError;
use crate::source::{Facts, OnnxModel};

/// Relative difference of constants that are the same number, rounded to f32 on the way.
const ROUNDING: f64 = 1e-4;

/// Holds a configuration, of `file` with the keys of `settings` in place of its own, against what the graph computes; shapes are
/// checked with the weights.
///
/// # Errors
/// [`ModelError::Config`] naming the key, what the graph computes, and what the configuration says.
pub(crate) fn check(
    config: &ModelConfig,
    settings: &Map<String, Value>,
    file: &str,
    model: &OnnxModel,
) -> Result<(), ModelError> {
    let f = model.facts();
    let differ = |key: &str, computed: String, found: String| {
        let expected = format!("{computed}, as {} computes", model.file());
        Err(ModelError::Config { file: source_of(key, settings, file).into(), key: key.into(), expected, found })
    };
    let close = |a: f64, b: f64| (a - b).abs() <= ROUNDING * b.abs();
    let (fused, by_head) = match config.architecture.names.qkv {
        QkvNames::Separate(_) => (false, false),
        QkvNames::Fused(_) => (true, false),
        QkvNames::PerHead(_) => (true, true),
    };
    let kind = (f.norm, f.gated, f.positions.is_some(), f.fused, f.by_head);
    if kind != (config.norm, config.gated_mlp, config.rope.is_none(), fused, by_head) {
        return differ("model_type", describe(&f), config.architecture.name.into());
    }
    if f.layers != config.num_layers {
        return differ("num_hidden_layers", f.layers.to_string(), config.num_layers.to_string());
    }
    if let Some(width) = f.head_dim.filter(|width| *width != config.head_dim) {
        return differ("head_dim", width.to_string(), config.head_dim.to_string());
    }
    if f.layers > 0 && f.parallel_residual != config.parallel_residual {
        let found = config.parallel_residual.to_string();
        return differ("use_parallel_residual", f.parallel_residual.to_string(), found);
    }
    if let Some(eps) = f.norm_eps.filter(|eps| !close(*eps, config.norm_eps)) {
        return differ("norm epsilon", eps.to_string(), config.norm_eps.to_string());
    }
    if let Some(activation) = f.activation.filter(|a| *a != config.activation) {
        return differ("hidden_act", activation.name().into(), config.activation.name().into());
    }
    let wrong_bias = [("qkv", config.biases.qkv), ("attention output", config.biases.out), ("mlp", config.biases.mlp)];
    for ((name, has), computed) in wrong_bias.into_iter().zip(f.biases) {
        if has != computed {
            return differ(&format!("bias of the {name} projection"), computed.to_string(), has.to_string());
        }
    }
    if let (Some(computed), Some(rope)) = (&f.frequencies, &config.rope) {
        let asked = rope.inverse_frequencies();
        if computed.len() != asked.len() || !computed.iter().zip(&asked).all(|(a, b)| close(*a, *b)) {
            return differ("rope parameters", format!("the frequencies {}", ends(computed)), ends(&asked));
        }
    }
    for layer in 0..f.layers {
        if f.windows[layer].is_some_and(|w| config.windows[layer] != Some(w)) {
            let found = config.windows[layer].map_or("none".into(), |w| w.to_string());
            return differ("sliding_window", f.windows[layer].unwrap_or_default().to_string(), found);
        }
        if let Some(scale) = f.scales[layer].filter(|s| !close(*s, config.scales[layer])) {
            return differ("scale of the attention scores", scale.to_string(), config.scales[layer].to_string());
        }
    }
    Ok(())
}

fn ends(frequencies: &[f64]) -> String {
    match frequencies {
        [] => "none".into(),
        [first, .., last] => format!("{first:.4e} … {last:.4e} ({} of them)", frequencies.len()),
        [one] => format!("{one:.4e}"),
    }
}

/// The kind of decoder, in words.
fn describe(f: &Facts) -> String {
    format!(
        "a decoder with {}, {} positions, {} and {}",
        if f.norm == NormKind::Rms { "RMS normalisation" } else { "layer normalisation" },
        if f.positions.is_some() { "learned" } else { "rotary" },
        match (f.fused, f.by_head) {
            (false, _) => "matrices for query, key and value",
            (true, false) => "one matrix for query, key and value",
            (true, true) => "one matrix for query, key and value head by head",
        },
        if f.gated { "a gated MLP" } else { "an MLP without a gate" },
    )
}

/// The configuration that a graph states, completed or overruled by `settings` (keys of `config.json`).
///
/// What neither says and no default stands for is one error that lists all of it.
pub(crate) fn infer(model: &OnnxModel, settings: &Map<String, Value>) -> Result<ModelConfig, ModelError> {
    let f = model.facts();
    let named = settings.get("model_type").and_then(Value::as_str);
    let name = named.or_else(|| architecture(&f)).ok_or_else(|| ModelError::Unsupported {
        file: model.file().into(),
        what: describe(&f),
        hint: format!("known architectures are {}", crate::Architecture::known()),
    })?;
    let given = |key: &str| settings.get(key).and_then(Value::as_u64).filter(|n| *n > 0).map(|n| n as usize);
    let heads = given("num_attention_heads").or(given("n_head"));
    let head_dim = f.head_dim.or(given("head_dim")).or(heads.map(|heads| f.query_width / heads));
    let mut words = words(name, &f, head_dim);
    let asked_rope = settings.keys().any(|key| key.starts_with("rope") || key == "rotary_emb_base");
    let theta = f.frequencies.as_ref().map(|w| theta(w));
    if let Some(Some(theta)) = theta.filter(|_| !asked_rope) {
        words.insert("rope_theta".into(), theta.into());
    }
    let file = format!("{} (its graph)", model.file());
    let mut missing: Vec<&str> = words
        .iter()
        .filter(|(key, value)| value.is_null() && essential(key) && !settings.contains_key(*key))
        .map(|(k, _)| k.as_str())
        .collect();
    if f.positions.is_none() && f.frequencies.is_none() && !asked_rope {
        missing.push("rope_theta");
    }
    if !missing.is_empty() {
        let missing = missing.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
        return Err(ModelError::Incomplete { file: model.file().into(), missing });
    }
    let mut config = ModelConfig::from_json_with(&Value::Object(words), settings, &file)?;
    if let (Some(frequencies), Some(rope), false) = (&f.frequencies, config.rope.as_mut(), asked_rope) {
        rope.rotary_dim = 2 * frequencies.len();
        if theta == Some(None) {
            let base = Rope { scaling: RopeScaling::None, ..rope.clone() }.inverse_frequencies();
            rope.scaling = RopeScaling::Factors(base.iter().zip(frequencies).map(|(b, w)| b / w).collect());
        }
    }
    // What was given must not contradict what is computed.
    check(&config, settings, &file, model)?;
    Ok(config)
}

fn architecture(f: &Facts) -> Option<&'static str> {
    let [qkv, out, _] = f.biases;
    match (f.norm, f.positions.is_some(), (f.fused, f.by_head), f.gated) {
        (NormKind::Layer, true, (true, false), false) => Some("gpt2"),
        (NormKind::Layer, false, (true, true), false) => Some("gpt_neox"),
        (NormKind::Rms, false, (false, _), true) if qkv && !out => Some("qwen2"),
        (NormKind::Rms, false, (false, _), true) if f.windows.iter().all(|w| w.is_some()) => Some("mistral"),
        (NormKind::Rms, false, (false, _), true) if f.windows.iter().all(|w| w.is_none()) => Some("llama"),
        _ => None,
    }
}

/// Keys without which a model cannot run, and which have no default that is right for most models.
fn essential(key: &str) -> bool {
    let heads = ["num_attention_heads", "n_head"];
    let norms = ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"];
    let activations = ["hidden_act", "activation_function"];
    heads.contains(&key) || norms.contains(&key) || activations.contains(&key)
}

/// The facts in the words of `config.json`; `null` where the graph does not say.
fn words(name: &str, f: &Facts, head_dim: Option<usize>) -> Map<String, Value> {
    let heads = head_dim.map(|d| f.query_width / d.max(1));
    let activation = f.activation.map(|a| a.name());
    let window = f.windows.iter().flatten().next();
    let full = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
    let json = if name == "gpt2" {
        json!({
            "n_embd": f.hidden_size, "n_inner": f.intermediate_size, "n_layer": f.layers, "n_head": heads,
            "n_positions": f.positions, "layer_norm_epsilon": f.norm_eps, "activation_function": activation,
        })
    } else if name == "gpt_neox" {
        json!({
            "hidden_size": f.hidden_size, "intermediate_size": f.intermediate_size, "num_hidden_layers": f.layers,
            "num_attention_heads": heads, "layer_norm_eps": f.norm_eps, "hidden_act": activation,
            "attention_bias": f.biases[0], "use_parallel_residual": f.parallel_residual,
        })
    } else {
        json!({
            "hidden_size": f.hidden_size, "intermediate_size": f.intermediate_size, "num_hidden_layers": f.layers,
            "num_attention_heads": heads, "num_key_value_heads": head_dim.map(|d| f.kv_width / d.max(1)),
            "head_dim": head_dim, "rms_norm_eps": f.norm_eps, "hidden_act": activation, "attention_bias": f.biases[0],
            "mlp_bias": f.biases[2], "sliding_window": window, "use_sliding_window": window.is_some(),
            "layer_types": f.windows.iter().map(full).collect::<Vec<_>>(),
        })
    };
    let mut words = match json {
        Value::Object(words) => words,
        _ => Map::new(),
    };
    for (key, value) in [
        ("model_type", Value::from(name)),
        ("vocab_size", f.vocab_size.into()),
        ("tie_word_embeddings", f.tied.into()),
        // The graph knows no tokens that begin and end a text.
        ("bos_token_id", Value::Null),
        ("eos_token_id", Value::Null),
    ] {
        words.insert(key.into(), value);
    }
    words
}

/// The base of geometric frequencies θ^(−i/n); `None` where they are not geometric.
fn theta(frequencies: &[f64]) -> Option<f64> {
    let n = frequencies.len() as f64;
    let estimate = match frequencies {
        [_, .., last] => last.powf(-n / (n - 1.0)),
        // One pair turns by one radian whatever the base.
        _ => 10_000.0,
    };
    let whole = estimate.round();
    let theta = if (estimate - whole).abs() <= ROUNDING * whole { whole } else { estimate };
    let exact = |(i, w): (usize, &f64)| (theta.powf(-(i as f64) / n) - w).abs() <= ROUNDING * w;
    frequencies.iter().enumerate().all(exact).then_some(theta)
}
