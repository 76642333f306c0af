"""Beam search's rules for one prompt: which beams go on, which have ended, and when enough is enough.

They are those of transformers 5.24, `GenerationMixin._beam_search` in `generation/utils.py`, and of what it
calls there: `_get_top_k_continuations`, `_get_running_beams_for_next_iteration`, `_update_finished_beams`,
`_check_early_stop_heuristic`, `_beam_search_has_unfinished_sequences`. There prompts go through them together
and until the last is done; nothing that one prompt does bears upon another's answer, so each may stop by
itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvfolio import _checks

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """How beams are ranked, and when a prompt is done; see `beam_search`."""

    num_beams: int
    max_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        _checks.integer("num_beams", self.num_beams, 1)
        _checks.integer("max_tokens", self.max_tokens, 1)
        penalty = _checks.number("length_penalty", self.length_penalty)
        if not (math.isfinite(penalty) and abs(penalty) * math.log(self.max_tokens) < 80):
            raise ValueError(
                f"length_penalty must be finite, and {self.max_tokens} (max_tokens) to its power within "
                f"float32, not {penalty}"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping must be True, False or 'never', not {self.early_stopping!r}")

    @property
    def num_candidates(self) -> int:
        """How many continuations of a prompt are looked at in a step.

        Enough that, if every beam's every end of sequence is among them, `num_beams` are left to go on.
        """
        return max(2, 1 + len(self.eos_token_ids)) * self.num_beams

    @property
    def stops_at_first(self) -> bool:
        """Whether a prompt is done once `num_beams` have ended.

        One beam is `generate`'s greedy search, which is done at its first end of sequence.
        """
        return self.early_stopping is True or self.num_beams == 1

    def score(self, log_probability: float, num_tokens: int) -> float:
        """What hypotheses are compared by."""
        return log_probability / float(num_tokens**self.length_penalty)


class Candidate(NamedTuple):
    """A continuation: of which running beam, by which token; its log-probability, all tokens' together."""

    log_probability: float
    beam: int
    token_id: int


@dataclass(frozen=True)
class Beam:
    """One answer: the tokens behind the prompt, the end of sequence included, and its score.

    `score` is ``log_probability / len(token_ids) ** length_penalty``, with natural logarithms.
    """

    token_ids: list[int]
    score: float
    log_probability: float


class Hypotheses:
    """One prompt's running beams, best first, and the best of those that have ended."""

    def __init__(self, params: BeamParams) -> None:
        self.running: list[Beam] = [Beam([], 0.0, 0.0)]  # one, until the prompt has been forked
        self.ended: list[Beam] = []  # best first, `num_beams` at most
        self.is_done = False
        self._params = params
        self._num_tokens = 0

    def advance(self, candidates: list[Candidate]) -> list[int]:
        """Take the `num_candidates` best continuations, best first; returns each running beam's parent."""
        params, before = self._params, self.running
        self._num_tokens += 1
        at_length = self._num_tokens == params.max_tokens
        going_on: list[Candidate] = []
        for rank, candidate in enumerate(candidates):
            if not (at_length or candidate.token_id in params.eos_token_ids):
                going_on.append(candidate)
            elif rank < params.num_beams:  # those behind are looked at only to have enough that go on
                self.ended.append(self._beam(before, candidate))
        self.ended = sorted(self.ended, key=lambda beam: beam.score, reverse=True)[: params.num_beams]
        going_on = going_on[: params.num_beams]
        self.running = [self._beam(before, candidate) for candidate in going_on]
        self.is_done = at_length or self._is_settled()
        return [candidate.beam for candidate in going_on]

    def _beam(self, before: list[Beam], candidate: Candidate) -> Beam:
        total, parent, token_id = candidate
        score = self._params.score(total, self._num_tokens)
        return Beam([*before[parent].token_ids, token_id], score, total)

    def _is_settled(self) -> bool:
        """Whether no running beam is taken to reach the worst that has ended.

        A guess, except with "never": beams grow longer and less probable, and a positive penalty on length
        favours the longer, so that the best a beam may come to is its present log-probability at full length.
        By default its present length is taken.
        """
        params = self._params
        if len(self.ended) < params.num_beams:
            return False
        to_the_end = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if to_the_end else self._num_tokens
        best = params.score(self.running[0].log_probability, length)
        return params.stops_at_first or best <= self.ended[-1].score
