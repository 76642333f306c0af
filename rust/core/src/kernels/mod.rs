//! Kernels that read and write paged K and V through a plan's arrays: [`write()`], [`copy_blocks`], [`attend`].
//!
//! They know nothing of pools and sequences. Every number that comes in (block ids, slots, lengths) is held
//! against the views before any memory is touched, and a call that fails has changed nothing.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod buffer;
mod chunk;
mod copy;
mod element;
mod error;
mod job;
mod output;
mod read;
mod schedule;
mod scratch;
mod simd;
#[cfg(test)]
mod tests;
mod thin;
mod threads;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod vectors;
mod view;
mod wide;
mod write;

pub use attention::{Scoring, Step, attend};
pub use copy::copy_blocks;
pub use element::{Element, Format};
pub use error::KernelError;
pub use job::cpu_capabilities;
pub use read::read;
pub use threads::{OpenMpParallel, num_threads, set_num_threads, use_open_mp, with_at_most};
pub use view::{PagedView, PagedViewMut, TokenView};
pub use write::write;
