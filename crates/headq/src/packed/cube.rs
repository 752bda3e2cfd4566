//! One token's attention on a device of CubeCL, over codes that stay packed there.
//!
//! The host's pages remain the cache: they are what is saved, truncated and read by every other path. A [`Mirror`] is a copy of one
//! layer's codes and dense tokens on a device, brought up to date at each decode step: codes and ranges go there once, when they are
//! flushed (again only words that a later group completes), and of the dense tokens only the new one. Queries go there and one output
//! comes back, both small.
//!
//! **What it covers** ([`covers`]): base quantizers `kivi`, `token` and `rotated` with 1 to 8 bits, side codes of either kind of scales
//! and either scope, values `token` with 1 to 8 bits and heads of a multiple of 16 channels, keys or values that stay dense, sinks,
//! `center`, GQA, sliding windows, prompts, truncation and saved caches. The rest (`grid`, `klt`, values of mixed widths) goes through
//! tensors.
//!
//! **On the device.** Codes lie in segments that never move: at first 1024 tokens, each as long as all before it up to 8192, rounded up
//! to whole groups and 32 tokens. A segment is one buffer of 32-bit little-endian words:
//! all heads' codes, then all heads' ranges, each head's records one after the other.
//!
//! | | a record of codes | a record of ranges |
//! |---|---|---|
//! | `kivi`, side codes by group | 16 tokens: a row for each channel | a group: scales of all channels, zeros |
//! | `token`, `rotated`, side codes by token | the same | 16 tokens: for each chunk 16 scales, and zeros if any |
//! | values | a token: its rows | a token: for each chunk scale and zero |
//!
//! Rows are those of [`super::rows`], into which codes in lanes are put on the way; ranges are halves or singles as the scheme says.
//! Dense tokens are singles, `[slots, kv_heads, head_dim]`: a slot for each sink, then a ring of R + G slots, or of a power of two that
//! is all tokens' where nothing is coded.
//!
//! **A step** launches: new dense tokens into the rings; scores of each segment of base and of side codes, and of dense keys, into
//! `[heads, tokens]`; softmax of each row; Σp·v of every 64 coded and dense values; their sum. All arithmetic is f32.
//!
//! Held against the host's results on `wgpu` (WGSL, software Vulkan). On `cuda` the same kernels are launched; none has run there yet.

mod kernels;

use std::ops::Range;

use burn::tensor::Device;
use burn_dispatch::DispatchDevice;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::std::tensor::TensorHandle;

use self::kernels::{Form, PIECE, RingLaunch, SOFTMAX_UNITS};
use super::rows::LANES;
use super::stream::Stream;
use crate::budget::HeadShape;
use crate::scheme::{Policy, Quantizer, Scheme};
use crate::seam::AttentionSite;

/// Tokens of the first segment…
const LEAST_SEGMENT: usize = 1024;
/// …and of the longest.
const MOST_SEGMENT: usize = 8192;
/// Codes are sent from a multiple of this many tokens on, so that they begin with a whole word.
const WHOLE_WORDS: usize = 32;

/// Whether the kernels read what a scheme stores; everything else goes through tensors.
pub(super) fn covers(scheme: &Scheme, shape: HeadShape) -> bool {
    // Neither fixed ranges nor coefficients of several widths.
    let keys = scheme.key.is_none_or(|key| !matches!(key.base.quantizer, Quantizer::Grid | Quantizer::Klt));
    // Shorter rows of values do not begin at multiples of 16 bits.
    let values = scheme.value.is_none_or(|v| v.policy == Policy::Token && shape.head_dim.is_multiple_of(LANES));
    keys && values
}

/// How a sequence of codes lies in pages, and in segments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Packing {
    pub heads: usize,
    pub bits: u32,
    /// Coefficients of a token.
    pub width: usize,
    /// Coefficients that share a range; `None` where each has one for a group of tokens.
    pub channels: Option<usize>,
    /// Whether each range has a zero.
    pub zeros: bool,
    /// Tokens of a record of codes, and its bytes.
    pub codes: (usize, usize),
    /// Tokens of a record of ranges, and its numbers.
    pub ranges: (usize, usize),
    /// Whether ranges are halves.
    pub half: bool,
}

