//! `kvfolio.Batch`.

use kvfolio::{Batch, PlanRequest, TokenCaps};
use parking_lot::Mutex;
use pyo3::{exceptions::PyTypeError, prelude::*};

use crate::{
    arguments::{self, Any},
    errors::Result,
    plan::PyPlan,
    plan_buffers::PyPlanBuffers,
    pool::{PyBlockPool, refuse_pickling},
    sequence::PySequence,
};

/// The running sequences, each in a row whose number stays.
///
/// Up to `max_sequences` sequences of up to `max_tokens_per_sequence` tokens each.
#[pyclass(name = "Batch", module = "kvfolio", frozen, weakref)]
pub(crate) struct PyBatch {
    batch: Batch,
    pool: Py<PyBlockPool>,
    /// The objects that were admitted, so that `remove` returns the same; outdated where a row is empty.
    admitted: Mutex<Vec<Option<Py<PySequence>>>>,
}

/// The arguments of `plan` and `shortfall`.
struct Request {
    max_tokens: Option<usize>,
    rows: Option<Vec<usize>>,
    cap: Option<usize>,
    caps: Option<Vec<usize>>,
}

impl Request {
    fn new(
        max_tokens: Option<Any<'_, '_>>,
        rows: Option<Any<'_, '_>>,
        num_tokens: Option<Any<'_, '_>>,
    ) -> PyResult<Self> {
        let num_tokens = num_tokens.filter(|value| !value.is_none());
        let (one, many) = num_tokens.map_or((None, None), |value| {
            if arguments::is_number(value) { (Some(value), None) } else { (None, Some(value)) }
        });
        Ok(Self {
            max_tokens: arguments::optional_count("max_tokens", max_tokens, 1)?,
            rows: arguments::optional_counts("rows", rows)?,
            cap: arguments::optional_count("num_tokens", one, 0)?,
            caps: arguments::optional_counts("num_tokens", many)?,
        })
    }

    fn as_core(&self, partial: bool) -> PlanRequest<'_> {
        let num_tokens = match (&self.caps, self.cap) {
            (Some(caps), _) => TokenCaps::Each(caps),
            (None, Some(cap)) => TokenCaps::Same(cap),
            (None, None) => TokenCaps::None,
        };
        PlanRequest { max_tokens: self.max_tokens, partial, rows: self.rows.as_deref(), num_tokens }
    }
}

impl PyBatch {
    /// The object that was admitted to a row which `sequence` has just left.
    fn take_admitted(
        &self,
        py: Python<'_>,
        row: usize,
        sequence: kvfolio::Sequence,
    ) -> PyResult<Py<PySequence>> {
        let admitted = self.admitted.lock().get_mut(row).and_then(Option::take);
        // Without the GIL, another thread may have put a new owner's object there by now.
        match admitted.filter(|admitted| admitted.get().0.is_same(&sequence)) {
            Some(admitted) => Ok(admitted),
            None => Py::new(py, PySequence(sequence)),
        }
    }
}

#[pymethods]
impl PyBatch {
    #[new]
    #[pyo3(signature = (pool, *, max_sequences, max_tokens_per_sequence))]
    fn new(
        pool: Any<'_, '_>,
        max_sequences: Any<'_, '_>,
        max_tokens_per_sequence: Any<'_, '_>,
    ) -> Result<Self> {
        let pool = pool.cast::<PyBlockPool>().map_err(|_| {
            PyTypeError::new_err(format!("pool must be a BlockPool, not {}", arguments::type_name(pool)))
        })?;
        let max_sequences = arguments::count("max_sequences", max_sequences, 1)?;
        let max_tokens = arguments::count("max_tokens_per_sequence", max_tokens_per_sequence, 1)?;
        let batch = Batch::new(&pool.get().0, max_sequences, max_tokens)?;
        Ok(Self { batch, pool: pool.clone().unbind(), admitted: Mutex::default() })
    }

    /// The pool whose sequences it runs.
    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<PyBlockPool> {
        self.pool.clone_ref(py)
    }

    /// How many rows there are.
    #[getter]
    fn max_sequences(&self) -> usize {
        self.batch.max_sequences()
    }

    /// The most tokens that a sequence may have in this batch.
    #[getter]
    fn max_tokens_per_sequence(&self) -> usize {
        self.batch.max_tokens_per_sequence()
    }

    /// The rows that are taken, in admission order.
    #[getter]
    fn rows(&self) -> Result<Vec<usize>> {
        Ok(self.batch.rows()?)
    }

    /// Admit a sequence and hold what the cache has of it; the lowest free row is its own.
    ///
    /// At most num_tokens - 1 tokens are found, in whole blocks. Raises BatchFull, PlanInFlight, ValueError.
    fn add(&self, seq: Any<'_, '_>) -> Result<usize> {
        let sequence = PySequence::argument("seq", seq)?;
        let row = self.batch.add(&sequence.get().0)?;
        let mut admitted = self.admitted.lock();
        if admitted.len() <= row {
            admitted.resize_with(row + 1, || None);
        }
        let outdated = admitted[row].replace(sequence.clone().unbind());
        drop(admitted); // before the outdated object, whose end may run Python code
        drop(outdated);
        Ok(row)
    }

