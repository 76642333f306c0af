//! Working memory that begins at a cache line.

use std::ops::{Deref, DerefMut};

const LINE: usize = 16;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// Numbers that are kept from one use to the next; it only ever grows.
#[derive(Default)]
pub(crate) struct Buffer(Vec<Line>);

impl Buffer {
    /// At least so many numbers. What is in them is left over from earlier uses.
    pub(crate) fn reserve(&mut self, numbers: usize) {
        let lines = numbers.div_ceil(LINE);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; LINE]));
        }
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: a line is nothing but LINE numbers.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * LINE) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * LINE) }
    }
}
