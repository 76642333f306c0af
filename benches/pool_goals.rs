//! The pool's figures beside their goals, and beside a `Mutex<Vec>` of ids in the same run.
//!
//! `cargo bench --bench pool_goals` prints them; each is the median of several rounds, in nanoseconds a block.
//! A `Mutex<Vec>` hands out ids and nothing else: it counts no references and knows no content, so it is a floor
//! to compare with, not a pool.

#![expect(clippy::unwrap_used, reason = "a benchmark that fails has nothing to report")]

use std::{
    hint::black_box,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvfolio::{BlockId, BlockPool, EvictionPolicy, PoolOptions, internals};

const POOL: usize = 65_536;
const LARGE: usize = 4 << 20;
const ROUNDS: usize = 15;

/// What hands out and takes back `k` ids at a time.
trait IdSource: Send + Sync {
    fn take(&self, k: usize, ids: &mut Vec<BlockId>);
    fn give(&self, ids: &mut Vec<BlockId>);
}

impl IdSource for BlockPool {
    fn take(&self, k: usize, ids: &mut Vec<BlockId>) {
        self.allocate_into(k, ids).unwrap();
    }

    fn give(&self, ids: &mut Vec<BlockId>) {
        self.release(ids).unwrap();
        ids.clear();
    }
}

/// The pool's free list alone, which is what sketches of free lists measure.
struct IdsAlone(BlockPool);

impl IdSource for IdsAlone {
    fn take(&self, k: usize, ids: &mut Vec<BlockId>) {
        internals::cycle_ids(&self.0, k, ids);
    }

    fn give(&self, _ids: &mut Vec<BlockId>) {}
}

struct Locked(Mutex<Vec<BlockId>>);

impl Locked {
    fn new(num_blocks: usize) -> Self {
        Self(Mutex::new(BlockPool::new(num_blocks, 16, true).unwrap().allocate(num_blocks).unwrap()))
    }
}

impl IdSource for Locked {
    fn take(&self, k: usize, ids: &mut Vec<BlockId>) {
        let mut free = self.0.lock().unwrap();
        let rest = free.len() - k;
        ids.extend(free.drain(rest..));
    }

    fn give(&self, ids: &mut Vec<BlockId>) {
        self.0.lock().unwrap().append(ids);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Nanoseconds a block for taking and giving back `k` at a time.
fn cycle(source: &dyn IdSource, k: usize) -> f64 {
    let turns = 400_000 / k + 1;
    let mut ids = Vec::with_capacity(k);
    let round = |_| {
        let start = Instant::now();
        for _ in 0..turns {
            source.take(k, &mut ids);
            source.give(black_box(&mut ids));
        }
        start.elapsed().as_nanos() as f64 / (turns * k) as f64
    };
    median((0..ROUNDS).map(round).collect())
}

/// The same with another thread that does it, too.
fn contended(source: &Arc<dyn IdSource>, k: usize) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let (other, halt) = (Arc::clone(source), Arc::clone(&stop));
    let rival = thread::spawn(move || {
        let mut ids = Vec::with_capacity(k);
        while !halt.load(Ordering::Relaxed) {
            other.take(k, &mut ids);
            other.give(black_box(&mut ids));
        }
    });
    let time = cycle(&**source, k);
    stop.store(true, Ordering::Relaxed);
    rival.join().unwrap();
    time
}

/// Time a block of `work` on `k` blocks at a time, over `total` blocks.
fn per_block(total: usize, k: usize, mut work: impl FnMut(usize) -> Duration) -> f64 {
    let round = |round: usize| {
        let time: Duration = (0..total / k).map(|turn| work(round * (total / k) + turn)).sum();
        time.as_nanos() as f64 / (total / k * k) as f64
    };
    median((0..5).map(round).collect())
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed(), result)
}

/// Publishing into a pool full of idle blocks: every allocation evicts.
struct Churn {
    pool: BlockPool,
    evict: f64,
    publish: f64,
    release: f64,
    hit: f64,
}

fn churn(num_blocks: usize, k: usize, eviction: EvictionPolicy) -> Churn {
    let options = PoolOptions { eviction, ..PoolOptions::default() };
    let pool = BlockPool::with_options(num_blocks, 16, &options).unwrap();
    let keys = internals::keys(2 * num_blocks);
    let fill = |first: usize| {
        let part = &keys[first % keys.len()..][..k];
        let (evict, blocks) = timed(|| internals::take(&pool, k).unwrap());
        let (publish, ()) = timed(|| internals::publish(&pool, &blocks, part));
        let (release, ()) = timed(|| internals::give(&pool, &blocks));
        (evict, publish, release)
    };
    for first in (0..num_blocks).step_by(k) {
        fill(first);
    }
    let total = num_blocks.min(1 << 17);
    let (mut publish, mut release) = (Duration::ZERO, Duration::ZERO);
    let mut turns = 0;
    let evict = per_block(total, k, |turn| {
        let (evict, one, other) = fill(num_blocks + turn * k);
        publish += one;
        release += other;
        turns += k;
        evict
    });
    let last = num_blocks + (turns - k);
    let hit = per_block(total.min(num_blocks / 2), k, |turn| {
        let first = (last - (turn * k) % (num_blocks / 2)) % keys.len();
        let (hit, blocks) = timed(|| internals::hit(&pool, &keys[first..][..k]));
        assert_eq!(blocks.len(), k);
        internals::give(&pool, &blocks);
        hit
    });
    let each = |time: Duration| time.as_nanos() as f64 / turns as f64;
    Churn { evict, publish: each(publish), release: each(release), hit, pool }
}

/// Times of single allocations while another thread releases and hits, and both are pre-empted by a third and
/// a fourth that compute.
fn latencies(mut allocate: impl FnMut(), rival: impl Fn() + Send + 'static) -> [Duration; 4] {
    let stop = Arc::new(AtomicBool::new(false));
    let begin = Arc::new(Barrier::new(4));
    let mut threads = Vec::new();
    for _ in 0..2 {
        let (stop, begin) = (Arc::clone(&stop), Arc::clone(&begin));
        threads.push(thread::spawn(move || {
            begin.wait();
            while !stop.load(Ordering::Relaxed) {
                black_box((0..1000_u64).fold(0, |sum, n| black_box(sum ^ n)));
            }
        }));
    }
    let (halt, ready) = (Arc::clone(&stop), Arc::clone(&begin));
    threads.push(thread::spawn(move || {
        ready.wait();
        while !halt.load(Ordering::Relaxed) {
            rival();
        }
    }));
    begin.wait();
    let end = Instant::now() + Duration::from_secs(8);
    let mut times = Vec::new();
    while Instant::now() < end {
        times.push(timed(&mut allocate).0);
    }
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    times.sort_unstable();
    [0.5, 0.99, 0.999, 1.0].map(|share| times[((times.len() - 1) as f64 * share) as usize])
}

fn row(what: &str, value: f64, goal: Option<f64>, locked: Option<f64>) {
    let verdict = goal.map_or(String::new(), |goal| {
        format!("goal {goal:>5.1}  {}", if value <= goal { "met" } else { "MISSED" })
    });
    let ratio =
        locked.map_or(String::new(), |other| format!("Mutex<Vec> {other:>6.2}, ratio {:.2}", value / other));
    println!("{what:<58} {value:>8.2}  {verdict:<20} {ratio}");
}

fn main() {
    println!("nanoseconds a block, block size 16, {} cores", thread::available_parallelism().unwrap());
    let words: Vec<AtomicU64> = (0..256).map(AtomicU64::new).collect();
    let swap = per_block(1 << 16, 256, |_| {
        let add = |word: &AtomicU64| {
            let seen = word.load(Ordering::Acquire);
            word.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        timed(|| assert!(words.iter().all(add))).0
    });
    row("for comparison: one compare-and-swap, nobody else there", swap, None, None);
    for num_blocks in [POOL, LARGE] {
        let pool: Arc<dyn IdSource> = Arc::new(BlockPool::new(num_blocks, 16, true).unwrap());
        let locked: Arc<dyn IdSource> = Arc::new(Locked::new(num_blocks));
        for (k, goal) in [(1, Some(35.0)), (16, Some(4.0)), (256, Some(1.5)), (4096, None)] {
            let what = format!("allocate + free, {num_blocks} blocks, k = {k}");
            row(&what, cycle(&*pool, k), goal, Some(cycle(&*locked, k)));
        }
        let ids: Arc<dyn IdSource> = Arc::new(IdsAlone(BlockPool::new(num_blocks, 16, true).unwrap()));
        for k in [1, 16, 256, 4096] {
            row(&format!("its free list alone, k = {k}"), cycle(&*ids, k), None, None);
        }
        for (k, goal) in [(1, None), (16, Some(12.0)), (256, None), (4096, None)] {
            let what = format!("the same, two threads fighting, k = {k}");
            row(&what, contended(&pool, k), goal, Some(contended(&locked, k)));
        }
    }
    for num_blocks in [POOL, LARGE] {
        for &policy in EvictionPolicy::ALL {
            let churn = churn(num_blocks, 64, policy);
            let goal = |goal| (policy == EvictionPolicy::default()).then_some(goal);
            let what = format!("evicting allocate, {num_blocks} blocks, k = 64, {policy}");
            row(&what, churn.evict, goal(60.0), None);
            row("publish", churn.publish, None, None);
            row("release to idle", churn.release, None, None);
            row("hit", churn.hit, None, None);
            let bytes = internals::bytes(&churn.pool) as f64 / num_blocks as f64;
            row("bytes a block, all structures", bytes, goal(96.0), None);
        }
    }
    let tokens: Vec<i32> = (0..16 * 4096).collect();
    let hash = per_block(4096, 4096, |_| timed(|| black_box(internals::chain(&tokens, 16))).0);
    row("hash of a block of 16 tokens", hash, None, None);

    println!(
        "\none allocate of 16 while another thread releases and hits, two more compute: p50 p99 p99.9 max"
    );
    let pool = BlockPool::new(POOL, 16, true).unwrap();
    let keys = internals::keys(64);
    let blocks = internals::take(&pool, 64).unwrap();
    internals::publish(&pool, &blocks, &keys);
    internals::give(&pool, &blocks);
    let (mut ids, other) = (Vec::new(), pool.clone());
    let ours = latencies(
        || {
            pool.allocate_into(16, &mut ids).unwrap();
            pool.give(&mut ids);
        },
        move || internals::give(&other, &internals::hit(&other, &keys)),
    );
    let locked = Arc::new(Locked::new(POOL));
    let (mut ids, other) = (Vec::new(), Arc::clone(&locked));
    let theirs = latencies(
        || {
            locked.take(16, &mut ids);
            locked.give(&mut ids);
        },
        move || {
            let mut ids = Vec::new();
            other.take(64, &mut ids);
            other.give(&mut ids);
        },
    );
    println!("kvfolio    {ours:>10.2?}");
    println!("Mutex<Vec> {theirs:>10.2?}");
}
