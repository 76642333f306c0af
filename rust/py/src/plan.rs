//! `kvfolio.Plan`.

use std::sync::Arc;

use kvfolio::{Plan, PlanArrays};
use numpy::{
    Element, PyArray1, PyArray2,
    ndarray::{ArrayView1, ArrayView2, ShapeBuilder},
};
use pyo3::{exceptions::PyResourceWarning, prelude::*};

use crate::{
    arguments::{self, Any},
    arrays::{owned, read_only},
    errors::Result,
};

/// What a plan's numpy arrays are views of: as long as one of them lives, so do the arrays, and they are not
/// written again.
#[pyclass(frozen)]
struct ArraysOwner {
    _kept: Arc<PlanArrays>,
}

#[pyclass(name = "Plan", module = "kvfolio", frozen, weakref)]
pub(crate) struct PyPlan {
    plan: Plan,
    owner: Py<ArraysOwner>,
}

impl PyPlan {
    pub(crate) fn new(py: Python<'_>, plan: Plan) -> PyResult<Self> {
        let owner = Py::new(py, ArraysOwner { _kept: Arc::clone(plan.arrays()) })?;
        Ok(Self { plan, owner })
    }

    fn arrays(&self) -> &PlanArrays {
        self.plan.arrays()
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

macro_rules! array_getters {
    ($($name:ident: $item:ty),* $(,)?) => {
        #[pymethods]
        impl PyPlan {
            $(#[getter]
            fn $name<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<$item>> {
                self.view(py, self.arrays().$name())
            })*
        }
    };
}

array_getters! {
    rows: i32,
    token_ids: i32,
    positions: i64,
    query_start_loc: i32,
    seq_lens: i32,
    slot_mapping: i64,
    last_page_len: i32,
    logits_rows: i32,
    logits_indices: i64,
    skipped: i32,
    never_fit: i32,
}

#[pymethods]
impl PyPlan {
    #[getter]
    fn block_table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let (cells, width, stride) = self.arrays().block_table();
        self.matrix(py, cells, (self.arrays().rows().len(), width, stride))
    }

    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let copies = self.arrays().copies();
        self.matrix(py, copies.as_flattened(), (copies.len(), 2, 2))
    }

    #[getter]
    fn table_updates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let updates = self.arrays().table_updates();
        self.matrix(py, updates.as_flattened(), (updates.len(), 3, 3))
    }

    #[getter]
    fn page_indptr<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.view(py, &self.arrays().csr(self.plan.block_size()).indptr)
    }

    #[getter]
    fn page_indices<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.view(py, &self.arrays().csr(self.plan.block_size()).indices)
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.arrays().num_tokens()
    }

    #[getter]
    fn max_query_len(&self) -> usize {
        self.arrays().max_query_len()
    }

    #[getter]
    fn max_seq_len(&self) -> usize {
        self.arrays().max_seq_len()
    }

    #[pyo3(signature = (num_accepted = None))]
    fn commit(&self, num_accepted: Option<Any<'_, '_>>) -> Result<()> {
        let accepted = arguments::optional_counts("num_accepted", num_accepted)?;
        Ok(self.plan.commit(accepted.as_deref())?)
    }

    fn rollback(&self) -> Result<()> {
        Ok(self.plan.rollback()?)
    }

    fn extend<'py>(&self, py: Python<'py>, token_ids: Any<'_, 'py>) -> Result<Bound<'py, PyArray1<bool>>> {
        let tokens = arguments::tokens("token_ids", token_ids)?;
        Ok(read_only(owned(py, self.plan.extend(&tokens)?)))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(&self, class: Any<'_, '_>, _value: Any<'_, '_>, _traceback: Any<'_, '_>) -> Result<()> {
        if self.plan.is_in_flight() {
            if class.is_none() {
                self.plan.commit(None)?;
            } else {
                self.plan.abandon();
            }
        }
        Ok(())
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
