//! Matrices in the storage of the model's own tensors, and products with them.

use burn::tensor::Tensor;
use burn_flex::{Flex, FlexTensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::kernels::{DotRows, Gather, SumRows, Weight};
use super::rows::{DotManyRows, SumManyRows};
use crate::error::ModelError;

/// Bytes of weights that a task reads: long enough to hide what starting it costs.
const TASK_BYTES: usize = 512 << 10;
/// Tasks of a product at most.
const MAX_TASKS: usize = 64;
/// Rows of a task at least, so that adding up the parts stays small beside reading the weights.
const MIN_ROWS: usize = 64;
/// Columns of a task at most: what is added up stays in the first-level cache.
const PANEL: usize = 4096;
/// Columns that a task takes of a product of many vectors, and rows of a transposed matrix: enough to copy weights for.
const MANY_COLUMNS: usize = 96;
const MANY_ROWS: usize = 512;

/// A matrix in the storage of a tensor on the host, row by row. Holding it copies nothing.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    tensor: FlexTensor,
    pub rows: usize,
    pub columns: usize,
}

/// The elements of a matrix.
enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// Runs an expression over the elements of a matrix, whatever their type.
macro_rules! with_elements {
    ($matrix:expr, $elements:ident => $body:expr) => {
        match $matrix.elements() {
            Elements::F32($elements) => $body,
            Elements::F16($elements) => $body,
            Elements::Bf16($elements) => $body,
        }
    };
}

impl Matrix {
    /// Shares the storage of a tensor.
    ///
    /// # Errors
    /// If it is not a plain tensor of the Flex backend in f32, f16 or bf16.
    pub fn of(tensor: Tensor<2>) -> Result<Self, ModelError> {
        let [rows, columns] = tensor.dims();
        Ok(Self { tensor: storage(tensor)?, rows, columns })
    }

    fn elements(&self) -> Elements<'_> {
        let t = &self.tensor;
        let typed = t.as_slice().map(Elements::F32).or_else(|| t.as_slice().map(Elements::F16));
        typed
            .or_else(|| t.as_slice().map(Elements::Bf16))
            .expect("contiguous and of one of these types, as storage() checks")
    }

    /// Bytes that a product reads.
    pub fn bytes(&self) -> usize {
        self.rows * self.columns * self.tensor.dtype().size()
    }

    /// Rows that a task takes, and how many tasks share the rows.
    fn parts(&self) -> (usize, usize) {
        let tasks = self.bytes().div_ceil(TASK_BYTES).next_power_of_two().min(MAX_TASKS);
        let parts = (tasks / self.columns.div_ceil(PANEL)).min(self.rows / MIN_ROWS).max(1);
        let rows = self.rows.div_ceil(parts);
        (rows, self.rows.div_ceil(rows))
    }

    /// Length of the scratch that [`Matrix::multiply`] needs.
    pub fn scratch(&self) -> usize {
        self.parts().1 * self.columns
    }

    /// x·W + bias into `y`, or `onto` it: x is `[rows]`, y and bias `[columns]`.
    ///
    /// Tasks take ranges of rows, each a stretch of memory, and their sums are added in order: the result depends on the shape of
    /// the matrix and not on the number of threads.
    pub fn multiply(&self, x: &[f32], bias: Option<&[f32]>, y: &mut [f32], onto: bool, scratch: &mut [f32]) {
        let (part_rows, parts) = self.parts();
        let sums = &mut scratch[..parts * self.columns];
        with_elements!(self, weights => sum_parts(x, weights, self.columns, part_rows, sums));
        Gather { y, parts: sums, bias, onto }.run();
    }

    /// W·x into `y`: x is `[columns]`, y `[rows]`.
    pub fn multiply_transposed(&self, x: &[f32], y: &mut [f32]) {
        let tasks = self.bytes().div_ceil(TASK_BYTES);
        let rows = self.rows.div_ceil(tasks).next_multiple_of(4);
        with_elements!(self, weights => {
            let work = |(y, weights): (&mut [f32], &[_])| DotRows { y, x, weights }.run();
            match tasks {
                1 => work((y, weights)),
                _ => y.par_chunks_mut(rows).zip(weights.par_chunks(rows * self.columns)).with_max_len(1).for_each(work),
            }
        });
    }

    /// [`Matrix::multiply`] of many vectors, to the bit: x is `[vectors, rows]`, y `[vectors, columns]`.
    pub fn multiply_many(&self, x: &[f32], bias: Option<&[f32]>, y: &mut [f32], onto: bool) {
        let (rows, columns, (part_rows, _)) = (self.rows, self.columns, self.parts());
        let work = |(i, y): (usize, &mut Vec<&mut [f32]>)| {
            let first = i * MANY_COLUMNS;
            let bias = bias.map(|bias| &bias[first..]);
            with_elements!(self, weights => {
                SumManyRows { y, x, weights: &weights[first..], stride: columns, rows, part_rows, bias, onto }.run()
            });
        };
        by_columns(y, columns, MANY_COLUMNS).par_iter_mut().with_max_len(1).enumerate().for_each(work);
    }

    /// [`Matrix::multiply_transposed`] of many vectors, to the bit: x is `[vectors, columns]`, y `[vectors, rows]`.
    pub fn multiply_transposed_many(&self, x: &[f32], y: &mut [f32]) {
        let (rows, columns) = (self.rows, self.columns);
        let work = |(i, y): (usize, &mut Vec<&mut [f32]>)| {
            let first = i * MANY_ROWS * columns;
            with_elements!(self, weights => DotManyRows { y, x, weights: &weights[first..], columns }.run());
        };
        by_columns(y, rows, MANY_ROWS).par_iter_mut().with_max_len(1).enumerate().for_each(work);
    }

    /// Row `i` into `y`, or `onto` it.
    pub fn row(&self, i: usize, y: &mut [f32], onto: bool) {
        with_elements!(self, weights => {
            let row = &weights[i * self.columns..][..self.columns];
            for (y, w) in y.iter_mut().zip(row) {
                *y = if onto { *y + w.wide() } else { w.wide() };
            }
        });
    }

    /// Where the elements begin.
    #[cfg(test)]
    pub fn address(&self) -> *const u8 {
        self.tensor.bytes().as_ptr()
    }
}

