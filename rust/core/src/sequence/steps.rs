//! A sequence's part in plans: what they did to it, and how that is kept or undone.

use std::{collections::VecDeque, sync::Arc};

use super::state::SequenceState;
use crate::{
    holds::Holds,
    ids::{BlockId, UNKNOWN_TOKEN},
    pool::Opening,
    table::Copy,
};

/// What a plan in flight did to the sequence.
pub(super) struct Step {
    serial: u64,
    start: usize,
    copy: Option<Copy>,
    num_found: usize,
}

/// A step behind which a token may still be sampled, or whose tokens may still be refused: nothing of it
/// was cut since.
struct OpenStep {
    plan: PlanId,
    stop: usize,
    /// The token behind it was taken.
    told: bool,
}

/// Which plan, of which batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PlanId {
    pub(crate) batch: u64,
    pub(crate) serial: u64,
}

#[derive(Default)]
pub(super) struct Steps {
    /// In flight, and still counting.
    pub(super) in_flight: VecDeque<Step>,
    open: Vec<OpenStep>,
}

/// Open steps of plans that nobody has a handle of any more are swept out from this many on.
const MANY_OPEN: usize = 8;

impl Steps {
    pub(super) fn cut(&mut self, n: usize) {
        self.open.retain(|step| step.stop <= n);
    }

    fn open(&mut self, serial: u64) -> Option<&mut OpenStep> {
        self.open.iter_mut().rev().find(|step| step.plan.serial == serial)
    }

    fn close(&mut self, serial: u64) {
        self.open.retain(|step| step.plan.serial != serial);
    }
}

/// What a plan takes from or gives to one sequence.
pub(crate) struct NewStep<'a> {
    pub(crate) plan: PlanId,
    /// Whether a plan of the same batch, by its serial number, still has a handle.
    pub(crate) has_handle: &'a dyn Fn(u64) -> bool,
    pub(crate) holds: &'a Arc<Holds>,
    pub(crate) num_found: usize,
    pub(crate) count: usize,
    pub(crate) opening: Option<Opening>,
}

impl SequenceState {
    /// The next `count` tokens go into a plan; returns the copy to do, if any.
    pub(crate) fn take_step(
        &mut self,
        new: &NewStep<'_>,
        fresh: &mut impl Iterator<Item = BlockId>,
    ) -> Option<Copy> {
        let start = self.table.num_tokens();
        if start == 0 {
            self.history.epoch = self.pool().shared().epoch();
        }
        self.table.fly(new.holds, new.plan.serial); // a copy's source is let go, and so held until the end
        let copy = self.table.grow(new.count, new.opening, fresh);
        let step = Step { serial: new.plan.serial, start, copy, num_found: new.num_found };
        self.steps.in_flight.push_back(step);
        if self.steps.open.len() >= MANY_OPEN {
            let is_alive = |plan: PlanId| plan.batch != new.plan.batch || (new.has_handle)(plan.serial);
            self.steps.open.retain(|step| is_alive(step.plan));
        }
        self.steps.open.push(OpenStep { plan: new.plan, stop: start + new.count, told: false });
        copy
    }

    /// Take the oldest step in flight out, if it is that of the plan.
    fn land(&mut self, serial: u64) -> Option<Step> {
        let counts = self.steps.in_flight.front().is_some_and(|step| step.serial == serial);
        counts.then(|| self.steps.in_flight.pop_front()).flatten()
    }

    /// The plan has ended well, and of the step that planned `start..stop` the tokens up to `accepted` stand.
    pub(crate) fn commit_step(&mut self, serial: u64, accepted: usize, stop: usize, samples: bool) {
        if self.land(serial).is_some() {
            self.compute_to(accepted);
        }
        if accepted < stop && self.steps.open(serial).is_some() {
            // Even if its blocks are gone, its drafts are no tokens.
            self.void_steps();
            if let Some(step) = self.steps.open(serial) {
                step.stop = accepted;
            }
            self.cut(accepted);
        }
        if !samples || self.steps.open(serial).is_some_and(|step| step.told) {
            self.steps.close(serial);
        }
    }

    /// The plan did not happen.
    pub(crate) fn rollback_step(&mut self, serial: u64) {
        self.steps.close(serial);
        if let Some(step) = self.land(serial) {
            self.void_steps();
            self.table.undo_grow(step.start, step.copy);
            self.give_up_found(step.num_found);
        }
    }

    /// What later plans in flight did is undone, the latest first; their rows count no more.
    fn void_steps(&mut self) {
        while let Some(step) = self.steps.in_flight.pop_back() {
            self.table.undo_grow(step.start, step.copy);
            self.steps.close(step.serial);
        }
    }

    /// Where the token sampled by a plan belongs, if it still does.
    pub(crate) fn sampled_position(&mut self, serial: u64) -> Option<usize> {
        let step = self.steps.open(serial)?;
        let (stop, told) = (step.stop, step.told);
        let takes = stop == self.num_tokens() || self.tokens().get(stop) == Some(&UNKNOWN_TOKEN);
        (takes && !told).then_some(stop)
    }

    /// Take the token sampled by a plan, at its `sampled_position`; false if that is another by now, since a
    /// sequence that left the batch may be changed by another thread.
    pub(crate) fn take_sampled(&mut self, serial: u64, ended: bool, position: usize, token: i32) -> bool {
        if self.sampled_position(serial) != Some(position) {
            return false;
        }
        if ended {
            self.steps.close(serial);
        } else if let Some(step) = self.steps.open(serial) {
            step.told = true;
        }
        self.tell(position, token);
        true
    }
}
