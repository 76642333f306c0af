//! Which block may hold a key: a lock-free hash table of block ids.
//!
//! A bucket is one cache line: seven entries, and the number of entries that wanted to be here and *passed*
//! to a bucket behind, because this one was full. A look-up goes on to the next bucket only while somebody
//! has passed, so nothing is left behind by a removal that later look-ups stumble over (the outbound overflow
//! count of F14, Bronson and Shi 2019). Entries never move, and the table never grows: it is made for all
//! blocks of the pool at a load of at most 4/7.
//!
//! An entry is `hash bits << 32 | block`; what it says is a hint. Whether the block has the key, the reader
//! finds out from the block itself, so no order between an entry and anything else is needed: all operations
//! here are relaxed. Who was told of a published block by the publisher sees its entry all the same: what
//! happens before a read is what it reads, or something later.

use crate::{
    ids::BlockId,
    key::Key,
    sync::{AtomicU64, Ordering, spin_loop},
};

/// A cache line of them; under a schedule so few that entries pass full buckets.
const SLOTS: usize = if cfg!(schedules) { 2 } else { 7 };
/// Entries a bucket when every block of the pool is published.
const LOAD: usize = if cfg!(schedules) { 1 } else { 4 };

#[repr(align(64))]
#[derive(Default)]
struct Bucket {
    passed: AtomicU64,
    slots: [AtomicU64; SLOTS],
}

pub(super) struct Index {
    buckets: Box<[Bucket]>,
    seed: u64,
}

/// Where a key belongs in the index.
#[derive(Clone, Copy, Default)]
pub(super) struct Hash(pub(super) u64);

impl Index {
    /// Bytes a block of a large pool.
    pub(super) const BYTES_PER_BLOCK: usize = size_of::<Bucket>() / LOAD;

    pub(super) fn new(num_blocks: usize) -> Self {
        Self { buckets: (0..num_blocks.div_ceil(LOAD)).map(|_| Bucket::default()).collect(), seed: seed() }
    }

    /// Seeded, so that nobody can choose tokens whose keys crowd one bucket.
    pub(super) fn hash(&self, key: &Key) -> Hash {
        let [first, second, ..] = key.words();
        let product = u128::from(first ^ self.seed) * u128::from(second | 1);
        Hash(product as u64 ^ (product >> 64) as u64)
    }

    /// Read the bucket where the hash belongs, so that it is at hand.
    pub(super) fn touch(&self, hash: Hash) {
        if let Some(bucket) = self.buckets_from(hash).next() {
            std::hint::black_box(bucket.passed.load(Ordering::Relaxed));
        }
    }

    /// The first block under this hash that the caller says is the one.
    pub(super) fn find(&self, hash: Hash, mut is_it: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        for bucket in self.buckets_from(hash) {
            for slot in &bucket.slots {
                let entry = slot.load(Ordering::Relaxed);
                if entry as u32 != 0 && entry >> 32 == hash.0 >> 32 {
                    let block = BlockId::new(entry as u32);
                    if is_it(block) {
                        return Some(block);
                    }
                }
            }
            if bucket.passed.load(Ordering::Relaxed) == 0 {
                return None;
            }
        }
        None
    }

    /// The caller sees to it that the block is not in the index, and is not removed before this is done.
    pub(super) fn insert(&self, hash: Hash, block: BlockId) {
        loop {
            for (distance, bucket) in self.buckets_from(hash).enumerate() {
                if bucket.replace(0, hash.entry(block)) {
                    return;
                }
                bucket.passed.fetch_add(1, Ordering::Relaxed);
                if distance + 1 == self.buckets.len() {
                    self.recall(hash, self.buckets.len());
                }
            }
            // There is room for 7/4 of the blocks, so others are between inserting and removing.
            spin_loop();
        }
    }

    /// Remove an entry that is there.
    pub(super) fn remove(&self, hash: Hash, block: BlockId) {
        for (distance, bucket) in self.buckets_from(hash).enumerate() {
            if bucket.replace(hash.entry(block), 0) {
                self.recall(hash, distance);
                return;
            }
        }
        debug_assert!(false, "{block:?} is in the index");
    }

    /// Take back that somebody passed the first `distance` buckets.
    fn recall(&self, hash: Hash, distance: usize) {
        for bucket in self.buckets_from(hash).take(distance) {
            bucket.passed.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// All buckets, beginning with the one where the hash belongs.
    fn buckets_from(&self, hash: Hash) -> impl Iterator<Item = &Bucket> {
        let home = (((hash.0 & u64::from(u32::MAX)) * self.buckets.len() as u64) >> 32) as usize;
        self.buckets[home..].iter().chain(&self.buckets[..home])
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// Entries, for the audit.
    pub(super) fn len(&self) -> usize {
        let is_taken = |slot: &&AtomicU64| slot.load(Ordering::Relaxed) != 0;
        self.buckets.iter().map(|bucket| bucket.slots.iter().filter(is_taken).count()).sum()
    }
}

impl Hash {
    fn entry(self, block: BlockId) -> u64 {
        self.0 >> 32 << 32 | u64::from(block.as_u32())
    }
}

impl Bucket {
    /// Put `new` into the first slot that holds `old`; false if none does.
    fn replace(&self, old: u64, new: u64) -> bool {
        self.slots.iter().any(|slot| {
            slot.load(Ordering::Relaxed) == old
                && slot.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    }
}

#[cfg(not(any(loom, schedules)))]
fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

/// A model must run the same way each time.
#[cfg(any(loom, schedules))]
fn seed() -> u64 {
    0x9e37_79b9_7f4a_7c15
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn entries_that_agree_in_every_bit_that_is_looked_at_coexist() {
        let index = Index::new(200);
        let hash = Hash(0x1234_5678_9abc_def0);
        let all: HashSet<_> = (1..=200).map(BlockId::new).collect();
        for block in &all {
            index.insert(hash, *block);
        }
        let seen = || {
            let mut seen = HashSet::new();
            index.find(hash, |block| !seen.insert(block));
            seen
        };
        assert_eq!(seen(), all);
        let (gone, left): (HashSet<_>, HashSet<_>) = all.iter().partition(|block| block.as_i32() % 3 == 0);
        for block in &gone {
            index.remove(hash, *block);
        }
        assert_eq!(seen(), left);
        for block in &left {
            index.remove(hash, *block);
        }
        assert!(index.buckets.iter().all(|bucket| bucket.passed.load(Ordering::Relaxed) == 0));
        assert_eq!(index.len(), 0);
    }

    #[test]
    fn a_full_index_finds_all_and_looks_at_few() {
        let num_blocks = 4096;
        let index = Index::new(num_blocks);
        let hash = |block: u64| Hash((block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for block in 1..=num_blocks as u32 {
            index.insert(hash(block.into()), BlockId::new(block));
        }
        for block in 1..=num_blocks as u32 {
            assert_eq!(
                index.find(hash(block.into()), |other| other.as_u32() == block).map(BlockId::as_u32),
                Some(block)
            );
        }
        let passed: u64 = index.buckets.iter().map(|bucket| bucket.passed.load(Ordering::Relaxed)).sum();
        assert!(passed < num_blocks as u64 / 4, "{passed} passed");
    }
}
