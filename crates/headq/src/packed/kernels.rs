//! Vector loops of decode attention over packed codes and dense pages.
//!
//! Every loop works on sixteen lanes with fused multiply-adds in a fixed order, on whatever instruction set there is ([`super::simd`]).
#![allow(clippy::needless_range_loop, reason = "lanes of several arrays are indexed alike")]

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::kernels::{exp32, vectorized};

use super::keys::Run;
use super::prefetch::prefetch;
use super::rows::{LANES, row_bytes, with_bits, with_const};
use super::simd::{Element, Kernel, Lane, Machine, dispatch};

/// Tokens that are scored, weighed and read together.
pub(super) const TILE: usize = 128;
/// Query heads of a group that are handled together; larger groups are split.
pub(super) const MOST_QUERIES: usize = 4;

/// Runs `$body` with `$N` the number of queries as a constant.
macro_rules! with_count {
    ($count:expr, $N:ident => $body:expr) => {
        with_const!($count, $N: usize = [1 2 3 4] => $body)
    };
}

/// Sixteen elements of a slice.
#[inline(always)]
fn lane<T>(x: &[T], at: usize) -> &[T; LANES] {
    x[at..at + LANES].try_into().expect("sixteen elements")
}

/// Adds to sixteen elements of a slice.
#[inline(always)]
fn add_to<M: Machine>(m: M, x: M::Lanes, to: &mut [f32], at: usize) {
    let to: &mut Lane = (&mut to[at..at + LANES]).try_into().expect("sixteen elements");
    m.store(m.add(m.load(to), x), to);
}

/// A row's codes as numbers, by way of a table if there is one.
#[inline(always)]
fn numbers<M: Machine, const B: u32, const LEVELS: bool>(m: M, row: &[u8], levels: &[f32; 256]) -> M::Lanes {
    if LEVELS { m.levels::<B>(row, levels) } else { m.codes::<B>(row) }
}

/// The rows of each query's weights.
#[inline(always)]
fn split<const NQ: usize>(weights: &[f32], width: usize) -> [&[f32]; NQ] {
    let mut rows = [&weights[..0]; NQ];
    for (q, row) in rows.iter_mut().enumerate() {
        *row = &weights[q * width..(q + 1) * width];
    }
    rows
}

/// Σ_c w_c · level(code_c) of the channels of a run, for NB blocks and NQ queries.
#[inline(always)]
fn dot_rows<M: Machine, const B: u32, const NQ: usize, const NB: usize, const LEVELS: bool>(
    m: M,
    blocks: [&[u8]; NB],
    levels: &[f32; 256],
    weights: [&[f32]; NQ],
    sums: &mut [[M::Lanes; NB]; NQ],
) {
    let row = row_bytes(B, LANES);
    let channels = weights[0].len();
    let weights = weights.map(
        #[inline(always)]
        |w| &w[..channels],
    );
    let mut own = *sums;
    let mut rows = blocks.map(
        #[inline(always)]
        |b| b.chunks_exact(row),
    );
    for c in 0..channels {
        for b in 0..NB {
            let Some(codes) = rows[b].next() else { unreachable!("a row for each channel") };
            let x = numbers::<M, B, LEVELS>(m, codes, levels);
            for q in 0..NQ {
                own[q][b] = m.mul_add(m.splat(weights[q][c]), x, own[q][b]);
            }
        }
    }
    *sums = own;
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
    fn add<M: Machine, const NQ: usize, const NB: usize>(
        &self,
        m: M,
        first: usize,
        weights: [&[f32]; NQ],
        constant: &[f32; MOST_QUERIES],
        scores: &mut [f32],
    ) {
        let mut sums = [[m.splat(0.0); NB]; NQ];
        for run in self.runs {
            let weights = weights.map(
                #[inline(always)]
                |w| &w[run.channels.clone()],
            );
            let mut blocks = [&self.codes[..0]; NB];
            for (b, block) in blocks.iter_mut().enumerate() {
                *block = &self.codes[(first + b) * self.bytes + run.start..];
            }
            with_bits!(run.bits, B => match self.levels {
                None => dot_rows::<M, B, NQ, NB, false>(m, blocks, &NO_LEVELS, weights, &mut sums),
                Some(levels) => dot_rows::<M, B, NQ, NB, true>(m, blocks, levels, weights, &mut sums),
            });
        }
        for q in 0..NQ {
            for b in 0..NB {
                let sum = m.add(sums[q][b], m.splat(constant[q]));
                add_to(m, sum, scores, q * TILE + (first + b) * LANES);
            }
        }
    }
}

