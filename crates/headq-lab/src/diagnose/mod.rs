//! `headq diagnose`: the seven links of the evidence chain, each with its numbers and its verdict.

pub mod data;
pub mod judge;
pub mod statistics;
pub mod thresholds;
