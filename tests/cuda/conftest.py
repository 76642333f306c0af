"""Programs that run the kernels, one of each sanitizer."""

import functools
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "python")]
import programs  # noqa: E402
import toolchain  # noqa: E402


@functools.cache
def _runner(variant):
    if variant == "plain":
        return toolchain.runner(variant)
    # Sanitizers look at two of one template: at heads of 64 they differ in stages, and in how they multiply.
    return toolchain.runner(variant, dtypes=("bfloat16", "float32"), defines=("KVFOLIO_HEAD_DIMS=64",))


@pytest.fixture(scope="session")
def runner():
    """The program of a variant."""

    def of(variant):
        try:
            return _runner(variant)
        except toolchain.BuildFailed as failure:  # all tests would fail of it, after a while each
            pytest.exit(f"{variant}: {failure}", returncode=1)

    return of


def pytest_terminal_summary(terminalreporter):
    """What all of it took of the CPU, compilers and programs by kind."""
    terminalreporter.write_line("CPU seconds (user and system) of what was started:")
    for line in programs.report():
        terminalreporter.write_line(line)
