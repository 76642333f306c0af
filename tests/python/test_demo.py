"""`kvfolio demo`: on the real model once, and on a tiny one for what it prints and returns."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import tiny_models
from kvfolio.cli import demo as module
from kvfolio.cli.demo_prompts import PROMPTS
from kvfolio.cli.loading import Source
from kvfolio.serving import Comparison

GREEDY = sum(prompt.samples == 1 for prompt in PROMPTS)
ANSWERS = sum(prompt.samples for prompt in PROMPTS)
PROGRAM = """
import sys
sys.argv = ["kvfolio", "demo", "--json", "--max-tokens", "16"]
from kvfolio.cli import main
main()
"""


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_every_greedy_answer_of_the_real_model_is_its_own(real: dict[str, Any]) -> None:
    assert real["greedy_compared"] == real["greedy_equal"] == GREEDY
    verdicts = [line["equals_generate"] for line in real["requests"]]
    assert verdicts.count("sampled") == len(PROMPTS) - GREEDY == 2
    assert verdicts.count("yes") + verdicts.count("tie") == GREEDY
    assert real["near_ties"] == verdicts.count("tie") <= 2


def test_the_real_demo_runs_out_of_blocks_shares_prompts_and_copies_on_write(real: dict[str, Any]) -> None:
    stats = real["stats"]
    assert stats["preemptions"] >= 1
    assert stats["failed_steps"] == 0
    assert stats["pool"]["copies"] >= 4, "two prompts, of which three samples write"
    assert stats["pool"]["merges"] >= 1, "of prompts computed side by side"
    assert stats["forks"] == 4
    assert real["cached_tokens"] > 400, "of a system prompt of some hundred tokens that five prompts share"
    assert 0 < stats["empty_share"] < 0.25
    assert stats["peak_blocks"] <= real["record"]["num_blocks"] < stats["peak_reserved_blocks"]
    assert 0 < stats["mean_blocks"] <= stats["peak_blocks"]


def test_the_real_demos_answers_are_text_and_its_speeds_are_told_apart(real: dict[str, Any]) -> None:
    answers = [answer for line in real["requests"] for answer in line["answers"]]
    assert len(answers) == real["answers"] == ANSWERS
    assert all(len(answer.split()) >= 2 for answer in answers)
    poems = next(line["answers"] for line in real["requests"] if line["samples"] == 3)
    assert len(set(poems)) == 3
    assert real["time_per_output_token"]["mean"] < real["time_to_first_token"]["mean"]
    assert real["stats"]["throughput"] > 0


def test_the_real_demos_record_says_what_was_run(real: dict[str, Any]) -> None:
    record = real["record"]
    assert "SmolLM2-135M-Instruct" in record["model"]
    assert (record["dtype"], record["device"], record["block_size"]) == ("float32", "cpu", 16)
    assert set(record["versions"]) >= {"kvfolio", "python", "torch", "transformers", "gguf"}
    assert 1 < record["peak_concurrency"] <= record["max_sequences"]
    for name in ("prompt_lengths", "answer_lengths"):
        spread = record[name]
        assert spread["min"] <= spread["p50"] <= spread["p95"] <= spread["max"]
        assert spread["min"] <= spread["mean"] <= spread["max"]
    assert record["answer_lengths"]["max"] == 16


class Words:
    """A tokenizer of sorts: one token a word."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        spread = tiny_models.VOCABULARY - 1
        return {"input_ids": [1 + sum(word.encode()) % spread for word in text.split()]}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f"w{token} " for token in token_ids)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> module.DemoOptions:
    model = tiny_models.llama(max_position_embeddings=1024)
    monkeypatch.setattr(module, "find_source", lambda name: Source(name))
    monkeypatch.setattr(module, "load", lambda *_args, **_options: (model, Words()))
    return module.DemoOptions(
        model="tiny",
        json=False,
        max_tokens=16,
        block_size=16,
        num_blocks=None,
        max_sequences=8,
        max_tokens_per_step=128,
        dtype="float32",
        verify=True,
    )


