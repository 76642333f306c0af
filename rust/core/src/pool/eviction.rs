//! Blocks that become idle, and idle blocks that give way: those at the head of a log first. The default policy
//! has one log, so the least recently released goes first, and of one release the deepest; [`Adaptive`] has two.
//!
//! What makes this safe without a lock is one rule: *an idle block which is not in a log is backed by a unit
//! of the free ones that is in somebody's hands.* Who leaves a block idle gives its unit to the free ones only
//! when the block has been entered; who takes an entry out of a log has a unit of his own. So at any moment
//! there are as many blocks that can be found, blank or by a log, as units are free or in the hands of those
//! who look for one, whoever is stopped wherever.

use super::{
    Shared,
    adaptive::Adaptive,
    blank::Giving,
    index::Hash,
    log::{Entry, Log, Position, SLACK, Segment},
    word::{Claim, Left},
};
use crate::{ids::BlockId, sync::Ordering};

/// Blocks that are entered into the log together.
const BATCH: usize = 32;

/// Published blocks that a caller has the last claim on, in the order in which they are to give way.
pub(super) struct Leaving {
    blocks: [BlockId; BATCH],
    len: usize,
}

impl Leaving {
    pub(super) fn new() -> Self {
        Self { blocks: [BlockId::NULL; BATCH], len: 0 }
    }

    pub(super) fn add(&mut self, block: BlockId) {
        self.blocks[self.len] = block;
        self.len += 1;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.len == BATCH
    }

    fn blocks(&self) -> &[BlockId] {
        &self.blocks[..self.len]
    }
}

/// What came of claims that were dropped.
#[derive(Default)]
pub(super) struct Dropped {
    /// Units of the free that the blocks are good for, blank ones not counted.
    pub(super) units: usize,
    /// By how much the number of quarantined blocks changes.
    pub(super) quarantined: isize,
}

impl Shared {
    /// The log that a place is in.
    pub(super) fn log_of(&self, place: Position) -> &Log {
        match &self.adaptive {
            Some(adaptive) if place.segment() == Segment::Protected => &adaptive.protected,
            _ => &self.log,
        }
    }

    /// Drop the caller's claim on published blocks, on which nobody else had one a moment ago.
    pub(super) fn leave_idle(
        &self,
        leaving: &mut Leaving,
        claim: Claim,
        blank: &mut Giving<'_>,
        dropped: &mut Dropped,
    ) {
        self.ages.begin(leaving.blocks());
        if let Some(adaptive) = &self.adaptive {
            let mut segments = [Leaving::new(), Leaving::new()];
            for block in leaving.blocks() {
                let is_proven = self.places.get(*block) != Position::NEW;
                segments[usize::from(is_proven)].add(*block);
            }
            for (log, blocks) in [&self.log, &adaptive.protected].into_iter().zip(&segments) {
                self.leave_in(log, blocks.blocks(), claim, blank, dropped);
            }
        } else {
            self.leave_in(&self.log, leaving.blocks(), claim, blank, dropped);
        }
        leaving.len = 0;
    }

    /// The same, with the log that they are to be in.
    fn leave_in(
        &self,
        log: &Log,
        leaving: &[BlockId],
        claim: Claim,
        blank: &mut Giving<'_>,
        dropped: &mut Dropped,
    ) {
        let mut next = log.reserve(leaving.len());
        let mut num_idle = 0;
        for &block in leaving {
            let place = next;
            next = next.map(|position| log.after(position, 1));
            if let Some(place) = place {
                self.places.set(block, place);
            } else {
                self.unpublish(block);
            }
            let left = self.words[block.index()].drop_claim(claim, place.is_some());
            dropped.quarantined += left.quarantined(claim);
            match left {
                Left::Blank => blank.add(block),
                Left::Idle => {
                    let entered = place.is_some_and(|place| log.enter(place, block));
                    if !entered {
                        self.enter_again(block, place.unwrap_or(Position::NEW));
                    }
                    num_idle += 1;
                }
                // Somebody has hit it meanwhile: it is his to release.
                Left::InUse | Left::Quarantined => {}
                Left::WouldBeIdle | Left::Missing => debug_assert!(false, "{block:?}: {left:?}"),
            }
        }
        if num_idle > 0 {
            dropped.units += num_idle;
            self.idle.fetch_add(num_idle as isize, Ordering::Relaxed);
            self.make_room(log);
        }
    }

    /// Drop the caller's claim on a block that was idle when he hit it: it has its old place again, if that is
    /// still there. Returns what `drop_claim` did, with nothing left to do for an idle block.
    pub(super) fn return_idle(&self, block: BlockId, claim: Claim) -> Left {
        let left = self.words[block.index()].drop_claim(claim, true);
        if left == Left::Idle {
            self.idle.fetch_add(1, Ordering::Relaxed);
            let place = self.places.get(block);
            let log = self.log_of(place);
            // A reader who passed the entry while the block was in use has taken the place away, or does so
            // after this and then sees the block idle.
            let is_there = log.has(place, block) && self.places.exchange(block, place, place);
            if !is_there {
                self.enter_again(block, place);
                self.make_room(log);
            }
        }
        left
    }

    /// Enter a block that became idle into the log of its place, where it is not; its unit is in the caller's hands. Others
    /// may hit it meanwhile: then what they do about its place stands.
    fn enter_again(&self, block: BlockId, mut place: Position) {
        loop {
            let log = self.log_of(place);
            let Some(position) = log.reserve(1) else {
                return self.forget_idle(block, log.segment());
            };
            if !self.places.exchange(block, place, position) {
                let now = self.places.get(block);
                let is_ours = now.is_nowhere() && self.words[block.index()].load().is_idle();
                if is_ours {
                    place = now;
                    continue;
                }
                return;
            }
            if log.enter(position, block) {
                return;
            }
            place = position;
        }
    }

