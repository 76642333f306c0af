"""What a careful author writes without kvfolio: one file of Python and numpy.

Blocks on a deque, reference counts in a list, a prefix cache keyed by chained SHA-256, tables kept in one
numpy array that is updated in place, a step's other arrays by whole-array operations. No forks, no copies, no
plans in flight, no rollback.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(eq=False)
class Sequence:
    """Tokens, blocks, and the keys of the full ones."""

    token_ids: list[int]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    row: int = -1


@dataclass(eq=False)
class Step:
    """The arrays of one step."""

    sequences: list[Sequence]
    counts: NDArray[np.int32]
    rows: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    logits_indices: NDArray[np.int64]


class Manager:
    """Block 0 is the null block."""

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.free = deque(range(1, num_blocks + 1))
        self.ref_counts = [0] * (num_blocks + 1)
        self.key_of: dict[int, bytes] = {}
        self.by_key: dict[bytes, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.table = np.zeros((max_sequences, max_blocks), np.int32)
        self.vacant = list(range(max_sequences))
        self.running: list[Sequence] = []

    def allocate(self) -> int:
        """One block; the longest idle one gives way if none is blank."""
        if self.free:
            block = self.free.popleft()
        else:
            block, _ = self.idle.popitem(last=False)
            del self.by_key[self.key_of.pop(block)]
        self.ref_counts[block] = 1
        return block

    def key(self, parent: bytes, token_ids: list[int]) -> bytes:
        """The key of a block behind `parent`."""
        return hashlib.sha256(parent + np.array(token_ids, np.int32).tobytes()).digest()

    def admit(self, token_ids: list[int]) -> Sequence:
        """Hold what the cache has of the prompt, all but its last token."""
        sequence = Sequence(token_ids, row=self.vacant.pop(0))
        size, parent = self.block_size, b""
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            parent = self.key(parent, token_ids[start : start + size])
            block = self.by_key.get(parent)
            if block is None:
                break
            if self.ref_counts[block] == 0:
                del self.idle[block]
            self.ref_counts[block] += 1
            sequence.block_ids.append(block)
            sequence.keys.append(parent)
        count = len(sequence.block_ids)
        self.table[sequence.row, :count] = sequence.block_ids
        sequence.num_computed = count * size
        self.running.append(sequence)
        return sequence

    def plan(self, sequences: list[Sequence] | None = None) -> Step:
        """All pending tokens."""
        sequences = self.running if sequences is None else sequences
        size = self.block_size
        for sequence in sequences:
            missing = -(-len(sequence.token_ids) // size) - len(sequence.block_ids)
            for _ in range(missing):
                block = self.allocate()
                self.table[sequence.row, len(sequence.block_ids)] = block
                sequence.block_ids.append(block)
        rows = np.fromiter((s.row for s in sequences), np.int32, len(sequences))
        seq_lens = np.fromiter((len(s.token_ids) for s in sequences), np.int32, len(sequences))
        starts = np.fromiter((s.num_computed for s in sequences), np.int32, len(sequences))
        counts = seq_lens - starts
        query_start_loc = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        total = int(query_start_loc[-1])
        if total == len(sequences):
            token_ids = np.fromiter((s.token_ids[-1] for s in sequences), np.int32, total)
            positions, row_of = starts.astype(np.int64), rows
        else:
            token_ids = np.concatenate([np.array(s.token_ids[s.num_computed :], np.int32) for s in sequences])
            positions = np.arange(total) - np.repeat(query_start_loc[:-1] - starts, counts)
            row_of = np.repeat(rows, counts)
        slots = self.table[row_of, positions // size].astype(np.int64) * size + positions % size
        width = max(len(s.block_ids) for s in sequences)
        table = self.table[rows, :width]
        last = query_start_loc[1:].astype(np.int64) - 1
        return Step(
            list(sequences), counts, rows, token_ids, positions, query_start_loc, seq_lens, table, slots, last
        )

    def commit(self, step: Step) -> None:
        """The step is computed: publish what it filled."""
        size = self.block_size
        for sequence, count in zip(step.sequences, step.counts.tolist(), strict=True):
            sequence.num_computed += count
            for index in range(len(sequence.keys), sequence.num_computed // size):
                parent = sequence.keys[-1] if sequence.keys else b""
                key = self.key(parent, sequence.token_ids[index * size : (index + 1) * size])
                sequence.keys.append(key)
                block = sequence.block_ids[index]
                if key not in self.by_key:
                    self.by_key[key] = block
                    self.key_of[block] = key

    def extend(self, step: Step, token_ids: NDArray[np.int32]) -> None:
        """Append the sampled tokens."""
        for sequence, token in zip(step.sequences, token_ids.tolist(), strict=True):
            sequence.token_ids.append(token)

    def release(self, sequence: Sequence) -> None:
        """Give its blocks back, the deepest first in line to go."""
        self.running.remove(sequence)
        self.vacant.append(sequence.row)
        for block in reversed(sequence.block_ids):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self.key_of:
                    self.idle[block] = None
                else:
                    self.free.append(block)
