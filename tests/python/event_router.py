"""A router's view of one worker, from its events alone, read by a MessagePack library of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack


class Router:
    """Which blocks can be found; refuses what a router could make no sense of."""

    def __init__(self) -> None:
        self.hash_of: dict[tuple[Any, ...], bytes] = {}  # (parent, tokens, extra keys) -> hash
        self.place_of: dict[bytes, tuple[Any, ...]] = {}
        self.children: dict[bytes | None, set[bytes]] = {None: set()}
        self.num_cleared = self.num_stored = self.num_removed = 0

    def apply(self, batch: bytes | None) -> None:
        if batch is None:
            return
        _, events, rank = msgpack.unpackb(batch)
        assert events, "an empty batch is not sent"
        assert rank == 0
        for event in events:
            getattr(self, "on_" + event.pop("type"))(**event)

    def on_AllBlocksCleared(self) -> None:  # noqa: N802
        self.hash_of.clear()
        self.place_of.clear()
        self.children = {None: set()}
        self.num_cleared += 1

    def on_BlockStored(  # noqa: N802
        self,
        block_hashes: list[bytes],
        parent_block_hash: bytes | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: str | None,
        extra_keys: list[Any] | None = None,
    ) -> None:
        assert medium == "GPU"
        assert lora_id is None
        assert len(token_ids) == block_size * len(block_hashes) > 0
        extras = [None] * len(block_hashes) if extra_keys is None else extra_keys
        assert len(extras) == len(block_hashes)
        parent = parent_block_hash
        for index, (key, extra) in enumerate(zip(block_hashes, extras, strict=True)):
            assert len(key) == 32
            assert key not in self.place_of, "stored twice"
            assert parent in self.children, "the parent was not announced"
            tokens = tuple(token_ids[index * block_size : (index + 1) * block_size])
            place = (parent, tokens, repr(extra))
            assert place not in self.hash_of, "two keys for one content"
            self.hash_of[place] = key
            self.place_of[key] = place
            self.children[parent].add(key)
            self.children[key] = set()
            parent = key
            self.num_stored += 1

    def on_BlockRemoved(self, block_hashes: list[bytes], medium: str) -> None:  # noqa: N802
        assert medium == "GPU"
        for key in block_hashes:
            assert key in self.place_of, "removed what was not there"
            assert not self.children.pop(key), "removed before its children"
            place = self.place_of.pop(key)
            del self.hash_of[place]
            self.children[place[0]].discard(key)
            self.num_removed += 1

    def match(self, token_ids: Sequence[int], block_size: int) -> int:
        """Like `BlockPool.match` under the empty context."""
        parent: bytes | None = None
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            place = (parent, tuple(token_ids[start : start + block_size]), "None")
            if place not in self.hash_of:
                return start
            parent = self.hash_of[place]
        return len(token_ids) // block_size * block_size
