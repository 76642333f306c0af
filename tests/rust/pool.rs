//! The pool and its tables: all or nothing, everything given back once.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod common;

use common::assert_all_free;
use kvfolio::{Batch, BlockId, BlockPool, Context, Error, Extra, NewTokens, PlanRequest};

const MOST_REFERENCES: usize = (1 << 20) - 1;

fn pool(num_blocks: usize, block_size: usize) -> BlockPool {
    BlockPool::new(num_blocks, block_size, true).unwrap()
}

fn counts(pool: &BlockPool) -> [usize; 4] {
    [pool.num_blank(), pool.num_idle(), pool.num_referenced(), pool.num_quarantined()]
}

#[test]
fn allocation_is_all_or_nothing() {
    let pool = pool(10, 4);
    let first = pool.allocate(7).unwrap();
    let error = Error::OutOfBlocks { needed: 4, free: 3, quarantined: 0, ever_fits: true };
    assert_eq!(pool.allocate(4), Err(error));
    let error = Error::OutOfBlocks { needed: usize::MAX, free: 3, quarantined: 0, ever_fits: false };
    assert_eq!(pool.allocate(usize::MAX), Err(error));
    assert_eq!((pool.num_free(), pool.stats().refusals), (3, 2));
    assert_eq!(pool.allocate(0).unwrap(), []);
    let second = pool.allocate(3).unwrap();
    let mut all: Vec<_> = first.iter().chain(&second).map(|block| block.as_i32()).collect();
    all.sort_unstable();
    assert_eq!(all, (1..=10).collect::<Vec<_>>());
    pool.release(&[first, second].concat()).unwrap();
    assert_all_free(&pool);
}

#[test]
fn share_and_release_count_mentions_all_or_nothing() {
    let pool = pool(8, 4);
    let blocks = pool.allocate(3).unwrap();
    let (a, b, c) = (blocks[0], blocks[1], blocks[2]);
    let free = pool.block(7).unwrap();
    pool.share(&[a, BlockId::NULL, a, b]).unwrap();
    let references = || [a, b, c, free].map(|block| pool.ref_count(block).unwrap());
    assert_eq!(references(), [3, 2, 1, 0]);
    assert!(matches!(pool.share(&[c, a, BlockId::NULL, free, b]), Err(Error::InvalidBlock(_))));
    assert_eq!(references(), [3, 2, 1, 0]);
    for refused in [&[a, b, c, c][..], &[a, a, a, a], &[c, BlockId::NULL, free]] {
        assert!(matches!(pool.release(refused), Err(Error::InvalidBlock(_))));
        assert_eq!(references(), [3, 2, 1, 0]);
        pool.audit().unwrap();
    }
    let larger = self::pool(100, 4);
    let foreign = larger.block(99).unwrap();
    assert!(matches!(pool.share(&[a, foreign]), Err(Error::InvalidBlock(_))));
    assert!(matches!(pool.release(&[a, foreign]), Err(Error::InvalidBlock(_))));
    assert!(matches!(pool.ref_count(foreign), Err(Error::InvalidBlock(_))));
    assert!(pool.block(-1).is_err() && pool.block(9).is_err() && pool.block(i64::MAX).is_err());
    pool.release(&[a, BlockId::NULL, b, a, c, b, a]).unwrap();
    assert_all_free(&pool);
}

#[test]
fn references_of_tables_are_out_of_reach() {
    let pool = pool(8, 4);
    let blocks = pool.allocate(2).unwrap();
    assert!(pool.table_of(&blocks, 4).is_err(), "one block too many");
    assert!(pool.table_of(&[blocks[0], blocks[0], blocks[0]], 12).is_err(), "lent once");
    assert!(pool.table_of(&[BlockId::NULL], 4).is_err());
    let mut table = pool.table_of(&blocks, 6).unwrap();
    assert!(pool.release(&blocks).is_err());
    pool.share(&[blocks[1]]).unwrap();
    assert!(pool.release(&[blocks[1], blocks[1]]).is_err());
    // The lent reference makes the last block shared: it is copied before it is written.
    assert_eq!(table.append(1).unwrap().map(|copy| copy.0), Some(blocks[1]));
    assert_eq!(table.append(1).unwrap(), None);
    drop(table);
    assert_eq!(pool.ref_count(blocks[1]).unwrap(), 1);
    pool.audit().unwrap();
    pool.release(&[blocks[1]]).unwrap();
    assert_all_free(&pool);
}

