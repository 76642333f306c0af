"""What binds, by hand: from counters to the verdict and its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvfolio.verdict import Binding, Load, judge

BEFORE = Load(
    at=100.0,
    steps=1000,
    busy_time=50.0,
    computed_tokens=40_000,
    output_tokens=9_000,
    preemptions=7,
    space_bound_steps=300,
    row_bound_steps=400,
    budget_bound_steps=500,
    read_bytes=10**12,
    token_budget=512,
    memory_bandwidth=100e9,
)
# 40 steps of 8 tokens in 2 seconds, of which 1.6 in the steps; 32 GB read, so 20 GB/s of 100.
QUIET = replace(
    BEFORE,
    at=102.0,
    steps=1040,
    busy_time=51.6,
    computed_tokens=40_320,
    read_bytes=10**12 + 32 * 10**9,
    running=8,
)


@pytest.mark.parametrize(
    ("changes", "binding", "because"),
    [
        (
            {},
            "step time",
            "a step of 8.0 tokens takes 40.0 ms and reads 20.0 GB/s, 20% of what the memory can do",
        ),
        (
            {"memory_bandwidth": 0.0},
            "step time",
            "a step of 8.0 tokens takes 40.0 ms and reads 20.0 GB/s; how much the memory can do was not told",
        ),
        (
            {"memory_bandwidth": 39e9},
            "memory bandwidth",
            "a step of 8.0 tokens takes 40.0 ms and reads 20.0 GB/s, 51% of what the memory can do",
        ),
        (
            {"space_bound_steps": 310, "preemptions": 9, "waiting": 3},
            "memory space",
            "in 25% of the steps blocks were short; 3 waiting, 2 preempted",
        ),
        ({"space_bound_steps": 309}, "step time", None),
        (
            {"row_bound_steps": 440, "waiting": 5},
            "queue",
            "in 100% of the steps all rows were taken; 5 waiting, 8 running",
        ),
        ({"budget_bound_steps": 520}, "token budget", "in 50% of the steps a prompt was cut at 512 tokens"),
        # The most frequent one; of equal ones memory before rows before the budget.
        ({"budget_bound_steps": 520, "space_bound_steps": 310}, "token budget", None),
        ({"budget_bound_steps": 520, "row_bound_steps": 420}, "queue", None),
        ({"row_bound_steps": 420, "space_bound_steps": 320}, "memory space", None),
        # What waits for something comes before what is slow.
        ({"budget_bound_steps": 511, "memory_bandwidth": 20e9}, "token budget", None),
        ({"budget_bound_steps": 509, "memory_bandwidth": 20e9}, "memory bandwidth", None),
        ({"steps": 1000, "waiting": 2}, "idle", "no step was taken; 8 running, 2 waiting"),
    ],
)
def test_cases_by_hand(changes: dict[str, float], binding: str, because: str | None) -> None:
    verdict = judge(BEFORE, replace(QUIET, **changes))
    assert verdict.binding == binding
    if because is not None:
        assert verdict.because == because
        assert str(verdict) == f"{binding}: {because}"


def test_the_figures_are_of_what_happened_in_between() -> None:
    verdict = judge(
        BEFORE, replace(QUIET, space_bound_steps=310, row_bound_steps=404, preemptions=9, waiting=1)
    )
    assert (verdict.steps, verdict.seconds, verdict.preemptions) == (40, 2.0, 2)
    assert (verdict.space_share, verdict.queue_share, verdict.budget_share) == (0.25, 0.1, 0.0)
    assert (verdict.running, verdict.waiting, verdict.tokens_per_step) == (8, 1, 8.0)
    assert verdict.time_per_step == pytest.approx(0.04)
    assert verdict.read_rate == pytest.approx(20e9)
    assert verdict.read_share == pytest.approx(0.2)


def test_nothing_that_happened_is_no_division_by_zero() -> None:
    verdict = judge(Load(), Load())
    assert (verdict.binding, verdict.tokens_per_step, verdict.read_rate) == (Binding.IDLE, 0.0, 0.0)
    assert verdict.read_share is None
