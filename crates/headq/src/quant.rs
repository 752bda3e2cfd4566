//! Quantizers: what turns keys, values and side coefficients into codes and back.
//!
//! `kivi`, `token`, side codes and values are asymmetric uniform quantizers x̂ = zero + code · scale; they differ in what shares a
//! range. `grid` has fixed steps, `rotated` fixed levels for each token's scale, `klt` codes transformed keys ([`crate::transform`]), and
//! errors may be passed on from channel to channel ([`crate::feedback`]). To add one, give it a name in
//! [`crate::scheme::Quantizer`], an arm in [`BaseQuantizer::read_back`] and what it stores in [`BaseQuantizer::stored_bits`].

use burn::module::{Module, Param};
use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor, TensorData};

use crate::feedback;
use crate::gaussian::{lloyd_max, uniform_step};
use crate::rotation::kept_rotation;
use crate::scheme::{BaseScheme, Meta, Quantizer, SideScales, SideScheme, ValueScheme};
use crate::stats::KeyStatistics;
use crate::transform::{self, Packed, Transform};

/// Uniform codes with their scale and zero, each broadcastable against the others.
#[derive(Debug, Clone)]
pub struct Affine<const D: usize> {
    /// Whole numbers from 0 to 2^bits − 1, as floats.
    pub codes: Tensor<D>,
    /// Step between codes; 0 where the range is empty.
    pub scale: Tensor<D>,
    /// Value of code 0.
    pub zero: Tensor<D>,
    /// Highest code, 2^bits − 1.
    pub top: f64,
}

/// Rounds to what the stored scale or zero can hold. Beyond the largest half-precision number the range saturates.
pub(crate) fn stored<const D: usize>(x: Tensor<D>, meta: Meta) -> Tensor<D> {
    match (meta, x.dtype()) {
        (Meta::F32, DType::F32) => x,
        (Meta::F32, wide) => x.cast(FloatDType::F32).cast(float_dtype(wide)),
        (Meta::F16, wide) => {
            let most = half::f16::MAX.to_f32();
            let x = x.clamp(-most, most);
            match x.device().supports_dtype(DType::F16) {
                true => x.cast(FloatDType::F16).cast(float_dtype(wide)),
                false => nearest_half(x.cast(FloatDType::F32)).cast(float_dtype(wide)),
            }
        }
    }
}

/// Rounded to half precision, as dense tokens of an f16 cache are; beyond its largest number they saturate.
pub(crate) fn rounded_to_half<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    stored(x, Meta::F16)
}

/// The nearest half-precision number of a finite f32, for devices that have no such type.
///
/// Products and differences of f32 that round to 11 significant bits (Veltkamp's splitting), and below 2⁻¹⁴ to multiples of 2⁻²⁴, the
/// spacing of f32 next to ¾. The gradient is that of the identity, as of a cast.
fn nearest_half<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let spread = x.clone() * 8193.0;
    let normal = spread.clone() - (spread - x.clone());
    let small = (x.clone() + 0.75) - 0.75;
    let is_small = x.abs().lower_elem(2f32.powi(-14));
    normal.mask_where(is_small, small)
}

pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

impl<const D: usize> Affine<D> {
    /// Codes `x` with one min/max range along `axis` for each index of the other axes.
    ///
    /// `range` is the factor ρ on each range's half-width about its middle; what lies outside is clipped. Scale and zero are
    /// rounded to `meta` before coding, so that the codes belong to the scale that is stored.
    pub fn quantize(x: Tensor<D>, axis: usize, bits: u32, range: f32, meta: Meta) -> Self {
        let (low, high) = (x.clone().min_dim(axis), x.clone().max_dim(axis));
        let (low, width) = if range == 1.0 {
            (low.clone(), high - low)
        } else {
            let middle = (high.clone() + low.clone()).mul_scalar(0.5);
            let width = (high - low).mul_scalar(range);
            (middle - width.clone().mul_scalar(0.5), width)
        };
        Self::within(x, low, width, bits, meta)
    }

    /// The same with a factor ρ for each range: `clip` is broadcastable against `x` with a length of 1 along `axis`. Where ρ = 1 the
    /// codes are exactly those of the whole range.
    pub fn quantize_clipped(x: Tensor<D>, axis: usize, bits: u32, clip: Tensor<D>, meta: Meta) -> Self {
        let (low, high) = (x.clone().min_dim(axis), x.clone().max_dim(axis));
        let whole = high - low.clone();
        let margin = whole.clone() * (-clip.clone() + 1.0).mul_scalar(0.5);
        Self::within(x, low + margin, whole * clip, bits, meta)
    }

    /// Codes `x` with ranges that begin at `low`.
    fn within(x: Tensor<D>, low: Tensor<D>, width: Tensor<D>, bits: u32, meta: Meta) -> Self {
        let top = f64::from((1u32 << bits) - 1);
        let scale = stored(width.div_scalar(top), meta);
        let zero = stored(low, meta);
        let divisor = scale.clone().mask_fill(scale.clone().equal_scalar(0.0), 1.0);
        let codes = ((x - zero.clone()) / divisor).round().clamp(0.0, top);
        // An empty range has one code, whatever rounding of the zero did to the quotient.
        let codes = codes * scale.clone().not_equal_scalar(0.0).float().cast(float_dtype(scale.dtype()));
        Self { codes, scale, zero, top }
    }

