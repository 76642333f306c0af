"""What a step costs in time: a line in three things, whose slopes follow from model and device.

    seconds = step_time + token_time * computed tokens + kv_byte_time * bytes of K and V read

A step reads all weights once (`step_time`), multiplies every computed token with each of them (`token_time`),
and each sequence in it reads its own K and V once (`kv_byte_time`), also where sequences share blocks. The
three are added as if nothing overlapped. Left out: the part of attention's arithmetic that grows with the
context, copies of blocks, launches, communication, the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfolio import _checks
from kvfolio.sizing import ITEM_SIZES, KVFormat, ModelShape, estimate_parameters
from kvfolio.sizing.groups import make_groups
from kvfolio.sizing.weights import bytes_per_parameter


@dataclass(frozen=True)
class Device:
    """Nominal figures of a device: bytes a second from its memory, 16-bit operations a second (dense)."""

    name: str
    memory_bandwidth: float
    operations: float


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 1.555e12, 312e12),
        Device("a100-80gb", 2.039e12, 312e12),
        Device("h100", 3.35e12, 989e12),
        Device("h200", 4.8e12, 989e12),
        Device("l4", 0.3e12, 121e12),
    )
}
"""Devices by name."""


@dataclass(frozen=True)
class ServedModel:
    """A model as far as the simulation knows it: its KV and its weights, all on one device.

    `max_length`: the longest sequence it was made for, in tokens; None if it is not said.
    """

    name: str
    kv_dtype: str
    kv_bytes_per_token: int
    parameters: int
    weight_bytes: int
    max_length: int | None = None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], source: str = "config", kv_dtype: str | None = None
    ) -> ServedModel:
        """From a Hugging Face configuration, one table for all layers. Raises ConfigError, ValueError."""
        shape = ModelShape.from_config(config, source)
        if kv_dtype is not None and kv_dtype not in ITEM_SIZES:
            raise ValueError(f"kv_dtype must be one of {', '.join(ITEM_SIZES)}, not {kv_dtype!r}")
        groups = make_groups(
            [shape.layers],
            KVFormat(kv_dtype or shape.dtype, "none"),
            ranks=1,
            block_size=1,
            alignment=1,
            ignore_windows=True,
        )
        if not groups:
            raise ValueError(f"the model must have layers that attend: {source} has none")
        parameters = estimate_parameters(shape).total
        return cls(
            name=shape.name,
            kv_dtype=kv_dtype or shape.dtype,
            kv_bytes_per_token=groups[0].bytes_per_token[0],
            parameters=parameters,
            weight_bytes=int(parameters * bytes_per_parameter(shape)[0]),
            max_length=shape.max_position_embeddings,
        )


OPT_13B = ServedModel("opt-13b", "float16", 2 * 40 * 5120 * 2, 12_853_473_280, 2 * 12_853_473_280, 2048)
"""The smallest model of the PagedAttention paper: 40 layers, hidden size 5120, 800 KiB of K and V a token."""


@dataclass(frozen=True)
class CostModel:
    """The three slopes, in seconds; `origin` says where they are from."""

    step_time: float
    token_time: float
    kv_byte_time: float
    origin: str = "given"

    def __post_init__(self) -> None:
        for name in ("step_time", "token_time", "kv_byte_time"):
            value = _checks.number(name, getattr(self, name))
            if not 0 <= value <= 1e6:
                raise ValueError(f"{name} must be between 0 and 1e6 seconds, not {value}")
        if self.step_time == self.token_time == 0:
            raise ValueError("step_time and token_time must not both be 0: steps would take no time")

    @classmethod
    def derive(
        cls,
        model: ServedModel,
        device: Device,
        efficiency: float = 0.6,
        *,
        step_time: float | None = None,
        token_time: float | None = None,
        kv_byte_time: float | None = None,
    ) -> CostModel:
        """From nominal figures, of which `efficiency` is reached; two operations a weight and token.

        A slope that is given is taken as it is.
        """
        if not 0 < _checks.number("efficiency", efficiency) <= 1:
            raise ValueError(f"efficiency must be above 0 and at most 1, not {efficiency}")
        bandwidth, operations = device.memory_bandwidth * efficiency, device.operations * efficiency
        given = [
            name
            for name, value in (("step", step_time), ("token", token_time), ("KV byte", kv_byte_time))
            if value is not None
        ]
        return cls(
            model.weight_bytes / bandwidth if step_time is None else step_time,
            2 * model.parameters / operations if token_time is None else token_time,
            1 / bandwidth if kv_byte_time is None else kv_byte_time,
            f"{efficiency:.0%} of the nominal figures of {device.name}"
            + (f"; given: {', '.join(given)}" if given else ""),
        )

    def seconds(self, num_tokens: int, kv_bytes: int) -> float:
        """How long a step takes that computes so many tokens and reads so many bytes of K and V."""
        return self.step_time + self.token_time * num_tokens + self.kv_byte_time * kv_bytes
