"""What is found in the cache: faults that systems of this kind have had, each as the rule that it broke."""

import itertools

import kvfolio as kv
import pytest
from bookkeeping import batch_of, compute, counts, publish


def test_a_blocks_own_tokens_do_not_vouch_for_its_past():
    """Equal tokens behind another cached parent are another block (openvino.genai#3722)."""
    pool = kv.BlockPool(16, 4)
    heads = [[n] * 4 for n in range(4)]
    publish(pool, heads[0] + [9] * 4)
    for head in heads[1:]:
        publish(pool, head)
        assert pool.match(head + [9] * 4) == 4
        seq = pool.sequence(head + [9] * 4 + [1])
        compute(batch_of(pool), seq)
        assert seq.num_cached == 4
        seq.free()
    for head in heads:
        assert pool.match(head + [9] * 4) == 8
    pool.audit()


def test_equal_prompts_of_one_step_are_each_computed():
    """What is only planned is no hit, for the next row of the same plan either (nano-vllm#208)."""
    pool, other = kv.BlockPool(16, 4), [9]
    batch = batch_of(pool)
    seqs = [pool.sequence(range(8)), pool.sequence([*range(8), *other])]
    rows = [batch.add(seq) for seq in seqs]
    with batch.plan() as plan:
        assert plan.query_start_loc.tolist() == [0, 8, 17]
        assert not set(plan.block_table[0]) & set(plan.block_table[1])
        assert [seq.num_cached for seq in seqs] == [0, 0]
    assert [seq.num_cached for seq in seqs] == [0, 0]  # nor afterwards: they were computed
    assert seqs[0].block_ids.tolist() == seqs[1].block_ids[:2].tolist()  # and then merged
    for row in rows:
        batch.remove(row).free()
    pool.audit()
    assert pool.num_referenced == 0


@pytest.mark.parametrize("end", ["rollback", "free", "preempt"])
def test_a_step_that_does_not_happen_publishes_what_was_before_it_only(end):
    """An abort before the write leaves nothing to find (vllm#43569)."""
    pool = kv.BlockPool(8, 4)
    batch, seq = batch_of(pool), pool.sequence(range(12))
    row = batch.add(seq)
    batch.plan(num_tokens=4).commit()
    plan = batch.plan()
    if end == "free":
        seq.free()
    elif end == "preempt":
        batch.preempt(row)
    plan.rollback()
    assert pool.match(range(12)) == 4
    late = pool.sequence(range(12))
    batch.add(late)
    assert late.num_cached == 4
    pool.audit()


def test_evicting_a_published_block_leaves_its_private_equal_alone():
    """The cache's own block and a sequence's equal one are two (atlas#373)."""
    pool = kv.BlockPool(2, 4)
    publish(pool, range(4))
    own = pool.sequence(range(4), read_cache=False)
    compute(batch_of(pool), own)
    (block,) = own.block_ids.tolist()
    assert counts(pool) == (0, 1, 1, 0)
    taken = pool.allocate(1)
    assert taken[0] != block and pool.match(range(4)) == 0
    assert pool.ref_count(block) == 1 and own.num_computed == 4
    with pytest.raises(kv.OutOfBlocks):
        pool.allocate(1)
    own.free()
    pool.audit()
    assert counts(pool) == (1, 0, 1, 0)


def test_a_new_version_of_an_adapter_finds_nothing_of_the_old():
    """Who replaces an adapter in place changes its version; rows of the old go on (vllm#42125)."""
    pool = kv.BlockPool(4, 4)
    old, new = kv.Context(adapter="law@1"), kv.Context(adapter="law@2")
    batch = batch_of(pool)
    running = pool.sequence(range(9), context=old)
    compute(batch, running)
    publish(pool, [7] * 4, context=old)
    assert pool.match(range(8), new) == 0 and pool.match(range(8), old) == 8
    running.extend([1])
    batch.plan().commit()
    assert running.num_computed == 10
    pool.allocate(1)  # the old version's idle block is a victim like any other
    assert pool.match([7] * 4, old) == 0 and pool.match(range(8), old) == 8


def test_a_tenant_reaches_nothing_by_salts_of_its_choosing():
    """The server's field and the request's do not mix (CVE-2025-46570)."""
    pool = kv.BlockPool(16, 4)
    publish(pool, range(8), context=kv.Context(tenant="one", salt="secret"))
    for salt in ("", "secret", "one", "onesecret", "\x00secret"):
        foreign = kv.Context(tenant="two", salt=salt)
        assert pool.match(range(8), foreign) == pool.match(range(8), kv.Context(salt=salt)) == 0
        seq = pool.sequence(range(9), context=foreign, write_cache=False)
        compute(batch_of(pool), seq)
        assert seq.num_cached == 0
        seq.free()


MEDIA = [10, 5, 5, 5, 5, 5, 11, 12]  # five places of one picture, from block 0 into block 1