    /// x̂ = zero + code · scale.
    pub fn dequantize(&self) -> Tensor<D> {
        self.codes.clone() * self.scale.clone() + self.zero.clone()
    }

    /// Where `x` lies inside the clip range, bounds included.
    pub fn inside(&self, x: Tensor<D>) -> Tensor<D, Bool> {
        let high = self.zero.clone() + self.scale.clone().mul_scalar(self.top);
        let shape = x.shape();
        let above = x.clone().greater_equal(self.zero.clone().expand(shape.clone()));
        above.bool_and(x.lower_equal(high.expand(shape)))
    }
}

/// What the codes of `x` read back as, with the straight-through gradient.
///
/// Forward: exactly `x̂`. Backward, where `x` is part of an autodiff graph: identity inside the clip range, zero outside; scale and
/// zero are constants (DESIGN §5).
fn read_back<const D: usize>(x: Tensor<D>, axis: usize, bits: u32, range: f32, meta: Meta) -> Tensor<D> {
    straight_through(x, |x| {
        let affine = Affine::quantize(x.clone(), axis, bits, range, meta);
        let inside = affine.inside(x);
        (affine.dequantize(), inside)
    })
}

/// The same with learnable clip factors ρ, one for each index of the axes along which `clip` is not 1 long.
///
/// Backward for x as ever. For ρ (LSQ, arXiv:1902.08153, and LSQ+, arXiv:2004.09576, about a range's middle): with the range l…h of
/// the data, x̂ = zero + s·code, s = ρ(h − l)/top and zero = l + (1 − ρ)(h − l)/2, rounding has the gradient of the identity, so that
/// ∂x̂/∂ρ = (code − (x − zero)/s)·(h − l)/top inside the clip range, −(h − l)/2 below it and +(h − l)/2 above it.
fn clipped_read_back<const D: usize>(x: Tensor<D>, clip: Tensor<D>, axis: usize, bits: u32, meta: Meta) -> Tensor<D> {
    let (fixed, factor) = (plain(x.clone()), plain(clip.clone()));
    let affine = Affine::quantize_clipped(fixed.clone(), axis, bits, factor.clone(), meta);
    let read = affine.dequantize();
    if !x.is_autodiff() && !clip.is_autodiff() {
        return read;
    }
    let dtype = float_dtype(fixed.dtype());
    let inside = affine.inside(fixed.clone());
    let whole = fixed.clone().max_dim(axis) - fixed.clone().min_dim(axis);
    let divisor = affine.scale.clone().mask_fill(affine.scale.clone().equal_scalar(0.0), 1.0);
    let rounding = affine.codes.clone() - (fixed.clone() - affine.zero.clone()) / divisor;
    // Outside, codes are 0 or top: ∓½.
    let slope = affine.codes.clone().div_scalar(affine.top).sub_scalar(0.5);
    let slope = slope.mask_where(inside.clone(), rounding.div_scalar(affine.top)) * whole;
    read + inside.float().cast(dtype) * (x - fixed) + slope * (clip - factor)
}

/// The tensor outside any autodiff graph.
pub(crate) fn plain<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if x.is_autodiff() { x.inner() } else { x }
}

/// What whole groups are stored as: whole numbers, and the scales and zeros that turn them back.
///
/// x̂ = zero + scale · level(code), where level is the code itself but for quantizers with a table of levels.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    /// 0 … 2^bits − 1, as floats: `[batch, heads, groups · G, width]`
    pub codes: Tensor<4>,
    /// As stored; `None` where calibration fixed it. `[batch, heads, groups, width]` where the tokens of a group share a range,
    /// `[batch, heads, groups · G, width / c]` where c channels of a token do.
    pub scale: Option<Tensor<4>>,
    /// As `scale`; `None` also where codes are symmetric about 0.
    pub zero: Option<Tensor<4>>,
}

/// What shares one range, in a block of whole groups `[batch, heads, groups · G, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Each channel over the G tokens of a group.
    Group(usize),
    /// Each token over c neighbouring channels; `None` is all of them.
    Channels(Option<usize>),
}

impl Axis {
    pub(crate) fn of_side(side: &SideScheme, group: usize) -> Self {
        match side.scales {
            SideScales::Group => Axis::Group(group),
            SideScales::Token => Axis::Channels(None),
        }
    }

    /// Stored scale and zero bits for each coded element of a head `width` wide.
    pub(crate) fn meta_bits(self, width: usize, meta: Meta) -> f64 {
        let shared = match self {
            Axis::Group(g) => g,
            Axis::Channels(c) => c.unwrap_or(width),
        };
        2.0 * meta.bits() / shared as f64
    }

    /// The shape in which one axis has a range, and that axis.
    fn split(self, [b, h, n, d]: [usize; 4]) -> ([usize; 5], usize) {
        match self {
            Axis::Group(g) => ([b, h, n / g, g, d], 3),
            Axis::Channels(c) => {
                let c = c.unwrap_or(d);
                ([b, h, n, d / c, c], 4)
            }
        }
    }

