//! HeadQ attention in a Burn model of one's own: `cargo run --release --example own-model`.
//!
//! A model calls [`Attention`] once per layer with its queries, keys and values; what they are read through is the caller's choice.
//! Here one block runs dense, with a quantized cache that is filled all at once, and token by token: the last two agree.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use headq::basis::Basis;
use headq::quant::BaseQuantizer;
use headq::scheme::{Family, Scheme, Scope};
use headq::{Attention, AttentionSite, DenseAttention, LayerStats, QuantizedCache};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const WIDTH: usize = 16;

/// A block with grouped-query attention and nothing else.
#[derive(Module, Debug)]
struct Block {
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
}

impl Block {
    fn new(hidden: usize, device: &Device) -> Self {
        let linear = |input, output| LinearConfig::new(input, output).init(device);
        Self {
            query: linear(hidden, HEADS * WIDTH),
            key: linear(hidden, KV_HEADS * WIDTH),
            value: linear(hidden, KV_HEADS * WIDTH),
            out: linear(HEADS * WIDTH, hidden),
        }
    }

    /// `[batch, tokens, hidden]`, at positions from `start` on.
    fn forward(&self, x: Tensor<3>, start: usize, attention: &mut dyn Attention) -> Tensor<3> {
        let [batch, tokens, _] = x.dims();
        let split = |x: Tensor<3>, heads| x.reshape([batch, tokens, heads, WIDTH]).swap_dims(1, 2);
        let q = split(self.query.forward(x.clone()), HEADS);
        let k = split(self.key.forward(x.clone()), KV_HEADS);
        let v = split(self.value.forward(x), KV_HEADS);
        let site = AttentionSite { layer: 0, start, scale: 1.0 / (WIDTH as f64).sqrt(), window: None };
        let read = attention.attend(&site, q, k, v).swap_dims(1, 2);
        self.out.forward(read.reshape([batch, tokens, HEADS * WIDTH]))
    }
}

/// Dense attention that takes the moments that bases are derived from.
struct Calibration(LayerStats, BaseQuantizer);

impl Attention for Calibration {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let rows = |x: &Tensor<4>| x.clone().try_into_vec_as::<f32>().expect("floats");
        let e = k.clone() - self.1.read_back(k.clone());
        self.0.add(&rows(&q), &rows(&k), &rows(&e), &rows(&v));
        DenseAttention::new().attend(site, q, k, v)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (device, tokens) = (Device::flex(), 256);
    device.seed(1);
    let model = Block::new(64, &device);
    let x = Tensor::<3>::random([1, tokens, 64], Distribution::Normal(0.0, 3.0), &device);
    let dense = model.forward(x.clone(), 0, &mut DenseAttention::new());
    let error = |y: Tensor<3>| -> f32 {
        let error: f32 = (y - dense.clone()).square().mean().into_scalar();
        error / dense.clone().square().mean().into_scalar::<f32>()
    };

    let scheme: Scheme = "kivi-2(g=32,r=32)+score-optimal(rank=4,bits=3)/token-4".parse()?;
    let base = BaseQuantizer::new(scheme.key.ok_or("keys are coded")?.base);
    let mut calibration = Calibration(LayerStats::new(HEADS, KV_HEADS, WIDTH), base);
    model.forward(x.clone(), 0, &mut calibration);
    let basis = Basis::fit(&[calibration.0], Family::ScoreOptimal, 4, Scope::KvHead, 0)?;

    let plain: Scheme = "kivi-2(g=32,r=32)/token-4".parse()?;
    let mut cache = QuantizedCache::teacher_forced(plain, None, 1, &device);
    println!("relative squared error of the output, {plain}: {:.5}", error(model.forward(x.clone(), 0, &mut cache)));
    let mut cache = QuantizedCache::teacher_forced(scheme, Some(&basis), 1, &device);
    println!("{scheme}: {:.5}", error(model.forward(x.clone(), 0, &mut cache)));

    let mut cache = QuantizedCache::streaming(scheme, Some(&basis), 1, &device);
    let steps = (0..tokens).map(|t| model.forward(x.clone().narrow(1, t, 1), t, &mut cache)).collect();
    println!("the same, token by token: {:.5}", error(Tensor::cat(steps, 1)));
    Ok(())
}
