//! Arguments as they come from Python: numbers, sequences of numbers, arrays. What is refused is named, with
//! what came and what is allowed.

use numpy::{
    Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::{
    exceptions::{PyIndexError, PyOverflowError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyBool, PyInt, PyList, PyTuple},
};

pub(crate) type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// The largest number that counts and positions may be.
const LARGEST: i64 = i64::MAX;

pub(crate) fn type_name(value: Any<'_, '_>) -> String {
    value.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string())
}

/// What came, as text; Python refuses to write out integers of thousands of digits.
pub(crate) fn shown(value: Any<'_, '_>) -> String {
    value.str().map_or_else(|_| format!("{} too long to print", type_name(value)), |text| text.to_string())
}

/// An integer that is no bool; `None` if it does not fit 64 bits.
pub(crate) fn integer(name: &str, value: Any<'_, '_>) -> PyResult<Option<i64>> {
    let refuse = || PyTypeError::new_err(format!("{name} must be an integer, not {}", type_name(value)));
    if value.is_instance_of::<PyBool>() {
        return Err(refuse());
    }
    let index = if value.is_instance_of::<PyInt>() {
        value.clone()
    } else {
        value.call_method0("__index__").map_err(|_| refuse())?
    };
    match index.extract::<i64>() {
        Ok(number) => Ok(Some(number)),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// An integer of at least `minimum`.
pub(crate) fn count(name: &str, value: Any<'_, '_>, minimum: i64) -> PyResult<usize> {
    match integer(name, value)? {
        Some(number) if number >= minimum => Ok(number as usize),
        Some(number) => {
            Err(PyValueError::new_err(format!("{name} must be at least {minimum}, not {number}")))
        }
        None => {
            let came = shown(value);
            Err(PyValueError::new_err(format!("{name} must be between {minimum} and {LARGEST}, not {came}")))
        }
    }
}

/// The same, or `None`.
pub(crate) fn optional_count(
    name: &str,
    value: Option<Any<'_, '_>>,
    minimum: i64,
) -> PyResult<Option<usize>> {
    value.filter(|value| !value.is_none()).map(|value| count(name, value, minimum)).transpose()
}

/// A position, which is outside if it is negative or beyond all that can be counted.
pub(crate) fn position(name: &str, value: Any<'_, '_>) -> PyResult<usize> {
    match integer(name, value)? {
        Some(number) if number >= 0 => Ok(number as usize),
        _ => {
            let came = shown(value);
            Err(PyIndexError::new_err(format!("{name} must be between 0 and {LARGEST}, not {came}")))
        }
    }
}

/// A flat sequence of integers: a list, a tuple, a range, or an array of any integer dtype and stride.
pub(crate) fn integers(name: &str, value: Any<'_, '_>) -> PyResult<Vec<i64>> {
    if let Some(numbers) = plain_array(value)? {
        return Ok(numbers);
    }
    if let Some(numbers) = plain_array::<i32>(value)? {
        return Ok(numbers.into_iter().map(i64::from).collect());
    }
    match listed(value) {
        Some(items) => match plain_integers(&items) {
            Some(numbers) => Ok(numbers),
            None => check_items(name, &items).and_then(|()| through_numpy(name, value)),
        },
        None => through_numpy(name, value),
    }
}

/// The items of an array of this very dtype, if they can be read where they lie: those of a field of packed
/// records are neither aligned nor a whole number of items apart.
fn plain_array<T: Copy + Element>(value: Any<'_, '_>) -> PyResult<Option<Vec<T>>> {
    let Ok(array) = value.cast::<PyArray1<T>>() else {
        return Ok(None);
    };
    if !array.data().is_aligned() || array.strides()[0] % size_of::<T>() as isize != 0 {
        return Ok(None);
    }
    Ok(Some(array.try_readonly()?.as_array().to_vec()))
}

/// The items of a list or tuple.
fn listed<'py>(value: Any<'_, 'py>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = value.cast::<PyList>() {
        Some(list.iter().collect())
    } else {
        Some(value.cast::<PyTuple>().ok()?.iter().collect())
    }
}

