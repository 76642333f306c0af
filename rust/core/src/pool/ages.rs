//! How long blocks lay idle before they were evicted.
//!
//! Young ones say that content is thrown away before it could be used again: that the cache is too small for what passes
//! through it. Time is that of a coarse clock, read once for all blocks of a call; all operations are relaxed, since who
//! evicts a block has acquired what its last user did.

use crate::{
    ids::BlockId,
    sync::{AtomicU32, AtomicU64, Ordering},
};

const NUM_BUCKETS: usize = 31;
/// What the clock is good for, in milliseconds.
const RESOLUTION: u32 = 4;

/// How long evicted blocks had lain idle, since the pool was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EvictionAges {
    /// Of blocks that lay idle for at most 4, 8, 16, .. milliseconds, but longer than the bucket before says.
    pub counts: [u64; NUM_BUCKETS],
    /// Of all, in milliseconds.
    pub sum: u64,
}

impl EvictionAges {
    /// The longest time that a bucket counts, in milliseconds.
    #[must_use]
    pub fn bound(bucket: usize) -> u64 {
        u64::from(RESOLUTION) << bucket
    }
}

pub(super) struct Ages {
    /// By block: when it became idle. Milliseconds wrap around after 49 days.
    since: Box<[AtomicU32]>,
    counts: [AtomicU64; NUM_BUCKETS],
    sum: AtomicU64,
}

impl Ages {
    pub(super) const BYTES_PER_BLOCK: usize = size_of::<AtomicU32>();

    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            since: (0..=num_blocks).map(|_| AtomicU32::new(0)).collect(),
            counts: std::array::from_fn(|_| AtomicU64::new(0)),
            sum: AtomicU64::new(0),
        }
    }

    /// The caller, who has the last claim on them, is about to leave these blocks idle.
    pub(super) fn begin(&self, blocks: &[BlockId]) {
        let now = now();
        for block in blocks {
            self.since[block.index()].store(now, Ordering::Relaxed);
        }
    }

    /// The caller has evicted these blocks.
    pub(super) fn end(&self, blocks: &[BlockId]) {
        if blocks.is_empty() {
            return;
        }
        let (now, mut sum) = (now(), 0);
        let mut counts = [0; NUM_BUCKETS];
        for block in blocks {
            let age = now.wrapping_sub(self.since[block.index()].load(Ordering::Relaxed));
            counts[bucket(age)] += 1;
            sum += u64::from(age);
        }
        for (total, count) in self.counts.iter().zip(counts).filter(|(_, count)| *count > 0) {
            total.fetch_add(count, Ordering::Relaxed);
        }
        self.sum.fetch_add(sum, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> EvictionAges {
        let counts = std::array::from_fn(|bucket| self.counts[bucket].load(Ordering::Relaxed));
        EvictionAges { counts, sum: self.sum.load(Ordering::Relaxed) }
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.since)
    }
}

fn bucket(age: u32) -> usize {
    ((age.max(RESOLUTION) - 1).ilog2() - 1) as usize
}

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(any(loom, schedules))))]
fn now() -> u32 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes one timespec, and there is one. This clock is there on every Linux; if it were not, the time
    // would stand still.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    (time.tv_sec as u32).wrapping_mul(1000).wrapping_add(time.tv_nsec as u32 / 1_000_000)
}

#[cfg(not(any(all(target_os = "linux", target_arch = "x86_64"), loom, schedules)))]
fn now() -> u32 {
    use std::{sync::LazyLock, time::Instant};
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGAN.elapsed().as_millis() as u32
}

/// A model must run the same way each time.
#[cfg(any(loom, schedules))]
fn now() -> u32 {
    0
}

#[cfg(all(test, not(any(loom, schedules))))]
mod tests {
    use std::{thread::sleep, time::Duration};

    use super::*;

    #[test]
    fn a_bucket_counts_up_to_its_bound() {
        for age in [0, 1, 3, 4, 5, 8, 9, 16, 17, 1000, u32::MAX - 1, u32::MAX] {
            let bucket = bucket(age);
            assert!(u64::from(age) <= EvictionAges::bound(bucket), "{age}");
            assert!(bucket == 0 || u64::from(age) > EvictionAges::bound(bucket - 1), "{age}");
        }
    }

    #[test]
    fn ages_are_times_between_becoming_idle_and_eviction() {
        let ages = Ages::new(3);
        let blocks: Vec<_> = (1..=3).map(BlockId::new).collect();
        ages.begin(&blocks);
        sleep(Duration::from_millis(100));
        ages.begin(&blocks[2..]);
        ages.end(&blocks);
        let EvictionAges { counts, sum } = ages.snapshot();
        assert_eq!(counts.iter().sum::<u64>(), 3);
        assert_eq!(counts[..2].iter().sum::<u64>(), 1, "{counts:?}");
        assert!((180..10_000).contains(&sum), "{sum}");
    }
}
