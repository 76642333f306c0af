"""Continuous batching over a paged KV cache: the loop.

One step, whole:

    admit      waiting requests, oldest first, while the pool has room for all that is still to be computed
    make room  while the step does not fit, the youngest gives its blocks back and waits in front of the queue
    plan       everybody's next token, then pieces of the prompts, up to `max_tokens_per_step`
    compute    the model writes and reads KV by the plan, tokens are drawn; the plan commits
    take       fork for `n` samples, the token of each row whose prompt is done, stop conditions

Who is older never waits for who is younger: the waiting queue and the running list are both ordered by age,
and the youngest gives way. So the oldest always goes on, and since every request fits the pool alone
(others are refused at the door), all of them end.
"""

from __future__ import annotations

import secrets
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import torch
from transformers import PreTrainedModel

import kvfolio as kv
from kvfolio import _checks

from .door import check_request, check_step, check_tokenizer, longest_sequence
from .figures import EngineStats, Meter
from .hf_model import PagedModel
from .request import Answer, Event, FinishReason, Request
from .sampling import MAX_SEED, SamplingParams, sample
from .text import TextStream, Tokenizer
from .token_ids import TokenIds


@dataclass(eq=False)
class _Work:
    """What the engine keeps of an answer that waits or runs."""

    answer: Answer
    sequence: kv.Sequence
    generator: torch.Generator
    to_fork: list[Answer]  # the other samples of a prompt that is not computed yet
    row: int = -1  # in the batch, while it runs
    cache_was_asked: bool = False  # since it was admitted


class _Drawn(NamedTuple):
    """A token for an answer, and the generator as it is after the draw."""

    token_id: int
    generator: torch.Generator


