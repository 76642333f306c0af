//! Arguments as they come from Python: numbers, sequences of numbers, arrays. What is refused is named, with
//! what came and what is allowed.

use numpy::{
    PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::{
    exceptions::{PyIndexError, PyOverflowError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyBool, PyInt, PyList, PyTuple},
};

pub(crate) type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// The largest number that counts and positions may be.
const LARGEST: i64 = i64::MAX;

fn type_name(value: Any<'_, '_>) -> String {
    value.get_type().name().map_or_else(|_| "?".into(), |name| name.to_string())
}

/// An integer that is no bool; `None` if it does not fit 64 bits.
fn integer(name: &str, value: Any<'_, '_>) -> PyResult<Option<i64>> {
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
        _ => {
            Err(PyValueError::new_err(format!("{name} must be between {minimum} and {LARGEST}, not {value}")))
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
        _ => Err(PyIndexError::new_err(format!("{name} must be at least 0, not {value}"))),
    }
}

/// A block id, not checked against any pool.
pub(crate) fn block_id(name: &str, value: Any<'_, '_>) -> PyResult<i64> {
    Ok(integer(name, value)?.unwrap_or(i64::MAX))
}

/// A flat sequence of integers: a list, a tuple, a range, or an array of any integer dtype and stride.
pub(crate) fn integers(name: &str, value: Any<'_, '_>) -> PyResult<Vec<i64>> {
    if let Ok(array) = value.cast::<PyArray1<i64>>() {
        return Ok(array.try_readonly()?.as_array().to_vec());
    }
    if let Ok(array) = value.cast::<PyArray1<i32>>() {
        return Ok(array.try_readonly()?.as_array().iter().copied().map(i64::from).collect());
    }
    match plain_integers(value) {
        Some(numbers) => Ok(numbers),
        None => through_numpy(name, value),
    }
}

/// The items of a list or tuple, if all are ints of at most 64 bits.
fn plain_integers(value: Any<'_, '_>) -> Option<Vec<i64>> {
    let number = |item: Bound<'_, PyAny>| item.cast_exact::<PyInt>().ok()?.extract().ok();
    if let Ok(list) = value.cast::<PyList>() {
        list.iter().map(number).collect()
    } else {
        value.cast::<PyTuple>().ok()?.iter().map(number).collect()
    }
}

fn through_numpy(name: &str, value: Any<'_, '_>) -> PyResult<Vec<i64>> {
    let py = value.py();
    let array = py.import("numpy")?.call_method1("asarray", (value,))?;
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
        let wide = array.call_method1("astype", ("int64",))?;
        return Ok(wide.extract::<PyReadonlyArray1<'_, i64>>()?.as_array().to_vec());
    }
    let items = array.call_method0("tolist")?;
    let items = items.cast::<PyList>()?;
    if kind == b'u' || kind == b'O' && items.iter().all(|item| item.is_exact_instance_of::<PyInt>()) {
        let too_long = |_| PyValueError::new_err(format!("{name} holds an integer of more than 63 bits"));
        return items.iter().map(|item| item.extract().map_err(too_long)).collect();
    }
    Err(PyTypeError::new_err(format!("{name} must hold integers, not {}", untyped.dtype())))
}

/// Token ids; the core checks that none is negative.
pub(crate) fn tokens(name: &str, value: Any<'_, '_>) -> PyResult<Vec<i32>> {
    if let Ok(array) = value.cast::<PyArray1<i32>>() {
        return Ok(array.try_readonly()?.as_array().to_vec());
    }
    let narrow = |token: i64| {
        i32::try_from(token).map_err(|_| {
            PyValueError::new_err(format!("{name} must hold token ids from 0 to {}, not {token}", i32::MAX))
        })
    };
    integers(name, value)?.into_iter().map(narrow).collect()
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
