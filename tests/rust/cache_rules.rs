//! What can be found, until when, and what gives way first.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod common;
#[path = "common/rules.rs"]
mod rules;

use common::assert_all_free;
use kvfolio::{Context, Error, PlanRequest};
use rules::{counts, ids, plan, sequence, setup};

#[test]
fn nothing_computed_before_a_reset_is_published_after_it() {
    let (pool, batch) = setup(16, 2);
    let (one, other) = (sequence(&pool, &[1, 2, 3, 4]), sequence(&pool, &[1, 2, 3, 4]));
    batch.add(&one).unwrap();
    let step = plan(&batch);
    pool.reset_prefix_cache();
    step.commit(None).unwrap();
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 0);
    batch.add(&other).unwrap();
    plan(&batch).commit(None).unwrap();
    assert_eq!((other.num_cached().unwrap(), ids(&one) == ids(&other)), (0, false));
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 4);
}

#[test]
fn a_published_block_that_is_written_is_found_no_more() {
    let (pool, batch) = setup(16, 4);
    let one = sequence(&pool, &[1, 2, 3, 4]);
    batch.add(&one).unwrap();
    plan(&batch).commit(None).unwrap();
    one.truncate(3).unwrap();
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 4);
    batch.extend(&[0], &[5]).unwrap();
    let step = plan(&batch);
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 0);
    assert_eq!((counts(&pool), step.arrays().copies().len()), ([15, 0, 1, 0], 0));
    step.commit(None).unwrap();
    assert_eq!(pool.match_prefix(&[1, 2, 3, 5], &Context::default()).unwrap(), 4);
}

#[test]
fn a_refused_plan_leaves_published_blocks_findable() {
    let (pool, batch) = setup(3, 4);
    let one = sequence(&pool, &[1, 2, 3, 4]);
    batch.add(&one).unwrap();
    plan(&batch).commit(None).unwrap();
    one.truncate(3).unwrap();
    let mut table = pool.table_of(&pool.allocate(1).unwrap(), 4).unwrap();
    pool.share(&one.blocks().unwrap()).unwrap();
    let mut writer = pool.table_of(&one.blocks().unwrap(), 3).unwrap();
    drop(batch.preempt(0).unwrap()); // the writer is the block's sole user now
    for n in [9, 100] {
        assert!(matches!(writer.append(n), Err(Error::OutOfBlocks { .. })));
        assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 4);
        pool.audit().unwrap();
    }
    writer.append(1).unwrap();
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 0);
    table.append(1).unwrap();
    drop((table, writer));
    assert_all_free(&pool);
}

#[test]
fn the_least_recently_released_and_deepest_block_goes_first() {
    let (pool, batch) = setup(8, 2);
    let context = Context::default();
    let prompts = [[1, 2, 3, 4, 0], [5, 6, 7, 8, 0], [1, 2, 9, 9, 0]];
    for tokens in &prompts {
        let one = sequence(&pool, tokens);
        batch.add(&one).unwrap();
        plan(&batch).commit(None).unwrap();
        one.free().unwrap();
    }
    let found = || prompts.map(|tokens| pool.match_prefix(&tokens, &context).unwrap());
    assert_eq!((pool.num_idle(), found()), (5, [4, 4, 4]));
    let taken = pool.allocate(3).unwrap();
    for found_then in [[2, 4, 4], [2, 2, 4], [2, 0, 4], [2, 0, 2], [0, 0, 0]] {
        pool.allocate(1).unwrap();
        assert_eq!(found(), found_then);
    }
    drop(taken);
}

#[test]
fn many_hits_neither_lose_an_idle_block_nor_its_place() {
    let (pool, batch) = setup(12, 2);
    let (often, once) = ([1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 9, 0]);
    for _ in 0..200 {
        let one = sequence(&pool, &often);
        batch.add(&one).unwrap();
        plan(&batch).commit(None).unwrap();
        one.free().unwrap();
        pool.audit().unwrap();
        if pool.stats().hit_tokens < 60 {
            let one = sequence(&pool, &once);
            batch.add(&one).unwrap();
            plan(&batch).commit(None).unwrap();
            one.free().unwrap();
        }
    }
    pool.allocate(pool.num_blank() + 2).unwrap();
    let found = [&often[..], &once].map(|tokens| pool.match_prefix(tokens, &Context::default()).unwrap());
    assert_eq!(found, [6, 0]);
    assert_eq!(pool.allocate(3).unwrap().len(), 3);
    assert_eq!(counts(&pool), [0, 0, 12, 0]);
}

#[test]
fn a_failed_plan_leaves_the_order_of_eviction() {
    let (pool, batch) = setup(4, 2);
    for tokens in [[1, 2, 0], [3, 4, 0]] {
        let one = sequence(&pool, &tokens);
        batch.add(&one).unwrap();
        plan(&batch).commit(None).unwrap();
        one.free().unwrap();
    }
    let held = pool.allocate(2).unwrap();
    // The first finds its prefix again, but there is no room for the rest.
    let large = sequence(&pool, &[1, 2, 0, 0, 0, 0]);
    assert_eq!(pool.blocks_needed(&large).unwrap(), 3);
    batch.add(&large).unwrap();
    assert_eq!(large.num_cached().unwrap(), 2);
    assert!(matches!(
        batch.plan(&PlanRequest::default()),
        Err(Error::OutOfBlocks { needed: 2, free: 1, .. })
    ));
    assert_eq!(batch.shortfall(&PlanRequest::default()).unwrap(), 1);
    batch.preempt(0).unwrap();
    pool.allocate(1).unwrap();
    let found = [[1, 2], [3, 4]].map(|tokens| pool.match_prefix(&tokens, &Context::default()).unwrap());
    assert_eq!(found, [2, 0]);
    drop(held);
}
