//! `kvfolio._native.PlanBuffers`: memory of the caller's that plans are written into.

use kvfolio::{OutTable, PlanArrays, TableMemory};
use numpy::{Element, PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods, npyffi::flags};
use parking_lot::{Mutex, MutexGuard};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};

use crate::{
    arguments::{self, Any},
    batch::PyBatch,
    errors::Result,
};

/// The caller's arrays, and which of their block table's cells are up to date.
///
/// `kvfolio.PlanBuffers` lays them out; see there.
#[pyclass(name = "PlanBuffers", module = "kvfolio._native", frozen, subclass, weakref)]
pub(crate) struct PyPlanBuffers {
    batch: Py<PyBatch>,
    pub(crate) rows: Py<PyArray1<i32>>,
    pub(crate) token_ids: Py<PyArray1<i32>>,
    pub(crate) positions: Py<PyArray1<i64>>,
    pub(crate) query_start_loc: Py<PyArray1<i32>>,
    pub(crate) seq_lens: Py<PyArray1<i32>>,
    pub(crate) slot_mapping: Py<PyArray1<i64>>,
    pub(crate) last_page_len: Py<PyArray1<i32>>,
    pub(crate) logits_rows: Py<PyArray1<i32>>,
    pub(crate) logits_indices: Py<PyArray1<i64>>,
    pub(crate) block_table: Py<PyArray2<i32>>,
    table: Mutex<OutTable>,
    pad_slot: i64,
    pad_seq_len: i32,
    pad_last_page_len: i32,
}

/// The cells of a numpy array that is kept.
struct ArrayMemory {
    _array: Py<PyArray2<i32>>,
    cells: *mut i32,
    len: usize,
}

// SAFETY: the array belongs to no thread, and it is read and written under the lock of the buffers alone.
unsafe impl Send for ArrayMemory {}
// SAFETY: as above.
unsafe impl Sync for ArrayMemory {}

impl TableMemory for ArrayMemory {
    fn cells(&self) -> &[i32] {
        // SAFETY: the array was seen to be contiguous and aligned, and is kept; it is a view of other memory,
        // which numpy does not resize. Whoever writes into it meanwhile was told that it is the plan's.
        unsafe { std::slice::from_raw_parts(self.cells, self.len) }
    }

    fn cells_mut(&mut self) -> &mut [i32] {
        // SAFETY: as above; it was seen to be writable.
        unsafe { std::slice::from_raw_parts_mut(self.cells, self.len) }
    }
}

fn writable<T: Element, D: numpy::ndarray::Dimension>(
    name: &str,
    array: Any<'_, '_>,
) -> PyResult<Py<numpy::PyArray<T, D>>> {
    let array = array.cast::<numpy::PyArray<T, D>>().map_err(|_| {
        let came = arguments::type_name(array);
        PyTypeError::new_err(format!(
            "{name} must be an array of the plan's dtype and dimensions, not {came}"
        ))
    })?;
    // SAFETY: the array object is alive.
    let is_writable = unsafe { (*array.as_array_ptr()).fields.flags } & flags::NPY_ARRAY_WRITEABLE != 0;
    if !array.is_c_contiguous() || !is_writable || !array.data().is_aligned() {
        return Err(PyValueError::new_err(format!("{name} must be contiguous, aligned and writable")));
    }
    Ok(array.clone().unbind())
}

