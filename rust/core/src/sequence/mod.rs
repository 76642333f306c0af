//! Tokens, how far their K and V are computed, and the table that says where.
//!
//! A [`Sequence`] is a handle. While a sequence runs in a batch its state lies in the batch's row, so that a
//! step of the batch takes one lock and not one a row; a call on the handle then goes through the batch.
//! A call only tries these locks: whoever finds one taken is the second thread, and is told so.

mod notes;
mod state;
mod steps;

use std::{sync::Arc, time::Duration};

use crate::{
    context::{Context, Extra},
    error::{Error, Result, check_range},
    ids::{BlockId, check_tokens},
    pool::BlockPool,
    sync::{Mutex, MutexGuard},
};
pub(crate) use state::SequenceState;
pub(crate) use steps::{LaneStep, NewStep, PlanId};

const FREED: Error = Error::StaleHandle("sequence has been freed");

/// How long to wait for another batch to come to rest: far longer than any call on it takes.
const PATIENCE: Duration = Duration::from_millis(200);

/// Tokens to append.
#[derive(Clone, Copy, Debug)]
pub enum NewTokens<'a> {
    /// Known ids, and what else holds for their positions.
    Known(&'a [i32], &'a [Extra]),
    /// So many tokens whose ids will be told later.
    Unknown(usize),
}

/// Where the state of a running sequence lies.
pub(crate) trait Home: Send + Sync {
    /// Work on the state in a row, given the most tokens that it may have, and so long a wait for other threads.
    fn with_row(
        &self,
        row: usize,
        patience: Duration,
        work: &mut dyn FnMut(&mut SequenceState, usize),
    ) -> Result<()>;

    /// Take the state out.
    fn vacate(&self, row: usize) -> Result<Box<SequenceState>>;
}

pub(crate) enum Place {
    Alone(Box<SequenceState>),
    Running(Arc<dyn Home>, usize),
    Freed,
}

pub(crate) struct SequenceCell {
    place: Mutex<Place>,
}

impl SequenceCell {
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Place>> {
        self.place.try_lock().ok_or(Error::ConcurrentUse("sequence is in use by another thread"))
    }
}

/// A handle to a sequence. When the last one is dropped outside of a batch, the blocks are given back.
#[derive(Clone)]
pub struct Sequence(Arc<SequenceCell>);

pub(crate) fn check_length(num_tokens: usize, most: usize) -> Result<()> {
    if num_tokens > most {
        return Err(Error::argument("num_tokens", format_args!("at most {most} in this batch"), num_tokens));
    }
    Ok(())
}

impl BlockPool {
    /// A sequence of known tokens, which holds no block yet.
    pub fn sequence(
        &self,
        tokens: &[i32],
        context: &Context,
        read_cache: bool,
        write_cache: bool,
    ) -> Result<Sequence> {
        Sequence::new(self, tokens, context, read_cache, write_cache)
    }

    /// How many of the free blocks it takes to hold what the cache has of a sequence and to compute the rest:
    /// the admission test.
    pub fn blocks_needed(&self, sequence: &Sequence) -> Result<usize> {
        sequence.blocks_needed(self)
    }
}

impl Sequence {
    pub(crate) fn new(
        pool: &BlockPool,
        tokens: &[i32],
        context: &Context,
        read_cache: bool,
        write_cache: bool,
    ) -> Result<Self> {
        check_tokens("token_ids", tokens)?;
        Ok(Self::alone(SequenceState::new(pool, tokens, context, read_cache, write_cache)))
    }

    fn alone(state: SequenceState) -> Self {
        Self::of_cell(Arc::new(SequenceCell { place: Mutex::new(Place::Alone(Box::new(state))) }))
    }

    /// A second handle to a running sequence whose first one was dropped.
    pub(crate) fn running(home: Arc<dyn Home>, row: usize) -> Self {
        Self::of_cell(Arc::new(SequenceCell { place: Mutex::new(Place::Running(home, row)) }))
    }

    pub(crate) fn of_cell(cell: Arc<SequenceCell>) -> Self {
        Self(cell)
    }

    pub(crate) fn cell(&self) -> &Arc<SequenceCell> {
        &self.0
    }

    /// Whether two handles are of one sequence.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Work on the state, wherever it lies; `None` as the most tokens stands for no limit.
    fn with<R>(&self, work: impl FnOnce(&mut SequenceState, Option<usize>) -> Result<R>) -> Result<R> {
        Self::with_place(&mut *self.0.lock()?, Duration::ZERO, work)
    }

