//! A thread that is stopped at each of its points in turn: all others get through, and nothing is lost.

use super::{
    actor::{Step, World},
    baton::{Freeze, Plan, Random},
    play,
};
use crate::pool::EvictionPolicy;

use Step::{
    Allocate, Borrow, Compact, Drop, DropAll, EndHolds, Hit, Hold, Match, Overwrite, PassOn, Publish,
    Receive, Release, Reopen, Reset, Restore, Share, Take, TakeBack, Undo,
};

const MERGE: Step = Publish { merge: true };
const KEEP: Step = Publish { merge: false };

/// What the others do: all that could wait for somebody. Long enough for the log to go round, and to be compacted.
const OTHERS: [&[Step]; 3] = [
    &[
        Take(1),
        MERGE,
        Drop,
        Hit(0, 1),
        Drop,
        Take(2),
        KEEP,
        DropAll,
        Undo(0, 1),
        Compact,
        Take(1),
        MERGE,
        DropAll,
        Take(1),
        KEEP,
        Overwrite,
        MERGE,
        DropAll,
        Hit(0, 2),
        DropAll,
        Take(1),
        KEEP,
        DropAll,
        Undo(1, 1),
        Take(2),
    ],
    &[
        Receive,
        Hit(0, 2),
        Hold,
        Take(1),
        Reopen,
        EndHolds,
        Borrow,
        DropAll,
        Reset,
        Take(1),
        KEEP,
        DropAll,
        Match(2),
        Allocate(1),
        Share,
        Release,
        TakeBack,
        KEEP,
        Hold,
        Hit(0, 1),
        EndHolds,
        DropAll,
        Take(1),
    ],
    &[Take(2), DropAll, Take(1), DropAll],
];

fn check(script: &[Step]) {
    for eviction in EvictionPolicy::ALL {
        check_under(*eviction, script);
    }
}

fn check_under(eviction: EvictionPolicy, script: &[Step]) {
    let mut num_frozen = 0;
    for (others, num_blocks, num_keys) in
        [(0..1, 2, 1), (0..1, 3, 2), (0..2, 3, 1), (1..3, 2, 2), (2..3, 1, 1)]
    {
        let mut scripts = vec![script.to_vec()];
        scripts.extend(OTHERS[others].iter().map(|others| others.to_vec()));
        for at in 1.. {
            let freeze = Some(Freeze { thread: 0, at, alone: true });
            let plan = Plan { stay: 4, freeze, random: Random::new(at as u64) };
            let world = World::new(eviction, num_blocks, scripts.len(), num_keys);
            match play(&world, plan, 0, &scripts) {
                Err(why) => {
                    panic!("{eviction}, {script:?} frozen at its point {at}, {num_blocks} blocks: {why}")
                }
                Ok(points) if points[0] < at => break,
                Ok(_) => num_frozen += 1,
            }
        }
    }
    assert!(num_frozen > 20, "{num_frozen}");
}

#[test]
fn in_taking_and_giving_back_blank_blocks() {
    check(&[Take(1), Drop, Take(2), DropAll]);
}

#[test]
fn in_lending() {
    check(&[Allocate(1), Share, Release, TakeBack, Borrow, DropAll, Release]);
}

#[test]
fn in_passing_on() {
    check(&[Take(1), PassOn, KEEP, Drop]);
}

#[test]
fn in_publishing_and_leaving_idle() {
    check(&[Take(1), MERGE, Drop, Take(1), KEEP, Drop]);
}

#[test]
fn in_merging() {
    check(&[Take(1), KEEP, Take(1), MERGE, DropAll]);
}

#[test]
fn in_evicting() {
    check(&[Take(1), KEEP, Drop, Take(1), KEEP, Drop, Take(2), DropAll]);
}

#[test]
fn in_bringing_back_what_was_evicted() {
    // By then all of two logs is for the protected one, and that is where the last block has to come from.
    check(&[Take(1), KEEP, Drop, Hit(0, 1), Drop, Take(2), DropAll, Take(1), KEEP, Drop, Take(2), DropAll]);
}

#[test]
fn in_hitting() {
    check(&[Take(1), KEEP, Drop, Hit(0, 1), Drop, Hit(0, 2), DropAll, Match(2)]);
}

#[test]
fn in_undoing_a_hit() {
    check(&[Take(1), KEEP, Drop, Undo(0, 1), Undo(0, 2)]);
}

#[test]
fn in_overwriting() {
    check(&[Take(1), KEEP, Overwrite, MERGE, DropAll]);
}

#[test]
fn in_opening_and_closing() {
    check(&[Take(1), KEEP, Reopen, DropAll]);
}

#[test]
fn in_holding() {
    check(&[Take(1), KEEP, Hold, Hit(0, 1), EndHolds, DropAll]);
}

#[test]
fn in_restoring() {
    check(&[Take(1), Hold, Restore, EndHolds, KEEP, DropAll]);
}

#[test]
fn in_compacting() {
    check(&[Take(1), KEEP, Drop, Take(1), KEEP, Drop, Compact]);
}

#[test]
fn in_a_reset() {
    check(&[Take(1), KEEP, Drop, Take(1), KEEP, Reset, DropAll]);
}

#[test]
fn in_making_room() {
    let mut script = vec![Take(1), KEEP, Drop];
    script.extend([Hit(0, 1), Drop].repeat(6)); // each leaves an entry behind, until the log is compacted
    check(&script);
}
