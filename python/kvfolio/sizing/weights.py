"""How many weights a model has, and what a step's activations take, estimated from its configuration.

Good to some percent for decoders of the usual make: attention with separate projections, gated MLPs, experts.
Norms, biases and what else is small are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from .caches import ITEM_SIZES, Attention, Latent, State
from .fields import Fields
from .model_shape import ModelShape

# Architectures whose MLP is two matrices, not three.
_NOT_GATED = {
    "falcon",
    "RefinedWeb",
    "RefinedWebModel",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "phi",
    "starcoder2",
}
LOGITS_ROWS = 256
"""Rows of logits in float32 that an estimate of activations counts."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: of the input embedding, of each layer, of the output."""

    embedding: int
    layers: tuple[int, ...]
    head: int

    @property
    def total(self) -> int:
        """Of the whole model."""
        return self.embedding + sum(self.layers) + self.head


def estimate_parameters(shape: ModelShape) -> Parameters:
    """Estimate a model's numbers of parameters. Raises ConfigError for a field that is missing."""
    fields = shape.fields
    hidden, vocabulary = _hidden(fields), fields.integer("vocab_size")
    tied = fields.flag("tie_word_embeddings", shape.name in ("gemma2", "gemma3_text", "falcon", "gpt2"))
    return Parameters(
        embedding=vocabulary * hidden,
        layers=tuple(
            _mixer(shape, number, hidden) + _mlp(fields, number, hidden)
            for number in range(len(shape.layers))
        ),
        head=0 if tied else vocabulary * hidden,
    )


def bytes_per_parameter(shape: ModelShape) -> tuple[float, str | None]:
    """What one weight takes, and a note if that is a guess."""
    plain = float(ITEM_SIZES[shape.dtype])
    quantization = shape.fields.values.get("quantization_config")
    if quantization is None:
        return plain, None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "fp8":
        return 1.0, "weights: all are taken to be fp8, as quantization_config says"
    return plain, f"weights: estimated as if not quantized ({method}): give their size to have it right"


def estimate_activations(shape: ModelShape, tokens_per_step: int, ranks: int) -> int:
    """Estimate the bytes of a step's activations at their peak, on one rank.

    Counted: four vectors of `hidden_size` a token, two of the widest MLP, `LOGITS_ROWS` rows of logits.
    """
    fields = shape.fields
    widest = fields.optional_integer("intermediate_size", "n_inner", "ffn_hidden_size") or 4 * _hidden(fields)
    per_token = (4 * _hidden(fields) + -(-2 * widest // ranks)) * ITEM_SIZES[shape.dtype]
    rows = min(tokens_per_step, LOGITS_ROWS)
    return tokens_per_step * per_token + rows * fields.integer("vocab_size") * 4


def _hidden(fields: Fields) -> int:
    return fields.integer("hidden_size", "n_embd", "d_model")


def _mixer(shape: ModelShape, number: int, hidden: int) -> int:
    """What makes K, V and the like: projections of attention or of a recurrence."""
    fields, total = shape.fields, 0
    for cache in shape.layers[number]:
        if isinstance(cache, Attention):
            query = shape.num_attention_heads * cache.head_dim
            total += hidden * (2 * query + cache.num_kv_heads * (cache.head_dim + cache.value_dim))
        elif isinstance(cache, Latent):
            total += _latent_attention(fields, shape.num_attention_heads, hidden)
        elif isinstance(cache, State):
            total += 6 * hidden * hidden  # in, gate and out of twice as many channels, as in Mamba
    return total


def _latent_attention(fields: Fields, heads: int, hidden: int) -> int:
    rank, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim", minimum=0)
    nope, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    query_rank = fields.optional_integer("q_lora_rank")
    query = heads * (nope + rope)
    return (
        (query_rank * (hidden + query) if query_rank else hidden * query)
        + hidden * (rank + rope)
        + rank * heads * (nope + value)
        + heads * value * hidden
    )


def _mlp(fields: Fields, number: int, hidden: int) -> int:
    matrices = 2 if fields.text("model_type") in _NOT_GATED else 3
    inner = fields.optional_integer("intermediate_size", "n_inner", "ffn_hidden_size")
    if inner is None:
        inner = 4 * hidden
    experts = fields.optional_integer("n_routed_experts", "num_local_experts", "num_experts")
    dense = fields.optional_integer("first_k_dense_replace", minimum=0) or 0
    period = fields.optional_integer("expert_layer_period") or 1
    has_experts = number >= dense and number % period == (
        fields.optional_integer("expert_layer_offset", minimum=0) or 0
    )
    if not experts or experts == 1 or not has_experts:
        return matrices * hidden * inner
    each = fields.optional_integer("moe_intermediate_size") or inner
    always = (fields.optional_integer("n_shared_experts", minimum=0) or 0) * each
    always += fields.optional_integer("shared_expert_intermediate_size", minimum=0) or 0
    return matrices * hidden * (experts * each + always) + experts * hidden
