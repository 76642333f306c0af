"""`kvfolio plan`: what it prints, and what it says when it cannot."""

# ruff: noqa: E501 - tables of messages are read best a line each

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import model_configs as models
import pytest
from kvfolio.sizing import Deployment, ModelShape, plan
from test_cli import run

pytest.importorskip("typer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(models.LLAMA_8B))
    return tmp_path


def test_json_is_the_plan(folder: Path) -> None:
    options = ["--memory", "80GiB", "--utilization", "0.8", "--lengths", "1000,2000", "--tp", "2", "--json"]
    done = run("plan", str(folder), *options)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    deployment = Deployment(memory=80 * 2**30, utilization=0.8, tensor_parallel=2)
    right = plan(ModelShape.from_config(models.LLAMA_8B), deployment, [1000, 2000])
    assert [row["sequences"] for row in found["lengths"]] == [row.sequences for row in right.lengths]
    assert found["stages"][0]["kv_bytes"] == right.stages[0].kv_bytes
    assert found["stages"][0]["layers"] == [0, 32]
    assert found["stages"][0]["reserve"]["weights_origin"] == "estimated"
    assert found["groups"][0]["bytes_per_block"] == [2**20]
    assert [row["block_size"] for row in found["block_sizes"]] == [1, 2, 4, 8, 16, 32, 64, 128]


EVERY_OPTION: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sizes": (
        ["--memory", "40GiB,50GB", "--pp", "2", "--weights", "10GiB", "--activations", "1GiB"],
        {
            "memory": [40 * 2**30, 50 * 10**9],
            "pipeline_parallel": 2,
            "weights": 10 * 2**30,
            "activations": 2**30,
        },
    ),
    "stages": (
        ["--kv-memory", "8GiB", "--pipeline-parallel", "2", "--layers-per-stage", "8,24"],
        {"kv_memory": 2**33, "pipeline_parallel": 2, "layers_per_stage": [8, 24]},
    ),
    "format": (
        ["--kv-memory", "8GiB", "--kv-dtype", "int8", "--scales", "per-token-head", "--alignment", "4096"],
        {"kv_memory": 2**33, "kv_dtype": "int8", "scales": "per-token-head", "alignment": 4096},
    ),
    "rest": (
        ["--memory", "40GiB", "--block-size", "32", "--tensor-parallel", "4", "--tokens-per-step", "512"],
        {"memory": 40 * 2**30, "block_size": 32, "tensor_parallel": 4, "tokens_per_step": 512},
    ),
    "windows": (["--kv-memory", "8GiB", "--ignore-windows"], {"kv_memory": 2**33, "ignore_windows": True}),
}


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_each_option_arrives(tmp_path: Path, name: str) -> None:
    arguments, options = EVERY_OPTION[name]
    file = tmp_path / "mistral.json"
    file.write_text(json.dumps(models.MISTRAL_7B))
    done = run("plan", str(file), *arguments, "--json")
    right = plan(ModelShape.from_config(models.MISTRAL_7B, str(file)), Deployment(**options))
    from kvfolio.cli.plan import to_record

    assert json.loads(done.stdout) == json.loads(json.dumps(to_record(right)))


def test_tables_show_what_json_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run("plan", str(folder), "--memory", "80GiB", "--lengths", "8192,900000")
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("131,072 / 2,097,152", "(estimated)", "all tokens", "0, short by", "29,055"):
        assert text in done.stdout
    assert "Note: the model was made for at most 131072 tokens" in done.stdout


def test_states_and_groups_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "next.json"
    file.write_text(json.dumps(models.QWEN3_NEXT_80B))
    done = run("plan", str(file), "--kv-memory", "16GiB", "--tp", "4")
    assert "a state (estimated)" in done.stdout
    assert "the same KV on 2 ranks" in done.stdout
    file.write_text(json.dumps(models.GPT_OSS_20B))
    done = run("plan", str(file), "--kv-memory", "16GiB", "--lengths", "8192", "--kv-dtype", "float8_e4m3fn")
    assert "512 + 9" in done.stdout
    assert "scales per-tensor" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-memory", "2MiB"], "0 blocks, short by 2097152 bytes on each rank of stage 0"),
        (["--memory", "8GiB"], "0 blocks, short by"),
        (["--memory=-8GiB"], "--memory must be a number that is not negative"),
        (["--kv-memory", "8GiB", "--weights", "much"], "--weights must be a number"),
        ([], "exactly one of memory and kv_memory must be given"),
        (["--kv-memory", "8GiB", "--tp", "3"], "num_attention_heads must be a multiple of tensor_parallel, 3"),
        (["--kv-memory", "8GiB", "--lengths", "1k"], "--lengths must be integers with commas between, not '1k'"),
        (["--kv-memory", "8GiB", "--lengths=-5"], "lengths must be at least 1, not -5"),
        (["--kv-memory", "8GiB", "--layers-per-stage", "a"], "--layers-per-stage must be integers"),
        (["--kv-memory", "8GiB", "--kv-dtype", "[red]"], "not '[red]'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_a_refusal_is_a_sentence_and_status_1(
    folder: Path, arguments: list[str], message: str, as_json: bool
) -> None:
    done = run("plan", str(folder), *arguments, *(["--json"] if as_json else []))
    assert done.returncode == 1
    said, nothing = (done.stderr, done.stdout) if as_json else (done.stdout, done.stderr)
    assert said.startswith("It cannot be planned: ")
    assert message in said
    assert nothing == ""


@pytest.mark.parametrize("content", ["{", '{"num_hidden_layers": 2}'])
def test_a_wrong_configuration_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    done = run("plan", str(tmp_path), "--kv-memory", "8GiB")
    assert done.returncode == 1
    assert f"{tmp_path}/config.json: " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_hub_id_without_a_connection_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = run("plan", "owner/nothing", "--kv-memory", "8GiB")
    assert done.returncode == 1
    assert done.stdout.startswith("It cannot be planned: owner/nothing: is neither a file nor a folder")
    assert "Traceback" not in done.stdout + done.stderr


def test_it_needs_neither_torch_nor_transformers(folder: Path) -> None:
    done = run(
        "plan", str(folder), "--kv-memory", "8GiB", without=("torch", "transformers", "huggingface_hub")
    )
    assert (done.returncode, done.stderr) == (0, "")
