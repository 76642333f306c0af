"""What must be known of a model to size its KV cache, from its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import layers
from .caches import ITEM_SIZES, Attention, Cache, Latent
from .errors import ConfigError
from .fields import Fields
from .states import convolution_state, linear_state

_DTYPES = ("float32", "float16", "bfloat16")
# What would change the figures in a way that is not known here.
_NOT_COUNTED = {
    "index_head_dim": "the keys of a sparse-attention index are not counted",
    "global_head_dim": "layers whose heads differ in size are not counted",
    "num_global_key_value_heads": "layers whose heads differ in number are not counted",
    "cla_share_factor": "K and V that layers share are not counted",
    "multi_query_group_num": "this architecture's own names are not known",
    "attn_config": "this architecture's own names are not known",
    "attention_head_dim": "this architecture's own names are not known",
    "block_configs": "layers that differ in heads are not counted",
    "lru_width": "this architecture's states are not known",
}
_SHARED_HEADS = {"falcon", "gpt_bigcode", "RefinedWeb", "RefinedWebModel"}


@dataclass(frozen=True)
class ModelShape:
    """A model as far as its memory goes.

    Attributes
    ----------
    source : str
        Where it comes from, for messages.
    name : str
        `model_type`.
    layers : tuple
        What each layer keeps: none, one or more of `Attention`, `Latent` and `State`.
    num_attention_heads : int
        Query heads.
    dtype : str
        Of the weights, and of the KV unless told otherwise.
    max_position_embeddings : int or None
        The longest sequence that the model was made for, in tokens.
    fields : Fields
        The text model's whole configuration.
    notes : tuple of str
        What had to be assumed.
    """

    source: str
    name: str
    layers: tuple[tuple[Cache, ...], ...]
    num_attention_heads: int
    dtype: str
    max_position_embeddings: int | None
    fields: Fields
    notes: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config") -> ModelShape:
        """Read a configuration, the content of a config.json.

        Of one that has a `text_config` that is read, and what else the model has is not counted.

        Raises
        ------
        ConfigError
            A field is missing or wrong, or the layers are of a kind that is not known here.
        """
        if not isinstance(config, Mapping):
            hint = ": read_config(path).values reads a file" if isinstance(config, str | Path) else ""
            raise ConfigError(f"{source}: must be a JSON object, not {type(config).__name__}{hint}")
        notes = []
        text, outer = config, Fields(config, source)
        if config.get("text_config") is not None:
            text = config["text_config"]
            if not isinstance(text, Mapping):
                raise outer.error("text_config", f"must be a JSON object, not {text!r}")
            source = f"{source}: text_config"
            notes.append(
                "only text_config is counted: neither weights nor activations of an image or audio part"
            )
        fields = Fields(text, source)
        for field, why in _NOT_COUNTED.items():
            if fields.given(field):
                raise fields.error(field, f"must not be given, not {text[field]!r}: {why}")
        if fields.flag("is_encoder_decoder", False):
            raise fields.error(
                "is_encoder_decoder", "must be false, not true: K and V of an encoder are not counted"
            )
        num_layers = fields.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        dtype = _dtype(fields, outer)
        if dtype is None:
            dtype = "bfloat16"
            notes.append("dtype is not given: bfloat16 is assumed")
        kinds = layers.layer_kinds(fields, num_layers)
        caches, more = _caches(fields, kinds, ITEM_SIZES[dtype])
        return cls(
            source=source,
            name=fields.text("model_type") or "unnamed",
            layers=caches,
            num_attention_heads=_query_heads(fields, caches),
            dtype=dtype,
            max_position_embeddings=fields.optional_integer("max_position_embeddings", "n_positions"),
            fields=fields,
            notes=(*notes, *more),
        )


def _dtype(fields: Fields, outer: Fields) -> str | None:
    for level in (fields, outer):
        dtype = level.text("dtype", "torch_dtype")
        if dtype is None:
            continue
        dtype = dtype.removeprefix("torch.")
        if dtype not in _DTYPES:
            raise level.error("dtype (or torch_dtype)", f"must be one of {', '.join(_DTYPES)}, not {dtype!r}")
        return dtype
    return None


def _query_heads(fields: Fields, caches: tuple[tuple[Cache, ...], ...]) -> int:
    if not any(isinstance(cache, Attention | Latent) for layer in caches for cache in layer):
        return 1  # nothing attends
    return fields.integer("num_attention_heads", "n_head", "n_heads")


def _caches(
    fields: Fields, kinds: list[str], item_size: int
) -> tuple[tuple[tuple[Cache, ...], ...], list[str]]:
    """What each layer keeps, and what had to be assumed for that."""
    notes: list[str] = []
    attending = {layers.FULL, layers.WINDOW, layers.CHUNK, layers.PARALLEL}
    full = _attention(fields, notes) if attending & set(kinds) else None
    by_kind: dict[str, tuple[Cache, ...]] = {layers.NOTHING: ()}
    if full is not None:
        by_kind[layers.FULL] = (full,)
        for kind, field in ((layers.WINDOW, "sliding_window"), (layers.CHUNK, "attention_chunk_size")):
            if kind in kinds:
                by_kind[kind] = (_windowed(full, fields.integer(field)),)
    if {layers.RECURRENT, layers.PARALLEL} & set(kinds):
        state = linear_state(fields, item_size)
        if state is None:
            raise fields.error(
                "linear_num_value_heads (or mamba_n_heads, mamba_d_state, state_size)",
                "is missing: it must be given with recurrent layers",
            )
        by_kind[layers.RECURRENT] = (state,)
        if full is not None:
            by_kind[layers.PARALLEL] = (full, state)
        notes.append("the size of recurrent states is an estimate: engines differ in dtype and layout")
    if layers.CONVOLUTION in kinds:
        state = convolution_state(fields, item_size)
        if state is None:
            raise fields.error("conv_L_cache", "is missing: it must be given with conv layers")
        by_kind[layers.CONVOLUTION] = (state,)
        notes.append("the size of convolution states is an estimate: engines differ in dtype and layout")
    found = [by_kind[kind] for kind in kinds]
    shared = fields.optional_integer("num_kv_shared_layers", minimum=0) or 0
    if shared >= len(found):
        raise fields.error("num_kv_shared_layers", f"must be below {len(found)}, the layers, not {shared}")
    if shared:  # Gemma 3n: the last layers read the KV of earlier ones
        found[-shared:] = [()] * shared
    return tuple(found), notes


def _windowed(attention: Attention | Latent, window: int) -> Attention | Latent:
    if isinstance(attention, Latent):
        return Latent(attention.size, window)
    return Attention(attention.num_kv_heads, attention.head_dim, attention.value_dim, window)


def _attention(fields: Fields, notes: list[str]) -> Attention | Latent:
    """What an attending layer keeps, but for its window."""
    if fields.given("kv_lora_rank"):
        return Latent(fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim", minimum=0))
    heads = fields.integer("num_attention_heads", "n_head", "n_heads")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        hidden_size = fields.integer("hidden_size", "n_embd", "d_model")
        if hidden_size % heads:
            raise fields.error(
                "head_dim",
                f"is missing, and hidden_size {hidden_size} is no multiple of {heads} attention heads",
            )
        head_dim = hidden_size // heads
    return Attention(_kv_heads(fields, heads, notes), head_dim, head_dim)


def _kv_heads(fields: Fields, heads: int, notes: list[str]) -> int:
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
    if fields.text("model_type") in _SHARED_HEADS and not fields.flag("new_decoder_architecture", False):
        # Here multi_query decides, whatever else is given.
        return 1 if fields.flag("multi_query", True) else heads
    kv_heads = fields.optional_integer(*names)
    if kv_heads is None:
        notes.append(f"{names[0]} is not given: as many as query heads, {heads}, are assumed")
        return heads
    if heads % kv_heads:
        name = fields.given(*names)
        raise fields.error(str(name), f"must divide the {heads} attention heads, not {kv_heads}")
    return kv_heads
