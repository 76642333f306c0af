//! One call of attention: what all of its pieces of work share, and the choice of instructions for them.
#![expect(clippy::inline_always, reason = "all of it must end up in a #[target_feature] function")]

use std::env;
use std::ops::Range;
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use super::amx::Amx;
use super::attention::{Scoring, Step};
use super::element::Element;
#[cfg(target_arch = "x86_64")]
use super::element::Format;
use super::output::Output;
use super::scratch::Scratch;
#[cfg(target_arch = "aarch64")]
use super::simd::Neon;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Portable, Simd};
#[cfg(target_arch = "x86_64")]
use super::tiles::Tiles;
use super::view::{PagedView, TokenView};
use super::{thin, wide};

/// Rows from which on a tile is worked on with rows in lanes.
const WIDE_FROM: usize = 12;

/// What all tiles of a call share. The arguments have been checked against each other.
pub(crate) struct Job<'a, E> {
    pub(crate) q: &'a TokenView<'a, E>,
    pub(crate) keys: &'a PagedView<'a, E>,
    pub(crate) values: &'a PagedView<'a, E>,
    pub(crate) step: &'a Step<'a>,
    pub(crate) scoring: &'a Scoring<'a>,
    /// Query heads of one KV head.
    pub(crate) group: usize,
    pub(crate) queries: &'a [Query],
    pub(crate) output: &'a Output<'a, E>,
}

/// A token of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Query {
    pub(crate) token: usize,
    /// Its position in its sequence; `None` if it sees nothing.
    pub(crate) position: Option<usize>,
}

/// Some queries against some of the keys that they see. Its rows are its queries times the query heads that share a KV
/// head, so that each row of K and V is loaded once for all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tile {
    /// The row of the plan whose block table leads to the keys.
    pub(crate) row: usize,
    /// Among those of the job.
    pub(crate) queries: Range<usize>,
    /// Positions of keys.
    pub(crate) keys: Range<usize>,
    /// KV heads.
    pub(crate) heads: Range<usize>,
    /// The number of the first query's partial result; `None`: there is nothing to be merged.
    pub(crate) partial: Option<usize>,
}

impl<E: Element> Job<'_, E> {
    /// The keys of the tile that a query sees.
    #[inline(always)]
    pub(crate) fn seen(&self, tile: &Tile, query: usize) -> Range<usize> {
        let Some(position) = self.queries[query].position else {
            return tile.keys.start..tile.keys.start;
        };
        let stop = position + 1;
        let start = self.scoring.sliding_window.map_or(0, |window| stop.saturating_sub(window));
        let bound = |at: usize| at.clamp(tile.keys.start, tile.keys.end);
        bound(start)..bound(stop)
    }

    /// The keys of the tile that any of its queries sees.
    #[inline(always)]
    pub(crate) fn seen_by_any(&self, tile: &Tile) -> Range<usize> {
        let (mut start, mut stop) = (usize::MAX, 0);
        for query in tile.queries.clone() {
            let seen = self.seen(tile, query);
            if !seen.is_empty() {
                (start, stop) = (start.min(seen.start), stop.max(seen.end));
            }
        }
        start.min(stop)..stop
    }

    /// The query and the query head of a tile's row.
    #[inline(always)]
    pub(crate) fn row(&self, tile: &Tile, kv_head: usize, row: usize) -> (usize, usize) {
        (tile.queries.start + row / self.group, kv_head * self.group + row % self.group)
    }
}

/// Names of the instruction sets that this machine can run. The last one is in use, unless the environment's
/// `KVFOLIO_CPU_CAPABILITY` names another.
pub fn cpu_capabilities() -> Vec<&'static str> {
    let mut names: Vec<_> = Arithmetic::available().into_iter().map(Arithmetic::name).collect();
    let best = Arithmetic::best().name();
    names.sort_by_key(|&name| name == best);
    names
}

/// The instructions to use.
#[derive(Clone, Copy)]
pub(crate) enum Arithmetic {
    Portable,
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Amx(Avx512, Amx),
}

