"""The demo's account: one record, written as tables or as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import kvfolio
from kvfolio.serving import Comparison, Distribution, Engine, EngineStats, Request, RequestFigures

from .demo_prompts import PROMPTS

PACKAGES = ("torch", "transformers", "gguf", "numpy")


@dataclass(frozen=True)
class RequestLine:
    """One request of the demo.

    `equals_generate`: "yes", "no", "tie" (up to a near tie of the reference), "sampled" or "not compared".
    `differs_at`: the first token of a difference or a tie.
    """

    question: str
    samples: int
    answers: list[str]
    output_tokens: list[int]
    finish_reasons: list[str]
    figures: RequestFigures
    equals_generate: str
    differs_at: int | None


@dataclass(frozen=True)
class RunRecord:
    """What one must know to read the figures. Lengths are tokens."""

    versions: dict[str, str]
    platform: str
    model: str
    dtype: str
    device: str
    threads: int
    block_size: int
    num_blocks: int
    max_sequences: int
    max_tokens_per_step: int
    max_tokens_per_sequence: int
    run_ahead: int
    speculation: str | None  # the drafter
    prompt_lengths: Distribution
    answer_lengths: Distribution
    peak_concurrency: int


@dataclass(frozen=True)
class Report:
    """The whole account. `greedy_equal` includes the near ties."""

    requests: list[RequestLine]
    answers: int
    prompt_tokens: int
    cached_tokens: int
    recovered_tokens: int
    time_to_first_token: Distribution
    time_per_output_token: Distribution | None  # None: no answer has two tokens
    greedy_compared: int
    greedy_equal: int
    near_ties: int
    stats: EngineStats
    record: RunRecord

    def to_json(self) -> str:
        """Everything, by the names of the fields."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def make_report(
    engine: Engine, requests: list[Request], comparisons: dict[int, Comparison], *, model: str
) -> Report:
    """Read the engine and its requests; `comparisons` are by request id, `model` says what was served."""
    figures = [request.figures for request in requests]
    answers = [answer for request in requests for answer in request.answers]
    first = [figure.time_to_first_token for figure in figures if figure.time_to_first_token is not None]
    paces = [answer.time_per_output_token for answer in answers if answer.time_per_output_token is not None]
    layout = engine.model.layout
    return Report(
        requests=[_line(request, comparisons.get(request.id)) for request in requests],
        answers=len(answers),
        prompt_tokens=sum(figure.prompt_tokens for figure in figures),
        cached_tokens=sum(figure.cached_tokens for figure in figures),
        recovered_tokens=sum(figure.recovered_tokens for figure in figures),
        time_to_first_token=Distribution.of(first),
        time_per_output_token=Distribution.of(paces) if paces else None,
        greedy_compared=len(comparisons),
        greedy_equal=sum(comparison.agrees for comparison in comparisons.values()),
        near_ties=sum(comparison.tie_at is not None for comparison in comparisons.values()),
        stats=engine.stats(),
        record=RunRecord(
            versions={
                "kvfolio": kvfolio.__version__,
                "python": platform.python_version(),
                **{name: _version(name) for name in PACKAGES},
            },
            platform=f"{platform.platform()}, {os.cpu_count()} CPUs",
            model=model,
            dtype=str(layout.dtype).removeprefix("torch."),
            device=str(layout.device),
            threads=torch.get_num_threads(),
            block_size=engine.pool.block_size,
            num_blocks=engine.pool.num_blocks,
            max_sequences=engine.max_sequences,
            max_tokens_per_step=engine.max_tokens_per_step,
            max_tokens_per_sequence=engine.max_tokens_per_sequence,
            run_ahead=engine.run_ahead,
            speculation=None if engine.speculation is None else repr(engine.speculation),
            prompt_lengths=Distribution.of(figure.prompt_tokens for figure in figures),
            answer_lengths=Distribution.of(len(answer.token_ids) for answer in answers),
            peak_concurrency=engine.stats().peak_running,
        ),
    )


