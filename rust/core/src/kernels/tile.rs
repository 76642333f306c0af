//! The inner part of attention: some queries of one sequence against all that they see of one KV head.
//!
//! A tile's rows are its queries times the query heads that share the KV head, so that each row of K and V is
//! loaded once for all of them. Keys are taken [`CHUNK`] at a time, whatever the block size:
//! score, soften (the online softmax's rescaling), accumulate.
//!
//! Vectors are not handled in closures, which cannot be told to be inlined.
#![expect(clippy::inline_always, reason = "all of it must end up in a #[target_feature] function")]

use std::mem;
use std::ops::Range;

use super::attention::Scoring;
use super::element::{Element, Format};
use super::job::{Job, Tile};
use super::simd::{MAX_LANES, Simd};

/// Keys at a time: their scores and rows of V stay in the first-level cache until they are used.
const CHUNK: usize = 64;

/// From so many rows on, half types are widened a chunk at a time: it costs less to do that once than for every few rows.
const WIDEN_FROM: usize = 16;

/// Keys that are scored together.
const KEYS: usize = 4;

/// Bytes that memory moves at once.
const CACHE_LINE: usize = 64;

/// A thread's working memory.
pub(crate) struct Scratch {
    /// Scaled queries, a row each.
    queries: Vec<f32>,
    /// Weighted sums of V so far, a row each.
    sums: Vec<f32>,
    /// Scores of the chunk's keys, then their weights, a row each.
    scores: Vec<f32>,
    rows: Vec<Row>,
    /// A chunk's K and V in f32, if the tile has rows enough for that.
    wide: Vec<f32>,
    /// `head_dim`, and what it takes with padding.
    head_dim: usize,
    width: usize,
}

/// State of one row's softmax.
#[derive(Clone, Default)]
struct Row {
    /// The largest score so far; weights are relative to it.
    max: f32,
    /// The weights' sum so far.
    total: f32,
    /// What the chunk in hand makes of earlier sums.
    rescale: f32,
    /// Which of the chunk's keys the row sees.
    seen: Range<usize>,
}

impl Scratch {
    pub(crate) fn new(rows: usize, head_dim: usize) -> Self {
        let width = head_dim.next_multiple_of(MAX_LANES);
        Self {
            queries: vec![0.0; rows * width],
            sums: vec![0.0; rows * width],
            scores: vec![0.0; rows * CHUNK],
            rows: vec![Row::default(); rows],
            wide: Vec::new(),
            head_dim,
            width,
        }
    }
}

/// Addresses of some neighbouring positions' K and V.
struct Chunk<E> {
    positions: Range<usize>,
    /// Those of `positions`, the last one repeated up to a multiple of [`KEYS`].
    keys: [*const E; CHUNK],
    values: [*const E; CHUNK],
}

impl<E: Element> Chunk<E> {
    fn new() -> Self {
        Self { positions: 0..0, keys: [std::ptr::null(); CHUNK], values: [std::ptr::null(); CHUNK] }
    }

    fn len(&self) -> usize {
        self.positions.len()
    }

    /// The same chunk as f32, in memory of its own: twice [`CHUNK`] rows of `width`.
    #[inline(always)]
    fn widen<S: Simd>(&self, simd: S, memory: &mut [f32], dim: usize, width: usize) -> Chunk<f32> {
        let mut wide = Chunk::<f32>::new();
        wide.positions = self.positions.clone();
        let (keys, values) = memory.split_at_mut(CHUNK * width);
        for (rows, from, to) in [(keys, &self.keys, &mut wide.keys), (values, &self.values, &mut wide.values)]
        {
            let places = rows.chunks_exact_mut(width).zip(from).zip(to.iter_mut());
            for ((row, &from), to) in places.take(self.positions.len()) {
                for d in (0..dim).step_by(S::LANES) {
                    // SAFETY: each address is that of dim readable elements, and dim - d of them are left.
                    simd.put(&mut row[d..], unsafe { simd.load_up_to(from.add(d), dim - d) });
                }
                *to = row.as_ptr();
            }
        }
        wide.repeat_last_key();
        wide
    }

