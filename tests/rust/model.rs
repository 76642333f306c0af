//! Whatever happens to sequences, plans and batches: a step reads what it should, and nobody loses a token.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod common;
#[path = "common/world.rs"]
mod world;

use proptest::prelude::*;

use self::world::{World, ops};

fn run(num_blocks: usize, block_size: usize, num_batches: usize, ops: &[world::Op]) {
    let mut world = World::new(num_blocks, block_size, num_batches);
    for op in ops {
        world.apply(op);
    }
    let pool = world.pool.clone();
    world.end();
    common::assert_all_free(&pool);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_batch_reads_back_its_own_history(size in 1..5_usize, blocks in 5..20_usize, ops in ops(120)) {
        run(blocks, size, 1, &ops);
    }

    #[test]
    fn batches_on_one_pool_do_not_touch_each_others_tokens(
        size in 1..5_usize, blocks in 8..28_usize, batches in 2..4_usize, ops in ops(160)
    ) {
        run(blocks, size, batches, &ops);
    }
}
