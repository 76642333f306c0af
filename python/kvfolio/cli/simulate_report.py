"""What `kvfolio simulate` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvfolio.simulation import HitRates, Outcome, Percentiles, Report
from kvfolio.simulation.report import RunRecord
from kvfolio.sizing import format_bytes

from .tables import make_table, print_table

_BARS = "▁▂▃▄▅▆▇█"


def show(report: Report, console: Console) -> None:
    """Print a report: what was asked, what came out."""
    for line in _record(report.record):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report.hit_rates is not None:
        rates = report.hit_rates
        console.print(
            f"Hits per access: {rates.accesses:,} accesses to {rates.distinct:,} blocks of "
            f"{rates.tokens_per_block} tokens",
            highlight=False,
            soft_wrap=True,
        )
        print_table(console, _hit_rates(rates))
    if report.managers:
        for title, table in (
            ("Memory: mean shares while requests waited", _memory(report.managers)),
            ("The batch: requests in it while others waited", _batch(report.managers)),
            (
                "Time by the cost model: to the first token, and for each one after it",
                _times(report.managers),
            ),
        ):
            console.print(title)
            print_table(console, table)


def _record(record: RunRecord) -> list[str]:
    trace = record.trace
    lines = [
        f"kvfolio {record.kvfolio}, Python {record.python}, numpy {record.numpy}, {record.platform}",
        f"{trace.source} ({trace.format}, SHA-256 {trace.sha256[:16]}), {trace.requests:,} requests; "
        f"prompts of {_lengths(trace.prompt_lengths)}, outputs of {_lengths(trace.output_lengths)}",
    ]
    if record.workload is None or record.setup is None:
        return lines
    asked, setup = record.workload, record.setup
    model, cost = setup["model"], setup["cost"]
    answers = {True: f", {asked['beams']} beams each, turnover {asked['beam_turnover']:g}", False: ""}
    samples = f", {asked['samples']} samples each" if asked["samples"] > 1 else answers[asked["beams"] > 1]
    lines += [
        f"asked: {asked['requests']:,} requests of at most {asked['max_length']:,} tokens"
        f" ({asked['refused']:,} longer ones refused){samples}; arrivals: {asked['arrivals']};"
        f" at most {setup['max_sequences']} sequences and {setup['tokens_per_step']} tokens a step",
        f"{model['name']}: {format_bytes(model['kv_bytes_per_token'])} of KV a token in {model['kv_dtype']}; "
        f"{format_bytes(setup['kv_memory'])} for it, blocks of {setup['block_size']} tokens, "
        f"{setup['watermark']:.0%} of them kept free at admission, eviction {setup['eviction']}",
        f"a step takes {cost['step_time'] * 1e3:.3g} ms + {cost['token_time'] * 1e6:.3g} us a computed token"
        f" + {cost['kv_byte_time'] * 1e12:.3g} ps a byte of KV read ({cost['origin']})",
    ]
    return lines


def _lengths(found: Percentiles | None) -> str:
    if found is None:
        return "no length"
    return (
        f"{found.mean:,.0f} tokens (median {found.p50:,.0f}, 90% {found.p90:,.0f}, 99% {found.p99:,.0f}, "
        f"most {found.max:,.0f})"
    )


def _hit_rates(found: HitRates) -> Table:
    policies = list(found.rows[0].policies) if found.rows else []
    table = make_table("capacity, blocks", *policies, "MIN", left=1)
    for row in found.rows:
        rates = [f"{row.policies[policy]:.4f}" for policy in policies]
        table.add_row(f"{row.capacity:,}", *rates, f"{row.optimal:.4f}")
    table.add_row("infinite", *[f"{found.infinite:.4f}"] * (len(policies) + 1))
    return table


def _memory(managers: list[Outcome]) -> Table:
    columns = ("tokens", "reserved", "empty", "external", "cached", "free", "saved by sharing", "hit rate")
    table = make_table("manager", *columns, left=1)
    for outcome in managers:
        memory = outcome.memory
        shares = [memory[name] for name in ("tokens", "reserved", "empty", "external", "cached", "free")]
        table.add_row(
            outcome.manager,
            *(f"{share:.1%}" if outcome.steps else "-" for share in shares),
            f"{outcome.shared_share:.1%}",
            "-" if outcome.hit_rate is None else f"{outcome.hit_rate:.4f}",
        )
    return table


def _batch(managers: list[Outcome]) -> Table:
    columns = ("mean", "most", "over time", "waited", "steps", "gave way", "finished", "refused")
    table = make_table("manager", *columns, left=1)
    highest = max((point.running for outcome in managers for point in outcome.history), default=0)
    for outcome in managers:
        table.add_row(
            outcome.manager,
            f"{outcome.mean_running:.2f}",
            f"{outcome.max_running}",
            _line(outcome, highest),
            f"{outcome.loaded_share:.0%}",
            f"{outcome.steps:,}",
            f"{outcome.preemptions:,}",
            f"{outcome.finished:,}",
            f"{outcome.refused:,}",
        )
    return table


def _line(outcome: Outcome, highest: int, width: int = 16) -> str:
    """The running requests at so many moments, evenly spread from the first step to the last."""
    points = outcome.history
    if not points:
        return ""
    begin, end = points[0].time, points[-1].time
    line, at = "", 0
    for place in range(width):
        moment = begin + (end - begin) * place / (width - 1)
        while at + 1 < len(points) and points[at + 1].time <= moment:
            at += 1
        line += _BARS[points[at].running * (len(_BARS) - 1) // max(highest, 1)]
    return line


def _times(managers: list[Outcome]) -> Table:
    columns = ("s: median", "90%", "99%", "ms: median", "90%", "99%", "requests a second")
    table = make_table("manager", *columns, left=1)
    for outcome in managers:
        first, each = outcome.time_to_first_token, outcome.time_per_output_token
        table.add_row(
            outcome.manager,
            *_three(first, 1.0),
            *_three(each, 1e3),
            f"{outcome.requests_per_second:.3f}",
        )
    return table


def _three(found: Percentiles | None, factor: float) -> list[str]:
    if found is None:
        return ["-"] * 3
    return [f"{value * factor:,.2f}" for value in (found.p50, found.p90, found.p99)]
