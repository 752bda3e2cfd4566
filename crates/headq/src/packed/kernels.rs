//! Vector loops of decode attention over packed codes and dense pages.
//!
//! Every loop works on sixteen lanes with fused multiply-adds in a fixed order, on whatever instruction set there is ([`super::simd`]).
#![allow(clippy::needless_range_loop, reason = "lanes of several arrays are indexed alike")]

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::kernels::vectorized;

use super::keys::Run;
use super::lanes::{Lanes, Look, Plane, Split};
use super::prefetch::prefetch;
use super::reals::Run as Stretch;
use super::rows::{LANES, row_bytes, with_bits, with_const};
use super::simd::{Element, Kernel, Lane, Machine, dispatch};

/// Tokens that are scored, weighed and read together.
pub(super) const TILE: usize = 128;
/// Query heads of a group that are handled together; larger groups are split.
pub(super) const MOST_QUERIES: usize = 4;

/// What begins with a line of the processor's cache, so that no register's worth of it straddles two.
#[repr(align(64))]
pub(super) struct Aligned<T>(pub T);

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

/// Σ_c w_c · level(code_c) of the channels of a run, for NQ queries.
#[inline(always)]
fn dot_rows<M: Machine, const B: u32, const NQ: usize, const LEVELS: bool>(
    m: M,
    block: &[u8],
    levels: &[f32; 256],
    weights: [&[f32]; NQ],
    sums: &mut [M::Lanes; NQ],
) {
    let mut own = *sums;
    for (c, codes) in block.chunks_exact(row_bytes(B, LANES)).take(weights[0].len()).enumerate() {
        let x = numbers::<M, B, LEVELS>(m, codes, levels);
        for q in 0..NQ {
            own[q] = m.mul_add(m.splat(weights[q][c]), x, own[q]);
        }
    }
    *sums = own;
}

/// No table.
static NO_LEVELS: [f32; 256] = [0.0; 256];

/// Codes of one head in lanes, with what turns them into scores.
pub(super) struct ScorePart<'a> {
    /// The blocks, one after the other.
    pub codes: &'a [u8],
    pub layout: &'a Lanes,
    /// Queries: `[count, codes]`.
    pub stored: &'a [f32],
    /// Queries times what a field's bits count for: `[count, fields]`.
    pub fields: &'a [f32],
    /// `[groups, 2, codes]`: scales, then zeros.
    pub ranges: &'a [f32],
    /// Room for `fields` times scales.
    pub folded: &'a mut [f32],
}

/// Fields that are weighed without a look at how many are left.
const UNROLLED: usize = 4;

/// Sums of NQ queries over NB blocks.
type Sums<L, const NQ: usize, const NB: usize> = [[L; NB]; NQ];

/// Whether there are registers for the sums of NQ queries over `n` blocks or fields, and what goes into them.
const fn fits<M: Machine, const NQ: usize>(n: usize) -> bool {
    NQ * n <= if M::MANY { 16 } else { 4 }
}

/// Adds fields of NB blocks to the sums of NQ queries, times their weights.
#[inline(always)]
fn add_fields<M: Machine, const N: usize, const NQ: usize, const NB: usize>(
    m: M,
    bits: [M::Bits; NB],
    masks: &[u32; N],
    weights: [&[f32; N]; NQ],
    sums: &mut Sums<M::Lanes, NQ, NB>,
) {
    for i in 0..N {
        let mut x = [m.splat(0.0); NB];
        for b in 0..NB {
            x[b] = m.masked(bits[b], masks[i]);
        }
        for q in 0..NQ {
            let w = m.splat(weights[q][i]);
            for b in 0..NB {
                sums[q][b] = m.mul_add(w, x[b], sums[q][b]);
            }
        }
    }
}

/// Σ_f w_f · field_f of a plane of NB blocks, for NQ queries; masks and weights are of the plane's fields.
#[inline(always)]
fn dot_plane<M: Machine, const NQ: usize, const NB: usize>(
    m: M,
    bits: [M::Bits; NB],
    masks: &[u32],
    weights: [&[f32]; NQ],
    sums: &mut Sums<M::Lanes, NQ, NB>,
) {
    let mut own = *sums;
    let (many, rest) = masks.as_chunks::<UNROLLED>();
    let mut many_weights: [_; NQ] = std::array::from_fn(|q| weights[q].as_chunks::<UNROLLED>().0.iter());
    // There are as many weights as masks.
    'many: for masks in many {
        let mut w = [&[0.0; UNROLLED]; NQ];
        for q in 0..NQ {
            let Some(next) = many_weights[q].next() else { break 'many };
            w[q] = next;
        }
        add_fields(m, bits, masks, w, &mut own);
    }
    let rest_of = |q: usize| weights[q].as_chunks::<UNROLLED>().1.as_chunks::<1>().0.iter();
    let mut rest_weights: [_; NQ] = std::array::from_fn(rest_of);
    'rest: for masks in rest.as_chunks::<1>().0 {
        let mut w = [&[0.0]; NQ];
        for q in 0..NQ {
            let Some(next) = rest_weights[q].next() else { break 'rest };
            w[q] = next;
        }
        add_fields(m, bits, masks, w, &mut own);
    }
    *sums = own;
}

/// Runs `$body` with `$P` the width of a plane as a constant.
macro_rules! with_plane {
    ($width:expr, $P:ident => $body:expr) => {
        with_const!($width, $P: u32 = [32 16 8 4 2 1] => $body)
    };
}

/// A plane of a block.
#[inline(always)]
fn plane_of<M: Machine>(m: M, plane: &Plane, block: &[u8]) -> M::Bits {
    let bytes = &block[plane.start..];
    with_plane!(plane.width, P => m.plane::<P>(bytes))
}

