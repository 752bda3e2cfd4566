//! Coded keys of one layer: base or side codes, in blocks of 16 tokens.
//!
//! A vector loop scores 16 tokens at a time, channel by channel of the query. Where tokens share a channel's range, codes lie in lanes
//! ([`super::lanes`]), and scales are folded into the query once per group; so do codes that are looked up in a table for each head. Where
//! tokens have ranges of their own, a channel's 16 codes are one row ([`super::rows`]).

use std::ops::Range;
use std::sync::Arc;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use super::cube::{Packing, Pages};
use super::file::Part;
use super::kernels::{self, LookedUp, MOST_QUERIES, TILE};
use super::lanes::Lanes;
use super::paged::Paged;
use super::prefetch::prefetch;
use super::reals::{DenseType, Reals};
use super::rows::{LANES, get, put, row_bytes};
use super::simd::Lane;

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

/// A block of 16 tokens with a row for each channel that has bits.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rows {
    pub runs: Vec<Run>,
    /// Bytes of a block.
    pub bytes: usize,
}

impl Rows {
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

    /// Rows of codes and the channels they belong to.
    fn each(&self) -> impl Iterator<Item = (u32, usize, Range<usize>)> {
        self.runs.iter().flat_map(|run| {
            let row = row_bytes(run.bits, LANES);
            run.channels.clone().enumerate().map(move |(i, channel)| {
                let start = run.start + i * row;
                (run.bits, channel, start..start + row)
            })
        })
    }
}

/// How a head's block of 16 tokens is laid out.
#[derive(Debug, Clone, PartialEq)]
enum Layout {
    /// Row by row: codes whose ranges are those of tokens.
    Rows(Rows),
    /// A lane for each token: codes with ranges that tokens share.
    Lanes {
        lanes: Lanes,
        /// The channel of each code of a lane.
        channels: Vec<usize>,
    },
}

impl Layout {
    /// From the bits of each channel; those without bits are not stored.
    fn lanes(bits: &[u32]) -> Self {
        let channels = stored_channels(bits);
        let bits: Vec<u32> = channels.iter().map(|channel| bits[*channel]).collect();
        Layout::Lanes { lanes: Lanes::new(&bits), channels }
    }