/// What a mirror reads of codes in pages.
pub(super) trait Pages {
    /// How they lie.
    fn packing(&self) -> Packing;
    /// The numbers that codes stand for, if not themselves.
    fn levels(&self) -> Option<&[f32; 256]>;
    /// Records of codes of a head.
    fn code_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8>;
    /// Records of ranges of a head.
    fn range_bytes(&self, head: usize, records: Range<usize>) -> Vec<u8>;
}

/// Some tokens' codes on the device.
struct Segment {
    handle: Handle,
    /// First token, and tokens that there is room for.
    start: usize,
    capacity: usize,
}

/// Codes on the device.
struct Codes {
    packing: Packing,
    /// One number where there is no table.
    levels: Handle,
    has_levels: bool,
    segments: Vec<Segment>,
    /// Tokens that are there.
    len: usize,
}

/// Words of a head's codes and of its ranges in a segment.
struct Words {
    codes: usize,
    ranges: usize,
}

impl Codes {
    fn new(client: &Client, pages: &dyn Pages) -> Self {
        let levels = pages.levels().map_or(&[0.0][..], |levels| levels);
        let has_levels = levels.len() > 1;
        let levels = client.create_from_slice(f32::as_bytes(levels));
        Self { packing: pages.packing(), levels, has_levels, segments: Vec::new(), len: 0 }
    }

    fn words(&self, segment: &Segment) -> Words {
        let Packing { codes, ranges, half, .. } = self.packing;
        let number = if half { 2 } else { 4 };
        Words {
            codes: segment.capacity / codes.0 * codes.1 / 4,
            ranges: segment.capacity / ranges.0 * ranges.1 * number / 4,
        }
    }

    /// Brings over what is not there yet of the first `len` tokens.
    fn sync(&mut self, client: &Client, pages: &dyn Pages, len: usize) {
        if len <= self.len {
            return;
        }
        let Packing { heads, codes, ranges, .. } = self.packing;
        let whole = least_common_multiple(WHOLE_WORDS, ranges.0);
        while self.segments.last().map_or(0, |s| s.start + s.capacity) < len {
            let start = self.segments.last().map_or(0, |s| s.start + s.capacity);
            let capacity = start.clamp(LEAST_SEGMENT, MOST_SEGMENT).next_multiple_of(whole);
            let mut segment = Segment { handle: client.empty(4), start, capacity };
            let Words { codes, ranges } = self.words(&segment);
            segment.handle = client.empty(4 * heads * (codes + ranges));
            self.segments.push(segment);
        }
        let (first_code, first_range) = (self.len / WHOLE_WORDS * WHOLE_WORDS, self.len / ranges.0 * ranges.0);
        for segment in &self.segments {
            let words = self.words(segment);
            let end = len.min(segment.start + segment.capacity);
            let write = |at: usize, mut bytes: Vec<u8>| {
                bytes.resize(bytes.len().next_multiple_of(4), 0);
                let rest = segment.handle.size() - (at + bytes.len()) as u64;
                let handle = segment.handle.clone().offset_start(at as u64).offset_end(rest);
                client.write(&handle, cubecl::bytes::Bytes::from_bytes_vec(bytes));
            };
            let records = |first: usize, tokens: usize| {
                let first = first.max(segment.start);
                (first < end).then(|| first / tokens..end.div_ceil(tokens))
            };
            for head in 0..heads {
                if let Some(range) = records(first_code, codes.0) {
                    let before = (range.start - segment.start / codes.0) * codes.1;
                    write(4 * head * words.codes + before, pages.code_bytes(head, range));
                }
                if let Some(range) = records(first_range, ranges.0) {
                    let number = if self.packing.half { 2 } else { 4 };
                    let before = (range.start - segment.start / ranges.0) * ranges.1 * number;
                    let start = 4 * (heads * words.codes + head * words.ranges);
                    write(start + before, pages.range_bytes(head, range));
                }
            }
        }
        self.len = len;
    }

