"""The memory manager of the KV cache, for people who write their own serving loop.

    ids -> BlockPool -> BlockTable -> Sequence -> Batch -> Plan -> kernels

`BlockPool` hands out fixed-size blocks, `Sequence` keeps tokens and where their K and V lie, `Batch` runs
sequences, and each of its steps is a `Plan`: the arrays that an attention kernel reads.
"""

from kvfolio._native import (
    Batch,
    BlockPool,
    BlockTable,
    Context,
    Plan,
    Sequence,
    __version__,
    block_layout,
    get_num_threads,
    set_num_threads,
)
from kvfolio.errors import (
    BatchFull,
    ConcurrentUse,
    CopiesNotApplied,
    CorruptPool,
    InvalidBlock,
    KVFolioError,
    OutOfBlocks,
    PlanInFlight,
    RefCountOverflow,
    StaleHandle,
)
from kvfolio.kv_cache import KVCache
from kvfolio.kv_spec import KVSpec

__all__ = [
    "Batch",
    "BatchFull",
    "BlockPool",
    "BlockTable",
    "ConcurrentUse",
    "Context",
    "CopiesNotApplied",
    "CorruptPool",
    "InvalidBlock",
    "KVCache",
    "KVFolioError",
    "KVSpec",
    "OutOfBlocks",
    "Plan",
    "PlanInFlight",
    "RefCountOverflow",
    "Sequence",
    "StaleHandle",
    "__version__",
    "block_layout",
    "get_num_threads",
    "set_num_threads",
]
