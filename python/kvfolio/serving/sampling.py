"""From one row of logits to one token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvfolio import _checks

from .token_ids import token_ids

MAX_SEED = 2**63
NUCLEUS = 1024  # candidates for top_p at the first try


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an answer is drawn and when it ends.

    `max_tokens`: the most tokens of an answer; None: as many as the engine has room for.
    `temperature`: 0 takes the likeliest token (greedy); above 0 samples.
    `top_k`, `top_p`: sample among the k likeliest tokens, then among the fewest of those whose
    probabilities reach `top_p` of theirs together.
    `seed`: sample i of the request draws from a generator seeded with `seed + i`, one number a token, so an
    answer does not depend on what else is in the batch. None: a seed is chosen, and `Request.seed` tells
    it.
    `n`: samples of the one prompt, which is computed once.
    `stop_token_ids`: end the answer, of which they remain the last token, in addition to the model's own
    end of sequence, which `ignore_eos` turns off. `stop`: strings that end it (the engine needs a
    tokenizer); the answer's text ends before the string.

    Raises ValueError or TypeError for what is out of range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "n"):
            if (value := getattr(self, name)) is not None or name == "n":
                self._set(name, _checks.integer(name, value, 1))
        for name in ("temperature", "top_p"):
            self._set(name, _checks.number(name, getattr(self, name)))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and not negative, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None:
            self._set("seed", _checks.integer("seed", self.seed, 0))
            if self.seed > MAX_SEED - self.n:
                raise ValueError(f"seed must be from 0 to 2**63 - n, not {self.seed}")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {type(self.ignore_eos).__name__}")
        self._set("stop_token_ids", tuple(token_ids("stop_token_ids", self.stop_token_ids)))
        if isinstance(self.stop, str) or not isinstance(self.stop, Sequence):
            raise TypeError(f"stop must be a sequence of strings, not one {type(self.stop).__name__}")
        for i, stop in enumerate(self.stop):
            if not isinstance(stop, str):
                raise TypeError(f"stop[{i}] must be a string, not {type(stop).__name__}")
        if not all(self.stop):
            raise ValueError("stop must hold no empty string")
        self._set("stop", tuple(self.stop))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # as the checks have it: plain numbers, and tuples

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, whatever the seed."""
        return self.temperature == 0


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """The next token of one answer; `logits` is [vocabulary].

    A sampled token takes exactly one number from `generator` and inverts the cumulative distribution with
    it, in float64: the n-th token's number is the same whatever was drawn before it.

    Raises FloatingPointError if a logit is not a number, or the greatest not finite: what is drawn from
    those would be silently wrong.
    """
    greatest = logits.max()
    if not bool(greatest.isfinite()):  # it is NaN if any is
        raise FloatingPointError("the model's logits are not finite")
    if params.is_greedy:
        return int(logits.argmax())
    # The greatest becomes 0, which no temperature makes infinite.
    scores = (logits.detach() - greatest).cpu().double() / params.temperature
    probabilities, tokens = _candidates(scores, params)
    cumulative = probabilities.cumsum(dim=0)
    if params.top_p < 1:
        cumulative = cumulative[: int(torch.searchsorted(cumulative, params.top_p)) + 1]
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
    choice = min(int(torch.searchsorted(cumulative, drawn, right=True)), len(cumulative) - 1)
    return choice if tokens is None else int(tokens[choice])


def _candidates(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities, in falling order if a cut needs that, and of which tokens they are (None: of all)."""
    if params.top_k is not None:
        best = scores.topk(min(params.top_k, len(scores)))
        return torch.softmax(best.values, dim=0), best.indices
    probabilities = torch.softmax(scores, dim=0)
    if params.top_p == 1:
        return probabilities, None
    # Most often few tokens reach top_p, and sorting a whole vocabulary costs more than a layer of the model.
    likeliest = probabilities.topk(min(NUCLEUS, len(scores)))
    if float(likeliest.values.sum()) < params.top_p:
        likeliest = probabilities.topk(len(scores))
    return likeliest.values, likeliest.indices
