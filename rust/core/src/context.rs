//! What K and V depend on besides the tokens.

use std::sync::Arc;

use crate::error::{Error, Result};

/// A span of positions that holds something which the token ids do not tell, such as a picture.
///
/// It belongs to every block that it touches, together with where it lies as seen from that block; a
/// block in front of it is not concerned.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extra {
    pub(crate) start: usize,
    pub(crate) stop: usize,
    pub(crate) digest: Arc<[u8]>,
}

impl Extra {
    /// An extra at the positions `start <= t < stop`, told apart from others by `digest`.
    pub fn new(start: usize, stop: usize, digest: &[u8]) -> Result<Self> {
        if stop <= start {
            return Err(Error::argument(
                "extras stop",
                format_args!("at least {}", start.saturating_add(1)),
                stop,
            ));
        }
        Ok(Self { start, stop, digest: digest.into() })
    }

    /// The first position.
    #[must_use]
    pub fn start(&self) -> usize {
        self.start
    }

    /// The position behind the last one.
    #[must_use]
    pub fn stop(&self) -> usize {
        self.stop
    }

    /// What tells it apart.
    #[must_use]
    pub fn digest(&self) -> &[u8] {
        &self.digest
    }
}

/// Everything besides the tokens that K and V depend on; equal tokens under unequal contexts never match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The model, its revision and quantisation.
    pub model: String,
    /// The adapter and its version; a new version is another adapter.
    pub adapter: String,
    /// Who may share: set by the server, never taken from a request.
    pub tenant: String,
    /// A secret of the request, which keeps its cache apart within its tenant.
    pub salt: String,
    extras: Vec<Extra>,
}

impl Context {
    /// The same context with these extras, in any order.
    #[must_use]
    pub fn with_extras(mut self, mut extras: Vec<Extra>) -> Self {
        extras.sort();
        self.extras = extras;
        self
    }

    /// The extras, sorted by where they start.
    #[must_use]
    pub fn extras(&self) -> &[Extra] {
        &self.extras
    }
}
