//! The logit correction of one layer as a trainable Burn module: encoder W, decoder U and the side quantizer between them.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};

use crate::basis::Basis;
use crate::quant::{Stored, clip_width, side_read_back, store_side};
use crate::scheme::{KeyScheme, Meta, SideScheme};

/// Clip factors stay at or above this, so that no range closes in training.
pub const LEAST_CLIP: f64 = 0.05;

/// The side code of one layer: residuals → ẑ = Q_s(Wᵀe), and queries → qU, which meet in the scores (E9).
///
/// Its parameters are U, W where it differs, and the clip factors ρ of Q_s where there are any. All of them train with any Burn
/// optimizer on an autodiff device: rounding has the straight-through gradient, and every value under autodiff is the one that
/// inference computes, bit for bit.
#[derive(Module, Debug)]
pub struct Correction {
    /// U: `[side_heads, head_dim, rank]`
    decoder: Param<Tensor<3>>,
    /// W, as `decoder`; `None` where W = U.
    encoder: Option<Param<Tensor<3>>>,
    /// ρ: `[side_heads, 1, clip_width]`; `None` is 1 throughout.
    clip: Option<Param<Tensor<3>>>,
    #[module(skip)]
    side: SideScheme,
    #[module(skip)]
    group: usize,
    #[module(skip)]
    meta: Meta,
}

/// The tensors of a [`Correction`], for optimizers and files.
#[derive(Debug, Clone)]
pub struct Parts {
    /// U: `[side_heads, head_dim, rank]`
    pub decoder: Tensor<3>,
    /// W; `None` where W = U.
    pub encoder: Option<Tensor<3>>,
    /// ρ: `[side_heads, 1, clip_width]`
    pub clip: Option<Tensor<3>>,
}

impl Correction {
    /// The correction of `layer` under a scheme, from a basis.
    ///
    /// # Panics
    /// If the scheme has no side code, or the basis another rank or side quantizer: [`Basis::check`] reports that as an error.
    pub fn new(key: &KeyScheme, basis: &Basis, layer: usize, device: &Device) -> Self {
        let tensor = |x: TensorData| Tensor::<3>::from_data(x, device);
        let parts = Parts {
            decoder: tensor(basis.decoder_of(layer)),
            encoder: (!basis.is_tied()).then(|| tensor(basis.encoder_of(layer))),
            clip: basis.clip_of(layer).map(tensor),
        };
        Self::of(key, parts)
    }

    /// A correction out of its tensors.
    ///
    /// # Panics
    /// If the scheme has no side code, or shapes disagree with it.
    pub fn of(key: &KeyScheme, parts: Parts) -> Self {
        let side = key.side.expect("a correction follows a scheme with a side code");
        let shape @ [side_heads, _, rank] = parts.decoder.dims();
        assert_eq!(rank, side.rank, "the basis has the rank that the scheme names");
        assert!(parts.encoder.as_ref().is_none_or(|w| w.dims() == shape), "W has the shape of U");
        let clip = [side_heads, 1, clip_width(side.scales, rank)];
        assert!(parts.clip.as_ref().is_none_or(|c| c.dims() == clip), "clip factors of shape {clip:?}");
        Self {
            decoder: Param::from_tensor(parts.decoder),
            encoder: parts.encoder.map(Param::from_tensor),
            clip: parts.clip.map(Param::from_tensor),
            side,
            group: key.base.flush.group,
            meta: key.base.meta,
        }
    }

    /// The tensors as they stand in the current graph.
    pub fn parts(&self) -> Parts {
        Parts {
            decoder: self.decoder(),
            encoder: self.encoder.as_ref().map(|w| w.val()),
            clip: self.clip.as_ref().map(|c| c.val()),
        }
    }

    /// U: `[side_heads, head_dim, rank]`
    pub fn decoder(&self) -> Tensor<3> {
        self.decoder.val()
    }

    /// Whether one matrix is encoder and decoder.
    pub fn is_tied(&self) -> bool {
        self.encoder.is_none()
    }

    /// ẑ of the residuals of whole groups, times the sign of the correction.
    ///
    /// # Shapes
    /// `[batch, kv_heads, groups · G, head_dim]` to `[batch, side_heads, groups · G, rank]`
    pub fn code(&self, residual: Tensor<4>) -> Tensor<4> {
        let z = self.encode(residual);
        let clip = self.clip.as_ref().map(|c| c.val());
        side_read_back(&self.side, self.group, self.meta, z, clip).mul_scalar(self.side.sign.factor())
    }

