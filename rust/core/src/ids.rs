//! Block ids and the arithmetic of blocks.

use crate::error::{Error, Result};

/// The most blocks that a pool can have: ids are exported as `int32`, and id 0 is the null block.
pub const MAX_BLOCKS: usize = i32::MAX as usize - 1;

/// The place that a token holds whose id is not known yet, as it reads in exported arrays.
pub const UNKNOWN_TOKEN: i32 = -1;

/// One physical block: room for `block_size` tokens' K and V, of every layer. The default is the null block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(u32);

impl BlockId {
    /// Never handed out and never counted; padding cells of a block table point at it, so that every
    /// exported id is a safe address.
    pub const NULL: Self = Self(0);

    pub(crate) const fn new(id: u32) -> Self {
        Self(id)
    }

    /// The id as it is exported to kernels.
    #[must_use]
    pub const fn as_i32(self) -> i32 {
        self.0 as i32
    }

    pub(crate) const fn as_u32(self) -> u32 {
        self.0
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    /// Whether this is the null block.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

/// How many blocks `num_tokens` take, and how many slots of the last one stay empty.
///
/// `T` tokens need `ceil(T / block_size)` blocks; only the last has empty slots, 0 to `block_size - 1`.
pub fn block_layout(num_tokens: usize, block_size: usize) -> Result<(usize, usize)> {
    if block_size == 0 {
        return Err(Error::argument("block_size", "at least 1", 0));
    }
    let blocks = num_tokens.div_ceil(block_size);
    let slots = blocks.checked_mul(block_size).ok_or_else(|| {
        Error::argument("num_tokens", "such that the slots can be counted in 64 bits", num_tokens)
    })?;
    Ok((blocks, slots - num_tokens))
}

/// Refuse what is no token id.
pub(crate) fn check_tokens(name: &str, tokens: &[i32]) -> Result<()> {
    match tokens.iter().find(|token| **token < 0) {
        Some(token) => Err(Error::argument(name, "token ids from 0 to 2147483647", token)),
        None => Ok(()),
    }
}
