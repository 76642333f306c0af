"""A plan's arrays handed to FlashInfer or FlashAttention, for who has them installed."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvfolio import exports

if TYPE_CHECKING:
    from kvfolio._device_cache import Options, Step
    from kvfolio._native import Plan

BACKENDS = ("kvfolio", "flashinfer", "flash_attn")
Result = tuple[torch.Tensor, torch.Tensor]


class Kernels(Protocol):
    """Attention by another library."""

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Plan,
        step: Step,
        options: Options,
    ) -> Result:
        """Out, and lse, natural, float32 [T, num_heads]."""


def load(backend: str, keys: torch.Tensor) -> Kernels | None:
    """None for kvfolio's own. ValueError for an unknown one, ImportError for one that is not installed."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "kvfolio":
        return None
    try:
        module = importlib.import_module(backend)
    except ImportError as error:
        package = {"flashinfer": "flashinfer-python", "flash_attn": "flash-attn"}[backend]
        raise ImportError(f"backend {backend!r} needs the package {package}: {error}") from error
    return FlashInfer(module, keys) if backend == "flashinfer" else FlashAttention(module)


def _refuse(backend: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be None with backend {backend!r}, which has no such thing")


class FlashInfer:
    """`BatchPrefillWithPagedKVCacheWrapper`, which also takes single queries; planned once for each step."""

    def __init__(self, module: Any, keys: torch.Tensor) -> None:
        self._module = module
        # Zeros: it holds counters that kernels expect to begin at 0.
        self._workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=keys.device)
        self._planned: tuple[object, object, Any] | None = None

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Plan,
        step: Step,
        options: Options,
    ) -> Result:
        """See `Kernels`."""
        _refuse("flashinfer", alibi_slopes=options.alibi_slopes, sinks=options.sinks)
        key = (options.scale, options.sliding_window, options.logit_softcap, q.shape[1])
        if self._planned is None or self._planned[0] is not step or self._planned[1] != key:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            arrays = {name: torch.tensor(array) for name, array in exports.flashinfer(plan).items()}
            wrapper.plan(
                **arrays,
                num_qo_heads=q.shape[1],
                num_kv_heads=keys.shape[2],
                head_dim_qk=keys.shape[3],
                page_size=keys.shape[1],
                causal=True,
                sm_scale=options.scale,
                window_left=-1 if options.sliding_window is None else options.sliding_window - 1,
                logits_soft_cap=options.logit_softcap,
                q_data_type=q.dtype,
                kv_data_type=keys.dtype,
            )
            self._planned = (step, key, wrapper)
        out, lse = self._planned[2].run(q, (keys, values), return_lse=True)
        return out, lse * math.log(2)  # theirs is to base 2


class FlashAttention:
    """`flash_attn_varlen_func` with a block table; version 2 wants blocks of a multiple of 256 tokens."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Plan,
        step: Step,
        options: Options,
    ) -> Result:
        """See `Kernels`."""
        _refuse("flash_attn", sinks=options.sinks)
        starts = torch.zeros(len(step.seq_lens) + 1, dtype=torch.int32, device=q.device)
        torch.cumsum(step.seq_lens, 0, out=starts[1:])
        window = options.sliding_window
        out, lse, *_ = self._module.flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=step.query_start_loc,
            cu_seqlens_k=starts,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=int(plan.seq_lens.max(initial=0)),
            softmax_scale=options.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=options.logit_softcap or 0.0,
            alibi_slopes=options.alibi_slopes,
            block_table=step.block_table,
            return_attn_probs=True,
        )
        return out, lse.transpose(0, 1)  # theirs is [num_heads, T]