@pytest.mark.parametrize(
    ("extras", "found"),
    [
        ([(1, 6, b"one")], 8),
        ([(1, 6, b"two")], 0),  # another picture
        ([(2, 7, b"one")], 0),  # one place further
        ([(1, 5, b"one")], 0),  # a shorter one
        ([(1, 3, b"one"), (3, 6, b"one")], 0),  # two pictures
        ([], 0),
    ],
)
def test_placeholders_of_other_media_are_other_tokens(extras, found):
    """All pictures share a placeholder id (sglang-omni#258)."""
    pool = kv.BlockPool(16, 4)
    text = [1, 2, 3, 4]
    moved = [(start + 4, stop + 4, digest) for start, stop, digest in extras]
    publish(pool, MEDIA, context=kv.Context(extras=[(1, 6, b"one")]))
    publish(pool, text + MEDIA, context=kv.Context(extras=[(5, 10, b"one")]))
    assert pool.match(MEDIA, kv.Context(extras=extras)) == found
    assert pool.match(text + MEDIA, kv.Context(extras=moved)) == 4 + found  # the text before it is found


def test_a_reset_while_a_request_runs_lets_it_finish_and_publishes_none_of_it():
    """New weights: nothing of the old is served, whenever it is committed (vllm#17103)."""
    pool = kv.BlockPool(16, 4)
    batch = batch_of(pool)
    running = pool.sequence(range(10))
    row = batch.add(running)
    batch.plan(num_tokens=5).commit()
    fork = running.fork()
    step = batch.plan()
    assert pool.reset_prefix_cache() == pool.num_referenced == 4  # told, not refused
    assert pool.match(range(10)) == 0
    step.commit()
    step.extend([7])
    for token in range(3):
        batch.plan().commit()
        batch.extend([row], [token])
    compute(batch_of(pool), fork)
    assert pool.match(range(10)) == pool.match([*range(10), 7, 0]) == 0
    running.free()
    fork.free()
    assert counts(pool) == (16, 0, 0, 0)
    publish(pool, range(10))
    assert pool.match(range(10)) == 8  # the new epoch's own
    pool.audit()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("hit", [False, True])
def test_a_prefix_outlives_what_is_behind_it(chunks, hit):
    """Stored at once or piece by piece, its head hit meanwhile or not (LMCache#4867)."""
    pool, chain = kv.BlockPool(8, 4), list(range(12))
    for chunk in range(1, chunks + 1):
        publish(pool, chain[: 12 * chunk // chunks])
    if hit:
        publish(pool, chain[:4])
        publish(pool, chain[:5])
    pool.allocate(pool.num_blank)
    for left in (8, 4, 0):
        pool.allocate(1)
        assert pool.match(chain) == left
    pool.audit()


def test_no_cached_block_is_without_its_parent():
    """Whatever the order of releases among requests with common prefixes."""
    prompts = [[0] * 4, [0] * 8, [0] * 12, [0] * 4 + [1] * 4, [0] * 4 + [1] * 8]
    for order in itertools.permutations(range(5)):
        pool = kv.BlockPool(16, 4)
        batch = batch_of(pool)
        seqs = [pool.sequence([*prompt, 7]) for prompt in prompts]
        for seq in seqs:
            compute(batch, seq)
        for index in order:
            seqs[index].free()
        pool.allocate(pool.num_blank)
        while pool.num_idle:
            before = pool.num_idle
            reachable = {(n, p[-1]) for p in prompts for n in range(4, pool.match(p) + 1, 4)}
            assert len({(n, 0 if n == 4 else last) for n, last in reachable}) == before
            pool.allocate(1)


def test_random_prompts_have_no_hit_rate():
    """A preempted request that finds its own blocks again is told apart (vllm#25780)."""
    pool = kv.BlockPool(64, 4)
    batch = batch_of(pool)
    seqs = [pool.sequence([n] * 9) for n in range(4)]
    for seq in seqs:
        compute(batch, seq)
    assert pool.stats()["hit_tokens"] == 0 and pool.stats()["queried_tokens"] == 36
    cold = pool.sequence([0] * 9, read_cache=False)
    compute(batch, cold)
    assert pool.stats()["queried_tokens"] == 36  # who may not find is not counted
    again = batch.preempt(0)
    assert again is seqs[0] and again.num_cached == 0
    batch.add(again)
    assert again.num_cached == 8


def test_accepted_drafts_are_published_and_refused_ones_are_not():
    """A block is findable when its last token is accepted, not before (vllm#12193)."""
    pool = kv.BlockPool(16, 4)
    batch, seq = batch_of(pool), pool.sequence(range(6))
    compute(batch, seq)
    seq.extend([60, 70, 80, 90])
    batch.plan().commit([1])  # one of four: block 1 holds tokens 4, 5, 60
    assert pool.match([*range(6), 60, 70]) == 4
    seq.extend([71])
    batch.plan().commit()
    assert pool.match([*range(6), 60, 71]) == 8
    assert pool.match([*range(6), 60, 70]) == 4
    seq.extend([81, 91])
    batch.plan().commit([0])
    assert seq.num_tokens == seq.num_computed == 8
    pool.audit()
