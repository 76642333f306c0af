//! One word a block: who uses it, and whether it can be found.
//!
//! ```text
//!  63            32 31      25   24    23              0
//! |  holds         |  unused | published |  references   |
//! ```
//!
//! A *reference* is a table's or was lent to the caller. A *hold* is a plan's in flight, on a block that
//! was let go while the plan names it. Everything that decides a block's state stands in this one word, so
//! every change of state is one atomic operation:
//!
//! | references | holds | published | state       |
//! |------------|-------|-----------|-------------|
//! | 0          | 0     | no        | blank       |
//! | 0          | 0     | yes       | idle        |
//! | 0          | > 0   | any       | quarantined |
//! | > 0        | any   | any       | referenced  |
//!
//! The published bit, and any change into or out of *idle*, belong to whoever has the cache locked;
//! everything else happens without a lock.
//!
//! Orderings: an operation that gives up a claim is a release and one that gains a claim is an acquire, so
//! that what the last user did to the block happens before what the next one does, as in `std::sync::Arc`.

use crate::sync::{AtomicU64, Ordering};

const REFERENCE: u64 = 1;
const REFERENCES: u64 = (1 << 24) - 1;
const PUBLISHED: u64 = 1 << 24;
const HOLD: u64 = 1 << 32;

/// The most references that one block can have.
pub(super) const MAX_REFERENCES: u32 = REFERENCES as u32;

/// A block's state at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word(u64);

impl Word {
    pub(super) fn references(self) -> u32 {
        (self.0 & REFERENCES) as u32
    }

    pub(super) fn holds(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(super) fn is_published(self) -> bool {
        self.0 & PUBLISHED != 0
    }

    pub(super) fn is_blank(self) -> bool {
        self.0 == 0
    }

    pub(super) fn is_idle(self) -> bool {
        self.0 == PUBLISHED
    }

    pub(super) fn is_quarantined(self) -> bool {
        self.references() == 0 && self.holds() > 0
    }

    /// Whether anybody but one user refers to the block or holds it.
    pub(super) fn is_shared(self) -> bool {
        u64::from(self.references()) + u64::from(self.holds()) > 1
    }

    /// Whether one more reference can be counted. Holds count too, since a rollback makes references of them.
    pub(super) fn is_countable(self) -> bool {
        u64::from(self.references()) + u64::from(self.holds()) < REFERENCES
    }

    /// Whether one reference or one hold is all there is.
    fn is_last(self) -> bool {
        !self.is_shared()
    }
}

/// What a user has on a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Claim {
    /// A table's, or lent to the caller.
    Reference,
    /// A plan's in flight.
    Hold,
}

/// What became of a block that a claim was taken from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Left {
    /// Others use it.
    InUse,
    /// Only plans in flight use it now; it was referenced before.
    Quarantined,
    /// Nobody uses it, and it cannot be found.
    Blank,
    /// Nobody uses it, and it can be found.
    Idle,
    /// It would become idle, which needs the cache locked; nothing was changed.
    NeedsCache,
}

impl Left {
    /// By how much the number of quarantined blocks changes.
    pub(super) fn quarantined(self, claim: Claim) -> isize {
        match (claim, self) {
            (Claim::Reference, Self::Quarantined) => 1,
            (Claim::Hold, Self::Blank | Self::Idle) => -1,
            _ => 0,
        }
    }
}

/// The atomic word of one block.
#[derive(Default)]
pub(super) struct BlockWord(AtomicU64);

impl BlockWord {
    pub(super) fn load(&self) -> Word {
        Word(self.0.load(Ordering::Acquire))
    }

    /// Try `change` until nobody else comes between; `None` from it gives up.
    fn update(&self, mut change: impl FnMut(Word) -> Option<u64>) -> Result<Word, Word> {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| change(Word(word)))
            .map(Word)
            .map_err(Word)
    }

    /// The first reference to a block that was just taken from the blank or the idle ones: it is ours alone.
    pub(super) fn set_referenced(&self) {
        self.0.store(REFERENCE, Ordering::Release);
    }

    /// One more reference if `allowed`; the word before, or the word that forbade it.
    pub(super) fn add_reference(&self, allowed: impl Fn(Word) -> bool) -> Result<Word, Word> {
        self.update(|word| (word.is_countable() && allowed(word)).then_some(word.0 + REFERENCE))
    }

    /// The reference again that became a hold, which is still there: so there is room to count it. Returns
    /// the word before.
    pub(super) fn restore_reference(&self) -> Word {
        let before = Word(self.0.fetch_add(REFERENCE, Ordering::AcqRel));
        debug_assert!(before.holds() > 0 && before.references() < MAX_REFERENCES);
        before
    }

    /// Take one claim away. `cache_locked` says whether the block may become idle by it.
    pub(super) fn drop_claim(&self, claim: Claim, cache_locked: bool) -> Left {
        let one = if claim == Claim::Reference { REFERENCE } else { HOLD };
        let needs_cache = |word: Word| word.is_last() && word.is_published() && !cache_locked;
        let Ok(before) = self.update(|word| (!needs_cache(word)).then(|| word.0 - one)) else {
            return Left::NeedsCache;
        };
        debug_assert!(if claim == Claim::Hold { before.holds() > 0 } else { before.references() > 0 });
        match Word(before.0 - one) {
            after if after.is_idle() => Left::Idle,
            after if after.is_blank() => Left::Blank,
            after if after.is_quarantined() && claim == Claim::Reference => Left::Quarantined,
            _ => Left::InUse,
        }
    }

    /// A reference becomes a hold; true if the block is quarantined by it. This cannot fail: there are fewer
    /// references than 2^24 and memory for fewer holds than 2^32.
    pub(super) fn reference_to_hold(&self) -> bool {
        let before = Word(self.0.fetch_add(HOLD - REFERENCE, Ordering::AcqRel));
        debug_assert!(before.references() > 0);
        before.references() == 1
    }

    /// With the cache locked: it can be found from now on.
    pub(super) fn set_published(&self) {
        self.0.fetch_or(PUBLISHED, Ordering::AcqRel);
    }

    /// With the cache locked: it cannot be found any more. Returns the word before.
    pub(super) fn clear_published(&self) -> Word {
        Word(self.0.fetch_and(!PUBLISHED, Ordering::AcqRel))
    }

    /// With the cache locked: it cannot be found any more, if it has one user alone.
    pub(super) fn clear_published_if_sole(&self) -> bool {
        self.update(|word| word.is_last().then_some(word.0 & !PUBLISHED)).is_ok()
    }
}
