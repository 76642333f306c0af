//! Which sequence is in which row, and in which order they came.

use std::{cmp::Reverse, collections::BinaryHeap, sync::Weak};

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
    /// By row, as far as rows were ever taken.
    occupied: Vec<Option<Row>>,
    in_order: Vec<usize>,
    /// Rows that were taken once.
    vacant: BinaryHeap<Reverse<usize>>,
}

impl Rows {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, occupied: Vec::new(), in_order: Vec::new(), vacant: BinaryHeap::new() }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn in_order(&self) -> &[usize] {
        &self.in_order
    }

    pub(super) fn lowest_vacant(&self) -> Option<usize> {
        let untouched = self.occupied.len();
        let vacant = self.vacant.peek().map(|Reverse(row)| *row);
        vacant.or((untouched < self.capacity).then_some(untouched))
    }

    /// Put a sequence into the lowest vacant row.
    pub(super) fn occupy(&mut self, row: usize, state: Box<SequenceState>, handle: Weak<SequenceCell>) {
        let occupied = Some(Row { state, handle });
        if row == self.occupied.len() {
            self.occupied.push(occupied);
        } else {
            self.vacant.pop();
            self.occupied[row] = occupied;
        }
        self.in_order.push(row);
    }

    pub(super) fn vacate(&mut self, row: usize) -> Result<Row> {
        self.get(row)?;
        let vacated = self.occupied[row].take();
        self.in_order.retain(|other| *other != row);
        self.vacant.push(Reverse(row));
        vacated.ok_or_else(|| Self::empty(row))
    }

    pub(super) fn get(&self, row: usize) -> Result<&Row> {
        match self.occupied.get(row) {
            Some(Some(row)) => Ok(row),
            Some(None) => Err(Self::empty(row)),
            None => {
                Err(Error::argument("row", format_args!("between 0 and {}", self.occupied.len() - 1), row))
            }
        }
    }

    pub(super) fn state(&mut self, row: usize) -> Result<&mut SequenceState> {
        self.get(row)?;
        self.occupied[row].as_mut().map(|row| &mut *row.state).ok_or_else(|| Self::empty(row))
    }

    /// The row of a sequence that was in `row` once.
    pub(super) fn find(&self, row: usize, serial: u64) -> Option<usize> {
        let is_there = |row: &usize| self.get(*row).is_ok_and(|row| row.state.serial == serial);
        Some(row).filter(is_there).or_else(|| self.in_order.iter().copied().find(is_there))
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
