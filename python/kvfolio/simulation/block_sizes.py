"""What a block size means for a trace: empty slots, table bytes, and what a prefix cache can find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvfolio import _checks

from .trace import Trace, TraceBuilder

BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
_TABLE_ENTRY = 4  # int32


@dataclass(frozen=True)
class BlockSizeFigures:
    """What follows from lengths and ids for one block size.

    Attributes
    ----------
    block_size : int
    empty_share : float
        Of the slots that the requests' sequences hold at their ends, those that are empty.
    table_bytes : float
        Mean bytes of a sequence's block table at its end, 4 a block.
    hits_at_least, hits_at_most : float or None
        Prompt tokens that a cache without limits finds, of all; None without hash ids. See `hit_bounds`.
    """

    block_size: int
    empty_share: float
    table_bytes: float
    hits_at_least: float | None
    hits_at_most: float | None


def block_size_figures(trace: Trace, block_sizes: Sequence[int] = BLOCK_SIZES) -> list[BlockSizeFigures]:
    """One row a block size. ValueError or TypeError if one is no integer of at least 1."""
    sizes = [_checks.integer("block_sizes", size, 1) for size in block_sizes]
    lengths = trace.prompt_lengths + np.maximum(trace.output_lengths, 1) - 1
    rows = []
    for size in sizes:
        blocks = -(-lengths // size)
        slots = int(blocks.sum()) * size
        bounds = None if trace.hash_ids is None else hit_bounds(trace, size)
        rows.append(
            BlockSizeFigures(
                block_size=size,
                empty_share=(slots - int(lengths.sum())) / slots,
                table_bytes=float(blocks.mean()) * _TABLE_ENTRY,
                hits_at_least=None if bounds is None else bounds[0],
                hits_at_most=None if bounds is None else bounds[1],
            )
        )
    return rows


def hit_bounds(trace: Trace, block_size: int) -> tuple[float, float]:
    """Between which bounds lie the prompt tokens found by a cache without limits, of all prompt tokens.

    Equal ids are equal tokens, so what is found is at least the whole blocks in the ids that a request has in
    common with an earlier one. Where they part, an earlier request's tokens may go on to be the same up to
    one less than an id stands for: with those it is at most so much. A block is found whole or not at all,
    the last token of a prompt never. Answers are left out: a trace does not tell whose tokens came back in
    whose prompt.
    """
    per, least, most = trace.tokens_per_hash_id, 0, 0
    seen: set[int] = set()
    followed: set[int] = set()  # ids, and -1 for the beginning, behind which an earlier request has tokens
    for request in range(trace.num_requests):
        ids, length = trace.ids_of(request).tolist(), int(trace.prompt_lengths[request])
        common = 0
        while common < len(ids) and ids[common] in seen:
            common += 1
        parent = ids[common - 1] if common else -1
        sure = min(common * per, length - 1)
        maybe = min(common * per + (per - 1) * (parent in followed), length - 1)
        least += sure // block_size * block_size
        most += maybe // block_size * block_size
        seen.update(ids)
        followed.update([-1, *ids][: -1 if length <= len(ids) * per else None])
    total = int(trace.prompt_lengths.sum())
    return least / total, most / total


def synthetic_lengths(num_requests: int = 1000, seed: int = 0) -> Trace:
    """Lengths that nobody measured: exponential, 161 tokens of prompt and 338 of output on average.

    These are the means that the PagedAttention paper has for ShareGPT.
    """
    random = np.random.default_rng(seed)
    builder = TraceBuilder()
    prompts, outputs = (np.ceil(random.exponential(mean, num_requests)) for mean in (161, 338))
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        builder.add(None, int(prompt), int(output))
    return builder.build(f"synthetic lengths (exponential, seed {seed})", "synthetic", "")
