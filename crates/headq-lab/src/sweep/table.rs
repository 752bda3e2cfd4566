//! What a terminal shows of a sweep.

use comfy_table::{CellAlignment, Table, presets};

use super::data::{Best, Coded, Row, Sweep};
use crate::overlap::Overlaps;
use crate::report::number;

const NONE: &str = "–";

/// A row on the fronts, in a few letters.
pub fn on_front(row: &Row) -> &'static str {
    match (row.front_ppl, row.front_kl) {
        (true, true) => "ppl, KL",
        (true, false) => "ppl",
        (false, true) => "KL",
        (false, false) => "",
    }
}

/// An excess and its standard error, in percent.
pub fn excess(excess: f64, se: Option<f64>) -> String {
    match se {
        Some(se) => format!("{:+.2} ± {:.2} %", 100.0 * excess, 100.0 * se),
        None => format!("{:+.2} %", 100.0 * excess),
    }
}

/// Every row of what is coded, as a table in Markdown; `None` where there is none.
pub fn rows(sweep: &Sweep, kv: Coded) -> Option<String> {
    let own: Vec<&Row> = sweep.rows.iter().filter(|r| r.kv == kv).collect();
    let dense = ["dense".into(), bits(16.0), bits(16.0), "16.000".into(), format!("{:.3}", sweep.dense.ppl)];
    let dense = dense.into_iter().chain([NONE.to_string(), NONE.into(), String::new()]).collect();
    let row = |r: &Row| {
        vec![
            r.scheme.clone(),
            bits(r.key_bits),
            bits(r.value_bits),
            format!("{:.3}", r.cache_bits),
            format!("{:.3}", r.ppl),
            excess(r.excess, r.excess_se),
            number(Some(r.kl)),
            on_front(r).into(),
        ]
    };
    let header = ["scheme", "key bits", "value bits", "cache bits", "ppl", "excess", "KL to dense", "front"];
    (!own.is_empty()).then(|| grid(&header, [dense].into_iter().chain(own.into_iter().map(row)), 1))
}

fn bits(value: f64) -> String {
    format!("{value:.4}")
}

/// How far a family is behind the best within its budget.
pub fn behind(best: &Best) -> String {
    match best.behind_se {
        _ if best.behind == 0.0 => "best".into(),
        Some(se) => format!("{:+.4} ± {se:.4}", best.behind),
        None => format!("{:+.4}", best.behind),
    }
}

/// The best scheme of each family within each budget; `None` where no budget was asked for, or nothing is within one.
pub fn budgets(sweep: &Sweep) -> Option<String> {
    let row = |b: &Best| {
        vec![
            match b.kv {
                Coded::K => "keys".into(),
                Coded::Kv => "keys, values".into(),
            },
            b.family.clone(),
            b.scheme.clone(),
            format!("{}", b.budget),
            bits(b.bits),
            format!("{:.3}", b.cache_bits),
            format!("{:.3}", b.ppl),
            format!("{:+.2} %", 100.0 * b.excess),
            number(Some(b.kl)),
            behind(b),
            if b.close { "✓" } else { "" }.into(),
        ]
    };
    let bits = format!("{} bits bounded", sweep.bits);
    let header = [
        "coded",
        "family",
        "scheme",
        "budget",
        &bits,
        "cache bits",
        "ppl",
        "excess",
        "KL to dense",
        "Δnll to best",
        "close",
    ];
    (!sweep.budgets.is_empty()).then(|| grid(&header, sweep.budgets.iter().map(row), 3))
}

/// A table in Markdown, whose columns after the first `words` are numbers.
fn grid(header: &[&str], rows: impl Iterator<Item = Vec<String>>, words: usize) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// What was swept over, in a few lines.
pub fn provenance(sweep: &Sweep) -> Vec<String> {
    let s = sweep;
    let bos = if s.add_bos { ", each begun with BOS" } else { "" };
    let mut lines = vec![
        format!("model: {} ({})", s.model, s.fingerprint),
        format!("device: {}; seed {}; {}", s.device, s.seed, s.program),
        format!("{} tokens scored in windows of {}{bos}", s.tokens, s.context),
    ];
    let text = |what: &str, t: &crate::text::TextInfo| {
        let (path, sha256) = (t.path.display(), &t.sha256[..12]);
        format!("{what}: {path} ({} characters, {} tokens, sha256 {sha256})", t.chars, t.tokens)
    };
    lines.extend(s.texts.iter().map(|t| text("text", t)));
    lines.extend(s.calibration.iter().map(|t| text("calibrated on", t)));
    lines.extend(s.overlap.iter().flat_map(Overlaps::lines).map(|line| format!("OVERLAP: {line}")));
    lines
}
