//! Windows in parallel.
//!
//! On a CPU, windows are independent and a pass over one of them does not use two cores well, so that each core takes windows of
//! its own. Results come back in window order, whatever the number of threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use burn::tensor::Device;

use crate::{LabError, Observer};

/// Cores to use, and how many jobs share them at a time.
#[derive(Debug, Clone, Copy)]
pub struct Cores {
    /// Cores in all.
    pub threads: usize,
    /// Jobs at a time.
    pub jobs: usize,
}

impl Cores {
    /// For work on a device: on a CPU each core takes a job of its own; another device has one at a time, and the cores help it.
    pub fn on(device: &Device, threads: usize) -> Self {
        Self { threads, jobs: if headq::device::is_cpu(device) { threads } else { 1 } }
    }
}

/// Runs `job` for 0..count and hands each result to `take`, in order.
///
/// `make` builds what a worker needs for its jobs (a clone of the model, say) and `cores` bounds the cores used.
///
/// # Errors
/// The first error of a job, in order, or [`LabError::Interrupted`].
pub fn map_in_order<W: Send, T: Send>(
    what: &str,
    count: usize,
    cores: Cores,
    observer: &dyn Observer,
    make: impl Fn() -> W,
    job: impl Fn(&mut W, usize) -> Result<T, LabError> + Sync,
    mut take: impl FnMut(usize, T),
) -> Result<(), LabError> {
    let threads = cores.threads;
    let workers = cores.jobs.clamp(1, count.max(1));
    observer.begin(what, count);
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let (send, receive) = mpsc::channel();
    let result = std::thread::scope(|scope| {
        for _ in 0..workers {
            let (mut worker, send, next, stop, job) = (make(), send.clone(), &next, &stop, &job);
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads((threads / workers).max(1))
                .build()
                .map_err(|e| LabError::Usage(format!("cannot start {threads} threads: {e}")))?;
            scope.spawn(move || {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count || stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let result = if observer.cancelled() {
                        Err(LabError::Interrupted)
                    } else {
                        pool.install(|| job(&mut worker, i))
                    };
                    if result.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    if send.send((i, result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(send);
        let mut waiting = BTreeMap::new();
        let (mut due, mut failed) = (0, None);
        for (i, result) in receive {
            match result {
                Ok(value) => {
                    observer.step();
                    waiting.insert(i, value);
                }
                Err(error) if failed.as_ref().is_none_or(|(at, _)| i < *at) => failed = Some((i, error)),
                Err(_) => {}
            }
            while let Some(value) = waiting.remove(&due) {
                take(due, value);
                due += 1;
            }
        }
        match failed {
            None => Ok(()),
            Some((_, error)) => Err(error),
        }
    });
    observer.end();
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Silent;

    #[test]
    fn results_come_in_order_whatever_the_threads() {
        for threads in [1, 2, 7] {
            let mut seen = Vec::new();
            let job = |_: &mut (), i: usize| {
                std::thread::sleep(std::time::Duration::from_millis((10 - i as u64) % 3));
                Ok(i * i)
            };
            map_in_order(
                "squares",
                10,
                Cores { threads, jobs: threads },
                &Silent,
                || (),
                job,
                |i, v| seen.push((i, v)),
            )
            .unwrap();
            assert_eq!(seen, (0..10).map(|i| (i, i * i)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_first_error_ends_the_work() {
        let job = |_: &mut (), i: usize| if i >= 3 { Err(LabError::Usage(format!("job {i}"))) } else { Ok(i) };
        let error =
            map_in_order("failing", 100, Cores { threads: 2, jobs: 2 }, &Silent, || (), job, |_, _| ()).unwrap_err();
        assert_eq!(error.to_string(), "job 3");
    }
}
