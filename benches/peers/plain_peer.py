"""The pure-Python manager of `plain_python.py`."""

from __future__ import annotations

import sys

import numpy as np

from . import plain_python
from .protocol import TOKEN, Peer


class PlainPython(Peer):
    name, package = "plain Python", ""

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int, max_tokens: int) -> None:
        super().__init__(num_blocks, block_size, max_sequences, max_tokens)
        self.manager = plain_python.Manager(
            num_blocks, block_size, max_sequences, -(-max_tokens // block_size)
        )
        self.tokens = np.full(max_sequences, TOKEN, np.int32)
        self._cached: dict[plain_python.Sequence, int] = {}
        self._last: plain_python.Step | None = None

    @classmethod
    def version(cls) -> str:
        return f"Python {sys.version.split()[0]}"

    def admit(self, prompt: list[int]) -> plain_python.Sequence:
        sequence = self.manager.admit(list(prompt))  # it appends to it
        self._cached[sequence] = sequence.num_computed
        return sequence

    def step(self, handles: list[plain_python.Sequence] | None = None) -> None:
        self._last = self.manager.plan(handles)
        self.manager.commit(self._last)
        self.manager.extend(self._last, self.tokens[: len(self._last.sequences)])

    def free(self, handle: plain_python.Sequence) -> None:
        self.manager.release(handle)
        del self._cached[handle]

    def num_cached(self, handle: plain_python.Sequence) -> int:
        return self._cached[handle]

    def block_ids(self, handle: plain_python.Sequence) -> list[int]:
        return handle.block_ids

    def table_row(self, handle: plain_python.Sequence) -> list[int]:
        assert self._last is not None
        return self._last.block_table[self._last.sequences.index(handle)].tolist()
