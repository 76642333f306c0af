//! A small pool and a batch, for rules that are told by example.

use kvfolio::{Batch, BlockPool, Context, Plan, PlanRequest, Sequence};

pub(crate) fn setup(num_blocks: usize, block_size: usize) -> (BlockPool, Batch) {
    let pool = BlockPool::new(num_blocks, block_size, true).unwrap();
    let batch = Batch::new(&pool, 4, 64).unwrap();
    (pool, batch)
}

pub(crate) fn sequence(pool: &BlockPool, tokens: &[i32]) -> Sequence {
    pool.sequence(tokens, &Context::default(), true, true).unwrap()
}

pub(crate) fn plan(batch: &Batch) -> Plan {
    batch.plan(&PlanRequest::default()).unwrap()
}

pub(crate) fn counts(pool: &BlockPool) -> [usize; 4] {
    pool.audit().unwrap();
    [pool.num_blank(), pool.num_idle(), pool.num_referenced(), pool.num_quarantined()]
}

pub(crate) fn ids(sequence: &Sequence) -> Vec<i32> {
    sequence.blocks().unwrap().iter().map(|block| block.as_i32()).collect()
}
