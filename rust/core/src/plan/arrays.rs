//! What a plan tells kernels. The arrays are written once and then only read; the memory of a plan that
//! nobody looks at any more is used again, and of its block table only what changed is written.

use std::sync::{Arc, OnceLock};

use super::table_buffer::{OutTable, Seen, TableBuffer, ToldTables};
use crate::{ids::BlockId, table::Table};

/// The page table in compressed sparse rows, as `FlashInfer` reads it.
#[derive(Default)]
pub struct Csr {
    /// `int32[n + 1]`: where each row's pages begin in `indices`.
    pub indptr: Vec<i32>,
    /// The block ids of all rows, one row after the other.
    pub indices: Vec<i32>,
}

/// The arrays of one plan of `n` rows and `T` tokens.
#[derive(Default)]
pub struct PlanArrays {
    rows: Vec<i32>,
    token_ids: Vec<i32>,
    positions: Vec<i64>,
    query_start_loc: Vec<i32>,
    seq_lens: Vec<i32>,
    slot_mapping: Vec<i64>,
    last_page_len: Vec<i32>,
    copies: Vec<[i32; 2]>,
    logits_rows: Vec<i32>,
    logits_indices: Vec<i64>,
    pub(crate) table_updates: Vec<[i32; 3]>,
    pub(crate) skipped: Vec<i32>,
    pub(crate) never_fit: Vec<i32>,
    block_table: TableBuffer,
    has_lent_table: bool,
    num_logits: usize,
    width: usize,
    block_size: usize,
    max_query_len: usize,
    max_seq_len: usize,
    /// Stands for the rows, if they are of one token each: with the same one they are the same, in the same
    /// order.
    roster: Option<u64>,
    /// What follows from the roster is there from the plan before.
    has_rows: bool,
    csr: OnceLock<Csr>,
}

/// How large the arrays of a plan are.
#[derive(Clone, Copy, Default)]
pub(crate) struct Extent {
    pub(crate) num_rows: usize,
    pub(crate) num_tokens: usize,
    /// Blocks of the longest row.
    pub(crate) width: usize,
}

/// What is written of a row of one token while its sequence is looked at.
pub(crate) struct TokenPlace<'a> {
    pub(crate) token_id: &'a mut i32,
    pub(crate) seq_len: &'a mut i32,
    pub(crate) last_page_len: &'a mut i32,
    pub(crate) slot: &'a mut i64,
    /// What the block table has of the row's table.
    pub(crate) seen: &'a Seen,
}

/// Where in the arrays a row goes: its number among the rows, and that of its first token.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cursor {
    index: usize,
    token: usize,
}

impl Cursor {
    /// The place of the row that is `n` rows of one token each behind.
    pub(crate) fn behind(self, n: usize) -> Self {
        Self { index: self.index + n, token: self.token + n }
    }
}

