//! Every interleaving, within bounds, of the pool's races, under the loom model checker.
//!
//! Each model has the fewest blocks and threads that let the race happen. What a thread gets it stamps as its
//! own, so a block with two owners is found out; at the end the audit recounts everything.

#![expect(clippy::unwrap_used, reason = "a model that panics has failed")]

mod orderings;

use std::sync::Arc;

use loom::{cell::UnsafeCell, thread};

use super::{
    BlockPool, Opening, Shared,
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
fn a_reset_and_the_last_release_leave_a_free_block_that_nobody_finds() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let blocks = published(&pool, &keys);
        let other = pool.clone();
        at_once(
            move || other.shared().drop_references(&blocks),
            || {
                pool.reset_prefix_cache();
            },
        );
        assert!(pool.shared().hold_prefix(&keys, None).0.is_empty());
        assert_eq!(pool.num_free(), 1);
        audit(&pool, 0);
        assert!(allocate(pool.shared(), 1).is_some());
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
fn of_two_equal_blocks_one_is_shared_or_both_are_found() {
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
        let one = one.join().unwrap();
        audit(&pool, if one == two { 3 } else { 2 });
        assert!(one == two || (one, two) == (blocks[0], blocks[1]));
        let found = pool.shared().hold_prefix(&keys, None).0;
        assert!(found[0] == one || found[0] == two);
    });
}

/// Blocks that lie idle in this order, with the keys that they are found by.
fn idle(pool: &BlockPool, num_blocks: usize) -> Vec<Key> {
    let keys = keys(pool, num_blocks);
    for block in published(pool, &keys) {
        pool.shared().drop_references(&[block]);
    }
    keys
}

/// What a release does at times.
fn compact(pool: &BlockPool) {
    let shared = pool.shared();
    if shared.reserve(1) {
        shared.compact();
        shared.give_free(1);
    }
}

#[test]
fn who_finds_a_block_comes_after_who_published_it() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let owners = Owners::new(1);
        let keys = keys(&pool, 1);
        let blocks = allocate(pool.shared(), 1).unwrap();
        let (other, others, same) = (pool.clone(), Arc::clone(&owners), keys.clone());
        let publish = move || {
            others.write(blocks[0]);
            other.shared().publish(&blocks, &same, 0, true);
        };
        at_once(publish, || {
            for block in pool.shared().hold_prefix(&keys, None).0 {
                owners.read(block);
            }
        });
    });
}

#[test]
fn who_writes_in_place_comes_after_all_who_read() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let owners = Owners::new(1);
        let keys = keys(&pool, 1);
        let blocks = published(&pool, &keys);
        let (other, others) = (pool.clone(), Arc::clone(&owners));
        let reader = move || {
            let (hits, _) = other.shared().hold_prefix(&keys, None);
            for block in &hits {
                others.read(*block);
            }
            other.shared().drop_references(&hits);
        };
        at_once(reader, || {
            if pool.shared().open(blocks[0]) != Opening::Shared {
                owners.write(blocks[0]);
            }
        });
    });
}

#[test]
fn who_evicts_comes_after_all_who_read() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let owners = Owners::new(1);
        let keys = idle(&pool, 1);
        let (other, others) = (pool.clone(), Arc::clone(&owners));
        let reader = move || {
            let (hits, _) = other.shared().hold_prefix(&keys, None);
            for block in &hits {
                others.read(*block);
            }
            other.shared().drop_references(&hits);
        };
        at_once(reader, || {
            for block in allocate(pool.shared(), 1).unwrap_or_default() {
                owners.write(block);
            }
        });
    });
}

#[test]
fn a_hit_is_no_hit_when_the_block_came_back_with_other_content() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 2);
        pool.shared().drop_references(&published(&pool, &keys[..1]));
        let (other, second) = (pool.clone(), keys[1]);
        let replace = move || {
            if let Some(blocks) = allocate(other.shared(), 1) {
                other.shared().publish(&blocks, &[second], 0, true);
                other.shared().drop_references(&blocks);
            }
        };
        let mut held = 0;
        at_once(replace, || {
            let (hits, _) = pool.shared().hold_prefix(&keys[..1], None);
            assert!(hits.iter().all(|block| pool.shared().contents.is(*block, &keys[0], 0)));
            held = hits.len();
        });
        audit(&pool, held);
    });
}

#[test]
fn a_block_with_two_holders_is_published_once() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let blocks = allocate(pool.shared(), 1).unwrap();
        pool.shared().add_references(&blocks).unwrap();
        let publish = |pool: &BlockPool, block: BlockId, keys: &[Key]| {
            pool.shared().publish(&[block], keys, 0, false);
            pool.shared().drop_references(&[block]);
        };
        let (other, block, same) = (pool.clone(), blocks[0], keys.clone());
        at_once(move || publish(&other, block, &same), || publish(&pool, block, &keys));
        assert_eq!(pool.num_free(), 1);
        audit(&pool, 0);
    });
}

