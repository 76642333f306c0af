"""Paging managers: small cases worked out by hand, and slots counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from kvfolio.simulation import make_workload
from kvfolio.simulation.paging import PagingManager
from simulation_helpers import paging, run, shares, trace_of, workload_of

TWO, THREE = [(3, 3)] * 2, [(3, 3)] * 3


def test_paging_by_hand():
    """Seven blocks of two. Three prompts of 3 take two each; at 5 tokens each needs a third.

    The youngest gives way. It comes back with 5 known tokens, computes them in step 4, and has its last one.
    """
    workload = workload_of(THREE)
    outcome = run(workload, paging(workload, 7, 2))
    assert (outcome.steps, outcome.preemptions, outcome.computed_tokens) == (4, 1, 9 + 3 + 2 + 5)
    assert outcome.time_to_first_token.max == 1
    assert outcome.time_per_output_token.max == 1.5 and outcome.time_per_output_token.p50 == 1
    # Only in step 3 somebody waited: two sequences of 5 in three blocks, the null block, one free.
    assert shares(outcome, 16, 1) == {
        "tokens": 10, "reserved": 0, "empty": 2 + 2, "cached": 0, "external": 0, "free": 2,
    }  # fmt: skip
    assert (outcome.mean_running, outcome.loaded_share) == (2, 0.25)


def test_slots_of_the_last_block_are_reserved_if_they_will_be_filled():
    workload = workload_of([(3, 3)])
    outcome = run(workload, paging(workload, 3, 4))
    # Lengths 3, 4, 5: 1 slot to be filled; none; 3 of the second block never. The null block is empty always.
    assert shares(outcome, 16, 3) == {
        "tokens": 3 + 4 + 5, "reserved": 1, "empty": 3 + 3 * 4, "cached": 0, "external": 0, "free": 8 + 8 + 4,
    }  # fmt: skip


def test_what_running_prompts_have_yet_to_take_is_spoken_for():
    """Neither prompt has its three blocks yet when the second is looked at."""
    workload = workload_of([(6, 1), (6, 1)])
    outcome = run(workload, paging(workload, 5, 2), tokens_per_step=8)
    assert (outcome.max_running, outcome.preemptions, outcome.steps) == (1, 0, 2)
    outcome = run(workload, paging(workload, 6, 2), tokens_per_step=8)
    assert (outcome.max_running, outcome.preemptions, outcome.steps) == (2, 0, 2)


def test_the_watermark_is_left_free_at_admission():
    workload = workload_of([(4, 1)] * 4)
    assert run(workload, paging(workload, 8, 2)).max_running == 4
    assert run(workload, paging(workload, 8, 2, watermark=0.25)).max_running == 3
    assert run(workload, paging(workload, 8, 2, watermark=0.9)).max_running == 1  # alone it need not be


def test_samples_share_full_blocks_by_hand():
    """Prompt of 4 in two blocks, two answers with one more each: 2, 4, 4 blocks held for 2, 6, 6."""
    workload = workload_of([(4, 3)], samples=2)
    outcome = run(workload, paging(workload, 9, 2))
    assert (outcome.steps, outcome.computed_tokens) == (3, 4 + 2 + 2)
    assert outcome.shared_share == pytest.approx(1 - 10 / 14)
    assert shares(outcome, 20, 3)["tokens"] == 4 + 6 + 8
    assert outcome.time_per_output_token.mean == 1


def test_a_partial_block_is_copied_by_who_writes_first():
    """Prompt of 3: both write into its second block, one into a copy: 2, 3, 5 blocks held for 2, 4, 6."""
    workload = workload_of([(3, 3)], samples=2)
    outcome = run(workload, paging(workload, 9, 2))
    assert outcome.shared_share == pytest.approx(1 - 10 / 12)
    assert shares(outcome, 20, 3)["tokens"] == 3 + (2 + 2 * 2) + (2 + 2 * 3)


def test_beams_that_never_turn_over_are_samples():
    samples = workload_of([(5, 9), (7, 4)], samples=3)
    beams = workload_of([(5, 9), (7, 4)], beams=3, beam_turnover=0.0)
    kept = [run(workload, paging(workload, 40, 2)) for workload in (samples, beams)]
    assert kept[0].memory == kept[1].memory and kept[0].shared_share == kept[1].shared_share > 0
    assert kept[0].time_per_output_token == kept[1].time_per_output_token


def test_beams_that_turn_over_share_more():
    """Four answers to a prompt of 8 save less than three quarters, whatever they do."""
    found = []
    for turnover in (0.0, 0.3, 1.0):
        workload = workload_of([(8, 60)] * 3, beams=4, beam_turnover=turnover)
        manager = paging(workload, 400, 2, max_sequences=16)
        found.append(run(workload, manager, max_sequences=16).shared_share)
    assert found[0] < found[1] < found[2] < 0.75


def test_beams_give_way_and_come_back():
    """All beams of a request go on together, though they are computed anew one after the other."""
    for options in ({"samples": 3}, {"beams": 3, "beam_turnover": 0.5}):
        workload = workload_of([(9, 30)] * 6, **options)
        manager = paging(workload, 60, 2, max_sequences=18)
        outcome = run(workload, manager, max_sequences=18, tokens_per_step=18)
        assert (outcome.finished, outcome.refused) == (6, 0)
        assert outcome.preemptions > 0


@pytest.mark.parametrize("options", [{"samples": 2}, {"beams": 2, "beam_turnover": 0.0}])
def test_answers_that_gave_way_share_their_prompt_again(options):
    """Two prompts of 4, two answers of 5 each, ten blocks of 2: in step 4 all four want a block more, of two.

    The second request has 3 tokens an answer by then. It comes back in step 6, when the first has ended,
    computes its prompt once, then 3 tokens for each answer, and has the last in step 8.
    """
    workload = workload_of([(4, 5)] * 2, **options)
    outcome = run(workload, paging(workload, 10, 2))
    assert (outcome.steps, outcome.preemptions) == (8, 1)
    assert outcome.computed_tokens == (4 + 4 * 2) + (4 + 2 + 2) + (4 + 2 * 3 + 2)
    assert outcome.time_to_first_token.max == 1
    assert outcome.time_per_output_token.max == 7 / 4 and outcome.time_per_output_token.mean == (4 + 7) / 8
    assert outcome.loaded_share == 2 / 8  # steps 4 and 5: 7 and 8 tokens an answer, the prompt's 4 shared
    assert shares(outcome, 22, 2) == {
        "tokens": 10 + 12, "reserved": 2, "empty": 2 + 2, "cached": 0, "external": 0, "free": 8 + 8,
    }  # fmt: skip


class CountedPaging(PagingManager):
    """Counts the slots that hold tokens one by one."""

    def _usage(self):
        usage, table_slots = super()._usage()
        tokens, open_slots, never = set(), set(), set()
        blocks = 0
        for request in self._running.values():
            for row, answer in zip(request.rows, request.answers, strict=False):
                ids, length = answer.sequence.block_ids.tolist(), int(self._lengths[row])
                blocks += len(ids)
                tokens |= {(ids[at // self._block_size], at % self._block_size) for at in range(length)}
                for at in range(length, len(ids) * self._block_size):
                    place = (ids[at // self._block_size], at % self._block_size)
                    (open_slots if at < answer.final else never).add(place)
        assert len(tokens) == usage.tokens
        assert len(open_slots) == usage.reserved
        assert len(never) == usage.empty - self._block_size
        assert blocks * self._block_size == table_slots
        return usage, table_slots


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("options", [{}, {"samples": 3}, {"beams": 3}])
@pytest.mark.parametrize("budget", [24, 50])
def test_slots_are_what_they_are_counted_as(options, prefix_cache, budget):
    random = np.random.default_rng(budget)
    lengths = [(int(random.integers(1, 40)), int(random.integers(1, 25))) for _ in range(14)]
    ids = [random.integers(0, 3, -(-prompt // 8)).tolist() for prompt, _ in lengths]
    workload = make_workload(trace_of(lengths, ids, tokens_per_hash_id=8), **options)
    blocks = 20 if workload.width == 1 else 52
    options = {"max_sequences": 24, "prefix_cache": prefix_cache}
    manager = CountedPaging(workload, blocks, 4, watermark=0.0, **options)
    outcome = run(workload, manager, max_sequences=24, tokens_per_step=budget)
    assert outcome.finished == 14
    assert outcome.preemptions > 0


@pytest.mark.parametrize("options", [{"samples": 3}, {"beams": 3, "beam_turnover": 0.02}])
def test_answers_that_come_back_bit_by_bit_are_counted(options):
    """Six tokens a step: one answer is computed while two still share the prompt's last block."""
    workload = workload_of([(5, 40)] * 6, **options)
    manager = CountedPaging(workload, 40, 4, max_sequences=6, watermark=0.0)
    outcome = run(workload, manager, max_sequences=6, tokens_per_step=6)
    assert outcome.finished == 6 and outcome.preemptions > 1