def rows(output: str) -> dict[str, str]:
    """The two-column tables: what stands beside each name."""
    cells = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in output.splitlines()]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def test_only_questions_are_cut_in_80_columns(
    tiny: module.DemoOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert module.run_demo(dataclasses.replace(tiny, verify=False)) == 0
    lines = capsys.readouterr().out.partition("Requests, lengths")[2].partition("Totals")[0].splitlines()[1:]
    heading = next(line for line in lines if "cached" in line)
    names = ["n", "prompt", "cached", "answer", "preempted", "first", "per", "tok", "generate"]
    assert heading.split() == names
    requests = [line for line in lines if line.endswith(("not compared", "sampled"))]
    assert len(requests) == len(PROMPTS)
    assert all("\u2026" not in line[17:] and len(line) <= 80 for line in requests)


def test_the_tables_hold_every_figure(
    tiny: module.DemoOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert module.run_demo(tiny) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["requests, answers"] == f"{len(PROMPTS)}, {ANSWERS}"
    assert shown["greedy answers equal to generate"].startswith(f"{GREEDY} of {GREEDY} ")
    assert int(shown["preemptions"]) >= 1
    for name in (
        "prompt tokens",
        "cached tokens",
        "blocks, peak",
        "blocks, mean of the steps",
        "empty slots",
        "reserved at maximum length",
        "copies, merges",
        "time to first token",
        "time per output token",
        "throughput",
        "versions",
        "model",
        "dtype, device, threads",
        "prompt lengths",
        "answer lengths",
        "concurrency",
    ):
        assert any(character.isdigit() for character in shown[name]), name


@pytest.mark.parametrize("loop", [{"run_ahead": 1}, {"speculate": True}])
def test_the_loop_may_run_ahead_or_speculate(
    tiny: module.DemoOptions,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    loop: dict[str, Any],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert module.run_demo(dataclasses.replace(tiny, **loop)) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["greedy answers equal to generate"].startswith(f"{GREEDY} of {GREEDY} ")
    if "run_ahead" in loop:
        assert (shown["steps in flight"], shown["drafts"]) == ("up to 1 ahead, 0 slots wasted", "none")
    else:
        accepted, drafted = map(int, shown["drafts"].split(" accepted")[0].split(" of "))
        assert 0 < accepted < drafted
        assert shown["drafts"].endswith(
            f"({accepted / drafted:.1%}), by PromptLookup(num_draft_tokens=4, max_ngram=3, min_ngram=1)"
        )


def test_an_answer_that_is_not_the_models_own_fails_the_demo(
    tiny: module.DemoOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    compare = module.compare_with_generate

    def compare_spoiled(model: Any, prompt: list[int], answer: list[int], **options: Any) -> Comparison:
        return compare(
            model, prompt, [*answer[:2], (answer[2] + 1) % tiny_models.VOCABULARY, *answer[3:]], **options
        )

    monkeypatch.setattr(module, "compare_with_generate", compare_spoiled)
    assert module.run_demo(tiny) == 1
    output = capsys.readouterr().out
    assert output.count("no at 2") == GREEDY
    assert rows(output)["greedy answers equal to generate"].startswith(f"0 of {GREEDY}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "foo"}, "--dtype must be one of float32, bfloat16, float16, not foo"),
        ({"dtype": "int8"}, "--dtype must be one of float32, bfloat16, float16, not int8"),
        ({"num_blocks": 1}, "--num-blocks must be at least"),
        ({"max_sequences": 20, "max_tokens_per_step": 3}, "--max-tokens-per-step must be at least"),
        ({"max_tokens": 100_000}, "--max-tokens must be at most"),
        ({"speculate": True, "run_ahead": 1}, "--run-ahead must be 0 with --speculate, not 1"),
    ],
)
def test_options_that_cannot_be_are_said_in_a_sentence(
    tiny: module.DemoOptions,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert module.run_demo(dataclasses.replace(tiny, **options)) == 1
    assert capsys.readouterr().out.startswith(f"It cannot be run so: {said}")


def test_the_most_tokens_that_are_said_to_be_allowed_are(
    tiny: module.DemoOptions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert module.run_demo(dataclasses.replace(tiny, max_tokens=100_000)) == 1
    most = int(capsys.readouterr().out.split("at most ")[1].split(",")[0])
    ids = [module._token_ids(Words(), prompt) for prompt in PROMPTS]
    model, tokenizer = module.load()  # type: ignore[call-arg]
    engine = module._make_engine(model, tokenizer, ids, dataclasses.replace(tiny, max_tokens=most))
    assert engine.max_tokens_per_sequence == 1024
