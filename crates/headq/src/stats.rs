//! Calibration statistics: first and second moments of queries, keys, residuals and values, in f64 on the host.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use half::f16;
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;

use crate::scheme::{Pool, Scheme};
use crate::transform::HeadTransform;

/// n, Σx and Σxxᵀ of the rows of one head.
#[derive(Debug, Clone, PartialEq)]
pub struct Moments {
    /// Rows seen.
    pub n: u64,
    /// Σx: `[head_dim]`
    pub sum: DVector<f64>,
    /// Σxxᵀ: `[head_dim, head_dim]`
    pub outer: DMatrix<f64>,
}

impl Moments {
    /// Nothing seen yet.
    pub fn new(width: usize) -> Self {
        Self { n: 0, sum: DVector::zeros(width), outer: DMatrix::zeros(width, width) }
    }

    /// Adds rows `[n, head_dim]`, row-major.
    pub fn add(&mut self, rows: &[f32]) {
        let width = self.sum.len();
        let n = rows.len() / width;
        if n == 0 {
            return;
        }
        // Row-major [n, width] is column-major [width, n].
        let x = DMatrix::from_iterator(width, n, rows.iter().map(|&v| f64::from(v)));
        self.outer.gemm(1.0, &x, &x.transpose(), 1.0);
        self.sum += x.column_sum();
        self.n += n as u64;
    }

    /// Adds what another accumulator has seen.
    pub fn merge(&mut self, other: &Moments) {
        self.n += other.n;
        self.sum += &other.sum;
        self.outer += &other.outer;
    }

    /// The sum of several accumulators of the same width.
    ///
    /// # Panics
    /// If there are none.
    pub fn pooled(parts: &[Moments]) -> Moments {
        let mut total = parts[0].clone();
        parts[1..].iter().for_each(|m| total.merge(m));
        total
    }

    /// Whether all sums are finite.
    pub fn is_finite(&self) -> bool {
        self.sum.iter().chain(self.outer.iter()).all(|v| v.is_finite())
    }

    /// `E[x]`: `[head_dim]`; zeros before any row.
    pub fn mean(&self) -> DVector<f64> {
        &self.sum / self.n.max(1) as f64
    }

    /// `E[xxᵀ]`, uncentered.
    pub fn second(&self) -> DMatrix<f64> {
        symmetric(&self.outer / self.n.max(1) as f64)
    }

    /// `E[xxᵀ] − E[x]E[x]ᵀ`.
    pub fn covariance(&self) -> DMatrix<f64> {
        let mean = self.mean();
        self.second() - &mean * mean.transpose()
    }
}

/// Removes the rounding asymmetry of a product that is symmetric in exact arithmetic.
pub(crate) fn symmetric(x: DMatrix<f64>) -> DMatrix<f64> {
    (&x + x.transpose()) * 0.5
}

/// Statistics of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerStats {
    /// Post-RoPE queries, by query head.
    pub q: Vec<Moments>,
    /// Post-RoPE keys, by KV head.
    pub k: Vec<Moments>,
    /// Residuals e = k − B_b(k) of coded tokens, by KV head.
    pub e: Vec<Moments>,
    /// Values, by KV head.
    pub v: Vec<Moments>,
    /// Gradients, where they were taken.
    pub gradients: Option<GradientMoments>,
    /// Some of the keys and values themselves, where they were kept.
    pub sample: Option<Sample>,
    /// The mean of W_o,h W_o,hᵀ over the query heads h that share a KV head, where W_o,h are the rows of the output projection that belong to
    /// h; by KV head, where it was kept: `[head_dim, head_dim]` each.
    pub output: Option<Vec<DMatrix<f64>>>,
}

/// Moments of the gradients of a sampled token's log-likelihood by what attention reads from codes: `E[g gᵀ]` is a block of the Fisher
/// information, so that εᵀ`E[g gᵀ]`ε/2 is, to second order, what an error ε costs in nats (Amari; Martens, arXiv:1412.1193).
#[derive(Debug, Clone, PartialEq)]
pub struct GradientMoments {
    /// By post-RoPE keys of coded tokens, by KV head.
    pub k: Vec<Moments>,
    /// By values of coded tokens, by KV head.
    pub v: Vec<Moments>,
}