    /// What is stored of the residuals of whole groups: what [`Correction::code`] reads back, before the sign.
    pub(crate) fn store(&self, residual: Tensor<4>) -> Stored {
        store_side(&self.side, self.group, self.meta, self.encode(residual), self.clip.as_ref().map(|c| c.val()))
    }

    /// z = Wᵀe, one product for each group, so that a group's codes do not depend on how many groups are coded together.
    ///
    /// # Shapes
    /// As [`Correction::code`].
    pub fn encode(&self, residual: Tensor<4>) -> Tensor<4> {
        let encoder = self.encoder.as_ref().unwrap_or(&self.decoder).val();
        let [b, kv, n, d] = residual.dims();
        let [side_heads, _, r] = encoder.dims();
        let e = crate::seam::repeat_kv(residual, side_heads / kv);
        let e = e.reshape([b, side_heads, n / self.group, self.group, d]);
        let w = encoder.reshape([1, side_heads, 1, d, r]).expand([b, side_heads, n / self.group, d, r]);
        e.matmul(w).reshape([b, side_heads, n, r])
    }

    /// U ẑ, the correction that a side code stands for: `[batch, side_heads, tokens, head_dim]`.
    pub fn decode(&self, side: Tensor<4>) -> Tensor<4> {
        let decoder = self.decoder();
        let ([side_heads, d, r], [b, _, n, _]) = (decoder.dims(), side.dims());
        let u = decoder.swap_dims(1, 2).reshape([1, side_heads, r, d]).expand([b, side_heads, r, d]);
        side.matmul(u).reshape([b, side_heads, n, d])
    }

    /// q U, grouped like the side codes that it meets.
    ///
    /// # Shapes
    /// - `q`: `[batch, kv_heads, groups · new, head_dim]`, the query heads of a KV head one after the other
    /// - returns `[batch, side_heads, (heads / side_heads) · new, rank]`
    pub fn project_queries(&self, q: &Tensor<4>) -> Tensor<4> {
        project_queries(q, self.decoder())
    }

    /// The constraints: a tied U is made orthonormal again (QR retraction), clip factors return to [`LEAST_CLIP`]…1. To be called
    /// after each optimizer step.
    pub fn retracted(self) -> Self {
        let decoder = match self.encoder {
            None => self.decoder.map(orthonormal),
            Some(_) => self.decoder,
        };
        let clip = self.clip.map(|c| c.map(|c| c.clamp(LEAST_CLIP, 1.0)));
        Self { decoder, clip, ..self }
    }
}

/// q U for U `[side_heads, head_dim, rank]`: see [`Correction::project_queries`].
pub(crate) fn project_queries(q: &Tensor<4>, decoder: Tensor<3>) -> Tensor<4> {
    let [side_heads, d, r] = decoder.dims();
    let [b, kv, rows, _] = q.dims();
    let q = q.clone().reshape([b, side_heads, kv * rows / side_heads, d]);
    q.matmul(decoder.reshape([1, side_heads, d, r]).expand([b, side_heads, d, r]))
}

/// The Q of each matrix of `[n, rows, columns]`, with the signs that make R's diagonal positive: the retraction that is the identity on
/// orthonormal matrices. Computed in f64 on the host; the result is a leaf of no graph.
pub fn orthonormal(x: Tensor<3>) -> Tensor<3> {
    let x = crate::quant::plain(x);
    let [n, rows, columns] = x.dims();
    let (device, dtype) = (x.device(), x.dtype());
    let data: Vec<f64> = x.into_data_as::<f64>().try_to_vec().expect("the data was converted to f64");
    let retract = |x: &[f64]| {
        let qr = nalgebra::DMatrix::from_row_slice(rows, columns, x).qr();
        let signs = qr.r().diagonal().map(|v| if v < 0.0 { -1.0 } else { 1.0 });
        let q = qr.q() * nalgebra::DMatrix::from_diagonal(&signs);
        q.transpose().iter().copied().collect::<Vec<f64>>()
    };
    let all: Vec<f64> = data.chunks(rows * columns).flat_map(retract).collect();
    Tensor::from_data(TensorData::new(all, [n, rows, columns]), (&device, dtype))
}
