"""kvfolio itself."""

from __future__ import annotations

from typing import Any

import kvfolio as kv
import numpy as np
from numpy.typing import NDArray

from .protocol import TOKEN, Peer

Handle = tuple[int, kv.Sequence]


class Kvfolio(Peer):
    name = package = "kvfolio"

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int, max_tokens: int) -> None:
        super().__init__(num_blocks, block_size, max_sequences, max_tokens)
        self.pool = kv.BlockPool(num_blocks, block_size)
        self.batch = kv.Batch(self.pool, max_sequences=max_sequences, max_tokens_per_sequence=max_tokens)
        self.tokens = np.full(max_sequences, TOKEN, np.int32)
        self._table: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None

    @classmethod
    def version(cls) -> str:
        return kv.__version__

    def prompt(self, token_ids: NDArray[np.int32]) -> Any:
        return token_ids

    def admit(self, prompt: Any) -> Handle:
        sequence = self.pool.sequence(prompt)
        return self.batch.add(sequence), sequence

    def step(self, handles: list[Handle] | None = None) -> None:
        plan = self.batch.plan(rows=None if handles is None else [row for row, _ in handles])
        rows = plan.rows
        _ = plan.token_ids, plan.positions, plan.query_start_loc, plan.seq_lens, plan.slot_mapping
        table = plan.block_table
        _ = plan.copies, plan.last_page_len, plan.table_updates, plan.skipped, plan.never_fit
        _ = plan.logits_rows, plan.logits_indices
        plan.commit()
        plan.extend(self.tokens[: len(rows)])
        self._table = rows, table

    def free(self, handle: Handle) -> None:
        handle[1].free()

    def num_cached(self, handle: Handle) -> int:
        return handle[1].num_cached

    def block_ids(self, handle: Handle) -> list[int]:
        return handle[1].block_ids.tolist()

    def table_row(self, handle: Handle) -> list[int]:
        assert self._table is not None
        rows, table = self._table
        return table[rows.tolist().index(handle[0])].tolist()

    def fork(self, handle: Handle) -> Handle:
        sequence = handle[1].fork()
        return self.batch.add(sequence), sequence

    def truncate(self, handle: Handle, num_tokens: int) -> None:
        handle[1].truncate(num_tokens)

    def reorder(self, handles: list[Handle], parents: list[int]) -> None:
        rows = [row for row, _ in handles]
        self.batch.reorder([rows[parent] for parent in parents], rows)
