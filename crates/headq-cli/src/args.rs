//! The command line. Each flag is defined once; help texts are drawn from here.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use headq::device::{DeviceName, Precision};
use headq_lab::pass::PassName;
use serde_json::Value;

/// KV-cache quantization measured where the model sees it.
///
/// A KV cache stores keys and values, but a key is only ever read through a score q·k/√d. headq
/// quantizes caches, keeps a low-rank side code of each key's residual in a basis learned from
/// queries, adds it back to the scores, and measures what the model sees: perplexity, attention
/// KL, output error, and the bits that are really stored.
///
/// Typical use: `calibrate` a model on text, `eval` schemes with the statistics, or do all of
/// it with `run` and a configuration.
#[derive(Debug, Parser)]
#[command(name = "headq", version, max_term_width = 110, propagate_version = true)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Args)]
pub struct Global {
    /// Print one JSON object on standard output instead of text.
    #[arg(long, global = true, help_heading = "Everywhere")]
    pub json: bool,
    /// No progress and no notes on standard error; errors only.
    #[arg(long, short, global = true, help_heading = "Everywhere")]
    pub quiet: bool,
    /// Device to compute on: flex (the CPU, the default), ndarray, cuda[:N], wgpu[:N] or remote:URL. `headq devices` lists those of
    /// this build and machine.
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "D")]
    pub device: Option<DeviceName>,
    /// Type of the model's matrices and of the products with them: f32 (the default), f16 or bf16, where the device has it. Everything
    /// else is f32 or wider.
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "TYPE")]
    pub dtype: Option<Precision>,
    /// Seed of everything random. Same seed, same device, same numbers.
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "N")]
    pub seed: Option<u64>,
    /// CPU cores to use. Results do not depend on it.
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "N")]
    pub threads: Option<std::num::NonZeroUsize>,
    /// A config.json for a model that has none beside it (an ONNX file), or in place of its own.
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "FILE")]
    pub model_config: Option<PathBuf>,
    /// A key of the model's config.json to add or replace, e.g. rope_theta=10000. Repeat for several.
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "KEY=VALUE", value_parser = setting)]
    pub model_set: Vec<(String, Value)>,
}

/// A key and its value: JSON, or else a string.
fn setting(text: &str) -> Result<(String, Value), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => {
            let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.into()));
            Ok((key.into(), value))
        }
        _ => Err("expected KEY=VALUE, e.g. rope_theta=10000".into()),
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Inspect(Inspect),
    Calibrate(Calibrate),
    Basis(Basis),
    Eval(Eval),
    Compare(Compare),
    Sweep(Sweep),
    Diagnose(Diagnose),
    Finetune(Finetune),
    Search(Search),
    Generate(Generate),
    Bench(Bench),
    Report(Report),
    Pull(Pull),
    Run(Run),
    Suite(Suite),
    Devices(Devices),
    Serve(Serve),
}

/// Text, cut into windows: window i is tokens [iT, (i+1)T), encoded without special tokens.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Text file, UTF-8; CRLF line ends are read as LF. Repeat for several; each gives its own windows.
    #[arg(long, required = true, value_name = "FILE")]
    pub text: Vec<PathBuf>,
    /// Use only the first N characters (Unicode scalars) of each text.
    #[arg(long, value_name = "N")]
    pub max_chars: Option<usize>,
    /// Tokens in a window.
    #[arg(long, value_name = "T", default_value_t = 512)]
    pub context: usize,
    /// Windows of each text; fewer than asked is an error.
    #[arg(long, value_name = "W", default_value_t = 4)]
    pub windows: usize,
    /// Begin every window with the model's beginning-of-sequence token.
    #[arg(long)]
    pub add_bos: bool,
}

/// Text that is scored, and was calibrated on.
#[derive(Debug, Args)]
pub struct OverlapArgs {
    /// Score also text that the statistics or bases were made from, which is an error otherwise, and report how much of it.
    #[arg(long)]
    pub allow_overlap: bool,
}

