//! How fast this machine reads memory.

use std::time::Instant;

use rayon::prelude::*;

/// Numbers that are read: 512 MiB, more than processors cache.
const LENGTH: usize = 128 << 20;
/// Numbers of a task.
const TASK: usize = 1 << 18;
const PASSES: usize = 5;

/// The best of several passes that add up more memory than processors cache, on the threads of the current pool, in 10⁹ bytes per
/// second.
pub fn read_bandwidth() -> f64 {
    let memory: Vec<f32> = (0..LENGTH).into_par_iter().map(|i| (i % 7) as f32).collect();
    let pass = || {
        let begin = Instant::now();
        let sum: f32 = memory.par_chunks(TASK).map(headq::kernels::lane_total).sum();
        std::hint::black_box(sum);
        (LENGTH * size_of::<f32>()) as f64 / begin.elapsed().as_secs_f64() / 1e9
    };
    (0..PASSES).map(|_| pass()).fold(0.0, f64::max)
}
