import gc

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import batch_of, compute, counts, publish, unchanged


@pytest.fixture
def pool():
    return kv.BlockPool(16, 4)


@pytest.fixture
def batch(pool):
    return batch_of(pool, 4, 24)


def admit(pool, batch, *lengths):
    """One sequence of each length, with tokens of its own; none of them is found in the cache."""
    seqs = [pool.sequence(range(1000 * i, 1000 * i + n)) for i, n in enumerate(lengths, 1)]
    for seq in seqs:
        batch.add(seq)
    return seqs


def test_the_lowest_free_row_is_taken(pool, batch):
    admit(pool, batch, 1, 1, 1)
    batch.remove(1)
    batch.remove(0)
    assert [batch.add(pool.sequence([1])) for _ in range(3)] == [0, 1, 3]


def test_a_high_limit_costs_nothing(pool):
    batch = batch_of(pool, 2**31 - 1, 2**31 - 1)
    assert [batch.add(pool.sequence([1])) for _ in range(3)] == [0, 1, 2]
    batch.remove(1)
    assert batch.add(pool.sequence([1])) == 1
    with pytest.raises(ValueError, match=r"row .* 3, which is empty"):
        batch.remove(3)


def test_rows_are_listed_in_admission_order(pool, batch):
    admit(pool, batch, 1, 1, 1)
    batch.remove(0)
    batch.add(pool.sequence([1]))
    assert batch.rows == [1, 2, 0]


def test_a_full_batch_refuses(pool, batch):
    admit(pool, batch, 1, 1, 1, 1)
    seq = pool.sequence(range(5))
    with unchanged(pool, batch, seq), pytest.raises(kv.BatchFull, match="4 rows"):
        batch.add(seq)


def test_a_sequence_is_in_one_row_at_a_time(pool, batch):
    (seq,) = admit(pool, batch, 5)
    for other in (batch, batch_of(pool)):
        with unchanged(pool, batch, seq), pytest.raises(ValueError, match="seq"):
            other.add(seq)


def test_remove_returns_the_very_object_with_its_blocks(pool, batch):
    (seq,) = admit(pool, batch, 5)
    batch.plan().commit()
    assert batch.remove(0) is seq
    assert seq.num_computed == 5 and pool.num_referenced == 2


def test_preempt_returns_the_very_object_without_blocks(pool, batch):
    seqs = admit(pool, batch, 5, 6)
    batch.plan().commit()
    assert batch.preempt(1) is seqs[1] and batch.preempt(0) is seqs[0]
    assert (seqs[0].num_computed, seqs[0].num_tokens, pool.num_referenced) == (0, 5, 0)
    assert pool.num_idle == 2


def test_the_object_of_an_earlier_owner_of_the_row_is_not_returned(pool, batch):
    (first,) = admit(pool, batch, 5)
    first.free()
    second = pool.sequence([1])
    batch.add(second)
    assert batch.remove(0) is second


def test_an_object_may_be_admitted_again(pool, batch):
    (seq,) = admit(pool, batch, 5)
    batch.preempt(0)
    assert batch.add(seq) == 0
    assert batch.remove(0) is seq


@pytest.mark.parametrize("verb", ["remove", "preempt"])
def test_only_rows_that_are_taken_can_be_left(pool, batch, verb):
    admit(pool, batch, 1)
    for row in (1, 3):
        with unchanged(pool, batch), pytest.raises(ValueError, match=rf"row .*{row}, which is empty"):
            getattr(batch, verb)(row)
    for row in (4, 2**31):
        with unchanged(pool, batch), pytest.raises(ValueError, match=rf"row .* 3, not {row}"):
            getattr(batch, verb)(row)


def test_each_row_is_extended_by_its_token(pool, batch):
    seqs = admit(pool, batch, 1, 1, 1)
    batch.extend([2, 0], [7, 8])
    assert [seq.token_ids.tolist() for seq in seqs] == [[1000, 8], [2000], [3000, 7]]