    /// Take a sequence out of its row; it keeps its blocks. Raises ValueError for a row without one.
    fn remove(&self, py: Python<'_>, row: Any<'_, '_>) -> Result<Py<PySequence>> {
        let row = arguments::count("row", row, 0)?;
        let sequence = self.batch.remove(row)?;
        Ok(self.take_admitted(py, row, sequence)?)
    }

    /// Take a sequence out of its row and drop its blocks; tokens stay, and published blocks stay findable.
    ///
    /// Raises ValueError for a row without one.
    fn preempt(&self, py: Python<'_>, row: Any<'_, '_>) -> Result<Py<PySequence>> {
        let row = arguments::count("row", row, 0)?;
        let sequence = self.batch.preempt(row)?;
        Ok(self.take_admitted(py, row, sequence)?)
    }

    /// Append one token to each of some rows, which are distinct. All or nothing.
    ///
    /// Raises ValueError for a row without a sequence, for another number of tokens, and beyond `max_tokens_per_sequence`.
    fn extend(&self, rows: Any<'_, '_>, token_ids: Any<'_, '_>) -> Result<()> {
        let rows = arguments::counts("rows", rows)?;
        Ok(self.batch.extend(&rows, &arguments::tokens("token_ids", token_ids)?)?)
    }

    /// Append one token whose id is not known yet to each of some rows, which are distinct. All or nothing.
    ///
    /// Raises ValueError for a row without a sequence, and beyond `max_tokens_per_sequence`.
    fn extend_unknown(&self, rows: Any<'_, '_>) -> Result<()> {
        Ok(self.batch.extend_unknown(&arguments::counts("rows", rows)?)?)
    }

    /// Row rows[i], by default i, goes on as a fork of row parents[i], all at once; other rows stay.
    ///
    /// Handles stay with their rows. For beam search. Raises PlanInFlight if a plan in flight names one of them, ValueError
    /// for a row without a sequence.
    #[pyo3(signature = (parents, rows = None))]
    fn reorder(&self, parents: Any<'_, '_>, rows: Option<Any<'_, '_>>) -> Result<()> {
        let parents = arguments::counts("parents", parents)?;
        Ok(self.batch.reorder(&parents, arguments::optional_counts("rows", rows)?.as_deref())?)
    }

    /// How many free blocks are missing for a plan of the same arguments; 0 means that it fits.
    ///
    /// Quarantined blocks do not count as free: they come with the end of the plans in flight. Raises ValueError as `plan`.
    #[pyo3(signature = (max_tokens = None, *, rows = None, num_tokens = None))]
    fn shortfall(
        &self,
        max_tokens: Option<Any<'_, '_>>,
        rows: Option<Any<'_, '_>>,
        num_tokens: Option<Any<'_, '_>>,
    ) -> Result<usize> {
        let request = Request::new(max_tokens, rows, num_tokens)?;
        Ok(self.batch.shortfall(&request.as_core(false))?)
    }

    /// Allocate for the next step: all of it or, if `partial`, the rows that fit.
    ///
    /// `rows` are served in the order given, by default all in admission order; each takes at most `num_tokens` (one number, or
    /// one a row) of its pending tokens, all together at most `max_tokens`. Raises OutOfBlocks, and has changed nothing then;
    /// ValueError for a row without a sequence or named twice, and for `max_tokens` below 1.
    ///
    /// `out` is memory of the caller's that all arrays are written into, padded; the plan's arrays are views of it then,
    /// and change with the next plan that is written there.
    ///
    /// Every plan has to be ended, best by `with`. One that is forgotten is rolled back when it is collected, with a
    /// ResourceWarning, which Python shows with `-W default` only.
    #[pyo3(signature = (max_tokens = None, partial = false, *, rows = None, num_tokens = None, out = None))]
    fn plan(
        &self,
        py: Python<'_>,
        max_tokens: Option<Any<'_, '_>>,
        partial: bool,
        rows: Option<Any<'_, '_>>,
        num_tokens: Option<Any<'_, '_>>,
        out: Option<Any<'_, '_>>,
    ) -> Result<PyPlan> {
        let request = Request::new(max_tokens, rows, num_tokens)?;
        let request = request.as_core(partial);
        let pool = self.pool.clone_ref(py);
        let Some(out) = out.filter(|out| !out.is_none()) else {
            return Ok(PyPlan::new(py, self.batch.plan(&request)?, pool, None)?);
        };
        let buffers = out.cast::<PyPlanBuffers>().map_err(|_| {
            PyTypeError::new_err(format!("out must be PlanBuffers, not {}", arguments::type_name(out)))
        })?;
        buffers.get().check_batch(self)?;
        let plan = self.batch.plan_into(&request, &mut buffers.get().table())?;
        buffers.get().fill(py, plan.arrays());
        Ok(PyPlan::new(py, plan, pool, Some(buffers.clone().unbind()))?)
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        refuse_pickling(&slf.get_type())
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.batch)
    }
}