macro_rules! array_getters {
    ($($(#[$doc:meta])* $name:ident: $item:ty),* $(,)?) => {
        $($(#[$doc])* pub fn $name(&self) -> &[$item] { &self.$name })*
    };
}

impl PlanArrays {
    array_getters! {
        /// The rows that have tokens in this step, `[n]`.
        rows: i32,
        /// The input ids, `[T]`; -1 where the id is unknown.
        token_ids: i32,
        /// Positions of the tokens in their sequences, `[T]`.
        positions: i64,
        /// Where each row's tokens begin, `[n + 1]`.
        query_start_loc: i32,
        /// The KV length of each row, this step's tokens included, `[n]`.
        seq_lens: i32,
        /// Where each token's K and V go: block * `block_size` + offset, `[T]`.
        slot_mapping: i64,
        /// Tokens in the last page of each row, 1 to `block_size`, `[n]`.
        last_page_len: i32,
        /// Source and target of the blocks to copy before the step's writes, `[c]`.
        copies: [i32; 2],
        /// Rows with nothing left to plan, which get a next token, `[m]`.
        logits_rows: i32,
        /// Where, among the T tokens, the logits of those rows are, `[m]`.
        logits_indices: i64,
        /// Row, logical block and block id of the cells that differ from what earlier plans told, `[u]`.
        table_updates: [i32; 3],
        /// Rows refused for want of blocks.
        skipped: i32,
        /// Those of them whose share of this plan exceeds the whole pool.
        never_fit: i32,
    }

    /// T.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// The most tokens of a row.
    pub fn max_query_len(&self) -> usize {
        self.max_query_len
    }

    /// The largest KV length.
    pub fn max_seq_len(&self) -> usize {
        self.max_seq_len
    }

    /// Whether the block table was written into memory of the caller's instead.
    pub fn has_lent_table(&self) -> bool {
        self.has_lent_table
    }

    /// The block table's cells, how many of a row count, and how far its rows lie apart; it is padded with
    /// the null block. Not to be used of arrays with a lent table.
    pub fn block_table(&self) -> (&[i32], usize, usize) {
        (self.block_table.cells(), self.width, self.block_table.stride())
    }

    /// The same table in CSR form, made when first asked for.
    pub fn csr(&self) -> &Csr {
        let (cells, _, stride) = self.block_table();
        self.csr_of(cells, stride)
    }

    /// The same, if the block table was lent: of cells in which rows lie `stride` apart. What is made first,
    /// stays.
    pub fn csr_of(&self, cells: &[i32], stride: usize) -> &Csr {
        self.csr.get_or_init(|| {
            let pages = |seq_len: i32| (seq_len as usize).div_ceil(self.block_size);
            let total = self.seq_lens.iter().map(|seq_len| pages(*seq_len)).sum();
            let mut csr =
                Csr { indptr: Vec::with_capacity(self.rows.len() + 1), indices: Vec::with_capacity(total) };
            csr.indptr.push(0);
            for (index, seq_len) in self.seq_lens.iter().enumerate() {
                csr.indices.extend_from_slice(&cells[index * stride..][..pages(*seq_len)]);
                csr.indptr.push(csr.indices.len() as i32);
            }
            csr
        })
    }

    /// Begin anew. What is there is written over, so that arrays of the same size need no clearing.
    fn start(&mut self, extent: Extent, roster: Option<u64>, block_size: usize) {
        let Extent { num_rows, num_tokens, width } = extent;
        for numbers in [&mut self.rows, &mut self.seq_lens, &mut self.last_page_len, &mut self.logits_rows] {
            numbers.resize(num_rows, 0);
        }
        self.query_start_loc.resize(num_rows + 1, 0);
        self.logits_indices.resize(num_rows, 0);
        self.token_ids.resize(num_tokens, 0);
        self.positions.resize(num_tokens, 0);
        self.slot_mapping.resize(num_tokens, 0);
        self.copies.clear();
        self.table_updates.clear();
        self.skipped.clear();
        self.never_fit.clear();
        (self.num_logits, self.width, self.block_size) = (0, width, block_size);
        (self.max_query_len, self.max_seq_len) = (0, 0);
        self.has_rows = roster.is_some() && roster == self.roster;
        self.roster = roster;
        self.csr = OnceLock::new();
    }

    fn finish(&mut self) {
        self.logits_rows.truncate(self.num_logits);
        self.logits_indices.truncate(self.num_logits);
    }

    /// The places of some rows of one token each, which all sample.
    pub(crate) fn token_rows(
        &mut self,
        at: Cursor,
        rows: impl ExactSizeIterator<Item = u32>,
    ) -> impl Iterator<Item = TokenPlace<'_>> {
        let Cursor { index, token } = at;
        let (count, logits) = (rows.len(), self.num_logits);
        self.num_logits += count;
        self.max_query_len = self.max_query_len.max(usize::from(count > 0));
        if !self.has_rows {
            let places = self.rows[index..][..count].iter_mut().zip(&mut self.logits_rows[logits..][..count]);
            let tokens = self.query_start_loc[index + 1..].iter_mut().zip(&mut self.logits_indices[logits..]);
            for (n, ((row, places), (query_end, logits_index))) in rows.zip(places).zip(tokens).enumerate() {
                (*places.0, *places.1) = (row as i32, row as i32);
                (*query_end, *logits_index) = ((token + n + 1) as i32, (token + n) as i64);
            }
        }
        let seen = self.block_table.seen_from(index, count);
        let lengths = self.seq_lens[index..].iter_mut().zip(&mut self.last_page_len[index..]);
        let tokens = self.token_ids[token..].iter_mut().zip(&mut self.slot_mapping[token..]);
        seen.iter().zip(lengths).zip(tokens).map(|((seen, (seq_len, last_page_len)), (token_id, slot))| {
            TokenPlace { token_id, seq_len, last_page_len, slot, seen }
        })
    }

    /// The rest of some rows of one token each, when their places are filled.
    pub(crate) fn finish_token_rows(&mut self, at: &mut Cursor, count: usize) {
        let seq_lens = &self.seq_lens[at.index..][..count];
        for (position, seq_len) in self.positions[at.token..][..count].iter_mut().zip(seq_lens) {
            *position = i64::from(*seq_len) - 1;
        }
        let longest = seq_lens.iter().copied().max().unwrap_or(0);
        self.max_seq_len = self.max_seq_len.max(longest as usize);
        *at = at.behind(count);
    }

    /// A row of some tokens from position `start` on, for which `table` has room.
    pub(crate) fn set_tokens(
        &mut self,
        at: &mut Cursor,
        row: usize,
        start: usize,
        tokens: &[i32],
        table: &Table,
        samples: bool,
    ) {
        let stop = start + tokens.len();
        let places = at.token..at.token + tokens.len();
        self.token_ids[places.clone()].copy_from_slice(tokens);
        for (place, position) in self.positions[places.clone()].iter_mut().zip(start as i64..) {
            *place = position;
        }
        let mut slots = &mut self.slot_mapping[places];
        let mut offset = start % self.block_size;
        for block in &table.blocks()[start / self.block_size..] {
            let (here, behind) = slots.split_at_mut(slots.len().min(self.block_size - offset));
            let first = i64::from(block.as_i32()) * self.block_size as i64 + offset as i64;
            for (place, slot) in here.iter_mut().zip(first..) {
                *place = slot;
            }
            (slots, offset) = (behind, 0);
        }
        self.set_row(at, row, tokens.len(), stop, (stop - 1) % self.block_size + 1, samples);
    }

    fn set_row(
        &mut self,
        at: &mut Cursor,
        row: usize,
        num_tokens: usize,
        seq_len: usize,
        last_page_len: usize,
        samples: bool,
    ) {
        let Cursor { index, token } = *at;
        *at = Cursor { index: index + 1, token: token + num_tokens };
        self.rows[index] = row as i32;
        self.query_start_loc[index + 1] = at.token as i32;
        self.seq_lens[index] = seq_len as i32;
        self.last_page_len[index] = last_page_len as i32;
        if samples {
            self.logits_rows[self.num_logits] = row as i32;
            self.logits_indices[self.num_logits] = at.token as i64 - 1;
            self.num_logits += 1;
        }
        self.max_query_len = self.max_query_len.max(num_tokens);
        self.max_seq_len = self.max_seq_len.max(seq_len);
    }

    /// Write what the block table's row at the cursor does not have yet, and tell what was not told yet.
    pub(crate) fn set_table(&mut self, at: Cursor, row: usize, table: &Table, told: &mut ToldTables) {
        self.block_table.set_row(at.index, table);
        told.tell(row, table, &mut self.table_updates);
    }

    /// The same for a table of which only `block`, the last one, is news, if at all; false if there is more.
    pub(crate) fn append_block(
        &mut self,
        at: Cursor,
        row: usize,
        seen: Seen,
        block: BlockId,
        told: &mut ToldTables,
    ) -> bool {
        told.tell_last(row, seen, block, &mut self.table_updates)
            && self.block_table.append_to_row(at.index, seen, block)
    }

    pub(crate) fn push_copy(&mut self, (source, target): (BlockId, BlockId)) {
        self.copies.push([source.as_i32(), target.as_i32()]);
    }
}

/// Keeps the arrays of recent plans, to write into those again that nobody holds.
#[derive(Default)]
pub(crate) struct Recycler {
    kept: Vec<Arc<PlanArrays>>,
}

/// More than this many plans that are held at once are not kept an eye on.
const MOST_KEPT: usize = 8;

impl Recycler {
    /// New arrays, filled by `fill`, which has to write all of them.
    pub(crate) fn write(
        &mut self,
        extent: Extent,
        roster: Option<u64>,
        block_size: usize,
        out: Option<&mut OutTable>,
        fill: impl FnOnce(&mut PlanArrays),
    ) -> Arc<PlanArrays> {
        let unused = self.kept.iter_mut().position(|arrays| Arc::get_mut(arrays).is_some());
        let mut arrays = unused.map_or_else(Arc::default, |index| self.kept.swap_remove(index));
        if let Some(arrays) = Arc::get_mut(&mut arrays) {
            arrays.start(extent, roster, block_size);
            arrays.has_lent_table = out.is_some();
            if let Some(out) = out {
                std::mem::swap(&mut arrays.block_table, &mut out.buffer);
                fill(arrays);
                std::mem::swap(&mut arrays.block_table, &mut out.buffer);
                out.clear_from(extent.num_rows);
            } else {
                arrays.block_table.fit(extent.num_rows, extent.width);
                fill(arrays);
            }
            arrays.finish();
        }
        if self.kept.len() == MOST_KEPT {
            self.kept.swap_remove(0);
        }
        self.kept.push(Arc::clone(&arrays));
        arrays
    }
}
