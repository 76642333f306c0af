//! Matrix products in f32, on any vectors: elements of K and V, broadcast, times vectors of rows.
#![expect(clippy::needless_range_loop, reason = "arrays are registers, and loops over them are unrolled")]
#![expect(clippy::inline_always, reason = "all of it must end up in a #[target_feature] function")]

use std::ops::Range;

use super::buffer::Buffer;
use super::chunk::{Ahead, CHUNK, Chunk, KEYS};
use super::element::Element;
use super::simd::{MAX_LANES, Simd};
use super::wide::{Engine, MAX_VECTORS, Seen};

/// The chunk's rows of K and V, as f32: read by the element, they must not lie where their pages lie, at distances that
/// are powers of two and compete for a few places of the cache.
#[derive(Default)]
pub(crate) struct Vectors {
    keys: Buffer,
    values: Buffer,
}

/// From a row of K or V to the next one: an odd number of cache lines.
fn width(head_dim: usize) -> usize {
    head_dim.next_multiple_of(2 * MAX_LANES) + MAX_LANES
}

impl Engine for Vectors {
    const VECTORS: usize = MAX_VECTORS;
    const KEYS: usize = KEYS;

    fn query_size(head_dim: usize) -> usize {
        head_dim.next_multiple_of(MAX_LANES)
    }

    #[inline(always)]
    unsafe fn load_query<S: Simd, E: Element>(simd: S, from: *const E, head_dim: usize, to: &mut [f32]) {
        for d in (0..to.len()).step_by(S::LANES) {
            // SAFETY: the caller's promise; none is read where none is left.
            let x = unsafe { simd.load_up_to(from.wrapping_add(d), head_dim.saturating_sub(d)) };
            simd.put(&mut to[d..], x);
        }
    }

    #[inline(always)]
    fn load<S: Simd, E: Element>(
        &mut self,
        simd: S,
        chunk: &Chunk<E>,
        ahead: &mut Ahead<'_, E>,
        head_dim: usize,
    ) {
        let width = width(head_dim);
        self.keys.reserve(CHUNK * width);
        self.values.reserve(CHUNK * width);
        for place in 0..chunk.len() {
            for (memory, from) in [(&mut self.keys, chunk.key(place)), (&mut self.values, chunk.value(place))]
            {
                let row = &mut memory[place * width..][..width];
                for d in (0..head_dim).step_by(S::LANES) {
                    // SAFETY: a row has head_dim elements, of which the count are left.
                    let x = unsafe { simd.load_up_to(from.add(d), head_dim - d) };
                    simd.put(&mut row[d..], x);
                }
            }
            ahead.keys(simd, 1);
            ahead.values(simd, 1);
        }
    }

    #[inline(always)]
    fn score<S: Simd>(
        &mut self,
        simd: S,
        queries: &[f32],
        keys: Range<usize>,
        vectors: usize,
        head_dim: usize,
        scores: &mut [f32],
    ) {
        match (S::BLOCK, vectors) {
            (8, 1) => self.score_keys::<S, 8, 1>(simd, queries, keys, head_dim, scores),
            (8, 2) => self.score_keys::<S, 8, 2>(simd, queries, keys, head_dim, scores),
            (8, _) => self.score_keys::<S, 8, 3>(simd, queries, keys, head_dim, scores),
            (_, 1) => self.score_keys::<S, 4, 1>(simd, queries, keys, head_dim, scores),
            (_, 2) => self.score_keys::<S, 4, 2>(simd, queries, keys, head_dim, scores),
            (_, _) => self.score_keys::<S, 4, 3>(simd, queries, keys, head_dim, scores),
        }
    }

    #[inline(always)]
    fn is_finite<S: Simd, E: Element>(&mut self, simd: S, chunk: &Chunk<E>, head_dim: usize) -> bool {
        let zero = simd.splat(0.0);
        let mut sum = zero;
        for value in self.values.chunks_exact(width(head_dim)).take(chunk.len()) {
            for d in (0..head_dim).step_by(S::LANES) {
                sum = simd.fma(simd.get(&value[d..]), zero, sum); // NaN if it is not finite
            }
        }
        simd.sum_each([sum, zero, zero, zero])[0] == 0.0
    }

    #[inline(always)]
    fn accumulate<S: Simd>(
        &mut self,
        simd: S,
        weights: &mut [f32],
        keys: Range<usize>,
        vectors: usize,
        head_dim: usize,
        sums: &mut [f32],
    ) {
        match (S::BLOCK, vectors) {
            (8, 1) => self.add_dims::<S, 8, 1, false>(simd, weights, keys, head_dim, None, sums),
            (8, 2) => self.add_dims::<S, 8, 2, false>(simd, weights, keys, head_dim, None, sums),
            (8, _) => self.add_dims::<S, 8, 3, false>(simd, weights, keys, head_dim, None, sums),
            (_, 1) => self.add_dims::<S, 4, 1, false>(simd, weights, keys, head_dim, None, sums),
            (_, 2) => self.add_dims::<S, 4, 2, false>(simd, weights, keys, head_dim, None, sums),
            (_, _) => self.add_dims::<S, 4, 3, false>(simd, weights, keys, head_dim, None, sums),
        }
    }

