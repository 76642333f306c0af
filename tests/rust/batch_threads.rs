//! Batches whose neighbours are at work at the same moment.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use kvfolio::{Batch, BlockPool, Context, Error, PlanRequest, Sequence};

const ROUNDS: usize = if cfg!(debug_assertions) { 100 } else { 400 };

fn sequence(pool: &BlockPool, tokens: &[i32]) -> Sequence {
    pool.sequence(tokens, &Context::default(), false, false).unwrap()
}

/// A batch whose calls take a while, since it has so many rows.
fn large_batch(pool: &BlockPool) -> Batch {
    let batch = Batch::new(pool, 2100, 64).unwrap();
    for _ in 0..2000 {
        batch.add(&sequence(pool, &[1, 2, 3, 4, 5])).unwrap();
    }
    batch
}

/// Does `work` while another thread is in the middle of calls on `batch`.
fn while_busy(batch: &Batch, work: impl FnOnce()) {
    let begun = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            begun.store(true, Ordering::Release);
            for _ in 0..10 {
                let _ = batch.shortfall(&PlanRequest::default()); // refused if `work` is in the batch
            }
        });
        while !begun.load(Ordering::Acquire) {
            thread::yield_now();
        }
        work();
    });
}

#[test]
fn a_plan_reaches_a_sequence_whose_new_batch_is_busy() {
    let pool = BlockPool::new(9000, 4, true).unwrap();
    let (busy, own) = (large_batch(&pool), Batch::new(&pool, 4, 64).unwrap());
    for round in 0..ROUNDS {
        let drafting = sequence(&pool, &[1, 2, 3, 4, 5]);
        own.add(&drafting).unwrap();
        let plan = own.plan(&PlanRequest::default()).unwrap();
        busy.add(&own.preempt(0).unwrap()).unwrap();
        while_busy(&busy, || {
            plan.commit((round % 2 == 0).then_some(&[2])).unwrap();
            assert_eq!(plan.extend(&[9]).unwrap(), [true]);
        });
        assert_eq!(drafting.num_tokens().unwrap(), if round % 2 == 0 { 3 } else { 6 });
        drafting.free().unwrap();
    }
}

#[test]
fn a_partial_plan_is_not_refused_for_what_others_take_meanwhile() {
    let pool = BlockPool::new(64, 1, true).unwrap();
    let batch = Batch::new(&pool, 64, 64).unwrap();
    let sequences: Vec<_> = (0..60).map(|_| sequence(&pool, &[1])).collect();
    for sequence in &sequences {
        batch.add(sequence).unwrap();
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if let Ok(blocks) = pool.allocate(30) {
                    pool.release(&blocks).unwrap();
                }
            }
        });
        for _ in 0..100 * ROUNDS {
            let planned = batch.plan(&PlanRequest { partial: true, ..PlanRequest::default() });
            planned
                .and_then(|plan| plan.rollback())
                .inspect_err(|_| stop.store(true, Ordering::Relaxed))
                .unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    pool.audit().unwrap();
}

#[test]
fn a_plan_that_is_dropped_while_its_batch_is_busy_ends_at_the_next_entry() {
    let pool = BlockPool::new(4096, 4, true).unwrap();
    let batch = large_batch(&pool);
    let first = batch.rows().unwrap()[0];
    for _ in 0..ROUNDS {
        let request = PlanRequest { rows: Some(&[first]), ..PlanRequest::default() };
        let plan = batch.plan(&request).unwrap();
        while_busy(&batch, || drop(plan));
        assert_eq!(batch.shortfall(&request), Ok(0)); // any call
        assert_eq!(pool.num_free(), 4096);
    }
}

#[test]
fn a_plan_that_was_given_up_cannot_be_committed_any_more() {
    let pool = BlockPool::new(16, 4, true).unwrap();
    let batch = Batch::new(&pool, 4, 64).unwrap();
    let row = batch.add(&sequence(&pool, &[1, 2, 3])).unwrap();
    let first = batch.plan(&PlanRequest::default()).unwrap();
    batch.extend(&[row], &[4]).unwrap();
    let second = batch.plan(&PlanRequest::default()).unwrap();
    second.abandon();
    assert!(matches!(second.commit(None), Err(Error::PlanInFlight(_))));
    first.commit(None).unwrap();
    assert!(matches!(second.commit(None), Err(Error::StaleHandle(_))));
    assert_eq!(pool.num_referenced(), 1);
}
