//! Kernels that read block tables.
