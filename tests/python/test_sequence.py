import gc

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import batch_of, compute, counts, publish, unchanged


@pytest.fixture
def pool():
    return kv.BlockPool(16, 4)


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], np.int32),
        np.array([3, 1, 2], np.uint8),
        np.array([3, 1, 2], ">i8"),
        np.array([3, 9, 1, 9, 2])[::2],
        np.array([2, 1, 3], np.int32)[::-1],
        np.array([(0, 3), (0, 1), (0, 2)], [("a", "i1"), ("b", "<i4")])["b"],
        np.array([(0, 3), (0, 1), (0, 2)], [("a", "i1"), ("b", "<i8")])["b"],
        np.frombuffer(b"\0" + np.array([3, 1, 2], "<i4").tobytes(), "<i4", offset=1),
        [np.int64(3), 1, np.uint16(2)],
    ],
    ids=str,
)
def test_tokens_are_read_from_any_layout(pool, tokens):
    assert pool.sequence(tokens).token_ids.tolist() == [3, 1, 2]


def test_tokens_may_come_as_a_range_or_not_at_all(pool):
    assert pool.sequence(range(3)).token_ids.tolist() == [0, 1, 2]
    assert pool.sequence([]).num_tokens == 0


def test_tokens_are_copied_in(pool):
    tokens = np.arange(3)
    seq = pool.sequence(tokens)
    tokens[0] = 7
    assert seq.token_ids.tolist() == [0, 1, 2]


def test_read_only_tokens_are_welcome(pool):
    tokens = np.arange(3)
    tokens.flags.writeable = False
    assert pool.sequence(tokens).num_tokens == 3


def test_a_sequence_holds_no_block_until_it_is_planned(pool):
    seq = pool.sequence(range(6))
    batch = batch_of(pool)
    batch.add(seq)
    assert counts(pool) == (16, 0, 0, 0)
    with batch.plan():
        assert seq.block_ids.shape == (2,)


def test_tokens_are_pending_until_the_commit(pool):
    batch, seq = batch_of(pool), pool.sequence(range(6))
    batch.add(seq)
    plan = batch.plan()
    assert (seq.num_computed, seq.num_pending) == (0, 6)
    plan.commit()
    assert (seq.num_computed, seq.num_pending) == (6, 0)


def test_unknown_tokens_read_as_minus_one(pool):
    seq = pool.sequence([5])
    seq.extend(2)
    seq.extend([6])
    assert seq.token_ids.tolist() == [5, -1, -1, 6]


def test_the_oldest_unknown_tokens_are_resolved_first(pool):
    seq = pool.sequence([5])
    seq.extend(2)
    seq.resolve([7])
    assert seq.token_ids.tolist() == [5, 7, -1]


def test_no_more_tokens_are_resolved_than_are_unknown(pool):
    seq = pool.sequence([5])
    seq.extend(1)
    with unchanged(pool, seq), pytest.raises(ValueError, match=r"token_ids must be at most 1, .* not 2"):
        seq.resolve([7, 8])


def test_unknown_tokens_are_forgotten_by_a_cut(pool):
    seq = pool.sequence([5])
    seq.extend(3)
    seq.truncate(2)
    seq.extend([6])
    seq.resolve([7])
    assert seq.token_ids.tolist() == [5, 7, 6]


def test_blocks_are_published_once_their_tokens_are_known(pool):
    batch, seq = batch_of(pool), pool.sequence([1, 2, 3])
    seq.extend(1)
    compute(batch, seq)
    assert pool.match([1, 2, 3, 4]) == 0
    seq.resolve([4])
    assert pool.match([1, 2, 3, 4]) == 4


def test_a_number_of_unknown_tokens_takes_no_extras(pool):
    seq = pool.sequence([1])
    with unchanged(pool, seq), pytest.raises(TypeError, match="extras"):
        seq.extend(1, extras=[(1, 2, b"x")])


def test_extras_lie_behind_what_is_there(pool):
    seq = pool.sequence([1, 2])
    with unchanged(pool, seq), pytest.raises(ValueError, match=r"extras .* 2 or later, not 1"):
        seq.extend([3], extras=[(1, 3, b"x")])


def test_a_fork_has_the_past_and_its_own_future(pool):
    batch, seq = batch_of(pool), pool.sequence(range(6))
    compute(batch, seq)
    fork = seq.fork()
    seq.extend([7])
    fork.extend([8])
    assert seq.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert fork.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert fork.num_computed == 6
    with batch.plan(rows=[batch.add(fork)]) as plan:
        assert len(plan.copies) == 1
    assert seq.block_ids[0] == fork.block_ids[0] and seq.block_ids[1] != fork.block_ids[1]


def test_a_fork_outlives_its_parent(pool):
    batch, seq = batch_of(pool), pool.sequence(range(6))
    compute(batch, seq)
    fork = seq.fork()
    seq.free()
    assert counts(pool)[2] == 2
    fork.free()
    assert counts(pool) == (15, 1, 0, 0)