impl ScorePart<'_> {
    /// Folds the ranges of a group into the queries, and adds what all tokens of the group have in common to `lanes` and `rest`.
    #[inline(always)]
    fn fold<M: Machine, const NQ: usize>(
        &mut self,
        m: M,
        group: usize,
        lanes: &mut [M::Lanes; NQ],
        rest: &mut [f32; NQ],
    ) {
        let (codes, fields) = (self.layout.codes(), self.layout.fields());
        if codes == 0 {
            return;
        }
        let (scale, zero) = self.ranges[2 * group * codes..2 * (group + 1) * codes].split_at(codes);
        let (zeros, biases) = (zero.as_chunks::<LANES>(), self.layout.biases().as_chunks::<LANES>());
        let scales = scale.as_chunks::<LANES>();
        let stored = split::<NQ>(self.stored, codes);
        for (i, ((scale, zero), bias)) in scales.0.iter().zip(zeros.0).zip(biases.0).enumerate() {
            let zero = m.mul_add(m.load(bias), m.load(scale), m.load(zero));
            for q in 0..NQ {
                lanes[q] = m.mul_add(m.load(lane(stored[q], i * LANES)), zero, lanes[q]);
            }
        }
        let at = scales.0.len() * LANES;
        for (i, ((scale, zero), bias)) in scales.1.iter().zip(zeros.1).zip(biases.1).enumerate() {
            let zero = bias.mul_add(*scale, *zero);
            for q in 0..NQ {
                rest[q] = stored[q][at + i].mul_add(zero, rest[q]);
            }
        }
        for (from, to) in self.fields.chunks_exact(fields).zip(self.folded.chunks_exact_mut(fields)) {
            if self.layout.whole() {
                times(m, from, scale, to);
            } else {
                for (field, (from, to)) in from.iter().zip(to).enumerate() {
                    *to = from * scale[self.layout.code(field)];
                }
            }
        }
    }

    /// Adds to the sums of NB blocks.
    #[inline(always)]
    fn add<M: Machine, const NQ: usize, const NB: usize>(&self, m: M, first: usize, sums: &mut Sums<M::Lanes, NQ, NB>) {
        let fields = self.layout.fields();
        let rows = split::<NQ>(self.folded, fields);
        let mut blocks = [&self.codes[..0]; NB];
        for (b, block) in blocks.iter_mut().enumerate() {
            *block = &self.codes[(first + b) * self.layout.bytes..][..self.layout.bytes];
        }
        for plane in &self.layout.planes {
            let masks = self.layout.masks(plane);
            let mut weights = rows;
            for weights in &mut weights {
                *weights = &weights[plane.fields.clone()];
            }
            let mut bits = [plane_of(m, plane, blocks[0]); NB];
            for b in 1..NB {
                bits[b] = plane_of(m, plane, blocks[b]);
            }
            dot_plane::<M, NQ, NB>(m, bits, masks, weights, sums);
        }
    }
}

/// `to` = a · b.
#[inline(always)]
fn times<M: Machine>(m: M, a: &[f32], b: &[f32], to: &mut [f32]) {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for ((a, b), to) in a.iter().zip(b).zip(to) {
        m.store(m.mul(m.load(a), m.load(b)), to);
    }
    for ((a, b), to) in a_rest.iter().zip(b_rest).zip(to_rest) {
        *to = a * b;
    }
}

struct GroupedScores<'p, 'a> {
    parts: &'p mut [Option<ScorePart<'a>>],
    blocks: usize,
    per_group: usize,
    count: usize,
    scores: &'p mut [f32],
}

impl GroupedScores<'_, '_> {
    /// NB blocks of a group.
    #[inline(always)]
    fn add<M: Machine, const NQ: usize, const NB: usize>(&mut self, m: M, first: usize, constant: &[f32; NQ]) {
        let mut sums = [[m.splat(0.0); NB]; NQ];
        for q in 0..NQ {
            sums[q] = [m.splat(constant[q]); NB];
        }
        for part in self.parts.iter().flatten() {
            part.add(m, first, &mut sums);
        }
        for q in 0..NQ {
            for b in 0..NB {
                add_to(m, sums[q][b], self.scores, q * TILE + (first + b) * LANES);
            }
        }
    }

    /// Blocks of a group, several at a time.
    #[inline(always)]
    fn add_all<M: Machine, const NQ: usize>(&mut self, m: M, blocks: std::ops::Range<usize>, constant: &[f32; NQ]) {
        let mut at = blocks.start;
        if const { fits::<M, NQ>(4) } {
            while at + 4 <= blocks.end {
                self.add::<M, NQ, 4>(m, at, constant);
                at += 4;
            }
        }
        if const { fits::<M, NQ>(2) } {
            while at + 2 <= blocks.end {
                self.add::<M, NQ, 2>(m, at, constant);
                at += 2;
            }
        }
        while at < blocks.end {
            self.add::<M, NQ, 1>(m, at, constant);
            at += 1;
        }
    }

    #[inline(always)]
    fn all<M: Machine, const NQ: usize>(&mut self, m: M) {
        let (mut at, mut group) = (0, 0);
        while at < self.blocks {
            let end = at.saturating_add(self.per_group).min(self.blocks);
            let (mut lanes, mut constant) = ([m.splat(0.0); NQ], [0.0; NQ]);
            for part in self.parts.iter_mut().flatten() {
                part.fold(m, group, &mut lanes, &mut constant);
            }
            for q in 0..NQ {
                constant[q] += m.sum(lanes[q]);
            }
            self.add_all::<M, NQ>(m, at..end, &constant);
            (at, group) = (end, group + 1);
        }
    }
}

impl Kernel for GroupedScores<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(mut self, m: M) {
        with_count!(self.count, NQ => self.all::<M, NQ>(m));
    }
}

/// Adds Σ_c w_qc · (zero_c + scale_c · code_tc), over all parts, to the scores of each block's tokens; `per_group` blocks share ranges.
///
/// # Shapes
/// - `scores`: `[count, TILE]`, the blocks' lanes from the first on
pub(super) fn grouped_scores(
    parts: &mut [Option<ScorePart<'_>>],
    blocks: usize,
    per_group: usize,
    count: usize,
    scores: &mut [f32],
) {
    dispatch(GroupedScores { parts, blocks, per_group, count, scores });
}

/// Codes of one head in lanes, each of which a table says what it stands for.
pub(super) struct LookedUp<'a> {
    /// The blocks, one after the other.
    pub codes: &'a [u8],
    pub layout: &'a Lanes,
    /// [`Lanes::tables`]
    pub tables: &'a [Lane],
}

impl LookedUp<'_> {
    /// A code of which planes have parts.
    #[inline(always)]
    fn split<M: Machine>(&self, m: M, split: &Split, block: &[u8]) -> M::Lanes {
        let mut bits = m.no_bits();
        for part in &split.parts {
            bits = m.joined(plane_of(m, &self.layout.planes[part.plane], block), part.shift, part.mask, part.low, bits);
        }
        m.look_up(bits, 0, &self.tables[split.table])
    }

    #[inline(always)]
    fn block(&self, index: usize) -> &[u8] {
        &self.codes[index * self.layout.bytes..][..self.layout.bytes]
    }
}

