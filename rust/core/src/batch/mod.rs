//! The running sequences, each in a row whose number stays.

mod choice;
mod flight;
#[cfg(test)]
mod hashing;
mod lanes;
mod plans;
mod rows;

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

pub use self::choice::{PlanRequest, TokenCaps};
use self::{choice::Choice, flight::Taken, lanes::Flights, plans::Plans, rows::Rows};
use crate::{
    error::{Error, Result, check_range},
    holds::Holds,
    ids::{UNKNOWN_TOKEN, check_tokens},
    plan::{OutTable, Plan, Recycler, ToldTables},
    pool::{BlockPool, Described},
    sequence::{Home, Place, Sequence, SequenceCell, SequenceState, check_length},
    sync::{Mutex, MutexGuard},
};

/// A handle to a batch: its calls take `&self` and refuse a second thread with `ConcurrentUse`.
pub struct Batch(Arc<BatchCell>);

pub(crate) struct BatchCell {
    pool: BlockPool,
    max_sequences: usize,
    max_tokens: usize,
    state: Mutex<BatchState>,
}

/// The batch, locked.
pub(crate) struct BatchState {
    pool: BlockPool,
    max_tokens: usize,
    rows: Rows,
    plans: Plans,
    /// Sequences that left a row which such a plan may name.
    departed: HashMap<u64, Weak<SequenceCell>>,
    told: ToldTables,
    recycler: Recycler,
    /// Kept for their memory.
    choice: Choice,
    taken: Taken,
    /// Of blocks that a commit is about to publish.
    described: Vec<Described>,
    /// Steps whose rows in the block table are to be written after the others.
    changed: Vec<u32>,
}

impl BatchCell {
    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, BatchState>> {
        self.lock_within(Duration::ZERO)
    }

    /// Every entry ends the plans first that were dropped while another thread was in here.
    fn lock_within(&self, patience: Duration) -> Result<MutexGuard<'_, BatchState>> {
        let lock = if patience.is_zero() { self.state.try_lock() } else { self.state.try_lock_for(patience) };
        let mut batch = lock.ok_or(Error::ConcurrentUse("batch is in use by another thread"))?;
        batch.roll_back_dropped();
        Ok(batch)
    }
}

impl Home for BatchCell {
    fn with_row(
        &self,
        row: usize,
        patience: Duration,
        work: &mut dyn FnMut(&mut SequenceState, usize),
    ) -> Result<()> {
        work(self.lock_within(patience)?.rows.state(row)?, self.max_tokens);
        Ok(())
    }

    fn vacate(&self, row: usize) -> Result<Box<SequenceState>> {
        Ok(self.lock()?.rows.vacate(row)?.state)
    }
}

impl Batch {
    /// A batch of up to `max_sequences` sequences of up to `max_tokens_per_sequence` tokens.
    pub fn new(pool: &BlockPool, max_sequences: usize, max_tokens_per_sequence: usize) -> Result<Self> {
        let most = i32::MAX as usize;
        check_range("max_sequences", max_sequences, 1, most)?;
        check_range("max_tokens_per_sequence", max_tokens_per_sequence, 1, most)?;
        let flights =
            Flights { batch: pool.shared().next_serial(), holds: Arc::new(Holds::new(pool)), numbers: 1..1 };
        let state = BatchState {
            pool: pool.clone(),
            max_tokens: max_tokens_per_sequence,
            rows: Rows::new(max_sequences, flights),
            plans: Plans::default(),
            departed: HashMap::new(),
            told: ToldTables::default(),
            recycler: Recycler::default(),
            choice: Choice::default(),
            taken: Taken::default(),
            described: Vec::new(),
            changed: Vec::new(),
        };
        Ok(Self(Arc::new(BatchCell {
            pool: pool.clone(),
            max_sequences,
            max_tokens: max_tokens_per_sequence,
            state: Mutex::new(state),
        })))
    }

    /// The pool whose sequences it runs.
    pub fn pool(&self) -> &BlockPool {
        &self.0.pool
    }

    /// Rows.
    pub fn max_sequences(&self) -> usize {
        self.0.max_sequences
    }

    /// The most tokens that a sequence may have in it.
    pub fn max_tokens_per_sequence(&self) -> usize {
        self.0.max_tokens
    }

