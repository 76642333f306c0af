//! Arrays that go out to numpy.

use kvfolio::BlockId;
use numpy::{
    Element, PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods, npyffi::flags::NPY_ARRAY_WRITEABLE,
};
use pyo3::prelude::*;

/// Make an array read-only for good: who holds it has a snapshot.
pub(crate) fn read_only<'py, T: Element, D>(
    array: Bound<'py, numpy::PyArray<T, D>>,
) -> Bound<'py, numpy::PyArray<T, D>> {
    // SAFETY: the array object is alive, and while this thread is attached and has just made it nobody
    // else reads or writes its flags.
    unsafe { (*array.as_array_ptr()).fields.flags &= !NPY_ARRAY_WRITEABLE };
    array
}

/// An array of its own.
pub(crate) fn owned<T: Element>(py: Python<'_>, values: Vec<T>) -> Bound<'_, PyArray1<T>> {
    PyArray1::from_vec(py, values)
}

/// `int32[n]`.
pub(crate) fn block_ids<'py>(py: Python<'py>, blocks: &[BlockId]) -> Bound<'py, PyArray1<i32>> {
    PyArray1::from_iter(py, blocks.iter().map(|block| block.as_i32()))
}

/// `int32[c, 2]` of source and target.
pub(crate) fn copies(py: Python<'_>, copy: Option<(BlockId, BlockId)>) -> PyResult<Bound<'_, PyArray2<i32>>> {
    let flat: Vec<_> = copy.into_iter().flat_map(|(from, to)| [from.as_i32(), to.as_i32()]).collect();
    let rows = flat.len() / 2;
    PyArray1::from_vec(py, flat).reshape([rows, 2])
}
