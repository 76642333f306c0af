//! What kernels would have written: one number a slot, in memory without any order of its own.

use std::cell::UnsafeCell;

use kvfolio::{BlockId, BlockPool};

pub(crate) struct Memory {
    slots: Box<[UnsafeCell<u64>]>,
    block_size: usize,
}

// SAFETY: who refers to a block reads it, and who alone does writes it: that no two threads are at one slot
// otherwise is what the pool promises. To find out whether it does is what this program is for.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn of(pool: &BlockPool) -> Self {
        let slots = (0..pool.num_physical_blocks() * pool.block_size()).map(|_| UnsafeCell::new(0)).collect();
        Self { slots, block_size: pool.block_size() }
    }

    pub(crate) fn slot(&self, block: i32, position: usize) -> usize {
        block as usize * self.block_size + position % self.block_size
    }

    pub(crate) fn write(&self, slot: usize, content: u64) {
        // SAFETY: see `Sync`; the slot is within the box.
        unsafe { *self.slots[slot].get() = content }
    }

    /// Compare the first positions of a table with what they are to hold; what was discarded is passed over.
    pub(crate) fn check(&self, blocks: impl IntoIterator<Item = i32>, contents: &[u64]) {
        for (index, (block, contents)) in blocks.into_iter().zip(contents.chunks(self.block_size)).enumerate()
        {
            for (offset, content) in contents.iter().enumerate().filter(|_| block != 0) {
                let found = self.read(self.slot(block, offset));
                assert_eq!(found, *content, "block {block}, logical block {index}, offset {offset}");
            }
        }
    }

    pub(crate) fn copy_block(&self, source: i32, target: i32) {
        for offset in 0..self.block_size {
            self.write(self.slot(target, offset), self.read(self.slot(source, offset)));
        }
    }

    fn read(&self, slot: usize) -> u64 {
        // SAFETY: see `Sync`; the slot is within the box.
        unsafe { *self.slots[slot].get() }
    }
}

/// Ids as kernels get them.
pub(crate) fn ids(blocks: &[BlockId]) -> impl Iterator<Item = i32> {
    blocks.iter().map(|block| block.as_i32())
}

/// What the slots of these tokens are to hold: each what came before it and its own token.
pub(crate) fn history(tokens: &[i32]) -> Vec<u64> {
    let follow = |previous: &mut u64, token: &i32| {
        *previous = (*previous ^ *token as u64).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
        Some(*previous)
    };
    tokens.iter().scan(0x5eed, follow).collect()
}
