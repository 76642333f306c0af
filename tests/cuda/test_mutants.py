"""Kernels that are broken at one place: for each, a test of ours fails, and what it fails of is told here.

Where the fault is of memory or of order, a sanitizer has to report it: AddressSanitizer, for which every slot
that no sequence owns is forbidden, or ThreadSanitizer. What only computes something else cannot be seen by
either, and is for the tests against float64. The tests are those of the other files, which pass with the
sources as they are; they are called as pytest calls them, with a program of the broken sources.
"""

from __future__ import annotations

import functools
import re

import mutants
import pytest
import test_attention_kernels as attention
import test_cache_kernels as cache
import toolchain
from harness import Failed
from mutants import ADDRESS, NUMERICS, RACE, Edit, Mutant, one, without_barrier

SHUFFLED, DESCENDING, LATE = ("shuffled", "either", 5), ("descending", "early", 1), ("ascending", "late", 1)


def silent(variant, schedule=SHUFFLED):
    return lambda runner: attention.test_sanitizers_are_silent(runner, variant, "bfloat16", schedule)


def options(*names):
    """Of the combinations of options, those that are run in bfloat16 and plain."""
    return lambda runner: attention.test_options_work_alone_and_in_every_combination(runner, names)


def layout(name, block_size=16):
    return lambda runner: attention.test_every_layout_and_block_size(runner, name, block_size)


def far_pages(runner):
    attention.test_pages_beyond_four_gibibytes_are_reached(runner, 1)


def work_list(runner):
    attention.TestWorkLists().test_every_tile_of_rows_has_all_its_chunks_once(runner, "tsan")


def short_list(runner):
    attention.TestWorkLists().test_too_small_a_list_is_told_and_not_overrun(runner)


def append(runner):
    cache.test_append_puts_each_token_into_its_slot_and_touches_nothing_else(runner, "asan", 64, 2)


def copies(variant):
    return lambda runner: cache.test_copies_move_whole_blocks_of_every_array_in_one_launch(
        runner, variant, 64, 2
    )


def table(runner):
    cache.test_table_updates_change_the_cells_that_they_name(runner, "asan")


