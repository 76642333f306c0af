//! What memory gives at best, to hold attention against.

use std::sync::atomic::{AtomicU64, Ordering};

use super::threads;

/// Bytes that a thread reads before it takes the next piece.
const PIECE: usize = 1 << 20;

/// Words that are summed side by side, so that no load waits for another.
const WORDS: usize = 32;

/// Reads all of some memory on all threads, in order. Returns the exclusive or of its 64-bit words; what is left over at
/// the end of a slice, less than 256 bytes, is passed over.
pub fn read(memory: &[&[u8]]) -> u64 {
    let pieces: Vec<&[u8]> = memory.iter().flat_map(|bytes| bytes.chunks(PIECE)).collect();
    let total = AtomicU64::new(0);
    threads::for_each(pieces.len(), true, |piece| {
        // Relaxed: bits are put together in any order.
        total.fetch_xor(read_piece(pieces[piece]), Ordering::Relaxed);
    });
    total.into_inner()
}

fn read_piece(bytes: &[u8]) -> u64 {
    let (chunks, _) = bytes.as_chunks::<{ 8 * WORDS }>();
    let mut sums = [0; WORDS];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has the instructions.
        unsafe { fold_avx512(chunks, &mut sums) };
        return sums.into_iter().fold(0, |total, sum| total ^ sum);
    }
    fold(chunks, &mut sums);
    sums.into_iter().fold(0, |total, sum| total ^ sum)
}

#[inline]
fn fold(chunks: &[[u8; 8 * WORDS]], sums: &mut [u64; WORDS]) {
    let mut own = *sums;
    for chunk in chunks {
        let (words, _) = chunk.as_chunks::<8>();
        for word in 0..WORDS {
            own[word] ^= u64::from_ne_bytes(words[word]);
        }
    }
    *sums = own;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fold_avx512(chunks: &[[u8; 8 * WORDS]], sums: &mut [u64; WORDS]) {
    fold(chunks, sums);
}
