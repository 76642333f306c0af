"""A request and its answers, as the caller sees them while the engine works on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from .figures import RequestFigures, mean
from .sampling import SamplingParams
from .text import TextStream

if TYPE_CHECKING:
    from .engine import Engine


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  #: the end of sequence, a stop token or a stop string
    LENGTH = "length"  #: max_tokens
    CANCELLED = "cancelled"  #: by `Request.cancel`
    ERROR = "error"  #: see Request.error


@dataclass(frozen=True)
class Event:
    """One token of one answer, or its end.

    `token_id` is None if the answer ended without a token (cancelled, failed). `text` is what has become
    certain with it, which may lag behind the tokens or be empty; without a tokenizer it always is.
    """

    request: Request
    answer: Answer
    token_id: int | None
    text: str
    finish_reason: FinishReason | None


class Answer:
    """One sample of a request. `token_ids` includes the stop token that ended it, `text` does not."""

    def __init__(self, request: Request, index: int, text_stream: TextStream | None) -> None:
        self.request = request  #: whose sample it is
        self.index = index  #: among the samples, from 0
        self.seed = request.seed + index  #: of its random numbers
        self.token_ids: list[int] = []  #: so far; the stop token that ended it is the last
        self.text = ""  #: so far, without what is held back; empty without a tokenizer
        self.finish_reason: FinishReason | None = None  #: None: it has not ended
        self.num_preemptions = 0  #: how often its blocks were taken back
        self.first_token_at: float | None = None  #: seconds, by time.perf_counter; None before
        self.last_token_at: float | None = None  #: the same, of the latest token
        self._text_stream = text_stream

    def __repr__(self) -> str:
        state = self.finish_reason or "not finished"
        return f"<Answer {self.request.id}.{self.index}: {len(self.token_ids)} tokens, {state}>"

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def age(self) -> tuple[int, int]:
        """The smaller, the older: requests by their arrival, then samples by their number."""
        return self.request.id, self.index

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between two tokens, preemptions included; None with fewer than two."""
        if self.first_token_at is None or self.last_token_at is None or len(self.token_ids) < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (len(self.token_ids) - 1)

    def _take(self, token_id: int, now: float) -> Event:
        """Append a token and find out whether it was the last. Nothing is done if the tokenizer raises."""
        request, stream = self.request, self._text_stream
        reason = FinishReason.LENGTH if len(self.token_ids) + 1 == request.max_tokens else None
        text = ""
        if token_id in request.stop_token_ids:
            reason = FinishReason.STOP
            text = stream.finish() if stream else ""
        elif stream:
            text = stream.push(token_id, last=reason is not None)
            if stream.stopped:
                reason = FinishReason.STOP
        self.token_ids.append(token_id)
        self.text += text
        self.finish_reason = reason
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
        return Event(request, self, token_id, text, reason)

    def _rest(self) -> Event:
        """An end without a token, and what was held back of the text if it can be told."""
        text = ""
        if self._text_stream:
            with suppress(Exception):
                text = self._text_stream.finish()
        self.text += text
        return Event(self.request, self, None, text, self.finish_reason)


class Request:
    """What `Engine.submit` returns: the answers as they grow, the figures, a way to cancel."""

    def __init__(
        self,
        engine: Engine,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        stop_token_ids: frozenset[int],
        text_streams: list[TextStream | None],
        on_token: Callable[[Event], None] | None,
        submitted_at: float,
    ) -> None:
        self.id = request_id  #: the number of its submission to the engine, from 0
        self.prompt_token_ids = prompt_token_ids  #: as it was submitted
        self.params = params  #: as they were submitted
        self.max_tokens = max_tokens  #: the most tokens of an answer
        self.seed = seed  #: of its first sample; the others count on from there
        self.stop_token_ids = stop_token_ids  #: which end an answer, the model's own included
        self.on_token = on_token  #: called with each event
        self.submitted_at = submitted_at  #: seconds, by time.perf_counter
        self.admitted_at: float | None = None  #: the same, of its first admission; None before
        #: Tokens of the prompt found in the cache at the first admission; None before.
        self.cached_tokens: int | None = None
        #: Tokens found again after preemptions: its own earlier work, no hit on others'.
        self.recovered_tokens = 0
        self.error: BaseException | None = None  #: why it failed, if it did
        self.events: list[Event] = []  #: all so far, in order
        #: One for each of the `n` samples.
        self.answers = [Answer(self, index, stream) for index, stream in enumerate(text_streams)]
        self._engine = engine

    def __repr__(self) -> str:
        done = sum(answer.is_finished for answer in self.answers)
        prompt = len(self.prompt_token_ids)
        return f"<Request {self.id}: {prompt} prompt tokens, {done}/{len(self.answers)} answers finished>"

    @property
    def is_finished(self) -> bool:
        """Whether all of its answers have ended."""
        return all(answer.is_finished for answer in self.answers)

    @property
    def figures(self) -> RequestFigures:
        """Its figures so far."""
        first = [answer.first_token_at for answer in self.answers if answer.first_token_at is not None]
        last = [answer.last_token_at for answer in self.answers if answer.last_token_at is not None]
        paces = [pace for answer in self.answers if (pace := answer.time_per_output_token) is not None]
        start = self.submitted_at
        return RequestFigures(
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=self.cached_tokens or 0,
            recovered_tokens=self.recovered_tokens,
            output_tokens=sum(len(answer.token_ids) for answer in self.answers),
            preemptions=sum(answer.num_preemptions for answer in self.answers),
            queue_time=None if self.admitted_at is None else self.admitted_at - start,
            time_to_first_token=min(first) - start if first else None,
            time_per_output_token=mean(paces) if paces else None,
            latency=max(last) - start if last else None,
        )

    def cancel(self) -> None:
        """End the answers that are not finished, at once; their blocks come free. Idempotent."""
        self._engine.cancel(self)
