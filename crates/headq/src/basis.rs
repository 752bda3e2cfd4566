//! Bases of the logit correction: where the side code lives, derived in closed form from calibration statistics.
//!
//! A basis family is one function from a head's moments to an encoder W and a decoder U, `[head_dim, rank]` each; [`fit_head`] is
//! the registry.

use burn::tensor::{Device, Tensor, TensorData};
use nalgebra::{DMatrix, DVector, SymmetricEigen};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

use crate::Error;
use crate::correction::{Correction, Parts};
use crate::quant::{BaseParts, BaseQuantizer, clip_width, plain};
use crate::scheme::{Family, Scope, SideScales, SideScheme};
use crate::stats::{LayerStats, Moments};

/// Eigenvalues of C_q are floored at this share of the largest before C_q^{−½} is formed.
pub const SCORE_OPTIMAL_FLOOR: f64 = 1e-6;

/// Encoders W and decoders U of every layer and side head.
#[derive(Debug, Clone, PartialEq)]
pub struct Basis {
    /// Family it was derived by.
    pub family: Family,
    /// One basis per KV head or per query head.
    pub scope: Scope,
    /// Layers of the model.
    pub layers: usize,
    /// Bases per layer: KV heads or query heads.
    pub side_heads: usize,
    /// Head width d.
    pub head_dim: usize,
    /// Rank r.
    pub rank: usize,
    /// U: `[layers, side_heads, head_dim, rank]`, row-major.
    pub decoder: Vec<f32>,
    /// W, as `decoder`; `None` where W = U (orthonormal).
    pub encoder: Option<Vec<f32>>,
    /// Side quantizer that a `learned` basis was trained with, and belongs to.
    pub trained: Option<TrainedSide>,
}

/// The side quantizer that a basis was trained with.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainedSide {
    /// Bits of a side code.
    pub bits: u32,
    /// What shares a scale and a zero.
    pub scales: SideScales,
    /// Clip factors ρ ([`crate::quant::side_read_back`]): `[layers, side_heads, clip_width]`, row-major; `None` is 1 throughout.
    pub clip: Option<Vec<f32>>,
    /// Clip factors of the base quantizer ([`BaseParts::clip`]): `[layers, kv_heads]`, of `klt` `[layers, kv_heads, head_dim]`, row-major;
    /// `None` is 1 throughout. Where there are some, keys are coded with them. They come with bases per KV head only.
    pub base_clip: Option<Vec<f32>>,
    /// E and F of a base quantizer `klt` ([`BaseParts::transform`]), in the same way.
    pub base_transform: Option<TrainedTransform>,
}

/// What was trained of the transforms of a base quantizer `klt`.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainedTransform {
    /// E: `[layers, kv_heads, head_dim, head_dim]`, row-major.
    pub analysis: Vec<f32>,
    /// F, as `analysis`.
    pub synthesis: Vec<f32>,
}

