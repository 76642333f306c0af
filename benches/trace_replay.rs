//! Replays a trace of real requests through the pool, under each of its eviction policies, and sets the hit rates
//! beside a plain LRU's and beside the most that any policy could reach.
//!
//! `cargo bench --bench trace_replay -- PATH`, where PATH is a file of lines like Mooncake's:
//! `{"hash_ids": [0, 1, 2], ...}`, each id the name of a block and of all that is before it.
//!
//! Every request is admitted, computed and freed before the next, in the order of the trace. The pool and a plain
//! LRU differ in the order within one request. A plain LRU sees the head first, so the head is older and goes
//! first, and what is left behind it counts as a hit though no prefix leads there. The pool releases the
//! deepest block first, so the tail goes first and whatever is left can be found.
#![expect(clippy::print_stdout, reason = "that is what it is for")]

#[path = "../tests/rust/common/replay.rs"]
mod replay;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    env,
    error::Error,
    fs,
    path::PathBuf,
    process::ExitCode,
};

use kvfolio::EvictionPolicy;

/// In blocks; those that a request does not fit into are passed over.
const CAPACITIES: [usize; 8] = [1_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000, 200_000];
const TOLERANCE: f64 = 0.005;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let path = env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let path = path.map_or_else(replay::conversations, PathBuf::from);
    let Ok(text) = fs::read_to_string(&path) else {
        println!("skipped: there is no trace at {}", path.display());
        return Ok(ExitCode::SUCCESS);
    };
    let requests = replay::read(&text)?;
    let accesses: usize = requests.iter().map(Vec::len).sum();
    println!("{} requests, {accesses} accesses to blocks\n", requests.len());
    print!("capacity       MIN  plain LRU");
    for policy in EvictionPolicy::ALL {
        print!("{policy:>10}");
    }
    println!();
    let mut agrees = true;
    let longest = requests.iter().map(Vec::len).max().unwrap_or(0);
    for capacity in CAPACITIES.into_iter().filter(|capacity| *capacity >= longest) {
        let rate = |hits: usize| hits as f64 / accesses as f64;
        let plain = rate(hits_of_plain_lru(&requests, capacity));
        print!("{capacity:8}    {:.4}     {plain:.4}", rate(hits_of_min(&requests, capacity)));
        for &policy in EvictionPolicy::ALL {
            let own = rate(replay::hits_of_the_pool(&requests, capacity, policy)?);
            print!("    {own:.4}");
            let is_within = own >= plain - TOLERANCE;
            agrees &= is_within && (policy != EvictionPolicy::Lru || own <= plain + TOLERANCE);
        }
        println!();
    }
    println!(
        "\nno policy is more than {TOLERANCE} below a plain LRU, nor lru above it: {}. The pool evicts the deepest block \
         of a request first, and so keeps prefixes whole, where a plain LRU evicts heads first.",
        if agrees { "true" } else { "NOT TRUE" }
    );
    Ok(if agrees { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Every id one access, each admitted, the least recently accessed one evicted.
fn hits_of_plain_lru(requests: &[Vec<u32>], capacity: usize) -> usize {
    let (mut last_access, mut by_access) = (HashMap::new(), BTreeMap::new());
    let mut hits = 0;
    for (now, id) in requests.iter().flatten().enumerate() {
        if let Some(before) = last_access.insert(id, now) {
            by_access.remove(&before);
            hits += 1;
        } else if last_access.len() > capacity
            && let Some((_, oldest)) = by_access.pop_first()
        {
            last_access.remove(oldest);
        }
        by_access.insert(now, id);
    }
    hits
}

/// The same, with the one evicted that is needed again last (Belady's MIN).
fn hits_of_min(requests: &[Vec<u32>], capacity: usize) -> usize {
    let ids: Vec<_> = requests.iter().flatten().collect();
    let mut next_access = vec![usize::MAX; ids.len()];
    let mut later = HashMap::new();
    for (now, id) in ids.iter().enumerate().rev() {
        next_access[now] = later.insert(id, now).unwrap_or(usize::MAX - now); // never again, and all different
    }
    let mut cached = BTreeSet::new();
    let mut hits = 0;
    for (now, next) in next_access.into_iter().enumerate() {
        if cached.remove(&now) {
            hits += 1;
        } else if cached.len() == capacity {
            cached.pop_last();
        }
        cached.insert(next);
    }
    hits
}