    /// Channels that have bits.
    fn channels(&self) -> Vec<usize> {
        match self {
            Layout::Rows(rows) => rows.runs.iter().flat_map(|run| run.channels.clone()).collect(),
            Layout::Lanes { channels, .. } => channels.clone(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Layout::Rows(rows) => rows.bytes,
            Layout::Lanes { lanes, .. } => lanes.bytes,
        }
    }

    /// Writes a token's codes, one for each channel.
    fn put(&self, block: &mut [u8], lane: usize, codes: &[f32]) {
        match self {
            Layout::Rows(rows) => {
                for (bits, channel, at) in rows.each() {
                    put(&mut block[at], bits, LANES, lane, codes[channel] as u8);
                }
            }
            Layout::Lanes { lanes, channels } => {
                for (code, channel) in channels.iter().enumerate() {
                    lanes.put(block, lane, code, codes[*channel] as u8);
                }
            }
        }
    }

    /// Calls `f` with each stored channel of a token, its bits and its code.
    fn each(&self, block: &[u8], lane: usize, mut f: impl FnMut(usize, u32, u8)) {
        match self {
            Layout::Rows(rows) => rows.each().for_each(|(bits, c, at)| f(c, bits, get(&block[at], bits, LANES, lane))),
            Layout::Lanes { lanes, channels } => {
                channels.iter().enumerate().for_each(|(code, c)| f(*c, lanes.bits(code), lanes.get(block, lane, code)));
            }
        }
    }
}

/// Channels that have bits.
fn stored_channels(bits: &[u32]) -> Vec<usize> {
    (0..bits.len()).filter(|channel| bits[*channel] > 0).collect()
}

/// What turns codes back into numbers.
#[derive(Debug, Clone)]
pub(super) enum Ranges {
    /// A scale and a zero for each channel that has bits, over the tokens of a group: records of scales, then zeros, one for each group.
    Group { group: usize, values: Reals },
    /// A scale, and with `zeros` a zero, for each `channels` neighbouring channels of a token: records for 16 tokens, for each chunk of
    /// channels 16 scales, then 16 zeros.
    Token { channels: usize, zeros: bool, values: Reals },
    /// Fixed by calibration: `[heads, width]` scales and zeros.
    Fixed { scale: Vec<f32>, zero: Vec<f32> },
}

/// The number that each code stands for before its scale.
#[derive(Debug, Clone)]
pub(super) enum Tables {
    /// The code itself.
    None,
    /// Of all codes.
    Same(Arc<[f32; 256]>),
    /// By head and bits − 1, of codes of at most [`LOOKED_UP`](super::lanes::LOOKED_UP) bits.
    ByHead(Arc<[Vec<[f32; 256]>]>),
}

impl Tables {
    /// What codes of so many bits stand for.
    fn of(&self, head: usize, bits: u32) -> Option<&[f32; 256]> {
        match self {
            Tables::None => None,
            Tables::Same(table) => Some(table),
            Tables::ByHead(tables) => tables[head].get(bits as usize - 1),
        }
    }
}

/// Codes of keys, of what a side code keeps of them, or of transformed values.
#[derive(Debug, Clone)]
pub(super) struct KeyCodes {
    heads: usize,
    /// Coefficients of a token, those without bits included.
    width: usize,
    layouts: Vec<Layout>,
    levels: Tables,
    /// Tables of each head as its lanes look codes up; none where they do not.
    looked_up: Vec<Vec<Lane>>,
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
    /// Weights of the channels that have bits: `[count, codes]`.
    stored: Vec<f32>,
    /// What a field's bits count for, where they lie: `[count, fields]`. Of codes that are looked up, weights times scales, in the order
    /// of [`Looks::codes`](super::lanes::Looks::codes).
    fields: Vec<f32>,
}

/// Codes to be scored: one head's, against queries that [`KeyCodes::prepare`] has seen.
#[derive(Clone, Copy)]
pub(super) struct Scored<'a> {
    pub codes: &'a KeyCodes,
    pub head: usize,
    pub queries: &'a Queries,
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub(super) struct Folded {
    parts: [FoldedPart; MOST_PARTS],
    /// Sums of each chunk's query channels: `[chunks, count]`.
    sums: Vec<f32>,
}

/// Buffers of one thread for [`KeyCodes::add_sums`].
#[derive(Debug, Default)]
pub(super) struct CoefficientBuffers {
    /// Weights of the tokens of whole blocks.
    aligned: Vec<f32>,
    /// Sums before scales.
    dots: Vec<f32>,
    record: Vec<f32>,
}

/// Buffers for the codes of a [`Scored`].
#[derive(Debug, Default)]
struct FoldedPart {
    /// Query times scale.
    weights: Vec<f32>,
    /// Records of ranges.
    record: Vec<f32>,
}

/// Codes that are scored together: base and side codes.
const MOST_PARTS: usize = 2;

impl KeyCodes {
    /// No tokens yet.
    ///
    /// # Shapes
    /// - `bits`: `[heads][width]`
    pub fn new(width: usize, bits: &[Vec<u32>], ranges: Ranges, levels: Tables) -> Self {
        let layout = |bits: &Vec<u32>| match ranges {
            Ranges::Token { .. } => Layout::Rows(Rows::new(bits)),
            Ranges::Group { .. } | Ranges::Fixed { .. } => Layout::lanes(bits),
        };
        let layouts: Vec<Layout> = bits.iter().map(layout).collect();
        let codes = Paged::new(layouts.iter().map(Layout::bytes).collect(), TILE_BLOCKS);
        let tables = |(layout, levels): (&Layout, &Vec<[f32; 256]>)| match layout {
            Layout::Rows(_) => Vec::new(),
            Layout::Lanes { lanes, .. } => lanes.tables(levels),
        };
        let looked_up = match &levels {
            Tables::None | Tables::Same(_) => Vec::new(),
            Tables::ByHead(levels) => layouts.iter().zip(levels.iter()).map(tables).collect(),
        };
        Self { heads: bits.len(), width, layouts, levels, looked_up, codes, ranges, len: 0 }
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Coefficients of a token.
    pub fn width(&self) -> usize {
        self.width
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
                let block = self.codes.record_mut(head, (start + i) / LANES);
                self.layouts[head].put(block, (start + i) % LANES, token);
            }
        }
        match &mut self.ranges {
            Ranges::Fixed { .. } => {}
            Ranges::Group { group, values } => {
                let (first, groups) = (start / *group, tokens / *group);
                values.extend(first + groups);
                let per_group = scale.chunks(self.width).zip(zero.chunks(self.width));
                for (i, (scale, zero)) in per_group.enumerate() {
                    let head = i / groups;
                    let channels = self.layouts[head].channels();
                    let of = |all: &[f32]| channels.iter().map(|c| all[*c]).collect::<Vec<_>>();
                    values.put(head, first + i % groups, 0, &of(scale));
                    values.put(head, first + i % groups, channels.len(), &of(zero));
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
        let block = self.codes.record(head, token / LANES);
        let ranges = self.ranges_of(head, token);
        self.layouts[head].each(block, token % LANES, |channel, bits, code| {
            let table = self.levels.of(head, bits);
            let level = table.map_or(f32::from(code), |table| table[usize::from(code)]);
            let [scale, zero] = ranges[channel];
            out[channel] = level * scale + zero;
        });
    }

    /// Scale and zero of each channel of a token; 0 where it has no bits.
    fn ranges_of(&self, head: usize, token: usize) -> Vec<[f32; 2]> {
        match (&self.ranges, &self.layouts[head]) {
            (Ranges::Fixed { scale, zero }, _) => {
                let of_head = head * self.width..(head + 1) * self.width;
                scale[of_head.clone()].iter().zip(&zero[of_head]).map(|(scale, zero)| [*scale, *zero]).collect()
            }
            (Ranges::Group { group, values }, layout) => {
                let channels = layout.channels();
                let mut record = vec![0.0; 2 * channels.len()];
                values.read(head, token / group, &mut record);
                let mut all = vec![[0.0; 2]; self.width];
                for (i, channel) in channels.iter().enumerate() {
                    all[*channel] = [record[i], record[channels.len() + i]];
                }
                all
            }
            (Ranges::Token { channels, zeros, values }, _) => {
                let stride = if *zeros { 2 * LANES } else { LANES };
                let mut block = vec![0.0; self.width / channels * stride];
                values.read(head, token / LANES, &mut block);
                let lane = token % LANES;
                let range = |channel: usize| {
                    let at = channel / channels * stride + lane;
                    [block[at], if *zeros { block[at + LANES] } else { 0.0 }]
                };
                (0..self.width).map(range).collect()
            }
        }
    }

    /// Whether a head has anything coded.
    pub fn stores(&self, head: usize) -> bool {
        self.layouts[head].bytes() > 0
    }

    /// Coefficients of a head up to the last that has bits, to which queries are turned.
    pub fn stored(&self, head: usize) -> usize {
        match &self.layouts[head] {
            Layout::Rows(_) => self.width,
            Layout::Lanes { channels, .. } => channels.last().map_or(0, |last| last + 1),
        }
    }

    /// Makes the forms of queries that the codes of a head are scored with.
    pub fn prepare(&self, head: usize, queries: &mut Queries) {
        queries.stored.clear();
        queries.fields.clear();
        // Queries may stop at the last channel that has bits.
        let width = queries.weights.len() / queries.count;
        let Layout::Lanes { lanes, channels } = &self.layouts[head] else { return };
        if let (Ranges::Fixed { scale, .. }, false) = (&self.ranges, self.looked_up.is_empty()) {
            let scale = &scale[head * self.width..(head + 1) * self.width];
            for weights in queries.weights.chunks(width.max(1)) {
                let channels = lanes.looks.codes.iter().map(|code| channels[*code]);
                queries.fields.extend(channels.map(|c| weights[c] * scale[c]));
            }
            return;
        }
        for weights in queries.weights.chunks(width.max(1)) {
            queries.stored.extend(channels.iter().map(|c| weights[*c]));
            let field = |f: usize| weights[channels[lanes.code(f)]] * lanes.place(f);
            queries.fields.extend((0..lanes.fields()).map(field));
        }
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

    /// Tokens that share a range of each channel; `None` where tokens have ranges of their own, or codes are looked up.
    fn shared_by(&self) -> Option<usize> {
        match &self.ranges {
            Ranges::Fixed { .. } if !self.looked_up.is_empty() => None,
            Ranges::Fixed { .. } => Some(usize::MAX),
            Ranges::Group { group, .. } => Some(*group),
            Ranges::Token { .. } => None,
        }
    }

    /// Records of ranges of some groups, one after the other: scales, then zeros.
    fn records<'a>(&'a self, head: usize, groups: Range<usize>, record: &'a mut Vec<f32>) -> &'a [f32] {
        match (&self.ranges, &self.layouts[head]) {
            (Ranges::Group { values, .. }, _) => values.run(head, groups, record),
            (Ranges::Fixed { scale, zero }, Layout::Lanes { channels, .. }) => {
                record.clear();
                for all in [scale, zero] {
                    record.extend(channels.iter().map(|c| all[head * self.width + c]));
                }
                record
            }
            _ => unreachable!("tokens have no ranges of their own in lanes"),
        }
    }

    /// Adds Σ_t p_qt · ŷ_t of some tokens of a tile to `sums`, in rows of at least `width` numbers for each query, for codes whose ranges are fixed or those of groups; `p` is `[count, TILE]` from the first token on.
    pub fn add_sums(
        &self,
        head: usize,
        tokens: Range<usize>,
        p: &[f32],
        count: usize,
        buffers: &mut CoefficientBuffers,
        sums: &mut [f32],
    ) {
        let Layout::Lanes { lanes, channels } = &self.layouts[head] else { unreachable!("sums are made of lanes") };
        if channels.is_empty() {
            return;
        }
        let CoefficientBuffers { aligned, dots, record } = buffers;
        let stride = sums.len() / count;
        aligned.resize(MOST_QUERIES * TILE, 0.0);
        dots.resize(MOST_QUERIES * self.width, 0.0);
        // Tokens at a time that share ranges, and whose blocks lie in one page.
        let mut at = tokens.start;
        while at < tokens.end {
            let page = (at / LANES / TILE_BLOCKS + 1) * TILE_BLOCKS * LANES;
            let group = match &self.ranges {
                Ranges::Group { group, .. } => (at / group + 1) * group,
                _ => usize::MAX,
            };
            let part = at..tokens.end.min(page).min(group);
            let blocks = part.start / LANES..part.end.div_ceil(LANES);
            let first = part.start - blocks.start * LANES;
            let whole = part.len() == blocks.len() * LANES;
            let own = &p[part.start - tokens.start..];
            let mut totals = [0.0f32; MOST_QUERIES];
            for (q, total) in totals.iter_mut().enumerate().take(count) {
                let own = &own[q * TILE..][..part.len()];
                *total = kernels::lane_sum(own);
                if !whole {
                    let to = &mut aligned[q * TILE..][..blocks.len() * LANES];
                    to.fill(0.0);
                    to[first..first + part.len()].copy_from_slice(own);
                }
            }
            let p = if whole { own } else { &aligned[..] };
            let codes = self.codes.run(head, blocks);
            let of = match self.looked_up.get(head) {
                None => kernels::Coefficients::Codes { codes, layout: lanes },
                Some(tables) => kernels::Coefficients::LookedUp(LookedUp { codes, layout: lanes, tables }),
            };
            kernels::coefficient_sums(of, p, count, &mut dots[..channels.len() * count]);
            let (scale, zero): (&[f32], &[f32]) = match &self.ranges {
                Ranges::Fixed { scale, zero } => {
                    let own = head * self.width..(head + 1) * self.width;
                    (&scale[own.clone()], &zero[own])
                }
                Ranges::Group { group, values } => {
                    let index = part.start / group;
                    values.run(head, index..index + 1, record).split_at(channels.len())
                }
                Ranges::Token { .. } => unreachable!("tokens of transformed values have no ranges of their own"),
            };
            let fixed = matches!(self.ranges, Ranges::Fixed { .. });
            for (code, (&channel, dots)) in channels.iter().zip(dots.chunks(count)).enumerate() {
                let at = if fixed { channel } else { code };
                for (q, (dot, total)) in dots.iter().zip(totals).enumerate() {
                    sums[q * stride + channel] += scale[at].mul_add(*dot, zero[at] * total);
                }
            }
            at = part.end;
        }
    }

    /// Adds the scores of up to a tile of blocks to `scores` `[count, TILE]`; lanes past the last token get what they get.
    ///
    /// `blocks` begin at a multiple of a tile's. Base and side codes of the same groups are read together.
    pub fn add_scores(parts: &[Scored<'_>], blocks: Range<usize>, folded: &mut Folded, scores: &mut [f32]) {
        let mut at = 0;
        while at < parts.len() {
            let shared = parts[at].codes.shared_by();
            let count = parts[at..].iter().take_while(|part| part.codes.shared_by() == shared).count();
            match shared {
                None => {
                    parts[at].add_by_token(blocks.clone(), folded, scores);
                    at += 1;
                }
                Some(group) => {
                    add_by_group(&parts[at..at + count], group, blocks.clone(), folded, scores);
                    at += count;
                }
            }
        }
    }
}

/// Scores of codes whose ranges are shared by the tokens of the same groups.
fn add_by_group(parts: &[Scored<'_>], group: usize, blocks: Range<usize>, folded: &mut Folded, scores: &mut [f32]) {
    let last = parts[0].codes.len - 1;
    let group_of = |token: usize| token.min(last) / group;
    // A tile's groups lie in one page, or it lies in one group.
    let whole = TILE.is_multiple_of(group) && group.is_multiple_of(LANES) || group.is_multiple_of(TILE);
    if whole || group == usize::MAX {
        let groups = group_of(blocks.start * LANES)..group_of(blocks.end * LANES - 1) + 1;
        return score_groups(parts, blocks, groups, group / LANES, folded, scores);
    }
    let start = blocks.start;
    let mut at = start;
    while at < blocks.end {
        let first = group_of(at * LANES);
        let local = (at - start) * LANES;
        // As many blocks as lie in this group alone.
        let alone = (at..blocks.end).take_while(|b| group_of(b * LANES + LANES - 1) == first).count();
        if alone > 0 {
            score_groups(parts, at..at + alone, first..first + 1, alone, folded, &mut scores[local..]);
            at += alone;
            continue;
        }
        // A block of several groups: each group's lanes from a pass of its own.
        for index in first..=group_of(at * LANES + LANES - 1) {
            let mut own = [0.0; MOST_QUERIES * TILE];
            score_groups(parts, at..at + 1, index..index + 1, 1, folded, &mut own);
            let lanes = |token: usize| token.saturating_sub(at * LANES).min(LANES);
            let lanes = lanes(index * group)..lanes((index + 1) * group);
            for q in 0..parts[0].queries.count {
                let to = &mut scores[q * TILE + local..][lanes.clone()];
                for (to, own) in to.iter_mut().zip(&own[q * TILE..][lanes.clone()]) {
                    *to += own;
                }
            }
        }
        at += 1;
    }
}

/// Scores of blocks in groups of `per_group` blocks.
fn score_groups(
    parts: &[Scored<'_>],
    blocks: Range<usize>,
    groups: Range<usize>,
    per_group: usize,
    folded: &mut Folded,
    scores: &mut [f32],
) {
    let count = parts[0].queries.count;
    let mut all: [_; MOST_PARTS] = std::array::from_fn(|_| None);
    for ((part, buffers), to) in parts.iter().zip(&mut folded.parts).zip(&mut all) {
        let Scored { codes, head, queries } = *part;
        let Layout::Lanes { lanes, .. } = &codes.layouts[head] else {
            unreachable!("ranges of groups come with lanes")
        };
        buffers.weights.resize(queries.fields.len(), 0.0);
        *to = Some(kernels::ScorePart {
            codes: codes.codes.run(head, blocks.clone()),
            layout: lanes,
            stored: &queries.stored,
            fields: &queries.fields,
            ranges: codes.records(head, groups.clone(), &mut buffers.record),
            folded: &mut buffers.weights,
        });
    }
    kernels::grouped_scores(&mut all, blocks.len(), per_group, count, scores);
}

impl Scored<'_> {
    /// Scores of codes that are looked up, with scales that [`KeyCodes::prepare`] has put into the queries.
    fn add_looked_up(&self, blocks: Range<usize>, scores: &mut [f32]) {
        let Scored { codes, head, queries } = *self;
        let (Layout::Lanes { lanes: layout, .. }, Some(tables)) = (&codes.layouts[head], codes.looked_up.get(head))
        else {
            unreachable!("codes that are looked up lie in lanes")
        };
        if layout.bytes > 0 {
            let codes = LookedUp { codes: codes.codes.run(head, blocks), layout, tables };
            kernels::looked_up_scores(codes, &queries.fields, queries.count, scores);
        }
    }

    /// Scores of codes whose ranges are those of tokens.
    fn add_by_token(&self, blocks: Range<usize>, folded: &mut Folded, scores: &mut [f32]) {
        let Scored { codes: KeyCodes { width, levels, .. }, head, queries } = *self;
        let (Layout::Rows(rows), Ranges::Token { channels, zeros, values }) =
            (&self.codes.layouts[head], &self.codes.ranges)
        else {
            return self.add_looked_up(blocks, scores);
        };
        let levels = match levels {
            Tables::Same(table) => Some(table.as_ref()),
            Tables::None | Tables::ByHead(_) => None,
        };
        folded.sum_chunks(queries, *channels);
        let ranges = values.run(head, blocks.clone(), &mut folded.parts[0].record);
        let chunks = width / channels;
        let stride = if *zeros { 2 * LANES } else { LANES };
        for (local, codes) in self.codes.codes.run(head, blocks).chunks(rows.bytes).enumerate() {
            let block = kernels::TokenBlock {
                codes,
                runs: &rows.runs,
                levels,
                ranges: &ranges[local * chunks * stride..][..chunks * stride],
                channels: *channels,
                zeros: *zeros,
            };
            let scores = &mut scores[local * LANES..];
            kernels::token_scores(block, &queries.weights, &folded.sums, queries.count, scores);
        }
    }
}

impl Folded {
    fn sum_chunks(&mut self, queries: &Queries, channels: usize) {
        let width = queries.weights.len() / queries.count;
        self.sums.clear();
        for chunk in (0..width).step_by(channels) {
            let sum = |query: &[f32]| query[chunk..chunk + channels].iter().sum::<f32>();
            self.sums.extend(queries.weights.chunks(width).map(sum));
        }
    }
}

/// Ranges of groups of tokens, with nothing in them yet.
///
/// # Shapes
/// - `bits`: `[heads][width]`; channels without bits have no ranges
pub(super) fn group_ranges(kind: DenseType, bits: &[Vec<u32>], group: usize) -> Ranges {
    let records = bits.iter().map(|bits| 2 * stored_channels(bits).len()).collect();
    Ranges::Group { group, values: Reals::new(kind, records, (TILE / group).max(1)) }
}

/// Ranges of `channels` neighbouring channels of a token, with nothing in them yet.
pub(super) fn token_ranges(kind: DenseType, heads: usize, width: usize, channels: usize, zeros: bool) -> Ranges {
    let stride = if zeros { 2 * LANES } else { LANES };
    let records = vec![width / channels * stride; heads];
    Ranges::Token { channels, zeros, values: Reals::new(kind, records, TILE_BLOCKS) }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl Pages for KeyCodes {
    fn packing(&self) -> Packing {
        // What is covered has the same bits in all channels.
        let bits = (self.layouts[0].bytes() * 8 / LANES / self.width) as u32;
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
            bits,
            width: self.width,
            channels,
            zeros,
            codes: (LANES, self.layouts[0].bytes()),
            ranges,
            half: matches!(values, Reals::F16(_)),
        }
    }

    fn levels(&self) -> Option<&[f32; 256]> {
        match &self.levels {
            Tables::Same(table) => Some(table),
            // Tables by head come with fixed ranges, which are not covered.
            Tables::None | Tables::ByHead(_) => None,
        }
    }

    fn code_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8> {
        let pages = records.map(|block| self.codes.record(head, block));
        let Layout::Lanes { .. } = &self.layouts[head] else { return pages.flatten().copied().collect() };
        let rows = Rows::new(&vec![self.packing().bits; self.width]);
        let relaid = |block: &[u8]| {
            let mut to = vec![0; rows.bytes];
            for lane in 0..LANES {
                self.layouts[head].each(block, lane, |channel, _, code| {
                    let row = row_bytes(rows.runs[0].bits, LANES);
                    put(&mut to[channel * row..(channel + 1) * row], rows.runs[0].bits, LANES, lane, code);
                });
            }
            to
        };
        pages.flat_map(relaid).collect()
    }

    fn range_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8> {
        match &self.ranges {
            Ranges::Group { values, .. } | Ranges::Token { values, .. } => values.range_bytes(head, records),
            Ranges::Fixed { .. } => Vec::new(),
        }
    }
}
