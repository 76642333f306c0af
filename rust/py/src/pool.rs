//! `kvfolio.BlockPool`.

use kvfolio::{BlockId, BlockPool, Context};
use numpy::PyArray1;
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyDict, PyType},
};

use crate::{
    arguments::{self, Any},
    arrays,
    context::PyContext,
    errors::Result,
    sequence::PySequence,
    table::PyBlockTable,
};

#[pyclass(name = "BlockPool", module = "kvfolio", frozen, weakref)]
pub(crate) struct PyBlockPool(pub(crate) BlockPool);

impl PyBlockPool {
    fn blocks(&self, ids: Any<'_, '_>) -> Result<Vec<BlockId>> {
        self.named_blocks("ids", ids)
    }

    fn named_blocks(&self, name: &str, ids: Any<'_, '_>) -> Result<Vec<BlockId>> {
        let ids = arguments::integers(name, ids)?;
        Ok(ids.into_iter().map(|id| self.0.block(id)).collect::<kvfolio::Result<_>>()?)
    }
}

/// The context that was given, or the empty one.
fn context_or_default(context: Option<Any<'_, '_>>) -> PyResult<Context> {
    match context.filter(|context| !context.is_none()) {
        None => Ok(Context::default()),
        Some(context) => match context.cast::<PyContext>() {
            Ok(context) => Ok(context.get().0.clone()),
            Err(_) => {
                let came = context.get_type();
                Err(PyTypeError::new_err(format!("context must be a Context or None, not {came}")))
            }
        },
    }
}

#[pymethods]
impl PyBlockPool {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, *, prefix_cache = true))]
    fn new(num_blocks: Any<'_, '_>, block_size: Any<'_, '_>, prefix_cache: bool) -> Result<Self> {
        let num_blocks = arguments::count("num_blocks", num_blocks, 1)?;
        let block_size = arguments::count("block_size", block_size, 1)?;
        Ok(Self(BlockPool::new(num_blocks, block_size, prefix_cache)?))
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.num_blocks()
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    #[getter]
    fn null_block(&self) -> i32 {
        BlockId::NULL.as_i32()
    }

    #[getter]
    fn num_physical_blocks(&self) -> usize {
        self.0.num_physical_blocks()
    }

    #[getter]
    fn num_free(&self) -> usize {
        self.0.num_free()
    }

    #[getter]
    fn num_blank(&self) -> usize {
        self.0.num_blank()
    }

    #[getter]
    fn num_idle(&self) -> usize {
        self.0.num_idle()
    }

    #[getter]
    fn num_referenced(&self) -> usize {
        self.0.num_referenced()
    }

    #[getter]
    fn num_quarantined(&self) -> usize {
        self.0.num_quarantined()
    }

    fn allocate<'py>(&self, py: Python<'py>, n: Any<'_, 'py>) -> Result<Bound<'py, PyArray1<i32>>> {
        let blocks = self.0.allocate(arguments::count("n", n, 0)?)?;
        Ok(arrays::block_ids(py, &blocks))
    }

    fn share(&self, ids: Any<'_, '_>) -> Result<()> {
        Ok(self.0.share(&self.blocks(ids)?)?)
    }

    fn release(&self, ids: Any<'_, '_>) -> Result<()> {
        Ok(self.0.release(&self.blocks(ids)?)?)
    }

    fn ref_count(&self, block_id: Any<'_, '_>) -> Result<u32> {
        let block = self.0.block(arguments::block_id("block_id", block_id)?)?;
        Ok(self.0.ref_count(block)?)
    }

    #[pyo3(name = "match", signature = (token_ids, context = None))]
    fn match_prefix(&self, token_ids: Any<'_, '_>, context: Option<Any<'_, '_>>) -> Result<usize> {
        let tokens = arguments::tokens("token_ids", token_ids)?;
        Ok(self.0.match_prefix(&tokens, &context_or_default(context)?)?)
    }

    fn blocks_needed(&self, seq: Any<'_, '_>) -> Result<usize> {
        let sequence = PySequence::argument("seq", seq)?;
        Ok(self.0.blocks_needed(&sequence.get().0)?)
    }

    fn reset_prefix_cache(&self) -> usize {
        self.0.reset_prefix_cache()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, value) in self.0.stats().entries() {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }

    fn audit(&self) -> Result<()> {
        Ok(self.0.audit()?)
    }

    #[pyo3(signature = (block_ids = None, num_tokens = None))]
    fn table(&self, block_ids: Option<Any<'_, '_>>, num_tokens: Option<Any<'_, '_>>) -> Result<PyBlockTable> {
        let blocks =
            block_ids.map(|ids| self.named_blocks("block_ids", ids)).transpose()?.unwrap_or_default();
        let full = blocks.len() * self.0.block_size();
        let num_tokens = arguments::optional_count("num_tokens", num_tokens, 0)?.unwrap_or(full);
        Ok(PyBlockTable::new(self.0.table_of(&blocks, num_tokens)?))
    }

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

/// Objects that live in one process say so when they are pickled.
pub(crate) fn refuse_pickling(class: &Bound<'_, PyType>) -> PyResult<Py<PyAny>> {
    let name = class.name()?;
    Err(PyTypeError::new_err(format!(
        "a {name} cannot be pickled or copied: its blocks live in this process"
    )))
}
