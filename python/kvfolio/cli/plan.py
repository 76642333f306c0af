"""`kvfolio plan`: the face of `kvfolio.sizing`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvfolio.errors import KVFolioError
from kvfolio.sizing import (
    Deployment,
    ModelShape,
    SizingPlan,
    Stage,
    format_bytes,
    parse_bytes,
    plan,
    read_config,
)

from .tables import make_console, make_table, print_table


def parse_sizes(option: str, text: str | None) -> list[int] | int | None:
    """Bytes for all ranks, or a list of them, one a stage, from text with commas between."""
    if text is None:
        return None
    sizes = [parse_bytes(option, part) for part in text.split(",")]
    return sizes[0] if len(sizes) == 1 else sizes


def parse_counts(option: str, text: str | None) -> list[int] | None:
    """Integers from text with commas between."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be integers with commas between, not {text!r}") from None


def run_plan(model: str, lengths: str, *, as_json: bool, sizes: dict[str, str | None], **options: Any) -> int:
    """Read, compute, show; returns the exit status: 1 for anything that is refused."""
    console = make_console(stderr=as_json)
    try:
        given = [
            name for name in ("--memory", "--kv-memory") if sizes[name[2:].replace("-", "_")] is not None
        ]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of --memory and --kv-memory must be given, as --memory 80GiB, "
                f"not {len(given)} of them"
            )
        deployment = Deployment(
            memory=parse_sizes("--memory", sizes["memory"]),
            kv_memory=parse_sizes("--kv-memory", sizes["kv_memory"]),
            weights=_one("--weights", sizes["weights"]),
            activations=_one("--activations", sizes["activations"]),
            layers_per_stage=parse_counts("--layers-per-stage", sizes["layers_per_stage"]),
            **options,
        )
        config = read_config(model)
        shape = ModelShape.from_config(config.values, config.source)
        counts = parse_counts("--lengths", lengths) or []
        found = plan(shape, deployment, counts, weight_bytes=config.weight_bytes)
    except (KVFolioError, ValueError, TypeError) as error:
        console.print(f"[red]It cannot be planned:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    if as_json:
        sys.stdout.write(json.dumps(to_record(found), indent=2) + "\n")
    else:
        show(found, console)
    return 0


def _one(option: str, text: str | None) -> int | None:
    return None if text is None else parse_bytes(option, text)


def to_record(found: SizingPlan) -> dict[str, Any]:
    """The plan as JSON holds it, by name; a stage's layers are the first and the one after the last."""
    record = asdict(found)
    for stage in record["stages"]:
        stage["layers"] = [stage["layers"].start, stage["layers"].stop]
    return record


def show(found: SizingPlan, console: Console) -> None:
    """Print the plan as tables."""
    console.print(_summary(found), soft_wrap=True)
    for table in (_groups(found), _stages(found), _lengths(found), _block_sizes(found)):
        print_table(console, table)
    for note in found.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)


def _summary(found: SizingPlan) -> str:
    scales = "" if found.scales == "none" else f", scales {found.scales}"
    ranks = f"{_count(len(found.stages), 'stage')} of {_count(found.tensor_parallel, 'rank')}"
    replicas = f"; the same KV on {found.replicas} ranks" if found.replicas > 1 else ""
    return escape(f"{found.source} ({found.model}): KV in {found.kv_dtype}{scales}; {ranks}{replicas}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _groups(found: SizingPlan) -> Table:
    columns = [f"stage {number}" for number in range(len(found.stages))]
    table = make_table(
        "layers", "keep", "block", *columns, title="KV bytes a token and a block, on each rank"
    )
    for group in found.groups:
        keep = "all tokens" if group.window is None else f"{group.window} tokens"
        each = [
            f"{token:,} / {block:,}"
            for token, block in zip(group.bytes_per_token, group.bytes_per_block, strict=True)
        ]
        table.add_row(str(group.num_layers), keep, f"{group.block_size} tokens", *each)
    if any(stage.state_bytes for stage in found.stages):
        states = [f"{stage.state_bytes:,} a sequence" for stage in found.stages]
        table.add_row("", "a state (estimated)", "", *states)
    return table


def _stages(found: SizingPlan) -> Table:
    table = make_table(
        "stage", "layers", "weights", "activations", "scales", "for the KV", title="Memory of each rank"
    )
    for number, stage in enumerate(found.stages):
        layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
        weights, activations = _reserve(stage)
        scales = format_bytes(stage.scale_bytes)
        table.add_row(str(number), layers, weights, activations, scales, format_bytes(stage.kv_bytes))
    return table


def _reserve(stage: Stage) -> tuple[str, str]:
    reserve = stage.reserve
    if reserve is None:
        return "unknown", "unknown"
    return (
        f"{format_bytes(reserve.weights)} ({reserve.weights_origin})",
        f"{format_bytes(reserve.activations)} ({reserve.activations_origin})",
    )


def _lengths(found: SizingPlan) -> Table:
    table = make_table(
        "length", "sequences", "tightest", "bytes each", "blocks each", "blocks to make", "tables (device)",
        "pool (host)", title="Sequences at once, all of one length, nothing shared",
    )  # fmt: skip
    for row in found.lengths:
        sequences = f"{row.sequences:,}" if row.sequences else f"0, short by {format_bytes(row.short_by)}"
        table.add_row(
            f"{row.length:,}",
            sequences,
            f"stage {row.tightest_stage}",
            format_bytes(row.bytes_per_sequence[row.tightest_stage]),
            " + ".join(f"{count:,}" for count in row.blocks_per_sequence),
            " + ".join(f"{count:,}" for count in row.num_blocks),
            format_bytes(row.table_bytes),
            format_bytes(row.bookkeeping_bytes),
        )
    return table


def _block_sizes(found: SizingPlan) -> Table:
    lengths = [f"{row.length:,}" for row in found.lengths]
    table = make_table(
        "block size", "bytes a block", "empty slots", *lengths, "pool (host)",
        title="Other block sizes: empty slots (expected), their share and the sequences at each length",
    )  # fmt: skip
    for row in found.block_sizes:
        each = [
            f"{share:.2%}, {count:,}" for share, count in zip(row.empty_share, row.sequences, strict=True)
        ]
        table.add_row(
            str(row.block_size),
            format_bytes(row.bytes_per_block),
            f"{row.empty_slots:g}",
            *each,
            format_bytes(row.bookkeeping_bytes),
        )
    return table
