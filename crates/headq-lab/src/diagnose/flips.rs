//! Summaries of single queries whose size does not grow with the text.

use std::collections::BinaryHeap;

use headq::basis::split_mix;
use headq::{QueryReading, QuerySink};
use serde::{Deserialize, Serialize};

use super::data::{EntropyBin, FlipResult, QueryCorrelation};
use super::statistics::{Bootstrap, Units};

/// Lower edges of the entropy bins, nats.
const EDGES: [f64; 10] = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0];

/// Queries kept of each kind: Spearman's ρ of so many has a standard error of about 0.01.
const SAMPLE: usize = 10_000;

/// A uniform sample without replacement: the queries with the smallest hashes of their place in the text. It depends on no order.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Sample {
    seen: u64,
    /// Hash, and E2 and E3 as bits, so that entries have a total order.
    kept: BinaryHeap<(u64, u64, u64)>,
}

impl Sample {
    fn add(&mut self, hash: u64, fisher: f64, kl: f64) {
        self.seen += 1;
        self.push((hash, fisher.to_bits(), kl.to_bits()));
    }

    fn push(&mut self, entry: (u64, u64, u64)) {
        self.kept.push(entry);
        if self.kept.len() > SAMPLE {
            self.kept.pop();
        }
    }

    fn merge(&mut self, other: Sample) {
        self.seen += other.seen;
        other.kept.into_iter().for_each(|entry| self.push(entry));
    }

    fn correlation(&self, bootstrap: &Bootstrap) -> QueryCorrelation {
        let mut entries: Vec<_> = self.kept.iter().collect();
        entries.sort_unstable();
        let (fisher, kl): (Vec<f64>, Vec<f64>) =
            entries.iter().map(|(_, f, k)| (f64::from_bits(*f), f64::from_bits(*k))).unzip();
        let rho = bootstrap.spearman(&fisher, &kl, &Units::points(fisher.len()));
        QueryCorrelation { queries: self.seen, sampled: fisher.len(), rho }
    }
}

/// Route flips of one scheme.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Flips {
    /// Queries and flips by entropy bin.
    bins: [(u64, u64); EDGES.len()],
    flipped: Sample,
    unflipped: Sample,
}

impl Flips {
    fn add(&mut self, reading: &QueryReading, hash: u64) {
        let flip = reading.top != reading.top_read;
        let bin = EDGES.iter().rposition(|edge| reading.entropy >= *edge).unwrap_or(0);
        self.bins[bin].0 += 1;
        self.bins[bin].1 += u64::from(flip);
        let sample = if flip { &mut self.flipped } else { &mut self.unflipped };
        sample.add(hash, reading.fisher, reading.kl);
    }

    /// Adds what another accumulator has seen.
    pub fn merge(&mut self, other: Flips) {
        for (mine, theirs) in self.bins.iter_mut().zip(other.bins) {
            mine.0 += theirs.0;
            mine.1 += theirs.1;
        }
        self.flipped.merge(other.flipped);
        self.unflipped.merge(other.unflipped);
    }

    /// As the report has it.
    pub fn result(&self, scheme: String, bootstrap: &Bootstrap) -> FlipResult {
        let bin = |(i, (queries, flips)): (usize, &(u64, u64))| EntropyBin {
            low: EDGES[i],
            high: EDGES.get(i + 1).copied(),
            queries: *queries,
            flips: *flips,
        };
        let bins: Vec<EntropyBin> = self.bins.iter().enumerate().map(bin).collect();
        let (queries, flips) = (bins.iter().map(|b| b.queries).sum::<u64>(), bins.iter().map(|b| b.flips).sum::<u64>());
        FlipResult {
            scheme,
            queries,
            flips,
            share: (queries > 0).then(|| flips as f64 / queries as f64),
            bins,
            flipped: self.flipped.correlation(bootstrap),
            unflipped: self.unflipped.correlation(bootstrap),
        }
    }
}

/// Sorts the queries of one window into the flips of each scheme.
pub(super) struct WindowFlips {
    seed: u64,
    window: usize,
    pub by_scheme: Vec<Flips>,
}

impl WindowFlips {
    pub fn new(seed: u64, window: usize, schemes: usize) -> Self {
        Self { seed, window, by_scheme: vec![Flips::default(); schemes] }
    }
}

impl QuerySink for WindowFlips {
    fn query(&mut self, scheme: usize, reading: &QueryReading) {
        let place = [self.window, reading.layer, reading.head, reading.position];
        self.by_scheme[scheme]
            .add(reading, place.iter().fold(self.seed, |hash, next| split_mix(hash ^ split_mix(*next as u64))));
    }
}

#[cfg(test)]
mod tests {
    use super::super::thresholds::Thresholds;
    use super::*;

    fn readings(window: usize, n: usize) -> Vec<QueryReading> {
        (0..n)
            .map(|i| {
                let x = (split_mix((window * n + i) as u64) >> 11) as f64 / (1u64 << 53) as f64;
                let entropy = 6.0 * x;
                // Undecided queries flip; the metric is exact where nothing flips and meaningless elsewhere.
                let flip = entropy > 3.0;
                let kl = if flip { (split_mix(!(window * n + i) as u64) >> 40) as f64 } else { 2.0 * x };
                QueryReading {
                    layer: i % 3,
                    head: i % 7,
                    position: i,
                    entropy,
                    top: 1,
                    top_read: 1 + usize::from(flip),
                    fisher: x,
                    kl,
                }
            })
            .collect()
    }

    fn summary(windows: &[usize], n: usize) -> Flips {
        let mut total = Flips::default();
        for &window in windows {
            let mut sink = WindowFlips::new(5, window, 1);
            readings(window, n).iter().for_each(|r| sink.query(0, r));
            total.merge(sink.by_scheme.remove(0));
        }
        total
    }

    #[test]
    fn counts_are_exact_and_the_sample_is_bounded_and_independent_of_order() {
        let thresholds = Thresholds { replicates: 50, ..Thresholds::default() };
        let bootstrap = Bootstrap::new(&thresholds, 1);
        let (a, b) = (summary(&[0, 1, 2], 20_000), summary(&[2, 0, 1], 20_000));
        let result = a.result("x".into(), &bootstrap);
        assert_eq!(result, b.result("x".into(), &bootstrap));
        let all: Vec<_> = [0, 1, 2].iter().flat_map(|w| readings(*w, 20_000)).collect();
        assert_eq!(result.queries, 60_000);
        assert_eq!(result.flips as usize, all.iter().filter(|r| r.top != r.top_read).count());
        for bin in &result.bins {
            let inside = |r: &&QueryReading| r.entropy >= bin.low && bin.high.is_none_or(|h| r.entropy < h);
            assert_eq!(bin.queries as usize, all.iter().filter(inside).count());
            assert_eq!(bin.flips as usize, all.iter().filter(inside).filter(|r| r.top != r.top_read).count());
        }
        assert_eq!((result.flipped.sampled, result.unflipped.sampled), (SAMPLE, SAMPLE));
        assert!(result.unflipped.rho.unwrap().estimate > 0.999999);
        assert!(result.flipped.rho.unwrap().estimate.abs() < 0.05);
    }

    #[test]
    fn a_part_that_was_kept_is_the_part_that_was_made() {
        let made = summary(&[0], 300);
        let kept: Flips = serde_json::from_str(&serde_json::to_string(&made).unwrap()).unwrap();
        let bootstrap = Bootstrap::new(&Thresholds { replicates: 20, ..Thresholds::default() }, 1);
        assert_eq!(made.result("x".into(), &bootstrap), kept.result("x".into(), &bootstrap));
    }
}
