//! Every interleaving, within bounds, of the pool's races, under the loom model checker.
//!
//! Each model has the fewest blocks and threads that let the race happen. What a thread gets it stamps as its
//! own, so a block with two owners is found out; at the end the audit recounts everything.

#![expect(clippy::unwrap_used, reason = "a model that panics has failed")]

use std::sync::Arc;

use loom::{cell::UnsafeCell, thread};

use super::{BlockPool, Shared, blank::BlankBlocks, blank::Chain};
use crate::{
    ids::BlockId,
    key::{Key, KeyChain},
    sync::Ordering,
};

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3); // bugs of this kind need two or three; more takes hours
    builder.check(model);
}

/// Runs the closures at once, one of them on the thread that waits for the others.
fn at_once(first: impl FnOnce() + 'static, second: impl FnOnce()) {
    let other = thread::spawn(first);
    second();
    other.join().unwrap();
}

/// Who has which block. The stamps are no atomics: if what one owner does to a block did not happen before what
/// the next one does, the checker reports a race, as a kernel would have one.
struct Owners(Vec<UnsafeCell<bool>>);

// SAFETY: the point of the models is that the pool orders all accesses to a block's cell; where it does not, loom
// fails the model before two threads are in one cell.
unsafe impl Sync for Owners {}

impl Owners {
    fn new(num_blocks: usize) -> Arc<Self> {
        Arc::new(Self((0..=num_blocks).map(|_| UnsafeCell::new(false)).collect()))
    }

    fn take(&self, blocks: &[BlockId]) {
        for block in blocks {
            assert!(!self.stamp(*block, true), "{block:?} has two owners");
        }
    }

    fn give(&self, blocks: &[BlockId]) {
        for block in blocks {
            assert!(self.stamp(*block, false));
        }
    }

    fn stamp(&self, block: BlockId, owned: bool) -> bool {
        // SAFETY: loom has checked that nobody else is in the cell.
        self.0[block.index()].with_mut(|stamp| std::mem::replace(unsafe { &mut *stamp }, owned))
    }
}

fn keys(pool: &BlockPool, num_blocks: usize) -> Vec<Key> {
    let mut chain = KeyChain::new(&crate::Context::default(), 1);
    chain.extend(&(0..num_blocks as i32).collect::<Vec<_>>(), &[], pool.block_size(), num_blocks);
    chain.keys().to_vec()
}

/// One block with a reference each, published.
fn published(pool: &BlockPool, keys: &[Key]) -> Vec<BlockId> {
    let shared = pool.shared();
    let mut blocks = Vec::new();
    assert!(shared.reserve(keys.len()));
    shared.take_reserved(keys.len(), &mut blocks);
    assert!(shared.publish(&blocks, keys, 0, true).is_empty());
    blocks
}

fn allocate(shared: &Shared, n: usize) -> Option<Vec<BlockId>> {
    shared.reserve(n).then(|| {
        let mut blocks = Vec::new();
        shared.take_reserved(n, &mut blocks);
        blocks
    })
}

/// The references are those of the model, so the audit's count of tables' is set to what it knows.
fn audit(pool: &BlockPool, references: usize) {
    pool.shared().table_references.store(references, Ordering::Relaxed);
    pool.audit().unwrap();
}

#[test]
fn a_stack_hands_out_a_block_once_though_its_head_comes_back() {
    check(|| {
        let blank = Arc::new(BlankBlocks::new(3));
        let owners = Owners::new(3);
        let mut chain = Chain::default();
        let mut all = Vec::new();
        blank.take(3, &mut all);
        for block in all {
            blank.link(&mut chain, block);
        }
        blank.push(&chain);
        let churn = |blank: &BlankBlocks, owners: &Owners, n: usize| {
            let mut taken = Vec::new();
            blank.take(n, &mut taken);
            owners.take(&taken);
            let mut back = Chain::default();
            if let Some(first) = taken.first() {
                owners.give(&[*first]);
                blank.link(&mut back, *first); // the head comes back with another block behind it
            }
            blank.push(&back);
        };
        let (other, others) = (Arc::clone(&blank), Arc::clone(&owners));
        at_once(move || churn(&other, &others, 1), || churn(&blank, &owners, 2));
        let mut rest = Vec::new();
        blank.take(3, &mut rest);
        owners.take(&rest);
        assert_eq!(rest.len(), 2);
    });
}

#[test]
fn blocks_that_were_reserved_are_there_and_have_one_owner() {
    check(|| {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let owners = Owners::new(2);
        let work = |pool: &BlockPool, owners: &Owners, n: usize| {
            if let Some(blocks) = allocate(pool.shared(), n) {
                owners.take(&blocks);
                owners.give(&blocks);
                pool.shared().drop_references(&blocks);
            }
        };
        let (other, others) = (pool.clone(), Arc::clone(&owners));
        at_once(move || work(&other, &others, 1), || work(&pool, &owners, 2));
        assert_eq!(pool.num_free(), 2);
        audit(&pool, 0);
    });
}

#[test]
fn a_hit_and_an_eviction_do_not_both_get_the_block() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 1);
        pool.shared().drop_references(&published(&pool, &keys));
        let owners = Owners::new(1);
        let (other, others) = (pool.clone(), Arc::clone(&owners));
        let evict = move || {
            if let Some(blocks) = allocate(other.shared(), 1) {
                others.take(&blocks);
            }
        };
        at_once(evict, || {
            let (hits, _) = pool.shared().hold_prefix(&keys, None);
            owners.take(&hits);
        });
        assert_eq!((pool.num_free(), pool.num_referenced()), (0, 1));
        audit(&pool, 1);
    });
}

