//! How often blocks are hashed: once in a sequence's life, its forks included.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use super::{Batch, PlanRequest};
use crate::{BlockPool, Context, NewTokens, Plan, Sequence, key::counting::hashed};

fn setup() -> (BlockPool, Batch) {
    let pool = BlockPool::new(64, 4, true).unwrap();
    let batch = Batch::new(&pool, 8, 256).unwrap();
    (pool, batch)
}

fn sequence(pool: &BlockPool, num_tokens: i32) -> Sequence {
    let tokens: Vec<_> = (0..num_tokens).collect();
    pool.sequence(&tokens, &Context::default(), true, true).unwrap()
}

fn plan(batch: &Batch) -> Plan {
    batch.plan(&PlanRequest::default()).unwrap()
}

#[test]
fn admission_retries_and_preemption_hash_nothing_again() {
    let (pool, batch) = setup();
    let one = sequence(&pool, 41);
    let hashes = hashed(|| {
        assert_eq!(pool.blocks_needed(&one), Ok(11));
        batch.add(&one).unwrap();
        let taken = pool.allocate(60).unwrap();
        for _ in 0..3 {
            assert!(batch.plan(&PlanRequest::default()).is_err());
            batch.shortfall(&PlanRequest::default()).unwrap();
        }
        pool.release(&taken).unwrap();
        plan(&batch).rollback().unwrap();
        plan(&batch).commit(None).unwrap();
        for _ in 0..3 {
            batch.preempt(0).unwrap();
            assert_eq!(pool.blocks_needed(&one), Ok(11));
            batch.add(&one).unwrap();
            plan(&batch).commit(None).unwrap();
            batch.remove(0).unwrap();
            batch.add(&one).unwrap();
        }
        pool.reset_prefix_cache();
        batch.preempt(0).unwrap();
        batch.add(&one).unwrap();
        plan(&batch).commit(None).unwrap();
    });
    assert_eq!((hashes, one.num_computed().unwrap()), (10, 41));
}

#[test]
fn decoding_hashes_each_block_when_it_is_full() {
    let (pool, batch) = setup();
    let one = sequence(&pool, 6);
    let hashes = hashed(|| {
        batch.add(&one).unwrap();
        for token in 0..34 {
            batch.extend(&[0], &[token]).unwrap();
            plan(&batch).commit(None).unwrap();
        }
        // Ahead of the tokens, which come late.
        for token in 0..8 {
            batch.extend_unknown(&[0]).unwrap();
            let step = plan(&batch);
            step.commit(None).unwrap();
            one.resolve(&[token]).unwrap();
        }
    });
    assert_eq!((one.num_tokens().unwrap(), hashes), (48, 12));
}

#[test]
fn forks_hash_what_they_have_in_common_once() {
    for computed in [false, true] {
        let (pool, batch) = setup();
        let parent = sequence(&pool, 42);
        let hashes = hashed(|| {
            if computed {
                batch.add(&parent).unwrap();
                plan(&batch).commit(None).unwrap();
            }
            let forks: Vec<_> = (0..4).map(|_| parent.fork().unwrap()).collect();
            if !computed {
                batch.add(&parent).unwrap();
            }
            for fork in &forks {
                batch.add(fork).unwrap();
            }
            plan(&batch).commit(None).unwrap();
            for row in [1, 2, 3, 4] {
                batch.preempt(row).unwrap();
            }
            for fork in &forks {
                batch.add(fork).unwrap();
            }
            plan(&batch).commit(None).unwrap();
            batch.reorder(&[2, 2], Some(&[3, 4])).unwrap();
            plan(&batch).commit(None).unwrap();
        });
        assert_eq!(hashes, 10, "computed before the forks: {computed}");
    }
}

#[test]
fn a_cut_costs_the_blocks_that_it_cuts() {
    let (pool, batch) = setup();
    let one = sequence(&pool, 40);
    batch.add(&one).unwrap();
    plan(&batch).commit(None).unwrap();
    let hashes = hashed(|| {
        one.truncate(33).unwrap();
        one.extend(NewTokens::Known(&[1, 2, 3, 4, 5, 6, 7], &[])).unwrap();
        plan(&batch).commit(None).unwrap();
    });
    assert_eq!(hashes, 2); // blocks 8 and 9 of ten
    let hashes = hashed(|| {
        batch.extend(&[0], &[5]).unwrap();
        one.extend(NewTokens::Known(&[6, 7, 8], &[])).unwrap();
        plan(&batch).commit(Some(&[2])).unwrap(); // two drafts are refused
        one.extend(NewTokens::Known(&[9, 9], &[])).unwrap();
        plan(&batch).commit(None).unwrap();
    });
    assert_eq!(hashes, 1);
}
