//! What was evicted not long ago: keys without blocks, each with the log that its block was in.
//!
//! A table of marks, a cache line of them a bucket, made for four times the blocks. A mark has a few bits of the
//! key, so it may be another key's, once in thousands of look-ups; and the time in evictions, in so few bits
//! that they wrap around, which is harmless as long as the marks of a bucket go in turn. Marks are hints for a
//! policy: all operations are relaxed, and of two that cross, one may be lost.

use super::{index::Hash, log::Segment};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Marks in a bucket: a cache line but for the turn; in a model few.
const MARKS: usize = if cfg!(any(loom, schedules)) { 2 } else { 15 };
/// Marks for each block of the pool.
const MARKS_PER_BLOCK: usize = 4;
/// Times are in steps of which the pool's blocks are so many evictions.
const STEPS: u32 = 16;
/// Older ones are no ghosts any more: so that all blocks of one prefix are forgotten together, not one here and
/// one there as their buckets have it.
const OLDEST: u32 = 3 * STEPS;
/// Ghosts that are no older than this, in evictions from their own log, were evicted just too early.
const RECENT: u32 = STEPS / 8;

/// `key << 14 | protected << 13 | time in evictions from its log << 7 | time in evictions`; 0 is no mark. No mark
/// of the last 4 times the pool's blocks is ambiguous in the first time, none of the last 8 in the second.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Mark(u32);

const TIME_BITS: u32 = 7;
const OWN_TIME_BITS: u32 = 6;

impl Mark {
    fn new(hash: Hash, segment: Segment, times: Times) -> Self {
        let key = (hash.0 >> 46) as u32 | 1;
        let protected = u32::from(segment == Segment::Protected);
        let own = times.own(segment) % (1 << OWN_TIME_BITS);
        let time = times.all() % (1 << TIME_BITS);
        Self(((key << 1 | protected) << OWN_TIME_BITS | own) << TIME_BITS | time)
    }

    fn is_of(self, hash: Hash) -> bool {
        self.0 >> (1 + OWN_TIME_BITS + TIME_BITS) == (hash.0 >> 46) as u32 | 1
    }

    fn segment(self) -> Segment {
        let is_protected = self.0 >> (OWN_TIME_BITS + TIME_BITS) & 1 == 1;
        if is_protected { Segment::Protected } else { Segment::Probation }
    }

    fn age(self, now: Times) -> u32 {
        now.all().wrapping_sub(self.0) % (1 << TIME_BITS)
    }

    fn own_age(self, now: Times) -> u32 {
        now.own(self.segment()).wrapping_sub(self.0 >> TIME_BITS) % (1 << OWN_TIME_BITS)
    }
}

/// Evictions from the two logs, in steps.
#[derive(Clone, Copy)]
struct Times {
    evicted: [u64; 2],
    evictions_per_step: u64,
}

impl Times {
    fn own(self, segment: Segment) -> u32 {
        (self.evicted[segment as usize] / self.evictions_per_step) as u32
    }

    fn all(self) -> u32 {
        (self.evicted.iter().sum::<u64>() / self.evictions_per_step) as u32
    }
}

#[repr(align(64))]
#[derive(Default)]
struct Bucket {
    /// How many marks were made here, so which one is the oldest.
    turn: AtomicU32,
    marks: [AtomicU32; MARKS],
}

/// A key that was evicted not long ago.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ghost {
    /// The log that its block was in.
    pub(super) segment: Segment,
    /// Whether it would still be there if that log had been a little longer.
    pub(super) is_recent: bool,
}

pub(super) struct Ghosts {
    buckets: Box<[Bucket]>,
    evicted: [AtomicU64; 2],
    evictions_per_step: u64,
}

impl Ghosts {
    /// Bytes a block of a large pool.
    pub(super) const BYTES_PER_BLOCK: usize = (MARKS_PER_BLOCK * size_of::<Bucket>()).div_ceil(MARKS);

    pub(super) fn new(num_blocks: usize) -> Self {
        let num_buckets = (MARKS_PER_BLOCK * num_blocks).div_ceil(MARKS);
        Self {
            buckets: (0..num_buckets).map(|_| Bucket::default()).collect(),
            evicted: [AtomicU64::new(0), AtomicU64::new(0)],
            evictions_per_step: num_blocks.div_ceil(STEPS as usize) as u64,
        }
    }

