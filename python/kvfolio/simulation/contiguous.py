"""Managers that reserve a sequence's memory in one piece before it starts: Orca in the PagedAttention paper.

Orca itself is not public; the paper modelled it with a buddy allocator, and with three guesses at the
output's length.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from .buddy import BuddyAllocator
from .manager import Step, Usage
from .workload import Workload

RESERVATIONS = ("reserve-max", "reserve-pow2", "reserve-oracle")
"""All of `max_length`; prompt and output, that rounded up to a power of two; what it takes in the end."""


@dataclass(slots=True)
class _Request:
    number: int
    prompt: int
    regions: list[int]
    computed: int = 0


class ReservingManager:
    """One of `RESERVATIONS`. Each answer has a region of its own, and a copy of the prompt in it.

    The prompt is computed once for all answers; copies and beams that change places cost no time.
    """

    def __init__(self, name: str, workload: Workload, num_slots: int) -> None:
        if name not in RESERVATIONS:
            raise ValueError(f"name must be one of {', '.join(RESERVATIONS)}, not {name!r}")
        self.name = name
        self._workload = workload
        self._memory = BuddyAllocator(num_slots)
        self._running: dict[int, _Request] = {}
        self._prefilling: deque[_Request] = deque()
        self._ends: list[tuple[int, int]] = []  # a heap of the step in which a request ends
        self._now = 0
        self._decoding = 0  # sequences whose prompt is computed
        self._decoding_tokens = 0  # tokens that those have
        self._held = 0  # slots that hold a token
        self._wanted = 0  # slots that will, in the end

    @property
    def num_slots(self) -> int:
        """Slots of the memory."""
        return self._memory.num_slots

    def reservation(self, request: int) -> int:
        """Slots that each answer's sequence reserves, before the allocator rounds them up."""
        if self.name == "reserve-max":
            return self._workload.max_length
        if self.name == "reserve-oracle":
            return self._workload.kv_length(request)
        prompt = int(self._workload.trace.prompt_lengths[request])
        guess = BuddyAllocator.rounded(max(int(self._workload.trace.output_lengths[request]), 1))
        return min(prompt + guess, self._workload.max_length)

    def can_ever_hold(self, request: int) -> bool:
        """Whether it fits into memory that nobody else is in."""
        return self._workload.width <= self.num_slots // BuddyAllocator.rounded(self.reservation(request))

    def admit(self, request: int) -> bool:
        """Reserve for all answers, or for none."""
        size = self.reservation(request)
        regions: list[int] = []
        for _ in range(self._workload.width):
            region = self._memory.allocate(size)
            if region is None:
                for taken in regions:
                    self._memory.free(taken)
                return False
            regions.append(region)
        prompt = int(self._workload.trace.prompt_lengths[request])
        self._running[request] = _Request(request, prompt, regions)
        self._prefilling.append(self._running[request])
        self._wanted += self._workload.width * self._workload.kv_length(request)
        return True

    def is_fragmented(self, request: int) -> bool:
        """Whether so many slots are free, in pieces."""
        return self._workload.width * self.reservation(request) <= self._memory.num_free

    def step(self, max_tokens: int) -> Step:
        """One token for each sequence whose prompt is computed; the rest for prompts."""
        width = self._workload.width
        self._now += 1
        self._decoding_tokens += self._decoding
        self._held += self._decoding
        num_tokens, kv_tokens = self._decoding, self._decoding_tokens
        first, finished = [], []
        while self._ends and self._ends[0][0] == self._now:
            finished.append(heapq.heappop(self._ends)[1])
        new = []
        while self._prefilling and num_tokens < max_tokens:
            request = self._prefilling[0]
            chunk = min(max_tokens - num_tokens, request.prompt - request.computed)
            request.computed += chunk
            num_tokens += chunk
            kv_tokens += request.computed
            self._held += chunk
            if request.computed == request.prompt:
                self._prefilling.popleft()
                self._held += (width - 1) * request.prompt
                first.append(request.number)
                new.append(request)
        usage = self._usage()
        for request in new:
            self._decoding += width
            self._decoding_tokens += width * request.prompt
            more = int(self._workload.trace.output_lengths[request.number]) - 1
            if more > 0:
                heapq.heappush(self._ends, (self._now + more, request.number))
            else:
                finished.append(request.number)
        for number in finished:
            self._finish(number)
        held = self.num_slots - usage.free
        return Step(num_tokens, kv_tokens, usage, held, held, first, finished)

    def _usage(self) -> Usage:
        free = self._memory.num_free
        return Usage(
            tokens=self._held,
            reserved=self._wanted - self._held,
            empty=self.num_slots - free - self._wanted,
            cached=0,
            free=free,
        )

    def _finish(self, number: int) -> None:
        request = self._running.pop(number)
        for region in request.regions:
            self._memory.free(region)
        tokens = self._workload.width * self._workload.kv_length(number)
        self._decoding -= self._workload.width
        self._decoding_tokens -= tokens
        self._held -= tokens
        self._wanted -= tokens

    def hit_rate(self) -> float | None:
        """There is no prefix cache."""
        return None

    def close(self) -> None:
        """Check that all memory came back."""
        left = (self._held, self._wanted, self._decoding, self._decoding_tokens)
        if any(left) or self._memory.num_free != self.num_slots:
            raise RuntimeError(f"{self.name}: not all memory came back: {left}")
