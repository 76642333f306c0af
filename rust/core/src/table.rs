//! One sequence's map from logical to physical blocks; it holds a reference to each of them.

use std::{collections::HashSet, sync::Arc};

use crate::{
    error::{Error, Result, check_range},
    holds::Holds,
    ids::{BlockId, block_layout},
    pool::{BlockPool, Opening, Shared},
};

/// A block to be copied before anything is written: what is read, and where it goes.
pub(crate) type Copy = (BlockId, BlockId);

/// The table itself, as sequences use it.
///
/// Only the last, partial block is ever written, so only that one is ever copied or opened.
pub(crate) struct Table {
    pool: BlockPool,
    blocks: Vec<BlockId>,
    num_tokens: usize,
    /// Leading blocks in whose place the null block stands.
    num_discarded: usize,
    /// Changes with every change but an append, and is no other table's: who has seen this stamp knows all
    /// blocks but those appended since.
    stamp: u64,
    /// The latest plan that named the blocks.
    flight: Option<(Arc<Holds>, u64)>,
    /// References as the pool's audit knows them.
    accounted: usize,
}

impl Table {
    pub(crate) fn new(pool: &BlockPool) -> Self {
        Self::over(pool, Vec::new(), 0, 0)
    }

    /// A table over blocks that the caller has a reference to.
    fn over(pool: &BlockPool, blocks: Vec<BlockId>, num_tokens: usize, num_discarded: usize) -> Self {
        let stamp = pool.shared().next_serial();
        let mut table =
            Self { pool: pool.clone(), blocks, num_tokens, num_discarded, stamp, flight: None, accounted: 0 };
        table.account();
        table
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    fn shared(&self) -> &Shared {
        self.pool.shared()
    }

    pub(crate) fn block_size(&self) -> usize {
        self.shared().block_size
    }

    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub(crate) fn num_discarded_tokens(&self) -> usize {
        self.num_discarded * self.block_size()
    }

    pub(crate) fn has_discarded(&self) -> bool {
        self.num_discarded > 0
    }

    pub(crate) fn stamp(&self) -> u64 {
        self.stamp
    }

    /// The slot of a position within the table.
    pub(crate) fn slot(&self, position: usize) -> i64 {
        let block_size = self.block_size();
        i64::from(self.blocks[position / block_size].as_i32()) * block_size as i64
            + (position % block_size) as i64
    }

    /// `num_tokens` as an argument: not more than there are, nor fewer than have been discarded.
    pub(crate) fn check_kept_tokens(&self, num_tokens: usize) -> Result<()> {
        check_range("num_tokens", num_tokens, self.num_discarded_tokens(), self.num_tokens)
    }

    // What growing takes

    /// Whether appending `n` tokens begins inside the last block.
    fn writes_into_last(&self, n: usize) -> bool {
        n > 0 && !self.num_tokens.is_multiple_of(self.block_size())
    }

    /// Free blocks that `n` more tokens take, when others are about to use the blocks in `claimed`, too.
    pub(crate) fn blocks_needed(&self, n: usize, claimed: &HashSet<BlockId>) -> usize {
        let total = self.num_blocks_with(n);
        let copies = self.writes_into_last(n)
            && self
                .blocks
                .last()
                .is_some_and(|last| self.shared().is_shared(*last) || claimed.contains(last));
        total - self.blocks.len() + usize::from(copies)
    }

    /// Blocks in the table after `n` more tokens.
    pub(crate) fn num_blocks_with(&self, n: usize) -> usize {
        (self.num_tokens + n).div_ceil(self.block_size())
    }

    /// Whether the table, with `num_blocks` in it, would fit a pool where nobody else holds anything.
    pub(crate) fn ever_fits(&self, num_blocks: usize) -> bool {
        num_blocks - self.num_discarded <= self.shared().num_blocks
    }

    /// Get the last block ready for `n` more tokens; `None` if nothing is written into it.
    pub(crate) fn open_last(&self, n: usize) -> Option<Opening> {
        self.writes_into_last(n).then(|| self.shared().open(self.blocks[self.blocks.len() - 1]))
    }

    /// Undo an `open_last`; the content was published in `epoch`.
    pub(crate) fn close_last(&self, opening: Option<Opening>, epoch: u64) {
        if opening == Some(Opening::Unpublished) {
            self.shared().republish(self.blocks[self.blocks.len() - 1], epoch);
        }
    }

    /// Free blocks that `n` more tokens take after `open_last`.
    pub(crate) fn blocks_needed_opened(&self, n: usize, opening: Option<Opening>) -> usize {
        self.num_blocks_with(n) - self.blocks.len() + usize::from(opening == Some(Opening::Shared))
    }

    // Changes; these cannot fail

    /// From now on a plan in flight names these blocks.
    pub(crate) fn fly(&mut self, holds: &Arc<Holds>, serial: u64) {
        match &mut self.flight {
            Some((known, latest)) if Arc::ptr_eq(known, holds) => *latest = serial,
            flight => *flight = Some((Arc::clone(holds), serial)),
        }
    }

    /// Whether a plan that names these blocks, of another batch than the one with `holds`, is in flight.
    pub(crate) fn flies_elsewhere(&self, holds: &Arc<Holds>) -> bool {
        self.flight
            .as_ref()
            .is_some_and(|(known, serial)| !Arc::ptr_eq(known, holds) && known.is_in_flight(*serial))
    }

    /// Room for `n` more tokens in fresh blocks; returns the copy to do, if any.
    pub(crate) fn grow(
        &mut self,
        n: usize,
        opening: Option<Opening>,
        fresh: &mut impl Iterator<Item = BlockId>,
    ) -> Option<Copy> {
        let copy = (opening == Some(Opening::Shared)).then(|| fresh.next()).flatten().map(|target| {
            let source = self.blocks[self.blocks.len() - 1];
            self.shared().counters.copies.add(1);
            self.replace(self.blocks.len() - 1, target);
            (source, target)
        });
        self.num_tokens += n;
        let total = self.num_tokens.div_ceil(self.block_size());
        self.blocks.extend(fresh.take(total - self.blocks.len()));
        debug_assert_eq!(self.blocks.len(), total);
        self.account();
        copy
    }

    /// A fresh block behind the full ones, of whose tokens `set_num_tokens` will tell. The caller has told the
    /// audit of it.
    pub(crate) fn push_accounted(&mut self, block: BlockId) {
        self.blocks.push(block);
        self.accounted += 1;
    }

    /// So many tokens are in the blocks now.
    pub(crate) fn set_num_tokens(&mut self, num_tokens: usize) {
        debug_assert_eq!(num_tokens.div_ceil(self.block_size()), self.blocks.len());
        self.num_tokens = num_tokens;
    }

    /// Published blocks behind the full ones, references to which are ours.
    pub(crate) fn append_found(&mut self, blocks: &[BlockId]) {
        self.blocks.extend(blocks);
        self.num_tokens += blocks.len() * self.block_size();
        self.account();
    }

    /// Undo an `append_found`; the references are the caller's again.
    pub(crate) fn take_off_found(&mut self, num_blocks: usize) -> Vec<BlockId> {
        let blocks = self.blocks.split_off(self.blocks.len() - num_blocks);
        self.num_tokens -= num_blocks * self.block_size();
        self.stamp = self.shared().next_serial();
        self.account();
        blocks
    }

    /// Keep the first `num_tokens` tokens, and the blocks that hold any of them.
    pub(crate) fn cut(&mut self, num_tokens: usize) {
        let kept = num_tokens.div_ceil(self.block_size());
        self.num_tokens = num_tokens;
        if kept < self.blocks.len() {
            let dropped = self.blocks.split_off(kept);
            self.num_discarded = self.num_discarded.min(kept);
            self.stamp = self.shared().next_serial();
            self.account();
            self.let_go(&dropped);
        }
    }

    /// Undo a `grow` that began at `num_tokens`.
    pub(crate) fn undo_grow(&mut self, num_tokens: usize, copy: Option<Copy>) {
        self.cut(num_tokens);
        if let Some((source, _)) = copy {
            self.shared().restore_reference(source); // the plan that copied holds it
            self.replace(self.blocks.len() - 1, source);
        }
    }

    /// Put a block, a reference to which is ours, in the place of another.
    pub(crate) fn replace(&mut self, index: usize, block: BlockId) {
        let previous = std::mem::replace(&mut self.blocks[index], block);
        self.stamp = self.shared().next_serial();
        self.let_go(&[previous]);
    }

    /// Give back the blocks that lie wholly before `position`; the null block takes their place.
    pub(crate) fn discard_before(&mut self, position: usize) {
        let count = position / self.block_size();
        if count > self.num_discarded {
            let discarded = self.blocks[self.num_discarded..count].to_vec();
            self.blocks[self.num_discarded..count].fill(BlockId::NULL);
            self.num_discarded = count;
            self.stamp = self.shared().next_serial();
            self.account();
            self.let_go(&discarded);
        }
    }

    /// A second table over the same blocks, of the first `num_tokens` tokens.
    pub(crate) fn fork(&self, num_tokens: usize) -> Result<Self> {
        let blocks = self.blocks[..num_tokens.div_ceil(self.block_size())].to_vec();
        self.shared().add_references(&blocks)?;
        let num_discarded = self.num_discarded.min(blocks.len());
        Ok(Self::over(&self.pool, blocks, num_tokens, num_discarded))
    }

    /// Give references back; what a plan in flight names stays untouched until it ends.
    fn let_go(&self, blocks: &[BlockId]) {
        let held = self.flight.as_ref().is_some_and(|(holds, serial)| holds.take(*serial, blocks));
        if !held {
            self.shared().drop_references(blocks);
        }
    }

    fn account(&mut self) {
        let now = self.blocks.len() - self.num_discarded;
        if now != self.accounted {
            // Wraps around when it shrinks; the sum over all tables does not.
            let change = now.wrapping_sub(self.accounted);
            self.shared().account_table_references(change);
            self.accounted = now;
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        self.num_discarded = 0;
        self.account();
        self.let_go(&blocks);
    }
}

/// A table of its own, for those who keep tokens and plans themselves. Dropping it gives its blocks back.
pub struct BlockTable(Table);

impl BlockPool {
    /// An empty table.
    pub fn table(&self) -> BlockTable {
        BlockTable::new(self)
    }

    /// A table that takes over one lent reference for each mention of a block. The tokens must fill the
    /// blocks up to the last one.
    pub fn table_of(&self, blocks: &[BlockId], num_tokens: usize) -> Result<BlockTable> {
        BlockTable::adopt(self, blocks, num_tokens)
    }
}

impl BlockTable {
    pub(crate) fn new(pool: &BlockPool) -> Self {
        Self(Table::new(pool))
    }

    pub(crate) fn adopt(pool: &BlockPool, blocks: &[BlockId], num_tokens: usize) -> Result<Self> {
        if blocks.iter().any(|block| block.is_null()) {
            return Err(Error::InvalidBlock("block_ids must not name the null block".into()));
        }
        if blocks.len() != block_layout(num_tokens, pool.block_size())?.0 {
            let allowed = format!("such that they fill {} blocks up to the last one", blocks.len());
            return Err(Error::argument("num_tokens", allowed, num_tokens));
        }
        pool.shared().take_back(blocks)?;
        Ok(Self(Table::over(pool, blocks.to_vec(), num_tokens, 0)))
    }

    /// Tokens that have a slot.
    pub fn num_tokens(&self) -> usize {
        self.0.num_tokens
    }

    /// Blocks, in logical order; null where they were discarded.
    pub fn blocks(&self) -> &[BlockId] {
        &self.0.blocks
    }

    /// Slots of the last block without a token.
    pub fn num_empty_slots(&self) -> usize {
        self.0.blocks.len() * self.0.block_size() - self.0.num_tokens
    }

    /// Room for `n` more tokens. Returns the block copy, source and target, to do before anything is written
    /// there, if the last block is shared. All or nothing.
    pub fn append(&mut self, n: usize) -> Result<Option<(BlockId, BlockId)>> {
        check_range("n", n, 0, i64::MAX as usize - self.0.num_tokens)?;
        let epoch = self.0.shared().epoch();
        let opening = self.0.open_last(n);
        let needed = self.0.blocks_needed_opened(n, opening);
        if !self.0.shared().reserve(needed) {
            self.0.close_last(opening, epoch);
            return Err(self.0.shared().out_of_blocks(needed, self.0.ever_fits(self.0.num_blocks_with(n))));
        }
        let mut fresh = Vec::with_capacity(needed);
        self.0.shared().take_reserved(needed, &mut fresh);
        Ok(self.0.grow(n, opening, &mut fresh.into_iter()))
    }

    /// The block and the offset in it of a position.
    pub fn locate(&self, position: usize) -> Result<(BlockId, usize)> {
        if position >= self.0.num_tokens {
            return Err(Error::Position(format!(
                "position must be below {}, the tokens of the table, not {position}",
                self.0.num_tokens
            )));
        }
        let block_size = self.0.block_size();
        Ok((self.0.blocks[position / block_size], position % block_size))
    }

    /// The slots of the positions `start <= t < stop`.
    pub fn slots(&self, start: usize, stop: usize) -> Result<Vec<i64>> {
        if start > stop || stop > self.0.num_tokens {
            return Err(Error::Position(format!(
                "start and stop must be positions in order, up to {}, the tokens of the table, not {start} \
                 and {stop}",
                self.0.num_tokens
            )));
        }
        Ok((start..stop).map(|position| self.0.slot(position)).collect())
    }

    /// A second table over the same blocks, of the first `num_tokens` tokens; a partial last block is shared
    /// until somebody writes.
    pub fn fork(&self, num_tokens: Option<usize>) -> Result<Self> {
        let num_tokens = num_tokens.unwrap_or(self.0.num_tokens);
        self.0.check_kept_tokens(num_tokens)?;
        self.0.fork(num_tokens).map(Self)
    }

    /// Keep the first `num_tokens` tokens, and the blocks that hold any of them.
    pub fn truncate(&mut self, num_tokens: usize) -> Result<()> {
        self.0.check_kept_tokens(num_tokens)?;
        self.0.cut(num_tokens);
        Ok(())
    }

    /// Give back the blocks that lie wholly before `position`; the null block takes their place.
    pub fn discard_before(&mut self, position: usize) -> Result<()> {
        check_range("position", position, 0, self.0.num_tokens)?;
        self.0.discard_before(position);
        Ok(())
    }
}
