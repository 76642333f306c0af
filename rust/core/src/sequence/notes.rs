//! What a sequence says about the blocks that it publishes, to who follows what the pool has.

use std::ops::Range;

use super::state::History;
use crate::{ids::BlockId, pool::events::Note};

impl History {
    /// Describe the logical blocks `range`, which are full, known and hashed; `blocks` is the whole table.
    pub(super) fn note(&self, blocks: &[BlockId], range: Range<usize>, block_size: usize) -> Note {
        let keys = self.chain.keys();
        let (start, stop) = (range.start * block_size, range.end * block_size);
        let touching = self.extras.iter().filter(|extra| extra.start < stop && extra.stop > start);
        let parent = range.start.checked_sub(1).map(|before| keys[before]);
        let all = (&blocks[range.clone()], &keys[range], &self.tokens[start..stop]);
        Note::new(self.origin.clone(), self.epoch, (parent, start), all, touching.cloned().collect())
    }
}
