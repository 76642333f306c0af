"""`kvfolio bench --block-sizes`: what a block size costs and brings, side by side."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvfolio as kv
from kvfolio import _arrays, _native
from kvfolio.simulation import Percentiles, Trace, read_trace
from kvfolio.simulation.block_sizes import (
    BLOCK_SIZES,
    BlockSizeFigures,
    block_size_figures,
    synthetic_lengths,
)

from . import measure
from .outcome import status_of, write_json
from .tables import make_console, make_table, print_table

WHY = (
    "No size is best by formula. Small blocks leave fewer slots empty and let more of a prefix be found; "
    "large ones have short tables, less bookkeeping and longer runs of memory for a kernel. "
    "How much each counts depends on lengths, on what prompts have in common, and on the machine."
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `kvfolio bench`, which see."""

    trace: str | None
    format: str | None
    sequences: int
    length: int
    attention_sequences: int
    attention_length: int
    dtype: str
    json: str | None


@dataclass(frozen=True)
class Measured:
    """Seconds a decode step, bytes a second in attention and in a plain read of the same memory."""

    decode_step: float
    attention: float
    plain_read: float


def run_bench(options: BenchOptions) -> int:
    """Measure, show, write; returns the exit status: 2 for anything that is refused."""
    errors = Console(stderr=True)
    return status_of(lambda: _bench(options, errors), errors, "measured")


def _bench(options: BenchOptions, errors: Console) -> None:
    _arrays.dtype_name("--dtype", options.dtype)
    trace = synthetic_lengths() if options.trace is None else read_trace(options.trace, options.format)
    figures = block_size_figures(trace)
    measured = [
        _measure(size, options)
        for size in track(
            BLOCK_SIZES, "block sizes", console=errors, transient=True, disable=not errors.is_terminal
        )
    ]
    _show(options, trace, figures, measured, make_console(stderr=options.json == "-"))
    if options.json is not None:
        write_json(_record(options, trace, figures, measured), options.json)


def _measure(size: int, options: BenchOptions) -> Measured:
    step = measure.decode_step_seconds(size, sequences=options.sequences, length=options.length)
    attention, read = measure.attention_bandwidth(
        size, sequences=options.attention_sequences, length=options.attention_length, dtype=options.dtype
    )
    return Measured(step, attention, read)


def _about(options: BenchOptions, trace: Trace) -> dict[str, Any]:
    return {
        "kvfolio": kv.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_capability": _native.cpu_capabilities(),
        "threads": kv.get_num_threads(),
        "trace": trace.source,
        "sha256": trace.digest,
        "requests": trace.num_requests,
        "tokens_per_hash_id": trace.tokens_per_hash_id,
        "options": asdict(options),
    }


def _record(
    options: BenchOptions, trace: Trace, figures: list[BlockSizeFigures], measured: list[Measured]
) -> dict[str, Any]:
    lengths = {
        "prompt_lengths": _by_name(Percentiles.of(trace.prompt_lengths)),
        "output_lengths": _by_name(Percentiles.of(trace.output_lengths)),
    }
    rows = [{**asdict(row), **asdict(times)} for row, times in zip(figures, measured, strict=True)]
    return {"record": {**_about(options, trace), **lengths}, "block_sizes": rows}


def _by_name(found: Percentiles | None) -> dict[str, float] | None:
    return None if found is None else asdict(found)


def _show(
    options: BenchOptions,
    trace: Trace,
    figures: list[BlockSizeFigures],
    measured: list[Measured],
    console: Console,
) -> None:
    about = _about(options, trace)
    digest = f", SHA-256 {trace.digest[:16]}" if trace.digest else ""
    size = 2 * options.attention_sequences * options.attention_length * measure.NUM_KV_HEADS
    size *= measure.HEAD_DIM * _arrays.ITEM_SIZES[options.dtype]
    for line in (
        f"kvfolio {about['kvfolio']}, Python {about['python']}, numpy {about['numpy']}, {about['platform']}, "
        f"{about['threads']} threads",
        f"empty slots, table, hits: {trace.source}{digest}, {trace.num_requests:,} requests",
        f"step: bookkeeping of a decode step, from Python: {options.sequences} sequences of "
        f"{options.length:,} tokens",
        f"attention: decode, {options.attention_sequences} sequences of {options.attention_length:,} tokens, "
        f"{measure.NUM_HEADS} query and {measure.NUM_KV_HEADS} KV heads of {measure.HEAD_DIM}, "
        f"{options.dtype}, {size / 2**20:,.0f} MiB of K and V",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_table(console, _table(trace, figures, measured))
    console.print(_about_hits(trace), highlight=False, soft_wrap=True)
    console.print(WHY, highlight=False, soft_wrap=True)


def _table(trace: Trace, figures: list[BlockSizeFigures], measured: list[Measured]) -> Table:
    columns = ["block size", "empty slots", "table, bytes", "step, us", "attention, GB/s", "of a plain read"]
    if trace.hash_ids is not None:
        columns += ["found, at least", "found, at most"]
    table = make_table(*columns)
    for row, times in zip(figures, measured, strict=True):
        cells = [
            str(row.block_size),
            f"{row.empty_share:.2%}",
            f"{row.table_bytes:,.0f}",
            f"{times.decode_step * 1e6:.1f}",
            f"{times.attention / 1e9:.1f}",
            f"{times.attention / times.plain_read:.0%}",
        ]
        if row.hits_at_least is not None and row.hits_at_most is not None:
            cells += [f"{row.hits_at_least:.4f}", f"{row.hits_at_most:.4f}"]
        table.add_row(*cells)
    return table


def _about_hits(trace: Trace) -> str:
    if trace.hash_ids is None:
        return "What a prefix cache finds cannot be told: these requests have no hash ids."
    return (
        "Found: prompt tokens, of all, by a cache that evicts nothing. An id stands for "
        f"{trace.tokens_per_hash_id} tokens; where prompts part, the trace does not tell how many of the "
        "next id's they still have in common: none is at least, all but one at most."
    )