/// Show a model's architecture and what its cache takes under schemes.
///
/// Reads the configuration and the headers of the weights, and checks that every tensor is
/// there with its shape; reads no weights. MODEL is a folder in Hugging Face layout
/// (config.json and safetensors or model.onnx), a .gguf or .onnx file, a folder with one, or the
/// name of a model on the Hugging Face hub, which is fetched on first use (`headq pull --help`).
/// Of an artifact, statistics or a basis (`headq inspect basis.safetensors`), it shows what that was
/// made from, and its tensors.
///
/// Example:
///
///   headq inspect checkpoints/headq-embedded --context 4096 \
///     --scheme 'kivi-2(g=32,r=128)/token-2(c=32)'
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Inspect {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE]; or an artifact.
    pub model: PathBuf,
    /// Scheme to account for; repeat for several. A few common ones by default.
    #[arg(long, value_name = "S")]
    pub scheme: Vec<String>,
    /// Tokens that the sized caches hold.
    #[arg(long, value_name = "T", default_value_t = 4096)]
    pub context: usize,
    /// Also hash the weights and print the fingerprint that artifacts carry.
    #[arg(long)]
    pub fingerprint: bool,
}

/// Fetch a model from the Hugging Face hub.
///
/// The model is hf:ORG/NAME, the default branch, or hf:ORG/NAME@REV, a branch, a tag or a
/// commit. Only what is needed comes: config.json, the tokenizer, and model.safetensors or its
/// shards; else the only .gguf or .onnx file. Where there are several, :FILE says which, as in
/// hf:ORG/NAME:model.Q4_K_M.gguf. Other commands take the same names as MODEL and fetch a model
/// that is not there yet; this one also brings a branch up to date, and checks every file, new
/// or there already, by the size and checksum that the hub lists.
///
/// Files go to the cache that other tools share: HF_HUB_CACHE, or hub below HF_HOME
/// (~/.cache/huggingface). HF_ENDPOINT names another hub. Private and gated models need
/// HF_TOKEN, or the token that `hf auth login` keeps (HF_TOKEN_PATH). With HF_HUB_OFFLINE=1 only
/// the cache is used. A download that breaks off is resumed, in the next call too; a server that
/// says nothing for HF_HUB_DOWNLOAD_TIMEOUT seconds (30) is asked again, and one that is busy
/// after the wait that it asks for, up to a minute.
///
/// Example:
///
///   headq pull hf:HuggingFaceTB/SmolLM2-135M
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Pull {
    /// hf:ORG/NAME[@REV][:FILE].
    pub model: String,
}

/// Accumulate the statistics that bases are derived from.
///
/// Streams text through the dense model and accumulates, in f64, first and second moments of
/// post-RoPE queries (by query head), keys, values and the base quantizer's residuals (by KV
/// head). The artifact serves every family and rank; query-pca, query-pca-centered and random
/// use only the queries, and so any base quantizer.
///
/// Example:
///
///   headq calibrate checkpoints/headq-embedded \
///     --text checkpoints/headq-embedded/calibration.txt --context 256 --windows 8 \
///     --base 'kivi-2(g=32)' --out stats.safetensors
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Calibrate {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextArgs,
    /// Base quantizer whose residuals are taken, and whose groups, window and sinks say what is read from codes.
    #[arg(long, value_name = "BASE", default_value = "kivi-2(g=32)")]
    pub base: String,
    /// Also take gradients of the model's log-likelihood, for klt with metric=fisher and for values; about four times the work.
    #[arg(long)]
    pub gradients: bool,
    /// Statistics artifact to write.
    #[arg(long, value_name = "STATS")]
    pub out: PathBuf,
}

/// Find the bits of every layer and head under a budget, and write them as a scheme file.
///
/// Keys, or keys and values, of the whole model share --bits per element, scales and zeros counted. They
/// are first given by what statistics with gradients say that errors cost, and then corrected by the
/// KL of next-token distributions to the dense model on windows of text: what errors of values cost
/// beside those of keys, what errors of each layer cost beside others, and values coded per token.
/// The result is a file that every command takes where it takes a scheme.
///
/// Started again with the same arguments after an interruption, it goes on where it stopped.
///
/// Example:
///
///   headq calibrate checkpoints/headq-embedded \
///     --text checkpoints/headq-embedded/calibration.txt --context 256 --windows 8 \
///     --base 'klt-2(g=32,r=32)' --gradients --out stats.safetensors
///   headq search checkpoints/headq-embedded --stats stats.safetensors \
///     --text checkpoints/headq-embedded/calibration.txt --context 256 --skip 8 --windows 2 \
///     --bits 2.25 --group 32 --residual 32 --out scheme.json
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Search {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextArgs,
    /// Windows of each text that are passed over, which the statistics may be of.
    #[arg(long, value_name = "W", default_value_t = 0)]
    pub skip: usize,
    /// Statistics artifact, from `headq calibrate --gradients`.
    #[arg(long, value_name = "STATS")]
    pub stats: PathBuf,
    /// Mean code bits per coded element, scales and zeros counted.
    #[arg(long, value_name = "B")]
    pub bits: f64,
    /// Code keys alone.
    #[arg(long)]
    pub keys_only: bool,
    /// G: tokens coded together.
    #[arg(long, value_name = "G", default_value = "128")]
    pub group: std::num::NonZeroUsize,
    /// R: newest tokens that stay dense.
    #[arg(long, value_name = "R", default_value_t = 128)]
    pub residual: usize,
    /// First tokens that stay dense.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub sinks: usize,
    /// Scheme file to write; its name ends in .json.
    #[arg(long, value_name = "SCHEME.json")]
    pub out: PathBuf,
}

