//! All blocks, who refers to them, and what can be found in them.
//!
//! [`word`] holds each block's state, and decides every race by one compare-and-swap. [`blank`] has the blocks
//! without content, [`log`] the order in which those with content give way ([`eviction`], [`adaptive`]), [`index`] and
//! [`contents`] what can be found ([`cache`]); [`references`] takes and gives back; [`events`] notes for others what
//! changes in the cache. Nothing here waits for another thread; `docs/memory-ordering.md` argues why that is right.

mod adaptive;
mod ages;
mod audit;
mod blank;
mod cache;
mod contents;
pub(crate) mod events;
mod eviction;
mod ghosts;
mod index;
mod loans;
mod log;
#[cfg(all(test, loom))]
mod models;
mod options;
mod references;
#[cfg(all(test, not(loom)))]
mod rules;
#[cfg(all(test, schedules))]
mod schedules;
mod stats;
mod told;
mod tree;
mod word;

use std::sync::Arc;

use self::{
    adaptive::Adaptive,
    ages::Ages,
    blank::BlankBlocks,
    contents::Contents,
    events::Recorder,
    index::Index,
    log::{Log, Places, Segment},
    stats::Counters,
    word::{BlockWord, Claim},
};
pub use ages::EvictionAges;
pub(crate) use cache::{Described, Opening};
pub use events::StoredBlock;
pub use options::{EvictionPolicy, PoolOptions};
pub use stats::Stats;
pub use told::{Event, EventSource};

use crate::{
    context::Context,
    error::{Error, Result, check_range},
    ids::{BlockId, MAX_BLOCKS, check_tokens},
    key::KeyChain,
    sync::{AtomicIsize, AtomicU64, AtomicUsize, Ordering},
};

/// The pool of blocks. Clones are handles to the same pool; its calls may come from any thread.
#[derive(Clone)]
pub struct BlockPool(Arc<Shared>);

/// What all handles of a pool share. Every field that changes is atomic.
pub(crate) struct Shared {
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) prefix_cache: bool,
    eviction: EvictionPolicy,
    words: Box<[BlockWord]>,
    blank: BlankBlocks,
    /// By the default policy all that is idle, else what is on probation.
    log: Log,
    adaptive: Option<Adaptive>,
    places: Places,
    index: Index,
    contents: Contents,
    /// Units that a block can be had for: blank + idle - those in the hands of who is about to take a block.
    free: OwnLine<AtomicUsize>,
    /// Signed, here and below, since of two threads the one that takes away may count first.
    idle: AtomicIsize,
    quarantined: AtomicIsize,
    epoch: AtomicU64,
    serial: AtomicU64,
    /// What tables and plans say that they have, for the audit to compare with the words.
    pub(crate) table_references: AtomicUsize,
    plan_holds: AtomicUsize,
    pub(crate) counters: Counters,
    ages: Ages,
    events: Option<Box<Recorder>>,
}

/// On a cache line of its own: every call of every thread changes it.
#[repr(align(64))]
struct OwnLine<T>(T);

/// Bytes of bookkeeping a block, in a pool that is not small; its bit among the blank ones is left out.
const BYTES_PER_BLOCK: usize = size_of::<BlockWord>()
    + Log::BYTES_PER_BLOCK
    + Places::BYTES_PER_BLOCK
    + Index::BYTES_PER_BLOCK
    + Contents::BYTES_PER_BLOCK
    + Ages::BYTES_PER_BLOCK;

/// Ask for all the memory at once and give it back, so that a size which is out of the question is an error
/// instead of the end of the process.
fn check_memory(num_blocks: usize, options: PoolOptions) -> Result<()> {
    let of_policy = match options.eviction {
        EvictionPolicy::Lru => 0,
        EvictionPolicy::Adaptive => Adaptive::BYTES_PER_BLOCK,
    };
    let of_events = if options.events { Recorder::BYTES_PER_BLOCK } else { 0 };
    let bytes = num_blocks * (BYTES_PER_BLOCK + of_policy + of_events);
    let refused = Vec::<u8>::new().try_reserve_exact(bytes).is_err();
    if refused { Err(Error::OutOfMemory { name: "num_blocks", came: num_blocks, bytes }) } else { Ok(()) }
}