struct LookedUpScores<'a> {
    codes: LookedUp<'a>,
    /// `[count, codes]`, in the order of [`Looks::codes`](super::lanes::Looks::codes).
    weights: &'a [f32],
    count: usize,
    scores: &'a mut [f32],
}

impl LookedUpScores<'_> {
    /// NB blocks.
    #[inline(always)]
    fn add<M: Machine, const NQ: usize, const NB: usize>(&mut self, m: M, first: usize) {
        let Self { codes, weights, .. } = self;
        let layout = codes.layout;
        let rows = split::<NQ>(weights, layout.codes());
        let mut weights: [_; NQ] = std::array::from_fn(|q| rows[q].iter());
        let mut sums = [[m.splat(0.0); NB]; NQ];
        for (plane, looks) in layout.planes.iter().zip(&layout.looks.planes) {
            let mut bits = [m.no_bits(); NB];
            for b in 0..NB {
                bits[b] = plane_of(m, plane, codes.block(first + b));
            }
            for look in looks {
                let table = &codes.tables[look.table];
                let mut x = [m.splat(0.0); NB];
                for b in 0..NB {
                    x[b] = m.look_up(bits[b], look.shift, table);
                }
                for q in 0..NQ {
                    let w = m.splat(weights[q].next().copied().unwrap_or_default());
                    for b in 0..NB {
                        sums[q][b] = m.mul_add(w, x[b], sums[q][b]);
                    }
                }
            }
        }
        for split in &layout.looks.splits {
            let mut x = [m.splat(0.0); NB];
            for b in 0..NB {
                x[b] = codes.split(m, split, codes.block(first + b));
            }
            for q in 0..NQ {
                let w = m.splat(weights[q].next().copied().unwrap_or_default());
                for b in 0..NB {
                    sums[q][b] = m.mul_add(w, x[b], sums[q][b]);
                }
            }
        }
        for q in 0..NQ {
            for b in 0..NB {
                add_to(m, sums[q][b], self.scores, q * TILE + (first + b) * LANES);
            }
        }
    }

    #[inline(always)]
    fn all<M: Machine, const NQ: usize>(mut self, m: M) {
        let blocks = self.codes.codes.len() / self.codes.layout.bytes;
        let mut at = 0;
        if const { fits::<M, NQ>(4) } {
            while at + 4 <= blocks {
                self.add::<M, NQ, 4>(m, at);
                at += 4;
            }
        }
        if const { fits::<M, NQ>(2) } {
            while at + 2 <= blocks {
                self.add::<M, NQ, 2>(m, at);
                at += 2;
            }
        }
        while at < blocks {
            self.add::<M, NQ, 1>(m, at);
            at += 1;
        }
    }
}

impl Kernel for LookedUpScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        with_count!(self.count, NQ => self.all::<M, NQ>(m));
    }
}

/// Adds Σ_c w_qc · level(code_tc) to the scores of each block's tokens.
///
/// # Shapes
/// - `weights`: `[count, codes]`, in the order of [`Looks::codes`](super::lanes::Looks::codes)
/// - `scores`: `[count, TILE]`, the blocks' lanes from the first on
pub(super) fn looked_up_scores(codes: LookedUp<'_>, weights: &[f32], count: usize, scores: &mut [f32]) {
    dispatch(LookedUpScores { codes, weights, count, scores });
}

/// What codes of coefficients stand for before their scale.
pub(super) enum Coefficients<'a> {
    /// Themselves.
    Codes {
        codes: &'a [u8],
        layout: &'a Lanes,
    },
    LookedUp(LookedUp<'a>),
}

struct SumCoefficients<'a> {
    of: Coefficients<'a>,
    /// `[count, TILE]`
    p: &'a [f32],
    count: usize,
    sums: &'a mut [f32],
}

