//! What can go wrong. A call that returns an error has changed nothing.

use std::fmt::Display;

/// The result of a call that may be refused.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Fewer blocks are free than the call needs.
    #[error("{needed} blocks needed, {free} free, {quarantined} quarantined{}", if *ever_fits { "" } else { "; it can never fit" })]
    OutOfBlocks {
        /// Free blocks that the call needs.
        needed: usize,
        /// Blocks that were free, blank or idle.
        free: usize,
        /// Blocks that come free when the plans in flight end.
        quarantined: usize,
        /// False if the call would fail even with the pool to itself.
        ever_fits: bool,
    },
    /// A block id that is out of range, or not referenced as often as the call assumes.
    #[error("{0}")]
    InvalidBlock(String),
    /// A table, sequence or plan was used after its end.
    #[error("the {0}")]
    StaleHandle(&'static str),
    /// The call would change what a plan in flight relies on, or would end plans out of order.
    #[error("{0}")]
    PlanInFlight(&'static str),
    /// All rows of the batch are taken.
    #[error("all {max_sequences} rows of the batch are taken")]
    BatchFull {
        /// Rows that the batch has.
        max_sequences: usize,
    },
    /// Two threads used one table, sequence, batch or plan at once, or two sources one pool's events.
    #[error("the {0}")]
    ConcurrentUse(&'static str),
    /// More references to one block than can be counted.
    #[error("block {} has {max} references already, the most that can be counted", block.as_i32())]
    RefCountOverflow {
        /// The block.
        block: crate::BlockId,
        /// The most references that one block can have.
        max: u32,
    },
    /// The audit found two records of one fact that disagree.
    #[error("it does not hold that {0}")]
    CorruptPool(String),
    /// An argument that the machine has not enough memory for.
    #[error("{name} must be such that memory can be had for it, not {came}: that takes {bytes} bytes")]
    OutOfMemory {
        /// The argument.
        name: &'static str,
        /// What came.
        came: usize,
        /// What it takes, K and V not counted.
        bytes: usize,
    },
    /// An argument that is not allowed; the text names it, what is allowed, and what came.
    #[error("{0}")]
    Argument(String),
    /// A position outside of a table.
    #[error("{0}")]
    Position(String),
}

impl Error {
    pub(crate) fn argument(name: &str, allowed: impl Display, came: impl Display) -> Self {
        Self::Argument(format!("{name} must be {allowed}, not {came}"))
    }
}

/// Refuse a number that is not within `minimum..=maximum`, by the name of the argument.
pub(crate) fn check_range(name: &str, value: usize, minimum: usize, maximum: usize) -> Result<()> {
    if (minimum..=maximum).contains(&value) {
        Ok(())
    } else {
        Err(Error::argument(name, format_args!("between {minimum} and {maximum}"), value))
    }
}
