//! A step of a batch: arrays for the kernels, and two ways to end it.

mod arrays;
mod table_buffer;

use std::sync::Arc;

pub use arrays::{Csr, PlanArrays};
pub(crate) use arrays::{Cursor, Extent, Recycler};
pub use table_buffer::{OutTable, TableMemory};
pub(crate) use table_buffer::{Seen, ToldTables};

use crate::{
    batch::BatchCell,
    error::{Error, Result},
    ids::check_tokens,
    sequence::PlanId,
    sync::{AtomicBool, AtomicU8, Ordering},
};

/// What a plan did to one row.
#[derive(Clone, Copy)]
pub(crate) struct FlightStep {
    /// The serial number of the sequence that was there.
    pub(crate) sequence: u64,
    pub(crate) row: u32,
    pub(crate) start: u32,
    pub(crate) stop: u32,
    /// Nothing was left to plan behind it.
    pub(crate) samples: bool,
    /// The last of its tokens is the last of a block.
    pub(crate) fills: bool,
}

impl FlightStep {
    pub(crate) fn num_tokens(&self) -> usize {
        (self.stop - self.start) as usize
    }
}

/// The lists of a plan, which are used again for a later one.
#[derive(Default)]
pub(crate) struct PlanLists {
    pub(crate) steps: Vec<FlightStep>,
    pub(crate) to_commit: Vec<u32>,
}

/// What the handle and the batch both know of a plan.
pub(crate) struct PlanShared {
    pub(crate) id: PlanId,
    pub(crate) steps: Vec<FlightStep>,
    /// Of the steps, those that a commit has to look at even if nothing happened in between.
    pub(crate) to_commit: Vec<u32>,
    /// How many lanes had been settled in flight when the plan was made.
    pub(crate) num_settled: u64,
    pub(crate) max_seq_len: usize,
    outcome: AtomicU8,
    /// Nobody can end it any more: it is rolled back when its turn comes.
    dropped: AtomicBool,
    has_handle: AtomicBool,
}

const IN_FLIGHT: u8 = 0;
const COMMITTED: u8 = 1;
const ROLLED_BACK: u8 = 2;

// The flags change while the batch is locked, except that a handle may be dropped at any time; acquire and
// release make what was done before a flag was set visible to who sees it.
impl PlanShared {
    pub(crate) fn new(id: PlanId, lists: PlanLists, num_settled: u64, max_seq_len: usize) -> Self {
        Self {
            id,
            steps: lists.steps,
            to_commit: lists.to_commit,
            num_settled,
            max_seq_len,
            outcome: AtomicU8::new(IN_FLIGHT),
            dropped: AtomicBool::new(false),
            has_handle: AtomicBool::new(true),
        }
    }

    /// Whether the caller still has a handle.
    pub(crate) fn has_handle(&self) -> bool {
        self.has_handle.load(Ordering::Acquire)
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.outcome.load(Ordering::Acquire) == IN_FLIGHT
    }

    pub(crate) fn was_rolled_back(&self) -> bool {
        self.outcome.load(Ordering::Acquire) == ROLLED_BACK
    }

    pub(crate) fn set_ended(&self, committed: bool) {
        self.outcome.store(if committed { COMMITTED } else { ROLLED_BACK }, Ordering::Release);
    }

    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Acquire)
    }
}

/// A step of a batch. A plan that is dropped without an end is rolled back as soon as those before it have
/// ended.
pub struct Plan {
    batch: Arc<BatchCell>,
    shared: Arc<PlanShared>,
    arrays: Arc<PlanArrays>,
}

impl Plan {
    pub(crate) fn new(batch: Arc<BatchCell>, shared: Arc<PlanShared>, arrays: Arc<PlanArrays>) -> Self {
        Self { batch, shared, arrays }
    }

    /// What kernels read. They stay as they are for as long as anybody holds them.
    pub fn arrays(&self) -> &Arc<PlanArrays> {
        &self.arrays
    }

    /// Which of the batch's plans it is, counted from 1.
    pub fn number(&self) -> u64 {
        self.shared.id.number
    }

    /// Tokens a block.
    pub fn block_size(&self) -> usize {
        self.batch.pool().block_size()
    }

    /// Whether it was neither committed nor rolled back yet.
    pub fn is_in_flight(&self) -> bool {
        self.shared.is_in_flight()
    }

    /// Whether it was rolled back: its blocks are others' now.
    pub fn is_rolled_back(&self) -> bool {
        self.shared.was_rolled_back()
    }

    /// The step's K and V are written, or their writing stands in the queue before whatever reads them next:
    /// its tokens are computed, its full blocks findable. Of each row only the first `num_accepted` of its
    /// tokens stand, by default all; the rest, and what followed them, was never part of the sequence.
    pub fn commit(&self, num_accepted: Option<&[usize]>) -> Result<()> {
        self.batch.lock()?.commit(&self.shared, num_accepted)
    }

    /// The step did not happen: every count and block is put back. Later plans in flight lose their rows of the
    /// same sequences.
    pub fn rollback(&self) -> Result<()> {
        self.batch.lock()?.rollback(&self.shared)
    }

    /// The token sampled for each of `logits_rows`: appended, or the id of an unknown token that the batch ran
    /// ahead with. Returns for which of them it was taken: it is passed over where the sequence has ended,
    /// was changed before that place, or knows another token there.
    pub fn extend(&self, token_ids: &[i32]) -> Result<Vec<bool>> {
        let mut taken = vec![false; token_ids.len()];
        self.extend_into(token_ids, &mut taken)?;
        Ok(taken)
    }

    /// The same, where the answer goes into `taken`, as long as `token_ids`.
    pub fn extend_into(&self, token_ids: &[i32], taken: &mut [bool]) -> Result<()> {
        check_tokens("token_ids", token_ids)?;
        let expected = self.arrays.logits_rows().len();
        if token_ids.len() != expected {
            let allowed = format!("one for each of {expected} logits_rows");
            return Err(Error::argument("token_ids", allowed, token_ids.len()));
        }
        self.batch.lock()?.extend_sampled(&self.shared, token_ids, taken)
    }

    /// Give the plan up, as dropping it does: it is rolled back at once or when its turn comes.
    pub fn abandon(&self) {
        if self.is_in_flight() {
            self.shared.dropped.store(true, Ordering::Release);
            // Entering rolls it back. If another thread is at work on the batch, the next to enter does.
            drop(self.batch.lock());
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        self.abandon();
        self.shared.has_handle.store(false, Ordering::Release);
    }
}
