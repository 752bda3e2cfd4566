//! Artifacts: statistics and bases as safetensors files with a JSON header.
//!
//! The header is the value of the key `headq` in the file's `__metadata__`, a JSON object ([`Header`]). Tensors, all row-major:
//!
//! | kind | tensor | shape | type |
//! |---|---|---|---|
//! | `statistics` | `q.count`, `q.sum`, `q.outer` | `[layers, heads]`, `[layers, heads, head_dim]`, `[layers, heads, head_dim, head_dim]` | i64, f64, f64 |
//! | | `k.…`, `e.…`, `v.…` | the same with `kv_heads` | |
//! | | `k_gradient.…`, `v_gradient.…`, where gradients were taken | as `k.…` | |
//! | | `output`, W_o,h W_o,hᵀ averaged over the query heads h of a KV head; missing where an older version calibrated | `[layers, kv_heads, head_dim, head_dim]` | f64 |
//! | | `k.sample`, `v.sample`, keys and values of some tokens, in runs of 128 | `[layers, kv_heads, tokens, head_dim]` | f16 |
//! | `basis` | `decoder` (U) | `[layers, side_heads, head_dim, rank]` | f32 |
//! | | `encoder` (W), where W differs from U: `score-optimal`, `learned` unless tied | as `decoder` | f32 |
//! | | `base_clip`, of `learned` with learned clip factors of the base quantizer | `[layers, kv_heads]`, or `[layers, kv_heads, head_dim]` of `klt` | f32 |
//! | | `base_analysis` (E), `base_synthesis` (F), of `learned` with learned transforms of a base quantizer `klt` | `[layers, kv_heads, head_dim, head_dim]` | f32 |
//! | | `clip` (ρ), of `learned` with learned clip factors | `[layers, side_heads, rank]`, or `[layers, side_heads, 1]` with `scales=token` | f32 |
//!
//! E and F change the coefficients y that `klt` codes, and ŷ that it reads, in units of their calibrated standard deviations D:
//! D (I + E) D⁻¹ y is coded, and D (I + F) D⁻¹ ŷ read ([`headq::transform`]). They and the factors of `klt` mean nothing without the
//! statistics that they were trained with, whose hash is `calibration` in the header; others are refused.
//!
//! q and k are post-RoPE; e = k − B_b(k) over whole groups of coded tokens; `count` is n, `sum` is Σx and `outer` is Σxxᵀ.
//!
//! ```python
//! import json
//! from safetensors import safe_open
//! import numpy as np
//!
//! with safe_open("stats.safetensors", "np") as f:
//!     header = json.loads(f.metadata()["headq"])
//!     outer, count = f.get_tensor("q.outer"), f.get_tensor("q.count")
//! second_moment = outer / count[..., None, None]          # E[q qᵀ], [layers, heads, head_dim, head_dim]
//! values, vectors = np.linalg.eigh(second_moment)         # query-pca per query head: the last columns of vectors
//! print(header["model"]["architecture"], header["base"], values[0, 0, ::-1][:4])
//! ```
//!
//! A basis is a Burn module to `burn-store`: its [`SafetensorsStore`] writes and reads the tensors by the names of the module's
//! parameters. Statistics, which are numbers of no module and wider than f32, are written with the `safetensors` crate. Either way
//! the file is made in memory, because the header names what must be known before a module of the right shape can be made, and
//! because equal artifacts have equal bytes, which takes metadata of one entry.
//!
//! Writes go to a temporary file in the same folder, which is synced and then renamed: a file of this name is whole or absent.

use std::io::Write;
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_store::{ModuleSnapshot, SafetensorsStore};
use half::f16;
use headq::basis::{Basis, TrainedSide, TrainedTransform};
use headq::quant::clip_width;
use headq::scheme::{BaseScheme, Family, Metric, Quantizer, Scope, SideScales};
use headq::stats::{GradientMoments, LayerStats, Moments, Sample};
use headq_models::Fingerprint;
use nalgebra::{DMatrix, DVector};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::overlap::{MadeFrom, Passages};
use crate::text::TextInfo;

/// Key of the header in a file's metadata.
const HEADER: &str = "headq";

/// Version of the layout described in this module.
pub const SCHEMA: u32 = 1;

