"""Plans for worker processes: what a plan says in a few bytes, and the arrays made of it again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvfolio import _checks

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_MAGIC = 0x6B76_0001  # "kv" and the version of the encoding


@dataclass(frozen=True)
class PlanMessage:
    """What `Plan.to_bytes` gives, and what a plan becomes when it is pickled: meant for a `TableMirror`."""

    data: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            raise TypeError(f"data must be bytes, not {type(self.data).__name__}")


class TableMirror:
    """The tables of a batch in another process, which makes every array of each of its plans.

    The two ends::

        plan.to_bytes()           # here: linear in what the step changes, whatever the context's length
        mirror.take(message)      # there: a MirroredPlan, with the arrays of the plan

    Every plan of the batch has to be taken, in the order they were made, those that were rolled back
    included: each tells only what is new.

    Parameters
    ----------
    max_sequences, max_tokens_per_sequence : int
        Of the batch.
    block_size : int
        Of the pool.
    """

    def __init__(self, *, max_sequences: int, max_tokens_per_sequence: int, block_size: int) -> None:
        max_sequences = _checks.integer("max_sequences", max_sequences, 1)
        max_tokens = _checks.integer("max_tokens_per_sequence", max_tokens_per_sequence, 1)
        self.block_size = _checks.integer("block_size", block_size, 1)
        self.table = np.zeros((max_sequences, -(-max_tokens // self.block_size)), np.int32)
        self._taken = 0

    def take(self, message: bytes | PlanMessage) -> MirroredPlan:
        """The next plan.

        Raises ValueError, and has changed nothing then, if the message is none, is not of the plan that is
        next, or is of a batch of other sizes.
        """
        data = message.data if isinstance(message, PlanMessage) else message
        plan = _decode(data)
        if plan.block_size != self.block_size:
            raise ValueError(f"message must be of blocks of {self.block_size} tokens, not {plan.block_size}")
        if plan.number != self._taken + 1:
            raise ValueError(f"message must be of plan {self._taken + 1}, the next, not of {plan.number}")
        rows, blocks = self.table.shape
        cells = plan.table_updates
        if len(cells) and (cells[:, 0].max() >= rows or cells[:, 1].max() >= blocks):
            raise ValueError(
                f"message must be of a batch of {rows} rows of {blocks} blocks, not of a larger one"
            )
        self.table[cells[:, 0], cells[:, 1]] = cells[:, 2]
        self._taken = plan.number
        lengths = -(-plan.seq_lens // self.block_size)
        width = int(lengths.max(initial=0))
        tables = self.table[plan.rows, :width]
        tables[np.arange(width) >= lengths[:, None]] = 0  # of rows that have shrunk
        object.__setattr__(plan, "block_table", tables)
        return plan


@dataclass(frozen=True, eq=False)
class MirroredPlan:
    """The arrays of a plan, made anew: names, shapes, dtypes and values are those of `kvfolio.Plan`."""

    number: int
    block_size: int
    rows: Int32
    token_ids: Int32
    seq_lens: Int32
    query_start_loc: Int32
    copies: Int32
    table_updates: Int32
    logits_rows: Int32
    logits_indices: Int64
    skipped: Int32
    never_fit: Int32
    block_table: Int32

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def max_query_len(self) -> int:
        """The most tokens of a row in this step."""
        return int(np.diff(self.query_start_loc).max(initial=0))

    @property
    def max_seq_len(self) -> int:
        """The largest KV length."""
        return int(self.seq_lens.max(initial=0))

    @cached_property
    def _index_of_token(self) -> Int64:
        return np.repeat(np.arange(len(self.rows)), np.diff(self.query_start_loc))

    @cached_property
    def positions(self) -> Int64:
        """`int64[T]`: positions of the tokens in their sequences."""
        behind = self.seq_lens.astype(np.int64) - self.query_start_loc[1:]
        return np.arange(self.num_tokens) + behind[self._index_of_token]

    @cached_property
    def slot_mapping(self) -> Int64:
        """`int64[T]`: where each token's K and V go."""
        blocks = self.block_table[self._index_of_token, self.positions // self.block_size]
        return blocks.astype(np.int64) * self.block_size + self.positions % self.block_size

    @cached_property
    def last_page_len(self) -> Int32:
        """`int32[n]`: tokens in the last page of each row."""
        return ((self.seq_lens - 1) % self.block_size + 1).astype(np.int32)

    @cached_property
    def page_indptr(self) -> Int32:
        """`int32[n + 1]`: where the pages of each row begin in page_indices."""
        indptr = np.zeros(len(self.rows) + 1, np.int32)
        np.cumsum(-(-self.seq_lens // self.block_size), out=indptr[1:])
        return indptr

    @cached_property
    def page_indices(self) -> Int32:
        """`int32`: the block ids of all rows, one row after the other."""
        width = self.block_table.shape[1]
        pages: Int32 = self.block_table[np.arange(width) < np.diff(self.page_indptr)[:, None]]
        return pages


def _decode(data: object) -> MirroredPlan:
    if not isinstance(data, bytes):
        raise TypeError(f"message must be bytes or a PlanMessage, not {type(data).__name__}")
    if len(data) % 4 or len(data) < 44:
        raise ValueError(f"message must be what Plan.to_bytes gave, not {len(data)} other bytes")
    words = np.frombuffer(data, "<i4").astype(np.int32, copy=False)
    magic, low, high, block_size, *counts = words[:11].tolist()
    sizes = dict(
        zip(("rows", "tokens", "copies", "updates", "logits", "skipped", "never_fit"), counts, strict=True)
    )
    shapes = [
        ("rows", sizes["rows"]),
        ("query_start_loc", sizes["rows"] + 1),
        ("seq_lens", sizes["rows"]),
        ("token_ids", sizes["tokens"]),
        ("copies", 2 * sizes["copies"]),
        ("table_updates", 3 * sizes["updates"]),
        ("logits_rows", sizes["logits"]),
        ("logits_indices", sizes["logits"]),
        ("skipped", sizes["skipped"]),
        ("never_fit", sizes["never_fit"]),
    ]
    if magic != _MAGIC or min(counts) < 0 or 11 + sum(size for _, size in shapes) != len(words):
        raise ValueError("message must be what Plan.to_bytes of this version gave, not other bytes")
    arrays, start = {}, 11
    for name, size in shapes:
        arrays[name] = words[start : start + size]
        start += size
    return MirroredPlan(
        number=(low & 0xFFFF_FFFF) | high << 32,
        block_size=block_size,
        rows=arrays["rows"],
        token_ids=arrays["token_ids"],
        seq_lens=arrays["seq_lens"],
        query_start_loc=arrays["query_start_loc"],
        copies=arrays["copies"].reshape(-1, 2),
        table_updates=arrays["table_updates"].reshape(-1, 3),
        logits_rows=arrays["logits_rows"],
        logits_indices=arrays["logits_indices"].astype(np.int64),
        skipped=arrays["skipped"],
        never_fit=arrays["never_fit"],
        block_table=np.zeros((0, 0), np.int32),
    )
