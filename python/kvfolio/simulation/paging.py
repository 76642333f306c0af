"""Paging: the product's own pool and batch, on a workload without a model.

Who runs and who gives way is decided as in the loop of the README: the oldest are admitted while there is
room, and when blocks run short the youngest request gives way with all its answers, and goes on later from
its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import kvfolio as kv

from .manager import Step, Usage
from .replay import make_pool
from .workload import Workload

WATERMARK = 0.01
"""The share of the blocks that admission leaves free for those that run already."""


@dataclass(slots=True)
class _Answer:
    """One sequence; `remaining`: tokens that it still has to get."""

    sequence: kv.Sequence
    token: int
    remaining: int
    final: int  # tokens whose K and V it has in the end


@dataclass(slots=True)
class _Request:
    number: int
    answers: list[_Answer]
    rows: list[int] = field(default_factory=list)
    is_new: bool = True  # its prompt has not been computed yet
    ready: int = 0  # beams that wait for the others before they go on


class PagingManager:
    """A `kvfolio.BlockPool` and a `kvfolio.Batch`, with or without its prefix cache.

    Parameters
    ----------
    workload : Workload
    num_blocks : int
        Usable ones; the null block comes on top.
    block_size, max_sequences : int
    prefix_cache : bool
    eviction : str
        One of `EVICTION_POLICIES`.
    watermark : float
        See `WATERMARK`.
    """

    def __init__(
        self,
        workload: Workload,
        num_blocks: int,
        block_size: int,
        *,
        max_sequences: int,
        prefix_cache: bool = False,
        eviction: str = "lru",
        watermark: float = WATERMARK,
    ) -> None:
        self.name = "paging+cache" if prefix_cache else "paging"
        self._workload = workload
        self._prefix_cache = prefix_cache
        self._pool = make_pool(num_blocks, block_size, prefix_cache=prefix_cache, eviction=eviction)
        # One more than it will ever have, so that the last token has its place though it is never computed.
        self._batch = kv.Batch(
            self._pool, max_sequences=max_sequences, max_tokens_per_sequence=workload.max_length + 1
        )
        self._reserve = int(watermark * num_blocks)
        self._block_size = block_size
        self._running: dict[int, _Request] = {}  # in the order of admission
        self._waiting: dict[int, _Request] = {}  # who gave way, and who was refused for now
        self._num_new = 0
        self._random = np.random.default_rng(workload.seed)
        self._blank_prompt = np.zeros(workload.max_length, np.int32)
        # By row.
        self._request_of: list[_Request | None] = [None] * max_sequences
        self._lengths = np.zeros(max_sequences, np.int64)
        self._known = np.zeros(max_sequences, np.int64)  # tokens at its admission
        self._finals = np.zeros(max_sequences, np.int64)
        self._remaining = np.zeros(max_sequences, np.int64)
        self._tokens = np.zeros(max_sequences, np.int32)
        self._order: NDArray[np.int64] | None = None

    @property
    def num_slots(self) -> int:
        """Slots of the memory, the null block's included."""
        return self._pool.num_physical_blocks * self._block_size

    def can_ever_hold(self, request: int) -> bool:
        """Whether all answers fit without sharing anything, as after they gave way, and with a copy each."""
        width = self._workload.width
        blocks, _ = kv.block_layout(self._workload.kv_length(request), self._block_size)
        return width * (blocks + (width > 1)) <= self._pool.num_blocks

    def admit(self, number: int) -> bool:
        """Add its sequences if their blocks are there, and some more; alone it need not leave any."""
        if number not in self._waiting:
            self._waiting[number] = self._make(number)
        request = self._waiting[number]
        needed = sum(self._pool.blocks_needed(answer.sequence) for answer in request.answers)
        reserve = self._reserve + self._promised() if self._running else 0
        if needed + reserve > self._pool.num_free:
            return False
        del self._waiting[number]
        self._running[number] = request
        self._num_new += request.is_new
        for answer in request.answers:
            self._add(request, answer)
        return True

    def is_fragmented(self, request: int) -> bool:
        """Any block will do for anything."""
        return False

    def _promised(self) -> int:
        """A prompt takes its blocks piece by piece: what those that run have yet to take for theirs."""
        rows = self._rows()
        computing = rows[self._lengths[rows] < self._known[rows]]
        requests = [(self._request_of[row], row) for row in computing]
        return sum(
            self._pool.blocks_needed(request.answers[request.rows.index(row)].sequence)
            for request, row in requests
            if request is not None
        )

    def _make(self, number: int) -> _Request:
        workload = self._workload
        length = int(workload.trace.prompt_lengths[number])
        # Without a cache nobody looks at them.
        tokens = workload.prompt(number) if self._prefix_cache else self._blank_prompt[:length]
        outputs = max(int(workload.trace.output_lengths[number]), 1)
        answer = _Answer(
            self._pool.sequence(tokens),
            workload.own_token(number, 0),
            outputs,
            workload.kv_length(number),
        )
        return _Request(number, [answer])

    def _add(self, request: _Request, answer: _Answer) -> int:
        row = self._batch.add(answer.sequence)
        request.rows.append(row)
        self._request_of[row] = request
        # What it found is not counted before its first step, which may find more.
        self._lengths[row] = answer.sequence.num_computed
        self._known[row] = answer.sequence.num_tokens
        self._finals[row] = answer.final
        self._remaining[row] = answer.remaining
        self._tokens[row] = answer.token
        self._order = None
        return row

    def _rows(self) -> NDArray[np.int64]:
        if self._order is None:
            rows = [row for request in self._running.values() for row in request.rows]
            self._order = np.array(rows, np.int64)
        return self._order

    def step(self, max_tokens: int) -> Step:
        """One `Plan`, committed; before that the youngest give way until it fits."""
        preempted: list[int] = []
        while self._batch.shortfall(max_tokens, rows=self._rows()) > 0:
            preempted.insert(0, self._preempt())
        plan = self._batch.plan(max_tokens, rows=self._rows())
        rows, seq_lens, at_end = plan.rows, plan.seq_lens, plan.logits_rows
        num_tokens, kv_tokens = plan.num_tokens, int(seq_lens.sum())
        plan.commit()
        self._lengths[rows] = seq_lens
        usage, table_slots = self._usage()
        held_slots = self._pool.num_referenced * self._block_size
        first = self._fork_new(at_end) if self._num_new else []
        if self._workload.beams:
            at_end = self._reorder(at_end)
        else:
            plan.extend(self._tokens[at_end])
        if first and self._workload.width > 1:
            at_end = self._extend_forks(first, at_end)
        self._remaining[at_end] -= 1
        finished = [
            number
            for row in at_end[self._remaining[at_end] == 0]
            if (number := self._finish(int(row))) is not None
        ]
        return Step(num_tokens, kv_tokens, usage, held_slots, table_slots, first, finished, preempted)

    def _usage(self) -> tuple[Usage, int]:
        """After a step every sequence has its last block for itself, unless that is full."""
        rows, pool, size = self._rows(), self._pool, self._block_size
        lengths = self._lengths[rows]
        unfilled = -lengths % size
        num_unfilled = int(unfilled.sum())
        reserved = int(np.minimum(unfilled, self._finals[rows] - lengths).sum())
        usage = Usage(
            tokens=pool.num_referenced * size - num_unfilled,
            reserved=reserved,
            empty=num_unfilled - reserved + size,  # the null block's
            cached=pool.num_idle * size,
            free=pool.num_blank * size,
        )
        return usage, int(lengths.sum()) + num_unfilled

    def _fork_new(self, at_end: NDArray[np.int32]) -> list[int]:
        """The requests whose prompt is computed; those of several answers go on as so many forks."""
        first = []
        for row in at_end:
            request = self._request_of[row]
            if request is None or not request.is_new:
                continue
            request.is_new = False
            self._num_new -= 1
            first.append(request.number)
            (parent,) = request.answers
            for answer in range(1, self._workload.width):
                fork = _Answer(
                    parent.sequence.fork(),
                    self._workload.own_token(request.number, answer),
                    parent.remaining,
                    parent.final,
                )
                request.answers.append(fork)
                self._add(request, fork)
            request.ready = len(request.rows) - 1  # beams: the parent's row counts itself
        return first

    def _extend_forks(self, first: list[int], at_end: NDArray[np.int32]) -> NDArray[np.int32]:
        """New forks get their first token, too; beams have it already."""
        if self._workload.beams:
            return at_end
        forks = np.array([row for number in first for row in self._running[number].rows[1:]], np.int32)
        self._batch.extend(forks, self._tokens[forks])
        return np.concatenate([at_end, forks])

    def _reorder(self, at_end: NDArray[np.int32]) -> NDArray[np.int32]:
        """Beams go on together: some from others' tokens, each with a token of its own. The rows that did."""
        together: list[int] = []
        parents: list[int] = []
        for row in at_end:
            request = self._request_of[row]
            if request is None:
                continue
            request.ready += 1
            if request.ready < len(request.rows):
                continue  # some of them are still being computed anew
            request.ready = 0
            mine = np.array(request.rows)
            others = mine[self._random.integers(0, len(mine), len(mine))]
            turns = self._random.random(len(mine)) < self._workload.beam_turnover
            together += request.rows
            parents += np.where(turns, others, mine).tolist()
        rows = np.array(together, np.int32)
        moved = rows != np.array(parents, np.int32)
        if moved.any():
            self._batch.reorder(np.array(parents, np.int32)[moved], rows[moved])
        self._batch.extend(rows, self._tokens[rows])
        return rows

    def _finish(self, row: int) -> int | None:
        """Free a row's sequence; the number of its request if that was the last."""
        request = self._request_of[row]
        if request is None:
            raise RuntimeError(f"row {row} ended without a request")
        self._batch.remove(row).free()
        del request.answers[request.rows.index(row)]
        request.rows.remove(row)
        self._request_of[row] = self._order = None
        if request.rows:
            return None
        del self._running[request.number]
        return request.number

    def _preempt(self) -> int:
        """The youngest gives way."""
        number, request = self._running.popitem()
        for row, answer in zip(request.rows, request.answers, strict=True):
            answer.sequence = self._batch.preempt(row)
            answer.remaining = int(self._remaining[row])
            self._request_of[row] = None
        request.rows.clear()
        request.ready = 0
        self._num_new -= request.is_new
        self._waiting[number] = request
        self._order = None
        return number

    def hit_rate(self) -> float | None:
        """Tokens found of all that were looked up, those of requests that came back included."""
        if not self._prefix_cache:
            return None
        stats = self._pool.stats()
        return stats["hit_tokens"] / stats["queried_tokens"] if stats["queried_tokens"] else 0.0

    def close(self) -> None:
        """Check the pool, and that all memory came back."""
        self._pool.audit()
        if self._running or self._waiting or self._pool.num_referenced or self._pool.num_quarantined:
            raise RuntimeError(f"{self.name}: not all memory came back: {self._pool!r}")