    /// There is no room in a log, which takes somebody who was stopped while he made room: the block is
    /// blank rather than that anybody waits.
    fn forget_idle(&self, block: BlockId, segment: Segment) {
        if self.claim_idle(block, Claim::Hold) {
            self.forget(&[block], segment);
            let mut blank = Giving::new(&self.blank);
            let left = self.words[block.index()].drop_claim(Claim::Hold, false);
            debug_assert_eq!(left, Left::Blank);
            blank.add(block);
            blank.finish();
        }
    }

    /// Take an idle block: it is the caller's alone, who takes it out of the index.
    fn claim_idle(&self, block: BlockId, claim: Claim) -> bool {
        let is_ours = self.words[block.index()].claim_idle(claim);
        if is_ours {
            self.places.set(block, Position::NEW);
        }
        is_ours
    }

    /// Blocks that the caller has claimed, out of this log, cannot be found any more.
    fn forget(&self, blocks: &[BlockId], segment: Segment) {
        self.idle.fetch_sub(blocks.len() as isize, Ordering::Relaxed);
        for blocks in blocks.chunks(BATCH) {
            // All look-ups first: they overlap in the processor as long as nothing is written.
            let mut hashes = [Hash::default(); BATCH];
            for (hash, block) in hashes.iter_mut().zip(blocks) {
                *hash = self.index.hash(&self.contents.key(*block));
                self.index.touch(*hash);
                self.touch_history([*hash]);
            }
            if let Some(adaptive) = &self.adaptive {
                adaptive.ghosts.remember(&hashes[..blocks.len()], segment);
            }
            for (hash, block) in hashes.iter().zip(blocks) {
                self.index.remove(*hash, *block);
                self.mark(*block);
            }
        }
    }

    /// Hand out up to `most` idle blocks, units for which are in the caller's hands.
    pub(super) fn evict(&self, most: usize, claim: Claim, taken: &mut Vec<BlockId>) {
        match &self.adaptive {
            None => self.evict_from(&self.log, most, claim, taken),
            Some(adaptive) => self.evict_by_share(adaptive, most, claim, taken),
        }
    }

    /// From the log that has more than its share, then from the other one if that has none.
    fn evict_by_share(&self, adaptive: &Adaptive, most: usize, claim: Claim, taken: &mut Vec<BlockId>) {
        let end = taken.len() + most;
        while taken.len() < end {
            let start = taken.len();
            let (logs, excess) = adaptive.by_excess(&self.log);
            for log in logs {
                if taken.len() == start {
                    self.evict_from(log, excess.clamp(1, end - start), claim, taken);
                }
            }
            if taken.len() == start {
                return;
            }
        }
    }

    /// The same from one log.
    fn evict_from(&self, log: &Log, most: usize, claim: Claim, taken: &mut Vec<BlockId>) {
        let (start, end) = (taken.len(), taken.len() + most);
        let mut position = log.head();
        while taken.len() < end && position < log.tail() {
            match log.read(position) {
                Entry::Block(block) if self.places.get(block) == position => {
                    let got = self.claim_idle(block, claim)
                        || (self.take_place(block, position) && self.claim_idle(block, claim));
                    if got {
                        taken.push(block);
                    }
                }
                Entry::Block(_) | Entry::Nothing => {}
                Entry::Passed => {
                    position = log.head();
                    continue;
                }
            }
            position = log.after(position, 1);
        }
        self.ages.end(&taken[start..]);
        log.pass(position);
        self.forget(&taken[start..], log.segment());
        self.counters.evictions.add(taken.len() - start);
    }

    /// The entry of a block that is in use is to be passed: its place is gone, so that who returns it enters it
    /// again. True if it is idle by now, and that somebody may not know of it.
    fn take_place(&self, block: BlockId, position: Position) -> bool {
        self.places.exchange(block, position, Position::nowhere(position.segment()))
            && self.words[block.index()].load().is_idle()
    }

    /// See to it that a log is not much longer than twice what counts in it. The caller has a unit in hand,
    /// for the block that is out of the log while it is moved.
    ///
    /// Each entry is passed once, and more of them do not count than do whenever this sets to work. So a release
    /// pays for two entries passed and one moved on the average, whatever the size of the pool.
    fn make_room(&self, log: &Log) {
        let num_idle = self.idle.load(Ordering::Relaxed).max(0) as usize;
        if log.len() > 2 * num_idle + SLACK / 2 {
            self.compact(log);
        }
    }

    /// What releases do at times.
    #[cfg(all(test, any(loom, schedules)))]
    pub(super) fn compact_all(&self) {
        self.compact(&self.log);
        if let Some(adaptive) = &self.adaptive {
            self.compact(&adaptive.protected);
        }
    }

    /// Move what counts to the end of the log, in its order.
    pub(super) fn compact(&self, log: &Log) {
        let stop = log.tail();
        let mut position = log.head();
        while position < stop {
            match log.read(position) {
                Entry::Block(block) if self.places.get(block) == position => {
                    if self.words[block.index()].load().is_idle() {
                        self.enter_again(block, position);
                    } else if self.take_place(block, position) {
                        self.enter_again(block, Position::nowhere(log.segment()));
                    }
                }
                Entry::Block(_) | Entry::Nothing => {}
                Entry::Passed => {
                    position = log.head();
                    continue;
                }
            }
            position = log.after(position, 1);
            log.pass(position);
        }
    }
}
