//! `kvfolio.BlockPool`.

use std::fmt::Display;

use kvfolio::{BlockId, BlockPool, Context, Error, EvictionAges, EvictionPolicy, PoolOptions};
use numpy::PyArray1;
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyDict, PyTuple, PyType},
};

use crate::{
    arguments::{self, Any},
    arrays,
    context::PyContext,
    errors::Result,
    event_wire::Form,
    events::PyEventSource,
    sequence::PySequence,
    table::PyBlockTable,
};

/// All blocks, who refers to them, and what can be found in them.
///
/// `num_blocks` (at least 1) usable blocks of `block_size` (at least 1) tokens; storage needs one block more, since
/// block 0 is the null block. Without `prefix_cache` nothing is ever found. `eviction`, one of EVICTION_POLICIES, says which
/// idle block gives way when a block is wanted and none is blank: "lru" the least recently released one, of one release
/// the deepest; "adaptive" the same of those that were never hit, or of those that were, whichever have more than a share
/// that adapts. With `events` what is found can be followed. Calls may come from any thread.
///
/// Raises ValueError or TypeError for what is not allowed.
#[pyclass(name = "BlockPool", module = "kvfolio", frozen, weakref)]
pub(crate) struct PyBlockPool(pub(crate) BlockPool);

impl PyBlockPool {
    fn blocks(&self, ids: Any<'_, '_>) -> Result<Vec<BlockId>> {
        self.named_blocks("ids", ids)
    }

    fn named_blocks(&self, name: &str, ids: Any<'_, '_>) -> Result<Vec<BlockId>> {
        let ids = arguments::integers(name, ids)?;
        let block = |id| self.0.block(id).map_err(|_| self.no_such_block(name, id));
        Ok(ids.into_iter().map(block).collect::<kvfolio::Result<_>>()?)
    }

    fn no_such_block(&self, name: &str, came: impl Display) -> Error {
        Error::InvalidBlock(format!("{name} must be between 1 and {}, not {came}", self.0.num_blocks()))
    }
}

/// The context that was given, or the empty one.
fn context_or_default(context: Option<Any<'_, '_>>) -> PyResult<Context> {
    let Some(context) = context.filter(|context| !context.is_none()) else {
        return Ok(Context::default());
    };
    let context = context.cast::<PyContext>().map_err(|_| {
        PyTypeError::new_err(format!(
            "context must be a Context or None, not {}",
            arguments::type_name(context)
        ))
    })?;
    Ok(context.get().0.clone())
}

