//! Where some neighbouring positions' K and V lie, and the order in which memory is asked for them.
#![expect(clippy::inline_always, reason = "all of it must end up in a #[target_feature] function")]

use std::ops::Range;

use super::element::Element;
use super::job::Job;
use super::simd::Simd;

/// The most keys of a chunk.
pub(crate) const CHUNK: usize = 128;

/// Keys that are worked on together; addresses are padded to a multiple of it.
pub(crate) const KEYS: usize = 16;

/// Bytes that memory moves at once.
const CACHE_LINE: usize = 64;

/// Addresses of some neighbouring positions' K and V, of one KV head at a time.
pub(crate) struct Chunk<E> {
    pub(crate) positions: Range<usize>,
    /// Those of the first head, the last one repeated up to a multiple of [`KEYS`].
    keys: [*const E; CHUNK],
    values: [*const E; CHUNK],
    /// The distance of the head in hand from the first.
    key_shift: isize,
    value_shift: isize,
}

impl<E: Element> Chunk<E> {
    pub(crate) fn new() -> Self {
        let nowhere = [std::ptr::null(); CHUNK];
        Self { positions: 0..0, keys: nowhere, values: nowhere, key_shift: 0, value_shift: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.positions.len()
    }

    /// Looks up where at most [`CHUNK`] positions of a row's sequence lie, for a head.
    #[inline(always)]
    pub(crate) fn locate(&mut self, job: &Job<'_, E>, row: usize, kv_head: usize, positions: Range<usize>) {
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
            for place in count..count + run {
                (self.keys[place], self.values[place]) = (key, value);
                // The last step may lead out of the array; nobody follows it there.
                (key, value) = (key.wrapping_offset(key_stride), value.wrapping_offset(value_stride));
            }
            (position, count) = (position + run, count + run);
        }
        if count > 0 {
            let padded = count.next_multiple_of(KEYS);
            let last = self.keys[count - 1];
            self.keys[count..padded].fill(last);
        }
        self.positions = positions;
        (self.key_shift, self.value_shift) = (0, 0);
    }

    /// Goes over to the head that stands `heads` behind the one that was located.
    #[inline(always)]
    pub(crate) fn turn_to(&mut self, job: &Job<'_, E>, heads: usize) {
        self.key_shift = heads as isize * job.keys.head_stride();
        self.value_shift = heads as isize * job.values.head_stride();
    }

    /// The address of the head's row of K; of the last one for the places of the padding.
    #[inline(always)]
    pub(crate) fn key(&self, place: usize) -> *const E {
        self.keys[place].wrapping_offset(self.key_shift)
    }

    /// The address of the head's row of V.
    #[inline(always)]
    pub(crate) fn value(&self, place: usize) -> *const E {
        self.values[place].wrapping_offset(self.value_shift)
    }
}

/// Asks for the memory of a chunk a little at a time while another one is worked on, in the order in which it lies
/// there, all heads of a token after each other: that is how memory is fastest, and scattered pages are beyond what a
/// CPU foresees by itself.
pub(crate) struct Ahead<'a, E> {
    chunk: &'a Chunk<E>,
    head_bytes: usize,
    keys: Cursor,
    values: Cursor,
}

/// What has been asked for of K or V: all of the tokens before `place`, of that one all pieces before `piece`, and of
/// that the first `byte`s.
struct Cursor {
    place: usize,
    piece: usize,
    byte: usize,
    /// Of a token: what lies together, one head or all of them.
    pieces: usize,
    piece_bytes: usize,
    piece_stride: isize,
}

impl<'a, E: Element> Ahead<'a, E> {
    /// Of so many heads from the located one on.
    #[inline(always)]
    pub(crate) fn new(chunk: &'a Chunk<E>, job: &Job<'_, E>, heads: usize) -> Self {
        let head_bytes = job.keys.shape()[3] * size_of::<E>();
        let cursor = |head_stride: isize, is_adjacent: bool| Cursor {
            place: 0,
            piece: 0,
            byte: 0,
            pieces: if is_adjacent { 1 } else { heads },
            piece_bytes: if is_adjacent { heads * head_bytes } else { head_bytes },
            piece_stride: head_stride * size_of::<E>() as isize,
        };
        let keys = cursor(job.keys.head_stride(), job.keys.has_adjacent_heads());
        let values = cursor(job.values.head_stride(), job.values.has_adjacent_heads());
        Self { chunk, head_bytes, keys, values }
    }

    /// Asks for as much of K as `rows` rows of a head are.
    #[inline(always)]
    pub(crate) fn keys<S: Simd>(&mut self, simd: S, rows: usize) {
        self.keys.advance(simd, &self.chunk.keys[..self.chunk.len()], rows * self.head_bytes);
    }

    /// Asks for as much of V as `rows` rows of a head are.
    #[inline(always)]
    pub(crate) fn values<S: Simd>(&mut self, simd: S, rows: usize) {
        self.values.advance(simd, &self.chunk.values[..self.chunk.len()], rows * self.head_bytes);
    }
}

impl Cursor {
    #[inline(always)]
    fn advance<S: Simd, E>(&mut self, simd: S, rows: &[*const E], mut bytes: usize) {
        while bytes > 0 && self.place < rows.len() {
            let piece =
                rows[self.place].cast::<u8>().wrapping_offset(self.piece as isize * self.piece_stride);
            let run = bytes.min(self.piece_bytes - self.byte);
            for byte in (self.byte..self.byte + run).step_by(CACHE_LINE) {
                simd.prefetch(piece.wrapping_add(byte));
            }
            bytes -= run;
            self.byte += run;
            if self.byte == self.piece_bytes {
                (self.piece, self.byte) = (self.piece + 1, 0);
                if self.piece == self.pieces {
                    (self.place, self.piece) = (self.place + 1, 0);
                }
            }
        }
    }
}
