//! Matrix products of bf16 on the matrix unit. K is taken as it lies in memory; V is transposed, a chunk at a time;
//! weights are rounded to bf16, as everybody does who multiplies with such a unit.

#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the prefix names them"))]
use std::arch::x86_64::*;
use std::ops::Range;

use super::amx::{Amx, LANES, ROW_BYTES};
use super::buffer::Buffer;
use super::chunk::{Ahead, CHUNK, Chunk};
use super::element::Element;
use super::simd::Simd;
use super::wide::{Engine, Seen};

/// Elements of a tile's row: keys or dimensions that are multiplied in one step.
const STEP: usize = ROW_BYTES / 2;

/// Working memory: a chunk in the forms that the unit wants, all of them bf16.
#[derive(Default)]
pub(crate) struct Memory {
    /// `[CHUNK, dims]`
    keys: Buffer,
    /// `[dims, CHUNK]`
    values: Buffer,
    /// `[CHUNK / 2, LANES, 2]`
    weights: Buffer,
    /// `[STEP / 2, dims, 2]`: V on its way.
    pairs: Buffer,
}

/// The unit, with memory to work in.
pub(crate) struct Tiles<'a> {
    amx: Amx,
    memory: &'a mut Memory,
}

impl<'a> Tiles<'a> {
    pub(crate) fn new(amx: Amx, memory: &'a mut Memory) -> Self {
        Self { amx, memory }
    }
}

impl Engine for Tiles<'_> {
    const VECTORS: usize = 2;
    const KEYS: usize = STEP;

    fn begin(&mut self) {
        self.amx.configure();
    }

    fn end(&mut self) {
        self.amx.release();
    }

    /// Pairs of neighbouring elements.
    fn query_size(head_dim: usize) -> usize {
        head_dim.next_multiple_of(STEP) / 2
    }

    #[inline]
    unsafe fn load_query<S: Simd, E: Element>(_simd: S, from: *const E, head_dim: usize, to: &mut [f32]) {
        let (dims, to) = (2 * to.len(), to.as_mut_ptr().cast::<u16>());
        assert!(head_dim <= dims);
        // SAFETY: the caller's promise; `to` has room for `dims` elements.
        unsafe {
            from.cast::<u16>().copy_to_nonoverlapping(to, head_dim);
            to.add(head_dim).write_bytes(0, dims - head_dim);
        }
    }

    #[inline]
    fn load<S: Simd, E: Element>(
        &mut self,
        simd: S,
        chunk: &Chunk<E>,
        ahead: &mut Ahead<'_, E>,
        head_dim: usize,
    ) {
        let (count, dims) = (chunk.len(), head_dim.next_multiple_of(STEP));
        self.memory.keys.reserve(CHUNK * dims / 2);
        self.memory.values.reserve(CHUNK * dims / 2);
        let keys = self.memory.keys.as_mut_ptr().cast::<u16>();
        for place in 0..count {
            ahead.keys(simd, 1);
            // SAFETY: `self.amx` proves that the instructions are there; a row of K has head_dim elements, the row of
            // the buffer has room for `dims`.
            unsafe { copy_row(chunk.key(place).cast(), head_dim, keys.add(place * dims), dims) };
        }
        self.memory.pairs.reserve(STEP / 2 * dims);
        for first in (0..count).step_by(STEP) {
            let pairs = &mut self.memory.pairs[..STEP / 2 * dims];
            for (pair, to) in pairs.chunks_exact_mut(dims).enumerate() {
                ahead.values(simd, 2);
                let place = first + 2 * pair;
                let row = |place: usize| (place < count).then(|| chunk.value(place).cast::<u16>());
                // SAFETY: `self.amx` proves that the instructions are there; a row has head_dim elements.
                unsafe { interleave(row(place), row(place + 1), head_dim, to) };
            }
            for d in (0..dims).step_by(STEP / 2) {
                let to = self.memory.values[d * (CHUNK / 2) + first / 2..].as_mut_ptr();
                // SAFETY: 16 rows of `dims` pairs become as many of CHUNK / 2, of which 16 are left from `first` on.
                unsafe { simd.transpose(pairs[d..].as_ptr(), dims, to, CHUNK / 2) };
            }
        }
    }

    #[inline]
    fn score<S: Simd>(
        &mut self,
        _simd: S,
        queries: &[f32],
        keys: Range<usize>,
        vectors: usize,
        head_dim: usize,
        scores: &mut [f32],
    ) {
        let dims = head_dim.next_multiple_of(STEP);
        assert!(queries.len() >= dims / 2 * LANES && scores.len() >= keys.end * LANES && keys.end <= CHUNK);
        for first in keys.step_by(STEP) {
            let a = self.memory.keys.as_ptr().cast::<u8>().wrapping_add(first * dims * 2);
            let c = scores[first * LANES..].as_mut_ptr();
            // SAFETY: `load` has made room for CHUNK keys of `dims` elements, the sizes of the others have been looked
            // at, and `begin` has set the tiles up.
            unsafe {
                self.amx.multiply([a, queries.as_ptr().cast()], 2 * dims, dims / STEP, c, false, vectors > 1);
            }
        }
    }

    #[inline]
    fn is_finite<S: Simd, E: Element>(&mut self, _simd: S, chunk: &Chunk<E>, head_dim: usize) -> bool {
        let mut is_finite = true;
        for place in 0..chunk.len() {
            let value = chunk.value(place).cast::<u16>();
            for d in 0..head_dim {
                // SAFETY: a row has head_dim elements.
                is_finite &= unsafe { value.add(d).read() } & 0x7F80 != 0x7F80;
            }
        }
        is_finite
    }

    #[inline]
    fn accumulate<S: Simd>(
        &mut self,
        _simd: S,
        weights: &mut [f32],
        keys: Range<usize>,
        vectors: usize,
        head_dim: usize,
        sums: &mut [f32],
    ) {
        let (dims, stop) = (head_dim.next_multiple_of(STEP), keys.end.next_multiple_of(STEP));
        assert!(weights.len() >= stop * LANES && sums.len() >= dims * LANES);
        weights[keys.end * LANES..stop * LANES].fill(0.0);
        self.memory.weights.reserve(CHUNK / 2 * LANES);
        // SAFETY: `self.amx` proves that the instructions are there.
        unsafe { pack(&weights[..stop * LANES], keys.start, &mut self.memory.weights) };
        let b = self.memory.weights.as_ptr().wrapping_add(keys.start / 2 * LANES);
        let steps = (stop - keys.start) / STEP;
        for d in (0..dims).step_by(32) {
            let a = self.memory.values.as_ptr().cast::<u16>().wrapping_add(d * CHUNK + keys.start);
            let c = sums[d * LANES..].as_mut_ptr();
            // SAFETY: `load` has made room for `dims` rows of CHUNK elements, the sizes of the others have been looked
            // at, and `begin` has set the tiles up.
            unsafe { self.amx.multiply([a.cast(), b.cast()], 2 * CHUNK, steps, c, true, vectors > 1) };
        }
    }

    #[inline]
    fn accumulate_seen<S: Simd, E: Element>(
        &mut self,
        _simd: S,
        chunk: &Chunk<E>,
        weights: &[f32],
        keys: Range<usize>,
        _vectors: usize,
        head_dim: usize,
        seen: &Seen,
        sums: &mut [f32],
    ) {
        for key in keys {
            let value = chunk.value(key);
            for (d, sums) in sums.chunks_exact_mut(LANES).take(head_dim).enumerate() {
                // SAFETY: a row has head_dim elements.
                let x = unsafe { value.add(d).read() }.to_f32();
                for lane in 0..LANES {
                    if seen.start[lane] <= key as f32 && (key as f32) < seen.stop[lane] {
                        sums[lane] += x * weights[key * LANES + lane];
                    }
                }
            }
        }
    }
}

