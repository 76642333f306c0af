//! Every interleaving, within bounds, of the pool's races, under the loom model checker.
//!
//! Each model has the fewest blocks and threads that let the race happen. What a thread gets it stamps as its
//! own, so a block with two owners is found out; at the end the audit recounts everything.

#![expect(clippy::unwrap_used, reason = "a model that panics has failed")]

mod adaptive;
mod cache;
mod events;
mod eviction;
mod orderings;

use std::sync::Arc;

use loom::{cell::UnsafeCell, thread};

use super::{
    BlockPool, EvictionPolicy, Opening, PoolOptions, Shared,
    blank::{BlankBlocks, Giving},
};
use crate::{
    ids::BlockId,
    key::{Key, KeyChain},
    sync::Ordering,
};

fn check(model: impl Fn() + Sync + Send + 'static) {
    check_within(3, model); // bugs of this kind need two or three preemptions; more takes hours
}

fn check_within(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// The same for pools of each policy, made by the function that the model gets.
fn check_policies(preemptions: usize, model: impl Fn(&dyn Fn(usize) -> BlockPool) + Sync + Send + 'static) {
    let model = Arc::new(model);
    for &eviction in EvictionPolicy::ALL {
        let model = Arc::clone(&model);
        let options = PoolOptions { eviction, ..PoolOptions::default() };
        check_within(preemptions, move || {
            model(&|num_blocks| BlockPool::with_options(num_blocks, 1, &options).unwrap());
        });
    }
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

    /// Attention reads a block that the reader has a claim on.
    fn read(&self, block: BlockId) {
        self.0[block.index()].with(|_| ());
    }

    /// A kernel writes into a block that the writer has the only claim on.
    fn write(&self, block: BlockId) {
        self.0[block.index()].with_mut(|_| ());
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

/// Blocks that lie idle in this order, with the keys that they are found by.
fn idle(pool: &BlockPool, num_blocks: usize) -> Vec<Key> {
    let keys = keys(pool, num_blocks);
    for block in published(pool, &keys) {
        pool.shared().drop_references(&[block]);
    }
    keys
}

#[test]
fn a_blank_block_is_handed_out_once_and_never_lost() {
    check(|| {
        let blank = Arc::new(BlankBlocks::new(4)); // in models three levels, of words of two bits
        let owners = Owners::new(4);
        let churn = |blank: &BlankBlocks, owners: &Owners, n: usize| {
            let mut taken = Vec::new();
            blank.take(n, &mut taken);
            owners.take(&taken);
            let mut back = Giving::new(blank);
            if let Some(first) = taken.first() {
                owners.give(&[*first]);
                back.add(*first);
            }
            back.finish();
        };
        let (other, others) = (Arc::clone(&blank), Arc::clone(&owners));
        at_once(move || churn(&other, &others, 2), || churn(&blank, &owners, 2));
        let mut rest = Vec::new();
        blank.take_anywhere(4, &mut rest);
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
        let (other, others, shared) = (pool.clone(), Arc::clone(&owners), blocks.clone());
        let reader = move || {
            others.read(shared[0]);
            other.shared().drop_references(&shared);
        };
        at_once(reader, || {
            owners.read(blocks[0]);
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
fn what_is_lent_once_is_taken_back_once() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let blocks = pool.allocate(1).unwrap();
        let (other, same) = (pool.clone(), blocks.clone());
        let one = thread::spawn(move || other.release(&same).is_ok());
        let two = pool.release(&blocks).is_ok();
        assert!(one.join().unwrap() != two);
        assert_eq!(pool.num_free(), 1);
        audit(&pool, 0);
    });
}

#[test]
fn who_shares_while_another_gives_back_has_the_block_or_is_refused() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let owners = Owners::new(1);
        let blocks = pool.allocate(1).unwrap();
        let (other, same) = (pool.clone(), blocks.clone());
        let mut shared = false;
        at_once(
            move || other.release(&same).unwrap(),
            || {
                shared = pool.share(&blocks).is_ok();
                if shared {
                    owners.take(&blocks);
                }
            },
        );
        assert_eq!(pool.num_free(), usize::from(!shared));
        audit(&pool, 0);
        owners.take(&pool.allocate(pool.num_free()).unwrap());
    });
}

#[test]
fn what_is_let_go_while_its_plan_lands_is_given_back_once() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let holds = Arc::new(crate::holds::Holds::new(&pool));
        holds.begin(7);
        let blocks = allocate(pool.shared(), 1).unwrap();
        let (other, flights) = (pool.clone(), Arc::clone(&holds));
        let let_go = move || {
            if !flights.take(7, &blocks) {
                other.shared().drop_references(&blocks);
            }
        };
        at_once(let_go, || pool.shared().drop_holds(&holds.end(7)));
        assert_eq!((pool.num_free(), pool.num_quarantined()), (1, 0));
        audit(&pool, 0);
    });
}
