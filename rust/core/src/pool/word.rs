//! One word a block: who uses it, and whether it can be found.
//!
//! ```text
//!  63     62           61          60  59      40  39      20  19         0
//! | unused | publishing | published |   | holds   |  lent     |  owned     |
//! ```
//!
//! A block has three kinds of *claims*: references that a table *owns*, references *lent* to the caller by
//! id, and *holds* of plans in flight, on a block that was let go while the plan names it. Everything that
//! decides a block's state stands in this one word, so every change of state is one atomic operation:
//!
//! | owned + lent | holds | published | state       |
//! |--------------|-------|-----------|-------------|
//! | 0            | 0     | no        | blank       |
//! | 0            | 0     | yes       | idle        |
//! | 0            | > 0   | any       | quarantined |
//! | > 0          | any   | any       | referenced  |
//!
//! *Publishing* is set while somebody writes the block's key: of two holders of one block that would
//! publish it, one does. Nobody waits for the bit; it only makes the other one pass.
//!
//! Each ordering is argued in `docs/memory-ordering.md`. In short, as in `std::sync::Arc`: who gives up a
//! claim releases, who may be the first to use the block afterwards acquires.

use crate::sync::{AtomicU64, Ordering};

const FIELD: u32 = 20;
const OWNED: u64 = 1;
const LENT: u64 = 1 << FIELD;
const HOLD: u64 = 1 << (2 * FIELD);
const COUNT: u64 = (1 << FIELD) - 1;
const PUBLISHED: u64 = 1 << (3 * FIELD);
const PUBLISHING: u64 = PUBLISHED << 1;

/// The most claims, and so the most references, that one block can have: then each field has room for all.
pub(super) const MAX_REFERENCES: u32 = COUNT as u32;

/// A block's state at one moment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
    pub(super) fn owned(self) -> u32 {
        (self.0 & COUNT) as u32
    }

    pub(super) fn lent(self) -> u32 {
        (self.0 >> FIELD & COUNT) as u32
    }

    pub(super) fn holds(self) -> u32 {
        (self.0 >> (2 * FIELD) & COUNT) as u32
    }

    pub(super) fn references(self) -> u32 {
        self.owned() + self.lent()
    }

    fn claims(self) -> u32 {
        self.references() + self.holds()
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

    /// Whether anybody but one user has a claim.
    pub(super) fn is_shared(self) -> bool {
        self.claims() > 1
    }

    /// Whether `n` more claims can be counted.
    pub(super) fn has_room_for(self, n: u32) -> bool {
        self.claims() + n <= MAX_REFERENCES
    }
}

/// What a user has on a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Claim {
    /// A reference of a table's.
    Owned,
    /// A reference lent to the caller.
    Lent,
    /// A plan's in flight.
    Hold,
}

impl Claim {
    fn one(self) -> u64 {
        match self {
            Self::Owned => OWNED,
            Self::Lent => LENT,
            Self::Hold => HOLD,
        }
    }

    fn count(self, word: Word) -> u32 {
        match self {
            Self::Owned => word.owned(),
            Self::Lent => word.lent(),
            Self::Hold => word.holds(),
        }
    }
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
    /// It would become idle, for which the caller was not prepared; nothing was changed.
    WouldBeIdle,
    /// There is no such claim; nothing was changed.
    Missing,
}

impl Left {
    /// By how much the number of quarantined blocks changes.
    pub(super) fn quarantined(self, claim: Claim) -> isize {
        match (claim, self) {
            (Claim::Owned | Claim::Lent, Self::Quarantined) => 1,
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

    /// The first claim on a blank block that is the caller's alone.
    pub(super) fn claim_blank(&self, claim: Claim) {
        self.0.store(claim.one(), Ordering::Relaxed);
    }

    /// The first claim on an idle block, which cannot be found any more; false if it is not idle.
    pub(super) fn claim_idle(&self, claim: Claim) -> bool {
        self.0.compare_exchange(PUBLISHED, claim.one(), Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// One more claim for somebody who has found the block as `seen`; the word as it is if that is not so.
    pub(super) fn claim_found(&self, claim: Claim, seen: Word) -> Result<(), Word> {
        self.0
            .compare_exchange_weak(seen.0, seen.0 + claim.one(), Ordering::Acquire, Ordering::Acquire)
            .map_or_else(|now| Err(Word(now)), |_| Ok(()))
    }

    /// One more claim on a block that is referenced, as it stays while this happens; else the word that
    /// forbade it.
    pub(super) fn claim_referenced(&self, claim: Claim) -> Result<(), Word> {
        let more = |word: Word| word.references() > 0 && word.has_room_for(1);
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                more(Word(word)).then_some(word + claim.one())
            })
            .map_or_else(|word| Err(Word(word)), |_| Ok(()))
    }

    /// Take one claim away. `may_be_idle` says whether the caller is prepared for an idle block.
    pub(super) fn drop_claim(&self, claim: Claim, may_be_idle: bool) -> Left {
        let after = |word: Word| Word(word.0 - claim.one());
        let mut seen = Word(self.0.load(Ordering::Acquire));
        loop {
            if claim.count(seen) == 0 {
                return Left::Missing;
            }
            if after(seen).is_idle() && !may_be_idle {
                return Left::WouldBeIdle;
            }
            match self.0.compare_exchange_weak(seen.0, after(seen).0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => seen = Word(now),
            }
        }
        match after(seen) {
            left if left.is_idle() => Left::Idle,
            left if left.is_blank() => Left::Blank,
            left if left.is_quarantined() && claim != Claim::Hold => Left::Quarantined,
            _ => Left::InUse,
        }
    }

    /// A claim becomes one of another kind; false if there is none of the first.
    pub(super) fn convert(&self, from: Claim, to: Claim) -> bool {
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                (from.count(Word(word)) > 0).then(|| word - from.one() + to.one())
            })
            .is_ok()
    }

    /// A table's reference becomes a hold; true if the block is quarantined by it.
    pub(super) fn reference_to_hold(&self) -> bool {
        let before = Word(self.0.fetch_add(HOLD - OWNED, Ordering::Relaxed));
        debug_assert!(before.owned() > 0);
        before.references() == 1
    }

    /// The reference again that became a hold, which is still there; true if the block was quarantined. This
    /// may be one claim more than `has_room_for` allows; each field by itself still has room for it.
    pub(super) fn restore_reference(&self) -> bool {
        let before = Word(self.0.fetch_add(OWNED, Ordering::Relaxed));
        debug_assert!(before.holds() > 0 && before.references() < MAX_REFERENCES);
        before.is_quarantined()
    }

    /// Begin to publish the block; false if it is published or somebody else is at it.
    pub(super) fn begin_publishing(&self) -> bool {
        self.0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |word| {
                (word & (PUBLISHED | PUBLISHING) == 0).then_some(word | PUBLISHING)
            })
            .is_ok()
    }

    /// The key is written and in the index: it can be found from now on.
    pub(super) fn finish_publishing(&self) {
        self.0.fetch_xor(PUBLISHING | PUBLISHED, Ordering::Release);
    }

    /// It cannot be found any more; false if that was so already.
    pub(super) fn unpublish(&self) -> bool {
        Word(self.0.fetch_and(!PUBLISHED, Ordering::Acquire)).is_published()
    }

    /// It cannot be found any more, if it is as it was `seen`.
    pub(super) fn unpublish_if(&self, seen: Word) -> bool {
        self.0.compare_exchange(seen.0, seen.0 & !PUBLISHED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}
