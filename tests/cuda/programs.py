"""Runs compilers and programs, and notes what they take of the CPU: conftest.py prints it after the tests."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import threading
from collections import defaultdict

LIMIT_S = 600
_lock = threading.Lock()
_spent: dict[str, list[float]] = defaultdict(list)


def run(what: str, command: list[str], env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """The status of a command, and what it wrote to stdout and stderr; its CPU seconds count as `what`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env)
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        _, status, usage = os.wait4(process.pid, 0)  # and of what it has waited for itself
        limit.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        with _lock:
            _spent[what].append(usage.ru_utime + usage.ru_stime)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return process.returncode, texts[0], texts[1]


def report() -> list[str]:
    """A line for each kind of program, then for this process, then for all: CPU seconds, user and system."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    mine, all_others = (usage.ru_utime + usage.ru_stime for usage in (own, children))
    lines = [
        f"{sum(seconds):7.1f}  {what}, {len(seconds)} times"
        for what, seconds in sorted(_spent.items(), key=lambda entry: -sum(entry[1]))
    ]
    return [*lines, f"{mine:7.1f}  pytest itself", f"{mine + all_others:7.1f}  CPU seconds in all"]
