"""kvfolio side by side with other managers, in one run.

    make bench-peers                                     # installs the peers into .venv-peers
    PYTHONPATH=benches python -m peers.run [--trace FILE] [--only decode,admission] [--markdown] [--into PAGE]

Peers that are not installed are left out. Figures are microseconds, and beside each peer's its ratio to
kvfolio's: above 1, kvfolio is faster.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from . import work
from .protocol import Peer

KINDS = [
    ("kvfolio_peer", "Kvfolio"),
    ("plain_peer", "PlainPython"),
    ("vllm_manager", "Vllm"),
    ("vllm_manager", "VllmXxhash"),
    ("transformers_cache", "Transformers"),
]
START = perf_counter()
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


class Row(NamedTuple):
    """One line of the table."""

    what: str
    figures: dict[str, float]
    kind: str = "time"  # or "rate": more is better; "share": no ratio


def installed() -> work.Peers:
    """The peers that can be imported."""
    kinds = []
    for module, name in KINDS:
        try:
            kinds.append(getattr(importlib.import_module(f".{module}", __package__), name))
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return kinds


def measure(kinds: work.Peers, only: set[str], trace: Path | None) -> list[Row]:
    """All rows, from what was chosen."""
    rows = []
    if "decode" in only:
        for count, rounds, steps in ((64, 7, 16), (256, 5, 16), (1024, 4, 8), (4096, 3, 4)):
            note(f"decode, {count} sequences")
            what = f"decode step, {count} sequences of ~1000 tokens"
            steady, first = work.decode(kinds, count, rounds, steps)
            rows.append(Row(what, steady))
            if count == 1024:
                rows.append(Row(f"the same, the first {work.WARM_UP} steps of those sequences", first))
    if "admission" in only:
        note("admission")
        fresh, cached, lists = work.admissions(kinds, 32_768, 5)
        rows.append(Row("cached prompt of 32,768 tokens, to its first arrays", cached))
        rows.append(Row("the same, as a Python list for all", lists))
        rows.append(Row("fresh prompt of 32,768 tokens, to its first arrays", fresh))
    if "forms" in only:
        note("forms")
        rows.append(Row("fork of a sequence of 1001 tokens", work.forks(kinds, 9)))
        rows.append(Row("truncation from 1000 tokens to 500", work.truncations(kinds, 3)))
        rows.append(Row("beam reordering, 16 prompts x 4 beams of ~1000 tokens", work.reorders(kinds, 20)))
    if "churn" in only:
        if trace is None or not trace.is_file():
            print(f"no trace at {trace}: churn is left out", file=sys.stderr)
        else:
            note("churn")
            rates, hits = work.churn(kinds, trace)
            rows.append(Row("requests a second over a chat trace (prompts of ~1500 tokens)", rates, "rate"))
            rows.append(Row("tokens of its prompts that were cached", hits, "share"))
    return rows


def note(what: str) -> None:
    """Progress, on the side."""
    print(f"{perf_counter() - START:6.1f} s  {what}", file=sys.stderr, flush=True)


def cell(row: Row, name: str, form: Callable[[str, str], str]) -> str:
    """A peer's figure and its ratio."""
    figure, own = row.figures.get(name), row.figures.get("kvfolio")
    if figure is None:
        return "-"
    if row.kind == "share":
        return f"{figure:.1%}"
    digits = 2 if figure < 10 else 1 if figure < 100 else 0
    text = f"{figure:,.{digits}f}"
    if name == "kvfolio" or own is None:
        return text
    ratio = figure / own if row.kind == "time" else own / figure
    return form(text, f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x")


def table(rows: list[Row], kinds: work.Peers) -> str:
    """For the eye."""
    names = [kind.name for kind in kinds]
    cells = [[row.what, *(cell(row, name, lambda a, b: f"{a} ({b})") for name in names)] for row in rows]
    lines = [["", *names], *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )


def markdown(rows: list[Row], kinds: work.Peers) -> str:
    """For the page."""
    names = [kind.name for kind in kinds]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = (cell(row, name, lambda a, b: f"{a} (**{b}**)") for name in names)
        lines.append(f"| {row.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(kinds: work.Peers) -> str:
    """What it ran on, and which versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    versions = [f"{kind.package} {kind.version()}" for kind in kinds if kind.package]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{model}, {os.cpu_count()} CPUs, load {load}; Python {sys.version.split()[0]}, "
        f"numpy {np.__version__}; {', '.join(versions)}; blocks of {work.BLOCK_SIZE} tokens"
    )


def replace_between_markers(page: Path, text: str) -> None:
    """Put the text between the page's two markers."""
    before, found, rest = page.read_text().partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        sys.exit(f"{page} must have the markers {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format, for the churn")
    parser.add_argument("--only", default="decode,admission,forms,churn", help="comma-separated")
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/benchmarks.md")
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="write that table between the page's markers"
    )
    arguments = parser.parse_args()
    kinds: list[type[Peer]] = installed()
    gc.freeze()  # what the peers' imports made is no garbage; looking through it takes longer than all else
    note("imported")
    about = machine(kinds)  # with the load before it began
    rows = measure(kinds, set(arguments.only.split(",")), arguments.trace)
    note("done")
    page = f"{about}. Microseconds.\n\n{markdown(rows, kinds)}"
    print(page if arguments.markdown else f"{about}; microseconds\n\n{table(rows, kinds)}")
    if arguments.into:
        replace_between_markers(arguments.into, page)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # some of the peers' libraries print pages about their own leaks at a normal exit
