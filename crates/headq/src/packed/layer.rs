//! The packed cache of one layer, and one query's attention over it.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::tensor::DType;
use burn::tensor::{Device, Tensor, TensorData};
use rayon::prelude::*;

use super::file::{Counts, Part};
use super::kernels::{self, MOST_QUERIES, TILE};
use super::keys::{CoefficientBuffers, Folded, KeyCodes, Queries, Ranges, Scored, Tables, group_ranges, token_ranges};
use super::reals::{DenseType, Run};
use super::rows::LANES;
use super::stream::{Place, Stream};
use super::values::{NewValues, ValueBuffers, ValueCodes, Widths};
use crate::attention::{LayerState, Resumed};
use crate::budget::HeadShape;
use crate::codec::{CodedKeys, HeadqAttention};
use crate::gaussian::lloyd_max;
use crate::quant::{BaseQuantizer, Stored};
use crate::rotation::kept_rotation;
use crate::scheme::{BaseScheme, KeyScheme, Policy, Quantizer, RangeSource, Scope, SideScales};
use crate::seam::AttentionSite;
use crate::transform::Packed;

/// Tokens of a piece of work, a multiple of a tile: the same whatever the number of threads, so that sums do not depend on it.
const PIECE: usize = 2 * TILE;
/// Tokens times query groups below which threads cost more than they save.
const ALONE: usize = 768;

/// Side codes and what turns queries towards them.
#[derive(Debug, Clone)]
struct Side {
    codes: KeyCodes,
    /// ±Uᵀ of each side head: `[side_heads, rank, head_dim]`.
    decoder: Vec<f32>,
    /// Whether each query head has a code of its own.
    by_query_head: bool,
}

/// Codes of values that are coded as keys are, and what turns them back.
#[derive(Debug, Clone)]
struct Coefficients {
    codes: KeyCodes,
    /// Those that have ranges stored, where those of `codes` have none.
    ranged: Option<KeyCodes>,
    /// S of each head, `[kv_heads, head_dim, head_dim]`, and means, `[kv_heads, head_dim]`; `None` where codes are of the values themselves.
    back: Option<(Vec<f32>, Vec<f32>)>,
}

impl Coefficients {
    fn new(quantizer: &BaseQuantizer, shape: HeadShape) -> Self {
        let Some(side) = quantizer.query_side() else {
            return Self { codes: channel_codes(quantizer.scheme(), shape), ranged: None, back: None };
        };
        let (codes, ranged) = transformed_codes(quantizer);
        let mean = quantizer.offset().expect("transformed values have a mean");
        Self { codes, ranged, back: Some((host(side.swap_dims(1, 2)), host(mean))) }
    }

    fn all(&self) -> impl Iterator<Item = &KeyCodes> {
        std::iter::once(&self.codes).chain(&self.ranged)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut KeyCodes> {
        std::iter::once(&mut self.codes).chain(&mut self.ranged)
    }

    /// Adds Σ_t p_qt · ŷ_t and Σ_t p_qt of some tokens of a tile to `sums` `[count, head_dim + 1]`.
    fn add_sums(
        &self,
        head: usize,
        tokens: Range<usize>,
        p: &[f32],
        count: usize,
        buffers: &mut CoefficientBuffers,
        sums: &mut [f32],
    ) {
        let d = self.codes.width();
        for codes in self.all() {
            codes.add_sums(head, tokens.clone(), p, count, buffers, sums);
        }
        for (p, sums) in p.chunks(TILE).zip(sums.chunks_exact_mut(d + 1)) {
            sums[d] += kernels::lane_sum(&p[..tokens.len()]);
        }
    }

    /// Adds Σ_t p_t · v̂_t to `out`, given what [`Coefficients::add_sums`] adds up: `[head_dim + 1]`.
    fn add_values(&self, head: usize, sums: &[f32], turned: &mut [f32], out: &mut [f32]) {
        let d = self.codes.width();
        let Some((synthesis, mean)) = &self.back else {
            return out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
        };
        kernels::matrix_vector(&synthesis[head * d * d..][..d * d], &sums[..d], turned);
        for (out, (x, mean)) in out.iter_mut().zip(turned.iter().zip(&mean[head * d..])) {
            *out += mean.mul_add(sums[d], *x);
        }
    }

    /// Reads a token back.
    fn read(&self, head: usize, token: usize, out: &mut [f32]) {
        let d = out.len();
        let (mut y, mut own) = (vec![0.0; d], vec![0.0; d]);
        for codes in self.all() {
            codes.read(head, token, &mut own);
            y.iter_mut().zip(&own).for_each(|(y, own)| *y += own);
        }
        let Some((synthesis, mean)) = &self.back else { return out.copy_from_slice(&y) };
        kernels::matrix_vector(&synthesis[head * d * d..][..d * d], &y, out);
        out.iter_mut().zip(&mean[head * d..]).for_each(|(out, mean)| *out += mean);
    }
}

/// Room for codes of each channel, with a range for each group.
fn channel_codes(base: &BaseScheme, shape: HeadShape) -> KeyCodes {
    let bits = vec![vec![base.bits.ceil(); shape.head_dim]; shape.kv_heads];
    KeyCodes::new(shape.head_dim, &bits, group_ranges(base.meta.into(), &bits, base.flush.group), Tables::None)
}

/// Room for the coefficients of a transform: all, or those without stored ranges and those with.
fn transformed_codes(quantizer: &BaseQuantizer) -> (KeyCodes, Option<KeyCodes>) {
    let base = quantizer.scheme();
    let Packed { bits: [fixed, ranged], fixed: (scale, zero), levels } =
        quantizer.packed().expect("the quantizer transforms");
    let width = fixed[0].len();
    let any = |bits: &[Vec<u32>]| bits.iter().flatten().any(|b| *b > 0);
    let of_groups = |bits: &[Vec<u32>]| {
        KeyCodes::new(width, bits, group_ranges(base.meta.into(), bits, base.flush.group), Tables::None)
    };
    if base.ranges == RangeSource::Group {
        return (of_groups(&ranged), None);
    }
    let table = |levels: &Vec<f64>| {
        let mut table = [0.0; 256];
        table.iter_mut().zip(levels).for_each(|(to, from)| *to = *from as f32);
        table
    };
    let tables = match levels {
        None => Tables::None,
        Some(levels) => Tables::ByHead(levels.iter().map(|of_head| of_head.iter().map(table).collect()).collect()),
    };
    (KeyCodes::new(width, &fixed, Ranges::Fixed { scale, zero }, tables), any(&ranged).then(|| of_groups(&ranged)))
}

/// The packed cache of one layer.
#[derive(Debug, Clone)]
pub(super) struct PackedLayer {
    module: HeadqAttention,
    shape: HeadShape,
    pub keys: Stream,
    pub values: Stream,
    pub key_codes: Option<KeyCodes>,
    /// Coefficients of keys that have ranges stored, where those of `key_codes` have none.
    key_ranged: Option<KeyCodes>,
    side: Option<Side>,
    pub value_codes: Option<ValueCodes>,
    /// Of values that are coded as keys are.
    coefficients: Option<Coefficients>,
    /// What turns the queries of each KV head to what base codes are of, where that is not the keys: `[width, head_dim]` each.
    turns: Option<Vec<Arc<[f32]>>>,
    /// μ of `center`: `[kv_heads, head_dim]`.
    offset: Option<Vec<f32>>,
    /// Attention mass of the tokens whose values are not coded yet, after the sinks, `[tokens, kv_heads]`; only under `a2`.
    pub masses: Vec<f32>,
    /// Dense copies reach this many tokens back.
    pub rewind: usize,
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    mirror: super::cube::Mirrored,
}

/// Query heads that are handled together, in each form in which they are needed.
#[derive(Debug, Default)]
struct QueryGroup {
    kv_head: usize,
    /// First query head.
    head: usize,
    count: usize,
    /// Scaled: `[count, head_dim]`.
    plain: Vec<f32>,
    /// As base codes are scored: `[count, head_dim]`.
    base: Queries,
    /// The same for coefficients that have ranges stored beside others that have none.
    ranged: Queries,
    /// qU: `[count, rank]`, or one after the other `[count][1, rank]` where each query head has its own.
    side: Vec<Queries>,
}

/// Buffers that decode steps share.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    groups: Vec<QueryGroup>,
    /// For each group and piece of work a [`Piece`].
    partial: Vec<f32>,
    shifted: Vec<f32>,
    /// Sums of coefficients, and one query's values that they stand for.
    sums: Vec<f32>,
    turned: Vec<f32>,
}

