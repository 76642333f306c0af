//! `kvfolio.BlockTable`.

use kvfolio::{BlockTable, Error};
use numpy::{PyArray1, PyArray2};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::{
    arguments::{self, Any},
    arrays,
    errors::Result,
    pool::refuse_pickling,
};

/// One sequence's map from logical to physical blocks; it holds a reference to each of them.
///
/// Made by `BlockPool.table` and `fork`. Gives its blocks back on `release`, on `with`, or when it is collected. Any use
/// after that raises StaleHandle.
#[pyclass(name = "BlockTable", module = "kvfolio", frozen, weakref)]
pub(crate) struct PyBlockTable(Mutex<Option<BlockTable>>);

impl PyBlockTable {
    pub(crate) fn new(table: BlockTable) -> Self {
        Self(Mutex::new(Some(table)))
    }

    fn with<R>(&self, work: impl FnOnce(&mut BlockTable) -> kvfolio::Result<R>) -> Result<R> {
        // An error becomes a Python exception, whose class may run any code, when the lock is free again.
        Ok(self.with_locked(work)?)
    }

    fn with_locked<R>(&self, work: impl FnOnce(&mut BlockTable) -> kvfolio::Result<R>) -> kvfolio::Result<R> {
        let mut table = self.0.try_lock().ok_or(Error::ConcurrentUse("table"))?;
        work(table.as_mut().ok_or(Error::StaleHandle("table has been released"))?)
    }
}

#[pymethods]
impl PyBlockTable {
    /// Tokens that have a slot.
    #[getter]
    fn num_tokens(&self) -> Result<usize> {
        self.with(|table| Ok(table.num_tokens()))
    }

    /// Blocks, discarded ones included.
    #[getter]
    fn num_blocks(&self) -> Result<usize> {
        self.with(|table| Ok(table.blocks().len()))
    }

    /// Slots of the last block without a token: 0 to block_size - 1.
    #[getter]
    fn num_empty_slots(&self) -> Result<usize> {
        self.with(|table| Ok(table.num_empty_slots()))
    }

    /// `int32[num_blocks]`: a snapshot, with 0 where a block was discarded.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArray1<i32>>> {
        let blocks = self.with(|table| Ok(table.blocks().to_vec()))?;
        Ok(arrays::read_only(arrays::block_ids(py, &blocks)))
    }

    /// Room for `n` more tokens; `int32[c, 2]` (source, target) block copies to do before anything else.
    ///
    /// There is a copy (c is 1) if the last block is partial and somebody else refers to it. Raises OutOfBlocks.
    fn append<'py>(&self, py: Python<'py>, n: Any<'_, 'py>) -> Result<Bound<'py, PyArray2<i32>>> {
        let n = self.checked(|| arguments::count("n", n, 0))?;
        Ok(arrays::copies(py, self.with(|table| table.append(n))?)?)
    }

    /// (block id, offset in the block) of a position. Raises IndexError outside.
    fn locate(&self, position: Any<'_, '_>) -> Result<(i32, usize)> {
        let position = self.checked(|| arguments::position("position", position))?;
        let (block, offset) = self.with(|table| table.locate(position))?;
        Ok((block.as_i32(), offset))
    }

    /// `int64[stop - start]`: block id * block_size + offset of each position. Raises IndexError outside.
    fn slots<'py>(
        &self,
        py: Python<'py>,
        start: Any<'_, 'py>,
        stop: Any<'_, 'py>,
    ) -> Result<Bound<'py, PyArray1<i64>>> {
        let start = self.checked(|| arguments::position("start", start))?;
        let stop = arguments::position("stop", stop)?;
        let slots = self.with(|table| table.slots(start, stop))?;
        Ok(arrays::read_only(arrays::owned(py, slots)))
    }

    /// A table over the same blocks, of the first `num_tokens` tokens, by default all.
    ///
    /// A partial last block is shared until somebody writes. Raises ValueError for a place in a discarded region.
    #[pyo3(signature = (num_tokens = None))]
    fn fork(&self, num_tokens: Option<Any<'_, '_>>) -> Result<Self> {
        let num_tokens = self.checked(|| arguments::optional_count("num_tokens", num_tokens, 0))?;
        self.with(|table| table.fork(num_tokens)).map(Self::new)
    }

    /// Keep the first `num_tokens` tokens, and the blocks that hold any of them.
    ///
    /// Raises ValueError for more than there are, and for a place in a discarded region.
    fn truncate(&self, num_tokens: Any<'_, '_>) -> Result<()> {
        let num_tokens = self.checked(|| arguments::count("num_tokens", num_tokens, 0))?;
        self.with(|table| table.truncate(num_tokens))
    }

    /// Give back the blocks that lie wholly before `position`; the null block takes their place.
    ///
    /// Raises ValueError for a position behind the last token.
    fn discard_before(&self, position: Any<'_, '_>) -> Result<()> {
        let position = self.checked(|| arguments::count("position", position, 0))?;
        self.with(|table| table.discard_before(position))
    }

    /// Give all blocks back. May be said twice.
    fn release(&self) -> Result<()> {
        let table = self.0.try_lock().ok_or(Error::ConcurrentUse("table"))?.take();
        drop(table);
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Result<Bound<'_, Self>> {
        slf.get().with(|_| Ok(()))?;
        Ok(slf)
    }

    fn __exit__(&self, _type: Any<'_, '_>, _value: Any<'_, '_>, _traceback: Any<'_, '_>) -> Result<()> {
        self.release()
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        refuse_pickling(&slf.get_type())
    }

    fn __repr__(&self) -> String {
        let facts = |table: &mut BlockTable| {
            Ok(format!("BlockTable({} tokens in {} blocks)", table.num_tokens(), table.blocks().len()))
        };
        self.with(facts).unwrap_or_else(|_| "BlockTable(released or in use)".into())
    }
}

impl PyBlockTable {
    /// An argument, of a table that is still there: what is stale is told before what is wrong.
    fn checked<T>(&self, argument: impl FnOnce() -> PyResult<T>) -> Result<T> {
        self.with(|_| Ok(()))?;
        Ok(argument()?)
    }
}
