//! What plans take, and how that is kept or undone.

use std::sync::Arc;

use super::{
    BatchState,
    choice::{Choice, Chosen, How, PlanRequest},
};
use crate::{
    error::{Error, Result},
    ids::BlockId,
    plan::{Cursor, Extent, FlightStep, OutTable, PlanArrays, PlanLists, PlanShared},
    pool::Opening,
    sequence::{NewStep, PlanId, check_length},
};

/// What was taken for a choice, before any row has it.
#[derive(Default)]
pub(super) struct Taken {
    /// Of each step of a state, what became of the block that it begins in.
    openings: Vec<Option<Opening>>,
    fresh: Vec<BlockId>,
}

/// How often a plan that other threads interfere with is chosen anew.
const MOST_ROUNDS: usize = 100;

/// For how many commits what they look at is got at hand at once.
const LOOK_AHEAD: usize = 32;

impl BatchState {
    pub(super) fn plan(
        &mut self,
        request: &PlanRequest<'_>,
        out: Option<&mut OutTable>,
    ) -> Result<(Arc<PlanShared>, Arc<PlanArrays>)> {
        let mut choice = std::mem::take(&mut self.choice);
        let mut taken = std::mem::take(&mut self.taken);
        let plan = self
            .choose_and_take(request, out.as_ref().map(|out| out.extent), &mut choice, &mut taken)
            .map(|()| self.take_off(&choice, &taken, out));
        (self.choice, self.taken) = (choice, taken);
        plan
    }

    /// A second round is needed only if another thread changed the pool between choosing and taking. Who is
    /// overtaken again and again is told that there are no blocks, which for others there were.
    fn choose_and_take(
        &mut self,
        request: &PlanRequest<'_>,
        room: Option<Extent>,
        choice: &mut Choice,
        taken: &mut Taken,
    ) -> Result<()> {
        self.choose(request, choice)?;
        for _ in 0..MOST_ROUNDS {
            check_room(room, choice.extent)?;
            if choice.needed <= self.pool.num_free() && self.take(choice, taken)? {
                return Ok(());
            }
            if choice.needed > self.pool.num_free() && !request.partial {
                break;
            }
            self.choose(request, choice)?;
        }
        Err(self.pool.shared().out_of_blocks(choice.needed, choice.ever_fits))
    }

    /// Hold what the choice found, open the blocks that it writes into, take the fresh ones. False if the
    /// pool is not as it was when choosing; then nothing has changed.
    fn take(&mut self, choice: &Choice, taken: &mut Taken) -> Result<bool> {
        taken.openings.clear();
        taken.fresh.clear();
        // What is found is held before anything is evicted, and before it is decided who copies.
        let mut found = &choice.found[..];
        for (index, (row, _, num_found)) in choice.state_steps().enumerate() {
            let (own, rest) = found.split_at(num_found);
            found = rest;
            let held = self.rows.chosen(row).hold_found(own, true);
            if held != Ok(true) {
                self.give_up(choice, index, &[]);
                return held;
            }
        }
        let mut needed = choice.needed_by_lanes;
        for (row, count, _) in choice.state_steps() {
            let table = &self.rows.chosen(row).table;
            let opening = table.open_last(count);
            needed += table.blocks_needed_opened(count, opening);
            taken.openings.push(opening);
        }
        let shared = self.pool.shared();
        if !shared.reserve(needed) {
            self.give_up(choice, taken.openings.len(), &taken.openings);
            return Ok(false);
        }
        shared.take_reserved(needed, &mut taken.fresh);
        Ok(true)
    }

    /// Undo what was done for the first `num_held` of the states' steps.
    fn give_up(&mut self, choice: &Choice, num_held: usize, openings: &[Option<Opening>]) {
        for ((row, ..), opening) in choice.state_steps().zip(openings) {
            self.rows.chosen(row).close_last(*opening);
        }
        let held: Vec<_> = choice.state_steps().take(num_held).collect();
        for (row, _, num_found) in held.into_iter().rev() {
            self.rows.chosen(row).unhold_found(num_found);
        }
    }

