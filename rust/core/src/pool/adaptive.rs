//! Segmented least-recently-used whose segments share out the pool by what was evicted too early.
//!
//! A block that is left idle for the first time goes on *probation*; one that was idle before and was hit, or
//! whose key was evicted not long ago and is published again, is *protected*. Each segment is a log of releases
//! of its own, and what gives way is the head of the one log that is longer than its share of both. The share adapts as in
//! ARC (Megiddo and Modha, FAST 2003): a key that comes back soon after it was evicted from one log says that this log
//! should have been longer.
//!
//! A hit costs nothing here: that a block was hit while it was idle is seen when it is released, by its place. Nor do
//! hits on a block in use count; those of one burst are one, as 2Q (Johnson and Shasha, VLDB 1994) has it.
//!
//! Measured on traces in `docs/eviction.md`. The numbers here and in `ghosts` matter little; it says how much.

use super::{
    Shared,
    ghosts::{Ghost, Ghosts},
    index::Hash,
    log::{Log, Position, Segment},
};
use crate::{
    ids::BlockId,
    sync::{AtomicU64, Ordering},
};

/// A whole, that shares are parts of.
const WHOLE: u64 = 1 << 24;

/// What one ghost that comes back early moves the share by, in blocks of the pool.
const BLOCKS_PER_GHOST: u64 = 4;

pub(super) struct Adaptive {
    pub(super) protected: Log,
    pub(super) ghosts: Ghosts,
    /// The share of the protected log, of `WHOLE`.
    share: AtomicU64,
    step: u64,
}

impl Adaptive {
    /// Bytes a block of a large pool.
    pub(super) const BYTES_PER_BLOCK: usize = Log::BYTES_PER_BLOCK + Ghosts::BYTES_PER_BLOCK;

    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            protected: Log::new(num_blocks, Segment::Protected),
            ghosts: Ghosts::new(num_blocks),
            share: AtomicU64::new(WHOLE / 2),
            step: (BLOCKS_PER_GHOST * WHOLE / num_blocks as u64).clamp(1, WHOLE),
        }
    }

    /// The logs, first the one that is longer than its share, and by how much. What counts is the length, entries
    /// that were passed over included: how many releases a log remembers, whatever became of the blocks.
    pub(super) fn by_excess<'a>(&'a self, probation: &'a Log) -> ([&'a Log; 2], usize) {
        let (new, proven) = (probation.len() as u64, self.protected.len() as u64);
        let share = self.share.load(Ordering::Relaxed) * (new + proven) / WHOLE;
        let logs = if proven > share { [&self.protected, probation] } else { [probation, &self.protected] };
        (logs, proven.abs_diff(share) as usize)
    }

    /// A block is published under a key with this hash: the place that it begins with. Apart, here and below, for the
    /// default policy's sake: where it does not call it has the registers to itself.
    #[inline(never)]
    fn begin(&self, hash: Hash) -> Position {
        let Some(Ghost { segment, is_recent }) = self.ghosts.recall(hash) else {
            return Position::NEW;
        };
        if is_recent {
            let moved = |share: u64| match segment {
                Segment::Probation => share.saturating_sub(self.step),
                Segment::Protected => WHOLE.min(share + self.step),
            };
            // Of two at once, one may be lost.
            self.share.store(moved(self.share.load(Ordering::Relaxed)), Ordering::Relaxed);
        }
        Position::nowhere(Segment::Protected)
    }

    #[inline(never)]
    fn touch(&self, hashes: impl IntoIterator<Item = Hash>) {
        hashes.into_iter().for_each(|hash| self.ghosts.touch(hash));
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        self.protected.bytes() + self.ghosts.bytes()
    }
}

impl Shared {
    /// What a block was is forgotten: the caller is publishing it under a key with this hash. He has a claim on it
    /// and it cannot be found, so nobody else enters it anywhere.
    pub(super) fn begin_history(&self, block: BlockId, hash: Hash) {
        if let Some(adaptive) = &self.adaptive {
            self.places.set(block, adaptive.begin(hash));
        }
    }

    /// Get at hand what publishing under these hashes will look at.
    pub(super) fn touch_history(&self, hashes: impl IntoIterator<Item = Hash>) {
        if let Some(adaptive) = &self.adaptive {
            adaptive.touch(hashes);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Evict something from one log and publish it again at once.
    fn regret(adaptive: &Adaptive, segment: Segment) -> u64 {
        adaptive.ghosts.remember(&[Hash(7 << 40)], segment);
        assert_eq!(adaptive.begin(Hash(7 << 40)), Position::nowhere(Segment::Protected));
        adaptive.share.load(Ordering::Relaxed)
    }

    #[test]
    fn the_share_grows_by_what_its_log_lost_too_early_and_shrinks_by_what_the_other_did() {
        let adaptive = Adaptive::new(1000);
        assert_eq!(regret(&adaptive, Segment::Protected), WHOLE / 2 + adaptive.step);
        assert_eq!(regret(&adaptive, Segment::Probation), WHOLE / 2);
        let all = |segment| (0..1000).map(|_| regret(&adaptive, segment)).last();
        assert_eq!(all(Segment::Probation), Some(0));
        assert_eq!(all(Segment::Protected), Some(WHOLE));
    }

    #[test]
    fn what_was_evicted_long_ago_does_not_move_the_share() {
        let adaptive = Adaptive::new(1000);
        adaptive.ghosts.remember(&[Hash(7 << 40)], Segment::Protected);
        adaptive.ghosts.remember(&[Hash(1); 500], Segment::Protected);
        assert_eq!(adaptive.begin(Hash(7 << 40)), Position::nowhere(Segment::Protected));
        assert_eq!(adaptive.share.load(Ordering::Relaxed), WHOLE / 2);
    }

    #[test]
    fn a_log_is_read_that_is_longer_than_its_share() {
        let (adaptive, probation) = (Adaptive::new(1000), Log::new(1000, Segment::Probation));
        let first = || {
            let (logs, excess) = adaptive.by_excess(&probation);
            (logs[0].segment(), excess)
        };
        assert_eq!(first(), (Segment::Probation, 0));
        adaptive.protected.reserve(300);
        probation.reserve(310);
        assert_eq!(first(), (Segment::Probation, 5));
        adaptive.protected.reserve(12);
        assert_eq!(first(), (Segment::Protected, 1));
        adaptive.share.store(WHOLE, Ordering::Relaxed);
        assert_eq!(first(), (Segment::Probation, 310));
    }
}
