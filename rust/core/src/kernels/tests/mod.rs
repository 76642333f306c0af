//! Attention on every instruction set that the machine has, against a plain f64 computation.
//! Every slot that no sequence owns is NaN.
#![expect(clippy::float_cmp, reason = "copies and sentinels are exact")]
#![expect(clippy::unwrap_used, reason = "a test may fail so")]

use half::{bf16, f16};

mod splits;

use super::attention::attend_with;
use super::job::Arithmetic;
use super::*;

/// Numbers between -1 and 1, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn take<E: Element>(&mut self, count: usize) -> Vec<E> {
        (0..count).map(|_| E::from_f32(self.next())).collect()
    }
}

struct Case<E> {
    heads: [usize; 2],
    dim: usize,
    block_size: usize,
    tables: Vec<Vec<i32>>,
    seq_lens: Vec<i32>,
    starts: Vec<i32>,
    q: Vec<E>,
    keys: Vec<E>,
    values: Vec<E>,
}

impl<E: Element> Case<E> {
    /// Sequences of `(queries, length)`, their blocks dealt out in turn, so that no two neighbours are.
    fn new(rows: &[(usize, usize)], heads: [usize; 2], dim: usize, block_size: usize) -> Self {
        let mut numbers = Numbers(7);
        let most = rows.iter().map(|row| row.1.div_ceil(block_size)).max().unwrap_or(0);
        let num_blocks = most * rows.len() + 1;
        let slot = heads[1] * dim;
        let mut keys = vec![E::from_f32(f32::NAN); num_blocks * block_size * slot];
        let mut values = keys.clone();
        let mut tables = vec![];
        let mut starts = vec![0];
        for (row, &(queries, length)) in rows.iter().enumerate() {
            let table: Vec<i32> =
                (0..length.div_ceil(block_size)).map(|i| (1 + i * rows.len() + row) as i32).collect();
            for position in 0..length {
                let place =
                    (table[position / block_size] as usize * block_size + position % block_size) * slot;
                keys[place..place + slot].copy_from_slice(&numbers.take(slot));
                values[place..place + slot].copy_from_slice(&numbers.take(slot));
            }
            tables.push(table);
            starts.push(starts[row] + queries as i32);
        }
        let tokens = starts[rows.len()] as usize;
        let q = (0..tokens * heads[0] * dim).map(|_| E::from_f32(3.0 * numbers.next())).collect();
        let seq_lens = rows.iter().map(|row| row.1 as i32).collect();
        Self { heads, dim, block_size, tables, seq_lens, starts, q, keys, values }
    }

    fn shape(&self) -> [usize; 4] {
        let slot = self.block_size * self.heads[1] * self.dim;
        [self.keys.len() / slot, self.block_size, self.heads[1], self.dim]
    }

    fn tokens(&self) -> usize {
        self.q.len() / (self.heads[0] * self.dim)
    }

    fn attend(
        &self,
        arithmetic: Arithmetic,
        scoring: &Scoring<'_>,
    ) -> Result<(Vec<E>, Vec<f32>), KernelError> {
        let tables: Vec<&[i32]> = self.tables.iter().map(Vec::as_slice).collect();
        let step = Step { block_table: &tables, seq_lens: &self.seq_lens, query_start_loc: &self.starts };
        let mut out = vec![E::from_f32(77.0); self.q.len()];
        let mut lse = vec![77.0; self.tokens() * self.heads[0]];
        let q = TokenView::new(&self.q, [self.tokens(), self.heads[0], self.dim]);
        let (keys, values) =
            (PagedView::new(&self.keys, self.shape()), PagedView::new(&self.values, self.shape()));
        attend_with(arithmetic, &q, &keys, &values, &step, scoring, &mut out, Some(&mut lse)).inspect_err(
            |_| {
                assert!(lse.iter().all(|&x| x == 77.0), "a refused call has written");
            },
        )?;
        Ok((out, lse))
    }