    /// The rows take their steps; this cannot fail.
    fn take_off(
        &mut self,
        choice: &Choice,
        taken: &Taken,
        out: Option<&mut OutTable>,
    ) -> (Arc<PlanShared>, Arc<PlanArrays>) {
        let (memory, mut lists) = self.plans.recycle();
        let id = self.rows.flights.begin();
        self.pool.shared().account_table_references(choice.needed_by_lanes);
        let mut recycler = std::mem::take(&mut self.recycler);
        let arrays = recycler.write(choice.extent, choice.roster, self.pool.block_size(), out, |arrays| {
            let mut fresh = taken.fresh.iter().copied();
            let mut openings = taken.openings.iter().copied();
            let mut at = Cursor::default();
            for run in choice.steps.chunk_by(|one, next| one.how == How::Lane && next.how == How::Lane) {
                if let [Chosen { row, count, how: How::State { num_found } }] = *run {
                    let (num_found, count) = (num_found as usize, count as usize);
                    let opening = openings.next().flatten();
                    let new = NewStep { plan: id, num_found, count, opening };
                    lists.to_commit.push(lists.steps.len() as u32);
                    lists.steps.push(self.step_state(row as usize, &new, &mut fresh, arrays, &mut at));
                } else {
                    self.step_lanes(run, id, &mut fresh, arrays, &mut at, &mut lists);
                }
            }
            debug_assert_eq!(fresh.len(), 0);
            arrays.skipped.extend_from_slice(&choice.skipped);
            arrays.never_fit.extend_from_slice(&choice.never_fit);
        });
        self.recycler = recycler;
        let plan = PlanShared::new(id, lists, self.rows.num_settled, arrays.max_seq_len());
        let plan = self.plans.push(memory, plan);
        (plan, arrays)
    }

    /// Lanes side by side take their steps.
    fn step_lanes(
        &mut self,
        run: &[Chosen],
        id: PlanId,
        fresh: &mut impl Iterator<Item = BlockId>,
        arrays: &mut PlanArrays,
        at: &mut Cursor,
        lists: &mut PlanLists,
    ) {
        let block_size = self.pool.block_size() as u32;
        let (lanes, occupied) = self.rows.lanes_and_rows();
        let (first, first_step) = (*at, lists.steps.len());
        let (changed, to_commit) = (&mut self.changed, &mut lists.to_commit);
        changed.clear();
        let places = arrays.token_rows(first, run.iter().map(|chosen| chosen.row));
        lists.steps.extend(run.iter().zip(places).enumerate().map(|(index, (chosen, place))| {
            let lane = &mut lanes[chosen.row as usize];
            if lane.open_block(block_size).is_none()
                && let Some(block) = fresh.next()
                && let Some(occupied) = &mut occupied[chosen.row as usize]
            {
                occupied.state.table.push_accounted(block);
                lane.begin_block(block);
            }
            let step = lane.step(id.number, block_size);
            let (stop, page_len) = (step.position + 1, step.offset + 1);
            *place.token_id = step.token;
            *place.seq_len = stop as i32;
            *place.last_page_len = page_len as i32;
            *place.slot = i64::from(step.block.as_i32()) * i64::from(block_size) + i64::from(step.offset);
            if *place.seen != step.seen {
                changed.push(index as u32);
            }
            let fills = page_len == block_size;
            if fills {
                to_commit.push((first_step + index) as u32);
            }
            let (sequence, row, start) = (lane.sequence, chosen.row, step.position);
            FlightStep { sequence, row, start, stop, samples: true, fills }
        }));
        arrays.finish_token_rows(at, run.len());
        for &index in &*changed {
            let (row, at) = (run[index as usize].row as usize, first.behind(index as usize));
            let (seen, last_block) = lanes[row].seen();
            if !arrays.append_block(at, row, seen, last_block, &mut self.told)
                && let Some(occupied) = &occupied[row]
            {
                arrays.set_table(at, row, &occupied.state.table, &mut self.told);
            }
        }
    }

    fn step_state(
        &mut self,
        row: usize,
        new: &NewStep,
        fresh: &mut impl Iterator<Item = BlockId>,
        arrays: &mut PlanArrays,
        at: &mut Cursor,
    ) -> FlightStep {
        let plans = &self.plans;
        let has_handle = |number| plans.has_handle(number);
        let (lane, state, flights) = self.rows.lane_and_state(row);
        let start = state.table.num_tokens();
        let stop = start + new.count;
        let copy = state.take_step(new, &flights.holds, has_handle, fresh);
        let samples = state.num_unplanned() == 0;
        if let Some(copy) = copy {
            arrays.push_copy(copy);
        }
        arrays.set_table(*at, row, &state.table, &mut self.told);
        arrays.set_tokens(at, row, start, &state.tokens()[start..stop], &state.table, samples);
        if samples && state.knows_all() {
            lane.enter(state, new.plan.number);
        }
        FlightStep {
            sequence: state.serial,
            row: row as u32,
            start: start as u32,
            stop: stop as u32,
            samples,
            fills: stop.is_multiple_of(state.table.block_size()),
        }
    }

