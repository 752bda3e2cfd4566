//! Products of many vectors with a matrix, bit for bit those of one vector at a time.
//!
//! A weight is read once for many vectors, so that these products run at the speed of the machine's arithmetic and not of its memory.
//! Yet every element of a result is the same sequence of operations as in [`SumRows`], [`Gather`] and [`DotRows`]: what a token comes to
//! depends neither on how many others are with it nor on their number.
//!
//! [`SumRows`]: super::kernels::SumRows
//! [`Gather`]: super::kernels::Gather
//! [`DotRows`]: super::kernels::DotRows

use pulp::{Arch, Simd, WithSimd};

use super::kernels::{ROWS, WIDE, Weight, sum};

/// Rows of a matrix that are copied and used for all vectors, a multiple of [`ROWS`]: the copy stays in the first-level cache.
const DEEP: usize = 128;
/// Columns of the copy at most.
const BROAD: usize = 48;
/// Rows of a transposed matrix that are taken together.
const DOTS: usize = 4;

/// A copy of some rows and columns of a matrix.
#[repr(align(64))]
struct Aligned<const N: usize>([f32; N]);

/// Y = XW of some columns, parts of the rows summed one after the other and then added in order; then a bias, into Y or onto it.
pub(super) struct SumManyRows<'a, 'y, E> {
    /// For each vector its part of the result: some columns.
    pub y: &'a mut [&'y mut [f32]],
    /// `[vectors, rows]`
    pub x: &'a [f32],
    /// From the first of the columns in the first row on.
    pub weights: &'a [E],
    /// Elements from row to row.
    pub stride: usize,
    /// Rows of the matrix.
    pub rows: usize,
    /// Rows of each part, but perhaps fewer of the last.
    pub part_rows: usize,
    /// One for each column.
    pub bias: Option<&'a [f32]>,
    /// Add to what y holds.
    pub onto: bool,
}

impl<E: Weight> SumManyRows<'_, '_, E> {
    pub fn run(self) {
        Arch::new().dispatch(self)
    }

    /// With V registers of columns for T vectors at a time.
    #[inline(always)]
    fn tiles<S: Simd, const T: usize, const V: usize>(self, simd: S) {
        let Self { y, x, weights, stride, rows, part_rows, bias, onto } = self;
        let (columns, vectors, width) = (y.first().map_or(0, |y| y.len()), y.len(), V * S::F32_LANES);
        let mut copy = Aligned([0.0; DEEP * BROAD]);
        let mut sums = vec![0.0f32; 2 * vectors * width];
        let (part_sums, totals) = sums.split_at_mut(vectors * width);
        for first in (0..columns).step_by(width) {
            let own = width.min(columns - first);
            if own < width {
                copy.0.fill(0.0);
            }
            for part in (0..rows).step_by(part_rows) {
                part_sums.fill(0.0);
                let end = (part + part_rows).min(rows);
                for start in (part..end).step_by(DEEP) {
                    let depth = DEEP.min(end - start);
                    let copy = &mut copy.0[..depth * width];
                    for (i, to) in copy.chunks_exact_mut(width).enumerate() {
                        let row = &weights[(start + i) * stride + first..][..own];
                        to[..own].iter_mut().zip(row).for_each(|(to, w)| *to = w.wide());
                    }
                    let x = |vector: usize| &x[vector * rows + start..][..depth];
                    let mut tiles = part_sums.chunks_exact_mut(T * width);
                    for (tile, sums) in tiles.by_ref().enumerate() {
                        add_rows::<S, T, V>(simd, std::array::from_fn(|t| x(tile * T + t)), copy, sums);
                    }
                    let done = vectors / T * T;
                    for (i, sums) in tiles.into_remainder().chunks_exact_mut(width).enumerate() {
                        add_rows::<S, 1, V>(simd, [x(done + i)], copy, sums);
                    }
                }
                if part == 0 {
                    totals.copy_from_slice(part_sums);
                } else {
                    totals.iter_mut().zip(&*part_sums).for_each(|(total, sum)| *total += sum);
                }
            }
            for (y, sums) in y.iter_mut().zip(totals.chunks_exact_mut(width)) {
                let (y, sums) = (&mut y[first..first + own], &mut sums[..own]);
                if let Some(bias) = bias {
                    sums.iter_mut().zip(&bias[first..]).for_each(|(sum, bias)| *sum += bias);
                }
                match onto {
                    true => y.iter_mut().zip(sums).for_each(|(y, sum)| *y += *sum),
                    false => y.copy_from_slice(sums),
                }
            }
        }
    }
}