impl Basis {
    /// Derives a basis of any family but `learned` from statistics.
    ///
    /// `seed` matters to `random` only.
    ///
    /// # Errors
    /// [`Error::Basis`] if the rank exceeds the head width, the statistics lack what the family needs, or they are not finite.
    pub fn fit(stats: &[LayerStats], family: Family, rank: usize, scope: Scope, seed: u64) -> Result<Self, Error> {
        let fail = |reason: String| Error::Basis { family: family.to_string(), reason };
        let first = stats.first().ok_or_else(|| fail("the statistics have no layers".into()))?;
        let (heads, kv_heads, head_dim) = (first.q.len(), first.k.len(), first.k[0].sum.len());
        if rank == 0 || rank > head_dim {
            return Err(fail(format!("rank {rank} is outside 1 to the head width {head_dim}")));
        }
        let silent = |m: &Moments| m.n > 0 && m.outer.trace() == 0.0;
        if family == Family::ScoreOptimal && stats.iter().flat_map(|layer| &layer.q).all(silent) {
            return Err(fail("all queries in the statistics are zero".into()));
        }
        let side_heads = match scope {
            Scope::KvHead => kv_heads,
            Scope::QueryHead => heads,
        };
        let fitted: Vec<_> = (0..stats.len() * side_heads)
            .into_par_iter()
            .map(|i| {
                let (layer, head) = (i / side_heads, i % side_heads);
                let (q, kv_head) = match scope {
                    Scope::KvHead => (stats[layer].pooled_queries(head), head),
                    Scope::QueryHead => (stats[layer].q[head].clone(), head / (heads / kv_heads)),
                };
                fit_head(family, rank, &q, &stats[layer].e[kv_head], head_seed(seed, layer, head))
                    .map_err(|reason| fail(format!("layer {layer}, head {head}: {reason}")))
            })
            .collect::<Result<_, _>>()?;
        let flat = |pick: &dyn Fn(&HeadBasis) -> &DMatrix<f64>| -> Vec<f32> {
            fitted.iter().flat_map(|f| pick(f).transpose().iter().map(|&v| v as f32).collect::<Vec<_>>()).collect()
        };
        Ok(Self {
            family,
            scope,
            layers: stats.len(),
            side_heads,
            head_dim,
            rank,
            decoder: flat(&|f| &f.decoder),
            encoder: (!family.tied()).then(|| flat(&|f| f.encoder.as_ref().unwrap_or(&f.decoder))),
            trained: None,
        })
    }

    /// The basis of trained corrections, one for each layer of a model, which belongs to the side quantizer that they were trained
    /// with.
    ///
    /// # Panics
    /// If there are none, or they differ in shape, in being tied or in having clip factors.
    pub fn learned(side: &SideScheme, corrections: &[Correction]) -> Self {
        let parts: Vec<Parts> = corrections.iter().map(Correction::parts).collect();
        let [side_heads, head_dim, rank] = parts[0].decoder.dims();
        let join = |part: &dyn Fn(&Parts) -> Option<Tensor<3>>| -> Option<Vec<f32>> {
            let all: Vec<Tensor<3>> = parts.iter().filter_map(part).collect();
            assert!(all.is_empty() || all.len() == parts.len(), "corrections of one kind");
            assert!(all.iter().all(|x| x.dims() == all[0].dims()), "corrections of one shape");
            (!all.is_empty()).then(|| all.into_iter().flat_map(host).collect())
        };
        Self {
            family: Family::Learned,
            scope: side.scope,
            layers: corrections.len(),
            side_heads,
            head_dim,
            rank,
            decoder: join(&|p| Some(p.decoder.clone())).unwrap_or_default(),
            encoder: join(&|p| p.encoder.clone()),
            trained: Some(TrainedSide {
                bits: side.bits,
                scales: side.scales,
                clip: join(&|p| p.clip.clone()),
                base_clip: None,
                base_transform: None,
            }),
        }
    }

    /// A learned basis with the clip factors of the base quantizer that it was trained with, as [`TrainedSide::base_clip`].
    pub fn with_base_clip(mut self, base_clip: Option<Vec<f32>>) -> Self {
        if let Some(trained) = &mut self.trained {
            trained.base_clip = base_clip;
        }
        self
    }

    /// A learned basis with the transforms of the base quantizer that it was trained with.
    pub fn with_base_transform(mut self, base_transform: Option<TrainedTransform>) -> Self {
        if let Some(trained) = &mut self.trained {
            trained.base_transform = base_transform;
        }
        self
    }