    fn read_back(self, x: Tensor<4>, bits: u32, range: f32, meta: Meta) -> Tensor<4> {
        let shape = x.dims();
        let (split, axis) = self.split(shape);
        read_back(x.reshape(split), axis, bits, range, meta).reshape(shape)
    }

    /// What [`Axis::read_back`], or with clip factors [`Axis::clipped_read_back`], reads back.
    fn store(self, x: Tensor<4>, bits: u32, range: f32, clip: Option<Tensor<3>>, meta: Meta) -> Stored {
        let shape @ [b, h, _, _] = x.dims();
        let (split, axis) = self.split(shape);
        let x = x.reshape(split);
        let affine = match clip {
            None => Affine::quantize(x, axis, bits, range, meta),
            Some(clip) => {
                let [heads, _, width] = clip.dims();
                Affine::quantize_clipped(x, axis, bits, plain(clip).reshape([1, heads, 1, 1, width]), meta)
            }
        };
        let ranges = |x: Tensor<5>| {
            let [_, _, rows, a, c] = x.dims();
            x.reshape([b, h, rows, a * c])
        };
        Stored {
            codes: affine.codes.reshape(shape),
            scale: Some(ranges(affine.scale)),
            zero: Some(ranges(affine.zero)),
        }
    }

    /// The same with clip factors `[heads, 1, width]`, or `[heads, 1, 1]` where channels share a range.
    fn clipped_read_back(self, x: Tensor<4>, bits: u32, clip: Tensor<3>, meta: Meta) -> Tensor<4> {
        let shape = x.dims();
        let (split, axis) = self.split(shape);
        let [heads, _, width] = clip.dims();
        let clip = clip.reshape([1, heads, 1, 1, width]);
        clipped_read_back(x.reshape(split), clip, axis, bits, meta).reshape(shape)
    }
}

/// A base quantizer B_b, ready for the keys of one layer.
#[derive(Module, Debug)]
pub struct BaseQuantizer {
    /// μ of `center`: `[1, kv_heads, 1, head_dim]`.
    offset: Option<Tensor<4>>,
    /// Δ of `grid`: `[1, kv_heads, 1, head_dim]`.
    step: Option<Tensor<4>>,
    /// Learned clip factors, times the scheme's ρ: `[kv_heads, 1, 1]` of `kivi` and `token`, `[kv_heads, 1, head_dim]` of `klt`; `None` is 1
    /// throughout.
    clip: Option<Param<Tensor<3>>>,
    /// Learned E of `klt`: `[kv_heads, head_dim, head_dim]`; `None` is 0 throughout.
    analysis: Option<Param<Tensor<3>>>,
    /// Learned F of `klt`, as `analysis`.
    synthesis: Option<Param<Tensor<3>>>,
    /// M of score-aware rounding: `[1, kv_heads, head_dim, head_dim]`.
    factor: Option<Tensor<4>>,
    /// Of `klt`, as calibrated.
    transform: Option<Transform>,
    #[module(skip)]
    base: BaseScheme,
}

/// What can be learned of a base quantizer, as tensors of one graph.
#[derive(Debug, Clone, Default)]
pub struct BaseParts {
    /// Clip factors, times the scheme's ρ: `[kv_heads, 1, 1]` of `kivi` and `token`, on the half-width of ranges; `[kv_heads, 1, head_dim]` of
    /// `klt`, on ranges, steps or levels. `None` is 1 throughout.
    pub clip: Option<Tensor<3>>,
    /// E and F of `klt` ([`crate::transform`]): `[kv_heads, head_dim, head_dim]` each. `None` is 0 throughout.
    pub transform: Option<[Tensor<3>; 2]>,
}

impl BaseQuantizer {
    /// A quantizer that needs no calibration.
    ///
    /// # Panics
    /// If it does ([`BaseScheme::is_static`]): use [`BaseQuantizer::calibrated`].
    pub fn new(base: BaseScheme) -> Self {
        assert!(!base.is_static(), "{base} needs statistics of the keys");
        Self {
            offset: None,
            step: None,
            clip: None,
            analysis: None,
            synthesis: None,
            factor: None,
            transform: None,
            base,
        }
    }

    /// A quantizer with what one layer's statistics say, as far as it needs them.
    pub fn calibrated(base: BaseScheme, keys: &KeyStatistics, layer: usize, device: &Device) -> Self {
        let tensor =
            |values: Vec<f32>| Tensor::from_data(TensorData::new(values, [1, keys.kv_heads, 1, keys.head_dim]), device);
        let spread = if base.center { &keys.deviation } else { &keys.rms };
        Self {
            offset: base.center.then(|| tensor(keys.layer(&keys.mean, layer).to_vec())),
            step: (base.quantizer == Quantizer::Grid)
                .then(|| tensor(grid_steps(&base, keys.layer(spread, layer), keys.head_dim))),
            clip: None,
            analysis: None,
            synthesis: None,
            factor: base.lambda().map(|lambda| {
                let d = keys.head_dim;
                let factors = keys.moments_of(layer).iter().map(|m| feedback::factor(&m.queries, lambda).transpose());
                let all: Vec<f32> = factors.flat_map(|m| m.iter().map(|&v| v as f32).collect::<Vec<_>>()).collect();
                Tensor::from_data(TensorData::new(all, [1, keys.kv_heads, d, d]), device)
            }),
            transform: (base.quantizer == Quantizer::Klt).then(|| Transform::new(&base, keys, layer, device)),
            base,
        }
    }

