"""Kernels that are broken at many places, all in one program, which a switch chooses among.

A mutant is one or more edits of a source. All are made in one copy of the sources, each so that it is in
force only where the environment has its number: so they cost one build for each sanitizer, not each mutant.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import toolchain

SWITCH = "KVFOLIO_MUTANT"
NUMERICS, ADDRESS, RACE = "the numerical tests", "AddressSanitizer", "ThreadSanitizer"

_SWITCHED = f"""
#include <cstdlib>
namespace kvfolio {{
inline int number_of_mutant() {{
  const char* number = std::getenv("{SWITCH}");
  return number == nullptr ? -1 : std::atoi(number);
}}
inline const int kMutant = number_of_mutant();  // before the kernels: reading it orders nothing
inline bool mutated(int number) {{ return kMutant == number; }}
}}  // namespace kvfolio
"""


@dataclass(frozen=True)
class Edit:
    """In the lines of a file that have `at`, of which there are `lines`, `code` becomes `instead`.

    Statements end with ``;`` and are chosen by an ``if``, expressions by ``?:``. In what has neither type,
    ``MUTATED`` stands for the condition.
    """

    file: str
    at: str
    code: str
    instead: str
    lines: int = 1

    def switched(self, number: int) -> str:
        """The code with both."""
        condition = f"mutated({number})"
        if "MUTATED" in self.instead:
            return self.instead.replace("MUTATED", condition)
        if self.code.endswith(";"):
            return f"if ({condition}) {{ {self.instead} }} else {{ {self.code} }}"
        return f"({condition} ? ({self.instead}) : ({self.code}))"

    def made(self, text: str, number: int) -> str:
        """The text of the file after it."""
        lines, found = text.split("\n"), 0
        for i, line in enumerate(lines):
            if self.at in line and self.code in line:
                assert line.count(self.code) == 1, f"{self} is ambiguous"
                lines[i] = line.replace(self.code, self.switched(number))
                found += 1
        assert found == self.lines, f"{self} is in {found} lines"
        return "\n".join(lines)


@dataclass(frozen=True)
class Mutant:
    """`killer` is a test of the other files, called with a function from variants to programs."""

    name: str
    seen_by: str
    killer: object
    edits: tuple[Edit, ...]


def without_barrier(name, killer, file, at):
    """Mutant of a barrier that is left out; only ThreadSanitizer may see it."""
    return Mutant(name, RACE, killer, (Edit(file, at, "__syncthreads();", ""),))


def one(name, seen_by, killer, file, code, instead, at="", lines=1):
    """Mutant of one edit."""
    return Mutant(name, seen_by, killer, (Edit(file, at or code, code, instead, lines),))


def sources(mutants: list[Mutant]) -> Path:
    """A copy of the kernels with the edits of all; none is in force unless the environment says so."""
    folder = toolchain.BUILT / "mutants"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(toolchain.SOURCES, folder)
    for number, mutant in enumerate(mutants):
        for edit in mutant.edits:
            file = folder / edit.file
            file.write_text(edit.made(file.read_text(), number))
    device = folder / "device.cuh"
    device.write_text(device.read_text().replace("#pragma once\n", f"#pragma once\n{_SWITCHED}", 1))
    return folder
