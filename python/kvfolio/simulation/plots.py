"""A report as a picture: hit rates by capacity, memory by manager, the batch over time. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .history import SHARES
from .hit_rates import HitRates
from .loop import Outcome
from .report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_COLORS = {
    "tokens": "#2a7f62",
    "reserved": "#e0a030",
    "empty": "#c44536",
    "cached": "#7fb7be",
    "external": "#6c4a7e",
    "free": "#d9d9d9",
}


def check_plot(file: Path) -> None:
    """See before the work that a plot can be made. ValueError for another suffix or without matplotlib."""
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"the plot's file must end with {' or '.join(SUFFIXES)}, not {str(file)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"a plot needs matplotlib ({error}): pip install 'kvfolio[plot]'") from error


def plot(report: Report, file: Path) -> None:
    """Draw what the report has. Raises OSError for the file, and what `check_plot` raises."""
    check_plot(file)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    managers = [outcome for outcome in report.managers if outcome.steps]
    panels = (report.hit_rates is not None) + 2 * bool(managers)
    # Text stays text, and equal reports give equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvfolio", "font.size": 9}):
        figure = Figure(figsize=(4.6 * max(panels, 1), 3.4), layout="constrained")
        axes = iter([figure.add_subplot(1, max(panels, 1), place + 1) for place in range(panels)])
        if report.hit_rates is not None:
            _draw_hit_rates(next(axes), report.hit_rates)
        if managers:
            _draw_memory(next(axes), managers)
            _draw_batch(next(axes), managers)
        metadata = {"Date": None} if file.suffix.lower() == ".svg" else None
        figure.savefig(file, dpi=150, metadata=metadata)


def _draw_hit_rates(axes: Axes, rates: HitRates) -> None:
    capacities = [row.capacity for row in rates.rows]
    for policy in rates.rows[0].policies if rates.rows else ():
        axes.plot(capacities, [row.policies[policy] for row in rates.rows], marker="o", label=policy)
    axes.plot(capacities, [row.optimal for row in rates.rows], marker="s", ls="--", color="#555", label="MIN")
    axes.axhline(rates.infinite, color="#aaa", lw=0.8, label="infinite")
    axes.set(xscale="log", xlabel="capacity, blocks", ylabel="hits per access", ylim=(0, None))
    axes.legend(frameon=False)


def _draw_memory(axes: Axes, managers: list[Outcome]) -> None:
    names = [outcome.manager for outcome in managers]
    left = [0.0] * len(managers)
    for share in SHARES:
        widths = [outcome.memory[share] for outcome in managers]
        axes.barh(names, widths, left=left, color=_COLORS[share], label=share, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the memory")
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)


def _draw_batch(axes: Axes, managers: list[Outcome]) -> None:
    for outcome in managers:
        every = max(1, len(outcome.history) // 100)
        points = outcome.history[::every]
        axes.step([point.time for point in points], [point.running for point in points], lw=0.9, where="post",
                  label=outcome.manager)  # fmt: skip
    axes.set(xlabel="seconds", ylabel="requests in the batch", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
