"""What the pool, and what lives in it, refuse. A call that raises has changed nothing.

Arguments that are wrong in themselves raise a plain ValueError, TypeError or IndexError.
"""

from __future__ import annotations


class KVFolioError(Exception):
    """Every error of the library is one of these, or a plain ValueError, TypeError or IndexError."""


class OutOfBlocks(KVFolioError, MemoryError):
    """`needed` free blocks were asked for and `free` were there.

    `quarantined` blocks come free when the plans in flight end. `ever_fits` is False when the request
    would fail even with the pool to itself.
    """

    def __init__(self, needed: int, free: int, quarantined: int, ever_fits: bool) -> None:
        super().__init__(needed, free, quarantined, ever_fits)
        self.needed = needed
        self.free = free
        self.quarantined = quarantined
        self.ever_fits = ever_fits

    def __str__(self) -> str:
        text = f"{self.needed} blocks needed, {self.free} free, {self.quarantined} quarantined"
        return text if self.ever_fits else f"{text}; it can never fit"


class InvalidBlock(KVFolioError, ValueError):
    """A block id that is out of range, or not referenced as often as the call assumes."""


class StaleHandle(KVFolioError, RuntimeError):
    """A table, sequence or plan was used after its end."""


class PlanInFlight(KVFolioError, RuntimeError):
    """The call would change what a plan in flight relies on, or would end plans out of order."""


class BatchFull(KVFolioError, RuntimeError):
    """The batch has `max_sequences` rows already."""


class ConcurrentUse(KVFolioError, RuntimeError):
    """Two threads used one table, sequence, batch or plan at once, or two sources the events of a pool."""


class RefCountOverflow(KVFolioError, OverflowError):
    """More references to one block than can be counted."""


class CorruptPool(KVFolioError):
    """The audit found two records of one fact that disagree."""


class CopiesNotApplied(KVFolioError, RuntimeError):
    """A plan's copy-on-write is still to be done; what was asked for would come out wrong without it."""


class CudaUnavailable(KVFolioError, RuntimeError):
    """The CUDA kernels can be neither loaded nor built.

    `missing` says for want of what, `reason` how that was found, `remedy` how to get it.
    """

    def __init__(self, missing: str, reason: str, remedy: str) -> None:
        super().__init__(missing, reason, remedy)
        self.missing = missing
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"the CUDA kernels need {self.missing}: {self.reason}. To get it: {self.remedy}"
