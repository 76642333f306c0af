"""What changes in a pool's prefix cache, for routers and whoever else wants to know what is cached where.

Who serves, publishes::

    pool = kvfolio.BlockPool(num_blocks, block_size, events=True)
    with Publisher(pool, endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558"):
        ...  # serve

The wire format is the one that vLLM publishes, over ZeroMQ; `docs/events.md` has it. `Subscriber` is the
other end: it notices gaps and fills them.
"""

from __future__ import annotations

try:
    import msgspec as _msgspec  # noqa: F401
    import zmq as _zmq  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("kvfolio.events needs pyzmq and msgspec: pip install 'kvfolio[events]'") from error

from .publisher import Publisher, PublisherStats
from .subscriber import MissedEvents, Subscriber
from .wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "MissedEvents",
    "Publisher",
    "PublisherStats",
    "Subscriber",
    "decode",
]
