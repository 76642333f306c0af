"""The part of a `KVCache` whose storage is on a device: its steps, and the operators that work on them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvfolio import _arrays, _other_kernels, ops
from kvfolio._native import Plan

HEAD_DIMS = (64, 128, 256)
SHARED_KIB = {128: 52, 256: 70, 512: 138, 1024: 145}
"""Shared memory of a thread block, by bytes of a head (docs/cuda.md)."""
BLOCKS_OF_SM = 3
"""Thread blocks of decode that run at once on a multiprocessor (docs/cuda.md)."""


@dataclass(frozen=True)
class Options:
    """What `KVCache.attend` was asked for, checked."""

    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    alibi_slopes: torch.Tensor | None  # float32, on the device
    sinks: torch.Tensor | None


@dataclass(eq=False)
class Step:
    """A plan's arrays on the device, and what was planned from them there."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    copies: torch.Tensor
    max_query_len: int
    workspaces: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (window, heads)


Tensors = tuple[torch.Tensor, ...]


def allocate(
    shape: Sequence[int], dtype: str, device: Any, num_layers: int, backend: str
) -> tuple[Tensors, Tensors, DeviceStorage]:
    """Storage for K and V of all layers, zeros."""
    ops.load_cuda()  # before the memory: it may fail
    try:
        keys, values = (
            tuple(torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for _ in range(num_layers))
            for _ in range(2)
        )
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"{device} refuses the memory for K and V: {error}") from None
    return keys, values, DeviceStorage(keys, values, dtype, backend)


def check_storage(named: Sequence[tuple[str, Any]], shape: tuple[int, int]) -> None:
    """TypeError or ValueError if these tensors, by name, are not fit to be a cache's."""
    first = named[0][1]
    expected = (*shape, *first.shape[2:])
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor) or (tensor.device, tensor.dtype) != (
            first.device,
            first.dtype,
        ):
            raise TypeError(f"{name} must be a tensor of {first.dtype} on {first.device}, as keys[0] is")
        if tuple(tensor.shape) != expected or len(expected) != 4:
            raise ValueError(
                f"{name} must be of shape [{shape[0]} (pool.num_physical_blocks), {shape[1]} "
                f"(pool.block_size), num_kv_heads, head_dim], the same for all layers, "
                f"not {tuple(tensor.shape)}"
            )
        unit = 16 // tensor.element_size()
        if tensor.stride(-1) != 1 or any(stride % unit or stride == 0 for stride in tensor.stride()[:-1]):
            raise ValueError(
                f"{name} must have adjacent elements of heads, and other strides that are multiples of "
                f"{unit} and not 0; its strides are {tensor.stride()}"
            )
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes")


def check_room(properties: Any, head_dim: int, dtype: str) -> None:
    """ValueError if a GPU has too little shared memory for these heads."""
    needed = SHARED_KIB[head_dim * _arrays.ITEM_SIZES[dtype]]
    there = properties.shared_memory_per_block_optin // 1024
    if there < needed:
        raise ValueError(
            f"head_dim {head_dim} in {dtype} needs {needed} KiB of shared memory a thread block; "
            f"{properties.name} has {there}"
        )


