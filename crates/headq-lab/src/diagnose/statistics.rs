//! Rank correlation, bootstrap intervals and quantiles.
//!
//! Undefined results are `None`: nothing here returns NaN or an infinity, whatever it is given. Everything random is a
//! function of a seed, and does not depend on the number of threads.

use std::collections::BTreeMap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::data::Interval;
use super::thresholds::Thresholds;

/// Stream of shuffles, apart from those of bootstrap replicates, which count from 0.
const SHUFFLE_STREAM: u64 = u64::MAX;

/// A series sorted once, so that ranks under any multiplicities of its values take one pass.
#[derive(Debug, Clone)]
struct SortedSeries {
    /// Indices of the values, ascending.
    order: Vec<usize>,
    /// Ends of the runs of equal values in `order`.
    ends: Vec<usize>,
}

impl SortedSeries {
    /// `None` if a value is not finite.
    fn new(values: &[f64]) -> Option<Self> {
        if !values.iter().all(|v| v.is_finite()) {
            return None;
        }
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
        // 0 and −0 lie beside each other and are equal.
        let ends =
            (1..=order.len()).filter(|&i| i == order.len() || values[order[i]] != values[order[i - 1]]).collect();
        Some(Self { order, ends })
    }

    /// Ranks from 1 of the series in which value i occurs `multiplicities[i]` times; equal values share the average of
    /// their ranks.
    fn ranks(&self, multiplicities: &[u32]) -> Vec<f64> {
        let mut ranks = vec![0.0; self.order.len()];
        let (mut start, mut before) = (0, 0u64);
        for &end in &self.ends {
            let run = &self.order[start..end];
            let count: u64 = run.iter().map(|&i| u64::from(multiplicities[i])).sum();
            let rank = before as f64 + (count as f64 + 1.0) / 2.0;
            run.iter().for_each(|&i| ranks[i] = rank);
            (start, before) = (end, before + count);
        }
        ranks
    }
}

/// Ranks from 1, equal values sharing the average of theirs (Kendall, *Rank Correlation Methods*, 1948, ch. 3). All 0
/// if a value is not finite, since there is no order then.
pub fn ranks(values: &[f64]) -> Vec<f64> {
    SortedSeries::new(values).map_or_else(|| vec![0.0; values.len()], |s| s.ranks(&vec![1; values.len()]))
}

/// Spearman's ρ: Pearson's correlation of average ranks, which holds with ties (Spearman 1904; Kendall 1948, ch. 3).
///
/// `None` for fewer than 3 points, a constant series, a value that is not finite, or series of different lengths.
pub fn spearman(x: &[f64], y: &[f64]) -> Option<f64> {
    if x.len() != y.len() {
        return None;
    }
    let ones = vec![1; x.len()];
    let [x, y] = [x, y].map(|s| SortedSeries::new(s).map(|s| s.ranks(&ones)));
    rank_correlation(&x?, &y?, &ones)
}

/// Pearson's correlation of average ranks, pair i occurring `multiplicities[i]` times. `None` where [`spearman`] is.
fn rank_correlation(x: &[f64], y: &[f64], multiplicities: &[u32]) -> Option<f64> {
    let points: u64 = multiplicities.iter().map(|&m| u64::from(m)).sum();
    if points < 3 {
        return None;
    }
    // Average ranks sum to what ranks without ties sum to, so that both means are exact.
    let mean = (points as f64 + 1.0) / 2.0;
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for ((x, y), &m) in x.iter().zip(y).zip(multiplicities) {
        let (x, y, m) = (x - mean, y - mean, f64::from(m));
        xx += m * x * x;
        yy += m * y * y;
        xy += m * x * y;
    }
    (xx > 0.0 && yy > 0.0).then(|| (xy / (xx * yy).sqrt()).clamp(-1.0, 1.0))
}

/// Quantile of level `p` in [0, 1] by linear interpolation between order statistics (type 7 of Hyndman and Fan 1996,
/// the default of R and NumPy).
///
/// `None` for no values, a value that is not finite, or a `p` outside [0, 1].
pub fn quantile(values: &[f64], p: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted_quantile(&sorted, p)
}