    /// The same corrections UWᵀ in coefficients that lose less to equal bits: of each head, [`equalize`].
    ///
    /// # Errors
    /// [`Error::Basis`] if the statistics have another shape, or are not finite.
    pub fn equalized(&self, stats: &[LayerStats]) -> Result<Self, Error> {
        let fail = |reason: &str| Error::Basis { family: self.family.to_string(), reason: reason.into() };
        if stats.len() != self.layers || stats.iter().any(|l| l.k[0].sum.len() != self.head_dim) {
            return Err(fail("the statistics are of another shape"));
        }
        if !stats.iter().all(LayerStats::is_finite) {
            return Err(fail("the statistics are not finite"));
        }
        let size = self.head_dim * self.rank;
        let encoder = self.encoder.as_ref().unwrap_or(&self.decoder);
        let fitted: Vec<HeadBasis> = (0..self.layers * self.side_heads)
            .into_par_iter()
            .map(|i| {
                let (layer, head) = (&stats[i / self.side_heads], i % self.side_heads);
                let (q, kv_head) = match self.scope {
                    Scope::KvHead => (layer.pooled_queries(head), head),
                    Scope::QueryHead => (layer.q[head].clone(), head / (layer.q.len() / layer.k.len())),
                };
                let matrix = |x: &[f32]| {
                    let own = x[i * size..(i + 1) * size].iter().map(|&v| f64::from(v));
                    DMatrix::from_row_iterator(self.head_dim, self.rank, own)
                };
                equalize(&matrix(&self.decoder), &matrix(encoder), &q.second(), &layer.e[kv_head].covariance())
            })
            .collect();
        let flat = |pick: &dyn Fn(&HeadBasis) -> &DMatrix<f64>| -> Vec<f32> {
            fitted.iter().flat_map(|f| pick(f).transpose().iter().map(|&v| v as f32).collect::<Vec<_>>()).collect()
        };
        let encoder = Some(flat(&|f| f.encoder.as_ref().unwrap_or(&f.decoder)));
        Ok(Self { decoder: flat(&|f| &f.decoder), encoder, ..self.clone() })
    }

