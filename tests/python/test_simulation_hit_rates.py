"""Hit rates: the pool's own, and the optimum."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from kvfolio.simulation import EVICTION_POLICIES, hit_rates, read_trace, replay
from kvfolio.simulation.belady import next_uses, optimal_hits
from simulation_helpers import CONVERSATION, SHARED, trace_of


def requests(*ids: list[int]):
    """A trace of requests whose prompts are these ids, of four tokens each."""
    return trace_of([(max(4 * len(own), 1), 1) for own in ids], ids)


def test_next_uses():
    assert next_uses(np.array([5, 6, 5, 5, 7], np.int32)) == [2, 5, 3, 5, 5]
    assert next_uses(np.array([], np.int32)) == []


def test_the_optimum_by_hand():
    """1 2 1 3 2 1 with room for two: 1 is found, 3 takes its place, as its next use is later, 2 is found."""
    uses = next_uses(np.array([1, 2, 1, 3, 2, 1], np.int32))
    assert [optimal_hits(uses, capacity) for capacity in (1, 2, 3, 4)] == [0, 2, 3, 3]


def most_hits(ids: tuple[int, ...], capacity: int) -> int:
    """All ways to evict, tried out."""

    @functools.cache
    def rest(at: int, cached: frozenset[int]) -> int:
        if at == len(ids):
            return 0
        one = ids[at]
        if one in cached:
            return 1 + rest(at + 1, cached)
        if len(cached) < capacity:
            return rest(at + 1, cached | {one})
        return max(rest(at + 1, cached - {out} | {one}) for out in cached)

    return rest(0, frozenset())


def test_the_optimum_is_the_best_of_all_ways():
    random = np.random.default_rng(5)
    for _ in range(150):
        ids = random.integers(0, random.integers(1, 6), random.integers(1, 14)).astype(np.int32)
        for capacity in (1, 2, 3, 4):
            assert optimal_hits(next_uses(ids), capacity) == most_hits(tuple(ids.tolist()), capacity), ids


def test_the_pool_by_hand():
    """1 2 1 3 2 1, least recently used: only the second 1 is found; with room for three all that can be."""
    trace = requests([1], [2], [1], [3], [2], [1])
    found = [replay(trace, capacity) for capacity in (1, 2, 3)]
    assert [(count.accesses, count.hits) for count in found] == [(6, 0), (6, 1), (6, 3)]
    assert [count.evictions for count in found] == [5, 3, 0]
    assert found[1].rate == pytest.approx(1 / 6)


def test_a_hit_is_a_prefix():
    """Behind what was evicted nothing is found; of one request the tail goes first."""
    trace = requests([1, 2, 3], [4], [1, 2, 3])
    assert [replay(trace, capacity).hits for capacity in (3, 4)] == [2, 3]
    assert replay(requests([1, 2], [], [1, 2]), 2).hits == 2


def test_the_table_has_policies_optimum_and_the_infinite_cache():
    trace = requests([1], [2], [1], [3], [2], [1])
    told: dict[str, list[int]] = {}

    def progress(what, total):
        told[what] = [total]
        return told[what].append

    found = hit_rates(trace, [2, 3], progress=progress)
    assert (found.accesses, found.distinct, found.tokens_per_block, found.infinite) == (6, 3, 4, 0.5)
    assert [row.capacity for row in found.rows] == [2, 3]
    assert [row.optimal for row in found.rows] == pytest.approx([2 / 6, 3 / 6])
    assert [set(row.policies) for row in found.rows] == [set(EVICTION_POLICIES)] * 2
    assert [row.policies["lru"] for row in found.rows] == pytest.approx([1 / 6, 3 / 6])
    assert len(told) == 2 * len(EVICTION_POLICIES)
    assert all(sum(done) == total == 6 for total, *done in told.values())


def test_capacities_that_tell_something_are_the_default():
    assert [row.capacity for row in hit_rates(requests([1], [2], [1])).rows] == [1]
    many = requests(*[[number] for number in range(3500)])
    assert [row.capacity for row in hit_rates(many).rows] == [1000, 3000]


def test_no_policy_beats_the_optimum():
    random = np.random.default_rng(2)
    trace = requests(*[random.integers(0, 40, 1).tolist() for _ in range(400)])
    found = hit_rates(trace, [2, 5, 10, 20, 39])
    for row in found.rows:
        assert max(row.policies.values()) <= row.optimal <= found.infinite
    assert found.rows[0].policies["lru"] < found.rows[-1].policies["lru"]


def test_what_cannot_be_replayed_is_refused():
    with pytest.raises(ValueError, match=r"the trace must have hash ids: by hand \(by hand\) has none"):
        replay(trace_of([(4, 1)]), 5)
    with pytest.raises(ValueError, match="the trace must have hash ids"):
        hit_rates(requests([]))
    with pytest.raises(
        ValueError, match="capacity must be at least 2, the blocks of the longest request, not 1"
    ):
        replay(requests([1, 2]), 1)
    with pytest.raises(ValueError, match="eviction must be one of lru"):
        replay(requests([1, 2]), 2, eviction="best")
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        replay(requests([]), 0)
    with pytest.raises(TypeError, match="capacities must be an integer, not float"):
        hit_rates(requests([1]), [2.0])  # type: ignore[list-item]


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the conversation trace is not beside the project")
def test_the_conversation_trace_has_the_known_rates():
    text = (SHARED / "README.md").read_text()
    rows = re.findall(r"^\| ([\d,]+|infinite) \| (\.\d+) \| (\.\d+) \|", text, flags=re.MULTILINE)
    known = {size.replace(",", ""): (float(lru), float(best)) for size, lru, best in rows}
    infinite, _ = known.pop("infinite")
    assert len(known) == 6
    found = hit_rates(read_trace(CONVERSATION), [int(size) for size in known], ["lru"])
    assert round(found.infinite, 4) == infinite
    for row, (lru, best) in zip(found.rows, known.values(), strict=True):
        assert row.policies["lru"] == pytest.approx(lru, abs=0.005)
        assert round(row.optimal, 4) == best
