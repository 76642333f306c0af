"""What is measured, of one request and of the engine."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvfolio as kv
from kvfolio.verdict import Load, Verdict, judge

from .histogram import FIRST_TOKEN, OUTPUT_TOKEN, Histogram

if TYPE_CHECKING:
    from .request import Answer

WINDOW = 5.0  # a verdict looks back so many seconds, and up to twice as many


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


@dataclass(frozen=True)
class RequestFigures:
    """Times are seconds and None until known.

    `cached_tokens`: of the prompt, found in the prefix cache at the first admission. `recovered_tokens`:
    found after preemptions, counted apart because a request that finds its own work again has not hit
    anybody else's.
    `queue_time`: submission to first admission. `time_to_first_token`: submission to first token, the queue
    included.
    `time_per_output_token`: mean of the answers' mean times between two tokens. `latency`: submission to
    last token.
    """

    prompt_tokens: int
    cached_tokens: int
    recovered_tokens: int
    output_tokens: int
    preemptions: int
    queue_time: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    latency: float | None


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made; blocks are sampled once a step, with its KV in place.

    `steps` are those whose plans were committed. `computed_tokens` went through the model, `output_tokens`
    came out of it. Of the first, `wasted_slots` were for answers that had ended before their step did (see
    run_ahead), and `drafted_tokens` were guesses, of which `accepted_tokens` were right (see speculation).
    `acceptance_rate` is 0 without guesses. `tokens_per_step` is of the output, all answers together.
    `running` and `waiting` are answers now; `preemptions` and `forks` those of all steps.
    `busy_time` is the seconds spent in `step`, so `throughput` is output tokens per second of work.
    `empty_share`: slots that are held but empty, as a share of all held slots, over all steps.
    `mean_reserved_blocks`, `peak_reserved_blocks`: what the running sequences would have held if each had
    been given contiguous room for the longest sequence allowed.
    `pool` is what `BlockPool.stats` says. `time_to_first_token` has each answer, from its submission on,
    `time_per_output_token` the mean between two tokens of each that has ended.
    `load` is what the verdict is made of; `verdict` is of the last 5 to 10 seconds in which it was at work.
    """

    steps: int
    failed_steps: int
    running: int
    waiting: int
    finished_requests: int
    computed_tokens: int
    output_tokens: int
    tokens_per_step: float
    wasted_slots: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    preemptions: int
    forks: int
    peak_running: int
    mean_blocks: float
    peak_blocks: int
    empty_share: float
    mean_reserved_blocks: float
    peak_reserved_blocks: int
    busy_time: float
    throughput: float
    pool: dict[str, int]
    time_to_first_token: Histogram
    time_per_output_token: Histogram
    load: Load
    verdict: Verdict