class Engine:
    """Serves one causal LM to many requests at once. It belongs to one thread.

    `model`: any causal LM of transformers that attends through its attention interface; its weights, device
    and dtype stay as they are. Raises UnsupportedModel if its cache is of another kind.
    `num_blocks`, `block_size`: of the pool, which the engine owns; KV storage for it is allocated here.
    `max_sequences`: how many answers are computed at once, at most.
    `max_tokens_per_step`: of all rows together; at least `max_sequences`, so that no answer stands still
    while prompts are computed, which are cut into pieces of what is left.
    `max_tokens_per_sequence`: prompt and answer; by default what the model is made for, or what the pool
    holds.
    `reserve_blocks`: stay free at admissions while anything runs, so that the running ones can grow for a
    while before somebody has to give way; by default a twentieth of the pool.
    `tokenizer`: for texts and stop strings; without one there are token ids only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_sequences: int = 16,
        max_tokens_per_step: int = 512,
        max_tokens_per_sequence: int | None = None,
        reserve_blocks: int | None = None,
        prefix_cache: bool = True,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        num_blocks = _checks.integer("num_blocks", num_blocks, 1)
        block_size = _checks.integer("block_size", block_size, 1)
        if reserve_blocks is None:
            reserve_blocks = num_blocks // 20
        self.reserve_blocks = _checks.integer("reserve_blocks", reserve_blocks, 0)
        self.max_sequences, self.max_tokens_per_step = check_step(max_sequences, max_tokens_per_step)
        self.tokenizer = check_tokenizer(tokenizer)
        self.model = PagedModel(model)
        self.pool = kv.BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
        self.max_tokens_per_sequence = longest_sequence(
            max_tokens_per_sequence, self.pool, self.model.max_positions
        )
        self.cache = self.model.make_cache(self.pool)
        self._batch = kv.Batch(
            self.pool, max_sequences=self.max_sequences, max_tokens_per_sequence=self.max_tokens_per_sequence
        )
        self._work: dict[Answer, _Work] = {}  # of all who wait or run
        self._waiting: deque[_Work] = deque()  # oldest first, as is the next
        self._running: list[_Work] = []
        self._drawn: dict[Answer, _Drawn] = {}  # not taken yet; void where the plan was rolled back
        self._undelivered: deque[Event] = deque()
        self._num_submitted = 0
        reservation, _ = kv.block_layout(self.max_tokens_per_sequence, block_size)
        self._meter = Meter(blocks_per_reservation=reservation)

    def __repr__(self) -> str:
        return (
            f"<Engine: {len(self._running)} running, {len(self._waiting)} waiting, "
            f"{self.pool.num_free}/{self.pool.num_blocks} blocks of {self.pool.block_size} free>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for answer in list(self._work):
            self.cancel(answer.request)
        self._deliver()

    # Requests

    def submit(
        self,
        prompt_token_ids: TokenIds,
        params: SamplingParams | None = None,
        *,
        context: kv.Context | None = None,
        on_token: Callable[[Event], None] | None = None,
    ) -> Request:
        """Queue a prompt; `on_token` is called with each of its events at the end of a step.

        `context`: what KV depends on besides the tokens (adapter, tenant, pictures); prompts under unequal
        contexts share no block.

        Raises RequestRefused for what this engine could never finish: more tokens than
        `max_tokens_per_sequence` (a prompt and its `max_tokens` together: an answer that is bound to be cut
        short is refused, not cut), or more samples than `max_sequences`. Raises TypeError for a prompt that
        is no flat sequence of integers (a list, a tuple, an array or a tensor), ValueError for token ids
        outside the vocabulary, and for stop strings without a tokenizer.
        """
        params = SamplingParams() if params is None else params
        prompt, max_tokens = check_request(
            prompt_token_ids,
            params,
            on_token,
            vocabulary_size=self.model.vocabulary_size,
            max_tokens_per_sequence=self.max_tokens_per_sequence,
            max_sequences=self.max_sequences,
            has_tokenizer=self.tokenizer is not None,
        )
        streams = [
            None if self.tokenizer is None else TextStream(self.tokenizer, params.stop)
            for _ in range(params.n)
        ]
        request = Request(
            self,
            self._num_submitted,
            prompt,
            params,
            max_tokens=max_tokens,
            seed=secrets.randbelow(MAX_SEED - params.n) if params.seed is None else params.seed,
            stop_token_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self.model.eos_token_ids),
            text_streams=streams,
            on_token=on_token,
            submitted_at=time.perf_counter(),
        )
        leader, *others = request.answers
        sequence = self.pool.sequence(prompt, context=context)
        self._num_submitted += 1
        self._work[leader] = _Work(leader, sequence, _generator(leader), others)
        self._waiting.append(self._work[leader])
        return request

    def cancel(self, request: Request) -> None:
        """See Request.cancel."""
        self._own(request)
        for answer in request.answers:
            if not answer.is_finished:
                self._end(answer, FinishReason.CANCELLED)

    def stream(self, request: Request) -> Iterator[Event]:
        """The request's events from the first on; steps the engine, for everybody, while there are no more.

        Raises the request's error, if it failed, after the last event.
        """
        self._own(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Event]:
        delivered = 0
        while True:
            while delivered < len(request.events):
                yield request.events[delivered]
                delivered += 1
            if request.is_finished:
                break
            self.step()
        if request.error is not None:
            raise request.error

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.has_work:
            self.step()

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits, or an event is not delivered yet (see `submit`, `step`)."""
        return bool(self._running or self._waiting or self._undelivered)

    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return self._meter.read(self.pool, running=len(self._running), waiting=len(self._waiting))

    # One step

    def step(self) -> list[Event]:
        """Compute one step for all that fit; returns the events since the last one, tokens and ends.

        If the model or a draw raises, the plan is rolled back and its rows are tried again in halves, until
        each row that fails by itself is found. Their requests end with `Request.error`, as do those whose
        text or callback raises; the others have computed what they would have. What is no Exception, such
        as a keyboard interrupt, goes through: a plan that it comes upon is rolled back, tokens of one that
        stands are kept, and the next step goes on from there.
        """
        began = time.perf_counter()
        self._take_tokens()  # of a step that was interrupted
        self._admit()
        self._make_room()
        if self._running:
            self._compute(self._batch.plan(self.max_tokens_per_step, rows=self._rows()))
            self._meter.steps += 1
            self._meter.look(self.pool, [work.sequence for work in self._running])
            self._take_tokens()
        events = self._deliver()
        self._meter.busy_time += time.perf_counter() - began
        return events

    def _rows(self) -> list[int]:
        """In what order they share the step's tokens: who decodes goes first, so that no prompt stops it."""
        return [work.row for work in sorted(self._running, key=lambda work: work.sequence.num_pending > 1)]

    def _admit(self) -> None:
        # A prompt takes its blocks piece by piece, so what the running ones have yet to take is spoken for;
        # so are the rows of samples that are not forked yet.
        promised = sum(self.pool.blocks_needed(work.sequence) for work in self._running)
        rows = sum(1 + len(work.to_fork) for work in self._running)
        while self._waiting:
            work = self._waiting[0]
            needed, rows_needed = self.pool.blocks_needed(work.sequence), 1 + len(work.to_fork)
            reserve = self.reserve_blocks if self._running else 0
            if promised + needed + reserve > self.pool.num_free or rows + rows_needed > self.max_sequences:
                break
            self._waiting.popleft()
            self._start(work)
            work.cache_was_asked = False
            promised += self.pool.blocks_needed(work.sequence)  # less than before: it holds its hits now
            rows += rows_needed
            if work.answer.request.admitted_at is None:
                work.answer.request.admitted_at = time.perf_counter()
        if not self._running and self._waiting:  # somebody else has the blocks: it could wait for ever
            work = self._waiting[0]
            self._fail(work.answer, self._out_of_blocks(self.pool.blocks_needed(work.sequence)))

    def _start(self, work: _Work) -> None:
        work.row = self._batch.add(work.sequence)
        insort(self._running, work, key=lambda work: work.answer.age)

    def _make_room(self) -> None:
        if not self._running:
            return
        while missing := self._batch.shortfall(self.max_tokens_per_step, rows=self._rows()):
            youngest = self._running[-1]
            if len(self._running) == 1:
                self._fail(youngest.answer, self._out_of_blocks(self.pool.num_free + missing))
                return
            self._preempt(youngest)

    def _preempt(self, work: _Work) -> None:
        self._batch.preempt(work.row)
        work.answer.num_preemptions += 1
        self._meter.preemptions += 1
        self._running.remove(work)
        self._waiting.appendleft(work)  # it is younger than who runs, older than who waits

    def _compute(self, plan: kv.Plan) -> None:
        """Run the model on a plan and draw its tokens, in parts if that fails."""
        running = {work.row: work for work in self._running}
        works = [running[row] for row in plan.rows.tolist()]
        try:
            with plan:
                logits = self.model.forward(plan, self.cache)
                self._draw([running[row] for row in plan.logits_rows.tolist()], logits)
        except Exception as error:
            self._meter.failed_steps += 1
            counts = (plan.query_start_loc[1:] - plan.query_start_loc[:-1]).tolist()
            if len(works) == 1:
                self._fail(works[0].answer, error)
                return
            half = len(works) // 2
            for part in (slice(half), slice(half, None)):
                self._compute_some(works[part], counts[part])
            return
        self._meter.computed_tokens += plan.num_tokens
        for work in works:
            self._settle(work)

    def _compute_some(self, works: list[_Work], counts: list[int]) -> None:
        """Some rows of a failed plan again, so many tokens of each."""
        alive = [
            (work.row, count)
            for work, count in zip(works, counts, strict=True)
            if not work.answer.is_finished
        ]  # others have ended with a sample of the same request
        if alive:
            rows, counts = map(list, zip(*alive, strict=True))
            self._compute(self._batch.plan(rows=rows, num_tokens=counts))

    def _draw(self, works: list[_Work], logits: torch.Tensor) -> None:
        """A token for each row of `logits`, [m, vocabulary], and for each sample to be forked from it.

        It comes before the commit, and the generators move on after it: a draw that does not count is as if
        it had not been.
        """
        for work, row_logits in zip(works, logits, strict=True):
            generators = {work.answer: work.generator.clone_state()}
            generators |= {answer: _generator(answer) for answer in work.to_fork}
            for answer, generator in generators.items():
                self._drawn[answer] = _Drawn(sample(row_logits, answer.request.params, generator), generator)

    def _take_tokens(self) -> None:
        """Give each answer what was drawn for it, if that was committed; then the row has nothing pending.

        A token is forgotten only after it was taken, so that an interrupt loses none.
        """
        while self._drawn:
            answer, drawn = next(iter(self._drawn.items()))
            work = self._work.get(answer)
            if work is not None and work.sequence.num_pending == 0:
                self._fork(work)
                self._take_token(work, drawn)
            del self._drawn[answer]

    def _take_token(self, work: _Work, drawn: _Drawn) -> None:
        answer = work.answer
        try:
            event = answer._take(drawn.token_id, time.perf_counter())
        except Exception as error:
            self._fail(answer, error)
            return
        work.generator = drawn.generator
        self._meter.output_tokens += 1
        self._emit(event)
        if answer.is_finished:
            self._let_go(answer)
        else:
            self._batch.extend([work.row], [drawn.token_id])

    def _fork(self, leader: _Work) -> None:
        """Make the other samples of a prompt that has just been computed; their rows were kept free."""
        samples, leader.to_fork = leader.to_fork, []
        for answer in samples:
            work = _Work(answer, leader.sequence.fork(), _generator(answer), [], cache_was_asked=True)
            self._work[answer] = work
            self._start(work)
        self._meter.forks += len(samples)

    def _emit(self, event: Event) -> None:
        event.request.events.append(event)
        self._undelivered.append(event)

    def _deliver(self) -> list[Event]:
        """Hand out what happened, now that the engine is in order: a callback may cancel and submit."""
        delivered: list[Event] = []
        while self._undelivered:
            event = self._undelivered.popleft()
            delivered.append(event)
            on_token = event.request.on_token
            if on_token is not None:
                try:
                    on_token(event)
                except Exception as error:
                    event.request.on_token = None
                    self._fail(event.answer, error)
        return delivered

    # Endings

    def _fail(self, answer: Answer, error: BaseException) -> None:
        """An error ends the whole request: a part of its samples is not what was asked for."""
        request = answer.request
        if request.error is None:
            request.error = error
        for sibling in request.answers:
            if not sibling.is_finished:
                self._end(sibling, FinishReason.ERROR)

    def _end(self, answer: Answer, reason: FinishReason) -> None:
        answer.finish_reason = reason
        self._let_go(answer)
        self._emit(answer._rest())

    def _let_go(self, answer: Answer) -> None:
        """A finished answer holds nothing."""
        work = self._work.pop(answer, None)
        if work is not None:  # else it is a sample that ends before the fork
            if work in self._running:
                self._batch.remove(work.row)
                self._running.remove(work)
            else:
                self._waiting.remove(work)
            work.sequence.free()
        if answer.request.is_finished:
            self._meter.finished_requests += 1

    # Odds and ends

    def _own(self, request: Request) -> None:
        if request._engine is not self:
            raise ValueError(f"request must be one of this engine's own, not {request!r} of another")

    def _settle(self, work: _Work) -> None:
        """What follows from a commit."""
        request, sequence, window = work.answer.request, work.sequence, self.model.layout.sliding_window
        if not work.cache_was_asked:  # now, since a first plan looks again for what others have published
            work.cache_was_asked = True
            if request.cached_tokens is None:
                request.cached_tokens = sequence.num_cached
            else:
                request.recovered_tokens += sequence.num_cached
        if window is not None:  # the next token sees itself and the window - 1 before it
            sequence.discard_before(max(0, sequence.num_computed + 1 - window))

    def _out_of_blocks(self, needed: int) -> kv.OutOfBlocks:
        return kv.OutOfBlocks(needed, self.pool.num_free, self.pool.num_quarantined, ever_fits=True)


def _generator(answer: Answer) -> torch.Generator:
    return torch.Generator().manual_seed(answer.seed)
