//! `kvfolio.Context`.

use kvfolio::{Context, Extra};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::{PyBytes, PyString, PyTuple},
};

use crate::{
    arguments::{self, Any},
    errors::Result,
};

/// All that KV depends on besides the tokens; equal tokens under unequal contexts never match.
///
/// `tenant` is for the server to set, `salt` for the request. `extras` are (start, stop, digest: bytes): what the positions
/// start <= t < stop hold that the token ids do not tell, such as a picture. An extra belongs to every block that it
/// touches, placed relative to that block.
#[pyclass(name = "Context", module = "kvfolio", frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct PyContext(pub(crate) Context);

fn text(name: &str, value: Option<Any<'_, '_>>) -> PyResult<String> {
    let Some(value) = value else {
        return Ok(String::new());
    };
    let text = value.cast::<PyString>().map_err(|_| {
        PyTypeError::new_err(format!("{name} must be a str, not {}", arguments::type_name(value)))
    })?;
    let text = text.to_str().map_err(|error| {
        PyValueError::new_err(format!("{name} must be text that UTF-8 can encode: {error}"))
    })?;
    Ok(text.to_owned())
}

/// `[(start, stop, digest: bytes), ...]`, sorted by start.
pub(crate) fn extras(value: Option<Any<'_, '_>>) -> Result<Vec<Extra>> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let mut extras = Vec::new();
    let items = value.try_iter().map_err(|_| {
        let came = arguments::type_name(value);
        PyTypeError::new_err(format!("extras must be an iterable of (start, stop, digest), not {came}"))
    })?;
    for item in items {
        let item = item?;
        let shape = || {
            let came = arguments::shown(&item);
            PyTypeError::new_err(format!("extras must hold (start, stop, digest), not {came}"))
        };
        let (start, stop, digest): (Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>) =
            item.extract().map_err(|_| shape())?;
        let digest = digest.cast::<PyBytes>().map_err(|_| {
            let came = arguments::type_name(&digest);
            PyTypeError::new_err(format!("extras must hold bytes as digest, not {came}"))
        })?;
        let start = arguments::count("extras start", &start, 0)?;
        let stop = arguments::count("extras stop", &stop, 0)?;
        extras.push(Extra::new(start, stop, digest.as_bytes())?);
    }
    extras.sort();
    Ok(extras)
}

#[pymethods]
impl PyContext {
    #[new]
    #[pyo3(signature = (model = None, adapter = None, tenant = None, salt = None, extras = None))]
    fn new(
        model: Option<Any<'_, '_>>,
        adapter: Option<Any<'_, '_>>,
        tenant: Option<Any<'_, '_>>,
        salt: Option<Any<'_, '_>>,
        extras: Option<Any<'_, '_>>,
    ) -> Result<Self> {
        let extras = self::extras(extras)?;
        let mut context = Context::default().with_extras(extras);
        context.model = text("model", model)?;
        context.adapter = text("adapter", adapter)?;
        context.tenant = text("tenant", tenant)?;
        context.salt = text("salt", salt)?;
        Ok(Self(context))
    }

    /// The model, its revision and quantisation.
    #[getter]
    fn model(&self) -> &str {
        &self.0.model
    }

    /// The adapter and its version.
    #[getter]
    fn adapter(&self) -> &str {
        &self.0.adapter
    }

    /// Who may share.
    #[getter]
    fn tenant(&self) -> &str {
        &self.0.tenant
    }

    /// A secret that keeps a cache apart within its tenant.
    #[getter]
    fn salt(&self) -> &str {
        &self.0.salt
    }

    /// Sorted tuple of (start, stop, digest).
    #[getter]
    fn extras<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let extra = |extra: &Extra| (extra.start(), extra.stop(), PyBytes::new(py, extra.digest()));
        PyTuple::new(py, self.0.extras().iter().map(extra))
    }

    fn __getnewargs__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(&str, &str, &str, &str, Bound<'py, PyTuple>)> {
        Ok((self.model(), self.adapter(), self.tenant(), self.salt(), self.extras(py)?))
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (&self.0.model, &self.0.adapter, &self.0.tenant, &self.0.salt).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let Context { model, adapter, tenant, .. } = &self.0;
        // A salt is a secret, and does not belong into logs.
        let salt = if self.0.salt.is_empty() { "''" } else { "..." };
        let extras = self.0.extras().len();
        format!(
            "Context(model={model:?}, adapter={adapter:?}, tenant={tenant:?}, salt={salt}, {extras} extras)"
        )
    }
}