def _line(request: Request, comparison: Comparison | None) -> RequestLine:
    if comparison is None:
        equals, differs_at = "not compared" if request.params.is_greedy else "sampled", None
    elif comparison.tie_at is not None:
        equals, differs_at = "tie", comparison.tie_at
    else:
        equals, differs_at = "yes" if comparison.agrees else "no", comparison.differs_at
    return RequestLine(
        question=PROMPTS[request.id].question,
        samples=request.params.n,
        answers=[answer.text for answer in request.answers],
        output_tokens=[len(answer.token_ids) for answer in request.answers],
        finish_reasons=[str(answer.finish_reason) for answer in request.answers],
        figures=request.figures,
        equals_generate=equals,
        differs_at=differs_at,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def show(report: Report, console: Console) -> None:
    """Print the report as tables."""
    console.print(_request_table(report, console.width))
    console.print(_pairs("Totals", _totals(report)))
    console.print(_pairs("Run record", _record(report.record)))


def _request_table(report: Report, width: int) -> Table:
    table = Table(title="Requests, lengths in tokens", title_justify="left", box=box.SIMPLE_HEAD)
    table.show_edge, table.padding = False, 0  # 80 columns are enough then, and only questions are cut
    table.add_column("", no_wrap=True, overflow="ellipsis", width=min(48, max(12, width - 64)))
    for name in ("n", "prompt", "cached", "answer", "preempted", "first", "per tok", "generate"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in report.requests:
        figures = line.figures
        table.add_row(
            line.question,
            str(line.samples),
            str(figures.prompt_tokens),
            str(figures.cached_tokens),
            str(figures.output_tokens),
            str(figures.preemptions),
            _seconds(figures.time_to_first_token),
            _seconds(figures.time_per_output_token),
            line.equals_generate
            if line.differs_at is None
            else f"{line.equals_generate} at {line.differs_at}",
        )
    return table


def _totals(report: Report) -> list[tuple[str, str]]:
    stats, record = report.stats, report.record
    cached_share = report.cached_tokens / report.prompt_tokens
    if report.greedy_compared:
        equal = f"{report.greedy_equal} of {report.greedy_compared} (near ties: {report.near_ties})"
    else:
        equal = "not compared"
    return [
        ("requests, answers", f"{len(report.requests)}, {report.answers}"),
        ("prompt tokens", str(report.prompt_tokens)),
        ("cached tokens", f"{report.cached_tokens} ({cached_share:.1%} of the prompts)"),
        ("found again after preemption", f"{report.recovered_tokens} tokens"),
        ("blocks, peak", f"{stats.peak_blocks} of {record.num_blocks}"),
        ("blocks, mean of the steps", f"{stats.mean_blocks:.1f}"),
        ("empty slots", f"{stats.empty_share:.1%} of the held slots"),
        (
            "reserved at maximum length",
            f"{stats.mean_reserved_blocks:.1f} blocks in the mean, {stats.peak_reserved_blocks} at the peak",
        ),
        ("copies, merges", f"{stats.pool['copies']}, {stats.pool['merges']}"),
        ("preemptions", str(stats.preemptions)),
        (
            "steps",
            f"{stats.steps}, {stats.computed_tokens} tokens computed; {stats.tokens_per_step:.2f} came "
            "out of each",
        ),
        ("steps in flight", f"up to {record.run_ahead} ahead, {stats.wasted_slots} slots wasted"),
        ("drafts", _drafts(stats, record)),
        ("time to first token", _spread(report.time_to_first_token)),
        ("time per output token", _spread(report.time_per_output_token)),
        (
            "throughput",
            f"{stats.throughput:.1f} output tokens/s ({stats.output_tokens} in {stats.busy_time:.1f} s)",
        ),
        ("greedy answers equal to generate", equal),
    ]


def _drafts(stats: EngineStats, record: RunRecord) -> str:
    if record.speculation is None:
        return "none"
    return (
        f"{stats.accepted_tokens} of {stats.drafted_tokens} accepted ({stats.acceptance_rate:.1%}), "
        f"by {record.speculation}"
    )


def _record(record: RunRecord) -> list[tuple[str, str]]:
    return [
        ("versions", ", ".join(f"{name} {number}" for name, number in record.versions.items())),
        ("platform", record.platform),
        ("model", record.model),
        ("dtype, device, threads", f"{record.dtype}, {record.device}, {record.threads}"),
        ("pool", f"{record.num_blocks} blocks of {record.block_size} tokens"),
        ("prompt lengths", _lengths(record.prompt_lengths)),
        ("answer lengths", _lengths(record.answer_lengths)),
        (
            "concurrency",
            f"at most {record.max_sequences} sequences and {record.max_tokens_per_step} tokens a step; "
            f"{record.peak_concurrency} sequences at the peak",
        ),
    ]


def _pairs(title: str, pairs: list[tuple[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in pairs:
        table.add_row(name, value)
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _spread(values: Distribution | None) -> str:
    if values is None:
        return "-"
    return ", ".join(f"{name} {_seconds(getattr(values, name))}" for name in ("mean", "p50", "p95", "max"))


def _lengths(values: Distribution) -> str:
    return ", ".join(f"{name} {getattr(values, name):.4g}" for name in ("min", "mean", "p50", "p95", "max"))