#[test]
fn a_refused_append_changes_nothing() {
    let pool = pool(4, 4);
    let mut table = pool.table();
    table.append(6).unwrap();
    let fork = table.fork(None).unwrap();
    assert!(matches!(table.append(7), Err(Error::OutOfBlocks { needed: 3, free: 2, .. })));
    for huge in [usize::MAX, i64::MAX as usize, i64::MAX as usize - 6] {
        assert!(table.append(huge).is_err());
    }
    assert_eq!((table.num_tokens(), table.blocks()), (6, fork.blocks()));
    assert_eq!(table.append(6).unwrap().map(|copy| copy.0), Some(fork.blocks()[1]));
    assert!(table.fork(Some(13)).is_err() && table.slots(3, 2).is_err() && table.slots(0, 13).is_err());
    assert!(table.locate(usize::MAX).is_err() && table.truncate(13).is_err());
    drop((table, fork));
    assert_all_free(&pool);
}

#[test]
fn discarding_and_truncating_give_each_block_back_once() {
    let pool = pool(8, 4);
    let mut table = pool.table();
    table.append(30).unwrap();
    table.discard_before(13).unwrap();
    table.discard_before(4).unwrap();
    assert_eq!((table.blocks().iter().filter(|block| block.is_null()).count(), pool.num_free()), (3, 3));
    pool.audit().unwrap();
    assert!(table.truncate(11).is_err() && table.fork(Some(11)).is_err());
    let fork = table.fork(Some(12)).unwrap();
    table.truncate(17).unwrap();
    assert_eq!((table.num_empty_slots(), pool.num_free()), (3, 6));
    table.truncate(12).unwrap();
    drop(fork);
    pool.audit().unwrap();
    assert_eq!(table.append(1).unwrap(), None);
    drop(table);
    assert_all_free(&pool);
}

#[test]
fn more_references_than_can_be_counted_are_refused() {
    let pool = pool(4, 4);
    let mut table = pool.table();
    table.append(2).unwrap();
    let block = table.blocks()[0];
    let many = vec![block; MOST_REFERENCES - 1];
    pool.share(&many).unwrap();
    let overflow = Error::RefCountOverflow { block, max: MOST_REFERENCES as u32 };
    assert_eq!(pool.share(&[block]), Err(overflow.clone()));
    assert_eq!(table.fork(None).err(), Some(overflow));
    assert_eq!(pool.ref_count(block).unwrap() as usize, MOST_REFERENCES);
    pool.release(&many[..1]).unwrap();
    assert!(pool.share(&many[..2]).is_err());
    assert_eq!(pool.ref_count(block).unwrap() as usize, MOST_REFERENCES - 1);
    pool.release(&many[1..]).unwrap();
    drop(table);
    assert_all_free(&pool);
}

#[test]
fn a_plan_cannot_hold_a_block_whose_references_are_at_their_most() {
    let pool = pool(8, 2);
    let batch = Batch::new(&pool, 4, 64).unwrap();
    let sequence = |tokens: &[i32]| pool.sequence(tokens, &Context::default(), true, true).unwrap();
    let compute = |row: usize| {
        batch
            .plan(&PlanRequest { rows: Some(&[row]), ..PlanRequest::default() })
            .unwrap()
            .commit(None)
            .unwrap();
    };
    // Two rows that are to find a prefix later, the first an idle one.
    let (early, late) = (sequence(&[5, 6, 7]), sequence(&[1, 2, 3]));
    batch.add(&early).unwrap();
    batch.add(&late).unwrap();
    for tokens in [[5, 6, 7], [8, 9, 7]] {
        let one = sequence(&tokens);
        compute(batch.add(&one).unwrap());
        one.free().unwrap();
    }
    let first = sequence(&[1, 2, 3]);
    compute(batch.add(&first).unwrap());
    let block = first.blocks().unwrap()[0];
    let many = vec![block; MOST_REFERENCES - 1];
    pool.share(&many).unwrap();
    let overflow = Error::RefCountOverflow { block, max: MOST_REFERENCES as u32 };
    assert_eq!(batch.plan(&PlanRequest::default()).err(), Some(overflow));
    pool.audit().unwrap();
    pool.release(&many).unwrap();
    // What was found for the first row has its old place in the order of eviction again.
    let taken = pool.allocate(pool.num_blank() + 1).unwrap();
    let found = [[5, 6], [8, 9]].map(|tokens| pool.match_prefix(&tokens, &Context::default()).unwrap());
    assert_eq!(found, [0, 2]);
    pool.release(&taken).unwrap();
    batch.plan(&PlanRequest::default()).unwrap().commit(None).unwrap();
    assert_eq!((early.num_cached().unwrap(), late.num_cached().unwrap()), (0, 2));
}

