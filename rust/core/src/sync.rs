//! Atomics and locks: those of the machine, or under `--cfg loom` those of the model checker, or under
//! `--cfg schedules` those of the machine with a point before each operation, where a test decides who goes on.

pub(crate) use imp::*;

#[cfg(not(any(loom, schedules)))]
mod imp {
    pub(crate) use std::{
        hint::spin_loop,
        sync::atomic::{
            AtomicBool, AtomicIsize, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        },
    };

    pub(crate) use parking_lot::{Mutex, MutexGuard};
}

#[cfg(loom)]
mod imp {
    pub(crate) use loom::{
        sync::{
            MutexGuard,
            atomic::{
                AtomicBool, AtomicIsize, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
            },
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

#[cfg(schedules)]
#[expect(dead_code, reason = "the types are alike, and not all of each is used")]
mod imp {
    use std::{cell::RefCell, panic::Location, rc::Rc, sync::atomic, time::Duration};

    pub(crate) use parking_lot::MutexGuard;
    pub(crate) use std::sync::atomic::Ordering;

    type Hook = Rc<dyn Fn(&'static Location<'static>)>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// What this thread calls from now on before each operation on an atomic, with where that is.
    #[cfg(test)]
    pub(crate) fn at_each_point(hook: impl Fn(&'static Location<'static>) + 'static) {
        HOOK.set(Some(Rc::new(hook)));
    }

    #[track_caller]
    pub(crate) fn point() {
        if let Some(hook) = HOOK.with_borrow(Clone::clone) {
            hook(Location::caller());
        }
    }

    #[track_caller]
    pub(crate) fn spin_loop() {
        point();
    }

    macro_rules! atomics {
        ($($name:ident: $value:ty { $($operation:ident)* })*) => { $(
            #[derive(Default, Debug)]
            pub(crate) struct $name(atomic::$name);

            impl $name {
                pub(crate) const fn new(value: $value) -> Self {
                    Self(atomic::$name::new(value))
                }

                #[track_caller]
                pub(crate) fn load(&self, order: Ordering) -> $value {
                    point();
                    self.0.load(order)
                }

                #[track_caller]
                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    point();
                    self.0.store(value, order);
                }

                $(
                    #[track_caller]
                    pub(crate) fn $operation(&self, value: $value, order: Ordering) -> $value {
                        point();
                        self.0.$operation(value, order)
                    }
                )*
            }
        )* };
    }

    atomics! {
        AtomicBool: bool { swap }
        AtomicU8: u8 {}
        AtomicU32: u32 {}
        AtomicU64: u64 { swap fetch_add fetch_sub fetch_and fetch_or fetch_xor fetch_max }
        AtomicUsize: usize { fetch_add fetch_sub }
        AtomicIsize: isize { fetch_add fetch_sub }
    }

    macro_rules! exchanges {
        ($($name:ident: $value:ty)*) => { $(
            impl $name {
                #[track_caller]
                pub(crate) fn compare_exchange(
                    &self,
                    old: $value,
                    new: $value,
                    order: Ordering,
                    failed: Ordering,
                ) -> Result<$value, $value> {
                    point();
                    self.0.compare_exchange(old, new, order, failed)
                }

                /// A load and exchanges, with a point before each.
                #[track_caller]
                pub(crate) fn fetch_update(
                    &self,
                    order: Ordering,
                    failed: Ordering,
                    mut update: impl FnMut($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    let mut old = self.load(failed);
                    while let Some(new) = update(old) {
                        match self.compare_exchange(old, new, order, failed) {
                            Ok(old) => return Ok(old),
                            Err(now) => old = now,
                        }
                    }
                    Err(old)
                }
            }
        )* };
    }

    exchanges! { AtomicU64: u64 AtomicUsize: usize }

    impl AtomicU64 {
        #[track_caller]
        pub(crate) fn compare_exchange_weak(
            &self,
            old: u64,
            new: u64,
            order: Ordering,
            failed: Ordering,
        ) -> Result<u64, u64> {
            self.compare_exchange(old, new, order, failed)
        }
    }

    #[derive(Default, Debug)]
    pub(crate) struct AtomicPtr<T>(atomic::AtomicPtr<T>);

    impl<T> AtomicPtr<T> {
        pub(crate) const fn new(value: *mut T) -> Self {
            Self(atomic::AtomicPtr::new(value))
        }

        #[track_caller]
        pub(crate) fn load(&self, order: Ordering) -> *mut T {
            point();
            self.0.load(order)
        }

        #[track_caller]
        pub(crate) fn swap(&self, value: *mut T, order: Ordering) -> *mut T {
            point();
            self.0.swap(value, order)
        }
    }

    /// A mutex that is waited for point by point, so that who waits lets others go on.
    pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(parking_lot::Mutex::new(value))
        }

        #[track_caller]
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            loop {
                if let Some(guard) = self.try_lock() {
                    return guard;
                }
            }
        }

        #[track_caller]
        pub(crate) fn try_lock_for(&self, _patience: Duration) -> Option<MutexGuard<'_, T>> {
            self.try_lock()
        }

        #[track_caller]
        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            point();
            self.0.try_lock()
        }
    }
}
