//! The prefix cache: what is published, and can be found and shared.
//!
//! A hit and an eviction, a hit and the last release, a hit and an overwrite: each pair is decided by one
//! compare-and-swap on the block's word. What a block holds is part of what is compared: after the claim it is
//! looked at once more, and while the claim lasts it cannot change.

use std::{hint::black_box, ops::Range, sync::Arc};

use super::{
    Shared,
    blank::Giving,
    events::Note,
    eviction::Dropped,
    index::Hash,
    references::overflow,
    word::{Claim, Left},
};
use crate::{
    error::Result,
    ids::BlockId,
    key::{Key, KeyChain},
    sync::Ordering,
};

/// Keys hashed ahead of a look-up, so that a long prompt which is not cached costs little.
const LOOK_AHEAD: usize = 32;

/// Whether a block may be written in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Opening {
    /// Its sole user may write into it.
    Open,
    /// The same, now that it cannot be found any more.
    Unpublished,
    /// Others use it too.
    Shared,
}

/// Where a block that is to be published is described.
pub(crate) struct Described {
    block: BlockId,
    hash: Hash,
}

/// What came of looking for a block to share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hit {
    /// The caller has a reference to it.
    Held(BlockId),
    /// It is there, but there is no unit of the free blocks to be had for it, or no room to count.
    Refused,
    /// It is not there.
    Absent,
}

/// Units of the free blocks for hits on idle ones.
#[derive(Default)]
struct Units {
    in_hand: usize,
    spent: usize,
}

impl Shared {
    /// The epoch that content is published in now.
    pub(crate) fn epoch(&self) -> u64 {
        // Relaxed: whether content is of this epoch is told by the content.
        self.epoch.load(Ordering::Relaxed)
    }

    /// Get the buckets of some keys at hand, before any branch depends on what is in one.
    fn touch(&self, keys: &[Key]) {
        for key in keys {
            self.index.touch(self.index.hash(key));
        }
    }

    /// What publishing a block as this will look at.
    pub(crate) fn described(&self, block: BlockId, key: &Key) -> Described {
        Described { block, hash: self.index.hash(key) }
    }

    /// Get it at hand. For many at once, so that nothing comes between the reads and they overlap.
    pub(crate) fn touch_described(&self, places: &[Described]) {
        for Described { block, hash } in places {
            self.index.touch(*hash);
            self.touch_history([*hash]);
            black_box(self.words[block.index()].load());
            self.contents.touch(*block);
            if let Some(events) = &self.events {
                events.touch(*block);
            }
        }
    }

    /// A published block with this key, if there is one now; nothing is held.
    fn find(&self, key: &Key, epoch: u64) -> Option<BlockId> {
        self.index.find(self.index.hash(key), |block| {
            self.words[block.index()].load().is_published() && self.contents.is(block, key, epoch)
        })
    }

    /// The longest unbroken run of published blocks among the logical blocks `range`; nothing is held. The
    /// chain grows by what is hashed for it, within `tokens`, which are all known.
    pub(crate) fn find_prefix(
        &self,
        chain: &mut KeyChain,
        tokens: &[i32],
        extras: &[crate::Extra],
        mut range: Range<usize>,
    ) -> Vec<BlockId> {
        let epoch = self.epoch();
        let mut found = Vec::new();
        while self.prefix_cache && !range.is_empty() {
            let stop = range.end.min(range.start + LOOK_AHEAD);
            chain.extend(tokens, extras, self.block_size, stop);
            let keys = chain.keys().get(range.start..stop.min(chain.keys().len())).unwrap_or(&[]);
            let before = found.len();
            self.touch(keys);
            found.extend(keys.iter().map_while(|key| self.find(key, epoch)));
            if found.len() - before < stop - range.start {
                break;
            }
            range.start = stop;
        }
        found
    }

    /// Take a reference to each of the longest unbroken run of published blocks with these keys, and tell the
    /// epoch that they are of; nothing if that is not the expected one.
    pub(crate) fn hold_prefix(&self, keys: &[Key], expected_epoch: Option<u64>) -> (Vec<BlockId>, u64) {
        let epoch = self.epoch();
        let mut held = Vec::new();
        if expected_epoch.is_some_and(|expected| expected != epoch) {
            return (held, epoch);
        }
        for keys in keys.chunks(LOOK_AHEAD) {
            let before = held.len();
            self.hold_batch(keys, epoch, &mut held);
            if held.len() - before < keys.len() {
                break;
            }
        }
        (held, epoch)
    }

