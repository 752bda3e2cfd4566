//! Keys or values of one layer in order of position: dense sinks, codes, dense newest tokens.

use std::ops::Range;

use super::file::Part;
use super::reals::{DenseType, Reals, Run};
use crate::scheme::Flush;

/// Tokens in a page of a window that is flushed: few, as what is not filled is held for nothing.
const WINDOW_PAGE: usize = 16;
/// Tokens in a page of a stream that stays dense.
const DENSE_PAGE: usize = 64;

/// Dense tokens of one layer, `[kv_heads, tokens, width]`, and how many of those after the sinks are read from codes.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    /// `None` where everything stays dense.
    pub flush: Option<Flush>,
    pub kind: DenseType,
    heads: usize,
    width: usize,
    /// The first N tokens.
    sinks: Reals,
    /// Tokens from N on; freed once they are coded and out of reach of a rewind.
    window: Reals,
    /// Tokens after the sinks that are coded.
    pub coded: usize,
    pub len: usize,
    /// First token after the sinks that the window still holds.
    held: usize,
}

/// Where a stretch of tokens is read from.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Place {
    /// Sinks, from the first.
    Sinks(Range<usize>),
    /// Codes, counted from the first after the sinks.
    Codes(Range<usize>),
    /// The window, counted from the first after the sinks.
    Window(Range<usize>),
}

impl Stream {
    pub fn new(flush: Option<Flush>, kind: DenseType, heads: usize, width: usize) -> Self {
        let sinks = flush.map_or(0, |f| f.sinks);
        let page = if flush.is_some() { WINDOW_PAGE } else { DENSE_PAGE };
        Self {
            flush,
            kind,
            heads,
            width,
            sinks: Reals::new(kind, vec![width; heads], sinks.max(1)),
            window: Reals::new(kind, vec![width; heads], page),
            coded: 0,
            len: 0,
            held: 0,
        }
    }

    /// N.
    pub fn first(&self) -> usize {
        self.flush.map_or(0, |f| f.sinks)
    }

    /// Appends dense tokens: `[heads, tokens, width]`.
    pub fn append(&mut self, tokens: &[f32]) {
        let count = tokens.len() / (self.heads * self.width);
        let (start, sinks) = (self.len, self.first());
        self.len += count;
        self.sinks.extend(self.len.min(sinks));
        self.window.extend(self.len.saturating_sub(sinks));
        for (i, token) in tokens.chunks(self.width).enumerate() {
            let (head, position) = (i / count, start + i % count);
            match position.checked_sub(sinks) {
                None => self.sinks.put(head, position, 0, token),
                Some(at) => self.window.put(head, at, 0, token),
            }
        }
    }

    /// Tokens after the sinks that are now to be coded, counted from the first after the sinks.
    pub fn due(&self) -> Range<usize> {
        let flushed = self.flush.filter(|_| self.len > 0).map_or(0, |f| f.flushed(self.len - 1));
        self.coded..flushed.max(self.coded)
    }

    /// Dense tokens of the window in f32: `[heads, tokens, width]`.
    pub fn dense(&self, tokens: Range<usize>) -> Vec<f32> {
        let mut all = vec![0.0; self.heads * tokens.len() * self.width];
        for (i, out) in all.chunks_mut(self.width).enumerate() {
            self.window.read(i / tokens.len(), tokens.start + i % tokens.len(), out);
        }
        all
    }

    /// One dense token in f32, by its position.
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub fn read_dense(&self, head: usize, position: usize, out: &mut [f32]) {
        match position.checked_sub(self.first()) {
            None => self.sinks.read(head, position, out),
            Some(at) => self.window.read(head, at, out),
        }
    }

    /// The sinks that are there, in f32: `[heads, tokens, width]`.
    pub fn dense_sinks(&self) -> Vec<f32> {
        let count = self.len.min(self.first());
        let mut all = vec![0.0; self.heads * count * self.width];
        for (i, out) in all.chunks_mut(self.width).enumerate() {
            self.sinks.read(i / count, i % count, out);
        }
        all
    }

    /// Notes that the tokens up to `coded` have codes, and frees those that a rewind by `rewind` tokens cannot reach.
    pub fn coded_up_to(&mut self, coded: usize, rewind: usize) {
        self.coded = coded;
        let keep = self.reach(rewind);
        if keep > self.held {
            self.held = keep;
            self.window.free_before(keep);
        }
    }

