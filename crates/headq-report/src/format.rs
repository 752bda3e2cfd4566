//! Numbers as text. What is undefined or not finite is written as a dash.

use headq_lab::diagnose::data::Interval;

/// Stands for a number that is not defined.
pub const NONE: &str = "–";

/// A true minus, which is as wide as a plus.
const MINUS: &str = "−";

/// Keeps a number and its unit on one line.
const NO_BREAK: char = '\u{a0}';

/// From here on a number is written with a power of ten.
const LARGE: f64 = 1e9;

/// With so many decimals, and without a negative zero.
pub fn fixed(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return NONE.into();
    }
    if value.abs() >= LARGE {
        return scientific(value, 2);
    }
    let text = format!("{value:.decimals$}");
    match text.strip_prefix('-') {
        Some(digits) if digits.chars().any(|c| ('1'..='9').contains(&c)) => format!("{MINUS}{digits}"),
        Some(digits) => digits.into(),
        None => text,
    }
}

/// [`fixed`] with a sign in any case.
pub fn signed(value: f64, decimals: usize) -> String {
    let text = fixed(value, decimals);
    if !value.is_finite() || text.starts_with(MINUS) { text } else { format!("+{text}") }
}

/// With three significant digits.
pub fn number(value: f64) -> String {
    let size = value.abs();
    match value {
        v if !v.is_finite() => NONE.into(),
        0.0 => "0".into(),
        v if !(1e-3..1e4).contains(&size) => scientific(v, 2),
        v => fixed(v, (2 - size.log10().floor() as i32).max(0) as usize),
    }
}

/// Mantissa and power of ten.
fn scientific(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$e}");
    let (mantissa, exponent) = text.split_once('e').expect("scientific notation has an exponent");
    format!("{}×10{}", mantissa.replace('-', MINUS), superscript(exponent))
}

fn superscript(exponent: &str) -> String {
    let raised = |c: char| match c {
        '-' => '⁻',
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        // The others follow one another in Unicode.
        c => char::from_u32('⁰' as u32 + c.to_digit(10).unwrap_or(0)).unwrap_or('⁰'),
    };
    exponent.chars().map(raised).collect()
}

/// The label of a tick: short, without the noise of binary fractions.
pub fn tick(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        return "0".into();
    }
    if (1e-3..1e4).contains(&size) {
        let text = fixed(value, (4 - size.log10().floor() as i32).max(0) as usize);
        return if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text };
    }
    let text = format!("{value:.2e}");
    let (mantissa, exponent) = text.split_once('e').expect("scientific notation has an exponent");
    match mantissa.trim_end_matches('0').trim_end_matches('.') {
        "1" => format!("10{}", superscript(exponent)),
        short => format!("{}×10{}", short.replace('-', MINUS), superscript(exponent)),
    }
}

/// A share as a percentage.
pub fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    match percent.abs() {
        p if !p.is_finite() => NONE.into(),
        p if p >= 1e5 => format!("{}{NO_BREAK}%", number(percent)),
        p if (1e-4..0.05).contains(&p) => format!("{}{NO_BREAK}%", number(percent)),
        _ => format!("{}{NO_BREAK}%", fixed(percent, 1)),
    }
}

/// Perplexity.
pub fn perplexity(value: f64) -> String {
    if value < 1e5 { fixed(value, 3) } else { number(value) }
}

/// A count with groups of three digits.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count in at most five characters.
pub fn short_count(value: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    match UNITS.iter().find(|(unit, _)| value >= *unit) {
        None => value.to_string(),
        Some((unit, name)) => {
            let scaled = value as f64 / *unit as f64;
            format!("{}{name}", fixed(scaled, if scaled < 9.95 { 1 } else { 0 }))
        }
    }
}

/// A number that may be undefined.
pub fn maybe(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or(NONE.into(), show)
}

/// An estimate with its interval, `estimate [low, high]`.
pub fn interval(value: Option<Interval>, show: impl Fn(f64) -> String) -> String {
    match value {
        Some(i) if i.estimate.is_finite() && i.low.is_finite() && i.high.is_finite() => {
            format!("{} [{}, {}]", show(i.estimate), show(i.low), show(i.high))
        }
        Some(i) => show(i.estimate),
        None => NONE.into(),
    }
}

/// A correlation.
pub fn rho(value: f64) -> String {
    fixed(value, 3)
}

/// A difference of losses, nats per token.
pub fn nats(value: f64) -> String {
    signed(value, 4)
}

/// `1 window`, `2 windows`.
pub fn plural(n: usize, noun: &str) -> String {
    format!("{} {noun}{}", count(n as u64), if n == 1 { "" } else { "s" })
}

/// The first characters of a hash, which are enough to tell two apart.
pub fn short_hash(hash: &str) -> String {
    hash.chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let cases = [
            (number(0.0), "0"),
            (number(0.08812), "0.0881"),
            (number(-0.08812), "−0.0881"),
            (number(12.345), "12.3"),
            (number(1234.5), "1234"),
            (number(0.00012345), "1.23×10⁻⁴"),
            (number(4.5e10), "4.50×10¹⁰"),
            (number(f64::NAN), "–"),
            (number(f64::NEG_INFINITY), "–"),
            (number(f64::MAX), "1.80×10³⁰⁸"),
            (number(5e-324), "4.94×10⁻³²⁴"),
            (fixed(-0.0001, 2), "0.00"),
            (fixed(-2e300, 2), "−2.00×10³⁰⁰"),
            (signed(-0.0001, 2), "+0.00"),
            (signed(f64::INFINITY, 2), "–"),
            (percent(0.823), "82.3\u{a0}%"),
            (percent(-6.342), "−634.2\u{a0}%"),
            (percent(0.0001), "0.0100\u{a0}%"),
            (percent(-2e-15), "0.0\u{a0}%"),
            (percent(f64::NAN), "–"),
            (perplexity(30.2271), "30.227"),
            (perplexity(1e9), "1.00×10⁹"),
            (perplexity(f64::INFINITY), "–"),
            (count(0), "0"),
            (count(999), "999"),
            (count(1_234_567), "1,234,567"),
            (short_count(950), "950"),
            (short_count(9_960), "10k"),
            (short_count(1_250), "1.2k"),
            (short_count(u64::MAX), "18446744T"),
            (plural(1, "window"), "1 window"),
            (plural(8, "window"), "8 windows"),
        ];
        for (found, expected) in cases {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn ticks() {
        for (value, expected) in [
            (0.0, "0"),
            (0.1 + 0.2, "0.3"),
            (0.005, "0.005"),
            (-2.5, "−2.5"),
            (1000.0, "1000"),
            (1e-4, "10⁻⁴"),
            (2e-5, "2×10⁻⁵"),
            (1e6, "10⁶"),
            (35.0, "35"),
        ] {
            assert_eq!(tick(value), expected);
        }
    }

    #[test]
    fn intervals_without_bounds_show_the_estimate() {
        let bounds = |low, high| Some(Interval { estimate: 0.5, low, high });
        assert_eq!(interval(bounds(0.25, 0.75), rho), "0.500 [0.250, 0.750]");
        assert_eq!(interval(bounds(f64::NAN, 0.75), rho), "0.500");
        assert_eq!(interval(None, rho), "–");
    }
}
