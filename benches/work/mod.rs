//! What is measured, in time (`pool.rs`) and in instructions (`instructions.rs`).

use kvfolio::{Batch, BlockId, BlockPool, Context, Key, PlanRequest, internals};

/// Who measures: every step of a piece of work is handed to it by name.
pub(crate) trait Meter {
    fn step<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T;
}

pub(crate) fn pool(num_blocks: usize) -> BlockPool {
    BlockPool::new(num_blocks, 16, true).unwrap()
}

/// Take `k` blocks and give them back, as callers do.
pub(crate) fn cycle(pool: &BlockPool, k: usize, blocks: &mut Vec<BlockId>, meter: &mut impl Meter) {
    meter.step("cycle", || {
        pool.allocate_into(k, blocks).unwrap();
        pool.release(blocks).unwrap();
    });
    blocks.clear();
}

/// A pool full of idle blocks, where `k` new ones at a time drive out the oldest.
pub(crate) struct Churn {
    pool: BlockPool,
    keys: Vec<Key>,
    k: usize,
    turn: usize,
}

impl Churn {
    pub(crate) fn new(num_blocks: usize, k: usize) -> Self {
        struct Nobody;
        impl Meter for Nobody {
            fn step<T>(&mut self, _: &'static str, work: impl FnOnce() -> T) -> T {
                work()
            }
        }
        let mut churn = Self { pool: pool(num_blocks), keys: internals::keys(2 * num_blocks), k, turn: 0 };
        (0..num_blocks / k).for_each(|_| churn.replace(&mut Nobody));
        churn
    }

    fn keys(&self, turn: usize) -> &[Key] {
        let turns = self.keys.len() / self.k;
        &self.keys[turn % turns * self.k..][..self.k]
    }

    /// `evict`, `publish` and `release` `k` blocks.
    pub(crate) fn replace(&mut self, meter: &mut impl Meter) {
        let blocks = meter.step("evict", || internals::take(&self.pool, self.k).unwrap());
        meter.step("publish", || internals::publish(&self.pool, &blocks, self.keys(self.turn)));
        meter.step("release", || internals::give(&self.pool, &blocks));
        self.turn += 1;
    }

    /// `hit` the `k` blocks that were published `turn` turns ago, of as many as the pool has room for.
    pub(crate) fn hit(&self, turn: usize, meter: &mut impl Meter) {
        let ago = 1 + turn % (self.pool.num_blocks() / self.k / 2);
        let keys = self.keys(self.turn - ago);
        let blocks = meter.step("hit", || internals::hit(&self.pool, keys));
        assert_eq!(blocks.len(), self.k);
        internals::give(&self.pool, &blocks);
    }
}

/// Hash full blocks of 16 tokens.
pub(crate) fn hash(tokens: &[i32], meter: &mut impl Meter) {
    let keys = meter.step("hash", || internals::chain(tokens, 16));
    assert_eq!(keys.len(), tokens.len() / 16);
}

/// A batch of sequences that all get one token a step.
pub(crate) struct Decode {
    batch: Batch,
    tokens: Vec<i32>,
}

impl Decode {
    /// Rows of different prompts of 512 tokens, computed.
    pub(crate) fn new(num_rows: usize) -> Self {
        let pool = pool(num_rows * 64);
        let batch = Batch::new(&pool, num_rows, 1024).unwrap();
        for row in 0..num_rows as i32 {
            let prompt: Vec<_> = (0..512).map(|position| row + position).collect();
            let sequence = pool.sequence(&prompt, &Context::default(), true, true).unwrap();
            batch.add(&sequence).unwrap();
        }
        let decode = Self { batch, tokens: (0..num_rows as i32).collect() };
        decode.one_step();
        decode
    }

    fn one_step(&self) {
        let plan = self.batch.plan(&PlanRequest::default()).unwrap();
        plan.commit(None).unwrap();
        plan.extend(&self.tokens).unwrap();
    }

    pub(crate) fn step(&self, meter: &mut impl Meter) {
        meter.step("decode", || self.one_step());
    }
}
