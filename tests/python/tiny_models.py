"""Random causal LMs, small enough to run a thousand steps in a test, of every kind of attention that the
engine knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 128
WINDOW = 9  # shorter than the prompts, and no multiple of a block size but 1

# A wide initialization keeps the best logits apart, so that rounding decides nothing.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    # transformers' other implementations leave out soft caps and sinks
    "attn_implementation": "eager",
}


def llama(**changes: Any) -> PreTrainedModel:
    return _build(LlamaForCausalLM, LlamaConfig(**{**_COMMON, **changes}))


def qwen3(**changes: Any) -> PreTrainedModel:
    return _build(Qwen3ForCausalLM, Qwen3Config(**{**_COMMON, **changes}))


def mistral(**changes: Any) -> PreTrainedModel:
    return _build(MistralForCausalLM, MistralConfig(**{**_COMMON, "sliding_window": WINDOW, **changes}))


def gemma2(**changes: Any) -> PreTrainedModel:
    own: dict[str, Any] = {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    }
    own["tie_word_embeddings"] = False  # else it says its last token again for ever
    return _build(Gemma2ForCausalLM, Gemma2Config(**{**_COMMON, **own, **changes}))


def gpt_oss(**changes: Any) -> PreTrainedModel:
    own: dict[str, Any] = {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return _build(GptOssForCausalLM, GptOssConfig(**{**_COMMON, **own, **changes}))


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": llama,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
}


def _build(kind: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(20)
    model: PreTrainedModel = kind(config)
    return model.eval()


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
