//! `headq finetune`, and `headq run` with a section `[finetune]`: what is trained, bad settings, kills at any moment.
#![cfg(unix)]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{GQA, World, text};
use serde_json::Value;

const SCHEME: &str = "kivi-2(g=8,r=4)+learned(rank=2,bits=3)";

const BASIC: &[&str] = &[
    "finetune",
    "model",
    "--text",
    "calibration.txt",
    "--context",
    "64",
    "--windows",
    "6",
    "--held-out",
    "2",
    "--stats",
    "stats.safetensors",
    "--scheme",
    SCHEME,
    "--out",
    "learned.safetensors",
];

const TRAINED: &[&str] = &[
    "--steps",
    "60",
    "--measure-every",
    "10",
    "--save-every",
    "1",
    "--warmup",
    "5",
    "--lr",
    "0.01",
    "--train-clip",
    "--threads",
    "2",
];

fn world() -> World {
    let world = World::new(GQA).calibrated();
    world.write("long.txt", text(20_000, 4));
    world
}

/// Fails with one line that has all of `needles`, and leaves no basis and no state.
#[track_caller]
fn fails(world: &World, args: &[&str], needles: &[&str]) {
    let before = world.snapshot();
    let output = world.run(&[BASIC, args, &["--quiet"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.starts_with("error: ") && error.lines().count() == 1, "{error}");
    for needle in needles {
        assert!(error.contains(needle), "{needle:?} is not in: {error}");
    }
    assert!(before == world.snapshot(), "{args:?} changed files: {error}");
}

fn remove(world: &World) {
    std::fs::remove_file(world.path("learned.safetensors")).unwrap();
    std::fs::remove_dir_all(world.path("learned.safetensors.state")).unwrap();
}

#[test]
fn training_lowers_the_held_out_loss_and_makes_a_basis_that_evaluates() {
    let world = world();
    let made = world.prints(&[BASIC, TRAINED].concat());
    let loss = |name: &str| made["held_out"][name].as_f64().unwrap();
    assert!(loss("trained") < loss("initial") && loss("initial") < loss("uncorrected"), "{made:#}");
    let (tensors, header) = world.artifact("learned.safetensors");
    let header: Value = serde_json::from_str(&header).unwrap();
    assert_eq!(header["basis"]["family"], "learned");
    assert_eq!((&header["basis"]["loss"], &header["basis"]["bits"]), (&"kl".into(), &3.into()));
    assert_eq!(tensors.keys().map(String::as_str).collect::<Vec<_>>(), ["clip", "decoder", "encoder"]);
    let metrics = String::from_utf8(world.read("learned.safetensors.state/metrics.jsonl")).unwrap();
    let lines: Vec<Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(lines.iter().all(|l| l["held_out"].is_f64() && l["loss"].is_f64() && l["step"].is_u64()));
    let scheme = ["--scheme", SCHEME, "--basis", "learned.safetensors"];
    let report = world.eval(&scheme);
    assert!(report["schemes"][1]["kl"].as_f64().unwrap() > 0.0);
    // The basis belongs to its side quantizer.
    let other = SCHEME.replace("bits=3", "bits=4");
    let output = world.run(&[
        "eval",
        "model",
        "--text",
        "text.txt",
        "--context",
        "32",
        "--windows",
        "2",
        "--scheme",
        &other,
        "--basis",
        "learned.safetensors",
    ]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() != Some(0) && error.contains("side bits 3"), "{error}");
    // The same again is there already, and is the same.
    let before = world.read("learned.safetensors");
    world.succeeds(&[BASIC, TRAINED].concat());
    assert_eq!(before, world.read("learned.safetensors"));
    // Results do not depend on the number of threads.
    remove(&world);
    let single: Vec<&str> = TRAINED.iter().map(|a| if *a == "2" { "1" } else { *a }).collect();
    world.succeeds(&[BASIC, &single].concat());
    assert_eq!(before, world.read("learned.safetensors"));
}

#[test]
fn every_loss_and_shape_trains() {
    let world = world();
    let few = ["--steps", "6", "--measure-every", "3", "--quiet"];
    for args in [
        &["--loss", "fisher"][..],
        &["--loss", "score", "--init", "random"],
        &["--loss", "logits", "--train-clip"],
        &["--loss", "fisher", "--train-base-clip"],
        &["--tied", "--init", "query-pca"],
        &["--epochs", "1", "--batch", "3"],
        &["--scheme", "kivi-2(g=8,r=4)+learned(rank=2,bits=3,scales=token,scope=query-head)", "--train-clip"],
        // Rank = head width; one window.
        &["--scheme", "kivi-2(g=8,r=4)+learned(rank=16,bits=3)", "--train-clip"],
        &["--windows", "1", "--held-out", "1"],
    ] {
        let mut all = BASIC.to_vec();
        for pair in args.chunks(2).filter(|p| ["--scheme", "--windows", "--held-out"].contains(&p[0])) {
            let at = all.iter().position(|a| *a == pair[0]).unwrap();
            all[at + 1] = pair[1];
        }
        let extra: Vec<&str> =
            if all == BASIC { args.to_vec() } else { args.iter().copied().filter(|a| *a == "--train-clip").collect() };
        let few = if args.contains(&"--epochs") { &few[2..] } else { &few[..] };
        world.succeeds(&[&all, &extra[..], few].concat());
        let (tensors, _) = world.artifact("learned.safetensors");
        assert_eq!(tensors.contains_key("encoder"), !args.contains(&"--tied"), "{args:?}");
        for (name, (_, _, bytes)) in tensors {
            let finite = bytes.chunks_exact(4).all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite());
            assert!(finite, "{name} of {args:?}");
        }
        remove(&world);
    }
}

/// Standard error of a fine-tuning that must succeed, with flags in the place of [`BASIC`]'s own where it has them.
#[track_caller]
fn says(world: &World, args: &[&str]) -> String {
    let mut all = BASIC.to_vec();
    for pair in args.chunks(2) {
        match all.iter().position(|a| *a == pair[0]) {
            Some(at) => all[at + 1] = pair[1],
            None => all.extend(pair),
        }
    }
    let output = world.run(&[&all[..], &["--steps", "6", "--measure-every", "3"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{error}");
    for (name, (_, _, bytes)) in world.artifact("learned.safetensors").0 {
        let finite = bytes.chunks_exact(4).all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite());
        assert!(finite, "{name} of {args:?}");
    }
    error
}

#[test]
fn little_to_expect_is_said_in_a_line() {
    let warnings = |error: &str| -> Vec<String> {
        error.lines().filter(|line| line.contains("WARN")).map(str::to_owned).collect()
    };
    let world = world();
    assert_eq!(warnings(&says(&world, &["--windows", "6"])), Vec::<String>::new());
    remove(&world);
    let one = warnings(&says(&world, &["--windows", "1"]));
    assert!(
        one.iter().any(|line| line.contains("one window of 64 tokens") && line.contains("more windows")),
        "{one:?}"
    );
    remove(&world);
    let whole = warnings(&says(&world, &["--scheme", "kivi-2(g=8,r=4)+learned(rank=16,bits=3)"]));
    assert!(whole.iter().any(|line| line.contains("rank 16 is the head width")), "{whole:?}");
    // A head whose keys are all zero.
    let world = World::new(GQA);
    world.surgery(|tensors| {
        let (_, shape, bytes) = tensors.get_mut("model.layers.1.self_attn.k_proj.weight").unwrap();
        let row = 4 * shape[1];
        bytes[16 * row..32 * row].fill(0);
    });
    let world = world.calibrated();
    let still = warnings(&says(&world, &["--loss", "fisher"]));
    assert!(still.iter().any(|line| line.contains("nothing to correct in layer 1 head 1:")), "{still:?}");
    assert_eq!(still.len(), 1, "{still:?}");
}

#[test]
fn bad_settings_are_named_and_leave_nothing() {
    let world = world();
    fails(
        &world,
        &["--lr", "1000", "--steps", "20"],
        &["training of layer", "the loss has grown from", "lower the learning rate 1000"],
    );
    fails(&world, &["--lr=-1"], &["lr: expected a number above 0"]);
    fails(&world, &["--steps", "0"], &["--steps: expected at least 1"]);
    fails(&world, &["--epochs", "0"], &["--epochs: expected at least 1"]);
    fails(&world, &["--loss", "mse"], &["'mse' is not known; known are kl, fisher, score, logits"]);
    fails(&world, &["--init", "pca"], &["'pca' is not known; known are best, query-pca"]);
    fails(&world, &["--init", "score-optimal", "--tied"], &["a tied basis begins with best, query-pca"]);
    fails(&world, &["--train-transform"], &["train_transform: kivi-2(g=8,r=4) has no transform to learn; klt has"]);
    let scheme = |s: &'static str, needles: &[&str]| {
        let mut all = BASIC.to_vec();
        let at = all.iter().position(|a| *a == "--scheme").unwrap();
        all[at + 1] = s;
        let output = world.run(&all);
        let error = String::from_utf8(output.stderr).unwrap();
        needles.iter().for_each(|n| assert!(error.contains(n), "{n:?} is not in: {error}"));
        assert!(!output.status.success() && !world.path("learned.safetensors").exists());
    };
    scheme("kivi-2(g=8,r=4)", &["has no side code to train"]);
    scheme("kivi-2(g=8,r=4)+query-pca(rank=2,bits=3)", &["--init query-pca"]);
    scheme("kivi-3(g=8,r=4)+learned(rank=2,bits=3)", &["calibrate with --base 'kivi-3(g=8,r=4)'"]);
    scheme(
        "kivi-2(g=8,r=200)+learned(rank=2,bits=3)",
        &["windows of 64 tokens hold no key that is read from codes", "at least 208"],
    );
    scheme("kivi-2(g=8,r=4)+learned(rank=17,bits=3)", &["rank"]);
    // A state folder of other settings is not taken up.
    world.succeeds(&[BASIC, &["--steps", "4", "--quiet"]].concat());
    fails(&world, &["--steps", "5"], &["holds a fine-tuning of another model, text, scheme or settings"]);
    let manifest = world.read("learned.safetensors.state/finetune.json");
    for damaged in [&b""[..], b"{}", &manifest[..manifest.len() / 2]] {
        world.write("learned.safetensors.state/finetune.json", damaged);
        let needles = ["learned.safetensors.state/finetune.json: damaged (", "remove the folder", "or name another"];
        fails(&world, &["--steps", "4"], &needles);
    }
    world.write("learned.safetensors.state/finetune.json", &manifest);
    world.succeeds(&[BASIC, &["--steps", "4", "--quiet"]].concat());
}

/// 6 windows in batches of 2 are 3 steps.
#[test]
fn epochs_are_steps_by_another_name() {
    let world = world();
    let by = |flags: &[&str]| world.prints(&[BASIC, flags, &["--measure-every", "3", "--quiet"]].concat());
    let steps = by(&["--steps", "6"]);
    let trained = world.read("learned.safetensors");
    remove(&world);
    let epochs = by(&["--epochs", "2"]);
    assert_eq!((&epochs["settings"], &epochs["settings"]["steps"]), (&steps["settings"], &6.into()));
    assert_eq!(world.read("learned.safetensors"), trained);
    // Beyond all measure, but no more than that.
    fails(&world, &["--epochs", "18446744073709551615"], &["holds a fine-tuning of another"]);

    let config = |training: &str| {
        format!(
            "name = 'x'\nmodel = 'model'\n[calibrate]\ntext = 'other.txt'\ncontext = 64\nwindows = 4\n[finetune]\ntext = 'long.txt'\n\
             context = 64\nwindows = 6\nheld_out = 2\ntraining = {{ measure_every = 3, {training} }}\n[eval]\ntext = 'text.txt'\n\
             context = 64\nwindows = 3\nschemes = ['{SCHEME}']\n"
        )
    };
    let run = |training: &str, out: &str| {
        world.write("run.toml", config(training));
        world.prints(&["run", "run.toml", "--out", out, "--quiet"])["schemes"].clone()
    };
    assert_eq!(run("steps = 6", "a"), run("epochs = 2", "b"));
    for (training, needle) in [
        ("epochs = 0", "finetune.training.epochs: expected at least 1, found 0"),
        ("epochs = 2, steps = 6", "finetune.training: steps and epochs say the same in two ways; give one of them"),
    ] {
        world.write("run.toml", config(training));
        let output = world.run(&["run", "run.toml", "--out", "c", "--quiet"]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && error.contains(needle), "{error}");
    }
}

/// Every checkpoint is whole, and so is the basis if it is there.
fn check_whole(world: &World) {
    let state = "learned.safetensors.state";
    if world.path(state).exists() {
        for name in world.list(state).iter().filter(|n| n.ends_with(".safetensors")) {
            assert!(world.artifact(&format!("{state}/{name}")).0.len() >= 8, "{name}");
        }
    }
    if world.path("learned.safetensors").exists() {
        assert_eq!(world.artifact("learned.safetensors").0.len(), 3);
    }
}

#[test]
fn kills_at_random_moments_change_nothing() {
    let world = world();
    let args = [BASIC, TRAINED, &["--quiet"]].concat();
    let begun = Instant::now();
    world.succeeds(&args);
    let duration = begun.elapsed();
    let read =
        |world: &World| (world.read("learned.safetensors"), world.read("learned.safetensors.state/metrics.jsonl"));
    let expected = read(&world);
    remove(&world);
    let mut random = 12345u64;
    let mut kills = 0;
    while kills < 10 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let share = (random >> 40) as f64 / f64::from(1 << 24);
        let delay = Duration::from_secs_f64(duration.as_secs_f64() * share);
        let mut child = world.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(delay);
        // SIGKILL; one that has ended by itself was quick, and the next moment is another.
        if child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
            kills += 1;
        }
        child.wait().unwrap();
        check_whole(&world);
        // Every other time the next kill hits a run that goes on.
        if kills % 2 == 0 {
            world.succeeds(&args);
            assert_eq!(read(&world), expected, "after {kills} kills");
            remove(&world);
        }
    }
}

