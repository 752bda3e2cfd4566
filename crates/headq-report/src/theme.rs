//! Colours, for light and for dark.
//!
//! Plots are drawn with inks. An ink goes through the drawing crate as a colour that stands for it, and [`themed`] puts the CSS
//! variable of the ink in its place, so that one drawing serves both themes.

use std::fmt::Write;

use plotters::style::RGBColor;

/// Distinct series; more of them begin again with the first.
pub const SERIES: usize = 8;

/// Steps of the colour scale of heat maps, from least to most.
pub const LEVELS: usize = 24;

/// A named colour of plots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// Text and points that stand out.
    Text,
    /// Labels of axes, reference lines.
    Muted,
    /// Axes and grid.
    Rule,
    /// What is drawn upon.
    Surface,
    /// A cell without a value.
    Missing,
    /// A series, by number.
    Series(usize),
    /// A step of the colour scale of heat maps.
    Heat(usize),
}

/// First two bytes of the colours that stand for inks; the third is the ink's code.
const MARK: (u8, u8) = (0x48, 0x51);

/// Code of the first series, and of the first step of heat.
const FIRST_SERIES: usize = 0x10;
const FIRST_HEAT: usize = 0x40;

impl Ink {
    const PLAIN: [Ink; 5] = [Ink::Text, Ink::Muted, Ink::Rule, Ink::Surface, Ink::Missing];

    fn all() -> impl Iterator<Item = Ink> {
        Self::PLAIN.into_iter().chain((0..SERIES).map(Ink::Series)).chain((0..LEVELS).map(Ink::Heat))
    }

    fn code(self) -> u8 {
        let code = match self {
            Ink::Series(i) => FIRST_SERIES + i % SERIES,
            Ink::Heat(level) => FIRST_HEAT + level.min(LEVELS - 1),
            plain => Self::PLAIN.iter().position(|ink| *ink == plain).expect("every other ink is listed"),
        };
        u8::try_from(code).expect("codes are few")
    }

    /// The colour that stands for it in a drawing.
    pub fn rgb(self) -> RGBColor {
        RGBColor(MARK.0, MARK.1, self.code())
    }

    /// Its CSS variable.
    fn variable(self) -> String {
        match self {
            Ink::Text => "--text".into(),
            Ink::Muted => "--muted".into(),
            Ink::Rule => "--rule".into(),
            Ink::Surface => "--surface".into(),
            Ink::Missing => "--missing".into(),
            Ink::Series(i) => format!("--series-{}", i % SERIES),
            Ink::Heat(level) => format!("--heat-{}", level.min(LEVELS - 1)),
        }
    }
}

/// A drawing with the variables of its inks in the place of the colours that stood for them.
pub fn themed(svg: &str) -> String {
    // Quotes in text are escaped, so that this finds attributes only.
    let mark = format!("=\"#{:02X}{:02X}", MARK.0, MARK.1);
    let mut parts = svg.split(mark.as_str());
    let mut themed = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let code = part.get(..2).and_then(|code| u8::from_str_radix(code, 16).ok());
        let ink = Ink::all().find(|ink| Some(ink.code()) == code).expect("only inks are drawn with");
        write!(themed, "=\"var({}){}", ink.variable(), &part[2..]).expect("a string takes any text");
    }
    themed
}

/// One theme.
struct Theme {
    /// Variables of the page.
    page: &'static [(&'static str, u32)],
    /// Of the series. After Okabe and Ito (2008), who chose hues that stay apart in common kinds of colour blindness; made darker
    /// for light and lighter for dark, so that each stands out from the surface.
    series: [u32; SERIES],
    /// Support points of the colour scale, from least (near the surface) to most.
    heat: [u32; 5],
}

const LIGHT: Theme = Theme {
    page: &[
        ("--page", 0xfafaf8),
        ("--surface", 0xffffff),
        ("--text", 0x1c2126),
        ("--muted", 0x59626b),
        ("--rule", 0xdcdfe0),
        ("--missing", 0xe9e6e0),
        ("--link", 0x1a5a94),
        ("--supported", 0x0b6650),
        ("--not-supported", 0xa83a08),
        ("--inconclusive", 0x5d5a6b),
    ],
    series: [0x0072b2, 0xd05000, 0x008a62, 0xa8508a, 0xa37000, 0x3c8ec4, 0x6b6f75, 0x8a2d3b],
    heat: [0xedf3f7, 0xa5cbe0, 0x4a97c5, 0x1c5f9c, 0x0a2a55],
};

