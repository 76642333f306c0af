//! `kvfolio._native.EventSource`.

use kvfolio::{Event, EventSource};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyType},
};

use crate::{
    event_wire::{Form, encode},
    pool::{PyBlockPool, refuse_pickling},
};

/// What changes in a pool's prefix cache: made by `BlockPool.events`, one at a time.
///
/// Batches are `bytes`, MessagePack as vLLM publishes it. Its calls run without the GIL and never make a step wait.
#[pyclass(name = "EventSource", module = "kvfolio", frozen)]
pub(crate) struct PyEventSource {
    source: EventSource,
    form: Form,
}

impl PyEventSource {
    pub(crate) fn new(source: EventSource, form: Form) -> Self {
        Self { source, form }
    }

    fn encode<'py>(
        &self,
        py: Python<'py>,
        events: impl FnOnce() -> Vec<Event> + Send,
    ) -> Option<Bound<'py, PyBytes>> {
        let block_size = self.source.pool().block_size();
        let batch = py.detach(|| {
            let events = events();
            (!events.is_empty()).then(|| encode(&events, &self.form, block_size))
        })?;
        Some(PyBytes::new(py, &batch))
    }
}

#[pymethods]
impl PyEventSource {
    /// The pool.
    #[getter]
    fn pool(&self) -> PyBlockPool {
        PyBlockPool(self.source.pool().clone())
    }

    /// What has changed since the last call, as a batch; None if nothing has.
    ///
    /// The first one begins with AllBlocksCleared and tells all that is there. Blocks come behind their parents, and are
    /// removed before them. What came and went between two calls is not told.
    fn drain<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.encode(py, || self.source.drain())
    }

    /// A batch that says all that was told and not taken back: AllBlocksCleared, and what is stored, parents first.
    fn snapshot<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.encode(py, || std::iter::once(Event::Cleared).chain(self.source.snapshot()).collect())
    }

    /// It belongs to a pool, which lives in this process.
    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        let class: Bound<'_, PyType> = slf.get_type();
        refuse_pickling(&class)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.source)
    }
}
