//! Copies of tables that are kept up to date by writing what changed.

use super::arrays::Extent;
use crate::{
    error::{Error, Result},
    ids::BlockId,
    table::Table,
};

/// What a copy has seen of a table: with the same stamp, only blocks beyond `len` are news.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) stamp: u64,
    pub(crate) len: u32,
}

impl Seen {
    /// From which logical block on the copy may differ from `table`.
    fn first_news(self, table: &Table) -> usize {
        if self.stamp == table.stamp() { self.len as usize } else { 0 }
    }

    /// Whether it lacks at most the last block of what there is to see `now`.
    fn is_up_to_last(self, now: Self) -> bool {
        self.stamp == now.stamp && (self.len == now.len || self.len + 1 == now.len)
    }

    pub(crate) fn now(table: &Table) -> Self {
        Self { stamp: table.stamp(), len: table.blocks().len() as u32 }
    }
}

/// Memory of the caller's for a block table.
pub trait TableMemory: Send + Sync {
    /// All of it.
    fn cells(&self) -> &[i32];

    /// The same, to be written.
    fn cells_mut(&mut self) -> &mut [i32];
}

impl TableMemory for Vec<i32> {
    fn cells(&self) -> &[i32] {
        self
    }

    fn cells_mut(&mut self) -> &mut [i32] {
        self
    }
}

enum Cells {
    Own(Vec<i32>),
    Lent(Box<dyn TableMemory>),
}

/// A rectangular table, each row padded with the null block.
pub(crate) struct TableBuffer {
    stride: usize,
    cells: Cells,
    seen: Vec<Seen>,
}

impl Default for TableBuffer {
    fn default() -> Self {
        Self { stride: 0, cells: Cells::Own(Vec::new()), seen: Vec::new() }
    }
}

/// A block table in the caller's memory, in which each plan that is made for it writes what changed.
pub struct OutTable {
    pub(crate) buffer: TableBuffer,
    pub(crate) extent: Extent,
}

impl OutTable {
    /// A table of `num_rows` rows of `width` blocks, for plans of up to `num_tokens` tokens. `memory` has to
    /// have a cell for each; they become null.
    pub fn new(
        mut memory: Box<dyn TableMemory>,
        num_rows: usize,
        width: usize,
        num_tokens: usize,
    ) -> Result<Self> {
        let (came, needed) = (memory.cells().len(), num_rows.saturating_mul(width));
        if came < needed {
            return Err(Error::argument("memory", format_args!("of {needed} cells at least"), came));
        }
        memory.cells_mut().fill(BlockId::NULL.as_i32());
        let seen = vec![Seen::default(); num_rows];
        let buffer = TableBuffer { stride: width, cells: Cells::Lent(memory), seen };
        Ok(Self { buffer, extent: Extent { num_rows, num_tokens, width } })
    }

    /// Cells of a row.
    pub fn width(&self) -> usize {
        self.extent.width
    }

    /// All cells.
    pub fn cells(&self) -> &[i32] {
        self.buffer.cells()
    }

    /// Rows from `num_rows` on are padding.
    pub(crate) fn clear_from(&mut self, num_rows: usize) {
        let stride = self.buffer.stride;
        for index in num_rows..self.extent.num_rows {
            let len = std::mem::take(&mut self.buffer.seen[index]).len as usize;
            self.buffer.cells_mut()[index * stride..][..len].fill(BlockId::NULL.as_i32());
        }
    }

    /// Others have written into the memory: the next plan writes all of it.
    pub fn forget(&mut self) {
        self.buffer.seen.fill(Seen::default());
        self.buffer.cells_mut().fill(BlockId::NULL.as_i32());
    }
}

impl TableBuffer {
    pub(super) fn cells(&self) -> &[i32] {
        match &self.cells {
            Cells::Own(cells) => cells,
            Cells::Lent(memory) => memory.cells(),
        }
    }

    fn cells_mut(&mut self) -> &mut [i32] {
        match &mut self.cells {
            Cells::Own(cells) => cells,
            Cells::Lent(memory) => memory.cells_mut(),
        }
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Make room; what was there is kept if it fits, and forgotten otherwise.
    pub(super) fn fit(&mut self, num_rows: usize, width: usize) {
        if num_rows > self.seen.len() || width > self.stride {
            let num_rows = num_rows.max(self.seen.len()).next_power_of_two();
            self.stride = width.max(self.stride).next_power_of_two();
            self.cells = Cells::Own(vec![BlockId::NULL.as_i32(); num_rows * self.stride]);
            self.seen = vec![Seen::default(); num_rows];
        }
    }

    /// What some rows have seen.
    pub(super) fn seen_from(&self, index: usize, count: usize) -> &[Seen] {
        &self.seen[index..][..count]
    }

    /// Write the last of a table's blocks, if no other is news; false if one is, and nothing was written.
    pub(super) fn append_to_row(&mut self, index: usize, now: Seen, block: BlockId) -> bool {
        let can = self.seen[index].is_up_to_last(now);
        if can {
            let cell = index * self.stride + now.len as usize - 1;
            self.cells_mut()[cell] = block.as_i32();
            self.seen[index] = now;
        }
        can
    }

    /// Invariant: cells beyond what a row has seen are null.
    pub(super) fn set_row(&mut self, index: usize, table: &Table) {
        let blocks = table.blocks();
        let (seen, stride) = (self.seen[index], self.stride);
        let cells = &mut self.cells_mut()[index * stride..][..stride];
        let first = seen.first_news(table);
        for (cell, block) in cells[first..].iter_mut().zip(&blocks[first..]) {
            *cell = block.as_i32();
        }
        if blocks.len() < seen.len as usize {
            cells[blocks.len()..seen.len as usize].fill(BlockId::NULL.as_i32());
        }
        self.seen[index] = Seen::now(table);
    }
}

/// What a batch's plans have told so far of each row's table; every cell begins as the null block.
#[derive(Default)]
pub(crate) struct ToldTables {
    rows: Vec<(Seen, Vec<i32>)>,
}

impl ToldTables {
    /// The same as `tell` for a table of which only the last block is news, if at all; false if another one
    /// is, and nothing was told.
    pub(crate) fn tell_last(
        &mut self,
        row: usize,
        now: Seen,
        block: BlockId,
        updates: &mut Vec<[i32; 3]>,
    ) -> bool {
        let Some((seen, told)) = self.rows.get_mut(row).filter(|(seen, _)| seen.is_up_to_last(now)) else {
            return false;
        };
        let index = now.len as usize - 1;
        if told.len() == index {
            told.push(BlockId::NULL.as_i32());
        }
        if told[index] != block.as_i32() {
            told[index] = block.as_i32();
            updates.push([row as i32, index as i32, block.as_i32()]);
        }
        *seen = now;
        true
    }

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