#[test]
fn a_run_trains_the_bases_that_its_schemes_need() {
    let world = world();
    let config = format!(
        r#"name = "learned"
model = "model"

[calibrate]
text = "other.txt"
context = 64
windows = 4

[finetune]
text = "long.txt"
context = 64
windows = 6
held_out = 2
training = {{ loss = "kl", steps = 20, measure_every = 10, train_clip = true }}

[eval]
text = "text.txt"
context = 64
windows = 3
schemes = ["kivi-2(g=8,r=4)+score-optimal(rank=2,bits=3)", "{SCHEME}", "{SCHEME}/token-2(c=8)"]
"#
    );
    world.write("run.toml", &config);
    let report = world.prints(&["run", "run.toml", "--out", "made"]);
    let schemes = report["schemes"].as_array().unwrap();
    assert_eq!(schemes.len(), 4);
    assert_eq!(schemes[1]["key_bits"], schemes[2]["key_bits"]);
    assert_ne!(schemes[1]["kl"], schemes[2]["kl"]);
    let trained = world.list("made").into_iter().filter(|n| n.starts_with("finetune-")).count();
    assert_eq!(trained, 1, "one basis serves both schemes");
    assert_eq!(world.prints(&["run", "run.toml", "--out", "made"]), report);
    world.write("run.toml", config.replace("\"kl\"", "\"mse\""));
    let error = String::from_utf8(world.run(&["run", "run.toml", "--out", "other"]).stderr).unwrap();
    assert!(error.contains("finetune.training.loss: 'mse' is not known"), "{error}");
}

