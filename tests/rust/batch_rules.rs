//! Rows and plans: turns, drops, drafts, rows that were taken again, arrays that stay.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod common;
#[path = "common/rules.rs"]
mod rules;

use std::sync::Arc;

use common::assert_all_free;
use kvfolio::{Batch, Context, Error, NewTokens, Plan, PlanArrays, PlanRequest, TokenCaps};
use rules::{counts, ids, plan, sequence, setup};

fn plan_at_most(batch: &Batch, num_tokens: usize) -> Plan {
    batch.plan(&PlanRequest { num_tokens: TokenCaps::Same(num_tokens), ..PlanRequest::default() }).unwrap()
}

#[test]
fn plans_end_in_the_order_they_were_made_and_once() {
    let (pool, batch) = setup(8, 2);
    let one = sequence(&pool, &[1, 2, 3, 4, 5]);
    batch.add(&one).unwrap();
    let (first, second) = (plan_at_most(&batch, 2), plan_at_most(&batch, 2));
    assert!(matches!(second.commit(None), Err(Error::PlanInFlight(_))));
    assert!(matches!(second.rollback(), Err(Error::PlanInFlight(_))));
    assert!(matches!(first.commit(Some(&[3])), Err(Error::Argument(_))));
    assert!(matches!(first.commit(Some(&[])), Err(Error::Argument(_))));
    first.commit(None).unwrap();
    assert!(matches!(first.commit(None), Err(Error::StaleHandle(_))));
    assert!(matches!(first.rollback(), Err(Error::StaleHandle(_))));
    second.rollback().unwrap();
    assert_eq!((one.num_computed().unwrap(), ids(&one).len()), (2, 1));
    one.free().unwrap();
    assert_eq!(counts(&pool), [7, 1, 0, 0]);
}

#[test]
fn dropped_plans_are_rolled_back_when_their_turn_comes() {
    let (pool, batch) = setup(8, 2);
    let one = sequence(&pool, &[1, 2, 3, 4, 5, 6]);
    batch.add(&one).unwrap();
    let plans: Vec<_> = (0..3).map(|_| plan_at_most(&batch, 2)).collect();
    let [first, second, third]: [Plan; 3] = plans.try_into().ok().unwrap();
    drop(second);
    assert_eq!(counts(&pool), [5, 0, 3, 0]);
    first.commit(None).unwrap(); // the second goes with it, and voids the third
    assert_eq!(counts(&pool), [5, 0, 1, 2]);
    assert_eq!((one.num_computed().unwrap(), ids(&one).len()), (2, 1));
    assert_eq!(third.extend(&[9]).unwrap(), [false]);
    third.commit(None).unwrap();
    assert_eq!((counts(&pool), one.num_computed().unwrap()), ([7, 0, 1, 0], 2));
}

#[test]
fn refused_drafts_take_back_what_later_plans_built_on_them() {
    let (pool, batch) = setup(8, 2);
    let (one, other) = (sequence(&pool, &[1, 2, 3, 4, 5]), sequence(&pool, &[7]));
    batch.add(&one).unwrap();
    batch.add(&other).unwrap();
    let first = plan_at_most(&batch, 4);
    batch.extend(&[1], &[8]).unwrap();
    let second = plan(&batch);
    let third = {
        batch.extend(&[0, 1], &[6, 9]).unwrap();
        plan(&batch)
    };
    assert_eq!(second.arrays().rows(), [0, 1]);
    first.commit(Some(&[3, 1])).unwrap();
    assert_eq!((one.token_ids().unwrap(), one.num_computed().unwrap()), (vec![1, 2, 3], 3));
    assert_eq!(ids(&one).len(), 2);
    assert_eq!(counts(&pool), [3, 0, 4, 1]);
    // The token behind the accepted ones was sampled in the second plan's stead.
    assert_eq!(second.extend(&[4, 9]).unwrap(), [false, false]);
    batch.extend(&[0], &[4]).unwrap();
    let fourth = plan(&batch);
    second.commit(None).unwrap();
    third.commit(None).unwrap();
    assert_eq!(other.num_computed().unwrap(), 3);
    assert_eq!(one.num_computed().unwrap(), 3);
    fourth.commit(None).unwrap();
    assert_eq!(fourth.extend(&[5]).unwrap(), [true]);
    assert_eq!(one.token_ids().unwrap(), [1, 2, 3, 4, 5]);
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 4);
    drop((one, other, batch));
    drop((first, second, third, fourth));
    assert_all_free(&pool);
}

