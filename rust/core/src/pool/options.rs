//! How a pool is to work, chosen when it is made.

use std::{fmt, str::FromStr};

use crate::error::{Error, Result};

/// Which idle block gives way first when a block is wanted and none is blank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EvictionPolicy {
    /// The least recently released; of one release the deepest.
    #[default]
    Lru,
    /// The least recently released of those that were never hit, or of those that were: of whichever log is longer
    /// than a share that adapts to what was evicted too early.
    Adaptive,
}

impl EvictionPolicy {
    /// All there are, the default first.
    pub const ALL: &[Self] = &[Self::Lru, Self::Adaptive];

    /// What it is called where it is chosen by name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Adaptive => "adaptive",
        }
    }
}

impl fmt::Display for EvictionPolicy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for EvictionPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let named = Self::ALL.iter().find(|policy| policy.name() == name);
        named.copied().ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|policy| format!("{:?}", policy.name())).collect();
            Error::argument("eviction", format_args!("one of {}", names.join(", ")), format_args!("{name:?}"))
        })
    }
}

/// What may be left out when a pool is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Whether what was computed can be found again.
    pub prefix_cache: bool,
    /// Which idle block gives way first.
    pub eviction: EvictionPolicy,
    /// Whether what can be found is noted for a follower: see [`BlockPool::events`](super::BlockPool::events).
    pub events: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { prefix_cache: true, eviction: EvictionPolicy::default(), events: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_chosen_by_its_name() {
        for policy in EvictionPolicy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(*policy));
        }
        let refused = "LRU".parse::<EvictionPolicy>().map_err(|error| error.to_string());
        assert!(refused.is_err_and(
            |text| text.starts_with("eviction must be one of \"lru\"") && text.ends_with(", not \"LRU\"")
        ));
    }
}
