//! `headq compare`: any number of bases in one scheme, on text that neither calibration nor training saw.
//!
//! | file | what |
//! |---|---|
//! | `data` | what a comparison finds, as `comparison.json` has it |
//! | `candidates` | bases from files and families in the place of the scheme's side family |
//! | `paired` | differences and ratios on the same windows and heads, with bootstrap intervals |
//! | `captured` | captured share of the score error, from moments of the measured text |
//! | `angles` | principal angles between the subspaces of every two bases |
//! | `table` | tables and Markdown |
//!
//! The scheme says everything but the bases: base quantizer, values, and bits, scales and sign of the side code. A basis from a file
//! brings its own family, rank and scope; a family is derived from statistics at the scheme's rank and scope. Rank and scope change what
//! a side code costs, so that every row states its bits. A basis that depends on residuals must have been made with the scheme's base
//! quantizer. The scheme without its side code is the base; it and the dense model are always run. Every row is compared with the base
//! and with the first basis, on the same windows (losses) and the same heads (errors of the dense pass).

pub mod angles;
pub mod candidates;
pub mod captured;
pub mod data;
pub mod paired;
pub mod table;

use std::path::Path;

use headq::basis::Basis;
use headq::metrics::excess_removed;
use headq::{HeadDiagnostics, Scheme};
use headq_models::LoadedModel;

use self::candidates::{Asked, Candidate, Candidates};
use self::data::{BootstrapInfo, ComparedBasis, Comparison, PairAngles, Seen};
use self::paired::Measured;
use crate::calibrate::{Keep, accumulate, check_base};
use crate::diagnose::statistics::Bootstrap;
use crate::diagnose::thresholds::Thresholds;
use crate::evaluate::{DensePart, PartStore, PlannedScheme, Request, SchemeResult, Sources, part};
use crate::run::{
    Announce, Calibrations, Folder, Manifest, RunConfig, RunOptions, Training, calibrated, check_context,
    check_overlap, file_sha256, keep_bases, training_windows, windows, write_json,
};
use crate::text::WindowOptions;
use crate::{LabError, Observer, overlap};

/// File of a run's folder that holds its comparison.
pub const FILE: &str = "comparison.json";

/// Compares bases on the texts of `request`, whose own schemes play no part, taking up finished parts from `store`.
///
/// Texts that an artifact was made from are marked in the result, as `request.overlap` has them.
///
/// # Errors
/// As [`Asked::check`] and [`Asked::candidates`]; if a pass gives numbers that are not finite, a part cannot be kept, or on
/// interruption.
pub fn compare(
    request: &Request,
    asked: &Asked,
    sources: &Sources,
    observer: &dyn Observer,
    store: &dyn PartStore,
) -> Result<Comparison, LabError> {
    let config = request.model.config();
    asked.check(request.texts[0].windows[0].len(), config)?;
    let candidates = asked.candidates(sources, config, request.seed)?;
    let seen_by = seen_by(request, asked, &candidates, sources);
    let pass = Pass { request, observer, store };
    let rows = pass.rows(&candidates)?;
    let captured = pass.captured(asked, &candidates)?;
    Ok(assemble(request, asked, &candidates, rows, captured, seen_by))
}

/// Artifacts in use that were made from a measured text.
fn seen_by(request: &Request, asked: &Asked, candidates: &Candidates, sources: &Sources) -> Vec<Seen> {
    let keys = sources.stats.iter().filter(|_| asked.scheme().needs_statistics());
    let keys = keys.map(|(path, _)| path.to_string_lossy().into_owned());
    let mut found: Vec<Seen> = Vec::new();
    for artifact in candidates.all.iter().map(|c| c.artifact.clone()).chain(keys) {
        for (_, text) in request.overlap.seen().filter(|(own, _)| *own == artifact) {
            let seen = Seen { artifact: artifact.clone(), text: text.into() };
            if !found.contains(&seen) {
                found.push(seen);
            }
        }
    }
    found
}

/// The passes over text.
struct Pass<'a> {
    request: &'a Request<'a>,
    observer: &'a dyn Observer,
    store: &'a dyn PartStore,
}