/// Runs of [`SAMPLE_RUN`] consecutive tokens, as halves.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    /// Post-RoPE keys, by KV head: `[tokens, head_dim]` each.
    pub k: Vec<Vec<f16>>,
    /// Values, likewise.
    pub v: Vec<Vec<f16>>,
}

/// Consecutive tokens of a sample, as many as a group of usual size has.
pub const SAMPLE_RUN: usize = 128;

impl GradientMoments {
    /// Adds what another accumulator has seen.
    pub fn merge(&mut self, other: &GradientMoments) {
        for (mine, theirs) in [(&mut self.k, &other.k), (&mut self.v, &other.v)] {
            mine.iter_mut().zip(theirs).for_each(|(m, t)| m.merge(t));
        }
    }
}

impl Sample {
    /// Adds another sample's tokens.
    pub fn merge(&mut self, other: &Sample) {
        let all = [(&mut self.k, &other.k), (&mut self.v, &other.v)];
        for (mine, theirs) in all {
            mine.resize_with(theirs.len(), Vec::new);
            mine.iter_mut().zip(theirs).for_each(|(m, t)| m.extend(t));
        }
    }
}

impl LayerStats {
    /// Nothing seen yet.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let empty = |n| vec![Moments::new(head_dim); n];
        Self {
            q: empty(heads),
            k: empty(kv_heads),
            e: empty(kv_heads),
            v: empty(kv_heads),
            gradients: None,
            sample: None,
            output: None,
        }
    }

    /// Name and moments of each kind of row.
    pub fn parts(&self) -> Vec<(&'static str, &[Moments])> {
        let mut all: Vec<(_, &[Moments])> = vec![("q", &self.q), ("k", &self.k), ("e", &self.e), ("v", &self.v)];
        if let Some(gradients) = &self.gradients {
            all.extend([("k_gradient", &gradients.k[..]), ("v_gradient", &gradients.v[..])]);
        }
        all
    }

    /// Whether all sums are finite.
    pub fn is_finite(&self) -> bool {
        let output = self.output.iter().flatten().flat_map(DMatrix::iter);
        self.parts().iter().flat_map(|(_, moments)| *moments).all(Moments::is_finite)
            && output.copied().all(f64::is_finite)
    }

    /// Adds rows of all heads, each slice `[heads, n, head_dim]` (`e` may have fewer rows than the others).
    pub fn add(&mut self, q: &[f32], k: &[f32], e: &[f32], v: &[f32]) {
        let fill = |moments: &mut Vec<Moments>, rows: &[f32]| {
            let per_head = rows.len() / moments.len();
            if per_head > 0 {
                moments.par_iter_mut().zip(rows.par_chunks(per_head)).for_each(|(m, rows)| m.add(rows));
            }
        };
        fill(&mut self.q, q);
        fill(&mut self.k, k);
        fill(&mut self.e, e);
        fill(&mut self.v, v);
    }

    /// Adds what another accumulator of the same layer has seen.
    pub fn merge(&mut self, other: &LayerStats) {
        if self.output.is_none() {
            self.output = other.output.clone();
        }
        for (mine, theirs) in
            [(&mut self.q, &other.q), (&mut self.k, &other.k), (&mut self.e, &other.e), (&mut self.v, &other.v)]
        {
            mine.iter_mut().zip(theirs).for_each(|(m, t)| m.merge(t));
        }
        match (&mut self.gradients, &other.gradients) {
            (Some(mine), Some(theirs)) => mine.merge(theirs),
            (mine @ None, theirs) => *mine = theirs.clone(),
            (Some(_), None) => {}
        }
        match (&mut self.sample, &other.sample) {
            (Some(mine), Some(theirs)) => mine.merge(theirs),
            (mine @ None, theirs) => *mine = theirs.clone(),
            (Some(_), None) => {}
        }
    }

    /// Query moments pooled over the query heads that share KV head `kv_head`.
    pub fn pooled_queries(&self, kv_head: usize) -> Moments {
        let group = self.q.len() / self.k.len();
        Moments::pooled(&self.q[kv_head * group..(kv_head + 1) * group])
    }
}

