//! Two and three batches on one pool whose plans are executed late, and the same from several threads.
//!
//! A run follows from its seed. `KVFOLIO_SEEDS=5000` runs seeds 0 to 4999 of each test, `KVFOLIO_SEEDS=17..18`
//! seed 17 alone; a failure tells its seed.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod common;
#[path = "common/world.rs"]
mod world;

use std::{
    ops::Range,
    sync::{Arc, Barrier},
    thread,
};

use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

use self::world::{Memory, Op, World, ops, pool_of};

const THREADS: usize = 4;

fn seeds(by_default: u64) -> Range<u64> {
    let Ok(text) = std::env::var("KVFOLIO_SEEDS") else { return 0..by_default };
    match text.split_once("..") {
        Some((first, end)) => first.parse().unwrap()..end.parse().unwrap(),
        None => 0..text.parse().unwrap(),
    }
}

/// Tells the seed when a test fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("this was seed {}", self.0);
        }
    }
}

fn random_ops(seed: u64, stream: u64) -> Vec<Op> {
    let bytes: Vec<u8> = [seed, stream, 0, 0].iter().flat_map(|number| number.to_le_bytes()).collect();
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let mut some = || ops(200).new_tree(&mut runner).unwrap().current();
    (0..6).flat_map(|_| some()).collect()
}

#[test]
fn several_batches_read_back_their_own_history() {
    for seed in seeds(25) {
        let _told = Seed(seed);
        let (block_size, num_batches) = (1 + seed as usize % 5, 2 + seed as usize % 2);
        let mut world = World::new(10 + seed as usize % 37, block_size, num_batches);
        for op in random_ops(seed, 0) {
            world.apply(&op);
        }
        let pool = world.pool.clone();
        world.end();
        common::assert_all_free(&pool);
    }
}

/// Each thread has its batches, sequences, tables and lent blocks; the pool and its memory are everybody's.
#[test]
fn threads_on_one_pool_read_back_their_own_history() {
    for seed in seeds(25) {
        let _told = Seed(seed);
        let block_size = 1 + seed as usize % 5;
        let pool = pool_of(THREADS * (3 + seed as usize % 13) + seed as usize % 2, block_size);
        let memory = Arc::new(Memory::new(&pool));
        let start = Barrier::new(THREADS);
        thread::scope(|scope| {
            for number in 0..THREADS {
                let (pool, memory, start) = (&pool, &memory, &start);
                scope.spawn(move || {
                    let ops = random_ops(seed, 1 + number as u64);
                    let mut world = World::beside_others(pool, memory, 1 + number % 3, number);
                    start.wait();
                    for op in &ops {
                        world.apply(op);
                    }
                    world.end();
                });
            }
        });
        common::assert_all_free(&pool);
    }
}