/// The same, if all are ints of at most 64 bits.
fn plain_integers(items: &[Bound<'_, PyAny>]) -> Option<Vec<i64>> {
    items.iter().map(|item| item.cast_exact::<PyInt>().ok()?.extract().ok()).collect()
}

/// Refuse what numpy would make numbers of: bools among integers, and integers of more than 64 bits, which
/// become floats.
fn check_items(name: &str, items: &[Bound<'_, PyAny>]) -> PyResult<()> {
    if items.iter().any(|item| item.extract::<bool>().is_ok()) {
        return Err(PyTypeError::new_err(format!("{name} must hold integers, not bool")));
    }
    if items.iter().all(Bound::is_exact_instance_of::<PyInt>) {
        items.iter().try_for_each(|item| long(name, item).map(drop))?;
    }
    Ok(())
}

fn long(name: &str, item: Any<'_, '_>) -> PyResult<i64> {
    item.extract().map_err(|_| {
        let came = shown(item);
        PyValueError::new_err(format!("{name} must hold integers from -2**63 to 2**63 - 1, not {came}"))
    })
}

fn through_numpy(name: &str, value: Any<'_, '_>) -> PyResult<Vec<i64>> {
    let py = value.py();
    let array = py.import("numpy")?.call_method1("asarray", (value,)).map_err(|error| {
        if error.is_instance_of::<PyValueError>(py) {
            let why = error.value(py);
            return PyValueError::new_err(format!("{name} must be a flat sequence of integers: {why}"));
        }
        error
    })?;
    let untyped = array.cast::<PyUntypedArray>()?;
    match untyped.ndim() {
        1 => {}
        0 => {
            let came = type_name(value);
            return Err(PyTypeError::new_err(format!(
                "{name} must be a flat sequence of integers, not {came}"
            )));
        }
        n => {
            let message =
                format!("{name} must be a flat sequence of integers, not an array of {n} dimensions");
            return Err(PyValueError::new_err(message));
        }
    }
    if untyped.len() == 0 {
        return Ok(Vec::new());
    }
    let kind = untyped.dtype().kind();
    if kind == b'i' || kind == b'u' && untyped.dtype().itemsize() < 8 {
        let wide = array.call_method1("astype", ("int64", "C"))?;
        return Ok(wide.extract::<PyReadonlyArray1<'_, i64>>()?.as_array().to_vec());
    }
    let items = array.call_method0("tolist")?;
    let items = items.cast::<PyList>()?;
    if kind == b'u' || kind == b'O' && items.iter().all(|item| item.is_exact_instance_of::<PyInt>()) {
        return items.iter().map(|item| long(name, &item)).collect();
    }
    Err(PyTypeError::new_err(format!("{name} must hold integers, not {}", untyped.dtype())))
}

/// Token ids; the core checks that none is negative.
pub(crate) fn tokens(name: &str, value: Any<'_, '_>) -> PyResult<Vec<i32>> {
    if let Some(tokens) = plain_array(value)? {
        return Ok(tokens);
    }
    let narrow = |token: i64| {
        i32::try_from(token).map_err(|_| {
            PyValueError::new_err(format!("{name} must hold token ids from 0 to {}, not {token}", i32::MAX))
        })
    };
    integers(name, value)?.into_iter().map(narrow).collect()
}

/// The same, read where they lie if they are an array of int32.
pub(crate) fn with_tokens<R>(name: &str, value: Any<'_, '_>, work: impl FnOnce(&[i32]) -> R) -> PyResult<R> {
    if let Ok(array) = value.cast::<PyArray1<i32>>()
        && array.data().is_aligned()
        // SAFETY: it is aligned and, or there is no slice, contiguous. This thread is attached and runs no
        // Python code until the work is done; what other threads without the GIL write meanwhile is, as with
        // numpy's own functions, theirs to keep apart.
        && let Ok(tokens) = unsafe { array.as_slice() }
    {
        return Ok(work(tokens));
    }
    Ok(work(&tokens(name, value)?))
}

/// A flat sequence of integers of at least 0.
pub(crate) fn counts(name: &str, value: Any<'_, '_>) -> PyResult<Vec<usize>> {
    let natural = |number: i64| {
        usize::try_from(number).map_err(|_| {
            PyValueError::new_err(format!("{name} must hold numbers of at least 0, not {number}"))
        })
    };
    integers(name, value)?.into_iter().map(natural).collect()
}

/// The same, or `None`.
pub(crate) fn optional_counts(name: &str, value: Option<Any<'_, '_>>) -> PyResult<Option<Vec<usize>>> {
    value.filter(|value| !value.is_none()).map(|value| counts(name, value)).transpose()
}

/// Whether a value is one number rather than a sequence of them.
pub(crate) fn is_number(value: Any<'_, '_>) -> bool {
    value.is_instance_of::<PyInt>()
        || value.cast::<PyUntypedArray>().map_or_else(
            |_| value.hasattr("__index__").unwrap_or(false) && !value.hasattr("__len__").unwrap_or(true),
            |array| array.ndim() == 0,
        )
}
