//! Dealing out work to threads.

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::{env, process, ptr, thread};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// How many threads work at a call, the caller's included; 0: not yet known.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// At most so many for calls from this thread.
    static MOST: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The helpers, and the process that they live in.
struct Helpers {
    process: u32,
    pool: ThreadPool,
    /// What was there before and may still be in use: kept, and known to be kept.
    _former: *mut Helpers,
}

/// Threads do not live on in a forked child, and work given to a pool without threads is never done; so a
/// child makes a pool of its own. There is no lock, which another thread might hold at the moment of the fork
/// and so forever. A pool is never dropped, a smaller one that was replaced included: others may be in it, and a
/// child would wait for threads that only the parent has.
static HELPERS: AtomicPtr<Helpers> = AtomicPtr::new(ptr::null_mut());

/// How many threads kernels use: what [`set_num_threads`] said, else the environment's `KVFOLIO_NUM_THREADS` or
/// `OMP_NUM_THREADS`, else as many as there are CPUs.
pub fn num_threads() -> usize {
    // Relaxed: the number stands for nothing else, here and below.
    match COUNT.load(Ordering::Relaxed) {
        0 => {
            let told = |name| env::var(name).ok()?.parse().ok().filter(|&count: &usize| count > 0);
            let count = told("KVFOLIO_NUM_THREADS")
                .or_else(|| told("OMP_NUM_THREADS"))
                .unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZeroUsize::get));
            let known = COUNT.compare_exchange(0, count, Ordering::Relaxed, Ordering::Relaxed);
            known.map_or_else(|known| known, |_| count)
        }
        count => count,
    }
}

/// Sets how many threads kernels use in calls that begin from now on, the calling one included.
pub fn set_num_threads(count: NonZeroUsize) {
    COUNT.store(count.get(), Ordering::Relaxed);
}

/// Calls `work`, whose kernels use at most so many threads.
pub fn with_at_most<T>(threads: NonZeroUsize, work: impl FnOnce() -> T) -> T {
    struct Restore(usize);
    impl Drop for Restore {
        fn drop(&mut self) {
            MOST.set(self.0);
        }
    }
    let _restore = Restore(MOST.replace(threads.get()));
    work()
}

/// How many threads a call from here uses.
pub(crate) fn count() -> usize {
    num_threads().min(MOST.get())
}

/// At least so many helpers.
fn pool(helpers: usize) -> Option<&'static ThreadPool> {
    let process = process::id();
    let found = HELPERS.load(Ordering::Acquire);
    // SAFETY: it is null or what was put there below, which is never changed or freed.
    if let Some(own) = unsafe { found.as_ref() }
        && own.process == process
        && own.pool.current_num_threads() >= helpers
    {
        return Some(&own.pool);
    }
    let builder = ThreadPoolBuilder::new().thread_name(|index| format!("kvfolio-{index}"));
    // As many as any call will want, so that pools are not replaced one after the other.
    let pool = builder.num_threads(helpers.max(num_threads() - 1)).build().ok()?;
    let own = Box::into_raw(Box::new(Helpers { process, pool, _former: found }));
    // Release: who finds it sees it whole.
    let now = match HELPERS.compare_exchange(found, own, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => own,
        Err(other) => {
            // SAFETY: nobody else has seen our own, since it was not put there.
            drop(unsafe { Box::from_raw(own) });
            other
        }
    };
    // SAFETY: as above; another thread of this process was quicker, or it is our own. If it is smaller than what was
    // asked for, the work is done all the same.
    unsafe { now.as_ref() }.map(|own| &own.pool)
}

/// Calls `work` for 0, 1, ... `items - 1`, each once, on several threads if `share`.
///
/// Items are handed out one by one, so uneven ones do not leave threads idle; the calling thread takes its turns, too,
/// and helpers sleep in between. A machine that refuses to start threads gets the work done on the caller's.
pub(crate) fn for_each(items: usize, share: bool, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    let take_turns = || {
        loop {
            // Relaxed: the counter only tells items apart; the scope's end orders what was written.
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                break;
            }
            work(item);
        }
    };
    let helpers = if share { count().min(items).saturating_sub(1) } else { 0 };
    match if helpers > 0 { pool(helpers) } else { None } {
        Some(pool) => pool.in_place_scope(|scope| {
            for _ in 0..helpers {
                scope.spawn(|_| take_turns());
            }
            take_turns();
        }),
        None => take_turns(),
    }
}