    /// The row of K or V at a position.
    fn row<'a>(&self, data: &'a [E], row: usize, position: usize, head: usize) -> &'a [E] {
        let slot = self.tables[row][position / self.block_size] as usize * self.block_size
            + position % self.block_size;
        &data[(slot * self.heads[1] + head) * self.dim..][..self.dim]
    }

    fn reference(&self, scoring: &Scoring<'_>) -> (Vec<f64>, Vec<f64>) {
        let (mut out, mut lse) = (vec![], vec![]);
        let f64_of = |x: &E| f64::from(x.to_f32());
        for (row, bounds) in self.starts.windows(2).enumerate() {
            for token in bounds[0]..bounds[1] {
                let position = self.seq_lens[row] - bounds[1] + token;
                for head in 0..self.heads[0] {
                    let q = &self.q[(token as usize * self.heads[0] + head) * self.dim..][..self.dim];
                    let kv_head = head / (self.heads[0] / self.heads[1]);
                    let first =
                        scoring.sliding_window.map_or(0, |window| (position + 1 - window as i32).max(0));
                    let seen = first..(position + 1).min(self.seq_lens[row]);
                    let mut sums = vec![0.0; self.dim];
                    let mut denominator = scoring.sinks.map_or(0.0, |sinks| f64::from(sinks[head]).exp());
                    for at in seen {
                        let k = self.row(&self.keys, row, at as usize, kv_head);
                        let mut s: f64 = q.iter().zip(k).map(|(q, k)| f64_of(q) * f64_of(k)).sum();
                        s *= f64::from(scoring.scale);
                        s = scoring
                            .logit_softcap
                            .map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh());
                        s += scoring
                            .alibi_slopes
                            .map_or(0.0, |slopes| f64::from(slopes[head]) * f64::from(at - position));
                        denominator += s.exp();
                        let v = self.row(&self.values, row, at as usize, kv_head);
                        sums.iter_mut().zip(v).for_each(|(sum, v)| *sum += s.exp() * f64_of(v));
                    }
                    out.extend(sums.iter().map(
                        |sum| {
                            if denominator == 0.0 { 0.0 } else { sum / denominator }
                        },
                    ));
                    lse.push(denominator.ln());
                }
            }
        }
        (out, lse)
    }

    fn assert_right(&self, scoring: &Scoring<'_>, tolerance: f64) {
        let (true_out, true_lse) = self.reference(scoring);
        for arithmetic in Arithmetic::available() {
            let (out, lse) = self.attend(arithmetic, scoring).unwrap();
            for (place, (x, y)) in out.iter().zip(&true_out).enumerate() {
                let error = (f64::from(x.to_f32()) - y).abs();
                let name = arithmetic.name();
                assert!(error <= tolerance, "{name}: out[{place}] is {} instead of {y}", x.to_f32());
            }
            for (place, (&x, y)) in lse.iter().zip(&true_lse).enumerate() {
                let error = (f64::from(x) - y).abs();
                assert!(error <= 2e-5 || f64::from(x) == *y, "lse[{place}] is {x} instead of {y}");
            }
        }
    }
}

fn plain(dim: usize) -> Scoring<'static> {
    let scale = 1.0 / (dim as f32).sqrt();
    Scoring { scale, sliding_window: None, logit_softcap: None, alibi_slopes: None, sinks: None }
}

const MIXED: [(usize, usize); 6] = [(1, 70), (1, 1), (17, 17), (40, 150), (0, 9), (3, 200)];

#[test]
fn attention_is_right_at_every_block_size_and_head_dim() {
    let sizes =
        [(1, 128), (4, 80), (16, 64), (32, 8), (16, 13), (5, 100), (128, 256), (64, 136), (8, 264), (2, 24)];
    for (block_size, dim) in sizes {
        Case::<f32>::new(&MIXED, [4, 2], dim, block_size).assert_right(&plain(dim), 2e-6);
        Case::<bf16>::new(&MIXED, [4, 2], dim, block_size).assert_right(&plain(dim), 8e-3);
    }
}

#[test]
fn attention_is_right_for_every_group_size() {
    for heads in [[1, 1], [3, 3], [4, 1], [7, 1], [14, 2], [71, 1]] {
        Case::<f32>::new(&MIXED, heads, 24, 4).assert_right(&plain(24), 2e-6);
    }
}

