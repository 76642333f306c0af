//! What can be wrong with a kernel's arguments.

use thiserror::Error;

/// A kernel refused its arguments; nothing has been read or written.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Two arguments disagree about a size.
    #[error("{argument} must have {expected} as its {axis}, not {found}")]
    Size {
        /// The argument's name.
        argument: &'static str,
        /// Which of its sizes.
        axis: &'static str,
        /// What the other arguments imply.
        expected: usize,
        /// What came.
        found: usize,
    },
    /// The query heads cannot be dealt out evenly to the KV heads.
    #[error("q must have a multiple of {num_kv_heads} (num_kv_heads) as its num_heads, not {num_heads}")]
    HeadGroups {
        /// Query heads.
        num_heads: usize,
        /// KV heads.
        num_kv_heads: usize,
    },
    /// A number that steers the scores is not one.
    #[error("{argument} must be {allowed}, not {found}")]
    Parameter {
        /// The argument's name.
        argument: &'static str,
        /// Which numbers are allowed.
        allowed: &'static str,
        /// What came.
        found: f64,
    },
    /// Offsets of queries that do not start at zero, fall, or miss the end.
    #[error("query_start_loc[{index}] must be {allowed}, not {found}")]
    QueryStart {
        /// Place in the array.
        index: usize,
        /// What it may be.
        allowed: String,
        /// What came.
        found: i32,
    },
    /// A sequence too short for its queries, or too long for its row of the block table.
    #[error(
        "seq_lens[{row}] must be 0 or between {minimum} (its queries) and {maximum} (its row of block_table), not {found}"
    )]
    SequenceLength {
        /// Row of the plan.
        row: usize,
        /// Its number of queries.
        minimum: usize,
        /// The slots of its row of the block table.
        maximum: usize,
        /// What came.
        found: i32,
    },
    /// A visible cell of the block table names no block of the storage.
    #[error("block_table[{row}, {index}] must be between 1 and {maximum}, not {found}")]
    Block {
        /// Row of the plan.
        row: usize,
        /// Logical block.
        index: usize,
        /// The last physical block.
        maximum: usize,
        /// What came.
        found: i32,
    },
    /// A visible cell of the block table is the null block.
    #[error(
        "block_table[{row}, {index}] is the null block: positions {start} to {stop} were discarded, \
         but queries of this row see keys from position {first_visible} on; pass the sliding_window that the model has, or keep the blocks"
    )]
    Discarded {
        /// Row of the plan.
        row: usize,
        /// Logical block.
        index: usize,
        /// Its first position.
        start: usize,
        /// The last of its positions.
        stop: usize,
        /// The first position that some query of the row sees.
        first_visible: usize,
    },
    /// A slot behind the end of the storage.
    #[error("slot_mapping[{token}] must be below {limit} (negative to skip the token), not {found}")]
    Slot {
        /// Token of the step.
        token: usize,
        /// Slots of the storage.
        limit: usize,
        /// What came.
        found: i64,
    },
    /// A copy from or to something that is no block.
    #[error("copies[{pair}] must name blocks between 1 and {maximum}, not {found}")]
    CopyBlock {
        /// Row of the array.
        pair: usize,
        /// The last physical block.
        maximum: usize,
        /// What came.
        found: i32,
    },
    /// Two copies into one block.
    #[error("copies[{pair}] must not have the destination {block}: an earlier copy has it")]
    CopyTwice {
        /// Row of the array.
        pair: usize,
        /// The destination.
        block: i32,
    },
}

impl KernelError {
    /// Whether it is an index outside a range, as opposed to a value that means nothing.
    pub fn is_out_of_range(&self) -> bool {
        matches!(self, Self::Block { .. } | Self::Slot { .. } | Self::CopyBlock { .. })
    }
}

/// `Ok` if the sizes agree.
pub(crate) fn check_size(
    argument: &'static str,
    axis: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), KernelError> {
    if expected == found {
        return Ok(());
    }
    Err(KernelError::Size { argument, axis, expected, found })
}
