//! What plots share: a sheet to draw upon, axes, markers and the signs of legends.

use std::io;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::Width;
use super::axis::Axis;
use crate::theme::{Ink, themed};

/// Drawing units in a CSS pixel: the drawing crate places things at whole units only.
const UNITS: i32 = 4;

/// Size of text, in CSS pixels.
const TEXT: i32 = 13;

/// Widths of strokes, in drawing units.
const HAIRLINE: u32 = 3;
const LINE: u32 = 7;

/// Radius of a marker, in CSS pixels.
const RADIUS: f64 = 4.5;

/// What the drawing crate makes of a font size, undone.
const FONT_FACTOR: f64 = 1.24;

/// A place on a sheet, in drawing units from its upper left corner.
pub type Place = (i32, i32);

/// A sheet in drawing units.
type Sheet<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// From CSS pixels to drawing units.
pub fn px(pixels: f64) -> i32 {
    (pixels * f64::from(UNITS)).round() as i32
}

/// Estimated width of a text in drawing units; of its height there is one.
pub fn text_width(text: &str) -> i32 {
    text.chars().count() as i32 * px(0.6 * f64::from(TEXT))
}

/// Height of a text, in drawing units.
pub fn text_height() -> i32 {
    px(f64::from(TEXT))
}

/// Drawing into a string cannot fail.
fn drawn<T>(result: Result<T, DrawingAreaErrorKind<io::Error>>) -> T {
    result.expect("a string takes any drawing")
}

/// An `svg` element of this size in CSS pixels, in the colours of the page.
fn svg(width: u32, height: u32, attributes: &str, draw: impl FnOnce(&Sheet)) -> String {
    let (w, h) = (width * UNITS as u32, height * UNITS as u32);
    let mut text = String::new();
    {
        let sheet = SVGBackend::with_string(&mut text, (w, h)).into_drawing_area();
        draw(&sheet);
        drawn(sheet.present());
    }
    // Its own first tag, instead of the crate's fixed size; and without what is the default anyway.
    let body =
        text.split_once('>').map_or("", |(_, body)| body).replace(" opacity=\"1\"", "").replace(" stroke=\"none\"", "");
    format!("<svg viewBox=\"0 0 {w} {h}\" style=\"max-width:{width}px\" {attributes}>{}", themed(&body))
}

