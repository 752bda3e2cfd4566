//! Records in pages: appending never moves what is there, and what is no longer needed is freed page by page.

use std::collections::VecDeque;
use std::ops::Range;

/// Pages are at least this many bytes, so that what holds them does not count…
const LEAST_PAGE: usize = 1024;
/// …but not this many times longer than asked, as the last one is only partly filled.
const MOST_TIMES: usize = 4;
/// The list of pages grows by this many.
const LIST_STEP: usize = 16;

/// Fixed-size records, a sequence of them for each head. Within a page the records of a head lie one after the other.
#[derive(Debug, Clone)]
pub(super) struct Paged<T> {
    pages: VecDeque<Box<[T]>>,
    /// Index of the first page that is held.
    first: usize,
    /// Elements of a record of each head, and where the head's records begin in a page.
    records: Vec<(usize, usize)>,
    /// Elements of a page.
    size: usize,
    /// Records of each head in a page: two to the power of this, as a division would take longer than all else that finds one.
    slots: u32,
    /// Records of each head so far, freed ones too.
    len: usize,
}

impl<T: Copy + Default> Paged<T> {
    /// Heads with records of these lengths; pages hold at least `slots` of each, and a multiple of it if it is a power of two.
    pub fn new(lengths: Vec<usize>, slots: usize) -> Self {
        let least = lengths.iter().sum::<usize>() * slots * size_of::<T>();
        let slots = (slots * LEAST_PAGE.div_ceil(least.max(1)).clamp(1, MOST_TIMES)).next_power_of_two();
        let mut size = 0;
        let start = |length: usize| {
            let start = size;
            size += length * slots;
            (length, start)
        };
        let records = lengths.into_iter().map(start).collect();
        Self { pages: VecDeque::new(), first: 0, records, size, slots: slots.trailing_zeros(), len: 0 }
    }

    /// Makes room up to `len` records of each head; new ones are zero.
    pub fn extend(&mut self, len: usize) {
        self.len = self.len.max(len);
        while (self.first + self.pages.len()) << self.slots < len {
            if self.pages.len() == self.pages.capacity() {
                self.pages.reserve_exact(LIST_STEP);
            }
            self.pages.push_back(vec![T::default(); self.size].into_boxed_slice());
        }
    }

    /// Forgets the records from `len` on. What is left of the last page is not cleared.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        while !self.pages.is_empty() && (self.first + self.pages.len() - 1) << self.slots >= len {
            self.pages.pop_back();
        }
    }

    /// Frees the pages that hold only records before `start`.
    pub fn free_before(&mut self, start: usize) {
        while !self.pages.is_empty() && (self.first + 1) << self.slots <= start {
            self.pages.pop_front();
            self.first += 1;
        }
        if self.pages.is_empty() {
            self.first = start >> self.slots;
        }
        if self.pages.capacity() > self.pages.len() + 2 * LIST_STEP {
            self.pages.shrink_to(self.pages.len() + LIST_STEP);
        }
    }

    /// The page of a record, and its place there.
    fn place(&self, index: usize) -> (usize, usize) {
        (index >> self.slots, index & ((1 << self.slots) - 1))
    }

    /// The records of a head in `range`, as far as they lie in the page of its first.
    pub fn run(&self, head: usize, range: Range<usize>) -> &[T] {
        let (page, slot) = self.place(range.start);
        let count = range.len().min((1 << self.slots) - slot);
        let (length, start) = self.records[head];
        let at = start + slot * length;
        &self.pages[page - self.first][at..at + count * length]
    }

    /// The records of a head in `range`, one after the other.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub fn copy(&self, head: usize, range: Range<usize>) -> Vec<T> {
        range.flat_map(|index| self.record(head, index)).copied().collect()
    }

    /// One record.
    pub fn record(&self, head: usize, index: usize) -> &[T] {
        self.run(head, index..index + 1)
    }

    /// One record, to be written.
    pub fn record_mut(&mut self, head: usize, index: usize) -> &mut [T] {
        let (length, start) = self.records[head];
        let (page, slot) = self.place(index);
        let at = start + slot * length;
        &mut self.pages[page - self.first][at..at + length]
    }

    /// Bytes that are held: pages and the list of them.
    pub fn bytes(&self) -> usize {
        let page = self.size * size_of::<T>();
        self.pages.len() * page + self.pages.capacity() * size_of::<Box<[T]>>()
    }

    /// The records from `start` on, head by head.
    pub fn snapshot(&self, start: usize) -> Vec<T> {
        let mut all = Vec::new();
        for head in 0..self.records.len() {
            (start..self.len).for_each(|index| all.extend_from_slice(self.record(head, index)));
        }
        all
    }

    /// Elements of [`Paged::snapshot`] with records `start..len`.
    pub fn snapshot_len(&self, start: usize, len: usize) -> usize {
        self.records.iter().map(|(length, _)| length).sum::<usize>() * (len - start)
    }

    /// Fills an empty sequence with the records of a snapshot; those before `start` are as good as freed.
    pub fn restore(&mut self, start: usize, len: usize, mut all: &[T]) {
        self.free_before(start);
        self.extend(len);
        for head in 0..self.records.len() {
            for index in start..len {
                let (record, rest) = all.split_at(self.records[head].0);
                self.record_mut(head, index).copy_from_slice(record);
                all = rest;
            }
        }
    }
}