/// A sample less the mean of all rows.
fn centered(sample: &[f16], rows: &Moments) -> Vec<f32> {
    let mean = rows.mean();
    sample.iter().enumerate().map(|(i, x)| (x.to_f64() - mean[i % mean.len()]) as f32).collect()
}

/// Second moments of one KV head, from which operator-matched quantizers are derived.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadMoments {
    /// C_q = `E[q qᵀ]`, uncentered, pooled over the query heads that share the KV head: `[head_dim, head_dim]`.
    pub queries: DMatrix<f64>,
    /// C_k, the covariance of the keys about their mean: `[head_dim, head_dim]`.
    pub keys: DMatrix<f64>,
    /// F = `E[g gᵀ]` of the gradients by keys ([`GradientMoments`]), where they were taken: `[head_dim, head_dim]`.
    pub gradients: Option<DMatrix<f64>>,
    /// Of values, what reads them ([`LayerStats::output`]), where it was kept: `[head_dim, head_dim]`.
    pub output: Option<DMatrix<f64>>,
    /// Some of the keys less their mean, in runs of [`SAMPLE_RUN`]; empty where none were kept: `[tokens, head_dim]`.
    pub sample: Vec<f32>,
}

impl HeadMoments {
    /// Without gradients, output projection and sample.
    pub fn new(queries: DMatrix<f64>, keys: DMatrix<f64>) -> Self {
        Self { queries, keys, gradients: None, output: None, sample: Vec::new() }
    }
}

/// What calibrated base quantizers know of a model's keys and of the queries that read them.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyStatistics {
    /// KV heads per layer.
    pub kv_heads: usize,
    /// Head width.
    pub head_dim: usize,
    /// μ: `[layers, kv_heads, head_dim]`, row-major.
    pub mean: Vec<f32>,
    /// Standard deviation about the mean, as `mean`.
    pub deviation: Vec<f32>,
    /// Root mean square, as `mean`.
    pub rms: Vec<f32>,
    /// Second moments: `[layers, kv_heads]`.
    pub moments: Arc<[HeadMoments]>,
    /// The same of the values, which no queries read: their moments are the identity.
    pub values: Option<Arc<KeyStatistics>>,
    /// Transforms that were fitted to them.
    pub fits: Fits,
}

/// Keeps what has been fitted to statistics, by what was fitted, since every layer asks for it. Equal whatever it holds.
#[derive(Clone, Default)]
pub struct Fits(Arc<Mutex<BTreeMap<String, Fitted>>>);

/// The transforms of all heads, `[layers, kv_heads]`.
type Fitted = Arc<Vec<HeadTransform>>;

impl Fits {
    /// What was fitted under a name, or now is.
    pub(crate) fn of(&self, name: String, fit: impl FnOnce() -> Vec<HeadTransform>) -> Fitted {
        // What a panicking thread left is whole: entries are only added.
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(name).or_insert_with(|| Arc::new(fit())).clone()
    }
}

impl PartialEq for Fits {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl std::fmt::Debug for Fits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fits")
    }
}

impl KeyStatistics {
    /// From the moments of keys.
    ///
    /// # Errors
    /// [`crate::Error::Keys`] if there are none, or they are not finite.
    pub fn of(stats: &[LayerStats]) -> Result<Self, crate::Error> {
        if !stats.iter().all(LayerStats::is_finite) {
            return Err(crate::Error::Keys { reason: "the statistics are not finite".into() });
        }
        let gradients = |pick: fn(&GradientMoments) -> &Vec<Moments>| {
            move |layer: &LayerStats, head: usize| Some(pick(layer.gradients.as_ref()?)[head].second())
        };
        fn rows(layer: &LayerStats, head: usize, pick: fn(&Sample) -> &Vec<Vec<f16>>) -> &[f16] {
            layer.sample.as_ref().map_or(&[], |all| &pick(all)[head])
        }
        let (of_keys, of_values) = (gradients(|g| &g.k), gradients(|g| &g.v));
        let mut all = Self::of_rows(
            stats,
            |layer| &layer.k,
            |layer, head| HeadMoments {
                queries: layer.pooled_queries(head).second(),
                keys: layer.k[head].covariance(),
                gradients: of_keys(layer, head),
                output: None,
                sample: centered(rows(layer, head, |s| &s.k), &layer.k[head]),
            },
        )?;
        all.values = Some(Arc::new(Self::of_rows(
            stats,
            |layer| &layer.v,
            |layer, head| HeadMoments {
                queries: DMatrix::identity(all.head_dim, all.head_dim),
                keys: layer.v[head].covariance(),
                gradients: of_values(layer, head),
                output: layer.output.as_ref().map(|output| output[head].clone()),
                sample: centered(rows(layer, head, |s| &s.v), &layer.v[head]),
            },
        )?));
        Ok(all)
    }

