"""The library of operators: built, linked and loaded without a GPU; and what is said where that cannot be."""

from __future__ import annotations

import os
import re
import stat
import sys

import programs
import pytest
import toolchain

torch = pytest.importorskip("torch")

import kvfolio as kv  # noqa: E402
from kvfolio import _cuda_build  # noqa: E402

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")

LOADER = """
import ctypes, sys
import torch
from kvfolio import ops
library = ops.load_cuda()
assert ops.load_cuda() == library
for name in ("append", "copy_blocks", "update_table", "plan_attention", "attend"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kvfolio::{name}", "CUDA"), name
class Workspace(ctypes.Structure):
    _fields_ = [("parts", ctypes.c_int64 * 6), ("bytes", ctypes.c_int64)]
of = ctypes.CDLL(str(library)).kvfolio_cuda_workspace
of.restype, of.argtypes = Workspace, [ctypes.c_int64] * 2 + [ctypes.c_int32] * 4
for sequences, tokens, heads, kv_heads, head_dim, extra in (
    (1, 1, 8, 8, 64, 0), (256, 256, 32, 4, 128, 50), (9, 8192, 64, 8, 256, 16), (3, 17, 17, 1, 128, 1)
):
    told = ops.workspace_bytes(sequences, tokens, heads, kv_heads, head_dim, extra)
    assert told == of(sequences, tokens, kv_heads, heads // kv_heads, head_dim, extra).bytes
print(library)
"""


def test_the_library_is_built_once_and_loaded_without_a_gpu(monkeypatch, capfd):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVFOLIO_CACHE_DIR", str(toolchain.BUILT / "library"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    path = f"{toolchain.PACKAGES / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # Heads of 64 elements only, and no optimisation: test_nvcc compiles all of it.
    compilers = {
        "CUDA_HOME": str(toolchain.CUDA_HOME),
        "PATH": path,
        "NVCC_APPEND_FLAGS": "-DKVFOLIO_HEAD_DIMS=64 -Xcicc -O0 -Xptxas -O0 -Werror all-warnings",
    }
    command = [sys.executable, "-c", LOADER]
    status, built, said = programs.run("the library, built", command, os.environ | compilers)
    assert status == 0, said
    assert not said or re.search(
        r"building the CUDA kernels for 9\.0 with nvcc 13\.\d+: .* kept in .*library", said
    )
    # Now there is no need for a compiler, and nothing to be said.
    monkeypatch.setattr(_cuda_build, "_loaded", [])
    monkeypatch.setattr(_cuda_build, "_build", lambda *arguments: pytest.fail("it is built again"))
    monkeypatch.setenv("PATH", "")
    assert str(_cuda_build.load_cuda()) == built.strip()
    assert capfd.readouterr() == ("", "")


class TestWhatIsMissing:
    @pytest.fixture(autouse=True)
    def nothing_there(self, monkeypatch, tmp_path):
        """No toolkit, no ninja, nothing built."""
        monkeypatch.setenv("KVFOLIO_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
        monkeypatch.setenv("PATH", str(tmp_path))
        for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(_cuda_build, "_loaded", [])
        monkeypatch.setattr(_cuda_build.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(_cuda_build.sys, "executable", str(tmp_path / "python"))
        monkeypatch.setattr(_cuda_build.sys, "prefix", str(tmp_path))

    def refusal(self):
        with pytest.raises(kv.CudaUnavailable) as caught:
            kv.KVCache(kv.BlockPool(4, 4), 1, 1, 64, device="cuda")
        return caught.value

    def toolkit(self, tmp_path, version):
        nvcc, header = tmp_path / "cuda" / "bin" / "nvcc", tmp_path / "cuda" / "include" / "cuda_runtime.h"
        for file in (nvcc, header):
            file.parent.mkdir(parents=True)
        header.touch()
        nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {version}, V{version}.1\n")
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IEXEC)
        return nvcc.parents[1]

    def program(self, tmp_path, name):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)

    def test_nvcc(self):
        error = self.refusal()
        assert error.missing == "nvcc" and f"no nvcc of CUDA {torch.version.cuda}" in error.reason
        for package in ("nvcc", "crt", "runtime", "cccl"):
            assert f"nvidia-cuda-{package}=={torch.version.cuda}.*" in error.remedy
        assert "set CUDA_HOME" in str(error)

    def test_nvcc_of_another_release(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CUDA_HOME", str(self.toolkit(tmp_path, "11.8")))
        error = self.refusal()
        assert error.missing == "nvcc" and "bin/nvcc is 11.8" in error.reason
        assert f"torch is of CUDA {torch.version.cuda}" in str(error) and "pip install" in error.remedy

    def test_ninja(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CUDA_HOME", str(self.toolkit(tmp_path, torch.version.cuda)))
        error = self.refusal()
        assert (error.missing, error.remedy) == ("ninja", "pip install ninja")

    def test_a_compiler_of_the_host(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CUDA_HOME", str(self.toolkit(tmp_path, torch.version.cuda)))
        self.program(tmp_path, "ninja")
        error = self.refusal()
        assert error.missing == "g++" and "g++ is not on PATH" in error.reason

    def test_a_gpu(self, monkeypatch):
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert self.refusal().missing == "GPU"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (7, 5))
        assert "compute capability 7.5" in str(self.refusal())

    def test_cuda_in_torch(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        error = self.refusal()
        assert error.missing == "torch" and "was built without CUDA" in error.reason

    def test_a_recent_torch(self, monkeypatch):
        monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
        assert "older than 2.10" in str(self.refusal())