    /// The rows that are taken, in admission order.
    pub fn rows(&self) -> Result<Vec<usize>> {
        Ok(self.0.lock()?.rows.in_order().to_vec())
    }

    /// Admit a sequence and hold what the cache has of it, up to its last token but one; the lowest free row
    /// is its own.
    pub fn add(&self, sequence: &Sequence) -> Result<usize> {
        let mut place = sequence.cell().lock()?;
        let mut batch = self.0.lock()?;
        let state = match &mut *place {
            Place::Freed => return Err(Error::StaleHandle("sequence has been freed")),
            Place::Running(..) => {
                return Err(Error::argument("seq", "in no batch yet", "already in one"));
            }
            Place::Alone(state) => state,
        };
        if state.is_in_flight() || state.table.flies_elsewhere(&batch.rows.flights.holds) {
            return Err(Error::PlanInFlight("a sequence in a plan in flight cannot be admitted"));
        }
        if !state.pool().is_same(&self.0.pool) {
            return Err(Error::argument("seq", "of the batch's pool", "of another"));
        }
        check_length(state.num_tokens(), self.0.max_tokens)?;
        let Some(row) = batch.rows.lowest_vacant() else {
            return Err(Error::BatchFull { max_sequences: self.0.max_sequences });
        };
        if state.counts_as_query() {
            self.0.pool.shared().counters.queried_tokens.add(state.num_tokens());
        }
        let found = state.look_again();
        state.hold_found(&found, false)?; // what cannot be held is computed, so this does not fail
        let home: Arc<dyn Home> = self.0.clone();
        if let Place::Alone(state) = std::mem::replace(&mut *place, Place::Running(home, row)) {
            batch.rows.occupy(row, state, Arc::downgrade(sequence.cell()));
        }
        Ok(row)
    }

    /// Take a sequence out of its row; it keeps its blocks.
    pub fn remove(&self, row: usize) -> Result<Sequence> {
        self.take_out(row, |_| ())
    }

    /// Take a sequence out of its row; its blocks are given back, its tokens kept, and what was published
    /// stays findable.
    pub fn preempt(&self, row: usize) -> Result<Sequence> {
        self.take_out(row, SequenceState::drop_blocks)
    }

    fn take_out(&self, row: usize, change: impl FnOnce(&mut SequenceState)) -> Result<Sequence> {
        let mut batch = self.0.lock()?;
        let handle = batch.rows.get(row)?.handle.upgrade();
        let home: Arc<dyn Home> = self.0.clone();
        let sequence = handle.map_or_else(|| Sequence::running(home, row), Sequence::of_cell);
        let mut place = sequence.cell().lock()?;
        let mut state = batch.rows.vacate(row)?.state;
        change(&mut state);
        batch.note_departed(state.serial, sequence.cell());
        let running = std::mem::replace(&mut *place, Place::Alone(state));
        drop((place, batch));
        drop(running);
        Ok(sequence)
    }

    /// Append one token to each of some rows.
    pub fn extend(&self, rows: &[usize], token_ids: &[i32]) -> Result<()> {
        check_tokens("token_ids", token_ids)?;
        if rows.len() != token_ids.len() {
            let allowed = format!("one per row, {} in all", rows.len());
            return Err(Error::argument("token_ids", allowed, token_ids.len()));
        }
        let mut batch = self.0.lock()?;
        batch.check_growth(rows)?;
        for (row, token) in rows.iter().zip(token_ids) {
            batch.rows.push_token(*row, *token);
        }
        Ok(())
    }

    /// Append one token whose id is not known yet to each of some rows.
    pub fn extend_unknown(&self, rows: &[usize]) -> Result<()> {
        let mut batch = self.0.lock()?;
        batch.check_growth(rows)?;
        for row in rows {
            batch.rows.push_token(*row, UNKNOWN_TOKEN);
        }
        Ok(())
    }

