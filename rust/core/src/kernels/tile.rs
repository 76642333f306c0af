//! The inner part of attention: some queries of one sequence against all that they see of one KV head.
//!
//! A tile's rows are its queries times the query heads that share the KV head, so that each row of K and V is
//! loaded once for all of them. Keys are taken [`CHUNK`] at a time, whatever the block size:
//! score, soften (the online softmax's rescaling), accumulate.
#![expect(clippy::inline_always, reason = "all of it must end up in a #[target_feature] function")]

use std::marker::PhantomData;
use std::mem;
use std::ops::Range;

use super::attention::{Scoring, Step};
use super::element::Element;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{MAX_LANES, Portable, Simd};
use super::view::{PagedView, TokenView};

/// Keys at a time: their scores and rows of V stay in the first-level cache until they are used.
const CHUNK: usize = 64;

/// Keys that are scored together.
const KEYS: usize = 4;

/// Bytes that memory moves at once.
const CACHE_LINE: usize = 64;

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
    #[inline(always)]
    fn visible(&self, query: usize, sliding_window: Option<usize>) -> Range<usize> {
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
    #[inline(always)]
    unsafe fn write(&self, token: usize, head: usize, values: impl Iterator<Item = f32>, lse: f32) {
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

/// A thread's working memory.
pub(crate) struct Scratch {
    /// Scaled queries, a row each.
    queries: Vec<f32>,
    /// Weighted sums of V so far, a row each.
    sums: Vec<f32>,
    /// Scores of the chunk's keys, then their weights, a row each.
    scores: Vec<f32>,
    rows: Vec<Row>,
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
        if count > 0 {
            let last = self.keys[count - 1];
            self.keys[count..count.next_multiple_of(KEYS)].fill(last);
        }
        self.positions = positions;
    }
}

#[inline(always)]
fn run<S: Simd, E: Element>(simd: S, job: &Job<'_, E>, tile: &Tile, kv_head: usize, scratch: &mut Scratch) {
    load_queries(job, tile, kv_head, scratch);
    let window = job.scoring.sliding_window;
    let start = tile.visible(0, window).start;
    let stop = tile.visible(tile.count - 1, window).end;
    let at = |first: usize| first.min(stop)..(first + CHUNK).min(stop);
    let (mut chunk, mut next) = (Chunk::new(), Chunk::new());
    chunk.locate(job, tile.row, kv_head, at(start));
    while chunk.len() > 0 {
        next.locate(job, tile.row, kv_head, at(chunk.positions.end));
        let rows = tile.count * job.group;
        for row in 0..rows {
            let seen = tile.visible(row / job.group, window);
            let place = |position: usize| {
                position.clamp(chunk.positions.start, chunk.positions.end) - chunk.positions.start
            };
            scratch.rows[row].seen = place(seen.start)..place(seen.end);
        }
        score(simd, &chunk, rows, scratch);
        for row in 0..rows {
            let query = tile.position.unwrap_or(0) + row / job.group;
            let head = kv_head * job.group + row % job.group;
            soften(simd, job.scoring, chunk.positions.start, query, head, row, scratch);
        }
        accumulate(simd, &chunk, &next, rows, scratch);
        mem::swap(&mut chunk, &mut next);
    }
    finish(job, tile, kv_head, scratch);
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
        let mut d = 0;
        while d + S::LANES <= dim {
            // SAFETY: every key is the address of dim readable elements, and d + LANES <= dim.
            let k: [S::V; KEYS] = std::array::from_fn(|key| unsafe { simd.load_elements(keys[key].add(d)) });
            for (m, products) in products.iter_mut().enumerate() {
                // SAFETY: row m of the M * width queries, and d + LANES <= dim <= width.
                let q = unsafe { simd.load(queries.as_ptr().add(m * width + d)) };
                for (product, &k) in products.iter_mut().zip(&k) {
                    *product = simd.fma(q, k, *product);
                }
            }
            d += S::LANES;
        }
        if d < dim {
            // SAFETY: as above, for the dim - d elements that are left.
            let k: [S::V; KEYS] =
                std::array::from_fn(|key| unsafe { simd.load_some(keys[key].add(d), dim - d) });
            for (m, products) in products.iter_mut().enumerate() {
                // SAFETY: as above; width is dim rounded up to a multiple of MAX_LANES, and so has LANES from d on.
                let q = unsafe { simd.load(queries.as_ptr().add(m * width + d)) };
                for (product, &k) in products.iter_mut().zip(&k) {
                    *product = simd.fma(q, k, *product);
                }
            }
        }
        for (scores, products) in scores.chunks_exact_mut(CHUNK).zip(products) {
            scores[first..first + KEYS].copy_from_slice(&simd.sum_each(products));
        }
    }
    M
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
        for_each_vector(simd, &mut scores[..used], |_, x| {
            simd.mul(simd.splat(cap), simd.tanh(simd.mul(x, simd.splat(1.0 / cap))))
        });
    }
    if let Some(slopes) = scoring.alibi_slopes {
        // Distances are whole numbers, exact in f32 up to 2^24.
        let start = simd.splat((first_position as i64 - query as i64) as f32);
        for_each_vector(simd, &mut scores[..used], |place, x| {
            let distance = simd.add(start, simd.add(simd.iota(), simd.splat(place as f32)));
            simd.fma(simd.splat(slopes[head]), distance, x)
        });
    }
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..used].fill(f32::NEG_INFINITY);

    let mut largest = simd.splat(f32::NEG_INFINITY);
    for_each_vector(simd, &mut scores[..used], |_, x| {
        largest = simd.max(largest, x);
        x
    });
    let largest = simd.max_lane(largest);
    let max = if largest > state.max { largest } else { state.max };
    if max > state.max {
        state.rescale = (state.max - max).exp();
    }
    let mut total = simd.splat(0.0);
    for_each_vector(simd, &mut scores[..used], |_, x| {
        let weight = simd.exp(simd.sub(x, simd.splat(max)));
        total = simd.add(total, weight);
        weight
    });
    let zero = simd.splat(0.0);
    state.total = state.total * state.rescale + simd.sum_each([total, zero, zero, zero])[0];
    state.max = max;
}

