"""Builds the CUDA kernels for the GPU at hand when they are first used, and keeps what it built."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import torch

from kvfolio.errors import CudaUnavailable

SOURCES = Path(__file__).parent / "cuda"
_NAME = "kvfolio_cuda"
_lock = threading.Lock()
_loaded: list[Path] = []


def load_cuda() -> Path:
    """Make `torch.ops.kvfolio.*` take CUDA tensors; returns the library that was built, now or before.

    It is kept in ``$KVFOLIO_CACHE_DIR`` (``~/.cache/kvfolio``), one for each state of the sources, build of
    torch and kind of GPU (``$TORCH_CUDA_ARCH_LIST`` where that is set). Building takes nvcc, ninja and g++.

    Raises
    ------
    CudaUnavailable
        Says what is missing, and how to get it.
    """
    with _lock:
        if not _loaded:
            _check_torch()
            architectures = _architectures()
            library = _cache_folder(architectures) / f"{_NAME}.so"
            if not library.exists():
                _build(library, architectures)
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            _loaded.append(library)
        return _loaded[0]


def _check_torch() -> None:
    if torch.version.cuda is None:
        raise CudaUnavailable(
            "torch", f"torch {torch.__version__} was built without CUDA", "pip install torch"
        )
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 10):
        text = f"torch {torch.__version__} is older than 2.10, the first with the stable interface used here"
        raise CudaUnavailable("torch", text, "pip install 'torch>=2.10'")


def _architectures() -> str:
    """As TORCH_CUDA_ARCH_LIST has it; by default those of the GPUs that are visible."""
    told = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if told:
        return told
    if not torch.cuda.is_available():
        text = "no GPU is visible to torch (torch.cuda.is_available())"
        remedy = (
            "a machine with an NVIDIA GPU and its driver (device='cpu' needs neither; "
            "TORCH_CUDA_ARCH_LIST=9.0 only builds, for a GPU that is elsewhere)"
        )
        raise CudaUnavailable("GPU", text, remedy)
    kinds = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if min(kinds) < (8, 0):
        text = f"a GPU has compute capability {'.'.join(map(str, min(kinds)))}"
        raise CudaUnavailable(
            "GPU", text, "the kernels need 8.0 (A100) or later: hide it by CUDA_VISIBLE_DEVICES"
        )
    return ";".join(f"{major}.{minor}" for major, minor in sorted(kinds))


def _cache_folder(architectures: str) -> Path:
    digest = hashlib.sha256(f"{torch.__version__} {architectures} {sys.platform}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    root = os.environ.get("KVFOLIO_CACHE_DIR")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvfolio"
    return base / f"{_NAME}-{digest.hexdigest()[:16]}"


def _find_toolkit() -> tuple[Path, str]:
    """The folder of a CUDA toolkit of torch's release, and its version."""
    wanted = str(torch.version.cuda)
    major = wanted.split(".")[0]
    packages = ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
    remedy = "pip install " + " ".join(f"nvidia-{package}=={wanted}.*" for package in packages)
    places = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found else None
    places += [os.path.join(folder, f"cu{major}") for folder in folders or ()]
    on_path = shutil.which("nvcc")
    places += [str(Path(on_path).resolve().parents[1])] if on_path else []
    places.append("/usr/local/cuda")
    others = []
    for home in map(Path, places):
        nvcc = home / "bin" / "nvcc"
        if not nvcc.exists() or not (home / "include" / "cuda_runtime.h").exists():
            continue
        told = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"release (\d+\.\d+)", told)
        if version and version[1].split(".")[0] == major:
            return home, version[1]
        others.append(f"{nvcc} is {version[1] if version else 'of no release that it tells'}")
    if others:
        raise CudaUnavailable("nvcc", f"torch is of CUDA {wanted}, but {'; '.join(others)}", remedy)
    text = f"no nvcc of CUDA {wanted}, torch's release, in " + ", ".join(map(str, places))
    raise CudaUnavailable("nvcc", f"{text} (set CUDA_HOME if it is elsewhere)", remedy)


def _find_ninja() -> str | None:
    """A folder to be put on PATH for ninja; None if it is there already."""
    if shutil.which("ninja"):
        return None
    for folder in (Path(sys.executable).parent, Path(sys.prefix) / "bin"):
        if (folder / "ninja").exists():
            return str(folder)
    raise CudaUnavailable("ninja", "ninja is not on PATH", "pip install ninja")


def _build(library: Path, architectures: str) -> None:
    home, version = _find_toolkit()
    ninja = _find_ninja()
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise CudaUnavailable("g++", f"{compiler} is not on PATH", "apt-get install g++, or set CXX")
    folder = library.parent
    print(
        f"kvfolio: building the CUDA kernels for {architectures} with nvcc {version}: about half a minute, "
        f"once; kept in {folder}",
        file=sys.stderr,
        flush=True,
    )
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    _link_runtime(home, folder / "lib")
    from torch.utils import cpp_extension

    # Both are asked only when torch is first imported, or not at all where it was built without CUDA.
    before, cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME, str(home)
    variables = {"TORCH_CUDA_ARCH_LIST": architectures}
    if ninja:
        variables["PATH"] = f"{ninja}{os.pathsep}{os.environ.get('PATH', '')}"
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        cpp_extension.load(
            name=_NAME,
            sources=[str(path) for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".cu")],
            extra_cflags=["-O2"],
            extra_cuda_cflags=["-O3", "-std=c++17"],
            extra_ldflags=[f"-L{folder / 'lib'}"],
            build_directory=str(folder),
            is_python_module=False,
            with_cuda=True,
        )
    except RuntimeError as error:
        library.unlink(missing_ok=True)
        raise CudaUnavailable("build", f"the kernels do not build: {error}", "see above") from error
    finally:
        cpp_extension.CUDA_HOME = before
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _link_runtime(home: Path, folder: Path) -> None:
    """The packages from PyPI have the runtime, but not under the name that a linker looks for."""
    link = folder / "libcudart.so"
    for candidate in ("lib64", "lib"):
        for runtime in sorted((home / candidate).glob("libcudart.so*")):
            if not link.is_symlink():
                link.symlink_to(runtime)
            return
