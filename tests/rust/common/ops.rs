//! What may happen in a world.

use proptest::prelude::*;

use super::side::{SideOp, ops as side_ops};

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Admit {
        batch: usize,
        length: usize,
        bits: u32,
        kind: usize,
    },
    Readmit {
        pick: usize,
        batch: usize,
    },
    Extend {
        pick: usize,
        length: usize,
        bits: u32,
    },
    Grow {
        batch: usize,
        skip: usize,
        bits: u32,
    },
    Unknown {
        pick: usize,
        length: usize,
    },
    Resolve {
        pick: usize,
        length: usize,
    },
    Plan {
        batch: usize,
        budget: usize,
        partial: bool,
        cap: usize,
        skip: usize,
    },
    Execute {
        batch: usize,
    },
    Commit {
        batch: usize,
        bits: u32,
    },
    Rollback {
        batch: usize,
    },
    Drop {
        batch: usize,
        pick: usize,
    },
    Sample {
        pick: usize,
    },
    Truncate {
        pick: usize,
        keep: usize,
        bits: u32,
    },
    Fork {
        pick: usize,
    },
    Remove {
        pick: usize,
        preempt: bool,
    },
    Free {
        pick: usize,
    },
    Discard {
        pick: usize,
        before: usize,
    },
    Reorder {
        batch: usize,
        parent: usize,
        row: usize,
    },
    Side(SideOp),
    /// Rare: nothing that began before is published any more.
    Reset {
        luck: usize,
    },
}

pub(crate) fn ops(most: usize) -> impl Strategy<Value = Vec<Op>> {
    let (n, bits) = (0..64_usize, any::<u32>());
    let admit = (n.clone(), 1..16_usize, bits, 0..8_usize);
    let plan = (n.clone(), 0..24_usize, any::<bool>(), 0..12_usize, 0..8_usize);
    let op = prop_oneof![
        6 => admit.prop_map(|(batch, length, bits, kind)| Op::Admit { batch, length, bits, kind }),
        6 => (n.clone(), n.clone()).prop_map(|(pick, batch)| Op::Readmit { pick, batch }),
        4 => (n.clone(), 1..5_usize, bits).prop_map(|(pick, length, bits)| Op::Extend { pick, length, bits }),
        1 => (n.clone(), 1..3_usize).prop_map(|(pick, length)| Op::Unknown { pick, length }),
        4 => (n.clone(), 1..6_usize).prop_map(|(pick, length)| Op::Resolve { pick, length }),
        12 => plan.prop_map(|(batch, budget, partial, cap, skip)| Op::Plan { batch, budget, partial, cap, skip }),
        4 => n.clone().prop_map(|batch| Op::Execute { batch }),
        8 => (n.clone(), bits).prop_map(|(batch, bits)| Op::Commit { batch, bits }),
        2 => n.clone().prop_map(|batch| Op::Rollback { batch }),
        1 => (n.clone(), n.clone()).prop_map(|(batch, pick)| Op::Drop { batch, pick }),
        8 => n.clone().prop_map(|pick| Op::Sample { pick }),
        8 => (n.clone(), 0..26_usize, bits).prop_map(|(pick, keep, bits)| Op::Truncate { pick, keep, bits }),
        3 => n.clone().prop_map(|pick| Op::Fork { pick }),
        3 => (n.clone(), any::<bool>()).prop_map(|(pick, preempt)| Op::Remove { pick, preempt }),
        2 => n.clone().prop_map(|pick| Op::Free { pick }),
        1 => (n.clone(), 0..26_usize).prop_map(|(pick, before)| Op::Discard { pick, before }),
        1 => (n.clone(), n.clone(), n.clone()).prop_map(|(batch, parent, row)| Op::Reorder { batch, parent, row }),
        2 => (n.clone(), n.clone(), bits).prop_map(|(batch, skip, bits)| Op::Grow { batch, skip, bits }),
        8 => side_ops().prop_map(Op::Side),
        1 => (0..8_usize).prop_map(|luck| Op::Reset { luck }),
    ];
    prop::collection::vec(op, 1..=most)
}
