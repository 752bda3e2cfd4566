//! What a terminal shows of an evaluation.

use comfy_table::{CellAlignment, Table, presets};

use crate::evaluate::{Evaluation, SchemeResult};
use crate::overlap::Overlaps;

/// A column of the result table: its title, what it shows, and whether it is shown on a terminal too.
type Column = (&'static str, fn(&SchemeResult) -> String, bool);

const COLUMNS: &[Column] = &[
    ("scheme", |r| r.scheme.clone(), true),
    ("ppl", |r| format!("{:.3}", r.ppl), true),
    ("excess removed", |r| r.excess_removed.map_or("–".into(), |v| format!("{:.1} %", 100.0 * v)), true),
    (
        "Δnll ± se",
        |r| match (r.canonical.as_str(), r.nll_minus_dense_se) {
            ("dense", _) | (_, None) => "–".into(),
            (_, Some(se)) => format!("{:+.4} ± {se:.4}", r.nll_minus_dense),
        },
        true,
    ),
    ("key bits", |r| format!("{:.4}", r.key_bits), true),
    (VALUE_BITS, |r| format!("{:.4}", r.value_bits), true),
    ("cache bits", |r| format!("{:.3}", r.cache_bits), true),
    ("bytes/token", |r| format!("{:.0}", r.bytes_per_token), false),
    ("KL", |r| number(r.kl), true),
    ("Fisher", |r| number(r.fisher), false),
    ("key MSE", |r| number(r.key_mse), false),
    ("output error", |r| number(r.output_error), true),
];

/// Left out where no scheme codes values.
const VALUE_BITS: &str = "value bits";

pub(crate) fn number(value: Option<f64>) -> String {
    match value {
        None => "–".into(),
        Some(0.0) => "0".into(),
        Some(v) if v.abs() < 1e-3 || v.abs() >= 1e4 => format!("{v:.2e}"),
        Some(v) => format!("{v:.4}"),
    }
}

/// The result table in Markdown, one row per scheme; with `all` columns or those that fit a terminal.
pub fn table(evaluation: &Evaluation, all: bool) -> String {
    let coded_values = evaluation.schemes.iter().any(|r| r.value_bits < 16.0);
    let shown = |(title, _, terminal): &&Column| (all || *terminal) && (coded_values || *title != VALUE_BITS);
    let shown: Vec<&Column> = COLUMNS.iter().filter(shown).collect();
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(shown.iter().map(|(title, ..)| *title));
    for result in &evaluation.schemes {
        table.add_row(shown.iter().map(|(_, show, _)| show(result)));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// How losses were taken, where that is known.
fn pass(evaluation: &Evaluation) -> String {
    let dense = |dtype: &String| format!(", dense tokens in {dtype}");
    let dense = evaluation.cache_dtype.as_ref().map_or(String::new(), dense);
    match evaluation.pass.as_deref() {
        None => String::new(),
        Some("tensors") => "; schemes through tensors".into(),
        Some("decode") => format!("; token by token through the packed cache{dense}"),
        Some(_) => format!("; schemes through the packed cache{dense}"),
    }
}

/// What was evaluated, in a few lines.
pub fn provenance(evaluation: &Evaluation) -> Vec<String> {
    let e = evaluation;
    let mut lines = vec![
        format!("model: {} ({})", e.model, e.fingerprint),
        format!("device: {}; seed {}; {}", e.device, e.seed, e.program),
        format!(
            "{} tokens scored in windows of {}{}",
            e.tokens,
            e.context,
            if e.add_bos { ", each begun with BOS" } else { "" }
        ) + &pass(e),
    ];
    for t in &e.texts {
        lines.push(format!(
            "text: {} ({} characters, {} tokens, sha256 {})",
            t.path.display(),
            t.chars,
            t.tokens,
            &t.sha256[..12]
        ));
    }
    lines.extend(e.overlap.iter().flat_map(Overlaps::lines).map(|line| format!("OVERLAP: {line}")));
    lines
}
