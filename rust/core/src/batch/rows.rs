//! Which sequence is in which row, and in which order they came.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    sync::Weak,
};

use crate::{
    error::{Error, Result},
    sequence::{SequenceCell, SequenceState},
};

pub(super) struct Row {
    pub(super) state: Box<SequenceState>,
    /// The user's handle, if there still is one.
    pub(super) handle: Weak<SequenceCell>,
}

pub(super) struct Rows {
    capacity: usize,
    /// Those that were taken so far.
    occupied: Vec<Option<Row>>,
    in_order: Vec<usize>,
    by_serial: HashMap<u64, usize>,
    /// Of those, the ones that are free again.
    vacant: BinaryHeap<Reverse<usize>>,
}

impl Rows {
    pub(super) fn new(max_sequences: usize) -> Self {
        Self {
            capacity: max_sequences,
            occupied: Vec::new(),
            in_order: Vec::new(),
            by_serial: HashMap::new(),
            vacant: BinaryHeap::new(),
        }
    }

    pub(super) fn in_order(&self) -> &[usize] {
        &self.in_order
    }

    pub(super) fn lowest_vacant(&self) -> Option<usize> {
        let vacated = self.vacant.peek().map(|Reverse(row)| *row);
        vacated.or_else(|| Some(self.occupied.len()).filter(|row| *row < self.capacity))
    }

    /// Put a sequence into the lowest vacant row.
    pub(super) fn occupy(&mut self, row: usize, state: Box<SequenceState>, handle: Weak<SequenceCell>) {
        if self.vacant.pop().is_none() {
            self.occupied.push(None);
        }
        self.in_order.push(row);
        self.by_serial.insert(state.serial, row);
        self.occupied[row] = Some(Row { state, handle });
    }

    pub(super) fn vacate(&mut self, row: usize) -> Result<Row> {
        self.get(row)?;
        let vacated = self.occupied[row].take().ok_or_else(|| Self::empty(row))?;
        self.by_serial.remove(&vacated.state.serial);
        self.in_order.retain(|other| *other != row);
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

    pub(super) fn state(&mut self, row: usize) -> Result<&mut SequenceState> {
        self.get(row)?;
        self.occupied[row].as_mut().map(|occupied| &mut *occupied.state).ok_or_else(|| Self::empty(row))
    }

    /// The state in a row that was chosen for a plan, under the same lock.
    pub(super) fn chosen(&mut self, row: usize) -> &mut SequenceState {
        let chosen = self.occupied.get_mut(row).and_then(Option::as_mut);
        &mut chosen.expect("a row that was chosen is occupied while the batch is locked").state
    }

    /// The row of a sequence that was in `row` once.
    pub(super) fn find(&self, row: usize, serial: u64) -> Option<usize> {
        let is_there = |row: &usize| self.get(*row).is_ok_and(|there| there.state.serial == serial);
        Some(row).filter(is_there).or_else(|| self.by_serial.get(&serial).copied())
    }

    /// Refuse rows that are empty or named twice.
    pub(super) fn check_distinct(&self, rows: &[usize]) -> Result<()> {
        let mut seen = vec![false; self.occupied.len()];
        for row in rows {
            self.get(*row)?;
            if std::mem::replace(&mut seen[*row], true) {
                return Err(Error::argument("rows", "distinct", format_args!("{rows:?}")));
            }
        }
        Ok(())
    }

    fn empty(row: usize) -> Error {
        Error::argument("row", "one that a sequence is in", format_args!("{row}, which is empty"))
    }
}
