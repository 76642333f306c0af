//! Attention of many rows, as in prefill, or in the decode of sequences that share a prefix: a vector's lanes are rows of
//! the tile. Scores come as `K Q^T` and results as `V^T P^T`, so that neither K nor V is rearranged, softmax needs no
//! sum across lanes, and both products are those of a matrix that is read by the element with one that is read by the
//! vector. An [`Engine`] multiplies; the rest is here.
//!
//! A tile's rows are cut into panels of a few vectors; a chunk of keys is scored, softened and accumulated for one panel
//! after the other, so that all that is at hand stays in the caches.
#![expect(clippy::inline_always, reason = "all of it must end up in a #[target_feature] function")]

use std::f32::consts::LOG2_E;
use std::mem;
use std::ops::Range;

use super::buffer::Buffer;
use super::chunk::{Ahead, CHUNK, Chunk};
use super::element::Element;
use super::job::{Job, Tile};
use super::output::Denominator;
use super::simd::{MAX_LANES, Simd};

/// The most vectors of a panel.
pub(crate) const MAX_VECTORS: usize = 3;
/// The most rows of a panel.
const MAX_PANEL: usize = MAX_VECTORS * MAX_LANES;

/// Dimensions are padded to a multiple of it.
const DIMS: usize = 32;

/// A row's maximum is kept until it is exceeded by so much (as a power of 2): weights may grow to 2^8, and sums are
/// rarely rescaled (the idea of `FlashAttention` 4).
const HEADROOM: f32 = 8.0;

/// What multiplies.
pub(crate) trait Engine {
    /// Vectors of a panel.
    const VECTORS: usize;
    /// Keys are scored in multiples of it, a divisor of [`CHUNK`].
    const KEYS: usize;

    /// Before and after a tile.
    fn begin(&mut self) {}
    fn end(&mut self) {}

    /// Numbers that a query takes: its elements, padded, in the form in which they are multiplied.
    fn query_size(head_dim: usize) -> usize;

    /// Puts a query into that form.
    ///
    /// # Safety
    /// `head_dim` elements must be readable at `from`.
    unsafe fn load_query<S: Simd, E: Element>(simd: S, from: *const E, head_dim: usize, to: &mut [f32]);

    /// Makes the chunk's K and V ready, asking for memory ahead as it goes.
    fn load<S: Simd, E: Element>(
        &mut self,
        simd: S,
        chunk: &Chunk<E>,
        ahead: &mut Ahead<'_, E>,
        head_dim: usize,
    );

    /// `scores[key][lane]` for the keys of a range that begins and ends at multiples of `KEYS`.
    fn score<S: Simd>(
        &mut self,
        simd: S,
        queries: &[f32],
        keys: Range<usize>,
        vectors: usize,
        head_dim: usize,
        scores: &mut [f32],
    );

    /// Whether all V of the chunk are finite.
    fn is_finite<S: Simd, E: Element>(&mut self, simd: S, chunk: &Chunk<E>, head_dim: usize) -> bool;

    /// `sums[dimension][lane] += V[key][dimension] * weights[key][lane]` for the keys of the range.
    fn accumulate<S: Simd>(
        &mut self,
        simd: S,
        weights: &mut [f32],
        keys: Range<usize>,
        vectors: usize,
        head_dim: usize,
        sums: &mut [f32],
    );

    /// The same where only some lanes see a key, and V may hold what is not finite.
    #[expect(clippy::too_many_arguments, reason = "those of `accumulate` and two more")]
    fn accumulate_seen<S: Simd, E: Element>(
        &mut self,
        simd: S,
        chunk: &Chunk<E>,
        weights: &[f32],
        keys: Range<usize>,
        vectors: usize,
        head_dim: usize,
        seen: &Seen,
        sums: &mut [f32],
    );
}

/// Which of the chunk's keys each lane sees: those from `start` on and below `stop`.
pub(crate) struct Seen {
    pub(crate) start: [f32; MAX_PANEL],
    pub(crate) stop: [f32; MAX_PANEL],
}

