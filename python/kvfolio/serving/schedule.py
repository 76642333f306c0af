"""Who runs and who waits, both ordered by age."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from dataclasses import dataclass

import torch

import kvfolio as kv

from .request import Answer


def new_generator(answer: Answer) -> torch.Generator:
    """The generator of an answer's first token."""
    return torch.Generator().manual_seed(answer.seed)


@dataclass(eq=False)
class Work:
    """What the engine keeps of an answer that waits or runs."""

    answer: Answer
    sequence: kv.Sequence
    generator: torch.Generator  # of its next token; never moved, only replaced
    to_fork: list[Answer]  # the other samples of a prompt that is not computed yet
    row: int = -1  # in the batch, while it runs
    cache_was_asked: bool = False  # since it was admitted

    @property
    def num_known(self) -> int:
        """Tokens of the prompt and the answer; what its sequence has beyond them is unknown or a draft."""
        return len(self.answer.request.prompt_token_ids) + len(self.answer.token_ids)

    @property
    def num_to_come(self) -> int:
        """The most tokens that the answer may still get."""
        return self.answer.request.max_tokens - len(self.answer.token_ids)

    def note_commit(self, sliding_window: int | None) -> None:
        """Some of its tokens have just been computed; behind the window, no later one will look at them."""
        request, sequence = self.answer.request, self.sequence
        if not self.cache_was_asked:  # now, since a first plan looks again for what others have published
            self.cache_was_asked = True
            if request.cached_tokens is None:
                request.cached_tokens = sequence.num_cached
            else:
                request.recovered_tokens += sequence.num_cached
        if sliding_window is not None:  # the next token sees itself and the window - 1 before it
            sequence.discard_before(max(0, sequence.num_computed + 1 - sliding_window))

    def cut_to_known(self) -> None:
        """Take back what is unknown or a draft; no plan in flight may have it."""
        if self.sequence.num_tokens > self.num_known:
            self.sequence.truncate(self.num_known)


class Schedule:
    """The waiting and the running, oldest first.

    Who is older never waits for who is younger: the oldest who waits is the next, and the youngest who runs
    gives way.
    """

    def __init__(self, batch: kv.Batch, *, reserve_blocks: int) -> None:
        self.batch = batch
        self.reserve_blocks = reserve_blocks
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []
        self.blocked: str | None = None  # what the oldest found too few of: blocks, rows
        self._works: dict[Answer, Work] = {}

    def __contains__(self, answer: Answer) -> bool:
        return answer in self._works

    def work_of(self, answer: Answer) -> Work | None:
        """None: the answer has ended, or is a sample that is not forked yet."""
        return self._works.get(answer)

    @property
    def answers(self) -> list[Answer]:
        """Of all who wait or run."""
        return list(self._works)

    def enqueue(self, work: Work) -> None:
        """Behind all others."""
        self._works[work.answer] = work
        self.waiting.append(work)

    def admit(self) -> None:
        """Start the oldest while there is room for all that is left to compute of them."""
        # A prompt takes its blocks piece by piece, so what the running ones have yet to take is spoken for;
        # so are the rows of samples that are not forked yet.
        pool = self.batch.pool
        promised = sum(pool.blocks_needed(work.sequence) for work in self.running)
        rows = sum(1 + len(work.to_fork) for work in self.running)
        self.blocked = None
        while self.waiting:
            work = self.waiting[0]
            needed, rows_needed = pool.blocks_needed(work.sequence), 1 + len(work.to_fork)
            reserve = self.reserve_blocks if self.running else 0
            if promised + needed + reserve > pool.num_free:
                self.blocked = "blocks"
                break
            if rows + rows_needed > self.batch.max_sequences:
                self.blocked = "rows"
                break
            self.waiting.popleft()
            self.start(work)
            work.cache_was_asked = False
            promised += pool.blocks_needed(work.sequence)  # less than before: it holds its hits now
            rows += rows_needed
            if work.answer.request.admitted_at is None:
                work.answer.request.admitted_at = time.perf_counter()

    def start(self, work: Work) -> None:
        """Give it a row of the batch."""
        self._works[work.answer] = work
        work.row = self.batch.add(work.sequence)
        insort(self.running, work, key=lambda work: work.answer.age)

    def fork(self, leader: Work) -> int:
        """Start the other samples of a prompt that has just been computed; returns how many.

        Rows were kept free for them.
        """
        count = len(leader.to_fork)
        while leader.to_fork:
            answer = leader.to_fork[0]
            self.start(Work(answer, leader.sequence.fork(), new_generator(answer), [], cache_was_asked=True))
            del leader.to_fork[0]
        return count

    def preempt(self) -> Work:
        """The youngest gives its blocks back: it is younger than who runs, older than who waits."""
        work = self.running[-1]
        self.batch.preempt(work.row)
        self.waiting.appendleft(self.running.pop())
        work.answer.num_preemptions += 1
        return work

    def let_go(self, answer: Answer) -> None:
        """A finished answer holds nothing."""
        work = self._works.pop(answer, None)
        if work is None:  # a sample that ends before the fork
            return
        if work in self.running:
            self.batch.remove(work.row)
            self.running.remove(work)
        else:
            self.waiting.remove(work)
        work.sequence.free()
