//! The order in which idle blocks give way: a log of releases, read from its oldest end.
//!
//! Whoever leaves a block idle reserves the next *position* at the log's tail, notes it as the block's *place*,
//! and enters the block there. A block that is used again leaves its entry behind: an entry counts only while
//! it is at the block's place. What reads the log (eviction, compaction) goes from the head, and moves the
//! head past entries that do not count any more.
//!
//! ```text
//!            head                                   tail
//!   position  17    18    19    20    21    22    23
//!   entry    [ 5 ] [ 2 ] [ 9 ] [ 2 ] [   ] [ 7 ]          the place of block 2 is 20, so 18 does not
//!                                                          count; 21 is reserved and not entered yet
//! ```
//!
//! The log is a ring, larger than twice the blocks. It is lock-free: as in SCQ (Nikolaev, DISC 2019), a reader
//! who comes upon a position that was reserved and not entered closes it and goes on; the writer, when it
//! comes, finds it closed and takes another position. So neither waits for the other.

use crate::{
    ids::BlockId,
    sync::{AtomicU64, Ordering},
};

/// Entries beyond twice the blocks, so that short logs are not compacted at every turn. Models need it to happen.
pub(super) const SLACK: usize = if cfg!(any(loom, schedules)) { 8 } else { 256 };

/// Which log of a pool: the default policy has one, the probation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Segment {
    /// Of blocks that were left idle for the first time.
    Probation,
    /// Of blocks that were idle before, and hit.
    Protected,
}

/// A position in a log: `lap << 32 | index in the ring`, so later ones are greater. The protected log begins at
/// the lap 2^31, so that a position tells its log, and no two logs have one in common: that lasts for 2^31 times
/// as many releases as a log has entries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Position(u64);

impl Position {
    /// The place of a block that was not idle yet with what it holds.
    pub(super) const NEW: Self = Self(0);

    const PROTECTED: u64 = 1 << 63;

    fn new(lap: u64, index: usize) -> Self {
        Self(lap << 32 | index as u64)
    }

    pub(super) fn segment(self) -> Segment {
        if self.0 & Self::PROTECTED == 0 { Segment::Probation } else { Segment::Protected }
    }

    /// The place of a block whose entry was passed, or that gets its first one; in this log.
    pub(super) fn nowhere(segment: Segment) -> Self {
        match segment {
            Segment::Probation => Self(!Self::PROTECTED),
            Segment::Protected => Self(u64::MAX),
        }
    }

    /// Whether the block has no entry.
    pub(super) fn is_nowhere(self) -> bool {
        self == Self::NEW || self == Self::nowhere(self.segment())
    }

    fn lap(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn index(self) -> usize {
        self.0 as u32 as usize
    }
}

/// What stands at a position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Entry {
    /// A block was entered; it counts if this is its place.
    Block(BlockId),
    /// It was closed.
    Nothing,
    /// The head is behind it, and it was used again.
    Passed,
}

pub(super) struct Log {
    head: AtomicU64,
    tail: AtomicU64,
    /// `lap << 32 | block`; the null block where a reader has closed the position.
    entries: Box<[AtomicU64]>,
}

impl Log {
    /// Bytes a block of a large pool.
    pub(super) const BYTES_PER_BLOCK: usize = 2 * size_of::<AtomicU64>();

    pub(super) fn new(num_blocks: usize, segment: Segment) -> Self {
        let lap = match segment {
            Segment::Probation => 0,
            Segment::Protected => Position::PROTECTED >> 32,
        };
        let (before, first) = (Position::new(lap, 0), Position::new(lap + 1, 0));
        Self {
            head: AtomicU64::new(first.0),
            tail: AtomicU64::new(first.0),
            entries: (0..2 * num_blocks + SLACK).map(|_| AtomicU64::new(before.0)).collect(),
        }
    }

    pub(super) fn segment(&self) -> Segment {
        self.head().segment()
    }

    /// The oldest position that may count.
    pub(super) fn head(&self) -> Position {
        Position(self.head.load(Ordering::Relaxed))
    }

    /// The first position that is not reserved.
    pub(super) fn tail(&self) -> Position {
        Position(self.tail.load(Ordering::Relaxed))
    }

