//! Columns and texts that several sections share.

use headq_lab::diagnose::data::Interval;
use headq_lab::evaluate::SchemeResult;

use crate::document::{Align, Cell, Column, Table, Text};
use crate::format::{self, maybe};

/// A number that may be undefined, as a cell.
pub fn number(value: Option<f64>) -> Cell {
    maybe(value, format::number).into()
}

/// An interval, as a cell.
pub fn interval(value: Option<Interval>, show: fn(f64) -> String) -> Cell {
    format::interval(value, show).into()
}

/// A scheme, as a cell.
pub fn scheme(scheme: &str) -> Cell {
    Text::code(scheme).into()
}

/// Perplexity, bits and errors of an evaluated scheme.
const RESULT: &[Column<SchemeResult>] = &[
    ("scheme", Align::Left, |r| scheme(&r.scheme)),
    ("ppl", Align::Right, |r| format::perplexity(r.ppl).into()),
    ("excess removed", Align::Right, |r| maybe(r.excess_removed, format::percent).into()),
    ("Δnll ± se", Align::Right, |r| loss(r).into()),
    ("key bits", Align::Right, |r| bits(r.key_bits)),
    ("value bits", Align::Right, |r| bits(r.value_bits)),
    ("cache bits", Align::Right, |r| format::fixed(r.cache_bits, 3).into()),
    ("bytes/token", Align::Right, |r| format::fixed(r.bytes_per_token, 0).into()),
    ("KL", Align::Right, |r| number(r.kl)),
    ("Fisher", Align::Right, |r| number(r.fisher)),
    ("key MSE", Align::Right, |r| number(r.key_mse)),
    ("corrected key MSE", Align::Right, |r| number(r.key_mse_corrected)),
    ("value MSE", Align::Right, |r| number(r.value_mse)),
    ("readout error", Align::Right, |r| number(r.readout_error)),
    ("A²", Align::Right, |r| number(r.readout_diagonal)),
    ("output error", Align::Right, |r| number(r.output_error)),
];

/// What columns mean, with the equations of the specification.
const MEANINGS: &[(&str, &str)] = &[
    ("ppl", "perplexity: exp of the mean loss per token, of the pass in which the cache is quantized"),
    (
        "excess removed",
        "E8: share of the perplexity that quantizing adds which the scheme takes away again; against the scheme without the correction \
         where a diagnosis or comparison names one, and against the first quantized scheme of an evaluation",
    ),
    ("Δnll ± se", "paired difference of the loss to dense, nats per token, with its standard error over tokens"),
    (
        "gain",
        "loss of the scheme without the correction minus this scheme's, nats per token, by window; above 0 where it helps",
    ),
    ("key bits, value bits", "code bits: per coded element, with scales, zeros, side codes and maps; 16 where dense"),
    ("cache bits", "mean bits per element of everything that the cache holds, so also of what is kept dense"),
    ("bytes/token", "bytes per cached token, whole model"),
    ("Fisher", "E2: half the variance of the score error under attention, nats"),
    ("KL", "E3: divergence of attention from dense attention, nats"),
    ("key MSE, value MSE", "E4: mean square of what storing changes, of the base code; corrected: with the side code"),
    ("readout error", "E5: mean square of what attention reads from values"),
    ("A²", "E6: the diagonal of the readout error"),
    ("output error", "E7: relative, keys and values as read from the cache, before the output projection"),
    (
        "captured",
        "share of the held-out score error (of residuals about their mean) that a basis captures before side quantization, mean over heads",
    ),
    ("[low, high]", "bootstrap interval at the confidence of the thresholds"),
];

/// The meanings of columns, as a section of their own: captions stay short.
pub fn meanings() -> Table {
    const COLUMNS: &[Column<(&str, &str)>] =
        &[("column", Align::Left, |m| m.0.into()), ("meaning", Align::Left, |m| m.1.into())];
    Table::of("What columns mean.", COLUMNS, MEANINGS)
}

/// Code bits, as a cell.
pub fn bits(value: f64) -> Cell {
    format::fixed(value, 4).into()
}

fn loss(result: &SchemeResult) -> String {
    match result.nll_minus_dense_se {
        Some(se) if result.canonical != "dense" => {
            format!("{} ± {}", format::nats(result.nll_minus_dense), format::fixed(se, 4))
        }
        _ if result.canonical == "dense" => format::NONE.into(),
        _ => format::nats(result.nll_minus_dense),
    }
}

/// A table of evaluated schemes, in groups.
pub fn results(caption: impl Into<Text>, groups: Vec<(Option<String>, Vec<&SchemeResult>)>) -> Table {
    Table::grouped(caption, RESULT, groups)
}
