//! Models of what is found: publication, hits, overwriting, reset.

use super::*;

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
fn a_hit_is_no_hit_when_the_block_came_back_with_other_content() {
    check_within(2, || {
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
