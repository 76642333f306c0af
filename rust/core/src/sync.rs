//! Atomics and locks: those of the machine, or under `--cfg loom` those of the model checker.

pub(crate) use imp::*;

#[cfg(not(loom))]
mod imp {
    pub(crate) use std::{
        hint::spin_loop,
        sync::atomic::{AtomicBool, AtomicIsize, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    };

    pub(crate) use parking_lot::{Mutex, MutexGuard};
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::{
        sync::{
            MutexGuard,
            atomic::{AtomicBool, AtomicIsize, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering},
        },
        thread::yield_now as spin_loop, // a model ends only if who waits lets others go on
    };

    /// loom's mutex, with the signatures of `parking_lot`'s.
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        #[expect(clippy::unwrap_used, reason = "a model that panicked has failed already")]
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }

        pub(crate) fn try_lock_for(&self, _patience: std::time::Duration) -> Option<MutexGuard<'_, T>> {
            self.try_lock()
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }
}
