//! Taking blocks, and giving them back: what the layers above build on. None of it waits for anybody, and
//! none of it can fail once the count was reserved.

use super::{
    Shared,
    blank::Giving,
    eviction::{Dropped, Leaving},
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
        // Acquire: who has a unit sees the block that it was given for, or that somebody took that one.
        n == 0
            || self
                .free
                .0
                .fetch_update(Ordering::Acquire, Ordering::Relaxed, |free| free.checked_sub(n))
                .is_ok()
    }

    /// Give units back, when the blocks themselves can be found.
    pub(super) fn give_free(&self, n: usize) {
        if n > 0 {
            self.free.0.fetch_add(n, Ordering::Release);
        }
    }

    /// Take `n` blocks, units of which were reserved, with one reference of a table's each: blank ones while
    /// there are any, then idle ones in eviction order.
    pub(crate) fn take_reserved(&self, n: usize, taken: &mut Vec<BlockId>) {
        self.take_claimed(n, Claim::Owned, taken);
    }

    /// The same with a claim of any kind.
    ///
    /// At any moment as many blocks can be found as units are free or in the hands of those who look, so who
    /// finds too few was overtaken by others who found theirs, or has missed a mark: he looks again,
    /// everywhere.
    pub(super) fn take_claimed(&self, n: usize, claim: Claim, taken: &mut Vec<BlockId>) {
        let end = taken.len() + n;
        let claim_blank = |blocks: &[BlockId]| {
            for block in blocks {
                self.words[block.index()].claim_blank(claim);
            }
        };
        let mut start = taken.len();
        self.blank.take(n, taken);
        claim_blank(&taken[start..]);
        while taken.len() < end {
            start = taken.len();
            self.evict(end - start, claim, taken);
            let evicted = taken.len();
            if evicted < end {
                self.blank.take_anywhere(end - evicted, taken);
                claim_blank(&taken[evicted..]);
            }
            if taken.len() == start {
                spin_loop();
            }
        }
        self.counters.allocations.add(n);
    }

    /// Tables hold so many references more, for the audit. It wraps around where they are fewer; the sum does not.
    pub(crate) fn account_table_references(&self, change: usize) {
        self.table_references.fetch_add(change, Ordering::Relaxed);
    }

    #[cfg(feature = "internals")]
    pub(crate) fn cycle_ids(&self, n: usize, ids: &mut Vec<BlockId>) {
        assert!(self.reserve(n));
        self.blank.take(n, ids);
        let mut blank = Giving::new(&self.blank);
        ids.drain(..).for_each(|block| blank.add(block));
        self.give_free(blank.finish());
    }

    /// Give back one reference for each mention of a block, in one release: the deepest block comes first in
    /// the order of eviction. Null blocks are passed over.
    pub(crate) fn drop_references(&self, blocks: &[BlockId]) {
        self.settle(blocks.iter().rev().copied(), Claim::Owned);
    }

    /// Give back one hold for each mention of a block, in the order given.
    pub(crate) fn drop_holds(&self, blocks: &[BlockId]) {
        self.settle(blocks.iter().copied(), Claim::Hold);
        self.plan_holds.fetch_sub(blocks.len(), Ordering::Relaxed);
    }

    /// References become holds of a plan in flight.
    pub(crate) fn references_to_holds(&self, blocks: &[BlockId]) {
        let quarantined = blocks.iter().filter(|block| self.words[block.index()].reference_to_hold()).count();
        self.quarantined.fetch_add(quarantined as isize, Ordering::Relaxed);
        self.plan_holds.fetch_add(blocks.len(), Ordering::Relaxed);
    }

    /// The reference again that became the hold of a plan of the caller's, which still has it.
    pub(crate) fn restore_reference(&self, block: BlockId) {
        if self.words[block.index()].restore_reference() {
            self.quarantined.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// One more reference to each block, to all of which the caller refers; all or nothing. Null blocks are
    /// passed over.
    pub(crate) fn add_references(&self, blocks: &[BlockId]) -> Result<()> {
        self.add_claims(blocks, Claim::Owned).map_err(|(block, _)| overflow(block))
    }

    /// One more claim on each block; all or nothing: else the first block where it could not be, and why.
    pub(super) fn add_claims(
        &self,
        blocks: &[BlockId],
        claim: Claim,
    ) -> std::result::Result<(), (BlockId, Word)> {
        for (index, &block) in blocks.iter().enumerate().filter(|(_, block)| !block.is_null()) {
            if let Err(word) = self.words[block.index()].claim_referenced(claim) {
                self.settle(blocks[..index].iter().rev().copied(), claim);
                return Err((block, word));
            }
        }
        Ok(())
    }

    /// Drop a claim on each block, and put where they belong those that nobody uses any more: blank, or in line
    /// for eviction in the order given. Null blocks are passed over. Returns a block without such a claim, if
    /// there was one.
    pub(super) fn settle(&self, blocks: impl Iterator<Item = BlockId>, claim: Claim) -> Option<BlockId> {
        let mut blank = Giving::new(&self.blank);
        let mut leaving = Leaving::new();
        let mut dropped = Dropped::default();
        let mut missing = None;
        for block in blocks.filter(|block| !block.is_null()) {
            let left = self.words[block.index()].drop_claim(claim, false);
            dropped.quarantined += left.quarantined(claim);
            match left {
                Left::Blank => blank.add(block),
                Left::WouldBeIdle => {
                    leaving.add(block);
                    if leaving.is_full() {
                        self.leave_idle(&mut leaving, claim, &mut blank, &mut dropped);
                    }
                }
                Left::Missing => missing = Some(block),
                Left::InUse | Left::Quarantined | Left::Idle => {}
            }
        }
        if !leaving.is_empty() {
            self.leave_idle(&mut leaving, claim, &mut blank, &mut dropped);
        }
        self.finish(blank, &dropped);
        missing
    }

    /// Make known what came of dropped claims: the blocks first, then their units.
    pub(super) fn finish(&self, blank: Giving<'_>, dropped: &Dropped) {
        if dropped.quarantined != 0 {
            self.quarantined.fetch_add(dropped.quarantined, Ordering::Relaxed);
        }
        let num_blank = blank.finish();
        self.give_free(num_blank + dropped.units);
    }
}

pub(super) fn overflow(block: BlockId) -> Error {
    Error::RefCountOverflow { block, max: MAX_REFERENCES }
}
