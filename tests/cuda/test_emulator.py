"""The emulator: what it computes, and what it refuses, by name of thread and line."""

from __future__ import annotations

import functools
import os

import programs
import pytest
import toolchain
from harness import LANDINGS, ORDERS


@functools.cache
def program(variant):
    return toolchain.program(variant, toolchain.HERE / "emulator_cases.cpp")


def run(case, variant="plain", order="ascending", landing="late", seed=1):
    """Status and what was said."""
    words = [case, str(ORDERS[order]), str(LANDINGS[landing]), str(seed)]
    command = [str(program(variant)), *words]
    status, out, err = programs.run("emulator_cases", command, os.environ | toolchain.ENVIRONMENT)
    return status, out + err


def numbers(text):
    return [float(word) for word in text.split()]


SCHEDULES = [("ascending", "late", 1), ("descending", "early", 1), ("shuffled", "either", 2)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("variant", ["plain", "asan", "tsan"])
class TestRightKernels:
    def test_a_barrier_shows_what_others_wrote(self, variant, schedule):
        assert run("barrier", variant, *schedule) == (0, "".join(f"{(i + 1) % 64} " for i in range(64)))
        assert run("syncwarp", variant, *schedule) == (0, "".join(f"{(i + 1) % 32} " for i in range(32)))

    def test_copies_have_landed_after_the_wait(self, variant, schedule):
        status, text = run("copy", variant, *schedule)
        assert (status, numbers(text)) == (0, [*range(14), 0, 0])

    def test_no_count_is_lost(self, variant, schedule):
        status, text = run("count", variant, *schedule)
        assert status == 0 and text.startswith("320 first ")

    def test_exited_threads_are_not_waited_for(self, variant, schedule):
        assert run("exited threads and a barrier", variant, *schedule) == (0, "")

    @pytest.mark.parametrize("dtype", ["half", "bfloat16"])
    def test_fragments_lie_as_documented(self, variant, schedule, dtype):
        assert run(f"multiply {dtype}", variant, *schedule) == (0, "equal")

    def test_shuffles_and_votes(self, variant, schedule):
        status, text = run("shuffle", variant, *schedule)
        lanes = range(32)
        votes = sum(1 << i for i in range(0, 16, 3)) + 1
        expected = [3] * 32 + [i ^ 5 for i in lanes] + [max(i - 2, i if i < 2 else 0) for i in lanes]
        expected += [i + 2 if i < 30 else i for i in lanes] + [votes] * 32
        assert (status, numbers(text)) == (0, expected)


def test_seeds_choose_among_schedules():
    first = {run("count", order="shuffled", seed=seed)[1] for seed in range(8)}
    assert len(first) > 3
    assert run("count", order="shuffled", seed=5) == run("count", order="shuffled", seed=5)


def test_a_copy_that_is_not_waited_for_may_not_have_landed():
    assert numbers(run("copy without wait", landing="early")[1]) == [*range(14), 0, 0]
    assert any(x != x for x in numbers(run("copy without wait", landing="late")[1]))
    late = numbers(run("first group", landing="late")[1])
    assert late[0] == 1 and late[1] != 2


def test_a_copy_may_land_at_once():
    assert 0 in numbers(run("copy over what is read", landing="early")[1])
    assert run("copy over what is read", "tsan", landing="early")[0] == 72


REFUSED = {
    "barriers at two places": r"__syncthreads at different places",
    "barrier and shuffle": r"deadlock: some lanes of a warp never come",
    "exited lane": r"__shfl_sync names lane 5, which has ended",
    "own lane": r"mask, 0000fffe, that does not have its own lane",
    "source lane": r"__shfl_sync reads lane 20, which its mask, 0000ffff, does not have",
    "copy of 3 bytes": r"is of 4, 8 or 16 bytes, not 3",
    "copy misaligned": r"asynchronous copy of 16 bytes is from .* no multiples",
    "copy beyond": r"goes to byte 64 of the block's 64",
    "copy never waited for": r"ended before its asynchronous copies",
    "ldmatrix misaligned": r"ldmatrix needs an address that is a multiple of 16",
    "ldmatrix beyond": r"ldmatrix reads byte 64 of the block's 64",
    "too many threads": r"1 to 1024 threads, not 1025 x 1 x 1",
    "too much shared memory": r"up to 227 KiB of shared memory, not 233472",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_kernel_may_not_do_is_refused_by_thread_and_line(case):
    import re

    status, text = run(case)
    assert status == 70 and re.search(REFUSED[case], text), text
    assert re.search(r"\w+\.cpp:\d+:", text)
    if not case.startswith("too"):
        assert "thread (" in text and "of block (0,0,0)" in text


@pytest.mark.parametrize(
    "case", ["shared overflow", "global overflow", "copy from outside", "vector misaligned"]
)
def test_addresses_outside_are_reported_by_thread_and_line(case):
    status, text = run(case, "asan")
    assert status == 71 and "emulator_cases.cpp:" in text, text
    assert case == "vector misaligned" or "emulator: that was thread (" in text


RACES = ["no barrier", "shuffle orders nothing", "write after the barrier", "blocks write one place"]


@pytest.mark.parametrize("case", RACES)
@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_races_are_reported_by_thread_and_line(case, order):
    status, text = run(case, "tsan", order)
    assert status == 72 and "data race" in text and "emulator_cases.cpp:" in text, text
    assert "of block 0,0,0" in text or "of block 1,0,0" in text