    fn bucket(&self, hash: Hash) -> &Bucket {
        &self.buckets[(((hash.0 & u64::from(u32::MAX)) * self.buckets.len() as u64) >> 32) as usize]
    }

    fn now(&self) -> Times {
        Times {
            evicted: [0, 1].map(|segment: usize| self.evicted[segment].load(Ordering::Relaxed)),
            evictions_per_step: self.evictions_per_step,
        }
    }

    /// Read the bucket where the hash belongs, so that it is at hand.
    pub(super) fn touch(&self, hash: Hash) {
        std::hint::black_box(self.bucket(hash).turn.load(Ordering::Relaxed));
    }

    /// These were evicted from one log. Each takes the place of the oldest in its bucket.
    #[inline(never)]
    pub(super) fn remember(&self, hashes: &[Hash], segment: Segment) {
        let now = self.now();
        for hash in hashes {
            let bucket = self.bucket(*hash);
            let turn = bucket.turn.load(Ordering::Relaxed);
            bucket.turn.store(turn.wrapping_add(1), Ordering::Relaxed);
            bucket.marks[turn as usize % MARKS].store(Mark::new(*hash, segment, now).0, Ordering::Relaxed);
        }
        self.evicted[segment as usize].fetch_add(hashes.len() as u64, Ordering::Relaxed);
    }

    /// The ghost of a key that is published again; it is none any more.
    pub(super) fn recall(&self, hash: Hash) -> Option<Ghost> {
        let now = self.now();
        let mut marks = self.bucket(hash).marks.iter().map(|slot| (slot, Mark(slot.load(Ordering::Relaxed))));
        let (slot, mark) = marks.find(|(_, mark)| mark.is_of(hash))?;
        slot.store(0, Ordering::Relaxed);
        let ghost = Ghost { segment: mark.segment(), is_recent: mark.own_age(now) < RECENT };
        (mark.age(now) < OLDEST).then_some(ghost)
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }
}

#[cfg(all(test, not(any(loom, schedules))))]
mod tests {
    use super::*;

    const NUM_BLOCKS: usize = 1600;

    /// As random as those of keys.
    fn hash(number: u64) -> Hash {
        let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Hash((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    fn hashes(numbers: std::ops::Range<u64>) -> Vec<Hash> {
        numbers.map(hash).collect()
    }

    #[test]
    fn a_ghost_tells_its_log_and_is_told_once() {
        let ghosts = Ghosts::new(NUM_BLOCKS);
        for (segment, numbers) in [(Segment::Probation, 0..100), (Segment::Protected, 100..200)] {
            ghosts.remember(&hashes(numbers.clone()), segment);
            for number in numbers {
                assert_eq!(ghosts.recall(hash(number)), Some(Ghost { segment, is_recent: true }));
                assert_eq!(ghosts.recall(hash(number)), None);
            }
        }
        assert!((200..100_000).all(|number| ghosts.recall(hash(number)).is_none()));
    }

    #[test]
    fn nearly_all_are_remembered_for_three_times_the_blocks_and_none_for_longer() {
        let ghosts = Ghosts::new(NUM_BLOCKS);
        let n = NUM_BLOCKS as u64;
        for number in 0..20 * n {
            ghosts.remember(&[hash(number)], Segment::Probation);
        }
        let recalled = |numbers: std::ops::Range<u64>| {
            numbers.filter(|number| ghosts.recall(hash(*number)).is_some()).count() as u64
        };
        assert!(recalled(17 * n + n / 8..20 * n) > 2 * n + n / 2);
        assert!(recalled(0..17 * n - n / 8) < n / 100, "but for keys that agree in 17 bits");
    }

    #[test]
    fn a_ghost_is_recent_by_evictions_from_its_own_log() {
        let ghosts = Ghosts::new(NUM_BLOCKS);
        ghosts.remember(&hashes(0..2), Segment::Protected);
        ghosts.remember(&hashes(1000..1000 + NUM_BLOCKS as u64), Segment::Probation);
        assert_eq!(ghosts.recall(hash(0)), Some(Ghost { segment: Segment::Protected, is_recent: true }));
        ghosts.remember(&hashes(9000..9000 + NUM_BLOCKS as u64 / 8), Segment::Protected);
        assert_eq!(ghosts.recall(hash(1)), Some(Ghost { segment: Segment::Protected, is_recent: false }));
    }
}
