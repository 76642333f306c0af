"""Traces: what each format says, and what is said of one that is wrong."""

# ruff: noqa: E501 - a trace's line is read best as one

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from kvfolio import KVFolioError
from kvfolio.simulation import TraceError, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.9951690,1,0
"""
VIDUR = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n2015,156,2171,12.9\n"
)
MOONCAKE = """{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 9]}
{"timestamp": 1500, "input_length": 1400, "output_length": 1, "hash_ids": [7, 18446744073709551615, 3]}
"""
SESSION = {
    "id": "a",
    "block_size": 64,
    "requests": [
        {"t": 0.0, "in": 130, "out": 3, "hash_ids": [1, 2]},
        {"t": 2.5, "in": 200, "out": 4, "hash_ids": [1, 2, 3]},
    ],
}


def write(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def lengths(trace):
    return list(zip(trace.prompt_lengths.tolist(), trace.output_lengths.tolist(), strict=True))


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\N{ZERO WIDTH NO-BREAK SPACE}"])
def test_azure(tmp_path, ends, mark):
    file = write(tmp_path, mark + AZURE.replace("\n", ends))
    trace = read_trace(file)
    assert (trace.format, lengths(trace)) == ("azure", [(374, 44), (396, 109), (1, 0)])
    assert trace.arrivals.tolist() == pytest.approx([0, 4.314579, 4.314579], abs=1e-6)
    assert trace.hash_ids is None and trace.tokens_per_hash_id == 0
    assert trace.digest == hashlib.sha256(file.read_bytes()).hexdigest()


def test_vidur_has_no_times(tmp_path):
    trace = read_trace(write(tmp_path, VIDUR))
    assert (trace.format, lengths(trace), trace.arrivals) == ("vidur", [(3772, 54), (2015, 156)], None)


def test_mooncake(tmp_path):
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert (trace.format, lengths(trace)) == ("mooncake", [(1000, 5), (1400, 1)])
    assert trace.arrivals.tolist() == [0, 1.5]
    # Numbered anew; the same stay the same.
    first, second = trace.ids_of(0).tolist(), trace.ids_of(1).tolist()
    assert (len(first), len(second), first[0]) == (2, 3, second[0])
    assert trace.num_distinct == 4 and set(first + second) == {0, 1, 2, 3}
    assert trace.tokens_per_hash_id == 512
    assert read_trace(write(tmp_path, MOONCAKE), tokens_per_hash_id=16).tokens_per_hash_id == 16


@pytest.mark.parametrize("indent", [None, 2])
def test_a_session(tmp_path, indent):
    file = write(tmp_path, json.dumps(SESSION, indent=indent) + "\n")
    trace = read_trace(file)
    assert (trace.format, lengths(trace)) == ("agent-sessions", [(130, 3), (200, 4)])
    assert trace.arrivals.tolist() == [0, 2.5]
    assert trace.tokens_per_hash_id == 64 and trace.num_distinct == 3
    assert trace.digest == hashlib.sha256(file.read_bytes()).hexdigest()


def test_sessions_of_a_folder_run_side_by_side_with_ids_of_their_own(tmp_path):
    write(tmp_path, json.dumps(SESSION), "b.json")
    write(tmp_path, json.dumps(SESSION), "a.json")
    write(tmp_path, "no trace", "LICENSE")
    trace = read_trace(tmp_path)
    assert lengths(trace) == [(130, 3), (130, 3), (200, 4), (200, 4)]
    assert trace.num_distinct == 6
    assert trace.ids_of(0).tolist() == trace.ids_of(2).tolist()[:2]
    assert not set(trace.ids_of(0).tolist()) & set(trace.ids_of(1).tolist())


def test_the_first_requests_and_some(tmp_path):
    trace = read_trace(write(tmp_path, MOONCAKE))
    head, last = trace.head(1), trace.take(np.array([1]))
    assert lengths(head) == [(1000, 5)] and len(head.hash_ids) == 2 and head.most_hash_ids == 2
    assert lengths(last) == [(1400, 1)] and last.ids_of(0).tolist() == trace.ids_of(1).tolist()


def line(**fields: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]} | fields)


GOOD = line(timestamp=5)
CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n"
DEEP = "[" * 100_000
HOSTILE = {
    "an empty file": ("", None, None, "is empty"),
    "blank lines": ("\n \n", None, None, "is empty"),
    "text": ("once upon a time", 1, None, 'is of no known format (azure, vidur, mooncake, agent-sessions): "once'),
    "a header alone": (CSV.splitlines()[0], None, None, "has no request"),
    "broken JSON": (f'{GOOD}\n{{"timestamp": 1, "input_length"', 2, None, "is not JSON"),
    "broken JSON in line 1": ('{"timestamp": 1, "input_length"', 1, None, "is not JSON"),
    "no object": (f"{GOOD}\n[1]", 2, None, "must be a JSON object, not [1]"),
    "a missing field": (f'{GOOD}\n{{"timestamp": 6, "input_length": 5, "output_length": 1}}', 2, "hash_ids", "is missing"),
    "a negative length": (f"{GOOD}\n{line(timestamp=6, input_length=-5)}", 2, "input_length", "must be between 1 and 2147483647, not -5"),
    "an empty prompt": (line(input_length=0), 1, "input_length", "not 0"),
    "a huge length": (line(output_length=10**30), 1, "output_length", "must be between 0 and 2147483647, not 1000000000"),
    "a fraction": (line(output_length=1.5), 1, "output_length", "must be an integer, not 1.5"),
    "a truth value": (line(output_length=True), 1, "output_length", "must be an integer, not True"),
    "a text": (line(input_length="5"), 1, "input_length", 'must be an integer, not "5"'),
    "null": (line(input_length=None), 1, "input_length", "must be an integer, not None"),
    "NaN": (line(timestamp=float("nan")), 1, None, "NaN is no number"),
    "infinity": (line().replace('"timestamp": 0', '"timestamp": 1e999'), 1, "timestamp", "must be between 0 and 1e15, not inf"),
    "an integer of many digits": (line().replace('"timestamp": 0', f'"timestamp": {"9" * 5000}'), 1, None, "is not JSON of a trace"),
    "a negative time": (line(timestamp=-1), 1, "timestamp", "must be between 0 and 1e15, not -1"),
    "a time that goes back": (f"{GOOD}\n{line(timestamp=4)}", 2, "timestamp", "must not be before that of the request before it"),
    "an id that is none": (line(hash_ids=[1, "x"]), 1, "hash_ids[1]", 'must be an integer, not "x"'),
    "a negative id": (line(hash_ids=[-1]), 1, "hash_ids[0]", "must be between 0 and 18446744073709551615, not -1"),
    "a huge id": (line(hash_ids=[2**64]), 1, "hash_ids[0]", "must be between 0 and"),
    "ids that are no list": (line(hash_ids={"1": 2}), 1, "hash_ids", "must be a list of integers"),
    "no UTF-8": (f"{GOOD}\n".encode() + b'{"timestamp": "\xff"}', 2, None, "is not UTF-8"),
    "a session that is no UTF-8": (b'{"block_size": 64,\n "id":\n "\xff"}', 3, None, "is not UTF-8"),
    "deep JSON": (f'{{"input_length": {DEEP}', 1, None, "is not JSON"),
    "CSV, a negative length": (f"{CSV}2023-11-16 18:15:47,-3,4", 3, "ContextTokens", "not -3"),
    "CSV, a word": (f"{CSV}2023-11-16 18:15:47,3,many", 3, "GeneratedTokens", 'must be an integer, not "many"'),
    "CSV, NaN": (f"{CSV}2023-11-16 18:15:47,nan,4", 3, "ContextTokens", "must be an integer"),
    "CSV, a fraction": (f"{CSV}2023-11-16 18:15:47,3.0,4", 3, "ContextTokens", "must be an integer"),
    "CSV, many digits": (f"{CSV}2023-11-16 18:15:47,{'9' * 5000},4", 3, "ContextTokens", "must be an integer"),
    "CSV, other digits": (f"{CSV}2023-11-16 18:15:47,\N{ARABIC-INDIC DIGIT THREE},4", 3, "ContextTokens", "must be an integer"),
    "CSV, a value is missing": (f"{CSV}2023-11-16 18:15:47,3", 3, "GeneratedTokens", "is missing"),
    "CSV, one too many": (f"{CSV}2023-11-16 18:15:47,3,4,5", 3, None, "has 4 values, and there are 3 columns"),
    "CSV, no time": (f"{CSV}yesterday,3,4", 3, "TIMESTAMP", "must be a date and time"),
    "CSV, times out of order": (f"{CSV}2023-11-16 18:15:45,3,4", 3, "TIMESTAMP", "is 1 less"),
    "CSV, a column is missing": ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3", 1, "GeneratedTokens", "is missing in the header"),
    "CSV, a column twice": ("num_prefill_tokens,num_decode_tokens,num_decode_tokens\n1,2,3", 1, "num_decode_tokens", "is twice in the header"),
    "no requests": ('{"block_size": 64}', 1, "requests", "is missing"),
    "requests that are none": ('{"block_size": 64, "requests": {}}', 1, "requests", "must be a list"),
    "an empty list of requests": ('{"block_size": 64, "requests": []}', None, None, "has no request"),
    "a request that is none": ('{"block_size": 64, "requests": [5]}', 1, "requests[0]", "must be an object, not 5"),
    "a block size of 0": ('{"block_size": 0, "requests": []}', 1, "block_size", "must be between 1 and"),
    "a broken session": ('{"block_size": 64,\n "requests": [', 2, None, "is not JSON"),
    "a session's length": (
        json.dumps(SESSION | {"requests": [{"t": 0, "in": 5, "out": -1, "hash_ids": []}]}), 1, "requests[0].out", "not -1"),
    "a session's id": (
        json.dumps(SESSION | {"requests": [{"t": 0, "in": 5, "out": 1, "hash_ids": [1, None]}]}), 1, "requests[0].hash_ids[1]", "not None"),
    "a session's times": (
        json.dumps(SESSION | {"requests": SESSION["requests"][::-1]}), 1, "requests[1].t", "must not be before"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_named_with_file_line_and_field(tmp_path, name):
    content, number, field, problem = HOSTILE[name]
    file = write(tmp_path, content)
    with pytest.raises(TraceError) as refusal:
        read_trace(file)
    error = refusal.value
    assert (error.file, error.line, error.field) == (str(file), number, field)
    assert problem in error.problem and len(str(error)) < 300
    where = f"{file}, line {number}: " if number else f"{file}: "
    assert str(error).startswith(where + (f"{field} " if field else ""))
    assert isinstance(error, KVFolioError) and isinstance(error, ValueError)


@pytest.mark.parametrize("start", [b"", b"{", GOOD.encode() + b"\n", AZURE.encode()])
@pytest.mark.parametrize("fmt", [None, "agent-sessions"])
def test_ten_gigabytes_of_one_line_are_refused_in_bounded_memory(tmp_path, start, fmt):
    file = write(tmp_path, start)
    with file.open("r+b") as sparse:
        sparse.truncate(10 * 2**30)
    tracemalloc.start()
    with pytest.raises(TraceError, match="is longer than 16777216 bytes") as refusal:
        read_trace(file, fmt)
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()
    assert refusal.value.line == (1 if fmt else 1 + start.count(b"\n"))


def test_a_line_of_the_largest_size_is_read(tmp_path, monkeypatch):
    from kvfolio.simulation import lines

    monkeypatch.setattr(lines, "MAX_LINE", len(GOOD) + 1)
    file = write(tmp_path, f"{GOOD}\n{GOOD}\n")
    assert read_trace(file).num_requests == 2
    write(tmp_path, f"{GOOD}\n{GOOD} \n")
    with pytest.raises(TraceError, match=f"line 2: is longer than {len(GOOD) + 1} bytes"):
        read_trace(file)


def test_a_format_can_be_forced(tmp_path):
    file = write(tmp_path, AZURE)
    with pytest.raises(TraceError, match="line 1: num_prefill_tokens is missing in the header"):
        read_trace(file, "vidur")
    with pytest.raises(ValueError, match="trace_format must be one of azure, vidur"):
        read_trace(file, "csv")
    with pytest.raises(ValueError, match="tokens_per_hash_id must be at least 1, not 0"):
        read_trace(file, tokens_per_hash_id=0)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(TraceError, match="nowhere: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"is a folder without a \*\.json"):
        read_trace(tmp_path)
    write(tmp_path, json.dumps(SESSION), "a.json")
    write(tmp_path, json.dumps(SESSION | {"block_size": 32}), "b.json")
    with pytest.raises(TraceError, match=r"block_size must be the same in all files, not \[32, 64\]"):
        read_trace(tmp_path)
