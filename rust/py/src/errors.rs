//! The one place where errors of the core become Python exceptions.

use kvfolio::Error;
use pyo3::{
    call::PyCallArgs,
    exceptions::{PyIndexError, PyValueError},
    prelude::*,
};

/// An error of the core on its way to Python.
pub(crate) struct Raised(PyErr);

impl From<Raised> for PyErr {
    fn from(raised: Raised) -> Self {
        raised.0
    }
}

impl From<PyErr> for Raised {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

/// What a binding returns: arguments raise Python's errors, the core its own.
pub(crate) type Result<T> = std::result::Result<T, Raised>;

impl From<Error> for Raised {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let class = match error {
            Error::Argument(_) => return Self(PyValueError::new_err(message)),
            Error::Position(_) => return Self(PyIndexError::new_err(message)),
            Error::OutOfBlocks { needed, free, quarantined, ever_fits } => {
                return Self(Python::attach(|py| {
                    raise(py, "OutOfBlocks", (needed, free, quarantined, ever_fits))
                }));
            }
            Error::InvalidBlock(_) => "InvalidBlock",
            Error::StaleHandle(_) => "StaleHandle",
            Error::PlanInFlight(_) => "PlanInFlight",
            Error::BatchFull { .. } => "BatchFull",
            Error::ConcurrentUse(_) => "ConcurrentUse",
            Error::RefCountOverflow { .. } => "RefCountOverflow",
            Error::CorruptPool(_) => "CorruptPool",
            _ => "KVFolioError",
        };
        Self(Python::attach(|py| raise(py, class, (message,))))
    }
}

/// An exception of `kvfolio.errors`; or, should that be impossible, why.
fn raise<'py>(py: Python<'py>, class: &str, arguments: impl PyCallArgs<'py>) -> PyErr {
    let exception = || py.import("kvfolio.errors")?.getattr(class)?.call1(arguments);
    exception().map_or_else(|error| error, PyErr::from_value)
}
