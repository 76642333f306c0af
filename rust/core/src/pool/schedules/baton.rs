//! Threads of which one runs at a time: at each operation on an atomic a seeded choice says who goes on.

use std::{
    panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use crate::sync::at_each_point;

/// Points after which it is a livelock; a run that ends has a few thousands.
const LIMIT: usize = 100_000;

/// The numbers that all choices come from (`SplitMix64`).
#[derive(Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % end as u64) as usize
    }
}

/// How the next thread is chosen.
pub(super) struct Plan {
    /// The thread that runs at a point goes on, unless one of this many choices falls otherwise.
    pub(super) stay: usize,
    pub(super) freeze: Option<Freeze>,
    pub(super) random: Random,
}

/// A thread that is stopped until all others are through.
#[derive(Clone, Copy)]
pub(super) struct Freeze {
    pub(super) thread: usize,
    /// The number of the point where it is stopped, from 1 on.
    pub(super) at: usize,
    /// Whether it runs alone until then.
    pub(super) alone: bool,
}

struct State {
    plan: Plan,
    running: usize,
    is_done: Vec<bool>,
    /// Points that each thread has come to.
    points: Vec<usize>,
    steps: usize,
    /// Where the frozen thread is.
    frozen_at: Option<&'static Location<'static>>,
    failure: Option<String>,
}

struct Baton {
    state: Mutex<State>,
    turns: Vec<Condvar>,
}

impl State {
    /// Whether a thread stands still while others are left.
    fn is_frozen(&self, thread: usize) -> bool {
        let reached = self
            .plan
            .freeze
            .is_some_and(|freeze| freeze.thread == thread && self.points[thread] >= freeze.at);
        reached && (0..self.is_done.len()).any(|other| other != thread && !self.is_done[other])
    }

    /// Who goes on; `None` if all are done.
    fn choose(&mut self) -> Option<usize> {
        let able: Vec<_> = (0..self.is_done.len())
            .filter(|thread| !self.is_done[*thread] && !self.is_frozen(*thread))
            .collect();
        let first = self.plan.freeze.filter(|freeze| freeze.alone && able.contains(&freeze.thread));
        let stays = able.contains(&self.running) && self.plan.random.below(self.plan.stay) > 0;
        match first {
            _ if able.is_empty() => None,
            Some(first) => Some(first.thread),
            None if stays => Some(self.running),
            None => Some(able[self.plan.random.below(able.len())]),
        }
    }

    fn fail(&mut self, why: &str) {
        let place = self.frozen_at.map(|at| format!(", one frozen before {at}")).unwrap_or_default();
        self.failure.get_or_insert(format!("{why}{place}"));
    }
}

impl Baton {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Let a thread that is chosen go on, and wait for `own` turn.
    fn pass(&self, mut state: MutexGuard<'_, State>, own: usize) {
        if let Some(next) = state.choose() {
            state.running = next;
            if next != own {
                self.turns[next].notify_one();
            }
        }
        self.wait(state, own);
    }

    fn wait(&self, mut state: MutexGuard<'_, State>, own: usize) {
        while !state.is_done[own] && state.running != own && state.failure.is_none() {
            state = self.turns[own].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let has_failed = state.failure.is_some();
        drop(state);
        if has_failed && !thread::panicking() {
            resume_unwind(Box::new("another thread has failed"));
        }
    }

    fn point(&self, own: usize, at: &'static Location<'static>) {
        if thread::panicking() {
            return;
        }
        let mut state = self.lock();
        state.points[own] += 1;
        state.steps += 1;
        if state.plan.freeze.is_some_and(|freeze| (freeze.thread, freeze.at) == (own, state.points[own])) {
            state.frozen_at = Some(at);
            state.steps = 0;
        }
        if state.steps > LIMIT {
            state.fail(&format!("thread {own} is before {at} after {LIMIT} steps, and no end"));
            self.turns.iter().for_each(Condvar::notify_one);
        }
        self.pass(state, own);
    }

    fn finish(&self, own: usize, failure: Option<String>) {
        let mut state = self.lock();
        state.is_done[own] = true;
        if let Some(why) = failure {
            state.fail(&why);
            self.turns.iter().for_each(Condvar::notify_one);
        } else {
            self.pass(state, own);
        }
    }
}

/// Run the closures as threads, one at a time. Returns how many points each has come to, or what went wrong.
pub(super) fn run<T: Send>(
    plan: Plan,
    threads: Vec<impl FnOnce() -> T + Send>,
) -> Result<(Vec<T>, Vec<usize>), String> {
    let num_threads = threads.len();
    let baton = Arc::new(Baton {
        state: Mutex::new(State {
            plan,
            running: usize::MAX,
            is_done: vec![false; num_threads],
            points: vec![0; num_threads],
            steps: 0,
            frozen_at: None,
            failure: None,
        }),
        turns: (0..num_threads).map(|_| Condvar::new()).collect(),
    });
    let results: Vec<_> = thread::scope(|scope| {
        let work = |(own, thread): (usize, _)| {
            let baton = Arc::clone(&baton);
            scope.spawn(move || work(&baton, own, thread))
        };
        let handles: Vec<_> = threads.into_iter().enumerate().map(work).collect();
        let mut state = baton.lock();
        state.running = state.choose().unwrap_or(0);
        baton.turns[state.running].notify_one();
        drop(state);
        handles.into_iter().map(|handle| handle.join().ok().flatten()).collect()
    });
    let state = baton.lock();
    match (&state.failure, results.into_iter().collect()) {
        (None, Some(results)) => Ok((results, state.points.clone())),
        (failure, _) => Err(failure.clone().unwrap_or_else(|| "a thread has ended early".into())),
    }
}

fn work<T>(baton: &Arc<Baton>, own: usize, thread: impl FnOnce() -> T) -> Option<T> {
    let points = Arc::clone(baton);
    let result = catch_unwind(AssertUnwindSafe(|| {
        baton.wait(baton.lock(), own);
        at_each_point(move |at| points.point(own, at));
        thread()
    }));
    let why = |panic: &Box<dyn std::any::Any + Send>| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
            .unwrap_or_else(|| "panic".into())
    };
    let failure = result.as_ref().err().map(why);
    baton.finish(own, failure);
    result.ok()
}
