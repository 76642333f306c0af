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
    most: usize,
    /// Those that have ever been taken, so that a high limit costs nothing.
    rows: Vec<Option<Row>>,
    in_order: Vec<usize>,
    /// Of `rows`.
    vacant: BinaryHeap<Reverse<usize>>,
}

impl Rows {
    pub(super) fn new(max_sequences: usize) -> Self {
        Self { most: max_sequences, rows: Vec::new(), in_order: Vec::new(), vacant: BinaryHeap::new() }
    }

    /// The most rows that were taken at once.
    pub(super) fn capacity(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn in_order(&self) -> &[usize] {
        &self.in_order
    }

    pub(super) fn lowest_vacant(&self) -> Option<usize> {
        let vacated = self.vacant.peek().map(|Reverse(row)| *row);
        vacated.or_else(|| Some(self.rows.len()).filter(|row| *row < self.most))
    }

    /// Put a sequence into the lowest vacant row.
    pub(super) fn occupy(&mut self, row: usize, state: Box<SequenceState>, handle: Weak<SequenceCell>) {
        self.in_order.push(row);
        if self.vacant.pop().is_none() {
            self.rows.push(None);
        }
        self.rows[row] = Some(Row { state, handle });
    }

    pub(super) fn vacate(&mut self, row: usize) -> Result<Row> {
        self.get(row)?;
        let vacated = self.rows[row].take();
        self.in_order.retain(|other| *other != row);
        self.vacant.push(Reverse(row));
        vacated.ok_or_else(|| Self::empty(row))
    }

    pub(super) fn get(&self, row: usize) -> Result<&Row> {
        match self.rows.get(row) {
            Some(Some(occupied)) => Ok(occupied),
            None if row >= self.most => {
                Err(Error::argument("row", format_args!("between 0 and {}", self.most - 1), row))
            }
            Some(None) | None => Err(Self::empty(row)),
        }
    }

    pub(super) fn state(&mut self, row: usize) -> Result<&mut SequenceState> {
        self.get(row)?;
        self.rows[row].as_mut().map(|occupied| &mut *occupied.state).ok_or_else(|| Self::empty(row))
    }

    /// The row of a sequence that was in `row` once.
    pub(super) fn find(&self, row: usize, serial: u64) -> Option<usize> {
        let is_there =
            |row: &usize| self.rows[*row].as_ref().is_some_and(|occupied| occupied.state.serial == serial);
        Some(row).filter(is_there).or_else(|| self.in_order.iter().copied().find(is_there))
    }

    /// Refuse rows that are empty or named twice.
    pub(super) fn check_distinct(&self, rows: &[usize]) -> Result<()> {
        let mut seen = vec![false; self.rows.len()];
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