/// Derive a basis from statistics.
///
/// Families: query-pca, query-pca-centered, residual-pca, random, score-optimal.
///
/// Example:
///
///   headq basis stats.safetensors --family query-pca --rank 4 --out basis.safetensors
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Basis {
    /// Statistics artifact, from `headq calibrate`.
    pub stats: PathBuf,
    /// Basis family.
    #[arg(long)]
    pub family: String,
    /// Rank r, up to the head width.
    #[arg(long)]
    pub rank: usize,
    /// One basis per `kv-head` or per `query-head`.
    #[arg(long, default_value = "kv-head")]
    pub scope: String,
    /// Basis artifact to write.
    #[arg(long, value_name = "BASIS")]
    pub out: PathBuf,
}

/// Evaluate schemes: perplexity, attention and output error, and bits.
///
/// Runs the dense model, then the model with each scheme's cache, teacher-forced with the
/// cache's own streaming semantics and, on the CPU, its own arithmetic: what it measures is to the
/// bit what decoding token by token does (--decode, --pass). Prints one row per scheme. Bases come from --basis
/// files or are derived from --stats. `dense` is always run. "excess removed" compares with the
/// first scheme that is not dense. In the JSON, `tokens` is the number of tokens scored:
/// windows · (T − 1).
///
/// A scheme is KEYS or KEYS/VALUES, e.g.
/// kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32):
///   keys    dense, or B bits from 1 to 8 as
///             kivi-B    per channel over g tokens, min/max (KIVI)
///             token-B   per token over c channels, min/max
///             grid-B    static grid, steps from --stats for c channels; stores no scales
///             rotated-B Hadamard rotation, Lloyd-Max levels, one scale per token and c channels
///             klt-B     transform coding in the measure of scores, from --stats; B from 0.25 to 6 is
///                       a mean, e.g. 1.5, and may be 0 for a coefficient; sinks=4, always centered
///             g=32     tokens coded together        r=32      newest tokens kept dense
///             sinks=0  first tokens kept dense      range=1   share of each range kept
///             c=       channels per scale (not kivi, klt; default the head width)
///             rounding=score-aware      (kivi, grid) errors of a channel are passed on to the next ones
///                      as queries (from --stats) weigh them, lambda=0.01 of their mean added to each
///             ranges=static             (klt) grids from --stats; stores no scales
///             ranges=lloyd              (klt) levels fitted to --stats for up to 3 bits, which store no
///                      scales, and min/max for more
///             metric=fisher             (klt) measures in nats, by gradients: calibrate --gradients
///             pool=model                (klt) B is the mean over all layers and heads, scales counted,
///                      up to 8; bits go where errors cost most
///             center   subtract each head's mean key (from --stats), which attention cannot see
///             meta=f16 width of scales and zeros, or f32
///   side    query-pca query-pca-centered residual-pca random score-optimal learned
///             rank=    of the basis (required)      bits=     of a side code, 2 to 8 (required)
///             scales=group|token                    what shares a scale
///             sign=1|-1                             -1 subtracts, a control
///             scope=kv-head|query-head              what has a basis of its own
///   values  dense | token-B, or B mean bits from 2 to 7 with one bit more for half of each group:
///             a2-B the most attended, mse-B the largest errors, random-B, recency-B the newest
///             channel-B per channel, as kivi codes keys, a control
///             klt-B    transform coding as of keys, with metric=fisher, or metric=output for the
///                      squared error of what is added to the residual stream (from --stats)
///             with c g r sinks range meta (klt: ranges metric pool); g r sinks default to the keys'
///
/// A scheme may also be the name of a scheme file, from `headq search`.
///
/// Example:
///
///   headq eval checkpoints/headq-embedded \
///     --text checkpoints/headq-embedded/test.txt --context 256 --windows 8 \
///     --scheme 'kivi-2(g=32,r=32)' --scheme 'kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)' \
///     --stats stats.safetensors
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Eval {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextArgs,
    /// Scheme to evaluate; repeat for several.
    #[arg(long, required = true, value_name = "S")]
    pub scheme: Vec<String>,
    /// Statistics artifact to derive bases from; repeat for several base quantizers.
    #[arg(long, value_name = "STATS")]
    pub stats: Vec<PathBuf>,
    /// Basis artifact; repeat for several. Taken before --stats.
    #[arg(long, value_name = "BASIS")]
    pub basis: Vec<PathBuf>,
    /// Leave out the diagnostics on the dense pass (KL, Fisher, key MSE, output error), which take most of the extra time.
    #[arg(long)]
    pub no_diagnostics: bool,
    /// Add the seconds that each pass took to the JSON.
    #[arg(long)]
    pub timings: bool,
    /// How schemes are run over a window: through the packed cache that `headq generate` decodes with, to the bit as it does (packed, the
    /// default on flex), or through tensors, on any device.
    #[arg(long, value_name = "PASS")]
    pub pass: Option<PassName>,
    /// Decode each window token by token through the packed cache, as `headq generate` does, instead of in one teacher-forced pass; the
    /// same perplexity takes much longer, and the diagnostics are left out.
    #[arg(long, conflicts_with = "pass")]
    pub decode: bool,
    /// Type of the keys and values that a packed cache holds dense: f32 (the default) or f16.
    #[arg(long, value_name = "TYPE")]
    pub cache_dtype: Option<headq::DenseType>,
    /// Also write the report as JSON to this file.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub overlap: OverlapArgs,
}

