"""One value of a trace each, with errors that name file, line and field, what came and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from .errors import TraceError

MAX_LENGTH = 2**31 - 1
"""The longest prompt or output, in tokens."""
MAX_ID = 2**64 - 1


def shown(value: object) -> str:
    """A value as a message may quote it."""
    text = json.dumps(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


@dataclass(frozen=True)
class Place:
    """Where a record stands: `prefix` is in front of its fields' names."""

    source: str
    line: int
    prefix: str = ""

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Raise a TraceError about one of the record's fields."""
        raise TraceError(self.source, self.line, self.prefix + field, problem)

    def get(self, record: Mapping[str, Any], field: str) -> Any:
        """A field that has to be there."""
        if field not in record:
            self.refuse(field, "is missing")
        return record[field]

    def length(self, field: str, value: object, minimum: int) -> int:
        """A number of tokens."""
        if type(value) is not int:
            self.refuse(field, f"must be an integer, not {shown(value)}")
        if not minimum <= value <= MAX_LENGTH:
            self.refuse(field, f"must be between {minimum} and {MAX_LENGTH}, not {shown(value)}")
        return value

    def parsed_length(self, field: str, text: str, minimum: int) -> int:
        """A number of tokens, of text."""
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            self.refuse(field, f"must be an integer, not {shown(text)}")
        return self.length(field, int(text), minimum)

    def time(self, field: str, value: object) -> float:
        """A time as a number, in whatever unit."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(field, f"must be a number, not {shown(value)}")
        if not 0 <= value <= 1e15:  # false for NaN, too
            self.refuse(field, f"must be between 0 and 1e15, not {shown(value)}")
        return float(value)

    def parsed_time(self, field: str, text: str) -> float:
        """A date with a time, in seconds."""
        try:
            time = datetime.fromisoformat(text.strip())
        except ValueError:
            self.refuse(field, f"must be a date and time such as 2023-11-16 18:15:46.68, not {shown(text)}")
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()

    def ids(self, field: str, value: object) -> list[int]:
        """A list of hash ids."""
        if not isinstance(value, list):
            self.refuse(field, f"must be a list of integers, not {shown(value)}")
        for place, one in enumerate(value):
            if type(one) is not int:
                self.refuse(f"{field}[{place}]", f"must be an integer, not {shown(one)}")
            if not 0 <= one <= MAX_ID:
                self.refuse(f"{field}[{place}]", f"must be between 0 and {MAX_ID}, not {shown(one)}")
        return value

    def not_before(self, field: str, time: float, last: float) -> None:
        """Times never go back."""
        if time < last:
            self.refuse(
                field, f"must not be before that of the request before it, but is {last - time:g} less"
            )


def parse_object(source: str, line: int, text: str) -> dict[str, Any]:
    """One JSON object. NaN and Infinity are none of JSON's numbers."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise TraceError(
            source, line + error.lineno - 1, None, f"is not JSON: {error.msg} at column {error.colno}"
        ) from error
    except RecursionError as error:
        raise TraceError(source, line, None, "is not JSON of a trace: nested too deeply") from error
    except ValueError as error:  # a constant, or an integer of thousands of digits
        raise TraceError(source, line, None, f"is not JSON of a trace: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(source, line, None, f"must be a JSON object, not {shown(value)}")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")
