//! Reports of HeadQ runs: one self-contained HTML document with inline SVG plots, and the same content as Markdown.
//!
//! ```text
//! load ──▶ Run ──▶ content ──▶ Document ──▶ html / markdown ──▶ write
//! ```
//!
//! A [`Run`] is what a run's folder holds: a diagnosis, an evaluation, a comparison, a sweep, bases that were trained, or several of these. Everything that a report says is put together once,
//! as a document of sections, tables and figures, so that the two formats cannot differ in content: Markdown has a table of the data
//! where HTML has a plot. Plots are drawn in named colours that the page's style sheet defines for light and dark. Equal runs give
//! equal bytes.

mod bench;
mod content;
mod document;
mod error;
mod format;
mod html;
mod load;
mod markdown;
mod output;
mod plot;
mod svg;
mod sweep;
mod theme;

pub use bench::bench_plot;
pub use error::ReportError;
pub use load::{Finetuning, Run, load};
pub use output::{check, is_own_output, write};
pub use sweep::sweep_plot;

/// The report of these runs as one HTML document that needs nothing else: no network, script, font or image.
///
/// `command` is the command that makes the report.
pub fn html(runs: &[Run], command: &str) -> String {
    html::render(&content::document(runs, command))
}

/// The report of these runs as Markdown, with a table of the data in the place of each plot.
///
/// `command` is the command that makes the report.
pub fn markdown(runs: &[Run], command: &str) -> String {
    markdown::render(&content::document(runs, command))
}
