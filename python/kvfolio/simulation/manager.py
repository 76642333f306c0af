"""What a manager of the KV cache is to the simulation, and what it tells of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Usage:
    """What the slots of the memory are at one moment. They sum up to all slots.

    Attributes
    ----------
    tokens : int
        Hold a token's K and V that some running sequence reads; what several share counts once.
    reserved : int
        Taken by a sequence that will fill them.
    empty : int
        Taken, and never filled: internal fragmentation.
    cached : int
        Hold K and V that no running sequence reads, findable and free to be taken.
    free : int
        The rest.
    """

    tokens: int
    reserved: int
    empty: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did. Requests are numbers in the workload.

    Attributes
    ----------
    num_tokens : int
        Computed.
    kv_tokens : int
        Tokens whose K and V were read: of each sequence in the step all up to its last one in it.
    usage : Usage
        During the step, before what ended in it was let go.
    held_slots, table_slots : int
        Slots that the sequences hold together: what several share counts once, and once for each of them.
    first, finished, preempted : sequence of int
        Requests whose first token came, whose last one came, and that gave way before the step, the oldest
        first.
    """

    num_tokens: int
    kv_tokens: int
    usage: Usage
    held_slots: int
    table_slots: int
    first: Sequence[int] = ()
    finished: Sequence[int] = ()
    preempted: Sequence[int] = ()


class Manager(Protocol):
    """Decides who gets memory. Requests are admitted in the order in which they came."""

    name: str

    @property
    def num_slots(self) -> int:
        """Slots of the memory, whatever they are used for."""

    def can_ever_hold(self, request: int) -> bool:
        """Whether the request can be served at all, if it is alone."""

    def admit(self, request: int) -> bool:
        """Take a request in, if there is memory for it; one that gave way goes on where it was."""

    def is_fragmented(self, request: int) -> bool:
        """Whether a request that was not admitted would be, if all that is free lay in one piece."""

    def step(self, max_tokens: int) -> Step:
        """Compute at most so many tokens for those in the batch, in the order of their admission."""

    def hit_rate(self) -> float | None:
        """Found tokens of all that were looked up; None without a prefix cache."""

    def close(self) -> None:
        """Check that nothing is left, and nothing is wrong. Raises RuntimeError or CorruptPool."""
