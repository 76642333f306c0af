"""What a block size means for a trace: by hand, and against the pool."""

from __future__ import annotations

import kvfolio as kv
import numpy as np
import pytest
from kvfolio.simulation.block_sizes import block_size_figures, hit_bounds, synthetic_lengths
from kvfolio.simulation.workload import make_workload
from simulation_helpers import trace_of


def test_empty_slots_and_tables_by_hand():
    """Sequences end with 5 + 4 - 1 = 8 and 3 computed tokens: a prompt is computed without an output, too."""
    one, two, eight = block_size_figures(trace_of([(5, 4), (3, 0)]), [1, 2, 8])
    assert (one.empty_share, one.table_bytes) == (0, 4 * (8 + 3) / 2)
    assert (two.empty_share, two.table_bytes) == (1 / 12, 4 * (4 + 2) / 2)
    assert (eight.empty_share, eight.table_bytes) == (5 / 16, 4 * (1 + 1) / 2)
    assert one.hits_at_least is one.hits_at_most is None


def test_hits_by_hand():
    """Ids of 4 tokens. The second prompt has 8 of the first, perhaps 3 more; its last id is of 2."""
    trace = trace_of([(12, 1), (14, 1)], [[0, 1, 2], [0, 1, 3, 4]])
    assert hit_bounds(trace, 1) == (8 / 26, 11 / 26)
    assert hit_bounds(trace, 4) == (8 / 26, 8 / 26)
    assert hit_bounds(trace, 8) == (8 / 26, 8 / 26)
    assert hit_bounds(trace, 16) == (0, 0)


def test_nothing_in_common_may_be_up_to_an_ids_tokens():
    first, second = [0], [1]
    assert hit_bounds(trace_of([(4, 1), (4, 1)], [first, second]), 1) == (0, 3 / 8)
    assert hit_bounds(trace_of([(4, 1), (4, 1)], [first, first]), 1) == (3 / 8, 3 / 8)  # the last is computed
    # Behind all of the first's tokens there are none that could be the same.
    assert hit_bounds(trace_of([(4, 1), (8, 1)], [[0], [0, 1]]), 1) == (4 / 12, 4 / 12)
    # Two tokens that no id tells may be two of the second's.
    assert hit_bounds(trace_of([(6, 1), (8, 1)], [[0], [0, 1]]), 1) == (4 / 14, 7 / 14)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 12])
def test_the_least_is_what_the_pool_finds(block_size):
    """Tokens of different ids are all different here, so nothing more is in common."""
    random = np.random.default_rng(block_size)
    lengths = [(int(random.integers(1, 60)), 1) for _ in range(60)]
    # An id is the name of all that is before it, too.
    names: dict[tuple[int, ...], int] = {}
    ids = []
    for prompt, _ in lengths:
        own = random.integers(0, 2, prompt // 4).tolist()
        ids.append([names.setdefault(tuple(own[: at + 1]), len(names)) for at in range(len(own))])
    trace = trace_of(lengths, ids)
    workload = make_workload(trace)
    pool = kv.BlockPool(5000, block_size)
    batch = kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=64)
    found = 0
    for request in range(trace.num_requests):
        sequence = pool.sequence(workload.prompt(request))
        batch.add(sequence)
        batch.plan().commit()
        found += sequence.num_cached
        sequence.free()
    least, most = hit_bounds(trace, block_size)
    assert least == found / trace.prompt_lengths.sum()
    assert 0 < least <= most


def test_synthetic_lengths_are_what_they_say():
    trace = synthetic_lengths(20_000)
    assert trace.prompt_lengths.mean() == pytest.approx(161, rel=0.03)
    assert trace.output_lengths.mean() == pytest.approx(338, rel=0.03)
    assert trace.prompt_lengths.min() >= 1
    assert (synthetic_lengths().prompt_lengths == synthetic_lengths().prompt_lengths).all()


def test_a_wrong_size_is_refused():
    with pytest.raises(ValueError, match="block_sizes must be at least 1, not 0"):
        block_size_figures(trace_of([(1, 1)]), [0])
