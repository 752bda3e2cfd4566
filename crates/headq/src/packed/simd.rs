//! Sixteen numbers at a time, on the instruction set that the running machine has: AVX-512, AVX2 or none in particular.
//!
//! All three do the same operations in the same order, so that results are the same bits. The intrinsics are [`pulp`]'s, safe behind
//! tokens that exist only where the machine has them; but for one that it does not have.

use half::f16;

use super::rows::{LANES, planes, unpack_row};

/// Sixteen numbers in memory.
pub(super) type Lane = [f32; LANES];

/// A loop that runs on any machine.
pub(super) trait Kernel {
    type Output;
    fn run<M: Machine>(self, machine: M) -> Self::Output;
}

/// Runs a loop compiled for the best instruction set that the machine has.
pub(super) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::x86::V4;
        if let Some(machine) = V4::try_new() {
            return machine.vectorize(On { kernel, machine });
        }
        if let Some(machine) = x86::Avx2::try_new() {
            return machine.vectorize(On { kernel, machine });
        }
    }
    kernel.run(Portable)
}

#[cfg(target_arch = "x86_64")]
struct On<K, M> {
    kernel: K,
    machine: M,
}

#[cfg(target_arch = "x86_64")]
impl<K: Kernel, M: Machine> pulp::NullaryFnOnce for On<K, M> {
    type Output = K::Output;

    #[inline(always)]
    fn call(self) -> K::Output {
        self.kernel.run(self.machine)
    }
}

/// The machines that this one can stand for, and a loop on one of them: for tests, which would else see the best one only.
#[cfg(test)]
#[derive(Debug, Clone, Copy)]
pub(super) enum Which {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(pulp::x86::V4),
}

#[cfg(test)]
impl Which {
    pub fn all() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut all = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(x86::Avx2::try_new().map(Self::Avx2));
            all.extend(pulp::x86::V4::try_new().map(Self::Avx512));
        }
        all
    }

    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable => kernel.run(Portable),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(machine) => machine.vectorize(On { kernel, machine }),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(machine) => machine.vectorize(On { kernel, machine }),
        }
    }
}

/// What loops are written in.
pub(super) trait Machine: Copy {
    /// Sixteen numbers in registers.
    type Lanes: Copy;
    /// 32 bits of sixteen lanes.
    type Bits: Copy;
    /// Whether there are registers for twenty of them.
    const MANY: bool;
    /// Whether halves are widened in registers.
    const HALVES: bool;
    fn splat(self, x: f32) -> Self::Lanes;
    fn load(self, x: &Lane) -> Self::Lanes;
    fn store(self, x: Self::Lanes, to: &mut Lane);
    /// a·b + c, rounded once.
    fn mul_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// The sum of all lanes: upper half onto lower half until one is left.
    fn sum(self, x: Self::Lanes) -> f32;
    /// A plane of P bits of each lane ([`super::lanes`]), in the lowest bits; what is above them, where P is less than 8, is anything.
    fn plane<const P: u32>(self, plane: &[u8]) -> Self::Bits;
    /// None of them set.
    fn no_bits(self) -> Self::Bits;
    /// What a mask leaves of each lane, as a signed number.
    fn masked(self, bits: Self::Bits, mask: u32) -> Self::Lanes;
    /// What a table that repeats itself every two, four or eight numbers has for each lane's bits from `shift` on.
    fn look_up(self, bits: Self::Bits, shift: u32, table: &Lane) -> Self::Lanes;
    /// Bits from `shift` on, those of a mask, `low` places further up; with those of `others`.
    fn joined(self, bits: Self::Bits, shift: u32, mask: u32, low: u32, others: Self::Bits) -> Self::Bits;
    /// The codes of a row as numbers.
    fn codes<const B: u32>(self, row: &[u8]) -> Self::Lanes;
    /// The table's number for each code of a row.
    fn levels<const B: u32>(self, row: &[u8], table: &[f32; 256]) -> Self::Lanes;
    /// Halves as numbers.
    fn widen(self, halves: &[f16; LANES]) -> Self::Lanes;
    /// The token of AVX2, if this is it: for loops that are written for it.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn avx2(self) -> Option<Avx2> {
        None
    }
}

