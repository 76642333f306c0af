//! Attention of few rows, as in decode: a vector's lanes are dimensions, and each row of K and V is loaded once, from
//! where it lies, for all rows of the tile.
//!
//! Keys are taken a chunk at a time, whatever the block size: score, soften (the online softmax's rescaling),
//! accumulate. In between, few keys meet the rows of all KV heads before the next ones do, in an [`Order`] in which a
//! CPU foresees by itself what is read next.
#![expect(clippy::needless_range_loop, reason = "arrays are registers, and loops over them are unrolled")]
#![expect(clippy::inline_always, reason = "all of it must end up in a #[target_feature] function")]

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::buffer::Buffer;
use super::chunk::{CHUNK, Chunk, KEYS};
use super::element::Element;
use super::job::{Job, Tile};
use super::output::Denominator;
use super::scratch::Scratch;
use super::simd::{MAX_LANES, Simd};

/// Keys whose products with the rows are in registers at once.
const AT_ONCE: usize = 4;

/// What CPUs follow reads in, one ascending run of them in each.
const PAGE: usize = 4096;

/// In which order [`KEYS`] keys are read: with a step of 1, all of them for one head, then for the next; with a step of
/// 2 those at even places for all heads, then the others.
///
/// A CPU that sees reads ascend through a page of memory fetches what comes next, in dozens of pages at once. With the
/// heads of a token side by side, tokens that share a page would give two runs in it, which it takes for disorder.
#[derive(Clone, Copy)]
struct Order {
    step: usize,
}

impl Order {
    #[inline(always)]
    fn of<E: Element>(job: &Job<'_, E>) -> Self {
        let [_, _, heads, head_dim] = job.keys.shape();
        let token = if job.keys.has_adjacent_heads() { heads * head_dim * size_of::<E>() } else { PAGE };
        Self { step: (PAGE / token.max(1)).clamp(1, KEYS / AT_ONCE).next_power_of_two() }
    }

    /// What is read for all heads, one after the other.
    #[inline(always)]
    fn turns(self, keys: usize) -> impl Iterator<Item = Places> {
        let step = self.step;
        (0..keys).step_by(KEYS).flat_map(move |first| {
            let end = keys.min(first + KEYS);
            (first..end.min(first + step)).map(move |start| Places { start, end, step })
        })
    }
}

/// Places of a chunk: every `step`-th from `start` on, below `end`.
#[derive(Clone, Copy)]
struct Places {
    start: usize,
    end: usize,
    step: usize,
}

impl Places {
    /// Those in a range.
    #[inline(always)]
    fn within(self, range: &Range<usize>) -> Self {
        let passed = range.start.saturating_sub(self.start).next_multiple_of(self.step);
        Self { start: self.start + passed, end: self.end.min(range.end), ..self }
    }

    #[inline(always)]
    fn is_empty(self) -> bool {
        self.start >= self.end
    }
}

/// Working memory. Rows of all heads of the tile are numbered through, head by head.
#[derive(Default)]
pub(crate) struct Memory {
    /// Scaled queries, a row each.
    queries: Buffer,
    /// Weighted sums of V so far, a row each.
    sums: Buffer,
    /// Scores of the chunk's keys, then their weights, a row each.
    scores: Buffer,
    so_far: Vec<Denominator>,
    /// Which of the chunk's keys each row of a head sees.
    seen: Vec<Range<usize>>,
    /// `head_dim`, and what it takes with padding.
    head_dim: usize,
    width: usize,
}

#[inline(always)]
pub(crate) fn run<S: Simd, E: Element>(simd: S, job: &Job<'_, E>, tile: &Tile, scratch: &mut Scratch) {
    let memory = &mut scratch.thin;
    let rows = tile.queries.len() * job.group;
    load_queries(simd, job, tile, memory);
    let order = Order::of(job);
    let seen = job.seen_by_any(tile);
    let mut chunk = Chunk::new();
    for first in seen.clone().step_by(CHUNK) {
        chunk.locate(job, tile.row, tile.heads.start, first..seen.end.min(first + CHUNK));
        mark_seen(job, tile, &chunk.positions, memory);
        score(simd, job, tile, order, &mut chunk, memory);
        for (place, kv_head) in tile.heads.clone().enumerate() {
            for row in 0..rows {
                soften(simd, job, tile, &chunk.positions, kv_head, row, place * rows + row, memory);
            }
        }
        accumulate(simd, job, tile, order, &mut chunk, memory);
    }
    for (place, kv_head) in tile.heads.clone().enumerate() {
        for row in 0..rows {
            let (query, head) = job.row(tile, kv_head, row);
            let number = place * rows + row;
            let sums = &memory.sums[number * memory.width..][..memory.head_dim];
            // SAFETY: each query and head is in one tile of its kind, and each of these is run once.
            unsafe {
                job.output.put(simd, job, tile, [query, head], memory.so_far[number], sums);
            }
        }
    }
}