@dataclass
class Meter:
    """The engine's counters while they run."""

    steps: int = 0
    failed_steps: int = 0
    finished_requests: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    wasted_slots: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    forks: int = 0
    busy_time: float = 0.0
    peak_running: int = 0
    held_blocks: int = 0  # summed over steps, as are the next two
    reserved_blocks: int = 0
    empty_slots: int = 0
    peak_blocks: int = 0
    peak_reserved_blocks: int = 0
    space_bound_steps: int = 0  # see kvfolio/verdict.py, as for the next two
    row_bound_steps: int = 0
    budget_bound_steps: int = 0
    read_bytes: int = 0
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN))
    blocks_per_reservation: int = field(default=0, kw_only=True)  # at maximum length
    token_budget: int = field(default=0, kw_only=True)  # of a step
    bytes_read: tuple[int, int] = field(default=(0, 0), kw_only=True)  # of weights, once; of KV, a token
    memory_bandwidth: float = field(default=0.0, kw_only=True)
    _preemptions_before: int = 0
    _older: Load = field(default_factory=lambda: Load(at=time.perf_counter()))
    _newer: Load = field(default_factory=lambda: Load(at=time.perf_counter()))

    def launch(self, *, blocked: str | None, is_cut: bool, now: float) -> None:
        """A step is launched.

        `blocked`: what the oldest who waits has found too few of. `is_cut`: a prompt goes on in a later step.
        """
        was_preempted = self.preemptions > self._preemptions_before
        self._preemptions_before = self.preemptions
        self.space_bound_steps += was_preempted or blocked == "blocks"
        self.row_bound_steps += blocked == "rows"
        self.budget_bound_steps += is_cut
        if now - self._newer.at >= WINDOW:
            self._older, self._newer = self._newer, self.load(at=now)

    def take(self, answer: Answer) -> None:
        """An answer has got a token."""
        self.output_tokens += 1
        if len(answer.token_ids) == 1 and answer.first_token_at is not None:
            self.time_to_first_token.observe(answer.first_token_at - answer.request.submitted_at)

    def end(self, answer: Answer) -> None:
        """An answer has ended."""
        self.finished_requests += answer.request.is_finished
        if answer.time_per_output_token is not None:
            self.time_per_output_token.observe(answer.time_per_output_token)

    def look(self, pool: kv.BlockPool, lengths: Iterable[int]) -> None:
        """A step was committed: sample the pool, and how many tokens of each running sequence have slots.

        Call it where no two of them share a partial block.
        """
        lengths = list(lengths)
        layouts = [kv.block_layout(length, pool.block_size) for length in lengths]
        held, reserved = pool.num_referenced, len(layouts) * self.blocks_per_reservation
        self.steps += 1
        self.read_bytes += self.bytes_read[0] + self.bytes_read[1] * sum(lengths)
        self.held_blocks += held
        self.reserved_blocks += reserved
        self.empty_slots += sum(empty for _, empty in layouts)
        self.peak_blocks = max(self.peak_blocks, held)
        self.peak_reserved_blocks = max(self.peak_reserved_blocks, reserved)
        self.peak_running = max(self.peak_running, len(layouts))

    def load(self, *, at: float, running: int = 0, waiting: int = 0) -> Load:
        """What a verdict is made of, as it is now."""
        return Load(
            at=at,
            steps=self.steps,
            busy_time=self.busy_time,
            computed_tokens=self.computed_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            space_bound_steps=self.space_bound_steps,
            row_bound_steps=self.row_bound_steps,
            budget_bound_steps=self.budget_bound_steps,
            read_bytes=self.read_bytes,
            running=running,
            waiting=waiting,
            token_budget=self.token_budget,
            memory_bandwidth=self.memory_bandwidth,
        )

    def read(self, pool: kv.BlockPool, *, running: int, waiting: int) -> EngineStats:
        """The counters as they are, with the means and shares that follow from them."""
        looks = max(self.steps, 1)
        load = self.load(at=time.perf_counter(), running=running, waiting=waiting)
        held_slots = max(self.held_blocks * pool.block_size, 1)
        return EngineStats(
            steps=self.steps,
            failed_steps=self.failed_steps,
            running=running,
            waiting=waiting,
            finished_requests=self.finished_requests,
            computed_tokens=self.computed_tokens,
            output_tokens=self.output_tokens,
            tokens_per_step=self.output_tokens / looks,
            wasted_slots=self.wasted_slots,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            acceptance_rate=self.accepted_tokens / max(self.drafted_tokens, 1),
            preemptions=self.preemptions,
            forks=self.forks,
            peak_running=self.peak_running,
            mean_blocks=self.held_blocks / looks,
            peak_blocks=self.peak_blocks,
            empty_share=self.empty_slots / held_slots,
            mean_reserved_blocks=self.reserved_blocks / looks,
            peak_reserved_blocks=self.peak_reserved_blocks,
            busy_time=self.busy_time,
            throughput=self.output_tokens / self.busy_time if self.busy_time else 0.0,
            pool=dict(pool.stats()),
            time_to_first_token=self.time_to_first_token.copy(),
            time_per_output_token=self.time_per_output_token.copy(),
            load=load,
            verdict=judge(self._older, load),
        )


@dataclass(frozen=True)
class Distribution:
    """Of some lengths or times. Percentiles are nearest-rank: values that did occur."""

    min: float
    mean: float
    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """Raises ValueError if there are none."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("a distribution needs at least one value")
        p50, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.50, 0.95))
        return cls(ordered[0], mean(ordered), p50, p95, ordered[-1])
