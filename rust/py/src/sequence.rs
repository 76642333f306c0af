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

#[pyclass(name = "Sequence", module = "kvfolio", frozen, weakref)]
pub(crate) struct PySequence(pub(crate) Sequence);

impl PySequence {
    pub(crate) fn argument<'a, 'py>(name: &str, value: Any<'a, 'py>) -> PyResult<&'a Bound<'py, Self>> {
        value
            .cast::<Self>()
            .map_err(|_| PyTypeError::new_err(format!("{name} must be a Sequence, not {}", value.get_type())))
    }

    /// An argument, of a sequence that is still there: what is stale is told before what is wrong.
    fn checked<T>(&self, argument: impl FnOnce() -> PyResult<T>) -> Result<T> {
        self.0.num_tokens()?;
        Ok(argument()?)
    }
}

#[pymethods]
impl PySequence {
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArray1<i32>>> {
        Ok(arrays::read_only(arrays::owned(py, self.0.token_ids()?)))
    }

    #[getter]
    fn num_tokens(&self) -> Result<usize> {
        Ok(self.0.num_tokens()?)
    }

    #[getter]
    fn num_computed(&self) -> Result<usize> {
        Ok(self.0.num_computed()?)
    }

    #[getter]
    fn num_pending(&self) -> Result<usize> {
        Ok(self.0.num_pending()?)
    }

    #[getter]
    fn num_cached(&self) -> Result<usize> {
        Ok(self.0.num_cached()?)
    }

    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArray1<i32>>> {
        Ok(arrays::read_only(arrays::block_ids(py, &self.0.blocks()?)))
    }

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

    fn resolve(&self, token_ids: Any<'_, '_>) -> Result<()> {
        let tokens = self.checked(|| arguments::tokens("token_ids", token_ids))?;
        Ok(self.0.resolve(&tokens)?)
    }

    fn fork(&self) -> Result<Self> {
        Ok(Self(self.0.fork()?))
    }

    fn truncate(&self, n: Any<'_, '_>) -> Result<()> {
        let n = self.checked(|| arguments::count("n", n, 0))?;
        Ok(self.0.truncate(n)?)
    }

    fn discard_before(&self, position: Any<'_, '_>) -> Result<()> {
        let position = self.checked(|| arguments::count("position", position, 0))?;
        Ok(self.0.discard_before(position)?)
    }

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