    #[inline(always)]
    fn accumulate_seen<S: Simd, E: Element>(
        &mut self,
        simd: S,
        _chunk: &Chunk<E>,
        weights: &[f32],
        keys: Range<usize>,
        vectors: usize,
        head_dim: usize,
        seen: &Seen,
        sums: &mut [f32],
    ) {
        match vectors {
            1 => self.add_dims::<S, 1, 1, true>(simd, weights, keys, head_dim, Some(seen), sums),
            2 => self.add_dims::<S, 1, 2, true>(simd, weights, keys, head_dim, Some(seen), sums),
            _ => self.add_dims::<S, 1, 3, true>(simd, weights, keys, head_dim, Some(seen), sums),
        }
    }
}

impl Vectors {
    #[inline(always)]
    fn score_keys<S: Simd, const K: usize, const N: usize>(
        &self,
        simd: S,
        queries: &[f32],
        keys: Range<usize>,
        head_dim: usize,
        scores: &mut [f32],
    ) {
        let lanes = Self::VECTORS * S::LANES;
        assert!(queries.len() >= head_dim * lanes && scores.len() >= keys.end * lanes);
        let width = width(head_dim);
        assert!(self.keys.len() >= CHUNK * width && keys.end <= CHUNK);
        let (queries, scores) = (queries.as_ptr(), scores.as_mut_ptr());
        for first in keys.step_by(K) {
            let rows = self.keys[first * width..].as_ptr();
            let mut sum = [[simd.splat(0.0); N]; K];
            for d in 0..head_dim {
                let mut q = [simd.splat(0.0); N];
                for n in 0..N {
                    // SAFETY: queries are [head_dim, lanes].
                    q[n] = unsafe { simd.load(queries.add(d * lanes + n * S::LANES)) };
                }
                for k in 0..K {
                    // SAFETY: there are K rows of head_dim numbers; KEYS and so K divides CHUNK.
                    let x = simd.splat(unsafe { *rows.add(k * width + d) });
                    for n in 0..N {
                        sum[k][n] = simd.fma(x, q[n], sum[k][n]);
                    }
                }
            }
            for k in 0..K {
                for n in 0..N {
                    // SAFETY: scores are [at least keys.end, lanes].
                    unsafe { simd.store(scores.add((first + k) * lanes + n * S::LANES), sum[k][n]) };
                }
            }
        }
    }

    #[inline(always)]
    fn add_dims<S: Simd, const K: usize, const N: usize, const SOME: bool>(
        &self,
        simd: S,
        weights: &[f32],
        keys: Range<usize>,
        head_dim: usize,
        seen: Option<&Seen>,
        sums: &mut [f32],
    ) {
        let lanes = Self::VECTORS * S::LANES;
        assert!(weights.len() >= keys.end * lanes && sums.len() >= head_dim * lanes && keys.end <= CHUNK);
        let whole = head_dim - head_dim % K;
        for d in (0..whole).step_by(K) {
            // SAFETY: the sizes have just been looked at; d + K <= head_dim.
            unsafe { self.add_block::<S, K, N, SOME>(simd, weights, keys.clone(), d, head_dim, seen, sums) };
        }
        for d in whole..head_dim {
            // SAFETY: as above.
            unsafe { self.add_block::<S, 1, N, SOME>(simd, weights, keys.clone(), d, head_dim, seen, sums) };
        }
    }

    /// Adds to K dimensions from d on.
    ///
    /// # Safety
    /// `weights` are `[at least keys.end, lanes]`, `sums` `[at least d + K, lanes]`; V has so many dimensions.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "a loop's body")]
    unsafe fn add_block<S: Simd, const K: usize, const N: usize, const SOME: bool>(
        &self,
        simd: S,
        weights: &[f32],
        keys: Range<usize>,
        d: usize,
        head_dim: usize,
        seen: Option<&Seen>,
        sums: &mut [f32],
    ) {
        let (lanes, width) = (Self::VECTORS * S::LANES, width(head_dim));
        let (weights, sums) = (weights.as_ptr(), sums.as_mut_ptr());
        let mut sum = [[simd.splat(0.0); N]; K];
        for k in 0..K {
            for n in 0..N {
                // SAFETY: the caller's promise.
                sum[k][n] = unsafe { simd.load(sums.add((d + k) * lanes + n * S::LANES)) };
            }
        }
        for key in keys {
            let mut w = [simd.splat(0.0); N];
            for n in 0..N {
                // SAFETY: the caller's promise.
                w[n] = unsafe { simd.load(weights.add(key * lanes + n * S::LANES)) };
            }
            let value = self.values[key * width..][..width].as_ptr();
            for k in 0..K {
                // SAFETY: the caller's promise.
                let x = simd.splat(unsafe { *value.add(d + k) });
                for n in 0..N {
                    let more = simd.fma(x, w[n], sum[k][n]);
                    sum[k][n] = match seen {
                        Some(seen) if SOME => {
                            let place = simd.splat(key as f32);
                            let (start, stop) = (&seen.start[n * S::LANES..], &seen.stop[n * S::LANES..]);
                            let below = simd.select_less(place, simd.get(stop), more, sum[k][n]);
                            simd.select_less(place, simd.get(start), sum[k][n], below)
                        }
                        _ => more,
                    };
                }
            }
        }
        for k in 0..K {
            for n in 0..N {
                // SAFETY: the caller's promise.
                unsafe { simd.store(sums.add((d + k) * lanes + n * S::LANES), sum[k][n]) };
            }
        }
    }
}
