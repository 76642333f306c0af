"""What can only be measured: the bookkeeping of a decode step, and attention, on this machine now."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvfolio as kv
from kvfolio import _arrays, _native

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128


def best(work: Callable[[], object], runs: int) -> float:
    """The least time of some runs, in seconds."""
    times = []
    for _ in range(runs):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)


def decode_step_seconds(block_size: int, *, sequences: int, length: int, steps: int = 512) -> float:
    """Seconds of bookkeeping a decode step: plan, every array but the CSR trio read, commit, extend.

    Every sequence decodes one token a step, as many of them at each place in a block as at any other. Runs
    are long enough for each sequence to fill a block, and the best of some is taken, as others use the
    machine, too.
    """
    run = max(block_size, 16)
    runs = max(2, steps // run)
    room = length + block_size + run * (runs + 2)
    pool = kv.BlockPool(sequences * (room // block_size + 1), block_size)
    batch = kv.Batch(pool, max_sequences=sequences, max_tokens_per_sequence=room)
    tokens = np.full(sequences, 7, np.int32)
    for i in range(sequences):
        prompt = np.random.default_rng(i).integers(0, 100_000, length + i % block_size, np.int32)
        row = batch.add(pool.sequence(prompt))
        with batch.plan(rows=[row]) as plan:
            pass
        plan.extend(tokens[:1])

    def work() -> None:
        for _ in range(run):
            plan = batch.plan()
            _ = plan.rows, plan.token_ids, plan.positions, plan.query_start_loc, plan.seq_lens
            _ = plan.block_table, plan.slot_mapping, plan.copies, plan.table_updates
            _ = plan.logits_rows, plan.logits_indices, plan.skipped, plan.never_fit
            plan.commit()
            plan.extend(tokens)

    work()
    return best(work, runs) / run


def attention_bandwidth(
    block_size: int, *, sequences: int, length: int, dtype: str, runs: int = 8
) -> tuple[float, float]:
    """Bytes of K and V a second in decode, and in a plain read of the same memory.

    One layer, 32 query and 8 KV heads of 128; blocks lie scattered. The two take turns, the best run of each
    counts.
    """
    blocks, _ = kv.block_layout(length, block_size)
    pool = kv.BlockPool(sequences * blocks, block_size)
    cache = kv.KVCache(pool, 1, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    for array in (cache.keys[0], cache.values[0]):
        _fill(array)
    ids = np.random.default_rng(0).permutation(np.arange(1, pool.num_blocks + 1, dtype=np.int32))
    # What attend reads of a plan.
    plan: Any = SimpleNamespace(
        num_tokens=sequences,
        block_table=ids.reshape(sequences, blocks),
        seq_lens=np.full(sequences, length, np.int32),
        query_start_loc=np.arange(sequences + 1, dtype=np.int32),
    )
    q = np.empty((sequences, NUM_HEADS, HEAD_DIM), cache.keys[0].dtype)
    _fill(q)
    memory = [array.view(np.uint8).reshape(-1) for array in (cache.keys[0], cache.values[0])]
    attend, read = float("inf"), float("inf")
    cache.attend(0, q, plan)
    for _ in range(runs):
        attend = min(attend, best(lambda: cache.attend(0, q, plan), 1))
        read = min(read, best(lambda: _native.read_memory(memory), 1))
    held = 2 * sequences * length * NUM_KV_HEADS * HEAD_DIM * _arrays.ITEM_SIZES[dtype]
    return held / attend, sum(array.nbytes for array in memory) / read


def _fill(array: NDArray[Any]) -> None:
    """Normal numbers, repeated: memory that was never written is no memory yet."""
    some = np.random.default_rng(0).standard_normal(65_521).astype(np.float32)
    if array.dtype == np.uint16:  # the bits of bfloat16
        values: NDArray[Any] = (some.view(np.uint32) >> 16).astype(np.uint16)
    else:
        values = some.astype(array.dtype)
    flat = array.reshape(-1)
    for start in range(0, len(flat), len(values)):
        piece = flat[start : start + len(values)]
        piece[:] = values[: len(piece)]
