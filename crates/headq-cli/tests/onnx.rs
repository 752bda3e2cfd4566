//! Commands on ONNX exports: the same numbers as on the checkpoint that was exported.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../headq-models/tests/onnx_files/assemble.rs"]
mod assemble;
mod common;

use common::{GQA, SIDE, World, repository};
use onnx_ir::Message;
use serde_json::Value;

/// The model's safetensors replaced by an export.
fn export(world: &World, variant: &str) {
    let fixtures = repository("crates/headq-models/tests/fixtures");
    let graph = fixtures.join("onnx").join(GQA).join(format!("{variant}.onnx"));
    let model = assemble::model(&graph, &fixtures.join("tiny").join(GQA).join("model.safetensors"));
    world.write("model/model.onnx", model.write_to_bytes().unwrap());
    std::fs::remove_file(world.path("model/model.safetensors")).unwrap();
}

fn fails(world: &World, args: &[&str], status: i32, needles: &[&str]) {
    let output = world.run(args);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{message}");
    assert!(output.stdout.is_empty());
    for needle in needles {
        assert!(message.contains(needle), "{needle:?} is not in: {message}");
    }
}

#[test]
fn an_export_serves_as_its_checkpoint() {
    let world = World::new(GQA).calibrated();
    let schemes = ["--scheme", SIDE, "--stats", "stats.safetensors"];
    let identity =
        |world: &World, model: &str| world.prints(&["inspect", model, "--fingerprint"])["fingerprint"].clone();
    let (expected, original) = (world.eval(&schemes), identity(&world, "model"));
    export(&world, "optimum");
    for model in ["model", "model/model.onnx"] {
        assert_eq!(identity(&world, model), original);
    }
    // Statistics of the checkpoint are those of the export.
    assert_eq!(world.eval(&schemes), expected);
}

#[test]
fn what_an_export_lacks_comes_from_flags_and_configurations() {
    let world = World::new(GQA);
    let expected = world.eval(&["--scheme", "kivi-2"]);
    std::fs::rename(world.path("model/config.json"), world.path("elsewhere.json")).unwrap();
    export(&world, "fixed");
    let eval = ["eval", "model", "--text", "text.txt", "--context", "32", "--windows", "3", "--scheme", "kivi-2"];
    let needles = ["model.onnx", "no config.json beside it", "`rope_theta`", "--model-config FILE", "--model-set"];
    fails(&world, &eval, 1, &needles);
    let with = |flags: &[&str]| world.prints(&[&eval, flags].concat())["schemes"].clone();
    assert_eq!(with(&["--model-set", "rope_theta=10000"]), expected["schemes"]);
    assert_eq!(with(&["--model-config", "elsewhere.json"]), expected["schemes"]);
    fails(&world, &[&eval[..], &["--model-set", "rope_theta"]].concat(), 2, &["expected KEY=VALUE"]);
    let given = "error: --model-set (in a run, [model_set]): ";
    let needles = [given, "`rope_theta`", "a number", "high"];
    fails(&world, &[&eval[..], &["--model-set", "rope_theta=high"]].concat(), 1, &needles);
    // What is given must have an effect, and not against the graph.
    let and =
        |setting: &str| [&eval[..], &["--model-set", "rope_theta=10000", "--model-set", setting]].concat().join("\0");
    let refused = |setting: &str, needles: &[&str]| {
        fails(&world, &and(setting).split('\0').collect::<Vec<_>>(), 1, needles);
    };
    refused("rms_norm_eps=0.5", &[given, "norm epsilon", "computes", "0.5"]);
    refused("num_hidden_layers=1", &[given, "num_hidden_layers", "computes"]);
    refused("rope_thetta=2", &[given, "`rope_thetta`", "a key that matters to this model", "rope_theta"]);
    fails(&world, &[&eval[..], &["--model-config", "nowhere.json"]].concat(), 1, &["nowhere.json", "No such file"]);

    let run = "name = 'run'\nmodel = 'model'\n\n[model_set]\nrope_theta = 10000\n\n[eval]\ntext = 'text.txt'\ncontext = 32\n\
               windows = 3\nschemes = ['kivi-2']\n";
    world.write("run.toml", run);
    let evaluation: Value = world.prints(&["run", "run.toml"]);
    assert_eq!(evaluation["schemes"], expected["schemes"]);
}