    /// The same for a batch whose plan named the sequence; `None` if it has ended.
    ///
    /// It waits for whoever is at work on the sequence. That is safe for the handle's own lock, since whoever
    /// has it only tries to get a batch's. Another batch that the sequence went to may be waiting for this one
    /// in the same way, so patience with it has an end, and then the sequence is passed over.
    pub(crate) fn with_waiting<R>(
        &self,
        work: impl FnOnce(&mut SequenceState, Option<usize>) -> R,
    ) -> Option<R> {
        Self::with_place(&mut self.0.place.lock(), PATIENCE, |state, most| Ok(work(state, most))).ok()
    }

    fn with_place<R>(
        place: &mut Place,
        patience: Duration,
        work: impl FnOnce(&mut SequenceState, Option<usize>) -> Result<R>,
    ) -> Result<R> {
        match place {
            Place::Freed => Err(FREED),
            Place::Alone(state) => work(state, None),
            Place::Running(home, row) => {
                let mut work = Some(work);
                let mut result = Err(FREED);
                home.with_row(*row, patience, &mut |state, most| {
                    if let Some(work) = work.take() {
                        result = work(state, Some(most));
                    }
                })?;
                result
            }
        }
    }

    /// The known ids, with -1 in the place of unknown ones.
    pub fn token_ids(&self) -> Result<Vec<i32>> {
        self.with(|state, _| Ok(state.tokens().to_vec()))
    }

    /// All tokens, known or not.
    pub fn num_tokens(&self) -> Result<usize> {
        self.with(|state, _| Ok(state.num_tokens()))
    }

    /// Tokens whose K and V are computed.
    pub fn num_computed(&self) -> Result<usize> {
        self.with(|state, _| Ok(state.num_computed()))
    }

    /// Tokens that have no K and V yet.
    pub fn num_pending(&self) -> Result<usize> {
        self.with(|state, _| Ok(state.num_tokens() - state.num_computed()))
    }

    /// Tokens that were found in the prefix cache.
    pub fn num_cached(&self) -> Result<usize> {
        self.with(|state, _| Ok(state.num_cached()))
    }

    /// Blocks, in logical order; null where they were discarded.
    pub fn blocks(&self) -> Result<Vec<BlockId>> {
        self.with(|state, _| Ok(state.table.blocks().to_vec()))
    }

    /// Append tokens.
    pub fn extend(&self, new: NewTokens<'_>) -> Result<()> {
        let count = match new {
            NewTokens::Known(tokens, _) => tokens.len(),
            NewTokens::Unknown(count) => count,
        };
        if let NewTokens::Known(tokens, _) = new {
            check_tokens("token_ids", tokens)?;
        }
        self.with(|state, most| {
            let num_tokens = state.num_tokens().saturating_add(count);
            match most {
                Some(most) => check_length(num_tokens, most)?,
                None => check_range("num_tokens", num_tokens, 0, i32::MAX as usize)?,
            }
            match new {
                NewTokens::Known(tokens, extras) => state.extend_known(tokens, extras),
                NewTokens::Unknown(count) => state.extend_unknown(count),
            }
        })
    }

    /// The oldest unknown tokens become known; blocks that waited for them are published.
    pub fn resolve(&self, tokens: &[i32]) -> Result<()> {
        check_tokens("token_ids", tokens)?;
        self.with(|state, _| state.resolve(tokens))
    }

    /// A second sequence with the same past and its own future, in no batch.
    pub fn fork(&self) -> Result<Self> {
        self.with(|state, _| state.fork()).map(Self::alone)
    }

    /// Keep the first `n` tokens; what had been computed beyond them is computed no more.
    pub fn truncate(&self, n: usize) -> Result<()> {
        self.with(|state, _| state.truncate(n))
    }

    /// Give back the blocks before `position`, which nothing will attend to any more.
    pub fn discard_before(&self, position: usize) -> Result<()> {
        self.with(|state, _| state.discard_before(position))
    }

    /// Give everything back and leave the batch; may be said twice.
    pub fn free(&self) -> Result<()> {
        let mut place = self.0.lock()?;
        if let Place::Running(home, row) = &*place {
            home.vacate(*row)?;
        }
        let freed = std::mem::replace(&mut *place, Place::Freed);
        drop(place);
        drop(freed); // perhaps the last handle to the batch, whose plans may look for the sequence
        Ok(())
    }

    pub(crate) fn blocks_needed(&self, pool: &BlockPool) -> Result<usize> {
        self.with(|state, _| {
            if state.pool().is_same(pool) {
                Ok(state.blocks_needed())
            } else {
                Err(Error::argument("seq", "one of this pool", "one of another"))
            }
        })
    }
}