    /// The same for a few keys. All look-ups come first: they overlap in the processor, which claims, being
    /// atomic updates, would not let them.
    fn hold_batch(&self, keys: &[Key], epoch: u64, held: &mut Vec<BlockId>) {
        let mut found = [BlockId::NULL; LOOK_AHEAD];
        let mut num_idle = 0;
        let mut num_found = 0;
        self.touch(keys);
        for (key, found) in keys.iter().zip(&mut found) {
            let Some(block) = self.find(key, epoch) else {
                break;
            };
            *found = block;
            num_found += 1;
            num_idle += usize::from(self.is_idle(block));
        }
        // Units for all that are idle, and one at a time if that is too many by now.
        let mut units = Units::default();
        if self.reserve(num_idle) {
            units.in_hand = num_idle;
        }
        for (key, block) in keys.iter().zip(&found[..num_found]) {
            let is_wanted = |block| self.contents.is(block, key, epoch);
            let hit = match self.hit_block(*block, is_wanted, &mut units) {
                Hit::Absent => self.hit(key, epoch, &mut units), // it went; perhaps there is another
                hit => hit,
            };
            let Hit::Held(block) = hit else {
                break;
            };
            held.push(block);
        }
        self.finish_hits(&units);
    }

    /// Whether one more reference to a block could be counted.
    pub(crate) fn check_countable(&self, block: BlockId) -> Result<()> {
        let countable = self.words[block.index()].load().has_room_for(1);
        if countable { Ok(()) } else { Err(overflow(block)) }
    }

    /// Undo `hold_prefix`, as if it had never been.
    pub(crate) fn unhold_prefix(&self, blocks: &[BlockId]) {
        let mut blank = Giving::new(&self.blank);
        let mut dropped = Dropped::default();
        for &block in blocks.iter().rev() {
            let left = self.return_idle(block, Claim::Owned);
            dropped.quarantined += left.quarantined(Claim::Owned);
            match left {
                Left::Blank => blank.add(block),
                Left::Idle => dropped.units += 1,
                _ => {}
            }
        }
        self.finish(blank, &dropped);
    }

    /// A reference to a block with this key.
    fn hit(&self, key: &Key, epoch: u64, units: &mut Units) -> Hit {
        let mut hit = Hit::Absent;
        self.index.find(self.index.hash(key), |block| {
            hit = self.hit_block(block, |block| self.contents.is(block, key, epoch), units);
            hit != Hit::Absent
        });
        hit
    }

    /// A reference to a block that is published and holds what is wanted. An idle one takes a unit of the free
    /// first, so that nobody is promised the same block: one of `units`, which are in the caller's hands, or
    /// another.
    fn hit_block(&self, block: BlockId, is_wanted: impl Fn(BlockId) -> bool, units: &mut Units) -> Hit {
        let word = &self.words[block.index()];
        let mut seen = word.load();
        loop {
            if !seen.is_published() || !is_wanted(block) {
                return Hit::Absent;
            }
            if !seen.has_room_for(1) {
                return Hit::Refused;
            }
            if seen.is_idle() && units.in_hand == 0 {
                if !self.reserve(1) {
                    return Hit::Refused;
                }
                units.in_hand = 1;
            }
            match word.claim_found(Claim::Owned, seen) {
                Ok(()) => break,
                Err(now) => seen = now,
            }
        }
        if seen.is_idle() {
            units.in_hand -= 1;
            units.spent += 1;
        } else if seen.is_quarantined() {
            self.quarantined.fetch_sub(1, Ordering::Relaxed);
        }
        // Since it was looked at it may have been given other content and have come back to the same word.
        if is_wanted(block) {
            return Hit::Held(block);
        }
        self.drop_references(&[block]);
        Hit::Absent
    }

    fn finish_hits(&self, units: &Units) {
        if units.spent > 0 {
            self.idle.fetch_sub(units.spent as isize, Ordering::Relaxed);
        }
        self.give_free(units.in_hand);
    }

