//! From logits to the next token.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::LabError;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    /// The most probable; of equals, the lowest id.
    Greedy,
    /// At random, in proportion to the probabilities that are left.
    Random {
        /// Divides the logits. Above 0.
        temperature: f64,
        /// Keep only so many of the most probable. At least 1.
        top_k: Option<usize>,
        /// Of what is left, keep the fewest most probable that have this share together. Above 0, at most 1.
        top_p: Option<f64>,
    },
}

impl Sampling {
    /// # Errors
    /// If a setting is out of range.
    pub fn check(&self) -> Result<(), LabError> {
        let Self::Random { temperature, top_k, top_p } = self else { return Ok(()) };
        let wrong = |reason: String| Err(LabError::Usage(reason));
        if !(*temperature > 0.0 && temperature.is_finite()) {
            return wrong(format!(
                "temperature {temperature}: expected a number above 0; --greedy takes the most probable token"
            ));
        }
        if *top_k == Some(0) {
            return wrong("top-k 0: expected at least 1; leave it out to keep all tokens".into());
        }
        match top_p {
            Some(p) if !(*p > 0.0 && *p <= 1.0) => wrong(format!("top-p {p}: expected a share above 0, at most 1")),
            _ => Ok(()),
        }
    }
}

/// Chooses tokens, reproducibly.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
    /// Ids and weights of the tokens that are left, the most probable first; kept for the next call.
    left: Vec<(u32, f64)>,
}

impl Sampler {
    /// A sampler whose choices follow from the seed.
    pub fn new(sampling: Sampling, seed: u64) -> Self {
        Self { sampling, rng: ChaCha8Rng::seed_from_u64(seed), left: Vec::new() }
    }

    /// The next token, or `None` if a logit is not a number or none is finite.
    pub fn next(&mut self, logits: &[f32]) -> Option<u32> {
        let (best, max) = most_probable(logits)?;
        let Sampling::Random { temperature, top_k, top_p } = self.sampling else { return Some(best) };
        let weight = |x: f32| ((f64::from(x) - f64::from(max)) / temperature).exp();
        self.left.clear();
        self.left.extend(logits.iter().enumerate().map(|(id, &x)| (id as u32, weight(x))));
        if let Some(k) = top_k {
            keep_largest(&mut self.left, k);
        }
        if let Some(p) = top_p {
            keep_share(&mut self.left, p);
        }
        let total: f64 = self.left.iter().map(|(_, w)| w).sum();
        let mut rest = self.rng.random::<f64>() * total;
        let chosen = self.left.iter().find(|(_, w)| {
            rest -= w;
            rest < 0.0
        });
        // Rounding may leave a little at the end.
        Some(chosen.or_else(|| self.left.iter().rev().find(|(_, w)| *w > 0.0)).map_or(best, |(id, _)| *id))
    }
}

/// The largest logit and the lowest id that has it.
fn most_probable(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &x) in logits.iter().enumerate() {
        if x.is_nan() || x == f32::INFINITY {
            return None;
        }
        if x > best.map_or(f32::NEG_INFINITY, |(_, max)| max) {
            best = Some((id as u32, x));
        }
    }
    best
}