impl BlockPool {
    /// A pool of `num_blocks` blocks of `block_size` tokens; without `prefix_cache` nothing is ever found.
    pub fn new(num_blocks: usize, block_size: usize, prefix_cache: bool) -> Result<Self> {
        Self::with_options(num_blocks, block_size, &PoolOptions { prefix_cache, ..PoolOptions::default() })
    }

    /// The same, with all that can be chosen.
    pub fn with_options(num_blocks: usize, block_size: usize, options: &PoolOptions) -> Result<Self> {
        let PoolOptions { prefix_cache, eviction, events } = *options;
        check_range("num_blocks", num_blocks, 1, MAX_BLOCKS)?;
        check_range("block_size", block_size, 1, u32::MAX as usize)?;
        check_memory(num_blocks, *options)?;
        Ok(Self(Arc::new(Shared {
            num_blocks,
            block_size,
            prefix_cache,
            eviction,
            words: (0..=num_blocks).map(|_| BlockWord::default()).collect(),
            blank: BlankBlocks::new(num_blocks),
            log: Log::new(num_blocks, Segment::Probation),
            adaptive: (eviction == EvictionPolicy::Adaptive).then(|| Adaptive::new(num_blocks)),
            places: Places::new(num_blocks),
            index: Index::new(num_blocks),
            contents: Contents::new(num_blocks),
            free: OwnLine(AtomicUsize::new(num_blocks)),
            idle: AtomicIsize::new(0),
            quarantined: AtomicIsize::new(0),
            epoch: AtomicU64::new(0),
            serial: AtomicU64::new(0),
            table_references: AtomicUsize::new(0),
            plan_holds: AtomicUsize::new(0),
            counters: Counters::default(),
            ages: Ages::new(num_blocks),
            events: events.then(|| Box::new(Recorder::new(num_blocks))),
        })))
    }

    /// Usable blocks.
    pub fn num_blocks(&self) -> usize {
        self.0.num_blocks
    }

    /// Tokens a block.
    pub fn block_size(&self) -> usize {
        self.0.block_size
    }

    /// Which idle block gives way first.
    pub fn eviction(&self) -> EvictionPolicy {
        self.0.eviction
    }

    /// Blocks that storage must have: the usable ones and the null block.
    pub fn num_physical_blocks(&self) -> usize {
        self.0.num_blocks + 1
    }

    /// Blocks that can be handed out: blank and idle.
    pub fn num_free(&self) -> usize {
        self.0.num_free()
    }

    /// Free blocks without content.
    pub fn num_blank(&self) -> usize {
        self.num_free().saturating_sub(self.num_idle())
    }

    /// Free blocks with published content.
    pub fn num_idle(&self) -> usize {
        self.0.idle.load(Ordering::Relaxed).max(0) as usize
    }

    /// Blocks without a reference that a plan in flight still needs as they are.
    pub fn num_quarantined(&self) -> usize {
        self.0.num_quarantined()
    }

    /// Blocks with a reference.
    pub fn num_referenced(&self) -> usize {
        self.0.num_blocks.saturating_sub(self.num_free() + self.num_quarantined())
    }

    /// `n` blocks with one reference each, lent to the caller; all or nothing.
    pub fn allocate(&self, n: usize) -> Result<Vec<BlockId>> {
        let mut blocks = Vec::new();
        self.allocate_into(n, &mut blocks)?;
        Ok(blocks)
    }

    /// The same, appended to `blocks`.
    pub fn allocate_into(&self, n: usize, blocks: &mut Vec<BlockId>) -> Result<()> {
        let pool = &*self.0;
        if !pool.reserve(n) {
            return Err(pool.out_of_blocks(n, n <= pool.num_blocks));
        }
        blocks.reserve(n);
        pool.take_claimed(n, Claim::Lent, blocks);
        Ok(())
    }

    /// Lend one more reference for each mention of a block, which must be referenced; null blocks are passed
    /// over. All or nothing.
    pub fn share(&self, blocks: &[BlockId]) -> Result<()> {
        self.0.lend(blocks)
    }