    /// The position `n` further on.
    pub(super) fn after(&self, position: Position, n: usize) -> Position {
        let index = position.index() + n;
        let lap = u64::from(position.lap());
        match index.checked_sub(self.entries.len()) {
            Some(index) => Position::new(lap + 1, index),
            None => Position::new(lap, index),
        }
    }

    fn distance(&self, from: Position, to: Position) -> usize {
        let laps = to.lap().wrapping_sub(from.lap()) as usize;
        (laps * self.entries.len() + to.index()).saturating_sub(from.index())
    }

    /// Positions in use, whether they count or not.
    pub(super) fn len(&self) -> usize {
        let head = self.head();
        self.distance(head, self.tail())
    }

    /// Nothing before this position counts any more.
    pub(super) fn pass(&self, position: Position) {
        self.head.fetch_max(position.0, Ordering::Relaxed);
    }

    /// The next `n` positions; `None` if there is no room.
    pub(super) fn reserve(&self, n: usize) -> Option<Position> {
        let reserved = self.tail.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |tail| {
            let fits = self.distance(self.head(), Position(tail)) + n <= self.entries.len();
            fits.then(|| self.after(Position(tail), n).0)
        });
        reserved.ok().map(Position)
    }

    /// Enter a block, which is idle or was a moment ago, at a position that the caller has reserved; false if
    /// a reader has closed it.
    pub(super) fn enter(&self, position: Position, block: BlockId) -> bool {
        let slot = &self.entries[position.index()];
        // Release: who reads the entry sees the block's place, and that it became idle.
        slot.fetch_update(Ordering::Release, Ordering::Relaxed, |found| {
            is_before(found, position).then(|| entry(position, block))
        })
        .is_ok()
    }

    /// What stands at a reserved position; from now on that is fixed.
    pub(super) fn read(&self, position: Position) -> Entry {
        let slot = &self.entries[position.index()];
        let found = slot
            .fetch_update(Ordering::Relaxed, Ordering::Acquire, |found| {
                is_before(found, position).then(|| entry(position, BlockId::NULL))
            })
            .map_or_else(|found| found, |_| entry(position, BlockId::NULL));
        match BlockId::new(found as u32) {
            _ if (found >> 32) as u32 != position.lap() => Entry::Passed,
            block if block.is_null() => Entry::Nothing,
            block => Entry::Block(block),
        }
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.entries)
    }

    /// Whether the block was entered at this place, and the entry was not passed.
    pub(super) fn has(&self, place: Position, block: BlockId) -> bool {
        (self.head()..self.tail()).contains(&place)
            && self.entries[place.index()].load(Ordering::Acquire) == entry(place, block)
    }
}

/// By block: the position of its entry in one of the logs.
pub(super) struct Places(Box<[AtomicU64]>);

impl Places {
    pub(super) const BYTES_PER_BLOCK: usize = size_of::<AtomicU64>();

    pub(super) fn new(num_blocks: usize) -> Self {
        Self((0..=num_blocks).map(|_| AtomicU64::new(Position::NEW.0)).collect())
    }

    /// Where a block's entry is or will be.
    pub(super) fn get(&self, block: BlockId) -> Position {
        Position(self.0[block.index()].load(Ordering::Relaxed))
    }

    /// Note the place of a block that nobody else may enter anywhere: the caller has the only claim on it, or is
    /// the one who publishes it.
    pub(super) fn set(&self, block: BlockId, position: Position) {
        let place = &self.0[block.index()];
        // loom puts a store and somebody's `exchange` in either order afterwards, though what an exchange has
        // read and what it wrote are neighbours, so that nothing gets between them.
        if cfg!(loom) {
            place.swap(position.0, Ordering::Relaxed);
        } else {
            place.store(position.0, Ordering::Relaxed);
        }
    }

    /// Change the place of a block that others may use; false if it is not what it was.
    pub(super) fn exchange(&self, block: BlockId, from: Position, to: Position) -> bool {
        self.0[block.index()].compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

fn entry(position: Position, block: BlockId) -> u64 {
    u64::from(position.lap()) << 32 | u64::from(block.as_u32())
}

/// Whether a slot was last written for an earlier position.
fn is_before(found: u64, position: Position) -> bool {
    ((found >> 32) as u32).wrapping_sub(position.lap()).cast_signed() < 0
}
