"""The formats of traces, and the reader that tells them apart by what is in them.

==============  ==========================================================================================
azure           CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure's LLM inference traces)
vidur           CSV with num_prefill_tokens and num_decode_tokens (Vidur's lengths; no times)
mooncake        a JSON object a line: timestamp (ms), input_length, output_length, hash_ids
agent-sessions  a JSON document: block_size, requests of t (s), in, out, hash_ids; or a folder of such
==============  ==========================================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfolio import _checks

from .errors import TraceError
from .fields import Place, parse_object, shown
from .lines import Lines
from .trace import Trace, TraceBuilder, merge

MOONCAKE_TOKENS_PER_HASH_ID = 512


def read_trace(
    path: str | Path,
    trace_format: str | None = None,
    *,
    tokens_per_hash_id: int = MOONCAKE_TOKENS_PER_HASH_ID,
) -> Trace:
    """Read a trace of requests.

    Memory is bounded by the number of requests and ids: no line of more than 16 MiB is read.

    Parameters
    ----------
    path : str or Path
        A file; a folder is taken for one of agent sessions, whose ids are their own.
    trace_format : str, optional
        One of `FORMATS`; by default what the content looks like.
    tokens_per_hash_id : int
        Tokens that an id of a mooncake trace stands for; agent sessions say it themselves.

    Raises
    ------
    TraceError
        There is no such file, or something in it is not what it must be.
    ValueError, TypeError
        An argument is wrong in itself.
    """
    if trace_format is not None and trace_format not in FORMATS:
        raise ValueError(f"trace_format must be one of {', '.join(FORMATS)}, not {trace_format!r}")
    tokens = _checks.integer("tokens_per_hash_id", tokens_per_hash_id, 1)
    path = Path(path)
    try:
        if path.is_dir():
            return _read_folder(path, trace_format, tokens)
        return _read_file(path, trace_format, tokens)
    except OSError as error:
        raise TraceError(str(path), None, None, f"cannot be read: {error.strerror or error}") from error


def _read_folder(path: Path, trace_format: str | None, tokens: int) -> Trace:
    files = sorted(path.glob("*.json"))
    if not files:
        raise TraceError(str(path), None, None, "is a folder without a *.json")
    traces = [_read_file(file, trace_format or "agent-sessions", tokens) for file in files]
    sizes = {trace.tokens_per_hash_id for trace in traces}
    if len(sizes) > 1:
        raise TraceError(str(path), None, "block_size", f"must be the same in all files, not {sorted(sizes)}")
    digest = hashlib.sha256("".join(trace.digest for trace in traces).encode()).hexdigest()
    return merge(str(path), traces, digest)


def _read_file(path: Path, trace_format: str | None, tokens: int) -> Trace:
    with path.open("rb") as file:
        lines = Lines(file, str(path))
        trace_format = trace_format or _recognise(lines)
        lines.peek()
        builder = TraceBuilder()
        tokens = _READERS[trace_format](lines, builder, tokens)
        if not builder.prompts:
            raise TraceError(str(path), None, None, "has no request")
        return builder.build(str(path), trace_format, lines.digest.hexdigest(), tokens)


def _recognise(lines: Lines) -> str:
    number, text = lines.peek()
    if text.lstrip().startswith("{"):
        whole_on_a_line = '"hash_ids"' in text and '"requests"' not in text
        return "mooncake" if whole_on_a_line or '"input_length"' in text else "agent-sessions"
    columns = _columns(text)
    for name, wanted in _COLUMNS.items():
        if set(wanted) & set(columns):
            return name
    raise TraceError(
        lines.source, number, None, f"is of no known format ({', '.join(FORMATS)}): {shown(text.strip())}"
    )


def _columns(header: str) -> list[str]:
    return [name.strip() for name in header.split(",")]


_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "vidur": ("num_prefill_tokens", "num_decode_tokens"),
}


def _read_azure(lines: Lines, builder: TraceBuilder, _tokens: int) -> int:
    last = float("-inf")
    for place, (time, prompt, output) in _rows(lines, _COLUMNS["azure"]):
        arrival = place.parsed_time("TIMESTAMP", time)
        place.not_before("TIMESTAMP", arrival, last)
        last = arrival
        builder.add(
            arrival,
            place.parsed_length("ContextTokens", prompt, 1),
            place.parsed_length("GeneratedTokens", output, 0),
        )
    return 0


def _read_vidur(lines: Lines, builder: TraceBuilder, _tokens: int) -> int:
    for place, (prompt, output) in _rows(lines, _COLUMNS["vidur"]):
        builder.add(
            None,
            place.parsed_length("num_prefill_tokens", prompt, 1),
            place.parsed_length("num_decode_tokens", output, 0),
        )
    return 0


def _rows(lines: Lines, wanted: tuple[str, ...]) -> Iterator[tuple[Place, list[str]]]:
    """The wanted columns of each row of a CSV without quotes."""
    number, header = next(lines)
    columns = _columns(header)
    for name in wanted:
        if columns.count(name) != 1:
            problem = "is missing in the header" if name not in columns else "is twice in the header"
            Place(lines.source, number).refuse(name, problem)
    places = [columns.index(name) for name in wanted]
    for number, text in lines:
        place, values = Place(lines.source, number), text.split(",")
        if len(values) < len(columns):
            place.refuse(columns[len(values)], f"is missing: there are {len(columns)} columns")
        if len(values) > len(columns):
            raise TraceError(
                lines.source, number, None, f"has {len(values)} values, and there are {len(columns)} columns"
            )
        yield place, [values[at].strip() for at in places]


def _read_mooncake(lines: Lines, builder: TraceBuilder, tokens: int) -> int:
    last = 0.0
    for number, text in lines:
        record, place = parse_object(lines.source, number, text), Place(lines.source, number)
        arrival = place.time("timestamp", place.get(record, "timestamp")) / 1000
        place.not_before("timestamp", arrival, last)
        last = arrival
        builder.add(
            arrival,
            place.length("input_length", place.get(record, "input_length"), 1),
            place.length("output_length", place.get(record, "output_length"), 0),
            place.ids("hash_ids", place.get(record, "hash_ids")),
        )
    return tokens


def _read_agent_sessions(lines: Lines, builder: TraceBuilder, _tokens: int) -> int:
    number, text = lines.rest()
    document, place = parse_object(lines.source, number, text), Place(lines.source, number)
    tokens = place.length("block_size", place.get(document, "block_size"), 1)
    requests = place.get(document, "requests")
    if not isinstance(requests, list):
        place.refuse("requests", f"must be a list, not {shown(requests)}")
    last = 0.0
    for index, request in enumerate(requests):
        if not isinstance(request, dict):
            place.refuse(f"requests[{index}]", f"must be an object, not {shown(request)}")
        inner = Place(lines.source, number, f"requests[{index}].")
        arrival = inner.time("t", inner.get(request, "t"))
        inner.not_before("t", arrival, last)
        last = arrival
        builder.add(
            arrival,
            inner.length("in", inner.get(request, "in"), 1),
            inner.length("out", inner.get(request, "out"), 0),
            inner.ids("hash_ids", inner.get(request, "hash_ids")),
        )
    return tokens


_READERS: dict[str, Callable[[Lines, TraceBuilder, int], int]] = {
    "azure": _read_azure,
    "vidur": _read_vidur,
    "mooncake": _read_mooncake,
    "agent-sessions": _read_agent_sessions,
}
FORMATS = tuple(_READERS)
"""The names of the formats."""