    /// Checks the basis against a scheme and a model's shape.
    ///
    /// # Errors
    /// [`Error::Basis`] naming what disagrees.
    pub fn check(
        &self,
        side: &SideScheme,
        layers: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<(), Error> {
        let side_heads = match side.scope {
            Scope::KvHead => kv_heads,
            Scope::QueryHead => heads,
        };
        let bits = self.trained.as_ref().map_or(side.bits, |t| t.bits);
        let scales = self.trained.as_ref().map_or(side.scales, |t| t.scales);
        let pairs = [
            ("family", self.family.to_string(), side.family.to_string()),
            ("rank", self.rank.to_string(), side.rank.to_string()),
            ("scope", self.scope.to_string(), side.scope.to_string()),
            ("side bits", bits.to_string(), side.bits.to_string()),
            ("side scales", scales.to_string(), side.scales.to_string()),
            ("layers", self.layers.to_string(), layers.to_string()),
            ("heads", self.side_heads.to_string(), side_heads.to_string()),
            ("head width", self.head_dim.to_string(), head_dim.to_string()),
        ];
        match pairs.iter().find(|(_, have, want)| have != want) {
            None => Ok(()),
            Some((what, have, want)) => Err(Error::Basis {
                family: self.family.to_string(),
                reason: format!("the basis has {what} {have}, the scheme and model need {want}"),
            }),
        }
    }

    /// Whether one orthonormal matrix is encoder and decoder.
    pub fn is_tied(&self) -> bool {
        self.encoder.is_none()
    }

    /// U of one layer: `[side_heads, head_dim, rank]`.
    pub fn decoder_of(&self, layer: usize) -> TensorData {
        self.layer(&self.decoder, layer)
    }

    /// W of one layer: `[side_heads, head_dim, rank]`.
    pub fn encoder_of(&self, layer: usize) -> TensorData {
        self.layer(self.encoder.as_ref().unwrap_or(&self.decoder), layer)
    }

    /// ρ of one layer: `[side_heads, 1, clip_width]`; `None` where no clip factors were learned.
    pub fn clip_of(&self, layer: usize) -> Option<TensorData> {
        let trained = self.trained.as_ref()?;
        let width = clip_width(trained.scales, self.rank);
        let size = self.side_heads * width;
        let factors = trained.clip.as_ref()?[layer * size..(layer + 1) * size].to_vec();
        Some(TensorData::new(factors, [self.side_heads, 1, width]))
    }

    /// Whether anything of the base quantizer was learned, so that residuals are the basis's own.
    pub fn changes_base(&self) -> bool {
        self.trained.as_ref().is_some_and(|t| t.base_clip.is_some() || t.base_transform.is_some())
    }

    /// Clip factors of one layer's base quantizer: `[kv_heads, 1, 1]`, of `klt` `[kv_heads, 1, head_dim]`; `None` where none were learned.
    pub fn base_clip_of(&self, layer: usize) -> Option<TensorData> {
        let all = self.trained.as_ref()?.base_clip.as_ref()?;
        let (heads, size) = (self.side_heads, all.len() / self.layers);
        Some(TensorData::new(all[layer * size..(layer + 1) * size].to_vec(), [heads, 1, size / heads]))
    }

    /// E and F of one layer's base quantizer: `[kv_heads, head_dim, head_dim]` each; `None` where none were learned.
    pub fn base_transform_of(&self, layer: usize) -> Option<[TensorData; 2]> {
        let TrainedTransform { analysis, synthesis } = self.trained.as_ref()?.base_transform.as_ref()?;
        let (heads, d) = (self.side_heads, self.head_dim);
        let size = heads * d * d;
        Some(
            [analysis, synthesis].map(|x| TensorData::new(x[layer * size..(layer + 1) * size].to_vec(), [heads, d, d])),
        )
    }

    /// A base quantizer of one layer with all that was learned for it, or as it is.
    pub fn clipping(&self, quantizer: BaseQuantizer, layer: usize, device: &Device) -> BaseQuantizer {
        let tensor = |x: TensorData| Tensor::from_data(x, device);
        let transform = self.base_transform_of(layer).map(|both| both.map(tensor));
        quantizer.with_parts(BaseParts { clip: self.base_clip_of(layer).map(tensor), transform })
    }

    fn layer(&self, all: &[f32], layer: usize) -> TensorData {
        let size = self.side_heads * self.head_dim * self.rank;
        TensorData::new(all[layer * size..(layer + 1) * size].to_vec(), [self.side_heads, self.head_dim, self.rank])
    }
}

/// The numbers of a parameter, row-major.
fn host(x: Tensor<3>) -> Vec<f32> {
    plain(x).into_data_as::<f32>().try_to_vec().expect("the data was converted to f32")
}

/// Encoder and decoder of one head.
#[derive(Debug, Clone)]
pub struct HeadBasis {
    /// U: `[head_dim, rank]`
    pub decoder: DMatrix<f64>,
    /// W: `[head_dim, rank]`; `None` where W = U.
    pub encoder: Option<DMatrix<f64>>,
}

impl HeadBasis {
    fn tied(decoder: DMatrix<f64>) -> Self {
        Self { decoder, encoder: None }
    }
}

/// The registry of families: a head's moments of queries and residuals → its basis.
///
/// # Errors
/// What is missing or not finite, in words.
pub fn fit_head(family: Family, rank: usize, q: &Moments, e: &Moments, seed: u64) -> Result<HeadBasis, String> {
    let needs = |m: &Moments, what: &str| match (m.n, m.outer.iter().all(|v| v.is_finite())) {
        (0, _) => Err(format!("the statistics hold no {what}")),
        (_, false) => Err(format!("the {what} in the statistics are not finite")),
        _ => Ok(()),
    };
    match family {
        Family::QueryPca => {
            needs(q, "queries")?;
            Ok(HeadBasis::tied(top_eigenvectors(q.second(), rank)))
        }
        Family::QueryPcaCentered => {
            needs(q, "queries")?;
            Ok(HeadBasis::tied(top_eigenvectors(q.covariance(), rank)))
        }
        Family::ResidualPca => {
            needs(e, "residuals")?;
            Ok(HeadBasis::tied(top_eigenvectors(e.second(), rank)))
        }
        Family::Random => Ok(HeadBasis::tied(haar(q.sum.len(), rank, seed))),
        Family::ScoreOptimal => {
            needs(q, "queries")?;
            needs(e, "residuals")?;
            score_optimal(q.second(), e.covariance(), rank)
        }
        Family::Learned => Err("is trained, not derived from statistics; give a basis artifact".into()),
    }
}

/// Eigenvalues in descending order with their eigenvectors as columns, signs fixed so that results repeat across machines.
pub fn descending_eigen(x: DMatrix<f64>) -> (DVector<f64>, DMatrix<f64>) {
    let eigen = SymmetricEigen::new(x);
    let mut order: Vec<usize> = (0..eigen.eigenvalues.len()).collect();
    order.sort_by(|&a, &b| eigen.eigenvalues[b].total_cmp(&eigen.eigenvalues[a]));
    let values = DVector::from_iterator(order.len(), order.iter().map(|&i| eigen.eigenvalues[i]));
    let columns: Vec<DVector<f64>> = order
        .iter()
        .map(|&i| {
            let v = eigen.eigenvectors.column(i).into_owned();
            let largest = v[v.icamax()];
            if largest < 0.0 { -v } else { v }
        })
        .collect();
    (values, DMatrix::from_columns(&columns))
}

fn top_eigenvectors(x: DMatrix<f64>, rank: usize) -> DMatrix<f64> {
    descending_eigen(x).1.columns(0, rank).into_owned()
}

/// W = C_q^{½}V and U = C_q^{−½}V with V the top eigenvectors of C_q^{½} C_e C_q^{½}.
///
/// Among all rank-r corrections U Wᵀe of a residual e it leaves the least E[(qᵀ(e − UWᵀe))²] = tr C_q (I − UWᵀ) C_e (I − UWᵀ)ᵀ. Where
/// all queries are zero every correction does, and that of C_q = I is taken.
fn score_optimal(c_q: DMatrix<f64>, c_e: DMatrix<f64>, rank: usize) -> Result<HeadBasis, String> {
    let (values, vectors) = descending_eigen(c_q);
    let floor = values[0] * SCORE_OPTIMAL_FLOOR;
    if floor.is_nan() {
        return Err("the queries in the statistics are not finite".into());
    }
    let roots = if floor > 0.0 { values.map(|v| v.max(floor).sqrt()) } else { values.map(|_| 1.0) };
    let half = &vectors * DMatrix::from_diagonal(&roots) * vectors.transpose();
    let inverse_half = &vectors * DMatrix::from_diagonal(&roots.map(|v| 1.0 / v)) * vectors.transpose();
    let top = top_eigenvectors(crate::stats::symmetric(&half * c_e * &half), rank);
    Ok(HeadBasis { decoder: inverse_half * &top, encoder: Some(half * top) })
}

/// Encoder W Aᵀ and decoder U A⁻¹ of the same correction, with the A that makes r coefficients of equal bits lose least.
///
/// A quantizer with ranges from the data has an error in proportion to the variance of what it quantizes, so that the expected squared
/// score error it adds is Σ_i (A S Aᵀ)_ii (A⁻ᵀ M A⁻¹)_ii times a constant, S = WᵀC_eW and M = UᵀC_qU. With M = LLᵀ and
/// LᵀSL = VΛVᵀ it is least, (Σ_i √λ_i)²/r, for A = Q Λ^{−¼} Vᵀ Lᵀ where the rotation Q makes the diagonal of Q Λ^{½} Qᵀ constant;
/// the principal components themselves, A = VᵀLᵀ, lose Σ_i λ_i. Where a coefficient has no variance or no effect, nothing changes.
pub fn equalize(decoder: &DMatrix<f64>, encoder: &DMatrix<f64>, c_q: &DMatrix<f64>, c_e: &DMatrix<f64>) -> HeadBasis {
    let unchanged = || HeadBasis { decoder: decoder.clone(), encoder: Some(encoder.clone()) };
    let metric = crate::stats::symmetric(decoder.transpose() * c_q * decoder);
    let Some(root) = metric.cholesky().map(|c| c.l()) else { return unchanged() };
    let spread = crate::stats::symmetric(root.transpose() * (encoder.transpose() * c_e * encoder) * &root);
    let (values, vectors) = descending_eigen(spread);
    if values.iter().any(|v| v.is_nan() || *v <= values[0] * 1e-12) {
        return unchanged();
    }
    let rotation = constant_diagonal(DMatrix::from_diagonal(&values.map(f64::sqrt)));
    let a = rotation * DMatrix::from_diagonal(&values.map(|v| v.powf(-0.25))) * vectors.transpose() * root.transpose();
    match a.clone().try_inverse() {
        Some(inverse) => HeadBasis { decoder: decoder * inverse, encoder: Some(encoder * a.transpose()) },
        None => unchanged(),
    }
}

/// A rotation Q with a constant diagonal of Q X Qᵀ: each plane rotation brings one more element to the mean (Schur–Horn).
fn constant_diagonal(mut x: DMatrix<f64>) -> DMatrix<f64> {
    let n = x.nrows();
    let mean = x.trace() / n as f64;
    let mut rotation = DMatrix::identity(n, n);
    for _ in 1..n {
        let diagonal = x.diagonal();
        let (i, j) = (diagonal.imax(), diagonal.imin());
        let (high, low, b) = (x[(i, i)] - mean, x[(j, j)] - mean, x[(i, j)]);
        if high <= mean * 1e-12 || low >= 0.0 {
            break;
        }
        // high·cos² + 2b·cos·sin + low·sin² = 0
        let tan = (-b - (b * b - high * low).sqrt()) / low;
        let (cos, sin) = (1.0 / tan.hypot(1.0), tan / tan.hypot(1.0));
        let mut plane = DMatrix::identity(n, n);
        (plane[(i, i)], plane[(i, j)], plane[(j, i)], plane[(j, j)]) = (cos, sin, -sin, cos);
        x = &plane * x * plane.transpose();
        rotation = plane * rotation;
    }
    rotation
}

/// A Haar-random orthonormal `[width, rank]`: QR of a Gaussian matrix with the signs of R's diagonal made positive.
fn haar(width: usize, rank: usize, seed: u64) -> DMatrix<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let gaussian = DMatrix::from_fn(width, rank, |_, _| rng.sample::<f64, _>(StandardNormal));
    let qr = gaussian.qr();
    let signs = qr.r().diagonal().map(|v| if v < 0.0 { -1.0 } else { 1.0 });
    qr.q() * DMatrix::from_diagonal(&signs)
}

