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
    ("cache bits", Align::Right, |r| bits(r.cache_bits)),
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

/// What the columns of [`RESULT`] mean, for captions.
pub const RESULT_UNITS: &str = "Excess removed: share of the added perplexity that is taken away again. Δnll: paired difference of \
                                the loss to dense, nats per token, with its standard error. Key and value bits: per coded element, \
                                scales, zeros and side codes included; cache bits: per element of everything held. KL (E3) and \
                                Fisher (E2) of attention, nats; MSE (E4) of the base code, and with the correction; readout error \
                                (E5), A² (E6); output error (E7), relative.";

/// Bits, as a cell.
pub fn bits(value: f64) -> Cell {
    format::fixed(value, 3).into()
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
