//! The kernels of [`super`], for whatever CubeCL compiles to.
//!
//! Buffers of codes are 32-bit words in which every code lies within one word, as planes have 1, 2, 4 or 8 bits and rows begin at
//! multiples of 16.

#![allow(clippy::too_many_arguments, reason = "a launch's buffers and numbers")]

use cubecl::prelude::*;

/// Tokens whose scores one cube makes, and whose values one cube adds up: one unit for each token, or for each of as many channels.
pub(super) const PIECE: usize = 64;
/// Units of a cube that makes one row of probabilities.
pub(super) const SOFTMAX_UNITS: usize = 256;

/// What the compiler knows of a sequence of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub bits: u32,
    /// Coefficients of a token.
    pub width: usize,
    /// Coefficients that share a range; `None` where each has one for a group of tokens.
    pub channels: Option<usize>,
    /// Whether each range has a zero, after the scale.
    pub zeros: bool,
    /// Whether ranges are halves.
    pub half: bool,
    /// Whether codes stand for numbers of a table.
    pub levels: bool,
    /// Query heads that read a head of codes.
    pub share: usize,
}

/// Dense tokens in a ring after the sinks; a launch's numbers.
#[derive(Debug, Clone, Copy, CubeType, CubeLaunch)]
pub(super) struct Ring {
    /// Slots of sinks.
    pub sinks: usize,
    /// Slots after them.
    pub slots: usize,
    /// Sinks that are there.
    pub held: usize,
    /// Position of the first token of the window.
    pub window: usize,
    /// Sinks that are there, and tokens of the window.
    pub count: usize,
}

/// The field of `bits` bits at a bit of a buffer.
#[cube]
fn field(words: &[u32], bit: usize, #[comptime] bits: u32) -> u32 {
    (words[bit / 32] >> ((bit % 32) as u32)) & comptime!((1u32 << bits) - 1)
}

/// One code of a row that begins at a bit of a buffer.
#[cube]
fn code(words: &[u32], row: usize, lane: usize, #[comptime] bits: u32) -> u32 {
    let mut value = 0u32;
    if comptime!(bits & 8 != 0) {
        value |= field(words, row + lane * 8, 8u32);
    }
    if comptime!(bits & 4 != 0) {
        value |= field(words, row + lane * 4, 4u32) << comptime!(bits & 3);
    }
    if comptime!(bits & 2 != 0) {
        let start = comptime!((16 * (bits & 4)) as usize);
        value |= field(words, row + start + lane * 2, 2u32) << comptime!(bits & 1);
    }
    if comptime!(bits & 1 != 0) {
        let start = comptime!((16 * (bits & 6)) as usize);
        value |= field(words, row + start + lane, 1u32);
    }
    value
}

/// One number of a range, counted from a word of a buffer.
#[cube]
fn number(words: &[u32], start: usize, index: usize, #[comptime] half: bool) -> f32 {
    if comptime!(half) {
        // By hand, as not every device has halves.
        let bits = words[start + index / 2] >> (((index % 2) * 16) as u32);
        let exponent = (bits >> 10u32) & 31u32;
        let mantissa = bits & 1023u32;
        let mut value = f32::cast_from(mantissa) * 5.960_464_5e-8f32;
        if exponent != 0u32 {
            value = f32::reinterpret(((exponent + 112u32) << 23u32) | (mantissa << 13u32));
        }
        if (bits & 32768u32) != 0u32 {
            value = -value;
        }
        value
    } else {
        f32::reinterpret(words[start + index])
    }
}