    /// Row `rows[i]`, by default `i`, goes on as a fork of row `parents[i]`, all at once; other rows stay.
    pub fn reorder(&self, parents: &[usize], rows: Option<&[usize]>) -> Result<()> {
        let mut batch = self.0.lock()?;
        let all: Vec<_> = (0..parents.len()).collect();
        let rows = rows.unwrap_or(&all);
        batch.rows.check_distinct(rows)?;
        if rows.len() != parents.len() {
            let allowed = format!("one per parent, {} in all", parents.len());
            return Err(Error::argument("rows", allowed, rows.len()));
        }
        for row in rows.iter().chain(parents) {
            let what = "a sequence in a plan in flight cannot be reordered";
            batch.rows.state(*row)?.refuse_in_flight(what)?;
        }
        let moves = rows.iter().zip(parents).filter(|(row, parent)| row != parent);
        let mut forks = Vec::with_capacity(rows.len());
        for (row, parent) in moves {
            forks.push((*row, batch.rows.state(*parent)?.fork()?));
        }
        for (row, fork) in forks {
            batch.rows.state(row)?.become_fork(fork);
        }
        Ok(())
    }

    /// How many free blocks are missing for a plan of the same request; 0 if it fits.
    pub fn shortfall(&self, request: &PlanRequest<'_>) -> Result<usize> {
        let request = PlanRequest { partial: false, ..*request };
        let mut batch = self.0.lock()?;
        let mut choice = std::mem::take(&mut batch.choice);
        let chosen = batch.choose(&request, &mut choice);
        let missing = choice.needed.saturating_sub(self.0.pool.num_free());
        batch.choice = choice;
        chosen.map(|()| missing)
    }

    /// Allocate for the next step: all of it or, if `partial`, the rows that fit.
    pub fn plan(&self, request: &PlanRequest<'_>) -> Result<Plan> {
        let (shared, arrays) = self.0.lock()?.plan(request, None)?;
        Ok(Plan::new(Arc::clone(&self.0), shared, arrays))
    }

    /// The same, with the block table in the caller's memory, which no other batch may write into.
    pub fn plan_into(&self, request: &PlanRequest<'_>, out: &mut OutTable) -> Result<Plan> {
        let (shared, arrays) = self.0.lock()?.plan(request, Some(out))?;
        Ok(Plan::new(Arc::clone(&self.0), shared, arrays))
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (max, tokens) = (self.0.max_sequences, self.0.max_tokens);
        match self.0.lock() {
            Ok(batch) => write!(
                formatter,
                "Batch({} of {max} rows, max_tokens_per_sequence={tokens}, {} plans in flight)",
                batch.rows.in_order().len(),
                {
                    let numbers = &batch.rows.flights.numbers;
                    numbers.end - numbers.start
                }
            ),
            Err(_) => write!(formatter, "Batch({max} rows, in use by another thread)"),
        }
    }
}

impl Drop for BatchState {
    /// Plans may be left whose handles were dropped while another thread was at work on the batch.
    fn drop(&mut self) {
        self.roll_back_dropped();
    }
}

impl BatchState {
    fn check_growth(&mut self, rows: &[usize]) -> Result<()> {
        self.rows.check_distinct(rows)?;
        for row in rows {
            check_length(self.rows.num_tokens(*row)? + 1, self.max_tokens)?;
        }
        Ok(())
    }

    /// Remember where to find a sequence that a plan may name, for as long as such plans have handles.
    fn note_departed(&mut self, serial: u64, cell: &Arc<SequenceCell>) {
        self.plans.forget_ended();
        if self.plans.is_empty() {
            self.departed.clear();
            return;
        }
        if self.departed.len() == self.departed.capacity() {
            // Instead of growing, if that helps.
            self.departed.retain(|_, cell| cell.strong_count() > 0);
        }
        self.departed.insert(serial, Arc::downgrade(cell));
    }

    /// Work on a sequence that was in `row` when a plan was made, wherever it is now; `None` if it has ended.
    fn with_sequence<R>(
        &mut self,
        row: usize,
        serial: u64,
        work: impl FnOnce(&mut SequenceState, Option<usize>) -> R,
    ) -> Option<R> {
        if let Some(row) = self.rows.find(row, serial) {
            let most = self.max_tokens;
            return Some(work(self.rows.chosen(row), Some(most)));
        }
        let cell = self.departed.get(&serial)?.upgrade()?;
        Sequence::of_cell(cell).with_waiting(work)
    }
}
