"""How much memory a model's KV cache takes, and how many sequences fit: what `kvfolio plan` prints.

Data flows one way::

    config.json -> ModelShape -> plan(shape, Deployment(...)) -> SizingPlan

Nothing here needs torch or transformers.

Examples
--------
>>> from kvfolio.sizing import Deployment, ModelShape, plan
>>> shape = ModelShape.from_config({
...     "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
...     "hidden_size": 4096, "torch_dtype": "bfloat16",
... })
>>> plan(shape, Deployment(kv_memory=16 * 2**30), [8192]).lengths[0].sequences
15
"""

from .caches import ITEM_SIZES, SCALES, Attention, KVFormat, Latent, State, StatePart
from .config_file import ModelConfig, read_config
from .deployment import Deployment
from .errors import ConfigError, NoRoom
from .groups import Group
from .model_shape import ModelShape
from .planner import (
    BLOCK_SIZES,
    BOOKKEEPING_PER_BLOCK,
    LENGTHS,
    BlockSizeRow,
    LengthPlan,
    SizingPlan,
    Stage,
    plan,
)
from .quantities import format_bytes, parse_bytes
from .reserve import Reserve
from .weights import Parameters, estimate_parameters

__all__ = [
    "BLOCK_SIZES",
    "BOOKKEEPING_PER_BLOCK",
    "ITEM_SIZES",
    "LENGTHS",
    "SCALES",
    "Attention",
    "BlockSizeRow",
    "ConfigError",
    "Deployment",
    "Group",
    "KVFormat",
    "Latent",
    "LengthPlan",
    "ModelConfig",
    "ModelShape",
    "NoRoom",
    "Parameters",
    "Reserve",
    "SizingPlan",
    "Stage",
    "State",
    "StatePart",
    "estimate_parameters",
    "format_bytes",
    "parse_bytes",
    "plan",
    "read_config",
]
