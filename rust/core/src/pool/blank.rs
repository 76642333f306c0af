//! The blank blocks: those never handed out, and a stack of those that came back.
//!
//! Both are lock-free. The stack is Treiber's (IBM RJ 5118, 1986) with whole chains as its unit: a batch is
//! linked up privately and goes on with one compare-and-swap, and a batch comes off with one. The head
//! carries a tag that every success changes, against ABA: what a popper has read of a chain is used only if
//! nothing at all happened to the stack meanwhile (or exactly 2^32 successes did while it was stopped).
//!
//! Who takes from here has reserved the count beforehand, so there is enough for everybody.

use crate::{
    ids::BlockId,
    sync::{AtomicU32, AtomicU64, Ordering},
};

/// Blank blocks, linked up and not on the stack yet.
#[derive(Default)]
pub(super) struct Chain {
    first: u32,
    last: u32,
    len: usize,
}

impl Chain {
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

pub(super) struct BlankBlocks {
    /// Ids from here on have never been handed out.
    fresh: AtomicU32,
    end: u32,
    /// `tag << 32 | first block`; the null block ends a chain.
    head: AtomicU64,
    next: Box<[AtomicU32]>,
}

impl BlankBlocks {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            fresh: AtomicU32::new(1),
            end: num_blocks as u32 + 1,
            head: AtomicU64::new(0),
            next: (0..=num_blocks).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Put a blank block, which is the caller's alone, in front of a private chain.
    pub(super) fn link(&self, chain: &mut Chain, block: BlockId) {
        // Relaxed: whoever pops the chain sees the links through `push`'s release.
        self.next[block.index()].store(chain.first, Ordering::Relaxed);
        if chain.len == 0 {
            chain.last = block.as_u32();
        }
        chain.first = block.as_u32();
        chain.len += 1;
    }

    pub(super) fn push(&self, chain: &Chain) {
        if chain.len == 0 {
            return;
        }
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.next[chain.last as usize].store(head as u32, Ordering::Relaxed);
            // Release: publishes the links, and what the blocks' last users did, to the popper's acquire.
            match self.head.compare_exchange_weak(
                head,
                Self::tagged(head, chain.first),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(other) => head = other,
            }
        }
    }

    /// Append up to `most` blocks to `taken`.
    pub(super) fn take(&self, most: usize, taken: &mut Vec<BlockId>) {
        let popped = self.pop(most, taken);
        self.take_fresh(most - popped, taken);
    }

    fn pop(&self, most: usize, taken: &mut Vec<BlockId>) -> usize {
        let before = taken.len();
        // Acquire: see `push`. Later pops keep the release sequence alive, being read-modify-writes.
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let mut block = head as u32;
            while block != 0 && taken.len() - before < most {
                taken.push(BlockId::new(block));
                // May be stale if others are at work; then the exchange fails and nothing of it is used.
                block = self.next[block as usize].load(Ordering::Relaxed);
            }
            if taken.len() == before {
                return 0;
            }
            match self.head.compare_exchange_weak(
                head,
                Self::tagged(head, block),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return taken.len() - before,
                Err(other) => {
                    taken.truncate(before);
                    head = other;
                }
            }
        }
    }

    fn take_fresh(&self, most: usize, taken: &mut Vec<BlockId>) {
        if most == 0 || self.fresh.load(Ordering::Relaxed) == self.end {
            return;
        }
        let up_to = |first: u32| (first as usize + most).min(self.end as usize) as u32;
        // Relaxed: nobody has used these blocks before.
        if let Ok(first) =
            self.fresh.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |first| Some(up_to(first)))
        {
            taken.extend((first..up_to(first)).map(BlockId::new));
        }
    }

    fn tagged(head: u64, first: u32) -> u64 {
        ((head >> 32).wrapping_add(1) << 32) | u64::from(first)
    }

    /// Every blank block once, for the audit; exact while no other thread is at work. A loop in the chain
    /// ends it after `num_blocks` entries.
    pub(super) fn snapshot(&self) -> Vec<BlockId> {
        let fresh = self.fresh.load(Ordering::Acquire)..self.end;
        let mut blocks: Vec<_> = fresh.map(BlockId::new).collect();
        let mut block = self.head.load(Ordering::Acquire) as u32;
        while block != 0 && blocks.len() < self.end as usize {
            blocks.push(BlockId::new(block));
            block = self.next[block as usize].load(Ordering::Acquire);
        }
        blocks
    }
}
