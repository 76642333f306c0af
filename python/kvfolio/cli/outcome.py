"""How a command ends: what `--json` writes, and what is said of a refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from kvfolio.errors import KVFolioError


def status_of(work: Callable[[], None], errors: Console, verb: str) -> int:
    """Do the work; the exit status is 2 for what is refused or cannot be written, which `errors` is told."""
    try:
        work()
    except (KVFolioError, ValueError, TypeError) as error:
        errors.print(f"[red]It cannot be {verb}:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except OSError as error:
        errors.print(f"[red]It cannot be written:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    return 0


def write_json(record: object, path: str) -> None:
    """Into a file, or to standard output if the path is "-"."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
