"""Docstrings whose lines say "`name`: what it is" have such lines as a list on the site."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

ITEM = re.compile(r"(`[\w.]+`(?:, `[\w.]+`)*): ")


def make_lists(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Each such line begins an item, which goes on up to the next one or an empty line."""
    made: list[str] = []
    in_list = False
    for line in lines:
        if ITEM.match(line):
            if not in_list:
                made.append("")
            made.append(f"- {line}")
            in_list = True
        else:
            in_list = in_list and bool(line.strip())
            made.append(f"  {line}" if in_list else line)
    lines[:] = made


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx; before numpydoc, which has the usual priority, 500."""
    app.connect("autodoc-process-docstring", make_lists, priority=400)
    return {"parallel_read_safe": True}
