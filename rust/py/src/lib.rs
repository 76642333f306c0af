//! Python bindings of kvfolio: one file per class, no logic of their own.
//!
//! Every class is frozen. Locks of tables, sequences and batches are only tried, so a second thread is told so
//! instead of waiting.
//!
//! None of it needs the GIL: what threads share is atomic or behind a lock that is held for no Python code,
//! and the only unsafe code, on arrays, asks of other threads what numpy does.

#![expect(clippy::doc_markdown, reason = "doc comments of classes and methods are Python docstrings")]

mod arguments;
mod arrays;
mod batch;
mod context;
mod errors;
mod event_wire;
mod events;
mod kernels;
mod plan;
mod plan_buffers;
mod plan_message;
mod pool;
mod sequence;
mod table;

use pyo3::prelude::*;

/// How many blocks `num_tokens` take, and how many slots of the last one stay empty.
///
/// Raises ValueError for a negative number of tokens, or a block size below 1.
#[pyfunction]
fn block_layout(
    num_tokens: &Bound<'_, PyAny>,
    block_size: &Bound<'_, PyAny>,
) -> errors::Result<(usize, usize)> {
    let num_tokens = arguments::count("num_tokens", num_tokens, 0)?;
    let block_size = arguments::count("block_size", block_size, 1)?;
    Ok(kvfolio::block_layout(num_tokens, block_size)?)
}

#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::{
        batch::PyBatch,
        block_layout,
        context::PyContext,
        events::PyEventSource,
        kernels::{
            attend, copy_blocks, cpu_capabilities, get_num_threads, read_memory, set_num_threads,
            use_open_mp, write_kv,
        },
        plan::PyPlan,
        plan_buffers::PyPlanBuffers,
        pool::PyBlockPool,
        sequence::PySequence,
        table::PyBlockTable,
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("EVICTION_POLICIES", super::pool::eviction_policies(module.py())?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
