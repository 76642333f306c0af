"""What is in the wheel that `make wheel` built."""

import zipfile
from pathlib import Path

import pytest

WHEELS = sorted((Path(__file__).parents[2] / "dist").glob("kvfolio-*.whl"))

SOURCES = [path.name for path in (Path(__file__).parents[2] / "cuda").iterdir()]

pytestmark = pytest.mark.skipif(not WHEELS, reason="no wheel in dist/: `make wheel` builds it")


@pytest.fixture(scope="module")
def names():
    with zipfile.ZipFile(WHEELS[-1]) as wheel:
        return wheel.namelist()


def test_the_wheel_is_under_ten_megabytes():
    assert WHEELS[-1].stat().st_size < 10_000_000


def test_the_wheel_holds_the_package_and_its_types(names):
    for name in (
        "__init__.py",
        "_native.abi3.so",
        "_native.pyi",
        "py.typed",
        "serving/__init__.py",
        "cli/__init__.py",
        *(f"cuda/{source}" for source in SOURCES),
    ):
        assert f"kvfolio/{name}" in names


def test_there_are_kernels_for_gpus():
    assert {"kvfolio.h", "attention.cuh", "attention_bfloat16.cu", "ops.cpp"} <= set(SOURCES)


def test_the_wheel_has_one_top_level_package(names):
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kvfolio"}


def test_the_wheel_carries_both_licences(names):
    carried = {Path(name).name for name in names}
    assert {"LICENSE-MIT", "LICENSE-APACHE"} <= carried


def test_the_wheel_serves_every_later_python():
    assert "-cp311-abi3-" in WHEELS[-1].name
