//! Models of what only two logs have: blocks that go from one to the other, and histories that begin anew.

use super::*;

fn adaptive(num_blocks: usize) -> BlockPool {
    let options = PoolOptions { eviction: EvictionPolicy::Adaptive, ..PoolOptions::default() };
    BlockPool::with_options(num_blocks, 1, &options).unwrap()
}

#[test]
fn a_block_on_its_way_to_the_other_log_is_evicted_once_or_stays() {
    check(|| {
        let pool = adaptive(2);
        let owners = Owners::new(2);
        let keys = idle(&pool, 2);
        let (other, others) = (pool.clone(), Arc::clone(&owners));
        let hit = move || {
            let (hits, _) = other.shared().hold_prefix(&keys[..1], None);
            others.take(&hits);
            others.give(&hits);
            other.shared().drop_references(&hits);
        };
        let mut got = 0;
        at_once(hit, || {
            let blocks = allocate(pool.shared(), 1).unwrap_or_default();
            owners.take(&blocks);
            got = blocks.len();
        });
        assert_eq!(pool.num_free(), 2 - got);
        audit(&pool, got);
        owners.take(&allocate(pool.shared(), 2 - got).unwrap());
    });
}

/// A pool of one block, idle with the second of two keys; the first was evicted just before.
fn one_that_follows_a_ghost() -> (BlockPool, Vec<Key>) {
    let pool = adaptive(1);
    let keys = keys(&pool, 2);
    for key in keys.chunks(1) {
        pool.shared().drop_references(&published(&pool, key));
    }
    (pool, keys)
}

/// Hit the block, write it anew, and publish it under the key that is remembered.
fn bring_back(pool: &BlockPool, keys: &[Key]) {
    let shared = pool.shared();
    let (hits, _) = shared.hold_prefix(&keys[1..], None);
    if !hits.is_empty() {
        assert_eq!(shared.open(hits[0]), Opening::Unpublished);
        shared.publish(&hits, &keys[..1], 0, false);
    }
    shared.drop_references(&hits);
}

#[test]
fn a_block_that_is_written_anew_is_not_lost_to_who_reads_its_old_entry() {
    check(|| {
        let (pool, keys) = one_that_follows_a_ghost();
        let other = pool.clone();
        let mut got = 0;
        at_once(
            move || bring_back(&other, &keys),
            || got = allocate(pool.shared(), 1).map_or(0, |blocks| blocks.len()),
        );
        assert_eq!(pool.num_free(), 1 - got);
        audit(&pool, got);
        assert!(allocate(pool.shared(), 1 - got).is_some());
    });
}

#[test]
fn a_block_that_is_written_anew_is_not_lost_to_compaction() {
    check_within(2, || {
        let (pool, keys) = one_that_follows_a_ghost();
        let other = pool.clone();
        at_once(
            move || {
                if other.shared().reserve(1) {
                    other.shared().compact_all();
                    other.shared().give_free(1);
                }
            },
            || bring_back(&pool, &keys),
        );
        assert_eq!((pool.num_free(), pool.num_idle()), (1, 1));
        audit(&pool, 0);
        assert!(allocate(pool.shared(), 1).is_some());
    });
}
