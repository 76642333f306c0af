//! `kvfolio.Plan`.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use kvfolio::{Csr, Plan, PlanArrays};
use numpy::{
    Element, PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods,
    ndarray::{ArrayView1, ArrayView2, ShapeBuilder},
};
use pyo3::{exceptions::PyResourceWarning, prelude::*, types::PyBytes};

use crate::{
    arguments::{self, Any},
    arrays::read_only,
    errors::Result,
    plan_buffers::PyPlanBuffers,
    plan_message,
    pool::{PyBlockPool, refuse_pickling},
};

/// What a plan's numpy arrays are views of: as long as one of them lives, so do the arrays, and they are not
/// written again.
#[pyclass(frozen)]
struct ArraysOwner {
    _kept: Arc<PlanArrays>,
}

/// A step of a batch, of n rows and T tokens: arrays for the kernels, and two ways to end it.
///
/// The arrays are read-only and stay as they are for as long as anybody holds them. A plan commits or, on an exception,
/// rolls back at the end of `with`; one that is dropped without an end warns and is rolled back when its turn comes.
#[pyclass(name = "Plan", module = "kvfolio", frozen, weakref)]
pub(crate) struct PyPlan {
    plan: Plan,
    pool: Py<PyBlockPool>,
    owner: Py<ArraysOwner>,
    /// The caller's memory that the arrays lie in, if it is not the plan's own.
    out: Option<Py<PyPlanBuffers>>,
    /// `with` has given it up: it is rolled back when its turn comes, and nobody has forgotten it.
    given_up: AtomicBool,
}

impl PyPlan {
    pub(crate) fn new(
        py: Python<'_>,
        plan: Plan,
        pool: Py<PyBlockPool>,
        out: Option<Py<PyPlanBuffers>>,
    ) -> PyResult<Self> {
        let owner = Py::new(py, ArraysOwner { _kept: Arc::clone(plan.arrays()) })?;
        Ok(Self { plan, pool, owner, out, given_up: AtomicBool::new(false) })
    }

    fn arrays(&self) -> &PlanArrays {
        self.plan.arrays()
    }

    fn csr(&self) -> &Csr {
        match &self.out {
            None => self.arrays().csr(),
            Some(out) => {
                let table = out.get().table();
                self.arrays().csr_of(table.cells(), table.width())
            }
        }
    }

    fn view<'py, T: Element>(&self, py: Python<'py>, values: &[T]) -> Bound<'py, PyArray1<T>> {
        // SAFETY: `values` belongs to the arrays that the owner keeps alive, and that nobody changes while it
        // does. The view is made read-only before anybody has it.
        read_only(unsafe {
            PyArray1::borrow_from_array(&ArrayView1::from(values), self.owner.bind(py).clone().into_any())
        })
    }

    fn matrix<'py>(
        &self,
        py: Python<'py>,
        cells: &[i32],
        (rows, columns, stride): (usize, usize, usize),
    ) -> PyResult<Bound<'py, PyArray2<i32>>> {
        if rows * columns == 0 {
            return Ok(read_only(PyArray2::zeros(py, [rows, columns], false)));
        }
        let view = ArrayView2::from_shape((rows, columns).strides((stride, 1)), cells)
            .map_err(|error| pyo3::exceptions::PyRuntimeError::new_err(error.to_string()))?;
        // SAFETY: as in `view`.
        let array = unsafe { PyArray2::borrow_from_array(&view, self.owner.bind(py).clone().into_any()) };
        Ok(read_only(array))
    }
}

/// The first items of an array of the caller's, read-only.
fn first_items<'py, T: Element>(
    py: Python<'py>,
    array: &Py<PyArray1<T>>,
    n: usize,
) -> Bound<'py, PyArray1<T>> {
    let array = array.bind(py);
    // SAFETY: the memory is the array's, which the view keeps alive. The view is made read-only before anybody
    // has it; that what it shows changes with the next plan is what the caller asked for.
    read_only(unsafe {
        let items = std::slice::from_raw_parts(array.data(), n.min(array.len()));
        PyArray1::borrow_from_array(&ArrayView1::from(items), array.clone().into_any())
    })
}

