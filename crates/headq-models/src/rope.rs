//! Rotary position embedding of the "rotate half" kind (Burn's `RotaryEncoding` pairs neighbouring channels instead).

use burn::tensor::{DType, Device, Tensor, TensorData};

/// Cosines and sines of a range of positions.
pub(crate) struct RopeTable {
    /// `[1, 1, positions, rotary_dim / 2]`
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl RopeTable {
    /// The table for positions `start .. start + count` of states of type `dtype`; angles are computed in f64 on the host.
    pub fn new(inverse_frequencies: &[f64], start: usize, count: usize, dtype: DType, device: &Device) -> Self {
        let angles = (start..start + count).flat_map(|t| inverse_frequencies.iter().map(move |w| t as f64 * w));
        let (sin, cos): (Vec<f64>, Vec<f64>) = angles.map(f64::sin_cos).unzip();
        let shape = [1, 1, count, inverse_frequencies.len()];
        let tensor = |values: Vec<f64>| Tensor::from_data(TensorData::new(values, shape), (device, dtype));
        Self { cos: tensor(cos), sin: tensor(sin) }
    }

    /// Rotates the leading `rotary_dim` channels of `x` `[batch, heads, positions, head_dim]`; the others pass.
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let [_, _, _, width] = x.dims();
        let [_, _, _, half] = self.cos.dims();
        let (a, b) = (x.clone().narrow(3, 0, half), x.clone().narrow(3, half, half));
        let low = a.clone() * self.cos.clone() - b.clone() * self.sin.clone();
        let high = b * self.cos.clone() + a * self.sin.clone();
        let mut parts = vec![low, high];
        if width > 2 * half {
            parts.push(x.narrow(3, 2 * half, width - 2 * half));
        }
        Tensor::cat(parts, 3)
    }
}
