"""The kernels compiled for real: no warnings, no spills, and the registers that docs/cuda.md counts with."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import toolchain

# float16 and bfloat16 are one template, so one of them is enough where it takes long.
ARCHITECTURES = {
    "cache": (80, 90, 100),
    "attention": (80, 90, 100),
    "attention_bfloat16": (80, 90, 100),
    "attention_float16": (90,),
    "attention_float32": (90,),
}
DEFINES = {"attention_float16": ["-DKVFOLIO_HEAD_DIMS=128"]}
FLAGS = [
    "-std=c++17",
    "-O3",
    "-Xptxas",
    "-v",
    "-Werror",
    "all-warnings",
    "-Xcompiler",
    "-Wall,-Wextra,-Werror",
]
ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def compiled(name):
    """What ptxas says of each kernel of a source, kept until a source changes."""
    sources = sorted(p for p in toolchain.SOURCES.iterdir() if p.suffix in (".cu", ".cuh", ".h"))
    text = b"".join(p.read_bytes() for p in sources if p.suffix != ".cu" or p.stem == name)
    key = hashlib.sha256(repr((FLAGS, ARCHITECTURES[name], DEFINES.get(name))).encode() + text).hexdigest()[
        :20
    ]
    kept = toolchain.BUILT / "nvcc" / f"{name}-{key}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES[name]]
        source, target = toolchain.SOURCES / f"{name}.cu", kept.with_suffix(".o")
        said = toolchain.run_compiler(
            [
                str(toolchain.NVCC),
                *FLAGS,
                *DEFINES.get(name, ()),
                *targets,
                "-c",
                str(source),
                "-o",
                str(target),
            ]
        )
        names = subprocess.run(["c++filt"], input=said, capture_output=True, text=True, check=True).stdout
        assert said.count("Compiling entry function") == len(ENTRY.findall(said)), names
        kept.write_text(json.dumps([[n, *map(int, numbers)] for n, *numbers in ENTRY.findall(said)]))
    return json.loads(kept.read_text())


@pytest.fixture(scope="module")
def report():
    """(short name, architecture) -> spilled bytes and registers."""
    if not toolchain.NVCC.exists():
        pytest.fail("nvcc is not in .cache/cuda: `make .cache/cuda/.installed` fetches it")
    with ThreadPoolExecutor(2) as workers:
        entries = [entry for part in workers.map(compiled, ARCHITECTURES) for entry in part]
    mangled = "\n".join(name for name, *_ in entries)
    plain = subprocess.run(
        ["c++filt"], input=mangled, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    found = {}
    for text, (_, architecture, stores, loads, registers) in zip(plain, entries, strict=True):
        short = re.sub(r"^void |kvfolio::|\(.*|__nv_", "", text.replace("__half", "float16"))
        found[short, architecture] = (stores + loads, registers)
    (toolchain.BUILT / "registers.json").write_text(
        json.dumps({f"{name} sm_{a}": v for (name, a), v in sorted(found.items())}, indent=1)
    )
    return found


def test_every_kernel_is_compiled_for_every_architecture(report):
    for architecture in (80, 90, 100):
        names = {name for name, a in report if a == architecture}
        assert {
            "update_table_kernel",
            "plan_attention_kernel",
            "append_kernel<uint4>",
            "copy_blocks_kernel<uint4>",
        } <= names
        for head_dim in (64, 128, 256):
            assert f"merge_kernel<bfloat16, {head_dim}>" in names
            assert {f"attention_kernel<bfloat16, {head_dim}, {warps}>" for warps in (1, 4)} <= names
    assert {
        ("attention_kernel<float16, 128, 1>", 90),
        ("attention_kernel<float, 256, 1>", 90),
    } <= report.keys()


def test_nothing_is_spilled(report):
    assert {key: value for key, value in report.items() if value[0]} == {}


def test_the_documented_registers_are_those_of_this_build(report):
    text = (toolchain.ROOT / "docs" / "cuda.md").read_text()
    rows = re.findall(
        r"^\| (\w+), (\d+) \| (\d+) / (\d+) / (\d+) \| (\d+) / (\d+) / (\d+) \|", text, re.MULTILINE
    )
    assert len(rows) == 3
    for dtype, head_dim, *numbers in rows:
        for i, number in enumerate(numbers):
            warps, architecture = (1, 4)[i // 3], (80, 90, 100)[i % 3]
            assert report[f"attention_kernel<{dtype}, {head_dim}, {warps}>", architecture][1] == int(number)
