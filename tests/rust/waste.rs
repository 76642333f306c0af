//! No sequence wastes a whole block, at any step of any workload.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod common;
#[path = "common/world.rs"]
mod world;

use proptest::prelude::*;

use self::world::{World, ops};

/// Empty slots of each live sequence.
fn empty_slots(world: &World) -> Vec<usize> {
    let block_size = world.pool.block_size();
    let steps = || world.runs.iter().flat_map(|run| &run.flights).flat_map(|flight| &flight.rows);
    let of_one = |live: &world::Live| {
        let planned = steps().filter(|row| row.counts && row.id == live.id).map(|row| row.stop).max();
        let computed = live.sequence.num_computed().unwrap();
        let slots = live.sequence.blocks().unwrap().len() * block_size;
        slots.checked_sub(computed.max(planned.unwrap_or(0))).unwrap()
    };
    world.lives.iter().map(of_one).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn only_a_last_block_has_empty_slots(
        size in 1..9_usize, blocks in 6..24_usize, batches in 1..3_usize, ops in ops(160)
    ) {
        let mut world = World::new(blocks, size, batches);
        for op in &ops {
            world.apply(op);
            let empty = empty_slots(&world);
            prop_assert!(empty.iter().all(|slots| *slots < size), "{empty:?}");
            prop_assert!(empty.iter().sum::<usize>() <= empty.len() * (size - 1));
        }
        let pool = world.pool.clone();
        world.end();
        common::assert_all_free(&pool);
    }
}
