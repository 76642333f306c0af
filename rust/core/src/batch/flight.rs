//! What plans take, and how that is kept or undone.

use std::sync::Arc;

use super::{
    BatchState,
    choice::{Choice, PlanRequest},
};
use crate::{
    error::{Error, Result},
    ids::BlockId,
    plan::{FlightStep, PlanShared, RowStep},
    pool::Opening,
    sequence::{NewStep, PlanId, check_length},
    table::Copy,
};

/// What was taken for a choice, before any row has it.
struct Taken {
    /// Of each step, what became of the block that it begins in.
    openings: Vec<Option<Opening>>,
    fresh: Vec<BlockId>,
}

/// How often a plan that other threads interfere with is chosen anew.
const MOST_ROUNDS: usize = 100;

impl BatchState {
    pub(super) fn plan(&mut self, request: &PlanRequest<'_>) -> Result<Arc<PlanShared>> {
        let (choice, taken) = self.choose_and_take(request)?;
        self.forget_dropped_plans();
        let id = PlanId { batch: self.serial, serial: self.pool.shared().next_serial() };
        self.holds.begin(id.serial);
        let (steps, copies) = self.take_steps(id, &choice, taken);
        let plan = Arc::new(self.export(id, steps, &copies, choice));
        self.plans.push((id.serial, Arc::downgrade(&plan)));
        self.in_flight.push_back(Arc::clone(&plan));
        Ok(plan)
    }

    /// A second round is needed only if another thread changed the pool between choosing and taking. Who is
    /// overtaken again and again is told that there are no blocks, which for others there were.
    fn choose_and_take(&mut self, request: &PlanRequest<'_>) -> Result<(Choice, Taken)> {
        let mut choice = self.choose(request)?;
        for _ in 0..MOST_ROUNDS {
            if choice.needed <= self.pool.num_free()
                && let Some(taken) = self.take(&choice)?
            {
                return Ok((choice, taken));
            }
            if choice.needed > self.pool.num_free() && !request.partial {
                break;
            }
            choice = self.choose(request)?;
        }
        Err(self.pool.shared().out_of_blocks(choice.needed, choice.ever_fits))
    }

    /// Hold what the choice found, open the blocks that it writes into, take the fresh ones. `None` if the
    /// pool is not as it was when choosing; then nothing has changed.
    fn take(&mut self, choice: &Choice) -> Result<Option<Taken>> {
        // What is found is held before anything is evicted, and before it is decided who copies.
        for (index, step) in choice.steps.iter().enumerate() {
            let held = self.rows.chosen(step.row).hold_found(&step.found, true);
            if held != Ok(true) {
                self.give_up(choice, index, &[]);
                return held.map(|_| None);
            }
        }
        let (mut openings, mut needed) = (Vec::with_capacity(choice.steps.len()), 0);
        for step in &choice.steps {
            let table = &self.rows.chosen(step.row).table;
            let opening = table.open_last(step.count);
            needed += table.blocks_needed_opened(step.count, opening);
            openings.push(opening);
        }
        let shared = self.pool.shared();
        if !shared.reserve(needed) {
            self.give_up(choice, choice.steps.len(), &openings);
            return Ok(None);
        }
        let mut fresh = Vec::with_capacity(needed);
        shared.take_reserved(needed, &mut fresh);
        Ok(Some(Taken { openings, fresh }))
    }

    fn give_up(&mut self, choice: &Choice, num_held: usize, openings: &[Option<Opening>]) {
        for (step, opening) in choice.steps.iter().zip(openings) {
            self.rows.chosen(step.row).close_last(*opening);
        }
        for step in choice.steps[..num_held].iter().rev() {
            self.rows.chosen(step.row).unhold_found(step.found.len());
        }
    }

    /// The rows take their steps; this cannot fail.
    fn take_steps(
        &mut self,
        id: PlanId,
        choice: &Choice,
        taken: Taken,
    ) -> (Vec<FlightStep>, Vec<Option<Copy>>) {
        let has_handle = |serial| self.plans.binary_search_by_key(&serial, |(serial, _)| *serial).is_ok();
        let mut fresh = taken.fresh.into_iter();
        let mut steps = Vec::with_capacity(choice.steps.len());
        let mut copies = Vec::with_capacity(choice.steps.len());
        for (chosen, opening) in choice.steps.iter().zip(taken.openings) {
            let state = self.rows.chosen(chosen.row);
            let start = state.table.num_tokens();
            let new = NewStep {
                plan: id,
                has_handle: &has_handle,
                holds: &self.holds,
                num_found: chosen.found.len(),
                count: chosen.count,
                opening,
            };
            copies.push(state.take_step(&new, &mut fresh));
            steps.push(FlightStep {
                row: chosen.row,
                sequence: state.serial,
                start,
                stop: start + chosen.count,
                samples: state.num_unplanned() == 0,
            });
        }
        debug_assert_eq!(fresh.len(), 0);
        (steps, copies)
    }