#[test]
fn a_refused_plan_leaves_what_is_in_flight_uncomputed() {
    let pool = pool(8, 2);
    let batch = Batch::new(&pool, 4, 64).unwrap();
    let sequence = |tokens: &[i32]| pool.sequence(tokens, &Context::default(), true, true).unwrap();
    let (flying, late, first) = (sequence(&[7, 7, 7]), sequence(&[1, 2, 3]), sequence(&[1, 2]));
    for sequence in [&flying, &late, &first] {
        batch.add(sequence).unwrap();
    }
    let rows = |rows| batch.plan(&PlanRequest { rows: Some(rows), ..PlanRequest::default() });
    rows(&[2]).unwrap().commit(None).unwrap();
    let many = vec![first.blocks().unwrap()[0]; MOST_REFERENCES - 1];
    pool.share(&many).unwrap();
    let step = rows(&[0]).unwrap();
    flying.extend(NewTokens::Known(&[8], &[])).unwrap();
    assert!(matches!(rows(&[0, 1]).err(), Some(Error::RefCountOverflow { .. })));
    assert_eq!((flying.num_computed().unwrap(), flying.num_cached().unwrap()), (0, 0));
    step.rollback().unwrap();
    pool.release(&many).unwrap();
    drop((flying, late, first, step, batch));
    assert_all_free(&pool);
}

#[test]
fn a_rollback_finds_room_for_the_reference_that_it_takes_back() {
    let pool = pool(8, 4);
    let batch = Batch::new(&pool, 4, 64).unwrap();
    let parent = pool.sequence(&[1, 2], &Context::default(), false, false).unwrap();
    let row = batch.add(&parent).unwrap();
    batch.plan(&PlanRequest::default()).unwrap().commit(None).unwrap();
    let fork = parent.fork().unwrap();
    let source = parent.blocks().unwrap()[0];
    batch.extend(&[row], &[3]).unwrap();
    let plan = batch.plan(&PlanRequest::default()).unwrap();
    assert_eq!(plan.arrays().copies()[0][0], source.as_i32());
    let many = vec![source; MOST_REFERENCES];
    pool.share(&many[2..]).unwrap();
    assert!(pool.share(&many[..1]).is_err(), "one is kept for what the plan holds");
    plan.rollback().unwrap();
    pool.audit().unwrap();
    pool.release(&many[2..]).unwrap();
    assert_eq!(pool.ref_count(source).unwrap(), 2);
    fork.free().unwrap();
    parent.free().unwrap();
    assert_all_free(&pool);
}

#[test]
fn what_is_dropped_gives_everything_back_once() {
    let pool = pool(16, 2);
    let batch = Batch::new(&pool, 4, 64).unwrap();
    let handles: Vec<_> = (0..4)
        .map(|n| pool.sequence(&[n, n + 1, n + 2, 9, 9], &Context::default(), true, true).unwrap())
        .collect();
    for sequence in &handles {
        batch.add(sequence).unwrap();
    }
    let first = batch.plan(&PlanRequest::default()).unwrap();
    batch.extend(&[0, 1, 2, 3], &[5, 5, 5, 5]).unwrap();
    let second = batch.plan(&PlanRequest::default()).unwrap();
    handles[0].free().unwrap();
    drop(batch.remove(1).unwrap());
    drop(batch.preempt(2).unwrap());
    drop(handles);
    assert_eq!(counts(&pool), [4, 0, 3, 9]);
    pool.audit().unwrap();
    drop(second); // its turn has not come
    assert_eq!(counts(&pool), [4, 0, 3, 9]);
    drop(first);
    assert_eq!(counts(&pool), [16, 0, 0, 0].map(|n: usize| n));
    drop(batch);
    assert_all_free(&pool);
}