    /// Take back one lent reference for each mention of a block; null blocks are passed over. All or nothing,
    /// unless two calls at once take back the same; references that tables own are out of reach.
    pub fn release(&self, blocks: &[BlockId]) -> Result<()> {
        self.0.check_lent(blocks)?;
        match self.0.settle(blocks.iter().rev().copied(), Claim::Lent) {
            Some(block) => Err(self.0.not_lent(block)),
            None => Ok(()),
        }
    }

    /// References to a block, lent and those of tables.
    pub fn ref_count(&self, block: BlockId) -> Result<u32> {
        self.0.check_block(block)?;
        Ok(self.0.words[block.index()].load().references())
    }

    /// A number as the id of a block of this pool, or of the null block.
    pub fn block(&self, id: i64) -> Result<BlockId> {
        match u32::try_from(id) {
            Ok(id) if id as usize <= self.0.num_blocks => Ok(BlockId::new(id)),
            _ => Err(self.0.no_such_block(id)),
        }
    }

    /// How many leading tokens are in the cache now; a hint, since nothing is held.
    pub fn match_prefix(&self, tokens: &[i32], context: &Context) -> Result<usize> {
        check_tokens("token_ids", tokens)?;
        let mut chain = KeyChain::new(context, self.0.block_size);
        let all = 0..tokens.len() / self.0.block_size;
        let found = self.0.find_prefix(&mut chain, tokens, context.extras(), all);
        Ok(found.len() * self.0.block_size)
    }

    /// Forget all content; what was computed before is never published. Returns the blocks still referenced.
    pub fn reset_prefix_cache(&self) -> usize {
        self.0.reset_prefix_cache();
        self.num_referenced()
    }

    /// Counters since the pool was made.
    pub fn stats(&self) -> Stats {
        self.0.counters.snapshot()
    }

    /// How long evicted blocks had lain idle.
    pub fn eviction_ages(&self) -> EvictionAges {
        self.0.ages.snapshot()
    }

    /// Recompute every count from scratch; `CorruptPool` on any disagreement. Exact while no other thread is
    /// at work.
    pub fn audit(&self) -> Result<()> {
        self.0.audit()
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for BlockPool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "BlockPool(num_blocks={}, block_size={}, num_blank={}, num_idle={}, num_referenced={}, \
             num_quarantined={})",
            self.num_blocks(),
            self.block_size(),
            self.num_blank(),
            self.num_idle(),
            self.num_referenced(),
            self.num_quarantined()
        )
    }
}

impl Shared {
    /// A number that nothing else of this pool bears.
    pub(crate) fn next_serial(&self) -> u64 {
        // Relaxed: only its being unique matters.
        self.serial.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.0.load(Ordering::Relaxed)
    }

    fn num_quarantined(&self) -> usize {
        self.quarantined.load(Ordering::Relaxed).max(0) as usize
    }

    #[cfg(feature = "internals")]
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>()
            + size_of_val(&*self.words)
            + self.blank.bytes()
            + self.log.bytes()
            + self.places.bytes()
            + self.adaptive.as_ref().map_or(0, Adaptive::bytes)
            + self.index.bytes()
            + self.contents.bytes()
            + self.ages.bytes()
    }

    /// Whether anybody besides one user refers to a block or holds it.
    pub(crate) fn is_shared(&self, block: BlockId) -> bool {
        self.words[block.index()].load().is_shared()
    }

    pub(crate) fn is_idle(&self, block: BlockId) -> bool {
        self.words[block.index()].load().is_idle()
    }

    pub(crate) fn out_of_blocks(&self, needed: usize, ever_fits: bool) -> Error {
        let (free, quarantined) = (self.num_free(), self.num_quarantined());
        self.counters.refusals.add(1);
        if !ever_fits {
            self.counters.refusals_never_fit.add(1);
        } else if needed <= free + quarantined {
            self.counters.refusals_quarantined.add(1);
        }
        Error::OutOfBlocks { needed, free, quarantined, ever_fits }
    }
}
