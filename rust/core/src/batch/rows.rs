//! Which sequence is in which row, and in which order they came.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    sync::Weak,
};

use super::lanes::{Flights, Lane};
use crate::{
    error::{Error, Result},
    sequence::{SequenceCell, SequenceState},
};

const OCCUPIED: &str = "a row that was chosen is occupied while the batch is locked";

pub(super) struct Row {
    /// Behind the row's lane while that is in use.
    pub(super) state: Box<SequenceState>,
    /// The user's handle, if there still is one.
    pub(super) handle: Weak<SequenceCell>,
}

pub(super) struct Rows {
    capacity: usize,
    pub(super) flights: Flights,
    /// Those that were taken so far.
    occupied: Vec<Option<Row>>,
    /// One for each of those.
    lanes: Vec<Lane>,
    /// Lanes that went out of use while a step of theirs was in flight.
    pub(super) num_settled: u64,
    in_order: Vec<usize>,
    /// Which rows are taken, and in which order.
    roster: u64,
    by_serial: HashMap<u64, usize>,
    /// Of those, the ones that are free again.
    vacant: BinaryHeap<Reverse<usize>>,
    /// To look for rows that are named twice.
    seen: Vec<bool>,
}

impl Rows {
    pub(super) fn new(max_sequences: usize, flights: Flights) -> Self {
        Self {
            capacity: max_sequences,
            flights,
            occupied: Vec::new(),
            lanes: Vec::new(),
            num_settled: 0,
            in_order: Vec::new(),
            roster: 0,
            by_serial: HashMap::new(),
            vacant: BinaryHeap::new(),
            seen: Vec::new(),
        }
    }

    pub(super) fn in_order(&self) -> &[usize] {
        &self.in_order
    }

    /// A number that is another one whenever the rows in order are others.
    pub(super) fn roster(&self) -> u64 {
        self.roster
    }

    pub(super) fn lowest_vacant(&self) -> Option<usize> {
        let vacated = self.vacant.peek().map(|Reverse(row)| *row);
        vacated.or_else(|| Some(self.occupied.len()).filter(|row| *row < self.capacity))
    }

    /// Put a sequence into the lowest vacant row.
    pub(super) fn occupy(&mut self, row: usize, state: Box<SequenceState>, handle: Weak<SequenceCell>) {
        if self.vacant.pop().is_none() {
            self.occupied.push(None);
            self.lanes.push(Lane::default());
        }
        self.lanes[row].sequence = state.serial;
        self.in_order.push(row);
        self.roster += 1;
        self.by_serial.insert(state.serial, row);
        self.occupied[row] = Some(Row { state, handle });
    }

    pub(super) fn vacate(&mut self, row: usize) -> Result<Row> {
        self.state(row)?;
        self.lanes[row].sequence = 0;
        let vacated = self.occupied[row].take().ok_or_else(|| Self::empty(row))?;
        self.by_serial.remove(&vacated.state.serial);
        self.in_order.retain(|other| *other != row);
        self.roster += 1;
        self.vacant.push(Reverse(row));
        Ok(vacated)
    }

    pub(super) fn get(&self, row: usize) -> Result<&Row> {
        match self.occupied.get(row) {
            Some(Some(occupied)) => Ok(occupied),
            None if row >= self.capacity => {
                Err(Error::argument("row", format_args!("between 0 and {}", self.capacity - 1), row))
            }
            Some(None) | None => Err(Self::empty(row)),
        }
    }

    /// The state in a row, which knows everything from here on.
    pub(super) fn state(&mut self, row: usize) -> Result<&mut SequenceState> {
        self.get(row)?;
        Ok(self.chosen(row))
    }

    /// The same in a row that was seen to be occupied, under the same lock.
    pub(super) fn chosen(&mut self, row: usize) -> &mut SequenceState {
        let (lane, state, flights) = self.lane_and_state(row);
        let in_flight = lane.settle(state, flights);
        self.num_settled += u64::from(in_flight);
        self.occupied[row].as_mut().map(|occupied| &mut *occupied.state).expect(OCCUPIED)
    }

    pub(super) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    pub(super) fn lanes_mut(&mut self) -> &mut [Lane] {
        &mut self.lanes
    }

    /// All lanes, and the states beneath.
    pub(super) fn lanes_and_rows(&mut self) -> (&mut [Lane], &mut [Option<Row>]) {
        (&mut self.lanes, &mut self.occupied)
    }

    pub(super) fn lane(&mut self, row: usize) -> &mut Lane {
        &mut self.lanes[row]
    }

    /// A lane, and the state beneath it.
    pub(super) fn lane_and_state(&mut self, row: usize) -> (&mut Lane, &mut SequenceState, &Flights) {
        let occupied = self.occupied.get_mut(row).and_then(Option::as_mut).expect(OCCUPIED);
        (&mut self.lanes[row], &mut occupied.state, &self.flights)
    }

    /// The lane of a sequence that was in `row` once, if it still is and its lane is in use.
    pub(super) fn lane_of(&mut self, row: usize, serial: u64) -> Option<&mut Lane> {
        self.lanes.get_mut(row).filter(|lane| lane.sequence == serial && lane.in_use())
    }

    /// The row of a sequence that was in `row` once.
    pub(super) fn find(&self, row: usize, serial: u64) -> Option<usize> {
        let is_there = |row: &usize| self.lanes.get(*row).is_some_and(|lane| lane.sequence == serial);
        Some(row).filter(is_there).or_else(|| self.by_serial.get(&serial).copied())
    }

    /// Tokens of the sequence in a row.
    pub(super) fn num_tokens(&self, row: usize) -> Result<usize> {
        let occupied = self.get(row)?;
        let lane = &self.lanes[row];
        Ok(if lane.in_use() { lane.num_tokens() } else { occupied.state.num_tokens() })
    }

    /// Append a token, known or not.
    pub(super) fn push_token(&mut self, row: usize, token: i32) {
        let (lane, state, _) = self.lane_and_state(row);
        if lane.in_use() && (!lane.is_full() || lane.flush(state, lane.num_tokens())) {
            lane.push(token);
        } else {
            self.chosen(row).push_all(&[token]);
        }
    }

    /// Refuse rows that are empty or named twice.
    pub(super) fn check_distinct(&mut self, rows: &[usize]) -> Result<()> {
        self.seen.clear();
        self.seen.resize(self.occupied.len(), false);
        for row in rows {
            self.get(*row)?;
            if std::mem::replace(&mut self.seen[*row], true) {
                return Err(Error::argument("rows", "distinct", format_args!("{rows:?}")));
            }
        }
        Ok(())
    }

    fn empty(row: usize) -> Error {
        Error::argument("row", "one that a sequence is in", format_args!("{row}, which is empty"))
    }
}