    pub(crate) fn commit(&mut self, plan: &PlanShared, num_accepted: Option<&[usize]>) -> Result<()> {
        self.check_turn(plan)?;
        if let Some(accepted) = num_accepted {
            check_accepted(plan, accepted)?;
        }
        let accepted_of = |index: usize, step: &FlightStep| {
            num_accepted.map_or(step.stop, |accepted| step.start + accepted[index] as u32)
        };
        if num_accepted.is_some() {
            // While the plan is in flight, so that the states know of their steps.
            let refused = |(index, step): &(usize, &FlightStep)| accepted_of(*index, step) < step.stop;
            for (_, step) in plan.steps.iter().enumerate().filter(refused) {
                self.settle(step);
            }
        }
        let held = self.end(plan, true);
        if num_accepted.is_none() && plan.num_settled == self.rows.num_settled {
            // All lanes that took a step still know of it, and most have nothing to do.
            for steps in plan.to_commit.chunks(LOOK_AHEAD) {
                let steps = || steps.iter().map(|index| &plan.steps[*index as usize]);
                self.look_ahead(plan.id, steps());
                for step in steps() {
                    self.commit_step(plan.id, step, step.stop);
                }
            }
        } else {
            for (index, step) in plan.steps.iter().enumerate() {
                self.commit_step(plan.id, step, accepted_of(index, step));
            }
        }
        self.pool.shared().drop_holds(&held);
        self.roll_back_dropped();
        Ok(())
    }

