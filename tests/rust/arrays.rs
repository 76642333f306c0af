//! Every array of every plan, held against what the sequences are, through long runs of decode steps in which
//! rows come, go, fork, are cut, run ahead and lose their blocks. `KVFOLIO_SEEDS=5000` runs that many seeds.
//!
//! Rows are looked at seldom, since that takes them out of the fast way of a decode step.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod common;

use std::{collections::HashMap, sync::Arc};

use common::assert_all_free;
use kvfolio::{Batch, BlockPool, Context, Plan, PlanArrays, PlanRequest, Sequence, TokenCaps, UNKNOWN_TOKEN};

const MAX_SEQUENCES: usize = 6;
const MAX_TOKENS: usize = 120;

/// Xorshift (Marsaglia 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % n
    }

    /// Few of them, so that equal blocks come up.
    fn token(&mut self) -> i32 {
        self.below(2) as i32
    }
}

/// What a row should be.
struct Row {
    sequence: Sequence,
    tokens: Vec<i32>,
    planned: usize,
    /// Nothing was planned since it came in, so that what it has computed may be found instead.
    may_find: bool,
}

/// Arrays that somebody holds, and what they said.
struct Held {
    arrays: Arc<PlanArrays>,
    table: Vec<i32>,
    slots: Vec<i64>,
}

struct World {
    random: Random,
    pool: BlockPool,
    batch: Batch,
    rows: HashMap<usize, Row>,
    order: Vec<usize>,
    /// What a table elsewhere holds that takes each plan's updates.
    mirror: HashMap<(i32, i32), i32>,
    held: Vec<Held>,
}

fn table_of(arrays: &PlanArrays) -> Vec<i32> {
    let (cells, width, stride) = arrays.block_table();
    (0..arrays.rows().len()).flat_map(|index| cells[index * stride..][..width].to_vec()).collect()
}

impl World {
    fn new(seed: u64) -> Self {
        let block_size = 1 + seed as usize % 5;
        let pool = BlockPool::new(2 * MAX_SEQUENCES * MAX_TOKENS, block_size, true).unwrap();
        let batch = Batch::new(&pool, MAX_SEQUENCES, MAX_TOKENS).unwrap();
        Self {
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            pool,
            batch,
            rows: HashMap::new(),
            order: Vec::new(),
            mirror: HashMap::new(),
            held: Vec::new(),
        }
    }

    fn add(&mut self, sequence: Sequence, tokens: Vec<i32>, planned: usize) {
        if self.order.len() == MAX_SEQUENCES {
            return;
        }
        let row = self.batch.add(&sequence).unwrap();
        self.order.push(row);
        self.rows.insert(row, Row { sequence, tokens, planned, may_find: true });
    }

    fn add_new(&mut self) {
        let tokens: Vec<_> = (0..=self.random.below(20)).map(|_| self.random.token()).collect();
        let sequence = self.pool.sequence(&tokens, &Context::default(), true, true).unwrap();
        self.add(sequence, tokens, 0);
    }

    fn leave(&mut self, row: usize) -> Row {
        self.order.retain(|other| *other != row);
        self.batch.remove(row).unwrap();
        self.rows.remove(&row).unwrap()
    }

    fn some_row(&mut self) -> Option<usize> {
        (!self.order.is_empty()).then(|| self.order[self.random.below(self.order.len())])
    }