    /// The same with other clip factors.
    ///
    /// # Shapes
    /// `clip`: as [`BaseParts::clip`]
    ///
    /// # Panics
    /// If the quantizer has none ([`BaseScheme::clip_factors`]), or so many for each head.
    pub fn with_clip(self, clip: Tensor<3>) -> Self {
        let [_, _, found] = clip.dims();
        let width = self.transform.as_ref().map_or(1, Transform::width);
        let expected = self.base.clip_factors(width);
        assert_eq!(Some(found), expected, "clip factors of each head of {}", self.base);
        Self { clip: Some(Param::from_tensor(clip)), ..self }
    }

    /// The same with other learned parts; those that are `None` stay as they are.
    ///
    /// # Panics
    /// As [`BaseQuantizer::with_clip`], and if E and F are given to another quantizer than `klt`, or in another shape.
    pub fn with_parts(self, parts: BaseParts) -> Self {
        let BaseParts { clip, transform } = parts;
        let mut own = match clip {
            None => self,
            Some(clip) => self.with_clip(clip),
        };
        if let Some(matrices) = transform {
            let shape = own.transform.as_ref().map(|own| own.query_side().dims());
            assert!(matrices.iter().all(|x| Some(x.dims()) == shape), "E and F of {} are {shape:?}", own.base);
            let [analysis, synthesis] = matrices.map(|x| Some(Param::from_tensor(x)));
            (own.analysis, own.synthesis) = (analysis, synthesis);
        }
        own
    }

    /// Learned clip factors as a tensor of the current graph, shaped as [`BaseParts::clip`]; `None` where there are none.
    pub fn clip(&self) -> Option<Tensor<3>> {
        self.clip.as_ref().map(|clip| clip.val())
    }

    /// All that is learned, as tensors of the current graph.
    pub fn parts(&self) -> BaseParts {
        let transform = self.analysis.as_ref().zip(self.synthesis.as_ref()).map(|(e, f)| [e.val(), f.val()]);
        BaseParts { clip: self.clip(), transform }
    }

    /// The scheme that it follows.
    pub fn scheme(&self) -> &BaseScheme {
        &self.base
    }

    /// Keys as the cache holds them, dense ones too: k − μ under `center`, k otherwise. Attention cannot tell them apart.
    ///
    /// # Shapes
    /// `[batch, kv_heads, tokens, head_dim]`, in and out
    pub fn shift(&self, keys: Tensor<4>) -> Tensor<4> {
        match &self.offset {
            None => keys,
            Some(offset) => {
                let dtype = float_dtype(keys.dtype());
                keys - offset.clone().cast(dtype)
            }
        }
    }

    /// What [`BaseQuantizer::shift`] was given.
    pub(crate) fn unshift(&self, shifted: Tensor<4>) -> Tensor<4> {
        match &self.offset {
            None => shifted,
            Some(offset) => {
                let dtype = float_dtype(shifted.dtype());
                shifted + offset.clone().cast(dtype)
            }
        }
    }

    /// Base reconstruction k̂ = B_b(k) of whole groups of shifted keys, with the straight-through gradient.
    ///
    /// # Shapes
    /// `[batch, kv_heads, groups · G, head_dim]`, in and out
    pub fn read_back(&self, keys: Tensor<4>) -> Tensor<4> {
        let base = &self.base;
        if let Some(factor) = &self.factor {
            return self.passed_on(keys, factor);
        }
        match base.quantizer {
            Quantizer::Kivi => self.ranged(Axis::Group(base.flush.group), keys),
            Quantizer::Token => self.ranged(Axis::Channels(base.channels), keys),
            Quantizer::Grid => {
                let step = self.step.clone().expect("a grid is made with its steps");
                straight_through(keys, |keys| grid(keys, step, base.bits.ceil()))
            }
            Quantizer::Rotated => rotated(keys, base),
            Quantizer::Klt => self.transform().read_back(keys),
        }
    }

    /// The transform of `klt` with what was learned for it; `None` of other quantizers.
    fn learned_transform(&self) -> Option<Transform> {
        self.transform.as_ref().map(|own| own.learned(&self.parts()))
    }

    fn transform(&self) -> Transform {
        self.learned_transform().expect("klt is made with its transform")
    }

    /// Ranges of per-channel quantizers for score-aware rounding, from the keys as they are: scales and zeros `[batch, heads, groups,
    /// width]`, and how far beyond the outermost levels the clip range reaches, in steps.
    fn channel_ranges(&self, keys: &Tensor<4>) -> (Tensor<4>, Tensor<4>, f64) {
        let (base, [b, h, n, d]) = (&self.base, keys.dims());
        let groups = n / base.flush.group;
        match &self.step {
            None => {
                let x = keys.clone().reshape([b, h, groups, base.flush.group, d]);
                let affine = Affine::quantize(x, 3, base.bits.ceil(), base.range, base.meta);
                (affine.scale.reshape([b, h, groups, d]), affine.zero.reshape([b, h, groups, d]), 0.0)
            }
            Some(step) => {
                let step = plain(step.clone()).cast(float_dtype(keys.dtype()));
                let lowest = 0.5 - f64::from(1u32 << (base.bits.ceil() - 1));
                let all = |x: Tensor<4>| x.expand([b, h, groups, d]);
                (all(step.clone()), all(step.mul_scalar(lowest)), 0.5)
            }
        }
    }

