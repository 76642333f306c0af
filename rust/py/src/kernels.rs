//! `attend`, `write` and `copy_blocks` on numpy arrays.
//!
//! What Python users see is `kvfolio.KVCache`, which has dealt with torch tensors and with arguments' kinds
//! before; bfloat16 arrives here as its bits. Memory is reached by address, not through `rust-numpy`'s borrows:
//! two batches may read and write different blocks of one array at the same time, which these would refuse.

use std::num::NonZeroUsize;

use half::{bf16, f16};
use kvfolio::kernels::{self, Element, KernelError, PagedView, PagedViewMut, Scoring, Step, TokenView};
use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{
    PyArrayDescrMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArray, PyUntypedArrayMethods, dtype,
};
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::arguments;

/// More are a mistake.
const MOST_THREADS: usize = 4096;

/// Calls `$body` with the type alias `$element` for the storage type that `$name` names.
macro_rules! with_element {
    ($name:expr, $element:ident => $body:expr) => {
        match $name {
            "float32" => {
                type $element = f32;
                $body
            }
            "float16" => {
                type $element = f16;
                $body
            }
            "bfloat16" => {
                type $element = bf16;
                $body
            }
            other => Err(PyValueError::new_err(format!(
                "dtype must be 'float32', 'float16' or 'bfloat16', not {other:?}"
            ))),
        }
    };
}

/// Attention of `q` to the keys and values that the plan's arrays name, into `out` and `lse`.
#[pyfunction]
#[pyo3(signature = (dtype, q, keys, values, out, lse, block_table, seq_lens, query_start_loc, *, scale,
                    sliding_window, logit_softcap, alibi_slopes, sinks, max_threads))]
#[expect(clippy::too_many_arguments, reason = "a kernel's, one Python caller")]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands over borrows of arrays")]
pub(crate) fn attend(
    py: Python<'_>,
    dtype: &str,
    q: &Bound<'_, PyAny>,
    keys: &Bound<'_, PyUntypedArray>,
    values: &Bound<'_, PyUntypedArray>,
    out: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    block_table: PyReadonlyArray2<'_, i32>,
    seq_lens: PyReadonlyArray1<'_, i32>,
    query_start_loc: PyReadonlyArray1<'_, i32>,
    scale: f32,
    sliding_window: Option<usize>,
    logit_softcap: Option<f32>,
    alibi_slopes: Option<PyReadonlyArray1<'_, f32>>,
    sinks: Option<PyReadonlyArray1<'_, f32>>,
    max_threads: Option<NonZeroUsize>,
) -> PyResult<()> {
    let table = block_table.as_array();
    let rows: Option<Vec<&[i32]>> = table.outer_iter().map(|row| row.to_slice()).collect();
    let rows =
        rows.ok_or_else(|| PyValueError::new_err("block_table must have adjacent cells in each row"))?;
    let step = Step {
        block_table: &rows,
        seq_lens: seq_lens.as_slice()?,
        query_start_loc: query_start_loc.as_slice()?,
    };
    let scoring = Scoring {
        scale,
        sliding_window,
        logit_softcap,
        alibi_slopes: alibi_slopes.as_ref().map(PyReadonlyArray1::as_slice).transpose()?,
        sinks: sinks.as_ref().map(PyReadonlyArray1::as_slice).transpose()?,
    };
    with_element!(dtype, E => {
        let q = token_view::<E>("q", q)?;
        let (keys, values) = (paged_view::<E>("keys", keys)?, paged_view::<E>("values", values)?);
        // SAFETY: `KVCache.attend` has just made both arrays for this call, so nobody else knows them.
        let (out, lse) = unsafe {
            (dense_mut::<E>("out", out)?, lse.map(|lse| dense_mut::<f32>("lse", lse)).transpose()?)
        };
        let work = || kernels::attend(&q, &keys, &values, &step, &scoring, out, lse);
        py.detach(|| limited(max_threads, work)).map_err(|error| to_python(&error))
    })
}