struct FoldedScores<'a> {
    blocks: FoldedBlocks<'a>,
    weights: &'a [f32],
    constant: &'a [f32; MOST_QUERIES],
    count: usize,
    scores: &'a mut [f32],
}

impl FoldedBlocks<'_> {
    /// Some of the blocks, several at a time.
    #[inline(always)]
    fn add_all<M: Machine, const NQ: usize>(
        &self,
        m: M,
        blocks: std::ops::Range<usize>,
        weights: &[f32],
        constant: &[f32; MOST_QUERIES],
        scores: &mut [f32],
    ) {
        let weights = split::<NQ>(weights, weights.len() / NQ);
        let mut at = blocks.start;
        if M::MANY {
            while at + 4 <= blocks.end {
                self.add::<M, NQ, 4>(m, at, weights, constant, scores);
                at += 4;
            }
        }
        while at + 2 <= blocks.end {
            self.add::<M, NQ, 2>(m, at, weights, constant, scores);
            at += 2;
        }
        if at < blocks.end {
            self.add::<M, NQ, 1>(m, at, weights, constant, scores);
        }
    }
}

impl Kernel for FoldedScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        let Self { blocks, weights, constant, count, scores } = self;
        with_count!(count, NQ => blocks.add_all::<M, NQ>(m, 0..blocks.blocks, weights, constant, scores))
    }
}

/// Blocks of 16 tokens in groups of whole blocks, each with ranges of its own.
pub(super) struct GroupedBlocks<'a> {
    pub blocks: FoldedBlocks<'a>,
    /// Blocks of a group.
    pub per_group: usize,
    /// `[groups, 2, width]`: scales, then zeros.
    pub ranges: &'a [f32],
}

struct GroupedScores<'a> {
    grouped: GroupedBlocks<'a>,
    weights: &'a [f32],
    count: usize,
    folded: &'a mut [f32],
    scores: &'a mut [f32],
}

impl Kernel for GroupedScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        let Self { grouped: GroupedBlocks { blocks, per_group, ranges }, weights, count, folded, scores } = self;
        let width = weights.len() / count;
        for (group, ranges) in ranges.chunks_exact(2 * width).enumerate() {
            let (scale, zero) = ranges.split_at(width);
            let constant = fold_on(m, weights, scale, zero, folded);
            let own = group * per_group..((group + 1) * per_group).min(blocks.blocks);
            with_count!(count, NQ => blocks.add_all::<M, NQ>(m, own, folded, &constant, scores))
        }
    }
}

/// As [`folded_scores`] with `weights` that the ranges are folded into first, into `folded`.
pub(super) fn grouped_scores(
    grouped: GroupedBlocks<'_>,
    weights: &[f32],
    count: usize,
    folded: &mut [f32],
    scores: &mut [f32],
) {
    dispatch(GroupedScores { grouped, weights, count, folded, scores });
}

/// Adds constant_q + Σ_c w_qc · level(code_tc) to the scores of each block's tokens.
///
/// # Shapes
/// - `weights`: `[count, width]`; `scores`: `[count, TILE]`, the blocks' lanes from the first on
pub(super) fn folded_scores(
    blocks: FoldedBlocks<'_>,
    weights: &[f32],
    constant: &[f32; MOST_QUERIES],
    count: usize,
    scores: &mut [f32],
) {
    dispatch(FoldedScores { blocks, weights, constant, count, scores });
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
    fn add<M: Machine, const NQ: usize>(&self, m: M, weights: &[f32], sums: &[f32], scores: &mut [f32]) {
        let stride = if self.zeros { 2 * LANES } else { LANES };
        let weights = split::<NQ>(weights, weights.len() / NQ);
        let mut total = [m.splat(0.0); NQ];
        for (chunk, ranges) in self.ranges.chunks_exact(stride).enumerate() {
            let channels = chunk * self.channels..(chunk + 1) * self.channels;
            let mut dots = [[m.splat(0.0); 1]; NQ];
            for run in self.runs {
                let from = run.channels.start.max(channels.start);
                let to = run.channels.end.min(channels.end);
                if from >= to {
                    continue;
                }
                let block = &self.codes[run.start + (from - run.channels.start) * row_bytes(run.bits, LANES)..];
                let weights = weights.map(
                    #[inline(always)]
                    |w| &w[from..to],
                );
                with_bits!(run.bits, B => match self.levels {
                    None => dot_rows::<M, B, NQ, 1, false>(m, [block], &NO_LEVELS, weights, &mut dots),
                    Some(levels) => dot_rows::<M, B, NQ, 1, true>(m, [block], levels, weights, &mut dots),
                });
            }
            let scale = m.load(lane(ranges, 0));
            for q in 0..NQ {
                total[q] = m.mul_add(scale, dots[q][0], total[q]);
                if self.zeros {
                    total[q] = m.mul_add(m.load(lane(ranges, LANES)), m.splat(sums[chunk * NQ + q]), total[q]);
                }
            }
        }
        for q in 0..NQ {
            add_to(m, total[q], scores, q * TILE);
        }
    }
}

