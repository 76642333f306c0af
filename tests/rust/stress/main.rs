//! Threads that do everything at once with one small pool, for the sanitizers and for as long as wanted.
//!
//! `cargo run --release --example stress -- --threads 4 --blocks 48 --seconds 60 --seed 1`. Every second is a round
//! with a pool of its own. What kernels would write stands in plain memory ([`memory`]), so that `ThreadSanitizer`
//! (`make sanitize`) reports whatever the pool lets two threads touch without an order between them, and so that
//! a block with two owners shows as wrong content without it, too.
//!
//! `--huge` is another program: a pool of more than 2^24 blocks, all of them taken, shared, published, evicted.
//!
//! It is no test of libtest's, whose own threads would be reported: the standard library is not instrumented.

#![expect(clippy::unwrap_used, reason = "a check that fails ends the program")]

mod huge;
mod memory;
mod random;
mod serving;
mod trading;

use std::{
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use kvfolio::{BlockPool, Context, EvictionPolicy, PoolOptions, Stats};
use memory::Memory;
use random::Random;
use serving::Server;
use trading::{Market, Trader};

const USAGE: &str = "usage: stress [--threads N] [--blocks N] [--seconds N] [--seed N] [--huge]";

struct Options {
    threads: usize,
    blocks: usize,
    seconds: u64,
    seed: u64,
    huge: bool,
}

impl Options {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { threads: 4, blocks: 48, seconds: 10, seed: 1, huge: false };
        while let Some(word) = words.next() {
            if word == "--huge" {
                options.huge = true;
                continue;
            }
            let number = words.next().and_then(|number| number.parse::<u64>().ok()).filter(|n| *n > 0);
            let number = number.ok_or_else(|| format!("{word} takes a number from 1 on\n{USAGE}"))?;
            match word.as_str() {
                "--threads" => options.threads = number as usize,
                "--blocks" => options.blocks = number as usize,
                "--seconds" => options.seconds = number,
                "--seed" => options.seed = number,
                _ => return Err(format!("no such option: {word}\n{USAGE}")),
            }
        }
        Ok(options)
    }
}

/// What one thread does until the round is over; returns how many calls it made.
fn work(pool: &BlockPool, memory: &Memory, market: &Market, end: Instant, mut random: Random) -> u64 {
    let mut server = Server::new(pool, memory, random.split());
    let mut trader = Trader::new(pool, memory, market, random.split());
    let mut calls = 0;
    while Instant::now() < end {
        for _ in 0..32 {
            calls += match random.below(4) {
                0 => trader.turn(),
                1..3 => server.turn(),
                _ => disturb(pool, &mut random),
            };
        }
    }
    calls
}

fn disturb(pool: &BlockPool, random: &mut Random) -> u64 {
    if random.below(60) == 0 {
        pool.reset_prefix_cache();
    }
    let tokens = serving::prompt(random);
    assert!(pool.match_prefix(&tokens, &Context::default()).unwrap() <= tokens.len());
    if random.below(8) == 0 {
        thread::yield_now();
    }
    1
}

/// One pool, used by all threads until the end and then found whole.
fn round(options: &Options, random: &mut Random, end: Instant) -> (u64, Stats) {
    let blocks = options.blocks / 2 + random.below(options.blocks) + 1;
    let eviction = EvictionPolicy::ALL[blocks % EvictionPolicy::ALL.len()];
    let choice = PoolOptions { eviction, ..PoolOptions::default() };
    let pool = BlockPool::with_options(blocks, 1 + random.below(5), &choice).unwrap();
    let memory = Memory::of(&pool);
    let market = Market::default();
    let calls = thread::scope(|scope| {
        let workers: Vec<_> = (0..options.threads)
            .map(|_| {
                let random = random.split();
                let (pool, memory, market) = (&pool, &memory, &market);
                scope.spawn(move || work(pool, memory, market, end, random))
            })
            .collect();
        // The first to fail has said why.
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| std::process::exit(101))).sum()
    });
    market.close();
    pool.audit().unwrap();
    assert_eq!(pool.num_free(), pool.num_blocks());
    assert_eq!(pool.num_referenced() + pool.num_quarantined(), 0);
    (calls, pool.stats())
}

fn stress(options: &Options) {
    let mut random = Random::new(options.seed);
    let mut calls = 0;
    let (mut hits, mut evictions, mut copies, mut merges, mut refusals) = (0, 0, 0, 0, 0);
    let start = Instant::now();
    for second in 1..=options.seconds {
        let (more, stats) = round(options, &mut random, start + Duration::from_secs(second));
        calls += more;
        hits += stats.hit_tokens;
        evictions += stats.evictions;
        copies += stats.copies;
        merges += stats.merges;
        refusals += stats.refusals;
    }
    let per_second = calls / options.seconds;
    println!(
        "{} threads, {} s, seed {}: {calls} calls ({per_second} a second), {hits} tokens hit, {evictions} evictions, \
         {copies} copies, {merges} merges, {refusals} refusals; every pool whole and free at the end",
        options.threads, options.seconds, options.seed
    );
    assert!(hits.min(evictions).min(copies).min(refusals) > 0, "the run has not reached everything");
}

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)) {
        Ok(options) if options.huge => huge::run(),
        Ok(options) => stress(&options),
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
