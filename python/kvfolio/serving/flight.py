"""A step from its plan to its tokens: what the model gets, and what is drawn from its logits.

Both are one job, which may run in another thread while the engine does other things; it reads the plan, the
cache and the model, and changes nothing else but its own flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import kvfolio as kv

from .hf_model import PagedModel
from .request import Answer
from .sampling import SamplingParams, sample
from .schedule import Work, new_generator

P = ParamSpec("P")
T = TypeVar("T")


class Drawn(NamedTuple):
    """What a step drew for an answer.

    `token_ids`: drafts that were accepted, and the token behind them. `generator`: as it is after them.
    """

    token_ids: list[int]
    generator: torch.Generator


@dataclass
class Draw:
    """A row that gets a token.

    `place`: where, among the step's tokens, the first one stands whose logits are needed; its drafts follow.
    `source`: the flight that draws the token at `place`, where the plan was made before it was known.
    """

    answer: Answer
    others: list[Answer]  # samples that will be forked from it
    generator: torch.Generator
    drafts: list[int]
    place: int
    source: Flight | None


class Flight:
    """A plan that is computed.

    `counts`: the plan's rows, and how many tokens each has in it. `draws`: those of them that get a token.
    `drafts`: of these, what was guessed. `earlier`: the flights in the air, oldest first.
    """

    def __init__(
        self,
        plan: kv.Plan,
        works: Mapping[int, Work],
        *,
        drafts: Mapping[Work, list[int]],
        earlier: Sequence[Flight],
    ) -> None:
        self.plan = plan
        self.num_drafts = sum(map(len, drafts.values()))
        counts = np.diff(plan.query_start_loc).tolist()
        self.counts = {works[row]: count for row, count in zip(plan.rows.tolist(), counts, strict=True)}
        self.draws: dict[Work, Draw] = {}
        for row, last in zip(plan.logits_rows.tolist(), plan.logits_indices.tolist(), strict=True):
            work, own = works[row], drafts.get(works[row], [])
            source = next((flight for flight in reversed(earlier) if work in flight.draws), None)
            self.draws[work] = Draw(
                work.answer, list(work.to_fork), work.generator, own, last - len(own), source
            )
        self.drawn: dict[Answer, Drawn] = {}
        # Of what was drawn, once that is committed: whose, where in the answer, which token.
        self.untaken: deque[tuple[Answer, int, int]] = deque()
        self.num_accepted_drafts = 0
        self.has_committed = self.has_settled = False
        self._job: Future[None] | None = None

    def launch(self, executor: Executor, model: PagedModel, cache: kv.KVCache) -> None:
        """Begin to compute; jobs of one executor run one after the other."""
        self._job = executor.submit(self._compute, model, cache)

    def wait(self) -> BaseException | None:
        """Until it is computed; returns what it raised. What is raised by itself came from outside."""
        if self._job is None:
            return RuntimeError("the step was not launched")
        wait([self._job])
        return self._job.exception()

    def call_off(self) -> None:
        """Wait for the end of it, or for nothing if it has not begun."""
        if self._job is not None and not self._job.cancel():
            wait([self._job])

    def _compute(self, model: PagedModel, cache: kv.KVCache) -> None:
        token_ids = self._fill_in()
        draws = self.draws.values()
        places = [np.arange(draw.place, draw.place + 1 + len(draw.drafts)) for draw in draws]
        logits = model.forward(
            self.plan, cache, token_ids=token_ids, logits_indices=np.concatenate([_NO_PLACES, *places])
        )
        for draw, own in zip(draws, torch.split(logits, [len(place) for place in places]), strict=True):
            generators = {draw.answer: draw.generator}
            generators |= {answer: new_generator(answer) for answer in draw.others}
            for answer, generator in generators.items():
                self.drawn[answer] = verify(own, draw.drafts, answer.request.params, generator)

    def _fill_in(self) -> NDArray[np.int32]:
        """The step's input ids, now that those are drawn which its plan did not know."""
        token_ids = self.plan.token_ids.copy()
        for draw in self.draws.values():
            if draw.source is not None:
                told = draw.source.drawn[draw.answer]
                token_ids[draw.place], draw.generator = told.token_ids[-1], told.generator
                draw.source = None  # else every flight would keep all before it
        return token_ids

    def commit(self) -> None:
        """The step's tokens stand, but for refused drafts; what was drawn waits to be taken."""
        rejected = {
            work: len(draw.drafts) + 1 - len(self.drawn[draw.answer].token_ids)
            for work, draw in self.draws.items()
        }
        counts = [count - rejected.get(work, 0) for work, count in self.counts.items()]
        with suppress(kv.StaleHandle):  # an interrupt came right behind the commit
            self.plan.commit(counts if self.num_drafts else None)
        self.num_accepted_drafts = self.num_drafts - sum(rejected.values())
        self.untaken = deque(
            (answer, place, token_id)
            for answer, drawn in self.drawn.items()
            for place, token_id in enumerate(drawn.token_ids, len(answer.token_ids))
        )
        self.has_committed = True


_NO_PLACES = np.empty(0, np.int64)


def verify(
    logits: torch.Tensor, drafts: Sequence[int], params: SamplingParams, generator: torch.Generator
) -> Drawn:
    """Draw a token behind the last known one, and go on for as long as it is the one that was guessed.

    `logits` is [1 + number of drafts, vocabulary]. The generator stays as it is.

    Nothing is guessed by chance, so this is rejection sampling (Leviathan et al. 2023): a draft `d` is
    accepted with probability `p(d)`, and another token comes out with its share of the rest. And it is the
    answer that the same numbers give without drafts, token for token.
    """
    generator, token_ids = generator.clone_state(), []
    for row, draft in zip(logits, [*drafts, None], strict=True):
        token_ids.append(sample(row, params, generator))
        if token_ids[-1] != draft:
            break
    return Drawn(token_ids, generator)


class InThisThread(Executor):
    """Runs a job at once, where it is submitted."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Its outcome, which may be that it was interrupted."""
        future: Future[T] = Future()
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future