class DeviceStorage:
    """K and V of every layer as tensors of one device.

    Everything is queued on the current stream, and nothing waits. A plan's arrays are brought to the device
    once, in one copy; who wants them at fixed addresses, for CUDA graphs, uses `kvfolio.torch.PlanBuffers`
    and `torch.ops.kvfolio`.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        dtype: str,
        backend: str = "kvfolio",
    ) -> None:
        self.keys, self.values, self._dtype = list(keys), list(values), getattr(torch, dtype)
        self.device = keys[0].device
        self._steps: weakref.WeakKeyDictionary[Plan, Step] = weakref.WeakKeyDictionary()
        self._other = _other_kernels.load(backend, keys[0])
        self._ops = torch.ops.kvfolio
        self._extra = 0
        if self.device.type == "cuda":
            head_dim = keys[0].shape[3]
            if self._other is None and head_dim not in HEAD_DIMS:
                raise ValueError(f"head_dim must be 64, 128 or 256 on {self.device}, not {head_dim}")
            ops.load_cuda()
            properties = torch.cuda.get_device_properties(self.device)
            if self._other is None:
                check_room(properties, head_dim, dtype)
            self._extra = max(1, properties.multi_processor_count * BLOCKS_OF_SM // keys[0].shape[2])

    def view(self, argument: str, value: Any, ndim: int) -> torch.Tensor:
        """A tensor that fits the storage; TypeError or ValueError if it does not."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{argument} must be a torch tensor, not {type(value).__name__}")
        if value.dtype != self._dtype:
            raise TypeError(f"{argument} must be of dtype {self._dtype}, as the cache is, not {value.dtype}")
        if value.device != self.device:
            raise ValueError(
                f"{argument} must be on {self.device}, where the cache is, not on {value.device}"
            )
        if value.ndim != ndim:
            raise ValueError(f"{argument} must have {ndim} dimensions, not shape {tuple(value.shape)}")
        # Heads are read 16 bytes at a time.
        unit = 16 // value.element_size()
        adjacent = value.shape[-1] <= 1 or value.stride(-1) == 1
        aligned = value.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in value.stride()[:-1])
        return value.detach() if adjacent and aligned else value.detach().contiguous()

    def copy_blocks(self, plan: Plan, copies: NDArray[np.int32], num_blocks: int) -> None:
        """Copy-on-write. IndexError for a block that is not there, ValueError for one in both columns."""
        if not len(copies):
            return
        _check_copies(copies, num_blocks)
        self._ops.copy_blocks([*self.keys, *self.values], self._step(plan).copies)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        """Put a step's K and V into their slots, after what the kernels do not look at was."""
        keys = self.keys[layer]
        for argument, tokens in (("k", k), ("v", v)):
            if tokens.shape[1] != keys.shape[2]:
                raise ValueError(
                    f"{argument} must have {keys.shape[2]} heads (num_kv_heads), not {tokens.shape[1]}"
                )
        slots, limit = plan.slot_mapping, keys.shape[0] * keys.shape[1]
        if len(slots) != len(k) or int(slots.max(initial=-1)) >= limit:
            raise IndexError(f"plan.slot_mapping must have {len(k)} slots below {limit}, one for each token")
        self._ops.append(k, v, keys, self.values[layer], self._step(plan).slot_mapping)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        plan: Plan,
        scale: float,
        sliding_window: int | None,
        logit_softcap: float | None,
        alibi_slopes: Any,
        sinks: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse."""
        num_tokens, num_heads, head_dim = q.shape
        keys, values = self.keys[layer], self.values[layer]
        num_kv_heads, block_size = keys.shape[2], keys.shape[1]
        if num_heads == 0 or num_heads % num_kv_heads:
            raise ValueError(
                f"q must have a multiple of {num_kv_heads} (num_kv_heads) heads, not {num_heads}"
            )
        if logit_softcap is not None and not 0 < logit_softcap < np.inf:
            raise ValueError(f"logit_softcap must be above 0 and finite, not {logit_softcap}")
        slopes = self._per_head("alibi_slopes", alibi_slopes, num_heads)
        sinks = self._per_head("sinks", sinks, num_heads)
        window = min(sliding_window or 0, 2**31 - 1)
        step = self._step(plan)
        if (window, num_heads) not in step.workspaces:
            _check_in_sight(plan, window, block_size)
            size = ops.workspace_bytes(
                len(step.seq_lens), num_tokens, num_heads, num_kv_heads, head_dim, self._extra
            )
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
            step.workspaces[window, num_heads] = workspace
            if self._other is None:
                self._ops.plan_attention(
                    step.seq_lens,
                    step.query_start_loc,
                    workspace,
                    num_tokens,
                    num_heads,
                    keys,
                    window,
                    self._extra,
                )
        if self._other is not None:
            options = Options(scale, sliding_window, logit_softcap, slopes, sinks)
            return self._other.attend(q, keys, values, plan, step, options)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device)
        self._ops.attend(
            q,
            keys,
            values,
            step.block_table,
            step.seq_lens,
            step.query_start_loc,
            out,
            lse,
            step.workspaces[window, num_heads],
            scale,
            window,
            logit_softcap or 0.0,
            slopes,
            sinks,
            step.max_query_len,
            self._extra,
        )
        return out, lse

    def _per_head(self, argument: str, value: Any, num_heads: int) -> torch.Tensor | None:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor) or value.is_cpu:
            value = torch.from_numpy(_arrays.float32_vector(argument, value, num_heads).copy())
        if value.shape != (num_heads,):
            raise ValueError(
                f"{argument} must have shape ({num_heads},), one number for each query head, "
                f"not {tuple(value.shape)}"
            )
        moved: torch.Tensor = value.detach().to(self.device, torch.float32, non_blocking=True).contiguous()
        return moved

    def _step(self, plan: Plan) -> Step:
        step = self._steps.get(plan)
        if step is None:
            step = self._steps[plan] = self._bring(plan)
        return step

    def _bring(self, plan: Plan) -> Step:
        """One copy to the device. Torch does not use the pinned memory again before it has been made."""
        names = ("slot_mapping", "block_table", "seq_lens", "query_start_loc", "copies")
        arrays = [np.ascontiguousarray(getattr(plan, name)) for name in names]
        starts = np.cumsum([0, *[-(-array.nbytes // 16) * 16 for array in arrays]]).tolist()
        staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        memory = staging.numpy()
        for array, start in zip(arrays, starts, strict=False):
            memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        there = staging.to(self.device, non_blocking=True)
        kinds = {"int32": torch.int32, "int64": torch.int64}
        slot_mapping, block_table, seq_lens, query_start_loc, copies = (
            there[start : start + array.nbytes].view(kinds[array.dtype.name]).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        )
        longest = int(np.diff(plan.query_start_loc).max(initial=0))
        return Step(block_table, seq_lens, query_start_loc, slot_mapping, copies, longest)


def _check_copies(copies: NDArray[np.int32], num_blocks: int) -> None:
    if copies.min() < 0 or copies.max() >= num_blocks:
        raise IndexError(f"plan.copies must name blocks in 0..{num_blocks - 1}, not {copies.tolist()}")
    moved = copies[copies[:, 0] != copies[:, 1]]
    both = np.intersect1d(moved[:, 0], moved[:, 1])
    if len(both):  # copies run side by side; the pool never asks for this
        raise ValueError(f"plan.copies must not have blocks that are both source and target: {both.tolist()}")


def _check_in_sight(plan: Plan, window: int, block_size: int) -> None:
    """Only blocks at the head of a sequence are discarded: the first one in sight tells."""
    starts, lengths, table = plan.query_start_loc, plan.seq_lens, plan.block_table
    queries = np.diff(starts)
    first = np.maximum(lengths - queries - window + 1, 0) if window else np.zeros_like(lengths)
    rows = np.flatnonzero((queries > 0) & (lengths > 0) & (first < lengths))
    null = rows[table[rows, first[rows] // block_size] == 0]
    if len(null):
        row = int(null[0])
        index = int(first[row]) // block_size
        raise ValueError(
            f"block_table[{row}, {index}] is the null block: positions {index * block_size} to "
            f"{(index + 1) * block_size - 1} were discarded, but queries of this row see keys from position "
            f"{int(first[row])} on; pass the sliding_window that the model has, or keep the blocks"
        )
