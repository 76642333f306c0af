import gc

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import batch_of, counts, picture, unchanged


@pytest.fixture
def pool():
    return kv.BlockPool(16, 4)


@pytest.fixture
def batch(pool):
    return batch_of(pool)


def admit(pool, batch, *lengths):
    seqs = [pool.sequence(range(1000 * i, 1000 * i + n)) for i, n in enumerate(lengths, 1)]
    for seq in seqs:
        batch.add(seq)
    return seqs


def check_against_sequences(plan, seqs, block_size):
    """All forms in which a plan tells the same thing agree with the sequences of its rows."""
    starts = plan.query_start_loc.tolist()
    assert starts[0] == 0 and starts[-1] == plan.num_tokens == len(plan.token_ids)
    assert plan.max_seq_len == max(plan.seq_lens, default=0)
    assert plan.max_query_len == max(np.diff(starts), default=0)
    assert len(plan.page_indices) == plan.page_indptr[-1]
    for index, row in enumerate(plan.rows):
        seq, seq_len = seqs[row], int(plan.seq_lens[index])
        here = slice(starts[index], starts[index + 1])
        positions = plan.positions[here]
        assert positions.tolist() == list(range(seq_len - len(positions), seq_len))
        assert plan.token_ids[here].tolist() == seq.token_ids[positions].tolist()
        blocks = seq.block_ids[: -(-seq_len // block_size)]
        cells = plan.block_table[index]
        assert cells[: len(blocks)].tolist() == blocks.tolist() and not cells[len(blocks) :].any()
        pages = plan.page_indices[plan.page_indptr[index] : plan.page_indptr[index + 1]]
        assert pages.tolist() == blocks.tolist()
        assert plan.last_page_len[index] == seq_len - (len(blocks) - 1) * block_size
        slots = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
        assert plan.slot_mapping[here].tolist() == slots.tolist()


def test_a_plan_describes_prefill_and_decode_together(pool, batch):
    seqs = admit(pool, batch, 6, 9)
    batch.plan(rows=[0]).commit()
    batch.extend([0], [7])
    seqs += admit(pool, batch, 4)
    with batch.plan() as plan:
        assert plan.rows.tolist() == [0, 1, 2] and plan.num_tokens == 14
        check_against_sequences(plan, seqs, 4)


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_a_full_last_page_counts_whole(pool, batch, num_tokens):
    seqs = admit(pool, batch, num_tokens)
    with batch.plan() as plan:
        assert plan.last_page_len.tolist() == [(num_tokens - 1) % 4 + 1]
        check_against_sequences(plan, seqs, 4)


def test_rows_without_pending_tokens_are_left_out(pool, batch):
    admit(pool, batch, 3, 3, 3)
    batch.plan(rows=[1]).commit()
    with batch.plan() as plan:
        assert plan.rows.tolist() == [0, 2]
    with batch.plan() as plan:
        assert plan.num_tokens == 0


def test_rows_are_served_in_the_order_given(pool, batch):
    seqs = admit(pool, batch, 3, 4, 5)
    with batch.plan(rows=[2, 0]) as plan:
        assert plan.rows.tolist() == [2, 0]
        check_against_sequences(plan, seqs, 4)


def test_a_budget_is_spent_in_order(pool, batch):
    seqs = admit(pool, batch, 3, 4, 5)
    with batch.plan(5) as plan:
        assert (plan.rows.tolist(), plan.query_start_loc.tolist()) == ([0, 1], [0, 3, 5])
        assert plan.logits_rows.tolist() == [0]
        check_against_sequences(plan, seqs, 4)


def test_each_row_has_its_cap(pool, batch):
    admit(pool, batch, 3, 4, 5)
    with batch.plan(num_tokens=[0, 9, 2]) as plan:
        assert (plan.rows.tolist(), plan.query_start_loc.tolist()) == ([1, 2], [0, 4, 6])
    with batch.plan(num_tokens=np.int64(1)) as plan:
        assert plan.query_start_loc.tolist() == [0, 1, 2]


def test_caps_are_one_for_each_row(pool, batch):
    seqs = admit(pool, batch, 3, 4)
    for rows, caps in [(None, [1]), ([0], [1, 2]), ([], [1])]:
        with unchanged(pool, batch, *seqs), pytest.raises(ValueError, match="num_tokens"):
            batch.plan(rows=rows, num_tokens=caps)


@pytest.mark.parametrize("rows", [[0, 0], [5], [8], [-1], [2**40]])
def test_a_plan_refuses_rows_that_are_not_there(pool, batch, rows):
    seqs = admit(pool, batch, 3, 4)
    with unchanged(pool, batch, *seqs), pytest.raises(ValueError, match="row"):
        batch.plan(rows=rows)


def test_logits_are_where_a_row_ends(pool, batch):
    admit(pool, batch, 3, 4, 5)
    with batch.plan(num_tokens=4) as plan:
        assert plan.logits_rows.tolist() == [0, 1]
        assert plan.logits_indices.tolist() == [2, 6]


def test_a_plan_is_all_or_nothing(pool, batch):
    seqs = admit(pool, batch, 40, 40)
    with unchanged(pool, batch, *seqs), pytest.raises(kv.OutOfBlocks) as refusal:
        batch.plan()
    assert (refusal.value.needed, refusal.value.free, refusal.value.ever_fits) == (20, 16, True)


def test_a_partial_plan_serves_the_rows_that_fit(pool, batch):
    batch = batch_of(pool, 8, 128)
    seqs = admit(pool, batch, 40, 40, 100, 20)
    with batch.plan(partial=True) as plan:
        assert plan.rows.tolist() == [0, 3]
        assert plan.skipped.tolist() == [1, 2] and plan.never_fit.tolist() == [2]
        check_against_sequences(plan, seqs, 4)


def test_a_partial_plan_may_serve_nobody(pool, batch):
    pool.allocate(16)
    seqs = admit(pool, batch, 3)
    with unchanged(pool, *seqs):
        plan = batch.plan(partial=True)
        assert plan.skipped.tolist() == [0] and plan.num_tokens == 0
        plan.commit()


def test_a_row_that_alone_exceeds_the_pool_never_fits(pool):
    batch = batch_of(pool, 2, 128)
    admit(pool, batch, 65)
    with pytest.raises(kv.OutOfBlocks, match="never") as refusal:
        batch.plan()
    assert not refusal.value.ever_fits
    batch.plan(64).commit()


def test_a_plan_ends_once(pool, batch):
    admit(pool, batch, 3)
    for end in (kv.Plan.commit, kv.Plan.rollback):
        plan = batch.plan()
        end(plan)
        for again in (kv.Plan.commit, kv.Plan.rollback):
            with unchanged(pool, batch), pytest.raises(kv.StaleHandle):
                again(plan)
        batch.extend([0], [1])


def test_plans_end_in_the_order_they_were_made(pool, batch):
    seqs = admit(pool, batch, 8)
    first, second = batch.plan(4), batch.plan()
    for end in (second.commit, second.rollback):
        with unchanged(pool, batch, *seqs), pytest.raises(kv.PlanInFlight):
            end()
    first.commit()
    second.commit()
    assert seqs[0].num_computed == 8


def test_the_order_of_plans_is_the_batchs_own(pool, batch):
    admit(pool, batch, 8)
    other = batch_of(pool)
    admit(pool, other, 5)
    first, second = batch.plan(), other.plan()
    second.commit()
    first.commit()


def test_a_rollback_puts_everything_back(pool, batch):
    seqs = admit(pool, batch, 6)
    batch.plan().commit()
    fork = seqs[0].fork()
    batch.add(fork)
    seqs += [fork, *admit(pool, batch, 9)]
    batch.extend([0, 1], [1, 2])
    _, _, *before = picture(pool, batch, *seqs)
    plan = batch.plan()
    assert len(plan.copies) == 2
    plan.rollback()
    _, _, *after = picture(pool, batch, *seqs)
    assert after == before


def test_a_rollback_voids_the_rows_behind_it(pool, batch):
    seqs = admit(pool, batch, 8, 4)
    first, second = batch.plan(num_tokens=[4, 0]), batch.plan()
    first.rollback()
    second.commit()
    assert [seq.num_computed for seq in seqs] == [0, 4]


@pytest.mark.parametrize("accepted", range(5))
def test_drafts_are_accepted_in_part(pool, batch, accepted):
    (seq,) = admit(pool, batch, 6)
    batch.plan().commit()
    seq.extend([1, 2, 3, 4])
    plan = batch.plan()
    plan.commit([accepted])
    assert seq.num_tokens == seq.num_computed == 6 + accepted
    assert pool.num_referenced == -(-(6 + accepted) // 4)
    assert pool.match(seq.token_ids) == (6 + accepted) // 4 * 4


@pytest.mark.parametrize("accepted", [[], [1], [1, 1, 1], [7, 0], [0, 9], [-1, 0]])
def test_accepted_numbers_are_one_for_each_row(pool, batch, accepted):
    seqs = admit(pool, batch, 6, 8)
    plan = batch.plan()
    with unchanged(pool, batch, *seqs), pytest.raises(ValueError, match="num_accepted"):
        plan.commit(accepted)
    plan.commit([6, 8])


def test_many_steps_of_drafts_leak_nothing():
    rng = np.random.default_rng(0)
    pool = kv.BlockPool(1024, 4)
    batch = batch_of(pool, 8, 512)
    seqs = admit(pool, batch, *range(20, 28))
    batch.plan().commit()
    for _ in range(30):
        for seq in seqs:
            seq.extend(rng.integers(0, 9, 12))
        batch.plan().commit(rng.integers(0, 13, 8))
        assert pool.num_referenced == sum(-(-seq.num_tokens // 4) for seq in seqs)
    for seq in seqs:
        seq.free()
    pool.audit()
    assert pool.num_referenced == 0


def test_blocks_of_a_plan_in_flight_are_quarantined_until_it_ends():
    pool = kv.BlockPool(2, 4)
    batch = batch_of(pool)
    (seq,) = admit(pool, batch, 3)
    first = batch.plan()
    seq.extend([1])
    second = batch.plan()
    first.commit()
    seq.free()
    assert counts(pool) == (1, 0, 0, 1)
    with pytest.raises(kv.OutOfBlocks) as refusal:
        pool.allocate(2)
    assert (refusal.value.free, refusal.value.quarantined, refusal.value.ever_fits) == (1, 1, True)
    second.commit()
    assert counts(pool) == (2, 0, 0, 0)
    pool.allocate(2)


def test_a_late_commit_does_not_reach_the_rows_next_owner(pool, batch):
    (seq,) = admit(pool, batch, 3)
    plan = batch.plan()
    seq.free()
    (other,) = admit(pool, batch, 5)
    plan.commit()
    assert (other.num_computed, other.num_tokens) == (0, 5)
    assert plan.extend([9]).tolist() == [False] and other.num_tokens == 5


def test_sampled_tokens_are_appended(pool, batch):
    seqs = admit(pool, batch, 3, 4)
    plan = batch.plan()
    assert plan.extend([8, 9]).tolist() == [True, True]
    plan.commit()
    assert [seq.token_ids[-1] for seq in seqs] == [8, 9]
    assert [seq.num_pending for seq in seqs] == [1, 1]


def test_a_sampled_token_is_taken_once(pool, batch):
    (seq,) = admit(pool, batch, 3)
    with batch.plan() as plan:
        assert plan.extend([8]).tolist() == [True]
        assert plan.extend([9]).tolist() == [False]
    assert seq.token_ids.tolist() == [1000, 1001, 1002, 8]


def test_a_loop_that_ran_ahead_is_told_its_tokens(pool, batch):
    (seq,) = admit(pool, batch, 3)
    first = batch.plan()
    batch.extend_unknown([0])
    second = batch.plan()
    assert second.token_ids.tolist() == [-1]
    first.commit()
    assert first.extend([7]).tolist() == [True]
    second.commit()
    assert seq.token_ids.tolist() == [1000, 1001, 1002, 7]
    assert pool.match(seq.token_ids) == 4


def test_a_token_is_passed_over_where_another_is_known(pool, batch):
    (seq,) = admit(pool, batch, 3)
    plan = batch.plan()
    batch.extend([0], [5])
    assert plan.extend([7]).tolist() == [False]
    plan.commit()
    assert seq.token_ids[-1] == 5


def test_a_plan_that_was_rolled_back_takes_no_token(pool, batch):
    (seq,) = admit(pool, batch, 3)
    plan = batch.plan()
    plan.rollback()
    with unchanged(pool, seq):
        assert plan.extend([7]).tolist() == [False]


def test_tokens_are_one_for_each_of_logits_rows(pool, batch):
    seqs = admit(pool, batch, 3, 4)
    with batch.plan() as plan, unchanged(pool, batch, *seqs):
        for tokens in ([], [1], [1, 2, 3]):
            with pytest.raises(ValueError, match="token_ids must be one for each of 2"):
                plan.extend(tokens)


def test_with_commits(pool, batch):
    (seq,) = admit(pool, batch, 3)
    with batch.plan() as plan:
        assert seq.num_computed == 0
    assert seq.num_computed == 3
    with pytest.raises(kv.StaleHandle):
        plan.commit()


def test_with_rolls_back_on_an_exception(pool, batch):
    (seq,) = admit(pool, batch, 3)
    with pytest.raises(ZeroDivisionError), batch.plan():
        _ = 1 / 0
    assert (seq.num_computed, seq.num_tokens, pool.num_referenced) == (0, 3, 0)


def test_with_leaves_a_plan_that_has_ended(pool, batch):
    (seq,) = admit(pool, batch, 3)
    with batch.plan() as plan:
        plan.rollback()
    assert seq.num_computed == 0


def test_an_exception_waits_for_the_plans_before_it(pool, batch):
    (seq,) = admit(pool, batch, 8)
    first = batch.plan(4)
    with pytest.raises(ZeroDivisionError), batch.plan():
        _ = 1 / 0
    first.commit()
    assert (seq.num_computed, pool.num_referenced) == (4, 1)


def test_a_dropped_plan_warns_and_is_rolled_back(pool, batch):
    (seq,) = admit(pool, batch, 3)
    plan = [batch.plan()]
    with pytest.warns(ResourceWarning, match="without commit or rollback"):
        plan.clear()
    assert (seq.num_computed, pool.num_referenced) == (0, 0)
    batch.plan().commit()
    assert seq.num_computed == 3


def test_a_dropped_plan_waits_for_its_turn(pool, batch):
    (seq,) = admit(pool, batch, 8)
    first, second = batch.plan(4), [batch.plan()]
    with pytest.warns(ResourceWarning):
        second.clear()
    assert pool.num_referenced == 2
    first.commit()
    assert (seq.num_computed, pool.num_referenced) == (4, 1)


def test_updates_keep_a_mirror_of_the_tables(pool):
    rng = np.random.default_rng(1)
    batch, mirror, seqs = batch_of(pool, 4, 64), np.zeros((4, 16), np.int32), {}
    for step in range(60):
        if len(seqs) < 4 and rng.random() < 0.5:
            seq = pool.sequence(rng.integers(0, 2, rng.integers(1, 12)))
            seqs[batch.add(seq)] = seq
        if seqs and rng.random() < 0.3:
            seqs.pop(rng.choice(list(seqs))).free()
        if len(seqs) > 1 and rng.random() < 0.2:
            batch.reorder(rng.permutation(list(seqs)), list(seqs))
        if step % 7 == 3:
            for seq in seqs.values():
                seq.truncate(max(1, seq.num_tokens - 3))
        with batch.plan(partial=True) as plan:
            row, logical, block = plan.table_updates.T
            assert len(set(zip(row.tolist(), logical.tolist(), strict=True))) == len(row)
            mirror[row, logical] = block
            for index, row in enumerate(plan.rows):
                width = -(-plan.seq_lens[index] // 4)
                assert mirror[row, :width].tolist() == plan.block_table[index, :width].tolist()
            check_against_sequences(plan, seqs, 4)
        plan.extend(rng.integers(0, 2, len(plan.logits_rows)))


def test_told_cells_are_not_told_again(pool, batch):
    admit(pool, batch, 3)
    with batch.plan() as plan:
        assert len(plan.table_updates) == 1
    batch.extend([0], [1])
    with batch.plan() as plan:
        assert plan.table_updates.shape == (0, 3)


def test_only_cells_that_changed_are_told(pool, batch):
    (seq,) = admit(pool, batch, 12)
    batch.plan().commit()
    seq.discard_before(4)
    seq.extend([1])
    with batch.plan() as plan:
        assert plan.table_updates.tolist() == [[0, 0, 0], [0, 3, seq.block_ids[3]]]


def test_a_plan_keeps_a_sequence_that_nobody_else_does(pool, batch):
    admit(pool, batch, 3)
    gc.collect()
    with batch.plan() as plan:
        assert plan.num_tokens == 3


def test_a_plans_repr_tells_its_size_and_state(pool, batch):
    admit(pool, batch, 3)
    plan = batch.plan()
    assert repr(plan) == "Plan(1 rows, 3 tokens, 0 copies, in flight)"
    plan.commit()
    assert "ended" in repr(plan)


def test_a_request_loop_finishes_all_that_fit_one_by_one():
    pool = kv.BlockPool(8, 4)
    batch = batch_of(pool, 4, 32)
    waiting = [pool.sequence(range(100 * i, 100 * i + 12 + i % 9)) for i in range(30)]
    running, ticks = [], 0
    while waiting or running:
        ticks += 1
        assert ticks < 300
        while waiting and len(running) < 4 and pool.blocks_needed(waiting[0]) <= pool.num_free:
            running.append(batch.add(waiting.pop(0)))
        while batch.shortfall(8):
            waiting.insert(0, batch.preempt(running.pop()))
        with batch.plan(8) as plan:
            pass
        for row in plan.logits_rows.tolist():
            running.remove(row)
            batch.remove(row).free()
    pool.audit()
    assert counts(pool)[2] == 0


def test_the_last_block_is_not_written_while_another_batch_reads_it(pool, batch):
    (seq,) = admit(pool, batch, 6)
    batch.plan().commit()
    fork = seq.fork()
    other = batch_of(pool)
    compute_row = other.add(fork)
    seq.extend([1])
    fork.extend([2])
    with batch.plan() as plan, other.plan(rows=[compute_row]) as other_plan:
        assert len(plan.copies) + len(other_plan.copies) == 2
        assert plan.slot_mapping[0] != other_plan.slot_mapping[0]