    /// Segments with tokens from `first` on, and which of their tokens those are.
    fn visible(&self, first: usize) -> impl Iterator<Item = (&Segment, Range<usize>)> {
        let len = self.len;
        self.segments.iter().filter_map(move |segment| {
            let start = first.saturating_sub(segment.start);
            let end = len.saturating_sub(segment.start).min(segment.capacity);
            (start < end).then_some((segment, start..end))
        })
    }

    fn form(&self, heads: usize) -> Form {
        let Packing { bits, width, channels, zeros, half, .. } = self.packing;
        Form { bits, width, channels, zeros, half, levels: self.has_levels, share: heads / self.packing.heads }
    }

    fn words_of(&self, segment: &Segment) -> usize {
        let words = self.words(segment);
        self.packing.heads * (words.codes + words.ranges)
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// Dense tokens on the device.
struct Dense {
    handle: Handle,
    sinks: usize,
    /// Slots of the ring.
    slots: usize,
    /// Numbers of a slot.
    row: usize,
    /// Dense tokens before this position are there.
    upto: usize,
}

impl Dense {
    fn new(client: &Client, stream: &Stream, row: usize) -> Self {
        let sinks = stream.first();
        let slots = stream.flush.map_or(LEAST_SEGMENT, |flush| flush.residual + flush.group);
        let handle = client.empty((sinks + slots) * row * size_of::<f32>());
        Self { handle, sinks, slots, row, upto: 0 }
    }

    /// Makes room for all tokens of a stream that stays dense.
    fn reserve(&mut self, client: &Client, stream: &Stream) {
        if stream.flush.is_none() && self.slots < stream.len {
            self.slots = stream.len.next_power_of_two();
            self.handle = client.empty(self.slots * self.row * size_of::<f32>());
            self.upto = 0;
        }
    }

    fn numbers(&self) -> usize {
        (self.sinks + self.slots) * self.row
    }

    /// Stretches of positions that are dense and not there yet.
    fn missing(&self, stream: &Stream) -> [Range<usize>; 2] {
        let window = self.window(stream).start;
        [self.upto..self.sinks.min(stream.len).max(self.upto), self.upto.max(window)..stream.len]
    }

    fn window(&self, stream: &Stream) -> Range<usize> {
        (self.sinks + stream.coded).min(stream.len)..stream.len
    }

    fn ring(&self, stream: &Stream) -> (RingLaunch, usize) {
        let held = self.sinks.min(stream.len);
        let window = self.window(stream);
        let count = held + window.len();
        (RingLaunch::new(self.sinks, self.slots, held, window.start, count), count)
    }
}

/// What a step reads of a layer.
pub(super) struct Step<'a> {
    pub shape: HeadShape,
    pub site: &'a AttentionSite,
    pub keys: &'a Stream,
    pub values: &'a Stream,
    pub key_codes: Option<&'a dyn Pages>,
    pub side: Option<&'a dyn Pages>,
    pub value_codes: Option<&'a dyn Pages>,
    /// Scaled queries `[heads, head_dim]`; the same rotated, where base codes are; with side codes, qU `[heads, rank]`.
    pub queries: Vec<f32>,
    /// Where the queries of base and of side codes begin.
    pub starts: [usize; 2],
}

/// One layer on a device.
pub(super) struct Mirror {
    device: cubecl::Device,
    client: Client,
    keys: Dense,
    values: Dense,
    key_codes: Option<Codes>,
    side: Option<Codes>,
    value_codes: Option<Codes>,
}

/// The device's own handle, where CubeCL runs it.
pub(super) fn device_of(device: &Device) -> Option<cubecl::Device> {
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.clone()),
        _ => None,
    }
}

