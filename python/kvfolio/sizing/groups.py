"""The layers that share a block table, and how many blocks a sequence takes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .caches import Attention, Cache, KVFormat, Latent, State


@dataclass(frozen=True)
class Group:
    """Layers of one window: they need the same tokens, so one block table does for all.

    Attributes
    ----------
    window : int or None
        None: all tokens are kept.
    num_layers : int
        In the whole model.
    block_size : int
        Tokens a block.
    bytes_per_token, bytes_per_block : tuple of int
        On each rank of each stage; 0 in a stage that has none of these layers. Blocks are rounded up to the
        alignment, tokens are not.
    """

    window: int | None
    num_layers: int
    block_size: int
    bytes_per_token: tuple[int, ...]
    bytes_per_block: tuple[int, ...]

    @property
    def most_blocks(self) -> int | None:
        """No sequence holds more: its window touches so many blocks at most. None: no limit."""
        return None if self.window is None else -(-self.window // self.block_size) + 1

    def blocks(self, length: int) -> int:
        """Blocks that a sequence of so many tokens holds."""
        blocks = -(-length // self.block_size)
        return blocks if self.most_blocks is None else min(blocks, self.most_blocks)


def make_groups(
    stages: Iterable[Iterable[tuple[Cache, ...]]],
    kv: KVFormat,
    *,
    ranks: int,
    block_size: int,
    alignment: int,
    ignore_windows: bool,
) -> tuple[Group, ...]:
    """Sort the caches of each stage's layers into groups; the one that keeps all tokens comes first."""
    held = [
        [cache for layer in stage for cache in layer if isinstance(cache, Attention | Latent)]
        for stage in stages
    ]
    by_window = [[(None if ignore_windows else cache.window, cache) for cache in stage] for stage in held]
    windows = {window for stage in by_window for window, _ in stage}
    groups = []
    for window in sorted(windows, key=lambda window: (window is not None, -(window or 0))):
        caches = [[cache for its_window, cache in stage if its_window == window] for stage in by_window]
        tokens = tuple(sum(cache.bytes_per_token(kv, ranks) for cache in stage) for stage in caches)
        blocks = tuple(-(-token * block_size // alignment) * alignment for token in tokens)
        groups.append(Group(window, sum(map(len, caches)), block_size, tokens, blocks))
    return tuple(groups)


def state_bytes(layers: Iterable[tuple[Cache, ...]], ranks: int) -> int:
    """Bytes of one sequence's states in these layers, on one rank."""
    return sum(
        cache.bytes_per_sequence(ranks) for layer in layers for cache in layer if isinstance(cache, State)
    )
