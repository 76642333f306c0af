"""Where nvcc is, and programs that run kernels in the emulator, built once for each state of the sources."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import programs

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
# What kernels are compiled with; of what is debugged, lines are enough.
VARIANTS = {
    "plain": ["-O1"],
    "asan": ["-O1", "-g1", "-fsanitize=address,alignment", "-fno-sanitize-recover=all"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread"],
}
DTYPES = ("bfloat16", "float16", "float32")
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0:exitcode=71",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=71",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=72:report_signal_unsafe=0",
}


class BuildFailed(Exception):
    """A compiler's complaint."""


def run_compiler(what: str, command: list[str]) -> str:
    """Run it; returns what it said."""
    status, out, err = programs.run(what, command)
    if status != 0:
        raise BuildFailed(f"{' '.join(command)}\n{out}{err}")
    return out + err


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
        what = f"g++ {source.stem}"
        run_compiler(what, [*command, "-x", language, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(compiled)
    return compiled


def together(name: str, sources: list[str], more: str = "") -> Path:
    """A source of these sources: headers are most of what there is to compile, and are compiled once then."""
    text = "".join(f'#include "{source}"\n' for source in sources) + more
    source = BUILT / "sources" / name
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return source


def kernel_sources(dtypes: tuple[str, ...] = DTYPES) -> list[str]:
    """All of the kernels, with attention of some storage types."""
    return ["cache.cu", "attention.cu", *(f"attention_{dtype}.cu" for dtype in dtypes)]


def _precompiled(variant: str) -> list[str]:
    """The emulator's headers, and NVIDIA's, once for each variant."""
    options = VARIANTS[variant]
    made = _compiled(HERE / "emulator" / "precompiled.hpp", options, [], "c++-header", ".hpp.gch")
    return [*options, "-include", str(made.with_suffix("")), "-Winvalid-pch"]


def _kernels(variant: str, headers: Path, dtypes: tuple[str, ...], defines: tuple[str, ...]) -> Path:
    refused = "".join(
        f"int attend_{name}(const kvfolio_attention&, void*) {{ return KVFOLIO_UNSUPPORTED; }}\n"
        for name in DTYPES
        if name not in dtypes
    )
    name = f"kernels-{'-'.join(dtypes)}.cpp"
    source = together(name, kernel_sources(dtypes), f"namespace kvfolio {{\n{refused}}}\n")
    options = [*_precompiled(variant), *(f"-D{define}" for define in defines)]
    return _compiled(source, options, [headers], "c++", ".o")


def _emulator() -> Path:
    """Without a sanitizer, and for all: it asks which one the program has."""
    sources = sorted(path.name for path in (HERE / "emulator").glob("*.cpp"))
    return _compiled(together("emulator.cpp", sources), ["-O2"], [HERE / "emulator"], "c++", ".o")


def _linked(name: str, objects: list[Path], options: list[str]) -> Path:
    digest = hashlib.sha256(repr(([o.name for o in objects], options)).encode()).hexdigest()[:20]
    built = BUILT / f"{name}-{digest}"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        run_compiler("linker", ["g++", *options, *map(str, objects), "-o", str(unfinished)])
        unfinished.rename(built)
    return built


def _check_headers() -> None:
    if not (CUDA_HOME / "include" / "cuda_bf16.h").exists():
        raise BuildFailed(
            "NVIDIA's headers are not in .cache/cuda: `make .cache/cuda/.installed` fetches them"
        )


def program(variant: str, main: Path) -> Path:
    """A program of one source that has kernels itself."""
    _check_headers()
    compiled = _compiled(main, _precompiled(variant), [], "c++", ".o")
    return _linked(f"{main.stem}-{variant}", [compiled, _emulator()], VARIANTS[variant])


def runner(
    variant: str, headers: Path = SOURCES, dtypes: tuple[str, ...] = DTYPES, defines: tuple[str, ...] = ()
) -> Path:
    """The program that harness.py runs, with attention of some storage types; the others are refused."""
    _check_headers()
    kernels = _kernels(variant, headers, dtypes, defines)
    main = _compiled(HERE / "runner.cpp", ["-O1"], [SOURCES], "c++", ".o")
    return _linked(f"runner-{variant}", [kernels, main, _emulator()], VARIANTS[variant])


def operators(include: list[str], libraries: list[str]) -> Path:
    """A library of operators over the emulated kernels; torch has its headers and libraries there."""
    _check_headers()
    kernels = _kernels("plain", SOURCES, DTYPES, ())
    headers = ["-O0", *(word for folder in include for word in ("-isystem", folder))]
    binding = _compiled(SOURCES / "ops.cpp", headers, [SOURCES], "c++", ".o")
    folders = [f"-L{folder}" for folder in libraries]
    link = ["-shared", "-Wl,--no-as-needed", *folders, "-ltorch", "-ltorch_cpu"]
    return _linked("operators", [binding, kernels, _emulator()], link)
