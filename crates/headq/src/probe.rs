//! Dense attention whose reads of what a cache would hold as codes can be differentiated apart from everything else.

use burn::tensor::{Device, Tensor};

use crate::attention::{first_visible, grouped_queries, probabilities, tiles};
use crate::codec::coded_mask;
use crate::quant::float_dtype;
use crate::scheme::Flush;
use crate::seam::{Attention, AttentionSite};

/// Dense attention over whole sequences in which token j, where E10 reads it from codes, is read as k_j + ε_j and v_j + η_j with ε = η = 0:
/// gradients by ε and η are those by an error of the codes, which tokens read from the dense window do not have.
#[derive(Debug)]
pub struct ErrorProbe {
    flush: Flush,
    /// ε and η of the last call, and the tokens that they are of.
    errors: Option<[Tensor<4>; 2]>,
}

impl ErrorProbe {
    /// For keys and values that are coded as `flush` says.
    pub fn new(flush: Flush) -> Self {
        Self { flush, errors: None }
    }

    /// ε and η of the last call, leaves of its graph: `[batch, kv_heads, tokens, head_dim]` of the tokens after the sinks that any query
    /// reads from codes. `None` if there are none.
    pub fn take_errors(&mut self) -> Option<[Tensor<4>; 2]> {
        self.errors.take()
    }
}

impl Attention for ErrorProbe {
    /// # Panics
    /// If `site.start` is not 0.
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        assert_eq!(site.start, 0, "a probe reads whole sequences");
        let [b, kv_heads, end, d] = k.dims();
        let (sinks, heads) = (self.flush.sinks, q.dims()[1]);
        let coded = self.flush.flushed(end - 1);
        let leaf = |like: &Tensor<4>| {
            let device: Device = like.device();
            Tensor::<4>::zeros([b, kv_heads, coded, d], &device).cast(float_dtype(like.dtype())).require_grad()
        };
        self.errors = (coded > 0).then(|| [leaf(&k), leaf(&v)]);
        let outputs: Vec<_> = tiles(0, end)
            .map(|queries| {
                let m = queries.len();
                let tokens = first_visible(site, &queries)..queries.end;
                let of = |x: &Tensor<4>| x.clone().narrow(2, tokens.start, tokens.len());
                let grouped = grouped_queries(site, &q, kv_heads, &queries);
                let rows = grouped.dims()[2];
                let mut scores = grouped.clone().matmul(of(&k).swap_dims(2, 3));
                // Tokens that some query of the tile reads from codes.
                let start = tokens.start.max(sinks);
                let read = start..(sinks + self.flush.flushed(queries.end - 1)).max(start);
                let part = self.errors.as_ref().filter(|_| !read.is_empty()).map(|[errors, values]| {
                    let own = |x: &Tensor<4>| x.clone().narrow(2, read.start - sinks, read.len());
                    let mask = coded_mask(&self.flush, queries.clone(), read.clone(), &q.device()).bool_not();
                    (own(errors), own(values), mask)
                });
                let split = [b, kv_heads, rows / m, m, read.len()];
                let shape = [b, kv_heads, rows, read.len()];
                if let Some((errors, _, mask)) = &part {
                    let change = grouped.matmul(errors.clone().swap_dims(2, 3)).reshape(split);
                    let change = change.mask_fill(mask.clone().expand(split), 0.0).reshape(shape);
                    let whole = scores.dims();
                    let zeros = |n: usize| Tensor::<4>::zeros([whole[0], whole[1], whole[2], n], &scores.device());
                    let pad = |n: usize| -> Tensor<4> { zeros(n).cast(float_dtype(scores.dtype())) };
                    let change = [pad(read.start - tokens.start), change, pad(tokens.end - read.end)].into_iter();
                    let change: Vec<_> = change.filter(|x| x.dims()[3] > 0).collect();
                    scores = scores + Tensor::cat(change, 3);
                }
                let p = probabilities(site, scores, &queries, &tokens);
                let mut out = p.clone().matmul(of(&v));
                if let Some((_, values, mask)) = part {
                    let p = p.narrow(3, read.start - tokens.start, read.len()).reshape(split);
                    let p = p.mask_fill(mask.expand(split), 0.0).reshape(shape);
                    out = out + p.matmul(values);
                }
                out.reshape([b, heads, m, d])
            })
            .collect();
        Tensor::cat(outputs, 2)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::{HeadqAttention, LayerState, dense_attention, repeat_kv};

