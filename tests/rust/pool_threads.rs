//! Threads on one pool: nobody gets what somebody has, nothing is lost, all counts hold afterwards.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod common;

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use common::assert_all_free;
use kvfolio::{Batch, BlockId, BlockPool, Context, Error, NewTokens, PlanRequest, Sequence};

const ROUNDS: u64 = if cfg!(debug_assertions) { 4_000 } else { 60_000 };

/// Xorshift; good enough to shake things up.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % n
    }
}

/// Who owns each block, as the owners see it.
struct Owners(Vec<AtomicU64>);

impl Owners {
    fn of(pool: &BlockPool) -> Self {
        Self((0..pool.num_physical_blocks()).map(|_| AtomicU64::new(0)).collect())
    }

    fn swap(&self, blocks: &[BlockId], from: u64, to: u64) {
        for block in blocks {
            let before = self.0[block.as_i32() as usize].swap(to, Ordering::Relaxed);
            assert_eq!(before, from, "block {} has two owners", block.as_i32());
        }
    }
}

fn sequence(pool: &BlockPool, tokens: &[i32]) -> Sequence {
    pool.sequence(tokens, &Context::default(), true, true).unwrap()
}

#[test]
fn no_block_has_two_owners() {
    let pool = BlockPool::new(48, 4, true).unwrap();
    let owners = Owners::of(&pool);
    let work = |me: u64| {
        let mut random = Random(me * 0x9e37_79b9);
        let mut held: Vec<Vec<BlockId>> = Vec::new();
        let mut table = pool.table();
        let mut own: Vec<BlockId> = Vec::new();
        for _ in 0..ROUNDS {
            match random.below(6) {
                0..2 => {
                    if let Ok(blocks) = pool.allocate(random.below(9)) {
                        owners.swap(&blocks, 0, me);
                        held.push(blocks);
                    }
                }
                2 if !held.is_empty() => {
                    let blocks = &held[random.below(held.len())];
                    pool.share(blocks).unwrap();
                    pool.release(blocks).unwrap();
                }
                3 if table.num_tokens() < 60 => {
                    if table.append(random.below(10)).is_ok() {
                        owners.swap(&table.blocks()[own.len()..], 0, me);
                        own = table.blocks().to_vec();
                    }
                }
                4 => {
                    // A fork that writes gets a copy of its own.
                    let mut fork = table.fork(None).unwrap();
                    if let Ok(Some((source, target))) = fork.append(1) {
                        assert_eq!(Some(&source), own.last());
                        owners.swap(&[target], 0, me);
                        owners.swap(&[target], me, 0);
                    } else {
                        let fresh = &fork.blocks()[own.len()..];
                        owners.swap(fresh, 0, me);
                        owners.swap(fresh, me, 0);
                    }
                    if random.below(3) == 0 {
                        drop(fork);
                        owners.swap(&own, me, 0);
                        own.clear();
                        table = pool.table();
                    }
                }
                _ if !held.is_empty() => {
                    let blocks = held.swap_remove(random.below(held.len()));
                    owners.swap(&blocks, me, 0);
                    pool.release(&blocks).unwrap();
                }
                _ => thread::yield_now(),
            }
        }
        owners.swap(&own, me, 0);
        for blocks in &held {
            owners.swap(blocks, me, 0);
            pool.release(blocks).unwrap();
        }
    };
    thread::scope(|scope| (1..=4).for_each(|me| drop(scope.spawn(move || work(me)))));
    assert_all_free(&pool);
}

#[test]
fn batches_with_common_prompts_share_one_pool() {
    let pool = BlockPool::new(40, 2, true).unwrap();
    let done = AtomicBool::new(false);
    let serve = |me: u64| {
        let mut random = Random(me * 0x9e37_79b9);
        let batch = Batch::new(&pool, 3, 40).unwrap();
        let mut plans = std::collections::VecDeque::new();
        for _ in 0..ROUNDS / 4 {
            let rows = batch.rows().unwrap();
            if rows.len() < 3 {
                let start = random.below(2) as i32;
                let tokens: Vec<_> = (start..start + 3 + random.below(12) as i32).collect();
                batch.add(&sequence(&pool, &tokens)).unwrap();
            }
            for row in rows {
                if random.below(6) == 0 {
                    drop(batch.preempt(row).unwrap());
                } else if random.below(2) == 0 {
                    let _ = batch.extend(&[row], &[random.below(2) as i32]);
                }
            }
            match batch.plan(&PlanRequest { partial: random.below(2) == 0, ..PlanRequest::default() }) {
                Ok(plan) => plans.push_back(plan),
                Err(Error::OutOfBlocks { .. }) => {
                    batch.rows().unwrap().into_iter().for_each(|row| drop(batch.remove(row).unwrap()));
                }
                Err(error) => panic!("{error}"),
            }
            while plans.len() > random.below(3) {
                let plan = plans.pop_front().unwrap();
                match random.below(5) {
                    0 => plan.rollback().unwrap(),
                    1 => drop(plan),
                    _ => plan.commit(None).unwrap(),
                }
            }
        }
    };
    thread::scope(|scope| {
        let servers: Vec<_> = (1..=3).map(|me| scope.spawn(move || serve(me))).collect();
        let disturber = scope.spawn(|| {
            let mut random = Random(77);
            while !done.load(Ordering::Relaxed) {
                if random.below(20) == 0 {
                    pool.reset_prefix_cache();
                }
                if let Ok(blocks) = pool.allocate(random.below(30)) {
                    pool.release(&blocks).unwrap();
                }
                pool.match_prefix(&[0, 1, 2, 3, 4, 5, 6, 7], &Context::default()).unwrap();
                thread::yield_now();
            }
        });
        let results: Vec<_> = servers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Relaxed);
        disturber.join().unwrap();
        results.into_iter().for_each(Result::unwrap);
    });
    assert_all_free(&pool);
    let stats = pool.stats();
    assert!(stats.merges > 0 && stats.evictions > 0 && stats.hit_tokens > 0, "{stats:?}");
}

