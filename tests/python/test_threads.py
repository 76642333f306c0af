"""Threads, processes and the garbage collector."""

import contextlib
import gc
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref

import kvfolio as kv
import pytest
from bookkeeping import batch_of, compute, counts, publish


def in_threads(*works):
    """Run each in a thread of its own, all at once; the first error is raised here."""
    errors, start = [], threading.Barrier(len(works))

    def run(work):
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


@pytest.fixture
def switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switch_often")
def test_batches_of_two_threads_share_a_pool():
    pool = kv.BlockPool(40, 4)  # less than both need together, so that hits are evicted
    served = []

    def serve(seed):
        batch = batch_of(pool, 3, 64)
        for request in range(300):
            shared = request % 7 * 10
            tokens = [*range(shared, shared + 12), *range(seed, seed + request % 9)]
            seq = pool.sequence(tokens)
            row = batch.add(seq)
            with batch.plan() as plan:
                assert plan.block_table.shape[0] == 1
            assert batch.remove(row) is seq
            assert seq.num_computed == len(tokens)
            served.append(seq.num_cached)
            seq.free()

    in_threads(lambda: serve(1000), lambda: serve(2000))
    pool.audit()
    assert len(served) == 600 and sum(served) == pool.stats()["hit_tokens"] > 0
    assert pool.stats()["evictions"] > 0
    assert pool.num_referenced == pool.num_quarantined == 0


@pytest.mark.usefixtures("switch_often")
def test_no_block_is_handed_to_two_threads():
    pool = kv.BlockPool(64, 4)
    owners = [None] * 65

    def take_and_give(name):
        for n in range(400):
            ids = pool.allocate(1 + n % 31)
            for block in ids.tolist():
                assert owners[block] is None
                owners[block] = name
            for block in ids.tolist():
                assert owners[block] == name
                owners[block] = None
            pool.release(ids)

    in_threads(lambda: take_and_give("a"), lambda: take_and_give("b"))
    pool.audit()
    assert counts(pool) == (64, 0, 0, 0)


@pytest.mark.usefixtures("switch_often")
def test_what_one_thread_makes_another_may_end():
    pool = kv.BlockPool(64, 4)
    tables = queue.Queue(8)  # of at most 2 blocks each

    def make():
        for n in range(300):
            table = pool.table()
            table.append(n % 9)
            tables.put(table, timeout=10)

    def release():
        for _ in range(300):
            tables.get(timeout=10).release()

    def watch():
        for _ in range(300):
            assert pool.num_free <= 64
            pool.stats()
            pool.match(range(8))

    in_threads(make, release, watch)
    pool.audit()
    assert counts(pool) == (64, 0, 0, 0)


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("shared", ["table", "sequence", "batch"])
def test_a_second_thread_is_told_or_served(shared):
    pool = kv.BlockPool(4096, 4)
    table, seq, batch = pool.table(), pool.sequence([]), batch_of(pool, 2, 2**20)
    batch.add(seq)

    def use():
        for _ in range(300):
            # Besides: the table was cut, or the plan ended, by the other one.
            with contextlib.suppress(kv.ConcurrentUse, kv.PlanInFlight, kv.StaleHandle):
                if shared == "table":
                    table.append(5)
                    table.truncate(0)
                elif shared == "sequence":
                    seq.extend([1])
                else:
                    batch.extend([0], [1])
                    batch.plan().commit()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # plans that could not be ended
        in_threads(use, use)
        gc.collect()
    pool.audit()
    table.release()
    seq.free()
    assert pool.num_referenced == 0


@pytest.mark.usefixtures("switch_often")
def test_a_plan_that_several_threads_end_ends_once():
    pool = kv.BlockPool(64, 4)
    batch, seq = batch_of(pool, 1, 4096), pool.sequence([1])
    row, endings = batch.add(seq), []
    for n in range(200):
        plan, ended = batch.plan(), []

        def end(verb, plan=plan, ended=ended):
            while True:
                try:
                    getattr(plan, verb)()
                except kv.ConcurrentUse:
                    continue
                except kv.StaleHandle:
                    return
                ended.append(verb)

        in_threads(lambda: end("commit"), lambda: end("rollback"), lambda: end("commit"))
        assert len(ended) == 1
        endings += ended
        assert seq.num_computed == endings.count("commit")
        assert plan.extend([n]).tolist() == [ended == ["commit"]]
    assert batch.remove(row).num_computed == endings.count("commit")
    seq.free()
    pool.audit()
    assert pool.num_referenced == 0


@pytest.mark.usefixtures("switch_often")
def test_all_calls_of_a_pool_may_come_from_any_thread():
    """Counters stay within what is possible at any moment, references within what was lent."""
    pool, stop = kv.BlockPool(48, 4), threading.Event()

    def serve(number):
        for n in range(250):
            context = kv.Context(tenant=str(n % 2))
            with contextlib.suppress(kv.OutOfBlocks):
                ids = pool.allocate(1 + (n + number) % 5)
                pool.share(ids)
                assert all(pool.ref_count(block) == 2 for block in ids)
                table = pool.table(ids)
                with pytest.raises(kv.InvalidBlock):
                    pool.release([*ids, *ids])
                pool.release(ids)
                table.append(1)
                fork = table.fork(2)
                table.release()
                fork.release()
            with contextlib.suppress(kv.OutOfBlocks):
                publish(pool, [n % 3] * 9, context=context)
            assert pool.match([n % 3] * 9, context) in (0, 4, 8)

    def watch():
        while not stop.is_set():
            for number in (pool.num_free, pool.num_idle, pool.num_referenced, pool.num_quarantined):
                assert 0 <= number <= 48
            stats = pool.stats()
            assert stats["evictions"] <= stats["allocations"]
            pool.reset_prefix_cache()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        in_threads(*(lambda number=number: serve(number) for number in range(6)))
    finally:
        stop.set()
        watcher.join()
    pool.audit()
    assert pool.num_referenced == pool.num_quarantined == 0