/// Copies a row, with zeros behind its end up to `dims`, a multiple of STEP.
///
/// # Safety
/// `head_dim` elements must be readable, `dims` writable.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn copy_row(from: *const u16, head_dim: usize, to: *mut u16, dims: usize) {
    for d in (0..dims).step_by(STEP) {
        let mask = ((1u64 << head_dim.saturating_sub(d).min(STEP)) - 1) as u32;
        // SAFETY: the caller's promise; masked elements are not read.
        unsafe {
            let x = _mm512_maskz_loadu_epi16(mask, from.wrapping_add(d).cast());
            _mm512_storeu_si512(to.add(d).cast(), x);
        }
    }
}

/// Pairs of the elements of two rows; zeros for a row that is not there, and behind their ends.
///
/// # Safety
/// `head_dim` elements of each must be readable.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn interleave(even: Option<*const u16>, odd: Option<*const u16>, head_dim: usize, to: &mut [f32]) {
    for (step, to) in to.chunks_exact_mut(16).enumerate() {
        let (d, zero) = (16 * step, _mm256_setzero_si256());
        let mask = ((1u32 << head_dim.saturating_sub(d).min(16)) - 1) as u16;
        // SAFETY: the caller's promise; masked elements are not read, and `to` has 16 numbers.
        unsafe {
            let low = match even {
                Some(row) => _mm256_maskz_loadu_epi16(mask, row.wrapping_add(d).cast()),
                None => zero,
            };
            let high = match odd {
                Some(row) => _mm256_maskz_loadu_epi16(mask, row.wrapping_add(d).cast()),
                None => zero,
            };
            let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_or_si512(_mm512_cvtepu16_epi32(low), high));
        }
    }
}

/// Rounds weights from key `first`, an even one, on to bf16 and puts those of two neighbouring keys side by side.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack(weights: &[f32], first: usize, to: &mut [f32]) {
    // Low halves first, then high ones, become pairs.
    let mut order = [0u16; 32];
    for (place, from) in order.iter_mut().enumerate() {
        *from = (place / 2 + place % 2 * 16) as u16;
    }
    // SAFETY: an array of 64 bytes.
    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    let pairs = weights.chunks_exact(2 * LANES).zip(to.chunks_exact_mut(LANES)).skip(first / 2);
    for (pair, to) in pairs {
        for lane in [0, 16] {
            // SAFETY: the slices have 2 * LANES and LANES numbers.
            unsafe {
                let even = _mm512_loadu_ps(pair.as_ptr().add(lane));
                let odd = _mm512_loadu_ps(pair.as_ptr().add(LANES + lane));
                let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(odd, even));
                _mm512_storeu_si512(to.as_mut_ptr().add(lane).cast(), _mm512_permutexvar_epi16(order, both));
            }
        }
    }
}