/// Elements of dense pages.
pub(super) trait Element: Copy {
    fn load<M: Machine>(machine: M, x: &[Self; LANES]) -> M::Lanes;
    fn wide(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn load<M: Machine>(machine: M, x: &[f32; LANES]) -> M::Lanes {
        machine.load(x)
    }

    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<M: Machine>(machine: M, x: &[f16; LANES]) -> M::Lanes {
        machine.widen(x)
    }

    #[inline(always)]
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

/// Any machine: plain loops over sixteen numbers.
#[derive(Clone, Copy)]
pub(super) struct Portable;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> Lane {
    let mut out = [0.0; LANES];
    for (i, out) in out.iter_mut().enumerate() {
        *out = f(i);
    }
    out
}

impl Machine for Portable {
    type Lanes = Lane;
    type Bits = [u32; LANES];
    const MANY: bool = false;
    const HALVES: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Lane {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &Lane) -> Lane {
        *x
    }

    #[inline(always)]
    fn store(self, x: Lane, to: &mut Lane) {
        *to = x;
    }

    #[inline(always)]
    fn mul_add(self, a: Lane, b: Lane, c: Lane) -> Lane {
        each(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn add(self, a: Lane, b: Lane) -> Lane {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn mul(self, a: Lane, b: Lane) -> Lane {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn sum(self, mut x: Lane) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] += x[i + half];
            }
        }
        x[0]
    }

    #[inline(always)]
    fn plane<const P: u32>(self, plane: &[u8]) -> [u32; LANES] {
        let plane = &plane[..LANES * P as usize / 8];
        let mut bits = [0; LANES];
        for (i, bits) in bits.iter_mut().enumerate() {
            *bits = match P {
                32 => u32::from_le_bytes(plane[4 * i..4 * i + 4].try_into().expect("4 bytes")),
                16 => u32::from(plane[2 * i]) | u32::from(plane[2 * i + 1]) << 8,
                8 => u32::from(plane[i]),
                _ => u32::from(plane[i * P as usize / 8]) >> (i as u32 * P % 8),
            };
        }
        bits
    }

    #[inline(always)]
    fn no_bits(self) -> [u32; LANES] {
        [0; LANES]
    }

    #[inline(always)]
    fn masked(self, bits: [u32; LANES], mask: u32) -> Lane {
        each(|i| (bits[i] & mask) as i32 as f32)
    }

    #[inline(always)]
    fn look_up(self, bits: [u32; LANES], shift: u32, table: &Lane) -> Lane {
        each(|i| table[(bits[i] >> shift & 7) as usize])
    }

    #[inline(always)]
    fn joined(self, bits: [u32; LANES], shift: u32, mask: u32, low: u32, others: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| (bits[i] >> shift & mask) << low | others[i])
    }

    #[inline(always)]
    fn codes<const B: u32>(self, row: &[u8]) -> Lane {
        let codes = unpack_row::<B>(row);
        each(|i| codes[i] as f32)
    }

    #[inline(always)]
    fn levels<const B: u32>(self, row: &[u8], table: &[f32; 256]) -> Lane {
        let codes = unpack_row::<B>(row);
        each(|i| table[(codes[i] & 255) as usize])
    }

    #[inline(always)]
    fn widen(self, halves: &[f16; LANES]) -> Lane {
        each(|i| halves[i].to_f32())
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::Avx2;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m128i, __m256, __m256i, __m512, __m512i};

    use pulp::cast;
    use pulp::x86::V4;

    use super::*;

    pulp::simd_type!({
        /// AVX2 and what comes with it, which for halves is more than [`pulp::x86::V3`] stands for: F16C.
        pub(in crate::packed) struct Avx2 {
            pub sse: f!("sse"),
            pub sse2: f!("sse2"),
            pub fxsr: f!("fxsr"),
            pub sse3: f!("sse3"),
            pub ssse3: f!("ssse3"),
            pub sse4_1: f!("sse4.1"),
            pub sse4_2: f!("sse4.2"),
            pub popcnt: f!("popcnt"),
            pub avx: f!("avx"),
            pub avx2: f!("avx2"),
            pub bmi1: f!("bmi1"),
            pub bmi2: f!("bmi2"),
            pub fma: f!("fma"),
            pub lzcnt: f!("lzcnt"),
            pub f16c: f!("f16c"),
        }
    });

    const SHIFTS_1: [i32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    const SHIFTS_2: [i32; LANES] = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];
    const SHIFTS_4: [i32; LANES] = [0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28];

    #[inline(always)]
    fn word16(row: &[u8], at: usize) -> i32 {
        i32::from(u16::from_le_bytes(row[at..at + 2].try_into().expect("2 bytes")))
    }

    #[inline(always)]
    fn word32(row: &[u8], at: usize) -> i32 {
        i32::from_le_bytes(row[at..at + 4].try_into().expect("4 bytes"))
    }

    #[inline(always)]
    fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes[..N].try_into().expect("enough bytes")
    }

