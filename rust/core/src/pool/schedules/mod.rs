//! Seeded interleavings of the pool's calls, and threads that are stopped half way.
//!
//! Where `models` tries every interleaving of two calls, with the machine's weak memory, this one tries many of
//! many calls, of sequential consistency. Built by `--cfg schedules`: then each operation on an atomic is a point
//! where another thread may go on ([`baton`]). `SCHEDULES` is how many seeds are tried, `SCHEDULES_SEED` the first.

mod actor;
mod baton;
mod frozen;

use self::{
    actor::{Actor, Step, World},
    baton::{Freeze, Plan, Random, run},
};
use crate::pool::EvictionPolicy;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|number| number.parse().ok()).unwrap_or(default)
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    let first = setting("SCHEDULES_SEED", 0);
    first..first + setting("SCHEDULES", default)
}

/// Run scripts on the threads of one world, give everything back, and check what is left. Returns how many points
/// each thread has come to.
fn play(world: &World, plan: Plan, seed: u64, scripts: &[Vec<Step>]) -> Result<Vec<usize>, String> {
    let actors = scripts.iter().enumerate().map(|(own, script)| {
        let mut actor = Actor::new(world, own, seed);
        move || {
            for step in script {
                actor.step(*step);
            }
            actor
        }
    });
    let (actors, points) = run(plan, actors.collect())?;
    let give_back = || {
        world.check();
        actors.into_iter().for_each(Actor::finish);
        world.check_empty();
    };
    run(Plan { stay: 1, freeze: None, random: Random::new(seed) }, vec![give_back])?;
    Ok(points)
}

/// Some threads that do anything to a small pool, in any order.
fn play_any(eviction: EvictionPolicy, seed: u64, does_freeze: bool) -> Result<Vec<usize>, String> {
    let mut random = Random::new(seed);
    let num_threads = 2 + random.below(2);
    let world = World::new(eviction, 1 + random.below(6), num_threads, 1 + random.below(4));
    let num_steps = 2 + random.below(12);
    let kinds = random.below(usize::MAX) & random.below(usize::MAX);
    let script = |random: &mut Random| (0..num_steps).map(|_| Step::any(random, kinds)).collect();
    let scripts: Vec<_> = (0..num_threads).map(|_| script(&mut random)).collect();
    let freeze = does_freeze.then(|| Freeze {
        thread: 0,
        at: 1 + random.below(30 * num_steps),
        alone: random.below(2) == 0,
    });
    let stay = 1 << random.below(7);
    play(&world, Plan { stay, freeze, random }, seed, &scripts)
}

fn play_seeds(eviction: EvictionPolicy, does_freeze: bool) {
    for seed in seeds(4000) {
        if let Err(why) = play_any(eviction, seed, does_freeze) {
            panic!("{eviction}, SCHEDULES_SEED={seed} SCHEDULES=1: {why}");
        }
    }
}

#[test]
fn any_calls_in_any_order_agree() {
    play_seeds(EvictionPolicy::Lru, false);
}

#[test]
fn any_calls_get_through_past_a_frozen_thread() {
    play_seeds(EvictionPolicy::Lru, true);
}

#[test]
fn any_calls_in_any_order_agree_about_two_logs() {
    play_seeds(EvictionPolicy::Adaptive, false);
}

#[test]
fn any_calls_get_through_past_a_frozen_thread_with_two_logs() {
    play_seeds(EvictionPolicy::Adaptive, true);
}

#[test]
fn a_seed_runs_the_same_way_each_time() {
    for (seed, eviction) in (0..50).zip(EvictionPolicy::ALL.iter().cycle()) {
        assert_eq!(play_any(*eviction, seed, false), play_any(*eviction, seed, false));
    }
}
