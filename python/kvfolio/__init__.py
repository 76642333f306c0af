"""The memory manager of the KV cache, for people who write their own serving loop.

Data flows one way::

    ids -> BlockPool -> BlockTable -> Sequence -> Batch -> Plan -> kernels

`BlockPool` hands out fixed-size blocks, `Sequence` keeps tokens and where their K and V lie, `Batch` runs
sequences, and each of its steps is a `Plan`: the arrays that an attention kernel reads. `KVCache` has storage
and kernels of its own.

Modules to be imported by themselves: `kvfolio.serving`, an engine over Hugging Face models; `kvfolio.torch`
and `kvfolio.ops`, plans and kernels for tensors; `kvfolio.exports`, a plan's arrays under other libraries'
names; `kvfolio.metrics` and `kvfolio.events`, what a pool does; `kvfolio.sizing` and `kvfolio.simulation`,
what one would do. Those that need more packages than numpy say which extra brings them.
"""

from kvfolio._native import (
    EVICTION_POLICIES,
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
    CudaUnavailable,
    InvalidBlock,
    KVFolioError,
    OutOfBlocks,
    PlanInFlight,
    RefCountOverflow,
    StaleHandle,
)
from kvfolio.kv_cache import KVCache
from kvfolio.kv_spec import KVSpec
from kvfolio.plan_buffers import PlanBuffers
from kvfolio.table_mirror import MirroredPlan, PlanMessage, TableMirror

__all__ = [
    "EVICTION_POLICIES",
    "Batch",
    "BatchFull",
    "BlockPool",
    "BlockTable",
    "ConcurrentUse",
    "Context",
    "CopiesNotApplied",
    "CorruptPool",
    "CudaUnavailable",
    "InvalidBlock",
    "KVCache",
    "KVFolioError",
    "KVSpec",
    "MirroredPlan",
    "OutOfBlocks",
    "Plan",
    "PlanBuffers",
    "PlanInFlight",
    "PlanMessage",
    "RefCountOverflow",
    "Sequence",
    "StaleHandle",
    "TableMirror",
    "__version__",
    "block_layout",
    "get_num_threads",
    "set_num_threads",
]