/// The most probable first; of equals, the lowest id.
fn order(a: &(u32, f64), b: &(u32, f64)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Keeps the k most probable, in order.
fn keep_largest(left: &mut Vec<(u32, f64)>, k: usize) {
    if k < left.len() {
        left.select_nth_unstable_by(k, order);
        left.truncate(k);
    }
    left.sort_unstable_by(order);
}

/// Keeps the fewest most probable that have the share `p` of the weight of all, in order.
fn keep_share(left: &mut Vec<(u32, f64)>, p: f64) {
    let target = p * left.iter().map(|(_, w)| w).sum::<f64>();
    // Sorting all of a large vocabulary takes longer than a decode step; few tokens usually have the share.
    let mut sorted = 64;
    loop {
        sorted = sorted.min(left.len());
        if sorted < left.len() {
            left.select_nth_unstable_by(sorted, order);
        }
        left[..sorted].sort_unstable_by(order);
        let mut sum = 0.0;
        let enough = left[..sorted].iter().position(|(_, w)| {
            sum += w;
            sum >= target
        });
        match enough {
            Some(last) => return left.truncate(last + 1),
            None if sorted == left.len() => return,
            None => sorted *= 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary with ties and long tails.
    fn logits(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919) % 613) as f32 / 60.0 - 4.0).collect()
    }

    fn random(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> Sampling {
        Sampling::Random { temperature, top_k, top_p }
    }

    /// Probabilities by sorting everything: temperature, then the k largest, then the fewest with the share p.
    fn probabilities(logits: &[f32], temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> Vec<f64> {
        let mut all: Vec<(usize, f64)> =
            logits.iter().map(|&x| (f64::from(x) / temperature).exp()).enumerate().collect();
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        all.truncate(top_k.unwrap_or(usize::MAX));
        let total: f64 = all.iter().map(|(_, w)| w).sum();
        let mut before = 0.0;
        all.retain(|(_, w)| {
            let keep = before < top_p.unwrap_or(2.0) * total;
            before += w;
            keep
        });
        let total: f64 = all.iter().map(|(_, w)| w).sum();
        let mut p = vec![0.0; logits.len()];
        all.iter().for_each(|(id, w)| p[*id] = w / total);
        p
    }

    #[test]
    fn draws_have_the_distribution_that_was_asked_for() {
        const DRAWS: usize = 40_000;
        let logits = logits(700);
        for (t, k, p) in [(1.0, None, None), (0.3, Some(5), None), (2.0, None, Some(0.4)), (0.8, Some(40), Some(0.9))] {
            let expected = probabilities(&logits, t, k, p);
            let mut sampler = Sampler::new(random(t, k, p), 3);
            let mut counts = vec![0usize; logits.len()];
            (0..DRAWS).for_each(|_| counts[sampler.next(&logits).unwrap() as usize] += 1);
            for (id, (count, p)) in counts.iter().zip(&expected).enumerate() {
                let (mean, deviation) = (p * DRAWS as f64, (p * (1.0 - p) * DRAWS as f64).sqrt());
                assert!((*count as f64 - mean).abs() <= 5.0 * deviation + 1e-9, "{id}: {count} of {mean}");
            }
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(Sampler::new(Sampling::Greedy, 0).next(&[1.0, 3.0, -1.0, 3.0]), Some(1));
        assert_eq!(Sampler::new(random(1.0, Some(1), None), 0).next(&[1.0, 3.0, -1.0, 3.0]), Some(1));
        assert_eq!(Sampler::new(random(1e-9, None, None), 0).next(&[1.0, 2.0, 3.0]), Some(2));
        assert_eq!(Sampler::new(random(1.0, None, Some(1e-12)), 0).next(&[0.0, 0.0]), Some(0));
        assert_eq!(Sampler::new(Sampling::Greedy, 0).next(&[f32::NEG_INFINITY, -3.0]), Some(1));
    }

    #[test]
    fn the_seed_decides() {
        let logits = logits(300);
        let draw = |seed| {
            let mut sampler = Sampler::new(random(1.0, None, None), seed);
            (0..50).map(|_| sampler.next(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn broken_logits_give_nothing() {
        for broken in [vec![], vec![1.0, f32::NAN], vec![f32::INFINITY, 0.0], vec![f32::NEG_INFINITY; 3]] {
            assert_eq!(Sampler::new(Sampling::Greedy, 0).next(&broken), None);
            assert_eq!(Sampler::new(random(1.0, None, None), 0).next(&broken), None);
        }
    }

    #[test]
    fn settings_out_of_range_are_usage_errors() {
        for wrong in [
            random(0.0, None, None),
            random(f64::NAN, None, None),
            random(1.0, Some(0), None),
            random(1.0, None, Some(0.0)),
            random(1.0, None, Some(1.1)),
        ] {
            assert!(matches!(wrong.check(), Err(LabError::Usage(_))), "{wrong:?}");
        }
        assert!(random(0.7, Some(1), Some(1.0)).check().is_ok() && Sampling::Greedy.check().is_ok());
    }
}
