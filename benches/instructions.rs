//! One step of a piece of work, for callgrind to count its instructions: `benches/instructions.py` runs it as
//! `instructions STEP`, and it prints how many blocks or rows were worked on within [`counted`].

#![expect(clippy::unwrap_used, reason = "a benchmark that fails has nothing to report")]

mod work;

use std::{hint::black_box, process::ExitCode};

use work::{Churn, Decode, Meter, cycle, hash, pool};

const BLOCKS: usize = 4096;
const K: usize = 64;
const ROWS: usize = 256;

/// The step that counts, once the caches of the allocator and the pool are as they will be.
struct Counter {
    wanted: &'static str,
    warm: bool,
}

impl Meter for Counter {
    fn step<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        if self.warm && name == self.wanted { counted(work) } else { work() }
    }
}

/// Callgrind counts while this runs.
#[inline(never)]
fn counted<T>(work: impl FnOnce() -> T) -> T {
    black_box(work())
}

/// Do it so often, after as many times that do not count.
fn turns(turns: usize, wanted: &'static str, mut turn: impl FnMut(usize, &mut Counter)) {
    let mut counter = Counter { wanted, warm: false };
    for index in 0..2 * turns {
        counter.warm = index >= turns;
        turn(index, &mut counter);
    }
}

fn cycles(k: usize) -> usize {
    let (pool, mut blocks) = (pool(BLOCKS), Vec::new());
    turns(4096 / k, "cycle", |_, counter| cycle(&pool, k, &mut blocks, counter));
    4096 / k * k
}

fn churn(wanted: &'static str) -> usize {
    let mut churn = Churn::new(BLOCKS, K);
    turns(64, wanted, |_, counter| churn.replace(counter));
    64 * K
}

/// Work on blocks or rows; returns how many of them were counted.
fn work_on(step: &str) -> Option<usize> {
    Some(match step {
        "allocate+free, k=1" => cycles(1),
        "allocate+free, k=16" => cycles(16),
        "allocate+free, k=256" => cycles(256),
        "evict" => churn("evict"),
        "publish" => churn("publish"),
        "release to idle" => churn("release"),
        "hit" => {
            let churn = Churn::new(BLOCKS, K);
            turns(64, "hit", |turn, counter| churn.hit(turn, counter));
            64 * K
        }
        "hash" => {
            let tokens: Vec<_> = (0..16 * K as i32).collect();
            turns(16, "hash", |_, counter| hash(&tokens, counter));
            16 * K
        }
        // 32 steps: every row fills two blocks.
        "decode step of 256 rows" => {
            let decode = Decode::new(ROWS);
            turns(32, "decode", |_, counter| decode.step(counter));
            32
        }
        _ => return None,
    })
}

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("--bench") | None => println!("instructions are counted by benches/instructions.py"),
        Some(step) => match work_on(step) {
            Some(count) => println!("{count}"),
            None => return ExitCode::FAILURE,
        },
    }
    ExitCode::SUCCESS
}
