//! What changed in the prefix cache, for whoever follows it: off unless a pool is made with it.
//!
//! There is no queue that could overflow. A thread that publishes a block leaves a *note* in the block's slot, what it
//! holds and where it belongs; who changes whether a block can be found *marks* it. Whoever follows takes the
//! marks, the notes of the marked blocks and their words, and compares with what it has told ([`told`](super::told)).
//! So a recording is two or three updates of atomics, waits for nobody, and takes no more memory however late the
//! follower is; what came and went between two of its looks it does not tell.
//!
//! A note is put before its block can be found, and a mark is set after the word has changed. So when all calls have
//! ended and the marks were taken once more, of each block the last word and the last note have been seen.
//! `docs/memory-ordering.md` argues it.

use std::{hint::black_box, ptr, sync::Arc};

use super::{Shared, told::Told};
use crate::{
    context::{Context, Extra},
    ids::BlockId,
    key::Key,
    sync::{AtomicBool, AtomicPtr, AtomicU64, Mutex, Ordering},
};

/// What all blocks of a sequence have in common.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    adapter: String,
    /// The parent of first blocks; none if the context says nothing.
    namespace: Option<Key>,
}

impl Origin {
    /// None if the context says nothing.
    pub(crate) fn new(context: &Context, root: Key) -> Option<Arc<Self>> {
        let is_plain = [&context.model, &context.tenant, &context.salt].into_iter().all(String::is_empty);
        let namespace = (!is_plain).then_some(root);
        let has_any = namespace.is_some() || !context.adapter.is_empty();
        has_any.then(|| Arc::new(Self { adapter: context.adapter.clone(), namespace }))
    }
}

/// Full blocks that one call publishes, and what they hold.
pub(crate) struct Note {
    origin: Option<Arc<Origin>>,
    epoch: u64,
    /// The key of the block in front of them.
    parent: Option<Key>,
    /// The position of their first token.
    start: usize,
    /// Those that touch them, by their positions in the sequence.
    extras: Box<[Extra]>,
    num_blocks: usize,
    /// Ids, then keys, then tokens: in one piece, since this is made within a step.
    words: Box<[u32]>,
}

const KEY_WORDS: usize = size_of::<Key>() / size_of::<u32>();

impl Note {
    /// Some blocks that follow each other, their keys and all their tokens.
    pub(crate) fn new(
        origin: Option<Arc<Origin>>,
        epoch: u64,
        (parent, start): (Option<Key>, usize),
        (blocks, keys, tokens): (&[BlockId], &[Key], &[i32]),
        extras: Box<[Extra]>,
    ) -> Self {
        let mut words = Vec::with_capacity((1 + KEY_WORDS) * blocks.len() + tokens.len());
        words.extend(blocks.iter().map(|block| block.as_u32()));
        words.extend(keys.iter().flat_map(Key::words).flat_map(|word| [word as u32, (word >> 32) as u32]));
        words.extend(tokens.iter().map(|token| *token as u32));
        Self { origin, epoch, parent, start, extras, num_blocks: blocks.len(), words: words.into() }
    }

    /// Where a block is among them.
    pub(super) fn place(&self, block: BlockId) -> Option<usize> {
        self.words[..self.num_blocks].iter().position(|other| *other == block.as_u32())
    }

    fn key(&self, place: usize) -> Key {
        let words = &self.words[self.num_blocks + place * KEY_WORDS..];
        Key::from_words(std::array::from_fn(|word| {
            u64::from(words[2 * word]) | u64::from(words[2 * word + 1]) << 32
        }))
    }

    /// What it says about the block at a place in it.
    pub(super) fn stored(&self, place: usize, block_size: usize) -> StoredBlock {
        let start = self.start + place * block_size;
        let touching = |extra: &&Extra| extra.start < start + block_size && extra.stop > start;
        let placed = |extra: &Extra| (extra.digest.clone(), extra.start as i64 - start as i64);
        let tokens = &self.words[self.num_blocks * (1 + KEY_WORDS) + place * block_size..][..block_size];
        StoredBlock {
            key: self.key(place),
            parent: if place == 0 { self.parent } else { Some(self.key(place - 1)) },
            tokens: tokens.iter().map(|token| *token as i32).collect(),
            extras: self.extras.iter().filter(touching).map(placed).collect(),
            origin: self.origin.clone(),
            epoch: self.epoch,
        }
    }
}

/// A block that can be found, and all that its key was made of.
#[derive(Debug)]
pub struct StoredBlock {
    pub(super) key: Key,
    pub(super) parent: Option<Key>,
    tokens: Box<[i32]>,
    extras: Box<[(Arc<[u8]>, i64)]>,
    origin: Option<Arc<Origin>>,
    pub(super) epoch: u64,
}

