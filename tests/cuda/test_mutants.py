"""Kernels that are broken at one place: for each, a test of ours fails, and how is told here.

A mutant is a line of a source and what it is replaced by. The tests are those of the other files, which pass
with the sources as they are; they are called as pytest calls them, with a program of the broken sources.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import test_attention_kernels as attention
import test_cache_kernels as cache
import toolchain
from harness import Failed

SHUFFLED, DESCENDING = ("shuffled", "either", 5), ("descending", "early", 1)


def silent(variant, dtype="bfloat16", schedule=SHUFFLED):
    return lambda runner: attention.test_sanitizers_are_silent(runner, variant, dtype, schedule)


def options(*names):
    return lambda runner: attention.test_options_work_alone_and_in_every_combination(runner, names)


def layouts(runner):
    attention.test_every_layout_and_block_size(runner, "HND", 16)


def far_pages(runner):
    attention.test_pages_beyond_four_gibibytes_are_reached(runner, 1)


def work_list(variant):
    return lambda runner: attention.TestWorkLists().test_every_tile_of_rows_has_all_its_chunks_once(
        runner, variant
    )


def append(variant):
    return lambda runner: cache.test_append_puts_each_token_into_its_slot_and_touches_nothing_else(
        runner, variant, 64, 2
    )


def copies(variant):
    return lambda runner: cache.test_copies_move_whole_blocks_of_every_array_in_one_launch(
        runner, variant, 64, 2
    )


def table(variant):
    return lambda runner: cache.test_table_updates_change_the_cells_that_they_name(runner, variant)


WRONG, REFUSED, ADDRESS, RACE = "a wrong result", "the emulator", "AddressSanitizer", "ThreadSanitizer"
SEEN = {70: REFUSED, 71: ADDRESS, 72: RACE}  # by the status that a program ends with


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    line: str
    instead: str
    killer: object
    seen_as: str
    dtype: str = "bfloat16"  # what the killer needs; the other kernels of attention are not built


MUTANTS = [
    Mutant(
        "no barrier before a tile is used",
        "attention.cuh",
        "__syncthreads();  // the tile is there for all",
        "//",
        silent("tsan"),
        RACE,
    ),
    Mutant(
        "no barrier before results take the place of keys",
        "attention.cuh",
        "__syncthreads();  // nobody reads queries",
        "//",
        silent("tsan"),
        RACE,
    ),
    Mutant(
        "no barrier between writing and reading results",
        "attention.cuh",
        "    __syncthreads();\n    constexpr int kQuads",
        "    constexpr int kQuads",
        silent("tsan"),
        RACE,
    ),
    Mutant(
        "a tile is loaded over the one that is worked on",
        "attention.cuh",
        "      __syncthreads();  // the tile is there for all; "
        "all are done with the one before, whose stage is free\n"
        "      if (tile + S::kStages - 1 < last) load_tile(tile + S::kStages - 1);\n",
        "      if (tile + S::kStages - 1 < last) load_tile(tile + S::kStages - 1);\n      __syncthreads();\n",
        silent("tsan", schedule=DESCENDING),
        RACE,
    ),
    Mutant(
        "no wait for a tile",
        "attention.cuh",
        "__pipeline_wait_prior(S::kStages - 2);",
        "__pipeline_wait_prior(S::kStages - 1);",
        options("sliding_window"),
        REFUSED,
    ),
    Mutant(
        "one page too many",
        "attention.cuh",
        "key >= range.end) return -1;",
        "key >= range.end + 16) return -1;",
        layouts,
        REFUSED,
    ),
    Mutant(
        "keys that nobody sees are not zeros",
        "attention.cuh",
        "const size_t zeros = seen ? 0 : 16;",
        "const size_t zeros = 0;",
        layouts,
        REFUSED,
    ),
    Mutant(
        "places of one tile only",
        "tile.cuh",
        "kPlaces = 2;",
        "kPlaces = 1;",
        silent("tsan"),
        RACE,
    ),
    Mutant(
        "a 32-bit offset of a page",
        "attention.cuh",
        "return page * side.block_stride",
        "return static_cast<int>(page * side.block_stride)",
        far_pages,
        WRONG,
        "float32",
    ),
    Mutant(
        "swapped strides",
        "attention.cuh",
        "offset * side.token_stride + kv_head * side.head_stride",
        "offset * side.head_stride + kv_head * side.token_stride",
        options("sliding_window"),
        WRONG,
    ),
    Mutant(
        "a chunk ends a tile early",
        "attention.cuh",
        "min(range.last_tile, first + per_chunk)",
        "min(range.last_tile, first + per_chunk - (item.chunk == 1))",
        options(),
        WRONG,
        "float32",
    ),
    Mutant(
        "chunks overlap",
        "attention.cuh",
        "item.chunk * per_chunk;",
        "item.chunk * per_chunk - (item.chunk == 2);",
        options(),
        WRONG,
        "float32",
    ),
    Mutant(
        "the last chunk is not merged",
        "attention.cuh",
        "      for (int c = 0; c < item.num_chunks; c++) {",
        "      for (int c = 0; c < item.num_chunks - 1; c++) {",
        options(),
        WRONG,
        "float32",
    ),
    Mutant(
        "values' fragments are not transposed",
        "tile.cuh",
        "load_matrices<true>(values",
        "load_matrices<false>(values",
        options("sliding_window"),
        WRONG,
    ),
    Mutant(
        "keys' fragments change places",
        "tile.cuh",
        "first_key + 8 * n + matrix / 2 * 8 + row, 2 * depth + matrix % 2",
        "first_key + 8 * n + matrix % 2 * 8 + row, 2 * depth + matrix / 2",
        options("sliding_window"),
        WRONG,
    ),
    Mutant(
        "weights' lower half above the upper",
        "tile.cuh",
        "pack<T>(weights[n][0], weights[n][1]), pack<T>(weights[n][2], weights[n][3])",
        "pack<T>(weights[n][2], weights[n][3]), pack<T>(weights[n][0], weights[n][1])",
        options("sliding_window"),
        WRONG,
    ),
    Mutant(
        "queries see the next key",
        "attention.cuh",
        "key <= position &&",
        "key <= position + 1 &&",
        options(),
        WRONG,
        "float32",
    ),
    Mutant(
        "a window of one more",
        "attention.cuh",
        "key > position - a.window)",
        "key >= position - a.window)",
        options("sliding_window"),
        WRONG,
    ),
    Mutant(
        "sinks of the neighbour",
        "attention.cuh",
        "exp2f(a.sinks[head] * kLog2E - largest)",
        "exp2f(a.sinks[head ^ 1] * kLog2E - largest)",
        options("sinks"),
        WRONG,
        "float16",
    ),
    Mutant(
        "the soft cap after the bias",
        "attention.cuh",
        "if (a.soft_cap > 0) score",
        "score += slopes[i / 2] * 1e-2f; if (a.soft_cap > 0) score",
        options("logit_softcap", "alibi_slopes"),
        WRONG,
        "float32",
    ),
    Mutant(
        "the sum is cleared while it is read",
        "plan_attention.cuh",
        "__syncthreads();  // before it is cleared again",
        "//",
        work_list("tsan"),
        RACE,
    ),
    Mutant(
        "merges are not counted atomically",
        "plan_attention.cuh",
        "atomicAdd(&header->num_merges, 1)",
        "header->num_merges++",
        work_list("tsan"),
        RACE,
    ),
    Mutant(
        "items beyond the list",
        "plan_attention.cuh",
        "if (place >= a.capacity) continue;",
        "",
        lambda runner: attention.TestWorkLists().test_too_small_a_list_is_told_and_not_overrun(runner),
        ADDRESS,
    ),
    Mutant(
        "negative slots are written",
        "append.cuh",
        "if (slot < 0) return;",
        "",
        append("asan"),
        ADDRESS,
    ),
    Mutant(
        "a 32-bit offset of a slot",
        "append.cuh",
        "block * to.block_stride",
        "static_cast<int>(block * to.block_stride)",
        cache.test_append_reaches_slots_beyond_four_gibibytes,
        WRONG,
    ),
    Mutant(
        "a token too many is copied",
        "copy_blocks.cuh",
        "i < a.block_size * per_token;",
        "i < (a.block_size + 1) * per_token;",
        copies("plain"),
        WRONG,
    ),
    Mutant(
        "a copy the other way round",
        "copy_blocks.cuh",
        "source = pair[0], target = pair[1]",
        "source = pair[1], target = pair[0]",
        copies("plain"),
        WRONG,
    ),
    Mutant(
        "an update too many",
        "update_table.cuh",
        "i >= a.num_updates",
        "i > a.num_updates",
        table("asan"),
        ADDRESS,
    ),
]


def runner_of(headers, dtype):
    """Programs of these sources, for heads of 64 elements and one storage type."""

    def runner(variant):
        return toolchain.runner(variant, headers, (dtype,), ("KVFOLIO_HEAD_DIMS=64",))

    return runner


def sources(name):
    folder = toolchain.BUILT / "mutants" / name.replace(" ", "-").replace("'", "")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(toolchain.SOURCES, folder)
    return folder


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_killed(mutant):
    folder = sources(mutant.name)
    file = folder / mutant.file
    text = file.read_text()
    assert text.count(mutant.line) == 1, "the line is not there, or not once"
    file.write_text(text.replace(mutant.line, mutant.instead))
    with pytest.raises((AssertionError, Failed)) as caught:
        mutant.killer(runner_of(folder, mutant.dtype))
    status = caught.value.status if isinstance(caught.value, Failed) else None
    assert SEEN.get(status, WRONG) == mutant.seen_as, caught.value
    shutil.rmtree(folder)
