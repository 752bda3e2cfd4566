//! Progress bars, notes and interruption.

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use headq_lab::Observer;
use headq_lab::hub::BYTES;
use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A line on standard error; a closed one is no reason to stop.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The first Ctrl-C (or SIGTERM) asks for a clean end, for which something is left to do; the second ends at once.
pub fn catch_interrupts(quiet: bool, doing: &'static str) {
    let handler = move || {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            say("error: interrupted twice; ended at once");
            std::process::exit(1);
        }
        if quiet {
            return;
        }
        say(&format!("interrupted: {doing}; press again to end at once"));
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        tracing::warn!("Ctrl-C will end the program at once: {error}");
    }
}

/// Shows one bar at a time on standard error.
pub struct Bars {
    quiet: bool,
    /// The bar, and what it counts.
    bar: Mutex<Option<(ProgressBar, String)>>,
}

impl Bars {
    pub fn new(quiet: bool) -> Self {
        Self { quiet, bar: Mutex::new(None) }
    }

    /// A note on standard error, above the bar.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            say(text);
        }
    }

    fn show(&self, template: &str, what: &str, total: usize, unit: &str) {
        if self.quiet {
            return;
        }
        let style = ProgressStyle::with_template(template).expect("the template is fixed").progress_chars("=> ");
        let bar = ProgressBar::new(total as u64).with_message(what.to_string()).with_style(style);
        bar.tick();
        self.with(|slot| *slot = Some((bar, unit.to_string())));
    }

    fn with(&self, f: impl FnOnce(&mut Option<(ProgressBar, String)>)) {
        // A panic while the lock is held could only have been in drawing; the bar is still usable.
        f(&mut self.bar.lock().unwrap_or_else(|e| e.into_inner()));
    }
}

impl Observer for Bars {
    fn begin(&self, what: &str, total: usize) {
        self.show("{msg:48} [{bar:24}] {pos}/{len} windows  {per_sec}  {eta} left", what, total, "windows");
    }

    /// What is said of such work stands behind the bar, which takes what is left of the line.
    fn begin_units(&self, what: &str, total: usize, unit: &str) {
        let counts = match unit {
            BYTES => "{decimal_bytes}/{decimal_total_bytes}  {decimal_bytes_per_sec}".into(),
            unit => format!("{{pos}}/{{len}} {unit}"),
        };
        self.show(&format!("{{msg}} [{{wide_bar}}] {counts}  {{eta}} left  {{prefix}}"), what, total, unit);
    }

    fn say(&self, text: &str) {
        self.with(|slot| {
            if let Some((bar, _)) = slot {
                bar.set_prefix(text.to_string());
            }
        });
    }

    fn step(&self) {
        self.steps(1);
    }

    fn steps(&self, count: usize) {
        self.with(|slot| {
            if let Some((bar, _)) = slot {
                bar.inc(count as u64);
            }
        });
    }

    fn end(&self) {
        self.with(|slot| {
            if let Some((bar, unit)) = slot.take() {
                let (what, count, time) = (bar.message(), bar.position(), bar.elapsed());
                bar.finish_and_clear();
                let amount = match unit.as_str() {
                    BYTES => DecimalBytes(count).to_string(),
                    unit => format!("{count} {unit}"),
                };
                say(&format!("{what}: {amount} in {:.1} s", time.as_secs_f64()));
            }
        });
    }

    fn cancelled(&self) -> bool {
        INTERRUPTED.load(Ordering::SeqCst)
    }
}
