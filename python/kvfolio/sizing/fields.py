"""A configuration's fields, with errors that name file and field, what came and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ConfigError


class Fields:
    """The fields of one configuration; a field that is null counts as not given.

    The models of one architecture name a thing alike, those of different ones do not: each look-up takes all
    names of the thing, the usual one first.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def error(self, field: str, problem: str) -> ConfigError:
        """To be raised: something is wrong with this field."""
        return ConfigError(f"{self.source}: {field} {problem}")

    def given(self, *names: str) -> str | None:
        """The first of the names that has a value."""
        return next((name for name in names if self.values.get(name) is not None), None)

    def optional_integer(self, *names: str, minimum: int = 1) -> int | None:
        """The value of the first name that has one, else None."""
        name = self.given(*names)
        if name is None:
            return None
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer of at least {minimum}, not {value!r}")
        if value < minimum:
            raise self.error(name, f"must be at least {minimum}, not {value}")
        return value

    def integer(self, *names: str, minimum: int = 1) -> int:
        """The value of the first name that has one; ConfigError if none has."""
        value = self.optional_integer(*names, minimum=minimum)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise self.error(names[0] + others, f"is missing; it must be an integer of at least {minimum}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """The value of a field that is true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def text(self, *names: str) -> str | None:
        """The value of a field that is text."""
        name = self.given(*names)
        if name is None:
            return None
        value = self.values[name]
        if not isinstance(value, str):
            raise self.error(name, f"must be text, not {value!r}")
        return value

    def texts(self, name: str) -> list[str] | None:
        """The value of a field that is a list of texts."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"must be a list of texts, not {value!r}")
        return value
