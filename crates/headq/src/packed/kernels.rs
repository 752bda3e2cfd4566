//! Vector loops of decode attention over packed codes and dense pages.
//!
//! Every loop works on fixed lanes with fused multiply-adds in a fixed order, compiled for the best instruction set that the running
//! machine has ([`pulp`] dispatches between AVX-512, AVX2 and what every machine has), so that all of them give the same numbers.

use crate::kernels::{exp32, vectorized};

use super::keys::Run;
use super::rows::{LANES, row_bytes, unpack_row, with_bits};

/// Tokens that are scored, weighed and read together.
pub(super) const TILE: usize = 64;
/// Query heads of a group that are handled together; larger groups are split.
pub(super) const MOST_QUERIES: usize = 4;
/// Rows of value channels that are accumulated together.
const VALUE_ROWS: usize = 2;

type Lane = [f32; LANES];

/// Runs `$body` with `$N` the number of queries as a constant.
macro_rules! with_count {
    ($count:expr, $N:ident => $body:expr) => {
        match $count {
            1 => {
                const $N: usize = 1;
                $body
            }
            2 => {
                const $N: usize = 2;
                $body
            }
            3 => {
                const $N: usize = 3;
                $body
            }
            4 => {
                const $N: usize = 4;
                $body
            }
            other => unreachable!("queries are handled up to {MOST_QUERIES} at a time, not {other}"),
        }
    };
}

#[inline(always)]
fn fma(a: f32, x: &Lane, sum: &mut Lane) {
    for i in 0..LANES {
        sum[i] = a.mul_add(x[i], sum[i]);
    }
}

/// The sum of the lanes, pairwise.
#[inline(always)]
fn lane_sum(mut x: Lane) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            x[i] += x[i + half];
        }
    }
    x[0]
}

/// A row's codes as numbers, by way of a table if there is one.
#[inline(always)]
fn numbers<const B: u32, const LEVELS: bool>(row: &[u8], levels: &[f32; 256]) -> Lane {
    let codes = unpack_row::<B>(row);
    let mut x = [0.0; LANES];
    for i in 0..LANES {
        x[i] = if LEVELS { levels[(codes[i] & 255) as usize] } else { codes[i] as f32 };
    }
    x
}

/// Σ_c w_c · level(code_c) of the channels of a run, for NB blocks and NQ queries.
#[inline(always)]
fn dot_rows<const B: u32, const NQ: usize, const NB: usize, const LEVELS: bool>(
    blocks: [&[u8]; NB],
    levels: &[f32; 256],
    weights: &[f32],
    sums: &mut [[Lane; NB]; NQ],
) {
    let row = row_bytes(B, LANES);
    let channels = weights.len() / NQ;
    let blocks = blocks.map(|b| &b[..channels * row]);
    for c in 0..channels {
        let weights = &weights[c * NQ..][..NQ];
        for b in 0..NB {
            let x = numbers::<B, LEVELS>(&blocks[b][c * row..][..row], levels);
            for q in 0..NQ {
                fma(weights[q], &x, &mut sums[q][b]);
            }
        }
    }
}

/// Blocks of 16 tokens whose ranges are folded into the query.
pub(super) struct FoldedBlocks<'a> {
    /// The blocks, `bytes` each.
    pub codes: &'a [u8],
    pub runs: &'a [Run],
    pub bytes: usize,
    pub blocks: usize,
    pub levels: Option<&'a [f32; 256]>,
}

/// No table.
static NO_LEVELS: [f32; 256] = [0.0; 256];

impl FoldedBlocks<'_> {
    #[inline(always)]
    fn add<const NQ: usize, const NB: usize>(
        &self,
        first: usize,
        weights: &[f32],
        constant: &[f32; MOST_QUERIES],
        scores: &mut [f32],
    ) {
        let mut sums = [[[0.0f32; LANES]; NB]; NQ];
        for run in self.runs {
            let weights = &weights[run.channels.start * NQ..run.channels.end * NQ];
            let mut blocks = [&self.codes[..0]; NB];
            for (b, block) in blocks.iter_mut().enumerate() {
                *block = &self.codes[(first + b) * self.bytes + run.start..];
            }
            with_bits!(run.bits, B => match self.levels {
                None => dot_rows::<B, NQ, NB, false>(blocks, &NO_LEVELS, weights, &mut sums),
                Some(levels) => dot_rows::<B, NQ, NB, true>(blocks, levels, weights, &mut sums),
            });
        }
        for q in 0..NQ {
            for b in 0..NB {
                let scores = &mut scores[q * TILE + (first + b) * LANES..][..LANES];
                for i in 0..LANES {
                    scores[i] += sums[q][b][i] + constant[q];
                }
            }
        }
    }

    #[inline(always)]
    fn run(&self, weights: &[f32], constant: &[f32; MOST_QUERIES], count: usize, scores: &mut [f32]) {
        with_count!(count, NQ => {
            let mut at = 0;
            while at + 2 <= self.blocks {
                self.add::<NQ, 2>(at, weights, constant, scores);
                at += 2;
            }
            if at < self.blocks {
                self.add::<NQ, 1>(at, weights, constant, scores);
            }
        })
    }
}

