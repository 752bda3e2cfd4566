//! Coded values of one layer: token by token, so that a vector loop adds whole tokens up.

use std::ops::Range;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube::{Packing, Pages};
use super::file::Part;
use super::kernels::{self, TILE};
use super::paged::Paged;
use super::prefetch::prefetch;
use super::reals::{DenseType, Reals};
use super::rows::{LANES, get, put, row_bytes, rows_bytes};

/// Which tokens have how many bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Widths {
    /// All the same.
    Same(u32),
    /// In each group of `group` tokens ⌊group/2⌋ have `mean` + 1 bits and the others `mean` − 1; a map says which.
    Mixed { mean: u32, group: usize },
}

/// Codes of values with a scale and a zero for each `channels` neighbouring channels of a token.
#[derive(Debug, Clone)]
pub(super) struct ValueCodes {
    heads: usize,
    width: usize,
    channels: usize,
    widths: Widths,
    /// Records of tokens; or of groups: the map, the tokens with more bits, those with fewer.
    codes: Paged<u8>,
    /// Records of tokens: for each chunk of channels scale and zero.
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
    ranges: Vec<f32>,
    token: Vec<f32>,
}

impl ValueCodes {
    pub fn new(heads: usize, width: usize, channels: usize, widths: Widths, kind: DenseType) -> Self {
        let codes = match widths {
            Widths::Same(bits) => Paged::new(vec![rows_bytes(bits, width); heads], TILE),
            Widths::Mixed { mean, group } => {
                let heavy = group / 2;
                let record = group.div_ceil(8)
                    + heavy * rows_bytes(mean + 1, width)
                    + (group - heavy) * rows_bytes(mean - 1, width);
                Paged::new(vec![record; heads], (TILE / group).max(1))
            }
        };
        let ranges = Reals::new(kind, heads, 2 * (width / channels), TILE);
        Self { heads, width, channels, widths, codes, ranges, len: 0 }
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
        vec![("codes", codes), ("ranges", Part::Reals { pages: &mut self.ranges, start: 0, len })]
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
        self.ranges.truncate(self.len);
    }

    /// Appends tokens that all have the same bits.
    pub fn append(&mut self, new: &NewValues<'_>) {
        let Widths::Same(bits) = self.widths else { unreachable!("mixed widths come with a map") };
        let tokens = new.codes.len() / (self.heads * self.width);
        let start = self.grow(tokens);
        self.codes.extend(self.len);
        for (i, codes) in new.codes.chunks(self.width).enumerate() {
            let (head, token) = (i / tokens, i % tokens);
            put_token(self.codes.record_mut(head, start + token), bits, codes);
            self.put_ranges(new, i, head, start + token);
        }
    }