struct TokenScores<'a> {
    block: TokenBlock<'a>,
    weights: &'a [f32],
    sums: &'a [f32],
    count: usize,
    scores: &'a mut [f32],
}

impl Kernel for TokenScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        with_count!(self.count, NQ => self.block.add::<M, NQ>(m, self.weights, self.sums, self.scores))
    }
}

/// Adds Σ_m (scale_tm · Σ_{c∈m} w_qc · level(code_tc) + zero_tm · Σ_{c∈m} w_qc) to the scores of a block's tokens.
///
/// # Shapes
/// - `weights`: `[count, width]`; `sums`: their sums over each chunk, `[chunks, count]`; `scores`: `[count, TILE]` from the block on
pub(super) fn token_scores(block: TokenBlock<'_>, weights: &[f32], sums: &[f32], count: usize, scores: &mut [f32]) {
    dispatch(TokenScores { block, weights, sums, count, scores });
}

/// Folds ranges into queries: `out` = w · scale, and Σ_c w_c · zero_c of each query.
#[inline(always)]
fn fold_on<M: Machine>(m: M, weights: &[f32], scale: &[f32], zero: &[f32], out: &mut [f32]) -> [f32; MOST_QUERIES] {
    let width = scale.len();
    let mut constant = [0.0; MOST_QUERIES];
    let queries = weights.chunks_exact(width).zip(out.chunks_exact_mut(width));
    for ((weights, out), constant) in queries.zip(&mut constant) {
        let mut sum = m.splat(0.0);
        let (whole, rest) = weights.as_chunks::<LANES>();
        let at = whole.len() * LANES;
        let (out, out_rest) = out.as_chunks_mut::<LANES>();
        let ranges = scale.as_chunks::<LANES>().0.iter().zip(zero.as_chunks::<LANES>().0);
        for ((w, out), (scale, zero)) in whole.iter().zip(out).zip(ranges) {
            let w = m.load(w);
            m.store(m.mul(w, m.load(scale)), out);
            sum = m.mul_add(w, m.load(zero), sum);
        }
        *constant = m.sum(sum);
        for (i, (w, out)) in rest.iter().zip(out_rest).enumerate() {
            *out = w * scale[at + i];
            *constant = w.mul_add(zero[at + i], *constant);
        }
    }
    constant
}

struct Fold<'a> {
    weights: &'a [f32],
    scale: &'a [f32],
    zero: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Fold<'_> {
    type Output = [f32; MOST_QUERIES];

    #[inline(always)]
    fn run<M: Machine>(self, m: M) -> [f32; MOST_QUERIES] {
        fold_on(m, self.weights, self.scale, self.zero, self.out)
    }
}

/// Folds ranges into queries: `out` = w · scale, and Σ_c w_c · zero_c of each query.
///
/// # Shapes
/// `weights`, `out`: `[count, width]`; `scale`, `zero`: `[width]`
pub(super) fn fold(weights: &[f32], scale: &[f32], zero: &[f32], out: &mut [f32]) -> [f32; MOST_QUERIES] {
    dispatch(Fold { weights, scale, zero, out })
}

struct DenseScores<'a, E> {
    keys: &'a [E],
    ahead: &'a [E],
    queries: &'a [f32],
    width: usize,
    count: usize,
    scores: &'a mut [f32],
}

