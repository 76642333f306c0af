//! Where results go: whole ones into the caller's arrays, partial ones into memory from which they are merged.
#![expect(clippy::inline_always, reason = "all of it must end up in a #[target_feature] function")]

use std::f32::consts::{LN_2, LOG2_E};
use std::marker::PhantomData;

use super::attention::Scoring;
use super::element::Element;
use super::job::{Job, Tile};
use super::simd::{MAX_LANES, Simd};

/// The denominator of a row's softmax, `total * 2^top`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Denominator {
    pub(crate) top: f32,
    pub(crate) total: f32,
}

impl Denominator {
    /// That of no keys.
    pub(crate) const EMPTY: Self = Self { top: f32::NEG_INFINITY, total: 0.0 };

    /// By how much weights relative to this one exceed those that are relative to a larger `top`.
    #[inline(always)]
    fn shrink(self, top: f32) -> f32 {
        if top > self.top { (self.top - top).exp2() } else { 1.0 }
    }

    /// With a sink's share, if there is one.
    #[inline(always)]
    fn with_sink(self, sink: Option<f32>) -> Self {
        let Some(sink) = sink.map(|sink| sink * LOG2_E).filter(|&sink| sink > f32::NEG_INFINITY) else {
            return self;
        };
        let top = if sink > self.top { sink } else { self.top };
        Self { top, total: self.total * self.shrink(top) + (sink - top).exp2() }
    }

    /// Its natural logarithm.
    #[inline(always)]
    fn ln(self) -> f32 {
        if self.total == 0.0 { f32::NEG_INFINITY } else { (self.top + self.total.log2()) * LN_2 }
    }
}

/// Every (token, head) and every (partial result, head) is the business of one tile, and so of one thread.
pub(crate) struct Output<'a, E> {
    out: *mut E,
    lse: Option<*mut f32>,
    tokens: usize,
    num_heads: usize,
    head_dim: usize,
    /// `[partial results, num_heads, width]`: weighted sums, then the denominator.
    partial: *mut f32,
    partials: usize,
    width: usize,
    memory: PhantomData<(&'a mut [E], &'a mut [f32])>,
}

// SAFETY: it stands for exclusive slices of Send elements; `put` and `merge` say who may write what.
unsafe impl<E: Element> Sync for Output<'_, E> {}

impl<'a, E: Element> Output<'a, E> {
    /// What a head of a partial result takes.
    pub(crate) fn partial_width(head_dim: usize) -> usize {
        (head_dim + 2).next_multiple_of(MAX_LANES)
    }

    pub(crate) fn new(
        out: &'a mut [E],
        lse: Option<&'a mut [f32]>,
        [num_heads, head_dim]: [usize; 2],
        partial: &'a mut [f32],
    ) -> Self {
        let tokens = out.len().checked_div(num_heads * head_dim).unwrap_or(0);
        assert!(
            lse.as_ref().is_none_or(|lse| lse.len() >= tokens * num_heads),
            "lse must have a place for each row"
        );
        let lse = lse.map(<[f32]>::as_mut_ptr);
        let width = Self::partial_width(head_dim);
        Self {
            out: out.as_mut_ptr(),
            lse,
            tokens,
            num_heads,
            head_dim,
            partials: partial.len() / (num_heads * width),
            partial: partial.as_mut_ptr(),
            width,
            memory: PhantomData,
        }
    }

    /// Takes a tile's result for a query and a head: sums of V, weighted by `2^(score - top)`.
    ///
    /// # Safety
    /// No other thread may be at work on this tile, query and head.
    #[inline(always)]
    pub(crate) unsafe fn put<S: Simd>(
        &self,
        simd: S,
        job: &Job<'_, E>,
        tile: &Tile,
        [query, head]: [usize; 2],
        denominator: Denominator,
        sums: &[f32],
    ) {
        if let Some(first) = tile.partial {
            let place = self.partial(first + query - tile.queries.start, head);
            // SAFETY: the place has `width > head_dim + 1` numbers, and the caller keeps others off it.
            unsafe {
                place.copy_from_nonoverlapping(sums[..self.head_dim].as_ptr(), self.head_dim);
                place.add(self.head_dim).write(denominator.top);
                place.add(self.head_dim + 1).write(denominator.total);
            }
        } else {
            // SAFETY: the caller keeps others off it.
            unsafe {
                self.put_whole(simd, job.scoring, [job.queries[query].token, head], denominator, sums);
            }
        }
    }

    /// Divides by the denominator and rounds.
    ///
    /// # Safety
    /// No other thread may be writing this token and head.
    #[inline(always)]
    unsafe fn put_whole<S: Simd>(
        &self,
        simd: S,
        scoring: &Scoring<'_>,
        [token, head]: [usize; 2],
        denominator: Denominator,
        sums: &[f32],
    ) {
        assert!(token < self.tokens && head < self.num_heads, "({token}, {head}) is outside the output");
        let whole = denominator.with_sink(scoring.sinks.map(|sinks| sinks[head]));
        // Sums of nothing are zeros, and stay so.
        let factor = if whole.total == 0.0 { 0.0 } else { denominator.shrink(whole.top) / whole.total };
        let row = token * self.num_heads + head;
        let sums = &sums[..self.head_dim];
        let (factors, even) = (simd.splat(factor), self.head_dim - self.head_dim % S::LANES);
        // SAFETY: the row is inside both slices, and the caller keeps others off it.
        unsafe {
            let out = self.out.add(row * self.head_dim);
            for d in (0..even).step_by(S::LANES) {
                simd.store_elements(out.add(d), simd.mul(simd.load(sums.as_ptr().add(d)), factors));
            }
            for (d, sum) in sums.iter().enumerate().skip(even) {
                out.add(d).write(E::from_f32(sum * factor));
            }
            if let Some(start) = self.lse {
                start.add(row).write(whole.ln());
            }
        }
    }

    /// The address of a partial result.
    #[inline(always)]
    fn partial(&self, number: usize, head: usize) -> *mut f32 {
        assert!(number < self.partials && head < self.num_heads, "no partial result ({number}, {head})");
        // SAFETY: the place is inside the slice.
        unsafe { self.partial.add((number * self.num_heads + head) * self.width) }
    }

    /// Puts together the partial results of a token, all of which have been taken.
    #[inline(always)]
    pub(crate) fn merge<S: Simd>(&self, simd: S, scoring: &Scoring<'_>, token: usize, parts: &[usize]) {
        for head in 0..self.num_heads {
            let place = |part: usize| {
                let place = self.partial(part, head);
                // SAFETY: a partial result has head_dim numbers and its denominator, and nobody writes it any more.
                let all = unsafe { std::slice::from_raw_parts_mut(place, self.width) };
                let denominator = Denominator { top: all[self.head_dim], total: all[self.head_dim + 1] };
                (denominator, all)
            };
            let (mut whole, sums) = place(parts[0]);
            for &part in &parts[1..] {
                let (other, others) = place(part);
                let top = if other.top > whole.top { other.top } else { whole.top };
                let (own, their) = (whole.shrink(top), other.shrink(top));
                whole = Denominator { top, total: whole.total * own + other.total * their };
                let (own, their) = (simd.splat(own), simd.splat(their));
                for (sum, other) in sums.chunks_exact_mut(S::LANES).zip(others.chunks_exact(S::LANES)) {
                    simd.put(sum, simd.fma(simd.get(sum), own, simd.mul(simd.get(other), their)));
                }
            }
            // SAFETY: `attend` merges each token once.
            unsafe { self.put_whole(simd, scoring, [token, head], whole, sums) };
        }
    }
}