    /// From the moments of some rows.
    fn of_rows(
        stats: &[LayerStats],
        rows: fn(&LayerStats) -> &Vec<Moments>,
        of_head: impl Fn(&LayerStats, usize) -> HeadMoments,
    ) -> Result<Self, crate::Error> {
        let heads = || stats.iter().flat_map(rows);
        let fail = |reason: &str| Err(crate::Error::Keys { reason: reason.into() });
        let Some(first) = heads().next() else { return fail("the statistics have no layers") };
        if heads().any(|m| m.n == 0) {
            return fail("the statistics hold no keys");
        }
        let channels = |value: &dyn Fn(f64, f64) -> f64| -> Vec<f32> {
            let head = |m: &Moments| {
                let (mean, second) = (m.mean(), m.second());
                (0..mean.len()).map(|i| value(mean[i], second[(i, i)]) as f32).collect::<Vec<_>>()
            };
            heads().flat_map(head).collect()
        };
        Ok(Self {
            kv_heads: stats[0].k.len(),
            head_dim: first.sum.len(),
            mean: channels(&|mean, _| mean),
            deviation: channels(&|mean, second| (second - mean * mean).max(0.0).sqrt()),
            rms: channels(&|_, second| second.sqrt()),
            moments: stats
                .iter()
                .flat_map(|layer| (0..layer.k.len()).map(|h| of_head(layer, h)).collect::<Vec<_>>())
                .collect(),
            values: None,
            fits: Fits::default(),
        })
    }

    /// Whether they hold what a scheme needs.
    ///
    /// # Errors
    /// [`crate::Error::Keys`] where gradients or the output projection are needed and were not taken.
    pub fn check(&self, scheme: &Scheme) -> Result<(), crate::Error> {
        if scheme.needs_gradients() && self.moments.iter().any(|m| m.gradients.is_none()) {
            return Err(crate::Error::Keys {
                reason: format!("they hold no gradients, which {scheme} needs; calibrate with --gradients"),
            });
        }
        let outputs = || self.values.iter().flat_map(|values| values.moments.iter().map(|m| &m.output));
        if scheme.needs_output() && (self.values.is_none() || outputs().any(Option::is_none)) {
            return Err(crate::Error::Keys {
                reason: format!(
                    "they hold no output projection, which {scheme} needs; calibrate again with this version"
                ),
            });
        }
        for pool in scheme.pools() {
            if let Pool::Plan(budgets) = pool
                && budgets.bits().len() != self.moments.len()
            {
                let (planned, found) = (budgets.bits().len(), self.moments.len());
                return Err(crate::Error::Keys {
                    reason: format!(
                        "they are of {found} heads, but {scheme} gives bits to {planned}; search for this model"
                    ),
                });
            }
        }
        Ok(())
    }

    /// The same with every mean multiplied by `factor`, for interventions on what attention cannot see.
    pub fn with_mean_times(&self, factor: f32) -> Self {
        Self { mean: self.mean.iter().map(|m| m * factor).collect(), ..self.clone() }
    }

    /// μ of one layer: `[1, kv_heads, 1, head_dim]`.
    pub fn mean_of(&self, layer: usize) -> burn::tensor::TensorData {
        burn::tensor::TensorData::new(self.layer(&self.mean, layer).to_vec(), [1, self.kv_heads, 1, self.head_dim])
    }

    /// Second moments of one layer's KV heads.
    pub fn moments_of(&self, layer: usize) -> &[HeadMoments] {
        &self.moments[layer * self.kv_heads..(layer + 1) * self.kv_heads]
    }