/// Compare bases in one scheme: perplexity, attention error, captured share, angles, bits.
///
/// Puts each basis in the place of the scheme's side family, on text that neither calibration nor
/// training saw. The scheme names the base quantizer, the values, and bits, scales and sign of
/// the side code; a basis file brings its own family, rank and scope, and a --family is derived
/// from --stats at the scheme's rank and scope. A basis made from residuals (score-optimal,
/// residual-pca, learned) must be of the scheme's base quantizer. The dense model and the scheme
/// without its side code ("no correction") are always run.
///
/// Each basis is compared with the first (files in order, then families) and, in the JSON, with
/// no correction: difference of the loss with a bootstrap interval over windows; ratios of
/// attention KL, Fisher error, output error and key MSE with bootstrap intervals over layers and
/// KV heads. "captured" is the share of the squared score error on this text that the basis
/// removes before side quantization. Principal angles say how far apart the subspaces of every
/// two bases are, per layer and head; the JSON has all of them.
///
/// Text that an artifact was made from is an error, wherever in its file it stands; with
/// --allow-overlap the result is marked "seen" instead.
///
/// Example:
///
///   headq compare checkpoints/headq-embedded \
///     --text checkpoints/headq-embedded/test.txt --context 256 --windows 8 \
///     --scheme 'kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)' \
///     --basis basis.safetensors --stats stats.safetensors --family score-optimal --family random
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Compare {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextArgs,
    /// Scheme with a side code, whose family is each basis in turn.
    #[arg(long, value_name = "S")]
    pub scheme: String,
    /// Basis artifact, from `headq basis` or training; repeat for several.
    #[arg(long, value_name = "BASIS")]
    pub basis: Vec<PathBuf>,
    /// Family to derive from --stats; repeat for several. `headq basis --help` lists them.
    #[arg(long)]
    pub family: Vec<String>,
    /// Statistics artifact for families, and for means and scales of a static base quantizer.
    #[arg(long, value_name = "STATS")]
    pub stats: Option<PathBuf>,
    /// Also write the comparison as JSON to this file.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub overlap: OverlapArgs,
}

