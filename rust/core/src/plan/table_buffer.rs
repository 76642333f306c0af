//! Copies of tables that are kept up to date by writing what changed.

use crate::{ids::BlockId, table::Table};

/// What a copy has seen of a table: with the same stamp, only blocks beyond `len` are news.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    stamp: u64,
    pub(crate) len: u32,
}

impl Seen {
    /// From which logical block on the copy may differ from `table`.
    fn first_news(self, table: &Table) -> usize {
        if self.stamp == table.stamp() { self.len as usize } else { 0 }
    }

    pub(crate) fn now(table: &Table) -> Self {
        Self { stamp: table.stamp(), len: table.blocks().len() as u32 }
    }
}

/// A rectangular table, each row padded with the null block.
#[derive(Default)]
pub(super) struct TableBuffer {
    stride: usize,
    cells: Vec<i32>,
    seen: Vec<Seen>,
}

impl TableBuffer {
    pub(super) fn cells(&self) -> &[i32] {
        &self.cells
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn row(&self, index: usize) -> &[i32] {
        &self.cells[index * self.stride..][..self.stride]
    }

    /// Make room; what was there is kept if it fits, and forgotten otherwise.
    pub(super) fn fit(&mut self, num_rows: usize, width: usize) {
        if num_rows > self.seen.len() || width > self.stride {
            let num_rows = num_rows.max(self.seen.len()).next_power_of_two();
            self.stride = width.max(self.stride).next_power_of_two();
            self.cells = vec![BlockId::NULL.as_i32(); num_rows * self.stride];
            self.seen = vec![Seen::default(); num_rows];
        }
    }

    /// What some rows have seen.
    pub(super) fn seen_from(&self, index: usize, count: usize) -> &[Seen] {
        &self.seen[index..][..count]
    }

    /// Invariant: cells beyond what a row has seen are null.
    pub(super) fn set_row(&mut self, index: usize, table: &Table) {
        let blocks = table.blocks();
        let seen = &mut self.seen[index];
        let cells = &mut self.cells[index * self.stride..][..self.stride];
        let first = seen.first_news(table);
        for (cell, block) in cells[first..].iter_mut().zip(&blocks[first..]) {
            *cell = block.as_i32();
        }
        if blocks.len() < seen.len as usize {
            cells[blocks.len()..seen.len as usize].fill(BlockId::NULL.as_i32());
        }
        *seen = Seen::now(table);
    }
}

/// What a batch's plans have told so far of each row's table; every cell begins as the null block.
#[derive(Default)]
pub(crate) struct ToldTables {
    rows: Vec<(Seen, Vec<i32>)>,
}

impl ToldTables {
    /// Append (row, logical block, block id) for the cells that were not told yet.
    pub(crate) fn tell(&mut self, row: usize, table: &Table, updates: &mut Vec<[i32; 3]>) {
        if row >= self.rows.len() {
            self.rows.resize_with(row + 1, Default::default);
        }
        let (seen, told) = &mut self.rows[row];
        let blocks = table.blocks();
        let first = seen.first_news(table);
        if told.len() < blocks.len() {
            told.resize(blocks.len(), BlockId::NULL.as_i32());
        }
        for (index, (cell, block)) in told.iter_mut().zip(blocks).enumerate().skip(first) {
            if *cell != block.as_i32() {
                *cell = block.as_i32();
                updates.push([row as i32, index as i32, *cell]);
            }
        }
        *seen = Seen::now(table);
    }
}
