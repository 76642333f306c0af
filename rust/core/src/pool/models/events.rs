//! Models of what a follower is told while others publish, evict and reset. Whatever it sees on the way, in the end it
//! knows what can be found.

use std::collections::HashSet;

use super::*;
use crate::pool::{Event, EventSource, PoolOptions, events::Note};

struct Follower {
    source: EventSource,
    known: HashSet<Key>,
}

impl Follower {
    fn new(pool: &BlockPool) -> Self {
        Self { source: pool.events().unwrap(), known: HashSet::new() }
    }

    fn drain(&mut self) {
        for event in self.source.drain() {
            match event {
                Event::Stored(run) => run.iter().for_each(|block| assert!(self.known.insert(block.key()))),
                Event::Removed(keys) => keys.iter().for_each(|key| assert!(self.known.remove(key))),
                Event::Cleared => self.known.clear(),
            }
        }
    }

    fn knows(&mut self, keys: &[Key]) {
        self.drain();
        assert_eq!(self.known, keys.iter().copied().collect());
    }
}

/// Publish a block that the caller has, as the first of a sequence.
fn publish(pool: &BlockPool, block: BlockId, key: Key, epoch: u64) {
    let note = |_| Note::new(None, epoch, (None, 0), (&[block], &[key], &[0]), [].into());
    pool.shared().publish_noted(&[block], &[key], epoch, Some(&note), true);
}

fn setup() -> (BlockPool, Vec<Key>, BlockId) {
    let pool =
        BlockPool::with_options(1, 1, &PoolOptions { events: true, ..PoolOptions::default() }).unwrap();
    let keys = keys(&pool, 2);
    let block = allocate(pool.shared(), 1).unwrap()[0];
    (pool, keys, block)
}

/// The block is idle, holds the first key, and the follower knows it.
fn setup_idle() -> (BlockPool, Vec<Key>, Follower) {
    let (pool, keys, block) = setup();
    publish(&pool, block, keys[0], 0);
    pool.shared().drop_references(&[block]);
    let mut follower = Follower::new(&pool);
    follower.knows(&keys[..1]);
    (pool, keys, follower)
}

#[test]
fn who_looks_while_a_block_is_published_knows_it_in_the_end() {
    check(|| {
        let (pool, keys, block) = setup();
        let (other, key) = (pool.clone(), keys[0]);
        let mut follower = Follower::new(&pool);
        at_once(move || publish(&other, block, key, 0), || follower.drain());
        follower.knows(&keys[..1]);
    });
}

#[test]
fn who_looks_while_a_block_is_evicted_and_filled_anew_knows_the_new_one() {
    check(|| {
        let (pool, keys, mut follower) = setup_idle();
        let (other, key) = (pool.clone(), keys[1]);
        at_once(
            move || {
                let block = allocate(other.shared(), 1).unwrap()[0];
                publish(&other, block, key, 0);
            },
            || follower.drain(),
        );
        follower.knows(&keys[1..]);
    });
}

#[test]
fn who_looks_while_a_block_is_opened_knows_whether_it_was_closed_again() {
    for is_closed in [false, true] {
        check(move || {
            let (pool, keys, block) = setup();
            publish(&pool, block, keys[0], 0);
            let mut follower = Follower::new(&pool);
            let other = pool.clone();
            at_once(
                move || {
                    assert_eq!(other.shared().open(block), Opening::Unpublished);
                    if is_closed {
                        other.shared().republish(block, 0);
                    }
                },
                || follower.drain(),
            );
            follower.knows(if is_closed { &keys[..1] } else { &[] });
        });
    }
}

#[test]
fn after_a_reset_nothing_is_known_of_what_was_published_before_it() {
    check(|| {
        let (pool, keys, block) = setup();
        let mut follower = Follower::new(&pool);
        let (other, key, epoch) = (pool.clone(), keys[0], pool.shared().epoch());
        at_once(
            move || publish(&other, block, key, epoch),
            || {
                pool.reset_prefix_cache();
                follower.drain();
            },
        );
        follower.knows(&[]);
    });
}

#[test]
fn who_looks_while_an_evicted_block_stays_blank_knows_nothing() {
    check(|| {
        let (pool, _, mut follower) = setup_idle();
        let other = pool.clone();
        at_once(move || assert!(allocate(other.shared(), 1).is_some()), || follower.drain());
        follower.knows(&[]);
    });
}