/// Instruction sets that this machine can run, the one in use last.
#[pyfunction]
pub(crate) fn cpu_capabilities() -> Vec<&'static str> {
    kernels::cpu_capabilities()
}

/// How many threads kernels use: what was set, else `KVFOLIO_NUM_THREADS` or `OMP_NUM_THREADS`, else one a CPU.
#[pyfunction]
pub(crate) fn get_num_threads() -> usize {
    kernels::num_threads()
}

/// Sets how many threads kernels use, from 1 to 4096; else ValueError.
#[pyfunction]
pub(crate) fn set_num_threads(num_threads: &Bound<'_, PyAny>) -> PyResult<()> {
    let found = arguments::count("num_threads", num_threads, 1)?;
    let count = NonZeroUsize::new(found).filter(|count| count.get() <= MOST_THREADS);
    let count = count.ok_or_else(|| {
        PyValueError::new_err(format!("num_threads must be between 1 and {MOST_THREADS}, not {found}"))
    })?;
    kernels::set_num_threads(count);
    Ok(())
}

/// Use the threads of the process's OpenMP runtime, given the address of its `GOMP_parallel`; 0: our own again.
#[pyfunction]
pub(crate) fn use_open_mp(address: usize) {
    // SAFETY: the address is not null. That it is this function's the package sees to, which looks it up by its name
    // in a runtime that stays loaded.
    let parallel = (address != 0)
        .then(|| unsafe { std::mem::transmute::<*const (), kernels::OpenMpParallel>(address as *const ()) });
    // SAFETY: as above.
    unsafe { kernels::use_open_mp(parallel) };
}

/// Reads all memory of some contiguous arrays, on all threads: what attention's bandwidth is held against.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands over borrows of arrays")]
pub(crate) fn read_memory(py: Python<'_>, arrays: Vec<PyReadonlyArray1<'_, u8>>) -> PyResult<u64> {
    let slices: Result<Vec<&[u8]>, _> = arrays.iter().map(PyReadonlyArray1::as_slice).collect();
    let slices = slices?;
    Ok(py.detach(|| kernels::read(&slices)))
}

fn limited<T>(max_threads: Option<NonZeroUsize>, work: impl FnOnce() -> T) -> T {
    match max_threads {
        Some(threads) => kernels::with_at_most(threads, work),
        None => work(),
    }
}

/// Puts `k` and `v` into the slots of `slot_mapping`.
#[pyfunction]
#[pyo3(signature = (dtype, k, v, keys, values, slot_mapping, *, max_threads))]
#[expect(clippy::too_many_arguments, reason = "a kernel's, one Python caller")]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands over borrows of arrays")]
pub(crate) fn write_kv(
    py: Python<'_>,
    dtype: &str,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    keys: &Bound<'_, PyUntypedArray>,
    values: &Bound<'_, PyUntypedArray>,
    slot_mapping: PyReadonlyArray1<'_, i64>,
    max_threads: Option<NonZeroUsize>,
) -> PyResult<()> {
    let slots = slot_mapping.as_slice()?;
    with_element!(dtype, E => {
        let (k, v) = (token_view::<E>("k", k)?, token_view::<E>("v", v)?);
        let (mut keys, mut values) = (paged_view_mut::<E>("keys", keys)?, paged_view_mut::<E>("values", values)?);
        py.detach(|| limited(max_threads, || kernels::write(&k, &v, &mut keys, &mut values, slots)))
            .map_err(|error| to_python(&error))
    })
}