#[test]
fn accepted_tokens_are_sampled_behind_and_refused_ones_not_published() {
    let (pool, batch) = setup(8, 2);
    let one = sequence(&pool, &[1, 2, 3, 4]);
    batch.add(&one).unwrap();
    let step = plan(&batch);
    step.commit(Some(&[2])).unwrap();
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 2);
    assert_eq!(step.extend(&[7]).unwrap(), [true]);
    assert_eq!(step.extend(&[8]).unwrap(), [false]);
    assert_eq!(one.token_ids().unwrap(), [1, 2, 7]);
}

#[test]
fn drafts_of_a_row_that_was_preempted_are_no_tokens() {
    let (pool, batch) = setup(8, 2);
    let one = sequence(&pool, &[1, 2, 3, 4, 5]);
    batch.add(&one).unwrap();
    let step = plan(&batch);
    let one = { batch.preempt(0).unwrap() };
    assert_eq!(counts(&pool), [5, 0, 0, 3]);
    batch.add(&one).unwrap();
    let again = plan_at_most(&batch, 4);
    step.commit(Some(&[2])).unwrap();
    assert_eq!((one.token_ids().unwrap(), ids(&one).len()), (vec![1, 2], 0));
    again.commit(None).unwrap();
    assert_eq!(counts(&pool), [8, 0, 0, 0]);
}

#[test]
fn a_rolled_back_copy_is_undone() {
    let (pool, batch) = setup(8, 4);
    let one = sequence(&pool, &[1, 2]);
    batch.add(&one).unwrap();
    plan(&batch).commit(None).unwrap();
    let fork = one.fork().unwrap();
    let before = (counts(&pool), ids(&one));
    batch.extend(&[0], &[3]).unwrap();
    let first = plan(&batch);
    let copy = first.arrays().copies()[0];
    assert_eq!((copy[0], copy[1] == ids(&one)[0]), (before.1[0], true));
    batch.extend(&[0], &[4]).unwrap();
    let second = plan(&batch);
    assert_eq!(second.arrays().copies(), [[0; 2]; 0]);
    drop(fork);
    assert_eq!(counts(&pool), [6, 0, 1, 1]); // the source stays until the copy is done
    first.rollback().unwrap();
    second.commit(None).unwrap();
    assert_eq!((counts(&pool), ids(&one)), ([7, 0, 1, 0], before.1));
}

#[test]
fn a_rollback_of_several_copies_voids_the_latest_first() {
    let (pool, batch) = setup(8, 4);
    let one = sequence(&pool, &[1, 2, 3]);
    batch.add(&one).unwrap();
    plan(&batch).commit(None).unwrap();
    let source = one.blocks().unwrap()[0];
    let table = {
        pool.share(&[source]).unwrap();
        pool.table_of(&[source], 3).unwrap()
    };
    batch.extend(&[0], &[4]).unwrap();
    let first = plan(&batch);
    batch.extend(&[0], &[5]).unwrap();
    let middle = plan(&batch);
    // Somebody takes the copy over in flight, so the next step copies again.
    let target = one.blocks().unwrap()[1];
    pool.share(&[target]).unwrap();
    batch.extend(&[0], &[6]).unwrap();
    let last = plan(&batch);
    assert_eq!((first.arrays().copies().len(), last.arrays().copies().len()), (1, 1));
    first.rollback().unwrap();
    assert_eq!(one.blocks().unwrap(), [source]);
    pool.audit().unwrap();
    middle.commit(None).unwrap();
    last.commit(None).unwrap();
    pool.release(&[target]).unwrap();
    drop((table, one, batch, first, middle, last));
    assert_all_free(&pool);
}

