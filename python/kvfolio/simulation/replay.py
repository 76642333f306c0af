"""The hit rate of the product's own pool on a trace of hash ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvfolio as kv
from kvfolio import _checks

from .trace import Trace

# Two tokens a block: the token behind the last block, which a request has to compute anyway, fills none.
_BLOCK_SIZE = 2
EVICTION_POLICIES: tuple[str, ...] = getattr(kv, "EVICTION_POLICIES", ("lru",))
"""The policies that a pool knows."""


@dataclass(frozen=True)
class HitCount:
    """What a replay found: of so many accesses to blocks so many hits, and so many evictions."""

    accesses: int
    hits: int
    evictions: int

    @property
    def rate(self) -> float:
        """Hits per access; 0 without accesses."""
        return self.hits / self.accesses if self.accesses else 0.0


def make_pool(num_blocks: int, block_size: int, *, prefix_cache: bool, eviction: str) -> kv.BlockPool:
    """A pool with one of `EVICTION_POLICIES`."""
    if eviction not in EVICTION_POLICIES:
        raise ValueError(f"eviction must be one of {', '.join(EVICTION_POLICIES)}, not {eviction!r}")
    options: dict[str, Any] = {} if EVICTION_POLICIES == ("lru",) else {"eviction": eviction}
    return kv.BlockPool(num_blocks, block_size, prefix_cache=prefix_cache, **options)


def replay(
    trace: Trace,
    capacity: int,
    *,
    eviction: str = "lru",
    progress: Callable[[int], object] = lambda num_requests: None,
) -> HitCount:
    """Admit, compute and free one request after the other in a `kvfolio.BlockPool` of so many blocks.

    Every id is one block and one access. What a request finds is a prefix, so a block whose predecessors were
    evicted is not found. `progress` is told how many requests have been done since it was told last.

    Raises
    ------
    ValueError
        The trace has no ids, or `capacity` is less than one of its requests takes.
    """
    if trace.hash_ids is None:
        raise ValueError(f"the trace must have hash ids: {trace.source} ({trace.format}) has none")
    most = trace.most_hash_ids
    capacity = _checks.integer("capacity", capacity, 1)
    if capacity < most:
        raise ValueError(
            f"capacity must be at least {most}, the blocks of the longest request, not {capacity}"
        )
    # The last token takes one block more, which is blank again when the request ends.
    pool = make_pool(capacity + 1, _BLOCK_SIZE, prefix_cache=True, eviction=eviction)
    batch = kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=most * _BLOCK_SIZE + 1)
    tokens, starts = _tokens(trace.hash_ids, trace.hash_id_starts)
    hits = 0
    for request, (start, stop) in enumerate(pairwise(starts)):
        sequence = pool.sequence(tokens[start:stop])
        batch.add(sequence)
        batch.plan().commit()
        hits += sequence.num_cached
        sequence.free()
        if request % 256 == 255:
            progress(256)
    progress(trace.num_requests % 256)
    return HitCount(len(trace.hash_ids), hits // _BLOCK_SIZE, pool.stats()["evictions"])


def _tokens(ids: NDArray[np.int32], starts: NDArray[np.int64]) -> tuple[NDArray[np.int32], list[int]]:
    """Each id `_BLOCK_SIZE` times, and one token more behind each request's."""
    repeated = np.repeat(ids, _BLOCK_SIZE)
    tokens = np.insert(repeated, starts[1:] * _BLOCK_SIZE, 0)
    return tokens, [int(at) for at in starts * _BLOCK_SIZE + np.arange(len(starts))]
