"""How many sequences fit: the arithmetic of a whole deployment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvfolio import _checks

from .caches import Attention, Latent, State, heads_per_rank
from .deployment import Deployment
from .errors import ConfigError, NoRoom
from .groups import Group, make_groups, state_bytes
from .model_shape import ModelShape
from .reserve import Reserve, reserves

BOOKKEEPING_PER_BLOCK = 88
"""Bytes that a `BlockPool` takes for each block, in the host's memory; a bit more for the blank ones."""
TABLE_ENTRY = 4
"""Bytes of a block table's entry: int32."""
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (1024, 8192, 32768)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage; all bytes are those of each of its ranks.

    `kv_bytes` is what is there for the KV, `scale_bytes` the scales per tensor in it, `state_bytes` what one
    sequence's states take. `reserve`: None if it is not known, and then not needed.
    """

    layers: range
    kv_bytes: int
    scale_bytes: int
    state_bytes: int
    reserve: Reserve | None


@dataclass(frozen=True)
class LengthPlan:
    """How many sequences of one length fit.

    Attributes
    ----------
    length : int
        Tokens of each sequence.
    sequences : int
        So many fit at once, all at full length, nothing shared.
    tightest_stage : int
        The stage that decides.
    bytes_per_sequence : tuple of int
        By stage, on each rank: blocks and states.
    blocks_per_sequence : tuple of int
        By group.
    num_blocks : tuple of int
        By group: blocks to make, the null block included.
    short_by : int
        Bytes that a rank lacks for one sequence; 0 if one fits.
    table_bytes, bookkeeping_bytes : int
        What the block tables of these sequences take on the device, and the pools in the host's memory.
    """

    length: int
    sequences: int
    tightest_stage: int
    bytes_per_sequence: tuple[int, ...]
    blocks_per_sequence: tuple[int, ...]
    num_blocks: tuple[int, ...]
    short_by: int
    table_bytes: int
    bookkeeping_bytes: int


@dataclass(frozen=True)
class BlockSizeRow:
    """What another block size would mean.

    `empty_slots`: expected in a sequence's last block, if its length leaves any remainder equally likely.
    `empty_share`, `sequences`: for each length; the share is of the slots that a sequence holds in a group
    that keeps all tokens. `bookkeeping_bytes`: most of all lengths.
    """

    block_size: int
    bytes_per_block: int
    empty_slots: float
    empty_share: tuple[float, ...]
    sequences: tuple[int, ...]
    bookkeeping_bytes: int


@dataclass(frozen=True)
class SizingPlan:
    """The answer of `plan`. Bytes are those of one rank, unless said otherwise."""

    model: str
    source: str
    kv_dtype: str
    scales: str
    tensor_parallel: int
    replicas: int  # ranks that hold the same KV head
    groups: tuple[Group, ...]
    stages: tuple[Stage, ...]
    lengths: tuple[LengthPlan, ...]
    block_sizes: tuple[BlockSizeRow, ...]
    notes: tuple[str, ...]


def plan(
    shape: ModelShape,
    deployment: Deployment,
    lengths: Sequence[int] = LENGTHS,
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    weight_bytes: int | None = None,
) -> SizingPlan:
    """Say what a model's KV cache takes and how many sequences fit.

    Parameters
    ----------
    shape : ModelShape
        The model.
    deployment : Deployment
        The memory, and how it is used.
    lengths : sequence of int
        Tokens of a sequence, at least 1 each.
    block_sizes : sequence of int
        To be compared.
    weight_bytes : int, optional
        What the files of the weights take, where `deployment.weights` does not say otherwise.

    Raises
    ------
    ConfigError
        The configuration lacks what an estimate needs, or the heads cannot be split over so many ranks.
    NoRoom
        Not one block fits.
    TypeError, ValueError
        Another argument is wrong; the message names it.
    """
    lengths = _numbers("lengths", lengths)
    block_sizes = _numbers("block_sizes", block_sizes)
    _check_split(shape, deployment.tensor_parallel)
    ranges = deployment.stages(len(shape.layers))
    stages, notes = _stages(shape, deployment, ranges, weight_bytes)
    groups = _groups(shape, deployment, ranges)
    _check_room(stages, groups)
    longest = shape.max_position_embeddings
    if longest is not None and max(lengths) > longest:
        notes.append(f"the model was made for at most {longest} tokens (max_position_embeddings)")
    kv = deployment.kv_format(shape.dtype)
    return SizingPlan(
        model=shape.name,
        source=shape.source,
        kv_dtype=kv.dtype,
        scales=kv.scales,
        tensor_parallel=deployment.tensor_parallel,
        replicas=_replicas(shape, deployment.tensor_parallel),
        groups=groups,
        stages=stages,
        lengths=tuple(_fit(stages, groups, length) for length in lengths),
        block_sizes=tuple(_compare(shape, deployment, stages, ranges, size, lengths) for size in block_sizes),
        notes=(*shape.notes, *notes),
    )


def _numbers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise TypeError(f"{name} must be a sequence of integers, not {type(values).__name__}")
    numbers = tuple(_checks.integer(name, value, 1) for value in values)
    if not numbers:
        raise ValueError(f"{name} must have at least one number, not none")
    return numbers


def _check_split(shape: ModelShape, ranks: int) -> None:
    """Heads go whole to a rank."""
    if shape.num_attention_heads > 1 and shape.num_attention_heads % ranks:
        raise shape.fields.error(
            "num_attention_heads",
            f"must be a multiple of tensor_parallel, {ranks}, not {shape.num_attention_heads}",
        )
    for cache in (cache for layer in shape.layers for cache in layer):
        if isinstance(cache, Attention) and heads_per_rank(cache.num_kv_heads, ranks) is None:
            raise shape.fields.error(
                "num_key_value_heads",
                f"must be a multiple or a divisor of tensor_parallel, {ranks}, not {cache.num_kv_heads}",
            )
        if isinstance(cache, State):
            for part in cache.parts:
                if heads_per_rank(part.heads, ranks) is None:
                    raise shape.fields.error(
                        "the heads of states",
                        f"must be a multiple or a divisor of tensor_parallel, {ranks}, not {part.heads}",
                    )


def _replicas(shape: ModelShape, ranks: int) -> int:
    """On how many ranks the most replicated cache lies."""
    most = 1
    for cache in (cache for layer in shape.layers for cache in layer):
        if isinstance(cache, Latent):
            most = ranks
        elif isinstance(cache, Attention):
            most = max(most, ranks // cache.num_kv_heads)
    return most


def _stages(
    shape: ModelShape, deployment: Deployment, ranges: tuple[range, ...], weight_bytes: int | None
) -> tuple[tuple[Stage, ...], list[str]]:
    found: Sequence[Reserve | None]
    try:
        found, notes = reserves(shape, deployment, weight_bytes, ranges)
    except ConfigError as error:
        if deployment.memory is not None:
            raise
        found, notes = [None] * len(ranges), [f"weights and activations are not estimated: {error}"]
    kv = deployment.kv_format(shape.dtype)
    stages = []
    for number, (layers, reserve) in enumerate(zip(ranges, found, strict=True)):
        held = [cache for layer in layers for cache in shape.layers[layer]]
        if deployment.memory is not None:
            assert reserve is not None
            assert isinstance(deployment.memory, tuple)
            usable = int(deployment.memory[number] * Fraction(str(float(deployment.utilization))))
            left = usable - reserve.weights - reserve.activations
        else:
            assert isinstance(deployment.kv_memory, tuple)
            left = deployment.kv_memory[number]
        scale_bytes = sum(cache.fixed_bytes(kv) for cache in held if not isinstance(cache, State))
        state = state_bytes([shape.layers[layer] for layer in layers], deployment.tensor_parallel)
        stages.append(Stage(layers, left, scale_bytes, state, reserve))
    return tuple(stages), notes


def _groups(shape: ModelShape, deployment: Deployment, ranges: tuple[range, ...]) -> tuple[Group, ...]:
    return make_groups(
        [[shape.layers[layer] for layer in layers] for layers in ranges],
        deployment.kv_format(shape.dtype),
        ranks=deployment.tensor_parallel,
        block_size=deployment.block_size,
        alignment=deployment.alignment,
        ignore_windows=deployment.ignore_windows,
    )


def _check_room(stages: tuple[Stage, ...], groups: tuple[Group, ...]) -> None:
    """There must be a null block and another of each group."""
    for number, stage in enumerate(stages):
        needed = stage.scale_bytes + sum(2 * group.bytes_per_block[number] for group in groups)
        if stage.kv_bytes < needed:
            raise NoRoom(number, needed - stage.kv_bytes, stage.kv_bytes)


def _usable(stages: tuple[Stage, ...], groups: tuple[Group, ...]) -> list[int]:
    """What each stage has for sequences: scales and null blocks are taken off."""
    return [
        stage.kv_bytes - stage.scale_bytes - sum(group.bytes_per_block[number] for group in groups)
        for number, stage in enumerate(stages)
    ]


def _fit(stages: tuple[Stage, ...], groups: tuple[Group, ...], length: int) -> LengthPlan:
    """As many sequences as the tightest stage holds, and what is left made blocks of the first group."""
    blocks = [group.blocks(length) for group in groups]
    usable = _usable(stages, groups)
    taken = [
        stage.state_bytes
        + sum(count * group.bytes_per_block[number] for count, group in zip(blocks, groups, strict=True))
        for number, stage in enumerate(stages)
    ]
    if not any(taken):
        raise ValueError("shape must have a layer that keeps something, not none")
    sequences, tightest = min(
        (usable[number] // taken[number], number) for number in range(len(stages)) if taken[number]
    )
    num_blocks = [1 + sequences * count for count in blocks]
    if groups:
        first = groups[0].bytes_per_block
        num_blocks[0] += min(
            (usable[number] - sequences * taken[number]) // first[number]
            for number in range(len(stages))
            if first[number]
        )
    lacking = max(need - room for need, room in zip(taken, usable, strict=True))
    return LengthPlan(
        length=length,
        sequences=sequences,
        tightest_stage=tightest,
        bytes_per_sequence=tuple(taken),
        blocks_per_sequence=tuple(blocks),
        num_blocks=tuple(num_blocks),
        short_by=max(0, lacking),
        table_bytes=sequences * TABLE_ENTRY * sum(-(-length // group.block_size) for group in groups),
        bookkeeping_bytes=BOOKKEEPING_PER_BLOCK * sum(num_blocks),
    )


def _compare(
    shape: ModelShape,
    deployment: Deployment,
    stages: tuple[Stage, ...],
    ranges: tuple[range, ...],
    block_size: int,
    lengths: tuple[int, ...],
) -> BlockSizeRow:
    groups = _groups(shape, replace(deployment, block_size=block_size), ranges)
    try:
        _check_room(stages, groups)
        fits = [_fit(stages, groups, length) for length in lengths]
    except NoRoom:
        fits = []
    empty = (block_size - 1) / 2
    return BlockSizeRow(
        block_size=block_size,
        bytes_per_block=max(
            sum(group.bytes_per_block[number] for group in groups) for number in range(len(stages))
        ),
        empty_slots=empty,
        empty_share=tuple(empty / (length + empty) for length in lengths),
        sequences=tuple(fit.sequences for fit in fits) or (0,) * len(lengths),
        bookkeeping_bytes=max((fit.bookkeeping_bytes for fit in fits), default=0),
    )
