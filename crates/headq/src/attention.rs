//! HeadQ attention: streaming semantics (E10), corrected scores (E9), over any number of new tokens.
//!
//! There is one implementation. A teacher-forced pass is the case of an empty cache and all tokens new; decoding is the case of one
//! new token. In both, token t reads ⌊max(0, t+1−R−N)/G⌋·G tokens after the N sinks from codes and the rest dense.

use std::ops::Range;

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::codec::{CodedKeys, HeadqAttention, coded_mask, coded_scores};
use crate::packed::DenseType;
use crate::policy::attention_mass;
use crate::quant::rounded_to_half;
use crate::scheme::{Flush, Scheme};
use crate::seam::{Attention, AttentionSite};
use crate::{Basis, kernels};

/// Queries handled together; bounds the memory of scores to `heads · TILE · tokens`.
const TILE: usize = 128;

/// Keys or values of one layer: dense sinks, coded groups, dense tail.
#[derive(Debug, Clone)]
struct Store<C> {
    /// The first N tokens.
    sinks: Option<Tensor<4>>,
    /// Tokens N .. N + coded_len.
    coded: Option<C>,
    coded_len: usize,
    /// Tokens tail_start .. len; overlaps `coded` while queries of the same call still read them dense.
    tail: Option<Tensor<4>>,
    tail_start: usize,
    len: usize,
}

impl<C> Default for Store<C> {
    fn default() -> Self {
        Self { sinks: None, coded: None, coded_len: 0, tail: None, tail_start: 0, len: 0 }
    }
}

impl<C> Store<C> {
    /// Appends dense tokens.
    fn append(&mut self, new: Tensor<4>, flush: Option<Flush>) {
        self.len += new.dims()[2];
        self.tail = Some(match self.tail.take() {
            None => new,
            Some(tail) => Tensor::cat(vec![tail, new], 2),
        });
        let Some(flush) = flush else { return };
        if self.sinks.is_none() && flush.sinks > 0 && self.len >= flush.sinks {
            self.sinks = Some(self.tail_range(0..flush.sinks));
        }
    }

    /// Codes the groups that are flushed once `len` tokens are there; `code` is given their tokens and the position of the first.
    fn code_up_to(
        &mut self,
        len: usize,
        flush: Option<Flush>,
        code: impl FnOnce(Tensor<4>, usize) -> C,
        join: impl FnOnce(C, C) -> C,
    ) {
        let Some(flush) = flush else { return };
        let flushed = flush.flushed(len - 1);
        if flushed > self.coded_len {
            let start = flush.sinks + self.coded_len;
            let newer = code(self.tail_range(start..flush.sinks + flushed), start);
            self.coded = Some(match self.coded.take() {
                None => newer,
                Some(older) => join(older, newer),
            });
            self.coded_len = flushed;
        }
    }

    /// Drops from the tail what every later query reads from codes.
    fn trim(&mut self, flush: Option<Flush>) {
        let Some(flush) = flush else { return };
        let end = flush.sinks + self.coded_len;
        if self.coded_len > 0 && end > self.tail_start {
            self.tail = (end < self.len).then(|| self.tail_range(end..self.len));
            self.tail_start = end;
        }
    }

    fn tail_range(&self, tokens: Range<usize>) -> Tensor<4> {
        let tail = self.tail.as_ref().expect("a store that has been appended to has a tail");
        tail.clone().narrow(2, tokens.start - self.tail_start, tokens.len())
    }

    /// Dense tokens, which lie in the tail or among the sinks.
    fn dense(&self, tokens: Range<usize>) -> Tensor<4> {
        match &self.sinks {
            Some(sinks) if tokens.start < self.tail_start => sinks.clone().narrow(2, tokens.start, tokens.len()),
            _ => self.tail_range(tokens),
        }
    }
}

/// How a tile of queries reads the tokens before its end, in order of position.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Segments {
    /// Sinks, dense for all queries.
    pub sinks: Range<usize>,
    /// Coded for all queries.
    pub coded: Range<usize>,
    /// Coded for some queries, dense for others.
    pub mixed: Range<usize>,
    /// Dense for all queries.
    pub dense: Range<usize>,
}

