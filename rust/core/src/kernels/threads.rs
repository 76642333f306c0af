//! Dealing out work to threads.

use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// A pool and the process that made it.
struct Threads {
    process: u32,
    pool: ThreadPool,
}

/// Threads do not live on in a forked child, and work given to a pool without threads is never done; so a
/// child makes a pool of its own. There is no lock, which another thread might hold at the moment of the fork
/// and so forever, and a parent's pool is never dropped: that would wait for threads that only the parent has.
static THREADS: AtomicPtr<Threads> = AtomicPtr::new(ptr::null_mut());

fn pool() -> Option<&'static ThreadPool> {
    let process = process::id();
    let found = THREADS.load(Ordering::Acquire);
    // SAFETY: it is null or what was put there below, which is never changed or freed.
    if let Some(threads) = unsafe { found.as_ref() }
        && threads.process == process
    {
        return Some(&threads.pool);
    }
    let pool = ThreadPoolBuilder::new().thread_name(|index| format!("kvfolio-{index}")).build().ok()?;
    let own = Box::into_raw(Box::new(Threads { process, pool }));
    // Release: who finds it sees it whole.
    let now = match THREADS.compare_exchange(found, own, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => own,
        Err(other) => {
            // SAFETY: nobody else has seen our own, since it was not put there.
            drop(unsafe { Box::from_raw(own) });
            other
        }
    };
    // SAFETY: as above; another thread of this process was quicker, or it is our own.
    unsafe { now.as_ref() }.map(|threads| &threads.pool)
}

/// How many threads work is dealt out to; `RAYON_NUM_THREADS` sets it.
pub(crate) fn count() -> usize {
    pool().map_or(1, ThreadPool::current_num_threads)
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
