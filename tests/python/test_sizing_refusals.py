"""What a sizing refuses: the message names file and field, what came and what is allowed."""

# ruff: noqa: E501 - tables of messages are read best a line each

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kvfolio as kv
import model_configs as models
import pytest
from kvfolio.sizing import ConfigError, Deployment, KVFormat, ModelShape, plan, read_config

GIVEN = {"kv_memory": 2**34}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


LLAMA, GEMMA, NEXT = models.LLAMA_8B, models.GEMMA2_9B, models.QWEN3_NEXT_80B
TWO = {**LLAMA, "num_hidden_layers": 2}

REFUSED = [
    (without(LLAMA, "num_hidden_layers"), r"num_hidden_layers .*is missing; it must be an integer of at least 1"),
    (without(LLAMA, "num_attention_heads"), "num_attention_heads .*is missing"),
    (without(LLAMA, "hidden_size"), "hidden_size .*is missing"),
    ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers must be at least 1, not -1"),
    ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers must be an integer of at least 1, not '32'"),
    ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers must be an integer of at least 1, not True"),
    ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads must be at least 1, not 0"),
    ({**LLAMA, "num_key_value_heads": 8.0}, "num_key_value_heads must be an integer of at least 1, not 8.0"),
    ({**LLAMA, "num_key_value_heads": [2, 4]}, r"num_key_value_heads must be an integer .*not \[2, 4\]"),
    ({**LLAMA, "num_key_value_heads": 5}, "num_key_value_heads must divide the 32 attention heads, not 5"),
    ({**LLAMA, "hidden_size": 4100}, "head_dim is missing, and hidden_size 4100 is no multiple of 32"),
    ({**LLAMA, "head_dim": -64}, "head_dim must be at least 1, not -64"),
    ({**LLAMA, "torch_dtype": "float64"}, r"dtype \(or torch_dtype\) must be one of float32, .*not 'float64'"),
    ({**LLAMA, "torch_dtype": 16}, "torch_dtype must be text, not 16"),
    ({**LLAMA, "model_type": 7}, "model_type must be text, not 7"),
    ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder must be false, not true"),
    ({**LLAMA, "text_config": 3}, "text_config must be a JSON object, not 3"),
    ({**LLAMA, "index_head_dim": 128}, "index_head_dim must not be given, not 128"),
    ({**LLAMA, "sliding_window": 4096}, "layer_types is missing: sliding_window .*'llama' is not a model_type"),
    ({**TWO, "layer_types": ["full_attention", "sdpa"]}, r"layer_types\[1\] must be one of .*, not 'sdpa'"),
    ({**TWO, "layer_types": ["full_attention"]}, "layer_types must be a list of 2 texts, one a layer, not of 1"),
    ({**TWO, "layer_types": "full_attention"}, "layer_types must be a list of texts, not 'full_attention'"),
    ({**TWO, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is missing"),
    ({**TWO, "layer_types": ["full_attention", "chunked_attention"]}, "attention_chunk_size is missing"),
    ({**TWO, "layer_types": ["full_attention", "mamba"]}, "linear_num_value_heads .*is missing"),
    ({**TWO, "layer_types": ["full_attention", "conv"]}, "conv_L_cache is missing"),
    ({**LLAMA, "attention_chunk_size": 8192}, "layer_types is missing: attention_chunk_size"),
    ({**LLAMA, "mamba_d_state": 16}, "layer_types is missing: mamba_d_state tells of states"),
    ({**TWO, "hybrid_override_pattern": "M?"}, r"hybrid_override_pattern must be 2 letters .*not 'M\?'"),
    ({**TWO, "num_kv_shared_layers": 2}, "num_kv_shared_layers must be below 2, the layers, not 2"),
    ({**GEMMA, "sliding_window": -5}, "sliding_window must be at least 1, not -5"),
    ({**models.QWEN2_7B, "use_sliding_window": "no"}, "use_sliding_window must be true or false, not 'no'"),
    ({**NEXT, "mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype must be one of float32, .*not 'float8'"),
    (without(NEXT, "linear_key_head_dim"), "linear_key_head_dim is missing"),
    (without(models.DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim is missing"),
    ([1, 2], "must be a JSON object, not list"),
    ("config.json", r"must be a JSON object, not str: read_config.path.\.values reads a file"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_a_wrong_field_is_named(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^some/config\.json: {message}") as caught:
        ModelShape.from_config(config, "some/config.json")
    assert isinstance(caught.value, kv.KVFolioError)
    assert isinstance(caught.value, ValueError)


def test_a_field_of_the_text_part_is_named_so() -> None:
    config = {**models.GEMMA3_27B, "text_config": without(models.GEMMA3_27B["text_config"], "head_dim")}
    config["text_config"]["hidden_size"] = 5377
    with pytest.raises(ConfigError, match=r"^config\.json: text_config: head_dim is missing"):
        ModelShape.from_config(config, "config.json")


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (LLAMA, 3, "num_attention_heads must be a multiple of tensor_parallel, 3, not 32"),
        (models.FALCON_7B, 2, "num_attention_heads must be a multiple of tensor_parallel, 2, not 71"),
        ({**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128}, 4,
         "num_key_value_heads must be a multiple or a divisor of tensor_parallel, 4, not 6"),
        ({**NEXT, "num_attention_heads": 48, "linear_num_key_heads": 48, "linear_num_value_heads": 48}, 3,
         "num_key_value_heads must be a multiple or a divisor of tensor_parallel, 3, not 2"),
        ({**NEXT, "num_attention_heads": 48, "num_key_value_heads": 3}, 3,
         "the heads of states must be a multiple or a divisor of tensor_parallel, 3, not 16"),
    ],
)  # fmt: skip
def test_heads_that_cannot_be_split_are_refused(config: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config: {message}"):
        plan(ModelShape.from_config(config), Deployment(**GIVEN, tensor_parallel=ranks))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of memory and kv_memory must be given"),
        ({"memory": 1, "kv_memory": 1}, "exactly one of memory and kv_memory must be given"),
        ({"kv_memory": -1}, "kv_memory must be at least 0, not -1"),
        ({"memory": -1}, "memory must be at least 0, not -1"),
        ({"kv_memory": 1.5}, "kv_memory must be an integer, not float"),
        ({"kv_memory": [1, 2]}, "one for each of the 1 stages of pipeline_parallel, not 2"),
        ({**GIVEN, "block_size": 0}, "block_size must be at least 1, not 0"),
        ({**GIVEN, "alignment": 0}, "alignment must be at least 1, not 0"),
        ({**GIVEN, "tensor_parallel": -2}, "tensor_parallel must be at least 1, not -2"),
        ({**GIVEN, "pipeline_parallel": 0}, "pipeline_parallel must be at least 1, not 0"),
        ({**GIVEN, "pipeline_parallel": 33}, "pipeline_parallel must be at most 32, the layers, not 33"),
        ({**GIVEN, "pipeline_parallel": 2, "layers_per_stage": [8, 8]}, "layers_per_stage must sum up to 32"),
        ({**GIVEN, "pipeline_parallel": 2, "layers_per_stage": [0, 32]}, "layers_per_stage must be at least 1"),
        ({**GIVEN, "layers_per_stage": 32}, "layers_per_stage must be a sequence of integers, not int"),
        ({**GIVEN, "weights": -1}, "weights must be at least 0, not -1"),
        ({**GIVEN, "activations": -1}, "activations must be at least 0, not -1"),
        ({**GIVEN, "tokens_per_step": 0}, "tokens_per_step must be at least 1, not 0"),
        ({"memory": 2**34, "utilization": 0}, "utilization must be above 0 and at most 1, not 0"),
        ({"memory": 2**34, "utilization": 1.1}, "utilization must be above 0 and at most 1, not 1.1"),
        ({"memory": 2**34, "utilization": float("nan")}, "utilization must be above 0 and at most 1, not nan"),
        ({**GIVEN, "kv_dtype": "fp8"}, "kv_dtype must be one of float32, .*not 'fp8'"),
        ({**GIVEN, "scales": "per-head"}, "scales must be one of none, per-tensor, per-token-head, not 'per-head'"),
        ({**GIVEN, "scales": "per-tensor"}, "scales must be none with bfloat16, not per-tensor"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        plan(ModelShape.from_config(LLAMA), Deployment(**options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "lengths must have at least one number"),
        ({"lengths": [0]}, "lengths must be at least 1, not 0"),
        ({"lengths": [-8]}, "lengths must be at least 1, not -8"),
        ({"lengths": [1.5]}, "lengths must be an integer, not float"),
        ({"lengths": 8192}, "lengths must be a sequence of integers, not int"),
        ({"lengths": "8192"}, "lengths must be a sequence of integers, not str"),
        ({"block_sizes": [0]}, "block_sizes must be at least 1, not 0"),
    ],
)
def test_a_wrong_length_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        plan(ModelShape.from_config(LLAMA), Deployment(**GIVEN), **arguments)


def test_formats_are_checked_on_their_own() -> None:
    with pytest.raises(ValueError, match="kv_dtype must be one of"):
        KVFormat("int4")
    with pytest.raises(ValueError, match="scales must be one of"):
        KVFormat("int8", "some")  # type: ignore[arg-type]


def test_an_estimate_that_cannot_be_made_is_needed_only_for_all_memory() -> None:
    shape = ModelShape.from_config(without(LLAMA, "vocab_size"), "config.json")
    with pytest.raises(ConfigError, match="vocab_size is missing"):
        plan(shape, Deployment(memory=2**36))
    found = plan(shape, Deployment(**GIVEN))
    assert found.stages[0].reserve is None
    assert any("not estimated: config.json: vocab_size is missing" in note for note in found.notes)


def test_assumptions_are_told() -> None:
    config = without(LLAMA, "torch_dtype", "num_key_value_heads")
    notes = plan(ModelShape.from_config(config), Deployment(**GIVEN), [200_000]).notes
    assert "dtype is not given: bfloat16 is assumed" in notes
    assert "num_key_value_heads is not given: as many as query heads, 32, are assumed" in notes
    assert "the model was made for at most 131072 tokens (max_position_embeddings)" in notes
    assert plan(ModelShape.from_config(LLAMA), Deployment(**GIVEN), [131_072]).notes == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "must be a JSON object, not list"),
        (b"\xff\xfe{", "is not UTF-8"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    for where in (file, tmp_path):
        with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
            read_config(where)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: there is no such file or folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: No such file"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"lama.json: there is no such file"):
        read_config("lama.json")


def test_a_hub_id_without_a_connection_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^owner/nothing: is neither a file nor a folder, and the hub does not"
    ):
        read_config("owner/nothing")


def test_a_hub_id_without_its_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="a hub id needs huggingface_hub: pip install"):
        read_config("owner/name")


def test_a_hub_id_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    asked = []
    monkeypatch.setattr(hub, "hf_hub_download", lambda *what: asked.append(what) or str(file))
    found = read_config("owner/name")
    assert asked == [("owner/name", "config.json")]
    assert (found.values, found.source, found.weight_bytes) == (LLAMA, "owner/name (hub)", None)


def test_weights_are_as_large_as_their_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).weight_bytes is None
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 24)
    config = read_config(tmp_path)
    assert config.weight_bytes == 1024
    shape = ModelShape.from_config(config.values, config.source)
    reserve = plan(shape, Deployment(memory=2**35), weight_bytes=config.weight_bytes).stages[0].reserve
    assert reserve is not None
    assert (reserve.weights, reserve.weights_origin) == (1024, "files")
