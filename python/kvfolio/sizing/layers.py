"""Which kind each layer of a model is, from a configuration's fields."""

from __future__ import annotations

from .fields import Fields

FULL, WINDOW, CHUNK, RECURRENT, CONVOLUTION, PARALLEL, NOTHING = (
    "full", "window", "chunk", "recurrent", "convolution", "parallel", "nothing",
)  # fmt: skip
"""Kinds: attention to everything, to a window or to a chunk; a state; attention beside a state; no cache."""

_NAMES = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": CHUNK,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "conv": CONVOLUTION,
    "hybrid": PARALLEL,
    "mlp": NOTHING,
    "moe": NOTHING,
}
_PATTERN_LETTERS = {"M": RECURRENT, "*": FULL, "-": NOTHING, "E": NOTHING}  # Nemotron-H

# Configurations that say a window, but not in which layers: the model's code does.
_ALL_WINDOWED = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
_WINDOWED_UP_FROM = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
# Every n-th layer sees everything.
_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3_text": 6}
_ALL_RECURRENT = {"mamba", "mamba2", "falcon_mamba"}
_ALL_PARALLEL = {"falcon_h1"}
_STATE_FIELDS = (
    "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "mamba_d_state", "ssm_state_size",
    "state_size", "ssm_cfg", "lru_width", "linear_attn_config", "conv_L_cache", "time_mix_extra_dim",
)  # fmt: skip


def layer_kinds(fields: Fields, num_layers: int) -> list[str]:
    """The kind of each layer. Raises ConfigError rather than guess."""
    name = fields.given("layer_types", "layers_block_type")
    if name is not None:
        return _listed(fields, name, num_layers)
    if pattern := fields.text("hybrid_override_pattern"):
        return _spelled(fields, pattern, num_layers)
    model_type = fields.text("model_type") or ""
    if model_type in _ALL_PARALLEL:
        return [PARALLEL] * num_layers
    if model_type in _ALL_RECURRENT:
        return [RECURRENT] * num_layers
    if fields.given("attn_layer_period"):  # Jamba
        period = fields.integer("attn_layer_period")
        offset = fields.integer("attn_layer_offset", minimum=0)
        return [FULL if layer % period == offset else RECURRENT for layer in range(num_layers)]
    if fields.given("full_attention_interval"):  # Qwen3-Next
        period = fields.integer("full_attention_interval")
        return [RECURRENT if (layer + 1) % period else FULL for layer in range(num_layers)]
    if field := fields.given(*_STATE_FIELDS):
        raise fields.error("layer_types", f"is missing: {field} tells of states, but not in which layers")
    if field := fields.given("attention_chunk_size"):
        raise fields.error("layer_types", f"is missing: {field} tells of chunks, but not in which layers")
    return _windowed(fields, model_type, num_layers)


def _listed(fields: Fields, name: str, num_layers: int) -> list[str]:
    listed = fields.texts(name) or []
    if len(listed) != num_layers:
        raise fields.error(name, f"must be a list of {num_layers} texts, one a layer, not of {len(listed)}")
    for layer, kind in enumerate(listed):
        if kind not in _NAMES:
            raise fields.error(f"{name}[{layer}]", f"must be one of {', '.join(_NAMES)}, not {kind!r}")
    return [_NAMES[kind] for kind in listed]


def _spelled(fields: Fields, pattern: str, num_layers: int) -> list[str]:
    if len(pattern) != num_layers or not set(pattern) <= set(_PATTERN_LETTERS):
        allowed = f"{num_layers} letters out of {''.join(_PATTERN_LETTERS)}"
        raise fields.error("hybrid_override_pattern", f"must be {allowed}, not {pattern!r}")
    return [_PATTERN_LETTERS[letter] for letter in pattern]


def _windowed(fields: Fields, model_type: str, num_layers: int) -> list[str]:
    if not fields.given("sliding_window") or not fields.flag("use_sliding_window", True):
        return [FULL] * num_layers
    if model_type in _ALL_WINDOWED:
        return [WINDOW] * num_layers
    if model_type in _WINDOWED_UP_FROM:
        if not fields.flag("use_sliding_window", False):
            return [FULL] * num_layers
        first = fields.integer("max_window_layers", minimum=0)
        return [WINDOW if layer >= first else FULL for layer in range(num_layers)]
    if model_type in _PATTERNS:
        period = fields.optional_integer("sliding_window_pattern") or _PATTERNS[model_type]
        return [WINDOW if (layer + 1) % period else FULL for layer in range(num_layers)]
    raise fields.error(
        "layer_types",
        f"is missing: sliding_window tells of a window, but not in which layers, and {model_type!r} is not a "
        f"model_type known here ({', '.join(sorted(_ALL_WINDOWED | _WINDOWED_UP_FROM | set(_PATTERNS)))})",
    )
