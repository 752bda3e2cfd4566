//! Quantizers: what turns keys, values and side coefficients into codes and back.
//!
//! All of them are asymmetric uniform quantizers x̂ = zero + code · scale; they differ in what shares a range. To add one, give it a
//! name in [`crate::scheme::Quantizer`] and say in `Axis::of_key` what shares its ranges.

use burn::tensor::{Bool, DType, FloatDType, Tensor};

use crate::scheme::{BaseScheme, Meta, Quantizer, SideScales, SideScheme, ValueScheme};

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
fn stored<const D: usize>(x: Tensor<D>, meta: Meta) -> Tensor<D> {
    match (meta, x.dtype()) {
        (Meta::F32, DType::F32) => x,
        (Meta::F32, wide) => x.cast(FloatDType::F32).cast(float_dtype(wide)),
        (Meta::F16, wide) => {
            let most = half::f16::MAX.to_f32();
            x.clamp(-most, most).cast(FloatDType::F16).cast(float_dtype(wide))
        }
    }
}

fn float_dtype(dtype: DType) -> FloatDType {
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
        let top = f64::from((1u32 << bits) - 1);
        let (low, high) = (x.clone().min_dim(axis), x.clone().max_dim(axis));
        let (low, width) = if range == 1.0 {
            (low.clone(), high - low)
        } else {
            let middle = (high.clone() + low.clone()).mul_scalar(0.5);
            let width = (high - low).mul_scalar(range);
            (middle - width.clone().mul_scalar(0.5), width)
        };
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
    if !x.is_autodiff() {
        return Affine::quantize(x, axis, bits, range, meta).dequantize();
    }
    let fixed = x.clone().detach();
    let affine = Affine::quantize(fixed.clone(), axis, bits, range, meta);
    let inside = affine.inside(fixed.clone()).float().cast(float_dtype(fixed.dtype()));
    affine.dequantize().detach() + inside.detach() * (x - fixed)
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
    pub(crate) fn of_key(base: &BaseScheme) -> Self {
        match base.quantizer {
            Quantizer::Kivi => Axis::Group(base.flush.group),
            Quantizer::Token => Axis::Channels(base.channels),
        }
    }

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

    fn read_back(self, x: Tensor<4>, bits: u32, range: f32, meta: Meta) -> Tensor<4> {
        let shape @ [b, h, n, d] = x.dims();
        let (split, axis) = match self {
            Axis::Group(g) => ([b, h, n / g, g, d], 3),
            Axis::Channels(c) => {
                let c = c.unwrap_or(d);
                ([b, h, n, d / c, c], 4)
            }
        };
        read_back(x.reshape(split), axis, bits, range, meta).reshape(shape)
    }
}

/// Base reconstruction k̂ = B_b(k) of whole groups.
///
/// # Shapes
/// `[batch, kv_heads, groups · G, head_dim]`, in and out
pub fn base_read_back(base: &BaseScheme, keys: Tensor<4>) -> Tensor<4> {
    Axis::of_key(base).read_back(keys, base.bits, base.range, base.meta)
}

/// Side reconstruction ẑ = Q_s(z) of whole groups of G tokens.
///
/// # Shapes
/// `[batch, side_heads, groups · G, rank]`, in and out
pub fn side_read_back(side: &SideScheme, group: usize, meta: Meta, z: Tensor<4>) -> Tensor<4> {
    Axis::of_side(side, group).read_back(z, side.bits, 1.0, meta)
}

/// Value reconstruction v̂ of whole groups.
///
/// # Shapes
/// `[batch, kv_heads, tokens, head_dim]`, in and out
pub fn value_read_back(value: &ValueScheme, values: Tensor<4>) -> Tensor<4> {
    Axis::Channels(value.channels).read_back(values, value.bits, value.range, value.meta)
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
    fn every_width_reads_back_the_nearest_stored_level() {
        let device = Device::flex();
        for bits in 1..=8 {
            let base = format!("kivi-{bits}(g=8,r=0)").parse::<BaseScheme>().unwrap();
            let x = crate::normal([2, 3, 24, 5], 3, &device) * 2.0 + 1.0;
            let read = base_read_back(&base, x.clone());
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
        let read: Vec<f32> = base_read_back(&base, x.clone()).try_into_vec_as().unwrap();
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
        let read: Vec<f32> = base_read_back(&base, x).try_into_vec_as().unwrap();
        assert!(read.iter().all(|v| v.is_finite()));
        let tenth = f16::from_f32(0.1).to_f32();
        assert!(read.iter().step_by(2).all(|&v| v == tenth), "a constant channel is its zero: {read:?}");
    }

    #[test]
    fn clipping_halves_the_range_about_its_middle() {
        let device = Device::flex();
        let base = "kivi-8(g=3,r=0,range=0.5,meta=f32)".parse::<BaseScheme>().unwrap();
        let x = Tensor::<4>::from_data(TensorData::new(vec![-4.0f32, 1.0, 8.0], [1, 1, 3, 1]), &device);
        let read: Vec<f32> = base_read_back(&base, x).try_into_vec_as().unwrap();
        assert!((read[0] + 1.0).abs() < 1e-5 && (read[2] - 5.0).abs() < 1e-5, "{read:?}");
        assert!((read[1] - 1.0).abs() <= 6.0 / 255.0 / 2.0 + 1e-6);
    }

    #[test]
    fn straight_through_forwards_the_codec_and_passes_gradients_inside_the_range() {
        let plain = Device::flex();
        let base = "kivi-2(g=4,r=0,range=0.6)".parse::<BaseScheme>().unwrap();
        let data = TensorData::new(vec![-3.0f32, -0.4, 0.7, 3.0], [1, 1, 4, 1]);
        let x = Tensor::<4>::from_data(data.clone(), &plain.clone().autodiff()).require_grad();
        let read = base_read_back(&base, x.clone());
        let inference = base_read_back(&base, Tensor::from_data(data, &plain)).to_data();
        assert_eq!(read.clone().inner().to_data(), inference, "forward is the inference path, bit for bit");
        let weights =
            Tensor::<4>::from_data(TensorData::new(vec![1.0f32, 2.0, 3.0, 4.0], [1, 1, 4, 1]), &plain).autodiff();
        let gradients = (read * weights).sum().backward();
        let gradient: Vec<f32> = x.grad(&gradients).unwrap().try_into_vec_as().unwrap();
        assert_eq!(gradient, [0.0, 2.0, 3.0, 0.0]);
    }
}