/// Scores of the coded tokens of a segment: `add` to what is there, or instead of it.
///
/// Cubes: pieces of tokens from `first` on, heads of codes. `scores` is `[heads, stride]`, the segment's tokens from `position` on.
#[cube(launch)]
pub(super) fn score_codes(
    words: &[u32],
    levels: &[f32],
    step: &[f32],
    scores: &mut [f32],
    queries: usize,
    group: usize,
    head_words: usize,
    range_start: usize,
    range_words: usize,
    first: usize,
    tokens: usize,
    position: usize,
    stride: usize,
    #[comptime] form: Form,
    #[comptime] add: bool,
) {
    let token = first + ABSOLUTE_POS_X as usize;
    let head = CUBE_POS_Y as usize;
    if token < tokens {
        let share = comptime!(form.share);
        let width = comptime!(form.width);
        let half = comptime!(form.half);
        let bits = comptime!(form.bits);
        let row_bits = comptime!(16 * form.bits as usize);
        let block = token / 16;
        let lane = token % 16;
        let rows = head * head_words * 32 + block * comptime!(width * row_bits);
        let ranges = range_start + head * range_words;
        let weights = queries + head * comptime!(share * width);
        let mut sums = Array::<f32>::new(share);
        #[unroll]
        for q in 0..share {
            sums[q] = 0.0f32;
        }
        let per_token = comptime!(form.channels.is_some());
        let stride_of_chunk = comptime!(if form.zeros { 32usize } else { 16usize });
        let channels = comptime!(form.channels.unwrap_or(width));
        for chunk in 0..comptime!(width / channels) {
            let mut scale = 0.0f32;
            let mut zero = 0.0f32;
            let mut record = 0usize;
            if comptime!(per_token) {
                let at = (block * comptime!(width / channels) + chunk) * stride_of_chunk + lane;
                scale = number(words, ranges, at, half);
                if comptime!(form.zeros) {
                    zero = number(words, ranges, at + 16, half);
                }
            } else {
                record = token / group * comptime!(2 * width);
            }
            for within in 0..channels {
                let channel = chunk * channels + within;
                if comptime!(!per_token) {
                    scale = number(words, ranges, record + channel, half);
                    zero = number(words, ranges, record + width + channel, half);
                }
                let read = code(words, rows + channel * row_bits, lane, bits);
                let mut level = f32::cast_from(read);
                if comptime!(form.levels) {
                    level = levels[read as usize];
                }
                let x = level * scale + zero;
                #[unroll]
                for q in 0..share {
                    sums[q] += step[weights + q * width + channel] * x;
                }
            }
        }
        #[unroll]
        for q in 0..share {
            let at = (head * share + q) * stride + position + token;
            if comptime!(add) {
                scores[at] += sums[q];
            } else {
                scores[at] = sums[q];
            }
        }
    }
}

/// Where a token of some position lies in a ring.
#[cube]
fn slot_of(position: usize, sinks: usize, slots: usize) -> usize {
    let mut slot = position;
    if position >= sinks {
        slot = sinks + (position - sinks) % slots;
    }
    slot
}

/// The position of the i-th dense token.
#[cube]
fn position_of(i: usize, held: usize, window: usize) -> usize {
    let mut position = i;
    if i >= held {
        position = window + i - held;
    }
    position
}

/// Copies rows `[tokens, row]` to the slots of consecutive positions.
#[cube(launch)]
pub(super) fn place(
    step: &[f32],
    dense: &mut [f32],
    start: usize,
    position: usize,
    count: usize,
    sinks: usize,
    slots: usize,
    row: usize,
) {
    let at = ABSOLUTE_POS_X as usize;
    if at < count * row {
        let slot = slot_of(position + at / row, sinks, slots);
        dense[slot * row + at % row] = step[start + at];
    }
}

/// Scores of dense tokens. Cubes: pieces of them, query heads.
#[cube(launch)]
pub(super) fn score_dense(
    dense: &[f32],
    step: &[f32],
    scores: &mut [f32],
    ring: &Ring,
    stride: usize,
    #[comptime] width: usize,
    #[comptime] kv_heads: usize,
    #[comptime] share: usize,
) {
    let i = ABSOLUTE_POS_X as usize;
    let head = CUBE_POS_Y as usize;
    if i < ring.count {
        let position = position_of(i, ring.held, ring.window);
        let slot = slot_of(position, ring.sinks, ring.slots);
        let key = (slot * kv_heads + head / share) * width;
        let query = head * width;
        let mut sum = 0.0f32;
        for c in 0..width {
            sum += step[query + c] * dense[key + c];
        }
        scores[head * stride + position] = sum;
    }
}

/// Scores of positions `first..len` become probabilities. Cubes: query heads.
#[cube(launch)]
pub(super) fn softmax(scores: &mut [f32], first: usize, len: usize, stride: usize) {
    let row = CUBE_POS_X as usize * stride;
    let unit = UNIT_POS_X as usize;
    let mut shared = Shared::<[f32]>::new_slice(SOFTMAX_UNITS);
    let mut most = scores[row + first];
    let mut at = first + unit;
    while at < len {
        let score = scores[row + at];
        if score > most {
            most = score;
        }
        at += SOFTMAX_UNITS;
    }
    shared[unit] = most;
    sync_cube();
    let mut half = comptime!(SOFTMAX_UNITS / 2).runtime();
    while half > 0 {
        if unit < half {
            let other = shared[unit + half];
            if other > shared[unit] {
                shared[unit] = other;
            }
        }
        sync_cube();
        half /= 2;
    }
    most = shared[0];
    sync_cube();
    let mut sum = 0.0f32;
    let mut at = first + unit;
    while at < len {
        let weight = (scores[row + at] - most).exp();
        scores[row + at] = weight;
        sum += weight;
        at += SOFTMAX_UNITS;
    }
    shared[unit] = sum;
    sync_cube();
    half = comptime!(SOFTMAX_UNITS / 2).runtime();
    while half > 0 {
        if unit < half {
            let other = shared[unit + half];
            shared[unit] += other;
        }
        sync_cube();
        half /= 2;
    }
    let share = 1.0f32 / shared[0];
    let mut at = first + unit;
    while at < len {
        scores[row + at] *= share;
        at += SOFTMAX_UNITS;
    }
}

