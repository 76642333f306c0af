"""Lines of a file that nobody vouches for, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import BinaryIO

from .errors import TraceError

MAX_LINE = 16 * 2**20
"""Bytes of the longest line, and of the longest JSON document, that are read."""


class Lines:
    """The lines of one file, each decoded by itself; blank ones are passed over.

    `digest` is that of what has been read.
    """

    def __init__(self, file: BinaryIO, source: str) -> None:
        self.source = source
        self.digest = hashlib.sha256()
        self._file = file
        self._number = 0
        self._ahead: tuple[int, str] | None = None

    def peek(self) -> tuple[int, str]:
        """The first line, which comes again. Raises TraceError if there is none."""
        self._ahead = next(self, None)
        if self._ahead is None:
            raise TraceError(self.source, None, None, "is empty")
        return self._ahead

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self

    def __next__(self) -> tuple[int, str]:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return ahead
        while raw := self._file.readline(MAX_LINE + 1):
            self._number += 1
            if len(raw) > MAX_LINE:
                raise TraceError(self.source, self._number, None, f"is longer than {MAX_LINE} bytes")
            self.digest.update(raw)
            text = self._decode(raw, self._number).rstrip("\r\n")
            if text.strip():
                return self._number, text
        raise StopIteration

    def rest(self) -> tuple[int, str]:
        """All that is left, as one document, and the number of its first line."""
        number, text = next(self)
        raw = self._file.read(MAX_LINE + 1 - len(text))
        if len(text) + len(raw) > MAX_LINE:
            raise TraceError(self.source, number, None, f"is longer than {MAX_LINE} bytes as one document")
        self.digest.update(raw)
        return number, text + "\n" + self._decode(raw, self._number + 1)

    def _decode(self, raw: bytes, number: int) -> str:
        try:
            return raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            number += raw.count(b"\n", 0, error.start)
            raise TraceError(
                self.source, number, None, f"is not UTF-8: {error.reason} at its byte {error.start}"
            ) from error