    /// Score-aware rounding, with the straight-through gradient where what was rounded lies inside the clip range.
    fn passed_on(&self, keys: Tensor<4>, factor: &Tensor<4>) -> Tensor<4> {
        straight_through(keys, |keys| {
            let (keys, factor) = (plain(keys), plain(factor.clone()));
            let shape @ [b, h, n, d] = keys.dims();
            let (scale, zero, edge) = self.channel_ranges(&keys);
            let rounded = feedback::round(keys, scale.clone(), zero.clone(), self.top(), &factor);
            let each = |x: Tensor<4>| {
                let groups = x.dims()[2];
                x.unsqueeze_dim::<5>(3).expand([b, h, groups, n / groups, d]).reshape(shape)
            };
            let (scale, zero) = (each(scale), each(zero));
            let read = rounded.codes * scale.clone() + zero.clone();
            let low = zero.clone() - scale.clone().mul_scalar(edge);
            let high = zero + scale.mul_scalar(self.top() + edge);
            (read, rounded.corrected.clone().greater_equal(low).bool_and(rounded.corrected.lower_equal(high)))
        })
    }

    /// The highest code.
    fn top(&self) -> f64 {
        f64::from((1u32 << self.base.bits.ceil()) - 1)
    }

    /// Numbers that decide what codes mean, beside the scheme: means, steps and transforms.
    pub(crate) fn constants(&self) -> Vec<f32> {
        let flat = |x: &Option<Tensor<4>>| x.clone().map(|x| x.flatten::<1>(0, 3));
        let transform = self.learned_transform().map(|own| own.constants()).unwrap_or_default();
        let all = flat(&self.offset).into_iter().chain(flat(&self.step)).chain(transform);
        all.flat_map(|x| plain(x).into_data_as::<f32>().try_to_vec::<f32>().expect("converted to f32")).collect()
    }

    /// What is stored of whole groups of shifted keys: what [`BaseQuantizer::read_back`] reads back.
    pub(crate) fn store(&self, keys: Tensor<4>) -> Stored {
        let base = &self.base;
        if let Some(factor) = &self.factor {
            let (scale, zero, _) = self.channel_ranges(&keys);
            let codes = feedback::round(keys, scale.clone(), zero.clone(), self.top(), factor).codes;
            let kept = self.step.is_none();
            return Stored { codes, scale: kept.then_some(scale), zero: kept.then_some(zero) };
        }
        let ranged = |axis: Axis, keys| {
            let clip = self.clip().map(|clip| clip.mul_scalar(base.range));
            axis.store(keys, base.bits.ceil(), base.range, clip, base.meta)
        };
        match base.quantizer {
            Quantizer::Kivi => ranged(Axis::Group(base.flush.group), keys),
            Quantizer::Token => ranged(Axis::Channels(base.channels), keys),
            Quantizer::Grid => {
                let step = self.step.clone().expect("a grid is made with its steps");
                let half = f64::from(1u32 << (base.bits.ceil() - 1));
                Stored { codes: grid_codes(keys, step, half) + half, scale: None, zero: None }
            }
            Quantizer::Rotated => rotated_codes(keys, base),
            Quantizer::Klt => self.transform().store(keys),
        }
    }

    /// How coefficients are packed, where keys are transformed.
    pub(crate) fn packed(&self) -> Option<Packed> {
        self.learned_transform().map(|own| own.packed())
    }

    /// Sᵀ of each head, `[kv_heads, head_dim, head_dim]`, which turns a query to the coefficients that it meets.
    pub(crate) fn query_side(&self) -> Option<Tensor<3>> {
        self.learned_transform().map(|own| own.query_side())
    }

    /// μ of `center`: `[1, kv_heads, 1, head_dim]`.
    pub(crate) fn offset(&self) -> Option<Tensor<4>> {
        self.offset.clone()
    }

    /// Δ of fixed grids and the value of code 0, −(2^{b−1} − ½)Δ, each `[kv_heads, head_dim]`.
    pub(crate) fn fixed_ranges(&self) -> Option<(Vec<f32>, Vec<f32>)> {
        let step: Vec<f32> = self.step.clone()?.into_data_as::<f32>().try_to_vec().expect("converted to f32");
        let lowest = 0.5 - f64::from(1u32 << (self.base.bits.ceil() - 1));
        let zero = step.iter().map(|&s| (f64::from(s) * lowest) as f32).collect();
        Some((step, zero))
    }

    fn ranged(&self, axis: Axis, keys: Tensor<4>) -> Tensor<4> {
        let base = &self.base;
        match self.clip() {
            None => axis.read_back(keys, base.bits.ceil(), base.range, base.meta),
            Some(clip) => axis.clipped_read_back(keys, base.bits.ceil(), clip.mul_scalar(base.range), base.meta),
        }
    }

