//! A random serving loop over one pool, next to a shadow memory that plans are executed on.
//!
//! Every slot holds a hash of the history that its K and V were computed from: context and tokens up to
//! there, as a step found them in the memory. So whatever reads a slot can tell whose it is. A plan is
//! executed between its making and its commit, in order within a batch, in any order among batches. On the
//! side somebody lends blocks, shares those of sequences, and keeps tables of his own.
//!
//! A world may have the pool to itself, and then every count is checked at every step; or several, each of a
//! thread, share a pool and its memory.

mod memory;
mod ops;
mod shadow;
mod side;

use std::{collections::VecDeque, sync::Arc};

pub(crate) use self::{
    memory::Memory,
    ops::{Op, ops},
};
use self::{
    memory::{Picture, cut_pictures, follow, history, sampled},
    side::Side,
};
use kvfolio::{
    Batch, BlockPool, Context, Error, EvictionPolicy, Extra, NewTokens, Plan, PlanArrays, PlanRequest,
    PoolOptions, Result, Sequence, TokenCaps, UNKNOWN_TOKEN,
};

pub(crate) const MOST_TOKENS: usize = 26;
const ROWS: usize = 4;
const KEPT_PLANS: usize = 6;
const MOST_IN_FLIGHT: usize = 4;

pub(crate) struct World {
    pub(crate) pool: BlockPool,
    memory: Arc<Memory>,
    /// Nobody else is at work on the pool.
    alone: bool,
    pub(crate) runs: Vec<Run>,
    pub(crate) lives: Vec<Live>,
    /// Plans that have ended and whose tokens may still come.
    ended: Vec<Flight>,
    sides: Vec<Side>,
    next_id: usize,
}

pub(crate) struct Run {
    batch: Batch,
    pub(crate) flights: VecDeque<Flight>,
    mirror: Vec<Vec<i32>>,
}

pub(crate) struct Live {
    pub(crate) id: usize,
    pub(crate) sequence: Sequence,
    place: Option<(usize, usize)>,
    tenant: u64,
    pictures: Vec<Picture>,
}

pub(crate) struct Flight {
    plan: Option<Plan>,
    arrays: Arc<PlanArrays>,
    pub(crate) rows: Vec<FlightRow>,
    executed: bool,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(crate) struct FlightRow {
    pub(crate) id: usize,
    tenant: u64,
    pictures: Vec<Picture>,
    /// What its slots are to hold, up to where the step stops.
    history: Vec<u64>,
    start: usize,
    pub(crate) stop: usize,
    samples: bool,
    /// In flight, and neither voided nor without its sequence.
    pub(crate) counts: bool,
    /// Nothing of it was cut.
    open: bool,
    voided: bool,
    /// The token behind it was taken.
    told: bool,
    /// The sequence does not have these blocks any more.
    left: bool,
}

fn bit_tokens(length: usize, bits: u32) -> Vec<i32> {
    (0..length).map(|index| (bits >> (index / 3)) as i32 & 1).collect()
}

/// Of one eviction policy or the other: none changes what a caller may rely on.
pub(crate) fn pool_of(num_blocks: usize, block_size: usize) -> BlockPool {
    let eviction = EvictionPolicy::ALL[num_blocks % EvictionPolicy::ALL.len()];
    let options = PoolOptions { eviction, ..PoolOptions::default() };
    BlockPool::with_options(num_blocks, block_size, &options).unwrap()
}

impl World {
    /// One with a pool to itself.
    pub(crate) fn new(num_blocks: usize, block_size: usize, num_batches: usize) -> Self {
        let pool = pool_of(num_blocks, block_size);
        let memory = Arc::new(Memory::new(&pool));
        Self { alone: true, ..Self::beside_others(&pool, &memory, num_batches, 0) }
    }

    /// One of several on a pool; each has a number.
    pub(crate) fn beside_others(
        pool: &BlockPool,
        memory: &Arc<Memory>,
        num_batches: usize,
        number: usize,
    ) -> Self {
        let run = |_| Run {
            batch: Batch::new(pool, ROWS, MOST_TOKENS).unwrap(),
            flights: VecDeque::new(),
            mirror: vec![vec![0; MOST_TOKENS.div_ceil(pool.block_size())]; ROWS],
        };
        Self {
            pool: pool.clone(),
            memory: Arc::clone(memory),
            alone: false,
            runs: (0..num_batches).map(run).collect(),
            lives: Vec::new(),
            ended: Vec::new(),
            sides: Vec::new(),
            next_id: number << 32,
        }
    }

