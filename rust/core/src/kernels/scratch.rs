//! A thread's working memory, kept from one call to the next: to fault in fresh pages takes longer than a short decode.

use std::cell::RefCell;

use super::buffer::Buffer;
#[cfg(target_arch = "x86_64")]
use super::tiles;
use super::vectors::Vectors;
use super::{thin, wide};

#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) thin: thin::Memory,
    pub(crate) wide: wide::Memory,
    pub(crate) vectors: Vectors,
    #[cfg(target_arch = "x86_64")]
    pub(crate) tiles: tiles::Memory,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static PARTIAL: RefCell<Buffer> = RefCell::default();
}

/// Calls `work` with the thread's own memory. What is in it is left over from earlier calls.
pub(crate) fn with_scratch<T>(work: impl FnOnce(&mut Scratch) -> T) -> T {
    SCRATCH.with_borrow_mut(work)
}

/// Calls `work` with memory for at least so many numbers of partial results.
pub(crate) fn with_partial<T>(numbers: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    /// More than that is given back after use.
    const KEPT: usize = 1 << 22;
    PARTIAL.with_borrow_mut(|buffer| {
        buffer.reserve(numbers);
        let result = work(buffer);
        if buffer.len() > KEPT {
            *buffer = Buffer::default();
        }
        result
    })
}
