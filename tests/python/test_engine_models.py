"""Which models the engine takes, and what it says to the others."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import kvfolio as kv
import numpy as np
import tiny_models
import torch
import transformers
from kvfolio.serving import Engine, UnsupportedModel
from kvfolio.serving.hf_model import PagedModel

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def build(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind(kind.config_class(**{**SIZES, **config}))


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("Mamba", {}, "recurrent"),
        ("FalconH1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "recurrent"),
        ("Bloom", {"n_layer": 2, "n_head": 2}, "attention interface"),
        (
            "DeepseekV3",
            {
                "num_key_value_heads": 2,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "first_k_dense_replace": 2,
            },
            "one shape",
        ),
        (
            "Llama4",
            {"head_dim": 16, "layer_types": ["chunked_attention", "full_attention"]},
            "chunked_attention",
        ),
    ],
)
def test_models_without_one_k_and_v_a_layer_are_refused_with_the_reason(
    name: str, config: dict[str, Any], reason: str
) -> None:
    model = build(name, **config) if name != "Llama4" else _llama4(config)
    with pytest.raises(UnsupportedModel, match=reason):
        Engine(model, num_blocks=8)


def _llama4(config: dict[str, Any]) -> Any:
    own = {"head_dim": 16, "intermediate_size_mlp": 48, "moe_layers": [], **config}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**{**SIZES, **own}))


def test_encoders_are_refused() -> None:
    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    config = transformers.BartConfig(
        vocab_size=64, encoder_attention_heads=2, decoder_attention_heads=2, **sizes
    )
    with pytest.raises(UnsupportedModel, match="encoder"):
        PagedModel(transformers.BartForConditionalGeneration(config))


def test_what_is_no_model_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="PreTrainedModel"):
        PagedModel(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_probe_tells_what_the_cache_must_hold_and_leaves_no_trace() -> None:
    model = tiny_models.gemma2()
    before = model.config._attn_implementation
    layout = PagedModel(model).layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (2, 2, 16)
    assert layout.sliding_window is None, "one of its layers sees everything"
    assert PagedModel(tiny_models.mistral()).layout.sliding_window == tiny_models.WINDOW
    assert PagedModel(tiny_models.llama().to(torch.bfloat16)).layout.dtype == torch.bfloat16
    assert model.config._attn_implementation == before


def test_positions_whose_rotation_depends_on_the_batch_are_not_used() -> None:
    """Dynamic RoPE stretches every token's rotation by the longest sequence of the batch."""
    rope = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    engine = Engine(tiny_models.llama(rope_parameters=rope), num_blocks=64, block_size=4)
    assert engine.max_tokens_per_sequence == 64


def test_logits_can_be_asked_for_elsewhere_and_token_ids_told_late() -> None:
    """As drafts and run-ahead want it; by default they are the plan's own."""
    model = PagedModel(tiny_models.llama())
    pool = kv.BlockPool(8, 4)
    cache, batch = model.make_cache(pool), kv.Batch(pool, max_sequences=2, max_tokens_per_sequence=16)
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    for prompt in prompts:
        batch.add(pool.sequence(prompt, read_cache=False, write_cache=False))
    with batch.plan() as plan:
        default = model.forward(plan, cache)
        everywhere = model.forward(plan, cache, logits_indices=np.arange(7))
        torch.testing.assert_close(everywhere[plan.logits_indices.copy()], default)
        nowhere = model.forward(plan, cache, logits_indices=np.empty(0, np.int64))
        assert nowhere.shape == (0, tiny_models.VOCABULARY)
        other = plan.token_ids.copy()
        other[6] = 9
        changed = model.forward(plan, cache, token_ids=other, logits_indices=np.arange(7))
    torch.testing.assert_close(changed[:6], everywhere[:6])
    whole = model._model(torch.tensor([[6, 9]])).logits[0]
    torch.testing.assert_close(changed[5:], whole)
