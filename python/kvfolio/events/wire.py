"""Batches of events, decoded; and what else goes over the sockets.

A message of the PUB socket is `[topic, sequence number, batch]`, the number in 8 bytes, big-endian, from 0
on. A request to the ROUTER socket is such a number, and is answered by the messages from that one on, each as
`[b"", topic, sequence number, batch]`, and by one that has `END` for a number.
"""

from __future__ import annotations

from typing import Any

import msgspec

END = b"\xff" * 8  # -1: no more follows
SNAPSHOT = END  # as a request: whatever was published, send all that is there
REQUEST_BYTES = 8


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    """Blocks that can be found from now on, each the parent of the next; keys are 32 bytes.

    `token_ids`: `block_size` of each block, one block after the other. `extra_keys`: of each block what its
    key depends on besides: the adapter, (digest, offset) of pictures, and what stands for its whole context.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    """Blocks that cannot be found any more, children before their parents."""

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """Nothing can be found any more; what a batch says behind it can."""


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What changed, in order. `ts`: seconds since 1970, when it was told."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode(batch: bytes) -> EventBatch:
    """Decode a batch whose events are maps. Raises msgspec.ValidationError for what is none."""
    return _decoder.decode(batch)
