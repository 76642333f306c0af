"""Memory at fixed addresses that plans are written into."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvfolio import _checks, _native
from kvfolio._native import Batch, Plan

_CSR = {"page_indptr", "page_indices"}
ALIGNMENT = 256  # bytes: what device copies and vector loads like best


class Field(NamedTuple):
    """Where one array lies in the memory: bytes from its start, numpy's name of the dtype, shape."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def layout(max_sequences: int, max_tokens: int, max_blocks: int, max_pages: int | None) -> dict[str, Field]:
    """Every array's place; the block table is behind the small ones, its CSR form behind it."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "rows": ("int32", (max_sequences,)),
        "token_ids": ("int32", (max_tokens,)),
        "positions": ("int64", (max_tokens,)),
        "query_start_loc": ("int32", (max_sequences + 1,)),
        "seq_lens": ("int32", (max_sequences,)),
        "slot_mapping": ("int64", (max_tokens,)),
        "last_page_len": ("int32", (max_sequences,)),
        "logits_rows": ("int32", (max_sequences,)),
        "logits_indices": ("int64", (max_sequences,)),
        "block_table": ("int32", (max_sequences, max_blocks)),
    }
    if max_pages is not None:
        shapes["page_indptr"] = ("int32", (max_sequences + 1,))
        shapes["page_indices"] = ("int32", (max_pages,))
    fields, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        fields[name] = Field(offset, dtype, shape)
        offset += -(-fields[name].num_bytes // ALIGNMENT) * ALIGNMENT
    return fields


class PlanBuffers(_native.PlanBuffers):
    """Memory that the caller owns and `Batch.plan(out=...)` writes into: always the same addresses.

    All arrays lie in one piece of memory and have their full size; a plan writes the first n rows and T
    tokens, and padding behind them, as CUDA graphs of a fixed size want it: rows without a query token, whose
    tables are null, and tokens that no row has. The plan's own arrays are views of this memory, cut to n and
    T. They change with the next plan that is written here: when that may happen is the caller's to know.

    Of the block table only what changed is written. Who has written into it himself calls `forget`.

    Parameters
    ----------
    batch : Batch
        The only one whose plans can be written here.
    max_tokens : int, optional
        T at most; by default one token a row.
    max_sequences, max_blocks : int, optional
        Rows at most, and blocks of a row; by default as many as the batch can have.
    max_pages : int, optional
        Room in `page_indices`, for the table in CSR form that `write_csr` makes; `max_sequences * max_blocks`
        is always enough. By default there is none.
    memory : uint8 array, optional
        Contiguous, writable, at an address that 8 divides, and not of use for anything else; its size must
        be `num_bytes` at least. By default it is allocated.
    pad_slot : int
        Where padding tokens' K and V go: 0 is the null block's first slot, which anybody may write and
        nobody reads; -1 for kernels that skip negative slots (vLLM).
    pad_seq_len, pad_last_page_len : int
        What padding rows have there.

    Raises
    ------
    TypeError, ValueError
        By name of the argument. A plan that does not fit raises ValueError and changes nothing.
    """

    memory: NDArray[np.uint8]
    fields: dict[str, Field]
    arrays: dict[str, NDArray[Any]]
    _num_pages: int

    def __new__(
        cls,
        batch: Batch,
        max_tokens: int | None = None,
        *,
        max_sequences: int | None = None,
        max_blocks: int | None = None,
        max_pages: int | None = None,
        memory: NDArray[np.uint8] | None = None,
        pad_slot: int = 0,
        pad_seq_len: int = 0,
        pad_last_page_len: int = 1,
    ) -> Self:
        """See the class."""
        fields = cls.layout_of(
            batch, max_tokens, max_sequences=max_sequences, max_blocks=max_blocks, max_pages=max_pages
        )
        num_bytes = cls.size_of(fields)
        if memory is None:
            memory = _aligned(num_bytes)
        if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8 or memory.ndim != 1:
            raise TypeError(f"memory must be a flat array of uint8, not {type(memory).__name__}")
        if len(memory) < num_bytes:
            raise ValueError(f"memory must have at least {num_bytes} bytes, not {len(memory)}")
        if memory.ctypes.data % 8:
            raise ValueError("memory must begin at an address that 8 divides")
        arrays = {
            name: memory[field.offset : field.offset + field.num_bytes].view(field.dtype).reshape(field.shape)
            for name, field in fields.items()
        }
        buffers = super().__new__(
            cls,
            batch,
            **{name: array for name, array in arrays.items() if name not in _CSR},
            pad_slot=_checks.integer("pad_slot", pad_slot, -1),
            pad_seq_len=_checks.integer("pad_seq_len", pad_seq_len, 0),
            pad_last_page_len=_checks.integer("pad_last_page_len", pad_last_page_len, 0),
        )
        buffers.memory, buffers.fields, buffers.arrays = memory, fields, arrays
        buffers._num_pages = 0
        for name in _CSR & arrays.keys():
            arrays[name].fill(0)
        return buffers

    @staticmethod
    def layout_of(
        batch: Batch,
        max_tokens: int | None = None,
        *,
        max_sequences: int | None = None,
        max_blocks: int | None = None,
        max_pages: int | None = None,
    ) -> dict[str, Field]:
        """Where each array would lie, given the arguments of the class."""
        if not isinstance(batch, Batch):
            raise TypeError(f"batch must be a Batch, not {type(batch).__name__}")
        if max_sequences is None:
            max_sequences = batch.max_sequences
        if max_tokens is None:
            max_tokens = max_sequences
        if max_blocks is None:
            max_blocks = -(-batch.max_tokens_per_sequence // batch.pool.block_size)
        return layout(
            _checks.integer("max_sequences", max_sequences, 1),
            _checks.integer("max_tokens", max_tokens, 1),
            _checks.integer("max_blocks", max_blocks, 1),
            None if max_pages is None else _checks.integer("max_pages", max_pages, 1),
        )

    def write_csr(self, plan: Plan) -> None:
        """Write the block table of the plan that is here in CSR form: `page_indptr`, `page_indices`.

        For FlashInfer, whose wrappers want them beside `last_page_len`. Padding rows have no page, and behind
        the last page there are null blocks. Linear in all blocks; only who calls it pays for it.

        Raises ValueError if the buffers were made without `max_pages`, if that is too small, or if the plan
        was not written here; then nothing was changed.
        """
        indptr, indices = (self.arrays.get(name) for name in ("page_indptr", "page_indices"))
        if indptr is None or indices is None:
            raise ValueError("max_pages must have been given to make room for the CSR form")
        if plan.rows.ctypes.data != self.arrays["rows"].ctypes.data:
            raise ValueError("plan must be the one that was written into these buffers")
        num_rows, num_pages = len(plan.rows), len(plan.page_indices)
        if num_pages > len(indices):
            raise ValueError(f"max_pages must be at least {num_pages} for this plan, not {len(indices)}")
        indptr[: num_rows + 1] = plan.page_indptr
        indptr[num_rows + 1 :] = num_pages
        indices[:num_pages] = plan.page_indices
        indices[num_pages : self._num_pages] = 0
        self._num_pages = num_pages

    @staticmethod
    def size_of(fields: dict[str, Field]) -> int:
        """Bytes that a layout takes."""
        return max(field.offset + field.num_bytes for field in fields.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that are used."""
        return self.size_of(self.fields)

    def __repr__(self) -> str:
        rows, blocks = self.fields["block_table"].shape
        (tokens,) = self.fields["token_ids"].shape
        return (
            f"{type(self).__name__}({rows} rows of {blocks} blocks, {tokens} tokens, {self.num_bytes} bytes)"
        )


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]
