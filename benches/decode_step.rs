//! Decode steps without Python: one token a row, every row of the batch.
//!
//! `cargo bench --bench decode_step` prints the median time of a step; arguments are sizes, as `256x1000`.
//! Instructions: `valgrind --tool=callgrind --toggle-collect='*decode_steps*' BINARY 256x1000`.
#![expect(clippy::unwrap_used, reason = "a bench that fails may say so by panicking")]

use std::{hint::black_box, time::Instant};

use kvfolio::{Batch, BlockPool, Context, PlanRequest, Sequence};

const BLOCK_SIZE: usize = 16;
const WARM_UP: usize = 64;
const STEPS: usize = 960;

/// As many sequences at each place in a block as at any other.
fn running(num_rows: usize, length: usize) -> (Batch, Vec<Sequence>) {
    let blocks_each = (length + WARM_UP + 2 * STEPS) / BLOCK_SIZE + 2;
    let pool = BlockPool::new(num_rows * blocks_each, BLOCK_SIZE, true).unwrap();
    let batch = Batch::new(&pool, num_rows, blocks_each * BLOCK_SIZE).unwrap();
    let sequences = (0..num_rows).map(|row| {
        let tokens: Vec<_> =
            (0..length + row % BLOCK_SIZE).map(|token| (token * num_rows + row) as i32).collect();
        let sequence = pool.sequence(&tokens, &Context::default(), true, true).unwrap();
        batch.add(&sequence).unwrap();
        sequence
    });
    let sequences = sequences.collect();
    warm_up(&batch, num_rows);
    (batch, sequences)
}

#[inline(never)]
fn warm_up(batch: &Batch, num_rows: usize) {
    (0..WARM_UP).for_each(|_| step(batch, &vec![7; num_rows], &mut vec![false; num_rows]));
}

/// The time of each step, in nanoseconds.
#[inline(never)]
fn decode_steps(batch: &Batch, num_rows: usize, count: usize) -> Vec<u128> {
    let (tokens, mut taken) = (vec![7; num_rows], vec![false; num_rows]);
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        step(batch, &tokens, &mut taken);
        times.push(start.elapsed().as_nanos());
    }
    times
}

#[inline]
fn step(batch: &Batch, tokens: &[i32], taken: &mut [bool]) {
    let plan = batch.plan(&PlanRequest::default()).unwrap();
    black_box(plan.arrays());
    plan.commit(None).unwrap();
    plan.extend_into(tokens, taken).unwrap();
}

fn main() {
    let mut sizes: Vec<String> = std::env::args().skip(1).filter(|size| size.contains('x')).collect();
    if sizes.is_empty() {
        sizes = ["16x1000", "256x1000", "1024x1000", "256x32000"].map(String::from).to_vec();
    }
    for size in sizes {
        let (num_rows, length) = size.split_once('x').unwrap();
        let (num_rows, length): (usize, usize) = (num_rows.parse().unwrap(), length.parse().unwrap());
        let (batch, _sequences) = running(num_rows, length);
        let mut times = decode_steps(&batch, num_rows, STEPS);
        times.sort_unstable();
        let median = times[times.len() / 2] as f64;
        let least = times[0] as f64 / 1e3;
        let row = median / num_rows as f64;
        println!("{size:>12}: {:8.2} us a step ({least:.2} at least), {row:6.1} ns a row", median / 1e3);
    }
}
