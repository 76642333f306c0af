"""Where nvcc is, and programs that run kernels in the emulator, built once for each state of the sources."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "python" / "kvfolio" / "cuda"
PACKAGES = ROOT / ".cache" / "cuda"  # `make .cache/cuda/.installed` fetches requirements.txt into it
CUDA_HOME = PACKAGES / "nvidia" / "cu13"
NVCC = CUDA_HOME / "bin" / "nvcc"
BUILT = ROOT / "target" / "cuda-emulator"

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-unknown-pragmas", "-Werror"]
COMMON = ["g++", "-std=c++20", "-fPIC", "-DKVFOLIO_EMULATED", f"-I{HERE}", f"-I{HERE / 'emulator'}"]
COMMON += ["-isystem", str(CUDA_HOME / "include")]
# What the kernels are compiled with, and what the emulator is told of it: it is never instrumented itself.
VARIANTS = {
    "plain": (["-O2"], []),
    "asan": (["-O1", "-g", "-fsanitize=address,alignment", "-fno-sanitize-recover=all"], ["-DEMULATOR_ASAN"]),
    "tsan": (["-O1", "-g", "-fsanitize=thread"], ["-DEMULATOR_TSAN"]),
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0:exitcode=71",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=71",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=72:report_signal_unsafe=0",
}


class BuildFailed(Exception):
    """A compiler's complaint."""


def run_compiler(command: list[str]) -> str:
    """Run it; returns what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _texts(source: Path, folders: list[Path], seen: set[Path]) -> bytes:
    """Of a source and of what it includes of ours."""
    seen.add(source)
    text = source.read_bytes()
    for name in re.findall(rb'#include ["<]([\w./]+)[">]', text):
        for folder in (source.parent, *folders):
            included = folder / name.decode()
            if included.exists() and included not in seen:
                text += _texts(included, folders, seen)
                break
    return text


def _compiled(source: Path, options: list[str], folders: list[Path], language: str, suffix: str) -> Path:
    """Compile one source, unless the same text was compiled with these options before."""
    command = [*COMMON, *WARNINGS, *options, *(f"-I{folder}" for folder in folders)]
    text = _texts(source, [HERE, HERE / "emulator", *folders], set())
    digest = hashlib.sha256(repr((COMMON, WARNINGS, options)).encode() + text).hexdigest()[:20]
    compiled = BUILT / "objects" / f"{source.stem}-{digest}{suffix}"
    if not compiled.exists():
        compiled.parent.mkdir(parents=True, exist_ok=True)
        unfinished = compiled.with_suffix(f".{os.getpid()}")
        run_compiler([*command, "-x", language, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(compiled)
    return compiled


def _precompiled(options: list[str]) -> list[str]:
    """The emulator's headers, and NVIDIA's, are most of what there is to compile: once for each variant."""
    made = _compiled(HERE / "emulator" / "precompiled.hpp", options, [], "c++-header", ".hpp.gch")
    return ["-include", str(made.with_suffix("")), "-Winvalid-pch"]


def program(
    variant: str, main: Path, kernels: list[Path], headers: Path = SOURCES, defines: tuple[str, ...] = ()
) -> Path:
    """A program of `main` and kernel sources, compiled for the emulator."""
    if not (CUDA_HOME / "include" / "cuda_bf16.h").exists():
        raise BuildFailed(
            "NVIDIA's headers are not in .cache/cuda: `make .cache/cuda/.installed` fetches them"
        )
    instrumented, _ = VARIANTS[variant]
    options = [*instrumented, *_precompiled(instrumented), *(f"-D{define}" for define in defines)]
    objects = [_compiled(source, options, [headers], "c++", ".o") for source in (main, *kernels)]
    return _linked(f"{main.stem}-{variant}", [*objects, *_emulator(variant)], instrumented)


def operators(include: list[str], libraries: list[str]) -> Path:
    """A library of operators over the emulated kernels; torch has its headers and libraries there."""
    options = [*VARIANTS["plain"][0], *_precompiled(VARIANTS["plain"][0])]
    kernels = [_compiled(source, options, [SOURCES], "c++", ".o") for source in sorted(SOURCES.glob("*.cu"))]
    headers = ["-O1", *(word for folder in include for word in ("-isystem", folder))]
    binding = _compiled(SOURCES / "ops.cpp", headers, [SOURCES], "c++", ".o")
    link = [
        "-shared",
        "-Wl,--no-as-needed",
        *(f"-L{folder}" for folder in libraries),
        "-ltorch",
        "-ltorch_cpu",
    ]
    return _linked("operators", [binding, *kernels, *_emulator("plain")], link)


def _emulator(variant: str) -> list[Path]:
    options = ["-O2", *VARIANTS[variant][1]]
    return [_compiled(s, options, [], "c++", ".o") for s in sorted((HERE / "emulator").glob("*.cpp"))]


def _linked(name: str, objects: list[Path], options: list[str]) -> Path:
    digest = hashlib.sha256(repr(([o.name for o in objects], options)).encode()).hexdigest()[:20]
    built = BUILT / f"{name}-{digest}"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        run_compiler(["g++", *options, *map(str, objects), "-o", str(unfinished)])
        unfinished.rename(built)
    return built


DTYPES = ("bfloat16", "float16", "float32")


def runner(
    variant: str, headers: Path = SOURCES, dtypes: tuple[str, ...] = DTYPES, defines: tuple[str, ...] = ()
) -> Path:
    """The program that harness.py runs, with attention of some storage types; the others are refused."""
    others = [
        f"int attend_{name}(const kvfolio_attention&, void*) {{ return -1; }}\n"
        for name in DTYPES
        if name not in dtypes
    ]
    stubs = BUILT / f"stubs-{'-'.join(dtypes)}.cpp"
    BUILT.mkdir(parents=True, exist_ok=True)
    text = f'#include "kvfolio.h"\nnamespace kvfolio {{\n{"".join(others)}}}\n'
    if not stubs.exists() or stubs.read_text() != text:
        stubs.write_text(text)
    kernels = [headers / f"{name}.cu" for name in ("cache", "attention", *(f"attention_{d}" for d in dtypes))]
    return program(variant, HERE / "runner.cpp", [*kernels, stubs], headers, defines)
