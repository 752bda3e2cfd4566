//! Fits a basis for one head in closed form, and fine-tunes it with gradients: `cargo run --release --example learn-head`.

use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Distribution, Tensor};
use headq::basis::Basis;
use headq::learn::{Loss, Sample};
use headq::quant::BaseQuantizer;
use headq::scheme::{Family, Scheme, Scope};
use headq::{AttentionSite, Correction, LayerStats};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (device, d, tokens) = (Device::flex(), 32, 512);
    device.seed(1);
    // A head whose queries have a common part, as those of language models do.
    let normal = |shape| Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &device);
    let common = normal([1, 1, 1, d]) * 2.0;
    let draw = || (normal([1, 1, tokens, d]) + common.clone(), normal([1, 1, tokens, d]));
    let key = "kivi-2(g=32,r=32)+learned(rank=4,bits=3)".parse::<Scheme>()?.key.ok_or("keys")?;
    let base = BaseQuantizer::new(key.base);
    let site = AttentionSite { layer: 0, start: 0, scale: 1.0 / (d as f64).sqrt(), window: None };
    let windows: Vec<_> = (0..5).map(|_| draw()).collect();
    let samples: Vec<_> = windows.iter().map(|(q, k)| Sample::new(Loss::Kl, &base, &site, q, k)).collect();
    let (train, held_out) = samples.split_at(4);

    // Closed form: second moments of queries and residuals, the best correction of the score error.
    let mut stats = LayerStats::new(1, 1, d);
    for ((q, k), sample) in windows.iter().zip(train) {
        let rows = |x: &Tensor<4>| x.clone().try_into_vec_as::<f32>().expect("floats");
        stats.add(&rows(q), &rows(k), &rows(sample.residual()), &[]);
    }
    let basis = Basis::fit(std::slice::from_ref(&stats), Family::ScoreOptimal, 4, Scope::KvHead, 0)?;
    println!(
        "closed form: attention KL {:.5}",
        held_out[0].loss(&Correction::new(&key, &basis, 0, &device)).by_head[0]
    );

    // Fine-tuning: a Burn module, a Burn optimizer, straight-through gradients.
    let mut correction = Correction::new(&key, &basis.equalized(&[stats])?, 0, &device.clone().autodiff());
    let mut optimizer = AdamConfig::new().init();
    for step in 0..200 {
        let loss = train[step % train.len()].loss(&correction).total;
        let gradients = GradientsParams::from_grads(loss.backward(), &correction);
        correction = optimizer.step(5e-4, correction, gradients).retracted();
        if step % 50 == 49 {
            println!("step {:3}: attention KL {:.5}", step + 1, held_out[0].loss(&correction).by_head[0]);
        }
    }
    Ok(())
}
