"""Events, as they come out of a pool: order, parents, copies, and that they say what can be found."""

from __future__ import annotations

import sys
import threading
from collections import Counter

import kvfolio as kv
import msgpack
import pytest
from event_router import Router
from event_workload import Workload


def compute(pool: kv.BlockPool, tokens: list[int], **options: object) -> kv.Batch:
    """A batch with one sequence, computed and still there."""
    batch = kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=len(tokens) + 1)
    batch.add(pool.sequence(tokens, **options))  # type: ignore[arg-type]
    with batch.plan():
        pass
    return batch


def kinds(batch: bytes | None) -> list[str]:
    return [] if batch is None else [event["type"] for event in msgpack.unpackb(batch)[1]]


def assert_same(router: Router, pool: kv.BlockPool, texts: list[list[int]]) -> None:
    for text in texts:
        assert router.match(text, pool.block_size) == pool.match(text), text


@pytest.mark.parametrize("seed", range(20))
def test_what_events_say_is_what_match_finds(seed: int) -> None:
    pool = kv.BlockPool(10 + seed % 3 * 6, 2 + seed % 3, events=True)
    source, router, work = pool.events(), Router(), Workload(pool, seed)
    compared = Counter[bool]()
    for step in range(2000):
        work.step()
        if step % (1 + seed % 7) == 0:
            router.apply(source.drain())
            assert_same(router, pool, work.texts[-8:])
            compared.update(pool.match(text) > 0 for text in work.texts[-8:])
    work.close()
    router.apply(source.drain())
    assert_same(router, pool, work.texts)
    late = Router()
    late.apply(source.snapshot())
    assert late.hash_of == router.hash_of
    assert min(compared.values()) > 20, compared
    assert router.num_removed > 20


def test_a_pool_whose_events_nobody_drains_tells_all_at_last() -> None:
    pool = kv.BlockPool(16, 2, events=True)
    work = Workload(pool, 3)
    for _ in range(3000):
        work.step()
    work.close()
    router = Router()
    router.apply(pool.events().drain())
    assert_same(router, pool, work.texts)
    assert router.num_removed == 0, "what came and went is not told"


def test_two_copies_of_a_block_are_stored_once_and_removed_with_the_last() -> None:
    pool = kv.BlockPool(8, 4, events=True)
    source, tokens = pool.events(), list(range(9))
    # Both are planned before either is published, and neither looks whether an equal one is there.
    first, second = (
        kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=16),
        kv.Batch(pool, max_sequences=1, max_tokens_per_sequence=16),
    )
    for batch in (first, second):
        batch.add(pool.sequence(tokens, read_cache=False))
    plans = [batch.plan() for batch in (first, second)]
    for plan in plans:
        plan.commit()
    batch = source.drain()
    assert kinds(batch) == ["AllBlocksCleared", "BlockStored"]
    router = Router()
    router.apply(batch)
    assert router.num_stored == 2
    first.remove(0).free()
    pool.release(pool.allocate(5))  # the first one's blocks are evicted
    router.apply(source.drain())
    assert_same(router, pool, [tokens])


def test_a_block_that_moves_to_another_one_meanwhile_is_not_told() -> None:
    pool = kv.BlockPool(4, 2, events=True)
    source = pool.events()
    compute(pool, [1, 2, 3, 4]).remove(0).free()
    assert kinds(source.drain()) == ["AllBlocksCleared", "BlockStored"]
    pool.release(pool.allocate(4))  # evicted
    compute(pool, [1, 2, 3, 4])  # and computed again, in other blocks or the same
    assert source.drain() is None


def test_children_of_a_parent_that_went_are_told_only_when_it_is_back() -> None:
    """A prefix walk stops at a missing block, so what lies behind it cannot be found."""
    pool = kv.BlockPool(6, 2, events=True)
    source, router = pool.events(), Router()
    batch = compute(pool, [1, 2, 3, 4, 5, 6])
    router.apply(source.drain())
    sequence = batch.remove(0)
    sequence.discard_before(4)  # blocks 0 and 1 are idle, block 2 is held
    lent = pool.allocate(5)
    router.apply(source.drain())
    assert (router.num_removed, len(router.hash_of)) == (3, 0)
    pool.release(lent)
    compute(pool, [1, 2, 3, 4])
    router.apply(source.drain())
    assert router.match([1, 2, 3, 4, 5, 6], 2) == pool.match([1, 2, 3, 4, 5, 6]) == 6


