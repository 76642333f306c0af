//! What each block holds: its key, and the epoch that it was published in.
//!
//! Written by the one thread that is publishing the block, before the block can be found. Read by anybody at
//! any time, so a reader may see parts of two keys; what was read counts only if the block is the reader's own
//! or has been published all the while, which a claim on it sees to. All operations are relaxed: the block's
//! word, set with a release once this is written and read with an acquire before, gives them their order.

use std::hint::black_box;

use crate::{
    ids::BlockId,
    key::Key,
    sync::{AtomicU32, AtomicU64, Ordering},
};

#[derive(Default)]
struct AtomicKey([AtomicU64; 4]);

pub(super) struct Contents {
    keys: Box<[AtomicKey]>,
    epochs: Box<[AtomicU32]>,
}

impl Contents {
    pub(super) const BYTES_PER_BLOCK: usize = size_of::<AtomicKey>() + size_of::<AtomicU32>();

    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            keys: (0..=num_blocks).map(|_| AtomicKey::default()).collect(),
            epochs: (0..=num_blocks).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Read what a block holds, so that it is at hand.
    pub(super) fn touch(&self, block: BlockId) {
        black_box(self.keys[block.index()].0[0].load(Ordering::Relaxed));
        black_box(self.epochs[block.index()].load(Ordering::Relaxed));
    }

    pub(super) fn set(&self, block: BlockId, key: &Key, epoch: u64) {
        for (own, word) in self.keys[block.index()].0.iter().zip(key.words()) {
            own.store(word, Ordering::Relaxed);
        }
        self.epochs[block.index()].store(epoch as u32, Ordering::Relaxed);
    }

    /// Whether the block has this key, all 256 bits of it, of this epoch.
    pub(super) fn is(&self, block: BlockId, key: &Key, epoch: u64) -> bool {
        let own = &self.keys[block.index()].0;
        own.iter().zip(key.words()).all(|(own, word)| own.load(Ordering::Relaxed) == word)
            && self.is_of(block, epoch)
    }

    /// Whether the block was published in this epoch. Epochs are told apart by 32 bits.
    pub(super) fn is_of(&self, block: BlockId, epoch: u64) -> bool {
        self.epochs[block.index()].load(Ordering::Relaxed) == epoch as u32
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.keys) + size_of_val(&*self.epochs)
    }

    /// The key that the block had last.
    pub(super) fn key(&self, block: BlockId) -> Key {
        Key::from_words(std::array::from_fn(|word| self.keys[block.index()].0[word].load(Ordering::Relaxed)))
    }
}
