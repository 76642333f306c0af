//! Recomputes what is recorded twice, and compares.

use super::Shared;
use crate::{
    error::{Error, Result},
    ids::BlockId,
    sync::Ordering,
};

#[derive(Default)]
struct Census {
    blank: usize,
    idle: usize,
    quarantined: usize,
    published: usize,
    references: usize,
    lent: usize,
    holds: usize,
}

impl Shared {
    /// Exact while no other thread is at work; only reads.
    pub(super) fn audit(&self) -> Result<()> {
        let mut census = Census::default();
        for block in self.all_blocks() {
            let word = self.words[block.index()].load();
            let lent = self.lent[block.index()].load(Ordering::Acquire);
            census.blank += usize::from(word.is_blank());
            census.idle += usize::from(word.is_idle());
            census.quarantined += usize::from(word.is_quarantined());
            census.published += usize::from(word.is_published());
            census.references += word.references() as usize;
            census.holds += word.holds() as usize;
            census.lent += lent as usize;
            claim(lent <= word.references(), || {
                format!("block {} has {} references, {lent} of them lent", block.as_i32(), word.references())
            })?;
        }
        self.audit_counts(&census)?;
        self.audit_blank(census.blank)?;
        self.audit_cache(&census)
    }

    fn all_blocks(&self) -> impl Iterator<Item = BlockId> + use<> {
        (1..=self.num_blocks as u32).map(BlockId::new)
    }

    fn audit_counts(&self, census: &Census) -> Result<()> {
        let counted = |name: &str, counter: usize, found: usize| {
            claim(counter == found, || format!("{counter} {name}: {found} were found"))
        };
        let tables = self.table_references.load(Ordering::Acquire);
        counted("blocks are free", self.free.load(Ordering::Acquire), census.blank + census.idle)?;
        counted("blocks are idle", self.idle.load(Ordering::Acquire), census.idle)?;
        let quarantined = self.quarantined.load(Ordering::Acquire);
        claim(usize::try_from(quarantined) == Ok(census.quarantined), || {
            format!("{quarantined} blocks are quarantined: {} were found", census.quarantined)
        })?;
        counted("references are held by tables or lent", tables + census.lent, census.references)?;
        counted("holds are those of plans in flight", self.plan_holds.load(Ordering::Acquire), census.holds)
    }

    fn audit_blank(&self, num_blank: usize) -> Result<()> {
        let blank = self.blank.snapshot();
        let mut seen = vec![false; self.num_blocks + 1];
        for &block in &blank {
            let twice = std::mem::replace(&mut seen[block.index()], true);
            claim(!twice && self.words[block.index()].load().is_blank(), || {
                format!("block {} is among the blank ones once, and blank", block.as_i32())
            })?;
        }
        claim(blank.len() == num_blank, || format!("{num_blank} blocks can be handed out: {}", blank.len()))
    }

    fn audit_cache(&self, census: &Census) -> Result<()> {
        let cache = self.lock_cache();
        claim(cache.index.len() == census.published, || {
            format!("{} blocks are in the index: {} are published", cache.index.len(), census.published)
        })?;
        for block in self.all_blocks().filter(|block| self.words[block.index()].load().is_published()) {
            claim(cache.index.find(&cache.index.key(block)) == Some(block), || {
                format!("block {} is found by its key", block.as_i32())
            })?;
        }
        let queued = |block: &BlockId| self.words[block.index()].load().is_idle();
        let num_queued = cache.queue.queued().filter(queued).count();
        claim(num_queued == census.idle, || {
            format!("{} idle blocks are queued for eviction once: {num_queued} are", census.idle)
        })
    }
}

fn claim(holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::CorruptPool(what())) }
}