impl<E: Element> DenseScores<'_, E> {
    /// Heads of R whole rows.
    #[inline(always)]
    fn whole<M: Machine, const NQ: usize, const R: usize>(&mut self, m: M) {
        let mut queries = [[m.splat(0.0); R]; NQ];
        for (queries, own) in queries.iter_mut().zip(self.queries.as_chunks::<LANES>().0.chunks_exact(R)) {
            for (to, lane) in queries.iter_mut().zip(own) {
                *to = m.load(lane);
            }
        }
        let mut scores = self.scores.chunks_mut(TILE);
        let mut scores: [_; NQ] = std::array::from_fn(|_| scores.next().unwrap_or_default().iter_mut());
        let mut ahead = self.ahead.chunks(R * LANES);
        for key in self.keys.as_chunks::<LANES>().0.as_chunks::<R>().0 {
            prefetch(ahead.next().unwrap_or_default());
            let mut sums = [m.splat(0.0); NQ];
            for r in 0..R {
                let x = E::load(m, &key[r]);
                for q in 0..NQ {
                    sums[q] = m.mul_add(queries[q][r], x, sums[q]);
                }
            }
            for q in 0..NQ {
                if let Some(score) = scores[q].next() {
                    *score += m.sum(sums[q]);
                }
            }
        }
    }

    /// Heads of any width.
    #[inline(always)]
    fn ragged<M: Machine, const NQ: usize>(&mut self, m: M) {
        let (width, whole) = (self.width, self.width / LANES * LANES);
        let rows = split::<NQ>(self.queries, width);
        for (token, key) in self.keys.chunks_exact(width).enumerate() {
            let mut sums = [m.splat(0.0); NQ];
            for at in (0..whole).step_by(LANES) {
                let x = E::load(m, lane(key, at));
                for q in 0..NQ {
                    sums[q] = m.mul_add(m.load(lane(rows[q], at)), x, sums[q]);
                }
            }
            for q in 0..NQ {
                let rest = key[whole..].iter().zip(&rows[q][whole..]);
                let rest = rest.fold(0.0f32, |sum, (x, w)| w.mul_add(x.wide(), sum));
                self.scores[q * TILE + token] += m.sum(sums[q]) + rest;
            }
        }
    }
}

impl<E: Element> Kernel for DenseScores<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self, m: M) {
        with_count!(self.count, NQ => match self.width {
            64 => self.whole::<M, NQ, { 64 / LANES }>(m),
            128 => self.whole::<M, NQ, { 128 / LANES }>(m),
            _ => self.ragged::<M, NQ>(m),
        })
    }
}

/// Adds q·k to the scores of consecutive dense keys.
///
/// # Shapes
/// - `keys`: `[tokens, width]`; `queries`: `[count, width]`; `scores`: `[count, TILE]` from the first token on
/// - `ahead`: what is read next, fetched meanwhile
pub(super) fn dense_scores<E: Element>(
    keys: &[E],
    ahead: &[E],
    queries: &[f32],
    width: usize,
    count: usize,
    scores: &mut [f32],
) {
    dispatch(DenseScores { keys, ahead, queries, width, count, scores });
}

struct DenseValues<'a, E> {
    values: &'a [E],
    ahead: &'a [E],
    p: &'a [f32],
    width: usize,
    count: usize,
    out: &'a mut [f32],
}