#[test]
fn half_types_lose_no_more_than_their_own_rounding() {
    Case::<f16>::new(&MIXED, [4, 2], 80, 16).assert_right(&plain(80), 5e-4);
    Case::<bf16>::new(&MIXED, [4, 2], 80, 16).assert_right(&plain(80), 8e-3); // weights are rounded, too
    Case::<f16>::new(&MIXED, [8, 1], 13, 5).assert_right(&plain(13), 5e-4);
}

#[test]
fn window_cap_slopes_and_sinks_work_together_and_apart() {
    let case = Case::<f32>::new(&MIXED, [4, 2], 64, 16);
    for choice in 0..16 {
        let scoring = Scoring {
            scale: 0.7,
            sliding_window: (choice & 1 != 0).then_some(19),
            logit_softcap: (choice & 2 != 0).then_some(2.5),
            alibi_slopes: (choice & 4 != 0).then_some(&[0.5, 0.25, 0.125, -0.1]),
            sinks: (choice & 8 != 0).then_some(&[1.0, -2.0, f32::NEG_INFINITY, 30.0]),
        };
        case.assert_right(&scoring, 3e-6);
    }
}

#[test]
fn a_cap_far_above_the_scores_changes_nothing() {
    let case = Case::<f32>::new(&MIXED, [4, 2], 64, 16);
    case.assert_right(&Scoring { logit_softcap: Some(1e6), ..plain(64) }, 2e-6);
}

#[test]
fn large_scores_do_not_overflow() {
    let case = Case::<f32>::new(&MIXED, [2, 2], 64, 16);
    let arithmetic = Arithmetic::best();
    let (out, lse) = case.attend(arithmetic, &Scoring { scale: 1e4, ..plain(64) }).unwrap();
    assert!(out.iter().all(|x| x.is_finite()) && lse.iter().all(|x| x.is_finite()));
}

#[test]
fn an_empty_sequence_gives_zeros_and_what_its_sink_says() {
    let mut case = Case::<f32>::new(&[(2, 5), (3, 16)], [2, 2], 8, 4);
    case.seq_lens[1] = 0;
    for arithmetic in Arithmetic::available() {
        let (out, lse) = case.attend(arithmetic, &plain(8)).unwrap();
        assert!(out[2 * 16..].iter().all(|&x| x == 0.0) && out[..2 * 16].iter().all(|&x| x != 0.0));
        assert!(lse[4..].iter().all(|&x| x == f32::NEG_INFINITY));
        let (out, lse) = case.attend(arithmetic, &Scoring { sinks: Some(&[0.5, 2.0]), ..plain(8) }).unwrap();
        assert!(out[2 * 16..].iter().all(|&x| x == 0.0));
        assert_eq!(lse[4..], [0.5, 2.0, 0.5, 2.0, 0.5, 2.0]);
    }
}

fn assert_unseen_has_no_influence<E: Element>(heads: [usize; 2], tolerance: f64) {
    let (dim, width) = (40, 40 * heads[1]);
    let mut case = Case::<E>::new(&[(9, 300)], heads, dim, 4);
    let scoring = Scoring { sliding_window: Some(5), ..plain(dim) };
    let before = case.reference(&scoring);
    // Position 290 is outside the window of queries at 295 and later, position 299 in the future of all but the last.
    for position in [290, 299] {
        let slot = case.tables[0][position / 4] as usize * 4 + position % 4;
        case.values[slot * width..(slot + 1) * width].fill(E::from_f32(f32::NAN));
        case.keys[slot * width..(slot + 1) * width].fill(E::from_f32(f32::NAN));
    }
    for arithmetic in Arithmetic::available() {
        let (out, _) = case.attend(arithmetic, &scoring).unwrap();
        for (place, (x, y)) in out.iter().zip(&before.0).enumerate() {
            let (x, position) = (x.to_f32(), 291 + place / (heads[0] * dim));
            let sees = position <= 294 || position == 299;
            assert_eq!(x.is_nan(), sees, "query at {position}, {}", arithmetic.name());
            assert!(sees || (f64::from(x) - y).abs() < tolerance, "{x} for {y}, {}", arithmetic.name());
        }
    }
}

