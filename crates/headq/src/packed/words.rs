//! Values' codes by AVX2: eight 32-bit words at a time as they lie in memory, rather than sixteen lanes widened to 32 bits.
//!
//! A word holds the bits of several neighbouring lanes ([`super::lanes`]): four of a plane of 8 bits, two of 16. A mask takes one field of
//! one of these lanes out of all words, as it would out of a widened lane, so that sums are the same bits: only the power of two differs
//! that a code comes out multiplied by. Words of a plane of 8 bits are four to a token; they fill both halves of a register, and the halves
//! are masked for different lanes.

#![allow(clippy::needless_range_loop, reason = "registers of several arrays are indexed alike")]

use std::arch::x86_64::{__m256, __m256i};

use pulp::cast;

use super::kernels::{Aligned, CodedValues, TILE};
use super::lanes::{Column, Plane, WORDS};
use super::rows::LANES;
use super::simd::{Avx2, Lane};

/// Fields that are summed before any is added to the output, and columns of them.
const FIELDS: usize = 4;
const COLUMNS: usize = 2 * FIELDS;

/// The words of a token's plane.
#[inline(always)]
fn words<const P: u32>(m: Avx2, plane: &[u8]) -> __m256i {
    if P == 8 {
        let bytes: [u8; 16] = plane[..16].try_into().expect("16 bytes");
        return m.avx2._mm256_broadcastsi128_si256(cast(bytes));
    }
    let bytes: [u8; 32] = plane[..32].try_into().expect("32 bytes");
    cast(bytes)
}

/// Σ_t p_qt · scale_t · field_t of N columns, of which the last may be `SHIFTED`.
#[inline(always)]
fn pass<const P: u32, const NQ: usize, const N: usize, const SHIFTED: bool>(
    m: Avx2,
    values: &CodedValues<'_>,
    start: usize,
    columns: &[Column],
    weights: [&[f32; TILE]; NQ],
    sums: &mut [[[f32; WORDS]; COLUMNS]; NQ],
    at: usize,
) {
    let columns: &[Column; N] = columns[at..at + N].try_into().expect("as many columns as sums");
    let mut masks = [m.avx._mm256_setzero_si256(); N];
    for i in 0..N {
        masks[i] = cast(columns[i].masks);
    }
    let shift = m.avx._mm256_set1_epi32(columns[N - 1].shift as i32);
    let mut own = [[m.avx._mm256_setzero_ps(); N]; NQ];
    for (t, token) in values.codes.chunks_exact(values.layout.bytes).take(TILE).enumerate() {
        let bits = words::<P>(m, &token[start..]);
        let mut w = [m.avx._mm256_setzero_ps(); NQ];
        for q in 0..NQ {
            w[q] = m.avx._mm256_set1_ps(weights[q][t]);
        }
        for i in 0..N {
            let bits = if SHIFTED && i == N - 1 { m.avx2._mm256_srlv_epi32(bits, shift) } else { bits };
            let x = m.avx._mm256_cvtepi32_ps(m.avx2._mm256_and_si256(bits, masks[i]));
            for q in 0..NQ {
                own[q][i] = m.fma._mm256_fmadd_ps(w[q], x, own[q][i]);
            }
        }
    }
    for q in 0..NQ {
        for i in 0..N {
            sums[q][at + i] = cast(m.avx._mm256_mul_ps(own[q][i], cast(columns[i].places)));
        }
    }
}

/// Adds Σ_t p_qt · scale_t · code_t of the fields of a plane of 8 or 16 bits to `out` `[NQ, width]`.
#[inline(always)]
pub(super) fn add_plane<const P: u32, const NQ: usize>(
    m: Avx2,
    values: &CodedValues<'_>,
    plane: &Plane,
    out: &mut [f32],
) {
    let (start, width) = (plane.start, values.layout.codes() * LANES);
    let mut first = plane.fields.start;
    while first < plane.fields.end {
        let chunk = values.layout.code(first) / values.per_chunk;
        let alike = |f: &usize| values.layout.code(*f) / values.per_chunk == chunk;
        let fields = (first..plane.fields.end).take(FIELDS).take_while(alike).count();
        let columns = &plane.columns[2 * (first - plane.fields.start)..][..2 * fields];
        let mut weights = [&[0.0; TILE]; NQ];
        for q in 0..NQ {
            weights[q] = values.scaled[(chunk * NQ + q) * TILE..][..TILE].try_into().expect("a tile");
        }
        // Besides, with it whatever else the loops keep on the stack does not straddle lines of the cache either.
        let mut sums = Aligned([[[0.0; WORDS]; COLUMNS]; NQ]);
        let mut at = 0;
        while at < columns.len() {
            // Nine sums are enough for multiply-adds not to wait for each other, and leave registers for the rest.
            let n = match columns.len() - at {
                4.. if const { NQ <= 2 } => 4,
                3 | 5.. if const { NQ == 3 } => 3,
                2.. => 2,
                _ => 1,
            };
            macro_rules! run {
                ($N:literal) => {
                    match columns[at + $N - 1].shift {
                        0 => pass::<P, NQ, $N, false>(m, values, start, columns, weights, &mut sums.0, at),
                        _ => pass::<P, NQ, $N, true>(m, values, start, columns, weights, &mut sums.0, at),
                    }
                };
            }
            match n {
                4 if const { NQ <= 2 } => run!(4),
                3 if const { NQ == 3 } => run!(3),
                2 => run!(2),
                _ => run!(1),
            }
            at += n;
        }
        for i in 0..fields {
            let start = values.layout.code(first + i) * LANES;
            for q in 0..NQ {
                let pair = [cast(sums.0[q][2 * i]), cast(sums.0[q][2 * i + 1])];
                let to: &mut Lane = (&mut out[q * width + start..][..LANES]).try_into().expect("16 channels");
                add_in_order::<P>(m, pair, to);
            }
        }
        first += fields;
    }
}

/// Adds what two registers hold of the lanes of all words, lane by lane.
#[inline(always)]
fn add_in_order<const P: u32>(m: Avx2, [even, odd]: [__m256; 2], to: &mut Lane) {
    let f = m.avx;
    let [low, high] = [f._mm256_unpacklo_ps(even, odd), f._mm256_unpackhi_ps(even, odd)];
    let ordered = if P == 8 {
        // Lanes 0 and 1 of two words each, and 2 and 3 of the same.
        const ORDER: i32 = 0b11_01_10_00;
        let [low, high] =
            [m.avx2._mm256_permute4x64_pd::<ORDER>(cast(low)), m.avx2._mm256_permute4x64_pd::<ORDER>(cast(high))];
        [cast(low), cast(high)]
    } else {
        [f._mm256_permute2f128_ps::<0x20>(low, high), f._mm256_permute2f128_ps::<0x31>(low, high)]
    };
    let before: [__m256; 2] = cast(*to);
    *to = cast([f._mm256_add_ps(before[0], ordered[0]), f._mm256_add_ps(before[1], ordered[1])]);
}