def test_forks_inherit_what_was_cached_and_cuts_cap_it(pool):
    publish(pool, range(8))
    batch, seq = batch_of(pool), pool.sequence(range(9))
    compute(batch, seq)
    fork = seq.fork()
    assert (seq.num_cached, fork.num_cached) == (8, 8)
    fork.truncate(3)
    assert (seq.num_cached, fork.num_cached) == (8, 3)


def test_nothing_is_cached_after_a_preemption(pool):
    publish(pool, range(8))
    batch, seq = batch_of(pool), pool.sequence(range(9))
    batch.preempt(compute(batch, seq))
    assert (seq.num_cached, seq.num_computed, seq.num_pending) == (0, 0, 9)


def test_truncating_takes_tokens_and_what_was_computed(pool):
    batch, seq = batch_of(pool), pool.sequence(range(10))
    compute(batch, seq)
    seq.extend([10, 11])
    seq.truncate(11)
    assert (seq.num_tokens, seq.num_computed) == (11, 10)
    seq.truncate(5)
    assert (seq.num_tokens, seq.num_computed, len(seq.block_ids)) == (5, 5, 2)


def test_a_cut_block_stays_findable_until_it_is_written(pool):
    batch, seq = batch_of(pool), pool.sequence(range(8))
    row = compute(batch, seq)
    seq.truncate(6)
    assert pool.match(range(8)) == 8
    seq.extend([9])
    batch.plan(rows=[row]).commit()
    assert pool.match(range(8)) == 4


def test_what_is_computed_may_be_discarded(pool):
    batch, seq = batch_of(pool), pool.sequence(range(10))
    compute(batch, seq)
    seq.discard_before(8)
    assert seq.block_ids.tolist()[:2] == [0, 0]
    with unchanged(pool, seq), pytest.raises(ValueError, match=r"position .* 10, not 11"):
        seq.discard_before(11)
    with unchanged(pool, seq), pytest.raises(ValueError, match="num_tokens"):
        seq.truncate(7)


def test_what_is_pending_cannot_be_discarded(pool):
    seq = pool.sequence(range(10))
    with unchanged(pool, seq), pytest.raises(ValueError, match="position"):
        seq.discard_before(4)


def test_free_may_be_said_twice_and_leaves_the_batch(pool):
    batch, seq = batch_of(pool), pool.sequence(range(10))
    compute(batch, seq)
    seq.free()
    assert batch.rows == [] and pool.num_referenced == 0
    with unchanged(pool, batch):
        seq.free()


@pytest.mark.parametrize(
    "use",
    [
        lambda seq, _: seq.token_ids,
        lambda seq, _: seq.num_tokens,
        lambda seq, _: seq.num_computed,
        lambda seq, _: seq.num_pending,
        lambda seq, _: seq.num_cached,
        lambda seq, _: seq.block_ids,
        lambda seq, _: seq.extend("what is stale is told before what is wrong"),
        lambda seq, _: seq.extend(1),
        lambda seq, _: seq.resolve([]),
        lambda seq, _: seq.fork(),
        lambda seq, _: seq.truncate("wrong"),
        lambda seq, _: seq.discard_before("wrong"),
        lambda seq, pool: pool.blocks_needed(seq),
        lambda seq, pool: batch_of(pool).add(seq),
    ],
)
@pytest.mark.parametrize("running", [False, True])
def test_a_freed_sequence_is_stale(pool, use, running):
    seq = pool.sequence(range(10))
    if running:
        compute(batch_of(pool), seq)
    seq.free()
    with unchanged(pool), pytest.raises(kv.StaleHandle, match="freed"):
        use(seq, pool)


def test_a_collected_sequence_gives_its_blocks_back(pool):
    batch, seq = batch_of(pool), pool.sequence(range(10))
    batch.remove(compute(batch, seq))
    assert counts(pool)[2] == 3
    del seq
    gc.collect()
    assert counts(pool)[2] == 0


def test_a_batch_keeps_sequences_that_nobody_else_does(pool):
    batch = batch_of(pool)
    row = compute(batch, pool.sequence(range(10)))
    gc.collect()
    assert batch.remove(row).num_computed == 10


@pytest.mark.parametrize("change", [lambda seq: seq.fork(), lambda seq: seq.truncate(2)])
def test_a_sequence_in_flight_is_neither_forked_nor_cut(pool, change):
    batch, seq = batch_of(pool), pool.sequence(range(6))
    batch.add(seq)
    plan = batch.plan()
    with unchanged(pool, batch, seq), pytest.raises(kv.PlanInFlight):
        change(seq)
    plan.commit()
    change(seq)


def test_a_window_may_move_in_flight(pool):
    batch, seq = batch_of(pool), pool.sequence(range(8))
    compute(batch, seq)
    seq.extend([8])
    plan = batch.plan()
    seq.discard_before(8)
    assert pool.num_quarantined == 2
    plan.commit()
    assert counts(pool) == (13, 2, 1, 0)


def test_a_sequences_repr_tells_how_far_it_is(pool):
    seq = pool.sequence(range(6))
    compute(batch_of(pool), seq)
    assert repr(seq) == "Sequence(6 tokens, 6 computed, 0 cached, 2 blocks)"
    seq.free()
    assert "freed" in repr(seq)
