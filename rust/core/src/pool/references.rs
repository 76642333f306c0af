//! Taking blocks, and giving them back: what the layers above build on. None of it can fail once the
//! count was reserved, and none of it takes a lock as long as only blank or unpublished blocks are concerned.

use super::{
    Shared,
    blank::Chain,
    word::{Claim, Left, MAX_REFERENCES, Word},
};
use crate::{
    error::{Error, Result},
    ids::BlockId,
    sync::{Ordering, spin_loop},
};

impl Shared {
    /// Take `n` units of the free blocks, if they are there; who has units gets as many blocks.
    pub(crate) fn reserve(&self, n: usize) -> bool {
        n == 0
            || self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, |free| free.checked_sub(n)).is_ok()
    }

    /// Give units back, after the blocks themselves.
    pub(crate) fn give_free(&self, n: usize) {
        if n > 0 {
            self.free.fetch_add(n, Ordering::AcqRel);
        }
    }

    /// Take `n` blocks, units of which were reserved, with one reference each: blank ones while there are
    /// any, then idle ones in eviction order.
    ///
    /// There are at least as many blocks among the blank and the idle as units are reserved by all threads
    /// together, so a thread that finds too few has been overtaken by others who found theirs, or by a
    /// reset that is moving blocks from the idle to the blank; it looks again.
    pub(crate) fn take_reserved(&self, n: usize, taken: &mut Vec<BlockId>) {
        let end = taken.len() + n;
        while taken.len() < end {
            let start = taken.len();
            self.blank.take(end - start, taken);
            for block in &taken[start..] {
                self.words[block.index()].set_referenced();
            }
            if taken.len() < end {
                self.evict(end - taken.len(), taken);
            }
            if taken.len() == start {
                spin_loop();
            }
        }
        self.counters.allocations.add(n);
    }

    /// Give back one reference for each mention of a block, in one release: the deepest block comes first in
    /// the order of eviction. Null blocks are passed over.
    pub(crate) fn drop_references(&self, blocks: &[BlockId]) {
        self.settle(blocks.iter().rev().copied(), Claim::Reference);
    }

    /// Give back one hold for each mention of a block, in the order given.
    pub(crate) fn drop_holds(&self, blocks: &[BlockId]) {
        self.settle(blocks.iter().copied(), Claim::Hold);
        self.plan_holds.fetch_sub(blocks.len(), Ordering::Relaxed);
    }

    /// References become holds of a plan in flight.
    pub(crate) fn references_to_holds(&self, blocks: &[BlockId]) {
        let quarantined = blocks.iter().filter(|block| self.words[block.index()].reference_to_hold()).count();
        self.quarantined.fetch_add(quarantined as isize, Ordering::AcqRel);
        self.plan_holds.fetch_add(blocks.len(), Ordering::Relaxed);
    }

    /// The reference again that became the hold of a plan of the caller's, which still has it.
    pub(crate) fn restore_reference(&self, block: BlockId) {
        if self.words[block.index()].restore_reference().is_quarantined() {
            self.quarantined.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// One more reference to a block that the caller refers to.
    fn add_reference(&self, block: BlockId) -> Result<()> {
        match self.words[block.index()].add_reference(|word: Word| word.references() > 0) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::RefCountOverflow { block, max: MAX_REFERENCES }),
        }
    }

    /// One more reference to each block; all or nothing. Null blocks are passed over.
    pub(crate) fn add_references(&self, blocks: &[BlockId]) -> Result<()> {
        for (index, &block) in blocks.iter().enumerate() {
            if !block.is_null() {
                self.add_reference(block).inspect_err(|_| self.drop_references(&blocks[..index]))?;
            }
        }
        Ok(())
    }

    fn settle(&self, blocks: impl Iterator<Item = BlockId>, claim: Claim) {
        let mut blank = Chain::default();
        let mut published = Vec::new();
        let mut quarantined = 0;
        for block in blocks.filter(|block| !block.is_null()) {
            let left = self.words[block.index()].drop_claim(claim, false);
            quarantined += left.quarantined(claim);
            match left {
                Left::Blank => self.blank.link(&mut blank, block),
                Left::NeedsCache => published.push(block),
                Left::InUse | Left::Quarantined | Left::Idle => {}
            }
        }
        if !published.is_empty() {
            quarantined += self.settle_published(&published, claim, &mut blank);
        }
        if quarantined != 0 {
            self.quarantined.fetch_add(quarantined, Ordering::AcqRel);
        }
        self.blank.push(&blank);
        self.give_free(blank.len());
    }
}