    /// Makes the number of keys a multiple of [`KEYS`].
    #[inline(always)]
    fn repeat_last_key(&mut self) {
        let count = self.positions.len();
        if count > 0 {
            let last = self.keys[count - 1];
            self.keys[count..count.next_multiple_of(KEYS)].fill(last);
        }
    }

    /// Looks up where the positions lie, at most [`CHUNK`] of them.
    #[inline(always)]
    fn locate(&mut self, job: &Job<'_, E>, row: usize, kv_head: usize, positions: Range<usize>) {
        let [_, block_size, ..] = job.keys.shape();
        let (key_stride, value_stride) = (job.keys.token_stride(), job.values.token_stride());
        let table = job.step.block_table[row];
        let (mut position, mut count) = (positions.start, 0);
        while position < positions.end {
            let (index, offset) = (position / block_size, position % block_size);
            let block = table[index] as usize;
            let run = (block_size - offset).min(positions.end - position);
            let mut key = job.keys.row(block, offset, kv_head);
            let mut value = job.values.row(block, offset, kv_head);
            for (key_place, value_place) in
                self.keys[count..count + run].iter_mut().zip(&mut self.values[count..])
            {
                (*key_place, *value_place) = (key, value);
                // The last step may lead out of the array; nobody follows it there.
                (key, value) = (key.wrapping_offset(key_stride), value.wrapping_offset(value_stride));
            }
            (position, count) = (position + run, count + run);
        }
        self.positions = positions;
        self.repeat_last_key();
    }
}

#[inline(always)]
pub(crate) fn run<S: Simd, E: Element>(
    simd: S,
    job: &Job<'_, E>,
    tile: &Tile,
    kv_head: usize,
    scratch: &mut Scratch,
) {
    load_queries(job, tile, kv_head, scratch);
    let rows = tile.count * job.group;
    let widens = E::FORMAT != Format::F32 && rows >= WIDEN_FROM;
    let mut wide = mem::take(&mut scratch.wide);
    wide.resize(if widens { 2 * CHUNK * scratch.width } else { 0 }, 0.0);
    let window = job.scoring.sliding_window;
    let start = tile.visible(0, window).start;
    let stop = tile.visible(tile.count - 1, window).end;
    let at = |first: usize| first.min(stop)..(first + CHUNK).min(stop);
    let (mut chunk, mut next) = (Chunk::new(), Chunk::new());
    chunk.locate(job, tile.row, kv_head, at(start));
    while chunk.len() > 0 {
        next.locate(job, tile.row, kv_head, at(chunk.positions.end));
        mark_seen(job, tile, &chunk.positions, scratch);
        if widens {
            let chunk = chunk.widen(simd, &mut wide, scratch.head_dim, scratch.width);
            score(simd, &chunk, rows, scratch);
            soften_rows(simd, job, tile, kv_head, chunk.positions.start, scratch);
            accumulate(simd, &chunk, None, rows, scratch);
        } else {
            score(simd, &chunk, rows, scratch);
            soften_rows(simd, job, tile, kv_head, chunk.positions.start, scratch);
            accumulate(simd, &chunk, Some(&next), rows, scratch);
        }
        mem::swap(&mut chunk, &mut next);
    }
    scratch.wide = wide;
    finish(job, tile, kv_head, scratch);
}

/// Notes which of the chunk's keys each row sees.
#[inline(always)]
fn mark_seen<E: Element>(job: &Job<'_, E>, tile: &Tile, chunk: &Range<usize>, scratch: &mut Scratch) {
    for (row, state) in scratch.rows.iter_mut().take(tile.count * job.group).enumerate() {
        let seen = tile.visible(row / job.group, job.scoring.sliding_window);
        let place = |position: usize| position.clamp(chunk.start, chunk.end) - chunk.start;
        state.seen = place(seen.start)..place(seen.end);
    }
}

#[inline(always)]
fn soften_rows<S: Simd, E: Element>(
    simd: S,
    job: &Job<'_, E>,
    tile: &Tile,
    kv_head: usize,
    first_position: usize,
    scratch: &mut Scratch,
) {
    for row in 0..tile.count * job.group {
        let query = tile.position.unwrap_or(0) + row / job.group;
        let head = kv_head * job.group + row % job.group;
        soften(simd, job.scoring, first_position, query, head, row, scratch);
    }
}