/// Working memory. Panels of all heads of the tile are numbered through, head by head.
#[derive(Default)]
pub(crate) struct Memory {
    /// Queries in the engine's form, `[query_size, lanes]` for each panel.
    queries: Buffer,
    /// Weighted sums of V so far, `[dims, lanes]` for each panel.
    sums: Buffer,
    /// `[CHUNK, lanes]`: scores, then weights.
    scores: Buffer,
    /// `[MAX_LANES, dims]`: queries and results before and after they change places with lanes.
    rows: Buffer,
    tops: Buffer,
    totals: Buffer,
    /// What each row sees, and of each panel what any and what all of its rows see.
    seen: Vec<Range<usize>>,
    seen_by_any: Vec<Range<usize>>,
    seen_by_all: Vec<Range<usize>>,
}

/// The sizes of a tile's panels.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    /// Of one head.
    panels: usize,
    lanes: usize,
    head_dim: usize,
    /// `head_dim` with padding.
    dims: usize,
    query_size: usize,
}

impl Sizes {
    fn vectors(&self, panel: usize, lanes_of_vector: usize) -> usize {
        (self.rows - panel * self.lanes).min(self.lanes).div_ceil(lanes_of_vector)
    }
}

#[inline(always)]
pub(crate) fn run<S: Simd, E: Element, G: Engine>(
    simd: S,
    engine: &mut G,
    job: &Job<'_, E>,
    tile: &Tile,
    memory: &mut Memory,
) {
    let sizes = prepare::<S, E, G>(simd, job, tile, memory);
    engine.begin();
    let seen = job.seen_by_any(tile);
    let at = |first: usize| first.min(seen.end)..(first + CHUNK).min(seen.end);
    let (mut chunk, mut next) = (Chunk::new(), Chunk::new());
    chunk.locate(job, tile.row, tile.heads.start, at(seen.start));
    while chunk.len() > 0 {
        next.locate(job, tile.row, tile.heads.start, at(chunk.positions.end));
        let mut ahead = Ahead::new(&next, job, tile.heads.len());
        for (place, kv_head) in tile.heads.clone().enumerate() {
            chunk.turn_to(job, place);
            engine.load(simd, &chunk, &mut ahead, sizes.head_dim);
            let mut is_finite = None;
            for panel in 0..sizes.panels {
                attend_chunk(
                    simd,
                    engine,
                    job,
                    tile,
                    &chunk,
                    kv_head,
                    place,
                    panel,
                    &sizes,
                    &mut is_finite,
                    memory,
                );
            }
        }
        mem::swap(&mut chunk, &mut next);
    }
    engine.end();
    finish(simd, job, tile, &sizes, memory);
}

