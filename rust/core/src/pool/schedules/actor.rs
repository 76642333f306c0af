//! What a thread does to the pool, and what it may rely on meanwhile.
//!
//! The shadow knows who has a claim on which block, and what was last written into it. A claim is noted when the
//! call that brought it has returned, and struck off before the call that gives it back: so who has one in the
//! shadow has it in the pool.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::baton::Random;
use crate::{
    ids::BlockId,
    key::{Key, KeyChain},
    pool::{BlockPool, EvictionPolicy, Opening, PoolOptions, Shared, blank::Giving},
    sync::{Ordering, point},
};

/// What was written into a block: the number of its key, in an epoch.
type Content = (usize, u64);

#[derive(Default)]
struct Block {
    /// By actor.
    claims: Vec<usize>,
    /// `None` while it is written.
    content: Option<Content>,
}

/// A pool, and what is known of it.
pub(super) struct World {
    pub(super) pool: BlockPool,
    /// Those that blocks are published under, of the tokens 0, 1, ..
    keys: Vec<Key>,
    shadow: Mutex<Vec<Block>>,
    /// Owned references on their way from one actor to another.
    passed_on: Mutex<Vec<BlockId>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(super) fn new(
        eviction: EvictionPolicy,
        num_blocks: usize,
        num_actors: usize,
        num_keys: usize,
    ) -> Self {
        let options = PoolOptions { eviction, ..PoolOptions::default() };
        let mut chain = KeyChain::new(&crate::Context::default(), 1);
        chain.extend(&(0..num_keys as i32).collect::<Vec<_>>(), &[], 1, num_keys);
        let block = |_| Block { claims: vec![0; num_actors + 1], content: None }; // the last one: passed on
        Self {
            #[expect(clippy::unwrap_used, reason = "the numbers are in range")]
            pool: BlockPool::with_options(num_blocks, 1, &options).unwrap(),
            keys: chain.keys().to_vec(),
            shadow: Mutex::new((0..=num_blocks).map(block).collect()),
            passed_on: Mutex::new(Vec::new()),
        }
    }

    fn claims(&self, block: BlockId) -> usize {
        lock(&self.shadow)[block.index()].claims.iter().sum()
    }

    /// While nobody is at work: what the pool says is what the actors have, and what nobody has can be had.
    pub(super) fn check(&self) {
        let shared = self.pool.shared();
        let mut owned = 0;
        for block in shared.all_blocks() {
            let word = shared.words[block.index()].load();
            let claims = (word.owned() + word.lent() + word.holds()) as usize;
            assert_eq!(claims, self.claims(block), "claims on {block:?}");
            owned += word.owned() as usize;
        }
        shared.table_references.store(owned, Ordering::Relaxed);
        assert_eq!(self.pool.audit(), Ok(()));
        let num_used = shared.all_blocks().filter(|block| self.claims(*block) > 0).count();
        assert_eq!(self.pool.num_free(), self.pool.num_blocks() - num_used);
    }

    /// After everything was given back: every block can be had.
    pub(super) fn check_empty(&self) {
        self.check();
        let num_blocks = self.pool.num_blocks();
        assert_eq!((self.pool.num_free(), self.pool.num_quarantined()), (num_blocks, 0));
        let (blank, mut marked) = (&self.pool.shared().blank, Vec::new());
        blank.take(num_blocks, &mut marked);
        assert_eq!(marked.len(), self.pool.num_blank(), "marks lead to all blank blocks");
        let mut back = Giving::new(blank);
        for block in marked {
            back.add(block);
        }
        back.finish();
        let mut all = self.pool.allocate(num_blocks).unwrap_or_default();
        all.sort_unstable();
        assert!(all.iter().copied().eq(self.pool.shared().all_blocks()), "{all:?} are all blocks");
        assert_eq!(self.pool.release(&all), Ok(()));
        self.check();
    }
}

