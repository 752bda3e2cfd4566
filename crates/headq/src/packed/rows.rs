//! Codes in bits: rows of up to 16 codes of 1 to 8 bits.
//!
//! A row of b-bit codes is stored as planes of 8, 4, 2 and 1 bits that add up to b, the highest bits first: a 3-bit row is 16 times the
//! upper 2 bits in 32 bits, then 16 times the lowest in 16 bits, code i at the i-th place from the least significant, little-endian. A
//! vector loop reads a plane with one shift and one mask.
#![allow(clippy::needless_range_loop, reason = "lanes of several arrays are indexed alike")]

/// Codes in a whole row: lanes of a vector loop.
pub(super) const LANES: usize = 16;

/// Widths of planes, widest first.
const PLANES: [u32; 4] = [8, 4, 2, 1];

/// Bytes of a row of `lanes` codes of `bits` bits.
pub(super) const fn row_bytes(bits: u32, lanes: usize) -> usize {
    let (mut bytes, mut i) = (0, 0);
    while i < PLANES.len() {
        if bits & PLANES[i] != 0 {
            bytes += (lanes * PLANES[i] as usize).div_ceil(8);
        }
        i += 1;
    }
    bytes
}

/// Bytes of `codes` codes of `bits` bits, in rows.
pub(super) const fn rows_bytes(bits: u32, codes: usize) -> usize {
    codes / LANES * row_bytes(bits, LANES) + row_bytes(bits, codes % LANES)
}

/// Where the planes of 8, 4, 2 and 1 bits begin in a whole row of `bits`-bit codes, as far as it has them.
pub(super) const fn planes(bits: u32) -> [usize; 4] {
    let (mut at, mut start, mut i) = ([0; 4], 0, 0);
    while i < PLANES.len() {
        at[i] = start;
        if bits & PLANES[i] != 0 {
            start += LANES * PLANES[i] as usize / 8;
        }
        i += 1;
    }
    at
}

/// Writes one code of a row of `lanes` codes over whatever was there.
pub(super) fn put(row: &mut [u8], bits: u32, lanes: usize, lane: usize, code: u8) {
    let (mut start, mut low) = (0, bits);
    for plane in PLANES.into_iter().filter(|p| bits & p != 0) {
        low -= plane;
        let mask = ((1u32 << plane) - 1) as u8;
        let at = lane * plane as usize;
        let byte = &mut row[start + at / 8];
        *byte = (*byte & !(mask << (at % 8))) | (((code >> low) & mask) << (at % 8));
        start += (lanes * plane as usize).div_ceil(8);
    }
}

/// One code of a row of `lanes` codes.
pub(super) fn get(row: &[u8], bits: u32, lanes: usize, lane: usize) -> u8 {
    let (mut start, mut low, mut code) = (0, bits, 0);
    for plane in PLANES.into_iter().filter(|p| bits & p != 0) {
        low -= plane;
        let at = lane * plane as usize;
        code |= ((row[start + at / 8] >> (at % 8)) & ((1u32 << plane) - 1) as u8) << low;
        start += (lanes * plane as usize).div_ceil(8);
    }
    code
}

/// Packs any number of codes: whole rows, then a shorter one.
///
/// # Shapes
/// `codes`: any length, each below 2^bits; returns ⌈8·bytes/bits⌉-tight rows
pub fn pack(codes: &[u8], bits: u32) -> Vec<u8> {
    let mut packed = vec![0; rows_bytes(bits, codes.len())];
    for (row, codes) in packed.chunks_mut(row_bytes(bits, LANES)).zip(codes.chunks(LANES)) {
        for (lane, &code) in codes.iter().enumerate() {
            put(row, bits, codes.len(), lane, code);
        }
    }
    packed
}

/// The inverse of [`pack`]: `count` codes.
pub fn unpack(packed: &[u8], bits: u32, count: usize) -> Vec<u8> {
    let row = row_bytes(bits, LANES);
    (0..count)
        .map(|i| {
            let lanes = (count - i / LANES * LANES).min(LANES);
            get(&packed[i / LANES * row..], bits, lanes, i % LANES)
        })
        .collect()
}