#[pymethods]
impl PyBlockPool {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, *, prefix_cache = true, eviction = "lru", events = false))]
    fn new(
        num_blocks: Any<'_, '_>,
        block_size: Any<'_, '_>,
        prefix_cache: bool,
        eviction: &str,
        events: bool,
    ) -> Result<Self> {
        let num_blocks = arguments::count("num_blocks", num_blocks, 1)?;
        let block_size = arguments::count("block_size", block_size, 1)?;
        let options = PoolOptions { prefix_cache, eviction: eviction.parse()?, events };
        Ok(Self(BlockPool::with_options(num_blocks, block_size, &options)?))
    }

    /// Usable blocks.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.num_blocks()
    }

    /// Tokens a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    /// Which idle block gives way first: one of EVICTION_POLICIES.
    #[getter]
    fn eviction(&self) -> &'static str {
        self.0.eviction().name()
    }

    /// The id that pads tables; never handed out.
    #[getter]
    #[expect(clippy::unused_self, reason = "a property")]
    fn null_block(&self) -> i32 {
        BlockId::NULL.as_i32()
    }

    /// Blocks that storage must have: the usable ones and the null block.
    #[getter]
    fn num_physical_blocks(&self) -> usize {
        self.0.num_physical_blocks()
    }

    /// Blocks that can be handed out: blank + idle.
    #[getter]
    fn num_free(&self) -> usize {
        self.0.num_free()
    }

    /// Free blocks without content.
    #[getter]
    fn num_blank(&self) -> usize {
        self.0.num_blank()
    }

    /// Free blocks with published content: reusable, or evictable.
    #[getter]
    fn num_idle(&self) -> usize {
        self.0.num_idle()
    }

    /// Blocks with a reference.
    #[getter]
    fn num_referenced(&self) -> usize {
        self.0.num_referenced()
    }

    /// Blocks without a reference that a plan in flight still needs as they are.
    #[getter]
    fn num_quarantined(&self) -> usize {
        self.0.num_quarantined()
    }

    /// `int32[n]`: blocks with one reference each, lent to the caller; all or nothing.
    ///
    /// Blank blocks come first, then idle ones in the order of the pool's eviction policy. Raises OutOfBlocks.
    fn allocate<'py>(&self, py: Python<'py>, n: Any<'_, 'py>) -> Result<Bound<'py, PyArray1<i32>>> {
        let blocks = self.0.allocate(arguments::count("n", n, 0)?)?;
        Ok(arrays::block_ids(py, &blocks))
    }

    /// Lend one more reference for each mention of a block; null ids are passed over. All or nothing.
    ///
    /// Raises InvalidBlock for a block that is not referenced, RefCountOverflow beyond 2**20 - 1 references.
    fn share(&self, ids: Any<'_, '_>) -> Result<()> {
        Ok(self.0.share(&self.blocks(ids)?)?)
    }

    /// Take back one lent reference for each mention of a block; null ids are passed over. All or nothing.
    ///
    /// References that tables own are out of reach. Raises InvalidBlock.
    fn release(&self, ids: Any<'_, '_>) -> Result<()> {
        Ok(self.0.release(&self.blocks(ids)?)?)
    }

    /// References to a block, lent and those of tables. Raises InvalidBlock for an id out of range.
    fn ref_count(&self, block_id: Any<'_, '_>) -> Result<u32> {
        let id = arguments::integer("block_id", block_id)?;
        let block = id.and_then(|id| self.0.block(id).ok());
        let block = block.ok_or_else(|| self.no_such_block("block_id", arguments::shown(block_id)))?;
        Ok(self.0.ref_count(block)?)
    }

    /// How many leading tokens are in the cache now; advisory, since nothing is held.
    ///
    /// All cached blocks count; only admission keeps one token to compute. `context` None is the empty Context.
    #[pyo3(name = "match", signature = (token_ids, context = None))]
    fn match_prefix(&self, token_ids: Any<'_, '_>, context: Option<Any<'_, '_>>) -> Result<usize> {
        let tokens = arguments::tokens("token_ids", token_ids)?;
        Ok(self.0.match_prefix(&tokens, &context_or_default(context)?)?)
    }

    /// How many of `num_free` it takes to hold what the cache has of a sequence and to compute the rest.
    ///
    /// The admission test: a sequence fits as long as this is at most `num_free`.
    fn blocks_needed(&self, seq: Any<'_, '_>) -> Result<usize> {
        let sequence = PySequence::argument("seq", seq)?;
        Ok(self.0.blocks_needed(&sequence.get().0)?)
    }

    /// Forget all content; returns the blocks still referenced.
    ///
    /// What was computed before, also in plans in flight, is never published. For changed weights.
    fn reset_prefix_cache(&self) -> usize {
        self.0.reset_prefix_cache()
    }

    /// Counters since the pool was made: allocations, evictions, hit_tokens, queried_tokens, copies, merges, refusals,
    /// and of these refusals_quarantined (plans in flight had the blocks) and refusals_never_fit (the pool is too small).
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, value) in self.0.stats().entries() {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }

    /// How long evicted blocks had lain idle: bounds in seconds, how many blocks lay up to each, but longer than up to the
    /// one before, and the seconds of all together.
    ///
    /// Of a clock that is right to 4 ms.
    fn eviction_ages(&self) -> (Vec<f64>, Vec<u64>, f64) {
        let ages = self.0.eviction_ages();
        let seconds = |milliseconds: u64| milliseconds as f64 / 1000.0;
        let bounds = (0..ages.counts.len()).map(|bucket| seconds(EvictionAges::bound(bucket)));
        (bounds.collect(), ages.counts.to_vec(), seconds(ages.sum))
    }

    /// An EventSource: what changes in the prefix cache, in the wire format that vLLM publishes.
    ///
    /// `medium`: what each event says about where its blocks lie. `data_parallel_rank`: of this worker. `array_events`:
    /// events are arrays, as they were before vLLM made them maps, and still are in SGLang. Raises ValueError unless the
    /// pool was made with `events=True`, ConcurrentUse while there is another source.
    #[pyo3(signature = (*, medium = "GPU", data_parallel_rank = None, array_events = false))]
    fn events(
        &self,
        medium: &str,
        data_parallel_rank: Option<Any<'_, '_>>,
        array_events: bool,
    ) -> Result<PyEventSource> {
        let rank = arguments::optional_count("data_parallel_rank", data_parallel_rank, 0)?.unwrap_or(0);
        let form = Form { medium: medium.to_owned(), rank: rank as u64, array_events };
        Ok(PyEventSource::new(self.0.events()?, form))
    }

    /// Recompute every count from scratch; CorruptPool on any disagreement.
    ///
    /// Exact while no other thread is at work; linear in `num_blocks`.
    fn audit(&self) -> Result<()> {
        Ok(self.0.audit()?)
    }

    /// A new BlockTable, which takes over one lent reference for each mention of a block.
    ///
    /// `num_tokens`, by default all slots, must fill the blocks up to the last one. Raises InvalidBlock, ValueError.
    #[pyo3(signature = (block_ids = None, num_tokens = None))]
    fn table(&self, block_ids: Option<Any<'_, '_>>, num_tokens: Option<Any<'_, '_>>) -> Result<PyBlockTable> {
        let blocks =
            block_ids.map(|ids| self.named_blocks("block_ids", ids)).transpose()?.unwrap_or_default();
        let full = blocks.len() * self.0.block_size();
        let num_tokens = arguments::optional_count("num_tokens", num_tokens, 0)?.unwrap_or(full);
        Ok(PyBlockTable::new(self.0.table_of(&blocks, num_tokens)?))
    }

    /// A Sequence of known tokens, which holds no block until it is planned.
    ///
    /// `token_ids`: integers from 0 to 2**31 - 1, as a list, range or array of any integer dtype. With `read_cache` false it
    /// finds nothing, with `write_cache` false it publishes nothing.
    #[pyo3(signature = (token_ids, *, context = None, read_cache = true, write_cache = true))]
    fn sequence(
        &self,
        token_ids: Any<'_, '_>,
        context: Option<Any<'_, '_>>,
        read_cache: bool,
        write_cache: bool,
    ) -> Result<PySequence> {
        let tokens = arguments::tokens("token_ids", token_ids)?;
        let context = context_or_default(context)?;
        Ok(PySequence(self.0.sequence(&tokens, &context, read_cache, write_cache)?))
    }

    /// Pools are where the blocks are; there is nothing to take along.
    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        refuse_pickling(&slf.get_type())
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// Names of the policies that a pool can be made with, the default first.
pub(crate) fn eviction_policies(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    PyTuple::new(py, EvictionPolicy::ALL.iter().map(|policy| policy.name()))
}

/// Objects that live in one process say so when they are pickled.
pub(crate) fn refuse_pickling(class: &Bound<'_, PyType>) -> PyResult<Py<PyAny>> {
    let name = class.name()?;
    Err(PyTypeError::new_err(format!(
        "a {name} cannot be pickled or copied: its blocks live in this process"
    )))
}
