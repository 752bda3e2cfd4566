//! Tokenizers: from `tokenizer.json`, and rebuilt from GGUF metadata.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
mod gguf_writer;

use candle_core::quantized::gguf_file::Value as Meta;
use common::{Copy, fixture, open};
use gguf_writer::{GgufCopy, list, texts};
use headq_models::{LoadOptions, Tokenizer, tokenizer};
use serde_json::json;

const WORDS: [&str; 8] = ["<s>", "a", "b", "c", "Ġ", "ab", "Ġab", "<unk>"];

fn tokenizer_json(words: &[&str]) -> String {
    let vocab: serde_json::Map<_, _> = words.iter().enumerate().map(|(i, w)| ((*w).to_owned(), i.into())).collect();
    json!({
        "version": "1.0", "normalizer": null, "post_processor": null,
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}, "padding": null,
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": ["a b", "Ġ ab"]},
    })
    .to_string()
}

fn folder(files: &[(&str, String)]) -> Copy {
    let copy = Copy::of("llama-tied");
    for (name, text) in files {
        std::fs::write(copy.file(name), text).unwrap();
    }
    copy
}

#[test]
fn a_folder_has_its_tokenizer() {
    let copy = folder(&[
        ("tokenizer.json", tokenizer_json(&WORDS)),
        ("tokenizer_config.json", json!({"bos_token": {"content": "<s>"}}).to_string()),
    ]);
    let t = open(copy.path()).unwrap().tokenizer().unwrap();
    assert_eq!(t.encode("ab abc").unwrap(), [5, 6, 3], "no truncation, no special tokens");
    assert_eq!(t.encode("<s>ab").unwrap(), [0, 5]);
    assert_eq!(t.decode(&[5, 6, 3]).unwrap(), "ab abc");
    assert_eq!((t.bos(), t.eos(), t.vocab_size()), (Some(0), [2].as_slice(), 8));
    // Without tokenizer_config.json, the config's.
    std::fs::remove_file(copy.file("tokenizer_config.json")).unwrap();
    assert_eq!(tokenizer(copy.path(), &LoadOptions::default()).unwrap().bos(), Some(1));
}

#[test]
fn missing_tokenizer_is_an_error_only_when_asked_for() {
    let message = open(&fixture("gpt2")).unwrap().tokenizer().unwrap_err().to_string();
    assert!(message.contains("tokenizer.json: no such file"), "{message}");
}

#[test]
fn broken_tokenizers_are_errors() {
    let long = json!({"type": "BPE", "vocab": {"aaaa": 0, "bbbb": 1}, "merges": ["aaaa bbbb"]});
    let long = json!({"version": "1.0", "added_tokens": [], "model": long}).to_string();
    for text in ["{}".to_owned(), "not json".into(), tokenizer_json(&["a", "b"]), long] {
        let copy = folder(&[("tokenizer.json", text)]);
        let message = open(copy.path()).unwrap().tokenizer().unwrap_err().to_string();
        assert!(
            message.contains("tokenizer.json") && message.contains("fetch it again") && !message.contains('\n'),
            "{message}"
        );
    }
}

#[test]
fn tokenizer_larger_than_the_embedding() {
    let many: Vec<String> = (0..600).map(|i| format!("w{i}")).collect();
    let words: Vec<&str> = WORDS.into_iter().chain(many.iter().map(String::as_str)).collect();
    let copy = folder(&[("tokenizer.json", tokenizer_json(&words))]);
    let message = open(copy.path()).unwrap().tokenizer().unwrap_err().to_string();
    assert!(message.contains("607") && message.contains("512 rows"), "{message}");
}

/// A GGUF file whose tokenizer has these keys.
fn from_gguf(keys: Vec<(&str, Meta)>) -> Result<Tokenizer, headq_models::ModelError> {
    let mut gguf = GgufCopy::llama("llama-tied");
    gguf.metadata.extend(keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)));
    let dir = tempfile::tempdir().unwrap();
    let path = gguf.write(dir.path());
    tokenizer(path, &LoadOptions::default())
}

fn byte_level(pre: &str) -> Vec<(&'static str, Meta)> {
    let tokens = ["<s>", "a", "b", "1", "2", "Ġ", "ab", "Ġab", "12", "Ġ1", "<tool>", "é", "Ã", "©", "Ċ"];
    let types = [3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1];
    vec![
        ("model", Meta::String("gpt2".into())),
        ("pre", Meta::String(pre.into())),
        ("tokens", texts(&tokens)),
        ("token_type", list(types.map(Meta::I32))),
        ("merges", texts(&["a b", "Ġ ab", "Ġ 1", "1 2", "x y"])),
        ("bos_token_id", Meta::U32(0)),
    ]
}

