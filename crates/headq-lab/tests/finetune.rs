//! Fine-tuning as a library: what it says of settings and heads of which little is to be expected, and what it never saves.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Distribution, Tensor, TensorData};
use headq::correction::Parts;
use headq::scheme::{BaseScheme, Scheme};
use headq::{Basis, Correction, HeadqAttention};
use headq_lab::artifact::{BasisArtifact, StatsArtifact};
use headq_lab::finetune::{Finetuned, METRICS, Request, SUMMARY, Settings, Stopped, Summary};
use headq_lab::text::{TextInfo, Windows};
use headq_lab::{LabError, Observer, Silent, calibrate};
use headq_models::{LoadOptions, LoadedModel, load};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

const HEADS: usize = 4;
const WIDTH: usize = 16;
const HIDDEN: usize = HEADS * WIDTH;
const SCHEME: &str = "kivi-2(g=8,r=4)+learned(rank=2,bits=3)";

/// The tiny GPT-2 with some layers' c_attn changed: `edit` is given a layer, its weights `[hidden, 3 · hidden]` and its biases.
fn model(folder: &Path, edit: impl Fn(usize, &mut [f32], &mut [f32])) -> LoadedModel {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../headq-models/tests/fixtures/tiny/gpt2");
    let bytes = std::fs::read(fixture.join("model.safetensors")).expect("the fixture is there");
    let file = SafeTensors::deserialize(&bytes).expect("the fixture is whole");
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = file
        .tensors()
        .into_iter()
        .map(|(name, t)| {
            let values = t.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            (name, t.shape().to_vec(), values.collect())
        })
        .collect();
    for layer in 0..3 {
        let at = |part: &str| {
            let name = format!("transformer.h.{layer}.attn.c_attn.{part}");
            tensors.iter().position(|(own, ..)| *own == name).expect("GPT-2 has it")
        };
        let (weight, bias) = (at("weight"), at("bias"));
        let (mut weights, mut biases) = (tensors[weight].2.clone(), tensors[bias].2.clone());
        edit(layer, &mut weights, &mut biases);
        (tensors[weight].2, tensors[bias].2) = (weights, biases);
    }
    let data: Vec<Vec<u8>> = tensors.iter().map(|(_, _, x)| x.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&data).map(|((name, shape, _), data)| {
        (name, TensorView::new(Dtype::F32, shape.clone(), data).expect("shapes are kept"))
    });
    let bytes = safetensors::serialize(views, None).expect("tensors can be written");
    std::fs::write(folder.join("model.safetensors"), bytes).expect("the folder can be written");
    std::fs::copy(fixture.join("config.json"), folder.join("config.json")).expect("the folder can be written");
    load(folder, &Device::flex(), &LoadOptions::default()).expect("the model is whole")
}

/// Sets the columns of one head's queries (`part` 0) or keys (1) to zero, and its biases to `bias`.
fn silence(part: usize, head: usize, weights: &mut [f32], biases: &mut [f32], bias: impl Fn(usize) -> f32) {
    let columns = part * HIDDEN + head * WIDTH..part * HIDDEN + (head + 1) * WIDTH;
    weights.chunks_exact_mut(3 * HIDDEN).for_each(|row| row[columns.clone()].fill(0.0));
    biases[columns].iter_mut().enumerate().for_each(|(i, b)| *b = bias(i));
}

fn windows(count: usize, seed: u32) -> Vec<Windows> {
    let window = |w: u32| (0..48u32).map(|i| (i * i * 31 + 97 * w + 7 * seed + i) % 512).collect();
    let text = TextInfo {
        path: "made up".into(),
        sha256: format!("{seed}"),
        chars: 0,
        tokens: 48 * count,
        tokens_sha256: format!("{seed} {count}"),
    };
    vec![Windows { text, windows: (0..count as u32).map(window).collect() }]
}

fn settings() -> Settings {
    Settings { steps: 12, measure_every: 4, warmup: 2, batch: 4, lr: 0.005, train_clip: true, ..Settings::default() }
}

