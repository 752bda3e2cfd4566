//! Bad input of every kind: one line that says what is wrong, and nothing touched.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{BASE, GQA, SIDE, World, config, text, tokenizer};
use predicates::prelude::*;
use serde_json::{Value, json};

const EVAL: &[&str] = &["eval", "model", "--text", "text.txt", "--context", "32", "--windows", "2"];
const CALIBRATE: &[&str] =
    &["calibrate", "model", "--text", "text.txt", "--context", "32", "--windows", "2", "--base", "kivi-2(g=8)"];

/// Fails with one line on standard error that has all of `needles`, and leaves every file as it was. Returns the exit status.
#[track_caller]
fn fails(world: &World, args: &[&str], needles: &[&str]) -> Option<i32> {
    let before = world.snapshot();
    let output = world.run(&[args, &["--quiet"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    let status = output.status.code();
    assert!(status == Some(1) || status == Some(2), "status {status:?} of {args:?}: {error}");
    assert!(error.starts_with("error: ") && error.ends_with('\n') && error.lines().count() == 1, "{args:?}: {error}");
    assert!(!error.contains("panicked") && !error.contains(".headq-"), "{args:?}: {error}");
    assert!(output.stdout.is_empty(), "{args:?} prints {}", String::from_utf8_lossy(&output.stdout));
    for needle in needles {
        assert!(error.contains(needle), "{needle:?} is not in: {error}");
    }
    assert!(before == world.snapshot(), "{args:?} changed files: {error}");
    status
}

/// `headq diagnose` with these flags instead of the usual ones.
fn diagnosis<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["diagnose", "model"];
    for pair in [
        ["--text", "text.txt"],
        ["--context", "64"],
        ["--windows", "2"],
        ["--calibration-windows", "2"],
        ["--base", "kivi-2(g=8,r=4)"],
        ["--out", "made"],
    ] {
        if !flags.contains(&pair[0]) {
            args.extend(pair);
        }
    }
    args.extend(flags);
    args
}

#[track_caller]
fn diagnosis_fails(world: &World, status: i32, flags: &[&str], needles: &[&str]) {
    assert_eq!(fails(world, &diagnosis(flags), needles), Some(status), "{flags:?}");
}

/// clap's own errors, with its hint.
#[track_caller]
fn misused(world: &World, args: &[&str], needles: &[&str]) {
    let output = world.run(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && output.stdout.is_empty() && error.starts_with("error: "), "{error}");
    for needle in needles {
        assert!(predicate::str::contains(*needle).eval(&error), "{needle:?} is not in: {error}");
    }
}

/// All commands that load a model fail in the same way, an existing output is kept, and so is a run's configuration.
#[track_caller]
fn model_fails(world: &World, needles: &[&str]) {
    assert_eq!(fails(world, &["inspect", "model"], needles), Some(1));
    loading_fails(world, needles);
}

/// Fails with status 1 in one GiB of address space: no file makes the program allocate what it claims.
#[track_caller]
fn inspect_fails(world: &World, model: &str, needles: &[&str]) {
    let limit = if cfg!(target_os = "linux") { "ulimit -v 1048576; " } else { "" };
    let output = std::process::Command::new("sh")
        .current_dir(world.path(""))
        .args(["-c", &format!("{limit}exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_headq")])
        .args(["inspect", model, "--quiet", "--threads", "1"])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: ") && error.lines().count() == 1 && output.stdout.is_empty(), "{error}");
    for needle in needles {
        assert!(error.contains(needle), "{needle:?} is not in: {error}");
    }
}

#[track_caller]
fn loading_fails(world: &World, needles: &[&str]) {
    world.write("out", "mine");
    world.write("run.toml", config(2));
    fails(world, &[EVAL, &["--scheme", BASE, "--out", "out", "--json"]].concat(), needles);
    fails(world, &[CALIBRATE, &["--out", "out"]].concat(), needles);
    fails(world, &["run", "run.toml"], needles);
}

/// `eval` and `calibrate` fail with more arguments.
#[track_caller]
fn text_fails(args: &[&str], content: Option<&[u8]>, needles: &[&str]) {
    let world = World::new(GQA);
    if let Some(content) = content {
        world.write("text.txt", content);
    }
    world.write("out", "mine");
    for command in [&["eval", "--scheme", BASE][..], &["calibrate"]] {
        let mut line: Vec<&str> = command.to_vec();
        line.extend(["model", "--out", "out"]);
        for (flag, value) in [("--text", "text.txt"), ("--context", "32"), ("--windows", "2")] {
            if !args.contains(&flag) {
                line.extend([flag, value]);
            }
        }
        line.extend(args);
        fails(&world, &line, needles);
    }
}

#[track_caller]
fn scheme_fails(scheme: &str, needles: &[&str]) {
    let world = World::new(GQA).calibrated();
    fails(&world, &[EVAL, &["--scheme", scheme, "--stats", "stats.safetensors"]].concat(), needles);
    fails(&world, &["inspect", "model", "--scheme", scheme], needles);
}

#[track_caller]
fn config_fails(text: &str, needles: &[&str]) {
    let world = World::new(GQA);
    world.write("run.toml", text);
    // What a file says is no wrong usage of the command line.
    assert_eq!(fails(&world, &["run", "run.toml"], needles), Some(1));
    assert_eq!(fails(&world, &["run", "run.toml", "--out", "made"], needles), Some(1));
}

// Models.

#[test]
fn no_such_model() {
    let world = World::new(GQA);
    std::fs::remove_dir_all(world.path("model")).unwrap();
    model_fails(&world, &["model: no such file or folder"]);
}

#[test]
fn model_without_config() {
    let world = World::new(GQA);
    std::fs::remove_file(world.path("model/config.json")).unwrap();
    model_fails(&world, &["model: no config.json in this folder, and no .gguf or .onnx file"]);
}

#[test]
fn config_without_model_type() {
    let world = World::new(GQA);
    world.config(|c| drop(c.remove("model_type")));
    model_fails(&world, &["config.json", "`model_type`"]);
}

#[test]
fn unknown_model_type() {
    let world = World::new(GQA);
    world.config(|c| drop(c.insert("model_type".into(), "mamba".into())));
    model_fails(&world, &["config.json", "mamba", "gpt2, gpt_neox, llama, mistral, qwen2"]);
}

#[test]
fn config_with_line_breaks_in_a_value() {
    let world = World::new(GQA);
    world.config(|c| drop(c.insert("model_type".into(), "mam\nba\r\n".into())));
    model_fails(&world, &["mam"]);
}

#[test]
fn heads_that_do_not_divide() {
    let world = World::new(GQA);
    world.config(|c| drop(c.insert("num_key_value_heads".into(), 3.into())));
    model_fails(&world, &["`num_key_value_heads`", "divisor of the 8 query heads", "3"]);
}

#[test]
fn missing_tensor() {
    let world = World::new(GQA);
    world.surgery(|t| drop(t.remove("model.layers.1.self_attn.q_proj.weight")));
    model_fails(&world, &["`model.layers.1.self_attn.q_proj.weight`", "is missing"]);
}

#[test]
fn tensor_of_the_wrong_shape() {
    let world = World::new(GQA);
    world.surgery(|t| t.get_mut("model.embed_tokens.weight").unwrap().1 = vec![1024, 64]);
    model_fails(&world, &["`model.embed_tokens.weight`", "[512, 128]", "[1024, 64]"]);
}

#[test]
fn missing_shard() {
    let world = World::new(GQA);
    let (tensors, _) = world.artifact("model/model.safetensors");
    let map: serde_json::Map<String, Value> =
        tensors.keys().map(|n| (n.clone(), json!("model-00001-of-00001.safetensors"))).collect();
    world.write("model/model.safetensors.index.json", json!({"metadata": {}, "weight_map": map}).to_string());
    std::fs::remove_file(world.path("model/model.safetensors")).unwrap();
    model_fails(&world, &["model-00001-of-00001.safetensors", "is missing"]);
}

#[test]
fn truncated_weights() {
    let world = World::new(GQA);
    let bytes = world.read("model/model.safetensors");
    for length in [0, 7, 100, bytes.len() / 2, bytes.len() - 1] {
        world.write("model/model.safetensors", &bytes[..length]);
        model_fails(&world, &["model.safetensors", "damaged or incomplete"]);
    }
}

/// A file's header as text, and the data after it.
fn header_and_data(bytes: &[u8]) -> (String, &[u8]) {
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (String::from_utf8(bytes[8..end].to_vec()).unwrap(), &bytes[end..])
}

#[test]
fn safetensors_headers_that_lie() {
    let world = World::new(GQA);
    let bytes = world.read("model/model.safetensors");
    let (header, data) = header_and_data(&bytes);
    let name = "model.norm.weight";
    let entries: Value = serde_json::from_str(&header).unwrap();
    let start = entries[name]["data_offsets"][0].as_u64().unwrap();
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut entries = entries.clone();
        edit(&mut entries);
        entries.to_string()
    };
    let range = |from: u64, to: u64| edited(&|e| e[name]["data_offsets"] = json!([start + from, start + to]));
    for (header, needles) in [
        (format!("{{\"{name}\":{},{}", entries[name], &header[1..]), ["tensor `model.norm.weight` is there twice", ""]),
        (range(0, 508), ["tensor `model.norm.weight`", "takes 512 bytes, found 508"]),
        (range(4, 516), ["invalid offset for tensor", ""]),
        (range(512, 0), ["invalid offset for tensor", ""]),
        (range(1 << 60, (1 << 60) + 512), ["invalid offset for tensor", ""]),
        (edited(&|e| e[name]["shape"] = json!([1u64 << 40, 1u64 << 40])), ["overflow", ""]),
        (
            edited(&|e| drop(e.as_object_mut().unwrap().shift_remove("model.layers.0.input_layernorm.weight"))),
            ["invalid offset for tensor", "damaged or incomplete"],
        ),
        ("not JSON".into(), ["invalid JSON", "model/model.safetensors"]),
    ] {
        world
            .write("model/model.safetensors", [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat());
        inspect_fails(&world, "model", &needles);
    }
    for length in [200_000_000u64, 1 << 60, u64::MAX] {
        world.write("model/model.safetensors", [&length.to_le_bytes(), &bytes[8..]].concat());
        inspect_fails(&world, "model", &["header too large", &length.to_string(), "100000000"]);
    }
    std::fs::File::options()
        .write(true)
        .open(world.path("model/model.safetensors"))
        .unwrap()
        .set_len(200_000_008)
        .unwrap();
    inspect_fails(&world, "model", &["header too large"]);
}

#[test]
fn tensor_in_two_shards() {
    let world = World::new(GQA);
    world.write("model/a.safetensors", world.read("model/model.safetensors"));
    std::fs::rename(world.path("model/model.safetensors"), world.path("model/b.safetensors")).unwrap();
    let map = json!({"weight_map": {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}});
    world.write("model/model.safetensors.index.json", map.to_string());
    model_fails(&world, &["b.safetensors", "is also in another shard"]);
}

#[test]
fn shard_without_its_tensor() {
    let world = World::new(GQA);
    std::fs::rename(world.path("model/model.safetensors"), world.path("model/a.safetensors")).unwrap();
    let map = json!({"weight_map": {"model.norm.weight": "a.safetensors", "extra.weight": "a.safetensors"}});
    world.write("model/model.safetensors.index.json", map.to_string());
    model_fails(&world, &["tensor `extra.weight` is not in shard a.safetensors"]);
}

#[test]
#[cfg(unix)]
fn weights_that_are_not_a_file() {
    use std::os::unix::fs::symlink;
    let world = World::new(GQA);
    let path = world.path("model/model.safetensors");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    model_fails(&world, &["model/model.safetensors", "found a folder"]);
    std::fs::remove_dir(&path).unwrap();
    symlink("model.safetensors", &path).unwrap();
    inspect_fails(&world, "model", &["model/model.safetensors", "Too many levels of symbolic links"]);
    symlink("circle", world.path("circle")).unwrap();
    inspect_fails(&world, "circle", &["circle", "Too many levels of symbolic links"]);
}

#[test]
fn absurd_sizes() {
    let world = World::new(GQA);
    let whole = world.read("model/config.json");
    for (key, value) in [
        ("num_hidden_layers", json!(1_000_000_000)),
        ("num_hidden_layers", json!(16_777_216)),
        ("num_attention_heads", json!(0)),
        ("num_attention_heads", json!(7)),
        ("num_key_value_heads", json!(0)),
        ("head_dim", json!(1_000_000_000)),
        ("vocab_size", json!(u64::MAX)),
        ("hidden_size", json!(-1)),
    ] {
        world.write("model/config.json", &whole);
        world.config(|c| {
            c.remove("head_dim");
            c.insert(key.into(), value.clone());
        });
        inspect_fails(&world, "model", &["model/config.json", key, &value.to_string()]);
    }
    world.write("model/config.json", &whole);
    for key in ["vocab_size", "intermediate_size", "hidden_size"] {
        world.config(|c| drop(c.insert(key.into(), (1 << 24).into())));
    }
    inspect_fails(&world, "model", &["16777216"]);
}

/// The beginning of a GGUF file: version, number of tensors, number of entries of the metadata, and what follows.
fn gguf(version: u32, tensors: u64, entries: u64, rest: &[u8]) -> Vec<u8> {
    [&b"GGUF"[..], &version.to_le_bytes(), &tensors.to_le_bytes(), &entries.to_le_bytes(), rest].concat()
}

fn gguf_string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

#[test]
fn gguf_files_that_are_none() {
    let world = World::new(GQA);
    let architecture =
        |name: &str| [gguf_string("general.architecture"), 8u32.to_le_bytes().to_vec(), gguf_string(name)].concat();
    let tensor = |name: &str, offset: u64| {
        let shape = [1u32.to_le_bytes().to_vec(), 64u64.to_le_bytes().to_vec()].concat();
        [gguf_string(name), shape, 0u32.to_le_bytes().to_vec(), offset.to_le_bytes().to_vec()].concat()
    };
    let space = vec![0; 4096];
    for (content, needles) in [
        (Vec::new(), ["the file ends at 0", "damaged or incomplete"]),
        (b"GGUF\x03".to_vec(), ["the file ends at 5", "damaged or incomplete"]),
        (b"PK\x03\x04 and more".to_vec(), ["does not begin with the letters GGUF", ""]),
        (gguf(99, 0, 0, &space), ["GGUF version 99 is not supported", "versions 2 and 3"]),
        (gguf(3, 1 << 60, 0, &space), ["1152921504606846976 entries", "more than the file can hold"]),
        (gguf(3, 0, 1 << 60, &space), ["1152921504606846976 entries", "more than the file can hold"]),
        (
            gguf(3, 0, 1, &[&(1u64 << 60).to_le_bytes()[..], &space].concat()),
            ["1152921504606846976 entries", "more than the file can hold"],
        ),
        (gguf(3, 0, 1, &architecture("mamba")), ["unknown architecture \"mamba\"", "llama"]),
        (gguf(3, 2, 0, &[tensor("a", 0), tensor("b", 32), space.clone()].concat()), ["`a` and `b` overlap", "damaged"]),
        (
            gguf(3, 2, 0, &[tensor("a", 0), tensor("a", 256), space.clone()].concat()),
            ["`a` is stored twice", "damaged"],
        ),
        (
            gguf(3, 1, 0, &[tensor("a", 1 << 60), space.clone()].concat()),
            ["tensor `a` needs 256 bytes", "the file ends at"],
        ),
    ] {
        world.write("model.gguf", content);
        inspect_fails(&world, "model.gguf", &[&["model.gguf"], &needles[..]].concat());
    }
}

#[test]
fn weights_of_another_format() {
    let world = World::new(GQA);
    std::fs::rename(world.path("model/model.safetensors"), world.path("model/pytorch_model.bin")).unwrap();
    model_fails(&world, &["no model.safetensors", "pytorch_model.bin", "save_pretrained"]);
}

#[test]
fn weights_that_are_not_numbers() {
    let world = World::new(GQA).calibrated();
    world.surgery(|t| {
        t.get_mut("model.layers.0.self_attn.k_proj.weight").unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes())
    });
    fails(
        &world,
        &[EVAL, &["--scheme", BASE, "--json", "--out", "out"]].concat(),
        &["dense", "window 0", "not finite"],
    );
    fails(&world, &[CALIBRATE, &["--out", "out"]].concat(), &["window 0", "not finite"]);
    for weight in ["model.embed_tokens.weight", "lm_head.weight", "model.layers.2.mlp.down_proj.weight"] {
        let world = World::new(GQA);
        world.surgery(|t| {
            let values = &mut t.get_mut(weight).unwrap().2;
            values.chunks_exact_mut(4).for_each(|v| v.copy_from_slice(&f32::INFINITY.to_le_bytes()));
        });
        fails(&world, &[EVAL, &["--scheme", BASE, "--no-diagnostics"]].concat(), &["dense", "window 0", "not finite"]);
    }
}

#[test]
fn run_on_weights_that_are_not_numbers_leaves_no_report() {
    let world = World::new(GQA);
    world.surgery(|t| t.get_mut("model.norm.weight").unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
    world.write("run.toml", config(2));
    let output = world.run(&["run", "run.toml", "--out", "made", "-q"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("not finite") && error.lines().count() == 1, "{error}");
    assert!(world.list("made").iter().all(|n| !n.starts_with("report") && !n.ends_with(".tmp")));
    assert!(world.list("made/parts").is_empty());
}

#[test]
fn missing_tokenizer() {
    let world = World::new(GQA);
    std::fs::remove_file(world.path("model/tokenizer.json")).unwrap();
    world.succeeds(&["inspect", "model"]);
    loading_fails(&world, &["tokenizer.json", "no such file"]);
}

#[test]
fn broken_tokenizer() {
    let world = World::new(GQA);
    for content in ["", "{}", "[1, 2", "{\"model\":\n{\"type\": \"no such\"}}"] {
        world.write("model/tokenizer.json", content);
        loading_fails(&world, &["tokenizer.json", "not a tokenizer"]);
    }
}

#[test]
fn tokenizer_with_more_words_than_the_embedding() {
    let world = World::new(GQA);
    world.write("model/tokenizer.json", tokenizer(513).to_string());
    loading_fails(&world, &["tokenizer.json", "ids up to 512", "512 rows"]);
}

#[test]
fn context_beyond_learned_positions() {
    let world = World::new("gpt2");
    let long = ["--text", "text.txt", "--context", "257", "--windows", "1"];
    let needles = ["257 positions", "256"];
    fails(&world, &[&["eval", "model", "--scheme", BASE], &long[..]].concat(), &needles);
    fails(&world, &[&["calibrate", "model", "--out", "s"], &long[..]].concat(), &needles);
    world.write("run.toml", config(2).replace("context = 32", "context = 257"));
    fails(&world, &["run", "run.toml"], &needles);
    let fits = ["--text", "text.txt", "--context", "256", "--windows", "1"];
    world.succeeds(&[&["eval", "model", "--scheme", BASE], &fits[..]].concat());
}

// Texts.

#[test]
fn empty_text() {
    text_fails(&[], Some(b""), &["text.txt", "empty"]);
}

#[test]
fn text_of_white_space() {
    text_fails(&[], Some(" \n\t\r\n\u{3000}\n".as_bytes()), &["text.txt", "empty"]);
}

#[test]
fn no_characters_of_a_text() {
    text_fails(&["--max-chars", "0"], None, &["text.txt", "empty"]);
}

#[test]
fn text_that_is_not_utf8() {
    text_fails(&[], Some(b"w1 w2 \xff\xfe w3"), &["text.txt", "not UTF-8", "byte 6"]);
}

#[test]
fn text_in_utf16() {
    let bytes: Vec<u8> = "w1 w2 w3".encode_utf16().flat_map(u16::to_le_bytes).collect();
    text_fails(&[], Some(&[&[0xff, 0xfe], &bytes[..]].concat()), &["text.txt", "not UTF-8", "byte 0"]);
}

#[test]
fn missing_text() {
    text_fails(&["--text", "nowhere.txt"], None, &["nowhere.txt", "No such file", "expected a text", "UTF-8"]);
}

#[test]
fn second_text_missing() {
    text_fails(&["--text", "text.txt", "--text", "nowhere.txt"], None, &["nowhere.txt", "No such file"]);
}

#[test]
fn folder_as_text() {
    text_fails(&["--text", "model"], None, &["model", "directory", "expected a text", "UTF-8"]);
}

#[test]
fn text_shorter_than_a_window() {
    text_fails(&[], Some(b"w1 w2 w3"), &["text.txt", "3 tokens make 0 windows of 32", "2 were asked for"]);
}

#[test]
fn fewer_windows_than_asked() {
    text_fails(&["--windows", "76"], None, &["2400 tokens make 75 windows of 32", "76 were asked for"]);
    text_fails(&["--max-chars", "200"], None, &["in its first 200 characters", "2 were asked for"]);
}

#[test]
fn sizes_beyond_all_measure() {
    let largest = usize::MAX.to_string();
    text_fails(&["--windows", &largest], None, &["75 windows"]);
    text_fails(&["--context", &largest], None, &["0 windows"]);
    let world = World::new(GQA);
    fails(&world, &["inspect", "model", "--context", &largest], &["context", "expected 1 to"]);
    misused(&world, &["inspect", "model", "--context", "1e3"], &["--context", "invalid"]);
    misused(&world, &["inspect", "model", "--context", "-1"], &["'-1'"]);
}

#[test]
fn contexts_without_a_prediction() {
    text_fails(&["--context", "0"], None, &["context 0", "at least 2"]);
    text_fails(&["--context", "1"], None, &["context 1", "at least 2"]);
}

#[test]
fn no_windows() {
    text_fails(&["--windows", "0"], None, &["windows 0"]);
}

#[test]
fn bos_where_there_is_none() {
    let world = World::new(GQA);
    world.config(|c| drop(c.insert("bos_token_id".into(), Value::Null)));
    fails(&world, &[EVAL, &["--scheme", BASE, "--add-bos"]].concat(), &["no beginning-of-sequence token", "--add-bos"]);
}

#[test]
fn windows_without_a_whole_group() {
    let world = World::new(GQA);
    let args =
        ["calibrate", "model", "--text", "text.txt", "--context", "16", "--windows", "2", "--out", "s", "--base"];
    fails(&world, &[&args[..], &["kivi-2(g=17)"]].concat(), &["windows of 16", "at least 17"]);
    fails(&world, &[&args[..], &["kivi-2(g=8,sinks=9)"]].concat(), &["windows of 16", "at least 17"]);
    fails(&world, &[&args[..], &["token-2(g=8,c=3)"]].concat(), &["c=3 does not divide the head width 16"]);
    fails(&world, &[&args[..], &["kivi-2(g=8)+query-pca(rank=2,bits=4)"]].concat(), &["kivi-2(g=8)+query-pca"]);
    fails(&world, &[&args[..], &["dense"]].concat(), &["'dense'"]);
    world.write("run.toml", config(2).replacen("context = 32", "context = 7", 1));
    fails(&world, &["run", "run.toml"], &["windows of 7", "at least 8"]);
}

// Schemes.

#[test]
fn too_many_bits() {
    scheme_fails("kivi-9", &["'kivi-9'", "from 1 to 8", "'9'"]);
}

#[test]
fn no_tokens_in_a_group() {
    scheme_fails("kivi-2(g=0)", &["'kivi-2(g=0)'", "g: expected a whole number from 1"]);
}

#[test]
fn unknown_quantizer() {
    scheme_fails("kiwi-2", &["'kiwi'", "known are kivi, token"]);
    scheme_fails("kivi-2/kivi-2", &["'kivi'", "known are dense, token"]);
}

#[test]
fn unknown_option() {
    scheme_fails(
        "kivi-2(group=8)",
        &["option 'group'", "known are g, r, sinks, range, rounding, lambda, center, meta"],
    );
    scheme_fails("kivi-2+query-pca(rank=2,bits=4,size=1)", &["option 'size'", "known are rank, bits"]);
}

#[test]
fn unknown_family() {
    scheme_fails("kivi-2+pca(rank=2,bits=4)", &["'pca'", "known are query-pca, query-pca-centered"]);
    let world = World::new(GQA).calibrated();
    let basis = ["basis", "stats.safetensors", "--out", "b", "--rank", "2", "--family"];
    fails(&world, &[&basis[..], &["pca"]].concat(), &["--family", "'pca'", "known are query-pca"]);
    fails(
        &world,
        &[&basis[..], &["random", "--scope", "head"]].concat(),
        &["--scope", "'head'", "known are kv-head, query-head"],
    );
}

#[test]
fn scheme_in_pieces() {
    for scheme in
        ["", " ", "/", "+", "kivi-2+", "kivi-2/", "kivi-2(", "dense+query-pca(rank=2,bits=4)", "kivi-2\n(x)", "kivi-２"]
    {
        scheme_fails(scheme, &["scheme"]);
    }
}

#[test]
fn rank_above_the_head_width() {
    let scheme = "kivi-2(g=8,r=4)+query-pca(rank=17,bits=4)";
    scheme_fails(scheme, &["rank=17 exceeds the head width 16"]);
    let world = World::new(GQA).calibrated();
    for rank in ["17", "0", "18446744073709551615"] {
        let args = ["basis", "stats.safetensors", "--out", "b", "--family", "query-pca", "--rank", rank];
        fails(&world, &args, &[rank, "head width 16"]);
    }
    world.write("run.toml", config(2).replace("rank=2", "rank=17"));
    fails(&world, &["run", "run.toml"], &["rank=17 exceeds the head width 16"]);
}

#[test]
fn channel_groups_that_do_not_divide() {
    scheme_fails("token-2(c=5)", &["c=5 does not divide the head width 16"]);
    scheme_fails("dense/token-2(c=32)", &["c=32 does not divide the head width 16"]);
}

#[test]
fn side_code_without_a_basis() {
    let world = World::new(GQA);
    fails(&world, &[EVAL, &["--scheme", SIDE]].concat(), &["needs a basis", "--stats", "--basis"]);
    let text = config(2);
    let start = text.find("[calibrate]").unwrap();
    let end = text.find("[eval]").unwrap();
    world.write("run.toml", text[..start].to_string() + &text[end..]);
    fails(&world, &["run", "run.toml"], &["need statistics", "[calibrate]"]);
}

#[test]
fn static_quantizers_without_statistics() {
    let world = World::new(GQA);
    for scheme in [
        "grid-2(g=8)",
        "kivi-2(g=8,center)",
        "grid-2(g=8)/a2-2(c=8)",
        "klt-1.5(g=8)",
        "kivi-2(g=8,rounding=score-aware)",
    ] {
        fails(
            &world,
            &[EVAL, &["--scheme", scheme]].concat(),
            &[scheme.split('(').next().unwrap(), "needs statistics", "headq calibrate", "--stats"],
        );
    }
    let world = world.calibrated();
    for scheme in [
        "grid-2(g=8)",
        "kivi-2(g=8,center)",
        "rotated-2(g=8,center)",
        "klt-1.5(g=8,r=0)",
        "klt-2(g=4,r=0,ranges=static)",
        "kivi-2(g=8,rounding=score-aware)",
    ] {
        world.eval(&["--scheme", scheme, "--stats", "stats.safetensors"]);
    }
}

#[test]
fn mixed_policies_without_halves_or_bits_to_spare() {
    scheme_fails("kivi-2(g=33)/a2-2", &["a2-2", "g must be even, found 33"]);
    scheme_fails("dense/mse-2(g=7)", &["mse-2(g=7)", "g must be even, found 7"]);
    for policy in ["a2", "mse", "random", "recency"] {
        for bits in [1, 8] {
            scheme_fails(&format!("kivi-2/{policy}-{bits}"), &[&format!("'{policy}-{bits}'"), "must be from 2 to 7"]);
        }
    }
    scheme_fails("dense/a2-9", &["'a2-9'"]);
    scheme_fails("dense/a3-2", &["'a3'", "known are dense, token, a2, mse, random, recency"]);
    scheme_fails("a2-2", &["'a2'", "known are kivi, token, grid, rotated"]);
}

#[test]
fn learned_basis_from_statistics() {
    let scheme = "kivi-2(g=8,r=4)+learned(rank=2,bits=4)";
    let world = World::new(GQA).calibrated();
    fails(&world, &[EVAL, &["--scheme", scheme, "--stats", "stats.safetensors"]].concat(), &["learned", "trained"]);
    let basis = ["basis", "stats.safetensors", "--out", "b", "--rank", "2", "--family", "learned"];
    fails(&world, &basis, &["learned", "trained"]);
    world.write("run.toml", config(2).replace("query-pca", "learned"));
    fails(&world, &["run", "run.toml"], &["learned", "trained"]);
}

// Artifacts.

/// `eval` with a broken `stats.safetensors`, and `basis` of it.
#[track_caller]
fn stats_fail(world: &World, needles: &[&str]) {
    world.write("b", "mine");
    fails(world, &[EVAL, &["--scheme", SIDE, "--stats", "stats.safetensors"]].concat(), needles);
    fails(world, &["basis", "stats.safetensors", "--family", "query-pca", "--rank", "2", "--out", "b"], needles);
}

#[test]
fn artifacts_of_another_model() {
    let world = World::new(GQA).calibrated();
    world.succeeds(&[
        "basis",
        "stats.safetensors",
        "--family",
        "score-optimal",
        "--rank",
        "4",
        "--out",
        "basis.safetensors",
    ]);
    let identity = world.succeeds(&["inspect", "model", "--fingerprint"]);
    let short = |text: &str| text.lines().find_map(|l| l.strip_prefix("fingerprint")).unwrap().trim().to_string();
    // The same shapes, another weight.
    world.surgery(|t| t.get_mut("model.norm.weight").unwrap().2[0] ^= 1);
    let other = world.succeeds(&["inspect", "model", "--fingerprint"]);
    let needles = ["another model", &short(&identity), &short(&other)];
    assert_ne!(needles[1], needles[2]);
    fails(&world, &[EVAL, &["--scheme", SIDE, "--stats", "stats.safetensors"]].concat(), &needles);
    fails(&world, &[EVAL, &["--scheme", SIDE, "--basis", "basis.safetensors"]].concat(), &needles);
    // Even where no scheme has a use for it.
    fails(&world, &[EVAL, &["--scheme", BASE, "--basis", "basis.safetensors"]].concat(), &needles);
    world.write("run.toml", config(2).replace("[eval]", "[eval]\nbasis = [\"basis.safetensors\"]"));
    fails(&world, &["run", "run.toml"], &needles);
}

#[test]
fn artifact_of_the_wrong_kind() {
    let world = World::new(GQA).calibrated().with_basis();
    let eval = |flag, file| [EVAL, &["--scheme", SIDE, flag, file]].concat();
    fails(
        &world,
        &eval("--stats", "basis.safetensors"),
        &["basis.safetensors", "expected statistics, found \"basis\""],
    );
    fails(
        &world,
        &eval("--basis", "stats.safetensors"),
        &["stats.safetensors", "expected basis, found \"statistics\""],
    );
    let basis = ["basis", "basis.safetensors", "--family", "query-pca", "--rank", "2", "--out", "b"];
    fails(&world, &basis, &["expected statistics"]);
}

#[test]
fn missing_artifact() {
    let world = World::new(GQA);
    let statistics =
        ["nowhere: No such file", "expected statistics", "`headq calibrate MODEL --text FILE --out STATS`"];
    let bases = |found: &'static str| [found, "expected a basis", "`headq basis STATS ", "`headq finetune`"];
    let learned = "kivi-2(g=8,r=4)+learned(rank=2,bits=3)";
    let with = |args: &[&'static str]| [EVAL, args].concat();
    for (args, needles) in [
        (with(&["--scheme", SIDE, "--stats", "nowhere"]), &statistics[..]),
        (with(&["--scheme", SIDE, "--stats", "model"]), &["model: Is a directory", "expected statistics"]),
        (with(&["--scheme", SIDE, "--basis", "nowhere"]), &bases("nowhere: No such file")),
        (with(&["--scheme", SIDE, "--basis", "model"]), &bases("model: Is a directory")),
        (vec!["basis", "nowhere", "--family", "random", "--rank", "2", "--out", "b"], &statistics),
        (
            vec!["finetune", "model", "--text", "text.txt", "--stats", "nowhere", "--scheme", learned, "--out", "b"],
            &statistics,
        ),
        (
            [&["compare"], &EVAL[1..], &["--scheme", SIDE, "--family", "random", "--stats", "nowhere"]].concat(),
            &statistics,
        ),
        (
            [&["compare"], &EVAL[1..], &["--scheme", SIDE, "--basis", "nowhere"]].concat(),
            &bases("nowhere: No such file"),
        ),
    ] {
        assert_eq!(fails(&world, &args, needles), Some(1));
    }
    world.write("run.toml", config(2).replace("[eval]", "[eval]\nbasis = [\"nowhere\"]"));
    fails(&world, &["run", "run.toml"], &bases("nowhere: No such file"));
}

/// Malformed schemes are wrong usage where they are typed, and bad input where a file has them.
#[test]
fn the_status_says_where_a_mistake_is() {
    let world = World::new(GQA).calibrated();
    let learned = "kivi-9+learned(rank=2,bits=3)";
    let sizes = &EVAL[2..];
    for args in [
        [EVAL, &["--scheme", "kivi-9"]].concat(),
        [&["compare", "model"], sizes, &["--scheme", "kivi-9", "--family", "random"]].concat(),
        [&CALIBRATE[..CALIBRATE.len() - 1], &["kivi-9", "--out", "s"]].concat(),
        [&["finetune", "model"], sizes, &["--stats", "stats.safetensors", "--scheme", learned, "--out", "b"]].concat(),
        diagnosis(&["--base", "kivi-9"]),
        vec!["inspect", "model", "--scheme", "kivi-9"],
    ] {
        assert_eq!(fails(&world, &args, &["'kivi-9'"]), Some(2), "{args:?}");
    }
    let compare = "[compare]\ntext = \"text.txt\"\ncontext = 32\nwindows = 2\nfamilies = [\"random\"]\n";
    let head = "name = \"x\"\nmodel = \"model\"\n";
    for (text, needle) in [
        (config(2).replace(BASE, "kivi-9"), "'kivi-9'"),
        (config(2).replace("windows = 2", "windows = 0"), "windows 0"),
        (config(2).replace("model = ", "device = \"abacus\"\nmodel = "), "abacus"),
        (diagnose_config().replace("kivi-2", "kivi-9"), "'kivi-9"),
        (diagnose_config().replace("windows = 2", "windows = 0"), "windows 0"),
        (format!("{head}{compare}scheme = \"kivi-9+random(rank=2,bits=4)\"\n"), "kivi-9"),
        (format!("{head}{compare}scheme = \"kivi-2(g=8,r=4)+random(rank=2,bits=4)\"\n"), "no [calibrate] section"),
    ] {
        world.write("run.toml", text);
        assert_eq!(fails(&world, &["run", "run.toml", "--out", "made"], &["config run.toml: ", needle]), Some(1));
        let output = world.run(&["suite", "run.toml", "--out", "made", "--quiet"]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && error.contains(needle), "{error}");
    }
    // An artifact is a file, too.
    let (tensors, header) = world.artifact("stats.safetensors");
    let mut json: Value = serde_json::from_str(&header).unwrap();
    json["base"] = json!("kivi-9");
    world.write_tensors("stats.safetensors", &tensors, Some(&json.to_string()));
    let needles = ["stats.safetensors: its header", "'kivi-9'"];
    let learned = "kivi-2(g=8,r=4)+learned(rank=2,bits=3)";
    for args in [
        [EVAL, &["--scheme", SIDE, "--stats", "stats.safetensors"]].concat(),
        vec!["basis", "stats.safetensors", "--family", "query-pca", "--rank", "2", "--out", "b"],
        [&["finetune", "model"], sizes, &["--stats", "stats.safetensors", "--scheme", learned, "--out", "b"]].concat(),
    ] {
        assert_eq!(fails(&world, &args, &needles), Some(1));
    }
}

#[test]
fn truncated_artifact() {
    let world = World::new(GQA).calibrated();
    let bytes = world.read("stats.safetensors");
    for length in [0, 7, 8, 500, bytes.len() / 2, bytes.len() - 1] {
        world.write("stats.safetensors", &bytes[..length]);
        stats_fail(&world, &["stats.safetensors", "not a whole safetensors file"]);
    }
}

#[test]
fn artifact_of_noise() {
    let world = World::new(GQA);
    for seed in 0..4u8 {
        let noise: Vec<u8> = (0..4000u32).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8 ^ seed).collect();
        world.write("stats.safetensors", noise);
        stats_fail(&world, &["stats.safetensors", "not a whole safetensors file"]);
    }
}

#[test]
fn safetensors_that_are_no_artifact() {
    let world = World::new(GQA);
    std::fs::copy(world.path("model/model.safetensors"), world.path("stats.safetensors")).unwrap();
    stats_fail(&world, &["stats.safetensors", "without a 'headq' header"]);
}

#[test]
fn artifact_headers_that_make_no_sense() {
    let world = World::new(GQA).calibrated();
    let (tensors, header) = world.artifact("stats.safetensors");
    let json: Value = serde_json::from_str(&header).unwrap();
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut json = json.clone();
        edit(&mut json);
        json.to_string()
    };
    for (header, needle) in [
        ("{".to_string(), "not JSON"),
        ("[]".to_string(), "schema"),
        (edited(&|h| h["schema"] = json!(2)), "schema 2"),
        (edited(&|h| h["kind"] = json!("weights")), "expected statistics"),
        (edited(&|h| drop(h.as_object_mut().unwrap().remove("model"))), "model"),
        (edited(&|h| h["model"]["kv_heads"] = json!(0)), "impossible"),
        (edited(&|h| h["model"]["kv_heads"] = json!(3)), "impossible"),
        (edited(&|h| h["model"]["layers"] = json!(4)), "q.count"),
        (edited(&|h| h["model"]["head_dim"] = json!(1u64 << 62)), "q.sum"),
    ] {
        world.write_tensors("stats.safetensors", &tensors, Some(&header));
        stats_fail(&world, &["stats.safetensors", needle]);
    }
    world.write_tensors("stats.safetensors", &tensors, Some(&edited(&|h| h["base"] = json!("kiwi-2"))));
    fails(&world, &[EVAL, &["--scheme", SIDE, "--stats", "stats.safetensors"]].concat(), &["kiwi"]);
}

#[test]
fn artifact_with_nan() {
    let world = World::new(GQA).calibrated();
    world.succeeds(&[
        "basis",
        "stats.safetensors",
        "--family",
        "score-optimal",
        "--rank",
        "4",
        "--out",
        "basis.safetensors",
    ]);
    let (mut tensors, header) = world.artifact("stats.safetensors");
    tensors.get_mut("e.outer").unwrap().2[80..88].copy_from_slice(&f64::NAN.to_le_bytes());
    world.write_tensors("stats.safetensors", &tensors, Some(&header));
    stats_fail(&world, &["stats.safetensors", "'e.outer' holds NaN or infinity"]);
    let (mut tensors, header) = world.artifact("basis.safetensors");
    tensors.get_mut("encoder").unwrap().2[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    world.write_tensors("basis.safetensors", &tensors, Some(&header));
    fails(
        &world,
        &[EVAL, &["--scheme", SIDE, "--basis", "basis.safetensors"]].concat(),
        &["'encoder' holds NaN or infinity"],
    );
}

#[test]
fn statistics_of_nothing() {
    let world = World::new(GQA).calibrated();
    let (mut tensors, header) = world.artifact("stats.safetensors");
    tensors.iter_mut().for_each(|(_, t)| t.2.fill(0));
    world.write_tensors("stats.safetensors", &tensors, Some(&header));
    stats_fail(&world, &["the statistics hold no queries"]);
    // Counted, but all zero.
    for count in tensors.iter_mut().filter(|(name, _)| name.ends_with("count")) {
        count.1.2.as_chunks_mut::<8>().0.iter_mut().for_each(|n| *n = 1u64.to_le_bytes());
    }
    world.write_tensors("stats.safetensors", &tensors, Some(&header));
    fails(&world, &[EVAL, &["--scheme", SIDE, "--stats", "stats.safetensors"]].concat(), &["zero"]);
}

#[test]
fn artifact_with_the_wrong_shape() {
    let world = World::new(GQA).calibrated();
    let (mut tensors, header) = world.artifact("stats.safetensors");
    let whole = tensors.clone();
    tensors.get_mut("v.sum").unwrap().1 = vec![3, 16, 2];
    world.write_tensors("stats.safetensors", &tensors, Some(&header));
    stats_fail(&world, &["'v.sum'", "[3, 2, 16]", "[3, 16, 2]"]);
    let mut tensors = whole;
    tensors.remove("k.outer");
    world.write_tensors("stats.safetensors", &tensors, Some(&header));
    stats_fail(&world, &["'k.outer' is missing"]);
}

#[test]
fn basis_that_is_not_the_schemes() {
    let world = World::new(GQA).calibrated();
    let make = |family: &str, rank: &str, scope: &str, out: &str| {
        world.succeeds(&[
            "basis",
            "stats.safetensors",
            "--family",
            family,
            "--rank",
            rank,
            "--scope",
            scope,
            "--out",
            out,
        ]);
    };
    make("query-pca", "3", "kv-head", "rank3");
    make("random", "2", "kv-head", "random2");
    make("query-pca", "2", "query-head", "by-query");
    make("residual-pca", "2", "kv-head", "residual2");
    let scheme = "kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)";
    let eval = |scheme, file| [EVAL, &["--scheme", scheme, "--basis", file]].concat();
    fails(&world, &eval(scheme, "rank3"), &["rank3", "rank 3", "need 2"]);
    fails(&world, &eval(scheme, "random2"), &["random2", "family random", "need query-pca"]);
    fails(&world, &eval(scheme, "by-query"), &["by-query", "scope query-head", "need kv-head"]);
    let other = "kivi-3(g=8,r=4)+residual-pca(rank=2,bits=4)";
    fails(&world, &eval(other, "residual2"), &["residual2", "kivi-2(g=8,r=32)", "kivi-3(g=8,r=4)"]);
    // Of all that were given.
    fails(&world, &[&eval(scheme, "rank3")[..], &["--basis", "random2"]].concat(), &["rank3", "random2"]);
    // Also where statistics could stand in for it.
    let both = [&eval(scheme, "rank3")[..], &["--stats", "stats.safetensors"]].concat();
    fails(&world, &both, &["rank3: agrees with no scheme", "rank 3", "need 2"]);
}

#[test]
fn residuals_of_another_base() {
    let world = World::new(GQA).calibrated();
    for base in [
        "kivi-3(g=8,r=4)",
        "kivi-2(g=16,r=4)",
        "kivi-2(g=8,r=4,sinks=1)",
        "kivi-2(g=8,r=4,range=0.9)",
        "token-2(g=8,r=4)",
    ] {
        for family in ["score-optimal", "residual-pca"] {
            let scheme = format!("{base}+{family}(rank=2,bits=4)");
            let eval = [EVAL, &["--scheme", &scheme, "--stats", "stats.safetensors"]].concat();
            fails(&world, &eval, &["kivi-2(g=8,r=32)", &format!("--base '{base}'")]);
        }
        let scheme = format!("{base}+query-pca(rank=2,bits=4)");
        world.eval(&["--scheme", &scheme, "--stats", "stats.safetensors"]);
    }
}

// Outputs and devices.

#[test]
fn outputs_that_cannot_be_written() {
    let world = World::new(GQA).calibrated();
    std::fs::create_dir(world.path("folder")).unwrap();
    for (out, needle) in [("nowhere/out", "nowhere/out"), ("text.txt/out", "text.txt/out"), ("folder", "directory")] {
        fails(&world, &[CALIBRATE, &["--out", out]].concat(), &[needle]);
        fails(&world, &[EVAL, &["--scheme", BASE, "--out", out]].concat(), &[needle]);
        fails(&world, &["basis", "stats.safetensors", "--family", "random", "--rank", "2", "--out", out], &[needle]);
    }
    world.write("run.toml", config(2));
    fails(&world, &["run", "run.toml", "--out", "text.txt"], &["text.txt"]);
    fails(&world, &["run", "run.toml", "--out", "text.txt/made"], &["text.txt/made"]);
}

#[test]
fn unknown_device() {
    let world = World::new(GQA);
    for device in ["abacus", "", "flex:0", "FLEX", "cuda:x", "wgpu:", "remote", "remote:http://localhost:3000"] {
        misused(&world, &[EVAL, &["--scheme", BASE, "--device", device]].concat(), &[device, "device"]);
        misused(&world, &[CALIBRATE, &["--out", "s", "--device", device]].concat(), &[device, "device"]);
        world.write("run.toml", config(2));
        misused(&world, &["run", "run.toml", "--device", device], &[device, "device"]);
    }
}

#[test]
fn devices_that_are_not_here() {
    let world = World::new(GQA);
    // Number 99 is not there even where the backend is built and has devices.
    for device in ["cuda:99", "wgpu:99", "remote:ws://127.0.0.1:9"] {
        fails(&world, &[EVAL, &["--scheme", BASE, "--device", device]].concat(), &[device]);
        world.write("run.toml", config(2));
        fails(&world, &["run", "run.toml", "--device", device], &[device]);
    }
}

#[test]
fn no_threads() {
    misused(&World::new(GQA), &["inspect", "model", "--threads", "0"], &["--threads"]);
}

#[test]
fn other_wrong_usage() {
    let world = World::new(GQA);
    misused(&world, &["inspct", "model"], &["inspect"]);
    misused(&world, &["eval", "model", "--text", "text.txt"], &["--scheme"]);
    misused(&world, &["eval", "model", "--scheme", "dense"], &["--text"]);
    misused(&world, &["calibrate", "model", "--text", "text.txt"], &["--out"]);
    misused(&world, &["calibrate", "model", "--text", "text.txt", "--out", ""], &["--out"]);
    misused(&world, &["inspect", "model", "--seed", "x"], &["--seed"]);
}

// Configurations.

#[test]
fn missing_config() {
    let world = World::new(GQA);
    let expected = ["expected a configuration in TOML", "configs/quickstart.toml"];
    fails(&world, &["run", "nowhere.toml"], &[&["nowhere.toml", "No such file"], &expected[..]].concat());
    fails(&world, &["run", "model"], &[&["model", "directory"], &expected[..]].concat());
    fails(&world, &["suite", "nowhere.toml", "--out", "made"], &["nowhere.toml", "No such file", expected[0]]);
    world.write("run.toml", b"name = \"\xff\"");
    fails(&world, &["run", "run.toml"], &["run.toml"]);
}

#[test]
fn config_that_is_not_toml() {
    config_fails("name = \"x\"\nmodel = [", &["run.toml", "line 2"]);
    config_fails("", &["run.toml", "missing field `name`"]);
}

#[test]
fn unknown_key() {
    config_fails(
        &config(2).replace("windows = 2", "window = 2"),
        &["run.toml", "line", "unknown field `window`", "windows"],
    );
}

#[test]
fn missing_key() {
    config_fails(&config(2).replace("context = 32\n", ""), &["run.toml", "missing field `context`"]);
    config_fails(&config(2).replace("model = \"model\"\n", ""), &["missing field `model`"]);
}

#[test]
fn keys_of_the_wrong_type() {
    config_fails(&config(2).replace("windows = 2", "windows = \"2\""), &["run.toml", "expected usize", "string \"2\""]);
    config_fails(&config(2).replace("windows = 2", "windows = -2"), &["integer `-2`"]);
    config_fails(&config(2).replace("\"calibration.txt\"", "7"), &["expected a file name or a list of file names"]);
    config_fails(&config(2).replace("name = \"tiny\"", "name = [\"tiny\"]"), &["line 1", "expected a string"]);
}

#[test]
fn lists_that_are_empty() {
    let text = config(2);
    let start = text.find("schemes").unwrap();
    config_fails(&format!("{}schemes = []\n", &text[..start]), &["eval.schemes is empty"]);
    config_fails(&text.replace("[\"text.txt\", \"other.txt\"]", "[]"), &["text is an empty list"]);
}

#[test]
fn variable_that_is_not_set() {
    let text = config(2).replace("\"model\"", "\"${HEADQ_TEST_UNSET}/model\"");
    config_fails(&text, &["run.toml", "HEADQ_TEST_UNSET", "not set"]);
    config_fails(&config(2).replace("\"model\"", "\"${HEADQ\""), &["does not close"]);
}

#[test]
fn names_that_leave_the_runs_folder() {
    for name in ["a/b", "../x", "..", ".", "", "a b", "a\\\\b", "/tmp"] {
        config_fails(&config(2).replace("\"tiny\"", &format!("\"{name}\"")), &["run.toml", "name '", "names a folder"]);
    }
}

#[test]
fn configured_values_that_are_bad() {
    config_fails(&config(2).replace("windows = 2", "windows = 0"), &["windows 0"]);
    config_fails(&config(2).replace("windows = 2", "windows = 999"), &["999 were asked for"]);
    config_fails(&config(2).replace("context = 32", "context = 1"), &["context 1"]);
    config_fails(&config(2).replace(BASE, "kivi-9"), &["'kivi-9'"]);
    config_fails(&config(2).replace("\"text.txt\"", "\"nowhere.txt\""), &["nowhere.txt"]);
    config_fails(&config(2).replace("model = ", "device = \"cuda\"\nmodel = "), &["cuda"]);
}

#[test]
fn broken_statistics_of_a_run() {
    let world = World::new(GQA);
    world.write("run.toml", config(2));
    world.succeeds(&["run", "run.toml", "--out", "made"]);
    world.write("made/stats-kivi-2_g8_r4.safetensors", "half");
    fails(&world, &["run", "run.toml", "--out", "made"], &["stats-kivi-2_g8_r4.safetensors", "make it again"]);
    std::fs::remove_file(world.path("made/stats-kivi-2_g8_r4.safetensors")).unwrap();
    world.succeeds(&["run", "run.toml", "--out", "made"]);
}

#[test]
fn folder_of_something_else() {
    let world = World::new(GQA);
    world.write("run.toml", config(2));
    fails(&world, &["run", "run.toml", "--out", "model"], &["model", "not empty"]);
    std::fs::create_dir(world.path("made")).unwrap();
    for content in ["", "{", "[]", "{}"] {
        world.write("made/run.json", content);
        fails(&world, &["run", "run.toml", "--out", "made"], &["made/run.json: damaged (", "remove the folder"]);
    }
    world.write("made/run.json", "{\"program\": \"headq 0.0.1\"}");
    fails(&world, &["run", "run.toml", "--out", "made"], &["made", "another version of this program"]);
}

/// Values that come from the command line are not blamed on a file.
#[test]
fn settings_of_a_model_are_named_as_such() {
    let world = World::new(GQA);
    let with = |settings: &[&'static str]| {
        let flags = settings.iter().flat_map(|setting| ["--model-set", setting]);
        ["inspect", "model"].into_iter().chain(flags).collect::<Vec<_>>()
    };
    for (settings, needle) in [
        (&["rope_theta=high"][..], "`rope_theta`: expected a number, found \"high\""),
        (&["num_key_value_heads=3"], "`num_key_value_heads`: expected a divisor of the 8 query heads, found 3"),
        (&["num_attention_heads=5", "head_dim=16"], "`num_key_value_heads`: expected a divisor of the 5 query heads"),
        (&["model_type=mamba"], "`model_type`: unknown architecture \"mamba\""),
        (&["rms_norm_eps=-1"], "`norm epsilon`: expected a positive number"),
        (&["rope_parameters={\"rope_type\":\"linear\"}"], "`rope_parameters`: `factor`: expected a positive number"),
        (&["rope_thetta=1"], "`rope_thetta`: expected a key that matters"),
        (&["quantization_config={\"bits\":4}"], "`quantization_config`"),
        (&["vocab_size=512", "hidden_act=swiglu"], "`hidden_act`: expected gelu"),
    ] {
        let line = format!("error: --model-set (in a run, [model_set]): {needle}");
        fails(&world, &with(settings), &[&line]);
    }
    // Beside one, what is wrong in the file is still the file's.
    world.config(|c| drop(c.insert("hidden_act".into(), json!("swiglu"))));
    fails(&world, &with(&["rope_theta=10000"]), &["model/config.json: `hidden_act`"]);
    std::fs::rename(world.path("model/config.json"), world.path("other.json")).unwrap();
    fails(&world, &["inspect", "model", "--model-config", "other.json"], &["error: other.json: `hidden_act`"]);
    for (path, found) in [("nowhere.json", "No such file"), ("model", "Is a directory")] {
        let needles = [path, found, "--model-config (in a run, model_config) takes the config.json of the model"];
        fails(&world, &["inspect", "model", "--model-config", path], &needles);
    }
}

// Diagnoses.

#[test]
fn windows_to_measure_and_windows_to_calibrate_on() {
    let world = World::new(GQA);
    let needles =
        ["text.txt", "2400 tokens make 37 windows of 64, and 38 were asked for", "36 windows are measured, 2 are for"];
    diagnosis_fails(&world, 1, &["--windows", "36"], &needles);
    world.write("short.txt", text(100, 3));
    diagnosis_fails(&world, 1, &["--calibration-text", "short.txt"], &["short.txt", "make 1 windows", "2 were asked"]);
    diagnosis_fails(&world, 2, &["--windows", "0"], &["windows 0"]);
    diagnosis_fails(&world, 2, &["--calibration-windows", "0"], &["calibration windows 0"]);
    diagnosis_fails(&world, 2, &["--calibration-windows", "0", "--calibration-text", "other.txt"], &["windows 0"]);
    let largest = usize::MAX.to_string();
    diagnosis_fails(&world, 1, &["--windows", &largest], &["37 windows", &largest]);
    diagnosis_fails(&world, 1, &["--calibration-windows", &largest], &["37 windows", &largest]);
    diagnosis_fails(&world, 1, &["--max-chars", "0"], &["text.txt", "empty"]);
}

#[test]
fn a_text_both_measured_and_calibrated_on() {
    let world = World::new(GQA);
    let needles = ["text text.txt: at least 128 of its 128 tokens (2 of 2 windows) are in ", "--allow-overlap"];
    diagnosis_fails(&world, 1, &["--calibration-text", "text.txt"], &needles);
    // By content, whatever it is called.
    world.write("copy.txt", world.read("text.txt"));
    diagnosis_fails(&world, 1, &["--calibration-text", "other.txt", "--calibration-text", "copy.txt"], &needles);
}

#[test]
fn calibration_texts_that_cannot_be_read() {
    let world = World::new(GQA);
    world.write("bytes.txt", b"w1 w2 \xff\xfe w3");
    diagnosis_fails(&world, 1, &["--calibration-text", "bytes.txt"], &["bytes.txt", "not UTF-8", "byte 6"]);
    diagnosis_fails(&world, 1, &["--calibration-text", "nowhere.txt"], &["nowhere.txt", "No such file"]);
    diagnosis_fails(&world, 1, &["--calibration-text", "model"], &["model", "directory"]);
    world.write("blank.txt", " \n");
    diagnosis_fails(&world, 1, &["--calibration-text", "blank.txt"], &["blank.txt", "empty"]);
}

#[test]
fn windows_in_which_the_base_codes_nothing() {
    let world = World::new(GQA);
    let needles = ["windows of 12 tokens", "dense throughout", "at least 13"];
    diagnosis_fails(&world, 2, &["--context", "12"], &needles);
    let needles = ["windows of 64 tokens", "kivi-2(g=32,r=32)", "at least 65"];
    diagnosis_fails(&world, 2, &["--base", "kivi-2"], &needles);
    world.succeeds(&diagnosis(&["--context", "13"]));
}

#[test]
fn windows_beyond_learned_positions() {
    let world = World::new("gpt2");
    diagnosis_fails(&world, 1, &["--context", "257"], &["257 positions", "256"]);
    let section = "[calibrate]\ntext = \"other.txt\"\ncontext = 257\nwindows = 2\n";
    world.write("run.toml", diagnose_config() + section);
    assert_eq!(fails(&world, &["run", "run.toml"], &["257 positions", "256"]), Some(1));
    world.succeeds(&diagnosis(&["--context", "256", "--links", "null-space"]));
}

#[test]
fn weights_of_a_diagnosis_that_are_not_numbers() {
    // The last norm is not read before the first losses are, when statistics have been kept.
    for (weight, left) in [("model.layers.0.self_attn.k_proj.weight", 0), ("model.norm.weight", 1)] {
        let world = World::new(GQA);
        world.surgery(|t| t.get_mut(weight).unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
        let output = world.run(&diagnosis(&["--quiet"]));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && error.lines().count() == 1, "{error}");
        ["window 0", "not finite"]
            .iter()
            .for_each(|needle| assert!(error.contains(needle), "{needle:?} is not in: {error}"));
        let files = if world.path("made").exists() { world.list("made") } else { Vec::new() };
        assert_eq!(files.iter().filter(|f| f.ends_with(".safetensors")).count(), left);
        assert!(left > 0 || files.is_empty(), "a run that got nowhere leaves nothing behind: {files:?}");
        assert!(!files.iter().any(|f| f.ends_with("diagnosis.json")));
    }
}

#[test]
fn a_head_whose_queries_are_zero_is_diagnosed_like_others() {
    let world = World::new(GQA);
    world.surgery(|t| t.get_mut("model.layers.1.self_attn.q_proj.weight").unwrap().2.fill(0));
    world.succeeds(&diagnosis(&[]));
    let diagnosis = world.json("made/diagnosis.json");
    let maps = diagnosis["bases"]["maps"].as_array().unwrap();
    assert!(!maps.is_empty() && maps.iter().all(|m| m["fisher"][1][0] == 0.0), "its scores cannot be wrong");
}

#[test]
fn links_that_are_none() {
    let world = World::new(GQA);
    let known = "known are metric, counterexamples, null-space, bases, direction, route-flips, perplexity";
    diagnosis_fails(&world, 2, &["--links", "metrics"], &["links: 'metrics'", known]);
    diagnosis_fails(&world, 2, &["--links", "metric,"], &["links: ''", known]);
    diagnosis_fails(&world, 2, &["--links", ""], &["links: ''", known]);
    diagnosis_fails(&world, 2, &["--links", "metric, bases"], &["links: ' bases'", known]);
    diagnosis_fails(&world, 2, &["--links", "bases,metric,bases"], &["links: 'bases' is given twice"]);
    diagnosis_fails(&world, 2, &["--links", "bases", "--links", "bases"], &["links: 'bases' is given twice"]);
    misused(&world, &diagnosis(&["--links"]), &["--links"]);
}

#[test]
fn thresholds_without_a_meaning() {
    let world = World::new(GQA);
    for (threshold, needle) in [
        ("min-rho", "threshold 'min-rho' is not written NAME=VALUE"),
        ("", "threshold '' is not written NAME=VALUE"),
        ("rho=0.5", "'rho' is not known; known are confidence, replicates, min-units"),
        ("min_rho=0.5", "'min_rho' is not known"),
        ("=1", "'' is not known"),
        ("min-rho=", "min-rho: expected a number, found ''"),
        ("min-rho=high", "min-rho: expected a number, found 'high'"),
        ("min-rho=NaN", "min-rho: expected a number, found 'NaN'"),
        ("min-rho=null", "min-rho: expected a number, found 'null'"),
        ("min-rho=\"1\"", "min-rho: expected a number, found '\"1\"'"),
        ("min-rho=-0.5", "min-rho: expected a number of at least 0, found -0.5"),
        ("min-rho=1e999", "min-rho: expected a number, found '1e999'"),
        ("confidence=1", "confidence: expected a number between 0 and 1, found 1"),
        ("confidence=0", "confidence: expected a number between 0 and 1, found 0"),
        ("replicates=2.5", "replicates: expected a number, found '2.5'"),
        ("replicates=19", "replicates: expected 20 to 100000, found 19"),
        ("min-units=1", "min-units: expected 2 to 1000000, found 1"),
        ("min-points=2", "min-points: expected 3 to 1000000, found 2"),
    ] {
        diagnosis_fails(&world, 2, &["--threshold", threshold], &[needle]);
    }
}

#[test]
fn corrections_that_do_not_fit() {
    let world = World::new(GQA);
    diagnosis_fails(&world, 1, &["--rank", "17"], &["query-pca(rank=17,bits=4)", "exceeds the head width 16"]);
    diagnosis_fails(&world, 2, &["--rank", "0"], &["rank: expected 1 to the head width of the model, found 0"]);
    diagnosis_fails(&world, 2, &["--bits", "1"], &["bits", "2 to 8", "found 1"]);
    diagnosis_fails(&world, 2, &["--bits", "9"], &["bits", "2 to 8", "found 9"]);
    misused(&world, &diagnosis(&["--rank", "two"]), &["--rank"]);
    misused(&world, &diagnosis(&["--bits", "-1"]), &["-1"]);
}

#[test]
fn bases_that_are_none() {
    let world = World::new(GQA);
    for base in [
        "",
        "kivi",
        "kivi-9",
        "kiwi-2",
        "dense",
        "kivi-2(g=8",
        "kivi-2(g=8)/token-2(c=8)",
        "kivi-2+query-pca(rank=2,bits=4)",
    ] {
        diagnosis_fails(&world, 2, &["--base", base], &[&format!("scheme '{base}'")]);
        world.write("run.toml", diagnose_config().replace("kivi-2(g=8,r=4)", base));
        fails(&world, &["run", "run.toml"], &["run.toml", "base: ", base]);
    }
    diagnosis_fails(&world, 1, &["--base", "token-2(g=8,r=4,c=3)"], &["c=3 does not divide the head width 16"]);
}

#[test]
fn folders_that_are_not_a_diagnosis() {
    let world = World::new(GQA);
    world.write("file", "mine");
    diagnosis_fails(&world, 1, &["--out", "file"], &["file"]);
    diagnosis_fails(&world, 1, &["--out", "file/made"], &["file/made"]);
    diagnosis_fails(&world, 1, &["--out", "model"], &["model", "not empty and holds no run"]);
    misused(&world, &diagnosis(&["--out", ""]), &["--out"]);
    world.write("run.toml", config(2));
    world.succeeds(&["run", "run.toml", "--out", "evaluated"]);
    diagnosis_fails(&world, 1, &["--out", "evaluated"], &["evaluated", "another configuration"]);
    world.succeeds(&diagnosis(&["--links", "null-space"]));
    fails(&world, &["run", "run.toml", "--out", "made"], &["made", "another configuration"]);
}

fn diagnose_config() -> String {
    r#"name = "tiny"
model = "model"

[diagnose]
text = "text.txt"
context = 64
windows = 2
base = "kivi-2(g=8,r=4)"

"#
    .into()
}

#[test]
fn configurations_of_a_diagnosis() {
    let text = diagnose_config();
    let eval = &config(2)[config(2).find("[eval]").unwrap()..];
    config_fails(&format!("{text}{eval}"), &["run.toml", "both [eval] and [diagnose]"]);
    config_fails("name = \"tiny\"\nmodel = \"model\"\n", &["run.toml", "[eval] or [diagnose], found none"]);
    config_fails(&text.replace("windows", "window"), &["line 7", "unknown field `window`", "windows"]);
    config_fails(&format!("{text}link = [\"metric\"]\n"), &["unknown field `link`", "links"]);
    config_fails(&format!("{text}links = []\n"), &["run.toml", "links: the list is empty"]);
    config_fails(&format!("{text}links = [\"bases\", \"bases\"]\n"), &["run.toml", "'bases' is given twice"]);
    config_fails(&format!("{text}rank = 0\n"), &["run.toml", "rank: expected 1 to the head width"]);
    config_fails(&format!("{text}bits = 9\n"), &["run.toml", "bits", "2 to 8"]);
    config_fails(&format!("{text}calibration_windows = 0\n"), &["calibration windows 0"]);
    config_fails(&format!("{text}[diagnose.thresholds]\nmin-rh = 0.5\n"), &["unknown field `min-rh`", "`min-rho`"]);
    config_fails(&format!("{text}[diagnose.thresholds]\nmin-rho = -1.0\n"), &["run.toml", "threshold min-rho"]);
    config_fails(&format!("{text}[diagnose.thresholds]\nmin-rho = nan\n"), &["run.toml", "threshold min-rho"]);
    config_fails(&format!("{text}[diagnose.thresholds]\nconfidence = 1.5\n"), &["run.toml", "threshold confidence"]);
    config_fails(&text.replace("text = \"text.txt\"", "text = []"), &["text is an empty list"]);
    config_fails(&text.replace("text = \"text.txt\"\n", ""), &["missing field `text`"]);
}
