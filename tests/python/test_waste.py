"""Random workloads: memory is lost only in the last block of a sequence, and every count balances."""

import hypothesis.strategies as st
import kvfolio as kv
import pytest
from bookkeeping import batch_of, counts
from hypothesis import given, settings

VERBS = ["new", "append", "append", "fork", "truncate", "discard", "release"]
FEW = settings(max_examples=40, deadline=None, derandomize=True)


def check_waste(pool, holders):
    """Of the slots that tables hold, at most block_size - 1 a holder are empty; shared ones count once."""
    counts(pool)
    pool.audit()
    seen = set()
    for holder, num_tokens in holders:
        blocks = holder.block_ids.tolist()
        empty = len(blocks) * pool.block_size - num_tokens
        assert 0 <= empty <= pool.block_size - 1
        seen.update(blocks)
    assert len(seen - {0}) == pool.num_referenced


@FEW
@given(st.integers(1, 9), st.data())
def test_tables_waste_less_than_a_block_each(block_size, data):
    pool = kv.BlockPool(40, block_size)
    tables = []
    for _ in range(data.draw(st.integers(1, 25))):
        verb = data.draw(st.sampled_from(VERBS))
        if verb == "new" or not tables:
            tables.append(pool.table())
            continue
        index = data.draw(st.integers(0, len(tables) - 1))
        table = tables[index]
        lowest = table.block_ids.tolist().count(0) * block_size
        place = data.draw(st.integers(min(lowest, table.num_tokens), table.num_tokens))
        try:
            if verb == "append":
                table.append(data.draw(st.integers(0, 30)))
            elif verb == "fork":
                tables.append(table.fork(place))
            elif verb == "truncate":
                table.truncate(place)
            elif verb == "discard":
                table.discard_before(place)
            else:
                tables.pop(index).release()
        except kv.OutOfBlocks:
            pass  # the full pool is part of the workload
        check_waste(pool, [(table, table.num_tokens) for table in tables])
        assert all(table.num_empty_slots < block_size for table in tables)
    for table in tables:
        table.release()
    assert counts(pool) == (40, 0, 0, 0)


@pytest.mark.filterwarnings("ignore:a plan was dropped:ResourceWarning")  # of examples that end half-way
@FEW
@given(st.sampled_from([1, 2, 4, 7]), st.booleans(), st.data())
def test_sequences_waste_less_than_a_block_each(block_size, run_ahead, data):
    pool = kv.BlockPool(48, block_size)
    batch = batch_of(pool, 6, 64)
    admitted, waiting, done, in_flight = [], [], [], []

    def end_oldest():
        plan, lengths = in_flight.pop(0)
        if data.draw(st.booleans()):
            plan.commit()
        elif data.draw(st.booleans()):
            plan.rollback()
        else:
            plan.commit([data.draw(st.integers(0, length)) for length in lengths])
        plan.extend([data.draw(st.integers(0, 1)) for _ in plan.logits_rows])

    for _ in range(data.draw(st.integers(1, 12))):
        if len(batch.rows) < 6:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
            admitted.append(pool.sequence(tokens))
            batch.add(admitted[-1])
        for row in batch.rows:
            fate = data.draw(st.integers(0, 9))
            if fate == 0:
                waiting.append(batch.preempt(row))
            elif fate == 1:
                done.append(batch.remove(row))
        plan = batch.plan(data.draw(st.integers(1, 30)), partial=True)
        in_flight.append((plan, [int(n) for n in plan.query_start_loc[1:] - plan.query_start_loc[:-1]]))
        while len(in_flight) > run_ahead:
            end_oldest()
        counts(pool)
        pool.audit()
        for seq in [*admitted, *waiting, *done]:
            assert len(seq.block_ids) <= kv.block_layout(seq.num_tokens, block_size)[0]
    while in_flight:
        end_oldest()

    running = [batch.remove(row) for row in batch.rows]
    check_waste(pool, [(seq, seq.num_computed) for seq in [*running, *waiting, *done]])
    for seq in [*running, *waiting, *done]:
        seq.free()
    pool.audit()
    assert pool.num_referenced == pool.num_quarantined == 0