#[test]
fn a_block_that_a_plan_in_flight_holds_is_not_written() {
    let (pool, batch) = setup(8, 4);
    let one = sequence(&pool, &[1, 2, 3]);
    batch.add(&one).unwrap();
    plan(&batch).commit(None).unwrap();
    let fork = one.fork().unwrap();
    batch.extend(&[0], &[4]).unwrap();
    let copying = plan(&batch);
    let source = copying.arrays().copies()[0][0];
    assert_eq!(ids(&fork), [source]); // its sole reference; the plan is still to copy from it
    fork.truncate(2).unwrap();
    fork.extend(NewTokens::Known(&[9], &[])).unwrap();
    let elsewhere = Batch::new(&pool, 1, 64).unwrap();
    elsewhere.add(&fork).unwrap();
    let writing = plan(&elsewhere);
    assert_eq!(writing.arrays().copies()[0][0], source);
    assert_eq!(counts(&pool), [5, 0, 2, 1]);
    writing.commit(None).unwrap();
    copying.rollback().unwrap();
    assert_eq!((ids(&one), counts(&pool)), (vec![source], [6, 0, 2, 0]));
}

#[test]
fn refused_drafts_undo_later_steps_the_latest_first() {
    let (pool, batch) = setup(8, 4);
    let one = sequence(&pool, &[1, 2, 3, 4]);
    batch.add(&one).unwrap();
    let drafts = plan(&batch);
    batch.extend(&[0], &[5]).unwrap();
    let middle = plan(&batch);
    let blocks = one.blocks().unwrap();
    pool.share(&blocks[1..]).unwrap();
    batch.extend(&[0], &[6]).unwrap();
    let last = plan(&batch);
    assert_eq!(last.arrays().copies()[0][0], blocks[1].as_i32());
    drafts.commit(Some(&[3])).unwrap();
    assert_eq!(one.blocks().unwrap(), blocks[..1]);
    middle.commit(None).unwrap();
    last.rollback().unwrap();
    assert_eq!(counts(&pool), [6, 0, 2, 0]);
}

#[test]
fn a_token_never_goes_to_the_new_owner_of_a_row() {
    let (pool, batch) = setup(16, 2);
    let one = sequence(&pool, &[1, 2, 3]);
    batch.add(&one).unwrap();
    let step = plan(&batch);
    let one = batch.remove(0).unwrap();
    let other = sequence(&pool, &[4, 5]);
    assert_eq!(batch.add(&other).unwrap(), 0);
    assert!(matches!(batch.add(&one), Err(Error::PlanInFlight(_))));
    let elsewhere = Batch::new(&pool, 1, 64).unwrap();
    assert!(matches!(elsewhere.add(&one), Err(Error::PlanInFlight(_))));
    assert!(matches!(one.truncate(1), Err(Error::PlanInFlight(_))));
    step.commit(None).unwrap();
    assert_eq!(elsewhere.add(&one).unwrap(), 0);
    assert_eq!(step.extend(&[9]).unwrap(), [true]); // found where it is now
    assert_eq!((one.token_ids().unwrap(), other.token_ids().unwrap()), (vec![1, 2, 3, 9], vec![4, 5]));
    let step = plan(&batch);
    step.commit(None).unwrap();
    other.free().unwrap();
    batch.add(&sequence(&pool, &[4, 5])).unwrap();
    assert_eq!(step.extend(&[9]).unwrap(), [false]);
}

#[test]
fn a_sequence_whose_blocks_a_plan_still_names_joins_no_other_batch() {
    let (pool, batch) = setup(16, 2);
    let one = sequence(&pool, &[1, 2, 3]);
    batch.add(&one).unwrap();
    plan_at_most(&batch, 1).commit(None).unwrap();
    let (first, second) = (plan_at_most(&batch, 1), plan_at_most(&batch, 1));
    first.rollback().unwrap(); // voids the second's row, which is still to be executed
    let one = batch.remove(0).unwrap();
    let elsewhere = Batch::new(&pool, 1, 64).unwrap();
    assert!(matches!(elsewhere.add(&one), Err(Error::PlanInFlight(_))));
    second.rollback().unwrap();
    elsewhere.add(&one).unwrap();
}

