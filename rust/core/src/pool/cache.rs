//! The prefix cache: what is published, and in which order idle blocks give way.
//!
//! The lock guards the index, the eviction queue, the published bit of every block's word, and every change
//! into or out of the idle state. It is taken once for a batch of blocks, never while anything is hashed,
//! and never by calls that concern blank or unpublished blocks alone.

use std::ops::Range;

use super::{
    Shared,
    blank::Chain,
    idle::IdleQueue,
    index::Index,
    word::{Claim, Left, MAX_REFERENCES},
};
use crate::{
    error::{Error, Result},
    ids::BlockId,
    key::{Key, KeyChain},
    sync::{MutexGuard, Ordering},
};

/// Keys hashed ahead of a look-up, so that a long prompt which is not cached costs little.
const LOOK_AHEAD: usize = 64;

pub(super) struct Cache {
    pub(super) index: Index,
    pub(super) queue: IdleQueue,
}

impl Cache {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self { index: Index::new(num_blocks), queue: IdleQueue::new(num_blocks) }
    }
}

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

impl Shared {
    pub(super) fn lock_cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock()
    }

    /// The epoch that content is published in now.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
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
        let mut found = Vec::new();
        while self.prefix_cache && !range.is_empty() {
            let stop = range.end.min(range.start + LOOK_AHEAD);
            chain.extend(tokens, extras, self.block_size, stop);
            let keys = chain.keys().get(range.start..stop.min(chain.keys().len())).unwrap_or(&[]);
            let cache = self.lock_cache();
            let before = found.len();
            found.extend(keys.iter().map_while(|key| cache.index.find(key)));
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
        let cache = self.lock_cache();
        let epoch = self.epoch();
        if expected_epoch.is_some_and(|expected| expected != epoch) {
            return (Vec::new(), epoch);
        }
        let hit = |key| cache.index.find(key).filter(|block| self.hit(*block));
        (keys.iter().map_while(hit).collect(), epoch)
    }

    /// Whether one more reference to a block could be counted.
    pub(crate) fn check_countable(&self, block: BlockId) -> Result<()> {
        if self.words[block.index()].load().is_countable() {
            Ok(())
        } else {
            Err(Error::RefCountOverflow { block, max: MAX_REFERENCES })
        }
    }

    /// Undo `hold_prefix`, as if it had never been.
    pub(crate) fn unhold_prefix(&self, blocks: &[BlockId]) {
        let mut blank = Chain::default();
        let quarantined =
            self.leave_published(blocks.iter().rev(), Claim::Reference, &mut blank, IdleQueue::restore);
        self.quarantined.fetch_add(quarantined, Ordering::AcqRel);
        self.blank.push(&blank);
        self.give_free(blank.len());
    }

    /// With the cache locked: one more reference to a published block; an idle one takes a unit of the free
    /// first, so that nobody is promised the same block. False if there is none, or no room to count.
    fn hit(&self, block: BlockId) -> bool {
        let word = &self.words[block.index()];
        // Without the lock a published block may become quarantined or referenced, but neither idle nor blank.
        if word.load().is_idle() {
            if !self.reserve(1) {
                return false;
            }
            if word.add_reference(|_| true).is_err() {
                self.give_free(1);
                return false;
            }
            self.idle.fetch_sub(1, Ordering::AcqRel);
            return true;
        }
        match word.add_reference(|_| true) {
            Ok(before) => {
                if before.is_quarantined() {
                    self.quarantined.fetch_sub(1, Ordering::AcqRel);
                }
                true
            }
            Err(_) => false,
        }
    }

    /// Make full blocks of the caller's findable, or find those that are already: of equal blocks the first
    /// stays. With `merge`, the caller gets references to those, unless nobody has a unit of the free to
    /// spare for one: returned with their places in `blocks`. `epoch` is that of the caller's content. Null
    /// blocks are passed over.
    pub(crate) fn publish(
        &self,
        blocks: &[BlockId],
        keys: &[Key],
        epoch: u64,
        merge: bool,
    ) -> Vec<(usize, BlockId)> {
        let mut merged = Vec::new();
        let mut cache = self.lock_cache();
        if epoch != self.epoch() {
            return merged;
        }
        for (index, (&block, key)) in blocks.iter().zip(keys).enumerate() {
            let word = &self.words[block.index()];
            if block.is_null() || word.load().is_published() {
                continue;
            }
            match cache.index.find(key) {
                None => {
                    cache.index.insert(*key, block);
                    word.set_published();
                }
                Some(equal) if merge && self.hit(equal) => merged.push((index, equal)),
                Some(_) => {}
            }
        }
        merged
    }

    /// Get a block of the caller's ready to be written: nobody may find it any more.
    pub(crate) fn open(&self, block: BlockId) -> Opening {
        let word = &self.words[block.index()];
        let now = word.load();
        if now.is_shared() {
            return Opening::Shared;
        }
        if !now.is_published() {
            return Opening::Open;
        }
        let mut cache = self.lock_cache();
        let now = word.load();
        if now.is_shared() {
            Opening::Shared // a hit came between, and perhaps a reset behind it
        } else if !now.is_published() {
            Opening::Open // a reset came between
        } else if word.clear_published_if_sole() {
            cache.index.remove(block);
            Opening::Unpublished
        } else {
            Opening::Shared
        }
    }

    /// Undo an `open` that unpublished, unless the same content was published or all was forgotten meanwhile.
    pub(crate) fn republish(&self, block: BlockId, epoch: u64) {
        let mut cache = self.lock_cache();
        let key = cache.index.key(block);
        if epoch == self.epoch() && cache.index.find(&key).is_none() {
            cache.index.insert(key, block);
            self.words[block.index()].set_published();
        }
    }

    /// Hand out idle blocks, the least recently released first, as long as there are any.
    pub(super) fn evict(&self, most: usize, taken: &mut Vec<BlockId>) {
        let mut evicted = 0;
        let mut cache = self.lock_cache();
        while evicted < most {
            let Some(block) = cache.queue.pop() else {
                break;
            };
            let word = &self.words[block.index()];
            if word.load().is_idle() {
                cache.index.remove(block);
                word.set_referenced();
                taken.push(block);
                evicted += 1;
            }
        }
        self.idle.fetch_sub(evicted, Ordering::AcqRel);
        self.counters.evictions.add(evicted);
    }

    /// Take a claim from each of some published blocks, and put in line for eviction those that nobody uses
    /// any more. What turns out not to be published now is added to `blank`. Returns by how much the number
    /// of quarantined blocks changes.
    pub(super) fn settle_published(&self, blocks: &[BlockId], claim: Claim, blank: &mut Chain) -> isize {
        self.leave_published(blocks.iter(), claim, blank, IdleQueue::push)
    }

    fn leave_published<'a>(
        &self,
        blocks: impl Iterator<Item = &'a BlockId>,
        claim: Claim,
        blank: &mut Chain,
        enqueue: impl Fn(&mut IdleQueue, BlockId, usize, &dyn Fn(BlockId) -> bool),
    ) -> isize {
        let (mut came_idle, mut quarantined) = (0, 0);
        let mut cache = self.lock_cache();
        for &block in blocks {
            let left = self.words[block.index()].drop_claim(claim, true);
            quarantined += left.quarantined(claim);
            match left {
                Left::Idle => {
                    let num_idle = self.idle.fetch_add(1, Ordering::AcqRel) + 1;
                    enqueue(&mut cache.queue, block, num_idle, &|block| {
                        self.words[block.index()].load().is_idle()
                    });
                    came_idle += 1;
                }
                Left::Blank => self.blank.link(blank, block),
                Left::InUse | Left::Quarantined | Left::NeedsCache => {}
            }
        }
        self.give_free(came_idle);
        quarantined
    }

    /// Forget all content, also of what is still being computed.
    pub(crate) fn reset_prefix_cache(&self) {
        let mut cache = self.lock_cache();
        self.epoch.fetch_add(1, Ordering::AcqRel);
        cache.queue.clear();
        let mut blank = Chain::default();
        for block in cache.index.drain() {
            if self.words[block.index()].clear_published().is_idle() {
                self.blank.link(&mut blank, block);
            }
        }
        self.idle.fetch_sub(blank.len(), Ordering::AcqRel);
        self.blank.push(&blank);
    }
}