LOAD = "if (tile + S::kStages - 1 < last) load_tile(tile + S::kStages - 1);"
MUTANTS = [
    # Order
    without_barrier("no barrier before the first places are read", silent("tsan"),
        "attention.cuh", "the places are there for all"),
    without_barrier("no barrier before a tile is used", silent("tsan"),
        "attention.cuh", "the tile is there for all"),
    without_barrier("no barrier before results take the place of keys", silent("tsan"),
        "attention.cuh", "// nobody reads queries"),
    without_barrier("no barrier between writing and reading results", silent("tsan"),
        "attention.cuh", "results of all warps"),
    Mutant(
        "a tile is loaded over the one that is worked on", RACE, silent("tsan", DESCENDING),
        (
            Edit("attention.cuh", "the tile is there for all", "__syncthreads();", ""),
            Edit("attention.cuh", LOAD, LOAD, LOAD + " __syncthreads();"),
        ),
    ),
    one("no wait for a tile", RACE, silent("tsan", LATE),
        "attention.cuh", "S::kStages - 2", "S::kStages - 1"),
    one("places of one tile only", RACE, silent("tsan"),
        "attention.cuh", "tile % S::kPlaces", "0", lines=2),
    without_barrier("the sum is cleared while it is read", work_list,
        "plan_attention.cuh", "// before it is cleared again"),
    without_barrier("the largest is read before all have told theirs", work_list,
        "plan_attention.cuh", "// all have told"),
    without_barrier("warps' totals are read before they are there", work_list,
        "plan_attention.cuh", "// totals of all warps"),
    one("merges are not counted atomically", RACE, work_list,
        "plan_attention.cuh", "atomicAdd(&header->num_merges, 1)", "header->num_merges++"),
    # Memory
    one("one page too many", ADDRESS, layout("HND"),
        "attention.cuh", "key >= range.end)", "key >= range.end + (MUTATED ? 16 : 0))"),
    one("a key too many at the end", ADDRESS, layout("NHD"),
        "work.cuh", "(rows.first + rows.count - 1) / group) + 1)",
        "(rows.first + rows.count - 1) / group) + (MUTATED ? 2 : 1))"),
    one("a key before the window", ADDRESS, attention.test_blocks_before_the_window_are_not_read,
        "work.cuh", "- window + 1)", "- window + (MUTATED ? 0 : 1))"),
    one("keys that nobody sees are not zeros", ADDRESS, layout("HND"),
        "attention.cuh", "seen ? 0 : 16", "0"),
    one("a 32-bit offset of a page", ADDRESS, far_pages,
        "attention.cuh", "page * side.block_stride", "static_cast<int>(page * side.block_stride)"),
    one("swapped strides", ADDRESS, layout("HND"),
        "attention.cuh", "offset * side.token_stride + kv_head * side.head_stride",
        "offset * side.head_stride + kv_head * side.token_stride"),
    one("items beyond the list", ADDRESS, short_list,
        "plan_attention.cuh", "place >= a.capacity", "false"),
    one("negative slots are written", ADDRESS, append,
        "append.cuh", "slot < 0", "false"),
    one("a 32-bit offset of a slot", ADDRESS, cache.test_append_reaches_slots_beyond_four_gibibytes,
        "append.cuh", "block * to.block_stride", "static_cast<int>(block * to.block_stride)"),
    one("a token too many is copied", ADDRESS, copies("asan"),
        "copy_blocks.cuh", "a.block_size * per_token", "(a.block_size + 1) * per_token"),
    one("an update too many", ADDRESS, table,
        "update_table.cuh", "i >= a.num_updates", "i > a.num_updates"),
    # Arithmetic
    one("a chunk ends a tile early", NUMERICS, options("alibi_slopes"),
        "attention.cuh", "first + per_chunk)", "first + per_chunk - (MUTATED && item.chunk == 1))"),
    one("chunks overlap", NUMERICS, options("alibi_slopes"),
        "attention.cuh", "item.chunk * per_chunk", "item.chunk * per_chunk - (item.chunk == 2)"),
    one("the last chunk is not merged", NUMERICS, options("alibi_slopes"),
        "attention.cuh", "item.num_chunks", "item.num_chunks - 1",
        at="      for (int c = 0; c < item.num_chunks; c++) {"),
    one("values' fragments are not transposed", NUMERICS, options("sliding_window"),
        "tile.cuh",
        "load_matrices<true>(values, v + chunk_offset<S>"
        "(first_key + 8 * n + matrix % 2 * 8 + row, column + matrix / 2));",
        "load_matrices<false>(values, v + chunk_offset<S>"
        "(first_key + 8 * n + matrix % 2 * 8 + row, column + matrix / 2));"),
    one("keys' fragments change places", NUMERICS, options("sliding_window"),
        "tile.cuh", "first_key + 8 * n + matrix / 2 * 8 + row, 2 * depth + matrix % 2",
        "first_key + 8 * n + (MUTATED ? matrix % 2 : matrix / 2) * 8 + row,"
        " 2 * depth + (MUTATED ? matrix / 2 : matrix % 2)"),
    one("weights' upper rows are the lower ones", NUMERICS, options("sliding_window"),
        "tile.cuh", "pack<T>(weights[n][0], weights[n][1])", "pack<T>(weights[n][2], weights[n][3])"),
    one("queries see the next key", NUMERICS, options("alibi_slopes"),
        "attention.cuh", "key <= position", "key <= position + 1"),
    one("a window of one more", NUMERICS, options("sliding_window"),
        "attention.cuh", "key > position - a.window", "key >= position - a.window"),
    one("sinks of the neighbour", NUMERICS, options("scale", "sinks"),
        "attention.cuh", "a.sinks[head]", "a.sinks[head ^ 1]", at="exp2f(a.sinks[head] * kLog2E - largest)"),
    one("the soft cap after the bias", NUMERICS, options("sliding_window", "logit_softcap", "alibi_slopes"),
        "attention.cuh", "if (a.soft_cap > 0) score",
        "if (MUTATED) score += slopes[i / 2] * 1e-2f;\n        if (a.soft_cap > 0) score"),
    one("a copy the other way round", NUMERICS, copies("plain"),
        "copy_blocks.cuh", "source = pair[0], target = pair[1]",
        "source = pair[MUTATED ? 1 : 0], target = pair[MUTATED ? 0 : 1]"),
]  # fmt: skip
SEEN = {70: "the emulator", 71: ADDRESS, 72: RACE}  # by the status that a program ends with


@pytest.fixture(scope="module")
def switched():
    """Programs of all mutants, for heads of 64 elements in bfloat16."""
    folder = mutants.sources(MUTANTS)
    return functools.cache(
        lambda variant: toolchain.runner(variant, folder, ("bfloat16",), ("KVFOLIO_HEAD_DIMS=64",))
    )


@pytest.mark.parametrize("test", [silent("asan"), silent("tsan"), options("alibi_slopes")])
def test_without_a_mutant_they_are_right(switched, test, monkeypatch):
    monkeypatch.delenv(mutants.SWITCH, raising=False)
    test(switched)


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[mutant.name for mutant in MUTANTS])
def test_every_mutant_is_killed(switched, number, monkeypatch):
    mutant = MUTANTS[number]
    monkeypatch.setenv(mutants.SWITCH, str(number))
    with pytest.raises((AssertionError, Failed)) as caught:
        mutant.killer(switched)
    seen_by = SEEN[caught.value.status] if isinstance(caught.value, Failed) else NUMERICS
    assert seen_by == mutant.seen_by, caught.value


def test_the_readme_has_them_all():
    rows = re.findall(r"^\| (.+) \| (.+) \|$", (toolchain.HERE / "README.md").read_text(), re.MULTILINE)
    start = rows.index(("mutant", "reported by")) + 1
    assert rows[start : start + len(MUTANTS)] == [(mutant.name, mutant.seen_by) for mutant in MUTANTS]
