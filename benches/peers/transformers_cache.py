"""transformers' continuous batching: PagedAttentionCache and its index building.

Version 5.24: `generation/continuous_batching`. Driven as `FIFOScheduler` and `ContinuousBatchProcessor` do
(`_process_candidates`, `prepare_next_batch`, `update_batch`), without the scheduler's own queues. Decode
steps take its fast path, which reads a block table; prompts take the other, by index lists. Cached blocks
are given up where an allocation needs them, all at once: it has no order of eviction.
"""

from __future__ import annotations

import torch
import transformers
from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    RequestState,
    RequestStatus,
)
from transformers.generation.logits_process import LogitsProcessorList

from .protocol import TOKEN, Peer


class Transformers(Peer):
    name = package = "transformers"

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int, max_tokens: int) -> None:
        super().__init__(num_blocks, block_size, max_sequences, max_tokens)
        # One layer with one head of 8 dimensions: what is measured does not depend on it.
        config = LlamaConfig(
            num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=8, head_dim=8
        )
        config._attn_implementation = "flash_attention_2"  # no mask is built for it
        options = ContinuousBatchingConfig(
            page_size=block_size,
            num_blocks=num_blocks,
            max_batch_tokens=max(max_tokens, max_sequences),
            max_memory_percent=0.9,
            max_requests_per_batch=max_sequences,
            max_blocks_per_request=-(-max_tokens // block_size),
            use_async_batching=False,
            use_cuda_graph=(False, False),
        )
        device = torch.device("cpu")
        self.cache = PagedAttentionCache(
            config, options, device, DistributedHelper(None, None), torch.float16
        )
        self.processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
        self.inputs = ContinuousBatchingIOs(
            self.cache, config, options, device, torch.float16, self.processors
        )
        self.allocator = next(iter(self.cache.cache_allocators.values()))
        self.states: dict[str, RequestState] = {}
        self.cached: dict[str, int] = {}
        self.num_admitted = 0
        self._last: list[RequestState] = []

    @classmethod
    def version(cls) -> str:
        return transformers.__version__

    def admit(self, prompt: list[int]) -> RequestState:
        state = RequestState(str(self.num_admitted), prompt, max_new_tokens=None)
        self.num_admitted += 1
        cached = self.cache.search_prefix_match(state.request_id, state.remaining_prefill_tokens)
        if cached:
            state.remaining_prefill_tokens = state.remaining_prefill_tokens[cached:]
            state.position_offset += cached
        self.states[state.request_id], self.cached[state.request_id] = state, cached
        return state

    def step(self, handles: list[RequestState] | None = None) -> None:
        states = list(self.states.values()) if handles is None else handles
        scheduled, fast, num_tokens, num_read = [], True, 0, 0
        for state in states:
            if state.status != RequestStatus.DECODING:
                state.tokens_to_process, state.remaining_prefill_tokens = state.remaining_prefill_tokens, []
                state.status = RequestStatus.DECODING
            count = len(state.tokens_to_process)
            if not self.cache.can_store_request_tokens(state, count):
                self.cache.evict_cached_blocks()
                self.cache.pool.try_to_free_sectors()
                assert self.cache.can_store_request_tokens(state, count), "the workload fits the pool"
            fast &= count == 1
            num_tokens += count
            num_read += state.current_len()
            complete = self.cache.count_new_complete_blocks(state, count)
            scheduled.append(FutureRequestState(state, True, complete, count))
        self.inputs.prepare_batch_tensors(scheduled, self.processors, fast, num_tokens, num_read, False)
        for future in scheduled:
            future.state.update_and_check_completion(TOKEN, None)
            self.cache.mark_complete_blocks(future.state, future.complete_blocks)
        self._last = states

    def free(self, handle: RequestState) -> None:
        self.cache.free_blocks(handle.request_id)
        del self.states[handle.request_id], self.cached[handle.request_id]

    def num_cached(self, handle: RequestState) -> int:
        return self.cached[handle.request_id]

    def block_ids(self, handle: RequestState) -> list[int]:
        return self.allocator.block_table[handle.request_id]

    def table_row(self, handle: RequestState) -> list[int]:
        """Of a decode step: cells are blocks times the stride of a page, which is 1 or 2 by the layout."""
        place = next(i for i, state in enumerate(self._last) if state is handle)  # == compares all tokens
        row = self.inputs.block_table[0, place]
        stride = self.allocator.block_physical_stride // self.allocator.tokens_per_page
        return [cell // stride for cell in row[row >= 0].tolist()]

    def fork(self, handle: RequestState) -> RequestState:
        name = f"{handle.request_id}.{len(self.states)}"
        copies: dict[str, tuple[list[int], list[int]]] = {
            key: ([], []) for key in self.cache.cache_allocators
        }
        forked = self.cache.prepare_fork_request(handle, [name], copies)
        assert forked == [name], "the workload fits the pool"
        fork = handle.fork(name)
        self.states[name], self.cached[name] = fork, 0
        return fork
