"""Who has a block, and until when: faults of systems of this kind, each as the rule that it broke."""

import itertools

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import batch_of, compute, counts, unchanged


def test_a_block_that_a_later_step_names_is_not_handed_out():
    """Run-ahead: the next step is in flight when a request ends (vllm#45357)."""
    pool = kv.BlockPool(2, 4)
    batch, seq = batch_of(pool), pool.sequence([1, 2])
    batch.add(seq)
    first = batch.plan()
    seq.extend(1)
    second = batch.plan()
    first.commit()
    seq.free()
    assert counts(pool) == (1, 0, 0, 1)
    with pytest.raises(kv.OutOfBlocks) as refused:
        pool.allocate(2)
    assert (refused.value.free, refused.value.quarantined) == (1, 1)
    held = pool.allocate(1)
    second.commit()
    assert counts(pool) == (1, 0, 1, 0)
    pool.release(np.concatenate([held, pool.allocate(1)]))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_window_and_its_forks_give_each_block_back_once(order):
    """A block counts once a table, wherever windows and forks share it (vllm#1556)."""
    pool = kv.BlockPool(16, 4)
    parent = pool.table()
    parent.append(14)
    parent.discard_before(6)
    tables = [parent, parent.fork(), parent.fork()]
    for table in tables[1:]:
        for _ in range(10):
            table.append(1)
            table.discard_before(table.num_tokens - 8)
        named = [block for block in table.block_ids.tolist() if block]
        assert len(named) == len(set(named))
    for index in order:
        tables[index].release()
        tables[index].release()
        pool.audit()
    assert counts(pool) == (16, 0, 0, 0)


@pytest.mark.parametrize("block_size", [1, 4, 64])
@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("end", ["finish", "abort", "preempt", "stop", "drop"])
@pytest.mark.filterwarnings("ignore:a plan was dropped:ResourceWarning")
def test_every_way_to_end_gives_everything_back_once(end, run_ahead, block_size):
    """One release, whatever was reserved and in flight (sglang#12224)."""
    pool = kv.BlockPool(32, block_size)
    batch, seq = batch_of(pool), pool.sequence(range(6))
    row = batch.add(seq)
    batch.plan().commit()
    seq.extend([7])
    plans = [batch.plan()]
    if run_ahead:
        seq.extend(1)
        plans.append(batch.plan())
    if end in ("finish", "abort"):
        seq.free()
        seq.free()
    elif end == "preempt":
        assert batch.preempt(row) is seq and len(seq.block_ids) == 0
    elif end == "stop":
        batch.remove(row)
    if end == "drop":
        plans.clear()
        assert seq.num_computed == 6
    for plan in plans:
        plan.rollback() if end == "abort" else plan.commit()
    if end == "stop":
        seq.truncate(6)
        assert len(seq.block_ids) == -(-6 // block_size)
    seq.free()
    seq.free()
    pool.audit()
    assert pool.num_referenced == pool.num_quarantined == 0
    with pytest.raises(kv.StaleHandle):
        seq.fork()


def test_a_double_free_names_the_block_and_frees_nothing():
    """In one call, across calls, mixed with the null block, through a table (vllm#42571)."""
    pool = kv.BlockPool(4, 4)
    block, other = pool.allocate(2).tolist()
    bad = [[block, block], [block, 0, block], [other, block, block]]
    for ids in bad:
        with unchanged(pool), pytest.raises(kv.InvalidBlock, match=f"block {block}:"):
            pool.release(ids)
    pool.release([0, block, 0])
    for ids in [[block], [other, block]]:
        with unchanged(pool), pytest.raises(kv.InvalidBlock, match=f"block {block}:"):
            pool.release(ids)
    table = pool.table([other])
    with unchanged(pool, table), pytest.raises(kv.InvalidBlock, match=f"block {other}:"):
        pool.release([other])
    with unchanged(pool, table), pytest.raises(kv.InvalidBlock):
        pool.table([other])
    table.release()
    table.release()
    with unchanged(pool), pytest.raises(kv.InvalidBlock):
        pool.release([other])
    assert sorted(pool.allocate(4).tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1])
def test_sizes_near_the_ends_of_integers_are_refused_whole(n):
    """No sum, product or cast wraps around on the way to a count of blocks."""
    pool = kv.BlockPool(4, 3)
    table, seq = pool.table(), pool.sequence(range(4))
    table.append(2)
    batch = batch_of(pool, 2, 2**31 - 1)
    batch.add(seq)
    with unchanged(pool, table, seq, batch):
        for call in [
            lambda: pool.allocate(n),
            lambda: table.append(n),
            lambda: table.truncate(n),
            lambda: table.fork(n),
            lambda: table.discard_before(n),
            lambda: table.locate(n),
            lambda: table.slots(0, n),
            lambda: seq.truncate(n),
            lambda: seq.discard_before(n),
            lambda: pool.release([n]),
            lambda: pool.share([n]),
            lambda: pool.ref_count(n),
            lambda: batch.remove(n),
            lambda: kv.BlockPool(n, n),
        ]:
            with pytest.raises((kv.KVFolioError, ValueError, IndexError, MemoryError)):
                call()
        assert batch.shortfall(n) == batch.shortfall(num_tokens=n) == 0
    with unchanged(pool, table, batch):  # may or may not be that many
        try:
            seq.extend(n)
        except (ValueError, MemoryError):
            pass
        else:
            seq.truncate(4)