/// Trains on `train` windows, into the folder `state`. Held-out windows are among those that are trained on, so that few steps are
/// enough to get better on them.
fn finetune(
    loaded: &LoadedModel,
    scheme: &str,
    train: usize,
    settings: &Settings,
    state: &Path,
) -> Result<Finetuned, LabError> {
    let scheme: Scheme = scheme.parse()?;
    let stats = calibrated(loaded, scheme.key.expect("keys are coded").base)?;
    finetune_with(loaded, scheme, &stats, train, settings, state, &Silent)
}

fn calibrated(loaded: &LoadedModel, base: BaseScheme) -> Result<StatsArtifact, LabError> {
    calibrate(&loaded.model, &loaded.fingerprint, &windows(4, 3), false, base, None, 1, &Silent)
}

/// The same from any statistics, watched.
fn finetune_with(
    loaded: &LoadedModel,
    scheme: Scheme,
    stats: &StatsArtifact,
    train: usize,
    settings: &Settings,
    state: &Path,
    observer: &dyn Observer,
) -> Result<Finetuned, LabError> {
    let (train, held_out) = (windows(train, 1), windows(2, 1));
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        name: "gpt2".into(),
        device: "flex".into(),
        command: "headq finetune".into(),
        train: &train,
        held_out: &held_out,
        add_bos: false,
        stats,
        scheme,
        settings,
        seed: 3,
        threads: 1,
    };
    request.run(state, observer)
}

/// A temporary folder, and one for the state in it.
fn folders() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let state = folder.path().join("state");
    (folder, state)
}

fn assert_finite(basis: &Basis) {
    let clip = basis.trained.as_ref().and_then(|t| t.clip.as_ref());
    let numbers = basis.decoder.iter().chain(basis.encoder.iter().flatten()).chain(clip.into_iter().flatten());
    assert!(numbers.into_iter().all(|v| v.is_finite()));
}

fn warned(made: &Finetuned, part: &str) -> bool {
    made.summary.warnings.iter().any(|warning| warning.contains(part))
}

/// U of one head.
fn decoder(made: &Finetuned, layer: usize, head: usize) -> &[f32] {
    let basis = &made.artifact.basis;
    let size = basis.head_dim * basis.rank;
    &basis.decoder[(layer * HEADS + head) * size..][..size]
}

#[test]
fn heads_with_nothing_to_correct_are_named_and_keep_their_initial_basis() {
    let (folder, state) = folders();
    // Keys of one head are all the same, queries of another all zero.
    let loaded = model(folder.path(), |layer, weights, biases| match layer {
        0 => silence(0, 1, weights, biases, |_| 0.0),
        1 => silence(1, 2, weights, biases, |i| 0.3 - 0.05 * i as f32),
        _ => {}
    });
    for loss in ["kl", "fisher", "score", "logits"] {
        let run = |name: &str, settings: Settings| {
            let settings = Settings { loss: loss.into(), ..settings };
            finetune(&loaded, SCHEME, 4, &settings, &state.with_extension(name)).expect("these heads do no harm")
        };
        let (few, many) = (run(&format!("{loss}-1"), Settings { steps: 1, ..settings() }), run(loss, settings()));
        assert_finite(&many.artifact.basis);
        assert!(warned(&many, "layer 0 head 1; layer 1 head 2"), "{loss}: {:?}", many.summary.warnings);
        for (layer, head) in [(0, 1), (1, 2)] {
            assert_eq!(decoder(&few, layer, head), decoder(&many, layer, head), "{loss}: layer {layer}, head {head}");
        }
        let others = [(0, 0), (1, 1), (2, 0)];
        assert!(
            others.iter().any(|&(layer, head)| decoder(&few, layer, head) != decoder(&many, layer, head)),
            "{loss}"
        );
    }
}

#[test]
fn a_model_with_nothing_to_correct_keeps_the_initial_basis_throughout() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, weights, biases| {
        (0..HEADS).for_each(|head| silence(1, head, weights, biases, |i| 0.2 * i as f32 - 1.0));
    });
    for loss in ["kl", "logits"] {
        let settings = Settings { loss: loss.into(), ..settings() };
        let made =
            finetune(&loaded, SCHEME, 4, &settings, &state.with_extension(loss)).expect("there is a basis to keep");
        assert_finite(&made.artifact.basis);
        assert!(warned(&made, "layer 2 heads 0, 1, 2, 3") && warned(&made, "nothing to learn"), "{loss}");
        assert!(made.summary.layers.iter().all(|l| (l.steps, l.stopped) == (0, Stopped::NothingToLearn)));
        assert_eq!(made.held_out.0, made.held_out.1);
    }
}