    /// j's lowest bits times a factor, for j from 0 to 15: what a permutation by indices looks up, which counts their lowest bits only.
    const fn low_bits(bits: u32, factor: f32) -> Lane {
        let (mut table, mut j) = ([0.0; LANES], 0);
        while j < LANES {
            table[j] = (j & ((1 << bits) - 1)) as f32 * factor;
            j += 1;
        }
        table
    }

    const LOW_1: Lane = low_bits(1, 1.0);
    const LOW_2: Lane = low_bits(2, 1.0);
    const LOW_2_TIMES_2: Lane = low_bits(2, 2.0);
    const LOW_4: Lane = low_bits(4, 1.0);
    const LOW_4_TIMES_2: Lane = low_bits(4, 2.0);
    const LOW_4_TIMES_4: Lane = low_bits(4, 4.0);
    const LOW_4_TIMES_8: Lane = low_bits(4, 8.0);

    /// The planes of 4, 2 and 1 bits of a row, each lane's code in its lowest bits; what is above them is other lanes'.
    #[inline(always)]
    fn plane_512<const P: u32>(m: V4, row: &[u8], at: usize) -> __m512i {
        let f = m.avx512f;
        let (words, shifts) = match P {
            4 => {
                let (low, high) = (f._mm512_set1_epi32(word32(row, at)), f._mm512_set1_epi32(word32(row, at + 4)));
                (f._mm512_mask_blend_epi32(0xff00, low, high), SHIFTS_4)
            }
            2 => (f._mm512_set1_epi32(word32(row, at)), SHIFTS_2),
            _ => (f._mm512_set1_epi32(word16(row, at)), SHIFTS_1),
        };
        f._mm512_srlv_epi32(words, cast(shifts))
    }

    /// What a table says of the plane of P bits of a row of `bits`-bit codes.
    #[inline(always)]
    fn table_512<const P: u32>(m: V4, row: &[u8], bits: u32, table: Lane) -> __m512 {
        let at = planes(bits);
        let at = match P {
            4 => at[1],
            2 => at[2],
            _ => at[3],
        };
        m.avx512f._mm512_permutexvar_ps(plane_512::<P>(m, row, at), cast(table))
    }

    /// The codes of a row, of at most 4 bits, in the lowest bits of each lane.
    #[inline(always)]
    fn codes_512<const B: u32>(m: V4, row: &[u8]) -> __m512i {
        let f = m.avx512f;
        let at = planes(B);
        match B {
            4 => plane_512::<4>(m, row, at[1]),
            2 => plane_512::<2>(m, row, at[2]),
            1 => plane_512::<1>(m, row, at[3]),
            _ => {
                let high = f._mm512_and_si512(plane_512::<2>(m, row, at[2]), f._mm512_set1_epi32(3));
                let low = f._mm512_and_si512(plane_512::<1>(m, row, at[3]), f._mm512_set1_epi32(1));
                f._mm512_or_si512(f._mm512_slli_epi32::<1>(high), low)
            }
        }
    }

    impl Machine for V4 {
        type Lanes = __m512;
        type Bits = __m512i;
        const MANY: bool = true;
        const HALVES: bool = true;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            self.avx512f._mm512_set1_ps(x)
        }

        #[inline(always)]
        fn load(self, x: &Lane) -> __m512 {
            cast(*x)
        }

        #[inline(always)]
        fn store(self, x: __m512, to: &mut Lane) {
            *to = cast(x);
        }

