//! What K and V would be: a number a slot, which tells the history that it was computed from.

use std::sync::atomic::{AtomicU64, Ordering};

use kvfolio::{BlockId, BlockPool, Extra, UNKNOWN_TOKEN};

/// Every slot of every block. Relaxed throughout: it is for the pool to order what threads do to one block.
pub(crate) struct Memory {
    slots: Vec<AtomicU64>,
    block_size: usize,
}

impl Memory {
    pub(crate) fn new(pool: &BlockPool) -> Self {
        let block_size = pool.block_size();
        let slots = (0..pool.num_physical_blocks() * block_size).map(|_| AtomicU64::new(0)).collect();
        Self { slots, block_size }
    }

    pub(super) fn read(&self, slot: usize) -> u64 {
        self.slots[slot].load(Ordering::Relaxed)
    }

    pub(super) fn write(&self, slot: usize, value: u64) {
        self.slots[slot].store(value, Ordering::Relaxed);
    }

    /// Where a position is; `None` if its block was discarded.
    pub(super) fn slot(&self, blocks: &[BlockId], position: usize) -> Option<usize> {
        let block = blocks[position / self.block_size];
        (!block.is_null()).then(|| block.as_i32() as usize * self.block_size + position % self.block_size)
    }

    pub(super) fn block(&self, block: i32) -> Vec<u64> {
        (0..self.block_size).map(|offset| self.read(block as usize * self.block_size + offset)).collect()
    }

    pub(super) fn write_block(&self, block: i32, content: &[u64]) {
        for (offset, value) in content.iter().enumerate() {
            self.write(block as usize * self.block_size + offset, *value);
        }
    }
}

/// Something at the positions `start..stop` that the tokens do not tell.
#[derive(Clone, Copy)]
pub(super) struct Picture {
    start: usize,
    stop: usize,
    digest: u8,
}

impl Picture {
    /// One behind the first `num_tokens` tokens, or none.
    pub(super) fn behind(num_tokens: usize, bits: u32) -> Option<Self> {
        let start = num_tokens + (bits >> 24 & 3) as usize;
        let stop = start + 1 + (bits >> 22 & 3) as usize;
        (bits >> 28 & 3 == 1).then_some(Self { start, stop, digest: (bits >> 21 & 1) as u8 })
    }

    pub(super) fn extra(&self) -> Extra {
        Extra::new(self.start, self.stop, &[self.digest]).unwrap()
    }

    fn at(&self, position: usize) -> u64 {
        let seen = (self.start..self.stop).contains(&position);
        if seen { (u64::from(self.digest) + 1) << 32 | (position - self.start + 1) as u64 } else { 0 }
    }
}

/// The sequence keeps its first `n` tokens.
pub(super) fn cut_pictures(pictures: &mut Vec<Picture>, n: usize) {
    pictures.retain(|picture| picture.start < n);
    for picture in pictures {
        picture.stop = picture.stop.min(n);
    }
}

/// What stands before the first token.
pub(super) fn seed(tenant: u64) -> u64 {
    tenant
}

/// What a slot holds whose token follows on `previous`.
pub(super) fn follow(previous: u64, token: i32, pictures: &[Picture], position: usize) -> u64 {
    let token = if token == UNKNOWN_TOKEN { sampled(previous) } else { token };
    let seen = pictures.iter().fold(0, |seen, picture| seen ^ picture.at(position));
    (previous ^ (token as u64 + 1) ^ seen.wrapping_mul(0xd6e8_feb8_6659_fd93))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .rotate_left(29)
        .wrapping_add(1)
}

/// The token that the model gives after a history.
pub(super) fn sampled(previous: u64) -> i32 {
    i32::from(previous.count_ones().is_multiple_of(2))
}

/// What the slots of these tokens are to hold.
pub(super) fn history(tenant: u64, pictures: &[Picture], tokens: &[i32]) -> Vec<u64> {
    let next = |previous: &mut u64, (position, token): (usize, &i32)| {
        *previous = follow(*previous, *token, pictures, position);
        Some(*previous)
    };
    tokens.iter().enumerate().scan(seed(tenant), next).collect()
}

/// What stands before `position`.
pub(super) fn before(tenant: u64, history: &[u64], position: usize) -> u64 {
    if position == 0 { seed(tenant) } else { history[position - 1] }
}