#[inline(always)]
fn load_queries<E: Element>(job: &Job<'_, E>, tile: &Tile, kv_head: usize, scratch: &mut Scratch) {
    let rows = tile.count * job.group;
    scratch.sums.fill(0.0);
    for (row, query) in scratch.queries.chunks_exact_mut(scratch.width).take(rows).enumerate() {
        let from = job.q.row(tile.token + row / job.group, kv_head * job.group + row % job.group);
        for (place, to) in query[..scratch.head_dim].iter_mut().enumerate() {
            // SAFETY: `from` is the address of head_dim readable elements.
            *to = unsafe { from.add(place).read() }.to_f32() * job.scoring.scale;
        }
        scratch.rows[row] = Row { max: f32::NEG_INFINITY, ..Row::default() };
    }
}

/// Products of the rows' queries and the chunk's keys; those of unseen keys are somewhere between true and missing.
#[inline(always)]
fn score<S: Simd, E: Element>(simd: S, chunk: &Chunk<E>, rows: usize, scratch: &mut Scratch) {
    let mut row = 0;
    while row < rows {
        row += match rows - row {
            4.. if S::ROWS >= 4 => score_rows::<S, E, 4>(simd, chunk, row, scratch),
            2.. => score_rows::<S, E, 2>(simd, chunk, row, scratch),
            _ => score_rows::<S, E, 1>(simd, chunk, row, scratch),
        };
    }
}

#[inline(always)]
fn score_rows<S: Simd, E: Element, const M: usize>(
    simd: S,
    chunk: &Chunk<E>,
    row: usize,
    scratch: &mut Scratch,
) -> usize {
    if scratch.rows[row..row + M].iter().all(|row| row.seen.is_empty()) {
        return M;
    }
    let (dim, width) = (scratch.head_dim, scratch.width);
    let queries = &scratch.queries[row * width..(row + M) * width];
    let scores = &mut scratch.scores[row * CHUNK..(row + M) * CHUNK];
    for first in (0..chunk.len()).step_by(KEYS) {
        if row == 0 {
            // The rows of V are needed next, and scattered pages are beyond what the CPU foresees by itself.
            chunk.values[first..(first + KEYS).min(chunk.len())]
                .iter()
                .for_each(|&value| prefetch(simd, value, dim));
        }
        let keys = &chunk.keys[first..first + KEYS];
        let mut products = [[simd.splat(0.0); KEYS]; M];
        let whole = dim - dim % S::LANES;
        for d in (0..whole).step_by(S::LANES) {
            multiply(simd, keys, d, S::LANES, queries, width, &mut products);
        }
        if whole < dim {
            multiply(simd, keys, whole, dim - whole, queries, width, &mut products);
        }
        for (scores, products) in scores.chunks_exact_mut(CHUNK).zip(products) {
            scores[first..first + KEYS].copy_from_slice(&simd.sum_each(products));
        }
    }
    M
}

/// Adds to M x KEYS products the share of `count` dimensions, at most a vector, from `d` on.
#[inline(always)]
fn multiply<S: Simd, E: Element, const M: usize>(
    simd: S,
    keys: &[*const E],
    d: usize,
    count: usize,
    queries: &[f32],
    width: usize,
    products: &mut [[S::V; KEYS]; M],
) {
    let mut k = [simd.splat(0.0); KEYS];
    for (k, key) in k.iter_mut().zip(keys) {
        // SAFETY: every key is the address of head_dim readable elements, of which `count` are left from d on.
        *k = unsafe { simd.load_up_to(key.add(d), count) };
    }
    for (m, products) in products.iter_mut().enumerate() {
        let q = simd.get(&queries[m * width + d..]);
        for (product, &k) in products.iter_mut().zip(&k) {
            *product = simd.fma(q, k, *product);
        }
    }
}