/// Text for an attribute.
fn attribute(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Where a text is held.
#[derive(Debug, Clone, Copy)]
pub enum Hold {
    /// At the middle of its upper edge.
    Top,
    /// In its middle.
    Middle,
}

/// A plot's axes and size.
pub struct Frame<'a> {
    /// Width.
    pub width: Width,
    /// Height in CSS pixels.
    pub height: u32,
    /// Horizontal axis and its title.
    pub x: (Axis, &'a str),
    /// Vertical axis and its title.
    pub y: (Axis, &'a str),
    /// Lines across at the ticks of the vertical axis.
    pub grid: bool,
}

impl Frame<'_> {
    /// Draws axes, and then what the pen is used for. `label` is the accessible name.
    pub fn draw(self, label: &str, plot: impl FnOnce(&Pen)) -> String {
        let attributes = format!("class=\"plot\" role=\"img\" aria-label=\"{}\"", attribute(label));
        svg(self.width.pixels(), self.height, &attributes, |sheet| {
            let pen = self.axes(sheet);
            plot(&pen);
        })
    }

    fn axes<'a, 'b>(self, sheet: &'a Sheet<'b>) -> Pen<'a, 'b> {
        let (x, y) = (self.x.0, self.y.0);
        let bottom = px(24.0) + if self.x.1.is_empty() { 0 } else { px(18.0) };
        let room = px(f64::from(self.height)) - bottom - px(10.0);
        let y_labels = most_labels(&y, room, |_| text_height());
        let widest = y.ticks(y_labels).into_iter().map(|tick| text_width(&y.tick_label(tick))).max().unwrap_or(0);
        // Never less than half a label of the horizontal axis takes.
        let left = (widest + px(12.0) + if self.y.1.is_empty() { 0 } else { px(24.0) }).max(px(28.0));
        let room = px(f64::from(self.width.pixels())) - left - px(20.0);
        let x_labels = most_labels(&x, room, text_width);
        let mut chart = drawn(
            ChartBuilder::on(sheet)
                .margin_top(px(10.0))
                .margin_right(px(20.0))
                .x_label_area_size(bottom)
                .y_label_area_size(left)
                .build_cartesian_2d(x, y),
        );
        let rule = ShapeStyle::from(&Ink::Rule.rgb()).stroke_width(HAIRLINE);
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(rule)
            .axis_style(ShapeStyle::from(&Ink::Muted.rgb()).stroke_width(HAIRLINE))
            .label_style(style(Ink::Muted))
            .axis_desc_style(style(Ink::Text))
            .set_all_tick_mark_size(px(3.0))
            .x_labels(x_labels)
            .y_labels(y_labels)
            .x_desc(self.x.1);
        if !self.y.1.is_empty() {
            mesh.y_desc(self.y.1);
        }
        if !self.grid {
            mesh.disable_y_mesh();
        }
        drawn(mesh.draw());
        Pen { sheet, area: chart.plotting_area().clone() }
    }
}

/// The most labels along an axis of this length that leave a gap between them, by their estimated sizes.
fn most_labels(axis: &Axis, room: i32, size: impl Fn(&str) -> i32) -> usize {
    let fits = |most: &usize| {
        let ticks = axis.ticks(*most);
        let places: Vec<i32> = ticks.iter().map(|tick| (axis.place(*tick) * f64::from(room)) as i32).collect();
        let sizes: Vec<i32> = ticks.iter().map(|tick| size(&axis.tick_label(*tick))).collect();
        (1..ticks.len()).all(|i| (places[i] - places[i - 1]).abs() >= (sizes[i] + sizes[i - 1]) / 2 + px(8.0))
    };
    (2..=10).rev().find(fits).unwrap_or(2)
}

fn style(ink: Ink) -> TextStyle<'static> {
    let size = f64::from(TEXT * UNITS) * FONT_FACTOR;
    ("sans-serif", size).into_font().color(&ink.rgb())
}

/// Draws upon the area between the axes.
pub struct Pen<'a, 'b> {
    sheet: &'a Sheet<'b>,
    area: DrawingArea<SVGBackend<'b>, Cartesian2d<Axis, Axis>>,
}

impl Pen<'_, '_> {
    /// The place of a point.
    pub fn at(&self, x: f64, y: f64) -> Place {
        self.area.map_coordinate(&(x, y))
    }

    /// Left, top, right and bottom of the area between the axes.
    pub fn bounds(&self) -> [i32; 4] {
        let (x, y) = self.area.get_pixel_range();
        [x.start, y.start, x.end, y.end]
    }

    /// A line through points.
    pub fn line(&self, points: &[(f64, f64)], ink: Ink) {
        let width = if matches!(ink, Ink::Series(_)) { LINE } else { HAIRLINE };
        let places: Vec<Place> = points.iter().map(|(x, y)| self.at(*x, *y)).collect();
        drawn(self.sheet.draw(&PathElement::new(places, ShapeStyle::from(&ink.rgb()).stroke_width(width))));
    }

    /// A hairline from one place to another.
    pub fn lead(&self, from: Place, to: Place) {
        let style = ShapeStyle::from(&Ink::Rule.rgb()).stroke_width(HAIRLINE);
        drawn(self.sheet.draw(&PathElement::new(vec![from, to], style)));
    }

    /// What lies between two lines.
    pub fn band(&self, low: &[(f64, f64)], high: &[(f64, f64)], ink: Ink) {
        let outline = low.iter().chain(high.iter().rev()).map(|(x, y)| self.at(*x, *y));
        drawn(self.sheet.draw(&Polygon::new(outline.collect::<Vec<_>>(), ink.rgb().mix(0.2).filled())));
    }

    /// A filled rectangle between two places.
    pub fn block(&self, from: Place, to: Place, ink: Ink) {
        drawn(self.sheet.draw(&Rectangle::new([from, to], ink.rgb().filled())));
    }

    /// The marker of a series.
    pub fn marker(&self, place: Place, series: usize) {
        mark(self.sheet, place, series, RADIUS, 1.0);
    }