    /// Make a plan of `request`, and hold all that it says against the rows.
    fn plan(&mut self, request: &PlanRequest<'_>) -> Plan {
        let plan = self.batch.plan(request).unwrap();
        let arrays = plan.arrays();
        let block_size = self.pool.block_size();
        let (cells, width, stride) = arrays.block_table();
        for [row, index, block] in arrays.table_updates() {
            self.mirror.insert((*row, *index), *block);
        }
        let mut logits = Vec::new();
        let (mut longest, mut most_queries, mut indptr, mut pages) = (0, 0, vec![0], Vec::new());
        for (index, &number) in arrays.rows().iter().enumerate() {
            let starts = &arrays.query_start_loc()[index..][..2];
            let (first, count) = (starts[0] as usize, (starts[1] - starts[0]) as usize);
            let stop = arrays.seq_lens()[index] as usize;
            let row = self.rows.get_mut(&(number as usize)).unwrap();
            let found = (stop - count).checked_sub(row.planned).unwrap();
            assert!(
                found == 0 || row.may_find && (row.planned + found).is_multiple_of(block_size),
                "row {number}: {found} found behind {}, {}",
                row.planned,
                row.may_find
            );
            (row.planned, row.may_find) = (stop, false);
            let num_blocks = stop.div_ceil(block_size);
            let own = &cells[index * stride..][..width];
            for position in stop - count..stop {
                let token = first + position + count - stop;
                assert_eq!(arrays.token_ids()[token], row.tokens[position]);
                assert_eq!(arrays.positions()[token], position as i64);
                let slot = own[position / block_size] as usize * block_size + position % block_size;
                assert_eq!(arrays.slot_mapping()[token], slot as i64);
            }
            assert_eq!(arrays.last_page_len()[index] as usize, (stop - 1) % block_size + 1);
            assert!(own[num_blocks..].iter().all(|block| *block == 0), "padded");
            for (place, block) in own[..num_blocks].iter().enumerate() {
                assert_eq!(self.mirror.get(&(number, place as i32)).unwrap_or(&0), block, "told");
            }
            if self.random.below(4) == 0 {
                let blocks: Vec<_> = row.sequence.blocks().unwrap().iter().map(|b| b.as_i32()).collect();
                assert_eq!(own[..num_blocks], blocks);
            }
            if stop == row.tokens.len() {
                logits.push((number, (first + count - 1) as i64));
            }
            (longest, most_queries) = (longest.max(stop), most_queries.max(count));
            pages.extend_from_slice(&own[..num_blocks]);
            indptr.push(pages.len() as i32);
        }
        let found = arrays.logits_rows().iter().copied().zip(arrays.logits_indices().iter().copied());
        assert!(found.eq(logits));
        assert_eq!((arrays.max_seq_len(), arrays.max_query_len()), (longest, most_queries));
        assert_eq!((&arrays.csr().indptr, &arrays.csr().indices), (&indptr, &pages));
        plan
    }

    /// The sampled tokens of a plan come in.
    fn extend(&mut self, plan: &Plan) {
        let rows = plan.arrays().logits_rows().to_vec();
        let tokens: Vec<_> = rows.iter().map(|_| self.random.token()).collect();
        assert!(plan.extend(&tokens).unwrap().iter().all(|taken| *taken));
        for (row, token) in rows.iter().zip(&tokens) {
            let row = self.rows.get_mut(&(*row as usize)).unwrap();
            match row.tokens.iter_mut().find(|token| **token == UNKNOWN_TOKEN) {
                Some(unknown) => *unknown = *token,
                None => row.tokens.push(*token),
            }
        }
    }

    fn step(&mut self) {
        let order: Vec<_> = self.order.iter().rev().copied().collect();
        let request = match self.random.below(12) {
            0 => PlanRequest { rows: Some(&order), ..PlanRequest::default() },
            1 => PlanRequest { rows: Some(&order[order.len() / 2..]), ..PlanRequest::default() },
            2 => PlanRequest { num_tokens: TokenCaps::Same(3), ..PlanRequest::default() },
            _ => PlanRequest::default(),
        };
        let before = self.random.below(8) == 0;
        let plan = self.plan(&request);
        if before {
            self.extend(&plan);
        }
        plan.commit(None).unwrap();
        if !before {
            self.extend(&plan);
        }
        if self.random.below(8) == 0 {
            let arrays = Arc::clone(plan.arrays());
            self.held.truncate(3);
            let (table, slots) = (table_of(&arrays), arrays.slot_mapping().to_vec());
            self.held.insert(0, Held { arrays, table, slots });
        }
    }