/// All of a buffer of 32-bit numbers, for a launch.
fn buffer(handle: &Handle) -> BufferArg {
    let len = handle.size() as usize / 4;
    TensorHandle::new_contiguous([len], handle.clone(), u32::cube_type()).binding().into_buffer_arg()
}

fn cubes(units: usize, y: usize, z: usize) -> CubeCount {
    CubeCount::Static(units.div_ceil(PIECE) as u32, y as u32, z as u32)
}

impl Mirror {
    pub fn new(device: cubecl::Device, step: &Step<'_>) -> Self {
        let client = device.client();
        let row = step.shape.kv_heads * step.shape.head_dim;
        Self {
            keys: Dense::new(&client, step.keys, row),
            values: Dense::new(&client, step.values, row),
            key_codes: step.key_codes.map(|pages| Codes::new(&client, pages)),
            side: step.side.map(|pages| Codes::new(&client, pages)),
            value_codes: step.value_codes.map(|pages| Codes::new(&client, pages)),
            device,
            client,
        }
    }

    /// Whether it lies on a device.
    pub fn is_on(&self, device: &cubecl::Device) -> bool {
        self.device == *device
    }

    /// Bytes of its buffers.
    pub fn bytes(&self) -> usize {
        let codes = [&self.key_codes, &self.side, &self.value_codes].into_iter().flatten();
        let words: usize = codes.map(|codes| codes.segments.iter().map(|s| codes.words_of(s)).sum::<usize>()).sum();
        4 * (words + self.keys.numbers() + self.values.numbers())
    }

    /// Forgets codes past the given numbers of tokens, and all dense tokens: which of them are still there is not kept track of.
    pub fn truncate(&mut self, keys: usize, values: usize) {
        for (codes, len) in [(&mut self.key_codes, keys), (&mut self.side, keys), (&mut self.value_codes, values)] {
            if let Some(codes) = codes {
                codes.len = codes.len.min(len);
            }
        }
        (self.keys.upto, self.values.upto) = (0, 0);
    }

