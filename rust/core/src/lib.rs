//! The memory manager of the KV cache.
pub mod kernels;