/// Turns one row's products into weights, relative to its new maximum.
#[inline(always)]
fn soften<S: Simd>(
    simd: S,
    scoring: &Scoring<'_>,
    first_position: usize,
    query: usize,
    head: usize,
    row: usize,
    scratch: &mut Scratch,
) {
    let state = &mut scratch.rows[row];
    state.rescale = 1.0;
    if state.seen.is_empty() {
        return;
    }
    let seen = state.seen.clone();
    let scores = &mut scratch.scores[row * CHUNK..(row + 1) * CHUNK];
    let used = seen.end.next_multiple_of(S::LANES);
    if let Some(cap) = scoring.logit_softcap {
        let (cap, inverse) = (simd.splat(cap), simd.splat(1.0 / cap));
        for x in scores[..used].chunks_exact_mut(S::LANES) {
            simd.put(x, simd.mul(cap, simd.tanh(simd.mul(simd.get(x), inverse))));
        }
    }
    if let Some(slopes) = scoring.alibi_slopes {
        // Distances are whole numbers, exact in f32 up to 2^24.
        let slope = simd.splat(slopes[head]);
        let mut distance = first_position as i64 - query as i64;
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
    let largest = simd.max_lane(largest);
    let max = if largest > state.max { largest } else { state.max };
    if max > state.max {
        state.rescale = (state.max - max).exp();
    }
    let (top, zero) = (simd.splat(max), simd.splat(0.0));
    let mut total = zero;
    for x in scores[..used].chunks_exact_mut(S::LANES) {
        let weight = simd.exp(simd.sub(simd.get(x), top));
        total = simd.add(total, weight);
        simd.put(x, weight);
    }
    state.total = state.total * state.rescale + simd.sum_each([total, zero, zero, zero])[0];
    state.max = max;
}

/// Adds the chunk's rows of V to the sums, weighted.
///
/// Rows go together over the keys that all of them see, and alone over the others: a weight of zero would not
/// do for an unseen key, since zero times NaN is NaN.
#[inline(always)]
fn accumulate<S: Simd, E: Element>(
    simd: S,
    chunk: &Chunk<E>,
    next: Option<&Chunk<E>>,
    rows: usize,
    scratch: &mut Scratch,
) {
    let mut row = 0;
    while row < rows {
        row += match rows - row {
            4.. if S::ROWS >= 4 => accumulate_rows::<S, E, 4>(simd, chunk, next, row, scratch),
            2.. => accumulate_rows::<S, E, 2>(simd, chunk, next, row, scratch),
            _ => accumulate_rows::<S, E, 1>(simd, chunk, next, row, scratch),
        };
    }
}

#[inline(always)]
fn accumulate_rows<S: Simd, E: Element, const M: usize>(
    simd: S,
    chunk: &Chunk<E>,
    next: Option<&Chunk<E>>,
    row: usize,
    scratch: &mut Scratch,
) -> usize {
    let seen: [Range<usize>; M] = std::array::from_fn(|m| scratch.rows[row + m].seen.clone());
    let start = seen.iter().map(|seen| seen.start).max().unwrap_or(0);
    let stop = seen.iter().map(|seen| seen.end).min().unwrap_or(0);
    let ahead = if row == 0 { next } else { None };
    if start < stop {
        add_weighted::<S, E, M>(simd, chunk, start..stop, row, true, ahead, scratch);
    }
    if M == 1 {
        return M;
    }
    for (m, seen) in seen.into_iter().enumerate() {
        if start < stop {
            for rest in [seen.start..start, stop..seen.end] {
                if !rest.is_empty() {
                    add_weighted::<S, E, 1>(simd, chunk, rest, row + m, false, None, scratch);
                }
            }
        } else if !seen.is_empty() {
            add_weighted::<S, E, 1>(simd, chunk, seen, row + m, true, None, scratch);
        }
    }
    M
}

/// Adds the weighted V of the keys in `range` to the sums of M rows, which are rescaled before if so asked.
#[inline(always)]
fn add_weighted<S: Simd, E: Element, const M: usize>(
    simd: S,
    chunk: &Chunk<E>,
    range: Range<usize>,
    row: usize,
    rescale: bool,
    ahead: Option<&Chunk<E>>,
    scratch: &mut Scratch,
) {
    let (dim, width) = (scratch.head_dim, scratch.width);
    let factors: [f32; M] =
        std::array::from_fn(|m| if rescale { scratch.rows[row + m].rescale } else { 1.0 });
    let weights = &scratch.scores[row * CHUNK..(row + M) * CHUNK];
    let sums = &mut scratch.sums[row * width..(row + M) * width];
    let mut d = 0;
    while d + 4 * S::LANES <= dim {
        let ahead = if d == 0 { ahead } else { None };
        add_columns::<S, E, M, 4>(simd, chunk, range.clone(), weights, factors, sums, width, d..dim, ahead);
        d += 4 * S::LANES;
    }
    while d < dim {
        let ahead = if d == 0 { ahead } else { None };
        add_columns::<S, E, M, 1>(simd, chunk, range.clone(), weights, factors, sums, width, d..dim, ahead);
        d += S::LANES;
    }
}

/// The part of [`add_weighted`] that keeps its sums in registers: N vectors from `columns.start` on.
///
/// If N is 1, `columns` may have less than a vector left.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the body of two nested loops, for the sake of registers")]
fn add_columns<S: Simd, E: Element, const M: usize, const N: usize>(
    simd: S,
    chunk: &Chunk<E>,
    range: Range<usize>,
    weights: &[f32],
    factors: [f32; M],
    sums: &mut [f32],
    width: usize,
    columns: Range<usize>,
    ahead: Option<&Chunk<E>>,
) {
    let d = columns.start;
    let whole = columns.len() >= N * S::LANES;
    assert!((N == 1 || whole) && sums.len() >= M * width && weights.len() >= M * CHUNK && range.end <= CHUNK);
    let mut sum = [[simd.splat(0.0); N]; M];
    for (m, sum) in sum.iter_mut().enumerate() {
        for (n, sum) in sum.iter_mut().enumerate() {
            let before = simd.get(&sums[m * width + d + n * S::LANES..]);
            *sum = simd.mul(before, simd.splat(factors[m]));
        }
    }
    let mut v = [simd.splat(0.0); N];
    for key in range {
        if let Some(next) = ahead
            && key < next.len()
        {
            prefetch(simd, next.keys[key], columns.end);
        }
        let value = chunk.values[key];
        for (n, v) in v.iter_mut().enumerate() {
            // SAFETY: every seen value is the address of columns.end readable elements. N vectors are left from d on, or
            // else N is 1 and fewer are loaded.
            *v = unsafe { simd.load_up_to(value.add(d + n * S::LANES), columns.len() - n * S::LANES) };
        }
        for (m, sum) in sum.iter_mut().enumerate() {
            let weight = simd.splat(weights[m * CHUNK + key]);
            for (sum, &v) in sum.iter_mut().zip(&v) {
                *sum = simd.fma(weight, v, *sum);
            }
        }
    }
    for (m, sum) in sum.into_iter().enumerate() {
        for (n, sum) in sum.into_iter().enumerate() {
            simd.put(&mut sums[m * width + d + n * S::LANES..], sum);
        }
    }
}

/// Asks for all cache lines of a row.
#[inline(always)]
fn prefetch<S: Simd, E: Element>(simd: S, row: *const E, dim: usize) {
    let row = row.cast::<u8>();
    for place in (0..dim * size_of::<E>()).step_by(CACHE_LINE) {
        simd.prefetch(row.wrapping_add(place));
    }
}

/// Divides the sums by the denominators, with the sinks' share in them.
#[inline(always)]
fn finish<E: Element>(job: &Job<'_, E>, tile: &Tile, kv_head: usize, scratch: &Scratch) {
    for row in 0..tile.count * job.group {
        let head = kv_head * job.group + row % job.group;
        let sink = job.scoring.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        let Row { max, total, .. } = scratch.rows[row];
        let top = if sink > max { sink } else { max };
        let (factor, lse) = if top == f32::NEG_INFINITY && total == 0.0 {
            (0.0, f32::NEG_INFINITY) // nothing seen, and no sink
        } else {
            let shrink = (max - top).exp();
            let denominator = total * shrink + (sink - top).exp();
            (shrink / denominator, top + denominator.ln())
        };
        let values =
            scratch.sums[row * scratch.width..].iter().take(scratch.head_dim).map(|sum| sum * factor);
        // SAFETY: each token and head is in one tile of one KV head, and each of these is run once.
        unsafe {
            job.output.write(tile.token + row / job.group, head, values, lse);
        };
    }
}
