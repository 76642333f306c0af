"""Serve a workload with one manager: admit, step, look at the clock that the cost model moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvfolio import _checks

from .cost import CostModel
from .history import History, Point, Sums
from .manager import Manager
from .percentiles import Percentiles
from .workload import Workload


@dataclass(frozen=True)
class Outcome:
    """What came out for one manager.

    Attributes
    ----------
    manager : str
    finished, refused : int
        Requests; refused are those that it could not even hold alone.
    steps, preemptions, computed_tokens : int
        A request that gives way counts as one preemption; what it had is computed anew.
    seconds : float
        From the first arrival to the last token.
    loaded_share : float
        Of the steps' time that in which some request waited for memory or for a place in the batch.
    memory : dict
        Mean shares of the slots over that time (over all steps' time if nobody ever waited): tokens,
        reserved, empty, cached, external, free. They sum up to 1.
    mean_running, max_running : float, int
        Requests in the batch, over the same time.
    shared_share : float
        Of the slots that the sequences would take without sharing, those that sharing saves, over the same
        time.
    hit_rate : float or None
        Of the tokens that were looked up in the prefix cache.
    time_to_first_token, time_per_output_token : Percentiles or None
        Seconds: from a request's arrival to its first token; from that to its last one, for each token after
        the first, of requests that have any.
    requests_per_second : float
        Finished requests, over `seconds`.
    history : list of Point
    """

    manager: str
    finished: int
    refused: int
    steps: int
    preemptions: int
    computed_tokens: int
    seconds: float
    loaded_share: float
    memory: dict[str, float]
    mean_running: float
    max_running: int
    shared_share: float
    hit_rate: float | None
    time_to_first_token: Percentiles | None
    time_per_output_token: Percentiles | None
    requests_per_second: float
    history: list[Point]


def serve(
    workload: Workload,
    manager: Manager,
    cost: CostModel,
    *,
    kv_bytes_per_token: int,
    max_sequences: int = 256,
    tokens_per_step: int = 2048,
    progress: Callable[[int], object] = lambda num_requests: None,
) -> Outcome:
    """Serve all requests, first come first served, and say what that took.

    Parameters
    ----------
    workload : Workload
    manager : Manager
        A new one.
    cost : CostModel
    kv_bytes_per_token : int
        In all layers.
    max_sequences, tokens_per_step : int
        Sequences in the batch and tokens in a step, at most; a prompt is computed in as many steps as it
        needs.
    progress : callable
        Is told how many more requests have ended.

    Raises
    ------
    ValueError, TypeError
        An argument is wrong.
    """
    width = workload.width
    max_sequences = _checks.integer("max_sequences", max_sequences, width)
    tokens_per_step = _checks.integer("tokens_per_step", tokens_per_step, max_sequences)
    arrivals = workload.arrivals.tolist()
    num, arrived, refused, running = workload.num_requests, 0, 0, 0
    first_token, last_token = np.full((2, num), np.nan)
    waiting: deque[int] = deque()
    history, loaded, always = History(), Sums(), Sums()
    clock, steps, preemptions, computed, most = 0.0, 0, 0, 0, [0, 0]
    while arrived < num or waiting or running:
        while arrived < num and arrivals[arrived] <= clock:
            if manager.can_ever_hold(arrived):
                waiting.append(arrived)
            else:
                refused += 1
                progress(1)
            arrived += 1
        fragmented = False
        while waiting and (running + 1) * width <= max_sequences:
            if not manager.admit(waiting[0]):
                fragmented = manager.is_fragmented(waiting[0])
                break
            waiting.popleft()
            running += 1
        if not running:
            if waiting:
                raise RuntimeError(f"{manager.name}: nobody runs, and {waiting[0]} is not admitted")
            if arrived < num:
                clock = arrivals[arrived]
            continue
        step = manager.step(tokens_per_step)
        running -= len(step.preempted)
        waiting.extendleft(reversed(step.preempted))
        seconds = cost.seconds(step.num_tokens, step.kv_tokens * kv_bytes_per_token)
        history.add(clock, running, len(waiting), step.usage.tokens / manager.num_slots)
        for sums in (always, loaded) if waiting else (always,):
            sums.add(seconds, step, fragmented, running)
        most = [max(most[0], running), max(most[1], running if waiting else 0)]
        clock += seconds
        for request in step.first:
            first_token[request] = clock
        for request in step.finished:
            last_token[request] = clock
        running -= len(step.finished)
        progress(len(step.finished))
        steps += 1
        preemptions += len(step.preempted)
        computed += step.num_tokens
    manager.close()
    mean = loaded if loaded.seconds else always
    more = workload.trace.output_lengths - 1
    finished = int(np.isfinite(last_token).sum())
    per_token = ((last_token - first_token) / np.maximum(more, 1))[(more > 0) & np.isfinite(last_token)]
    span = float(np.nanmax(last_token)) - arrivals[0] if finished else 0.0
    return Outcome(
        manager=manager.name,
        finished=finished,
        refused=refused,
        steps=steps,
        preemptions=preemptions,
        computed_tokens=computed,
        seconds=span,
        loaded_share=loaded.seconds / always.seconds if always.seconds else 0.0,
        memory=mean.shares(),
        mean_running=mean.running / mean.seconds if mean.seconds else 0.0,
        max_running=most[1] if loaded.seconds else most[0],
        shared_share=1 - mean.held_slots / mean.table_slots if mean.table_slots else 0.0,
        hit_rate=manager.hit_rate(),
        time_to_first_token=Percentiles.of((first_token - workload.arrivals)[np.isfinite(first_token)]),
        time_per_output_token=Percentiles.of(per_token),
        requests_per_second=finished / span if span else 0.0,
        history=history.points,
    )