/// Sweep over every family of schemes: perplexity and divergence against all-in bits, and the fronts.
///
/// Takes default schemes of every family (kivi, token, grid, rotated and klt of 1 to 4 bits, score-aware
/// rounding, corrections of kivi and token), all with the same sinks and window, and those of
/// --scheme; without values (--kv k), with values of as many bits as the keys and at least 2
/// (--kv kv), or both. Each is measured on the same windows as the dense model: perplexity, its
/// excess over the dense model's with a standard error paired by window, and KL, the divergence
/// of next-token distributions from the dense model's (not of attention, as in `headq eval`).
/// A scheme is on a front where no other that codes the same (keys only, or keys and values) has
/// both no more cache bits and no more of perplexity or KL. Cache bits are all-in: everything that
/// the cache holds in windows of --context tokens, what stays dense included.
///
/// Schemes that are calibrated come from --stats and --basis, and where those do not serve from
/// --calibration-text, which is calibrated on once for each base quantizer. Default schemes that
/// neither serves, or that code nothing in such windows, are left out, and the report says so.
///
/// RUN holds sweep.json, front.svg, report.html and report.md. Interrupt it at will: each scheme is
/// kept as it ends, and a sweep started again goes on, also with more schemes or other budgets.
///
/// Example:
///
///   headq sweep checkpoints/headq-embedded \
///     --text checkpoints/headq-embedded/test.txt --context 256 --windows 8 \
///     --calibration-text checkpoints/headq-embedded/calibration.txt --residual 32 \
///     --bits 2,2.25,3 --out runs/sweep
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Sweep {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextArgs,
    /// Statistics artifact; repeat for several base quantizers.
    #[arg(long, value_name = "STATS")]
    pub stats: Vec<PathBuf>,
    /// Basis artifact; repeat for several. Taken before --stats.
    #[arg(long, value_name = "BASIS")]
    pub basis: Vec<PathBuf>,
    /// Text to calibrate on where no statistics serve a scheme; repeat for several.
    #[arg(long, value_name = "FILE")]
    pub calibration_text: Vec<PathBuf>,
    /// Windows of each text to calibrate on.
    #[arg(long, value_name = "W", default_value_t = 8)]
    pub calibration_windows: usize,
    /// Which default schemes: k, keys only; kv, keys and values; or both.
    #[arg(long, value_name = "KV", default_value = "both")]
    pub kv: headq_lab::sweep::Kv,
    /// First tokens that default schemes keep dense.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub sinks: usize,
    /// Newest tokens that default schemes keep dense.
    #[arg(long, value_name = "R", default_value_t = 128)]
    pub residual: usize,
    /// A further scheme; repeat for several. `headq eval --help` explains schemes.
    #[arg(long, value_name = "S")]
    pub scheme: Vec<String>,
    /// Leave out the default schemes.
    #[arg(long, requires = "scheme")]
    pub only_schemes: bool,
    /// Budgets, separated by commas: for each the best scheme of every family at or under it is named, and marked where it is within
    /// 0.3 % of the best perplexity or one paired standard error.
    #[arg(long, value_name = "B,…", value_delimiter = ',')]
    pub bits: Vec<f64>,
    /// What --bits bounds: code, bits per coded element (of keys, or the mean of keys and values), or cache, all-in at the context.
    #[arg(long, value_name = "WHAT", default_value = "code")]
    pub bits_of: headq_lab::sweep::data::BitsOf,
    /// Folder of the sweep.
    #[arg(long, value_name = "RUN")]
    pub out: PathBuf,
    #[command(flatten)]
    pub overlap: OverlapArgs,
}

/// Test the evidence chain: does the method hold on this model?
///
/// Seven links, each a claim that can fail, each with its numbers, its verdict (supported, not
/// supported, inconclusive) and what would change it:
///   metric           the Fisher error ranks quantizers by attention KL, better than storage MSE
///   counterexamples  lower storage MSE with higher KL and output error, at the same budget
///   null-space       a shift that attention cannot see raises what a static quantizer loses
///   bases            bases from queries correct more than others of the same size
///   direction        the correction with its sign flipped is much worse than none
///   route-flips      the most attended token changes where attention is undecided
///   perplexity       dense, base, every correction, controls, published baselines, full caches
///
/// Writes diagnosis.json, report.html and report.md to --out, and beside them run.json (what was
/// asked), statistics and parts/ (finished passes). Interrupted, it goes on link by link when
/// started again. Links and thresholds may differ from call to call: links add up, and what is
/// measured is kept. Bases, means and scales come from --calibration-text, or else from windows of the
/// text that follow the measured ones.
///
/// Thresholds (--threshold NAME=VALUE): confidence=0.95 replicates=1000 min-units=4
/// min-points=30 min-rho=0.8 min-counterexamples=0.01 budget-tolerance=0.001 (bits)
/// min-null-rise=1.5 max-null-change=0.02 min-damage=0.005 (nats) max-dense-loss=0.95 (of ln
/// vocabulary) min-flip-ratio=1 min-flip-rise=1.5 min-excess-removed=0.25. They are explained in
/// crates/headq-lab/src/diagnose/thresholds.rs and in every report.
///
/// Example:
///
///   headq diagnose checkpoints/headq-embedded \
///     --text checkpoints/headq-embedded/test.txt --context 256 --windows 16 \
///     --calibration-text checkpoints/headq-embedded/calibration.txt --out runs/embedded
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Diagnose {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    /// Text to measure on, UTF-8; repeat for several; each gives its own windows.
    #[arg(long, required = true, value_name = "FILE")]
    pub text: Vec<PathBuf>,
    /// Use only the first N characters (Unicode scalars) of each text.
    #[arg(long, value_name = "N")]
    pub max_chars: Option<usize>,
    /// Tokens in a window.
    #[arg(long, value_name = "T", default_value_t = 512)]
    pub context: usize,
    /// Windows of each text that are measured; fewer than asked is an error.
    #[arg(long, value_name = "W", default_value_t = 8)]
    pub windows: usize,
    /// Begin every window with the model's beginning-of-sequence token.
    #[arg(long)]
    pub add_bos: bool,
    /// Text to calibrate on instead of later windows of --text; repeat for several.
    #[arg(long, value_name = "FILE")]
    pub calibration_text: Vec<PathBuf>,
    /// Windows of each text to calibrate on.
    #[arg(long, value_name = "W", default_value_t = 4)]
    pub calibration_windows: usize,
    /// Links to take, separated by commas; all by default.
    #[arg(long, value_name = "LINKS", value_delimiter = ',')]
    pub links: Option<Vec<String>>,
    /// Base quantizer that is corrected.
    #[arg(long, value_name = "BASE", default_value = "kivi-2(g=32,r=32)")]
    pub base: String,
    /// Rank of the correction.
    #[arg(long, default_value_t = 4)]
    pub rank: usize,
    /// Bits of its side codes, 2 to 8.
    #[arg(long, default_value_t = 4)]
    pub bits: u32,
    /// Set a threshold of the verdicts; repeat for several.
    #[arg(long, value_name = "NAME=VALUE")]
    pub threshold: Vec<String>,
    /// Folder of the run.
    #[arg(long, value_name = "RUN")]
    pub out: PathBuf,
    #[command(flatten)]
    pub overlap: OverlapArgs,
}

