"""Continuous batching over a paged KV cache: the loop.

One step, whole:

    admit      waiting requests, oldest first, while the pool has room for all that is still to be computed
    run ahead  who gets a token from a step in flight gets a place for it
    make room  while the step does not fit, end those in flight; then the youngest gives its blocks back and
               waits in front of the queue
    draft      guess how answers go on, if there is a drafter
    fly        plan everybody's next token, then pieces of the prompts, up to `max_tokens_per_step`; the
               model writes and reads KV by the plan, tokens are drawn (`flight.py`)
    land       end the oldest step in flight if there are more than `run_ahead`: commit, fork for `n`
               samples, give each answer its tokens, stop conditions

With `run_ahead=0` a step lands in the call that launched it. With more, the model computes the next ones
meanwhile, in a thread of its own. Who is older never waits for who is younger (`schedule.py`), so the oldest
always goes on, and since every request fits the pool alone (others are refused at the door), all of them end.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

from transformers import PreTrainedModel

import kvfolio as kv
from kvfolio import _checks

from .door import check_bandwidth, check_loop, check_request, check_step, check_tokenizer, longest_sequence
from .figures import EngineStats, Meter
from .flight import Flight, InThisThread
from .hf_model import PagedModel
from .request import Answer, Event, FinishReason, Request, check_owner
from .sampling import MAX_SEED, SamplingParams
from .schedule import Schedule, Work, new_generator
from .speculation import Drafter, propose
from .text import TextStream, Tokenizer
from .token_ids import TokenIds


class Engine:
    """Serves one causal LM to many requests at once. It belongs to one thread.

    `model`: any causal LM of transformers that attends through its attention interface; its weights, device
    and dtype stay as they are. Raises UnsupportedModel if its cache is of another kind.
    `num_blocks`, `block_size`: of `pool`, which the engine owns; KV storage for it is allocated here.
    `max_sequences`: how many answers are computed at once, at most.
    `max_tokens_per_step`: of all rows together; at least `max_sequences`, so that no answer stands still
    while prompts are computed, which are cut into pieces of what is left.
    `max_tokens_per_sequence`: prompt and answer; by default what the model is made for, or what the pool
    holds.
    `reserve_blocks`: stay free at admissions while anything runs, so that the running ones can grow for a
    while before somebody has to give way; by default a twentieth of the pool.
    `tokenizer`: for texts and stop strings; without one there are token ids only.
    `run_ahead`: how many steps may be computed while the tokens of the one before are not looked at yet. An
    answer that turns out to have ended costs its place in that many steps. Above 0 the model is at work in
    another thread between two calls, until `has_work` is False or `with` is left: use it for nothing else.
    `speculation`: guesses how answers go on (see `Drafter`); what was right comes out of one step together.
    It needs the tokens that run_ahead does not wait for, so ValueError for both.
    `prefix_cache`: whether requests find what others have computed. `eviction`: which of it gives way first
    (see `BlockPool`). `events`: the pool's can be published (see `kvfolio.events`). `memory_bandwidth`: of
    the model's device, in bytes per second; only for the verdict of `stats`.
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
        eviction: str = "lru",
        tokenizer: Tokenizer | None = None,
        run_ahead: int = 0,
        speculation: Drafter | None = None,
        events: bool = False,
        memory_bandwidth: float | None = None,
    ) -> None:
        num_blocks = _checks.integer("num_blocks", num_blocks, 1)
        block_size = _checks.integer("block_size", block_size, 1)
        if reserve_blocks is None:
            reserve_blocks = num_blocks // 20
        self.reserve_blocks = _checks.integer("reserve_blocks", reserve_blocks, 0)
        self.max_sequences, self.max_tokens_per_step = check_step(max_sequences, max_tokens_per_step)
        self.tokenizer = check_tokenizer(tokenizer)
        self.run_ahead, self.speculation = check_loop(run_ahead, speculation)
        self.model = PagedModel(model)
        self.pool = kv.BlockPool(
            num_blocks, block_size, prefix_cache=prefix_cache, eviction=eviction, events=events
        )
        self.max_tokens_per_sequence = longest_sequence(
            max_tokens_per_sequence, self.pool, self.model.max_positions
        )
        self.cache = self.model.make_cache(self.pool)
        self._batch = kv.Batch(
            self.pool, max_sequences=self.max_sequences, max_tokens_per_sequence=self.max_tokens_per_sequence
        )
        self._schedule = Schedule(self._batch, reserve_blocks=self.reserve_blocks)
        self._flights: deque[Flight] = deque()  # oldest first; they land in this order
        # Its thread ends with the engine.
        self._executor: Executor = ThreadPoolExecutor(1, "kvfolio-step") if self.run_ahead else InThisThread()
        self._must_roll_back = False  # a launch or a rollback was interrupted
        self._undelivered: deque[Event] = deque()
        self._num_submitted = 0
        reservation, _ = kv.block_layout(self.max_tokens_per_sequence, block_size)
        self._meter = Meter(
            blocks_per_reservation=reservation,
            token_budget=self.max_tokens_per_step,
            bytes_read=(self.model.num_bytes, self.model.layout.bytes_per_token),
            memory_bandwidth=check_bandwidth(memory_bandwidth),
        )

    def __repr__(self) -> str:
        return (
            f"<Engine: {len(self._schedule.running)} running, {len(self._schedule.waiting)} waiting, "
            f"{self.pool.num_free}/{self.pool.num_blocks} blocks of {self.pool.block_size} free>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for answer in self._schedule.answers:
            self.cancel(answer.request)
        while self._flights:
            self._land()
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
        self._schedule.enqueue(Work(leader, sequence, new_generator(leader), others))
        return request

    def cancel(self, request: Request) -> None:
        """See Request.cancel."""
        check_owner(request, self)
        for answer in request.answers:
            if not answer.is_finished:
                self._end(answer, FinishReason.CANCELLED)

    def stream(self, request: Request) -> Iterator[Event]:
        """The request's events from the first on; steps the engine, for everybody, while there are no more.

        Raises the request's error, if it failed, after the last event.
        """
        check_owner(request, self)
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
        """Whether anything runs, waits or is in flight, or an event is not delivered yet (see `submit`)."""
        return bool(self._schedule.running or self._schedule.waiting or self._flights or self._undelivered)

    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        schedule = self._schedule
        return self._meter.read(self.pool, running=len(schedule.running), waiting=len(schedule.waiting))

    # One step

    def step(self) -> list[Event]:
        """Launch a step and land the one that is due; returns the events since the last call.

        Events are tokens and ends. If the model or a draw raises, all plans in flight are rolled back and the
        rows of the first are tried again in halves, until each row that fails by itself is found. Their
        requests end with `Request.error`, as do those whose text, callback or drafts raise; the others have
        computed what they would have. What is no Exception, such as a keyboard interrupt, goes through: plans
        that it comes upon are rolled back, tokens of those that stand are kept, and the next call goes on
        from there.
        """
        began = time.perf_counter()
        self._resume()
        self._admit()
        self._extend_ahead()
        self._make_room()
        drafts = self._draft()
        rows = self._rows()
        if rows:
            self._fly(drafts, max_tokens=self.max_tokens_per_step, rows=rows)
            is_cut = len(self._flights[-1].draws) < len(rows)
            self._meter.launch(blocked=self._schedule.blocked, is_cut=is_cut, now=began)
        if self._flights and (not rows or len(self._flights) > self.run_ahead):
            self._land()
        events = self._deliver()
        self._meter.busy_time += time.perf_counter() - began
        return events

    def _resume(self) -> None:
        """Bring to its end what an interrupt left undone."""
        if self._flights and self._flights[0].has_committed:
            self._land()
        if self._must_roll_back:
            self._roll_back()
        while len(self._flights) > self.run_ahead:
            self._land()
        if not self._flights:
            for work in self._schedule.running:
                work.cut_to_known()

    def _admit(self) -> None:
        self._schedule.admit()
        if self._schedule.waiting and not (self._schedule.running or self._flights):
            work = self._schedule.waiting[0]  # somebody else has the blocks: it could wait for ever
            self._fail(work.answer, self._out_of_blocks(self.pool.blocks_needed(work.sequence)))

    def _extend_ahead(self) -> None:
        """Make a place for each token that a step in flight draws, so that the next one can be planned.

        Who is left out is drained: a prompt whose samples cannot be forked before its step has ended, and an
        answer that gets its last token.
        """
        rows = []
        for work in self._schedule.running:
            num_drawn = sum(work in flight.draws for flight in self._flights)
            has_place = work.sequence.num_tokens == work.num_known + num_drawn
            if num_drawn < work.num_to_come and not (has_place or work.to_fork):
                rows.append(work.row)
        self._batch.extend_unknown(rows)

    def _make_room(self) -> None:
        running = self._schedule.running
        while missing := self._batch.shortfall(self.max_tokens_per_step, rows=self._rows()):
            if self._flights:
                self._land()  # blocks come free with it, and perhaps somebody ends
            elif len(running) == 1:
                self._fail(running[0].answer, self._out_of_blocks(self.pool.num_free + missing))
            else:
                self._schedule.preempt()
                self._meter.preemptions += 1

    def _draft(self) -> dict[Work, list[int]]:
        """Put drafts behind the rows that decode, in what room the known tokens leave.

        They are a bet: no known token waits for them, and nobody gives way to them.
        """
        drafts: dict[Work, list[int]] = {}
        if self.speculation is None:
            return drafts
        room = self.max_tokens_per_step - sum(work.sequence.num_pending for work in self._schedule.running)
        for work in list(self._schedule.running):
            if work.answer in self._schedule and (own := self._propose(self.speculation, work, room)):
                drafts[work] = own
                room -= len(own)
        drafts = {work: own for work, own in drafts.items() if work.answer in self._schedule}
        for work, own in drafts.items():
            work.sequence.extend(own)
        while drafts and self._batch.shortfall(self.max_tokens_per_step, rows=self._rows()):
            work, _ = drafts.popitem()
            work.cut_to_known()
        return drafts

    def _propose(self, drafter: Drafter, work: Work, room: int) -> list[int]:
        try:
            return propose(drafter, work, room=room, vocabulary_size=self.model.vocabulary_size)
        except Exception as error:
            self._fail(work.answer, error)
            return []

    def _rows(self) -> list[int]:
        """Who has tokens to plan, in the order in which they share the step's.

        Who decodes goes first, so that no prompt stops it; where there are drafts, there is room for all.
        """
        works = [
            (work.sequence.num_pending - self._num_in_flight(work), work) for work in self._schedule.running
        ]
        decoding = [work.row for count, work in works if count == 1]
        return decoding + [work.row for count, work in works if count > 1]

    def _num_in_flight(self, work: Work) -> int:
        return sum(flight.counts.get(work, 0) for flight in self._flights if not flight.has_committed)

    def _fly(self, drafts: Mapping[Work, list[int]], **request: Any) -> None:
        """Plan and launch a step. If it is interrupted, `_resume` rolls it back, with those before it."""
        self._must_roll_back, plan = True, None
        try:
            plan = self._batch.plan(**request)
            works = {work.row: work for work in self._schedule.running}
            self._flights.append(Flight(plan, works, drafts=drafts, earlier=self._flights))
            self._flights[-1].launch(self._executor, self.model, self.cache)
        except BaseException as error:
            if plan is not None and not (self._flights and self._flights[-1].plan is plan):
                plan.__exit__(type(error), error, None)  # it is rolled back when its turn comes
            raise
        self._must_roll_back = False

    def _land(self) -> None:
        """End the oldest flight, which then has left the queue; an interrupt on the way loses no token."""
        flight = self._flights[0]
        if not flight.has_committed:
            error = flight.wait()
            if error is not None:
                self._abort(flight, error)
                return
            flight.commit()
        if not flight.has_settled:
            self._settle(flight)
            flight.has_settled = True
        while flight.untaken:
            answer, place, token_id = flight.untaken[0]
            if answer in self._schedule:  # else it has ended
                if len(answer.token_ids) == place:
                    self._take_token(answer, token_id)
                elif answer.is_finished:  # an interrupt came between its last token and its end
                    self._let_go(answer)
            flight.untaken.popleft()
        self._flights.popleft()

    def _settle(self, flight: Flight) -> None:
        """What follows from a commit: figures, forks, a token behind each row that has one."""
        schedule, drawn = self._schedule, flight.drawn
        for work, count in flight.counts.items():
            if work.answer in schedule:
                work.note_commit(self.model.layout.sliding_window)
            else:
                self._meter.wasted_slots += count
        self._meter.computed_tokens += flight.plan.num_tokens
        self._meter.drafted_tokens += flight.num_drafts
        self._meter.accepted_tokens += flight.num_accepted_drafts
        self._meter.look(
            self.pool, [work.sequence.num_computed + self._num_in_flight(work) for work in schedule.running]
        )
        for work in flight.draws:
            if work.answer in schedule:
                self._meter.forks += schedule.fork(work)
        flight.plan.extend([drawn[work.answer].token_ids[-1] for work in flight.draws])
        for answer, (token_ids, generator) in drawn.items():
            owner = schedule.work_of(answer)
            if owner is not None:
                owner.generator = generator
                if owner.sequence.num_pending == 0:  # it was forked before there was a token
                    self._batch.extend([owner.row], token_ids)

    def _abort(self, failed: Flight, error: BaseException) -> None:
        """Roll all flights back; of the one that failed, try the rows again in halves."""
        self._roll_back()
        if not isinstance(error, Exception):
            raise error
        self._meter.failed_steps += 1
        rows = list(failed.counts.items())
        half = len(rows) // 2
        if failed.num_drafts:
            parts = [rows]  # without drafts, which may have been why
        elif half:
            parts = [rows[:half], rows[half:]]
        else:
            parts = []
            if rows[0][0].answer in self._schedule:
                self._fail(rows[0][0].answer, error)
        for part in parts:
            alive = [(work.row, count) for work, count in part if work.answer in self._schedule]
            if alive:  # others have ended, perhaps with a sample of the same request
                numbers, counts = map(list, zip(*alive, strict=True))
                self._fly({}, rows=numbers, num_tokens=counts)
                self._land()

    def _roll_back(self) -> None:
        """All flights; of their rows, the known tokens remain."""
        self._must_roll_back = True
        for flight in self._flights:
            flight.call_off()
        wait([self._executor.submit(int)])  # whatever was launched, it has ended now
        while self._flights:
            self._flights.popleft().plan.rollback()
        for work in self._schedule.running:
            work.cut_to_known()
        self._must_roll_back = False

    def _take_token(self, answer: Answer, token_id: int) -> None:
        try:
            event = answer._take(token_id, time.perf_counter())
        except Exception as error:
            self._fail(answer, error)
            return
        self._meter.take(answer)
        self._emit(event)
        if answer.is_finished:
            self._let_go(answer)

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
        self._schedule.let_go(answer)
        self._meter.end(answer)

    def _out_of_blocks(self, needed: int) -> kv.OutOfBlocks:
        return kv.OutOfBlocks(needed, self.pool.num_free, self.pool.num_quarantined, ever_fits=True)