#[test]
fn a_token_is_passed_over_where_the_batch_knows_another() {
    let (pool, batch) = setup(16, 2);
    let one = sequence(&pool, &[1, 2, 3]);
    batch.add(&one).unwrap();
    let first = plan(&batch);
    batch.extend_unknown(&[0]).unwrap();
    let second = plan(&batch);
    assert_eq!(second.arrays().token_ids(), [-1]);
    first.commit(None).unwrap();
    second.commit(None).unwrap();
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 2);
    one.extend(NewTokens::Known(&[5], &[])).unwrap();
    assert_eq!(second.extend(&[6]).unwrap(), [false]);
    assert_eq!(first.extend(&[4]).unwrap(), [true]);
    assert_eq!(one.token_ids().unwrap(), [1, 2, 3, 4, 5]);
    assert_eq!(pool.match_prefix(&[1, 2, 3, 4], &Context::default()).unwrap(), 4);
}

#[test]
fn a_rollback_gives_up_what_was_found() {
    let (pool, batch) = setup(8, 2);
    let late = sequence(&pool, &[1, 2, 3]);
    batch.add(&late).unwrap();
    let row = batch.add(&sequence(&pool, &[1, 2, 4])).unwrap();
    batch.plan(&PlanRequest { rows: Some(&[row]), ..PlanRequest::default() }).unwrap().commit(None).unwrap();
    let (before, hits) = (counts(&pool), pool.stats().hit_tokens);
    let step = plan(&batch);
    assert_eq!((late.num_cached().unwrap(), pool.stats().hit_tokens), (2, hits + 2));
    step.rollback().unwrap();
    assert_eq!((late.num_cached().unwrap(), ids(&late).len()), (0, 0));
    assert_eq!((counts(&pool), pool.stats().hit_tokens), (before, hits));
}

#[test]
fn a_copy_for_the_sake_of_a_row_of_the_same_plan_is_counted() {
    let (pool, batch) = setup(3, 2);
    let late = sequence(&pool, &[1, 2, 3]);
    let one = sequence(&pool, &[1, 2]);
    batch.add(&late).unwrap();
    let row = batch.add(&one).unwrap();
    batch.plan(&PlanRequest { rows: Some(&[row]), ..PlanRequest::default() }).unwrap().commit(None).unwrap();
    one.truncate(1).unwrap();
    batch.extend(&[row], &[9]).unwrap();
    let taken = pool.allocate(1).unwrap();
    assert_eq!(batch.shortfall(&PlanRequest::default()).unwrap(), 1);
    let refused = Error::OutOfBlocks { needed: 2, free: 1, quarantined: 0, ever_fits: true };
    assert_eq!(batch.plan(&PlanRequest::default()).err(), Some(refused));
    pool.release(&taken).unwrap();
    assert_eq!(plan(&batch).arrays().copies().len(), 1);
}

/// Numbers, places, rows of the block table, rows of the CSR.
type Copied = (Vec<i32>, Vec<i64>, Vec<Vec<i32>>, Vec<Vec<i32>>);

fn copy(arrays: &PlanArrays) -> Copied {
    let (cells, width, stride) = arrays.block_table();
    let table: Vec<_> = (0..arrays.rows().len()).map(|row| cells[row * stride..][..width].to_vec()).collect();
    let csr = arrays.csr();
    let rows = csr.indptr.windows(2).map(|ends| csr.indices[ends[0] as usize..ends[1] as usize].to_vec());
    let numbers = [arrays.rows(), arrays.token_ids(), arrays.seq_lens(), arrays.last_page_len()].concat();
    let places = [arrays.positions(), arrays.slot_mapping(), arrays.logits_indices()].concat();
    (numbers, places, table, rows.collect())
}