/// What an artifact is and where it came from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`SCHEMA`].
    pub schema: u32,
    /// `statistics` or `basis`.
    pub kind: String,
    /// `headq` and its version.
    pub program: String,
    /// The model it was made from, and the only one it may be used with.
    pub model: Fingerprint,
    /// Texts it was made from: those that it was calibrated on, and for `learned` those that were trained on and held out, first.
    pub texts: Vec<TextInfo>,
    /// Passages of those texts, by which scored text is known that they hold ([`crate::overlap`]); none where an older version made it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passages: Vec<Passages>,
    /// Tokens seen.
    pub tokens: usize,
    /// Tokens in a window.
    pub context: usize,
    /// Whether every window began with the beginning-of-sequence token.
    pub add_bos: bool,
    /// `post-rope rotate-half`, or `none` for models with learned positions.
    pub rope: String,
    /// Base quantizer whose residuals were taken, in its written form.
    pub base: String,
    /// `basis` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub basis: Option<BasisHeader>,
}

/// What a basis is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BasisHeader {
    /// Family.
    pub family: Family,
    /// Rank r.
    pub rank: usize,
    /// `kv-head` or `query-head`.
    pub scope: String,
    /// Seed of `random` and `learned`.
    pub seed: u64,
    /// Loss it was trained with; none for closed forms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<String>,
    /// Bits of the side codes that it was trained with, and belongs to; none for closed forms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<u32>,
    /// What shares a scale among those side codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scales: Option<String>,
    /// Where parts of the transforms of `klt` were trained, the statistics that these are of ([`StatsArtifact::calibration_of`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<String>,
}

impl BasisHeader {
    /// Of a closed form.
    pub fn derived(family: Family, rank: usize, scope: Scope, seed: u64) -> Self {
        Self { family, rank, scope: scope.to_string(), seed, loss: None, bits: None, scales: None, calibration: None }
    }
}

/// Calibration statistics with their header.
#[derive(Debug, Clone, PartialEq)]
pub struct StatsArtifact {
    /// Where they came from.
    pub header: Header,
    /// By layer.
    pub layers: Vec<LayerStats>,
}

/// A basis with its header.
#[derive(Debug, Clone, PartialEq)]
pub struct BasisArtifact {
    /// Where it came from.
    pub header: Header,
    /// Encoders and decoders.
    pub basis: Basis,
}

/// What an artifact file says of itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outline {
    /// Its header.
    pub header: Header,
    /// Its tensors by name.
    pub tensors: Vec<TensorOutline>,
}

/// A tensor of an artifact.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorOutline {
    /// Name.
    pub name: String,
    /// Element type, as safetensors call it.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<usize>,
}

impl Outline {
    /// Of an artifact of any kind; `None` where a file is none. What tensors hold is not looked at, only that the artifact is read.
    ///
    /// # Errors
    /// As [`StatsArtifact::load`] and [`BasisArtifact::load`].
    pub fn of(path: &Path) -> Result<Option<Self>, LabError> {
        let Some(kind) = std::fs::read(path).ok().as_deref().and_then(kind_of) else { return Ok(None) };
        let header = match kind.as_str() {
            "statistics" => StatsArtifact::load(path)?.header,
            _ => BasisArtifact::load(path)?.header,
        };
        let bytes = read(path, BASIS)?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| artifact_error(path, e.to_string()))?;
        let outline = |(name, t): (String, TensorView)| {
            let (dtype, shape) = (format!("{:?}", t.dtype()), t.shape().to_vec());
            TensorOutline { name, dtype, shape }
        };
        let mut tensors: Vec<TensorOutline> = tensors.tensors().into_iter().map(outline).collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Some(Self { header, tensors }))
    }
}

/// What the header of an artifact's bytes says that it is; `None` where they are no artifact.
fn kind_of(bytes: &[u8]) -> Option<String> {
    let (_, metadata) = SafeTensors::read_metadata(bytes).ok()?;
    let header: serde_json::Value = serde_json::from_str(metadata.metadata().as_ref()?.get(HEADER)?).ok()?;
    header["kind"].as_str().map(str::to_owned)
}

/// How names of temporary files begin and end.
const TEMPORARY: (&str, &str) = (".headq-", ".tmp");

/// Whether a file is one that [`write_atomic`] left behind because the program was killed.
pub fn is_temporary(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|n| n.to_string_lossy().starts_with(TEMPORARY.0) && n.to_string_lossy().ends_with(TEMPORARY.1))
}

