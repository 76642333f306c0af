"""Figures as Prometheus reads them: names, states that add up, counters that only grow, a port."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import kvfolio as kv
import pytest

pytest.importorskip("prometheus_client")

from kvfolio.metrics import Collector, serve
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def read(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def reader(source: object) -> Callable[[], dict[tuple[str, str], float]]:
    registry = CollectorRegistry()
    registry.register(Collector(source))  # type: ignore[arg-type]
    return lambda: read(generate_latest(registry).decode())


def compute(pool: kv.BlockPool, tokens: list[int]) -> kv.Batch:
    batch = kv.Batch(pool, max_sequences=2, max_tokens_per_sequence=len(tokens) + 1)
    batch.add(pool.sequence(tokens))
    with batch.plan():
        pass
    return batch


def test_blocks_are_counted_by_state() -> None:
    pool = kv.BlockPool(20, 4)
    figures = reader(pool)
    compute(pool, list(range(12))).remove(0).free()  # three idle
    held = compute(pool, [9] * 6)  # two referenced
    held.extend([0], [9])
    plan = held.plan()
    held.remove(0).free()  # quarantined by the plan
    lent = pool.allocate(4)
    samples = figures()
    states = {
        state: samples["kvfolio_pool_blocks", state]
        for state in ("blank", "idle", "referenced", "quarantined")
    }
    assert states == {"blank": 11, "idle": 3, "referenced": 4, "quarantined": 2}
    assert sum(states.values()) == samples["kvfolio_pool_capacity_blocks", ""] == 20
    assert samples["kvfolio_pool_block_size_tokens", ""] == 4
    plan.rollback()
    pool.release(lent)
    assert figures()["kvfolio_pool_blocks", "quarantined"] == 0


def test_counters_are_those_of_the_pool() -> None:
    pool = kv.BlockPool(10, 4)
    figures = reader(pool)
    compute(pool, list(range(17))).remove(0).free()
    compute(pool, list(range(17))).remove(0).free()
    pool.release(pool.allocate(9))
    samples, stats = figures(), pool.stats()
    for name, counter in (
        ("allocated_blocks", "allocations"),
        ("evicted_blocks", "evictions"),
        ("cache_hit_tokens", "hit_tokens"),
        ("cache_queried_tokens", "queried_tokens"),
        ("copied_blocks", "copies"),
        ("merged_blocks", "merges"),
    ):
        assert samples[f"kvfolio_pool_{name}_total", ""] == stats[counter]
    assert (stats["hit_tokens"], stats["queried_tokens"], stats["evictions"]) == (16, 34, 3)


def test_refusals_are_counted_by_their_reason() -> None:
    pool = kv.BlockPool(4, 2)
    figures = reader(pool)
    batch = compute(pool, [1, 2, 3])
    batch.extend([0], [4])
    plan = batch.plan()
    batch.remove(0).free()  # two blocks are quarantined
    lent = pool.allocate(1)
    for needed in (2, 2, 4, 5):  # of four: one is free, two come free, one is lent
        with pytest.raises(kv.OutOfBlocks):
            pool.allocate(needed)
    samples = figures()
    reasons = {
        name: samples["kvfolio_pool_refused_allocations_total", name]
        for name in ("pressure", "quarantined", "never_fits")
    }
    assert reasons == {"pressure": 1, "quarantined": 2, "never_fits": 1}
    assert pool.stats()["refusals"] == 4
    plan.rollback()
    pool.release(lent)


def test_eviction_ages_are_a_histogram() -> None:
    import time

    pool = kv.BlockPool(8, 2)
    figures = reader(pool)
    compute(pool, [1, 2, 3, 4, 5]).remove(0).free()
    time.sleep(0.1)
    compute(pool, [6, 7, 8, 9, 10]).remove(0).free()
    assert figures()["kvfolio_pool_eviction_age_seconds_count", ""] == 0
    pool.release(pool.allocate(8))
    samples, name = figures(), "kvfolio_pool_eviction_age_seconds"
    assert samples[f"{name}_count", ""] == samples[f"{name}_bucket", "+Inf"] == 4
    assert samples[f"{name}_bucket", "0.064"] == 2
    assert 0.18 < samples[f"{name}_sum", ""] < 10
    buckets = [value for (sample, _), value in samples.items() if sample == f"{name}_bucket"]
    assert buckets == sorted(buckets)


def test_what_is_taken_back_makes_no_counter_fall() -> None:
    """Prometheus takes a counter that falls for a process that began anew."""
    pool = kv.BlockPool(8, 2)
    figures = reader(pool)
    compute(pool, [1, 2, 3, 4, 5]).remove(0).free()
    # A first plan looks again, and finds what is there by then; a rollback takes that back.
    batch = kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=8)
    pool.reset_prefix_cache()
    batch.add(pool.sequence([1, 2, 3, 4, 5]))
    compute(pool, [1, 2, 3, 4, 5])
    plan = batch.plan()
    counter = ("kvfolio_pool_cache_hit_tokens_total", "")
    assert figures()[counter] == pool.stats()["hit_tokens"] == 4
    plan.rollback()
    assert pool.stats()["hit_tokens"] == 0
    assert figures()[counter] == 4


def test_names_are_as_prometheus_wants_them() -> None:
    registry = CollectorRegistry()
    registry.register(Collector(kv.BlockPool(4, 2)))
    units = ("blocks", "tokens", "seconds", "bytes", "allocations")
    for family in registry.collect():
        assert family.name.startswith("kvfolio_pool_")
        assert family.name.endswith(units), family.name
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")


def test_a_port_serves_them_until_it_is_closed() -> None:
    pool = kv.BlockPool(4, 2)
    with serve(pool, port=0) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(server.url) as answer:
            assert read(answer.read().decode())["kvfolio_pool_capacity_blocks", ""] == 4
        with pytest.raises(
            OSError, match=f"in use .address '127.0.0.1', port {server.port}; port 0 is any free"
        ):
            serve(pool, port=server.port)
    serve(pool, port=server.port).close()
    with pytest.raises(ValueError, match="port must be at most 65535, not 70000"):
        serve(pool, port=70000)
    with pytest.raises(TypeError, match="port must be an integer, not str"):
        serve(pool, port="80")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source must be a BlockPool or an Engine, not list"):
        serve([], port=0)  # type: ignore[arg-type]
