//! Executing plans on the shadow memory, ending them, and reading back.

use std::collections::HashSet;

use super::{
    Flight, FlightRow, KEPT_PLANS, MOST_TOKENS, World, cut_pictures, follow, history, memory::before, sampled,
};
use kvfolio::UNKNOWN_TOKEN;

impl World {
    pub(super) fn flight_rows(&mut self, id: usize) -> impl Iterator<Item = &mut FlightRow> {
        let flying = self.runs.iter_mut().flat_map(|run| &mut run.flights);
        flying.chain(&mut self.ended).flat_map(|flight| &mut flight.rows).filter(move |row| row.id == id)
    }

    pub(super) fn note_cut(&mut self, id: usize, keep: usize) {
        self.flight_rows(id).filter(|row| row.stop > keep).for_each(|row| row.open = false);
    }

    fn note_voided(&mut self, id: usize) {
        for row in self.flight_rows(id).filter(|row| row.counts) {
            (row.counts, row.open, row.voided) = (false, false, true);
        }
    }

    /// Do what the oldest plan that was not executed says.
    pub(super) fn execute(&mut self, run: usize) {
        let block_size = self.pool.block_size();
        let Some(flight) = self.runs[run].flights.iter_mut().find(|flight| !flight.executed) else { return };
        flight.executed = true;
        let (memory, arrays) = (&self.memory, &flight.arrays);
        let sources: Vec<_> = arrays.copies().iter().map(|copy| memory.block(copy[0])).collect();
        for (source, copy) in sources.iter().zip(arrays.copies()) {
            memory.write_block(copy[1], source);
        }
        let (cells, _, stride) = arrays.block_table();
        let slot = |index: usize, position: usize| {
            let block = cells[index * stride + position / block_size] as usize;
            (block > 0).then_some(block * block_size + position % block_size)
        };
        for (index, row) in flight.rows.iter().enumerate() {
            let first = arrays.query_start_loc()[index] as usize;
            for position in row.start..row.stop {
                let token = first + position - row.start;
                assert_eq!(
                    arrays.slot_mapping()[token],
                    slot(index, position).unwrap() as i64,
                    "slot mapping"
                );
                let expected = before(row.tenant, &row.history, position);
                let found = position.checked_sub(1).and_then(|position| slot(index, position));
                let previous = found.map_or(expected, |slot| memory.read(slot));
                let content = follow(previous, arrays.token_ids()[token], &row.pictures, position);
                memory.write(arrays.slot_mapping()[token] as usize, content);
            }
        }
        for (index, row) in flight.rows.iter().enumerate().filter(|(_, row)| !row.voided) {
            for position in 0..row.stop {
                let found = slot(index, position).map(|slot| memory.read(slot));
                let own = row.history[position];
                assert!(
                    found.is_none_or(|found| found == own),
                    "position {position} of a step of {}",
                    row.id
                );
            }
        }
    }

    pub(super) fn commit(&mut self, run: usize, bits: u32) {
        if self.runs[run].flights.is_empty() {
            return;
        }
        while !self.runs[run].flights[0].executed {
            self.execute(run);
        }
        let Some(mut flight) = self.runs[run].flights.pop_front() else { return };
        let count = |(index, row): (usize, &FlightRow)| match bits >> (index * 4) & 7 {
            refused @ 1..4 => (row.stop - row.start).saturating_sub(refused as usize),
            _ => row.stop - row.start,
        };
        let accepted: Vec<_> = flight.rows.iter().enumerate().map(count).collect();
        let drafts = !bits.is_multiple_of(3);
        flight.plan.as_ref().unwrap().commit(drafts.then_some(&accepted)).unwrap();
        for (row, count) in flight.rows.iter_mut().zip(accepted) {
            row.counts = false;
            let stop = row.start + count;
            if drafts && stop < row.stop && row.open {
                self.note_voided(row.id);
                self.note_cut(row.id, stop);
                if let Some(live) = self.lives.iter_mut().find(|live| live.id == row.id) {
                    cut_pictures(&mut live.pictures, stop);
                }
                row.stop = stop;
                row.history.truncate(stop);
            }
        }
        self.keep(flight);
        self.note_dropped(run);
    }