    /// Get at hand what the commits of some steps look at: of all of them first the sequences, then the
    /// places of their keys. So the processor waits for them together, and not for one after another, between
    /// atomic updates over which it does not look ahead.
    fn look_ahead<'a>(&mut self, id: PlanId, steps: impl Iterator<Item = &'a FlightStep> + Clone) {
        for step in steps.clone() {
            if let Some(row) = self.rows.find(step.row as usize, step.sequence) {
                self.rows.lane_and_state(row).1.touch();
            }
        }
        self.described.clear();
        for step in steps {
            let (row, stop) = (step.row as usize, step.stop as usize);
            if self.rows.lane_of(row, step.sequence).is_some_and(|lane| lane.took(id.number)) {
                let (lane, state, _) = self.rows.lane_and_state(row);
                if lane.flush(state, stop) {
                    state.describe_full_blocks(stop);
                    self.described.extend(state.unpublished());
                }
            }
        }
        self.pool.shared().touch_described(&self.described);
    }

    fn commit_step(&mut self, id: PlanId, step: &FlightStep, accepted: u32) {
        let (row, stop) = (step.row as usize, step.stop as usize);
        let Some(lane) = self.rows.lane_of(row, step.sequence) else {
            self.with_sequence(row, step.sequence, |state, _| {
                state.commit_step(id, accepted as usize, stop, step.samples);
            });
            return;
        };
        let is_of_lane = lane.took(id.number);
        if is_of_lane && !step.fills {
            return;
        }
        let (lane, state, flights) = self.rows.lane_and_state(row);
        lane.fly(state, flights);
        if !is_of_lane {
            state.commit_step(id, stop, stop, step.samples);
        } else if lane.flush(state, stop) {
            state.compute_to(stop);
        } else {
            lane.settle(state, flights); // some token is unknown; the state publishes as they are told
            state.publish_full_blocks();
            return;
        }
        lane.look_at(state);
    }

    pub(crate) fn rollback(&mut self, plan: &PlanShared) -> Result<()> {
        self.check_turn(plan)?;
        self.undo(plan);
        self.roll_back_dropped();
        Ok(())
    }

    /// Plans that nobody can end any more end here, when their turn has come.
    pub(crate) fn roll_back_dropped(&mut self) {
        while let Some(plan) =
            self.plans.get(self.rows.flights.numbers.start).filter(|plan| plan.is_dropped())
        {
            let plan = Arc::clone(plan);
            self.undo(&plan);
        }
    }

    fn undo(&mut self, plan: &PlanShared) {
        for step in &plan.steps {
            self.settle(step);
        }
        let held = self.end(plan, false);
        for step in &plan.steps {
            let _ =
                self.with_sequence(step.row as usize, step.sequence, |state, _| state.rollback_step(plan.id));
        }
        self.pool.shared().drop_holds(&held);
    }

    fn settle(&mut self, step: &FlightStep) {
        if let Some(row) = self.rows.find(step.row as usize, step.sequence) {
            self.rows.chosen(row);
        }
    }

    fn check_turn(&self, plan: &PlanShared) -> Result<()> {
        if !plan.is_in_flight() {
            return Err(Error::StaleHandle("plan has been committed or rolled back"));
        }
        if plan.id.number != self.rows.flights.numbers.start {
            return Err(Error::PlanInFlight(
                "an earlier plan of the batch is in flight; plans end in the order they were made",
            ));
        }
        Ok(())
    }

    /// The oldest plan leaves the flight; returns the blocks that it held.
    fn end(&mut self, plan: &PlanShared, committed: bool) -> Vec<BlockId> {
        plan.set_ended(committed);
        self.rows.flights.end()
    }

    /// The sampled tokens go where they belong; `taken` tells which did.
    pub(crate) fn extend_sampled(
        &mut self,
        plan: &PlanShared,
        token_ids: &[i32],
        taken: &mut [bool],
    ) -> Result<()> {
        taken.fill(false);
        if plan.was_rolled_back() {
            return Ok(());
        }
        if plan.max_seq_len >= self.max_tokens {
            self.check_sampled(plan)?;
        }
        let ended = !plan.is_in_flight();
        let sampling = plan.steps.iter().filter(|step| step.samples);
        for ((step, token), taken) in sampling.zip(token_ids).zip(taken) {
            let lane = &mut self.rows.lanes_mut()[step.row as usize];
            let usual = lane.append_sampled(plan.id.number, *token);
            *taken = usual || self.tell(plan.id, ended, step, *token);
        }
        Ok(())
    }

    /// Refuse tokens that would make a row too long.
    fn check_sampled(&mut self, plan: &PlanShared) -> Result<()> {
        for step in plan.steps.iter().filter(|step| step.samples) {
            let checked = self.with_sequence(step.row as usize, step.sequence, |state, most| {
                let position = state.sampled_position(plan.id).filter(|at| *at == state.num_tokens());
                position.zip(most).map_or(Ok(()), |(position, most)| check_length(position + 1, most))
            });
            checked.unwrap_or(Ok(()))?;
        }
        Ok(())
    }

    fn tell(&mut self, id: PlanId, ended: bool, step: &FlightStep, token: i32) -> bool {
        let row = step.row as usize;
        let Some(lane) = self.rows.lane_of(row, step.sequence) else {
            let told =
                self.with_sequence(row, step.sequence, |state, _| state.take_sampled(id, ended, token));
            return told.unwrap_or(false);
        };
        // What the lane did not take itself, the state beneath it did.
        let is_of_lane = lane.took(id.number);
        let position = if is_of_lane {
            Some(step.stop as usize).filter(|_| lane.is_untold(id.number))
        } else {
            self.rows.lane_and_state(row).1.untold_stop(id)
        };
        let Some(position) = position else { return false };
        let lane = self.rows.lane(row);
        let appends = position == lane.num_tokens();
        if !appends && !lane.resolve(position, token) {
            return false;
        }
        if is_of_lane {
            lane.note_told(id.number);
        } else {
            self.rows.lane_and_state(row).1.note_told(id, ended);
        }
        if appends {
            self.rows.push_token(row, token);
        }
        true
    }
}

fn check_room(room: Option<Extent>, needed: Extent) -> Result<()> {
    let Some(room) = room else { return Ok(()) };
    if needed.num_rows <= room.num_rows && needed.num_tokens <= room.num_tokens && needed.width <= room.width
    {
        return Ok(());
    }
    let Extent { num_rows, num_tokens, width } = needed;
    let allowed = format!("large enough for {num_rows} rows, {num_tokens} tokens, {width} blocks a row");
    let Extent { num_rows, num_tokens, width } = room;
    let came = format!("one for {num_rows}, {num_tokens} and {width}");
    Err(Error::argument("out", allowed, came))
}

fn check_accepted(plan: &PlanShared, accepted: &[usize]) -> Result<()> {
    let counts = plan.steps.iter().map(FlightStep::num_tokens);
    if accepted.len() != plan.steps.len() || accepted.iter().zip(counts.clone()).any(|(n, most)| *n > most) {
        let allowed = format!("one number for each row, at most {:?}", counts.collect::<Vec<_>>());
        return Err(Error::argument("num_accepted", allowed, format_args!("{accepted:?}")));
    }
    Ok(())
}