#[test]
fn one_window_and_full_rank_are_warned_of() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    let usual = finetune(&loaded, SCHEME, 4, &settings(), &state.with_extension("usual")).expect("as ever");
    // What is held out here is among what is trained on, and nothing else is wrong.
    let [only] = &usual.summary.warnings[..] else { panic!("{:?}", usual.summary.warnings) };
    assert!(only.starts_with("held out is not new"), "{only}");
    let one = finetune(&loaded, SCHEME, 1, &settings(), &state.with_extension("one")).expect("one window will do");
    assert_finite(&one.artifact.basis);
    assert!(warned(&one, "one window of 48 tokens to train on") && warned(&one, "overfitting"));
    let whole = SCHEME.replace("rank=2", "rank=16");
    let whole = finetune(&loaded, &whole, 4, &settings(), &state.with_extension("whole")).expect("full rank will do");
    assert_finite(&whole.artifact.basis);
    assert!(warned(&whole, "rank 16 is the head width: the correction is not low-rank"));
}

#[test]
fn a_learning_rate_far_too_high_is_an_error_or_changes_nothing() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    for loss in ["kl", "logits"] {
        let settings = Settings { lr: 1e3, steps: 30, loss: loss.into(), ..settings() };
        let error = finetune(&loaded, SCHEME, 4, &settings, &state).expect_err("training diverges").to_string();
        assert!(error.contains("lower the learning rate 1000"), "{error}");
        assert!(!state.exists(), "settings that diverge are not taken up again");
    }
    // A tied basis is orthonormal whatever its steps: it cannot diverge, only find nothing.
    let settings = Settings { lr: 1e3, tied: true, init: "query-pca".into(), train_clip: false, ..settings() };
    let made = finetune(&loaded, SCHEME, 4, &settings, &state).expect("orthonormal bases stay bounded");
    assert_finite(&made.artifact.basis);
    assert!(made.held_out.1 <= made.held_out.0);
}

/// Clip factors of the base quantizer are trained, kept with the basis, and used wherever it is.
#[test]
fn clip_factors_of_the_base_quantizer_come_with_the_basis() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    for loss in ["kl", "score", "logits"] {
        let settings = Settings { train_base_clip: true, loss: loss.into(), ..settings() };
        let made = finetune(&loaded, SCHEME, 4, &settings, &state.with_extension(loss)).expect("kivi has ranges");
        let path = folder.path().join("basis.safetensors");
        made.artifact.save(&path).expect("the folder can be written");
        let basis = BasisArtifact::load(&path).expect("it is whole").basis;
        assert_eq!(basis, made.artifact.basis);
        let factors = basis.trained.as_ref().and_then(|t| t.base_clip.clone()).expect("they were trained");
        assert_eq!(factors.len(), 3 * HEADS);
        assert!(factors.iter().all(|f| (0.05..=1.0).contains(f)), "{factors:?}");
        assert!(factors.iter().any(|f| *f < 0.999), "{loss}: {factors:?}");
        let scheme: Scheme = SCHEME.parse().expect("the scheme is well formed");
        let keys = Tensor::<4>::random([1, HEADS, 16, WIDTH], Distribution::Default, &Device::flex());
        let code =
            |basis: &Basis| HeadqAttention::new(scheme, Some(basis), 0, &Device::flex()).code_keys(keys.clone()).base;
        let least = (0..HEADS).min_by(|a, b| factors[*a].total_cmp(&factors[*b])).expect("there are heads");
        let without = basis.clone().with_base_clip(None);
        let changed = (code(&basis) - code(&without)).abs().narrow(1, least, 1).max().into_scalar::<f32>();
        assert_eq!(changed > 0.0, factors[least] < 1.0, "{loss}");
    }
    let unable = |scheme: &str| {
        let settings = Settings { train_base_clip: true, ..settings() };
        finetune(&loaded, scheme, 4, &settings, &state).expect_err("it has none to train").to_string()
    };
    let rotated = unable("rotated-2(g=8,r=4)+learned(rank=2,bits=3)");
    assert!(rotated.contains("train_base_clip: rotated-2") && rotated.contains("kivi and token"), "{rotated}");
    let shared = unable("kivi-2(g=8,r=4)+learned(rank=2,bits=3,scope=query-head)");
    assert!(shared.contains("scope=kv-head"), "{shared}");
    assert!(!state.exists());
}