/// Writes a file whole or not at all.
///
/// # Errors
/// [`LabError::Io`] with the path.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), LabError> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(TEMPORARY.0).suffix(TEMPORARY.1);
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = builder.tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        std::fs::File::open(folder)?.sync_all()
    };
    write().map_err(|source| {
        // The temporary file's name would only distract from what was asked for.
        let source = std::io::Error::new(source.kind(), source.kind().to_string());
        LabError::Io { path: path.to_owned(), source }
    })
}

/// What a command writes, and so what it may replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Statistics.
    Statistics,
    /// A basis.
    Basis,
    /// The JSON of an evaluation or a comparison.
    Report,
    /// The JSON of a benchmark.
    Benchmark,
    /// A scheme file.
    Scheme,
    /// A drawing.
    Plot,
}

impl Output {
    /// Whether a file is one that this program wrote as the same kind of thing.
    fn wrote(self, path: &Path) -> bool {
        let Ok(bytes) = std::fs::read(path) else { return false };
        let kind = match self {
            Output::Statistics => "statistics",
            Output::Basis => "basis",
            Output::Report | Output::Benchmark | Output::Scheme => {
                let report: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
                return report.is_some_and(|r| {
                    let own = r["program"].as_str().is_some_and(|p| p.starts_with("headq "));
                    let made = match () {
                        () if r["bandwidth"].is_array() => Output::Benchmark,
                        () if r["kind"] == "scheme" => Output::Scheme,
                        () => Output::Report,
                    };
                    own && made == self
                });
            }
            Output::Plot => return bytes.starts_with(b"<svg ") && bytes.windows(10).any(|w| w == b"--series-0"),
        };
        kind_of(&bytes).is_some_and(|found| found == kind)
    }
}

/// Fails early where a file could not be written at the end, or where something else would be lost: an existing file is replaced
/// only if this program wrote it as the same kind of output. Devices, pipes and links are never replaced.
///
/// # Errors
/// [`LabError::Io`] or [`LabError::Artifact`] with the path.
pub fn check_writable(path: &Path, output: Output) -> Result<(), LabError> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() {
        return Err(LabError::Io { path: path.to_owned(), source: std::io::ErrorKind::IsADirectory.into() });
    }
    if let Ok(found) = path.symlink_metadata() {
        if !found.is_file() {
            return Err(artifact_error(path, "not a regular file, and not replaced; name a file to write"));
        }
        if found.permissions().readonly() {
            return Err(LabError::Io { path: path.to_owned(), source: std::io::ErrorKind::PermissionDenied.into() });
        }
        if !output.wrote(path) {
            return Err(artifact_error(
                path,
                "exists and is something else; nothing is overwritten, name another file",
            ));
        }
    }
    if !folder.exists() {
        return Err(artifact_error(path, format!("the folder {} does not exist; make it first", folder.display())));
    }
    let plain = |e: std::io::Error| LabError::Io {
        path: path.to_owned(),
        source: std::io::Error::new(e.kind(), e.kind().to_string()),
    };
    tempfile::Builder::new().prefix(TEMPORARY.0).suffix(TEMPORARY.1).tempfile_in(folder).map(|_| ()).map_err(plain)
}

fn artifact_error(path: &Path, reason: impl Into<String>) -> LabError {
    LabError::Artifact { path: path.to_owned(), reason: reason.into() }
}

fn header_json(path: &Path, header: &Header) -> Result<String, LabError> {
    serde_json::to_string(header).map_err(|e| artifact_error(path, e.to_string()))
}

/// The parameters of the [`Correction`](headq::Correction)s of all layers, one upon the other: a Burn module whose parameters have the
/// names, shapes and order of the file's tensors.
#[derive(Module, Debug)]
struct Stack {
    decoder: Param<Tensor<4>>,
    encoder: Option<Param<Tensor<4>>>,
    clip: Option<Param<Tensor<3>>>,
    base_clip: Option<BaseClip>,
    base_analysis: Option<Param<Tensor<4>>>,
    base_synthesis: Option<Param<Tensor<4>>>,
}

/// Clip factors of the base quantizer. Which of them is no part of the tensor's name.
#[derive(Module, Debug)]
enum BaseClip {
    /// `[layers, kv_heads]`
    Heads(Param<Tensor<2>>),
    /// `[layers, kv_heads, head_dim]`
    Coefficients(Param<Tensor<3>>),
}

