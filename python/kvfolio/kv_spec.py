"""How much memory the KV cache of a model takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvfolio import _arrays, _checks


@dataclass(frozen=True)
class KVSpec:
    """The shape of a model's K and V, and what follows of it for memory.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, block_size : int
        At least 1 each.
    dtype : str or dtype
        float32, float16 or bfloat16: the name, or numpy's, torch's or ml_dtypes' object for it.
    alignment : int
        A block takes a multiple of so many bytes; 1 packs them.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong type, or below 1, or names an unknown dtype.

    Examples
    --------
    >>> spec = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
    >>> spec.bytes_per_token
    131072
    >>> spec.blocks_in(8 * 2**30)
    4096
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    alignment: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "alignment"):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), 1))
        object.__setattr__(self, "dtype", _arrays.dtype_name("dtype", self.dtype))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers, without alignment."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _arrays.ITEM_SIZES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's K and V in all layers, rounded up to a multiple of `alignment`."""
        return -(-self.block_size * self.bytes_per_token // self.alignment) * self.alignment

    def blocks_in(self, num_bytes: int) -> int:
        """How many whole blocks so many bytes hold.

        The storage of a pool has one block more than the pool hands out, the null block: within a budget of
        `b` bytes there is room for ``BlockPool(spec.blocks_in(b) - 1, spec.block_size)``.

        Raises
        ------
        TypeError, ValueError
            `num_bytes` is no integer, or negative.
        """
        return _checks.integer("num_bytes", num_bytes, 0) // self.bytes_per_block