/// Buffers of one thread.
#[derive(Debug, Default)]
struct Buffers {
    folded: Folded,
    values: ValueBuffers,
    coefficients: CoefficientBuffers,
}

/// What a piece of work comes to for a group of queries, in numbers one after the other: m of each query, Σp of each, Σp·v of each, and of
/// transformed values Σp·ŷ and Σp of those in codes.
#[derive(Debug, Clone, Copy)]
struct Piece {
    /// Numbers of a query's values, and of its coefficients.
    values: usize,
    coefficients: usize,
}

impl Piece {
    /// Numbers of one.
    fn len(self) -> usize {
        MOST_QUERIES * (2 + self.values + self.coefficients)
    }

    /// Nothing yet.
    fn clear(self, piece: &mut [f32]) {
        piece[..MOST_QUERIES].fill(f32::NEG_INFINITY);
        piece[MOST_QUERIES..].fill(0.0);
    }

    /// m, Σp, Σp·v and coefficients of `count` queries.
    fn split(self, piece: &mut [f32], count: usize) -> [&mut [f32]; 4] {
        let (max, rest) = piece.split_at_mut(MOST_QUERIES);
        let (sum, rest) = rest.split_at_mut(MOST_QUERIES);
        let (values, coefficients) = rest.split_at_mut(MOST_QUERIES * self.values);
        [
            &mut max[..count],
            &mut sum[..count],
            &mut values[..count * self.values],
            &mut coefficients[..count * self.coefficients],
        ]
    }

    /// Σp·v / Σp of query q over several pieces, and as much of its coefficients; returns the largest score and Σp relative to it.
    fn combine<'a>(
        self,
        pieces: impl Iterator<Item = &'a [f32]> + Clone,
        q: usize,
        out: &mut [f32],
        coefficients: &mut [f32],
    ) -> (f32, f32) {
        let max = pieces.clone().map(|p| p[q]).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        out.fill(0.0);
        coefficients.fill(0.0);
        for piece in pieces.filter(|p| p[MOST_QUERIES + q] > 0.0) {
            let share = (piece[q] - max).exp();
            sum += share * piece[MOST_QUERIES + q];
            let at = 2 * MOST_QUERIES;
            kernels::add_scaled(&piece[at + q * self.values..][..self.values], share, out);
            let at = at + MOST_QUERIES * self.values;
            kernels::add_scaled(&piece[at + q * self.coefficients..][..self.coefficients], share, coefficients);
        }
        out.iter_mut().chain(coefficients).for_each(|x| *x /= sum);
        (max, sum)
    }
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

fn host<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data_as::<f32>().try_to_vec().expect("converted to f32")
}

