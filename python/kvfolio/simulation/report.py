"""A simulation's results together with all that they depend on."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import kvfolio

from .comparison import Setup
from .hit_rates import HitRates
from .loop import Outcome
from .percentiles import Percentiles
from .trace import Trace
from .workload import Workload


@dataclass(frozen=True)
class TraceRecord:
    """Which requests they were; `sha256` is that of the file, and `requests` of it those that were taken."""

    source: str
    format: str
    sha256: str
    requests: int
    prompt_lengths: Percentiles | None
    output_lengths: Percentiles | None
    seconds: float | None
    hash_ids: int
    tokens_per_hash_id: int

    @classmethod
    def of(cls, trace: Trace) -> TraceRecord:
        """The record of a trace."""
        return cls(
            source=trace.source,
            format=trace.format,
            sha256=trace.digest,
            requests=trace.num_requests,
            prompt_lengths=Percentiles.of(trace.prompt_lengths),
            output_lengths=Percentiles.of(trace.output_lengths),
            seconds=None if trace.arrivals is None else float(trace.arrivals[-1]),
            hash_ids=0 if trace.hash_ids is None else len(trace.hash_ids),
            tokens_per_hash_id=trace.tokens_per_hash_id,
        )


@dataclass(frozen=True)
class RunRecord:
    """What has to be known to have the same figures again.

    `workload` and `setup` are the arguments of `make_workload` and `Setup`, as they came out; None where no
    managers were compared.
    """

    kvfolio: str
    python: str
    numpy: str
    platform: str
    trace: TraceRecord
    workload: dict[str, Any] | None
    setup: dict[str, Any] | None


@dataclass(frozen=True)
class Report:
    """The record, the hit rates (None without hash ids) and one outcome a manager."""

    record: RunRecord
    hit_rates: HitRates | None
    managers: list[Outcome]

    def to_json(self) -> dict[str, Any]:
        """What JSON holds, by name."""
        return asdict(self)


def make_record(trace: Trace, workload: Workload | None = None, setup: Setup | None = None) -> RunRecord:
    """The record of a run on this machine."""
    asked = None
    if workload is not None:
        asked = {
            "requests": workload.num_requests,
            "refused": workload.refused,
            "max_length": workload.max_length,
            "arrivals": workload.arrival_origin,
            "samples": 1 if workload.beams else workload.width,
            "beams": workload.width if workload.beams else 1,
            "beam_turnover": workload.beam_turnover,
            "seed": workload.seed,
        }
    return RunRecord(
        kvfolio=kvfolio.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        platform=f"{platform.system()} {platform.machine()}",
        trace=TraceRecord.of(trace),
        workload=asked,
        setup=None if setup is None else asdict(setup),
    )
