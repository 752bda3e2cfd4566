//! `headq bench`, as users run it.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{GQA, World};
use serde_json::Value;

const SCHEME: &str = "kivi-2(g=8,r=4)/token-2(c=16)";

fn bench(world: &World, more: &[&str]) -> Value {
    world.prints(&[&["bench", "model", "--rounds", "2", "--thread-counts", "1,2"], more].concat())
}

#[test]
fn every_cache_is_measured_at_every_context_on_every_number_of_threads() {
    let world = World::new(GQA);
    let report = bench(&world, &["--contexts", "70,300", "--scheme", SCHEME, "--scheme", "kivi-4/a2-2(c=8)"]);
    let readings = report["readings"].as_array().unwrap();
    // f32, f16 and two schemes.
    assert_eq!(readings.len(), 2 * 2 * 4);
    for (i, reading) in readings.iter().enumerate() {
        assert_eq!(reading["context"], [70, 300][i / 8]);
        assert_eq!(reading["threads"], [1, 2][i / 4 % 2]);
        let scheme = ["dense", "dense", SCHEME, "kivi-4/a2-2(c=8)"][i % 4];
        assert_eq!(
            (&reading["scheme"], &reading["cache_dtype"]),
            (&scheme.into(), &["f32", "f16", "f16", "f16"][i % 4].into())
        );
        for time in [&reading["attention_ms"], &reading["step_ms"]] {
            let at = |name: &str| time[name].as_f64().unwrap();
            assert!(0.0 < at("lower") && at("lower") <= at("median") && at("median") <= at("upper"), "{time}");
        }
        // A whole step has the weights to read as well.
        let speed = |bytes: f64, time: &Value| bytes / time["median"].as_f64().unwrap() / 1e6;
        let (cache, weights) = (reading["cache_bytes"].as_f64().unwrap(), report["weight_bytes"].as_f64().unwrap());
        let close = |found: &Value, expected: f64| (found.as_f64().unwrap() / expected - 1.0).abs() < 1e-9;
        assert!(close(&reading["attention_gb_per_s"], speed(cache, &reading["attention_ms"])));
        assert!(close(&reading["step_gb_per_s"], speed(cache + weights, &reading["step_ms"])));
    }
    // Dense keys and values of 300 tokens, give or take what a page has room for.
    let bytes = |i: usize| readings[i]["cache_bytes"].as_f64().unwrap();
    assert!(bytes(8) > 1.9 * bytes(9) && bytes(9) > 1.5 * bytes(10));
    assert_eq!(report["bandwidth"].as_array().unwrap().len(), 2);
    assert!(report["bandwidth"][0]["gb_per_s"].as_f64().unwrap() > 0.1);
}

#[test]
fn json_and_plot_are_written_and_nothing_else_is_replaced() {
    let world = World::new(GQA);
    let files = ["--contexts", "64,128", "--out", "bench.json", "--plot", "bench.svg", "--scheme", SCHEME];
    let printed = bench(&world, &files);
    let written: Value = serde_json::from_str(&std::fs::read_to_string(world.path("bench.json")).unwrap()).unwrap();
    assert_eq!(printed, written);
    let plot = std::fs::read_to_string(world.path("bench.svg")).unwrap();
    assert!(plot.starts_with("<svg ") && plot.trim_end().ends_with("</svg>"));
    for text in ["dense f32", "dense f16", SCHEME, "cached tokens", "milliseconds", "A whole decode step"] {
        assert!(plot.contains(text), "{text}");
    }
    // Its own files may be replaced, others not, reports of another kind among them.
    bench(&world, &files);
    world.succeeds(
        &[
            &["eval", "model", "--text", "text.txt", "--context", "32", "--windows", "1"][..],
            &["--scheme", "dense", "--out", "report.json", "--quiet"],
        ]
        .concat(),
    );
    let report = world.read("report.json");
    let output = world.run(&["bench", "model", "--contexts", "64", "--out", "report.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(world.read("report.json"), report);
    world.write("bench.svg", "<svg>mine</svg>");
    let output = world.run(&[&["bench", "model"], &files[..]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("bench.svg") && error.contains("nothing is overwritten"),
        "{error}"
    );
    assert_eq!(std::fs::read_to_string(world.path("bench.svg")).unwrap(), "<svg>mine</svg>");
}

#[test]
fn contexts_beyond_the_model_leave_out_whole_steps_where_positions_are_learned() {
    let world = World::new("gpt2");
    let report = bench(&world, &["--contexts", "40,400", "--scheme", "kivi-2(g=8,r=4)"]);
    let steps: Vec<bool> = report["readings"].as_array().unwrap().iter().map(|r| !r["step_ms"].is_null()).collect();
    assert_eq!(steps, [[true; 6], [false; 6]].concat());
}

#[test]
fn wrong_options_say_so() {
    let world = World::new(GQA);
    for (args, status, needle) in [
        (&["--contexts", "0"][..], 2, "--contexts"),
        (&["--contexts", "many"], 2, "--contexts"),
        (&["--rounds", "0"], 2, "--rounds"),
        (&["--scheme", "kivi-9"], 2, "kivi-9"),
        (&["--scheme", "kivi-2+query-pca(rank=2,bits=4)"], 2, "--stats"),
        (&["--plot", "missing/bench.svg"], 1, "missing"),
        (&["--device", "elsewhere"], 2, "elsewhere"),
        (&["--contexts", "1000000000000"], 2, "are available; give shorter contexts"),
        (&["--contexts", "18446744073709551615"], 2, "are available; give shorter contexts"),
        (&["--out", "same", "--plot", "./same"], 2, "give two files"),
    ] {
        let output = world.run(&[&["bench", "model", "--quiet"], args].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{args:?}: {error}");
        assert!(error.contains(needle) && !error.contains("panicked") && output.stdout.is_empty(), "{error}");
    }
}
