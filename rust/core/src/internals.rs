//! For the project's own benchmarks, behind the feature `internals`: what batches and tables do to the pool,
//! without them. No promise is made about any of it.

use crate::{BlockId, BlockPool, Context, Key, key::KeyChain};

/// Keys of a chain of `n` blocks of one token.
#[must_use]
pub fn keys(n: usize) -> Vec<Key> {
    chain(&(0..n as i32).collect::<Vec<_>>(), 1)
}

/// Keys of the full blocks of some tokens.
#[must_use]
pub fn chain(tokens: &[i32], block_size: usize) -> Vec<Key> {
    let mut chain = KeyChain::new(&Context::default(), block_size);
    chain.extend(tokens, &[], block_size, tokens.len() / block_size);
    chain.keys().to_vec()
}

/// `n` blocks with a table's reference each, if as many are free.
#[must_use]
pub fn take(pool: &BlockPool, n: usize) -> Option<Vec<BlockId>> {
    let mut blocks = Vec::with_capacity(n);
    pool.shared().reserve(n).then(|| {
        pool.shared().take_reserved(n, &mut blocks);
        blocks
    })
}

/// Give back a table's reference to each.
pub fn give(pool: &BlockPool, blocks: &[BlockId]) {
    pool.shared().drop_references(blocks);
}

/// Take `n` ids of blank blocks and give them back: the free list alone, without any block's state.
pub fn cycle_ids(pool: &BlockPool, n: usize, ids: &mut Vec<BlockId>) {
    pool.shared().cycle_ids(n, ids);
}

/// Publish blocks that are not published yet.
pub fn publish(pool: &BlockPool, blocks: &[BlockId], keys: &[Key]) {
    pool.shared().publish(blocks, keys, pool.shared().epoch(), false);
}

/// A table's reference to each published block of the longest prefix.
#[must_use]
pub fn hit(pool: &BlockPool, keys: &[Key]) -> Vec<BlockId> {
    pool.shared().hold_prefix(keys, None).0
}

/// Bytes of the pool's bookkeeping.
#[must_use]
pub fn bytes(pool: &BlockPool) -> usize {
    pool.shared().bytes()
}