#[inline(always)]
fn prepare<S: Simd, E: Element, G: Engine>(
    simd: S,
    job: &Job<'_, E>,
    tile: &Tile,
    memory: &mut Memory,
) -> Sizes {
    let rows = tile.queries.len() * job.group;
    let lanes = G::VECTORS * S::LANES;
    let panels = rows.div_ceil(lanes);
    let head_dim = job.keys.shape()[3];
    let dims = head_dim.next_multiple_of(DIMS);
    let query_size = G::query_size(head_dim) * lanes;
    let all = panels * tile.heads.len();
    memory.queries.reserve(all * query_size);
    memory.sums.reserve(all * dims * lanes);
    memory.scores.reserve(CHUNK * lanes);
    memory.tops.reserve(all * lanes);
    memory.totals.reserve(all * lanes);
    memory.rows.reserve(MAX_LANES * dims);
    memory.sums[..all * dims * lanes].fill(0.0);
    memory.tops[..all * lanes].fill(Denominator::EMPTY.top);
    memory.totals[..all * lanes].fill(Denominator::EMPTY.total);
    let width = query_size / lanes;
    for (place, kv_head) in tile.heads.clone().enumerate() {
        for first in (0..panels * lanes).step_by(S::LANES) {
            for lane in 0..S::LANES {
                // Lanes behind the last row follow it: they see what it sees, and nobody looks at them.
                let (query, head) = job.row(tile, kv_head, (first + lane).min(rows - 1));
                let from = job.q.row(job.queries[query].token, head);
                // SAFETY: a row has head_dim readable elements.
                unsafe { G::load_query(simd, from, head_dim, &mut memory.rows[lane * width..][..width]) };
            }
            let panel = place * panels + first / lanes;
            let to = &mut memory.queries[panel * query_size..][..query_size];
            for d in (0..width).step_by(S::LANES) {
                let to = to[d * lanes + first % lanes..].as_mut_ptr();
                // SAFETY: both have `width` columns or rows, a multiple of LANES, and `lanes` is one, too.
                unsafe { simd.transpose(memory.rows[d..].as_ptr(), width, to, lanes) };
            }
        }
    }
    memory.seen.clear();
    memory.seen.extend((0..rows).map(|row| job.seen(tile, tile.queries.start + row / job.group)));
    memory.seen_by_any.clear();
    memory.seen_by_all.clear();
    for rows in memory.seen.chunks(lanes) {
        let (mut any, mut all) = ((usize::MAX, 0), (0, usize::MAX));
        for seen in rows {
            if !seen.is_empty() {
                any = (any.0.min(seen.start), any.1.max(seen.end));
            }
            all = (all.0.max(seen.start), all.1.min(seen.end));
        }
        memory.seen_by_any.push(any.0.min(any.1)..any.1);
        memory.seen_by_all.push(all.0..all.1);
    }
    Sizes { rows, panels, lanes, head_dim, dims, query_size }
}

/// One panel against one chunk.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a loop's body")]
fn attend_chunk<S: Simd, E: Element, G: Engine>(
    simd: S,
    engine: &mut G,
    job: &Job<'_, E>,
    tile: &Tile,
    chunk: &Chunk<E>,
    kv_head: usize,
    place: usize,
    panel: usize,
    sizes: &Sizes,
    is_finite: &mut Option<bool>,
    memory: &mut Memory,
) {
    let (first, any, all) = (chunk.positions.start, &memory.seen_by_any[panel], &memory.seen_by_all[panel]);
    let bound = |position: usize| position.clamp(first, chunk.positions.end) - first;
    let keys = bound(any.start)..bound(any.end);
    if keys.is_empty() {
        return;
    }
    let is_seen_by_all = all.start <= first + keys.start && all.end >= first + keys.end;
    let keys = keys.start / G::KEYS * G::KEYS..keys.end;
    let is_seen_by_all = is_seen_by_all && all.start <= first + keys.start;
    let vectors = sizes.vectors(panel, S::LANES);
    let number = place * sizes.panels + panel;
    let queries = &memory.queries[number * sizes.query_size..][..sizes.query_size];
    let scored = keys.start..keys.end.next_multiple_of(G::KEYS);
    engine.score(simd, queries, scored, vectors, sizes.head_dim, &mut memory.scores);

    let mut seen = Seen { start: [0.0; MAX_PANEL], stop: [CHUNK as f32; MAX_PANEL] };
    if !is_seen_by_all {
        let rows = &memory.seen[panel * sizes.lanes..];
        for lane in 0..sizes.lanes {
            let row = &rows[lane.min(rows.len() - 1)];
            (seen.start[lane], seen.stop[lane]) = (bound(row.start) as f32, bound(row.end) as f32);
        }
    }
    let factor = transform(simd, job, tile, kv_head, panel, sizes, first, &keys, &mut memory.scores);
    if !is_seen_by_all {
        hide(simd, &seen, &keys, vectors, sizes.lanes, &mut memory.scores);
    }
    let tops = &mut memory.tops[number * sizes.lanes..][..sizes.lanes];
    let totals = &mut memory.totals[number * sizes.lanes..][..sizes.lanes];
    let sums = &mut memory.sums[number * sizes.dims * sizes.lanes..][..sizes.dims * sizes.lanes];
    match vectors {
        1 => soften::<S, 1>(simd, factor, &keys, sizes, tops, totals, &mut memory.scores, sums),
        2 => soften::<S, 2>(simd, factor, &keys, sizes, tops, totals, &mut memory.scores, sums),
        _ => soften::<S, 3>(simd, factor, &keys, sizes, tops, totals, &mut memory.scores, sums),
    }
    let finite = match *is_finite {
        _ if is_seen_by_all => true, // if not, it is everybody's business
        Some(known) => known,
        None => *is_finite.insert(engine.is_finite(simd, chunk, sizes.head_dim)),
    };
    if finite {
        engine.accumulate(simd, &mut memory.scores, keys, vectors, sizes.head_dim, sums);
    } else {
        engine.accumulate_seen(simd, chunk, &memory.scores, keys, vectors, sizes.head_dim, &seen, sums);
    }
}