    /// The part of `[layers, kv_heads, head_dim]` that belongs to a layer.
    pub(crate) fn layer<'a>(&self, all: &'a [f32], layer: usize) -> &'a [f32] {
        let size = self.kv_heads * self.head_dim;
        &all[layer * size..(layer + 1) * size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_the_plain_sums_and_merge_like_them() {
        let rows: Vec<f32> = (0..7 * 3).map(|i| ((i * 37 % 11) as f32 - 5.0) / 3.0).collect();
        let mut whole = Moments::new(3);
        whole.add(&rows);
        let (mut a, mut b) = (Moments::new(3), Moments::new(3));
        a.add(&rows[..9]);
        b.add(&rows[9..]);
        a.merge(&b);
        assert_eq!(whole.n, 7);
        for i in 0..3 {
            let mean: f64 = (0..7).map(|t| f64::from(rows[t * 3 + i])).sum::<f64>() / 7.0;
            assert!((whole.mean()[i] - mean).abs() < 1e-12);
            for j in 0..3 {
                let second: f64 =
                    (0..7).map(|t| f64::from(rows[t * 3 + i]) * f64::from(rows[t * 3 + j])).sum::<f64>() / 7.0;
                assert!((whole.second()[(i, j)] - second).abs() < 1e-12);
                assert!((a.second()[(i, j)] - second).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn queries_pool_over_the_heads_of_a_group() {
        let mut stats = LayerStats::new(4, 2, 1);
        stats.add(&[1.0, 2.0, 3.0, 4.0], &[0.0, 0.0], &[], &[0.0, 0.0]);
        assert_eq!(stats.pooled_queries(1).sum[0], 7.0);
        assert_eq!(stats.pooled_queries(0).second()[(0, 0)], 2.5);
        assert_eq!(stats.e[0].n, 0);
    }

    #[test]
    fn what_a_scheme_needs_and_statistics_lack_is_named() {
        let mut stats = LayerStats::new(2, 1, 2);
        let rows = [1.0f32, 2.0, 3.0, -1.0];
        stats.add(&rows, &rows, &[], &rows);
        let check = |stats: &LayerStats, scheme: &str| {
            KeyStatistics::of(std::slice::from_ref(stats)).unwrap().check(&scheme.parse().unwrap())
        };
        for (scheme, lacks) in [
            ("klt-2(metric=fisher)", "no gradients"),
            ("dense/klt-2", "no gradients"),
            ("klt-2/klt-2(metric=output)", "no output projection"),
        ] {
            let error = check(&stats, scheme).unwrap_err().to_string();
            assert!(error.contains(lacks) && error.contains(scheme.split(['-', '/']).next().unwrap()), "{error}");
        }
        assert!(check(&stats, "klt-2/channel-2").is_ok());
        stats.output = Some(vec![DMatrix::identity(2, 2)]);
        assert!(check(&stats, "dense/klt-2(metric=output)").is_ok());
        assert!(check(&stats, "dense/klt-2(metric=fisher)").is_err());
        // As `merge` meets them: what is of the model and not of the text is kept from whichever has it.
        let mut merged = LayerStats::new(2, 1, 2);
        merged.merge(&stats);
        assert_eq!(merged.output, stats.output);
        stats.output = Some(vec![DMatrix::from_element(2, 2, f64::NAN)]);
        assert!(!stats.is_finite());
    }

    #[test]
    fn key_statistics_hold_what_each_kv_head_is_read_by() {
        let mut stats = LayerStats::new(4, 2, 2);
        let q = [1.0f32, 2.0, 3.0, -1.0, 0.5, 0.0, 2.0, 2.0];
        let k = [1.0f32, 0.0, 3.0, 2.0, 5.0, 5.0, 5.0, 1.0];
        stats.add(&q, &k, &[], &k);
        let found = KeyStatistics::of(&[stats.clone(), stats]).unwrap();
        assert_eq!(found.moments.len(), 4);
        // KV head 1 is read by the query heads 2 and 3; its keys (5, 5) and (5, 1) differ in the second channel.
        let head = &found.moments_of(1)[1];
        assert_eq!(head.queries, DMatrix::from_row_slice(2, 2, &[4.25 / 2.0, 2.0, 2.0, 2.0]));
        assert_eq!(head.keys, DMatrix::from_row_slice(2, 2, &[0.0, 0.0, 0.0, 4.0]));
    }
}
