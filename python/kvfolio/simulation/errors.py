"""What a simulation can refuse, besides plain arguments that are wrong."""

from __future__ import annotations

from kvfolio.errors import KVFolioError


class TraceError(KVFolioError, ValueError):
    """A trace cannot be read, or says what cannot be; names file, line and field, where there are such.

    Attributes
    ----------
    file : str
    line : int or None
        Counted from 1; None if the file as a whole is meant.
    field : str or None
        The column or key, with its place in a nested one: "requests[3].hash_ids[0]".
    problem : str
        What came and what is allowed.
    """

    def __init__(self, file: str, line: int | None, field: str | None, problem: str) -> None:
        super().__init__(file, line, field, problem)
        self.file = file
        self.line = line
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{where}: {self.problem}" if self.field is None else f"{where}: {self.field} {self.problem}"
