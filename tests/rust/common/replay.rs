//! Requests one after the other, and what the cache has of them.

use std::{io, path::PathBuf};

use kvfolio::{Batch, BlockPool, Context, EvictionPolicy, PlanRequest, PoolOptions};
use serde::Deserialize;

const BLOCK_SIZE: usize = 2;

#[derive(Deserialize)]
struct Request {
    hash_ids: Vec<u32>,
}

/// Where Mooncake's conversation trace is, if it is there.
pub(crate) fn conversations() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces/mooncake_conversation_trace.jsonl")
}

/// The requests of a file of lines like Mooncake's: `{"hash_ids": [0, 1, 2], ...}`, each id the name of a block and of
/// all that is before it.
pub(crate) fn read(text: &str) -> io::Result<Vec<Vec<u32>>> {
    let request = |line| Ok(serde_json::from_str::<Request>(line)?.hash_ids);
    text.lines().map(request).collect()
}

/// Blocks that were found. Every request is admitted, computed and freed before the next. The token behind the last
/// block, which a request has to compute anyway, takes one block more than the cache's capacity, and that one is
/// blank again with the request's end.
pub(crate) fn hits_of_the_pool(
    requests: &[Vec<u32>],
    capacity: usize,
    eviction: EvictionPolicy,
) -> kvfolio::Result<usize> {
    let longest = requests.iter().map(Vec::len).max().unwrap_or(0);
    let options = PoolOptions { eviction, ..PoolOptions::default() };
    let pool = BlockPool::with_options(capacity + 1, BLOCK_SIZE, &options)?;
    let batch = Batch::new(&pool, 1, longest * BLOCK_SIZE + 1)?;
    let mut hits = 0;
    for request in requests {
        let mut tokens: Vec<_> = request.iter().flat_map(|id| [*id as i32; BLOCK_SIZE]).collect();
        tokens.push(0);
        let sequence = pool.sequence(&tokens, &Context::default(), true, true)?;
        batch.add(&sequence)?;
        batch.plan(&PlanRequest::default())?.commit(None)?;
        hits += sequence.num_cached()? / BLOCK_SIZE;
        sequence.free()?;
    }
    pool.audit()?;
    Ok(hits)
}
