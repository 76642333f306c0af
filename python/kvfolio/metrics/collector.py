"""From pools and engines to metric families.

Names follow Prometheus: the unit at the end, `_total` for what only grows; a unit is a base unit (seconds,
bytes) or what is counted (blocks, tokens). Boundaries of the times of tokens are those of OpenTelemetry's
semantic conventions for generative AI (`gen_ai.server.time_to_first_token` and `.time_per_output_token`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

import kvfolio as kv

if TYPE_CHECKING:
    from kvfolio.serving import Engine
    from kvfolio.serving.histogram import Histogram

Source: TypeAlias = "kv.BlockPool | Engine"


class Collector:
    """Reads a pool, or an engine and its pool, whenever a registry asks.

    It may be registered with any `prometheus_client.CollectorRegistry`, and read from any thread.
    Raises TypeError for anything else than a BlockPool or an Engine.
    """

    def __init__(self, source: Source) -> None:
        if isinstance(source, kv.BlockPool):
            self._pool, self._engine = source, None
        elif isinstance(getattr(source, "pool", None), kv.BlockPool) and hasattr(source, "stats"):
            self._pool, self._engine = source.pool, source
        else:
            raise TypeError(f"source must be a BlockPool or an Engine, not {type(source).__name__}")
        self._most: dict[str, int] = {}

    def collect(self) -> Iterator[Metric]:
        """What there is now."""
        yield from self._collect_pool()
        if self._engine is not None:
            yield from _collect_engine(self._engine)

    def _collect_pool(self) -> Iterator[Metric]:
        pool = self._pool
        blocks = GaugeMetricFamily(
            "kvfolio_pool_blocks",
            "Blocks by state; blank and idle ones are free.",
            labels=["state"],
        )
        states = {
            "blank": pool.num_blank,
            "idle": pool.num_idle,
            "referenced": pool.num_referenced,
            "quarantined": pool.num_quarantined,
        }
        for state, number in states.items():
            blocks.add_metric([state], number)
        yield blocks
        yield _gauge("kvfolio_pool_capacity_blocks", "Blocks that can be used.", pool.num_blocks)
        yield _gauge("kvfolio_pool_block_size_tokens", "Tokens a block.", pool.block_size)
        stats = pool.stats()
        for name, counter, what in _POOL_COUNTERS:
            yield _counter(name, what, self._grown(counter, stats[counter]))
        refused = CounterMetricFamily(
            "kvfolio_pool_refused_allocations",
            "Calls refused for want of free blocks: others use them (pressure), only plans in flight do "
            "(quarantined), the pool is too small (never_fits).",
            labels=["reason"],
        )
        quarantined, never = stats["refusals_quarantined"], stats["refusals_never_fit"]
        pressure = self._grown("pressure", stats["refusals"] - quarantined - never)
        for reason, number in (("pressure", pressure), ("quarantined", quarantined), ("never_fits", never)):
            refused.add_metric([reason], number)
        yield refused
        bounds, counts, total = pool.eviction_ages()
        yield _histogram(
            "kvfolio_pool_eviction_age_seconds",
            "How long evicted blocks had lain idle; the clock is right to 4 ms.",
            bounds[:_MOST_AGE_BUCKETS],
            [*counts[:_MOST_AGE_BUCKETS], sum(counts[_MOST_AGE_BUCKETS:])],
            total,
        )

    def _grown(self, name: str, value: int) -> int:
        """A hit that is taken back is not counted; where a counter goes down by that, readers see it wait."""
        self._most[name] = max(value, self._most.get(name, 0))
        return self._most[name]


_MOST_AGE_BUCKETS = 21  # up to 70 minutes; all above are one
_POOL_COUNTERS = (
    ("kvfolio_pool_allocated_blocks", "allocations", "Blocks handed out."),
    (
        "kvfolio_pool_evicted_blocks",
        "evictions",
        "Idle blocks whose content was forgotten to hand them out again.",
    ),
    ("kvfolio_pool_cache_hit_tokens", "hit_tokens", "Tokens found in the prefix cache, not computed."),
    ("kvfolio_pool_cache_queried_tokens", "queried_tokens", "Tokens that were allowed to be found."),
    ("kvfolio_pool_copied_blocks", "copies", "Blocks copied before a write, because others used them too."),
    ("kvfolio_pool_merged_blocks", "merges", "Blocks given up for an equal one that was there before."),
)


def _collect_engine(engine: Engine) -> Iterator[Metric]:
    figures = engine.stats()
    load = figures.load
    answers = GaugeMetricFamily(
        "kvfolio_engine_answers", "Answers that are computed, and that wait for it.", labels=["state"]
    )
    answers.add_metric(["running"], load.running)
    answers.add_metric(["waiting"], load.waiting)
    yield answers
    yield _gauge("kvfolio_engine_token_budget_tokens", "The most tokens of a step.", load.token_budget)
    yield _gauge(
        "kvfolio_engine_memory_bandwidth_bytes_per_second",
        "Of the model's device; 0 if nobody told.",
        load.memory_bandwidth,
    )
    bound = CounterMetricFamily(
        "kvfolio_engine_bound_steps",
        "Steps at which something was short: blocks (space), rows, the token budget.",
        labels=["by"],
    )
    for what, number in (
        ("space", load.space_bound_steps),
        ("rows", load.row_bound_steps),
        ("budget", load.budget_bound_steps),
    ):
        bound.add_metric([what], number)
    yield bound
    for name, value, what in (
        ("kvfolio_engine_steps", load.steps, "Steps whose plans were committed."),
        ("kvfolio_engine_failed_steps", figures.failed_steps, "Steps that raised and were rolled back."),
        ("kvfolio_engine_busy_seconds", load.busy_time, "Seconds spent in steps."),
        ("kvfolio_engine_computed_tokens", load.computed_tokens, "Tokens that went through the model."),
        ("kvfolio_engine_output_tokens", load.output_tokens, "Tokens that came out of it."),
        ("kvfolio_engine_read_bytes", load.read_bytes, "Bytes of weights and KV that steps had to read."),
        (
            "kvfolio_engine_finished_requests",
            figures.finished_requests,
            "Requests all of whose answers ended.",
        ),
        (
            "kvfolio_engine_preemptions",
            load.preemptions,
            "Answers that gave their blocks back to go on later.",
        ),
        ("kvfolio_engine_forks", figures.forks, "Samples that went on from another one's prompt."),
        ("kvfolio_engine_drafted_tokens", figures.drafted_tokens, "Tokens that were guessed."),
        ("kvfolio_engine_accepted_tokens", figures.accepted_tokens, "Guesses that were right."),
    ):
        yield _counter(name, what, value)
    yield _times(
        "kvfolio_engine_time_to_first_token_seconds",
        "Of each answer, from its submission on.",
        figures.time_to_first_token,
    )
    yield _times(
        "kvfolio_engine_time_per_output_token_seconds",
        "Of each answer that has ended, the mean between two of its tokens.",
        figures.time_per_output_token,
    )


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value)  # `_total` comes with it


def _times(name: str, what: str, times: Histogram) -> Metric:
    return _histogram(name, what, times.bounds, list(times.counts), times.sum)


def _histogram(name: str, what: str, bounds: Iterable[float], counts: Sequence[int], total: float) -> Metric:
    """`counts` are of each bucket by itself, the last one of all above the last bound."""
    buckets = zip([*map(repr, bounds), "+Inf"], accumulate(counts), strict=True)
    return HistogramMetricFamily(name, what, list(buckets), total)
