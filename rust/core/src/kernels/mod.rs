//! Kernels that read and write paged K and V through a plan's arrays: [`write()`], [`copy_blocks`], [`attend`].
//!
//! They know nothing of pools and sequences. Every number that comes in (block ids, slots, lengths) is held
//! against the views before any memory is touched, and a call that fails has changed nothing.

mod attention;
mod copy;
mod element;
mod error;
mod job;
mod simd;
#[cfg(test)]
mod tests;
mod threads;
mod tile;
mod view;
mod write;

pub use attention::{Scoring, Step, attend};
pub use copy::copy_blocks;
pub use element::{Element, Format};
pub use error::KernelError;
pub use view::{PagedView, PagedViewMut, TokenView};
pub use write::write;
