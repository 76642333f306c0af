"""`kvfolio simulate` and `kvfolio bench`: what they print and write, and what they say when they cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from kvfolio.simulation import EVICTION_POLICIES, MANAGERS
from test_cli import run

pytest.importorskip("typer")

LENGTHS = "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{20 + i},{5 + i % 7}\n" for i in range(30))
CHAT = "".join(
    json.dumps({"timestamp": 500 * i, "input_length": 20, "output_length": 4, "hash_ids": [0, 1, i % 3 + 2]})
    + "\n"
    for i in range(12)
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    return str(tmp_path / "lengths.csv")


@pytest.fixture
def chat(tmp_path: Path) -> str:
    (tmp_path / "chat.jsonl").write_text(CHAT)
    return str(tmp_path / "chat.jsonl")


def in_process(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Run `kvfolio` here: quicker than a process each. Status, stdout and stderr."""
    from kvfolio.cli import main

    monkeypatch.setattr(sys, "argv", ["kvfolio", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capfd.readouterr()


@pytest.fixture
def kvfolio(capfd, monkeypatch):
    return lambda *arguments: in_process(capfd, monkeypatch, *arguments)


@pytest.mark.parametrize("columns", [80, 60, None])
def test_no_table_is_cut_whatever_the_width(kvfolio, lengths: str, monkeypatch, columns: int | None) -> None:
    """In 80 columns every manager has its name on its line; below, names are broken, not cut."""
    if columns is None:  # nobody has a width: it goes into a file
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    status, said, _ = kvfolio("simulate", lengths)
    assert status == 0
    assert "…" not in said
    tables = said[said.index("Memory: mean") :].splitlines()
    assert columns is None or max(map(len, tables)) <= columns
    if columns != 60:
        for manager in set(MANAGERS) - {"paging+cache"}:
            assert sum(manager in line.replace("│", " ").split() for line in tables) == 3


def test_hit_rates_are_printed_and_written(chat: str, tmp_path: Path) -> None:
    """In a process of its own, with neither torch nor matplotlib."""
    file = tmp_path / "report.json"
    done = run("simulate", chat, "--capacities", "3,5", "--tokens-per-hash-id", "8", "--json", str(file),
               without=("torch", "transformers", "matplotlib"))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Hits per access: 36 accesses to 5 blocks of 8 tokens" in done.stdout
    for text in ("infinite", "MIN", *EVICTION_POLICIES, "0.8611", chat, "SHA-256", "12 requests"):
        assert text in done.stdout
    report = json.loads(file.read_text())
    rates = report["hit_rates"]
    assert (rates["accesses"], rates["distinct"], rates["infinite"]) == (36, 5, pytest.approx(31 / 36))
    assert [row["capacity"] for row in rates["rows"]] == [3, 5]
    # With room for three, the third of each request takes the place of the last one's.
    assert rates["rows"][0]["policies"]["lru"] == pytest.approx(22 / 36)
    assert rates["rows"][1]["optimal"] == pytest.approx(31 / 36)
    assert report["managers"] == []
    record = report["record"]["trace"]
    assert (record["source"], record["format"], record["requests"]) == (chat, "mooncake", 12)
    assert record["prompt_lengths"]["p50"] == 20 and record["seconds"] == 5.5


def test_managers_are_compared(kvfolio, lengths: str, tmp_path: Path) -> None:
    status, out, err = kvfolio(
        "simulate", lengths, "--kv-memory", "200MiB", "--max-length", "40", "--requests", "20", "--json", "-"
    )
    assert status == 0
    report = json.loads(out)
    assert [outcome["manager"] for outcome in report["managers"]] == list(MANAGERS[:-1])
    # Of the first 20 those of 25, 27, 29, 31, 33, 35, 37, 32, 34, 36, 38, 40 and 39 tokens.
    assert all(outcome["finished"] == 13 for outcome in report["managers"])
    record = report["record"]
    assert [record["workload"][name] for name in ("requests", "refused", "max_length")] == [13, 7, 40]
    assert record["setup"]["kv_memory"] == 200 * 2**20 and record["setup"]["model"]["name"] == "opt-13b"
    assert record["setup"]["cost"]["origin"] == "60% of the nominal figures of a100-40gb"
    for text in (
        "reserve-max",
        "reserve-oracle",
        "13 requests of at most 40 tokens (7 longer ones refused)",
        "requests a second",
        "200.00 MiB for it",
        "all at once: the trace has no times",
        "opt-13b",
    ):
        assert text in err
    assert report["hit_rates"] is None


def test_each_option_arrives(kvfolio, chat: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    fields = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "dtype": "bfloat16",
        "max_position_embeddings": 96,
    }  # fmt: skip
    config.write_text(json.dumps(fields))
    options = {
        "--managers": "paging+cache,paging", "--kv-memory": "100kB", "--model": str(config),
        "--block-size": "4", "--max-sequences": "20", "--tokens-per-step": "40", "--beams": "2",
        "--beam-turnover": "0.5",
        "--watermark": "0.1", "--rate": "3", "--seed": "5", "--device": "h100", "--efficiency": "0.5",
        "--kv-byte-time": "1e-9", "--tokens-per-hash-id": "8", "--format": "mooncake",
        "--kv-dtype": "float32",
        "--capacities": "5", "--eviction": EVICTION_POLICIES[-1],
    }  # fmt: skip
    status, out, _ = kvfolio(
        "simulate", chat, *[word for pair in options.items() for word in pair], "--json", "-"
    )
    assert status == 0
    report = json.loads(out)
    assert [outcome["manager"] for outcome in report["managers"]] == ["paging+cache", "paging"]
    asked, setup = report["record"]["workload"], report["record"]["setup"]
    assert (asked["beams"], asked["samples"], asked["beam_turnover"], asked["seed"]) == (2, 1, 0.5, 5)
    assert (asked["arrivals"], asked["max_length"]) == ("Poisson, 3 a second", 96)
    # 2 layers x (K and V) x 2 heads x 16 x 4 bytes.
    assert setup["model"]["kv_bytes_per_token"] == 512 and setup["model"]["kv_dtype"] == "float32"
    assert (setup["kv_memory"], setup["block_size"], setup["watermark"]) == (100_000, 4, 0.1)
    assert (setup["max_sequences"], setup["tokens_per_step"]) == (20, 40)
    assert setup["eviction"] == EVICTION_POLICIES[-1]
    cost, parameters = setup["cost"], setup["model"]["parameters"]
    assert cost["kv_byte_time"] == 1e-9
    assert cost["step_time"] == pytest.approx(2 * parameters / (3.35e12 * 0.5))
    assert cost["token_time"] == pytest.approx(2 * parameters / (989e12 * 0.5))
    assert report["hit_rates"]["rows"][0]["capacity"] == 5
    assert report["managers"][0]["hit_rate"] > 0.4


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots(kvfolio, chat: str, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{suffix}"
    status, _, err = kvfolio("simulate", chat, "--capacities", "3,5", "--managers", "paging,paging+cache",
                             "--tokens-per-hash-id", "8", "--plot", str(file))  # fmt: skip
    assert (status, err) == (0, "")
    content = file.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        for text in (
            "hits per access",
            "MIN",
            "share of the memory",
            "requests in the batch",
            "paging+cache",
        ):
            assert text in content.decode()


def test_a_plot_without_matplotlib_is_a_sentence(chat: str, tmp_path: Path) -> None:
    done = run("simulate", chat, "--plot", str(tmp_path / "plot.svg"), without=("matplotlib",))
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'kvfolio[plot]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["LENGTHS", "--capacities", "5"], "the trace must have hash ids"),
        (
            ["CHAT", "--capacities", "2"],
            "capacity must be at least 3, the blocks of the longest request, not 2",
        ),
        (["CHAT", "--capacities", "many"], "--capacities must be integers with commas between"),
        (["CHAT", "--format", "csv"], "trace_format must be one of azure, vidur, mooncake, agent-sessions"),
        (["LENGTHS", "--kv-memory", "much"], "--kv-memory must be a number"),
        (["LENGTHS", "--managers", "best"], "managers must be of reserve-max"),
        (["LENGTHS", "--device", "[red]"], "--device must be one of a100-40gb"),
        (["LENGTHS", "--efficiency", "0"], "efficiency must be above 0 and at most 1"),
        (["LENGTHS", "--step-time", "nan"], "step_time must be between 0 and 1e6 seconds, not nan"),
        (["LENGTHS", "--step-time", "0", "--token-time", "0"], "must not both be 0"),
        (["LENGTHS", "--samples", "2", "--beams", "2"], "only one of samples and beams"),
        (["LENGTHS", "--kv-dtype", "int8"], "--kv-dtype needs --model"),
        (["LENGTHS", "--plot", "plot.pdf"], "must end with .png or .svg, not 'plot.pdf'"),
        (["LENGTHS", "--model", "/nowhere"], "/nowhere: there is no such file or folder"),
        (["LENGTHS", "--json", "/nowhere/report.json", "--requests", "2"], "No such file"),
        (["BROKEN"], "broken.jsonl, line 2: input_length must be between 1 and 2147483647, not -4"),
    ],
)
def test_a_refusal_is_a_sentence_and_status_2(
    kvfolio, lengths: str, chat: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(CHAT.replace('"input_length": 20', '"input_length": -4').replace("-4", "20", 1))
    files = {"LENGTHS": lengths, "CHAT": chat, "BROKEN": str(broken)}
    status, _, err = kvfolio("simulate", *[files.get(argument, argument) for argument in arguments])
    assert status == 2
    assert err.startswith("It cannot be ") and message in err and "Traceback" not in err


def test_a_hostile_trace_ends_a_process_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"{")
    with file.open("r+b") as sparse:
        sparse.truncate(10 * 2**30)
    done = run("simulate", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"It cannot be simulated: {file}, line 1: is longer than 16777216 bytes\n"


SMALL = ["--sequences", "2", "--length", "40", "--attention-sequences", "1", "--attention-length", "64"]


def test_block_sizes_are_compared(kvfolio, chat: str) -> None:
    status, out, err = kvfolio("bench", "--block-sizes", "--trace", chat, "--json", "-", *SMALL)
    assert status == 0
    report = json.loads(out)
    rows = report["block_sizes"]
    assert [row["block_size"] for row in rows] == [1, 8, 16, 32, 64, 128]
    assert all(row["decode_step"] > 0 and row["attention"] > 0 and row["plain_read"] > 0 for row in rows)
    # A request ends with 23 tokens: 24, 32 or more slots. An id stands for 512 tokens, so for all 20.
    assert [row["empty_share"] for row in rows[:3]] == pytest.approx([0, 1 / 24, 9 / 32])
    assert rows[0]["hits_at_least"] == pytest.approx(19 * 11 / 240)
    assert report["record"]["trace"] == chat and len(report["record"]["sha256"]) == 64
    for text in ("No size is best by formula", "attention, GB/s", "found, at least", "stands for 512 tokens"):
        assert text in err


def test_without_a_trace_lengths_are_made_up_and_that_is_said(kvfolio) -> None:
    status, out, _ = kvfolio("bench", "--block-sizes", "--dtype", "bfloat16", *SMALL)
    assert status == 0
    assert "synthetic lengths (exponential, seed 0), 1,000 requests" in out
    assert "cannot be told" in out and "found, at least" not in out and "bfloat16" in out


def test_a_bench_that_is_wrong_is_a_sentence_and_status_2(kvfolio, tmp_path: Path) -> None:
    for arguments, message in (
        ([], "Say what to measure: --block-sizes"),
        (
            ["--block-sizes", "--dtype", "int8"],
            "--dtype must be one of float32, float16, bfloat16, not 'int8'",
        ),
        (["--block-sizes", "--trace", str(tmp_path / "nowhere")], "cannot be read"),
    ):
        status, _, err = kvfolio("bench", *arguments)
        assert status == 2 and message in err
