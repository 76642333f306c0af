//! What is cut into parts comes out as if it were whole, and what is shared is read once.

use std::num::NonZeroUsize;

use super::*;
use crate::kernels::schedule::{Schedule, Sizes};
use crate::kernels::set_num_threads;

impl<E: Element> Case<E> {
    /// Makes rows share their first blocks with another row, `(row, other, blocks)` each.
    fn share(mut self, pairs: &[(usize, usize, usize)]) -> Self {
        for &(row, other, blocks) in pairs {
            let common = self.tables[other][..blocks].to_vec();
            self.tables[row][..blocks].copy_from_slice(&common);
        }
        self
    }

    fn schedule(&self, sliding_window: Option<usize>, threads: usize) -> Schedule {
        let tables: Vec<&[i32]> = self.tables.iter().map(Vec::as_slice).collect();
        let step = Step { block_table: &tables, seq_lens: &self.seq_lens, query_start_loc: &self.starts };
        let [num_heads, num_kv_heads] = self.heads;
        let sizes = Sizes {
            block_size: self.block_size,
            num_kv_heads,
            head_dim: self.dim,
            group: num_heads / num_kv_heads,
            threads,
        };
        Schedule::new(&step, sliding_window, &sizes)
    }
}

/// Keys that all tiles load, of all heads.
fn loads(schedule: &Schedule) -> usize {
    schedule.tiles.iter().map(|tile| tile.keys.len() * tile.heads.len()).sum()
}

/// How often each query meets each key, of all heads.
fn meetings(schedule: &Schedule) -> usize {
    schedule.tiles.iter().map(|tile| tile.keys.len() * tile.heads.len() * tile.queries.len()).sum()
}

const FAMILY: [(usize, usize); 5] = [(1, 500), (1, 450), (2, 470), (1, 300), (1, 64)];
/// Three rows share 20 blocks of 16, two of them 25; one has its first blocks from the others, too, but few.
const KIN: [(usize, usize, usize); 3] = [(1, 0, 25), (2, 0, 20), (4, 0, 2)];

#[test]
fn a_shared_prefix_is_loaded_once() {
    let case = Case::<f32>::new(&FAMILY, [4, 2], 64, 16).share(&KIN);
    let schedule = case.schedule(None, 1);
    let whole: usize = FAMILY.iter().map(|row| row.1).sum();
    assert_eq!(loads(&schedule), 2 * (whole - 2 * 20 * 16 - 5 * 16));
    let apart = FAMILY.iter().map(|row| row.0 * row.1).sum::<usize>();
    assert_eq!(meetings(&schedule), 2 * apart);
    // Under a window rows see different parts of it.
    assert!(case.schedule(Some(100), 1).tiles.iter().all(|tile| tile.partial.is_none()));
}

#[test]
fn rows_that_share_blocks_get_what_they_would_get_alone() {
    for heads in [[4, 2], [4, 1], [16, 2]] {
        Case::<f32>::new(&FAMILY, heads, 64, 16).share(&KIN).assert_right(&plain(64), 2e-6);
        Case::<f16>::new(&FAMILY, heads, 64, 16).share(&KIN).assert_right(&plain(64), 5e-4);
        Case::<bf16>::new(&FAMILY, heads, 72, 16).share(&KIN).assert_right(&plain(72), 8e-3);
    }
    let scoring = Scoring {
        sinks: Some(&[1.0, -2.0, f32::NEG_INFINITY, 5.0]),
        alibi_slopes: Some(&[0.01, 0.02, -0.01, 0.0]),
        logit_softcap: Some(3.0),
        ..plain(64)
    };
    Case::<f32>::new(&FAMILY, [4, 2], 64, 16).share(&KIN).assert_right(&scoring, 3e-6);
}

#[test]
fn forks_that_share_all_but_nothing_of_their_own_are_right() {
    // The same blocks to the last, so that no key is left to the rows alone.
    let mut case = Case::<f32>::new(&[(1, 256), (1, 256), (1, 256)], [4, 2], 32, 16);
    case.tables[1] = case.tables[0].clone();
    case.tables[2] = case.tables[0].clone();
    case.assert_right(&plain(32), 2e-6);
    assert_eq!(loads(&case.schedule(None, 1)), 2 * 256);
}

#[test]
fn a_long_context_is_split_among_threads_and_merged() {
    let rows = [(1, 5000)];
    let case = Case::<f32>::new(&rows, [8, 2], 128, 16);
    assert_eq!(case.schedule(None, 1).tiles.len(), 1);
    let schedule = case.schedule(None, 4);
    assert!(schedule.tiles.len() >= 8, "{:?}", schedule.tiles);
    assert_eq!((loads(&schedule), schedule.merges.len()), (2 * 5000, 1));
    set_num_threads(NonZeroUsize::new(4).unwrap());
    let scoring = Scoring { sinks: Some(&[1.0; 8]), ..plain(128) };
    case.assert_right(&scoring, 2e-6);
    Case::<bf16>::new(&rows, [8, 2], 128, 16).assert_right(&scoring, 8e-3);
    Case::<f32>::new(&[(1, 3000), (1, 40), (60, 2000)], [8, 2], 128, 16).assert_right(&plain(128), 2e-6);
}

#[test]
fn a_few_short_rows_are_split_by_heads() {
    let schedule = Case::<f32>::new(&[(1, 100)], [8, 4], 64, 16).schedule(None, 2);
    assert_eq!(schedule.tiles.len(), 4);
    assert!(schedule.merges.is_empty() && loads(&schedule) == 400);
}

#[test]
fn dead_cells_of_the_table_and_empty_rows_are_passed_over() {
    for block_size in [1, 4, 16] {
        let mut case = Case::<bf16>::new(&[(1, 70), (2, 9), (30, 130)], [4, 2], 64, block_size);
        for table in &mut case.tables {
            table.extend([-1, i32::MAX, 0, -7]);
        }
        case.assert_right(&plain(64), 8e-3);
        case.seq_lens[1] = 0;
        for arithmetic in Arithmetic::available() {
            let (out, lse) = case.attend(arithmetic, &plain(64)).unwrap();
            let row = 4 * 64;
            assert!(out[row..3 * row].iter().all(|x| x.to_f32() == 0.0));
            assert!(out[..row].iter().chain(&out[3 * row..]).all(|x| x.to_f32().abs() < 2.0));
            assert!(lse[4..12].iter().all(|&x| x == f32::NEG_INFINITY));
        }
    }
}
