//! What long work tells the outside, and how it is stopped.

/// Watches long work. Implementations show progress bars, or nothing.
pub trait Observer: Sync {
    /// Work named `what` begins, in `total` steps.
    fn begin(&self, what: &str, total: usize);
    /// The same, in steps that are not windows but `unit`.
    fn begin_units(&self, what: &str, total: usize, unit: &str) {
        let _ = unit;
        self.begin(what, total);
    }
    /// How the work is going, in a few words; replaces what was said before.
    fn say(&self, text: &str) {
        let _ = text;
    }
    /// One step is done.
    fn step(&self);
    /// So many steps are done.
    fn steps(&self, count: usize) {
        (0..count).for_each(|_| self.step());
    }
    /// The work is done.
    fn end(&self);
    /// Whether to stop at the next opportunity.
    fn cancelled(&self) -> bool;
}

/// Shows nothing and never stops.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn begin(&self, _: &str, _: usize) {}
    fn step(&self) {}
    fn steps(&self, _: usize) {}
    fn end(&self) {}
    fn cancelled(&self) -> bool {
        false
    }
}
