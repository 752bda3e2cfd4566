//! Plots as inline SVG, one file for each kind.

mod axis;
pub mod bars;
pub mod bits;
pub mod curves;
mod frame;
pub mod front;
pub mod heat;
mod labels;
pub mod scatter;
pub mod spectrum;

pub use frame::Key;

/// Width of a drawing, in CSS pixels: the page shows the widest that fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// The one plot of a figure, where there is room.
    Wide,
    /// The same on a narrow page, or one of several side by side.
    Narrow,
}

impl Width {
    /// In CSS pixels.
    pub fn pixels(self) -> u32 {
        match self {
            Width::Wide => 760,
            Width::Narrow => 380,
        }
    }
}

/// Something that can be drawn at any width.
pub trait Plot {
    /// An `svg` element with `label` for its accessible name, in the colours of the page. Drawings never hold what is not finite.
    fn draw(&self, width: Width, label: &str) -> String;
}

/// Whether a point can be drawn.
fn finite(point: &(f64, f64)) -> bool {
    point.0.is_finite() && point.1.is_finite()
}
