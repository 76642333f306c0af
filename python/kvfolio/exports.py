"""A plan's arrays under the names, in the dtypes and granularity that attention libraries ask for.

Each function returns a dict to be passed by keyword. Arrays are the plan's own or made of them; for tensors
on a device at fixed addresses see `kvfolio.torch`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvfolio import _checks

Arrays = dict[str, NDArray[Any]]


class PlanLike(Protocol):
    """A `Plan` or a `MirroredPlan`."""

    @property
    def block_table(self) -> NDArray[np.int32]:
        """`int32[n, W]`."""

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """`int32[n]`."""

    @property
    def query_start_loc(self) -> NDArray[np.int32]:
        """`int32[n + 1]`."""

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """`int64[T]`."""

    @property
    def page_indptr(self) -> NDArray[np.int32]:
        """`int32[n + 1]`."""

    @property
    def page_indices(self) -> NDArray[np.int32]:
        """`int32`."""

    @property
    def last_page_len(self) -> NDArray[np.int32]:
        """`int32[n]`."""


def flash_attention(plan: PlanLike) -> Arrays:
    """For `flash_attn_with_kvcache`, one token a row, K and V of the step written before.

    `block_table` int32 ``[n, W]``, of which rows may lie apart but cells may not, and `cache_seqlens` int32
    ``[n]``, this step's tokens included. FlashAttention-2 wants blocks of a multiple of 256 tokens;
    FlashAttention-3 takes any.
    """
    return {"block_table": plan.block_table, "cache_seqlens": plan.seq_lens}


def flashinfer(plan: PlanLike) -> Arrays:
    """For `plan` of FlashInfer's wrappers with paged KV: `qo_indptr` for prefill, the others for decode, too.

    All int32. Every row has a page, so ``1 <= paged_kv_last_page_len <= page_size`` holds. Padding rows of a
    CUDA graph are rows of no page: repeat the last entry of `paged_kv_indptr`, and give them a last page
    length of 1, as `PlanBuffers` does.
    """
    return {
        "qo_indptr": plan.query_start_loc,
        "paged_kv_indptr": plan.page_indptr,
        "paged_kv_indices": plan.page_indices,
        "paged_kv_last_page_len": plan.last_page_len,
    }


def vllm(plan: PlanLike) -> Arrays:
    """In vLLM's names: `slot_mapping` int64 ``[T]``, the others int32.

    Its kernels skip negative slots: padding tokens of a CUDA graph have slot -1
    (``PlanBuffers(..., pad_slot=-1)``).
    """
    return {
        "block_table": plan.block_table,
        "slot_mapping": plan.slot_mapping,
        "seq_lens": plan.seq_lens,
        "query_start_loc": plan.query_start_loc,
    }


def sglang(plan: PlanLike, block_size: int) -> Arrays:
    """As SGLang has them, by the token: the slots of all tokens of each row, and where each row's begin.

    `kv_indptr` int32 ``[n + 1]``, `kv_indices` int32 (slots beyond 2^31 - 1 raise OverflowError), and
    `out_cache_loc` int64 ``[T]``. Linear in all tokens of all rows.
    """
    block_size = _checks.integer("block_size", block_size, 1)
    seq_lens = plan.seq_lens.astype(np.int64)
    largest = (int(plan.block_table.max(initial=0)) + 1) * block_size - 1
    if max(largest, int(seq_lens.sum())) > np.iinfo(np.int32).max:
        raise OverflowError(f"kv_indices must be slots below 2**31, not up to {largest}")
    indptr = np.zeros(len(seq_lens) + 1, np.int64)
    np.cumsum(seq_lens, out=indptr[1:])
    table = plan.block_table.astype(np.int64)
    slots = (table[:, :, None] * block_size + np.arange(block_size)).reshape(len(table), -1)
    indices = slots[np.arange(slots.shape[1]) < seq_lens[:, None]]
    return {
        "kv_indptr": indptr.astype(np.int32),
        "kv_indices": indices.astype(np.int32),
        "out_cache_loc": plan.slot_mapping,
    }


def expanded_block_table(
    block_table: NDArray[np.int32], block_size: int, kernel_block_size: int
) -> NDArray[np.int32]:
    """The same table for a kernel of smaller pages: int32 ``[n, W * block_size / kernel_block_size]``.

    Storage is seen as ``[num_physical_blocks * k, kernel_block_size, ...]``, k pages a block; the null block
    becomes null pages, all of them safe addresses. Slots stay the same numbers.

    Raises ValueError unless `kernel_block_size` divides `block_size`.
    """
    block_size = _checks.integer("block_size", block_size, 1)
    kernel_block_size = _checks.integer("kernel_block_size", kernel_block_size, 1)
    if block_size % kernel_block_size:
        raise ValueError(
            f"kernel_block_size must divide {block_size}, the block size, not {kernel_block_size}"
        )
    pages = block_size // kernel_block_size
    table = np.asarray(block_table)
    expanded = table[:, :, None] * np.int32(pages) + np.arange(pages, dtype=np.int32)
    expanded[table == 0] = 0
    return expanded.reshape(len(table), -1).astype(np.int32, copy=False)