#[pymethods]
impl PyPlanBuffers {
    #[new]
    #[pyo3(signature = (
        batch, *, rows, token_ids, positions, query_start_loc, seq_lens, slot_mapping, last_page_len, logits_rows,
        logits_indices, block_table, pad_slot, pad_seq_len, pad_last_page_len
    ))]
    #[expect(clippy::too_many_arguments, reason = "one for each array of a plan")]
    fn new(
        batch: Any<'_, '_>,
        rows: Any<'_, '_>,
        token_ids: Any<'_, '_>,
        positions: Any<'_, '_>,
        query_start_loc: Any<'_, '_>,
        seq_lens: Any<'_, '_>,
        slot_mapping: Any<'_, '_>,
        last_page_len: Any<'_, '_>,
        logits_rows: Any<'_, '_>,
        logits_indices: Any<'_, '_>,
        block_table: Any<'_, '_>,
        pad_slot: i64,
        pad_seq_len: i32,
        pad_last_page_len: i32,
    ) -> Result<Self> {
        let py = batch.py();
        let batch = batch.cast::<PyBatch>().map_err(|_| {
            PyTypeError::new_err(format!("batch must be a Batch, not {}", arguments::type_name(batch)))
        })?;
        let table: Py<PyArray2<i32>> = writable("block_table", block_table)?;
        let token_ids: Py<PyArray1<i32>> = writable("token_ids", token_ids)?;
        let (shape, num_tokens) = (table.bind(py).shape().to_vec(), token_ids.bind(py).len());
        let (cells, len) = (table.bind(py).data(), table.bind(py).len());
        let memory = ArrayMemory { _array: table.clone_ref(py), cells, len };
        let buffers = Self {
            batch: batch.clone().unbind(),
            rows: writable("rows", rows)?,
            token_ids,
            positions: writable("positions", positions)?,
            query_start_loc: writable("query_start_loc", query_start_loc)?,
            seq_lens: writable("seq_lens", seq_lens)?,
            slot_mapping: writable("slot_mapping", slot_mapping)?,
            last_page_len: writable("last_page_len", last_page_len)?,
            logits_rows: writable("logits_rows", logits_rows)?,
            logits_indices: writable("logits_indices", logits_indices)?,
            block_table: table,
            table: Mutex::new(OutTable::new(Box::new(memory), shape[0], shape[1], num_tokens)?),
            pad_slot,
            pad_seq_len,
            pad_last_page_len,
        };
        let lengths = [
            ("rows", buffers.rows.bind(py).len(), shape[0]),
            ("query_start_loc", buffers.query_start_loc.bind(py).len(), shape[0] + 1),
            ("seq_lens", buffers.seq_lens.bind(py).len(), shape[0]),
            ("last_page_len", buffers.last_page_len.bind(py).len(), shape[0]),
            ("logits_rows", buffers.logits_rows.bind(py).len(), shape[0]),
            ("logits_indices", buffers.logits_indices.bind(py).len(), shape[0]),
            ("positions", buffers.positions.bind(py).len(), num_tokens),
            ("slot_mapping", buffers.slot_mapping.bind(py).len(), num_tokens),
        ];
        match lengths.into_iter().find(|(_, came, needed)| came != needed) {
            Some((name, came, needed)) => {
                Err(PyValueError::new_err(format!("{name} must be of length {needed}, not {came}")).into())
            }
            None => Ok(buffers),
        }
    }

    /// The batch whose plans can be written here.
    #[getter]
    fn batch(&self, py: Python<'_>) -> Py<PyBatch> {
        self.batch.clone_ref(py)
    }

    /// Others have written into the block table: the next plan writes all of it.
    fn forget(&self) {
        self.table.lock().forget();
    }
}

impl PyPlanBuffers {
    pub(crate) fn check_batch(&self, batch: &PyBatch) -> PyResult<()> {
        if std::ptr::eq(self.batch.get(), batch) {
            return Ok(());
        }
        Err(PyValueError::new_err("out must be buffers of this batch, not of another"))
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, OutTable> {
        self.table.lock()
    }

    /// Write all but the block table, which the plan wrote itself.
    pub(crate) fn fill(&self, py: Python<'_>, arrays: &PlanArrays) {
        put(py, &self.rows, arrays.rows(), 0);
        put(py, &self.token_ids, arrays.token_ids(), 0);
        put(py, &self.positions, arrays.positions(), 0);
        put(py, &self.query_start_loc, arrays.query_start_loc(), arrays.num_tokens() as i32);
        put(py, &self.seq_lens, arrays.seq_lens(), self.pad_seq_len);
        put(py, &self.slot_mapping, arrays.slot_mapping(), self.pad_slot);
        put(py, &self.last_page_len, arrays.last_page_len(), self.pad_last_page_len);
        put(py, &self.logits_rows, arrays.logits_rows(), 0);
        put(py, &self.logits_indices, arrays.logits_indices(), 0);
    }
}

/// Write the values, and the padding behind them.
fn put<T: Element + Copy>(py: Python<'_>, array: &Py<PyArray1<T>>, values: &[T], padding: T) {
    let array = array.bind(py);
    // SAFETY: it was seen to be contiguous, aligned and writable, and this thread is attached; whoever else
    // reads or writes it was told that it is the plan's.
    let places = unsafe { std::slice::from_raw_parts_mut(array.data(), array.len()) };
    let (here, behind) = places.split_at_mut(values.len().min(places.len()));
    here.copy_from_slice(&values[..here.len()]);
    behind.fill(padding);
}
