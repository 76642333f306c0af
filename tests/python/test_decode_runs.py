"""Long runs of one token a step: what a batch keeps aside for speed changes no answer.

Two pools are given the same calls. In one of them every sequence is looked at before every call, which makes
its batch write down all that it kept aside.
"""

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import PLAN_ARRAYS, batch_of, counts

BLOCK_SIZE = 4


class Side:
    """One of the two pools, and what runs in it."""

    def __init__(self, looks, *, num_blocks, block_size):
        self.pool = kv.BlockPool(num_blocks, block_size)
        self.batch = batch_of(self.pool, 6, 400)
        self.looks = looks
        self.seqs = {}  # by row
        self.plans = []  # in flight
        self.ended = []  # whose tokens may still come

    def do(self, call):
        if self.looks:
            for seq in self.seqs.values():
                assert seq.num_tokens >= seq.num_computed
        try:
            return call(self)
        except (kv.KVFolioError, ValueError) as error:
            return type(error), str(error)

    def picture(self):
        seqs = {row: (s.num_tokens, s.num_computed, s.num_cached) for row, s in self.seqs.items()}
        tokens = {row: s.token_ids.tolist() for row, s in self.seqs.items()}
        blocks = {row: s.block_ids.tolist() for row, s in self.seqs.items()}
        self.pool.audit()
        return seqs, tokens, blocks, counts(self.pool), self.pool.stats()


def arrays(plan):
    return {name: getattr(plan, name).tolist() for name in PLAN_ARRAYS}


def same(sides, call):
    quiet, looked_at = (side.do(call) for side in sides)
    assert quiet == looked_at
    return quiet


def admit(length, seed):
    def call(side):
        seq = side.pool.sequence(np.random.default_rng(seed).integers(0, 3, length).tolist())
        row = side.batch.add(seq)
        side.seqs[row] = seq
        return row

    return call


def plan(rows, num_tokens, partial):
    def call(side):
        chosen = None if rows is None else [row for row in rows if row in side.seqs]
        made = side.batch.plan(rows=chosen, num_tokens=num_tokens, partial=partial)
        side.plans.append(made)
        return arrays(made)

    return call


def commit(accept):
    def call(side):
        made = side.plans.pop(0)
        lengths = np.diff(made.query_start_loc)
        made.commit(None if accept is None else (lengths * accept).astype(int).tolist())
        side.ended = [*side.ended[-90:], made]

    return call


def rollback(side):
    side.plans.pop(0).rollback()


def tell(back, seed):
    def call(side):
        made = [*side.ended, *side.plans][back]
        tokens = np.random.default_rng(seed).integers(0, 3, len(made.logits_rows)).astype(np.int32)
        return made.extend(tokens).tolist()

    return call


def leave(row, verb):
    def call(side):
        seq = getattr(side.batch, verb)(row)
        del side.seqs[row]
        if verb == "preempt":
            row_again = side.batch.add(seq)
            side.seqs[row_again] = seq
            return row_again
        return seq.free()

    return call


def change(row, verb, argument):
    return lambda side: getattr(side.seqs[row], verb)(argument)


def share(row):
    def call(side):
        last = side.seqs[row].block_ids[-1:]
        side.pool.share(last)
        try:
            return plan(None, None, True)(side)
        finally:
            side.pool.release(last)

    return call


def step(sides, rng, ahead):
    """A step of a decoding loop, most often; sometimes anything else."""
    quiet = sides[0]
    rows = list(quiet.seqs)
    event = 3 * rng.random()
    seed = int(rng.integers(1 << 30))
    row = rows[int(rng.integers(len(rows)))] if rows else None
    if len(rows) < 6 and event < 0.25:
        same(sides, admit(int(rng.integers(1, 20)), seed))
    elif rows and event < 0.29:
        same(sides, leave(row, "remove" if event < 0.26 else "preempt"))
    elif rows and event < 0.31:
        same(sides, change(row, "truncate", int(rng.integers(0, 30))))
    elif rows and event < 0.32:
        same(sides, change(row, "discard_before", int(rng.integers(0, 8))))
    elif rows and event < 0.34:
        same(sides, change(row, "extend", rng.integers(0, 3, 3).tolist()))
    elif rows and event < 0.35:
        same(sides, share(row))
    elif rows and event < 0.36:
        parents = [rows[int(i)] for i in rng.integers(0, len(rows), len(rows))]
        same(sides, lambda side: side.batch.reorder(parents, rows))
    elif quiet.plans and event < 0.38:
        same(sides, rollback)
    elif quiet.plans and event < 0.40:
        same(sides, commit(0.5))
    elif (quiet.plans or quiet.ended) and event < 0.44:
        num = len(quiet.plans) + len(quiet.ended)
        same(sides, tell(int(rng.integers(num)), seed))
    elif rows and event < 0.46:
        same(sides, lambda side: side.batch.extend([row], [1]))
    elif rows and event < 0.50:
        subset = [r for r in rows if rng.random() < 0.7]
        same(sides, plan(subset, int(rng.integers(1, 4)), bool(rng.random() < 0.5)))
    else:
        decode(sides, seed, ahead)


def decode(sides, seed, ahead):
    made = same(sides, plan(None, None, True))
    if isinstance(made, dict):
        if ahead:
            same(sides, lambda side: side.batch.extend_unknown(made["logits_rows"]))
        # Rows that lost what they had pending (rolled back, cut) go on with any token.
        idle = [row for row in sides[0].seqs if row not in made["rows"]]
        same(sides, lambda side: side.batch.extend(idle, [1] * len(idle)))
    while len(sides[0].plans) > ahead:
        same(sides, commit(None))
        same(sides, tell(len(sides[0].ended) - 1, seed))


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [1, BLOCK_SIZE, 16])
def test_a_batch_that_is_looked_at_behaves_the_same(seed, ahead, block_size):
    rng = np.random.default_rng(seed)
    sides = [Side(looks, num_blocks=1200 // block_size, block_size=block_size) for looks in (False, True)]
    longest = 0
    for number in range(400):
        step(sides, rng, ahead)
        if number % 50 == 49:
            quiet, looked_at = (side.picture() for side in sides)
            assert quiet == looked_at
            longest = max([longest, *(computed for _, computed, _ in quiet[0].values())])
    while sides[0].plans:
        same(sides, commit(None))
    assert longest > 60


@pytest.mark.parametrize("kept", ["handles", "nothing"])
def test_a_token_may_come_late_or_never(kept):
    """Plans are told nothing for longer than a batch remembers by itself."""
    sides = [Side(looks, num_blocks=300, block_size=BLOCK_SIZE) for looks in (False, True)]
    for seed in range(3):
        same(sides, admit(7, seed))
    same(sides, plan(None, None, False))
    same(sides, commit(None))
    for _ in range(80):
        same(sides, lambda side: side.batch.extend([0, 1], [2, 2]))
        same(sides, plan([0, 1], None, False))
        same(sides, commit(None))
        if kept == "nothing":
            for side in sides:
                del side.ended[1:]
    assert same(sides, tell(0, 9)) == [False, False, True]  # row 2 has waited all the time
    same(sides, lambda side: side.seqs[0].truncate(20))
    if kept == "handles":
        # Of the step that stopped at 20 nothing was cut: its token still has a place.
        assert [same(sides, tell(back, 9))[0] for back in range(1, 41)].count(True) == 1
    assert sides[0].picture() == sides[1].picture()