    /// Code bits per key element: the codes and their stored scales and zeros. What is fixed by calibration is part of the model.
    ///
    /// How many coefficients of `klt` have a scale only calibration says ([`transform::code_bits`]): here it is the most that they can be.
    pub fn stored_bits(base: &BaseScheme, head_dim: usize) -> f64 {
        let bits = base.bits.mean();
        let channels = base.channels.unwrap_or(head_dim) as f64;
        match base.quantizer {
            Quantizer::Kivi => bits + Axis::Group(base.flush.group).meta_bits(head_dim, base.meta),
            Quantizer::Token => bits + Axis::Channels(base.channels).meta_bits(head_dim, base.meta),
            Quantizer::Grid => bits,
            // One scale, no zero.
            Quantizer::Rotated => bits + base.meta.bits() / channels,
            Quantizer::Klt => transform::most_code_bits(base, head_dim),
        }
    }
}

/// Δ of each channel of a layer's heads, `[kv_heads, head_dim]`: the best step for a unit Gaussian times ρ times the root mean square
/// of `spread` over the c channels that share it.
fn grid_steps(base: &BaseScheme, spread: &[f32], head_dim: usize) -> Vec<f32> {
    let channels = base.channels.unwrap_or(head_dim);
    let unit = uniform_step(base.bits.ceil()) * f64::from(base.range);
    let step = |shared: &[f32]| {
        let mean_square = shared.iter().map(|&s| f64::from(s).powi(2)).sum::<f64>() / channels as f64;
        (unit * mean_square.sqrt()) as f32
    };
    spread.chunks(channels).flat_map(|shared| vec![step(shared); channels]).collect()
}

/// Forward: exactly what `code` reads back. Backward, where `x` is part of an autodiff graph: identity where `code` says that x lies
/// inside the clip range, zero outside (DESIGN §5).
pub(crate) fn straight_through<const D: usize>(
    x: Tensor<D>,
    code: impl FnOnce(Tensor<D>) -> (Tensor<D>, Tensor<D, Bool>),
) -> Tensor<D> {
    if !x.is_autodiff() {
        return code(x).0;
    }
    let fixed = x.clone().detach();
    let dtype = float_dtype(fixed.dtype());
    let (read, inside) = code(fixed.clone());
    read.detach() + inside.float().cast(dtype).detach() * (x - fixed)
}

/// (⌊x/Δ⌋ + ½)Δ on 2^bits levels symmetric about 0, and where x lies inside them.
fn grid(x: Tensor<4>, step: Tensor<4>, bits: u32) -> (Tensor<4>, Tensor<4, Bool>) {
    let half = f64::from(1u32 << (bits - 1));
    let step = step.cast(float_dtype(x.dtype()));
    let codes = grid_codes(x.clone(), step.clone(), half);
    let inside = x.clone().abs().lower_equal(step.clone().mul_scalar(half).expand(x.shape()));
    ((codes + 0.5) * step, inside)
}

/// ⌊x/Δ⌋ on `2 · half` levels.
fn grid_codes(x: Tensor<4>, step: Tensor<4>, half: f64) -> Tensor<4> {
    let divisor = step.clone().mask_fill(step.equal_scalar(0.0), 1.0);
    (x / divisor).floor().clamp(-half, half - 1.0)
}

/// Rotated, each token's c neighbouring channels divided by their root mean square, the nearest Lloyd–Max level taken, and back.
fn rotated(keys: Tensor<4>, base: &BaseScheme) -> Tensor<4> {
    let [b, h, n, d] = keys.dims();
    let g = base.flush.group;
    let (turned, matrix) = turn(keys, base);
    let read = straight_through(turned, |x| {
        let (scaled, scale) = scaled_by_rms(x, base.meta);
        let (levels, inside) = nearest_gaussian_level(scaled, base.bits.ceil());
        (levels * scale, inside)
    });
    read.reshape([b, h, n / g, g, d]).matmul(matrix.swap_dims(3, 4)).reshape([b, h, n, d])
}

/// What is stored of rotated keys: indices of levels, and each token's scales.
fn rotated_codes(keys: Tensor<4>, base: &BaseScheme) -> Stored {
    let shape @ [b, h, n, _] = keys.dims();
    let (scaled, scale) = scaled_by_rms(turn(keys, base).0, base.meta);
    let chunks = scaled.dims()[3];
    let codes = gaussian_codes(scaled.flatten(0, 4), base.bits.ceil()).float();
    Stored { codes: codes.reshape(shape), scale: Some(scale.reshape([b, h, n, chunks])), zero: None }
}

/// Rotated keys `[batch, heads, tokens, width / c, c]`, and the rotation of each group.
fn turn(keys: Tensor<4>, base: &BaseScheme) -> (Tensor<5>, Tensor<5>) {
    let [b, h, n, d] = keys.dims();
    let (g, c) = (base.flush.group, base.channels.unwrap_or(d));
    let matrix = TensorData::new(kept_rotation(d).to_vec(), [1, 1, 1, d, d]);
    let matrix = Tensor::<5>::from_data(matrix, &keys.device());
    let matrix = matrix.cast(float_dtype(keys.dtype())).expand([b, h, n / g, d, d]);
    // One product for each group, so that a group's codes do not depend on how many groups are coded together.
    let turned = keys.reshape([b, h, n / g, g, d]).matmul(matrix.clone());
    (turned.reshape([b, h, n, d / c, c]), matrix)
}

