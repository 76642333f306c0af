"""The command line: `kvfolio`."""

from __future__ import annotations

import sys

_HELP = """\
The command line needs a few more packages than the library does ({missing} is missing). Install them with

    pip install 'kvfolio[{extras}]'
"""
# What a command takes besides the command line; it says so itself, too, where only that is missing.
_EXTRAS = {"demo": "demo", "top": "cli,metrics"}


def main() -> None:
    """Run the command line; without its extras, say how to get them and exit with status 1."""
    try:
        import rich  # noqa: F401 - the commands do, when it is too late to say this

        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        extras = next((_EXTRAS[word] for word in sys.argv[1:2] if word in _EXTRAS), "cli")
        sys.stderr.write(_HELP.format(missing=error.name, extras=extras))
        raise SystemExit(1) from None
    app()
