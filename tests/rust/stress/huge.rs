//! More than 2^24 blocks: all of them taken by two threads, shared, published, found, evicted, given back.

use std::{thread, time::Instant};

use kvfolio::{Batch, BlockId, BlockPool, Context, PlanRequest};

const NUM_BLOCKS: usize = (1 << 24) + 1;

fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    println!("{what:<48} {:>8.2} s", start.elapsed().as_secs_f64());
    result
}

/// Peak of the resident memory, where the system tells.
fn peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Every block once, whoever got it.
fn assert_all_different<'a>(blocks: impl Iterator<Item = &'a BlockId>) {
    let mut seen = vec![false; NUM_BLOCKS + 1];
    let mut count = 0;
    for block in blocks {
        let before = std::mem::replace(&mut seen[block.as_i32() as usize], true);
        assert!(!before && !block.is_null(), "{block:?} twice");
        count += 1;
    }
    assert_eq!(count, NUM_BLOCKS);
}

pub(crate) fn run() {
    let pool = timed("a pool of 16,777,217 blocks", || BlockPool::new(NUM_BLOCKS, 1, true).unwrap());
    let take = || {
        let mut own = Vec::new();
        while pool.allocate_into(1000.min(pool.num_free().max(1)), &mut own).is_ok() {}
        own
    };
    let [first, second] = timed("all taken by two threads", || {
        thread::scope(|scope| [scope.spawn(take), scope.spawn(take)].map(|taker| taker.join().unwrap()))
    });
    assert_all_different(first.iter().chain(&second));
    assert_eq!(pool.num_free(), 0);
    pool.allocate(1).unwrap_err();
    for blocks in [&first, &second] {
        timed("half of them shared, and released twice", || {
            pool.share(blocks).unwrap();
            pool.release(blocks).unwrap();
            pool.release(blocks).unwrap();
        });
    }
    pool.audit().unwrap();
    assert_eq!(pool.num_blank(), NUM_BLOCKS);

    let tokens: Vec<_> = (0..NUM_BLOCKS as i32).collect();
    let batch = Batch::new(&pool, 1, NUM_BLOCKS).unwrap();
    timed("a sequence in all of them, published", || {
        let sequence = pool.sequence(&tokens, &Context::default(), true, true).unwrap();
        batch.add(&sequence).unwrap();
        batch.plan(&PlanRequest::default()).unwrap().commit(None).unwrap();
        sequence.free().unwrap();
    });
    assert_eq!(pool.num_idle(), NUM_BLOCKS);
    let found = timed("all of it found", || pool.match_prefix(&tokens, &Context::default()).unwrap());
    assert_eq!(found, NUM_BLOCKS);
    let all = timed("all evicted", || pool.allocate(NUM_BLOCKS).unwrap());
    assert_all_different(all.iter());
    timed("all released", || pool.release(&all).unwrap());
    timed("audit", || pool.audit().unwrap());
    assert_eq!(pool.num_blank(), NUM_BLOCKS);
    assert_eq!(pool.stats().evictions, NUM_BLOCKS as u64);
    if let Some(peak) = peak_kib() {
        println!("peak of resident memory: {} MiB", peak / 1024);
    }
}
