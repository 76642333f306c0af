"""Anything that a serving loop may do to a small pool, at random, and who remembers what may be cached."""

from __future__ import annotations

import random
from collections import Counter

import kvfolio as kv


class Workload:
    """Few tokens and few beginnings, so that sequences meet, merge, fork and push each other out."""

    def __init__(self, pool: kv.BlockPool, seed: int) -> None:
        self.pool, self.random = pool, random.Random(seed)
        self.batch = kv.Batch(pool, max_sequences=6, max_tokens_per_sequence=pool.block_size * 8)
        self.waiting: list[kv.Sequence] = []
        self.rows: dict[int, kv.Sequence] = {}
        self.plans: list[kv.Plan] = []
        self.lent: list[list[int]] = []
        self.errors = Counter[tuple[str, str]]()
        self.texts: list[list[int]] = []  # all that ever was

    def step(self) -> None:
        """One call, or one that is refused."""
        actions = 2 * [self.submit, self.extend, self.resolve, self.give_back]
        actions += 4 * [self.admit, self.plan, self.end]
        actions += [self.fork, self.preempt, self.leave, self.cut, self.discard, self.lend]
        action = self.random.choice(actions)
        try:
            action()
        except (kv.KVFolioError, ValueError, LookupError) as error:
            self.errors[action.__name__, type(error).__name__] += 1
        for sequence in self.rows.values():
            self.remember(sequence)

    def remember(self, sequence: kv.Sequence) -> None:
        text = sequence.token_ids.tolist()
        if -1 not in text and text not in self.texts[-20:]:
            self.texts.append(text)

    def row(self) -> int:
        return self.random.choice(list(self.rows) or [99])

    def submit(self) -> None:
        if len(self.waiting) > 4:
            return
        size = self.pool.block_size
        length = self.random.randrange(1, size * 5)
        tokens = [self.random.randrange(2) if i < size else 0 for i in range(length)]
        if self.random.random() < 0.3:
            tokens[-1] = 1
        flags = {"write_cache": False} if self.random.random() < 0.1 else {}
        if self.random.random() < 0.1:
            flags["read_cache"] = False
        sequence = self.pool.sequence(tokens, **flags)
        self.remember(sequence)
        self.waiting.append(sequence)

    def admit(self) -> None:
        if self.waiting:
            row = self.batch.add(self.waiting[0])
            self.rows[row] = self.waiting.pop(0)

    def plan(self) -> None:
        if len(self.plans) < 3:
            self.plans.append(self.batch.plan(self.random.randrange(1, 40), partial=True))

    def end(self) -> None:
        if self.plans:
            plan = self.plans.pop(0)
            if self.random.random() < 0.15:
                plan.rollback()
            elif self.random.random() < 0.2 and len(plan.rows):
                counts = [
                    int(b - a) for a, b in zip(plan.query_start_loc, plan.query_start_loc[1:], strict=False)
                ]
                plan.commit([self.random.randint(0, count) for count in counts])
            else:
                plan.commit()

    def extend(self) -> None:
        sequence = self.rows[self.row()] if self.rows else self.waiting[0]
        if self.random.random() < 0.3:
            sequence.extend(1)
        else:
            sequence.extend([self.random.randrange(2) for _ in range(self.random.randrange(1, 4))])

    def resolve(self) -> None:
        self.rows[self.row()].resolve([self.random.randrange(2)])

    def fork(self) -> None:
        fork = self.rows[self.row()].fork()
        self.rows[self.batch.add(fork)] = fork

    def preempt(self) -> None:
        row = self.row()
        self.waiting.append(self.batch.preempt(row))
        del self.rows[row]

    def leave(self) -> None:
        row = self.row()
        self.batch.remove(row).free()
        del self.rows[row]

    def cut(self) -> None:
        sequence = self.rows[self.row()]
        sequence.truncate(self.random.randint(0, sequence.num_tokens))

    def discard(self) -> None:
        sequence = self.rows[self.row()]
        sequence.discard_before(self.random.randint(0, sequence.num_computed))

    def lend(self) -> None:
        self.lent.append(self.pool.allocate(self.random.randrange(1, 6)).tolist())

    def give_back(self) -> None:
        if self.lent:
            self.pool.release(self.lent.pop())
        if self.random.random() < 0.03:
            self.pool.reset_prefix_cache()

    def close(self) -> None:
        """No plan is in flight any more."""
        while self.plans:
            self.plans.pop(0).rollback()
