//! Experiments on quantized KV caches: calibration, evaluation, and the artifacts and reports that they leave.

pub mod artifact;
pub mod bench;
pub mod calibrate;
pub mod compare;
pub mod diagnose;
mod error;
pub mod evaluate;
pub mod finetune;
pub mod generate;
mod gradients;
pub mod hub;
pub mod memory;
mod observe;
pub mod overlap;
pub mod pass;
pub mod report;
pub mod run;
pub mod scheme_file;
pub mod search;
pub mod sweep;
pub mod text;
pub mod workers;

pub use calibrate::calibrate;
pub use error::LabError;
pub use observe::{Observer, Silent};

/// Program and version, as artifacts and reports state it.
pub const PROGRAM: &str = concat!("headq ", env!("CARGO_PKG_VERSION"));
