"""What every manager that is measured can be asked for, by the same words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

TOKEN = 7  # what is "sampled" in every step


class Peer(ABC):
    """One manager of the KV cache, with room for `max_sequences` sequences and `num_blocks` blocks.

    A handle is whatever the peer has for a sequence. `admit` looks the cache up and holds what it finds;
    `step` computes all pending tokens: it allocates, makes on the host the arrays that attention kernels
    read, publishes full blocks, and appends one sampled token to each sequence. Both together are what a
    serving loop does with a prompt.
    """

    name: ClassVar[str]
    package: ClassVar[str]  # whose version is told; empty: another peer tells it

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int, max_tokens: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_sequences, self.max_tokens = max_sequences, max_tokens

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Of the package that is measured."""

    def prompt(self, token_ids: NDArray[np.int32]) -> Any:
        """The tokens in the form that this peer takes fastest; not timed."""
        return token_ids.tolist()

    @abstractmethod
    def admit(self, prompt: Any) -> Any:
        """A new sequence; returns its handle."""

    @abstractmethod
    def step(self, handles: list[Any] | None = None) -> None:
        """One step of some sequences, by default of all that were admitted."""

    @abstractmethod
    def free(self, handle: Any) -> None:
        """The sequence is over; its published blocks stay findable."""

    @abstractmethod
    def num_cached(self, handle: Any) -> int:
        """Tokens of its prompt that the cache had."""

    @abstractmethod
    def block_ids(self, handle: Any) -> list[int]:
        """Its blocks, by the manager's own account."""

    @abstractmethod
    def table_row(self, handle: Any) -> list[int]:
        """Its blocks, by the table of the last step."""

    # What not every manager has.

    def fork(self, handle: Any) -> Any:
        """A second sequence with the same tokens, which shares the blocks."""
        raise NotImplementedError

    def truncate(self, handle: Any, num_tokens: int) -> None:
        """Cut a sequence short; its blocks behind come free."""
        raise NotImplementedError

    def reorder(self, handles: list[Any], parents: list[int]) -> None:
        """Beam search: handles[i] goes on as handles[parents[i]], all at once."""
        raise NotImplementedError


def prompt(length: int, seed: int) -> NDArray[np.int32]:
    """Tokens that no other seed has."""
    return np.random.default_rng(seed).integers(0, 100_000, length, np.int32)


def check(peer: Peer, handles: list[Any], lengths: list[int]) -> None:
    """Raise AssertionError unless the last step's work was done.

    Enough blocks for all computed tokens, distinct ones (the prompts have nothing in common), and the same in
    the table that kernels would read.
    """
    seen: set[int] = set()
    for handle, length in zip(handles, lengths, strict=True):
        blocks = [int(block) for block in peer.block_ids(handle)]
        needed = -(-length // peer.block_size)
        row = [int(block) for block in peer.table_row(handle)][:needed]
        assert len(blocks) >= needed, f"{peer.name}: {len(blocks)} blocks for {length} tokens"
        assert row == blocks[:needed], f"{peer.name}: the table has other blocks than the manager"
        assert seen.isdisjoint(blocks), f"{peer.name}: a block is in two tables"
        seen.update(blocks)
