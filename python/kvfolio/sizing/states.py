"""The states of linear-attention, state-space and convolution layers, from a configuration's fields.

A causal convolution over `k` tokens keeps the last k - 1 inputs of each channel, in the model's dtype. The
recurrent state is kept in float32, as transformers does, unless `mamba_ssm_dtype` says otherwise. Engines
differ in both: these are estimates.
"""

from __future__ import annotations

from .caches import ITEM_SIZES, State, StatePart
from .fields import Fields


def linear_state(fields: Fields, item_size: int) -> State | None:
    """The state of a recurrent layer, by the family of fields that the configuration has; None without.

    Gated delta net (Qwen3-Next), Mamba 2 (Bamba, Granite 4, Falcon-H1), Mamba (Jamba, FalconMamba).
    """
    if fields.given("linear_num_value_heads"):
        return _gated_delta_net(fields, item_size)
    if fields.given("mamba_n_heads", "mamba_num_heads"):
        return _mamba_2(fields, item_size)
    if fields.given("mamba_d_state", "state_size"):
        return _mamba(fields, item_size)
    return None


def convolution_state(fields: Fields, item_size: int) -> State | None:
    """The state of a short convolution (LFM2): the last inputs of each of `hidden_size` channels."""
    taps = fields.optional_integer("conv_L_cache")
    if taps is None:
        return None
    return State((StatePart(fields.integer("hidden_size"), taps - 1, item_size),))


def _recurrent_item_size(fields: Fields) -> int:
    dtype = fields.text("mamba_ssm_dtype") or "float32"
    if dtype not in ITEM_SIZES:
        raise fields.error("mamba_ssm_dtype", f"must be one of {', '.join(ITEM_SIZES)}, not {dtype!r}")
    return ITEM_SIZES[dtype]


def _gated_delta_net(fields: Fields, item_size: int) -> State:
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    past = fields.integer("linear_conv_kernel_dim") - 1
    return State(
        (
            StatePart(key_heads, 2 * key_dim * past, item_size),  # q and k
            StatePart(value_heads, value_dim * past, item_size),
            StatePart(value_heads, key_dim * value_dim, _recurrent_item_size(fields)),
        )
    )


def _mamba_2(fields: Fields, item_size: int) -> State:
    heads, head_dim = (
        fields.integer("mamba_n_heads", "mamba_num_heads"),
        fields.integer("mamba_d_head", "mamba_head_dim"),
    )
    groups = fields.integer("mamba_n_groups", "n_groups")
    size, past = (
        fields.integer("mamba_d_state", "ssm_state_size", "state_size"),
        fields.integer("mamba_d_conv", "conv_kernel") - 1,
    )
    return State(
        (
            StatePart(heads, head_dim * past, item_size),
            StatePart(groups, 2 * size * past, item_size),  # B and C
            StatePart(heads, head_dim * size, _recurrent_item_size(fields)),
        )
    )


def _mamba(fields: Fields, item_size: int) -> State:
    size = fields.integer("mamba_d_state", "state_size")
    past = fields.integer("mamba_d_conv", "conv_kernel") - 1
    # Here intermediate_size may be that of an MLP (Jamba), so it counts only where there is no expansion.
    expand = fields.optional_integer("mamba_expand", "expand")
    channels = expand * fields.integer("hidden_size") if expand else fields.integer("intermediate_size")
    return State(
        (StatePart(channels, past, item_size), StatePart(channels, size, _recurrent_item_size(fields)))
    )