def test_the_prefix_cache_by_hand():
    """Of the second prompt's 8 tokens 4 are the first's; of the third's all but its last token's block."""
    trace = trace_of([(8, 1)] * 3, [[0, 1], [0, 2], [0, 2]], arrivals=[0, 10, 20])
    workload = make_workload(trace)
    outcome = run(workload, paging(workload, 9, 4, prefix_cache=True))
    assert outcome.hit_rate == pytest.approx(8 / 24)
    assert outcome.computed_tokens == 8 + 4 + 4
    # 2 blocks in use; idle ones are what earlier requests left.
    assert shares(outcome, 40, 3)["cached"] == 4 * (0 + 1 + 1)
    plain = run(workload, paging(workload, 9, 4))
    assert (plain.computed_tokens, plain.hit_rate) == (24, None)


def test_answers_of_equal_prompts_are_not_equal():
    """Neither the samples of one request nor a later one's: a trace does not say what was answered."""
    trace = trace_of([(8, 9)] * 2, [[0, 1], [0, 1]], arrivals=[0, 100])
    one = make_workload(trace)
    assert run(one, paging(one, 40, 4, prefix_cache=True)).computed_tokens == 8 + 8 + 4 + 8
    many = make_workload(trace.head(1), samples=3)
    apart = run(many, paging(many, 40, 4)).memory
    cached = run(many, paging(many, 40, 4, prefix_cache=True)).memory
    assert cached["tokens"] == pytest.approx(apart["tokens"])