    /// The tables as they are now, in the forms that kernels read.
    fn export(
        &mut self,
        id: PlanId,
        steps: Vec<FlightStep>,
        copies: &[Option<Copy>],
        choice: Choice,
    ) -> PlanShared {
        let block_size = self.pool.block_size();
        let widths = steps.iter().map(|step| self.rows.chosen(step.row).table.blocks().len());
        let width = widths.max().unwrap_or(0);
        let (rows, told) = (&mut self.rows, &mut self.told);
        let arrays = self.recycler.write(steps.len(), width, block_size, |arrays| {
            for (step, copy) in steps.iter().zip(copies) {
                let state = rows.chosen(step.row);
                let tokens = &state.tokens()[step.start..step.stop];
                let (row, start, samples) = (step.row, step.start, step.samples);
                let table = &state.table;
                arrays.push_row(&RowStep { row, start, tokens, table, copy: *copy, samples });
                told.tell(row, table, &mut arrays.table_updates);
            }
            arrays.skipped.extend(choice.skipped);
            arrays.never_fit.extend(choice.never_fit);
        });
        PlanShared::new(id, steps, arrays)
    }

    pub(crate) fn commit(&mut self, plan: &PlanShared, num_accepted: Option<&[usize]>) -> Result<()> {
        self.check_turn(plan)?;
        if let Some(accepted) = num_accepted {
            check_accepted(plan, accepted)?;
        }
        let held = self.end(plan, true);
        for (index, step) in plan.steps.iter().enumerate() {
            let accepted = num_accepted.map_or(step.stop, |accepted| step.start + accepted[index]);
            self.with_sequence(step.row, step.sequence, |state, _| {
                state.commit_step(plan.id.serial, accepted, step.stop, step.samples);
            });
        }
        self.pool.shared().drop_holds(&held);
        self.roll_back_dropped();
        Ok(())
    }

    pub(crate) fn rollback(&mut self, plan: &PlanShared) -> Result<()> {
        self.check_turn(plan)?;
        self.undo(plan);
        self.roll_back_dropped();
        Ok(())
    }

    /// Plans that nobody can end any more end here, when their turn has come.
    pub(crate) fn roll_back_dropped(&mut self) {
        while let Some(plan) = self.in_flight.front().filter(|plan| plan.is_dropped()).cloned() {
            self.undo(&plan);
        }
    }

    fn undo(&mut self, plan: &PlanShared) {
        let held = self.end(plan, false);
        for step in &plan.steps {
            let _ =
                self.with_sequence(step.row, step.sequence, |state, _| state.rollback_step(plan.id.serial));
        }
        self.pool.shared().drop_holds(&held);
    }

    fn check_turn(&self, plan: &PlanShared) -> Result<()> {
        if !plan.is_in_flight() {
            return Err(Error::StaleHandle("plan has been committed or rolled back"));
        }
        match self.in_flight.front() {
            Some(front) if front.id == plan.id => Ok(()),
            _ => Err(Error::PlanInFlight(
                "an earlier plan of the batch is in flight; plans end in the order they were made",
            )),
        }
    }

    /// The oldest plan leaves the flight; returns the blocks that it held.
    fn end(&mut self, plan: &PlanShared, committed: bool) -> Vec<BlockId> {
        self.in_flight.pop_front();
        plan.set_ended(committed);
        self.holds.end(plan.id.serial)
    }

    pub(crate) fn extend_sampled(&mut self, plan: &PlanShared, token_ids: &[i32]) -> Result<Vec<bool>> {
        if plan.was_rolled_back() {
            return Ok(vec![false; token_ids.len()]);
        }
        let (serial, ended) = (plan.id.serial, !plan.is_in_flight());
        let sampling = || plan.steps.iter().filter(|step| step.samples);
        let mut positions = Vec::with_capacity(token_ids.len());
        for step in sampling() {
            let position = self.with_sequence(step.row, step.sequence, |state, most| {
                let position = state.sampled_position(serial);
                match position.filter(|position| *position == state.num_tokens()).zip(most) {
                    Some((position, most)) => check_length(position + 1, most).map(|()| Some(position)),
                    None => Ok(position),
                }
            });
            positions.push(position.transpose()?.flatten());
        }
        let mut taken = Vec::with_capacity(token_ids.len());
        for ((step, position), token) in sampling().zip(positions).zip(token_ids) {
            let taken_there = position.and_then(|position| {
                self.with_sequence(step.row, step.sequence, |state, _| {
                    state.take_sampled(serial, ended, position, *token)
                })
            });
            taken.push(taken_there.unwrap_or(false));
        }
        Ok(taken)
    }
}

fn check_accepted(plan: &PlanShared, accepted: &[usize]) -> Result<()> {
    let counts = plan.steps.iter().map(|step| step.stop - step.start);
    if accepted.len() != plan.steps.len() || accepted.iter().zip(counts.clone()).any(|(n, most)| *n > most) {
        let allowed = format!("one number for each row, at most {:?}", counts.collect::<Vec<_>>());
        return Err(Error::argument("num_accepted", allowed, format_args!("{accepted:?}")));
    }
    Ok(())
}
