"""What is asked of each manager: a trace's requests, when they come, and how many answers each wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfolio import _checks

from .trace import Trace

BEAM_TURNOVER = 0.3
"""With 2, 4 and 6 beams 13, 18 and 19% of them then give way at each step.

With a real model 13, 18 and 22% did (benches/beam_turnover.py).
"""
# Tokens of which no two requests have the same: above all ids of a trace.
_OWN_TOKENS = 2**30


@dataclass(frozen=True)
class Workload:
    """Requests to be served.

    Attributes
    ----------
    trace : Trace
        Whose requests they are, all of them.
    arrivals : float64[n]
        Seconds.
    arrival_origin : str
        Where the arrivals are from.
    max_length : int
        Tokens of prompt and output together; longer requests have been refused, for all managers alike.
    refused : int
        How many.
    width : int
        Answers to each request: samples or beams, each as long as the trace's one.
    beams : bool
        Whether they are beams, of which at every step some give way to copies of others.
    beam_turnover : float
        With what chance, at each step, a beam goes on from one that is drawn out of all of its request's.
    seed : int
        Of whatever is drawn.
    """

    trace: Trace
    arrivals: NDArray[np.float64]
    arrival_origin: str
    max_length: int
    refused: int
    width: int = 1
    beams: bool = False
    beam_turnover: float = BEAM_TURNOVER
    seed: int = 0

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return self.trace.num_requests

    def kv_length(self, request: int) -> int:
        """Tokens whose K and V each answer's sequence has at its end: the last one's are never computed."""
        return int(self.trace.prompt_lengths[request]) + max(int(self.trace.output_lengths[request]), 1) - 1

    def own_token(self, request: int, answer: int) -> int:
        """A token that no other answer has, for what the trace does not tell."""
        return _OWN_TOKENS + request * self.width + answer

    def prompt(self, request: int) -> NDArray[np.int32]:
        """The tokens of a prompt: each id's number once for each of its tokens; what is left is its own."""
        length = int(self.trace.prompt_lengths[request])
        tokens = np.repeat(self.trace.ids_of(request), self.trace.tokens_per_hash_id)[:length]
        own = np.full(length - len(tokens), self.own_token(request, 0), np.int32)
        return np.concatenate([tokens, own])


def make_workload(
    trace: Trace,
    *,
    max_length: int | None = None,
    rate: float | None = None,
    samples: int = 1,
    beams: int = 1,
    beam_turnover: float = BEAM_TURNOVER,
    seed: int = 0,
) -> Workload:
    """A workload of a trace's requests.

    Parameters
    ----------
    trace : Trace
    max_length : int, optional
        Requests of more tokens, prompt and output together, are left out, and counted. By default the
        smallest power of two that lets all pass.
    rate : float, optional
        Requests a second, as a Poisson process. By default the trace's times, or all at once where it has
        none.
    samples, beams : int
        Answers to each request; only one of the two may be above 1.
    beam_turnover : float
        See `Workload`.
    seed : int
        Of arrivals and beams.

    Raises
    ------
    ValueError, TypeError
        An argument is wrong, or no request is left.
    """
    samples, beams = _checks.integer("samples", samples, 1), _checks.integer("beams", beams, 1)
    if samples > 1 and beams > 1:
        raise ValueError(f"only one of samples and beams may be above 1, not {samples} and {beams}")
    if not 0 <= _checks.number("beam_turnover", beam_turnover) <= 1:
        raise ValueError(f"beam_turnover must be between 0 and 1, not {beam_turnover}")
    totals = trace.prompt_lengths + trace.output_lengths
    if max_length is None:
        max_length = 1 << (int(totals.max(initial=1)) - 1).bit_length()
    max_length = _checks.integer("max_length", max_length, 1)
    kept = np.flatnonzero(totals <= max_length)
    if not len(kept):
        raise ValueError(
            f"max_length must let a request pass: none of the trace has at most {max_length} tokens"
        )
    if trace.num_requests * max(samples, beams) >= _OWN_TOKENS:
        raise ValueError(f"samples or beams must be such that there are fewer than {_OWN_TOKENS} answers")
    arrivals, origin = _arrivals(trace, rate, seed)
    return Workload(
        trace=trace if len(kept) == trace.num_requests else trace.take(kept),
        arrivals=arrivals[kept],
        arrival_origin=origin,
        max_length=max_length,
        refused=trace.num_requests - len(kept),
        width=max(samples, beams),
        beams=beams > 1,
        beam_turnover=beam_turnover,
        seed=_checks.integer("seed", seed, 0),
    )


def _arrivals(trace: Trace, rate: float | None, seed: int) -> tuple[NDArray[np.float64], str]:
    if rate is not None:
        if not 0 < _checks.number("rate", rate) <= 1e9:
            raise ValueError(f"rate must be above 0 and at most 1e9 requests a second, not {rate}")
        gaps = np.random.default_rng(seed).exponential(1 / rate, trace.num_requests)
        return np.cumsum(gaps) - gaps[0], f"Poisson, {rate:g} a second"
    if trace.arrivals is None:
        return np.zeros(trace.num_requests), "all at once: the trace has no times"
    return trace.arrivals, "the trace's times"
