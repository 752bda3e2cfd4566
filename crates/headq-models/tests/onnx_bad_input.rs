//! ONNX files that cannot be imported: one clear line each, never a panic.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
mod onnx_files;

use std::path::Path;

use common::{fixture, open};
use headq_models::{LoadOptions, describe};
use onnx_files::{Export, graphs, node, set, tensor};
use onnx_ir::{GraphProto, ModelProto, NodeProto, TensorProto};

#[track_caller]
fn fails(path: &Path, needles: &[&str]) {
    let message = open(path).unwrap_err().to_string();
    assert!(!message.contains('\n'), "more than one line: {message}");
    for needle in needles {
        assert!(message.contains(needle), "{needle:?} is not in: {message}");
    }
    assert_eq!(describe(path, &LoadOptions::default()).unwrap_err().to_string(), message, "describe sees it too");
}

#[track_caller]
fn edited(name: &str, variant: &str, edit: impl FnOnce(&mut GraphProto), needles: &[&str]) {
    let export = Export::of(name, variant).edit(|model| edit(model.graph.as_mut().unwrap()));
    fails(&export.saved(), needles);
}

fn first<'a>(graph: &'a mut GraphProto, op: &str) -> &'a mut NodeProto {
    graph.node.iter_mut().find(|n| n.op_type == op).unwrap()
}

fn initializer<'a>(graph: &'a mut GraphProto, name: &str) -> &'a mut TensorProto {
    graph.initializer.iter_mut().find(|t| t.name == name).unwrap()
}

#[test]
fn files_that_are_not_onnx() {
    let dir = tempfile::tempdir().unwrap();
    let write = |bytes: &[u8]| {
        let path = dir.path().join("model.onnx");
        std::fs::write(&path, bytes).unwrap();
        path
    };
    fails(&write(b""), &["model.onnx", "empty"]);
    fails(&write(b"These are words, not a model.\n"), &["model.onnx", "ONNX file", "fetch it again"]);
    let other = std::fs::read(fixture("gpt2").join("model.safetensors")).unwrap();
    fails(&write(&other), &["model.onnx", "ONNX file"]);
    fails(&write(&[8, 10]), &["no graph in it"]);
}

