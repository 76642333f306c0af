"""Means over time, and a line to draw, of what changes from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from .manager import Step

POINTS = 1000
"""At least half as many points of a history are kept, spread evenly over the steps."""
SHARES = ("tokens", "reserved", "empty", "cached", "external", "free")


@dataclass
class Sums:
    """Slots times seconds, and others of that kind."""

    seconds: float = 0.0
    slots: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    running: float = 0.0
    held_slots: float = 0.0
    table_slots: float = 0.0

    def add(self, seconds: float, step: Step, fragmented: bool, running: int) -> None:
        """Count a step of so many seconds."""
        slots, usage = self.slots, step.usage
        slots["tokens"] += seconds * usage.tokens
        slots["reserved"] += seconds * usage.reserved
        slots["empty"] += seconds * usage.empty
        slots["cached"] += seconds * usage.cached
        slots["external" if fragmented else "free"] += seconds * usage.free
        self.seconds += seconds
        self.running += seconds * running
        self.held_slots += seconds * step.held_slots
        self.table_slots += seconds * step.table_slots

    def shares(self) -> dict[str, float]:
        """The means of all slots' shares; they sum up to 1."""
        total = sum(self.slots.values())
        return {name: value / total if total else 0.0 for name, value in self.slots.items()}


@dataclass
class Point:
    """One step: when it began, requests running and waiting, and the share of slots that hold tokens."""

    time: float
    running: int
    waiting: int
    tokens: float


class History:
    """Every so-many-th step, fewer the longer it lasts, so that memory is bounded."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._every = 1
        self._steps = 0

    def add(self, time: float, running: int, waiting: int, tokens: float) -> None:
        """A step; most are passed over."""
        if self._steps % self._every == 0:
            self.points.append(Point(time, running, waiting, tokens))
            if len(self.points) == POINTS:
                del self.points[1::2]
                self._every *= 2
        self._steps += 1