/// Train the basis of a scheme's side code with gradients, the model frozen.
///
/// Begins with a closed form and lowers a loss by AdamW, with straight-through gradients through
/// the side quantizer, and with --train-base-clip and --train-transform through the base quantizer:
///   kl      attention KL, nats: what `headq eval` reports as KL
///   fisher  its second-order form, nats
///   score   variance of the score error over the coded keys, the closed forms' objective
///   logits  KL of next-token distributions, nats, end to end: all layers together, much slower
/// The first three are local to a layer: queries and keys are captured from the dense model, and each
/// layer is trained on its own. Windows after the training windows are held out: they
/// decide when to stop, and which parameters are kept of each head.
///
/// The result is a basis of the family learned, for schemes +learned(rank=…,bits=…) on the same
/// base quantizer and with the same side bits. Interrupt it at will, or kill it: started again
/// with the same arguments it goes on from its state folder (--state), to the same result.
/// metrics.jsonl there has every measurement.
///
/// Example:
///
///   headq calibrate checkpoints/headq-embedded \
///     --text checkpoints/headq-embedded/calibration.txt --context 256 --windows 16 \
///     --base 'kivi-2(g=32,r=32)' --out stats.safetensors
///   headq finetune checkpoints/headq-embedded \
///     --text checkpoints/headq-embedded/calibration.txt --context 256 --windows 16 \
///     --stats stats.safetensors --scheme 'kivi-2(g=32,r=32)+learned(rank=4,bits=3)' \
///     --loss kl --train-clip --out learned.safetensors
///
/// On a base klt, whose statistics are needed wherever the basis is used, its transforms, too:
///
///   headq finetune … --scheme 'klt-1.5(g=32,r=32)+learned(rank=4,bits=3)' \
///     --train-clip --train-base-clip --train-transform --out learned.safetensors
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Finetune {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextArgs,
    /// Windows of each text that are held out, after those that are trained on.
    #[arg(long, value_name = "W", default_value_t = 4)]
    pub held_out: usize,
    /// Statistics artifact to derive the initial basis from.
    #[arg(long, value_name = "STATS")]
    pub stats: PathBuf,
    /// Scheme whose side code is trained.
    #[arg(long, value_name = "S")]
    pub scheme: String,
    /// Loss: kl, fisher, score or logits.
    #[arg(long, default_value = "kl")]
    pub loss: String,
    /// Family to begin with; `best` takes the best closed form of each head.
    #[arg(long, value_name = "FAMILY", default_value = "best")]
    pub init: String,
    /// Optimizer steps for each layer [default: 300].
    #[arg(long, value_name = "N", conflicts_with = "epochs")]
    pub steps: Option<usize>,
    /// The same as passes over the training windows, rounded up to whole steps.
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Peak learning rate [default: 0.01]; columns of U and W have a norm near 1.
    #[arg(long)]
    pub lr: Option<f64>,
    /// Steps of linear warm-up [default: 20]; a cosine to zero follows.
    #[arg(long, value_name = "N")]
    pub warmup: Option<usize>,
    /// Windows in a step [default: 2].
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
    /// One orthonormal matrix for encoder and decoder.
    #[arg(long, conflicts_with = "untied")]
    pub tied: bool,
    /// Encoder and decoder of their own, the default.
    #[arg(long)]
    pub untied: bool,
    /// Learn clip factors of the side quantizer, too.
    #[arg(long)]
    pub train_clip: bool,
    /// Learn clip factors of the base quantizer, too: of each KV head (kivi and token) or coefficient (klt).
    #[arg(long)]
    pub train_base_clip: bool,
    /// Learn the transforms of a base quantizer klt, too: what is coded and how it is read back, per KV head.
    #[arg(long)]
    pub train_transform: bool,
    /// Steps between two measurements on held-out windows [default: 20].
    #[arg(long, value_name = "N")]
    pub measure_every: Option<usize>,
    /// Measurements without a better head after which a layer stops [default: 6].
    #[arg(long, value_name = "N")]
    pub patience: Option<usize>,
    /// Steps between two checkpoints [default: 100].
    #[arg(long, value_name = "N")]
    pub save_every: Option<usize>,
    /// State folder instead of BASIS.state.
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Basis artifact to write.
    #[arg(long, value_name = "BASIS")]
    pub out: PathBuf,
}

