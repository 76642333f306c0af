//! Models of who gives way: evictions, releases, hits that are undone, compaction.

use super::*;

/// What a release does at times.
fn compact(pool: &BlockPool) {
    let shared = pool.shared();
    if shared.reserve(1) {
        shared.compact_all();
        shared.give_free(1);
    }
}

#[test]
fn a_hit_and_an_eviction_do_not_both_get_the_block() {
    check_policies(3, |pool_of| {
        let pool = pool_of(1);
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
    check_policies(3, |pool_of| {
        let pool = pool_of(2);
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
fn who_evicts_comes_after_all_who_read() {
    check_policies(3, |pool_of| {
        let pool = pool_of(1);
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
fn an_eviction_does_not_wait_for_a_release_and_neither_is_lost() {
    check_policies(3, |pool_of| {
        let pool = pool_of(2);
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
    check_policies(3, |pool_of| {
        let pool = pool_of(2);
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
    check_policies(2, |pool_of| {
        let pool = pool_of(2);
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
    check_policies(2, |pool_of| {
        let pool = pool_of(2);
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
    check_policies(2, |pool_of| {
        let pool = pool_of(2);
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
    check_policies(2, |pool_of| {
        let pool = pool_of(2);
        idle(&pool, 1);
        let other = pool.clone();
        at_once(move || compact(&other), || compact(&pool));
        assert_eq!((pool.num_free(), pool.num_idle()), (2, 1));
        audit(&pool, 0);
        assert!(allocate(pool.shared(), 2).is_some());
    });
}