def test_unknown_tokens_go_to_the_rows_that_were_named(pool, batch):
    seqs = admit(pool, batch, 1, 1)
    batch.extend_unknown([1])
    assert [seq.token_ids.tolist() for seq in seqs] == [[1000], [2000, -1]]


@pytest.mark.parametrize("rows", [[0, 0], [0, 3], [0, 4], [0, -1]])
def test_extend_is_all_or_nothing(pool, batch, rows):
    seqs = admit(pool, batch, 1, 1)
    for call in (lambda: batch.extend(rows, [1, 2]), lambda: batch.extend_unknown(rows)):
        with unchanged(pool, batch, *seqs), pytest.raises(ValueError, match="row"):
            call()


def test_extend_takes_one_token_a_row(pool, batch):
    seqs = admit(pool, batch, 1, 1)
    with unchanged(pool, batch, *seqs), pytest.raises(ValueError, match=r"token_ids .* 2 in all, not 1"):
        batch.extend([0, 1], [1])


def test_no_row_outgrows_the_limit(pool, batch):
    seqs = admit(pool, batch, 24, 23)
    for call in (
        lambda: batch.extend([1, 0], [1, 2]),
        lambda: batch.extend_unknown([1, 0]),
        lambda: seqs[0].extend([1]),
        lambda: seqs[1].extend(2),
    ):
        with unchanged(pool, batch, *seqs), pytest.raises(ValueError, match="at most 24"):
            call()
    with pytest.raises(ValueError, match="at most 24"):
        batch.add(pool.sequence(range(25)))
    batch.extend([1], [1])


def test_a_row_may_be_filled_to_the_last_token(pool, batch):
    (seq,) = admit(pool, batch, 24)
    plan = batch.plan()
    plan.commit()
    assert plan.block_table.shape == (1, 6) and seq.num_computed == 24
    with unchanged(pool, batch, seq), pytest.raises(ValueError, match="num_tokens must be at most 24"):
        plan.extend([1])


def test_reorder_goes_on_as_forks_of_the_parents(pool, batch):
    seqs = admit(pool, batch, 5, 6)
    batch.plan().commit()
    batch.reorder([1, 0])
    assert [seq.num_tokens for seq in seqs] == [6, 5]
    assert [seq.token_ids[0] for seq in seqs] == [2000, 1000]
    batch.reorder([1, 1])
    assert seqs[0].token_ids.tolist() == seqs[1].token_ids.tolist()
    assert seqs[0].block_ids.tolist() == seqs[1].block_ids.tolist()
    assert pool.num_referenced == 2


def test_reorder_of_chosen_rows_leaves_the_others(pool, batch):
    seqs = admit(pool, batch, 1, 2, 3)
    batch.reorder([0], [2])
    assert [seq.num_tokens for seq in seqs] == [1, 2, 1]


@pytest.mark.parametrize(
    ("parents", "rows"), [([0], [0, 1]), ([0, 1], [0]), ([0, 0], [1, 1]), ([3], [0]), ([0], [3])]
)
def test_reorder_refuses_what_does_not_fit_together(pool, batch, parents, rows):
    seqs = admit(pool, batch, 1, 2)
    with unchanged(pool, batch, *seqs), pytest.raises(ValueError, match="row"):
        batch.reorder(parents, rows)


def test_nothing_in_flight_is_reordered(pool, batch):
    seqs = admit(pool, batch, 1, 2, 3)
    plan = batch.plan(rows=[0])
    for parents, rows in [([0], [1]), ([1], [0])]:
        with unchanged(pool, batch, *seqs), pytest.raises(kv.PlanInFlight):
            batch.reorder(parents, rows)
    batch.reorder([1], [2])
    plan.rollback()


