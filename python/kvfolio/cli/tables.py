"""Tables that can be read in a terminal of 80 columns, and whole where nobody has a width."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

_ENDLESS = 10_000


def make_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or as `$COLUMNS` says; into a file or a pipe as wide as what is printed."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _ENDLESS
    return console


def make_table(*columns: str, title: str | None = None, left: int = 0) -> Table:
    """A table of figures: the first `left` columns are words."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table whose cells are texts; without lines between the columns where it is too wide with them.

    Rich would cut words ("reser…"), also those that tell two rows apart. Here headings are broken between
    words, and so are the cells of those columns that gain most by it, where it has to be; nothing is cut off.
    """
    whole = Measurement.get(console, console.options.update_width(_ENDLESS), table).maximum
    if whole > console.width:
        table.box, table.show_edge, table.padding = box.SIMPLE_HEAD, False, 0
        for column, width in zip(table.columns, _widths(table.columns, console.width), strict=True):
            column.width, column.overflow = width, "fold"
    console.print(table)


def _widths(columns: list[Column], room: int) -> list[int]:
    """How wide the columns are that have one blank between them."""
    headings = [_longest(str(column.header).split()) for column in columns]
    cells = [[str(cell) for cell in column.cells] for column in columns]
    wide = [max(heading, _longest(own)) for heading, own in zip(headings, cells, strict=True)]
    widths = [
        max(heading, _longest(word for cell in own for word in cell.split()))
        for heading, own in zip(headings, cells, strict=True)
    ]
    spare = room - sum(widths) - len(columns) + 1
    for number in sorted(range(len(columns)), key=lambda number: wide[number] - widths[number]):
        more = max(0, min(wide[number] - widths[number], spare))
        widths[number] += more
        spare -= more
    return widths


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)