/// Adds constant_q + Σ_c w_qc · level(code_tc) to the scores of each block's tokens.
///
/// # Shapes
/// - `weights`: `[width, count]`; `scores`: `[count, TILE]`, the blocks' lanes from the first on
pub(super) fn folded_scores(
    blocks: FoldedBlocks<'_>,
    weights: &[f32],
    constant: &[f32; MOST_QUERIES],
    count: usize,
    scores: &mut [f32],
) {
    vectorized!(|blocks: FoldedBlocks<'a>,
                 weights: &'a [f32],
                 constant: &'a [f32; MOST_QUERIES],
                 count: usize,
                 scores: &'a mut [f32]|
     -> () { blocks.run(weights, constant, count, scores) })
}

/// One block whose tokens have ranges of their own.
pub(super) struct TokenBlock<'a> {
    pub codes: &'a [u8],
    pub runs: &'a [Run],
    pub levels: Option<&'a [f32; 256]>,
    /// For each chunk 16 scales, and with `zeros` 16 zeros.
    pub ranges: &'a [f32],
    /// Channels of a chunk.
    pub channels: usize,
    pub zeros: bool,
}

impl TokenBlock<'_> {
    #[inline(always)]
    fn run<const NQ: usize>(&self, weights: &[f32], sums: &[f32], scores: &mut [f32]) {
        let stride = if self.zeros { 2 * LANES } else { LANES };
        let mut total = [[0.0f32; LANES]; NQ];
        for (chunk, ranges) in self.ranges.chunks_exact(stride).enumerate() {
            let channels = chunk * self.channels..(chunk + 1) * self.channels;
            let mut dots = [[[0.0f32; LANES]; 1]; NQ];
            for run in self.runs {
                let from = run.channels.start.max(channels.start);
                let to = run.channels.end.min(channels.end);
                if from >= to {
                    continue;
                }
                let block = &self.codes[run.start + (from - run.channels.start) * row_bytes(run.bits, LANES)..];
                let weights = &weights[from * NQ..to * NQ];
                with_bits!(run.bits, B => match self.levels {
                    None => dot_rows::<B, NQ, 1, false>([block], &NO_LEVELS, weights, &mut dots),
                    Some(levels) => dot_rows::<B, NQ, 1, true>([block], levels, weights, &mut dots),
                });
            }
            for q in 0..NQ {
                let sum = sums[chunk * NQ + q];
                for i in 0..LANES {
                    let zero = if self.zeros { ranges[LANES + i] } else { 0.0 };
                    total[q][i] += ranges[i].mul_add(dots[q][0][i], zero * sum);
                }
            }
        }
        for q in 0..NQ {
            for i in 0..LANES {
                scores[q * TILE + i] += total[q][i];
            }
        }
    }
}

/// Adds Σ_m (scale_tm · Σ_{c∈m} w_qc · level(code_tc) + zero_tm · Σ_{c∈m} w_qc) to the scores of a block's tokens.
///
/// # Shapes
/// - `weights`: `[width, count]`; `sums`: their sums over each chunk, `[chunks, count]`; `scores`: `[count, TILE]` from the block on
pub(super) fn token_scores(block: TokenBlock<'_>, weights: &[f32], sums: &[f32], count: usize, scores: &mut [f32]) {
    vectorized!(|block: TokenBlock<'a>,
                 weights: &'a [f32],
                 sums: &'a [f32],
                 count: usize,
                 scores: &'a mut [f32]|
     -> () { with_count!(count, NQ => block.run::<NQ>(weights, sums, scores)) })
}

/// Folds ranges into queries: `out` = w · scale, and Σ_c w_c · zero_c of each query.
///
/// # Shapes
/// `weights`, `out`: `[width, count]`; `scale`, `zero`: `[width]`
pub(super) fn fold(weights: &[f32], count: usize, scale: &[f32], zero: &[f32], out: &mut [f32]) -> [f32; MOST_QUERIES] {
    #[inline(always)]
    fn run<const NQ: usize>(weights: &[f32], scale: &[f32], zero: &[f32], out: &mut [f32]) -> [f32; MOST_QUERIES] {
        let mut constant = [0.0; MOST_QUERIES];
        let rows = weights.chunks_exact(NQ).zip(out.chunks_exact_mut(NQ));
        for ((weights, out), (&scale, &zero)) in rows.zip(scale.iter().zip(zero)) {
            for q in 0..NQ {
                out[q] = weights[q] * scale;
                constant[q] = weights[q].mul_add(zero, constant[q]);
            }
        }
        constant
    }
    vectorized!(|weights: &'a [f32],
                 count: usize,
                 scale: &'a [f32],
                 zero: &'a [f32],
                 out: &'a mut [f32]|
     -> [f32; MOST_QUERIES] { with_count!(count, NQ => run::<NQ>(weights, scale, zero, out)) })
}