/// One thing to do. Which of the actor's blocks it is done to is the actor's choice.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Take blocks and write them.
    Take(usize),
    /// The same, lent.
    Allocate(usize),
    /// Give back an owned reference, or all at once.
    Drop,
    DropAll,
    /// One more reference, passed on to whoever receives it.
    PassOn,
    Receive,
    /// One more lent reference; give one back; make one an owned one.
    Share,
    Release,
    TakeBack,
    /// Lend oneself a block of whoever has it, and give it back.
    Borrow,
    /// Publish all owned blocks under the keys that were written.
    Publish {
        merge: bool,
    },
    /// Take what is found of some keys.
    Hit(usize, usize),
    /// Take it, and undo that.
    Undo(usize, usize),
    /// Open a block to write it anew.
    Overwrite,
    /// Open a block and think better of it.
    Reopen,
    /// References become holds; they end; one becomes a reference again.
    Hold,
    EndHolds,
    Restore,
    Match(usize),
    Compact,
    Reset,
}

impl Step {
    /// One of the kinds that a bit is set for; of the first few in any case. Runs that do not do everything go
    /// deeper into what they do.
    pub(super) fn any(random: &mut Random, kinds: usize) -> Self {
        let (few, some) = (1 + random.below(2), random.below(4));
        let kind = loop {
            let kind = random.below(26);
            if (kinds | 0b1000_0000_0010_0001) >> kind & 1 == 1 {
                break kind;
            }
        };
        match kind {
            0..=3 => Self::Take(few),
            4 => Self::Allocate(few),
            5..=7 => Self::Drop,
            8 => Self::DropAll,
            9 => Self::PassOn,
            10 => Self::Receive,
            11 => Self::Share,
            12 => Self::Release,
            13 => Self::TakeBack,
            14 => Self::Borrow,
            15 => Self::Publish { merge: true },
            16 => Self::Publish { merge: false },
            17..=18 => Self::Hit(some, few),
            19 => Self::Undo(some, few),
            20 => Self::Overwrite,
            21 => Self::Reopen,
            22 => Self::Hold,
            23 => {
                if few == 1 {
                    Self::EndHolds
                } else {
                    Self::Restore
                }
            }
            24 => {
                if few == 1 {
                    Self::Match(some)
                } else {
                    Self::Compact
                }
            }
            _ => {
                if some == 0 {
                    Self::Reset
                } else {
                    Self::Publish { merge: some == 1 }
                }
            }
        }
    }
}

/// A thread's share of the pool.
pub(super) struct Actor<'a> {
    world: &'a World,
    own: usize,
    random: Random,
    owned: Vec<BlockId>,
    lent: Vec<BlockId>,
    held: Vec<BlockId>,
}

impl<'a> Actor<'a> {
    pub(super) fn new(world: &'a World, own: usize, seed: u64) -> Self {
        let random = Random::new(seed ^ (own as u64 + 1) << 56);
        Self { world, own, random, owned: Vec::new(), lent: Vec::new(), held: Vec::new() }
    }