impl<E: Weight> WithSimd for SumManyRows<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Two sums for each element of a tile, weights and an element of x have to fit in registers.
        match S::F32_LANES {
            16 => self.tiles::<S, 4, 3>(simd),
            _ => self.tiles::<S, 3, 2>(simd),
        }
    }
}

/// Adds Σ_i x_i W[i, :] of T vectors to `sums` `[T, V registers]`, in blocks of [`ROWS`] rows and then row by row.
#[inline(always)]
fn add_rows<S: Simd, const T: usize, const V: usize>(simd: S, x: [&[f32]; T], weights: &[f32], sums: &mut [f32]) {
    let (rows, _) = S::as_simd_f32s(weights).0.as_chunks::<V>();
    let (blocks, rest) = rows.as_chunks::<ROWS>();
    let (sums, _) = S::as_mut_simd_f32s(sums).0.as_chunks_mut::<V>();
    let x = x.map(|x| x.as_chunks::<ROWS>());
    let mut even = [[simd.splat_f32s(0.0); V]; T];
    for t in 0..T {
        for v in 0..V {
            even[t][v] = sums[t][v];
        }
    }
    for (i, rows) in blocks.iter().enumerate() {
        let x: [&[f32; ROWS]; T] = std::array::from_fn(|t| &x[t].0[i]);
        let mut odd = [[simd.splat_f32s(0.0); V]; T];
        for t in 0..T {
            for v in 0..V {
                odd[t][v] = simd.mul_f32s(simd.splat_f32s(x[t][1]), rows[1][v]);
            }
        }
        let row = |i: usize, sums: &mut [[S::f32s; V]; T]| {
            for t in 0..T {
                let x = simd.splat_f32s(x[t][i]);
                for v in 0..V {
                    sums[t][v] = simd.mul_add_f32s(x, rows[i][v], sums[t][v]);
                }
            }
        };
        row(0, &mut even);
        row(2, &mut even);
        row(3, &mut odd);
        row(4, &mut even);
        row(5, &mut odd);
        row(6, &mut even);
        row(7, &mut odd);
        for t in 0..T {
            for v in 0..V {
                even[t][v] = simd.add_f32s(even[t][v], odd[t][v]);
            }
        }
    }
    for (i, row) in rest.iter().enumerate() {
        for t in 0..T {
            let x = simd.splat_f32s(x[t].1[i]);
            for v in 0..V {
                even[t][v] = simd.mul_add_f32s(x, row[v], even[t][v]);
            }
        }
    }
    for t in 0..T {
        for v in 0..V {
            sums[t][v] = even[t][v];
        }
    }
}

/// Y = XWᵀ of some rows of W.
pub(super) struct DotManyRows<'a, 'y, E> {
    /// For each vector its part of the result: some rows.
    pub y: &'a mut [&'y mut [f32]],
    /// `[vectors, columns]`
    pub x: &'a [f32],
    /// From the first of the rows on.
    pub weights: &'a [E],
    /// Elements of a row.
    pub columns: usize,
}

impl<E: Weight> DotManyRows<'_, '_, E> {
    pub fn run(self) {
        Arch::new().dispatch(self)
    }

    /// With P registers of [`WIDE`] lanes in all for each product, and T vectors at a time.
    #[inline(always)]
    fn tiles<S: Simd, const T: usize, const P: usize>(self, simd: S) {
        let Self { y, x, weights, columns, .. } = self;
        let (rows, vectors) = (y.first().map_or(0, |y| y.len()), y.len());
        // Weights that are widened, or fewer rows than are taken together.
        let mut copy = vec![0.0f32; DOTS * columns];
        let x = |vector: usize| &x[vector * columns..][..columns];
        for first in (0..rows).step_by(DOTS) {
            let own = DOTS.min(rows - first);
            let from = &weights[first * columns..][..own * columns];
            let four = match E::plain(from).filter(|_| own == DOTS) {
                Some(plain) => plain,
                None => {
                    copy.iter_mut().zip(from).for_each(|(to, w)| *to = w.wide());
                    &copy
                }
            };
            let done = vectors / T * T;
            for at in (0..done).step_by(T) {
                let sums = dots::<S, T, P>(simd, std::array::from_fn(|t| x(at + t)), four);
                for (y, sums) in y[at..].iter_mut().zip(sums) {
                    y[first..first + own].copy_from_slice(&sums[..own]);
                }
            }
            for (i, y) in y[done..].iter_mut().enumerate() {
                let [sums] = dots::<S, 1, P>(simd, [x(done + i)], four);
                y[first..first + own].copy_from_slice(&sums[..own]);
            }
        }
    }
}