    /// Two plans in flight, the second with tokens that the first has yet to sample, or had not when they were
    /// appended.
    fn run_ahead(&mut self) {
        let first = self.plan(&PlanRequest::default());
        let sampling: Vec<_> = first.arrays().logits_rows().iter().map(|row| *row as usize).collect();
        self.batch.extend_unknown(&sampling).unwrap();
        for row in &sampling {
            self.rows.get_mut(row).unwrap().tokens.push(UNKNOWN_TOKEN);
        }
        let told_before = self.random.below(3) == 0;
        if told_before {
            self.extend(&first);
        }
        let second = self.plan(&PlanRequest::default());
        if !told_before {
            self.extend(&first);
        }
        first.commit(None).unwrap();
        second.commit(None).unwrap();
        self.extend(&second);
    }

    fn something_else(&mut self, what: usize) {
        let Some(number) = self.some_row() else { return };
        match what {
            0 => drop(self.leave(number)),
            1 => {
                let row = &self.rows[&number];
                let fork = row.sequence.fork().unwrap();
                let (tokens, planned) = (row.tokens.clone(), row.planned);
                self.add(fork, tokens, planned);
            }
            2 => {
                let keep = self.random.below(self.rows[&number].tokens.len()) + 1;
                let row = self.rows.get_mut(&number).unwrap();
                if row.sequence.truncate(keep).is_ok() {
                    row.tokens.truncate(keep);
                    row.planned = row.sequence.num_computed().unwrap();
                    row.may_find = true; // if nothing is left that it computed by itself
                }
            }
            3 => {
                let row = self.leave(number);
                self.batch.add(&row.sequence).unwrap();
                let place = self.batch.rows().unwrap().last().copied().unwrap();
                self.order.push(place);
                self.rows.insert(place, row);
            }
            4 => {
                self.batch.preempt(number).unwrap();
                self.order.retain(|other| *other != number);
                let Row { sequence, tokens, .. } = self.rows.remove(&number).unwrap();
                self.add(sequence, tokens, 0);
            }
            5 => {
                self.pool.reset_prefix_cache();
            }
            6 => {
                let token = self.random.token();
                self.batch.extend(&[number], &[token]).unwrap();
                self.rows.get_mut(&number).unwrap().tokens.push(token);
            }
            _ => {
                let saved: Vec<_> =
                    self.rows.iter().map(|(number, row)| (*number, row.planned, row.may_find)).collect();
                self.plan(&PlanRequest::default()).rollback().unwrap();
                for (number, planned, may_find) in saved {
                    let row = self.rows.get_mut(&number).unwrap();
                    (row.planned, row.may_find) = (planned, may_find);
                }
            }
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            if self.order.is_empty() || self.random.below(12) == 0 {
                self.add_new();
            }
            let long = self.order.iter().copied().find(|row| self.rows[row].tokens.len() + 4 > MAX_TOKENS);
            if let Some(row) = long {
                drop(self.leave(row));
            } else if self.random.below(6) == 0 {
                let what = self.random.below(8);
                self.something_else(what);
            } else if self.random.below(5) == 0 {
                self.run_ahead();
            } else {
                self.step();
            }
            for held in &self.held {
                assert_eq!(
                    (table_of(&held.arrays), held.arrays.slot_mapping()),
                    (held.table.clone(), &held.slots[..])
                );
            }
        }
        self.pool.audit().unwrap();
    }
}

#[test]
fn plans_say_what_the_sequences_are() {
    let seeds = std::env::var("KVFOLIO_SEEDS").map_or(60, |seeds| seeds.parse().unwrap());
    for seed in 0..seeds {
        println!("seed {seed}"); // shown if it fails
        let mut world = World::new(seed);
        world.run(400);
        let pool = world.pool.clone();
        drop(world);
        assert_all_free(&pool);
    }
}
