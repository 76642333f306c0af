//! Dealing out work to threads.

use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// The pool and the process that made it. Threads do not live on in a forked child, and work given to a pool
/// without threads is never done; so a child makes a pool of its own.
static POOL: RwLock<Option<(u32, Arc<ThreadPool>)>> = RwLock::new(None);

fn pool() -> Option<Arc<ThreadPool>> {
    let process = process::id();
    if let Some((owner, pool)) = &*POOL.read().unwrap_or_else(PoisonError::into_inner)
        && *owner == process
    {
        return Some(Arc::clone(pool));
    }
    let mut place = POOL.write().unwrap_or_else(PoisonError::into_inner);
    match &*place {
        Some((owner, pool)) if *owner == process => Some(Arc::clone(pool)),
        _ => {
            let threads = ThreadPoolBuilder::new().thread_name(|index| format!("kvfolio-{index}"));
            let pool = Arc::new(threads.build().ok()?);
            if let Some((_, parents)) = place.replace((process, Arc::clone(&pool))) {
                // Dropping it would wait for threads that only the parent has.
                std::mem::forget(parents);
            }
            Some(pool)
        }
    }
}

/// How many threads work is dealt out to; `RAYON_NUM_THREADS` sets it.
pub(crate) fn count() -> usize {
    pool().map_or(1, |pool| pool.current_num_threads())
}

/// Calls `work` for 0, 1, ... `items - 1`, each once, on several threads if `share`.
pub(crate) fn for_each(items: usize, share: bool, work: impl Fn(usize) + Sync) {
    for_each_with(items, share, || (), |(), item| work(item));
}

/// As [`for_each`]; each thread makes itself something to work with.
///
/// Items are handed out one by one, so uneven ones do not leave threads idle. A machine that refuses to start
/// threads gets the work done on the caller's.
pub(crate) fn for_each_with<T>(
    items: usize,
    share: bool,
    make: impl Fn() -> T + Sync,
    work: impl Fn(&mut T, usize) + Sync,
) {
    let next = AtomicUsize::new(0);
    let take_turns = || {
        let mut own = make();
        loop {
            // Relaxed: the counter only tells items apart; the scope's end orders what was written.
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                break;
            }
            work(&mut own, item);
        }
    };
    let pool = if share && items > 1 { pool() } else { None };
    match pool {
        Some(pool) if pool.current_num_threads() > 1 => pool.scope(|scope| {
            for _ in 1..pool.current_num_threads().min(items) {
                scope.spawn(|_| take_turns());
            }
            take_turns();
        }),
        _ => take_turns(),
    }
}
