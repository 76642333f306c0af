"""Simulation: what a manager of the KV cache would bring on a trace of requests.

Two questions::

    read_trace -> hit_rates                          what a prefix cache finds, by policy and capacity
    read_trace -> make_workload -> compare           reserving and paging, in the same memory

The page docs/simulation.md tells how the figures come about.
"""

from .comparison import MANAGERS, Setup, compare
from .cost import DEVICES, OPT_13B, CostModel, Device, ServedModel
from .errors import TraceError
from .formats import FORMATS, read_trace
from .hit_rates import CAPACITIES, HitRateRow, HitRates, hit_rates
from .loop import Outcome, serve
from .percentiles import Percentiles
from .replay import EVICTION_POLICIES, replay
from .report import Report, RunRecord, TraceRecord, make_record
from .trace import Trace
from .workload import Workload, make_workload

__all__ = [
    "CAPACITIES",
    "DEVICES",
    "EVICTION_POLICIES",
    "FORMATS",
    "MANAGERS",
    "OPT_13B",
    "CostModel",
    "Device",
    "HitRateRow",
    "HitRates",
    "Outcome",
    "Percentiles",
    "Report",
    "RunRecord",
    "ServedModel",
    "Setup",
    "Trace",
    "TraceError",
    "TraceRecord",
    "Workload",
    "compare",
    "hit_rates",
    "make_record",
    "make_workload",
    "read_trace",
    "replay",
    "serve",
]