impl Arithmetic {
    /// All that this machine has, the best one last.
    pub(crate) fn available() -> Vec<Self> {
        let mut found = vec![Self::Portable];
        #[cfg(target_arch = "aarch64")]
        found.extend(Neon::detect().map(Self::Neon));
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(Avx2::detect().map(Self::Avx2));
            found.extend(Avx512::detect().map(Self::Avx512));
            found.extend(Avx512::detect().zip(Amx::detect()).map(|(simd, amx)| Self::Amx(simd, amx)));
        }
        found
    }

    /// The best of them, or the one that the environment's `KVFOLIO_CPU_CAPABILITY` names, if it is there.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Arithmetic> = OnceLock::new();
        *BEST.get_or_init(|| {
            let mut found = Self::available();
            let named = env::var("KVFOLIO_CPU_CAPABILITY").ok();
            let chosen = named.and_then(|name| found.iter().position(|one| one.name() == name));
            chosen.map(|place| found.swap_remove(place)).or_else(|| found.pop()).unwrap_or(Self::Portable)
        })
    }

    /// What [`Arithmetic::best`] knows it by.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Amx(..) => "amx",
        }
    }

    pub(crate) fn run<E: Element>(self, job: &Job<'_, E>, tile: &Tile, scratch: &mut Scratch) {
        match self {
            Self::Portable => run(Portable, job, tile, scratch),
            // SAFETY: a value of this type proves that the CPU has these instructions.
            #[cfg(target_arch = "aarch64")]
            Self::Neon(simd) => unsafe { run_neon(simd, job, tile, scratch) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => unsafe { run_avx2(simd, job, tile, scratch) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Amx(simd, amx) if E::FORMAT == Format::Bf16 && is_wide(job, tile) => unsafe {
                run_amx(simd, amx, job, tile, scratch);
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) | Self::Amx(simd, _) => unsafe { run_avx512(simd, job, tile, scratch) },
        }
    }

    /// Puts together the partial results of a token.
    pub(crate) fn merge<E: Element>(self, job: &Job<'_, E>, token: usize, parts: &[usize]) {
        match self {
            Self::Portable => job.output.merge(Portable, job.scoring, token, parts),
            // SAFETY: a value of this type proves that the CPU has these instructions.
            #[cfg(target_arch = "aarch64")]
            Self::Neon(simd) => unsafe { merge_neon(simd, job, token, parts) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => unsafe { merge_avx2(simd, job, token, parts) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) | Self::Amx(simd, _) => unsafe { merge_avx512(simd, job, token, parts) },
        }
    }
}

/// Few rows are worked on with dimensions in a vector's lanes, many with rows in them.
#[inline(always)]
fn is_wide<E: Element>(job: &Job<'_, E>, tile: &Tile) -> bool {
    tile.queries.len() * job.group >= WIDE_FROM
}

#[inline(always)]
fn run<S: Simd, E: Element>(simd: S, job: &Job<'_, E>, tile: &Tile, scratch: &mut Scratch) {
    if is_wide(job, tile) {
        wide::run(simd, &mut scratch.vectors, job, tile, &mut scratch.wide);
    } else {
        thin::run(simd, job, tile, scratch);
    }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn run_neon<E: Element>(simd: Neon, job: &Job<'_, E>, tile: &Tile, scratch: &mut Scratch) {
    run(simd, job, tile, scratch);
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn merge_neon<E: Element>(simd: Neon, job: &Job<'_, E>, token: usize, parts: &[usize]) {
    job.output.merge(simd, job.scoring, token, parts);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<E: Element>(simd: Avx2, job: &Job<'_, E>, tile: &Tile, scratch: &mut Scratch) {
    run(simd, job, tile, scratch);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn merge_avx2<E: Element>(simd: Avx2, job: &Job<'_, E>, token: usize, parts: &[usize]) {
    job.output.merge(simd, job.scoring, token, parts);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,fma,f16c")]
fn run_avx512<E: Element>(simd: Avx512, job: &Job<'_, E>, tile: &Tile, scratch: &mut Scratch) {
    run(simd, job, tile, scratch);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,fma,f16c")]
fn merge_avx512<E: Element>(simd: Avx512, job: &Job<'_, E>, token: usize, parts: &[usize]) {
    job.output.merge(simd, job.scoring, token, parts);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,fma,f16c")]
fn run_amx<E: Element>(simd: Avx512, amx: Amx, job: &Job<'_, E>, tile: &Tile, scratch: &mut Scratch) {
    wide::run(simd, &mut Tiles::new(amx, &mut scratch.tiles), job, tile, &mut scratch.wide);
}