impl Segments {
    /// Segments of the columns `first..queries.end` for `queries`; columns before `first` are out of every query's window.
    pub(crate) fn new(flush: Option<Flush>, queries: &Range<usize>, first: usize) -> Self {
        let end = queries.end;
        let (sinks, low, high) = match flush {
            None => (0, 0, 0),
            Some(f) if f.flushed(end - 1) == 0 => (0, 0, 0),
            Some(f) => (f.sinks, f.sinks + f.flushed(queries.start), f.sinks + f.flushed(end - 1)),
        };
        let clip = |a: usize, b: usize| a.max(first).min(b.max(first))..b.max(first);
        Self { sinks: clip(0, sinks), coded: clip(sinks, low), mixed: clip(low, high), dense: clip(high, end) }
    }
}

/// The cache of one layer, as read by [`HeadqAttention::forward`].
#[derive(Debug, Clone, Default)]
pub struct LayerState {
    keys: Store<CodedKeys>,
    values: Store<Tensor<4>>,
    /// Attention mass of each token whose value is not coded yet, after the sinks: `[batch, kv_heads, tokens, 1]`; only under `a2`.
    masses: Option<Tensor<4>>,
    /// Masses of the values that have been coded, if they are kept.
    spent: Option<Vec<Tensor<4>>>,
    /// What dense tokens are rounded to.
    dense: Option<DenseType>,
}

/// Sinks and window of a packed store, in tensors `[1, kv_heads, tokens, head_dim]`.
pub(crate) struct Resumed<C> {
    pub flush: Option<Flush>,
    pub coded: Option<C>,
    pub coded_len: usize,
    pub sinks: Option<Tensor<4>>,
    pub window: Option<Tensor<4>>,
}

impl<C> Resumed<C> {
    fn store(self, len: usize) -> Store<C> {
        let first = self.flush.map_or(0, |f| f.sinks);
        let sinks = self.sinks.clone().filter(|_| len >= first);
        let (tail, tail_start) = if self.coded_len > 0 {
            (self.window, first + self.coded_len)
        } else {
            let parts: Vec<_> = self.sinks.into_iter().chain(self.window).collect();
            ((!parts.is_empty()).then(|| Tensor::cat(parts, 2)), 0)
        };
        Store { sinks, coded: self.coded, coded_len: self.coded_len, tail, tail_start, len }
    }
}

impl LayerState {
    /// A state whose dense tokens are rounded as a packed cache holds them, and which keeps the masses that values were coded by.
    pub(crate) fn rounding(dense: DenseType) -> Self {
        Self { spent: Some(Vec::new()), dense: Some(dense), ..Self::default() }
    }

    /// The state of a packed cache of `len` tokens.
    pub(crate) fn resumed(
        dense: DenseType,
        len: usize,
        keys: Resumed<CodedKeys>,
        values: Resumed<Tensor<4>>,
        masses: Option<Tensor<4>>,
    ) -> Self {
        Self { keys: keys.store(len), values: values.store(len), masses, ..Self::rounding(dense) }
    }

    /// Masses of the values coded since the state was made, and of those that are not coded yet: `[1, kv_heads, tokens, 1]`, after the
    /// sinks.
    pub(crate) fn all_masses(&self) -> Option<Tensor<4>> {
        let parts: Vec<_> = self.spent.iter().flatten().cloned().chain(self.masses.clone()).collect();
        (!parts.is_empty()).then(|| Tensor::cat(parts, 2))
    }

    /// Tokens appended so far.
    pub fn len(&self) -> usize {
        self.keys.len
    }

    /// Whether nothing has been appended.
    pub fn is_empty(&self) -> bool {
        self.keys.len == 0
    }

    /// Tokens whose keys are held as codes, and tokens whose keys are held dense.
    pub fn coded_and_dense_keys(&self) -> (usize, usize) {
        (self.keys.coded_len, self.keys.len - self.keys.coded_len)
    }

    /// Coded keys so far.
    pub(crate) fn coded_keys(&self) -> Option<&CodedKeys> {
        self.keys.coded.as_ref()
    }

    /// Coded values so far: `[batch, kv_heads, tokens, head_dim]`.
    pub(crate) fn coded_values(&self) -> Option<&Tensor<4>> {
        self.values.coded.as_ref()
    }