    /// A small marker that lets others shine through.
    pub fn speck(&self, place: Place, series: usize) {
        mark(self.sheet, place, series, 0.62 * RADIUS, 0.6);
    }

    /// Text.
    pub fn text(&self, text: &str, place: Place, hold: Hold, ink: Ink) {
        let vertical = match hold {
            Hold::Top => VPos::Top,
            Hold::Middle => VPos::Center,
        };
        drawn(self.sheet.draw_text(text, &style(ink).pos(Pos::new(HPos::Center, vertical)), place));
    }

    /// Radius of a marker, in drawing units.
    pub fn radius(&self) -> i32 {
        px(RADIUS)
    }
}

/// Draws the shape of a series.
fn mark(sheet: &Sheet, (x, y): Place, series: usize, radius: f64, alpha: f64) {
    let colour = Ink::Series(series).rgb().mix(alpha);
    let r = px(radius);
    let filled = |corners: &[(f64, f64)]| {
        let corner = |(dx, dy): &(f64, f64)| (x + (dx * f64::from(r)) as i32, y + (dy * f64::from(r)) as i32);
        drawn(sheet.draw(&Polygon::new(corners.iter().map(corner).collect::<Vec<_>>(), colour.filled())));
    };
    let strokes = |ends: [(i32, i32); 2]| {
        let stroke = colour.stroke_width(px(0.5 * radius) as u32);
        for (dx, dy) in ends {
            drawn(sheet.draw(&PathElement::new(vec![(x - dx, y - dy), (x + dx, y + dy)], stroke)));
        }
    };
    match series % crate::theme::SERIES {
        0 => drawn(sheet.draw(&Circle::new((x, y), r, colour.filled()))),
        1 => filled(&[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
        2 => filled(&[(0.0, -1.2), (1.1, 0.8), (-1.1, 0.8)]),
        3 => filled(&[(0.0, -1.25), (1.25, 0.0), (0.0, 1.25), (-1.25, 0.0)]),
        4 => strokes([(r * 4 / 5, r * 4 / 5), (r * 4 / 5, -r * 4 / 5)]),
        5 => filled(&[(0.0, 1.2), (1.1, -0.8), (-1.1, -0.8)]),
        6 => drawn(sheet.draw(&Circle::new((x, y), r * 4 / 5, colour.stroke_width(px(0.45 * radius) as u32)))),
        _ => strokes([(r, 0), (0, r)]),
    }
}

/// A sign of a legend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// The marker of a series.
    Marker(usize),
    /// Its line, with the marker upon it.
    Line(usize),
    /// Its line alone.
    Stroke(usize),
    /// A bar of its colour.
    Bar(usize),
    /// A band of its colour.
    Band(usize),
    /// A thin line for comparison.
    Reference,
}

impl Key {
    /// A small `svg` element that says nothing to those who do not see it.
    pub fn draw(self) -> String {
        const SIZE: (u32, u32) = (26, 14);
        let middle = (px(13.0), px(7.0));
        svg(SIZE.0, SIZE.1, "class=\"key\" aria-hidden=\"true\"", |sheet| {
            let line = |ink: Ink, width: u32| {
                let ends = vec![(px(1.0), middle.1), (px(25.0), middle.1)];
                drawn(sheet.draw(&PathElement::new(ends, ShapeStyle::from(&ink.rgb()).stroke_width(width))));
            };
            let block = |style: ShapeStyle| {
                drawn(sheet.draw(&Rectangle::new([(px(6.0), px(1.0)), (px(20.0), px(13.0))], style)));
            };
            match self {
                Key::Marker(series) => mark(sheet, middle, series, RADIUS, 1.0),
                Key::Line(series) => {
                    line(Ink::Series(series), LINE);
                    mark(sheet, middle, series, RADIUS, 1.0);
                }
                Key::Stroke(series) => line(Ink::Series(series), LINE),
                Key::Bar(series) => block(Ink::Series(series).rgb().filled()),
                Key::Band(series) => block(Ink::Series(series).rgb().mix(0.2).filled()),
                Key::Reference => line(Ink::Muted, HAIRLINE),
            }
        })
    }
}