/// Transforms of `klt` and factors of its coefficients are trained under every loss, kept with the basis, and used wherever it is.
#[test]
fn transforms_of_the_base_quantizer_come_with_the_basis() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    for (loss, scheme) in [
        ("kl", "klt-2(g=8,r=4,sinks=0)+learned(rank=2,bits=3)"),
        ("fisher", "klt-1.5(g=8,r=4,sinks=0,ranges=static)+learned(rank=2,bits=3)"),
        ("score", "klt-1.5(g=8,r=4,sinks=0,ranges=lloyd)+learned(rank=2,bits=3,scales=token)"),
        ("logits", "klt-2(g=8,r=4,sinks=0)+learned(rank=2,bits=3)"),
    ] {
        for train_base_clip in [true, false] {
            let state = state.with_extension(format!("{loss}{train_base_clip}"));
            let settings = Settings { train_transform: true, train_base_clip, loss: loss.into(), ..settings() };
            let made = finetune(&loaded, scheme, 4, &settings, &state).expect("klt has a transform");
            assert!(made.held_out.1 < made.held_out.0, "{loss}: {:?}", made.held_out);
            let path = folder.path().join("basis.safetensors");
            made.artifact.save(&path).expect("the folder can be written");
            let first = std::fs::read(&path).expect("it was written");
            let loaded_again = BasisArtifact::load(&path).expect("it is whole");
            assert_eq!(loaded_again.basis, made.artifact.basis);
            loaded_again.save(&path).expect("the folder can be written");
            assert_eq!(std::fs::read(&path).expect("it was written"), first, "equal artifacts have equal bytes");
            let trained = loaded_again.basis.trained.as_ref().expect("it is learned");
            let factors = trained.base_clip.as_ref();
            assert_eq!(factors.map(Vec::len), train_base_clip.then_some(3 * HEADS * WIDTH));
            assert!(factors.into_iter().flatten().all(|f| (0.25..=4.0).contains(f)));
            let transform = trained.base_transform.as_ref().expect("it was trained");
            for matrices in [&transform.analysis, &transform.synthesis] {
                assert_eq!(matrices.len(), 3 * HEADS * WIDTH * WIDTH);
                assert!(matrices.iter().all(|v| v.is_finite()) && matrices.iter().any(|v| *v != 0.0), "{loss}");
            }
            assert!(loaded_again.header.basis.expect("it is a basis").calibration.is_some());
        }
    }
    let unable = |scheme: &str, settings: Settings| {
        finetune(&loaded, scheme, 4, &settings, &state).expect_err("it has none to train").to_string()
    };
    let transform = || Settings { train_transform: true, ..settings() };
    let kivi = unable(SCHEME, transform());
    assert!(kivi.contains("train_transform: kivi-2") && kivi.contains("klt has"), "{kivi}");
    let shared = "klt-2(g=8,r=4)+learned(rank=2,bits=3,scope=query-head)";
    for (name, settings) in
        [("train_transform", transform()), ("train_base_clip", Settings { train_base_clip: true, ..settings() })]
    {
        let error = unable(shared, settings);
        assert!(error.contains(name) && error.contains("scope=kv-head"), "{error}");
    }
    assert!(!state.exists());
}

