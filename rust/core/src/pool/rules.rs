//! What one thread may rely on while it is alone.

use super::{
    BlockPool, EvictionPolicy, Opening, PoolOptions, Shared,
    log::{Position, Segment},
    word::Claim,
};
use crate::{ids::BlockId, key::Key};

fn key(number: u64) -> Key {
    Key::from_words([number; 4])
}

fn published(shared: &Shared, numbers: std::ops::Range<u64>) -> Vec<BlockId> {
    let keys: Vec<_> = numbers.map(key).collect();
    let mut blocks = Vec::new();
    assert!(shared.reserve(keys.len()));
    shared.take_reserved(keys.len(), &mut blocks);
    assert!(shared.publish(&blocks, &keys, 0, true).is_empty());
    blocks
}

#[test]
fn least_recently_released_gives_way_first_and_of_one_release_the_deepest() -> crate::Result<()> {
    let pool = BlockPool::new(9, 1, true)?;
    let shared = pool.shared();
    let [first, second, third] = [0..3, 3..6, 6..9].map(|numbers| published(shared, numbers));
    for released in [&second, &first, &third] {
        shared.drop_references(released);
    }
    let (hits, _) = shared.hold_prefix(&[key(4)], None);
    assert_eq!(hits, second[1..2]);
    shared.drop_references(&hits); // it was used again, so now it is the last
    let (hits, _) = shared.hold_prefix(&[key(3)], None);
    shared.unhold_prefix(&hits); // as if it had never been
    let order = [second[2], second[0], first[2], first[1], first[0], third[2], third[1], third[0], second[1]];
    for block in order {
        assert_eq!(pool.allocate(1)?, [block]);
    }
    Ok(())
}

fn adaptive(num_blocks: usize) -> crate::Result<BlockPool> {
    let options = PoolOptions { eviction: EvictionPolicy::Adaptive, ..PoolOptions::default() };
    BlockPool::with_options(num_blocks, 1, &options)
}

/// Publish a block under each key, one release after the other, as requests come and go.
fn leave(shared: &Shared, numbers: std::ops::Range<u64>) -> Vec<BlockId> {
    let leave_one = |number| {
        let blocks = published(shared, number..number + 1);
        shared.drop_references(&blocks);
        blocks[0]
    };
    numbers.map(leave_one).collect()
}

fn is_cached(shared: &Shared, number: u64) -> bool {
    let (hits, _) = shared.hold_prefix(&[key(number)], None);
    shared.unhold_prefix(&hits);
    !hits.is_empty()
}

fn hit(shared: &Shared, number: u64) {
    let (hits, _) = shared.hold_prefix(&[key(number)], None);
    assert_eq!(hits.len(), 1);
    shared.drop_references(&hits);
}

#[test]
fn a_block_that_was_hit_outlives_those_that_come_once() -> crate::Result<()> {
    for (eviction, is_kept) in [(EvictionPolicy::Lru, false), (EvictionPolicy::Adaptive, true)] {
        let options = PoolOptions { eviction, ..PoolOptions::default() };
        let pool = BlockPool::with_options(64, 1, &options)?;
        leave(pool.shared(), 0..8);
        hit(pool.shared(), 0);
        leave(pool.shared(), 100..300);
        assert_eq!(is_cached(pool.shared(), 0), is_kept, "{eviction}");
        assert!(!is_cached(pool.shared(), 1));
        pool.audit()?;
    }
    Ok(())
}

#[test]
fn of_each_log_the_least_recently_released_gives_way_first() -> crate::Result<()> {
    let pool = adaptive(8)?;
    let blocks = leave(pool.shared(), 0..8);
    (0..4).rev().for_each(|number| hit(pool.shared(), number));
    // The entries of the first four count in the one log only while it was not read; then both logs are as long.
    for evicted in [4, 3, 5, 2, 6, 1, 7, 0] {
        assert_eq!(pool.allocate(1)?, [blocks[evicted]], "{evicted}");
    }
    Ok(())
}

#[test]
fn a_hit_that_is_undone_or_on_a_block_in_use_protects_nothing() -> crate::Result<()> {
    let pool = adaptive(4)?;
    let shared = pool.shared();
    let blocks = published(shared, 0..2);
    let (hits, _) = shared.hold_prefix(&[key(0)], None);
    shared.drop_references(&blocks);
    shared.drop_references(&hits);
    assert!(is_cached(shared, 1), "which is a hit, and undone");
    assert!(blocks.iter().all(|block| shared.log.has(shared.places.get(*block), *block)));
    hit(shared, 1);
    assert_eq!(shared.places.get(blocks[1]).segment(), Segment::Protected);
    Ok(())
}

#[test]
fn a_hit_on_a_protected_block_that_is_undone_leaves_no_trace() -> crate::Result<()> {
    let pool = adaptive(2)?;
    let shared = pool.shared();
    let blocks = leave(shared, 0..1);
    hit(shared, 0);
    let place = shared.places.get(blocks[0]);
    assert!(is_cached(shared, 0), "which is a hit, and undone");
    assert_eq!(shared.places.get(blocks[0]), place);
    Ok(())
}