/// An evaluated scheme.
struct Row {
    result: SchemeResult,
    window_nll: Vec<f64>,
    errors: HeadDiagnostics,
}

impl Pass<'_> {
    /// Dense, base, and every basis.
    fn rows(&self, candidates: &Candidates) -> Result<Vec<Row>, LabError> {
        let dense = PlannedScheme { asked: "dense".into(), scheme: Scheme::DENSE, basis: None, keys: None };
        let bases = candidates.all.iter().map(|c| &c.planned);
        let planned: Vec<PlannedScheme> = [&dense, &candidates.base].into_iter().chain(bases).cloned().collect();
        let scored: usize = self.request.windows().iter().map(|w| w.len() - 1).sum();
        let fits = |part: &DensePart| part.nll.len() == scored && part.diagnostics.len() == planned.len();
        let DensePart { nll: dense_nll, diagnostics } = part(self.store, "dense", fits, || {
            self.request.dense_pass(&format!("errors of {} schemes", planned.len()), &planned, self.observer)
        })?;
        let mut rows = Vec::new();
        for (i, (planned, errors)) in planned.iter().zip(diagnostics).enumerate() {
            let nll = match planned.scheme.is_dense() {
                true => dense_nll.clone(),
                false => {
                    let fits = |nll: &Vec<f64>| nll.len() == scored;
                    part(self.store, &format!("scheme-{i}"), fits, || self.request.scheme_pass(planned, self.observer))?
                }
            };
            let result = self.request.result(planned, &nll, &dense_nll, Some(&errors.total()), None);
            rows.push(Row { result, window_nll: self.request.by_window(&nll), errors });
        }
        Ok(rows)
    }

    /// Captured shares of every basis by head, from moments of the measured windows.
    fn captured(&self, asked: &Asked, candidates: &Candidates) -> Result<Vec<Vec<Option<f64>>>, LabError> {
        let model = self.request.model;
        let (layers, kv_heads) = (model.config().num_layers, model.config().num_kv_heads);
        let fits = |shares: &Vec<Vec<Option<f64>>>| {
            shares.len() == candidates.all.len() && shares.iter().all(|s| s.len() == layers * kv_heads)
        };
        part(self.store, "captured", fits, || {
            let keys = candidates.base.keys.as_ref();
            let windows = self.request.windows();
            let moments = |basis: Option<&Basis>| {
                let quantizers = captured::quantizers(*asked.base(), keys, basis, layers, &model.device());
                let what = "moments of the measured text";
                let sinks = asked.base().flush.sinks;
                accumulate(what, model, &windows, &quantizers, Keep::after(sinks), self.request.threads, self.observer)
            };
            let usual = moments(None)?;
            // A basis with a base quantizer of its own has residuals of its own.
            let shares = |candidate: &Candidate| match candidate.basis() {
                basis if basis.changes_base() => Ok(captured::captured(basis, &moments(Some(basis))?)),
                basis => Ok(captured::captured(basis, &usual)),
            };
            candidates.all.iter().map(shares).collect()
        })
    }
}

