//! Coded values of one layer: token by token, so that a vector loop adds whole tokens up.
//!
//! A lane holds every sixteenth channel of a token ([`super::lanes`]). Heads that are no whole number of sixteens, or have a range for
//! fewer than sixteen channels, are read by the slower way of whole numbers; the former lie in rows ([`super::rows`]).

use std::ops::Range;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube::{Packing, Pages};
use super::file::Part;
use super::kernels::{self, TILE, Weighed};
use super::lanes::Lanes;
use super::paged::Paged;
use super::prefetch::prefetch;
use super::reals::{DenseType, Reals};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::rows::pack;
use super::rows::{LANES, get, put, row_bytes, rows_bytes};

/// Which tokens have how many bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Widths {
    /// All the same.
    Same(u32),
    /// In each group of `group` tokens ⌊group/2⌋ have `mean` + 1 bits and the others `mean` − 1; a map says which.
    Mixed { mean: u32, group: usize },
}

/// How a token's codes are laid out.
#[derive(Debug, Clone)]
enum Layout {
    /// In rows of neighbouring channels.
    Rows { bits: u32, width: usize },
    /// Lane i holds channels i, i + 16, …
    Lanes(Lanes),
}

impl Layout {
    fn new(bits: u32, width: usize) -> Self {
        match width.is_multiple_of(LANES) {
            true => Layout::Lanes(Lanes::new(&vec![bits; width / LANES])),
            false => Layout::Rows { bits, width },
        }
    }

    /// Bytes of a token.
    fn bytes(&self) -> usize {
        match self {
            Layout::Rows { bits, width } => rows_bytes(*bits, *width),
            Layout::Lanes(lanes) => lanes.bytes,
        }
    }

    fn put(&self, token: &mut [u8], codes: &[f32]) {
        match self {
            Layout::Lanes(lanes) => {
                for (channel, code) in codes.iter().enumerate() {
                    lanes.put(token, channel % LANES, channel / LANES, *code as u8);
                }
            }
            Layout::Rows { bits, .. } => {
                for (codes, row) in codes.chunks(LANES).zip(token.chunks_mut(row_bytes(*bits, LANES))) {
                    for (lane, &code) in codes.iter().enumerate() {
                        put(row, *bits, codes.len(), lane, code as u8);
                    }
                }
            }
        }
    }

    fn get(&self, token: &[u8], channel: usize) -> u8 {
        match self {
            Layout::Lanes(lanes) => lanes.get(token, channel % LANES, channel / LANES),
            Layout::Rows { bits, width } => {
                let lanes = (width - channel / LANES * LANES).min(LANES);
                get(&token[channel / LANES * row_bytes(*bits, LANES)..], *bits, lanes, channel % LANES)
            }
        }
    }
}

/// Codes of values with a scale and a zero for each `channels` neighbouring channels of a token.
#[derive(Debug, Clone)]
pub(super) struct ValueCodes {
    heads: usize,
    width: usize,
    channels: usize,
    widths: Widths,
    /// Of tokens with the same bits; or of those with more, and those with fewer.
    layouts: [Layout; 2],
    /// Records of tokens; or of groups: the map, the tokens with more bits, those with fewer.
    codes: Paged<u8>,
    /// Records of 16 tokens: for each chunk of channels 16 scales, then 16 zeros.
    ranges: Reals,
    len: usize,
}

/// Tokens to be appended, `[heads, tokens, …]` each: codes, and a scale and a zero for each chunk of channels.
pub(super) struct NewValues<'a> {
    pub codes: &'a [f32],
    pub scale: &'a [f32],
    pub zero: &'a [f32],
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub(super) struct ValueBuffers {
    token: Vec<f32>,
    weighed: Weighed,
    /// Weights of a group's tokens with more bits, and of those with fewer.
    halves: [Weighed; 2],
}

impl ValueCodes {
    pub fn new(heads: usize, width: usize, channels: usize, widths: Widths, kind: DenseType) -> Self {
        let (layouts, record, slots) = match widths {
            Widths::Same(bits) => {
                let layout = Layout::new(bits, width);
                let bytes = layout.bytes();
                ([layout.clone(), layout], bytes, TILE)
            }
            Widths::Mixed { mean, group } => {
                let layouts = [Layout::new(mean + 1, width), Layout::new(mean - 1, width)];
                let heavy = group / 2;
                let tokens = heavy * layouts[0].bytes() + (group - heavy) * layouts[1].bytes();
                (layouts, group.div_ceil(8) + tokens, (TILE / group).max(1))
            }
        };
        let codes = Paged::new(vec![record; heads], slots);
        let ranges = Reals::new(kind, vec![2 * LANES * (width / channels); heads], TILE / LANES);
        Self { heads, width, channels, widths, layouts, codes, ranges, len: 0 }
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.codes.bytes() + self.ranges.bytes()
    }

