//! `headq generate` and `headq eval --decode`, as users run them.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Output, Stdio};

use burn::tensor::Device;
use common::{ALL, GQA, World};
use headq::DenseAttention;
use headq_models::{LoadOptions, load};
use serde_json::{Value, json};

const SIDE: &str = "kivi-2(g=8,r=4)+query-pca(rank=2,bits=4)/token-2(c=8)";
const PROMPT: &str = "w1 w2 w3";

fn generate<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["generate", "model"], args].concat()
}

#[track_caller]
fn printed(world: &World, args: &[&str]) -> Value {
    world.prints(&generate(args))
}

#[track_caller]
fn fails(world: &World, args: &[&str], status: i32, needles: &[&str]) {
    let output = world.run(&[&generate(args)[..], &["--quiet"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{error}");
    assert!(error.starts_with("error: ") && output.stdout.is_empty(), "{error}");
    assert!(!error.contains("panicked"), "{error}");
    for needle in needles {
        assert!(error.contains(needle), "{needle:?} is not in: {error}");
    }
}

#[test]
fn greedy_is_the_argmax_of_the_whole_model() {
    for name in ALL {
        let world = World::new(name);
        let found =
            printed(&world, &["--greedy", "--ignore-eos", "--max-tokens", "20", "--cache-dtype", "f32", PROMPT]);
        let loaded = load(world.path("model"), &Device::flex(), &LoadOptions::default()).unwrap();
        let model = &loaded.model;
        let mut tokens = loaded.tokenizer().unwrap().encode(PROMPT).unwrap();
        for _ in 0..20 {
            // Each time from the beginning, teacher-forced.
            let logits = model.forward(model.ids(&tokens, 1, 0).unwrap(), 0, &mut DenseAttention::new()).into_data();
            let last = &logits.as_slice::<f32>().unwrap()[(tokens.len() - 1) * 512..];
            let best = (1..512).fold(0, |best, i| if last[i] > last[best] { i } else { best });
            tokens.push(best as u32);
        }
        assert_eq!(found["tokens"], json!(tokens[3..]), "{name}");
        assert_eq!(found["stop_reason"], "length");
    }
}

#[test]
fn one_json_object_says_everything() {
    let world = World::new(GQA).calibrated();
    let args = ["--scheme", SIDE, "--stats", "stats.safetensors", "--max-tokens", "40", "--ignore-eos", "--seed", "5"];
    let found = printed(&world, &[&args[..], &["--top-k", "50", "--temperature", "0.5", PROMPT]].concat());
    assert_eq!(found["prompt_tokens"], 3);
    assert_eq!(found["new_tokens"], 40);
    assert_eq!(found["tokens"].as_array().unwrap().len(), 40);
    assert_eq!((&found["scheme"], &found["seed"]), (&json!(SIDE), &json!(5)));
    assert_eq!((&found["temperature"], &found["top_k"], &found["top_p"]), (&json!(0.5), &json!(50), &Value::Null));
    assert_eq!(
        (&found["model"], &found["cache_dtype"], &found["cached_tokens"]),
        (&json!("model"), &json!("f16"), &json!(42))
    );
    assert!(found["device"].as_str().unwrap().starts_with("flex"));
    assert!(found["fingerprint"].is_object() && found["program"].as_str().unwrap().starts_with("headq "));
    for key in ["prefill_seconds", "decode_seconds", "tokens_per_second"] {
        assert!(found[key].as_f64().unwrap() > 0.0, "{key}");
    }
    // 2 KV heads of 16 channels; the last token is not read.
    let layers = world.json("model/config.json")["num_hidden_layers"].as_u64().unwrap();
    assert_eq!(found["f16_bytes"], 42 * layers * 2 * 2 * 16 * 2);
    assert!(found["cache_bytes"].as_u64().unwrap() > 0);
    let words: Vec<String> = found["tokens"].as_array().unwrap().iter().map(|id| format!("w{id}")).collect();
    assert_eq!(found["text"].as_str().unwrap().split_whitespace().collect::<Vec<_>>(), words);
}

#[test]
fn a_quantized_cache_takes_less() {
    let world = World::embedded();
    let bytes = |scheme: &str| {
        let found = printed(&world, &["--scheme", scheme, "--max-tokens", "250", "Karin Reed"]);
        assert_eq!(found["cached_tokens"], 251);
        (found["cache_bytes"].as_f64().unwrap(), found["f16_bytes"].as_f64().unwrap())
    };
    let (dense, f16) = bytes("dense");
    let (coded, _) = bytes("kivi-2(g=32,r=32)/token-2(c=32)");
    // Pages that are not full count, too.
    assert!(dense >= f16 && dense < 1.2 * f16, "{dense} of {f16}");
    assert!(coded < 0.5 * f16, "{coded} of {f16}");
}

#[test]
fn text_is_streamed_and_figures_stand_beside_it() {
    let world = World::embedded();
    let args = ["--max-tokens", "30", "Karin Reed"];
    let json = printed(&world, &args);
    let output = world.run(&generate(&args));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{}\n", json["text"].as_str().unwrap()));
    let notes = String::from_utf8(output.stderr).unwrap();
    for needle in ["2 tokens of prompt in ", "30 new tokens in ", "tokens per second", "cache: ", "f16 takes "] {
        assert!(notes.contains(needle), "{needle:?} is not in: {notes}");
    }
    let quiet = world.run(&[&generate(&args)[..], &["--quiet"]].concat());
    assert!(quiet.stderr.is_empty() && !quiet.stdout.is_empty());
}

#[test]
fn seeds_and_threads() {
    let world = World::embedded();
    let run = |more: &[&str]| {
        printed(&world, &[&["--temperature", "1", "--max-tokens", "40", "Karin Reed"], more].concat())["tokens"].clone()
    };
    let first = run(&["--seed", "1"]);
    assert_eq!(first, run(&["--seed", "1", "--threads", "1"]));
    assert_ne!(first, run(&["--seed", "2"]));
    assert_eq!(run(&[]), run(&["--seed", "0"]));
    let greedy = printed(&world, &["--greedy", "--max-tokens", "40", "Karin Reed"])["tokens"].clone();
    assert_eq!(greedy, run(&["--top-k", "1"]));
    assert_eq!(greedy, printed(&world, &["--max-tokens", "40", "--top-p", "1e-9", "Karin Reed"])["tokens"]);
}

#[test]
fn stop_strings_end_the_text() {
    let world = World::embedded();
    let all = printed(&world, &["--max-tokens", "60", "Karin Reed"]);
    let all = all["text"].as_str().unwrap();
    // Across words, so across tokens.
    let (at, _) = all.match_indices(' ').nth(6).unwrap();
    let stop = &all[at - 2..at + 3];
    let first = all.find(stop).unwrap();
    let found = printed(&world, &["--max-tokens", "60", "--stop", "not there", "--stop", stop, "Karin Reed"]);
    assert_eq!((&found["text"], &found["stop_reason"]), (&json!(all[..first]), &json!("stop")));
    let shown = world.succeeds(&generate(&["--max-tokens", "60", "--stop", stop, "Karin Reed", "--quiet"]));
    assert_eq!(shown, format!("{}\n", &all[..first]));
}

#[test]
fn an_end_of_sequence_token_ends_the_text() {
    let world = World::new(GQA);
    let free = printed(&world, &["--ignore-eos", "--max-tokens", "10", PROMPT]);
    let fourth = free["tokens"][3].clone();
    world.config(|c| drop(c.insert("eos_token_id".into(), json!([511, fourth]))));
    let found = printed(&world, &["--max-tokens", "10", PROMPT]);
    let length = found["tokens"].as_array().unwrap().len();
    assert!(length <= 4 && found["tokens"][length - 1] == fourth);
    assert_eq!(found["stop_reason"], "eos");
    assert!(!found["text"].as_str().unwrap().contains(&format!("w{fourth}")));
    assert_eq!(printed(&world, &["--ignore-eos", "--max-tokens", "10", PROMPT])["tokens"], free["tokens"]);
}

/// One token for each byte: a model with random weights writes broken characters.
#[test]
fn only_whole_characters_are_written() {
    let world = World::new("gpt2");
    let vocab: serde_json::Map<String, Value> = (0u32..512)
        .map(|id| {
            let (byte, more) = (id % 256, id / 256);
            let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let below = (0..byte).filter(|b| !matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)).count() as u32;
            let c = char::from_u32(if printable { byte } else { 256 + below }).unwrap();
            (if more == 0 { c.to_string() } else { format!("{c}{c}") }, json!(id))
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    world.write("model/tokenizer.json", tokenizer.to_string());
    let args = ["--temperature", "3", "--ignore-eos", "--max-tokens", "200", "né"];
    let found = printed(&world, &args);
    let ids: Vec<u32> = found["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| vec![(id % 256) as u8; 1 + (*id as usize) / 256]).collect();
    assert_eq!(found["text"], String::from_utf8_lossy(&bytes).as_ref());
    assert!(found["text"].as_str().unwrap().contains('\u{fffd}'));
    assert_eq!(world.succeeds(&generate(&args)), format!("{}\n", found["text"].as_str().unwrap()));
}

#[test]
fn prompts_come_from_anywhere() {
    let world = World::embedded();
    world.write("prompt.txt", "Karin Reed\r\nkeeps\n");
    let expected = printed(&world, &["--max-tokens", "9", "Karin Reed\nkeeps"]);
    assert_eq!(printed(&world, &["--max-tokens", "9", "--prompt-file", "prompt.txt"])["tokens"], expected["tokens"]);
    let mut child = world
        .command(&generate(&["--max-tokens", "9", "--json", "-"]))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Karin Reed\nkeeps\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["tokens"], expected["tokens"]);
    world.write("latin1.txt", b"caf\xe9");
    fails(&world, &["--prompt-file", "latin1.txt"], 1, &["latin1.txt", "not UTF-8: byte 3"]);
    fails(&world, &["--prompt-file", "none.txt"], 1, &["none.txt"]);
}

#[test]
fn an_empty_prompt_needs_a_token_to_begin_with() {
    let world = World::new(GQA);
    let empty = printed(&world, &["--max-tokens", "5", ""]);
    assert_eq!(empty["prompt_tokens"], 1);
    assert_eq!(empty["tokens"], printed(&world, &["--max-tokens", "5", "--add-bos", ""])["tokens"]);
    assert_eq!(empty["tokens"], printed(&world, &["--max-tokens", "5", "w1"])["tokens"], "w1 is the token");
    assert_eq!(printed(&world, &["--max-tokens", "5", "--add-bos", "w7"])["prompt_tokens"], 2);
    world.config(|c| drop(c.insert("bos_token_id".into(), Value::Null)));
    fails(&world, &[""], 2, &["the prompt is empty", "give some text"]);
    fails(&world, &["--add-bos", "w1"], 2, &["beginning-of-sequence", "--add-bos"]);
}

#[test]
fn absurd_numbers_of_tokens_are_numbers_of_tokens() {
    let world = World::new(GQA);
    for most in ["18446744073709551615", "9223372036854775807", "1000000000000000"] {
        fails(&world, &["--max-tokens", most, PROMPT], 2, &["exceed the", "--beyond-context"]);
        // No room is made ahead; the stop string ends it.
        let args = ["--max-tokens", most, "--beyond-context", "--ignore-eos", "--stop", "w", PROMPT];
        assert_eq!(printed(&world, &args)["stop_reason"], "stop");
    }
}

#[test]
#[cfg(unix)]
fn a_long_prompt_can_be_interrupted() {
    let world = World::new(GQA);
    world.write("long.txt", common::text(20_000, 3));
    let args = generate(&["--prompt-file", "long.txt", "--beyond-context", "--max-tokens", "1"]);
    let mut child = world.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let id = child.id().to_string();
    let running = child.try_wait().unwrap().is_none();
    assert!(running, "the prompt is too short for this test");
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("error: interrupted") && output.stdout.is_empty(), "{error}");
}

#[test]
fn contexts_have_limits() {
    let words = |n: usize| vec!["w5"; n].join(" ");
    let learned = World::new("gpt2");
    fails(&learned, &["--max-tokens", "7", &words(250)], 1, &["257 positions", "256"]);
    fails(&learned, &["--max-tokens", "7", "--beyond-context", &words(250)], 1, &["257 positions", "256"]);
    fails(&learned, &[&words(300)], 1, &["301 positions", "256"]);
    assert_eq!(printed(&learned, &["--max-tokens", "6", "--ignore-eos", &words(250)])["new_tokens"], 6);
    // What the context has room for.
    assert_eq!(printed(&learned, &["--ignore-eos", &words(250)])["new_tokens"], 6);
    let rotary = World::new(GQA);
    fails(&rotary, &["--max-tokens", "7", &words(250)], 2, &["250 tokens", "256 positions", "--beyond-context"]);
    fails(&rotary, &[&words(300)], 2, &["300 tokens", "256 positions", "--beyond-context"]);
    let found = printed(&rotary, &["--max-tokens", "7", "--beyond-context", "--ignore-eos", &words(300)]);
    assert_eq!(found["new_tokens"], 7);
}

#[test]
fn prompts_around_the_window_of_a_cache() {
    // R = 4, G = 8: the first group is coded once 12 tokens are there.
    let world = World::new(GQA).calibrated();
    for length in [1, 4, 11, 12, 13] {
        let prompt = vec!["w9"; length].join(" ");
        let args = ["--scheme", SIDE, "--stats", "stats.safetensors", "--max-tokens", "12", "--ignore-eos", &prompt];
        let found = printed(&world, &args);
        assert_eq!((&found["prompt_tokens"], &found["new_tokens"]), (&json!(length), &json!(12)));
    }
}

#[test]
fn wrong_options_say_so() {
    let world = World::new(GQA);
    for (args, needles) in [
        (&["--temperature", "0", PROMPT][..], &["temperature 0", "--greedy"][..]),
        (&["--temperature=-1", PROMPT], &["temperature -1"]),
        (&["--temperature", "inf", PROMPT], &["temperature inf"]),
        (&["--top-k", "0", PROMPT], &["top-k 0"]),
        (&["--top-p", "0", PROMPT], &["top-p 0"]),
        (&["--top-p", "1.5", PROMPT], &["top-p 1.5"]),
        (&["--max-tokens", "0", PROMPT], &["0 new tokens"]),
        (&["--stop", "", PROMPT], &["--stop"]),
        (&["--cache-dtype", "f8", PROMPT], &["'f8'", "f16, f32"]),
        (&["--scheme", "kivi", PROMPT], &["scheme 'kivi'"]),
        (&["--scheme", SIDE, PROMPT], &["needs a basis", "--stats"]),
        (&["--greedy", "--top-k", "3", PROMPT], &["--greedy", "--top-k"]),
        (&["--prompt-file", "text.txt", PROMPT], &["--prompt-file"]),
        (&[], &["PROMPT"]),
        (&["--max-tokens", "-3", PROMPT], &["-3"]),
    ] {
        fails(&world, args, 2, needles);
    }
    fails(&world, &["--scheme", "kivi-2", "--basis", "text.txt", PROMPT], 1, &["text.txt"]);
    std::fs::remove_file(world.path("model/tokenizer.json")).unwrap();
    fails(&world, &[PROMPT], 1, &["tokenizer.json", "no such file"]);
}

#[test]
fn a_basis_of_another_model_is_refused() {
    let world = World::new(GQA).calibrated().with_basis();
    printed(&world, &["--scheme", SIDE, "--basis", "basis.safetensors", "--max-tokens", "3", PROMPT]);
    world.surgery(|tensors| {
        let (_, _, bytes) = tensors.get_mut("lm_head.weight").unwrap();
        bytes[0] ^= 1;
    });
    for source in ["--basis=basis.safetensors", "--stats=stats.safetensors"] {
        fails(&world, &["--scheme", SIDE, source, PROMPT], 1, &["another model"]);
    }
}

#[test]
fn a_reader_that_leaves_ends_it() {
    let world = World::new(GQA);
    let args = generate(&["--ignore-eos", "--beyond-context", "--max-tokens", "100000", PROMPT]);
    let mut child = world.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 10]).unwrap();
    drop(out);
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && error.contains("(output closed)"), "{error}");
}