#[test]
fn an_eviction_passes_over_what_was_hit() {
    check(|| {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let keys = keys(&pool, 2);
        pool.shared().drop_references(&published(&pool, &keys));
        let owners = Owners::new(2);
        let (other, others) = (pool.clone(), Arc::clone(&owners));
        at_once(
            move || others.take(&allocate(other.shared(), 1).unwrap()),
            || {
                let (hits, _) = pool.shared().hold_prefix(&keys[1..], None); // the next to be evicted
                owners.take(&hits);
            },
        );
        audit(&pool, pool.num_referenced());
    });
}

#[test]
fn the_last_release_and_a_hit_leave_the_block_to_the_hit_or_idle() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let blocks = published(&pool, &keys);
        let other = pool.clone();
        let mut hits = Vec::new();
        at_once(
            move || other.shared().drop_references(&blocks),
            || {
                (hits, _) = pool.shared().hold_prefix(&keys, None);
            },
        );
        audit(&pool, hits.len());
        pool.shared().drop_references(&hits);
        assert_eq!((pool.num_free(), pool.num_idle()), (1, 1));
        audit(&pool, 0);
    });
}

#[test]
fn a_plan_that_ends_and_a_hit_on_what_it_holds_agree() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let blocks = published(&pool, &keys);
        pool.shared().references_to_holds(&blocks);
        assert_eq!(pool.num_quarantined(), 1);
        let other = pool.clone();
        let mut hits = Vec::new();
        at_once(
            move || other.shared().drop_holds(&blocks),
            || {
                (hits, _) = pool.shared().hold_prefix(&keys, None);
            },
        );
        audit(&pool, hits.len());
        pool.shared().drop_references(&hits);
        assert_eq!((pool.num_free(), pool.num_quarantined()), (1, 0));
        audit(&pool, 0);
    });
}

#[test]
fn who_gets_a_block_comes_after_all_who_shared_it() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let owners = Owners::new(1);
        let blocks = allocate(pool.shared(), 1).unwrap();
        pool.shared().add_references(&blocks).unwrap();
        let read = |owners: &Owners, block: BlockId| owners.0[block.index()].with(|_| ());
        let (other, others, shared) = (pool.clone(), Arc::clone(&owners), blocks.clone());
        let reader = move || {
            read(&others, shared[0]);
            other.shared().drop_references(&shared);
        };
        at_once(reader, || {
            read(&owners, blocks[0]);
            pool.shared().drop_references(&blocks);
            // Whoever was the last one, the next owner writes.
            if let Some(next) = allocate(pool.shared(), 1) {
                owners.take(&next);
            }
        });
    });
}

#[test]
fn a_plan_that_ends_and_the_last_release_give_the_block_back_once() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let blocks = allocate(pool.shared(), 1).unwrap();
        pool.shared().add_references(&blocks).unwrap();
        pool.shared().references_to_holds(&blocks);
        let (other, held) = (pool.clone(), blocks.clone());
        at_once(move || other.shared().drop_holds(&held), || pool.shared().drop_references(&blocks));
        assert_eq!((pool.num_free(), pool.num_quarantined()), (1, 0));
        audit(&pool, 0);
    });
}

#[test]
fn a_block_that_is_opened_is_found_by_nobody_or_copied() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let blocks = published(&pool, &keys);
        let other = pool.clone();
        let opened = thread::spawn(move || other.shared().open(blocks[0]));
        let (hits, _) = pool.shared().hold_prefix(&keys, None);
        let opening = opened.join().unwrap();
        assert_eq!(opening == super::Opening::Shared, !hits.is_empty(), "{opening:?}, {hits:?}");
        audit(&pool, 1 + hits.len());
    });
}

#[test]
fn a_reset_and_the_last_release_leave_the_block_blank() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let blocks = published(&pool, &keys(&pool, 1));
        let other = pool.clone();
        at_once(
            move || other.shared().drop_references(&blocks),
            || {
                pool.reset_prefix_cache();
            },
        );
        assert_eq!((pool.num_free(), pool.num_idle()), (1, 0));
        audit(&pool, 0);
    });
}

#[test]
fn a_reset_keeps_out_what_was_computed_before() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let (blocks, epoch) = (allocate(pool.shared(), 1).unwrap(), pool.shared().epoch());
        let (other, published) = (pool.clone(), keys.clone());
        at_once(
            move || drop(other.shared().publish(&blocks, &published, epoch, true)),
            || {
                pool.reset_prefix_cache();
            },
        );
        assert!(pool.shared().hold_prefix(&keys, None).0.is_empty());
        audit(&pool, 1);
    });
}

#[test]
fn of_two_equal_blocks_one_is_published() {
    check(|| {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let blocks = allocate(pool.shared(), 2).unwrap();
        let publish = |pool: &BlockPool, own: BlockId, keys: &[Key]| {
            let merged = pool.shared().publish(&[own], keys, 0, true);
            if merged.is_empty() { own } else { merged[0].1 }
        };
        let (other, first, same) = (pool.clone(), blocks[0], keys.clone());
        let one = thread::spawn(move || publish(&other, first, &same));
        let two = publish(&pool, blocks[1], &keys);
        assert_eq!(one.join().unwrap(), two);
        audit(&pool, 3);
    });
}