        #[inline(always)]
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            self.avx512f._mm512_fmadd_ps(a, b, c)
        }

        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            self.avx512f._mm512_add_ps(a, b)
        }

        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            self.avx512f._mm512_mul_ps(a, b)
        }

        #[inline(always)]
        fn sum(self, x: __m512) -> f32 {
            let f = self.avx512f;
            let low = f._mm512_castps512_ps256(x);
            let high: __m256 = cast(f._mm512_extractf64x4_pd::<1>(cast(x)));
            sum_256(self.avx._mm256_add_ps(low, high), self.avx, self.sse, self.sse3)
        }

        #[inline(always)]
        fn plane<const P: u32>(self, plane: &[u8]) -> __m512i {
            match P {
                32 => cast(first::<64>(plane)),
                16 => self.avx512f._mm512_cvtepu16_epi32(cast(first::<32>(plane))),
                8 => self.avx512f._mm512_cvtepu8_epi32(cast(first::<16>(plane))),
                _ => plane_512::<P>(self, plane, 0),
            }
        }

        #[inline(always)]
        fn no_bits(self) -> __m512i {
            self.avx512f._mm512_setzero_si512()
        }

        #[inline(always)]
        fn masked(self, bits: __m512i, mask: u32) -> __m512 {
            let f = self.avx512f;
            f._mm512_cvtepi32_ps(f._mm512_and_si512(bits, f._mm512_set1_epi32(mask as i32)))
        }

        #[inline(always)]
        fn look_up(self, bits: __m512i, shift: u32, table: &Lane) -> __m512 {
            let f = self.avx512f;
            f._mm512_permutexvar_ps(f._mm512_srlv_epi32(bits, f._mm512_set1_epi32(shift as i32)), cast(*table))
        }

        #[inline(always)]
        fn joined(self, bits: __m512i, shift: u32, mask: u32, low: u32, others: __m512i) -> __m512i {
            let f = self.avx512f;
            let own = f._mm512_srlv_epi32(bits, f._mm512_set1_epi32(shift as i32));
            let own = f._mm512_and_si512(own, f._mm512_set1_epi32(mask as i32));
            f._mm512_or_si512(f._mm512_sllv_epi32(own, f._mm512_set1_epi32(low as i32)), others)
        }

        #[inline(always)]
        fn codes<const B: u32>(self, row: &[u8]) -> __m512 {
            let f = self.avx512f;
            match B {
                8 => f._mm512_cvtepi32_ps(f._mm512_cvtepu8_epi32(cast(first::<16>(row)))),
                7 => {
                    let low =
                        self.add(table_512::<2>(self, row, B, LOW_2_TIMES_2), table_512::<1>(self, row, B, LOW_1));
                    self.add(table_512::<4>(self, row, B, LOW_4_TIMES_8), low)
                }
                6 => self.add(table_512::<4>(self, row, B, LOW_4_TIMES_4), table_512::<2>(self, row, B, LOW_2)),
                5 => self.add(table_512::<4>(self, row, B, LOW_4_TIMES_2), table_512::<1>(self, row, B, LOW_1)),
                4 => table_512::<4>(self, row, B, LOW_4),
                3 => self.add(table_512::<2>(self, row, B, LOW_2_TIMES_2), table_512::<1>(self, row, B, LOW_1)),
                2 => table_512::<2>(self, row, B, LOW_2),
                _ => table_512::<1>(self, row, B, LOW_1),
            }
        }

        #[inline(always)]
        fn levels<const B: u32>(self, row: &[u8], table: &[f32; 256]) -> __m512 {
            if B <= 4 {
                let mut own = [0.0; LANES];
                for (j, own) in own.iter_mut().enumerate() {
                    *own = table[j & ((1 << B) - 1)];
                }
                return self.avx512f._mm512_permutexvar_ps(codes_512::<B>(self, row), cast(own));
            }
            cast(Portable.levels::<B>(row, table))
        }

        #[inline(always)]
        fn widen(self, halves: &[f16; LANES]) -> __m512 {
            let halves: __m256i = cast(halves.map(f16::to_bits));
            self.avx512f._mm512_cvtph_ps(halves)
        }
    }

    #[inline(always)]
    fn sum_256(
        x: __m256,
        avx: pulp::core_arch::x86::Avx,
        sse: pulp::core_arch::x86::Sse,
        sse3: pulp::core_arch::x86::Sse3,
    ) -> f32 {
        let four = sse._mm_add_ps(avx._mm256_castps256_ps128(x), avx._mm256_extractf128_ps::<1>(x));
        let two = sse._mm_add_ps(four, sse._mm_movehl_ps(four, four));
        let one = sse._mm_add_ss(two, sse3._mm_movehdup_ps(two));
        sse._mm_cvtss_f32(one)
    }

    /// A word's bits from each lane's shift on.
    #[inline(always)]
    fn moved_256(m: Avx2, word: i32, shifts: [i32; 8]) -> __m256i {
        m.avx2._mm256_srlv_epi32(m.avx._mm256_set1_epi32(word), cast(shifts))
    }

    /// Eight codes of a plane: the word's bits from each lane's shift on.
    #[inline(always)]
    fn plane_256(m: Avx2, word: i32, shifts: [i32; 8], mask: i32) -> __m256i {
        m.avx2._mm256_and_si256(moved_256(m, word, shifts), m.avx._mm256_set1_epi32(mask))
    }

    /// Both halves of a plane.
    #[inline(always)]
    fn planes_256(m: Avx2, words: [i32; 2], shifts: [i32; LANES], mask: i32) -> [__m256i; 2] {
        let [low, high]: [[i32; 8]; 2] = cast(shifts);
        [plane_256(m, words[0], low, mask), plane_256(m, words[1], high, mask)]
    }

    #[inline(always)]
    fn shift_in<const BITS: i32>(m: Avx2, codes: [__m256i; 2], own: [__m256i; 2]) -> [__m256i; 2] {
        let f = m.avx2;
        [
            f._mm256_or_si256(f._mm256_slli_epi32::<BITS>(codes[0]), own[0]),
            f._mm256_or_si256(f._mm256_slli_epi32::<BITS>(codes[1]), own[1]),
        ]
    }

    /// Bytes as numbers.
    #[inline(always)]
    fn widened(m: Avx2, bytes: [u8; LANES]) -> [__m256i; 2] {
        let [low, high]: [[u8; 8]; 2] = cast(bytes);
        let (low, high): (__m128i, __m128i) = (cast([low, [0; 8]]), cast([high, [0; 8]]));
        [m.avx2._mm256_cvtepu8_epi32(low), m.avx2._mm256_cvtepu8_epi32(high)]
    }

    /// The codes of a row in two registers.
    #[inline(always)]
    fn codes_256<const B: u32>(m: Avx2, row: &[u8]) -> [__m256i; 2] {
        if B == 8 {
            return widened(m, first(row));
        }
        let at = planes(B);
        let mut codes = [m.avx._mm256_setzero_si256(); 2];
        if B & 4 != 0 {
            codes = planes_256(m, [word32(row, at[1]), word32(row, at[1] + 4)], SHIFTS_4, 15);
        }
        if B & 2 != 0 {
            let own = planes_256(m, [word32(row, at[2]); 2], SHIFTS_2, 3);
            codes = if B & 4 == 0 { own } else { shift_in::<2>(m, codes, own) };
        }
        if B & 1 != 0 {
            let own = planes_256(m, [word16(row, at[3]); 2], SHIFTS_1, 1);
            codes = if B == 1 { own } else { shift_in::<1>(m, codes, own) };
        }
        codes
    }

    /// Eight halves.
    #[inline(always)]
    #[allow(unsafe_code)]
    fn widened_half(_: Avx2, halves: __m128i) -> __m256 {
        // SAFETY: the token exists only where the machine has F16C, and the instruction touches no memory.
        unsafe { std::arch::x86_64::_mm256_cvtph_ps(halves) }
    }

    impl Machine for Avx2 {
        type Lanes = [__m256; 2];
        type Bits = [__m256i; 2];
        const MANY: bool = false;
        const HALVES: bool = true;

        #[inline(always)]
        fn avx2(self) -> Option<Avx2> {
            Some(self)
        }

        #[inline(always)]
        fn splat(self, x: f32) -> Self::Lanes {
            [self.avx._mm256_set1_ps(x); 2]
        }

        #[inline(always)]
        fn load(self, x: &Lane) -> Self::Lanes {
            cast(*x)
        }

        #[inline(always)]
        fn store(self, x: Self::Lanes, to: &mut Lane) {
            *to = cast(x);
        }

        #[inline(always)]
        fn mul_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
            let f = self.fma;
            [f._mm256_fmadd_ps(a[0], b[0], c[0]), f._mm256_fmadd_ps(a[1], b[1], c[1])]
        }

        #[inline(always)]
        fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
            [self.avx._mm256_add_ps(a[0], b[0]), self.avx._mm256_add_ps(a[1], b[1])]
        }

        #[inline(always)]
        fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
            [self.avx._mm256_mul_ps(a[0], b[0]), self.avx._mm256_mul_ps(a[1], b[1])]
        }

        #[inline(always)]
        fn sum(self, x: Self::Lanes) -> f32 {
            sum_256(self.avx._mm256_add_ps(x[0], x[1]), self.avx, self.sse, self.sse3)
        }

        #[inline(always)]
        fn plane<const P: u32>(self, plane: &[u8]) -> Self::Bits {
            let f = self.avx2;
            match P {
                32 => cast(first::<64>(plane)),
                16 => {
                    let [low, high]: [__m128i; 2] = cast(first::<32>(plane));
                    [f._mm256_cvtepu16_epi32(low), f._mm256_cvtepu16_epi32(high)]
                }
                8 => widened(self, first(plane)),
                4 => {
                    let [low, high]: [[i32; 8]; 2] = cast(SHIFTS_4);
                    [moved_256(self, word32(plane, 0), low), moved_256(self, word32(plane, 4), high)]
                }
                2 => {
                    let [low, high]: [[i32; 8]; 2] = cast(SHIFTS_2);
                    [moved_256(self, word32(plane, 0), low), moved_256(self, word32(plane, 0), high)]
                }
                _ => {
                    let [low, high]: [[i32; 8]; 2] = cast(SHIFTS_1);
                    [moved_256(self, word16(plane, 0), low), moved_256(self, word16(plane, 0), high)]
                }
            }
        }

        #[inline(always)]
        fn no_bits(self) -> Self::Bits {
            [self.avx._mm256_setzero_si256(); 2]
        }

        #[inline(always)]
        fn masked(self, bits: Self::Bits, mask: u32) -> Self::Lanes {
            let mask = self.avx._mm256_set1_epi32(mask as i32);
            let [low, high] = [self.avx2._mm256_and_si256(bits[0], mask), self.avx2._mm256_and_si256(bits[1], mask)];
            [self.avx._mm256_cvtepi32_ps(low), self.avx._mm256_cvtepi32_ps(high)]
        }

        #[inline(always)]
        fn look_up(self, bits: Self::Bits, shift: u32, table: &Lane) -> Self::Lanes {
            let (f, shift) = (self.avx2, self.avx._mm256_set1_epi32(shift as i32));
            let [table, _]: [__m256; 2] = cast(*table);
            bits.map(
                #[inline(always)]
                |bits| f._mm256_permutevar8x32_ps(table, f._mm256_srlv_epi32(bits, shift)),
            )
        }

        #[inline(always)]
        fn joined(self, bits: Self::Bits, shift: u32, mask: u32, low: u32, others: Self::Bits) -> Self::Bits {
            let f = self.avx2;
            let splat = |x: u32| self.avx._mm256_set1_epi32(x as i32);
            let (shift, mask, low) = (splat(shift), splat(mask), splat(low));
            std::array::from_fn(
                #[inline(always)]
                |i| {
                    let own = f._mm256_and_si256(f._mm256_srlv_epi32(bits[i], shift), mask);
                    f._mm256_or_si256(f._mm256_sllv_epi32(own, low), others[i])
                },
            )
        }

        #[inline(always)]
        fn codes<const B: u32>(self, row: &[u8]) -> Self::Lanes {
            let [low, high] = codes_256::<B>(self, row);
            [self.avx._mm256_cvtepi32_ps(low), self.avx._mm256_cvtepi32_ps(high)]
        }

        #[inline(always)]
        fn levels<const B: u32>(self, row: &[u8], table: &[f32; 256]) -> Self::Lanes {
            if B <= 3 {
                let [low, high] = codes_256::<B>(self, row);
                let table: [f32; 8] = table[..8].try_into().expect("a table of 256");
                let (table, f): (__m256, _) = (cast(table), self.avx2);
                return [f._mm256_permutevar8x32_ps(table, low), f._mm256_permutevar8x32_ps(table, high)];
            }
            cast(Portable.levels::<B>(row, table))
        }

        #[inline(always)]
        fn widen(self, halves: &[f16; LANES]) -> Self::Lanes {
            let [low, high]: [__m128i; 2] = cast(halves.map(f16::to_bits));
            [widened_half(self, low), widened_half(self, high)]
        }
    }
}