#[inline(always)]
fn load_queries<S: Simd, E: Element>(simd: S, job: &Job<'_, E>, tile: &Tile, memory: &mut Memory) {
    let rows = tile.queries.len() * job.group;
    let all = rows * tile.heads.len();
    memory.head_dim = job.keys.shape()[3];
    memory.width = memory.head_dim.next_multiple_of(MAX_LANES);
    memory.queries.reserve(all * memory.width);
    memory.sums.reserve(all * memory.width);
    memory.scores.reserve(all * CHUNK);
    memory.so_far.clear();
    memory.so_far.resize(all, Denominator::EMPTY);
    memory.seen.clear();
    memory.seen.resize(rows, 0..0);
    memory.sums[..all * memory.width].fill(0.0);
    let scale = simd.splat(job.scoring.scale);
    for number in 0..all {
        let (query, head) = job.row(tile, tile.heads.start + number / rows, number % rows);
        let from = job.q.row(job.queries[query].token, head);
        let to = &mut memory.queries[number * memory.width..][..memory.width];
        for d in (0..memory.width).step_by(S::LANES) {
            let count = memory.head_dim.saturating_sub(d);
            // SAFETY: `from` is the address of head_dim readable elements, of which `count` are left from d on.
            simd.put(&mut to[d..], simd.mul(scale, unsafe { simd.load_up_to(from.wrapping_add(d), count) }));
        }
    }
}

/// Notes which of the chunk's keys each row sees.
#[inline(always)]
fn mark_seen<E: Element>(job: &Job<'_, E>, tile: &Tile, chunk: &Range<usize>, memory: &mut Memory) {
    for row in 0..memory.seen.len() {
        let seen = job.seen(tile, tile.queries.start + row / job.group);
        let place = |position: usize| position.clamp(chunk.start, chunk.end) - chunk.start;
        memory.seen[row] = place(seen.start)..place(seen.end);
    }
}

/// Products of the rows' queries and the chunk's keys; those of unseen keys are somewhere between true and missing.
#[inline(always)]
fn score<S: Simd, E: Element>(
    simd: S,
    job: &Job<'_, E>,
    tile: &Tile,
    order: Order,
    chunk: &mut Chunk<E>,
    memory: &mut Memory,
) {
    let rows = memory.seen.len();
    for places in order.turns(chunk.len()) {
        for head in 0..tile.heads.len() {
            chunk.turn_to(job, head);
            for first in (places.start..places.end).step_by(AT_ONCE * places.step) {
                let mut keys = [std::ptr::null(); AT_ONCE];
                for place in 0..AT_ONCE {
                    keys[place] = chunk.key(first + place * places.step);
                }
                let (mut row, at) = (0, Places { start: first, ..places });
                while row < rows {
                    let number = head * rows + row;
                    row += match rows - row {
                        4.. if S::ROWS >= 4 => score_rows::<S, E, 4>(simd, keys, at, number, memory),
                        2.. => score_rows::<S, E, 2>(simd, keys, at, number, memory),
                        _ => score_rows::<S, E, 1>(simd, keys, at, number, memory),
                    };
                }
            }
        }
    }
}

