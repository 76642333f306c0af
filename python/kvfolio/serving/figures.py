"""What is measured, of one request and of the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import kvfolio as kv


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
    `busy_time` is the seconds spent in `step`, so `throughput` is output tokens per second of work.
    `empty_share`: slots that are held but empty, as a share of all held slots, over all steps.
    `mean_reserved_blocks`, `peak_reserved_blocks`: what the running sequences would have held if each had
    been given contiguous room for the longest sequence allowed.
    """

    steps: int
    failed_steps: int
    running: int
    waiting: int
    finished_requests: int
    computed_tokens: int
    output_tokens: int
    tokens_per_step: float  # of output_tokens, all answers together
    wasted_slots: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float  # of drafted_tokens; 0 if there were none
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
    pool: dict[str, int]  # of BlockPool.stats()


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
    # How many blocks a reservation at maximum length is.
    blocks_per_reservation: int = field(default=0, kw_only=True)

    def look(self, pool: kv.BlockPool, lengths: Iterable[int]) -> None:
        """A step was committed: sample the pool, and how many tokens of each running sequence have slots.

        Call it where no two of them share a partial block.
        """
        layouts = [kv.block_layout(length, pool.block_size) for length in lengths]
        held, reserved = pool.num_referenced, len(layouts) * self.blocks_per_reservation
        self.steps += 1
        self.held_blocks += held
        self.reserved_blocks += reserved
        self.empty_slots += sum(empty for _, empty in layouts)
        self.peak_blocks = max(self.peak_blocks, held)
        self.peak_reserved_blocks = max(self.peak_reserved_blocks, reserved)
        self.peak_running = max(self.peak_running, len(layouts))

    def read(self, pool: kv.BlockPool, *, running: int, waiting: int) -> EngineStats:
        """The counters as they are, with the means and shares that follow from them."""
        looks = max(self.steps, 1)
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
