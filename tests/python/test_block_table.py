import gc
import itertools

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import counts, unchanged


def table_of(pool, num_tokens):
    table = pool.table()
    assert table.append(num_tokens).shape == (0, 2)
    return table


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8])
def test_a_table_has_the_blocks_that_its_tokens_need(num_tokens):
    table = table_of(kv.BlockPool(4, 4), num_tokens)
    assert (table.num_blocks, table.num_empty_slots) == kv.block_layout(num_tokens, 4)
    assert table.num_tokens == num_tokens


def test_appending_fills_the_empty_slots_first():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 1)
    table.append(3)
    assert pool.num_referenced == 1
    table.append(1)
    assert pool.num_referenced == 2


def test_the_slot_of_a_position_follows_from_its_block():
    table = table_of(kv.BlockPool(4, 4), 10)
    ids = table.block_ids
    for position in range(10):
        block, offset = table.locate(position)
        assert (block, offset) == (ids[position // 4], position % 4)
        assert table.slots(position, position + 1).tolist() == [block * 4 + offset]


def test_slots_are_int64_and_may_be_none():
    table = table_of(kv.BlockPool(4, 4), 3)
    assert table.slots(3, 3).shape == (0,)
    assert table.slots(0, 3).dtype == np.int64


@pytest.mark.parametrize("position", [3, -1, 2**31, 2**63])
def test_positions_outside_are_index_errors(position):
    table = table_of(kv.BlockPool(4, 4), 3)
    with pytest.raises(IndexError, match=rf"position .*not {position}"):
        table.locate(position)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (2, 1), (-1, 2), (0, -1), (4, 4)])
def test_ranges_outside_are_index_errors(start, stop):
    table = table_of(kv.BlockPool(4, 4), 3)
    with pytest.raises(IndexError):
        table.slots(start, stop)


def test_append_is_all_or_nothing():
    pool = kv.BlockPool(3, 4)
    table = table_of(pool, 6)
    with unchanged(pool, table), pytest.raises(kv.OutOfBlocks) as refusal:
        table.append(7)
    assert (refusal.value.needed, refusal.value.free, refusal.value.ever_fits) == (2, 1, False)
    table.append(6)


def test_append_takes_over_the_empty_pool_only_when_it_fits_alone():
    pool = kv.BlockPool(3, 4)
    pool.allocate(2)
    with pytest.raises(kv.OutOfBlocks) as refusal:
        table_of(pool, 12)
    assert refusal.value.ever_fits


def test_a_table_takes_over_one_lent_reference_for_each_block():
    pool = kv.BlockPool(3, 4)
    ids = pool.allocate(2)
    table = pool.table(ids, 7)
    with pytest.raises(kv.InvalidBlock):
        pool.release(ids)
    table.release()
    assert counts(pool) == (3, 0, 0, 0)


def test_a_table_is_full_unless_told_otherwise():
    pool = kv.BlockPool(3, 4)
    assert pool.table(pool.allocate(2)).num_tokens == 8


@pytest.mark.parametrize("num_tokens", [0, 4, 9])
def test_a_table_refuses_tokens_that_do_not_fill_its_blocks(num_tokens):
    pool = kv.BlockPool(3, 4)
    ids = pool.allocate(2)
    with unchanged(pool), pytest.raises(ValueError, match="num_tokens"):
        pool.table(ids, num_tokens)


def test_a_table_refuses_blocks_that_were_not_lent():
    pool = kv.BlockPool(3, 4)
    ids = pool.allocate(1)
    for bad in ([*ids, *ids], [0, *ids], [3], [4]):
        with unchanged(pool), pytest.raises(kv.InvalidBlock):
            pool.table(bad)


def test_the_second_writer_of_a_shared_block_writes_in_place():
    pool = kv.BlockPool(4, 4)
    first = table_of(pool, 2)
    second = first.fork()
    assert second.append(1).tolist() == [[first.block_ids[0], second.block_ids[0]]]
    assert first.append(1).shape == (0, 2)
    assert first.block_ids[0] != second.block_ids[0]
    assert counts(pool) == (2, 0, 2, 0)


def test_no_copy_once_the_other_holder_is_gone():
    pool = kv.BlockPool(4, 4)
    first = table_of(pool, 2)
    second = first.fork()
    first.release()
    assert second.append(1).shape == (0, 2)


def test_a_lent_reference_makes_a_block_shared():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 2)
    before = table.block_ids
    pool.share(before)
    ((source, target),) = table.append(1).tolist()
    assert [source] == before.tolist() and [target] == table.block_ids.tolist()


def test_full_blocks_are_never_copied():
    pool = kv.BlockPool(4, 4)
    first = table_of(pool, 4)
    second = first.fork()
    assert second.append(1).shape == (0, 2)
    assert first.block_ids[0] == second.block_ids[0]