/// [`quantile`] of values in ascending order.
fn sorted_quantile(sorted: &[f64], p: f64) -> Option<f64> {
    // Those that are not finite sort to the ends.
    let finite = sorted.first()?.is_finite() && sorted.last()?.is_finite();
    if !finite || !(0.0..=1.0).contains(&p) {
        return None;
    }
    let at = p * (sorted.len() - 1) as f64;
    let below = at.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    let t = at - below as f64;
    // Not a + t (b − a), which overflows for values of opposite sign at the ends of the range of f64.
    Some(sorted[below] * (1.0 - t) + sorted[above] * t)
}

/// The values in an order drawn by `seed` (Fisher and Yates; Durstenfeld 1964).
pub fn shuffled(values: &[f64], seed: u64) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(SHUFFLE_STREAM);
    let mut values = values.to_vec();
    for last in (1..values.len()).rev() {
        values.swap(last, rng.random_range(0..=last as u64) as usize);
    }
    values
}

/// What a bootstrap resamples: clusters of points that are drawn whole, since points within one are not independent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Units {
    /// Unit of each point, below `count`.
    of: Vec<usize>,
    count: usize,
    clustered: bool,
}

impl Units {
    /// One unit for each distinct key, in ascending order. Where there are fewer than `least` keys, each point is a unit of
    /// its own.
    pub fn new<K: Ord>(keys: &[K], least: usize) -> Self {
        let mut index: BTreeMap<&K, usize> = keys.iter().map(|k| (k, 0)).collect();
        index.values_mut().enumerate().for_each(|(i, unit)| *unit = i);
        match index.len() {
            few if few < least.max(2) => Self::points(keys.len()),
            count => Self { of: keys.iter().map(|k| index[k]).collect(), count, clustered: true },
        }
    }

    /// Every point is a unit of its own.
    pub fn points(count: usize) -> Self {
        Self { of: (0..count).collect(), count, clustered: false }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether they are clusters of points, and not the points themselves.
    pub fn clustered(&self) -> bool {
        self.clustered
    }

    /// How often each point occurs where unit u occurs `multiplicities[u]` times.
    fn spread(&self, multiplicities: &[u32]) -> Vec<u32> {
        self.of.iter().map(|&unit| multiplicities[unit]).collect()
    }
}

/// The nonparametric bootstrap with percentile intervals (Efron 1979; Efron and Tibshirani 1993, ch. 13; with whole
/// clusters: Davison and Hinkley 1997, §3.8).
///
/// Replicate i draws its units from stream i of ChaCha8 under the seed, so that results do not depend on the number of
/// threads and two statistics of the same units see the same resamples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bootstrap {
    /// Confidence level of the intervals, in (0, 1).
    pub confidence: f64,
    /// Replicates.
    pub replicates: usize,
    /// Least number of units; with fewer, percentile intervals say little and are undefined.
    pub min_units: usize,
    /// Seed.
    pub seed: u64,
}

impl Bootstrap {
    /// With the level, replicates and least number of units of the thresholds.
    pub fn new(thresholds: &Thresholds, seed: u64) -> Self {
        let Thresholds { confidence, replicates, min_units, .. } = *thresholds;
        Self { confidence, replicates, min_units, seed }
    }

