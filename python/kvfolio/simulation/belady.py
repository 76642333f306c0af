"""MIN: what a cache could have found if it had known the future.

L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5 (1966).
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvfolio import _checks


def next_uses(ids: NDArray[np.int32]) -> list[int]:
    """For each access, when the same block is accessed next; ``len(ids)`` if never again."""
    num = len(ids)
    found = np.full(num, num, np.int64)
    order = np.argsort(ids, kind="stable")
    again = ids[order[:-1]] == ids[order[1:]]
    found[order[:-1][again]] = order[1:][again]
    return [int(use) for use in found]


def optimal_hits(uses: list[int], capacity: int) -> int:
    """How many accesses find their block if the block is evicted whose next use is furthest away.

    Every block that is accessed is admitted. `uses` are `next_uses`. Takes O(n log n).
    """
    capacity = _checks.integer("capacity", capacity, 1)
    never = len(uses)
    # A cached block is known by its next use: nothing else is ever asked of it.
    cached = bytearray(never)
    furthest: list[int] = []  # a heap of negated next uses; those that are past are smaller than any other
    num_cached = num_dead = hits = 0
    for now, use in enumerate(uses):
        if cached[now]:
            hits += 1
            num_cached -= 1
        elif num_cached + num_dead == capacity:
            if num_dead:
                num_dead -= 1
            else:
                cached[-heapq.heappop(furthest)] = 0
                num_cached -= 1
        if use == never:
            num_dead += 1
        else:
            cached[use] = 1
            num_cached += 1
            heapq.heappush(furthest, -use)
    return hits
