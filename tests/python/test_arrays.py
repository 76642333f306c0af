"""Who owns the memory of a plan's arrays, and how long they stay as they are."""

import gc
import sys

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import PLAN_ARRAYS, batch_of, compute


@pytest.fixture
def pool():
    return kv.BlockPool(512, 4)


def rich_plan(pool, batch):
    """A plan none of whose arrays is empty; of two rows, one skipped that never fits, and one copy."""
    seq = pool.sequence(range(6))
    compute(batch, seq)
    fork = seq.fork()
    fork.extend([7, 8])
    batch.add(fork)
    batch.add(pool.sequence(range(2100)))
    batch.add(pool.sequence(range(50, 60)))
    plan = batch.plan(partial=True)
    assert all(getattr(plan, name).size for name in PLAN_ARRAYS)
    return plan


@pytest.fixture
def batch(pool):
    return batch_of(pool, 8, 4096)


def empty_plan(batch):
    return batch.plan()


@pytest.mark.parametrize("name", PLAN_ARRAYS)
def test_dtypes_are_those_that_kernels_read(pool, batch, name):
    empty, rich = empty_plan(batch), None
    empty.commit()
    rich = rich_plan(pool, batch)
    rich.commit()
    for plan in (empty, rich):
        assert getattr(plan, name).dtype == PLAN_ARRAYS[name]


@pytest.mark.parametrize("name", PLAN_ARRAYS)
def test_items_lie_side_by_side(pool, batch, name):
    with rich_plan(pool, batch) as plan:
        array = getattr(plan, name)
        assert array.strides[-1] == array.itemsize and array.flags.aligned
        assert array.flags.c_contiguous or name == "block_table"


def test_rows_of_the_table_may_lie_apart_but_do_not_overlap(pool, batch):
    with rich_plan(pool, batch) as plan:
        table = plan.block_table
        assert table.strides[0] >= table.shape[1] * table.itemsize
        assert table.strides[0] % table.itemsize == 0


def test_shapes_of_an_empty_plan(pool, batch):
    with empty_plan(batch) as plan:
        shapes = {name: getattr(plan, name).shape for name in PLAN_ARRAYS}
    assert shapes.pop("query_start_loc") == shapes.pop("page_indptr") == (1,)
    assert shapes.pop("block_table")[0] == 0
    assert (shapes.pop("copies"), shapes.pop("table_updates")) == ((0, 2), (0, 3))
    assert set(shapes.values()) == {(0,)}
    assert (plan.num_tokens, plan.max_query_len, plan.max_seq_len) == (0, 0, 0)
    assert plan.query_start_loc.tolist() == plan.page_indptr.tolist() == [0]


@pytest.mark.parametrize("name", PLAN_ARRAYS)
def test_arrays_are_read_only_for_good(pool, batch, name):
    with rich_plan(pool, batch) as plan:
        array = getattr(plan, name)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        for view in (array, array[:1], array.view()):
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.setflags(write=True)
        with pytest.raises(ValueError, match="read-only"):
            np.add(array, 1, out=array)


def test_snapshots_of_tables_and_sequences_are_read_only(pool):
    table = pool.table()
    table.append(6)
    seq = pool.sequence(range(6))
    compute(batch_of(pool), seq)
    for array in (table.block_ids, table.slots(0, 6), seq.block_ids, seq.token_ids):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_snapshots_do_not_follow_what_is_changed(pool):
    table, seq = pool.table(), pool.sequence(range(6))
    table.append(6)
    arrays = [table.block_ids, table.slots(0, 6), seq.token_ids]
    before = [array.copy() for array in arrays]
    table.discard_before(4)
    table.append(40)
    table.release()
    seq.extend([1])
    seq.free()
    assert all(map(np.array_equal, arrays, before))


def step(pool, batch, index):
    """One of many unlike plans: rows come and go, grow and are cut."""
    if len(batch.rows) == 8:
        batch.remove(batch.rows[index % 8]).free()
    batch.add(pool.sequence(range(100 * index, 100 * index + 1 + 7 * index % 23)))
    for row in batch.rows[:-1]:
        batch.extend([row], [index])
    return batch.plan(partial=True)


def test_arrays_stay_constant_over_later_plans(pool, batch):
    held = []
    for index in range(50):
        with step(pool, batch, index) as plan:
            held += [(array, array.copy()) for array in (getattr(plan, name) for name in PLAN_ARRAYS)]
        del plan
    assert all(np.array_equal(array, copy) for array, copy in held)


def test_one_held_array_keeps_all_of_its_plan(pool, batch):
    """What is read late is what was planned, though only a neighbour was held."""
    with rich_plan(pool, batch) as plan:
        expected = plan.page_indices.tolist()
    for index in range(20):
        step(pool, batch, index).commit()
    assert plan.page_indices.tolist() == expected


def test_arrays_outlive_plan_batch_and_pool():
    pool = kv.BlockPool(512, 4)
    batch = batch_of(pool, 8, 4096)
    with rich_plan(pool, batch) as plan:
        arrays = [getattr(plan, name) for name in PLAN_ARRAYS]
        copies = [array.copy() for array in arrays]
    del plan, batch, pool
    gc.collect()
    again = kv.BlockPool(512, 4)
    other = batch_of(again, 8, 4096)
    for index in range(10):
        step(again, other, index).commit()
    assert all(map(np.array_equal, arrays, copies))


def test_an_array_outlives_the_traceback_that_held_it(pool, batch):
    def fail():
        with rich_plan(pool, batch) as plan:
            slots = plan.slot_mapping
            raise ArithmeticError(len(slots))

    try:
        fail()
    except ArithmeticError as error:
        frame = error.__traceback__.tb_next.tb_frame
        slots = frame.f_locals["slots"]
    expected = slots.tolist()
    del frame
    gc.collect()
    for index in range(20):
        step(pool, batch, index).commit()
    assert slots.tolist() == expected


def addresses(pool, hold):
    batch, held, found = batch_of(pool, 2, 4096), [], []
    batch.add(pool.sequence(range(100)))
    for token in range(40):
        batch.extend([0], [token])
        with batch.plan() as plan:
            table = plan.block_table
            found.append(table.ctypes.data)
        if hold:
            held.append(table)
        del plan, table
    return found


def test_memory_that_nobody_holds_is_used_again(pool):
    assert len(set(addresses(pool, hold=False))) <= 3


def test_memory_that_somebody_holds_is_not_used_again(pool):
    assert len(set(addresses(pool, hold=True))) == 40


def test_reading_an_array_twice_gives_the_same_memory(pool, batch):
    with rich_plan(pool, batch) as plan:
        for name in PLAN_ARRAYS:
            first, second = getattr(plan, name), getattr(plan, name)
            assert first.ctypes.data == second.ctypes.data and np.array_equal(first, second)


def test_arrays_are_not_leaked(pool, batch):
    with rich_plan(pool, batch) as plan:
        owner = plan.token_ids.base
        before = sys.getrefcount(owner)
        for _ in range(100):
            for name in PLAN_ARRAYS:
                getattr(plan, name)
        assert sys.getrefcount(owner) == before


def test_fresh_arrays_of_a_call_are_the_callers_own(pool):
    table = pool.table()
    for array in (pool.allocate(3), table.append(3)):
        assert array.flags.writeable and array.dtype == np.int32
    assert table.append(0).shape == (0, 2)
