"""The directive `{commands}`: what the command line offers, as typer tells it."""

from __future__ import annotations

from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.cli import get_docs_for_click


class Commands(SphinxDirective):
    """A section for each command of `kvfolio`, with its options."""

    def run(self) -> list[nodes.Node]:
        """As typer's own `utils docs` writes them."""
        from kvfolio.cli.app import app

        group = typer.main.get_command(app)
        sections = []
        for name, command in group.commands.items():
            context = typer.Context(command, info_name=name)
            sections.append(get_docs_for_click(obj=command, ctx=context, name=f"kvfolio {name}", indent=1))
        return self.parse_text_to_nodes("\n".join(sections), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