impl PackedLayer {
    pub fn new(module: HeadqAttention, shape: HeadShape, kind: DenseType, rewind: usize) -> Self {
        let HeadShape { heads, kv_heads, head_dim, .. } = shape;
        let scheme = *module.scheme();
        let codes_of_keys = |key: KeyScheme| {
            let base = &key.base;
            if base.quantizer == Quantizer::Klt {
                return transformed_codes(module.base.as_ref().expect("coded keys have a base quantizer"));
            }
            let meta = base.meta.into();
            let channels = base.channels.unwrap_or(head_dim);
            let bits = vec![vec![base.bits.ceil(); head_dim]; kv_heads];
            let fixed = module.base.as_ref().and_then(|b| b.fixed_ranges());
            let ranges = match base.quantizer {
                Quantizer::Token => token_ranges(meta, kv_heads, head_dim, channels, true),
                Quantizer::Rotated => token_ranges(meta, kv_heads, head_dim, channels, false),
                Quantizer::Kivi | Quantizer::Grid | Quantizer::Klt => match fixed {
                    Some((scale, zero)) => Ranges::Fixed { scale, zero },
                    None => group_ranges(meta, &bits, base.flush.group),
                },
            };
            let levels = match base.quantizer == Quantizer::Rotated {
                false => Tables::None,
                true => {
                    let mut table = [0.0; 256];
                    for (to, from) in table.iter_mut().zip(&lloyd_max(base.bits.ceil()).levels) {
                        *to = *from as f32;
                    }
                    Tables::Same(Arc::new(table))
                }
            };
            (KeyCodes::new(head_dim, &bits, ranges, levels), None)
        };
        let (key_codes, key_ranged) = match scheme.key.map(codes_of_keys) {
            None => (None, None),
            Some((codes, ranged)) => (Some(codes), ranged),
        };
        let side = scheme.key.and_then(|key| key.side.map(|side| (key, side))).map(|(key, side)| {
            let by_query_head = side.scope == Scope::QueryHead;
            let side_heads = if by_query_head { heads } else { kv_heads };
            let meta = key.base.meta.into();
            let bits = vec![vec![side.bits; side.rank]; side_heads];
            let ranges = match side.scales {
                SideScales::Group => group_ranges(meta, &bits, key.base.flush.group),
                SideScales::Token => token_ranges(meta, side_heads, side.rank, side.rank, true),
            };
            let codes = KeyCodes::new(side.rank, &bits, ranges, Tables::None);
            let decoder = module.decoder().expect("a side code has a decoder").swap_dims(1, 2);
            let decoder = host(decoder).into_iter().map(|u| u * side.sign.factor() as f32).collect();
            Side { codes, decoder, by_query_head }
        });
        let coefficients = module.values.as_ref().map(|quantizer| Coefficients::new(quantizer, shape));
        let value_codes = scheme.value.filter(|_| coefficients.is_none()).map(|value| {
            let flush = value.flush(scheme.key.as_ref());
            let widths = if value.policy.mixed() {
                Widths::Mixed { mean: value.bits.ceil(), group: flush.group }
            } else {
                Widths::Same(value.bits.ceil())
            };
            let channels = value.channels.unwrap_or(head_dim);
            ValueCodes::new(kv_heads, head_dim, channels, widths, value.meta.into())
        });
        let stored = |head: usize| key_codes.iter().chain(&key_ranged).map(|codes| codes.stored(head)).max();
        let turns = query_turns(&module, &|head| stored(head).unwrap_or_default(), shape);
        let offset = module.base.as_ref().and_then(|base| base.offset()).map(host);
        Self {
            keys: Stream::new(module.key_flush(), kind, kv_heads, head_dim),
            values: Stream::new(module.value_flush(), kind, kv_heads, head_dim),
            key_codes,
            key_ranged,
            side,
            value_codes,
            coefficients,
            turns,
            offset,
            masses: Vec::new(),
            rewind,
            #[cfg(any(feature = "wgpu", feature = "cuda"))]
            mirror: super::cube::Mirrored::default(),
            module,
            shape,
        }
    }

    pub fn module(&self) -> &HeadqAttention {
        &self.module
    }

    pub fn len(&self) -> usize {
        self.keys.len
    }

    fn weighs(&self) -> bool {
        self.module.scheme().value.is_some_and(|v| v.policy == Policy::A2)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let transformed = self.coefficients.iter().flat_map(Coefficients::all);
        let codes =
            self.key_codes.iter().chain(&self.key_ranged).chain(transformed).map(KeyCodes::bytes).sum::<usize>()
                + self.side.as_ref().map_or(0, |side| side.codes.bytes())
                + self.value_codes.as_ref().map_or(0, ValueCodes::bytes);
        self.keys.bytes() + self.values.bytes() + codes + self.masses.capacity() * size_of::<f32>()
    }

    /// Bytes held on a device.
    pub fn device_bytes(&self) -> usize {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        return self.mirror.0.as_ref().map_or(0, |mirror| mirror.bytes());
        #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
        0
    }

    /// Tokens of keys and values that are coded, and from which on they are held dense.
    pub fn counts(&self) -> Counts {
        let of = |stream: &Stream| [stream.coded, stream.held()];
        Counts { len: self.len(), keys: of(&self.keys), values: of(&self.values) }
    }

    /// Whether some cache of this scheme has these counts.
    pub fn possible(&self, counts: &Counts) -> bool {
        let of = |stream: &Stream, [coded, held]: [usize; 2]| stream.possible(counts.len, coded, held);
        of(&self.keys, counts.keys) && of(&self.values, counts.values)
    }