#[test]
fn an_eviction_does_not_wait_for_a_release_and_neither_is_lost() {
    check(|| {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let owners = Owners::new(2);
        let blocks = published(&pool, &keys(&pool, 2));
        owners.take(&blocks);
        let (other, others, first) = (pool.clone(), Arc::clone(&owners), blocks[0]);
        let release = move || {
            others.give(&[first]);
            other.shared().drop_references(&[first]);
        };
        at_once(release, || {
            owners.give(&blocks[1..]);
            pool.shared().drop_references(&blocks[1..]);
            // Its place may be behind one that the other thread has not entered yet.
            owners.take(&allocate(pool.shared(), 1).unwrap());
        });
        assert_eq!(pool.num_free(), 1);
        audit(&pool, 1);
        owners.take(&allocate(pool.shared(), 1).unwrap());
    });
}

#[test]
fn a_hit_that_is_undone_is_in_line_again_though_its_entry_was_passed() {
    check(|| {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let keys = idle(&pool, 2);
        let (other, first) = (pool.clone(), keys[0]);
        let undo = move || {
            let (hits, _) = other.shared().hold_prefix(&[first], None);
            other.shared().unhold_prefix(&hits);
        };
        let mut got = 0;
        at_once(undo, || got = allocate(pool.shared(), 1).map_or(0, |blocks| blocks.len()));
        assert_eq!(pool.num_free(), 2 - got);
        audit(&pool, got);
        assert!(allocate(pool.shared(), 2 - got).is_some());
    });
}

#[test]
fn compaction_loses_no_block_to_an_eviction() {
    check_within(2, || {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let owners = Owners::new(2);
        idle(&pool, 2);
        let other = pool.clone();
        let mut got = 0;
        at_once(
            move || compact(&other),
            || {
                let blocks = allocate(pool.shared(), 1).unwrap_or_default();
                owners.take(&blocks);
                got = blocks.len();
            },
        );
        assert_eq!(pool.num_free(), 2 - got);
        audit(&pool, got);
        owners.take(&allocate(pool.shared(), 2 - got).unwrap());
    });
}

#[test]
fn compaction_loses_no_hit_that_is_undone() {
    check_within(2, || {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let keys = idle(&pool, 1);
        let other = pool.clone();
        at_once(
            move || compact(&other),
            || {
                let (hits, _) = pool.shared().hold_prefix(&keys, None);
                pool.shared().unhold_prefix(&hits);
            },
        );
        assert_eq!((pool.num_free(), pool.num_idle()), (2, 1));
        audit(&pool, 0);
        assert!(allocate(pool.shared(), 2).is_some());
    });
}

#[test]
fn compaction_loses_no_block_to_a_hit_and_its_release() {
    check_within(2, || {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let keys = idle(&pool, 1);
        let other = pool.clone();
        at_once(
            move || compact(&other),
            || {
                let (hits, _) = pool.shared().hold_prefix(&keys, None);
                pool.shared().drop_references(&hits);
            },
        );
        assert_eq!((pool.num_free(), pool.num_idle()), (2, 1));
        audit(&pool, 0);
        assert!(allocate(pool.shared(), 2).is_some());
    });
}

#[test]
fn two_compactions_at_once_lose_no_block() {
    check_within(2, || {
        let pool = BlockPool::new(2, 1, true).unwrap();
        idle(&pool, 1);
        let other = pool.clone();
        at_once(move || compact(&other), || compact(&pool));
        assert_eq!((pool.num_free(), pool.num_idle()), (2, 1));
        audit(&pool, 0);
        assert!(allocate(pool.shared(), 2).is_some());
    });
}

#[test]
fn a_reset_and_a_hit_agree() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = idle(&pool, 1);
        let other = pool.clone();
        let mut held = 0;
        at_once(
            move || {
                other.reset_prefix_cache();
            },
            || {
                let (hits, epoch) = pool.shared().hold_prefix(&keys, None);
                assert!(hits.is_empty() || epoch == 0);
                held = hits.len();
            },
        );
        assert!(pool.shared().hold_prefix(&keys, None).0.is_empty());
        assert_eq!(pool.num_free(), 1 - held);
        audit(&pool, held);
    });
}

#[test]
fn a_reset_and_an_eviction_agree() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let owners = Owners::new(1);
        idle(&pool, 1);
        let other = pool.clone();
        let mut got = 0;
        at_once(
            move || {
                other.reset_prefix_cache();
            },
            || {
                let blocks = allocate(pool.shared(), 1).unwrap_or_default();
                owners.take(&blocks);
                got = blocks.len();
            },
        );
        assert_eq!(pool.num_free(), 1 - got);
        audit(&pool, got);
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

#[test]
fn a_block_that_is_closed_again_is_found_or_an_equal_one_is() {
    check(|| {
        let pool = BlockPool::new(2, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let blocks = published(&pool, &keys);
        let own = allocate(pool.shared(), 1).unwrap();
        let (other, same) = (pool.clone(), keys.clone());
        at_once(
            move || {
                other.shared().publish(&own, &same, 0, false);
            },
            || {
                if pool.shared().open(blocks[0]) == Opening::Unpublished {
                    pool.shared().republish(blocks[0], 0);
                }
            },
        );
        audit(&pool, 2);
        assert_eq!(pool.shared().hold_prefix(&keys, None).0.len(), 1);
    });
}
