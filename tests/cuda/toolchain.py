"""Where nvcc is, and programs that run kernels in the emulator, built once for each state of the sources."""

from __future__ import annotations

import hashlib
import os
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
COMMON = ["g++", "-std=c++20", "-DKVFOLIO_EMULATED", f"-I{HERE}", f"-I{HERE / 'emulator'}"]
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


def _object(source: Path, options: list[str], headers: Path) -> Path:
    """Compile one source, unless its preprocessed text was compiled with these options before."""
    command = [*COMMON, *WARNINGS, *options, f"-I{headers}"]
    preprocessed = subprocess.run(
        [*command, "-E", "-P", "-x", "c++", str(source)], capture_output=True, check=False
    )
    if preprocessed.returncode != 0:
        raise BuildFailed(preprocessed.stderr.decode())
    digest = hashlib.sha256(repr(options).encode() + preprocessed.stdout).hexdigest()[:20]
    compiled = BUILT / "objects" / f"{source.stem}-{digest}.o"
    if not compiled.exists():
        compiled.parent.mkdir(parents=True, exist_ok=True)
        unfinished = compiled.with_suffix(f".{os.getpid()}")
        run_compiler([*command, "-x", "c++", "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(compiled)
    return compiled


def program(variant: str, main: Path, kernels: list[Path], headers: Path = SOURCES, defines: tuple[str, ...] = ()) -> Path:
    """A program of `main` and kernel sources, compiled for the emulator."""
    if not (CUDA_HOME / "include" / "cuda_bf16.h").exists():
        raise BuildFailed("NVIDIA's headers are not in .cache/cuda: `make .cache/cuda/.installed` fetches them")
    instrumented, told = VARIANTS[variant]
    options = [f"-D{define}" for define in defines]
    objects = [_object(source, [*instrumented, *options], headers) for source in (main, *kernels)]
    objects += [_object(s, ["-O2", *told], headers) for s in sorted((HERE / "emulator").glob("*.cpp"))]
    digest = hashlib.sha256(" ".join(o.name for o in objects).encode()).hexdigest()[:20]
    built = BUILT / f"{main.stem}-{variant}-{digest}"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        run_compiler(["g++", *instrumented, *map(str, objects), "-o", str(unfinished)])
        unfinished.rename(built)
    return built
