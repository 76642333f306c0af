//! Python bindings of kvfolio: one file per class, no logic of their own.

use pyo3::prelude::*;

mod kernels;

#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::kernels::{attend, copy_blocks, write_kv};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
