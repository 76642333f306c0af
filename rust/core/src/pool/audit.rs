//! Recomputes what is recorded twice, and compares.

use super::Shared;
use crate::{
    error::{Error, Result},
    sync::Ordering,
};

#[derive(Default)]
struct Census {
    blank: usize,
    idle: usize,
    quarantined: usize,
    published: usize,
    owned: usize,
    holds: usize,
}

impl Shared {
    /// Exact while no other thread is at work; only reads.
    pub(super) fn audit(&self) -> Result<()> {
        let mut census = Census::default();
        for block in self.all_blocks() {
            let word = self.words[block.index()].load();
            census.blank += usize::from(word.is_blank());
            census.idle += usize::from(word.is_idle());
            census.quarantined += usize::from(word.is_quarantined());
            census.published += usize::from(word.is_published());
            census.owned += word.owned() as usize;
            census.holds += word.holds() as usize;
        }
        self.audit_counts(&census)?;
        self.audit_blank(census.blank)?;
        self.audit_cache(&census)
    }

    fn audit_counts(&self, census: &Census) -> Result<()> {
        let counted = |name: &str, counter: usize, found: usize| {
            claim(counter == found, || format!("{counter} {name}: {found} were found"))
        };
        let tables = self.table_references.load(Ordering::Relaxed);
        counted("blocks are free", self.num_free(), census.blank + census.idle)?;
        let signed = |name: &str, counter: isize, found: usize| {
            claim(usize::try_from(counter) == Ok(found), || format!("{counter} {name}: {found} were found"))
        };
        signed("blocks are idle", self.idle.load(Ordering::Relaxed), census.idle)?;
        signed("blocks are quarantined", self.quarantined.load(Ordering::Relaxed), census.quarantined)?;
        counted("references are those of tables", tables, census.owned)?;
        counted("holds are those of plans in flight", self.plan_holds.load(Ordering::Relaxed), census.holds)
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
        let entries = self.index.len();
        claim(entries == census.published, || {
            format!("{entries} blocks are in the index: {} are published", census.published)
        })?;
        for block in self.all_blocks() {
            let word = self.words[block.index()].load();
            let hash = self.index.hash(&self.contents.key(block));
            claim(!word.is_published() || self.index.find(hash, |other| other == block).is_some(), || {
                format!("block {} is found by its key", block.as_i32())
            })?;
            let place = self.places.get(block);
            claim(!word.is_idle() || self.log_of(place).has(place, block), || {
                format!("block {} is idle and in line for eviction", block.as_i32())
            })?;
        }
        Ok(())
    }
}

fn claim(holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::CorruptPool(what())) }
}
