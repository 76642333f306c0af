"""What one layer keeps of a sequence, on one rank: K and V, a latent, or a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
"""Bytes of one element, by dtype of the KV cache."""
Scales = Literal["none", "per-tensor", "per-token-head"]
SCALES: tuple[Scales, ...] = ("none", "per-tensor", "per-token-head")
SCALE_SIZE = 4
"""Bytes of one scale: float32."""


@dataclass(frozen=True)
class KVFormat:
    """How elements are stored: their dtype, and the float32 scales of an 8-bit one.

    `scales`: "none"; "per-tensor", one for all of a layer's K and one for its V; "per-token-head", one for
    each token's vector of each head, K and V apart.
    """

    dtype: str
    scales: Scales = "none"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"kv_dtype must be one of {', '.join(ITEM_SIZES)}, not {self.dtype!r}")
        if self.scales not in SCALES:
            raise ValueError(f"scales must be one of {', '.join(SCALES)}, not {self.scales!r}")
        if self.scales != "none" and ITEM_SIZES[self.dtype] > 1:
            raise ValueError(
                f"scales must be none with {self.dtype}, not {self.scales}: only 8 bits need them"
            )

    def vector(self, size: int) -> int:
        """Bytes of one token's vector of so many elements."""
        return size * ITEM_SIZES[self.dtype] + (SCALE_SIZE if self.scales == "per-token-head" else 0)


def heads_per_rank(heads: int, ranks: int) -> int | None:
    """Heads on each rank; each on several where ranks exceed heads. None where neither divides the other."""
    if heads % ranks == 0:
        return heads // ranks
    return 1 if ranks % heads == 0 else None


@dataclass(frozen=True)
class Attention:
    """K and V of each token. With a window, only those of the last `window` tokens are needed."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None

    def bytes_per_token(self, kv: KVFormat, ranks: int) -> int:
        """On one rank. The heads must be split evenly: `heads_per_rank`."""
        heads = heads_per_rank(self.num_kv_heads, ranks)
        assert heads is not None  # a sizing has looked
        return heads * (kv.vector(self.head_dim) + kv.vector(self.value_dim))

    def fixed_bytes(self, kv: KVFormat) -> int:
        """Scales for the whole of K and V."""
        return 2 * SCALE_SIZE if kv.scales == "per-tensor" else 0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: one vector a token that all heads share, so whole on every rank."""

    size: int
    window: int | None = None

    def bytes_per_token(self, kv: KVFormat, ranks: int) -> int:
        """On one rank, of however many."""
        del ranks
        return kv.vector(self.size)

    def fixed_bytes(self, kv: KVFormat) -> int:
        """The scale for the whole."""
        return SCALE_SIZE if kv.scales == "per-tensor" else 0


@dataclass(frozen=True)
class StatePart:
    """`heads` times `size` elements of `item_size` bytes, split over ranks by heads."""

    heads: int
    size: int
    item_size: int


@dataclass(frozen=True)
class State:
    """What a linear-attention, state-space or convolution layer keeps: per sequence, whatever its length."""

    parts: tuple[StatePart, ...]

    def bytes_per_sequence(self, ranks: int) -> int:
        """On one rank. The heads must be split evenly: `heads_per_rank`."""
        total = 0
        for part in self.parts:
            heads = heads_per_rank(part.heads, ranks)
            assert heads is not None  # a sizing has looked
            total += heads * part.size * part.item_size
        return total


Cache = Attention | Latent | State
