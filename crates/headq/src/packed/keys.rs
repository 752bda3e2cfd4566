//! Coded keys of one layer: base or side codes, in blocks of 16 tokens.
//!
//! Within a block a channel's 16 codes are one row ([`super::rows`]), so that a vector loop scores 16 tokens at a time against one channel
//! of the query. Scales are folded into the query once per group where the tokens of a group share them.

use std::ops::Range;
use std::sync::Arc;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube::{Packing, Pages};
use super::file::Part;
use super::kernels::{self, MOST_QUERIES, TILE};
use super::paged::Paged;
use super::prefetch::prefetch;
use super::reals::{DenseType, Reals};
use super::rows::{LANES, get, put, row_bytes};

/// Blocks of a tile.
const TILE_BLOCKS: usize = TILE / LANES;

/// Neighbouring channels with codes of the same width.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Run {
    pub bits: u32,
    pub channels: Range<usize>,
    /// Where the first channel's row lies in a block.
    pub start: usize,
}

/// How a head's block of 16 tokens is laid out: a row for each channel that has bits.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layout {
    pub runs: Vec<Run>,
    /// Bytes of a block.
    pub bytes: usize,
}

impl Layout {
    /// From the bits of each channel; those without bits are not stored.
    pub fn new(bits: &[u32]) -> Self {
        let (mut runs, mut bytes) = (Vec::<Run>::new(), 0);
        for (channel, &bits) in bits.iter().enumerate().filter(|(_, bits)| **bits > 0) {
            match runs.last_mut() {
                Some(run) if run.bits == bits && run.channels.end == channel => run.channels.end += 1,
                _ => runs.push(Run { bits, channels: channel..channel + 1, start: bytes }),
            }
            bytes += row_bytes(bits, LANES);
        }
        Self { runs, bytes }
    }
}

/// What turns codes back into numbers.
#[derive(Debug, Clone)]
pub(super) enum Ranges {
    /// A scale and a zero for each stored channel over the tokens of a group: records of scales, then zeros, one for each group.
    Group { group: usize, values: Reals },
    /// A scale, and with `zeros` a zero, for each `channels` neighbouring channels of a token: records for 16 tokens, for each chunk of
    /// channels 16 scales, then 16 zeros.
    Token { channels: usize, zeros: bool, values: Reals },
    /// Fixed by calibration: `[heads, width]` scales and zeros.
    Fixed { scale: Vec<f32>, zero: Vec<f32> },
}

/// Codes of keys, or of what a side code keeps of them.
#[derive(Debug, Clone)]
pub(super) struct KeyCodes {
    heads: usize,
    /// Coefficients of a token, those without bits included.
    width: usize,
    /// Coefficients of each head that have bits, which are its first ones.
    stored: Vec<usize>,
    layouts: Vec<Layout>,
    /// The number that each code stands for before its scale; `None` is the code itself.
    levels: Option<Arc<[f32; 256]>>,
    codes: Paged<u8>,
    ranges: Ranges,
    len: usize,
}

