"""Python code that runs in the middle of a call may use the very objects that the call is on."""

import gc
import threading

import kvfolio as kv
import kvfolio.errors
import pytest
from bookkeeping import batch_of, compute


class Number:
    """A number that does something when it is read."""

    def __init__(self, value, act):
        self.value, self.act = value, act

    def __index__(self):
        self.act()
        return self.value


def test_an_argument_may_use_the_object_that_it_goes_to():
    pool = kv.BlockPool(64, 4)
    table, seq, batch = pool.table(), pool.sequence(range(5)), batch_of(pool)
    row = compute(batch, seq)
    table.append(5)
    acts = [
        (table, lambda: table.append(1)),
        (seq, lambda: seq.extend([1])),
        (batch, lambda: batch.plan(num_tokens=1).commit()),
        (pool, lambda: pool.release(pool.allocate(1))),
    ]
    for _, act in acts:
        table.append(Number(1, act))
        table.locate(Number(0, act))
        table.truncate(Number(3, act))
        seq.extend(Number(1, act))
        seq.resolve([1])
        batch.plan(Number(100, act)).commit()
        batch.shortfall(num_tokens=Number(3, act))
        pool.release(pool.allocate(Number(2, act)))
        pool.ref_count(Number(1, act))
    assert batch.remove(Number(row, lambda: seq.fork())) is seq
    table.release()
    seq.free()
    pool.audit()
    assert pool.num_referenced == 0


def test_an_exception_may_use_the_object_that_raises_it(monkeypatch):
    """Errors become exceptions when no lock is held any more."""
    pool = kv.BlockPool(4, 4)
    table, seq, batch = pool.table(), pool.sequence(range(30)), batch_of(pool)
    table.append(5)
    batch.add(seq)
    seen = []

    class Curious(kv.OutOfBlocks):
        def __init__(self, *numbers):
            super().__init__(*numbers)
            table.append(1)
            seen.append((table.num_tokens, seq.num_tokens, batch.rows, pool.num_free))

    monkeypatch.setattr(kvfolio.errors, "OutOfBlocks", Curious)
    for call in (lambda: table.append(100), batch.plan, lambda: pool.allocate(5)):
        with pytest.raises(Curious):
            call()
    assert seen == [(6, 30, [0], 2), (7, 30, [0], 2), (8, 30, [0], 2)]


def test_a_finalizer_may_use_what_is_being_worked_on():
    pool = kv.BlockPool(64, 4)
    batch, seq, table = batch_of(pool), pool.sequence(range(5)), pool.table()
    row = batch.add(seq)
    seen = []

    class Garbage:
        def __init__(self):
            self.me = self

        def __del__(self):
            table.append(1)
            seen.append((table.num_tokens, seq.num_tokens, batch.rows))

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for token in range(100):
            Garbage()
            seq.extend([token % 3])
            batch.plan().commit()
            assert len(table.block_ids) == table.num_blocks
            seq.truncate(5)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(seen) == 100
    batch.remove(row).free()
    table.release()
    pool.audit()


def test_an_exception_in_a_thread_gives_its_blocks_back():
    """Whatever the other threads do meanwhile."""
    pool = kv.BlockPool(256, 4)
    batches = [batch_of(pool) for _ in range(4)]

    class Fails(Exception):
        pass

    def work(number):
        batch = batches[number]
        for n in range(100):
            seq, table = pool.sequence(range(n % 3, 20)), pool.table()
            try:
                batch.add(seq)
                table.append(6)
                with batch.plan() as plan:
                    plan.extend([1])
                    if n % 2:
                        raise Fails
                assert seq.num_computed
            except Fails:
                assert seq.num_computed == seq.num_cached
            finally:
                seq.free()
                table.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    pool.audit()
    assert pool.num_referenced == pool.num_quarantined == 0
