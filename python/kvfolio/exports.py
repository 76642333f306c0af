"""A plan's arrays under the names, in the dtypes and granularity that attention libraries ask for.

Each function returns a dict to be passed by keyword. Arrays are the plan's own or made of them; for tensors
on a device at fixed addresses see `kvfolio.torch`.

What each library asks for, by its source in the version that was read (November 2026). Padding is what its
rows and tokens of a CUDA graph have behind the real ones, and how `PlanBuffers` is told.

================  ==================================  ====================  ================================
library           dtypes                              page size             padding
================  ==================================  ====================  ================================
FlashAttention-2  int32; rows of the table may lie    a multiple of 256     a length of 0: `pad_seq_len=0`
2.8.3             apart, cells not                                          (result zeros)
FlashAttention-3  the same; the table is called       any                   the same
(commit 01afd16)  `page_table`
FlashInfer 0.7.4  int32, contiguous; graphs need all  any; vLLM uses it     rows of no page, last page of 1
                  rows of the wrapper's batch in      up to 64              (or 0): `pad_last_page_len`, and
                  every step                                                `max_pages` for the table
vLLM 0.33.0       slots int64, the rest int32         a multiple of 16      slot -1, `PAD_SLOT_ID`, length 0:
                                                                            `pad_slot=-1, pad_seq_len=0`
SGLang 0.5.23     slots int64; token indices int32    1: its tables are     slot 0, length 1: `pad_slot=0,
                  (FlashInfer) or int64 (Triton)      by the token          pad_seq_len=1`
================  ==================================  ====================  ================================

Block 0 is a place to write to and read from for all of them: kvfolio's null block, vLLM's null block, and
the page that SGLang keeps for padding tokens.
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
    """For FlashAttention-2's `flash_attn_with_kvcache`, as many tokens in each row; K and V written before.

    `block_table` int32 ``[n, W]``, of which rows may lie apart but cells may not, and `cache_seqlens` int32
    ``[n]``, this step's tokens included. Blocks must be of a multiple of 256 tokens
    (``flash_attn/flash_attn_interface.py`` and ``csrc/flash_attn/flash_api.cpp`` of 2.8.3).
    """
    return {"block_table": plan.block_table, "cache_seqlens": plan.seq_lens}


def flash_attention_varlen(plan: PlanLike) -> Arrays:
    """For FlashAttention-2's `flash_attn_varlen_func`: any number of tokens in each row, prompts included.

    `block_table` as in `flash_attention`, `cu_seqlens_q` and `cu_seqlens_k` int32 ``[n + 1]``; the ints
    `max_seqlen_q` and `max_seqlen_k` are the plan's `max_query_len` and `max_seq_len`.
    """
    cu_seqlens_k = np.zeros(len(plan.seq_lens) + 1, np.int32)
    np.cumsum(plan.seq_lens, out=cu_seqlens_k[1:])
    return {
        "block_table": plan.block_table,
        "cu_seqlens_q": plan.query_start_loc,
        "cu_seqlens_k": cu_seqlens_k,
    }


def flash_attention_3(plan: PlanLike) -> Arrays:
    """For FlashAttention-3's `flash_attn_with_kvcache`: any number of tokens in each row, blocks of any size.

    `page_table` int32 ``[n, W]``, `cache_seqlens` int32 ``[n]`` and `cu_seqlens_q` int32 ``[n + 1]``; the int
    `max_seqlen_q` is the plan's `max_query_len`. (``hopper/flash_attn_interface.py`` at commit 01afd16;
    it has no `block_table`.)
    """
    return {
        "page_table": plan.block_table,
        "cache_seqlens": plan.seq_lens,
        "cu_seqlens_q": plan.query_start_loc,
    }


def flashinfer(plan: PlanLike) -> Arrays:
    """For `plan` of FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`, which takes single queries, too.

    `plan` of `BatchDecodeWithPagedKVCacheWrapper` takes the last three, as `indptr`, `indices` and
    `last_page_len`: give them by place.

    All int32. Every row has a page, so ``1 <= paged_kv_last_page_len <= page_size`` holds. `plan` looks at
    all but the indices on the CPU, so arrays that come from there cost no synchronisation.

    A wrapper made with `use_cuda_graph` takes exactly as many rows as its buffers have
    (``flashinfer/decode.py`` of 0.7.4: "the batch size should be fixed in cudagraph mode"). Padding rows are
    rows of no page, `paged_kv_indptr` repeating its last entry, as `PlanBuffers(max_pages=...).write_csr`
    has them; kernels take such rows for empty (``paged_kv_t::get_length`` in ``page.cuh``), whatever their
    last page length.
    """
    return {
        "qo_indptr": plan.query_start_loc,
        "paged_kv_indptr": plan.page_indptr,
        "paged_kv_indices": plan.page_indices,
        "paged_kv_last_page_len": plan.last_page_len,
    }


def vllm(plan: PlanLike) -> Arrays:
    """In vLLM's names: `slot_mapping` int64 ``[T]``, the others int32.

    As ``v1/worker/block_table.py`` and ``v1/worker/gpu_model_runner.py`` of 0.33.0 have them. Kernels skip
    negative slots: padding tokens of a CUDA graph have slot -1, `PAD_SLOT_ID`, padding rows a length of 0,
    and `query_start_loc` repeats its last entry, all of which `PlanBuffers(pad_slot=-1)` does. Kernels' block
    sizes are multiples of 16 (FlashAttention and Triton backends).
    """
    return {
        "block_table": plan.block_table,
        "slot_mapping": plan.slot_mapping,
        "seq_lens": plan.seq_lens,
        "query_start_loc": plan.query_start_loc,
    }


def sglang(plan: PlanLike, block_size: int, *, indices: type[np.int32 | np.int64] = np.int32) -> Arrays:
    """As SGLang has them, by the token: the slots of all tokens of each row, and where each row's begin.

    `kv_indptr` int32 ``[n + 1]``, `kv_indices` ``[all tokens of all rows]``, `kv_last_page_len` int32
    ``[n]``, all ones, since a page is a token, and `out_cache_loc` int64 ``[T]``. `indices` is the dtype of
    `kv_indices`: int32 for its FlashInfer backend and for rows of `req_to_token`, int64 for its Triton
    backend (``srt/layers/attention/flashinfer_backend.py`` and ``triton_backend.py`` of 0.5.23). Linear in
    all tokens.

    Raises OverflowError if int32 cannot hold a slot or their number.
    """
    block_size = _checks.integer("block_size", block_size, 1)
    if indices not in (np.int32, np.int64):
        raise TypeError(f"indices must be numpy.int32 or numpy.int64, not {indices!r}")
    seq_lens = plan.seq_lens.astype(np.int64)
    indptr = np.zeros(len(seq_lens) + 1, np.int64)
    np.cumsum(seq_lens, out=indptr[1:])
    largest = (int(plan.block_table.max(initial=0)) + 1) * block_size - 1
    if largest > np.iinfo(indices).max:
        raise OverflowError(f"kv_indices must be slots below 2**31, not up to {largest}")
    if indptr[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"kv_indptr must be below 2**31, not {indptr[-1]}")
    table = plan.block_table.astype(np.int64)
    slots = (table[:, :, None] * block_size + np.arange(block_size)).reshape(len(table), -1)
    return {
        "kv_indptr": indptr.astype(np.int32),
        "kv_indices": slots[np.arange(slots.shape[1]) < seq_lens[:, None]].astype(indices),
        "kv_last_page_len": np.ones(len(seq_lens), np.int32),
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