impl StoredBlock {
    /// What it is found by.
    pub fn key(&self) -> Key {
        self.key
    }

    /// The key of the block in front of it; none for a sequence's first.
    pub fn parent(&self) -> Option<Key> {
        self.parent
    }

    /// `block_size` tokens.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// The adapter that it was computed with, or nothing.
    pub fn adapter(&self) -> &str {
        self.origin.as_ref().map_or("", |origin| &origin.adapter)
    }

    /// The hash of its sequence's model, adapter, tenant and salt; none if the context names none but an adapter.
    pub fn namespace(&self) -> Option<Key> {
        self.origin.as_ref().and_then(|origin| origin.namespace)
    }

    /// Extras that touch it: their digests, and where they start as seen from it.
    pub fn extras(&self) -> impl ExactSizeIterator<Item = (&[u8], i64)> {
        self.extras.iter().map(|(digest, start)| (&**digest, *start))
    }

    #[cfg(all(test, not(any(loom, schedules))))]
    pub(super) fn of_test(key: Key, parent: Option<Key>) -> Self {
        Self { key, parent, tokens: [0].into(), extras: [].into(), origin: None, epoch: 0 }
    }

    /// Whether it goes on where another one ends, under the same context.
    pub(super) fn follows(&self, other: &Self) -> bool {
        self.parent == Some(other.key) && self.origin == other.origin
    }
}

const WORD: usize = u64::BITS as usize;

pub(crate) struct Recorder {
    /// By block: the note of its last publication, until it is taken; a reference of the slot's own.
    notes: Box<[AtomicPtr<Note>]>,
    /// A bit a block.
    marks: Box<[AtomicU64]>,
    pub(super) told: Mutex<Told>,
    pub(super) is_followed: AtomicBool,
}

impl Recorder {
    /// Bytes a block of a large pool, before anything is published.
    pub(super) const BYTES_PER_BLOCK: usize = size_of::<AtomicPtr<Note>>() + Told::BYTES_PER_BLOCK;

    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            notes: (0..=num_blocks).map(|_| AtomicPtr::new(ptr::null_mut())).collect(),
            marks: (0..=num_blocks / WORD).map(|_| AtomicU64::new(0)).collect(),
            told: Mutex::new(Told::new(num_blocks)),
            is_followed: AtomicBool::new(false),
        }
    }

    /// Leave a note about a block that the caller has a claim on, and that holds what it says; before it is published.
    pub(super) fn put(&self, block: BlockId, note: &Arc<Note>) {
        let note = Arc::into_raw(Arc::clone(note)).cast_mut();
        let before = self.notes[block.index()].swap(note, Ordering::AcqRel);
        // SAFETY: the pointer came out of the slot, by the update that took it out of it.
        drop(unsafe { from_slot(before) });
    }

    /// Get at hand what a publication changes.
    pub(super) fn touch(&self, block: BlockId) {
        black_box(self.marks[block.index() / WORD].load(Ordering::Relaxed));
        black_box(self.notes[block.index()].load(Ordering::Relaxed));
    }

    /// The note about a block, if there is one that nobody has taken.
    pub(super) fn take(&self, block: BlockId) -> Option<Arc<Note>> {
        let note = self.notes[block.index()].swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: as in `put`.
        unsafe { from_slot(note) }
    }

    /// Whether a block can be found has changed.
    pub(super) fn mark(&self, block: BlockId) {
        self.marks[block.index() / WORD].fetch_or(1 << (block.index() % WORD), Ordering::Release);
    }

    /// The blocks that were marked since the last time.
    pub(super) fn take_marked(&self) -> impl Iterator<Item = BlockId> {
        self.marks.iter().enumerate().flat_map(|(index, mark)| {
            // Most are not marked, and a load of what nobody writes costs nothing.
            let is_marked = mark.load(Ordering::Relaxed) != 0;
            let mut bits = if is_marked { mark.swap(0, Ordering::Acquire) } else { 0 };
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(BlockId::new((index * WORD) as u32 + bit))
            })
        })
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        for block in 0..self.notes.len() {
            drop(self.take(BlockId::new(block as u32)));
        }
    }
}

/// # Safety
///
/// The pointer is null, or was made by `Arc::into_raw` for a slot, and has just been taken out of that.
unsafe fn from_slot(note: *mut Note) -> Option<Arc<Note>> {
    // SAFETY: the slot's reference goes over to the caller.
    (!note.is_null()).then(|| unsafe { Arc::from_raw(note) })
}

impl Shared {
    /// Whether anything is to be noted.
    pub(crate) fn has_events(&self) -> bool {
        self.events.is_some()
    }

    /// Somebody may want to know that the block can be found now, or cannot any more.
    pub(super) fn mark(&self, block: BlockId) {
        if let Some(events) = &self.events {
            events.mark(block);
        }
    }
}