/// Constant keys have coefficients of no variance, and silent queries a metric of nothing.
#[test]
fn transforms_of_degenerate_heads_stay_as_they_are() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |layer, weights, biases| match layer {
        0 => silence(0, 1, weights, biases, |_| 0.0),
        1 => silence(1, 2, weights, biases, |i| 0.3 - 0.05 * i as f32),
        _ => {}
    });
    for (loss, ranges) in [("kl", "group"), ("score", "lloyd"), ("logits", "static")] {
        let scheme = format!("klt-2(g=8,r=4,sinks=0,ranges={ranges})+learned(rank=2,bits=3)");
        let settings = Settings { train_transform: true, train_base_clip: true, loss: loss.into(), ..settings() };
        let made = finetune(&loaded, &scheme, 4, &settings, &state.with_extension(loss)).expect("they do no harm");
        assert_finite(&made.artifact.basis);
        assert!(warned(&made, "layer 0 head 1; layer 1 head 2"), "{loss}: {:?}", made.summary.warnings);
        let trained = made.artifact.basis.trained.as_ref().expect("it is learned");
        let (clip, transform) = (trained.base_clip.as_ref(), trained.base_transform.as_ref());
        let (clip, transform) = (clip.expect("it was trained"), transform.expect("it was trained"));
        let matrices = [&transform.analysis, &transform.synthesis];
        assert!(clip.iter().chain(matrices.into_iter().flatten()).all(|v| v.is_finite()), "{loss}");
        let of = |x: &[f32], layer: usize, head: usize| {
            let size = x.len() / (3 * HEADS);
            x[(layer * HEADS + head) * size..][..size].to_vec()
        };
        for (layer, head) in [(0, 1), (1, 2)] {
            assert!(of(clip, layer, head).iter().all(|v| *v == 1.0), "{loss}: layer {layer}, head {head}");
            assert!(matrices.iter().all(|x| of(x, layer, head).iter().all(|v| *v == 0.0)), "{loss}");
        }
        assert!(matrices.iter().all(|x| of(x, 2, 0).iter().any(|v| *v != 0.0)), "{loss}");
    }
}

/// Heads that are given the statistics of other heads have transforms that fit nothing: what training them gains is much more than what the
/// correction alone can make up for.
#[test]
fn training_makes_up_for_the_transforms_of_other_heads() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    let scheme: Scheme = "klt-1.5(g=8,r=4,sinks=0)+learned(rank=2,bits=3)".parse().expect("the scheme is well formed");
    let mut stats = calibrated(&loaded, scheme.key.expect("keys are coded").base).expect("there are keys");
    for layer in &mut stats.layers {
        layer.k.rotate_left(1);
        layer.q.rotate_left(2);
        layer.sample = None;
    }
    let run = |name: &str, train: bool| {
        let settings = Settings {
            train_transform: train,
            train_base_clip: train,
            steps: 60,
            measure_every: 10,
            lr: 0.01,
            ..settings()
        };
        let state = state.with_extension(name);
        finetune_with(&loaded, scheme, &stats, 4, &settings, &state, &Silent).expect("as ever").held_out
    };
    let (without, with) = (run("without", false), run("with", true));
    assert!((with.0 / without.0 - 1.0).abs() < 1e-4, "both begin with {with:?} and {without:?}");
    assert!(with.1 < 0.8 * without.1, "{with:?} and {without:?}");
}

/// Stops at the so-many-th opportunity.
struct Impatient(AtomicUsize);

impl Observer for Impatient {
    fn begin(&self, _: &str, _: usize) {}
    fn step(&self) {}
    fn end(&self) {}
    fn cancelled(&self) -> bool {
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_err()
    }
}

#[test]
fn interrupted_training_of_transforms_comes_to_the_same() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    let scheme: Scheme = "klt-2(g=8,r=4,sinks=0)+learned(rank=2,bits=3)".parse().expect("the scheme is well formed");
    let stats = calibrated(&loaded, scheme.key.expect("keys are coded").base).expect("there are keys");
    // The first looks for interruptions in its dense passes, too.
    for (loss, patience) in [("kl", 11), ("logits", 5)] {
        let settings = Settings { train_transform: true, train_base_clip: true, loss: loss.into(), ..settings() };
        let run = |name: &str, observer: &dyn Observer| {
            let state = state.with_extension(format!("{loss}-{name}"));
            finetune_with(&loaded, scheme, &stats, 4, &settings, &state, observer)
        };
        let whole = run("whole", &Silent).expect("as ever");
        let mut interruptions = 0;
        let parts = loop {
            match run("parts", &Impatient(AtomicUsize::new(patience))) {
                Ok(made) => break made,
                Err(LabError::Interrupted) => interruptions += 1,
                Err(other) => panic!("{other}"),
            }
            assert!(interruptions < 50, "it goes on from where it was");
        };
        assert!(interruptions > 1, "{loss}: {interruptions}");
        assert_eq!(parts.artifact, whole.artifact, "{loss}");
        assert_eq!(parts.measurements, whole.measurements, "{loss}");
    }
}

