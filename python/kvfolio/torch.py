"""Plans as torch tensors, on the device that the model is on.

In a loop::

    buffers = kvfolio.torch.PlanBuffers(batch, device="cuda")
    table = kvfolio.torch.DeviceTable(batch, device="cuda")
    plan = buffers.plan()               # one copy to the device brings all arrays there
    table.update(plan)
    buffers.tensors["slot_mapping"]     # the same tensors in every step, as CUDA graphs want them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from kvfolio import _checks
from kvfolio import plan_buffers as _plan_buffers
from kvfolio._native import Batch, Plan

__all__ = ["DeviceTable", "PlanBuffers"]

_DTYPES = {"int32": torch.int32, "int64": torch.int64}


class PlanBuffers(_plan_buffers.PlanBuffers):
    """Buffers for plans whose arrays are tensors on a device, always the same ones.

    Plans are written into one staging block, pinned where the device is no CPU, and one copy brings it to the
    device. `tensors` has, by name, the whole arrays there (`kvfolio.PlanBuffers` says what is behind n rows
    and T tokens): int32, but `positions`, `slot_mapping` and `logits_indices` are int64. On the CPU they are
    views of the staging block, and nothing is copied.

    Parameters
    ----------
    batch, max_tokens, max_sequences, max_blocks, max_pages, pad_slot, pad_seq_len, pad_last_page_len
        As in `kvfolio.PlanBuffers`.
    device : str or torch.device
    block_table : bool
        Whether the block table goes along; not, if a `DeviceTable` has it. It is the bulk of the bytes.
    """

    device: torch.device
    staging: torch.Tensor
    tensors: dict[str, torch.Tensor]
    _num_copied: int
    _device_memory: torch.Tensor
    _copied: Any
    _csr_copied: Any

    def __new__(
        cls,
        batch: Batch,
        max_tokens: int | None = None,
        *,
        device: str | torch.device = "cpu",
        block_table: bool = True,
        max_sequences: int | None = None,
        max_blocks: int | None = None,
        max_pages: int | None = None,
        pad_slot: int = 0,
        pad_seq_len: int = 0,
        pad_last_page_len: int = 1,
    ) -> Self:
        """See the class."""
        device = torch.device(device)
        fields = cls.layout_of(
            batch, max_tokens, max_sequences=max_sequences, max_blocks=max_blocks, max_pages=max_pages
        )
        num_bytes = cls.size_of(fields)
        staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        buffers = super().__new__(
            cls,
            batch,
            max_tokens,
            max_sequences=max_sequences,
            max_blocks=max_blocks,
            max_pages=max_pages,
            memory=staging.numpy(),
            pad_slot=pad_slot,
            pad_seq_len=pad_seq_len,
            pad_last_page_len=pad_last_page_len,
        )
        buffers.device, buffers.staging = device, staging
        buffers._copied = buffers._csr_copied = None
        table = fields["block_table"]
        buffers._num_copied = table.offset + (table.num_bytes if block_table else 0)
        names = [name for name in fields if block_table or name != "block_table"]
        memory = staging if device.type == "cpu" else torch.zeros_like(staging, device=device)
        buffers._device_memory = memory
        buffers.tensors = {
            name: memory[field.offset : field.offset + field.num_bytes]
            .view(_DTYPES[field.dtype])
            .view(field.shape)
            for name, field in ((name, fields[name]) for name in names)
        }
        return buffers

    def plan(
        self,
        max_tokens: int | None = None,
        partial: bool = False,
        *,
        rows: Sequence[int] | None = None,
        num_tokens: int | Sequence[int] | None = None,
    ) -> Plan:
        """`Batch.plan` into these buffers, and on to the device, on the current stream.

        It waits until the copy of the plan before has been made: that long the staging block is in use.
        """
        _wait(self._copied)
        plan = self.batch.plan(max_tokens, partial, rows=rows, num_tokens=num_tokens, out=self)
        self.copy_to_device()
        return plan

    def copy_to_device(self) -> None:
        """Copy the staging block to the device, for who calls `Batch.plan(out=...)` himself."""
        self._copied = self._copy(0, self._num_copied, self._copied)

    def write_csr(self, plan: Plan) -> None:
        """As in `kvfolio.PlanBuffers`, and on to the device, by a copy of its own on the current stream."""
        _wait(self._csr_copied)
        before = self._num_pages
        super().write_csr(plan)
        start, indices = self.fields["page_indptr"].offset, self.fields["page_indices"]
        stop = indices.offset + 4 * max(before, self._num_pages)
        self._csr_copied = self._copy(start, stop, self._csr_copied)

    def _copy(self, start: int, stop: int, copied: Any) -> Any:
        """Copy some bytes; returns the event that tells when they have been."""
        if self.device.type == "cpu":
            return None
        self._device_memory[start:stop].copy_(self.staging[start:stop], non_blocking=True)
        if self.device.type != "cuda":
            return None
        if copied is None:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        return copied


def _wait(copied: Any) -> None:
    if copied is not None:
        copied.synchronize()


class DeviceTable:
    """The block tables of a batch's rows, on a device, at a fixed address.

    `tensor` is int32 ``[max_sequences, W]``, by the batch's row numbers; the null block fills what is not in
    use or not in use any more. A step costs one small copy and one scatter, whatever the context's length.
    Every plan of the batch has to be given, in the order they were made; those that were rolled back, too.

    Parameters
    ----------
    batch : Batch
    device : str or torch.device
    max_blocks : int, optional
        W; by default what the longest sequence of the batch takes.
    """

    def __init__(
        self, batch: Batch, *, device: str | torch.device = "cpu", max_blocks: int | None = None
    ) -> None:
        if not isinstance(batch, Batch):
            raise TypeError(f"batch must be a Batch, not {type(batch).__name__}")
        if max_blocks is None:
            max_blocks = -(-batch.max_tokens_per_sequence // batch.pool.block_size)
        width = _checks.integer("max_blocks", max_blocks, 1)
        self.tensor = torch.zeros((batch.max_sequences, width), dtype=torch.int32, device=device)

    def update(self, plan: Plan) -> None:
        """Take in what the plan has told; on a GPU it is queued on the current stream.

        Raises IndexError if a row has more than `max_blocks` blocks; then nothing was changed.
        """
        updates = plan.table_updates
        if not len(updates):
            return
        width = self.tensor.shape[1]
        if int(updates[:, 1].max()) >= width:
            raise IndexError(f"max_blocks must be above {int(updates[:, 1].max())}, not {width}")
        cells = np.empty((2, len(updates)), np.int64)
        np.multiply(updates[:, 0], width, out=cells[0], dtype=np.int64)
        cells[0] += updates[:, 1]
        cells[1] = updates[:, 2]
        told = torch.from_numpy(cells)
        if self.tensor.device.type == "cuda":
            # Pinned memory from torch's cache is not used again before the copy has been made.
            told = told.pin_memory().to(self.tensor.device, non_blocking=True)
        else:
            told = told.to(self.tensor.device)
        self.tensor.view(-1).index_copy_(0, told[0], told[1].int())

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The tables of some rows, int32 ``[n, W]``: a plan's block table, from its `rows` on the device."""
        return self.tensor.index_select(0, rows)