/// Those of M rows, from a number on, and of the first few places.
#[inline(always)]
fn score_rows<S: Simd, E: Element, const M: usize>(
    simd: S,
    keys: [*const E; AT_ONCE],
    places: Places,
    number: usize,
    memory: &mut Memory,
) -> usize {
    let (dim, width) = (memory.head_dim, memory.width);
    let queries = memory.queries[number * width..][..M * width].as_ptr();
    let scores = &mut memory.scores[number * CHUNK..][..M * CHUNK];
    let mut products = [[simd.splat(0.0); AT_ONCE]; M];
    let whole = dim - dim % S::LANES;
    for d in (0..whole).step_by(S::LANES) {
        let mut k = [simd.splat(0.0); AT_ONCE];
        for place in 0..AT_ONCE {
            // SAFETY: every key is the address of head_dim readable elements.
            k[place] = unsafe { simd.load_elements(keys[place].add(d)) };
        }
        for m in 0..M {
            // SAFETY: M rows of `width` numbers begin at `queries`.
            let q = unsafe { simd.load(queries.add(m * width + d)) };
            for place in 0..AT_ONCE {
                products[m][place] = simd.fma(q, k[place], products[m][place]);
            }
        }
    }
    if whole < dim {
        for place in 0..AT_ONCE {
            // SAFETY: as above; dim - whole elements are left.
            let k = unsafe { simd.load_up_to(keys[place].add(whole), dim - whole) };
            for m in 0..M {
                // SAFETY: as above; rows are padded.
                let q = unsafe { simd.load(queries.add(m * width + whole)) };
                products[m][place] = simd.fma(q, k, products[m][place]);
            }
        }
    }
    for m in 0..M {
        for (place, sum) in simd.sum_each(products[m]).into_iter().enumerate() {
            scores[m * CHUNK + places.start + place * places.step] = sum;
        }
    }
    M
}

/// Turns one row's products into weights, relative to its new maximum, and its sums so far, too.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a loop's body")]
fn soften<S: Simd, E: Element>(
    simd: S,
    job: &Job<'_, E>,
    tile: &Tile,
    positions: &Range<usize>,
    kv_head: usize,
    row: usize,
    number: usize,
    memory: &mut Memory,
) {
    let seen = memory.seen[row].clone();
    if seen.is_empty() {
        return;
    }
    let scores = &mut memory.scores[number * CHUNK..][..CHUNK];
    let used = seen.end.next_multiple_of(S::LANES);
    if let Some(cap) = job.scoring.logit_softcap {
        let (cap, inverse) = (simd.splat(cap), simd.splat(1.0 / cap));
        for x in scores[..used].chunks_exact_mut(S::LANES) {
            simd.put(x, simd.mul(cap, simd.tanh(simd.mul(simd.get(x), inverse))));
        }
    }
    if let Some(slopes) = job.scoring.alibi_slopes {
        let (query, head) = job.row(tile, kv_head, row);
        // Distances are whole numbers, exact in f32 up to 2^24.
        let slope = simd.splat(slopes[head]);
        let mut distance = positions.start as i64 - job.queries[query].position.unwrap_or(0) as i64;
        for x in scores[..used].chunks_exact_mut(S::LANES) {
            let distances = simd.add(simd.splat(distance as f32), simd.iota());
            simd.put(x, simd.fma(slope, distances, simd.get(x)));
            distance += S::LANES as i64;
        }
    }
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..used].fill(f32::NEG_INFINITY);

    let mut largest = simd.splat(f32::NEG_INFINITY);
    for x in scores[..used].chunks_exact(S::LANES) {
        largest = simd.max(largest, simd.get(x));
    }
    let largest = simd.max_lane(largest) * LOG2_E;
    let before = &mut memory.so_far[number];
    let top = if largest > before.top { largest } else { before.top };
    if top > before.top {
        let factor = (before.top - top).exp2();
        before.total *= factor;
        let factor = simd.splat(factor);
        for sums in memory.sums[number * memory.width..][..memory.width].chunks_exact_mut(S::LANES) {
            simd.put(sums, simd.mul(factor, simd.get(sums)));
        }
    }
    let (tops, to_base_2, zero) = (simd.splat(-top), simd.splat(LOG2_E), simd.splat(0.0));
    let mut total = zero;
    for x in scores[..used].chunks_exact_mut(S::LANES) {
        let weight = simd.exp2(simd.fma(simd.get(x), to_base_2, tops));
        total = simd.add(total, weight);
        simd.put(x, weight);
    }
    let total = simd.sum_each([total, zero, zero, zero])[0];
    *before = Denominator { top, total: before.total + total };
}

/// Adds the chunk's rows of V to the sums, weighted.
#[inline(always)]
fn accumulate<S: Simd, E: Element>(
    simd: S,
    job: &Job<'_, E>,
    tile: &Tile,
    order: Order,
    chunk: &mut Chunk<E>,
    memory: &mut Memory,
) {
    let rows = memory.seen.len();
    for places in order.turns(chunk.len()) {
        for head in 0..tile.heads.len() {
            chunk.turn_to(job, head);
            let mut row = 0;
            while row < rows {
                row += match rows - row {
                    4.. if S::ROWS >= 4 => add_rows::<S, E, 4>(simd, chunk, places, head * rows, row, memory),
                    2.. => add_rows::<S, E, 2>(simd, chunk, places, head * rows, row, memory),
                    _ => add_rows::<S, E, 1>(simd, chunk, places, head * rows, row, memory),
                };
            }
        }
    }
}