#[test]
fn files_cut_short() {
    let whole = std::fs::read(Export::of("gpt2", "model").saved()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.onnx");
    for share in [1, 3, 7, 9] {
        let length = whole.len() * share / 10;
        std::fs::write(&path, &whole[..length]).unwrap();
        fails(&path, &["not a whole ONNX file", &format!("{length} bytes"), "fetch it again"]);
    }
}

#[test]
fn external_data_that_is_not_there() {
    let export = Export::of("gpt2", "model").external();
    let path = export.saved();
    let data = export.path().join("model.onnx.data");
    let bytes = std::fs::read(&data).unwrap();
    std::fs::write(&data, &bytes[..bytes.len() / 2]).unwrap();
    let half = (bytes.len() / 2).to_string();
    fails(&path, &["model.onnx: tensor", "in model.onnx.data", &half, "fetch it again"]);
    std::fs::write(&data, []).unwrap();
    fails(&path, &["model.onnx.data", "which has 0"]);
    std::fs::remove_file(&data).unwrap();
    let tensors = export.model.graph.initializer.iter().filter(|t| onnx_files::is_weight(t)).count();
    let count = format!("{tensors} of its tensors");
    fails(&path, &["model.onnx.data", &count, "missing from the folder", "fetch it"]);
}

#[test]
fn external_data_elsewhere() {
    for location in ["../weights", "/etc/hostname", "a/../../b"] {
        let export = Export::of("gpt2", "model").external().weights(|t| set(t, "location", location));
        fails(&export.saved(), &["outside the model's folder", &format!("{location:?}"), "beside it"]);
    }
}

#[test]
fn external_data_that_is_nowhere() {
    let needles = ["model.onnx: tensor", "external data without the file that it is in"];
    let empty = Export::of("gpt2", "model").external().weights(|t| set(t, "location", ""));
    fails(&empty.saved(), &needles);
    let none = Export::of("gpt2", "model").external().weights(|t| t.external_data.retain(|e| e.key != "location"));
    fails(&none.saved(), &needles);
}

#[test]
fn external_data_of_the_wrong_length() {
    let entry = |key: &str, value: &str, needles: &[&str]| {
        let export = Export::of("gpt2", "model").external().weights(|t| set(t, key, value));
        fails(&export.saved(), needles);
    };
    entry("length", "4", &["tensor", "of F32 and shape [", "but 4 are stored"]);
    entry("length", "many", &["length \"many\"", "not a number of bytes"]);
    entry("offset", "-8", &["offset \"-8\"", "not a number of bytes"]);
    entry("offset", "18446744073709551615", &["18446744073709551615", "in model.onnx.data"]);
    entry("offset", "99999999", &["from 99999999 on in model.onnx.data"]);
}

#[test]
fn tensors_that_contradict_themselves() {
    let graph = Export::of("gpt2", "model").model.graph;
    let name = graph.initializer.iter().find(|t| t.name.ends_with("wpe.weight")).unwrap().name.clone();
    let change = |change: &dyn Fn(&mut TensorProto), needles: &[&str]| {
        edited("gpt2", "model", |graph| change(initializer(graph, &name)), &[&[name.as_str()], needles].concat());
    };
    change(&|t| t.dims = vec![256, 65], &["shape [256, 65] needs 66560 bytes, but 65536 are stored"]);
    change(&|t| t.dims = vec![-1, 64], &["[-1, 64]"]);
    change(&|t| t.dims = vec![i64::MAX, 64], &["impossible shape"]);
    change(&|t| t.raw_data = Vec::new().into(), &["but 0 are stored"]);
    change(&|t| t.data_type = onnx_files::F64, &["F64", "needs 131072 bytes"]);
    edited(
        "gpt2",
        "model",
        |graph| {
            let copy = initializer(graph, &name).clone();
            graph.initializer.push(copy);
        },
        &[&name, "twice"],
    );
}

#[test]
fn graphs_that_contradict_themselves() {
    edited("gpt2", "model", |g| first(g, "Softmax").input[0] = "nowhere".into(), &["`nowhere`", "nothing before it"]);
    edited("gpt2", "model", |g| g.node.reverse(), &["which nothing before it makes"]);
    edited("gpt2", "model", |g| g.node.push(g.node[0].clone()), &["made twice"]);
    edited("gpt2", "model", |g| g.node.clear(), &["no graph in it"]);
    edited("gpt2", "model", |g| g.initializer.clear(), &["which nothing before it makes"]);
}

#[test]
fn operators_that_are_not_known() {
    let rename = |op: &'static str, to: &'static str, domain: &'static str, needles: &[&str]| {
        let edit = |g: &mut GraphProto| {
            let node = first(g, op);
            (node.op_type, node.domain) = (to.into(), domain.into());
        };
        edited("llama-untied", "model", edit, needles);
    };
    rename("Softmax", "GroupQueryAttention", "com.microsoft", &["com.microsoft::GroupQueryAttention", "without -O"]);
    rename("MatMul", "MatMulNBits", "com.microsoft", &["com.microsoft::MatMulNBits", "f32, f16 or bf16"]);
    rename("MatMul", "MatMulInteger", "", &["operator MatMulInteger", "f32, f16 or bf16"]);
    rename("Cast", "DequantizeLinear", "", &["operator DequantizeLinear", "f32, f16 or bf16"]);
    rename("Cast", "If", "", &["control flow by If", "--no-post-process"]);
    rename("Neg", "LSTM", "", &["operator LSTM", "none of the known architectures"]);
    rename("Neg", "Negate", "acme", &["acme::Negate", "node `"]);
    let export = Export::of("llama-untied", "model").edit(|model| {
        model.functions.push(Default::default());
        model.functions[0].name = "RotateHalf".into();
    });
    fails(&export.saved(), &["functions of its own", "`RotateHalf`", "inline"]);
}