/// x over its root mean square along the last axis, as that is stored.
fn scaled_by_rms(x: Tensor<5>, meta: Meta) -> (Tensor<5>, Tensor<5>) {
    let scale = stored(x.clone().square().mean_dim(4).sqrt(), meta);
    let divisor = scale.clone().mask_fill(scale.clone().equal_scalar(0.0), 1.0);
    (x / divisor, scale)
}

/// The nearest Lloyd–Max level of each number, and where it lies between the outermost levels.
fn nearest_gaussian_level<const D: usize>(x: Tensor<D>, bits: u32) -> (Tensor<D>, Tensor<D, Bool>) {
    let table = lloyd_max(bits);
    let (shape, device, dtype) = (x.shape(), x.device(), float_dtype(x.dtype()));
    let outermost = table.levels[table.levels.len() - 1];
    let inside = x.clone().abs().lower_equal_scalar(outermost);
    let codes = gaussian_codes(x.flatten(0, D - 1), bits);
    (row(&table.levels, &device, dtype).select(0, codes).reshape(shape), inside)
}

/// Index of the nearest Lloyd–Max level of each number.
fn gaussian_codes(x: Tensor<1>, bits: u32) -> Tensor<1, Int> {
    let device = x.device();
    // Binary search: each round halves the 2^bits candidates that begin at `low`.
    let thresholds = row(&lloyd_max(bits).thresholds, &device, float_dtype(x.dtype()));
    let mut low: Tensor<1, Int> = Tensor::zeros(x.dims(), &device);
    for round in (0..bits).rev() {
        let half = 1i64 << round;
        let middle = thresholds.clone().select(0, low.clone().add_scalar(half - 1));
        low = low + x.clone().greater(middle).int().mul_scalar(half);
    }
    low
}

fn row(values: &[f64], device: &Device, dtype: FloatDType) -> Tensor<1> {
    let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
    let length = values.len();
    Tensor::<1>::from_data(TensorData::new(values, [length]), device).cast(dtype)
}

/// Side reconstruction ẑ = Q_s(z) of whole groups of G tokens, with the straight-through gradient.
///
/// `clip` holds learned clip factors ρ, each on the half-width of a min/max range about its middle; `None` is 1 throughout.
///
/// # Shapes
/// - `z`: `[batch, side_heads, groups · G, rank]`, in and out
/// - `clip`: `[side_heads, 1, rank]` under `scales=group`, `[side_heads, 1, 1]` under `scales=token` ([`clip_width`])
pub fn side_read_back(side: &SideScheme, group: usize, meta: Meta, z: Tensor<4>, clip: Option<Tensor<3>>) -> Tensor<4> {
    let axis = Axis::of_side(side, group);
    match clip {
        None => axis.read_back(z, side.bits, 1.0, meta),
        Some(clip) => axis.clipped_read_back(z, side.bits, clip, meta),
    }
}

/// What is stored of side codes: what [`side_read_back`] reads back.
pub(crate) fn store_side(side: &SideScheme, group: usize, meta: Meta, z: Tensor<4>, clip: Option<Tensor<3>>) -> Stored {
    Axis::of_side(side, group).store(z, side.bits, 1.0, clip, meta)
}

/// Clip factors of each side head: one for each coefficient where it has ranges of its own, or one for all of them.
pub fn clip_width(scales: SideScales, rank: usize) -> usize {
    match scales {
        SideScales::Group => rank,
        SideScales::Token => 1,
    }
}

/// Value reconstruction at a number of bits.
///
/// # Shapes
/// `[batch, kv_heads, tokens, head_dim]`, in and out
pub(crate) fn value_read_back_at(value: &ValueScheme, bits: u32, values: Tensor<4>) -> Tensor<4> {
    Axis::Channels(value.channels).read_back(values, bits, value.range, value.meta)
}

/// What is stored of values at a number of bits: what [`value_read_back_at`] reads back.
pub(crate) fn store_values_at(value: &ValueScheme, bits: u32, values: Tensor<4>) -> Stored {
    Axis::Channels(value.channels).store(values, bits, value.range, None, value.meta)
}