/// Files whose tensors of the base quantizer are not what their header says.
#[test]
fn tensors_of_the_base_quantizer_are_checked() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    let path = folder.path().join("basis.safetensors");
    let make = |scheme: &str, train_transform: bool, name: &str| {
        let settings = Settings { train_transform, train_base_clip: true, steps: 1, ..settings() };
        let made = finetune(&loaded, scheme, 4, &settings, &state.with_extension(name)).expect("as ever");
        made.artifact.save(&path).expect("the folder can be written");
        std::fs::read(&path).expect("it was written")
    };
    type Tensors = std::collections::BTreeMap<String, (Vec<usize>, Vec<u8>)>;
    let refused = |bytes: &[u8], edit: &dyn Fn(&mut Tensors, &mut String), needles: &[&str]| {
        let (_, metadata) = SafeTensors::read_metadata(bytes).expect("it is whole");
        let mut header = metadata.metadata().as_ref().expect("it has a header")["headq"].clone();
        let file = SafeTensors::deserialize(bytes).expect("it is whole");
        let own = |(name, t): (String, TensorView)| (name, (t.shape().to_vec(), t.data().to_vec()));
        let mut tensors: Tensors = file.tensors().into_iter().map(own).collect();
        edit(&mut tensors, &mut header);
        let views = tensors
            .iter()
            .map(|(name, (shape, data))| (name, TensorView::new(Dtype::F32, shape.clone(), data).expect("of f32")));
        let metadata = std::collections::HashMap::from([("headq".to_string(), header)]);
        std::fs::write(&path, safetensors::serialize(views, Some(metadata)).expect("it can be written"))
            .expect("written");
        let error = BasisArtifact::load(&path).map(drop).expect_err("it is refused").to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains("basis.safetensors") && needles.iter().all(|n| error.contains(n)), "{error}");
    };
    let zeros = |shape: &[usize]| (shape.to_vec(), vec![0u8; 4 * shape.iter().product::<usize>()]);
    let klt = make("klt-2(g=8,r=4)+learned(rank=2,bits=3)", true, "klt");
    refused(
        &klt,
        &|t, _| drop(t.insert("base_clip".into(), zeros(&[3, HEADS]))),
        &["'base_clip'", "[3, 4, 16]", "[3, 4]"],
    );
    refused(&klt, &|t, _| drop(t.remove("base_synthesis")), &["'base_synthesis' is missing"]);
    refused(&klt, &|t, _| drop(t.remove("base_analysis")), &["'base_analysis' is missing"]);
    refused(
        &klt,
        &|t, _| drop(t.insert("base_analysis".into(), zeros(&[3, HEADS, 16]))),
        &["'base_analysis'", "[3, 4, 16, 16]"],
    );
    let nan = |t: &mut Tensors| {
        t.get_mut("base_synthesis").expect("it is there").1[..4].copy_from_slice(&f32::NAN.to_le_bytes())
    };
    refused(&klt, &|t, _| nan(t), &["'base_synthesis' holds NaN"]);
    let rename = |header: &mut String, from: &str, to: &str| {
        assert!(header.contains(from), "{header}");
        *header = header.replacen(from, to, 1);
    };
    refused(&klt, &|_, h| rename(h, "\"klt-2(", "\"rotated-2("), &["'base_clip'", "rotated-2", "can learn"]);
    refused(&klt, &|_, h| rename(h, "\"kv-head\"", "\"query-head\""), &["'base_clip'", "scope kv-head"]);
    let kivi = make(SCHEME, false, "kivi");
    refused(&kivi, &|t, _| drop(t.insert("base_clip".into(), zeros(&[3, HEADS, 16]))), &["'base_clip'", "[3, 4]"]);
    let square = || zeros(&[3, HEADS, 16, 16]);
    refused(
        &kivi,
        &|t, _| drop(t.insert("base_analysis".into(), square())),
        &["'base_analysis'", "kivi-2", "can learn"],
    );
}