@pytest.mark.parametrize("most", [8_191, 8_192, 9_416])
def test_a_sequence_may_be_as_long_as_it_was_said_and_no_longer(most):
    """Up to the last token, with what runs ahead of it (vllm#8068)."""
    pool, ahead = kv.BlockPool(1024, 16), 5
    batch, seq = batch_of(pool, 1, most), pool.sequence(range(most - ahead))
    compute(batch, seq)
    seq.extend(ahead)
    with unchanged(pool, seq, batch):
        for extend in (lambda: seq.extend(1), lambda: batch.extend([0], [1])):
            with pytest.raises(ValueError, match=f"num_tokens must be at most {most} in this batch"):
                extend()
    plan = batch.plan()
    assert plan.block_table.shape == (1, -(-most // 16)) and plan.seq_lens.tolist() == [most]
    plan.commit([ahead])
    assert seq.num_computed == most


def test_a_reused_row_keeps_nothing_of_its_predecessor():
    """Every cell behind a row's own blocks is the null block, also in memory used again (vllm#42494)."""
    pool = kv.BlockPool(64, 4)
    batch, seqs = batch_of(pool, 4), {}

    def check():
        plan = batch.plan()
        told = {row: plan.block_table[index].tolist() for index, row in enumerate(plan.rows.tolist())}
        pages = np.split(plan.page_indices, plan.page_indptr[1:-1])
        for index, (row, cells) in enumerate(told.items()):
            own = seqs[row].block_ids.tolist()
            assert cells == own + [0] * (len(cells) - len(own))
            assert pages[index].tolist() == own
        plan.commit()

    for length in (28, 24, 4, 12):
        seq = pool.sequence([length] * length)
        seqs[batch.add(seq)] = seq
    check()
    for _ in range(12):  # arrays are used again meanwhile
        seqs.pop(0).free()
        seqs[0] = pool.sequence([5] * 8)
        assert batch.add(seqs[0]) == 0
        batch.reorder([3], [1])
        for row in range(1, 4):
            seqs[row].truncate(min(seqs[row].num_tokens, 12))
            seqs[row].extend([row])
        check()
    pool.audit()


def test_padding_a_step_writes_into_no_block_of_anybody():
    """Graphs pad their tokens: the null block's slots are there to be written (vllm#43810)."""
    pool = kv.BlockPool(4, 4)
    held = pool.allocate(3)
    seq = pool.sequence(range(3))
    batch = batch_of(pool)
    batch.add(seq)
    plan = batch.plan()
    assert pool.num_free == 0
    slots = np.zeros(8, np.int64)  # slot 0 is the null block's
    slots[:3] = plan.slot_mapping
    k = np.ones((8, 1, 8), np.float32)
    fancy = np.full((pool.num_physical_blocks * 4, 1, 8), 9, np.float32)
    fancy[slots] = k
    written = np.flatnonzero((fancy == 1).all((1, 2)))
    assert sorted(written) == [0, *plan.slot_mapping]

    class Padded:
        slot_mapping, copies, num_tokens, is_rolled_back = slots, plan.copies, 8, False

    for sentinel, extra in [(0, [0]), (-1, [])]:
        slots[3:] = sentinel
        cache = kv.KVCache(pool, 1, 1, 8)
        cache.write(0, k, k, Padded)
        for stored in (cache.keys[0], cache.values[0]):
            written = np.flatnonzero(stored.reshape(-1, 8).all(1))
            assert written.tolist() == sorted([*extra, *plan.slot_mapping])
    plan.commit()
    pool.release(held)


@pytest.mark.parametrize("length", [1, 4, 5])
def test_memory_that_was_never_written_is_never_read(length):
    """NaN in every slot that a step does not own changes nothing (flash-attention#1745)."""
    pool = kv.BlockPool(8, 4)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((length, heads, 16), np.float32) for heads in (4, 2, 2))
    outs = []
    for filling in (0, np.nan):
        cache = kv.KVCache(pool, 1, 2, 16)
        cache.keys[0][:], cache.values[0][:] = filling, filling
        batch, seq = batch_of(pool), pool.sequence(range(length), read_cache=False, write_cache=False)
        batch.add(seq)
        with batch.plan() as plan:
            cache.write(0, k, v, plan)
            outs.append(cache.attend(0, q, plan))
        seq.free()
    assert np.isfinite(outs[0]).all()
    np.testing.assert_array_equal(*outs)


def test_a_handle_of_before_reaches_nobody_who_came_after():
    """Late results, late frees and reused rows (vllm#10583)."""
    pool = kv.BlockPool(16, 4)
    batch, old = batch_of(pool, 1), pool.sequence(range(6))
    batch.add(old)
    plan = batch.plan()
    old.free()
    new = pool.sequence([9] * 6)
    assert batch.add(new) == 0
    step = batch.plan()
    with unchanged(pool, new, batch):
        assert plan.extend([5]).tolist() == [False]
        old.free()
        for use in (lambda: old.extend([1]), lambda: batch.add(old), old.fork):
            with pytest.raises(kv.StaleHandle):
                use()
    plan.commit()
    assert (new.num_computed, pool.match(range(6))) == (0, 0)
    step.commit()
    assert new.num_computed == 6
    pool.audit()