    /// Codes and ranges of `len` tokens as they are saved.
    pub fn parts(&mut self, len: usize) -> Vec<(&'static str, Part<'_>)> {
        let records = match self.widths {
            Widths::Same(_) => len,
            Widths::Mixed { group, .. } => len / group,
        };
        let codes = Part::Bytes { pages: &mut self.codes, len: records };
        let ranges = Part::Reals { pages: &mut self.ranges, start: 0, len: len.div_ceil(LANES) };
        vec![("codes", codes), ("ranges", ranges)]
    }

    /// Takes over the number of saved tokens, whose parts are restored.
    pub fn resume(&mut self, len: usize) {
        self.len = len;
    }

    /// Forgets the tokens from `len` on, a whole number of groups.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.codes.truncate(match self.widths {
            Widths::Same(_) => self.len,
            Widths::Mixed { group, .. } => self.len / group,
        });
        self.ranges.truncate(self.len.div_ceil(LANES));
    }

    /// Appends tokens that all have the same bits.
    pub fn append(&mut self, new: &NewValues<'_>) {
        debug_assert!(matches!(self.widths, Widths::Same(_)), "mixed widths come with a map");
        let tokens = new.codes.len() / (self.heads * self.width);
        let start = self.grow(tokens);
        self.codes.extend(self.len);
        for (i, codes) in new.codes.chunks(self.width).enumerate() {
            let (head, token) = (i / tokens, i % tokens);
            self.layouts[0].put(self.codes.record_mut(head, start + token), codes);
            self.put_ranges(new, i, head, start + token);
        }
    }

    /// Appends whole groups; `heavy` says which tokens are taken from `more`, the others from `fewer`: `[heads, tokens]`.
    pub fn append_mixed(&mut self, heavy: &[bool], more: &NewValues<'_>, fewer: &NewValues<'_>) {
        let Widths::Mixed { group, .. } = self.widths else { unreachable!("a map comes with mixed widths") };
        let tokens = heavy.len() / self.heads;
        let start = self.grow(tokens);
        self.codes.extend(self.len / group);
        let map = group.div_ceil(8);
        let [more_bytes, fewer_bytes] = self.layouts.each_ref().map(Layout::bytes);
        for (block, heavy) in heavy.chunks(group).enumerate() {
            let (head, first) = (block * group / tokens, block * group % tokens);
            let record = self.codes.record_mut(head, (start + first) / group);
            let mut seen = 0;
            for (i, &is_heavy) in heavy.iter().enumerate() {
                record[i / 8] = (record[i / 8] & !(1 << (i % 8))) | (u8::from(is_heavy) << (i % 8));
                let source = (block * group + i) * self.width;
                if is_heavy {
                    let at = map + seen * more_bytes;
                    self.layouts[0].put(&mut record[at..at + more_bytes], &more.codes[source..][..self.width]);
                    seen += 1;
                } else {
                    let at = map + group / 2 * more_bytes + (i - seen) * fewer_bytes;
                    self.layouts[1].put(&mut record[at..at + fewer_bytes], &fewer.codes[source..][..self.width]);
                }
            }
            for (i, &is_heavy) in heavy.iter().enumerate() {
                let new = if is_heavy { more } else { fewer };
                self.put_ranges(new, block * group + i, head, start + first + i);
            }
        }
    }

    fn grow(&mut self, tokens: usize) -> usize {
        let start = self.len;
        self.len += tokens;
        self.ranges.extend(self.len.div_ceil(LANES));
        start
    }

    fn put_ranges(&mut self, new: &NewValues<'_>, index: usize, head: usize, token: usize) {
        let chunks = self.width / self.channels;
        for chunk in 0..chunks {
            let at = index * chunks + chunk;
            for (which, number) in [new.scale[at], new.zero[at]].into_iter().enumerate() {
                self.ranges.put(head, token / LANES, (2 * chunk + which) * LANES + token % LANES, &[number]);
            }
        }
    }

    /// Whether a token of a group has more bits, and how many before it do.
    fn place(map: &[u8], i: usize) -> (bool, usize) {
        let before: u32 = map[..i / 8].iter().map(|b| b.count_ones()).sum();
        let seen = before + (map[i / 8] & ((1 << (i % 8)) - 1)).count_ones();
        (map[i / 8] >> (i % 8) & 1 == 1, seen as usize)
    }

    /// The layout of a token, and where its codes lie.
    fn token(&self, head: usize, token: usize) -> (&Layout, &[u8]) {
        let [more, fewer] = &self.layouts;
        match self.widths {
            Widths::Same(_) => (more, self.codes.record(head, token)),
            Widths::Mixed { group, .. } => {
                let (map, codes) = self.codes.record(head, token / group).split_at(group.div_ceil(8));
                let (heavy, seen) = Self::place(map, token % group);
                if heavy {
                    (more, &codes[seen * more.bytes()..][..more.bytes()])
                } else {
                    let at = group / 2 * more.bytes() + (token % group - seen) * fewer.bytes();
                    (fewer, &codes[at..][..fewer.bytes()])
                }
            }
        }
    }

    /// Reads one token back: zero + scale · code for each channel.
    pub fn read(&self, head: usize, token: usize, out: &mut [f32]) {
        let mut ranges = vec![0.0; 2 * LANES * (self.width / self.channels)];
        self.ranges.read(head, token / LANES, &mut ranges);
        let (layout, codes) = self.token(head, token);
        for (channel, out) in out.iter_mut().enumerate() {
            let at = channel / self.channels * 2 * LANES + token % LANES;
            *out = f32::from(layout.get(codes, channel)).mul_add(ranges[at], ranges[at + LANES]);
        }
    }

    /// Starts to fetch what [`ValueCodes::add_values`] reads of some tokens of a tile.
    pub fn prefetch(&self, head: usize, tokens: &Range<usize>) {
        let records = match self.widths {
            Widths::Same(_) => tokens.clone(),
            Widths::Mixed { group, .. } => tokens.start / group..tokens.end.div_ceil(group),
        };
        prefetch(self.codes.run(head, records));
        self.ranges.raw(head, tokens.start / LANES..tokens.end.div_ceil(LANES)).prefetch();
    }

    /// Adds Σ_t p_qt · v̂_t of up to a tile of tokens to `out` `[count, width]`; `p` is `[count, TILE]` from the first token on.
    pub fn add_values(
        &self,
        head: usize,
        tokens: Range<usize>,
        p: &[f32],
        count: usize,
        buffers: &mut ValueBuffers,
        out: &mut [f32],
    ) {
        if !self.channels.is_multiple_of(LANES) || !self.width.is_multiple_of(LANES) {
            return self.add_by_token(head, tokens, p, count, buffers, out);
        }
        // As many tokens at a time as have codes and ranges in one page each.
        let mut at = tokens.start;
        while at < tokens.end {
            let first = at % LANES;
            let ranges = self.ranges.raw(head, at / LANES..tokens.end.div_ceil(LANES));
            let chunks = self.width / self.channels;
            let stop = (at - first + ranges.len() / (2 * chunks)).min(tokens.end);
            let p = &p[at - tokens.start..];
            match (&self.layouts[0], self.widths) {
                (Layout::Lanes(layout), Widths::Same(_)) => {
                    let codes = self.codes.run(head, at..stop);
                    let tokens = codes.len() / layout.bytes;
                    kernels::weigh(ranges, chunks, p, (first, tokens), count, &mut buffers.weighed);
                    self.add_weighed(layout, codes, &buffers.weighed, count, out);
                    at += tokens;
                }
                (_, Widths::Mixed { group, .. }) => {
                    let tokens = (stop - at).min(group - at % group);
                    kernels::weigh(ranges, chunks, p, (first, tokens), count, &mut buffers.weighed);
                    self.add_mixed(head, at..at + tokens, count, buffers, out);
                    at += tokens;
                }
                (Layout::Rows { .. }, _) => unreachable!("widths of whole sixteens are laid out in lanes"),
            }
        }
    }

    /// Adds tokens whose probabilities are weighed.
    fn add_weighed(&self, layout: &Lanes, codes: &[u8], weighed: &Weighed, count: usize, out: &mut [f32]) {
        let (scaled, sums) = (&weighed.scaled, &weighed.sums);
        let values = kernels::CodedValues { codes, layout, per_chunk: self.channels / LANES, scaled, sums };
        kernels::coded_values(values, count, out);
        for (i, [_, zeros]) in sums.iter().enumerate() {
            let start = i % count * self.width + i / count * self.channels;
            out[start..start + self.channels].iter_mut().for_each(|out| *out += zeros);
        }
    }

    /// Adds tokens of one group whose probabilities are weighed: those with more bits, then those with fewer.
    fn add_mixed(&self, head: usize, tokens: Range<usize>, count: usize, buffers: &mut ValueBuffers, out: &mut [f32]) {
        let Widths::Mixed { group, .. } = self.widths else { unreachable!("a map comes with mixed widths") };
        let ValueBuffers { weighed, halves, .. } = buffers;
        let (map, codes) = self.codes.record(head, tokens.start / group).split_at(group.div_ceil(8));
        let first = tokens.start % group;
        let (_, before) = Self::place(map, first);
        let rows = weighed.scaled.len() / TILE;
        for half in &mut *halves {
            half.scaled.resize(rows * TILE, 0.0);
            // Zeros are those of all tokens, and count once.
            half.sums.clear();
            half.sums.resize(rows, [0.0; 2]);
        }
        halves[0].sums.iter_mut().zip(&weighed.sums).for_each(|(to, [_, zeros])| to[1] = *zeros);
        let mut seen = [0; 2];
        for i in 0..tokens.len() {
            let which = usize::from(map[(first + i) / 8] >> ((first + i) % 8) & 1 == 0);
            for row in 0..rows {
                let scaled = weighed.scaled[row * TILE + i];
                halves[which].scaled[row * TILE + seen[which]] = scaled;
                halves[which].sums[row][0] += scaled;
            }
            seen[which] += 1;
        }
        let more = self.layouts[0].bytes();
        let starts = [before * more, group / 2 * more + (first - before) * self.layouts[1].bytes()];
        for (((layout, start), seen), half) in self.layouts.iter().zip(starts).zip(seen).zip(&*halves) {
            let Layout::Lanes(layout) = layout else { unreachable!("widths of whole sixteens are laid out in lanes") };
            self.add_weighed(layout, &codes[start..start + seen * layout.bytes], half, count, out);
        }
    }

    /// Adds tokens by way of their values.
    fn add_by_token(
        &self,
        head: usize,
        tokens: Range<usize>,
        p: &[f32],
        count: usize,
        buffers: &mut ValueBuffers,
        out: &mut [f32],
    ) {
        buffers.token.resize(self.width, 0.0);
        for (i, token) in tokens.enumerate() {
            self.read(head, token, &mut buffers.token);
            kernels::dense_values(&buffers.token, &[], &p[i..], self.width, count, out);
        }
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl Pages for ValueCodes {
    fn packing(&self) -> Packing {
        let Widths::Same(bits) = self.widths else { unreachable!("values all have the same bits") };
        Packing {
            heads: self.heads,
            bits,
            width: self.width,
            channels: Some(self.channels),
            zeros: true,
            codes: (1, rows_bytes(bits, self.width)),
            ranges: (1, 2 * (self.width / self.channels)),
            half: matches!(self.ranges, Reals::F16(_)),
        }
    }

    fn levels(&self) -> Option<&[f32; 256]> {
        None
    }

    fn code_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8> {
        let codes = |token: usize| {
            let (layout, token) = self.token(head, token);
            (0..self.width).map(|channel| layout.get(token, channel)).collect::<Vec<_>>()
        };
        records.flat_map(|token| pack(&codes(token), self.packing().bits)).collect()
    }

    fn range_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8> {
        let (number, record) = (if self.packing().half { 2 } else { 4 }, 2 * LANES * (self.width / self.channels));
        let blocks = self.ranges.range_bytes(head, records.start / LANES..records.end.div_ceil(LANES));
        let first = records.start / LANES * LANES;
        let numbers = |token: usize| {
            let at = (token - first) / LANES * record + token % LANES;
            (at..at + record).step_by(LANES).flat_map(move |at| at * number..(at + 1) * number)
        };
        records.flat_map(numbers).map(|at| blocks[at]).collect()
    }
}