fn assemble(
    request: &Request,
    asked: &Asked,
    candidates: &Candidates,
    mut rows: Vec<Row>,
    captured: Vec<Vec<Option<f64>>>,
    seen_by: Vec<Seen>,
) -> Comparison {
    set_excess_removed(&mut rows);
    let mut rows = rows.into_iter();
    let dense = rows.next().expect("the dense model is run");
    let base = rows.next().expect("the base is run");
    let rows: Vec<(Row, Vec<Option<f64>>)> = rows.zip(captured).collect();
    let bootstrap = Bootstrap::new(&Thresholds::default(), request.seed);
    let kv_heads = request.model.config().num_kv_heads;
    let base_measured = Measured::new(base.window_nll.clone(), &base.errors, Vec::new());
    let measured: Vec<Measured> =
        rows.iter().map(|(r, c)| Measured::new(r.window_nll.clone(), &r.errors, c.clone())).collect();
    let against = References { base: &base_measured, first: &measured[0], bootstrap: &bootstrap, kv_heads };
    let bases = candidates.all.iter().zip(rows).zip(&measured).map(|((candidate, (row, _)), own)| {
        let seen = seen_by.iter().any(|s| s.artifact == candidate.artifact);
        against.basis(candidate, row, own, seen)
    });
    Comparison {
        program: crate::PROGRAM.into(),
        command: None,
        model: request.name.clone(),
        fingerprint: request.fingerprint.clone(),
        device: request.device.clone(),
        seed: request.seed,
        add_bos: request.add_bos,
        context: request.texts[0].windows[0].len(),
        windows: request.texts[0].windows.len(),
        tokens: request.windows().iter().map(|w| w.len() - 1).sum(),
        texts: request.texts.iter().map(|t| t.text.clone()).collect(),
        overlap: Some(request.overlap.clone()),
        scheme: asked.scheme().to_string(),
        seen: !seen_by.is_empty(),
        bootstrap: BootstrapInfo {
            confidence: bootstrap.confidence,
            replicates: bootstrap.replicates,
            min_units: bootstrap.min_units,
        },
        dense: dense.result,
        base: base.result,
        dense_window_nll: dense.window_nll,
        base_window_nll: base.window_nll,
        base_heads: base_measured.tables(kv_heads),
        bases: bases.collect(),
        angles: all_angles(&candidates.all),
        seen_by,
    }
}

/// E8 of every row against the base, which is the second; the dense model, the first, has none.
fn set_excess_removed(rows: &mut [Row]) {
    let (dense, base) = (rows[0].result.ppl, rows[1].result.ppl);
    for row in &mut rows[1..] {
        // The sum has no negative zero.
        row.result.excess_removed = excess_removed(base, row.result.ppl, dense).map(|share| share + 0.0);
    }
}

/// What every basis is compared with.
struct References<'a> {
    base: &'a Measured,
    first: &'a Measured,
    bootstrap: &'a Bootstrap,
    kv_heads: usize,
}

impl References<'_> {
    fn basis(&self, candidate: &Candidate, row: Row, own: &Measured, seen: bool) -> ComparedBasis {
        let basis = candidate.basis();
        ComparedBasis {
            name: candidate.name.clone(),
            artifact: candidate.artifact.clone(),
            derived: candidate.derived,
            family: basis.family.to_string(),
            rank: basis.rank,
            scope: basis.scope.to_string(),
            tied: basis.is_tied(),
            loss: candidate.header.basis.as_ref().and_then(|b| b.loss.clone()),
            base: candidate.header.base.clone(),
            calibration: candidate.header.texts.clone(),
            seen,
            result: row.result,
            window_nll: row.window_nll,
            captured: own.mean_captured(self.bootstrap),
            to_first: own.against(self.first, self.bootstrap),
            to_base: own.against(self.base, self.bootstrap),
            heads: own.tables(self.kv_heads),
        }
    }
}

/// Principal angles of every two bases.
fn all_angles(candidates: &[Candidate]) -> Vec<PairAngles> {
    let pairs = (0..candidates.len()).flat_map(|i| (i + 1..candidates.len()).map(move |j| (i, j)));
    pairs.map(|(i, j)| angles::pair_angles((i, candidates[i].basis()), (j, candidates[j].basis()))).collect()
}