impl<E: Element> DenseValues<'_, E> {
    #[inline(always)]
    fn columns<M: Machine, const NQ: usize, const NR: usize>(&mut self, m: M, start: usize) {
        let mut sums = [[m.splat(0.0); NR]; NQ];
        let mut p = self.p.chunks(TILE);
        let mut p: [_; NQ] = std::array::from_fn(|_| p.next().unwrap_or_default().iter());
        // Each pass over columns asks for as many of the next ones.
        let mut ahead = self.ahead.chunks(self.width);
        for value in self.values.chunks_exact(self.width) {
            prefetch(ahead.next().and_then(|next| next.get(start..start + NR * LANES)).unwrap_or_default());
            let value = value[start..start + NR * LANES].as_chunks::<LANES>().0;
            let mut weights = [m.splat(0.0); NQ];
            for q in 0..NQ {
                weights[q] = m.splat(p[q].next().copied().unwrap_or_default());
            }
            for r in 0..NR {
                let x = E::load(m, &value[r]);
                for q in 0..NQ {
                    sums[q][r] = m.mul_add(weights[q], x, sums[q][r]);
                }
            }
        }
        for q in 0..NQ {
            for r in 0..NR {
                add_to(m, sums[q][r], self.out, q * self.width + start + r * LANES);
            }
        }
    }

    #[inline(always)]
    fn all<M: Machine, const NQ: usize>(&mut self, m: M) {
        let width = self.width;
        let mut start = 0;
        if M::MANY {
            while start + 4 * LANES <= width {
                self.columns::<M, NQ, 4>(m, start);
                start += 4 * LANES;
            }
        }
        while start + 2 * LANES <= width {
            self.columns::<M, NQ, 2>(m, start);
            start += 2 * LANES;
        }
        while start + LANES <= width {
            self.columns::<M, NQ, 1>(m, start);
            start += LANES;
        }
        for c in start..width {
            for q in 0..NQ {
                let column = self.values.iter().skip(c).step_by(width).zip(&self.p[q * TILE..]);
                self.out[q * width + c] += column.fold(0.0f32, |sum, (v, p)| p.mul_add(v.wide(), sum));
            }
        }
    }
}

impl<E: Element> Kernel for DenseValues<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self, m: M) {
        with_count!(self.count, NQ => self.all::<M, NQ>(m))
    }
}

/// Adds Σ_t p_qt · v_t of consecutive dense values.
///
/// # Shapes
/// - `values`: `[tokens, width]`; `p`: `[count, TILE]` from the first token on; `out`: `[count, width]`
/// - `ahead`: what is read next, fetched meanwhile
pub(super) fn dense_values<E: Element>(
    values: &[E],
    ahead: &[E],
    p: &[f32],
    width: usize,
    count: usize,
    out: &mut [f32],
) {
    dispatch(DenseValues { values, ahead, p, width, count, out });
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
    fn columns<M: Machine, const B: u32, const NQ: usize, const NR: usize>(
        &self,
        m: M,
        p: &[f32],
        first: usize,
        out: &mut [f32],
    ) {
        let row = row_bytes(B, LANES);
        let token_bytes = self.width / LANES * row;
        let chunks = self.width / self.channels;
        let chunk: [usize; NR] = std::array::from_fn(|r| (first + r) * LANES / self.channels);
        let mut sums = [[m.splat(0.0); NR]; NQ];
        let mut p = p.chunks(TILE);
        let mut p: [_; NQ] = std::array::from_fn(|_| p.next().unwrap_or_default().iter());
        let ranges = self.ranges.as_chunks::<2>().0.chunks_exact(chunks);
        for (codes, ranges) in self.codes.chunks_exact(token_bytes).zip(ranges) {
            let codes = &codes[first * row..(first + NR) * row];
            let mut weights = [m.splat(0.0); NQ];
            for q in 0..NQ {
                weights[q] = m.splat(p[q].next().copied().unwrap_or_default());
            }
            for r in 0..NR {
                let [scale, zero] = ranges[chunk[r]];
                let x = numbers::<M, B, false>(m, &codes[r * row..(r + 1) * row], &NO_LEVELS);
                let x = m.mul_add(x, m.splat(scale), m.splat(zero));
                for q in 0..NQ {
                    sums[q][r] = m.mul_add(weights[q], x, sums[q][r]);
                }
            }
        }
        for q in 0..NQ {
            for r in 0..NR {
                add_to(m, sums[q][r], out, q * self.width + (first + r) * LANES);
            }
        }
    }

    #[inline(always)]
    fn all<M: Machine, const B: u32, const NQ: usize>(&self, m: M, p: &[f32], out: &mut [f32]) {
        let rows = self.width / LANES;
        let mut first = 0;
        if M::MANY {
            while first + 4 <= rows {
                self.columns::<M, B, NQ, 4>(m, p, first, out);
                first += 4;
            }
        }
        while first + 2 <= rows {
            self.columns::<M, B, NQ, 2>(m, p, first, out);
            first += 2;
        }
        while first < rows {
            self.columns::<M, B, NQ, 1>(m, p, first, out);
            first += 1;
        }
    }
}

