"""Traces and workloads written by hand, for the tests of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfolio.simulation import CostModel, Outcome, Trace, Workload, make_workload, serve
from kvfolio.simulation.manager import Manager
from kvfolio.simulation.paging import PagingManager
from kvfolio.simulation.trace import TraceBuilder

SHARED = Path(__file__).parents[3] / "shared" / "traces"
CONVERSATION = SHARED / "mooncake_conversation_trace.jsonl"
A_SECOND_A_STEP = CostModel(step_time=1.0, token_time=0.0, kv_byte_time=0.0)


def trace_of(
    lengths: Sequence[tuple[int, int]],
    ids: Sequence[Sequence[int]] | None = None,
    tokens_per_hash_id: int = 4,
    arrivals: Sequence[float] | None = None,
) -> Trace:
    """A trace of prompt and output lengths."""
    builder = TraceBuilder()
    for number, (prompt, output) in enumerate(lengths):
        arrival = None if arrivals is None else arrivals[number]
        builder.add(arrival, prompt, output, () if ids is None else ids[number])
    return builder.build("by hand", "by hand", "", 0 if ids is None else tokens_per_hash_id)


def workload_of(lengths: Sequence[tuple[int, int]], **options: Any) -> Workload:
    """A workload of prompt and output lengths, all at once."""
    return make_workload(trace_of(lengths), **options)


def run(workload: Workload, manager: Manager, **options: Any) -> Outcome:
    """Serve it with steps of one second each, unless told otherwise."""
    options = {"cost": A_SECOND_A_STEP, "kv_bytes_per_token": 1, "max_sequences": 8} | options
    return serve(workload, manager, **{"tokens_per_step": 64, **options})


def paging(workload: Workload, num_blocks: int, block_size: int, **options: Any) -> PagingManager:
    return PagingManager(workload, num_blocks, block_size, **{"max_sequences": 8, "watermark": 0.0} | options)


def shares(outcome: Outcome, slots: int, steps: int) -> dict[str, int]:
    """Slots summed up over the steps."""
    return {name: round(share * slots * steps, 6) for name, share in outcome.memory.items()}