    /// Tokens after the sinks that are coded in every state up to `rewind` tokens ago.
    fn reach(&self, rewind: usize) -> usize {
        let past = self.len.saturating_sub(rewind);
        self.flush.filter(|_| past > 0).map_or(0, |f| f.flushed(past - 1)).min(self.coded)
    }

    /// Shortest length that can be gone back to.
    pub fn shortest(&self) -> usize {
        let Some(flush) = self.flush else { return 0 };
        if self.held == 0 { 0 } else { flush.sinks + flush.residual + self.held }
    }

    /// Goes back to `len` tokens, at least [`Stream::shortest`]; returns how many of those after the sinks are coded then.
    pub fn truncate(&mut self, len: usize) -> usize {
        self.len = len;
        self.sinks.truncate(len.min(self.first()));
        self.window.truncate(len.saturating_sub(self.first()));
        let flushed = self.flush.filter(|_| len > 0).map_or(0, |f| f.flushed(len - 1));
        self.coded = self.coded.min(flushed);
        self.coded
    }

    /// Where the tokens of a range of positions are read from, in order.
    pub fn places(&self, positions: Range<usize>) -> impl Iterator<Item = (usize, Place)> {
        let sinks = self.first();
        let coded = sinks + self.coded;
        let part = move |from: usize, to: usize| {
            let (start, end) = (positions.start.max(from), positions.end.min(to));
            (start < end).then(|| (start - positions.start, start..end))
        };
        let shifted = move |r: Range<usize>| r.start - sinks..r.end - sinks;
        let in_sinks = part(0, sinks).map(|(at, r)| (at, Place::Sinks(r)));
        let in_codes = part(sinks, coded).map(|(at, r)| (at, Place::Codes(shifted(r))));
        let in_window = part(coded, usize::MAX).map(|(at, r)| (at, Place::Window(shifted(r))));
        in_sinks.into_iter().chain(in_codes).chain(in_window)
    }

    /// Calls `f` with the dense tokens of a range as they lie in pages, and how many came before.
    pub fn each_dense(&self, head: usize, place: &Place, mut f: impl FnMut(usize, Run<'_>)) {
        let (pages, tokens) = match place {
            Place::Sinks(tokens) => (&self.sinks, tokens),
            Place::Window(tokens) => (&self.window, tokens),
            Place::Codes(_) => unreachable!("codes are not dense"),
        };
        let mut at = tokens.start;
        while at < tokens.end {
            let run = pages.raw(head, at..tokens.end);
            let length = run.len();
            f(at - tokens.start, run);
            at += length / self.width;
        }
    }

    /// Dense tokens of the window among a range of positions, as far as they lie in one page; nothing where there are none.
    pub fn ahead(&self, head: usize, positions: &Range<usize>) -> Run<'_> {
        let sinks = self.first();
        let (start, end) = (positions.start.max(sinks + self.coded), positions.end.min(self.len));
        if start >= end {
            return match self.kind {
                DenseType::F16 => Run::F16(&[]),
                DenseType::F32 => Run::F32(&[]),
            };
        }
        self.window.raw(head, start - sinks..end - sinks)
    }

    /// The tokens after the sinks that are coded, of a range of positions.
    pub fn coded_of(&self, positions: &Range<usize>) -> Range<usize> {
        let sinks = self.first();
        let end = positions.end.saturating_sub(sinks).min(self.coded);
        positions.start.saturating_sub(sinks).min(end)..end
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.sinks.bytes() + self.window.bytes()
    }

    /// Sinks and window as they are saved.
    pub fn parts(&mut self, len: usize, held: usize) -> [(&'static str, Part<'_>); 2] {
        let sinks = self.first();
        [
            ("sinks", Part::Reals { pages: &mut self.sinks, start: 0, len: len.min(sinks) }),
            ("window", Part::Reals { pages: &mut self.window, start: held, len: len.saturating_sub(sinks).max(held) }),
        ]
    }

    /// First token after the sinks that is held dense.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Takes over the counts of a saved stream, whose parts are restored.
    pub fn resume(&mut self, len: usize, coded: usize, held: usize) {
        (self.len, self.coded, self.held) = (len, coded, held);
    }

    /// Whether counts are those of some stream of `len` tokens.
    pub fn possible(&self, len: usize, coded: usize, held: usize) -> bool {
        let flushed = self.flush.filter(|_| len > 0).map_or(0, |f| f.flushed(len - 1));
        let group = self.flush.map_or(1, |f| f.group);
        coded == flushed && held <= coded && held.is_multiple_of(group)
    }
}