/// Code bits per value element of values that are not transformed: codes, scales and zeros, and the map that says which token has how
/// many bits.
pub fn value_stored_bits(value: &ValueScheme, head_dim: usize) -> f64 {
    let map = if value.policy.mixed() { 1.0 / head_dim as f64 } else { 0.0 };
    value.bits.mean() + Axis::Channels(value.channels).meta_bits(head_dim, value.meta) + map
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};
    use half::f16;

    use super::*;

    /// Element by element in f64, from the definition: f16 scale and zero first, then the nearest code.
    fn brute_force(x: &[f32], bits: u32) -> Vec<f64> {
        let top = f64::from((1u32 << bits) - 1);
        let low = x.iter().copied().fold(f32::INFINITY, f32::min);
        let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let zero = f16::from_f32(low).to_f64();
        let scale = f16::from_f32((high - low) / top as f32).to_f64();
        x.iter()
            .map(|&v| {
                let candidates = (0..=top as u32).map(|c| zero + f64::from(c) * scale);
                candidates.min_by(|a, b| (a - f64::from(v)).abs().total_cmp(&(b - f64::from(v)).abs())).unwrap()
            })
            .collect()
    }

    #[test]
    fn halves_without_the_type_are_those_of_the_type() {
        // Every half, its neighbourhood, and points between halves.
        let halves = (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f32()).filter(|x| x.is_finite());
        let x: Vec<f32> =
            halves.flat_map(|h| [h, h * 1.0001, h * 1.0003, h + 1e-8]).filter(|x| x.abs() <= 65504.0).collect();
        let tensor = Tensor::<1>::from_data(TensorData::new(x.clone(), [x.len()]), &Device::flex());
        let found: Vec<f32> = nearest_half(tensor).try_into_vec_as().unwrap();
        for (x, found) in x.iter().zip(found) {
            assert_eq!(found, half::f16::from_f32(*x).to_f32(), "{x:e}");
        }
    }

    #[test]
    fn every_width_reads_back_the_nearest_stored_level() {
        let device = Device::flex();
        for bits in 1..=8 {
            let base = format!("kivi-{bits}(g=8,r=0)").parse::<BaseScheme>().unwrap();
            let x = crate::normal([2, 3, 24, 5], 3, &device) * 2.0 + 1.0;
            let read = BaseQuantizer::new(base).read_back(x.clone());
            let (x, read): (Vec<f32>, Vec<f32>) = (x.try_into_vec_as().unwrap(), read.try_into_vec_as().unwrap());
            for bh in 0..6 {
                for group in 0..3 {
                    for channel in 0..5 {
                        let at = |i: usize| (bh * 24 + group * 8 + i) * 5 + channel;
                        let column: Vec<f32> = (0..8).map(|i| x[at(i)]).collect();
                        for (i, expected) in brute_force(&column, bits).into_iter().enumerate() {
                            assert!((f64::from(read[at(i)]) - expected).abs() < 1e-5, "{bits} bits");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn token_shares_ranges_among_neighbouring_channels_only() {
        let device = Device::flex();
        let base = "token-3(c=4,r=0)".parse::<BaseScheme>().unwrap();
        let x = crate::normal([1, 2, 3, 8], 4, &device);
        let read: Vec<f32> = BaseQuantizer::new(base).read_back(x.clone()).try_into_vec_as().unwrap();
        let x: Vec<f32> = x.try_into_vec_as().unwrap();
        for (x, read) in x.chunks(4).zip(read.chunks(4)) {
            for (expected, found) in brute_force(x, 3).into_iter().zip(read) {
                assert!((f64::from(*found) - expected).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn constant_and_huge_channels_stay_finite() {
        let device = Device::flex();
        let base = "kivi-2(g=4,r=0)".parse::<BaseScheme>().unwrap();
        let x = Tensor::<4>::from_data(
            TensorData::new(vec![0.1f32, 1e9, 0.1, -1e9, 0.1, 0.0, 0.1, 5.0], [1, 1, 4, 2]),
            &device,
        );
        let read: Vec<f32> = BaseQuantizer::new(base).read_back(x).try_into_vec_as().unwrap();
        assert!(read.iter().all(|v| v.is_finite()));
        let tenth = f16::from_f32(0.1).to_f32();
        assert!(read.iter().step_by(2).all(|&v| v == tenth), "a constant channel is its zero: {read:?}");
    }

    #[test]
    fn clipping_halves_the_range_about_its_middle() {
        let device = Device::flex();
        let base = "kivi-8(g=3,r=0,range=0.5,meta=f32)".parse::<BaseScheme>().unwrap();
        let x = Tensor::<4>::from_data(TensorData::new(vec![-4.0f32, 1.0, 8.0], [1, 1, 3, 1]), &device);
        let read: Vec<f32> = BaseQuantizer::new(base).read_back(x).try_into_vec_as().unwrap();
        assert!((read[0] + 1.0).abs() < 1e-5 && (read[2] - 5.0).abs() < 1e-5, "{read:?}");
        assert!((read[1] - 1.0).abs() <= 6.0 / 255.0 / 2.0 + 1e-6);
    }

    #[test]
    fn straight_through_forwards_the_codec_and_passes_gradients_inside_the_range() {
        let plain = Device::flex();
        let base = "kivi-2(g=4,r=0,range=0.6)".parse::<BaseScheme>().unwrap();
        let data = TensorData::new(vec![-3.0f32, -0.4, 0.7, 3.0], [1, 1, 4, 1]);
        let x = Tensor::<4>::from_data(data.clone(), &plain.clone().autodiff()).require_grad();
        let read = BaseQuantizer::new(base).read_back(x.clone());
        let inference = BaseQuantizer::new(base).read_back(Tensor::from_data(data, &plain)).to_data();
        assert_eq!(read.clone().inner().to_data(), inference, "forward is the inference path, bit for bit");
        let weights =
            Tensor::<4>::from_data(TensorData::new(vec![1.0f32, 2.0, 3.0, 4.0], [1, 1, 4, 1]), &plain).autodiff();
        let gradients = (read * weights).sum().backward();
        let gradient: Vec<f32> = x.grad(&gradients).unwrap().try_into_vec_as().unwrap();
        assert_eq!(gradient, [0.0, 2.0, 3.0, 0.0]);
    }
}
