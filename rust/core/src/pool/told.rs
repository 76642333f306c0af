//! What a follower of the cache has been told, and what is to be told next.
//!
//! What is told is what can be found: a block is there as long as a copy of it is published, and all blocks in front
//! of it are there. So it is stored once, however many copies there are, and removed when the last one goes; its
//! parent is stored before it and removed after it.

use std::sync::Arc;

use super::{
    BlockPool, Shared,
    events::{Recorder, StoredBlock},
    tree::{NodeId, Tree},
};
use crate::{
    error::{Error, Result},
    ids::BlockId,
    key::Key,
    sync::Ordering,
};

/// A change of what can be found.
#[derive(Debug)]
pub enum Event {
    /// Blocks that can be found from now on, each the parent of the next, under one context.
    Stored(Vec<Arc<StoredBlock>>),
    /// Blocks that cannot be found any more, children before their parents.
    Removed(Vec<Key>),
    /// Nothing can be found any more.
    Cleared,
}

/// One block, as it was seen last.
#[derive(Default)]
struct Seen {
    /// What its last publication said.
    holds: Option<Arc<StoredBlock>>,
    /// Where it counts as a copy.
    counted: Option<NodeId>,
}

pub(super) struct Told {
    blocks: Box<[Seen]>,
    tree: Tree,
    epoch: u64,
    /// Somebody follows anew, perhaps to tell others who know what an earlier follower told.
    is_new: bool,
}

impl Told {
    pub(super) const BYTES_PER_BLOCK: usize = size_of::<Seen>();

    pub(super) fn new(num_blocks: usize) -> Self {
        let blocks = (0..=num_blocks).map(|_| Seen::default()).collect();
        Self { blocks, tree: Tree::new(), epoch: 0, is_new: true }
    }

    /// Look at what was marked; returns what has changed since the last time.
    fn look(&mut self, shared: &Shared, recorder: &Recorder) -> Vec<Event> {
        let mut events = Vec::new();
        if std::mem::take(&mut self.is_new) {
            events.push(Event::Cleared);
        }
        self.enter_epoch(shared.epoch(), &mut events);
        for block in recorder.take_marked() {
            let seen = &mut self.blocks[block.index()];
            if let Some(note) = recorder.take(block)
                && let Some(place) = note.place(block)
            {
                seen.holds = Some(Arc::new(note.stored(place, shared.block_size)));
            }
            let is_published = shared.words[block.index()].load().is_published();
            let holds = seen.holds.clone().filter(|_| is_published);
            if let Some(stored) = &holds {
                self.enter_epoch(stored.epoch, &mut events); // somebody was faster than we
            }
            self.count(block, holds.filter(|stored| stored.epoch == self.epoch));
        }
        let (removed, stored) = self.tree.settle();
        if !removed.is_empty() {
            events.push(Event::Removed(removed));
        }
        events.extend(runs(stored));
        events
    }

    /// From a new epoch on, nothing of an older one is found.
    fn enter_epoch(&mut self, epoch: u64, events: &mut Vec<Event>) {
        if epoch > self.epoch {
            self.epoch = epoch;
            self.tree = Tree::new();
            self.blocks.iter_mut().for_each(|seen| seen.counted = None);
            events.push(Event::Cleared);
        }
    }

    /// A block is a copy of this and of nothing else.
    fn count(&mut self, block: BlockId, stored: Option<Arc<StoredBlock>>) {
        let counted = &mut self.blocks[block.index()].counted;
        let now = stored.map(|stored| self.tree.add_copy(&stored));
        if let Some(before) = std::mem::replace(counted, now) {
            self.tree.remove_copy(before);
        }
    }
}

/// Chains of blocks, each a run of what follows the one before.
fn runs(stored: Vec<Arc<StoredBlock>>) -> impl Iterator<Item = Event> {
    let mut rest = stored.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut run = vec![rest.next()?];
        while let Some(next) = rest.next_if(|next| run.last().is_some_and(|last| next.follows(last))) {
            run.push(next);
        }
        Some(Event::Stored(run))
    })
}

/// Follows what can be found in a pool. There is one at a time.
pub struct EventSource(BlockPool);

impl BlockPool {
    /// Follow what can be found. The first `drain` begins with `Cleared` and tells all that is there.
    ///
    /// Refused by a pool that was not made with `events`, and while there is another follower.
    pub fn events(&self) -> Result<EventSource> {
        let Some(recorder) = &self.0.events else {
            return Err(Error::Argument(
                "the pool has no events: it must be made with them (events=True)".into(),
            ));
        };
        if recorder.is_followed.swap(true, Ordering::Acquire) {
            return Err(Error::ConcurrentUse(
                "pool's events have a source already (a publisher is one), and can have one only",
            ));
        }
        let mut told = recorder.told.lock();
        told.is_new = true;
        told.tree.forget_told();
        drop(told);
        Ok(EventSource(self.clone()))
    }
}

impl EventSource {
    /// The pool that it follows.
    pub fn pool(&self) -> &BlockPool {
        &self.0
    }

    /// What has changed since the last time, in an order that keeps every block behind its parent.
    ///
    /// What came and went meanwhile is not told. Linear in what changed, and in a bit a block.
    pub fn drain(&self) -> Vec<Event> {
        let shared = &*self.0.0;
        shared.events.as_ref().map_or_else(Vec::new, |recorder| recorder.told.lock().look(shared, recorder))
    }

    /// All that has been told and not taken back, parents first.
    pub fn snapshot(&self) -> Vec<Event> {
        let recorder = self.0.0.events.as_ref();
        recorder.map_or_else(Vec::new, |recorder| runs(recorder.told.lock().tree.all_told()).collect())
    }
}

impl Drop for EventSource {
    fn drop(&mut self) {
        if let Some(recorder) = &self.0.0.events {
            recorder.is_followed.store(false, Ordering::Release);
        }
    }
}

impl std::fmt::Debug for EventSource {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "EventSource({:?})", self.0)
    }
}