#[test]
fn byte_level_vocabularies_of_gguf_files() {
    let t = from_gguf(byte_level("gpt-2")).unwrap();
    assert_eq!(t.encode("ab ab 12<tool><s>é\n").unwrap(), [6, 7, 9, 4, 10, 0, 12, 13, 14]);
    assert_eq!(t.decode(&[6, 7, 9, 4, 12, 13]).unwrap(), "ab ab 12é");
    assert_eq!(t.bos(), Some(0));
    assert_eq!(t.encode("12").unwrap(), [8]);
    assert_eq!(from_gguf(byte_level("smollm")).unwrap().encode("ab 12").unwrap(), [6, 5, 3, 4], "digits stand alone");
    assert_eq!(from_gguf(byte_level("qwen2")).unwrap().encode("ab 12").unwrap(), [6, 5, 3, 4]);
    assert_eq!(from_gguf(byte_level("llama-bpe")).unwrap().encode("ab 12").unwrap(), [6, 5, 8], "up to three digits");
    // A letter with a combining accent is composed for Qwen2 only.
    assert_eq!(from_gguf(byte_level("qwen2")).unwrap().encode("e\u{301}").unwrap(), [12, 13]);
}

#[test]
fn sentence_piece_vocabularies_of_gguf_files() {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(["▁", "a", "b", "ab", "▁a", "▁ab", "ba"].map(String::from));
    let mut types = vec![Meta::I32(2), Meta::I32(3), Meta::I32(3)];
    types.extend(vec![Meta::I32(6); 256]);
    types.extend(vec![Meta::I32(1); 7]);
    // "ab" is better than "▁a", so "▁ab" is made of "▁" and "ab"; "ba" is best of all.
    let scores = [vec![0.0; 259], vec![-9.0, -9.0, -9.0, -2.0, -3.0, -4.0, -1.0]].concat();
    let keys = |prefix: bool| {
        vec![
            ("model", Meta::String("llama".into())),
            ("tokens", texts(&tokens.iter().map(String::as_str).collect::<Vec<_>>())),
            ("token_type", list(types.clone())),
            ("scores", list(scores.iter().map(|s| Meta::F32(*s)))),
            ("add_space_prefix", Meta::Bool(prefix)),
            ("bos_token_id", Meta::U32(1)),
        ]
    };
    let t = from_gguf(keys(true)).unwrap();
    assert_eq!(t.encode("ab ab").unwrap(), [264, 264]);
    assert_eq!(t.encode("aba").unwrap(), [263, 265]);
    assert_eq!(t.encode("aé").unwrap(), [263, 3 + 0xC3, 3 + 0xA9], "bytes of what is not a token");
    assert_eq!(t.decode(&[264, 264, 3 + 0xC3, 3 + 0xA9]).unwrap(), "ab abé");
    assert_eq!(from_gguf(keys(false)).unwrap().encode("ab ab").unwrap(), [262, 264]);
}

#[test]
fn gguf_tokenizers_that_cannot_be_rebuilt() {
    let fails = |keys: Vec<(&str, Meta)>, needles: &[&str]| {
        let message = from_gguf(keys).unwrap_err().to_string();
        assert!(!message.contains('\n') && needles.iter().all(|n| message.contains(n)), "{message}");
    };
    let with = |key: &'static str, value: Meta| {
        let mut keys = byte_level("gpt-2");
        keys.retain(|(k, _)| *k != key);
        keys.push((key, value));
        keys
    };
    fails(byte_level("tekken"), &["tokenizer.ggml.pre", "tekken", "smollm", "llama-bpe", "qwen2"]);
    fails(with("model", Meta::String("bert".into())), &["tokenizer.ggml.model", "\"bert\"", "\"gpt2\" or \"llama\""]);
    fails(with("tokens", Meta::U32(3)), &["tokenizer.ggml.tokens", "a list"]);
    fails(with("token_type", list([Meta::I32(1)])), &["token_type", "15 entries", "1"]);
    fails(with("merges", list([Meta::I32(1)])), &["merges", "strings"]);
    let many: Vec<String> = (0..600).map(|i| format!("w{i}")).collect();
    let mut keys = with("tokens", texts(&many.iter().map(String::as_str).collect::<Vec<_>>()));
    keys.retain(|(k, _)| *k != "token_type");
    fails(keys, &["599", "512 rows"]);
    fails(vec![], &["tokenizer.ggml.tokens", "nothing"]);
}
