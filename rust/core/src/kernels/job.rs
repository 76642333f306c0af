//! One call of attention, cut into tiles, and the choice of instructions to work on them.

use std::marker::PhantomData;
use std::ops::Range;

use super::attention::{Scoring, Step};
use super::element::Element;
use super::simd::Portable;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::tile::{Scratch, run};
use super::view::{PagedView, TokenView};

/// What all tiles of a call share. The arguments have been checked against each other.
pub(crate) struct Job<'a, E> {
    pub(crate) q: &'a TokenView<'a, E>,
    pub(crate) keys: &'a PagedView<'a, E>,
    pub(crate) values: &'a PagedView<'a, E>,
    pub(crate) step: &'a Step<'a>,
    pub(crate) scoring: &'a Scoring<'a>,
    /// Query heads of one KV head.
    pub(crate) group: usize,
    pub(crate) output: &'a Output<'a, E>,
}

/// Neighbouring queries of one row of the plan.
pub(crate) struct Tile {
    pub(crate) row: usize,
    /// The first query's place among the step's tokens.
    pub(crate) token: usize,
    pub(crate) count: usize,
    /// The first query's position in its sequence; `None` if it sees nothing.
    pub(crate) position: Option<usize>,
}

impl Tile {
    /// The positions that a query of the tile sees.
    #[inline]
    pub(crate) fn visible(&self, query: usize, sliding_window: Option<usize>) -> Range<usize> {
        let Some(first) = self.position else {
            return 0..0;
        };
        let stop = first + query + 1;
        sliding_window.map_or(0, |window| stop.saturating_sub(window))..stop
    }
}

/// Where results go. Every (token, head) is the business of one tile, and so of one thread.
pub(crate) struct Output<'a, E> {
    out: *mut E,
    lse: Option<*mut f32>,
    rows: usize,
    num_heads: usize,
    head_dim: usize,
    memory: PhantomData<(&'a mut [E], &'a mut [f32])>,
}

// SAFETY: it stands for exclusive slices of Send elements; `write` says who may write what.
unsafe impl<E: Element> Sync for Output<'_, E> {}

impl<'a, E: Element> Output<'a, E> {
    pub(crate) fn new(
        out: &'a mut [E],
        lse: Option<&'a mut [f32]>,
        num_heads: usize,
        head_dim: usize,
    ) -> Self {
        let rows = out.len().checked_div(head_dim).unwrap_or(0);
        assert!(lse.as_ref().is_none_or(|lse| lse.len() >= rows), "lse must have a place for each row");
        let lse = lse.map(<[f32]>::as_mut_ptr);
        Self { out: out.as_mut_ptr(), lse, rows, num_heads, head_dim, memory: PhantomData }
    }

    /// # Safety
    /// No other thread may be writing this token and head.
    #[inline]
    pub(crate) unsafe fn write(
        &self,
        token: usize,
        head: usize,
        values: impl Iterator<Item = f32>,
        lse: f32,
    ) {
        let row = token * self.num_heads + head;
        assert!(row < self.rows, "token {token} is outside the output");
        // SAFETY: the row is inside both slices, and the caller keeps others off it.
        let out = unsafe { std::slice::from_raw_parts_mut(self.out.add(row * self.head_dim), self.head_dim) };
        for (to, value) in out.iter_mut().zip(values) {
            *to = E::from_f32(value);
        }
        if let Some(start) = self.lse {
            // SAFETY: as above.
            unsafe { start.add(row).write(lse) };
        }
    }
}

/// The instructions to use.
#[derive(Clone, Copy)]
pub(crate) enum Arithmetic {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Arithmetic {
    /// All that this machine has, the best one last.
    pub(crate) fn available() -> Vec<Self> {
        let mut found = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(Avx2::detect().map(Self::Avx2));
            found.extend(Avx512::detect().map(Self::Avx512));
        }
        found
    }

    pub(crate) fn best() -> Self {
        Self::available().pop().unwrap_or(Self::Portable)
    }

    pub(crate) fn run<E: Element>(
        self,
        job: &Job<'_, E>,
        tile: &Tile,
        kv_head: usize,
        scratch: &mut Scratch,
    ) {
        match self {
            Self::Portable => run(Portable, job, tile, kv_head, scratch),
            // SAFETY: a value of this type proves that the CPU has these instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => unsafe { run_avx2(simd, job, tile, kv_head, scratch) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => unsafe { run_avx512(simd, job, tile, kv_head, scratch) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<E: Element>(simd: Avx2, job: &Job<'_, E>, tile: &Tile, kv_head: usize, scratch: &mut Scratch) {
    run(simd, job, tile, kv_head, scratch);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma,f16c")]
fn run_avx512<E: Element>(
    simd: Avx512,
    job: &Job<'_, E>,
    tile: &Tile,
    kv_head: usize,
    scratch: &mut Scratch,
) {
    run(simd, job, tile, kv_head, scratch);
}
