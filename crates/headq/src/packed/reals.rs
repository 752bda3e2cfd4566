//! Real numbers in pages, half or single precision.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::kernels;
use super::paged::Paged;
use super::prefetch::prefetch;
use crate::scheme::Meta;

/// How dense keys and values are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DenseType {
    /// Half precision, 16 bits, as everything dense is accounted. Keys and values are rounded as they come in, before any is coded.
    #[default]
    F16,
    /// Single precision.
    F32,
}

impl DenseType {
    /// All types.
    pub const ALL: &'static [DenseType] = &[DenseType::F16, DenseType::F32];

    /// The name in files and on command lines.
    pub fn name(self) -> &'static str {
        match self {
            DenseType::F16 => "f16",
            DenseType::F32 => "f32",
        }
    }
}

impl std::fmt::Display for DenseType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DenseType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .iter()
            .copied()
            .find(|t| t.name() == text)
            .ok_or_else(|| format!("'{text}' is not known; known are f16, f32"))
    }
}

impl From<Meta> for DenseType {
    fn from(meta: Meta) -> Self {
        match meta {
            Meta::F16 => DenseType::F16,
            Meta::F32 => DenseType::F32,
        }
    }
}

/// Records of real numbers.
#[derive(Debug, Clone)]
pub(super) enum Reals {
    F16(Paged<f16>),
    F32(Paged<f32>),
}

/// The same method of either.
macro_rules! either {
    ($self:expr, $pages:ident => $body:expr) => {
        match $self {
            Reals::F16($pages) => $body,
            Reals::F32($pages) => $body,
        }
    };
}

/// Records as they lie in a page.
pub(super) enum Run<'a> {
    F16(&'a [f16]),
    F32(&'a [f32]),
}

impl Run<'_> {
    /// Starts to fetch them.
    pub fn prefetch(&self) {
        match self {
            Run::F16(x) => prefetch(x),
            Run::F32(x) => prefetch(x),
        }
    }
}

impl Reals {
    /// Records `range` of a head as they are, as far as they lie in the page of the first.
    pub fn raw(&self, head: usize, range: Range<usize>) -> Run<'_> {
        match self {
            Reals::F16(pages) => Run::F16(pages.run(head, range)),
            Reals::F32(pages) => Run::F32(pages.run(head, range)),
        }
    }

    pub fn new(kind: DenseType, heads: usize, record: usize, slots: usize) -> Self {
        Self::of(kind, vec![record; heads], slots)
    }

    /// Heads with records of these lengths.
    pub fn of(kind: DenseType, records: Vec<usize>, slots: usize) -> Self {
        match kind {
            DenseType::F16 => Reals::F16(Paged::new(records, slots)),
            DenseType::F32 => Reals::F32(Paged::new(records, slots)),
        }
    }

    /// The type, and the records from `start` on as little-endian bytes.
    pub fn snapshot(&self, start: usize) -> (DenseType, Vec<u8>) {
        match self {
            Reals::F16(pages) => (DenseType::F16, pages.snapshot(start).iter().flat_map(|x| x.to_le_bytes()).collect()),
            Reals::F32(pages) => (DenseType::F32, pages.snapshot(start).iter().flat_map(|x| x.to_le_bytes()).collect()),
        }
    }

    /// The type and the number of bytes that a snapshot of records `start..len` has.
    pub fn snapshot_len(&self, start: usize, len: usize) -> (DenseType, usize) {
        match self {
            Reals::F16(pages) => (DenseType::F16, 2 * pages.snapshot_len(start, len)),
            Reals::F32(pages) => (DenseType::F32, 4 * pages.snapshot_len(start, len)),
        }
    }

    /// Fills an empty sequence with the records of a snapshot.
    pub fn restore(&mut self, start: usize, len: usize, bytes: &[u8]) {
        match self {
            Reals::F16(pages) => {
                let all: Vec<f16> = bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect();
                pages.restore(start, len, &all);
            }
            Reals::F32(pages) => {
                let all: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                pages.restore(start, len, &all);
            }
        }
    }

    /// Records of a head as they are, as little-endian bytes.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub fn range_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8> {
        match self {
            Reals::F16(pages) => pages.copy(head, records).iter().flat_map(|x| x.to_le_bytes()).collect(),
            Reals::F32(pages) => pages.copy(head, records).iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    pub fn extend(&mut self, len: usize) {
        either!(self, pages => pages.extend(len))
    }

    pub fn truncate(&mut self, len: usize) {
        either!(self, pages => pages.truncate(len))
    }

    pub fn free_before(&mut self, start: usize) {
        either!(self, pages => pages.free_before(start))
    }

    pub fn bytes(&self) -> usize {
        either!(self, pages => pages.bytes())
    }

    /// Writes numbers into a record from element `at` on; halves saturate.
    pub fn put(&mut self, head: usize, index: usize, at: usize, values: &[f32]) {
        match self {
            Reals::F16(pages) => {
                let record = &mut pages.record_mut(head, index)[at..at + values.len()];
                let most = f16::MAX.to_f32();
                for (to, &from) in record.iter_mut().zip(values) {
                    *to = f16::from_f32(from.clamp(-most, most));
                }
            }
            Reals::F32(pages) => pages.record_mut(head, index)[at..at + values.len()].copy_from_slice(values),
        }
    }

    /// Records `range` of a head, as far as they lie in the page of the first; by way of `wide` if they are halves.
    pub fn run<'a>(&'a self, head: usize, range: Range<usize>, wide: &'a mut Vec<f32>) -> &'a [f32] {
        match self {
            Reals::F16(pages) => {
                let halves = pages.run(head, range);
                if wide.len() < halves.len() {
                    wide.resize(halves.len(), 0.0);
                }
                let wide = &mut wide[..halves.len()];
                kernels::widen(halves, wide);
                wide
            }
            Reals::F32(pages) => pages.run(head, range),
        }
    }

    /// One record in f32.
    pub fn read(&self, head: usize, index: usize, out: &mut [f32]) {
        match self {
            Reals::F16(pages) => pages.record(head, index).convert_to_f32_slice(out),
            Reals::F32(pages) => out.copy_from_slice(pages.record(head, index)),
        }
    }
}