    fn shared(&self) -> &'a Shared {
        self.world.pool.shared()
    }

    fn gain(&self, block: BlockId) {
        lock(&self.world.shadow)[block.index()].claims[self.own] += 1;
    }

    fn lose(&self, blocks: &[BlockId]) {
        for block in blocks {
            lock(&self.world.shadow)[block.index()].claims[self.own] -= 1;
        }
    }

    fn content(&self, block: BlockId) -> Option<Content> {
        lock(&self.world.shadow)[block.index()].content
    }

    /// A block that this actor gets for itself.
    fn gain_new(&self, block: BlockId) {
        assert_eq!(self.world.claims(block), 0, "{block:?} was handed out, and others have claims");
        self.gain(block);
        lock(&self.world.shadow)[block.index()].content = None;
    }

    /// A block that was found.
    fn gain_found(&self, block: BlockId, content: Content) {
        self.gain(block);
        assert_eq!(self.content(block), Some(content), "{block:?} has what it was found by");
    }

    /// Write a block that is this actor's alone.
    fn write(&mut self, block: BlockId) {
        let content = (self.random.below(self.world.keys.len()), self.shared().epoch());
        for content in [None, Some(content)] {
            assert_eq!(self.world.claims(block), 1, "{block:?} is written by one, and others have claims");
            lock(&self.world.shadow)[block.index()].content = content;
            point();
        }
        assert_eq!(self.content(block), Some(content));
    }

    /// One of the blocks, which goes from the list.
    fn pick(random: &mut Random, blocks: &mut Vec<BlockId>) -> Option<BlockId> {
        (!blocks.is_empty()).then(|| blocks.swap_remove(random.below(blocks.len())))
    }

    /// An owned block on which this actor has one claim, as far as it knows.
    fn pick_single(&mut self) -> Option<BlockId> {
        let block = *self.owned.get(self.random.below(self.owned.len().max(1)))?;
        (lock(&self.world.shadow)[block.index()].claims[self.own] == 1).then_some(block)
    }

    pub(super) fn step(&mut self, step: Step) {
        match step {
            Step::Take(n) => self.take(n),
            Step::Allocate(n) => self.allocate(n),
            Step::Drop => self.drop_one(),
            Step::DropAll => self.drop_all(),
            Step::PassOn => self.pass_on(),
            Step::Receive => self.receive(),
            Step::Share => self.share(),
            Step::Release => self.release(),
            Step::TakeBack => self.take_back(),
            Step::Borrow => self.borrow(),
            Step::Publish { merge } => self.publish(merge),
            Step::Hit(first, n) => {
                let hits = self.hit(first, n);
                self.owned.extend(hits);
            }
            Step::Undo(first, n) => {
                let hits = self.hit(first, n);
                self.lose(&hits);
                self.shared().unhold_prefix(&hits);
            }
            Step::Overwrite => self.open(true),
            Step::Reopen => self.open(false),
            Step::Hold => {
                let blocks = std::mem::take(&mut self.owned);
                self.shared().references_to_holds(&blocks);
                self.held.extend(blocks);
            }
            Step::EndHolds => {
                let blocks = std::mem::take(&mut self.held);
                self.lose(&blocks);
                self.shared().drop_holds(&blocks);
            }
            Step::Restore => {
                if let Some(&block) = self.held.first() {
                    self.shared().restore_reference(block);
                    self.gain(block);
                    self.owned.push(block);
                }
            }
            Step::Match(number) => {
                let tokens: Vec<_> = (0..number as i32).collect();
                assert!(self.world.pool.match_prefix(&tokens, &crate::Context::default()).is_ok());
            }
            Step::Compact => {
                if self.shared().reserve(1) {
                    self.shared().compact_all();
                    self.shared().give_free(1);
                }
            }
            Step::Reset => self.shared().reset_prefix_cache(),
        }
    }

    fn take(&mut self, n: usize) {
        if self.shared().reserve(n) {
            let mut taken = Vec::new();
            self.shared().take_reserved(n, &mut taken);
            assert_eq!(taken.len(), n);
            for block in &taken {
                self.gain_new(*block);
            }
            for block in taken {
                self.write(block);
                self.owned.push(block);
            }
        }
    }

    fn allocate(&mut self, n: usize) {
        for block in self.world.pool.allocate(n).unwrap_or_default() {
            self.gain_new(block);
            self.lent.push(block);
        }
    }

    fn drop_one(&mut self) {
        if let Some(block) = Self::pick(&mut self.random, &mut self.owned) {
            self.lose(&[block]);
            self.shared().drop_references(&[block]);
        }
    }

    fn drop_all(&mut self) {
        let blocks = std::mem::take(&mut self.owned);
        self.lose(&blocks);
        self.shared().drop_references(&blocks);
    }

    fn pass_on(&mut self) {
        if let Some(&block) = self.owned.last() {
            assert_eq!(self.shared().add_references(&[block]), Ok(()));
            if let Some(others) = lock(&self.world.shadow)[block.index()].claims.last_mut() {
                *others += 1;
            }
            lock(&self.world.passed_on).push(block);
        }
    }

    fn receive(&mut self) {
        let received = lock(&self.world.passed_on).pop();
        if let Some(block) = received {
            self.gain(block);
            if let Some(others) = lock(&self.world.shadow)[block.index()].claims.last_mut() {
                *others -= 1;
            }
            self.owned.push(block);
        }
    }

    fn share(&mut self) {
        if let Some(&block) = self.lent.first() {
            assert_eq!(self.world.pool.share(&[block]), Ok(()));
            self.gain(block);
            self.lent.push(block);
        }
    }

    fn release(&mut self) {
        if let Some(block) = Self::pick(&mut self.random, &mut self.lent) {
            self.lose(&[block]);
            assert_eq!(self.world.pool.release(&[block]), Ok(()));
        }
    }

    fn take_back(&mut self) {
        if let Some(block) = Self::pick(&mut self.random, &mut self.lent) {
            assert_eq!(self.shared().take_back(&[block]), Ok(()));
            if self.world.claims(block) == 1 && self.content(block).is_none() {
                self.write(block);
            }
            self.owned.push(block);
        }
    }

    fn borrow(&mut self) {
        let block = BlockId::new(1 + self.random.below(self.world.pool.num_blocks()) as u32);
        if self.world.pool.share(&[block]).is_ok() {
            assert_eq!(self.world.pool.release(&[block]), Ok(()));
        }
    }

    fn publish(&mut self, merge: bool) {
        let contents: Vec<_> = self.owned.iter().map(|block| self.content(*block)).collect();
        let epoch = self.shared().epoch();
        let ready = |content: &Option<Content>| content.is_some_and(|(_, written)| written == epoch);
        let places: Vec<_> = (0..contents.len()).filter(|place| ready(&contents[*place])).collect();
        let blocks: Vec<_> = places.iter().map(|place| self.owned[*place]).collect();
        let numbers: Vec<_> =
            places.iter().filter_map(|place| contents[*place]).map(|(key, _)| key).collect();
        let keys: Vec<_> = numbers.iter().map(|number| self.world.keys[*number]).collect();
        for (index, equal) in self.shared().publish(&blocks, &keys, epoch, merge) {
            self.gain_found(equal, (numbers[index], epoch));
            let duplicate = std::mem::replace(&mut self.owned[places[index]], equal);
            self.lose(&[duplicate]);
            self.shared().drop_references(&[duplicate]);
        }
    }

    fn hit(&mut self, first: usize, n: usize) -> Vec<BlockId> {
        let numbers: Vec<_> = (first..first + n).map(|number| number % self.world.keys.len()).collect();
        let keys: Vec<_> = numbers.iter().map(|number| self.world.keys[*number]).collect();
        let (blocks, epoch) = self.shared().hold_prefix(&keys, None);
        blocks.iter().zip(numbers).for_each(|(block, number)| self.gain_found(*block, (number, epoch)));
        blocks
    }

    fn open(&mut self, is_written: bool) {
        let Some(block) = self.pick_single() else {
            return;
        };
        let content = self.content(block);
        let opening = self.shared().open(block);
        match (opening, content) {
            (Opening::Shared, _) => {}
            (Opening::Unpublished, Some((_, epoch))) if !is_written => self.shared().republish(block, epoch),
            _ => self.write(block),
        }
    }

    /// Give back everything, also what nobody has received.
    pub(super) fn finish(mut self) {
        while !lock(&self.world.passed_on).is_empty() {
            self.receive();
        }
        self.drop_all();
        self.step(Step::EndHolds);
        while !self.lent.is_empty() {
            self.release();
        }
    }
}