impl SumCoefficients<'_> {
    /// Σ_t p_qt · x_tf of F numbers of each block, as `numbers` makes them.
    #[inline(always)]
    fn sum<M: Machine, const NQ: usize, const F: usize>(
        m: M,
        (codes, bytes): (&[u8], usize),
        p: &[f32],
        numbers: impl Fn(&[u8]) -> [M::Lanes; F],
    ) -> [[f32; NQ]; F] {
        let tokens = codes.len() / bytes * LANES;
        let mut rows = [&p[..0]; NQ];
        for q in 0..NQ {
            rows[q] = &p[q * TILE..][..tokens];
        }
        let p = rows;
        let mut sums = [[m.splat(0.0); NQ]; F];
        for (i, block) in codes.chunks_exact(bytes).enumerate() {
            let x = numbers(block);
            for q in 0..NQ {
                let p = m.load(lane(p[q], i * LANES));
                for f in 0..F {
                    sums[f][q] = m.mul_add(p, x[f], sums[f][q]);
                }
            }
        }
        let mut totals = [[0.0; NQ]; F];
        for f in 0..F {
            for q in 0..NQ {
                totals[f][q] = m.sum(sums[f][q]);
            }
        }
        totals
    }

    /// F neighbouring looks of a plane.
    #[inline(always)]
    fn looks<M: Machine, const NQ: usize, const F: usize>(
        m: M,
        of: &LookedUp<'_>,
        p: &[f32],
        plane: &Plane,
        looks: &[Look],
    ) -> [[f32; NQ]; F] {
        let looks: &[Look; F] = looks[..F].try_into().expect("as many looks");
        let tables: [&Lane; F] = std::array::from_fn(|f| &of.tables[looks[f].table]);
        Self::sum::<M, NQ, F>(
            m,
            (of.codes, of.layout.bytes),
            p,
            #[inline(always)]
            |block| {
                let bits = plane_of(m, plane, block);
                let mut x = [m.splat(0.0); F];
                for f in 0..F {
                    x[f] = m.look_up(bits, looks[f].shift, tables[f]);
                }
                x
            },
        )
    }

    #[inline(always)]
    fn looked_up<M: Machine, const NQ: usize>(m: M, of: LookedUp<'_>, p: &[f32], sums: &mut [f32]) {
        let all = &of.layout.looks;
        let mut codes = all.codes.iter();
        let mut put = |own: &[f32; NQ]| {
            if let Some(code) = codes.next() {
                sums[code * NQ..(code + 1) * NQ].copy_from_slice(own);
            }
        };
        for (plane, looks) in of.layout.planes.iter().zip(&all.planes) {
            let mut at = 0;
            while at < looks.len() {
                match looks.len() - at {
                    4.. if const { fits::<M, NQ>(4) } => {
                        Self::looks::<M, NQ, 4>(m, &of, p, plane, &looks[at..]).iter().for_each(&mut put);
                        at += 4;
                    }
                    2.. if const { fits::<M, NQ>(2) } => {
                        Self::looks::<M, NQ, 2>(m, &of, p, plane, &looks[at..]).iter().for_each(&mut put);
                        at += 2;
                    }
                    _ => {
                        Self::looks::<M, NQ, 1>(m, &of, p, plane, &looks[at..]).iter().for_each(&mut put);
                        at += 1;
                    }
                }
            }
        }
        for split in &all.splits {
            let own = Self::sum::<M, NQ, 1>(
                m,
                (of.codes, of.layout.bytes),
                p,
                #[inline(always)]
                |block| [of.split(m, split, block)],
            );
            own.iter().for_each(&mut put);
        }
    }

    /// F neighbouring fields of a plane.
    #[inline(always)]
    fn fields<M: Machine, const NQ: usize, const F: usize>(
        m: M,
        (codes, layout): (&[u8], &Lanes),
        p: &[f32],
        plane: &Plane,
        at: usize,
        sums: &mut [f32],
    ) {
        let masks = lane_masks::<F>(layout.masks(plane), at - plane.fields.start);
        let own = Self::sum::<M, NQ, F>(
            m,
            (codes, layout.bytes),
            p,
            #[inline(always)]
            |block| {
                let bits = plane_of(m, plane, block);
                let mut x = [m.splat(0.0); F];
                for f in 0..F {
                    x[f] = m.masked(bits, masks[f]);
                }
                x
            },
        );
        for f in 0..F {
            let (code, place) = (layout.code(at + f), layout.place(at + f));
            for q in 0..NQ {
                let to = &mut sums[code * NQ + q];
                *to = own[f][q].mul_add(place, *to);
            }
        }
    }

    #[inline(always)]
    fn codes<M: Machine, const NQ: usize>(m: M, (codes, layout): (&[u8], &Lanes), p: &[f32], sums: &mut [f32]) {
        let mut totals = [0.0; NQ];
        for q in 0..NQ {
            totals[q] = lane_sum(&p[q * TILE..][..codes.len() / layout.bytes * LANES]);
        }
        for (bias, sums) in layout.biases().iter().zip(sums.as_chunks_mut::<NQ>().0) {
            for q in 0..NQ {
                sums[q] = bias * totals[q];
            }
        }
        for plane in &layout.planes {
            let mut at = plane.fields.start;
            while at < plane.fields.end {
                at += match plane.fields.end - at {
                    4.. if const { fits::<M, NQ>(4) } => {
                        Self::fields::<M, NQ, 4>(m, (codes, layout), p, plane, at, sums);
                        4
                    }
                    2.. if const { fits::<M, NQ>(2) } => {
                        Self::fields::<M, NQ, 2>(m, (codes, layout), p, plane, at, sums);
                        2
                    }
                    _ => {
                        Self::fields::<M, NQ, 1>(m, (codes, layout), p, plane, at, sums);
                        1
                    }
                };
            }
        }
    }
}

impl Kernel for SumCoefficients<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        let Self { of, p, count, sums } = self;
        match of {
            Coefficients::Codes { codes, layout } => {
                with_count!(count, NQ => Self::codes::<M, NQ>(m, (codes, layout), p, sums));
            }
            Coefficients::LookedUp(of) => with_count!(count, NQ => Self::looked_up::<M, NQ>(m, of, p, sums)),
        }
    }
}

/// Σ_t p_qt · level(code_tc) of every code of up to a tile of blocks, into `sums` `[codes, count]`.
///
/// # Shapes
/// `p`: 16 of each block, 0 where a block's token is not meant; those of the next query [`TILE`] numbers further on
pub(super) fn coefficient_sums(of: Coefficients<'_>, p: &[f32], count: usize, sums: &mut [f32]) {
    dispatch(SumCoefficients { of, p, count, sums });
}

/// One block whose tokens have ranges of their own.
pub(super) struct TokenBlock<'a> {
    pub codes: &'a [u8],
    pub runs: &'a [Run],
    /// What codes stand for; themselves if there is no table.
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
            let mut dots = [m.splat(0.0); NQ];
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
                    None => dot_rows::<M, B, NQ, false>(m, block, &NO_LEVELS, weights, &mut dots),
                    Some(levels) => dot_rows::<M, B, NQ, true>(m, block, levels, weights, &mut dots),
                });
            }
            let scale = m.load(lane(ranges, 0));
            for q in 0..NQ {
                total[q] = m.mul_add(scale, dots[q], total[q]);
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

/// Probabilities of a tile's tokens times their values' ranges.
#[derive(Debug, Default)]
pub(super) struct Weighed {
    /// p · scale: `[chunks, count, TILE]`
    pub scaled: Vec<f32>,
    /// Σp · scale and Σp · zero: `[chunks, count]`
    pub sums: Vec<[f32; 2]>,
}

struct Weigh<'a, E> {
    ranges: &'a [E],
    chunks: usize,
    p: &'a [f32],
    first: usize,
    tokens: usize,
    count: usize,
    to: &'a mut Weighed,
}

impl<E: Element> Kernel for Weigh<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        with_count!(self.count, NQ => self.all::<M, NQ>(m))
    }
}