    /// How often replicate `replicate` draws each of `units` units; the sum is `units`.
    pub fn draw(&self, replicate: usize, units: usize) -> Vec<u32> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(replicate as u64);
        let mut multiplicities = vec![0; units];
        for _ in 0..units {
            multiplicities[rng.random_range(0..units as u64) as usize] += 1;
        }
        multiplicities
    }

    /// Intervals of N statistics of the same resamples. `statistics` is given how often each unit occurs; the estimates
    /// are its values where each occurs once.
    ///
    /// `None` where the estimate is undefined, for fewer than `min_units` (and at least 2) units, or where fewer than half of the replicates are
    /// defined. Percentile intervals of a biased statistic need not hold the estimate.
    pub fn intervals<const N: usize>(
        &self,
        units: usize,
        statistics: impl Fn(&[u32]) -> [Option<f64>; N] + Sync,
    ) -> [Option<Interval>; N] {
        if units < self.min_units.max(2) {
            return [None; N];
        }
        let estimates = statistics(&vec![1; units]);
        let replicates: Vec<[Option<f64>; N]> =
            (0..self.replicates).into_par_iter().map(|i| statistics(&self.draw(i, units))).collect();
        std::array::from_fn(|n| self.percentiles(estimates[n], replicates.iter().filter_map(|r| r[n]).collect()))
    }

    /// The interval of one statistic; see [`Bootstrap::intervals`].
    pub fn interval(&self, units: usize, statistic: impl Fn(&[u32]) -> Option<f64> + Sync) -> Option<Interval> {
        let [interval] = self.intervals(units, |multiplicities| [statistic(multiplicities)]);
        interval
    }

    /// The percentile interval from the defined replicates.
    fn percentiles(&self, estimate: Option<f64>, mut replicates: Vec<f64>) -> Option<Interval> {
        let estimate = estimate.filter(|e| e.is_finite())?;
        replicates.retain(|r| r.is_finite());
        if replicates.len() * 2 < self.replicates {
            return None;
        }
        replicates.sort_by(f64::total_cmp);
        let tail = (1.0 - self.confidence) / 2.0;
        let (low, high) = (sorted_quantile(&replicates, tail)?, sorted_quantile(&replicates, 1.0 - tail)?);
        Some(Interval { estimate, low, high })
    }

    /// The mean of one value per unit. `None` for fewer than 2 values or one that is not finite.
    pub fn mean(&self, values: &[f64]) -> Option<Interval> {
        self.interval(values.len(), |multiplicities| weighted_mean(values, multiplicities))
    }

    /// The mean over units of a − b, each unit drawn with both of its values. `None` as for [`Bootstrap::mean`], and
    /// where the lengths differ.
    pub fn mean_difference(&self, a: &[f64], b: &[f64]) -> Option<Interval> {
        let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
        (a.len() == b.len()).then(|| self.mean(&differences)).flatten()
    }

    /// Spearman's ρ. `None` where [`spearman`] or the bootstrap is undefined.
    ///
    /// # Panics
    /// If `units` are not of as many points.
    pub fn spearman(&self, x: &[f64], y: &[f64], units: &Units) -> Option<Interval> {
        assert!(x.len() == units.of.len() && y.len() == units.of.len(), "one unit for each point");
        let (x, y) = (SortedSeries::new(x)?, SortedSeries::new(y)?);
        self.interval(units.count, |multiplicities| {
            let of_points = units.spread(multiplicities);
            rank_correlation(&x.ranks(&of_points), &y.ranks(&of_points), &of_points)
        })
    }

    /// Spearman's ρ of two predictors with a target over the same points: first, second, second minus first. Each is
    /// `None` where it or the bootstrap is undefined.
    ///
    /// # Panics
    /// If `units` are not of as many points.
    pub fn compare_predictors(
        &self,
        first: &[f64],
        second: &[f64],
        target: &[f64],
        units: &Units,
    ) -> [Option<Interval>; 3] {
        let points = units.of.len();
        assert!(first.len() == points && second.len() == points && target.len() == points, "one unit for each point");
        let Some(target) = SortedSeries::new(target) else { return [None; 3] };
        let [first, second] = [first, second].map(SortedSeries::new);
        self.intervals(units.count, |multiplicities| {
            let of_points = units.spread(multiplicities);
            let target = target.ranks(&of_points);
            let [first, second] = [&first, &second]
                .map(|predictor| rank_correlation(&predictor.as_ref()?.ranks(&of_points), &target, &of_points));
            [first, second, second.zip(first).map(|(second, first)| second - first)]
        })
    }

    /// Spearman's ρ of two predictors with a target that is shuffled among the points, and second minus first: the mean over as many
    /// shuffles as there are replicates, and the quantiles that hold the confidence level (a permutation distribution; Pitman 1937).
    pub fn shuffled_predictors(&self, first: &[f64], second: &[f64], target: &[f64]) -> [Option<Interval>; 3] {
        let (Some(first), Some(second)) = (SortedSeries::new(first), SortedSeries::new(second)) else {
            return [None; 3];
        };
        let ones = vec![1; target.len()];
        let (first, second, target) = (first.ranks(&ones), second.ranks(&ones), ranks(target));
        let shuffle = |i: usize| -> [Option<f64>; 3] {
            let target = shuffled(&target, self.seed.wrapping_add(i as u64));
            let [first, second] = [&first, &second].map(|predictor| rank_correlation(predictor, &target, &ones));
            [first, second, second.zip(first).map(|(second, first)| second - first)]
        };
        let found: Vec<[Option<f64>; 3]> = (0..self.replicates).into_par_iter().map(shuffle).collect();
        std::array::from_fn(|n| {
            let defined: Vec<f64> = found.iter().filter_map(|f| f[n]).collect();
            self.percentiles(weighted_mean(&defined, &vec![1; defined.len()]), defined)
        })
    }

    /// Σ part / Σ whole over units that hold parts of wholes, such as heads with their pairs. `None` for an empty whole
    /// or fewer than 2 units.
    ///
    /// Where no part, or all of the whole, was seen, every resample says the same, although n trials leave room for a
    /// share of up to 1 − (α/2)^{1/n}, or down to (α/2)^{1/n} (Clopper and Pearson 1934, trials taken as independent);
    /// the interval reaches there.
    pub fn share(&self, counts: &[(u64, u64)]) -> Option<Interval> {
        let sums = |multiplicities: &[u32]| {
            let terms = || counts.iter().zip(multiplicities);
            let part: u64 = terms().map(|((part, _), &m)| part * u64::from(m)).sum();
            let whole: u64 = terms().map(|((_, whole), &m)| whole * u64::from(m)).sum();
            (part, whole)
        };
        let interval = self.interval(counts.len(), |multiplicities| {
            let (part, whole) = sums(multiplicities);
            (whole > 0).then(|| part as f64 / whole as f64)
        })?;
        let (part, whole) = sums(&vec![1; counts.len()]);
        let extreme = ((1.0 - self.confidence) / 2.0).powf(1.0 / whole as f64);
        Some(match part {
            0 => Interval { high: 1.0 - extreme, ..interval },
            _ if part == whole => Interval { low: extreme, ..interval },
            _ => interval,
        })
    }
}