impl<E: Weight> WithSimd for DotManyRows<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match S::F32_LANES {
            16 => self.tiles::<S, 4, 1>(simd),
            8 => self.tiles::<S, 1, 2>(simd),
            4 => self.tiles::<S, 1, 4>(simd),
            _ => self.tiles::<S, 1, 16>(simd),
        }
    }
}

/// Dot products of T vectors with [`DOTS`] rows, in the lanes of `super::kernels::dots`.
#[inline(always)]
fn dots<S: Simd, const T: usize, const P: usize>(simd: S, x: [&[f32]; T], rows: &[f32]) -> [[f32; DOTS]; T] {
    let columns = x[0].len();
    let lanes = |x: &[f32; WIDE]| -> [S::f32s; P] {
        let (lanes, _) = S::as_simd_f32s(x);
        std::array::from_fn(|p| lanes[p])
    };
    let rows: [_; DOTS] = std::array::from_fn(|r| rows[r * columns..][..columns].as_chunks::<WIDE>());
    let x = x.map(|x| x.as_chunks::<WIDE>());
    let mut sums = [[[simd.splat_f32s(0.0); P]; DOTS]; T];
    for i in 0..columns / WIDE {
        let weights: [_; DOTS] = std::array::from_fn(|r| lanes(&rows[r].0[i]));
        for t in 0..T {
            let x = lanes(&x[t].0[i]);
            for r in 0..DOTS {
                for p in 0..P {
                    sums[t][r][p] = simd.mul_add_f32s(x[p], weights[r][p], sums[t][r][p]);
                }
            }
        }
    }
    let mut out = [[0.0; DOTS]; T];
    for t in 0..T {
        let mut lanes = [[0.0; WIDE]; DOTS];
        for r in 0..DOTS {
            S::as_mut_simd_f32s(&mut lanes[r]).0.copy_from_slice(&sums[t][r]);
        }
        out[t] = lanes.map(sum);
    }
    if !columns.is_multiple_of(WIDE) {
        for t in 0..T {
            for r in 0..DOTS {
                for (x, w) in x[t].1.iter().zip(rows[r].1) {
                    out[t][r] = x.mul_add(*w, out[t][r]);
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::kernels::tests::noise;
    use super::*;

    /// What both products give on a machine that runs them.
    fn products<E: Weight>(w: &[E], run: &dyn Fn(SumManyRows<E>, DotManyRows<E>)) -> Vec<f32> {
        let (vectors, rows, columns) = (9, 45, 77);
        let (x, z, bias) = (noise(vectors * rows, 1), noise(vectors * columns, 2), noise(columns, 3));
        let (mut sums, mut dots) = (noise(vectors * columns, 4), vec![0.0; vectors * rows]);
        let mut y: Vec<&mut [f32]> = sums.chunks_mut(columns).collect();
        let mut dotted: Vec<&mut [f32]> = dots.chunks_mut(rows).collect();
        run(
            SumManyRows {
                y: &mut y,
                x: &x,
                weights: w,
                stride: columns,
                rows,
                part_rows: 20,
                bias: Some(&bias),
                onto: true,
            },
            DotManyRows { y: &mut dotted, x: &z, weights: w, columns },
        );
        [sums, dots].concat()
    }

    fn agree<E: Weight>(of: impl Fn(f32) -> E) {
        let w: Vec<E> = noise(45 * 77, 7).into_iter().map(of).collect();
        let best = products(&w, &|sums, dots| {
            sums.run();
            dots.run();
        });
        let portable = products(&w, &|sums, dots| {
            sums.with_simd(pulp::Scalar);
            dots.with_simd(pulp::Scalar);
        });
        assert_eq!(best, portable);
        #[cfg(target_arch = "x86_64")]
        if let Some(machine) = pulp::x86::V3::try_new() {
            let narrow = products(&w, &|sums, dots| {
                pulp::Simd::vectorize(machine, sums);
                pulp::Simd::vectorize(machine, dots);
            });
            assert_eq!(narrow, portable);
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        agree(|x| x);
        agree(f16::from_f32);
        agree(bf16::from_f32);
    }
}