impl<E: Element> Weigh<'_, E> {
    #[inline(always)]
    fn all<M: Machine, const NQ: usize>(self, m: M) {
        let Self { ranges, chunks, p, first, tokens, to, .. } = self;
        let record = 2 * chunks * LANES;
        // Whole blocks, if tokens begin with one, then token by token.
        let whole = if first == 0 { tokens / LANES } else { 0 };
        let mut rows = [&p[..0]; NQ];
        for q in 0..NQ {
            rows[q] = &p[q * TILE..][..tokens];
        }
        for (chunk, scaled) in to.scaled.chunks_exact_mut(NQ * TILE).enumerate() {
            let mut sums = [[m.splat(0.0); 2]; NQ];
            for (block, ranges) in ranges.chunks_exact(record).take(whole).enumerate() {
                let scale = E::load(m, lane(ranges, 2 * chunk * LANES));
                let zero = E::load(m, lane(ranges, (2 * chunk + 1) * LANES));
                for q in 0..NQ {
                    let p = m.load(lane(rows[q], block * LANES));
                    let product = m.mul(p, scale);
                    let at = q * TILE + block * LANES;
                    m.store(product, (&mut scaled[at..at + LANES]).try_into().expect("sixteen elements"));
                    sums[q] = [m.add(sums[q][0], product), m.mul_add(p, zero, sums[q][1])];
                }
            }
            for q in 0..NQ {
                let mut sums = [m.sum(sums[q][0]), m.sum(sums[q][1])];
                for t in whole * LANES..tokens {
                    let at = (first + t) / LANES * record + 2 * chunk * LANES + (first + t) % LANES;
                    let product = rows[q][t] * ranges[at].wide();
                    scaled[q * TILE + t] = product;
                    sums = [sums[0] + product, rows[q][t].mul_add(ranges[at + LANES].wide(), sums[1])];
                }
                to.sums[chunk * NQ + q] = sums;
            }
        }
    }
}

/// Probabilities times the scales of tokens' values, and their sums.
///
/// # Shapes
/// - `ranges`: `[blocks, chunks, 2, 16]`: scales and zeros of 16 tokens; `first` is the place of the first token in the first block
/// - `p`: `[count, TILE]` from the first token on
pub(super) fn weigh(
    ranges: Stretch<'_>,
    chunks: usize,
    p: &[f32],
    (first, tokens): (usize, usize),
    count: usize,
    to: &mut Weighed,
) {
    to.scaled.resize(chunks * count * TILE, 0.0);
    to.sums.resize(chunks * count, [0.0; 2]);
    match ranges {
        Stretch::F16(ranges) => dispatch(Weigh { ranges, chunks, p, first, tokens, count, to }),
        Stretch::F32(ranges) => dispatch(Weigh { ranges, chunks, p, first, tokens, count, to }),
    }
}

/// Values of consecutive tokens: in lanes, each with every sixteenth channel.
pub(super) struct CodedValues<'a> {
    /// Tokens, one after the other.
    pub codes: &'a [u8],
    pub layout: &'a Lanes,
    /// Codes of a lane whose channels share a range.
    pub per_chunk: usize,
    /// `[chunks, count, TILE]` from the first token on: p · scale.
    pub scaled: &'a [f32],
    /// `[chunks, count]`: Σp · scale of the tokens.
    pub sums: &'a [[f32; 2]],
}

impl CodedValues<'_> {
    /// Σ_t p_qt · scale_t · code_t of NF neighbouring fields of a plane, which share ranges.
    #[inline(always)]
    fn fields<M: Machine, const P: u32, const NQ: usize, const NF: usize>(
        &self,
        m: M,
        plane: &Plane,
        first: usize,
        out: &mut [f32],
    ) {
        let chunk = self.layout.code(first) / self.per_chunk;
        let masks = lane_masks::<NF>(self.layout.masks(plane), first - plane.fields.start);
        let mut sums = [[m.splat(0.0); NF]; NQ];
        let mut p: [_; NQ] = std::array::from_fn(|q| self.scaled[(chunk * NQ + q) * TILE..][..TILE].iter());
        'tokens: for token in self.codes.chunks_exact(self.layout.bytes) {
            let bits = m.plane::<P>(&token[plane.start..]);
            let mut w = [m.splat(0.0); NQ];
            for q in 0..NQ {
                // A tile has no more tokens than weights.
                let Some(p) = p[q].next() else { break 'tokens };
                w[q] = m.splat(*p);
            }
            for f in 0..NF {
                let x = m.masked(bits, masks[f]);
                for q in 0..NQ {
                    sums[q][f] = m.mul_add(w[q], x, sums[q][f]);
                }
            }
        }
        let width = self.layout.codes() * LANES;
        for f in 0..NF {
            let (at, place) = (self.layout.code(first + f) * LANES, m.splat(self.layout.place(first + f)));
            for q in 0..NQ {
                add_to(m, m.mul(sums[q][f], place), out, q * width + at);
            }
        }
    }

    /// All fields of a plane.
    #[inline(always)]
    fn plane<M: Machine, const P: u32, const NQ: usize>(&self, m: M, plane: &Plane, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if const { P == 8 || P == 16 }
            && let Some(avx2) = m.avx2()
        {
            return super::words::add_plane::<P, NQ>(avx2, self, plane, out);
        }
        let mut at = plane.fields.start;
        while at < plane.fields.end {
            let chunk = self.layout.code(at) / self.per_chunk;
            let alike = (at..plane.fields.end).take_while(|f| self.layout.code(*f) / self.per_chunk == chunk).count();
            at += match alike {
                4.. if const { fits::<M, NQ>(4) } => {
                    self.fields::<M, P, NQ, 4>(m, plane, at, out);
                    4
                }
                2.. if const { fits::<M, NQ>(2) } => {
                    self.fields::<M, P, NQ, 2>(m, plane, at, out);
                    2
                }
                _ => {
                    self.fields::<M, P, NQ, 1>(m, plane, at, out);
                    1
                }
            };
        }
    }

    #[inline(always)]
    fn all<M: Machine, const NQ: usize>(&self, m: M, out: &mut [f32]) {
        for plane in &self.layout.planes {
            with_plane!(plane.width, P => self.plane::<M, P, NQ>(m, plane, out));
        }
        let width = self.layout.codes() * LANES;
        for (code, bias) in self.layout.biases().iter().enumerate().filter(|(_, bias)| **bias != 0.0) {
            for q in 0..NQ {
                let [scales, _] = self.sums[code / self.per_chunk * NQ + q];
                add_to(m, m.splat(bias * scales), out, q * width + code * LANES);
            }
        }
    }
}

/// Some masks of a plane.
#[inline(always)]
fn lane_masks<const N: usize>(masks: &[u32], at: usize) -> &[u32; N] {
    masks[at..at + N].try_into().expect("as many masks as fields")
}

struct ReadValues<'a> {
    values: CodedValues<'a>,
    count: usize,
    out: &'a mut [f32],
}