def test_appending_nothing_copies_nothing():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 2)
    fork = table.fork()
    with unchanged(pool, table, fork):
        assert fork.append(0).shape == (0, 2)


@pytest.mark.parametrize("position", range(11))
def test_a_fork_shares_the_blocks_that_it_needs(position):
    pool = kv.BlockPool(8, 4)
    table = table_of(pool, 10)
    fork = table.fork(position)
    assert fork.block_ids.tolist() == table.block_ids[: -(-position // 4)].tolist()
    if position % 4:
        ((source, _),) = fork.append(1).tolist()
        assert source == table.block_ids[position // 4]
    else:
        assert fork.append(1).shape == (0, 2)


def test_a_tree_of_forks_ends_in_any_order():
    for order in itertools.permutations(range(5)):
        pool = kv.BlockPool(24, 4)
        root = table_of(pool, 10)
        tables = [root, root.fork(6), root.fork()]
        tables += [tables[1].fork(3), tables[2].fork(9)]
        for table in tables:
            table.append(3)
        for index in order:
            tables[index].release()
            pool.audit()
        assert counts(pool) == (24, 0, 0, 0)


def test_truncate_gives_back_blocks_without_a_token():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    for num_tokens, blocks in [(9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)]:
        table.truncate(num_tokens)
        assert (table.num_tokens, pool.num_referenced) == (num_tokens, blocks)


def test_a_table_cannot_be_truncated_to_more_than_it_has():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 3)
    with unchanged(pool, table), pytest.raises(ValueError, match=r"num_tokens .* 3, not 4"):
        table.truncate(4)


def test_writing_behind_a_cut_into_a_shared_block_copies_it():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 8)
    fork = table.fork()
    table.truncate(6)
    assert table.append(1).tolist() == [[fork.block_ids[1], table.block_ids[1]]]


def test_discarded_blocks_leave_the_null_block():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    last = table.block_ids[2]
    table.discard_before(9)
    assert table.block_ids.tolist() == [0, 0, last]
    assert (table.num_tokens, table.num_blocks, pool.num_referenced) == (10, 3, 1)
    assert table.slots(4, 5).tolist() == [0]


def test_a_block_is_kept_while_one_of_its_positions_counts():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    with unchanged(pool, table):
        table.discard_before(3)
    table.discard_before(4)
    assert pool.num_referenced == 2


def test_discarding_less_than_before_changes_nothing():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    table.discard_before(8)
    with unchanged(pool, table):
        table.discard_before(0)
        table.discard_before(8)


@pytest.mark.parametrize("verb", ["truncate", "fork"])
def test_what_was_discarded_is_no_place_to_go_on_from(verb):
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    table.discard_before(8)
    with unchanged(pool, table), pytest.raises(ValueError, match="num_tokens"):
        getattr(table, verb)(7)
    getattr(table, verb)(8)


def test_a_fork_of_a_window_holds_its_window_only():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    table.discard_before(8)
    fork = table.fork()
    assert fork.block_ids.tolist() == table.block_ids.tolist()
    assert pool.ref_count(table.block_ids[2]) == 2
    table.release()
    fork.release()
    pool.audit()
    assert pool.num_referenced == 0


def test_release_may_be_said_twice():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    table.release()
    with unchanged(pool):
        table.release()


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table.num_tokens,
        lambda table: table.num_blocks,
        lambda table: table.num_empty_slots,
        lambda table: table.block_ids,
        lambda table: table.append("what is stale is told before what is wrong"),
        lambda table: table.locate(0),
        lambda table: table.slots(0, 0),
        lambda table: table.fork(),
        lambda table: table.truncate(0),
        lambda table: table.discard_before(0),
        lambda table: table.__enter__(),
    ],
)
def test_a_released_table_is_stale(use):
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    table.release()
    with unchanged(pool), pytest.raises(kv.StaleHandle, match="released"):
        use(table)


def test_with_releases():
    pool = kv.BlockPool(4, 4)
    with pytest.raises(ZeroDivisionError), table_of(pool, 10):
        _ = 1 / 0
    assert pool.num_referenced == 0


def test_a_collected_table_gives_its_blocks_back():
    pool = kv.BlockPool(4, 4)
    table = table_of(pool, 10)
    assert pool.num_referenced == 3
    del table
    gc.collect()
    assert counts(pool) == (4, 0, 0, 0)


def test_a_table_keeps_its_pool_alive():
    table = table_of(kv.BlockPool(4, 4), 3)
    gc.collect()
    table.append(5)
    assert table.num_blocks == 2


def test_a_tables_repr_tells_its_size():
    table = table_of(kv.BlockPool(4, 4), 5)
    assert repr(table) == "BlockTable(5 tokens in 2 blocks)"
    table.release()
    assert "released" in repr(table)
