//! References lent to the caller by block id. He may name any number, and any block as often as he likes, so
//! this is where ids are checked.

use super::{
    Shared,
    references::overflow,
    word::{Claim, Word},
};
use crate::{
    error::{Error, Result},
    ids::BlockId,
};

impl Shared {
    /// Lend one more reference for each mention of a block; all or nothing.
    pub(super) fn lend(&self, blocks: &[BlockId]) -> Result<()> {
        self.check_each(blocks, check_shareable)?;
        // Only another thread can make this fail now.
        self.add_claims(blocks, Claim::Lent)
            .map_err(|(block, word)| check_shareable(block, word, 1).err().unwrap_or_else(|| overflow(block)))
    }

    /// Lent references become a table's; all or nothing.
    pub(crate) fn take_back(&self, blocks: &[BlockId]) -> Result<()> {
        self.check_lent(blocks)?;
        for (index, &block) in blocks.iter().enumerate().filter(|(_, block)| !block.is_null()) {
            if !self.words[block.index()].convert(Claim::Lent, Claim::Owned) {
                for block in blocks[..index].iter().filter(|block| !block.is_null()) {
                    self.words[block.index()].convert(Claim::Owned, Claim::Lent);
                }
                return Err(self.not_lent(block));
            }
        }
        Ok(())
    }

    /// Refuse blocks that are not lent as often as they are named.
    pub(super) fn check_lent(&self, blocks: &[BlockId]) -> Result<()> {
        self.check_each(
            blocks,
            |block, word, times| {
                if word.lent() >= times { Ok(()) } else { Err(self.not_lent(block)) }
            },
        )
    }

    /// Check the word of each block but the null block, and how often it is named.
    fn check_each(&self, blocks: &[BlockId], check: impl Fn(BlockId, Word, u32) -> Result<()>) -> Result<()> {
        let check = |block: BlockId, times| {
            if block.is_null() { Ok(()) } else { check(block, self.words[block.index()].load(), times) }
        };
        // As they mostly come, as they were allocated or the other way round: then the ends are the extremes.
        if blocks.is_sorted_by(|a, b| a < b) || blocks.is_sorted_by(|a, b| a > b) {
            let ends = [blocks.first(), blocks.last()];
            ends.into_iter().flatten().try_for_each(|block| self.check_block(*block))?;
            return blocks.iter().try_for_each(|block| check(*block, 1));
        }
        blocks.iter().try_for_each(|block| self.check_block(*block))?;
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        sorted.chunk_by(PartialEq::eq).try_for_each(|named| check(named[0], named.len() as u32))
    }

    pub(super) fn check_block(&self, block: BlockId) -> Result<()> {
        let exists = block.index() <= self.num_blocks;
        if exists { Ok(()) } else { Err(self.no_such_block(i64::from(block.as_u32()))) }
    }

    pub(super) fn no_such_block(&self, id: i64) -> Error {
        Error::InvalidBlock(format!("ids must be between 1 and {}, not {id}", self.num_blocks))
    }

    /// What a block that is to be given away, but is not lent as often as that, is refused with.
    pub(super) fn not_lent(&self, block: BlockId) -> Error {
        let word = self.words[block.index()].load();
        Error::InvalidBlock(format!(
            "ids must not name a block more often than it is lent; block {}: of its {} references, {} are lent",
            block.as_i32(),
            word.references(),
            word.lent()
        ))
    }
}

fn check_shareable(block: BlockId, word: Word, times: u32) -> Result<()> {
    if word.references() == 0 {
        Err(Error::InvalidBlock(format!(
            "ids must name blocks that have a reference; block {}: it has none",
            block.as_i32()
        )))
    } else if word.has_room_for(times) {
        Ok(())
    } else {
        Err(overflow(block))
    }
}
