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

#[pyclass(name = "BlockTable", module = "kvfolio", frozen, weakref)]
pub(crate) struct PyBlockTable(Mutex<Option<BlockTable>>);

impl PyBlockTable {
    pub(crate) fn new(table: BlockTable) -> Self {
        Self(Mutex::new(Some(table)))
    }

    fn with<R>(&self, work: impl FnOnce(&mut BlockTable) -> kvfolio::Result<R>) -> Result<R> {
        let mut table = self.0.try_lock().ok_or(Error::ConcurrentUse("table"))?;
        Ok(work(table.as_mut().ok_or(Error::StaleHandle("table has been released"))?)?)
    }
}

#[pymethods]
impl PyBlockTable {
    #[getter]
    fn num_tokens(&self) -> Result<usize> {
        self.with(|table| Ok(table.num_tokens()))
    }

    #[getter]
    fn num_blocks(&self) -> Result<usize> {
        self.with(|table| Ok(table.blocks().len()))
    }

    #[getter]
    fn num_empty_slots(&self) -> Result<usize> {
        self.with(|table| Ok(table.num_empty_slots()))
    }

    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArray1<i32>>> {
        self.with(|table| Ok(arrays::read_only(arrays::block_ids(py, table.blocks()))))
    }

    fn append<'py>(&self, py: Python<'py>, n: Any<'_, 'py>) -> Result<Bound<'py, PyArray2<i32>>> {
        let n = self.checked(|| arguments::count("n", n, 0))?;
        Ok(arrays::copies(py, self.with(|table| table.append(n))?)?)
    }

    fn locate(&self, position: Any<'_, '_>) -> Result<(i32, usize)> {
        let position = self.checked(|| arguments::position("position", position))?;
        let (block, offset) = self.with(|table| table.locate(position))?;
        Ok((block.as_i32(), offset))
    }

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

    #[pyo3(signature = (num_tokens = None))]
    fn fork(&self, num_tokens: Option<Any<'_, '_>>) -> Result<Self> {
        let num_tokens = self.checked(|| arguments::optional_count("num_tokens", num_tokens, 0))?;
        self.with(|table| table.fork(num_tokens)).map(Self::new)
    }

    fn truncate(&self, num_tokens: Any<'_, '_>) -> Result<()> {
        let num_tokens = self.checked(|| arguments::count("num_tokens", num_tokens, 0))?;
        self.with(|table| table.truncate(num_tokens))
    }

    fn discard_before(&self, position: Any<'_, '_>) -> Result<()> {
        let position = self.checked(|| arguments::count("position", position, 0))?;
        self.with(|table| table.discard_before(position))
    }

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