/// Adds q·k to the scores of consecutive dense keys.
///
/// # Shapes
/// - `keys`: `[tokens, width]`; `queries`: `[count, width]`; `scores`: `[count, TILE]` from the first token on
pub(super) fn dense_scores(keys: &[f32], queries: &[f32], width: usize, count: usize, scores: &mut [f32]) {
    #[inline(always)]
    fn run<const NQ: usize>(keys: &[f32], queries: &[f32], width: usize, scores: &mut [f32]) {
        let whole = width / LANES * LANES;
        for (token, key) in keys.chunks_exact(width).enumerate() {
            let mut sums = [[0.0f32; LANES]; NQ];
            for at in (0..whole).step_by(LANES) {
                let x: Lane = key[at..at + LANES].try_into().expect("a whole lane");
                for q in 0..NQ {
                    let w = &queries[q * width + at..][..LANES];
                    for i in 0..LANES {
                        sums[q][i] = w[i].mul_add(x[i], sums[q][i]);
                    }
                }
            }
            for q in 0..NQ {
                let rest = key[whole..].iter().zip(&queries[q * width + whole..][..width - whole]);
                let rest = rest.fold(0.0f32, |sum, (x, w)| w.mul_add(*x, sum));
                scores[q * TILE + token] += lane_sum(sums[q]) + rest;
            }
        }
    }
    vectorized!(|keys: &'a [f32], queries: &'a [f32], width: usize, count: usize, scores: &'a mut [f32]| -> () {
        with_count!(count, NQ => run::<NQ>(keys, queries, width, scores))
    })
}

/// Adds Σ_t p_qt · v_t of consecutive dense values.
///
/// # Shapes
/// - `values`: `[tokens, width]`; `p`: `[count, TILE]` from the first token on; `out`: `[count, width]`
pub(super) fn dense_values(values: &[f32], p: &[f32], width: usize, count: usize, out: &mut [f32]) {
    #[inline(always)]
    fn columns<const NQ: usize, const NR: usize>(
        values: &[f32],
        p: &[f32],
        width: usize,
        start: usize,
        out: &mut [f32],
    ) {
        let mut sums = [[[0.0f32; LANES]; NR]; NQ];
        for (token, value) in values.chunks_exact(width).enumerate() {
            let value = &value[start..start + NR * LANES];
            for r in 0..NR {
                let x: Lane = value[r * LANES..(r + 1) * LANES].try_into().expect("a whole lane");
                for q in 0..NQ {
                    fma(p[q * TILE + token], &x, &mut sums[q][r]);
                }
            }
        }
        add_sums(&sums, width, start, out);
    }
    #[inline(always)]
    fn run<const NQ: usize>(values: &[f32], p: &[f32], width: usize, out: &mut [f32]) {
        let mut start = 0;
        while start + VALUE_ROWS * LANES <= width {
            columns::<NQ, VALUE_ROWS>(values, p, width, start, out);
            start += VALUE_ROWS * LANES;
        }
        while start + LANES <= width {
            columns::<NQ, 1>(values, p, width, start, out);
            start += LANES;
        }
        for c in start..width {
            for q in 0..NQ {
                let column = values.iter().skip(c).step_by(width).zip(&p[q * TILE..]);
                out[q * width + c] += column.fold(0.0f32, |sum, (v, p)| p.mul_add(*v, sum));
            }
        }
    }
    vectorized!(|values: &'a [f32], p: &'a [f32], width: usize, count: usize, out: &'a mut [f32]| -> () {
        with_count!(count, NQ => run::<NQ>(values, p, width, out))
    })
}

#[inline(always)]
fn add_sums<const NQ: usize, const NR: usize>(sums: &[[Lane; NR]; NQ], width: usize, start: usize, out: &mut [f32]) {
    for q in 0..NQ {
        let out = &mut out[q * width + start..][..NR * LANES];
        for r in 0..NR {
            for i in 0..LANES {
                out[r * LANES + i] += sums[q][r][i];
            }
        }
    }
}

/// Values of consecutive tokens in codes of one width, with ranges for chunks of whole rows.
pub(super) struct CodedValues<'a> {
    /// `[tokens, width]` codes in rows.
    pub codes: &'a [u8],
    pub bits: u32,
    /// `[tokens, chunks, 2]`: scale and zero.
    pub ranges: &'a [f32],
    /// Channels of a token, a multiple of 16.
    pub width: usize,
    /// Channels that share a range, a multiple of 16.
    pub channels: usize,
}

