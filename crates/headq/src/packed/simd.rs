//! Sixteen numbers at a time, on the instruction set that the running machine has: AVX-512, AVX2 or none in particular.
//!
//! All three do the same operations in the same order, so that results are the same bits. The intrinsics are [`pulp`]'s, safe behind
//! tokens that exist only where the machine has them.

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
        use pulp::x86::{V3, V4};
        if let Some(machine) = V4::try_new() {
            return machine.vectorize(On { kernel, machine });
        }
        if let Some(machine) = V3::try_new() {
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

/// What loops are written in.
pub(super) trait Machine: Copy {
    /// Sixteen numbers in registers.
    type Lanes: Copy;
    fn splat(self, x: f32) -> Self::Lanes;
    fn load(self, x: &Lane) -> Self::Lanes;
    fn store(self, x: Self::Lanes, to: &mut Lane);
    /// a·b + c, rounded once.
    fn mul_add(self, a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// The sum of all lanes: upper half onto lower half until one is left.
    fn sum(self, x: Self::Lanes) -> f32;
    /// The codes of a row as numbers.
    fn codes<const B: u32>(self, row: &[u8]) -> Self::Lanes;
    /// The table's number for each code of a row.
    fn levels<const B: u32>(self, row: &[u8], table: &[f32; 256]) -> Self::Lanes;
    /// Halves as numbers.
    fn widen(self, halves: &[f16; LANES]) -> Self::Lanes;
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
    fn sum(self, mut x: Lane) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] += x[i + half];
            }
        }
        x[0]
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
mod x86 {
    use std::arch::x86_64::{__m128i, __m256, __m256i, __m512, __m512i};

    use pulp::cast;
    use pulp::x86::{V3, V4};

    use super::*;

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
    fn bytes(row: &[u8]) -> [u8; 16] {
        row[..16].try_into().expect("16 bytes")
    }

    /// The codes of a row in one register.
    #[inline(always)]
    fn codes_512<const B: u32>(m: V4, row: &[u8]) -> __m512i {
        let f = m.avx512f;
        if B == 8 {
            let bytes: __m128i = cast(bytes(row));
            return f._mm512_cvtepu8_epi32(bytes);
        }
        let at = planes(B);
        let plane = |words: __m512i, shifts: [i32; LANES], mask: i32| {
            f._mm512_and_si512(f._mm512_srlv_epi32(words, cast(shifts)), f._mm512_set1_epi32(mask))
        };
        let mut codes = f._mm512_setzero_si512();
        if B & 4 != 0 {
            let (low, high) = (word32(row, at[1]), word32(row, at[1] + 4));
            let words = f._mm512_mask_blend_epi32(0xff00, f._mm512_set1_epi32(low), f._mm512_set1_epi32(high));
            codes = plane(words, SHIFTS_4, 15);
        }
        if B & 2 != 0 {
            let own = plane(f._mm512_set1_epi32(word32(row, at[2])), SHIFTS_2, 3);
            codes = if B & 4 == 0 { own } else { f._mm512_or_si512(f._mm512_slli_epi32::<2>(codes), own) };
        }
        if B & 1 != 0 {
            let own = plane(f._mm512_set1_epi32(word16(row, at[3])), SHIFTS_1, 1);
            codes = if B == 1 { own } else { f._mm512_or_si512(f._mm512_slli_epi32::<1>(codes), own) };
        }
        codes
    }

    impl Machine for V4 {
        type Lanes = __m512;

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
        fn sum(self, x: __m512) -> f32 {
            let f = self.avx512f;
            let low = f._mm512_castps512_ps256(x);
            let high: __m256 = cast(f._mm512_extractf64x4_pd::<1>(cast(x)));
            sum_256(self.avx._mm256_add_ps(low, high), self.avx, self.sse, self.sse3)
        }

        #[inline(always)]
        fn codes<const B: u32>(self, row: &[u8]) -> __m512 {
            self.avx512f._mm512_cvtepi32_ps(codes_512::<B>(self, row))
        }