/// Applies soft cap and bias to products; returns by what they must still be multiplied to be scores.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a loop's body")]
fn transform<S: Simd, E: Element>(
    simd: S,
    job: &Job<'_, E>,
    tile: &Tile,
    kv_head: usize,
    panel: usize,
    sizes: &Sizes,
    first_position: usize,
    keys: &Range<usize>,
    scores: &mut [f32],
) -> f32 {
    let scoring = job.scoring;
    if scoring.logit_softcap.is_none() && scoring.alibi_slopes.is_none() && scoring.scale > 0.0 {
        return scoring.scale;
    }
    let cap = scoring.logit_softcap.unwrap_or(0.0);
    let (scale, caps, inverse) = (simd.splat(scoring.scale), simd.splat(cap), simd.splat(1.0 / cap));
    // Of each lane: the slope, and the distance of the chunk's first key.
    let (mut slopes, mut distances) = ([0.0; MAX_PANEL], [0.0; MAX_PANEL]);
    if let Some(all) = scoring.alibi_slopes {
        for lane in 0..sizes.lanes {
            let row = (panel * sizes.lanes + lane).min(sizes.rows - 1);
            let (query, head) = job.row(tile, kv_head, row);
            slopes[lane] = all[head];
            // Whole numbers, exact in f32 up to 2^24.
            distances[lane] =
                (first_position as i64 - job.queries[query].position.unwrap_or(0) as i64) as f32;
        }
    }
    for key in keys.clone() {
        let row = &mut scores[key * sizes.lanes..][..sizes.lanes];
        for lane in (0..sizes.lanes).step_by(S::LANES) {
            let mut x = simd.mul(simd.get(&row[lane..]), scale);
            if scoring.logit_softcap.is_some() {
                x = simd.mul(caps, simd.tanh(simd.mul(x, inverse)));
            }
            if scoring.alibi_slopes.is_some() {
                let distance = simd.add(simd.get(&distances[lane..]), simd.splat(key as f32));
                x = simd.fma(simd.get(&slopes[lane..]), distance, x);
            }
            simd.put(&mut row[lane..], x);
        }
    }
    1.0
}

/// Sets scores of keys that a lane does not see to minus infinity.
#[inline(always)]
fn hide<S: Simd>(
    simd: S,
    seen: &Seen,
    keys: &Range<usize>,
    vectors: usize,
    lanes: usize,
    scores: &mut [f32],
) {
    let hidden = simd.splat(f32::NEG_INFINITY);
    for key in keys.clone() {
        let place = simd.splat(key as f32);
        for vector in 0..vectors {
            let score = &mut scores[key * lanes + vector * S::LANES..][..S::LANES];
            let (start, stop) = (&seen.start[vector * S::LANES..], &seen.stop[vector * S::LANES..]);
            let x = simd.select_less(place, simd.get(stop), simd.get(score), hidden);
            simd.put(score, simd.select_less(place, simd.get(start), hidden, x));
        }
    }
}

