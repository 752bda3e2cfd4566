//! The plot of a benchmark, as an SVG file that stands alone.

use std::fmt::Write;

use headq_lab::bench::{BenchReport, Reading};

use crate::plot::curves::{Curve, Curves, Kind};
use crate::plot::{Key, Plot, Width};
use crate::theme;

/// Height of a legend's line and of a title, in CSS pixels.
const LINE: usize = 24;
/// Height of the drawing.
const DRAWING: usize = 360;

/// Milliseconds of attention, and of whole decode steps where they were measured, over contexts: a curve for each cache, on the most
/// threads that were measured. The median is drawn.
pub fn bench_plot(report: &BenchReport) -> String {
    let threads = report.readings.iter().map(|r| r.threads).max().unwrap_or(1);
    let readings: Vec<&Reading> = report.readings.iter().filter(|r| r.threads == threads).collect();
    let mut names: Vec<String> = Vec::new();
    for name in readings.iter().map(|r| name(r)) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let curves = |value: fn(&Reading) -> Option<f64>| {
        let of = |(series, wanted): (usize, &String)| {
            let points = readings.iter().filter(|r| name(r) == *wanted);
            let points = points.filter_map(|r| Some((r.context as f64, value(r)?))).collect();
            Curve { series, points }
        };
        Curves { curves: names.iter().enumerate().map(of).collect(), kind: Kind::MillisecondsByContext }
    };
    let panels = [
        ("Attention of all layers for one token", curves(|r| Some(r.attention_ms.median))),
        ("A whole decode step", curves(|r| r.step_ms.map(|ms| ms.median))),
    ];
    let panels = panels.into_iter().filter(|(_, curves)| curves.curves.iter().any(|c| !c.points.is_empty()));
    let width = Width::Wide.pixels();
    let (mut body, mut y) = (String::new(), 0);
    let text = |body: &mut String, x: usize, y: usize, ink: &str, text: &str| {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        write!(body, "<text x=\"{x}\" y=\"{y}\" fill=\"var({ink})\" font-size=\"13\">{text}</text>")
            .expect("a string takes any text");
    };
    for (title, curves) in panels {
        let title = format!("{title}, {}, {threads} thread(s)", report.model);
        text(&mut body, 12, y + 17, "--text", &title);
        y += LINE;
        body += &nested(&curves.draw(Width::Wide, &title), 0, y, width as usize, DRAWING);
        y += DRAWING + 8;
    }
    for (series, name) in names.iter().enumerate() {
        body += &nested(&Key::Line(series).draw(), 12, y + 4, 26, 14);
        text(&mut body, 48, y + 16, "--text", name);
        y += LINE;
    }
    let height = y + 8;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\"><style>{}</style><rect width=\"100%\" height=\"100%\" fill=\"var(--surface)\"/>{body}</svg>\n",
        theme::css()
    )
}

/// A drawing at a place within another.
fn nested(svg: &str, x: usize, y: usize, width: usize, height: usize) -> String {
    svg.replacen("<svg ", &format!("<svg x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" "), 1)
}

fn name(reading: &Reading) -> String {
    if reading.scheme == "dense" { format!("dense {}", reading.cache_dtype) } else { reading.scheme.clone() }
}
