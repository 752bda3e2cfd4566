//! Tables and Markdown.

use comfy_table::{CellAlignment, Table, TableStyle, presets};

use crate::evaluate::{Evaluation, SchemeResult};

/// A column of the result table: its title and what it shows.
type Column = (&'static str, fn(&SchemeResult) -> String);

const COLUMNS: &[Column] = &[
    ("scheme", |r| r.scheme.clone()),
    ("ppl", |r| format!("{:.3}", r.ppl)),
    ("excess removed", |r| r.excess_removed.map_or("–".into(), |v| format!("{:.1} %", 100.0 * v))),
    ("Δnll ± se", |r| match (r.canonical.as_str(), r.nll_minus_dense_se) {
        ("dense", _) | (_, None) => "–".into(),
        (_, Some(se)) => format!("{:+.4} ± {se:.4}", r.nll_minus_dense),
    }),
    ("key bits", |r| format!("{:.4}", r.key_bits)),
    ("value bits", |r| format!("{:.4}", r.value_bits)),
    ("cache bits", |r| format!("{:.3}", r.cache_bits)),
    ("bytes/token", |r| format!("{:.0}", r.bytes_per_token)),
    ("KL", |r| number(r.kl)),
    ("Fisher", |r| number(r.fisher)),
    ("key MSE", |r| number(r.key_mse)),
    ("output error", |r| number(r.output_error)),
];

fn number(value: Option<f64>) -> String {
    match value {
        None => "–".into(),
        Some(0.0) => "0".into(),
        Some(v) if v.abs() < 1e-3 || v.abs() >= 1e4 => format!("{v:.2e}"),
        Some(v) => format!("{v:.4}"),
    }
}

/// The result table, one row per scheme.
pub fn table(evaluation: &Evaluation, style: TableStyle) -> String {
    let mut table = Table::new();
    table.load_style(style);
    let shown: Vec<&Column> = COLUMNS.iter().filter(|(title, _)| *title != "value bits" || evaluation.schemes.iter().any(|r| r.value_bits < 16.0)).collect();
    table.set_header(shown.iter().map(|(title, _)| *title));
    for result in &evaluation.schemes {
        table.add_row(shown.iter().map(|(_, show)| show(result)));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// The result table for a terminal.
pub fn terminal_table(evaluation: &Evaluation) -> String {
    table(evaluation, presets::UTF8_HORIZONTAL_ONLY)
}

/// What was evaluated, in a few lines.
pub fn provenance(evaluation: &Evaluation) -> Vec<String> {
    let e = evaluation;
    let mut lines = vec![
        format!("model: {} ({})", e.model, e.fingerprint),
        format!("device: {}; seed {}; {}", e.device, e.seed, e.program),
        format!("{} tokens scored in windows of {}{}", e.tokens, e.context, if e.add_bos { ", each begun with BOS" } else { "" }),
    ];
    for t in &e.texts {
        lines.push(format!("text: {} ({} characters, {} tokens, sha256 {})", t.path.display(), t.chars, t.tokens, &t.sha256[..12]));
    }
    lines
}

/// The evaluation as Markdown, with the command that makes it again.
pub fn markdown(title: &str, evaluation: &Evaluation, command: &str) -> String {
    let mut text = format!("# {title}\n\n");
    for line in provenance(evaluation) {
        text += &format!("- {line}\n");
    }
    text += &format!("\n{}\n", table(evaluation, presets::ASCII_MARKDOWN));
    if evaluation.texts.len() > 1 {
        text += "\nPerplexity by text:\n\n| scheme |";
        evaluation.texts.iter().for_each(|t| text += &format!(" {} |", t.path.display()));
        text += &format!("\n|---|{}\n", "---:|".repeat(evaluation.texts.len()));
        for r in &evaluation.schemes {
            text += &format!("| {} |", r.scheme);
            r.nll_by_text.iter().for_each(|nll| text += &format!(" {:.3} |", nll.exp()));
            text += "\n";
        }
    }
    text += "\nppl: exp of the mean loss per token of the quantized pass. Excess removed: share of the first scheme's added perplexity that \
             a scheme takes away. Δnll: paired difference to dense, nats per token. Key and value bits: bits per coded element, \
             scales, zeros and side codes included. Cache bits: mean over everything held, dense windows included at 16 bits. KL \
             and Fisher: nats, attention of the dense pass. Key MSE: of the base code. Output error: relative, before the output \
             projection.\n";
    text += &format!("\nMade by:\n\n```sh\n{command}\n```\n");
    text
}