    /// Attends one query to all tokens: `[heads, head_dim]`.
    pub fn attend(&mut self, mut step: Step<'_>) -> Vec<f32> {
        let HeadShape { heads, kv_heads, head_dim: width, .. } = step.shape;
        let (len, share, row) = (step.keys.len, heads / kv_heads, kv_heads * width);
        let first = step.site.window.map_or(0, |w| len.saturating_sub(w));
        let client = self.client.clone();
        for (codes, pages, len) in [
            (&mut self.key_codes, step.key_codes, step.keys.coded),
            (&mut self.side, step.side, step.keys.coded),
            (&mut self.value_codes, step.value_codes, step.values.coded),
        ] {
            if let (Some(codes), Some(pages)) = (codes, pages) {
                codes.sync(&client, pages, len);
            }
        }

        // Queries and new dense tokens travel together.
        let mut data = std::mem::take(&mut step.queries);
        let mut places = Vec::new();
        for (dense, stream) in [(&mut self.keys, step.keys), (&mut self.values, step.values)] {
            dense.reserve(&client, stream);
            for positions in dense.missing(stream).into_iter().filter(|p| !p.is_empty()) {
                let start = data.len();
                data.resize(start + positions.len() * row, 0.0);
                for (i, out) in data[start..].chunks_mut(width).enumerate() {
                    stream.read_dense(i % kv_heads, positions.start + i / kv_heads, out);
                }
                places.push((buffer(&dense.handle), (dense.sinks, dense.slots), start, positions));
            }
            dense.upto = stream.len;
        }
        let sent = client.create_from_slice(f32::as_bytes(&data));
        let sent = || buffer(&sent);
        let units = CubeDim::new_1d(PIECE as u32);
        for (dense, (sinks, slots), start, positions) in places {
            let count = positions.len();
            kernels::place::launch(
                &client,
                cubes(count * row, 1, 1),
                units,
                sent(),
                dense,
                start,
                positions.start,
                count,
                sinks,
                slots,
                row,
            );
        }

        // A multiple, so that memory is found again at the next step.
        let stride = len.next_multiple_of(1024);
        let scores = client.empty(heads * stride * size_of::<f32>());
        let scores = || buffer(&scores);
        let sinks = self.keys.sinks;
        let sequences = self.key_codes.iter().zip([(step.starts[0], false)]);
        for (codes, (queries, add)) in sequences.chain(self.side.iter().zip([(step.starts[1], true)])) {
            for (segment, tokens) in codes.visible(first.saturating_sub(sinks)) {
                let words = codes.words(segment);
                kernels::score_codes::launch(
                    &client,
                    cubes(tokens.len(), codes.packing.heads, 1),
                    units,
                    buffer(&segment.handle),
                    buffer(&codes.levels),
                    sent(),
                    scores(),
                    queries,
                    codes.packing.ranges.0,
                    words.codes,
                    codes.packing.heads * words.codes,
                    words.ranges,
                    tokens.start,
                    tokens.end,
                    sinks + segment.start,
                    stride,
                    codes.form(heads),
                    add,
                );
            }
        }
        let (ring, count) = self.keys.ring(step.keys);
        if count > 0 {
            let dense = buffer(&self.keys.handle);
            let count = cubes(count, heads, 1);
            kernels::score_dense::launch(
                &client,
                count,
                units,
                dense,
                sent(),
                scores(),
                ring,
                stride,
                width,
                kv_heads,
                share,
            );
        }
        let softmax_units = CubeDim::new_1d(SOFTMAX_UNITS as u32);
        let rows = CubeCount::Static(heads as u32, 1, 1);
        kernels::softmax::launch(&client, rows, softmax_units, scores(), first, len, stride);

        let sinks = self.values.sinks;
        let visible = || self.value_codes.iter().flat_map(|codes| codes.visible(first.saturating_sub(sinks)));
        let coded: usize = visible().map(|(_, tokens)| tokens.len().div_ceil(PIECE)).sum();
        let (ring, count) = self.values.ring(step.values);
        let pieces = coded + count.div_ceil(PIECE);
        let room = (pieces * heads * width).next_power_of_two();
        let partial = client.empty(room * size_of::<f32>());
        let mut piece = 0;
        for (segment, tokens) in visible() {
            let codes = self.value_codes.as_ref().expect("segments are of codes");
            let words = codes.words(segment);
            kernels::sum_values::launch(
                &client,
                cubes(tokens.len(), kv_heads, width.div_ceil(PIECE)),
                units,
                buffer(&segment.handle),
                scores(),
                buffer(&partial),
                words.codes,
                codes.packing.heads * words.codes,
                words.ranges,
                tokens.start,
                tokens.end,
                sinks + segment.start,
                stride,
                piece,
                codes.form(heads),
                codes.packing.channels.unwrap_or(width),
                kv_heads,
            );
            piece += tokens.len().div_ceil(PIECE);
        }
        if count > 0 {
            kernels::sum_dense::launch(
                &client,
                cubes(count, heads, width.div_ceil(PIECE)),
                units,
                buffer(&self.values.handle),
                scores(),
                buffer(&partial),
                ring,
                first,
                stride,
                piece,
                width,
                kv_heads,
                share,
            );
        }
        let size = heads * width;
        let output = client.empty(size * size_of::<f32>());
        let sum = buffer(&output);
        kernels::collect::launch(&client, cubes(size, 1, 1), units, buffer(&partial), sum, pieces, size);
        let bytes = client.read_one(output).unwrap_or_else(|error| panic!("attention on the device failed: {error:?}"));
        f32::from_bytes(&bytes)[..size].to_vec()
    }
}

/// A layer's mirror, if it has one: made at need, and never shared, so that a clone begins without.
#[derive(Default)]
pub(super) struct Mirrored(pub Option<Box<Mirror>>);

impl Clone for Mirrored {
    fn clone(&self) -> Self {
        Self(None)
    }
}

impl std::fmt::Debug for Mirrored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mirrored({})", self.0.is_some())
    }
}