impl BaseClip {
    fn of(factors: Vec<f32>, [layers, heads]: [usize; 2]) -> Self {
        match factors.len() / (layers * heads) {
            1 => Self::Heads(parameter(factors, [layers, heads])),
            width => Self::Coefficients(parameter(factors, [layers, heads, width])),
        }
    }

    fn host(&self) -> Vec<f32> {
        match self {
            Self::Heads(x) => host(x.val()),
            Self::Coefficients(x) => host(x.val()),
        }
    }
}

/// What a file has beside U.
#[derive(Debug, Clone, Copy)]
struct Extent {
    /// Whether W = U.
    tied: bool,
    /// Clip factors of each side head.
    clip: Option<usize>,
    /// Clip factors of the base quantizer for each KV head.
    base_clip: Option<usize>,
    /// Whether there are E and F.
    transform: bool,
}

impl Stack {
    fn of(basis: &Basis) -> Self {
        let Basis { layers, side_heads, head_dim, rank, .. } = *basis;
        let matrix = |x: &Vec<f32>| parameter(x.clone(), [layers, side_heads, head_dim, rank]);
        let clip = |t: &TrainedSide| Some(parameter(t.clip.clone()?, [layers, side_heads, clip_width(t.scales, rank)]));
        let trained = basis.trained.as_ref();
        let transform = trained.and_then(|t| t.base_transform.as_ref());
        let square = |x: &Vec<f32>| parameter(x.clone(), [layers, side_heads, head_dim, head_dim]);
        Self {
            decoder: matrix(&basis.decoder),
            encoder: basis.encoder.as_ref().map(matrix),
            clip: trained.and_then(clip),
            base_clip: trained.and_then(|t| Some(BaseClip::of(t.base_clip.clone()?, [layers, side_heads]))),
            base_analysis: transform.map(|t| square(&t.analysis)),
            base_synthesis: transform.map(|t| square(&t.synthesis)),
        }
    }

    /// Room for `[layers, side_heads, head_dim, rank]` and what is beside it.
    fn zeros(shape @ [layers, side_heads, head_dim, _]: [usize; 4], extent: Extent) -> Self {
        let matrix = || parameter(vec![0.0; shape.iter().product()], shape);
        let factors = |width: usize| parameter(vec![0.0; layers * side_heads * width], [layers, side_heads, width]);
        let base = |width: usize| BaseClip::of(vec![0.0; layers * side_heads * width], [layers, side_heads]);
        let squares = [layers, side_heads, head_dim, head_dim];
        let square = || extent.transform.then(|| parameter(vec![0.0; squares.iter().product()], squares));
        Self {
            decoder: matrix(),
            encoder: (!extent.tied).then(matrix),
            clip: extent.clip.map(factors),
            base_clip: extent.base_clip.map(base),
            base_analysis: square(),
            base_synthesis: square(),
        }
    }
}

fn parameter<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Param<Tensor<D>> {
    Param::from_data(TensorData::new(values, shape), &Device::flex())
}

fn host<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_to_vec().expect("parameters of the stack are f32")
}

/// Tensors with the bytes that back them, ready to be written.
struct Tensors(Vec<(String, Dtype, Vec<usize>, Vec<u8>)>);

impl Tensors {
    fn write(&self, path: &Path, header: &Header) -> Result<(), LabError> {
        let views = self.0.iter().map(|(name, dtype, shape, bytes)| {
            let view =
                TensorView::new(*dtype, shape.clone(), bytes).map_err(|e| artifact_error(path, e.to_string()))?;
            Ok((name.as_str(), view))
        });
        let views = views.collect::<Result<Vec<_>, LabError>>()?;
        let metadata = std::collections::HashMap::from([(HEADER.to_string(), header_json(path, header)?)]);
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|e| artifact_error(path, e.to_string()))?;
        write_atomic(path, &bytes)
    }
}

/// An artifact file, its header read and checked.
struct File<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    tensors: SafeTensors<'a>,
    header: Header,
}