def test_a_shortfall_is_what_a_plan_lacks(pool, batch):
    admit(pool, batch, 20, 20)
    pool.allocate(9)
    assert (batch.shortfall(), batch.shortfall(28), batch.shortfall(29)) == (3, 0, 1)
    assert (
        batch.shortfall(rows=[0]),
        batch.shortfall(num_tokens=16),
        batch.shortfall(num_tokens=[12, 17]),
    ) == (0, 1, 1)
    with pytest.raises(kv.OutOfBlocks) as refusal:
        batch.plan()
    assert (refusal.value.needed, refusal.value.free, refusal.value.ever_fits) == (10, 7, True)


def test_a_shortfall_changes_nothing(pool, batch):
    publish(pool, range(1000, 1008))
    seqs = admit(pool, batch, 20)
    with unchanged(pool, batch, *seqs):
        assert batch.shortfall() == 0


def test_preempting_the_youngest_makes_room(pool, batch):
    admit(pool, batch, 20, 20, 20, 20)
    while batch.shortfall():
        batch.preempt(batch.rows[-1])
    assert batch.rows == [0, 1, 2]
    batch.plan().commit()


def test_a_preempted_row_gives_back_whole_blocks_less_what_others_hold():
    for num_tokens in range(1, 25):
        pool = kv.BlockPool(16, 8)
        batch = batch_of(pool)
        seq = pool.sequence(range(num_tokens))
        row = compute(batch, seq)
        fork = seq.fork()
        batch.preempt(row)
        assert pool.num_referenced == -(-num_tokens // 8)
        fork.free()
        assert counts(pool) == (16 - num_tokens // 8, num_tokens // 8, 0, 0)


def test_a_freed_sequence_leaves_its_row(pool, batch):
    first, second = admit(pool, batch, 5, 5)
    first.free()
    assert batch.rows == [1]
    second.free()
    assert batch.rows == []


def test_an_empty_sequence_waits_in_its_row(pool, batch):
    seq = pool.sequence([])
    batch.add(seq)
    with batch.plan() as plan:
        assert plan.rows.shape == (0,)
    batch.extend([0], [1])
    with batch.plan() as plan:
        assert plan.token_ids.tolist() == [1]


def test_a_removed_sequence_in_flight_stays_out_of_other_batches(pool, batch):
    (seq,) = admit(pool, batch, 5)
    other, plan = batch_of(pool), batch.plan()
    batch.remove(0)
    with unchanged(pool, batch, seq), pytest.raises(kv.PlanInFlight):
        other.add(seq)
    plan.commit()
    assert other.add(seq) == 0 and seq.num_computed == 5


def test_a_preempted_sequence_in_flight_may_come_back_at_once(pool, batch):
    (seq,) = admit(pool, batch, 5)
    plan = batch.plan()
    batch.preempt(0)
    batch.add(seq)
    plan.commit()
    assert seq.num_computed == 0 and pool.num_referenced == 0


def test_a_dropped_batch_gives_everything_back(pool, batch):
    admit(pool, batch, 5, 6)
    batch.plan().commit()
    del batch
    gc.collect()


def test_a_batch_has_limits_that_can_be_read(pool, batch):
    assert (batch.max_sequences, batch.max_tokens_per_sequence) == (4, 24)


def test_a_batchs_repr_tells_its_rows_and_plans(pool, batch):
    admit(pool, batch, 5)
    plan = batch.plan()
    assert repr(batch) == "Batch(1 of 4 rows, max_tokens_per_sequence=24, 1 plans in flight)"
    plan.commit()


def test_rows_may_come_as_arrays(pool, batch):
    seqs = admit(pool, batch, 1, 1, 1)
    batch.extend(np.array([2, 0, 1], np.int32)[::2], np.array([7, 8], np.uint8))
    assert [seq.num_tokens for seq in seqs] == [1, 2, 2]
    with batch.plan(rows=np.array([2, 0]), num_tokens=np.array([2, 1])) as plan:
        assert plan.rows.tolist() == [2, 0]
