"""How a model is to be run: the memory of its ranks, and how they share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfolio import _checks

from .caches import ITEM_SIZES, SCALES, KVFormat, Scales


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The memory of each rank, and what is to be done with it.

    Exactly one of `memory` and `kv_memory` is given, in bytes: an int for all ranks, or a sequence of one int
    a pipeline stage.

    Parameters
    ----------
    memory : int or sequence of int, optional
        What a rank's device has. Of this, `utilization` less weights and activations is for the KV.
    kv_memory : int or sequence of int, optional
        What a rank has for the KV alone.
    utilization : float
        Above 0, at most 1. The rest is for what nobody counts: the driver, fragmentation, others.
    block_size : int
        Tokens a block.
    kv_dtype : str, optional
        Of the KV; by default the model's. See `ITEM_SIZES`.
    scales : str, optional
        See `KVFormat`; by default "per-tensor" for an 8-bit dtype, else "none".
    alignment : int
        A block takes a multiple of so many bytes on each rank; 1 packs them.
    tensor_parallel : int
        Ranks that share each layer.
    pipeline_parallel : int
        Stages that share the layers.
    layers_per_stage : sequence of int, optional
        By default as equal as can be, the earlier stages having one more.
    weights, activations : int, optional
        Bytes of the whole model's weights, and of a step's activations on each rank, where they are known.
    tokens_per_step : int
        For an estimate of the activations.
    ignore_windows : bool
        Every layer keeps all tokens, as with one block table for all layers.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong in itself; the message names it.
    """

    memory: int | Sequence[int] | None = None
    kv_memory: int | Sequence[int] | None = None
    utilization: float = 0.9
    block_size: int = 16
    kv_dtype: str | None = None
    scales: Scales | None = None
    alignment: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    layers_per_stage: Sequence[int] | None = None
    weights: int | None = None
    activations: int | None = None
    tokens_per_step: int = 2048
    ignore_windows: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "alignment", "tensor_parallel", "pipeline_parallel", "tokens_per_step"):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), 1))
        if (self.memory is None) == (self.kv_memory is None):
            raise ValueError("exactly one of memory and kv_memory must be given")
        for name in ("memory", "kv_memory"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._per_stage(name, getattr(self, name), 0))
        for name in ("weights", "activations"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _checks.integer(name, getattr(self, name), 0))
        if self.layers_per_stage is not None:
            if isinstance(self.layers_per_stage, int):
                raise TypeError("layers_per_stage must be a sequence of integers, not int")
            counts = self._per_stage("layers_per_stage", self.layers_per_stage, 1)
            object.__setattr__(self, "layers_per_stage", counts)
        if not 0 < _checks.number("utilization", self.utilization) <= 1:
            raise ValueError(f"utilization must be above 0 and at most 1, not {self.utilization}")
        if self.kv_dtype is not None and self.kv_dtype not in ITEM_SIZES:
            raise ValueError(f"kv_dtype must be one of {', '.join(ITEM_SIZES)}, not {self.kv_dtype!r}")
        if self.scales is not None and self.scales not in SCALES:
            raise ValueError(f"scales must be one of {', '.join(SCALES)}, not {self.scales!r}")

    def _per_stage(self, name: str, value: int | Sequence[int], minimum: int) -> tuple[int, ...]:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            if len(value) != self.pipeline_parallel:
                raise ValueError(
                    f"{name} must be one number, or one for each of the {self.pipeline_parallel} stages of "
                    f"pipeline_parallel, not {len(value)}"
                )
            return tuple(_checks.integer(name, one, minimum) for one in value)
        return (_checks.integer(name, value, minimum),) * self.pipeline_parallel

    def kv_format(self, dtype: str) -> KVFormat:
        """How the KV of a model of this dtype is stored."""
        dtype = self.kv_dtype or dtype
        return KVFormat(dtype, self.scales or ("per-tensor" if ITEM_SIZES[dtype] == 1 else "none"))

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each pipeline stage."""
        counts = self.layers_per_stage
        if counts is None:
            if self.pipeline_parallel > num_layers:
                raise ValueError(
                    f"pipeline_parallel must be at most {num_layers}, the layers, "
                    f"not {self.pipeline_parallel}"
                )
            each, more = divmod(num_layers, self.pipeline_parallel)
            counts = [each + (stage < more) for stage in range(self.pipeline_parallel)]
        elif sum(counts) != num_layers:
            raise ValueError(
                f"layers_per_stage must sum up to {num_layers}, the model's layers, not {sum(counts)}"
            )
        ends = [sum(counts[: stage + 1]) for stage in range(self.pipeline_parallel)]
        return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