    /// Everything is given back.
    pub(crate) fn end(mut self) {
        self.sides.drain(..).for_each(|side| side.give_back(&self.pool));
    }

    fn next_id(&mut self) -> usize {
        self.next_id += 1;
        self.next_id
    }

    fn live(&self, pick: usize) -> Option<usize> {
        (!self.lives.is_empty()).then(|| pick % self.lives.len())
    }

    /// A refused call changes nothing.
    fn attempt<T>(&self, result: Result<T>, before: [usize; 4]) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(
                Error::OutOfBlocks { .. }
                | Error::PlanInFlight(_)
                | Error::BatchFull { .. }
                | Error::Argument(_),
            ) => {
                assert!(!self.alone || self.counts() == before, "a refused call changed the pool");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn counts(&self) -> [usize; 4] {
        let pool = &self.pool;
        [pool.num_blank(), pool.num_idle(), pool.num_referenced(), pool.num_quarantined()]
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        let before = self.counts();
        let num_batches = self.runs.len();
        match *op {
            Op::Admit { batch, length, bits, kind } => {
                self.make_room(bits);
                self.admit_new(batch % num_batches, length, bits, kind);
            }
            Op::Readmit { pick, batch } => {
                if let Some(index) = self.live(pick).filter(|index| self.lives[*index].place.is_none()) {
                    self.admit(index, batch % num_batches);
                }
            }
            Op::Extend { pick, length, bits } => self.extend(pick, length, bits),
            Op::Grow { batch, skip, bits } => self.grow(batch % num_batches, skip, bits),
            Op::Unknown { pick, length } => {
                if let Some(index) = self.live(pick) {
                    self.attempt(self.lives[index].sequence.extend(NewTokens::Unknown(length)), before);
                }
            }
            Op::Resolve { pick, length } => self.resolve(pick, length),
            Op::Plan { batch, budget, partial, cap, skip } => {
                self.plan(batch % num_batches, budget, partial, cap, skip);
            }
            Op::Execute { batch } => self.execute(batch % num_batches),
            Op::Commit { batch, bits } => self.commit(batch % num_batches, bits),
            Op::Rollback { batch } => self.rollback(batch % num_batches),
            Op::Drop { batch, pick } => {
                let run = batch % num_batches;
                let in_flight = self.runs[run].flights.len();
                if in_flight > 0 {
                    self.runs[run].flights[pick % in_flight].plan = None;
                    self.note_dropped(run);
                }
            }
            Op::Sample { pick } => self.sample(pick),
            Op::Truncate { pick, keep, bits } => self.truncate(pick, keep, bits),
            Op::Fork { pick } => self.fork(pick),
            Op::Remove { pick, preempt } => self.remove(pick, preempt),
            Op::Free { pick } => self.free(pick),
            Op::Discard { pick, before: position } => {
                if let Some(index) = self.live(pick) {
                    self.attempt(self.lives[index].sequence.discard_before(position), before);
                }
            }
            Op::Reorder { batch, parent, row } => self.reorder(batch % num_batches, parent, row),
            Op::Side(ref op) => self.side(op),
            Op::Reset { luck } => {
                if luck == 0 {
                    self.pool.reset_prefix_cache();
                }
            }
        }
        if self.alone {
            assert_eq!(self.counts().iter().sum::<usize>(), self.pool.num_blocks());
            self.pool.audit().unwrap();
        }
        self.check_memory();
    }

    /// Few enough sequences that each is often picked.
    fn make_room(&mut self, bits: u32) {
        if self.lives.len() >= (ROWS + 1) * self.runs.len() {
            self.free(bits as usize);
        }
    }

    fn free(&mut self, pick: usize) {
        if let Some(index) = self.live(pick) {
            let live = self.lives.swap_remove(index);
            live.sequence.free().unwrap();
            for row in self.flight_rows(live.id) {
                (row.counts, row.open) = (false, false);
            }
        }
    }

    fn fork(&mut self, pick: usize) {
        self.make_room(pick as u32 / 2);
        let Some(index) = self.live(pick) else { return };
        let parent = &self.lives[index];
        if let Some(sequence) = self.attempt(parent.sequence.fork(), self.counts()) {
            let (tenant, pictures) = (parent.tenant, parent.pictures.clone());
            let id = self.next_id();
            self.lives.push(Live { id, sequence, place: None, tenant, pictures });
        }
    }

    /// Keep all but a few tokens, or a part of them, or try to keep more; and perhaps go on otherwise.
    fn truncate(&mut self, pick: usize, parts: usize, bits: u32) {
        let Some(index) = self.live(pick) else { return };
        if let Some((run, _)) = self.lives[index].place.filter(|_| !bits.is_multiple_of(4)) {
            self.drain(run);
        }
        let num_tokens = self.lives[index].sequence.num_tokens().unwrap();
        let keep = match parts {
            0..13 => num_tokens.saturating_sub(parts % 6), // few, as drafts and stop strings do
            13..25 => num_tokens * (parts - 13) / 12,
            _ => num_tokens + 1,
        };
        let result = self.lives[index].sequence.truncate(keep);
        if self.attempt(result, self.counts()).is_some() {
            cut_pictures(&mut self.lives[index].pictures, keep);
            self.note_cut(self.lives[index].id, keep);
            if bits.is_multiple_of(2) {
                self.extend(index, 1 + parts % 3, bits);
            }
        }
    }

    /// Commit all that is in flight.
    fn drain(&mut self, run: usize) {
        while !self.runs[run].flights.is_empty() {
            self.commit(run, 0);
        }
    }

    fn admit_new(&mut self, run: usize, length: usize, bits: u32, kind: usize) {
        let tenant = u64::from(kind == 7);
        let pictures: Vec<_> = Picture::behind(0, bits).into_iter().collect();
        let mut context = Context::default().with_extras(extras(&pictures));
        context.tenant = tenant.to_string();
        let tokens = bit_tokens(length, bits);
        let sequence = self.pool.sequence(&tokens, &context, kind != 6, kind != 5).unwrap();
        let id = self.next_id();
        self.lives.push(Live { id, sequence, place: None, tenant, pictures });
        let index = self.lives.len() - 1;
        self.admit(index, run);
        let cached = self.lives[index].sequence.num_cached().unwrap();
        assert!(cached < length, "all {length} tokens were found: none is left to compute");
    }

    fn extend(&mut self, pick: usize, length: usize, bits: u32) {
        let Some(index) = self.live(pick) else { return };
        let tokens = bit_tokens(length, bits);
        let num_tokens = self.lives[index].sequence.num_tokens().unwrap();
        let pictures: Vec<_> = Picture::behind(num_tokens, bits).into_iter().collect();
        let new = NewTokens::Known(&tokens, &extras(&pictures));
        if self.attempt(self.lives[index].sequence.extend(new), self.counts()).is_some() {
            self.lives[index].pictures.extend(pictures);
        }
    }

    /// One token for each row but one.
    fn grow(&mut self, run: usize, skip: usize, bits: u32) {
        let batch = &self.runs[run].batch;
        let rows: Vec<_> = batch.rows().unwrap().into_iter().filter(|row| *row != skip % 6).collect();
        let before = self.counts();
        let grown = if bits.is_multiple_of(3) {
            batch.extend_unknown(&rows)
        } else {
            batch.extend(&rows, &bit_tokens(rows.len(), bits))
        };
        self.attempt(grown, before);
    }

    fn admit(&mut self, index: usize, run: usize) {
        let live = &self.lives[index];
        let has_blocks = !live.sequence.blocks().unwrap().is_empty();
        let result = self.runs[run].batch.add(&live.sequence);
        if let Some(row) = self.attempt(result, self.counts()) {
            self.lives[index].place = Some((run, row));
            let elsewhere = self.runs.iter().enumerate().filter(|(other, _)| *other != run);
            let mut named = elsewhere.flat_map(|(_, run)| &run.flights).flat_map(|flight| &flight.rows);
            let id = self.lives[index].id;
            let named = named.any(|row| row.id == id && !row.left);
            assert!(!named || !has_blocks, "a plan of another batch that names sequence {id} is in flight");
        }
    }

    fn remove(&mut self, pick: usize, preempt: bool) {
        let Some(index) = self.live(pick) else { return };
        let Some((run, row)) = self.lives[index].place.take() else { return };
        let batch = &self.runs[run].batch;
        self.lives[index].sequence = if preempt { batch.preempt(row) } else { batch.remove(row) }.unwrap();
        if preempt {
            self.flight_rows(self.lives[index].id).for_each(|row| (row.counts, row.left) = (false, true));
        }
    }

    fn reorder(&mut self, run: usize, parent: usize, row: usize) {
        let rows = self.runs[run].batch.rows().unwrap();
        if rows.is_empty() {
            return;
        }
        let (parent, row) = (rows[parent % rows.len()], rows[row % rows.len()]);
        let result = self.runs[run].batch.reorder(&[parent], Some(&[row]));
        if self.attempt(result, self.counts()).is_some() && parent != row {
            let at = |row| self.lives.iter().position(|live| live.place == Some((run, row))).unwrap();
            let (parent, child) = (at(parent), at(row));
            self.lives[child].tenant = self.lives[parent].tenant;
            let pictures = self.lives[parent].pictures.clone();
            self.lives[child].pictures = pictures;
            self.flight_rows(self.lives[child].id).for_each(|row| (row.open, row.left) = (false, true));
        }
    }

    fn resolve(&mut self, pick: usize, length: usize) {
        let Some(index) = self.live(pick) else { return };
        let live = &self.lives[index];
        let tokens = live.sequence.token_ids().unwrap();
        let history = history(live.tenant, &live.pictures, &tokens);
        let unknown = tokens.iter().enumerate().filter(|(_, token)| **token == UNKNOWN_TOKEN);
        let told = unknown.map(|(position, _)| sampled(memory::before(live.tenant, &history, position)));
        live.sequence.resolve(&told.take(length).collect::<Vec<_>>()).unwrap();
    }

    fn plan(&mut self, run: usize, budget: usize, partial: bool, cap: usize, skip: usize) {
        if self.runs[run].flights.len() == MOST_IN_FLIGHT {
            self.commit(run, 0);
        }
        let rows = self.runs[run].batch.rows().unwrap();
        let rows: Vec<_> = rows.into_iter().filter(|row| *row != skip).collect();
        let caps: Vec<_> = rows.iter().map(|row| (row + cap) % 5).collect();
        let num_tokens = match cap {
            0 | 1 => TokenCaps::None,
            2 | 3 => TokenCaps::Each(&caps),
            _ => TokenCaps::Same(cap - 3),
        };
        let max_tokens = (budget > 0).then_some(budget);
        let request = PlanRequest { max_tokens, partial, rows: Some(&rows), num_tokens };
        let missing = self.runs[run].batch.shortfall(&request).unwrap();
        let result = self.runs[run].batch.plan(&request);
        assert!(!self.alone || partial || result.is_ok() == (missing == 0), "shortfall {missing}");
        let Some(plan) = self.attempt(result, self.counts()) else { return };
        let arrays = Arc::clone(plan.arrays());
        let rows = (0..arrays.rows().len()).map(|index| self.flight_row(run, &arrays, index)).collect();
        let mirror = &mut self.runs[run].mirror;
        for &[row, index, block] in arrays.table_updates() {
            mirror[row as usize][index as usize] = block;
        }
        let (cells, width, stride) = arrays.block_table();
        for (index, row) in arrays.rows().iter().enumerate() {
            let live = self.lives.iter().find(|live| live.place == Some((run, *row as usize))).unwrap();
            let own: Vec<_> = live.sequence.blocks().unwrap().iter().map(|block| block.as_i32()).collect();
            let blocks = own.len();
            assert_eq!(own, cells[index * stride..][..blocks], "table of row {row}");
            assert_eq!(
                mirror[*row as usize][..blocks],
                cells[index * stride..][..blocks],
                "mirror of row {row}"
            );
            assert!(cells[index * stride..][blocks..width].iter().all(|cell| *cell == 0), "padding");
        }
        self.runs[run].flights.push_back(Flight { plan: Some(plan), arrays, rows, executed: false });
    }

    fn flight_row(&self, run: usize, arrays: &PlanArrays, index: usize) -> FlightRow {
        let row = arrays.rows()[index] as usize;
        let live = self.lives.iter().find(|live| live.place == Some((run, row))).unwrap();
        let stop = arrays.seq_lens()[index] as usize;
        let first = arrays.query_start_loc()[index] as usize;
        let history = history(live.tenant, &live.pictures, &live.sequence.token_ids().unwrap()[..stop]);
        FlightRow {
            id: live.id,
            tenant: live.tenant,
            pictures: live.pictures.clone(),
            history,
            start: arrays.positions()[first] as usize,
            stop,
            samples: arrays.logits_rows().contains(&(row as i32)),
            counts: true,
            open: true,
            voided: false,
            told: false,
            left: false,
        }
    }
}

fn extras(pictures: &[Picture]) -> Vec<Extra> {
    pictures.iter().map(Picture::extra).collect()
}