#[test]
fn an_unseen_value_has_no_influence_even_if_it_is_nan() {
    for heads in [[2, 1], [1, 1], [8, 2], [8, 1]] {
        assert_unseen_has_no_influence::<f32>(heads, 2e-6);
        assert_unseen_has_no_influence::<f16>(heads, 5e-4);
        assert_unseen_has_no_influence::<bf16>(heads, 8e-3);
    }
}

#[test]
fn a_number_out_of_range_is_named_before_anything_is_read() {
    let case = || Case::<f32>::new(&[(1, 10), (2, 9)], [2, 1], 8, 4);
    let refusal =
        |case: &Case<f32>, scoring: &Scoring<'_>| case.attend(Arithmetic::best(), scoring).unwrap_err();
    let plain = plain(8);

    let mut bad = case();
    bad.tables[1][2] = bad.shape()[0] as i32;
    assert!(matches!(refusal(&bad, &plain), KernelError::Block { row: 1, index: 2, .. }));
    bad.tables[1][2] = -1;
    assert!(matches!(refusal(&bad, &plain), KernelError::Block { row: 1, index: 2, found: -1, .. }));
    bad.tables[1][2] = 0;
    assert!(matches!(refusal(&bad, &plain), KernelError::Discarded { row: 1, index: 2, .. }));
    for length in [1, 13, -1, i32::MAX] {
        let mut bad = case();
        bad.seq_lens[1] = length;
        assert!(
            matches!(refusal(&bad, &plain), KernelError::SequenceLength { row: 1, found, .. } if found == length)
        );
    }
    for starts in [[1, 1, 3], [0, 4, 3], [0, 1, 2], [0, -1, 3]] {
        let mut bad = case();
        bad.starts = starts.to_vec();
        assert!(matches!(refusal(&bad, &plain), KernelError::QueryStart { .. }), "{starts:?}");
    }
    for scoring in [
        Scoring { scale: f32::NAN, ..plain },
        Scoring { sliding_window: Some(0), ..plain },
        Scoring { logit_softcap: Some(0.0), ..plain },
        Scoring { alibi_slopes: Some(&[1.0, f32::INFINITY]), ..plain },
        Scoring { sinks: Some(&[1.0, f32::NAN]), ..plain },
    ] {
        assert!(matches!(refusal(&case(), &scoring), KernelError::Parameter { .. }), "{scoring:?}");
    }
    let scoring = Scoring { sinks: Some(&[1.0]), ..plain };
    assert!(matches!(refusal(&case(), &scoring), KernelError::Size { argument: "sinks", .. }));
    let mut bad = case();
    bad.heads = [3, 2];
    bad.dim = 4;
    bad.q.truncate(3 * 3 * 4);
    assert!(matches!(refusal(&bad, &plain), KernelError::HeadGroups { num_heads: 3, num_kv_heads: 2 }));
}

#[test]
fn discarded_blocks_before_the_window_are_not_looked_at() {
    let mut case = Case::<f32>::new(&[(3, 30)], [2, 1], 8, 4);
    let scoring = Scoring { sliding_window: Some(9), ..plain(8) };
    let before = case.attend(Arithmetic::best(), &scoring).unwrap();
    case.tables[0][..4].fill(0); // positions 0..16; the first query stands at 27 and sees 19 and on
    assert_eq!(case.attend(Arithmetic::best(), &scoring).unwrap(), before);
    case.tables[0][4] = 0;
    let refusal = case.attend(Arithmetic::best(), &scoring).unwrap_err();
    assert_eq!(refusal, KernelError::Discarded { row: 0, index: 4, start: 16, stop: 19, first_visible: 19 });
}

