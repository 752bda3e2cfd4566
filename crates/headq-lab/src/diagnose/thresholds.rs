//! What decides verdicts.

use serde::{Deserialize, Serialize};

/// Thresholds of the verdicts, as `[diagnose.thresholds]` in a configuration or `--threshold NAME=VALUE`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Thresholds {
    /// Confidence level of every interval.
    pub confidence: f64,
    /// Bootstrap replicates.
    pub replicates: usize,
    /// Least number of units that a bootstrap resamples. With fewer windows an interval of losses is undefined; with fewer heads,
    /// points are resampled in their place.
    pub min_units: usize,
    /// Least number of points for a correlation (metric, route flips).
    pub min_points: usize,
    /// Metric: least Spearman ρ of Fisher error with attention KL.
    pub min_rho: f64,
    /// Counterexamples: least share of equal-budget pairs.
    pub min_counterexamples: f64,
    /// Counterexamples, metric: code bits (per element) by which two budgets may differ and still count as equal.
    pub budget_tolerance: f64,
    /// Null space: least ratio of the greatest Fisher error over α to that of centered keys, for a static quantizer.
    pub min_null_rise: f64,
    /// Null space: most relative change of the Fisher error over α for a shift-equivariant quantizer.
    pub max_null_change: f64,
    /// Bases, direction, perplexity: least damage of the base quantizer, nats per token; below it there is nothing to correct.
    pub min_damage: f64,
    /// Bases, direction, perplexity: share of ln(vocabulary) that the dense loss must stay below for the model to predict at all.
    pub max_dense_loss: f64,
    /// Direction: least ratio of the flipped correction's added loss to the base quantizer's.
    pub min_flip_ratio: f64,
    /// Route flips: least ratio of the flip share above the median entropy to that below.
    pub min_flip_rise: f64,
    /// Perplexity: least share of the excess perplexity that the correction removes.
    pub min_excess_removed: f64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            confidence: 0.95,
            replicates: 1000,
            min_units: 4,
            min_points: 30,
            min_rho: 0.8,
            min_counterexamples: 0.01,
            budget_tolerance: 0.001,
            min_null_rise: 1.5,
            max_null_change: 0.02,
            min_damage: 0.005,
            max_dense_loss: 0.95,
            min_flip_ratio: 1.0,
            min_flip_rise: 1.5,
            min_excess_removed: 0.25,
        }
    }
}

impl Thresholds {
    /// Checks that every threshold has a meaning.
    ///
    /// # Errors
    /// The name, what was expected and what was found.
    pub fn check(&self) -> Result<(), String> {
        let share = |name: &str, x: f64| match x > 0.0 && x < 1.0 {
            true => Ok(()),
            false => Err(format!("threshold {name}: expected a number between 0 and 1, found {x}")),
        };
        share("confidence", self.confidence)?;
        let numbers = [
            ("min-rho", self.min_rho),
            ("min-counterexamples", self.min_counterexamples),
            ("budget-tolerance", self.budget_tolerance),
            ("min-null-rise", self.min_null_rise),
            ("max-null-change", self.max_null_change),
            ("min-damage", self.min_damage),
            ("max-dense-loss", self.max_dense_loss),
            ("min-flip-ratio", self.min_flip_ratio),
            ("min-flip-rise", self.min_flip_rise),
            ("min-excess-removed", self.min_excess_removed),
        ];
        if let Some((name, x)) = numbers.iter().find(|(_, x)| !(x.is_finite() && *x >= 0.0)) {
            return Err(format!("threshold {name}: expected a number of at least 0, found {x}"));
        }
        let counts = [
            ("replicates", self.replicates, 20, 100_000),
            ("min-units", self.min_units, 2, 1_000_000),
            ("min-points", self.min_points, 3, 1_000_000),
        ];
        match counts.iter().find(|(_, n, low, high)| n < low || n > high) {
            Some((name, n, low, high)) => Err(format!("threshold {name}: expected {low} to {high}, found {n}")),
            None => Ok(()),
        }
    }

    /// Sets one threshold from `NAME=VALUE`.
    ///
    /// # Errors
    /// In words, for an unknown name (listing the known ones) or a value that is not a number.
    pub fn set(&mut self, assignment: &str) -> Result<(), String> {
        let (name, value) =
            assignment.split_once('=').ok_or_else(|| format!("threshold '{assignment}' is not written NAME=VALUE"))?;
        let mut table = serde_json::to_value(*self).expect("thresholds are numbers");
        let known = || serde_json::to_value(Thresholds::default()).expect("thresholds are numbers");
        let slot = table.get_mut(name).ok_or_else(|| {
            let names: Vec<String> = known().as_object().into_iter().flatten().map(|(k, _)| k.clone()).collect();
            format!("threshold '{name}' is not known; known are {}", names.join(", "))
        })?;
        let number = |e: &dyn std::fmt::Display| format!("threshold {name}: expected a number, found '{value}' ({e})");
        let value: serde_json::Value = serde_json::from_str(value).map_err(|e| number(&e))?;
        *slot = value.clone();
        *self = serde_json::from_value(table).map_err(|e| number(&e))?;
        self.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_set_by_name() {
        let mut t = Thresholds::default();
        t.set("min-rho=0.9").unwrap();
        t.set("replicates=200").unwrap();
        assert_eq!((t.min_rho, t.replicates), (0.9, 200));
        for (bad, part) in [
            ("rho=1", "'rho' is not known; known are confidence, replicates"),
            ("min-rho", "NAME=VALUE"),
            ("min-rho=high", "expected a number"),
            ("replicates=2.5", "expected a number"),
            ("replicates=3", "expected 20 to 100000"),
            ("confidence=1", "between 0 and 1"),
            ("min-damage=-1", "at least 0"),
        ] {
            let mut t = Thresholds::default();
            let error = t.set(bad).unwrap_err();
            assert!(error.contains(part), "{bad}: {error}");
        }
    }
}
