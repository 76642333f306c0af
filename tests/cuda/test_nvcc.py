"""The kernels compiled for real: no warnings, no spills, and the registers that docs/cuda.md counts with."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import programs
import pytest
import toolchain

HEAD_DIMS = (64, 128, 256)
DTYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
# For sm_80 and sm_90 one front end is enough: the kernels ask for nothing of 9.0, and registers come out the
# same. (test_build.py has the front end for 9.0.) sm_100 has a call of its own, for as much as time allows.
BUILDS = {
    "compute_80,code=[sm_80,sm_90]": (tuple(DTYPES), ["-Xcompiler", "-Wall,-Wextra,-Werror", "-c"]),
    "compute_100,code=sm_100": (("bfloat16",), ["-cubin"]),
}
ARCHITECTURES = {80: tuple(DTYPES), 90: tuple(DTYPES), 100: ("bfloat16",)}
FLAGS = ["-std=c++17", "-O3", "-Xptxas", "-v", "-Werror", "all-warnings"]
ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def entries(target):
    """What ptxas says of each kernel: mangled name, architecture, bytes of stores and loads, registers."""
    dtypes, options = BUILDS[target]
    flags = [*FLAGS, *options, f"-gencode=arch={target}"]
    sources = sorted(p for p in toolchain.SOURCES.iterdir() if p.suffix in (".cu", ".cuh", ".h"))
    text = b"".join(p.read_bytes() for p in sources)
    key = hashlib.sha256(repr((flags, dtypes)).encode() + text).hexdigest()[:20]
    kept = toolchain.BUILT / "nvcc" / f"kernels-{key}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        source = toolchain.together(f"kernels-{'-'.join(dtypes)}.cu", toolchain.kernel_sources(dtypes))
        command = [str(toolchain.NVCC), *flags, f"-I{toolchain.SOURCES}", str(source)]
        said = toolchain.run_compiler("nvcc", [*command, "-o", str(kept.with_suffix(".o"))])
        found = ENTRY.findall(said)
        assert said.count("Compiling entry function") == len(found), said
        kept.write_text(json.dumps([[name, *map(int, numbers)] for name, *numbers in found]))
    return json.loads(kept.read_text())


@pytest.fixture(scope="module")
def report():
    """(short name, architecture) -> spilled bytes and registers."""
    if not toolchain.NVCC.exists():
        pytest.fail("nvcc is not in .cache/cuda: `make .cache/cuda/.installed` fetches it")
    with ThreadPoolExecutor(2) as workers:
        told = [entry for part in workers.map(entries, BUILDS) for entry in part]
    _, plain, _ = programs.run("c++filt", ["c++filt", *(name for name, *_ in told)])
    found = {}
    for text, (_, architecture, stores, loads, registers) in zip(plain.splitlines(), told, strict=True):
        short = re.sub(r"^void |kvfolio::|\(.*", "", text)
        found[short, architecture] = (stores + loads, registers)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_compiled_for_every_architecture(report, architecture):
    expected = {"update_table_kernel", "plan_attention_kernel"}
    for word in ("uint4", "unsigned int", "unsigned short"):
        expected |= {f"append_kernel<{word}>", f"copy_blocks_kernel<{word}>"}
    for kind in (DTYPES[dtype] for dtype in ARCHITECTURES[architecture]):
        for head_dim in HEAD_DIMS:
            expected |= {f"attention_kernel<{kind}, {head_dim}, {warps}>" for warps in (1, 4)}
            expected |= {f"merge_kernel<{kind}, {head_dim}>"}
    assert {name for name, a in report if a == architecture} == expected


def test_nothing_is_spilled(report):
    assert {key: value for key, value in report.items() if value[0]} == {}


def test_the_documented_registers_are_those_of_this_build(report):
    text = (toolchain.ROOT / "docs" / "cuda.md").read_text()
    rows = re.findall(r"^\| (\w+), (\d+) \| (\d+ / .*) \| (.*) \|$", text, re.MULTILINE)
    built = []
    for dtype, kind in DTYPES.items():
        for head_dim in HEAD_DIMS:
            kernels = [f"attention_kernel<{kind}, {head_dim}, {warps}>" for warps in (1, 4)]
            numbers = [
                " / ".join(str(report[kernel, a][1]) if (kernel, a) in report else "-" for a in ARCHITECTURES)
                for kernel in kernels
            ]
            built.append((dtype, str(head_dim), *numbers))
    assert rows == built
