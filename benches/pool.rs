//! Times of what the pool does, by criterion: `cargo bench --bench pool --features kvfolio/internals`.
//!
//! `pool_goals.rs` holds the same operations against their goals; this is to compare with one's last run.

#![expect(clippy::unwrap_used, reason = "a benchmark that fails has nothing to report")]

mod work;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, measurement::WallTime};
use work::{Churn, Decode, Meter, cycle, hash, pool};

const SIZES: [usize; 2] = [65_536, 4 << 20];

/// The time of one step of a piece of work.
struct Clock {
    wanted: &'static str,
    time: Duration,
}

impl Clock {
    fn of(wanted: &'static str) -> Self {
        Self { wanted, time: Duration::ZERO }
    }
}

impl Meter for Clock {
    fn step<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        if name != self.wanted {
            return work();
        }
        let start = Instant::now();
        let result = work();
        self.time += start.elapsed();
        result
    }
}

/// A step that is timed whole: the clock is read once for all turns.
struct Untimed;

impl Meter for Untimed {
    fn step<T>(&mut self, _: &'static str, work: impl FnOnce() -> T) -> T {
        work()
    }
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    group
}

/// Do `work` while another thread keeps doing `rival`.
fn beside(rival: impl Fn() + Send + Sync, work: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rival();
            }
        });
        work();
        stop.store(true, Ordering::Relaxed);
    });
}

fn cycles(criterion: &mut Criterion) {
    for num_blocks in SIZES {
        let pool = pool(num_blocks);
        let mut group = group(criterion, &format!("allocate and free, {num_blocks} blocks"));
        for k in [1, 16, 256, 4096] {
            group.throughput(Throughput::Elements(k as u64));
            let mut blocks = Vec::new();
            let mut alone = |group: &mut BenchmarkGroup<'_, WallTime>, name| {
                group.bench_function(BenchmarkId::new(name, k), |bencher| {
                    bencher.iter(|| cycle(&pool, k, &mut blocks, &mut Untimed));
                });
            };
            alone(&mut group, "one thread");
            let rival = || cycle(&pool, k, &mut Vec::new(), &mut Untimed);
            beside(rival, || alone(&mut group, "two threads"));
        }
    }
}

fn cache(criterion: &mut Criterion) {
    const K: usize = 64;
    for num_blocks in SIZES {
        let mut churn = Churn::new(num_blocks, K);
        let mut group = group(criterion, &format!("cache, {num_blocks} blocks"));
        group.throughput(Throughput::Elements(K as u64));
        for step in ["evict", "publish", "release"] {
            group.bench_function(step, |bencher| {
                bencher.iter_custom(|turns| {
                    let mut clock = Clock::of(step);
                    (0..turns).for_each(|_| churn.replace(&mut clock));
                    clock.time
                });
            });
        }
        group.bench_function("hit", |bencher| {
            bencher.iter_custom(|turns| {
                let mut clock = Clock::of("hit");
                (0..turns as usize).for_each(|turn| churn.hit(turn, &mut clock));
                clock.time
            });
        });
    }
    let tokens: Vec<_> = (0..16 * K as i32).collect();
    let mut group = group(criterion, "keys");
    group.throughput(Throughput::Elements(K as u64));
    group.bench_function("hash of blocks of 16 tokens", |bencher| {
        bencher.iter(|| hash(&tokens, &mut Untimed));
    });
}

fn steps(criterion: &mut Criterion) {
    const ROWS: usize = 256;
    let mut group = group(criterion, "batch");
    group.throughput(Throughput::Elements(ROWS as u64));
    group.bench_function("decode step of 256 rows", |bencher| {
        bencher.iter_custom(|turns| {
            let mut clock = Clock::of("decode");
            let mut left = turns as usize;
            while left > 0 {
                let decode = Decode::new(ROWS);
                let now = left.min(500); // as long as the batch has room
                (0..now).for_each(|_| decode.step(&mut clock));
                left -= now;
            }
            clock.time
        });
    });
}

fn main() {
    let mut criterion = Criterion::default().without_plots().configure_from_args();
    cycles(&mut criterion);
    cache(&mut criterion);
    steps(&mut criterion);
    criterion.final_summary();
}