    /// Appends whole groups; `heavy` says which tokens are taken from `more`, the others from `fewer`: `[heads, tokens]`.
    pub fn append_mixed(&mut self, heavy: &[bool], more: &NewValues<'_>, fewer: &NewValues<'_>) {
        let Widths::Mixed { mean, group } = self.widths else { unreachable!("a map comes with mixed widths") };
        let tokens = heavy.len() / self.heads;
        let start = self.grow(tokens);
        self.codes.extend(self.len / group);
        let map = group.div_ceil(8);
        let (more_bytes, fewer_bytes) = (rows_bytes(mean + 1, self.width), rows_bytes(mean - 1, self.width));
        for (block, heavy) in heavy.chunks(group).enumerate() {
            let (head, first) = (block * group / tokens, block * group % tokens);
            let record = self.codes.record_mut(head, (start + first) / group);
            let mut seen = 0;
            for (i, &is_heavy) in heavy.iter().enumerate() {
                record[i / 8] = (record[i / 8] & !(1 << (i % 8))) | (u8::from(is_heavy) << (i % 8));
                let source = (block * group + i) * self.width;
                if is_heavy {
                    let at = map + seen * more_bytes;
                    put_token(&mut record[at..at + more_bytes], mean + 1, &more.codes[source..][..self.width]);
                    seen += 1;
                } else {
                    let at = map + group / 2 * more_bytes + (i - seen) * fewer_bytes;
                    put_token(&mut record[at..at + fewer_bytes], mean - 1, &fewer.codes[source..][..self.width]);
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
        self.ranges.extend(self.len);
        start
    }

    fn put_ranges(&mut self, new: &NewValues<'_>, index: usize, head: usize, token: usize) {
        let chunks = self.width / self.channels;
        for chunk in 0..chunks {
            let at = index * chunks + chunk;
            self.ranges.put(head, token, 2 * chunk, &[new.scale[at], new.zero[at]]);
        }
    }

    /// Bits of a token, and where its codes lie.
    fn token(&self, head: usize, token: usize) -> (u32, &[u8]) {
        match self.widths {
            Widths::Same(bits) => (bits, self.codes.record(head, token)),
            Widths::Mixed { mean, group } => {
                let record = self.codes.record(head, token / group);
                let (map, codes) = record.split_at(group.div_ceil(8));
                let i = token % group;
                let before: u32 = map[..i / 8].iter().map(|b| b.count_ones()).sum();
                let seen = (before + (map[i / 8] & ((1 << (i % 8)) - 1)).count_ones()) as usize;
                let (more, fewer) = (rows_bytes(mean + 1, self.width), rows_bytes(mean - 1, self.width));
                if map[i / 8] >> (i % 8) & 1 == 1 {
                    (mean + 1, &codes[seen * more..][..more])
                } else {
                    (mean - 1, &codes[group / 2 * more + (i - seen) * fewer..][..fewer])
                }
            }
        }
    }

    /// Codes of one token.
    fn codes_of(&self, head: usize, token: usize, out: &mut [f32]) {
        let (bits, codes) = self.token(head, token);
        let row = row_bytes(bits, LANES);
        for (c, out) in out.iter_mut().enumerate() {
            let lanes = (self.width - c / LANES * LANES).min(LANES);
            *out = f32::from(get(&codes[c / LANES * row..], bits, lanes, c % LANES));
        }
    }

    /// Reads one token back: zero + scale · code for each channel.
    pub fn read(&self, head: usize, token: usize, out: &mut [f32]) {
        let mut record = vec![0.0; 2 * (self.width / self.channels)];
        self.ranges.read(head, token, &mut record);
        self.codes_of(head, token, out);
        for (c, out) in out.iter_mut().enumerate() {
            let at = 2 * (c / self.channels);
            *out = out.mul_add(record[at], record[at + 1]);
        }
    }

    /// Starts to fetch what [`ValueCodes::add_values`] reads of some tokens of a tile.
    pub fn prefetch(&self, head: usize, tokens: &Range<usize>) {
        let records = match self.widths {
            Widths::Same(_) => tokens.clone(),
            Widths::Mixed { group, .. } => tokens.start / group..tokens.end.div_ceil(group),
        };
        prefetch(self.codes.run(head, records));
        self.ranges.raw(head, tokens.clone()).prefetch();
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
        let whole_rows = self.width.is_multiple_of(LANES) && self.channels.is_multiple_of(LANES);
        let mut at = tokens.start;
        while at < tokens.end {
            let done = at - tokens.start;
            let ranges = self.ranges.run(head, at..tokens.end, &mut buffers.ranges);
            let stop = at + ranges.len() / (2 * (self.width / self.channels));
            match self.widths {
                Widths::Same(bits) if whole_rows => {
                    let codes = self.codes.run(head, at..stop);
                    let values =
                        kernels::CodedValues { codes, bits, ranges, width: self.width, channels: self.channels };
                    kernels::coded_values(values, &p[done..], count, out);
                }
                Widths::Mixed { .. } if whole_rows => {
                    let chunks = 2 * (self.width / self.channels);
                    for (i, ranges) in ranges.chunks(chunks).enumerate() {
                        let (bits, codes) = self.token(head, at + i);
                        let values =
                            kernels::CodedValues { codes, bits, ranges, width: self.width, channels: self.channels };
                        kernels::coded_values(values, &p[done + i..], count, out);
                    }
                }
                _ => {
                    buffers.token.resize(self.width, 0.0);
                    for token in at..stop {
                        self.read(head, token, &mut buffers.token);
                        let p = &p[token - tokens.start..];
                        kernels::dense_values(&buffers.token, &[], p, self.width, count, out);
                    }
                }
            }
            at = stop;
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
        self.codes.copy(head, records)
    }

    fn range_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8> {
        self.ranges.range_bytes(head, records)
    }
}

/// Writes one token's codes.
fn put_token(record: &mut [u8], bits: u32, codes: &[f32]) {
    let row = row_bytes(bits, LANES);
    for (codes, row) in codes.chunks(LANES).zip(record.chunks_mut(row)) {
        for (lane, &code) in codes.iter().enumerate() {
            put(row, bits, codes.len(), lane, code as u8);
        }
    }
}
