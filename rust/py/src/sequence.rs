//! `kvfolio.Sequence`.

use kvfolio::{NewTokens, Sequence};
use numpy::PyArray1;
use pyo3::{exceptions::PyTypeError, prelude::*};

use crate::{
    arguments::{self, Any},
    arrays, context,
    errors::Result,
    pool::refuse_pickling,
};

/// Tokens, how far their K and V are computed, and the table that says where.
///
/// Made by `BlockPool.sequence` and `fork`. *Pending* tokens are known but have no KV yet, *computed* ones have it. Gives its
/// blocks back on `free`, or when it is collected outside of a batch. Any use after `free` raises StaleHandle.
#[pyclass(name = "Sequence", module = "kvfolio", frozen, weakref)]
pub(crate) struct PySequence(pub(crate) Sequence);

impl PySequence {
    pub(crate) fn argument<'a, 'py>(name: &str, value: Any<'a, 'py>) -> PyResult<&'a Bound<'py, Self>> {
        value.cast::<Self>().map_err(|_| {
            PyTypeError::new_err(format!("{name} must be a Sequence, not {}", arguments::type_name(value)))
        })
    }

    /// An argument, of a sequence that is still there: what is stale is told before what is wrong.
    fn checked<T>(&self, argument: impl FnOnce() -> PyResult<T>) -> Result<T> {
        self.0.num_tokens()?;
        Ok(argument()?)
    }
}

#[pymethods]
impl PySequence {
    /// `int32[num_tokens]`: a snapshot, with -1 in the place of unknown tokens.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArray1<i32>>> {
        Ok(arrays::read_only(arrays::owned(py, self.0.token_ids()?)))
    }

    /// All tokens, known or not.
    #[getter]
    fn num_tokens(&self) -> Result<usize> {
        Ok(self.0.num_tokens()?)
    }

    /// Tokens whose K and V are computed.
    #[getter]
    fn num_computed(&self) -> Result<usize> {
        Ok(self.0.num_computed()?)
    }

    /// Tokens without K and V.
    #[getter]
    fn num_pending(&self) -> Result<usize> {
        Ok(self.0.num_pending()?)
    }

    /// Tokens found in the prefix cache; 0 again after a preemption.
    #[getter]
    fn num_cached(&self) -> Result<usize> {
        Ok(self.0.num_cached()?)
    }

    /// `int32`: a snapshot of the blocks in logical order, with 0 where one was discarded.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArray1<i32>>> {
        Ok(arrays::read_only(arrays::block_ids(py, &self.0.blocks()?)))
    }

    /// Append tokens: their ids, or a number of tokens whose ids will be told later.
    ///
    /// `extras` as in Context, all at or behind the present end. Raises ValueError beyond the batch's length limit.
    #[pyo3(signature = (token_ids, extras = None))]
    fn extend(&self, token_ids: Any<'_, '_>, extras: Option<Any<'_, '_>>) -> Result<()> {
        let is_number = self.checked(|| Ok(arguments::is_number(token_ids)))?;
        let extras = context::extras(extras)?;
        if is_number {
            if !extras.is_empty() {
                return Err(PyTypeError::new_err("extras go with known token_ids, not with a number").into());
            }
            return Ok(self.0.extend(NewTokens::Unknown(arguments::count("token_ids", token_ids, 0)?))?);
        }
        let tokens = arguments::tokens("token_ids", token_ids)?;
        Ok(self.0.extend(NewTokens::Known(&tokens, &extras))?)
    }

    /// The oldest unknown tokens become known; full blocks that waited for them are published.
    ///
    /// Raises ValueError for more than are unknown.
    fn resolve(&self, token_ids: Any<'_, '_>) -> Result<()> {
        let tokens = self.checked(|| arguments::tokens("token_ids", token_ids))?;
        Ok(self.0.resolve(&tokens)?)
    }

    /// A second sequence with the same past and its own future, in no batch. Raises PlanInFlight.
    fn fork(&self) -> Result<Self> {
        Ok(Self(self.0.fork()?))
    }

    /// Keep the first `n` tokens; what had been computed beyond them is computed no more.
    ///
    /// A block that is cut into is copied before the next write if anybody else refers to it. Raises PlanInFlight,
    /// and ValueError for `n` above num_tokens or within what was discarded.
    fn truncate(&self, n: Any<'_, '_>) -> Result<()> {
        let n = self.checked(|| arguments::count("n", n, 0))?;
        Ok(self.0.truncate(n)?)
    }

    /// Give back the blocks that lie wholly before `position`, up to num_computed (sliding windows).
    ///
    /// The null block takes their place. Raises ValueError for a position beyond.
    fn discard_before(&self, position: Any<'_, '_>) -> Result<()> {
        let position = self.checked(|| arguments::count("position", position, 0))?;
        Ok(self.0.discard_before(position)?)
    }

    /// Give everything back and leave the batch. May be said twice.
    fn free(&self) -> Result<()> {
        Ok(self.0.free()?)
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        refuse_pickling(&slf.get_type())
    }

    fn __repr__(&self) -> String {
        let facts = || {
            let (tokens, computed) = (self.0.num_tokens()?, self.0.num_computed()?);
            let (cached, blocks) = (self.0.num_cached()?, self.0.blocks()?.len());
            Ok::<_, kvfolio::Error>(format!(
                "Sequence({tokens} tokens, {computed} computed, {cached} cached, {blocks} blocks)"
            ))
        };
        facts().unwrap_or_else(|error| format!("Sequence({error})"))
    }
}