const DARK: Theme = Theme {
    page: &[
        ("--page", 0x121517),
        ("--surface", 0x191d20),
        ("--text", 0xe4e7ea),
        ("--muted", 0xa3acb5),
        ("--rule", 0x363d43),
        ("--missing", 0x2c2a28),
        ("--link", 0x7fb8ea),
        ("--supported", 0x5fcfab),
        ("--not-supported", 0xff9c66),
        ("--inconclusive", 0xb9b6c9),
    ],
    series: [0x4aa8e8, 0xff8a4a, 0x3fc899, 0xe29ccb, 0xe6b040, 0x9ad4f5, 0xa9afb6, 0xf08a98],
    heat: [0x1f2c38, 0x1f5680, 0x3f90c2, 0x8fcaea, 0xeaf7ff],
};

/// Point `t` from 0 to 1 on a scale through support points, by channel.
fn between(points: &[u32], t: f64) -> u32 {
    let place = t * (points.len() - 1) as f64;
    let first = (place as usize).min(points.len() - 2);
    let part = place - first as f64;
    let channel = |shift: u32| {
        let of = |point: u32| f64::from(point >> shift & 0xff);
        let value = of(points[first]) * (1.0 - part) + of(points[first + 1]) * part;
        (value.round() as u32) << shift
    };
    channel(16) | channel(8) | channel(0)
}

impl Theme {
    /// Every variable with its colour.
    fn variables(&self) -> Vec<(String, u32)> {
        let page = self.page.iter().map(|(name, colour)| (name.to_string(), *colour));
        let series = self.series.iter().enumerate().map(|(i, colour)| (Ink::Series(i).variable(), *colour));
        let heat = (0..LEVELS)
            .map(|level| (Ink::Heat(level).variable(), between(&self.heat, level as f64 / (LEVELS - 1) as f64)));
        page.chain(series).chain(heat).collect()
    }

    fn css(&self) -> String {
        self.variables().iter().map(|(name, colour)| format!("{name}:#{colour:06x};")).collect()
    }
}

/// The variables of both themes, as CSS.
pub fn css() -> String {
    format!(":root{{{}}}\n@media (prefers-color-scheme:dark){{:root{{{}}}}}\n", LIGHT.css(), DARK.css())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relative luminance (WCAG 2).
    fn luminance(colour: u32) -> f64 {
        let channel = |shift: u32| {
            let c = f64::from(colour >> shift & 0xff) / 255.0;
            if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(16) + 0.7152 * channel(8) + 0.0722 * channel(0)
    }

    fn contrast(a: u32, b: u32) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn colours_stand_out_in_both_themes() {
        for theme in [&LIGHT, &DARK] {
            let colour = |name: &str| theme.page.iter().find(|(n, _)| *n == name).unwrap().1;
            for ground in [colour("--surface"), colour("--page")] {
                for name in ["--text", "--muted", "--link", "--supported", "--not-supported", "--inconclusive"] {
                    assert!(contrast(colour(name), ground) >= 4.5, "{name} on {ground:06x}");
                }
                for (i, series) in theme.series.iter().enumerate() {
                    assert!(contrast(*series, ground) >= 3.0, "series {i} on {ground:06x}");
                }
            }
        }
    }

    #[test]
    fn themes_define_the_same_variables() {
        let names = |theme: &Theme| theme.variables().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(&LIGHT), names(&DARK));
        for ink in Ink::all() {
            assert!(names(&LIGHT).contains(&ink.variable()), "{ink:?}");
        }
    }

    #[test]
    fn heat_goes_one_way_from_the_surface() {
        for (theme, sign) in [(&LIGHT, -1.0), (&DARK, 1.0)] {
            let of = |level: usize| luminance(between(&theme.heat, level as f64 / (LEVELS - 1) as f64));
            assert!((1..LEVELS).all(|level| sign * (of(level) - of(level - 1)) > 0.0));
        }
    }

    #[test]
    fn every_ink_is_mapped_and_text_is_left_alone() {
        let drawing: String = Ink::all()
            .map(|ink| {
                let RGBColor(r, g, b) = ink.rgb();
                format!("<a fill=\"#{r:02X}{g:02X}{b:02X}\"/>")
            })
            .collect::<String>()
            + "<text>=&quot;#485100</text>";
        let themed = themed(&drawing);
        assert!(!themed.contains("=\"#"));
        assert!(themed.contains("fill=\"var(--heat-23)\"") && themed.ends_with("<text>=&quot;#485100</text>"));
    }
}