    const SITE: AttentionSite = AttentionSite { layer: 0, start: 0, scale: 0.5, window: None };

    fn tensor(shape: [usize; 4], seed: u64, device: &Device) -> Tensor<4> {
        crate::normal(shape, seed, device)
    }

    fn host(x: Tensor<4>) -> Vec<f32> {
        x.into_data().try_to_vec().unwrap()
    }

    /// Without errors it is dense attention, with and without windows.
    #[test]
    fn without_errors_it_is_dense_attention() {
        let device = Device::flex();
        let [q, k, v] = [(4, 1), (2, 2), (2, 3)].map(|(h, seed)| tensor([1, h, 150, 8], seed, &device));
        for window in [None, Some(40)] {
            let site = AttentionSite { window, ..SITE };
            let expected = host(dense_attention(&site, q.clone(), repeat_kv(k.clone(), 2), repeat_kv(v.clone(), 2)));
            let track = |x: &Tensor<4>| x.clone().autodiff();
            let mut probe = ErrorProbe::new(Flush { group: 8, residual: 16, sinks: 3 });
            let found = host(probe.attend(&site, track(&q), track(&k), track(&v)).inner());
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));
            assert_eq!(probe.take_errors().unwrap()[0].dims(), [1, 2, 128, 8]);
        }
    }

    /// Against the codec itself: quantized keys are keys with errors, read where E10 says and nowhere else. To first order in the error of
    /// very fine codes, the output changes by the derivative.
    #[test]
    fn gradients_are_derivatives_by_the_errors_of_a_codec() {
        let device = Device::flex();
        let [q, k, v] = [(4, 11), (2, 12), (2, 13)].map(|(h, seed)| tensor([1, h, 61, 8], seed, &device));
        let weights = tensor([1, 4, 61, 8], 14, &device);
        for (scheme, which) in [("kivi-7(g=8,r=5,sinks=3)", 0), ("dense/token-7(g=8,r=5,sinks=3)", 1)] {
            let module = HeadqAttention::new(scheme.parse().unwrap(), None, 0, &device);
            let loss = |out: Tensor<4>| host(out * weights.clone()).iter().map(|x| f64::from(*x)).sum::<f64>();
            let read = module.forward(&mut LayerState::default(), &SITE, q.clone(), k.clone(), v.clone());
            let dense = dense_attention(&SITE, q.clone(), repeat_kv(k.clone(), 2), repeat_kv(v.clone(), 2));
            let change = loss(read) - loss(dense);
            let flush = Flush { group: 8, residual: 5, sinks: 3 };
            let mut probe = ErrorProbe::new(flush);
            let track = |x: &Tensor<4>| x.clone().autodiff();
            let out = probe.attend(&SITE, track(&q), track(&k), track(&v));
            let gradients = (out * track(&weights)).sum().backward();
            let gradient = host(probe.take_errors().unwrap()[which].grad(&gradients).unwrap());
            let coded = flush.flushed(60);
            let plain = [&k, &v][which].clone().narrow(2, 3, coded);
            let read = match which {
                0 => module.code_keys(plain.clone()).base,
                _ => module.code_values(plain.clone(), 3, None),
            };
            let errors = host(read - plain);
            let predicted: f64 = errors.iter().zip(&gradient).map(|(e, g)| f64::from(*e) * f64::from(*g)).sum();
            assert!((change - predicted).abs() < 0.05 * change.abs().max(1e-3), "{scheme}: {change} {predicted}");
            // And not of what is read dense: the last tokens' errors would count otherwise.
            assert_eq!(gradient.len(), 2 * coded * 8);
        }
    }
}
