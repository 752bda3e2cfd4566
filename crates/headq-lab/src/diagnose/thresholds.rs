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
    /// Least number of points for a correlation (metric, route flips).
    pub min_points: usize,
    /// Metric: least Spearman ρ of Fisher error with attention KL.
    pub min_rho: f64,
    /// Counterexamples: least share of equal-budget pairs.
    pub min_counterexamples: f64,
    /// Counterexamples, metric: code bits (per element) by which two budgets may differ and still count as equal.
    pub budget_tolerance: f64,
    /// Null space: least ratio of the largest to the smallest Fisher error over α for the static quantizer.
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