    /// Everything that is saved of a layer with these counts, by name.
    pub fn parts(&mut self, counts: &Counts) -> Vec<(String, Part<'_>)> {
        let mut all = Vec::new();
        fn add<'a>(group: &str, parts: Vec<(&'static str, Part<'a>)>) -> Vec<(String, Part<'a>)> {
            parts.into_iter().map(|(name, part)| (format!("{group}.{name}"), part)).collect()
        }
        let first_value = self.values.first();
        let [coded, held] = counts.keys;
        all.extend(add("keys", self.keys.parts(counts.len, held).into()));
        all.extend(self.key_codes.as_mut().map(|codes| add("keys", codes.parts(coded))).into_iter().flatten());
        all.extend(self.key_ranged.as_mut().map(|codes| add("keys.ranged", codes.parts(coded))).into_iter().flatten());
        all.extend(self.side.as_mut().map(|side| add("side", side.codes.parts(coded))).into_iter().flatten());
        let [coded, held] = counts.values;
        all.extend(add("values", self.values.parts(counts.len, held).into()));
        all.extend(self.value_codes.as_mut().map(|codes| add("values", codes.parts(coded))).into_iter().flatten());
        for (name, codes) in
            ["values", "values.ranged"].iter().zip(self.coefficients.iter_mut().flat_map(|c| c.all_mut()))
        {
            all.extend(add(name, codes.parts(coded)));
        }
        if self.module.scheme().value.is_some_and(|v| v.policy == Policy::A2) {
            let tokens = counts.len.saturating_sub(first_value + coded);
            let len = tokens * self.shape.kv_heads;
            all.push(("values.masses".into(), Part::Masses { values: &mut self.masses, len }));
        }
        all
    }

    /// Takes over the counts of a saved layer, whose parts are restored.
    pub fn resume(&mut self, counts: &Counts) {
        let ([key_coded, key_held], [value_coded, value_held]) = (counts.keys, counts.values);
        self.keys.resume(counts.len, key_coded, key_held);
        self.values.resume(counts.len, value_coded, value_held);
        for codes in self.key_codes.iter_mut().chain(&mut self.key_ranged) {
            codes.resume(key_coded);
        }
        for codes in self.coefficients.iter_mut().flat_map(Coefficients::all_mut) {
            codes.resume(value_coded);
        }
        if let Some(side) = &mut self.side {
            side.codes.resume(key_coded);
        }
        if let Some(codes) = &mut self.value_codes {
            codes.resume(value_coded);
        }
    }

    /// Shortest length that can be gone back to.
    pub fn shortest(&self) -> usize {
        if self.weighs() && self.len() > 0 { self.len() } else { self.keys.shortest().max(self.values.shortest()) }
    }

    /// Goes back to `len` tokens, at least [`PackedLayer::shortest`].
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len() {
            return;
        }
        let (keys, values) = (self.keys.truncate(len), self.values.truncate(len));
        for codes in self.key_codes.iter_mut().chain(&mut self.key_ranged) {
            codes.truncate(keys);
        }
        for codes in self.coefficients.iter_mut().flat_map(Coefficients::all_mut) {
            codes.truncate(values);
        }
        if let Some(side) = &mut self.side {
            side.codes.truncate(keys);
        }
        if let Some(codes) = &mut self.value_codes {
            codes.truncate(values);
        }
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        if let Some(mirror) = &mut self.mirror.0 {
            mirror.truncate(keys, values);
        }
    }

    /// Whole groups as a tensor for the quantizer: `[1, kv_heads, tokens, head_dim]`.
    fn groups(&self, dense: Vec<f32>, device: &Device) -> Tensor<4> {
        let tokens = dense.len() / (self.shape.kv_heads * self.shape.head_dim);
        Tensor::from_data(TensorData::new(dense, [1, self.shape.kv_heads, tokens, self.shape.head_dim]), device)
    }

    /// Codes the keys and values that are due.
    ///
    /// # Shapes
    /// - `masses`: `[kv_heads, tokens]` of the values that are due, under `a2`
    fn flush(&mut self, masses: Option<Vec<f32>>, device: &Device) {
        let due = self.keys.due();
        if !due.is_empty() {
            let keys = self.groups(self.keys.dense(due.clone()), device);
            let (base, side) = self.module.store_keys(keys);
            let base = HostCodes::of(base);
            self.key_codes.iter_mut().chain(&mut self.key_ranged).for_each(|codes| base.append_to(codes));
            if let (Some(to), Some(side)) = (&mut self.side, side) {
                HostCodes::of(side).append_to(&mut to.codes);
            }
        }
        self.keys.coded_up_to(due.end, self.rewind);
        let due = self.values.due();
        if !due.is_empty() {
            let values = self.groups(self.values.dense(due.clone()), device);
            let masses = masses
                .map(|m| Tensor::<4>::from_data(TensorData::new(m, [1, self.shape.kv_heads, due.len(), 1]), device));
            if let Some(stored) = self.module.store_coefficients(values.clone()) {
                let stored = HostCodes::of(stored);
                let codes = self.coefficients.as_mut().expect("values that are due have codes");
                codes.all_mut().for_each(|codes| stored.append_to(codes));
                return self.values.coded_up_to(due.end, self.rewind);
            }
            let stored = self.module.store_values(values, self.values.first() + due.start, masses);
            let stored = stored.expect("values that are due have a scheme");
            let codes = self.value_codes.as_mut().expect("values that are due have codes");
            let light = HostValues::of(stored.light);
            match stored.heavy {
                None => codes.append(&light.view()),
                Some((map, more)) => {
                    let map: Vec<bool> = map.into_data().iter::<bool>().collect();
                    codes.append_mixed(&map, &HostValues::of(more).view(), &light.view());
                }
            }
        }
        self.values.coded_up_to(due.end, self.rewind);
    }

    /// Appends tokens as they come from a model.
    ///
    /// # Shapes
    /// - `keys`, `values`: `[1, kv_heads, tokens, head_dim]`
    /// - `masses`: under `a2`, of all values not coded before this call: `[1, kv_heads, tokens, 1]`, after the sinks; `None` is as if no
    ///   query had read the new tokens
    pub fn extend(&mut self, keys: Tensor<4>, values: Tensor<4>, masses: Option<Tensor<4>>) {
        let device = keys.device();
        let keys = host(self.module.shift_keys(keys));
        let heads = self.shape.kv_heads;
        let Some(masses) = masses.filter(|_| self.weighs()) else {
            self.keys.append(&keys);
            self.values.append(&host(values));
            let masses = self.weighs().then(|| self.take_masses());
            let left = self.len().saturating_sub(self.values.first() + self.values.due().end);
            self.masses.resize(if self.weighs() { left * heads } else { 0 }, 0.0);
            return self.flush(masses, &device);
        };
        // Due and left behind are known only once the tokens are there.
        self.keys.append(&keys);
        self.values.append(&host(values));
        let tokens = masses.dims()[2];
        let masses = host(masses);
        let due = self.values.due().len();
        let of = |range: Range<usize>| range.flat_map(|j| (0..heads).map(move |h| (h, j)));
        self.masses = of(due..tokens).map(|(h, j)| masses[h * tokens + j]).collect();
        let due = (0..heads).flat_map(|h| masses[h * tokens..][..due].to_vec()).collect();
        self.flush(Some(due), &device);
    }

    /// Appends one token and attends its query: [`crate::DecodeAttention::attend_one`].
    pub fn attend_one(
        &mut self,
        site: &AttentionSite,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        self.append_one(k, v, &mut scratch.shifted, &Device::flex());
        self.prepare(site, q, &mut scratch.groups);
        let groups = &scratch.groups[..self.group_count()];
        let (d, end) = (self.shape.head_dim, self.len());
        let first = site.window.map_or(0, |w| end.saturating_sub(w));
        // Tiles begin at the sinks' end, so that a tile's codes are whole blocks of one page.
        let (sinks, tile) = (self.keys.first().min(end), self.tile());
        let tile_start = |at: usize| if at < sinks { at / tile * tile } else { sinks + (at - sinks) / tile * tile };
        let begin = tile_start(first);
        let base = begin.max(sinks);
        let pieces = (end - base).div_ceil(PIECE).max(1);
        let piece = self.piece();
        let record = groups.len() * piece.len();
        scratch.partial.resize(pieces * record, 0.0);
        scratch.sums.resize(piece.coefficients, 0.0);
        scratch.turned.resize(d, 0.0);
        let work = |(piece, partial): (usize, &mut [f32])| {
            let start = if piece == 0 { begin } else { base + piece * PIECE };
            let tokens = start..(base + (piece + 1) * PIECE).min(end);
            BUFFERS.with_borrow_mut(|buffers| self.attend_piece(groups, tokens, first, sinks, partial, buffers));
        };
        let partial = &mut scratch.partial[..pieces * record];
        if (end - begin) * groups.len() < ALONE {
            partial.chunks_mut(record).enumerate().for_each(work);
        } else {
            partial.par_chunks_mut(record).enumerate().for_each(work);
        }
        let mut reading = [(f32::NEG_INFINITY, 0.0f32); MOST_QUERIES];
        for (i, group) in groups.iter().enumerate() {
            let own = piece.len();
            let parts = scratch.partial.chunks(record).map(|pieces| &pieces[i * own..(i + 1) * own]);
            for (q, reading) in reading.iter_mut().enumerate().take(group.count) {
                let out = &mut out[(group.head + q) * d..][..d];
                *reading = piece.combine(parts.clone(), q, out, &mut scratch.sums);
                if let Some(coefficients) = &self.coefficients {
                    coefficients.add_values(group.kv_head, &scratch.sums, &mut scratch.turned, out);
                }
            }
            if self.weighs() {
                let mut masses = std::mem::take(&mut self.masses);
                BUFFERS.with_borrow_mut(|buffers| self.weigh(group, &reading, first, &mut masses, buffers));
                self.masses = masses;
            }
        }
    }

    /// Appends one token, and codes on `device` what is due.
    fn append_one(&mut self, k: &[f32], v: &[f32], shifted: &mut Vec<f32>, device: &Device) {
        let k = match &self.offset {
            None => k,
            Some(offset) => {
                shifted.clear();
                shifted.extend(k.iter().zip(offset).map(|(k, mean)| k - mean));
                shifted
            }
        };
        self.keys.append(k);
        self.values.append(v);
        let masses = self.weighs().then(|| self.take_masses());
        self.flush(masses, device);
    }

    /// As [`PackedLayer::attend_one`], on the device of the tensors, if [`super::cube`] covers it; else nothing is done.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub fn attend_on_device(
        &mut self,
        site: &AttentionSite,
        q: &Tensor<4>,
        k: &Tensor<4>,
        v: &Tensor<4>,
    ) -> Option<Tensor<4>> {
        use super::cube;
        let plain = [q, k, v].iter().all(|x| x.dtype() == DType::F32 && !x.is_autodiff());
        if !plain || !cube::covers(self.module.scheme(), self.shape) {
            return None;
        }
        let (device, shape) = (q.device(), q.shape());
        let place = cube::device_of(&device)?;
        let [q, k, v] = [q, k, v].map(|x| host(x.clone()));
        self.append_one(&k, &v, &mut Vec::new(), &device);
        let HeadShape { heads, kv_heads, head_dim: d, .. } = self.shape;
        let mut queries: Vec<f32> = q.iter().map(|q| q * site.scale as f32).collect();
        let base = self.turns.as_ref().map_or(0, |turns| {
            append_turned(&mut queries, heads, d, d, |head| turns[head / (heads / kv_heads)].as_ref())
        });
        let side = self.side.as_ref().map_or(0, |side| {
            let rank = side.codes.width();
            let basis = |head: usize| if side.by_query_head { head } else { head / (heads / kv_heads) };
            let matrix = |head: usize| &side.decoder[basis(head) * rank * d..][..rank * d];
            append_turned(&mut queries, heads, d, rank, matrix)
        });
        fn pages<P: cube::Pages>(codes: &P) -> &dyn cube::Pages {
            codes
        }
        let step = cube::Step {
            shape: self.shape,
            site,
            keys: &self.keys,
            values: &self.values,
            key_codes: self.key_codes.as_ref().map(pages),
            side: self.side.as_ref().map(|side| pages(&side.codes)),
            value_codes: self.value_codes.as_ref().map(pages),
            queries,
            starts: [base, side],
        };
        let kept = self.mirror.0.take().filter(|mirror| mirror.is_on(&place));
        let mut mirror = kept.unwrap_or_else(|| Box::new(cube::Mirror::new(place, &step)));
        let out = mirror.attend(step);
        self.mirror.0 = Some(mirror);
        Some(Tensor::from_data(TensorData::new(out, shape), &device))
    }

    /// Masses of the values that are due, which are no longer needed then: `[kv_heads, tokens]`.
    fn take_masses(&mut self) -> Vec<f32> {
        let (due, heads) = (self.values.due().len(), self.shape.kv_heads);
        // A token that is coded as soon as it is there has been seen by no query.
        self.masses.resize(self.masses.len().max(due * heads), 0.0);
        let taken: Vec<f32> = self.masses.drain(..due * heads).collect();
        (0..heads * due).map(|i| taken[i % due * heads + i / due]).collect()
    }

    /// Adds p² of one query group to the masses of the values that are not coded yet.
    fn weigh(
        &self,
        group: &QueryGroup,
        reading: &[(f32, f32); MOST_QUERIES],
        first: usize,
        masses: &mut Vec<f32>,
        buffers: &mut Buffers,
    ) {
        let heads = self.shape.kv_heads;
        let start = self.values.first() + self.values.coded;
        masses.resize(self.len().saturating_sub(start) * heads, 0.0);
        let mut scores = [0.0; MOST_QUERIES * TILE];
        // Scores are made again, tile by tile as before.
        let sinks = self.keys.first().min(self.len());
        let mut at = start.max(first);
        while at < self.len() {
            let tile = if at < sinks {
                at / TILE * TILE..(at / TILE * TILE + TILE).min(sinks)
            } else {
                let from = sinks + (at - sinks) / TILE * TILE;
                from..(from + TILE).min(self.len())
            };
            self.score_tile(group, tile.clone(), self.keys.ahead(group.kv_head, &(0..0)), &mut scores, buffers);
            for j in at..tile.end {
                let of = |q: usize| (scores[q * TILE + j - tile.start] - reading[q].0).exp() / reading[q].1;
                masses[(j - start) * heads + group.kv_head] += (0..group.count).map(|q| of(q).powi(2)).sum::<f32>();
            }
            at = tile.end;
        }
    }

    fn group_count(&self) -> usize {
        self.shape.kv_heads * (self.shape.heads / self.shape.kv_heads).div_ceil(MOST_QUERIES)
    }

    /// Queries in each form in which they are needed.
    fn prepare(&self, site: &AttentionSite, q: &[f32], groups: &mut Vec<QueryGroup>) {
        let HeadShape { heads, kv_heads, head_dim: d, .. } = self.shape;
        let (share, scale) = (heads / kv_heads, site.scale as f32);
        groups.resize_with(self.group_count().max(groups.len()), QueryGroup::default);
        let per_head = share.div_ceil(MOST_QUERIES);
        for (i, group) in groups.iter_mut().take(kv_heads * per_head).enumerate() {
            let within = i % per_head * MOST_QUERIES;
            group.kv_head = i / per_head;
            group.head = group.kv_head * share + within;
            group.count = (share - within).min(MOST_QUERIES);
            let own = &q[group.head * d..(group.head + group.count) * d];
            group.plain.clear();
            group.plain.extend(own.iter().map(|q| q * scale));
            if let Some(codes) = &self.key_codes {
                let turn = self.turns.as_ref().map(|turns| turns[group.kv_head].as_ref());
                group.base.turn(turn, &group.plain, d, group.count);
                codes.prepare(group.kv_head, &mut group.base);
                if let Some(ranged) = &self.key_ranged {
                    group.ranged.weights.clone_from(&group.base.weights);
                    group.ranged.count = group.count;
                    ranged.prepare(group.kv_head, &mut group.ranged);
                }
            }
            if let Some(side) = &self.side {
                let rank = side.codes.width();
                let matrix = |head: usize| &side.decoder[head * rank * d..][..rank * d];
                if side.by_query_head {
                    group.side.resize_with(group.count.max(group.side.len()), Queries::default);
                    for (q, (to, plain)) in group.side.iter_mut().zip(group.plain.chunks(d)).enumerate() {
                        to.turn(Some(matrix(group.head + q)), plain, d, 1);
                        side.codes.prepare(group.head + q, to);
                    }
                } else {
                    group.side.resize_with(group.side.len().max(1), Queries::default);
                    group.side[0].turn(Some(matrix(group.kv_head)), &group.plain, d, group.count);
                    side.codes.prepare(group.kv_head, &mut group.side[0]);
                }
            }
        }
    }

    /// What a piece of work comes to.
    fn piece(&self) -> Piece {
        let d = self.shape.head_dim;
        Piece { values: d, coefficients: if self.coefficients.is_some() { d + 1 } else { 0 } }
    }

    /// Tokens of a tile: fewer where dense ones, which are many bytes, must stay in the first-level cache until they are read.
    fn tile(&self) -> usize {
        let coded = self.value_codes.is_some() || self.coefficients.is_some();
        if self.key_codes.is_some() && coded { TILE } else { TILE / 2 }
    }

    /// Online softmax over some tokens, tile by tile and in each tile group by group, since heads lie beside each other in pages; for
    /// each group a [`Piece`].
    fn attend_piece(
        &self,
        groups: &[QueryGroup],
        tokens: Range<usize>,
        first: usize,
        sinks: usize,
        partial: &mut [f32],
        buffers: &mut Buffers,
    ) {
        let (piece, size) = (self.piece(), self.tile());
        let record = piece.len();
        partial.chunks_mut(record).for_each(|partial| piece.clear(partial));
        let mut scores = kernels::Aligned([0.0; MOST_QUERIES * TILE]);
        let scores = &mut scores.0;
        let mut at = tokens.start;
        while at < tokens.end {
            // A piece may begin within the sinks' tiles and end in those of codes.
            let to = if at < sinks { (at + size).min(sinks) } else { at + size - (at - sinks) % size };
            let tile = at..to.min(tokens.end);
            at = tile.end;
            for (i, (group, partial)) in groups.iter().zip(partial.chunks_mut(record)).enumerate() {
                // What comes next: this tile of the next group, or the next tile of the first.
                let (next, then) = match groups.get(i + 1) {
                    Some(group) => (group, tile.clone()),
                    None => (&groups[0], at..(at + size).min(self.len())),
                };
                // In four parts, as the machine fetches only so many lines at a time, and would wait for the others.
                let middle = (then.start + size / 2).min(then.end);
                let [soon, later] = [then.start..middle, middle..then.end];
                self.prefetch_keys(next, &soon);
                let values = self.values.ahead(group.kv_head, &tile);
                self.score_tile(group, tile.clone(), values, scores, buffers);
                self.prefetch_keys(next, &later);
                if tile.end <= first {
                    self.prefetch_values(next, &then);
                    continue;
                }
                let [max, sum, out, sums] = piece.split(partial, group.count);
                for q in 0..group.count {
                    scores[q * TILE..][..first.saturating_sub(tile.start)].fill(f32::NEG_INFINITY);
                }
                kernels::online_softmax(scores, tile.len(), max, sum, [out, sums]);
                self.prefetch_values(next, &soon);
                let keys = self.keys.ahead(next.kv_head, &then);
                self.read_tile(group, tile.clone(), keys, scores, [out, sums], buffers);
                self.prefetch_values(next, &later);
            }
        }
    }

    /// Starts to fetch the key codes of a tile.
    fn prefetch_keys(&self, group: &QueryGroup, tile: &Range<usize>) {
        let tokens = self.keys.coded_of(tile);
        if let Some(codes) = self.key_codes.as_ref().filter(|_| !tokens.is_empty()) {
            codes.prefetch(group.kv_head, &tokens);
            if let Some(ranged) = &self.key_ranged {
                ranged.prefetch(group.kv_head, &tokens);
            }
            if let Some(side) = self.side.as_ref().filter(|side| !side.by_query_head) {
                side.codes.prefetch(group.kv_head, &tokens);
            }
        }
    }

    /// Starts to fetch the value codes of a tile.
    fn prefetch_values(&self, group: &QueryGroup, tile: &Range<usize>) {
        let tokens = self.values.coded_of(tile);
        if let Some(codes) = self.value_codes.as_ref().filter(|_| !tokens.is_empty()) {
            codes.prefetch(group.kv_head, &tokens);
        }
        for codes in self.coefficients.iter().filter(|_| !tokens.is_empty()).flat_map(Coefficients::all) {
            codes.prefetch(group.kv_head, &tokens);
        }
    }

    /// Scores of a tile's tokens: `[count, TILE]`; `ahead` is what is read next.
    fn score_tile(
        &self,
        group: &QueryGroup,
        tile: Range<usize>,
        ahead: Run<'_>,
        scores: &mut [f32],
        buffers: &mut Buffers,
    ) {
        scores.fill(0.0);
        let d = self.shape.head_dim;
        for (offset, place) in self.keys.places(tile) {
            match place {
                Place::Codes(tokens) => {
                    debug_assert!(tokens.start.is_multiple_of(LANES), "tiles begin with whole blocks");
                    let blocks = tokens.start / LANES..tokens.end.div_ceil(LANES);
                    // Lanes past the last coded token are dense tokens' or nobody's: they are made anew below.
                    let used = offset + tokens.len();
                    self.score_codes(group, blocks, &mut buffers.folded, &mut scores[offset..]);
                    for q in 0..group.count {
                        scores[q * TILE + used..(q + 1) * TILE].fill(0.0);
                    }
                }
                dense => self.keys.each_dense(group.kv_head, &dense, |before, keys| {
                    let scores = &mut scores[offset + before..];
                    let (queries, count) = (&group.plain, group.count);
                    match (keys, &ahead) {
                        (Run::F16(keys), Run::F16(next)) => {
                            kernels::dense_scores(keys, next, queries, d, count, scores)
                        }
                        (Run::F32(keys), Run::F32(next)) => {
                            kernels::dense_scores(keys, next, queries, d, count, scores)
                        }
                        _ => unreachable!("keys and values are held alike"),
                    }
                }),
            }
        }
    }

    /// Adds the scores of blocks of base and side codes.
    fn score_codes(&self, group: &QueryGroup, blocks: Range<usize>, folded: &mut Folded, scores: &mut [f32]) {
        let codes = self.key_codes.as_ref().expect("coded keys have codes");
        let head = group.kv_head;
        if let Some(ranged) = self.key_ranged.as_ref().filter(|codes| codes.stores(head)) {
            let ranged = Scored { codes: ranged, head, queries: &group.ranged };
            KeyCodes::add_scores(&[ranged], blocks.clone(), folded, scores);
        }
        let base = [Scored { codes, head, queries: &group.base }];
        // A head may have no bits at all.
        let base = if codes.stores(head) { &base[..] } else { &[] };
        let Some(side) = &self.side else { return KeyCodes::add_scores(base, blocks, folded, scores) };
        let own = |head: usize, q: usize| Scored { codes: &side.codes, head, queries: &group.side[q] };
        if !side.by_query_head {
            return match base {
                [base] => KeyCodes::add_scores(&[*base, own(head, 0)], blocks, folded, scores),
                _ => KeyCodes::add_scores(&[own(head, 0)], blocks, folded, scores),
            };
        }
        KeyCodes::add_scores(base, blocks.clone(), folded, scores);
        for q in 0..group.count {
            KeyCodes::add_scores(&[own(group.head + q, q)], blocks.clone(), folded, &mut scores[q * TILE..]);
        }
    }

    /// Adds Σp·v of a tile's tokens to `out` `[count, head_dim]`, of transformed ones coefficients to `sums`; `ahead` is what is read next.
    fn read_tile(
        &self,
        group: &QueryGroup,
        tile: Range<usize>,
        ahead: Run<'_>,
        p: &[f32],
        [out, sums]: [&mut [f32]; 2],
        buffers: &mut Buffers,
    ) {
        let d = self.shape.head_dim;
        for (offset, place) in self.values.places(tile) {
            match (place, &self.coefficients) {
                (Place::Codes(tokens), Some(coefficients)) => {
                    let (p, buffers) = (&p[offset..], &mut buffers.coefficients);
                    coefficients.add_sums(group.kv_head, tokens, p, group.count, buffers, sums);
                }
                (Place::Codes(tokens), None) => {
                    let codes = self.value_codes.as_ref().expect("coded values have codes");
                    codes.add_values(group.kv_head, tokens, &p[offset..], group.count, &mut buffers.values, out);
                }
                (dense, _) => self.values.each_dense(group.kv_head, &dense, |before, values| {
                    let (p, count) = (&p[offset + before..], group.count);
                    match (values, &ahead) {
                        (Run::F16(values), Run::F16(next)) => kernels::dense_values(values, next, p, d, count, out),
                        (Run::F32(values), Run::F32(next)) => kernels::dense_values(values, next, p, d, count, out),
                        _ => unreachable!("keys and values are held alike"),
                    }
                }),
            }
        }
    }

    /// The state that the same tokens would have left in tensors, for calls with many new tokens.
    pub fn to_state(&self, device: &Device) -> LayerState {
        let HeadShape { heads, kv_heads, head_dim: d, .. } = self.shape;
        let tensor = |data: Vec<f32>, heads: usize, width: usize| {
            let tokens = data.len() / (heads * width);
            (tokens > 0).then(|| Tensor::<4>::from_data(TensorData::new(data, [1, heads, tokens, width]), device))
        };
        let read = |codes: &KeyCodes, heads: usize, factor: f32| {
            let mut all = vec![0.0; heads * codes.len() * codes.width()];
            for (i, out) in all.chunks_mut(codes.width()).enumerate() {
                codes.read(i / codes.len(), i % codes.len(), out);
                out.iter_mut().for_each(|x| *x *= factor);
            }
            all
        };
        let coded = self.key_codes.as_ref().filter(|codes| codes.len() > 0).map(|codes| {
            let mut all = read(codes, kv_heads, 1.0);
            if let Some(ranged) = &self.key_ranged {
                all.iter_mut().zip(read(ranged, kv_heads, 1.0)).for_each(|(all, own)| *all += own);
            }
            let base = tensor(all, kv_heads, d).expect("some tokens");
            let base = match &self.turns {
                None => base,
                Some(turns) => {
                    // Scores are (Tq)·y for all q, so that y stands for Tᵀy; coefficients that are not stored are 0.
                    let mut back = vec![0.0; kv_heads * d * d];
                    back.chunks_mut(d * d).zip(turns).for_each(|(back, turn)| back[..turn.len()].copy_from_slice(turn));
                    base.matmul(Tensor::<4>::from_data(TensorData::new(back, [1, kv_heads, d, d]), device))
                }
            };
            let side = self.side.as_ref().map(|side| {
                let side_heads = if side.by_query_head { heads } else { kv_heads };
                let sign = self.module.scheme().side().map_or(1.0, |s| s.sign.factor() as f32);
                tensor(read(&side.codes, side_heads, sign), side_heads, side.codes.width()).expect("some tokens")
            });
            CodedKeys { base, side }
        });
        let transformed = self.coefficients.as_ref().and_then(|values| {
            let tokens = values.codes.len();
            let mut all = vec![0.0; kv_heads * tokens * d];
            all.chunks_mut(d).enumerate().for_each(|(i, out)| values.read(i / tokens, i % tokens, out));
            tensor(all, kv_heads, d)
        });
        let coded_values = self.value_codes.as_ref().and_then(|codes| {
            let mut all = vec![0.0; kv_heads * codes.len() * d];
            for (i, out) in all.chunks_mut(d).enumerate() {
                codes.read(i / codes.len(), i % codes.len(), out);
            }
            tensor(all, kv_heads, d)
        });
        let dense = |stream: &Stream| {
            let window = stream.coded..stream.len.saturating_sub(stream.first()).max(stream.coded);
            (tensor(stream.dense_sinks(), kv_heads, d), tensor(stream.dense(window), kv_heads, d))
        };
        let heads_first = |masses: &[f32]| {
            let tokens = masses.len() / kv_heads;
            tensor((0..masses.len()).map(|i| masses[i % tokens * kv_heads + i / tokens]).collect(), kv_heads, 1)
        };
        let masses = if self.masses.is_empty() { None } else { heads_first(&self.masses) };
        let (sinks, window) = dense(&self.keys);
        let keys = Resumed { flush: self.keys.flush, coded, coded_len: self.keys.coded, sinks, window };
        let (sinks, window) = dense(&self.values);
        let flush = self.values.flush;
        let values =
            Resumed { flush, coded: transformed.or(coded_values), coded_len: self.values.coded, sinks, window };
        LayerState::resumed(self.keys.kind, self.len(), keys, values, masses)
    }
}