        #[inline(always)]
        fn levels<const B: u32>(self, row: &[u8], table: &[f32; 256]) -> __m512 {
            let codes = codes_512::<B>(self, row);
            if B <= 4 {
                let table: Lane = table[..LANES].try_into().expect("a table of 256");
                return self.avx512f._mm512_permutexvar_ps(codes, cast(table));
            }
            let codes: [u32; LANES] = cast(codes);
            cast(each(|i| table[(codes[i] & 255) as usize]))
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

    /// The codes of a row in two registers.
    #[inline(always)]
    fn codes_256<const B: u32>(m: V3, row: &[u8]) -> [__m256i; 2] {
        let (avx, f) = (m.avx, m.avx2);
        if B == 8 {
            let [low, high]: [[u8; 8]; 2] = cast(bytes(row));
            let wide = |x: [u8; 8]| {
                let x: __m128i = cast([x, [0; 8]]);
                f._mm256_cvtepu8_epi32(x)
            };
            return [wide(low), wide(high)];
        }
        let at = planes(B);
        let plane = |words: [i32; 2], shifts: [i32; LANES], mask: i32| {
            let [low, high]: [[i32; 8]; 2] = cast(shifts);
            let half = |word: i32, shifts: [i32; 8]| {
                let moved = f._mm256_srlv_epi32(avx._mm256_set1_epi32(word), cast(shifts));
                f._mm256_and_si256(moved, avx._mm256_set1_epi32(mask))
            };
            [half(words[0], low), half(words[1], high)]
        };
        let join = |codes: [__m256i; 2], own: [__m256i; 2], bits: i32| {
            let moved = |x: __m256i| if bits == 2 { f._mm256_slli_epi32::<2>(x) } else { f._mm256_slli_epi32::<1>(x) };
            [f._mm256_or_si256(moved(codes[0]), own[0]), f._mm256_or_si256(moved(codes[1]), own[1])]
        };
        let mut codes = [avx._mm256_setzero_si256(); 2];
        if B & 4 != 0 {
            codes = plane([word32(row, at[1]), word32(row, at[1] + 4)], SHIFTS_4, 15);
        }
        if B & 2 != 0 {
            let own = plane([word32(row, at[2]); 2], SHIFTS_2, 3);
            codes = if B & 4 == 0 { own } else { join(codes, own, 2) };
        }
        if B & 1 != 0 {
            let own = plane([word16(row, at[3]); 2], SHIFTS_1, 1);
            codes = if B == 1 { own } else { join(codes, own, 1) };
        }
        codes
    }

    impl Machine for V3 {
        type Lanes = [__m256; 2];

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
        fn sum(self, x: Self::Lanes) -> f32 {
            sum_256(self.avx._mm256_add_ps(x[0], x[1]), self.avx, self.sse, self.sse3)
        }

        #[inline(always)]
        fn codes<const B: u32>(self, row: &[u8]) -> Self::Lanes {
            codes_256::<B>(self, row).map(
                #[inline(always)]
                |x| self.avx._mm256_cvtepi32_ps(x),
            )
        }

        #[inline(always)]
        fn levels<const B: u32>(self, row: &[u8], table: &[f32; 256]) -> Self::Lanes {
            let codes = codes_256::<B>(self, row);
            if B <= 3 {
                let table: [f32; 8] = table[..8].try_into().expect("a table of 256");
                let table: __m256 = cast(table);
                return codes.map(
                    #[inline(always)]
                    |x| self.avx2._mm256_permutevar8x32_ps(table, x),
                );
            }
            let codes: [u32; LANES] = cast(codes);
            cast(each(|i| table[(codes[i] & 255) as usize]))
        }

        #[inline(always)]
        fn widen(self, halves: &[f16; LANES]) -> Self::Lanes {
            /// 2¹¹²: the difference of the exponents' biases.
            const RESCALE: f32 = f32::from_bits((112 + 127) << 23);
            cast(each(|i| {
                let bits = u32::from(halves[i].to_bits());
                let magnitude = (bits & 0x7fff) << 13;
                let finite = (f32::from_bits(magnitude) * RESCALE).to_bits();
                let value = if magnitude >= 0x7c00 << 13 { magnitude | 0x7f80_0000 } else { finite };
                f32::from_bits(value | (bits & 0x8000) << 16)
            }))
        }
    }
}