    /// Appends tokens, and codes what they flush; values under `a2` only once [`LayerState::weigh`] has seen the queries.
    pub(crate) fn append(&mut self, module: &HeadqAttention, k: Tensor<4>, v: Tensor<4>) {
        let key_flush = module.key_flush();
        let (k, v) = (self.rounded(module.shift_keys(k)), self.rounded(v));
        self.keys.append(k, key_flush);
        self.keys.code_up_to(self.keys.len, key_flush, |x, _| module.code_keys(x), CodedKeys::cat);
        self.values.append(v, module.value_flush());
        if !module.weighs_values() {
            self.code_values(module, self.values.len);
        }
    }

    fn rounded(&self, x: Tensor<4>) -> Tensor<4> {
        match self.dense {
            Some(DenseType::F16) => rounded_to_half(x),
            Some(DenseType::F32) | None => x,
        }
    }

    /// Takes note of a tile's attention probabilities, and codes the values that the tile's newest token flushes.
    ///
    /// # Shapes
    /// - `p`: `[batch, kv_heads, groups · queries, tokens]`, tokens from `first` on
    pub(crate) fn weigh(&mut self, module: &HeadqAttention, p: &Tensor<4>, queries: &Range<usize>, first: usize) {
        let Some(flush) = module.value_flush().filter(|_| module.weighs_values()) else { return };
        let tokens = (flush.sinks + self.values.coded_len).min(queries.end)..queries.end;
        if tokens.is_empty() {
            return;
        }
        let mass = attention_mass(p, &flush, queries, first, &tokens);
        let before = self.masses.take().map(|old| {
            let [b, kv, seen, _] = old.dims();
            let new = Tensor::zeros([b, kv, tokens.len() - seen, 1], &old.device());
            Tensor::cat(vec![old, new], 2)
        });
        self.masses = Some(match before {
            None => mass,
            Some(before) => before + mass,
        });
        self.code_values(module, queries.end);
    }

    /// Codes the values that are flushed once `len` tokens are there.
    fn code_values(&mut self, module: &HeadqAttention, len: usize) {
        let flush = module.value_flush();
        let (masses, spent) = (&mut self.masses, &mut self.spent);
        let code = |x: Tensor<4>, start| {
            let (coded, all) = (x.dims()[2], masses.as_ref().map_or(0, |m| m.dims()[2]));
            let own = masses.as_ref().map(|m| m.clone().narrow(2, 0, coded));
            if let Some(spent) = spent {
                spent.extend(own.clone());
            }
            *masses = masses.take().filter(|_| all > coded).map(|m| m.narrow(2, coded, all - coded));
            module.code_values(x, start, own)
        };
        self.values.code_up_to(len, flush, code, |old, new| Tensor::cat(vec![old, new], 2));
    }

    pub(crate) fn trim(&mut self, module: &HeadqAttention) {
        self.keys.trim(module.key_flush());
        self.values.trim(module.value_flush());
    }
}

/// Tiles of the new queries `start..end`.
pub(crate) fn tiles(start: usize, end: usize) -> impl Iterator<Item = Range<usize>> {
    (start..end).step_by(TILE).map(move |t| t..(t + TILE).min(end))
}

/// First token in the window of any query of the tile.
pub(crate) fn first_visible(site: &AttentionSite, queries: &Range<usize>) -> usize {
    site.window.map_or(0, |w| (queries.start + 1).saturating_sub(w))
}

/// Queries of a tile, scaled, with the heads of each group stacked: `[batch, kv_heads, groups · queries, head_dim]`.
pub(crate) fn grouped_queries(
    site: &AttentionSite,
    q: &Tensor<4>,
    kv_heads: usize,
    queries: &Range<usize>,
) -> Tensor<4> {
    let [b, heads, _, d] = q.dims();
    let m = queries.len();
    q.clone().narrow(2, queries.start - site.start, m).mul_scalar(site.scale).reshape([
        b,
        kv_heads,
        heads / kv_heads * m,
        d,
    ])
}

/// Tokens that the query at position `t` sees.
pub(crate) fn visible(site: &AttentionSite, t: usize) -> Range<usize> {
    site.window.map_or(0, |w| (t + 1).saturating_sub(w))..t + 1
}

/// 0 where token j is visible from query t, a very negative number elsewhere: `[1, 1, 1, queries, tokens]`.
fn visibility(
    site: &AttentionSite,
    queries: &Range<usize>,
    tokens: &Range<usize>,
    dtype: DType,
    device: &Device,
) -> Tensor<5> {
    let mut bias = Vec::with_capacity(queries.len() * tokens.len());
    for t in queries.clone() {
        let visible = visible(site, t);
        bias.extend(tokens.clone().map(|j| if visible.contains(&j) { 0.0 } else { -1.0e30f32 }));
    }
    let data = TensorData::new(bias, [1, 1, 1, queries.len(), tokens.len()]);
    Tensor::from_data(data, (device, dtype))
}