#[test]
fn write_puts_tokens_into_their_slots_and_nothing_else() {
    let shape = [5, 4, 3, 8];
    for tokens in [4, 20] {
        let mut numbers = Numbers(3);
        let (k, v): (Vec<f32>, Vec<f32>) = (numbers.take(tokens * 24), numbers.take(tokens * 24));
        let (mut keys, mut values) = (vec![77.0; 480], vec![77.0; 480]);
        let slots: Vec<i64> =
            (0..tokens as i64).map(|t| if t % 3 == 1 { -1 - t } else { (t * 7) % 20 }).collect();
        let source = [&k, &v].map(|data| TokenView::new(data, [tokens, 3, 8]));
        let (mut key_view, mut value_view) =
            (PagedViewMut::new(&mut keys, shape), PagedViewMut::new(&mut values, shape));
        write(&source[0], &source[1], &mut key_view, &mut value_view, &slots).unwrap();
        for slot in 0..20 {
            let token = slots.iter().position(|&s| s == slot as i64);
            let expected =
                |data: &[f32]| token.map_or(vec![77.0; 24], |t| data[t * 24..(t + 1) * 24].to_vec());
            assert_eq!(keys[slot * 24..(slot + 1) * 24], expected(&k));
            assert_eq!(values[slot * 24..(slot + 1) * 24], expected(&v));
        }
    }
}

#[test]
fn write_refuses_a_slot_behind_the_end_and_changes_nothing() {
    let k = vec![1.0; 2 * 24];
    let (mut keys, mut values) = (vec![77.0; 480], vec![77.0; 480]);
    let source = TokenView::new(&k, [2, 3, 8]);
    let shape = [5, 4, 3, 8];
    let (mut key_view, mut value_view) =
        (PagedViewMut::new(&mut keys, shape), PagedViewMut::new(&mut values, shape));
    let refusal = write(&source, &source, &mut key_view, &mut value_view, &[3, 20]).unwrap_err();
    assert_eq!(refusal, KernelError::Slot { token: 1, limit: 20, found: 20 });
    let refusal = write(&source, &source, &mut key_view, &mut value_view, &[3]).unwrap_err();
    assert!(matches!(
        refusal,
        KernelError::Size { argument: "k", axis: "number of tokens", expected: 1, found: 2 }
    ));
    assert!(keys.iter().chain(&values).all(|&x| x == 77.0));
}

/// Views of one buffer whose blocks are dense (NHD, HND) or lie apart, as with K and V packed in one array.
fn layouts() -> [([isize; 3], usize); 3] {
    [([24 * 4, 24, 8], 480), ([24 * 4, 8, 32], 480), ([24 * 8, 48, 8], 960)]
}

#[test]
fn copies_read_all_sources_before_they_write() {
    for (strides, size) in layouts() {
        let original: Vec<f32> = (0..size).map(|x| x as f32).collect();
        for copies in [vec![[1, 2], [3, 4]], vec![[1, 2], [2, 1]], vec![[1, 2], [2, 3], [4, 4]]] {
            let mut data = original.clone();
            let at = |block: i32, t: isize, h: isize| {
                (block as isize * strides[0] + t * strides[1] + h * strides[2]) as usize
            };
            // SAFETY: the layouts' last elements are the buffer's, and none of them overlaps itself.
            let view = unsafe { PagedViewMut::from_raw_parts(data.as_mut_ptr(), [5, 4, 3, 8], strides) };
            copy_blocks(&mut [view], &copies).unwrap();
            let mut expected = original.clone();
            for &[src, dst] in &copies {
                for (t, h) in (0..4).flat_map(|t| (0..3).map(move |h| (t, h))) {
                    let (from, to) = (at(src, t, h), at(dst, t, h));
                    expected[to..to + 8].copy_from_slice(&original[from..from + 8]);
                }
            }
            assert_eq!(data, expected, "{copies:?} {strides:?}");
        }
    }
}

#[test]
fn copies_outside_the_storage_or_onto_one_block_are_refused() {
    let mut data = vec![1.0; 480];
    let mut views = [PagedViewMut::new(&mut data, [5, 4, 3, 8])];
    for ids in [[0, 1], [1, 0], [1, 5], [-1, 2]] {
        let refusal = copy_blocks(&mut views, &[[2, 3], ids]).unwrap_err();
        assert!(matches!(refusal, KernelError::CopyBlock { pair: 1, .. }), "{ids:?}");
    }
    let refusal = copy_blocks(&mut views, &[[1, 3], [2, 3]]).unwrap_err();
    assert_eq!(refusal, KernelError::CopyTwice { pair: 1, block: 3 });
}
