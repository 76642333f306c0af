"""What binds now: the answer to "why is it slow", and the figures that it follows from.

A step is bound by *memory space* if the oldest who waits found too few free blocks, or somebody who ran had
to give his back; by the *queue* if all rows are taken and somebody waits; by the *token budget* if a prompt
was cut because the step was full. What holds for most of the recent steps is the verdict, if it holds for a
quarter of them. Else nobody waits for anything but the steps themselves: for *memory bandwidth*, if weights
and KV are read at half of it or more, or else for the *step time*, which goes to computing or to overhead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MEANINGFUL_SHARE = 0.25  # of the steps
BANDWIDTH_SHARE = 0.5  # of what the memory can do; long reads reach more, steps have gaps


class Binding(StrEnum):
    """What there is too little of."""

    IDLE = "idle"  #: nothing to do
    MEMORY_SPACE = "memory space"  #: blocks of the pool
    QUEUE = "queue"  #: rows of the batch
    TOKEN_BUDGET = "token budget"  #: tokens of a step
    MEMORY_BANDWIDTH = "memory bandwidth"  #: bytes per second, of weights and KV
    STEP_TIME = "step time"  #: computing, or overhead


@dataclass(frozen=True)
class Load:
    """What an engine has done up to a moment, and what there is to do.

    Seconds and bytes. `at` is of any clock, the counters are since any moment. `read_bytes`: of weights, once
    a step, and of the K and V of running sequences. `memory_bandwidth`: bytes per second, 0 if nobody told.
    """

    at: float = 0.0
    steps: int = 0
    busy_time: float = 0.0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    space_bound_steps: int = 0
    row_bound_steps: int = 0
    budget_bound_steps: int = 0
    read_bytes: int = 0
    running: int = 0
    waiting: int = 0
    token_budget: int = 0
    memory_bandwidth: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What binds, why, and over how many steps and seconds that was looked at.

    `shares` are of those steps: bound by space, by rows, by the budget. `time_per_step`: seconds in `step`,
    of which each running sequence gets about one token. `read_rate`: bytes per second; `read_share`: of the
    memory's bandwidth, None if nobody told.
    """

    binding: Binding
    because: str
    steps: int
    seconds: float
    space_share: float
    queue_share: float
    budget_share: float
    preemptions: int
    running: int
    waiting: int
    tokens_per_step: float
    time_per_step: float
    read_rate: float
    read_share: float | None

    def __str__(self) -> str:
        return f"{self.binding}: {self.because}"


def judge(before: Load, now: Load) -> Verdict:
    """What has bound the steps between two moments of one engine."""
    steps = max(0, now.steps - before.steps)
    each = max(steps, 1)
    busy = max(0.0, now.busy_time - before.busy_time)
    read_rate = (now.read_bytes - before.read_bytes) / busy if busy else 0.0
    # Steps in flight are counted where they are launched, so there may be one more of them.
    space, queue, budget = (
        min(1.0, max(0, later - earlier) / each)
        for earlier, later in (
            (before.space_bound_steps, now.space_bound_steps),
            (before.row_bound_steps, now.row_bound_steps),
            (before.budget_bound_steps, now.budget_bound_steps),
        )
    )
    preemptions = now.preemptions - before.preemptions
    tokens = (now.computed_tokens - before.computed_tokens) / each
    read_share = read_rate / now.memory_bandwidth if now.memory_bandwidth else None
    binding = _binding(steps, space, queue, budget, read_share)
    milliseconds = 1000 * busy / each
    pace = f"a step of {tokens:.1f} tokens takes {milliseconds:.1f} ms and reads {read_rate / 1e9:.1f} GB/s"
    waiting = f"{now.waiting} waiting"
    because = {
        Binding.IDLE: f"no step was taken; {now.running} running, {waiting}",
        Binding.MEMORY_SPACE: f"in {space:.0%} of the steps blocks were short; "
        f"{waiting}, {preemptions} preempted",
        Binding.QUEUE: f"in {queue:.0%} of the steps all rows were taken; {waiting}, {now.running} running",
        Binding.TOKEN_BUDGET: f"in {budget:.0%} of the steps a prompt was cut at {now.token_budget} tokens",
        Binding.MEMORY_BANDWIDTH: f"{pace}, {read_share or 0:.0%} of what the memory can do",
        Binding.STEP_TIME: pace
        + (
            f", {read_share:.0%} of what the memory can do"
            if read_share is not None
            else "; how much the memory can do was not told"
        ),
    }[binding]
    return Verdict(
        binding,
        because,
        steps=steps,
        seconds=now.at - before.at,
        space_share=space,
        queue_share=queue,
        budget_share=budget,
        preemptions=preemptions,
        running=now.running,
        waiting=now.waiting,
        tokens_per_step=tokens,
        time_per_step=busy / each,
        read_rate=read_rate,
        read_share=read_share,
    )


def _binding(steps: int, space: float, queue: float, budget: float, read_share: float | None) -> Binding:
    if steps == 0:
        return Binding.IDLE
    # Of equal ones the first: who has no block or no row cannot use more tokens a step.
    share, _, binding = max(
        (space, 3, Binding.MEMORY_SPACE), (queue, 2, Binding.QUEUE), (budget, 1, Binding.TOKEN_BUDGET)
    )
    if share >= MEANINGFUL_SHARE:
        return binding
    if read_share is not None and read_share >= BANDWIDTH_SHARE:
        return Binding.MEMORY_BANDWIDTH
    return Binding.STEP_TIME
