//! What happened since the pool was made.

use crate::sync::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters since the pool was made.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats { $($(#[$doc])* pub $name: u64),* }

        impl Stats {
            /// Names and values.
            #[must_use]
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }

        #[derive(Default)]
        pub(crate) struct Counters { $(pub(crate) $name: Counter),* }

        impl Counters {
            pub(super) fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.0.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters! {
    /// Blocks handed out.
    allocations,
    /// Idle blocks whose content was forgotten to hand them out again.
    evictions,
    /// Tokens that were found in the prefix cache instead of computed.
    hit_tokens,
    /// Tokens of sequences that were admitted with the right to be found.
    queried_tokens,
    /// Blocks copied before a write, because others used them too.
    copies,
    /// Blocks given up for an equal one that was published before.
    merges,
    /// Calls refused for want of free blocks.
    refusals,
    /// Of these, those that the end of plans in flight would have let through.
    refusals_quarantined,
    /// Of these, those that the whole pool would be too small for.
    refusals_never_fit,
}

/// Relaxed throughout: a counter orders nothing.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: usize) {
        if n > 0 {
            self.0.fetch_add(n as u64, Ordering::Relaxed);
        }
    }

    pub(crate) fn subtract(&self, n: usize) {
        self.0.fetch_sub(n as u64, Ordering::Relaxed);
    }
}
