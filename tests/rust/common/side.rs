//! Who has blocks of the pool besides the batches: lent ones, shared ones, and tables of their own.

use std::collections::HashSet;

use kvfolio::{BlockId, BlockPool, BlockTable};
use proptest::prelude::*;

use super::{Memory, World, history};

/// More than these are not kept.
const MOST: usize = 3;

#[derive(Clone, Debug)]
pub(crate) enum SideOp {
    /// Take fresh blocks and write into them.
    Allocate {
        blocks: usize,
    },
    /// Take a reference to each block of a sequence.
    Share {
        pick: usize,
    },
    /// Make lent blocks a table.
    Adopt {
        pick: usize,
    },
    Append {
        pick: usize,
        length: usize,
    },
    Fork {
        pick: usize,
        keep: usize,
    },
    Cut {
        pick: usize,
        keep: usize,
    },
    Discard {
        pick: usize,
        before: usize,
    },
    GiveBack {
        pick: usize,
    },
}

pub(super) fn ops() -> impl Strategy<Value = SideOp> {
    let n = 0..64_usize;
    prop_oneof![
        3 => (1..5_usize).prop_map(|blocks| SideOp::Allocate { blocks }),
        3 => n.clone().prop_map(|pick| SideOp::Share { pick }),
        2 => n.clone().prop_map(|pick| SideOp::Adopt { pick }),
        3 => (n.clone(), 1..6_usize).prop_map(|(pick, length)| SideOp::Append { pick, length }),
        1 => (n.clone(), 0..20_usize).prop_map(|(pick, keep)| SideOp::Fork { pick, keep }),
        1 => (n.clone(), 0..20_usize).prop_map(|(pick, keep)| SideOp::Cut { pick, keep }),
        1 => (n.clone(), 0..20_usize).prop_map(|(pick, before)| SideOp::Discard { pick, before }),
        4 => n.prop_map(|pick| SideOp::GiveBack { pick }),
    ]
}

enum Blocks {
    Lent(Vec<BlockId>),
    Table(BlockTable),
}

pub(super) struct Side {
    blocks: Blocks,
    /// What its slots hold, in order, as far as that is known.
    content: Vec<Option<u64>>,
}

impl Side {
    fn blocks(&self) -> &[BlockId] {
        match &self.blocks {
            Blocks::Lent(blocks) => blocks,
            Blocks::Table(table) => table.blocks(),
        }
    }

    fn table(&mut self) -> Option<&mut BlockTable> {
        match &mut self.blocks {
            Blocks::Lent(_) => None,
            Blocks::Table(table) => Some(table),
        }
    }

    /// Nobody has written into what it refers to.
    pub(super) fn check(&self, memory: &Memory) {
        for (position, value) in self.content.iter().enumerate() {
            if let (Some(value), Some(slot)) = (value, memory.slot(self.blocks(), position)) {
                assert_eq!(memory.read(slot), *value, "position {position} of what is held on the side");
            }
        }
    }

    /// Write the unknown slots from `first` on.
    fn write(&mut self, memory: &Memory, first: usize, value: u64) {
        for position in first..self.content.len() {
            if let Some(slot) = memory.slot(self.blocks(), position) {
                memory.write(slot, value);
                self.content[position] = Some(value);
            }
        }
    }

    pub(super) fn give_back(self, pool: &BlockPool) {
        if let Blocks::Lent(blocks) = self.blocks {
            pool.release(&blocks).unwrap();
        }
    }
}

impl World {
    pub(super) fn side(&mut self, op: &SideOp) {
        let before = self.counts();
        let pick = |pick: usize| (!self.sides.is_empty()).then(|| pick % self.sides.len());
        match *op {
            SideOp::Allocate { blocks } => {
                if let Some(blocks) = self.attempt(self.pool.allocate(blocks), before) {
                    let value = self.next_id() as u64;
                    let content = vec![None; blocks.len() * self.pool.block_size()];
                    let mut side = Side { blocks: Blocks::Lent(blocks), content };
                    side.write(&self.memory, 0, value);
                    self.sides.push(side);
                }
            }
            SideOp::Share { pick } => self.share(pick),
            SideOp::Adopt { pick: index } => {
                let Some(index) = pick(index) else { return };
                let side = &mut self.sides[index];
                if let Blocks::Lent(blocks) = &side.blocks {
                    let table = self.pool.table_of(blocks, side.content.len()).unwrap();
                    side.blocks = Blocks::Table(table);
                }
            }
            SideOp::Append { pick: index, length } => {
                let Some(index) = pick(index) else { return };
                let Some(table) = self.sides[index].table() else { return };
                let result = table.append(length);
                if let Some(copy) = self.attempt(result, before) {
                    let value = self.next_id() as u64;
                    let (memory, side) = (&self.memory, &mut self.sides[index]);
                    if let Some((source, target)) = copy {
                        memory.write_block(target.as_i32(), &memory.block(source.as_i32()));
                    }
                    let first = side.content.len();
                    side.content.resize(first + length, None);
                    side.write(memory, first, value);
                }
            }
            SideOp::Fork { pick: index, keep } => {
                let Some(index) = pick(index) else { return };
                let side = &mut self.sides[index];
                let content = side.content.iter().take(keep).copied().collect();
                let Some(table) = side.table() else { return };
                let result = table.fork(Some(keep));
                if let Some(table) = self.attempt(result, before) {
                    self.sides.push(Side { blocks: Blocks::Table(table), content });
                }
            }
            SideOp::Cut { pick: index, keep } => {
                let Some(index) = pick(index) else { return };
                let Some(table) = self.sides[index].table() else { return };
                let result = table.truncate(keep);
                if self.attempt(result, before).is_some() {
                    self.sides[index].content.truncate(keep);
                }
            }
            SideOp::Discard { pick: index, before: position } => {
                let Some(index) = pick(index) else { return };
                let Some(table) = self.sides[index].table() else { return };
                let result = table.discard_before(position);
                self.attempt(result, before);
            }
            SideOp::GiveBack { pick: index } => {
                if let Some(index) = pick(index) {
                    self.sides.swap_remove(index).give_back(&self.pool);
                }
            }
        }
        if self.sides.len() > MOST {
            self.sides.remove(0).give_back(&self.pool);
        }
    }

    /// Refer to the blocks with computed tokens of a sequence, as long as none was discarded.
    fn share(&mut self, pick: usize) {
        let Some(index) = self.live(pick) else { return };
        let live = &self.lives[index];
        let num_computed = live.sequence.num_computed().unwrap();
        let mut blocks = live.sequence.blocks().unwrap();
        blocks.truncate(num_computed.div_ceil(self.pool.block_size()));
        if blocks.iter().any(|block| block.is_null()) {
            return;
        }
        self.pool.share(&blocks).unwrap();
        let history = history(live.tenant, &live.pictures, &live.sequence.token_ids().unwrap());
        let pending: HashSet<_> = self.pending_copies();
        let known = |(position, value): (usize, &u64)| {
            (!pending.contains(&blocks[position / self.pool.block_size()].as_i32())).then_some(*value)
        };
        let content = history[..num_computed].iter().enumerate().map(known).collect();
        self.sides.push(Side { blocks: Blocks::Lent(blocks), content });
    }
}