/// Copies whole blocks, `(src, dst)` each, in every one of the arrays.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands over borrows of arrays")]
pub(crate) fn copy_blocks(
    py: Python<'_>,
    dtype: &str,
    arrays: Vec<Bound<'_, PyUntypedArray>>,
    copies: PyReadonlyArray2<'_, i32>,
) -> PyResult<()> {
    let copies = copies.as_array();
    if copies.shape()[1] != 2 {
        return Err(PyValueError::new_err(format!(
            "copies must be of shape [c, 2], not {:?}",
            copies.shape()
        )));
    }
    let copies: Vec<[i32; 2]> = copies.outer_iter().map(|pair| [pair[0], pair[1]]).collect();
    with_element!(dtype, E => {
        let views: PyResult<Vec<_>> = arrays.iter().map(|array| paged_view_mut::<E>("keys and values", array)).collect();
        let mut views = views?;
        py.detach(|| kernels::copy_blocks(&mut views, &copies)).map_err(|error| to_python(&error))
    })
}

fn to_python(error: &KernelError) -> PyErr {
    if error.is_out_of_range() {
        PyIndexError::new_err(error.to_string())
    } else {
        PyValueError::new_err(error.to_string())
    }
}

/// An array's address, shape and strides, found fit for views of `E` with adjacent elements in the last dimension.
struct Memory<E, const N: usize> {
    data: *mut E,
    shape: [usize; N],
    /// In elements.
    strides: [isize; N],
    is_writeable: bool,
}

/// What numpy calls a storage type.
trait NumpyElement: Element {
    type Bits: numpy::Element;
}

impl NumpyElement for f32 {
    type Bits = f32;
}

impl NumpyElement for f16 {
    type Bits = f16;
}

impl NumpyElement for bf16 {
    type Bits = u16;
}

/// Of a numpy array, or of a tensor: `(owner, address, shape, strides in elements)`, of which the package knows that it
/// is a tensor of this type.
fn memory<E: NumpyElement, const N: usize>(name: &str, array: &Bound<'_, PyAny>) -> PyResult<Memory<E, N>> {
    let Ok(array) = array.cast::<PyUntypedArray>() else {
        let (_, address, shape, strides): (Bound<'_, PyAny>, usize, [usize; N], [isize; N]) =
            array.extract()?;
        let data = address as *mut E;
        if !data.is_aligned() || (shape[N - 1] > 1 && strides[N - 1] != 1) {
            return Err(PyValueError::new_err(format!("{name} must be aligned, with head_dim contiguous")));
        }
        return Ok(Memory { data, shape, strides, is_writeable: true });
    };
    let expected = dtype::<E::Bits>(array.py());
    let found = array.dtype();
    if !found.is_equiv_to(&expected) {
        return Err(PyTypeError::new_err(format!("{name} must be of dtype {expected}, not {found}")));
    }
    let (Ok(shape), Ok(bytes)) =
        (<[usize; N]>::try_from(array.shape()), <[isize; N]>::try_from(array.strides()))
    else {
        return Err(PyValueError::new_err(format!("{name} must have {N} dimensions, not {}", array.ndim())));
    };
    // SAFETY: the pointer is that of a live array object, of which two plain fields are read under the GIL.
    let (data, flags) =
        unsafe { ((*array.as_array_ptr()).fields.data.cast::<E>(), (*array.as_array_ptr()).fields.flags) };
    let size = size_of::<E>() as isize;
    // Numpy leaves to chance the strides of empty arrays and of dimensions with one entry.
    let is_empty = shape.contains(&0);
    let matters = |axis: usize| shape[axis] > 1 && !is_empty;
    if !data.is_aligned() || (0..N).any(|axis| matters(axis) && bytes[axis] % size != 0) {
        return Err(PyValueError::new_err(format!("{name} must be aligned to its elements")));
    }
    if matters(N - 1) && bytes[N - 1] != size {
        return Err(PyValueError::new_err(format!(
            "{name} must be contiguous in its last dimension, head_dim"
        )));
    }
    let strides = std::array::from_fn(|axis| if matters(axis) { bytes[axis] / size } else { 0 });
    Ok(Memory { data, shape, strides, is_writeable: flags & NPY_ARRAY_WRITEABLE != 0 })
}

fn token_view<'a, E: NumpyElement>(name: &str, array: &'a Bound<'_, PyAny>) -> PyResult<TokenView<'a, E>> {
    let Memory { data, shape, strides: [token, head, _], .. } = memory::<E, 3>(name, array)?;
    // SAFETY: numpy or torch vouches for all elements within shape and strides, and `array` keeps them alive. That nobody
    // writes into an argument while the call runs is asked of the caller, as numpy does.
    Ok(unsafe { TokenView::from_raw_parts(data, shape, [token, head]) })
}

fn paged_view<'a, E: NumpyElement>(
    name: &str,
    array: &'a Bound<'_, PyUntypedArray>,
) -> PyResult<PagedView<'a, E>> {
    let Memory { data, shape, strides: [block, token, head, _], .. } = memory::<E, 4>(name, array)?;
    // SAFETY: as in `token_view`; rows that a plan reads belong to its sequences, and the pool's rules keep
    // other writers off these.
    Ok(unsafe { PagedView::from_raw_parts(data, shape, [block, token, head]) })
}

