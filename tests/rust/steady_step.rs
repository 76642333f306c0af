//! A decode step in the steady state allocates nothing.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use kvfolio::{Batch, BlockPool, Context, PlanRequest, Sequence};

/// The system's allocator, and how often this thread asked it for memory.
struct Counting;

thread_local! {
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is the system allocator's; counting in a thread-local that needs no destructor
// allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK_SIZE: usize = 16;
const ROWS: usize = 64;

/// `ROWS` sequences, as many at each place in a block as at any other, whose lists have grown to the next
/// power of two a while ago.
fn running(write_cache: bool) -> (BlockPool, Batch, Vec<Sequence>) {
    let pool = BlockPool::new(ROWS * 64, BLOCK_SIZE, true).unwrap();
    let batch = Batch::new(&pool, ROWS, 1000).unwrap();
    let sequences: Vec<_> = (0..ROWS)
        .map(|row| {
            let tokens: Vec<_> =
                (0..530 + row % BLOCK_SIZE).map(|token| (token * ROWS + row) as i32).collect();
            let sequence = pool.sequence(&tokens, &Context::default(), true, write_cache).unwrap();
            batch.add(&sequence).unwrap();
            sequence
        })
        .collect();
    (pool, batch, sequences)
}

fn step(batch: &Batch, token: i32, taken: &mut [bool; ROWS]) {
    let plan = batch.plan(&PlanRequest::default()).unwrap();
    plan.commit(None).unwrap();
    plan.extend_into(&[token; ROWS], taken).unwrap();
    assert!(taken.iter().all(|taken| *taken));
}

fn allocations(steps: usize, mut step: impl FnMut(i32)) -> usize {
    let before = ASKED.get();
    (0..steps as i32).for_each(&mut step);
    ASKED.get() - before
}

#[test]
fn a_steady_decode_step_allocates_nothing() {
    let (_pool, batch, sequences) = running(false);
    let mut taken = [false; ROWS];
    (0..40).for_each(|token| step(&batch, token, &mut taken));
    let asked = allocations(100, |token| step(&batch, token, &mut taken));
    assert_eq!(asked, 0);
    assert!(sequences.iter().all(|sequence| sequence.num_computed().unwrap() >= 669));
    assert!(allocations(1, |_| drop(sequences[0].token_ids().unwrap())) > 0, "the counter counts");
}

#[test]
fn nor_does_one_that_publishes_what_it_fills() {
    let (pool, batch, _sequences) = running(true);
    let mut taken = [false; ROWS];
    (0..40).for_each(|token| step(&batch, token, &mut taken));
    let before = pool.stats();
    let asked = allocations(100, |token| step(&batch, token, &mut taken));
    assert!(pool.stats().allocations > before.allocations);
    // The index of the pool grows with what is published, in few steps.
    assert!(asked <= 2, "{asked} allocations in 100 steps");
}

#[test]
fn nor_does_one_that_runs_ahead() {
    let (_pool, batch, _sequences) = running(false);
    let rows: Vec<_> = (0..ROWS).collect();
    let mut taken = [false; ROWS];
    let mut before = batch.plan(&PlanRequest::default()).unwrap();
    let mut step = |token| {
        batch.extend_unknown(&rows).unwrap();
        let ahead = batch.plan(&PlanRequest::default()).unwrap();
        assert_eq!(ahead.arrays().token_ids(), [-1; ROWS]);
        before.commit(None).unwrap();
        before.extend_into(&[token; ROWS], &mut taken).unwrap();
        assert!(taken.iter().all(|taken| *taken));
        before = ahead;
    };
    (0..40).for_each(&mut step);
    assert_eq!(allocations(100, &mut step), 0);
}
