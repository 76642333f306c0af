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

    token: int
    remaining: int
    final: int  # tokens whose K and V it has in the end
    sequence: kv.Sequence | None = None


@dataclass(slots=True)
class _Request:
    """Several answers have one sequence, the prompt's, until that is computed and split into forks."""

    number: int
    prompt: int
    answers: list[_Answer]
    is_split: bool
    rows: list[int] = field(default_factory=list)  # of the answers, in their order
    is_new: bool = True  # its prompt has never been computed
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
        longest = min(workload.max_length, num_blocks * block_size)  # others are refused at the door
        self._batch = kv.Batch(self._pool, max_sequences=max_sequences, max_tokens_per_sequence=longest + 1)
        self._reserve = int(watermark * num_blocks)
        self._block_size = block_size
        self._running: dict[int, _Request] = {}  # in the order of admission
        self._waiting: dict[int, _Request] = {}  # who gave way, and who was refused for now
        self._num_prompts = 0  # requests in the batch that are new or not split
        self._rejoined: set[int] = set()  # requests whose answers may have a last block in common
        self._random = np.random.default_rng(workload.seed)
        self._blank_prompt = np.zeros(longest, np.int32)
        # By row.
        self._request_of: list[_Request | None] = [None] * max_sequences
        self._numbers = np.zeros(max_sequences, np.int64)
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
        """Whether all answers fit without sharing anything, and with a copy each."""
        width = self._workload.width
        blocks, _ = kv.block_layout(self._workload.kv_length(request), self._block_size)
        return width * (blocks + (width > 1)) <= self._pool.num_blocks

    def admit(self, number: int) -> bool:
        """Add its sequences if their blocks are there, and some more; alone it need not leave any."""
        if number not in self._waiting:
            self._waiting[number] = self._make(number)
        request = self._waiting[number]
        reserve = self._reserve + self._promised() if self._running else 0
        if self._blocks_needed(request) + reserve > self._pool.num_free:
            return False
        del self._waiting[number]
        self._running[number] = request
        self._num_prompts += request.is_new or not request.is_split
        for answer in request.answers:
            if answer.sequence is not None:
                self._add(request, answer.sequence, answer)
        return True

    def is_fragmented(self, request: int) -> bool:
        """Any block will do for anything."""
        return False

    def _promised(self) -> int:
        """A prompt takes its blocks piece by piece: what those that run have yet to take for theirs."""
        rows = self._rows()
        computing = rows[self._lengths[rows] < self._known[rows]]
        requests = {number: self._running[number] for number in self._numbers[computing].tolist()}
        return sum(self._blocks_needed(request) for request in requests.values())

    def _blocks_needed(self, request: _Request) -> int:
        """Of the free ones, for all that it knows and has not computed."""
        needed = sum(
            self._pool.blocks_needed(answer.sequence)
            for answer in request.answers
            if answer.sequence is not None
        )
        if request.is_split or request.is_new:
            return needed
        # What its answers had before they gave way, each with a last block of its own.
        whole = request.prompt // self._block_size
        ends = (
            kv.block_layout(request.prompt + self._generated(request, answer), self._block_size)[0]
            for answer in request.answers
        )
        return needed + sum(end - whole for end in ends)

    def _generated(self, request: _Request, answer: _Answer) -> int:
        return max(int(self._workload.trace.output_lengths[request.number]), 1) - answer.remaining

    def _make(self, number: int) -> _Request:
        workload = self._workload
        outputs = max(int(workload.trace.output_lengths[number]), 1)
        answers = [
            _Answer(workload.own_token(number, answer), outputs, workload.kv_length(number))
            for answer in range(workload.width)
        ]
        answers[0].sequence = self._prompt(number)
        prompt = int(workload.trace.prompt_lengths[number])
        return _Request(number, prompt, answers, is_split=workload.width == 1)

    def _prompt(self, number: int) -> kv.Sequence:
        # Without a cache nobody looks at the tokens.
        if self._prefix_cache:
            return self._pool.sequence(self._workload.prompt(number))
        return self._pool.sequence(self._blank_prompt[: self._workload.trace.prompt_lengths[number]])

    def _add(self, request: _Request, sequence: kv.Sequence, answer: _Answer) -> int:
        row = self._batch.add(sequence)
        request.rows.append(row)
        self._request_of[row] = request
        self._numbers[row] = request.number
        # What it found is not counted before its first step, which may find more.
        self._lengths[row] = sequence.num_computed
        self._known[row] = sequence.num_tokens
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
        first: list[int] = []
        if self._num_prompts:
            at_end = self._split(at_end, first)
        if self._workload.beams:
            at_end = self._reorder(at_end)
        self._batch.extend(at_end, self._tokens[at_end])
        self._remaining[at_end] -= 1
        finished = [
            number
            for row in at_end[self._remaining[at_end] == 0]
            if (number := self._finish(int(row))) is not None
        ]
        return Step(num_tokens, kv_tokens, usage, held_slots, table_slots, first, finished, preempted)

    def _usage(self) -> tuple[Usage, int]:
        """After a step every sequence has its last block for itself, but for full ones and `_rejoined`."""
        rows, pool, size = self._rows(), self._pool, self._block_size
        lengths = self._lengths[rows]
        unfilled = -lengths % size
        num_unfilled = int(unfilled.sum())
        table_slots = int(lengths.sum()) + num_unfilled
        reserved = int(np.minimum(unfilled, self._finals[rows] - lengths).sum())
        for number in list(self._rejoined):
            request = self._running[number]
            waiting = sum(self._lengths[row] == request.prompt for row in request.rows)
            if waiting < 2:
                self._rejoined.discard(number)
                continue
            again = (int(waiting) - 1) * (-request.prompt % size)  # all of them will be filled
            num_unfilled, reserved = num_unfilled - again, reserved - again
        usage = Usage(
            tokens=pool.num_referenced * size - num_unfilled,
            reserved=reserved,
            empty=num_unfilled - reserved + size,  # the null block's
            cached=pool.num_idle * size,
            free=pool.num_blank * size,
        )
        return usage, table_slots

    def _split(self, at_end: NDArray[np.int32], first: list[int]) -> NDArray[np.int32]:
        """Fork the answers of requests whose prompt is computed. The rows that get a token now.

        Appends to `first` those whose prompt was computed for the first time. Answers that had tokens already
        compute these first.
        """
        rows: list[int] = []
        for row in at_end.tolist():
            request = self._request_of[row]
            if request is None or not (request.is_new or not request.is_split):
                rows.append(row)
                continue
            self._num_prompts -= 1
            if request.is_new:
                first.append(request.number)
            parent = request.answers[0].sequence
            if request.is_split or parent is None:
                rows.append(row)
            else:
                for answer in request.answers[1:]:
                    answer.sequence = parent.fork()
                for answer in request.answers:
                    if answer.sequence is not None and (count := self._generated(request, answer)):
                        answer.sequence.extend(np.full(count, answer.token, np.int32))
                for answer in request.answers[1:]:
                    if answer.sequence is not None:
                        self._add(request, answer.sequence, answer)
                self._known[row] = parent.num_tokens
                if request.is_new:
                    rows += request.rows
                else:
                    self._rejoined.add(request.number)
            request.is_new, request.is_split = False, True
        return np.array(rows, np.int32)

    def _reorder(self, at_end: NDArray[np.int32]) -> NDArray[np.int32]:
        """Beams go on together, some of them from others' tokens. The rows that did."""
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
        self._rejoined.discard(request.number)
        return request.number

    def _preempt(self) -> int:
        """The youngest gives way. Several answers come back as their prompt, to share it again."""
        number, request = self._running.popitem()
        self._num_prompts -= request.is_new or not request.is_split
        for row, answer in zip(request.rows, request.answers, strict=False):
            answer.sequence = self._batch.preempt(row)
            answer.remaining = int(self._remaining[row])
            self._request_of[row] = None
        if request.is_split and self._workload.width > 1:
            for answer in request.answers:
                if answer.sequence is not None:
                    answer.sequence.free()
                    answer.sequence = None
            request.answers[0].sequence = self._prompt(number)
            request.is_split = False
        request.rows.clear()
        request.ready = 0
        self._rejoined.discard(number)
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
