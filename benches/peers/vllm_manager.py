"""vLLM's KVCacheManager (scheduler) and block table (worker), driven as its scheduler and model runner do.

Version 0.33.0: `vllm/v1/core/sched/scheduler.py`, `vllm/v1/worker/gpu_model_runner.py` (`_update_states`,
`_prepare_inputs`). What it does on the device is left out: slots (a Triton kernel) and copies to the device;
so is the rest of the scheduler and of the runner. It runs without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")  # else it warns that xxHash begins with a random number

import numpy as np
import torch
import vllm
import vllm.v1.utils
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, xxhash
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.worker.block_table import MultiGroupBlockTable

from .protocol import TOKEN, Peer

vllm.v1.utils.PIN_MEMORY = False  # a CUDA build without a device


class Vllm(Peer):
    """With the default hash, SHA-256 of pickled tokens."""

    name = package = "vLLM"
    hash_function: ClassVar[Callable[[Any], bytes]] = sha256

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int, max_tokens: int) -> None:
        super().__init__(num_blocks, block_size, max_sequences, max_tokens)
        hash_function = type(self).hash_function
        kv_cache_utils.init_none_hash(hash_function)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float16)
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # the null block is one of them
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, max_model_len=max_tokens, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self.hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_function)
        self.params = SamplingParams(max_tokens=max_tokens)
        self.tables = MultiGroupBlockTable(
            max_num_reqs=max_sequences,
            max_num_batched_tokens=max_tokens,
            pin_memory=False,
            device=torch.device("cpu"),
            block_sizes=[block_size],
            max_num_blocks=[-(-max_tokens // block_size)],
        )
        # The runner's persistent batch and static inputs.
        self.token_ids_tensor = torch.zeros((max_sequences, max_tokens), dtype=torch.int32)
        self.token_ids = self.token_ids_tensor.numpy()
        self.num_computed = np.zeros(max_sequences, np.int32)
        most = max(max_sequences, max_tokens)
        self.arange = np.arange(most, dtype=np.int64)
        self.input_ids = torch.zeros(most, dtype=torch.int32)
        self.query_start_loc = np.zeros(max_sequences + 1, np.int32)
        self.seq_lens = np.zeros(max_sequences, np.int32)
        self.requests: list[Request] = []  # by row
        self.rows: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.num_admitted = 0

    @classmethod
    def version(cls) -> str:
        return str(vllm.__version__)

    def admit(self, prompt: list[int]) -> Request:
        """Hash, look up, and allocate for the whole prompt, as one `schedule` does."""
        request = Request(str(self.num_admitted), prompt, self.params, None, block_hasher=self.hasher)
        self.num_admitted += 1
        blocks, cached, _ = self.manager.get_computed_blocks(request)
        new = self.manager.allocate_slots(request, len(prompt) - cached, cached, blocks)
        assert new is not None, "the workload fits the pool"
        request.num_computed_tokens = cached
        row = len(self.requests)
        self.requests.append(request)
        self.rows[request.request_id], self.cached[request.request_id] = row, cached
        # InputBatch.add_request
        self.token_ids[row, : len(prompt)] = prompt
        self.num_computed[row] = cached
        self.tables.add_row(self.manager.get_block_ids(request.request_id), row)
        return request

    def step(self, handles: list[Request] | None = None) -> None:
        requests = self.requests if handles is None else handles
        counts = []
        appended = []
        for request in requests:
            count = request.num_tokens - request.num_computed_tokens
            counts.append(count)
            if request.num_output_tokens:  # a prompt's slots were allocated at admission
                new = self.manager.allocate_slots(request, count)
                assert new is not None, "the workload fits the pool"
                ids = new.get_block_ids(allow_none=True)
                if ids is not None:
                    appended.append((request, ids))
        rows = self.rows
        for request, ids in appended:
            self.tables.append_row(ids, rows[request.request_id])
        self._prepare_inputs([rows[request.request_id] for request in requests], counts)
        for request, count in zip(requests, counts, strict=True):
            request.num_computed_tokens += count
            row = rows[request.request_id]
            self.num_computed[row] += count
            self.token_ids[row, request.num_tokens] = TOKEN
            request.append_output_token_ids(TOKEN)

    def _prepare_inputs(self, rows: list[int], counts: list[int]) -> None:
        num_scheduled = np.array(counts, dtype=np.int32)
        row_ids = np.array(rows, dtype=np.int64)
        ends = np.cumsum(num_scheduled)
        total = int(ends[-1])
        req_indices = np.repeat(row_ids, num_scheduled)
        offsets = self.arange[:total] - np.repeat(ends - num_scheduled, num_scheduled)
        positions = self.num_computed[req_indices] + offsets
        token_indices = positions + req_indices * self.token_ids.shape[1]
        torch.index_select(
            self.token_ids_tensor.flatten(), 0, torch.from_numpy(token_indices), out=self.input_ids[:total]
        )
        self.query_start_loc[1 : len(rows) + 1] = ends
        self.query_start_loc[len(rows) + 1 :] = total
        self.seq_lens[: len(rows)] = self.num_computed[row_ids] + num_scheduled
        self.seq_lens[len(rows) :] = 0
        self.logits_indices = self.query_start_loc[1 : len(rows) + 1] - 1

    def free(self, handle: Request) -> None:
        self.manager.free(handle)
        row, last = self.rows.pop(handle.request_id), self.requests.pop()
        del self.cached[handle.request_id]
        if last is handle:
            self.tables.clear_row(row)
            return
        # InputBatch.condense: the last row moves into the hole.
        end = len(self.requests)
        self.tables.clear_row(row)
        self.tables.move_row(end, row)
        self.token_ids[row, : last.num_tokens] = self.token_ids[end, : last.num_tokens]
        self.num_computed[row] = self.num_computed[end]
        self.requests[row], self.rows[last.request_id] = last, row

    def num_cached(self, handle: Request) -> int:
        return self.cached[handle.request_id]

    def block_ids(self, handle: Request) -> list[int]:
        return list(self.manager.get_block_ids(handle.request_id)[0])

    def table_row(self, handle: Request) -> list[int]:
        table = self.tables[0].get_numpy_array()
        return list(table[self.rows[handle.request_id]].tolist())


class VllmXxhash(Vllm):
    """With the fastest of its hashes, which is not collision resistant."""

    name, package = "vLLM (xxHash)", ""
    hash_function = xxhash
