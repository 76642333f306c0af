"""Plans in another process."""

import multiprocessing
import pickle

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import PLAN_ARRAYS, batch_of

NUMBERS = ("num_tokens", "max_query_len", "max_seq_len")


def plans(block_size=4):
    """Many plans of a batch where rows come, go, are cut, reordered and left out, not yet ended."""
    pool = kv.BlockPool(120, block_size)
    batch = batch_of(pool, 5, 800)
    rng = np.random.default_rng(5)
    for step in range(150):
        rows = batch.rows
        if len(rows) < 5 and step % 4 != 1:
            batch.add(pool.sequence(rng.integers(0, 9, rng.integers(1, 20)).tolist()))
        elif step % 6 == 2:
            batch.preempt(rows[int(rng.integers(len(rows)))])
        elif step % 9 == 4:
            batch.reorder(rng.permutation(rows).tolist(), rows)
        elif step % 13 == 5:
            seq = batch.remove(rows[0])
            seq.truncate(seq.num_tokens // 2)
            batch.add(seq)
        for row in batch.rows:
            batch.extend([row], [int(rng.integers(9))])
        yield batch.plan(20, True, rows=rng.permutation(batch.rows).tolist())


def picture(plan):
    arrays = {name: getattr(plan, name) for name in PLAN_ARRAYS}
    return {name: (str(a.dtype), a.shape, a.tolist()) for name, a in arrays.items()} | {
        name: getattr(plan, name) for name in NUMBERS
    }


def work(inbox, outbox):
    mirror = kv.TableMirror(max_sequences=5, max_tokens_per_sequence=800, block_size=4)
    while (message := inbox.recv()) is not None:
        outbox.send(picture(mirror.take(message)))


def test_another_process_makes_all_arrays_of_a_plan():
    context = multiprocessing.get_context("spawn")
    (here, inbox), (outbox, there) = context.Pipe(), context.Pipe()
    worker = context.Process(target=work, args=(inbox, there))
    worker.start()
    try:
        for number, plan in enumerate(plans()):
            here.send(plan if number % 2 else plan.to_bytes())  # the first is pickled on its way
            assert outbox.poll(60)
            assert outbox.recv() == picture(plan)
            if number % 10 == 7:
                plan.rollback()
            else:
                plan.commit()
    finally:
        here.send(None)
        worker.join(60)
    assert worker.exitcode == 0


def test_a_message_is_small_whatever_the_context():
    pool = kv.BlockPool(5000, 16)
    batch = batch_of(pool, 2, 70_000)
    mirror = kv.TableMirror(max_sequences=2, max_tokens_per_sequence=70_000, block_size=16)
    batch.add(pool.sequence(np.arange(60_000)))
    with batch.plan() as plan:
        mirror.take(pickle.loads(pickle.dumps(plan)))
    plan.extend([1])
    with batch.plan() as plan:
        assert len(plan.to_bytes()) < 100
        assert picture(mirror.take(plan.to_bytes())) == picture(plan)


def test_messages_that_do_not_belong_are_refused_and_change_nothing():
    made = plans()
    messages = []
    for plan in made:
        messages.append(plan.to_bytes())
        plan.commit()
        if len(messages) == 3:
            break
    mirror = kv.TableMirror(max_sequences=5, max_tokens_per_sequence=800, block_size=4)
    mirror.take(messages[0])
    before = mirror.table.copy()
    for message, error, why in [
        (messages[0], ValueError, "message must be of plan 2, the next, not of 1"),
        (messages[2], ValueError, "message must be of plan 2, the next, not of 3"),
        (messages[1][:-4], ValueError, "message must be what Plan.to_bytes"),
        (bytes(400), ValueError, "message must be what Plan.to_bytes"),
        (b"", ValueError, "message must be what Plan.to_bytes gave, not 0 other bytes"),
        ("text", TypeError, "message must be bytes or a PlanMessage, not str"),
    ]:
        with pytest.raises(error, match=why):
            mirror.take(message)
    np.testing.assert_array_equal(mirror.table, before)
    mirror.take(messages[1])
    with pytest.raises(ValueError, match="message must be of blocks of 8 tokens, not 4"):
        kv.TableMirror(max_sequences=5, max_tokens_per_sequence=800, block_size=8).take(messages[0])
    with pytest.raises(ValueError, match="message must be of a batch of 1 rows of 1 blocks"):
        kv.TableMirror(max_sequences=1, max_tokens_per_sequence=4, block_size=4).take(messages[0])
    with pytest.raises(TypeError, match="data must be bytes, not int"):
        kv.PlanMessage(3)