@pytest.mark.skipif(getattr(sys, "_is_gil_enabled", lambda: True)(), reason="needs a free-threaded Python")
def test_an_import_leaves_the_gil_off():
    program = "import kvfolio, sys; print(sys._is_gil_enabled())"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_goes_on_with_its_copy():
    """In a process of its own, without the threads of the test runner."""
    program = """
        import os, sys, threading
        import kvfolio as kv
        pool = kv.BlockPool(16, 4)
        table = pool.table()
        table.append(6)
        batch = kv.Batch(pool, max_sequences=2, max_tokens_per_sequence=32)
        seq = pool.sequence(range(6))
        batch.add(seq)
        plan = batch.plan()
        stop = threading.Event()
        def busy():
            while not stop.is_set():
                pool.release(pool.allocate(3))
        thread = threading.Thread(target=busy) if "busy" in sys.argv else None
        if thread: thread.start()
        child = os.fork()
        if child == 0:
            plan.commit()
            table.append(6)
            assert table.num_blocks == 3 and seq.num_computed == 6
            assert pool.match(range(6)) == 4
            table.release()
            seq.free()
            if not thread:
                pool.audit()
                assert pool.num_referenced == 0
            os._exit(0)
        _, status = os.waitpid(child, 0)
        stop.set()
        if thread: thread.join()
        assert status == 0, status
        assert table.num_blocks == 2 and seq.num_computed == 0
        plan.commit()
        pool.audit()
        print("fine")
    """
    for mode in ("alone", "busy"):
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program), mode]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.stdout == "fine\n", result.stderr


def test_an_import_starts_no_thread():
    program = "import kvfolio, os; print(len(os.listdir('/proc/self/task')))"
    plain = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("needs /proc")
    outputs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for code in (program, plain)
    ]
    assert outputs[0] == outputs[1]


def objects(pool):
    """One of everything, holding blocks, with a plan in flight."""
    batch, seq = batch_of(pool), pool.sequence(range(6))
    compute(batch, seq)
    seq.extend([1])
    table = pool.table()
    table.append(5)
    return [table, table.fork(), seq.fork(), seq, batch, batch.plan()]


@pytest.mark.filterwarnings("ignore:a plan was dropped:ResourceWarning")
@pytest.mark.parametrize("rotation", range(6))
@pytest.mark.parametrize("reverse", [False, True])
def test_objects_end_in_any_order(rotation, reverse):
    pool = kv.BlockPool(16, 4)
    things = objects(pool)
    things = things[rotation:] + things[:rotation]
    if reverse:
        things.reverse()
    while things:
        things.pop()
        pool.audit()
    gc.collect()
    assert pool.num_referenced == pool.num_quarantined == 0


@pytest.mark.filterwarnings("ignore:a plan was dropped:ResourceWarning")
def test_objects_in_cycles_are_collected():
    class Holder:
        pass

    pool = kv.BlockPool(16, 4)
    holder = Holder()
    holder.me, holder.things = holder, objects(pool)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
    pool.audit()
    assert pool.num_referenced == pool.num_quarantined == 0


def test_a_pool_goes_with_its_last_user():
    pool = kv.BlockPool(16, 4)
    gone = weakref.ref(pool)
    batch, seq = batch_of(pool), pool.sequence(range(6))
    compute(batch, seq)
    del pool
    gc.collect()
    assert gone() is batch.pool
    seq.extend([1])
    plan = batch.plan()
    plan.commit()
    assert seq.num_computed == 7
    del batch
    assert gone() is plan.pool
    del plan
    gc.collect()
    assert gone() is None  # the object; the blocks are there as long as somebody needs them
    assert seq.num_computed == 7


def test_a_chain_of_a_million_blocks_ends_on_a_small_stack():
    size = threading.stack_size(256 * 1024)
    try:
        pool = kv.BlockPool(2**20, 1)
        in_threads(lambda: publish(pool, range(2**20)))
        pool.audit()
        assert pool.num_idle == 2**20
        in_threads(pool.reset_prefix_cache)
        assert counts(pool) == (2**20, 0, 0, 0)
    finally:
        threading.stack_size(size)


def test_a_signal_is_no_second_thread():
    """Python runs handlers between calls of the library, never inside of one."""
    if not hasattr(signal, "setitimer"):
        pytest.skip("needs timers")
    pool = kv.BlockPool(64, 4)
    table = pool.table()
    seen = []
    previous = signal.signal(signal.SIGALRM, lambda *_: seen.append(table.num_tokens))
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        while len(seen) < 20:
            table.append(5)
            table.truncate(0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert set(seen) <= {0, 5}
