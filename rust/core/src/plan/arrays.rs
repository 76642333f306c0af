//! What a plan tells kernels. The arrays are written once and then only read; the memory of a plan that
//! nobody looks at any more is used again, and of its block table only what changed is written.

use std::sync::{Arc, OnceLock};

use super::table_buffer::TableBuffer;
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
    width: usize,
    block_size: usize,
    max_query_len: usize,
    max_seq_len: usize,
    csr: OnceLock<Csr>,
}

/// One row as the plan took it: `tokens` from position `start` on, in `table`.
pub(crate) struct RowStep<'a> {
    pub(crate) row: usize,
    pub(crate) start: usize,
    pub(crate) tokens: &'a [i32],
    pub(crate) table: &'a Table,
    pub(crate) copy: Option<(BlockId, BlockId)>,
    pub(crate) samples: bool,
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

    /// The block table's cells, how many of a row count, and how far its rows lie apart; it is padded with
    /// the null block.
    pub fn block_table(&self) -> (&[i32], usize, usize) {
        (self.block_table.cells(), self.width, self.block_table.stride())
    }

    /// The same table in CSR form, made when first asked for.
    pub fn csr(&self) -> &Csr {
        self.csr.get_or_init(|| {
            let mut csr = Csr { indptr: Vec::with_capacity(self.rows.len() + 1), indices: Vec::new() };
            csr.indptr.push(0);
            for (index, seq_len) in self.seq_lens.iter().enumerate() {
                let pages = (*seq_len as usize).div_ceil(self.block_size);
                csr.indices.extend_from_slice(&self.block_table.row(index)[..pages]);
                csr.indptr.push(csr.indices.len() as i32);
            }
            csr
        })
    }

    /// Begin anew, for rows of up to `width` blocks.
    fn start(&mut self, num_rows: usize, width: usize, block_size: usize) {
        for numbers in [
            &mut self.rows,
            &mut self.token_ids,
            &mut self.query_start_loc,
            &mut self.seq_lens,
            &mut self.last_page_len,
            &mut self.logits_rows,
            &mut self.skipped,
            &mut self.never_fit,
        ] {
            numbers.clear();
        }
        for numbers in [&mut self.positions, &mut self.slot_mapping, &mut self.logits_indices] {
            numbers.clear();
        }
        self.copies.clear();
        self.table_updates.clear();
        self.query_start_loc.push(0);
        self.block_table.fit(num_rows, width);
        (self.width, self.block_size) = (width, block_size);
        (self.max_query_len, self.max_seq_len) = (0, 0);
        self.csr = OnceLock::new();
    }

    pub(crate) fn push_row(&mut self, step: &RowStep<'_>) {
        let (start, stop) = (step.start, step.start + step.tokens.len());
        self.block_table.set_row(self.rows.len(), step.table);
        self.rows.push(step.row as i32);
        self.token_ids.extend_from_slice(step.tokens);
        self.positions.extend(start as i64..stop as i64);
        self.slot_mapping.extend((start..stop).map(|position| step.table.slot(position)));
        self.query_start_loc.push(self.token_ids.len() as i32);
        self.seq_lens.push(stop as i32);
        self.last_page_len.push(((stop - 1) % self.block_size + 1) as i32);
        self.copies.extend(step.copy.map(|(source, target)| [source.as_i32(), target.as_i32()]));
        if step.samples {
            self.logits_rows.push(step.row as i32);
            self.logits_indices.push(self.token_ids.len() as i64 - 1);
        }
        self.max_query_len = self.max_query_len.max(step.tokens.len());
        self.max_seq_len = self.max_seq_len.max(stop);
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
    /// New arrays for rows of up to `width` blocks, filled by `fill`.
    pub(crate) fn write(
        &mut self,
        num_rows: usize,
        width: usize,
        block_size: usize,
        fill: impl FnOnce(&mut PlanArrays),
    ) -> Arc<PlanArrays> {
        let unused = self.kept.iter_mut().position(|arrays| Arc::get_mut(arrays).is_some());
        let mut arrays = unused.map_or_else(Arc::default, |index| self.kept.swap_remove(index));
        if let Some(arrays) = Arc::get_mut(&mut arrays) {
            arrays.start(num_rows, width, block_size);
            fill(arrays);
        }
        if self.kept.len() == MOST_KEPT {
            self.kept.swap_remove(0);
        }
        self.kept.push(Arc::clone(&arrays));
        arrays
    }
}
