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
fn who_hits_comes_after_who_wrote_anew_to_the_same_word() {
    check(|| {
        let pool = BlockPool::new(1, 1, true).unwrap();
        let owners = Owners::new(1);
        let keys = keys(&pool, 2);
        let blocks = published(&pool, &keys[..1]);
        let (other, others, wanted) = (pool.clone(), Arc::clone(&owners), keys[0]);
        let reader = move || {
            for block in other.shared().hold_prefix(&[wanted], None).0 {
                others.read(block);
            }
        };
        at_once(reader, || {
            if pool.shared().open(blocks[0]) == Opening::Unpublished {
                owners.write(blocks[0]);
                pool.shared().publish(&blocks, &keys[1..], 0, false);
            }
        });
    });
}