#[test]
fn a_plan_outlives_its_batch() {
    let pool = pool(16, 2);
    let batch = Batch::new(&pool, 4, 64).unwrap();
    let sequence = pool.sequence(&[1, 2, 3], &Context::default(), true, true).unwrap();
    batch.add(&sequence).unwrap();
    drop(sequence);
    let plan = batch.plan(&PlanRequest::default()).unwrap();
    drop(batch);
    assert_eq!(pool.num_referenced(), 2);
    plan.commit(None).unwrap();
    assert_eq!(plan.extend(&[7]).unwrap(), [true]);
    let arrays = plan.arrays().clone();
    drop(plan);
    assert_eq!(arrays.slot_mapping(), [2, 3, 4]);
    assert_all_free(&pool);
}

#[test]
fn a_long_sequence_is_dropped_on_a_small_stack() {
    let pool = pool(1 << 20, 16);
    let work = {
        let pool = pool.clone();
        move || {
            let tokens: Vec<_> = (0..1_000_000).collect();
            let batch = Batch::new(&pool, 1, tokens.len()).unwrap();
            let sequence = pool.sequence(&tokens, &Context::default(), false, true).unwrap();
            batch.add(&sequence).unwrap();
            let plan = batch.plan(&PlanRequest::default()).unwrap();
            plan.commit(None).unwrap();
            let mut table = pool.table();
            table.append(15_000_000).unwrap();
            let fork = sequence.fork().unwrap();
            drop((sequence, batch, plan, table, fork));
        }
    };
    std::thread::Builder::new().stack_size(256 << 10).spawn(work).unwrap().join().unwrap();
    assert_all_free(&pool);
}

#[test]
fn a_pool_can_have_sixteen_million_blocks() {
    let pool = pool(1 << 24, 16);
    let mut table = pool.table();
    table.append(1 << 28).unwrap();
    assert_eq!(pool.num_free(), 0);
    assert_eq!(table.slots((1 << 28) - 1, 1 << 28).unwrap(), [(1 << 28) + 15]);
    assert!(table.append(1).is_err());
    drop(table);
    assert_eq!(pool.num_free(), 1 << 24);
}

#[test]
fn sizes_that_no_machine_has_are_refused_or_cost_nothing() {
    assert!(BlockPool::new(0, 4, true).is_err() && BlockPool::new(4, 0, true).is_err());
    assert!(BlockPool::new(usize::MAX, 4, true).is_err() && BlockPool::new(4, usize::MAX, true).is_err());
    let pool = pool(4, 4);
    let most = i32::MAX as usize;
    assert!(Batch::new(&pool, most + 1, 4).is_err() && Batch::new(&pool, 4, most + 1).is_err());
    let batch = Batch::new(&pool, most, most).unwrap();
    let sequence = pool.sequence(&[1], &Context::default(), true, true).unwrap();
    assert_eq!(batch.add(&sequence).unwrap(), 0);
    assert!(batch.remove(most - 1).is_err());
    batch.plan(&PlanRequest::default()).unwrap().commit(None).unwrap();
    assert!(sequence.extend(NewTokens::Unknown(usize::MAX)).is_err());
}

#[test]
fn extras_lie_anywhere_and_behind_what_is_there() {
    let pool = pool(8, 2);
    assert!(Extra::new(usize::MAX, 0, b"x").is_err());
    let far = [Extra::new(0, usize::MAX, b"x").unwrap(), Extra::new(3, 1 << 63, b"y").unwrap()];
    let context = Context::default().with_extras(far.to_vec());
    pool.sequence(&[1, 2, 3, 4], &context, true, true).unwrap();
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &context).unwrap(), 0);
    let batch = Batch::new(&pool, 1, 16).unwrap();
    let sequence = pool.sequence(&[1, 2, 3, 4], &context, true, true).unwrap();
    batch.add(&sequence).unwrap();
    batch.plan(&PlanRequest::default()).unwrap().commit(None).unwrap();
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &context).unwrap(), 4);
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 0);
    let unsorted = [Extra::new(6, 8, b"z").unwrap(), Extra::new(1, 3, b"z").unwrap()];
    assert!(matches!(sequence.extend(NewTokens::Known(&[5], &unsorted)), Err(Error::Argument(_))));
    assert_eq!(sequence.num_tokens().unwrap(), 4);
}
