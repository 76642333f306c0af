"""Programs that run the kernels, one of each sanitizer."""

import functools
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]
import toolchain  # noqa: E402


@functools.cache
def _runner(variant):
    kernels = sorted(toolchain.SOURCES.glob("*.cu"))
    return toolchain.program(variant, toolchain.HERE / "runner.cpp", kernels)


@pytest.fixture(scope="session")
def runner():
    """The program of a variant."""
    return _runner