struct ReadValues<'a> {
    values: CodedValues<'a>,
    p: &'a [f32],
    count: usize,
    out: &'a mut [f32],
}

impl Kernel for ReadValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        let Self { values, p, count, out } = self;
        with_count!(count, NQ => with_bits!(values.bits, B => values.all::<M, B, NQ>(m, p, out)))
    }
}

/// Adds Σ_t p_qt · (zero + scale · code) of consecutive coded values.
///
/// # Shapes
/// - `p`: `[count, TILE]` from the first token on; `out`: `[count, width]`
pub(super) fn coded_values(values: CodedValues<'_>, p: &[f32], count: usize, out: &mut [f32]) {
    dispatch(ReadValues { values, p, count, out });
}

/// The sum of the lanes, upper half onto lower half.
#[inline(always)]
fn halves_sum(x: &Lane) -> f32 {
    let mut eight = [0.0f32; 8];
    for i in 0..8 {
        eight[i] = x[i] + x[i + 8];
    }
    let mut four = [0.0f32; 4];
    for i in 0..4 {
        four[i] = eight[i] + eight[i + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
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
        let mut total = halves_sum(&lanes);
        for x in &mut scores[whole..] {
            *x = exp32(*x - largest);
            total += *x;
        }
        *sum += total;
    })
}

struct MatrixVector<'a> {
    matrix: &'a [f32],
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for MatrixVector<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        let Self { matrix, x, y } = self;
        let whole = x.len() / LANES * LANES;
        for (y, row) in y.iter_mut().zip(matrix.chunks_exact(x.len())) {
            let mut sum = m.splat(0.0);
            for at in (0..whole).step_by(LANES) {
                sum = m.mul_add(m.load(lane(row, at)), m.load(lane(x, at)), sum);
            }
            let rest = row[whole..].iter().zip(&x[whole..]).fold(0.0f32, |sum, (a, b)| a.mul_add(*b, sum));
            *y = m.sum(sum) + rest;
        }
    }
}

/// y = M x for a row-major M of `x.len()` columns.
pub(super) fn matrix_vector(matrix: &[f32], x: &[f32], y: &mut [f32]) {
    dispatch(MatrixVector { matrix, x, y });
}

struct Widen<'a> {
    halves: &'a [f16],
    wide: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        if !M::HALVES {
            return self.halves.convert_to_f32_slice(self.wide);
        }
        let (halves, rest) = self.halves.as_chunks::<LANES>();
        let (wide, wide_rest) = self.wide.as_chunks_mut::<LANES>();
        for (halves, wide) in halves.iter().zip(wide) {
            m.store(m.widen(halves), wide);
        }
        for (half, wide) in rest.iter().zip(wide_rest) {
            *wide = half.to_f32();
        }
    }
}

/// Halves as single precision.
pub(super) fn widen(halves: &[f16], wide: &mut [f32]) {
    dispatch(Widen { halves, wide });
}

#[cfg(test)]
mod tests {
    use super::super::keys::Layout;
    use super::super::rows::{pack, put};
    use super::super::simd::Which;
    use super::*;