#[test]
fn arrays_stay_as_they_are_and_csr_says_the_same() {
    let (pool, batch) = setup(40, 2);
    let mut held: Vec<(Arc<PlanArrays>, _)> = Vec::new();
    for step in 0..130 {
        let rows = batch.rows().unwrap();
        if rows.len() < 4 && step % 3 != 1 {
            batch.add(&sequence(&pool, &[step, 1, 2, 3, 4, 5, 6][..=(step as usize % 7)])).unwrap();
        }
        for row in batch.rows().unwrap() {
            if (step as usize + row).is_multiple_of(9) {
                batch.preempt(row).unwrap();
            } else {
                batch.extend(&[row], &[step]).unwrap();
            }
        }
        let skipped = step as usize % 4;
        let rows: Vec<_> = batch.rows().unwrap().into_iter().filter(|row| *row != skipped).collect();
        let request = PlanRequest { rows: Some(&rows), partial: true, ..PlanRequest::default() };
        let plan = batch.plan(&request).unwrap();
        let arrays = Arc::clone(plan.arrays());
        let copied = copy(&arrays);
        for (row, pages) in copied.2.iter().zip(&copied.3) {
            assert_eq!(row[..pages.len()], pages[..], "csr");
            assert!(row[pages.len()..].iter().all(|cell| *cell == 0) && !pages.contains(&0), "padding");
        }
        for (index, length) in arrays.seq_lens().iter().enumerate() {
            let last = arrays.query_start_loc()[index + 1] as usize - 1;
            let pages = &copied.3[index];
            assert_eq!(pages.len(), (*length as usize).div_ceil(2));
            let slot = i64::from(pages[pages.len() - 1]) * 2 + i64::from(arrays.last_page_len()[index]) - 1;
            assert_eq!(arrays.slot_mapping()[last], slot);
        }
        if step < 12 {
            held.push((arrays, copied));
        }
        plan.commit(None).unwrap();
    }
    for (arrays, copied) in &held {
        assert_eq!(&copy(arrays), copied);
    }
}

/// What follows from the rows alone is kept from plan to plan, so it has to change when they do.
#[test]
fn plans_name_the_rows_of_their_own_step() {
    let (pool, batch) = setup(64, 4);
    let steps = |expected: &[i32]| {
        // Arrays of several plans are used in turn.
        for _ in 0..5 {
            let plan = plan(&batch);
            let (arrays, n) = (plan.arrays(), expected.len() as i32);
            assert_eq!((arrays.rows(), arrays.logits_rows()), (expected, expected));
            assert_eq!(arrays.query_start_loc(), (0..=n).collect::<Vec<_>>());
            assert_eq!(arrays.logits_indices(), (0..i64::from(n)).collect::<Vec<_>>());
            let before = arrays.positions().iter().zip(arrays.seq_lens());
            assert!(before.clone().all(|(position, seq_len)| position + 1 == i64::from(*seq_len)));
            assert_eq!(arrays.max_seq_len() as i32, *arrays.seq_lens().iter().max().unwrap());
            plan.commit(None).unwrap();
            plan.extend(&vec![7; expected.len()]).unwrap();
        }
    };
    let add = |first| {
        let sequence = sequence(&pool, &[first]);
        batch.add(&sequence).unwrap();
        sequence
    };
    let [_a, b, _c] = [add(1), add(2), add(3)];
    steps(&[0, 1, 2]);
    batch.remove(1).unwrap();
    steps(&[0, 2]);
    batch.add(&b).unwrap();
    steps(&[0, 2, 1]);
    let _d = add(4);
    steps(&[0, 2, 1, 3]);
    // A row that has nothing to plan does not take part.
    let plan = plan(&batch);
    plan.commit(None).unwrap();
    batch.extend(&[0, 1, 3], &[8, 8, 8]).unwrap();
    let some = batch.plan(&PlanRequest::default()).unwrap();
    assert_eq!(some.arrays().rows(), [0, 1, 3]);
    some.commit(None).unwrap();
    drop((plan, some)); // whose arrays come next
    batch.extend(&[2, 1, 3], &[8, 8, 8]).unwrap();
    let others = batch.plan(&PlanRequest::default()).unwrap();
    assert_eq!(others.arrays().rows(), [2, 1, 3]);
    others.commit(None).unwrap();
}