/// Σ of x_i W[i, :] over each range of `part_rows` rows: `[parts, columns]`.
fn sum_parts<E: Weight>(x: &[f32], weights: &[E], columns: usize, part_rows: usize, sums: &mut [f32]) {
    let panels = |part: usize, y: &mut [f32], x: &[f32], parallel: bool| {
        let first = part * part_rows * columns;
        let work = |(panel, y): (usize, &mut [f32])| {
            SumRows { y, x, weights: &weights[first + panel * PANEL..], stride: columns }.run()
        };
        match parallel {
            true => y.par_chunks_mut(PANEL).with_max_len(1).enumerate().for_each(work),
            false => y.chunks_mut(PANEL).enumerate().for_each(work),
        }
    };
    match (sums.len() == columns, columns <= PANEL) {
        (true, narrow) => panels(0, sums, x, !narrow),
        (false, narrow) => sums
            .par_chunks_mut(columns)
            .zip(x.par_chunks(part_rows))
            .with_max_len(1)
            .enumerate()
            .for_each(|(part, (y, x))| panels(part, y, x, !narrow)),
    }
}

/// The columns of a matrix `[.., columns]` in ranges of `width`: for each the part of every row.
fn by_columns(y: &mut [f32], columns: usize, width: usize) -> Vec<Vec<&mut [f32]>> {
    let mut ranges: Vec<Vec<&mut [f32]>> = std::iter::repeat_with(Vec::new).take(columns.div_ceil(width)).collect();
    for row in y.chunks_exact_mut(columns) {
        ranges.iter_mut().zip(row.chunks_mut(width)).for_each(|(range, part)| range.push(part));
    }
    ranges
}

/// The storage of a tensor on the host.
fn storage<const D: usize>(tensor: Tensor<D>) -> Result<FlexTensor, ModelError> {
    use burn::tensor::DType;
    let tensor =
        tensor.try_into_primitive::<Flex>().map_err(|_| ModelError::NotOnHost { found: "another device".into() })?;
    match tensor.dtype() {
        // A view of another tensor gets storage of its own.
        DType::F32 | DType::F16 | DType::BF16 => Ok(tensor.to_contiguous()),
        other => Err(ModelError::NotOnHost { found: format!("{other:?}") }),
    }
}

/// A small vector as f32: a norm or a bias.
pub(super) fn vector(tensor: Tensor<1>) -> Result<Vec<f32>, ModelError> {
    let columns = tensor.dims()[0];
    let matrix = Matrix { tensor: storage(tensor)?, rows: 1, columns };
    let mut values = vec![0.0; columns];
    matrix.row(0, &mut values, false);
    Ok(values)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::super::kernels::tests::noise;
    use super::*;

    #[test]
    fn many_vectors_give_the_bits_of_each() {
        // One part and several, panels and tasks that are whole and ragged, fewer rows than a block and than a copy.
        let shapes = [(1, 1), (5, 3), (8, 48), (19, 33), (64, 100), (300, 97), (576, 960), (700, 5000), (2100, 130)];
        for (rows, columns) in shapes {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let data = TensorData::new(noise(rows * columns, 2), [rows, columns]);
                let tensor = Tensor::<2>::from_data(data, (&Device::flex(), dtype));
                let matrix = Matrix::of(tensor).expect("a tensor on the host");
                let (bias, mut parts) = (noise(columns, 4), vec![0.0; matrix.scratch()]);
                for vectors in [1, 2, 7, 13] {
                    let x = noise(vectors * rows, 1);
                    for (bias, onto) in [(None, false), (Some(&bias[..]), true)] {
                        let before = noise(vectors * columns, 3);
                        let (mut found, mut expected) = (before.clone(), before);
                        matrix.multiply_many(&x, bias, &mut found, onto);
                        for (x, y) in x.chunks(rows).zip(expected.chunks_mut(columns)) {
                            matrix.multiply(x, bias, y, onto, &mut parts);
                        }
                        assert_eq!(found, expected, "{rows} × {columns} {dtype:?}, {vectors}, {onto}");
                    }
                    let x = noise(vectors * columns, 5);
                    let (mut found, mut expected) = (vec![0.0; vectors * rows], vec![1.0; vectors * rows]);
                    matrix.multiply_transposed_many(&x, &mut found);
                    for (x, y) in x.chunks(columns).zip(expected.chunks_mut(rows)) {
                        matrix.multiply_transposed(x, y);
                    }
                    assert_eq!(found, expected, "{rows} × {columns} transposed {dtype:?}, {vectors}");
                }
            }
        }
    }
}
