"""`torch.ops.kvfolio.*`: the kernels as operators of torch, for tensors on a GPU or on the CPU.

They take a plan's arrays as tensors (`kvfolio.torch.PlanBuffers` has them at fixed addresses), never wait for
the device, and can be captured in CUDA graphs and seen by `torch.compile`. Dtypes are int32 unless said,
`slot_mapping` is int64. K and V are ``[blocks, block_size, num_kv_heads, head_dim]``, of any strides but the
last, 1.

======================  ============================================================================
``append``              K and V of a step's tokens into their slots; negative slots are passed over.
``copy_blocks``         Copy-on-write, all arrays in one launch. No block may be in both columns of
                        `pairs`, but for a pair of equal blocks, which is padding.
``update_table``        ``table[row, block] = id`` for each row of `updates`; negative rows are padding.
``plan_attention``      Who takes what of the step's attention, into a workspace; once for each step and
                        window. On the CPU it does nothing.
``attend``              Causal attention into `out` and, if there is one, `lse`. `window` 0 and `soft_cap`
                        0.0 are none. It needs the workspace of ``plan_attention`` with the same `extra`;
                        its `num_tokens` there is ``len(q)``. `max_query_len` may be more than it is.
======================  ============================================================================

On the CPU the wheel's kernels run. On a GPU the CUDA kernels do, which `load_cuda` builds where that has not
been done; `KVCache(device="cuda")` calls it. There heads have 64, 128 or 256 elements; addresses and strides
are multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError("kvfolio.ops needs torch: pip install 'kvfolio[torch]'") from error

from kvfolio import _arrays, _native
from kvfolio._cuda_build import load_cuda

__all__ = ["load_cuda", "workspace_bytes"]

Tensor = torch.Tensor

# Defined here, where no compiler is needed; cuda/ops.cpp adds what CUDA tensors are given to.
SCHEMAS = (
    "append(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor slot_mapping) -> ()",
    "copy_blocks(Tensor(a!)[] storage, Tensor pairs) -> ()",
    "update_table(Tensor(a!) table, Tensor updates) -> ()",
    "plan_attention(Tensor seq_lens, Tensor query_start_loc, Tensor(a!) workspace, int num_tokens, "
    "int num_heads, Tensor keys, int window, int extra) -> ()",
    "attend(Tensor q, Tensor keys, Tensor values, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor(a!) out, Tensor(b!)? lse, Tensor workspace, float scale, int window, "
    "float soft_cap, Tensor? alibi_slopes, Tensor? sinks, int max_query_len, int extra) -> ()",
)
_library: Any = torch.library.Library("kvfolio", "DEF")  # type: ignore[no-untyped-call]
for schema in SCHEMAS:
    _library.define(schema)


def workspace_bytes(
    num_sequences: int, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, extra: int
) -> int:
    """How large `plan_attention`'s workspace, a uint8 tensor, has to be.

    `num_sequences` and `num_tokens` are those of the tensors, padding included. `extra` is how many thread
    blocks a KV head, on top of one for each 16 or 64 rows, the step may be cut into: about as many as run at
    once, divided by the KV heads. It costs ``512 * extra * num_kv_heads * (head_dim + 1)`` bytes.
    """

    def aligned(size: int) -> int:
        return -(-size // 256) * 256

    def work_list(capacity: int) -> int:
        return aligned(16 + 20 * capacity)

    rows = num_tokens * (num_heads // num_kv_heads)
    few, many = num_sequences + extra, min(num_sequences, rows // 17) + rows // 64 + extra
    partial_rows = 2 * extra * num_kv_heads * 64
    return work_list(few) + work_list(many) + aligned(partial_rows * head_dim * 4) + aligned(partial_rows * 4)


def _append_cpu(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    dtype = _arrays.stored_dtype("keys", keys)
    _native.write_kv(
        dtype,
        _arrays.token_view("k", k, dtype),
        _arrays.token_view("v", v, dtype),
        _arrays.kernel_view("keys", keys, dtype, 4),
        _arrays.kernel_view("values", values, dtype, 4),
        np.ascontiguousarray(slot_mapping.numpy()),
        max_threads=_arrays.max_threads(k),
    )


def _copy_blocks_cpu(storage: list[Tensor], pairs: Tensor) -> None:
    dtype = _arrays.stored_dtype("storage", storage[0])
    views = [_arrays.kernel_view(f"storage[{i}]", part, dtype, 4) for i, part in enumerate(storage)]
    moved = pairs[pairs[:, 0] != pairs[:, 1]]
    _native.copy_blocks(dtype, views, np.ascontiguousarray(moved.numpy()))


def _update_table_cpu(table: Tensor, updates: Tensor) -> None:
    row, block, block_id = updates[updates[:, 0] >= 0].long().unbind(1)
    table[row, block] = block_id.int()


def _plan_attention_cpu(*_: Any) -> None:
    """The CPU's kernels plan for themselves."""


def _attend_cpu(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    max_query_len: int,
    extra: int,
) -> None:
    dtype = _arrays.stored_dtype("keys", keys)
    _native.attend(
        dtype,
        _arrays.token_view("q", q, dtype),
        _arrays.kernel_view("keys", keys, dtype, 4),
        _arrays.kernel_view("values", values, dtype, 4),
        _arrays.kernel_view("out", out, dtype, 3),
        None if lse is None else lse.numpy(),
        block_table.numpy(),
        np.ascontiguousarray(seq_lens.numpy()),
        np.ascontiguousarray(query_start_loc.numpy()),
        scale=scale,
        sliding_window=window or None,
        logit_softcap=soft_cap or None,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.numpy(),
        sinks=None if sinks is None else sinks.numpy(),
        max_threads=_arrays.max_threads(q),
    )


def _nothing(*_: Any) -> None:
    """What a compiler has to know of operators that only write into their arguments."""


for name, function in (
    ("append", _append_cpu),
    ("copy_blocks", _copy_blocks_cpu),
    ("update_table", _update_table_cpu),
    ("plan_attention", _plan_attention_cpu),
    ("attend", _attend_cpu),
):
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"kvfolio::{name}", _nothing, lib=_library)
