//! The order in which idle blocks are evicted: least recently released first.
//!
//! A queue with lazy removal. A block that becomes idle is queued with a new stamp; a hit leaves its entry
//! behind, to be skipped when it comes up. Stale entries are swept out when they outnumber the idle blocks,
//! so a release pays for at most three moves of an entry on average, and the queue stays within twice
//! the idle blocks and a constant.

use std::collections::VecDeque;

use crate::ids::BlockId;

/// Below this length the queue is not worth sweeping.
const SMALL: usize = 64;

#[derive(Clone, Copy)]
struct Entry {
    block: BlockId,
    stamp: u32,
}

/// The newest stamp of a block, and whether the entry that bears it is still in the queue.
#[derive(Clone, Copy, Default)]
struct Newest {
    stamp: u32,
    queued: bool,
}

pub(super) struct IdleQueue {
    entries: VecDeque<Entry>,
    newest: Box<[Newest]>,
}

impl IdleQueue {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self { entries: VecDeque::new(), newest: vec![Newest::default(); num_blocks + 1].into() }
    }

    /// A block was released and is idle: it is the youngest now.
    pub(super) fn push(&mut self, block: BlockId, num_idle: usize, is_idle: &dyn Fn(BlockId) -> bool) {
        let newest = &mut self.newest[block.index()];
        *newest = Newest { stamp: newest.stamp.wrapping_add(1), queued: true };
        self.entries.push_back(Entry { block, stamp: newest.stamp });
        if self.entries.len() > 2 * num_idle + SMALL {
            self.sweep(is_idle);
        }
    }

    /// A hit on the block was taken back: it has its old place again, if that is still there.
    pub(super) fn restore(&mut self, block: BlockId, num_idle: usize, is_idle: &dyn Fn(BlockId) -> bool) {
        if !self.newest[block.index()].queued {
            self.push(block, num_idle, is_idle);
        }
    }

    /// The next entry that is not outdated. The caller evicts the block if it is idle; if it is not, it
    /// has been hit since, and will be queued again when it is released.
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        while let Some(entry) = self.entries.pop_front() {
            let newest = &mut self.newest[entry.block.index()];
            if newest.queued && newest.stamp == entry.stamp {
                newest.queued = false;
                return Some(entry.block);
            }
        }
        None
    }

    pub(super) fn clear(&mut self) {
        for entry in self.entries.drain(..) {
            self.newest[entry.block.index()].queued = false;
        }
    }

    /// The blocks whose newest entry is queued, for the audit.
    pub(super) fn queued(&self) -> impl Iterator<Item = BlockId> + '_ {
        let is_newest = |entry: &&Entry| {
            let newest = self.newest[entry.block.index()];
            newest.queued && newest.stamp == entry.stamp
        };
        self.entries.iter().filter(is_newest).map(|entry| entry.block)
    }

    fn sweep(&mut self, is_idle: &dyn Fn(BlockId) -> bool) {
        let newest = &mut self.newest;
        self.entries.retain(|entry| {
            let newest = &mut newest[entry.block.index()];
            let current = newest.queued && newest.stamp == entry.stamp;
            let keep = current && is_idle(entry.block);
            newest.queued = if current { keep } else { newest.queued };
            keep
        });
    }
}
