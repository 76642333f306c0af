//! Blocks lent by id and tables, which threads hand on to each other.

use kvfolio::{BlockId, BlockPool, BlockTable};
use parking_lot::Mutex;

use crate::{
    memory::{Memory, ids},
    random::Random,
};

/// What changes hands: references, and what the blocks hold.
struct Goods {
    what: What,
    contents: Vec<u64>,
}

enum What {
    Loan(Vec<BlockId>),
    Table(BlockTable),
}

/// Where threads leave goods for each other.
#[derive(Default)]
pub(crate) struct Market(Mutex<Vec<Goods>>);

const STALLS: usize = 8;

impl Market {
    /// Leave goods, unless it is full: then they come back.
    fn offer(&self, goods: Goods) -> Option<Goods> {
        let mut all = self.0.lock();
        if all.len() == STALLS {
            return Some(goods);
        }
        all.push(goods);
        None
    }

    fn take(&self) -> Option<Goods> {
        self.0.lock().pop()
    }

    /// Everybody has gone: what is left is tables, or this fails.
    pub(crate) fn close(self) {
        for goods in self.0.into_inner() {
            assert!(matches!(goods.what, What::Table(_)));
        }
    }
}

pub(crate) struct Trader<'a> {
    pool: &'a BlockPool,
    memory: &'a Memory,
    market: &'a Market,
    own: Vec<Goods>,
    random: Random,
}

const MOST_OWN: usize = 4;

impl<'a> Trader<'a> {
    pub(crate) fn new(pool: &'a BlockPool, memory: &'a Memory, market: &'a Market, random: Random) -> Self {
        Self { pool, memory, market, own: Vec::new(), random }
    }

    /// One thing to do with blocks; returns the calls made.
    pub(crate) fn turn(&mut self) -> u64 {
        if self.own.len() >= MOST_OWN || (self.random.below(6) == 0 && !self.own.is_empty()) {
            let goods = self.own.swap_remove(self.random.below(self.own.len()));
            self.give_back(goods);
            return 1;
        }
        match self.random.below(5) {
            0 => self.own.extend(self.market.take()),
            1 => self.borrow(),
            2 => self.own.push(Goods { what: What::Table(self.pool.table()), contents: Vec::new() }),
            _ => {
                if !self.own.is_empty() {
                    let goods = self.own.swap_remove(self.random.below(self.own.len()));
                    let goods = self.use_goods(goods);
                    self.own.push(goods);
                }
            }
        }
        1
    }

    fn borrow(&mut self) {
        let n = 1 + self.random.below(6);
        if let Ok(blocks) = self.pool.allocate(n) {
            let contents = self.fill(&blocks, 0, n * self.pool.block_size());
            self.own.push(Goods { what: What::Loan(blocks), contents });
        }
    }

    /// Write something new to some positions of blocks that are ours alone.
    fn fill(&mut self, blocks: &[BlockId], start: usize, stop: usize) -> Vec<u64> {
        let write = |position: usize| {
            let content = self.random.next();
            let block = blocks[position / self.pool.block_size()];
            self.memory.write(self.memory.slot(block.as_i32(), position), content);
            content
        };
        (start..stop).map(write).collect()
    }

    fn check(&self, goods: &Goods) {
        let blocks = match &goods.what {
            What::Loan(blocks) => blocks,
            What::Table(table) => table.blocks(),
        };
        self.memory.check(ids(blocks), &goods.contents);
    }

    fn give_back(&self, goods: Goods) {
        self.check(&goods);
        match goods.what {
            What::Loan(blocks) => self.pool.release(&blocks).unwrap(),
            What::Table(table) => drop(table),
        }
    }

    fn use_goods(&mut self, goods: Goods) -> Goods {
        self.check(&goods);
        let Goods { what, contents } = goods;
        match what {
            What::Loan(blocks) if self.random.below(3) == 0 => {
                let table = self.pool.table_of(&blocks, contents.len()).unwrap();
                Goods { what: What::Table(table), contents }
            }
            What::Loan(blocks) => {
                self.pool.share(&blocks).unwrap();
                self.pass_on(Goods { what: What::Loan(blocks.clone()), contents: contents.clone() });
                Goods { what: What::Loan(blocks), contents }
            }
            What::Table(table) => self.use_table(table, contents),
        }
    }

    fn use_table(&mut self, mut table: BlockTable, mut contents: Vec<u64>) -> Goods {
        match self.random.below(4) {
            0 => {
                let kept = self.random.below(table.num_tokens() + 1);
                let fork = table.fork(Some(kept)).unwrap();
                self.pass_on(Goods { what: What::Table(fork), contents: contents[..kept].to_vec() });
            }
            1 => {
                let kept = self.random.below(table.num_tokens() + 1);
                table.truncate(kept).unwrap();
                contents.truncate(kept);
            }
            _ if table.blocks().len() < 8 => self.append(&mut table, &mut contents),
            _ => {}
        }
        Goods { what: What::Table(table), contents }
    }

    fn append(&mut self, table: &mut BlockTable, contents: &mut Vec<u64>) {
        // A table gives up its share of a block that it is about to leave as soon as it grows. So that nobody
        // else gets the block before it is copied, it is borrowed for as long. A block that is this table's alone
        // stays so.
        let is_shared = |block: &&BlockId| self.pool.ref_count(**block).unwrap() > 1;
        let source: Vec<_> = table.blocks().last().filter(is_shared).copied().into_iter().collect();
        self.pool.share(&source).unwrap();
        if let Ok(copy) = table.append(1 + self.random.below(7)) {
            if let Some((source, target)) = copy {
                self.memory.copy_block(source.as_i32(), target.as_i32());
            }
            let new = self.fill(table.blocks(), contents.len(), table.num_tokens());
            contents.extend(new);
        }
        self.pool.release(&source).unwrap();
    }

    fn pass_on(&self, goods: Goods) {
        if let Some(goods) = self.market.offer(goods) {
            self.give_back(goods);
        }
    }
}

impl Drop for Trader<'_> {
    /// Give everything back, and buy what others have left, since nobody comes after us to release it.
    fn drop(&mut self) {
        while let Some(goods) = self.own.pop().or_else(|| self.market.take()) {
            self.give_back(goods);
        }
    }
}
