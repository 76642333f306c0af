//! Dealing out work to threads.
//!
//! They are our own, or those of an `OpenMP` runtime that the process has anyway. Its threads look out for work for
//! a while after they had some, on the very processors that our own would want: in a model that goes from its
//! matrix products to attention and back, two sets of threads wait for each other at every turn.

use std::any::Any;
use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::num::NonZeroUsize;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::{env, mem, process, ptr, thread};

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

/// What compilers call for `#pragma omp parallel`: `function(data)` on so many threads, the caller's included, the end
/// of which it waits for.
pub type OpenMpParallel = unsafe extern "C" fn(
    function: extern "C" fn(*mut c_void),
    data: *mut c_void,
    threads: c_uint,
    flags: c_uint,
);

/// The runtime's function, as a pointer; null: there is none.
static OPEN_MP: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// The process that it was found in.
static OPEN_MP_PROCESS: AtomicUsize = AtomicUsize::new(0);

/// From now on kernels use the threads of an `OpenMP` runtime, of which this is `GOMP_parallel`; with `None` again
/// their own. A forked child, in which the runtime's are not, uses its own, too.
///
/// # Safety
///
/// It is that function, for as long as the process lives.
pub unsafe fn use_open_mp(parallel: Option<OpenMpParallel>) {
    OPEN_MP_PROCESS.store(process::id() as usize, Ordering::Relaxed);
    // Release: who finds the function finds the process that it is for.
    OPEN_MP.store(parallel.map_or(ptr::null_mut(), |parallel| parallel as *mut ()), Ordering::Release);
}

fn open_mp() -> Option<OpenMpParallel> {
    let found = OPEN_MP.load(Ordering::Acquire);
    let usable = !found.is_null() && OPEN_MP_PROCESS.load(Ordering::Relaxed) == process::id() as usize;
    // SAFETY: what is there and is not null was put there as such a function.
    usable.then(|| unsafe { mem::transmute::<*mut (), OpenMpParallel>(found) })
}

/// Calls `work` on so many of the runtime's threads at once. Panics with what the first of them panicked with.
fn on_open_mp_threads<F: Fn() + Sync>(parallel: OpenMpParallel, threads: usize, work: &F) {
    struct Call<'a, F> {
        work: &'a F,
        panic: Mutex<Option<Box<dyn Any + Send>>>,
    }
    extern "C" fn run<F: Fn() + Sync>(data: *mut c_void) {
        // SAFETY: it is the address of the call below, which lives until all threads have returned from here.
        let call = unsafe { &*data.cast::<Call<'_, F>>() };
        // What was half done is thrown away with the panic that goes on in the caller.
        if let Err(panic) = panic::catch_unwind(AssertUnwindSafe(call.work))
            && let Ok(mut first) = call.panic.lock()
        {
            first.get_or_insert(panic);
        }
    }
    let mut call = Call { work, panic: Mutex::new(None) };
    // SAFETY: `use_open_mp` was told that this is the runtime's function; `run` gets what it expects, and does not unwind.
    unsafe { parallel(run::<F>, (&raw mut call).cast(), threads as c_uint, 0) };
    if let Ok(Some(panic)) = call.panic.into_inner() {
        panic::resume_unwind(panic);
    }
}

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
    if helpers > 0
        && let Some(parallel) = open_mp()
    {
        // Always as many as may be: the runtime ends threads that a call does not want, and the next one waits for new ones.
        return on_open_mp_threads(parallel, count(), &take_turns);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A runtime whose threads begin and end with the call.
    unsafe extern "C" fn parallel(
        function: extern "C" fn(*mut c_void),
        data: *mut c_void,
        threads: c_uint,
        _flags: c_uint,
    ) {
        let data = data as usize;
        thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(move || function(data as *mut c_void));
            }
            function(data as *mut c_void);
        });
    }

    #[test]
    fn a_runtime_s_threads_all_take_part() {
        let count = AtomicUsize::new(0);
        on_open_mp_threads(parallel, 3, &|| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 3);
    }

    #[test]
    fn a_panic_on_a_runtime_s_thread_goes_on_in_the_caller() {
        let (caller, count) = (thread::current().id(), AtomicUsize::new(0));
        let panicked = panic::catch_unwind(|| {
            on_open_mp_threads(parallel, 3, &|| {
                count.fetch_add(1, Ordering::Relaxed);
                assert_eq!(thread::current().id(), caller, "a helper");
            });
        });
        assert!(panicked.is_err());
        assert_eq!(count.into_inner(), 3, "the others went on");
    }
}