macro_rules! array_getters {
    ($($(#[$doc:meta])* $name:ident: $item:ty),* $(,)?) => {
        #[pymethods]
        impl PyPlan {
            $($(#[$doc])*
            #[getter]
            fn $name<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<$item>> {
                let values = self.arrays().$name();
                match &self.out {
                    None => self.view(py, values),
                    Some(out) => first_items(py, &out.get().$name, values.len()),
                }
            })*
        }
    };
}

array_getters! {
    /// `int32[n]`: rows that have tokens in this step.
    rows: i32,
    /// `int32[T]`: input ids, -1 where unknown.
    token_ids: i32,
    /// `int64[T]`: positions of the tokens in their sequences.
    positions: i64,
    /// `int32[n + 1]`: where the tokens of each row begin.
    query_start_loc: i32,
    /// `int32[n]`: KV lengths, this step's tokens included.
    seq_lens: i32,
    /// `int64[T]`: where each token's K and V go.
    slot_mapping: i64,
    /// `int32[n]`: tokens in the last page of each row, 1 to block_size.
    last_page_len: i32,
    /// `int32[m]`: rows whose last token is in this step: they get a next one.
    logits_rows: i32,
    /// `int64[m]`: where, among the T tokens, their logits are.
    logits_indices: i64,
}

#[pymethods]
impl PyPlan {
    /// `int32[n, W]`: padded with the null block; rows may lie further apart than W.
    #[getter]
    fn block_table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let (cells, width, stride) = self.arrays().block_table();
        let num_rows = self.arrays().rows().len();
        let Some(out) = &self.out else { return self.matrix(py, cells, (num_rows, width, stride)) };
        let table = out.get().block_table.bind(py);
        // SAFETY: as in `first_items`; the view is within the array, of whose size the plan was made.
        Ok(read_only(unsafe {
            let shape = (num_rows, width).strides((table.shape()[1], 1));
            let view = ArrayView2::from_shape_ptr(shape, table.data());
            PyArray2::borrow_from_array(&view, table.clone().into_any())
        }))
    }

    /// `int32`: rows that a partial plan refused for want of blocks.
    #[getter]
    fn skipped<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.view(py, self.arrays().skipped())
    }

    /// `int32`: of the rows in `skipped`, those whose share of the plan exceeds the whole pool.
    #[getter]
    fn never_fit<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.view(py, self.arrays().never_fit())
    }

    /// `int32[c, 2]`: (source, target) blocks to copy before the step's writes.
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let copies = self.arrays().copies();
        self.matrix(py, copies.as_flattened(), (copies.len(), 2, 2))
    }

    /// `int32[u, 3]`: (row, logical block, block id) of the cells that differ from what earlier plans told.
    ///
    /// A mirror of [max_sequences, W] that starts as zeros and takes the updates of each plan holds its table.
    #[getter]
    fn table_updates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let updates = self.arrays().table_updates();
        self.matrix(py, updates.as_flattened(), (updates.len(), 3, 3))
    }

    /// `int32[n + 1]`: where the pages of each row begin in page_indices (FlashInfer).
    #[getter]
    fn page_indptr<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.view(py, &self.csr().indptr)
    }

    /// `int32`: the block ids of all rows, one row after the other (FlashInfer).
    #[getter]
    fn page_indices<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.view(py, &self.csr().indices)
    }

    /// The pool whose blocks it names.
    #[getter]
    fn pool(&self, py: Python<'_>) -> Py<PyBlockPool> {
        self.pool.clone_ref(py)
    }

    /// Whether it was rolled back: its blocks are others' now.
    #[getter]
    fn is_rolled_back(&self) -> bool {
        self.plan.is_rolled_back()
    }

    /// T, the tokens of this step.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.arrays().num_tokens()
    }

    /// The most tokens of a row in this step.
    #[getter]
    fn max_query_len(&self) -> usize {
        self.arrays().max_query_len()
    }

    /// The largest KV length.
    #[getter]
    fn max_seq_len(&self) -> usize {
        self.arrays().max_seq_len()
    }

    /// The step's K and V are written, or queued before whatever reads them: its tokens are computed.
    ///
    /// `num_accepted`, one number a row: only so many of its tokens stand, as with drafts; the rest and what was behind them
    /// was never there. Plans end in the order they were made: else PlanInFlight. StaleHandle if it has ended, ValueError
    /// for more than a row has in this step.
    #[pyo3(signature = (num_accepted = None))]
    fn commit(&self, num_accepted: Option<Any<'_, '_>>) -> Result<()> {
        let accepted = arguments::optional_counts("num_accepted", num_accepted)?;
        Ok(self.plan.commit(accepted.as_deref())?)
    }

    /// The step did not happen; later plans in flight lose their rows of the same sequences.
    ///
    /// Raises PlanInFlight if an earlier plan is, StaleHandle if it has ended.
    fn rollback(&self) -> Result<()> {
        Ok(self.plan.rollback()?)
    }

    /// Take the token sampled for each of logits_rows, before or after the commit; `bool[m]`: which were taken.
    ///
    /// It is appended, or becomes the id of a token that the loop ran ahead with. It is passed over where the sequence has
    /// ended, was changed before that place, or knows another token there, and everywhere after a rollback.
    fn extend<'py>(&self, py: Python<'py>, token_ids: Any<'_, 'py>) -> Result<Bound<'py, PyArray1<bool>>> {
        let taken = arguments::with_tokens("token_ids", token_ids, |tokens| -> Result<_> {
            let taken = PyArray1::zeros(py, [tokens.len()], false);
            // SAFETY: nobody else has the new array yet.
            let places = unsafe { taken.as_slice_mut() }.unwrap_or(&mut []);
            self.plan.extend_into(tokens, places)?;
            Ok(taken)
        })??;
        Ok(read_only(taken))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(&self, class: Any<'_, '_>, _value: Any<'_, '_>, _traceback: Any<'_, '_>) -> Result<()> {
        if self.plan.is_in_flight() {
            if class.is_none() {
                self.plan.commit(None)?;
            } else {
                // Relaxed: read by `drop`, when no other thread has the object any more.
                self.given_up.store(true, Ordering::Relaxed);
                self.plan.abandon();
            }
        }
        Ok(())
    }

    /// What it says, in a few bytes: for a TableMirror in another process, which makes all the arrays of it again.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &plan_message::encode(&self.plan))
    }

    /// It is pickled as a PlanMessage: the plan itself stays with its batch.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        Ok((py.import("kvfolio")?.getattr("PlanMessage")?, (self.to_bytes(py),)))
    }

    /// A plan has one end, and so no copies.
    fn __copy__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        refuse_pickling(&slf.get_type())
    }

    /// The same.
    fn __deepcopy__(slf: &Bound<'_, Self>, _memo: Any<'_, '_>) -> PyResult<Py<PyAny>> {
        refuse_pickling(&slf.get_type())
    }

    fn __repr__(&self) -> String {
        let arrays = self.arrays();
        let state = if self.plan.is_in_flight() { "in flight" } else { "ended" };
        format!(
            "Plan({} rows, {} tokens, {} copies, {state})",
            arrays.rows().len(),
            arrays.num_tokens(),
            arrays.copies().len()
        )
    }
}

impl Drop for PyPlan {
    fn drop(&mut self) {
        if !self.plan.is_in_flight() {
            return;
        }
        self.plan.abandon(); // first: what the warning becomes must not keep the plan in flight
        if *self.given_up.get_mut() {
            return;
        }
        Python::try_attach(|py| {
            let pending = PyErr::take(py);
            let category = py.get_type::<PyResourceWarning>();
            if let Err(error) =
                PyErr::warn(py, &category, c"a plan was dropped without commit or rollback", 1)
            {
                error.write_unraisable(py, None);
            }
            if let Some(pending) = pending {
                pending.restore(py);
            }
        });
    }
}
