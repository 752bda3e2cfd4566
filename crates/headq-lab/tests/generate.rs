//! Text as it comes, against the tokenizer's own decoding of the whole.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

use headq_lab::generate::{StopStrings, TextStream};
use headq_models::{ModelConfig, Tokenizer};
use serde_json::{Map, Value, json};

const TEXT: &str = "né 你好, 🙂🙃! \u{fffd} ok\n\n  x";

/// What byte-level tokenizers write for each byte.
fn byte_characters() -> Vec<char> {
    let printable = |b: u32| (0x21..=0x7e).contains(&b) || (0xa1..=0xac).contains(&b) || (0xae..=0xff).contains(&b);
    let mut next = 255;
    (0..256)
        .map(|b| {
            next += u32::from(!printable(b));
            char::from_u32(if printable(b) { b } else { next }).unwrap()
        })
        .collect()
}

/// One token for each byte.
fn byte_level() -> Value {
    let vocab: Map<String, Value> =
        byte_characters().into_iter().enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    tokenizer(byte_level.clone(), Value::Null, byte_level, json!({"type": "BPE", "vocab": vocab, "merges": []}))
}

/// SentencePiece with some characters and a token for each byte of the others.
fn byte_fallback() -> Value {
    let mut vocab: Map<String, Value> = (0..256).map(|b| (format!("<0x{b:02X}>"), json!(b))).collect();
    for (i, c) in ["▁", "n", "o", "k", "x", ",", "!"].iter().enumerate() {
        vocab.insert((*c).into(), json!(256 + i));
    }
    vocab.insert("<unk>".into(), json!(300));
    let normalizer = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    let model = json!({"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": true,
        "fuse_unk": true});
    tokenizer(Value::Null, normalizer, decoder, model)
}

fn tokenizer(pre_tokenizer: Value, normalizer: Value, decoder: Value, model: Value) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model,
    })
}

fn load(json: &Value) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../headq-models/tests/fixtures/tiny/gpt2/config.json");
    let config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    Tokenizer::from_folder(folder.path(), &ModelConfig::from_json(&config).unwrap()).unwrap()
}

/// What a stream gives for each token, and at the end.
fn pieces(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32]) -> Vec<String> {
    let mut stream = TextStream::after(tokenizer, prompt).unwrap();
    let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces.push(stream.rest().unwrap());
    pieces
}

#[test]
fn pieces_are_the_text_whatever_the_tokens() {
    for json in [byte_level(), byte_fallback()] {
        let tokenizer = load(&json);
        let ids = tokenizer.encode(TEXT).unwrap();
        assert!(ids.len() > TEXT.chars().count(), "characters are split");
        for at in 1..ids.len() {
            let (prompt, new) = ids.split_at(at);
            let whole = tokenizer.decode(&ids).unwrap();
            let Some(expected) = whole.strip_prefix(&tokenizer.decode(prompt).unwrap()) else {
                continue; // The prompt ends within a character.
            };
            assert_eq!(pieces(&tokenizer, prompt, new).concat(), expected, "after {at} tokens");
        }
    }
}

#[test]
fn no_piece_has_a_part_of_a_character() {
    for json in [byte_level(), byte_fallback()] {
        let tokenizer = load(&json);
        let ids = tokenizer.encode("a你é🙂b").unwrap();
        let start = tokenizer.encode("a").unwrap();
        let given: Vec<String> = pieces(&tokenizer, &start, &ids[start.len()..]);
        let given: Vec<&str> = given.iter().filter(|p| !p.is_empty()).map(String::as_str).collect();
        assert_eq!(given, ["你", "é", "🙂", "b"]);
    }
}

#[test]
fn bytes_that_make_no_character_are_replaced_at_the_end() {
    let tokenizer = load(&byte_level());
    let ids = tokenizer.encode("o你").unwrap();
    assert_eq!(pieces(&tokenizer, &ids[..1], &ids[1..3]), ["", "", "\u{fffd}"]);
    // Or as soon as what follows shows that they make none.
    let o = ids[0];
    assert_eq!(pieces(&tokenizer, &[o], &[ids[1], o]), ["", "\u{fffd}o", ""]);
    // Nothing waits forever.
    let given = pieces(&tokenizer, &[o], &[0x80; 100]);
    assert!(given[..99].iter().any(|p| !p.is_empty()));
    assert_eq!(given.concat(), "\u{fffd}".repeat(100));
}

#[test]
fn a_stream_may_begin_without_a_prompt() {
    let tokenizer = load(&byte_level());
    let ids = tokenizer.encode(TEXT).unwrap();
    assert_eq!(pieces(&tokenizer, &[], &ids).concat(), TEXT);
}

#[test]
fn stop_strings_end_a_text_at_the_first_of_them_however_it_is_cut() {
    let text = "one, two, éé three";
    for stop in ["two", ", t", "é", "three", "one", "four"] {
        let expected = text.find(stop).map_or(text, |at| &text[..at]);
        for size in 1..6 {
            let characters: Vec<char> = text.chars().collect();
            let mut stops = StopStrings::new(&[stop.to_owned()]);
            let (mut given, mut stopped) = (String::new(), false);
            for piece in characters.chunks(size) {
                let passed = stops.push(&piece.iter().collect::<String>());
                given += &passed.text;
                assert!(expected.starts_with(&given));
                stopped = passed.stopped;
                if stopped {
                    break;
                }
            }
            given += &stops.rest();
            assert_eq!((given.as_str(), stopped), (expected, text.contains(stop)), "{stop:?} in pieces of {size}");
        }
    }
}
