//! What policies of eviction keep, on whole traces.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

#[path = "common/replay.rs"]
mod replay;

use std::fs;

use kvfolio::EvictionPolicy::{Adaptive, Lru};
use replay::hits_of_the_pool;

/// A conversation of 6 blocks goes on every so often, and in between others ask something once.
fn a_conversation_among_strangers() -> Vec<Vec<u32>> {
    let stranger = |number: u32| (1000 + 8 * number..1008 + 8 * number).collect();
    let turn = |number: u32| [(0..6).collect()].into_iter().chain((3 * number..3 * number + 3).map(stranger));
    (0..20).flat_map(turn).collect()
}

#[test]
fn a_conversation_is_kept_though_more_than_the_pool_comes_in_between() {
    let requests = a_conversation_among_strangers();
    assert_eq!(hits_of_the_pool(&requests, 16, Lru).unwrap(), 0);
    // It has to come back once before it is known to come back; then some of it is lost until the share has grown.
    let hits = hits_of_the_pool(&requests, 16, Adaptive).unwrap();
    assert!(hits >= 16 * 6, "{hits} of {}", 18 * 6);
}

#[test]
fn where_all_fits_policies_do_not_differ() {
    let requests = a_conversation_among_strangers();
    for policy in [Lru, Adaptive] {
        assert_eq!(hits_of_the_pool(&requests, 1000, policy).unwrap(), 19 * 6);
    }
}

#[test]
fn working_sets_that_change_are_followed() {
    // Each is asked for often, one after the other: what was protected has to give way.
    let working_set = |number: u32| vec![(100 * number..100 * number + 12).collect::<Vec<_>>(); 10];
    let requests: Vec<_> = (0..40).flat_map(working_set).collect();
    for policy in [Lru, Adaptive] {
        assert_eq!(hits_of_the_pool(&requests, 16, policy).unwrap(), 40 * 9 * 12, "{policy}");
    }
}

#[test]
fn on_real_conversations_more_is_found() {
    let Ok(text) = fs::read_to_string(replay::conversations()) else {
        eprintln!("skipped: there is no trace at {}", replay::conversations().display());
        return;
    };
    let requests = replay::read(&text).unwrap();
    let accesses = requests.iter().map(Vec::len).sum::<usize>() as f64;
    // Hit rates of a plain LRU, block by block, and what is won at least.
    for (capacity, plain, won) in [(3_000, 0.0650, 0.04), (10_000, 0.2112, 0.01)] {
        let [lru, adaptive] = [Lru, Adaptive]
            .map(|policy| hits_of_the_pool(&requests, capacity, policy).unwrap() as f64 / accesses);
        assert!((lru - plain).abs() <= 0.005, "{capacity}: {lru}");
        assert!(adaptive - lru >= won, "{capacity}: {adaptive} against {lru}");
    }
}
