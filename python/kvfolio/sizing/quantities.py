"""Bytes in words: `80GiB` and back."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(argument: str, text: str) -> int:
    """Bytes from text such as "80GiB", "1.5 GB" or "1024": a number and B, kB, MB, GB, TB or KiB to TiB.

    Raises ValueError that names the argument, what came and what is allowed.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{argument} must be a number that is not negative, and a unit such as MB, MiB, GB or GiB, "
            f"not {text!r}"
        )
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def format_bytes(number: int) -> str:
    """Bytes in the largest binary unit in which they are at least 1; bytes alone below 1 KiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(number) >= 1024**power:
            return f"{number / 1024**power:,.2f} {unit}"
    return f"{number} B"
