//! The plot of a benchmark, as an SVG file that stands alone.

use headq_lab::bench::{BenchReport, Reading};

use crate::plot::curves::{Curve, Curves, Kind};
use crate::plot::{Key, Plot, Width};
use crate::svg::Sheet;

/// Height of a drawing, in CSS pixels.
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
    let mut sheet = Sheet::default();
    for (title, curves) in panels {
        let title = format!("{title}, {}, {threads} thread(s)", report.model);
        sheet.drawing(&title, &curves.draw(Width::Wide, &title), DRAWING);
    }
    for (series, name) in names.iter().enumerate() {
        sheet.key(Key::Line(series), name);
    }
    sheet.finish()
}

fn name(reading: &Reading) -> String {
    if reading.scheme == "dense" { format!("dense {}", reading.cache_dtype) } else { reading.scheme.clone() }
}
