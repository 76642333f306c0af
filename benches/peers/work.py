"""The work that every peer is given, and what it took.

Times are medians over rounds in which the peers take turns, so that what else the machine does falls on all
of them. Python's garbage collector runs between rounds and not within them. Each piece of work is checked:
the right number of cached tokens, enough blocks and nobody's twice, and the same ones in the table.
"""

from __future__ import annotations

import gc
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from .protocol import Peer, check, prompt

BLOCK_SIZE = 16
LENGTH = 1000
SCALE = 8  # of the trace
WARM_UP = 20  # steps: each sequence fills a block or two, so that what grows has grown
Peers = list[type[Peer]]
Figures = dict[str, float]  # by the peer's name


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(work: Callable[[], Any]) -> float:
    """Microseconds."""
    start = perf_counter()
    work()
    return (perf_counter() - start) * 1e6


def medians(times: dict[str, list[float]]) -> Figures:
    """Of the peers that have any."""
    return {name: median(values) for name, values in times.items() if values}


def able(kinds: Peers, method: str) -> Peers:
    """Those that have something which not every manager has."""
    return [kind for kind in kinds if getattr(kind, method) is not getattr(Peer, method)]


def decode(kinds: Peers, num_sequences: int, rounds: int, steps_a_round: int) -> tuple[Figures, Figures]:
    """Microseconds a step of sequences of ~1000 tokens; then the same of their first steps, once.

    As many are at each place in a block as at any other, so that every step fills as many blocks.
    """
    room = LENGTH + BLOCK_SIZE + WARM_UP + steps_a_round * rounds + 1
    peers, handles = [], []
    for kind in kinds:
        peer = kind(num_sequences * (room // BLOCK_SIZE + 1), BLOCK_SIZE, num_sequences, room)
        admitted = []
        for i in range(num_sequences):
            admitted.append(peer.admit(peer.prompt(prompt(LENGTH + i % BLOCK_SIZE, i))))
            peer.step([admitted[-1]])
        peers.append(peer)
        handles.append(admitted)

    def steps(peer: Peer, count: int) -> None:
        for _ in range(count):
            peer.step()

    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    first = {}
    for peer in peers:
        with undisturbed():
            first[peer.name] = timed(partial(steps, peer, WARM_UP)) / WARM_UP
    for _ in range(rounds):
        for peer in peers:
            with undisturbed():
                took = timed(partial(steps, peer, steps_a_round))
            times[peer.name].append(took / steps_a_round)
    computed = [LENGTH + i % BLOCK_SIZE + WARM_UP + steps_a_round * rounds for i in range(num_sequences)]
    for peer, admitted in zip(peers, handles, strict=True):
        check(peer, admitted, computed)
    return medians(times), first


def admissions(kinds: Peers, length: int, rounds: int) -> tuple[Figures, Figures, Figures]:
    """Microseconds from a prompt to its first step's arrays, published.

    Of fresh prompts, of cached ones, and of cached ones that everybody gets as a Python list.
    """
    blocks = length // BLOCK_SIZE + 2
    peers = [kind((rounds + 3) * blocks, BLOCK_SIZE, 2, length + BLOCK_SIZE) for kind in kinds]
    fresh: dict[str, list[float]] = {peer.name: [] for peer in peers}
    cached: dict[str, list[float]] = {peer.name: [] for peer in peers}
    lists: dict[str, list[float]] = {peer.name: [] for peer in peers}

    def serve(peer: Peer, tokens: Any, expected: int) -> float:
        handles: list[Any] = []

        def work() -> None:
            handles.append(peer.admit(tokens))
            peer.step(handles)

        with undisturbed():
            took = timed(work)
        found = peer.num_cached(handles[0])
        assert found == expected, f"{peer.name} found {found} tokens, not {expected}"
        peer.step()  # a decode step, of which there is a table to look at
        check(peer, handles, [length + 1])
        peer.free(handles[0])
        return took

    all_but_one = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    for turn in range(rounds):
        tokens = prompt(length, turn)
        for peer in peers:
            own = peer.prompt(tokens)
            fresh[peer.name].append(serve(peer, own, 0))
            cached[peer.name].append(serve(peer, own, all_but_one))
            lists[peer.name].append(serve(peer, tokens.tolist(), all_but_one))
    return medians(fresh), medians(cached), medians(lists)


def admitted(
    kind: type[Peer], num_blocks: int, max_sequences: int, lengths: list[int]
) -> tuple[Peer, list[Any]]:
    """A peer with computed sequences of these lengths."""
    peer = kind(num_blocks, BLOCK_SIZE, max_sequences, 2 * LENGTH)
    handles = []
    for i, length in enumerate(lengths):
        handles.append(peer.admit(peer.prompt(prompt(length, i))))
        peer.step([handles[-1]])
    return peer, handles


def forks(kinds: Peers, rounds: int, count: int = 32) -> Figures:
    """Microseconds to fork a sequence of 1001 tokens, whose last block is not full."""
    kinds = able(kinds, "fork")
    times: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    peers = [admitted(kind, 4096, count + 1, [LENGTH + 1]) for kind in kinds]
    for _ in range(rounds):
        for peer, (leader,) in peers:
            made: list[Any] = []

            def work(peer: Peer = peer, leader: Any = leader, made: list[Any] = made) -> None:
                made.extend([peer.fork(leader) for _ in range(count)])

            with undisturbed():
                times[peer.name].append(timed(work) / count)
            full = LENGTH // BLOCK_SIZE
            for fork in made:
                assert peer.block_ids(fork)[:full] == peer.block_ids(leader)[:full]
                peer.free(fork)
    return medians(times)


def truncations(kinds: Peers, rounds: int, count: int = 32) -> Figures:
    """Microseconds to cut a sequence from 1000 tokens to 500."""
    kinds = able(kinds, "truncate")
    times: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            peer, handles = admitted(kind, 4096, count, [LENGTH] * count)

            def work(peer: Peer = peer, handles: list[Any] = handles) -> None:
                for handle in handles:
                    peer.truncate(handle, 500)

            with undisturbed():
                times[peer.name].append(timed(work) / count)
            assert all(len(peer.block_ids(handle)) == -(-500 // BLOCK_SIZE) for handle in handles)
    return medians(times)


def reorders(kinds: Peers, rounds: int, num_prompts: int = 16, num_beams: int = 4) -> Figures:
    """Microseconds for one reordering of all beams; each prompt's beams come from two of them."""
    kinds = able(able(kinds, "fork"), "reorder")
    times: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    random = np.random.default_rng(0)
    for kind in kinds:
        peer, leaders = admitted(kind, 8192, num_prompts * num_beams, [LENGTH] * num_prompts)
        beams = [beam for one in leaders for beam in (one, *(peer.fork(one) for _ in range(num_beams - 1)))]
        for _ in range(rounds):
            peer.step()
            best = random.integers(0, num_beams, (num_prompts, 2))
            chosen = np.take_along_axis(best, random.integers(0, 2, (num_prompts, num_beams)), 1)
            parents = (chosen + num_beams * np.arange(num_prompts)[:, None]).ravel().tolist()
            expected = [peer.block_ids(beams[parent]) for parent in parents]

            def work(peer: Peer = peer, beams: list[Any] = beams, parents: list[int] = parents) -> None:
                peer.reorder(beams, parents)

            with undisturbed():
                times[peer.name].append(timed(work))
            assert [peer.block_ids(beam) for beam in beams] == expected
    return medians(times)


def trace_prompts(path: Path, count: int, longest: int) -> list[tuple[np.ndarray[Any, Any], int]]:
    """Prompts and answers' lengths of the first requests, an eighth of the trace's own.

    The format is Mooncake's (FAST 2025): `input_length`, `output_length`, `hash_ids`, one object a line. A
    hash id, which is a block of 512 tokens there, stands for 64 tokens here, so that as many requests as it
    takes for prompts to come back are served in seconds.
    """
    blocks: dict[int, np.ndarray[Any, Any]] = {}
    requests = []
    with path.open() as lines:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            for block in row["hash_ids"]:
                if block not in blocks:
                    blocks[block] = prompt(512 // SCALE, block)
            tokens = np.concatenate([blocks[block] for block in row["hash_ids"]])
            length = max(1, min(row["input_length"] // SCALE, longest))
            requests.append((tokens[:length], max(1, min(row["output_length"] // SCALE, 32))))
    return requests


def churn(
    kinds: Peers, path: Path, *, num_requests: int = 1500, num_blocks: int = 32 * 1024, rounds: int = 3
) -> tuple[Figures, Figures]:
    """Requests a second, and the part of all prompt tokens that the cache had, over a trace.

    Up to 32 requests at once, in the trace's order, at most 32 tokens an answer, prompts cut at 16k tokens.
    Who is admitted when is the same for all peers, so that no pool overflows. The trace is cut into `rounds`
    pieces that the peers work on in turn.
    """
    longest, running_most = 16 * 1024, 32
    requests = trace_prompts(path, num_requests, longest)
    room = longest + 64
    peers = [kind(num_blocks, BLOCK_SIZE, running_most, room) for kind in kinds]
    rates: dict[str, list[float]] = {peer.name: [] for peer in peers}
    hits: dict[str, int] = dict.fromkeys(rates, 0)
    piece = len(requests) // rounds
    for turn in range(rounds):
        part = requests[turn * piece : (turn + 1) * piece]
        lists = [(tokens.tolist(), answer) for tokens, answer in part]
        for peer in peers:
            wants_arrays = isinstance(peer.prompt(part[0][0]), np.ndarray)
            own = part if wants_arrays else lists
            with undisturbed():
                start = perf_counter()
                hits[peer.name] += serve_trace(peer, own, running_most)
                rates[peer.name].append(piece / (perf_counter() - start))
    total = sum(len(tokens) for tokens, _ in requests[: piece * rounds])
    return medians(rates), {name: found / total for name, found in hits.items()}


def serve_trace(peer: Peer, requests: list[tuple[Any, int]], running_most: int) -> int:
    """Serve them all; returns how many tokens of the prompts were cached."""
    waiting = deque(requests)
    running: list[list[Any]] = []  # handle, tokens to come, blocks that are spoken for
    spoken_for = found = 0
    while waiting or running:
        budget = peer.max_tokens - len(running)
        while waiting and len(running) < running_most:
            tokens, answer = waiting[0]
            blocks = -(-(len(tokens) + answer + 1) // peer.block_size)
            if len(tokens) > budget or spoken_for + blocks > peer.num_blocks:
                break
            waiting.popleft()
            handle = peer.admit(tokens)
            found += peer.num_cached(handle)
            running.append([handle, answer, blocks])
            spoken_for += blocks
            budget -= len(tokens)
        peer.step()
        for work in running:
            work[1] -= 1
        for handle, answer, blocks in running:
            if answer == 0:
                peer.free(handle)
                spoken_for -= blocks
        running = [work for work in running if work[1]]
    return found
