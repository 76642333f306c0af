"""What the bookkeeping's tests share: small pools, whole steps, and comparing before with after."""

import contextlib

import kvfolio as kv
import numpy as np

PLAN_ARRAYS = {
    "rows": np.int32,
    "token_ids": np.int32,
    "positions": np.int64,
    "query_start_loc": np.int32,
    "seq_lens": np.int32,
    "block_table": np.int32,
    "slot_mapping": np.int64,
    "copies": np.int32,
    "page_indptr": np.int32,
    "page_indices": np.int32,
    "last_page_len": np.int32,
    "logits_rows": np.int32,
    "logits_indices": np.int64,
    "table_updates": np.int32,
    "skipped": np.int32,
    "never_fit": np.int32,
}


def batch_of(pool, max_sequences=8, max_tokens_per_sequence=64):
    return kv.Batch(pool, max_sequences=max_sequences, max_tokens_per_sequence=max_tokens_per_sequence)


def compute(batch, seq):
    """Admit a sequence and compute all of it; it stays in its row."""
    row = batch.add(seq)
    batch.plan(rows=[row]).commit()
    return row


def publish(pool, token_ids, **how):
    """Leave the full blocks of these tokens idle in the cache."""
    batch, seq = batch_of(pool, 1, max(1, len(token_ids))), pool.sequence(token_ids, **how)
    compute(batch, seq)
    seq.free()


def counts(pool):
    """(blank, idle, referenced, quarantined), which must add up."""
    states = pool.num_blank, pool.num_idle, pool.num_referenced, pool.num_quarantined
    assert sum(states) == pool.num_blocks
    assert pool.num_free == pool.num_blank + pool.num_idle
    return states


def picture(pool, *objects):
    """All that can be seen of a pool and of what lives in it, but for the counters of refusals."""
    pool.audit()
    stats = {name: value for name, value in pool.stats().items() if not name.startswith("refusals")}
    references = [pool.ref_count(block) for block in range(1, pool.num_blocks + 1)]
    return counts(pool), stats, references, [_visible(thing) for thing in objects]


def _visible(thing):
    if isinstance(thing, kv.BlockTable):
        return thing.num_tokens, thing.block_ids.tolist()
    if isinstance(thing, kv.Sequence):
        numbers = thing.num_tokens, thing.num_computed, thing.num_pending, thing.num_cached
        return numbers, thing.token_ids.tolist(), thing.block_ids.tolist()
    return thing.rows, thing.max_sequences, repr(thing)  # a batch, whose repr tells of plans in flight


@contextlib.contextmanager
def unchanged(pool, *objects):
    """Whatever happens inside leaves no trace."""
    before = picture(pool, *objects)
    yield
    assert picture(pool, *objects) == before