impl<'a> File<'a> {
    fn parse(path: &'a Path, bytes: &'a [u8], kind: &str) -> Result<Self, LabError> {
        let broken = |e: &dyn std::fmt::Display| {
            artifact_error(path, format!("not a whole safetensors file ({e}); make it again"))
        };
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| broken(&e))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| broken(&e))?;
        let json = metadata.metadata().as_ref().and_then(|m| m.get(HEADER)).ok_or_else(|| {
            artifact_error(
                path,
                format!("a safetensors file without a 'headq' header; expected {kind} made by this program"),
            )
        })?;
        let value: serde_json::Value =
            serde_json::from_str(json).map_err(|e| artifact_error(path, format!("its header is not JSON ({e})")))?;
        let found = |key: &str| value.get(key).map_or("nothing".to_string(), |v| v.to_string());
        if value.get("schema").and_then(serde_json::Value::as_u64) != Some(u64::from(SCHEMA)) {
            return Err(artifact_error(
                path,
                format!("schema {} is not the one this program reads, {SCHEMA}; make it again", found("schema")),
            ));
        }
        if value.get("kind").and_then(serde_json::Value::as_str) != Some(kind) {
            return Err(artifact_error(path, format!("expected {kind}, found {}", found("kind"))));
        }
        let header: Header =
            serde_json::from_value(value).map_err(|e| artifact_error(path, format!("its header: {e}")))?;
        let m = &header.model;
        if [m.layers, m.heads, m.kv_heads, m.head_dim].contains(&0) || !m.heads.is_multiple_of(m.kv_heads) {
            return Err(artifact_error(path, format!("its header names an impossible model: [{m}]")));
        }
        Ok(Self { path, bytes, tensors, header })
    }

    fn bytes(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&[u8], LabError> {
        let tensor = self
            .tensors
            .tensor(name)
            .map_err(|_| artifact_error(self.path, format!("tensor '{name}' is missing; make it again")))?;
        if tensor.dtype() != dtype || tensor.shape() != shape {
            let found = format!("{:?} {:?}", tensor.dtype(), tensor.shape());
            return Err(artifact_error(
                self.path,
                format!("tensor '{name}': expected {dtype:?} {shape:?}, found {found}; make it again"),
            ));
        }
        Ok(self.tensors.tensor(name).map_err(|_| artifact_error(self.path, "unreadable"))?.data())
    }

    /// Fails unless the file has a tensor of this name, of numbers in f32, of this shape and finite.
    fn check_floats(&self, name: &str, shape: &[usize]) -> Result<(), LabError> {
        let bytes = self.bytes(name, Dtype::F32, shape)?;
        let mut values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        self.finite(name, values.all(f32::is_finite))
    }

    /// Clip factors of the base quantizer for each KV head, and whether there are E and F, both as far as the base quantizer of the header
    /// has them.
    fn base_extent(&self, scope: Scope) -> Result<(Option<usize>, bool), LabError> {
        let names =
            ["base_clip", "base_analysis", "base_synthesis"].map(|name| (name, self.tensors.tensor(name).is_ok()));
        let Some((name, _)) = names.iter().find(|(_, there)| *there) else { return Ok((None, false)) };
        if scope == Scope::QueryHead {
            let reason = format!("tensor '{name}' comes with scope kv-head, and its header says query-head");
            return Err(artifact_error(self.path, reason));
        }
        let base: BaseScheme =
            self.header.base.parse().map_err(|e| artifact_error(self.path, format!("its header: {e}")))?;
        let [clip, transform] = [names[0].1, names[1].1 || names[2].1];
        let width = base.clip_factors(self.header.model.head_dim);
        if (clip && width.is_none()) || (transform && base.quantizer != Quantizer::Klt) {
            let name = if clip && width.is_none() { "base_clip" } else { "base_analysis" };
            let reason = format!("tensor '{name}' is nothing that the base quantizer of its header, {base}, can learn");
            return Err(artifact_error(self.path, reason));
        }
        Ok((width.filter(|_| clip), transform))
    }

    /// Reads the parameters of a module.
    fn fill(&self, stack: &mut Stack) -> Result<(), LabError> {
        let mut store = SafetensorsStore::from_bytes(Some(self.bytes.to_vec())).skip_enum_variants(true);
        stack.load_from(&mut store).map(drop).map_err(|e| artifact_error(self.path, e.to_string()))
    }

    fn doubles(&self, name: &str, shape: &[usize]) -> Result<Vec<f64>, LabError> {
        let values: Vec<f64> =
            self.bytes(name, Dtype::F64, shape)?.chunks_exact(8).map(|b| f64::from_bits(eight(b))).collect();
        self.finite(name, values.iter().all(|v| v.is_finite()))?;
        Ok(values)
    }

    /// Rows of each layer and head, as many tokens as there are.
    fn halves(&self, name: &str, model: &Fingerprint) -> Result<Vec<Vec<Vec<f16>>>, LabError> {
        let tensor =
            self.tensors.tensor(name).map_err(|_| artifact_error(self.path, format!("tensor '{name}' is missing")))?;
        let tokens = tensor.shape().get(2).copied().unwrap_or(0);
        let shape = [model.layers, model.kv_heads, tokens, model.head_dim];
        let bytes = self.bytes(name, Dtype::F16, &shape)?;
        let all: Vec<f16> = bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        self.finite(name, all.iter().all(|v| v.is_finite()))?;
        let head = tokens * model.head_dim;
        if head == 0 {
            return Ok(vec![vec![Vec::new(); model.kv_heads]; model.layers]);
        }
        let heads: Vec<Vec<f16>> = all.chunks(head).map(<[f16]>::to_vec).collect();
        Ok(heads.chunks(model.kv_heads).map(<[Vec<f16>]>::to_vec).collect())
    }

    fn counts(&self, name: &str, shape: &[usize]) -> Result<Vec<u64>, LabError> {
        Ok(self.bytes(name, Dtype::I64, shape)?.chunks_exact(8).map(eight).collect())
    }

    fn finite(&self, name: &str, all: bool) -> Result<(), LabError> {
        if all {
            Ok(())
        } else {
            Err(artifact_error(self.path, format!("tensor '{name}' holds NaN or infinity; make it again")))
        }
    }
}