/// The codes of a whole row, as numbers.
#[inline(always)]
pub(super) fn unpack_row<const B: u32>(row: &[u8]) -> [i32; LANES] {
    let mut codes = [0i32; LANES];
    let mut start = 0;
    if B & 8 != 0 {
        let bytes: [u8; 16] = row[..16].try_into().expect("16 bytes");
        for i in 0..LANES {
            codes[i] = i32::from(bytes[i]);
        }
        start += 16;
    }
    if B & 4 != 0 {
        let word = u64::from_le_bytes(row[start..start + 8].try_into().expect("8 bytes"));
        let halves = [word as u32, (word >> 32) as u32];
        for i in 0..LANES {
            let code = (halves[i / 8] >> (4 * (i % 8) as u32)) & 15;
            codes[i] |= (code << (B & 3)) as i32;
        }
        start += 8;
    }
    if B & 2 != 0 {
        let word = u32::from_le_bytes(row[start..start + 4].try_into().expect("4 bytes"));
        for i in 0..LANES {
            codes[i] |= (((word >> (2 * i as u32)) & 3) << (B & 1)) as i32;
        }
        start += 4;
    }
    if B & 1 != 0 {
        let word = u32::from(u16::from_le_bytes(row[start..start + 2].try_into().expect("2 bytes")));
        for i in 0..LANES {
            codes[i] |= ((word >> i as u32) & 1) as i32;
        }
    }
    codes
}

/// Runs `$body` with `$value`, one of the cases, as a constant.
macro_rules! with_const {
    ($value:expr, $name:ident: $type:ty = [$($case:literal)+] => $body:expr) => {
        match $value {
            $($case => {
                const $name: $type = $case;
                $body
            })+
            other => unreachable!("{other} is none of {:?}", [$($case),+]),
        }
    };
}
pub(super) use with_const;

/// Runs `$body` with `$B` the number of bits as a constant.
macro_rules! with_bits {
    ($bits:expr, $B:ident => $body:expr) => {
        $crate::packed::rows::with_const!($bits, $B: u32 = [1 2 3 4 5 6 7 8] => $body)
    };
}
pub(super) use with_bits;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::simd::{Kernel, Machine, Which};
    use super::*;

    proptest! {
        #[test]
        fn unpacking_is_the_inverse_of_packing(bits in 1u32..=8, codes in prop::collection::vec(any::<u8>(), 0..200)) {
            let codes: Vec<u8> = codes.into_iter().map(|c| c & ((1u32 << bits) - 1) as u8).collect();
            let packed = pack(&codes, bits);
            prop_assert_eq!(unpack(&packed, bits, codes.len()), codes.clone());
            // No more than a byte is lost to rounding, in each plane of the last row.
            let tight = codes.len() * bits as usize;
            prop_assert!(8 * packed.len() >= tight && 8 * packed.len() < tight + 8 * 3 + 1);
        }

        #[test]
        fn a_code_is_written_over_whatever_was_there(
            bits in 1u32..=8,
            lanes in 1usize..=LANES,
            noise in prop::collection::vec(any::<u8>(), 16),
            lane in 0usize..LANES,
            code in any::<u8>(),
        ) {
            let (lane, code) = (lane % lanes, code & ((1u32 << bits) - 1) as u8);
            let mut row = noise[..row_bytes(bits, lanes)].to_vec();
            let before: Vec<u8> = (0..lanes).map(|i| get(&row, bits, lanes, i)).collect();
            put(&mut row, bits, lanes, lane, code);
            for i in 0..lanes {
                prop_assert_eq!(get(&row, bits, lanes, i), if i == lane { code } else { before[i] });
            }
        }
    }

    /// The numbers of a row by way of codes and of a table.
    struct Read<'a> {
        row: &'a [u8],
        bits: u32,
        table: &'a [f32; 256],
    }

    impl Kernel for Read<'_> {
        type Output = [[f32; LANES]; 2];

        #[inline(always)]
        fn run<M: Machine>(self, m: M) -> Self::Output {
            let mut out = [[0.0; LANES]; 2];
            with_bits!(self.bits, B => {
                m.store(m.codes::<B>(self.row), &mut out[0]);
                m.store(m.levels::<B>(self.row, self.table), &mut out[1]);
            });
            out
        }
    }

    #[test]
    fn every_instruction_set_reads_the_same_rows() {
        let mut table = [0.0; 256];
        table.iter_mut().enumerate().for_each(|(i, x)| *x = (i as f32 - 77.0) * 0.37);
        for bits in 1..=8 {
            for seed in 0..50usize {
                let codes: Vec<u8> = (0..LANES)
                    .map(|i| ((i + 1) * (seed + 3) * 7919 % 251) as u8 & ((1u32 << bits) - 1) as u8)
                    .collect();
                let row = pack(&codes, bits);
                let read = || Read { row: &row, bits, table: &table };
                let expected: [Vec<f32>; 2] = [
                    codes.iter().map(|c| f32::from(*c)).collect(),
                    codes.iter().map(|c| table[usize::from(*c)]).collect(),
                ];
                for machine in Which::all() {
                    let found = machine.run(read());
                    assert_eq!(found[0].as_slice(), expected[0], "{bits} bits, {machine:?}");
                    assert_eq!(found[1].as_slice(), expected[1], "{bits} bits, {machine:?}");
                }
            }
        }
    }
}
