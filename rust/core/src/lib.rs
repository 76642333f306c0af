//! The memory manager of the KV cache: PagedAttention's bookkeeping for people who write their own serving loop.
//!
//! Data flows one way: [ids](BlockId) -> [pool](BlockPool) -> [table](BlockTable) -> [sequence](Sequence) ->
//! [batch](Batch) -> [plan](Plan) -> [kernels]. A layer knows the one below it and nothing above,
//! but for a plan's handle, which ends in the batch that made it.
//!
//! ```
//! use kvfolio::{Batch, BlockPool, Context, PlanRequest};
//!
//! let pool = BlockPool::new(64, 16, true)?;
//! let batch = Batch::new(&pool, 8, 1024)?;
//! let sequence = pool.sequence(&[1, 2, 3], &Context::default(), true, true)?;
//! let row = batch.add(&sequence)?;
//! let plan = batch.plan(&PlanRequest::default())?;
//! assert_eq!(plan.arrays().slot_mapping(), [16, 17, 18]); // block 0 is the null block
//! plan.commit(None)?; // K and V of the step are written
//! plan.extend(&[4])?; // the sampled token
//! assert_eq!(sequence.num_pending()?, 1);
//! batch.remove(row)?.free()?;
//! assert_eq!(pool.num_free(), 64);
//! # Ok::<(), kvfolio::Error>(())
//! ```

mod batch;
mod context;
mod error;
mod holds;
mod ids;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
#[cfg(not(any(loom, schedules)))] // models of the pool need none, and take a minute longer to build with them
pub mod kernels;
mod key;
mod plan;
mod pool;
mod sequence;
mod sync;
mod table;

pub use batch::{Batch, PlanRequest, TokenCaps};
pub use context::{Context, Extra};
pub use error::{Error, Result};
pub use ids::{BlockId, MAX_BLOCKS, UNKNOWN_TOKEN, block_layout};
pub use key::Key;
pub use plan::{Csr, OutTable, Plan, PlanArrays, TableMemory};
pub use pool::{
    BlockPool, Event, EventSource, EvictionAges, EvictionPolicy, PoolOptions, Stats, StoredBlock,
};
pub use sequence::{NewTokens, Sequence};
pub use table::BlockTable;