fn eight(b: &[u8]) -> u64 {
    u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])
}

/// Where statistics come from.
const STATISTICS: &str = "expected statistics, which `headq calibrate MODEL --text FILE --out STATS` makes";

/// Where bases come from.
const BASIS: &str =
    "expected a basis, which `headq basis STATS --family FAMILY --rank R --out BASIS` or `headq finetune` makes";

fn read(path: &Path, expected: &'static str) -> Result<Vec<u8>, LabError> {
    std::fs::read(path).map_err(LabError::input(path, expected))
}

impl Header {
    /// The texts of the artifact at `path`, to hold scored text against.
    pub fn made_from(&self, path: &Path) -> MadeFrom<'_> {
        MadeFrom { artifact: path.to_string_lossy().into_owned(), texts: &self.texts, passages: &self.passages }
    }

    /// Fails unless the artifact was made from this model.
    ///
    /// # Errors
    /// [`LabError::Artifact`] that names both fingerprints.
    pub fn check_model(&self, path: &Path, model: &Fingerprint) -> Result<(), LabError> {
        if self.model == *model {
            return Ok(());
        }
        Err(artifact_error(
            path,
            format!("made from another model: [{}], but this model is [{model}]; calibrate this model", self.model),
        ))
    }
}

impl StatsArtifact {
    /// Writes the statistics.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), LabError> {
        let mut tensors = Vec::new();
        let kinds =
            self.layers.first().map_or(Vec::new(), |l| l.parts().iter().map(|(name, m)| (*name, m.len())).collect());
        for (kind, (name, per_layer)) in kinds.into_iter().enumerate() {
            let heads: Vec<&Moments> = self.layers.iter().flat_map(|l| l.parts()[kind].1).collect();
            let (layers, d) = (self.layers.len(), heads[0].sum.len());
            let counts = heads.iter().flat_map(|m| m.n.to_le_bytes()).collect();
            let sums = heads.iter().flat_map(|m| m.sum.iter().flat_map(|v| v.to_le_bytes())).collect();
            // Symmetric, so that column-major is row-major.
            let outers = heads.iter().flat_map(|m| m.outer.iter().flat_map(|v| v.to_le_bytes())).collect();
            tensors.push((format!("{name}.count"), Dtype::I64, vec![layers, per_layer], counts));
            tensors.push((format!("{name}.sum"), Dtype::F64, vec![layers, per_layer, d], sums));
            tensors.push((format!("{name}.outer"), Dtype::F64, vec![layers, per_layer, d, d], outers));
        }
        let d = self.header.model.head_dim;
        let outputs: Vec<_> = self.layers.iter().filter_map(|l| l.output.as_ref()).collect();
        if let Some(first) = outputs.first() {
            // Symmetric, as above.
            let bytes =
                outputs.iter().copied().flatten().flat_map(|m| m.iter().flat_map(|v| v.to_le_bytes())).collect();
            tensors.push(("output".into(), Dtype::F64, vec![outputs.len(), first.len(), d, d], bytes));
        }
        type Pick = fn(&Sample) -> &Vec<Vec<f16>>;
        for (name, pick) in [("k.sample", (|s| &s.k) as Pick), ("v.sample", |s| &s.v)] {
            let layers: Vec<_> = self.layers.iter().filter_map(|l| l.sample.as_ref().map(pick)).collect();
            let heads = || layers.iter().flat_map(|layer| layer.iter());
            let Some(tokens) = heads().next().map(|rows| rows.len() / d).filter(|n| *n > 0) else { continue };
            let bytes = heads().flat_map(|rows| rows.iter().flat_map(|v| v.to_le_bytes())).collect();
            tensors.push((name.into(), Dtype::F16, vec![layers.len(), layers[0].len(), tokens, d], bytes));
        }
        Tensors(tensors).write(path, &self.header)
    }

    /// SHA-256 of everything that the transforms of keys under `base` are made from: moments of queries and keys, of gradients where errors
    /// are measured by them, and the sample of keys.
    pub fn calibration_of(&self, base: &BaseScheme) -> String {
        use sha2::{Digest, Sha256};
        let mut hash = Sha256::new();
        for layer in &self.layers {
            let gradients = layer.gradients.iter().filter(|_| base.metric == Metric::Fisher).flat_map(|g| &g.k);
            for moments in layer.q.iter().chain(&layer.k).chain(gradients) {
                hash.update(moments.n.to_le_bytes());
                moments.sum.iter().chain(moments.outer.iter()).for_each(|v| hash.update(v.to_le_bytes()));
            }
            let rows = layer.sample.iter().flat_map(|sample| &sample.k).flatten();
            rows.for_each(|v| hash.update(v.to_le_bytes()));
        }
        crate::text::hex(&hash.finalize())
    }

    /// Reads and checks statistics.
    ///
    /// # Errors
    /// [`LabError::Artifact`] saying what is wrong with the file.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        let bytes = read(path, STATISTICS)?;
        let file = File::parse(path, &bytes, "statistics")?;
        let base: Result<BaseScheme, _> = file.header.base.parse();
        base.map_err(|e| artifact_error(path, format!("its header: {e}")))?;
        let model = &file.header.model;
        let (layers, d) = (model.layers, model.head_dim);
        let moments = |name: &str, heads: usize| -> Result<Vec<Vec<Moments>>, LabError> {
            let counts = file.counts(&format!("{name}.count"), &[layers, heads])?;
            let sums = file.doubles(&format!("{name}.sum"), &[layers, heads, d])?;
            let outers = file.doubles(&format!("{name}.outer"), &[layers, heads, d, d])?;
            let one = |i: usize| Moments {
                n: counts[i],
                sum: DVector::from_column_slice(&sums[i * d..(i + 1) * d]),
                outer: DMatrix::from_column_slice(d, d, &outers[i * d * d..(i + 1) * d * d]),
            };
            Ok((0..layers).map(|l| (l * heads..(l + 1) * heads).map(one).collect()).collect())
        };
        let (q, k) = (moments("q", model.heads)?, moments("k", model.kv_heads)?);
        let (e, v) = (moments("e", model.kv_heads)?, moments("v", model.kv_heads)?);
        let has = |name: &str| file.tensors.names().contains(&name);
        let mut gradients = match has("k_gradient.count") {
            true => {
                let (k, v) = (moments("k_gradient", model.kv_heads)?, moments("v_gradient", model.kv_heads)?);
                k.into_iter().zip(v).map(|(k, v)| Some(GradientMoments { k, v })).collect()
            }
            false => vec![None; layers],
        };
        let mut samples = match has("k.sample") {
            true => {
                let (k, v) = (file.halves("k.sample", model)?, file.halves("v.sample", model)?);
                k.into_iter().zip(v).map(|(k, v)| Some(Sample { k, v })).collect()
            }
            false => vec![None; layers],
        };
        let mut outputs: Vec<Option<Vec<DMatrix<f64>>>> = match has("output") {
            true => {
                let all = file.doubles("output", &[layers, model.kv_heads, d, d])?;
                let matrices: Vec<_> = all.chunks(d * d).map(|m| DMatrix::from_column_slice(d, d, m)).collect();
                matrices.chunks(model.kv_heads).map(|of_layer| Some(of_layer.to_vec())).collect()
            }
            false => vec![None; layers],
        };
        let layer = |(i, ((q, k), (e, v)))| {
            let _: usize = i;
            let (gradients, sample, output) = (gradients[i].take(), samples[i].take(), outputs[i].take());
            LayerStats { q, k, e, v, gradients, sample, output }
        };
        let layers = q.into_iter().zip(k).zip(e.into_iter().zip(v)).enumerate().map(layer).collect();
        Ok(Self { header: file.header, layers })
    }
}

