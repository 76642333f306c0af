"""The command line: `kvfolio`."""

from __future__ import annotations

import sys

_HELP = """\
The command line needs a few more packages than the library does ({missing} is missing). Install them with

    pip install 'kvfolio[demo]'
"""


def main() -> None:
    """Run the command line; without its extras, say how to get them and exit with status 1."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(_HELP.format(missing=error.name))
        raise SystemExit(1) from None
    app()
