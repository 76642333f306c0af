import re

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import batch_of, compute, counts, publish, unchanged


@pytest.mark.parametrize(
    ("num_tokens", "layout"), [(0, (0, 0)), (1, (1, 3)), (4, (1, 0)), (5, (2, 3)), (2**63 - 1, (2**61, 1))]
)
def test_a_layout_rounds_up_to_blocks(num_tokens, layout):
    assert kv.block_layout(num_tokens, 4) == layout


def test_a_new_pool_is_blank():
    pool = kv.BlockPool(5, 4)
    assert counts(pool) == (5, 0, 0, 0)
    assert (pool.num_blocks, pool.block_size, pool.num_physical_blocks) == (5, 4, 6)


def test_a_pool_tells_by_which_policy_blocks_give_way():
    assert kv.BlockPool(5, 4).eviction == kv.EVICTION_POLICIES[0] == "lru"
    for policy in kv.EVICTION_POLICIES:
        assert kv.BlockPool(5, 4, eviction=policy).eviction == policy


@pytest.mark.parametrize("policy", ["", "LRU", "lru ", "best"])
def test_an_unknown_policy_is_refused_by_name(policy):
    allowed = ", ".join(f'"{name}"' for name in kv.EVICTION_POLICIES)
    told = re.escape(f'eviction must be one of {allowed}, not "{policy}"')
    with pytest.raises(ValueError, match=f"^{told}$"):
        kv.BlockPool(5, 4, eviction=policy)


@pytest.mark.parametrize("policy", [1, True, b"lru", ["lru"]])
def test_a_policy_is_named_by_text(policy):
    with pytest.raises(TypeError) as refusal:
        kv.BlockPool(5, 4, eviction=policy)
    message = " ".join([str(refusal.value), *getattr(refusal.value, "__notes__", [])])
    assert all(part in message for part in ("eviction", type(policy).__name__, "str")), message


def test_the_null_block_is_block_0_and_never_handed_out():
    pool = kv.BlockPool(5, 4)
    assert pool.null_block == 0
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.ref_count(0) == 0


def test_allocate_is_all_or_nothing():
    pool = kv.BlockPool(3, 4)
    with unchanged(pool), pytest.raises(kv.OutOfBlocks):
        pool.allocate(4)


def test_a_refusal_tells_what_was_needed_and_what_was_there():
    pool = kv.BlockPool(3, 4)
    pool.allocate(2)
    with pytest.raises(kv.OutOfBlocks) as refusal:
        pool.allocate(2)
    error = refusal.value
    assert (error.needed, error.free, error.quarantined, error.ever_fits) == (2, 1, 0, True)
    with pytest.raises(kv.OutOfBlocks, match="never"):
        pool.allocate(4)


def test_no_blocks_can_be_had_from_a_full_pool():
    pool = kv.BlockPool(1, 4)
    pool.allocate(1)
    assert pool.allocate(0).shape == (0,)


def test_ids_are_the_callers_own_int32_array():
    ids = kv.BlockPool(3, 4).allocate(2)
    assert ids.dtype == np.int32
    ids[:] = 0  # his to do with as he likes


def test_a_block_comes_free_with_its_last_reference():
    pool = kv.BlockPool(2, 4)
    ids = pool.allocate(1)
    pool.share(ids)
    pool.release(ids)
    assert counts(pool) == (1, 0, 1, 0)
    pool.release(ids)
    assert counts(pool) == (2, 0, 0, 0)


def test_share_counts_each_mention():
    pool = kv.BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.share([block, block])
    assert pool.ref_count(block) == 3


def test_release_counts_each_mention():
    pool = kv.BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block, block])
    assert pool.ref_count(block) == 0


def test_more_mentions_than_references_release_nothing():
    pool = kv.BlockPool(2, 4)
    (block,) = pool.allocate(1)
    told = f"more often than it is lent; block {block}: of its 1 references, 1 are lent"
    with unchanged(pool), pytest.raises(kv.InvalidBlock, match=told):
        pool.release([block, block])
    pool.release([block])
    with (
        unchanged(pool),
        pytest.raises(kv.InvalidBlock, match=f"have a reference; block {block}: it has none"),
    ):
        pool.share([block])