    pub(super) fn rollback(&mut self, run: usize) {
        if let Some(flight) = self.runs[run].flights.pop_front() {
            flight.plan.as_ref().unwrap().rollback().unwrap();
            self.note_rolled_back(flight);
            self.note_dropped(run);
        }
    }

    fn note_rolled_back(&mut self, mut flight: Flight) {
        for row in &mut flight.rows {
            row.open = false;
            // Later steps build on this one, which perhaps was never executed, even if the sequence is gone.
            self.flight_rows(row.id).for_each(|row| row.voided = true);
            if std::mem::take(&mut row.counts) {
                self.note_voided(row.id);
            }
        }
        self.keep(flight);
    }

    /// Plans whose handles were dropped are rolled back when their turn comes.
    pub(super) fn note_dropped(&mut self, run: usize) {
        while self.runs[run].flights.front().is_some_and(|flight| flight.plan.is_none()) {
            if let Some(flight) = self.runs[run].flights.pop_front() {
                self.note_rolled_back(flight);
            }
        }
    }

    fn keep(&mut self, flight: Flight) {
        if self.ended.len() == KEPT_PLANS {
            self.ended.remove(0);
        }
        self.ended.push(flight);
    }

    /// The tokens of some plan, in flight or ended, come.
    pub(super) fn sample(&mut self, pick: usize) {
        let (lives, most) = (&self.lives, MOST_TOKENS);
        let flying = self.runs.iter_mut().flat_map(|run| &mut run.flights);
        let mut flights: Vec<_> =
            flying.chain(&mut self.ended).filter(|flight| flight.plan.is_some()).collect();
        if flights.is_empty() {
            return;
        }
        let index = pick % flights.len();
        let Flight { plan, rows, .. } = &mut *flights[index];
        let mut rows: Vec<_> = rows.iter_mut().filter(|row| row.samples).collect();
        let mut refused = false;
        let told = |row: &&mut FlightRow| {
            let live = lives.iter().find(|live| live.id == row.id)?;
            let tokens = live.sequence.token_ids().unwrap();
            let next = tokens.get(row.stop).copied();
            let takes = row.open
                && !row.told
                && next.unwrap_or(UNKNOWN_TOKEN) == UNKNOWN_TOKEN
                && tokens.len() >= row.stop;
            refused |= takes && next.is_none() && live.place.is_some() && row.stop == most;
            let history = history(live.tenant, &live.pictures, &tokens);
            takes.then(|| sampled(before(live.tenant, &history, row.stop)))
        };
        let told: Vec<_> = rows.iter().map(told).collect();
        let tokens: Vec<_> = told.iter().map(|token| token.unwrap_or(1)).collect();
        match plan.as_ref().unwrap().extend(&tokens) {
            Err(error) => assert!(refused, "{error}"),
            Ok(taken) => {
                assert!(!refused, "a sequence grew beyond the batch's limit");
                assert_eq!(taken, told.iter().map(Option::is_some).collect::<Vec<_>>(), "tokens taken");
                for (row, taken) in rows.iter_mut().zip(taken) {
                    row.told |= taken;
                }
            }
        }
    }

    /// What live sequences claim as computed reads back as their own history.
    pub(super) fn check_memory(&self) {
        let copied = self.pending_copies();
        for live in &self.lives {
            let history = history(live.tenant, &live.pictures, &live.sequence.token_ids().unwrap());
            let blocks = live.sequence.blocks().unwrap();
            let claims = &history[..live.sequence.num_computed().unwrap()];
            for (position, own) in claims.iter().enumerate() {
                let block = blocks[position / self.pool.block_size()].as_i32();
                if let Some(slot) = self.memory.slot(&blocks, position).filter(|_| !copied.contains(&block)) {
                    assert_eq!(self.memory.read(slot), *own, "position {position} of sequence {}", live.id);
                }
            }
        }
        self.sides.iter().for_each(|side| side.check(&self.memory));
    }

    /// Blocks that a plan which was not executed yet is still to copy into.
    pub(super) fn pending_copies(&self) -> HashSet<i32> {
        let flights = self.runs.iter().flat_map(|run| &run.flights).filter(|flight| !flight.executed);
        flights.flat_map(|flight| flight.arrays.copies()).map(|copy| copy[1]).collect()
    }
}
