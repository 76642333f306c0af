//! Matrix products of bf16 on the matrix unit. K is taken as it lies in memory; V is transposed, a chunk at a time;
//! weights are rounded to bf16, as everybody does who multiplies with such a unit.

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

    /// `[dims / 2, LANES, 2]`
    fn query_size(lanes: usize, head_dim: usize) -> usize {
        lanes * head_dim.next_multiple_of(STEP) / 2
    }

    #[inline]
    unsafe fn load_query<E: Element>(panel: &mut [f32], stride: usize, lane: usize, from: *const E, head_dim: usize) {
        let from = from.cast::<u16>();
        for pair in 0..head_dim.div_ceil(2) {
            // SAFETY: the caller's promise.
            let (low, high) = unsafe {
                let last = 2 * pair + 1 == head_dim;
                (from.add(2 * pair).read(), if last { 0 } else { from.add(2 * pair + 1).read() })
            };
            panel[pair * stride + lane] = f32::from_bits(u32::from(low) | u32::from(high) << 16);
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
            // SAFETY: a row of K has head_dim elements, the row of the buffer has room for `dims`.
            unsafe {
                let row = keys.add(place * dims);
                chunk.key(place).cast::<u16>().copy_to_nonoverlapping(row, head_dim);
                row.add(head_dim).write_bytes(0, dims - head_dim);
            }
        }
        let mut rows = [std::ptr::null(); STEP];
        for first in (0..count).step_by(STEP) {
            let here = STEP.min(count - first);
            for (place, row) in rows.iter_mut().enumerate() {
                *row = chunk.value(first + place.min(here - 1)).cast::<u16>();
            }
            ahead.values(simd, here);
            let to = self.memory.values.as_mut_ptr().cast::<u16>().wrapping_add(first);
            for d in (0..dims).step_by(16) {
                // SAFETY: `self.amx` proves that the instructions are there. A row has head_dim elements, and the
                // buffer `dims` rows of CHUNK elements, of which STEP are left from `first` on.
                unsafe {
                    transpose(&rows, here, d, head_dim.saturating_sub(d).min(16), to.wrapping_add(d * CHUNK));
                }
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

/// Puts 16 dimensions (`columns` of them are there) of 32 keys' rows (`count` are there), from `d` on, as 16 rows of 32
/// keys, CHUNK elements apart; what is not there becomes zero.
///
/// # Safety
/// Of each row `columns` elements must be readable from `d` on; the places must be writable.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn transpose(rows: &[*const u16; STEP], count: usize, d: usize, columns: usize, to: *mut u16) {
    let columns = ((1u32 << columns) - 1) as u16;
    let mut r = [_mm512_setzero_si512(); 16];
    for pair in 0..16 {
        let mask = |key: usize| if key < count { columns } else { 0 };
        // SAFETY: the caller's promise; masked elements are not read.
        let (low, high) = unsafe {
            (
                _mm256_maskz_loadu_epi16(mask(2 * pair), rows[2 * pair].wrapping_add(d).cast()),
                _mm256_maskz_loadu_epi16(mask(2 * pair + 1), rows[2 * pair + 1].wrapping_add(d).cast()),
            )
        };
        let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high));
        r[pair] = _mm512_or_si512(_mm512_cvtepu16_epi32(low), high);
    }
    // A transposition of 16 x 16 words: within pairs of rows, of pairs, of quarters, of halves.
    let mut t = r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..4 {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for i in 0..4 {
        t[i] = _mm512_shuffle_i32x4::<0x88>(r[i], r[4 + i]);
        t[4 + i] = _mm512_shuffle_i32x4::<0xDD>(r[i], r[4 + i]);
        t[8 + i] = _mm512_shuffle_i32x4::<0x88>(r[8 + i], r[12 + i]);
        t[12 + i] = _mm512_shuffle_i32x4::<0xDD>(r[8 + i], r[12 + i]);
    }
    for i in 0..8 {
        r[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[8 + i]);
        r[8 + i] = _mm512_shuffle_i32x4::<0xDD>(t[i], t[8 + i]);
    }
    for (i, row) in r.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.wrapping_add(i * CHUNK).cast(), row) };
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