/// The queries of a group that are handled together, as a vector loop reads them.
#[derive(Debug, Default, Clone)]
pub(super) struct Queries {
    /// `[count, width]`
    pub weights: Vec<f32>,
    pub count: usize,
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub(super) struct Folded {
    /// Query times scale: `[count, width]`.
    weights: Vec<f32>,
    /// Query times zero, summed, for each query.
    constant: [f32; MOST_QUERIES],
    /// A record of ranges.
    record: Vec<f32>,
}

impl KeyCodes {
    /// No tokens yet. Coefficients without bits come last in each head.
    pub fn new(width: usize, bits: &[Vec<u32>], ranges: Ranges, levels: Option<Arc<[f32; 256]>>) -> Self {
        let stored = bits.iter().map(|bits| stored(bits)).collect();
        let layouts: Vec<Layout> = bits.iter().map(|bits| Layout::new(bits)).collect();
        let codes = Paged::new(layouts.iter().map(|l| l.bytes).collect(), TILE_BLOCKS);
        Self { heads: bits.len(), width, stored, layouts, levels, codes, ranges, len: 0 }
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Coefficients of a token.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Coefficients of a head's token that are stored, which queries are turned to.
    pub fn stored(&self, head: usize) -> usize {
        self.stored[head]
    }

    /// Appends tokens.
    ///
    /// # Shapes
    /// - `codes`: `[heads, tokens, width]`
    /// - `scale`, `zero`: `[heads, groups, width]` or `[heads, tokens, chunks]`, as the ranges are; empty where they are not stored
    pub fn append(&mut self, codes: &[f32], scale: &[f32], zero: &[f32]) {
        let tokens = codes.len() / (self.heads * self.width);
        let start = self.len;
        self.len += tokens;
        self.codes.extend(self.len.div_ceil(LANES));
        for (head, codes) in codes.chunks(tokens * self.width).enumerate() {
            for (i, token) in codes.chunks(self.width).enumerate() {
                let (block, lane) = ((start + i) / LANES, (start + i) % LANES);
                let rows = self.codes.record_mut(head, block);
                for run in &self.layouts[head].runs {
                    let row = row_bytes(run.bits, LANES);
                    let rows = rows[run.start..].chunks_mut(row);
                    for (row, &code) in rows.zip(&token[run.channels.clone()]) {
                        put(row, run.bits, LANES, lane, code as u8);
                    }
                }
            }
        }
        match &mut self.ranges {
            Ranges::Fixed { .. } => {}
            Ranges::Group { group, values } => {
                let (first, groups) = (start / *group, tokens / *group);
                values.extend(first + groups);
                let per_group = scale.chunks(self.width).zip(zero.chunks(self.width));
                for (i, (scale, zero)) in per_group.enumerate() {
                    let (head, index) = (i / groups, first + i % groups);
                    let stored = self.stored[head];
                    values.put(head, index, 0, &scale[..stored]);
                    values.put(head, index, stored, &zero[..stored]);
                }
            }
            Ranges::Token { channels, zeros, values } => {
                values.extend(self.len.div_ceil(LANES));
                let chunks = self.width / *channels;
                let stride = if *zeros { 2 * LANES } else { LANES };
                let all = [scale, zero];
                for (which, numbers) in all.iter().take(1 + usize::from(*zeros)).enumerate() {
                    for (i, number) in numbers.iter().enumerate() {
                        let (head, token, chunk) = (i / (tokens * chunks), i / chunks % tokens, i % chunks);
                        let at = chunk * stride + which * LANES + (start + token) % LANES;
                        values.put(head, (start + token) / LANES, at, &[*number]);
                    }
                }
            }
        }
    }

    /// Forgets the tokens from `len` on, a whole number of groups.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        let blocks = self.len.div_ceil(LANES);
        self.codes.truncate(blocks);
        match &mut self.ranges {
            Ranges::Fixed { .. } => {}
            Ranges::Group { group, values } => values.truncate(self.len / *group),
            Ranges::Token { values, .. } => values.truncate(blocks),
        }
    }

    /// Codes and ranges of `len` tokens as they are saved.
    pub fn parts(&mut self, len: usize) -> Vec<(&'static str, Part<'_>)> {
        let blocks = len.div_ceil(LANES);
        let mut parts = vec![("codes", Part::Bytes { pages: &mut self.codes, len: blocks })];
        match &mut self.ranges {
            Ranges::Fixed { .. } => {}
            Ranges::Group { group, values } => {
                parts.push(("ranges", Part::Reals { pages: values, start: 0, len: len / *group }));
            }
            Ranges::Token { values, .. } => {
                parts.push(("ranges", Part::Reals { pages: values, start: 0, len: blocks }))
            }
        }
        parts
    }

    /// Takes over the number of saved tokens, whose parts are restored.
    pub fn resume(&mut self, len: usize) {
        self.len = len;
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let ranges = match &self.ranges {
            Ranges::Fixed { .. } => 0,
            Ranges::Group { values, .. } | Ranges::Token { values, .. } => values.bytes(),
        };
        self.codes.bytes() + ranges
    }

    /// Reads one token back: zero + scale · level for each coefficient, 0 where it has no bits.
    pub fn read(&self, head: usize, token: usize, out: &mut [f32]) {
        out.fill(0.0);
        let rows = self.codes.record(head, token / LANES);
        let mut range = self.range_of(head, token);
        for run in &self.layouts[head].runs {
            let row = row_bytes(run.bits, LANES);
            for (row, channel) in rows[run.start..].chunks(row).zip(run.channels.clone()) {
                let code = get(row, run.bits, LANES, token % LANES);
                let level = self.levels.as_ref().map_or(f32::from(code), |levels| levels[usize::from(code)]);
                let (scale, zero) = range(channel);
                out[channel] = level * scale + zero;
            }
        }
    }

    /// Scale and zero of each channel of a token.
    fn range_of(&self, head: usize, token: usize) -> impl FnMut(usize) -> (f32, f32) {
        let mut record = Vec::new();
        match &self.ranges {
            Ranges::Fixed { scale, zero } => {
                record.extend_from_slice(&scale[head * self.width..][..self.width]);
                record.extend_from_slice(&zero[head * self.width..][..self.width]);
            }
            Ranges::Group { group, values } => {
                record.resize(2 * self.stored[head], 0.0);
                values.read(head, token / group, &mut record);
            }
            Ranges::Token { channels, zeros, values } => {
                let stride = if *zeros { 2 * LANES } else { LANES };
                let mut block = vec![0.0; self.width / channels * stride];
                values.read(head, token / LANES, &mut block);
                let lane = token % LANES;
                record.extend((0..self.width).map(|c| block[c / channels * stride + lane]));
                let zero = |c: usize| if *zeros { block[c / channels * stride + LANES + lane] } else { 0.0 };
                record.extend((0..self.width).map(zero));
            }
        }
        let zeros = record.len() / 2;
        move |channel| (record[channel], record[zeros + channel])
    }