fn paged_view_mut<'a, E: NumpyElement>(
    name: &str,
    array: &'a Bound<'_, PyUntypedArray>,
) -> PyResult<PagedViewMut<'a, E>> {
    let Memory { data, shape, strides, is_writeable } = memory::<E, 4>(name, array)?;
    if !is_writeable {
        return Err(PyValueError::new_err(format!("{name} must be writable")));
    }
    if overlaps_itself(shape, strides) {
        return Err(PyValueError::new_err(format!(
            "{name} must have a place of its own for every element; strides {strides:?} do not give that for shape {shape:?}"
        )));
    }
    // SAFETY: as in `paged_view`; moreover the array is writable and does not overlap itself.
    Ok(unsafe { PagedViewMut::from_raw_parts(data, shape, [strides[0], strides[1], strides[2]]) })
}

/// Whether two indices might reach one element: false where each stride exceeds the reach of all smaller ones.
fn overlaps_itself<const N: usize>(shape: [usize; N], strides: [isize; N]) -> bool {
    let mut axes: Vec<(usize, usize)> = (0..N)
        .filter(|&axis| shape[axis] > 1)
        .map(
            |axis| {
                if axis == N - 1 { (1, shape[axis]) } else { (strides[axis].unsigned_abs(), shape[axis]) }
            },
        )
        .collect();
    axes.sort_unstable();
    let mut reach = 0;
    for (stride, size) in axes {
        if stride <= reach {
            return true;
        }
        reach += stride * (size - 1);
    }
    false
}

/// A result's memory.
///
/// # Safety
///
/// While the slice lives, nothing else may read or write the array.
#[expect(clippy::mut_from_ref, reason = "an array object is a reference to its memory")]
unsafe fn dense_mut<'a, E: NumpyElement>(name: &str, array: &'a Bound<'_, PyAny>) -> PyResult<&'a mut [E]> {
    let dense = |shape: &[usize], strides: &[isize]| {
        let mut expected = 1;
        shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let is_dense = size <= 1 || stride == expected;
            expected *= size as isize;
            is_dense
        })
    };
    let is_matrix = array.cast::<PyUntypedArray>().is_ok_and(|array| array.ndim() == 2);
    let (data, len, is_dense, is_writeable) = if is_matrix {
        let Memory { data, shape, strides, is_writeable } = memory::<E, 2>(name, array)?;
        (data, shape.iter().product(), dense(&shape, &strides), is_writeable)
    } else {
        let Memory { data, shape, strides, is_writeable } = memory::<E, 3>(name, array)?;
        (data, shape.iter().product(), dense(&shape, &strides), is_writeable)
    };
    if len == 0 {
        return Ok(&mut []);
    }
    if !is_dense {
        return Err(PyValueError::new_err(format!("{name} must be C-contiguous")));
    }
    if !is_writeable {
        return Err(PyValueError::new_err(format!("{name} must be writable")));
    }
    // SAFETY: a contiguous, aligned and writable array has `len` adjacent elements, which `array` keeps alive; the
    // caller keeps others off it.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
}