/// Turns the products of N vectors of rows into weights, relative to their maxima, which it carries on.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a loop's body")]
fn soften<S: Simd, const N: usize>(
    simd: S,
    factor: f32,
    keys: &Range<usize>,
    sizes: &Sizes,
    tops: &mut [f32],
    totals: &mut [f32],
    scores: &mut [f32],
    sums: &mut [f32],
) {
    let lanes = sizes.lanes;
    assert!(scores.len() >= keys.end * lanes && lanes >= N * S::LANES);
    let scores = scores.as_mut_ptr();
    let place = |key: usize, n: usize| key * lanes + n * S::LANES;

    let mut largest = [simd.splat(f32::NEG_INFINITY); N];
    let mut other = largest; // two, since each maximum waits for the one before
    let mut key = keys.start;
    while key + 2 <= keys.end {
        for n in 0..N {
            // SAFETY: there are scores of N vectors for all keys.
            unsafe {
                largest[n] = simd.max(largest[n], simd.load(scores.add(place(key, n))));
                other[n] = simd.max(other[n], simd.load(scores.add(place(key + 1, n))));
            }
        }
        key += 2;
    }
    let (to_base_2, headroom) = (simd.splat(factor * LOG2_E), simd.splat(HEADROOM));
    let (one, lowest) = (simd.splat(1.0), simd.splat(f32::MIN));
    let (mut base, mut rescale) = ([one; N], [one; N]);
    let mut rescales = false;
    for n in 0..N {
        if key < keys.end {
            // SAFETY: as above.
            other[n] = simd.max(other[n], unsafe { simd.load(scores.add(place(key, n))) });
        }
        let before = simd.get(&tops[n * S::LANES..]);
        let new = simd.mul(simd.max(largest[n], other[n]), to_base_2);
        let top = simd.select_less(simd.add(before, headroom), new, new, before);
        simd.put(&mut tops[n * S::LANES..], top);
        let shrink = simd.select_less(before, top, simd.exp2(simd.sub(before, top)), one);
        rescale[n] = simd.select_less(before, lowest, one, shrink); // nothing there to be rescaled
        base[n] = simd.select_less(top, lowest, simd.splat(0.0), simd.sub(simd.splat(0.0), top));
        rescales |= simd.min_lane(rescale[n]) < 1.0;
    }

    let mut total = [simd.splat(0.0); N];
    for key in keys.clone() {
        for n in 0..N {
            // SAFETY: as above.
            unsafe {
                let at = scores.add(place(key, n));
                let weight = simd.exp2(simd.fma(simd.load(at), to_base_2, base[n]));
                total[n] = simd.add(total[n], weight);
                simd.store(at, weight);
            }
        }
    }
    for n in 0..N {
        let place = &mut totals[n * S::LANES..];
        simd.put(place, simd.fma(simd.get(place), rescale[n], total[n]));
    }
    if rescales {
        for row in sums.chunks_exact_mut(lanes) {
            for n in 0..N {
                let place = &mut row[n * S::LANES..];
                simd.put(place, simd.mul(simd.get(place), rescale[n]));
            }
        }
    }
}

#[inline(always)]
fn finish<S: Simd, E: Element>(simd: S, job: &Job<'_, E>, tile: &Tile, sizes: &Sizes, memory: &mut Memory) {
    let Sizes { rows, panels, lanes, head_dim, dims, .. } = *sizes;
    for (place, kv_head) in tile.heads.clone().enumerate() {
        for first in (0..rows).step_by(S::LANES) {
            let panel = place * panels + first / lanes;
            let sums = &memory.sums[panel * dims * lanes..][..dims * lanes];
            for d in (0..dims).step_by(S::LANES) {
                let from = sums[d * lanes + first % lanes..].as_ptr();
                // SAFETY: both have `dims` rows or columns, a multiple of LANES, and `lanes` is one, too.
                unsafe { simd.transpose(from, lanes, memory.rows[d..].as_mut_ptr(), dims) };
            }
            for row in first..(first + S::LANES).min(rows) {
                let number = panel * lanes + row % lanes;
                let denominator = Denominator { top: memory.tops[number], total: memory.totals[number] };
                let (query, head) = job.row(tile, kv_head, row);
                let result = &memory.rows[(row - first) * dims..][..head_dim];
                // SAFETY: each query and head is in one tile of its kind, and each of these is run once.
                unsafe { job.output.put(simd, job, tile, [query, head], denominator, result) };
            }
        }
    }
}