    fn noise(count: usize, salt: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + salt * 104_729) % 1009) as f32 / 504.5 - 1.0).collect()
    }

    fn codes(count: usize, bits: u32, salt: usize) -> Vec<u8> {
        (0..count).map(|i| ((i * 31 + salt * 17) % 251) as u8 & ((1u32 << bits) - 1) as u8).collect()
    }

    /// `run` on every machine from the same output: the same bits, and within rounding of `expected`.
    #[track_caller]
    fn same_everywhere(what: &str, start: &[f32], expected: &[f64], run: impl Fn(Which, &mut [f32])) {
        let mut first: Option<Vec<f32>> = None;
        for machine in Which::all() {
            let mut found = start.to_vec();
            run(machine, &mut found);
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                let off = (f64::from(*found) - expected).abs();
                assert!(off < 2e-5 * expected.abs().max(1.0), "{what}, {machine:?}, {i}: {found} for {expected}");
            }
            assert_eq!(first.get_or_insert_with(|| found.clone()), &found, "{what}, {machine:?}");
        }
    }

    /// Blocks of 16 tokens from `[tokens, width]` codes, and their layout.
    fn blocks(codes: &[u8], bits: &[u32]) -> (Vec<u8>, Layout) {
        let (layout, width) = (Layout::new(bits), bits.len());
        let mut packed = vec![0; codes.len() / width / LANES * layout.bytes];
        for (token, codes) in codes.chunks(width).enumerate() {
            let block = &mut packed[token / LANES * layout.bytes..][..layout.bytes];
            for run in &layout.runs {
                let rows = block[run.start..].chunks_mut(row_bytes(run.bits, LANES));
                for (row, code) in rows.zip(&codes[run.channels.clone()]) {
                    put(row, run.bits, LANES, token % LANES, *code);
                }
            }
        }
        (packed, layout)
    }

    #[test]
    fn scores_of_groups_are_those_of_the_definition_on_every_machine() {
        let levels: [f32; 256] = std::array::from_fn(|i| (i as f32 - 3.3) * 0.7);
        // Channels without bits are not stored and count as nothing.
        for (bits, tokens, group) in [
            (vec![2; 64], 128, 32),
            (vec![3; 20], 48, 16),
            (vec![8, 8, 5, 4, 4, 1, 0, 0], 112, 64),
            (vec![6, 7, 2, 3, 0, 1], 16, 128),
        ] {
            let width = bits.len();
            let all: Vec<u8> = (0..tokens * width)
                .map(|i| if bits[i % width] == 0 { 0 } else { codes(i + 1, bits[i % width], 5)[i] })
                .collect();
            let (packed, layout) = blocks(&all, &bits);
            let groups = tokens.div_ceil(group);
            let ranges = noise(groups * 2 * width, 2);
            for (count, table) in [(1, None), (3, None), (4, Some(&levels))] {
                let (weights, start) = (noise(count * width, 3), noise(count * TILE, 4));
                let mut expected: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
                for q in 0..count {
                    for t in 0..tokens {
                        expected[q * TILE + t] += (0..width)
                            .map(|c| {
                                let range = |which: usize| f64::from(ranges[(t / group * 2 + which) * width + c]);
                                let code = all[t * width + c];
                                let number = table.map_or(f64::from(code), |table| f64::from(table[usize::from(code)]));
                                let stored = if bits[c] == 0 { 0.0 } else { range(0) * number };
                                f64::from(weights[q * width + c]) * (stored + range(1))
                            })
                            .sum::<f64>();
                    }
                }
                same_everywhere(&format!("{bits:?}, {count}"), &start, &expected, |machine, scores| {
                    let blocks = FoldedBlocks {
                        codes: &packed,
                        runs: &layout.runs,
                        bytes: layout.bytes,
                        blocks: tokens / LANES,
                        levels: table,
                    };
                    let grouped = GroupedBlocks { blocks, per_group: group / LANES, ranges: &ranges };
                    let mut folded = vec![0.0; weights.len()];
                    machine.run(GroupedScores { grouped, weights: &weights, count, folded: &mut folded, scores });
                });
            }
        }
    }

    #[test]
    fn scores_of_tokens_with_ranges_are_those_of_the_definition_on_every_machine() {
        for (bits, width, channels, zeros) in [(2, 64, 32, true), (5, 24, 8, true), (3, 16, 16, false)] {
            let all = codes(LANES * width, bits, 1);
            let (packed, layout) = blocks(&all, &vec![bits; width]);
            let stride = if zeros { 2 * LANES } else { LANES };
            let ranges = noise(width / channels * stride, 2);
            let count = 3;
            let (weights, start) = (noise(count * width, 3), noise(count * TILE, 4));
            let sums: Vec<f32> = (0..width / channels * count)
                .map(|i| weights[i % count * width + i / count * channels..][..channels].iter().sum())
                .collect();
            let mut expected: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
            for q in 0..count {
                for t in 0..LANES {
                    for c in 0..width {
                        let at = c / channels * stride + t;
                        let zero = if zeros { f64::from(ranges[at + LANES]) } else { 0.0 };
                        let key = f64::from(ranges[at]) * f64::from(all[t * width + c]) + zero;
                        expected[q * TILE + t] += f64::from(weights[q * width + c]) * key;
                    }
                }
            }
            same_everywhere(&format!("{bits} bits of {width}"), &start, &expected, |machine, scores| {
                let block =
                    TokenBlock { codes: &packed, runs: &layout.runs, levels: None, ranges: &ranges, channels, zeros };
                machine.run(TokenScores { block, weights: &weights, sums: &sums, count, scores });
            });
        }
    }

    #[test]
    fn coded_and_dense_values_are_summed_alike_on_every_machine() {
        for (bits, width, channels, count) in [(2, 64, 32, 3), (4, 128, 128, 4), (7, 48, 16, 1)] {
            let tokens = 37;
            let all = codes(tokens * width, bits, 1);
            let packed: Vec<u8> = all.chunks(width).flat_map(|token| pack(token, bits)).collect();
            let chunks = width / channels;
            let ranges = noise(tokens * 2 * chunks, 2);
            let (p, start) = (noise(count * TILE, 3), noise(count * width, 4));
            let values: Vec<f32> = (0..tokens * width)
                .map(|i| {
                    let range = &ranges[2 * (i / width * chunks + i % width / channels)..];
                    f32::from(all[i]).mul_add(range[0], range[1])
                })
                .collect();
            let mut expected: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
            for (i, value) in values.iter().enumerate() {
                for q in 0..count {
                    expected[q * width + i % width] += f64::from(p[q * TILE + i / width]) * f64::from(*value);
                }
            }
            same_everywhere(&format!("{bits} bits of {width}"), &start, &expected, |machine, out| {
                let values = CodedValues { codes: &packed, bits, ranges: &ranges, width, channels };
                machine.run(ReadValues { values, p: &p, count, out });
            });
            same_everywhere(&format!("dense, {width}"), &start, &expected, |machine, out| {
                machine.run(DenseValues { values: &values[..], ahead: &[], p: &p, width, count, out });
            });
        }
    }

    #[test]
    fn dense_scores_of_any_width_and_type_are_products_on_every_machine() {
        for (width, count) in [(64, 3), (128, 2), (20, 4), (7, 1)] {
            let (keys, queries) = (noise(11 * width, 1), noise(count * width, 2));
            let halves: Vec<f16> = keys.iter().map(|x| f16::from_f32(*x)).collect();
            let start = noise(count * TILE, 3);
            let products = |key: &dyn Fn(usize) -> f64| {
                let mut all: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
                for q in 0..count {
                    for t in 0..11 {
                        let dot = |c: usize| f64::from(queries[q * width + c]) * key(t * width + c);
                        all[q * TILE + t] += (0..width).map(dot).sum::<f64>();
                    }
                }
                all
            };
            let (queries, what) = (&queries, format!("{width}, {count}"));
            let expected = products(&|i| f64::from(keys[i]));
            same_everywhere(&what, &start, &expected, |machine, scores| {
                machine.run(DenseScores { keys: &keys[..], ahead: &[], queries, width, count, scores });
            });
            let expected = products(&|i| halves[i].to_f64());
            same_everywhere(&what, &start, &expected, |machine, scores| {
                machine.run(DenseScores { keys: &halves[..], ahead: &[], queries, width, count, scores });
            });
        }
    }

    #[test]
    fn every_half_is_widened_exactly_on_every_machine() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for machine in Which::all() {
            let mut wide = vec![0.0; halves.len()];
            machine.run(Widen { halves: &halves, wide: &mut wide });
            for (half, wide) in halves.iter().zip(wide) {
                assert!(half.to_f32().to_bits() == wide.to_bits() || half.is_nan() && wide.is_nan(), "{half:?}");
            }
        }
    }

    #[test]
    fn an_online_softmax_is_a_softmax() {
        let (scores, value) = (noise(TILE, 5).iter().map(|x| x * 30.0).collect::<Vec<_>>(), noise(TILE, 6));
        let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0, [0.0]);
        for tile in [0..5, 5..90, 90..TILE] {
            let mut p = scores[tile.clone()].to_vec();
            online_softmax(&mut p, &mut max, &mut sum, &mut out);
            out[0] += p.iter().zip(&value[tile]).map(|(p, v)| p * v).sum::<f32>();
        }
        let weight = |s: &f32| f64::from(*s - max).exp();
        let total: f64 = scores.iter().map(weight).sum();
        let mean = scores.iter().zip(&value).map(|(s, v)| weight(s) * f64::from(*v)).sum::<f64>() / total;
        assert!((f64::from(sum) / total - 1.0).abs() < 1e-6);
        assert!((f64::from(out[0] / sum) - mean).abs() < 1e-6);
    }
}