def test_null_ids_are_passed_over():
    pool = kv.BlockPool(2, 4)
    ids = pool.allocate(1)
    pool.share([0, *ids, 0])
    pool.release([0, *ids, *ids, 0])
    assert pool.num_referenced == 0


@pytest.mark.parametrize("verb", ["share", "release"])
def test_one_bad_id_spoils_the_whole_list(verb):
    pool = kv.BlockPool(4, 4)
    ids = pool.allocate(2)
    free = ({1, 2, 3, 4} - set(ids.tolist())).pop()
    for bad in (free, 5, -1, 2**31, 2**63 - 1):
        with unchanged(pool), pytest.raises(kv.InvalidBlock, match=str(bad)):
            getattr(pool, verb)([*ids.tolist(), bad])


def test_a_free_block_cannot_be_released():
    pool = kv.BlockPool(2, 4)
    ids = pool.allocate(1)
    pool.release(ids)
    with unchanged(pool), pytest.raises(kv.InvalidBlock):
        pool.release(ids)


def test_an_idle_block_cannot_be_shared():
    pool = kv.BlockPool(1, 4)
    publish(pool, [1, 2, 3, 4])
    with unchanged(pool), pytest.raises(kv.InvalidBlock):
        pool.share([1])


def test_references_of_tables_are_out_of_reach():
    pool = kv.BlockPool(2, 4)
    table = pool.table()
    table.append(4)
    with unchanged(pool, table), pytest.raises(kv.InvalidBlock):
        pool.release(table.block_ids)


def test_a_block_may_be_shared_out_of_a_table_and_outlive_it():
    pool = kv.BlockPool(2, 4)
    table = pool.table()
    table.append(4)
    ids = table.block_ids
    pool.share(ids)
    table.release()
    assert counts(pool) == (1, 0, 1, 0)
    pool.release(ids)
    pool.audit()
    assert pool.num_referenced == 0


@pytest.mark.parametrize("block", [-1, 4, 2**31, 2**70])
def test_ref_count_knows_which_ids_there_are(block):
    with pytest.raises(kv.InvalidBlock, match=rf"block_id .* 3, not {block}"):
        kv.BlockPool(3, 4).ref_count(block)


def test_references_beyond_what_can_be_counted_are_refused():
    pool = kv.BlockPool(2, 4)
    first, second = pool.allocate(2)
    pool.share(np.broadcast_to(first, 2**20 - 2))
    for ids in ([first], [second, first]):
        with unchanged(pool), pytest.raises(kv.RefCountOverflow, match=f"block {first}"):
            pool.share(ids)


def test_stats_start_at_zero_and_count_what_happens():
    pool = kv.BlockPool(2, 4)
    assert set(pool.stats().values()) == {0}
    publish(pool, [1, 2, 3, 4, 5])
    batch, seq = batch_of(pool), pool.sequence([1, 2, 3, 4, 5])
    compute(batch, seq)
    fork = seq.fork()
    seq.free()
    batch.add(fork)
    with pytest.raises(kv.OutOfBlocks):
        pool.allocate(3)
    fork.free()
    pool.allocate(2)
    assert pool.stats() == {
        "allocations": 5,
        "evictions": 1,
        "hit_tokens": 4,
        "queried_tokens": 10,
        "copies": 0,
        "merges": 0,
        "refusals": 1,
        "refusals_quarantined": 0,
        "refusals_never_fit": 1,
    }


def test_the_largest_ids_are_told_without_a_large_pool():
    pool = kv.BlockPool(1, 2**32 - 1)
    table = pool.table()
    table.append(2**32 - 1)
    assert table.slots(2**32 - 2, 2**32 - 1).tolist() == [2 * (2**32 - 1) - 1]


def test_a_pools_repr_tells_its_state():
    pool = kv.BlockPool(5, 4)
    pool.allocate(2)
    assert re.fullmatch(r"BlockPool\(.*num_blocks=5.*block_size=4.*num_referenced=2.*\)", repr(pool))


def test_pools_do_not_know_each_others_sequences():
    pool, other = kv.BlockPool(2, 4), kv.BlockPool(2, 4)
    seq = other.sequence([1])
    with pytest.raises(ValueError, match="pool"):
        pool.blocks_needed(seq)
    with unchanged(pool), pytest.raises(ValueError, match="pool"):
        batch_of(pool).add(seq)