/// Training, then the comparison of what was trained with what was derived, from one configuration.
#[test]
fn a_run_compares_the_basis_that_it_trains() {
    let world = world();
    let base = "kivi-2(g=8,r=4)";
    let config = |families: &str, finetune: &str| {
        format!(
            r#"name = "trained"
model = "model"

[calibrate]
text = "other.txt"
context = 64
windows = 4
{finetune}
[compare]
text = "text.txt"
context = 64
windows = 3
scheme = "{base}+query-pca(rank=2,bits=3,sign=-1)/token-2(c=8)"
families = {families}
"#
        )
    };
    let finetune = r#"
[finetune]
text = "long.txt"
context = 64
windows = 6
held_out = 2
training = { steps = 20, measure_every = 10, train_base_clip = true }
"#;
    world.write("run.toml", config(r#"["query-pca", "score-optimal"]"#, finetune));
    let made = world.prints(&["run", "run.toml", "--out", "made"]);
    let bases = made["bases"].as_array().unwrap();
    let names: Vec<&str> = bases.iter().map(|b| b["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["query-pca", "score-optimal", "learned"]);
    let learned = &bases[2];
    assert_eq!((&learned["loss"], &learned["derived"], &made["seen"]), (&"kl".into(), &false.into(), &false.into()));
    assert_eq!(learned["result"]["key_bits"], bases[0]["result"]["key_bits"]);
    assert_eq!(learned["result"]["scheme"], format!("{base}+learned(rank=2,bits=3,sign=-1)/token-2(c=8)"));
    assert_eq!(learned["calibration"].as_array().unwrap().len(), 3, "trained on, held out, calibrated on");
    // The artifact of the run gives the same by itself, and so does `headq finetune` with the same settings.
    let basis = "made/basis-kivi-2_g8_r4_learned_rank2_bits3.safetensors";
    let by_hand = world.prints(&[
        "compare",
        "model",
        "--text",
        "text.txt",
        "--context",
        "64",
        "--windows",
        "3",
        "--scheme",
        made["scheme"].as_str().unwrap(),
        "--basis",
        basis,
    ]);
    assert_eq!(by_hand["bases"][0]["result"], learned["result"]);
    assert_eq!(by_hand["bases"][0]["captured"], learned["captured"]);
    let mse = |basis: &Value| basis["result"]["key_mse"].as_f64().unwrap();
    assert_ne!(mse(learned), mse(&bases[0]), "it codes keys with clip factors of its own");
    assert_eq!(by_hand["bases"][0]["captured"], learned["captured"]);
    assert_ne!(
        learned["result"]["key_mse"], bases[0]["result"]["key_mse"],
        "it codes keys with clip factors of its own"
    );
    world.succeeds(&[
        "finetune",
        "model",
        "--text",
        "long.txt",
        "--context",
        "64",
        "--windows",
        "6",
        "--held-out",
        "2",
        "--stats",
        "made/stats-kivi-2_g8_r4.safetensors",
        "--scheme",
        &format!("{base}+learned(rank=2,bits=3)"),
        "--steps",
        "20",
        "--train-base-clip",
        "--measure-every",
        "10",
        "--out",
        "learned.safetensors",
    ]);
    assert_eq!(world.artifact("learned.safetensors"), world.artifact(basis));
    // Both are reported, by the run and from its folder.
    let report = String::from_utf8(world.read("made/report.md")).unwrap();
    world.succeeds(&["report", "made", "--out", "again.html"]);
    let again = String::from_utf8(world.read("again.md")).unwrap();
    for part in ["## Fine-tuning", "## Comparison", "Losses by step.", "`learned`, trained on kl", "| 20 | "] {
        assert!(report.contains(part) && again.contains(part), "{part} is not in {report}");
    }
    world.succeeds(&["report", "learned.safetensors.state", "--out", "state.html"]);
    let state = String::from_utf8(world.read("state.md")).unwrap();
    assert!(state.contains("## Fine-tuning") && state.contains("headq finetune model"), "{state}");
    // Started again it is there already; the family may be named, and then has its place.
    assert_eq!(world.prints(&["run", "run.toml", "--out", "made"]), made);
    world.write("run.toml", config(r#"["learned", "random"]"#, finetune));
    let first = world.prints(&["run", "run.toml", "--out", "first"]);
    assert_eq!((&first["bases"][0]["name"], &first["bases"][0]["result"]), (&"learned".into(), &learned["result"]));
}

const KLT: &str = "klt-1.5(g=8,r=4,ranges=lloyd)+learned(rank=2,bits=3)";

/// Transforms of `klt`, trained: kept with the basis, read by every path that reads keys, and held to the statistics that they are of.
#[test]
fn a_trained_transform_is_used_wherever_its_basis_is() {
    let world = World::embedded();
    let calibrate = |text: &str, out: &str| {
        let base = KLT.split('+').next().unwrap();
        let text = ["calibrate", "model", "--text", text, "--context", "128", "--windows", "16", "--base", base];
        world.succeeds(&[&text[..], &["--out", out, "--quiet"]].concat());
    };
    calibrate("other.txt", "stats.safetensors");
    let words = "finetune model --text other.txt --context 128 --windows 16 --held-out 4 --stats stats.safetensors --steps 60 \
         --measure-every 20 --train-clip --train-base-clip --train-transform --out learned.safetensors --quiet";
    let args: Vec<&str> = words.split_whitespace().chain(["--scheme", KLT]).collect();
    let made = world.prints(&args);
    assert!(made["held_out"]["trained"].as_f64().unwrap() < made["held_out"]["initial"].as_f64().unwrap());
    let (tensors, header) = world.artifact("learned.safetensors");
    let names: Vec<&str> = tensors.keys().map(String::as_str).collect();
    assert_eq!(names, ["base_analysis", "base_clip", "base_synthesis", "clip", "decoder", "encoder"]);
    let shapes = ["base_analysis", "base_clip", "base_synthesis"].map(|name| tensors[name].1.clone());
    assert_eq!(shapes, [vec![3, 2, 32, 32], vec![3, 2, 32], vec![3, 2, 32, 32]]);
    let outline = world.prints(&["inspect", "learned.safetensors"]);
    assert_eq!(outline["header"]["base"], "klt-1.5(g=8,r=4,ranges=lloyd)");
    assert_eq!(outline["tensors"][1], serde_json::json!({ "name": "base_clip", "dtype": "F32", "shape": [3, 2, 32] }));
    let printed = world.succeeds(&["inspect", "learned.safetensors"]);
    assert!(printed.contains("| base_analysis ") && printed.contains("trained on kl"), "{printed}");
    assert!(world.succeeds(&["inspect", "stats.safetensors"]).contains("statistics"));
    world.succeeds(&["report", "learned.safetensors.state", "--out", "state.html"]);
    let report = String::from_utf8(world.read("state.md")).unwrap();
    assert!(report.contains("with transforms and clip factors of the base quantizer"), "{report}");

    // On new text it is better than closed forms, whole and token by token alike.
    let closed = KLT.replace("learned", "score-optimal");
    let text = ["eval", "model", "--text", "text.txt", "--context", "128", "--windows", "3", "--scheme", KLT];
    let both = ["--stats", "stats.safetensors", "--basis", "learned.safetensors"];
    let whole = world.prints(&[&text[..], &both, &["--scheme", &closed]].concat())["schemes"].clone();
    let kl = |i: usize| whole[i]["kl"].as_f64().unwrap();
    assert!(kl(1) < 0.9 * kl(2), "{} and {}", kl(1), kl(2));
    assert_eq!(whole[1]["key_bits"], whole[2]["key_bits"]);
    let decoded = world.prints(&[&text[..], &both, &["--decode", "--cache-dtype", "f32"]].concat())["schemes"].clone();
    let ppl = |x: &Value| x["ppl"].as_f64().unwrap();
    assert!((ppl(&decoded[1]) / ppl(&whole[1]) - 1.0).abs() < 1e-3, "{} and {}", decoded[1], whole[1]);
    let generate = ["generate", "model", "--scheme", KLT, "--max-tokens", "40", "--greedy", "The cache of this"];
    let text_made = world.prints(&[&generate[..], &both].concat());
    assert_eq!(text_made["new_tokens"], 40);

    // It is measured with the residuals of its own base quantizer.
    let without: std::collections::BTreeMap<_, _> =
        tensors.into_iter().filter(|(name, _)| !name.starts_with("base_")).collect();
    world.write_tensors("plain.safetensors", &without, Some(&header));
    let compare = ["compare", "model", "--text", "text.txt", "--context", "128", "--windows", "3", "--scheme", KLT];
    let bases = [&both[..], &["--basis", "plain.safetensors"]].concat();
    let compared = world.prints(&[&compare[..], &bases].concat());
    let [learned, plain] = [0, 1].map(|i| &compared["bases"][i]);
    assert_eq!(learned["result"]["kl"], whole[1]["kl"]);
    assert_ne!(learned["captured"], plain["captured"]);
    assert_ne!(learned["result"]["key_mse"], plain["result"]["key_mse"]);

    let fails = |args: &[&str], needles: &[&str]| {
        let output = world.run(&[&text[..], &["--basis", "learned.safetensors"], args].concat());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && needles.iter().all(|n| error.contains(n)), "{needles:?}: {error}");
    };
    fails(&["--quiet"], &["needs statistics of keys and queries", "--stats"]);
    world.write("elsewhere.txt", text_of_calibration(&world));
    calibrate("elsewhere.txt", "other.safetensors");
    fails(
        &["--quiet", "--stats", "other.safetensors"],
        &["other.safetensors", "learned.safetensors was trained with the transforms of other statistics"],
    );
}

/// The second half of the calibration text.
fn text_of_calibration(world: &World) -> String {
    let whole = String::from_utf8(world.read("other.txt")).unwrap();
    whole.chars().skip(whole.chars().count() / 2).collect()
}

#[test]
fn a_run_trains_the_transforms_that_it_evaluates() {
    let world = World::embedded();
    let section = |name: &str, text: &str, windows: usize, rest: &str| {
        format!("[{name}]\ntext = '{text}'\ncontext = 64\nwindows = {windows}\n{rest}\n")
    };
    let training =
        "held_out = 2\ntraining = { steps = 20, measure_every = 10, train_transform = true, train_base_clip = true }";
    let config = |scheme: &str| {
        let parts = [
            section("calibrate", "other.txt", 4, ""),
            section("finetune", "other.txt", 4, training),
            section(
                "eval",
                "text.txt",
                2,
                &format!("schemes = ['{}', '{scheme}']", scheme.replace("learned", "score-optimal")),
            ),
        ];
        format!("name = 'x'\nmodel = 'model'\n{}", parts.concat())
    };
    world.write("run.toml", config(KLT));
    let report = world.prints(&["run", "run.toml", "--out", "made", "--quiet"]);
    let kl = |i: usize| report["schemes"][i]["kl"].as_f64().unwrap();
    assert!(kl(2) < kl(1), "{} and {}", kl(2), kl(1));
    world.write("run.toml", config(SCHEME));
    let output = world.run(&["run", "run.toml", "--out", "other", "--quiet"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("train_transform: kivi-2") && error.contains("klt has"),
        "{error}"
    );
}

#[test]
fn trained_bases_have_their_sections() {
    let world = world();
    let part = |name: &str, rest: &str| format!("[{name}]\ntext = \"text.txt\"\ncontext = 64\nwindows = 2\n{rest}\n");
    let head = "name = \"x\"\nmodel = \"model\"\n";
    let scheme = "scheme = \"kivi-2(g=8,r=4)+query-pca(rank=2,bits=3)\"\nfamilies = [\"learned\"]";
    let finetune = part("finetune", "held_out = 2");
    for (config, needles) in [
        (format!("{head}{}", part("compare", scheme)), &["family learned", "[finetune]", "compare.basis"][..]),
        (
            format!("{head}{}{finetune}", part("compare", &scheme.replace("[", "[\"random\", "))),
            &["no [calibrate] section"],
        ),
        (
            format!("{head}{}{finetune}", part("compare", scheme)),
            &["compare.families: nothing to compare the trained basis with", "\"query-pca\"", "compare.basis"],
        ),
        (
            format!("{head}{}{finetune}", part("compare", &scheme.replace("\"learned\"", ""))),
            &["compare.families: nothing to compare the trained basis with"],
        ),
        (format!("{head}{}{finetune}", part("diagnose", "")), &["a diagnosis trains no basis", "[compare]"]),
        (
            format!("{head}{}{finetune}", part("eval", "schemes = [\"kivi-2(g=8,r=4)\"]")),
            &["[finetune] trains bases of the family learned", "eval.schemes"],
        ),
    ] {
        world.write("run.toml", config);
        let before = world.snapshot();
        let output = world.run(&["run", "run.toml", "--out", "made"]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && needles.iter().all(|n| error.contains(n)), "{needles:?}: {error}");
        assert!(before == world.snapshot(), "files changed: {error}");
    }
}
