//! Models of what the orderings promise beyond the races: each fails by one ordering that is weakened.

use super::{super::word::Claim, *};

#[test]
fn who_writes_in_place_comes_after_all_who_shared() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let owners = Owners::new(1);
        let blocks = allocate(pool.shared(), 1).unwrap();
        pool.shared().add_references(&blocks).unwrap();
        let (other, others, shared) = (pool.clone(), Arc::clone(&owners), blocks.clone());
        let writer = move || {
            // Never published, so that the load of the word is all that there is.
            if other.shared().open(shared[0]) == Opening::Open {
                others.write(shared[0]);
            }
        };
        // The writer is the spawned thread: the other way round loom stops after one execution.
        at_once(writer, || {
            owners.read(blocks[0]);
            pool.shared().drop_references(&blocks);
        });
    });
}

#[test]
fn who_evicts_comes_after_all_who_read_and_took_it_back() {
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
            other.shared().unhold_prefix(&hits); // leaves the entry in the log as it was
        };
        at_once(reader, || {
            let mut taken = Vec::new();
            // Without a unit, which has an order of its own.
            pool.shared().evict(1, Claim::Owned, &mut taken);
            for block in taken {
                owners.write(block);
            }
        });
    });
}

#[test]
fn who_unpublishes_knows_what_others_published() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let keys = keys(&pool, 1);
        let blocks = allocate(pool.shared(), 1).unwrap();
        pool.shared().add_references(&blocks).unwrap();
        let (other, same) = (pool.clone(), blocks.clone());
        at_once(
            move || {
                other.shared().publish(&same, &keys, 0, false);
            },
            || pool.shared().unpublish(blocks[0]),
        );
        audit(&pool, 2);
    });
}

#[test]
fn who_has_a_unit_sees_the_blank_block_that_it_was_given_for() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let blocks = allocate(pool.shared(), 1).unwrap();
        let other = pool.clone();
        at_once(
            move || other.shared().drop_references(&blocks),
            || {
                if pool.shared().reserve(1) {
                    let mut taken = Vec::new();
                    pool.shared().blank.take_anywhere(1, &mut taken);
                    assert_eq!(taken.len(), 1);
                }
            },
        );
    });
}

#[test]
fn who_has_a_unit_sees_the_idle_block_that_it_was_given_for() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let blocks = published(&pool, &keys(&pool, 1));
        let other = pool.clone();
        at_once(
            move || other.shared().drop_references(&blocks),
            || {
                if pool.shared().reserve(1) {
                    let mut taken = Vec::new();
                    pool.shared().evict(1, Claim::Owned, &mut taken);
                    assert_eq!(taken.len(), 1);
                }
            },
        );
    });
}

#[test]
fn marks_lead_to_all_blank_blocks_when_nobody_is_at_work() {
    check(|| {
        let blank = Arc::new(BlankBlocks::new(4)); // in models three levels, of words of two bits
        let churn = |blank: &BlankBlocks| {
            let mut taken = Vec::new();
            blank.take(2, &mut taken);
            let mut back = Giving::new(blank);
            for block in taken {
                back.add(block);
            }
            back.finish();
        };
        let other = Arc::clone(&blank);
        at_once(move || churn(&other), || churn(&blank));
        let mut all = Vec::new();
        blank.take(4, &mut all);
        assert_eq!(all.len(), 4);
    });
}