impl BasisArtifact {
    /// A basis derived from statistics, with the header it inherits from them.
    ///
    /// # Errors
    /// As [`Basis::fit`].
    pub fn fit(stats: &StatsArtifact, family: Family, rank: usize, scope: Scope, seed: u64) -> Result<Self, LabError> {
        let basis = Basis::fit(&stats.layers, family, rank, scope, seed)?;
        let mut header = stats.header.clone();
        header.kind = "basis".into();
        header.basis = Some(BasisHeader::derived(family, rank, scope, seed));
        Ok(Self { header, basis })
    }

    /// Writes the basis.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), LabError> {
        let json = header_json(path, &self.header)?;
        // One entry of metadata: several would come in an order of their own in each file.
        let mut store =
            SafetensorsStore::from_bytes(None).skip_enum_variants(true).clear_metadata().metadata(HEADER, json);
        let bytes = Stack::of(&self.basis).save_into(&mut store).and_then(|()| store.get_bytes());
        write_atomic(path, &bytes.map_err(|e| artifact_error(path, e.to_string()))?)
    }

    /// Reads and checks a basis.
    ///
    /// # Errors
    /// [`LabError::Artifact`] saying what is wrong with the file.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        let bytes = read(path, BASIS)?;
        let file = File::parse(path, &bytes, "basis")?;
        let model = &file.header.model;
        let about = file.header.basis.clone().ok_or_else(|| artifact_error(path, "its header has no 'basis'"))?;
        let scope: Scope = about.scope.parse().map_err(|e: String| artifact_error(path, format!("scope {e}")))?;
        let side_heads = match scope {
            Scope::KvHead => model.kv_heads,
            Scope::QueryHead => model.heads,
        };
        let has = |name: &str| file.tensors.names().contains(&name);
        let tied = about.family.tied() || (about.family == Family::Learned && !has("encoder"));
        let scales = about.scales.as_deref().map(|s| s.parse::<SideScales>());
        let scales = scales.transpose().map_err(|e| artifact_error(path, format!("side scales {e}")))?;
        let side = about.bits.zip(scales);
        let clip = side.filter(|_| has("clip")).map(|(_, scales)| clip_width(scales, about.rank));
        let (base_clip, transform) = match side {
            Some(_) => file.base_extent(scope)?,
            None => (None, false),
        };
        // Before there is room for them: a header may say anything.
        let matrix = [model.layers, side_heads, model.head_dim, about.rank];
        file.check_floats("decoder", &matrix)?;
        if !tied {
            file.check_floats("encoder", &matrix)?;
        }
        if let Some(width) = clip {
            file.check_floats("clip", &[model.layers, side_heads, width])?;
        }
        match base_clip {
            None => {}
            Some(1) => file.check_floats("base_clip", &[model.layers, model.kv_heads])?,
            Some(width) => file.check_floats("base_clip", &[model.layers, model.kv_heads, width])?,
        }
        if transform {
            let square = [model.layers, model.kv_heads, model.head_dim, model.head_dim];
            file.check_floats("base_analysis", &square)?;
            file.check_floats("base_synthesis", &square)?;
        }
        let mut stack = Stack::zeros(matrix, Extent { tied, clip, base_clip, transform });
        file.fill(&mut stack)?;
        let Stack { decoder, encoder, clip, base_clip, base_analysis, base_synthesis } = stack;
        let transform = base_analysis.zip(base_synthesis);
        let basis = Basis {
            family: about.family,
            scope,
            layers: model.layers,
            side_heads,
            head_dim: model.head_dim,
            rank: about.rank,
            decoder: host(decoder.val()),
            encoder: encoder.map(|w| host(w.val())),
            trained: side.map(|(bits, scales)| TrainedSide {
                bits,
                scales,
                clip: clip.map(|c| host(c.val())),
                base_clip: base_clip.map(|c| c.host()),
                base_transform: transform
                    .map(|(e, f)| TrainedTransform { analysis: host(e.val()), synthesis: host(f.val()) }),
            }),
        };
        Ok(Self { header: file.header, basis })
    }
}
