"""Times, counted by how long they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

# Seconds. The boundaries that OpenTelemetry's conventions for generative AI advise for these two.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


@dataclass(init=False)
class Histogram:
    """How many values were at most each bound, but more than the one before; the last count is of all above.

    One thread observes; others may copy it meanwhile.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Self:
        """As it is now."""
        copy = type(self)(self.bounds)
        copy.counts[:], copy.sum = self.counts, self.sum
        return copy