/// Generate text with a quantized cache.
///
/// The prompt goes through the model in one pass, and the tokens after it one by one, with a
/// cache of the given scheme (`headq eval --help` explains schemes). Text is printed as it comes,
/// whole characters only; at the end, on standard error, how fast it was and what the cache takes
/// beside one in f16. With --json one object with text, token ids and figures is printed at
/// the end. Ctrl-C ends it early and keeps what is there.
///
/// Tokens are the most probable ones (--greedy, the default), or drawn at random as soon as one
/// of --temperature, --top-k and --top-p is given; --seed makes the draws reproducible.
///
/// Example:
///
///   headq generate checkpoints/headq-embedded --stats stats.safetensors \
///     --scheme 'kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)/token-2(c=32)' \
///     --max-tokens 60 'The history of'
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Generate {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    /// Text to go on from; `-` reads it from standard input. An empty one begins with the beginning-of-sequence token.
    #[arg(required_unless_present = "prompt_file", conflicts_with = "prompt_file")]
    pub prompt: Option<String>,
    /// File with the text to go on from, UTF-8; one line end at its end is left out.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Scheme of the cache.
    #[arg(long, value_name = "S", default_value = "dense")]
    pub scheme: String,
    /// Statistics artifact to derive the basis from; repeat for several base quantizers.
    #[arg(long, value_name = "STATS")]
    pub stats: Vec<PathBuf>,
    /// Basis artifact; repeat for several. Taken before --stats.
    #[arg(long, value_name = "BASIS")]
    pub basis: Vec<PathBuf>,
    /// New tokens at most [default: 128, or what the model's context has room for].
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Take the most probable token; of equals, the one with the lowest id.
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p"])]
    pub greedy: bool,
    /// Draw tokens with logits divided by T.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,
    /// Draw from the K most probable tokens.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Draw from the fewest most probable tokens that have the share P together.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f64>,
    /// End before this string; repeat for several.
    #[arg(long, value_name = "STRING")]
    pub stop: Vec<String>,
    /// Go on after an end-of-sequence token.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Go on beyond the context that a model with rotary positions was made for.
    #[arg(long)]
    pub beyond_context: bool,
    /// Begin with the model's beginning-of-sequence token.
    #[arg(long)]
    pub add_bos: bool,
    /// Type of the keys and values that the cache holds dense: f16 or f32.
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub cache_dtype: headq::DenseType,
}