impl Queries {
    /// y = Mx of each query: `[count, rows]`; `None` is the identity.
    fn turn(&mut self, matrix: Option<&[f32]>, plain: &[f32], width: usize, count: usize) {
        self.count = count;
        match matrix {
            None => {
                self.weights.clear();
                self.weights.extend_from_slice(plain);
            }
            Some(matrix) => {
                let rows = matrix.len() / width;
                self.weights.resize(rows * count, 0.0);
                for (plain, turned) in plain.chunks(width).zip(self.weights.chunks_mut(rows)) {
                    kernels::matrix_vector(matrix, plain, turned);
                }
            }
        }
    }
}

/// The matrices of [`PackedLayer::turns`], with as many rows for each KV head as it has coefficients `stored`; `None` where codes are of the
/// keys themselves.
fn query_turns(module: &HeadqAttention, stored: &dyn Fn(usize) -> usize, shape: HeadShape) -> Option<Vec<Arc<[f32]>>> {
    let (d, base) = (shape.head_dim, module.base.as_ref()?);
    if base.scheme().quantizer == Quantizer::Rotated {
        let matrix = kept_rotation(d);
        let turned: Arc<[f32]> = (0..d * d).map(|at| matrix[at % d * d + at / d]).collect();
        return Some(vec![turned; shape.kv_heads]);
    }
    let all = host(base.query_side()?);
    let of_head = |(head, rows): (usize, &[f32])| rows[..stored(head) * d].into();
    Some(all.chunks(d * d).enumerate().map(of_head).collect())
}

