"""`kvfolio simulate`: the face of `kvfolio.simulation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvfolio.simulation import (
    DEVICES,
    OPT_13B,
    CostModel,
    Report,
    ServedModel,
    Setup,
    compare,
    hit_rates,
    make_record,
    make_workload,
    read_trace,
)
from kvfolio.simulation.plots import check_plot, plot
from kvfolio.sizing import parse_bytes, read_config

from .outcome import status_of, write_json
from .plan import parse_counts
from .simulate_report import show
from .tables import make_console

DEFAULT_KV_MEMORY = "12GiB"  # what the PagedAttention paper has for its smallest model on a device of 40 GB


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of `kvfolio simulate`, which see."""

    trace: str
    format: str | None
    tokens_per_hash_id: int
    requests: int | None
    capacities: str | None
    managers: str | None
    kv_memory: str | None
    model: str | None
    kv_dtype: str | None
    block_size: int
    max_length: int | None
    max_sequences: int
    tokens_per_step: int
    samples: int
    beams: int
    beam_turnover: float
    eviction: str
    watermark: float
    rate: float | None
    seed: int
    device: str
    efficiency: float
    step_time: float | None
    token_time: float | None
    kv_byte_time: float | None
    json: str | None
    plot: str | None


def run_simulate(options: SimulateOptions) -> int:
    """Read, simulate, show, write; returns the exit status: 2 for anything that is refused."""
    errors = Console(stderr=True)
    return status_of(lambda: _report(options, errors), errors, "simulated")


def _report(options: SimulateOptions, errors: Console) -> None:
    if options.plot is not None:
        check_plot(Path(options.plot))
    report = _simulate(options, errors)
    show(report, make_console(stderr=options.json == "-"))
    if options.json is not None:
        write_json(report.to_json(), options.json)
    if options.plot is not None:
        plot(report, Path(options.plot))


def _simulate(options: SimulateOptions, console: Console) -> Report:
    trace = read_trace(options.trace, options.format, tokens_per_hash_id=options.tokens_per_hash_id)
    if options.requests is not None:
        trace = trace.head(options.requests)
    # What is asked for is done; of nothing is, what the trace is best for.
    wants_rates = options.capacities is not None
    wants_managers = options.managers is not None or options.kv_memory is not None
    if not wants_rates and not wants_managers:
        wants_rates = trace.hash_ids is not None
        wants_managers = not wants_rates
    with _progress(console) as bars:

        def progress(what: str, total: int) -> Callable[[int], object]:
            task = bars.add_task(what, total=total)
            return lambda done: bars.advance(task, done)

        rates = None
        if wants_rates:
            rates = hit_rates(trace, parse_counts("--capacities", options.capacities), progress=progress)
        if not wants_managers:
            return Report(make_record(trace), rates, [])
        model = _model(options)
        workload = make_workload(
            trace,
            max_length=model.max_length if options.max_length is None else options.max_length,
            rate=options.rate,
            samples=options.samples,
            beams=options.beams,
            beam_turnover=options.beam_turnover,
            seed=options.seed,
        )
        setup = _setup(options, model)
        managers = None if options.managers is None else options.managers.split(",")
        outcomes = compare(workload, setup, managers, progress=progress)
        return Report(make_record(trace, workload, setup), rates, outcomes)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _model(options: SimulateOptions) -> ServedModel:
    if options.model is None:
        if options.kv_dtype is not None:
            raise ValueError("--kv-dtype needs --model: the default one is simulated in float16")
        return OPT_13B
    config = read_config(options.model)
    return ServedModel.from_config(config.values, config.source, options.kv_dtype)


def _setup(options: SimulateOptions, model: ServedModel) -> Setup:
    if options.device not in DEVICES:
        raise ValueError(f"--device must be one of {', '.join(DEVICES)}, not {options.device!r}")
    return Setup(
        model=model,
        cost=CostModel.derive(
            model,
            DEVICES[options.device],
            options.efficiency,
            step_time=options.step_time,
            token_time=options.token_time,
            kv_byte_time=options.kv_byte_time,
        ),
        kv_memory=parse_bytes("--kv-memory", options.kv_memory or DEFAULT_KV_MEMORY),
        block_size=options.block_size,
        max_sequences=options.max_sequences,
        tokens_per_step=options.tokens_per_step,
        eviction=options.eviction,
        watermark=options.watermark,
    )
