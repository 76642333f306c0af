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
    plan: PlanId,
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
    /// Counts the plans of the batch.
    pub(crate) number: u64,
}

/// A step of one token that a batch took ahead of the state.
pub(crate) struct LaneStep {
    pub(crate) plan: PlanId,
    pub(crate) stop: usize,
    pub(crate) in_flight: bool,
    pub(crate) told: bool,
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

    fn open(&mut self, plan: PlanId) -> Option<&mut OpenStep> {
        self.open.iter_mut().rev().find(|step| step.plan == plan)
    }

    fn close(&mut self, plan: PlanId) {
        self.open.retain(|step| step.plan != plan);
    }
}

/// What a plan takes from one sequence.
pub(crate) struct NewStep {
    pub(crate) plan: PlanId,
    pub(crate) num_found: usize,
    pub(crate) count: usize,
    pub(crate) opening: Option<Opening>,
}

impl SequenceState {
    /// The next `count` tokens go into a plan; returns the copy to do, if any. `has_handle` says whether a
    /// plan of the same batch, by its number, still has one.
    pub(crate) fn take_step(
        &mut self,
        new: &NewStep,
        holds: &Arc<Holds>,
        has_handle: impl Fn(u64) -> bool,
        fresh: &mut impl Iterator<Item = BlockId>,
    ) -> Option<Copy> {
        let start = self.table.num_tokens();
        if start == 0 {
            self.history.epoch = self.pool().shared().epoch();
        }
        self.table.fly(holds, new.plan.number); // a copy's source is let go, and so held until the end
        let copy = self.table.grow(new.count, new.opening, fresh);
        let step = Step { plan: new.plan, start, copy, num_found: new.num_found };
        self.steps.in_flight.push_back(step);
        if self.steps.open.len() >= MANY_OPEN {
            let is_alive = |plan: PlanId| plan.batch != new.plan.batch || has_handle(plan.number);
            self.steps.open.retain(|step| is_alive(step.plan));
        }
        self.steps.open.push(OpenStep { plan: new.plan, stop: start + new.count, told: false });
        copy
    }

    /// Steps of one token each, oldest first, were taken ahead of the state: so many tokens are planned now,
    /// and if some of the steps have ended, so many computed.
    pub(crate) fn take_over(
        &mut self,
        num_planned: usize,
        num_computed: Option<usize>,
        steps: impl Iterator<Item = LaneStep>,
    ) {
        self.table.set_num_tokens(num_planned);
        self.history.num_computed = num_computed.unwrap_or(self.history.num_computed);
        for LaneStep { plan, stop, in_flight, told } in steps {
            if in_flight {
                self.steps.in_flight.push_back(Step { plan, start: stop - 1, copy: None, num_found: 0 });
            }
            self.steps.open.push(OpenStep { plan, stop, told });
        }
    }

    /// Take the oldest step in flight out, if it is that of the plan.
    fn land(&mut self, plan: PlanId) -> Option<Step> {
        let counts = self.steps.in_flight.front().is_some_and(|step| step.plan == plan);
        counts.then(|| self.steps.in_flight.pop_front()).flatten()
    }

    /// The plan has ended well, and of the step that planned `start..stop` the tokens up to `accepted` stand.
    pub(crate) fn commit_step(&mut self, plan: PlanId, accepted: usize, stop: usize, samples: bool) {
        if self.land(plan).is_some() {
            self.compute_to(accepted);
        }
        if accepted < stop && self.steps.open(plan).is_some() {
            // Even if its blocks are gone, its drafts are no tokens.
            self.void_steps();
            if let Some(step) = self.steps.open(plan) {
                step.stop = accepted;
            }
            self.cut(accepted);
        }
        if !samples || self.steps.open(plan).is_some_and(|step| step.told) {
            self.steps.close(plan);
        }
    }

    /// The plan did not happen.
    pub(crate) fn rollback_step(&mut self, plan: PlanId) {
        self.steps.close(plan);
        if let Some(step) = self.land(plan) {
            self.void_steps();
            self.table.undo_grow(step.start, step.copy);
            self.give_up_found(step.num_found);
        }
    }

    /// What later plans in flight did is undone, the latest first; their rows count no more.
    fn void_steps(&mut self) {
        while let Some(step) = self.steps.in_flight.pop_back() {
            self.table.undo_grow(step.start, step.copy);
            self.steps.close(step.plan);
        }
    }

    /// Where the token sampled by a plan belongs, if it still does.
    pub(crate) fn sampled_position(&self, plan: PlanId) -> Option<usize> {
        let takes =
            |stop: &usize| *stop == self.num_tokens() || self.tokens().get(*stop) == Some(&UNKNOWN_TOKEN);
        self.untold_stop(plan).filter(takes)
    }

    /// Where a plan's step stops, if nothing was cut there and the token behind it was not taken yet.
    pub(crate) fn untold_stop(&self, plan: PlanId) -> Option<usize> {
        let step = self.steps.open.iter().rev().find(|step| step.plan == plan);
        step.filter(|step| !step.told).map(|step| step.stop)
    }

    /// The token sampled by a plan was taken.
    pub(crate) fn note_told(&mut self, plan: PlanId, ended: bool) {
        if ended {
            self.steps.close(plan);
        } else if let Some(step) = self.steps.open(plan) {
            step.told = true;
        }
    }

    /// Take the token sampled by a plan, if it still has a place.
    pub(crate) fn take_sampled(&mut self, plan: PlanId, ended: bool, token: i32) -> bool {
        let Some(position) = self.sampled_position(plan) else { return false };
        self.note_told(plan, ended);
        self.tell(position, token);
        true
    }
}