/// Attention probabilities of a tile, from its scores `[batch, kv_heads, groups · queries, tokens]`; 0 for hidden tokens.
pub(crate) fn probabilities(
    site: &AttentionSite,
    scores: Tensor<4>,
    queries: &Range<usize>,
    tokens: &Range<usize>,
) -> Tensor<4> {
    let m = queries.len();
    if kernels::on_host(&scores) {
        return kernels::softmax_rows(scores, |row| {
            let visible = visible(site, queries.start + row % m);
            visible.start.max(tokens.start) - tokens.start..visible.end - tokens.start
        });
    }
    if m == 1 {
        return softmax(scores, 3);
    }
    let shape @ [b, kv, rows, n] = scores.dims();
    let bias = visibility(site, queries, tokens, scores.dtype(), &scores.device());
    softmax(scores.reshape([b, kv, rows / m, m, n]) + bias, 4).reshape(shape)
}

impl HeadqAttention {
    /// Appends the new tokens to `state` and attends each of them to all tokens up to itself.
    ///
    /// # Shapes
    /// As [`Attention::attend`].
    ///
    /// # Panics
    /// If `site.start` is not the number of tokens in `state`.
    pub fn forward(
        &self,
        state: &mut LayerState,
        site: &AttentionSite,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
    ) -> Tensor<4> {
        assert_eq!(site.start, state.len(), "new tokens follow those in the cache");
        let (kv_heads, end) = (k.dims()[1], site.start + k.dims()[2]);
        state.append(self, k, v);
        let outputs: Vec<_> = tiles(site.start, end)
            .map(|queries| {
                let tokens = first_visible(site, &queries)..queries.end;
                let grouped = grouped_queries(site, &q, kv_heads, &queries);
                let scores = self.scores(state, &grouped, &queries, tokens.start);
                let p = probabilities(site, scores, &queries, &tokens);
                state.weigh(self, &p, &queries, tokens.start);
                let [b, heads, _, d] = q.dims();
                self.read_values(state, p, &queries, tokens.start).reshape([b, heads, queries.len(), d])
            })
            .collect();
        state.trim(self);
        if outputs.len() == 1 { outputs.into_iter().next().expect("one tile") } else { Tensor::cat(outputs, 2) }
    }

