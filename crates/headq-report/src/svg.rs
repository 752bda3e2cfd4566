//! SVG files that stand alone: drawings one upon another, and a legend.

use std::fmt::Write;

use crate::plot::{Key, Width};
use crate::theme;

/// Height of a legend's line and of a title, in CSS pixels.
const LINE: usize = 24;

/// A sheet that grows downwards.
#[derive(Debug, Default)]
pub struct Sheet {
    body: String,
    y: usize,
}

impl Sheet {
    /// A drawing of this height, with a title above.
    pub fn drawing(&mut self, title: &str, svg: &str, height: usize) {
        self.text(12, self.y + 17, title);
        self.y += LINE;
        self.nested(svg, (0, self.y), (Width::Wide.pixels() as usize, height));
        self.y += height + 8;
    }

    /// A line of the legend.
    pub fn key(&mut self, key: Key, name: &str) {
        self.nested(&key.draw(), (12, self.y + 4), (26, 14));
        self.text(48, self.y + 16, name);
        self.y += LINE;
    }

    /// The file.
    pub fn finish(self) -> String {
        let (width, height) = (Width::Wide.pixels(), self.y + 8);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\"><style>{}</style><rect width=\"100%\" height=\"100%\" fill=\"var(--surface)\"/>{}</svg>\n",
            theme::css(),
            self.body
        )
    }

    fn text(&mut self, x: usize, y: usize, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        write!(self.body, "<text x=\"{x}\" y=\"{y}\" fill=\"var(--text)\" font-size=\"13\">{text}</text>")
            .expect("a string takes any text");
    }

    /// A drawing at a place within the sheet.
    fn nested(&mut self, svg: &str, (x, y): (usize, usize), (width, height): (usize, usize)) {
        let placed = format!("<svg x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" ");
        self.body += &svg.replacen("<svg ", &placed, 1);
    }
}
