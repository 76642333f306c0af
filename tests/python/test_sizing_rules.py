"""Rules that every sizing keeps, whatever the model and the memory."""

from __future__ import annotations

from typing import Any

import model_configs as models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvfolio.sizing import (
    BOOKKEEPING_PER_BLOCK,
    Deployment,
    ModelShape,
    NoRoom,
    SizingPlan,
    format_bytes,
    parse_bytes,
    plan,
)

SHAPES = {name: ModelShape.from_config(config) for name, config in models.ALL.items()}
LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=3)


@st.composite
def deployments(draw: st.DrawFn) -> tuple[ModelShape, dict[str, Any]]:
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    dtype = draw(st.sampled_from(["bfloat16", "float32", "int8"]))
    stages = draw(st.integers(1, 4))
    options = {
        "block_size": draw(st.integers(1, 130)),
        "alignment": draw(st.sampled_from([1, 256, 4096])),
        "kv_dtype": dtype,
        "scales": draw(st.sampled_from(["per-tensor", "per-token-head"])) if dtype == "int8" else None,
        "pipeline_parallel": stages,
        "kv_memory": draw(st.lists(st.integers(2**30, 2**37), min_size=stages, max_size=stages)),
        "ignore_windows": draw(st.booleans()),
    }
    return shape, options


def size(shape: ModelShape, options: dict[str, Any], lengths: list[int]) -> SizingPlan:
    return plan(shape, Deployment(**options), lengths, block_sizes=[16])


def refusal(shape: ModelShape, options: dict[str, Any]) -> NoRoom | None:
    try:
        size(shape, options, [1])
    except NoRoom as error:
        return error
    return None


@given(deployments(), LENGTHS)
def test_blocks_and_states_never_exceed_the_memory_and_one_more_sequence_would(
    case: tuple[ModelShape, dict[str, Any]], lengths: list[int]
) -> None:
    shape, options = case
    try:
        found = size(shape, options, lengths)
    except NoRoom:
        return
    for row in found.lengths:
        assert row.sequences >= 0
        assert (row.short_by > 0) == (row.sequences == 0)
        fits_one_more = True
        for number, stage in enumerate(found.stages):
            blocks = zip(row.num_blocks, found.groups, strict=True)
            pools = sum(count * group.bytes_per_block[number] for count, group in blocks)
            assert (
                pools + row.sequences * stage.state_bytes + stage.scale_bytes <= options["kv_memory"][number]
            )
            null = sum(group.bytes_per_block[number] for group in found.groups)
            more = (row.sequences + 1) * row.bytes_per_sequence[number]
            fits_one_more &= null + more + stage.scale_bytes <= options["kv_memory"][number]
        assert not fits_one_more
        for count, each in zip(row.num_blocks, row.blocks_per_sequence, strict=True):
            assert count - 1 >= row.sequences * each


@given(deployments(), LENGTHS, st.integers(0, 2**36))
def test_more_memory_is_never_fewer_sequences(
    case: tuple[ModelShape, dict[str, Any]], lengths: list[int], more: int
) -> None:
    shape, options = case
    try:
        found = size(shape, options, lengths)
    except NoRoom:
        return
    richer = size(shape, {**options, "kv_memory": [size + more for size in options["kv_memory"]]}, lengths)
    for row, other in zip(found.lengths, richer.lengths, strict=True):
        assert other.sequences >= row.sequences
        assert sum(other.num_blocks) >= sum(row.num_blocks) or other.sequences > row.sequences


@given(deployments(), st.integers(1, 100_000), st.integers(0, 100_000))
def test_longer_sequences_are_never_more(
    case: tuple[ModelShape, dict[str, Any]], length: int, longer_by: int
) -> None:
    shape, options = case
    try:
        short, long = size(shape, options, [length, length + longer_by]).lengths
    except NoRoom:
        return
    assert long.sequences <= short.sequences


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 6))
def test_ranks_sum_up_to_the_whole_and_what_is_replicated(name: str, power: int) -> None:
    shape, ranks = SHAPES[name], 2**power
    if shape.num_attention_heads % ranks:
        return
    options = {"kv_memory": 2**40}
    whole = size(shape, options, [1000])
    parts = size(shape, {**options, "tensor_parallel": ranks}, [1000])
    for group, part in zip(whole.groups, parts.groups, strict=True):
        assert ranks * part.bytes_per_token[0] == parts.replicas * group.bytes_per_token[0]


