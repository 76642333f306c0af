import kvfolio as kv
import pytest
from bookkeeping import batch_of, compute, counts, publish, unchanged


@pytest.fixture
def pool():
    return kv.BlockPool(8, 4)


def test_only_full_blocks_are_found(pool):
    publish(pool, range(7))
    assert pool.match(range(7)) == 4


def test_a_block_is_found_only_behind_its_own_past(pool):
    publish(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.match([5, 6, 7, 8]) == 0
    assert pool.match([1, 2, 3, 9, 5, 6, 7, 8]) == 0
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 9]) == 4


def test_tokens_are_compared_whole(pool):
    publish(pool, [1, 2, 3, 4])
    assert pool.match([1 + 2**8, 2, 3, 4]) == pool.match([1, 2, 3, 4 + 2**24]) == 0


def test_match_holds_nothing(pool):
    publish(pool, range(8))
    with unchanged(pool):
        assert pool.match(range(8)) == 8
    pool.allocate(8)
    assert pool.match(range(8)) == 0


def test_a_hit_leaves_a_token_to_compute(pool):
    publish(pool, range(8))
    for num_tokens, cached in [(7, 4), (8, 4), (9, 8)]:
        seq = pool.sequence(range(num_tokens))
        batch = batch_of(pool)
        batch.add(seq)
        assert (seq.num_cached, seq.num_computed) == (cached, cached)
        seq.free()


def test_what_is_not_committed_is_not_found(pool):
    batch, seq = batch_of(pool), pool.sequence(range(8))
    batch.add(seq)
    with batch.plan(num_tokens=4):
        assert pool.match(range(8)) == 0
    assert pool.match(range(8)) == 4
    with batch.plan():
        seq.free()
        assert pool.match(range(8)) == 4
    assert pool.match(range(8)) == 4


def test_a_row_looks_again_when_it_is_first_planned(pool):
    batch = batch_of(pool)
    first, second = pool.sequence(range(9)), pool.sequence(range(9))
    compute_row, later = batch.add(first), batch.add(second)
    batch.plan(rows=[compute_row]).commit()
    assert second.num_cached == 0
    with batch.plan(rows=[later]) as plan:
        assert plan.num_tokens == 1
    assert second.num_cached == 8
    assert first.block_ids[:2].tolist() == second.block_ids[:2].tolist()


def test_a_sequence_may_leave_the_cache_unread(pool):
    publish(pool, range(8))
    seq = pool.sequence(range(9), read_cache=False)
    batch_of(pool).add(seq)
    assert seq.num_cached == 0
    assert pool.stats()["queried_tokens"] == 8  # those of `publish`


def test_a_sequence_may_leave_the_cache_unwritten(pool):
    publish(pool, range(8), write_cache=False)
    assert pool.match(range(8)) == 0 and pool.num_idle == 0


def test_a_pool_may_have_no_cache():
    pool = kv.BlockPool(8, 4, prefix_cache=False)
    publish(pool, range(8))
    assert pool.match(range(8)) == 0 and counts(pool) == (8, 0, 0, 0)


def test_an_equal_block_is_merged_with_the_published_one(pool):
    batch = batch_of(pool)
    seqs = [pool.sequence(range(5)) for _ in range(2)]
    for seq in seqs:
        batch.add(seq)
    batch.plan().commit()
    assert seqs[0].block_ids[0] == seqs[1].block_ids[0]
    assert pool.stats()["merges"] == 1 and pool.num_referenced == 3


@pytest.mark.parametrize("how", [{"read_cache": False}, {"write_cache": False}])
def test_who_does_not_share_keeps_an_equal_block(pool, how):
    batch, seq = batch_of(pool), pool.sequence(range(5))
    compute(batch, seq)
    other = pool.sequence(range(5), **how)
    batch.add(other)
    if "read_cache" in how:  # what is not written back is found all the same
        batch.plan().commit()
        assert other.block_ids[0] != seq.block_ids[0]
        seq.free()
        other.free()
        assert (pool.num_idle, pool.match(range(4))) == (1, 4)
    else:
        assert other.num_cached == 4


def test_eviction_takes_the_deepest_block_of_a_release_first(pool):
    publish(pool, range(16))
    for num_idle in (3, 2, 1, 0):
        ids = pool.allocate(8 - num_idle)
        assert pool.match(range(16)) == 4 * num_idle
        pool.release(ids)


def test_eviction_takes_the_least_recently_released_first(pool):
    for start in (0, 100, 200):
        publish(pool, range(start, start + 4))
    batch, seq = batch_of(pool), pool.sequence(range(5))
    batch.add(seq)
    seq.free()  # the first prefix is the latest now
    pool.allocate(6)
    assert [pool.match(range(start, start + 4)) for start in (0, 100, 200)] == [4, 0, 4]