    /// Starts to fetch what [`KeyCodes::add_scores`] reads of some tokens of a tile.
    pub fn prefetch(&self, head: usize, tokens: &Range<usize>) {
        let blocks = tokens.start / LANES..tokens.end.div_ceil(LANES);
        prefetch(self.codes.run(head, blocks.clone()));
        match &self.ranges {
            Ranges::Fixed { .. } => {}
            Ranges::Group { group, values } => {
                values.raw(head, tokens.start / group..tokens.end.div_ceil(*group)).prefetch()
            }
            Ranges::Token { values, .. } => values.raw(head, blocks).prefetch(),
        }
    }

    /// Adds the scores of up to a tile of blocks to `scores` `[count, TILE]`; lanes past the last token get what they get.
    ///
    /// `blocks` begin at a multiple of a tile's.
    pub fn add_scores(
        &self,
        head: usize,
        blocks: Range<usize>,
        queries: &Queries,
        folded: &mut Folded,
        scores: &mut [f32],
    ) {
        let codes = self.codes.run(head, blocks.clone());
        let layout = &self.layouts[head];
        let levels = self.levels.as_deref();
        match &self.ranges {
            Ranges::Fixed { scale, zero } => {
                let of_head = head * self.width..(head + 1) * self.width;
                folded.fold(queries, &scale[of_head.clone()], &zero[of_head]);
                self.add_folded(codes, layout, queries.count, folded, blocks.len(), scores);
            }
            Ranges::Group { group, values } => {
                let last = self.len - 1;
                if TILE.is_multiple_of(*group) && group.is_multiple_of(LANES) || group.is_multiple_of(TILE) {
                    // A tile's groups lie in one page, or it lies in one group.
                    let groups = blocks.start * LANES / group..(blocks.end * LANES - 1).min(last) / group + 1;
                    let mut record = std::mem::take(&mut folded.record);
                    let ranges = values.run(head, groups, &mut record);
                    let blocks = kernels::FoldedBlocks {
                        codes,
                        runs: &layout.runs,
                        bytes: layout.bytes,
                        blocks: blocks.len(),
                        levels,
                    };
                    let grouped = kernels::GroupedBlocks { blocks, per_group: group / LANES, ranges };
                    folded.weights.resize(queries.weights.len(), 0.0);
                    kernels::grouped_scores(grouped, &queries.weights, queries.count, &mut folded.weights, scores);
                    folded.record = record;
                    return;
                }
                let group_of = |token: usize| token.min(last) / group;
                let mut at = blocks.start;
                while at < blocks.end {
                    let first = group_of(at * LANES);
                    folded.fold_group(queries, values, head, first, self.width);
                    // As many blocks as lie in this group alone.
                    let whole = (at..blocks.end).take_while(|b| group_of(b * LANES + LANES - 1) == first).count();
                    let local = at - blocks.start;
                    if whole > 0 {
                        let codes = &codes[local * layout.bytes..];
                        self.add_folded(codes, layout, queries.count, folded, whole, &mut scores[local * LANES..]);
                        at += whole;
                        continue;
                    }
                    // A block of several groups: each group's lanes from a pass of its own.
                    let codes = &codes[local * layout.bytes..][..layout.bytes];
                    for group_index in first..=group_of(at * LANES + LANES - 1) {
                        folded.fold_group(queries, values, head, group_index, self.width);
                        let mut own = [0.0; MOST_QUERIES * TILE];
                        self.add_folded(codes, layout, queries.count, folded, 1, &mut own);
                        let lanes = |token: usize| token.saturating_sub(at * LANES).min(LANES);
                        let lanes = lanes(group_index * group)..lanes((group_index + 1) * group);
                        for q in 0..queries.count {
                            let to = &mut scores[q * TILE + local * LANES..][lanes.clone()];
                            for (to, own) in to.iter_mut().zip(&own[q * TILE..][lanes.clone()]) {
                                *to += own;
                            }
                        }
                    }
                    at += 1;
                }
            }
            Ranges::Token { channels, zeros, values } => {
                let mut record = std::mem::take(&mut folded.record);
                let ranges = values.run(head, blocks.clone(), &mut record);
                folded.sum_chunks(queries, *channels);
                for (local, codes) in codes.chunks(layout.bytes).enumerate() {
                    let chunks = self.width / channels;
                    let stride = if *zeros { 2 * LANES } else { LANES };
                    let ranges = &ranges[local * chunks * stride..][..chunks * stride];
                    let block = kernels::TokenBlock {
                        codes,
                        runs: &layout.runs,
                        levels,
                        ranges,
                        channels: *channels,
                        zeros: *zeros,
                    };
                    let scores = &mut scores[local * LANES..];
                    kernels::token_scores(block, &queries.weights, &folded.weights, queries.count, scores);
                }
                folded.record = record;
            }
        }
    }

