"""What is in the wheel that the tests run on. `make wheel` checks what else a release needs."""

import json
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEELS = sorted((ROOT / "target" / "wheel").glob("kvfolio-*.whl"))

SOURCES = [path.name for path in (ROOT / "cuda").iterdir()]

pytestmark = pytest.mark.skipif(not WHEELS, reason="no wheel in target/wheel: `make test-python` builds it")


@pytest.fixture(scope="module")
def wheel():
    with zipfile.ZipFile(WHEELS[-1]) as wheel:
        yield wheel


@pytest.fixture(scope="module")
def names(wheel):
    return wheel.namelist()


@pytest.fixture(scope="module")
def linked_crates():
    """(name, version) of every crate of others that is linked, or whose macros' output is."""
    command = ["cargo", "tree", "--locked", "-p", "kvfolio-py", "-e", "normal", "--prefix", "none"]
    tree = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    crates = set(re.findall(r"^(\S+) v(\S+)", tree, flags=re.MULTILINE))
    return {(name, version) for name, version in crates if not name.startswith("kvfolio")}


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


def test_the_wheel_carries_the_licence_of_every_crate_in_it(wheel, names, linked_crates):
    (path,) = (name for name in names if name.endswith("/LICENSE-THIRD-PARTY"))
    licensed = re.findall(r"^- (\S+) ([^\s,]+)", wheel.read(path).decode(), flags=re.MULTILINE)
    assert len(linked_crates) > 40
    # `make licenses` collects them anew.
    assert linked_crates - set(licensed) == set()


def test_the_wheel_carries_a_bill_of_what_is_in_it(wheel, names, linked_crates):
    (path,) = (name for name in names if "/sboms/" in name)
    bill = json.loads(wheel.read(path))
    assert bill["bomFormat"] == "CycloneDX"
    assert linked_crates <= {(component["name"], component["version"]) for component in bill["components"]}


def test_the_wheel_serves_every_later_python():
    assert "-cp311-abi3-" in WHEELS[-1].name