def test_blank_blocks_go_before_cached_ones(pool):
    publish(pool, range(8))
    pool.allocate(6)
    assert pool.match(range(8)) == 8 and pool.stats()["evictions"] == 0


@pytest.mark.parametrize(("policy", "kept"), [("lru", 0), ("adaptive", 8)])
def test_what_was_hit_outlives_what_comes_once_if_the_policy_says_so(policy, kept):
    pool = kv.BlockPool(64, 4, eviction=policy)
    publish(pool, range(8))
    publish(pool, range(9))  # finds both blocks
    for number in range(1, 101):
        publish(pool, range(100 * number, 100 * number + 8))
    assert pool.match(range(8)) == kept
    pool.audit()


def test_an_evicted_block_is_not_found_before_its_id_is_out():
    pool = kv.BlockPool(2, 4)
    publish(pool, range(8))
    batch, seq = batch_of(pool), pool.sequence(range(100, 104))
    batch.add(seq)
    with batch.plan():
        assert pool.match(range(8)) == 4
        assert pool.match(range(4)) == 4


def test_a_held_prefix_is_not_evicted(pool):
    publish(pool, range(8))
    seq = pool.sequence(range(9))
    batch_of(pool).add(seq)
    pool.allocate(6)
    with pytest.raises(kv.OutOfBlocks):
        pool.allocate(1)
    assert pool.match(range(8)) == 8


def test_blocks_needed_counts_hits_that_are_idle(pool):
    seq = pool.sequence(range(13))
    assert pool.blocks_needed(seq) == 4
    publish(pool, range(8))
    assert pool.blocks_needed(seq) == 4
    holder = pool.sequence(range(9))
    batch_of(pool).add(holder)
    assert pool.blocks_needed(seq) == 2


def test_an_admission_that_is_refused_leaves_the_order_of_eviction():
    pool = kv.BlockPool(5, 4)
    publish(pool, range(4))
    publish(pool, range(100, 104))
    batch, seq = batch_of(pool), pool.sequence(range(24))
    batch.add(seq)
    assert seq.num_cached == 4
    with unchanged(pool, batch, seq), pytest.raises(kv.OutOfBlocks):
        batch.plan()
    seq.free()
    pool.allocate(4)
    assert (pool.match(range(4)), pool.match(range(100, 104))) == (4, 0)


def test_a_reset_forgets_what_is_idle(pool):
    publish(pool, range(8))
    assert pool.reset_prefix_cache() == 0
    assert counts(pool) == (8, 0, 0, 0)
    assert pool.match(range(8)) == 0


def test_a_reset_tells_how_many_blocks_are_held(pool):
    seq = pool.sequence(range(8))
    compute(batch_of(pool), seq)
    assert pool.reset_prefix_cache() == 2
    assert pool.match(range(8)) == 0


def test_what_began_before_a_reset_is_never_published(pool):
    batch, seq = batch_of(pool), pool.sequence(range(8))
    batch.add(seq)
    batch.plan(num_tokens=4).commit()
    in_flight = batch.plan()
    pool.reset_prefix_cache()
    in_flight.commit()
    seq.extend(range(8, 12))
    batch.plan().commit()
    assert pool.match(range(12)) == 0
    seq.free()
    assert counts(pool) == (8, 0, 0, 0)


def test_a_preempted_sequence_begins_anew_after_a_reset(pool):
    batch, seq = batch_of(pool), pool.sequence(range(8))
    row = compute(batch, seq)
    pool.reset_prefix_cache()
    batch.preempt(row)
    compute(batch, seq)
    assert pool.match(range(8)) == 8


def test_a_hit_revives_a_quarantined_block(pool):
    batch, seq = batch_of(pool), pool.sequence(range(4))
    compute(batch, seq)
    seq.extend([4])
    plan = batch.plan()
    seq.free()
    assert pool.num_quarantined == 2
    other = pool.sequence(range(5))
    batch.add(other)
    assert other.num_cached == 4 and pool.num_quarantined == 1
    plan.commit()
    assert counts(pool) == (7, 0, 1, 0)


def test_a_thousand_requests_neither_leak_nor_are_refused():
    pool = kv.BlockPool(16, 4)
    batch = batch_of(pool)
    for start in range(1000):
        seq = pool.sequence(range(start % 37, start % 37 + 17))
        compute(batch, seq)
        seq.free()
        assert pool.num_referenced == 0
    pool.audit()
    assert pool.stats()["evictions"] > 0 and pool.stats()["refusals"] == 0
