"""Managers side by side: the same requests, the same memory, the same clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfolio import _checks

from .contiguous import RESERVATIONS, ReservingManager
from .cost import CostModel, ServedModel
from .hit_rates import Progress, no_progress
from .loop import Outcome, serve
from .manager import Manager
from .paging import WATERMARK, PagingManager
from .replay import EVICTION_POLICIES
from .workload import Workload

PAGING, CACHED_PAGING = "paging", "paging+cache"
MANAGERS = (*RESERVATIONS, PAGING, CACHED_PAGING)
"""The names of the managers; the last needs a trace with hash ids."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all managers have in common.

    Parameters
    ----------
    model : ServedModel
    cost : CostModel
    kv_memory : int
        Bytes, for K and V alone.
    block_size : int
        Of the paging ones, in tokens.
    max_sequences, tokens_per_step : int
        See `serve`.
    eviction : str
        One of `EVICTION_POLICIES`, of the prefix cache.
    watermark : float
        See `paging.WATERMARK`.

    Raises
    ------
    ValueError, TypeError
        An argument is wrong, or the memory does not hold two blocks.
    """

    model: ServedModel
    cost: CostModel
    kv_memory: int
    block_size: int = 16
    max_sequences: int = 256
    tokens_per_step: int = 2048
    eviction: str = EVICTION_POLICIES[0]
    watermark: float = WATERMARK

    def __post_init__(self) -> None:
        for name in ("kv_memory", "block_size", "max_sequences"):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), 1))
        _checks.integer("tokens_per_step", self.tokens_per_step, self.max_sequences)
        if self.eviction not in EVICTION_POLICIES:
            raise ValueError(f"eviction must be one of {', '.join(EVICTION_POLICIES)}, not {self.eviction!r}")
        if not 0 <= _checks.number("watermark", self.watermark) < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, not {self.watermark}")
        if self.num_blocks < 1:
            least = 2 * self.block_size * self.model.kv_bytes_per_token
            raise ValueError(
                f"kv_memory must be at least {least} bytes, the null block and one more, not {self.kv_memory}"
            )

    @property
    def num_slots(self) -> int:
        """Tokens that the memory has room for."""
        return self.kv_memory // self.model.kv_bytes_per_token

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the memory: the null block takes one."""
        return self.num_slots // self.block_size - 1

    def manager(self, name: str, workload: Workload) -> Manager:
        """A new manager. ValueError if the name is none of `MANAGERS`."""
        if name not in MANAGERS:
            raise ValueError(f"managers must be of {', '.join(MANAGERS)}, not {name!r}")
        if name in RESERVATIONS:
            return ReservingManager(name, workload, self.num_slots)
        return PagingManager(
            workload,
            self.num_blocks,
            self.block_size,
            max_sequences=self.max_sequences,
            prefix_cache=name == CACHED_PAGING,
            eviction=self.eviction,
            watermark=self.watermark,
        )


def compare(
    workload: Workload,
    setup: Setup,
    managers: Sequence[str] | None = None,
    *,
    progress: Progress = no_progress,
) -> list[Outcome]:
    """Serve a workload with one manager after the other; by default with all that the trace allows.

    `managers`: of `MANAGERS`. `setup`: the memory, model and limits that all of them have. `progress`: as
    for `hit_rates`.

    Raises
    ------
    ValueError, TypeError
        A name is none of `MANAGERS`, or the batch has no room for one request's answers.
    """
    if managers is None:
        managers = MANAGERS if workload.trace.hash_ids is not None else MANAGERS[:-1]
    for name in managers:
        if name not in MANAGERS:
            raise ValueError(f"managers must be of {', '.join(MANAGERS)}, not {name!r}")
        if name == CACHED_PAGING and workload.trace.hash_ids is None:
            raise ValueError(
                f"managers must not have {name}: the trace has no hash ids, so nothing would be found"
            )
    return [
        serve(
            workload,
            setup.manager(name, workload),
            setup.cost,
            kv_bytes_per_token=setup.model.kv_bytes_per_token,
            max_sequences=setup.max_sequences,
            tokens_per_step=setup.tokens_per_step,
            progress=progress(name, workload.num_requests),
        )
        for name in managers
    ]