/// Graphs that are decoders but for one part that no known architecture has.
#[test]
fn parts_that_are_not_known() {
    // Scores capped by a hyperbolic tangent.
    let cap = |g: &mut GraphProto| {
        let at = g.node.iter().position(|n| n.op_type == "Softmax").unwrap();
        let scores = std::mem::replace(&mut g.node[at].input[0], "capped".into());
        g.node.insert(at, node("Tanh", &[&scores], "capped"));
    };
    edited("llama-untied", "model", cap, &["Tanh", "scores in layer 0"]);
    // The residual stream, or the logits, multiplied by a number.
    let multiply = |g: &mut GraphProto, value: &str, by: &str| {
        let at = g.node.iter().position(|n| n.output.first().is_some_and(|o| o == value)).unwrap();
        let inner = format!("{value} before");
        g.node[at].output[0] = inner.clone();
        g.node.insert(at + 1, node("Mul", &[&inner, by], value));
        g.initializer.push(tensor(by, &[], &[2.0]));
    };
    let embedded = |g: &mut GraphProto| {
        let table = g.node.iter().find(|n| n.op_type == "Gather").unwrap().output[0].clone();
        multiply(g, &table, "two");
    };
    edited("llama-untied", "model", embedded, &["Mul", "in the residual stream"]);
    edited("llama-untied", "model", |g| multiply(g, "logits", "two"), &["between the head's", "and the logits"]);
    // Keys normalised by a weight of their own.
    let key_norm = |g: &mut GraphProto| {
        let at = g.node.iter().position(|n| n.op_type == "Neg").unwrap();
        let channels = std::mem::replace(&mut g.node[at].input[0], "scaled".into());
        g.node.insert(at, node("Mul", &[&channels, "key norm"], "scaled"));
        g.initializer.push(tensor("key norm", &[8], &[1.5; 8]));
    };
    edited("llama-untied", "model", key_norm, &["Mul", "the weight `key norm`"]);
    // x · σ(1.702 x) is not x · σ(x).
    let quick = |g: &mut GraphProto| {
        let at = g.node.iter().position(|n| n.op_type == "Sigmoid").unwrap();
        let gate = std::mem::replace(&mut g.node[at].input[0], "quick".into());
        g.node.insert(at, node("Mul", &[&gate, "1.702"], "quick"));
        g.initializer.push(tensor("1.702", &[], &[1.702]));
    };
    edited("llama-untied", "model", quick, &["non-linearity", "Sigmoid", "MLP of layer 0"]);
    // A layer that no other reads.
    let cut = |g: &mut GraphProto| {
        let down = g.initializer.iter().find(|t| t.dims == [256, 128]).unwrap().name.clone();
        let product = g.node.iter().find(|n| n.input.contains(&down)).unwrap().output[0].clone();
        let sum = g.node.iter_mut().find(|n| n.op_type == "Add" && n.input.contains(&product)).unwrap();
        let other = sum.input.iter().find(|i| **i != product).unwrap().clone();
        (sum.op_type, sum.input) = ("Identity".into(), vec![other]);
    };
    edited("llama-untied", "model", cut, &["layer 1"]);
}

#[test]
fn other_architectures() {
    fails(&graphs().join("bert/bert.onnx"), &["the constant", "in the residual stream", "safetensors folder"]);
    let mut model = ModelProto::new();
    let graph = model.graph.mut_or_insert_default();
    graph.initializer = vec![tensor("w", &[2, 2], &[1.0, 2.0, 3.0, 4.0]), tensor("b", &[2], &[1.0, 2.0])];
    graph.node = vec![node("MatMul", &["x", "w"], "xw"), node("Add", &["xw", "b"], "y"), node("Relu", &["y"], "z")];
    graph.input.push(Default::default());
    graph.input[0].name = "x".into();
    fails(&Export::new(model).saved(), &["without an embedding of token ids", "decoder of a known architecture"]);
}

#[test]
fn several_files() {
    let export = Export::of("gpt2", "model");
    export.write("a.onnx");
    export.write("b.onnx");
    fails(export.path(), &["2 .gguf and .onnx files in this folder", "name one of them"]);
}

#[test]
fn a_config_of_another_size() {
    let export = Export::of("llama-untied", "model");
    std::fs::copy(fixture("llama-tied").join("config.json"), export.path().join("config.json")).unwrap();
    fails(&export.saved(), &["config.json", "`head_dim`", "expected 16", "found 32"]);
    let export = Export::of("gpt2", "model");
    std::fs::write(export.path().join("config.json"), "{").unwrap();
    fails(&export.saved(), &["config.json", "not JSON"]);
}