    /// Blocks that share the folded query.
    fn add_folded(
        &self,
        codes: &[u8],
        layout: &Layout,
        count: usize,
        folded: &Folded,
        blocks: usize,
        scores: &mut [f32],
    ) {
        let levels = self.levels.as_deref();
        let block = kernels::FoldedBlocks { codes, runs: &layout.runs, bytes: layout.bytes, blocks, levels };
        kernels::folded_scores(block, &folded.weights, &folded.constant, count, scores);
    }
}

impl Folded {
    fn fold(&mut self, queries: &Queries, scale: &[f32], zero: &[f32]) {
        // Queries are as wide as what is stored of a head.
        let stored = queries.weights.len() / queries.count;
        self.weights.resize(queries.weights.len(), 0.0);
        self.constant = kernels::fold(&queries.weights, &scale[..stored], &zero[..stored], &mut self.weights);
    }

    fn fold_group(&mut self, queries: &Queries, values: &Reals, head: usize, group: usize, width: usize) {
        let mut record = std::mem::take(&mut self.record);
        let ranges = values.run(head, group..group + 1, &mut record);
        let stored = queries.weights.len() / queries.count;
        debug_assert!(stored <= width, "queries are as wide as what is stored of a head");
        let (scale, zero) = ranges.split_at(stored);
        self.weights.resize(queries.weights.len(), 0.0);
        self.constant = kernels::fold(&queries.weights, scale, zero, &mut self.weights);
        self.record = record;
    }

    /// The sum of each chunk's query channels, `[chunks, count]`, in `weights`.
    fn sum_chunks(&mut self, queries: &Queries, channels: usize) {
        let width = queries.weights.len() / queries.count;
        self.weights.clear();
        for chunk in (0..width).step_by(channels) {
            let sum = |query: &[f32]| query[chunk..chunk + channels].iter().sum::<f32>();
            self.weights.extend(queries.weights.chunks(width).map(sum));
        }
    }
}

/// Coefficients of a head that have bits.
fn stored(bits: &[u32]) -> usize {
    bits.iter().filter(|bits| **bits > 0).count()
}

/// Ranges of a part, for the coefficients that have bits, with nothing in it yet.
pub(super) fn group_ranges(kind: DenseType, group: usize, bits: &[Vec<u32>]) -> Ranges {
    let slots = (TILE / group).max(1);
    let records = bits.iter().map(|bits| 2 * stored(bits)).collect();
    Ranges::Group { group, values: Reals::of(kind, records, slots) }
}

/// As [`group_ranges`].
pub(super) fn token_ranges(kind: DenseType, heads: usize, width: usize, channels: usize, zeros: bool) -> Ranges {
    let stride = if zeros { 2 * LANES } else { LANES };
    Ranges::Token { channels, zeros, values: Reals::new(kind, heads, width / channels * stride, TILE_BLOCKS) }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl Pages for KeyCodes {
    fn packing(&self) -> Packing {
        let [run] = self.layouts[0].runs.as_slice() else { unreachable!("all channels have the same bits") };
        let (channels, zeros, ranges, values) = match &self.ranges {
            Ranges::Group { group, values } => (None, true, (*group, 2 * self.width), values),
            Ranges::Token { channels, zeros, values } => {
                let record = self.width / channels * (1 + usize::from(*zeros)) * LANES;
                (Some(*channels), *zeros, (LANES, record), values)
            }
            Ranges::Fixed { .. } => unreachable!("grids are not covered"),
        };
        Packing {
            heads: self.heads,
            bits: run.bits,
            width: self.width,
            channels,
            zeros,
            codes: (LANES, self.layouts[0].bytes),
            ranges,
            half: matches!(values, Reals::F16(_)),
        }
    }

    fn levels(&self) -> Option<&[f32; 256]> {
        self.levels.as_deref()
    }

    fn code_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8> {
        self.codes.copy(head, records)
    }

    fn range_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8> {
        match &self.ranges {
            Ranges::Group { values, .. } | Ranges::Token { values, .. } => values.range_bytes(head, records),
            Ranges::Fixed { .. } => Vec::new(),
        }
    }
}