/// Adds some values to M rows' sums: together where all of them see a value, alone elsewhere, since a weight of zero
/// would not do for an unseen one: zero times NaN is NaN.
#[inline(always)]
fn add_rows<S: Simd, E: Element, const M: usize>(
    simd: S,
    chunk: &Chunk<E>,
    places: Places,
    first_row: usize,
    row: usize,
    memory: &mut Memory,
) -> usize {
    let (mut start, mut stop) = (0, CHUNK);
    for m in 0..M {
        start = start.max(memory.seen[row + m].start);
        stop = stop.min(memory.seen[row + m].end);
    }
    let together = places.within(&(start..stop));
    if !together.is_empty() {
        add_weighted::<S, E, M>(simd, chunk, together, first_row + row, memory);
    }
    if M == 1 || (start <= places.start && stop >= places.end) {
        return M;
    }
    for m in 0..M {
        let seen = memory.seen[row + m].clone();
        let parts = if start < stop { [seen.start..start, stop..seen.end] } else { [seen, 0..0] };
        for part in parts {
            let alone = places.within(&part);
            if !alone.is_empty() {
                add_weighted::<S, E, 1>(simd, chunk, alone, first_row + row + m, memory);
            }
        }
    }
    M
}

/// Adds the weighted V of some places to the sums of M rows, from a number on.
#[inline(always)]
fn add_weighted<S: Simd, E: Element, const M: usize>(
    simd: S,
    chunk: &Chunk<E>,
    places: Places,
    number: usize,
    memory: &mut Memory,
) {
    let (dim, width) = (memory.head_dim, memory.width);
    let weights = &memory.scores[number * CHUNK..][..M * CHUNK];
    let sums = &mut memory.sums[number * width..][..M * width];
    let mut d = 0;
    while d + 4 * S::LANES <= dim {
        add_columns::<S, E, M, 4>(simd, chunk, places, weights, sums, width, d..dim);
        d += 4 * S::LANES;
    }
    while d < dim {
        add_columns::<S, E, M, 1>(simd, chunk, places, weights, sums, width, d..dim);
        d += S::LANES;
    }
}

/// The part of [`add_weighted`] that keeps its sums in registers: N vectors from `columns.start` on.
///
/// If N is 1, `columns` may have less than a vector left.
#[inline(always)]
fn add_columns<S: Simd, E: Element, const M: usize, const N: usize>(
    simd: S,
    chunk: &Chunk<E>,
    places: Places,
    weights: &[f32],
    sums: &mut [f32],
    width: usize,
    columns: Range<usize>,
) {
    let d = columns.start;
    let whole = columns.len() >= N * S::LANES;
    assert!(
        (N == 1 || whole) && sums.len() >= M * width && weights.len() >= M * CHUNK && places.end <= CHUNK
    );
    assert!(d + N * S::LANES <= width);
    let (sums, weights) = (sums.as_mut_ptr(), weights.as_ptr());
    let mut sum = [[simd.splat(0.0); N]; M];
    for m in 0..M {
        for n in 0..N {
            // SAFETY: M rows of `width` numbers begin at `sums`, and N vectors are left from d on.
            sum[m][n] = unsafe { simd.load(sums.add(m * width + d + n * S::LANES)) };
        }
    }
    for key in (places.start..places.end).step_by(places.step) {
        let value = chunk.value(key);
        let mut v = [simd.splat(0.0); N];
        for n in 0..N {
            // SAFETY: every seen value is the address of columns.end readable elements. N vectors are left from d on, or
            // else N is 1 and fewer are loaded.
            v[n] = unsafe {
                let from = value.add(d + n * S::LANES);
                if whole { simd.load_elements(from) } else { simd.load_up_to(from, columns.len()) }
            };
        }
        for m in 0..M {
            // SAFETY: M rows of CHUNK weights begin at `weights`, and key < CHUNK.
            let weight = simd.splat(unsafe { *weights.add(m * CHUNK + key) });
            for n in 0..N {
                sum[m][n] = simd.fma(weight, v[n], sum[m][n]);
            }
        }
    }
    for m in 0..M {
        for n in 0..N {
            // SAFETY: as above.
            unsafe { simd.store(sums.add(m * width + d + n * S::LANES), sum[m][n]) };
        }
    }
}