impl CodedValues<'_> {
    #[inline(always)]
    fn columns<const B: u32, const NQ: usize, const NR: usize>(&self, p: &[f32], first: usize, out: &mut [f32]) {
        let row = row_bytes(B, LANES);
        let token_bytes = self.width / LANES * row;
        let chunks = self.width / self.channels;
        let mut chunk = [0usize; NR];
        for (r, chunk) in chunk.iter_mut().enumerate() {
            *chunk = (first + r) * LANES / self.channels;
        }
        let mut sums = [[[0.0f32; LANES]; NR]; NQ];
        let tokens = self.codes.chunks_exact(token_bytes).zip(self.ranges.chunks_exact(2 * chunks));
        for (token, (codes, ranges)) in tokens.enumerate() {
            let codes = &codes[first * row..][..NR * row];
            for r in 0..NR {
                let (scale, zero) = (ranges[2 * chunk[r]], ranges[2 * chunk[r] + 1]);
                let mut x = numbers::<B, false>(&codes[r * row..][..row], &NO_LEVELS);
                for x in &mut x {
                    *x = x.mul_add(scale, zero);
                }
                for q in 0..NQ {
                    fma(p[q * TILE + token], &x, &mut sums[q][r]);
                }
            }
        }
        add_sums(&sums, self.width, first * LANES, out);
    }

    #[inline(always)]
    fn run<const B: u32, const NQ: usize>(&self, p: &[f32], out: &mut [f32]) {
        let rows = self.width / LANES;
        let mut first = 0;
        while first + VALUE_ROWS <= rows {
            self.columns::<B, NQ, VALUE_ROWS>(p, first, out);
            first += VALUE_ROWS;
        }
        if first < rows {
            self.columns::<B, NQ, 1>(p, first, out);
        }
    }
}

/// Adds Σ_t p_qt · (zero + scale · code) of consecutive coded values.
///
/// # Shapes
/// - `p`: `[count, TILE]` from the first token on; `out`: `[count, width]`
pub(super) fn coded_values(values: CodedValues<'_>, p: &[f32], count: usize, out: &mut [f32]) {
    vectorized!(|values: CodedValues<'a>, p: &'a [f32], count: usize, out: &'a mut [f32]| -> () {
        with_count!(count, NQ => with_bits!(values.bits, B => values.run::<B, NQ>(p, out)))
    })
}

/// One tile of an online softmax: scores become e^{s − m}, what was summed before is scaled to the new maximum m.
///
/// # Shapes
/// - `scores`: `[TILE]`, −∞ for hidden tokens, at least one not; `out`: `[width]`
pub(super) fn online_softmax(scores: &mut [f32], max: &mut f32, sum: &mut f32, out: &mut [f32]) {
    vectorized!(|scores: &'a mut [f32], max: &'a mut f32, sum: &'a mut f32, out: &'a mut [f32]| -> () {
        let whole = scores.len() / LANES * LANES;
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for x in scores[..whole].chunks_exact(LANES) {
            for i in 0..LANES {
                lanes[i] = if x[i] > lanes[i] { x[i] } else { lanes[i] };
            }
        }
        let largest = lanes.iter().chain(&scores[whole..]).copied().fold(*max, f32::max);
        if largest > *max {
            let shrink = exp32(*max - largest);
            *sum *= shrink;
            for x in out.iter_mut() {
                *x *= shrink;
            }
            *max = largest;
        }
        let mut lanes = [0.0; LANES];
        for x in scores[..whole].chunks_exact_mut(LANES) {
            for i in 0..LANES {
                x[i] = exp32(x[i] - largest);
                lanes[i] += x[i];
            }
        }
        let mut total = lane_sum(lanes);
        for x in &mut scores[whole..] {
            *x = exp32(*x - largest);
            total += *x;
        }
        *sum += total;
    })
}

/// y = M x for a row-major M of `x.len()` columns.
pub(super) fn matrix_vector(matrix: &[f32], x: &[f32], y: &mut [f32]) {
    vectorized!(|matrix: &'a [f32], x: &'a [f32], y: &'a mut [f32]| -> () {
        let whole = x.len() / LANES * LANES;
        for (y, row) in y.iter_mut().zip(matrix.chunks_exact(x.len())) {
            let mut sums = [0.0f32; LANES];
            for (a, b) in row[..whole].chunks_exact(LANES).zip(x[..whole].chunks_exact(LANES)) {
                for i in 0..LANES {
                    sums[i] = a[i].mul_add(b[i], sums[i]);
                }
            }
            let rest = row[whole..].iter().zip(&x[whole..]).fold(0.0f32, |sum, (a, b)| a.mul_add(*b, sum));
            *y = lane_sum(sums) + rest;
        }
    })
}