impl Kernel for ReadValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: Machine>(self, m: M) {
        let Self { values, count, out } = self;
        with_count!(count, NQ => values.all::<M, NQ>(m, out))
    }
}

/// Adds Σ_t p_qt · scale_t · code_t of consecutive coded values; zeros are not added.
///
/// # Shapes
/// `out`: `[count, width]`
pub(super) fn coded_values(values: CodedValues<'_>, count: usize, out: &mut [f32]) {
    dispatch(ReadValues { values, count, out });
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

/// The largest of the lanes, upper half against lower half.
#[inline(always)]
fn halves_max(x: &Lane) -> f32 {
    let mut x = *x;
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            x[i] = if x[i + half] > x[i] { x[i + half] } else { x[i] };
        }
    }
    x[0]
}

/// e^x for x ≤ 0, to about 2 ulp; 0 below −88. As [`crate::kernels::exp32`], with fewer operations that wait for each other.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5·2²³
    const ROUND: f32 = 12_582_912.0;
    // There the power of two is 2⁻¹²⁷, which comes out as 0.
    let x = if x < -88.0 { -88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let square = r * r;
    let low = square.mul_add(r.mul_add(1.0 / 6.0, 0.5), r + 1.0);
    let high = square.mul_add(r.mul_add(1.0 / 5_040.0, 1.0 / 720.0), r.mul_add(1.0 / 120.0, 1.0 / 24.0));
    let p = (square * square).mul_add(high, low);
    p * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}

/// One tile of an online softmax: each query's scores become e^{s − m}, what was summed before is scaled to the new maximum m.
///
/// # Shapes
/// - `scores`: `[count, TILE]`, of each row the first `tokens`, −∞ for hidden ones, at least one not
/// - `max`, `sum`: `[count]`; `outs`: `[count, width]` each
pub(super) fn online_softmax(
    scores: &mut [f32],
    tokens: usize,
    max: &mut [f32],
    sum: &mut [f32],
    outs: [&mut [f32]; 2],
) {
    let [out, more] = outs;
    vectorized!(|scores: &'a mut [f32],
                 tokens: usize,
                 max: &'a mut [f32],
                 sum: &'a mut [f32],
                 out: &'a mut [f32],
                 more: &'a mut [f32]|
     -> () {
        let whole = tokens / LANES * LANES;
        // Queries in turn for each step, as a step of one has to wait for the step before.
        let count = max.len();
        for q in 0..count {
            let scores = &scores[q * TILE..][..tokens];
            let mut lanes = [f32::NEG_INFINITY; LANES];
            for x in scores[..whole].as_chunks::<LANES>().0 {
                for i in 0..LANES {
                    lanes[i] = if x[i] > lanes[i] { x[i] } else { lanes[i] };
                }
            }
            let largest = scores[whole..].iter().copied().fold(halves_max(&lanes), f32::max);
            if largest > max[q] {
                let shrink = exp_of_negative(max[q] - largest);
                sum[q] *= shrink;
                for all in [&mut *out, &mut *more] {
                    let width = all.len() / count;
                    for x in &mut all[q * width..(q + 1) * width] {
                        *x *= shrink;
                    }
                }
                max[q] = largest;
            }
        }
        for q in 0..count {
            let (scores, largest) = (&mut scores[q * TILE..][..tokens], max[q]);
            let mut lanes = [0.0; LANES];
            for x in scores[..whole].as_chunks_mut::<LANES>().0 {
                for i in 0..LANES {
                    x[i] = exp_of_negative(x[i] - largest);
                    lanes[i] += x[i];
                }
            }
            let mut total = halves_sum(&lanes);
            for x in &mut scores[whole..] {
                *x = exp_of_negative(*x - largest);
                total += *x;
            }
            sum[q] += total;
        }
    })
}