/// Interrupts a generation that would go on for long, once it has begun.
#[cfg(unix)]
fn interrupted(world: &World, more: &[&str]) -> Output {
    let args = [&["--ignore-eos", "--beyond-context", "--max-tokens", "1000000", PROMPT], more].concat();
    let mut child = world.command(&generate(&args)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut text = Vec::new();
    if more.is_empty() {
        while text.iter().filter(|b| **b == b' ').count() < 5 {
            text.extend([out.fill_buf().unwrap()[0]]);
            out.consume(1);
        }
    } else {
        std::thread::sleep(std::time::Duration::from_millis(1500));
    }
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    out.read_to_end(&mut text).unwrap();
    let output = child.wait_with_output().unwrap();
    Output { stdout: text, ..output }
}

#[test]
#[cfg(unix)]
fn an_interruption_keeps_what_is_there() {
    let world = World::new(GQA);
    let output = interrupted(&world, &[]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("interrupted: finishing the token in flight"), "{error}");
    assert!(error.contains("new tokens (interrupted) in ") && error.contains("cache: "), "{error}");
    assert!(error.contains("\nerror: interrupted; the text ends here") && !error.contains("panicked"), "{error}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.ends_with('\n') && text.split_whitespace().all(|w| w.starts_with('w')), "{text}");

    let output = interrupted(&world, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["stop_reason"], "interrupted");
    assert_eq!(found["tokens"].as_array().unwrap().len() as u64, found["new_tokens"].as_u64().unwrap());
}

#[test]
fn decoding_gives_the_perplexity_of_teacher_forced_passes() {
    let world = World::embedded();
    let calibrate =
        "calibrate model --text other.txt --context 128 --windows 4 --base kivi-2(g=16) --out stats.safetensors";
    world.succeeds(&calibrate.split(' ').collect::<Vec<_>>());
    let schemes =
        ["kivi-2(g=16,r=8)", "kivi-2(g=16,r=8)/token-2", "kivi-2(g=16,r=8)+query-pca(rank=4,bits=4)/token-2(c=32)"];
    let mut args = vec!["eval", "model", "--text", "text.txt", "--context", "128", "--windows", "3"];
    args.extend(["--stats", "stats.safetensors"]);
    args.extend(schemes.iter().flat_map(|scheme| ["--scheme", scheme]));
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    for (dtype, asked) in [("f32", &[][..]), ("f16", &["--cache-dtype", "f16"])] {
        let whole = world.prints(&[&args[..], asked].concat());
        let decoded = world.prints(&[&args[..], asked, &["--decode"]].concat());
        assert_eq!(keys(&whole), keys(&decoded));
        assert_eq!([&whole["pass"], &whole["cache_dtype"]], ["packed", dtype]);
        assert_eq!([&decoded["pass"], &decoded["cache_dtype"]], ["decode", dtype]);
        for (whole, decoded) in whole["schemes"].as_array().unwrap().iter().zip(decoded["schemes"].as_array().unwrap())
        {
            assert_eq!(keys(whole), keys(decoded));
            match whole["scheme"].as_str() {
                // The dense pass goes through tensors, and its cache may hold halves.
                Some("dense") => {
                    let (a, b) = (whole["ppl"].as_f64().unwrap(), decoded["ppl"].as_f64().unwrap());
                    assert!((a / b - 1.0).abs() < 1e-3, "{a} against {b}");
                }
                // To the bit.
                _ => assert_eq!(whole["nll"], decoded["nll"], "{}", whole["scheme"]),
            }
            for key in ["fisher", "kl", "key_mse", "output_error"] {
                assert!(decoded[key].is_null(), "{key}");
            }
            assert_eq!(whole["cache_bits"], decoded["cache_bits"]);
        }
        // The same on any number of threads.
        for more in [&[][..], &["--decode"]] {
            let one = world.prints(&[&args[..], asked, more, &["--threads", "1"]].concat());
            assert_eq!(&one, if more.is_empty() { &whole } else { &decoded });
        }
    }
}

/// At 4 bits a code that rounding moves is a small step, so that two passes of independent arithmetic stay together, here to 3e-6 nats; at
/// 2 bits they differ by tenths of a percent.
#[test]
fn packed_passes_agree_with_tensors() {
    let world = World::embedded();
    let calibrate =
        "calibrate model --text other.txt --context 128 --windows 4 --base klt-4(g=16,r=8) --out stats.safetensors";
    world.succeeds(&calibrate.split(' ').collect::<Vec<_>>());
    let schemes = [
        "kivi-4(g=16,r=8)",
        "kivi-4(g=16,r=8,sinks=2)/token-4(c=32)",
        "kivi-4(g=16,r=8)+query-pca(rank=4,bits=4)/a2-4",
        "klt-4(g=16,r=8)/token-4",
    ];
    let mut args = vec!["eval", "model", "--text", "text.txt", "--context", "128", "--windows", "3"];
    args.extend(["--stats", "stats.safetensors"]);
    args.extend(schemes.iter().flat_map(|scheme| ["--scheme", scheme]));
    let (packed, tensors) = (world.prints(&args), world.prints(&[&args[..], &["--pass", "tensors"]].concat()));
    assert_eq!((&packed["pass"], &tensors["pass"]), (&Value::from("packed"), &Value::from("tensors")));
    assert!(tensors.get("cache_dtype").is_none());
    assert_eq!(packed["schemes"][0], tensors["schemes"][0]);
    for i in 1..=schemes.len() {
        let (packed, tensors) = (&packed["schemes"][i], &tensors["schemes"][i]);
        let (a, b) = (packed["nll"].as_f64().unwrap(), tensors["nll"].as_f64().unwrap());
        assert!((a - b).abs() < 1e-4, "{}: {a} against {b}", schemes[i - 1]);
        assert_ne!(a, b, "two passes of one arithmetic");
        assert_eq!(packed["kl"], tensors["kl"]);
    }
}

#[test]
fn passes_that_are_not_there_are_refused() {
    let world = World::embedded();
    let args = ["eval", "model", "--text", "text.txt", "--scheme", "kivi-4"];
    for (more, needles) in [
        (&["--pass", "tensors", "--cache-dtype", "f16"][..], &["flex", "tensors", "f16", "--cache-dtype"][..]),
        (&["--pass", "packed", "--decode"], &["--pass", "--decode"]),
        (&["--pass", "fast"], &["'fast'", "packed or tensors"]),
    ] {
        let output = world.run(&[&args[..], more].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(needles.iter().all(|needle| error.contains(needle)), "{error}");
    }
}