#[test]
fn a_block_whose_entry_was_passed_while_it_was_in_use_is_not_new() -> crate::Result<()> {
    let pool = adaptive(2)?;
    let shared = pool.shared();
    let blocks = leave(shared, 0..2);
    let (hits, _) = shared.hold_prefix(&[key(0)], None);
    assert_eq!(pool.allocate(1)?, blocks[1..]);
    assert!(shared.places.get(blocks[0]).is_nowhere());
    shared.drop_references(&hits);
    assert!(shared.log_of(shared.places.get(blocks[0])).has(shared.places.get(blocks[0]), blocks[0]));
    assert_eq!(shared.places.get(blocks[0]).segment(), Segment::Protected);
    Ok(())
}

#[test]
fn hits_without_end_cost_no_content() -> crate::Result<()> {
    for &eviction in EvictionPolicy::ALL {
        let pool = BlockPool::with_options(2, 1, &PoolOptions { eviction, ..PoolOptions::default() })?;
        leave(pool.shared(), 0..2);
        (0..1000).for_each(|_| hit(pool.shared(), 0));
        assert!(is_cached(pool.shared(), 0) && is_cached(pool.shared(), 1), "{eviction}");
        assert_eq!(pool.stats().evictions, 0);
        pool.audit()?;
    }
    Ok(())
}

#[test]
fn what_is_written_anew_begins_anew() -> crate::Result<()> {
    let pool = adaptive(4)?;
    let shared = pool.shared();
    let blocks = leave(shared, 0..1);
    hit(shared, 0);
    let (hits, _) = shared.hold_prefix(&[key(0)], None);
    assert_eq!(shared.open(hits[0]), Opening::Unpublished);
    shared.publish(&hits, &[key(1)], 0, false);
    shared.drop_references(&hits);
    assert!(shared.log.has(shared.places.get(blocks[0]), blocks[0]));
    assert_eq!(pool.num_idle(), 1);
    pool.audit()
}

#[test]
fn what_comes_back_soon_after_it_was_evicted_is_protected() -> crate::Result<()> {
    let pool = adaptive(64)?;
    let shared = pool.shared();
    leave(shared, 0..128); // 0 was evicted 64 blocks ago
    let blocks = leave(shared, 0..1);
    assert_eq!(shared.places.get(blocks[0]).segment(), Segment::Protected);
    leave(shared, 1000..1500);
    let blocks = leave(shared, 64..65);
    assert_eq!(shared.places.get(blocks[0]).segment(), Segment::Probation, "that is too long ago");
    Ok(())
}

#[test]
fn a_release_that_is_refused_changes_nothing() -> crate::Result<()> {
    let pool = BlockPool::new(3, 1, true)?;
    let (lent, owned) = (pool.allocate(2)?, published(pool.shared(), 0..1));
    for refused in [[lent[0], owned[0]], [lent[0], lent[0]]] {
        assert!(pool.release(&refused).is_err());
        assert_eq!(pool.ref_count(lent[0])?, 1);
    }
    pool.release(&lent)?;
    assert!(pool.release(&lent).is_err());
    assert_eq!((pool.num_free(), pool.ref_count(owned[0])?), (2, 1));
    Ok(())
}

#[test]
fn a_reset_leaves_all_that_is_free_blank() -> crate::Result<()> {
    let pool = BlockPool::new(3, 1, true)?;
    let blocks = published(pool.shared(), 0..3);
    pool.shared().drop_references(&blocks[1..]);
    assert_eq!((pool.num_free(), pool.num_idle()), (2, 2));
    assert_eq!(pool.reset_prefix_cache(), 1);
    assert_eq!((pool.num_free(), pool.num_idle()), (2, 0));
    pool.shared().drop_references(&blocks[..1]);
    assert_eq!((pool.num_free(), pool.num_idle()), (3, 0));
    Ok(())
}

#[test]
fn a_claim_of_another_kind_is_not_dropped() -> crate::Result<()> {
    let pool = BlockPool::new(1, 1, true)?;
    let owned = published(pool.shared(), 0..1);
    assert_eq!(pool.shared().settle(owned.iter().copied(), Claim::Lent), Some(owned[0]));
    assert_eq!((pool.num_free(), pool.ref_count(owned[0])?), (0, 1));
    Ok(())
}

#[test]
fn a_log_without_room_costs_content_and_no_block() -> crate::Result<()> {
    let pool = BlockPool::new(2, 1, true)?;
    let shared = pool.shared();
    let blocks = published(shared, 0..2);
    shared.drop_references(&blocks[..1]);
    let (hits, _) = shared.hold_prefix(&[key(0)], None);
    assert_eq!(hits, blocks[..1]);
    // As by readers who passed the entry, and by writers who were stopped before they entered theirs.
    let place = shared.places.get(hits[0]);
    assert!(shared.places.exchange(hits[0], place, Position::nowhere(place.segment())));
    while shared.log.reserve(1).is_some() {}
    shared.unhold_prefix(&hits);
    assert_eq!((pool.num_free(), pool.num_idle()), (1, 0));
    while shared.log.reserve(1).is_some() {}
    shared.drop_references(&blocks[1..]);
    assert_eq!((pool.num_free(), pool.num_idle()), (2, 0));
    assert_eq!(pool.allocate(2)?.len(), 2);
    Ok(())
}

#[test]
fn a_block_that_a_plan_holds_or_that_is_lent_is_not_opened() -> crate::Result<()> {
    let pool = BlockPool::new(2, 1, true)?;
    let blocks = published(pool.shared(), 0..2);
    pool.shared().add_references(&blocks[..1])?;
    pool.shared().references_to_holds(&blocks[..1]);
    pool.share(&blocks[1..])?;
    for block in blocks {
        assert_eq!(pool.shared().open(block), Opening::Shared);
    }
    Ok(())
}