/// The mean of values that occur `multiplicities[i]` times; `None` where that is not finite.
pub fn weighted_mean(values: &[f64], multiplicities: &[u32]) -> Option<f64> {
    let count: f64 = multiplicities.iter().map(|&m| f64::from(m)).sum();
    let sum: f64 = values.iter().zip(multiplicities).map(|(v, &m)| v * f64::from(m)).sum();
    Some(sum / count).filter(|mean| mean.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rng(seed: u64) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(seed)
    }

    /// Standard normal numbers (Box and Muller).
    fn gaussian(rng: &mut ChaCha8Rng, count: usize) -> Vec<f64> {
        let one = |rng: &mut ChaCha8Rng| {
            let (u, v): (f64, f64) = (rng.random(), rng.random());
            (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        };
        (0..count).map(|_| one(rng)).collect()
    }

    /// Whole numbers below `levels`, so that there are ties.
    fn tied(rng: &mut ChaCha8Rng, count: usize, levels: u64) -> Vec<f64> {
        (0..count).map(|_| rng.random_range(0..levels) as f64).collect()
    }

    const BOOTSTRAP: Bootstrap = Bootstrap { confidence: 0.95, replicates: 400, min_units: 2, seed: 7 };

    /// Ranks by counting: those below, and half of the others that are equal.
    fn ranks_by_counting(x: &[f64]) -> Vec<f64> {
        let mut ranks = Vec::new();
        for a in x {
            let (mut below, mut equal) = (0.0, 0.0);
            for b in x {
                if b < a {
                    below += 1.0;
                } else if b == a {
                    equal += 1.0;
                }
            }
            ranks.push(1.0 + below + (equal - 1.0) / 2.0);
        }
        ranks
    }

    /// Pearson's correlation by the textbook sums.
    fn pearson_by_loops(x: &[f64], y: &[f64]) -> f64 {
        let n = x.len() as f64;
        let (mut mx, mut my) = (0.0, 0.0);
        for i in 0..x.len() {
            mx += x[i] / n;
            my += y[i] / n;
        }
        let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
        for i in 0..x.len() {
            xx += (x[i] - mx).powi(2);
            yy += (y[i] - my).powi(2);
            xy += (x[i] - mx) * (y[i] - my);
        }
        xy / (xx * yy).sqrt()
    }

    fn spearman_by_counting(x: &[f64], y: &[f64]) -> f64 {
        pearson_by_loops(&ranks_by_counting(x), &ranks_by_counting(y))
    }

    #[test]
    fn ranks_and_spearman_agree_with_counting() {
        let mut rng = rng(1);
        for (count, levels) in [(3, 9), (10, 3), (40, 5), (200, 50), (200, 1_000_000)] {
            for _ in 0..20 {
                let (x, y) = (tied(&mut rng, count, levels), tied(&mut rng, count, levels));
                assert_eq!(ranks(&x), ranks_by_counting(&x));
                match spearman(&x, &y) {
                    Some(rho) => assert!((rho - spearman_by_counting(&x, &y)).abs() < 1e-12),
                    None => assert!(spearman_by_counting(&x, &y).is_nan()),
                }
            }
        }
    }

    #[test]
    fn spearman_without_ties_is_the_formula_of_squared_differences() {
        let mut rng = rng(2);
        let (x, y) = (gaussian(&mut rng, 57), gaussian(&mut rng, 57));
        let d2: f64 = ranks(&x).iter().zip(ranks(&y)).map(|(a, b)| (a - b).powi(2)).sum();
        let n = 57.0;
        assert!((spearman(&x, &y).unwrap() - (1.0 - 6.0 * d2 / (n * (n * n - 1.0)))).abs() < 1e-12);
        let cubed: Vec<f64> = x.iter().map(|v| -v.powi(3)).collect();
        assert_eq!(spearman(&x, &cubed), Some(-1.0));
    }

    #[test]
    fn undefined_correlations_are_none() {
        let x = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(spearman(&x[..2], &x[..2]), None);
        assert_eq!(spearman(&x, &[5.0; 4]), None);
        assert_eq!(spearman(&x, &[0.0, -0.0, 0.0, -0.0]), None);
        assert_eq!(spearman(&x, &[1.0, f64::NAN, 2.0, 3.0]), None);
        assert_eq!(spearman(&x, &[1.0, f64::INFINITY, 2.0, 3.0]), None);
        assert_eq!(spearman(&x, &x[..3]), None);
        assert_eq!(ranks(&[0.0, -0.0, -1.0]), [2.5, 2.5, 1.0]);
        assert_eq!(ranks(&[]), Vec::<f64>::new());
    }

    #[test]
    fn quantiles_are_those_of_numpy() {
        let x = [7.0, 1.0, 3.0, 10.0];
        for (p, expected) in [(0.0, 1.0), (0.25, 2.5), (0.5, 5.0), (0.75, 7.75), (0.9, 9.1), (1.0, 10.0)] {
            assert!((quantile(&x, p).unwrap() - expected).abs() < 1e-12, "{p}");
        }
        assert_eq!(quantile(&[4.0], 0.3), Some(4.0));
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[1.0, f64::NAN], 0.5), None);
        assert_eq!(quantile(&[1.0, -f64::NAN], 0.5), None);
        assert_eq!(quantile(&x, 1.1), None);
        assert_eq!(quantile(&x, f64::NAN), None);
        assert_eq!(quantile(&[f64::MIN, f64::MAX], 0.5), Some(0.0));
    }

    #[test]
    fn a_shuffle_keeps_the_values_and_depends_on_the_seed_alone() {
        let x: Vec<f64> = (0..100).map(f64::from).collect();
        let (once, again, other) = (shuffled(&x, 3), shuffled(&x, 3), shuffled(&x, 4));
        assert_eq!(once, again);
        assert_ne!(once, other);
        let mut sorted = once;
        sorted.sort_by(f64::total_cmp);
        assert_eq!(sorted, x);
        // Every order of three values is as likely as any other: 1000 of 6000, standard deviation 29.
        let mut counts: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
        for seed in 0..6000 {
            let order = shuffled(&[0.0, 1.0, 2.0], seed).iter().map(|v| *v as u64).collect();
            *counts.entry(order).or_default() += 1;
        }
        assert!(counts.len() == 6 && counts.values().all(|c| (850..1150).contains(c)), "{counts:?}");
    }

    #[test]
    fn draws_are_uniform_and_whole() {
        let units = 11;
        let mut total = vec![0u32; units];
        for i in 0..4000 {
            let draw = BOOTSTRAP.draw(i, units);
            assert_eq!(draw.iter().sum::<u32>(), units as u32);
            total.iter_mut().zip(draw).for_each(|(t, d)| *t += d);
        }
        // Mean 4000, standard deviation below 64.
        assert!(total.iter().all(|t| (3700..4300).contains(t)), "{total:?}");
    }

    #[test]
    fn units_are_clusters_unless_there_is_one() {
        let units = Units::new(&[(1, 0), (0, 3), (1, 0), (0, 2)], 2);
        assert_eq!((units.of.as_slice(), units.count(), units.clustered()), ([2, 1, 2, 0].as_slice(), 3, true));
        assert_eq!(Units::new(&[5, 5, 5], 1), Units::points(3));
        assert_eq!(Units::new::<usize>(&[], 2).count(), 0);
    }

    /// Points of unequal clusters, related and with ties.
    fn clustered(seed: u64) -> (Vec<f64>, Vec<f64>, Vec<f64>, Vec<usize>) {
        let mut rng = rng(seed);
        let clusters: Vec<usize> = (0..60).map(|i| [0, 1, 1, 2, 3, 3, 3, 4, 5, 6][i % 10]).collect();
        let target = tied(&mut rng, 60, 15);
        let near = |rng: &mut ChaCha8Rng, noise: u64| -> Vec<f64> {
            target.iter().map(|t| t + rng.random_range(0..noise) as f64).collect()
        };
        (near(&mut rng, 25), near(&mut rng, 8), target.clone(), clusters)
    }

    #[test]
    fn the_bootstrap_of_correlations_agrees_with_written_out_resamples() {
        let (first, second, target, clusters) = clustered(5);
        let mut replicates = [vec![], vec![], vec![]];
        for i in 0..BOOTSTRAP.replicates {
            let draw = BOOTSTRAP.draw(i, 7);
            let (mut a, mut b, mut t) = (vec![], vec![], vec![]);
            for (cluster, &times) in draw.iter().enumerate() {
                for _ in 0..times {
                    for p in 0..clusters.len() {
                        if clusters[p] == cluster {
                            a.push(first[p]);
                            b.push(second[p]);
                            t.push(target[p]);
                        }
                    }
                }
            }
            let (a, b) = (spearman_by_counting(&a, &t), spearman_by_counting(&b, &t));
            for (of, value) in replicates.iter_mut().zip([a, b, b - a]) {
                of.push(value);
            }
        }
        let found = BOOTSTRAP.compare_predictors(&first, &second, &target, &Units::new(&clusters, 2));
        for (interval, mut values) in found.iter().map(|i| i.unwrap()).zip(replicates) {
            values.sort_by(f64::total_cmp);
            // 2.5 % of 399 steps is 9.975.
            let low = values[9] + 0.975 * (values[10] - values[9]);
            let high = values[389] + 0.025 * (values[390] - values[389]);
            assert!((interval.low - low).abs() < 1e-12 && (interval.high - high).abs() < 1e-12);
        }
        let estimate = spearman_by_counting(&second, &target);
        assert!((found[1].unwrap().estimate - estimate).abs() < 1e-12);
        assert_eq!(BOOTSTRAP.spearman(&second, &target, &Units::new(&clusters, 2)), found[1]);
    }

    #[test]
    fn intervals_do_not_depend_on_the_number_of_threads() {
        let (first, second, target, clusters) = clustered(6);
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| BOOTSTRAP.compare_predictors(&first, &second, &target, &Units::new(&clusters, 2)))
        };
        assert_eq!(with(1), with(5));
        let other = Bootstrap { seed: 8, ..BOOTSTRAP };
        assert_ne!(with(1), other.compare_predictors(&first, &second, &target, &Units::new(&clusters, 2)));
    }

    #[test]
    fn the_spread_of_bootstrap_means_is_the_standard_error() {
        let x = gaussian(&mut rng(9), 200);
        let mean = x.iter().sum::<f64>() / 200.0;
        let error = (x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (200.0 * 200.0)).sqrt();
        let interval = Bootstrap { replicates: 20_000, ..BOOTSTRAP }.mean(&x).unwrap();
        assert!((interval.estimate - mean).abs() < 1e-12);
        // Half of a 95 % interval is 1.96 standard errors; 20 000 replicates give its ends to within about 1.5 %.
        for side in [interval.high - mean, mean - interval.low] {
            assert!((side / (1.959_964 * error) - 1.0).abs() < 0.06, "{side} against {error}");
        }
    }

    #[test]
    fn intervals_of_a_mean_cover_it_as_often_as_they_say() {
        let mut rng = rng(10);
        let trials = 1000;
        let covered = (0..trials).filter(|&trial| {
            let x: Vec<f64> = gaussian(&mut rng, 50).iter().map(|v| 3.0 + 2.0 * v).collect();
            let i = Bootstrap { seed: trial, confidence: 0.9, ..BOOTSTRAP }.mean(&x).unwrap();
            i.low <= 3.0 && 3.0 <= i.high
        });
        // Percentile intervals of 50 values cover slightly less than 90 %; the standard deviation of the share is 1 %.
        let share = covered.count() as f64 / trials as f64;
        assert!((0.85..0.93).contains(&share), "{share}");
    }

    #[test]
    fn paired_differences_are_narrower_than_unpaired_ones() {
        let mut rng = rng(11);
        let hard: Vec<f64> = gaussian(&mut rng, 16).iter().map(|v| 3.0 + v).collect();
        let harder: Vec<f64> = hard.iter().zip(gaussian(&mut rng, 16)).map(|(h, v)| h + 0.1 + 0.01 * v).collect();
        let i = BOOTSTRAP.mean_difference(&harder, &hard).unwrap();
        assert!(i.low > 0.08 && i.high < 0.12, "{i:?}");
        assert_eq!(BOOTSTRAP.mean_difference(&harder, &hard[..15]), None);
    }

    #[test]
    fn undefined_intervals_are_none() {
        assert_eq!(BOOTSTRAP.mean(&[]), None);
        assert_eq!(BOOTSTRAP.mean(&[1.0]), None);
        assert_eq!(BOOTSTRAP.mean(&[1.0, f64::NAN]), None);
        assert_eq!(BOOTSTRAP.mean(&[1.0, f64::INFINITY]), None);
        assert_eq!(BOOTSTRAP.mean(&[f64::MAX, f64::MAX]), None);
        for odd in [Bootstrap { replicates: 0, ..BOOTSTRAP }, Bootstrap { confidence: f64::NAN, ..BOOTSTRAP }] {
            assert_eq!(odd.mean(&[1.0, 2.0]), None);
        }
        // Defined only where unit 0 was drawn at least `times` times: 63 % of resamples of many units for once, 26 %
        // for twice.
        let drawn = |times| BOOTSTRAP.interval(50, move |m| (m == [1; 50] || m[0] >= times).then_some(1.0));
        assert!(drawn(1).is_some() && drawn(2).is_none());
        let constant = [2.0; 9];
        let x: Vec<f64> = (0..9).map(f64::from).collect();
        let [storage, operator, difference] = BOOTSTRAP.compare_predictors(&constant, &x, &x, &Units::points(9));
        assert!(storage.is_none() && difference.is_none());
        assert_eq!(operator, Some(Interval { estimate: 1.0, low: 1.0, high: 1.0 }));
    }

    #[test]
    fn shares_are_ratios_of_sums_and_reach_beyond_the_extremes() {
        let share = BOOTSTRAP.share(&[(1, 10), (0, 30), (3, 3), (2, 7)]).unwrap();
        assert_eq!(share.estimate, 6.0 / 50.0);
        assert!(share.low < share.estimate && share.estimate < share.high);
        // Clopper and Pearson: (1 − p)^n = 2.5 %.
        let none = BOOTSTRAP.share(&[(0, 10), (0, 20)]).unwrap();
        assert!((none.estimate, none.low) == (0.0, 0.0) && ((1.0 - none.high).powi(30) - 0.025).abs() < 1e-12);
        let all = BOOTSTRAP.share(&[(10, 10), (20, 20)]).unwrap();
        assert!((all.estimate, all.high) == (1.0, 1.0) && (all.low.powi(30) - 0.025).abs() < 1e-12);
        assert_eq!(BOOTSTRAP.share(&[(1, 2)]), None);
        assert_eq!(BOOTSTRAP.share(&[(0, 0), (0, 0)]), None);
    }
}
