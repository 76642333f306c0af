//! What a sequence says about the blocks that it publishes, to who follows what the pool has.

use std::{ops::Range, sync::Arc};

use super::state::History;
use crate::{
    ids::BlockId,
    pool::events::{Note, Origin},
};

impl History {
    /// Describe the logical blocks `range`, which are full, known and hashed; `blocks` is the whole table.
    pub(super) fn note(
        &self,
        origin: &Arc<Origin>,
        blocks: &[BlockId],
        range: Range<usize>,
        block_size: usize,
    ) -> Note {
        let keys = self.chain.keys();
        let (start, stop) = (range.start * block_size, range.end * block_size);
        let touching = self.extras.iter().filter(|extra| extra.start < stop && extra.stop > start);
        Note {
            origin: Arc::clone(origin),
            epoch: self.epoch,
            parent: range.start.checked_sub(1).map(|before| keys[before]),
            start,
            blocks: blocks[range.clone()].into(),
            keys: keys[range].into(),
            tokens: self.tokens[start..stop].into(),
            extras: touching.cloned().collect(),
        }
    }
}