/// Σp·v of each piece of a segment's coded tokens, from `first` on.
///
/// Cubes: pieces, KV heads, pieces of channels. `partial` is `[pieces, heads, width]`, the segment's from `piece` on.
#[cube(launch)]
pub(super) fn sum_values(
    words: &[u32],
    scores: &[f32],
    partial: &mut [f32],
    head_words: usize,
    range_start: usize,
    range_words: usize,
    first: usize,
    tokens: usize,
    position: usize,
    stride: usize,
    piece: usize,
    #[comptime] form: Form,
    #[comptime] channels: usize,
    #[comptime] kv_heads: usize,
) {
    let head = CUBE_POS_Y as usize;
    let channel = CUBE_POS_Z as usize * PIECE + UNIT_POS_X as usize;
    let width = comptime!(form.width);
    if channel < width {
        let share = comptime!(form.share);
        let start = first + CUBE_POS_X as usize * PIECE;
        let mut end = start + PIECE;
        if end > tokens {
            end = tokens;
        }
        let token_bits = comptime!(form.width * form.bits as usize);
        let row = head * head_words * 32 + channel / 16 * comptime!(16 * form.bits as usize);
        let lane = channel % 16;
        let ranges = range_start + head * range_words;
        let record = comptime!(2 * (width / channels));
        let range = channel / channels * 2;
        let mut sums = Array::<f32>::new(share);
        #[unroll]
        for q in 0..share {
            sums[q] = 0.0f32;
        }
        for token in start..end {
            let scale = number(words, ranges, token * record + range, comptime!(form.half));
            let zero = number(words, ranges, token * record + range + 1, comptime!(form.half));
            let read = code(words, row + token * token_bits, lane, comptime!(form.bits));
            let x = f32::cast_from(read) * scale + zero;
            #[unroll]
            for q in 0..share {
                sums[q] += scores[(head * share + q) * stride + position + token] * x;
            }
        }
        let to = (piece + CUBE_POS_X as usize) * comptime!(share * kv_heads);
        #[unroll]
        for q in 0..share {
            partial[(to + head * share + q) * width + channel] = sums[q];
        }
    }
}

/// Σp·v of each piece of the dense tokens. Cubes: pieces, query heads, pieces of channels.
///
/// `partial` is `[pieces, heads, width]`, the dense tokens' from `piece` on.
#[cube(launch)]
pub(super) fn sum_dense(
    dense: &[f32],
    scores: &[f32],
    partial: &mut [f32],
    ring: &Ring,
    first: usize,
    stride: usize,
    piece: usize,
    #[comptime] width: usize,
    #[comptime] kv_heads: usize,
    #[comptime] share: usize,
) {
    let head = CUBE_POS_Y as usize;
    let channel = CUBE_POS_Z as usize * PIECE + UNIT_POS_X as usize;
    if channel < width {
        let start = CUBE_POS_X as usize * PIECE;
        let mut end = start + PIECE;
        if end > ring.count {
            end = ring.count;
        }
        let mut sum = 0.0f32;
        for i in start..end {
            let position = position_of(i, ring.held, ring.window);
            if position >= first {
                let slot = slot_of(position, ring.sinks, ring.slots);
                let value = dense[(slot * kv_heads + head / share) * width + channel];
                sum += scores[head * stride + position] * value;
            }
        }
        let heads = comptime!(kv_heads * share);
        partial[((piece + CUBE_POS_X as usize) * heads + head) * width + channel] = sum;
    }
}

/// Adds up `pieces` pieces of `size` numbers. Units: one for each number.
#[cube(launch)]
pub(super) fn collect(partial: &[f32], output: &mut [f32], pieces: usize, size: usize) {
    let at = ABSOLUTE_POS_X as usize;
    if at < size {
        let mut sum = 0.0f32;
        for piece in 0..pieces {
            sum += partial[piece * size + at];
        }
        output[at] = sum;
    }
}