    /// Scores of a tile as read from the cache: `[batch, kv_heads, groups · queries, tokens]`, tokens from `first` on.
    pub(crate) fn scores(&self, state: &LayerState, q: &Tensor<4>, queries: &Range<usize>, first: usize) -> Tensor<4> {
        let store = &state.keys;
        let flush = self.key_flush();
        let segments = Segments::new(flush, queries, first);
        let q_side =
            if segments.coded.is_empty() && segments.mixed.is_empty() { None } else { self.project_queries(q) };
        let dense = |tokens: &Range<usize>| q.clone().matmul(store.dense(tokens.clone()).swap_dims(2, 3));
        let coded = |tokens: &Range<usize>| {
            let sinks = flush.expect("coded tokens have a flush rule").sinks;
            let keys = store.coded.as_ref().expect("coded tokens have codes");
            coded_scores(q, q_side.as_ref(), &keys.narrow(tokens.start - sinks, tokens.len()))
        };
        let mut parts = Vec::with_capacity(4);
        if !segments.sinks.is_empty() {
            parts.push(dense(&segments.sinks));
        }
        if !segments.coded.is_empty() {
            parts.push(coded(&segments.coded));
        }
        if !segments.mixed.is_empty() {
            let tokens = segments.mixed.clone();
            let mask = coded_mask(
                &flush.expect("mixed tokens have a flush rule"),
                queries.clone(),
                tokens.clone(),
                &q.device(),
            );
            let shape @ [b, kv, rows, n] = [q.dims()[0], q.dims()[1], q.dims()[2], tokens.len()];
            let split = [b, kv, rows / queries.len(), queries.len(), n];
            let (dense, coded) = (dense(&tokens).reshape(split), coded(&tokens).reshape(split));
            parts.push(dense.mask_where(mask.expand(split), coded).reshape(shape));
        }
        if !segments.dense.is_empty() {
            parts.push(dense(&segments.dense));
        }
        if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 3) }
    }

    /// Σ_j p_tj v̂_j for a tile: `[batch, kv_heads, groups · queries, head_dim]`.
    pub(crate) fn read_values(
        &self,
        state: &LayerState,
        p: Tensor<4>,
        queries: &Range<usize>,
        first: usize,
    ) -> Tensor<4> {
        let store = &state.values;
        let flush = self.value_flush();
        let segments = Segments::new(flush, queries, first);
        let columns = |tokens: &Range<usize>| p.clone().narrow(3, tokens.start - first, tokens.len());
        let coded = |tokens: &Range<usize>| {
            let sinks = flush.expect("coded tokens have a flush rule").sinks;
            store.coded.as_ref().expect("coded tokens have codes").clone().narrow(2, tokens.start - sinks, tokens.len())
        };
        let mut sum: Option<Tensor<4>> = None;
        let mut add = |x: Tensor<4>| {
            sum = Some(match sum.take() {
                None => x,
                Some(s) => s + x,
            })
        };
        if !segments.sinks.is_empty() {
            add(columns(&segments.sinks).matmul(store.dense(segments.sinks.clone())));
        }
        if !segments.coded.is_empty() {
            add(columns(&segments.coded).matmul(coded(&segments.coded)));
        }
        if !segments.mixed.is_empty() {
            let tokens = segments.mixed.clone();
            let mask = coded_mask(
                &flush.expect("mixed tokens have a flush rule"),
                queries.clone(),
                tokens.clone(),
                &p.device(),
            );
            let part = columns(&tokens);
            let shape @ [b, kv, rows, n] = part.dims();
            let split = [b, kv, rows / queries.len(), queries.len(), n];
            let part = part.reshape(split);
            let mask = mask.expand(split);
            let from_codes = part.clone().mask_fill(mask.clone().bool_not(), 0.0).reshape(shape);
            let from_dense = part.mask_fill(mask, 0.0).reshape(shape);
            add(from_codes.matmul(coded(&tokens)));
            add(from_dense.matmul(store.dense(tokens)));
        }
        if !segments.dense.is_empty() {
            add(columns(&segments.dense).matmul(store.dense(segments.dense.clone())));
        }
        sum.expect("every query sees itself")
    }
}

/// A whole model's cache under one scheme: an [`Attention`] that appends, flushes whole groups and reads.
#[derive(Debug)]
pub struct QuantizedCache {
    layers: Vec<HeadqAttention>,
    states: Option<Vec<LayerState>>,
}

impl QuantizedCache {
    /// One module per layer, with its basis where the scheme has a side code.
    ///
    /// Each call is a whole sequence and nothing is kept: teacher-forced evaluation.
    ///
    /// # Panics
    /// As [`HeadqAttention::new`].
    pub fn teacher_forced(scheme: Scheme, basis: Option<&Basis>, layers: usize, device: &Device) -> Self {
        let layers = (0..layers).map(|layer| HeadqAttention::new(scheme, basis, layer, device)).collect();
        Self { layers, states: None }
    }

    /// The same, but tokens are kept from call to call: decoding.
    ///
    /// # Panics
    /// As [`HeadqAttention::new`].
    pub fn streaming(scheme: Scheme, basis: Option<&Basis>, layers: usize, device: &Device) -> Self {
        Self::streaming_of(Self::teacher_forced(scheme, basis, layers, device).layers)
    }

    /// Modules made elsewhere, by layer; each call is a whole sequence.
    pub fn of(layers: Vec<HeadqAttention>) -> Self {
        Self { layers, states: None }
    }

    /// The same, but tokens are kept from call to call: decoding.
    pub fn streaming_of(layers: Vec<HeadqAttention>) -> Self {
        let states = Some(vec![LayerState::default(); layers.len()]);
        Self { layers, states }
    }

    /// The modules, by layer.
    pub fn layers(&self) -> &[HeadqAttention] {
        &self.layers
    }
}

impl Attention for QuantizedCache {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let layer = &self.layers[site.layer];
        match &mut self.states {
            None => layer.forward(&mut LayerState::default(), site, q, k, v),
            Some(states) => layer.forward(&mut states[site.layer], site, q, k, v),
        }
    }
}
