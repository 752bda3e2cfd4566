//! The fronts of a sweep, as an SVG file that stands alone.

use headq_lab::sweep::data::Sweep;

use crate::content::sweep::{legend, panels};
use crate::plot::Width;
use crate::svg::Sheet;

/// Excess perplexity and divergence against cache bits, one drawing upon another, with a legend.
pub fn sweep_plot(sweep: &Sweep) -> String {
    let mut sheet = Sheet::default();
    for panel in panels(sweep) {
        sheet.drawing(&format!("{}, {}", panel.label, sweep.model), &panel.plot.draw(Width::Wide, &panel.label), 430);
    }
    for (key, name) in legend(sweep) {
        sheet.key(key, name);
    }
    sheet.finish()
}