/// What a call may answer while another thread uses the same things.
fn tolerate<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(
            Error::ConcurrentUse(_)
            | Error::PlanInFlight(_)
            | Error::OutOfBlocks { .. }
            | Error::BatchFull { .. }
            | Error::Argument(_)
            | Error::StaleHandle(_),
        ) => None,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn one_batch_in_many_hands_is_never_corrupted() {
    let pool = BlockPool::new(30, 2, true).unwrap();
    let batch = Batch::new(&pool, 4, 30).unwrap();
    let handles: Vec<_> = (0..6).map(|n| sequence(&pool, &[n % 2, 1, 2, 3, n])).collect();
    let work = |me: u64| {
        let mut random = Random(me * 0x9e37_79b9);
        for _ in 0..ROUNDS / 2 {
            let handle = &handles[random.below(6)];
            let row = random.below(4);
            match random.below(10) {
                0 => drop(tolerate(batch.add(handle))),
                1 => drop(tolerate(batch.preempt(row))),
                2 => drop(tolerate(batch.remove(row))),
                3 => drop(tolerate(batch.extend(&[row], &[random.below(2) as i32]))),
                4 => drop(tolerate(handle.truncate(random.below(6)))),
                5 => drop(tolerate(handle.fork())),
                6 => drop(tolerate(batch.reorder(&[row], Some(&[random.below(4)])))),
                7 => drop(tolerate(handle.discard_before(random.below(3)))),
                _ => {
                    if let Some(plan) =
                        tolerate(batch.plan(&PlanRequest { partial: true, ..PlanRequest::default() }))
                    {
                        let tokens = vec![1; plan.arrays().logits_rows().len()];
                        tolerate(plan.extend(&tokens));
                        tolerate(plan.commit(None));
                    }
                }
            }
        }
    };
    thread::scope(|scope| (1..=3).for_each(|me| drop(scope.spawn(move || work(me)))));
    pool.audit().unwrap();
    tolerate(batch.plan(&PlanRequest { rows: Some(&[]), ..PlanRequest::default() }))
        .unwrap()
        .commit(None)
        .unwrap();
    drop((handles, batch));
    assert_all_free(&pool);
}

#[test]
fn a_sequence_that_is_cut_while_its_token_comes_keeps_its_own_tokens() {
    let pool = BlockPool::new(8, 2, true).unwrap();
    for _ in 0..ROUNDS / 3 {
        let batch = Batch::new(&pool, 8, 64).unwrap();
        // The first row is the one that changes; the others make the call last.
        let sequences: Vec<_> = (0..8).map(|_| sequence(&pool, &[1])).collect();
        for one in &sequences {
            batch.add(one).unwrap();
        }
        let plan = batch.plan(&PlanRequest::default()).unwrap();
        plan.commit(None).unwrap();
        for row in 0..8 {
            batch.remove(row).unwrap();
        }
        let one = &sequences[0];
        thread::scope(|scope| {
            scope.spawn(|| while let Err(Error::ConcurrentUse(_)) = plan.extend(&[2; 8]) {});
            scope.spawn(|| {
                for _ in 0..40 {
                    let cut = one.truncate(0).is_ok();
                    if cut && one.extend(NewTokens::Known(&[5, 6, 7], &[])).is_ok() {
                        break;
                    }
                }
            });
        });
        let tokens = one.token_ids().unwrap();
        assert!([&[][..], &[5, 6, 7], &[1, 2]].contains(&&tokens[..]), "{tokens:?}");
    }
    assert_all_free(&pool);
}

#[test]
fn a_plan_that_is_dropped_while_its_batch_is_busy_gives_everything_back() {
    let pool = BlockPool::new(64, 2, true).unwrap();
    for _ in 0..ROUNDS / 40 {
        let batch = Batch::new(&pool, 16, 64).unwrap();
        let kept = sequence(&pool, &[1, 2, 3]);
        batch.add(&kept).unwrap();
        for n in 0..15 {
            batch.add(&sequence(&pool, &[n, 2, 3])).unwrap();
        }
        let plan = batch.plan(&PlanRequest::default()).unwrap();
        (1..16).for_each(|row| drop(batch.preempt(row).unwrap()));
        let kept = batch.remove(0).unwrap();
        let busy = AtomicBool::new(true);
        thread::scope(|scope| {
            scope.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    let _ = batch.shortfall(&PlanRequest::default());
                }
            });
            thread::yield_now();
            drop(plan);
            busy.store(false, Ordering::Relaxed);
        });
        drop(batch);
        assert_eq!(pool.num_quarantined(), 0);
        kept.truncate(1).unwrap();
    }
    assert_all_free(&pool);
}

#[test]
fn a_reset_that_comes_during_a_commit_forgets_what_it_publishes() {
    let pool = BlockPool::new(64, 2, true).unwrap();
    let batch = Batch::new(&pool, 1, 100).unwrap();
    let tokens: Vec<_> = (0..64).collect();
    for _ in 0..ROUNDS / 4 {
        let one = sequence(&pool, &tokens);
        batch.add(&one).unwrap();
        let plan = batch.plan(&PlanRequest::default()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| pool.reset_prefix_cache());
            plan.commit(None).unwrap();
        });
        assert_eq!(pool.match_prefix(&tokens, &Context::default()).unwrap(), 0);
        one.free().unwrap();
    }
    assert_all_free(&pool);
}