/// Σx, in sixteen lanes.
pub(super) fn lane_sum(x: &[f32]) -> f32 {
    let (lanes, rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for lane in lanes {
        for i in 0..LANES {
            sums[i] += lane[i];
        }
    }
    halves_sum(&sums) + rest.iter().sum::<f32>()
}

/// `to` += factor · x.
pub(super) fn add_scaled(x: &[f32], factor: f32, to: &mut [f32]) {
    vectorized!(|x: &'a [f32], factor: f32, to: &'a mut [f32]| -> () {
        for (to, x) in to.iter_mut().zip(x) {
            *to += factor * x;
        }
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
    use super::super::keys::Rows;
    use super::super::rows::put;
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

    /// Blocks of 16 tokens from `[tokens, codes]` codes, in lanes.
    fn in_lanes(codes: &[u8], layout: &Lanes) -> Vec<u8> {
        let mut packed = vec![0; codes.len() / layout.codes() / LANES * layout.bytes];
        for (token, codes) in codes.chunks(layout.codes()).enumerate() {
            let block = &mut packed[token / LANES * layout.bytes..][..layout.bytes];
            codes.iter().enumerate().for_each(|(i, code)| layout.put(block, token % LANES, i, *code));
        }
        packed
    }

    /// One block of 16 tokens from `[16, width]` codes, in rows.
    fn in_rows(codes: &[u8], bits: &[u32]) -> (Vec<u8>, Rows) {
        let rows = Rows::new(bits);
        let mut block = vec![0; rows.bytes];
        for (lane, codes) in codes.chunks(bits.len()).enumerate() {
            for run in &rows.runs {
                let to = block[run.start..].chunks_mut(row_bytes(run.bits, LANES));
                for (row, code) in to.zip(&codes[run.channels.clone()]) {
                    put(row, run.bits, LANES, lane, *code);
                }
            }
        }
        (block, rows)
    }

    /// Codes, ranges and queries of a part.
    struct Coded {
        layout: Lanes,
        all: Vec<u8>,
        packed: Vec<u8>,
        ranges: Vec<f32>,
        weights: Vec<f32>,
        fields: Vec<f32>,
    }

    impl Coded {
        fn new(bits: &[u32], tokens: usize, groups: usize, count: usize) -> Self {
            let (layout, n) = (Lanes::new(bits), bits.len());
            let all: Vec<u8> = (0..tokens * n).map(|i| codes(i + 1, bits[i % n], 5)[i]).collect();
            let weights = noise(count * n, 3);
            let field = |i: usize| {
                let (q, f) = (i / layout.fields(), i % layout.fields());
                weights[q * n + layout.code(f)] * layout.place(f)
            };
            Self {
                packed: in_lanes(&all, &layout),
                ranges: noise(groups * 2 * n, 2),
                fields: (0..count * layout.fields()).map(field).collect(),
                all,
                weights,
                layout,
            }
        }

        fn score(&self, q: usize, t: usize, group: usize) -> f64 {
            let n = self.layout.codes();
            let product = |c: usize| {
                let range = |which: usize| f64::from(self.ranges[(t / group * 2 + which) * n + c]);
                f64::from(self.weights[q * n + c]) * (range(0) * f64::from(self.all[t * n + c]) + range(1))
            };
            (0..n).map(product).sum()
        }

        fn part<'a>(&'a self, folded: &'a mut [f32]) -> ScorePart<'a> {
            ScorePart {
                codes: &self.packed,
                layout: &self.layout,
                stored: &self.weights,
                fields: &self.fields,
                ranges: &self.ranges,
                folded,
            }
        }
    }

    #[test]
    fn scores_of_groups_are_those_of_the_definition_on_every_machine() {
        for (bits, tokens, group, side) in [
            (vec![2; 64], 128usize, 32usize, Some(vec![4; 4])),
            (vec![3; 20], 48, 16, None),
            (vec![8, 8, 5, 4, 4, 1], 112, 64, Some(vec![2; 3])),
            (vec![6, 7, 2, 3, 1], 16, 128, None),
            ([vec![6; 3], vec![4; 9], vec![3; 17], vec![1; 20]].concat(), 96, 128, Some(vec![3; 8])),
            (vec![8; 16], 64, 128, None),
        ] {
            let groups = tokens.div_ceil(group);
            for count in [1, 3, 4] {
                let base = Coded::new(&bits, tokens, groups, count);
                let side = side.as_ref().map(|bits| Coded::new(bits, tokens, groups, count));
                let start = noise(count * TILE, 4);
                let mut expected: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
                for q in 0..count {
                    for t in 0..tokens {
                        let all = [Some(&base), side.as_ref()];
                        expected[q * TILE + t] += all.iter().flatten().map(|c| c.score(q, t, group)).sum::<f64>();
                    }
                }
                same_everywhere(&format!("{bits:?}, {count}"), &start, &expected, |machine, scores| {
                    let mut folded =
                        [vec![0.0; base.fields.len()], vec![0.0; side.as_ref().map_or(0, |s| s.fields.len())]];
                    let [first, second] = &mut folded;
                    let mut parts = [Some(base.part(first)), side.as_ref().map(|side| side.part(second))];
                    let (parts, blocks, per_group) = (&mut parts[..], tokens / LANES, group / LANES);
                    machine.run(GroupedScores { parts, blocks, per_group, count, scores });
                });
            }
        }
    }

    #[test]
    fn scores_of_tokens_with_ranges_are_those_of_the_definition_on_every_machine() {
        for (bits, width, channels, zeros) in [(2, 64, 32, true), (5, 24, 8, true), (3, 16, 16, false)] {
            let all = codes(LANES * width, bits, 1);
            let (packed, rows) = in_rows(&all, &vec![bits; width]);
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
                    TokenBlock { codes: &packed, runs: &rows.runs, levels: None, ranges: &ranges, channels, zeros };
                machine.run(TokenScores { block, weights: &weights, sums: &sums, count, scores });
            });
        }
    }

    /// What codes of 1, 2 and 3 bits stand for.
    fn tables() -> Vec<[f32; 256]> {
        (1..=3).map(|salt| std::array::from_fn(|i| ((i * 37 + salt * 11) % 19) as f32 / 9.0 - 1.0)).collect()
    }

    #[test]
    fn codes_that_are_looked_up_are_scored_and_summed_by_the_definition_on_every_machine() {
        // Planes of every width, and codes that two of them share.
        for bits in [
            vec![3; 64],
            vec![2; 16],
            vec![1; 7],
            vec![3; 7],
            [vec![3; 5], vec![2; 9], vec![1; 14]].concat(),
            [vec![3; 1], vec![1; 1]].concat(),
            [vec![1; 2], vec![3; 11], vec![2; 5]].concat(),
        ] {
            let (layout, n, tokens) = (Lanes::new(&bits), bits.len(), 6 * LANES);
            let all: Vec<u8> = (0..tokens * n).map(|i| codes(i + 1, bits[i % n], 5)[i]).collect();
            let packed = in_lanes(&all, &layout);
            let levels = tables();
            let tables = layout.tables(&levels);
            let level = |t: usize, c: usize| f64::from(levels[bits[c] as usize - 1][usize::from(all[t * n + c])]);
            for count in [1, 2, 3, 4] {
                let what = format!("{bits:?}, {count}");
                let codes = || LookedUp { codes: &packed, layout: &layout, tables: &tables };
                let (weights, start) = (noise(count * n, 3), noise(count * TILE, 4));
                let mut expected: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
                for (q, t) in (0..count).flat_map(|q| (0..tokens).map(move |t| (q, t))) {
                    expected[q * TILE + t] += (0..n).map(|c| f64::from(weights[q * n + c]) * level(t, c)).sum::<f64>();
                }
                let ordered: Vec<f32> = (0..count)
                    .flat_map(|q| layout.looks.codes.iter().map(move |c| (q, c)))
                    .map(|(q, c)| weights[q * n + c])
                    .collect();
                same_everywhere(&what, &start, &expected, |machine, scores| {
                    machine.run(LookedUpScores { codes: codes(), weights: &ordered, count, scores });
                });
                let p = noise(count * TILE, 6);
                let sum = |f: &dyn Fn(usize, usize) -> f64, q: usize, c: usize| -> f64 {
                    (0..tokens).map(|t| f64::from(p[q * TILE + t]) * f(t, c)).sum()
                };
                let sums = |f: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
                    (0..n * count).map(|i| sum(f, i % count, i / count)).collect()
                };
                let zeros = vec![0.0; n * count];
                same_everywhere(&what, &zeros, &sums(&level), |machine, sums| {
                    machine.run(SumCoefficients { of: Coefficients::LookedUp(codes()), p: &p, count, sums });
                });
                let own = sums(&|t, c| f64::from(all[t * n + c]));
                same_everywhere(&what, &zeros, &own, |machine, sums| {
                    let of = Coefficients::Codes { codes: &packed, layout: &layout };
                    machine.run(SumCoefficients { of, p: &p, count, sums });
                });
            }
        }
    }

    #[test]
    fn sums_of_codes_of_any_width_are_those_of_the_definition_on_every_machine() {
        let bits = [vec![8; 3], vec![7; 2], vec![5; 6], vec![4; 9], vec![1; 3]].concat();
        let (layout, n, tokens, count) = (Lanes::new(&bits), bits.len(), 3 * LANES, 3);
        let all: Vec<u8> = (0..tokens * n).map(|i| codes(i + 1, bits[i % n], 2)[i]).collect();
        let (packed, p) = (in_lanes(&all, &layout), noise(count * TILE, 6));
        let product = |i: usize, t: usize| f64::from(p[i % count * TILE + t]) * f64::from(all[t * n + i / count]);
        let expected: Vec<f64> = (0..n * count).map(|i| (0..tokens).map(|t| product(i, t)).sum()).collect();
        same_everywhere("all widths", &vec![0.0; n * count], &expected, |machine, sums| {
            let of = Coefficients::Codes { codes: &packed, layout: &layout };
            machine.run(SumCoefficients { of, p: &p, count, sums });
        });
    }

    #[test]
    fn coded_and_dense_values_are_summed_alike_on_every_machine() {
        for (bits, width, channels, count, first) in
            [(2, 64, 32, 3, 0), (4, 128, 128, 4, 5), (7, 48, 16, 1, 0), (3, 64, 64, 2, 0), (8, 64, 32, 3, 0)]
        {
            let tokens = 37;
            let layout = Lanes::new(&vec![bits; width / LANES]);
            let all = codes(tokens * width, bits, 1);
            let mut packed = vec![0; tokens * layout.bytes];
            for (token, codes) in packed.chunks_mut(layout.bytes).zip(all.chunks(width)) {
                codes.iter().enumerate().for_each(|(c, code)| layout.put(token, c % LANES, c / LANES, *code));
            }
            let chunks = width / channels;
            let ranges = noise((first + tokens).div_ceil(LANES) * chunks * 2 * LANES, 2);
            // The tile's first tokens are others.
            let (all_p, start) = (noise(count * TILE, 3), noise(count * width, 4));
            let p = &all_p[first..];
            let range = |t: usize, c: usize, which: usize| {
                let (block, lane) = ((first + t) / LANES, (first + t) % LANES);
                ranges[((block * chunks + c / channels) * 2 + which) * LANES + lane]
            };
            let values: Vec<f32> = (0..tokens * width)
                .map(|i| f32::from(all[i]).mul_add(range(i / width, i % width, 0), range(i / width, i % width, 1)))
                .collect();
            let mut expected: Vec<f64> = start.iter().map(|x| f64::from(*x)).collect();
            for (i, value) in values.iter().enumerate() {
                for q in 0..count {
                    expected[q * width + i % width] += f64::from(p[q * TILE + i / width]) * f64::from(*value);
                }
            }
            same_everywhere(&format!("{bits} bits of {width}"), &start, &expected, |machine, out| {
                let mut to = Weighed { scaled: vec![0.0; chunks * count * TILE], sums: vec![[0.0; 2]; chunks * count] };
                machine.run(Weigh { ranges: &ranges[..], chunks, p, first, tokens, count, to: &mut to });
                let per_chunk = channels / LANES;
                let values =
                    CodedValues { codes: &packed, layout: &layout, per_chunk, scaled: &to.scaled, sums: &to.sums };
                machine.run(ReadValues { values, count, out });
                for (i, out) in out.iter_mut().enumerate() {
                    *out += to.sums[i % width / channels * count + i / width][1];
                }
            });
            same_everywhere(&format!("dense, {width}"), &start, &expected, |machine, out| {
                machine.run(DenseValues { values: &values[..], ahead: &[], p, width, count, out });
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
        const COUNT: usize = 3;
        const WIDTH: usize = 2;
        let scores: Vec<f32> = noise(COUNT * TILE, 5).iter().map(|x| x * 30.0).collect();
        let value = noise(TILE, 6);
        let (mut max, mut sum, mut out) = ([f32::NEG_INFINITY; COUNT], [0.0; COUNT], [0.0; COUNT * WIDTH]);
        let mut more = [0.0; COUNT];
        for tile in [0..5, 5..90, 90..TILE] {
            let mut p = vec![f32::NAN; COUNT * TILE];
            for q in 0..COUNT {
                p[q * TILE..][..tile.len()].copy_from_slice(&scores[q * TILE..][tile.clone()]);
            }
            online_softmax(&mut p, tile.len(), &mut max, &mut sum, [&mut out, &mut more]);
            for q in 0..COUNT {
                let read: f32 = p[q * TILE..].iter().zip(&value[tile.clone()]).map(|(p, v)| p * v).sum();
                out[q * WIDTH] += read;
                out[q * WIDTH + 1] -= read;
                more[q] += read;
            }
        }
        for q in 0..COUNT {
            let scores = &scores[q * TILE..(q + 1) * TILE];
            let weight = |s: &f32| f64::from(*s - max[q]).exp();
            let total: f64 = scores.iter().map(weight).sum();
            let mean = scores.iter().zip(&value).map(|(s, v)| weight(s) * f64::from(*v)).sum::<f64>() / total;
            assert!((f64::from(sum[q]) / total - 1.0).abs() < 1e-6);
            assert!((f64::from(out[q * WIDTH] / sum[q]) - mean).abs() < 1e-6);
            assert!((f64::from(out[q * WIDTH + 1] / sum[q]) + mean).abs() < 1e-6);
            assert!((f64::from(more[q] / sum[q]) - mean).abs() < 1e-6);
        }
    }

    #[test]
    fn exponentials_of_negative_numbers_agree_with_the_standard_library() {
        for i in 0..=8_700 {
            let x = i as f32 / -100.0;
            let off = (f64::from(exp_of_negative(x)) / f64::from(x).exp() - 1.0).abs();
            assert!(off < 3e-7, "{x}: {off:e}");
        }
        assert_eq!([-88.1, -1e9, f32::NEG_INFINITY].map(exp_of_negative), [0.0; 3]);
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert!(exp_of_negative(f32::NAN).is_nan());
    }
}