/// Appends Mx of each head's query, the first in `queries`, of `rows` numbers each; returns where they begin.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn append_turned<'a>(
    queries: &mut Vec<f32>,
    heads: usize,
    width: usize,
    rows: usize,
    matrix: impl Fn(usize) -> &'a [f32],
) -> usize {
    let start = queries.len();
    queries.resize(start + heads * rows, 0.0);
    let (plain, turned) = queries.split_at_mut(start);
    for (head, (plain, turned)) in plain.chunks(width).zip(turned.chunks_mut(rows)).enumerate() {
        kernels::matrix_vector(matrix(head), plain, turned);
    }
    start
}

/// Codes of keys, side codes or transformed values as stored, on the host.
struct HostCodes {
    codes: Vec<f32>,
    scale: Vec<f32>,
    zero: Vec<f32>,
}

impl HostCodes {
    fn of(stored: Stored) -> Self {
        let empty = |x: Option<Tensor<4>>| x.map(host).unwrap_or_default();
        Self { codes: host(stored.codes), scale: empty(stored.scale), zero: empty(stored.zero) }
    }

    fn append_to(&self, codes: &mut KeyCodes) {
        codes.append(&self.codes, &self.scale, &self.zero);
    }
}

/// Values as stored, on the host.
struct HostValues {
    codes: Vec<f32>,
    scale: Vec<f32>,
    zero: Vec<f32>,
}

impl HostValues {
    fn of(stored: Stored) -> Self {
        let range = |x: Option<Tensor<4>>| host(x.expect("values have ranges of their own"));
        Self { codes: host(stored.codes), scale: range(stored.scale), zero: range(stored.zero) }
    }

    fn view(&self) -> NewValues<'_> {
        NewValues { codes: &self.codes, scale: &self.scale, zero: &self.zero }
    }
}