/// Measure how fast decoding with a packed cache is, beside dense caches.
///
/// For each context it fills caches with random keys and values, of dense f32, dense f16 and the
/// given schemes, and times the attention of all layers for one new token, and whole decode steps
/// (attention and weights), all of them in turn in every round. Printed are medians, quartiles,
/// and what the cache's bytes over the median come to, beside the memory bandwidth that was
/// measured in the same run. Contexts beyond the model's own are fine. CPU only (flex).
///
/// Example:
///
///   headq bench checkpoints/headq-embedded --contexts 512,2048,8192 \
///     --scheme 'kivi-2(g=32,r=32)/token-2(c=32)' --plot bench.svg
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Bench {
    /// Model folder, .gguf or .onnx file, or hf:ORG/NAME[@REV][:FILE].
    pub model: PathBuf,
    /// Cached tokens; several separated by commas.
    #[arg(long, value_name = "T,…", value_delimiter = ',', default_value = "512,2048,8192,32768")]
    pub contexts: Vec<std::num::NonZeroUsize>,
    /// Scheme to measure; repeat for several. Dense in f32 and in f16 are always measured.
    #[arg(long, value_name = "S")]
    pub scheme: Vec<String>,
    /// Statistics artifact to derive bases from; repeat for several base quantizers.
    #[arg(long, value_name = "STATS")]
    pub stats: Vec<PathBuf>,
    /// Basis artifact; repeat for several. Taken before --stats.
    #[arg(long, value_name = "BASIS")]
    pub basis: Vec<PathBuf>,
    /// Numbers of threads to measure on, separated by commas [default: 1 and --threads].
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub thread_counts: Vec<std::num::NonZeroUsize>,
    /// Timed steps of each cache.
    #[arg(long, value_name = "N", default_value = "15")]
    pub rounds: std::num::NonZeroUsize,
    /// Measure attention only.
    #[arg(long)]
    pub attention_only: bool,
    /// Also write the report as JSON to this file.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Also draw milliseconds over contexts to this file, FILE.svg.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// Write the report of one or several runs: one HTML file, and the same as Markdown beside it.
///
/// The HTML needs no network and no script, is light or dark as the reader's system is, and
/// draws its plots as inline SVG. Runs are folders that `headq diagnose` or `headq run`
/// wrote, one of those that `headq suite` wrote, or the state folder of `headq finetune`; several
/// are set side by side under a joint table.
///
/// Example:
///
///   headq report runs/embedded --out embedded.html
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Report {
    /// Folders of runs.
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// File to write, FILE.html; FILE.md is written beside it.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

/// Do all of it from a configuration: calibrate, derive bases, evaluate, report.
///
/// With a section [eval] it writes artifacts, report.json, report.html and report.md to
/// runs/NAME (or --out); with [diagnose], what `headq diagnose` writes; with [compare], what
/// `headq compare` finds, as comparison.json and the same reports. A section [finetune] trains
/// the bases of the family learned that [eval] names, or one for the scheme of [compare], which
/// then stands beside the others. Interrupt it at will: started
/// again, it goes on from what is there. Paths in the configuration are relative to it;
/// ${NAME} stands for an environment variable, and a path that begins with one is relative to
/// the current folder.
///
/// Example:
///
///   headq run configs/quickstart.toml
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Run {
    /// Configuration, TOML.
    pub config: PathBuf,
    /// Folder of the run instead of runs/NAME.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub overlap: OverlapArgs,
}

/// Run several configurations, one after the other, and write their joint report.
///
/// Each goes to its own folder OUT/NAME; OUT/report.html and OUT/report.md set them side by
/// side. Interrupted, a suite goes on where it stopped. A configuration that fails (its model
/// is not there, say) is named, the others are run, and the exit status is 1.
///
/// Example:
///
///   HEADQ_MODELS=~/models HEADQ_TEXT=~/text headq suite configs/paper/*.toml --out runs/paper
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Suite {
    /// Configurations, TOML.
    #[arg(required = true, value_name = "CONFIG")]
    pub configs: Vec<PathBuf>,
    /// Folder of the suite.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    #[command(flatten)]
    pub overlap: OverlapArgs,
}

/// List the backends that this program was built with, and the devices that are present.
///
/// Each device is opened and does a small product; a driver that is installed but broken is told as such.
#[derive(Debug, Args)]
pub struct Devices {
    /// Open one device, or all of a backend, in this process, and tell what they are.
    #[arg(long, value_name = "D", hide = true)]
    pub probe: Option<String>,
}

/// Lend this machine's device to `headq … --device remote:ws://HOST:PORT` on another, until Ctrl-C.
///
/// Uses Burn's own remote backend; both sides must be of the same release. The connection is not encrypted: reach it through a tunnel
/// (`ssh -L 3000:localhost:3000 HOST`) where the network is not trusted. A token, given to both sides in HEADQ_REMOTE_TOKEN, keeps
/// strangers out.
#[derive(Debug, Args)]
pub struct Serve {
    /// Address to listen on, HOST:PORT. 0.0.0.0 is every interface; port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:3000")]
    pub listen: String,
}