/// A stream of its own for each layer and head (SplitMix64 of the three numbers).
pub fn head_seed(seed: u64, layer: usize, head: usize) -> u64 {
    let step = |state: u64, next: u64| split_mix(state.wrapping_add(next.wrapping_mul(GOLDEN)));
    [layer as u64, head as u64].into_iter().fold(seed, step)
}

/// 2⁶⁴ over the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits that looks random.
pub fn split_mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Share of the expected squared score error E[(qᵀe)²] that rank-r correction U Wᵀ removes, before side quantization.
///
/// 1 − tr C_q (I − UWᵀ) C_e (I − UWᵀ)ᵀ / tr C_q C_e, with C_q uncentered and C_e centred (a constant residual is softmax-null).
/// `None` where there is no score error to remove.
pub fn captured_share(q: &Moments, e: &Moments, basis: &HeadBasis) -> Option<f64> {
    let (c_q, c_e) = (q.second(), e.covariance());
    let total = (&c_q * &c_e).trace();
    if total.is_nan() || total <= 0.0 {
        return None;
    }
    let width = c_q.nrows();
    let left =
        DMatrix::identity(width, width) - &basis.decoder * basis.encoder.as_ref().unwrap_or(&basis.decoder).transpose();
    Some(1.0 - (c_q * &left * c_e * left.transpose()).trace() / total)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows with a chosen, uneven spectrum and a mean.
    fn moments(seed: u64, width: usize, shift: f64) -> Moments {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mix = DMatrix::from_fn(width, width, |_, j| rng.sample::<f64, _>(StandardNormal) / (1.0 + j as f64));
        let mut m = Moments::new(width);
        let rows: Vec<f32> = (0..200)
            .flat_map(|_| {
                let x = DVector::from_fn(width, |_, _| rng.sample::<f64, _>(StandardNormal));
                (&mix * x).iter().map(|v| (v + shift) as f32).collect::<Vec<_>>()
            })
            .collect();
        m.add(&rows);
        m
    }

    #[test]
    fn tied_families_are_orthonormal_at_every_rank() {
        let (q, e) = (moments(1, 8, 0.5), moments(2, 8, 0.1));
        for family in Family::ALL.iter().copied().filter(|f| f.tied()) {
            for rank in [1, 3, 8] {
                let u = fit_head(family, rank, &q, &e, 7).unwrap().decoder;
                assert!((u.transpose() * &u - DMatrix::identity(rank, rank)).norm() < 1e-10, "{family} {rank}");
            }
        }
    }

    #[test]
    fn query_pca_maximises_the_captured_query_energy() {
        let (q, e) = (moments(1, 8, 0.5), moments(2, 8, 0.1));
        let energy = |u: &DMatrix<f64>| (u.transpose() * q.second() * u).trace();
        let best = energy(&fit_head(Family::QueryPca, 3, &q, &e, 0).unwrap().decoder);
        for seed in 0..200 {
            assert!(energy(&haar(8, 3, seed)) < best);
        }
    }

    #[test]
    fn score_optimal_removes_more_score_error_than_any_other_correction() {
        let (q, e) = (moments(1, 8, 0.5), moments(2, 8, 0.1));
        let share = |b: &HeadBasis| captured_share(&q, &e, b).unwrap();
        let best = fit_head(Family::ScoreOptimal, 3, &q, &e, 0).unwrap();
        for family in [Family::QueryPca, Family::QueryPcaCentered, Family::ResidualPca, Family::Random] {
            assert!(share(&fit_head(family, 3, &q, &e, 0).unwrap()) < share(&best), "{family}");
        }
        // It is a stationary point, too: small changes of W or U make it worse.
        for seed in 0..100 {
            let nudge = haar(8, 3, seed) * 1e-3;
            let encoder = best.encoder.as_ref().unwrap();
            let moved = HeadBasis { decoder: &best.decoder + &nudge, encoder: Some(encoder.clone()) };
            assert!(share(&moved) < share(&best));
            let moved = HeadBasis { decoder: best.decoder.clone(), encoder: Some(encoder + nudge) };
            assert!(share(&moved) < share(&best));
        }
        assert!(
            (share(&fit_head(Family::ScoreOptimal, 8, &q, &e, 0).unwrap()) - 1.0).abs() < 1e-9,
            "full rank removes all"
        );
    }

    #[test]
    fn equalized_coefficients_are_the_same_correction_with_less_quantization_error() {
        let (q, e) = (moments(1, 8, 0.5), moments(2, 8, 0.1));
        let (c_q, c_e) = (q.second(), e.covariance());
        for rank in [1, 3, 4] {
            for family in [Family::ScoreOptimal, Family::QueryPca] {
                let basis = fit_head(family, rank, &q, &e, 0).unwrap();
                let (u, w) = (&basis.decoder, basis.encoder.as_ref().unwrap_or(&basis.decoder));
                let made = equalize(u, w, &c_q, &c_e);
                let (u_made, w_made) = (&made.decoder, made.encoder.as_ref().unwrap());
                assert!((u_made * w_made.transpose() - u * w.transpose()).norm() < 1e-9, "the correction is the same");
                let loss = |u: &DMatrix<f64>, w: &DMatrix<f64>| {
                    let (m, s) = (u.transpose() * &c_q * u, w.transpose() * &c_e * w);
                    (0..rank).map(|i| m[(i, i)] * s[(i, i)]).sum::<f64>()
                };
                let root = (u.transpose() * &c_q * u).cholesky().unwrap().l();
                let (values, _) = descending_eigen(root.transpose() * (w.transpose() * &c_e * w) * &root);
                let least = values.map(f64::sqrt).sum().powi(2) / rank as f64;
                assert!((loss(u_made, w_made) / least - 1.0).abs() < 1e-9);
                // No change of coefficients near it is better.
                for seed in 0..50 {
                    let near = DMatrix::identity(rank, rank) + haar(rank, rank, seed) * 1e-2;
                    let inverse = near.clone().try_inverse().unwrap();
                    assert!(loss(&(u_made * inverse), &(w_made * near.transpose())) > least * (1.0 - 1e-9));
                }
            }
        }
    }

    #[test]
    fn captured_share_agrees_with_samples() {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut draw = |n: usize| -> Vec<f32> { (0..n * 4).map(|_| rng.sample::<f32, _>(StandardNormal)).collect() };
        let (queries, residuals) = (draw(60), draw(50));
        let (mut q, mut e) = (Moments::new(4), Moments::new(4));
        q.add(&queries);
        e.add(&residuals);
        let basis = fit_head(Family::ScoreOptimal, 2, &q, &e, 0).unwrap();
        let (u, w) = (&basis.decoder, basis.encoder.as_ref().unwrap());
        let mean = e.mean();
        let (mut before, mut after) = (0.0, 0.0);
        for q in queries.chunks(4) {
            let q = DVector::from_iterator(4, q.iter().map(|&v| f64::from(v)));
            for e in residuals.chunks(4) {
                let e = DVector::from_iterator(4, e.iter().map(|&v| f64::from(v))) - &mean;
                before += q.dot(&e).powi(2);
                after += q.dot(&(&e - u * (w.transpose() * &e))).powi(2);
            }
        }
        assert!((captured_share(&q, &e, &basis).unwrap() - (1.0 - after / before)).abs() < 1e-9);
    }

    #[test]
    fn random_bases_repeat_by_seed_and_differ_by_head() {
        let mut stats = LayerStats::new(4, 2, 6);
        stats.add(&[1.0; 24], &[1.0; 12], &[1.0; 12], &[1.0; 12]);
        let fit = |seed| Basis::fit(std::slice::from_ref(&stats), Family::Random, 2, Scope::KvHead, seed).unwrap();
        assert_eq!(fit(1), fit(1));
        assert_ne!(fit(1).decoder, fit(2).decoder);
        assert_ne!(fit(1).decoder[..12], fit(1).decoder[12..]);
    }

    #[test]
    fn degenerate_statistics_are_reported() {
        let mut stats = LayerStats::new(2, 1, 4);
        let fit = |stats: &LayerStats, family, rank| {
            Basis::fit(std::slice::from_ref(stats), family, rank, Scope::KvHead, 0)
                .map(|_| ())
                .map_err(|e| e.to_string())
        };
        assert!(
            fit(&stats, Family::QueryPca, 2).unwrap_err().contains("layer 0, head 0: the statistics hold no queries")
        );
        stats.add(&[0.0; 16], &[0.0; 8], &[0.0; 8], &[0.0; 8]);
        assert!(fit(&stats, Family::QueryPca, 2).is_ok());
        assert!(fit(&stats, Family::ScoreOptimal, 2).unwrap_err().contains("all queries in the statistics are zero"));
        assert!(fit(&stats, Family::QueryPca, 5).unwrap_err().contains("rank 5 is outside 1 to the head width 4"));
        stats.add(&[f32::NAN; 8], &[], &[], &[]);
        assert!(fit(&stats, Family::QueryPca, 2).unwrap_err().contains("not finite"));
    }
}