@given(deployments())
def test_stages_sum_up_to_the_whole(case: tuple[ModelShape, dict[str, Any]]) -> None:
    shape, options = case
    whole = size(shape, {**options, "pipeline_parallel": 1, "kv_memory": 2**40}, [1000])
    parts = size(shape, {**options, "kv_memory": 2**40}, [1000])
    for group, part in zip(whole.groups, parts.groups, strict=True):
        assert sum(part.bytes_per_token) == group.bytes_per_token[0]
    assert sum(stage.state_bytes for stage in parts.stages) == whole.stages[0].state_bytes
    assert sum(stage.scale_bytes for stage in parts.stages) == whole.stages[0].scale_bytes


@given(deployments(), st.integers(0, 2**31))
def test_no_room_is_told_by_how_much(case: tuple[ModelShape, dict[str, Any]], memory: int) -> None:
    """With what was short there is room, with one byte less there is none."""
    shape, options = case
    options = {**options, "pipeline_parallel": 1, "kv_memory": memory}
    error = refusal(shape, options)
    if error is None:
        return
    assert error.short_by > 0
    assert str(error).startswith(f"0 blocks, short by {error.short_by:,} bytes")
    assert refusal(shape, {**options, "kv_memory": memory + error.short_by}) is None
    assert refusal(shape, {**options, "kv_memory": memory + error.short_by - 1}) is not None


def test_a_reserve_above_the_memory_is_no_room_and_not_a_negative_number() -> None:
    options = {"memory": 2**30, "weights": 2**34, "activations": 0, "utilization": 1.0}
    with pytest.raises(NoRoom, match="nothing is left for the KV") as caught:
        size(SHAPES["LLAMA_8B"], options, [1])
    # What is lacking for the weights, and two blocks of 2 MiB.
    assert caught.value.short_by == 2**34 - 2**30 + 2 * 2**21


def test_short_by_is_what_one_sequence_lacks() -> None:
    shape = SHAPES["LLAMA_8B"]
    (row,) = size(shape, {"kv_memory": 2**30}, [8192]).lengths
    assert (row.sequences, row.short_by) == (0, 2**21)  # 512 blocks fit, one of them null
    (row,) = size(shape, {"kv_memory": 2**30 + 2**21}, [8192]).lengths
    assert (row.sequences, row.short_by) == (1, 0)


def test_utilization_is_taken_exactly() -> None:
    """0.7 as a binary number is a bit less than seven tenths."""
    options = {"memory": 10 * 2**30, "utilization": 0.7, "weights": 0, "activations": 0}
    assert size(SHAPES["LLAMA_8B"], options, [1]).stages[0].kv_bytes == 7 * 2**30


def test_the_pool_takes_what_is_said_a_block() -> None:
    """Of a pool that is out of the question, the pool itself says what it would take."""
    import re
    import subprocess
    import sys

    resource = pytest.importorskip("resource")
    program = (
        "import kvfolio as kv\ntry: kv.BlockPool(2**31 - 2, 16)\nexcept MemoryError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36)),
    )  # fmt: skip
    found = re.search(r"takes (\d+) bytes", done.stdout)
    assert found is not None
    assert int(found[1]) == (2**31 - 2) * BOOKKEEPING_PER_BLOCK
    assert BOOKKEEPING_PER_BLOCK <= 96


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("1024", 1024), ("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), ("1.5MiB", 3 * 2**19),
        ("2tib", 2**41), ("7 kB", 7000), ("12 B", 12), ("0.3 kB", 300),
    ],
)  # fmt: skip
def test_bytes_are_read(text: str, number: int) -> None:
    assert parse_bytes("--memory", text) == number


@pytest.mark.parametrize("text", ["", "-1", "-80GiB", "80 GX", "GiB", "1e9", "nan", "inf", "80GiB x", "١٢"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--memory must be a number that is not negative") as caught:
        parse_bytes("--memory", text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**29, "1.50 GiB"), (5 * 2**50, "5,120.00 TiB")],
)
def test_bytes_are_written(number: int, text: str) -> None:
    assert format_bytes(number) == text
