"""Plans written into memory that the caller owns."""

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import PLAN_ARRAYS, batch_of, counts, unchanged

IN_BUFFERS = [
    "rows",
    "token_ids",
    "positions",
    "query_start_loc",
    "seq_lens",
    "slot_mapping",
    "last_page_len",
]
IN_BUFFERS += ["logits_rows", "logits_indices"]


def setup(max_sequences=6, max_tokens=64, **how):
    pool = kv.BlockPool(200, 4)
    batch = batch_of(pool, max_sequences, max_tokens)
    return pool, batch, kv.PlanBuffers(batch, 96, **how)


def workload(batch, pool, step, rng):
    """Change something, so that rows come, go, grow and are left out."""
    rows = batch.rows
    if len(rows) < 5 and step % 3 != 1:
        batch.add(pool.sequence(rng.integers(0, 50, rng.integers(1, 12)).tolist()))
    elif step % 7 == 3:
        batch.preempt(rows[int(rng.integers(len(rows)))])
    elif step % 11 == 5:
        seq = batch.remove(rows[0])
        seq.truncate(seq.num_tokens // 2)
        batch.add(seq)
    for row in batch.rows:
        if rng.random() < 0.9:
            batch.extend([row], [int(rng.integers(50))])


def test_what_is_written_is_what_a_plan_of_its_own_has():
    pool, batch, buffers = setup(pad_slot=-1, pad_seq_len=3, pad_last_page_len=2)
    twin_pool = kv.BlockPool(200, 4)
    twin = batch_of(twin_pool, 6)
    rng, twin_rng = np.random.default_rng(1), np.random.default_rng(1)
    addresses = {name: array.ctypes.data for name, array in buffers.arrays.items()}
    for step in range(120):
        workload(batch, pool, step, rng)
        workload(twin, twin_pool, step, twin_rng)
        # Now and then a plan that is not written there comes between.
        plan, expected = batch.plan(out=buffers if step % 5 else None), twin.plan()
        for name, dtype in PLAN_ARRAYS.items():
            array = getattr(plan, name)
            assert array.dtype == dtype and not array.flags.writeable
            np.testing.assert_array_equal(array, getattr(expected, name), err_msg=name)
        if step % 5:
            check_padding(buffers, plan)
        plan.commit()
        expected.commit()
    assert counts(pool) == counts(twin_pool)
    assert addresses == {name: array.ctypes.data for name, array in buffers.arrays.items()}


def check_padding(buffers, plan):
    n, tokens = len(plan.rows), plan.num_tokens
    arrays = buffers.arrays
    for name in IN_BUFFERS:
        values = getattr(plan, name)
        assert values.ctypes.data == arrays[name].ctypes.data
    assert set(arrays["token_ids"][tokens:].tolist()) <= {0} and set(arrays["positions"][tokens:]) <= {0}
    assert set(arrays["slot_mapping"][tokens:].tolist()) <= {-1}
    assert set(arrays["query_start_loc"][n + 1 :].tolist()) <= {tokens}  # rows of no token
    assert set(arrays["seq_lens"][n:].tolist()) <= {3} and set(arrays["last_page_len"][n:].tolist()) <= {2}
    table = arrays["block_table"]
    width = plan.block_table.shape[1]
    assert not table[n:].any() and not table[:n, width:].any()
    assert not width or plan.block_table.ctypes.data == table.ctypes.data


def test_only_what_changed_is_written_into_the_table_until_it_is_forgotten():
    pool, batch, buffers = setup()
    batch.add(pool.sequence(range(1, 10)))
    batch.plan(out=buffers).commit()
    table = buffers.arrays["block_table"]
    table[0, 0] = 77
    batch.extend([0], [1])
    plan = batch.plan(out=buffers)
    assert plan.block_table[0].tolist() == [77, 2, 3]
    plan.commit()
    buffers.forget()
    batch.extend([0], [1])
    with batch.plan(out=buffers) as plan:
        assert plan.block_table[0].tolist() == [1, 2, 3]


def test_a_plan_that_does_not_fit_changes_nothing():
    pool, batch, _ = setup()
    rows = [batch.add(pool.sequence(range(i, i + 9))) for i in range(3)]
    few_tokens = kv.PlanBuffers(batch, 26)
    few_rows = kv.PlanBuffers(batch, 99, max_sequences=2)
    narrow = kv.PlanBuffers(batch, 99, max_blocks=2)
    for buffers in (few_tokens, few_rows, narrow):
        before = buffers.memory.copy()
        with (
            unchanged(pool, batch),
            pytest.raises(ValueError, match="out must be large enough for 3 rows, 27 tok"),
        ):
            batch.plan(out=buffers)
        np.testing.assert_array_equal(buffers.memory, before)
    batch.plan(out=few_rows, rows=rows[:2]).commit()
    with pytest.raises(ValueError, match="out must be buffers of this batch, not of another"):
        batch_of(pool).plan(out=few_rows)
    with pytest.raises(TypeError, match="out must be PlanBuffers, not dict"):
        batch.plan(out={})


def test_the_csr_form_of_a_plan_in_buffers():
    pool, batch, buffers = setup()
    for length in (9, 1, 4):
        batch.add(pool.sequence(range(length)))
    with batch.plan(out=buffers) as plan:
        assert plan.page_indptr.tolist() == [0, 3, 4, 5]
        assert plan.page_indices.tolist() == [1, 2, 3, 4, 5]


def test_the_csr_form_is_written_at_fixed_addresses_when_it_is_asked_for():
    """Beside what each plan has itself; behind it rows of no page, and the null block."""
    pool, batch, buffers = setup(max_pages=6 * 16)
    addresses = {name: array.ctypes.data for name, array in buffers.arrays.items()}
    rng = np.random.default_rng(5)
    for step in range(80):
        workload(batch, pool, step, rng)
        before = buffers.memory[buffers.fields["page_indptr"].offset :].copy()
        with batch.plan(out=buffers) as plan:
            np.testing.assert_array_equal(buffers.memory[buffers.fields["page_indptr"].offset :], before)
            if step % 3 == 1:
                continue
            buffers.write_csr(plan)
            rows, pages = len(plan.rows), len(plan.page_indices)
            indptr, indices = buffers.arrays["page_indptr"], buffers.arrays["page_indices"]
            assert indptr.dtype == indices.dtype == np.int32
            assert indptr[: rows + 1].tolist() == plan.page_indptr.tolist()
            assert set(indptr[rows + 1 :].tolist()) <= {pages}
            assert indices[:pages].tolist() == plan.page_indices.tolist() and not indices[pages:].any()
            lengths = np.diff(indptr)[:rows] - 1
            assert (lengths * 4 + buffers.arrays["last_page_len"][:rows]).tolist() == plan.seq_lens.tolist()
    assert addresses == {name: array.ctypes.data for name, array in buffers.arrays.items()}


def test_a_csr_form_that_cannot_be_written_changes_nothing():
    pool, batch, without = setup()
    small = kv.PlanBuffers(batch, 96, max_pages=4)
    batch.add(pool.sequence(range(16)))
    with batch.plan(out=small) as plan:
        small.write_csr(plan)
        with pytest.raises(ValueError, match="max_pages must have been given to make room"):
            without.write_csr(plan)
    batch.extend([0], [3])
    before = small.memory[small.fields["page_indptr"].offset :].copy()
    with (
        batch.plan(out=small) as plan,
        pytest.raises(ValueError, match=r"max_pages must be at least 5 .*, not 4"),
    ):
        small.write_csr(plan)
    batch.extend([0], [3])
    large = kv.PlanBuffers(batch, 96, max_pages=5)
    with (
        batch.plan() as plan,
        pytest.raises(ValueError, match="plan must be the one that was written into these"),
    ):
        large.write_csr(plan)
    np.testing.assert_array_equal(small.memory[small.fields["page_indptr"].offset :], before)
    assert not large.arrays["page_indptr"].any() and not large.arrays["page_indices"].any()
    with pytest.raises(ValueError, match="max_pages must be at least 1, not 0"):
        kv.PlanBuffers(batch, max_pages=0)


def test_memory_that_held_something_else_has_no_pages_until_they_are_written():
    _, batch, _ = setup()
    size = kv.PlanBuffers(batch, max_pages=9).num_bytes
    buffers = kv.PlanBuffers(batch, max_pages=9, memory=np.full(size, 7, np.uint8))
    assert not buffers.arrays["page_indptr"].any() and not buffers.arrays["page_indices"].any()


def test_memory_is_the_callers_own():
    pool = kv.BlockPool(8, 4)
    batch = batch_of(pool, 2, 8)
    size = kv.PlanBuffers(batch).num_bytes
    memory = np.zeros(size + 8, np.uint8)
    buffers = kv.PlanBuffers(batch, memory=memory)
    assert buffers.batch is batch
    batch.add(pool.sequence([5]))
    plan = batch.plan(out=buffers)
    field = buffers.fields["token_ids"]
    assert memory[field.offset : field.offset + 4].view(np.int32).tolist() == [5]
    token_ids = plan.token_ids
    del buffers, memory
    plan.commit()
    del plan
    assert token_ids.tolist() == [5]


@pytest.mark.parametrize(
    ("memory", "error", "message"),
    [
        (np.zeros(9, np.uint8), ValueError, "memory must have at least"),
        (np.zeros(9999), TypeError, "memory must be a flat array of uint8"),
        (b"x" * 9999, TypeError, "memory must be a flat array of uint8"),
        (np.zeros(9999, np.uint8)[1:], ValueError, "memory must begin at an address that 8 divides"),
        (np.frombuffer(bytes(9999), np.uint8)[:], ValueError, "contiguous, aligned and writable|address"),
    ],
)
def test_memory_that_is_not_fit_is_refused(memory, error, message):
    batch = batch_of(kv.BlockPool(8, 4), 2, 8)
    with pytest.raises(error, match=message):
        kv.PlanBuffers(batch, memory=memory)


def test_bad_arguments_of_buffers():
    batch = batch_of(kv.BlockPool(8, 4), 2, 8)
    with pytest.raises(TypeError, match="batch must be a Batch, not int"):
        kv.PlanBuffers(3)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        kv.PlanBuffers(batch, 0)
    with pytest.raises(ValueError, match="pad_slot must be at least -1, not -2"):
        kv.PlanBuffers(batch, pad_slot=-2)
    assert repr(kv.PlanBuffers(batch)).startswith("PlanBuffers(2 rows of 2 blocks, 2 tokens, ")
