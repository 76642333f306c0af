"""Tables that can be read in a terminal of 80 columns, and whole where nobody has a width."""

from __future__ import annotations

import os
from collections.abc import Iterator

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

    Rich would cut words ("reser…"), also those that tell two rows apart. Here only headings are broken,
    between words, and cells only where not even that fits; nothing is cut off.
    """
    whole = Measurement.get(console, console.options.update_width(_ENDLESS), table).maximum
    if whole > console.width:
        table.box, table.show_edge, table.padding = box.SIMPLE_HEAD, False, 0
        for column in table.columns:
            column.overflow = "fold"
            column.width = max(map(len, _pieces(column)))
    console.print(table)


def _pieces(column: Column) -> Iterator[str]:
    """What is not to be broken: the words of the heading, and the cells."""
    yield from str(column.header).split()
    yield from map(str, column.cells)