#[test]
fn the_summary_says_what_the_measurements_say() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    for (loss, layers) in [("fisher", 3), ("logits", 1)] {
        let state = state.with_extension(loss);
        let settings = Settings { loss: loss.into(), ..settings() };
        let made = finetune(&loaded, SCHEME, 4, &settings, &state).expect("as ever");
        let bytes = std::fs::read(state.join(SUMMARY)).expect("the summary is written");
        let summary: Summary = serde_json::from_slice(&bytes).expect("the summary is JSON");
        assert_eq!(summary, made.summary);
        assert_eq!((summary.layers.len(), summary.train.windows, summary.held_out.windows), (layers, 4, 2));
        let text = std::fs::read_to_string(state.join(METRICS)).expect("measurements are written");
        assert_eq!(text.lines().count(), made.measurements.len());
        for (layer, own) in summary.layers.iter().enumerate() {
            let measured: Vec<_> = made.measurements.iter().filter(|m| m.layer == layer).collect();
            let least = measured.iter().map(|m| m.best).fold(f64::INFINITY, f64::min);
            assert!((own.initial - measured[0].held_out).abs() < 1e-12 && (own.best - least).abs() < 1e-12);
            assert_eq!(own.best_step, measured.iter().find(|m| m.best == least).expect("it is one of them").step);
            assert_eq!(own.steps, measured[measured.len() - 1].step);
            assert!(own.uncorrected > own.initial && own.seconds > 0.0);
        }
    }
}

/// Trained modules of all layers become an artifact, and are again what they were, bit for bit.
#[test]
fn corrections_survive_their_artifact_bit_for_bit() {
    let (folder, state) = folders();
    let loaded = model(folder.path(), |_, _, _| ());
    let header =
        finetune(&loaded, SCHEME, 4, &Settings { steps: 1, ..settings() }, &state).expect("as ever").artifact.header;
    let scheme: Scheme = SCHEME.parse().expect("the scheme is well formed");
    let key = scheme.key.expect("keys are coded");
    let mut state = 1u32;
    let mut tensor = |shape: [usize; 3]| -> Tensor<3> {
        // Any finite bit pattern may come, subnormal numbers and negative zeros, too.
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Some(f32::from_bits(state)).filter(|v| v.is_finite()).unwrap_or(-0.0)
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    };
    for (tied, clipped) in [(false, true), (true, false), (true, true), (false, false)] {
        let corrections: Vec<Correction> = (0..3)
            .map(|_| {
                let decoder = tensor([HEADS, WIDTH, 2]);
                let encoder = (!tied).then(|| tensor([HEADS, WIDTH, 2]));
                let clip = clipped.then(|| tensor([HEADS, 1, 2]));
                Correction::of(&key, Parts { decoder, encoder, clip })
            })
            .collect();
        let basis = Basis::learned(&key.side.expect("it has a side code"), &corrections);
        let path = folder.path().join("basis.safetensors");
        BasisArtifact { header: header.clone(), basis }.save(&path).expect("the folder can be written");
        let first = std::fs::read(&path).expect("it was written");
        let loaded = BasisArtifact::load(&path).expect("it is whole");
        for (layer, expected) in corrections.iter().enumerate() {
            let found = Correction::new(&key, &loaded.basis, layer, &Device::flex()).parts();
            let expected = expected.parts();
            let bits = |x: Option<Tensor<3>>| {
                x.map(|x| {
                    x.into_data().try_to_vec::<f32>().expect("f32").iter().map(|v| v.to_bits()).collect::<Vec<u32>>()
                })
            };
            assert_eq!(bits(Some(found.decoder)), bits(Some(expected.decoder)));
            assert_eq!(bits(found.encoder), bits(expected.encoder));
            assert_eq!(bits(found.clip), bits(expected.clip));
        }
        // It is the file that the safetensors crate writes, as programs before burn-store did.
        let (_, metadata) = SafeTensors::read_metadata(&first).expect("it is whole");
        let tensors = SafeTensors::deserialize(&first).expect("it is whole").tensors();
        assert_eq!(safetensors::serialize(tensors, metadata.metadata().clone()).expect("it can be written"), first);
        loaded.save(&path).expect("the folder can be written");
        assert_eq!(std::fs::read(&path).expect("it was written"), first, "equal artifacts have equal bytes");
    }
}