/// Replaces each vector of a slice that is a whole number of them.
#[inline(always)]
fn for_each_vector<S: Simd>(simd: S, numbers: &mut [f32], mut change: impl FnMut(usize, S::V) -> S::V) {
    for (index, vector) in numbers.chunks_exact_mut(S::LANES).enumerate() {
        // SAFETY: chunks_exact_mut gives LANES numbers each time.
        unsafe {
            let x = simd.load(vector.as_ptr());
            simd.store(vector.as_mut_ptr(), change(index * S::LANES, x));
        }
    }
}

/// Adds the chunk's rows of V to the sums, weighted.
///
/// Rows go together over the keys that all of them see, and alone over the others: a weight of zero would not
/// do for an unseen key, since zero times NaN is NaN.
#[inline(always)]
fn accumulate<S: Simd, E: Element>(
    simd: S,
    chunk: &Chunk<E>,
    next: &Chunk<E>,
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
    next: &Chunk<E>,
    row: usize,
    scratch: &mut Scratch,
) -> usize {
    let seen: [Range<usize>; M] = std::array::from_fn(|m| scratch.rows[row + m].seen.clone());
    let start = seen.iter().map(|seen| seen.start).max().unwrap_or(0);
    let stop = seen.iter().map(|seen| seen.end).min().unwrap_or(0);
    let ahead = if row == 0 { Some(next) } else { None };
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
    let mut sum: [[S::V; N]; M] = std::array::from_fn(|m| {
        std::array::from_fn(|n| {
            // SAFETY: row m of M * width sums; a row has N vectors from d on, as width is padded.
            let before = unsafe { simd.load(sums.as_ptr().add(m * width + d + n * S::LANES)) };
            simd.mul(before, simd.splat(factors[m]))
        })
    });
    for key in range {
        if let Some(next) = ahead
            && key < next.len()
        {
            prefetch(simd, next.keys[key], columns.end);
        }
        let value = chunk.values[key];
        let v: [S::V; N] = if whole {
            // SAFETY: every seen value is the address of columns.end readable elements; N vectors are left.
            std::array::from_fn(|n| unsafe { simd.load_elements(value.add(d + n * S::LANES)) })
        } else {
            // SAFETY: as above; columns.len() elements are left, fewer than LANES, and N is 1.
            std::array::from_fn(|_| unsafe { simd.load_some(value.add(d), columns.len()) })
        };
        for (m, sum) in sum.iter_mut().enumerate() {
            let weight = simd.splat(weights[m * CHUNK + key]);
            for (sum, &v) in sum.iter_mut().zip(&v) {
                *sum = simd.fma(weight, v, *sum);
            }
        }
    }
    for (m, sum) in sum.into_iter().enumerate() {
        for (n, sum) in sum.into_iter().enumerate() {
            // SAFETY: as for the load.
            unsafe { simd.store(sums.as_mut_ptr().add(m * width + d + n * S::LANES), sum) };
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
