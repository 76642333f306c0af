"""What a sizing can refuse, besides plain arguments that are wrong."""

from __future__ import annotations

from kvfolio.errors import KVFolioError

from .quantities import format_bytes


class ConfigError(KVFolioError, ValueError):
    """A model's configuration cannot be read, or does not say what must be known; names file and field."""


class NoRoom(KVFolioError, MemoryError):
    """Not one block fits into what is left for the KV on a rank of pipeline stage `stage`.

    `short_by` more bytes on each rank of that stage would do for one usable block.
    """

    def __init__(self, stage: int, short_by: int, left: int) -> None:
        super().__init__(stage, short_by, left)
        self.stage = stage
        self.short_by = short_by
        self.left = left

    def __str__(self) -> str:
        left = f"{self.left:,} bytes are left for the KV" if self.left >= 0 else "nothing is left for the KV"
        short = f"{self.short_by:,} bytes ({format_bytes(self.short_by)})"
        return f"0 blocks, short by {short} on each rank of stage {self.stage}: {left}"