/// Carries out a configuration with a section `[compare]`, or goes on with it: the statistics that families need, the basis that a
/// section `[finetune]` trains, passes part by part, and at the end [`FILE`] in the run's folder.
///
/// # Errors
/// On any bad input, before the folder is touched; on interruption, with finished parts kept.
pub fn run(
    config: &RunConfig,
    options: &RunOptions,
    observer: &dyn Observer,
    announce: Announce,
) -> Result<Comparison, LabError> {
    let missing = || LabError::Usage("this configuration has no [compare] section".into());
    let section = config.compare.as_ref().ok_or_else(missing)?;
    let asked = section.asked(config.finetune.is_some())?;
    if let (Some(finetune), Some(key)) = (&config.finetune, asked.trained_scheme().key) {
        finetune.training.check_key(&key)?;
    }
    let (loaded, device) = config.load_model(observer)?;
    let tokenizer = loaded.tokenizer()?;
    let own = WindowOptions {
        max_chars: section.max_chars,
        context: section.context,
        windows: section.windows,
        add_bos: config.add_bos,
    };
    let texts = windows(&section.text, &tokenizer, &own)?;
    let calibration = config.calibrate.as_ref().filter(|_| asked.needs_statistics());
    let calibration_texts = match calibration {
        None => Vec::new(),
        Some(c) => {
            let options = WindowOptions { max_chars: c.max_chars, context: c.context, windows: c.windows, ..own };
            windows(&c.text, &tokenizer, &options)?
        }
    };
    let training_texts =
        config.finetune.as_ref().map(|f| training_windows(f, &tokenizer, config.add_bos)).transpose()?;
    asked.check(section.context, loaded.config())?;
    if asked.needs_statistics() {
        check_calibration(&asked, calibration.map(|c| c.context), &loaded)?;
    }
    let given = Sources::load::<String>(&[], &section.basis, &loaded.fingerprint)?;
    asked.check_files(&given, loaded.config())?;
    let others = [calibration.map(|c| c.context), config.finetune.as_ref().map(|f| f.context)];
    let needed = others.into_iter().flatten().fold(section.context, usize::max);
    check_context(&loaded, needed)?;
    check_overlap(config, &texts, &calibration_texts, training_texts.as_ref(), &given)?;
    let pass = crate::pass::Pass::choose(config.pass, None, &loaded.model, &device)?;
    announce(&loaded, needed, pass.cached(std::slice::from_ref(asked.scheme())));
    let manifest = Manifest {
        program: crate::PROGRAM.into(),
        config: config.identity(),
        model: loaded.fingerprint.clone(),
        texts: calibration_texts
            .iter()
            .chain(training_texts.iter().flat_map(|(train, held_out)| train.iter().chain(held_out)))
            .chain(&texts)
            .map(|t| t.text.clone())
            .collect(),
        bases: section.basis.iter().map(|b| file_sha256(Path::new(b))).collect::<Result<_, _>>()?,
    };
    let (folder, _lock) = Folder::open(&options.out, &manifest)?;
    let bases = calibration.map(|_| vec![*asked.base()]).unwrap_or_default();
    let wanted = Calibrations { bases, gradients: asked.scheme().needs_gradients() };
    let mut sources = calibrated(config, wanted, given, &loaded, &calibration_texts, &folder, options, observer)?;
    if let (Some(finetune), Some((train, held_out))) = (&config.finetune, &training_texts) {
        let training = Training { config, finetune, train, held_out, scheme: asked.trained_scheme(), options };
        sources.trained = Some(training.run(&loaded, &sources, &folder, observer)?);
    }
    let derived = asked.candidates(&sources, loaded.config(), config.seed)?.all.into_iter().map(|c| c.planned);
    keep_bases(&derived.collect::<Vec<_>>(), &sources, &folder, config.seed)?;
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        name: config.model.clone(),
        device,
        texts: &texts,
        add_bos: config.add_bos,
        overlap: overlap::find(&texts, config.add_bos, &sources.made_from())?,
        schemes: &[],
        seed: config.seed,
        diagnostics: true,
        threads: options.threads,
        timings: false,
        pass,
    };
    let mut comparison = compare(&request, &asked, &sources, observer, &folder)?;
    comparison.command = Some(options.command.clone());
    write_json(&folder.0.join(FILE), &comparison)?;
    Ok(comparison)
}

/// Fails where statistics are needed and the configuration's `[calibrate]` cannot give them.
fn check_calibration(asked: &Asked, context: Option<usize>, loaded: &LoadedModel) -> Result<(), LabError> {
    match context {
        Some(context) => check_base(asked.base(), context, loaded.config().head_dim),
        None => Err(LabError::Usage(format!(
            "the comparison on {} needs statistics, and the configuration has no [calibrate] section to take them from",
            asked.base()
        ))),
    }
}
