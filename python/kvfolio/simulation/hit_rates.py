"""Hit rates by eviction policy and capacity, with what was possible beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfolio import _checks

from .belady import next_uses, optimal_hits
from .replay import EVICTION_POLICIES, replay
from .trace import Trace

CAPACITIES = (1_000, 3_000, 5_000, 10_000, 30_000, 50_000)
"""Capacities in blocks, of which `hit_rates` takes by default those that tell something about a trace."""

Progress = Callable[[str, int], Callable[[int], object]]
"""Is told what begins, and of how many parts; gives what is told how many more parts are done."""


def no_progress(_what: str, _total: int) -> Callable[[int], object]:
    """Nobody wants to know."""
    return lambda done: None


@dataclass(frozen=True)
class HitRateRow:
    """Hits per access at one capacity, in blocks: by policy, and the optimum (`belady`)."""

    capacity: int
    policies: dict[str, float]
    optimal: float


@dataclass(frozen=True)
class HitRates:
    """Hits per access to blocks of one id each; `infinite` is the rate of a cache that keeps everything."""

    accesses: int
    distinct: int
    tokens_per_block: int
    infinite: float
    rows: list[HitRateRow]


def hit_rates(
    trace: Trace,
    capacities: Sequence[int] | None = None,
    policies: Sequence[str] = EVICTION_POLICIES,
    *,
    progress: Progress = no_progress,
) -> HitRates:
    """Replay a trace of hash ids, once for each policy and capacity.

    See `replay` for how the pool is driven, and `optimal_hits` for the optimum. `capacities`: in blocks, by
    default those of `CAPACITIES` that tell something about the trace. `policies`: of `EVICTION_POLICIES`.
    `progress`: is told what begins and of how many requests, and gives what is told how many more are done.

    Raises
    ------
    ValueError, TypeError
        The trace has no ids, a capacity is below what one request takes, or a policy is not known.
    """
    if trace.hash_ids is None or not len(trace.hash_ids):
        raise ValueError(f"the trace must have hash ids: {trace.source} ({trace.format}) has none")
    distinct = trace.num_distinct
    if capacities is None:
        most = trace.most_hash_ids
        capacities = [size for size in CAPACITIES if most <= size < distinct] or [most]
    capacities = [_checks.integer("capacities", size, 1) for size in capacities]
    uses, num = next_uses(trace.hash_ids), len(trace.hash_ids)
    rows = []
    for capacity in capacities:
        found = {}
        for policy in policies:
            advance = progress(f"{policy}, {capacity:,} blocks", trace.num_requests)
            found[policy] = replay(trace, capacity, eviction=policy, progress=advance).rate
        rows.append(HitRateRow(capacity, found, optimal_hits(uses, capacity) / num))
    return HitRates(num, distinct, trace.tokens_per_hash_id, (num - distinct) / num, rows)