    /// Make full blocks of the caller's findable, or find those that are already: of equal blocks the first
    /// stays. With `merge`, the caller gets references to those, unless nobody has a unit of the free to
    /// spare for one: returned with their places in `blocks`. `epoch` is that of the caller's content. Null
    /// blocks are passed over.
    ///
    /// Of equal blocks that are published by calls which overlap, both may be in the index; the one that
    /// look-ups do not come upon gives way in its turn.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn publish(
        &self,
        blocks: &[BlockId],
        keys: &[Key],
        epoch: u64,
        merge: bool,
    ) -> Vec<(usize, BlockId)> {
        self.publish_noted(blocks, keys, epoch, None, merge)
    }

    /// The same; `note` describes a part of the blocks for who follows what is found.
    pub(crate) fn publish_noted(
        &self,
        blocks: &[BlockId],
        keys: &[Key],
        epoch: u64,
        note: Option<&dyn Fn(Range<usize>) -> Note>,
        merge: bool,
    ) -> Vec<(usize, BlockId)> {
        let mut merged = Vec::new();
        if epoch != self.epoch() {
            return merged;
        }
        let mut units = Units::default();
        for (batch, keys) in keys.chunks(LOOK_AHEAD).enumerate() {
            self.touch(keys);
            self.touch_history(keys.iter().map(|key| self.index.hash(key)));
            let first = batch * LOOK_AHEAD;
            let mut noted = None;
            for (key, index) in keys.iter().zip(first..) {
                let block = blocks[index];
                if block.is_null() || self.words[block.index()].load().is_published() {
                    continue;
                }
                let equal = if merge {
                    self.hit(key, epoch, &mut units)
                } else {
                    self.find(key, epoch).map_or(Hit::Absent, |_| Hit::Refused)
                };
                match equal {
                    Hit::Held(equal) => merged.push((index, equal)),
                    Hit::Refused => {}
                    Hit::Absent => {
                        if let (Some(events), Some(note)) = (&self.events, note) {
                            let note = || Arc::new(note(first..first + keys.len()));
                            events.put(block, noted.get_or_insert_with(note));
                        }
                        self.publish_as(block, key, epoch);
                        self.mark(block);
                    }
                }
            }
        }
        self.finish_hits(&units);
        merged
    }

    /// Publish a block that the caller refers to, unless somebody else is just doing so.
    fn publish_as(&self, block: BlockId, key: &Key, epoch: u64) {
        let word = &self.words[block.index()];
        if word.begin_publishing() {
            let hash = self.index.hash(key);
            self.contents.set(block, key, epoch);
            self.begin_history(block, hash);
            self.index.insert(hash, block);
            word.finish_publishing();
        }
    }

    /// Nobody finds the block any more, on which the caller has a claim. If others have, too, one of them may
    /// publish it again: as the same, so that it does not matter which of the two entries goes.
    pub(super) fn unpublish(&self, block: BlockId) {
        if self.words[block.index()].unpublish() {
            self.index.remove(self.index.hash(&self.contents.key(block)), block);
            self.mark(block);
        }
    }

    /// Get a block of the caller's ready to be written: nobody may find it any more.
    pub(crate) fn open(&self, block: BlockId) -> Opening {
        let word = &self.words[block.index()];
        loop {
            let now = word.load();
            if now.is_shared() {
                return Opening::Shared;
            }
            if !now.is_published() {
                return Opening::Open;
            }
            if word.unpublish_if(now) {
                self.index.remove(self.index.hash(&self.contents.key(block)), block);
                self.mark(block);
                return Opening::Unpublished;
            }
        }
    }

    /// Undo an `open` that unpublished, unless the same content was published or all was forgotten meanwhile.
    pub(crate) fn republish(&self, block: BlockId, epoch: u64) {
        let key = self.contents.key(block);
        if epoch == self.epoch() && self.find(&key, epoch).is_none() {
            self.publish_as(block, &key, epoch);
            self.mark(block); // the note that was left about it still says what it holds
        }
    }

    /// Forget all content, also of what is still being computed.
    ///
    /// From the change of the epoch on nobody finds what was published before it; the rest tidies up. What
    /// somebody publishes late, who had looked at the epoch before, is of the old one and is found by nobody.
    pub(crate) fn reset_prefix_cache(&self) {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        for block in self.all_blocks() {
            // With a reference of our own, so that it is not handed out and filled anew meanwhile. Refused if
            // somebody is about to take all that is free, this one included.
            let is_outdated = |block| !self.contents.is_of(block, epoch);
            let mut units = Units::default();
            if self.hit_block(block, is_outdated, &mut units) == Hit::Held(block) {
                self.unpublish(block);
                self.drop_references(&[block]);
            }
            self.finish_hits(&units);
        }
    }

    pub(super) fn all_blocks(&self) -> impl Iterator<Item = BlockId> + use<> {
        (1..=self.num_blocks as u32).map(BlockId::new)
    }
}