def test_a_reset_clears_and_nothing_older_comes_back() -> None:
    pool = kv.BlockPool(8, 2, events=True)
    source = pool.events()
    batch = compute(pool, [1, 2, 3, 4])
    assert kinds(source.drain()) == ["AllBlocksCleared", "BlockStored"]
    pool.reset_prefix_cache()
    compute(pool, [5, 6])
    drained = source.drain()
    assert kinds(drained) == ["AllBlocksCleared", "BlockStored"]
    assert msgpack.unpackb(drained)[1][1]["token_ids"] == [5, 6]  # type: ignore[arg-type]
    batch.remove(0).free()
    assert source.drain() is None, "what went with the reset is not removed once more"


def test_contexts_are_told_and_secrets_are_not() -> None:
    pool = kv.BlockPool(8, 2, events=True)
    source = pool.events(medium="CPU", data_parallel_rank=3)
    context = kv.Context(adapter="lora-1", tenant="acme", salt="secret", extras=[(1, 3, b"\x01\xff")])
    compute(pool, [7, 8, 9, 10, 11, 12], context=context)
    batch = source.drain()
    assert batch is not None
    assert b"secret" not in batch
    assert b"acme" not in batch
    _, (_, event), rank = msgpack.unpackb(batch)
    assert (rank, event["medium"], event["lora_name"]) == (3, "CPU", "lora-1")
    first, second, third = event["extra_keys"]
    namespace = third[1]
    assert len(bytes.fromhex(namespace)) == 32
    assert first == ["lora-1", ["01ff", 1], namespace]
    assert second == ["lora-1", ["01ff", -1], namespace]
    assert third == ["lora-1", namespace]


def test_events_may_be_arrays() -> None:
    pool = kv.BlockPool(4, 2, events=True)
    source = pool.events(array_events=True)
    batch = compute(pool, [1, 2])
    _, events, rank = msgpack.unpackb(source.drain())  # type: ignore[arg-type]
    key = events[1][1][0]
    assert events == [["AllBlocksCleared"], ["BlockStored", [key], None, [1, 2], 2, None, "GPU", None]]
    assert rank == 0
    batch.remove(0).free()
    pool.allocate(4)
    assert msgpack.unpackb(source.drain())[1] == [["BlockRemoved", [key], "GPU"]]  # type: ignore[arg-type]


def test_a_pool_has_one_source_at_a_time_and_the_next_begins_with_all() -> None:
    pool = kv.BlockPool(8, 2, events=True)
    source = pool.events()
    compute(pool, [1, 2, 3, 4])
    told = source.drain()
    with pytest.raises(kv.ConcurrentUse):
        pool.events()
    del source
    again = pool.events()
    assert msgpack.unpackb(again.drain())[1] == msgpack.unpackb(told)[1]  # type: ignore[arg-type]
    assert again.drain() is None
    with pytest.raises(
        ValueError, match=r"the pool has no events: it must be made with them \(events=True\)"
    ):
        kv.BlockPool(1, 1).events()
    with pytest.raises(ValueError, match="data_parallel_rank must be at least 0, not -1"):
        kv.BlockPool(1, 1, events=True).events(data_parallel_rank=-1)


def test_threads_that_publish_and_evict_at_once_leave_the_right_picture() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run_threads()
    finally:
        sys.setswitchinterval(interval)


def run_threads() -> None:
    pool = kv.BlockPool(40, 2, events=True)
    source, router = pool.events(), Router()
    works = [Workload(pool, seed) for seed in range(3)]
    stop, failures = threading.Event(), []

    def work(one: Workload) -> None:
        for step in range(60_000):
            one.step()
            if step > 1000 and router.num_removed > 60:
                break
        one.close()

    def follow() -> None:
        try:
            while not stop.is_set():
                router.apply(source.drain())
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[one]) for one in works]
    follower = threading.Thread(target=follow)
    for thread in [*threads, follower]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    follower.join()
    assert not failures
    router.apply(source.drain())
    assert_same(router, pool, [text for one in works for text in one.texts])
    assert router.num_removed > 60, (pool, pool.stats(), router.num_stored)
